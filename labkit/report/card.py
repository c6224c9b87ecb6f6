"""The report's first page, and its last: answers first, how the numbers were made at the end."""

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from labkit import notebooks
from labkit.configs import SIZES
from labkit.records import Record, to_frame
from labkit.report import facts, figures, sessions, tables, verdicts
from labkit.report.chapter import (
    Chapter,
    Chapters,
    commits_of,
    dates_of,
    session_records,
    versions_of,
)
from labkit.report.flash_attention import shape_name
from labkit.report.frame import Row, by_way, cell, ok_rows, only, select, size_name, usable
from labkit.report.text import anchor, count, disturbed_note, gib, listing, number, percent

LADDER = {
    name: {"precision": precision, "compile": mode, "attention": attention}
    for name, precision, mode, attention in (
        ("fp32", "fp32", "none", "eager"),
        ("TF32", "tf32", "none", "eager"),
        ("bf16", "bf16", "none", "eager"),
        ("+ compiled", "bf16", "regional", "eager"),
        ("+ our kernels", "bf16", "regional", "auto"),
        ("pure bf16, compiled", "bf16_pure", "regional", "eager"),
    )
}
"""A training step, from slow to fast; the last is what stock PyTorch reaches when it gives up fp32
weights.
"""

LADDER_SIZES = ("small", "xl-2025", "2.7b")
LADDER_CONTEXT = 512
LADDER_FILE = "ladder.svg"

ATTENTION = {
    "gluon": "ours",
    "triton": "ours (Triton)",
    "fa3": "FlashAttention-3",
    "sdpa_cudnn": "SDPA cuDNN",
    "sdpa_flash": "SDPA flash",
    "sdpa_efficient": "SDPA efficient",
    "flex": "FlexAttention",
}
"""The implementations of attention, as the page calls them; the last four come with PyTorch."""

IN_PYTORCH = list(ATTENTION.values())[3:]

ATTENTION_SHAPES = (
    {"d_head": 128, "heads": 16, "length": 4096, "causal": True},
    {"d_head": 64, "heads": 16, "length": 16384, "causal": True},
    {"d_head": 72, "heads": 16, "length": 256, "causal": False},
)

KEYS = ("compile", "recompute", "second_gpu", "encoder")
"""Facts of the chapters that the first page repeats, in this order."""

PROVENANCE = "How the numbers are made"

DEFINITIONS = f"""\
- *Device time*: the kernels alone, replayed from one CUDA graph or summed from a profile.
- *Sustained*: back to back for a second or more, after a warm-up as long, at the clocks that the \
power limit leaves. ~ marks clocks that still changed. A share of a roof is of its session's own.
- *Call time*: what a program waits for, host included.
- A is r× as fast as B: r is B's time ÷ A's. A takes r× the memory of B: r is A's bytes ÷ B's.
- A ratio is *level* where its whole interval lies within {percent(verdicts.LEVEL_BAND)} of 1. \
*Ahead* or *behind* lies above or below 1, all else is *undecided*.
- The interval spans the sessions that measured both sides, else the samples.
- In one session the interval is widened by {percent(verdicts.WITHIN[verdicts.DEVICE])}, for calls \
by {percent(verdicts.WITHIN[verdicts.CALL])}; between sessions by \
{percent(verdicts.BETWEEN[verdicts.DEVICE])}, for calls by \
{percent(verdicts.BETWEEN[verdicts.CALL])}.
- Calls that wait for the host, also back to back, are widened by up to {verdicts.HOST_FACTOR}×.
- ⚠ marks what was measured while other programs kept the machine busy.
- No sentence's verdict rests on two times under {facts.LEAST_MS:.0f} ms or two memories under {
    facts.LEAST_BYTES / 2**20:.0f} MiB; fewer than {facts.LEAST_CASES} cases are named, not counted.
- A session is one run of one chapter.
- GB/s: 10⁹ bytes a second. GiB: 2³⁰ bytes. A multiply-add: two FLOPs."""


