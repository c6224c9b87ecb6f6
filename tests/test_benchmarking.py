"""Notebook 01 measures the cases it says, each under the label of what really ran, and times nothing else."""

import math
import statistics
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from chapters import CPU, H200, on_a_cpu

from labkit import accounting, hardware
from labkit.configs import BENCHMARKING, COMPILE_PHASES, PHASES, PRECISIONS, model_config
from labkit.experiments import benchmarking, ceilings, open_session, sections
from labkit.experiments.benchmarking import cases, run_case
from labkit.experiments.ceilings import ceiling_name
from labkit.experiments.sweep import Case, Measured, Skip
from labkit.experiments.workload import Workload, step_parameters
from labkit.measure import timing
from labkit.measure.host import PROBES
from labkit.measure.timing import Timing
from labkit.models.transformer import TransformerLM

V100 = hardware.Device("cuda", "Tesla V100-SXM2-16GB", "tesla-v100-sxm2-16gb")
THREE = {"num_warmup": 1, "min_samples": 3, "max_samples": 3, "time_limit_s": 1e9}

FULL_SIZES = ("small", "medium", "large", "xl-2025", "2.7b", "10b")
FULL_CONTEXTS = (128, 256, 512, 1024, 2048)


@pytest.fixture(autouse=True)
def this_device_is_a_cpu(monkeypatch):
    smoke = replace(benchmarking.BENCHMARKING["smoke"], time_limit_s=0.02)
    monkeypatch.setitem(benchmarking.BENCHMARKING, "smoke", smoke)
    yield from on_a_cpu(monkeypatch)


def parameters(size="nano", context=32, precision="fp32", compile="none", batch=4, attention="eager") -> dict:
    return {**step_parameters(size, context, precision, compile=compile, attention=attention), "batch": batch}


def in_section(found: list[Case], section: str) -> list[Case]:
    return [case for case in found if case.section == section]


def measure(case: Case, ceilings: dict[str, float] | None = None) -> dict[str, Measured]:
    """Returns what the phases of a case give, measured in this process."""
    return {phase: run() for phase, run in run_case(case, ceilings or {})}


# ---- the cases ----------------------------------------------------------------------------------------------


def test_full_steps_are_every_size_context_and_precision_with_all_phases():
    steps = in_section(cases("full", "cuda"), "steps")
    assert len(steps) == 6 * 5 * 3
    expected = [
        parameters(size, context, precision)
        for size in FULL_SIZES
        for context in FULL_CONTEXTS
        for precision in ("fp32", "tf32", "bf16")
    ]
    assert [case.parameters for case in steps] == expected
    all_phases = ("inference", "forward", "backward", "forward_backward", "optimizer_step", "train_step")
    assert {case.phases for case in steps} == {all_phases}
    assert {(case.fresh_process, case.stop_at_failure, case.timeout_s) for case in steps} == {(False, False, 300.0)}


def test_full_warmup_is_one_phase_in_a_process_of_its_own():
    warmup = in_section(cases("full", "cuda"), "warmup")
    expected = [
        (parameters(size, context), (phase,))
        for size in FULL_SIZES
        for context in FULL_CONTEXTS
        for phase in ("forward", "forward_backward")
    ]
    assert [(case.parameters, case.phases) for case in warmup] == expected
    assert all(case.fresh_process for case in warmup)


def test_full_compile_is_whole_only_for_the_sizes_that_the_grid_names():
    whole_sizes = BENCHMARKING["full"].whole_compile_sizes
    assert set() < set(whole_sizes) < set(FULL_SIZES)
    compiled = in_section(cases("full", "cuda"), "compile")
    seen = Counter((case.parameters["size"], case.parameters["compile"]) for case in compiled)
    # Three contexts in three precisions each.
    regional = {(size, "regional"): 9 for size in FULL_SIZES}
    assert seen == regional | {(size, "whole"): 9 for size in whole_sizes}
    assert {case.parameters["context"] for case in compiled} == {128, 256, 512}
    assert {case.parameters["precision"] for case in compiled} == set(PRECISIONS)
    assert {case.phases for case in compiled} == {("compile", "forward", "forward_backward", "train_step")}
    # Its later phases would compile outside of any timing if the first had failed.
    assert all(case.stop_at_failure and not case.fresh_process for case in compiled)


