"""Figures published elsewhere, as data with their source, to set our own measurements beside.

The tables are in `labkit/data/published/`; the README there gives each one's origin and known
errors. Nothing in them was measured by this project.
"""

import pandas as pd

from labkit.configs import DATA, check_known

# The reports' "xl" has the dimensions that labkit calls "xl-2025": "xl" alone would not say which
# edition it is.
_SIZES = {"small": "small", "medium": "medium", "large": "large", "xl": "xl-2025", "2.7b": "2.7b"}

_NAMES = {"context_length": "context", "batch_size": "batch", "mean_ms": "published_ms"}

_COLUMNS = [
    "source",
    "gpu",
    "size",
    "context",
    "batch",
    "precision",
    "compile",
    "warmup_steps",
    "phase",
    "statistic",
    "published_ms",
    "std_ms",
    "status",
    "note",
]

# A missing pair must fail: a default would label a time with a precision that was not run.
_PRECISION_AND_COMPILE = {
    ("float32", "none"): ("fp32", "none"),
    ("float32", "compile"): ("fp32", "whole"),
    ("float32", "compile_tf32"): ("tf32", "whole"),
    ("bfloat16_autocast", "none"): ("bf16", "none"),
}

_OPTIMIZER_STEP_INCLUDED = "published_script_also_runs_optimizer_step"

# Notes whose rows must not be used.
_DISPUTED_NOTES = {
    # the data published beside the report contradicts this quote and the next
    "companion_data_says_77.4_ms",
    "disputed_companion_data_oom_at_256_and_439.2_ms_at_128",
    # labelled a median, but the mean of host ranges under nsys, first iteration included
    "profiled_under_nsys",
    "context_not_stated_matches_128",
}


def load(table: str) -> pd.DataFrame:
    """Return one published table as printed, one row per reported figure.

    Args:
        table: name of a CSV file in `labkit/data/published/` without its ending, such as
            "end_to_end".

    Returns:
        The CSV's columns, each with its unit as suffix (`_ms`, `_us`, `_mib`, `_gib`, `_percent`).
        NaN means not reported, so a column of counts with empty cells is floating point.

    Raises:
        ValueError: there is no such table.

    Source: `labkit/data/published/README.md`, with the known errors of each report; none is
    corrected here.
    """
    folder = DATA / "published"
    check_known("published table", table, sorted(path.stem for path in folder.glob("*.csv")))
    # Only an empty cell is missing: pandas would also swallow words such as "None" and "NA".
    return pd.read_csv(folder / f"{table}.csv", keep_default_na=False, na_values=[""])


def step_times() -> pd.DataFrame:
    """Return the published end-to-end step times in labkit's vocabulary, to be merged with our own
    measurements.

    A case may occur twice: one report's warm-up study repeats its cases at other `warmup_steps`,
    another repeats a case at the same count. Choose by `warmup_steps` and `note` before merging one
    to one. Left out are quotes that the report's own data contradicts, times taken under a
    profiler with the first iteration included, rows without a context length, and negative times.

    Returns:
        One row per published figure, with the columns
        source: as the README names it; gpu: the device as the report names it;
        size: "small", "medium", "large", "xl-2025" or "2.7b"; context: tokens per sequence (Int64,
            NA if not stated);
        batch: sequences per step;
        precision: "fp32", "tf32" or "bf16" (autocast); compile: "none" or "whole";
        warmup_steps: steps run before the measured ones (Int64, NA if not stated);
        phase: "forward", "backward", "forward_backward" or "train_step", by what was run and not by
            its published name;
        statistic: what `published_ms` is over the steps; published_ms, std_ms: ms, NaN if not
            reported or "oom";
        status: "ok" or "oom"; note: the table's own, fragments joined by ";".

    Raises:
        KeyError: the table holds a model or a dtype that this module does not know how to read.

    Source: `end_to_end.csv` and the known errors in `labkit/data/published/README.md`.
    """
    rows = []
    for row in load("end_to_end").fillna({"note": ""}).rename(columns=_NAMES).to_dict("records"):
        notes = row["note"].split(";")
        if row["published_ms"] < 0 or not _DISPUTED_NOTES.isdisjoint(notes):
            continue
        row["size"] = _SIZES[row["model"]]
        row["precision"], row["compile"] = _PRECISION_AND_COMPILE[row["dtype"], row["compiled"]]
        if _OPTIMIZER_STEP_INCLUDED in notes:
            row["phase"] = "train_step"
        rows.append(row)
    return pd.DataFrame(rows, columns=_COLUMNS).astype(
        {"context": "Int64", "batch": "Int64", "warmup_steps": "Int64"}
    )
