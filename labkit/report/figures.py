"""What the chapters' figures share: style, one fixed colour per thing shown, gaps for what ran out
of memory.
"""

import io
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import matplotlib as mpl
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from labkit.configs import SIZES
from labkit.report.frame import ok_rows, select
from labkit.report.text import power


class Style(NamedTuple):
    """How one thing is drawn in every figure. Where two colours are hard to tell apart, marker or
    dash differ.
    """

    colour: str
    marker: str = "o"
    dash: str = "-"


_SIZE_COLOURS = sns.color_palette("viridis", len(SIZES) + 1).as_hex()[: len(SIZES)]
_MARKERS = "v^osDPX*"
STYLES = {
    # precisions
    "fp32": Style("#0072b2", "o"),
    "tf32": Style("#e69f00", "s", "--"),
    "bf16": Style("#009e73", "D", "-."),
    "fp16": Style("#cc79a7", "^", ":"),
    "fp16_unscaled": Style("#999999", "v", ":"),
    "bf16_pure": Style("#5d3a9b", "P", "--"),
    # phases
    "forward": Style("#0072b2", "o"),
    "backward": Style("#d55e00", "s", "--"),
    "optimizer_step": Style("#e69f00", "^", ":"),
    "train_step": Style("#000000", "P"),
    # implementations of attention: ours in reds, solid; the rest dashed or dotted
    "eager": Style("#7f7f7f", ">"),  # a cross is what ran out of memory
    "compiled": Style("#8c6d31", "s", ":"),
    "compiled_heads": Style("#8c6d31", "D", "-."),
    "sdpa_math": Style("#cc79a7", "v", ":"),
    "sdpa_flash": Style("#0072b2", "o", "--"),
    "sdpa_cudnn": Style("#009e73", "D", "--"),
    "sdpa_efficient": Style("#56b4e9", "^", "-."),
    "flex": Style("#5d3a9b", "P", ":"),
    "fa3": Style("#e69f00", "s", "--"),
    "fa3_deterministic": Style("#f2b391", "s", ":"),
    "tiled": Style("#b0a28f", "v", ":"),
    "triton": Style("#d67a7c", "^"),
    "triton_ieee": Style("#b06a6c", "v", "-."),
    "triton_tf32": Style("#f0bcbd", "^", "--"),
    "gluon": Style("#b2182b", "o"),
    "auto": Style("#8a1c20", "h"),
    # what softmax is compared by
    "time": Style("#d55e00", "o"),
    "bytes": Style("#0072b2", "s", "--"),
    "FLOPs": Style("#000000", "^", ":"),
    **{
        size: Style(*look)
        for size, *look in zip(SIZES, _SIZE_COLOURS, _MARKERS, ["-", "--"] * 4, strict=True)
    },
    "compiled_tf32": Style("#e6ab02", "v", "-."),
}
"""One style per precision, phase, implementation and size, the same in every figure of the report.
"""

SERIES = [
    "#0072b2",
    "#e69f00",
    "#009e73",
    "#d55e00",
    "#5d3a9b",
    "#7f7f7f",
    "#56b4e9",
    "#cc79a7",
    "#8c6d31",
    "#000000",
]
"""Colours, by number, of what has no style of its own."""

CLASS_COLOURS = {
    "matmul": "#0072b2",
    "attention": "#8a1c20",
    "softmax": "#f0e442",
    "elementwise": "#009e73",
    "copy": "#56b4e9",
    "reduction": "#000000",
    "optimizer": "#e69f00",
    "normalisation": "#8c6d31",
    "communication": "#5d3a9b",
    "other": "#b0b0b0",
}
"""Colours of the classes of kernels, in the order in which they are stacked."""

CLASS_HATCHES = {"elementwise": "///", "copy": "...", "optimizer": "\\\\\\"}
"""What tells apart, besides its colour, a class that is confused with another."""

# Set once for the process: a text takes its size when it is made, wherever that happens.
mpl.rcParams |= {
    **sns.axes_style("whitegrid"),
    "font.size": 10,
    "axes.titlesize": 10,
    "axes.labelsize": 10,
    "legend.fontsize": 9,
    "figure.dpi": 100,
    "savefig.bbox": "tight",
    # where it is put anyway; looking for the place takes a third of the drawing
    "axes.titley": 1.0,
    "svg.hashsalt": "labkit",  # the same records give the same bytes
    "text.parse_math": False,  # a "$" in a device's name is one
    "svg.fonttype": "none",  # text stays text: to be selected, searched and read aloud
    "font.family": ["DejaVu Sans", "sans-serif"],
}