def test_smoke_is_the_same_in_small():
    found = cases("smoke", "cpu")
    assert Counter(case.section for case in found) == {
        "ceilings": 3, "timer": 1, "warmup": 2 * 1 * 2, "steps": 2 * 3 * 2, "compile": 1,
    }  # fmt: skip
    steps = [parameters(s, c, p) for s in ("nano", "micro") for c in (16, 32, 64) for p in ("fp32", "bf16")]
    assert [case.parameters for case in in_section(found, "steps")] == steps
    assert {case.phases for case in in_section(found, "steps")} == {PHASES}
    assert all(case.fresh_process and len(case.phases) == 1 for case in in_section(found, "warmup"))
    assert {case.parameters["context"] for case in in_section(found, "warmup")} == {64}
    modes = [(case.parameters, case.phases) for case in in_section(found, "compile")]
    assert modes == [(parameters("nano", 64, compile="regional"), COMPILE_PHASES)]
    assert {case.timeout_s for case in found} == {120.0}


@pytest.mark.parametrize(("profile", "precisions"), [("full", PRECISIONS), ("smoke", ("fp32", "bf16"))])
def test_there_is_a_ceiling_for_every_precision_and_for_copies(profile, precisions):
    ceilings = in_section(cases(profile, "cpu"), "ceilings")
    assert [ceiling_name(case) for case in ceilings] == [*(f"gemm {precision}" for precision in precisions), "copy"]
    assert {case.phases for case in ceilings} == {("rate",)}


@pytest.mark.parametrize(
    ("kind", "phases"),
    [
        ("cuda", ("window", "graph", "flush", "independent")),
        ("mps", ("host", "independent")),
        ("cpu", ("host", "independent")),
    ],
)
def test_the_timer_is_tried_by_every_method_of_the_device(kind, phases):
    (timer,) = in_section(cases("full", kind), "timer")
    assert timer.phases == phases
    assert set(phases) - {"independent"} <= set(timing.METHODS)


def test_a_grid_is_narrowed_to_sizes_and_contexts():
    everything, narrowed = cases("full", "cuda"), cases("full", "cuda", sizes=["small", "10b"], contexts=[512, 2048])
    expected = [
        case
        for case in everything
        if "size" not in case.parameters
        or (case.parameters["size"] in ("small", "10b") and case.parameters["context"] in (512, 2048))
    ]
    assert narrowed == expected
    assert Counter(case.section for case in narrowed) == {
        "ceilings": 4, "timer": 1, "warmup": 2 * 2 * 2, "steps": 2 * 2 * 3, "compile": 2 * 3 + 3,
    }  # fmt: skip


def test_a_size_may_be_given_by_its_alias():
    assert cases("full", "cuda", sizes=["xl-2026"]) == cases("full", "cuda", sizes=["2.7b"])
    assert {case.parameters["size"] for case in in_section(cases("full", "cuda", sizes=["xl-2026"]), "steps")} == {
        "2.7b"
    }


def test_a_size_given_twice_is_measured_once():
    assert cases("full", "cuda", sizes=["2.7b", "xl-2026"]) == cases("full", "cuda", sizes=["2.7b"])


# ---- the label is what runs ---------------------------------------------------------------------------------


@pytest.mark.parametrize("size", ["nano", "micro"])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("compile", ["none", "regional", "whole"])
def test_a_workload_runs_what_was_asked_for(size, precision, compile):
    asked = parameters(size, 16, precision, compile, batch=2, attention="sdpa" if compile == "whole" else "eager")
    assert Workload(CPU, asked).described() == asked


def _compile_blocks(workload: Workload) -> None:
    for block in workload.model.blocks:
        block.compile()


def _use_sdpa(workload: Workload) -> None:
    for block in workload.model.blocks:
        block.attention.attention = "sdpa"


def _make_wider(workload: Workload) -> None:
    workload.model = TransformerLM(model_config("micro"), max_context=32)


def _make_deeper(workload: Workload) -> None:
    workload.model.blocks.append(workload.model.blocks[0])


