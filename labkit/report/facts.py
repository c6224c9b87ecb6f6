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
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import pandas as pd

from labkit import accounting
from labkit.configs import SIZES, check_known
from labkit.report import verdicts
from labkit.report.frame import Row, mark, ok_rows, only, select, size_name
from labkit.report.text import gib, number, percent, scientific, span, times

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
        form = FORMS.get(self.unit)
        text = form(self.value) if form else f"{number(self.value)} {self.unit}".rstrip()
        return self.mark + text


@dataclass(frozen=True)
class Fact:
    """What records say of one question.

    Attributes:
        case: what it is about, in words: "2.7b (3.4 B), bf16, context 512".
        numbers: by name, as texts take them: {base}, {other}, {ratio}, {value}, ...
        verdict: of `verdicts.VERDICTS`, or MIXED of a tally; "" of what compares nothing.
        missing: what was not measured; "" where there is something to say.
        small: too small, or too few cases, to draw a conclusion about a device.
        plain: both sides in words, for the plain form.
        marked: a row behind it was marked: then the first page does not rest on it.
    """

    case: str
    numbers: dict[str, Any] = field(default_factory=dict)
    verdict: str = ""
    missing: str = ""
    small: bool = False
    plain: str = ""
    marked: bool = False

    def __getitem__(self, name: str) -> Any:
        return self.numbers[name]

    def __str__(self) -> str:
        return str(self["value"])


def _bytes(value: float) -> str:
    return f"{gib(value)} GiB" if value >= 2**30 else f"{number(value / 2**20)} MiB"


FORMS: dict[str, Callable[[float], str]] = {
    "%": percent,
    "×": times,
    "bytes": _bytes,
    "error": scientific,
    "nats": "{:.4f}".format,
    "count": "{:,.0f}".format,
}
"""How a number is printed, by its unit; any other with three digits and its unit."""

UNITS = {
    "_ms": "ms",
    "_bytes": "bytes",
    "_fraction": "%",
    "_tflops": "TFLOP/s",
    "_gb_per_s": "GB/s",
    "_gbs": "GB/s",
    "_error": "error",
    "tflop_per_joule": "TFLOP/J",
}
"""Unit of a metric by the end of its name."""


def unit_of(value: str) -> str:
    """Returns the unit of a metric, which its name says; "count" where it says none."""
    return next((unit for end, unit in UNITS.items() if value.endswith(end)), "count")


def quantity(row: Row, value: str, unit: str = "") -> Quantity:
    """Returns a row's value with its unit and mark."""
    return Quantity(row[value], unit or unit_of(value), mark(row, value))


def case_name(case: Row) -> str:
    """Returns a case in words, the size first: "2.7b (3.4 B), bf16, context 512"."""
    words = []
    for name, value in sorted(case.items(), key=lambda item: item[0] != "size"):
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


def _is_small(row: Row, value: str) -> bool:
    size = row.get("size")
    if size in SIZES and accounting.num_parameters(SIZES[size]) < LEAST_PARAMETERS:
        return True
    return row[value] < {"ms": LEAST_MS, "bytes": LEAST_BYTES}.get(unit_of(value), 0)


def _is_measured(row: Row | None, value: str) -> bool:
    return row is not None and pd.notna(row.get(value))


def _unmeasured(frame: pd.DataFrame, case: Row) -> Fact:
    """Returns the fact of a case without a value, in words, with what became of it where it was
    tried: "eager, bf16, length 65,536 (out of memory)".
    """
    failures = set(select(frame, **case).get("status", [])) - {"ok"}
    words = ", ".join(sorted(failures)).replace("oom", "out of memory")
    # In one order, so that two sentences that lack one row say so once.
    name = case_name(dict(sorted(case.items())))
    return Fact("", missing=f"{name} ({words})" if words else name)


def compare(
    frame: pd.DataFrame,
    base: Row,
    other: Row,
    *,
    value: str = "median_ms",
    **case: Any,
) -> Fact:
    """Returns one case's two sides.

    Args:
        base, other: the columns in which the sides differ, with their values.
        value: the time or the bytes compared; case: the columns that both sides share.

    Returns:
        numbers: base, other, ratio, interval (a text).

    Raises:
        ValueError: a side names several rows; times of two kinds.
    """
    rows = []
    for side in (base, other):
        whole = {**case, **side}
        row = only(frame, **whole)
        if not _is_measured(row, value):
            return _unmeasured(frame, whole)
        rows.append(row)
    return compare_rows(*rows, value, case_name(case), _sides(base, other, value))


