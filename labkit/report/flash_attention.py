"""Notebook 06 from its records: the algorithm, the gate, the speeds, the tiles, the rivals, the memory.

Every function takes data frames that `Chapter.records` returns. A frame without the needed rows gives an empty table,
no figure (None) or no sentence. "Ours" is what `impl="auto"` runs for a shape.
"""

import itertools
import math
from collections.abc import Callable, Iterable
from importlib import resources
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from labkit import published
from labkit.configs import LEADERBOARD, MATERIALISING, PASSES
from labkit.report import figures
from labkit.report.findings import (
    SAME,
    count,
    geometric_mean,
    listing,
    number,
    percent,
    power_law_exponent,
    scientific,
    span,
    speed_word,
    times,
)
from labkit.report.tables import PHASE_NAMES, cell, ok_rows, once_per_frame, select, theirs_and_ours

NAMES = {
    "gluon": "Gluon (ours)",
    "gluon_unordered": "Gluon, sums unordered (ours)",
    "triton": "Triton (ours)",
    "triton_ieee": "Triton, CUDA cores (ours)",
    "triton_tf32": "Triton, TF32 (ours)",
    "tiled": "tiled (ours)",
    "fa3": "FlashAttention-3",
    "fa3_deterministic": "FlashAttention-3, deterministic",
    "sdpa_cudnn": "SDPA cuDNN",
    "sdpa_flash": "SDPA flash",
    "sdpa_efficient": "SDPA efficient",
    "sdpa": "SDPA default",
    "flex": "FlexAttention",
    "sdpa_math": "SDPA math",
    "compiled": "compiled",
    "eager": "eager",
}
"""Implementations in the order and under the names in which this chapter shows them."""

TRITON = ("triton", "triton_ieee", "triton_tf32")
OURS = ("gluon", "gluon_unordered", *TRITON, "tiled")
SAME_FORWARD = ("gluon_unordered", "fa3_deterministic")
"""Implementations that differ from another in their backward alone: among the rivals their forward is not shown."""

SHAPE = ["batch", "heads", "length", "d_head", "causal"]
PRECISIONS = ("bf16", "fp32", "tf32")

AGREEMENT = 0.05
"""Two ways to measure the same thing agree when they differ by at most 5 %."""

LINEAR, QUADRATIC = 1.1, 1.9
"""Fitted exponents at most, and at least, for which memory is said to grow at most linearly, and quadratically."""


# ---- selections -----------------------------------------------------------------------------------------------


