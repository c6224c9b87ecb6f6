"""Notebook 02's experiment: a step is captured as it runs, cases share a capture, and a record says
what was captured.
"""

import contextlib
import dataclasses
import json
import os
import subprocess
from collections import Counter

import pandas as pd
import pytest
import torch
from chapters import CPU, H200, H200_BYTES, execute_smoke, finished, on_a_cpu

from labkit import accounting
from labkit.configs import FIGURES, NSYS_ANALYSIS, model_config
from labkit.device import detect
from labkit.experiments import nsys_analysis as experiment
from labkit.experiments.nsys_analysis import ProfiledCase, cases, run_case
from labkit.experiments.step import Step
from labkit.experiments.sweep import Measured
from labkit.measure.profiling import Nsys, ProfileError, Trace
from labkit.measure.timing import Timing
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
        for number, one in enumerate(group, start=1):
            later = [(case.parameters, case.phases) for case in group[number:]]
            assert list(one.together) == later


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
            is_tried = not experiment.lacking_room(H200, record.case, phase)
            assert is_tried or record.status == "oom", (record.case, record.phase)
            seen[record.status, is_tried] += 1
    assert seen["ok", True] > 100 and seen["oom", False] >= 10 and seen["oom", True] <= 2


@pytest.mark.parametrize(
    ("precision", "attention"), [("fp32", "eager"), ("bf16", "eager"), ("fp32", "auto")]
)
@pytest.mark.parametrize("context", [16, 128])
def test_the_bound_of_what_backward_keeps_is_a_lower_one(precision, attention, context):
    """Against the bytes that autograd saves on this machine, for shapes whose probabilities weigh
    much or little.
    """
    case = parameters(context=context, precision=precision, attention=attention)
    step, kept = Step(CPU, case), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        loss = step.forward()
    own = {parameter.untyped_storage().data_ptr() for parameter in step.model.parameters()}
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in kept}
    saved = sum(num_bytes for pointer, num_bytes in storages.items() if pointer not in own)
    model_bytes = 2 * accounting.parameter_bytes(model_config("nano"))
    bound = experiment.least_bytes(case, "forward_backward") - model_bytes
    assert 0.3 * saved < bound <= saved
    del loss


def test_a_case_is_captured_under_its_own_label():
    asked = parameters(precision="bf16", attention="auto")
    one = dataclasses.replace(cases("smoke", "cpu")[0], parameters=asked)
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


class FakeNsys:
    """Runs the program, and "captures" of each step one kernel a phase, the backward one by another
    thread.
    """

    def __init__(self, num_labels: int):
        self.num_labels = num_labels

    def capture(self, command, *, timeout_s, variables):
        subprocess.run(command, check=True, env=os.environ | variables, timeout=timeout_s)
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
    together = ((later.parameters, later.phases),)
    case = dataclasses.replace(later, parameters=parameters(context=8), together=together)
    first = experiment._from_shared_capture(FakeNsys(2), CPU, case, "train_step")
    assert first.case == case.parameters and first.observed["profiler_version"] == "2025.3.1"
    assert first.metrics["num_launches"] == 3
    assert first.metrics["backward_kernel_ms"] == pytest.approx(5e-6)
    second = experiment._from_shared_capture(None, CPU, later, "train_step")
    assert second.case == later.parameters and experiment._captured == {}


def test_what_fails_in_the_captured_process_is_raised_where_it_is_asked_for(monkeypatch):
    answers = []
    requests = [
        {"label": "case", "phase": "inference", "parameters": parameters(context=context)}
        for context in (8, 16, 32)
    ]

    def run(step, phase):
        if step.tokens.shape[1] == 16:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB\nand more")

    monkeypatch.setattr(experiment, "warm_up", run)
    experiment.serve(requests, answers.append, CPU)
    # It ends after the first failure.
    assert [answer["status"] for answer in answers] == ["ok", "oom"]
    with pytest.raises(torch.OutOfMemoryError, match=r"^CUDA .* Tried to allocate 20 GiB$"):
        experiment._outcome(None, answers[1], {})
    with pytest.raises(RuntimeError, match="it broke"):
        experiment._outcome(None, {"status": "error", "reason": "it broke"}, {})


def test_a_capture_without_the_steps_ranges_is_an_error():
    capture = experiment._Capture.read(trace_of(1))
    with pytest.raises(ProfileError, match="holds no launch in the range 'case 7 step 0'"):
        experiment._measured(capture, {"label": "case 7"})


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
    device, asked = detect(), parameters("small", 512)
    request = {"parameters": asked, "phase": "train_step"}
    (captured,) = experiment._capture_together(nsys, device, [request], 300.0).values()
    theirs = experiment._outcome(*captured)
    with contextlib.closing(Step(device, asked)) as step:
        ours = experiment._capture_here(step, "train_step")
    assert (theirs.observed["profiler"], ours.observed["profiler"]) == ("nsys", "kineto")
    metrics = theirs.metrics
    assert metrics["num_launches"] == metrics["num_launches_with_ranges"] > 300
    assert metrics["num_launches"] == ours.metrics["num_launches"]
    total = metrics["capture_in_ranges_ms"] + metrics["capture_outside_us"] / 1e3
    assert total == pytest.approx(metrics["capture_kernel_ms"], rel=1e-3)
    # The backward pass is launched by a thread of its own.
    assert metrics["backward_kernel_ms"] > 1.5 * metrics["forward_kernel_ms"]
    for phase in ("forward", "backward", "optimizer"):
        name = f"{phase}_kernel_ms"
        assert ours.metrics[name] == pytest.approx(metrics[name], rel=0.05)
