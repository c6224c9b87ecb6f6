"""Chapter 06: its figures, and the queries that are its alone. "Ours" is what `impl="auto"` runs for a shape."""

import itertools

import pandas as pd
from matplotlib.figure import Figure

from labkit import published
from labkit.report import facts, figures
from labkit.report.frame import by_way, cell, ok_rows, select, usable

SHAPE = ["batch", "heads", "length", "d_head", "causal"]
RATED = {"auto": "ours", "fa3": "FlashAttention-3", "sdpa_cudnn": "cuDNN", "triton": "our Triton"}
"""What is timed back to back, in the order of the figure; Triton where it is not what `auto` runs."""

LINES = {
    "auto": "ours",
    "fa3": "FlashAttention-3",
    "sdpa_cudnn": "cuDNN",
    "sdpa_efficient": "SDPA, efficient",
    "triton_ieee": "ours on CUDA cores",
    "compiled": "compiled",
    "eager": "eager",
}
"""What is drawn over the length; the CSV files have all."""

D_HEAD = 64
DIRECTIONS = ("forward", "backward")
PUBLISHED = {
    "fwd_triton_ms": ("Triton", "forward"),
    "e2e_triton_ms": ("Triton", "forward_backward"),
    "fwd_pytorch_ms": ("compiled", "forward"),
    "e2e_pytorch_ms": ("compiled", "forward_backward"),
}
"""Kernel and phase of each published time."""


def contest(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns the rows with `impl` and `direction`, the words of their phase; "auto" is what `auto` runs there."""
    frame = frame.reindex(columns=list(dict.fromkeys([*frame, "phase", "is_auto"])))
    words = frame["phase"].astype(str).str.split(" ")
    impl = words.str[0].mask(frame["is_auto"] == 1, "auto")
    return frame.assign(impl=impl, direction=words.str[-1])


def one_head(speed: pd.DataFrame) -> pd.DataFrame:
    """Returns forward + backward of one causal head of D_HEAD, by length."""
    return select(contest(speed), d_head=D_HEAD, direction="forward_backward")


def rated(rivals: pd.DataFrame) -> pd.DataFrame:
    """Returns what was timed back to back, with its `shape` in words."""
    rows = usable(contest(rivals), "sustained_tflops")
    return rows.assign(
        shape=[
            "×".join(str(row[name]) for name in SHAPE[:4]) + " causal" * row["causal"]
            for row in rows.to_dict("records")
        ]
    )


def peaks(memory: pd.DataFrame, speed: pd.DataFrame) -> pd.DataFrame:
    """Returns the peaks of forward + backward; "auto" runs what it does at the next shorter length timed."""
    rows = select(memory, phase="forward_backward")
    runs = ok_rows(one_head(speed), impl="auto")
    if rows.empty or runs.empty:
        return rows
    runs = runs.assign(ran=runs["phase"].str.split(" ").str[0])
    found = pd.merge_asof(
        rows.sort_values("length"),
        runs.sort_values("length")[["length", "precision", "ran"]],
        on="length",
        by="precision",
    )
    return found.assign(
        impl=found["impl"].mask(found["impl"] == found["ran"], "auto"),
        peak_mib=found["peak_bytes"] / 2**20,
    )


def by_length(frame: pd.DataFrame, value: str, label: str) -> Figure | None:
    """Draws `value` over the length, a panel a precision, a line an implementation."""
    rows = select(frame, impl=list(LINES), precision=["bf16", "fp32"])
    if ok_rows(rows).empty:
        return None
    shown = list(dict.fromkeys(rows["precision"]))
    figure, axes = figures.panels(len(shown), height=3.0)
    for axis, precision in zip(axes, shown, strict=True):
        panel = select(rows, precision=precision)
        for impl, name in LINES.items():
            line = select(panel, impl=impl)
            style = figures.STYLES[impl]
            figures.line_with_band(axis, line, "length", label=name, style=style, y=value)
        figures.context_axis(axis, panel["length"].unique(), "length (tokens)")
        figures.log_time_axis(axis, label)
        axis.set_title(precision)
    figures.finish(figure, axes, "")
    return figure


def rates(rivals: pd.DataFrame) -> Figure | None:
    """Draws by shape the sustained rate, with a line up to the burst, and the work done per joule where measured."""
    rows = rated(rivals)
    if rows.empty:
        return None
    shapes = sorted(set(rows["shape"]))
    labels = {"sustained_tflops": "TFLOP/s", "tflop_per_joule": "TFLOP/J"}
    values = [value for value in labels if value in rows]
    figure, axes = figures.panels(2 * len(values), height=0.8 + 0.3 * len(shapes))
    shown = itertools.product(values, DIRECTIONS)
    for axis, (value, direction) in zip(axes, shown, strict=True):
        for place, (impl, name) in enumerate(RATED.items()):
            line = select(rows, impl=impl, direction=direction)
            style = figures.STYLES[impl]
            heights = [shapes.index(shape) + 0.2 * (place - 1.5) for shape in line["shape"]]
            look = {"color": style.colour, "marker": style.marker}
            axis.scatter(line[value], heights, s=20, label=name, **look)
            if value == "sustained_tflops":
                axis.hlines(heights, line[value], line["achieved_tflops"], color=style.colour)
        names = shapes if direction == "forward" else [""] * len(shapes)
        axis.set_yticks(range(len(shapes)), names, fontsize=8)
        axis.set(xlabel=labels[value], title=direction)
        axis.set_xlim(left=0)
        axis.invert_yaxis()
    figures.finish(figure, axes, "")
    return figure


def sustained_table(rivals: pd.DataFrame) -> pd.DataFrame:
    """Returns the sustained TFLOP/s of ours, FlashAttention-3 and cuDNN by shape and direction."""
    ways = {
        f"{direction}: {RATED[impl]}": {"impl": impl, "direction": direction}
        for direction in DIRECTIONS
        for impl in ("auto", "fa3", "sdpa_cudnn")
    }
    return by_way(rated(rivals), "shape", ways, lambda row: cell(row, "sustained_tflops"))


def published_times(speed: pd.DataFrame) -> tuple[facts.Fact, pd.DataFrame]:
    """Returns all published times of one causal head that have a case of ours beside them; in fp32 they allow TF32."""
    table = published.load("flash_attention")
    table = table.rename(columns={"seq_len": "length", "d_model": "d_head"})
    table["precision"] = table["dtype"].map({"float32": "fp32", "bfloat16": "bf16"})
    keys = ["kernel", "length", "d_head", "precision", "phase"]
    theirs = [
        table.assign(kernel=kernel, phase=phase, published_ms=table[column])
        for column, (kernel, phase) in PUBLISHED.items()
    ]
    rows = contest(speed)
    kernels = rows["impl"].map({"auto": "Triton", "compiled": "compiled"})
    ours = rows.assign(kernel=kernels, phase=rows["direction"])
    theirs = pd.concat(theirs)[["gpu", *keys, "published_ms"]].dropna()
    return facts.published(theirs, ours, keys)


def published_frame(speed: pd.DataFrame) -> pd.DataFrame:
    """Returns the rows of `published_times`, for the CSV."""
    return published_times(speed)[1]
