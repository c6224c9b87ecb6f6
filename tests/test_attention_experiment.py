"""Notebook 05's experiment: its grid, a case that is what its label says, and no time for a wrong
result.
"""

import functools

import chapters
import pytest
import torch
from chapters import CPU

from labkit import accounting
from labkit.experiments.attention import AttentionCall, run_case
from labkit.experiments.contest import Implementation
from labkit.experiments.sweep import Case, Skip
from labkit.kernels.reference import attention_reference

KINDS = {"eager": "eager", "sdpa_math": "math", "sdpa_flash": "fused"}
"""The closed form of `accounting` for what each implementation keeps."""


pytestmark = pytest.mark.usefixtures("on_a_cpu")


def parameters(**changes) -> dict:
    call = {"impl": "eager", "precision": "fp32", "d_head": 16, "length": 32, "batch": 8}
    return call | changes


def case(section="attention", **chosen) -> Case:
    return Case(section, parameters(**chosen), ("forward", "backward"), 60.0, 0.01)


measure = functools.partial(chapters.measure, run_case)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("impl", KINDS)
def test_a_case_gives_times_bytes_and_errors_under_its_own_label(impl, precision):
    one = case(impl=impl, precision=precision)
    measured = measure(one)
    assert list(measured) == ["forward", "backward"]
    for phase in measured.values():
        assert phase.case == one.parameters and phase.metrics["median_ms"] > 0
    shape = (8, 32, 16, {"fp32": 4, "bf16": 2}[precision])
    forward, backward = (phase.metrics for phase in measured.values())
    assert forward["saved_bytes"] == accounting.attention_saved_bytes(KINDS[impl], *shape)
    errors = (forward["output_relative_error"], backward["gradient_relative_error"])
    assert all(0 < error < {"fp32": 1e-4, "bf16": 5e-2}[precision] for error in errors)


def test_a_masked_case_is_held_to_the_masked_oracle():
    masked = parameters(causal=True)
    for phase in measure(case("masked", causal=True)).values():
        assert phase.case == masked and phase.metrics["median_ms"] > 0
    call = AttentionCall(CPU, masked)
    call.operation.options["causal"] = False
    with pytest.raises(AssertionError, match="wrong: the error of out is"):
        call.error("forward")


@pytest.mark.parametrize(
    ("impl", "precision", "reason"),
    [("sdpa_cudnn", "fp32", "No viable backend"), ("compiled", "tf32", "a processor has no TF32")],
)
def test_what_cannot_run_here_is_skipped_with_its_reason(impl, precision, reason):
    with pytest.raises(Skip, match=reason):
        measure(case(impl=impl, precision=precision))


def test_what_the_compiler_replaces_is_counted_whatever_its_caches_hold():
    for _ in range(2):
        forward = measure(case(impl="compiled_heads"))["forward"]
        assert forward.metrics["num_replacements"] == 2


@pytest.mark.parametrize(
    ("phase", "name", "factor", "wrong"),
    [
        ("forward", "out", 1.01, lambda right, factor: right * factor),
        (
            "backward",
            "dq",
            float("nan"),
            # The value is right, its gradient is not.
            lambda right, factor: right.detach() + (right - right.detach()) * factor,
        ),
    ],
)
def test_a_wrong_result_in_the_last_sequence_gives_no_time(phase, name, factor, wrong):
    call = AttentionCall(CPU, parameters())
    factors = torch.ones(8, 1, 1)
    factors[-1] = factor
    assert call.error(phase)
    call.operation.implementations["eager"] = Implementation(
        lambda *tensors, causal: wrong(attention_reference(*tensors), factors)
    )
    with pytest.raises(AssertionError, match=f"wrong: the error of {name} is"):
        call.error(phase)
