"""A training step in one CUDA graph: it trains as the called step, and what it saves is computed
from its records.
"""

import contextlib
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from chapters import CPU, in_section, measure, on_a_cpu

from labkit.device import detect
from labkit.experiments import benchmarking, graphed_step
from labkit.experiments.benchmarking import cases, run_case
from labkit.experiments.graphed_step import capture_step, compared, trained
from labkit.experiments.step import Step, step_parameters
from labkit.experiments.sweep import Skip
from labkit.measure.timing import captured_once


@pytest.fixture(autouse=True)
def this_device_is_a_cpu(monkeypatch, request):
    yield from on_a_cpu(monkeypatch, is_detected="gpu" not in request.keywords)


def test_on_a_cpu_the_step_is_called_and_its_graph_skipped_with_the_reason():
    (case, _) = in_section(cases("smoke", "cpu"), "execution")
    phases = run_case(case, {})
    assert next(phases)[1]().case == case.parameters
    phase, graphed = next(phases)
    with pytest.raises(Skip, match=f"^{CPU.name} has no CUDA graphs$"):
        graphed()
    assert phase == "graph_step"
    phases.close()


@pytest.mark.parametrize("precision", ["fp32", "bf16_pure"])
def test_steps_from_the_fixed_start_repeat_and_a_step_that_trains_otherwise_is_refused(precision):
    step = Step(CPU, step_parameters("nano", 16, precision), capturable=True)
    called = trained(step, step.train_step)
    repeated = compared(called, trained(step, step.train_step))
    assert repeated == {"loss_difference": 0, "update_difference": 0}
    tokens = step.tokens.clone()

    def without_optimizer():
        step.forward_backward()
        step.loss = step.forward().detach()

    def with_old_gradients():
        without_optimizer()
        step.optimizer.step()

    def with_old_tokens():
        step.tokens.copy_(tokens)
        step.train_step()

    for wrong in (without_optimizer, with_old_gradients, with_old_tokens):
        step.optimizer.zero_grad()
        _, updates = trained(step, wrong)
        with pytest.raises(AssertionError, match="than the called step: update_difference"):
            compared(called, (called[0], updates))


@pytest.fixture
def replayed_by_calling(monkeypatch):
    """Lets a CPU stand in for a GPU: a graph's replay calls the captured function."""
    monkeypatch.setattr(
        graphed_step, "captured_once", lambda step: step() or SimpleNamespace(replay=step)
    )
    monkeypatch.setattr(graphed_step, "on_capture_stream", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 123)
    monkeypatch.setattr(benchmarking, "require_graphs", lambda device: None)


def test_a_graph_is_recorded_with_its_peak_and_how_far_it_is_off(replayed_by_calling, monkeypatch):
    (case, fused) = in_section(cases("smoke", "cpu"), "execution")
    case = replace(case, sustained=("graph_step",))
    for one in (case, replace(fused, phases=("graph_step",))):
        found = measure(run_case, one)["graph_step"]
        assert found.case == one.parameters
        assert (found.metrics["loss_difference"], found.metrics["peak_bytes"]) == (0, 123)
        assert ("sustained_ms" in found.metrics) == (one is case)
        assert found.metrics["achieved_tflops"] > 0
    monkeypatch.setattr(
        graphed_step, "captured_once", lambda step: SimpleNamespace(replay=lambda: None)
    )
    with pytest.raises(AssertionError, match="the graph trains otherwise"):
        measure(run_case, case)


def test_out_of_memory_in_a_capture_is_that_and_not_the_broken_capture(monkeypatch):
    class Capture:
        def __init__(self, graph, **options):
            self.options = options

        def __enter__(self):
            pass

        def __exit__(self, *failure):
            raise RuntimeError("the capture was broken off")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: None)
    monkeypatch.setattr(torch.cuda, "graph", Capture)

    def too_large():
        raise torch.OutOfMemoryError("too large")

    with pytest.raises(torch.OutOfMemoryError, match="too large"):
        captured_once(too_large)
    with pytest.raises(RuntimeError, match="broken off"):
        captured_once(lambda: None)


@pytest.mark.gpu
@pytest.mark.parametrize("compile", ["none", "regional"])
@pytest.mark.parametrize(("impl", "attention"), [("eager", "eager"), ("fused", "auto")])
def test_a_graph_trains_as_the_called_step_on_the_gpu(compile, impl, attention):
    options = {"compile": compile, "attention": attention, "impl": impl}
    asked = step_parameters("nano", 16, "bf16", **options)
    step = Step(detect(), asked, capturable=True)
    _, metrics = capture_step(step)
    assert metrics["update_difference"] < 0.1 and metrics["peak_bytes"] > 0
    assert step.described() == asked
