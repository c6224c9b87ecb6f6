"""Notebook 02: where a step's time goes, kernel by kernel, from captures of Nsight Systems or
torch.profiler.

Section "profiles": per size, context, precision and attention one capture of an inference and of a
training step. Under nsys cases of one size and context share a capture, which costs more than most
cases; of a capture that is cut off nothing is recorded. With torch.profiler the worker itself
captures each phase.

A step is captured twice, after one step that warms up: first with ranges around every block, norm
and attention, then with the phases' ranges alone. Times and launches come from the second, which
runs as it would unmarked; what is inside which range comes from the first.
"""

import functools
from dataclasses import dataclass, replace

import pandas as pd

from labkit.configs import GRIDS
from labkit.device import Device
from labkit.experiments.captured_step import (
    capture,
    failures,
    nsys_on,
    parameters_of,
    words_of,
)
from labkit.experiments.sections import run_section, section
from labkit.experiments.sweep import Case, Measured
from labkit.kernels import KERNEL_CLASSES
from labkit.measure import profiling
from labkit.measure.profiling import ProfileError, Trace
from labkit.monitor import Monitor

MEASUREMENT_VERSION = 2
"""2: different kernels have different names."""

FLASH = "auto"
"""The attention beside eager: labkit's FlashAttention, whichever implementation it takes for these
tensors.
"""

STEP_PHASES = ("inference", "forward", "backward", "optimizer")
"""Ranges that are phases of a step."""

KERNEL_KINDS = ("kernel", "operator")
"""Kinds of launches whose time is kernel time: no copies by the copy engine, no memsets."""

TIMELINES = {
    (*map(str, shape), "train_step")
    for grid in GRIDS["02_nsys_analysis"].values()
    for shape in grid.timelines
}
"""The words of the steps that are kept launch by launch."""

KEPT_KERNELS = 20
"""Kernels with most time that a record keeps of each phase."""

CAPTURE_MARGIN_S = 20.0
"""By how much a capture's own limit is below its case's, so that it ends its processes itself."""


@dataclass(frozen=True)
class ProfiledCase(Case):
    """A case, and the words (see `captured_step`) of all steps of its size and context, in order:
    a capture of one takes along those after it.
    """

    together: tuple[tuple[str, ...], ...] = ()


def cases(profile: str, device_kind: str) -> list[Case]:
    """Returns the cases of `profile`."""
    grid = GRIDS["02_nsys_analysis"][profile]
    planned = []
    for size in grid.sizes:
        last = "forward_backward" if size in grid.without_optimizer else "train_step"
        for context in grid.contexts:
            group = [
                (size, str(context), precision, attention)
                for precision in grid.precisions
                for attention in ("eager", FLASH)
                if attention == "eager" or context in grid.flash_contexts.get(precision, ())
            ]
            phases = ("inference", last)
            together = tuple((*shape, phase) for shape in group for phase in phases)
            for shape in group:
                planned.append(
                    ProfiledCase(
                        "profiles",
                        parameters_of(*shape),
                        phases,
                        grid.case_timeout_s,
                        together=together,
                    )
                )
    return planned


_captured: dict[tuple[str, ...], Measured] = {}
"""What this worker has from a shared capture and no case has asked for yet, by the case's words."""


def _measure(device: Device, case: ProfiledCase, phase: str) -> Measured:
    """Returns the measurement of a phase, from a capture if there is none yet: by nsys of this case
    and of those after it, by torch.profiler of the phase alone.
    """
    words = words_of(case.parameters, phase)
    if words not in _captured:
        nsys = nsys_on(device)
        asked = [words]
        if nsys and words in case.together:
            asked = case.together[case.together.index(words) :]
        with Monitor(device.kind) as monitor:
            trace = capture(nsys, device, asked, timeout_s=case.timeout_s - CAPTURE_MARGIN_S)
        _captured.clear()
        for other, measured in measurements(trace).items():
            _captured[other] = replace(measured, telemetry=monitor.summary)
        if words not in _captured:
            raise ProfileError("the captured process ended before its first step")
    return _captured.pop(words)


run_case = functools.partial(run_section, {"profiles": section(_measure)})


