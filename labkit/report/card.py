"""The report's first page, and its last: answers first, how the numbers were made at the end."""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from labkit import notebooks
from labkit.records import Record, to_frame
from labkit.report import facts, figures, sessions, tables, verdicts
from labkit.report.chapter import Chapter, commits_of, dates_of
from labkit.report.frame import cell, only, select, size_name
from labkit.report.text import anchor, count, disturbed_note, listing, number, percent

LADDER = {
    "fp32": {"precision": "fp32", "compile": "none", "attention": "eager"},
    "TF32": {"precision": "tf32", "compile": "none", "attention": "eager"},
    "bf16": {"precision": "bf16", "compile": "none", "attention": "eager"},
    "+ compiled": {"precision": "bf16", "compile": "regional", "attention": "eager"},
    "+ our kernels": {"precision": "bf16", "compile": "regional", "attention": "auto"},
    "pure bf16, compiled": {"precision": "bf16_pure", "compile": "regional", "attention": "eager"},
}
"""A training step, from slow to fast; the last is what stock PyTorch reaches when it gives up fp32
weights.
"""

LADDER_SIZES = ("small", "xl-2025", "2.7b")
LADDER_CONTEXT = 512

ATTENTION = {
    "gluon": "ours",
    "triton": "ours (Triton)",
    "fa3": "FlashAttention-3",
    "sdpa_cudnn": "SDPA cuDNN",
    "sdpa_flash": "SDPA flash",
    "sdpa_efficient": "SDPA efficient",
    "flex": "FlexAttention",
}
"""The implementations of attention, as the page calls them."""

PYTORCH = ("sdpa_cudnn", "sdpa_flash", "sdpa_efficient", "flex")

ATTENTION_SHAPES = (
    {"d_head": 128, "heads": 16, "length": 4096, "causal": True},
    {"d_head": 64, "heads": 16, "length": 16384, "causal": True},
    {"d_head": 72, "heads": 16, "length": 256, "causal": False},
)

KEYS = ("compile", "idle", "recompute", "second_gpu", "encoder")
"""Facts of the chapters that the first page repeats, in this order."""

PROVENANCE = "How the numbers are made"

DEFINITIONS = f"""\
- *Device time*: the kernels alone, replayed from one CUDA graph or summed from a profile. \
*Sustained*: back to back for a second, after as long of it, at the clocks that the power limit \
leaves; ~ marks one whose clocks still changed. *Call time*: what a program waits for, the host \
included. They are never compared with each other.
- *Idle*: 1 − kernel time ÷ call time.
- A is r× as fast as B: r is B's time ÷ A's. A takes r× the memory of B: r is A's bytes ÷ B's.
- A ratio is *level* where its whole interval lies within {percent(verdicts.LEVEL_BAND)} of 1, \
*ahead* or *behind* where it lies above or below 1, else *undecided*. The interval spans the \
sessions that measured both sides, else the samples. It is widened by \
{percent(verdicts.SPREAD[verdicts.DEVICE, True])} for device and sustained times of one session \
and {percent(verdicts.SPREAD[verdicts.CALL, True])} for calls; between sessions by \
{percent(verdicts.SPREAD[verdicts.DEVICE, False])} and {
    percent(verdicts.SPREAD[verdicts.CALL, False])
}, for calls that the host holds up by as much as hosts were seen to differ, \
{verdicts.HOST_FACTOR}×.
- ⚠ marks what was measured while other programs kept the machine busy: it decides nothing on the \
first page.
- No finding is made of kernels under {facts.LEAST_MS:.0f} ms, memory under {
    facts.LEAST_BYTES / 2**20:.0f} MiB or fewer than {facts.LEAST_CASES} cases.
- GB/s are 10⁹ bytes a second, GiB 2³⁰ bytes; a multiply-add counts as two FLOPs."""


