"""Chapter 01: its figures, and the queries that are its alone."""

import pandas as pd
from matplotlib.figure import Figure

from labkit import notebooks, published
from labkit.configs import WARMUP_MEASURED_STEPS
from labkit.records import Record
from labkit.report import facts, figures, sessions, verdicts
from labkit.report.card import LADDER, LADDER_CONTEXT
from labkit.report.chapter import Chapter
from labkit.report.frame import by_way, cell, in_order, mark, ok_rows, select
from labkit.report.text import percent

CASE = ["size", "context", "precision"]
WARM = 0.03
"""A mean of steps is the steady one where it differs by no more."""


def roofs_table(ceilings: pd.DataFrame) -> pd.DataFrame:
    """Returns the measured rates, in a burst and sustained, beside the datasheet's."""
    rows = []
    for row in ceilings.to_dict("records"):
        copy = row["kind"] == "copy"
        unit = "gb_per_s" if copy else "tflops"
        name = (
            "copy, read + write (GB/s)" if copy else f"matrix product, {row['precision']} (TFLOP/s)"
        )
        line = {
            "roof": name,
            "datasheet": cell(row, "datasheet"),
            "burst": cell(row, f"achieved_{unit}"),
        }
        line |= {"sustained": cell(row, f"sustained_{unit}"), "power (W)": cell(row, "watts")}
        rows.append(line | {"TFLOP/J": cell(row, "tflop_per_joule")})
    return pd.DataFrame(rows)


def idle(steps: pd.DataFrame, profiles: pd.DataFrame) -> pd.DataFrame:
    """Returns eager training steps with `idle_fraction`: 1 − kernel time (chapter 02's) ÷ call
    time.
    """
    calls = ok_rows(steps, phase="train_step", compile="none", attention="eager")
    kernels = ok_rows(profiles, phase="train_step", attention="eager")
    if calls.empty or kernels.empty:
        return pd.DataFrame()
    joined = calls.merge(kernels[[*CASE, "step_kernel_ms"]], on=CASE)
    # A kernel sum of another session can exceed the call by what sessions differ.
    idle_fraction = (1 - joined["step_kernel_ms"] / joined["median_ms"]).clip(lower=0)
    return joined.assign(idle_fraction=idle_fraction)


def idle_map(steps: pd.DataFrame, profiles: pd.DataFrame) -> Figure | None:
    """Draws the share of a step in which the device waits, size over context, a panel a
    precision.
    """
    rows = idle(steps, profiles)
    if rows.empty:
        return None
    shown = [precision for precision in ("fp32", "bf16") if precision in set(rows["precision"])]
    figure, axes = figures.panels(len(shown), height=2.8)
    for axis, precision in zip(axes, shown, strict=True):
        cells = in_order(select(rows, precision=precision), ["size"])
        table = cells.pivot_table("idle_fraction", "size", "context", sort=False)
        figures.heat_map(axis, table[sorted(table)], percent, precision)
        axis.set_xlabel("context (tokens)")
    return figure


def warmup(records: pd.DataFrame) -> pd.DataFrame:
    """Returns by trace the first step, the steady one, and how far means of ten steps after 0 to 2
    steps are off.
    """
    rows = []
    for record in ok_rows(records).to_dict("records"):
        trace = record["samples"].get("step_ms", [])
        steady = pd.Series(trace[5:] or trace).median()
        line = {"size": record["size"], "phase": record["phase"], "first": trace[0] / steady}
        for skipped in (0, 1, 2):
            window = pd.Series(trace[skipped : skipped + WARMUP_MEASURED_STEPS])
            line[f"off_after_{skipped}"] = window.mean() / steady - 1
        rows.append(line)
    return pd.DataFrame(rows)


def warmup_fact(records: pd.DataFrame) -> facts.Fact:
    """Returns the cost of a first step, and in how many traces a mean after one step is off by more
    than WARM.
    """
    rows = warmup(records)
    if rows.empty:
        return facts.Fact("", missing="the warm-up")
    numbers = {
        "value": facts.Quantity(rows["first"].median(), "×"),
        "total": facts.Quantity(len(rows), "count"),
        "cold": facts.Quantity(int((rows["off_after_0"].abs() > WARM).sum()), "count"),
        "after_two": facts.Quantity(int((rows["off_after_2"].abs() > WARM).sum()), "count"),
    }
    return facts.Fact("warm-up", numbers, small=len(rows) < facts.LEAST_CASES)


