"""Chapter 04's queries and figures, from a few rows made by hand."""

import pandas as pd
import pytest

from labkit import accounting
from labkit.configs import model_config
from labkit.report import memory as report

GIB = 2**30


def peak(precision="fp32", context=512, **values):
    case = {
        "size": "2.7b",
        "context": context,
        "precision": precision,
        "batch": 4,
        "phase": "train_step",
    }
    return {"status": "ok", **case, "peak_bytes": 60 * GIB} | values


def frame(*rows):
    made = pd.DataFrame(rows)
    made.attrs |= {"device": "a GPU", "device_kind": "cuda"}
    return made


def test_predictions_are_the_closed_forms_and_their_worst_is_named():
    closed = accounting.peak_bytes(
        model_config("2.7b"),
        4,
        512,
        "train_step",
        precision="fp32",
        attention="eager",
        device_kind="cuda",
    )
    fact = report.agreement(frame(peak(peak_bytes=closed), peak("bf16", peak_bytes=2 * closed)))
    assert (fact["count"].value, fact["total"].value) == (1, 2)
    assert fact["worst"].value < -0.4
    assert report.agreement(frame(peak(peak_bytes=2**20))).missing, (
        "small peaks are the allocator's rounding"
    )


def test_a_bar_of_the_parts_adds_up_to_its_peak():
    plans = frame(peak("bf16", 2048, plan="1", attention="sdpa_flash", peak_bytes=50 * GIB))
    rows = report.parts(
        frame(peak(), peak("bf16")), frame(peak("bf16_pure", peak_bytes=30 * GIB)), plans
    )
    assert rows["way"].tolist() == ["fp32", "autocast", "pure bf16", "recomputed,\n2,048"]
    assert rows.iloc[:, 1:].sum(axis=1).tolist() == pytest.approx(
        [60 * GIB, 60 * GIB, 30 * GIB, 50 * GIB]
    )
    assert rows["weights"][2] == rows["weights"][0] / 2
    assert report.parts_figure(frame(peak()), frame(), frame()) is not None
    assert report.parts_figure(frame(), frame(), frame()) is None


def test_peaks_of_two_frames_are_compared_by_their_bytes():
    fact = report.peak_ratio(peak("bf16"), peak("bf16_pure", peak_bytes=30 * GIB), "pure")
    assert (fact.verdict, str(fact["ratio"])) == ("ahead", "0.500×")
    assert report.peak_ratio(None, peak(), "pure").missing


def recording(**values):
    parts = {
        f"{part}_at_peak_bytes": share * GIB
        for part, share in (("activations", 3), ("gradients", 1))
    }
    samples = {"event": [0, 1, 2], "parameters_mib": [1, 1, 1], "activations_mib": [0, 4096, 0]}
    observed = {"phases": [["forward", 0, 1], ["backward", 1, 2]], "peak_phase": "backward"}
    row = peak(peak_bytes=10 * GIB, num_events=2, samples=samples, observed=observed)
    return row | parts | values


def test_the_recorded_step_says_what_it_holds_at_its_peak():
    rows = frame(recording(), recording(precision="bf16", peak_bytes=9 * GIB))
    fact = report.at_peak(rows)
    assert (str(fact), str(fact["activations"]), str(fact["gradients"])) == (
        "10.0 GiB",
        "30 %",
        "10 %",
    )
    assert report.timeline_figure(rows) is not None
    assert report.at_peak(frame()).missing and report.timeline_figure(frame()) is None


def block(code, saved):
    kept = [
        {"operator": f"op{n}", "module": "m", "saved_bytes": saved // 10, "is_resident": False}
        for n in range(10)
    ]
    row = {"status": "ok", "part": "block", "code": code, "context": 2048, "saved_bytes": saved}
    return row | {
        "stream_bytes": GIB // 10,
        "observed": {"residuals": [*kept, {**kept[0], "saved_bytes": 0}]},
    }


def test_what_a_block_keeps_is_counted_by_operator():
    blocks = frame(block("eager", 4 * GIB), block("compiled", 2 * GIB))
    fact = report.kept(blocks)
    assert fact["value"].value == pytest.approx(40, rel=1e-6)
    assert fact["five"].value == pytest.approx(0.5, rel=1e-6)
    assert len(report.residuals(blocks)) == 20, "what keeps nothing is left out"
    assert len(report.residuals_table(blocks)) == 5
    assert report.kept(frame()).missing


def test_plans_are_drawn_by_their_interval_and_what_ran_out_is_marked():
    rows = [
        peak("bf16", 2048, plan=plan, attention="eager", peak_bytes=k * GIB)
        for k, plan in enumerate(("1", "8"), 5)
    ]
    lost = peak("bf16", 2048, plan="32", attention="eager", status="oom", peak_bytes=float("nan"))
    figure = report.plans_figure(
        frame(*rows, lost, peak("bf16", 2048, plan="6/1", attention="eager"))
    )
    (axis,) = figure.axes
    assert axis.lines[0].get_xdata().tolist() == [1, 8]
    assert report.plans_figure(frame(lost)) is None
