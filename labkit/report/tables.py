"""Tables as Markdown and as CSV."""

import re

import pandas as pd

from labkit.records import STATUSES
from labkit.report.frame import ORDER

MAX_ROWS = 8
MAX_COLUMNS = 7
"""A table of the report; the CSV file of its section holds all rows."""

LEFT = {*ORDER, "case", "commit"}
"""Columns that are set to the left though their cells may look like numbers."""

NOT_IN_CSV = [
    "section",
    "samples",
    "observed",
    "session",
    "sessions",
    "timer_num_warmup",
    "timer_stop_reason",
]


def to_markdown(frame: pd.DataFrame) -> str:
    """Returns a Markdown table; numbers and statuses to the right; pipes and "<" escaped."""
    texts = frame.map(str)
    is_text = re.compile(
        r"(?<![A-Za-z])(?!undecided)[A-Za-z]{4}|\d{4}-\d\d"
    ).search  # a word or a date
    left = LEFT | {
        name
        for name in frame
        if any(is_text(text) and text not in STATUSES for text in texts[name])
    }
    rules = ["---" if name in left else "---:" for name in frame]
    rows = [texts.columns, *texts.itertuples(index=False)]
    head, *lines = [
        "".join(f"| {text} " if text else "| " for text in map(escaped, row)) + "|" for row in rows
    ]
    return "\n".join([head, "|" + "|".join(rules) + "|", *lines])


def to_csv(frame: pd.DataFrame) -> str:
    """Returns the rows as CSV: case, phase, status and metrics, floats with six significant digits.

    Columns that are empty throughout, nested values and what only identifies a record are left out.
    A text that a spreadsheet would take for a formula begins with an apostrophe.
    """
    kept = frame.drop(columns=NOT_IN_CSV, errors="ignore")
    kept = kept.replace("", None).dropna(axis="columns", how="all")
    kept = kept.rename(columns=_no_formula).map(_no_formula)
    return kept.to_csv(index=False, float_format="%.6g", lineterminator="\n")


def _no_formula(value: object) -> object:
    return (
        f"'{value}" if isinstance(value, str) and value.startswith(("=", "+", "-", "@")) else value
    )


def escaped(value: object) -> str:
    """Returns `value` as it may stand in a Markdown table: no column, no HTML tag comes out of
    it.
    """
    text = " ".join(str(value).split()).replace("|", "\\|")
    # Inside code, Markdown escapes it.
    return text if text.startswith("`") else re.sub(r"(?<!\\)<", "&lt;", text)
