"""Whether measurements come back: rows that several sessions of one commit measured, each kind of
time apart.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import pandas as pd

from labkit.configs import LAUNCH_BOUND
from labkit.records import HOST_SECTION, Record, by_session
from labkit.report import verdicts
from labkit.report.facts import case_name
from labkit.report.frame import select
from labkit.report.text import listing, number, percent

WAITING = "calls that wait for the host"
WITH_FORWARD = ("forward_backward", "step", "train_step")
"""Passes that wait for the host where their forward does, whatever their mean says."""

OTHER_CALLS = "other calls"

LIMITS = {verdicts.DEVICE: 0.05, verdicts.SUSTAINED: 0.05, WAITING: 0.10, OTHER_CALLS: 0.10}
"""Two sessions agree where their times differ by no more, by kind of time."""

SHARE = 0.95
"""Of the device and of the sustained times this share must agree; calls depend on the host, and
nothing is asked.
"""

NUM_WORST = 3
"""Rows shown of each chapter and kind of time."""


def differences(chapters: Mapping[str, Sequence[Record]]) -> pd.DataFrame:
    """Returns each later session of a commit against its first, one row per measurement and kind,
    the host's left out.

    Columns: chapter, row, kind, lowest_ms, highest_ms, and difference, highest over lowest less 1.
    """
    rows = []
    for chapter, records in chapters.items():
        by_commit = {}
        for record in records:
            if record.section != HOST_SECTION and record.metrics and record.timer:
                by_commit.setdefault(record.source.get("commit"), []).append(record)
        for timed in by_commit.values():
            waiting = _waiting(timed)
            for key, sessions in by_session(timed).items():
                found = _of_measurement(list(sessions.values()), key in waiting)
                rows += [(chapter, *row) for row in found]
    frame = pd.DataFrame(rows, columns=["chapter", "row", "kind", "lowest_ms", "highest_ms"])
    return frame.assign(difference=frame["highest_ms"] / frame["lowest_ms"] - 1)


def _waiting(records: Iterable[Record]) -> set[str]:
    """Returns the resume keys of what waited for the host in a session."""
    found = set()
    for record in records:
        if verdicts.issued(record.metrics) >= LAUNCH_BOUND:
            *way, last = record.phase.split(" ")
            for phase in (last, *WITH_FORWARD) if last == "forward" else (last,):
                found.add(replace(record, phase=" ".join([*way, phase])).resume_key())
    return found


def _of_measurement(
    sessions: Sequence[Record], waits: bool
) -> Iterable[tuple[str, str, float, float]]:
    """Yields row, kind and both times of each later session of one measurement and the first."""
    first = sessions[0]
    name = f"{first.section}: {case_name(first.case)}, {first.phase}"
    row = first.case | {"phase": first.phase, "timer_method": first.timer.get("method")}
    is_call = verdicts.kind_of_time(row) == verdicts.CALL
    for value in ("median_ms", "step_kernel_ms", *verdicts.KIND_OF_VALUE):
        times = [one.metrics[value] for one in sessions if one.metrics.get(value)]
        kind = verdicts.kind_of_time(row, value)
        if kind == verdicts.CALL and value != "median_ms" and is_call:
            continue  # the same call by the other clock
        if waits and kind != verdicts.DEVICE:
            kind = WAITING  # back to back, too
        elif kind == verdicts.CALL:
            kind = OTHER_CALLS
        words = name if value == "median_ms" else f"{name}, {value}"
        for later in times[1:]:
            yield words, kind, *sorted([times[0], later])


def shares(differences: pd.DataFrame) -> pd.DataFrame:
    """Returns of each kind of time that was measured `twice`, in the order of LIMITS, its name in
    words, how many comparisons there are and the share that agrees.
    """
    agrees = differences["difference"] <= differences["kind"].map(LIMITS)
    counts = agrees.groupby(differences["kind"]).agg(num="size", share="mean")
    rows = counts.loc[[kind for kind in LIMITS if kind in counts.index]].reset_index()
    times = [kind if "calls" in kind else f"{kind} times" for kind in rows["kind"]]
    return rows.assign(times=times, twice=True, status="ok")


def sentence(differences: pd.DataFrame) -> str:
    """Returns how often times of another session come back, "" where none was measured twice."""
    parts = [
        f"{percent(row['share'])} of {row['num']:,} {row['times']} within "
        f"{percent(LIMITS[row['kind']])}"
        for row in shares(differences).to_dict("records")
    ]
    if not parts:
        return ""
    few = listing([f"{kind} times" for kind in failed(differences)])
    asked = f" Of {few} {percent(SHARE)} should." if few else ""
    return f"Two sessions agree: {', '.join(parts)}.{asked}"


def failed(differences: pd.DataFrame) -> list[str]:
    """Returns the kinds of time that come back too seldom; every kind where nothing can be
    compared.
    """
    if differences.empty:
        return list(LIMITS)
    rows = select(shares(differences), kind=[verdicts.DEVICE, verdicts.SUSTAINED])
    return rows["kind"][rows["share"] < SHARE].tolist()


def table_worst(differences: pd.DataFrame) -> pd.DataFrame:
    """Returns the rows that differ most, of each chapter and kind of time."""
    order = ["chapter", "kind"]
    worst = differences.sort_values("difference", ascending=False, kind="stable")
    worst = worst.drop_duplicates(["chapter", "row"]).groupby(order).head(NUM_WORST)
    worst = worst.sort_values(order, kind="stable")
    return worst[[*order, "row"]].assign(
        difference=worst["difference"].map(percent),
        lowest=worst["lowest_ms"].map(number) + " ms",
        highest=worst["highest_ms"].map(number) + " ms",
    )