@pytest.mark.parametrize(
    ("change", "differs"),
    [
        (lambda workload: setattr(workload, "precision", "bf16"), {"precision": "bf16"}),
        (lambda workload: torch.set_float32_matmul_precision("high"), {"precision": "tf32"}),
        (_compile_blocks, {"compile": "regional"}),
        (lambda workload: workload.model.compile(), {"compile": "whole"}),
        (_use_sdpa, {"attention": "sdpa"}),
        (_make_wider, {"size": "micro"}),
        (_make_deeper, {"size": "(128, 512, 3, 2)"}),
        (lambda workload: setattr(workload, "tokens", workload.tokens[:, :16]), {"context": 16}),
        (lambda workload: setattr(workload, "tokens", workload.tokens[:3]), {"batch": 3}),
    ],
    ids=["autocast", "tf32", "regional", "whole", "attention", "width", "depth", "context", "batch"],
)
def test_a_label_is_read_back_from_what_runs(change, differs):
    workload = Workload(CPU, parameters())
    assert workload.described() == parameters()
    change(workload)
    assert workload.described() == parameters() | differs


@pytest.mark.parametrize(
    "change",
    [
        lambda blocks: setattr(blocks[-1].attention, "attention", "sdpa"),
        lambda blocks: blocks[-1].compile(),
    ],
    ids=["attention", "compile"],
)
def test_a_block_unlike_the_others_is_seen(change):
    workload = Workload(CPU, parameters())
    change(workload.model.blocks)
    assert workload.described() != parameters()


def test_a_measurement_carries_the_label_of_what_ran(monkeypatch):
    """A request that is silently not followed must not come back as if it had been."""
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module: None)
    monkeypatch.setattr(Workload, "autocast", lambda workload: torch.autocast("cpu", enabled=False))
    case = Case("steps", parameters(precision="bf16", compile="regional"), ("forward",), 60.0, 0.05)
    assert measure(case)["forward"].case == parameters(precision="fp32", compile="none")


# ---- the phases ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_every_phase_gives_positive_times_and_says_what_ran(precision):
    case = Case("steps", parameters(precision=precision), PHASES, 60.0, 0.05)
    measured = measure(case)
    assert list(measured) == list(PHASES)
    for phase, result in measured.items():
        times = [result.metrics[f"{name}_ms"] for name in ("min", "p20", "median", "p80")]
        assert 0 < times[0] and times == sorted(times) and math.isfinite(times[-1])
        assert result.metrics["n"] >= 3
        assert result.case == case.parameters
        assert result.timer["method"] == "host" and result.timer["num_warmup"] >= 1
        assert result.observed["num_parameters"] == accounting.num_parameters(model_config("nano"))
        assert result.observed["parameter_dtype"] == "float32"
        assert ("optimizer" in result.observed) == (phase in ("optimizer_step", "train_step"))
        assert "peak_bytes" not in result.metrics
    assert measured["train_step"].observed["optimizer"] == "AdamW"


COSTS_S = {"model": 1, "backward": 10, "optimizer": 100, "zero_grad": 1000, "build": 10_000, "kernel": 1}


class Clock:
    """A clock that only the instrumented parts move, each by a time that tells it from the others."""

    def __init__(self):
        self.now = 0.0

    def wrap(self, part: str, function):
        def wrapped(*args, **kwargs):
            self.now += COSTS_S[part]
            return function(*args, **kwargs)

        return wrapped


TIMED_PARTS = {
    "inference": {"model"},
    "forward": {"model"},
    "backward": {"backward"},
    "forward_backward": {"model", "backward"},
    "optimizer_step": {"optimizer"},
    "train_step": {"model", "backward", "optimizer", "zero_grad"},
}


@pytest.mark.parametrize("phase", PHASES)
def test_a_phase_times_its_own_parts_and_no_others(monkeypatch, phase):
    clock = Clock()
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    monkeypatch.setattr(torch.Tensor, "backward", clock.wrap("backward", torch.Tensor.backward))
    workload = Workload(CPU, parameters())
    for owner, name, part in (
        (workload.model, "forward", "model"),
        (workload.model, "zero_grad", "zero_grad"),
        (workload.optimizer, "zero_grad", "zero_grad"),
        (workload.optimizer, "step", "optimizer"),
    ):
        monkeypatch.setattr(owner, name, clock.wrap(part, getattr(owner, name)))
    expected_ms = 1e3 * sum(COSTS_S[part] for part in TIMED_PARTS[phase])
    timed = workload.time_phase(phase, **THREE)
    assert timed.samples_ms == (expected_ms,) * 3
    assert timed.num_warmup == 1


