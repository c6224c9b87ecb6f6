"""Notebook 04's plans of recomputing: what the rules say beside what was measured."""

from itertools import pairwise

import pandas as pd

from labkit import accounting
from labkit.report.text import gib, number, times
from labkit.report.memory import checkpointing, predicted, shape
from labkit.report.tables import cell, select


def table_theory(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns by plan the rules' forwards, time (a forward is a third of a step) and bytes beside the measured ones."""
    lines, rows = [], checkpointing(frame)
    for row in select(rows, attention=rows["attention"].mode().iloc[-1]).to_dict("records"):
        num_layers, stream = shape(row)[0].num_layers, accounting.residual_stream_bytes(*shape(row))
        sizes = [num_layers, *(plan := accounting.checkpoint_plan(row["plan"], num_layers))]
        blocks = sizes[-1] * predicted(accounting.block_activation_bytes, row, frame)
        rule = blocks + stream * sum(outer / inner for outer, inner in pairwise(sizes))
        forwards = accounting.checkpoint_forwards(num_layers, plan)
        row["held"] = row["peak_bytes"] - row.get("resident_bytes", 0) - row.get("other_bytes", 0)
        lines.append({
            "k": row["plan"], "forwards, rule": number(forwards), "measured": cell(row, "forwards_per_block"),
            "time / none, rule": times(1 + (forwards - 1) / 3), "time / none": cell(row, "slowdown", times),
            "inputs + blocks, rule (GiB)": gib(rule), "held (GiB)": cell(row, "held", gib)})  # fmt: skip
    return pd.DataFrame(lines)
