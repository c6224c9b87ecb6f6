"""Chapter 03's queries and figures, from a few rows made by hand."""

import pandas as pd
import pytest

from labkit.report import mixed_precision as report


def frame(*rows):
    made = pd.DataFrame([{"status": "ok"} | row for row in rows])
    made.attrs |= {"device": "a GPU", "device_kind": "cuda"}
    return made


EMPTY = pd.DataFrame()


def a_sum(term="bf16", **values):
    samples = {"running_sum": [0.1, 0.2, 0.25]}
    row = {
        "method": "sequential",
        "accumulator": term,
        "term": term,
        "exact_sum": 1.0,
        "num_terms": 3,
    }
    return (
        row | {"samples": samples, "observed": {"trace_every": 1}, "stall_predicted": 4.0} | values
    )


def test_a_sum_that_stops_says_where_and_one_that_does_not_is_missing():
    fact = report.stall(
        frame(a_sum(stall_measured=4.0), a_sum("fp32", stall_measured=None)), "bf16"
    )
    assert (str(fact), fact["predicted"]) == ("4", "4")
    assert report.stall(frame(a_sum("fp32")), "fp32").missing
    assert report.stall(EMPTY, "bf16").missing


def test_the_error_drawn_is_the_largest_so_far():
    (axis,) = report.sums_figure(frame(a_sum())).axes
    assert axis.lines[0].get_ydata() == pytest.approx([abs(0.1 - 1 / 3), abs(0.2 - 2 / 3), 0.75])
    assert report.sums_figure(EMPTY) is None


def test_dtypes_stand_in_the_order_of_the_pass():
    observed = {"dtypes": [["fc1", "float16"], ["loss", "float32"]]}
    rows = frame({"model": "toy", "autocast": "fp16", "observed": observed})
    assert report.dtypes_table(rows).to_dict("list") == {
        "part": ["fc1", "loss"],
        "under fp16": ["float16", "float32"],
    }
    assert report.dtypes_table(EMPTY).empty


def norm(statistics, scale=1.0, error=1e-4, **values):
    row = {
        "norm": "rms_norm",
        "setting": "centred",
        "input": "bf16",
        "scale": scale,
        "statistics": statistics,
    }
    return (
        row
        | {"relative_error": error, "overflowed_fraction": 0.0, "nonfinite_fraction": 0.0}
        | values
    )


def test_what_narrow_statistics_cost_is_over_fp32_and_overflow_is_no_cost():
    rows = [norm("fp32"), norm("bf16", error=3e-3), norm("fp32", 1e3), norm("bf16", 1e3, 2e-4)]
    fact = report.overflow(
        frame(*rows, norm("fp16", 1e3, 9.0, overflowed_fraction=1.0), norm("fp16"))
    )
    assert fact["value"].value == pytest.approx(30)
    assert fact["scale"] == "1,000"
    assert report.overflow(frame(*rows)).missing, "without an overflow there is none to tell"
    assert report.overflow(EMPTY).missing
    assert report.norms_figure(frame(*rows)) is not None
    assert report.norms_figure(EMPTY) is None


def test_casts_are_counted_against_the_same_pass_in_fp32():
    def counted(precision, operators, casts):
        return {
            "size": "small",
            "phase": "forward",
            "precision": precision,
            "num_operators": operators,
            "num_casts": casts,
        }

    fact = report.added_casts(frame(counted("fp32", 500, 0), counted("bf16", 700, 190)), "forward")
    assert (str(fact), fact["casts"].value) == ("40 %", 190)
    assert report.added_casts(frame(counted("fp32", 500, 0)), "forward").missing
    assert report.added_casts(EMPTY, "forward").missing


def test_a_training_of_few_steps_is_no_finding():
    def trained(num_steps):
        row = {
            "precision": "fp32",
            "size": "small",
            "num_steps": num_steps,
            "final_loss": 0.25,
            "unmoved_gains": 0.0,
        }
        return row | {"samples": {"loss": [2.0, 1.0, None]}}

    assert str(report.final_loss(frame(trained(200)), "fp32")) == "0.2500"
    assert report.final_loss(frame(trained(12)), "fp32").small
    assert report.final_loss(frame(trained(200)), "bf16").missing
    assert report.training_figure(frame(trained(200))) is not None
    assert report.training_figure(EMPTY) is None
