"""Notebook 07: its cases, what becomes of ranks that fail, and whose records it shows."""

import math

import pandas as pd
import pytest
import torch
from chapters import CPU, H200

from labkit import device
from labkit.configs import FIGURES, REFERENCE_DEVICE
from labkit.experiments import distributed, shared_step
from labkit.experiments.sweep import Case, Skip
from labkit.parallel.launch import RankError
from labkit.records import folder_of

STEP = {"size": "nano", "context": 32, "precision": "fp32", "compile": "none", "batch": 2}


def test_cases_run_what_the_machine_has_gpus_for(monkeypatch):
    for cores, expected in ((1, [2]), (3, [2]), (4, [2, 4])):
        monkeypatch.setattr(distributed, "num_usable_cores", lambda cores=cores: cores)
        smoke = distributed.cases("smoke", "cpu")
        assert [case.parameters for case in smoke if case.section == "collectives"] == [
            {"world_size": n, "transport": "gloo"} for n in expected
        ]
        (step,) = (case for case in smoke if case.section == "steps")
        assert step.parameters["world_size"] == expected[-1] and not [
            way for way in step.phases if "copy" in way
        ]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    full = distributed.cases("full", "cuda", sizes=["2.7b"])
    assert {case.parameters.get("world_size") for case in full if case.section != "ceilings"} == {
        2,
        4,
    }
    # Four sequences of each rank, and four of all together.
    assert {case.parameters["batch"] for case in full if case.section == "steps"} == {4, 1}
    assert all(len(case.phases) == len(set(case.phases)) for case in full)


