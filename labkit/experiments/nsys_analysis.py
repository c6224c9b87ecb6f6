"""Notebook 02: where a step's time goes, kernel by kernel, from captures of Nsight Systems or
torch.profiler.

Sections: "profiles" and, of the model as a course writes it, "course": per size, context, precision
and attention one capture of an inference and of a training step. Under nsys cases of one size and
context share a capture, which costs more than most cases; of a capture that is cut off nothing is
recorded. With torch.profiler the worker itself captures each phase.

A step is captured twice, after one step that warms up: first with ranges around every block, norm
and part of attention, then with the phases' ranges alone. Times and launches come from the second,
which runs as it would unmarked; what is inside which range comes from the first. Then the worker
times the same step without a profiler.
"""

import contextlib
import functools
import gc
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from labkit import accounting, numerics
from labkit.configs import NSYS_ANALYSIS, REPOSITORY, model_config
from labkit.device import Device, detect
from labkit.experiments.captured_step import NUM_CAPTURED, NUM_WARMUP, capture_steps, warm_up
from labkit.experiments.sections import freeze_modules, memory_bytes, run_section
from labkit.experiments.step import Step, course_parameters, step_parameters
from labkit.experiments.sweep import Case, Measured, PhaseRun, Skip
from labkit.kernels import KERNEL_CLASSES
from labkit.kernels.flash_attention import resolve_impl
from labkit.measure import profiling
from labkit.measure.profiling import Nsys, ProfileError, RangeMarker, Trace
from labkit.monitor import Monitor

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


@dataclass(frozen=True)
class ProfiledCase(Case):
    """A case, and the parameters and phases of those after it that a capture of it takes along."""

    together: tuple[tuple[dict, tuple[str, ...]], ...] = ()


def cases(
    profile: str, device_kind: str, *, sizes: Sequence[str] = (), contexts: Sequence[int] = ()
) -> list[Case]:
    """Returns the cases of `profile`, narrowed to values of its grid where asked."""
    grid = NSYS_ANALYSIS[profile]
    wanted_sizes = sizes or grid.sizes
    wanted_contexts = contexts or grid.contexts
    planned = []

    def add(section: str, group: list[dict], *phases: str) -> None:
        pairs = tuple((parameters, phases) for parameters in group)
        for number, parameters in enumerate(group, start=1):
            planned.append(
                ProfiledCase(
                    section,
                    parameters,
                    phases,
                    grid.case_timeout_s,
                    stop_at_failure=True,
                    together=pairs[number:],
                )
            )

    for size in wanted_sizes:
        last = "forward_backward" if size in grid.without_optimizer else "train_step"
        for context in wanted_contexts:
            group = [
                step_parameters(size, context, precision, attention=attention)
                for precision in grid.precisions
                for attention in ("eager", FLASH)
                if attention == "eager" or context in grid.flash_contexts.get(precision, ())
            ]
            add("profiles", group, "inference", last)
    for size, context in grid.course:
        if size in wanted_sizes and context in wanted_contexts:
            group = [course_parameters(size, context, "fp32")]
            add("course", group, "inference", "train_step")
    return planned


def is_timeline(parameters: dict) -> bool:
    """Returns whether a case's training step is kept launch by launch."""
    key = tuple(parameters[name] for name in ("size", "context", "precision", "attention"))
    return any(key in grid.timelines for grid in NSYS_ANALYSIS.values())


def _run_profiles(
    device: Device, case: ProfiledCase, ceilings: dict[str, float]
) -> Iterator[PhaseRun]:
    freeze_modules()
    nsys = Nsys.usable() if device.kind == "cuda" else None
    live = contextlib.nullcontext() if nsys else _open_step(device, case)
    with live as step:
        for phase in case.phases:
            yield phase, functools.partial(_profiled, nsys, device, step, case, phase)


def _open_step(device: Device, case: Case) -> contextlib.AbstractContextManager[Step]:
    return contextlib.closing(Step(device, case.parameters))


