"""Notebook 05: a case is what its label says, the accounting what autograd keeps, the report what the records say."""

import dataclasses
import json
import math
import os
import re
import subprocess
import sys
import weakref

import pytest
import torch
from chapters import CPU, H200_BYTES, on_a_cpu
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from labkit import accounting, notebooks, published
from labkit.configs import ATTENTION, MATERIALISING
from labkit.experiments import attention as experiment
from labkit.experiments.attention import AttentionCall, cases, run_case, saved_tensors, storage_bytes
from labkit.experiments.sweep import Case, Skip
from labkit.kernels.attention import attention
from labkit.kernels.reference import attention_reference
from labkit.records import Record, RecordStore
from labkit.report import attention as report
from labkit.report import figures
from labkit.report.chapter import Chapter
from labkit.report.findings import scientific

NOTEBOOK = "05_attention"


@pytest.fixture(autouse=True)
def this_device_is_a_cpu(monkeypatch):
    yield from on_a_cpu(monkeypatch)


def parameters(impl="eager", precision="fp32", d_head=16, length=32, batch=8) -> dict:
    return {"impl": impl, "precision": precision, "d_head": d_head, "length": length, "batch": batch}


def case(**chosen) -> Case:
    return Case("attention", parameters(**chosen), ("forward", "backward"), 60.0, 0.01, stop_at_failure=True)


def measure(one: Case) -> dict:
    """Returns what the phases of a case give, measured in this process."""
    return {phase: run() for phase, run in run_case(one, {})}


def calls(profile: str) -> list[dict]:
    return [one.parameters for one in cases(profile, "cuda") if one.section == "attention"]


# ---- the cases -------------------------------------------------------------------------------------------------


def test_full_is_every_head_dimension_and_length_of_the_published_grid_in_every_series():
    table = published.load("attention_pytorch")
    theirs = {(d_head, length) for d_head, length in zip(table["d_model"], table["seq_len"], strict=True)}
    assert len(theirs) == 20
    for precision, impls in ATTENTION["full"].series.items():
        for impl in impls:
            ours = {
                (c["d_head"], c["length"]) for c in calls("full") if (c["impl"], c["precision"]) == (impl, precision)
            }
            assert theirs <= ours, (precision, impl)
    assert set(table["batch_size"]) == {c["batch"] for c in calls("full")} == {8}


def test_full_has_every_sdpa_backend_in_both_precisions_and_tf32_compiled_only():
    series = {(c["impl"], c["precision"]) for c in calls("full")}
    backends = ("sdpa_math", "sdpa_flash", "sdpa_cudnn", "sdpa_efficient")
    expected = {(impl, precision) for impl in ("eager", "compiled", *backends) for precision in ("fp32", "bf16")}
    assert series == expected | {("compiled", "tf32"), ("compiled_heads", "fp32"), ("compiled_heads", "bf16")}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_full_goes_on_past_the_memory_of_an_h200(precision):
    """For eager with every head dimension, as the accounting has it."""
    element_bytes = report.ELEMENT_BYTES[precision]
    for d_head in ATTENTION["full"].d_heads:
        lengths = [
            c["length"]
            for c in calls("full")
            if (c["impl"], c["precision"], c["d_head"]) == ("eager", precision, d_head)
        ]
        needs = [
            accounting.attention_peak_bytes("backward", 8, length, d_head, element_bytes, device_kind="cuda")
            for length in lengths
        ]
        assert needs[0] < H200_BYTES < needs[-1]


def test_a_backward_pass_is_not_tried_after_a_failed_forward_pass():
    found = [one for one in cases("full", "cuda") if one.section == "attention"]
    assert {(one.phases, one.stop_at_failure) for one in found} == {(("forward", "backward"), True)}


def test_a_grid_is_narrowed():
    narrowed = [
        one.parameters for one in cases("full", "cuda", lengths=[256], d_heads=[64]) if one.section == "attention"
    ]
    assert narrowed == [c for c in calls("full") if (c["length"], c["d_head"]) == (256, 64)]
    assert len(narrowed) > 10


# ---- a case is what its label says -----------------------------------------------------------------------------


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
    kind = report.KINDS[impl]
    shape = (8, 32, 16, report.ELEMENT_BYTES[precision])
    forward = measured["forward"].metrics
    assert forward["saved_bytes"] == accounting.attention_saved_bytes(kind, *shape)
    assert forward["in_use_bytes"] == accounting.attention_in_use_bytes(kind, *shape)
    names = {name for name in measured["backward"].metrics if name.endswith("_error")}
    assert names == {"dq_relative_error", "dk_relative_error", "dv_relative_error"}
    for phase in measured.values():
        errors = [value for name, value in phase.metrics.items() if name.endswith("_error")]
        assert all(0 < error < experiment.LARGEST_ERROR[precision] for error in errors)


def test_a_label_that_is_not_what_ran_is_not_its_case():
    call = AttentionCall(CPU, parameters(impl="sdpa_flash"))
    assert call.described() == parameters(impl="sdpa_flash")
    call = AttentionCall(CPU, parameters(impl="sdpa_flash"))
    call.function = attention_reference
    assert call.described() != parameters(impl="sdpa_flash")
    call = AttentionCall(CPU, parameters(impl="eager"))
    call.function = lambda q, k, v: attention(q, k, v, impl="sdpa_flash")
    assert call.described() != parameters(impl="eager")


