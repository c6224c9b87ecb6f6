"""A captured step: ranges around its parts change nothing that it computes, and hold what they are
named for.
"""

import contextlib
from collections import Counter

import pandas as pd
import pytest
import torch
from chapters import CPU, on_a_cpu
from test_nsys_analysis import parameters
from typer.testing import CliRunner

from labkit import cli
from labkit.configs import RequestError
from labkit.experiments import captured_step
from labkit.experiments.captured_step import capture_steps, marked, warm_up
from labkit.experiments.nsys_analysis import STEP_PHASES
from labkit.experiments.step import Step
from labkit.measure import profiling
from labkit.measure.profiling import OUTSIDE, RangeMarker


@pytest.fixture(autouse=True)
def this_device_is_a_cpu(monkeypatch):
    yield from on_a_cpu(monkeypatch)


@pytest.fixture(scope="module")
def captured():
    """A training step of a small model on this machine, captured with every range and with the
    phases' alone.
    """
    step = Step(CPU, parameters())
    warm_up(step, "train_step")
    marker = RangeMarker("kineto")
    trace = profiling.capture_with_kineto(
        lambda: capture_steps(step, "train_step", marker, "case"), "cpu"
    )
    return profiling.launches(trace, STEP_PHASES)


def of_step(table: pd.DataFrame, number: int) -> pd.DataFrame:
    return table[[f"case step {number}" in path for path in table["path"]]]


def test_every_part_of_the_model_has_its_range(captured):
    below = {path[1:] for path in of_step(captured, 0)["path"]}
    for number in range(2):
        block = ("forward", f"block {number}")
        parts = ("scores", "mask", "softmax", "value product")
        assert {(*block, "attention", "core", part) for part in parts} | {
            ("backward", f"block {number}")
        } <= below
        assert {(*block, part) for part in ("norm", "feed-forward", "attention")} <= below
    assert {
        ("forward", "embedding"),
        ("forward", "head"),
        ("forward", "norm"),
        ("optimizer",),
    } <= below
    plain = {path[1:] for path in of_step(captured, 1)["path"]}
    assert plain <= {("forward",), ("backward",), ("optimizer",), ()}


def test_the_parts_of_attention_hold_what_they_are_named_for(captured):
    table = of_step(captured, 0)
    forward = table[(table["phase"] == "forward") & (table["kernel_class"] != "other")]
    by_part = {part: set(rows["short_name"]) for part, rows in forward.groupby("range")}
    assert "aten::bmm" in by_part["scores"] and "aten::mul" in by_part["scores"]
    assert "aten::_softmax" in by_part["softmax"] and "aten::_softmax" not in by_part["mask"]
    assert "aten::bmm" in by_part["value product"] and "aten::mul" not in by_part["value product"]
    assert (
        any("masked_fill" in name for name in by_part["mask"])
        and "aten::bmm" not in by_part["mask"]
    )
    products = forward[forward["short_name"] == "aten::bmm"]["range"].value_counts()
    assert products.to_dict() == {"scores": 2, "value product": 2}


def test_marking_adds_no_computation_and_leaves_nothing_behind(captured):
    counts = []
    for number in range(2):
        rows = of_step(captured, number)
        computing = rows[(rows["kernel_class"] != "other") & (rows["phase"] != OUTSIDE)]
        # A gradient that a hook has seen is added to in a new tensor, not in place: the same
        # kernel.
        names = [name.rstrip("_") for name in computing["short_name"]]
        counts.append(Counter(zip(computing["phase"], names, strict=True)))
    assert counts[0] == counts[1]

    step = Step(CPU, parameters())
    before = dict(captured_step.transformer.ATTENTION)
    exact = step.forward()
    with pytest.raises(ZeroDivisionError), marked(step, RangeMarker("none")):
        assert torch.equal(step.forward(), exact)
        raise ZeroDivisionError
    assert captured_step.transformer.ATTENTION == before
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in step.model.modules())


def test_a_marked_step_that_computes_something_else_is_an_error(monkeypatch):
    step = Step(CPU, parameters())

    @contextlib.contextmanager
    def wrong(step, marker):
        original = step.model.head.forward
        step.model.head.forward = lambda x: 100 * original(x)
        yield
        del step.model.head.forward

    monkeypatch.setattr(captured_step, "marked", wrong)
    for phase in ("inference", "forward_backward"):
        with pytest.raises(AssertionError, match=f"{phase}: marking ranges changed the result"):
            capture_steps(step, phase, RangeMarker("none"), "case")
    step.model.head.weight.data.fill_(float("nan"))
    with pytest.raises(AssertionError, match="the result is"):
        capture_steps(step, "train_step", RangeMarker("none"), "case")


def test_a_step_is_profiled_and_its_capture_kept(tmp_path):
    path = tmp_path / "mine.json"
    options = ["--context", "8", "--phase", "inference", "--precision", "fp32"]
    asked = ["profile", "nano", *options, "--output", str(path.with_suffix(""))]
    result = CliRunner().invoke(cli.app, asked)
    assert result.exit_code == 0 and profiling.read_chrome_trace(path).source == "kineto cpu"
    program = "python -m labkit.experiments.captured_step nano 8 fp32 eager inference\n"
    assert "By hand: nsys profile --trace=cuda" in result.output and program in result.output
    for wrong in (["--phase", "all"], ["--context", "0"]):
        assert CliRunner().invoke(cli.app, [*asked, *wrong]).exit_code == 2
    unwritable = CliRunner().invoke(cli.app, [*asked, "--output", "/proc/x/y"])
    assert isinstance(unwritable.exception, RequestError)