def steps_table(executions: pd.DataFrame) -> pd.DataFrame:
    """Returns the step of each size as one CUDA graph, by what was changed."""
    return by_way(select(executions, phase="graph_step", context=LADDER_CONTEXT), "size", LADDER)


def every_session(chapter: Chapter) -> dict[str, list[Record]]:
    """Returns the records of all chapters that may enter a number, with all their sessions."""
    return {name: chapter.of(name).every_record() for name in notebooks.names()}


def call_range(*frames: pd.DataFrame, **case) -> facts.Fact:
    """Returns the least and the most call time of one step over the sessions and sections that
    timed it.
    """
    rows = [
        row
        for frame in frames
        for row in ok_rows(frame, phase="train_step", **case).to_dict("records")
    ]
    times = [time for row in rows for time in verdicts.by_session(row, "median_ms").values()]
    if not times:
        return facts.Fact(facts.case_name(case), missing=f"{facts.case_name(case)}")
    marks = next((mark(row) for row in rows if mark(row)), "")
    numbers = {
        "least": facts.Quantity(min(times), "ms", marks),
        "most": facts.Quantity(max(times), "ms", marks),
    }
    numbers["value"] = numbers["most"]
    return facts.Fact(facts.case_name(case), numbers, time=verdicts.CALL, num_sessions=len(times))


def agreeing(differences: pd.DataFrame) -> list[facts.Fact]:
    """Returns how many device times of another session agree, and how many calls that wait for the
    host.
    """
    shares = sessions.shares(differences) if len(differences) else {}
    return [
        facts.Fact(kind, {"value": facts.Quantity(shares[kind][0], "%")})
        if kind in shares
        else facts.Fact(kind, missing="a row of two sessions of one commit")
        for kind in (verdicts.DEVICE, sessions.WAITING)
    ]


def repeats(differences: pd.DataFrame) -> Figure | None:
    """Draws how far each row of another session lies from the first, a dot a row, by kind of
    time.
    """
    if differences.empty:
        return None
    kinds = [kind for kind in ("device", "sustained", sessions.OTHER_CALLS, sessions.WAITING)]
    figure, (axis,) = figures.panels(1, width=6.4, height=2.6)
    for place, kind in enumerate(kinds):
        values = (
            differences["difference"][differences["kind"] == kind].clip(lower=1e-3).sort_values()
        )
        # Spread in a fixed order, so that the same records give the same picture.
        spread = [place + 0.7 * ((number * 0.618) % 1 - 0.5) for number in range(len(values))]
        axis.scatter(values, spread, s=6, alpha=0.5, color=figures.SERIES[place], linewidths=0)
    axis.axvline(0.05, color="0.4", linewidth=1, linestyle=":")
    axis.set_xscale("log")
    axis.set_xticks(
        [0.001, 0.01, 0.05, 0.1, 0.5, 1], ["≤ 0.1 %", "1 %", "5 %", "10 %", "50 %", "100 %"]
    )
    axis.set_yticks(range(len(kinds)), kinds)
    axis.set_xlabel("slower than the faster of two sessions by")
    return figure


def utilisation(executions: pd.DataFrame, ceilings: pd.DataFrame) -> Figure | None:
    """Draws the model's FLOP rate in a step of one CUDA graph, by size and way, under the sustained
    roof of bf16.
    """
    rows = ok_rows(executions, phase="graph_step", context=LADDER_CONTEXT)
    if rows.empty:
        return None
    figure, (axis,) = figures.panels(1, width=6.4, height=3.0)
    ways = {name: way for name, way in LADDER.items() if way["precision"].startswith("bf16")}
    figures.bars(axis, in_order(rows, ["size"]), "size", ways, "achieved_tflops")
    for row in ok_rows(ceilings, kind="gemm", precision="bf16").to_dict("records"):
        axis.axhline(
            row["sustained_tflops"],
            color="black",
            linestyle="--",
            linewidth=1,
            label="sustained bf16 roof",
        )
    axis.set_ylabel("TFLOP/s of the model")
    figures.finish(figure, [axis], "")
    return figure


def published_steps(steps: pd.DataFrame) -> tuple[facts.Fact, pd.DataFrame]:
    """Returns all published step times that have a case of ours beside them."""
    theirs = published.step_times()
    theirs = theirs[theirs["status"] == "ok"].dropna(subset=["context", "batch"])
    own = select(steps, attention="eager")
    return facts.published(theirs, own, [*CASE, "batch", "compile", "phase"])


def published_frame(steps: pd.DataFrame) -> pd.DataFrame:
    """Returns the rows of `published_steps`, for the CSV."""
    return published_steps(steps)[1]
