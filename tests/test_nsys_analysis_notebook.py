"""Notebook 02: a step is captured as it runs, a record says what was captured, the report what the records say."""

import contextlib
import dataclasses
import functools
import json
import os
import sqlite3
import sys
from collections import Counter
from pathlib import Path

import pandas as pd
import pytest
import torch
from chapters import CPU, H200, H200_BYTES, on_a_cpu

from labkit import accounting, hardware, notebooks
from labkit.configs import NSYS_ANALYSIS, model_config
from labkit.experiments import captured_step, sweep
from labkit.experiments import nsys_analysis as experiment
from labkit.experiments.captured_step import capture_steps, marked, warm_up
from labkit.experiments.nsys_analysis import cases, require_room, run_case
from labkit.experiments.sweep import Case, Measured, Skip
from labkit.experiments.workload import Workload
from labkit.measure import profiling
from labkit.measure.profiling import OUTSIDE, Nsys, ProfileError, RangeMarker
from labkit.records import Record, RecordStore, to_frame
from labkit.report import figures
from labkit.report import nsys_analysis as report
from labkit.report.chapter import Chapter

NOTEBOOK = "02_nsys_analysis"
CANARY = "a-canary-that-sings-in-no-file"


@pytest.fixture(autouse=True)
def this_device_is_a_cpu(request, monkeypatch):
    # A worker ends without looking back; this process does not.
    monkeypatch.setattr(experiment, "freeze_modules", lambda: None)
    yield from on_a_cpu(monkeypatch, is_detected="gpu" not in request.keywords)


def parameters(size="nano", context=16, precision="fp32", attention="eager") -> dict:
    return {"size": size, "context": context, "batch": 4, "precision": precision, "compile": "none",
            "attention": attention}  # fmt: skip


# ---- the cases -------------------------------------------------------------------------------------------------


def test_full_is_every_size_and_context_in_fp32_and_bf16_and_some_with_flash_attention():
    found = [one.parameters for one in cases("full", "cuda")]
    eager = Counter((c["size"], c["context"], c["precision"]) for c in found if c["attention"] == "eager")
    sizes = ("small", "medium", "large", "xl-2025", "2.7b", "10b")
    assert eager == Counter((s, t, p) for s in sizes for t in (128, 256, 512, 1024, 2048) for p in ("fp32", "bf16"))
    flash = {(c["size"], c["context"], c["precision"]) for c in found if c["attention"] == "auto"}
    assert {(s, t, "bf16") for s in sizes for t in (128, 2048)} < flash < set(eager)
    assert all(isinstance(one.timeout_s, float) and one.stop_at_failure for one in cases("full", "cuda"))
    for profile in ("smoke", "full"):
        for key in NSYS_ANALYSIS[profile].timelines:
            assert any(experiment.is_timeline(one.parameters) for one in cases(profile, "cpu")), key


def test_a_case_brings_those_after_it_of_its_size_alone():
    found = cases("full", "cuda", sizes=["small", "10b"], contexts=[128])
    assert [one.parameters["size"] for one in found] == ["small"] * 3 + ["10b"] * 3
    for size in ("small", "10b"):
        mine = [one for one in found if one.parameters["size"] == size]
        for number, one in enumerate(mine):
            assert [taken for taken, _ in one.together] == [later.parameters for later in mine[number + 1 :]]
    assert {one.phases for one in found} == {("inference", "train_step"), ("inference", "forward_backward")}


def test_what_fits_an_h200_is_tried_and_little_that_does_not(monkeypatch):
    """Held against notebook 01's committed records: nothing that ran there is skipped here."""
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: dataclasses.make_dataclass("P", ["total_memory"])(H200_BYTES)
    )
    path = Path(__file__).parent.parent / "figures/nvidia-h200/records/01_benchmarking.jsonl"
    tried_in_vain = 0
    seen = Counter()
    for record in RecordStore(path).load():
        if record.section != "steps" or record.case["precision"] == "tf32":
            continue
        if record.phase not in ("inference", "forward_backward", "train_step"):
            continue
        try:
            require_room(H200, record.case, record.phase)
            tried_in_vain += record.status == "oom"
        except Skip as skip:
            assert record.status == "oom", (record.case, record.phase, str(skip))
            seen["skipped"] += 1
        seen[record.status] += 1
    assert seen["ok"] > 100 and seen["skipped"] >= 10
    assert tried_in_vain <= 2


@pytest.mark.parametrize(("precision", "attention"), [("fp32", "eager"), ("bf16", "eager"), ("fp32", "auto")])
def test_the_bound_of_what_backward_keeps_is_a_lower_one(precision, attention, monkeypatch):
    """Against the bytes that autograd saves on this machine, for shapes whose probabilities weigh much or little."""
    for context in (16, 128):
        case = parameters(context=context, precision=precision, attention=attention)
        workload = Workload(CPU, case)
        storages = {}

        def keep(tensor, storages=storages):
            storages[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = workload.forward()
        own = {parameter.untyped_storage().data_ptr() for parameter in workload.model.parameters()}
        saved = sum(t.untyped_storage().nbytes() for pointer, t in storages.items() if pointer not in own)
        bound = 2 * accounting.parameter_bytes(model_config("nano"))
        low, high = 0, 10**12
        while high - low > 1:  # the memory at which the case stops being skipped
            middle = (low + high) // 2
            properties = dataclasses.make_dataclass("P", ["total_memory"])(middle)
            monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, found=properties: found)
            try:
                require_room(H200, case, "forward_backward")
                high = middle
            except Skip:
                low = middle
        assert 0.3 * saved < high - bound <= saved, (context, saved, high - bound)
        del loss


