"""Chapter 08's queries and figures, from a few rows made by hand."""

import pandas as pd
import pytest

from labkit.report import facts
from labkit.report import siglip2 as report

CASE = {"size": "so400m", "batch": "one size", "phase": report.BOTH}
GIB = 2**30
EMPTY = pd.DataFrame()


def frame(*rows):
    made = {
        "status": "ok",
        "reason": "",
        "session": "s",
        "disturbed": False,
        "precision": "bf16",
        "steady": 1,
    }
    return pd.DataFrame([{**made, **row} for row in rows])


def step(way, sustained, *, launched=None, workload="A", phase=report.BOTH, **more):
    """A row as a step leaves it; one with a time of its launches was replayed from a graph."""
    case = {"way": way, "workload": workload, "phase": phase, "size": "so400m", "images": 64}
    times = {
        "sustained_ms": sustained,
        "median_ms": 0.9 * sustained,
        "call_ms": launched or sustained,
    }
    timer = {
        "timer_method": "graph" if launched else "window",
        "half_width_fraction": 0.0,
        "drift": 0.0,
    }
    return {**case, **times, **timer, "peak_bytes": 8 * GIB, "padded_fraction": 0.0, **more}


STEPS = frame(
    step("transformers sdpa", 120.0),
    step("eager + compile", 180.0),
    step("cu_seqlens", 150.0),
    step("positions", 151.0, launched=152.0),
    step("norm", 110.0, launched=140.0, peak_bytes=12 * GIB),
    step("fused", 80.0, launched=160.0, peak_bytes=9 * GIB),
    step("fused", 30.0, launched=50.0, phase="forward"),
    step("fused", 82.0, launched=102.0, workload="B", steady=0),
    step("transformers sdpa", 246.0, workload="B", padded_fraction=0.6),
)
FLOOR = frame(step("", 60.0, launched=60.0)).drop(columns=["way", "call_ms", "peak_bytes"])


def test_ways_have_one_name_and_their_order():
    rows = report.encoder(STEPS, FLOOR)
    found = list(rows.sort_values("way")["way"].unique())
    assert found[0] == report.STOCK and found[-2:] == [report.FUSED, report.PRODUCTS]
    assert report.encoder(EMPTY, EMPTY).empty
    assert report.encoder(EMPTY, FLOOR)["way"].tolist() == [report.PRODUCTS]


def test_sustained_and_launched_times_are_compared_each_with_its_own_kind():
    rows = report.encoder(STEPS, FLOOR)
    sides = [{"way": report.STOCK}, {"way": report.FUSED}]
    sustained = facts.compare(rows, *sides, value="sustained_ms", **CASE)
    launched = facts.compare(rows, *sides, value="host_median_ms", **CASE)
    assert (sustained.verdict, sustained.time, str(sustained["ratio"])) == (
        "ahead",
        "sustained",
        "1.50×",
    )
    assert (launched.verdict, launched.time, str(launched["ratio"])) == ("behind", "call", "0.750×")
    products = facts.compare(rows, {"way": report.PRODUCTS}, {"way": report.FUSED}, **CASE)
    assert (products.time, str(products["base"]), str(products["other"])) == (
        "device",
        "54.0 ms",
        "72.0 ms",
    )
    marked = facts.compare(rows, *sides, value="sustained_ms", **{**CASE, "batch": "many sizes"})
    assert marked.marked and str(marked["ratio"]) == "~ 3.00×"


def test_a_launched_time_is_that_of_each_session():
    sessions = {"s": {"call_ms": 160.0}, "t": {"call_ms": 100.0}}
    rows = frame(step("fused", 80.0, launched=160.0, sessions=sessions), step("cu_seqlens", 150.0))
    found = report.encoder(rows, FLOOR).set_index("way").loc[report.FUSED, "sessions"]
    assert [metrics["host_median_ms"] for metrics in found.values()] == [160.0, 100.0]


def test_the_waterfall_says_what_each_change_saves_and_its_verdict():
    figure = report.waterfall(report.encoder(STEPS, FLOOR))
    texts = [text.get_text().strip() for text in figure.axes[0].texts]
    changes = ["151, 0.993× level", "110, 1.37× ahead", "80.0, 1.38× ahead"]
    assert texts == ["120", "150", *changes, "60.0"], "a change without a record is left out"
    failed = step("fused", 1.0, status="error")
    assert report.waterfall(report.encoder(frame(failed), EMPTY)) is None


def test_kernels_are_summed_by_class():
    row = {
        "phase": report.BOTH,
        "size": "so400m",
        "observed": {"source": "kineto"},
        "matmul_ms": 60.0,
    }
    sums = [("eager", 110.0), ("fused", 90.0)]
    rows = [{**row, "way": way, "attention_ms": 10.0, "kernels_ms": total} for way, total in sums]
    found = report.kernel_times(frame(*rows))
    rest = facts.compare(found, {"way": "first version"}, {"way": report.FUSED}, value="rest_ms")
    assert (rest.verdict, rest.time, rest["ratio"].value) == ("ahead", "device", 2.0)
    assert report.kernel_times(EMPTY).empty


def test_errors_are_ratios_to_the_first_version():
    row = {"phase": "fused", "out_error": 1e-3, "eager_out_error": 2e-3}
    found = report.errors(frame({**row, "gradient_error": 6e-3, "eager_gradient_error": 5e-3}))
    assert str(facts.measured(found, "out_ratio", "×", phase="fused")) == "0.500×"
    assert str(facts.measured(found, "gradient_ratio", "×", phase="fused")) == "1.20×"
    assert report.errors(EMPTY).empty


def kernel(impl, ratio=1.0, low=None, **more):
    row = {"operation": "rms_norm", "rows": 100, "columns": 2560, "phase": f"{impl} {report.BOTH}"}
    ratios = {
        "ratio_to_ours": ratio,
        "ratio_to_ours_low": low or ratio,
        "ratio_to_ours_high": ratio,
    }
    return {
        **row,
        **ratios,
        "median_ms": 2.0,
        "ceiling_fraction": 0.91,
        "timer_method": "graph",
        **more,
    }


@pytest.mark.parametrize(
    ("ratio", "low", "text"),
    [
        (0.9, None, "0.900×"),
        (1.0, None, "level"),
        (1.05, 0.98, "0.970× to 1.06×"),
        (1.5, 1.3, "1.29× to 1.52×"),
    ],
)
def test_a_kernel_stands_beside_its_peers_with_the_span_where_sessions_differ(ratio, low, text):
    rows = [kernel("ours"), kernel("eager", 3.0), kernel("compiled", ratio, low)]
    (line,) = report.kernels_table(frame(*rows, kernel("liger", status="skipped"))).to_dict(
        "records"
    )
    expected = {
        "kernel": "rms_norm 100×2,560",
        "ms": "2.00",
        "% of ceiling": "91",
        "torch.compile": text,
    }
    assert line == {**expected, "fastest of Liger, QuACK": "–"}
    rows = frame(kernel("ours"), kernel("liger", 1.8), kernel("quack", 1.2))
    assert report.kernels_table(rows)["fastest of Liger, QuACK"].tolist() == ["1.20×"]


def test_published_times_are_those_of_a_mini_batch():
    fact, beside = report.published_times(report.encoder(STEPS, FLOOR))
    assert (fact["total"].value, fact["above"].value) == (3, 3)
    forward = beside.set_index(["way", "phase"]).loc[(report.FUSED, "forward")]
    assert forward["published_ms"] == pytest.approx(1273.94 / 16) and forward["median_ms"] == 27.0
    assert report.published_times(EMPTY)[0].missing
