"""Notebook 01 measures the cases it says, each under the label of what really ran, and times
nothing else.
"""

import time
from functools import partial
from types import SimpleNamespace

import chapters
import pytest
import torch
from chapters import CPU, in_section

from labkit.configs import PHASES, model_config
from labkit.experiments import step
from labkit.experiments.benchmarking import cases, run_case
from labkit.experiments.step import RECIPES, Step, step_parameters
from labkit.experiments.sweep import Case
from labkit.measure import timing
from labkit.models.transformer import TransformerLM

THREE = {"num_warmup": 1, "min_samples": 3, "max_samples": 3, "time_limit_s": 1e9}
measure = partial(chapters.measure, run_case)


pytestmark = pytest.mark.usefixtures("briefly_on_a_cpu")


def parameters(precision="fp32", compile="none") -> dict:
    return step_parameters("nano", 32, precision, compile=compile)


def steps(*phases: str, **case) -> Case:
    return Case("steps", parameters(**case), phases, 60.0, 0.05)


CHANGES = {
    "autocast": (lambda w: setattr(w, "recipe", RECIPES["bf16"]), {"precision": "bf16"}),
    "tf32": (lambda w: torch.set_float32_matmul_precision("high"), {"precision": "tf32"}),
    "regional": (lambda w: [block.compile() for block in w.model.blocks], {"compile": "regional"}),
    "whole": (lambda w: w.model.compile(), {"compile": "whole"}),
    "model": (
        lambda w: setattr(w, "model", TransformerLM(model_config("micro"), max_context=32)),
        {"size": "micro"},
    ),
    "tokens": (lambda w: setattr(w, "tokens", w.tokens[:3, :16]), {"batch": 3, "context": 16}),
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
    measured = measure(steps("forward", precision="bf16", compile="regional"))
    assert measured["forward"].case == parameters()


# By hand for nano, d 128, d_ff 512, 2 layers, vocabulary 10 000, on 128 tokens in rows of 32:
# products 2 · (2 · (4 · 128² + 3 · 128 · 512) + 10 000 · 128) · 128 = 461 897 728,
# attention 4 · 4 · 32² · 128 · 2 = 4 194 304, half of it when causal.
FORWARD_FLOPS = 466_092_032
NUM_PARAMETERS = 3_084_928


def test_every_phase_says_what_ran_and_its_rates():
    case = steps(*PHASES)
    measured = measure(case, {"gemm fp32 achieved_tflops": 2.0, "copy fp32 achieved_gb_per_s": 5.0})
    assert list(measured) == list(PHASES)
    num_forwards = {"backward": 2, "forward_backward": 3, "train_step": 3}
    for phase, result in measured.items():
        metrics = result.metrics
        assert result.case == case.parameters and result.timer["method"] == "host"
        assert 0 < metrics["min_ms"] <= metrics["p20_ms"] <= metrics["median_ms"]
        seconds = metrics["median_ms"] * 1e-3
        if phase == "optimizer_step":
            # Seven transfers of four bytes, held against bandwidth.
            rate = 28 * NUM_PARAMETERS / 5e9 / seconds
        else:
            flops = num_forwards.get(phase, 1) * FORWARD_FLOPS
            assert metrics["flops"] == flops
            assert metrics["tokens_per_s"] == pytest.approx(128 / seconds)
            rate = flops / 2e12 / seconds
        assert metrics["ceiling_fraction"] == pytest.approx(rate)
    [pure] = measure(steps("optimizer_step", precision="bf16_pure")).values()
    assert pure.metrics["num_bytes"] == 14 * NUM_PARAMETERS


COSTS_S = {"model": 1, "backward": 10, "optimizer": 100, "zero_grad": 1000, "build": 10_000}
TIMED_PARTS = {
    "forward": ["model"],
    "backward": ["backward"],
    "optimizer_step": ["optimizer"],
    "train_step": ["model", "backward", "optimizer", "zero_grad"],
}


@pytest.mark.parametrize("phase", TIMED_PARTS)
def test_a_phase_times_its_own_parts_and_not_the_making_of_the_optimizer(monkeypatch, phase):
    """By a clock that only the parts move, each by a time that tells it from the others."""
    now = 0.0
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: now))

    def slow(owner, name: str, part: str):
        function = getattr(owner, name)

        def wrapped(*args, **kwargs):
            nonlocal now
            now += COSTS_S[part]
            result = function(*args, **kwargs)
            if part == "build":
                slow(result, "step", "optimizer")
                slow(result, "zero_grad", "zero_grad")
            return result

        monkeypatch.setattr(owner, name, wrapped)

    slow(torch.optim, "AdamW", "build")
    slow(torch.Tensor, "backward", "backward")
    workload = Step(CPU, parameters())
    slow(workload.model, "forward", "model")
    slow(workload.model, "zero_grad", "zero_grad")
    timed = workload.time_phase(phase, device_kind="cpu", **THREE)
    expected_ms = 1e3 * sum(COSTS_S[part] for part in TIMED_PARTS[phase])
    assert timed.samples_ms == (expected_ms,) * 3


def test_a_case_lets_go_of_its_model():
    for _, run in run_case(steps("train_step")):
        workload = run.args[0]
        run()
        assert {"model", "optimizer"} <= workload.__dict__.keys()
    assert not {"model", "optimizer"} & workload.__dict__.keys()


@pytest.mark.slow
def test_compiling_is_timed_as_a_phase_of_its_own_and_only_there(monkeypatch):
    """With a compiler that takes 0.3 s and lets the graph run as it is."""
    graphs = []

    def compiler(graph, inputs):
        graphs.append(graph)
        time.sleep(0.3)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=compiler))
    monkeypatch.setattr(step, "load_compiler", lambda device: None)  # this one is not used
    torch.compiler.reset()
    (case,) = in_section(cases("smoke", "cpu"), "compile")
    counts, measured = [], {}
    for phase, run in run_case(case):
        measured[phase] = run()
        counts.append(len(graphs))
        assert not torch.compiler.config.force_disable_caches  # of what is compiled after it
    torch.compiler.reset()
    assert len(set(counts)) == 1, "compiled again after the first call"
    compiling = measured["compile"]
    assert compiling.metrics["n"] == 1 and compiling.metrics["median_ms"] >= 300 * counts[0]
    assert all(measured[phase].metrics["achieved_tflops"] > 0 for phase in case.phases[1:])
