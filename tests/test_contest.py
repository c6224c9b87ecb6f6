"""Notebook 06's measurements: the gate, the oracle, contests, interpreted kernels, and what becomes
of failures.
"""

import dataclasses
import functools
import math
import re
import types

import pytest
import torch
from chapters import CPU, on_a_cpu

from labkit.configs import FLASH_ATTENTION, PASSES
from labkit.device import Device
from labkit.experiments import contest as contests
from labkit.experiments import flash_attention as experiment
from labkit.experiments import oracle, sections
from labkit.experiments.flash_attention import AttentionContest, cases, run_case
from labkit.experiments.sweep import Case, Measured, Skip
from labkit.kernels.reference import attention_reference
from labkit.numerics import judge


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
    assert (
        gate(
            "dq", with_zeros.bfloat16(), with_zeros, with_zeros.bfloat16().double()
        ).budget_fraction
        < 1
    )


@pytest.mark.parametrize(("name", "budget"), [("out", 2), ("dq", 3)])
def test_the_gate_is_twice_the_error_of_eager_for_outputs_and_three_times_for_gradients(
    reference, name, budget
):
    generator = torch.Generator().manual_seed(1)
    wrong_by = 0.02 * torch.randn(reference.shape, generator=generator, dtype=reference.dtype)
    blocks = zip(wrong_by.split(32, dim=-2), reference.split(32, dim=-2), strict=True)
    largest, rounding = (
        max((x.norm() / y.norm()).item() for x, y in blocks),
        2.0**-9 + 512**0.5 * 2.0**-24,
    )
    just_inside, eager = budget * (largest + rounding) / largest * 0.999, reference + wrong_by
    assert gate(
        name, reference + just_inside * wrong_by, reference, eager
    ).budget_fraction == pytest.approx(1, abs=0.2)
    with pytest.raises(AssertionError, match=f"wrong: the error of {name} is"):
        gate(name, reference + 1.5 * just_inside * wrong_by, reference, eager)


LATE_ROWS, ONE_VALUE = (..., slice(480, None), slice(None)), (..., 100, 3)


@pytest.mark.parametrize(
    ("where", "value"), [(LATE_ROWS, 0), (ONE_VALUE, math.nan), (ONE_VALUE, math.inf)]
)
def test_the_gate_sees_late_rows_that_are_small_and_what_is_no_number(reference, where, value):
    """Zeros in place of the last rows are below the rounding of the first: a largest difference
    would let them pass.
    """
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


on_cpu = pytest.mark.usefixtures("this_device_is_a_cpu")
SHAPE = {"batch": 1, "heads": 2, "length": 64, "d_head": 16, "causal": True, "precision": "fp32"}


def contest_case(
    *impls: str, names=PASSES, section="speed", time_limit_s=0.01, **parameters
) -> Case:
    shape = {**SHAPE, **({"timed": "in turn"} if section == "speed" else {}), **parameters}
    return Case(
        section,
        shape,
        tuple(f"{impl} {name}" for name in names for impl in impls),
        60.0,
        time_limit_s,
    )


def sum_case(*impls: str) -> Case:
    phases = tuple(f"{impl} {name}" for name in PASSES for impl in impls)
    return Case("weighted_sum", {"rows": 37, "dim": 11, "precision": "fp32"}, phases, 60.0, 0.01)


def tile_case(block_q: int) -> Case:
    tile = {"block_q": block_q, "block_k": 16, "num_warps": 4, "num_stages": 1}
    return Case("tiles", {**SHAPE, **tile}, ("forward",), 60.0, 0.01)


def measure(
    case: Case, ceilings: dict[str, float] | None = None
) -> tuple[dict[str, Measured], dict[str, Exception]]:
    """Returns what the phases give, as the session's worker would: after a failure the rest is
    asked for again.
    """
    remaining, measured, failed = list(case.phases), {}, {}
    while remaining:
        for phase, run in run_case(
            dataclasses.replace(case, phases=tuple(remaining)), ceilings or {}
        ):
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
    case = dataclasses.replace(
        contest_case("tiled", "sdpa_flash", section="rivals"), sustained=names
    )
    measured, failed = measure(case, {"sustained gemm fp32": 0.5})
    assert not failed and len(measured) == 6
    assert {phase for phase, result in measured.items() if "sustained_ms" in result.metrics} == set(
        names
    )
    for phase in names:
        metrics, telemetry = measured[phase].metrics, measured[phase].telemetry
        assert metrics["sustained_tflops"] == pytest.approx(
            metrics["flops"] / metrics["sustained_ms"] / 1e9
        )
        assert metrics["sustained_ceiling_fraction"] == pytest.approx(
            metrics["sustained_tflops"] / 0.5
        )
        assert telemetry["sustained"]["no_energy"] and not telemetry["sustained"]["is_replayed"]


