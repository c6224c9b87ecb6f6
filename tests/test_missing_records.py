"""Every chapter is shown from whatever records there are: what is missing or failed is said, and
nothing raises.
"""

import functools
import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
from conftest import ALL_TESTS, more

from labkit import notebooks
from labkit.configs import FIGURES, REFERENCE_DEVICE
from labkit.records import RecordStore, folder_of
from labkit.report import card, figures
from labkit.report.chapter import Chapter, Drawn

FAILED = {
    "status": "error",
    "reason": "it broke",
    "metrics": {},
    "samples": {},
    "timer": {},
    "observed": {},
}


@pytest.fixture(params=notebooks.names())
def show(request, tmp_path, monkeypatch) -> Callable[[list[dict]], tuple[Chapter, list[str]]]:
    """Runs a notebook's cells on the records it is given.

    Returns a function that takes records and returns the chapter and what each table, figure and
    fact made of them says; "" for a figure that is drawn. The function's `records` are the
    reference device's.
    """
    name = request.param
    source = folder_of(FIGURES, REFERENCE_DEVICE, name)
    folder = tmp_path / source.name
    (folder / "records").mkdir(parents=True)
    shutil.copy(source / "environment.json", folder)
    cells = [
        cell
        for cell in notebooks.without_lessons(notebooks.read(name)).cells
        if cell.cell_type == "code"
    ]
    said: list[str] = []
    for method in ("table", "figure", "say"):
        monkeypatch.setattr(Chapter, method, _told(getattr(Chapter, method), said))

    def run(records: list[dict]) -> tuple[Chapter, list[str]]:
        said.clear()
        path = folder / "records" / f"{name}.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
        variables: dict = {}
        for cell in cells:
            exec(cell.source, variables)
            if "parameters" in cell.metadata.get("tags", []):
                variables["output"] = str(tmp_path)
        return Chapter(name, device=REFERENCE_DEVICE, output=str(tmp_path)), list(said)

    run.records = _records(source / "records" / f"{name}.jsonl")
    return run


@functools.cache
def _records(path: Path) -> list[dict]:
    return [asdict(record) for record in RecordStore(path).load()]


@pytest.fixture
def not_drawn(monkeypatch) -> None:
    """Figures are built, and by default not drawn: the test of half the records draws all that
    there is.
    """
    if not ALL_TESTS:
        monkeypatch.setattr(figures, "png", lambda figure: b"")


def _told(method: Callable, said: list[str]) -> Callable:
    def told(*arguments, **options):
        shown = method(*arguments, **options)
        said.append("" if isinstance(shown, Drawn) else shown.data)
        return shown

    return told


NOTHING = ("not measured", "all ", "not possible", "too small")
"""How a form begins that has nothing to show."""


def says_nothing(text: str) -> bool:
    return any(words in text.lower() for words in NOTHING)


def page(chapter: Chapter) -> str:
    chapters = {chapter.notebook: chapter}
    return card.page(chapters, {}) + card.provenance(chapters)


def test_where_every_record_failed_each_table_figure_and_fact_says_so(show):
    chapter, said = show([record | FAILED for record in show.records])
    assert f"| {len(chapter.all_records()):,} error |" in page(chapter)
    assert said and all(says_nothing(text) for text in said), said
    assert "tables/" in chapter.more().data  # the CSV files hold the failures


def test_without_records_each_table_figure_and_fact_says_so(show):
    chapter, said = show([])
    assert f"labkit run {chapter.number}" in chapter.source().data
    assert all(says_nothing(text) for text in [*said, chapter.more().data]), said


def test_where_half_the_records_failed_the_rest_is_shown_and_the_failures_are_counted(show):
    records = [
        record | FAILED if number % 2 else record for number, record in enumerate(show.records)
    ]
    chapter, said = show(records)
    failed = sum(record.status == "error" for record in chapter.all_records())
    assert f"{failed:,} error" in page(chapter)
    assert any(not says_nothing(text) for text in said)


@pytest.mark.slow
@pytest.mark.usefixtures("not_drawn")
def test_a_chapter_is_shown_from_whatever_an_interrupted_run_left(show):
    """Every other section, or the first records of all: the rest is not measured."""
    sections = list(dict.fromkeys(record["section"] for record in show.records))
    by_section = sorted(show.records, key=lambda record: sections.index(record["section"]))
    some = [sections[::2], sections[1::2], *more(*([section] for section in sections))]
    left = [[record for record in by_section if record["section"] in wanted] for wanted in some]
    for records in (*left, by_section[:1], by_section[:34]):
        chapter, _ = show(records)
        page(chapter)
