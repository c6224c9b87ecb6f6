"""The report's first page: what was measured on, the findings to remember, symptoms and remedies, the roofline."""

import importlib
from collections.abc import Mapping, Sequence

import pandas as pd
from matplotlib.figure import Figure

from labkit import notebooks
from labkit.records import Record
from labkit.report import figures, tables
from labkit.report.chapter import Chapter
from labkit.report.findings import anchor, listing
from labkit.report.tables import ok_rows, select

MAX_FINDINGS = 10

TIMES = """> **What a time means here.** *Device time*: the kernels alone, replayed from a CUDA graph or summed from a \
profile. *Call time*: what your program waits for, including the host that launches the kernels. They can differ several \
times over, so they are never compared with each other. Times are milliseconds, GB/s means 10⁹ bytes per second, GiB \
2³⁰ bytes; a multiply-add counts as two FLOPs."""


def page(chapters: Mapping[str, Chapter], figure: str | None) -> str:
    """Returns the first page in Markdown.

    Args:
        chapters: by notebook, those with records; figure: Markdown of the roofline figure, None without one.
    """
    first = next(iter(chapters.values()))
    parts = [
        f"# A transformer measured on {tables.escaped(first.device_name)}",
        "Every number, table, figure and comparison of a measurement below is computed from its records; figures "
        "published elsewhere stand beside them with their source.",
        tables.to_markdown(environment(chapters)),
        tables.to_markdown(table_chapters(chapters)),
    ]
    if found := findings(chapters):
        parts += ["## What to remember", "\n".join(f"{i}. {text}" for i, text in enumerate(found, start=1))]
    if rows := [row for chapter, module in _modules(chapters, "symptoms") for row in module.symptoms(chapter)]:
        parts += ["## If your step is slow", tables.to_markdown(pd.DataFrame(rows))]
    return "\n\n".join([*parts, *([figure] if figure else []), TIMES])


def findings(chapters: Mapping[str, Chapter], *, linked: bool = True) -> list[str]:
    """Returns the chapters' findings for the first page, each with a link to its section."""
    found = []
    for chapter, module in _modules(chapters, "front"):
        for text, section in module.front(chapter):
            found.append(f"{text} → [{section}](#{anchor(section)})" if linked else text)
    return found[:MAX_FINDINGS]


def environment(chapters: Mapping[str, Chapter]) -> pd.DataFrame:
    """Returns device, host, software and the conditions of the measurements, one row each."""
    first = next(iter(chapters.values()))
    recorded = first.environment
    records = [record for chapter in chapters.values() for record in chapter.all_records()]
    rows = {"device": first.device_name}
    if gpu := recorded.get("gpu"):
        rows["device"] += f", {gpu['memory_bytes'] / 2**30:.0f} GiB, {gpu['num_multiprocessors']} multiprocessors"
        if "power_limit_w" in gpu:
            rows["device"] += f", {gpu['power_limit_w']:.0f} W, SM clock up to {gpu['max_sm_clock_mhz']:,} MHz"
    if cpu := recorded.get("cpu"):
        rows["host"] = f"{cpu['name']}, {cpu['num_cores']} cores"
    rows["software"] = ", ".join(
        f"{package} {versions}"
        for package in ("torch", "triton", "cuda", "driver", "python")
        if (versions := _seen(record.software.get(package) for record in records))
    )
    sessions = {record.session for record in records if record.session}
    rows["measured"] = f"{_dates(records)}, {len(sessions)} sessions"
    rows["conditions"] = "; ".join([_throttled(records), *disturbed(records)])
    return pd.DataFrame(rows.items(), columns=["", "value"])


def table_chapters(chapters: Mapping[str, Chapter]) -> pd.DataFrame:
    """Returns for each chapter its title with a link, how many records it has, when and from which commit."""
    rows = []
    for name, chapter in chapters.items():
        records = chapter.all_records()
        title = notebooks.title(name)
        counts = pd.Series([record.status for record in records]).value_counts().sort_index()
        commits = sorted({record.source.get("commit", "")[:8] for record in records} - {""})
        rows.append(
            {
                "chapter": f"[{title}](#{anchor(title)})",
                "records": ", ".join(f"{count:,} {status}" for status, count in counts.items()),
                "measured": _dates(records),
                "commit": ", ".join(commits) + (" +changes" if any(r.source.get("dirty") for r in records) else ""),
            }
        )
    return pd.DataFrame(rows)


