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
from collections import Counter

import pytest
import torch
from chapters import CPU, in_section, on_a_cpu, run_smoke

from labkit import accounting, hardware, lessons
from labkit.configs import FLASH_ATTENTION, LEADERBOARD, MATERIALISING, PASSES
from labkit.experiments import contest as contests
from labkit.experiments import flash_attention as experiment
from labkit.experiments import oracle, sections
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

RATES = {
    "gluon": 500.0, "gluon_unordered": 510.0, "triton": 400.0, "fa3": 520.0, "sdpa_cudnn": 450.0, "sdpa_flash": 300.0,
    "sdpa_efficient": 150.0, "flex": 350.0, "sdpa": 300.0, "sdpa_math": 20.0, "compiled": 60.0, "eager": 30.0,
    "fa3_deterministic": 430.0, "triton_ieee": 90.0, "triton_tf32": 800.0,
}  # fmt: skip
"""TFLOP/s of each implementation on the invented device in bf16; a tenth of it in fp32 and TF32."""

FLOOR_MS, LAUNCH_MS, CEILING = 0.005, 0.04, {"bf16": 700.0, "fp32": 50.0, "tf32": 350.0}


def timed(time_ms: float, **metrics) -> dict:
    ends = {"median_ms": time_ms, "p20_ms": 0.99 * time_ms, "p80_ms": 1.01 * time_ms, "half_width_fraction": 0.002}
    return {"metrics": {**ends, **metrics}}


def ratio_metrics(ratio: float, low: float, high: float) -> dict:
    return {"ratio_to_ours": ratio, "ratio_to_ours_low": low, "ratio_to_ours_high": high}


def contest(p: dict, impl: str, name: str) -> dict:
    """Returns what a contest of attention would have recorded, by a fixed rate and a floor."""
    share = 1 if p["precision"] == "bf16" else 0.1
    auto = {"bf16": "gluon", "fp32": "triton", "tf32": "triton_tf32"}[p["precision"]]
    flops = accounting.attention_call_flops(name, p["batch"] * p["heads"], p["length"], p["d_head"], causal=p["causal"])
    time_ms, ours_ms = (FLOOR_MS + flops / (RATES[one] * share * 1e9) for one in (impl, auto))
    calls = {"launch_median_ms": LAUNCH_MS, "host_median_ms": max(LAUNCH_MS, time_ms) + 0.01}
    calls |= {"flush_median_ms": 1.01 * time_ms}
    rates = {"achieved_tflops": flops / time_ms / 1e9, "ceiling": CEILING[p["precision"]], "is_auto": int(impl == auto)}
    ratios = ratio_metrics(*(by * time_ms / ours_ms for by in (1, 0.99, 1.01)))
    errors = Verdict(2e-3, 2e-3, 0.4).metrics()
    return timed(time_ms, **rates, **errors, **ratios, **(calls if name != "backward" else {}))


