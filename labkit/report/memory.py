"""Chapter 04: its figures, and the queries that are its alone."""

from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from labkit import accounting, published
from labkit.configs import model_config
from labkit.report import facts, figures
from labkit.report.frame import in_order, ok_rows, only, select
from labkit.report.text import number, percent

GIB = 2**30
WITHIN = 0.03
"""Relative error up to which a predicted peak counts as met."""

CATEGORIES = {
    "other": "#999999",
    "parameters": "#0072b2",
    "optimizer state": "#56b4e9",
    "gradients": "#5d3a9b",
    "activations": "#009e73",
    "temporary": "#e69f00",
}
"""What an allocation can be, from the bottom of a timeline to its top."""

FLASH = {"attention": "sdpa_flash"}
LONG = {"size": "2.7b", "context": 2048}


def predicted(peaks: pd.DataFrame) -> pd.DataFrame:
    """Returns the measured peaks with `predicted_bytes`, the closed form of the tensors alive at
    the largest moment.
    """
    rows = ok_rows(peaks).to_dict("records")
    known = {"attention": "eager", "device_kind": peaks.attrs.get("device_kind", "cuda")}
    for row in rows:
        case = (model_config(row["size"]), row["batch"], row["context"], row["phase"])
        row["predicted_bytes"] = accounting.peak_bytes(*case, precision=row["precision"], **known)
    return pd.DataFrame(rows)


def agreement(peaks: pd.DataFrame) -> facts.Fact:
    """Returns how many predictions lie within WITHIN of the allocator's peak; of models too small
    for findings none.
    """
    rows = predicted(peaks)
    if len(rows):
        rows = rows[rows["peak_bytes"] >= facts.LEAST_BYTES]
    if rows.empty:
        return facts.Fact("", missing="a peak of 100 MiB or more")
    return facts.agreement(
        rows,
        "peak_bytes",
        "predicted_bytes",
        WITHIN,
        lambda row: facts.case_name({"size": row["size"]}),
    )


def peak_ratio(base: dict[str, Any] | None, other: dict[str, Any] | None, plain: str) -> facts.Fact:
    """Returns the comparison of two peaks that stand in different frames."""
    if base is None or other is None:
        return facts.Fact(plain, missing=plain)
    return facts.compare_rows(base, other, value="peak_bytes", plain=plain)


def parts(peaks: pd.DataFrame, precisions: pd.DataFrame, plans: pd.DataFrame) -> pd.DataFrame:
    """Returns one step of 2.7b in several ways: `way`, peak, weights and moments by closed form,
    and the rest.
    """
    config = model_config("2.7b")
    short = {"size": "2.7b", "context": 512, "phase": "train_step"}
    ways: dict[str, tuple[dict[str, Any] | None, float]] = {
        "fp32": (only(peaks, precision="fp32", **short), 1.0),
        "autocast": (only(peaks, precision="bf16", **short), 1.0),
        "pure bf16": (only(precisions, precision="bf16_pure", **short), 0.5),
        "FlashAttention,\n2,048": (only(plans, plan="none", **FLASH, **LONG), 1.0),
        "recomputed,\n2,048": (only(plans, plan="1", **FLASH, **LONG), 1.0),
    }
    rows = []
    for way, (row, share) in ways.items():
        if row:
            weights = share * accounting.parameter_bytes(config)
            moments = share * accounting.optimizer_state_bytes(config)
            rest = row["peak_bytes"] - weights - moments
            rows.append(
                {"way": way, "weights": weights, "moments": moments, "gradients, activations": rest}
            )
    return pd.DataFrame(rows)


def parts_figure(
    peaks: pd.DataFrame, precisions: pd.DataFrame, plans: pd.DataFrame
) -> Figure | None:
    """Draws what the peak of one step of 2.7b is made of, a bar a way."""
    rows = parts(peaks, precisions, plans)
    if rows.empty:
        return None
    figure, (axis,) = figures.panels(1, width=6.4, height=3.2)
    below = pd.Series(0.0, index=rows.index)
    for layer, colour in zip(rows.columns[1:], ("#0072b2", "#56b4e9", "#009e73"), strict=True):
        heights = rows[layer] / GIB
        axis.bar(rows["way"], heights, bottom=below, width=0.6, label=layer, color=colour)
        below += heights
    for place, height in enumerate(below):
        axis.annotate(
            number(height), (place, height), xytext=(0, 3), textcoords="offset points", ha="center"
        )
    axis.set_ylabel("peak (GiB)")
    axis.margins(y=0.12)
    axis.grid(visible=False, axis="x")
    figures.finish(figure, [axis], "")
    return figure


def recording(timelines: pd.DataFrame) -> dict[str, Any] | None:
    """Returns the recorded training step that the figure and its facts are of: the first in fp32,
    else in bf16.
    """
    rows = (
        in_order(ok_rows(timelines, phase="train_step"), ["precision"]).to_dict("records")
        if len(timelines)
        else []
    )
    return rows[0] if rows else None


