"""Notebook 02's captures: ranges around a step's parts, one capture for several cases, and what
fails in it.
"""

import contextlib
import dataclasses
import json
import sqlite3
import sys
from collections import Counter
from pathlib import Path

import pandas as pd
import pytest
import torch
from chapters import CPU, on_a_cpu
from test_nsys_analysis import parameters
from typer.testing import CliRunner

from labkit import cli
from labkit.configs import RequestError
from labkit.experiments import captured_step, sweep
from labkit.experiments import nsys_analysis as experiment
from labkit.experiments.captured_step import capture_steps, marked, warm_up
from labkit.experiments.nsys_analysis import cases, run_case
from labkit.experiments.step import Step
from labkit.experiments.sweep import Measured
from labkit.measure import profiling
from labkit.measure.profiling import OUTSIDE, Nsys, ProfileError, RangeMarker
from labkit.measure.timing import Timing

NOTEBOOK = "02_nsys_analysis"


@pytest.fixture(autouse=True)
def this_device_is_a_cpu(request, monkeypatch):
    # A worker ends without looking back; this process does not.
    monkeypatch.setattr(experiment, "freeze_modules", lambda: None)
    yield from on_a_cpu(monkeypatch, is_detected="gpu" not in request.keywords)


@pytest.fixture(scope="module")
def captured():
    """A training step of a small model on this machine, captured with every range and with the
    phases' alone.
    """
    workload = Step(CPU, parameters())
    warm_up(workload, "train_step")
    marker = RangeMarker("kineto")
    trace = profiling.capture_with_kineto(
        lambda: capture_steps(workload, "train_step", marker, "case"), "cpu"
    )
    return profiling.launches(trace, experiment.STEP_PHASES)


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
        step = of_step(captured, number)
        computing = step[(step["kernel_class"] != "other") & (step["phase"] != OUTSIDE)]
        # A gradient that a hook has seen is added to in a new tensor, not in place: the same
        # kernel.
        names = [name.rstrip("_") for name in computing["short_name"]]
        counts.append(Counter(zip(computing["phase"], names, strict=True)))
    assert counts[0] == counts[1]
    workload = Step(CPU, parameters())
    before = dict(captured_step.transformer.ATTENTION)
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in workload.model.modules()]
    exact = workload.forward()
    with pytest.raises(ZeroDivisionError), marked(workload, RangeMarker("none")):
        assert torch.equal(workload.forward(), exact)
        raise ZeroDivisionError
    assert captured_step.transformer.ATTENTION == before
    assert hooks == [
        len(m._forward_hooks) + len(m._forward_pre_hooks) for m in workload.model.modules()
    ]


def test_a_marked_step_that_computes_something_else_is_an_error(monkeypatch):
    workload = Step(CPU, parameters())

    @contextlib.contextmanager
    def wrong(workload, marker):
        original = workload.model.head.forward
        workload.model.head.forward = lambda x: 100 * original(x)
        yield
        del workload.model.head.forward

    monkeypatch.setattr(captured_step, "marked", wrong)
    for phase in ("inference", "forward_backward"):
        with pytest.raises(AssertionError, match=f"{phase}: marking ranges changed the result"):
            capture_steps(workload, phase, RangeMarker("none"), "case")
    workload.model.head.weight.data.fill_(float("nan"))
    with pytest.raises(AssertionError, match="the result is"):
        capture_steps(workload, "train_step", RangeMarker("none"), "case")


def test_a_case_is_captured_under_its_own_label():
    one = dataclasses.replace(
        cases("smoke", "cpu")[0], parameters=parameters(precision="bf16", attention="auto")
    )
    measured = {phase: run() for phase, run in run_case(one, {})}
    assert list(measured) == ["inference", "train_step"]
    for phase, found in measured.items():
        observed, metrics = found.observed, found.metrics
        assert found.case == one.parameters and len(json.dumps(observed)) < 30_000
        ran = (observed["profiler"], observed["profiler_version"], observed["attention_runs"])
        assert ran == ("kineto cpu", torch.__version__, "tiled")
        total = metrics["capture_in_ranges_ms"] + metrics["capture_outside_us"] / 1e3
        assert total == pytest.approx(metrics["capture_kernel_ms"], rel=1e-3)
        classes, ranges = observed["tables"]["classes"], observed["tables"]["ranges"]
        assert sum(classes["total_us"]) / 1e3 == pytest.approx(metrics["step_kernel_ms"], rel=1e-3)
        assert sum(classes["launches"]) == metrics["num_launches"]
        assert sum(ranges["launches"]) == metrics["num_launches_with_ranges"]
        assert 0 <= metrics["step_idle_fraction"] < 1 and metrics["num_casts"] > 0
        assert ("backward_kernel_ms" in metrics) == (phase == "train_step")
    kernels = pd.DataFrame(measured["train_step"].observed["tables"]["kernels"])
    assert {"step", "forward", "backward", "optimizer"} <= set(kernels["phase"])


