"""Devices beside one another: the cases that both measured alike, and what only one of them has.

Two records are alike where notebook, section, case, phase and the way of measuring are, and times
are of one kind. What is not alike is named and enters no ratio.
"""

import json
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator

from labkit import notebooks
from labkit.configs import RequestError
from labkit.device import slug_of, slugify
from labkit.records import (
    HOST_SECTION,
    SESSION_SECTION,
    RecordError,
    check_device_folder,
    measured_devices,
    single,
    write_bytes_atomic,
    write_text_atomic,
)
from labkit.report import figures, tables, verdicts
from labkit.report import page as html
from labkit.report.card import first_of
from labkit.report.chapter import (
    Chapters,
    chapters_of,
    commits_of,
    dates_of,
    session_records,
    versions_of,
)
from labkit.report.facts import LEAST_MS, case_name
from labkit.report.frame import Row, mark, select
from labkit.report.text import count, gib, listing, number, span, times

MEMORY = "memory"
"""The kind of what is no time: peaks of memory."""

VALUES = ("step_kernel_ms", "median_ms", "sustained_ms", "host_median_ms", "peak_bytes")
"""What is compared of a record; of each kind the first that it has."""

ROOFS = {"bf16 products": "gemm, bf16", "copy": "copy"}
"""Of the roofs, those in the table of devices, and how their case begins."""

HEAD = ["chapter", "section", "case", "phase"]
"""What a measurement is of, in the order of `Record.identity`."""

APART = ["measured on", "why"]
"""What is said of a case that gets no ratio."""

MOST_NAMED = 3


def side(name: str, root: Path | None = None, names: Sequence[str] = ()) -> Chapters:
    """Returns the chapters of a device by its slug, "this", or its folder, wherever that lies.

    Args:
        root: where the devices' folders lie; names: of the notebooks, all by default.

    Raises RequestError where it has no records.
    """
    folder = Path(name)
    if os.path.isdir(folder):  # also of a name that is too long
        check_device_folder(folder)
        folder = folder.resolve()
        root = folder.parent
        name = folder.name
    chapters = chapters_of(slug_of(name), root)
    chapters = {key: one for key, one in chapters.items() if not names or key in names}
    if not chapters:
        raise RequestError(f"{name} has no records of {', '.join(names)}")
    return chapters


def _values(row: Row) -> dict[str, str]:
    """Returns by kind the column that holds a measured row's value."""
    values = {}
    for value in VALUES:
        if (row.get(value) or 0) > 0:
            kind = MEMORY if value == "peak_bytes" else verdicts.kind_of_time(row, value)
            values.setdefault(kind, value)
    return values


def _measurements(chapters: Chapters) -> dict[str, Row]:
    """Returns the rows that the reports read, with their measurement_version, by the identities of
    their records; a ceiling of chapter 01's alone.
    """
    measurements = {}
    for name, chapter in chapters.items():
        records = chapter.all_records()
        frame = chapter.records(*{record.section for record in records})
        for record, row in zip(records, frame.to_dict("records"), strict=True):
            is_roof = record.section == SESSION_SECTION
            if record.section == HOST_SECTION or (is_roof and not name.startswith("01")):
                continue
            if is_roof:
                # The sustained time of 1 TFLOP or 1 GB alone: its size depends on the kind of
                # device. It is measured anew by every session; the newest counts.
                unit = "gb_per_s" if row["kind"] == "copy" else "tflops"
                time = 1e3 / row.get(f"sustained_{unit}", math.nan)
                row |= dict.fromkeys(VALUES) | {"sustained_ms": time, "sessions": None}
            measurements[record.identity] = row | {
                "measurement_version": record.measurement_version,
                "values": _values(row),
            }
    return measurements


