"""Chapter 05: its figures, and the queries that are its alone."""

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from labkit import accounting, published
from labkit.report import facts, figures, verdicts
from labkit.report.frame import by_way, in_order, ok_rows, select, usable

FUSED = ["sdpa_flash", "sdpa_cudnn", "sdpa_efficient"]
IMPLS = {
    "eager": "eager",
    "compiled": "compiled, 3-D",
    "compiled_heads": "compiled, 4-D",
    "sdpa_math": "SDPA math",
    "sdpa_flash": "SDPA flash",
    "sdpa_cudnn": "SDPA cuDNN",
    "sdpa_efficient": "SDPA efficient",
}
"""Implementations as the chapter calls them."""

CASE = ["impl", "precision", "d_head", "length", "phase"]
SHAPE = ["batch", "length", "d_head", "precision"]
LONG = {"d_head": 64, "length": 16384}
ELEMENT_BYTES = {"fp32": 4, "tf32": 4, "bf16": 2}

HOST_SHARE = 0.5
"""A pass whose kernels the host issues in a smaller share of its call does not wait for the host.
"""

COMPILED_PASSES = {"forward": 4, "backward": 7}
"""Passes over the scores that a compiled formula needs at least: its products' and one fused
kernel's between them.

Forward: written by the product, read and written by the softmax, read by the product. Backward: the
probabilities read for v; their gradient written; both read and one written by the softmax's
backward; one read each for q and k.
"""

PUBLISHED = {
    "none": ("eager", "fp32"),
    "compile": ("compiled", "fp32"),
    "compile_tf32": ("compiled", "tf32"),
}
"""Implementation and precision of each published variant."""


def timed(calls: pd.DataFrame) -> pd.DataFrame:
    """Returns the passes whose call time is the device's: of 1 ms or more, and not waiting for the
    host.
    """
    rows = ok_rows(calls)
    kept = [
        row["median_ms"] >= facts.LEAST_MS and verdicts.issued(row) < HOST_SHARE
        for row in rows.to_dict("records")
    ]
    return rows[kept] if kept else rows


def case_name(row: dict) -> str:
    """Returns a pass in words, but for its head dimension."""
    return facts.case_name({name: row[name] for name in CASE if name != "d_head"})


def is_replaced(row: dict) -> bool:
    """Returns whether the compiler put SDPA in the formula's place."""
    return row["num_replacements"] > 0


