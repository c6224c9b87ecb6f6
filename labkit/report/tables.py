"""What the chapters' tables share: order of rows, cells for failures, Markdown."""

import functools
import weakref
from collections.abc import Callable, Sequence

import pandas as pd

from labkit.configs import COMPILE_MODES, PHASES, PRECISIONS, SIZES
from labkit.report.findings import number

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


def once_per_frame(function: Callable[..., pd.DataFrame]) -> Callable[..., pd.DataFrame]:
    """Returns `function`, which selects from a frame of records, so that it works once for a frame and its arguments.

    Tables, figures and findings of a section all begin with the same selection of the same records. What is returned
    is a frame of its own (pandas copies on write), so that a caller may change it; the frame given must not change.
    """
    made: dict[tuple, pd.DataFrame] = {}

    @functools.wraps(function)
    def remembered(frame: pd.DataFrame, *arguments) -> pd.DataFrame:
        key = (id(frame), *arguments)
        if key not in made:
            made[key] = function(frame, *arguments).copy(deep=False)
            weakref.finalize(frame, made.pop, key, None)  # before another frame can have its identity
        return made[key].copy(deep=False)

    return remembered


def in_order(frame: pd.DataFrame, columns: Sequence[str]) -> pd.DataFrame:
    """Returns the rows sorted by `columns`, names in the order in which this project lists them."""

    def key(column: pd.Series) -> pd.Series:
        order = ORDER.get(column.name)
        return column.map({name: rank for rank, name in enumerate(order)}) if order else column

    return frame.sort_values(list(columns), key=key, kind="stable").reset_index(drop=True)


def ok_rows(frame: pd.DataFrame, **equal) -> pd.DataFrame:
    """Returns the measured rows whose columns have the given values."""
    if frame.empty:
        return frame
    mask = (frame["status"] == "ok").to_numpy()
    for column, value in equal.items():
        mask = mask & (frame[column] == value).to_numpy()
    return frame[mask]


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


def to_markdown(frame: pd.DataFrame) -> str:
    """Returns a Markdown table; numbers and statuses to the right, pipes escaped (pandas does not)."""
    escaped = frame.map(lambda value: str(value).replace("|", "\\|"))
    escaped.columns = [str(name).replace("|", "\\|") for name in frame.columns]
    named = {*ORDER, "value"}  # words, even where some begin with a digit
    align = ["left" if name in named or _is_text(frame[name]) else "right" for name in frame.columns]
    return escaped.to_markdown(index=False, disable_numparse=True, colalign=align)


def _is_text(column: pd.Series) -> bool:
    return not column.map(lambda value: str(value)[:1].isdigit() or str(value) in ("–", "oom", "error")).any()
