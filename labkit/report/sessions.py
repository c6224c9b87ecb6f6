"""Whether measurements come back: rows that several sessions of one commit measured, each kind of time apart."""

from collections.abc import Mapping, Sequence

import pandas as pd

from labkit.records import HOST_SECTION, Record, by_session, to_frame
from labkit.report import verdicts
from labkit.report.findings import number, percent
from labkit.report.tables import ok_rows, select

TIMES = ("median_ms", "step_kernel_ms", *verdicts.KIND_OF_VALUE)

INSIDE = "inside the interval"
LIMITS = {"device": "within 5 %", "sustained": "within 3 %", "call": INSIDE}
"""What must hold of SHARE of the comparisons of each kind of time."""

SHARE = 0.95
AGREE = f"{percent(SHARE)} are"
NUM_WORST = 3
"""Rows shown of each chapter and kind of time."""


def differences(chapters: Mapping[str, Sequence[Record]]) -> pd.DataFrame:
    """Returns each later session of a commit against its first: one row per measurement and kind, the host's left out.

    Columns chapter, row, kind, lowest_ms, highest_ms, difference (highest over lowest less 1), allowed: by the interval
    of a row with one session, which is that between sessions and the half-widths of both.
    """
    found = []
    for chapter, records in chapters.items():
        timed = [one for one in records if one.section != HOST_SECTION and one.metrics]
        commits = dict.fromkeys(one.source.get("commit") for one in timed)
        alike = [by_session(one for one in timed if one.source.get("commit") == commit) for commit in commits]
        for sessions in (sessions for of_commit in alike for sessions in of_commit.values()):
            rows = [one.metrics | {"timer_method": one.timer.get("method")} for one in sessions.values()]
            first = next(iter(sessions.values()))
            name = " ".join([first.section, *map(str, first.case.values()), first.phase])
            held = any(verdicts.launch_bound(row, "sustained_ms") for row in rows)
            for value in TIMES:
                times = [(row[value], row.get("half_width_fraction") or 0.0) for row in rows if row.get(value)]
                if len(times) < 2:
                    continue
                kind = verdicts.kind_of_time(rows[0], value)
                # The call's time once more: by the other clock, or back to back as the host issues it.
                is_again = {"call": value == "host_median_ms", "sustained": held}
                if verdicts.kind_of_time(rows[0]) == "call" and is_again.get(kind):
                    continue
                place = name if value == "median_ms" else f"{name}, {value}"
                for (low, low_half), (high, high_half) in (sorted((times[0], later)) for later in times[1:]):
                    allowed = (1 + verdicts.noise(kind, False, *rows)) * (1 + low_half + high_half) - 1
                    found.append((chapter, place, kind, low, high, high / low - 1, allowed))
    columns = ["chapter", "row", "kind", "lowest_ms", "highest_ms", "difference", "allowed"]
    return pd.DataFrame(found, columns=columns)


def table_agreement(differences: pd.DataFrame) -> pd.DataFrame:
    """Returns how many sessions agree with the first, per kind of time and chapter, and whether as many as must."""
    rows, every = [], differences.assign(chapter="all")
    for (chapter, kind), group in pd.concat([differences, every]).groupby(["chapter", "kind"], sort=False):
        bounds = {"within 5 %": 0.05, "within 3 %": 0.03, INSIDE: group["allowed"]}
        shares = {name: (group["difference"] <= bound).mean() for name, bound in bounds.items()}
        limit = f"{LIMITS[kind]}: {'yes' if shares[LIMITS[kind]] >= SHARE else 'no'}"
        texts = {name: percent(share, 3) for name, share in shares.items()}
        rows.append({"chapter": chapter, "kind": kind, "comparisons": len(group), **texts, AGREE: limit})
    return pd.DataFrame(rows)


def failed(differences: pd.DataFrame) -> list[str]:
    """Returns the kinds of time that agree too seldom over all chapters; every kind where nothing can be compared."""
    if differences.empty:
        return list(LIMITS)
    table = select(table_agreement(differences), chapter="all")
    return table["kind"][table[AGREE].str.endswith("no")].tolist()


def table_worst(differences: pd.DataFrame) -> pd.DataFrame:
    """Returns the rows that differ most, of each chapter and kind of time."""
    worst = differences.sort_values("difference", ascending=False, kind="stable").drop_duplicates(["chapter", "row"])
    worst = worst.groupby(["chapter", "kind"]).head(NUM_WORST).sort_values(["chapter", "kind"], kind="stable")
    shown = worst[["chapter", "kind", "row"]].assign(difference=worst["difference"].map(percent))
    return shown.assign(lowest=worst["lowest_ms"].map(number) + " ms", highest=worst["highest_ms"].map(number) + " ms")


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
    """Returns "operator 4.1 µs, …" of a session, given the rows of section "host" of every session."""
    rows = ok_rows(probes, session=session).to_dict("records")
    parts = [f"{row['phase'].replace('_', ' ')} {number(1e3 * row['median_ms'])} µs" for row in rows]
    return ", ".join(parts) or "not measured"
