"""Notebook 01: how long the phases of training take, warm-up, precision, compilation, distance to
the limit.

Sections: "ceilings" (matrix product and copy rates, measured anew each session), "timer" (the
timer's methods against one another and an independent measurement), "steps" (every phase, size,
context and precision, eager), "warmup" (every step from a fresh process), "compile"
(torch.compile), "execution" (a training step called, and replayed from one CUDA graph), "course"
(the model as a course writes it). Some training steps are also run back to back.
"""

import functools
import itertools
from collections.abc import Callable

import torch

from labkit.configs import (
    BENCHMARKING,
    COMPILE_MODES,
    COMPILE_PHASES,
    COURSE_PHASES,
    EXECUTION_PHASES,
    STEP_PHASES,
    WARMUP_PHASES,
)
from labkit.device import Device
from labkit.experiments.ceilings import (
    CEILINGS,
    ceiling_cases,
    copy_buffers,
    timed_call,
)
from labkit.experiments.sections import (
    Plan,
    rate_metrics,
    run_section,
    section,
    time_once_ms,
    timed,
)
from labkit.experiments.step import run_steps, step_parameters
from labkit.experiments.sweep import Case, Measured
from labkit.measure.timing import METHODS, Timing

MEASUREMENT_VERSION = 2
"""2: the timer's interval of the median has the 95 % it states; in version 1 it held at least 88 %.
"""

NUM_QUEUED = 30
"""Calls between two readings of the independent measurement."""


def cases(profile: str, device_kind: str) -> list[Case]:
    """Returns the cases of `profile`."""
    grid = BENCHMARKING[profile]
    plan = Plan(grid, ceiling_cases(grid.precisions, grid.case_timeout_s))
    plan.add("timer", {"kind": "negate"}, *METHODS[device_kind], "independent")

    def add(section: str, step: dict, phases: tuple[str, ...], keys=(), **options) -> None:
        """Plans a step, whose last phase is also sustained where `keys` have its size, context and
        precision.
        """
        if (step["size"], step["context"], step["precision"]) in keys:
            options["sustained"] = phases[-1:]
        plan.add(section, step, *phases, **options)

    for shape in itertools.product(grid.warmup_sizes, grid.warmup_contexts, ["fp32"]):
        for phase in WARMUP_PHASES:
            step = step_parameters(*shape)
            plan.add("warmup", step, phase, time_limit_s=5.0, fresh_process=True)
    for size, context, precision in itertools.product(grid.sizes, grid.contexts, grid.precisions):
        if context in grid.precision_contexts.get(precision, grid.contexts):
            step = step_parameters(size, context, precision)
            add("steps", step, STEP_PHASES, grid.sustained)
    compiled = (grid.compile_sizes, grid.compile_contexts, grid.compile_precisions)
    for *shape, mode in itertools.product(*compiled, COMPILE_MODES[1:]):
        if mode == "regional" or shape[0] in grid.whole_compile_sizes:
            step = step_parameters(*shape, compile=mode)
            add("compile", step, COMPILE_PHASES, grid.sustained, stop_at_failure=True)
    for shape in itertools.product(grid.course_sizes, grid.course_contexts, ["fp32"]):
        plan.add("course", step_parameters(*shape, attention="course"), *COURSE_PHASES)
    for way in grid.executions:
        impl = way["impl"]
        mode = way["compile"]
        is_fused = impl == "fused"
        attention = "auto" if is_fused else "eager"  # the fused model has ours
        shapes = (way.get("sizes", grid.execution_sizes), way["contexts"], way["precisions"])
        for shape in itertools.product(*shapes):
            step = step_parameters(*shape, compile=mode, attention=attention, impl=impl)
            compiles = is_fused or mode != "none"
            add("execution", step, EXECUTION_PHASES, grid.sustained_executions, compiles=compiles)
    return plan


def _measure_timer(device: Device, case: Case, method: str) -> Measured:
    """A kernel of known bytes by each method of the timer; "independent" shares no code with any of
    them.

    The kernel is no `copy_`: that becomes a memcpy node in a CUDA graph, which runs on another
    engine.
    """
    target, source = copy_buffers(device)
    target.fill_(float("nan"))
    negate = functools.partial(torch.neg, source, out=target)
    if method == "independent":
        times = timed(device, _time_independently, device, negate)
    else:
        times = timed_call(device, negate, method=method)
    if not torch.equal(target, -source):
        raise AssertionError("the timed kernel's result is wrong")
    rates = rate_metrics(device, {}, times.timing.median_ms, "fp32", num_bytes=2 * source.nbytes)
    return times.measured(rates, case.parameters, {"num_bytes": source.nbytes})


def _time_independently(device: Device, function: Callable) -> Timing:
    """Returns five times of a call, each the mean of NUM_QUEUED calls that are queued at once, by
    the host's clock.
    """

    def calls() -> None:
        for _ in range(NUM_QUEUED):
            function()

    calls()
    samples = tuple(time_once_ms(calls, device.kind) / NUM_QUEUED for _ in range(5))
    return Timing(samples, "independent", 1, "fixed count")


SECTIONS = {
    **CEILINGS,
    "timer": section(_measure_timer),
    **dict.fromkeys(("steps", "warmup", "compile", "execution", "course"), run_steps),
}

run_case = functools.partial(run_section, SECTIONS)
