"""A step as it is captured: once with ranges around the parts of the model, once with the phases'
ranges alone.

As a program it runs one such step: `python -m labkit.experiments.captured_step SIZE CONTEXT
PRECISION ATTENTION PHASE`.
"""

import contextlib
import functools
import math
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch.overrides import TorchFunctionMode

from labkit.device import detect
from labkit.experiments.sections import empty_cache
from labkit.experiments.step import Step, step_parameters
from labkit.measure import profiling
from labkit.measure.profiling import Nsys, RangeMarker
from labkit.measure.timing import synchronize
from labkit.models import transformer

NUM_WARMUP = 1
NUM_CAPTURED = 2

LARGEST_DIFFERENCE = 1e-2
"""Relative difference of the output with and without ranges above which marking has changed what is
computed.
"""

_PARTS = {
    **dict.fromkeys(("matmul", "mul", "div"), "scores"),
    **dict.fromkeys(("softmax", "max", "sub", "exp", "sum"), "softmax"),
}
_AFTER_SOFTMAX = {"matmul": "value product", "div": "softmax"}
"""What functions of the formula belong to, as it reads or from plain operators, if not to the mask.
"""

_LAUNCHES_NOTHING = ("transpose", "dim", "__get__", "size")


class _AttentionParts(TorchFunctionMode):
    """Opens a range around each function of the attention formula: scores, mask, softmax or value
    product.
    """

    def __init__(self, marker: RangeMarker):
        super().__init__()
        self.marker = marker
        self.parts = _PARTS

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = func.__name__
        if name in _LAUNCHES_NOTHING:
            return func(*args, **(kwargs or {}))
        part = self.parts.get(name, "mask")
        if part == "softmax":
            self.parts = _PARTS | _AFTER_SOFTMAX
        with self.marker(part):
            return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def marked(step: Step, marker: RangeMarker) -> Iterator[None]:
    """Marks blocks, norms, attention and its parts, feed-forward, embedding and head in this
    context.
    """
    model, handles = step.model, []

    def mark(module: torch.nn.Module, name: str) -> None:
        handles.append(module.register_forward_pre_hook(lambda *_: marker.open(name)))
        handles.append(module.register_forward_hook(lambda *_: marker.close(), always_call=True))

    def mark_backward(module: torch.nn.Module, name: str) -> None:
        handles.append(module.register_full_backward_pre_hook(lambda *_: marker.open(name)))
        handles.append(module.register_full_backward_hook(lambda *_: marker.close()))

    def attention(*tensors: torch.Tensor, causal: bool) -> torch.Tensor:
        parts = _AttentionParts(marker) if impl in ("eager", "course") else contextlib.nullcontext()
        with marker("core"), parts:
            return original(*tensors, causal=causal)

    for number, block in enumerate(model.blocks):
        mark(block, f"block {number}")
        mark_backward(block, f"block {number}")
        mark(block.attention, "attention")
        mark(block.feed_forward, "feed-forward")
        mark(block.attention_norm, "norm")
        mark(block.feed_forward_norm, "norm")
    mark(model.embedding, "embedding")
    mark(model.norm, "norm")
    mark(model.head, "head")
    # Wrapped under the name by which the model finds it: the same functions compute.
    impl = model.blocks[0].attention.attention
    original = transformer.ATTENTION[impl]
    transformer.ATTENTION[impl] = attention
    try:
        yield
    finally:
        transformer.ATTENTION[impl] = original
        for handle in handles:
            handle.remove()


def capture_steps(step: Step, phase: str, marker: RangeMarker, label: str) -> list[dict]:
    """Runs the two captured steps of a phase, "<label> step 0" with every range and "<label> step
    1" with the phases'. Call `warm_up` first.

    Returns of each step when all was issued and when it was done, `issued_ms` and `done_ms` by the
    host's clock, and its `outcome`: mean and root mean square of the logits, or the loss.

    Raises AssertionError if marking changed the outcome, or if that is not finite.
    """
    kind, steps = step.device.kind, []
    for number in range(NUM_CAPTURED):
        if phase == "forward_backward":
            step.model.zero_grad()
        synchronize(kind)
        begin = time.perf_counter()
        with (
            marked(step, marker) if number == 0 else contextlib.nullcontext(),
            marker(f"{label} step {number}"),
        ):
            result = step.run_parts(phase, marker)
            issued = time.perf_counter()
            synchronize(kind)
            done = time.perf_counter()
        steps.append(
            {
                "issued_ms": 1e3 * (issued - begin),
                "done_ms": 1e3 * (done - begin),
                "outcome": _outcome(result),
            }
        )
        del result
    _check(steps[0]["outcome"], steps[1]["outcome"], phase)
    return steps


def warm_up(step: Step, phase: str) -> None:
    """Runs the phase's uncaptured steps, on memory that no earlier phase holds."""
    step.model.zero_grad()
    empty_cache(step.device)
    for _ in range(NUM_WARMUP):
        step.run_parts(phase, RangeMarker("none"))
        if phase == "forward_backward":
            step.model.zero_grad()


def _outcome(result: torch.Tensor) -> list[float]:
    values = result.float()
    if result.dim() == 0:
        return [float(values)]
    return [float(values.mean()), float(values.square().mean().sqrt())]


def _check(marked_outcome: list[float], outcome: list[float], phase: str) -> None:
    values = [*marked_outcome, *outcome]
    if not all(math.isfinite(value) for value in values):
        raise AssertionError(f"{phase}: the result is {values}")
    if phase == "train_step":  # its steps differ in their weights
        return
    bound = LARGEST_DIFFERENCE * max(abs(value) for value in values)
    for with_ranges, without in zip(marked_outcome, outcome, strict=True):
        if abs(with_ranges - without) > bound:
            raise AssertionError(
                f"{phase}: marking ranges changed the result from {without:g} to {with_ranges:g}"
            )


def run_step(
    marker: RangeMarker, size: str, context: str, precision: str, attention: str, phase: str
) -> None:
    """Runs the warm-up and the two captured steps of a case, "labkit step 0" and "labkit step
    1".
    """
    parameters = step_parameters(size, int(context), precision, attention=attention)
    with contextlib.closing(Step(detect(), parameters)) as step:
        warm_up(step, phase)
        capture_steps(step, phase, marker, "labkit")


def nsys_line(case: Sequence[str], output: Path) -> str:
    """Returns the command that makes the capture `output` by hand: of a case as `run_step` takes
    it.
    """
    program = ["python", "-m", "labkit.experiments.captured_step", *case]
    return shlex.join(
        ["nsys", "profile", *profiling.TRACED, *profiling.STACKS, f"--output={output}", *program]
    )


def keep_capture(case: Sequence[str], output: Path) -> Path:
    """Captures a case as `run_step` takes it by nsys, else by torch.profiler; returns the file.
    Raises as they do.
    """
    device = detect()
    nsys = Nsys.usable() if device.kind == "cuda" else None
    if nsys:
        path = output.with_name(f"{output.name}.nsys-rep")
        command = [sys.executable, "-m", __name__, *case]
        nsys.capture(command, timeout_s=600.0, keep=path, stacks=True)
    else:
        path = output.with_name(f"{output.name}.json")
        run = functools.partial(run_step, RangeMarker("kineto"), *case)
        profiling.capture_with_kineto(run, device.kind, keep=path, stacks=True)
    return path


if __name__ == "__main__":
    run_step(RangeMarker("nvtx" if torch.cuda.is_available() else "none"), *sys.argv[1:])
