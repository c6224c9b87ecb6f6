"""Chapter 08: its figures, and the queries that are its alone."""

from collections.abc import Mapping

import pandas as pd
from matplotlib.figure import Figure

from labkit import published
from labkit.report import facts, figures, verdicts
from labkit.report.frame import Row, cell, mark, ok_rows, only, select, usable
from labkit.report.text import gib, number, span, times

STOCK = "transformers, SDPA"
PRODUCTS = "matrix products alone"
FUSED = "fused (+ MLP)"
CHANGES = {
    "cu_seqlens": "packed attention",
    "positions": "+ positions at once, one graph",
    "attention": "+ one projection, dropout redrawn",
    "norm": "+ norm with its sum",
    "fused": FUSED,
}
NAMES = {
    "transformers sdpa": STOCK,
    "transformers sdpa + compile": "transformers, SDPA, compiled",
    "eager": "first version",
    "eager + compile": "first version, compiled",
    **CHANGES,
    "fused + compile": "fused, compiled",
    "fused, recomputed": "fused, MLP recomputed",
}
"""Ways to run the encoder as they are called everywhere, in order; "+" keeps what stands before it.
"""

BATCHES = {"A": "one size", "B": "many sizes"}
BOTH = "forward_backward"
PEERS = {"torch.compile": ["compiled"], "fastest of Liger, QuACK": ["liger", "quack"]}


def encoder(steps: pd.DataFrame, floor: pd.DataFrame) -> pd.DataFrame:
    """Returns all ways by name, and the matrix products alone."""
    rows = pd.concat([steps, floor.assign(way=PRODUCTS)], ignore_index=True)
    ways = rows["way"].replace(NAMES)
    order = list(dict.fromkeys([*NAMES.values(), *ways]))
    batches = rows["workload"].map(BATCHES) if len(rows) else ()
    return rows.assign(way=pd.Categorical(ways, order), batch=batches)


def waterfall(rows: pd.DataFrame) -> Figure | None:
    """Draws the sustained time after each change, with its ratio to the one before."""
    rows = ok_rows(rows, batch="one size", phase=BOTH)
    ways = [STOCK, *CHANGES.values(), PRODUCTS]
    steps = [row for row in (only(rows, way=way) for way in ways) if row]
    if not steps:
        return None
    figure, axis = figures.panel(height=3.0)
    before = {}
    for row in steps:
        is_change = row["way"] in CHANGES.values()
        text = cell(row, "sustained_ms")
        if is_change and before:
            fact = facts.compare_rows(before, row, "sustained_ms")
            text += f", {fact['ratio']} {fact.verdict}"
        colour = "#0072b2" if is_change else "#7f7f7f"
        bar = axis.barh(row["way"], row["sustained_ms"], color=colour)
        axis.bar_label(bar, [text], padding=4, fontsize=9)
        before = row if is_change else {}
    axis.set_xlabel("sustained time of forward + backward (ms)")
    axis.set_xlim(right=1.6 * axis.get_xlim()[1])
    axis.invert_yaxis()
    axis.grid(visible=False, axis="y")
    return figure


def time_and_peak(row: Row) -> str:
    """Returns "89.9 (10.7)": sustained time (ms) and peak memory (GiB)."""
    return f"{cell(row, 'sustained_ms')} ({gib(row.get('peak_bytes'))})"


def kernel_times(profile: pd.DataFrame) -> pd.DataFrame:
    """Returns kernel sums by class and way; rest_ms is of what is neither matmul nor attention."""
    columns = "way", "kernels_ms", "matmul_ms", "attention_ms", "observed"
    rows = usable(profile, *columns).replace({"way": NAMES})
    return rows.assign(
        rest_ms=rows["kernels_ms"] - rows["matmul_ms"] - rows["attention_ms"],
        timer_method=[observed["source"] for observed in rows["observed"]],
    )


def errors(accuracy: pd.DataFrame) -> pd.DataFrame:
    """Returns the errors against fp64 over those of the first version in the same precision."""
    columns = "out_error", "eager_out_error", "gradient_error", "eager_gradient_error"
    rows = usable(accuracy, *columns)
    return rows.assign(
        out_ratio=rows["out_error"] / rows["eager_out_error"],
        gradient_ratio=rows["gradient_error"] / rows["eager_gradient_error"],
    )


def kernels_table(kernels: pd.DataFrame, own: Mapping[str, str]) -> pd.DataFrame:
    """Returns by kernel and shape, both passes: ours, its share of the ceiling, how many times as
    fast as each peer.

    Args:
        own: what a function of the user's is called, by the name in records.
    """
    peers_by_name = PEERS | {name: [impl] for impl, name in own.items()}
    lines = []
    rows = ok_rows(kernels, phase=f"ours {BOTH}").sort_values("operation", kind="stable")
    for ours in rows.to_dict("records"):
        shape = {key: ours[key] for key in ("operation", "rows", "columns")}
        line = {
            "kernel": f"{shape['operation']} {shape['rows']:,}×{shape['columns']:,}",
            "ms": cell(ours),
            "% of ceiling": number(100 * ours["ceiling_fraction"], 2),
        }
        for name, impls in peers_by_name.items():
            phases = [f"{impl} {BOTH}" for impl in impls]
            peers = ok_rows(kernels, phase=phases, **shape).sort_values("ratio_to_ours")
            line[name] = _beside(peers.iloc[0].to_dict()) if len(peers) else "–"
        lines.append(line)
    return pd.DataFrame(lines)


def _beside(peer: Row) -> str:
    ratio = verdicts.paired(peer)
    # Without the widening: sessions over 5 % apart.
    if ratio.verdict == verdicts.UNDECIDED or ratio.high > 1.07 * ratio.low:
        return span(ratio.low, ratio.high)
    return verdicts.LEVEL if ratio.verdict == verdicts.LEVEL else mark(peer) + times(ratio.mid)


def published_times(rows: pd.DataFrame) -> pd.DataFrame:
    """Returns the published forward, and forward + backward, of a mini-batch of 64 images, beside
    ours.
    """
    theirs = published.load("siglip2")
    names = {"original": NAMES["eager + compile"], "optimized": FUSED}
    theirs["way"] = theirs["variant"].map(names)
    # Published are 1,024 images, 16 times the mean of a mini-batch.
    theirs["forward"] = theirs["forward_ms"] / 16
    theirs[BOTH] = theirs["forward"] + theirs["backward_ms"] / 16
    theirs = theirs.melt(["gpu", "way"], ["forward", BOTH], "phase", "published_ms")
    return facts.beside(theirs, select(rows, batch="one size", size="so400m"), ["way", "phase"])