@pytest.mark.parametrize("impl", ["sdpa_cudnn", "sdpa_efficient"])
def test_a_backend_that_refuses_is_skipped_with_its_reason(impl):
    with pytest.raises(Skip, match="No viable backend"):
        measure(case(impl=impl))


def test_tf32_is_skipped_where_there_is_none():
    with pytest.raises(Skip, match="a processor has no TF32"):
        measure(case(impl="compiled", precision="tf32"))


def test_an_unknown_implementation_is_refused():
    with pytest.raises(ValueError, match="unknown implementation 'magic'; accepted: eager, compiled"):
        AttentionCall(CPU, parameters(impl="magic"))


def test_what_cannot_be_the_first_out_of_memory_is_skipped(monkeypatch):
    """The shortest length that does not fit is tried; where half of it does not fit either, nothing is."""
    tried = {}
    for impl in MATERIALISING:
        for precision in ("fp32", "bf16"):
            tried[impl, precision] = []
            for length in (4096, 8192, 16384, 32768, 65536):
                monkeypatch.setattr(experiment, "memory_bytes", lambda device: 24 * 10**9)
                try:
                    experiment._require_room(CPU, parameters(impl, precision, length=length))
                    tried[impl, precision].append(length)
                except Skip as skip:
                    assert f"at length {length // 2} the scores alone take" in str(skip)
    # 8 · 32768² · 4 B are 34 GB, 8 · 32768² · 2 B are 17 GB: the math backend computes in fp32.
    assert {key: lengths[-1] for key, lengths in tried.items()} == {
        ("eager", "fp32"): 32768, ("eager", "bf16"): 65536, ("compiled", "fp32"): 32768, ("compiled", "bf16"): 65536,
        ("sdpa_math", "fp32"): 32768, ("sdpa_math", "bf16"): 32768,
    }  # fmt: skip
    experiment._require_room(CPU, parameters("sdpa_flash", length=2**20))


def test_a_compiled_transformers_case_is_notebook_01s(monkeypatch):
    """Only what notebook 01 lacks is measured: the backward pass alone, by notebook 01's own code."""
    found = [one for one in cases("full", "cuda") if one.section == "transformer"]
    assert {one.phases for one in found} == {("backward",)}
    assert {one.parameters["compile"] for one in found} == {"regional"}
    grid = ATTENTION["full"]
    assert {(one.parameters["size"], one.parameters["context"]) for one in found} == {
        (size, context) for size in grid.model_sizes for context in grid.model_contexts
    }
    small = {**found[0].parameters, "size": "nano", "context": 32, "compile": "none"}
    measured = measure(dataclasses.replace(found[0], parameters=small, time_limit_s=0.01))
    assert list(measured) == ["backward"]
    assert measured["backward"].case == small and measured["backward"].metrics["median_ms"] > 0


# ---- numerics are checked before there is a time ------------------------------------------------------------------


def test_the_oracle_is_the_formula_in_fp64_however_it_is_cut(monkeypatch):
    call = AttentionCall(CPU, parameters(length=33, d_head=5))
    q, k, v = (x.detach()[-1].double().requires_grad_() for x in call.inputs)
    out = attention_reference(q, k, v)
    out.backward(call.grad_out[-1].double())
    exact = {"out": out.detach(), "dq": q.grad, "dk": k.grad, "dv": v.grad}
    for num_scores in (1, 33 * 7, 2**25):
        monkeypatch.setattr(experiment, "ORACLE_SCORES", num_scores)
        call.__dict__.pop("oracle", None)
        for name, value in call.oracle.items():
            torch.testing.assert_close(value, exact[name], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_wrong_result_in_the_last_sequence_gives_no_time(phase):
    call = AttentionCall(CPU, parameters())

    def wrong(q, k, v):
        factor = torch.ones(q.shape[0], 1, 1)
        factor[-1] = 1.01
        right = attention_reference(q, k, v)
        # In the backward pass alone: the value is right, its gradient is not.
        return right * factor if phase == "forward" else right.detach() + (right - right.detach()) * factor

    assert call.errors(phase)
    call.function = wrong
    with pytest.raises(AssertionError, match=r"eager: (output|dq)_relative_error is 0.01, more than 0.0001"):
        call.errors(phase)


def test_a_result_that_is_not_a_number_gives_no_time():
    call = AttentionCall(CPU, parameters())
    call.function = lambda q, k, v: attention_reference(q, k, v) * float("nan")
    with pytest.raises(AssertionError, match="is nan, more than"):
        call.errors("forward")


# ---- the accounting is what autograd keeps -----------------------------------------------------------------------

SHAPES = [(8, 32, 16), (3, 7, 5), (1, 64, 8), (2, 1, 16)]


def hooked_bytes(function) -> tuple[int, torch.Tensor]:
    """Returns the bytes of the distinct storages that autograd packs during `function`, by hooks, and its result."""
    packed = []

    def pack(tensor):
        packed.append(tensor)  # also keeps the storage alive, so that no address comes up twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = function()
    arrays = [tensor for tensor in packed if tensor.dim()]  # a scale is a number, not an array
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in arrays}.values()), out


