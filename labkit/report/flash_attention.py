"""Chapter 06: its figures, and the queries that are its alone. "Ours" is what `impl="auto"` runs
for a shape.
"""

import itertools

import pandas as pd
from matplotlib.figure import Figure

from labkit import published
from labkit.configs import PASSES
from labkit.report import facts, figures
from labkit.report.frame import Row, cell, ok_rows, select, usable

SHAPE = ["batch", "heads", "length", "d_head", "causal"]
IMPLS = {
    "auto": "ours",
    "fa3": "FlashAttention-3",
    "sdpa_cudnn": "cuDNN",
    "triton": "ours (Triton)",
    "sdpa_efficient": "SDPA, efficient",
    "triton_ieee": "ours, CUDA cores",
    "compiled": "compiled",
    "eager": "eager",
}
"""Implementations in the order of the figures, as they are called there; the CSV files have more.
"""

PUBLISHED = {
    "fwd_triton_ms": "ours forward",
    "e2e_triton_ms": "ours forward_backward",
    "fwd_pytorch_ms": "compiled forward",
    "e2e_pytorch_ms": "compiled forward_backward",
}
"""What stands beside a published time."""

NAMES = {"seq_len": "length", "d_model": "d_head", "float32": "fp32", "bfloat16": "bf16"}


def contest(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns the rows with `impl` and `direction`, the words of their phase; "ours" is what `auto`
    runs there.
    """
    frame = frame.reindex(columns=list(dict.fromkeys([*frame, "phase", "is_auto"])))
    words = frame["phase"].astype(str).str.split(" ")
    impl = words.str[0].mask(frame["is_auto"] == 1, "auto")
    return frame.assign(impl=impl.replace(IMPLS), direction=words.str[-1])


def shape_name(row: Row) -> str:
    """Returns the shape of attention: "4×16×4096×128 causal"."""
    *sizes, causal = (row[name] for name in SHAPE)
    return "×".join(map(str, sizes)) + " causal" * causal


def rated(rivals: pd.DataFrame) -> pd.DataFrame:
    """Returns what was timed back to back, with its `shape` in words."""
    rows = usable(contest(rivals), "sustained_tflops")
    return rows.assign(shape=[shape_name(row) for row in rows.to_dict("records")])


def peaks(memory: pd.DataFrame, contests: pd.DataFrame) -> pd.DataFrame:
    """Returns the peaks of forward + backward; "ours" is what `auto` runs there or at the next
    shorter length timed.
    """
    rows = select(memory, phase="forward_backward")
    runs = ok_rows(contests, impl="ours")
    if rows.empty or runs.empty:
        return rows
    runs = runs.assign(ran=runs["phase"].str.split(" ").str[0])[["length", "precision", "ran"]]
    sides = rows.sort_values("length"), runs.sort_values("length")
    joined = pd.merge_asof(*sides, on="length", by="precision")
    impl = joined["impl"].mask(joined["impl"] == joined["ran"], "auto")
    return joined.assign(impl=impl.replace(IMPLS))


def rates(rivals: pd.DataFrame) -> Figure | None:
    """Draws by shape the sustained rate, with a line to the burst, and the work per joule where
    measured.
    """
    rows = rated(rivals)
    if rows.empty:
        return None
    shapes = sorted(set(rows["shape"]))
    impls = [impl for impl, name in IMPLS.items() if name in set(rows["impl"])]
    labels = {"sustained_tflops": "TFLOP/s", "tflop_per_joule": "TFLOP/J"}
    values = [value for value in labels if value in rows]
    shown = itertools.product(values, ("forward", "backward"))
    figure, axes = figures.panels(shown, height=3.2)
    for axis, (value, direction) in axes:
        for place, impl in enumerate(impls):
            line = select(rows, impl=IMPLS[impl], direction=direction)
            heights = [
                shapes.index(shape) + 0.2 * (place - len(impls) / 2 + 0.5)
                for shape in line["shape"]
            ]
            colour, marker, _ = figures.STYLES[impl]
            axis.scatter(line[value], heights, color=colour, marker=marker, label=IMPLS[impl])
            if value == "sustained_tflops":
                axis.hlines(heights, line[value], line["achieved_tflops"], color=colour)
        axis.set_yticks(range(len(shapes)), shapes, fontsize=8)
        axis.tick_params(labelleft=direction == "forward")
        axis.set(xlabel=labels[value], title=direction)
        axis.set_xlim(left=0)
        axis.invert_yaxis()
    return figures.finish(figure)


def flash_benchmarking(speed: pd.DataFrame) -> pd.DataFrame:
    """Returns the table that a course asks for: milliseconds of PyTorch's formula and of our Triton
    kernels, and their ratio, by pass; a status, or "not measured", where there is no time.
    """
    phases = [f"{impl} {name}" for name in PASSES for impl in ("eager", "triton")]
    rows = select(speed, phase=phases, precision=["bf16", "fp32"], d_head=[16, 32, 64, 128])
    rows = rows.assign(text=rows.apply(cell, axis=1))
    table = rows.pivot(index=["precision", "d_head", "length"], columns="phase")
    times = table["median_ms"].reindex(columns=phases)
    table = table["text"].reindex(columns=phases).fillna("not measured")
    for name in PASSES:
        table[f"{name} ratio"] = times[f"eager {name}"] / times[f"triton {name}"]
    return table.reset_index()


def published_times(speed: pd.DataFrame) -> pd.DataFrame:
    """Returns all published times of one causal head that have a case of ours beside them; their
    fp32 allows TF32.
    """
    keys = ["length", "d_head", "precision"]
    theirs = published.load("flash_attention").rename(columns=NAMES)
    theirs["precision"] = theirs["dtype"].map(NAMES)
    theirs = theirs.melt(["gpu", *keys], list(PUBLISHED), "phase", "published_ms").dropna()
    ours = contest(speed)
    ours["phase"] = ours["impl"] + " " + ours["direction"]
    return facts.beside(theirs.replace({"phase": PUBLISHED}), ours, [*keys, "phase"])
