"""Notebook 01: how long the phases of training take, warm-up, precision, compilation, distance to
the limit.

Sections: "ceilings" (matrix product and copy rates, measured anew each session), "timer" (the
timer's methods against one another and an independent measurement), "steps" (every phase, size,
context and precision, eager), "warmup" (every step from a fresh process), "compile"
(torch.compile), "execution" (a training step called, and replayed from one CUDA graph), "course"
(the model as a course writes it). Some training steps are also run back to back.
"""

import contextlib
import functools
import itertools
import time
from collections.abc import Callable, Iterator, Sequence

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
    ceiling_rates,
    copy_buffers,
    copy_rate,
    timed_call,
)
from labkit.experiments.graphed_step import capture_step
from labkit.experiments.sections import run_section, section, timed, timed_with_peak
from labkit.experiments.step import (
    Step,
    course_parameters,
    run_steps,
    step_parameters,
    step_rates,
)
from labkit.experiments.sweep import Case, Measured, PhaseRun, Skip
from labkit.measure.timing import Timing, synchronize, time_callable

__all__ = ["MEASUREMENT_VERSION", "cases", "ceiling_rates", "run_case"]

MEASUREMENT_VERSION = 2
"""2: the timer's interval of the median has the 95 % it states; in version 1 it held at least 88 %.
"""


def cases(
    profile: str, device_kind: str, *, sizes: Sequence[str] = (), contexts: Sequence[int] = ()
) -> list[Case]:
    """Returns the cases of `profile`, narrowed to values of its grid where asked."""
    grid = BENCHMARKING[profile]
    wanted_sizes = sizes or grid.sizes
    wanted_contexts = contexts or grid.contexts
    limit = grid.case_timeout_s
    limits = (limit, grid.time_limit_s)

    def shapes(sizes: Sequence[str], contexts: Sequence[int]) -> list[tuple[str, int]]:
        shapes = itertools.product(sizes, contexts)
        return [(s, c) for s, c in shapes if s in wanted_sizes and c in wanted_contexts]

    def lasting(step: dict, phase: str, sustained: Sequence[tuple]) -> tuple[str, ...]:
        key = (step["size"], step["context"], step["precision"])
        return (phase,) if key in sustained else ()

    methods = ("window", "graph", "flush") if device_kind == "cuda" else ("host",)
    planned = [
        *ceiling_cases(grid.precisions, limit),
        Case("timer", {"kind": "negate"}, (*methods, "independent"), limit),
    ]
    for shape in shapes(grid.warmup_sizes, grid.warmup_contexts):
        for phase in WARMUP_PHASES:
            step = step_parameters(*shape, "fp32")
            planned.append(Case("warmup", step, (phase,), limit, fresh_process=True))
    for size, context in shapes(grid.sizes, grid.contexts):
        for precision in grid.precisions:
            if context in grid.precision_contexts.get(precision, grid.contexts):
                step = step_parameters(size, context, precision)
                sustained = lasting(step, "train_step", grid.sustained)
                planned.append(Case("steps", step, STEP_PHASES, *limits, sustained=sustained))
    for size, context in shapes(grid.compile_sizes, grid.compile_contexts):
        for precision, mode in itertools.product(grid.compile_precisions, COMPILE_MODES[1:]):
            if mode == "regional" or size in grid.whole_compile_sizes:
                step = step_parameters(size, context, precision, compile=mode)
                sustained = lasting(step, "train_step", grid.sustained)
                options = {"stop_at_failure": True, "sustained": sustained}
                planned.append(Case("compile", step, COMPILE_PHASES, *limits, **options))
    for shape in shapes(grid.course_sizes, grid.course_contexts):
        planned.append(Case("course", course_parameters(*shape, "fp32"), COURSE_PHASES, *limits))
    for way in grid.executions:
        way_options = {
            "compile": way.compile,
            "attention": "auto" if way.impl == "fused" else "eager",  # the fused model has ours
            "impl": way.impl,
        }
        for size, context in shapes(way.sizes or grid.execution_sizes, way.contexts):
            for precision in way.precisions:
                step = step_parameters(size, context, precision, **way_options)
                sustained = lasting(step, "graph_step", grid.sustained_executions)
                planned.append(
                    Case("execution", step, EXECUTION_PHASES, *limits, sustained=sustained)
                )
    return planned


def run_executions(device: Device, case: Case, ceilings: dict[str, float]) -> Iterator[PhaseRun]:
    """Yields the training step as it is called, and as one CUDA graph that must train as the called
    one does.
    """
    with contextlib.closing(Step(device, case.parameters, capturable=True)) as step:
        for phase in case.phases:
            yield phase, functools.partial(_measure_execution, step, case, phase, ceilings)


def _measure_execution(step: Step, case: Case, phase: str, ceilings: dict[str, float]) -> Measured:
    device, function, graph_metrics = step.device, step.train_step, {}
    if phase == "graph_step":
        require_graphs(device)
        function, graph_metrics = capture_step(step)
    limits = {"device_kind": device.kind, "num_warmup": 2, "time_limit_s": case.time_limit_s}
    times, metrics = timed_with_peak(device, time_callable, function, **limits)
    metrics |= graph_metrics
    metrics |= step_rates(device, case, phase, function, times, ceilings)
    return times.measured(metrics, step.described(), step.observed(), keep="step_ms")


def require_graphs(device: Device) -> None:
    """Raises Skip where there are no CUDA graphs."""
    if device.kind != "cuda":
        raise Skip(f"{device.name} has no CUDA graphs")


def _measure_timer(device: Device, case: Case, method: str) -> Measured:
    """A kernel of known bytes by each method of the timer; "independent" shares no code with any of
    them.

    The kernel is no `copy_`: that becomes a memcpy node in a CUDA graph, which runs on another
    engine.
    """
    target, source = copy_buffers(device)
    target.fill_(float("nan"))
    negate = functools.partial(torch.neg, out=target)
    if method == "independent":
        call = functools.partial(_time_queued_calls, device, negate, source, num_calls=30)
        times = timed(
            device, lambda: Timing(tuple(call() for _ in range(5)), "independent", 1, "fixed count")
        )
    else:
        times = timed_call(device, negate, source, method=method)
    if not torch.equal(target, -source):
        raise AssertionError("the timed kernel's result is wrong")
    rate = copy_rate(device, source, times.timing.median_ms)
    return times.measured(rate, {"kind": "negate"}, {"num_bytes": source.nbytes})


def _time_queued_calls(
    device: Device, function: Callable, source: torch.Tensor, num_calls: int
) -> float:
    """Returns the time (ms) of one of so many calls that are queued between two events, or readings
    of the clock.
    """
    function(source)
    synchronize(device.kind)
    if device.kind == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
    begin = time.perf_counter()
    for _ in range(num_calls):
        function(source)
    if device.kind == "cuda":
        end.record()
    synchronize(device.kind)
    elapsed_ms = (
        start.elapsed_time(end) if device.kind == "cuda" else (time.perf_counter() - begin) * 1e3
    )
    return elapsed_ms / num_calls


SECTIONS = {
    **CEILINGS,
    "timer": section(_measure_timer),
    "steps": run_steps,
    "warmup": run_steps,
    "compile": run_steps,
    "execution": run_executions,
    "course": run_steps,
}

run_case = functools.partial(run_section, SECTIONS)