def _profiled(
    nsys: Nsys | None, device: Device, step: Step | None, case: Case, phase: str
) -> Measured:
    """Returns what the capture of a phase gave, and the phase's time without a profiler."""
    if reason := lacking_room(device, case.parameters, phase):
        raise Skip(reason)
    if nsys:
        measured = _from_shared_capture(nsys, device, case, phase)
    else:
        measured = _capture_here(step, phase)
    if measured.metrics["step_idle_fraction"] < WORTH_TIMING:
        return measured
    # The captured process has ended: what it held is free.
    with _open_step(device, case) if nsys else contextlib.nullcontext(step) as plain:
        timing = plain.time_phase(
            phase, num_warmup=1, min_samples=3, max_samples=20, time_limit_s=0.1
        )
    unprofiled_ms = statistics.median(timing.host_ms)  # by the host, as done_ms is read
    metrics = measured.metrics | {"unprofiled_ms": unprofiled_ms, "unprofiled_n": timing.n}
    return replace(measured, metrics=metrics)


run_case = functools.partial(run_section, {"profiles": _run_profiles, "course": _run_profiles})


def lacking_room(device: Device, parameters: dict, phase: str) -> str:
    """Returns why a phase cannot fit on a GPU, "" where it might."""
    if device.kind != "cuda" or phase == "inference":
        return ""
    needed, total = least_bytes(parameters, phase), memory_bytes(device)
    if needed <= total:
        return ""
    return (
        f"needs at least {needed / 1e9:.0f} GB by its closed form; the device has "
        f"{total / 1e9:.0f} GB"
    )


def least_bytes(parameters: dict, phase: str) -> int:
    """Returns a lower bound on the bytes of a step with a backward pass, so that what might fit is
    tried.

    Of the activations' closed form (fp32, eager) bf16 autocast keeps at least half, but one and a
    half times the probabilities, in fp32 for the softmax and in bf16 for the product;
    FlashAttention keeps none.
    """
    config = model_config(parameters["size"])
    batch, context = parameters["batch"], parameters["context"]
    probabilities = 4 * batch * config.num_heads * context * context * config.num_layers
    masks = context * context * config.num_layers
    others = accounting.activation_bytes(config, batch, context) - probabilities - masks
    if parameters["precision"] == "bf16":
        others //= 2
        probabilities = probabilities * 3 // 2
    needed = 2 * accounting.parameter_bytes(config) + others
    if parameters["attention"] in ("eager", "course"):
        needed += masks + probabilities
    if phase == "train_step":
        needed += accounting.optimizer_state_bytes(config)
    return needed


def _observed(step: Step) -> dict:
    """Returns what else there is to know of the live objects, among it which attention "auto" is
    here.
    """
    config, impl = step.model.config, step.model.blocks[0].attention.attention
    if impl != "course":
        batch, context = step.tokens.shape  # few queries run other kernels
        shape = (batch, config.num_heads, context, config.d_head)
        dtype = numerics.tensor_dtype(step.precision)
        like_q = torch.empty(shape, dtype=dtype, device=step.device.kind)
        impl = resolve_impl(like_q) if impl == "auto" else impl
    return {**step.observed(), "attention_runs": impl}


def _capture_here(step: Step, phase: str) -> Measured:
    """Captures one phase by torch.profiler."""
    kind, steps = step.device.kind, []

    def capture() -> None:
        steps.extend(capture_steps(step, phase, RangeMarker("kineto"), "case"))

    warm_up(step, phase)
    with Monitor(kind) as monitor:
        trace = profiling.capture_with_kineto(capture, kind)
    answer = {"label": "case", "case": step.described(), "observed": _observed(step)}
    measured = _measured(_Capture.read(trace), {**answer, "steps": steps})
    return replace(measured, telemetry=monitor.summary)


_captured: dict[str, tuple["_Capture | None", dict, dict]] = {}
"""What this worker has from a shared capture and no case has asked for yet, as `_outcome` takes it,
by case and phase.
"""


def _key(parameters: dict, phase: str) -> str:
    return json.dumps([parameters, phase], sort_keys=True)


