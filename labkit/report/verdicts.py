"""Ahead, level, behind or undecided: the one rule by which every chapter compares two measurements.

A comparison is a ratio with an interval. Times are compared only with times of the same kind:

- device time: the kernels alone, replayed from a CUDA graph or summed from a profile;
- call time: what the caller waits for, including the host;
- sustained time: back to back for seconds, at the clocks that the power limit leaves.

Where both sides were measured in several sessions, the interval covers the ratio of each; otherwise the interval within
the session is widened by what sessions were seen to differ by. Counts and bytes are exact and have no interval.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from labkit.configs import LAUNCH_BOUND

AHEAD, LEVEL, BEHIND, UNDECIDED = VERDICTS = ("ahead", "level", "behind", "undecided")

KIND_OF_METHOD = {
    "graph": "device",
    "flush": "device",
    "queued": "device",
    "nsys": "device",
    "kineto": "device",
    "kineto cpu": "call",
    "window": "call",
    "host": "call",
    "independent": "call",
}
"""What kind of time each timer method gives."""

KIND_OF_VALUE = {"sustained_ms": "sustained", "host_median_ms": "call", "flush_median_ms": "call"}
"""The kind of the times that a row has beside its timer's. The host issues each flushed call anew: one that it issues
more slowly than the cache is overwritten waits for it."""

LEVEL_BAND = 0.03
"""Two times are level when the whole interval of their ratio lies within 3 % of 1."""

NOISE = {
    ("device", True): 0.01, ("call", True): 0.03, ("sustained", True): 0.01,
    ("device", False): 0.03, ("call", False): 0.20, ("sustained", False): 0.03,
}  # fmt: skip
"""Relative widening of a ratio by kind of time and whether both sides come from one session.

Device times: two entries that run the same forward kernel differ by up to 0.6 % in one session. Between sessions, call
times differ most, since each machine's host launches kernels at its own speed.
"""

HOST_FACTOR = 3.4
"""How many times as long another host took to issue the same call, at most: steps of notebook 01 on four H200."""


class Ratio(NamedTuple):
    """Their time over ours with its interval: above 1, ours is ahead."""

    mid: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        if self.low >= 1 - LEVEL_BAND and self.high <= 1 + LEVEL_BAND:
            return LEVEL
        if self.low > 1:
            return AHEAD
        if self.high < 1:
            return BEHIND
        return UNDECIDED


def kind_of_time(row: Mapping[str, Any], value: str = "median_ms") -> str:
    """Returns the kind of a row's time; raises ValueError for a timer method that has none."""
    if value in KIND_OF_VALUE:
        return KIND_OF_VALUE[value]
    method = row.get("timer_method")
    if method not in KIND_OF_METHOD:
        raise ValueError(f"unknown timer method {method!r}; accepted: {', '.join(KIND_OF_METHOD)}")
    return KIND_OF_METHOD[method]


def issued(row: Mapping[str, Any], value: str = "host_median_ms") -> float:
    """Returns the host's time to issue a call as a share of the call, or of another time; 0 where not measured."""
    launch, waited = row.get("launch_median_ms"), row.get(value)
    return launch / waited if launch and waited and launch == launch else 0.0


def launch_bound(row: Mapping[str, Any], value: str = "host_median_ms") -> bool:
    """Returns whether the host needed LAUNCH_BOUND of the call to issue it; False where that was not measured."""
    return issued(row, value) >= LAUNCH_BOUND


def host_bound(row: Mapping[str, Any]) -> bool:
    """Returns whether issuing a call takes longer than its device time; False where that was not measured."""
    issued = row.get("launch_median_ms")
    return kind_of_time(row) == "device" and bool(issued) and issued > row["median_ms"]


