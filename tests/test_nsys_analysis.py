"""Notebook 02's experiment: a step is captured as it runs, cases share a capture, and a record says
what was captured.
"""

import dataclasses
import json
import os

import pandas as pd
import pytest
import torch
from chapters import execute_smoke, recorded

from labkit.device import detect
from labkit.experiments import nsys_analysis as experiment
from labkit.experiments.captured_step import parameters_of
from labkit.experiments.nsys_analysis import ProfiledCase, cases
from labkit.measure.profiling import Nsys, ProfileError, Trace
from labkit.records import read_done

NOTEBOOK = "02_nsys_analysis"
CANARY = "a-canary-that-sings-in-no-file"

pytestmark = pytest.mark.usefixtures("on_a_cpu")


def profiled(*words: str, **options) -> ProfiledCase:
    """Returns the training step of a size, context, precision and attention."""
    return ProfiledCase("profiles", parameters_of(*words), ("train_step",), 300.0, **options)


FIRST, LATER, OTHER = [("nano", context, "fp32", "eager") for context in ("8", "16", "32")]
STEPS = [" ".join((*words, "train_step")) for words in (FIRST, LATER)]


def trace_of(names: list[str], failure: str = "") -> Trace:
    """A capture of each step with one kernel a phase, the backward one by another thread."""
    operations, ranges, moment = [], [(failure or "x", 0, 0, 1, 1)], 0
    for name in names:
        for step in range(2):
            begin = moment
            for thread, phase in enumerate(("forward", "backward", "optimizer"), start=1):
                ranges.append((phase, moment, moment + 8, 1, 1))
                span = {"start_ns": moment + 3, "end_ns": moment + 8, "duration_ns": 5}
                launch = {"process": 1, "thread": thread % 2 + 1, "launched_ns": moment + 2.0}
                kernel = {"name": "ampere_sgemm", "kind": "kernel", "stream": 7}
                operations.append(kernel | span | launch)
                moment += 10
            ranges.append((f"step {step} {name}", begin - 1, moment, 1, 1))
            moment += 10
    columns = ["name", "start_ns", "end_ns", "process", "thread"]
    table = pd.DataFrame(ranges, columns=columns).sort_values("start_ns")
    return Trace("nsys", "2025.3.1", pd.DataFrame(operations), table)


class FakeNsys:
    def __init__(self, *trace):
        self.trace, self.commands = trace_of(*trace), []

    def capture(self, command, *, timeout_s):
        self.commands.append(command[3:])
        return self.trace


@pytest.fixture
def measured(monkeypatch):
    """Returns a function that measures a case's training step by this nsys, None for without."""
    monkeypatch.setattr(experiment, "_captured", {})

    def measure(nsys, case):
        monkeypatch.setattr(experiment, "nsys_on", lambda _: nsys)
        return experiment._measure(detect(), case, "train_step")

    return measure


def test_cases_share_one_capture(measured):
    later = profiled(*LATER)
    case = profiled(*FIRST, together=tuple(tuple(step.split()) for step in STEPS))
    nsys = FakeNsys(STEPS)
    first = measured(nsys, case)
    assert first.case == case.parameters and first.observed["profiler_version"] == "2025.3.1"
    assert (first.metrics["num_launches"], first.metrics["done_ms"]) == (3, 31e-6)
    assert first.metrics["issued_ms"] == 29e-6
    assert first.metrics["backward_kernel_ms"] == pytest.approx(5e-6)
    second = measured(None, later)
    assert second.case == later.parameters and experiment._captured == {}
    assert nsys.commands == [" ".join(STEPS).split()]


@pytest.mark.parametrize("status", ["oom", "error"])
def test_what_fails_in_the_captured_process_fails_once(measured, status):
    """At its own turn, though others are captured before it, and whatever it ran before."""
    nsys = FakeNsys(STEPS, f"{status} {STEPS[1]} it broke")
    assert measured(nsys, profiled(*FIRST)).status == "ok"
    failed = measured(None, profiled(*LATER))
    assert (failed.status, failed.reason, failed.metrics) == (status, "it broke", {})
    with pytest.raises(ProfileError, match="ended before its first step"):
        measured(nsys, profiled(*OTHER))


def test_a_capture_without_the_steps_ranges_is_an_error():
    trace = trace_of(STEPS)
    trace = dataclasses.replace(trace, operations=trace.operations.iloc[:6])
    with pytest.raises(ProfileError, match="holds no launch in the range 'step 0 nano 16 fp32"):
        experiment.measurements(trace)


@pytest.mark.slow
def test_smoke_captures_every_case_and_the_environment_is_in_no_file(tmp_path, monkeypatch):
    """The notebook executed here in the smoke profile, with a canary in the environment."""
    monkeypatch.setenv("LABKIT_CANARY", CANARY)
    folder, executed = execute_smoke(NOTEBOOK, tmp_path, sizes=["nano"])
    records = recorded(NOTEBOOK, folder)
    assert {record.status for record in records} == {"ok"}
    sizes = [case.parameters["size"] for case in cases("smoke", "cpu")]
    assert len(records) == 2 * sizes.count("nano")
    assert read_done(folder, NOTEBOOK)["num_missing"] == 2 * len(sizes) - len(records)
    for record in records:
        observed = record.observed
        metrics = record.metrics
        profiler = (observed["profiler"], observed["profiler_version"])
        assert profiler == ("kineto cpu", torch.__version__)
        classes = observed["tables"]["classes"]
        ranges = observed["tables"]["ranges"]
        assert sum(classes["total_us"]) / 1e3 == pytest.approx(metrics["step_kernel_ms"], rel=1e-3)
        assert sum(classes["launches"]) == metrics["num_launches"]
        assert sum(ranges["launches"]) == metrics["num_launches_with_ranges"]
        assert metrics["step_kernel_ms"] < metrics["step_projected_ms"]
        assert ("backward_kernel_ms" in metrics) == (record.phase == "train_step")
    written = {path.name for path in (folder / "tables").glob("02_*.csv")}
    assert {"02_profiles.csv", "02_classes.csv", "02_kernels.csv", "02_attention.csv"} <= written
    for path in folder.rglob("*"):
        assert path.is_dir() or CANARY.encode() not in path.read_bytes(), path
    assert CANARY not in json.dumps(executed)
    text = (folder / "records" / f"{NOTEBOOK}.jsonl").read_text(encoding="utf-8")
    assert os.environ.get("HOME", "/root") + "/" not in text and "/tmp/" not in text


@pytest.mark.gpu(alone=True)
def test_nsys_and_torch_profiler_give_the_same_table(measured):
    nsys = Nsys.find()
    if failure := nsys.failure() if nsys else "not found":
        pytest.skip(f"needs nsys: {failure}")
    case = profiled("small", "512", "fp32", "eager")
    theirs = measured(nsys, case)
    ours = measured(None, case)
    assert (theirs.observed["profiler"], ours.observed["profiler"]) == ("nsys", "kineto")
    metrics = theirs.metrics
    assert metrics["num_launches"] == metrics["num_launches_with_ranges"] > 300
    assert metrics["num_launches"] == ours.metrics["num_launches"]
    # The backward pass is launched by a thread of its own.
    assert metrics["backward_kernel_ms"] > 1.5 * metrics["forward_kernel_ms"]
    for phase in ("forward", "backward", "optimizer"):
        name = f"{phase}_kernel_ms"
        assert ours.metrics[name] == pytest.approx(metrics[name], rel=0.05)
