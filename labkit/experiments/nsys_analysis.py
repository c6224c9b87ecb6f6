"""Notebook 02: where a step's time goes, kernel by kernel, from captures of Nsight Systems or
torch.profiler.

Sections: "profiles" and, of the model as a course writes it, "course": per size, context, precision
and attention one capture of an inference and of a training step. Under nsys cases of one size share
a capture, which costs more than most cases, but no more than run in about a minute: of a capture
that is cut off nothing is recorded. With torch.profiler the worker itself captures each phase.

A step is captured twice, after one step that warms up: first with ranges around every block, norm
and part of attention, then with the phases' ranges alone. Times and launches come from the second,
which runs as it would unmarked; what is inside which range comes from the first. Then the worker
times the same step without a profiler.
"""

import contextlib
import functools
import gc
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd
import torch

from labkit import accounting, hardware, numerics
from labkit.configs import NSYS_ANALYSIS, REPOSITORY, model_config, narrowed
from labkit.experiments.captured_step import NUM_CAPTURED, NUM_WARMUP, Step, capture_steps, warm_up
from labkit.experiments.sections import freeze_modules, memory_bytes, run_section
from labkit.experiments.sweep import Case, Measured, PhaseRun, Skip
from labkit.experiments.workload import Workload, course_parameters, step_parameters, workload
from labkit.kernels import KERNEL_CLASSES
from labkit.kernels.attention import what_runs
from labkit.measure import profiling
from labkit.measure.profiling import Nsys, ProfileError, RangeMarker, Trace

__all__ = ["MEASUREMENT_VERSION", "ProfiledCase", "cases", "run_case"]

MEASUREMENT_VERSION = 2
"""2: the step is also timed without the profiler, and different kernels have different names."""

FLASH = "auto"
"""The attention beside eager: labkit's FlashAttention, whichever implementation it takes for these
tensors.
"""

STEP_PHASES = ("inference", "forward", "backward", "optimizer")
"""Ranges that are phases of a step."""

KERNEL_KINDS = ("kernel", "operator")
"""Kinds of launches whose time is kernel time: no copies by the copy engine, no memsets."""

WORTH_TIMING = 0.05
"""Idle share under the profiler from which a step is timed without it: below, it idles even less
without.
"""

KEPT_KERNELS = 10
"""Kernels that a record keeps of each phase: those with most time, and as many of those that are no
matmul.
"""

CAPTURE_MARGIN_S = 20.0
"""By how much a capture's own limit is below its case's, so that it ends its processes itself."""

LONGEST_CAPTURE_S = 45.0
"""Estimated time of a capture's cases above which it takes no further one along."""

ESTIMATED_TFLOPS = {"fp32": 35.0, "bf16": 200.0}
ESTIMATED_CASE_S, ESTIMATED_BYTES_PER_S = 1.5, 25e9
"""For that estimate, from an H200: rate of the steps; time beside them, and at which rate
parameters were made.
"""


@dataclass(frozen=True)
class ProfiledCase(Case):
    """A case, and the parameters and phases of those after it that a capture of it takes along."""

    together: tuple[tuple[dict, tuple[str, ...]], ...] = ()


def cases(
    profile: str, device_kind: str, *, sizes: Sequence[str] = (), contexts: Sequence[int] = ()
) -> list[Case]:
    """Returns the cases of `profile`, narrowed where asked; ValueError for a value that it does not
    have.
    """
    grid = NSYS_ANALYSIS[profile]
    wanted_sizes = narrowed(NSYS_ANALYSIS, profile, "sizes", sizes)
    wanted_contexts = narrowed(NSYS_ANALYSIS, profile, "contexts", contexts)
    options = {"timeout_s": grid.case_timeout_s, "stop_at_failure": True}
    found = []
    for size in wanted_sizes:
        phases = (
            "inference",
            "forward_backward" if size in grid.without_optimizer else "train_step",
        )
        group = [
            (step_parameters(size, context, precision, attention=attention), phases)
            for context in wanted_contexts
            for precision in grid.precisions
            for attention in ("eager", FLASH)
            if attention == "eager" or context in grid.flash_contexts.get(precision, ())
        ]
        for number, one in enumerate(group, start=1):
            found.append(ProfiledCase("profiles", *one, together=tuple(group[number:]), **options))
    course = [
        (course_parameters(size, context, "fp32"), ("inference", "train_step"))
        for size, context in grid.course
        if size in wanted_sizes and context in wanted_contexts
    ]
    for number, one in enumerate(course, start=1):
        found.append(ProfiledCase("course", *one, together=tuple(course[number:]), **options))
    return found


