"""The report's first page: what was measured on, the findings to remember, symptoms and remedies."""

import importlib
from collections.abc import Mapping, Sequence

import pandas as pd

from labkit import notebooks
from labkit.records import SESSION_SECTIONS, Record, to_frame
from labkit.report import tables
from labkit.report.chapter import Chapter, commits_of, dates_of
from labkit.report.findings import anchor, disturbed_note, listing
from labkit.report.sessions import LIMITS, differences, table_agreement

MAX_FINDINGS = 10

TIMES = """\
> **What a time means here.** *Device time*: the kernels alone, replayed from a CUDA graph or summed from a profile. \
*Call time*: what your program waits for, including the host that launches the kernels; of one that a slow host held \
up, the fastest session of its commit. *Sustained*: a second of the same back to back (on a CPU a tenth), after as \
long of it, at the clocks that the power limit leaves; ~ marks one whose time or clock still changed by more than 2 %. \
They can differ by several times, so they are never compared with each other. Times are milliseconds, GB/s means 10⁹ \
bytes per second, GiB 2³⁰ bytes; a multiply-add counts as two FLOPs.
>
> **What a comparison means.** A ratio beside *ahead* or *behind* is the other's time over that of the one named \
first: above 1 the first is faster. It is *level* where the whole interval of the ratio, over samples and sessions, \
lies within 3 % of 1, else *ahead* or *behind* where it lies above or below 1, else *undecided*. A row of one session \
takes the spread that others have between sessions. Calls depend on the host and are compared within a session where \
one has both. Bytes and counts are compared exactly."""


def page(chapters: Mapping[str, Chapter]) -> str:
    """Returns the first page in Markdown, of the notebooks with records."""
    first = next(iter(chapters.values()))
    parts = [
        f"# {title(first)}",
        "Every number, table, figure and comparison of a measurement below is computed from its records. Figures "
        "published elsewhere stand beside them with their source; notes taken by hand are called notes.",
        tables.to_markdown(environment(chapters)),
        tables.to_markdown(table_chapters(chapters)),
        *(f"**{tables.DISTURBED}{sentence}**" for sentence in disturbed_note(to_frame(_records(chapters)))),
    ]
    if found := findings(chapters):
        parts += ["## What to remember", "\n".join(f"{i}. {text}" for i, text in enumerate(found, start=1))]
    if rows := [row for chapter, module in _modules(chapters, "symptoms") for row in module.symptoms(chapter)]:
        parts += ["## If your step is slow", tables.to_markdown(pd.DataFrame(rows))]
    return "\n\n".join([*parts, TIMES])


def title(chapter: Chapter) -> str:
    return f"A transformer measured on {chapter.device_name}"


def findings(chapters: Mapping[str, Chapter]) -> list[str]:
    """Returns findings for the first page with links to their sections: every chapter's first, then the second ones."""
    found = [list(enumerate(module.front(chapter))) for chapter, module in _modules(chapters, "front")]
    ranked = sorted((rank, number) for number, lines in enumerate(found) for rank, _ in lines)[:MAX_FINDINGS]
    kept = [found[number][rank][1] for number, rank in sorted((number, rank) for rank, number in ranked)]
    return [f"{text} → [{section}](#{anchor(section)})" for text, section in kept]


def environment(chapters: Mapping[str, Chapter]) -> pd.DataFrame:
    """Returns device, host, software and the conditions of the measurements, one row each."""
    first, records = next(iter(chapters.values())), _records(chapters)
    recorded = first.environment
    rows = {"device": first.device_name}
    if gpu := recorded.get("gpu"):
        rows["device"] += f", {gpu['memory_bytes'] / 2**30:.0f} GiB, {gpu['num_multiprocessors']} multiprocessors"
        if "power_limit_w" in gpu:
            rows["device"] += f", {gpu['power_limit_w']:.0f} W, SM clock up to {gpu['max_sm_clock_mhz']:,} MHz"
    if cpu := recorded.get("cpu"):
        rows["host of the newest run"] = f"{cpu['name']}, {cpu['num_cores']} cores"
    versions = {
        package: sorted({str(record.software[package]) for record in records if record.software.get(package)})
        for package in ("torch", "triton", "cuda", "driver", "python")
    }
    rows["software"] = ", ".join(f"{package} {', '.join(seen)}" for package, seen in versions.items() if seen)
    rows["measured"] = f"{dates_of(records) or '–'}, {len({r.session for r in records if r.session})} sessions"
    every = {name: [one for same in chapter.sessions() for one in same] for name, chapter in chapters.items()}
    agree = tables.select(table_agreement(differences(every)), chapter="all").to_dict("records")
    if shares := [f"{row['kind']} times {row[LIMITS[row['kind']]]} {LIMITS[row['kind']]}" for row in agree]:
        rows["measured again"] = f"beside the first session of the same commit {', '.join(shares)}"
    rows["conditions"] = _throttled(records)
    return pd.DataFrame(list(rows.items()), columns=["", "value"])


def table_chapters(chapters: Mapping[str, Chapter]) -> pd.DataFrame:
    """Returns for each chapter its title with a link, its records, how many several sessions timed, dates, commits."""
    rows, device = [], next(iter(chapters.values())).device
    for name, chapter in chapters.items():
        records = chapter.all_records()
        title = notebooks.title(name)
        counts = pd.Series([record.status for record in records]).value_counts().sort_index()
        timed = [sum(bool(one.timer) for one in found) for found in chapter.sessions(*SESSION_SECTIONS)]
        rows.append(
            {
                "chapter": f"[{title}](#{anchor(title)})"
                + (f", {chapter.device_name}" if chapter.device != device else ""),
                "records": ", ".join(f"{count:,} {status}" for status, count in counts.items()),
                "timed in several sessions": f"{sum(n > 1 for n in timed):,} of {sum(n > 0 for n in timed):,}",
                "measured": dates_of(records) or "–",
                "commit": commits_of(records) + (" +changes" if any(r.source.get("dirty") for r in records) else ""),
            }
        )
    return pd.DataFrame(rows)


def _records(chapters: Mapping[str, Chapter]) -> list[Record]:
    return [record for chapter in chapters.values() for record in chapter.all_records()]


def _throttled(records: Sequence[Record]) -> str:
    reasons = [record.telemetry.get("throttle_reasons", []) for record in records if record.telemetry]
    names = sorted({reason for group in reasons for reason in group})
    if not names:
        return "no throttling seen"
    return f"{listing(names)} during {sum(map(bool, reasons)):,} of {len(reasons):,} timed records"


def _modules(chapters: Mapping[str, Chapter], function: str):
    """Gives each chapter with its report module, where the module has the function."""
    for name, chapter in chapters.items():
        module = importlib.import_module(f"labkit.report.{name.split('_', 1)[1]}")
        if hasattr(module, function):
            yield chapter, module
