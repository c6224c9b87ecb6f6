"""Whether measurements come back: rows that several sessions of one commit measured, each kind of
time apart.
"""

from collections.abc import Iterable, Mapping, Sequence

import pandas as pd

from labkit.configs import LAUNCH_BOUND
from labkit.records import HOST_SECTION, Record, by_session, to_frame
from labkit.report import verdicts
from labkit.report.frame import ok_rows
from labkit.report.text import number, percent

TIMES = ("median_ms", "step_kernel_ms", *verdicts.KIND_OF_VALUE)

LIMITS = {verdicts.DEVICE: 0.05, verdicts.SUSTAINED: 0.05, verdicts.CALL: 0.10}
"""Two sessions agree where their times differ by no more."""

SHARE = 0.95
"""Of the device and of the sustained times this share must agree; calls depend on the host, and
nothing is asked.
"""

WAITING = "calls that wait for the host"
OTHER_CALLS = "other calls"

NUM_WORST = 3
"""Rows shown of each chapter and kind of time."""


def differences(chapters: Mapping[str, Sequence[Record]]) -> pd.DataFrame:
    """Returns each later session of a commit against its first, one row per measurement and kind,
    the host's left out.

    Columns chapter, row, kind, lowest_ms, highest_ms, difference (highest over lowest less 1).
    """
    found = []
    for chapter, records in chapters.items():
        timed = [one for one in records if one.section != HOST_SECTION and one.metrics]
        for commit in dict.fromkeys(one.source.get("commit") for one in timed):
            of_commit = by_session(one for one in timed if one.source.get("commit") == commit)
            for sessions in of_commit.values():
                found += [
                    {"chapter": chapter, **row} for row in _of_measurement(list(sessions.values()))
                ]
    columns = ["chapter", "row", "kind", "lowest_ms", "highest_ms", "difference"]
    return pd.DataFrame(found, columns=columns)


def _of_measurement(sessions: Sequence[Record]) -> Iterable[dict]:
    """Yields the differences of one measurement's sessions from the first."""
    first = sessions[0]
    name = " ".join([first.section, *map(str, first.case.values()), first.phase])
    rows = [
        one.case | one.metrics | {"phase": one.phase, "timer_method": one.timer.get("method")}
        for one in sessions
    ]
    waiting = any(verdicts.issued(row) >= LAUNCH_BOUND for row in rows)
    for value in TIMES:
        times = [row[value] for row in rows if row.get(value)]
        if len(times) < 2:
            continue
        kind = verdicts.kind_of_time(rows[0], value)
        if kind == verdicts.CALL:
            if value != "median_ms" and verdicts.kind_of_time(rows[0]) == verdicts.CALL:
                continue  # the same call by the other clock
            kind = WAITING if waiting else OTHER_CALLS
        elif kind == verdicts.SUSTAINED and waiting:
            continue  # back to back it waits for the host as well
        place = name if value == "median_ms" else f"{name}, {value}"
        for later in times[1:]:
            low, high = sorted((times[0], later))
            yield {
                "row": place,
                "kind": kind,
                "lowest_ms": low,
                "highest_ms": high,
                "difference": high / low - 1,
            }


def shares(differences: pd.DataFrame) -> dict[str, tuple[float, float, int]]:
    """Returns by kind of time the share of comparisons that agree, within what, and how many there
    are.
    """
    result = {}
    for kind, rows in differences.groupby("kind"):
        limit = LIMITS.get(kind, LIMITS[verdicts.CALL])
        result[kind] = (float((rows["difference"] <= limit).mean()), limit, len(rows))
    return result


def sentence(differences: pd.DataFrame) -> str:
    """Returns how often times of another session come back, "" where none was measured twice."""
    found = shares(differences)
    parts = [
        f"{kind if kind in (WAITING, OTHER_CALLS) else f'{kind} times'} within "
        f"{percent(found[kind][1])} in "
        f"{percent(found[kind][0])} of {found[kind][2]:,}"
        for kind in (verdicts.DEVICE, verdicts.SUSTAINED, OTHER_CALLS, WAITING)
        if kind in found
    ]
    return f"In another session come back: {'; '.join(parts)}." if parts else ""


def failed(differences: pd.DataFrame) -> list[str]:
    """Returns the kinds of time that come back too seldom; every kind where nothing can be
    compared.
    """
    if differences.empty:
        return list(LIMITS)
    found = shares(differences)
    return [
        kind for kind in (verdicts.DEVICE, verdicts.SUSTAINED) if found.get(kind, (1.0,))[0] < SHARE
    ]


def table_worst(differences: pd.DataFrame) -> pd.DataFrame:
    """Returns the rows that differ most, of each chapter and kind of time."""
    worst = differences.sort_values("difference", ascending=False, kind="stable").drop_duplicates(
        ["chapter", "row"]
    )
    worst = (
        worst.groupby(["chapter", "kind"])
        .head(NUM_WORST)
        .sort_values(["chapter", "kind"], kind="stable")
    )
    shown = worst[["chapter", "kind", "row"]].assign(difference=worst["difference"].map(percent))
    return shown.assign(
        lowest=worst["lowest_ms"].map(number) + " ms",
        highest=worst["highest_ms"].map(number) + " ms",
    )


def table_sessions(chapters: Mapping[str, Sequence[Record]]) -> pd.DataFrame:
    """Returns the sessions of each chapter: of which commit, how many records, on which host."""
    rows = []
    for chapter, records in chapters.items():
        probes = to_frame(record for record in records if record.section == HOST_SECTION)
        for session in dict.fromkeys(record.session for record in records):
            own = [record for record in records if record.session == session]
            commits = ", ".join(sorted({record.source.get("commit", "")[:8] for record in own}))
            line = {"chapter": chapter, "session": session, "commit": commits, "records": len(own)}
            rows.append(line | {"host": host(probes, session)})
    return pd.DataFrame(rows)


def host(probes: pd.DataFrame, session: str) -> str:
    """Returns "operator 4.1 µs, …" of a session, given the rows of section "host" of every
    session.
    """
    rows = ok_rows(probes, session=session).to_dict("records")
    parts = [
        f"{row['phase'].replace('_', ' ')} {number(1e3 * row['median_ms'])} µs" for row in rows
    ]
    return ", ".join(parts) or "not measured"
