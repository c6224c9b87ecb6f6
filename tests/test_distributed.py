"""Notebook 07: its cases, what becomes of ranks that fail, and what its tables say of records."""

import math

import pandas as pd
import pytest
import torch
from chapters import CPU, H200

from labkit import hardware
from labkit.configs import FIGURES, REFERENCE_DEVICE, RequestError
from labkit.experiments import distributed, shared_step
from labkit.experiments.sweep import Case, Skip
from labkit.parallel.launch import RankError
from labkit.records import folder_of
from labkit.report import distributed as report
from labkit.report.chapter import Chapter

STEP = {"size": "nano", "context": 32, "precision": "fp32", "compile": "none", "batch": 2}


def test_cases_run_what_the_machine_has_gpus_for(monkeypatch):
    for cores, expected in ((1, [2]), (3, [2]), (4, [2, 4])):
        monkeypatch.setattr(distributed.hardware, "num_usable_cores", lambda cores=cores: cores)
        smoke = distributed.cases("smoke", "cpu")
        assert [case.parameters for case in smoke if case.section == "collectives"] == [
            {"world_size": n, "transport": "gloo"} for n in expected
        ]
        (step,) = (case for case in smoke if case.section == "steps")
        assert step.parameters["world_size"] == expected[-1] and not [way for way in step.phases if "copy" in way]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    full = distributed.cases("full", "cuda", sizes=["2.7b"])
    assert {case.parameters.get("world_size") for case in full if case.section != "ceilings"} == {2, 4}
    # Four sequences of each rank, and four of all together.
    assert {case.parameters["batch"] for case in full if case.section == "steps"} == {4, 1}
    assert all(len(case.phases) == len(set(case.phases)) for case in full)
    with pytest.raises(RequestError, match=r"number of ranks 3 is not in profile 'smoke'; accepted: 2, 4"):
        distributed.cases("smoke", "cpu", world_sizes=[3])


