"""Chapter 01: its figures, and the queries that are its alone."""

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure

from labkit import published
from labkit.configs import WARMUP_MEASURED_STEPS
from labkit.report import facts, figures, sessions, verdicts
from labkit.report.frame import cell, in_order, ok_rows, only, select
from labkit.report.text import percent

CASE = ["size", "context", "precision"]
WARM = 0.03
"""A mean of steps is the steady one where it differs by no more."""


def roofs_table(ceilings: pd.DataFrame) -> pd.DataFrame:
    """Returns the measured rates, in a burst and sustained, beside the datasheet's."""
    lines = []
    for row in ceilings.to_dict("records"):
        if row["kind"] == "copy":
            name = "copy, read + write (GB/s)"
            unit = "gb_per_s"
        else:
            name = f"matrix product, {row['precision']} (TFLOP/s)"
            unit = "tflops"
        values = {
            "datasheet": "datasheet",
            "burst": f"achieved_{unit}",
            "sustained": f"sustained_{unit}",
            "power (W)": "watts",
            "TFLOP/J": "tflop_per_joule",
        }
        lines.append({"roof": name} | {head: cell(row, value) for head, value in values.items()})
    return pd.DataFrame(sorted(lines, key=lambda line: line["roof"]))


def _idle_share(kernel_ms, call_ms):
    # A kernel sum of another session can exceed the call by what sessions differ.
    return np.maximum(1 - kernel_ms / call_ms, 0)


def idle_map(steps: pd.DataFrame, profiles: pd.DataFrame) -> Figure | None:
    """Draws the share of an eager training step in which the device waits, by chapter 02's kernel
    times, size over context, a panel a precision.
    """
    calls = ok_rows(steps, phase="train_step", compile="none", attention="eager")
    kernels = ok_rows(profiles, phase="train_step", attention="eager")
    rows = calls.merge(kernels[[*CASE, "step_kernel_ms"]], on=CASE)
    if rows.empty:
        return None
    rows["idle_fraction"] = _idle_share(rows["step_kernel_ms"], rows["median_ms"])
    cells = in_order(rows, ["precision", "size"]).groupby("precision", sort=False)
    figure, axes = figures.panels(cells, height=2.8)
    for axis, (precision, shown) in axes:
        table = shown.pivot_table("idle_fraction", "size", "context", sort=False).sort_index(axis=1)
        table = table.rename(columns="{:,}".format)
        sns.heatmap(
            table,
            annot=table.map(percent),
            fmt="",
            ax=axis,
            cmap="cividis_r",
            vmin=0,
            vmax=1,
            cbar=False,
        )
        axis.set(title=precision, xlabel="context (tokens)", ylabel="")
        axis.grid(visible=False)
    return figure


def warmup(records: pd.DataFrame) -> pd.DataFrame:
    """Returns one row of all traces: `first`, the median first step over the steady one,
    num_traces, and num_cold, of how many the mean of the first ten steps is off by more than WARM.
    """
    first = []
    num_cold = 0
    for samples in filter(None, ok_rows(records).get("samples", [])):
        trace = pd.Series(samples["step_ms"])
        steady = (trace[5:] if len(trace) > 5 else trace).median()
        first.append(trace[0] / steady)
        num_cold += abs(trace[:WARMUP_MEASURED_STEPS].mean() / steady - 1) > WARM
    row = {"status": "ok", "phase": "warm-up", "num_cold": num_cold, "num_traces": len(first)}
    return pd.DataFrame([row | {"first": np.median(first)}] if first else [])


def call_range(profiles: pd.DataFrame, *frames: pd.DataFrame, **case) -> pd.DataFrame:
    """Returns one row, the least and the most call time of one step, nothing compiled, over the
    sessions and sections that timed it, and the share of each in which the device waits: least_ms,
    most_ms, least_idle_fraction, most_idle_fraction.
    """
    steps = ok_rows(pd.concat(frames), phase="train_step", compile="none", **case)
    rows = steps.to_dict("records")
    times = [time for row in rows for time in verdicts.by_session(row, "median_ms").values()]
    if not times:
        return pd.DataFrame()
    kernels = only(profiles, phase="train_step", **case) or {}
    line = {"status": "ok", "disturbed": any(row["disturbed"] for row in rows), **case}
    for end, time in (("least", min(times)), ("most", max(times))):
        line[f"{end}_ms"] = time
        line[f"{end}_idle_fraction"] = _idle_share(kernels.get("step_kernel_ms", np.nan), time)
    return pd.DataFrame([line])


def repeats(differences: pd.DataFrame) -> Figure:
    """Draws how far the rows of another session lie from the first by kind of time: boxes over
    quartiles, whiskers to 5 % and 95 % of the rows.
    """
    figure, axis = figures.panel(height=2.6)
    kinds = sessions.shares(differences)["kind"]
    axis.boxplot(
        [select(differences, kind=kind)["difference"].clip(lower=1e-3) for kind in kinds],
        orientation="horizontal",
        tick_labels=kinds,
        whis=(5, 95),
        flierprops={"markersize": 2},
    )
    axis.invert_yaxis()
    axis.axvline(0.05, color="0.4", linewidth=1, linestyle=":")
    axis.set_xscale("log")
    ticks = {0.001: "≤ 0.1 %"} | {end: percent(end) for end in (0.01, 0.05, 0.1, 1)}
    axis.set_xticks(list(ticks), ticks.values())
    axis.set_xlabel("slower than the faster of two sessions by")
    return figure


def published_steps(steps: pd.DataFrame) -> pd.DataFrame:
    """Returns all published step times that have a case of ours beside them."""
    theirs = ok_rows(published.step_times()).dropna(subset=["context", "batch"])
    own = select(steps, attention="eager")
    return facts.beside(theirs, own, [*CASE, "batch", "compile", "phase"])