def page(chapters: Chapters, keyed: Mapping[str, tuple[str, str]]) -> str:
    """Returns the first page in Markdown.

    Args:
        chapters: those with records; keyed: by key a fact's sentence and the heading of its
            section.
    """
    rivals = frame_of(chapters, "06_flash_attention", "rivals")
    parts = [
        f"# {title(first_of(chapters))}",
        _provenance_line(chapters),
        *_ladder_part(chapters),
        *_part(
            "Which attention?",
            attention_table(rivals),
            f"Shapes: batch×heads×length×d. Device time in bf16, in a burst, of "
            f"{_entrants(rivals)}. Chapter 06 has the fastest at the power limit.",
        ),
        *_fits_part(chapters),
    ]
    answers = [
        f"- {sentence} → [{heading}](#{anchor(heading)})"
        for sentence, heading in (keyed[key] for key in KEYS if key in keyed)
    ]
    if answers:
        parts += ["### In one line each", "\n".join(answers)]
    again = _come_back(chapters)
    if again:
        parts += ["### Do the numbers come back?", again]
    return "\n\n".join(parts)


def first_of(chapters: Chapters) -> Chapter:
    return next(iter(chapters.values()))


def title(chapter: Chapter) -> str:
    return f"A transformer measured on {chapter.device_name}"


def lines(chapters: Chapters) -> list[str]:
    """Returns what `labkit run` ends with: at most three lines of the first page, without
    Markdown.
    """
    result = []
    for size, *times in _rungs(_steps(chapters)).tail(1).itertuples(index=False):
        names = [f"{name} {time}" for name, time in zip(LADDER, times, strict=True) if time != "–"]
        result.append(f"A training step of {size}, ms: {', '.join(names)}")
    rivals = frame_of(chapters, "06_flash_attention", "rivals")
    for row in attention_table(rivals).head(1).to_dict("records"):
        fastest = f"fastest is {row['fastest']}; ours {row['ours']}"
        result.append(f"Attention, {row['shape']}, {row['pass']}: {fastest}")
    return list(filter(None, [*result, _come_back(chapters)]))


def frame_of(chapters: Chapters, name: str, *sections: str) -> pd.DataFrame:
    """Returns the records of a chapter's sections, an empty frame where the page has no such
    chapter.
    """
    return chapters[name].records(*sections) if name in chapters else to_frame([])


def _come_back(chapters: Chapters) -> str:
    every = {name: chapter.every_record() for name, chapter in chapters.items()}
    return sessions.sentence(sessions.differences(every))


# ---- the ladder ----------------------------------------------------------------------------------


def _steps(chapters: Chapters) -> pd.DataFrame:
    rows = frame_of(chapters, "01_benchmarking", "execution")
    return select(rows, phase="graph_step", context=LADDER_CONTEXT)


def _rungs(steps: pd.DataFrame, *form: Any) -> pd.DataFrame:
    """Returns a value of each rung, failed ones too, a row per size that has one; `form` as `cell`
    takes it.
    """
    table = by_way(select(steps, size=LADDER_SIZES), "size", LADDER, lambda row: cell(row, *form))
    table = table.reindex(columns=["size", *LADDER])
    return table[(table[list(LADDER)] != "–").any(axis=1)]


def ladder_table(steps: pd.DataFrame) -> pd.DataFrame:
    """Returns the ladder: device time by size, peak memory of the largest and its share of the
    sustained roof.
    """
    parts = {
        "ms": _rungs(steps),
        "peak GiB": _rungs(steps, "peak_bytes", gib).tail(1),
        "of the sustained bf16 roof": _rungs(steps, "sustained_ceiling_fraction", percent).tail(1),
    }
    head = f"one training step, context {LADDER_CONTEXT}"
    rows = [
        {head: f"{size}, {words}"} | row
        for words, part in parts.items()
        for size, row in part.set_index("size").to_dict("index").items()
    ]
    return pd.DataFrame(rows)


