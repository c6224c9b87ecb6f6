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
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.overrides import TorchFunctionMode

from labkit.device import detect
from labkit.experiments.sections import empty_cache
from labkit.experiments.workload import Workload, step_parameters
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
        self.marker, self.after_softmax = marker, False

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = func.__name__
        if name in _LAUNCHES_NOTHING:
            return func(*args, **(kwargs or {}))
        parts = _PARTS | _AFTER_SOFTMAX if self.after_softmax else _PARTS
        part = parts.get(name, "mask")
        self.after_softmax |= part == "softmax"
        with self.marker(part):
            return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def marked(workload: Workload, marker: RangeMarker) -> Iterator[None]:
    """Marks blocks, norms, attention and its parts, feed-forward, embedding and head in this
    context.
    """
    model, handles = workload.model, []

    def around(module: torch.nn.Module, name: str) -> None:
        handles.append(module.register_forward_pre_hook(lambda *_: marker.open(name)))
        handles.append(module.register_forward_hook(lambda *_: marker.close(), always_call=True))

    def attention(*tensors: torch.Tensor, causal: bool) -> torch.Tensor:
        parts = _AttentionParts(marker) if impl in ("eager", "course") else contextlib.nullcontext()
        with marker("core"), parts:
            return original(*tensors, causal=causal)

    for number, block in enumerate(model.blocks):
        around(block, name := f"block {number}")
        handles.append(
            block.register_full_backward_pre_hook(lambda *_, name=name: marker.open(name))
        )
        handles.append(block.register_full_backward_hook(lambda *_: marker.close()))
        around(block.attention, "attention")
        around(block.feed_forward, "feed-forward")
        around(block.attention_norm, "norm")
        around(block.feed_forward_norm, "norm")
    around(model.embedding, "embedding")
    around(model.norm, "norm")
    around(model.head, "head")
    # Wrapped under the name by which the model finds it: the same functions compute.
    impl = model.blocks[0].attention.attention
    original, transformer.ATTENTION[impl] = transformer.ATTENTION[impl], attention
    try:
        yield
    finally:
        transformer.ATTENTION[impl] = original
        for handle in handles:
            handle.remove()


@dataclass(frozen=True)
class Step:
    """What the host saw of one captured step: when all was issued and done (its clock), and what
    came out.

    `outcome`: mean and root mean square of the logits, or the loss.
    """

    issued_ms: float
    done_ms: float
    outcome: list[float]


def _run(workload: Workload, phase: str, marker: RangeMarker) -> torch.Tensor:
    """Runs one step with its phases marked; returns the logits of inference, the loss of any other
    step.
    """
    if phase == "inference":
        with marker("inference"), torch.no_grad(), workload.autocast():
            return workload.model(workload.tokens)
    if phase == "train_step":
        workload.optimizer.zero_grad()
    with marker("forward"):
        loss = workload.forward()
    with marker("backward"):
        loss.backward()
    if phase == "train_step":
        with marker("optimizer"):
            workload.optimizer.step()
    return loss.detach()


def capture_steps(workload: Workload, phase: str, marker: RangeMarker, label: str) -> list[Step]:
    """Runs the two captured steps of a phase, "<label> step 0" with every range and "<label> step
    1" with the phases'.

    Call `warm_up` first. Raises AssertionError if marking changed the output, or if that is not
    finite.
    """
    kind, steps = workload.device.kind, []
    for number in range(NUM_CAPTURED):
        if phase == "forward_backward":
            workload.model.zero_grad()
        synchronize(kind)
        begin = time.perf_counter()
        with (
            marked(workload, marker) if number == 0 else contextlib.nullcontext(),
            marker(f"{label} step {number}"),
        ):
            result = _run(workload, phase, marker)
            issued = time.perf_counter()
            synchronize(kind)
            done = time.perf_counter()
        steps.append(Step(1e3 * (issued - begin), 1e3 * (done - begin), _summary(result)))
        del result
    _check(steps, phase)
    return steps


def warm_up(workload: Workload, phase: str) -> None:
    """Runs the phase's uncaptured steps, on memory that no earlier phase holds."""
    workload.model.zero_grad()
    empty_cache(workload.device)
    for _ in range(NUM_WARMUP):
        _run(workload, phase, RangeMarker("none"))
        if phase == "forward_backward":
            workload.model.zero_grad()


def _summary(result: torch.Tensor) -> list[float]:
    values = result.float()
    return (
        [float(values.mean()), float(values.square().mean().sqrt())]
        if result.dim()
        else [float(result)]
    )


def _check(steps: Sequence[Step], phase: str) -> None:
    values = [value for step in steps for value in step.outcome]
    if not all(math.isfinite(value) for value in values):
        raise AssertionError(f"{phase}: the result is {values}")
    bound = LARGEST_DIFFERENCE * max(abs(value) for value in values)
    for with_ranges, without in zip(steps[0].outcome, steps[1].outcome, strict=True):
        if (
            phase != "train_step" and abs(with_ranges - without) > bound
        ):  # whose steps differ in their weights
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
    with contextlib.closing(Workload(detect(), parameters)) as workload:
        warm_up(workload, phase)
        capture_steps(workload, phase, marker, "labkit")


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
    kept = {
        "keep": output.with_name(output.name + (".nsys-rep" if nsys else ".json")),
        "stacks": True,
    }
    if nsys:
        nsys.capture([sys.executable, "-m", __name__, *case], timeout_s=600.0, **kept)
    else:
        profiling.capture_with_kineto(
            functools.partial(run_step, RangeMarker("kineto"), *case), device.kind, **kept
        )
    return kept["keep"]


if __name__ == "__main__":
    run_step(RangeMarker("nvtx" if torch.cuda.is_available() else "none"), *sys.argv[1:])