def page(chapters: Mapping[str, Chapter], keyed: Mapping[str, tuple[str, str]]) -> str:
    """Returns the first page in Markdown.

    Args:
        chapters: those with records; keyed: by key a fact's sentence and the heading of its
            section.
    """
    first = next(iter(chapters.values()))
    parts = [
        f"# {title(first)}",
        _provenance_line(chapters),
        *_ladder_part(chapters),
        *_attention_part(chapters),
        *_fits_part(chapters),
    ]
    answers = [
        f"- {keyed[key][0]} → [{keyed[key][1]}](#{anchor(keyed[key][1])})"
        for key in KEYS
        if key in keyed
    ]
    if answers:
        parts += ["### In one line each", "\n".join(answers)]
    again = sessions.sentence(sessions.differences(_every(chapters)))
    if again:
        parts += ["### Do the numbers come back?", again]
    return "\n\n".join(parts)


def title(chapter: Chapter) -> str:
    return f"A transformer measured on {chapter.device_name}"


def lines(chapters: Mapping[str, Chapter]) -> list[str]:
    """Returns what `labkit run` ends with: at most three lines of the first page, without
    Markdown.
    """
    steps = _steps(chapters)
    shown = [size for size in LADDER_SIZES if any(_rungs(steps, size))]
    result = []
    if shown:
        rungs = zip(LADDER, _rungs(steps, shown[-1]), strict=True)
        times = [f"{name} {cell(row)}" for name, row in rungs if row]
        result.append(f"A training step of {size_name(shown[-1])}, ms: {', '.join(times)}")
    for part in attention_table(frame_of(chapters, "06_flash_attention", "rivals")).to_dict(
        "records"
    )[:1]:
        result.append(
            f"Attention, {part['shape']}, {part['pass']}: fastest is {part['fastest']}; ours "
            f"{part['ours']}"
        )
    again = sessions.sentence(sessions.differences(_every(chapters)))
    return [*result, *([again] if again else [])]


def frame_of(chapters: Mapping[str, Chapter], name: str, *sections: str) -> pd.DataFrame:
    """Returns the records of a chapter's sections, an empty frame where the chapter was not
    measured.
    """
    return chapters[name].records(*sections) if name in chapters else pd.DataFrame()


def _every(chapters: Mapping[str, Chapter]) -> dict[str, list[Record]]:
    return {name: chapter.every_record() for name, chapter in chapters.items()}


# ---- the ladder ----------------------------------------------------------------------------------


def _steps(chapters: Mapping[str, Chapter]) -> pd.DataFrame:
    rows = frame_of(chapters, "01_benchmarking", "execution")
    return select(rows, phase="graph_step", context=LADDER_CONTEXT)


def _rungs(steps: pd.DataFrame, size: str) -> list[dict[str, Any] | None]:
    """Returns a size's row of each rung, failed ones too; None where there is none."""
    found = [select(steps, size=size, **rung).to_dict("records") for rung in LADDER.values()]
    return [rows[0] if rows else None for rows in found]


def ladder_table(steps: pd.DataFrame) -> pd.DataFrame:
    """Returns the ladder: device time by size, peak memory of the largest and its share of the
    sustained roof.
    """
    rows = []
    for size in LADDER_SIZES:
        rungs = _rungs(steps, size)
        if any(rungs):
            rows.append((f"{size_name(size)}, ms", [cell(row) if row else "–" for row in rungs]))
    for size in reversed(LADDER_SIZES):
        rungs = _rungs(steps, size)
        if any(rungs):
            peaks = [
                cell(row, "peak_bytes", lambda x: number(x / 2**30)) if row else "–"
                for row in rungs
            ]
            rows.append((f"{size_name(size)}, peak GiB", peaks))
            break
    for size in reversed(LADDER_SIZES):
        value = "sustained_ceiling_fraction"
        shares = [cell(row, value, percent) if row else "–" for row in _rungs(steps, size)]
        if set(shares) != {"–"}:
            rows.append((f"{size_name(size)}, of the sustained bf16 roof", shares))
            break
    head = f"one training step, context {LADDER_CONTEXT}"
    return pd.DataFrame(
        [{head: name, **dict(zip(LADDER, texts, strict=True))} for name, texts in rows]
    )