def panels(
    num_panels: int, *, num_columns: int = 2, width: float = 3.2, height: float = 2.6
) -> tuple[Figure, list]:
    """Returns a figure of `num_panels` axes in rows of `num_columns`; two are 640 px wide, legible
    on a phone.
    """
    num_columns = min(num_columns, num_panels)
    num_rows = -(-num_panels // num_columns)
    figure = Figure(figsize=(width * num_columns, height * num_rows), layout="constrained")
    axes = figure.subplots(num_rows, num_columns, squeeze=False).flatten().tolist()
    for unused in axes[num_panels:]:
        unused.remove()
    for axis in axes[:num_panels]:
        for spine in axis.spines.values():
            spine.set_in_layout(
                False
            )  # they lie on the edge of the axes, which is laid out; asking each is slow
    return figure, axes[:num_panels]


def mark_here(figure: Figure, points: pd.DataFrame) -> None:
    """Draws the rows of `points` (columns x, y, label, and panel, a panel's title) as labelled
    stars.

    A point of a size or precision that no panel shows is not drawn on another's: ValueError names
    the panels.
    """
    named = {axis.get_title(): axis for axis in figure.axes}
    for row in points.to_dict("records"):
        axis = named.get(row["panel"])
        if axis is None:
            raise ValueError(f"no panel {row['panel']!r}; accepted: {', '.join(named)}")
        axis.plot(
            [row["x"]],
            [row["y"]],
            marker="*",
            markersize=14,
            color="#d55e00",
            markeredgecolor="black",
            zorder=5,
        )
        axis.annotate(
            row["label"],
            (row["x"], row["y"]),
            xytext=(8, 4),
            textcoords="offset points",
            fontsize=9,
        )
        axis.autoscale_view()


def context_axis(axis: Axes, contexts: Sequence[int], label: str = "context (tokens)") -> None:
    """Makes x a log2 axis of lengths with a tick at each measured one, every other one where they
    are many.
    """
    lengths = sorted(contexts)
    axis.set_xscale("log", base=2)
    ticks = lengths[:: len(lengths) // 7 + 1]
    axis.set_xticks(
        ticks, [f"{n // 1024}k" if n >= 8192 and n % 1024 == 0 else str(n) for n in ticks]
    )
    axis.minorticks_off()
    axis.set_xlabel(label)


def log_time_axis(axis: Axes, label: str = "time (ms)") -> None:
    """Makes y a log axis with plain numbers at 1, 2 and 5 times each power of ten."""
    if not axis.lines:
        # All that was tried failed: there are marks alone, and no number to scale by.
        axis.set_ylim(0.1, 10)
    axis.set_yscale("log")
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=12))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axis.yaxis.set_minor_locator(NullLocator())
    axis.set_ylabel(label)


def log_scale(axes: Axes, which: str, base: int = 10) -> None:
    """Makes the "x" or "y" axis logarithmic, labelled as 10⁻³: matplotlib's own labels are
    formulas, slow to set.
    """
    getattr(axes, f"set_{which}scale")("log", base=base)
    axis = getattr(axes, f"{which}axis")
    axis.set_major_formatter(FuncFormatter(lambda value, _: power(value, base)))
    axis.set_minor_locator(NullLocator())


def line_with_band(
    axis: Axes, rows: pd.DataFrame, x: str, *, label: str, style: Style, y: str = "median_ms"
) -> None:
    """Draws `y` over x, the median with its p20–p80 band; x values that ran out of memory become
    crosses at the top.
    """
    band = [name for name in ("p20_ms", "p80_ms") if name in rows and y == "median_ms"]
    measured = rows[(rows["status"] == "ok") & rows[y].notna()].sort_values(x, kind="stable")
    if len(measured):
        look = {"color": style.colour, "linestyle": style.dash, "marker": style.marker}
        axis.plot(measured[x], measured[y], label=label, markersize=4, linewidth=1.4, **look)
        if band:
            ends = (measured[end] for end in band)
            axis.fill_between(measured[x], *ends, color=style.colour, alpha=0.2, linewidth=0)
    mark_failures(axis, rows, x, colour=style.colour)


def bars(
    axis: Axes,
    frame: pd.DataFrame,
    index: str,
    ways: Mapping[str, Mapping],
    value: str,
    colours: Sequence[str] = SERIES,
) -> None:
    """Draws `value` as groups of bars: a group per value of `index`, in the frame's order, a bar
    per way.
    """
    groups = list(dict.fromkeys(frame[index]))
    width = 0.8 / len(ways)
    for number, (name, way) in enumerate(ways.items()):
        rows = select(ok_rows(frame), **way)
        offset = width * (number - (len(ways) - 1) / 2)
        places = [groups.index(group) + offset for group in rows[index]]
        axis.bar(
            places, rows[value], width=0.92 * width, label=name, color=colours[number], linewidth=0
        )
    axis.set_xticks(range(len(groups)), [str(group) for group in groups])
    axis.grid(visible=False, axis="x")


