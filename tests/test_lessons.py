"""A lesson's menus, without ipywidgets and moved, and what lessons refuse in one line."""

import sys

import pytest
from IPython.core.interactiveshell import InteractiveShell

from labkit import notebooks
from labkit.configs import RequestError
from labkit.lessons import controls, measure_here

CELLS = ("peaks-answer", "peaks-answer-contexts", "peaks-controls-live")
"""Of notebook 04, what its menus of batch and context need."""

BEFORE, AFTER = "58.7 GiB", "50.8 GiB"
"""The peak at the first context, 512, and at the next, 128."""


def shown() -> object:
    """Returns what the cell with the menus shows."""
    shell = InteractiveShell()
    cells = [cell for cell in notebooks.read("04_memory").cells if cell["id"] in CELLS]
    return [shell.run_cell(cell["source"]).result for cell in cells][-1]


def test_without_widgets_a_menu_is_its_first_choice(monkeypatch):
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    assert shown() == BEFORE


def test_a_menu_that_is_moved_shows_another_result(capsys):
    pytest.importorskip("ipywidgets")
    menus = shown()
    assert BEFORE in capsys.readouterr().out
    menus.children[1].index = 1
    assert AFTER in capsys.readouterr().out


def test_what_a_lesson_cannot_have_is_refused_by_name():
    for choices in ({}, {"a": []}, {"a": 3}):
        with pytest.raises(RequestError, match=r"^choices .*; accepted: .* at least one value"):
            controls(dict, **choices)
    for value in (None, 10**30):
        with pytest.raises(RequestError, match=f"batch {value}; accepted: .* to 1,000,000"):
            measure_here("01_benchmarking", "steps", "forward", batch=value)
    with pytest.raises(RequestError, match="kind 'x'; accepted: gemm, copy"):
        measure_here("01_benchmarking", "ceilings", "rate", kind="x")
    with pytest.raises(RequestError, match="cast 'x'; accepted: none, implicit, explicit"):
        measure_here("03_mixed_precision", "accumulation", "sum", cast="x")