def ratio(theirs: Mapping[str, Any], ours: Mapping[str, Any], value: str = "median_ms") -> Ratio:
    """Returns their time over ours, see `side_by_side`.

    Args:
        theirs, ours: rows of a frame of records, with `value`, its `half_width_fraction` or `drift`, `timer_method` and
            `session`; where there were several, also `sessions`.

    Raises:
        ValueError: the two are times of different kinds.
    """
    kinds = {kind_of_time(theirs, value), kind_of_time(ours, value)}
    if len(kinds) > 1:
        raise ValueError(f"a ratio of a {' and a '.join(sorted(kinds))} time: compare times of one kind")
    their_time, our_time, is_one_session = side_by_side(theirs, ours, value)
    mid, spread = their_time / our_time, _half_width(theirs, value) + _half_width(ours, value)
    low, high = mid * (1 - spread), mid * (1 + spread)
    their_times, our_times = (by_session(row, value) for row in (theirs, ours))
    both = their_times.keys() & our_times.keys()
    if len(both) > 1:
        ratios = [their_times[session] / our_times[session] for session in both]
    elif not is_one_session and len(their_times) > 1 and len(our_times) > 1:
        ratios = [one / other for one in their_times.values() for other in our_times.values()]
    else:
        return widened(mid, low, high, noise(kinds.pop(), is_one_session, theirs, ours))
    return Ratio(mid, min(low, *ratios), max(high, *ratios))


def side_by_side(theirs: Mapping[str, Any], ours: Mapping[str, Any], value: str) -> tuple[float, float, bool]:
    """Returns both times, and whether of one session: where the rows' differ, calls are of the fastest with both."""
    is_one_session = theirs.get("session") == ours.get("session")
    if kind_of_time(theirs, value) == "call" and not is_one_session:
        their_times, our_times = (by_session(row, value) for row in (theirs, ours))
        if both := [(time, our_times[session]) for session, time in their_times.items() if session in our_times]:
            return *min(both, key=sum), True
    return theirs[value], ours[value], is_one_session


def _half_width(row: Mapping[str, Any], value: str) -> float:
    """Returns half of a value's relative interval: of a sustained one half of its drift, else that of the samples."""
    name, share = ("drift", 0.5) if KIND_OF_VALUE.get(value) == "sustained" else ("half_width_fraction", 1.0)
    half = row.get(name)
    # One sample says nothing of its own spread.
    return 0.0 if half is None or half != half else share * half


def sessions(row: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    """Returns a row's metrics by session, the oldest first."""
    found = row.get("sessions")
    return found if isinstance(found, dict) and found else {row.get("session"): row}


def by_session(row: Mapping[str, Any], value: str) -> dict[str, float]:
    """Returns a row's value by session."""
    return {session: metrics[value] for session, metrics in sessions(row).items() if metrics.get(value)}


def paired(row: Mapping[str, Any]) -> Ratio:
    """Returns the ratio of a row that was timed in turn with ours: `ratio_to_ours` with its bootstrap interval."""
    names = ("ratio_to_ours", "ratio_to_ours_low", "ratio_to_ours_high")
    mid, low, high = (row[name] for name in names)
    lows, highs = (by_session(row, name).values() for name in names[1:])
    if len(lows) > 1:
        return Ratio(mid, min(lows), max(highs))
    return widened(mid, low, high, NOISE[kind_of_time(row), True])


def noise(kind: str, is_one_session: bool, *rows: Mapping[str, Any]) -> float:
    """Returns by what a ratio of times of this kind is widened: NOISE, for calls on two hosts what issuing may take."""
    if kind == "call" and not is_one_session:
        return max(NOISE[kind, False], HOST_FACTOR * max(map(issued, rows), default=0.0) - 1)
    return NOISE[kind, is_one_session]


def widened(mid: float, low: float, high: float, noise: float) -> Ratio:
    """Returns the interval widened by `noise` on either side."""
    return Ratio(mid, low / (1 + noise), high * (1 + noise))


def exact(ours: float, theirs: float) -> str:
    """Returns the verdict on counts or bytes, of which fewer is ahead; equal is level."""
    return LEVEL if ours == theirs else AHEAD if ours < theirs else BEHIND
