"""Notebook 06: what a case measures is gated and is what its label says, and the report says what the records say.

The report's tests run on invented records of the full grid: times from a simple model of a device, so that what each
table, figure and finding must say is known.
"""

import dataclasses
import functools
import gc
import itertools
import json
import math
import os
import re
import subprocess
import sys
from collections import Counter

import pytest
import torch
from chapters import CPU, on_a_cpu

from labkit import accounting, hardware
from labkit.configs import LEADERBOARD, MATERIALISING, PASSES
from labkit.experiments import contest as contests
from labkit.experiments import flash_attention as experiment
from labkit.experiments import oracle
from labkit.experiments.flash_attention import AttentionContest, cases, run_case
from labkit.experiments.sweep import Case, Measured, Skip
from labkit.kernels.reference import attention_reference
from labkit.numerics import Verdict, judge
from labkit.records import Record, RecordStore, newest
from labkit.report import figures
from labkit.report import flash_attention as report
from labkit.report.chapter import Chapter

NOTEBOOK = "06_flash_attention"
DEVICE = "invented-device"


# ---- invented records -----------------------------------------------------------------------------------------

RATES = {
    "gluon": 500.0, "gluon_unordered": 510.0, "triton": 400.0, "fa3": 520.0, "sdpa_cudnn": 450.0, "sdpa_flash": 300.0,
    "sdpa_efficient": 150.0, "flex": 350.0, "sdpa": 300.0, "sdpa_math": 20.0, "compiled": 60.0, "eager": 30.0,
    "fa3_deterministic": 430.0, "triton_ieee": 90.0, "triton_tf32": 800.0,
}  # fmt: skip
"""TFLOP/s of each implementation on the invented device in bf16; a tenth of it in fp32 and TF32."""

FLOOR_MS, LAUNCH_MS, CEILING = 0.005, 0.04, {"bf16": 700.0, "fp32": 50.0, "tf32": 350.0}


def statistics_of(time_ms: float) -> dict:
    return {
        "median_ms": time_ms,
        "p20_ms": 0.99 * time_ms,
        "p80_ms": 1.01 * time_ms,
        "mean_ms": time_ms,
        "std_ms": 0.0,
        "min_ms": 0.98 * time_ms,
        "n": 10,
        "half_width_fraction": 0.002,
    }


def contest_metrics(parameters: dict, impl: str, name: str, auto: str) -> dict:
    """Returns what a contest of attention would have recorded."""
    precision = parameters["precision"]
    batch, length, d_head = parameters["batch"] * parameters["heads"], parameters["length"], parameters["d_head"]
    flops = accounting.attention_call_flops(name, batch, length, d_head, causal=parameters["causal"])

    def time_of(one: str) -> float:
        rate = RATES[one] * (1 if precision == "bf16" else 0.1)
        return FLOOR_MS + flops / (rate * 1e12) * 1e3

    time_ms = time_of(impl)
    ratio = time_ms / time_of(auto)
    metrics = {
        **statistics_of(time_ms),
        "flops": flops,
        "achieved_tflops": flops / (time_ms * 1e-3) / 1e12,
        "ceiling": CEILING[precision],
        "ceiling_fraction": flops / (time_ms * 1e-3) / 1e12 / CEILING[precision],
        "is_auto": int(impl == auto),
        **Verdict(2e-3, 2e-3, 0.4).metrics(),
        "ratio_to_ours": ratio,
        "ratio_to_ours_low": 0.99 * ratio,
        "ratio_to_ours_high": 1.01 * ratio,
    }
    if name != "backward":
        metrics |= {"launch_median_ms": LAUNCH_MS, "host_median_ms": max(LAUNCH_MS, time_ms) + 0.01}
        metrics["flush_median_ms"] = 1.01 * time_ms
    if impl.startswith("triton"):
        metrics |= {f"{kernel}_block_{side}": 128 for kernel in ("forward", "dkdv", "dq") for side in "qk"}
    return metrics


def invented(case: Case) -> dict[str, dict]:
    """Returns the fields of a record for every phase of a case."""
    p = case.parameters
    if case.section == "ceilings":
        if p["kind"] == "copy":
            return {"rate": {"metrics": {**statistics_of(1.0), "achieved_gb_per_s": 4000.0}}}
        return {"rate": {"metrics": {**statistics_of(1.0), "achieved_tflops": CEILING[p["precision"]]}}}
    if case.section == "algorithm":
        errors = {}
        for name in ("out", "dq", "dk", "dv"):
            errors |= {f"{name}_{key}": value for key, value in Verdict(2e-7, 1e-7, 0.5).metrics().items()}
        num_tiles = p["length"] // p["tile"]
        samples = {
            f"query {query} {name}": [0.5 + query + (step >= query) for step in range(num_tiles)]
            for query in range(3)
            for name in ("maximum", "denominator", "distance")
        }
        return {"errors": {"metrics": errors}, "trace": {"metrics": {"num_tiles": num_tiles}, "samples": samples}}
    if case.section == "memory":
        shape = (p["batch"] * p["heads"], p["length"], p["d_head"], 2 if p["precision"] == "bf16" else 4)
        linear = 10 * math.prod(shape)
        peak = linear + (3 * shape[0] * shape[1] ** 2 * shape[3] if p["impl"] in MATERIALISING else 0)
        if p["impl"] in MATERIALISING and p["length"] > 65536:
            return {phase: {"status": "oom", "reason": "OutOfMemoryError: no room"} for phase in case.phases}
        return {phase: {"metrics": {"peak_bytes": peak}} for phase in case.phases}
    if case.section == "tiles":
        if (p["block_q"], p["block_k"]) == (256, 128):
            return {"forward": {"status": "skipped", "reason": "OutOfResources: out of resource: shared memory"}}
        time_ms = 1 + abs(math.log2(p["block_q"] / 128)) + abs(math.log2(p["block_k"] / 128))
        shipped = int((p["block_q"], p["block_k"]) == (128, 128))
        metrics = {**statistics_of(time_ms), "achieved_tflops": 100.0, "budget_fraction": 0.3, "is_shipped": shipped}
        return {"forward": {"metrics": metrics}}
    found = {}
    for phase in case.phases:
        impl, name = phase.split(" ")
        if case.section == "weighted_sum":
            rates = {"eager": 1000.0, "compiled": 3000.0, "triton": 3500.0}
            num_bytes = accounting.weighted_sum_bytes(name, p["rows"], p["dim"], 4)
            time_ms = num_bytes / (rates[impl] * 1e9) * 1e3
            metrics = {
                **statistics_of(time_ms),
                "achieved_gb_per_s": rates[impl],
                "ceiling_fraction": rates[impl] / 4e3,
            }
            found[phase] = {"metrics": {**metrics, **Verdict(1e-7, 1e-7, 0.3).metrics()}}
        elif impl == "eager" and p["precision"] != "bf16" and p["length"] == 65536:
            found[phase] = {"status": "oom", "reason": "OutOfMemoryError: CUDA out of memory"}
        elif impl == "fa3" and p["d_head"] == 72:
            found[phase] = {"status": "skipped", "reason": "FlashAttention-3 is not installed"}
        elif impl == "sdpa_efficient" and p["d_head"] == 80 and p["length"] == 128 and name == "backward":
            reason = "AssertionError: wrong: the error of dq is 7.5 times what is allowed"
            found[phase] = {"status": "error", "reason": reason}
        else:
            auto = {"bf16": "gluon", "fp32": "triton", "tf32": "triton_tf32"}[p["precision"]]
            found[phase] = {"metrics": contest_metrics(p, impl, name, auto)}
            if impl == "triton" and p["precision"] == "fp32":
                found[phase]["observed"] = {"products": "tf32x3" if p["length"] < 4096 else "bf16x6"}
    return found


