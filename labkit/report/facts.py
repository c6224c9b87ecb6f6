"""Facts: comparisons, tallies, values, growths and limits, computed from records; data until a page
prints them.

Every query takes a frame of records as `Chapter.records` gives it and returns a Fact. The sentence
stands in the notebook, one text a verdict; `sentence` puts a fact's numbers into it, each with its
unit and its mark.

Directions of ratios, everywhere: of times, "the other is r× as fast as the base"; of bytes, "the
other takes r× the memory of the base".
"""

import math
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pandas as pd

from labkit import accounting
from labkit.configs import SIZES
from labkit.report import verdicts
from labkit.report.frame import mark, ok_rows, only, select, size_name
from labkit.report.text import number, percent, scientific
from labkit.report.verdicts import Ratio

LEAST_MS = 1.0
LEAST_BYTES = 100 * 2**20
LEAST_PARAMETERS = 50e6
LEAST_CASES = 3
"""Below these a difference says nothing of a device: no finding is made."""

WIDEST_RANGE = 2.0
"""A range whose ends differ by more is no finding: the two cases are named instead."""

MOST_NUMBERS = 3
"""Numbers in one sentence."""

MIXED = "mixed"
"""A tally whose cases do not all have one verdict."""


class Quantity(NamedTuple):
    """A number as a page prints it: with its unit, and the mark of the row that it comes from."""

    value: float
    unit: str = ""
    mark: str = ""

    def __str__(self) -> str:
        forms: dict[str, Callable[[float], str]] = {
            "%": percent,
            "×": lambda ratio: f"{number(ratio)}×",
            "bytes": _bytes,
            "error": scientific,
            "count": lambda count: f"{count:,.0f}",
        }
        form = forms.get(self.unit, lambda value: f"{number(value)} {self.unit}".rstrip())
        return self.mark + form(self.value)


@dataclass(frozen=True)
class Fact:
    """What records say of one question.

    Attributes:
        case: what it is about, in words: "2.7b (3.4 B), bf16, context 512".
        numbers: by name, as texts take them: {base}, {other}, {ratio}, {value}, ...
        verdict: of `verdicts.VERDICTS`, or MIXED of a tally; "" of what compares nothing.
        interval: of the ratio; None of what compares nothing.
        time: the kind of its times, "" of what is no time.
        num_sessions: that its interval rests on.
        missing: what was not measured; "" where there is something to say.
        small: too small to draw a conclusion about a device. plain: both sides in words, for the
            plain form; cases_marked: whether a case of a tally was marked.
    """

    case: str
    numbers: Mapping[str, Any] = field(default_factory=dict)
    verdict: str = ""
    interval: Ratio | None = None
    time: str = ""
    num_sessions: int = 1
    missing: str = ""
    small: bool = False
    plain: str = ""
    cases_marked: bool = False

    @property
    def marked(self) -> bool:
        """Whether a row behind it was marked: then the first page does not rest on it."""
        return self.cases_marked or any(
            isinstance(x, Quantity) and x.mark for x in self.numbers.values()
        )

    def __getitem__(self, name: str) -> Any:
        return self.numbers[name]

    def __str__(self) -> str:
        return str(self.numbers["value"])


def _bytes(value: float) -> str:
    return f"{number(value / 2**30)} GiB" if value >= 2**30 else f"{number(value / 2**20)} MiB"


UNITS = {
    "_ms": "ms",
    "_us": "µs",
    "_bytes": "bytes",
    "_fraction": "%",
    "_tflops": "TFLOP/s",
    "_gb_per_s": "GB/s",
    "_gbs": "GB/s",
    "_error": "error",
    "joules": "J",
    "watts": "W",
    "tflop_per_joule": "TFLOP/J",
    "ceiling": "%",
}
"""Unit of a metric by the end of its name."""


def unit_of(value: str) -> str:
    """Returns the unit of a metric, which its name says; "count" where it says none."""
    return next((unit for end, unit in UNITS.items() if value.endswith(end)), "count")


def quantity(row: Mapping[str, Any], value: str, unit: str = "") -> Quantity:
    """Returns a row's value with its unit and mark."""
    return Quantity(row[value], unit or unit_of(value), mark(row, value))


def case_name(case: Mapping[str, Any]) -> str:
    """Returns a case in words: "2.7b (3.4 B), bf16, context 512"."""
    words = []
    for name, value in case.items():
        if name == "size":
            words.append(size_name(value))
        elif isinstance(value, bool):
            words.append(name if value else f"not {name}")
        elif isinstance(value, str):
            if value != "none":
                words.append(value.replace("_", " "))
        else:
            words.append(f"{name.replace('_', ' ')} {value:,}")
    return ", ".join(words)


