"""Chapter 05's queries and figures, from a few rows made by hand."""

import pandas as pd
import pytest

from labkit import accounting
from labkit.report import attention as report
from labkit.report import facts
from labkit.report.frame import select

EMPTY = pd.DataFrame()
LONG = {"batch": 8, **report.LONG}
KEPT = accounting.attention_saved_bytes("eager", 8, 16384, 64, 2)


def call(impl="eager", phase="forward", median_ms=8.0, precision="bf16", **values) -> dict:
    case = LONG | {
        "impl": impl,
        "phase": phase,
        "precision": precision,
        "status": "ok",
        "reason": "",
    }
    host = {"host_median_ms": median_ms, "launch_median_ms": 0.1, "half_width_fraction": 0.002}
    timer = {"median_ms": median_ms, "timer_method": "window", "session": "one", "samples": {}}
    return (
        case
        | timer
        | host
        | {"saved_bytes": float(KEPT), "num_replacements": float("nan")}
        | values
    )


def frame(*rows: dict) -> pd.DataFrame:
    made = pd.DataFrame(rows)
    made.attrs |= {"device": "a GPU", "device_kind": "cuda"}
    return made


ROOFS = frame(
    {"status": "ok", "kind": "copy", "precision": "fp32", "achieved_gb_per_s": 4000.0},
    {"status": "ok", "kind": "gemm", "precision": "bf16", "achieved_tflops": 800.0},
)


def test_what_is_short_or_waits_for_the_host_is_no_finding():
    rows = frame(
        call(), call(median_ms=0.5), call(median_ms=2.0, launch_median_ms=1.9), call(status="oom")
    )
    assert report.timed(rows)["median_ms"].tolist() == [8.0]
    assert report.timed(EMPTY).empty and report.timed(frame(call(status="error"))).empty


@pytest.mark.parametrize(
    ("fused_ms", "verdict"), [(2.0, "ahead"), (8.0, "undecided"), (16.0, "behind")]
)
def test_a_verdict_follows_the_times_and_a_mark_stays(fused_ms, verdict):
    rows = report.timed(frame(call(), call("sdpa_cudnn", median_ms=fused_ms, disturbed=True)))
    fact = facts.compare(rows, {"impl": "eager"}, {"impl": "sdpa_cudnn"}, **report.LONG)
    assert (fact.verdict, fact["ratio"].value, fact.time) == (verdict, 8 / fused_ms, "call")
    assert fact.marked and "⚠ " in str(fact["other"])


def test_a_prediction_counts_passes_at_the_copy_rate_and_products_at_theirs():
    rows = [
        call(impl, phase)
        for impl in ("eager", "compiled", "sdpa_flash")
        for phase in ("forward", "backward")
    ]
    found = report.predicted(frame(*rows), ROOFS).set_index(["impl", "phase"])
    pass_ms = 2 * 8 * 16384**2 / 4000e9 * 1e3
    product_ms = 2 * 8 * 16384**2 * 64 / 800e12 * 1e3
    assert product_ms < pass_ms, "so a product that reads or writes the scores takes a pass"
    passes = {("eager", "forward"): 6, ("eager", "backward"): 12, ("compiled", "forward"): 4}
    for case, number in passes.items():
        assert found.loc[case, "passes"] == number
        assert found.loc[case, "predicted_ms"] == pytest.approx(number * pass_ms)
    for phase, products in (("forward", 2), ("backward", 5)):
        assert found.loc[("sdpa_flash", phase), "predicted_ms"] == pytest.approx(
            products * product_ms
        )
        assert found.loc[("sdpa_flash", phase), "elementwise_ms"] == 0
    figure = report.passes_figure(found.reset_index())
    assert [axis.get_title() for axis in figure.axes] == ["forward", "backward"]
    assert list(figure.axes[0].lines[0].get_xdata()) == [8.0, 8.0, 8.0]
    assert report.predicted(frame(*rows), EMPTY).empty and report.predicted(EMPTY, EMPTY).empty


def test_kept_bytes_are_those_of_what_ran():
    """A compiled formula that became SDPA keeps what SDPA keeps."""
    fused = accounting.attention_saved_bytes("fused", 8, 16384, 64, 2)
    rows = [call(), call("compiled", num_replacements=0.0), call("sdpa_flash"), call("sdpa_math")]
    rows.append(call("compiled_heads", num_replacements=2.0))
    math = accounting.attention_saved_bytes("math", 8, 16384, 64, 2)
    assert report.counted(frame(*rows))["predicted_bytes"].tolist() == [
        KEPT,
        KEPT,
        fused,
        math,
        fused,
    ]
    exact = facts.agreement(
        report.counted(frame(*rows)), "saved_bytes", "predicted_bytes", 0.001, lambda row: ""
    )
    assert str(exact) == "2 of 5"
    assert report.counted(EMPTY).empty


def test_lines_end_where_memory_does_and_nothing_is_drawn_of_nothing():
    rows = [call(length=length, median_ms=length / 1e3) for length in (4096, 8192, 16384)]
    rows += [call(length=65536, status="oom", median_ms=None), call("sdpa_flash", length=4096)]
    (axis,) = report.over_length(frame(*rows), "phase", "median_ms", "ms", 1.0).axes
    assert list(axis.lines[0].get_xdata()) == [4096, 8192, 16384]
    assert [text.get_text() for text in axis.get_xticklabels()] == ["4,096", "16,384", "65,536"]
    assert report.over_length(frame(call(peak_gib=None)), "phase", "peak_gib", "GiB", 1.0) is None


def test_the_table_has_a_status_where_there_is_no_time():
    rows = [
        call(precision="fp32", status="skipped"),
        call(),
        call("compiled_heads", "backward", length=256),
    ]
    table = report.times_table(frame(*rows))
    assert table.to_dict("list") == {
        "impl": ["eager"],
        "bf16 forward": ["8.00"],
        "bf16 backward": ["–"],
        "fp32 forward": ["skipped"],
    }


def test_published_times_stand_beside_timed_passes_of_their_case():
    rows = frame(
        call(precision="fp32"),
        call("compiled", precision="tf32"),
        call("compiled", "backward", 0.1, "fp32"),
    )
    fact, beside = report.published_times(rows)
    assert (fact["total"].value, fact["above"].value) == (2, 2)
    assert (beside["ratio"] == beside["published_ms"] / 8).all()
    assert report.published_times(select(rows, precision="bf16"))[0].missing