def measurements(trace: Trace) -> dict[tuple[str, ...], Measured]:
    """Returns the measurements of the phases that a capture holds, by their words: metrics, and in
    `observed` tables by kernel, class and range; of a phase that failed its status alone.
    """
    table = profiling.launches(trace, STEP_PHASES, KERNEL_CLASSES)
    outermost = [path[0] if path else profiling.OUTSIDE for path in table["path"]]
    rows_of = dict(iter(table.groupby(outermost)))
    spans = trace.ranges.sort_values("start_ns").set_index("name")
    lasted_ms = (spans["end_ns"] - spans["start_ns"]) / 1e6
    results = {
        words: Measured({}, parameters_of(*words[:-1]), status=status, reason=reason)
        for words, (status, reason) in failures(trace).items()
    }
    for name in spans.index[spans.index.str.startswith("step 1 ")]:
        words = tuple(name.split()[2:])
        if words in results:
            continue
        marked_name = name.replace("step 1", "step 0", 1)
        for step in (marked_name, name):
            if step not in rows_of:
                raise ProfileError(f"the capture holds no launch in the range '{step}'")
        begin, end = spans.loc[name, ["start_ns", "end_ns"]]
        inner = spans[spans.index.isin(STEP_PHASES) & spans["start_ns"].between(begin, end)]
        metrics, tables = _step_tables(rows_of[marked_name], rows_of[name])
        metrics |= {
            "issued_ms": (inner["end_ns"].max() - begin) / 1e6,
            "done_ms": lasted_ms[name],
            "done_with_ranges_ms": lasted_ms[marked_name],
        }
        if words in TIMELINES:
            tables["timeline"] = _timeline(rows_of[marked_name])
        observed = {
            "tables": {name: _columns(table) for name, table in tables.items()},
            "profiler": trace.source,
            "profiler_version": trace.version,
        }
        timer = {"method": trace.source}
        results[words] = Measured(metrics, parameters_of(*words[:-1]), observed, timer=timer)
    return results


def _step_tables(marked: pd.DataFrame, plain: pd.DataFrame) -> tuple[dict, dict]:
    """Returns metrics and tables of one phase, from the launches of its step with every range and
    of that with the phases' alone.
    """
    kernels = plain[plain["kind"].isin(KERNEL_KINDS)]
    marked_kernels = marked[marked["kind"].isin(KERNEL_KINDS)]
    span_ns = plain["end_ns"].max() - plain["start_ns"].min()
    metrics = {
        "step_kernel_ms": kernels["duration_ns"].sum() / 1e6,
        "step_projected_ms": span_ns / 1e6,
        "num_launches": len(kernels),
        "num_launches_with_ranges": len(marked_kernels),
    }
    in_phases = kernels[kernels["phase"].isin(STEP_PHASES)]
    for phase, sum_ns in in_phases.groupby("phase")["duration_ns"].sum().items():
        metrics[f"{phase}_kernel_ms"] = sum_ns / 1e6
    # The blocks of a model count together.
    paths = marked_kernels["path"].map(lambda path: "/".join(path[1:]) or profiling.OUTSIDE)
    by_range = marked_kernels.assign(path=paths.str.replace(r"block \d+", "block", regex=True))
    by_kernel = profiling.statistics_by(kernels, ["phase", "short_name", "kernel_class"])
    tables = {
        "kernels": by_kernel.groupby("phase", sort=False).head(KEPT_KERNELS),
        "classes": profiling.statistics_by(kernels, ["phase", "kernel_class"]),
        "ranges": profiling.statistics_by(by_range, ["path", "kernel_class"]),
    }
    return metrics, tables


def _columns(table: pd.DataFrame) -> dict:
    """Returns a table's columns, a text of one by its place among the `names` of it."""
    columns = table.round(2).to_dict("list")  # hundredths of a microsecond are enough
    for name in table.select_dtypes("str"):
        places, names = pd.factorize(table[name])
        columns[name] = {"names": names.tolist(), "places": places.tolist()}
    return columns


def _timeline(rows: pd.DataFrame) -> pd.DataFrame:
    """Returns every launch of a step: start and duration (µs), class, phase and number of its block
    (−1: none).
    """
    block = rows["path"].map("/".join).str.extract(r"block (\d+)", expand=False)
    return pd.DataFrame(
        {
            "start_us": (rows["start_ns"] - rows["start_ns"].min()) / 1e3,
            "duration_us": (rows["end_ns"] - rows["start_ns"]) / 1e3,
            "kernel_class": rows["kernel_class"],
            "phase": rows["phase"],
            "block": block.fillna(-1).astype(int),
        }
    )
