"""Notebook 01 measures the cases it says, each under the label of what really ran, and times
nothing else.
"""

import itertools
import math
import operator
import statistics
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import chapters
import pytest
import torch
from chapters import CPU, H200, in_section, on_a_cpu

from labkit import accounting
from labkit.configs import (
    BENCHMARKING,
    COMPILE_PHASES,
    PHASES,
    PRECISIONS,
    STEP_PHASES,
    model_config,
)
from labkit.device import Device, detect
from labkit.experiments import benchmarking, open_session, sections, step
from labkit.experiments.benchmarking import cases, run_case
from labkit.experiments.ceilings import ceiling_name
from labkit.experiments.sections import Timed
from labkit.experiments.step import RECIPES, Step, step_parameters
from labkit.experiments.sweep import Case, Skip
from labkit.measure import timing
from labkit.models.transformer import TransformerLM

V100 = Device("cuda", "Tesla V100-SXM2-16GB", "tesla-v100-sxm2-16gb")
THREE = {"num_warmup": 1, "min_samples": 3, "max_samples": 3, "time_limit_s": 1e9}
FULL_SIZES = ("small", "medium", "large", "xl-2025", "2.7b", "10b")
FULL_SHAPES = tuple(itertools.product(FULL_SIZES, (128, 256, 512, 1024, 2048)))
measure = partial(chapters.measure, run_case)


@pytest.fixture(autouse=True)
def this_device_is_a_cpu(monkeypatch):
    smoke = replace(benchmarking.BENCHMARKING["smoke"], time_limit_s=0.02)
    monkeypatch.setitem(benchmarking.BENCHMARKING, "smoke", smoke)
    yield from on_a_cpu(monkeypatch)


def parameters(
    size="nano", context=32, precision="fp32", compile="none", batch=4, attention="eager"
) -> dict:
    return {
        **step_parameters(size, context, precision, compile=compile, attention=attention),
        "batch": batch,
    }


def steps(*phases: str, **case) -> Case:
    return Case("steps", parameters(**case), phases or PHASES, 60.0, 0.05)


def labels(found: list[Case], section: str) -> list[tuple]:
    return [(case.parameters, case.phases) for case in in_section(found, section)]


def test_full_is_every_size_context_and_precision_and_warms_up_one_phase_a_process():
    found = cases("full", "cuda")
    every = [
        (parameters(*shape, precision), ("forward", "backward", "optimizer_step", "train_step"))
        for shape in FULL_SHAPES
        for precision in PRECISIONS
        if precision != "tf32" or shape[1] == 512
    ]
    assert (
        labels(found, "steps") == every
        and len(every) == 6 * (5 + 1 + 5)
        and PRECISIONS == ("fp32", "tf32", "bf16")
    )
    for case in in_section(found, "steps"):
        assert (case.fresh_process, case.stop_at_failure, case.timeout_s) == (False, False, 300.0)
    phases = ("forward", "forward_backward")
    traced = [("small", 512), ("large", 512), ("2.7b", 512)]
    assert labels(found, "warmup") == [
        (parameters(*shape), (phase,)) for shape in traced for phase in phases
    ]
    assert all(case.fresh_process for case in in_section(found, "warmup"))


def test_full_compile_is_whole_only_for_the_sizes_that_the_grid_names():
    compiled, whole_sizes = (
        in_section(cases("full", "cuda"), "compile"),
        BENCHMARKING["full"].whole_compile_sizes,
    )
    sizes = ("small", "large", "xl-2025")
    assert set() < set(whole_sizes) < set(sizes)
    wanted = [*((size, "regional") for size in sizes), *((size, "whole") for size in whole_sizes)]
    grid = itertools.product((512,), PRECISIONS, wanted)
    keys = [
        tuple(c.parameters[name] for name in ("context", "precision", "size", "compile"))
        for c in compiled
    ]
    assert Counter(keys) == Counter(
        (context, precision, *mode) for context, precision, mode in grid
    )
    assert {case.phases for case in compiled} == {
        ("compile", "forward", "forward_backward", "train_step")
    }
    # Its later phases would compile outside of any timing if the first had failed.
    assert all(case.stop_at_failure and not case.fresh_process for case in compiled)