@pytest.fixture
def chapter(tmp_path):
    """Records of every case of the full grid; returns their chapter."""
    folder = tmp_path / DEVICE
    (folder / "records").mkdir(parents=True)
    (folder / "environment.json").write_text(json.dumps({"device": {"name": "an invented device"}}))
    path = folder / "records" / f"{NOTEBOOK}.jsonl"
    lines = []
    for case in cases("full", "cuda"):
        fields = invented(case)
        for phase in case.phases:
            record = Record(
                notebook=NOTEBOOK,
                section=case.section,
                case=case.parameters,
                phase=phase,
                device=DEVICE,
                measurement_version=experiment.MEASUREMENT_VERSION,
                **{"status": "ok", "timer": {"method": "graph"}, **fields[phase]},
            )
            lines.append(json.dumps(dataclasses.asdict(record)) + "\n")
    path.write_text("".join(lines))
    return Chapter(NOTEBOOK, device=DEVICE, output=str(tmp_path))


# ---- the cases ------------------------------------------------------------------------------------------------


def in_section(found: list[Case], section: str) -> list[Case]:
    return [case for case in found if case.section == section]


def test_the_full_grid_is_every_length_head_dimension_and_precision():
    speed = in_section(cases("full", "cuda"), "speed")
    in_turn = [case for case in speed if case.parameters["timed"] == "in turn"]
    shapes = [(p["precision"], p["d_head"], p["length"]) for p in (case.parameters for case in in_turn)]
    lengths = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
    expected = [(p, d, length) for p in ("bf16", "fp32") for d in (16, 32, 64, 72, 80, 128) for length in lengths]
    by_shape = [*((64, length) for length in lengths), *((128, length) for length in (1024, 4096, 16384, 65536))]
    assert shapes == expected + [("tf32", *shape) for shape in by_shape]
    assert {(p["batch"], p["heads"], p["causal"]) for p in (case.parameters for case in speed)} == {(1, 1, True)}
    measured = Counter(phase.split(" ")[0] for case in speed for phase in case.phases)
    assert set(measured) == {
        "gluon", "triton", "triton_ieee", "triton_tf32", "eager", "compiled", "sdpa", "sdpa_math", "sdpa_flash",
        "sdpa_efficient", "sdpa_cudnn", "flex", "fa3",
    }  # fmt: skip
    assert measured["triton"] == 3 * 120 and measured["eager"] == 3 * (120 + len(by_shape))
    assert measured["triton_tf32"] == 3 * len(by_shape) and measured["triton_ieee"] == 3 * 2 * 3
    # Every length in bf16 and TF32 where they compile for a shape, but three of each head dimension in fp32.
    assert measured["flex"] == 3 * (len(by_shape) + 2 * 3) and measured["compiled"] == 3 * 3 * len(by_shape)
    assert measured["gluon"] == measured["fa3"] == 3 * 60, "16-bit only"


def test_what_materialises_the_scores_is_timed_alone_and_the_rest_in_turn():
    for case in in_section(cases("full", "cuda"), "speed"):
        impls = {phase.split(" ")[0] for phase in case.phases}
        if case.parameters["timed"] == "in turn":
            assert impls & {"gluon", "triton", "triton_tf32"} and not impls & set(MATERIALISING)
        else:
            assert {case.parameters["timed"]} == {f"alone: {impl}" for impl in impls} and impls <= set(MATERIALISING)
        assert Counter(phase.split(" ")[1] for phase in case.phases) == dict.fromkeys(PASSES, len(impls))


def test_cases_of_one_shape_follow_one_another():
    """The oracle of the last shape is kept: taken apart they would compute it again each time."""
    speed = in_section(cases("full", "cuda"), "speed")
    shapes = [tuple(case.parameters[name] for name in ("precision", "d_head", "length")) for case in speed]
    assert sum(one != next_one for one, next_one in itertools.pairwise(shapes)) == len(set(shapes)) - 1


def test_the_rivals_meet_on_the_eight_shapes():
    rivals = in_section(cases("full", "cuda"), "rivals")
    shapes = [tuple(case.parameters[name] for name in ("batch", "heads", "length", "d_head", "causal"))
              for case in rivals]  # fmt: skip
    assert shapes == [
        (4, 32, 4096, 64, True),
        (1, 32, 16384, 64, True),
        (1, 32, 16384, 64, False),
        (4, 16, 4096, 128, True),
        (1, 16, 16384, 128, True),
        (1, 16, 16384, 128, False),
        (1, 16, 16384, 64, True),
        (64, 16, 256, 72, False),
    ]
    assert dataclasses.astuple(LEADERBOARD) in shapes
    for case in rivals:
        impls = {phase.split(" ")[0] for phase in case.phases}
        assert {"gluon", "triton", "sdpa_flash", "sdpa_cudnn", "flex", "fa3", "fa3_deterministic"} <= impls


def test_options_narrow_the_grid():
    found = cases("full", "cuda", lengths=[4096], d_heads=[64])
    assert {case.parameters["length"] for case in in_section(found, "speed")} == {4096}
    assert {case.parameters["d_head"] for case in in_section(found, "rivals")} == {64}
    assert {case.parameters["length"] for case in in_section(found, "memory")} == {4096}
    assert len(in_section(found, "ceilings")) == 4


