"""report.md: a first page, a chapter for each executed notebook without code and lessons, then how
it was made.
"""

import functools
import os
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pandas as pd

from labkit import notebooks
from labkit.configs import FIGURES, IS_CLONE, REFERENCE_DEVICE, REPOSITORY, RequestError
from labkit.records import (
    check,
    measured_devices,
    read_done,
    read_environment,
    single,
    write_bytes_atomic,
    write_text_atomic,
)
from labkit.report import card, compare, figures, page, smoke
from labkit.report.chapter import (
    FACT,
    FIGURE,
    Chapter,
    Chapters,
    chapters_of,
    dates_of,
    versions_of,
)
from labkit.report.text import gib, listing

MOST_AT_ONCE = 4
"""Notebooks whose lessons are executed at a time, on as many cores; each needs about 300 MB."""


def rebuild(
    device: str,
    *,
    output: Path | None,
    html: bool = False,
    save_notebooks: bool = False,
    by_papermill: bool = False,
    own: Mapping[str, Mapping[str, str]] = {},
) -> list[Path]:
    """Rebuilds the report of `device` from its records; returns the files written.

    A notebook without records is not executed: its chapter says that it was not measured; a page of
    several GPUs leaves it out. A CPU's report is one page.

    Args:
        device: slug, a folder of DIR; its report.md and figures are written there.
        output: DIR; None for the repository's figures/.
        html: also write DIR/<device>/report.html, one page that needs no other file.
        save_notebooks: also store the outputs in the notebooks themselves (the reference device's
            only).
        by_papermill: execute the notebooks in kernels of their own, several at a time, as `labkit
            run` does; otherwise in this process.
        own: parameters of one notebook alone, by notebook, as for a function of the user's.

    Raises:
        RequestError: nothing has been measured on `device`, or `save_notebooks` is not for the
            notebooks' device.
        RecordError: a record file cannot be read.
        NotebookError: a notebook failed.
    """
    root = output or FIGURES
    folder = root / device
    chapters = chapters_of(device, output)
    if save_notebooks and device != REFERENCE_DEVICE:
        raise RequestError(
            f"the notebooks show {REFERENCE_DEVICE!r}; their outputs cannot be of {device!r}"
        )
    warnings = _unfinished(chapters)  # before minutes of notebooks, as it may be damaged
    values = {"device": device, "output": str(output or ""), "save_figures": True}
    if by_papermill:
        executed = _execute_all({name: values | own.get(name, {}) for name in chapters})
    else:
        executed = {name: notebooks.show(name, values) for name in chapters}
    if save_notebooks:
        whole = _execute_all({name: {} for name in notebooks.names()}, lessons=True)
        for name, notebook in whole.items():
            _save_outputs(name, notebook, notebooks.path(name))
    text = _report(chapters, executed, folder, warnings)
    # Paths are those of a notebook until it is known where the text is written.
    device_page = text.replace(f"../figures/{device}/", "").replace("../figures/", "../")
    # The executed notebooks of the reference device are a clone's, in notebooks/.
    is_committed = IS_CLONE and device == REFERENCE_DEVICE
    for name, chapter in chapters.items():
        place = "../../notebooks"
        if not is_committed:
            place = os.path.relpath(chapter.folder, folder)
            _save_outputs(name, executed[name], chapter.folder / f"{name}.ipynb")
        device_page = device_page.replace(f"../notebooks/{name}.ipynb", f"{place}/{name}.ipynb")
    folder.mkdir(exist_ok=True)  # where all chapters are of several GPUs, it is new
    written = [write_text_atomic(folder / "report.md", device_page)]
    if output is None and is_committed:
        text = text.replace("../figures/", "figures/").replace("../notebooks/", "notebooks/")
        written.append(write_text_atomic(REPOSITORY / "report.md", text))
    if html:
        text = page.html(device_page, folder, card.title(card.first_of(chapters)))
        written.append(write_text_atomic(folder / "report.html", text))
    return written


def _report(
    chapters: Chapters, executed: Mapping[str, Any], folder: Path, warnings: list[str]
) -> str:
    ladder = card.ladder(chapters)
    if ladder:
        write_bytes_atomic(folder / card.LADDER_FILE, figures.svg(ladder))
    bodies = []
    if card.first_of(chapters).device_kind == "cpu":
        first = smoke.page(chapters)
    else:
        keyed = {}
        # What one of several GPUs runs stands in its own report.
        is_one = single(folder.name) == folder.name
        for name in notebooks.names() if is_one else chapters:
            text = f"*Not measured; `labkit run {name.split('_')[0]}` measures it.*"
            body = f"## {notebooks.title(name)}\n\n{text}"
            if name in chapters:
                body, named = _chapter_markdown(executed[name], chapters[name])
                keyed |= named
            bodies.append(body)
        first = card.page(chapters, keyed)
    last = [compare.others(chapters, folder.parent), card.provenance(chapters)]
    parts = filter(None, [first, *warnings, *bodies, *last])
    return "\n\n".join(parts) + "\n"


def devices_summary(root: Path) -> pd.DataFrame:
    """Returns README's table of devices: one row a folder of `root`, linked from here."""
    rows = []
    for device in measured_devices(root):
        folder = root / device
        chapters = check(folder)
        records = [record for newest in chapters.values() for record in newest]
        environment = read_environment(folder)
        page = "report.md" if (folder / "report.md").exists() else ""
        name = environment.get("device", {}).get("name", device)
        rows.append(
            {
                "device": f"[{name}]({os.path.relpath(folder)}/{page})",
                "memory, GiB": gib(environment.get("gpu", {}).get("memory_bytes")),
                "chapters": listing(notebook[:2] for notebook in chapters),
                "measurements": f"{sum(record.status == 'ok' for record in records):,}",
                "measured": dates_of(records) or "–",
                "software": versions_of("torch", records) or "–",
            }
        )
    return pd.DataFrame(rows)


