"""Notebook 02's experiment: a step is captured as it runs, cases share a capture, and a record says
what was captured.
"""

import dataclasses
import json
import os
import subprocess
from collections import Counter

import pandas as pd
import pytest
import torch
from chapters import CPU, H200, H200_BYTES, execute_smoke, finished, on_a_cpu

from labkit.configs import FIGURES, NSYS_ANALYSIS
from labkit.device import detect
from labkit.experiments import nsys_analysis as experiment
from labkit.experiments.nsys_analysis import ProfiledCase, cases, run_case
from labkit.experiments.step import lacking_room
from labkit.measure.profiling import Nsys, ProfileError, Trace
from labkit.records import Record, RecordStore

NOTEBOOK = "02_nsys_analysis"
CANARY = "a-canary-that-sings-in-no-file"


@pytest.fixture(autouse=True)
def this_device_is_a_cpu(request, monkeypatch):
    # A worker ends without looking back; this process does not.
    monkeypatch.setattr(experiment, "freeze_modules", lambda: None)
    yield from on_a_cpu(monkeypatch, is_detected="gpu" not in request.keywords)


def memory_of(num_bytes: int, monkeypatch) -> None:
    properties = dataclasses.make_dataclass("P", ["total_memory"])(num_bytes)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)


def committed(notebook: str) -> list[Record]:
    return RecordStore(FIGURES / "nvidia-h200" / "records" / f"{notebook}.jsonl").load()


def parameters(size="nano", context=16, precision="fp32", attention="eager") -> dict:
    return {
        "size": size,
        "context": context,
        "batch": 4,
        "precision": precision,
        "compile": "none",
        "attention": attention,
    }


def test_a_case_brings_those_after_it_of_its_size_and_context_alone():
    planned = cases("full", "cuda", sizes=["small", "10b"], contexts=[512, 2048])
    groups = {}
    for one in planned:
        shape = (one.section, one.parameters["size"], one.parameters["context"])
        groups.setdefault(shape, []).append(one)
    for group in groups.values():
        words = [experiment.words_of(one.parameters, name) for one in group for name in one.phases]
        for number, one in enumerate(group, start=1):
            assert list(one.together) == words[2 * number :]


def test_every_timeline_of_the_grid_is_one_of_its_cases():
    for profile in ("smoke", "full"):
        kept = [one for one in cases(profile, "cpu") if experiment.is_timeline(one.parameters)]
        assert len(kept) == len(NSYS_ANALYSIS[profile].timelines)


def test_what_fits_an_h200_is_tried_and_little_that_does_not(monkeypatch):
    """Held against notebook 01's committed records: nothing that ran there is skipped here."""
    memory_of(H200_BYTES, monkeypatch)
    seen = Counter()
    for record in committed("01_benchmarking"):
        phase = {"backward": "forward_backward", "train_step": "train_step"}.get(record.phase)
        if record.section == "steps" and phase and record.case["precision"] != "tf32":
            is_tried = not lacking_room(H200, record.case, phase)
            assert is_tried or record.status == "oom", (record.case, record.phase)
            seen[record.status, is_tried] += 1
    assert seen["ok", True] > 100 and seen["oom", False] >= 10 and seen["oom", True] <= 3


def test_a_case_is_captured_under_its_own_label():
    asked = parameters(precision="bf16", attention="auto")
    one = dataclasses.replace(cases("smoke", "cpu")[0], parameters=asked)
    measured = {phase: run() for phase, run in run_case(one, {})}
    assert list(measured) == ["inference", "train_step"]
    for phase, found in measured.items():
        observed, metrics = found.observed, found.metrics
        assert found.case == one.parameters and len(json.dumps(observed)) < 30_000
        assert (observed["profiler"], observed["profiler_version"]) == (
            "kineto cpu",
            torch.__version__,
        )
        classes, ranges = observed["tables"]["classes"], observed["tables"]["ranges"]
        assert sum(classes["total_us"]) / 1e3 == pytest.approx(metrics["step_kernel_ms"], rel=1e-3)
        assert sum(classes["launches"]) == metrics["num_launches"]
        assert sum(ranges["launches"]) == metrics["num_launches_with_ranges"]
        assert 0 <= metrics["step_idle_fraction"] < 1 and metrics["num_casts"] > 0
        assert ("backward_kernel_ms" in metrics) == (phase == "train_step")
    kernels = pd.DataFrame(measured["train_step"].observed["tables"]["kernels"])
    assert {"forward", "backward", "optimizer"} <= set(kernels["phase"])


class FakeNsys:
    """Runs the program, and "captures" of each step one kernel a phase, the backward one by another
    thread.
    """

    def __init__(self, num_labels: int):
        self.num_labels = num_labels

    def capture(self, command, *, timeout_s):
        subprocess.run(command, check=True, timeout=timeout_s)
        if not self.num_labels:
            raise ProfileError("holds no kernel")
        return trace_of(self.num_labels)


