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
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from labkit import accounting
from labkit.configs import (
    BENCHMARKING,
    COMPILE_MODES,
    COMPILE_PHASES,
    COURSE_PHASES,
    EXECUTION_PHASES,
    STEP_PHASES,
    WARMUP_COUNTS,
    WARMUP_MEASURED_STEPS,
    WARMUP_PHASES,
    model_config,
    narrowed,
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
from labkit.experiments.graphed_step import ATTENTION, GraphedWorkload, require_graphs
from labkit.experiments.recipes import require_recipe
from labkit.experiments.sections import (
    KEPT_SAMPLES,
    fractions,
    run_section,
    section,
    sustained_metrics,
    time_once_ms,
    timed,
    timed_with_peak,
)
from labkit.experiments.sweep import Case, Measured, PhaseRun
from labkit.experiments.workload import (
    Workload,
    course_parameters,
    load_compiler,
    step_parameters,
    workload,
)
from labkit.measure.timing import Timing, synchronize, time_callable

__all__ = ["MEASUREMENT_VERSION", "cases", "ceiling_rates", "run_case", "run_steps"]

MEASUREMENT_VERSION = 2
"""2: the timer's interval of the median has the 95 % it states; in version 1 it held at least 88 %.
"""


def cases(
    profile: str, device_kind: str, *, sizes: Sequence[str] = (), contexts: Sequence[int] = ()
) -> list[Case]:
    """Returns the cases of `profile`, narrowed where asked; ValueError for a value that it does not
    have.
    """
    grid = BENCHMARKING[profile]
    wanted_sizes = narrowed(BENCHMARKING, profile, "sizes", sizes)
    wanted_contexts = narrowed(BENCHMARKING, profile, "contexts", contexts)
    limit, time_limit = grid.case_timeout_s, grid.time_limit_s
    methods = ("window", "graph", "flush") if device_kind == "cuda" else ("host",)
    warmup = [
        Case("warmup", step_parameters(size, context, "fp32"), (phase,), limit, fresh_process=True)
        for size in grid.warmup_sizes
        if size in wanted_sizes
        for context in grid.warmup_contexts
        if context in wanted_contexts
        for phase in WARMUP_PHASES
    ]
    eager = [
        step_parameters(size, context, precision)
        for size, context, precision in itertools.product(
            wanted_sizes, wanted_contexts, grid.precisions
        )
        if context in grid.precision_contexts.get(precision, wanted_contexts)
    ]
    compiled = [
        step_parameters(size, context, precision, compile=mode)
        for size in grid.compile_sizes
        if size in wanted_sizes
        for context in grid.compile_contexts
        if context in wanted_contexts
        for precision in grid.compile_precisions
        for mode in COMPILE_MODES[1:]
        if mode == "regional" or size in grid.whole_compile_sizes
    ]

    executions = [
        step_parameters(*step, compile=way.compile, attention=ATTENTION[way.impl], impl=way.impl)
        for way in grid.executions
        for step in itertools.product(
            way.sizes or grid.execution_sizes, way.contexts, way.precisions
        )
        if step[0] in wanted_sizes and step[1] in wanted_contexts
    ]

    def lasting(step: dict) -> tuple[str, ...]:
        return (
            ("train_step",)
            if (step["size"], step["context"], step["precision"]) in grid.sustained
            else ()
        )

    def replayed(step: dict) -> tuple[str, ...]:
        is_lasting = (step["size"], step["context"], step["precision"]) in grid.sustained_executions
        return ("graph_step",) if is_lasting else ()

    return [
        *ceiling_cases(grid.precisions, limit),
        Case("timer", {"kind": "negate"}, (*methods, "independent"), limit),
        *warmup,
        *(
            Case("steps", each, STEP_PHASES, limit, time_limit, sustained=lasting(each))
            for each in eager
        ),
        *(
            Case(
                "compile",
                each,
                COMPILE_PHASES,
                limit,
                time_limit,
                stop_at_failure=True,
                sustained=lasting(each),
            )
            for each in compiled
        ),
        *(
            Case(
                "course", course_parameters(size, context, "fp32"), COURSE_PHASES, limit, time_limit
            )
            for size, context in itertools.product(grid.course_sizes, grid.course_contexts)
            if size in wanted_sizes and context in wanted_contexts
        ),
        *(
            Case("execution", each, EXECUTION_PHASES, limit, time_limit, sustained=replayed(each))
            for each in executions
        ),
    ]


def run_steps(device: Device, case: Case, ceilings: dict[str, float]) -> Iterator[PhaseRun]:
    """Yields each phase of a training step with the function that measures it."""
    with workload(device, case) as live:
        for phase in case.phases:
            yield phase, functools.partial(_measure_phase, live, case, phase, ceilings)


def _measure_phase(
    workload: Workload, case: Case, phase: str, ceilings: dict[str, float]
) -> Measured:
    device = workload.device
    limits: dict = {"time_limit_s": case.time_limit_s}
    if case.section == "warmup":
        num_steps = max(WARMUP_COUNTS) + WARMUP_MEASURED_STEPS
        limits = {
            "num_warmup": 0,
            "min_samples": num_steps,
            "max_samples": num_steps,
            "time_limit_s": 5.0,
        }
    workload.model.zero_grad()
    if phase == "compile":
        found, metrics = timed_with_peak(device, _time_first_call, workload)
    else:
        found, metrics = timed_with_peak(device, workload.time_phase, phase, **limits)
        metrics |= _efficiency(workload, case, phase, found.timing, ceilings)
    if phase in case.sustained:
        ceiling = ceilings.get(f"sustained gemm {case.parameters['precision']}")
        step, flops = getattr(workload, phase), metrics["flops"]
        metrics |= sustained_metrics(device, found, step, flops=flops, ceiling=ceiling)
    samples = {}
    if case.section == "warmup" or found.timing.n <= KEPT_SAMPLES:
        samples["step_ms"] = list(found.timing.samples_ms)
        if found.timing.launch_ms:
            samples["host_ms"] = list(found.timing.host_ms)
    return found.measured(metrics, workload.described(), workload.observed(), samples)


def run_executions(device: Device, case: Case, ceilings: dict[str, float]) -> Iterator[PhaseRun]:
    """Yields the training step as it is called, and as one CUDA graph that must train as the called
    one does.
    """
    require_recipe(device, case.parameters["precision"], is_timed=True)
    with workload(device, case, GraphedWorkload) as live:
        for phase in case.phases:
            yield phase, functools.partial(_measure_execution, live, case, phase, ceilings)


def _measure_execution(
    live: GraphedWorkload, case: Case, phase: str, ceilings: dict[str, float]
) -> Measured:
    device, step, metrics = live.device, live.train_step, {}
    if phase == "graph_step":
        require_graphs(device)
        step, metrics = live.graph()
    limits = {"device_kind": device.kind, "num_warmup": 2, "time_limit_s": case.time_limit_s}
    found, peak = timed_with_peak(device, time_callable, step, **limits)
    metrics = {**peak, **metrics, **_efficiency(live, case, "train_step", found.timing, ceilings)}
    if phase in case.sustained:
        ceiling = ceilings.get(f"sustained gemm {numeric_format(case)}")
        metrics |= sustained_metrics(device, found, step, flops=metrics["flops"], ceiling=ceiling)
    return found.measured(metrics, live.described(), live.observed(), keep="step_ms")


def numeric_format(case: Case) -> str:
    """Returns the precision of the case's matrix products: bf16 for parameters in bf16 too."""
    return case.parameters["precision"].removesuffix("_pure")


def _time_first_call(workload: Workload) -> Timing:
    """Returns the time of the first forward and backward, which compiles both; no cache of an
    earlier run counts.
    """
    load_compiler(workload.device)
    torch.compiler.config.force_disable_caches = True
    return Timing(
        (time_once_ms(workload.forward_backward, workload.device.kind),), "host", 0, "fixed count"
    )


def _efficiency(
    workload: Workload, case: Case, phase: str, timing: Timing, ceilings: dict[str, float]
) -> dict:
    """Returns rates of a phase and their fractions of the session's ceilings and of the datasheet's
    peaks.
    """
    parameters = case.parameters
    config = model_config(parameters["size"])
    batch, context, precision = parameters["batch"], parameters["context"], numeric_format(case)
    seconds = timing.median_ms * 1e-3
    peaks = workload.device.peaks
    if phase == "optimizer_step":
        rate = accounting.optimizer_step_bytes(config) / seconds / 1e9
        ceiling, peak = ceilings.get("copy"), peaks.memory_gb_per_s if peaks else None
        result: dict = {"achieved_gb_per_s": rate}
    else:
        flops = accounting.phase_flops(config, batch, context, phase, causal=False)
        rate = flops / seconds / 1e12
        ceiling, peak = (
            ceilings.get(f"gemm {precision}"),
            peaks.tflops(precision) if peaks else None,
        )
        result = {
            "flops": flops,
            "flops_causal": accounting.phase_flops(config, batch, context, phase, causal=True),
            "achieved_tflops": rate,
            "tokens_per_s": batch * context / seconds,
        }
    return result | fractions(rate, ceiling, peak)


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
        found = timed(
            device, lambda: Timing(tuple(call() for _ in range(5)), "independent", 1, "fixed count")
        )
    else:
        found = timed_call(device, negate, source, method=method)
    if not torch.equal(target, -source):
        raise AssertionError("the timed kernel's result is wrong")
    rate = copy_rate(device, source, found.timing.median_ms)
    return found.measured(rate, {"kind": "negate"}, {"num_bytes": source.nbytes})


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
