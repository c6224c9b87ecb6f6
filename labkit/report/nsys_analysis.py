"""Chapter 02: its figures, and the queries that are its alone. Times of kernels are device
times.
"""

import pandas as pd
from matplotlib.figure import Figure

from labkit.configs import SIZES
from labkit.report import figures
from labkit.report.frame import in_order, ok_rows, only, select

CASE = ["size", "context", "precision", "attention", "phase"]
KEPT = [*CASE, "batch", "status", "timer_method", "disturbed"]
NAMES = {
    "phase": "part",
    "short_name": "kernel",
    "kernel_class": "class",
}
CORE = "inference/block/attention/core"
"""The range of attention between its projections."""


def recorded(table: dict) -> pd.DataFrame:
    """Returns a table as the experiment had it, from its recorded columns."""
    columns = {}
    for column, values in table.items():
        if isinstance(values, dict):
            values = [values["names"][place] for place in values["places"]]
        columns[column] = values
    return pd.DataFrame(columns)


def tables(frame: pd.DataFrame, name: str) -> pd.DataFrame:
    """Returns a table of all captured steps, each row with its case; `part` is the pass within the
    step.
    """
    parts = [pd.DataFrame(columns=[*KEPT, *NAMES.values(), "path", "total_us", "launches"])]
    for row in ok_rows(frame).to_dict("records"):
        table = recorded(row["observed"]["tables"][name]).rename(columns=NAMES)
        parts.append(table.assign(**{key: row.get(key, "") for key in KEPT}))
    return pd.concat(parts[1:] or parts)


def by_class(rows: pd.DataFrame) -> pd.DataFrame:
    """Returns the kernel time of each case: by class <class>_share and <class>_ms, total_ms,
    rest_ms (no matmul).

    "way" names precision and attention.
    """
    sums = rows.pivot_table("total_us", KEPT, "class", aggfunc="sum")
    sums = sums.reindex(columns=[*figures.CLASS_COLOURS])
    total = sums.sum(axis=1)
    shares = sums.div(total, axis=0).add_suffix("_share")
    times = sums.assign(rest=total - sums["matmul"], total=total).div(1e3).add_suffix("_ms")
    rows = shares.join(times).reset_index()
    suffix = rows["attention"].map({"eager": "", "auto": ", FlashAttention"})
    rows["way"] = rows["precision"] + suffix
    return in_order(rows.sort_values("way"), ["precision", "size", "context"])


def attention(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns `by_class` of what lies between attention's projections in all blocks of an inference
    pass.

    softmax_gb_per_s and matmul_gb_per_s: the fewest bytes that move with the scores in memory, over
    the time.
    """
    rows = tables(frame, "ranges")
    rows = by_class(rows[rows["path"].str.startswith(CORE)])
    sizes = rows["size"].map(SIZES)
    heads = sizes.map(lambda size: size.num_layers * size.num_heads)
    scores = rows["batch"] * heads * rows["context"] ** 2 / 1e6
    # By score: softmax reads and writes fp32; the products write and read it, and q, k, v and the
    # output.
    d_head = sizes.map(lambda size: size.d_head)
    element_bytes = rows["precision"].map({"fp32": 4, "bf16": 2})
    product_bytes = element_bytes * (2 + 4 * d_head / rows["context"])
    return rows.assign(
        softmax_gb_per_s=8 * scores / rows["softmax_ms"],
        matmul_gb_per_s=product_bytes * scores / rows["matmul_ms"],
    )


def kernels(frame: pd.DataFrame, count: int = 10, **case) -> pd.DataFrame:
    """Returns of each pass the recorded kernels with most time, the first first."""
    rows = tables(frame, "kernels")
    rows["total_ms"] = rows["total_us"] / 1e3
    rows["mean_us"] = rows["total_us"] / rows["launches"]
    keys = [*CASE, "part"]
    rows = select(rows, **case).sort_values([*keys, "total_us"], ascending=False)
    return rows.groupby(keys, sort=False).head(count)


def kernels_table(frame: pd.DataFrame, **case) -> pd.DataFrame:
    """Returns the three kernels with most time in forward and in backward."""
    rows = kernels(frame, 3, part=["forward", "backward"], **case)
    rows["kernel"] = "`" + rows["kernel"] + "`"
    rows["ms"] = rows["total_ms"].round(1)
    return rows[["part", "kernel", "launches", "ms"]]


def timeline(frame: pd.DataFrame, **case) -> Figure | None:
    """Draws a training step launch by launch, kernels above phases and blocks, and one block
    closer; None without one that this version recorded.
    """
    row = only(frame, **case)
    if row is None:
        return None
    table = row["observed"]["tables"]["timeline"]
    if "class_names" in table:  # of 0.3.0, where phases and classes were numbers
        return None
    launches = recorded(table)
    launches["end_us"] = launches["start_us"] + launches["duration_us"]
    blocks = launches[launches["block"] >= 0]
    middle = blocks["block"].max() // 2
    closer = select(blocks, phase="forward", block=middle)
    figure, axes = figures.panels((launches, closer), height=1.4, num_columns=1)
    for axis, shown in axes:
        for name, rows in shown.groupby("kernel_class"):
            spans = rows[["start_us", "duration_us"]].to_numpy() / 1e3
            axis.broken_barh(
                spans,
                (-0.4, 0.8),
                label=name,
                color=figures.CLASS_COLOURS[name],
                linewidth=0,
                rasterized=True,
            )
        axis.set_xlabel("time on the device, profiled (ms)")
        axis.grid(visible=False)
    above, below = figure.axes
    for height, rows, column in ((1, launches, "phase"), (2, blocks, "block")):
        spans = rows.groupby(["phase", column], sort=False)
        start = spans["start_us"].min() / 1e3
        width = spans["end_us"].max() / 1e3 - start
        bars = above.barh(height, width, 0.8, start, color="0.85", edgecolor="white")
        labels = start.index.get_level_values(1)
        above.bar_label(bars, labels, label_type="center", fontsize=8)
    above.set_yticks([0, 1, 2], ["kernels", "phase", "block"])
    above.invert_yaxis()
    below.set_yticks([0], [f"block {middle}"])
    return figures.finish(figure)