def test_a_step_is_profiled_and_its_capture_kept(tmp_path):
    asked = [
        "--context",
        "8",
        "--phase",
        "inference",
        "--precision",
        "fp32",
        "--output",
        str(tmp_path / "mine"),
    ]
    result = CliRunner().invoke(cli.app, ["profile", "nano", *asked])
    assert (
        result.exit_code == 0
        and profiling.read_chrome_trace(tmp_path / "mine.json").source == "kineto cpu"
    )
    (line,) = [
        line
        for line in result.output.splitlines()
        if line.startswith("By hand: nsys profile --trace=cuda")
    ]
    assert "--python-backtrace=cuda --cudabacktrace=kernel" in line
    assert line.endswith("python -m labkit.experiments.captured_step nano 8 fp32 eager inference")
    for wrong in (["--phase", "all"], ["--context", "0"], ["--precision", "fp8"]):
        assert CliRunner().invoke(cli.app, ["profile", "nano", *asked, *wrong]).exit_code == 2
    for wrong in (["nano", *asked, "--output", "/proc/x/y"], ["huge", *asked]):
        assert isinstance(CliRunner().invoke(cli.app, ["profile", *wrong]).exception, RequestError)


def nsys_export(path: Path, labels: int) -> None:
    """Writes what nsys would have captured of so many steps, twice each: 4 kernels, the backward
    one by a thread.
    """
    process, kernels, ranges, moment = 5 << 24, [], [], 1000
    for number in range(labels):
        for step in range(2):
            begin = moment
            for phase, thread, name in (
                ("forward", 1, "ampere_sgemm"),
                ("forward", 1, "softmax_warp_forward"),
                ("backward", 2, "ampere_sgemm"),
                ("optimizer", 1, "FusedAdam"),
            ):
                ranges.append((moment, moment + 8, phase, process + 1))
                kernels.append((name, process + thread, moment + 4, moment + 100, moment + 105))
                moment += 10
            ranges.append((begin - 1, moment, f"case {number} step {step}", process + 1))
            moment += 10
    runtimes = [
        (launched, 0, thread, number) for number, (_, thread, launched, _, _) in enumerate(kernels)
    ]
    activities = [(start, end, 7, n, process, n) for n, (_, _, _, start, end) in enumerate(kernels)]
    tables = {
        "StringIds (id, value)": [(number, name) for number, (name, *_) in enumerate(kernels)],
        'CUPTI_ACTIVITY_KIND_KERNEL (start, "end", streamId, correlationId, globalPid, '
        "demangledName)": activities,
        'CUPTI_ACTIVITY_KIND_RUNTIME (start, "end", globalTid, correlationId)': runtimes,
        'NVTX_EVENTS (start, "end", text, globalTid, eventType, textId)': [
            (*row, 59, None) for row in ranges
        ],
    }
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        for table, rows_of in tables.items():
            connection.execute(f"CREATE TABLE {table}")
            marks = ", ".join("?" * len(rows_of[0]))
            connection.executemany(f"INSERT INTO {table.split(' ')[0]} VALUES ({marks})", rows_of)


@pytest.fixture
def fake_nsys(tmp_path, monkeypatch):
    """nsys of a kind: runs the program, and what it "captured" are the steps of `nsys_export`."""
    text = (
        f"#!{sys.executable}\nimport pathlib, shutil, subprocess, sys\n"
        "output = next(a.split('=', 1)[1] for a in sys.argv if a.startswith('--output='))\n"
        "if sys.argv[1] == 'profile':\n"
        "    command = sys.argv[next(n for n, a in enumerate(sys.argv) if n > 1 and not "
        "a.startswith('--')):]\n"
        "    print(subprocess.run(command, stdout=sys.stdout, stderr=sys.stderr))\n"
        "    pathlib.Path(output + '.nsys-rep').write_text('report')\n"
        f"else:\n    shutil.copy({str(tmp_path / 'export.sqlite')!r}, output)\n"
    )
    path = tmp_path / "nsys"
    path.write_text(text)
    path.chmod(0o755)
    nsys_export(tmp_path / "export.sqlite", 2)
    monkeypatch.setattr(experiment, "_captured", {})
    return Nsys(str(path), "2025.3.1", None)


