"""Numbers as text: significant digits, percentages, ratios, lists."""

import math
import re
from collections.abc import Iterable, Sequence


def number(value: float | int | None, digits: int = 3) -> str:
    """Returns `value` with so many significant digits, thousands separated; "–" for nothing.

    >>> number(0.012345), number(9.996), number(12345.6), number(None)
    ('0.0123', '10.0', '12,346', '–')
    """
    if value is None or not math.isfinite(value):
        return "–"
    if value == 0:
        return "0"
    # Of the number as it is rounded: 9.996 is 10.0.
    exponent = int(f"{value:.{digits - 1}e}".partition("e")[2])
    decimals = max(0, digits - 1 - exponent)
    return f"{value:,.{min(decimals, 6)}f}"


def percent(fraction: float) -> str:
    """Returns a fraction as a percentage: 0.4123 is "41 %"."""
    return f"{number(100 * fraction, 2).removesuffix('.0')} %"


def gib(value: float | None) -> str:
    """Returns bytes in GiB with three significant digits, "–" for none."""
    return number(value / 2**30) if value else "–"


def power(value: float) -> str:
    """Returns the nearest power of ten, as "10⁻³"."""
    exponent = str(round(math.log10(value)))
    return "10" + exponent.translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def scientific(value: float) -> str:
    """Returns an error as "4.1e-4"."""
    return re.sub(r"e([+-])0", r"e\1", f"{value:.1e}")


def times(ratio: float) -> str:
    """Returns a ratio as "1.52×"."""
    return f"{number(ratio)}×"


def span(low: float, high: float) -> str:
    """Returns two ratios as "1.31× to 1.52×"."""
    return f"{times(low)} to {times(high)}"


def listing(items: Iterable[str], limit: int = 9) -> str:
    """Returns "a, b and c", cut after `limit` items with the number of the others."""
    items = list(items)
    if len(items) > limit:
        items = [*items[:limit], f"{len(items) - limit} more"]
    return " and ".join([", ".join(items[:-1]), items[-1]] if len(items) > 1 else items)


def count(n: int, noun: str) -> str:
    """Returns "1 case" or "3 cases"."""
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def anchor(heading: str) -> str:
    """Returns the anchor that GitHub gives the first heading with this text; the next ones get
    "-1", "-2", …

    >>> anchor("01 · Benchmarking")
    '01--benchmarking'
    """
    return re.sub(r"[^\w -]|[¹²³⁰-₉]", "", heading.strip().lower()).replace(" ", "-")


def disturbed_note(records: Sequence) -> list[str]:
    """Returns the sentence that says how many of the records' measurements other processes
    disturbed; [] for none.
    """
    num_measured = sum(record.status == "ok" for record in records)
    num_disturbed = sum(record.telemetry.get("disturbed", False) for record in records)
    text = f"The machine was busy during {num_disturbed:,} of {count(num_measured, 'measurement')}."
    return [text] if num_disturbed else []