def _execute_all(values: Mapping[str, Mapping], lessons: bool = False) -> dict[str, Any]:
    """Executes notebooks in kernels, several at a time, each with its values; raises NotebookError
    for the first that failed.
    """
    execute = functools.partial(notebooks.execute, lessons=lessons)
    with ThreadPoolExecutor(min(MOST_AT_ONCE, os.cpu_count() or 1)) as pool:
        # Where one raises, `map` cancels those that have not begun.
        return dict(zip(values, pool.map(execute, values, values.values()), strict=True))


def _unfinished(chapters: Chapters) -> list[str]:
    """Returns warnings of chapters that hold the quick profile alone, or whose measurements were
    interrupted or do not cover the grid.
    """
    warnings = []
    quick = []
    missing = []
    for name, chapter in chapters.items():
        done = read_done(chapter.folder, name)
        if "num_missing" not in done:
            warnings.append(
                f"**Chapter {name[:2]} did not run to its end and shows what was recorded before "
                "it stopped.**"
            )
            continue
        if done.get("profile") == "quick":
            quick.append(name[:2])
        if done["num_missing"]:
            missing.append(f"{done['num_missing']:,} of chapter {name[:2]}")
    if missing:
        warnings.append(f"**Measurements of the grid not recorded: {listing(missing)}.**")
    if quick:
        numbers = "all chapters" if len(quick) == len(chapters) else f"chapters {listing(quick)}"
        text = f"A first report: of {numbers} the quick profile is measured, a small part of the"
        warnings.insert(0, f"*{text} grid. `labkit run` measures the rest.*")
    return warnings


def _chapter_markdown(notebook, chapter: Chapter) -> tuple[str, dict[str, tuple[str, str]]]:
    """Returns a notebook without lessons as a chapter: its text, and what its cells show but for
    set-up; and by key the sentence and the heading of the facts that it names for the first page.

    A section without a number explains none: its reasons are left out. Of the quick profile it says
    once how many findings are missing.
    """
    is_quick = read_done(chapter.folder, chapter.notebook).get("profile") == "quick"
    num_missing = 0
    hidden = {"remove_cell", "parameters", "injected-parameters"}
    parts = []
    keyed = {}
    heading = ""
    figure = None
    has_number = True
    for cell in notebook.cells:
        if hidden & set(cell.metadata.get("tags", [])):
            continue
        if cell.cell_type == "markdown":
            if cell.source.startswith("## "):
                heading = cell.source.splitlines()[0].removeprefix("## ")
                figure = None
                has_number = False
            elif cell.source.startswith("**") and not has_number:
                continue
            # A notebook's title is a chapter's heading here.
            parts.append(re.sub(r"^(#+ )", r"#\1", cell.source, flags=re.MULTILINE))
        for output in cell.get("outputs", []):
            text = output.get("data", {}).get("text/markdown", "")
            metadata = output.get("metadata", {})
            fact = metadata.get("text/markdown", {}).get(FACT)
            if FIGURE in metadata:
                figure = len(parts)
                caption = metadata[FIGURE]["caption"]
                image = f"../figures/{chapter.device}/{metadata[FIGURE]['file']}"
                text = f"![{caption}]({image})\n\n*{caption}*"
            elif fact:
                sentence = text.removeprefix("- ")
                is_told = not sentence.startswith("*")
                if figure is not None and is_told:
                    # The section's first fact is what the figure shows: its alternative text.
                    alternative = re.sub(r"[\[\]*`]", "", sentence)
                    parts[figure] = f"![{alternative}]" + parts[figure].split("]", 1)[1]
                figure = None
                if is_quick and not is_told:
                    num_missing += 1
                    continue
                # What is marked, or was not measured, is nothing for the first page.
                if is_told and fact["key"] and not fact["marked"]:
                    keyed[fact["key"]] = (sentence, heading)
            # What is not measured is one line in italics; a table begins with such a caption.
            has_number |= not re.fullmatch(r"|(- )?\*.*\*", text)
            if fact and parts[-1].startswith("- "):
                if text not in parts[-1].splitlines():  # two sentences may lack one row
                    parts[-1] += f"\n{text}"
            elif text:
                parts.append(text)
    if num_missing:
        parts.append(
            f"*{num_missing} findings of this chapter lack measurements, which the quick profile "
            "leaves out or this machine cannot take.*"
        )
    return "\n\n".join(part.strip() for part in parts), keyed


def _save_outputs(name: str, executed, target: Path) -> None:
    """Writes the notebook with the outputs of `executed` and no other trace of the run."""
    import nbformat

    done = {cell["id"]: cell for cell in executed.cells}
    notebook = notebooks.read(name)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for number, cell in enumerate(code, start=1):
        outputs = done.get(cell["id"], {}).get("outputs", [])
        # What is printed is a result of lessons alone.
        is_lesson = notebooks.LESSON in cell.metadata.get("tags", [])
        cell["outputs"] = [one for one in outputs if is_lesson or one.output_type != "stream"]
        cell["execution_count"] = number if cell["id"] in done else None
        for output in cell["outputs"]:
            if "execution_count" in output:
                output["execution_count"] = cell["execution_count"]
    write_text_atomic(target, nbformat.writes(notebook) + "\n")
