"""What the chapters' tables share: order of rows, cells for failures, Markdown and CSV."""

import functools
import re
import weakref
from collections.abc import Callable, Sequence

import pandas as pd

from labkit.configs import COMPILE_MODES, PHASES, PRECISIONS, SIZES
from labkit.records import STATUSES
from labkit.report.findings import number

MAX_ROWS = 12
"""Rows of a table in the report; the CSV file of the section holds all of them."""

PHASE_NAMES = {
    "inference": "inference",
    "forward": "forward",
    "backward": "backward",
    "forward_backward": "forward + backward",
    "optimizer_step": "optimizer step",
    "train_step": "training step",
    "graph_step": "training step, one graph",
    "compile": "first call",
}

ORDER = {
    "size": list(SIZES),
    "precision": list(PRECISIONS),
    "compile": list(COMPILE_MODES),
    "phase": ["compile", *PHASES, "graph_step"],
    "impl": ["eager", "compiled", "compiled_heads", "sdpa_math", "sdpa_flash", "sdpa_cudnn", "sdpa_efficient"],
}
"""Order of the values of each column that is not numeric."""

WORDS = {*ORDER, "case", "published on", "commit", "statistics"}
"""Columns of a table that are set to the left though their cells may look like numbers."""

NOT_IN_CSV = ("section", "samples", "observed", "session", "sessions", "timer_num_warmup", "timer_stop_reason")


def once_per_frame(function: Callable[..., pd.DataFrame]) -> Callable[..., pd.DataFrame]:
    """Returns `function`, a selection from a frame of records, evaluated once per frame and arguments.

    Tables, figures and findings of a section begin with the same selection. Each caller gets a copy; the frame given
    must not change.
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
    """Returns the rows whose columns have the given value, or one of the given values; attributes are kept."""
    if frame.empty:
        return frame
    mask = pd.Series(True, index=frame.index)
    for column, value in equal.items():
        values = value if isinstance(value, list | tuple | set) else [value]
        mask &= frame[column].isin(values) if column in frame else False
    return frame[mask]


def ok_rows(frame: pd.DataFrame, **equal) -> pd.DataFrame:
    """Returns the measured rows whose columns have the given values."""
    return select(frame, status="ok", **equal)


def usable(frame: pd.DataFrame, *columns: str) -> pd.DataFrame:
    """Returns the measured rows that have a value in each of these columns, which no row may have had."""
    rows = ok_rows(frame)
    return rows.reindex(columns=list(dict.fromkeys([*rows, *columns]))).dropna(subset=list(columns))


DISTURBED = "⚠ "
"""Stands before a value that was measured while other processes kept the machine busy."""

UNSTEADY = "~ "
"""Stands before a sustained value whose window did not reach steady clocks."""

SUSTAINED = ("sustained_ms", "sustained_tflops", "sustained_gb_per_s", "joules", "watts", "tflop_per_joule")


def cell(row: dict, name: str = "median_ms", form: Callable[[float], str] = number) -> str:
    """Returns a value as text, or the status where there is none, marked where it is DISTURBED or UNSTEADY."""
    if row["status"] != "ok":
        return row["status"]
    if (text := form(row.get(name))) == "–":
        return text
    mark = DISTURBED if row.get("disturbed", False) in (True, 1) else ""
    return mark + (UNSTEADY if name in SUSTAINED and row.get("steady") == 0 else "") + text


def pivot(frame: pd.DataFrame, index: Sequence[str], columns: str, text: Callable[[dict], str] = cell) -> pd.DataFrame:
    """Returns a table with one row per `index` and one column per value of `columns`; "–" where not measured."""
    names = dict.fromkeys(in_order(frame[[columns]], [columns])[columns], "–")
    rows = {}
    for row in in_order(frame, [*index, columns]).to_dict("records"):
        line = rows.setdefault(tuple(row[name] for name in index), {name: row[name] for name in index} | names)
        line[row[columns]] = text(row)
    return pd.DataFrame(rows.values())


def unfolded(frame: pd.DataFrame, keys: Sequence[str], samples: Sequence[str]) -> pd.DataFrame:
    """Returns the samples of these names, one row per element, beside the columns `keys` of the rows that have them."""
    parts = [
        pd.DataFrame({key: row[key] for key in keys} | {key: row["samples"][key] for key in samples})
        for row in ok_rows(frame).to_dict("records")
        if set(samples) <= row["samples"].keys()
    ]
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()


def without_constants(frame: pd.DataFrame) -> tuple[pd.DataFrame, str]:
    """Returns a table of three rows or more without the columns that say the same in each, and what these say.

    A decimal stays: it was measured.
    """
    same = {name: str(frame[name].iloc[0]) for name in frame if len(frame) > 2 and frame[name].map(str).nunique() == 1}
    same = {name: text for name, text in same.items() if not re.fullmatch(r"–|oom|skipped|[\d,]*\.\d+( %|×)?", text)}
    return frame.drop(columns=list(same)), ", ".join(f"{name} {escaped(text)}" for name, text in same.items())


def to_markdown(frame: pd.DataFrame) -> str:
    """Returns a Markdown table; numbers, also undecided ones, and statuses to the right; pipes and "<" escaped."""
    texts = {name: [str(value) for value in frame[name].tolist()] for name in frame}
    is_text = re.compile(r"(?<![A-Za-z])(?!undecided)[A-Za-z]{4}|\d{4}-\d\d").search  # a word or a date
    left = WORDS | {name for name in frame if any(is_text(text) and text not in STATUSES for text in texts[name])}
    rules = ["---" if name in left else "---:" for name in frame]
    rows = [list(texts), *zip(*texts.values(), strict=True)]
    head, *lines = ["".join(f"| {text} " if text else "| " for text in map(escaped, row)) + "|" for row in rows]
    return "\n".join([head, "|" + "|".join(rules) + "|", *lines])


def to_csv(frame: pd.DataFrame) -> str:
    """Returns the rows as CSV: case, phase, status and metrics, floats with six significant digits.

    Columns that are empty throughout, nested values and what only identifies a record are left out. A text that a
    spreadsheet would take for a formula begins with an apostrophe.
    """
    kept = frame.drop(columns=[name for name in NOT_IN_CSV if name in frame])
    kept = kept.loc[:, [not (kept[name].isna() | (kept[name] == "")).all() for name in kept]]
    kept = kept.rename(columns=_no_formula).map(_no_formula)
    return kept.to_csv(index=False, float_format="%.6g", lineterminator="\n")


def _no_formula(value: object) -> object:
    return f"'{value}" if isinstance(value, str) and value.startswith(("=", "+", "-", "@")) else value


def escaped(value: object) -> str:
    """Returns `value` as it may stand in a Markdown table: no column, no HTML tag comes out of it."""
    text = " ".join(str(value).split()).replace("|", "\\|")
    return text if text.startswith("`") else re.sub(r"(?<!\\)<", "&lt;", text)  # inside code, Markdown escapes it