def _sides(base: Row, other: Row, value: str) -> str:
    words = "" if value == "median_ms" else f", {value.replace('_', ' ')}"
    return f"{case_name(other) or 'none'} against {case_name(base) or 'none'}{words}"


def compare_rows(
    base: Row,
    other: Row,
    value: str = "median_ms",
    case: str = "",
    plain: str = "",
) -> Fact:
    """Returns `compare` of two rows."""
    interval = verdicts.ratio(base, other, value)
    is_time = unit_of(value) == "ms"
    # Of times the base is above the line, of bytes the other.
    shown = interval.mid if is_time else 1 / interval.mid
    ratio = Quantity(shown, "×", mark(base, value) or mark(other, value))
    numbers = {
        "base": quantity(base, value),
        "other": quantity(other, value),
        "ratio": ratio,
        "value": ratio,
        "interval": span(interval.low, interval.high) if is_time else ratio,
    }
    small = _is_small(base, value) and _is_small(other, value)
    return Fact(case, numbers, interval.verdict, small=small, plain=plain, marked=bool(ratio.mark))


def compare_all(
    frame: pd.DataFrame,
    base: Row,
    other: Row,
    keys: list[str],
    *,
    value: str = "median_ms",
    **case: Any,
) -> Fact:
    """Returns a tally of `compare` over all cases that have both sides, told apart by `keys`; small
    ones left out.

    Returns:
        numbers: total; ahead, level, behind, undecided (counts); range ("1.31× to 1.52×", or the
            two end cases by name where they differ by more than WIDEST_RANGE or are all), least and
            most (a ratio and its case); left_out ("; 3 smaller: 0.88× to 1.62×", "" for none).
    """
    cases = ok_rows(frame, **case).reindex(columns=keys).drop_duplicates().to_dict("records")
    facts = {}
    small = []
    for key in cases:
        fact = compare(frame, base, other, value=value, **case, **key)
        if fact.small:
            small.append(fact["ratio"])
        elif not fact.missing:
            # In parentheses, where a size's parameters would open another pair.
            words = case_name({name.removesuffix("size"): part for name, part in key.items()})
            facts[words] = fact
    plain = _sides(base, other, value)
    if not facts:
        return Fact("", missing=f"{plain} for {case_name(case)}" if case else plain)
    ordered = sorted((fact["ratio"], words) for words, fact in facts.items())
    least = ordered[0][0]
    most = ordered[-1][0]
    named = [f"{ratio} ({words})" for ratio, words in ordered]
    counts = Counter(fact.verdict for fact in facts.values())
    verdict = next(iter(counts)) if len(counts) == 1 else MIXED
    is_few = len(facts) < LEAST_CASES
    if is_few:
        reach = " and ".join(named)
    elif most.value <= WIDEST_RANGE * least.value:
        reach = f"{least} to {most}"
    else:
        reach = f"{named[0]} to {named[-1]}"
    left_out = ""
    if small:
        ends = dict.fromkeys([str(min(small)), str(max(small))])
        left_out = f"; {len(small)} smaller: {' to '.join(ends)}"
    numbers = {
        "total": Quantity(len(facts), "count"),
        "left_out": left_out,
        **{name: Quantity(counts[name], "count") for name in verdicts.VERDICTS},
        "range": reach,
        "least": named[0],
        "most": named[-1],
        "value": reach,
    }
    return Fact(
        case_name(case),
        numbers,
        verdict,
        small=is_few and verdict in (MIXED, verdicts.UNDECIDED),
        plain=plain,
        marked=any(fact.marked for fact in facts.values()),
    )


def measured(frame: pd.DataFrame, value: str, unit: str = "", **case: Any) -> Fact:
    """Returns one case's value, with its unit: {value}."""
    row = only(frame, **case)
    if not _is_measured(row, value):
        return _unmeasured(frame, case)
    shown = quantity(row, value, unit)
    small = _is_small(row, value)
    return Fact(case_name(case), {"value": shown}, small=small, marked=bool(shown.mark))


def share_of(frame: pd.DataFrame, condition: str, what: str, **case: Any) -> Fact:
    """Returns in how many measured rows a condition holds, as `DataFrame.query` takes it: {value}
    is "26 of 64".
    """
    rows = ok_rows(frame, **case)
    if rows.empty:
        return Fact(what, missing=what)
    numbers = {"value": f"{len(rows.query(condition))} of {len(rows)}"}
    return Fact(case_name(case), numbers, small=len(rows) < LEAST_CASES)


