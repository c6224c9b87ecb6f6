"""What CONTRIBUTING.md says under "Add a chapter" works: an experiment, a report and a notebook
become a chapter, whose run says nothing but its progress and leaves nothing but its results.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile

import nbformat
import pytest
from processes import holding

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
    return [
        Case("sorting", {"method": method, "length": length}, ("forward",), 60.0, 0.1)
        for method in METHODS
        for length in lengths
    ]


def measure(device, case, phase):
    method, length = case.parameters["method"], case.parameters["length"]
    x = torch.randn(length, device=device.kind)
    call = {"inputs": lambda: (x,), "time_limit_s": 0.1}
    run = timed(device, time_callable, METHODS[method], **call)
    rate = {"elements_per_s": len(x) / run.timing.median_ms * 1e3}
    return run.measured(rate, {"method": method, "length": len(x)})


run_case = functools.partial(run_section, {"sorting": section(measure)})
'''

REPORT = '''
"""Notebook 90 from its records."""

from labkit.report import figures
from labkit.report.frame import pivot


def times_table(frame):
    return pivot(frame, "length", "method")


def times_figure(frame):
    figure, axis = figures.panel(height=2.6)
    for number, (method, rows) in enumerate(frame.groupby("method")):
        style = figures.Style(f"C{number}")
        figures.line_with_band(axis, rows, "length", label=method, style=style)
    figures.log_time_axis(axis, "call time (ms)")
    figures.finish(figure)
    return figure
'''

CELLS = [
    ("markdown", "# 90 · Sorting\n\n*How long does sorting take?*"),
    (
        "code",
        "from labkit.lessons import open_chapter\nfrom labkit.report import sorting as report\n"
        "from labkit.report.facts import compare",
    ),
    (
        "code",
        'chapter = open_chapter("90_sorting", measure=measure, device=device, profile=profile, '
        "output=output, "
        'fresh=fresh, save_figures=save_figures)\nsorting = chapter.records("sorting")',
    ),
    ("markdown", "## Which sort is faster?\n\nDoes asking for all of them cost more?"),
    (
        "code",
        'chapter.figure(report.times_figure, sorting, name="times", caption="Call time over '
        'length (ms)")',
    ),
    (
        "code",
        'fact = compare(sorting, {"method": "topk"}, {"method": "sort"}, length=10_000)\n'
        'chapter.say(fact, ahead="Sorting is {ratio} as fast as topk.")',
    ),
    ("code", 'chapter.table(report.times_table, sorting, caption="Median in ms, call time")'),
    ("code", "chapter.more()"),
]


def write_notebook(path):
    """Writes the toy's notebook; its parameters are those of notebook 01."""
    example = nbformat.read(NOTEBOOKS / "01_benchmarking.ipynb", as_version=4)
    (parameters,) = [
        cell for cell in example.cells if "parameters" in cell.metadata.get("tags", [])
    ]
    make = {"markdown": nbformat.v4.new_markdown_cell, "code": nbformat.v4.new_code_cell}
    title, *setup = (make[kind](source) for kind, source in CELLS[:3])
    for cell in setup:
        cell.metadata["tags"] = ["remove_cell"]
    shown = (make[kind](source) for kind, source in CELLS[3:])
    example.cells = [title, setup[0], parameters, setup[1], *shown]
    nbformat.write(example, path)


PROGRESS = r"^Measuring .*|^ *\d+%\|.{20}\| [\d:]+, [\d:?]+ left(, 90 .*)?$"
# What a CUDA build of torch says on a machine without a GPU when it loads its compiler.
PROGRESS += r"|^W.* No CUDA runtime is found, using CUDA_HOME=.*$"
"""What a run in which nothing is wrong says on stderr: what it measures, and the bar."""


@pytest.mark.slow
def test_a_chapter_is_one_experiment_one_report_and_one_notebook(tmp_path):
    assert len((EXPERIMENT + REPORT).splitlines()) <= 60
    # The link to the notebooks then leads to those beside the copy.
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(REPOSITORY / "labkit", tmp_path / "labkit", symlinks=True, ignore=ignore)
    (tmp_path / "labkit" / "experiments" / "sorting.py").write_text(EXPERIMENT)
    (tmp_path / "labkit" / "report" / "sorting.py").write_text(REPORT)
    (tmp_path / "notebooks").mkdir()
    write_notebook(tmp_path / "notebooks" / "90_sorting.ipynb")
    # Another that cannot be imported harms none.
    (tmp_path / "labkit" / "experiments" / "broken.py").write_text("1 / 0")
    write_notebook(tmp_path / "notebooks" / "91_broken.ipynb")
    words = "-m labkit run 90 --profile smoke --output out".split()
    # A socket's path may have 107 characters.
    with tempfile.TemporaryDirectory(dir="/tmp") as temporary:
        names = {"PYTHONPATH": str(tmp_path), "TMPDIR": temporary, "CUDA_VISIBLE_DEVICES": ""}
        run = subprocess.run(
            [sys.executable, *words],
            **{"capture_output": True, "text": True, "cwd": tmp_path, "env": os.environ | names},
        )
        assert run.returncode == 0, run.stderr[-3000:]
        assert not os.listdir(temporary) and not holding(temporary.encode())
    assert not re.sub(PROGRESS, "", run.stderr, flags=re.MULTILINE).strip()
    (folder,) = (tmp_path / "out").iterdir()
    assert f"Report: {folder / 'report.md'}" in run.stdout
    assert "90 · Sorting" in (folder / "report.md").read_text(encoding="utf-8")
    executed = (folder / "90_sorting.ipynb").read_text(encoding="utf-8")
    assert "| 1000 |" in executed and (
        "as fast as topk" in executed or "sort against topk" in executed or "Too small" in executed
    )
    assert (folder / "90_times.svg").exists() and (folder / "90_sorting.ipynb").exists()
    assert len((folder / "tables" / "90_sorting.csv").read_text().splitlines()) == 5
