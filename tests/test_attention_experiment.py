"""Notebook 05's experiment: its grid, a case that is what its label says, and no time for a wrong
result.
"""

import dataclasses
import functools
import itertools

import chapters
import pytest
import torch
from chapters import CPU, H200_BYTES, in_section, on_a_cpu

from labkit import accounting, published
from labkit.configs import ATTENTION, MATERIALISING
from labkit.experiments import attention as experiment
from labkit.experiments.attention import AttentionCall, cases, run_case
from labkit.experiments.sweep import Case, Skip
from labkit.kernels.attention import attention
from labkit.kernels.reference import attention_reference

ELEMENT_BYTES = {"fp32": 4, "bf16": 2}
KINDS = {"eager": "eager", "sdpa_math": "math", "sdpa_flash": "fused"}
"""The closed form of `accounting` for what each implementation keeps."""


@pytest.fixture(autouse=True)
def this_device_is_a_cpu(monkeypatch):
    yield from on_a_cpu(monkeypatch)


def parameters(impl="eager", precision="fp32", d_head=16, length=32, batch=8) -> dict:
    return {
        "impl": impl,
        "precision": precision,
        "d_head": d_head,
        "length": length,
        "batch": batch,
    }


def case(**chosen) -> Case:
    return Case(
        "attention", parameters(**chosen), ("forward", "backward"), 60.0, 0.01, stop_at_failure=True
    )


measure = functools.partial(chapters.measure, run_case)


def calls(profile: str) -> list[dict]:
    return [one.parameters for one in in_section(cases(profile, "cuda"), "attention")]


def test_full_is_every_head_dimension_and_length_of_the_published_grid_in_every_series():
    table = published.load("attention_pytorch")
    theirs = {
        (d_head, length) for d_head, length in zip(table["d_model"], table["seq_len"], strict=True)
    }
    assert len(theirs) == 20
    for precision, impls in ATTENTION["full"].series.items():
        for impl in impls:
            own = [c for c in calls("full") if (c["impl"], c["precision"]) == (impl, precision)]
            assert theirs <= {(c["d_head"], c["length"]) for c in own}, (precision, impl)
    assert set(table["batch_size"]) == {c["batch"] for c in calls("full")} == {8}


def test_full_has_every_sdpa_backend_in_both_precisions_and_tf32_compiled_only():
    series = {(c["impl"], c["precision"]) for c in calls("full")}
    backends = ("sdpa_math", "sdpa_flash", "sdpa_cudnn", "sdpa_efficient")
    expected = {
        (impl, precision)
        for impl in ("eager", "compiled", *backends)
        for precision in ("fp32", "bf16")
    }
    assert series == expected | {
        ("compiled", "tf32"),
        ("compiled_heads", "fp32"),
        ("compiled_heads", "bf16"),
    }


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_full_goes_on_past_the_memory_of_an_h200(precision):
    """For eager with every head dimension, as the accounting has it."""
    own = [c for c in calls("full") if (c["impl"], c["precision"]) == ("eager", precision)]
    for d_head in ATTENTION["full"].d_heads:
        shapes = [
            (8, c["length"], d_head, ELEMENT_BYTES[precision]) for c in own if c["d_head"] == d_head
        ]
        needs = [
            accounting.attention_peak_bytes("backward", *shape, device_kind="cuda")
            for shape in shapes
        ]
        assert needs[0] < H200_BYTES < needs[-1]


def test_a_backward_pass_is_not_tried_after_a_failed_forward_pass():
    found = in_section(cases("full", "cuda"), "attention")
    assert {(one.phases, one.stop_at_failure) for one in found} == {(("forward", "backward"), True)}


def test_a_grid_is_narrowed():
    found = in_section(cases("full", "cuda", lengths=[256], d_heads=[64]), "attention")
    narrowed = [one.parameters for one in found]
    assert narrowed == [c for c in calls("full") if (c["length"], c["d_head"]) == (256, 64)]
    assert len(narrowed) > 10


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("impl", ["eager", "sdpa_math", "sdpa_flash"])
def test_a_case_gives_times_bytes_and_errors_under_its_own_label(impl, precision):
    one = case(impl=impl, precision=precision)
    measured = measure(one)
    assert list(measured) == ["forward", "backward"]
    for phase in measured.values():
        assert phase.case == one.parameters
        assert phase.metrics["median_ms"] > 0 and phase.metrics["n"] >= 3
        assert phase.observed["dtype"] == {"fp32": "float32", "bf16": "bfloat16"}[precision]
        assert phase.observed["memory_source"] == "tensors of the autograd graph"
    kind = KINDS[impl]
    shape = (8, 32, 16, ELEMENT_BYTES[precision])
    forward = measured["forward"].metrics
    assert forward["saved_bytes"] == accounting.attention_saved_bytes(kind, *shape)
    # Of inputs and output: math in fp32 keeps v, which needs no scaling.
    not_kept = {"fused": 0, "eager": 1, "math": 3 if precision == "fp32" else 4}[kind]
    row_bytes = 8 * 32 * 16 * ELEMENT_BYTES[precision]
    assert forward["in_use_bytes"] == forward["saved_bytes"] + not_kept * row_bytes
    names = {name for name in measured["backward"].metrics if name.endswith("_error")}
    assert names == {"dq_relative_error", "dk_relative_error", "dv_relative_error"}
    for phase in measured.values():
        errors = [value for name, value in phase.metrics.items() if name.endswith("_error")]
        assert all(0 < error < experiment.LARGEST_ERROR[precision] for error in errors)