def trace_of(num_labels: int) -> Trace:
    operations, ranges, moment = [], [], 0
    for label in range(num_labels):
        for step in range(2):
            begin = moment
            for thread, phase in enumerate(("forward", "backward", "optimizer"), start=1):
                ranges.append((phase, moment, moment + 8, 1, 1))
                span = {"start_ns": moment + 3, "end_ns": moment + 8, "duration_ns": 5}
                launch = {"process": 1, "thread": thread % 2 + 1, "launched_ns": moment + 2.0}
                name = {"name": "ampere_sgemm", "kind": "kernel", "stream": 7}
                operations.append(name | span | launch)
                moment += 10
            ranges.append((f"case {label} step {step}", begin - 1, moment, 1, 1))
            moment += 10
    columns = ["name", "start_ns", "end_ns", "process", "thread"]
    total_ns = 5 * len(operations)
    table = pd.DataFrame(ranges, columns=columns).sort_values("start_ns")
    return Trace("nsys", "2025.3.1", pd.DataFrame(operations), table, total_ns)


@pytest.mark.slow
def test_cases_share_one_capture_of_labkits_own_process(monkeypatch):
    """The program is the real one, on this machine's CPU; only the capture of it is invented."""
    monkeypatch.setattr(experiment, "_captured", {})
    later = ProfiledCase("profiles", parameters(context=16), ("train_step",), 300.0)
    together = (experiment.words_of(later.parameters, "train_step"),)
    case = dataclasses.replace(later, parameters=parameters(context=8), together=together)
    first = experiment._from_nsys(FakeNsys(2), CPU, case, "train_step")
    assert first.case == case.parameters and first.observed["profiler_version"] == "2025.3.1"
    assert first.metrics["num_launches"] == 3
    assert first.metrics["backward_kernel_ms"] == pytest.approx(5e-6)
    second = experiment._from_nsys(None, CPU, later, "train_step")
    assert second.case == later.parameters and experiment._captured == {}


def test_what_fails_in_the_captured_process_is_raised_where_it_is_asked_for():
    """The words name a size that does not exist: the process answers with its failure."""
    (failure,) = experiment.capture_together(
        FakeNsys(0), CPU, [("none", "8", "fp32", "eager", "inference")], 300.0
    )
    assert type(failure) is RuntimeError and "unknown size 'none'" in str(failure)


def test_a_capture_without_the_steps_ranges_is_an_error():
    answer = {"case": parameters(), "observed": {}, "steps": [{"issued_ms": 1, "done_ms": 1}] * 2}
    with pytest.raises(ProfileError, match="holds no launch in the range 'case 1 step 0'"):
        experiment.measurements(trace_of(1), [answer, answer])


@pytest.mark.slow
def test_smoke_captures_every_case_and_the_environment_is_in_no_file(tmp_path):
    """The notebook executed here in the smoke profile, with a canary in the environment."""
    folder, executed = execute_smoke(NOTEBOOK, tmp_path, LABKIT_CANARY=CANARY)
    records = finished(NOTEBOOK, folder)
    assert {record.status for record in records} == {"ok"}
    assert len(records) == 2 * len(cases("smoke", "cpu"))
    assert {record.observed["profiler"] for record in records} == {"kineto cpu"}
    written = {path.name for path in (folder / "tables").glob("02_*.csv")}
    assert {"02_profiles.csv", "02_classes.csv", "02_kernels.csv", "02_attention.csv"} <= written
    for path in folder.rglob("*"):
        assert path.is_dir() or CANARY.encode() not in path.read_bytes(), path
    assert CANARY not in json.dumps(executed)
    text = (folder / "records" / f"{NOTEBOOK}.jsonl").read_text(encoding="utf-8")
    assert os.environ.get("HOME", "/root") + "/" not in text and "/tmp/" not in text


@pytest.mark.gpu
def test_nsys_and_torch_profiler_give_the_same_table():
    nsys = Nsys.find()
    if failure := nsys.failure() if nsys else "not found":
        pytest.skip(f"needs nsys: {failure}")
    words = ("small", "512", "fp32", "eager", "train_step")
    (theirs,) = experiment.capture_together(nsys, detect(), [words], 300.0)
    ours = experiment._from_kineto(detect(), words)
    assert (theirs.observed["profiler"], ours.observed["profiler"]) == ("nsys", "kineto")
    metrics = theirs.metrics
    assert metrics["num_launches"] == metrics["num_launches_with_ranges"] > 300
    assert metrics["num_launches"] == ours.metrics["num_launches"]
    # The backward pass is launched by a thread of its own.
    assert metrics["backward_kernel_ms"] > 1.5 * metrics["forward_kernel_ms"]
    for phase in ("forward", "backward", "optimizer"):
        name = f"{phase}_kernel_ms"
        assert ours.metrics[name] == pytest.approx(metrics[name], rel=0.05)