def disturbed(records: Sequence[Record]) -> list[str]:
    """Returns that the machine was busy during some of the measurements; nothing where it was not."""
    timed = [record for record in records if record.telemetry]
    busy = [record for record in timed if record.telemetry.get("disturbed")]
    return [f"the machine was busy during {len(busy):,} of {len(timed):,} measurements"] if busy else []


def _throttled(records: Sequence[Record]) -> str:
    reasons = [record.telemetry.get("throttle_reasons", []) for record in records if record.telemetry]
    names = sorted({reason for group in reasons for reason in group})
    if not names:
        return "no throttling seen"
    return f"{listing(names)} during {sum(map(bool, reasons)):,} of {len(reasons):,} timed records"


def _dates(records: Sequence[Record]) -> str:
    dates = sorted(record.recorded_at[:10] for record in records if record.recorded_at)
    return " to ".join(dict.fromkeys([dates[0], dates[-1]])) if dates else "–"


def _seen(values) -> str:
    return ", ".join(sorted({str(value) for value in values if value}))


def _modules(chapters: Mapping[str, Chapter], function: str):
    """Gives each chapter with its report module, where the module has the function."""
    for name, chapter in chapters.items():
        module = importlib.import_module(f"labkit.report.{name.split('_', 1)[1]}")
        if hasattr(module, function):
            yield chapter, module


ROOFLINE_IMPLS = ("eager", "sdpa_efficient", "sdpa_cudnn", "fa3", "gluon", "triton")


def figure_roofline(attention: pd.DataFrame, ceilings: pd.DataFrame) -> Figure | None:
    """Achieved FLOP rate over arithmetic intensity: attention's forward by implementation and length under the roofs.

    Args:
        attention: records of 06's "speed" section, device times; ceilings: of its "ceilings" section.

    The intensity counts the bytes that must move: q, k, v and the output, once each. Eager attention moves many more.
    """
    rows = ok_rows(attention, precision="bf16", d_head=64) if len(attention) else attention
    roofs = ok_rows(ceilings)
    if rows.empty or roofs.empty:
        return None
    rows = rows[rows["phase"].str.endswith(" forward")]
    rows = rows.assign(impl=rows["phase"].str.removesuffix(" forward"))
    figure, (axis,) = figures.panels(1, width=8.0, height=3.6)
    for impl in ROOFLINE_IMPLS:
        of_impl = select(rows, impl=impl).sort_values("length")
        if of_impl.empty:
            continue
        moved = 4 * of_impl["batch"] * of_impl["heads"] * of_impl["length"] * of_impl["d_head"] * 2
        style = figures.STYLES[impl]
        axis.plot(of_impl["flops"] / moved, of_impl["achieved_tflops"], color=style.colour, marker=style.marker,
                  linestyle=style.dash, markersize=4, label=impl)  # fmt: skip
    copies = select(roofs, kind="copy")["achieved_gb_per_s"]
    low, high = axis.get_xlim()
    low = max(low, 1)
    axis.set_xscale("log", base=2)
    for row in select(roofs, kind="gemm").to_dict("records"):
        peak = row["achieved_tflops"]
        axis.axhline(peak, color="0.3", linewidth=0.8, linestyle=":")
        axis.annotate(f"matrix product, {row['precision']}", (high, peak), fontsize=7.5, ha="right", va="bottom")
    if len(copies):
        ridge = [low, high]
        axis.plot(ridge, [copies.iloc[-1] * x / 1e3 for x in ridge], color="0.3", linestyle="--", label="copy rate")
    figures.log_time_axis(axis, "achieved rate (TFLOP/s)")
    axis.set_ylim(rows["achieved_tflops"].min() / 2, 2 * select(roofs, kind="gemm")["achieved_tflops"].max())
    axis.set_xlabel("arithmetic intensity (FLOPs per byte that must move)")
    title = f"Attention forward, causal, bf16, head dimension 64, lengths {rows['length'].min():,} to {rows['length'].max():,}"
    figures.finish(figure, [axis], f"{title}, device time, {attention.attrs['device']}")
    return figure


def roofline(chapters: Mapping[str, Chapter]) -> Figure | None:
    """Returns the roofline from the chapter on FlashAttention, None without its records."""
    chapter = chapters.get("06_flash_attention")
    return figure_roofline(chapter.records("speed"), chapter.records("ceilings")) if chapter else None
