"""Frames of records: their order, selections, and the cells of a table with the marks that a value
carries.
"""

from collections.abc import Callable, Mapping
from typing import Any

import pandas as pd

from labkit import accounting
from labkit.configs import COMPILE_MODES, PHASES, PRECISIONS, SIZES
from labkit.report.text import number

Row = Mapping[str, Any]
"""A row of a frame, or the columns that tell a case, with their values."""

ORDER = {
    "size": list(SIZES),
    "precision": PRECISIONS,
    "compile": COMPILE_MODES,
    "phase": [
        "compile",
        *PHASES,
        "graph_step",
        # ways to share out a step of several ranks
        "alone",
        "naive",
        "flat",
        "overlapped",
        "bucketed 1 MB",
        "bucketed 10 MB",
        "bucketed 100 MB",
        "bucketed 1000 MB",
        "bucketed 16 blocks",
        "bucketed bf16",
        "bucketed copy",
        "ddp",
        "sharded optimizer",
        "zero redundancy",
        "fsdp",
        "fsdp 16 blocks",
        "fsdp copy",
        "fully_shard",
    ],
    "plan": ["none", "1", "2", "4", "6", "8", "16", "32"],
    "impl": [
        "eager",
        "compiled",
        "compiled_heads",
        "sdpa_math",
        "sdpa_flash",
        "sdpa_cudnn",
        "sdpa_efficient",
    ],
}
"""Order of the values of each column that is not numeric."""

DISTURBED = "⚠ "
"""Stands before a value that was measured while other processes kept the machine busy."""

UNSTEADY = "~ "
"""Stands before a sustained value whose window did not reach steady clocks."""

SUSTAINED_VALUES = ("sustained", "joules", "watts", "tflop_per_joule")
"""How the names of the values begin that are measured back to back."""


def size_name(size: str) -> str:
    """Returns a size with its parameters: "2.7b (3.4 B)"."""
    if size not in SIZES:
        return size
    parameters = accounting.num_parameters(SIZES[size])
    count = f"{parameters / 1e9:.1f} B" if parameters >= 1e9 else f"{parameters / 1e6:.0f} M"
    return f"{size} ({count})"


def in_order(frame: pd.DataFrame, columns: list[str]) -> pd.DataFrame:
    """Returns the rows sorted by `columns`, names in the order in which this project lists them."""

    def key(column: pd.Series) -> pd.Series:
        order = ORDER.get(column.name)
        return column.map({name: rank for rank, name in enumerate(order)}) if order else column

    return frame.sort_values(columns, key=key, kind="stable", ignore_index=True)


def select(frame: pd.DataFrame, **equal: Any) -> pd.DataFrame:
    """Returns the rows whose columns have the given value, or one of the given values."""
    mask = pd.Series(True, index=frame.index)
    for column, value in equal.items():
        values = value if isinstance(value, list | tuple | set) else [value]
        mask &= frame[column].isin(values) if column in frame else False
    return frame[mask]


def ok_rows(frame: pd.DataFrame, **equal: Any) -> pd.DataFrame:
    """Returns the measured rows whose columns have the given values."""
    return select(frame, status="ok", **equal)


def only(frame: pd.DataFrame, **equal: Any) -> Row | None:
    """Returns the one measured row of a case, None where there is none; ValueError where the case
    names several.
    """
    rows = ok_rows(frame, **equal)
    if len(rows) > 1:
        differ = [name for name in rows if rows[name].map(str).nunique() > 1]
        raise ValueError(
            f"{len(rows)} rows of {equal}: name one, they differ in {', '.join(differ[:8])}"
        )
    # Of one row it takes half the time of to_dict("records").
    return rows.iloc[0].to_dict() if len(rows) else None


def usable(frame: pd.DataFrame, *columns: str) -> pd.DataFrame:
    """Returns the measured rows that have a value in each of these columns, which no row may have
    had.
    """
    rows = ok_rows(frame)
    return rows.reindex(columns=list(dict.fromkeys([*rows, *columns]))).dropna(subset=list(columns))


def mark(row: Row, value: str = "median_ms") -> str:
    """Returns the mark that a row's value carries wherever it is printed, "" for none."""
    if row.get("disturbed") == 1:
        return DISTURBED
    return UNSTEADY if value.startswith(SUSTAINED_VALUES) and row.get("steady") == 0 else ""


def cell(
    row: Row | None,
    value: str = "median_ms",
    form: Callable[[float], str] = number,
) -> str:
    """Returns a value as text with its mark, the status where there is none; "–" where it was not
    measured.
    """
    if row is None:
        return "–"
    if row["status"] != "ok":
        return row["status"]
    if pd.isna(row.get(value)):
        return "–"
    return mark(row, value) + form(row[value])


def by_way(
    frame: pd.DataFrame,
    index: str,
    ways: Mapping[str, Row],
    text: Callable[[Row], str] = cell,
) -> pd.DataFrame:
    """Returns a table with one row per value of `index`, in order, and one column per way; "–"
    where not measured.

    Args:
        ways: by name the columns in which one way differs from the others, with their values.

    Raises:
        ValueError: a way names several rows.
    """
    lines = []
    for value in in_order(frame, [index])[index].unique() if len(frame) else ():
        line = {index: size_name(value) if index == "size" else value}
        for name, way in ways.items():
            rows = select(frame, **{index: value}, **way)
            if len(rows) > 1:
                raise ValueError(f"{name!r} names {len(rows)} rows of {index} {value}")
            line[name] = text(rows.iloc[0].to_dict()) if len(rows) else "–"
        lines.append(line)
    return pd.DataFrame(lines)


def pivot(frame: pd.DataFrame, index: str, columns: str) -> pd.DataFrame:
    """Returns `by_way` with one column per value of `columns`, in order."""
    values = in_order(frame, [columns])[columns].unique()
    return by_way(frame, index, {value: {columns: value} for value in values})
