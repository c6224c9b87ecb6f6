"""Where the time of a step on several ranks goes, against a rank alone: read off the traces of
both.

Each instant of a step is one of: a kernel computes; only communication runs ("exposed"); nothing
runs ("idle": the device waits for the host, in a CUDA graph one branch for another). Kernels of
both steps are paired by name, shape and order. What a paired kernel takes longer is "contention"
where communication runs beside it, else "drift" (clocks, power). Kernels that only one of the
steps launches are "saved" if they are AdamW's, else "added" (copies into buckets, casts).

    step = step alone + exposed + contention + drift + added + idle (its growth) - saved
"""

import numpy as np
import pandas as pd

from labkit.measure.profiling import Trace, busy_ns

STEP = "step"
"""Name of the range around each step."""

COMMUNICATION = r"nccl|barrier|^gloo:"
"""In the names of what communicates. Copies that a rank alone does not make communicate too."""

COMPUTING = r"^(?!autograd::|torch::|c10d::)\w+::"
"""Names of a CPU's operators that compute; others only call them, or hooks."""

PAIRED = ["step", "name", "shape", "number"]


def steps_of(trace: Trace) -> pd.DataFrame:
    """Returns what ran in the steps but the first, in which profilers are slow; the last one only
    ends the window.

    Columns beside the trace's: step, and number of the launch among those alike in its step.
    """
    table = trace.operations
    ranges = trace.ranges
    if trace.source == "kineto cpu":
        table = table[table["name"].str.contains(COMPUTING)]
        messages = ranges[ranges["name"].str.contains(COMMUNICATION)]
        lasted = messages["end_ns"] - messages["start_ns"]
        messages = messages.assign(launched_ns=messages["start_ns"], duration_ns=lasted)
        table = pd.concat([table, messages])
    table = table.sort_values("start_ns", ignore_index=True)
    begins = ranges.loc[ranges["name"] == STEP, "start_ns"].sort_values()
    launched = table["launched_ns"].ffill().bfill()
    table["step"] = np.searchsorted(begins, launched, side="right") - 2
    table["shape"] = table["shape"].fillna("")
    table["number"] = table.groupby(["step", "name", "shape"]).cumcount()
    return table[table["step"] >= 0]


def split(table: pd.DataFrame, alone: pd.DataFrame) -> tuple[dict[str, float], pd.DataFrame]:
    """Returns µs a step by part, and what communicated, of two tables of `steps_of`.

    "span" is the step as traced; it is longer than that of `alone` by the parts, but for paired
    kernels that ran beside one another.
    """
    computing, sent, span = _sorted(table, alone)
    computing_alone, _, span_alone = _sorted(alone, alone)
    busy = busy_ns(pd.concat([computing, sent]))
    pairs = computing.merge(
        computing_alone[[*PAIRED, "duration_ns"]],
        how="outer",
        on=PAIRED,
        suffixes=("", "_alone"),
        indicator="side",
    )
    side = pairs["side"]
    both = pairs[side == "both"]
    # Of each pair and each message, whether they ran at the same time.
    begins = sent["start_ns"].to_numpy() < both[["end_ns"]].to_numpy()
    ends = sent["end_ns"].to_numpy() > both[["start_ns"]].to_numpy()
    is_beside = (begins & ends).any(axis=1)
    slower = both["duration_ns"] - both["duration_ns_alone"]
    extra = pairs["duration_ns"].where(side == "left_only", 0)
    missing = pairs["duration_ns_alone"].where(side == "right_only", 0)
    is_adamw = pairs["name"].str.contains("adam", case=False)
    # An extra kernel beside paired ones makes a step no longer by itself.
    unpaired = busy_ns(computing) - busy_ns(both)
    idle_alone = span_alone - busy_ns(computing_alone)
    parts = {
        "span": span,
        "compute": computing["duration_ns"].sum(),
        "communication": busy_ns(sent),
        "exposed": busy - busy_ns(computing),
        "contention": slower[is_beside].sum(),
        "drift": slower[~is_beside].sum(),
        "added": unpaired - extra[is_adamw].sum() - missing[~is_adamw].sum(),
        "idle": span - busy - idle_alone,
        "saved": (missing - extra)[is_adamw].sum(),
    }
    num_steps = int(table["step"].max() - table["step"].min())
    return {name: float(ns) / 1e3 / num_steps for name, ns in parts.items()}, sent


def _sorted(table: pd.DataFrame, alone: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame, int]:
    """Returns what computes and what communicates within the window, and its length in ns."""
    begins = table.groupby("step")["start_ns"].min()
    begin, end = begins.iloc[0], begins.iloc[-1]
    known = pd.MultiIndex.from_frame(alone[PAIRED])
    is_new = ~pd.MultiIndex.from_frame(table[PAIRED]).isin(known)
    is_new_copy = is_new & (table["kind"] == "memcpy")
    is_sent = table["name"].str.contains(COMMUNICATION) | is_new_copy
    inside = table["start_ns"].between(begin, end, inclusive="left")
    cut = table.assign(end_ns=table["end_ns"].clip(upper=end))
    return cut[inside & ~is_sent], cut[inside & is_sent], int(end - begin)


def transport(sent: pd.DataFrame) -> dict:
    """Returns what carried data longest: the kernel with its thread blocks, or a copy, without."""
    carriers = sent.groupby(["name", "blocks"], dropna=False)["duration_ns"].sum()
    if carriers.empty:
        return {}
    name, blocks = carriers.idxmax()
    blocks = None if pd.isna(blocks) else int(blocks)
    return {"transport": name.partition("(")[0].strip(), "blocks": blocks}
