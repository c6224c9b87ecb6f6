"""What the README says under "Add a chapter" works: an experiment, a report and a notebook become a chapter."""

import os
import shutil
import subprocess
import sys

import nbformat
import pytest

from labkit.configs import NOTEBOOKS, REPOSITORY

EXPERIMENT = '''
"""Notebook 90: how long sorting takes, by method and length."""

import functools

import torch

from labkit.experiments.sections import run_section, section, timed
from labkit.experiments.sweep import Case
from labkit.measure.timing import time_callable

MEASUREMENT_VERSION = 1
METHODS = {"sort": torch.sort, "topk": lambda x: x.topk(len(x))}


def cases(profile, device_kind):
    lengths = (1_000, 10_000) if profile == "smoke" else (10_000, 100_000, 1_000_000)
    return [Case("sorting", {"method": m, "length": n}, ("forward",), 60.0, 0.1) for m in METHODS for n in lengths]


def measure(device, case, phase):
    method, length = case.parameters["method"], case.parameters["length"]
    x = torch.randn(length, device=device.kind)
    run = timed(device, time_callable, METHODS[method], device_kind=device.kind, inputs=[(x,)], time_limit_s=0.1)
    return run.measured({"elements_per_s": len(x) / run.timing.median_ms * 1e3}, {"method": method, "length": len(x)})


run_case = functools.partial(run_section, {"sorting": section(measure)})
'''

REPORT = '''
"""Notebook 90 from its records."""

from labkit.report import figures, forms
from labkit.report.tables import in_order, pivot


def table_times(frame):
    return pivot(frame, ["length"], "method")


def figure_times(frame):
    rows = in_order(frame, ["length"])
    return figures.curves(rows, x="length", line="method", x_label="length", title="Sorting, call time")


def findings_times(frame):
    pairs = forms.pairs(frame, "method", "topk", keys=["length"])
    return [f"Sorting is {forms.summary(pairs, lambda row: str(row['length']))} against topk, call time."]


def front(chapter):
    return [(text, "Which sort is faster") for text in findings_times(chapter.records("sorting"))]
'''

CELLS = [
    ("markdown", "# 90 · Sorting\n\nYou will learn how long sorting takes."),
    ("setup", "from labkit.experiments import open_session\nfrom labkit.report import sorting as report\n"
              "from labkit.report.chapter import Chapter"),
    ("session", 'session = open_session("90_sorting", measure=measure, device=device, profile=profile, output=output, '
                'fresh=fresh)\n'
                'chapter = Chapter("90_sorting", device=session.slug, output=output, save_figures=save_figures)'),
    ("markdown", "## Which sort is faster\n\n*Does asking for all of them cost more?*"),
    ("code", 'session.measure("sorting")\nsorting = chapter.records("sorting")\n'
             'chapter.figure(report.figure_times, sorting, name="times", description="Time over length")'),
    ("code", 'chapter.table(report.table_times, sorting, caption="Median in ms, {time}")'),
    ("code", "chapter.findings(report.findings_times, sorting)"),
    ("code", "chapter.full_tables()"),
    ("setup", "session.finish()"),
]  # fmt: skip


def write_notebook(path):
    """Writes the toy's notebook; its parameters are those that every notebook has."""
    example = nbformat.read(NOTEBOOKS / "01_benchmarking.ipynb", as_version=4)
    (parameters,) = [cell for cell in example.cells if "parameters" in cell.metadata.get("tags", [])]
    kept = [line for line in parameters.source.splitlines() if line.split(" =")[0] not in ("sizes", "contexts")]
    parameters.source = "\n".join(kept)
    cells = []
    for kind, source in CELLS:
        if kind == "session":
            cells.append(parameters)
        make = nbformat.v4.new_markdown_cell if kind == "markdown" else nbformat.v4.new_code_cell
        cells.append(make(source, metadata={"tags": ["remove_cell"]} if kind in ("setup", "session") else {}))
    example.cells = cells
    nbformat.write(example, path)


@pytest.mark.slow
def test_a_chapter_is_one_experiment_one_report_and_one_notebook(tmp_path):
    assert len((EXPERIMENT + REPORT).splitlines()) <= 60
    shutil.copytree(REPOSITORY / "labkit", tmp_path / "labkit", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "labkit" / "experiments" / "sorting.py").write_text(EXPERIMENT)
    (tmp_path / "labkit" / "report" / "sorting.py").write_text(REPORT)
    (tmp_path / "notebooks").mkdir()
    write_notebook(tmp_path / "notebooks" / "90_sorting.ipynb")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "labkit", "run", "90", "--profile", "smoke", "--output", str(tmp_path / "out")]
    run = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment)
    assert run.returncode == 0, run.stderr[-3000:]
    (folder,) = (tmp_path / "out").iterdir()
    report = (folder / "report.md").read_text(encoding="utf-8")
    assert "[90 · Sorting](#90--sorting)" in report and "[Which sort is faster](#which-sort-is-faster)" in report
    assert "| 1000 |" in report and "against topk, call time" in report and "(90_times.svg)" in report
    assert (folder / "90_times.svg").exists() and (folder / "90_sorting.ipynb").exists()
    assert len((folder / "tables" / "90_sorting.csv").read_text().splitlines()) == 5
