"""Notebook 07: its cases, what becomes of ranks that fail, and whose records it shows."""

import math

import pytest
import torch
from chapters import CPU, H200, store_of

from labkit import device
from labkit.experiments import distributed
from labkit.experiments.sweep import Case, Skip
from labkit.parallel.launch import RankError
from labkit.records import folder_of

STEP = {"size": "nano", "context": 32, "precision": "fp32", "compile": "none", "batch": 2}


@pytest.mark.parametrize(("transport", "method"), [("copy", "queued"), ("gloo", "host")])
def test_a_collective_of_gpus_is_in_device_time_and_its_issuing_beside(transport, method):
    found = {"times_s": [1e-5, 2e-5, 3e-5], "issue_s": 4.8e-5, "world_size": 2, "num_wrong": 0}
    found |= dict.fromkeys(("num_bytes", "bus_gbs"), 1.0)
    case = Case("collectives", {"world_size": 2, "transport": transport}, ("all_reduce",), 60.0)
    result = distributed._collective(case, [found])
    assert (result.timer["method"], result.metrics["median_ms"]) == (method, pytest.approx(0.02))
    issued = pytest.approx(0.048) if transport == "copy" else None
    assert result.metrics.get("launch_median_ms") == issued
    with pytest.raises(ValueError, match="3 wrong elements"):
        distributed._collective(case, [found | {"num_wrong": 3}])


def seen(way, loss, samples=(2.0, 2.0)):
    return {
        **{name: {} for name in ("memory", "profile", "spans", "observed")},
        "way": way,
        "samples_ms": samples,
        "case": STEP,
        "loss": loss,
        "losses": {"alone": 9.0, "naive": 8.0},
    }


def measured(monkeypatch, launch, *phases):
    """What each phase gives where `launch` stands for the ranks: a Measured, or the error."""
    monkeypatch.setattr(distributed, "launch", launch)
    results = {}
    case = Case("steps", {**STEP, "world_size": 2}, phases, 60.0)
    for phase, run in distributed._run_steps(CPU, case):
        try:
            results[phase] = run()
        except Exception as error:
            results[phase] = error
    return results


def test_a_step_lasts_as_long_as_on_the_slowest_rank(monkeypatch):
    times = [(2.0, 5.0, 3.0), (4.0, 1.0, 3.0)]
    ranks = [[("naive", seen("naive", 8.0, samples))] for samples in times]
    result = measured(monkeypatch, lambda *_, **__: ranks, "naive")["naive"]
    assert result.samples["step_ms"] == [4.0, 5.0, 3.0] and result.metrics["median_ms"] == 4.0
    assert result.case == {**STEP, "world_size": 2}


@pytest.mark.parametrize(("way", "loss"), [("alone", 8.0), ("fsdp", 8.01), ("fsdp", math.nan)])
def test_a_step_that_learns_something_else_has_no_time(monkeypatch, way, loss):
    result = measured(monkeypatch, lambda *_, **__: [[(way, seen(way, loss))]] * 2, way)[way]
    assert isinstance(result, ValueError) and f"loss {loss}" in str(result)


@pytest.mark.parametrize(
    ("text", "kind"),
    [("ValueError: odd", RuntimeError), ("torch.OutOfMemoryError: CUDA", torch.OutOfMemoryError)],
)
def test_what_all_ranks_finished_before_a_failure_counts(monkeypatch, text, kind):
    launches = []

    def launch(*arguments, **options):
        launches.append(options["timeout_s"])
        early, late = ("alone", seen("alone", 9.0)), ("naive", seen("naive", 8.0))
        message = f"f: rank 1 of 2 failed first (exit status 1)\nTraceback\n{text}\nrank 0 was at:"
        raise RankError(message, [[early, late], [early]])

    done, *failed = measured(monkeypatch, launch, "alone", "naive", "fsdp").values()
    assert launches == [30] and done.metrics["loss"] == 9.0
    for error in failed:
        assert type(error) is kind
        assert "rank 1 of 2 failed first" in str(error) and text in str(error)


@pytest.mark.parametrize(
    ("machine", "reason"),
    [
        ({"device_count": lambda: 1}, "2 ranks need 2 GPUs; there are 1"),
        ({"get_device_name": "GPU {}".format}, "GPU 0 and GPU 1; accepted: GPUs of one kind"),
        ({"can_device_access_peer": lambda *_: False}, "GPU 0 cannot access the memory of GPU 1"),
        ({}, "this torch is built without NCCL"),
    ],
)
def test_gpus_that_cannot_share_a_step_are_told_in_one_line(monkeypatch, machine, reason):
    usual = {"device_count": lambda: 2, "get_device_name": lambda _: "GPU"}
    for name, value in (usual | machine).items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: "NCCL" not in reason)
    case = Case("steps", {**STEP, "world_size": 2}, ("fsdp copy",), 60.0)
    with pytest.raises(Skip, match=reason):
        next(distributed._run_steps(H200, case))[1]()


def test_the_step_of_8b_is_run_only_where_it_is_asked_for():
    for workload, has_8b, has_steps in ((), False, True), (["8b"], True, False):
        planned = distributed.cases("full", "cuda", workload=workload)
        sections = {case.section for case in planned}
        assert ("8b" in sections, "steps" in sections) == (has_8b, has_steps)


@pytest.mark.slow
def test_ranks_measure_steps():
    ways = ("alone", "sharded optimizer", "fsdp")
    steps = Case("steps", {**STEP, "world_size": 2}, ways, 120.0, time_limit_s=0.01)
    results = {way: run() for way, run in distributed.run_case(steps)}
    whole, state, share = (results[way].metrics for way in ways)
    assert all(result.case == steps.parameters for result in results.values())
    assert share["loss"] == pytest.approx(state["loss"], abs=1e-6) != whole["loss"]
    assert 0 == whole["exposed_us"] < share["exposed_us"] <= share["communication_us"]
    assert results["fsdp"].observed["transport"].startswith("gloo:")


def test_records_of_several_devices_stand_in_for_those_of_one(tmp_path, monkeypatch):
    for name, num_records in {"2x-gpu": 3, "10x-gpu": 2, "2x-other": 9}.items():
        store_of(tmp_path / name, "07_x").path.write_text("{}\n" * num_records)
    assert folder_of(tmp_path, "gpu", "07_x").name == "2x-gpu"
    assert folder_of(tmp_path, "none", "07_x").name == "none"
    monkeypatch.setattr(device, "detect", lambda: H200)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert device.measured_by("07_distributed").slug == "2x-nvidia-h200"