def _from_shared_capture(nsys: Nsys, device: Device, case: ProfiledCase, phase: str) -> Measured:
    """Returns the measurement of a phase, from a capture of this case and of those after it if
    there is none yet.
    """
    if _key(case.parameters, phase) not in _captured:
        remaining = case.phases[case.phases.index(phase) :]
        requests = [
            {"parameters": parameters, "phase": name}
            for parameters, phases in [(case.parameters, remaining), *case.together]
            for name in phases
            if not lacking_room(device, parameters, name)
        ]
        _captured.clear()
        _captured.update(_capture_together(nsys, device, requests, case.timeout_s))
    return _outcome(*_captured.pop(_key(case.parameters, phase)))


def _capture_together(
    nsys: Nsys, device: Device, requests: Sequence[dict], timeout_s: float
) -> dict[str, tuple["_Capture | None", dict, dict]]:
    """Captures the steps of many cases in one process; returns what `_outcome` takes of each."""
    requests = [{"label": f"case {number}", **one} for number, one in enumerate(requests)]
    trace, failure = None, "the captured process ended before its first step"
    with tempfile.TemporaryDirectory(prefix="labkit-requests-") as folder:
        asked, answered = Path(folder) / "requests.json", Path(folder) / "answers.jsonl"
        asked.write_text(json.dumps(requests), encoding="utf-8")
        answered.touch()
        command = [sys.executable, "-m", __name__, str(asked), str(answered)]
        paths = [str(REPOSITORY), profiling.allowed_environment().get("PYTHONPATH", "")]
        variables = {"PYTHONPATH": ":".join(filter(None, paths))}
        with Monitor(device.kind) as monitor:
            try:
                trace = nsys.capture(
                    command, timeout_s=timeout_s - CAPTURE_MARGIN_S, variables=variables
                )
            except ProfileError as error:
                failure = str(error)
        answers = [json.loads(line) for line in answered.read_text(encoding="utf-8").splitlines()]
    if not answers or (trace is None and any(answer["status"] == "ok" for answer in answers)):
        raise ProfileError(failure)
    telemetry = dict(monitor.summary)
    telemetry.pop("foreign_processes", None)
    capture = _Capture.read(trace) if trace else None
    return {
        _key(answer["parameters"], answer["phase"]): (capture, answer, telemetry)
        for answer in answers
    }


def _outcome(capture: "_Capture | None", answer: dict, telemetry: dict) -> Measured:
    if answer["status"] == "oom":
        raise torch.OutOfMemoryError(answer["reason"])
    if answer["status"] != "ok":
        raise RuntimeError(answer["reason"])
    return replace(_measured(capture, answer), telemetry=telemetry)


def serve(requests: Sequence[dict], answer: Callable[[dict], None], device: Device) -> None:
    """Runs the requested steps with NVTX ranges, and calls `answer` after each; ends after the
    first failure.

    Args:
        requests: label, parameters and phase of each; those of one case follow one another.
    """
    marker = RangeMarker("nvtx" if device.kind == "cuda" else "none")
    parameters = None
    with contextlib.ExitStack() as stack:
        for request in requests:
            label, phase = request["label"], request["phase"]
            try:
                if request["parameters"] != parameters:
                    stack.close()
                    parameters = request["parameters"]
                    step = stack.enter_context(contextlib.closing(Step(device, parameters)))
                warm_up(step, phase)
                steps = capture_steps(step, phase, marker, label)
                result = {"case": step.described(), "observed": _observed(step), "steps": steps}
            except Exception as error:
                status = "oom" if isinstance(error, torch.OutOfMemoryError) else "error"
                reason = f"{error}".split("\n")[0][:500]
                answer({**request, "status": status, "reason": reason})
                return  # what it left behind must not reach the next case
            answer({**request, **result, "status": "ok"})


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
    def read(cls, trace: Trace) -> "_Capture":
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