def timeline_figure(timelines: pd.DataFrame) -> Figure | None:
    """Draws the memory in use over the allocations and frees of one training step, by category."""
    row = recording(timelines)
    if row is None:
        return None
    figure, (axis,) = figures.panels(1, width=6.4, height=3.0)
    layers = {name: row["samples"].get(f"{name}_mib") for name in CATEGORIES}
    layers = {name: [value / 1024 for value in values] for name, values in layers.items() if values}
    figures.stack(axis, row["samples"]["event"], layers, CATEGORIES)
    peak = row["peak_bytes"] / GIB
    for phase, begin, _ in row["observed"]["phases"]:
        late = begin > 0.8 * row["num_events"]
        axis.axvline(begin, color="0.3", linewidth=0.8, linestyle=":")
        axis.text(begin, 1.05 * peak, f" {phase} ", ha="right" if late else "left")
    axis.set(xlim=(0, row["num_events"]), ylim=(0, 1.15 * peak))
    axis.set(xlabel="allocations and frees of one step (number)", ylabel="in use (GiB)")
    axis.grid(visible=False)
    return figure


def at_peak(timelines: pd.DataFrame) -> facts.Fact:
    """Returns what the recorded step holds at its peak: the peak, and the shares of activations and
    gradients.
    """
    row = recording(timelines)
    if row is None:
        return facts.Fact("", missing="a recording of a training step")
    shares = {
        part: row.get(f"{part}_at_peak_bytes", 0) / row["peak_bytes"]
        for part in ("activations", "gradients")
    }
    numbers = {part: facts.Quantity(share, "%") for part, share in shares.items()}
    case = facts.case_name({key: row[key] for key in ("size", "precision", "context")})
    small = row["peak_bytes"] < facts.LEAST_BYTES
    numbers |= {"value": facts.Quantity(row["peak_bytes"], "bytes"), "case": case}
    return facts.Fact(case, numbers | {"phase": row["observed"]["peak_phase"]}, small=small)


def residuals(blocks: pd.DataFrame) -> pd.DataFrame:
    """Returns what each operator of a part of a block keeps for backward, the most first, without
    what stays anyway.
    """
    rows = [
        {key: row[key] for key in ("part", "code", "context")} | group
        for row in ok_rows(blocks).to_dict("records")
        for group in row["observed"]["residuals"]
        if group["saved_bytes"]
    ]
    frame = pd.DataFrame(rows)
    return (
        frame.sort_values(["part", "code", "saved_bytes"], ascending=False) if len(frame) else frame
    )


def kept(blocks: pd.DataFrame) -> facts.Fact:
    """Returns how many times its input an eager block keeps for backward, and the share of its five
    largest.
    """
    row = only(blocks, part="block", code="eager")
    if row is None:
        return facts.Fact("", missing="what a block keeps")
    largest = select(residuals(blocks), part="block", code="eager")["saved_bytes"].head(5).sum()
    numbers = {
        "value": facts.Quantity(row["saved_bytes"] / row["stream_bytes"], "×"),
        "saved": facts.Quantity(row["saved_bytes"], "bytes"),
        "five": facts.Quantity(largest / row["saved_bytes"], "%"),
    }
    return facts.Fact("one block", numbers, small=row["saved_bytes"] < facts.LEAST_BYTES)


def residuals_table(blocks: pd.DataFrame) -> pd.DataFrame:
    """Returns the five operators of an eager block that keep the most."""
    rows = select(residuals(blocks), part="block", code="eager").head(5)
    total = ok_rows(blocks, part="block", code="eager")["saved_bytes"].sum()
    return pd.DataFrame(
        {
            "operator": row["operator"],
            "module": row["module"],
            "keeps": str(facts.Quantity(row["saved_bytes"], "bytes")),
            "of the block": percent(row["saved_bytes"] / total),
        }
        for row in rows.to_dict("records")
    )


def plans_figure(plans: pd.DataFrame) -> Figure | None:
    """Draws a step's peak over the blocks recomputed together, by attention."""
    single = select(plans, plan=[str(k) for k in range(1, 65)])
    if ok_rows(single).empty:
        return None
    single = single.assign(k=single["plan"].astype(int), gib=single["peak_bytes"] / GIB)
    figure, (axis,) = figures.panels(1, width=6.4, height=2.8)
    names = {"eager": "eager attention", "sdpa_flash": "SDPA's FlashAttention"}
    for attention, rows in single.groupby("attention", sort=False):
        style = figures.STYLES[attention]
        figures.line_with_band(
            axis, rows, "k", label=names.get(attention, attention), style=style, y="gib"
        )
    figures.context_axis(axis, sorted(set(single["k"])), "blocks recomputed together (k)")
    axis.set_ylim(0, 1.1 * single["gib"].max())
    axis.set_ylabel("peak (GiB)")
    figures.finish(figure, [axis], "")
    return figure


def published_peaks(peaks: pd.DataFrame) -> tuple[facts.Fact, pd.DataFrame]:
    """Returns all published peaks that have a case of ours beside them."""
    theirs = published.load("memory_peaks").rename(
        columns={"context_length": "context", "peak_gib": "published_gib"}
    )
    theirs["precision"] = theirs["dtype"].map({"float32": "fp32", "bfloat16_autocast": "bf16"})
    theirs["size"] = theirs["model"].map({"xl": "xl-2025"})
    return facts.published(
        theirs.drop(columns="status"), peaks, ["size", "context", "precision", "phase"], "gib"
    )


def published_frame(peaks: pd.DataFrame) -> pd.DataFrame:
    """Returns the rows of `published_peaks`, for the CSV."""
    return published_peaks(peaks)[1]