def test_smoke_is_the_same_in_small():
    found = cases("smoke", "cpu")
    assert Counter(case.section for case in found) == {
        "ceilings": 3,
        "timer": 1,
        "warmup": 2 * 1 * 2,
        "steps": 2 * 3 * 2,
        "compile": 1,
        "execution": 2,
        "course": 1,
    }
    grid = itertools.product(("nano", "micro"), (16, 32, 64), ("fp32", "bf16"))
    assert labels(found, "steps") == [(parameters(*one), STEP_PHASES) for one in grid]
    warmup = in_section(found, "warmup")
    assert {
        (case.fresh_process, len(case.phases), case.parameters["context"]) for case in warmup
    } == {(True, 1, 64)}
    assert labels(found, "compile") == [
        (parameters("nano", 64, compile="regional"), COMPILE_PHASES)
    ]
    assert {case.timeout_s for case in found} == {120.0}


@pytest.mark.parametrize(
    ("profile", "kind", "precisions", "methods"),
    [
        ("full", "cuda", PRECISIONS, ("window", "graph", "flush")),
        ("full", "mps", PRECISIONS, ("host",)),
        ("smoke", "cpu", ("fp32", "bf16"), ("host",)),
    ],
)
def test_every_precision_copies_and_every_method_of_the_timer_are_measured(
    profile, kind, precisions, methods
):
    found = cases(profile, kind)
    names = [(ceiling_name(case), case.phases) for case in in_section(found, "ceilings")]
    assert names == [
        (name, ("rate",)) for name in (*(f"gemm {precision}" for precision in precisions), "copy")
    ]
    assert labels(found, "timer") == [({"kind": "negate"}, (*methods, "independent"))]
    assert set(methods) <= set(timing.METHODS)


def test_a_grid_is_narrowed_to_sizes_and_contexts():
    def is_wanted(p: dict) -> bool:
        return "size" not in p or (p["size"] in ("small", "10b") and p["context"] in (512, 2048))

    narrowed = cases("full", "cuda", sizes=["small", "10b"], contexts=[512, 2048])
    assert narrowed == [case for case in cases("full", "cuda") if is_wanted(case.parameters)]
    assert Counter(case.section for case in narrowed) == {
        "ceilings": 4,
        "timer": 1,
        "warmup": 2,
        "steps": 2 * (2 + 1 + 2),
        "compile": 3 + 3,
        "execution": 4 + 1 + 1 + 1,
        "course": 1,
    }


@pytest.mark.parametrize("size", ["nano", "micro"])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("compile", ["none", "regional", "whole"])
def test_a_workload_runs_what_was_asked_for(size, precision, compile):
    asked = parameters(
        size, 16, precision, compile, batch=2, attention="sdpa" if compile == "whole" else "eager"
    )
    assert Step(CPU, asked).described() == asked


_use_sdpa = operator.methodcaller("__setattr__", "attention", "sdpa")
CHANGES = {
    "autocast": (lambda w: setattr(w, "recipe", RECIPES["bf16"]), {"precision": "bf16"}),
    "tf32": (lambda w: torch.set_float32_matmul_precision("high"), {"precision": "tf32"}),
    "regional": (lambda w: [block.compile() for block in w.model.blocks], {"compile": "regional"}),
    "one block": (lambda w: w.model.blocks[-1].compile(), {"compile": "1 blocks"}),
    "whole": (lambda w: w.model.compile(), {"compile": "whole"}),
    "attention": (
        lambda w: [_use_sdpa(block.attention) for block in w.model.blocks],
        {"attention": "sdpa"},
    ),
    "attention of one": (
        lambda w: _use_sdpa(w.model.blocks[-1].attention),
        {"attention": "eager and sdpa"},
    ),
    "width": (
        lambda w: setattr(w, "model", TransformerLM(model_config("micro"), max_context=32)),
        {"size": "micro"},
    ),
    "depth": (lambda w: w.model.blocks.append(w.model.blocks[0]), {"size": "(128, 512, 3, 2)"}),
    "context": (lambda w: setattr(w, "tokens", w.tokens[:, :16]), {"context": 16}),
    "batch": (lambda w: setattr(w, "tokens", w.tokens[:3]), {"batch": 3}),
}