def is_timeline(parameters: dict) -> bool:
    """Returns whether a case's training step is kept launch by launch."""
    key = tuple(parameters[name] for name in ("size", "context", "precision", "attention"))
    return any(key in grid.timelines for grid in NSYS_ANALYSIS.values())


def _run_profiles(
    device: hardware.Device, case: ProfiledCase, ceilings: dict[str, float]
) -> Iterator[PhaseRun]:
    freeze_modules()
    nsys = Nsys.usable() if device.kind == "cuda" else None
    with contextlib.nullcontext() if nsys else workload(device, case) as live:
        for phase in case.phases:
            yield phase, functools.partial(_profiled, nsys, device, live, case, phase)


def _profiled(
    nsys: Nsys | None, device: hardware.Device, live: Workload | None, case: Case, phase: str
) -> Measured:
    """Returns what the capture of a phase gave, and the phase's time without a profiler."""
    found = (
        _from_shared_capture(nsys, device, case, phase)
        if nsys
        else _capture_here(live, case, phase)
    )
    if found.metrics["step_idle_fraction"] < WORTH_TIMING:
        return found
    # The captured process has ended: what it held is free.
    with workload(device, case) if nsys else contextlib.nullcontext(live) as step:
        timing = step.time_phase(
            phase, num_warmup=1, min_samples=3, max_samples=20, time_limit_s=0.1
        )
    plain = {
        "unprofiled_ms": statistics.median(timing.host_ms),
        "unprofiled_n": timing.n,
    }  # as done_ms is read
    return replace(found, metrics=found.metrics | plain)


run_case = functools.partial(run_section, {"profiles": _run_profiles, "course": _run_profiles})