def invented(case: Case, phase: str) -> dict:
    """Returns the fields of a record of the case."""
    p = case.parameters
    if case.section == "ceilings":
        return timed(1.0)
    if phase == "errors":
        found = {name: Verdict(2e-7, 1e-7, 0.5).metrics() for name in ("out", "dq", "dk", "dv")}
        return {"metrics": {f"{name}_{key}": value for name, values in found.items() for key, value in values.items()}}
    if phase == "trace":
        names = [f"query {query} {name}" for query in range(3) for name in ("maximum", "denominator", "distance")]
        return {"samples": {name: [float(step >= 1) for step in range(p["length"] // p["tile"])] for name in names}}
    if case.section == "memory":
        size = 2 if p["precision"] == "bf16" else 4
        scores = 3 * p["length"] ** 2 * size if p["impl"] in MATERIALISING else 0
        if scores and p["length"] > 65536:
            return {"status": "oom", "reason": "OutOfMemoryError: no room"}
        return {"metrics": {"peak_bytes": 10 * p["length"] * p["d_head"] * size + scores}}
    if case.section == "tiles":
        if (p["block_q"], p["block_k"]) == (256, 128):
            return {"status": "skipped", "reason": "OutOfResources: out of resource: shared memory"}
        time_ms = 1 + abs(math.log2(p["block_q"] / 128)) + abs(math.log2(p["block_k"] / 128))
        return timed(time_ms, achieved_tflops=100.0, is_shipped=int((p["block_q"], p["block_k"]) == (128, 128)))
    impl, name = phase.split(" ")
    if case.section == "weighted_sum":
        return timed({"eager": 3.5, "compiled": 1.2, "triton": 1.0}[impl])
    if impl == "eager" and p["precision"] != "bf16" and p["length"] == 65536:
        return {"status": "oom", "reason": "OutOfMemoryError: CUDA out of memory"}
    if impl == "fa3" and p["d_head"] == 72:
        return {"status": "skipped", "reason": "FlashAttention-3 is not installed"}
    if impl == "sdpa_efficient" and p["d_head"] == 80 and p["length"] == 128 and name == "backward":
        return {"status": "error", "reason": "AssertionError: wrong: the error of dq is 7.5 times what is allowed"}
    products = {"products": "tf32x3" if p["length"] < 4096 else "bf16x6"} if impl == "triton" else {}
    return {**contest(p, impl, name), "observed": products}


@functools.cache
def full_records() -> str:
    """Returns lines of records of every case of the full grid."""
    known = {"device": DEVICE, "measurement_version": experiment.MEASUREMENT_VERSION}
    fields = {"status": "ok", "timer": {"method": "graph"}}
    records = (
        Record(NOTEBOOK, case.section, case.parameters, phase, **known, **{**fields, **invented(case, phase)})
        for case in cases("full", "cuda")
        for phase in case.phases
    )
    return "".join(json.dumps(dataclasses.asdict(record)) + "\n" for record in records)


@pytest.fixture
def chapter(tmp_path):
    (tmp_path / DEVICE / "records").mkdir(parents=True)
    (tmp_path / DEVICE / "environment.json").write_text(json.dumps({"device": {"name": "an invented device"}}))
    (tmp_path / DEVICE / "records" / f"{NOTEBOOK}.jsonl").write_text(full_records())
    return Chapter(NOTEBOOK, device=DEVICE, output=str(tmp_path))


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
    for section, name, value in (("speed", "length", 4096), ("rivals", "d_head", 64), ("memory", "length", 4096)):
        assert {case.parameters[name] for case in in_section(found, section)} == {value}
    assert len(in_section(found, "ceilings")) == 4


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
    with_zeros = reference.clone()
    with_zeros[..., :64, :] = 0
    assert gate("dq", with_zeros.bfloat16(), with_zeros, with_zeros.bfloat16().double()).budget_fraction < 1


@pytest.mark.parametrize(("name", "budget"), [("out", 2), ("dq", 3)])
def test_the_gate_is_twice_the_error_of_eager_for_outputs_and_three_times_for_gradients(reference, name, budget):
    generator = torch.Generator().manual_seed(1)
    wrong_by = 0.02 * torch.randn(reference.shape, generator=generator, dtype=reference.dtype)
    blocks = zip(wrong_by.split(32, dim=-2), reference.split(32, dim=-2), strict=True)
    largest, rounding = max((x.norm() / y.norm()).item() for x, y in blocks), 2.0**-9 + 512**0.5 * 2.0**-24
    just_inside, eager = budget * (largest + rounding) / largest * 0.999, reference + wrong_by
    assert gate(name, reference + just_inside * wrong_by, reference, eager).budget_fraction == pytest.approx(1, abs=0.2)
    with pytest.raises(AssertionError, match=f"wrong: the error of {name} is"):
        gate(name, reference + 1.5 * just_inside * wrong_by, reference, eager)


LATE_ROWS, ONE_VALUE = (..., slice(480, None), slice(None)), (..., 100, 3)


@pytest.mark.parametrize(("where", "value"), [(LATE_ROWS, 0), (ONE_VALUE, math.nan), (ONE_VALUE, math.inf)])
def test_the_gate_sees_late_rows_that_are_small_and_what_is_no_number(reference, where, value):
    """Zeros in place of the last rows are below the rounding of the first: a largest difference would let them pass."""
    wrong = reference.clone()
    wrong[where] = value
    assert value != 0 or (wrong - reference).abs().max() < 0.2 * reference.abs().max()
    with pytest.raises(AssertionError, match="wrong: the error of out"):
        gate("out", wrong, reference, reference.bfloat16().double())


@pytest.mark.parametrize("causal", [False, True])
def test_the_oracle_in_blocks_is_the_formula(causal):
    tensors = [torch.randn(2, 3, 50, 8, dtype=torch.float64) for _ in range(4)]
    leaves = [x.clone().requires_grad_() for x in tensors[:3]]
    out = attention_reference(*leaves, causal=causal)
    grads = torch.autograd.grad(out, leaves, tensors[3])
    found = oracle.by_formula(*tensors, causal=causal, num_scores=7 * 2 * 3 * 50)
    for name, expected in zip(("out", "dq", "dk", "dv"), (out, *grads), strict=True):
        assert (found[name] - expected).abs().max() <= 1e-13, name


@pytest.fixture
def this_device_is_a_cpu(monkeypatch):
    oracle.attention_problem.cache_clear()
    yield from on_a_cpu(monkeypatch)
    gc.unfreeze()  # what the experiment has frozen, tensors among it
    gc.collect()
    gc.freeze()


on_cpu = pytest.mark.usefixtures("this_device_is_a_cpu")
SHAPE = {"batch": 1, "heads": 2, "length": 64, "d_head": 16, "causal": True, "precision": "fp32"}


def contest_case(*impls: str, names=PASSES, section="speed", time_limit_s=0.01, **parameters) -> Case:
    shape = {**SHAPE, **({"timed": "in turn"} if section == "speed" else {}), **parameters}
    return Case(section, shape, tuple(f"{impl} {name}" for name in names for impl in impls), 60.0, time_limit_s)


def sum_case(*impls: str) -> Case:
    phases = tuple(f"{impl} {name}" for name in PASSES for impl in impls)
    return Case("weighted_sum", {"rows": 37, "dim": 11, "precision": "fp32"}, phases, 60.0, 0.01)


def tile_case(block_q: int) -> Case:
    tile = {"block_q": block_q, "block_k": 16, "num_warps": 4, "num_stages": 1}
    return Case("tiles", {**SHAPE, **tile}, ("forward",), 60.0, 0.01)


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
def test_the_named_passes_of_a_contest_are_also_run_back_to_back(monkeypatch):
    monkeypatch.setitem(sections.SUSTAINED_S, "cpu", 0.03)
    names = ("tiled forward", "tiled backward")
    case = dataclasses.replace(contest_case("tiled", "sdpa_flash", section="rivals"), sustained=names)
    measured, failed = measure(case, {"sustained gemm fp32": 0.5})
    assert not failed and len(measured) == 6
    assert {phase for phase, result in measured.items() if "sustained_ms" in result.metrics} == set(names)
    for phase in names:
        metrics, telemetry = measured[phase].metrics, measured[phase].telemetry
        assert metrics["sustained_tflops"] == pytest.approx(metrics["flops"] / metrics["sustained_ms"] / 1e9)
        assert metrics["sustained_ceiling_fraction"] == pytest.approx(metrics["sustained_tflops"] / 0.5)
        assert telemetry["sustained"]["no_energy"] and not telemetry["sustained"]["is_replayed"]


def test_the_grid_names_the_kernels_that_are_run_back_to_back():
    for profile in ("full", "smoke"):
        named = {phase for case in cases(profile, "cuda") for phase in case.sustained}
        impls = FLASH_ATTENTION[profile].sustained
        assert named == {f"{impl} {name}" for impl in impls for name in ("forward", "backward")}
        assert all(case.section == "rivals" and set(case.sustained) <= set(case.phases)
                   for case in cases(profile, "cuda") if case.sustained)  # fmt: skip


def sabotage(monkeypatch, change) -> None:
    """Every output of attention becomes `change(impl, output)`."""
    original = experiment.attention

    def sabotaged(q, k, v, *, causal, impl):
        return change(impl, original(q, k, v, causal=causal, impl=impl))

    monkeypatch.setattr(experiment, "attention", sabotaged)


@on_cpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_contest_measures_what_its_label_says(precision):
    case = contest_case("tiled", "sdpa_flash", "sdpa", precision=precision)
    measured, failed = measure(case, {f"gemm {precision}": 0.5})
    assert not failed and set(measured) == set(case.phases)
    for phase, result in measured.items():
        (impl, name), metrics = phase.split(" "), result.metrics
        assert result.case == case.parameters and result.timer["method"] == "host"
        assert result.observed["ran"] == {"sdpa": "sdpa_flash"}.get(impl, impl)
        assert metrics["is_auto"] == (impl == "tiled") and result.observed["num_candidates"] == 3
        assert metrics["flops"] == {"forward": 4, "backward": 10, "forward_backward": 14}[name] * 2 * 64 * 64 * 16 / 2
        assert metrics["achieved_tflops"] == pytest.approx(metrics["flops"] / metrics["median_ms"] / 1e9)
        assert metrics["ceiling_fraction"] == pytest.approx(metrics["achieved_tflops"] / 0.5)
        assert 0 < metrics["budget_fraction"] <= 1 and metrics["relative_error"] > 0
        assert metrics["n"] >= contests.MIN_ROUNDS
        assert impl != "tiled" or {metrics[key] for key in ratio_metrics(1, 1, 1)} == {1}


@on_cpu
def test_what_cannot_run_here_is_skipped_with_its_reason():
    measured, failed = measure(contest_case("triton", "fa3", "tiled", "sdpa_cudnn", names=("forward",)))
    assert set(measured) == {"tiled forward"}
    assert all(isinstance(error, Skip) for error in failed.values())
    assert "CUDA" in str(failed["triton forward"]) and "FlashAttention-3" in str(failed["fa3 forward"])


WRONG = {  # the output as it should be with another gradient, or the other way round
    "gradient": (lambda out: 1.05 * out - 0.05 * out.detach(), {"backward", "forward_backward"}),
    "output": (lambda out: out + 0.05 * out.detach(), {"forward"}),
}


@on_cpu
@pytest.mark.parametrize(("wrong", "passes"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_not_timed_and_the_others_are(monkeypatch, wrong, passes):
    sabotage(monkeypatch, lambda impl, out: wrong(out) if impl == "sdpa_flash" else out)
    case = contest_case("tiled", "sdpa_flash")
    measured, failed = measure(case)
    assert set(failed) == {f"sdpa_flash {name}" for name in passes}
    assert all(isinstance(error, AssertionError) and "wrong:" in str(error) for error in failed.values())
    assert set(measured) == set(case.phases) - set(failed)


@on_cpu
def test_an_out_of_memory_of_one_timed_alone_ends_all_that_is_left_of_it(monkeypatch):
    """It is raised while nothing is current, so that the session records it for every remaining phase at once."""

    def exhausted(impl, out):
        raise torch.OutOfMemoryError("no room")

    sabotage(monkeypatch, exhausted)
    with pytest.raises(torch.OutOfMemoryError):
        next(run_case(contest_case("eager"), {}))


@on_cpu
def test_rounds_end_by_the_time_limit_but_for_a_few():
    for impl, limit_s, options, expected in (
        ("tiled", 1e-4, {"length": 512}, contests.MIN_ROUNDS),
        ("sdpa_flash", 10.0, {}, contests.MAX_ROUNDS),
        ("sdpa_flash", 10.0, {"section": "rivals"}, contests.MAX_RANKING_ROUNDS),
    ):
        measured, _ = measure(contest_case(impl, names=("forward",), time_limit_s=limit_s, **options))
        assert measured[f"{impl} forward"].metrics["n"] == expected
    assert contests.MAX_RANKING_ROUNDS > contests.MAX_ROUNDS


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
    monkeypatch.setattr(contests, "time_once_ms", lambda *_: 1.0)
    monkeypatch.setattr(contests, "time_callable", lambda *_, method, **__: method)
    error = RuntimeError("operation not permitted when stream is capturing")
    results = contests._time_in_turn(Contest(), "forward", ["flex", "fa3"], None, 0.1)
    assert asked == [("graph", "flex", ("flex", "fa3")), ("flush", "flex", ("flex", "fa3"))]
    assert results.comparison == "compared" and results.launches == {"flex": "window", "fa3": "window"}
    assert results.flushed == {} and contests._time_in_turn(Contest(), "backward", ["flex"], None, 0.1).launches == {}
    monkeypatch.setattr(Contest, "is_ranking", True)
    assert contests._time_in_turn(Contest(), "forward", ["flex"], None, 0.1).flushed == {"flex": "flush"}
    monkeypatch.setattr(contests, "time_once_ms", lambda *_: 2 * contests.LAUNCH_LIMIT_MS)
    assert contests._time_in_turn(Contest(), "forward", ["flex"], None, 0.1).launches == {}
    error = torch.OutOfMemoryError("no room")
    with pytest.raises(torch.OutOfMemoryError):
        contests._time_in_turn(Contest(), "forward", ["flex"], None, 0.1)


@on_cpu
def test_ratios_are_to_what_auto_runs_unless_one_is_alone():
    for timed_how, baseline in (("in turn", "tiled"), ("alone: eager", None)):
        assert AttentionContest(CPU, contest_case("tiled", timed=timed_how), {}).baseline == baseline


@on_cpu
def test_a_resumed_contest_takes_its_baseline_along_unless_that_is_wrong(monkeypatch):
    def resumed() -> Measured:
        measured, _ = measure(contest_case("sdpa_flash", names=("forward",)))
        (result,) = measured.values()
        return result

    assert resumed().observed["num_candidates"] == 2 and resumed().metrics["ratio_to_ours"] > 0
    sabotage(monkeypatch, lambda impl, out: out + (impl == "tiled"))
    assert resumed().observed["num_candidates"] == 1 and "ratio_to_ours" not in resumed().metrics


@on_cpu
def test_the_formula_of_the_weighted_sum_is_gated_and_timed():
    case = sum_case("eager", "triton")
    measured, failed = measure(case, {"copy": 10.0})
    assert set(measured) == {f"eager {name}" for name in PASSES}
    assert set(failed) == {f"triton {name}" for name in PASSES}
    forward = measured["eager forward"]
    assert forward.case == case.parameters and forward.metrics["num_bytes"] == 4 * (37 * 11 + 11 + 37)
    assert forward.metrics["ceiling_fraction"] == pytest.approx(forward.metrics["achieved_gb_per_s"] / 10)


@on_cpu
def test_online_softmax_ends_at_the_softmax():
    parameters = {**experiment.ALGORITHM, "tile": 16, "causal": False, "precision": "fp32"}
    measured, _ = measure(Case("algorithm", parameters, ("errors", "trace"), 60.0))
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


INTERPRETED = {
    "a shipped tile": (tile_case(32), {"forward": {"is_shipped": 1}}),
    "another tile": (tile_case(16), {"forward": {"is_shipped": 0}}),
    "weighted sum": (sum_case("triton"), {}),
    "attention": (contest_case("triton", "tiled", heads=1, length=32),
                  {"triton forward": {"forward_block_q": 32}, "tiled forward": {"is_auto": 1}}),
}  # fmt: skip


@pytest.mark.parametrize(("case", "expected"), INTERPRETED.values(), ids=INTERPRETED)
def test_the_triton_kernels_are_gated_and_timed_where_they_run(interpreted, case, expected):
    metrics = interpreted(measure_here, case)
    assert set(metrics) == set(case.phases)
    for phase, found in metrics.items():
        assert 0 < found["budget_fraction"] <= 1 and found["median_ms"] > 0
        assert expected.get(phase, {}).items() <= found.items()


@on_cpu
@pytest.mark.parametrize("error", ["OutOfResources", "CompilationError"])
def test_a_tile_that_does_not_fit_is_skipped_and_a_wrong_one_is_an_error(monkeypatch, error):
    import triton.errors

    def failing(*_, **__):
        raise type(error, (triton.errors.TritonError,), {})("shared memory, Required: 1, limit: 0\nand more")

    monkeypatch.setattr(experiment.labkit_flash, "IS_INTERPRETED", True)
    no_number = lambda q, *_, **__: (torch.full_like(q, math.nan), None)  # noqa: E731
    for forward, kind, reason in (
        (failing, Skip, f"{error}: shared memory, Required: 1, limit: 0$"),
        (no_number, AssertionError, "wrong"),
    ):
        monkeypatch.setattr(experiment.labkit_flash, "flash_attention_forward", forward)
        _, failed = measure(tile_case(16))
        assert isinstance(failed["forward"], kind) and re.match(reason, str(failed["forward"]))


@on_cpu
def test_memory_is_skipped_where_nothing_counts_it():
    with pytest.raises(Skip, match="CUDA's allocator"):
        next(run_case(Case("memory", {**SHAPE, "impl": "eager"}, ("forward",), 60.0), {}))


def change(chapter: Chapter, section_and_phase: str, case: dict | None = None, **fields) -> None:
    """Appends newer records like those of a section and phase (an expression), with other metrics or another status."""
    store = RecordStore(chapter.folder / "records" / f"{NOTEBOOK}.jsonl")
    section, phase = section_and_phase.split(" ", 1)
    changed = [
        record for record in newest(store.load())
        if record.section == section and re.fullmatch(phase, record.phase)
        and (case or {}).items() <= record.case.items() and (record.status == "ok" or "status" in fields)
    ]  # fmt: skip
    assert changed
    own = {"metrics": {}, **fields} if "status" in fields else fields if "samples" in fields else None
    if "median_ms" in fields:
        fields |= dict.fromkeys(("min_ms", "p20_ms", "p80_ms"), fields["median_ms"])
    for record in changed:
        store.append(dataclasses.replace(record, **(own or {"metrics": {**record.metrics, **fields}})))


def lines_of(table) -> dict[str, dict]:
    """Returns a table's rows by the text of their first column."""
    return {row[table.columns[0]]: row for row in table.to_dict("records")}


SHAPE_NAME = "4,16,4096,128 causal"
AT_4096, AT_65536 = {"length": 4096, "d_head": 128}, {"length": 65536, "d_head": 128}
FLEX = ("speed flex backward", {"precision": "bf16", "length": 1024, "d_head": 64}, {"budget_fraction": 0.97})
TRACE = ("algorithm trace", {"tile": 8}, {"samples": {"query 0 maximum": [float(step) for step in range(12)]}})
GLUON_AT_65536 = ("memory forward_backward", {"impl": "gluon", "length": 65536})
NUM_BYTES = 10 * 65536 * 64 * 2
ERRORS = ("algorithm", "speed", "rivals")

FINDINGS = [  # of which sections, what is changed, what must be said
    ("errors", ERRORS, FLEX, ["97 % of the error allowed (FlexAttention, bf16, backward, d 64 at 1,024)",
                              "2.00× the error", "2 measurements of", "wrong:"]),
    ("errors", ERRORS, TRACE, ["11 of 11 later tiles"]),
    ("tiles", ["tiles"], (), ["128 × 128 are the fastest of 19"]),
    *(("tiles", ["tiles"], ("tiles forward", {"block_q": 64, "block_k": 64}, {"median_ms": time_ms}),
       [f"The shipped 128 × 128 is {word}"]) for time_ms, word in ((0.995, "level"), (0.5, "behind"))),
    ("weighted_sum", ["weighted_sum"], (), ["6 ahead (3.50×) against eager"]),
    ("weighted_sum", ["weighted_sum"], ("weighted_sum triton backward", {"rows": 65536}, {"median_ms": 100.0}),
     ["5 ahead, 1 behind"]),
    ("products", ["speed"], ("speed triton forward", {"precision": "fp32", **AT_65536},
                             {"achieved_tflops": 0.5 * CEILING["bf16"] / 6}), ["50 % of a sixth of bf16's"]),
    ("products", ["speed"], ("speed triton forward", {"precision": "fp32", "length": 16384, "d_head": 64},
                             {"median_ms": 1e5}), ["17 ahead, 1 behind"]),
    ("products", ["speed"], ("speed triton_ieee.*", {}, {"status": "skipped", "reason": "-"}), []),
    ("memory", ["memory"], (), ["level at 8 of 8 lengths", "eager in bf16 at 131,072, ours needs 160 MiB"]),
    ("memory", ["memory"], (*GLUON_AT_65536, {"peak_bytes": NUM_BYTES + 1}),
     ["level at 7 and behind at 1 of 8 lengths"]),
    ("memory", ["memory"], (*GLUON_AT_65536, {"peak_bytes": 100 * (NUM_BYTES + 1)}), ["at worst 100× at 65,536"]),
    ("published", ["speed", "rivals"], ("rivals gluon forward_backward", {"heads": 16, "length": 16384},
                                        {"median_ms": 1.234}),
     ["5.36 ms on an H100, kind of time unknown; ours here 1.23 ms in device time"]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "sections", "changed", "expected"), FINDINGS)
def test_a_finding_follows_the_records(chapter, name, sections, changed, expected):
    if changed:
        change(chapter, *changed[:2], **changed[2])
    sentences = getattr(report, f"findings_{name}")(*map(chapter.records, sections))
    assert all(any(text in sentence for sentence in sentences) for text in expected)
    assert bool(sentences) == bool(expected)
    assert name != "published" or "×" not in sentences[-1], "no ratio of two kinds of time"


@pytest.mark.parametrize(
    ("ratio", "low", "high", "shown"),
    [
        (1.2, 1.18, 1.22, "ahead 1.20×"),
        (1.01, 1.005, 1.015, "level 1.01×"),  # the whole interval is above one, and within what sessions differ by
        (1.03, 0.95, 1.1, "undecided 1.03×"),
        (0.9, 0.88, 0.92, "behind 0.900×"),
    ],
)
def test_a_verdict_follows_the_paired_interval(chapter, ratio, low, high, shown):
    change(chapter, "rivals fa3 forward_backward", AT_4096, **ratio_metrics(ratio, low, high))
    rivals, verdict = chapter.records("rivals"), shown.split(" ")[0]
    assert lines_of(report.table_rivals(rivals))[SHAPE_NAME]["both"] == shown
    fa3 = report.strongest(rivals)[1]
    counted = f"{(fa3[fa3['name'] == 'forward_backward']['verdict'] == verdict).sum()} {verdict}"
    assert counted in report.findings_rivals(rivals)[0] and counted in report.front(chapter)[0][0]


def test_a_call_and_a_flushed_cache_are_compared_with_their_like(chapter):
    def line() -> dict:
        return lines_of(report.table_rivals(chapter.records("rivals")))[SHAPE_NAME]

    before = line()
    change(chapter, "rivals gluon forward_backward", AT_4096, host_median_ms=1e3)
    change(chapter, "rivals fa3 forward_backward", AT_4096, **ratio_metrics(1.2, 1.19, 1.21))
    after = line()
    assert after["both"].startswith("ahead") and after["both, call"].startswith("behind 0.00")
    assert after["both, flush"] == before["both, flush"]
    assert f"In call time {SHAPE_NAME} is behind" in report.findings_rivals(chapter.records("rivals"))[0]
    change(chapter, "rivals gluon forward_backward", AT_4096, flush_median_ms=1e3)
    after = line()
    assert after["both, flush"].startswith("behind 0.00") and after["both"].startswith("ahead")


def test_host_bound_and_device_bound_cases_are_never_counted_together(chapter):
    def cells() -> dict:
        table = report.table_lengths(chapter.records("speed"))
        return table[(table["precision"] == "bf16") & (table["against"] == "SDPA cuDNN")].to_dict("records")[0]

    def change_cudnn(length: int, ratio: float) -> None:
        case = {"precision": "bf16", "d_head": 64, "length": length}
        change(chapter, "speed sdpa_cudnn forward_backward", case, **ratio_metrics(ratio, ratio, ratio))

    host, device, before = "host-bound: device time", "device-bound: device time", cells()
    assert all(text != "–" for text in before.values())
    change_cudnn(128, 9.0)
    after = cells()
    assert "9.00×" in after[host] and "9.00×" not in before[host] and after[device] == before[device]
    change_cudnn(65536, 0.5)
    assert "1 behind (0.500" in cells()[device]
    assert "issuing a call takes longer" in report.findings_lengths(chapter.records("speed"))[0]
    assert len(report.front(chapter)) == 2
    change(chapter, "speed .* forward.*", launch_median_ms=1e-4)
    assert cells()["host-bound: call time"] == "–"
    assert "issuing" not in " ".join(report.findings_lengths(chapter.records("speed")))
    assert len(report.front(chapter)) == 1


def test_ours_is_what_auto_runs(chapter):
    at = {"length": 256}
    change(chapter, "rivals gluon forward_backward", at, is_auto=0)
    change(chapter, "rivals triton forward_backward", at, is_auto=1, median_ms=77.7)
    change(chapter, "rivals fa3 forward_backward", at, status="ok", reason="")
    compared = report.compared(chapter.records("rivals"))
    assert set(compared[(compared["length"] == 256) & (compared["name"] == "forward_backward")]["ours_ms"]) == {77.7}


def test_tables_hold_words_and_figures_marks_for_what_failed(chapter):
    contests = [chapter.records(name) for name in ERRORS[1:]]
    table = lines_of(report.table_errors(*contests))
    assert table["SDPA efficient"]["bf16"].endswith(", 1 wrong") and table["Gluon (ours)"]["fp32"] == "–"
    change(chapter, *FLEX[:2], **FLEX[2])
    assert lines_of(report.table_errors(chapter.records("speed")))["FlexAttention"]["bf16"].startswith("0.97 of ")
    change(chapter, "tiles forward", {"block_q": 64, "block_k": 64}, achieved_tflops=555.0)
    tiles = lines_of(report.table_tiles(chapter.records("tiles")))
    assert tiles[64][64] == "555" and tiles[128][128].endswith("(shipped)") and tiles[256][128] == "skipped"
    assert "oom" in report.table_memory(chapter.records("memory")).to_string()
    change(chapter, *GLUON_AT_65536, peak_bytes=100 * NUM_BYTES)
    assert "8,000" in report.table_memory(chapter.records("memory")).to_string()


def test_published_times_stand_beside_the_device_bound_ones_only(chapter):
    matches = report.published_times(chapter.records("speed"))
    assert len(matches) and set(matches["timer_method"]) == {"graph"}
    assert not ((matches["length"] <= 512) & (matches["precision"] == "bf16")).any(), "the host binds these"
    row = matches[(matches["length"] == 65536) & (matches["d_head"] == 64) & (matches["precision"] == "bf16")]
    row = row[(row["kernel"] == "Triton") & (row["phase"] == "forward")].iloc[0]
    assert row["published_ms"] == 6.297 and row["ratio"] == pytest.approx(6.297 / row["median_ms"])


def test_versions_are_data_and_their_findings_follow_them():
    frame = report.versions()
    assert set(frame["kept"]) == {"yes", "no"} and set(frame.dropna()["compared"]) == {"one process", "two processes"}
    table = report.table_versions(frame)
    assert not table.duplicated(["pass", "change"]).any() and set(table["change"]) <= set(frame["change"])
    assert f"timed, 0 gained what was predicted or more, {len(frame)} nothing" in " ".join(
        report.findings_versions(frame.assign(gained_percent=-1.0))
    )
    assert report.findings_versions(frame.assign(gained_percent=float("nan"))) == []


EVIDENCE = {
    "algorithm": [report.figure_online_softmax],
    "tiles": [report.table_tiles, report.findings_tiles],
    "weighted_sum": [report.findings_weighted_sum],
    "speed": [report.table_errors, report.figure_lengths, report.table_lengths, report.findings_lengths,
              report.published_times, report.table_published],
    "rivals": [report.table_errors, report.figure_rivals, report.table_rivals, report.findings_rivals],
    "memory": [report.figure_memory, report.table_memory, report.findings_memory],
}  # fmt: skip


@pytest.mark.parametrize("kept", ["as on a CPU", "nothing ok", "bf16 alone"])
def test_records_of_another_device_are_shown_without_what_they_lack(chapter, kept):
    """A CPU has no launch, no ceiling, no graph; all may have failed; a precision may be missing."""
    for section, functions in EVIDENCE.items():
        frame = chapter.records(section)
        if kept == "as on a CPU":
            missing = [name for name in frame if re.match("launch_|host_|flush_|ceiling|ratio_to", name)]
            frame = frame[~frame["phase"].str.startswith(("gluon", "fa3"))].drop(columns=missing)
            frame = frame.assign(timer_method="host", is_auto=frame["phase"].str.startswith("triton ").astype(int))
        elif kept == "nothing ok":
            case = [name for record in chapter.all_records() if record.section == section for name in record.case]
            columns = dict.fromkeys(["section", "phase", "status", "reason", "observed", *case])
            frame = frame.assign(status="skipped", reason="no")[list(columns)]
        elif "precision" in frame and "bf16" in set(frame["precision"]):
            frame = frame[frame["precision"] == "bf16"]
        frame.attrs |= {"device": "abacus", "device_kind": "cpu"}
        for function in functions:
            shown = function(frame)
            assert "nan" not in str(shown if isinstance(shown, list) else ""), function.__name__
            if kept == "as on a CPU" and isinstance(shown, list):
                assert "device time" not in " ".join(shown), function.__name__


def test_without_records_every_section_says_so(tmp_path):
    empty = Chapter(NOTEBOOK, device="abacus", output=str(tmp_path))
    for functions in EVIDENCE.values():
        for function in functions:
            assert "ot measured on abacus" in empty.table(function, empty.records("speed"), caption="it").data
    assert report.front(empty) == []


@pytest.mark.parametrize(
    ("make", "section", "changed"),
    [
        (report.figure_lengths, "speed", ("speed sdpa_cudnn forward_backward", {}, {"median_ms": 50.0})),
        (report.figure_rivals, "rivals", ("rivals sdpa_cudnn forward", {}, {"achieved_tflops": 50.0})),
        (report.figure_memory, "memory", (*GLUON_AT_65536, {"peak_bytes": 100 * NUM_BYTES})),
        (report.figure_online_softmax, "algorithm", TRACE),
    ],
)
def test_figures_are_the_same_bytes_twice_and_follow_their_records(chapter, make, section, changed):
    before = figures.svg(make(chapter.records(section)))
    assert before == figures.svg(make(chapter.records(section)))
    change(chapter, *changed[:2], **changed[2])
    assert figures.svg(make(chapter.records(section))) != before


def test_kernels_are_interpreted_only_where_triton_is_not_loaded_yet(monkeypatch):
    monkeypatch.setattr(lessons.hardware, "detect", lambda: CPU)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(RuntimeError, match="restart the kernel"):
        lessons.interpret_kernels()
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    lessons.interpret_kernels()
    monkeypatch.setattr(lessons.hardware, "detect", lambda: dataclasses.replace(CPU, kind="cuda"))
    monkeypatch.delenv("TRITON_INTERPRET")
    lessons.interpret_kernels()
    assert "TRITON_INTERPRET" not in os.environ


@pytest.mark.slow
def test_the_smoke_profile_runs_through(tmp_path):
    folder = run_smoke(NOTEBOOK, tmp_path, "lengths=128", "d_heads=16")
    records = RecordStore(folder / "records" / f"{NOTEBOOK}.jsonl").load()
    text = (folder / "report.md").read_text(encoding="utf-8")
    sections = {"ceilings", "algorithm", "weighted_sum", "speed", "rivals", "tiles", "memory"}
    assert {record.section for record in records} == sections
    assert {record.status for record in records} == {"ok", "skipped"}
    timed = {record.phase.split(" ")[0] for record in records if record.section == "speed" and record.status == "ok"}
    assert timed == {"tiled", "eager", "compiled", "sdpa", "sdpa_math", "sdpa_flash"}
    skipped = {record.phase.split(" ")[0]: record.reason for record in records if record.status == "skipped"}
    assert all(skipped[impl] for impl in ("triton", "gluon", "fa3", "flex", "sdpa_cudnn", "sdpa_efficient"))
    for name in ("06_online_softmax.svg", "06_lengths.svg", "06_rivals.svg"):
        assert f"({name})" in text and (folder / name).exists()
