"""What the chapters' figures share: style, one fixed colour per thing shown, gaps for what ran out of memory."""

import contextlib
import io
from collections.abc import Iterator, Sequence
from operator import itemgetter

import matplotlib as mpl
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from labkit.configs import SIZES
from labkit.report.findings import power

_DEEP = sns.color_palette("deep").as_hex()
COLOURS = {
    # precisions and compile modes
    "fp32": _DEEP[0],
    "tf32": _DEEP[1],
    "bf16": _DEEP[2],
    "fp16": _DEEP[3],
    "fp16_unscaled": _DEEP[6],
    "bf16_pure": _DEEP[4],
    # phases
    "inference": _DEEP[7],
    "forward": _DEEP[0],
    "backward": _DEEP[3],
    "forward_backward": _DEEP[4],
    "optimizer_step": _DEEP[5],
    "train_step": _DEEP[8],
    # implementations of attention and of the weighted sum: ours in reds, what materialises the scores in dull tones
    "eager": _DEEP[7],
    "compiled": _DEEP[5],
    "sdpa": "#4d4d4d",
    "sdpa_math": _DEEP[6],
    "sdpa_flash": _DEEP[0],
    "sdpa_cudnn": _DEEP[2],
    "sdpa_efficient": _DEEP[9],
    "flex": _DEEP[4],
    "fa3": _DEEP[1],
    "fa3_deterministic": "#f2b391",
    "tiled": _DEEP[8],
    "triton": "#e8989a",
    "triton_ieee": "#b06a6c",
    "triton_tf32": "#f0bcbd",
    "gluon": _DEEP[3],
    "gluon_unordered": "#5f1417",
    "auto": "#8a1c20",
    # sizes, dark to light
    **dict(zip(SIZES, sns.color_palette("viridis", len(SIZES)).as_hex(), strict=True)),
}
"""One colour per implementation, phase or size, the same in every figure of the report."""

SERIES = _DEEP
"""Colours, by number, of what has no fixed one."""

LINE_STYLES = {"none": "-", "regional": "--", "whole": ":"}

# Set once for the process: a text takes its size when it is made, wherever that happens.
_STYLE = {
    **sns.axes_style("whitegrid"),
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.labelsize": 9,
    "legend.fontsize": 8,
    "figure.dpi": 100,
    "savefig.bbox": "tight",
    "axes.titley": 1.0,  # where it is put anyway; looking for the place takes a third of the drawing
    "svg.hashsalt": "labkit",  # the same records give the same bytes
    "svg.fonttype": "path",  # looks the same without this machine's fonts
    "font.family": "DejaVu Sans",
}
mpl.rcParams.update(_STYLE)


class _Figure(Figure):
    """A figure that is drawn once when it is saved.

    matplotlib draws it twice, the first time only so that the layout is made; here the layout is all that is done.
    """

    def draw(self, renderer) -> None:
        engine = self.get_layout_engine()
        if self.canvas.is_saving() and isinstance(engine, ConstrainedLayoutEngine):
            engine.execute(self)
        else:
            super().draw(renderer)


def panels(num_panels: int, *, num_columns: int = 3, width: float = 3.4, height: float = 2.8) -> tuple[Figure, list]:
    """Returns a figure of `num_panels` axes in rows of `num_columns`."""
    num_columns = min(num_columns, num_panels)
    num_rows = -(-num_panels // num_columns)
    figure = _Figure(figsize=(width * num_columns, height * num_rows), layout="constrained")
    axes = figure.subplots(num_rows, num_columns, squeeze=False).flatten().tolist()
    for unused in axes[num_panels:]:
        unused.remove()
    for axis in axes[:num_panels]:
        for spine in axis.spines.values():
            spine.set_in_layout(False)  # they lie on the edge of the axes, which is laid out; asking each is slow
    return figure, axes[:num_panels]


def context_axis(axis: Axes, contexts: Sequence[int]) -> None:
    """Makes x a log2 axis of context lengths with a tick at each measured one."""
    axis.set_xscale("log", base=2)
    axis.set_xticks(sorted(contexts), [str(context) for context in sorted(contexts)])
    axis.minorticks_off()
    axis.set_xlabel("context (tokens)")


def log_time_axis(axis: Axes, label: str = "time (ms)") -> None:
    """Makes y a log axis with plain numbers at 1, 2 and 5 times each power of ten."""
    axis.set_yscale("log")
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=12))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axis.yaxis.set_minor_locator(NullLocator())
    axis.set_ylabel(label)