@pytest.mark.parametrize(("change", "differs"), CHANGES.values(), ids=CHANGES)
def test_a_label_is_read_back_from_what_runs(change, differs):
    workload = Step(CPU, parameters())
    assert workload.described() == parameters()
    change(workload)
    assert workload.described() == parameters() | differs


def test_a_measurement_carries_the_label_of_what_ran(monkeypatch):
    """A request that is silently not followed must not come back as if it had been."""
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module: None)
    monkeypatch.setattr(Step, "autocast", lambda workload: torch.autocast("cpu", enabled=False))
    case = steps("forward", precision="bf16", compile="regional")
    assert measure(case)["forward"].case == parameters(precision="fp32", compile="none")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_every_phase_gives_positive_times_and_says_what_ran(precision):
    case = steps(precision=precision)
    measured = measure(case)
    assert list(measured) == list(PHASES)
    for phase, result in measured.items():
        times = [result.metrics[f"{name}_ms"] for name in ("min", "p20", "median", "p80")]
        assert 0 < times[0] and times == sorted(times) and math.isfinite(times[-1])
        assert (
            result.metrics["n"] >= 3
            and "peak_bytes" not in result.metrics
            and result.case == case.parameters
        )
        assert result.timer["method"] == "host" and result.timer["num_warmup"] >= 1
        about = (result.observed["num_parameters"], result.observed["parameter_dtype"])
        assert about == (accounting.num_parameters(model_config("nano")), "float32")
        assert ("optimizer" in result.observed) == (phase in ("optimizer_step", "train_step"))
    assert measured["train_step"].observed["optimizer"] == "AdamW"


COSTS_S = {
    "model": 1,
    "backward": 10,
    "optimizer": 100,
    "zero_grad": 1000,
    "build": 10_000,
    "kernel": 1,
}


class Clock:
    """A clock that only the instrumented parts move, each by a time that tells it from the
    others.
    """

    def __init__(self, monkeypatch, module):
        self.now = 0.0
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def wrap(self, part: str, function):
        def wrapped(*args, **kwargs):
            self.now += COSTS_S[part]
            return function(*args, **kwargs)

        return wrapped


TIMED_PARTS = {
    "inference": ["model"],
    "forward": ["model"],
    "backward": ["backward"],
    "forward_backward": ["model", "backward"],
    "optimizer_step": ["optimizer"],
    "train_step": ["model", "backward", "optimizer", "zero_grad"],
}


@pytest.mark.parametrize("phase", PHASES)
def test_a_phase_times_its_own_parts_and_neither_others_nor_the_making_of_the_optimizer(
    monkeypatch, phase
):
    clock = Clock(monkeypatch, timing)
    build = clock.wrap("build", torch.optim.AdamW)

    def instrumented(owner, **parts):
        for name, part in parts.items():
            monkeypatch.setattr(owner, name, clock.wrap(part, getattr(owner, name)))
        return owner

    def optimizer(*arguments, **options):
        return instrumented(build(*arguments, **options), step="optimizer", zero_grad="zero_grad")

    monkeypatch.setattr(torch.optim, "AdamW", optimizer)
    monkeypatch.setattr(torch.Tensor, "backward", clock.wrap("backward", torch.Tensor.backward))
    workload = Step(CPU, parameters())
    instrumented(workload.model, forward="model", zero_grad="zero_grad")
    timed = workload.time_phase(phase, **THREE)
    expected_ms = 1e3 * sum(COSTS_S[part] for part in TIMED_PARTS[phase])
    assert (timed.num_warmup, timed.samples_ms) == (1, (expected_ms,) * 3)