def ladder(chapters: Chapters) -> Figure | None:
    """Draws the ladder, a line a size, None where no step was replayed; dotted what a step would
    take at the sustained roof of bf16.
    """
    ceilings = frame_of(chapters, "01_benchmarking", "ceilings")
    roof = only(ceilings, kind="gemm", precision="bf16") or {}
    roof_tflops = roof.get("sustained_tflops")
    steps = usable(_steps(chapters), "median_ms")
    figure, axis = figures.panel(height=3.6)
    for size in LADDER_SIZES:
        rungs = [only(steps, size=size, **rung) for rung in LADDER.values()]
        times = {place: row["median_ms"] for place, row in enumerate(rungs) if row}
        if not times:
            continue
        style = figures.STYLES[size]
        # A rung that was not measured is a gap.
        axis.plot(pd.Series(times).reindex(range(len(rungs))), label=size_name(size), **style.line)
        # The two large sizes lie close together: the label of the lower goes below.
        above = size != LADDER_SIZES[1]
        for place, time in times.items():
            axis.annotate(
                number(time),
                (place, time),
                xytext=(0, 6 if above else -6),
                textcoords="offset points",
                ha="center",
                va="bottom" if above else "top",
                size=9,
            )
        if roof_tflops:
            at_roof = next(filter(None, rungs))["flops"] / roof_tflops / 1e9
            axis.hlines(at_roof, 2, len(LADDER) - 1, color=style.colour, linestyle=":", linewidth=1)
    if not axis.lines:
        return None
    names = [name.replace(", ", ",\n") for name in LADDER]
    axis.set_xticks(range(len(LADDER)), names)
    figures.log_time_axis(axis, "device time of a step (ms)")
    axis.margins(x=0.06, y=0.15)
    return figures.finish(figure)


def _ladder_part(chapters: Chapters) -> list[str]:
    steps = _steps(chapters)
    text = (
        "Batch 4, one CUDA graph a step, so no host enters its time. Dotted: at the sustained "
        "bf16 roof. *bf16* is autocast over fp32 weights; *compiled* compiles each block; "
        "*our kernels* keep the blocks' matrices in bf16 beside fp32 masters; *pure bf16* has no "
        "fp32 weights, and loses small updates (chapter 03)."
    )
    image = f"../figures/{first_of(chapters).device}/{LADDER_FILE}"
    figure = f"![A training step from slow to fast, as in the table]({image})"
    return _part("One training step, from slow to fast", ladder_table(steps), text, figure)


# ---- attention -----------------------------------------------------------------------------------


def _entrants(rivals: pd.DataFrame) -> str:
    """Returns which implementations were measured, and which were not."""
    impls = {phase.split(" ")[0] for phase in usable(rivals, "phase")["phase"]}
    measured = [name for impl, name in ATTENTION.items() if impl in impls]
    others = [name for name in ATTENTION.values() if name not in measured]
    text = listing(measured)
    return f"{text} (not measured: {listing(others)})" if others else text


def attention_table(rivals: pd.DataFrame) -> pd.DataFrame:
    """Returns by shape and pass the fastest attention, ours, and the best that comes with PyTorch,
    in device time.
    """
    lines = []
    for shape, direction in itertools.product(ATTENTION_SHAPES, ("forward", "backward")):
        rows = {
            name: only(rivals, phase=f"{impl} {direction}", **shape)
            for impl, name in ATTENTION.items()
        }
        times = {name: row["median_ms"] for name, row in rows.items() if row}
        if not times:
            continue
        names = sorted(times, key=times.get)
        fastest = rows[names[0]]
        beside = {name: _beside(fastest, rows[name]) for name in names}
        ahead = [name for name, text in beside.items() if text in ("the fastest", "level")]
        lines.append(
            {
                "shape": shape_name(fastest),
                "pass": direction,
                "ms": cell(fastest),
                "fastest": f"{listing(ahead)}, {cell(fastest, 'achieved_tflops')} TFLOP/s",
                "ours": beside.get("ours", "not measured"),
                "PyTorch alone": next(
                    (f"{name}, {beside[name]}" for name in names if name in IN_PYTORCH),
                    "not measured",
                ),
            }
        )
    return pd.DataFrame(lines)