def growth(frame: pd.DataFrame, x: str, value: str, low: float, high: float, **case: Any) -> Fact:
    """Returns the exponent with which a value grows between two lengths: {value}."""
    ends = compare(frame, {x: low}, {x: high}, value=value, **case)
    if ends.missing:
        return ends
    exponent = math.log(ends["other"].value / ends["base"].value) / math.log(high / low)
    grown = ends["ratio"]._replace(value=exponent, unit="")
    return replace(ends, numbers={"value": grown}, verdict="")


def fits(frame: pd.DataFrame, x: str, **case: Any) -> Fact:
    """Returns the largest `x` of a case that was measured, {value}."""
    rows = ok_rows(frame, **case)
    if rows.empty:
        return _unmeasured(frame, case)
    return Fact(case_name(case), {"value": Quantity(rows[x].max(), "count")})


def spread(errors: pd.DataFrame) -> Fact:
    """Returns how far predictions err, of the columns error and case: median, most (of 95 % of
    them, a text that says of how many), worst (a text).
    """
    if errors.empty:
        return Fact("", missing="what was predicted")
    size = errors["error"].abs()
    worst = errors.loc[size.idxmax()]
    numbers = {
        "median": Quantity(size.median(), "%"),
        "most": f"{percent(size.quantile(0.95))} in 95 % of {len(size)} cases",
        "worst": f"{percent(worst['error'])} ({worst['case']})",
    }
    return Fact("", numbers)


def beside(
    theirs: pd.DataFrame, ours: pd.DataFrame, keys: list[str], value: str = "ms"
) -> pd.DataFrame:
    """Returns every published value that has a row of ours beside it, with `ratio`, theirs over
    ours.

    Args:
        theirs: columns `keys`, gpu, published_<value>; ours: records; keys: columns that tell the
            cases apart.
        value: "ms", beside median_ms, or "gib", beside peak_bytes.
    """
    column, unit = {"ms": ("median_ms", 1), "gib": ("peak_bytes", 2**30)}[value]
    own = ok_rows(ours).reindex(columns=[*keys, column, "timer_method"])
    joined = theirs.merge(own, on=keys)
    return joined.assign(ratio=joined[f"published_{value}"] / joined[column] * unit)


def sentence(*facts: Fact, text: str = "", **texts: str) -> str:
    """Returns facts as a sentence.

    Args:
        facts: one, or several for one sentence without a verdict: {0}, {1} are their values,
            {1[base]} a number of one.
        text: for facts without a verdict, and for a tally whose cases differ.
        texts: by verdict, ahead=, level=, behind=, with the reason for that verdict alone; a
            verdict without a text prints its plain form with the interval.

    Raises:
        ValueError: a text with more than MOST_NUMBERS numbers, or for an undecided comparison,
            which has none.
    """
    first = facts[0]
    for verdict in texts:
        check_known("verdict of a text", verdict, (verdicts.AHEAD, verdicts.LEVEL, verdicts.BEHIND))
    for one in (text, *texts.values()):
        num_fields = sum(1 for _, name, _, _ in string.Formatter().parse(one) if name)
        if num_fields > MOST_NUMBERS:
            raise ValueError(f"{num_fields} numbers in {one!r}; accepted: {MOST_NUMBERS}")
    for fact in facts:
        if fact.missing:
            return f"*Not measured: {fact.missing}.*"
    for fact in facts:
        if fact.small:
            about = f"{fact.plain}, {fact.case}".strip(", ")
            return f"*Too small, or too few cases, to draw a conclusion: {about}.*"
    chosen = texts.get(first.verdict, text if first.verdict in ("", MIXED) else "")
    if first.verdict == MIXED and "{total}" not in chosen:
        chosen = ""  # cases that differ are a selection, which must say of how many
    if not chosen:
        return _plain(first)
    return chosen.format(*facts, **first.numbers).rstrip(".") + "."


def _plain(fact: Fact) -> str:
    case = f" ({fact.case})" if fact.case else ""
    if fact.verdict == MIXED:
        counts = [
            f"{verdict} in {fact[verdict]}" for verdict in verdicts.VERDICTS if fact[verdict].value
        ]
        return f"{fact.plain}{case}: {', '.join(counts)} of {fact['total']} cases."
    interval = fact.numbers.get("interval", fact.numbers.get("range", ""))
    return f"{fact.verdict.capitalize()} ({interval}): {fact.plain}{case}."