@pytest.mark.parametrize("phase", ["backward", "forward_backward", "train_step"])
def test_a_backward_pass_starts_without_gradients_and_leaves_them(monkeypatch, phase):
    workload, seen = Step(CPU, parameters()), []
    owner, name = (workload, phase) if phase == "forward_backward" else (torch.Tensor, "backward")
    function = getattr(owner, name)

    def present() -> set[bool]:
        return {parameter.grad is not None for parameter in workload.model.parameters()}

    def watched(*arguments):
        before = present()
        function(*arguments)
        seen.append((before, present()))

    monkeypatch.setattr(owner, name, watched)
    workload.time_phase(phase, **THREE)
    assert seen == [({False}, {True})] * 4


@pytest.mark.parametrize("phase", PHASES)
def test_only_the_optimizer_changes_the_parameters_and_a_forward_pass_makes_no_gradients(phase):
    workload = Step(CPU, parameters())
    before = [parameter.detach().clone() for parameter in workload.model.parameters()]
    workload.time_phase(phase, **THREE)
    if phase in ("inference", "forward"):
        assert all(parameter.grad is None for parameter in workload.model.parameters())
    changed = {
        not torch.equal(old, new)
        for old, new in zip(before, workload.model.parameters(), strict=True)
    }
    assert changed == {phase in ("optimizer_step", "train_step")}
    if changed == {True}:
        # One of warm-up and three samples: each took a step, for every parameter.
        assert [int(state["step"]) for state in workload.optimizer.state.values()] == [4] * len(
            before
        )


@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)]
)
def test_a_forward_pass_runs_in_its_precision_and_inference_without_autograd(precision, dtype):
    workload, seen = Step(CPU, parameters(precision=precision)), []
    workload.model.register_forward_hook(
        lambda *call: seen.append((call[-1].dtype, call[-1].requires_grad))
    )
    workload.inference()
    workload.forward()
    workload.forward_backward()
    assert seen == [(dtype, False), (dtype, True), (dtype, True)]
    for phase, with_autograd in {"inference": False, "forward": True}.items():
        seen.clear()
        workload.time_phase(phase, **THREE)
        assert seen == [(dtype, with_autograd)] * 4
    workload.forward_backward()
    assert {x.dtype for p in workload.model.parameters() for x in (p, p.grad)} == {torch.float32}


def test_two_workloads_of_a_case_are_equal():
    first, second = (Step(CPU, parameters()) for _ in range(2))
    assert torch.equal(first.tokens, second.tokens) and torch.equal(first.targets, second.targets)
    assert torch.equal(first.forward(), second.forward())


def test_a_case_lets_go_of_its_model():
    for _, run in run_case(steps("train_step"), {}):
        workload = run.args[0]
        run()
        assert {"model", "optimizer"} <= workload.__dict__.keys()
    assert not {"model", "optimizer"} & workload.__dict__.keys()


def test_warmup_keeps_every_step_from_the_first_that_the_model_makes(monkeypatch):
    forward, calls = TransformerLM.forward, []
    monkeypatch.setattr(
        TransformerLM, "forward", lambda *arguments: calls.append(1) or forward(*arguments)
    )
    (result,) = measure(in_section(cases("smoke", "cpu"), "warmup")[0]).values()
    step_ms = result.samples["step_ms"]
    # 0, 1, 2 or 5 steps of warm-up and ten more.
    assert (
        result.timer["num_warmup"] == 0 and len(calls) == len(step_ms) == result.metrics["n"] == 15
    )
    assert min(step_ms) > 0 and statistics.median(step_ms) == result.metrics["median_ms"]


