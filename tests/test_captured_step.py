"""A captured step: ranges around its parts change nothing that it computes, and hold what they are
named for.
"""

import contextlib
from collections import Counter
from functools import partial

import pandas as pd
import pytest
import torch
from chapters import CPU, labkit
from torch.profiler import record_function

from labkit.configs import RequestError
from labkit.experiments import captured_step
from labkit.experiments.captured_step import capture_steps, main, marked, parameters_of, run_cases
from labkit.experiments.nsys_analysis import STEP_PHASES
from labkit.experiments.step import Step
from labkit.measure import profiling
from labkit.measure.profiling import OUTSIDE

SHAPE = ("nano", "16", "fp32", "eager")

pytestmark = pytest.mark.usefixtures("on_a_cpu")


@pytest.fixture(scope="module")
def captured():
    """A training step of a small model on this machine, captured with every range and with the
    phases' alone.
    """
    run = partial(run_cases, CPU, [(*SHAPE, "train_step")], record_function)
    trace = profiling.capture_with_kineto(run, "cpu")
    table = profiling.launches(trace, STEP_PHASES)
    # The operators' own times are together those of the outermost ones.
    busy_ns = pytest.approx(profiling.busy_ns(table), rel=1e-3)
    assert table["duration_ns"].sum() == busy_ns
    return [rows_of(table, f"step {number} nano 16 fp32 eager train_step") for number in range(2)]


def rows_of(table: pd.DataFrame, name: str) -> pd.DataFrame:
    return table[[name in path for path in table["path"]]]


def test_every_part_of_the_model_has_its_range_and_holds_its_operators(captured):
    with_ranges, plain = ({path[1:] for path in rows["path"]} for rows in captured)
    for number in range(2):
        block = ("forward", f"block {number}")
        parts = ("attention_norm", "feed_forward", "attention")
        expected = {(*block, part) for part in parts} | {(*block, "attention", "core")}
        assert expected | {("backward", f"block {number}")} <= with_ranges
    model = {("forward", part) for part in ("embedding", "head", "norm")}
    assert model | {("optimizer",)} <= with_ranges
    assert plain <= {("forward",), ("backward",), ("optimizer",), ()}
    core = rows_of(captured[0], "core")[["short_name", "kernel_class"]].value_counts()
    assert (core["aten::bmm", "matmul"], core["aten::_softmax", "softmax"]) == (4, 2)


def test_marking_adds_no_computation_and_leaves_nothing_behind(captured):
    counts = []
    for rows in captured:
        computing = rows[(rows["kernel_class"] != "other") & (rows["phase"] != OUTSIDE)]
        # A gradient that a hook has seen is added to in a new tensor, not in place: the same
        # kernel.
        names = [name.rstrip("_") for name in computing["short_name"]]
        counts.append(Counter(zip(computing["phase"], names, strict=True)))
    assert counts[0] == counts[1]

    step = Step(CPU, parameters_of(*SHAPE))
    before = dict(captured_step.transformer.ATTENTION)
    exact = step.forward()
    with pytest.raises(ZeroDivisionError), marked(step, contextlib.nullcontext):
        assert torch.equal(step.forward(), exact)
        raise ZeroDivisionError
    assert captured_step.transformer.ATTENTION == before
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in step.model.modules())


def test_a_captured_step_whose_result_is_no_number_is_an_error():
    step = Step(CPU, parameters_of(*SHAPE))
    step.model.head.weight.data.fill_(float("nan"))
    with pytest.raises(AssertionError, match="train_step: the result is not finite"):
        capture_steps(step, "train_step", contextlib.nullcontext)


def test_the_program_goes_on_after_what_does_not_fit_and_ends_at_another_failure(monkeypatch):
    run = captured_step.capture_steps
    names = []
    failures = {
        16: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB\nand more"),
        64: RuntimeError("it broke"),
    }

    def limited(step, phase, marker):
        context = step.tokens.shape[1]
        if context in failures:
            raise failures[context]
        run(step, phase, marker)

    monkeypatch.setattr(captured_step, "capture_steps", limited)
    monkeypatch.setattr(
        captured_step,
        "record_function",
        lambda name: names.append(name) or contextlib.nullcontext(),
    )
    cases = [["nano", context, "fp32", "eager", "inference"] for context in ("16", "8", "64", "32")]
    with pytest.raises(RuntimeError):
        main([word for case in cases for word in case])
    assert [name for name in names if name.startswith(("step ", "oom ", "error "))] == [
        "oom nano 16 fp32 eager inference OutOfMemoryError: CUDA out of memory. Tried to allocate "
        "20 GiB",
        "step 0 nano 8 fp32 eager inference",
        "step 1 nano 8 fp32 eager inference",
        "error nano 64 fp32 eager inference RuntimeError: it broke",
    ]


def test_a_step_is_profiled_and_its_capture_kept(tmp_path):
    path = tmp_path / "mine.json"
    options = ["--context", "8", "--phase", "inference", "--precision", "fp32"]
    asked = ["profile", "nano", *options, "--output", path.with_suffix("")]
    result = labkit(*asked)
    assert result.exit_code == 0 and profiling.read_chrome_trace(path).source == "kineto cpu"
    assert labkit(*asked, "--phase", "all").exit_code == 2
    unwritable = labkit(*asked, "--output", "/proc/x/y")
    assert isinstance(unwritable.exception, RequestError)