@pytest.mark.parametrize("phase", ["optimizer_step", "train_step"])
def test_making_the_optimizer_is_not_timed_as_a_sample(monkeypatch, phase):
    clock = Clock()
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    monkeypatch.setattr(torch.optim, "AdamW", clock.wrap("build", torch.optim.AdamW))
    timed = Workload(CPU, parameters()).time_phase(phase, **THREE)
    assert clock.now == COSTS_S["build"]
    assert timed.samples_ms == (0.0,) * 3


def test_an_unknown_phase_names_the_accepted_ones():
    with pytest.raises(ValueError) as raised:
        Workload(CPU, parameters()).time_phase("sideways")
    assert str(raised.value) == f"unknown phase 'sideways'; accepted: {', '.join(PHASES)}"


@contextmanager
def watched(workload: Workload, monkeypatch, owner, name: str):
    """Yields a list that gets, for each call of `owner.name`, whether gradients were there before and after it."""
    seen: list[tuple[set[bool], set[bool]]] = []
    function = getattr(owner, name)

    def present() -> set[bool]:
        return {parameter.grad is not None for parameter in workload.model.parameters()}

    def wrapped(*args, **kwargs):
        before = present()
        result = function(*args, **kwargs)
        seen.append((before, present()))
        return result

    monkeypatch.setattr(owner, name, wrapped)
    yield seen


def test_forward_backward_starts_without_gradients_and_leaves_them(monkeypatch):
    workload = Workload(CPU, parameters())
    with watched(workload, monkeypatch, workload, "forward_backward") as seen:
        workload.time_phase("forward_backward", **THREE)
    assert seen == [({False}, {True})] * 4


def test_backward_starts_without_gradients_and_leaves_them(monkeypatch):
    workload = Workload(CPU, parameters())
    with watched(workload, monkeypatch, torch.Tensor, "backward") as seen:
        workload.time_phase("backward", **THREE)
    assert seen == [({False}, {True})] * 4


def test_a_train_step_does_not_add_to_the_gradients_of_the_last(monkeypatch):
    workload = Workload(CPU, parameters())
    with watched(workload, monkeypatch, torch.Tensor, "backward") as seen:
        workload.time_phase("train_step", **THREE)
    assert seen == [({False}, {True})] * 4


@pytest.mark.parametrize("phase", ["inference", "forward"])
def test_a_forward_pass_makes_no_gradients(phase):
    workload = Workload(CPU, parameters())
    workload.time_phase(phase, **THREE)
    assert all(parameter.grad is None for parameter in workload.model.parameters())


@pytest.mark.parametrize("phase", PHASES)
def test_only_the_optimizer_changes_the_parameters(phase):
    workload = Workload(CPU, parameters())
    before = [parameter.detach().clone() for parameter in workload.model.parameters()]
    workload.time_phase(phase, **THREE)
    changed = {not torch.equal(old, new) for old, new in zip(before, workload.model.parameters(), strict=True)}
    assert changed == {phase in ("optimizer_step", "train_step")}
    if changed == {True}:
        steps = {int(state["step"]) for state in workload.optimizer.state.values()}
        assert steps == {4}  # one of warm-up and three samples: each took a step, for every parameter
        assert len(workload.optimizer.state) == len(before)


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_a_forward_pass_runs_in_its_precision_and_inference_without_autograd(precision, dtype):
    workload = Workload(CPU, parameters(precision=precision))
    seen = []
    workload.model.register_forward_hook(lambda *call: seen.append((call[-1].dtype, call[-1].requires_grad)))
    workload.inference()
    workload.forward()
    workload.forward_backward()
    assert seen == [(dtype, False), (dtype, True), (dtype, True)]
    seen.clear()
    for phase, with_autograd in {"inference": False, "forward": True}.items():
        workload.time_phase(phase, **THREE)
        assert seen == [(dtype, with_autograd)] * 4
        seen.clear()
    workload.forward_backward()
    assert {parameter.dtype for parameter in workload.model.parameters()} == {torch.float32}
    assert {parameter.grad.dtype for parameter in workload.model.parameters()} == {torch.float32}


