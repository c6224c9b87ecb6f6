"""Forms that several chapters share: pairs of times, their summary, what ran out of memory, prediction, publications.

Each takes frames of records as `Chapter.records` gives them; rows that are not "ok" never enter a ratio.
"""

import math
from collections.abc import Callable, Sequence
from textwrap import shorten

import pandas as pd

from labkit.report import verdicts
from labkit.report.findings import count, listing, number, percent, span, times
from labkit.report.tables import MAX_ROWS, PHASE_NAMES, in_order, ok_rows, select


def pairs(
    frame: pd.DataFrame, column: str, base: str, *, keys: Sequence[str], value: str = "median_ms"
) -> pd.DataFrame:
    """Returns one row per case and other value of `column`, with the ratio of the base's time to its own.

    Args:
        column: what the two sides differ in, e.g. "precision"; base: its value on the one side.
        keys: columns that tell the cases apart; value: the time compared.

    Returns:
        Columns `keys`, `column`, base_<value>, <value>, ratio, low, high, verdict, launch_bound. Above 1 the other is
        faster than the base.
    """
    rows, found = ok_rows(frame).to_dict("records"), []
    bases = {tuple(row[key] for key in keys): row for row in rows if row[column] == base}
    for row in rows:
        case = tuple(row[key] for key in keys)
        if row[column] != base and case in bases:
            ratio = verdicts.ratio(bases[case], row, value)
            is_bound = verdicts.launch_bound(row) or verdicts.launch_bound(bases[case])
            both = verdicts.side_by_side(bases[case], row, value)[:2]
            found.append((*case, row[column], *both, *ratio, ratio.verdict, is_bound))
    columns = [*keys, column, f"base_{value}", value, "ratio", "low", "high", "verdict", "launch_bound"]
    return in_order(pd.DataFrame(found, columns=columns).astype({"launch_bound": bool}), [column, *keys])


def arrow(row: dict) -> str:
    """Returns a row of `pairs` as "23.6 → 18.5 (1.28×)" or "12.8 → 15.8 (0.806×, undecided)"."""
    doubt = f", {verdicts.UNDECIDED}" if row["verdict"] == verdicts.UNDECIDED else ""
    return f"{number(row['base_median_ms'])} → {number(row['median_ms'])} ({times(row['ratio'])}{doubt})"


def exact_pairs(frame: pd.DataFrame, column: str, base: str, *, keys: Sequence[str]) -> pd.DataFrame:
    """Returns pairs as `pairs` does, of peak_bytes: above a `ratio` of 1 the other takes more and is "behind"."""
    rows = ok_rows(frame)
    bases = select(rows, **{column: base})[[*keys, "peak_bytes"]].rename(columns={"peak_bytes": "base_peak_bytes"})
    both = rows[rows[column] != base].merge(bases, on=list(keys))
    verdict = [verdicts.exact(*pair) for pair in zip(both["peak_bytes"], both["base_peak_bytes"], strict=True)]
    return in_order(both.assign(ratio=both["peak_bytes"] / both["base_peak_bytes"], verdict=verdict), [column, *keys])


def summary(pairs: pd.DataFrame, name: Callable[[dict], str]) -> str:
    """Returns "ahead in 12 of 14 cases (1.31× to 5.64×, most for 2.7b at 512), behind in 2 (0.88×, small at 128; …)".

    No average: the cases are of different kinds. `name` says how a case is called; three are named per verdict.
    """
    parts = []
    for verdict in verdicts.VERDICTS:
        rows = pairs[pairs["verdict"] == verdict].sort_values("ratio")
        if rows.empty:
            continue
        total = f" of {count(len(pairs), 'case')}" if not parts else ""
        place = f"{verdict} in {len(rows)}{total}" if len(pairs) > 1 else verdict
        low, high = times(rows["ratio"].iloc[0]), times(rows["ratio"].iloc[-1])
        if verdict == verdicts.AHEAD and len(rows) > 1:
            parts.append(f"{place} ({low} to {high}, most for {name(rows.iloc[-1].to_dict())})")
        elif len(rows) > 3:
            parts.append(f"{place} ({low} to {high})")
        else:
            named = "; ".join(f"{times(row['ratio'])}, {name(row)}" for row in rows.to_dict("records"))
            parts.append(f"{place} ({named})")
    return ", ".join(parts)


