"""A training step in one CUDA graph: it trains as the called step, and what it saves is computed
from its records.
"""

import contextlib
import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from chapters import CPU, in_section, measure, on_a_cpu

from labkit.configs import BENCHMARKING
from labkit.device import detect
from labkit.experiments import benchmarking, graphed_step
from labkit.experiments.benchmarking import cases, run_case
from labkit.experiments.graphed_step import GraphedWorkload, compared
from labkit.experiments.sweep import Skip
from labkit.experiments.workload import step_parameters
from labkit.measure.timing import captured_once


@pytest.fixture(autouse=True)
def this_device_is_a_cpu(monkeypatch, request):
    yield from on_a_cpu(monkeypatch, is_detected="gpu" not in request.keywords)


def parameters(precision="fp32", **options) -> dict:
    return step_parameters("nano", 16, precision, **options)


def test_cases_are_every_way_at_every_size_and_keep_the_labels_of_the_other_sections():
    found = in_section(cases("full", "cuda"), "execution")
    assert all(case.phases == ("train_step", "graph_step") for case in found)
    keys = [
        tuple(case.parameters.get(k) for k in ("impl", "compile", "size", "precision", "context"))
        for case in found
    ]
    assert len(set(keys)) == len(keys) == 42
    sizes, grid = BENCHMARKING["full"].execution_sizes, ("fp32", "tf32", "bf16", "bf16_pure")
    assert {key for key in keys if key[1] == "none" and key[4] == 512} == {
        (None, "none", *case) for case in itertools.product(sizes, grid, (512,))
    }
    assert {key for key in keys if key[0]} == {
        ("fused", "regional", size, "bf16", 512) for size in sizes
    }
    lasting = [case.parameters for case in found if case.sustained == ("graph_step",)]
    assert {(p["size"], p["compile"], p.get("impl")) for p in lasting} == {
        ("xl-2025", "none", None),
        ("xl-2025", "regional", None),
        ("xl-2025", "regional", "fused"),
    }
    others = [case for case in cases("full", "cuda") if case.section not in ("execution", "course")]
    assert not any("impl" in case.parameters for case in others)


def test_on_a_cpu_the_step_is_called_and_its_graph_skipped_with_the_reason():
    for case in in_section(cases("smoke", "cpu"), "execution"):
        phases = run_case(case, {})
        assert next(phases)[1]().case == case.parameters
        phase, graphed = next(phases)
        with pytest.raises(Skip, match=f"^{CPU.name} has no CUDA graphs$"):
            graphed()
        assert phase == "graph_step"
        phases.close()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16_pure"])
def test_steps_from_the_fixed_start_repeat_and_a_step_that_trains_otherwise_is_refused(precision):
    live = GraphedWorkload(CPU, parameters(precision))
    assert live.described() == parameters(precision)
    called = live.trained(live.train_step)
    assert compared(called, live.trained(live.train_step)) == {
        "loss_difference": 0,
        "update_difference": 0,
    }
    tokens = live.tokens.clone()

    def without_optimizer():
        live.forward_backward()
        live.loss = live.forward().detach()

    def with_old_gradients():
        live.forward_backward()
        live.optimizer.step()
        live.loss = live.forward().detach()

    def with_old_tokens():
        live.tokens.copy_(tokens)
        live.train_step()

    for wrong in (without_optimizer, with_old_gradients, with_old_tokens):
        live.optimizer.zero_grad()
        with pytest.raises(
            AssertionError, match="the graph trains otherwise than the called step: "
        ):
            compared(called, live.trained(wrong))
        losses = called[0], live.trained(wrong)[1]
        with pytest.raises(AssertionError, match="update_difference"):
            compared(called, losses)


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
        assert ("sustained_ms" in found.metrics) == (one is case) and found.metrics[
            "achieved_tflops"
        ] > 0
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
@pytest.mark.parametrize("impl", ["eager", "fused"])
def test_a_graph_trains_as_the_called_step_on_the_gpu(compile, impl):
    asked = parameters("bf16", compile=compile, attention=graphed_step.ATTENTION[impl], impl=impl)
    live = GraphedWorkload(detect(), asked)
    _, metrics = live.graph()
    assert metrics["update_difference"] < 0.1 and metrics["peak_bytes"] > 0
    assert live.described() == asked
