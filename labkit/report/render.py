"""report.md: a first page, a chapter for each executed notebook without code and lessons, then how
it was made.
"""

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pandas as pd

from labkit import notebooks
from labkit.configs import FIGURES, REFERENCE_DEVICE, REPOSITORY, RequestError
from labkit.records import (
    check,
    check_measured,
    folder_of,
    measured_devices,
    newest_of,
    read_done,
    write_bytes_atomic,
    write_text_atomic,
)
from labkit.report import card, figures, page, smoke
from labkit.report.chapter import FACT, FIGURE, Chapter

MOST_AT_ONCE = 4
"""Notebooks whose lessons are executed at a time, on as many cores; each needs about 300 MB."""


def rebuild(
    device: str,
    *,
    output: Path | None = None,
    top_level: bool = True,
    html: bool = False,
    save_notebooks: bool = False,
    measured: Mapping[str, Any] | None = None,
) -> list[Path]:
    """Rebuilds the report of `device` from its records; returns the files written.

    A notebook without records is not executed: its chapter says that it was not measured. A CPU's
    report is one page.

    Args:
        device: slug, a folder of DIR; its report.md and figures are written there.
        output: DIR; None for the repository's figures/.
        top_level: without `output`, write the top-level report.md too.
        html: also write DIR/<device>/report.html, one page that needs no other file.
        save_notebooks: also store the outputs in the notebooks themselves (the reference device's
            only).
        measured: notebooks by name that were just executed with `save_figures` to measure, and need
            no second run.

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
    executed = dict(measured or {})
    values = {"device": device, "output": str(output or ""), "save_figures": True}
    executed |= {name: notebooks.show(name, values) for name in chapters if name not in executed}
    for cell in (
        cell for notebook in executed.values() for cell in notebook.cells if "outputs" in cell
    ):
        # What is printed while measuring is no result.
        cell["outputs"] = [
            output for output in cell["outputs"] if output["output_type"] != "stream"
        ]
    if save_notebooks:
        for name, shown in _execute_all(notebooks.names()).items():
            _save_outputs(name, shown, notebooks.path(name))
    text = _report(chapters, executed, folder)

    device_text = text.replace(f"{_FIGURES_FOLDER}{device}/", "").replace(_FIGURES_FOLDER, "../")
    device_text = device_text.replace("../notebooks/", "../../notebooks/")
    written = [write_text_atomic(folder / "report.md", device_text)]
    # The reference device's executed notebooks are those in notebooks/.
    if device != REFERENCE_DEVICE:
        for name, notebook in executed.items():
            _save_outputs(name, notebook, folder_of(root, device, name) / f"{name}.ipynb")
    if output is None and top_level:
        text = text.replace(_FIGURES_FOLDER, f"{root.relative_to(REPOSITORY).as_posix()}/")
        written.append(
            write_text_atomic(REPOSITORY / "report.md", text.replace("../notebooks/", "notebooks/"))
        )
    if html:
        title = card.title(next(iter(chapters.values())))
        written.append(
            write_text_atomic(folder / "report.html", page.html(device_text, folder, title))
        )
    return written


def chapters_of(device: str, output: Path | None = None) -> dict[str, Chapter]:
    """Returns the chapters of a device that have records; raises RequestError where none has."""
    root = output or FIGURES
    check_measured(device, root)
    recorded = newest_of({name: folder_of(root, device, name) for name in notebooks.names()})
    if not any(recorded.values()):
        raise RequestError(f"{root / device} holds no record")
    return {
        name: Chapter(name, device=device, output=str(output or ""))
        for name, records in recorded.items()
        if records
    }


def _report(chapters: Mapping[str, Chapter], executed: Mapping[str, Any], folder: Path) -> str:
    first = next(iter(chapters.values()))
    warnings = [_not_finished(chapter.folder, name) for name, chapter in chapters.items()]
    ladder = card.ladder(chapters)
    if ladder is not None:
        write_bytes_atomic(folder / card.LADDER_FILE, figures.svg(ladder))
    here = f"{_FIGURES_FOLDER}{folder.name}/"
    if first.device_kind == "cpu":
        parts = [smoke.page(chapters), *filter(None, warnings), card.provenance(chapters)]
        return "\n\n".join(parts).replace("{figures}", here) + "\n"
    bodies = []
    for name in notebooks.names():
        if name in chapters:
            bodies.append(_chapter_markdown(executed[name], chapters[name].folder.name))
        else:
            number = name.split("_")[0]
            bodies.append(
                f"## {notebooks.title(name)}\n\n*Not measured; `labkit run {number}` measures it.*"
            )
    keyed = {key: fact for notebook in executed.values() for key, fact in _keyed(notebook).items()}
    parts = [
        card.page(chapters, keyed),
        *filter(None, warnings),
        *bodies,
        card.provenance(chapters),
    ]
    return "\n\n".join(parts).replace("{figures}", here) + "\n"


def devices_table(root: Path) -> pd.DataFrame:
    """Returns one row per device and notebook: cases by status, when and with which versions
    measured.
    """
    rows = []
    for device in measured_devices(root):
        for notebook, records in check(root / device).items():
            dates = sorted(record.recorded_at[:10] for record in records)
            counts = Counter(record.status for record in records)
            row = {"device": device, "notebook": notebook}
            row["records"] = ", ".join(
                f"{count} {status}" for status, count in sorted(counts.items())
            )
            row["complete"] = "no" if _not_finished(root / device, notebook) else "yes"
            row["measured"] = " to ".join(dict.fromkeys([dates[0], dates[-1]])) if dates else "–"
            for library in ("torch", "triton"):
                row[library] = ", ".join(
                    sorted({record.software.get(library, "?") for record in records})
                )
            rows.append(row)
    return pd.DataFrame(rows)


# Placeholder for the path to the devices' folders, which depends on where the report is written.
_FIGURES_FOLDER = "labkit-figures-folder/"


def _execute_all(names: Sequence[str]) -> dict[str, Any]:
    """Executes notebooks with their lessons, in parallel; raises NotebookError for the first that
    failed.
    """
    num_kernels = max(1, min(MOST_AT_ONCE, os.cpu_count() or 1, len(names)))
    pool = ThreadPoolExecutor(num_kernels)
    try:
        return dict(
            zip(
                names,
                pool.map(lambda name: notebooks.execute(name, {}, lessons=True), names),
                strict=True,
            )
        )
    finally:
        pool.shutdown(cancel_futures=True)


def _not_finished(folder: Path, notebook: str) -> str:
    """Returns a warning if a notebook's measurements were interrupted or do not cover its grid,
    else "".
    """
    done = read_done(folder, notebook)
    if done is None:
        text = "did not run to its end: what follows is what was recorded before it stopped"
        return f"**{notebook} {text}.**"
    if done["num_missing"]:
        text = f"measurements of the {done['profile']} profile are not recorded"
        return f"**{notebook}: {done['num_missing']} {text}.**"
    return ""


def _markdown_of(output: Mapping[str, Any]) -> str:
    return output.get("data", {}).get("text/markdown", "")


def _fact_of(output: Mapping[str, Any]) -> Mapping[str, Any] | None:
    return output.get("metadata", {}).get("text/markdown", {}).get(FACT)


def _keyed(notebook) -> dict[str, tuple[str, str]]:
    """Returns the facts that a notebook names for the first page: sentence and heading, by key."""
    found, heading = {}, ""
    for cell in notebook.cells:
        if cell.cell_type == "markdown" and cell.source.startswith("## "):
            heading = cell.source.splitlines()[0].removeprefix("## ")
        for output in cell.get("outputs", []):
            fact = _fact_of(output)
            text = _markdown_of(output).removeprefix("- ")
            # What was not measured, or is marked, is nothing for the first page.
            if fact and fact["key"] and not fact["marked"] and not text.startswith("*"):
                found[fact["key"]] = (text, heading)
    return found


def _chapter_markdown(executed, device: str) -> str:
    """Returns a notebook as a chapter: its text, and what its cells show but for lessons and
    set-up.
    """
    hidden = {"remove_cell", "parameters", "injected-parameters", notebooks.LESSON}
    parts, figure = [], None
    for cell in executed.cells:
        if hidden & set(cell.metadata.get("tags", [])):
            continue
        if cell.cell_type == "markdown":
            # A notebook's title is a chapter's heading here.
            parts.append(re.sub(r"^(#+ )", r"#\1", cell.source, flags=re.MULTILINE))
        for output in cell.get("outputs", []):
            shown = output.get("metadata", {}).get(FIGURE)
            if shown:
                figure = len(parts)
                parts.append(
                    f"![{shown['caption']}]({_FIGURES_FOLDER}{device}/{shown['file']})\n\n*{shown['caption']}*"
                )
            elif _fact_of(output) is not None:
                text = _markdown_of(output)
                if figure is not None and not text.startswith("- *"):
                    # The section's first fact is what the figure shows: its alternative text.
                    alternative = re.sub(r"[\[\]*`]", "", text.removeprefix("- "))
                    parts[figure] = re.sub(
                        r"^!\[.*?\]", lambda _, text=alternative: f"![{text}]", parts[figure]
                    )
                    figure = None
                joined = parts and parts[-1].startswith("- ")
                parts[-1:] = [f"{parts[-1]}\n{text}"] if joined else [*parts[-1:], text]
            elif _markdown_of(output):
                parts.append(_markdown_of(output))
        if cell.cell_type == "markdown" and cell.source.startswith("## "):
            figure = None
    return "\n\n".join(part.strip() for part in parts).replace("../figures/", _FIGURES_FOLDER)


def _save_outputs(name: str, executed, target: Path) -> None:
    """Writes the notebook with the outputs of `executed` and no other trace of the run."""
    import nbformat

    done = {cell["id"]: cell for cell in executed.cells}
    notebook = notebooks.read(name)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for number, cell in enumerate(code, start=1):
        cell["outputs"] = done.get(cell["id"], {}).get("outputs", [])
        cell["execution_count"] = number if cell["id"] in done else None
        for output in cell["outputs"]:
            if "execution_count" in output:
                output["execution_count"] = cell["execution_count"]
    write_text_atomic(target, nbformat.writes(notebook) + "\n")