def test_two_workloads_of_a_case_are_equal():
    first, second = (Workload(CPU, parameters()) for _ in range(2))
    assert torch.equal(first.tokens, second.tokens) and torch.equal(first.targets, second.targets)
    assert torch.equal(first.forward(), second.forward())


def test_a_case_lets_go_of_its_model():
    for _, run in run_case(Case("steps", parameters(), ("train_step",), 60.0, 0.05), {}):
        workload = run.args[0]
        run()
        assert {"model", "optimizer"} <= workload.__dict__.keys()
    assert not {"model", "optimizer"} & workload.__dict__.keys()


def test_warmup_keeps_every_step_from_the_first():
    case = next(case for case in cases("smoke", "cpu") if case.section == "warmup")
    (result,) = measure(case).values()
    assert result.timer["num_warmup"] == 0
    # 0, 1, 2 or 5 steps of warm-up and ten more.
    assert len(result.samples["step_ms"]) == result.metrics["n"] == 15
    assert min(result.samples["step_ms"]) > 0
    assert statistics.median(result.samples["step_ms"]) == result.metrics["median_ms"]


def test_the_first_step_of_warmup_is_the_first_the_model_makes(monkeypatch):
    calls = []
    monkeypatch.setattr(TransformerLM, "forward", count_calls(TransformerLM.forward, calls))
    case = next(case for case in cases("smoke", "cpu") if case.section == "warmup")
    measure(case)
    assert len(calls) == 15


def count_calls(function, calls: list):
    def counted(*args, **kwargs):
        calls.append(function)
        return function(*args, **kwargs)

    return counted


# ---- what a device cannot do --------------------------------------------------------------------------------


@pytest.mark.parametrize("section", ["steps", "ceilings"])
def test_tf32_is_skipped_on_a_cpu(monkeypatch, section):
    monkeypatch.setattr(benchmarking, "Workload", None)
    case = next(c for c in in_section(cases("full", "cpu"), section) if c.parameters["precision"] == "tf32")
    with pytest.raises(Skip, match=r"^a processor has no TF32$"):
        measure(case)


@pytest.mark.parametrize(
    ("section", "precision"),
    [
        ("steps", "tf32"),
        ("steps", "bf16"),
        ("ceilings", "tf32"),
        ("ceilings", "bf16"),
    ],
)
def test_what_an_older_gpu_lacks_is_skipped(monkeypatch, section, precision):
    monkeypatch.setattr(benchmarking.hardware, "detect", lambda: V100)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (7, 0))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    case = next(c for c in in_section(cases("full", "cuda"), section) if c.parameters["precision"] == precision)
    with pytest.raises(Skip, match=r"Tesla V100.* has no (TF32|bfloat16)"):
        measure(case)


# ---- rates --------------------------------------------------------------------------------------------------


def efficiency(phase: str, time_ms: float, *, precision="fp32", device=H200, ceilings=None) -> dict:
    """Returns the rates of nano with 4 × 32 tokens."""
    case = Case("steps", parameters(precision=precision), PHASES, 60.0)
    timed = Timing((time_ms,), "window", 0, "fixed count")
    return benchmarking._efficiency(SimpleNamespace(device=device), case, phase, timed, ceilings or {})


# By hand for nano, d 128, d_ff 512, 2 layers, vocabulary 10 000, on 128 tokens in rows of 32:
# products 2 · (2 · (4 · 128² + 3 · 128 · 512) + 10 000 · 128) · 128 = 461 897 728,
# attention 4 · 4 · 32² · 128 · 2 = 4 194 304, half of it when causal.
FORWARD_FLOPS, FORWARD_FLOPS_CAUSAL = 466_092_032, 463_994_880
# 2 · 10 000 · 128 + 2 · (4 · 128² + 3 · 128 · 512 + 2 · 128) + 128 parameters.
NUM_PARAMETERS = 3_084_928