def ladder_figure(steps: pd.DataFrame, roof_tflops: float | None) -> Figure | None:
    """Draws the ladder, a line a size; dashed what a step would take at the sustained roof of
    bf16.
    """
    figure, (axis,) = figures.panels(1, width=6.4, height=3.6)
    for size in LADDER_SIZES:
        rows = enumerate(_rungs(steps, size))
        rungs = [(place, row) for place, row in rows if row and row["status"] == "ok"]
        if not rungs:
            continue
        style = figures.STYLES[size]
        places = [place for place, _ in rungs]
        times = [row["median_ms"] for _, row in rungs]
        axis.plot(places, times, marker=style.marker, color=style.colour, label=size_name(size))
        # The two large sizes lie close together: the label of the lower goes below.
        below = size == LADDER_SIZES[1]
        look = {
            "textcoords": "offset points",
            "ha": "center",
            "va": "top" if below else "bottom",
            "size": 9,
        }
        for place, time in zip(places, times, strict=True):
            axis.annotate(number(time), (place, time), xytext=(0, -6 if below else 6), **look)
        if roof_tflops:
            at_roof = rungs[0][1]["flops"] / roof_tflops / 1e9
            axis.hlines(at_roof, 2, len(LADDER) - 1, color=style.colour, linestyle=":", linewidth=1)
    if not axis.lines:
        return None
    axis.set_xticks(
        range(len(LADDER)), [name.replace(" ", "\n", 1).replace("+\n", "+ ") for name in LADDER]
    )
    figures.log_time_axis(axis, "device time of a step (ms)")
    axis.margins(x=0.06, y=0.15)
    figures.finish(figure, [axis], "")
    return figure


def ladder(chapters: Mapping[str, Chapter]) -> Figure | None:
    """Returns the figure of the ladder, None where no step was replayed."""
    ceilings = frame_of(chapters, "01_benchmarking", "ceilings")
    roof = only(ceilings, kind="gemm", precision="bf16")
    return ladder_figure(_steps(chapters), roof.get("sustained_tflops") if roof else None)


LADDER_FILE = "ladder.svg"


def _ladder_part(chapters: Mapping[str, Chapter]) -> list[str]:
    steps = _steps(chapters)
    table = ladder_table(steps)
    if table.empty:
        return []
    fastest = facts.compare(steps, LADDER["fp32"], LADDER["+ our kernels"], size=LADDER_SIZES[-1])
    alt = "A training step from slow to fast"
    if not fastest.missing:
        ends = f"from {fastest['base']} in fp32 to {fastest['other']}"
        alt = f"A training step of {size_name(LADDER_SIZES[-1])} {ends}"
    return [
        "### One training step, from slow to fast",
        f"![{alt}]({{figures}}{LADDER_FILE})",
        tables.to_markdown(table),
        "Batch 4, one CUDA graph a step, so no host enters its time. Dotted: at the sustained "
        "bf16 roof. *bf16* is "
        "autocast over fp32 weights; *compiled* compiles each block; *pure bf16* has no fp32 "
        "weights.",
    ]


# ---- attention -----------------------------------------------------------------------------------


def attention_table(rivals: pd.DataFrame) -> pd.DataFrame:
    """Returns by shape and pass the fastest attention, ours, and the best that comes with PyTorch,
    in device time.
    """
    rows = []
    for shape in ATTENTION_SHAPES:
        for direction in ("forward", "backward"):
            found = {name: only(rivals, phase=f"{name} {direction}", **shape) for name in ATTENTION}
            found = {name: row for name, row in found.items() if row}
            if not found:
                continue
            fastest = min(found, key=lambda name: found[name]["median_ms"])
            in_pytorch = [name for name in PYTORCH if name in found]
            mask = "causal" if shape["causal"] else "no mask"
            words = f"d {shape['d_head']}, length {shape['length']:,}, {mask}"
            level = [
                ATTENTION[name]
                for name, row in found.items()
                if name == fastest
                or facts.compare_rows(found[fastest], row).verdict == verdicts.LEVEL
            ]
            line = {
                "shape": words,
                "pass": direction,
                "fastest": f"{listing(level)}, {cell(found[fastest], 'achieved_tflops')} TFLOP/s",
                "ours": _beside(found, fastest, "gluon") if "gluon" in found else "not measured",
            }
            if in_pytorch:
                best = min(in_pytorch, key=lambda name: found[name]["median_ms"])
                line["PyTorch alone"] = f"{ATTENTION[best]}, {_beside(found, fastest, best)}"
            rows.append(line)
    return pd.DataFrame(rows)