def _hindrance(base: Row | None, other: Row | None) -> str:
    """Returns why the two rows of a case, of which one was measured, get no ratio; "" where they
    do.
    """
    for row in (base, other):
        if row is None:
            return "not measured"
        if row["status"] == "oom":
            return "did not fit"
        if row["status"] != "ok":
            words = {"skipped": "not possible", "timeout": "took too long"}
            status = words.get(row["status"], row["status"])
            return f"{status}: {row['reason'][:80]}"
    one = base["measurement_version"]
    two = other["measurement_version"]
    if one != two:
        return f"measured in two ways, {one} and {two}"
    is_roof = base["section"] == SESSION_SECTION
    for name, value in base["observed"].items():
        if isinstance(value, int) and not is_roof and other["observed"].get(name, value) != value:
            return f"{name} differs"
    kinds = base["values"]
    other_kinds = other["values"]
    if kinds and not kinds.keys() & other_kinds.keys():
        return f"{listing(kinds)} against {listing(other_kinds)}"
    return ""


def _ratios(base: Row, other: Row) -> Iterator[dict]:
    """Yields a row of `Comparison.common` for each kind of value that both have."""
    for kind, value in base["values"].items():
        other_value = other["values"].get(kind)
        if other_value:
            ratio = verdicts.ratio(base, other, value, other_value)
            yield {
                "kind": kind,
                "base": base[value],
                "other": other[other_value],
                "ratio": ratio.mid,
                "low": ratio.low,
                "high": ratio.high,
                "verdict": ratio.verdict,
                "mark": mark(base, value) or mark(other, other_value),
            }


class Comparison:
    """One device beside a baseline.

    Attributes:
        base, other: what the devices are called here; sources: what measured them, in words.
        common: a row per value that both have: chapter, section, case, phase, kind, base, other,
            ratio (base ÷ other: how many times as fast, or as small, the other is), low, high,
            verdict, mark.
        apart: a row per measurement that gets no ratio: chapter, section, case, phase, measured on
            (one or both of the names), why.

    Raises:
        RequestError: nothing was measured alike on both.
    """

    def __init__(self, base: Chapters, other: Chapters):
        self.base = first_of(base).asked_device
        self.other = first_of(other).asked_device
        if self.other == self.base:
            # A device measured twice: the second is named by the folder that it lies in.
            self.other += f" in {first_of(other).folder.parent.name}"
        self.sources = f"{provenance(self.base, base)} {provenance(self.other, other)}"
        if len({versions_of("labkit", session_records(one)) for one in (base, other)}) > 1:
            self.sources += " Rows of labkit's own kernels compare its versions, too."
        ours = _measurements(base)
        theirs = _measurements(other)
        common = []
        apart = []
        for key in dict.fromkeys([*ours, *theirs]):
            pair = (ours.get(key), theirs.get(key))
            sides = zip((self.base, self.other), pair, strict=True)
            measured = [name for name, row in sides if row and row["status"] == "ok"]
            if not measured:
                continue
            head = dict(zip(HEAD, json.loads(key), strict=True))
            head["case"] = case_name(head["case"])
            why = _hindrance(*pair)
            if why:
                apart.append(head | {"measured on": listing(measured), "why": why})
            else:
                common += [head | row for row in _ratios(*pair)]
        self.common = pd.DataFrame(common)
        self.apart = pd.DataFrame(apart, columns=[*HEAD, *APART])
        if not common:
            raise RequestError(
                f"{self.base} and {self.other} have no row in common "
                f"({listing(self.apart['why'].unique(), MOST_NAMED)}); "
                "`labkit run --profile quick` measures rows that every device of a kind has"
            )


# ---- what a page says ----------------------------------------------------------------------------


def roofs(comparison: Comparison) -> pd.DataFrame:
    """Returns the card's rows: matrix products and the copy, and the longest device times."""
    rows = comparison.common
    longest = select(rows, kind=verdicts.DEVICE).sort_values("base", ascending=False)
    # The longest of each chapter, so that no chapter fills the table.
    longest = longest.groupby("chapter").head(2)
    return pd.concat([select(rows, section=SESSION_SECTION), longest])


def _label(row: Row) -> str:
    return f"{row['chapter'][:2]} {row['section']}: {row['case']}, {row['phase']}"


def _tally(rows: pd.DataFrame) -> list[str]:
    """Returns how many rows have which verdict, as "3 ahead"; those that none has are left out."""
    counts = Counter(rows["verdict"])
    return [f"{counts[name]} {name}" for name in verdicts.VERDICTS if counts[name]]