def class_bars(
    rows: pd.DataFrame, bar: str, suffix: str, label: str, panel: str = "", title: str = ""
) -> Figure | None:
    """Draws classes of kernels: a panel per value of `panel`, in it a stacked bar per value of
    `bar`, in order.

    Args:
        rows: columns <class><suffix>, "matmul_ms"; NaN where a class has no kernel.
        panel: "" for one panel; label: of the x axis, with its unit.
    """
    if rows.empty:
        return None
    titles = rows[panel].unique() if panel else [""]
    bars = rows[bar].unique()
    figure, axes = panels(len(titles), height=max(2.3, 0.8 + 0.3 * len(bars)))
    for axis, name in zip(axes, titles, strict=True):
        shown = (select(rows, **{panel: name}) if panel else rows).set_index(bar).reindex(bars)
        left = pd.Series(0.0, index=bars)
        for kind, colour in CLASS_COLOURS.items():
            widths = shown.get(f"{kind}{suffix}", left * 0).fillna(0.0)
            if widths.sum() > 0.001 * rows.filter(like=suffix).max().max():
                look = {"color": colour, "hatch": CLASS_HATCHES.get(kind, ""), "edgecolor": "white"}
                axis.barh(range(len(bars)), widths, left=left, label=kind, linewidth=0, **look)
                left += widths
        axis.set_yticks(range(len(bars)), bars)
        axis.set(title=name if isinstance(name, str) else f"{panel} {name:,}", xlabel=label)
        axis.invert_yaxis()
        axis.grid(visible=False, axis="y")
        axis.label_outer()
    finish(figure, axes, title)
    return figure


def heat_map(axis: Axes, table: pd.DataFrame, text: Callable[[float], str], title: str) -> None:
    """Draws a table of shares, 0 to 1, as shaded cells with their text."""
    axis.imshow(table, cmap="cividis_r", vmin=0, vmax=1, aspect="auto")
    axis.grid(visible=False)
    for y, values in enumerate(table.to_numpy()):
        for x, value in enumerate(values):
            if value == value:
                axis.text(
                    x,
                    y,
                    text(value),
                    ha="center",
                    va="center",
                    color="white" if value > 0.5 else "black",
                )
    axis.set_xticks(range(len(table.columns)), [f"{column:,}" for column in table.columns])
    axis.set_yticks(range(len(table)), list(table.index))
    axis.set_title(title)


def finish(figure: Figure, axes: Sequence[Axes], title: str, *, num_columns: int = 4) -> None:
    """Gives a figure its title and one legend for all panels, below them; × marks what ran out of
    memory.
    """
    handles: dict[str, object] = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    if handles:
        columns = min(len(handles), num_columns)
        figure.legend(
            list(handles.values()), list(handles), loc="outside lower center", ncols=columns
        )
    if title:
        figure.suptitle(title, fontsize=10)


def stack(
    axis: Axes,
    x: Sequence[float],
    layers: Mapping[str, Sequence[float]],
    colours: Mapping[str, str],
) -> None:
    """Draws layers over one another, from the bottom to the top, and writes its name into each
    thick one.
    """
    colors = [colours[name] for name in layers]
    axis.stackplot(x, list(layers.values()), colors=colors, labels=list(layers), linewidth=0)
    below = pd.Series(0.0, index=range(len(x)))
    for name, values in layers.items():
        room = (
            pd.Series(values).rolling(max(3, len(x) // 5), center=True).min()
        )  # over about the text's width
        if room.notna().any() and room.max() > 0.06 * max(
            map(sum, zip(*layers.values(), strict=True))
        ):
            middle = below[room.idxmax()] + values[room.idxmax()] / 2
            look = {"facecolor": "white", "alpha": 0.7, "linewidth": 0, "pad": 1}
            axis.text(
                x[room.idxmax()], middle, name, fontsize=9, ha="center", va="center", bbox=look
            )
        below += values


def mark_failures(axis: Axes, rows: pd.DataFrame, x: str, *, colour: str) -> None:
    """Marks where there is no number: × for out of memory, ? for any other failure, on the upper
    edge.
    """
    look = {
        "transform": axis.get_xaxis_transform(),
        "color": colour,
        "s": 22,
        "zorder": 3,
        "clip_on": False,
    }
    for marker, statuses in (("$?$", ["error", "timeout"]), ("x", ["oom"])):
        if failed := sorted(rows[x][rows["status"].isin(statuses)]):
            axis.scatter(failed, [0.97] * len(failed), marker=marker, **look)


def svg(figure: Figure) -> bytes:
    """Returns the figure as SVG; the same figure gives the same bytes."""
    figure.savefig(buffer := io.BytesIO(), format="svg", metadata={"Date": None, "Creator": None})
    return buffer.getvalue()


def png(figure: Figure) -> bytes:
    """Returns the figure as PNG, for the outputs kept in a notebook."""
    figure.savefig(buffer := io.BytesIO(), format="png", dpi=100, metadata={"Software": None})
    return buffer.getvalue()
