"""Chapter 07's queries and figures, from a few rows made by hand."""

import pandas as pd
import pytest

from labkit import accounting
from labkit.configs import REFERENCE_DEVICE, model_config
from labkit.report import distributed as report
from labkit.report import verdicts
from labkit.report.chapter import Chapter
from labkit.report.facts import agreement, compare, measured

LARGE = {"size": "2.7b", "precision": "bf16"}
CASE = {**LARGE, "compile": "graph", "batch": 4, "context": 512, "world_size": 2}


def step(phase, median_ms=100.0, **values):
    row = {
        "status": "ok",
        "phase": phase,
        "session": "s",
        "timer_method": "window",
        "half_width_fraction": 0.0,
    }
    row |= {
        "median_ms": median_ms,
        "p20_ms": median_ms,
        "p80_ms": median_ms,
        "samples": {},
        "disturbed": False,
    }
    row |= {"exposed_us": 0.0, "communication_us": 0.0, "compute_us": 90_000.0}
    return row | CASE | values


def collective(phase="all_reduce float32 100000000", bus_gbs=250.0, **values):
    row = {"status": "ok", "phase": phase, "transport": "nccl", "world_size": 2, "bus_gbs": bus_gbs}
    return row | {"num_bytes": int(phase.split()[-1])} | values


PROFILES = pd.DataFrame([{"status": "ok", "size": "2.7b", "optimizer_kernel_ms": 20.0}])
LINKS = pd.DataFrame([collective()])
STEPS = pd.DataFrame(
    [
        step("alone"),
        step(
            "bucketed 100 MB",
            125.0,
            exposed_us=4000.0,
            communication_us=40_000.0,
            compute_us=110_000.0,
        ),
        step("fsdp", 120.0),
        step("naive", 150.0, session="another day"),
    ]
)
NOTHING = pd.DataFrame()


def test_a_way_stands_beside_the_ranks_alone_of_its_session():
    rows = report.added(STEPS, PROFILES, LINKS).set_index("phase")
    assert set(rows.index) == {"alone", "bucketed 100 MB", "fsdp", report.LESS}, (
        "another session has no rank alone"
    )
    names = ["added_ms", "added_fraction", "shows_fraction", "contention_ms"]
    assert rows.loc["bucketed 100 MB", names].tolist() == pytest.approx([25.0, 0.2, 0.1, 20.0])


def test_a_second_gpu_is_compared_in_device_time():
    fact = compare(report.shown(STEPS), {"phase": "alone"}, {"phase": "bucketed 100 MB"}, **LARGE)
    assert (fact.verdict, fact.time, fact["ratio"].value) == ("behind", verdicts.DEVICE, 0.8)


def test_sharding_is_compared_with_a_rank_that_updates_as_little():
    pairs = report.added(STEPS, PROFILES, LINKS)
    fact = compare(pairs, {"phase": report.LESS}, {"phase": "fsdp"}, **LARGE)
    assert (fact["base"].value, fact["other"].value, fact.verdict) == (90.0, 120.0, "behind")
    sessions = STEPS.assign(
        sessions=[{"s": {"median_ms": 100.0}, "t": {"median_ms": 100.0}}] * len(STEPS)
    )
    fact = compare(
        report.added(sessions, PROFILES, LINKS), {"phase": report.LESS}, {"phase": "fsdp"}, **LARGE
    )
    assert fact["ratio"].value == 0.75, "the row is no session's"
    unknown = report.added(STEPS, NOTHING, LINKS)
    assert compare(unknown, {"phase": report.LESS}, {"phase": "fsdp"}, **LARGE).missing, (
        "AdamW was not measured"
    )


def test_limits_leave_adamw_out_and_take_the_rate_of_an_all_reduce():
    row = report.added(STEPS, PROFILES, LINKS).iloc[0]
    flops = accounting.phase_flops(model_config("2.7b"), 4, 512, "forward_backward", causal=True)
    assert row["rate_tflops"] == pytest.approx(flops / 0.080 / 1e12)
    gradients = accounting.ring_seconds("all_reduce", 4, 2, 250e9)  # of a parameter
    assert 4 * row["least_tokens"] / (1e12 * row["rate_tflops"]) == pytest.approx(gradients)
    pairs = report.added(STEPS, PROFILES, report.most_ranks(NOTHING))
    assert measured(pairs, "least_tokens", phase="fsdp", **LARGE).missing, "no link was measured"


def test_graphs_are_shown_and_without_them_what_was_recorded_first():
    launched = STEPS.assign(compile="regional")
    small = launched.assign(batch=2)
    assert set(report.shown(pd.concat([launched, STEPS, small]))["compile"]) == {"graph"}
    assert set(report.shown(pd.concat([launched, small]))["batch"]) == {4}
    assert report.shown(NOTHING).empty and report.shown(STEPS.assign(status="oom")).empty
    assert report.added(report.shown(NOTHING), NOTHING, report.most_ranks(NOTHING)).empty


def test_collectives_are_those_of_the_most_ranks_in_fp32():
    rows = [
        collective(),
        collective(world_size=4),
        collective("broadcast float32 1000", world_size=4),
    ]
    rows += [
        collective("all_gather bfloat16 1000", world_size=4),
        collective(world_size=8, status="error"),
    ]
    found = report.most_ranks(pd.DataFrame(rows))
    assert found[["operation", "world_size"]].to_numpy().tolist() == [["all_reduce", 4]]


def test_memory_is_predicted_for_the_ways_that_shard():
    observed = {"num_parameters": 1000}
    ways = {"alone": 99_999.0, "sharded optimizer": 12_000.0, "fsdp": 8_080.0}
    found = report.held(
        pd.DataFrame([step(way, after_step_bytes=ways[way], observed=observed) for way in ways])
    )
    for row in found.to_dict("records")[1:]:
        stage = 3 if row["phase"] == "fsdp" else 1
        assert row["predicted_bytes"] == sum(
            accounting.zero_bytes(1000, 2, stage, compute_bytes=0).values()
        )
    fact = agreement(found, "after_step_bytes", "predicted_bytes", 0.005, lambda row: row["phase"])
    assert (fact["value"], fact["case"]) == ("1 of 2", "fsdp")


def test_a_table_marks_what_was_disturbed_and_says_what_ran_out_of_memory():
    assert report.time_or_bytes(step("fsdp", disturbed=True)) == "⚠ 100"
    assert report.time_or_bytes(step("fsdp", status="oom")) == "oom"
    assert report.time_or_bytes(step("fsdp", compile="regional", after_step_bytes=2**31)) == "2.00"


def test_figures_are_drawn_from_what_there_is():
    spans = {
        f"{lane}_{end}_ms": [at] for lane in report.LANES for at, end in enumerate(("begin", "end"))
    }
    assert report.timeline_figure(STEPS) is None
    assert (
        len(report.timeline_figure(pd.DataFrame([step("naive", samples=spans), step("flat")])).axes)
        == 1
    )
    gloo = pd.DataFrame(
        [collective(transport="gloo"), collective("all_gather float32 1000", transport="gloo")]
    )
    assert report.collectives_figure(report.most_ranks(gloo)) is not None
    assert report.collectives_figure(report.most_ranks(pd.concat([gloo, LINKS]))) is not None


def test_the_committed_collectives_have_no_wrong_element():
    chapter = Chapter("07_distributed", device=REFERENCE_DEVICE)
    rows = report.most_ranks(chapter.records("collectives"))
    assert len(rows) and (rows["num_wrong"] == 0).all()