def _is_small(row: Mapping[str, Any], value: str) -> bool:
    size = row.get("size")
    if size in SIZES and accounting.num_parameters(SIZES[size]) < LEAST_PARAMETERS:
        return True
    least = {"ms": LEAST_MS, "bytes": LEAST_BYTES}.get(unit_of(value))
    return least is not None and row[value] < least


def compare(
    frame: pd.DataFrame,
    base: Mapping[str, Any],
    other: Mapping[str, Any],
    *,
    value: str = "median_ms",
    **case: Any,
) -> Fact:
    """Returns one case's two sides.

    Args:
        base, other: the columns in which the sides differ, with their values.
        value: the time or the bytes compared; case: the columns that both sides share.

    Returns:
        numbers: base, other, ratio, interval (a text), saved (a share of the base).

    Raises:
        ValueError: a side names several rows; times of two kinds.
    """
    name = case_name(case)
    sides = [only(frame, **{**case, **side}) for side in (base, other)]
    for side, row in zip((base, other), sides, strict=True):
        if row is None or row.get(value) is None or row[value] != row[value]:
            return Fact(name, missing=case_name({**case, **side}))
    return compare_rows(
        *sides, value=value, case=name, plain=f"{case_name(other)} against {case_name(base)}"
    )


def compare_rows(
    base: Mapping[str, Any],
    other: Mapping[str, Any],
    *,
    value: str = "median_ms",
    case: str = "",
    plain: str = "",
) -> Fact:
    """Returns `compare` of two rows."""
    is_time = unit_of(value) == "ms"
    interval = (
        verdicts.ratio(base, other, value) if is_time else verdicts.exact(base[value], other[value])
    )
    common = verdicts.by_session(base, value).keys() & verdicts.by_session(other, value).keys()
    marks = mark(base, value) or mark(other, value)
    # Of times the base is above the line, of bytes the other.
    shown = interval.mid if is_time else 1 / interval.mid
    return Fact(
        case,
        {
            "base": quantity(base, value),
            "other": quantity(other, value),
            "ratio": Quantity(shown, "×", marks),
            "value": Quantity(shown, "×", marks),
            "interval": _range(interval.low, interval.high),
            "saved": Quantity(1 - 1 / interval.mid, "%", marks),
        },
        interval.verdict,
        interval,
        verdicts.kind_of_time(base, value) if is_time else "",
        max(1, len(common)),
        small=_is_small(base, value) and _is_small(other, value),
        plain=plain,
    )


def _range(low: float, high: float) -> str:
    return f"{number(low)}× to {number(high)}×"


def compare_all(
    frame: pd.DataFrame,
    base: Mapping[str, Any],
    other: Mapping[str, Any],
    keys: Sequence[str],
    *,
    value: str = "median_ms",
    **case: Any,
) -> Fact:
    """Returns a tally of `compare` over all cases that have both sides, told apart by `keys`; small
    ones left out.

    Returns:
        numbers: total; ahead, level, behind, undecided (counts); range ("1.31× to 1.52×", or the
            two end cases by name where they differ by more than WIDEST_RANGE), least and most (a
            ratio and its case).
    """
    cases = ok_rows(frame, **case).reindex(columns=list(keys)).drop_duplicates().to_dict("records")
    facts = {}
    for key in cases:
        found = compare(frame, base, other, value=value, **case, **key)
        if not found.missing and not found.small:
            # In parentheses, where a size's parameters would open another pair.
            facts[case_name({name.removesuffix("size"): value for name, value in key.items()})] = (
                found
            )
    return tally(facts, case_name(case), f"{case_name(other)} against {case_name(base)}")