@pytest.mark.parametrize(
    ("phase", "num_forwards"),
    [("inference", 1), ("forward", 1), ("backward", 2), ("forward_backward", 3), ("train_step", 3)],
)
def test_the_rate_of_a_phase_by_hand(phase, num_forwards):
    result = efficiency(phase, 0.5, ceilings={"gemm fp32": 50.0, "gemm bf16": 800.0, "copy": 4000.0})
    assert result["flops"] == num_forwards * FORWARD_FLOPS
    assert result["flops_causal"] == num_forwards * FORWARD_FLOPS_CAUSAL
    tflops = num_forwards * 0.000466092032 / 0.0005
    assert result["achieved_tflops"] == pytest.approx(tflops, rel=1e-12)
    assert result["tokens_per_s"] == pytest.approx(128 / 0.0005, rel=1e-12)
    assert result["ceiling"] == 50.0
    assert result["ceiling_fraction"] == pytest.approx(tflops / 50.0, rel=1e-12)
    assert result["datasheet_fraction"] == pytest.approx(tflops / 66.9, rel=1e-12)


@pytest.mark.parametrize(("precision", "peak"), [("fp32", 66.9), ("tf32", 494.7), ("bf16", 989.4)])
def test_a_rate_is_divided_by_the_ceiling_and_peak_of_its_precision(precision, peak):
    names = [ceiling_name(case) for case in in_section(cases("full", "cuda"), "ceilings")]
    ceilings = {name: 100.0 + i for i, name in enumerate(names)}
    result = efficiency("forward", 1.0, precision=precision, ceilings=ceilings)
    assert result["ceiling"] == ceilings[f"gemm {precision}"]
    assert result["datasheet_fraction"] == pytest.approx(0.466092032 / peak, rel=1e-12)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_optimizer_step_is_held_against_bandwidth(precision):
    ceilings = {f"gemm {precision}": 50.0, "copy": 4000.0}
    result = efficiency("optimizer_step", 0.1, precision=precision, ceilings=ceilings)
    gb_per_s = 28 * NUM_PARAMETERS / 1e9 / 0.0001  # seven transfers of four bytes
    assert result == {
        "achieved_gb_per_s": pytest.approx(gb_per_s, rel=1e-12),
        "ceiling": 4000.0,
        "ceiling_fraction": pytest.approx(gb_per_s / 4000.0, rel=1e-12),
        "datasheet_fraction": pytest.approx(gb_per_s / 4800.0, rel=1e-12),
    }


@pytest.mark.parametrize("phase", PHASES)
def test_a_fraction_of_what_is_not_known_is_none(phase):
    result = efficiency(phase, 1.0, device=CPU)
    assert (result["ceiling"], result["ceiling_fraction"], result["datasheet_fraction"]) == (None, None, None)


def test_a_gpu_without_the_unit_has_no_fraction_of_its_peak():
    assert efficiency("forward", 1.0, precision="bf16", device=V100)["datasheet_fraction"] is None
    assert efficiency("forward", 1.0, precision="fp32", device=V100)["datasheet_fraction"] is not None


def test_ceilings_reach_the_rates_of_a_case():
    case = Case("steps", parameters(), ("forward", "optimizer_step"), 60.0, 0.05)
    measured = measure(case, {"gemm fp32": 2.0, "copy": 5.0})
    forward, step = measured["forward"].metrics, measured["optimizer_step"].metrics
    assert forward["ceiling_fraction"] == pytest.approx(FORWARD_FLOPS / (forward["median_ms"] * 1e-3) / 2e12)
    assert step["ceiling_fraction"] == pytest.approx(28 * NUM_PARAMETERS / (step["median_ms"] * 1e-3) / 5e9)


# ---- ceilings and the timer ---------------------------------------------------------------------------------


@pytest.fixture
def small_ceilings(monkeypatch):
    monkeypatch.setitem(ceilings.CEILING_SIZES, "cpu", 64)
    monkeypatch.setitem(ceilings.COPY_BYTES, "cpu", 2**20)
    monkeypatch.setitem(ceilings.CEILING_TIME_S, "cpu", 0.05)
    monkeypatch.setitem(sections.SUSTAINED_S, "cpu", 0.03)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_ceiling_of_a_product(small_ceilings, precision):
    case = Case("ceilings", {"kind": "gemm", "precision": precision}, ("rate",), 60.0)
    (result,) = measure(case).values()
    assert result.case == case.parameters
    assert result.observed == {"m": 64, "n": 64, "k": 64}
    expected = 2 * 64**3 / (result.metrics["median_ms"] * 1e-3) / 1e12
    assert result.metrics["achieved_tflops"] == pytest.approx(expected, rel=1e-12)
    assert (result.metrics["datasheet"], result.metrics["datasheet_fraction"]) == (None, None)
    sustained = 2 * 64**3 / (result.metrics["sustained_ms"] * 1e-3) / 1e12
    assert result.metrics["sustained_tflops"] == pytest.approx(sustained, rel=1e-12)
    rates = {f"gemm {precision}": expected, f"sustained gemm {precision}": sustained}
    assert benchmarking.ceiling_rates(case, result) == pytest.approx(rates, rel=1e-12)
    assert result.telemetry["sustained"]["no_energy"] == "no energy counter is read on cpu"
    assert not {"joules", "watts", "tflop_per_joule", "sm_clock_mhz"} & result.metrics.keys()


