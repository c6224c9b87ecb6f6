"""Notebook 02's experiment: a step is captured as it runs, and a record says what was captured."""

import dataclasses
import json
import os
from collections import Counter

import pandas as pd
import pytest
import torch
from chapters import CPU, H200, H200_BYTES, execute_smoke, finished, on_a_cpu

from labkit import accounting
from labkit.configs import FIGURES, NSYS_ANALYSIS, model_config
from labkit.device import detect
from labkit.experiments import nsys_analysis as experiment
from labkit.experiments.nsys_analysis import cases
from labkit.experiments.step import Step
from labkit.measure.profiling import Nsys
from labkit.records import Record, RecordStore
from labkit.report import nsys_analysis as report
from labkit.report.chapter import Chapter

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


def test_full_is_every_size_and_context_in_fp32_and_bf16_and_some_with_flash_attention():
    found = [one.parameters for one in cases("full", "cuda")]
    eager = Counter(
        (c["size"], c["context"], c["precision"]) for c in found if c["attention"] == "eager"
    )
    sizes = ("small", "medium", "large", "xl-2025", "2.7b", "10b")
    assert eager == Counter(
        (s, t, p) for s in sizes for t in (128, 256, 512, 2048) for p in ("fp32", "bf16")
    )
    flash = {(c["size"], c["context"], c["precision"]) for c in found if c["attention"] == "auto"}
    assert {(s, t, "bf16") for s in sizes for t in (512, 2048)} < flash < set(eager)
    assert all(
        isinstance(one.timeout_s, float) and one.stop_at_failure for one in cases("full", "cuda")
    )
    for profile in ("smoke", "full"):
        for key in NSYS_ANALYSIS[profile].timelines:
            assert any(experiment.is_timeline(one.parameters) for one in cases(profile, "cpu")), key


def test_a_case_brings_those_after_it_of_its_size_and_context_alone():
    found = cases("full", "cuda", sizes=["small", "10b"], contexts=[512, 2048])
    shapes = [("small", 512), ("small", 2048), ("10b", 512), ("10b", 2048)]
    for shape in shapes:
        mine = [
            one for one in found if (one.parameters["size"], one.parameters["context"]) == shape
        ]
        later = [(one.parameters, one.phases) for one in mine if one.section == "profiles"]
        for number, one in enumerate(mine[: len(later)], start=1):
            assert list(one.together) == later[number:]


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
def test_the_bound_of_what_backward_keeps_is_a_lower_one(precision, attention, monkeypatch):
    """Against the bytes that autograd saves on this machine, for shapes whose probabilities weigh
    much or little.
    """
    for context in (16, 128):
        case = parameters(context=context, precision=precision, attention=attention)
        workload, kept = Step(CPU, case), []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x, kept=kept: kept.append(x) or x, lambda x: x
        ):
            loss = workload.forward()
        own = {parameter.untyped_storage().data_ptr() for parameter in workload.model.parameters()}
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in kept}
        saved = sum(num_bytes for pointer, num_bytes in storages.items() if pointer not in own)
        bound = 2 * accounting.parameter_bytes(model_config("nano"))
        low, high = 0, 10**12
        while high - low > 1:  # the memory at which the case stops being skipped
            middle = (low + high) // 2
            memory_of(middle, monkeypatch)
            has_room = not experiment.lacking_room(H200, case, "forward_backward")
            low, high = (low, middle) if has_room else (middle, high)
        assert 0.3 * saved < high - bound <= saved, (context, saved, high - bound)
        del loss


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """The notebook executed here in the smoke profile, with a canary in the environment."""
    return execute_smoke(NOTEBOOK, tmp_path_factory.mktemp("figures"), LABKIT_CANARY=CANARY)