def _beside(fastest: Row, row: Row) -> str:
    if row is fastest:
        return "the fastest"
    fact = facts.compare_rows(fastest, row)
    if fact.verdict == verdicts.LEVEL:
        return "level"
    doubt = f", undecided ({fact['interval']})" if fact.verdict == verdicts.UNDECIDED else ""
    return f"{fact['ratio']} as fast{doubt}"


def _part(heading: str, table: pd.DataFrame, text: str, *figure: str) -> list[str]:
    """Returns a section of the page, nothing where its table has no row."""
    return [] if table.empty else [f"### {heading}", *figure, tables.to_markdown(table), text]


# ---- memory --------------------------------------------------------------------------------------


def longest(frame: pd.DataFrame, **case: Any) -> str:
    """Returns the longest context that a training step was measured with and the shortest that
    failed, "≥" where none did.
    """
    rows = select(frame, **case)
    if rows.empty:
        return "not measured"
    fits = ok_rows(rows)["context"]
    needs_more = rows["reason"].str.startswith("needs at least")
    too_large = rows["context"][needs_more | (rows["status"] == "oom")]
    if fits.empty:
        return "not measured" if too_large.empty else "does not fit"
    return f"≥ {fits.max():,}" if too_large.empty else f"{fits.max():,}, not {too_large.min():,}"


def _fits_part(chapters: Chapters) -> list[str]:
    """Returns the longest measured context of a training step by size and what saves memory."""
    steps = frame_of(chapters, "01_benchmarking", "steps")
    steps = select(steps, phase="train_step", compile="none")
    profiles = frame_of(chapters, "02_nsys_analysis", "profiles")
    plans = frame_of(chapters, "04_memory", "checkpointing")
    ways = {
        "fp32": select(steps, precision="fp32"),
        "bf16": pd.concat(
            [select(steps, precision="bf16"), select(plans, plan="none", attention="eager")]
        ),
        "bf16 + our FlashAttention": select(
            profiles, phase="train_step", attention="auto", precision="bf16"
        ),
        "+ every block recomputed": select(plans, plan="1", attention="sdpa_flash"),
    }
    table = pd.DataFrame(
        {"size": size_name(size)} | {name: longest(rows, size=size) for name, rows in ways.items()}
        for size in SIZES
        if len(select(steps, size=size))
    )
    text = (
        "Longest measured context of a training step at batch 4 with AdamW, and the shortest that "
        "failed; ≥: none. Recomputing is with SDPA's FlashAttention."
    )
    return _part("Will it fit?", table, text)


# ---- provenance ----------------------------------------------------------------------------------


def _provenance_line(chapters: Chapters) -> str:
    records = session_records(chapters)
    gpu = first_of(chapters).gpu
    parts = [
        f"{gib(gpu['memory_bytes'])} GiB" if gpu else "",
        f"{gpu['power_limit_w']:.0f} W" if gpu.get("power_limit_w") else "",
        versions_of("torch", records),
        count(len({record.session for record in records} - {""}), "session"),
        dates_of(records),
    ]
    return f"{' · '.join(filter(None, parts))}. [{PROVENANCE}](#{anchor(PROVENANCE)})."