def over_length(
    rows: pd.DataFrame,
    panel: str,
    value: str,
    label: str,
    limit: float,
) -> Figure | None:
    """Draws a value over the length: a panel per value of `panel`, a line an implementation, dotted
    at `limit`.
    """
    if rows[value].isna().all():
        return None
    rows = in_order(rows, [panel, "impl"])
    lengths = sorted(rows["length"].unique())
    ticks = [lengths[0], lengths[len(lengths) // 2], lengths[-1]]
    figure, axes = figures.panels(rows[panel].nunique(), height=3.2)
    for axis, (name, shown) in zip(axes, rows.groupby(panel, sort=False), strict=True):
        if axis is not axes[0]:
            axis.sharey(axes[0])
        for impl, line in shown.groupby("impl", sort=False):
            figures.line_with_band(
                axis,
                line,
                "length",
                label=IMPLS[impl],
                style=figures.STYLES[impl],
                y=value,
            )
        axis.axhline(limit, color="black", linewidth=1, linestyle=":")
        figures.context_axis(axis, lengths, "length (queries = keys)")
        axis.set_xticks(ticks, map("{:,}".format, ticks))
        figures.log_time_axis(axis, label)
        axis.yaxis.set_major_locator(LogLocator())
        axis.set_title(name)
        axis.label_outer()
    figures.finish(figure, axes, "", num_columns=3)
    return figure


def times_table(calls: pd.DataFrame) -> pd.DataFrame:
    """Returns the time of every implementation at the long length."""
    ways = {
        "bf16 forward": {"precision": "bf16", "phase": "forward"},
        "bf16 backward": {"precision": "bf16", "phase": "backward"},
        "fp32 forward": {"precision": "fp32", "phase": "forward"},
    }
    return by_way(select(calls, **LONG), "impl", ways).replace({"impl": IMPLS})


def predicted(calls: pd.DataFrame, ceilings: pd.DataFrame) -> pd.DataFrame:
    """Returns the timed passes with the time that their passes over the scores and their products
    should take.

    A kernel between the products takes its passes at the copy rate; a product its one pass, or its
    FLOPs at the matrix product's rate, whichever is longer. A fused kernel makes no pass; its
    backward computes the scores again.

    Columns added: passes, elementwise_ms, products_ms, predicted_ms.
    """
    rows = select(timed(calls), impl=["eager", "compiled", *FUSED])
    rows = in_order(usable(rows, *CASE, "batch", "median_ms"), CASE)
    copy = usable(ceilings, "achieved_gb_per_s")["achieved_gb_per_s"].max()
    rates = usable(ceilings, "precision", "achieved_tflops").set_index("precision")
    kind = calls.attrs.get("device_kind", "cuda")
    eager = {
        phase: accounting.attention_score_passes(phase, device_kind=kind)
        for phase in COMPILED_PASSES
    }
    passes = rows["phase"].map(eager)
    passes = passes.where(rows["impl"] == "eager", rows["phase"].map(COMPILED_PASSES))
    passes = passes.mask(rows["impl"].isin(FUSED), 0)
    again = (passes == 0) & (rows["phase"] == "backward")
    num_products = rows["phase"].map({"forward": 2, "backward": 4}) + again
    scores = rows["batch"] * rows["length"] ** 2
    pass_ms = scores * rows["precision"].map(ELEMENT_BYTES) / copy / 1e6
    rate = rows["precision"].map(rates["achieved_tflops"])
    product_ms = 2 * scores * rows["d_head"] / rate / 1e9
    between = pass_ms * (passes - num_products).clip(lower=0)
    products = num_products * product_ms.clip(lower=pass_ms * (passes > 0))
    rows = rows.assign(
        passes=passes,
        elementwise_ms=between,
        products_ms=products,
        predicted_ms=between + products,
    )
    return rows.dropna(subset="predicted_ms")


def passes_figure(predictions: pd.DataFrame) -> Figure | None:
    """Draws the predicted time of a bf16 pass at the long length, and as diamonds the measured."""
    rows = select(predictions, precision="bf16", **LONG).replace({"impl": IMPLS})
    rows = rows.rename(columns={"products_ms": "matmul_ms"})
    figure = figures.class_bars(rows, "impl", "_ms", "call time (ms)", panel="phase")
    if figure is None:
        return None
    places = {impl: place for place, impl in enumerate(rows["impl"].unique())}
    for axis in figure.axes:
        of_phase = select(rows, phase=axis.get_title())
        axis.plot(of_phase["median_ms"], of_phase["impl"].map(places), "D", color="black")
    return figure


def counted(calls: pd.DataFrame) -> pd.DataFrame:
    """Returns what each forward pass keeps for backward, `saved_bytes`, with its closed form,
    `predicted_bytes`.
    """
    rows = usable(calls, "impl", "saved_bytes", *SHAPE)
    fused = rows["impl"].isin(FUSED) | (rows.get("num_replacements", 0) > 0)
    kinds = rows["impl"].map({"sdpa_math": "math"}).fillna("eager").mask(fused, "fused")
    forms = [
        accounting.attention_saved_bytes(kind, *shape, ELEMENT_BYTES[precision])
        for kind, (*shape, precision) in zip(kinds, rows[SHAPE].to_numpy(), strict=True)
    ]
    return rows.assign(predicted_bytes=forms)


def published_times(calls: pd.DataFrame) -> tuple[facts.Fact, pd.DataFrame]:
    """Returns the published times that have a timed pass of the same formula, precision and shape
    beside them.
    """
    theirs = published.load("attention_pytorch")
    names = {"batch_size": "batch", "d_model": "d_head", "seq_len": "length", "pass": "phase"}
    theirs = theirs.rename(columns=names | {"ms_per_pass": "published_ms"})
    theirs = theirs[theirs["status"] == "ok"]
    theirs["impl"], theirs["precision"] = zip(*theirs["variant"].map(PUBLISHED), strict=True)
    keys = [*CASE, "batch"]
    # The baseline is printed in two tables of the same source.
    return facts.published(theirs.drop_duplicates(["gpu", *keys]), timed(calls), keys)


def published_frame(calls: pd.DataFrame) -> pd.DataFrame:
    """Returns the rows of `published_times`, for the CSV."""
    return published_times(calls)[1]
