"""Chapter 02: its figures, and the queries that are its alone. Times of kernels are device times."""

import pandas as pd
from matplotlib.figure import Figure

from labkit import published
from labkit.configs import SIZES
from labkit.report import facts, figures
from labkit.report.frame import in_order, mark, ok_rows, select, size_name
from labkit.report.text import number

CASE = ["size", "context", "precision", "attention"]
KEPT = [*CASE, "phase", "batch", "status", "session", "timer_method", "disturbed"]
WAYS = {
    "fp32": {"precision": "fp32", "attention": "eager"},
    "bf16": {"precision": "bf16", "attention": "eager"},
    "bf16, FlashAttention": {"precision": "bf16", "attention": "auto"},
}
SHOWN = {"size": "2.7b", "context": 512, "precision": "bf16", "attention": "eager"}
CORE = "inference/block/attention/core"
"""The range of attention between its projections."""


def tables(frame: pd.DataFrame, name: str) -> pd.DataFrame:
    """Returns a table of all captured steps, each row with its case; `view` is the pass within the step."""
    parts = []
    for row in ok_rows(frame).to_dict("records"):
        table = pd.DataFrame(row["observed"]["tables"][name]).rename(columns={"phase": "view"})
        case = {key: row.get(key) for key in KEPT} | {"disturbed": bool(mark(row))}
        parts.append(table.assign(**case))
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()


def by_class(rows: pd.DataFrame) -> pd.DataFrame:
    """Returns the kernel time of each case and view: total_us and <class>_share; matmul_ms, rest_ms, total_ms."""
    if rows.empty:
        return rows
    sums = rows.pivot_table(
        "total_us", [*KEPT, "view"], "kernel_class", aggfunc="sum", fill_value=0
    )
    total = sums.sum(axis=1)
    shares = sums.div(total, axis=0).add_suffix("_share")
    times = sums.div(1e3).add_suffix("_ms")
    whole = {"total_us": total, "total_ms": total / 1e3, "rest_ms": total / 1e3 - times["matmul_ms"]}
    return shares.join(times).assign(**whole).reset_index()


def classes(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns `by_class` of each pass of a step, and of the step as a whole, whose view is its phase."""
    rows = tables(frame, "classes")
    if rows.empty:
        return rows
    parts = rows[rows["view"] != rows["phase"]]
    return by_class(pd.concat([parts, rows.assign(view=rows["phase"])]))