# ---- the gate -------------------------------------------------------------------------------------------------


def noise(reference: torch.Tensor, size: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return reference + size * torch.randn(reference.shape, generator=generator, dtype=reference.dtype)


@pytest.fixture
def reference():
    """What causal attention of random values gives: rows that shrink with their position."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(1, 1, 512, 16, generator=generator, dtype=torch.float64)
    return rows / torch.arange(1, 513, dtype=torch.float64).sqrt()[:, None]


gate = functools.partial(judge, dtype=torch.bfloat16, num_terms=512)


def test_the_gate_lets_what_is_as_exact_as_eager_pass(reference):
    eager = reference.bfloat16().double()
    verdict = gate("out", reference.bfloat16(), reference, eager)
    assert verdict.relative_error == pytest.approx(verdict.eager_relative_error)
    assert 0 < verdict.budget_fraction < 0.5
    assert gate("out", reference, reference, eager).relative_error == 0


@pytest.mark.parametrize(("name", "budget"), [("out", 2), ("dq", 3)])
def test_the_gate_is_twice_the_error_of_eager_for_outputs_and_three_times_for_gradients(reference, name, budget):
    eager = noise(reference, 0.02)
    rounding = 2.0**-9 + 512**0.5 * 2.0**-24
    of_blocks = [
        ((x - y).norm() / y.norm()).item()
        for x, y in zip(eager.split(32, dim=-2), reference.split(32, dim=-2), strict=True)
    ]
    just_inside = budget * (max(of_blocks) + rounding) / max(of_blocks) * 0.999
    wrong_by = eager - reference
    assert gate(name, reference + just_inside * wrong_by, reference, eager).budget_fraction == pytest.approx(1, abs=0.2)
    with pytest.raises(AssertionError, match=f"wrong: the error of {name} is"):
        gate(name, reference + 1.5 * just_inside * wrong_by, reference, eager)


def test_the_gate_sees_late_rows_that_are_small(reference):
    """Zeros in place of the last rows are below the rounding of the first: a largest difference would let them pass."""
    eager = reference.bfloat16().double()
    wrong = reference.clone()
    wrong[..., 480:, :] = 0
    assert (wrong - reference).abs().max() < 0.2 * reference.abs().max()
    with pytest.raises(AssertionError, match="wrong: the error of out"):
        gate("out", wrong, reference, eager)


def test_the_gate_lets_no_nan_pass_and_takes_gradients_that_are_zero(reference):
    eager = reference.bfloat16().double()
    for bad in (math.nan, math.inf):
        wrong = reference.clone()
        wrong[..., 100, 3] = bad
        with pytest.raises(AssertionError, match="wrong"):
            gate("out", wrong, reference, eager)
    with_zeros = reference.clone()
    with_zeros[..., :64, :] = 0
    assert gate("dq", with_zeros.bfloat16(), with_zeros, with_zeros.bfloat16().double()).budget_fraction < 1


@pytest.mark.parametrize("causal", [False, True])
def test_the_oracle_in_blocks_is_the_formula(causal):
    tensors = [torch.randn(2, 3, 50, 8, dtype=torch.float64) for _ in range(4)]
    leaves = [x.clone().requires_grad_() for x in tensors[:3]]
    out = attention_reference(*leaves, causal=causal)
    grads = torch.autograd.grad(out, leaves, tensors[3])
    found = oracle.by_formula(*tensors, causal=causal, num_scores=7 * 2 * 3 * 50)
    for name, expected in zip(("out", "dq", "dk", "dv"), (out, *grads), strict=True):
        assert (found[name] - expected).abs().max() <= 1e-13, name


# ---- contests -------------------------------------------------------------------------------------------------


@pytest.fixture
def this_device_is_a_cpu(monkeypatch):
    oracle.attention_problem.cache_clear()
    yield from on_a_cpu(monkeypatch)
    gc.unfreeze()  # what the experiment has frozen, tensors among it
    gc.collect()
    gc.freeze()


def contest_case(*impls: str, names=PASSES, section="speed", **parameters) -> Case:
    shape = {"batch": 1, "heads": 2, "length": 64, "d_head": 16, "causal": True, "precision": "fp32", **parameters}
    if section == "speed":
        shape["timed"] = "in turn"
    phases = tuple(f"{impl} {name}" for name in names for impl in impls)
    return Case(section, shape, phases, 60.0, 0.01)


def measure(case: Case, ceilings: dict[str, float] | None = None) -> tuple[dict[str, Measured], dict[str, Exception]]:
    """Returns what the phases give, as the session's worker would: after a failure the rest is asked for again."""
    remaining, measured, failed = list(case.phases), {}, {}
    while remaining:
        for phase, run in run_case(dataclasses.replace(case, phases=tuple(remaining)), ceilings or {}):
            remaining.remove(phase)
            try:
                measured[phase] = run()
            except Exception as error:
                failed[phase] = error
                break
    return measured, failed


@pytest.mark.usefixtures("this_device_is_a_cpu")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_contest_measures_what_its_label_says(precision):
    case = contest_case("tiled", "sdpa_flash", "sdpa", precision=precision)
    measured, failed = measure(case, {f"gemm {precision}": 0.5})
    assert not failed and set(measured) == set(case.phases)
    for phase, result in measured.items():
        impl, name = phase.split(" ")
        metrics = result.metrics
        assert result.case == case.parameters
        assert result.observed["ran"] == {"sdpa": "sdpa_flash"}.get(impl, impl)
        assert metrics["is_auto"] == (impl == "tiled") and result.observed["num_candidates"] == 3
        factor = {"forward": 4, "backward": 10, "forward_backward": 14}[name]
        assert metrics["flops"] == factor * 2 * 64 * 64 * 16 / 2
        assert metrics["achieved_tflops"] == pytest.approx(metrics["flops"] / metrics["median_ms"] / 1e9)
        assert metrics["ceiling_fraction"] == pytest.approx(metrics["achieved_tflops"] / 0.5)
        assert 0 < metrics["budget_fraction"] <= 1 and metrics["relative_error"] > 0
        assert metrics["n"] >= contests.MIN_ROUNDS and result.timer["method"] == "host"
        if impl == "tiled":
            assert metrics["ratio_to_ours"] == metrics["ratio_to_ours_low"] == metrics["ratio_to_ours_high"] == 1


@pytest.mark.usefixtures("this_device_is_a_cpu")
def test_what_cannot_run_here_is_skipped_with_its_reason():
    measured, failed = measure(contest_case("triton", "fa3", "tiled", "sdpa_cudnn", names=("forward",)))
    assert set(measured) == {"tiled forward"}
    assert all(isinstance(error, Skip) for error in failed.values())
    assert "CUDA" in str(failed["triton forward"]) and "FlashAttention-3" in str(failed["fa3 forward"])


@pytest.mark.usefixtures("this_device_is_a_cpu")
@pytest.mark.parametrize(("wrong", "passes"), [("output", {"forward"}), ("gradient", {"backward", "forward_backward"})])
def test_what_is_wrong_is_not_timed_and_the_others_are(monkeypatch, wrong, passes):
    original = experiment.attention

    def sabotaged(q, k, v, *, causal, impl):
        out = original(q, k, v, causal=causal, impl=impl)
        if impl != "sdpa_flash":
            return out
        # The output as it should be with another gradient, or the other way round.
        return 1.05 * out - 0.05 * out.detach() if wrong == "gradient" else out + 0.05 * out.detach()

    monkeypatch.setattr(experiment, "attention", sabotaged)
    case = contest_case("tiled", "sdpa_flash")
    measured, failed = measure(case)
    assert set(failed) == {f"sdpa_flash {name}" for name in passes}
    assert all(isinstance(error, AssertionError) and "wrong:" in str(error) for error in failed.values())
    assert set(measured) == set(case.phases) - set(failed)


@pytest.mark.usefixtures("this_device_is_a_cpu")
def test_an_out_of_memory_of_one_timed_alone_ends_all_that_is_left_of_it(monkeypatch):
    """It is raised while nothing is current, so that the session records it for every remaining phase at once."""
    original = experiment.attention

    def exhausted(q, k, v, *, causal, impl):
        if impl == "eager":
            raise torch.OutOfMemoryError("no room")
        return original(q, k, v, causal=causal, impl=impl)

    monkeypatch.setattr(experiment, "attention", exhausted)
    with pytest.raises(torch.OutOfMemoryError):
        next(run_case(contest_case("eager"), {}))


@pytest.mark.usefixtures("this_device_is_a_cpu")
def test_rounds_end_by_the_time_limit_but_for_a_few():
    slow = dataclasses.replace(contest_case("tiled", names=("forward",), length=512), time_limit_s=1e-4)
    measured, _ = measure(slow)
    assert measured["tiled forward"].metrics["n"] == contests.MIN_ROUNDS
    fast = dataclasses.replace(contest_case("sdpa_flash", names=("forward",)), time_limit_s=10.0)
    measured, _ = measure(fast)
    assert measured["sdpa_flash forward"].metrics["n"] == contests.MAX_ROUNDS
    ranked = dataclasses.replace(contest_case("sdpa_flash", names=("forward",), section="rivals"), time_limit_s=10.0)
    measured, _ = measure(ranked)
    assert measured["sdpa_flash forward"].metrics["n"] == contests.MAX_RANKING_ROUNDS > contests.MAX_ROUNDS


def test_what_cannot_be_captured_is_timed_with_events_and_its_launch_apart(monkeypatch):
    """On CUDA a graph is tried first; a failed capture falls back, an out-of-memory does not."""
    asked = []

    class Contest:
        device = hardware.Device("cuda", "a GPU", "a-gpu")
        is_ranking = False

        def call(self, impl, name):
            return lambda: None

    def compare(calls, *, method, baseline, **_):
        asked.append((method, baseline, tuple(calls)))
        if method == "graph":
            raise error
        return "compared"

    monkeypatch.setattr(contests, "compare", compare)
    monkeypatch.setattr(contests, "_time_once", lambda *_: 1.0)
    monkeypatch.setattr(contests, "time_callable", lambda *_, method, **__: method)
    error = RuntimeError("operation not permitted when stream is capturing")
    results = contests._time_in_turn(Contest(), "forward", ["flex", "fa3"], None, 0.1)
    assert asked == [("graph", "flex", ("flex", "fa3")), ("flush", "flex", ("flex", "fa3"))]
    assert results.comparison == "compared" and results.launches == {"flex": "window", "fa3": "window"}
    assert results.flushed == {} and contests._time_in_turn(Contest(), "backward", ["flex"], None, 0.1).launches == {}
    monkeypatch.setattr(Contest, "is_ranking", True)
    assert contests._time_in_turn(Contest(), "forward", ["flex"], None, 0.1).flushed == {"flex": "flush"}
    monkeypatch.setattr(contests, "_time_once", lambda *_: 2 * contests.LAUNCH_LIMIT_MS)
    assert contests._time_in_turn(Contest(), "forward", ["flex"], None, 0.1).launches == {}
    error = torch.OutOfMemoryError("no room")
    with pytest.raises(torch.OutOfMemoryError):
        contests._time_in_turn(Contest(), "forward", ["flex"], None, 0.1)


@pytest.mark.usefixtures("this_device_is_a_cpu")
def test_ratios_are_to_what_auto_runs_unless_one_is_alone():
    parameters = contest_case("tiled").parameters
    together = Case("speed", parameters, (), 60.0)
    alone = Case("speed", {**parameters, "timed": "alone: eager"}, (), 60.0)
    assert AttentionContest(CPU, together, {}).baseline == "tiled"
    assert AttentionContest(CPU, alone, {}).baseline is None


@pytest.mark.usefixtures("this_device_is_a_cpu")
def test_a_resumed_contest_takes_its_baseline_along_unless_that_is_wrong(monkeypatch):
    case = contest_case("sdpa_flash", names=("forward",))
    measured, _ = measure(case)
    assert set(measured) == set(case.phases) and measured["sdpa_flash forward"].observed["num_candidates"] == 2
    assert measured["sdpa_flash forward"].metrics["ratio_to_ours"] > 0
    original = experiment.attention
    monkeypatch.setattr(
        experiment,
        "attention",
        lambda q, k, v, *, causal, impl: original(q, k, v, causal=causal, impl=impl) + (impl == "tiled"),
    )
    measured, _ = measure(case)
    assert measured["sdpa_flash forward"].observed["num_candidates"] == 1
    assert "ratio_to_ours" not in measured["sdpa_flash forward"].metrics


@pytest.mark.usefixtures("this_device_is_a_cpu")
def test_the_formula_of_the_weighted_sum_is_gated_and_timed():
    parameters = {"rows": 37, "dim": 11, "precision": "fp32"}
    phases = tuple(f"{impl} {name}" for name in PASSES for impl in ("eager", "triton"))
    measured, failed = measure(Case("weighted_sum", parameters, phases, 60.0, 0.01), {"copy": 10.0})
    assert set(measured) == {f"eager {name}" for name in PASSES}
    assert set(failed) == {f"triton {name}" for name in PASSES}
    forward = measured["eager forward"]
    assert forward.case == parameters
    assert forward.metrics["num_bytes"] == 4 * (37 * 11 + 11 + 37)
    assert forward.metrics["ceiling_fraction"] == pytest.approx(forward.metrics["achieved_gb_per_s"] / 10)


# ---- the small case, tiles and memory -------------------------------------------------------------------------


def algorithm_case(tile: int, causal: bool, *phases: str) -> Case:
    parameters = {**experiment.ALGORITHM, "tile": tile, "causal": causal, "precision": "fp32"}
    return Case("algorithm", parameters, phases, 60.0)


@pytest.mark.usefixtures("this_device_is_a_cpu")
def test_online_softmax_ends_at_the_softmax():
    measured, _ = measure(algorithm_case(16, False, "errors", "trace"))
    samples = measured["trace"].samples
    generator = torch.Generator().manual_seed(0)
    q, k, *_ = (torch.randn((1, 1, 96, 16), generator=generator) for _ in range(4))
    scores = (q[0, 0, :3].double() @ k[0, 0].double().T) / 4
    for query in range(experiment.TRACED_QUERIES):
        maxima, denominators = (samples[f"query {query} {name}"] for name in ("maximum", "denominator"))
        assert len(maxima) == 6 and maxima == sorted(maxima)
        assert maxima[-1] == pytest.approx(scores[query].max().item(), rel=1e-6)
        expected = (scores[query] - scores[query].max()).exp().sum().item()
        assert denominators[-1] == pytest.approx(expected, rel=1e-5)
        assert samples[f"query {query} distance"][0] > samples[f"query {query} distance"][-1] == 0
    assert measured["errors"].metrics["out_budget_fraction"] <= 1


def is_interpreted() -> bool:
    return experiment.labkit_flash.IS_INTERPRETED


def measure_here(case: Case) -> dict[str, dict]:
    """Returns the metrics that the phases of a case give in the process this is called in."""
    measured, failed = measure(case)
    assert not failed, failed
    return {phase: result.metrics for phase, result in measured.items()}


@pytest.mark.parametrize(("block_q", "shipped"), [(32, 1), (16, 0)])
def test_a_tile_is_gated_and_timed(interpreted, block_q, shipped):
    tile = {"block_q": block_q, "block_k": 16, "num_warps": 4, "num_stages": 1}
    case = Case("tiles", {**contest_case("triton", section="tiles").parameters, **tile}, ("forward",), 60.0, 0.01)
    metrics = interpreted(measure_here, case)["forward"]
    assert metrics["is_shipped"] == shipped and 0 < metrics["budget_fraction"] <= 1 and metrics["median_ms"] > 0


def test_the_first_kernel_takes_part_where_it_runs(interpreted):
    phases = tuple(f"triton {name}" for name in PASSES)
    metrics = interpreted(
        measure_here, Case("weighted_sum", {"rows": 33, "dim": 7, "precision": "fp32"}, phases, 60.0, 0.01)
    )
    assert set(metrics) == set(phases) and all(0 < m["budget_fraction"] <= 1 for m in metrics.values())


def test_the_triton_attention_takes_part_where_it_runs(interpreted):
    metrics = interpreted(measure_here, contest_case("triton", "tiled", heads=1, length=32))
    assert set(metrics) == {f"{impl} {name}" for impl in ("triton", "tiled") for name in PASSES}
    assert metrics["triton forward"]["forward_block_q"] == 32
    assert metrics["tiled forward"]["is_auto"] == 1


@pytest.mark.usefixtures("this_device_is_a_cpu")
@pytest.mark.parametrize("error", ["OutOfResources", "CompilationError"])
def test_a_tile_that_does_not_fit_is_skipped_and_a_wrong_one_is_an_error(monkeypatch, error):
    import triton.errors

    monkeypatch.setattr(experiment.labkit_flash, "IS_INTERPRETED", True)

    def failing(*_, **__):
        raise type(error, (triton.errors.TritonError,), {})("shared memory, Required: 1, limit: 0\nand more")

    tile = {"block_q": 16, "block_k": 16, "num_warps": 4, "num_stages": 1}
    case = Case("tiles", {**contest_case("triton", section="tiles").parameters, **tile}, ("forward",), 60.0, 0.01)
    monkeypatch.setattr(experiment.labkit_flash, "flash_attention_forward", failing)
    _, failed = measure(case)
    assert isinstance(failed["forward"], Skip)
    assert str(failed["forward"]) == f"{error}: shared memory, Required: 1, limit: 0"
    monkeypatch.setattr(
        experiment.labkit_flash, "flash_attention_forward", lambda q, *_, **__: (torch.full_like(q, math.nan), None)
    )
    _, failed = measure(case)
    assert isinstance(failed["forward"], AssertionError)


@pytest.mark.usefixtures("this_device_is_a_cpu")
def test_memory_is_skipped_where_nothing_counts_it():
    case = Case("memory", {**contest_case("eager", section="memory").parameters, "impl": "eager"}, ("forward",), 60.0)
    with pytest.raises(Skip, match="CUDA's allocator"):
        next(run_case(case, {}))


# ---- the report -----------------------------------------------------------------------------------------------


def change(chapter: Chapter, match, **fields) -> None:
    """Appends newer records like those that `match`, with other metrics or another status."""
    store = RecordStore(chapter.folder / "records" / f"{NOTEBOOK}.jsonl")
    changed = [record for record in newest(store.load()) if match(record)]
    assert changed
    for record in changed:
        if "status" in fields:
            store.append(dataclasses.replace(record, metrics={}, **fields))
        elif "observed" in fields:
            store.append(dataclasses.replace(record, **fields))
        else:
            around = dict.fromkeys(("min_ms", "p20_ms", "p80_ms"), fields["median_ms"]) if "median_ms" in fields else {}
            store.append(dataclasses.replace(record, metrics={**record.metrics, **around, **fields}))


def is_case(record: Record, section: str, phase: str, **case) -> bool:
    return record.section == section and record.phase == phase and case.items() <= record.case.items()


def differing(old, new) -> int:
    return int((old != new).to_numpy().sum())


def test_a_changed_time_changes_table_figure_and_finding(chapter):
    before = chapter.records("speed")
    change(
        chapter,
        lambda r: is_case(r, "speed", "gluon forward", length=4096, d_head=64, precision="bf16"),
        median_ms=77.7, p20_ms=77.7, p80_ms=77.7,
    )  # fmt: skip
    after = chapter.records("speed")
    old, new = (report.table_times(frame, "bf16", 64, "forward") for frame in (before, after))
    assert differing(old, new) == 1 and "77.7" in new.to_string()
    old, new = (figures.svg(report.figure_times(frame, "bf16", "forward")) for frame in (before, after))
    assert old != new
    old, new = (" ".join(report.findings_speed(frame, "bf16")) for frame in (before, after))
    assert "slower in 1: d 64 at 4096" not in old and "slower in 1: d 64 at 4096" in new
    assert differing(report.table_speedups(before, "bf16"), report.table_speedups(after, "bf16")) > 0
    assert differing(report.table_everything(before, "bf16"), report.table_everything(after, "bf16")) == 1


def test_every_timed_result_has_its_error_beside_it(chapter):
    frame = chapter.records("speed")
    table = report.table_everything(frame, "bf16")
    assert set(table.columns) >= {"forward (ms)", "forward TFLOP/s", "output error", "gradient error"}
    change(
        chapter,
        lambda r: is_case(r, "speed", "fa3 forward", length=128, d_head=16, precision="bf16"),
        relative_error=0.0123,
    )
    assert "1.2e-2" in report.table_everything(chapter.records("speed"), "bf16").to_string()
    assert "1.2e-2" not in table.to_string()


def test_ours_is_what_auto_runs(chapter):
    assert "8 of 8" in " ".join(report.findings_rivals(chapter.records("rivals")))
    change(chapter, lambda r: is_case(r, "rivals", "gluon forward", length=256), is_auto=0)
    change(chapter, lambda r: is_case(r, "rivals", "triton forward", length=256), is_auto=1)
    ratios = report.table_rival_ratios(chapter.records("rivals"), "forward").set_index("B,H,S,D mask")
    assert ratios.loc["64,16,256,72 full", "Triton (ours)"] == "ours"
    assert ratios.loc["4,32,4096,64 causal", "Gluon (ours)"] == "ours"


def test_ahead_behind_and_not_told_apart_follow_the_interval(chapter):
    def sentence() -> str:
        (found,) = [
            text
            for text in report.findings_rivals(chapter.records("rivals"))
            if text.startswith("Forward: ours is ahead of SDPA cuDNN")
        ]
        return found

    assert "ahead of SDPA cuDNN on 8 of 8 shapes" in sentence()
    cudnn = functools.partial(is_case, section="rivals", phase="sdpa_cudnn forward", length=4096, d_head=128)
    change(chapter, cudnn, ratio_to_ours=1.02, ratio_to_ours_low=0.99, ratio_to_ours_high=1.04)
    assert "on 7 of 8 shapes" in sentence() and "1 not told apart" in sentence()
    change(chapter, cudnn, ratio_to_ours=0.9, ratio_to_ours_low=0.88, ratio_to_ours_high=0.92)
    assert "behind on 1: 4,16,4096,128 causal (0.900×)" in sentence()


def test_what_computed_the_gradients_is_said(chapter):
    assert "gradients of" not in " ".join(report.findings_rivals(chapter.records("rivals")))
    for length, kernels in ((4096, "one pass"), (256, "two passes")):
        of_length = functools.partial(is_case, section="rivals", phase="gluon backward", length=length)
        change(chapter, of_length, observed={"backward": kernels})
    (sentence,) = [text for text in report.findings_rivals(chapter.records("rivals")) if "gradients of" in text]
    assert "added in order (2 shapes) and two passes over the tiles (1 shape)" in sentence
    assert "Triton" not in sentence
    change(chapter, lambda r: is_case(r, "speed", "gluon backward", d_head=64), observed={"backward": "triton"})
    assert "share a walk among programs where tiles are few (10 shapes)" in " ".join(
        report.findings_speed(chapter.records("speed"), "bf16")
    )


def test_rows_of_the_rivals_keep_the_order_of_the_shapes(chapter):
    table = report.table_rivals(chapter.records("rivals"), "forward")
    assert list(table["B,H,S,D mask"])[-2:] == ["1,16,16384,64 causal", "64,16,256,72 full"]
    assert table.columns[1] == "Gluon (ours)"
    assert list(table["FlashAttention-3"])[-1] == "skipped"


def test_the_leaderboards_row_is_set_beside_the_best_entry(chapter):
    leaderboard = functools.partial(is_case, section="rivals", length=16384, d_head=64, heads=16)
    table = report.table_leaderboard(chapter.records("rivals"))
    assert table.iloc[0]["implementation"] == "FlashAttention-3" and "5.36" in table.iloc[-1].to_string()
    change(chapter, lambda r: leaderboard(r, phase="gluon forward_backward"), median_ms=1.234)
    frame = chapter.records("rivals")
    assert report.table_leaderboard(frame).iloc[0]["forward + backward (ms)"] == "1.23"
    fastest, entry = report.findings_leaderboard(frame)
    assert "Gluon (ours) is the fastest here, 1.23 ms" in fastest and "is faster than" in entry
    change(chapter, lambda r: leaderboard(r, phase="gluon forward_backward"), median_ms=5.4)
    assert "takes about the same time as" in report.findings_leaderboard(chapter.records("rivals"))[1]
    change(chapter, lambda r: leaderboard(r, phase="gluon forward_backward"), median_ms=6.0)
    assert "is slower than" in report.findings_leaderboard(chapter.records("rivals"))[1]


def test_an_out_of_memory_is_a_word_a_mark_and_a_sentence(chapter):
    frame = chapter.records("speed")
    table = report.table_times(frame, "fp32", 64, "forward").set_index("length")
    assert table.loc[65536, "eager"] == "oom" and table.loc[32768, "eager"] != "oom"
    assert "eager runs out of memory in fp32: backward from length 65536" in " ".join(
        report.findings_speed(frame, "fp32")
    )
    before = figures.svg(report.figure_times(frame, "fp32"))
    change(
        chapter,
        lambda r: is_case(r, "speed", "eager forward_backward", length=32768, d_head=16, precision="fp32"),
        status="oom", reason="OutOfMemoryError",
    )  # fmt: skip
    frame = chapter.records("speed")
    assert figures.svg(report.figure_times(frame, "fp32")) != before
    text = " ".join(report.findings_speed(frame, "fp32"))
    assert "forward + backward from length 32768 (d 16)" in text


def test_skipped_and_wrong_results_are_named_with_their_reason(chapter):
    frames = chapter.records("speed"), chapter.records("rivals")
    reasons = report.table_not_run(*frames).set_index("reason")["results"]
    assert reasons["FlashAttention-3 is not installed"] == 30 + 3
    gate = report.table_gate(*frames).set_index(["implementation", "precision"])
    assert gate.loc[("SDPA efficient", "bf16"), "wrong"] == 1 and gate.loc[("eager", "fp32"), "out of memory"] == 18
    text = " ".join(report.findings_gate(*frames))
    assert "SDPA efficient was **not** right in 2 results" in text and "worst error is 40 %" in text
    change(
        chapter,
        lambda r: is_case(r, "speed", "flex backward", length=1024, d_head=64, precision="bf16"),
        budget_fraction=0.97,
    )
    text = " ".join(report.findings_gate(chapter.records("speed"), frames[1]))
    assert "worst error is 97 % of what is allowed (FlexAttention, bf16, backward, 1,1,1024,64 causal)" in text


def test_an_implementation_that_was_skipped_everywhere_has_no_column(chapter):
    change(chapter, lambda r: r.section == "rivals" and r.phase.startswith("fa3"), status="skipped", reason="absent")
    assert "FlashAttention-3" not in report.table_rivals(chapter.records("rivals"), "forward")
    assert "FlashAttention-3" not in " ".join(report.findings_rivals(chapter.records("rivals")))


def test_methods_of_the_timer_are_counted_and_cross_checked(chapter):
    frames = chapter.records("speed"), chapter.records("rivals")
    counted, agreed = report.findings_timer(*frames)
    assert re.fullmatch(r"Timed by graph: [\d,]+ results.", counted)
    assert "agree within 5.0 %" in agreed and "1.0 %" in agreed
    change(
        chapter,
        lambda r: is_case(r, "rivals", "triton forward", length=256),
        flush_median_ms=1.0,
    )
    assert "do **not** agree within 5.0 %" in report.findings_timer(frames[0], chapter.records("rivals"))[1]
    store = RecordStore(chapter.folder / "records" / f"{NOTEBOOK}.jsonl")
    (record,) = [r for r in newest(store.load()) if is_case(r, "rivals", "flex forward", length=256)]
    store.append(dataclasses.replace(record, timer={"method": "flush"}))
    counted = report.findings_timer(frames[0], chapter.records("rivals"))[0]
    assert counted.endswith("; by flush: 1 result (FlexAttention).")


def test_launch_bound_calls_are_named_and_shaded(chapter):
    frame = chapter.records("speed")
    text = " ".join(report.findings_speed(frame, "bf16"))
    assert re.search(
        r"Forward of ours is launch-bound in \d+ of 60 cases, up to length \d+: the host takes 40.0 µs", text
    )
    shaded = figures.svg(report.figure_times(frame, "bf16", "forward"))
    change(chapter, lambda r: r.section == "speed" and r.phase.startswith("gluon"), launch_median_ms=0.001)
    frame = chapter.records("speed")
    assert "Forward of ours is launch-bound" not in " ".join(report.findings_speed(frame, "bf16"))
    assert figures.svg(report.figure_times(frame, "bf16", "forward")) != shaded


def test_short_calls_are_compared_with_the_launch_included(chapter):
    def sentence() -> str:
        (found,) = [
            text
            for text in report.findings_speed(chapter.records("speed"), "bf16")
            if text.startswith("Against SDPA's default, launch included, at length 128–512 (forward),")
        ]
        return found

    assert "faster in 0 of 18" in sentence() and "slower" not in sentence()
    change(
        chapter,
        lambda r: is_case(r, "speed", "gluon forward", precision="bf16", d_head=16) and r.case["length"] <= 512,
        host_median_ms=1.0,
    )
    assert "slower in 3: d 16 at 128" in sentence()


def test_memory_is_said_to_grow_as_it_does(chapter):
    frame = chapter.records("memory")
    text = " ".join(report.findings_memory(frame))
    assert "grows at most linearly with the length for Gluon (ours) (exponent 1.00)" in text
    assert "grows quadratically with the length for SDPA math" in text
    assert "eager in bf16 runs out of memory at length 131072, where ours needs 160 MiB" in text
    old = figures.svg(report.figure_memory(frame))
    change(chapter, lambda r: is_case(r, "memory", "forward_backward", impl="gluon", length=65536), peak_bytes=2**34)
    frame = chapter.records("memory")
    text = " ".join(report.findings_memory(frame))
    assert re.search(r"grows in between with the length for Gluon", text)
    assert (
        "16,384" in report.table_memory(frame, "bf16").to_string() and figures.svg(report.figure_memory(frame)) != old
    )


def test_tiles_say_which_is_fastest_and_what_did_not_fit(chapter):
    frame = chapter.records("tiles")
    text = " ".join(report.findings_tiles(frame))
    assert "Of 19 tile configurations the fastest is 128 × 128" in text and "is the fastest." in text
    assert "1 configuration ended skipped: 256 × 128" in text
    old = figures.svg(report.figure_tiles(frame))
    change(chapter, lambda r: is_case(r, "tiles", "forward", block_q=64, block_k=64), median_ms=0.5)
    frame = chapter.records("tiles")
    text = " ".join(report.findings_tiles(frame))
    assert "the fastest is 64 × 64" in text and "is **not** the fastest (100 % more time)" in text
    assert figures.svg(report.figure_tiles(frame)) != old
    table = report.table_tiles(frame)
    assert table.iloc[0]["tile"] == "64 × 64" and table.iloc[-1]["tile"] == "256 × 128"
    assert "shared memory" in table.iloc[-1]["reason"]
    change(
        chapter, lambda r: is_case(r, "tiles", "forward", block_q=32), status="error", reason="AssertionError: wrong:"
    )
    assert "4 configurations ended error: 32 × 16" in " ".join(report.findings_tiles(chapter.records("tiles")))


def test_the_shipped_tiles_are_shown(chapter):
    table = report.table_tiles_chosen(chapter.records("speed"))
    names = [report.NAMES[impl] for impl in ("triton", "triton_ieee", "triton_tf32")]
    assert table["kernels"].value_counts().reindex(names).tolist() == [2 * 6, 2, 2]
    assert set(table["forward"]) == {"128 × 128"}


def test_several_products_are_compared_with_the_cuda_cores(chapter):
    short, short_errors, long, long_errors = report.findings_products(chapter.records("speed"))
    assert "at length 1024, a kernel of three products of TF32 on the tensor cores" in short
    assert "at length 4096–16384, a kernel of six products of bf16 on the tensor cores" in long
    assert "faster in 6 of 6 cases" in short and "faster in 12 of 12 cases" in long
    assert short_errors == long_errors == "Its errors against fp64 are 1.00× those of the other."
    change(chapter, lambda r: r.section == "speed" and r.phase.startswith("triton_ieee"), status="skipped", reason="-")
    assert report.findings_products(chapter.records("speed")) == []


def test_the_first_kernel_is_compared_with_the_formula(chapter):
    text = " ".join(report.findings_weighted_sum(chapter.records("weighted_sum")))
    assert "Against eager, the kernel is 3.50× as fast: faster in 6 of 6 cases." in text and "88 %" in text
    change(chapter, lambda r: is_case(r, "weighted_sum", "triton backward", rows=65536), median_ms=100.0)
    frame = chapter.records("weighted_sum")
    text = " ".join(report.findings_weighted_sum(frame))
    assert "slower in 1: backward" in text and "100" in report.table_weighted_sum(frame).to_string()


def test_the_algorithm_is_said_to_be_as_exact_as_it_is(chapter):
    frame = chapter.records("algorithm")
    text = " ".join(report.findings_algorithm(frame))
    assert "2.00× the eager formula's error" in text and "no error is above 50 %" in text
    old = figures.svg(report.figure_online_softmax(frame))
    store = RecordStore(chapter.folder / "records" / f"{NOTEBOOK}.jsonl")
    (record,) = [r for r in newest(store.load()) if is_case(r, "algorithm", "trace", tile=8)]
    samples = {**record.samples, "query 0 maximum": [float(step) for step in range(12)]}
    store.append(dataclasses.replace(record, samples=samples))
    frame = chapter.records("algorithm")
    assert "moves 1 to 11 times" in " ".join(report.findings_algorithm(frame)), "eleven of twelve tiles raise it now"
    assert figures.svg(report.figure_online_softmax(frame)) != old


def test_published_times_stand_beside_the_same_shape(chapter):
    matches = report.published_matches(chapter.records("speed"))
    ours = contest_metrics(
        {"batch": 1, "heads": 1, "length": 16384, "d_head": 64, "causal": True, "precision": "bf16"},
        "gluon", "forward", "gluon",
    )  # fmt: skip
    row = matches[
        (matches["length"] == 16384) & (matches["d_head"] == 64) & (matches["precision"] == "bf16")
        & (matches["name"] == "forward") & (matches["variant"] == "Triton")
    ].iloc[0]  # fmt: skip
    assert row["published_ms"] == 0.409 and row["ratio"] == pytest.approx(0.409 / ours["median_ms"])
    assert len(matches[matches["variant"] == "Triton"]) == 3 * 68
    change(chapter, lambda r: r.section == "speed" and r.phase == "gluon forward", median_ms=1e6)
    text = " ".join(report.findings_published(chapter.records("speed")))
    assert re.search(r"In bf16, over 36 shapes .*Triton.*: forward slower", text)
    rates = report.table_published_rates(chapter.records("rivals"))
    assert list(rates["published (TFLOP/s)"]) == ["673", "579", "702", "612"]


def test_without_records_every_section_says_so(tmp_path):
    empty = Chapter(NOTEBOOK, device="abacus", output=str(tmp_path)).records("speed")
    arguments = {
        "table_times": ("bf16", 64, "forward"),
        "table_everything": ("bf16",),
        "table_speedups": ("bf16",),
        "figure_times": ("bf16",),
        "figure_rates": ("bf16",),
        "findings_speed": ("bf16",),
        "table_rivals": ("forward",),
        "table_rival_ratios": ("forward",),
        "table_memory": ("bf16",),
    }
    names = [name for name in dir(report) if name.startswith(("table_", "figure_", "findings_"))]
    assert set(arguments) <= set(names) and len(names) >= 30
    for name in names:
        result = getattr(report, name)(empty, *arguments.get(name, ()))
        assert result is None if name.startswith("figure_") else len(result) == 0, name


def test_figures_are_the_same_bytes_twice_and_every_colour_is_its_own(chapter):
    for make, section in ((report.figure_rivals, "rivals"), (report.figure_memory, "memory")):
        frame = chapter.records(section)
        assert figures.svg(make(frame)) == figures.svg(make(frame))
    assert len({figures.COLOURS[impl] for impl in report.NAMES}) == len(report.NAMES)


# ---- an execution here ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_smoke_profile_runs_through(tmp_path):
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    narrowed = ("-p", "lengths=128", "-p", "d_heads=16")
    command = [sys.executable, "-m", "labkit", "run", "06", "--profile", "smoke", *narrowed, "--output", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    (folder,) = tmp_path.iterdir()
    records = RecordStore(folder / "records" / f"{NOTEBOOK}.jsonl").load()
    sections = {"ceilings", "algorithm", "weighted_sum", "speed", "rivals", "tiles", "memory"}
    assert {record.section for record in records} == sections
    assert {record.status for record in records} == {"ok", "skipped"}
    timed = {record.phase.split(" ")[0] for record in records if record.section == "speed" and record.status == "ok"}
    assert timed == {"tiled", "eager", "compiled", "sdpa", "sdpa_math", "sdpa_flash"}
    skipped = {record.phase.split(" ")[0]: record.reason for record in records if record.status == "skipped"}
    assert all(skipped[impl] for impl in ("triton", "gluon", "fa3", "flex", "sdpa_cudnn", "sdpa_efficient"))
    text = (folder / "report.md").read_text(encoding="utf-8")
    for heading in ("The algorithm on a small case", "A first kernel", "The gate", "Rivals", "Memory"):
        assert f"### {heading}" in text
    for name in ("06_online_softmax.svg", "06_times_bf16.svg", "06_rivals.svg"):
        assert f"({name})" in text and (folder / name).exists()


def test_versions_are_data_and_their_findings_follow_them():
    frame = report.versions()
    assert set(frame["kept"]) == {"yes", "no"}
    assert set(frame.dropna()["compared"]) == {"one process", "two processes"}
    assert len(report.table_versions(frame)) == len(frame)
    lost = frame.assign(gained_percent=-1.0)
    found = " ".join(report.findings_versions(lost))
    assert f"timed 0 gained what was predicted or more, {len(frame)} gained" in found
    assert report.findings_versions(frame.assign(gained_percent=float("nan"))) == []