# ---- a step with ranges ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def captured():
    """A training step of a small model on this machine, captured with every range and with the phases' alone."""
    workload = Workload(CPU, parameters())
    warm_up(workload, "train_step")
    marker = RangeMarker("kineto")
    trace = profiling.capture_with_kineto(lambda: capture_steps(workload, "train_step", marker, "case"), "cpu")
    return profiling.launches(trace, experiment.STEP_PHASES)


def of_step(table: pd.DataFrame, number: int) -> pd.DataFrame:
    return table[[f"case step {number}" in path for path in table["path"]]]


def test_every_part_of_the_model_has_its_range(captured):
    below = {path[1:] for path in of_step(captured, 0)["path"]}
    for number in range(2):
        block = ("forward", f"block {number}")
        core = (*block, "attention", "core")
        assert {(*core, part) for part in ("scores", "mask", "softmax", "value product")} <= below
        assert {
            (*block, "norm"),
            (*block, "feed-forward"),
            (*block, "attention"),
            ("backward", f"block {number}"),
        } <= below
    assert {("forward", "embedding"), ("forward", "head"), ("forward", "norm"), ("optimizer",)} <= below
    plain = {path[1:] for path in of_step(captured, 1)["path"]}
    assert plain <= {("forward",), ("backward",), ("optimizer",), ()}


def test_the_parts_of_attention_hold_what_they_are_named_for(captured):
    table = of_step(captured, 0)
    forward = table[(table["phase"] == "forward") & (table["kernel_class"] != "other")]
    by_part = {part: set(rows["short_name"]) for part, rows in forward.groupby("range")}
    assert "aten::bmm" in by_part["scores"] and "aten::mul" in by_part["scores"]
    assert "aten::_softmax" in by_part["softmax"] and "aten::_softmax" not in by_part["mask"]
    assert "aten::bmm" in by_part["value product"] and "aten::mul" not in by_part["value product"]
    assert any("masked_fill" in name for name in by_part["mask"]) and "aten::bmm" not in by_part["mask"]
    products = forward[forward["short_name"] == "aten::bmm"]["range"].value_counts()
    assert products.to_dict() == {"scores": 2, "value product": 2}


def test_marking_adds_no_computation_and_leaves_nothing_behind(captured):
    counts = []
    for number in range(2):
        step = of_step(captured, number)
        computing = step[(step["kernel_class"] != "other") & (step["phase"] != OUTSIDE)]
        # A gradient that a hook has seen is added to in a new tensor, not in place: the same kernel.
        names = [name.rstrip("_") for name in computing["short_name"]]
        counts.append(Counter(zip(computing["phase"], names, strict=True)))
    assert counts[0] == counts[1]
    workload = Workload(CPU, parameters())
    before = dict(captured_step.transformer.ATTENTION)
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in workload.model.modules()]
    exact = workload.forward()
    with pytest.raises(ZeroDivisionError), marked(workload, RangeMarker("none")):
        assert torch.equal(workload.forward(), exact)
        raise ZeroDivisionError
    assert captured_step.transformer.ATTENTION == before
    assert hooks == [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in workload.model.modules()]


def test_a_marked_step_that_computes_something_else_is_an_error(monkeypatch):
    workload = Workload(CPU, parameters())

    @contextlib.contextmanager
    def wrong(workload, marker):
        original = workload.model.head.forward
        workload.model.head.forward = lambda x: 100 * original(x)
        yield
        del workload.model.head.forward

    monkeypatch.setattr(captured_step, "marked", wrong)
    with pytest.raises(AssertionError, match="inference: marking ranges changed the result"):
        capture_steps(workload, "inference", RangeMarker("none"), "case")
    with pytest.raises(AssertionError, match="forward_backward: marking ranges changed the result"):
        capture_steps(workload, "forward_backward", RangeMarker("none"), "case")
    workload.model.head.weight.data.fill_(float("nan"))
    with pytest.raises(AssertionError, match="the result is"):
        capture_steps(workload, "train_step", RangeMarker("none"), "case")


def test_a_case_is_captured_under_its_own_label():
    one = dataclasses.replace(cases("smoke", "cpu")[0], parameters=parameters(precision="bf16", attention="auto"))
    measured = {phase: run() for phase, run in run_case(one, {})}
    assert list(measured) == ["inference", "train_step"]
    for phase, found in measured.items():
        assert found.case == one.parameters
        assert found.observed["profiler"] == "kineto cpu" and found.observed["attention_runs"] == "tiled"
        assert found.observed["profiler_version"] == torch.__version__
        metrics = found.metrics
        total = metrics["capture_in_ranges_ms"] + metrics["capture_outside_us"] / 1e3
        assert total == pytest.approx(metrics["capture_kernel_ms"], rel=1e-3)
        classes = pd.DataFrame(found.observed["tables"]["classes"])
        assert classes["total_us"].sum() / 1e3 == pytest.approx(metrics["step_kernel_ms"], rel=1e-3)
        assert classes["launches"].sum() == metrics["num_launches"]
        ranges = pd.DataFrame(found.observed["tables"]["ranges"])
        assert ranges["launches"].sum() == metrics["num_launches_with_ranges"]
        assert 0 <= metrics["step_idle_fraction"] < 1 and metrics["num_casts"] > 0
        assert len(json.dumps(found.observed)) < 30_000
        assert ("backward_kernel_ms" in metrics) == (phase == "train_step")
    kernels = pd.DataFrame(measured["train_step"].observed["tables"]["kernels"])
    assert {"step", "forward", "backward", "optimizer"} <= set(kernels["phase"])


