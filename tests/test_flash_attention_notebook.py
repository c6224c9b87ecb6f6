"""Notebook 06: the grid of its cases, and what the chapter's queries and figures make of a few
hand-made rows.
"""

import dataclasses
import os

import pandas as pd
import pytest
from chapters import CPU, in_section, recorded, run_smoke

from labkit import lessons
from labkit.configs import LEADERBOARD, MATERIALISING
from labkit.experiments.flash_attention import cases
from labkit.report import facts, figures
from labkit.report import flash_attention as report
from labkit.report.frame import cell

SHAPE = {"batch": 1, "heads": 1, "length": 65536, "d_head": 64, "causal": True, "precision": "bf16"}
OURS, FA3 = {"impl": "ours"}, {"impl": "FlashAttention-3"}
EMPTY = pd.DataFrame()


def row(phase: str, time_ms: float = 2.0, *, ours: bool = False, **changes) -> dict:
    rates = {
        "achieved_tflops": 100 / time_ms,
        "sustained_tflops": 80 / time_ms,
        "sustained_ms": 1.25 * time_ms,
    }
    known = {
        "phase": phase,
        "status": "ok",
        "is_auto": float(ours),
        "session": "one",
        "timer_method": "graph",
    }
    times = {
        "median_ms": time_ms,
        "half_width_fraction": 0.002,
        "steady": 1.0,
        "peak_bytes": time_ms * 2**30,
    }
    return {**SHAPE, **known, **times, **rates, **changes}


def table(*rows: dict) -> pd.DataFrame:
    return pd.DataFrame(rows)


def test_ours_is_what_auto_runs_and_others_have_their_names():
    rows = table(
        row("gluon forward", ours=True), row("triton backward"), row("flex forward_backward")
    )
    found = report.contest(rows)
    assert [*found["impl"], *found["direction"][2:]] == [
        "ours",
        "ours (Triton)",
        "flex",
        "forward_backward",
    ]
    assert report.contest(EMPTY).empty and report.rated(EMPTY).empty


@pytest.mark.parametrize(("fa3_ms", "verdict"), [(3.0, "ahead"), (1.5, "behind"), (2.0, "level")])
def test_a_sustained_verdict_follows_the_rows_and_keeps_their_mark(fa3_ms, verdict):
    times = [(f"{impl} forward", time_ms) for impl, time_ms in (("gluon", 2.0), ("fa3", fa3_ms))]
    rows = [
        row(phase, time_ms, ours="gluon" in phase, heads=n)
        for phase, time_ms in times
        for n in (1, 2, 3)
    ]
    rows[0]["steady"] = 0.0
    rated = report.rated(table(*rows))
    found = facts.compare_all(
        rated, FA3, OURS, report.SHAPE, value="sustained_ms", direction="forward"
    )
    assert (found.verdict, found["total"].value, found.small) == (verdict, 3, False)
    one = facts.compare(rated, FA3, OURS, value="sustained_ms", heads=1)
    assert one.marked and one["ratio"].value == pytest.approx(fa3_ms / 2)
    assert set(rated["shape"]) == {f"1×{n}×65536×64 causal" for n in (1, 2, 3)}
    assert [cell(each, "sustained_tflops") for each in rated.to_dict("records")[:2]] == [
        "~ 40.0",
        "40.0",
    ]


def test_ours_in_memory_is_what_auto_ran_at_the_next_shorter_length():
    timed = [
        row(f"{impl} forward_backward", ours=True, length=n)
        for impl, n in (("triton", 512), ("gluon", 2048))
    ]
    impls = ("triton", "gluon", "fa3")
    memory = [
        row("forward_backward", impl=impl, length=n) for impl in impls for n in (256, 1024, 4096)
    ]
    memory.append(row("forward", impl="gluon"))
    found = report.peaks(table(*memory), report.contest(table(*timed)))
    ours = found[found["impl"] == "ours"]
    assert list(ours["length"]) == [1024, 4096] and list(ours["ran"]) == ["triton", "gluon"]
    assert "FlashAttention-3" in set(found["impl"]) and "forward" not in set(found["phase"])
    assert report.peaks(EMPTY, report.contest(EMPTY)).empty


def test_published_times_stand_beside_the_same_case():
    rows = [
        row("gluon forward", 1.0, ours=True),
        row("compiled forward", 1e6),
        row("gluon backward", ours=True),
    ]
    fact, beside = report.published_times(table(*rows))
    assert fact["total"].value == 2 and fact["above"].value == 1
    assert beside.set_index("phase")["ratio"]["ours forward"] == pytest.approx(6.297)
    assert report.published_times(EMPTY)[0].missing


def test_figures_draw_what_was_measured_and_mark_what_failed():
    not_rated = table(row("gluon forward", ours=True, sustained_tflops=None))
    assert report.rates(not_rated) is None and report.rated(not_rated).empty
    phases = ["gluon forward", "gluon backward", "fa3 forward", "fa3 backward"]
    rows = [row(phase, ours="gluon" in phase) for phase in phases]
    forward, backward = report.rates(table(*rows)).axes
    assert [list(points.get_offsets()[:, 0]) for points in forward.collections[::2]] == [
        [40.0],
        [40.0],
    ]
    assert backward.get_title() == "backward"
    assert len(report.rates(table(*(each | {"tflop_per_joule": 0.5} for each in rows))).axes) == 4

    lost = row("eager forward_backward", status="oom")
    lines = report.contest(table(row("gluon forward_backward", ours=True), lost))
    figure = report.by_length(lines, "median_ms", "ms")
    assert [line.get_label() for line in figure.axes[0].lines] == ["ours"]
    assert len(figure.axes[0].collections) == 1, "a cross where eager ran out of memory"
    assert figures.svg(figure) == figures.svg(report.by_length(lines, "median_ms", "ms"))
    assert report.by_length(lines[lines["status"] == "oom"], "median_ms", "ms") is None


def test_the_grid_has_every_length_and_times_alone_what_materialises_the_scores():
    found = cases("full", "cuda")
    speed = in_section(found, "speed")
    assert {case.parameters["length"] for case in speed} == {2**n for n in range(7, 17)}
    assert {case.parameters["d_head"] for case in speed} == {16, 32, 64, 72, 128}
    for case in speed:
        impls = {phase.split(" ")[0] for phase in case.phases}
        assert (impls <= set(MATERIALISING)) == (case.parameters["timed"] != "in turn")
    shapes = [
        tuple(case.parameters[name] for name in report.SHAPE)
        for case in in_section(found, "rivals")
    ]
    assert len(shapes) == 8 and dataclasses.astuple(LEADERBOARD) in shapes


def test_kernels_are_interpreted_only_where_triton_is_not_loaded_yet(monkeypatch):
    monkeypatch.setattr(lessons, "detect", lambda: CPU)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(RuntimeError, match="restart the kernel"):
        lessons.interpret_kernels()
    monkeypatch.setattr(lessons, "detect", lambda: dataclasses.replace(CPU, kind="cuda"))
    lessons.interpret_kernels()
    assert "TRITON_INTERPRET" not in os.environ


@pytest.mark.slow
def test_the_smoke_profile_runs_through(tmp_path):
    records = recorded(
        "06_flash_attention", run_smoke("06_flash_attention", tmp_path, "lengths=128", "d_heads=16")
    )
    assert {record.status for record in records} == {"ok", "skipped"}
    timed = {
        record.phase.split(" ")[0]
        for record in records
        if record.section == "speed" and record.status == "ok"
    }
    assert timed == {"tiled", "eager", "compiled", "sdpa_flash"}
