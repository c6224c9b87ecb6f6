"""Chapter 04: its figures, and the queries that are its alone."""

import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from labkit import accounting, published
from labkit.configs import STEP_WAYS, model_config
from labkit.report import facts, figures, plan
from labkit.report.chapter import Chapter
from labkit.report.frame import in_order, ok_rows, only, select, usable
from labkit.report.text import number, percent

GIB = 2**30
CATEGORIES = {
    "other": "#999999",
    "parameters": "#0072b2",
    "optimizer state": "#56b4e9",
    "gradients": "#5d3a9b",
    "activations": "#009e73",
    "temporary": "#e69f00",
}
"""What an allocation can be, from the bottom of a timeline to its top."""

BLOCK = {"part": "block", "code": "eager"}


PLANNED = {"memory": "GiB", "time": "ms"}


def planned(chapter: Chapter) -> pd.DataFrame:
    """Returns how far the plans of a GPU's recorded steps are off; a step's time is planned from
    steps of other sizes. Of the columns `what` is a key of PLANNED.
    """
    device = [chapter.of("01_benchmarking")]
    samples = plan.samples(device)
    frames = [plan.errors(samples, "size", way).assign(what="time") for way in STEP_WAYS]
    if chapter.device_kind == "cuda":
        frames.append(plan.memory_errors(device).assign(what="memory"))
    return pd.concat(frames, ignore_index=True)


def planned_figure(errors: pd.DataFrame) -> Figure:
    """Draws by how much planned memory and time are off, over what was measured."""
    figure, axes = figures.panels(errors.groupby("what"), height=2.6)
    for axis, (what, rows) in axes:
        sns.scatterplot(
            rows,
            x="measured",
            y="error",
            hue="way",
            hue_order=STEP_WAYS,
            style="way",
            style_order=STEP_WAYS,
            ax=axis,
            legend=axis is figure.axes[-1],
        )
        axis.axhline(0, color="0.3", linewidth=0.8)
        axis.set_xscale("log")
        axis.xaxis.set_major_formatter("{x:,g}")
        axis.yaxis.set_major_formatter(PercentFormatter(1))
        axis.set(xlabel=f"measured {what} ({PLANNED[what]})", ylabel="planned is off by")
    sns.move_legend(figure.axes[-1], "upper left", bbox_to_anchor=(1, 1))
    return figure


def parts(peaks: pd.DataFrame, precisions: pd.DataFrame, plans: pd.DataFrame) -> pd.DataFrame:
    """Returns GiB of one step of 2.7b, a row a way, NaN where it was not measured: weights and
    moments by closed form, and the rest of its peak.
    """
    config = model_config("2.7b")
    short = {"size": "2.7b", "context": 512, "phase": "train_step"}
    long = {"size": "2.7b", "context": 2048, "attention": "sdpa_flash"}
    ways = {
        "fp32": only(peaks, precision="fp32", **short),
        "autocast": only(peaks, precision="bf16", **short),
        "pure bf16": only(precisions, precision="bf16_pure", **short),
        "FlashAttention,\nautocast,\n2,048": only(plans, plan="none", **long),
        "+ recomputed,\nautocast,\n2,048": only(plans, plan="1", **long),
    }
    rows = {}
    for way, row in ways.items():
        if row:
            share = 0.5 if way == "pure bf16" else 1.0
            weights = share * accounting.parameter_bytes(config)
            moments = share * accounting.optimizer_state_bytes(config)
            rest = row["peak_bytes"] - weights - moments
            rows[way] = {"weights": weights, "moments": moments, "gradients, activations": rest}
    return pd.DataFrame.from_dict(rows, orient="index").reindex(ways) / GIB