# ---- a shared capture of nsys ---------------------------------------------------------------------------------------


def nsys_export(path: Path, labels: int) -> None:
    """Writes what nsys would have captured of so many steps, twice each: 4 kernels, the backward one by a thread."""
    process, kernels, ranges = 5 << 24, [], []
    moment = 1000
    for number in range(labels):
        for step in range(2):
            begin = moment
            for phase, thread, name in (("forward", 1, "ampere_sgemm"), ("forward", 1, "softmax_warp_forward"),
                                        ("backward", 2, "ampere_sgemm"), ("optimizer", 1, "FusedAdam")):  # fmt: skip
                ranges.append((moment, moment + 8, phase, process + 1))
                kernels.append((name, process + thread, moment + 4, moment + 100, moment + 105))
                moment += 10
            ranges.append((begin - 1, moment, f"case {number} step {step}", process + 1))
            moment += 10
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE StringIds (id, value)")
        connection.execute(
            'CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start, "end", streamId, correlationId, globalPid, demangledName)'
        )
        connection.execute('CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start, "end", globalTid, correlationId)')
        connection.execute('CREATE TABLE NVTX_EVENTS (start, "end", eventType, text, textId, globalTid)')
        for number, (name, thread, launched, start, end) in enumerate(kernels):
            connection.execute("INSERT INTO StringIds VALUES (?, ?)", (number, name))
            row = (start, end, 7, number, process, number)
            connection.execute("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, ?, ?, ?, ?)", row)
            connection.execute(
                "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, ?, ?)", (launched, 0, thread, number)
            )
        for start, end, name, thread in ranges:
            connection.execute("INSERT INTO NVTX_EVENTS VALUES (?, ?, 59, ?, NULL, ?)", (start, end, name, thread))
    connection.close()


@pytest.fixture
def fake_nsys(tmp_path, monkeypatch):
    """nsys of a kind: runs the program, and what it "captured" are the steps of `nsys_export`."""
    text = (
        f"#!{sys.executable}\nimport pathlib, shutil, subprocess, sys\n"
        "output = next(a.split('=', 1)[1] for a in sys.argv if a.startswith('--output='))\n"
        "if sys.argv[1] == 'profile':\n"
        "    command = sys.argv[next(n for n, a in enumerate(sys.argv) if n > 1 and not a.startswith('--')):]\n"
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


@pytest.fixture
def room_of_an_h200(monkeypatch):
    properties = dataclasses.make_dataclass("P", ["total_memory"])(H200_BYTES)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)


def captures_of(size: str, monkeypatch) -> list[list[tuple]]:
    """Returns the (context, precision, attention, phases) of each capture that a run of this size would make."""
    captures = []

    def capture(nsys, device, group, timeout_s):
        captures.append([(*(p[n] for n in ("context", "precision", "attention")), phases) for p, phases in group])
        return {experiment._key(p, phase): lambda: None for p, phases in group for phase in phases}

    monkeypatch.setattr(experiment, "_capture_group", capture)
    monkeypatch.setattr(experiment, "_captured", {})
    for one in cases("full", "cuda", sizes=[size]):
        with contextlib.suppress(Skip):
            for phase in one.phases:
                experiment._from_shared_capture(None, H200, one, phase)
    return captures


@pytest.mark.parametrize(("size", "most"), [("small", 1), ("medium", 1), ("large", 2), ("2.7b", 3), ("10b", 5)])
def test_small_sizes_take_one_capture_and_large_ones_lose_little_when_cut_off(size, most, monkeypatch, room_of_an_h200):
    captures = captures_of(size, monkeypatch)
    assert len(captures) <= most
    found = [case for group in captures for case in group]
    assert len(found) == len({case[:3] for case in found}), "no case is captured twice"
    expected = {
        (one.parameters["context"], one.parameters["precision"], one.parameters["attention"], phase)
        for one in cases("full", "cuda", sizes=[size])
        for phase in one.phases
        if experiment._has_room(H200, one.parameters, phase)
    }
    assert {(*case[:3], phase) for case in found for phase in case[3]} == expected
    for group in captures:
        names = [(parameters(size, *case[:3]), case[3]) for case in group]
        total = sum(experiment.estimated_s(*one) for one in names)
        assert len(group) == 1 or total <= experiment.LONGEST_CAPTURE_S


def test_the_estimate_of_a_capture_is_near_the_time_of_its_steps():
    """Against the committed captures: the host's clock of two steps and a warm-up, as long as the plain one."""
    path = Path(__file__).parent.parent / "figures/nvidia-h200/records" / f"{NOTEBOOK}.jsonl"
    measured: Counter = Counter()
    estimated: Counter = Counter()
    for one in RecordStore(path).load():
        if one.status == "ok" and one.case["size"] in ("xl-2025", "2.7b", "10b"):
            key = (one.case["size"], one.case["precision"])
            measured[key] += (2 * one.metrics["done_ms"] + one.metrics["done_with_ranges_ms"]) / 1e3
            estimated[key] += experiment.estimated_s(one.case, [one.phase]) - experiment.estimated_s(one.case, [])
    assert len(measured) >= 4
    for key, seconds in measured.items():
        assert 0.5 * seconds < estimated[key] < 2 * seconds, (key, seconds, estimated[key])


