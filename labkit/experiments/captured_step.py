"""A step as it is captured: once with ranges around the parts of the model, once with the phases'
ranges alone.

As a program it runs the steps of cases: `python -m labkit.experiments.captured_step SIZE CONTEXT
PRECISION ATTENTION PHASE …`, with a file after them in which it writes what became of each.
"""

import contextlib
import functools
import gc
import itertools
import json
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from labkit.device import Device, detect
from labkit.experiments.sections import empty_cache, freeze_modules
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


@contextlib.contextmanager
def marked(step: Step, marker: RangeMarker) -> Iterator[None]:
    """Marks in this context the blocks, the parts of model and blocks by their names, and of
    attention the "core" between its projections.
    """
    model = step.model
    handles = []

    def mark(module: torch.nn.Module, name: str) -> None:
        handles.append(module.register_forward_pre_hook(lambda *_: marker.open(name)))
        handles.append(module.register_forward_hook(lambda *_: marker.close(), always_call=True))

    def attention(*tensors: torch.Tensor, causal: bool) -> torch.Tensor:
        with marker("core"):
            return original(*tensors, causal=causal)

    for number, block in enumerate(model.blocks):
        name = f"block {number}"
        mark(block, name)
        opening = block.register_full_backward_pre_hook(lambda *_, name=name: marker.open(name))
        handles += [opening, block.register_full_backward_hook(lambda *_: marker.close())]
    for module in (model, *model.blocks):
        for name, part in module.named_children():
            mark(part, name)
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
    """Runs a phase unmarked, on memory that no earlier phase holds, and then the two steps to be
    captured, "<label> step 0" with every range and "<label> step 1" with the phases'.

    Returns of each captured step when all was issued and when it was done, `issued_ms` and
    `done_ms` by the host's clock.

    Raises AssertionError if marking changed the result, or if that is not finite.
    """
    kind = step.device.kind
    step.model.zero_grad()
    empty_cache(step.device)
    for _ in range(NUM_WARMUP):
        step.run(phase)
    steps = []
    outcomes = []
    for number in range(NUM_CAPTURED):
        if phase == "forward_backward":
            step.model.zero_grad()
        synchronize(kind)
        begin = time.perf_counter()
        with (
            marked(step, marker) if number == 0 else contextlib.nullcontext(),
            marker(f"{label} step {number}"),
        ):
            result = step.run(phase, marker)
            issued = time.perf_counter()
            synchronize(kind)
            done = time.perf_counter()
        steps.append({"issued_ms": 1e3 * (issued - begin), "done_ms": 1e3 * (done - begin)})
        values = result.float()
        outcomes.append(torch.stack([values.mean(), values.square().mean().sqrt()]))
        del result, values
    with_ranges, without = outcomes
    if not torch.isfinite(with_ranges + without).all():
        raise AssertionError(f"{phase}: the result is {with_ranges.tolist()}, {without.tolist()}")
    is_changed = (with_ranges - without).abs().max() > LARGEST_DIFFERENCE * without.abs().max()
    if is_changed and phase != "train_step":  # whose steps differ in their weights
        raise AssertionError(
            f"{phase}: marking ranges changed the result from {without.tolist()} to "
            f"{with_ranges.tolist()}"
        )
    return steps


def run_cases(
    device: Device, cases: Sequence[Sequence[str]], marker: RangeMarker
) -> Iterator[dict]:
    """Yields of each case, (size, context, precision, attention, phase), what it was as read back
    from the live objects, and its captured steps, "case <number> step <0 or 1>".
    """
    numbers = itertools.count()
    for shape, same in itertools.groupby(cases, key=lambda case: case[:-1]):
        with contextlib.closing(Step(device, parameters_of(*shape))) as step:
            for *_, phase in same:
                steps = capture_steps(step, phase, marker, f"case {next(numbers)}")
                yield {"case": step.described(), "observed": step.observed(), "steps": steps}


def parameters_of(size: str, context: str, precision: str, attention: str) -> dict:
    """Returns the parameters of a step that is named by these words."""
    impl = "course" if attention == "course" else "eager"
    return step_parameters(size, int(context), precision, attention=attention, impl=impl)


def nsys_line(case: Sequence[str], output: Path) -> str:
    """Returns the command that makes the capture `output` of a case by hand."""
    program = ["python", "-m", "labkit.experiments.captured_step", *case]
    return shlex.join(
        ["nsys", "profile", *profiling.TRACED, *profiling.STACKS, f"--output={output}", *program]
    )


def keep_capture(case: Sequence[str], output: Path) -> Path:
    """Captures a case by nsys, else by torch.profiler; returns the file. Raises as they do."""
    device = detect()
    nsys = Nsys.usable() if device.kind == "cuda" else None
    if nsys:
        path = output.with_name(f"{output.name}.nsys-rep")
        command = [sys.executable, "-m", __name__, *case]
        nsys.capture(command, timeout_s=600.0, keep=path, stacks=True)
        return path
    path = output.with_name(f"{output.name}.json")
    run = functools.partial(list, run_cases(device, [case], RangeMarker("kineto")))
    profiling.capture_with_kineto(run, device.kind, keep=path, stacks=True)
    return path


def main(words: Sequence[str]) -> None:
    """Runs the cases; with a file, writes an answer for each and ends after the first failure."""
    device = detect()
    marker = RangeMarker("nvtx" if device.kind == "cuda" else "none")
    cases = [words[first : first + 5] for first in range(0, len(words) - 4, 5)]
    if len(words) == 5 * len(cases):
        list(run_cases(device, cases, marker))
        return
    freeze_modules()
    with open(words[-1], "a", encoding="utf-8") as file:
        try:
            for answer in run_cases(device, cases, marker):
                print(json.dumps(answer), file=file, flush=True)
        except Exception as error:
            is_oom = isinstance(error, torch.OutOfMemoryError)
            reason = f"{error}".split("\n")[0][:500]
            print(json.dumps({"failure": reason, "is_oom": is_oom}), file=file)
    gc.unfreeze()  # or its modules are reported as leaks when the process ends


if __name__ == "__main__":
    main(sys.argv[1:])
