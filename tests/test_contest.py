"""The contest and notebook 06: the gate, the oracle, what is timed, what becomes of failures, and
one more implementation.
"""

import dataclasses
import functools
import math
import types

import pytest
import torch
import torch.nn.functional as F
from chapters import CPU, measure_all

from labkit.configs import PASSES
from labkit.device import Device
from labkit.experiments import contest, flash_attention, operations, sections, siglip2
from labkit.experiments.flash_attention import run_case
from labkit.experiments.sweep import Case, Skip
from labkit.kernels.reference import attention_reference
from labkit.numerics import judge

gate = functools.partial(judge, dtype=torch.bfloat16, num_terms=512)


@pytest.fixture
def reference():
    """What causal attention of random values gives: rows that shrink with their position."""
    torch.manual_seed(0)
    rows = torch.randn(1, 1, 512, 16, dtype=torch.float64)
    return rows / torch.arange(1, 513, dtype=torch.float64).sqrt()[:, None]


@pytest.mark.parametrize(("name", "budget"), [("out", 2), ("dq", 3)])
def test_the_gate_is_twice_the_error_of_eager_for_outputs_and_three_times_for_gradients(
    reference, name, budget
):
    wrong_by = 0.02 * torch.linspace(-1, 1, 512 * 16, dtype=torch.float64).view_as(reference)
    eager = reference + wrong_by
    verdict = gate(name, reference + 0.9 * budget * wrong_by, reference, eager)
    assert 0.6 < verdict.budget_fraction < 1
    with pytest.raises(AssertionError, match=f"wrong: the error of {name} is"):
        gate(name, reference + 1.5 * budget * wrong_by, reference, eager)


@pytest.mark.parametrize("value", [0, math.nan])
def test_the_gate_sees_late_rows_that_are_small_and_what_is_no_number(reference, value):
    """Zeros in place of the last rows are below the rounding of the first: a largest difference
    would let them pass.
    """
    wrong = reference.clone()
    wrong[..., 480:, :] = value
    with pytest.raises(AssertionError, match="wrong: the error of out"):
        gate("out", wrong, reference, reference.bfloat16().double())


@pytest.mark.parametrize("causal", [False, True])
def test_the_oracle_in_blocks_is_the_formula(monkeypatch, causal):
    *inputs, grad_out = (torch.randn(2, 3, 50, 8, dtype=torch.float64) for _ in range(4))
    whole = functools.partial(attention_reference, causal=causal)
    monkeypatch.setattr(contest, "ORACLE_SCORES", 7 * 2 * 3 * 50)
    blocks = functools.partial(contest.attention_formula, causal=causal)
    found, expected = (contest.by_formula(f, inputs, [grad_out]) for f in (blocks, whole))
    for value, exact in zip((*found[0], *found[1]), (*expected[0], *expected[1]), strict=True):
        assert (value - exact).abs().max() <= 1e-13


on_cpu = pytest.mark.usefixtures("on_a_cpu")
SHAPE = {"batch": 1, "heads": 2, "length": 64, "d_head": 16, "causal": True, "precision": "fp32"}


def contest_case(*impls: str, names=PASSES, **changes) -> Case:
    return Case(
        "speed",
        SHAPE | changes,
        tuple(f"{impl} {name}" for name in names for impl in impls),
        60.0,
        0.01,
    )


TILE = {"block_q": 16, "block_k": 16, "num_warps": 4, "num_stages": 1}


measure = functools.partial(measure_all, run_case)


def sabotage(monkeypatch, impl: str, change) -> None:
    """Every output of an implementation of attention becomes `change(output)`."""
    ours = operations.IMPLEMENTATIONS["attention"][impl]

    def sabotaged(*tensors, causal):
        return change(ours.function(*tensors, causal=causal))

    monkeypatch.setitem(
        operations.IMPLEMENTATIONS["attention"], impl, dataclasses.replace(ours, function=sabotaged)
    )


@on_cpu
def test_a_contest_measures_what_its_label_says(monkeypatch):
    monkeypatch.setitem(sections.SUSTAINED_S, "cpu", 0.03)
    case = contest_case("tiled", "sdpa_flash", timed="in turn", precision="bf16")
    case = dataclasses.replace(case, sustained=("tiled backward",))
    measured, failed = measure(
        case, {f"gemm bf16 {kind}_tflops": 0.5 for kind in ("achieved", "sustained")}
    )
    assert not failed and set(measured) == set(case.phases)
    factors = {"forward": 4, "backward": 10, "forward_backward": 14}
    for phase, result in measured.items():
        (impl, name), metrics = phase.split(" "), result.metrics
        assert result.case == case.parameters and result.timer["method"] == "host"
        assert metrics["is_auto"] == (impl == "tiled")
        assert metrics["flops"] == factors[name] * 2 * 64 * 64 * 16 / 2
        rate = metrics["flops"] / metrics["median_ms"] / 1e9
        assert metrics["achieved_tflops"] == pytest.approx(rate)
        assert metrics["ceiling_fraction"] == pytest.approx(rate / 0.5)
        assert 0 < metrics["budget_fraction"] <= 1 and metrics["relative_error"] > 0
        assert (metrics["ratio_to_ours"] == 1) == (impl == "tiled")
        assert ("sustained_ceiling_fraction" in metrics) == (phase in case.sustained)


@on_cpu
def test_a_wrong_gradient_is_not_timed_and_the_right_output_is(monkeypatch):
    sabotage(monkeypatch, "sdpa_flash", lambda out: 1.05 * out - 0.05 * out.detach())
    case = contest_case("tiled", "sdpa_flash")
    measured, failed = measure(case)
    assert set(failed) == {"sdpa_flash backward", "sdpa_flash forward_backward"}
    assert all("wrong:" in str(error) for error in failed.values())
    assert set(measured) == set(case.phases) - set(failed)