def _beside(rows: Mapping[str, Mapping[str, Any]], fastest: str, name: str) -> str:
    if name == fastest:
        return "the fastest"
    fact = facts.compare_rows(rows[fastest], rows[name])
    if fact.verdict == verdicts.LEVEL:
        return "level"
    doubt = f", undecided ({fact['interval']})" if fact.verdict == verdicts.UNDECIDED else ""
    return f"{fact['ratio']} as fast{doubt}"


def _attention_part(chapters: Mapping[str, Chapter]) -> list[str]:
    table = attention_table(frame_of(chapters, "06_flash_attention", "rivals"))
    if table.empty:
        return []
    return [
        "### Which attention?",
        tables.to_markdown(table),
        f"Device time in bf16, one shape in a burst, of {listing(ATTENTION.values(), 9)}. Chapter "
        f"06 has them "
        "at the power limit, where the order can change.",
    ]


# ---- memory --------------------------------------------------------------------------------------


def longest(frame: pd.DataFrame, **case: Any) -> str:
    """Returns the longest context that a training step was measured with, "≥" where no longer one
    failed.
    """
    rows = select(frame, **case)
    if rows.empty:
        return "not measured"
    fits = rows["context"][rows["status"] == "ok"].max()
    too_large = (rows["status"] == "oom") | rows["reason"].str.startswith("needs at least")
    lost = rows["context"][too_large].min()
    if fits != fits:
        return "does not fit" if lost == lost else "not measured"
    return f"{fits:,.0f}" if lost == lost else f"≥ {fits:,.0f}"


def fits_table(
    steps: pd.DataFrame, profiles: pd.DataFrame, recomputed: pd.DataFrame
) -> pd.DataFrame:
    """Returns the longest measured context of a training step by size and what saves memory."""
    sizes = [size for size in facts.SIZES if len(steps) and size in set(steps["size"])]
    return pd.DataFrame(
        {
            "size": size_name(size),
            "fp32": longest(steps, size=size, precision="fp32"),
            "bf16": longest(steps, size=size, precision="bf16"),
            "bf16 + our FlashAttention": longest(profiles, size=size, precision="bf16"),
            "+ every block recomputed": longest(recomputed, size=size),
        }
        for size in sizes
    )


def _fits_part(chapters: Mapping[str, Chapter]) -> list[str]:
    steps = select(
        frame_of(chapters, "01_benchmarking", "steps"), phase="train_step", compile="none"
    )
    profiles = select(
        frame_of(chapters, "02_nsys_analysis", "profiles"), phase="train_step", attention="auto"
    )
    recomputed = select(
        frame_of(chapters, "04_memory", "checkpointing"), plan="1", attention="sdpa_flash"
    )
    table = fits_table(steps, profiles, recomputed)
    if table.empty:
        return []
    return [
        "### Will it fit?",
        tables.to_markdown(table),
        "Longest measured context of a training step at batch 4 with AdamW; ≥: no longer one "
        "failed. Recomputing "
        "is with SDPA's FlashAttention.",
    ]


# ---- provenance ----------------------------------------------------------------------------------


def _provenance_line(chapters: Mapping[str, Chapter]) -> str:
    first = next(iter(chapters.values()))
    records = [record for of_chapter in _every(chapters).values() for record in of_chapter]
    gpu = first.environment.get("gpu") or {}
    parts = [f"{gpu['memory_bytes'] / 2**30:.0f} GiB"] if gpu else []
    parts += [f"{gpu['power_limit_w']:.0f} W"] if "power_limit_w" in gpu else []
    torch = sorted({record.software.get("torch", "") for record in records} - {""})
    parts += [f"torch {', '.join(torch)}"] if torch else []
    parts += [
        f"{len({record.session for record in records if record.session})} sessions",
        dates_of(records) or "–",
    ]
    line = " · ".join(parts)
    return f"{line}. [{PROVENANCE}](#{anchor(PROVENANCE)})."


