"""A training step in one CUDA graph trains as the called step, or is refused."""

import pytest
import torch
from chapters import CPU

from labkit.device import detect
from labkit.experiments.step import (
    Step,
    capture_step,
    loss_difference,
    losses_of,
    step_parameters,
)
from labkit.measure.timing import captured_once

pytestmark = pytest.mark.usefixtures("on_a_cpu")


@pytest.mark.parametrize("precision", ["fp32", "bf16_pure"])
def test_steps_from_the_fixed_start_repeat_and_a_step_that_trains_otherwise_is_refused(precision):
    step = Step(CPU, step_parameters("nano", 16, precision))
    called = losses_of(step, step.train_step)
    assert loss_difference(called, losses_of(step, step.train_step)) == 0
    tokens = step.tokens.clone()

    def with_old_gradients():
        step.forward_backward()
        step.optimizer.step()

    def with_old_tokens():
        step.tokens.copy_(tokens)
        step.train_step()

    for wrong in (step.forward_backward, with_old_gradients, with_old_tokens):
        step.optimizer.zero_grad()
        with pytest.raises(AssertionError, match="trains otherwise than the called step: losses"):
            loss_difference(called, losses_of(step, wrong))


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


@pytest.mark.gpu
@pytest.mark.parametrize("compile", ["none", "regional"])
@pytest.mark.parametrize(("impl", "attention"), [("eager", "eager"), ("fused", "auto")])
def test_a_graph_trains_as_the_called_step_on_the_gpu(compile, impl, attention):
    options = {"compile": compile, "attention": attention, "impl": impl}
    asked = step_parameters("nano", 16, "bf16", **options)
    step = Step(detect(), asked)
    _, metrics = capture_step(step)
    assert metrics["loss_difference"] < 1e-3 and metrics["peak_bytes"] > 0
    assert step.described() == asked