def require_room(device: hardware.Device, parameters: dict, phase: str) -> None:
    """Raises Skip for what cannot fit, by a lower bound on its bytes, so that what might fit is
    tried.

    Of the activations' closed form (fp32, eager) bf16 autocast keeps at least half, but one and a
    half times the probabilities, in fp32 for the softmax and in bf16 for the product;
    FlashAttention keeps none.
    """
    if device.kind != "cuda" or phase == "inference":
        return
    config = model_config(parameters["size"])
    batch, context = parameters["batch"], parameters["context"]
    probabilities = 4 * batch * config.num_heads * context * context * config.num_layers
    masks = context * context * config.num_layers
    others = accounting.activation_bytes(config, batch, context) - probabilities - masks
    is_bf16 = parameters["precision"] == "bf16"
    needed = 2 * accounting.parameter_bytes(config) + others // (2 if is_bf16 else 1)
    if parameters["attention"] in ("eager", "course"):
        needed += masks + (probabilities * 3 // 2 if is_bf16 else probabilities)
    if phase == "train_step":
        needed += accounting.optimizer_state_bytes(config)
    total = memory_bytes(device)
    if needed > total:
        raise Skip(
            f"needs at least {needed / 1e9:.0f} GB by its closed form; the device has "
            f"{total / 1e9:.0f} GB"
        )


def _observed(workload: Workload) -> dict:
    """Returns what else there is to know of the live objects, among it which attention "auto" is
    here.
    """
    config, impl = workload.model.config, workload.model.blocks[0].attention.attention
    dtype = numerics.tensor_dtype(workload.precision)
    batch, context = workload.tokens.shape  # few queries run other kernels
    like_q = torch.empty(
        (batch, config.num_heads, context, config.d_head), dtype=dtype, device=workload.device.kind
    )
    runs = impl if impl == "course" else what_runs(impl, like_q, like_q, causal=True)
    return {**workload.observed(), "attention_runs": runs}


def _capture_here(workload: Workload, case: Case, phase: str) -> Measured:
    """Captures one phase by torch.profiler."""
    device, steps = workload.device, []
    capture = functools.partial(capture_steps, workload, phase, RangeMarker("kineto"), "case")
    require_room(device, case.parameters, phase)
    warm_up(workload, phase)
    with hardware.Monitor(device.kind) as monitor:
        trace = profiling.capture_with_kineto(lambda: steps.extend(capture()), device.kind)
    answer = {
        "case": workload.described(),
        "observed": _observed(workload),
        "steps": [vars(step) for step in steps],
    }
    return replace(_measured(_Capture.of(trace), "case", answer), telemetry=monitor.summary)


_captured: dict[str, Callable[[], Measured]] = {}
"""Results that this worker has from a shared capture and that no case has asked for yet, by case
and phase.
"""


def _key(parameters: dict, phase: str) -> str:
    return json.dumps([parameters, phase], sort_keys=True)


def _from_shared_capture(
    nsys: Nsys, device: hardware.Device, case: ProfiledCase, phase: str
) -> Measured:
    """Returns the measurement of a phase, from a capture of this case and of some after it if there
    is none yet.
    """
    require_room(device, case.parameters, phase)
    if _key(case.parameters, phase) not in _captured:
        remaining = case.phases[case.phases.index(phase) :]
        group = group_to_capture(device, [(case.parameters, remaining), *case.together])
        _captured.clear()
        _captured.update(_capture_group(nsys, device, group, case.timeout_s))
    return _captured.pop(_key(case.parameters, phase))()


def group_to_capture(
    device: hardware.Device, group: Sequence[tuple[dict, tuple[str, ...]]]
) -> list:
    """Returns those cases that a capture of the first takes along, without the phases that cannot
    fit.
    """
    taken, total = [], 0.0
    for parameters, phases in group:
        if fitting := tuple(phase for phase in phases if _has_room(device, parameters, phase)):
            total += estimated_s(parameters, fitting)
            if taken and total > LONGEST_CAPTURE_S:
                break
            taken.append((parameters, fitting))
    return taken


def _has_room(device: hardware.Device, parameters: dict, phase: str) -> bool:
    with contextlib.suppress(Skip):
        require_room(device, parameters, phase)
        return True
    return False


def estimated_s(parameters: dict, phases: Sequence[str]) -> float:
    """Returns about how long a case takes in a capture: to build it, and each phase's warm-up and
    captured steps.
    """
    config = model_config(parameters["size"])
    batch, context = parameters["batch"], parameters["context"]
    flops = sum(
        accounting.phase_flops(config, batch, context, phase, causal=False) for phase in phases
    )
    steps_s = (
        (NUM_WARMUP + NUM_CAPTURED) * flops / (1e12 * ESTIMATED_TFLOPS[parameters["precision"]])
    )
    return ESTIMATED_CASE_S + accounting.parameter_bytes(config) / ESTIMATED_BYTES_PER_S + steps_s


def _capture_group(
    nsys: Nsys, device: hardware.Device, group: Sequence, timeout_s: float
) -> dict[str, Callable]:
    """Captures the steps of many cases in one process; returns what gives each measurement, or
    raises its failure.
    """
    requests = [
        {"parameters": parameters, "phase": phase}
        for parameters, phases in group
        for phase in phases
    ]
    requests = [{"label": f"case {number}", **request} for number, request in enumerate(requests)]
    with tempfile.TemporaryDirectory(prefix="labkit-requests-") as folder:
        asked, answered = Path(folder) / "requests.json", Path(folder) / "answers.jsonl"
        asked.write_text(json.dumps(requests), encoding="utf-8")
        command = [sys.executable, "-m", __name__, str(asked), str(answered)]
        paths = [str(REPOSITORY), profiling.allowed_environment().get("PYTHONPATH", "")]
        variables = {"PYTHONPATH": ":".join(path for path in paths if path)}
        trace, failure = None, ""
        with hardware.Monitor(device.kind) as monitor:
            try:
                trace = nsys.capture(
                    command, timeout_s=timeout_s - CAPTURE_MARGIN_S, variables=variables
                )
            except ProfileError as error:
                failure = str(error)
        telemetry = {
            name: value for name, value in monitor.summary.items() if name != "foreign_processes"
        }
        lines = answered.read_text(encoding="utf-8").splitlines() if answered.exists() else []
    answers = [json.loads(line) for line in lines]
    if not answers:
        raise ProfileError(failure or "the captured process ended before its first step")
    if trace is None and any(answer["status"] == "ok" for answer in answers):
        raise ProfileError(failure)
    capture = _Capture.of(trace) if trace else None
    return {
        _key(answer["parameters"], answer["phase"]): functools.partial(
            _outcome, capture, answer, telemetry
        )
        for answer in answers
    }


def _outcome(capture: "_Capture | None", answer: dict, telemetry: dict) -> Measured:
    if answer["status"] == "oom":
        raise torch.OutOfMemoryError(answer["reason"])
    if answer["status"] != "ok":
        raise RuntimeError(answer["reason"])
    return replace(_measured(capture, answer["label"], answer), telemetry=telemetry)


def serve(
    requests: Sequence[dict], answer: Callable[[dict], None], device: hardware.Device
) -> None:
    """Runs the requested steps with NVTX ranges, and calls `answer` after each; ends after the
    first failure.

    Args:
        requests: label, parameters and phase of each; those of one case follow one another.
    """
    marker = RangeMarker("nvtx" if device.kind == "cuda" else "none")
    parameters, stack = None, contextlib.ExitStack()
    with stack:
        for request in requests:
            try:
                if request["parameters"] != parameters:
                    stack.close()
                    parameters = request["parameters"]
                    workload = stack.enter_context(contextlib.closing(Workload(device, parameters)))
                warm_up(workload, request["phase"])
                steps = capture_steps(workload, request["phase"], marker, request["label"])
                found = {"case": workload.described(), "observed": _observed(workload)}
                answer(
                    {**request, **found, "status": "ok", "steps": [vars(step) for step in steps]}
                )
            except Exception as error:
                status = "oom" if isinstance(error, torch.OutOfMemoryError) else "error"
                reason = f"{error}".split("\n")[0][:500]
                answer({**request, "status": status, "reason": reason})
                return  # what it left behind must not reach the next case


@dataclass(frozen=True)
class _Capture:
    """A capture by its steps: the kernel time of all of it, and rows of `profiling.launches` by the
    outermost range.
    """

    source: str
    version: str
    totals: dict[str, float]
    steps: dict[str, pd.DataFrame]

    @classmethod
    def of(cls, trace: Trace) -> "_Capture":
        table = profiling.launches(trace, STEP_PHASES, KERNEL_CLASSES)
        kernels = table[table["kind"].isin(KERNEL_KINDS)]
        is_outside = kernels["range"] == profiling.OUTSIDE
        totals = {
            "capture_kernel_ms": trace.total_ns / 1e6,
            "capture_in_ranges_ms": kernels.loc[~is_outside, "duration_ns"].sum() / 1e6,
            "capture_outside_us": kernels.loc[is_outside, "duration_ns"].sum() / 1e3,
        }
        outermost = [path[0] if path else profiling.OUTSIDE for path in table["path"]]
        return cls(trace.source, trace.version, totals, dict(iter(table.groupby(outermost))))


def _measured(capture: _Capture, label: str, answer: dict) -> Measured:
    """Returns the measurement of one phase: its metrics, and in `observed` its tables by kernel,
    class and range.
    """
    names = [f"{label} step {number}" for number in range(NUM_CAPTURED)]
    if missing := [name for name in names if name not in capture.steps]:
        raise ProfileError(f"the capture holds no launch in the range '{missing[0]}'")
    with_ranges, plain = (capture.steps[name] for name in names)
    kernels = plain[plain["kind"].isin(KERNEL_KINDS)]
    steps = [Step(**step) for step in answer["steps"]]
    metrics = {
        **_times(plain, "step"),
        "num_launches": len(kernels),
        "num_casts": int(kernels["name"].map(profiling.is_cast).sum()),
        "issued_ms": steps[1].issued_ms,
        "done_ms": steps[1].done_ms,
        "done_with_ranges_ms": steps[0].done_ms,
        "num_launches_with_ranges": int(with_ranges["kind"].isin(KERNEL_KINDS).sum()),
        **capture.totals,
    }
    for phase in STEP_PHASES:
        if len(rows := plain[plain["phase"] == phase]):
            metrics |= _times(rows, phase)
    tables = {
        "kernels": _columns(_kept_kernels(kernels)),
        "classes": _columns(profiling.statistics_by(kernels, ["phase", "kernel_class"])),
        "ranges": _columns(_by_range(with_ranges, label)),
    }
    if is_timeline(answer["case"]) and "backward" in set(plain["phase"]):
        tables["timeline"] = _timeline(with_ranges)
    return Measured(
        metrics=metrics,
        case=answer["case"],
        observed={
            **answer["observed"],
            "tables": tables,
            "profiler": capture.source,
            "profiler_version": capture.version,
        },
        timer={"method": capture.source, "num_warmup": NUM_WARMUP},
    )


def _times(rows: pd.DataFrame, name: str) -> dict[str, float]:
    """Returns the time of these launches' kernels, that from the first's start to the last's end,
    and the idle part.
    """
    projected = rows["end_ns"].max() - rows["start_ns"].min()
    kernels = rows[rows["kind"].isin(KERNEL_KINDS)]
    return {
        f"{name}_kernel_ms": kernels["duration_ns"].sum() / 1e6,
        f"{name}_projected_ms": projected / 1e6,
        f"{name}_idle_fraction": 1 - profiling.busy_ns(rows) / projected,
    }


def _kept_kernels(kernels: pd.DataFrame) -> pd.DataFrame:
    """Returns the kernels with most time, and with most that are no matmul, of each phase and of a
    step of several.
    """
    kept = []
    by_phase = list(kernels.groupby("phase", sort=False))
    for phase, rows in by_phase if len(by_phase) == 1 else [("step", kernels), *by_phase]:
        found = profiling.statistics_by(rows, ["short_name", "kernel_class"])
        others = found[found["kernel_class"] != "matmul"].head(KEPT_KERNELS)
        top = found[(found.index < KEPT_KERNELS) | found.index.isin(others.index)]
        kept.append(top.assign(phase=phase))
    return pd.concat(kept, ignore_index=True)


def _by_range(rows: pd.DataFrame, label: str) -> pd.DataFrame:
    """Returns the kernels' time by path of ranges below the step, the blocks together, and
    class.
    """
    kernels = rows[rows["kind"].isin(KERNEL_KINDS)]
    paths = {}
    for path in kernels["path"].unique():
        below = path[path.index(f"{label} step 0") + 1 :]
        paths[path] = (
            "/".join("block" if name.startswith("block ") else name for name in below)
            or profiling.OUTSIDE
        )
    found = profiling.statistics_by(
        kernels.assign(path=kernels["path"].map(paths)), ["path", "kernel_class"]
    )
    return found[["path", "kernel_class", "launches", "total_us"]]


def _timeline(rows: pd.DataFrame) -> dict[str, list]:
    """Returns every launch of a step: start and duration (µs), numbers of class, stream, phase and
    block (−1: none).
    """
    blocks = {
        path: next((int(n[6:]) for n in path if n.startswith("block ")), -1)
        for path in rows["path"].unique()
    }
    start = rows["start_ns"].min()
    return {
        "class_names": list(profiling.CLASSES),
        "phase_names": list(STEP_PHASES),
        "start_us": [round((value - start) / 1e3, 2) for value in rows["start_ns"]],
        "duration_us": [round(value / 1e3, 2) for value in rows["end_ns"] - rows["start_ns"]],
        "kernel_class": [profiling.CLASSES.index(name) for name in rows["kernel_class"]],
        "stream": [int(stream) for stream in rows["stream"]],
        "phase": [
            STEP_PHASES.index(phase) if phase in STEP_PHASES else -1 for phase in rows["phase"]
        ],
        "block": [blocks[path] for path in rows["path"]],
    }


def _columns(frame: pd.DataFrame) -> dict[str, list]:
    """Returns a table by columns as JSON takes it, times to a hundredth of a microsecond."""
    return {
        name: [
            None if isinstance(value, float) and math.isnan(value) else value
            for value in column.tolist()
        ]
        for name, column in frame.round(2).items()
    }


def main(arguments: Sequence[str]) -> None:
    """Serves the requests of a file, in the process that nsys has started: requests.json
    answers.jsonl.
    """
    asked, answered = map(Path, arguments)
    with answered.open("a", encoding="utf-8") as file:

        def answer(content: dict) -> None:
            file.write(json.dumps(content) + "\n")
            file.flush()

        freeze_modules()
        serve(json.loads(asked.read_text(encoding="utf-8")), answer, hardware.detect())
    gc.unfreeze()  # or its modules are reported as leaks when the process ends


if __name__ == "__main__":
    main(sys.argv[1:])
