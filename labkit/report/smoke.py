"""A CPU's report: one page of what ran, what is exact, and what the machine lacks. Small models
teach nothing more.
"""

from collections import Counter
from collections.abc import Mapping

import pandas as pd

from labkit import notebooks
from labkit.report import card, facts, tables
from labkit.report.chapter import Chapter
from labkit.report.frame import (
    PHASE_NAMES,
    cell,
    in_order,
    ok_rows,
    pivot,
    select,
    size_name,
    usable,
)

EXACT = (
    (
        "03_mixed_precision",
        "accumulation",
        "rounded sums that stall where predicted",
        "stall_measured",
    ),
    (
        "05_attention",
        "attention",
        "outputs of attention within 1e-2 of fp64",
        "output_relative_error",
    ),
    (
        "06_flash_attention",
        "algorithm",
        "FlashAttention's outputs within their error budget",
        "out_budget_fraction",
    ),
    (
        "06_flash_attention",
        "rivals",
        "attention kernels within their error budget",
        "budget_fraction",
    ),
    ("08_siglip2", "kernels", "fused kernels within their error budget", "budget_fraction"),
    ("07_distributed", "collectives", "collectives without a wrong element", "num_wrong"),
)
"""Chapter, section, what is exact in words, and the metric that says so."""

MOST_LACKS = 6


def page(chapters: Mapping[str, Chapter]) -> str:
    """Returns the page in Markdown, but for how the numbers were made."""
    first = next(iter(chapters.values()))
    parts = [
        f"# {card.title(first)}",
        "A CPU runs the whole laboratory on models of a few million parameters. This page says "
        "what ran and what is "
        "exact; it draws no conclusion on speed or memory from models that small.",
        "## What ran",
        tables.to_markdown(ran(chapters)),
    ]
    exact = [line for line in (_exact(chapters, *row) for row in EXACT) if line]
    if exact:
        parts += ["## What is exact", "\n".join(exact)]
    roofs = card.frame_of(chapters, "01_benchmarking", "ceilings")
    if len(ok_rows(roofs)):
        parts += ["## Roofs", tables.to_markdown(roof_table(roofs))]
    steps = select(card.frame_of(chapters, "01_benchmarking", "steps"), phase="train_step")
    if len(ok_rows(steps)):
        parts += [
            "## A training step",
            tables.to_markdown(step_table(steps)),
            "Call time in ms, batch as recorded.",
        ]
    lacks = missing(chapters)
    if lacks:
        parts += ["## What this machine lacks", "\n".join(f"- {line}" for line in lacks)]
    return "\n\n".join(parts)


def ran(chapters: Mapping[str, Chapter]) -> pd.DataFrame:
    """Returns how many measurements of each chapter ended how."""
    rows = []
    for name, chapter in chapters.items():
        counts = Counter(record.status for record in chapter.all_records())
        line = {
            "chapter": notebooks.title(name),
            "measured": counts["ok"],
            "not possible here": counts["skipped"],
        }
        rows.append(line | {"failed": sum(counts.values()) - counts["ok"] - counts["skipped"]})
    return pd.DataFrame(rows)


def _exact(
    chapters: Mapping[str, Chapter], name: str, section: str, words: str, metric: str
) -> str:
    rows = usable(card.frame_of(chapters, name, section), metric)
    if metric == "stall_measured":
        found = facts.share_of(rows, lambda row: row[metric] == row["stall_predicted"], words)
    else:
        most = {"num_wrong": 0, "output_relative_error": 1e-2}.get(metric, 1)
        found = facts.share_of(rows, lambda row: row[metric] <= most, words)
    return "" if found.missing else f"- {found['count']} of {found['total']} {words}."


def roof_table(ceilings: pd.DataFrame) -> pd.DataFrame:
    """Returns the measured rates of a matrix product and of a copy."""
    rows = []
    for row in ok_rows(ceilings).to_dict("records"):
        is_copy = row["kind"] == "copy"
        name = (
            "copy, read + write (GB/s)"
            if is_copy
            else f"matrix product, {row['precision']} (TFLOP/s)"
        )
        rows.append(
            {
                "roof": name,
                "measured": cell(row, "achieved_gb_per_s" if is_copy else "achieved_tflops"),
            }
        )
    return pd.DataFrame(rows)


def step_table(steps: pd.DataFrame) -> pd.DataFrame:
    """Returns the call time of a training step at the longest context of each size, by
    precision.
    """
    longest = steps.groupby("size")["context"].transform("max")
    shown = in_order(steps[steps["context"] == longest], ["size"])
    table = pivot(shown, ["size", "context"], "precision")
    return table.assign(size=table["size"].map(size_name)).rename(columns=PHASE_NAMES)


def missing(chapters: Mapping[str, Chapter]) -> list[str]:
    """Returns why measurements were skipped, the most frequent reason first."""
    reasons: Counter[str] = Counter()
    for chapter in chapters.values():
        reasons.update(
            record.reason for record in chapter.all_records() if record.status == "skipped"
        )
    shown = reasons.most_common(MOST_LACKS)
    lines = [f"{reason[:120]} ({count} measurements)" for reason, count in shown]
    rest = sum(reasons.values()) - sum(count for _, count in shown)
    return lines + ([f"other reasons ({rest} measurements)"] if rest else [])