@pytest.mark.slow
def test_smoke_captures_every_case_and_writes_tables(measured):
    folder, _ = measured
    path = folder / "records" / f"{NOTEBOOK}.jsonl"
    records = finished(NOTEBOOK, folder)
    assert {record.status for record in records} == {"ok"} and len(records) == 2 * len(
        cases("smoke", "cpu")
    )
    assert {record.observed["profiler"] for record in records} == {"kineto cpu"}
    written = {path.name for path in (folder / "tables").glob("02_*.csv")}
    assert {"02_profiles.csv", "02_classes.csv", "02_kernels.csv", "02_attention.csv"} <= written
    assert max(map(len, path.read_text().splitlines())) < 1_000_000


@pytest.mark.slow
def test_smoke_adds_up(measured):
    folder, _ = measured
    frame = Chapter(NOTEBOOK, device=folder.name, output=str(folder.parent)).records("profiles")
    total = frame["capture_in_ranges_ms"] + frame["capture_outside_us"] / 1e3
    assert ((total / frame["capture_kernel_ms"] - 1).abs() < 1e-3).all()
    found = report.attention(frame)
    found = found[found["attention"] == "eager"]
    assert len(found) and (found[["matmul_ms", "softmax_ms", "total_ms"]] > 0).all(axis=None)


@pytest.mark.slow
def test_the_environment_is_in_no_file(measured):
    folder, executed = measured
    for path in folder.rglob("*"):
        if path.is_file():
            assert CANARY.encode() not in path.read_bytes(), path
    assert CANARY not in json.dumps(executed)
    records = (folder / "records" / f"{NOTEBOOK}.jsonl").read_text(encoding="utf-8")
    assert os.environ.get("HOME", "/root") + "/" not in records and "/tmp/" not in records


@pytest.fixture(scope="module")
def gpu_capture():
    """Two cases of the small model in one capture of nsys; skipped where there is no GPU or no
    nsys.
    """
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    nsys = Nsys.find()
    if nsys is None:
        pytest.skip("needs nsys")
    group = [
        (parameters("small", 512, precision, attention), ("inference", "train_step"))
        for precision, attention in (("fp32", "eager"), ("bf16", "auto"))
    ]
    return experiment._capture_group(nsys, detect(), group, 300.0)


@pytest.mark.gpu
def test_nsys_captures_steps_whose_kernels_are_all_in_their_phases(gpu_capture):
    measured = {key: outcome() for key, outcome in gpu_capture.items()}
    assert len(measured) == 4
    for key, found in measured.items():
        metrics = found.metrics
        assert found.observed["profiler"] == "nsys" and metrics["num_launches"] > 300
        total = metrics["capture_in_ranges_ms"] + metrics["capture_outside_us"] / 1e3
        assert total == pytest.approx(metrics["capture_kernel_ms"], rel=1e-3)
        assert metrics["num_launches"] == metrics["num_launches_with_ranges"]
        classes = (
            pd.DataFrame(found.observed["tables"]["classes"])
            .groupby("kernel_class")["total_us"]
            .sum()
        )
        assert classes.get("other", 0) < 0.02 * classes.sum()
        if (
            "fp32" in key
        ):  # in bf16 at this size the elementwise kernels may take longer than the matmuls
            assert classes.idxmax() == "matmul"
    step = measured[experiment._key(parameters("small", 512), "train_step")].metrics
    assert step["backward_kernel_ms"] > 1.5 * step["forward_kernel_ms"], (
        "backward kernels reach their range"
    )


@pytest.mark.gpu
def test_torch_profiler_gives_the_same_table_as_nsys(gpu_capture):
    case = dataclasses.replace(cases("full", "cuda", sizes=["small"], contexts=[512])[0])
    with experiment.workload(detect(), case) as workload:
        ours = experiment._capture_here(workload, case, "train_step")
    theirs = gpu_capture[experiment._key(case.parameters, "train_step")]()
    assert ours.observed["profiler"] == "kineto"
    assert ours.metrics["num_launches"] == theirs.metrics["num_launches"]
    for phase in ("forward", "backward", "optimizer"):
        assert ours.metrics[f"{phase}_kernel_ms"] == pytest.approx(
            theirs.metrics[f"{phase}_kernel_ms"], rel=0.05
        )