@once_per_frame
def _contest(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns the rows with their phase, "<implementation> <pass>", as two columns, implementations in order."""
    if frame.empty:
        return frame
    parts = frame["phase"].str.split(" ", n=1, expand=True)
    rows = frame.assign(impl=parts[0], name=parts[1])
    order = {impl: rank for rank, impl in enumerate(NAMES)}
    keys = [key for key in ("d_head", "length") if key in rows]
    return rows.assign(rank=rows["impl"].map(order)).sort_values([*keys, "rank"], kind="stable").reset_index(drop=True)


def _tried(rows: pd.DataFrame) -> list[str]:
    """Returns the implementations that have something to show: not those that were skipped everywhere."""
    tried = set(rows["impl"][rows["status"] != "skipped"])
    return [impl for impl in NAMES if impl in tried]


def _ours(rows: pd.DataFrame) -> pd.DataFrame:
    """Returns the measured rows of the implementation that "auto" chooses for their shape."""
    return ok_rows(rows, is_auto=1) if "is_auto" in rows else rows.iloc[:0]


def _beside_ours(rows: pd.DataFrame) -> pd.DataFrame:
    """Returns the measured rows of the others with our time of the same shape, precision and pass in `ours_ms`."""
    keys = [*SHAPE, "precision", "name"]
    ours = _ours(rows)[[*keys, "median_ms"]].rename(columns={"median_ms": "ours_ms"})
    others = ok_rows(rows)
    return others[~others["impl"].isin(OURS)].merge(ours, on=keys)


def _shape_name(row: dict | pd.Series) -> str:
    mask = "causal" if row["causal"] else "full"
    return f"{row['batch']},{row['heads']},{row['length']},{row['d_head']} {mask}"


def _shape_names(rows: pd.DataFrame) -> list[str]:
    return [_shape_name(row) for row in rows[SHAPE].to_dict("records")]


def _microseconds(time_ms: float) -> str:
    return f"{number(1000 * time_ms)} µs"


# ---- the algorithm and the first kernel -------------------------------------------------------------------------


def table_algorithm(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns the tiled algorithm's errors against fp64 by size of its tiles, beside the eager formula's."""
    rows = ok_rows(frame, phase="errors")
    return pd.DataFrame(
        {
            "tile": f"{row['tile']} × {row['tile']}",
            "mask": "causal" if row["causal"] else "full",
            "output: relative error": scientific(row["out_relative_error"]),
            "eager": scientific(row["out_eager_relative_error"]),
            **{f"d{x}": scientific(row[f"d{x}_relative_error"]) for x in "qkv"},
            "worst error / allowed": number(_worst_of_algorithm(row), 2),
        }
        for row in rows.to_dict("records")
    )


def _worst_of_algorithm(row: dict) -> float:
    return max(row[f"{name}_budget_fraction"] for name in ("out", "dq", "dk", "dv"))


def figure_online_softmax(frame: pd.DataFrame) -> Figure | None:
    """Three panels over the tiles of keys: running maximum, running denominator, distance to the final output."""
    rows = ok_rows(frame, phase="trace")
    if rows.empty:
        return None
    row = rows.loc[rows["tile"].idxmin()]
    figure, axes = figures.panels(3, height=2.6)
    labels = {
        "maximum": "running maximum of the scores",
        "denominator": "running denominator, Σ exp(s − maximum)",
        "distance": "distance of the output to the final one",
    }
    for axis, (name, label) in zip(axes, labels.items(), strict=True):
        series = {key: values for key, values in row["samples"].items() if key.endswith(name)}
        for index, (key, values) in enumerate(sorted(series.items())):
            axis.plot(
                range(1, len(values) + 1),
                values,
                color=figures.SERIES[index],
                marker="o",
                markersize=3,
                label=key.removesuffix(f" {name}"),
            )
        axis.set_xlabel(f"tiles of {row['tile']} keys seen")
        axis.set_title(label)
    axes[2].set_ylabel("relative distance")
    axes[0].legend()
    figure.suptitle("Online softmax, fp32: what is held after each tile of keys", fontsize=10)
    return figure


def findings_algorithm(frame: pd.DataFrame) -> list[str]:
    """Says how exact the tiled algorithm is, and how often a new maximum made it rescale what it held."""
    rows, sentences = ok_rows(frame, phase="errors"), []
    if len(rows):
        worst = max(_worst_of_algorithm(row) for row in rows.to_dict("records"))
        ratios = rows["out_relative_error"] / rows["out_eager_relative_error"]
        sentences.append(
            f"Over {count(rows['tile'].nunique(), 'tile size')} and both masks the tiled algorithm's output has "
            f"{span(ratios)} the eager formula's error against fp64; no error is above {percent(worst)} of what is "
            "allowed."
        )
    traces = ok_rows(frame, phase="trace")
    if len(traces):
        row = traces.loc[traces["tile"].idxmin()]
        maxima = [values for key, values in row["samples"].items() if key.endswith("maximum")]
        moves = [sum(later > earlier for earlier, later in itertools.pairwise(v)) for v in maxima]
        sentences.append(
            f"Over {len(maxima[0])} tiles of {row['tile']} keys, the maximum of each of {len(maxima)} traced queries"
            f" moves {span(moves, str)} times after the first tile: only then is what was summed before rescaled."
        )
    return sentences


def table_weighted_sum(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns time, rate and error of the weighted sum by implementation."""
    rows = _contest(frame)
    return pd.DataFrame(
        {
            "rows × elements": f"{row['rows']:,} × {row['dim']:,}",
            "pass": PHASE_NAMES[row["name"]],
            "implementation": NAMES[row["impl"]],
            "time (ms)": cell(row),
            "GB/s": cell(row, "achieved_gb_per_s"),
            "of measured copy": cell(row, "ceiling_fraction", percent),
            "relative error": cell(row, "relative_error", scientific),
        }
        for row in rows.sort_values(["rows", "dim"], ascending=False, kind="stable").to_dict("records")
    ) if len(rows) else rows  # fmt: skip


def findings_weighted_sum(frame: pd.DataFrame) -> list[str]:
    """Says how the first kernel compares with the formula, eager and compiled."""
    rows = ok_rows(_contest(frame))
    if rows.empty or "triton" not in set(rows["impl"]):
        return []
    keys = ["rows", "dim", "name"]
    kernel = rows[rows["impl"] == "triton"]
    sentences = []
    for impl in ("eager", "compiled"):
        both = rows[rows["impl"] == impl].merge(kernel[[*keys, "median_ms"]], on=keys, suffixes=("", "_kernel"))
        if len(both):
            both = both.assign(speedup=both["median_ms"] / both["median_ms_kernel"])
            sentences.append(_compared(both, "the kernel", NAMES[impl], _weighted_sum_name))
    known = kernel.dropna(subset=["ceiling_fraction"])
    if len(known):
        sentences.append(
            f"The kernel moves its bytes at {span(known['ceiling_fraction'], percent)} of the measured copy."
        )
    return sentences


def _weighted_sum_name(row: pd.Series) -> str:
    return f"{PHASE_NAMES[row['name']]} of {row['rows']:,} × {row['dim']:,}"


def _as_fast(rows: pd.DataFrame, name: Callable[[pd.Series], str], limit: int = 4) -> str:
    """Returns "1.5× to 2× as fast" by the rows' `speedup`, in how many cases, and where slower, the worst first."""
    words = rows["speedup"].map(speed_word)
    text = f"{span(rows['speedup'])} as fast"
    if " to " in span(rows["speedup"]):
        text += f" (geometric mean {times(geometric_mean(rows['speedup']))})"
    text += f": faster in {(words == 'faster').sum()} of {count(len(rows), 'case')}"
    slower = rows[words == "slower"]
    if len(slower):
        worst_first = slower.sort_values("speedup", kind="stable")
        text += f", slower in {len(slower)}: {listing([name(row) for _, row in worst_first.iterrows()], limit)}"
    return text


def _compared(rows: pd.DataFrame, who: str, other: str, name: Callable[[pd.Series], str], what: str = "") -> str:
    """Returns a sentence on how `who` compares with `other`, whose time over who's is the rows' `speedup`."""
    return f"Against {other}{what}, {who} is {_as_fast(rows, name)}."


# ---- the gate -------------------------------------------------------------------------------------------------


def table_gate(*frames: pd.DataFrame) -> pd.DataFrame:
    """Returns, by implementation and precision, how many results passed the gate and their worst error."""
    rows = _gated(frames)
    if rows.empty:
        return rows
    result = []
    for precision in PRECISIONS:
        for impl in _tried(rows):
            mine = select(rows, impl=impl, precision=precision)
            passed = ok_rows(mine)
            if (mine["status"] == "skipped").all():
                continue
            ratio = passed["relative_error"] / passed["eager_relative_error"] if len(passed) else pd.Series(dtype=float)
            result.append(
                {
                    "implementation": NAMES[impl],
                    "precision": precision,
                    "passed": len(passed),
                    "wrong": int(mine["reason"].str.contains("wrong:").sum()),
                    "out of memory": int((mine["status"] == "oom").sum()),
                    "other failures": int(_other_failures(mine).sum()),
                    "worst error / allowed": number(passed["budget_fraction"].max(), 2) if len(passed) else "–",
                    "worst relative error": scientific(passed["relative_error"].max()) if len(passed) else "–",
                    "error / eager's, median": times(ratio.median()) if len(passed) else "–",
                }
            )
    return pd.DataFrame(result)


def _gated(frames: Iterable[pd.DataFrame]) -> pd.DataFrame:
    parts = [_contest(frame) for frame in frames if not frame.empty]
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()


def _other_failures(rows: pd.DataFrame) -> pd.Series:
    return rows["status"].isin(["error", "timeout"]) & ~rows["reason"].str.contains("wrong:")


def table_not_run(*frames: pd.DataFrame) -> pd.DataFrame:
    """Returns why implementations were skipped or failed, with the number of results each reason cost."""
    rows = _gated(frames)
    failed = rows[~rows["status"].isin(["ok", "oom"])] if len(rows) else rows
    if failed.empty:
        return pd.DataFrame()
    keys = ["impl", "precision", "status", "reason"]
    return pd.DataFrame(
        {
            "implementation": NAMES[impl],
            "precision": precision,
            "results": len(group),
            "status": status,
            "reason": reason[:160],
        }
        for (impl, precision, status, reason), group in failed.groupby(keys, sort=False)
    )


def findings_gate(*frames: pd.DataFrame) -> list[str]:
    """Says whether everything that was timed was right first, and what was not."""
    rows = _gated(frames)
    passed = ok_rows(rows)
    if passed.empty:
        return []
    worst = passed.loc[passed["budget_fraction"].idxmax()]
    sentences = [
        f"All {len(passed):,} timed results had passed the gate: the worst error is "
        f"{percent(worst['budget_fraction'])} of what is allowed ({NAMES[worst['impl']]}, {worst['precision']}, "
        f"{PHASE_NAMES[worst['name']]}, {_shape_name(worst)})."
    ]
    wrong = rows[rows["reason"].str.contains("wrong:")]
    for impl, group in wrong.groupby("impl", sort=False):
        names = [f"{_shape_name(row)} in {row['precision']}" for _, row in group.iterrows()]
        sentences.append(
            f"{NAMES[impl]} was **not** right in {count(len(group), 'result')}, which have no time: "
            f"{listing(dict.fromkeys(names), 4)}."
        )
    return sentences


def findings_timer(*frames: pd.DataFrame) -> list[str]:
    """Says by which methods the times were taken, and whether two of them agree where both were tried."""
    rows = ok_rows(_gated(frames))
    if rows.empty:
        return []
    parts = []
    for method, group in rows.groupby("timer_method"):
        names = "" if len(group) > len(rows) / 2 else f" ({listing(NAMES[impl] for impl in group['impl'].unique())})"
        parts.append((len(group), f"by {method}: {count(len(group), 'result')}{names}"))
    sentences = ["Timed " + "; ".join(text for _, text in sorted(parts, reverse=True)) + "."]
    if "flush_median_ms" in rows:
        checked = rows.dropna(subset=["flush_median_ms"])
        deviation = checked["flush_median_ms"] / checked["median_ms"] - 1
        if len(checked):
            worst = checked.loc[deviation.abs().idxmax()]
            case = f"{NAMES[worst['impl']]}, {_shape_name(worst)}"
            verdict = "agree" if deviation.abs().max() <= AGREEMENT else "do **not** agree"
            sentences.append(
                f"Replayed graphs and single calls with a flushed cache {verdict} within {percent(AGREEMENT)}: the "
                f"largest difference is {percent(deviation.abs().max())} ({case})."
            )
    return sentences


# ---- the grid of lengths and head dimensions ----------------------------------------------------------------------


def table_times(frame: pd.DataFrame, precision: str, d_head: int, name: str) -> pd.DataFrame:
    """Returns the device's time of a pass in ms, by length and implementation."""
    rows = select(_contest(frame), precision=precision, d_head=d_head, name=name)
    if rows.empty:
        return rows
    return _matrix(rows, "length", cell)


def _matrix(rows: pd.DataFrame, index: str, text: Callable[[dict], str]) -> pd.DataFrame:
    """Returns a table with a column per implementation that was tried; "–" where there is no case."""
    tried = _tried(rows)
    lines: dict[Any, dict[str, str]] = {}
    for row in rows.to_dict("records"):
        lines.setdefault(row[index], {})[row["impl"]] = text(row)
    return pd.DataFrame(
        {index: key, **{NAMES[impl]: cells.get(impl, "–") for impl in tried}} for key, cells in lines.items()
    )


def table_everything(frame: pd.DataFrame, precision: str) -> pd.DataFrame:
    """Returns times, rates and errors side by side, one row per head dimension, length and implementation.

    "*" marks a forward pass that the host takes longer to issue than the device to run.
    """
    rows = select(_contest(frame), precision=precision)
    if rows.empty:
        return rows
    cases: dict[tuple, dict[str, dict]] = {}
    for row in rows.to_dict("records"):
        cases.setdefault((row["d_head"], row["length"], row["impl"]), {})[row["name"]] = row
    lines = []
    for (d_head, length, impl), by_pass in cases.items():
        if all(row["status"] == "skipped" for row in by_pass.values()):
            continue
        forward, backward, both = (by_pass.get(name) for name in PASSES)
        lines.append(
            {
                "d": d_head,
                "length": length,
                "implementation": NAMES[impl],
                "forward (ms)": _cell(forward) + ("*" if forward is not None and _is_launch_bound(forward) else ""),
                "backward (ms)": _cell(backward),
                "both (ms)": _cell(both),
                "forward TFLOP/s": _cell(forward, "achieved_tflops"),
                "backward TFLOP/s": _cell(backward, "achieved_tflops"),
                "both, of measured product": _cell(both, "ceiling_fraction", percent),
                "output error": _cell(forward, "relative_error", scientific),
                "gradient error": _cell(backward, "relative_error", scientific),
            }
        )
    return pd.DataFrame(lines)


def _cell(row: dict | None, column: str = "median_ms", form: Callable[[float], str] = number) -> str:
    if row is None:
        return "–"
    if row["status"] == "ok" and (column not in row or row[column] is None or math.isnan(row[column])):
        return "–"
    return cell(row, column, form)


def table_speedups(frame: pd.DataFrame, precision: str) -> pd.DataFrame:
    """Returns how many times as fast as every other implementation ours is, by head dimension and pass."""
    rows = select(_contest(frame), precision=precision)
    if rows.empty:
        return rows
    pairs = _beside_ours(rows)
    lines = []
    for impl in [impl for impl in NAMES if impl in set(pairs["impl"])]:
        for d_head, group in select(pairs, impl=impl).groupby("d_head"):
            line = {"against": NAMES[impl], "d": d_head, "lengths": _lengths(group["length"])}
            for name in PASSES:
                of_pass = select(group, name=name)
                speedups = of_pass["median_ms"] / of_pass["ours_ms"]
                line[PHASE_NAMES[name]] = times(geometric_mean(speedups)) if len(of_pass) else "–"
                line[f"{PHASE_NAMES[name]}: range"] = span(speedups) if len(of_pass) else "–"
            lines.append(line)
    return pd.DataFrame(lines)


def _lengths(lengths: pd.Series) -> str:
    return f"{lengths.min()}–{lengths.max()}" if lengths.nunique() > 1 else str(lengths.min())


def table_tiles_chosen(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns the tiles that the Triton kernels ship with, rows of queries × rows of keys, and for which lengths."""
    rows = ok_rows(_contest(frame))
    rows = rows[rows["impl"].isin(TRITON)] if len(rows) else rows
    if rows.empty:
        return pd.DataFrame()
    kernels = {"forward": "forward", "dkdv": "backward: dk and dv", "dq": "backward: dq"}
    sides = [f"{kernel}_{side}" for kernel in kernels for side in ("block_q", "block_k")]
    rows = rows.sort_values(["precision", "rank", "d_head", "length"], kind="stable")
    rows = rows.drop_duplicates(["precision", "impl", "d_head", "length"])
    return pd.DataFrame(
        {
            "kernels": NAMES[impl],
            "precision": precision,
            "d": d_head,
            "length": _lengths(of_tiles["length"]),
            **{
                label: "{} × {}".format(*(int(of_tiles[f"{kernel}_{side}"].iloc[0]) for side in ("block_q", "block_k")))
                for kernel, label in kernels.items()
            },
        }
        for (precision, impl, d_head), of_dim in rows.groupby(["precision", "impl", "d_head"], sort=False)
        for _, of_tiles in of_dim.groupby(sides, sort=False)
    )


def figure_times(frame: pd.DataFrame, precision: str, name: str = "forward_backward") -> Figure | None:
    """One panel per head dimension: time over length by implementation; shaded where ours is launch-bound."""
    rows = select(_contest(frame), precision=precision, name=name)
    if ok_rows(rows).empty:
        return None
    figure = _panels_by_head(rows, _draw_times)
    figure.suptitle(
        f"{PHASE_NAMES[name].capitalize()}, causal, batch 1, one head, {precision}, {frame.attrs['device']} "
        "(band: p20–p80; × out of memory; grey: ours is launch-bound)",
        fontsize=10,
    )
    return figure


def _panels_by_head(rows: pd.DataFrame, draw: Callable[[Axes, pd.DataFrame], None]) -> Figure:
    d_heads = sorted(ok_rows(rows)["d_head"].unique())
    figure, axes = figures.panels(len(d_heads))
    for axis, d_head in zip(axes, d_heads, strict=True):
        of_head = rows[rows["d_head"] == d_head]
        draw(axis, of_head)
        figures.context_axis(axis, of_head["length"].unique())
        axis.tick_params(axis="x", labelrotation=60)
        axis.set_xlabel("length (queries and keys)")
        axis.set_title(f"d = {d_head}")
    _shared_legend(figure, axes, num_columns=6)
    return figure


def _shared_legend(figure: Figure, axes: list[Axes], num_columns: int) -> None:
    """One legend for all panels, of which none need show everything."""
    handles = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=num_columns)


def _draw_times(axis: Axes, rows: pd.DataFrame) -> None:
    for impl in _tried(rows):
        line = {"linewidth": 2, "zorder": 3} if impl in OURS else {}
        of_impl = rows[rows["impl"] == impl]
        figures.line_with_band(axis, of_impl, "length", label=NAMES[impl], colour=figures.COLOURS[impl], **line)
    _log_axis(axis, "time (ms)")
    bound = [row["length"] for row in _ours(rows).to_dict("records") if _is_launch_bound(row)]
    if bound:
        axis.axvspan(axis.get_xlim()[0], max(bound), color="0.85", zorder=0)


def _log_axis(axis: Axes, label: str) -> None:
    """A log axis as everywhere, with a label at every power of ten only where more would not fit."""
    figures.log_time_axis(axis, label)
    low, high = axis.get_ylim()
    if high / low > 1e3:
        axis.yaxis.set_major_locator(LogLocator(numticks=12))


def _is_launch_bound(row: dict) -> bool:
    """Whether the host takes longer to issue the call than the device to run it; not known for a backward pass."""
    launch = row.get("launch_median_ms")
    return launch is not None and launch > row["median_ms"]


def figure_rates(frame: pd.DataFrame, precision: str, name: str = "forward") -> Figure | None:
    """One panel per head dimension: achieved TFLOP/s over length by implementation, and the measured product."""
    rows = select(_contest(frame), precision=precision, name=name)
    if ok_rows(rows).empty:
        return None

    def draw(axis: Axes, of_head: pd.DataFrame) -> None:
        for impl in [impl for impl in _tried(of_head) if impl not in MATERIALISING]:
            line = ok_rows(of_head, impl=impl)
            width = 2 if impl in OURS else 1.2
            axis.plot(line["length"], line["achieved_tflops"], color=figures.COLOURS[impl], label=NAMES[impl],
                      linewidth=width, marker="o", markersize=3)  # fmt: skip
        ceiling = of_head["ceiling"].dropna()
        if len(ceiling):
            axis.axhline(ceiling.iloc[-1], color="0.2", linestyle="--", linewidth=1, label="measured matrix product")
        axis.set_ylim(bottom=0)
        axis.set_ylabel("achieved rate (TFLOP/s)")

    figure = _panels_by_head(rows, draw)
    figure.suptitle(
        f"Rate of the {PHASE_NAMES[name]} pass, causal, batch 1, one head, {precision}, {frame.attrs['device']}",
        fontsize=10,
    )
    return figure


def findings_speed(frame: pd.DataFrame, precision: str) -> list[str]:
    """Says how ours compares with each other implementation, how near to the limit it comes, what is launch-bound."""
    rows = select(_contest(frame), precision=precision)
    if rows.empty:
        return []
    pairs = _beside_ours(rows)
    pairs = pairs.assign(speedup=pairs["median_ms"] / pairs["ours_ms"])
    sentences = []
    for impl in [impl for impl in NAMES if impl in set(pairs["impl"])]:
        by_pass = {name: select(pairs, impl=impl, name=name) for name in ("forward", "forward_backward")}
        parts = [f"{PHASE_NAMES[name]} {_as_fast(mine, _grid_name, 2)}" for name, mine in by_pass.items() if len(mine)]
        if parts:
            sentences.append(f"Against {NAMES[impl]} in {precision}, ours is {'; '.join(parts)}.")
    more = (_near_the_limit, _gradients_by, _launch_bound, _short_calls, _out_of_memory)
    return [*sentences, *(sentence for findings in more for sentence in findings(rows))]


def _grid_name(row: pd.Series) -> str:
    return f"d {row['d_head']} at {row['length']}"


def _pass_and_grid_name(row: pd.Series) -> str:
    return f"{PHASE_NAMES[row['name']]} {_grid_name(row)}"


PRODUCTS = {
    "tf32x3": "three products of TF32",
    "bf16x6": "six products of bf16",
    "bf16x3": "three products of bf16",
}


def findings_products(frame: pd.DataFrame) -> list[str]:
    """Says what several products on tensor cores gain over one of fp32 on CUDA cores, and how exact they are."""
    rows = ok_rows(_contest(frame))
    if rows.empty:
        return []
    keys = [*SHAPE, "name"]
    columns = [*keys, "median_ms", "relative_error"]
    several = select(rows, impl="triton", precision="fp32")[[*columns, "observed"]]
    one = select(rows, impl="triton_ieee", precision="fp32")[columns]
    pairs = several.merge(one, on=keys, suffixes=("", "_one"))
    sentences = []
    for products, of_kind in pairs.groupby(pairs["observed"].str["products"], sort=False):
        of_kind = of_kind.assign(speedup=of_kind["median_ms_one"] / of_kind["median_ms"])
        who = f"a kernel of {PRODUCTS[products]} on the tensor cores for each of fp32"
        where = f", at length {_lengths(of_kind['length'])}"
        ratios = of_kind["relative_error"] / of_kind["relative_error_one"]
        sentences.append(_compared(of_kind, who, "one on the CUDA cores", _pass_and_grid_name, where))
        sentences.append(f"Its errors against fp64 are {span(ratios)} those of the other.")
    return sentences


def _near_the_limit(rows: pd.DataFrame) -> list[str]:
    ours = _ours(rows)
    known = ours.dropna(subset=["ceiling_fraction"]) if len(ours) else ours
    parts = []
    for name in PASSES:
        of_pass = select(known, name=name)
        if len(of_pass):
            best = of_pass.loc[of_pass["ceiling_fraction"].idxmax()]
            parts.append(
                f"{percent(best['ceiling_fraction'])} {PHASE_NAMES[name]} ({number(best['achieved_tflops'])} TFLOP/s, "
                f"{_grid_name(best)})"
            )
    precision = rows["precision"].iloc[0]
    return [f"Of the measured {precision} matrix product ours reaches at best {listing(parts)}."] if parts else []


def _launch_bound(rows: pd.DataFrame) -> list[str]:
    sentences = []
    for name in ("forward", "forward_backward"):
        ours = _ours(select(rows, name=name))
        bound = [row for row in ours.to_dict("records") if _is_launch_bound(row)]
        if bound:
            longest = max(row["length"] for row in bound)
            launches = span((row["launch_median_ms"] for row in bound), _microseconds)
            device = span((row["median_ms"] for row in bound), _microseconds)
            cases = count(len(ours), "case")
            sentences.append(
                f"{PHASE_NAMES[name].capitalize()} of ours is launch-bound in {len(bound)} of {cases}, "
                f"up to length {longest}: the host takes {launches} to issue what the device runs in {device}."
            )
    return sentences


def _short_calls(rows: pd.DataFrame) -> list[str]:
    """Compares whole calls, launch included, with SDPA's default where that was measured."""
    sentences = []
    if "launch_median_ms" not in rows:
        return []
    for name in ("forward", "forward_backward"):
        of_pass = select(rows, name=name).dropna(subset=["launch_median_ms"])
        keys = [*SHAPE, "name"]
        ours = _ours(of_pass)[[*keys, "host_median_ms"]].rename(columns={"host_median_ms": "ours_host_ms"})
        pairs = ok_rows(of_pass, impl="sdpa").merge(ours, on=keys)
        if len(pairs):
            pairs = pairs.assign(speedup=pairs["host_median_ms"] / pairs["ours_host_ms"])
            where = f", launch included, at length {_lengths(pairs['length'])} ({PHASE_NAMES[name]})"
            sentences.append(_compared(pairs, "a call of ours", "SDPA's default", _grid_name, where))
    return sentences


def _out_of_memory(rows: pd.DataFrame) -> list[str]:
    """Says from which length each implementation ran out of memory, by pass and head dimension."""
    failed = rows[rows["status"] == "oom"]
    sentences = []
    for impl, group in failed.groupby("impl", sort=False):
        first = group.groupby(["name", "d_head"])["length"].min().reset_index()
        places = [
            f"{PHASE_NAMES[name]} from length {length} (d {listing(of_place['d_head'].astype(str))})"
            for (name, length), of_place in first.groupby(["name", "length"])
        ]
        sentences.append(f"{NAMES[impl]} runs out of memory in {rows['precision'].iloc[0]}: {listing(places)}.")
    return sentences


# ---- the tiles ------------------------------------------------------------------------------------------------


def table_tiles(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns every configuration of the forward kernel that was tried, and why some have no time."""
    if frame.empty:
        return frame
    rows = frame.assign(fastest=frame["median_ms"] if "median_ms" in frame else math.nan)
    return pd.DataFrame(
        {
            "tile": f"{row['block_q']} × {row['block_k']}",
            "warps": row["num_warps"],
            "stages": row["num_stages"],
            "time (ms)": cell(row),
            "TFLOP/s": _cell(row, "achieved_tflops"),
            "error / allowed": _cell(row, "budget_fraction"),
            "shipped": "yes" if row.get("is_shipped") == 1 else "",
            "reason": row["reason"][:120],
        }
        for row in rows.sort_values("fastest", kind="stable").to_dict("records")
    )


def figure_tiles(frame: pd.DataFrame) -> Figure | None:
    """The forward kernel's time by rows of the query tile and rows of the key tile; words where there is no time."""
    measured = ok_rows(frame)
    if measured.empty:
        return None
    block_qs, block_ks = (sorted(frame[name].unique()) for name in ("block_q", "block_k"))
    figure, (axis,) = figures.panels(1, width=4.6, height=3.6)
    lookup = {(row["block_q"], row["block_k"]): row for row in frame.to_dict("records")}
    grid = [[_value(lookup.get((q, k))) for k in block_ks] for q in block_qs]
    image = axis.imshow(grid, origin="lower", cmap="viridis_r", aspect="auto")
    middle = measured["median_ms"].median()
    for y, block_q in enumerate(block_qs):
        for x, block_k in enumerate(block_ks):
            row = lookup.get((block_q, block_k))
            dark = row is not None and row["status"] == "ok" and row["median_ms"] > middle
            text = "–" if row is None else cell(row) + ("\nshipped" if row.get("is_shipped") == 1 else "")
            axis.text(x, y, text, ha="center", va="center", fontsize=7, color="white" if dark else "black")
    axis.set_xticks(range(len(block_ks)), block_ks)
    axis.set_yticks(range(len(block_qs)), block_qs)
    axis.grid(False)
    axis.set_xlabel("rows of the key tile")
    axis.set_ylabel("rows of the query tile")
    figure.colorbar(image, ax=axis, label="time (ms)")
    row = measured.iloc[0]
    figure.suptitle(f"Forward kernel, {_shape_name(row)}, {row['precision']}, {frame.attrs['device']}", fontsize=10)
    return figure


def _value(row: dict | None) -> float:
    return row["median_ms"] if row is not None and row["status"] == "ok" else math.nan


def findings_tiles(frame: pd.DataFrame) -> list[str]:
    """Says how much the choice of tiles matters, whether the shipped one is the best, and which cannot be had."""
    measured = ok_rows(frame)
    if measured.empty:
        return []
    best, worst = (measured.loc[measured["median_ms"].agg(end)] for end in ("idxmin", "idxmax"))
    sentences = [
        f"Of {count(len(measured), 'tile configuration')} the fastest is {_tile_name(best)} "
        f"({number(best['median_ms'])} ms), {times(worst['median_ms'] / best['median_ms'])} as fast as the slowest, "
        f"{_tile_name(worst)}."
    ]
    shipped = select(measured, is_shipped=1)
    if len(shipped):
        row = shipped.iloc[0]
        excess = row["median_ms"] / best["median_ms"] - 1
        verdict = "is" if row.equals(best) else "is about as fast as" if excess <= SAME else "is **not**"
        rest = "" if verdict == "is" else f" ({percent(excess)} more time)"
        sentences.append(
            f"The configuration shipped when this was measured, {_tile_name(row)}, {verdict} the fastest{rest}."
        )
    failed = frame[frame["status"] != "ok"]
    for status, group in failed.groupby("status"):
        names = [_tile_name(row) for _, row in group.iterrows()]
        sentences.append(f"{count(len(names), 'configuration')} ended {status}: {listing(names)}.")
    return sentences


def _tile_name(row: pd.Series) -> str:
    return f"{row['block_q']} × {row['block_k']}"


# ---- the rivals -----------------------------------------------------------------------------------------------


def table_rivals(frame: pd.DataFrame, name: str) -> pd.DataFrame:
    """Returns TFLOP/s of a pass by shape and implementation."""
    return _rival_table(frame, name, lambda row: _cell(row, "achieved_tflops"))


def table_rival_ratios(frame: pd.DataFrame, name: str) -> pd.DataFrame:
    """Returns every implementation's time over ours, by shape: above one, ours is faster; its interval behind it."""

    def text(row: dict) -> str:
        ratio = _cell(row, "ratio_to_ours", times)
        if row["status"] != "ok" or ratio == "–" or row.get("is_auto") == 1:
            return "ours" if row.get("is_auto") == 1 else ratio
        return f"{ratio} ({number(row['ratio_to_ours_low'])}–{number(row['ratio_to_ours_high'])})"

    return _rival_table(frame, name, text)


def _rival_table(frame: pd.DataFrame, name: str, text: Callable[[dict], str]) -> pd.DataFrame:
    rows = select(_rivals(frame), name=name)
    if rows.empty:
        return rows
    return _matrix(rows.assign(shape=_shape_names(rows)), "shape", text).rename(columns={"shape": "B,H,S,D mask"})


@once_per_frame
def _rivals(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns the rows of `_contest` with the shapes in the order in which they were measured, each forward once."""
    if frame.empty:
        return frame
    rows = _contest(frame)
    rows = rows[(rows["name"] != "forward") | ~rows["impl"].isin(SAME_FORWARD)]
    shapes = list(dict.fromkeys(frame[SHAPE].itertuples(index=False, name=None)))
    order = [shapes.index(shape) for shape in rows[SHAPE].itertuples(index=False, name=None)]
    return rows.assign(order=order).sort_values(["order", "rank"], kind="stable").reset_index(drop=True)


def figure_rivals(frame: pd.DataFrame) -> Figure | None:
    """Two panels, forward and backward: achieved TFLOP/s of every implementation on every shape, as dots."""
    rows = _rivals(frame)
    if ok_rows(rows).empty:
        return None
    shapes = list(dict.fromkeys(_shape_names(rows)))
    figure, axes = figures.panels(2, width=5.2, height=0.9 + 0.42 * len(shapes))
    for axis, name in zip(axes, ("forward", "backward"), strict=True):
        of_pass = ok_rows(rows, name=name)
        for impl in _tried(rows):
            mine = select(of_pass, impl=impl)
            heights = [shapes.index(name) for name in _shape_names(mine)]
            axis.scatter(
                mine["achieved_tflops"],
                heights,
                color=figures.COLOURS[impl],
                label=NAMES[impl],
                s=46 if impl in OURS else 22,
                marker="D" if impl in OURS else "o",
                zorder=3,
            )
        ceiling = of_pass["ceiling"].dropna()
        if len(ceiling):
            axis.axvline(ceiling.iloc[-1], color="0.2", linestyle="--", linewidth=1, label="measured matrix product")
        axis.set_yticks(range(len(shapes)), shapes if name == "forward" else [""] * len(shapes))
        axis.invert_yaxis()
        axis.set_xlim(left=0)
        axis.set_xlabel("achieved rate (TFLOP/s)")
        axis.set_title(PHASE_NAMES[name])
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    figure.suptitle(f"Every implementation on every shape (B,H,S,D), bf16, {frame.attrs['device']}", fontsize=10)
    return figure


def findings_rivals(frame: pd.DataFrame) -> list[str]:
    """Says, for every rival and pass, where ours is ahead, behind, or not told apart from it."""
    rows = ok_rows(_rivals(frame))
    if rows.empty or "ratio_to_ours" not in rows:
        return []
    others = rows[~rows["impl"].isin(OURS)].dropna(subset=["ratio_to_ours"])
    sentences = []
    for impl in [impl for impl in NAMES if impl in set(others["impl"])]:
        for name in PASSES:
            mine = select(others, impl=impl, name=name)
            if mine.empty:
                continue
            ahead, behind = mine[mine["ratio_to_ours_low"] > 1], mine[mine["ratio_to_ours_high"] < 1]
            text = (
                f"{PHASE_NAMES[name].capitalize()}: ours is ahead of {NAMES[impl]} on {len(ahead)} of "
                f"{count(len(mine), 'shape')}"
            )
            if len(ahead):
                text += f" ({span(ahead['ratio_to_ours'])} as fast)"
            if len(behind):
                names = [f"{_shape_name(row)} ({times(row['ratio_to_ours'])})" for _, row in behind.iterrows()]
                text += f", behind on {len(behind)}: {listing(names, 8)}"
            unclear = len(mine) - len(ahead) - len(behind)
            if unclear:
                text += f"; {unclear} not told apart"
            sentences.append(text + ".")
    return sentences + _gradients_by(rows)


GRADIENTS_BY = {
    "one pass": "one pass over the tiles, whose shares of ∂Q are added in order",
    "two passes": "two passes over the tiles",
    "triton": "the Triton kernels, which share a walk among programs where tiles are few",
}


def _gradients_by(rows: pd.DataFrame) -> list[str]:
    """Says which kernels computed the gradients after the Gluon forward: that depends on the shape."""
    mine = ok_rows(rows, impl="gluon", name="backward")
    chosen = [row["observed"].get("backward") for row in mine.to_dict("records")]
    parts = [f"{text} ({count(chosen.count(name), 'shape')})" for name, text in GRADIENTS_BY.items() if name in chosen]
    return [f"The gradients of {NAMES['gluon']} are those of {listing(parts)}."] if parts else []


def table_leaderboard(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns the leaderboard's row, forward and backward together, by implementation, beside the best entry."""
    rows = _leaderboard(frame)
    if rows.empty:
        return rows
    entries = _published_entries(LEADERBOARD.length, LEADERBOARD.d_head, "forward_backward")
    lines = [
        {
            "implementation": NAMES[row["impl"]],
            "GPU": frame.attrs["device"],
            "forward + backward (ms)": number(row["median_ms"]),
            "TFLOP/s": number(row["achieved_tflops"]),
            "of measured product": percent(row["ceiling_fraction"]),
        }
        for row in rows.sort_values("median_ms", kind="stable").to_dict("records")
    ]
    for entry in entries:
        lines.append(
            {
                "implementation": f"published: {entry['implementation']}",
                "GPU": entry["gpu"],
                "forward + backward (ms)": number(entry["time_ms"]),
                "TFLOP/s": "–",
                "of measured product": "–",
            }
        )
    return pd.DataFrame(lines)


def _leaderboard(frame: pd.DataFrame) -> pd.DataFrame:
    rows = ok_rows(_rivals(frame), name="forward_backward")
    return select(
        rows,
        batch=LEADERBOARD.batch,
        heads=LEADERBOARD.heads,
        length=LEADERBOARD.length,
        d_head=LEADERBOARD.d_head,
        causal=LEADERBOARD.causal,
    )


def _published_entries(length: int, d_head: int, phase: str) -> list[dict]:
    entries = published.load("attention_kernels")
    return ok_rows(entries, seq_len=length, d_head=d_head, phase=phase).to_dict("records")


def findings_leaderboard(frame: pd.DataFrame) -> list[str]:
    """Says which implementation is fastest on the leaderboard's row, and how ours compares with the best entry."""
    rows = _leaderboard(frame)
    if rows.empty:
        return []
    best = rows.loc[rows["median_ms"].idxmin()]
    sentences = [
        f"On the leaderboard's shape {NAMES[best['impl']]} is the fastest here, {number(best['median_ms'])} ms."
    ]
    ours = _ours(rows)
    for entry in _published_entries(LEADERBOARD.length, LEADERBOARD.d_head, "forward_backward") if len(ours) else []:
        speedup = entry["time_ms"] / ours["median_ms"].iloc[0]
        word = speed_word(speedup)
        comparison = "takes about the same time as" if word == "about the same" else f"is {word} than"
        factor = "" if word == "about the same" else f" ({times(max(speedup, 1 / speedup))})"
        theirs = f"{number(entry['time_ms'])} ms on an {entry['gpu']}"
        sentences.append(f"Ours {comparison} the {entry['implementation']}, {theirs}{factor}.")
    return sentences


# ---- the versions ---------------------------------------------------------------------------------------------


def versions() -> pd.DataFrame:
    """Returns what was tried on the kernels: see the README beside the file."""
    file = resources.files("labkit") / "data" / "development" / "flash_attention_versions.csv"
    with file.open(encoding="utf-8") as lines:
        return pd.read_csv(lines, keep_default_na=False, na_values={"gained_percent": [""]})


def table_versions(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns every change with the gain in speed that it was predicted to bring and the one that it brought."""
    return pd.DataFrame(
        {
            "pass": row["pass"],
            "change": row["change"],
            "B,H,S,D mask": row["shape"],
            "predicted": f"{row['predicted_percent']:+d} %",
            "gained": "–" if math.isnan(row["gained_percent"]) else f"{row['gained_percent']:+.0f} %",
            "kept": row["kept"],
            "compared in": row["compared"],
            "note": row["note"],
        }
        for row in frame.to_dict("records")
    )


def findings_versions(frame: pd.DataFrame) -> list[str]:
    """Says how good the predictions were, and which was furthest off to either side."""
    if frame.empty or frame["gained_percent"].isna().all():
        return []
    timed = frame.dropna(subset="gained_percent")
    excess = timed["gained_percent"] - timed["predicted_percent"]
    reached, lost = int((excess >= 0).sum()), int((timed["gained_percent"] <= 0).sum())
    sentences = [
        f"Of {count(len(timed), 'change')} that were timed {reached} gained what was predicted or more, {lost} gained "
        f"nothing or lost; {int((frame['kept'] == 'yes').sum())} of {len(frame)} were kept."
    ]
    for end, word in ((excess.idxmin(), "least"), (excess.idxmax(), "most")):
        row = timed.loc[end]
        sentences.append(
            f"Beside its prediction {word} was gained by “{row['change']}” ({row['shape']}): "
            f"{row['gained_percent']:+.0f} % for {row['predicted_percent']:+d} %."
        )
    return sentences


# ---- memory ---------------------------------------------------------------------------------------------------


def _memory(frame: pd.DataFrame, precision: str) -> pd.DataFrame:
    """Returns the peaks of a forward and a backward pass."""
    return select(frame, precision=precision, phase="forward_backward").copy() if not frame.empty else frame


def table_memory(frame: pd.DataFrame, precision: str) -> pd.DataFrame:
    """Returns the peak of a forward and a backward pass in MiB, by length and implementation."""
    rows = _memory(frame, precision)
    if rows.empty or _tried(rows) == []:
        return pd.DataFrame()
    return _matrix(
        rows.sort_values("length", kind="stable"), "length", lambda row: _cell(row, "peak_bytes", _mebibytes)
    )


def _mebibytes(num_bytes: float) -> str:
    return number(num_bytes / 2**20)


def figure_memory(frame: pd.DataFrame) -> Figure | None:
    """One panel per precision: peak memory over length by implementation, × where it ran out."""
    precisions = [precision for precision in PRECISIONS if len(ok_rows(_memory(frame, precision)))]
    if not precisions:
        return None
    figure, axes = figures.panels(len(precisions), width=4.6, height=3.2)
    for axis, precision in zip(axes, precisions, strict=True):
        rows = _memory(frame, precision)
        for impl in _tried(rows):
            of_impl = select(rows, impl=impl).sort_values("length")
            measured = ok_rows(of_impl)
            axis.plot(
                measured["length"],
                measured["peak_bytes"] / 2**20,
                color=figures.COLOURS[impl],
                label=NAMES[impl],
                linewidth=2 if impl in OURS else 1.2,
                marker="o",
                markersize=3,
            )
            figures.mark_failures(axis, of_impl, "length", colour=figures.COLOURS[impl])
        figures.context_axis(axis, rows["length"].unique())
        axis.tick_params(axis="x", labelrotation=60)
        axis.set_xlabel("length (queries and keys)")
        _log_axis(axis, "peak memory (MiB)")
        axis.set_title(precision)
    _shared_legend(figure, axes, num_columns=4)
    row = ok_rows(_memory(frame, precisions[0])).iloc[0]
    figure.suptitle(
        f"Peak memory of forward and backward, batch 1, one head, d = {row['d_head']}, {frame.attrs['device']} "
        "(× out of memory)",
        fontsize=10,
    )
    return figure


def findings_memory(frame: pd.DataFrame) -> list[str]:
    """Says how the peaks grow with the length, what ran out of memory, and what ours saves."""
    sentences = []
    for precision in PRECISIONS:
        rows = _memory(frame, precision)
        measured = ok_rows(rows)
        if measured.empty:
            continue
        growth: dict[str, list[str]] = {}
        for impl in _tried(rows):
            mine = select(measured, impl=impl)
            if len(mine) >= 3:
                exponent = power_law_exponent(mine["length"], mine["peak_bytes"])
                word = "quadratically" if exponent >= QUADRATIC else "in between"
                word = "at most linearly" if exponent <= LINEAR else word
                growth.setdefault(word, []).append(f"{NAMES[impl]} (exponent {number(exponent)})")
        for word, names in growth.items():
            sentences.append(f"In {precision}, peak memory grows {word} with the length for {listing(names, 9)}.")
        for impl, failed in rows[rows["status"] == "oom"].groupby("impl", sort=False):
            text = f"{NAMES[impl]} in {precision} runs out of memory at length {failed['length'].min()}"
            ours = measured[(measured["length"] == failed["length"].min()) & measured["impl"].isin(OURS)]
            if len(ours):
                text += f", where ours needs {span(ours['peak_bytes'], _mebibytes)} MiB"
            sentences.append(text + ".")
    return sentences


# ---- what others published --------------------------------------------------------------------------------------

_PUBLISHED_PRECISIONS = {"float32": "fp32", "bfloat16": "bf16"}
_PUBLISHED_PASSES = {"forward": "fwd", "backward": "bwd", "forward_backward": "e2e"}


def published_matches(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns published times with ours of the same shape, precision and pass; the ratio is theirs over ours.

    Their Triton kernel stands beside ours, their compiled formula beside the formula compiled here.
    """
    rows = ok_rows(_contest(frame))
    if rows.empty:
        return rows
    table = published.load("flash_attention")
    keys = ["length", "d_head", "precision", "name"]
    matched = []
    for theirs, ours in (("triton", _ours(rows)), ("pytorch", rows[rows["impl"] == "compiled"])):
        for name, column in _PUBLISHED_PASSES.items():
            others = pd.DataFrame(
                {
                    "gpu": table["gpu"],
                    "variant": {"triton": "Triton", "pytorch": "compiled"}[theirs],
                    "length": table["seq_len"],
                    "d_head": table["d_model"],
                    "precision": table["dtype"].map(_PUBLISHED_PRECISIONS),
                    "name": name,
                    "published_ms": table[f"{column}_{theirs}_ms"],
                }
            )
            matched.append(others[table["status"] == "ok"].merge(ours[[*keys, "median_ms"]], on=keys))
    result = pd.concat(matched, ignore_index=True)
    return result.assign(ratio=result["published_ms"] / result["median_ms"])


def table_published(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns every published time beside ours, one row per case: theirs → ours (their time over ours)."""
    matched = published_matches(frame)
    if matched.empty:
        return pd.DataFrame()
    keys = {"GPU": "gpu", "theirs": "variant", "precision": "precision", "d": "d_head", "length": "length"}
    lines: dict[tuple, dict[str, str]] = {}
    for row in matched.sort_values(list(keys.values())[1:], kind="stable").to_dict("records"):
        line = lines.setdefault(tuple(row[name] for name in keys.values()), {})
        line[row["name"]] = theirs_and_ours(row)
    return pd.DataFrame(
        {
            **dict(zip(keys, key, strict=True)),
            **{f"{PHASE_NAMES[name]} (ms)": line.get(name, "–") for name in PASSES},
        }
        for key, line in lines.items()
    )


def table_published_summary(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns the ratio published / ours by variant, precision and pass."""
    matched = published_matches(frame)
    if matched.empty:
        return pd.DataFrame()
    keys = ["gpu", "variant", "precision", "name"]
    return pd.DataFrame(
        {
            "GPU": key[0],
            "theirs": key[1],
            "precision": key[2],
            "pass": PHASE_NAMES[key[3]],
            "rows": len(group),
            "published / ours, geometric mean": times(geometric_mean(group["ratio"])),
            "range": span(group["ratio"]),
        }
        for key, group in matched.groupby(keys, sort=False)
    )


def table_published_rates(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns published rates beside the rates here of the same length, head dimension, mask and pass, in bf16."""
    rows = ok_rows(_rivals(frame))
    entries = published.load("attention_kernels")
    lines = []
    for entry in entries[entries["rate_tflops"].notna()].to_dict("records"):
        here = select(
            rows, length=entry["seq_len"], d_head=entry["d_head"], causal=entry["causal"], name=entry["phase"]
        )
        if len(here):
            best = _ours(here)
            lines.append(
                {
                    "published": f"{entry['implementation']}, {entry['gpu']}",
                    "S,D mask": f"{entry['seq_len']},{entry['d_head']} {'causal' if entry['causal'] else 'full'}",
                    "pass": PHASE_NAMES[entry["phase"]],
                    "published (TFLOP/s)": number(entry["rate_tflops"]),
                    "cuDNN here (TFLOP/s)": _rate_of(here, "sdpa_cudnn"),
                    "ours (TFLOP/s)": number(best["achieved_tflops"].max()) if len(best) else "–",
                }
            )
    return pd.DataFrame(lines)


def _rate_of(rows: pd.DataFrame, impl: str) -> str:
    mine = select(rows, impl=impl)
    return number(mine["achieved_tflops"].max()) if len(mine) else "–"


def findings_published(frame: pd.DataFrame) -> list[str]:
    """Says how this device compares with the published one, pass by pass."""
    matched = published_matches(frame)
    sentences = []
    if matched.empty:
        return []
    for (gpu, variant, precision), group in matched.groupby(["gpu", "variant", "precision"], sort=False):
        parts = []
        for name in PASSES:
            of_pass = select(group, name=name)
            if len(of_pass):
                mean = geometric_mean(of_pass["ratio"])
                word = speed_word(mean)
                factor = "" if word == "about the same" else f" ({times(max(mean, 1 / mean))})"
                parts.append(f"{PHASE_NAMES[name]} {word}{factor}")
        subject = "ours" if variant == "Triton" else "the compiled formula"
        shapes = count(len(group.drop_duplicates(["d_head", "length"])), "shape")
        sentences.append(
            f"In {precision}, over {shapes} in common with the published {variant} figures of an {gpu}, "
            f"{subject} on this {frame.attrs['device']} is: "
            f"{listing(parts)}."
        )
    return sentences