def log_scale(axes: Axes, which: str, base: int = 10) -> None:
    """Makes the "x" or "y" axis logarithmic, labelled as 10⁻³: matplotlib's own labels are formulas, slow to set."""
    getattr(axes, f"set_{which}scale")("log", base=base)
    axis = getattr(axes, f"{which}axis")
    axis.set_major_formatter(FuncFormatter(lambda value, _: power(value, base)))
    axis.set_minor_locator(NullLocator())


def line_with_band(axis: Axes, rows: pd.DataFrame, x: str, *, label: str, colour: str, **line) -> None:
    """Draws the median over x with its p20–p80 band; x values that ran out of memory become crosses at the top."""
    columns = [name for name in ("median_ms", "p20_ms", "p80_ms") if name in rows]
    points = sorted(zip(*(rows[name].tolist() for name in (x, "status", *columns)), strict=True), key=itemgetter(0))
    measured = [point for point in points if point[1] == "ok"]
    if measured:
        at, _, median, low, high = zip(*measured, strict=True)
        axis.plot(at, median, color=colour, label=label, marker="o", markersize=3, **line)
        axis.fill_between(at, low, high, color=colour, alpha=0.25, linewidth=0)
    _mark(axis, points, colour)


def mark_failures(axis: Axes, rows: pd.DataFrame, x: str, *, colour: str) -> None:
    """Marks where there is no number: × for out of memory, ? for any other failure, on the upper edge."""
    _mark(axis, list(zip(rows[x].tolist(), rows["status"].tolist(), strict=True)), colour)


def _mark(axis: Axes, points: Sequence[tuple], colour: str) -> None:
    """Marks the failed ones of points whose first two values are x and the status."""
    for marker, statuses in (("$?$", ("error", "timeout")), ("x", ("oom",))):
        if failed := [point[0] for point in points if point[1] in statuses]:
            axis.scatter(
                failed,
                [0.97] * len(failed),
                transform=axis.get_xaxis_transform(),
                marker=marker,
                color=colour,
                s=22,
                zorder=3,
                clip_on=False,
            )


def svg(figure: Figure) -> bytes:
    """Returns the figure as SVG; the same figure gives the same bytes."""
    return _saved(figure, format="svg", metadata={"Date": None, "Creator": None})


def png(figure: Figure, dpi: int = 80) -> bytes:
    """Returns the figure as PNG, for the outputs kept in a notebook."""
    return _saved(figure, format="png", dpi=dpi, metadata={"Software": None})


def _saved(figure: Figure, **options) -> bytes:
    buffer = io.BytesIO()
    with _texts_set_once():
        figure.savefig(buffer, **options)
    return buffer.getvalue()


@contextlib.contextmanager
def _texts_set_once() -> Iterator[None]:
    """Keeps matplotlib from setting the same text again each time it is asked for its size, eight times on average.

    Every step of the layout asks every tick's label anew, and a quarter of a figure's time goes there. The method is
    private: where a version of matplotlib has none of this name, nothing is kept.
    """
    set_text = getattr(Text, "_get_layout", None)
    if set_text is None:
        yield
        return
    layouts: dict[tuple, object] = {}

    def layout(text: Text, renderer) -> object:
        if text.get_wrap() or text.get_transform_rotates_text():
            return set_text(text, renderer)  # these depend on where the text stands
        key = (
            text.get_text(), hash(text.get_fontproperties()), text.get_rotation(), text.get_rotation_mode(),
            text.get_horizontalalignment(), text.get_verticalalignment(), text._multialignment, text._linespacing,
            text.get_usetex(), text.get_parse_math(), text.get_figure(root=True).dpi, renderer,
        )  # fmt: skip
        if key not in layouts:
            layouts[key] = set_text(text, renderer)
        return layouts[key]

    Text._get_layout = layout
    try:
        yield
    finally:
        Text._get_layout = set_text
