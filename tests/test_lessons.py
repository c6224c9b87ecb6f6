"""A lesson's menus: without ipywidgets, and moved."""

import sys

import pytest
from IPython.core.interactiveshell import InteractiveShell

from labkit import notebooks

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
