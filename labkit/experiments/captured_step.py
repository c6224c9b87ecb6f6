"""A step as it is captured: once with ranges around the parts of the model, once with the phases'
ranges alone.

As a program it runs the steps of cases: `python -m labkit.experiments.captured_step SIZE CONTEXT
PRECISION ATTENTION PHASE …`. The capture itself says what became of each, by the names of ranges:
"step 0 SIZE …" and "step 1 SIZE …" as read back from the live objects; "oom SIZE …" for one that
does not fit, after which the others are run; "error SIZE …" for another failure, which ends the
program. The reason stands behind the words of the last two.
"""

import contextlib
import functools
import gc
import itertools
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import record_function

from labkit.device import Device, detect
from labkit.experiments.sections import empty_cache
from labkit.experiments.step import Marker, Step, step_parameters
from labkit.experiments.sweep import failure, first_line
from labkit.measure import profiling
from labkit.measure.profiling import Nsys, Trace
from labkit.measure.timing import collector_paused, synchronize
from labkit.models import transformer


@contextlib.contextmanager
def marked(step: Step, marker: Marker) -> Iterator[None]:
    """Marks in this context the blocks, the parts of model and blocks by their names, and of
    attention the "core" between its projections.
    """
    model = step.model
    stack = contextlib.ExitStack()
    # Of all threads: while autograd's runs a backward pass, the one that called it waits.
    ranges = []

    def enter(name: str) -> None:
        ranges.append(marker(name))
        ranges[-1].__enter__()

    def leave(*_) -> None:
        ranges.pop().__exit__(None, None, None)

    def mark(module: torch.nn.Module, name: str) -> None:
        stack.enter_context(module.register_forward_pre_hook(lambda *_: enter(name)))
        stack.enter_context(module.register_forward_hook(leave, always_call=True))

    def attention(*tensors: torch.Tensor, causal: bool) -> torch.Tensor:
        with marker("core"):
            return original(*tensors, causal=causal)

    # Wrapped under the name by which the model finds it: the same functions compute.
    impl = model.blocks[0].attention.attention
    original = transformer.ATTENTION[impl]
    with stack:
        stack.callback(transformer.ATTENTION.update, {impl: original})
        transformer.ATTENTION[impl] = attention
        for number, block in enumerate(model.blocks):
            name = f"block {number}"
            mark(block, name)
            before = block.register_full_backward_pre_hook(lambda *_, name=name: enter(name))
            stack.enter_context(before)
            stack.enter_context(block.register_full_backward_hook(leave))
        for module in (model, *model.blocks):
            for name, part in module.named_children():
                mark(part, name)
        yield


def capture_steps(step: Step, phase: str, marker: Marker) -> None:
    """Runs a phase unmarked, on memory that no earlier phase holds, and then the two steps to be
    captured, "step 0 …" with every range and "step 1 …" with the phases'.

    Raises AssertionError for a result that is not finite.
    """
    kind = step.device.kind
    label = " ".join(words_of(step.described(), phase))
    step.model.zero_grad()
    empty_cache()
    step.run(phase)
    for number, marks in enumerate((marked(step, marker), contextlib.nullcontext())):
        if phase == "forward_backward":
            step.model.zero_grad()
        synchronize(kind)
        with collector_paused(), marks, marker(f"step {number} {label}"):
            values = step.run(phase, marker)
            synchronize(kind)
        if not values.isfinite().all():
            raise AssertionError(f"step {number} {label}: the result is not finite")
        del values  # before the next step is captured


def run_cases(device: Device, cases: Sequence[Sequence[str]], marker: Marker) -> None:
    """Runs the captured steps of each case, (size, context, precision, attention, phase)."""
    for *shape, phase in cases:
        with contextlib.closing(Step(device, parameters_of(*shape))) as step:
            capture_steps(step, phase, marker)


def words_of(parameters: dict, phase: str) -> tuple[str, ...]:
    """Returns the words that name a step."""
    names = ("size", "context", "precision", "attention")
    return (*(str(parameters[name]) for name in names), phase)


def parameters_of(size: str, context: str, precision: str, attention: str) -> dict:
    """Returns the parameters of a step that is named by these words."""
    return step_parameters(size, int(context), precision, attention=attention)


def nsys_line(case: Sequence[str], output: Path) -> str:
    """Returns the command that makes the capture `output` of a case by hand."""
    program = ["python", "-m", "labkit.experiments.captured_step", *case]
    return shlex.join(
        ["nsys", "profile", *profiling.TRACED, *profiling.STACKS, f"--output={output}", *program]
    )


def nsys_on(device: Device) -> Nsys | None:
    """Returns what captures a step on a GPU; None where torch.profiler does."""
    return Nsys.usable() if device.kind == "cuda" else None


def capture(
    nsys: Nsys | None, device: Device, cases: Sequence[Sequence[str]], **options: Any
) -> Trace:
    """Captures cases by nsys in a process of its own, without nsys by torch.profiler in this one.

    Args:
        options: `keep`, as both take it; `timeout_s` of nsys.
    """
    if nsys:
        command = [sys.executable, "-m", __name__, *itertools.chain.from_iterable(cases)]
        return nsys.capture(command, **options)
    run = functools.partial(run_cases, device, cases, record_function)
    options.pop("timeout_s", None)
    return profiling.capture_with_kineto(run, device.kind, **options)


def keep_capture(case: Sequence[str], output: Path) -> Path:
    """Captures a case by nsys, else by torch.profiler; returns the file.

    Raises as they do, and RuntimeError for a step that failed under nsys.
    """
    device = detect()
    nsys = nsys_on(device)
    path = Path(f"{output}.{'nsys-rep' if nsys else 'json'}")
    trace = capture(nsys, device, [case], timeout_s=600.0, keep=path)
    for words, (status, reason) in failures(trace).items():
        raise RuntimeError(f"{status} {' '.join(words)} {reason}; {path} holds what came before")
    return path


def failures(trace: Trace) -> dict[tuple[str, ...], tuple[str, str]]:
    """Returns status and reason of the captured steps that failed, by their words."""
    found = {}
    for name in trace.ranges["name"]:
        if name.startswith(("oom ", "error ")):
            status, *words, reason = name.split(maxsplit=6)
            found[tuple(words)] = status, reason
    return found


def main(words: Sequence[str]) -> None:
    """Runs the cases that the words name, five each; a range names one that failed."""
    device = detect()
    marker = torch.cuda.nvtx.range if device.kind == "cuda" else record_function
    gc.freeze()  # otherwise each collection would walk through all modules
    try:
        for first in range(0, len(words), 5):
            case = words[first : first + 5]
            try:
                run_cases(device, [case], marker)
            except Exception as error:
                status, reason = failure(error)
                with marker(f"{status} {' '.join(case)} {first_line(reason)}"):
                    if status != "oom":
                        raise
            empty_cache()  # not above: the error holds the step's tensors
    finally:
        gc.unfreeze()  # or its modules are reported as leaks when the process ends


if __name__ == "__main__":
    main(sys.argv[1:])
