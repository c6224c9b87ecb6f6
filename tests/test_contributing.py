"""What CONTRIBUTING.md says a newcomer changes first works as it stands, each in one place."""

import re
import sys
import types

import pytest
import torch

from labkit import configs
from labkit.configs import REPOSITORY, ModelConfig
from labkit.experiments import operations
from labkit.lessons import measure_here
from labkit.report.chapter import Chapter
from labkit.report.facts import compare

TEXT = (REPOSITORY / "CONTRIBUTING.md").read_text(encoding="utf-8")
SECTION = TEXT.split("## Three small changes")[1].split("\n## ")[0]
SIZE, IMPLEMENTATION, FINDING = re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL)


def test_each_change_is_at_most_fifteen_lines():
    for source in (SIZE, IMPLEMENTATION, FINDING):
        assert len(source.strip().splitlines()) <= 15


def test_a_size_is_one_line(monkeypatch):
    (config,) = eval(SIZE, {"ModelConfig": ModelConfig})
    monkeypatch.setitem(configs.SIZES, config.name, config)
    frame = measure_here("01_benchmarking", "steps", "forward", size=config.name, context=16)
    assert frame["size"].item() == config.name and frame["median_ms"].item() > 0


@pytest.fixture
def implementation(monkeypatch):
    """What a module of a newcomer does when it is imported."""
    module = types.ModuleType("newcomer")
    module.torch = torch
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(IMPLEMENTATION, vars(module))
    yield
    del operations.IMPLEMENTATIONS["attention"]["mine"]


def test_an_implementation_of_attention_is_one_call(implementation):
    frame = measure_here("06_flash_attention", "rivals", "mine forward")
    assert frame["median_ms"].item() > 0 and 0 < frame["budget_fraction"].item() <= 1


def test_a_finding_is_one_cell():
    chapter = Chapter("01_benchmarking", device="nvidia-h200")
    names = {"chapter": chapter, "compare": compare, "executions": chapter.records("execution")}
    exec(FINDING, names)
    assert names["compiled"].verdict == "ahead" and names["compiled"]["ratio"].value > 1