def tally(facts: Mapping[str, Fact], case: str, plain: str) -> Fact:
    """Returns the tally of comparisons by the name of their case; see `compare_all`."""
    if not facts:
        return Fact(case, missing=f"{plain}{f' for {case}' if case else ''}")
    counts = {
        verdict: sum(fact.verdict == verdict for fact in facts.values())
        for verdict in verdicts.VERDICTS
    }
    ordered = sorted(facts, key=lambda name: facts[name]["ratio"].value)
    least = facts[ordered[0]]
    most = facts[ordered[-1]]
    ends = [
        f"{fact['ratio']} ({name})" for fact, name in ((least, ordered[0]), (most, ordered[-1]))
    ]
    narrow = most["ratio"].value <= WIDEST_RANGE * least["ratio"].value
    uniform = [verdict for verdict, count in counts.items() if count == len(facts)]
    return Fact(
        case,
        {
            "total": Quantity(len(facts), "count"),
            **{verdict: Quantity(count, "count") for verdict, count in counts.items()},
            "range": f"{least['ratio']} to {most['ratio']}" if narrow else " to ".join(ends),
            "least": ends[0],
            "most": ends[1],
            "value": f"{counts[verdicts.AHEAD]} of {len(facts)}",
        },
        uniform[0] if uniform else MIXED,
        Ratio(math.nan, least["ratio"].value, most["ratio"].value),
        least.time,
        min(fact.num_sessions for fact in facts.values()),
        small=len(facts) < LEAST_CASES,
        plain=plain,
        cases_marked=any(fact.marked for fact in facts.values()),
    )


def measured(frame: pd.DataFrame, value: str, unit: str = "", **case: Any) -> Fact:
    """Returns one case's value, with its unit: {value}."""
    row = only(frame, **case)
    if row is None or row.get(value) is None or row[value] != row[value]:
        return Fact(case_name(case), missing=case_name(case))
    times = unit_of(value) == "ms"
    kind = verdicts.kind_of_time(row, value) if times and row.get("timer_method") else ""
    sessions = len(verdicts.by_session(row, value))
    numbers = {"value": quantity(row, value, unit)}
    return Fact(
        case_name(case), numbers, time=kind, num_sessions=sessions, small=_is_small(row, value)
    )


def share_of(
    frame: pd.DataFrame, is_so: Callable[[Mapping[str, Any]], bool], what: str, **case: Any
) -> Fact:
    """Returns in how many measured rows something holds: numbers count, total, value ("26 of
    64").
    """
    rows = ok_rows(frame, **case).to_dict("records")
    if not rows:
        return Fact(case_name(case), missing=what)
    count = sum(map(bool, map(is_so, rows)))
    numbers = {
        "count": Quantity(count, "count"),
        "total": Quantity(len(rows), "count"),
        "value": f"{count} of {len(rows)}",
    }
    return Fact(case_name(case), numbers, small=len(rows) < LEAST_CASES)


def growth(frame: pd.DataFrame, x: str, value: str, low: float, high: float, **case: Any) -> Fact:
    """Returns the exponent with which a value grows between two lengths: {value}, from {low} to
    {high}.
    """
    ends = [only(frame, **case, **{x: at}) for at in (low, high)]
    if any(row is None or row.get(value) is None for row in ends):
        return Fact(
            case_name(case),
            missing=f"{case_name(case)} at {x} {low:,} and {high:,}",
        )
    exponent = math.log(ends[1][value] / ends[0][value]) / math.log(high / low)
    marks = mark(ends[0], value) or mark(ends[1], value)
    numbers = {
        "value": Quantity(exponent, "", marks),
        "low": quantity(ends[0], value),
        "high": quantity(ends[1], value),
    }
    return Fact(case_name(case), numbers, small=_is_small(ends[1], value))


def fits(frame: pd.DataFrame, x: str = "context", **case: Any) -> Fact:
    """Returns the largest `x` of a case that was measured, {value}, and the least that ran out of
    memory, {lost}.
    """
    rows = select(frame, **case)
    largest = rows[rows["status"] == "ok"][x].max() if len(rows) else math.nan
    lost = rows[rows["status"] == "oom"][x].min() if len(rows) else math.nan
    if largest != largest and lost != lost:
        return Fact(case_name(case), missing=case_name(case))
    numbers = {
        "value": Quantity(largest, "count") if largest == largest else "none measured",
        "lost": Quantity(lost, "count") if lost == lost else "none tried",
    }
    return Fact(case_name(case), numbers)


def agreement(
    rows: pd.DataFrame,
    value: str,
    predicted: str,
    within: float,
    name: Callable[[Mapping[str, Any]], str],
) -> Fact:
    """Returns how many predictions lie within a share of the measurement, and the worst.

    Returns:
        numbers: count, total, value ("40 of 46"), within, worst (signed; above 0 the prediction is
            too high), case.
    """
    rows = rows.dropna(subset=[value, predicted])
    if rows.empty:
        return Fact("", missing="what the prediction tells")
    deviation = rows[predicted] / rows[value] - 1
    worst = deviation.abs().idxmax()
    count = int((deviation.abs() <= within).sum())
    numbers = {
        "count": Quantity(count, "count"),
        "total": Quantity(len(rows), "count"),
        "value": f"{count} of {len(rows)}",
        "within": Quantity(within, "%"),
        "worst": Quantity(deviation[worst], "%"),
        "case": name(rows.loc[worst].to_dict()),
    }
    return Fact("", numbers)


