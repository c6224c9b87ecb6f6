"""Chapter 03's queries and figures, from a few rows made by hand."""

import pandas as pd
import pytest

from labkit.report import mixed_precision as report


def frame(*rows):
    return pd.DataFrame([{"status": "ok"} | row for row in rows])


def test_the_error_drawn_is_the_largest_so_far():
    row = {
        "method": "sequential",
        "accumulator": "bf16",
        "term": "bf16",
        "exact_sum": 1.0,
        "num_terms": 3,
        "observed": {"trace_every": 1},
        "samples": {"running_sum": [0.1, 0.2, 0.25]},
    }
    (axis,) = report.sums_figure(frame(row)).axes
    assert axis.lines[0].get_ydata() == pytest.approx([abs(0.1 - 1 / 3), abs(0.2 - 2 / 3), 0.75])


def norm(statistics, scale=1.0, error=1e-4, overflowed=0.0):
    return {
        "norm": "rms_norm",
        "setting": "centred",
        "input": "bf16",
        "scale": scale,
        "statistics": statistics,
        "relative_error": error,
        "overflowed_fraction": overflowed,
        "nonfinite_fraction": 0.0,
    }


def test_what_narrow_statistics_cost_is_over_fp32_and_overflow_is_no_cost():
    rows = [norm("fp32"), norm("bf16", error=3e-3), norm("fp32", 1e3), norm("bf16", 1e3, 2e-4)]
    rows += [norm("fp16", 1e3, 9.0, overflowed=1.0), norm("fp16")]
    (row,) = report.overflow(frame(*rows)).to_dict("records")
    assert (row["cost"], row["scale"]) == (pytest.approx(30), 1000)
