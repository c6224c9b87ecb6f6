"""What the chapters' figures share: style, one fixed colour per thing shown, gaps for what ran out
of memory.
"""

import io
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import matplotlib as mpl
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from labkit.report.frame import in_order, select, usable
from labkit.report.text import power


class Style(NamedTuple):
    """How one thing is drawn in every figure. Where two colours are hard to tell apart, marker or
    dash differ.
    """

    colour: str
    marker: str = "o"
    dash: str = "-"

    @property
    def line(self) -> dict[str, str]:
        """What matplotlib draws a line by."""
        return {"color": self.colour, "marker": self.marker, "linestyle": self.dash}


STYLES = {
    # precisions
    "fp32": Style("#0072b2"),
    "tf32": Style("#e69f00", "s", "--"),
    "bf16": Style("#009e73", "D", "-."),
    "fp16": Style("#cc79a7", "^", ":"),
    "fp16_unscaled": Style("#999999", "v", ":"),
    "bf16_pure": Style("#5d3a9b", "P", "--"),
    # implementations of attention: ours in reds, solid; the rest dashed or dotted
    "eager": Style("#7f7f7f", ">"),  # a cross is what ran out of memory
    "compiled": Style("#8c6d31", "s", ":"),
    "sdpa_flash": Style("#0072b2", "o", "--"),
    "sdpa_cudnn": Style("#009e73", "D", "--"),
    "sdpa_efficient": Style("#56b4e9", "^", "-."),
    "fa3": Style("#e69f00", "s", "--"),
    "triton": Style("#d67a7c", "^"),
    "triton_ieee": Style("#b06a6c", "v", "-."),
    "auto": Style("#8a1c20", "h"),
    # sizes of the ladder
    "small": Style("#355f8d"),
    "xl-2025": Style("#22a884", "P"),
    "2.7b": Style("#44bf70", "X"),
}
"""One style per precision, implementation and size, the same in every figure of the report."""

OWN_STYLE = Style("#000000", "*")
"""Of a function of the user's."""

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
    "savefig.bbox": "tight",
    # where it is put anyway; looking for the place takes a third of the drawing
    "axes.titley": 1.0,
    "svg.hashsalt": "labkit",  # the same records give the same bytes
    "text.parse_math": False,  # a "$" in a device's name is one
    "svg.fonttype": "none",  # text stays text: to be selected, searched and read aloud
    "font.family": ["DejaVu Sans", "sans-serif"],
}


def panels(
    shown: Iterable, height: float, num_columns: int = 2
) -> tuple[Figure, list[tuple[Axes, Any]]]:
    """Returns a figure, 640 px wide, with a panel for each thing `shown` in rows of `num_columns`,
    and the axes, each with its thing.

    `height`: of a row, in inches.
    """
    shown = list(shown)
    num_columns = min(num_columns, len(shown))
    num_rows = -(-len(shown) // num_columns)
    figure = Figure(figsize=(6.4, height * num_rows), layout="constrained")
    for number in range(len(shown)):
        axis = figure.add_subplot(num_rows, num_columns, number + 1)
        # They lie on the edge of the axes, which is laid out; asking each is slow.
        axis.spines[:].set_in_layout(False)
    return figure, list(zip(figure.axes, shown, strict=True))


def panel(height: float) -> tuple[Figure, Axes]:
    """Returns a figure of one panel, and its axes."""
    figure, ((axis, _),) = panels([""], height)
    return figure, axis


def log_time_axis(axis: Axes, label: str) -> None:
    """Makes y a log axis with plain numbers at 1, 2 and 5 times each power of ten."""
    if not axis.lines:
        # All that was tried failed: there are marks alone, and no number to scale by.
        axis.set_ylim(0.1, 10)
    axis.set_yscale("log")
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=12))
    axis.yaxis.set_major_formatter("{x:,g}")
    axis.yaxis.minorticks_off()
    axis.set_ylabel(label)


def log_scale(axes: Axes, which: str) -> None:
    """Makes the axes that `which` names, "x", "y" or "xy", logarithmic, labelled as 10⁻³; not one
    whose values lie within a power of ten, which would have no label.

    matplotlib's own labels are formulas, slow to set.
    """
    for name in which:
        axis = getattr(axes, f"{name}axis")
        low, high = axis.get_view_interval()
        if 0 < high < 10 * low:
            continue
        getattr(axes, f"set_{name}scale")("log")
        axis.set_major_formatter(lambda value, _: power(value))
        axis.minorticks_off()


def line_with_band(
    axis: Axes, rows: pd.DataFrame, x: str, *, label: str, style: Style, y: str = "median_ms"
) -> None:
    """Draws `y` over x, the median with its p20–p80 band; x values that ran out of memory become
    crosses at the top.
    """
    measured = usable(rows, y).sort_values(x, kind="stable")
    if len(measured):
        axis.plot(
            measured[x],
            measured[y],
            label=label,
            markersize=4,
            linewidth=1.4,
            **style.line,
        )
        if y == "median_ms":
            ends = measured["p20_ms"], measured["p80_ms"]
            axis.fill_between(measured[x], *ends, color=style.colour, alpha=0.2, linewidth=0)
    mark_failures(axis, rows, x, colour=style.colour)