@pytest.mark.slow
def test_cases_share_one_capture_of_labkits_own_process(fake_nsys):
    """The program is the real one, on this machine's CPU; only the capture of it is invented."""
    case = experiment.ProfiledCase(
        "profiles", parameters(context=8), ("train_step",), 300.0, together=((parameters(context=16), ("train_step",)),)
    )
    first = experiment._from_shared_capture(fake_nsys, CPU, case, "train_step")
    assert first.case == parameters(context=8) and first.observed["profiler"] == "nsys"
    assert first.observed["profiler_version"] == "2025.3.1"
    assert first.metrics["num_launches"] == 4 and first.metrics["backward_kernel_ms"] == pytest.approx(5e-6)
    kernels = pd.DataFrame(first.observed["tables"]["kernels"])
    assert kernels[kernels["phase"] == "step"].set_index("short_name").loc["ampere_sgemm", "launches"] == 2
    (key,) = experiment._captured
    assert json.loads(key) == [parameters(context=16), "train_step"]
    later = experiment.ProfiledCase("profiles", parameters(context=16), ("train_step",), 300.0)
    gone = dataclasses.replace(fake_nsys, path="/nowhere/nsys")
    second = experiment._from_shared_capture(gone, CPU, later, "train_step")
    assert second.case == parameters(context=16) and experiment._captured == {}
    with pytest.raises(ProfileError, match="nsys cannot be started"):
        experiment._from_shared_capture(gone, CPU, later, "train_step")


def test_what_fails_in_the_captured_process_is_raised_where_it_is_asked_for(monkeypatch):
    answers = []
    requests = [
        {"label": f"case {number}", "parameters": parameters(context=8 << number), "phase": "inference"}
        for number in range(3)
    ]

    def run(workload, phase):
        if workload.tokens.shape[1] == 16:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB\nand more")

    monkeypatch.setattr(experiment, "warm_up", run)
    experiment.serve(requests, answers.append, CPU)
    assert [answer["status"] for answer in answers] == ["ok", "oom"], "it ends after the first failure"
    nothing = (None, answers[1], {})
    with pytest.raises(torch.OutOfMemoryError, match=r"^CUDA out of memory\. Tried to allocate 20 GiB$"):
        experiment._outcome(*nothing)
    with pytest.raises(RuntimeError, match="it broke"):
        experiment._outcome(None, {"status": "error", "reason": "it broke"}, {})


def test_a_capture_without_the_steps_ranges_is_an_error(tmp_path):
    path = tmp_path / "export.sqlite"
    nsys_export(path, 1)
    trace = profiling.read_nsys(path)
    with pytest.raises(ProfileError, match="the capture holds no launch in the range 'case 7 step 0'"):
        experiment._measured(experiment._Capture.of(trace), "case 7", {})


class _Connection:
    """A worker's side of the pipe, for one case."""

    def __init__(self, case: Case):
        self.case, self.sent = case, []

    def recv(self):
        return self.case, {}

    def send(self, message):
        self.sent.append(message)


def test_a_capture_that_is_stopped_is_a_timeout(monkeypatch):
    """The status that a record gets is what the worker says of the exception."""

    def late(case, ceilings):
        def run() -> Measured:
            raise TimeoutError("nsys was stopped: the capture took longer than 280 s")

        yield "inference", run

    class Ended(BaseException):
        pass

    connection = _Connection(Case("profiles", parameters(), ("inference",), 1.0))

    def end(code):
        raise Ended

    monkeypatch.setattr(sweep.os, "setpgrp", lambda: None)
    monkeypatch.setattr(sweep, "_end_with_parent", lambda connection: None)
    monkeypatch.setattr(sweep.os, "_exit", end)
    monkeypatch.setattr(experiment, "run_case", late)
    with pytest.raises(Ended):
        sweep._worker_main(connection, experiment.__name__)
    text = "TimeoutError: nsys was stopped: the capture took longer than 280 s"
    assert connection.sent[-1] == ("failed", "timeout", text)


# ---- the report, on invented records -------------------------------------------------------------------------------

SIZES, CONTEXTS = ("small", "2.7b"), (512, 1024, 2048)
GEMM, SOFTMAX, ADD = "nvjet_tst_128x256", "cunn_SoftMaxForward", "vectorized_elementwise_kernel[AddFunctor]"
BRIEF_ADD = "vectorized_elementwise[AddFunctor]"


def tables_of(size: str, context: int, precision: str, attention: str, phase: str, softmax: float) -> dict:
    """Tables of a step in which forward is 600 µs of matmul, 200 of softmax (times `softmax`) and 200 of additions a
    thousand tokens, backward twice that, the optimizer 100."""
    unit = context / 1000
    times = {GEMM: ("matmul", 600.0), SOFTMAX: ("softmax", 200.0 * softmax), ADD: ("elementwise", 200.0)}
    if attention != "eager":
        times[SOFTMAX] = ("attention", 100.0)
    scale = {"inference": {"inference": 1.0}}.get(phase, {"forward": 1.0, "backward": 2.0})
    rows = [
        {
            "phase": part,
            "short_name": name,
            "kernel_class": kernel_class,
            "launches": 10,
            "total_us": us * unit * factor,
        }
        for part, factor in scale.items()
        for name, (kernel_class, us) in times.items()
    ]
    if phase == "train_step":
        adam = {"phase": "optimizer", "short_name": "FusedAdam", "kernel_class": "optimizer", "launches": 1}
        rows.append({**adam, "total_us": 100.0 * unit})
    frame = pd.DataFrame(rows)
    kernels = frame.assign(mean_us=1.0, median_us=1.0, min_us=1.0, max_us=1.0, std_us=None)
    if phase != "inference":
        whole = frame.groupby(["short_name", "kernel_class"], as_index=False)[["launches", "total_us"]].sum()
        kernels = pd.concat([whole.assign(phase="step"), kernels])
    core = f"{'inference' if phase == 'inference' else 'forward'}/block/attention/core"
    ranges = [
        (f"{core}/scores", "matmul", 50.0 * unit**2), (f"{core}/value product", "matmul", 50.0 * unit**2),
        (f"{core}/softmax", "softmax", 200.0 * softmax * unit**2), (f"{core}/mask", "elementwise", 100.0 * unit**2),
    ] if attention == "eager" else [(core, "attention", 100.0 * unit**2)]  # fmt: skip
    ranges += [(core.removesuffix("/core"), "matmul", 200.0 * unit), (core.split("/")[0], "matmul", 400.0 * unit)]
    as_columns = {name: [None if pd.isna(v) else v for v in column] for name, column in kernels.items()}
    tables = {
        "kernels": as_columns,
        "classes": frame.drop(columns="short_name").to_dict("list"),
        "ranges": pd.DataFrame(ranges, columns=["path", "kernel_class", "total_us"]).assign(launches=1).to_dict("list"),
    }
    if (size, context, phase) == ("small", 512, "train_step"):
        tables["timeline"] = timeline()
    return tables