def shown(rows: pd.DataFrame, comparison: Comparison) -> pd.DataFrame:
    """Returns rows of a comparison as a page's table."""
    lines = []
    for row in rows.to_dict("records"):
        form, unit = (gib, "GiB") if row["kind"] == MEMORY else (number, "ms")
        if row["section"] == SESSION_SECTION:
            unit = "ms a TFLOP" if row["case"].startswith("gemm") else "ms a GB"
        lines.append(
            {
                "case": _label(row),
                "kind": f"{row['kind']}, {unit}",
                comparison.base: form(row["base"]),
                comparison.other: form(row["other"]),
                "ratio": row["mark"] + times(row["ratio"]),
                "interval": span(row["low"], row["high"]),
                "verdict": row["verdict"],
            }
        )
    return pd.DataFrame(lines)


def by_chapter(comparison: Comparison) -> pd.DataFrame:
    """Returns of each chapter and kind the number of rows, the median ratio with its extremes, and
    the verdicts.
    """
    return pd.DataFrame(
        {
            "chapter": notebooks.title(chapter),
            "kind": kind,
            "rows": len(rows),
            "median": times(rows["ratio"].median()),
            "least to most": span(rows["ratio"].min(), rows["ratio"].max()),
            "verdicts": ", ".join(_tally(rows)),
        }
        for (chapter, kind), rows in comparison.common.groupby(["chapter", "kind"])
    )


def findings(comparison: Comparison) -> list[str]:
    """Returns what the comparison says in sentences: the tally of each kind of time, the extremes,
    and what fits on one device alone.
    """
    unmarked = select(comparison.common, mark="")
    is_case = unmarked["section"] != SESSION_SECTION
    # Of a kernel shorter than that a device's launch overhead is the larger part.
    measured = unmarked[is_case & (unmarked["base"] >= LEAST_MS)]
    lines = []
    for kind in (verdicts.DEVICE, verdicts.SUSTAINED, verdicts.CALL):
        rows = select(measured, kind=kind)
        if len(rows):
            lines.append(
                f"{kind.capitalize()} times, {count(len(rows), 'row')}: {comparison.other} is "
                f"{times(rows['ratio'].median())} as fast in the median; {listing(_tally(rows))}."
            )
    device = select(measured, kind=verdicts.DEVICE).sort_values("ratio").to_dict("records")
    if device:
        for words, row in {"lowest": device[0], "highest": device[-1]}.items():
            lines.append(
                f"The {words} ratio of device times is {times(row['ratio'])} ({_label(row)})."
            )
    for name, rows in select(comparison.apart, why="did not fit").groupby("measured on"):
        lines.append(
            f"{count(len(rows), 'measurement')} fit on {name} alone, such as "
            f"{_label(rows.iloc[0])}."
        )
    return lines


def apart(comparison: Comparison) -> pd.DataFrame:
    """Returns how many measurements get no ratio, by chapter, where they were measured, and why."""
    rows = comparison.apart.assign(chapter=comparison.apart["chapter"].map(notebooks.title))
    counts = rows.value_counts(["chapter", *APART], sort=False).reset_index(name="rows")
    return counts.sort_values("rows", ascending=False, kind="stable")


def figure(comparison: Comparison, chapter: str) -> Figure:
    """Draws the ratios of a chapter as boxes over quartiles, by section and kind; right of the line
    the other device is faster.
    """
    rows = select(comparison.common, chapter=chapter)
    groups = rows.groupby(rows["section"] + ", " + rows["kind"], sort=False)["ratio"]
    names, ratios = zip(*groups, strict=True)
    drawn, axis = figures.panel(height=0.9 + 0.32 * len(names))
    axis.boxplot(ratios, orientation="horizontal", tick_labels=names, flierprops={"markersize": 3})
    axis.set_xscale("log")
    axis.invert_yaxis()
    axis.axvline(1, color="0.4", linewidth=1, linestyle=":")
    least, most = axis.get_xlim()
    # Ratios that lie near one another reach one power of ten, or none.
    axis.xaxis.set_major_locator(MaxNLocator(6) if most < 5 * least else LogLocator(subs=(1, 2, 5)))
    axis.xaxis.set_major_formatter("{x:g}×")
    axis.minorticks_off()
    words = "times as fast (of memory: as small)"
    axis.set_xlabel(f"{comparison.other} is … {words} as {comparison.base}")
    axis.set_title(notebooks.title(chapter))
    return drawn