def test_the_grid_names_the_kernels_that_are_run_back_to_back():
    for profile in ("full", "smoke"):
        named = {phase for case in cases(profile, "cuda") for phase in case.sustained}
        impls = FLASH_ATTENTION[profile].sustained
        assert named == {f"{impl} {name}" for impl in impls for name in ("forward", "backward")}
        assert all(
            case.section == "rivals" and set(case.sustained) <= set(case.phases)
            for case in cases(profile, "cuda")
            if case.sustained
        )


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
        assert metrics["is_auto"] == (impl == "tiled")
        assert (
            metrics["flops"]
            == {"forward": 4, "backward": 10, "forward_backward": 14}[name] * 2 * 64 * 64 * 16 / 2
        )
        assert metrics["achieved_tflops"] == pytest.approx(
            metrics["flops"] / metrics["median_ms"] / 1e9
        )
        assert metrics["ceiling_fraction"] == pytest.approx(metrics["achieved_tflops"] / 0.5)
        assert 0 < metrics["budget_fraction"] <= 1 and metrics["relative_error"] > 0
        assert metrics["n"] >= contests.MIN_ROUNDS
        assert impl != "tiled" or {
            value for key, value in metrics.items() if key.startswith("ratio_to_ours")
        } == {1}


@on_cpu
def test_what_cannot_run_here_is_skipped_with_its_reason():
    measured, failed = measure(
        contest_case("triton", "fa3", "tiled", "sdpa_cudnn", names=("forward",))
    )
    assert set(measured) == {"tiled forward"}
    assert all(isinstance(error, Skip) for error in failed.values())
    assert "CUDA" in str(failed["triton forward"]) and "FlashAttention-3" in str(
        failed["fa3 forward"]
    )


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
    assert all(
        isinstance(error, AssertionError) and "wrong:" in str(error) for error in failed.values()
    )
    assert set(measured) == set(case.phases) - set(failed)


@on_cpu
def test_an_out_of_memory_of_one_timed_alone_ends_all_that_is_left_of_it(monkeypatch):
    """It is raised while nothing is current, so that the session records it for every remaining
    phase at once.
    """

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
        measured, _ = measure(
            contest_case(impl, names=("forward",), time_limit_s=limit_s, **options)
        )
        assert measured[f"{impl} forward"].metrics["n"] == expected
    assert contests.MAX_RANKING_ROUNDS > contests.MAX_ROUNDS


def test_what_cannot_be_captured_is_timed_with_events_and_its_launch_apart(monkeypatch):
    """On CUDA graphs are tried first; what none can hold is timed beside the baseline, out of
    memory ends it.
    """
    asked, replayed = [], ["flex"]

    class Contest:
        device = Device("cuda", "a GPU", "a-gpu")
        is_ranking = False

        def call(self, impl, name):
            return lambda: impl

    def compare(calls, *, method, baseline, **_):
        asked.append((method, tuple(calls)))
        if method == "graph" and not set(calls) <= set(replayed):
            raise error
        return contests.Comparison(
            dict.fromkeys(calls, method), baseline, dict.fromkeys(calls, method)
        )

    monkeypatch.setattr(contests, "compare", compare)
    monkeypatch.setattr(contests.timer, "can_be_captured", lambda call: call() in replayed)
    monkeypatch.setattr(contests, "time_once_ms", lambda *_: 1.0)
    monkeypatch.setattr(contests, "time_callable", lambda *_, method, **__: method)
    error = RuntimeError("operation not permitted when stream is capturing")
    results = contests._time_in_turn(Contest(), "forward", ["flex", "fa3"], None, 0.1)
    assert asked == [("graph", ("flex", "fa3")), ("flush", ("flex", "fa3")), ("graph", ("flex",))]
    methods = {"flex": "graph", "fa3": "flush"}
    assert results.comparison == contests.Comparison(methods, "flex", methods)
    assert results.launches == {"flex": "window", "fa3": "window"}
    assert (
        results.flushed == {}
        and contests._time_in_turn(Contest(), "backward", ["flex"], None, 0.1).launches == {}
    )
    monkeypatch.setattr(Contest, "is_ranking", True)
    assert contests._time_in_turn(Contest(), "forward", ["flex"], None, 0.1).flushed == {
        "flex": "flush"
    }
    monkeypatch.setattr(contests, "time_once_ms", lambda *_: 2 * contests.LAUNCH_LIMIT_MS)
    assert contests._time_in_turn(Contest(), "forward", ["flex"], None, 0.1).launches == {}
    replayed = []
    comparison = contests._time_in_turn(Contest(), "forward", ["flex", "fa3"], None, 0.1).comparison
    assert comparison.timings == {"flex": "flush", "fa3": "flush"}
    error = torch.OutOfMemoryError("no room")
    with pytest.raises(torch.OutOfMemoryError):
        contests._time_in_turn(Contest(), "forward", ["flex"], None, 0.1)