def timeline() -> dict:
    launches = [(10.0 * n, 8.0, n % 5, 7, 1 + n // 8, (n % 8) // 2 if n < 16 else -1) for n in range(20)]
    names = ("start_us", "duration_us", "kernel_class", "stream", "phase", "block")
    columns = dict(zip(names, map(list, zip(*launches, strict=True)), strict=True))
    return {"class_names": list(profiling.CLASSES), "phase_names": list(experiment.STEP_PHASES), **columns}


def record(size, context, precision, attention, phase, *, softmax=1.0, **changes) -> Record:
    unit = context / 1000
    passes = {"inference": {"inference": 1.0}}.get(phase, {"forward": 1.0, "backward": 2.0, "optimizer": 0.1})
    metrics = {
        "num_launches": 5000, "num_casts": 0 if precision == "fp32" else 500, "issued_ms": unit, "done_ms": 4 * unit,
        "capture_kernel_ms": 100.0, "capture_in_ranges_ms": 60.0, "capture_outside_us": 40_000.0,
    }  # fmt: skip
    for name, factor in {**passes, "step": sum(passes.values())}.items():
        metrics |= {
            f"{name}_kernel_ms": factor * unit,
            f"{name}_projected_ms": factor * unit * 1.02,
            f"{name}_idle_fraction": 0.02,
        }
    base = {
        "notebook": NOTEBOOK, "section": "profiles", "phase": phase, "status": "ok", "device": "nvidia-h200",
        "case": parameters(size, context, precision, attention), "measurement_version": 1,
        "metrics": {**metrics, **changes.pop("metrics", {})},
        "observed": {"profiler": "nsys", "profiler_version": "2025.3.1",
                     "tables": tables_of(size, context, precision, attention, phase, softmax)},
    }  # fmt: skip
    return Record(**{**base, **changes})


@functools.cache
def profiles(change=None) -> pd.DataFrame:
    """The frame of invented records; `change` gives the records of a case and phase other contents."""
    records = [
        record(*key, **(change(*key) or {} if change else {}))
        for size in SIZES
        for context in CONTEXTS
        for precision, attention in (("fp32", "eager"), ("bf16", "eager"), ("bf16", "auto"))
        for key in ((size, context, precision, attention, phase) for phase in ("inference", "train_step"))
    ]
    frame = to_frame(records)
    frame.attrs |= {"device": "a device", "device_kind": "cuda"}
    return frame


def steps(factor: float = 1.0) -> pd.DataFrame:
    """Notebook 01's times: 1 ms forward a thousand tokens, times `factor`."""
    rows = []
    for size in SIZES:
        for context in CONTEXTS:
            for precision in ("fp32", "bf16"):
                for phase, units in (("inference", 1.0), ("forward", 1.0), ("train_step", 3.1)):
                    rows.append(
                        {"status": "ok", "compile": "none", "size": size, "context": context, "precision": precision,
                         "phase": phase, "median_ms": factor * units * context / 1000,
                         "host_median_ms": units * context / 1000}
                    )  # fmt: skip
    return pd.DataFrame(rows)


def text(sentences) -> str:
    return "\n".join(sentences)


def test_shares_are_those_of_the_tables():
    found = report.class_times(profiles()).set_index(["size", "context", "precision", "attention", "view"])
    case = found.loc[("small", 512, "fp32", "eager")]
    share = case[case["kernel_class"] == "matmul"]["share"]
    assert share["inference"] == share["forward"] == share["backward"] == pytest.approx(0.6)
    assert share["train_step"] == pytest.approx(1800 / 3100)
    assert share["forward_backward"] == pytest.approx(0.6)
    assert case.groupby("view")["share"].sum().to_list() == pytest.approx([1.0] * 5)


def test_the_sum_of_the_ranges_is_held_against_the_captures_total():
    sentences = text(report.findings_captures(profiles()))
    assert "36 steps of a model were captured by Nsight Systems." in sentences
    assert "in ranges and outside of them add up to the captures' own total: they differ by at most 0" in sentences

    def lose(size, context, precision, attention, phase):
        if (size, context, phase) == ("small", 512, "inference"):
            return {"metrics": {"capture_in_ranges_ms": 59.0}}

    assert "do **not** add up to" in text(report.findings_captures(profiles(lose)))


def test_an_unclassed_kernel_is_reported_with_its_share():
    def rename(size, context, precision, attention, phase):
        if (size, context, precision, phase) == ("2.7b", 2048, "fp32", "train_step"):
            changed = record(size, context, precision, attention, phase).observed
            for table in ("kernels", "classes"):
                classes = changed["tables"][table]["kernel_class"]
                changed["tables"][table]["kernel_class"] = ["other" if c == "elementwise" else c for c in classes]
            return {"observed": changed}

    assert "no class for 0 % of" in text(report.findings_captures(profiles()))
    sentences = text(report.findings_captures(profiles(rename)))
    assert "no class for 0 % to 19 % of the kernel time of a training step (most for 2.7b at 2048 in fp32)" in sentences
    assert f"`{BRIEF_ADD}`" in sentences


def test_the_profiler_is_held_against_the_timer():
    frame = profiles()
    sentences = text(report.findings_timer(frame, steps()))
    assert "agrees with notebook 01's timer within 5.0 % in 12 of 12 cases" in sentences
    assert "At 2.7b the difference is 2.0 % over 6 cases, 6 of them within 5.0 %." in sentences
    assert "In the other" not in sentences
    off = text(report.findings_timer(frame, steps(0.9)))
    assert "within 5.0 % in 0 of 12 cases" in off and "differ by 13 %" in off
    table = report.table_timer(frame, steps(), "fp32")
    assert set(table["phase"]) == {"inference", "forward", "training step"}
    assert table.iloc[0]["projected / timer"] == "1.02×" and table.iloc[0]["host, profiled / not"] == "4.00×"
    assert report.findings_timer(frame, steps().iloc[:0]) == []


def test_a_launch_bound_case_is_named_and_explained():
    def wait(size, context, precision, attention, phase):
        if (size, context, precision, attention) == ("small", 512, "bf16", "eager"):
            return {"metrics": {"forward_idle_fraction": 0.4, "step_idle_fraction": 0.3, "forward_projected_ms": 0.9}}

    frame = profiles(wait)
    assert "In the other 1 case the host sets the pace" in text(report.findings_timer(frame, steps()))
    assert "1 of 18 steps are launch-bound" in text(report.findings_matmul_share(frame))
    assert "small at 512 in bf16" in text(report.findings_matmul_share(frame))
    before = text(report.findings_matmul_share(profiles()))
    assert "the device is never idle for 10 % of it" in before


def test_the_kernel_with_most_time_and_whether_it_is_the_same():
    frame = profiles()
    sentences = text(report.findings_top_kernels(frame))
    assert f"is of class matmul; it holds 60 % of the time and is most often `{GEMM}` (6 of 6 cases)" in sentences
    assert "It is the same kernel in the forward pass and the backward pass in 18 of 18 cases." in sentences

    def slow(size, context, precision, attention, phase):
        return {"softmax": 10.0} if (size, context, precision) == ("small", 512, "fp32") else None

    sentences = text(report.findings_top_kernels(profiles(slow)))
    assert "of class matmul (5) and softmax (1)" in sentences
    best = report.table_top_kernels(frame, "fp32")
    assert set(best["phase"]) == {"forward", "backward", "training step"}
    only = report.table_top_kernels(frame[frame["phase"] == "inference"], "fp32")
    assert (
        set(only["phase"]) == {"inference"}
        and len(only) == (frame[frame["precision"] == "fp32"]["phase"] == "inference").sum()
    )
    row = best[(best["phase"] == "training step") & (best["size"] == "small") & (best["context"] == 512)].iloc[0]
    assert (row["kernel"], row["share"], row["launches"], row["std"]) == (f"`{GEMM}`", "58 %", "20", "–")


def test_kernels_keep_names_of_their_own():
    xmma = "sm80_xmma_gemm_f32f32_f32f32_f32_{}_n_tilesize{}_stage3_warpsize2x2x1_ffma_aligna4_alignc"
    names = [xmma.format("nn", "64x64x8"), xmma.format("nn", "64x128x8"), xmma.format("tn", "64x64x8"), GEMM, ADD]
    briefs = report.brief_names([*names, *names])
    assert briefs[names[0]] == "sm80_xmma_f32_nn_n_64x64x8_3_2x2x1" and briefs[ADD] == BRIEF_ADD
    assert briefs[GEMM] == GEMM and len(set(briefs.values())) == len(names)
    alike = [f"{names[0]}4", f"{names[0]}2"]
    assert report.brief_names(alike) == {name: name for name in alike}


def test_what_is_no_matmul_in_forward():
    sentences = text(report.findings_not_matmul(profiles()))
    assert "In fp32, kernels that are no matmul take 40 % of a forward pass with eager attention" in sentences
    assert "elementwise 20 % and softmax 20 %" in sentences
    assert f"`{SOFTMAX}`" in report.table_not_matmul(profiles(), "fp32")["kernel"].tolist()
    assert f"`{GEMM}`" not in report.table_not_matmul(profiles(), "fp32")["kernel"].tolist()


def test_how_the_matmul_share_moves_is_computed():
    sentences = text(report.findings_matmul_share(profiles()))
    assert "In fp32 the whole step's share is about the same as inference's: it differs by −1.9" in sentences
    assert "In fp32 inference's share stays about the same with the context: from 512 to 2048" in sentences
    assert "In bf16, 500 launches of a step copy a tensor to another dtype, 10 % of all." in sentences
    assert "In fp32, 0 launches" not in sentences

    def grow(size, context, precision, attention, phase):
        return {"softmax": context / 512}

    sentences = text(report.findings_matmul_share(profiles(grow)))
    assert "In fp32 inference's share falls with the context" in sentences
    bias = {"inference": 0.5}

    def lighter(size, context, precision, attention, phase):
        return {"softmax": bias.get(phase, 2.0)}

    assert "the whole step's share is lower than inference's" in text(report.findings_matmul_share(profiles(lighter)))
    table = report.table_matmul_share(profiles())
    assert list(table["attention"][:3]) == ["eager", "eager", "FlashAttention"]
    assert set(table["launches"]) == {"5,000"} and set(table["idle"]) == {"2.0 %"}


def test_softmax_is_compared_with_the_products_by_time_flops_and_bytes():
    frame = profiles()
    found = report.attention_times(frame).set_index(["size", "context", "precision", "attention"])
    row = found.loc[("small", 1024, "fp32", "eager")]
    unit = 1.024
    assert row["matmul_us"] == pytest.approx(100 * unit**2) and row["softmax_us"] == pytest.approx(200 * unit**2)
    assert row["other_us"] == pytest.approx(100 * unit**2) and row["core_us"] == pytest.approx(400 * unit**2)
    assert row["block_us"] == pytest.approx(400 * unit**2 + 200 * unit)
    assert row["forward_us"] == pytest.approx(400 * unit**2 + 600 * unit)
    assert row["time_ratio"] == pytest.approx(2.0) and row["flop_ratio"] == 5 / (4 * 64)
    # Softmax reads and writes the scores; the products write and read them, and move q, k, v and the output.
    assert row["bytes_ratio"] == pytest.approx(2 * 1024 / (4 * 64 + 2 * 1024))
    assert report.bytes_ratio("small", 1024, "bf16") == pytest.approx(2 * row["bytes_ratio"])
    sentences = text(report.findings_attention(frame))
    assert "it takes longer than they do in 6 of 6 cases" in sentences and "bytes are the nearer account" in sentences
    assert "softmax's time grows as (context)^2.00 and the two products' as (context)^2.00" in sentences
    assert "FlashAttention in bf16 takes 0.250× the kernel time" in sentences

    def fast(size, context, precision, attention, phase):
        return {"softmax": 0.01}

    sentences = text(report.findings_attention(profiles(fast)))
    assert "in 0 of 6 cases" in sentences and "FLOPs are the nearer account" in sentences
    assert set(report.table_attention(frame)["softmax / products: time"]) == {"2.00×", "–"}


def test_published_figures_stand_beside_ours():
    frame = profiles()
    table = report.table_published(frame)
    row = table[(table["GPU"] == "RTX 5090") & (table["size"] == "small") & (table["context"] == 512)]
    by_quantity = row.set_index("quantity")[["published", "ours"]].to_dict("index")
    assert by_quantity["matmul share, inference"] == {"published": "80.0 %", "ours": "60.0 %"}
    assert by_quantity["matmul share, training step"] == {"published": "53.5 %", "ours": "58.1 %"}
    assert by_quantity["softmax / products of attention"] == {"published": "0.500×", "ours": "2.00×"}
    sentences = text(report.findings_published(frame, steps()))
    assert "host range of small's forward pass that was published for the A100-SXM4-40GB grows 1.01×" in sentences
    assert "ours grows 2.00×" in sentences


def test_what_was_not_captured_is_in_the_table_with_its_reason():
    def fail(size, context, precision, attention, phase):
        if (size, context, phase) == ("2.7b", 2048, "train_step"):
            if precision == "fp32":
                return {"status": "skipped", "reason": "needs at least 192 GB by its closed form"}
            reason = "TimeoutError: nsys was stopped: the capture took longer than 280 s"
            return {"status": "timeout", "reason": reason}

    frame = profiles(fail)
    table = report.table_captures(frame).set_index("captured by")
    assert table.loc["Nsight Systems 2025.3.1", "steps"] == 33
    assert table.loc["none (skipped)", "reason"].startswith("needs at least 192 GB")
    assert "2 steps could not be captured: TimeoutError: nsys was stopped" in text(report.findings_captures(frame))
    shares = report.table_matmul_share(frame)
    last = shares[(shares["size"] == "2.7b") & (shares["context"] == 2048) & (shares["precision"] == "fp32")].iloc[0]
    assert last["inference"] == "60 %" and last["training step"] == "–" and last["launches"] == "–"


def test_figures_follow_the_records_and_are_the_same_bytes_twice():
    frame = profiles()
    changed = profiles(lambda *key: {"softmax": 3.0})
    makers = {
        "classes": lambda f: report.figure_classes(f, "fp32"),
        "top kernels": report.figure_top_kernels,
        "softmax": report.figure_softmax,
    }
    drawn = {name: figures.svg(make(frame)) for name, make in makers.items()}
    for name, make in makers.items():
        assert drawn[name] != figures.svg(make(changed)), name
    assert drawn["softmax"] == figures.svg(report.figure_softmax(frame))
    one = report.figure_timeline(frame, "bf16", "auto")
    assert figures.svg(one) == figures.svg(report.figure_timeline(frame, "bf16", "auto"))
    whole, closer = one.axes
    assert [label.get_text() for label in whole.get_yticklabels()] == ["kernels", "phase", "block"]
    assert whole.get_xlim()[1] == pytest.approx(0.198) and closer.get_xlim()[1] < whole.get_xlim()[1]
    assert report.figure_timeline(frame[frame["context"] > 512], "fp32") is None


def test_without_records_every_section_says_so(tmp_path):
    frame = Chapter(NOTEBOOK, device="abacus", output=str(tmp_path)).records("profiles")
    arguments = {
        "table_timer": (frame, frame, "fp32"),
        "findings_timer": (frame, frame),
        "findings_published": (frame, frame),
        "table_not_matmul": (frame, "fp32"),
        "figure_classes": (frame, "fp32"),
        "figure_timeline": (frame, "fp32"),
    }
    for name in dir(report):
        if name.startswith(("table_", "findings_")):
            assert len(getattr(report, name)(*arguments.get(name, (frame,)))) == 0, name
        elif name.startswith("figure_"):
            assert getattr(report, name)(*arguments.get(name, (frame,))) is None, name


def test_with_inference_alone_every_section_renders():
    """The first records of a run, before any training step."""
    frame = profiles()
    frame = frame[(frame["phase"] == "inference") & (frame["size"] == "small")].reset_index(drop=True)
    for make in (report.table_captures, report.table_top_kernels, report.table_matmul_share, report.table_attention):
        assert len(make(frame))
    for make in (report.findings_captures, report.findings_matmul_share, report.findings_attention):
        assert make(frame)
    assert report.findings_top_kernels(frame) == [] and report.figure_top_kernels(frame) is None
    assert report.figure_classes(frame, "fp32") is not None and report.findings_timer(frame, steps())


# ---- the notebook on this machine ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """The notebook executed here in the smoke profile, with a canary in the environment."""
    output = tmp_path_factory.mktemp("figures")
    slug = hardware.detect().slug
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LABKIT_CANARY", CANARY)
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        values = {"device": slug, "measure": True, "profile": "smoke", "output": str(output), "save_figures": True}
        executed = notebooks.execute(NOTEBOOK, values)
    return output / slug, executed


@pytest.mark.slow
def test_smoke_captures_every_case_and_writes_figures(measured):
    folder, _ = measured
    records = RecordStore(folder / "records" / f"{NOTEBOOK}.jsonl").load()
    assert {record.status for record in records} == {"ok"} and len(records) == 2 * len(cases("smoke", "cpu"))
    assert {record.observed["profiler"] for record in records} == {"kineto cpu"}
    done = json.loads((folder / "records" / f"{NOTEBOOK}.done.json").read_text(encoding="utf-8"))
    assert done["num_missing"] == 0
    assert {path.name for path in folder.glob("02_*.svg")} == {
        "02_top_kernels.svg", "02_classes_fp32.svg", "02_classes_bf16.svg", "02_timeline_fp32.svg", "02_softmax.svg",
    }  # fmt: skip
    assert max(map(len, (folder / "records" / f"{NOTEBOOK}.jsonl").read_text().splitlines())) < 1_000_000


@pytest.mark.slow
def test_smoke_adds_up_and_says_what_it_used(measured):
    folder, executed = measured
    frame = Chapter(NOTEBOOK, device=folder.name, output=str(folder.parent)).records("profiles")
    total = frame["capture_in_ranges_ms"] + frame["capture_outside_us"] / 1e3
    assert ((total / frame["capture_kernel_ms"] - 1).abs() < 1e-3).all()
    shown = "\n".join(
        output["data"].get("text/markdown", "")
        for cell in executed.cells
        if cell.cell_type == "code"
        for output in cell.outputs
        if "data" in output
    )
    assert "captured by torch.profiler, CPU operators" in shown and "add up to the captures' own total" in shown
    found = report.attention_times(frame)
    assert (found[found["attention"] == "eager"][["matmul_us", "softmax_us", "other_us"]] > 0).all(axis=None)


@pytest.mark.slow
def test_the_environment_is_in_no_file(measured):
    folder, executed = measured
    for path in folder.rglob("*"):
        if path.is_file():
            assert CANARY.encode() not in path.read_bytes(), path
    assert CANARY not in json.dumps(executed)
    records = (folder / "records" / f"{NOTEBOOK}.jsonl").read_text(encoding="utf-8")
    assert os.environ.get("HOME", "/root") + "/" not in records and "/tmp/" not in records


# ---- on a GPU -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gpu_capture():
    """Two cases of the small model in one capture of nsys; skipped where there is no GPU or no nsys."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    nsys = Nsys.find()
    if nsys is None:
        pytest.skip("needs nsys")
    group = [
        (parameters("small", 512, precision, attention), ("inference", "train_step"))
        for precision, attention in (("fp32", "eager"), ("bf16", "auto"))
    ]
    return experiment._capture_group(nsys, hardware.detect(), group, 300.0)


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
        classes = pd.DataFrame(found.observed["tables"]["classes"]).groupby("kernel_class")["total_us"].sum()
        assert classes.get("other", 0) < 0.02 * classes.sum()
        if "fp32" in key:  # in bf16 at this size the elementwise kernels may take longer than the matmuls
            assert classes.idxmax() == "matmul"
    step = measured[experiment._key(parameters("small", 512), "train_step")].metrics
    assert step["backward_kernel_ms"] > 1.5 * step["forward_kernel_ms"], "backward kernels reach their range"


@pytest.mark.gpu
def test_torch_profiler_gives_the_same_table_as_nsys(gpu_capture):
    case = dataclasses.replace(cases("full", "cuda", sizes=["small"], contexts=[512])[0])
    with experiment.workload(hardware.detect(), case) as workload:
        ours = experiment._capture_here(workload, case, "train_step")
    theirs = gpu_capture[experiment._key(case.parameters, "train_step")]()
    assert ours.observed["profiler"] == "kineto"
    assert ours.metrics["num_launches"] == theirs.metrics["num_launches"]
    for phase in ("forward", "backward", "optimizer"):
        assert ours.metrics[f"{phase}_kernel_ms"] == pytest.approx(theirs.metrics[f"{phase}_kernel_ms"], rel=0.05)