def provenance(name: str, chapters: Chapters) -> str:
    """Returns which software measured a device, when, and from which commit."""
    records = session_records(chapters)
    parts = [
        versions_of("torch", records),
        versions_of("labkit", records),
        dates_of(records),
        count(len({record.session for record in records}), "session"),
        f"commit {commits_of(records)}",
    ]
    return f"*{name}*: {', '.join(filter(None, parts))}."


def page(comparison: Comparison, images: Mapping[str, str]) -> str:
    """Returns the comparison in Markdown; `images` are the files of its figures by chapter."""
    base = comparison.base
    rows = roofs(comparison)
    parts = [
        f"# {comparison.other} beside {base}",
        comparison.sources,
        f"A ratio of times says how many times as fast {comparison.other} is; of memory, how many "
        f"times as much {base} takes. It is *level* within 3 % of 1. Device, sustained and call "
        "times are compared with their own kind only. The lines below count unmarked rows of "
        f"{LEAST_MS:g} ms or more on {base}, roofs left out; the tables count all.",
        "\n".join(f"- {line}" for line in findings(comparison)),
        f"## The card's rows\n\n{tables.to_markdown(shown(rows, comparison))}" if len(rows) else "",
        "## By chapter",
        tables.to_markdown(by_chapter(comparison)),
    ]
    parts += [
        f"![Ratios of {notebooks.title(chapter)}]({image})" for chapter, image in images.items()
    ]
    if len(comparison.apart):
        parts += ["## Not compared", tables.to_markdown(apart(comparison))]
    return "\n\n".join(filter(None, parts)) + "\n"


def write(comparisons: Sequence[Comparison], folder: Path) -> list[Path]:
    """Writes compare.md and compare.html, the rows of each comparison as CSV, and a figure a
    chapter; returns the files.
    """
    pages = []
    written = []
    for comparison in comparisons:
        images = {}
        for chapter in comparison.common["chapter"].unique():
            name = f"{slugify(comparison.other)}_{chapter[:2]}.svg"
            image = figures.svg(figure(comparison, chapter))
            written.append(write_bytes_atomic(folder / name, image))
            images[chapter] = name
        pages.append(page(comparison, images))
        rows = folder / f"{slugify(comparison.other)}.csv"
        written.append(write_text_atomic(rows, tables.to_csv(comparison.common)))
    text = "\n".join(pages)
    html_page = html.html(text, folder, f"Devices beside {comparisons[0].base}")
    written.append(write_text_atomic(folder / "compare.md", text))
    return [*written, write_text_atomic(folder / "compare.html", html_page)]


def others(chapters: Chapters, root: Path) -> str:
    """Returns the section of a report on the other devices in `root`, "" where there is none."""
    base = first_of(chapters).asked_device
    lines = []
    several = []
    for name in measured_devices(root):
        if name == base:
            continue
        if single(name) != name:
            several.append(f"[{name}](../figures/{name})")
            continue
        try:
            rows = Comparison(chapters, side(name, root)).common
        except (RequestError, RecordError):  # `labkit compare` says what is wrong with it
            continue
        page = f"../figures/{name}/report.md"
        line = {"device": f"[{name}]({page})", "rows in common": f"{len(rows):,}"}
        is_roof = rows["section"] == SESSION_SECTION
        for words, case in ROOFS.items():
            roof = rows[is_roof & rows["case"].str.startswith(case)]
            for row in roof.head(1).to_dict("records"):
                line[words] = row["mark"] + times(row["ratio"])
        for kind in (verdicts.DEVICE, verdicts.SUSTAINED):
            ratios = select(rows[~is_roof], mark="", kind=kind)["ratio"]
            if len(ratios):
                line[f"{kind} times"] = times(ratios.median())
        lines.append(line)
    if not lines:
        return ""
    frame = pd.DataFrame(lines).fillna("–")
    return (
        f"## Other devices\n\n{tables.to_markdown(frame)}\n\nTimes as fast as this device, roofs "
        f"sustained, times in the median row; all rows: `labkit compare {base} NAME`."
        + (f" Several GPUs together: {listing(several)}." if several else "")
    )
