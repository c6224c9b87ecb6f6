"""What the chapters' tables share: order of rows, cells for failures, Markdown."""

import functools
import itertools
import weakref
from collections.abc import Callable, Sequence

import pandas as pd

from labkit.configs import COMPILE_MODES, PHASES, PRECISIONS, SIZES
from labkit.report.findings import number, times

PHASE_NAMES = {
    "inference": "inference",
    "forward": "forward",
    "backward": "backward",
    "forward_backward": "forward + backward",
    "optimizer_step": "optimizer step",
    "train_step": "training step",
    "compile": "first call",
}

ORDER = {
    "size": list(SIZES),
    "precision": list(PRECISIONS),
    "compile": list(COMPILE_MODES),
    "phase": ["compile", *PHASES],
}
"""Order of the values of each column that is not numeric."""


LONG = 20
"""Rows from which on a folded table is given a shorter shape."""

STATISTICS = ("median", "p20–p80", "mean ± std", "steps")
"""What `spread` gives."""


def once_per_frame(function: Callable[..., pd.DataFrame]) -> Callable[..., pd.DataFrame]:
    """Returns `function`, which selects from a frame of records, so that it works once for a frame and its arguments.

    Tables, figures and findings of a section all begin with the same selection of the same records. What is returned
    is a frame of its own, so that a caller may change it; the frame given must not change.
    """
    made: dict[tuple, pd.DataFrame] = {}

    @functools.wraps(function)
    def remembered(frame: pd.DataFrame, *arguments) -> pd.DataFrame:
        key = (id(frame), *arguments)
        if key not in made:
            made[key] = function(frame, *arguments).copy()
            weakref.finalize(frame, made.pop, key, None)  # before another frame can have its identity
        return made[key].copy()

    return remembered


def in_order(frame: pd.DataFrame, columns: Sequence[str]) -> pd.DataFrame:
    """Returns the rows sorted by `columns`, names in the order in which this project lists them."""

    def key(column: pd.Series) -> pd.Series:
        order = ORDER.get(column.name)
        return column.map({name: rank for rank, name in enumerate(order)}) if order else column

    return frame.sort_values(list(columns), key=key, kind="stable").reset_index(drop=True)


def select(frame: pd.DataFrame, **equal) -> pd.DataFrame:
    """Returns the rows whose columns have the given values."""
    if frame.empty:
        return frame
    mask = True
    for column, value in equal.items():
        mask = mask & (frame[column] == value).to_numpy()
    return frame[mask]


def ok_rows(frame: pd.DataFrame, **equal) -> pd.DataFrame:
    """Returns the measured rows whose columns have the given values."""
    return select(frame, status="ok", **equal)


def rows_by(frame: pd.DataFrame, columns: Sequence[str]) -> dict[tuple, dict]:
    """Returns each row by its values of `columns`; of rows with the same values the last."""
    if frame.empty:
        return {}
    keys = zip(*(frame[name].tolist() for name in columns), strict=True)
    return dict(zip(keys, frame.to_dict("records"), strict=True))


def cell(row: dict | pd.Series, column: str = "median_ms", form: Callable[[float], str] = number) -> str:
    """Returns the value of a measured row, or its status ("oom") where there is no value."""
    return form(row[column]) if row["status"] == "ok" else str(row["status"])


def pivot(frame: pd.DataFrame, index: Sequence[str], columns: str, text: Callable[[dict], str]) -> pd.DataFrame:
    """Returns a table with one row per `index` and one column per value of `columns`; "–" where not measured."""
    names = list(dict.fromkeys(in_order(frame[[columns]], [columns])[columns]))
    rows = {}
    for row in in_order(frame, [*index, columns]).to_dict("records"):
        rows.setdefault(tuple(row[name] for name in index), {})[row[columns]] = text(row)
    return pd.DataFrame(
        [
            {**dict(zip(index, key, strict=True)), **{name: values.get(name, "–") for name in names}}
            for key, values in rows.items()
        ]
    )


def spread(row: dict) -> dict[str, str]:
    """Returns the cells of a measured row's statistics (ms), of which "–" where there is no value.

    "steps" is warm-up + timed; † says that the time ran out before there were as many as wanted.
    """
    if row["status"] != "ok":
        return {"median": cell(row)} | dict.fromkeys(STATISTICS[1:], "–")
    limited = "†" if row["timer_stop_reason"] == "time limit" else ""
    return {
        "median": number(row["median_ms"]),
        "p20–p80": "–".join(dict.fromkeys((number(row["p20_ms"]), number(row["p80_ms"])))),
        "mean ± std": f"{number(row['mean_ms'])} ± {number(row['std_ms'], 2)}",
        "steps": f"{int(row['timer_num_warmup'])}+{int(row['n'])}{limited}",
    }


def theirs_and_ours(row: dict) -> str:
    """Returns a published time and ours (ms), and their time over ours: "2.00 → 1.00 (2.00×)"."""
    return f"{number(row['published_ms'])} → {number(row['median_ms'])} ({times(row['ratio'])})"


def constants(frame: pd.DataFrame) -> dict[str, str]:
    """Returns the columns of a long table that hold one and the same value in every row."""
    if len(frame) < LONG:
        return {}
    return {name: str(frame[name].iloc[0]) for name in frame.columns[:-1] if frame[name].nunique(dropna=False) == 1}


def grouped(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns a long table with what a row's first cells repeat of the row above left blank.

    Those are as many columns from the left as at least half of the rows repeat together; a row that differs in one of
    them shows them all.
    """
    if len(frame) < LONG:
        return frame
    rows = [list(row) for row in frame.itertuples(index=False, name=None)]
    for num_columns in range(len(frame.columns) - 1, 0, -1):
        repeats = [above[:num_columns] == row[:num_columns] for above, row in itertools.pairwise(rows)]
        if sum(repeats) >= len(rows) / 2:
            shown = [
                [""] * num_columns + row[num_columns:] if repeat else row
                for repeat, row in zip([False, *repeats], rows, strict=True)
            ]
            return pd.DataFrame(shown, columns=frame.columns, dtype=object)
    return frame


def to_markdown(frame: pd.DataFrame) -> str:
    """Returns a Markdown table; numbers and statuses to the right, pipes escaped.

    Columns are not padded to one width: that would be half of a report which may not grow without bound.
    """
    named = {*ORDER, "value"}  # words, even where some begin with a digit
    rules = ["---" if name in named or _is_text(frame[name]) else "---:" for name in frame.columns]
    columns = [[_escaped(value) for value in frame[name].tolist()] for name in frame.columns]
    rows = [[_escaped(name) for name in frame.columns], *zip(*columns, strict=True)]
    head, *lines = ["".join(f"| {text} " if text else "| " for text in row) + "|" for row in rows]
    return "\n".join([head, "|" + "|".join(rules) + "|", *lines])


def _escaped(value: object) -> str:
    return str(value).replace("|", "\\|")


def _is_text(column: pd.Series) -> bool:
    return not any(str(value)[:1].isdigit() or str(value) in ("–", "oom", "error") for value in column.tolist())