@pytest.mark.parametrize("section", ["steps", "ceilings"])
@pytest.mark.parametrize(("device", "precision"), [(CPU, "tf32"), (V100, "tf32"), (V100, "bf16")])
def test_a_precision_that_a_device_lacks_is_skipped_before_a_model_is_built(
    monkeypatch, section, device, precision
):
    monkeypatch.setattr(sections, "detect", lambda: device)
    monkeypatch.setattr(step, "Step", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (7, 0))
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation
    )
    found = in_section(cases("full", device.kind), section)
    with pytest.raises(
        Skip, match=f"^{device.name} has no {'TF32' if precision == 'tf32' else 'bfloat16'}$"
    ):
        measure(next(case for case in found if case.parameters["precision"] == precision))


def efficiency(phase: str, time_ms: float, *, precision="fp32", device=H200, **ceilings) -> dict:
    """Returns the rates of nano with 4 × 32 tokens."""
    timed = Timed(timing.Timing((time_ms,), "window", 0, "fixed count"), {})
    return step.step_rates(device, steps(precision=precision), phase, None, timed, ceilings)


# By hand for nano, d 128, d_ff 512, 2 layers, vocabulary 10 000, on 128 tokens in rows of 32:
# products 2 · (2 · (4 · 128² + 3 · 128 · 512) + 10 000 · 128) · 128 = 461 897 728,
# attention 4 · 4 · 32² · 128 · 2 = 4 194 304, half of it when causal.
FORWARD_FLOPS, FORWARD_FLOPS_CAUSAL = 466_092_032, 463_994_880
# 2 · 10 000 · 128 + 2 · (4 · 128² + 3 · 128 · 512 + 2 · 128) + 128 parameters.
NUM_PARAMETERS = 3_084_928
FRACTIONS = ("ceiling", "ceiling_fraction", "datasheet_fraction")
exactly = partial(pytest.approx, rel=1e-12)


def fractions(*values: float) -> dict:
    return dict(zip(FRACTIONS, map(exactly, values), strict=True))


@pytest.mark.parametrize(
    ("phase", "num_forwards"),
    [("inference", 1), ("forward", 1), ("backward", 2), ("forward_backward", 3), ("train_step", 3)],
)
def test_the_rate_of_a_phase_by_hand(phase, num_forwards):
    tflops = num_forwards * 0.000466092032 / 0.0005
    rates = {
        "flops": num_forwards * FORWARD_FLOPS,
        "flops_causal": num_forwards * FORWARD_FLOPS_CAUSAL,
    }
    rates |= {"achieved_tflops": exactly(tflops), "tokens_per_s": exactly(128 / 0.0005)}
    ceilings = {"gemm fp32": 50.0, "gemm bf16": 800.0, "copy": 4000.0}
    assert efficiency(phase, 0.5, **ceilings) == rates | fractions(
        50.0, tflops / 50.0, tflops / 66.9
    )
    assert efficiency(phase, 0.5, device=CPU) == rates | dict.fromkeys(FRACTIONS)


@pytest.mark.parametrize(
    ("device", "precision", "peak"),
    [
        (H200, "fp32", 66.9),
        (H200, "tf32", 494.7),
        (H200, "bf16", 989.4),
        (V100, "fp32", 15.7),
        (V100, "bf16", None),
    ],
)
def test_a_rate_is_divided_by_the_ceiling_and_peak_of_its_precision(device, precision, peak):
    names = [ceiling_name(case) for case in in_section(cases("full", "cuda"), "ceilings")]
    ceilings = {name: 100.0 + i for i, name in enumerate(names)}
    result = efficiency("forward", 1.0, precision=precision, device=device, **ceilings)
    assert result["ceiling"] == ceilings[f"gemm {precision}"]
    assert result["datasheet_fraction"] == (exactly(0.466092032 / peak) if peak else None)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_optimizer_step_is_held_against_bandwidth(precision):
    ceilings = {f"gemm {precision}": 50.0, "copy": 4000.0}
    rate = 28 * NUM_PARAMETERS / 1e9 / 0.0001  # seven transfers of four bytes
    found = [
        efficiency("optimizer_step", 0.1, precision=precision, **c)
        for c in (ceilings, {"device": CPU})
    ]
    expected = [fractions(4000.0, rate / 4000.0, rate / 4800.0), dict.fromkeys(FRACTIONS)]
    assert found == [{"achieved_gb_per_s": exactly(rate), **each} for each in expected]