def test_the_label_of_a_product_is_read_back_from_its_operands(small_ceilings, monkeypatch):
    float32 = partial(torch.randn, dtype=torch.float32)
    monkeypatch.setattr(torch, "randn", lambda *shape, dtype, **rest: float32(*shape, **rest))
    case = Case("ceilings", {"kind": "gemm", "precision": "bf16"}, ("rate",), 60.0)
    assert measure(case)["rate"].case == {"kind": "gemm", "precision": "fp32"}


def test_the_ceiling_of_a_copy_counts_what_is_read_and_written(small_ceilings):
    case = Case("ceilings", {"kind": "copy", "precision": "fp32"}, ("rate",), 60.0)
    (result,) = measure(case).values()
    assert result.case == case.parameters
    assert result.observed == {"num_bytes": 2**20}
    expected = 2 * 2**20 / (result.metrics["median_ms"] * 1e-3) / 1e9
    assert result.metrics["achieved_gb_per_s"] == pytest.approx(expected, rel=1e-12)
    sustained = 2 * 2**20 / (result.metrics["sustained_ms"] * 1e-3) / 1e9
    assert benchmarking.ceiling_rates(case, result) == pytest.approx({"copy": expected, "sustained copy": sustained})


def test_the_host_is_measured_probe_by_probe_and_what_it_lacks_is_skipped():
    for phase, run in run_case(Case("host", {}, PROBES, 60.0), {}):
        if phase == "triton_launch":
            with pytest.raises(Skip, match="Triton launches on CUDA only; this is cpu"):
                run()
        else:
            result = run()
            assert result.case == {} and result.timer["method"] == "host"
            assert 0 < result.metrics["median_ms"] < 10 and result.metrics["half_width_fraction"] >= 0


@pytest.mark.parametrize(("profile", "num_steps", "num_compiled"), [("full", 4, 5), ("smoke", 1, 1)])
def test_few_training_steps_are_also_run_back_to_back(profile, num_steps, num_compiled):
    grid = BENCHMARKING[profile]
    found = Counter()
    for case in cases(profile, "cuda"):
        if case.sustained:
            assert case.sustained == ("train_step",) and set(case.sustained) <= set(case.phases)
            assert tuple(case.parameters[name] for name in ("size", "context", "precision")) in grid.sustained
            found[case.section] += 1
    assert found == {"steps": num_steps, "compile": num_compiled}


def test_a_step_that_is_run_back_to_back_has_columns_of_its_own(small_ceilings):
    case = Case("steps", parameters(), ("forward", "train_step"), 60.0, 0.05, sustained=("train_step",))
    measured = measure(case, {"gemm fp32": 3.0, "sustained gemm fp32": 2.0})
    assert not any("sustained" in name for name in measured["forward"].metrics)
    step, telemetry = measured["train_step"].metrics, measured["train_step"].telemetry["sustained"]
    rate = step["flops"] / (step["sustained_ms"] * 1e-3) / 1e12
    assert (step["sustained_tflops"], step["sustained_ceiling"]) == (pytest.approx(rate), 2.0)
    assert step["sustained_ceiling_fraction"] == pytest.approx(rate / 2) and step["ceiling"] == 3.0
    assert step["steady"] in (0, 1) and telemetry["window_s"] >= 0.03 and telemetry["num_calls"] >= 2


def timer_case(method: str) -> Case:
    return Case("timer", {"kind": "negate"}, (method,), 60.0)