@pytest.mark.slow
def test_cases_share_one_capture_of_labkits_own_process(fake_nsys):
    """The program is the real one, on this machine's CPU; only the capture of it is invented."""
    later = experiment.ProfiledCase("profiles", parameters(context=16), ("train_step",), 300.0)
    together = ((later.parameters, later.phases),)
    case = dataclasses.replace(later, parameters=parameters(context=8), together=together)
    first = experiment._from_shared_capture(fake_nsys, CPU, case, "train_step")
    assert first.case == parameters(context=8) and first.observed["profiler"] == "nsys"
    assert first.observed["profiler_version"] == "2025.3.1"
    assert first.metrics["num_launches"] == 4 and first.metrics[
        "backward_kernel_ms"
    ] == pytest.approx(5e-6)
    kernels = pd.DataFrame(first.observed["tables"]["kernels"])
    assert (
        kernels[kernels["phase"] == "step"].set_index("short_name").loc["ampere_sgemm", "launches"]
        == 2
    )
    (key,) = experiment._captured
    assert json.loads(key) == [parameters(context=16), "train_step"]
    gone = dataclasses.replace(fake_nsys, path="/nowhere/nsys")
    second = experiment._from_shared_capture(gone, CPU, later, "train_step")
    assert second.case == parameters(context=16) and experiment._captured == {}
    with pytest.raises(ProfileError, match="nsys cannot be started"):
        experiment._from_shared_capture(gone, CPU, later, "train_step")


def test_what_fails_in_the_captured_process_is_raised_where_it_is_asked_for(monkeypatch):
    answers, request = [], {"label": "case", "phase": "inference"}
    requests = [{**request, "parameters": parameters(context=8 << number)} for number in range(3)]

    def run(workload, phase):
        if workload.tokens.shape[1] == 16:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB\nand more")

    monkeypatch.setattr(experiment, "warm_up", run)
    experiment.serve(requests, answers.append, CPU)
    assert [answer["status"] for answer in answers] == ["ok", "oom"], (
        "it ends after the first failure"
    )
    with pytest.raises(
        torch.OutOfMemoryError, match=r"^CUDA out of memory\. Tried to allocate 20 GiB$"
    ):
        experiment._outcome(None, answers[1], {})
    with pytest.raises(RuntimeError, match="it broke"):
        experiment._outcome(None, {"status": "error", "reason": "it broke"}, {})


@pytest.mark.parametrize(("idle", "is_timed"), [(0.04, False), (0.3, True)])
def test_a_step_that_idles_under_the_profiler_is_timed_without(idle, is_timed, monkeypatch):
    class Live:
        def time_phase(self, phase, **limits):
            return Timing((1.0, 2.0, 3.0), "window", 2, "time limit", (1.5, 2.5, 3.5))

    found = Measured({"step_idle_fraction": idle}, parameters())
    monkeypatch.setattr(experiment, "_capture_here", lambda *_: found)
    metrics = experiment._profiled(None, CPU, Live(), cases("smoke", "cpu")[0], "inference").metrics
    assert metrics == found.metrics | (
        {"unprofiled_ms": 2.5, "unprofiled_n": 3} if is_timed else {}
    )


def test_a_capture_without_the_steps_ranges_is_an_error(tmp_path):
    nsys_export(tmp_path / "export.sqlite", 1)
    trace = profiling.read_nsys(tmp_path / "export.sqlite")
    with pytest.raises(
        ProfileError, match="the capture holds no launch in the range 'case 7 step 0'"
    ):
        experiment._measured(experiment._Capture.read(trace), {"label": "case 7"})


def test_a_capture_that_is_stopped_is_a_timeout():
    assert (
        sweep._status(TimeoutError("nsys was stopped: the capture took longer than 280 s"))
        == "timeout"
    )
