"""Ahead, level, behind or undecided: the one rule by which two measurements are compared.

A comparison is a ratio with an interval. Times are compared only with times of the same kind:

- device time: the kernels alone, replayed from a CUDA graph or summed from a profile;
- sustained time: back to back for seconds, at the clocks that the power limit leaves;
- call time: what the caller waits for, including the host.

Sessions are repetitions: where both sides were measured in several, the interval spans the ratio of
each, else that of the samples, and either is widened by WITHIN or BETWEEN. Only sessions of a row's
own commit count. Bytes are exact.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

from labkit.configs import LAUNCH_BOUND, check_known
from labkit.report.frame import Row

AHEAD = "ahead"
LEVEL = "level"
BEHIND = "behind"
UNDECIDED = "undecided"
VERDICTS = (AHEAD, LEVEL, BEHIND, UNDECIDED)

DEVICE = "device"
SUSTAINED = "sustained"
CALL = "call"

KIND_OF_METHOD = {
    "graph": DEVICE,
    "queued": DEVICE,
    "nsys": DEVICE,
    "kineto": DEVICE,
    "kineto cpu": CALL,
    "window": CALL,
    "flush": CALL,  # issuing many kernels takes longer than overwriting the cache
    "host": CALL,
}
"""What kind of time each timer method gives."""

KIND_OF_VALUE = {"sustained_ms": SUSTAINED, "host_median_ms": CALL, "flush_median_ms": CALL}
"""The kind of the times that a row has beside its timer's."""

LEVEL_BAND = 0.03
"""Two times are level when the whole interval of their ratio, and of its inverse, is at most 3 %
above 1.
"""

WITHIN = {DEVICE: 0.01, SUSTAINED: 0.01, CALL: 0.03}
BETWEEN = {DEVICE: 0.03, SUSTAINED: 0.03, CALL: 0.20}
"""By what a ratio's interval is widened on either side, by kind of time: both sides of one session,
and of two.

Two entries that run the same kernel differ by up to 0.6 % in one session.
"""

HOST_FACTOR = 3.4
"""How many times as long another host took to issue the same call, at most: training steps on four
machines.
"""


class Ratio(NamedTuple):
    """A ratio of two measurements with its interval; above 1 the second is faster, or smaller."""

    mid: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        if self.low >= 1 / (1 + LEVEL_BAND) and self.high <= 1 + LEVEL_BAND:
            return LEVEL
        if self.low > 1:
            return AHEAD
        if self.high < 1:
            return BEHIND
        return UNDECIDED


def kind_of_time(row: Row, value: str = "median_ms") -> str:
    """Returns the kind of a row's time; raises ValueError for a timer method that has none."""
    if value in KIND_OF_VALUE:
        return KIND_OF_VALUE[value]
    # One launch replays the whole step: the host has no part in it, whichever clock is read.
    if row.get("phase") == "graph_step" or row.get("compile") == "graph":
        return DEVICE
    method = row.get("timer_method")
    check_known("timer method", method, KIND_OF_METHOD)
    return KIND_OF_METHOD[method]


def issued(row: Row) -> float:
    """Returns the host's time to issue a call as a share of the call; 0 where it was not
    measured.
    """
    launch = row.get("launch_median_ms")
    call = row.get("host_median_ms")
    return launch / call if launch and call and launch == launch else 0.0


def by_session(row: Row, value: str) -> dict[str, float]:
    """Returns a row's value by session, those of its own commit, the oldest first."""
    sessions = row.get("sessions")
    if not isinstance(sessions, dict):
        sessions = {row.get("session"): row}
    return {session: metrics[value] for session, metrics in sessions.items() if metrics.get(value)}


def ratio(base: Row, other: Row, value: str = "median_ms", other_value: str = "") -> Ratio:
    """Returns the base's time, or bytes, over the other's, with its interval; that of bytes, which
    are exact, has no width.

    Args:
        base, other: rows of a frame of records, with `value`, `half_width_fraction` or `drift`,
            `timer_method` and `session`; where there were several sessions, also `sessions`.
        other_value: the other's column where it is not `value`.

    Raises:
        ValueError: the two are times of different kinds.
    """
    other_value = other_value or value
    mid = base[value] / other[other_value]
    if not value.endswith("_ms"):
        return Ratio(mid, mid, mid)
    kind = kind_of_time(base, value)
    other_kind = kind_of_time(other, other_value)
    if kind != other_kind:
        raise ValueError(f"a ratio of a {kind} and a {other_kind} time: compare times of one kind")
    base_times = by_session(base, value)
    other_times = by_session(other, other_value)
    common = base_times.keys() & other_times.keys()
    spread = WITHIN[kind]
    if len(common) > 1:
        ends = [base_times[session] / other_times[session] for session in common]
    else:
        samples = math.hypot(_half_width(base, value), _half_width(other, other_value))
        ends = [mid / (1 + samples), mid * (1 + samples)]  # either way round the same verdict
        if base.get("session") != other.get("session"):
            ends += [one / two for one in base_times.values() for two in other_times.values()]
            spread = BETWEEN[kind]
            # A graph's calls wait for the host, its replays back to back do not.
            held = max(
                issued(row) if CALL in (kind, kind_of_time(row)) else 0.0 for row in (base, other)
            )
            if kind == CALL or held >= LAUNCH_BOUND:
                spread = max(spread, HOST_FACTOR * held - 1)
    return _spanning(mid, ends, spread)


def _half_width(row: Row, value: str) -> float:
    """Returns half of a value's relative interval: of a sustained one half of its drift, else that
    of the samples.
    """
    if KIND_OF_VALUE.get(value) == SUSTAINED:
        half = (row.get("drift") or 0.0) / 2
    else:
        half = row.get("half_width_fraction") or 0.0
    return half if half == half else 0.0


def paired(row: Row) -> Ratio:
    """Returns a rival's time over ours, of a row that was timed in turn with ours: `ratio_to_ours`,
    the paired interval.
    """
    lows = by_session(row, "ratio_to_ours_low").values()
    highs = by_session(row, "ratio_to_ours_high").values()
    return _spanning(row["ratio_to_ours"], [*lows, *highs], WITHIN[kind_of_time(row)])


def _spanning(mid: float, ends: Iterable[float], spread: float) -> Ratio:
    """Returns a ratio whose interval holds `mid` and all `ends`, widened by `spread`."""
    return Ratio(mid, min(mid, *ends) / (1 + spread), max(mid, *ends) * (1 + spread))