def random_inputs(shape, dtype):
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for _ in range(3)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("impl", "kind"), [("eager", "eager"), ("sdpa_math", "math"), ("sdpa_flash", "fused")])
def test_saved_bytes_are_what_hooks_count_and_what_the_graph_holds(shape, dtype, impl, kind):
    q, k, v = random_inputs(shape, dtype)
    function = attention_reference if impl == "eager" else lambda q, k, v: attention(q, k, v, impl=impl)
    counted, out = hooked_bytes(lambda: function(q, k, v))
    predicted = accounting.attention_saved_bytes(kind, *shape, q.element_size())
    assert counted == predicted
    assert storage_bytes(saved_tensors(function(q, k, v))) == predicted
    in_use = storage_bytes([*saved_tensors(out), q, k, v, out])
    assert in_use == accounting.attention_in_use_bytes(kind, *shape, q.element_size())


class LiveBytes(TorchDispatchMode):
    """Follows the bytes of all storages that are alive, beside those of `known` tensors."""

    def __init__(self, known):
        super().__init__()
        self.storages = {tensor.untyped_storage()._cdata for tensor in known}
        self.now = self.peak = sum(tensor.nbytes for tensor in known)

    def _gone(self, key, num_bytes):
        self.storages.discard(key)
        self.now -= num_bytes

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.dim():
                storage = tensor.untyped_storage()
                if storage._cdata not in self.storages:
                    self.storages.add(storage._cdata)
                    self.now += storage.nbytes()
                    self.peak = max(self.peak, self.now)
                    weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
        return result