def published(
    theirs: pd.DataFrame, ours: pd.DataFrame, keys: Sequence[str], value: str = "ms"
) -> tuple[Fact, Any]:
    """Returns every published value that has a row of ours beside it: a tally of theirs over ours,
    and the frame.

    Args:
        theirs: columns `keys`, gpu, published_<value>; ours: records; keys: columns that tell the
            cases apart.
        value: "ms", beside median_ms, or "gib", beside peak_bytes.

    Returns:
        numbers: total, above (published values above ours), gpus (how many), low and high (of the
            ratio).
    """
    own = ok_rows(ours)
    if own.empty or theirs.empty:
        return Fact("", missing="a case for which a value is published"), pd.DataFrame()
    column = {"ms": "median_ms", "gib": "peak_bytes"}[value]
    kept = [*keys, column, *(["timer_method"] if "timer_method" in own else [])]
    joined = theirs.merge(own[kept], on=list(keys))
    if joined.empty:
        return Fact("", missing="a case for which a value is published"), joined
    here = joined[column] / (2**30 if value == "gib" else 1)
    joined = joined.assign(ratio=joined[f"published_{value}"] / here)
    numbers = {
        "total": Quantity(len(joined), "count"),
        "above": Quantity(int((joined["ratio"] > 1).sum()), "count"),
        "gpus": Quantity(joined["gpu"].nunique(), "count"),
        "low": Quantity(joined["ratio"].min(), "×"),
        "high": Quantity(joined["ratio"].max(), "×"),
        "value": f"{int((joined['ratio'] > 1).sum())} of {len(joined)}",
    }
    return Fact("", numbers), joined


def sentence(facts: Fact | Sequence[Fact], text: str = "", because: str = "", **texts: str) -> str:
    """Returns a fact as a sentence.

    Args:
        facts: one, or several for one sentence without a verdict: {0}, {1} are their values,
            {1[base]} a number of one.
        text: for facts without a verdict, and for a tally whose cases differ.
        texts: by verdict, ahead=, level=, behind=; a verdict without a text prints its plain form
            with the interval.
        because: a reason, printed behind the text of the first of ahead= and behind= that is given,
            and nowhere else.

    Raises:
        ValueError: a text with more than MOST_NUMBERS numbers, or for an undecided comparison,
            which has none.
    """
    several = (facts,) if isinstance(facts, Fact) else tuple(facts)
    first = several[0]
    if unknown := texts.keys() - {verdicts.AHEAD, verdicts.LEVEL, verdicts.BEHIND}:
        raise ValueError(f"no text for {sorted(unknown)[0]!r}; accepted: ahead, level, behind")
    for given in (text, *texts.values()):
        fields = [name for _, name, _, _ in string.Formatter().parse(given) if name]
        if len(fields) > MOST_NUMBERS:
            raise ValueError(f"{len(fields)} numbers in {given!r}; accepted: {MOST_NUMBERS}")
    if missing := [fact.missing for fact in several if fact.missing]:
        return f"*Not measured: {missing[0]}.*"
    if any(fact.small for fact in several):
        return f"*Too small here to draw a conclusion: {first.case or first.plain}.*"
    chosen = texts.get(first.verdict, text if first.verdict in ("", MIXED) else "")
    if first.verdict == MIXED and "{total}" not in chosen and "{value}" not in chosen:
        chosen = ""  # cases that differ are a selection, which must say of how many
    if not chosen:
        return _plain(first)
    reason = next(
        (verdict for verdict in (verdicts.AHEAD, verdicts.BEHIND) if verdict in texts), ""
    )
    ends = f": {because}." if because and first.verdict == reason else "."
    return chosen.format(*several, **first.numbers).rstrip(".") + ends


def _plain(fact: Fact) -> str:
    case = f" ({fact.case})" if fact.case else ""
    if fact.verdict == MIXED:
        counts = [
            f"{verdict} in {fact[verdict]}" for verdict in verdicts.VERDICTS if fact[verdict].value
        ]
        return f"{fact.plain}{case}: {', '.join(counts)} of {fact['total']} cases."
    interval = fact.numbers.get("interval", fact.numbers.get("range", ""))
    return f"{fact.plain}{case}: {fact.verdict}, {interval}."