@on_cpu
def test_ratios_are_to_what_auto_runs_unless_one_is_alone():
    for timed_how, baseline in (("in turn", "tiled"), ("alone: eager", None)):
        assert (
            AttentionContest(CPU, contest_case("tiled", timed=timed_how), {}).baseline == baseline
        )


@on_cpu
def test_a_resumed_contest_takes_its_baseline_along_unless_that_is_wrong(monkeypatch):
    def resumed() -> Measured:
        measured, _ = measure(contest_case("sdpa_flash", names=("forward",)))
        (result,) = measured.values()
        return result

    assert resumed().metrics["ratio_to_ours"] > 0
    sabotage(monkeypatch, lambda impl, out: out + (impl == "tiled"))
    assert "ratio_to_ours" not in resumed().metrics


@on_cpu
def test_the_formula_of_the_weighted_sum_is_gated_and_timed():
    case = sum_case("eager", "triton")
    measured, failed = measure(case, {"copy": 10.0})
    assert set(measured) == {f"eager {name}" for name in PASSES}
    assert set(failed) == {f"triton {name}" for name in PASSES}
    forward = measured["eager forward"]
    assert forward.case == case.parameters and forward.metrics["num_bytes"] == 4 * (
        37 * 11 + 11 + 37
    )
    assert forward.metrics["ceiling_fraction"] == pytest.approx(
        forward.metrics["achieved_gb_per_s"] / 10
    )


@on_cpu
def test_online_softmax_ends_at_the_softmax():
    parameters = {**experiment.ALGORITHM, "tile": 16, "causal": False, "precision": "fp32"}
    measured, _ = measure(Case("algorithm", parameters, ("errors", "trace"), 60.0))
    samples = measured["trace"].samples
    generator = torch.Generator().manual_seed(0)
    q, k, *_ = (torch.randn((1, 1, 96, 16), generator=generator) for _ in range(4))
    scores = (q[0, 0, :3].double() @ k[0, 0].double().T) / 4
    for query in range(experiment.TRACED_QUERIES):
        maxima, denominators = (
            samples[f"query {query} {name}"] for name in ("maximum", "denominator")
        )
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
    "attention": (
        contest_case("triton", "tiled", heads=1, length=32),
        {"tiled forward": {"is_auto": 1}},
    ),
}


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
        raise type(error, (triton.errors.TritonError,), {})(
            "shared memory, Required: 1, limit: 0\nand more"
        )

    monkeypatch.setattr(experiment.labkit_flash, "IS_INTERPRETED", True)
    no_number = lambda q, *_, **__: (torch.full_like(q, math.nan), None)  # noqa: E731
    for forward, kind, reason in (
        (failing, Skip, f"{error}: shared memory, Required: 1, limit: 0$"),
        (no_number, AssertionError, "wrong"),
    ):
        plan = types.SimpleNamespace(forward=forward)
        monkeypatch.setattr(experiment.labkit_flash, "plan_of", lambda *_, plan=plan, **__: plan)
        _, failed = measure(tile_case(16))
        assert isinstance(failed["forward"], kind) and re.match(reason, str(failed["forward"]))


@on_cpu
def test_memory_is_skipped_where_nothing_counts_it():
    with pytest.raises(Skip, match="CUDA's allocator"):
        next(run_case(Case("memory", {**SHAPE, "impl": "eager"}, ("forward",), 60.0), {}))
