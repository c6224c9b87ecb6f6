"""A CPU's report: one page of what ran and what is exact. Small models teach nothing more."""

from labkit.report import benchmarking, card, tables
from labkit.report.chapter import Chapters
from labkit.report.frame import ok_rows, pivot, select, usable

EXACT = [
    (
        "rounded sums stall where predicted",
        "03_mixed_precision",
        "accumulation",
        "stall_measured == stall_predicted",
    ),
    (
        "outputs of attention within 1e-2 of fp64",
        "05_attention",
        "attention",
        "output_relative_error <= 1e-2",
    ),
    (
        "attention kernels within their error budget",
        "06_flash_attention",
        "rivals",
        "budget_fraction <= 1",
    ),
    ("fused kernels within their error budget", "08_siglip2", "kernels", "budget_fraction <= 1"),
    ("collectives without a wrong element", "07_distributed", "collectives", "num_wrong == 0"),
]
"""What is exact, in words; the chapter and section that say so, and what then holds of a row, as
`DataFrame.query` takes it: a metric first.
"""


def page(chapters: Chapters) -> str:
    """Returns the page in Markdown, but for how the numbers were made."""
    roofs = benchmarking.roofs_table(
        ok_rows(card.frame_of(chapters, "01_benchmarking", "ceilings"))
    )
    steps = ok_rows(card.frame_of(chapters, "01_benchmarking", "steps"), phase="train_step")
    sections = {"What is exact": "\n".join(exact_lines(chapters))}
    if len(roofs):
        sections["Roofs"] = tables.to_markdown(roofs[["roof", "burst", "sustained"]])
    if len(steps):
        context = steps["context"].max()
        table = tables.to_markdown(pivot(select(steps, context=context), "size", "precision"))
        text = f"Call time in ms at context {context} and batch {steps['batch'].max()}."
        sections["A training step"] = f"{table}\n\n{text}"
    parts = [
        f"# {card.title(card.first_of(chapters))}",
        "A CPU runs the whole laboratory on models of a few million parameters. This page says "
        "what is exact and, at its end, what ran; it draws no conclusion on speed or memory from "
        "models that small.",
    ]
    parts += [f"## {heading}\n\n{text}" for heading, text in sections.items() if text]
    return "\n\n".join(parts)


def exact_lines(chapters: Chapters) -> list[str]:
    """Returns "- 17 of 17 outputs of attention within 1e-2 of fp64." and the like."""
    lines = []
    for words, name, section, condition in EXACT:
        rows = usable(card.frame_of(chapters, name, section), condition.split()[0])
        if len(rows):
            lines.append(f"- {len(rows.query(condition))} of {len(rows)} {words}.")
    return lines