def test_more_ranks_than_gpus_are_skipped(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    (case, *_) = (
        case for case in distributed.cases("full", "cuda") if case.section == "collectives"
    )
    with pytest.raises(Skip, match="2 ranks need 2 GPUs; there are 1"):
        list(distributed._run_collectives(H200, case, {}))


@pytest.mark.parametrize(
    ("backend", "method", "issue_ms"), [("nccl", "queued", 0.048), ("gloo", "host", None)]
)
def test_a_collective_of_gpus_is_in_device_time_and_its_issuing_beside(
    monkeypatch, backend, method, issue_ms
):
    monkeypatch.setattr(
        distributed, "_observed", lambda backend, **more: {"backend": backend, **more}
    )
    found = {
        "times_s": [1e-5, 2e-5, 3e-5],
        "seconds": 2e-5,
        "issue_s": 4.8e-5,
        "num_bytes": 8,
        "num_wrong": 0,
        "algorithm_gbs": 1.0,
        "bus_gbs": 1.0,
        "operation": "all_reduce",
        "dtype": "float32",
        "world_size": 2,
        "backend": backend,
    }
    case = Case(
        "collectives", {"world_size": 2, "transport": backend}, ("all_reduce float32 8",), 60.0
    )
    result = distributed._collective(case, [found], {})
    assert (result.timer["method"], result.metrics["median_ms"]) == (method, pytest.approx(0.02))
    assert result.metrics.get("launch_median_ms") == (issue_ms and pytest.approx(issue_ms))


def seen(way, loss, alone=9.0, naive=8.0, samples=(2.0, 2.0), **more):
    case = {name: value for name, value in STEP.items()}
    return {
        "way": way,
        "samples_ms": list(samples),
        "loss": loss,
        "losses": {"alone": alone, "naive": naive},
        "memory": {},
        "profile": {},
        "spans": {},
        "waits_ms": [],
        "backend": "gloo",
        "case": case,
        "observed": {},
    } | more


def measured(monkeypatch, launch, phases=("alone", "naive", "fsdp")):
    """What each phase gives where `launch` stands for the ranks: a Measured, or the error."""
    monkeypatch.setattr(distributed, "launch", launch)
    results = {}
    case = Case("steps", {**STEP, "world_size": 2}, phases, 60.0)
    for phase, run in distributed._run_steps(CPU, case, {}):
        try:
            results[phase] = run()
        except Exception as error:
            results[phase] = error
    return results


def test_a_step_lasts_as_long_as_on_the_slowest_rank(monkeypatch):
    ranks = [
        [("naive", seen("naive", 8.0, samples=(2.0, 5.0, 3.0)))],
        [("naive", seen("naive", 8.0, samples=(4.0, 1.0, 3.0)))],
    ]
    result = measured(monkeypatch, lambda *_, **__: ranks, ("naive",))["naive"]
    assert result.samples["step_ms"] == [4.0, 5.0, 3.0] and result.metrics["median_ms"] == 4.0
    assert result.case == {**STEP, "world_size": 2}


@pytest.mark.parametrize(
    ("way", "loss", "is_right"),
    [
        ("alone", 9.0, True),
        ("alone", 8.0, False),
        ("fsdp", 8.0005, True),
        ("fsdp", 8.01, False),
        ("fsdp", math.nan, False),
    ],
)
def test_a_step_that_learns_something_else_has_no_time(monkeypatch, way, loss, is_right):
    result = measured(monkeypatch, lambda *_, **__: [[(way, seen(way, loss))]] * 2, (way,))[way]
    assert isinstance(result, ValueError) != is_right
    assert is_right or f"loss {loss}" in str(result)


@pytest.mark.parametrize(
    ("text", "kind"),
    [("ValueError: odd", RuntimeError), ("torch.OutOfMemoryError: CUDA", torch.OutOfMemoryError)],
)
def test_what_all_ranks_finished_before_a_failure_counts(monkeypatch, text, kind):
    calls = []

    def launch(*arguments, **options):
        calls.append(options)
        early, late = ("alone", seen("alone", 9.0)), ("naive", seen("naive", 8.0))
        raise RankError(
            f"f: rank 1 of 2 failed first (exit status 1)\nTraceback\n{text}\nrank 0 was at:\nx",
            1,
            [[early, late], [early]],
        )

    results = measured(monkeypatch, launch)
    assert len(calls) == 1 and calls[0]["timeout_s"] < 60
    assert results["alone"].metrics["loss"] == 9.0
    for phase in ("naive", "fsdp"):
        assert (
            type(results[phase]) is kind
            and "rank 1 of 2 failed first" in str(results[phase])
            and text in str(results[phase])
        )


@pytest.mark.slow
def test_ranks_measure_steps():
    steps = Case(
        "steps",
        {**STEP, "world_size": 2},
        ("alone", "sharded optimizer", "fsdp"),
        120.0,
        time_limit_s=0.01,
    )
    results = {way: run() for way, run in distributed.run_case(steps, {})}
    whole, state, share = (results[way].metrics for way in steps.phases)
    assert all(result.case == steps.parameters for result in results.values())
    assert state["state_bytes"] == pytest.approx(whole["state_bytes"] / 2, rel=0.01)
    assert share["parameter_bytes"] == pytest.approx(whole["parameter_bytes"] / 2, rel=0.01)
    assert share["loss"] == pytest.approx(state["loss"], abs=1e-6) != whole["loss"]


def test_intervals_without_visible_gaps_are_one():
    table = pd.DataFrame(
        {"start_ns": [0, 1_050_000, 5_000_000], "end_ns": [1_000_000, 2_000_000, 6_000_000]}
    )
    assert shared_step.merged("x", table) == {"x_begin_ms": [0.0, 5.0], "x_end_ms": [2.0, 6.0]}


# --- devices ---


def test_records_of_several_devices_stand_in_for_those_of_one(tmp_path):
    for name in ("gpu", "2x-gpu", "10x-gpu", "2x-other", "x-gpu"):
        (tmp_path / name / "records").mkdir(parents=True)
        (tmp_path / name / "records" / "07_x.jsonl").touch()
    assert folder_of(tmp_path, "gpu", "07_x").name == "gpu"
    (tmp_path / "gpu" / "records" / "07_x.jsonl").unlink()
    assert folder_of(tmp_path, "gpu", "07_x").name == "10x-gpu"
    assert folder_of(tmp_path, "other", "07_x").name == "2x-other"
    assert folder_of(tmp_path, "none", "07_x").name == "none"
    assert folder_of(FIGURES, REFERENCE_DEVICE, "01_benchmarking").name == REFERENCE_DEVICE


def test_several_gpus_are_one_device_for_notebook_07_alone(monkeypatch):
    monkeypatch.setattr(device, "detect", lambda: H200)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert device.measured_by("07_distributed").slug == "2x-nvidia-h200"
    assert device.measured_by("01_benchmarking") == H200
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert device.measured_by("07_distributed") == H200