def test_more_ranks_than_gpus_are_skipped(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    (case, *_) = (case for case in distributed.cases("full", "cuda") if case.section == "collectives")
    with pytest.raises(Skip, match="2 ranks need 2 GPUs; there are 1"):
        list(distributed._collectives(H200, case, {}))


@pytest.mark.parametrize(("backend", "method", "issue_ms"), [("nccl", "queued", 0.048), ("gloo", "host", None)])
def test_a_collective_of_gpus_is_in_device_time_and_its_issuing_beside(monkeypatch, backend, method, issue_ms):
    monkeypatch.setattr(distributed, "_described", lambda case, backend, **more: {"backend": backend, **more})
    found = {"times_s": [1e-5, 2e-5, 3e-5], "seconds": 2e-5, "issue_s": 4.8e-5, "num_bytes": 8, "num_wrong": 0,
             "algorithm_gbs": 1.0, "bus_gbs": 1.0, "operation": "all_reduce", "dtype": "float32", "world_size": 2,
             "backend": backend}  # fmt: skip
    case = Case("collectives", {"world_size": 2, "transport": backend}, ("all_reduce float32 8",), 60.0)
    result = distributed._collective(case, [found], {})
    assert (result.timer["method"], result.metrics["median_ms"]) == (method, pytest.approx(0.02))
    assert result.metrics.get("launch_median_ms") == (issue_ms and pytest.approx(issue_ms))


def seen(way, loss, alone=9.0, naive=8.0, samples=(2.0, 2.0), **more):
    case = {name: value for name, value in STEP.items()}
    return {"way": way, "samples_ms": list(samples), "loss": loss, "losses": {"alone": alone, "naive": naive},
            "memory": {}, "profile": {}, "spans": {}, "waits_ms": [], "backend": "gloo", "case": case,
            "observed": {}} | more  # fmt: skip


def measured(monkeypatch, launch, phases=("alone", "naive", "fsdp")):
    """What each phase gives where `launch` stands for the ranks: a Measured, or the error."""
    monkeypatch.setattr(distributed, "launch", launch)
    results = {}
    case = Case("steps", {**STEP, "world_size": 2}, phases, 60.0)
    for phase, run in distributed._steps(CPU, case, {}):
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
    ("text", "kind"), [("ValueError: odd", RuntimeError), ("torch.OutOfMemoryError: CUDA", torch.OutOfMemoryError)]
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
    steps = Case("steps", {**STEP, "world_size": 2}, ("alone", "sharded optimizer", "fsdp"), 120.0, time_limit_s=0.01)
    results = {way: run() for way, run in distributed.run_case(steps, {})}
    whole, state, share = (results[way].metrics for way in steps.phases)
    assert all(result.case == steps.parameters for result in results.values())
    assert state["state_bytes"] == pytest.approx(whole["state_bytes"] / 2, rel=0.01)
    assert share["parameter_bytes"] == pytest.approx(whole["parameter_bytes"] / 2, rel=0.01)
    assert share["loss"] == pytest.approx(state["loss"], abs=1e-6) != whole["loss"]


def test_intervals_without_visible_gaps_are_one():
    table = pd.DataFrame({"start_ns": [0, 1_050_000, 5_000_000], "end_ns": [1_000_000, 2_000_000, 6_000_000]})
    assert shared_step._merged("x", table) == {"x_begin_ms": [0.0, 5.0], "x_end_ms": [2.0, 6.0]}


# --- report ---


def step(phase, median_ms, session="s", **more):
    row = {"section": "steps", "phase": phase, "status": "ok", "session": session, "median_ms": median_ms,
           "half_width_fraction": 0.0, "timer_method": "window", "samples": {}, "disturbed": False,
           "observed": {"num_parameters": 1000}, **STEP, "world_size": 2} | more  # fmt: skip
    return row


def frame(*rows):
    made = pd.DataFrame(rows)
    made.attrs |= {"device": "two of them", "device_kind": "cuda"}
    return made


def test_what_is_added_is_told_apart():
    rows = frame(
        step("alone", 100.0, compute_us=90_000.0),
        step("naive", 150.0, compute_us=92_000.0, exposed_us=40_000.0),
        step("flat", 140.0, session="another day"),
    )
    (naive,) = report.over_alone(rows).to_dict("records")
    assert (naive["phase"], naive["added_ms"], naive["added_fraction"]) == ("naive", 50.0, pytest.approx(1 / 3))
    assert (naive["shows_ms"], naive["contention_ms"], naive["rest_ms"]) == (40.0, 2.0, 8.0)
    table = report.table_steps(rows).set_index("way")
    assert list(table.loc["naive"])[:5] == ["150", "50.0", "40.0", "2.00", "8.00"]
    assert "naive 33 %" in report.findings_steps(rows)[0]


def test_memory_stands_beside_what_zero_predicts():
    held = {
        "init_bytes": 1,
        "before_step_bytes": 1,
        "peak_bytes": 1,
        "gradient_bytes": 1,
        "state_bytes": 1,
        "parameter_bytes": 1,
    }
    rows = frame(
        step(report.BUCKETED, 100.0, after_step_bytes=16_160.0, **held),
        step("sharded optimizer", 100.0, after_step_bytes=12_120.0, **held),
        step("fsdp", 100.0, after_step_bytes=8_080.0, **held),
    )
    assert list(report.memory(rows)["predicted_bytes"]) == [16_000, 12_000, 8_000]
    (sentence,) = report.findings_memory(rows, ("fsdp", "fsdp copy"), "fully_shard")
    assert "1.0 % more than parameters, gradients and moments" in sentence


def test_a_line_is_fitted_to_each_operation():
    rows = frame(*(
        {"section": "collectives", "phase": "", "status": "ok", "world_size": 4, "transport": "nccl", "num_bytes": n,
         "timer_method": "window", "median_ms": 0.02 + n / 1e8,
         "observed": {"operation": "all_reduce", "dtype": "float32", "backend": "nccl"}}
        for n in (10**3, 10**6, 10**9)
    ))  # fmt: skip
    (line,) = report.fits(rows).to_dict("records")
    assert line["latency_us"] == pytest.approx(20) and line["bandwidth_gbs"] == pytest.approx(100)
    assert line["bus_gbs"] == pytest.approx(150) and line["worst_residual"] < 1e-9
    queued = rows.assign(timer_method="queued", launch_median_ms=0.048, bus_gbs=1.0)
    (sentence,) = report.findings_collectives(queued)
    assert "20.0 µs and then 100.0 GB/s, device time" in sentence and "The host issues one in 48.0 µs." in sentence
    on_cpu = queued[:1].assign(transport="gloo", timer_method="window")
    assert set(report.shown_collectives(pd.concat([queued, on_cpu]))["transport"]) == {"nccl"}, "one kind of time"
    rows["median_ms"] = rows["median_ms"][::-1].tolist()  # ranks that share a core: the larger, the less time
    falling = frame(*rows.assign(bus_gbs=1.0).to_dict("records"))
    assert report.fits(falling).empty and report.table_collectives(falling)["latency, call time (µs)"].tolist() == ["–"]
    assert report.findings_collectives(falling) == [] and report.figure_collectives(falling) is not None


def test_the_committed_chapter_tells_of_two_gpus():
    chapter = Chapter("07_distributed", device=REFERENCE_DEVICE)
    assert chapter.device == f"2x-{REFERENCE_DEVICE}" and chapter.device_kind == "cuda"
    collectives, steps, ceilings = (chapter.records(name) for name in ("collectives", "steps", "ceilings"))
    tables = [
        report.table_collectives(collectives),
        report.table_steps(steps),
        report.table_memory(steps, (report.BUCKETED, "fsdp")),
        report.table_gathers(steps),
        report.table_limits(collectives, ceilings),
    ]
    assert all(0 < len(table) <= 12 for table in tables)
    assert (report.measured(collectives)["num_wrong"] == 0).all()
    assert set(report.measured(collectives)["topology"]) >= {"NVLink, 18 links"}
    ((text, section),) = report.front(chapter)
    assert section == "How much of it shows" and text.count(" %") == 2 and "every parameter: undecided (" in text


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
    monkeypatch.setattr(hardware, "detect", lambda: H200)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert hardware.measured_by("07_distributed").slug == "2x-nvidia-h200"
    assert hardware.measured_by("01_benchmarking") == H200
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert hardware.measured_by("07_distributed") == H200
