"""report.md: a front page, then the executed notebooks without their code and lessons, one chapter each."""

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
from labkit.records import check, check_measured, folder_of, measured_devices, read_done, write_text_atomic
from labkit.report import front, page
from labkit.report.chapter import FIGURE_METADATA, Chapter

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

    A notebook without records is not executed: its chapter says that it was not measured.

    Args:
        device: slug, a folder of DIR; its report.md and figures are written there.
        output: DIR; None for the repository's figures/.
        top_level: without `output`, write the top-level report.md too.
        html: also write DIR/<device>/report.html, one page that needs no other file.
        save_notebooks: also store the outputs in the notebooks themselves (the reference device's only).
        measured: notebooks by name that were just executed with `save_figures` to measure, and need no second run.

    Raises:
        RequestError: nothing has been measured on `device`, or `save_notebooks` is not for the notebooks' device.
        RecordError: a record file cannot be read.
        NotebookError: a notebook failed.
    """
    root = output or FIGURES
    check_measured(device, root)
    folder = root / device
    folders = {name: folder_of(root, device, name) for name in notebooks.names()}
    read = {each: check(each) for each in {folder, *folders.values()}}
    records = read[folder] | {name: read[each][name] for name, each in folders.items() if name in read[each]}
    if save_notebooks and device != REFERENCE_DEVICE:
        raise RequestError(f"the notebooks show {REFERENCE_DEVICE!r}; their outputs cannot be of {device!r}")
    executed = dict(measured or {})
    values = {"device": device, "output": str(output or ""), "save_figures": True}
    missing = [name for name in notebooks.names() if records.get(name) and name not in executed]
    executed |= {name: notebooks.show(name, values) for name in missing}
    if save_notebooks:
        for name, shown in _execute_all(notebooks.names()).items():
            _save_outputs(name, shown, notebooks.path(name))
    chapters = {name: Chapter(name, device=device, output=str(output or "")) for name in notebooks.names()}
    bodies = [
        _chapter_markdown(executed[name], folders[name].name)
        if records.get(name)
        else f"{_as_chapter(notebooks.read(name).cells[0].source)}\n\n{chapter.source().data}"
        for name, chapter in chapters.items()
    ]
    measured_chapters = {name: chapter for name, chapter in chapters.items() if records.get(name)}
    first = front.page(measured_chapters)
    unfinished = filter(None, (_not_finished(folders[name], name) for name in measured_chapters))
    text = "\n\n".join([first, *unfinished, *bodies]) + "\n"

    device_text = text.replace(f"{_FIGURES_FOLDER}{device}/", "").replace(_FIGURES_FOLDER, "../")
    written = [write_text_atomic(folder / "report.md", device_text)]
    if device != REFERENCE_DEVICE:  # the reference device's executed notebooks are those in notebooks/
        for name, notebook in executed.items():
            _save_outputs(name, notebook, folders[name] / f"{name}.ipynb")
    if output is None and top_level:
        text = text.replace(_FIGURES_FOLDER, f"{root.relative_to(REPOSITORY).as_posix()}/")
        written.append(write_text_atomic(REPOSITORY / "report.md", text))
    if html:
        title = front.title(next(iter(measured_chapters.values())))
        written.append(write_text_atomic(folder / "report.html", page.html(device_text, folder, title)))
    return written


def devices_table(root: Path) -> pd.DataFrame:
    """Returns one row per device and notebook: cases by status, when and with which versions measured."""
    rows = []
    for device in measured_devices(root):
        for notebook, records in check(root / device).items():
            dates = sorted(record.recorded_at[:10] for record in records)
            counts = Counter(record.status for record in records)
            row = {"device": device, "notebook": notebook}
            row["records"] = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
            row["complete"] = "no" if _not_finished(root / device, notebook) else "yes"
            row["measured"] = f"{dates[0]} to {dates[-1]}" if dates else "–"
            for library in ("torch", "triton"):
                row[library] = ", ".join(sorted({record.software.get(library, "?") for record in records}))
            rows.append(row)
    return pd.DataFrame(rows)


# Placeholder for the path to the devices' folders, which depends on where the report is written.
_FIGURES_FOLDER = "labkit-figures-folder/"


def _execute_all(names: Sequence[str]) -> dict[str, Any]:
    """Executes notebooks with their lessons, in parallel; raises NotebookError for the first that failed."""
    num_kernels = max(1, min(MOST_AT_ONCE, os.cpu_count() or 1, len(names)))
    pool = ThreadPoolExecutor(num_kernels)
    try:
        return dict(zip(names, pool.map(lambda name: notebooks.execute(name, {}, lessons=True), names), strict=True))
    finally:
        pool.shutdown(cancel_futures=True)


def _not_finished(folder: Path, notebook: str) -> str:
    """Returns a warning if a notebook's measurements were interrupted or do not cover its grid, else ""."""
    done = read_done(folder, notebook)
    if done is None:
        return f"**{notebook} did not run to its end: what follows is what was recorded before it stopped.**"
    if done["num_missing"]:
        return f"**{notebook}: {done['num_missing']} measurements of the {done['profile']} profile are not recorded.**"
    return ""


def _chapter_markdown(executed, device: str) -> str:
    from nbconvert import MarkdownExporter
    from nbconvert.preprocessors import TagRemovePreprocessor
    from traitlets.config import Config

    for cell in executed.cells:
        if "outputs" in cell:  # the report leaves out what is printed during measurements
            cell["outputs"] = [output for output in cell["outputs"] if output["output_type"] != "stream"]
        for output in cell.get("outputs", []):
            if figure := output.get("metadata", {}).get(FIGURE_METADATA):
                output["data"] = {
                    "text/markdown": f"![{figure['description']}]({_FIGURES_FOLDER}{device}/{figure['file']})"
                }
    config = Config()
    config.TagRemovePreprocessor.remove_cell_tags = {"remove_cell", "parameters", "injected-parameters"}
    config.TagRemovePreprocessor.enabled = True
    config.NbConvertBase.display_data_priority = ["text/markdown", "text/plain"]
    config.MarkdownExporter.exclude_input = True
    exporter = MarkdownExporter(config=config)
    exporter.register_preprocessor(TagRemovePreprocessor(config=config), enabled=True)
    text, _ = exporter.from_notebook_node(executed)
    return _as_chapter(text).replace("../figures/", _FIGURES_FOLDER)


def _as_chapter(text: str) -> str:
    text = re.sub(r"^(#+ )", r"#\1", text, flags=re.MULTILINE)  # a notebook's title is a chapter's heading here
    return re.sub(r"\n{3,}", "\n\n", text).strip()


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