def test_the_timer_section_measures_one_kernel_by_every_method(small_ceilings):
    (case,) = in_section(cases("smoke", "cpu"), "timer")
    measured = measure(case)
    assert list(measured) == ["host", "independent"]
    for method, result in measured.items():
        assert result.timer["method"] == method
        assert result.case == case.parameters
        assert result.observed == {"num_bytes": 2**20}
        expected = 2 * 2**20 / (result.metrics["median_ms"] * 1e-3) / 1e9
        assert result.metrics["achieved_gb_per_s"] == pytest.approx(expected, rel=1e-12)
    assert measured["independent"].metrics["n"] == 5


def test_the_independent_time_is_of_one_call(small_ceilings, monkeypatch):
    """Thirty calls of a second each, after one that is not timed, take a second a call."""
    clock = Clock()
    monkeypatch.setattr(benchmarking, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    monkeypatch.setattr(torch, "neg", clock.wrap("kernel", torch.neg))
    result = measure(timer_case("independent"))["independent"]
    assert result.metrics["median_ms"] == result.metrics["min_ms"] == 1e3
    assert clock.now == 5 * 31


@pytest.mark.parametrize("method", ["host", "independent"])
def test_a_kernel_that_does_nothing_is_not_timed(small_ceilings, monkeypatch, method):
    monkeypatch.setattr(torch, "neg", lambda source, out: out)
    with pytest.raises(AssertionError, match="wrong"):
        measure(timer_case(method))


# ---- compiling ----------------------------------------------------------------------------------------------


@pytest.fixture
def counted_compiler(monkeypatch):
    """torch.compile with a compiler that takes 0.3 s and lets the graph run as it is; yields the graphs it got."""
    graphs = []

    def compiler(graph, inputs):
        graphs.append(graph)
        time.sleep(0.3)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=compiler))
    monkeypatch.setattr(benchmarking, "load_compiler", lambda device: None)  # this one is not used
    torch.compiler.reset()
    # Set back afterwards: compiling for real would otherwise stay without its caches in this process.
    with torch.compiler.config.patch(force_disable_caches=False):
        yield graphs
    torch.compiler.reset()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["regional", "whole"])
def test_compiling_is_timed_as_a_phase_of_its_own_and_only_there(counted_compiler, mode):
    (case,) = in_section(cases("smoke", "cpu"), "compile")
    case = replace(case, parameters={**case.parameters, "compile": mode})
    num_graphs = {}
    measured = {}
    for phase, run in run_case(case, {}):
        measured[phase] = run()
        num_graphs[phase] = len(counted_compiler)
        if phase == "compile":  # what runs backward is compiled no earlier than it is needed
            assert all(parameter.grad is not None for parameter in run.args[0].model.parameters())
    assert {result.case["compile"] for result in measured.values()} == {mode}
    assert num_graphs["compile"] >= 1
    assert set(num_graphs.values()) == {num_graphs["compile"]}, "compiled again after the first call"
    compiling = measured["compile"]
    assert compiling.metrics["n"] == 1 and len(compiling.samples["step_ms"]) == 1
    assert compiling.metrics["median_ms"] >= 300 * num_graphs["compile"]
    assert compiling.timer == {"method": "host", "num_warmup": 0, "stop_reason": "fixed count", "interval": 0.95}
    assert "achieved_tflops" not in compiling.metrics
    for phase in ("forward", "forward_backward", "train_step"):
        assert measured[phase].metrics["achieved_tflops"] > 0


# ---- through a session --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_session_measures_the_narrowed_steps_on_this_machine(tmp_path, monkeypatch):
    monkeypatch.undo()  # this one is of the machine's own device
    device = hardware.detect()
    session = open_session(
        "01_benchmarking",
        measure=True,
        device=device.slug,
        profile="smoke",
        output=str(tmp_path),
        fresh=False,
        sizes=["nano"],
        contexts=[32],
    )
    phases = ("forward", "train_step")
    session.cases = [replace(case, phases=phases) for case in in_section(session.cases, "steps")]
    session.measure("steps")
    records = session.store.load()
    assert [(record.case["precision"], record.phase) for record in records] == [
        (precision, phase) for precision in ("fp32", "bf16") for phase in phases
    ]
    assert {(record.status, record.reason) for record in records} == {("ok", "")}
    assert {record.device for record in records} == {device.slug}
    assert all(record.metrics["median_ms"] > 0 for record in records)