@pytest.mark.parametrize("impl", ["eager", "sdpa_flash"])
def test_a_masked_case_is_held_to_the_masked_oracle(impl):
    masked = dataclasses.replace(
        case(impl=impl), section="masked", parameters={**parameters(impl), "causal": True}
    )
    for phase in measure(masked).values():
        assert phase.case == masked.parameters and phase.metrics["median_ms"] > 0
    call = AttentionCall(CPU, {**parameters(impl), "causal": True})
    assert torch.allclose(call.forward()[:, 0], call.inputs[2][:, 0]), (
        "the first query sees the first key alone"
    )
    call.function = lambda *tensors, causal: attention_reference(*tensors)
    with pytest.raises(AssertionError, match="output_relative_error is"):
        call.errors("forward")


def test_masked_cases_are_of_one_length_and_each_has_its_unmasked_one():
    masked = [one.parameters for one in in_section(cases("full", "cuda"), "masked")]
    assert len(masked) == 12 and {one["length"] for one in masked} == {16384}
    assert all({k: v for k, v in one.items() if k != "causal"} in calls("full") for one in masked)
    assert "compiled" not in {
        one.parameters["impl"] for one in in_section(cases("smoke", "cpu"), "masked")
    }


def test_a_label_that_is_not_what_ran_is_not_its_case():
    flash = functools.partial(attention, impl="sdpa_flash")
    for impl, wrong in (("sdpa_flash", attention_reference), ("eager", flash)):
        assert AttentionCall(CPU, parameters(impl=impl)).described() == parameters(impl=impl)
        call = AttentionCall(CPU, parameters(impl=impl))
        call.function = wrong
        assert call.described() != parameters(impl=impl)


@pytest.mark.parametrize("impl", ["sdpa_cudnn", "sdpa_efficient"])
def test_a_backend_that_refuses_is_skipped_with_its_reason(impl):
    with pytest.raises(Skip, match="No viable backend"):
        measure(case(impl=impl))


def test_tf32_is_skipped_where_there_is_none():
    with pytest.raises(Skip, match="a processor has no TF32"):
        measure(case(impl="compiled", precision="tf32"))


def test_an_unknown_implementation_is_refused():
    with pytest.raises(
        ValueError, match="unknown implementation 'magic'; accepted: eager, compiled"
    ):
        AttentionCall(CPU, parameters(impl="magic"))


def test_what_cannot_be_the_first_out_of_memory_is_skipped(monkeypatch):
    """The shortest length that does not fit is tried; where half of it does not fit either, nothing
    is.
    """
    monkeypatch.setattr(experiment, "memory_bytes", lambda device: 24 * 10**9)
    tried = {}
    for impl, precision in itertools.product(MATERIALISING, ("fp32", "bf16")):
        for length in (4096, 8192, 16384, 32768, 65536):
            try:
                experiment._require_room(CPU, parameters(impl, precision, length=length))
                tried[impl, precision] = length
            except Skip as skip:
                assert f"at length {length // 2} the scores alone take" in str(skip)
    # 8 · 32768² · 4 B are 34 GB, 8 · 32768² · 2 B are 17 GB: the math backend computes in fp32.
    assert tried == {
        ("eager", "fp32"): 32768,
        ("eager", "bf16"): 65536,
        ("compiled", "fp32"): 32768,
        ("compiled", "bf16"): 65536,
        ("sdpa_math", "fp32"): 32768,
        ("sdpa_math", "bf16"): 32768,
    }
    experiment._require_room(CPU, parameters("sdpa_flash", length=2**20))


def test_a_compiled_transformers_case_is_notebook_01s(monkeypatch):
    """Only what notebook 01 lacks is measured: the backward pass alone, by notebook 01's own
    code.
    """
    found = in_section(cases("full", "cuda"), "transformer")
    assert {one.phases for one in found} == {("backward",)}
    assert {one.parameters["compile"] for one in found} == {"regional"}
    steps = [
        (n, precision)
        for n, those in ATTENTION["full"].model_precisions.items()
        for precision in those
    ]
    assert steps == [(128, "fp32"), (512, "fp32"), (512, "bf16")]
    seen = {
        (one.parameters["size"], (one.parameters["context"], one.parameters["precision"]))
        for one in found
    }
    assert seen == set(itertools.product(ATTENTION["full"].model_sizes, steps))
    small = {**found[0].parameters, "size": "nano", "context": 32, "compile": "none"}
    measured = measure(dataclasses.replace(found[0], parameters=small, time_limit_s=0.01))
    assert list(measured) == ["backward"]
    assert measured["backward"].case == small and measured["backward"].metrics["median_ms"] > 0


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_wrong_result_in_the_last_sequence_gives_no_time(phase):
    call = AttentionCall(CPU, parameters())

    def wrong(q, k, v):
        factor = torch.ones(q.shape[0], 1, 1)
        factor[-1] = 1.01
        right = attention_reference(q, k, v)
        # In the backward pass alone: the value is right, its gradient is not.
        return (
            right * factor
            if phase == "forward"
            else right.detach() + (right - right.detach()) * factor
        )

    assert call.errors(phase)
    call.function = wrong
    with pytest.raises(
        AssertionError, match=r"eager: (output|dq)_relative_error is 0.01, more than 0.0001"
    ):
        call.errors(phase)


def test_a_result_that_is_not_a_number_gives_no_time():
    call = AttentionCall(CPU, parameters())
    call.function = lambda q, k, v: attention_reference(q, k, v) * float("nan")
    with pytest.raises(AssertionError, match="is nan, more than"):
        call.errors("forward")
