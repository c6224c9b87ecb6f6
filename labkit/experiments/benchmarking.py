"""Notebook 01: how long the phases of training take, warm-up, precision, compilation, distance to
the limit.

Sections: "ceilings" (matrix product and copy rates, measured anew each session), "steps" (every
phase, size, context and precision, eager), "warmup" (every step from a fresh process), "compile"
(torch.compile), "execution" (a training step called, and replayed from one CUDA graph). Some
training steps are also run back to back.
"""

import functools
import itertools

from labkit.configs import (
    COMPILE_MODES,
    COMPILE_PHASES,
    EXECUTION_PHASES,
    GRIDS,
    STEP_PHASES,
    WARMUP_PHASES,
)
from labkit.experiments.sections import Plan, run_section
from labkit.experiments.step import run_steps, step_parameters
from labkit.experiments.sweep import Case

MEASUREMENT_VERSION = 2
"""2: the timer's interval of the median has the 95 % it states; in version 1 it held at least 88 %.
"""


def cases(profile: str, device_kind: str) -> list[Case]:
    """Returns the cases of `profile`."""
    grid = GRIDS["01_benchmarking"][profile]
    plan = Plan(grid, grid.precisions)
    for shape in itertools.product(grid.warmup_sizes, grid.warmup_contexts, ["fp32"]):
        for phase in WARMUP_PHASES:
            step = step_parameters(*shape)
            plan.add("warmup", step, phase, time_limit_s=5.0, fresh_process=True)
    for shape in itertools.product(grid.sizes, grid.contexts, grid.precisions):
        _, context, precision = shape
        if context in grid.precision_contexts.get(precision, grid.contexts):
            sustained = ("train_step",) if shape in grid.sustained else ()
            plan.add("steps", step_parameters(*shape), *STEP_PHASES, sustained=sustained)
    for shape in itertools.product(
        grid.compile_sizes, grid.compile_contexts, grid.compile_precisions
    ):
        sustained = ("train_step",) if shape in grid.sustained else ()
        for mode in COMPILE_MODES[1:]:
            if mode == "regional" or shape[0] in grid.whole_compile_sizes:
                plan.add(
                    "compile",
                    step_parameters(*shape, compile=mode),
                    *COMPILE_PHASES,
                    sustained=sustained,
                    stop_at_failure=True,
                )
    for way in grid.executions:
        impl = way["impl"]
        mode = way["compile"]
        shapes = (way.get("sizes", grid.execution_sizes), way["contexts"], way["precisions"])
        for shape in itertools.product(*shapes):
            step = step_parameters(*shape, compile=mode, attention=way["attention"], impl=impl)
            compiles = impl == "fused" or mode != "none"
            sustained = ("graph_step",) if shape in grid.sustained_executions else ()
            plan.add("execution", step, *EXECUTION_PHASES, sustained=sustained, compiles=compiles)
    return plan


SECTIONS = dict.fromkeys(("steps", "warmup", "compile", "execution"), run_steps)

run_case = functools.partial(run_section, SECTIONS)
