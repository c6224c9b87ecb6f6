"""Chapter 04's queries and figures, from a few rows made by hand."""

import pandas as pd
import pytest

from labkit.report import memory as report

GIB = 2**30


def peak(precision="fp32", context=512, **values):
    case = {"size": "2.7b", "context": context, "precision": precision, "batch": 4}
    return {"status": "ok", **case, "phase": "train_step", "peak_bytes": 60 * GIB} | values


def frame(*rows):
    return pd.DataFrame(rows)


def test_a_bar_of_the_parts_adds_up_to_its_peak():
    plans = frame(peak("bf16", 2048, plan="1", attention="sdpa_flash", peak_bytes=50 * GIB))
    pure = frame(peak("bf16_pure", peak_bytes=30 * GIB))
    rows = report.parts(frame(peak(), peak("bf16")), pure, plans)
    # What was not measured keeps its place.
    assert rows.sum(axis=1).tolist() == pytest.approx([60, 60, 30, 0, 50])
    assert rows["weights"]["pure bf16"] == rows["weights"]["fp32"] / 2


def test_the_recorded_step_says_what_it_holds_at_its_peak():
    parts = {"activations_at_peak_bytes": 3 * GIB, "gradients_at_peak_bytes": GIB}
    row = peak(peak_bytes=10 * GIB, num_events=2, **parts)
    (step,) = report.recording(frame(row | {"precision": "bf16"}, row)).to_dict("records")
    assert step["precision"] == "fp32"
    assert (step["activations_fraction"], step["gradients_fraction"]) == (0.3, 0.1)


def test_what_a_block_keeps_is_counted_by_operator():
    kept = {"operator": "op", "module": "m", "saved_bytes": 10}
    block = {"status": "ok", "part": "block", "code": "eager", "context": 2048}
    residuals = [*[kept] * 10, {**kept, "saved_bytes": 0}]
    row = block | {"saved_bytes": 100, "stream_bytes": 20, "observed": {"residuals": residuals}}
    (block,) = report.kept(frame(row)).to_dict("records")
    assert (block["input_ratio"], block["five_fraction"]) == (5.0, 0.5)
    assert len(report.residuals(frame(row))) == 10, "what keeps nothing is left out"