def tally(rows: pd.DataFrame, kind: str = "") -> str:
    """Returns "6 ahead, 1 level, 3 behind (0.82–1.30×)" of <kind>ratio and <kind>verdict, "–" for none compared."""
    rows = rows[rows[f"{kind}verdict"] != ""]
    counts = rows[f"{kind}verdict"].value_counts()
    words = ", ".join(f"{counts[word]} {word}" for word in verdicts.VERDICTS if word in counts)
    return f"{words} ({span(rows[f'{kind}ratio']).replace('× to ', '–')})" if words else "–"


COURSE_CODE = "course"
"""In a table beside published values: those here are of MODEL_CODE, or attention's softmax, from plain operators."""
MODEL_CODE = "softmax, SwiGLU's gate, the loss and AdamW"

SHOWN_CONTEXT = 512
"""The context that tables show where it was measured; the figures and the CSV files have all."""


def shown(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns the rows at SHOWN_CONTEXT, or at the longest measured context where that was not measured."""
    if frame.empty:
        return frame
    contexts = set(frame["context"].dropna())
    return select(frame, context=SHOWN_CONTEXT if SHOWN_CONTEXT in contexts else max(contexts))


def name(row: dict) -> str:
    """Returns "small at 128 in bf16"."""
    return f"{case_name(row)} in {row['precision']}"


def case_name(row: dict) -> str:
    """Returns "small at 128" of a row with a size and a context."""
    return f"{row['size']} at {row['context']}"


def out_of_memory(frame: pd.DataFrame, by: Sequence[str], x: str = "context") -> pd.DataFrame:
    """Returns per value of `by` the largest `x` that was measured and the smallest that ran out of memory (or NaN)."""
    rows = []
    for key, group in in_order(frame, list(by)).groupby(list(by), sort=False):
        fits, lost = (group[group["status"] == status][x] for status in ("ok", "oom"))
        rows.append({**dict(zip(by, key, strict=True)), "fits": fits.max(), "out_of_memory": lost.min()})
    return pd.DataFrame(rows, columns=[*by, "fits", "out_of_memory"])


def agreement(rows: pd.DataFrame, measured: str, predicted: str, within: float, name: Callable[[dict], str]) -> str:
    """Returns how many predictions are within `within` of the measurement, and the worst: "40 of 46 … (worst: …)"."""
    deviation = rows[predicted] / rows[measured] - 1
    worst = rows.loc[deviation.abs().idxmax()].to_dict()
    signed = deviation.loc[deviation.abs().idxmax()]
    good = int((deviation.abs() <= within).sum())
    text = f"{good} of {len(rows)} predictions are within {percent(within)} of the measurement"
    return f"{text}; the worst is {percent(abs(signed))} {'above' if signed > 0 else 'below'} it ({name(worst)})"


def failures(frame: pd.DataFrame) -> list[str]:
    """Returns the sentence on cases that ended in an error or a timeout; out of memory has its place in the tables."""
    failed = frame[frame["status"].isin(["error", "timeout"])] if not frame.empty else frame
    if failed.empty:
        return []
    reasons = failed["reason"].str.rstrip(": ").value_counts()
    named = listing((f"{shorten(reason, 80, placeholder='…')} ({number})" for reason, number in reasons.items()), 2)
    return [f"{count(len(failed), 'measurement')} of {len(frame):,} failed: {named}."]


def matched(theirs: pd.DataFrame, ours: pd.DataFrame, keys: Sequence[str]) -> pd.DataFrame:
    """Returns published rows (columns `keys`, gpu, published_ms, caveat) beside ours; `ratio` is theirs over ours."""
    own = ok_rows(ours)
    if own.empty or theirs.empty:
        return pd.DataFrame(columns=[*theirs.columns, "median_ms", "timer_method", "ratio"])
    joined = theirs.merge(own[[*keys, "median_ms", "timer_method"]], on=list(keys))
    return joined.assign(ratio=joined["published_ms"] / joined["median_ms"])


def beside_course(
    matched: pd.DataFrame, course: pd.DataFrame | None, keys: Sequence[str], value: str = "median_ms"
) -> pd.DataFrame:
    """Returns published rows beside what the course's code gave here where that was measured, else beside ours.

    Args:
        matched: as `matched` returns them; course: records of the model, or the attention, as a course writes it.
        value: the column of ours that the course's takes the place of.

    Returns:
        The rows with `code` and `our_ratio`, the published value over ours; without both where nothing was measured.
    """
    own = ok_rows(course) if course is not None else pd.DataFrame()
    if own.empty or matched.empty:
        return matched
    rows = matched.merge(own[[*keys, value]].rename(columns={value: "_course"}), "left", list(keys))
    known = rows["_course"].notna()
    rows = rows.assign(code=known.map({True: COURSE_CODE, False: "ours"}), our_ratio=rows["ratio"])
    rows["ratio"] = rows["ratio"].where(~known, rows["ratio"] * rows[value] / rows["_course"])
    rows[value] = rows["_course"].where(known, rows[value])
    return rows.drop(columns="_course")


def explained(matched: pd.DataFrame, code: str) -> list[str]:
    """Says what of the gap between published values and ours the course's `code` explains; [] where it was not run.

    The share is of the ratio's logarithm, over the cases in which ours is ahead by more than the level band.
    """
    rows = select(matched, code=COURSE_CODE)
    if rows.empty or (rows := rows[rows["our_ratio"] > 1 + verdicts.LEVEL_BAND]).empty:
        return []
    share = 1 - rows["ratio"].map(math.log) / rows["our_ratio"].map(math.log)
    return [
        f"Published over ours {span(rows['our_ratio'])} ({count(len(rows), 'value')} above ours); over the course's "
        f"own code, run on this device, {span(rows['ratio'])}. So its plain operators for {code} explain "
        f"{percent(share.median())} of the gap (median; {span(share, percent)}, on a logarithmic scale)."
    ]


def published_table(
    matched: pd.DataFrame,
    case: Callable[[dict], str],
    *,
    name: str = "ms",
    value: str = "median_ms",
    max_rows: int = MAX_ROWS,
) -> pd.DataFrame:
    """Returns the published figures beside ours, at most `max_rows` of them spread over the GPUs; the CSV has all.

    Args:
        matched: rows with gpu, phase, published_<name>, `value`, ratio and caveat; `name` is "ms" or "gib".
        case: how a row's case is called.
    """
    if len(matched) > max_rows:
        position = matched.groupby("gpu").cumcount() / matched.groupby("gpu")["gpu"].transform("size")
        matched = matched.loc[sorted(position.sort_values(kind="stable").index[:max_rows])]
    unit = {"gib": "GiB"}.get(name, name)
    return pd.DataFrame(
        {
            "published on": row["gpu"],
            "case": case(row),
            "phase": PHASE_NAMES.get(row["phase"], row["phase"]),
            f"published ({unit})": number(row[f"published_{name}"]),
            f"here ({unit})": number(row[value]),
            **({"code": row["code"]} if "code" in row else {}),
            **({"kind of time": verdicts.kind_of_time(row)} if "timer_method" in row else {}),
            "published / here": times(row["ratio"]),
            "caveat": row["caveat"] or "–",
        }
        for row in matched.to_dict("records")
    )