def test_ceilings_reach_the_rates_of_a_case():
    measured = measure(steps("forward", "optimizer_step"), {"gemm fp32": 2.0, "copy": 5.0})
    for phase, work in (
        ("forward", FORWARD_FLOPS / 2e12),
        ("optimizer_step", 28 * NUM_PARAMETERS / 5e9),
    ):
        metrics = measured[phase].metrics
        assert metrics["ceiling_fraction"] == pytest.approx(work / (metrics["median_ms"] * 1e-3))


@pytest.fixture
def counted_compiler(monkeypatch):
    """torch.compile with a compiler that takes 0.3 s and lets the graph run as it is; yields the
    graphs it got.
    """
    graphs = []

    def compiler(graph, inputs):
        graphs.append(graph)
        time.sleep(0.3)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=compiler))
    monkeypatch.setattr(step, "load_compiler", lambda device: None)  # this one is not used
    torch.compiler.reset()
    # Set back afterwards: compiling for real would otherwise stay without its caches in this
    # process.
    with torch.compiler.config.patch(force_disable_caches=False):
        yield graphs
    torch.compiler.reset()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["regional", "whole"])
def test_compiling_is_timed_as_a_phase_of_its_own_and_only_there(counted_compiler, mode):
    (case,) = in_section(cases("smoke", "cpu"), "compile")
    case = replace(case, parameters={**case.parameters, "compile": mode})
    num_graphs, measured = {}, {}
    for phase, run in run_case(case, {}):
        measured[phase] = run()
        num_graphs[phase] = len(counted_compiler)
        if phase == "compile":  # what runs backward is compiled no earlier than it is needed
            assert all(parameter.grad is not None for parameter in run.args[0].model.parameters())
    assert {result.case["compile"] for result in measured.values()} == {mode}
    assert {max(1, num_graphs["compile"])} == set(num_graphs.values()), (
        "compiled again after the first call"
    )
    compiling = measured["compile"]
    assert compiling.metrics["n"] == 1 and len(compiling.samples["step_ms"]) == 1
    assert compiling.metrics["median_ms"] >= 300 * num_graphs["compile"]
    assert compiling.timer == {"method": "host", "num_warmup": 0, "stop_reason": "fixed count"}
    assert "achieved_tflops" not in compiling.metrics
    assert all(measured[phase].metrics["achieved_tflops"] > 0 for phase in case.phases[1:])


@pytest.mark.slow
def test_a_session_measures_the_narrowed_steps_on_this_machine(tmp_path, monkeypatch):
    monkeypatch.undo()  # this one is of the machine's own device
    device = detect()
    options = {
        "measure": True,
        "device": device.slug,
        "profile": "smoke",
        "output": str(tmp_path),
        "fresh": False,
    }
    session = open_session("01_benchmarking", **options, sizes=["nano"], contexts=[32])
    phases = ("forward", "train_step")
    session.cases = [replace(case, phases=phases) for case in in_section(session.cases, "steps")]
    session.measure("steps")
    found = [
        (r.case["precision"], r.phase, r.status, r.reason, r.device, r.metrics["median_ms"] > 0)
        for r in session.store.load()
    ]
    # In any order: a phase that others disturb is measured again after the rest of its case.
    assert sorted(found) == [
        (precision, phase, "ok", "", device.slug, True)
        for precision in ("bf16", "fp32")
        for phase in phases
    ]