@on_cpu
def test_what_an_implementation_skips_is_not_timed_and_the_other_is(monkeypatch):
    def skip(out):
        raise Skip("no such unit")

    sabotage(monkeypatch, "sdpa_flash", skip)
    case = contest_case("sdpa_flash", "tiled", names=("forward", "forward_backward"))
    measured, failed = measure(case)
    assert set(measured) == {"tiled forward", "tiled forward_backward"}
    assert {str(error) for error in failed.values()} == {"no such unit"}
    assert not measure(contest_case("sdpa_flash", timed="alone: sdpa_flash"))[0]


@on_cpu
def test_a_resumed_contest_takes_its_baseline_along_unless_that_is_wrong(monkeypatch):
    def ratio(timed: str) -> float | None:
        case = contest_case("sdpa_flash", names=("forward",), timed=timed)
        return measure(case)[0]["sdpa_flash forward"].metrics.get("ratio_to_ours")

    assert ratio("in turn") > 0
    assert ratio("alone: sdpa_flash") is None
    sabotage(monkeypatch, "tiled", lambda out: out + 1)
    assert ratio("in turn") is None


OPERATION = types.SimpleNamespace(
    device=Device("cuda", "a GPU", "a-gpu"), rounds=range, method="graph", num_warmup=1
)


def test_what_no_graph_holds_is_timed_call_by_call_beside_the_baseline(monkeypatch):
    failures = [RuntimeError("not permitted when stream is capturing")]

    def compare(calls, *, method, **_):
        if method == "graph" and "waits" in calls:
            raise failures[-1]
        return contest.Comparison(dict.fromkeys(calls, method), {})

    monkeypatch.setattr(contest, "compare", compare)
    monkeypatch.setattr(contest, "_fits_a_graph", "ours".__eq__)
    calls = {"ours": "ours", "waits": "waits"}
    for baseline, method in (("ours", "graph"), ("waits", "flush")):
        timings = contest._compared(OPERATION, calls, baseline, 5).timings
        assert timings == {"ours": method, "waits": "flush"}
    failures.append(torch.OutOfMemoryError("no room"))
    with pytest.raises(torch.OutOfMemoryError):
        contest._compared(OPERATION, calls, "ours", 5)


@pytest.mark.gpu
def test_a_call_that_waits_for_the_gpu_is_in_no_graph_and_spoils_nothing():
    x = torch.ones(3, device="cuda")
    comparison = contest._compared(
        OPERATION, {"ours": x.clone, "waits": lambda: x.sum().item()}, "ours", 5
    )
    assert [one.method for one in comparison.timings.values()] == ["graph", "flush"]
    assert torch.rand(3, device="cuda").sum() > 0


# ---- one more implementation ---------------------------------------------------------------------


@on_cpu
def test_a_registered_implementation_is_in_every_case_of_its_operation(monkeypatch):
    for operation, known in operations.IMPLEMENTATIONS.items():
        monkeypatch.setitem(operations.IMPLEMENTATIONS, operation, dict(known))
    for operation in ("swiglu", "attention"):
        operations.register(operation, "mine", F.silu)
    cases = [*siglip2.cases("smoke", "cpu"), *flash_attention.cases("smoke", "cpu")]
    entered = [case for case in cases if "mine forward_backward" in case.phases]
    assert {case.section for case in entered} == {"kernels", "speed", "rivals"}
    assert all(case.modules == (F.silu.__module__,) for case in entered)  # which a worker imports
    product = siglip2.cases("full", "cuda")[-1]
    assert product.parameters["operation"] == "gelu_mlp" and not product.compiles


CEILINGS = {"copy fp32 achieved_gb_per_s": 1.0, "gemm fp32 achieved_tflops": 1.0}


@on_cpu
@pytest.mark.parametrize("operation", [*operations.DEFINITIONS])
def test_each_operation_is_held_to_its_formula(operation):
    parameters = {"operation": operation, "precision": "fp32", "rows": 32, "columns": 128}
    problem = operations.row_operation(CPU, parameters)
    passes = operations.DEFINITIONS[operation].passes
    for impl in set(problem.implementations) - {"compiled", "liger", "quack"}:
        for name in passes:
            assert 0 <= problem.judge(impl, name).budget_fraction <= 1
            rates = sections.rate_metrics(CPU, CEILINGS, 1.0, "fp32", **problem.costs[name])
            assert rates["ceiling_fraction"] > 0
    right = problem.call("eager", passes[0])()
    with pytest.raises(AssertionError, match="wrong"):
        problem.worst("eager", passes[0], [1.01 * x for x in right])


# ---- notebook 06's other sections ----------------------------------------------------------------


def measure_here(case: Case) -> dict[str, dict]:
    """Returns the metrics that the phases of a case give in the process this is called in."""
    measured, failed = measure(case)
    assert not failed, failed
    return {phase: result.metrics for phase, result in measured.items()}


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (Case("tiles", SHAPE | TILE, ("forward",), 60.0, 0.01), {}),
        (contest_case("triton", heads=1, length=32), {"is_auto": 0}),
    ],
)
def test_the_triton_kernels_are_gated_and_timed_where_they_run(interpreted, case, expected):
    metrics = interpreted(measure_here, case)
    assert set(metrics) == set(case.phases)
    for row in metrics.values():
        assert 0 < row["budget_fraction"] <= 1 and row["median_ms"] > 0
        assert expected.items() <= row.items()