@pytest.mark.parametrize("shape", [(8, 32, 16), (3, 40, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_peak_bytes_are_those_of_the_tensors_alive_at_once(shape, dtype):
    inputs = random_inputs(shape, dtype)
    grad_out = torch.randn(shape, dtype=dtype)
    element_bytes = grad_out.element_size()
    live = LiveBytes(inputs)
    live.storages.add(grad_out.untyped_storage()._cdata)
    with live:
        out = attention_reference(*inputs)
    assert live.peak == accounting.attention_peak_bytes("forward", *shape, element_bytes, device_kind="cpu")
    assert live.now == accounting.attention_in_use_bytes("eager", *shape, element_bytes)
    live.peak = live.now
    with live:
        out.backward(grad_out)
    assert live.peak == accounting.attention_peak_bytes("backward", *shape, element_bytes, device_kind="cpu")
    assert live.peak == accounting.attention_reserved_bytes("backward", *shape, element_bytes, device_kind="cpu")


def committed_calls():
    return Chapter(NOTEBOOK, device="nvidia-h200").records("attention")


def test_on_cuda_the_peaks_are_those_that_were_measured():
    rows = report.memory(committed_calls()).query("impl == 'eager'")
    for phase in ("forward", "backward"):
        known = rows.dropna(subset=[f"peak_{phase}"])
        assert set(known["precision"]) == {"fp32", "bf16"} and set(known["d_head"]) == set(ATTENTION["full"].d_heads)
        assert (known[f"peak_{phase}"] == known[f"predicted_{phase}"]).all()


def test_on_cuda_memory_runs_out_where_it_was_measured_to():
    rows = report.limits(committed_calls()).query("impl == 'eager'")
    assert len(rows) == 2 * len(ATTENTION["full"].d_heads)
    assert (rows["predicted_length"] == rows["oom_length"]).all()
    assert (rows["predicted_phase"] == rows["oom_phase"]).all()
    # By the bytes given out alone the backward pass in fp32 would have fitted.
    shape = (8, 32768, 64, 4)
    peak = accounting.attention_peak_bytes("backward", *shape, device_kind="cuda")
    held = accounting.attention_reserved_bytes("backward", *shape, device_kind="cuda")
    assert peak < H200_BYTES < held
    # At the failed request for the fifth block, four were held: three given out, one cut for the gradient of v.
    row = rows.query("precision == 'fp32' and d_head == 64").iloc[0]
    matrix, grad_v = 4 * 8 * 32768**2, 4 * 8 * 32768 * 64
    assert row["asked_bytes"] == matrix
    assert row["cached_bytes"] == pytest.approx(matrix - grad_v, abs=0.005 * 2**30)


@pytest.mark.parametrize(("d_head", "is_cut"), [(8, False), (9, True)])
def test_only_what_is_larger_than_a_mebibyte_is_cut_from_the_block_of_the_scores(d_head, is_cut):
    """8 · 4096 · 8 · 4 B are 1 MiB, which has a block for small tensors."""
    shape = (8, 4096, d_head, 4)
    peak = accounting.attention_peak_bytes("backward", *shape, device_kind="cuda")
    held = accounting.attention_reserved_bytes("backward", *shape, device_kind="cuda")
    assert held - peak == (4 * 8 * 4096 * (4096 - d_head) if is_cut else 0)


def test_score_passes_are_the_matrices_that_the_operations_touch():
    """Counted as the operands and results of every operation that are as large as all score matrices."""
    shape = (2, 64, 4)
    inputs, grad_out = random_inputs(shape, torch.float32), torch.randn(shape)
    counted = {"forward": 0, "backward": 0}

    class Touched(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            touched = [
                t for t in tree_leaves((args, result)) if isinstance(t, torch.Tensor) and t.numel() == 2 * 64 * 64
            ]
            operands = [t.untyped_storage()._cdata for t in tree_leaves(args) if isinstance(t, torch.Tensor)]
            if result.untyped_storage()._cdata not in operands:  # a view touches nothing
                counted[phase] += len(touched)
            return result

    phase = "forward"
    with Touched():
        out = attention_reference(*inputs)
    phase = "backward"
    with Touched():
        out.backward(grad_out)
    assert counted == {phase: accounting.attention_score_passes(phase, device_kind="cpu") for phase in counted}
    on_cuda = {phase: accounting.attention_score_passes(phase, device_kind="cuda") for phase in counted}
    # One product more, of two matrices into a third.
    assert on_cuda == {"forward": counted["forward"], "backward": counted["backward"] + 3}


def test_what_the_accounting_does_not_know_is_refused():
    with pytest.raises(ValueError, match="unknown kind of attention 'magic'; accepted: eager, math, fused"):
        accounting.attention_saved_bytes("magic", 1, 1, 1, 4)
    for function in (
        accounting.attention_score_passes,
        lambda phase, device_kind: accounting.attention_peak_bytes(phase, 1, 1, 1, 4, device_kind=device_kind),
        lambda phase, device_kind: accounting.attention_reserved_bytes(phase, 1, 1, 1, 4, device_kind=device_kind),
    ):
        with pytest.raises(ValueError, match="unknown phase 'sideways'; accepted: forward, backward"):
            function("sideways", device_kind="cuda")
        with pytest.raises(ValueError, match="unknown kind of device 'abacus'; accepted: cuda, cpu, mps"):
            function("forward", device_kind="abacus")


# ---- the report says what the records say ------------------------------------------------------------------------


def synthetic_time(impl: str, precision: str, d_head: int, length: int, phase: str) -> float:
    """Milliseconds in proportion to the number of scores, of no device."""
    factor = {"eager": 6, "compiled": 3, "sdpa_math": 7}.get(impl, 1) * report.ELEMENT_BYTES[precision]
    return 1e-9 * length * length * factor * {"forward": 1, "backward": 2}[phase] * (1 + d_head / 1024)


def synthetic_record(one: Case, phase: str, status: str = "ok", **content) -> Record:
    return Record(
        notebook=NOTEBOOK, section=one.section, case=one.parameters, phase=phase, status=status, device="abacus",
        measurement_version=1, **content,
    )  # fmt: skip


def synthetic_records() -> list[Record]:
    """Records of the full grid on a device of the H200's memory on which the accounting is exact."""
    records = []
    for one in cases("full", "cuda"):
        p = one.parameters
        if one.section == "ceilings":
            rate = {"achieved_gb_per_s": 4000.0} if p["kind"] == "copy" else {"achieved_tflops": 100.0}
            records.append(synthetic_record(one, "rate", metrics={"median_ms": 1.0, **rate}))
        elif one.section == "attention":
            records += synthetic_call(one)
        else:
            records.append(synthetic_record(one, "backward", metrics={"median_ms": 30.0}))
    return records


def synthetic_call(one: Case) -> list[Record]:
    impl, precision, d_head, length, batch = (one.parameters[name] for name in parameters())
    if precision == "fp32" and impl in ("sdpa_flash", "sdpa_cudnn"):
        return [synthetic_record(one, phase, "skipped", reason="no fp32 here") for phase in one.phases]
    shape = (batch, length, d_head, report.ELEMENT_BYTES[precision])
    num_replacements = 2 if impl == "compiled_heads" else 0
    kind, records = report.closed_form({"impl": impl, "num_replacements": num_replacements}), []
    for phase in one.phases:
        arguments = (phase, *shape[:3], 4 if impl == "sdpa_math" else shape[3])
        peak = accounting.attention_peak_bytes(*arguments, device_kind="cuda")
        held = accounting.attention_reserved_bytes(*arguments, device_kind="cuda")
        if kind == "fused":
            peak = held = 2 * accounting.attention_in_use_bytes(kind, *shape)
        if records and records[0].status == "oom":
            reason = "not run: forward before it ended oom"
            records.append(synthetic_record(one, phase, "skipped", reason=reason))
            continue
        if held > H200_BYTES:
            records.append(synthetic_record(one, phase, "oom", reason="OutOfMemoryError: CUDA out of memory"))
            continue
        time_ms = synthetic_time(impl, precision, d_head, length, phase)
        metrics = {
            **dict.fromkeys(("median_ms", "p20_ms", "p80_ms", "mean_ms", "min_ms"), time_ms),
            "std_ms": 0.0, "n": 100, "half_width_fraction": 0.001, "host_median_ms": time_ms + 1.0,
            "launch_median_ms": 0.1, "peak_bytes": peak, "device_bytes": H200_BYTES,
        }  # fmt: skip
        if phase == "forward":
            metrics["saved_bytes"] = accounting.attention_saved_bytes(kind, *shape)
            metrics["in_use_bytes"] = accounting.attention_in_use_bytes(kind, *shape)
        if impl.startswith("compiled"):
            metrics |= {"first_call_ms": 1000.0, "num_replacements": num_replacements}
        for quantity in ("output",) if phase == "forward" else ("dq", "dk", "dv"):
            metrics[f"{quantity}_relative_error"] = {"fp32": 3e-7, "tf32": 4e-4, "bf16": 4e-3}[precision]
        timer = {"method": "window", "num_warmup": 5, "stop_reason": "sample limit"}
        records.append(synthetic_record(one, phase, metrics=metrics, timer=timer))
    return records


SYNTHETIC = synthetic_records()


@pytest.fixture
def chapter(tmp_path):
    """Returns a function that gives the chapter of the synthetic records, some of them changed."""

    def make(match=None, status="ok", reason="", drop=(), **metrics) -> Chapter:
        path = tmp_path / "abacus" / "records" / f"{NOTEBOOK}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        lines, num_changed = [], 0
        for record in SYNTHETIC:
            if match is not None and match.items() <= {**record.case, "phase": record.phase}.items():
                changed = {name: f(record.metrics.get(name)) if callable(f) else f for name, f in metrics.items()}
                if "median_ms" in changed:
                    changed = dict.fromkeys(("min_ms", "p20_ms", "p80_ms"), changed["median_ms"]) | changed
                kept = {name: value for name, value in record.metrics.items() if name not in drop}
                record = dataclasses.replace(
                    record, status=status, reason=reason, metrics={**kept, **changed} if status == "ok" else {}
                )
                num_changed += 1
            lines.append(json.dumps(dataclasses.asdict(record)))
        assert match is None or num_changed
        path.write_text("\n".join(lines) + "\n")
        return Chapter(NOTEBOOK, device="abacus", output=str(tmp_path))

    return make


def calls_of(made: Chapter):
    return made.records("attention")


def no_ceilings(make):
    return make().records("none of these")


def text(sentences) -> str:
    return "\n".join(sentences)


def one_panel(frame):
    """The rows of a head dimension: as many panels more draw nothing that one does not."""
    return frame[frame["d_head"] == 64]


def test_a_changed_time_changes_table_figure_and_finding(chapter):
    case_64 = {"impl": "eager", "precision": "fp32", "d_head": 64, "length": 32768, "phase": "forward"}
    before, after = (
        calls_of(chapter()), calls_of(chapter(case_64, median_ms=54321.0, p20_ms=54321.0, p80_ms=54321.0)),
    )  # fmt: skip
    old, new = (report.table_times(frame, "forward", 64) for frame in (before, after))
    assert (old != new).to_numpy().sum() == 1 and "54,321" in new.to_string() and "54,321" not in old.to_string()
    assert (report.table_times(before, "backward") == report.table_times(after, "backward")).to_numpy().all()
    old, new = (figures.svg(report.figure_times(one_panel(frame), ("fp32", "tf32"))) for frame in (before, after))
    assert old != new
    old, new = (text(report.findings_growth(frame)) for frame in (before, after))
    assert "**eager** in fp32: forward time grows as length^2.00," in old
    assert re.search(r"\*\*eager\*\* in fp32: forward time grows as length\^2\.00 to [23]", new)
    words = "**SDPA math** in fp32 runs forward at 0.857× eager's speed (slower; length 32,768, d 64) and backward at "
    assert words in text(report.findings_times(before, no_ceilings(chapter)))


def test_a_backend_that_gains_for_some_head_dimensions_only_is_said_to(chapter):
    one = {"impl": "sdpa_efficient", "precision": "bf16", "phase": "backward"}
    frame = calls_of(chapter(one, median_ms=lambda value: value * 6))
    frame.loc[(frame["impl"] == "sdpa_efficient") & (frame["d_head"] == 16), "median_ms"] *= 2
    frame = frame[frame["length"] <= 16384]
    sentences = text(report.findings_times(frame, no_ceilings(chapter)))
    assert (
        "backward at 0.500× to 1.00× eager's speed (slower for d 16, about the same for d 32, d 64 and d 128; "
        "length 16,384, d 16 to d 128)"
    ) in sentences


def test_exponents_are_fitted_where_the_host_does_not_hold_the_device_up(chapter):
    held_up = {"impl": "eager", "precision": "bf16", "length": 256, "phase": "forward"}
    noise = {"median_ms": 500.0, "host_median_ms": 500.0}
    fitted = report.growth(calls_of(chapter(held_up, **noise, launch_median_ms=100.0)))
    left_out = report.growth(calls_of(chapter(held_up, **noise, launch_median_ms=300.0)))
    for fits, is_exact in ((fitted, False), (left_out, True)):
        eager = fits[(fits["impl"] == "eager") & (fits["precision"] == "bf16")]
        assert len(eager) == 4
        assert ((eager["forward"] - 2).abs() < 1e-9).all() == is_exact
        assert all((256 in lengths) != is_exact for lengths in eager["lengths"])
    frame = calls_of(chapter(held_up, **noise, launch_median_ms=460.0))
    sentences = text(report.findings_times(frame, no_ceilings(chapter)))
    assert re.search(r"4 of \d+ passes are launch-bound .* up to 256 \(eager in bf16\)", sentences)


def test_bytes_that_the_accounting_does_not_predict_are_named(chapter):
    before = text(report.findings_memory(calls_of(chapter())))
    assert re.search(r"in use before the backward pass: the accounting is within 2\.0 % in (\d+) of \1 cases", before)
    assert "It misses" not in before
    wrong = {"impl": "sdpa_cudnn", "precision": "bf16", "d_head": 32, "length": 4096, "phase": "forward"}
    frame = calls_of(chapter(wrong, in_use_bytes=lambda value: int(1.03 * value)))
    after = text(report.findings_memory(frame))
    assert "the largest difference is +3.0 % (SDPA cuDNN in bf16, d 32, length 4,096). It misses for" in after
    assert "It misses for SDPA cuDNN in bf16 (1)" in after
    assert (
        "(+3.0 %)" in report.table_memory(frame).to_string()
        and "(+3.0 %)" not in report.table_memory(frame, 64).to_string()
    )
    wrong_at_64 = calls_of(chapter({**wrong, "d_head": 64}, in_use_bytes=lambda value: 10 * value))
    old, new = (figures.svg(report.figure_memory(one_panel(frame))) for frame in (calls_of(chapter()), wrong_at_64))
    assert old != new


def test_where_memory_runs_out_is_held_against_the_accounting(chapter):
    before = text(report.findings_memory(calls_of(chapter())))
    assert (
        "**eager** in fp32 first runs out of memory at length 32,768 in the backward pass (d 16, 32, 64, 128); at its "
        "longest complete length the peak was 4.00 to 4.04 score matrices. The accounting names that length and pass "
        "in 4 of 4 head dimensions."
    ) in before
    assert "**eager** in bf16 first runs out of memory at length 65,536 in the backward pass" in before
    assert "which the device has room for" not in before
    earlier = {"impl": "eager", "precision": "fp32", "d_head": 32, "length": 16384, "phase": "backward"}
    reason = (
        "OutOfMemoryError: CUDA out of memory. Tried to allocate 32.00 GiB. GPU 0 has a total capacity of 139.80 GiB "
        "of which 10.93 GiB is free. Including non-PyTorch memory, this process has 128.87 GiB memory in use. Of the "
        "allocated memory 96.16 GiB is allocated by PyTorch, and 31.98 GiB is reserved by PyTorch but unallocated."
    )
    frame = calls_of(chapter(earlier, status="oom", reason=reason))
    after = text(report.findings_memory(frame))
    assert "length 16,384 in the backward pass (d 32)" in after and "in 3 of 4 head dimensions" in after
    assert "asked for 34.4 GB with 103 GB given out, which the device has room for; another 34.3 GB were held" in after
    full = calls_of(chapter(earlier, status="oom", reason=reason.replace("96.16", "128.16")))
    assert "which the device has room for" not in text(report.findings_memory(full))
    row = report.table_limits(frame).query("implementation == 'eager' and precision == 'fp32' and d == 32").iloc[0]
    assert (row["longest complete"], row["first out of memory"]) == ("8,192", "16,384, backward")
    assert row["predicted"] == "32,768, backward"
    times = report.table_times(frame, "backward", 32).set_index("length")
    assert times["eager, fp32"][16384] == "oom" and times["eager, fp32"][65536] == "–"
    assert "**SDPA flash** in bf16 did not run out of memory: at length 131,072 (d 64)" in before


def test_an_out_of_memory_is_marked_in_the_figure_of_either_pass(chapter):
    """The forward pass took the memory, and the backward pass is missing for it."""
    frame = one_panel(calls_of(chapter()))
    gone = frame[frame["status"] != "oom"]
    for make in (lambda f: report.figure_times(f, ("bf16",)), report.figure_memory):
        assert figures.svg(make(frame)) != figures.svg(make(gone))
    marks = report.figure_times(calls_of(chapter()), ("fp32", "tf32"))
    assert all(axis.collections for axis in marks.axes)


def test_what_was_not_run_is_said_with_the_reason(chapter):
    frame = calls_of(chapter())
    sentences = text(report.findings_times(frame, no_ceilings(chapter)))
    assert "SDPA flash in fp32 was not run in 22 cases: no fp32 here." in sentences
    assert "SDPA flash, fp32" not in report.table_times(frame, "forward")
    broken = {"impl": "compiled", "precision": "bf16", "d_head": 16, "length": 256}
    frame = calls_of(chapter(broken, status="error", reason="it broke"))
    sentences = text(report.findings_times(frame, no_ceilings(chapter)))
    assert "2 measurements failed: it broke (2)." in sentences


def test_the_traffic_of_the_scores_is_held_against_the_copy_rate(chapter):
    made = chapter()
    sentences = text(report.findings_times(calls_of(made), made.records("ceilings")))
    # 6 passes over 8 n² · 4 B in 24e-9 n² ms · (1 + d / 1024) are 8,000 GB/s and less, twice the copy rate.
    assert (
        "Eager forward in fp32 reads or writes all its scores 6 times, which at length 32,768 makes 178 %" in sentences
    )
    assert "Eager backward in fp32 reads or writes all its scores 12 times" in sentences
    slow = {"impl": "eager", "precision": "fp32", "length": 32768, "phase": "forward"}
    sentences = text(
        report.findings_times(calls_of(chapter(slow, median_ms=lambda value: 4 * value)), made.records("ceilings"))
    )
    assert re.search(r"Eager forward in fp32 .* makes 44 % to 49 % of the measured copy rate\.", sentences)


def test_what_a_pass_holds_is_predicted_for_the_kind_of_device(chapter):
    """The device's kind comes from the environment that was recorded with it, and from its name where there is none."""
    made = chapter()
    assert made.device_kind == calls_of(made).attrs["device_kind"] == "cuda"
    made.folder.joinpath("environment.json").write_text(json.dumps({"device": {"kind": "cpu", "name": "a processor"}}))
    frame = calls_of(made)
    assert frame.attrs == {"device": "a processor", "device_kind": "cpu"}
    assert "the largest difference is +33 % (eager in" in text(report.findings_memory(frame))
    assert "Eager backward in fp32 reads or writes all its scores 9 times" in text(
        report.findings_times(frame, made.records("ceilings"))
    )
    kinds = {slug: Chapter(NOTEBOOK, device=slug).device_kind for slug in ("cpu-x", "mps-y", "nvidia-z")}
    assert kinds == {"cpu-x": "cpu", "mps-y": "mps", "nvidia-z": "cuda"}


def test_compiling_that_changes_the_power_is_said_to(chapter):
    before = text(report.findings_compile(calls_of(chapter())))
    assert "Compiling in fp32 shows no change in the powers of the length" in before
    assert "it has 1.00× eager's bytes in use before backward" in before
    assert "Compiled in fp32, eager's time over its own: forward 2.00× (geometric mean 2.00×, faster in " in before
    assert "Compiled in tf32, eager's time over its own against eager fp32" in before
    linear = {"impl": "compiled", "precision": "fp32", "phase": "backward"}
    lengths = {c["length"] for c in calls("full")}
    assert lengths
    frame = calls_of(chapter())
    mine = (frame["impl"] == "compiled") & (frame["precision"] == "fp32") & (frame["phase"] == "backward")
    frame.loc[mine, "median_ms"] = frame.loc[mine, "length"] * 1e-3
    after = text(report.findings_compile(frame))
    assert "Compiling in fp32 changes the power of the length in backward time (exponent less eager's: " in after
    assert "backward time −1.00 ± 0.00" in after
    assert "Compiling in bf16 shows no change" in after
    less = calls_of(chapter({**linear, "phase": "forward"}, in_use_bytes=lambda value: value and value // 2))
    assert "it has 0.500× eager's bytes in use before backward" in text(report.findings_compile(less))


def test_a_change_of_the_power_within_its_interval_is_none():
    exact = [{n: factor * n**-0.2 for n in (1024, 2048, 4096)} for factor in (1.0, 3.0)]
    change, known_to = report._exponent_change(exact)
    assert change == pytest.approx(-0.2) and known_to == pytest.approx(0, abs=1e-9)
    # Points at x = −1, 0, 1 in log₂ n: slope and its interval by hand, one degree of freedom.
    change, known_to = report._exponent_change([{1024: 2.0**-1, 2048: 2.0**0.5, 4096: 2.0**1}])
    residuals = (-1 / 6, 1 / 3, -1 / 6)
    assert change == pytest.approx(1.0)
    assert known_to == pytest.approx(12.706 * math.sqrt(sum(r * r for r in residuals) / 2))
    assert report._exponent_change([{1024: 1.0, 2048: 2.0}]) is None
    assert report._exponent_change([{1024: 1.0}, {}]) is None


def test_compiled_steps_that_scatter_are_not_called_a_change(chapter):
    frame = calls_of(chapter())
    mine = (frame["impl"] == "compiled") & (frame["precision"] == "fp32") & (frame["phase"] == "backward")
    frame.loc[mine, "median_ms"] *= (frame.loc[mine, "length"] / 4096) ** 0.15
    assert "Compiling in fp32 changes the power of the length in backward time" in text(report.findings_compile(frame))
    frame.loc[mine & frame["length"].isin([1024, 8192]), "median_ms"] *= 3
    assert "Compiling in fp32 shows no change" in text(report.findings_compile(frame))


def test_a_replacement_by_sdpa_is_what_the_compiler_reported(chapter):
    frame = calls_of(chapter())
    sentences = text(report.findings_compile(frame))
    assert "the compiler replaces the formula by SDPA in 3 of 3 cases in fp32; without it, it does not." in sentences
    assert list(report.table_heads(frame)["replaced by SDPA"][:3]) == ["–", "no", "yes"]
    other = calls_of(chapter({"impl": "compiled_heads", "precision": "fp32"}, num_replacements=0))
    sentences = text(report.findings_compile(other))
    assert "SDPA in 0 of 3 cases in fp32; without it, it does not either. At" in sentences
    rows = report.memory(other).query("impl == 'compiled_heads'")
    matrices = rows["batch"] * rows["length"] ** 2 * rows["precision"].map(report.ELEMENT_BYTES)
    assert ((rows["predicted_saved"] > matrices) == (rows["precision"] == "fp32")).all()
    rows = report.memory(frame).query("impl == 'compiled_heads'")
    assert (rows["predicted_saved"] == rows["saved_bytes"]).all()
    both = calls_of(chapter({"impl": "compiled", "precision": "fp32"}, num_replacements=1))
    assert "without it, it does so too" in text(report.findings_compile(both))


@pytest.mark.parametrize(
    ("quantity", "factor", "is_over"),
    [("output", 2.1, True), ("output", 1.9, False), ("dk", 2.9, False), ("dk", 3.1, True)],
)
def test_an_error_over_its_budget_is_named(chapter, quantity, factor, is_over):
    phase = "forward" if quantity == "output" else "backward"
    one = {"impl": "sdpa_flash", "precision": "bf16", "d_head": 128, "length": 4096, "phase": phase}
    frame = calls_of(chapter(one, **{f"{quantity}_relative_error": 4e-3 * factor}))
    sentences = text(report.findings_errors(frame))
    assert (f"the worst is {quantity} of SDPA flash in bf16, d 128, length 4,096" in sentences) == is_over
    assert sentences.startswith("All") != is_over
    assert scientific(4e-3 * factor) in report.table_errors(frame).to_string()


def test_errors_without_eager_beside_them_are_not_called_within_budget(chapter):
    frame = calls_of(chapter({"impl": "compiled", "precision": "tf32"}, output_relative_error=9e-3))
    assert "none of eager beside them" in text(report.findings_errors(frame))
    assert "the largest is 9.0e-3 (output of compiled in tf32" in text(report.findings_errors(frame))


def test_published_rows_stand_beside_ours_with_the_ratio(chapter):
    frame = calls_of(chapter())
    matched = report.published_matches(frame)
    assert len(matched) == 3 * 20 * 2
    assert not matched.duplicated(["impl", "precision", "d_head", "length", "phase"]).any()
    row = matched.query(
        "impl == 'compiled' and precision == 'tf32' and d_head == 64 and length == 8192 and phase == 'backward'"
    )
    ours = synthetic_time("compiled", "tf32", 64, 8192, "backward")
    assert row["ratio"].tolist() == [pytest.approx(10.033 / ours)]
    assert "theirs keeps more per score" in text(report.findings_published(frame))
    twice = calls_of(
        chapter({"impl": "eager", "precision": "fp32", "phase": "forward"}, in_use_bytes=lambda v: v and 3 * v)
    )
    assert "theirs keeps less per score" in text(report.findings_published(twice))


def test_the_transformer_pairs_eager_with_compiled_and_takes_backward_from_here(chapter):
    models = Chapter("01_benchmarking", device="nvidia-h200").records("steps", "compile")
    backward = chapter().records("transformer")
    table = report.table_transformer(models, backward, "fp32").set_index(["size", "context"])
    assert table.loc[("small", 512), "backward"].endswith(")") and "→ 30.0 (" in table.loc[("small", 512), "backward"]
    assert table.loc[("small", 256), "backward"] == "–"
    without = report.table_transformer(models, backward.iloc[:0], "fp32").set_index(["size", "context"])
    assert (without["backward"] == "–").all() and (without["forward"] == table["forward"]).all()
    pairs = report.transformer_pairs(models, backward)
    assert set(pairs["phase"]) == {"forward", "backward", "forward_backward", "train_step"}
    sentences = text(report.findings_transformer(models, backward))
    assert "A compiled backward in fp32 runs" in sentences and "A compiled training step in bf16 runs" in sentences
    assert report.findings_transformer(models.iloc[:0], backward) == []


def test_without_records_every_section_says_so(tmp_path):
    empty = Chapter(NOTEBOOK, device="abacus", output=str(tmp_path))
    frame = empty.records("attention")
    arguments = {
        "table_times": (frame, "forward"),
        "figure_times": (frame, ("bf16",)),
        "findings_times": (frame, frame),
        "table_transformer": (frame, frame, "fp32"),
        "findings_transformer": (frame, frame),
    }
    for name in dir(report):
        if name.startswith(("table_", "findings_")):
            assert len(getattr(report, name)(*arguments.get(name, (frame,)))) == 0, name
        elif name.startswith("figure_"):
            assert getattr(report, name)(*arguments.get(name, (frame,))) is None, name


def test_figures_are_the_same_bytes_twice(chapter):
    frame = one_panel(calls_of(chapter()))
    for make in (lambda: report.figure_times(frame, ("bf16",)), lambda: report.figure_memory(frame)):
        assert figures.svg(make()) == figures.svg(make())


# ---- the notebook on this machine ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """The smoke profile executed here, from the notebook to the report."""
    output = tmp_path_factory.mktemp("figures")
    command = [sys.executable, "-m", "labkit", "run", "05", "--profile", "smoke", "--output", str(output)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert result.returncode == 0, result.stderr[-3000:]
    (folder,) = output.iterdir()
    return folder


@pytest.mark.slow
def test_smoke_measures_every_case_and_writes_figures_and_report(measured):
    records = RecordStore(measured / "records" / f"{NOTEBOOK}.jsonl").load()
    assert not [record for record in records if record.status in ("error", "timeout", "oom")]
    assert {record.case["impl"] for record in records if record.status == "skipped"} == {"sdpa_cudnn"}
    done = json.loads((measured / "records" / f"{NOTEBOOK}.done.json").read_text(encoding="utf-8"))
    assert done["num_missing"] == 0
    assert {path.name for path in measured.glob("05_*.svg")} == {
        "05_times_fp32.svg", "05_times_bf16.svg", "05_memory.svg",
    }  # fmt: skip
    text = (measured / "report.md").read_text(encoding="utf-8")
    for cell in notebooks.read(NOTEBOOK).cells:
        if cell.cell_type == "markdown" and cell.source.startswith("## "):
            assert f"#{cell.source.splitlines()[0]}" in text


@pytest.mark.slow
def test_smoke_holds_the_accounting_and_sees_what_the_compiler_replaced(measured):
    frame = Chapter(NOTEBOOK, device=measured.name, output=str(measured.parent)).records("attention")
    rows = report.memory(frame)
    assert {"eager", "compiled", "compiled_heads", "sdpa_math", "sdpa_flash"} == set(rows["impl"])
    assert (rows["in_use_bytes"] == rows["predicted_in_use"]).all()
    assert (rows["saved_bytes"] == rows["predicted_saved"]).all()
    replaced = frame[frame["status"] == "ok"].groupby("impl")["num_replacements"].max()
    assert replaced["compiled"] == 0 and replaced["compiled_heads"] > 0 and math.isnan(replaced["eager"])
    assert report.findings_errors(frame)[0].startswith("All")
    assert report.findings_growth(frame)