def over_length(
    rows: pd.DataFrame,
    panel: str,
    names: Mapping[str, str],
    value: str,
    label: str,
    limit: float = 0,
) -> Figure | None:
    """Draws a value over the length on logarithmic axes, dotted at `limit`: a panel per value of
    `panel`, in it a line per implementation.

    Args:
        names: what the column "impl" calls an implementation, or is to, by the name of its style.
    """
    rows = in_order(rows, [panel]).replace({"impl": names})
    rows = select(rows, impl=list(names.values()))
    if usable(rows, value).empty:
        return None
    # A tick at each measured length, at every other one where they are many.
    lengths = sorted(set(rows["length"]))
    ticks = lengths[:: len(lengths) // 7 + 1]
    labels = [str(n) if n % 1024 else f"{n // 1024}k" for n in ticks]
    figure, axes = panels(rows.groupby(panel, sort=False), height=3.2)
    for axis, (title, lines) in axes:
        for impl, name in names.items():
            line = select(lines, impl=name)
            style = STYLES.get(impl, OWN_STYLE)
            line_with_band(axis, line, "length", label=name, style=style, y=value)
        axis.set_title(title)
        axis.sharey(figure.axes[0])
        if limit:
            axis.axhline(limit, color="black", linewidth=1, linestyle=":")
        axis.set_xscale("log", base=2)
        axis.set_xticks(ticks, labels)
        axis.minorticks_off()
        axis.set_xlabel("length (tokens)")
        log_time_axis(axis, label)
        axis.yaxis.set_major_locator(LogLocator())
        axis.label_outer()
    return finish(figure, num_columns=3)


def class_bars(rows: pd.DataFrame, bar: str, suffix: str, label: str, panel: str = "") -> Figure:
    """Draws classes of kernels: a panel per value of `panel`, in it a stacked bar per value of
    `bar`, in order.

    Args:
        rows: columns <class><suffix>, "matmul_ms"; NaN where a class has no kernel.
        panel: "" for one panel; label: of the x axis, with its unit.
    """
    groups = rows.groupby(panel, sort=False) if panel else [("", rows)]
    bars = rows[bar].unique()
    figure, axes = panels(groups, height=max(2.3, 0.8 + 0.3 * len(bars)))
    for axis, (title, shown) in axes:
        shown = shown.set_index(bar).reindex(bars)
        left = pd.Series(0.0, index=bars)
        for kind, colour in CLASS_COLOURS.items():
            widths = shown.get(f"{kind}{suffix}", left * 0).fillna(0.0)
            if widths.any():
                axis.barh(
                    bars,
                    widths,
                    left=left,
                    label=kind,
                    linewidth=0,
                    color=colour,
                    hatch=CLASS_HATCHES.get(kind, ""),
                    edgecolor="white",
                )
                left += widths
        axis.set(title=title if isinstance(title, str) else f"{panel} {title:,}", xlabel=label)
        axis.invert_yaxis()
        axis.grid(visible=False, axis="y")
        axis.label_outer()
    return finish(figure)


def finish(figure: Figure, num_columns: int = 4) -> Figure:
    """Returns a figure with one legend for all panels, below them."""
    handles = {}
    for axis in figure.axes:
        artists, labels = axis.get_legend_handles_labels()
        handles |= dict(zip(labels, artists, strict=True))
    if handles:
        figure.legend(handles.values(), handles, loc="outside lower center", ncols=num_columns)
    return figure


def mark_failures(axis: Axes, rows: pd.DataFrame, x: str, *, colour: str) -> None:
    """Marks where there is no number: × for out of memory, ? for any other failure, on the upper
    edge, below what is marked there already.
    """
    for marker, statuses in (("$?$", ["error", "timeout"]), ("x", ["oom"])):
        failed = sorted(select(rows, status=statuses)[x])
        # Bands, which lie deeper, are no marks.
        height = 0.97 - 0.05 * sum(one.zorder == 3 for one in axis.collections)
        if failed:
            axis.scatter(
                failed,
                [height] * len(failed),
                s=22,
                color=colour,
                marker=marker,
                transform=axis.get_xaxis_transform(),
                clip_on=False,
                zorder=3,
            )


def svg(figure: Figure) -> bytes:
    """Returns the figure as SVG; the same figure gives the same bytes.

    Coordinates have two decimals: the sixth, which matplotlib writes too, depends on the processor.
    """
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})

    def rounded(number: re.Match) -> bytes:
        return b"%.2f" % float(number[0])

    # Text between the tags stays as it is.
    return re.sub(
        rb"<[^>]*>",
        lambda tag: re.sub(rb"\d+\.\d{3,6}", rounded, tag[0]),
        buffer.getvalue(),
    )


def png(figure: Figure) -> bytes:
    """Returns the figure as PNG, for the outputs kept in a notebook."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()