def _measured(capture: _Capture, answer: dict) -> Measured:
    """Returns the measurement of one phase: its metrics, and in `observed` its tables by kernel,
    class and range.
    """
    names = [f"{answer['label']} step {number}" for number in range(NUM_CAPTURED)]
    if missing := [name for name in names if name not in capture.steps]:
        raise ProfileError(f"the capture holds no launch in the range '{missing[0]}'")
    with_ranges, plain = (capture.steps[name] for name in names)
    kernels = plain[plain["kind"].isin(KERNEL_KINDS)]
    marked_kernels = with_ranges[with_ranges["kind"].isin(KERNEL_KINDS)]
    marked_step, plain_step = answer["steps"]
    metrics = {
        **_times(plain, "step"),
        "num_launches": len(kernels),
        "num_casts": int(kernels["name"].map(profiling.is_cast).sum()),
        "issued_ms": plain_step["issued_ms"],
        "done_ms": plain_step["done_ms"],
        "done_with_ranges_ms": marked_step["done_ms"],
        "num_launches_with_ranges": len(marked_kernels),
        **capture.totals,
    }
    for phase in STEP_PHASES:
        rows = plain[plain["phase"] == phase]
        if len(rows):
            metrics |= _times(rows, phase)
    tables = {
        "kernels": _columns(_kept_kernels(kernels)),
        "classes": _columns(profiling.statistics_by(kernels, ["phase", "kernel_class"])),
        "ranges": _columns(_by_range(marked_kernels)),
    }
    if is_timeline(answer["case"]) and "backward" in set(plain["phase"]):
        tables["timeline"] = _timeline(with_ranges)
    observed = {
        **answer["observed"],
        "tables": tables,
        "profiler": capture.source,
        "profiler_version": capture.version,
    }
    timer = {"method": capture.source, "num_warmup": NUM_WARMUP}
    return Measured(metrics, answer["case"], observed, timer=timer)


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
        totals = profiling.statistics_by(rows, ["short_name", "kernel_class"])
        others = totals[totals["kernel_class"] != "matmul"].head(KEPT_KERNELS)
        top = totals[(totals.index < KEPT_KERNELS) | totals.index.isin(others.index)]
        kept.append(top.assign(phase=phase))
    return pd.concat(kept, ignore_index=True)


def _by_range(kernels: pd.DataFrame) -> pd.DataFrame:
    """Returns the kernels' time by path of ranges below the step, the blocks together, and
    class.
    """

    def below_step(path: tuple[str, ...]) -> str:
        names = ["block" if name.startswith("block ") else name for name in path[1:]]
        return "/".join(names) or profiling.OUTSIDE

    totals = profiling.statistics_by(
        kernels.assign(path=kernels["path"].map(below_step)), ["path", "kernel_class"]
    )
    return totals[["path", "kernel_class", "launches", "total_us"]]


def _timeline(rows: pd.DataFrame) -> dict[str, list]:
    """Returns every launch of a step: start and duration (µs), numbers of class, stream, phase and
    block (−1: none).
    """

    def block_number(path: tuple[str, ...]) -> int:
        numbers = [int(n.removeprefix("block ")) for n in path if n.startswith("block ")]
        return numbers[0] if numbers else -1

    phase_numbers = {phase: number for number, phase in enumerate(STEP_PHASES)}
    start_us = (rows["start_ns"] - rows["start_ns"].min()) / 1e3
    duration_us = (rows["end_ns"] - rows["start_ns"]) / 1e3
    return {
        "class_names": list(profiling.CLASSES),
        "phase_names": list(STEP_PHASES),
        "start_us": start_us.round(2).tolist(),
        "duration_us": duration_us.round(2).tolist(),
        "kernel_class": rows["kernel_class"].map(profiling.CLASSES.index).tolist(),
        "stream": rows["stream"].astype(int).tolist(),
        "phase": rows["phase"].map(phase_numbers).fillna(-1).astype(int).tolist(),
        "block": rows["path"].map(block_number).tolist(),
    }


def _columns(frame: pd.DataFrame) -> dict[str, list]:
    """Returns a table by columns as JSON takes it, times to a hundredth of a microsecond."""
    return frame.round(2).astype(object).replace(np.nan, None).to_dict("list")


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
        serve(json.loads(asked.read_text(encoding="utf-8")), answer, detect())
    gc.unfreeze()  # or its modules are reported as leaks when the process ends


if __name__ == "__main__":
    main(sys.argv[1:])