def parts_figure(
    peaks: pd.DataFrame, precisions: pd.DataFrame, plans: pd.DataFrame
) -> Figure | None:
    """Draws what the peak of one step of 2.7b is made of, a bar a way."""
    rows = parts(peaks, precisions, plans)
    if rows.empty:
        return None
    figure, axis = figures.panel(height=3.2)
    rows.plot.bar(
        ax=axis,
        stacked=True,
        ylabel="peak (GiB)",
        color=["#0072b2", "#56b4e9", "#009e73"],
        width=0.6,
        rot=0,
        legend=False,
    )
    axis.bar_label(axis.containers[-1], rows.sum(axis=1, min_count=1).map(number), padding=3)
    axis.margins(y=0.12)
    axis.grid(visible=False, axis="x")
    return figures.finish(figure)


def recording(timelines: pd.DataFrame) -> pd.DataFrame:
    """Returns the recorded training step that the figure and its facts are of, the first in fp32,
    else in bf16, with the shares of its peak: activations_fraction, gradients_fraction.
    """
    rows = usable(select(timelines, phase="train_step"), "precision", "peak_bytes")
    row = in_order(rows, ["precision"]).head(1)
    shares = {
        f"{part}_fraction": row.get(f"{part}_at_peak_bytes", 0) / row["peak_bytes"]
        for part in ("activations", "gradients")
    }
    return row.assign(**shares)


def timeline_figure(timelines: pd.DataFrame) -> Figure | None:
    """Draws the memory in use over the allocations and frees of one training step, by category."""
    rows = recording(timelines)
    if rows.empty:
        return None
    (row,) = rows.to_dict("records")
    figure, axis = figures.panel(height=3.0)
    samples = row["samples"]
    layers = {name: samples[f"{name}_mib"] for name in CATEGORIES if samples.get(f"{name}_mib")}
    gib = pd.DataFrame(layers, samples["event"]) / 1024
    gib.plot.area(ax=axis, color=CATEGORIES, linewidth=0, legend=False)
    peak = row["peak_bytes"] / GIB
    for phase, begin, _ in row["observed"]["phases"]:
        late = begin > 0.8 * row["num_events"]
        axis.axvline(begin, color="0.3", linewidth=0.8, linestyle=":")
        axis.text(begin, 1.05 * peak, f" {phase} ", ha="right" if late else "left")
    axis.set(
        xlim=(0, row["num_events"]),
        ylim=(0, 1.15 * peak),
        xlabel="allocations and frees of one step (number)",
        ylabel="in use (GiB)",
    )
    axis.grid(visible=False)
    return figures.finish(figure)


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
    order = ["part", "code", "saved_bytes"]
    frame = pd.DataFrame(rows, columns=None if rows else order)
    return frame.sort_values(order, ascending=False)


def kept(blocks: pd.DataFrame) -> pd.DataFrame:
    """Returns the eager block with input_ratio, what it keeps over the bytes of its input, and
    five_fraction, the share of its five largest.
    """
    rows = usable(select(blocks, **BLOCK), "saved_bytes", "stream_bytes")
    largest = select(residuals(blocks), **BLOCK)["saved_bytes"].head(5).sum()
    ratio = rows["saved_bytes"] / rows["stream_bytes"]
    return rows.assign(input_ratio=ratio, five_fraction=largest / rows["saved_bytes"])


def residuals_table(blocks: pd.DataFrame) -> pd.DataFrame:
    """Returns the five operators of an eager block that keep the most."""
    rows = select(residuals(blocks), **BLOCK).head(5)
    total = ok_rows(blocks, **BLOCK)["saved_bytes"].sum()
    keeps = [str(facts.Quantity(saved, "bytes")) for saved in rows["saved_bytes"]]
    shares = (rows["saved_bytes"] / total).map(percent)
    return rows[["operator", "module"]].assign(**{"keeps": keeps, "of the block": shares})


def published_peaks(peaks: pd.DataFrame) -> pd.DataFrame:
    """Returns all published peaks that have a case of ours beside them."""
    names = {"context_length": "context", "peak_gib": "published_gib"}
    theirs = published.load("memory_peaks").rename(columns=names).drop(columns="status")
    theirs["precision"] = theirs["dtype"].map({"float32": "fp32", "bfloat16_autocast": "bf16"})
    theirs["size"] = theirs["model"].map({"xl": "xl-2025"})
    return facts.beside(theirs, peaks, ["size", "context", "precision", "phase"], "gib")