def provenance(chapters: Mapping[str, Chapter]) -> str:
    """Returns the last section: machine, versions, sessions and commits, definitions, and what is
    not shown.
    """
    first = next(iter(chapters.values()))
    every = [record for of_chapter in _every(chapters).values() for record in of_chapter]
    shown = [record for chapter in chapters.values() for record in chapter.all_records()]
    lines = [
        f"- Device: {_machine(first)}.",
        f"- Software: {_versions(shown)}.",
    ]
    lines += [f"- {sentence}" for sentence in disturbed_note(to_frame(shown))]
    lines += [f"- {sentence}" for sentence in _power_note(first, shown)]
    parts = [
        f"## {PROVENANCE}",
        "\n".join(lines),
        tables.to_markdown(chapters_table(chapters)),
        DEFINITIONS,
    ]
    parts += [
        "### What this does not show",
        "\n".join(f"- {line}" for line in not_shown(shown, every)),
    ]
    return "\n\n".join(parts)


def _machine(chapter: Chapter) -> str:
    recorded = chapter.environment
    text = chapter.device_name
    gpu = recorded.get("gpu")
    if gpu:
        text += (
            f", {gpu['memory_bytes'] / 2**30:.0f} GiB, {gpu['num_multiprocessors']} multiprocessors"
        )
        if "power_limit_w" in gpu:
            text += (
                f", {gpu['power_limit_w']:.0f} W, SM clock up to {gpu['max_sm_clock_mhz']:,} MHz"
            )
    cpu = recorded.get("cpu")
    return text + (
        f"; host of the newest run {cpu['name']}, {cpu['num_cores']} cores" if cpu else ""
    )


def _versions(records: Sequence[Record]) -> str:
    packages = dict.fromkeys(package for record in records for package in record.software)
    seen = {
        package: sorted(
            {str(record.software[package]) for record in records if record.software.get(package)}
        )
        for package in packages
    }
    text = ", ".join(
        f"{package} {' and '.join(versions)}" for package, versions in seen.items() if versions
    )
    return text + "; of packages not named here no version was recorded"


def _power_note(chapter: Chapter, records: Sequence[Record]) -> list[str]:
    limit = (chapter.environment.get("gpu") or {}).get("power_limit_w")
    watts = [record.metrics["watts"] for record in records if record.metrics.get("watts")]
    above = [value for value in watts if limit and value > limit]
    if not above:
        return []
    return [
        f"{len(above)} of {len(watts)} mean powers read above the limit of {limit:.0f} W, by up to "
        f"{percent(max(above) / limit - 1)}: energies are no more exact than that."
    ]


def chapters_table(chapters: Mapping[str, Chapter]) -> pd.DataFrame:
    """Returns for each chapter its records, its sessions that entered a number, dates and
    commits.
    """
    rows = []
    for name, chapter in chapters.items():
        shown = chapter.all_records()
        every = chapter.every_record()
        counts = pd.Series([record.status for record in shown]).value_counts().sort_index()
        heading = notebooks.title(name)
        rows.append(
            {
                "chapter": f"[{heading}](#{anchor(heading)})",
                "device": chapter.device_name,
                "records": ", ".join(f"{count:,} {status}" for status, count in counts.items()),
                "sessions": len({record.session for record in every if record.session}),
                "measured": dates_of(every) or "–",
                "commit": commits_of(shown)
                + (" +changes" if any(one.source.get("dirty") for one in shown) else ""),
            }
        )
    return pd.DataFrame(rows)


def not_shown(shown: Sequence[Record], every: Sequence[Record]) -> list[str]:
    """Returns what the page cannot tell, one line each."""
    failed = [record for record in shown if record.status in ("error", "timeout")]
    once = len({record.resume_key() for record in every if record.timer})
    sessions_of = pd.Series([r.resume_key() for r in every if r.timer]).value_counts()
    again = int((sessions_of > 1).sum())
    lines = [
        "One device of its kind: two of one model differ by some percent.",
        f"{once - again:,} of {once:,} timed rows are of one session; how far they come back is "
        f"the others'.",
        "Tokens and weights are random: nothing is said of what a model learns, but for chapter "
        "03's toy task.",
    ]
    if failed:
        reasons = listing(dict.fromkeys(f"{r.section}: {r.reason[:80]}" for r in failed), 2)
        lines.append(f"{count(len(failed), 'measurement')} ended in an error ({reasons}).")
    return lines
