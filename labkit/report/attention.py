"""Chapter 05: its figures, and the queries that are its alone."""

import pandas as pd

from labkit import accounting, published
from labkit.report import facts, verdicts
from labkit.report.frame import by_way, ok_rows, select, usable

FUSED = ["sdpa_flash", "sdpa_cudnn", "sdpa_efficient"]
IMPLS = {
    "eager": "eager",
    "compiled": "compiled, 3-D",
    "compiled_heads": "compiled, 4-D",
    "sdpa_math": "SDPA math",
    "sdpa_flash": "SDPA flash",
    "sdpa_cudnn": "SDPA cuDNN",
    "sdpa_efficient": "SDPA efficient",
}
"""Implementations as the chapter calls them."""

CASE = ["impl", "precision", "d_head", "length", "phase"]
LONG = {"d_head": 64, "length": 16384}
ELEMENT_BYTES = {"fp32": 4, "tf32": 4, "bf16": 2}

HOST_SHARE = 0.5
"""A pass whose kernels the host issues in a smaller share of its call does not wait for the host.
"""

PUBLISHED = {
    "none": ("eager", "fp32"),
    "compile": ("compiled", "fp32"),
    "compile_tf32": ("compiled", "tf32"),
}
"""Implementation and precision of each published variant."""


def timed(calls: pd.DataFrame) -> pd.DataFrame:
    """Returns the passes but those whose call time is not the device's: of less than 1 ms, or
    waiting for the host.
    """
    rows = usable(calls, "median_ms")
    waits = [verdicts.issued(row) >= HOST_SHARE for row in rows.to_dict("records")]
    is_short = rows["median_ms"] < facts.LEAST_MS
    return calls.drop(rows.index[is_short | pd.Series(waits, rows.index, bool)])


def times_table(calls: pd.DataFrame) -> pd.DataFrame:
    """Returns the time of every implementation at the long length."""
    ways = {
        "bf16 forward": {"precision": "bf16", "phase": "forward"},
        "bf16 backward": {"precision": "bf16", "phase": "backward"},
        "fp32 forward": {"precision": "fp32", "phase": "forward"},
    }
    return by_way(select(calls, **LONG), "impl", ways).replace({"impl": IMPLS})


def counted(calls: pd.DataFrame) -> pd.DataFrame:
    """Returns what each forward pass keeps for backward, `saved_bytes`, with the `error` of its
    closed form, relative, and its `case` in words.
    """
    rows = usable(calls, "saved_bytes", "batch", *CASE)
    errors = []
    for row in rows.to_dict("records"):
        kind = "math" if row["impl"] == "sdpa_math" else "eager"
        if row["impl"] in FUSED or row.get("num_replacements", 0) > 0:
            kind = "fused"
        shape = row["batch"], row["length"], row["d_head"]
        size = ELEMENT_BYTES[row["precision"]]
        form = accounting.attention_saved_bytes(kind, *shape, size)
        errors.append(form / row["saved_bytes"] - 1)
    cases = [facts.case_name(row) for row in rows[CASE].to_dict("records")]
    return rows.assign(error=errors, case=cases)


def published_times(calls: pd.DataFrame) -> pd.DataFrame:
    """Returns the published times that have a timed pass of the same formula, precision and shape
    beside them.
    """
    names = {"batch_size": "batch", "d_model": "d_head", "seq_len": "length", "pass": "phase"}
    names["ms_per_pass"] = "published_ms"
    theirs = ok_rows(published.load("attention_pytorch").rename(columns=names))
    theirs["impl"], theirs["precision"] = zip(*theirs["variant"].map(PUBLISHED), strict=True)
    keys = [*CASE, "batch"]
    # The baseline is printed in two tables of the same source.
    return facts.beside(theirs.drop_duplicates(["gpu", *keys]), timed(calls), keys)
