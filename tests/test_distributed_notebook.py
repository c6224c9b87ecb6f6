"""Chapter 07's queries and figures, from a few rows made by hand."""

import pandas as pd
import pytest

from labkit.configs import STEP_PARTS
from labkit.report import distributed as report

LARGE = {"size": "2.7b", "precision": "bf16"}
CASE = {**LARGE, "compile": "graph", "batch": 4, "context": 512, "world_size": 2}
ALL_REDUCE = {"status": "ok", "phase": "all_reduce float32 100000000", "transport": "nccl"}


def step(phase, median_ms=100.0, **values):
    return {
        "status": "ok",
        "phase": phase,
        "session": "s",
        "timer_method": "window",
        "median_ms": median_ms,
        "samples": {},
        "exposed_us": 4000.0,
        "communication_us": 40_000.0,
        "compute_us": 90_000.0,
        **CASE,
        **values,
    }


STEPS = pd.DataFrame(
    [
        step("alone"),
        step("bucketed 100 MB", 125.0, compute_us=110_000.0),
        step("fsdp", 120.0),
        step("naive", 150.0, session="another day"),
    ]
)
PROFILES = pd.DataFrame([{"status": "ok", "size": "2.7b", "optimizer_kernel_ms": 20.0}])
LINKS = pd.DataFrame([{**ALL_REDUCE, "world_size": 2, "bus_gbs": 250.0}])
ADDED = report.added(STEPS, PROFILES, LINKS)


def test_a_way_stands_beside_the_ranks_alone_of_its_session():
    rows = ADDED.set_index("phase")
    # Another session has no rank alone.
    assert set(rows.index) == {"alone", "bucketed 100 MB", "fsdp"}
    names = ["shows_fraction", "contention_ms"]
    assert rows.loc["bucketed 100 MB", names].tolist() == pytest.approx([0.1, 20.0])


def test_ways_are_shown_in_one_order_whichever_was_measured_first():
    rows = [step("fsdp"), step("alone", size="xl-2025"), step("alone")]
    shown = report.shown(pd.DataFrame(rows))
    assert list(shown["phase"]) == ["alone", "alone", "fsdp"]
    assert list(shown["size"]) == ["xl-2025", "2.7b", "2.7b"]


def test_the_rate_of_a_rank_leaves_out_its_adamw():
    longer = report.added(STEPS, PROFILES.assign(optimizer_kernel_ms=60.0), LINKS)
    assert (longer["rate_tflops"] / ADDED["rate_tflops"]).tolist() == pytest.approx([2.0] * 3)
    unknown = report.added(STEPS, pd.DataFrame(), LINKS)
    assert unknown["rate_tflops"].isna().all(), "AdamW was not measured"


def test_a_step_is_split_into_parts_and_a_remainder_that_add_up():
    us = dict.fromkeys((f"{part}_us" for part in STEP_PARTS), 5e3)
    seen = {"transport": "ncclDevKernel_AllReduce", "blocks": 24}
    rows = [
        step(phase, time, world_size=ranks, batch=batch, observed=seen, **us)
        for ranks, batch, times in ((2, 4, (100.0, 125.0)), (4, 1, (30.0, 50.0)))
        for phase, time in zip(("alone", "fsdp"), times, strict=True)
    ]
    frame = pd.DataFrame(rows)
    _, weak, _, strong = report.split(frame).to_dict("records")
    assert weak["ratio"] == 1.25 == pytest.approx(1 + 5 * 0.05 - 0.05 + weak["remainder"])
    assert weak["saved"] == -0.05 and weak["remainder"] == pytest.approx(0.05)
    assert strong["speedup"] == 2.0 and strong["blocks"] == 24
    assert report.split_table(frame)["drift, rest"][1] == 10
    assert set(report.of_most_ranks(frame)["world_size"]) == {4}