def provenance(chapters: Chapters) -> str:
    """Returns the last section: machine, versions, sessions and commits, definitions, and what is
    not shown.
    """
    first = first_of(chapters)
    every = session_records(chapters)
    shown = [record for chapter in chapters.values() for record in chapter.all_records()]
    packages = dict.fromkeys(name for record in shown for name in record.software)
    versions = filter(None, (versions_of(name, shown) for name in packages))
    lines = [
        f"Device: {_machine(first)}.",
        *(f"Lacking: {name}: {text}." for name, text in first.environment.get("lacks", {}).items()),
        f"Software: {', '.join(versions)}.",
        *disturbed_note(shown),
        *_power_note(first, shown),
    ]
    parts = [
        f"## {PROVENANCE}",
        "\n".join(f"- {line}" for line in lines),
        tables.to_markdown(chapters_table(chapters)),
        DEFINITIONS,
        "### What this does not show",
        "\n".join(f"- {line}" for line in not_shown(shown, every)),
    ]
    return "\n\n".join(parts)


def _machine(chapter: Chapter) -> str:
    gpu = chapter.gpu
    cpu = chapter.environment.get("cpu")
    text = chapter.device_name
    if gpu:
        text += f", {gpu['num_multiprocessors']} multiprocessors"
    if gpu.get("max_sm_clock_mhz"):
        text += f", SM clock up to {gpu['max_sm_clock_mhz']:,} MHz"
    if cpu:
        text += f"; host of the newest run {cpu['name']}, {cpu['num_cores']} cores"
    return text


def _power_note(chapter: Chapter, records: Sequence[Record]) -> list[str]:
    limit = chapter.gpu.get("power_limit_w") or math.inf
    watts = [record.metrics["watts"] for record in records if record.metrics.get("watts")]
    above = [value for value in watts if value > limit]
    if not above:
        return []
    return [
        f"{len(above)} of {len(watts)} mean powers read above the limit of {limit:.0f} W, by up to "
        f"{percent(max(above) / limit - 1)}: energies are no more exact than that."
    ]


def chapters_table(chapters: Chapters) -> pd.DataFrame:
    """Returns for each chapter its records, its sessions that entered a number, dates and
    commits.
    """
    rows = []
    device = first_of(chapters).device_name
    for name, chapter in chapters.items():
        shown = chapter.all_records()
        every = chapter.every_record()
        heading = notebooks.title(name)
        # A CPU's page has no chapters.
        link = heading if chapter.device_kind == "cpu" else f"[{heading}](#{anchor(heading)})"
        changed = any(record.source.get("dirty") for record in shown)
        rows.append(
            {
                "chapter": link
                if chapter.device_name == device
                else f"{link} on {chapter.device_name}",
                "records": status_counts(shown),
                "sessions": len({record.session for record in every} - {""}),
                "measured": dates_of(every) or "–",
                "labkit": versions_of("labkit", shown).removeprefix("labkit "),
                "commit": commits_of(shown) + (" +changes" if changed else ""),
            }
        )
    return pd.DataFrame(rows)


def status_counts(records: Sequence[Record]) -> str:
    """Returns "69 ok, 3 skipped"."""
    counts = Counter(record.status for record in records)
    return ", ".join(f"{num:,} {status}" for status, num in sorted(counts.items()))


def not_shown(shown: Sequence[Record], every: Sequence[Record]) -> list[str]:
    """Returns what the page cannot tell, one line each."""
    failed = [record for record in shown if record.status in ("error", "timeout")]
    sessions_of = Counter(record.resume_key() for record in every if record.timer)
    num_once = sum(num == 1 for num in sessions_of.values())
    lines = [
        "Measured on few devices: two of one model differ by some percent.",
        f"{num_once:,} of {len(sessions_of):,} timed rows are of one session.",
        "Tokens and weights are random: only chapter 03's toy task is about learning.",
    ]
    if failed:
        reasons = listing(dict.fromkeys(f"{one.section}: {one.reason[:80]}" for one in failed), 2)
        lines.append(f"{count(len(failed), 'measurement')} ended in an error ({reasons}).")
    return lines
