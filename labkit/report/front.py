"""The report's first page: what was measured on, the findings to remember, symptoms and remedies, the roofline."""

import importlib
from collections.abc import Mapping, Sequence

import pandas as pd
from matplotlib.figure import Figure

from labkit import notebooks
from labkit.records import Record, to_frame
from labkit.report import figures, tables
from labkit.report.chapter import Chapter, commits_of, dates_of, kinds_of_time
from labkit.report.findings import anchor, disturbed_note, listing
from labkit.report.tables import ok_rows, select

MAX_FINDINGS = 10

TIMES = """> **What a time means here.** *Device time*: the kernels alone, replayed from a CUDA graph or summed from a \
profile. *Call time*: what your program waits for, including the host that launches the kernels; where that sets it, \
the session with the fastest host is shown. *Sustained*: a second of the same back to back (on a CPU a tenth), after \
as long of it, at the clocks that the power limit leaves; ~ marks one that still changed by more than 2 %. They can \
differ by several times, so they are never compared with each other. Times are milliseconds, GB/s means 10⁹ bytes per \
second, GiB 2³⁰ bytes; a multiply-add counts as two FLOPs.
>
> **What a comparison means.** A ratio beside *ahead* or *behind* is the other's time over that of the one named \
first: above 1 the first is faster. It is *ahead* or *behind* where the whole interval of the ratio, over samples and \
sessions, lies above or below 1, *level* where it lies within 3 % of 1, else *undecided*. Calls depend on the host and \
are compared within a session where one has both. Bytes and counts are compared exactly."""


def page(chapters: Mapping[str, Chapter], figure: str | None) -> str:
    """Returns the first page in Markdown: of the notebooks with records, and the Markdown of the roofline figure."""
    first = next(iter(chapters.values()))
    parts = [
        f"# {tables.plain(title(first))}",
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
    return "\n\n".join([*parts, *([figure] if figure else []), TIMES])


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
        rows["host"] = f"{cpu['name']}, {cpu['num_cores']} cores"
    versions = {
        package: sorted({str(record.software[package]) for record in records if record.software.get(package)})
        for package in ("torch", "triton", "cuda", "driver", "python")
    }
    rows["software"] = ", ".join(f"{package} {', '.join(seen)}" for package, seen in versions.items() if seen)
    rows["measured"] = f"{dates_of(records) or '–'}, {len({r.session for r in records if r.session})} sessions"
    rows["conditions"] = _throttled(records)
    return pd.DataFrame([(name, tables.plain(value)) for name, value in rows.items()], columns=["", "value"])


def table_chapters(chapters: Mapping[str, Chapter]) -> pd.DataFrame:
    """Returns for each chapter its title with a link, how many records it has, when and from which commit."""
    rows, device = [], next(iter(chapters.values())).device
    for name, chapter in chapters.items():
        records = chapter.all_records()
        title = notebooks.title(name)
        counts = pd.Series([record.status for record in records]).value_counts().sort_index()
        rows.append(
            {
                "chapter": f"[{title}](#{anchor(title)})"
                + (f", {chapter.device_name}" if chapter.device != device else ""),
                "records": ", ".join(f"{count:,} {status}" for status, count in counts.items()),
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


ROOFLINE = ("eager", "compiled", "sdpa_efficient", "sdpa_cudnn", "flex", "fa3", "triton", "gluon")


def roofline(chapters: Mapping[str, Chapter]) -> Figure | None:
    """Returns chapter 06's forward kernels, achieved FLOP rate over arithmetic intensity, under the measured roofs.

    The intensity counts the bytes that must move: each input and output once. None without attention's records.
    """
    if not (chapter := chapters.get("06_flash_attention")):
        return None
    kernels = chapter.records("rivals", "weighted_sum")
    roofs = ok_rows(chapter.records("ceilings"), precision=["bf16", "fp32"])
    points = []
    for row in ok_rows(kernels).to_dict("records"):
        impl, _, phase = row["phase"].rpartition(" ")
        if phase != "forward" or impl not in ROOFLINE:
            continue
        if row["section"] == "weighted_sum":
            name, flops, moved = "weighted sum", 2 * row["rows"] * row["dim"], row["num_bytes"]
        else:
            name, flops = "attention", row["flops"]
            moved = 4 * row["batch"] * row["heads"] * row["length"] * row["d_head"] * 2  # q, k, v, out in bf16
        points.append((name, impl, flops / moved, flops / row["median_ms"] / 1e9))
    if roofs.empty or "attention" not in {name for name, *_ in points}:
        return None
    called = importlib.import_module("labkit.report.flash_attention").NAMES
    figure, (axis,) = figures.panels(1, width=8.0, height=3.8)
    names, _, intensities, rates = zip(*points, strict=True)
    for _, impl, intensity, rate in points:
        style = figures.STYLES[impl]
        look = {"color": style.colour, "marker": style.marker, "markersize": 6, "linestyle": ""}
        axis.plot([intensity], [rate], label=called.get(impl, impl), **look)
    low, high = min(intensities) / 2, max(intensities) * 2
    figures.log_scale(axis, "x", base=2)
    figures.log_time_axis(axis, "achieved rate (TFLOP/s)")
    copy = select(roofs, kind="copy")["achieved_gb_per_s"].max() / 1e3
    products = select(roofs, kind="gemm")
    for precision, peak in zip(products["precision"], products["achieved_tflops"], strict=True):
        axis.plot([peak / copy, high], [peak, peak], color="0.3", linewidth=1, linestyle="--")
        axis.annotate(f"matrix product, {precision}", (low * 1.1, peak), fontsize=8, va="bottom")
        if precision == "bf16":
            axis.plot([low, peak / copy], [copy * low, peak], color="0.3", linewidth=1, linestyle="--")
            axis.annotate("copy rate", (low * 1.5, copy * low * 3), fontsize=8, rotation=28)
    for name in dict.fromkeys(names):
        first = min(point[2:] for point in points if point[0] == name)
        axis.annotate(name, first, xytext=(10, -4), textcoords="offset points", fontsize=8, style="italic")
    axis.set(xlim=(low, high), ylim=(min(rates) / 2, 1.6 * products["achieved_tflops"].max()))
    axis.set_xlabel("arithmetic intensity (FLOPs per byte that must move)")
    title = f"Forward kernels under the roofs, {kinds_of_time([kernels])}, {kernels.attrs['device']}"
    figures.finish(figure, [axis], title, num_columns=4)
    return figure
