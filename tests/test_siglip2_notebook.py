"""Chapter 08's queries and figures, from a few rows made by hand."""

import pandas as pd
import pytest

from labkit.report import facts
from labkit.report import siglip2 as report

CASE = {"size": "so400m", "batch": "one size", "phase": report.BOTH}


def frame(*rows):
    return pd.DataFrame([{"status": "ok", "session": "s", "steady": 1, **row} for row in rows])


def step(way, sustained, method="window", **more):
    """A row as a step leaves it, launched or replayed from a graph."""
    return {
        "way": way,
        "workload": "A",
        "phase": report.BOTH,
        "size": "so400m",
        "sustained_ms": sustained,
        "median_ms": 0.9 * sustained,
        "timer_method": method,
        **more,
    }


STEPS = frame(
    step("transformers sdpa", 120.0),
    step("eager + compile", 180.0),
    step("cu_seqlens", 150.0),
    step("positions", 151.0, "graph"),
    step("norm", 110.0, "graph"),
    step("fused", 80.0, "graph"),
    step("fused", 30.0, "graph", phase="forward"),
    step("fused", 82.0, "graph", workload="B", steady=0),
    step("transformers sdpa", 246.0, workload="B"),
)
FLOOR = frame(step("", 60.0, "graph")).drop(columns="way")


def test_each_kind_of_time_is_compared_with_its_own():
    rows = report.encoder(STEPS, FLOOR)
    sides = {"way": report.STOCK}, {"way": report.FUSED}
    sustained = facts.compare(rows, *sides, value="sustained_ms", **CASE)
    products = facts.compare(rows, {"way": report.PRODUCTS}, sides[1], **CASE)
    found = [str(fact["ratio"]) for fact in (sustained, products)]
    assert found == ["1.50×", "0.750×"]
    many = facts.compare(rows, *sides, value="sustained_ms", **{**CASE, "batch": "many sizes"})
    assert many.marked and str(many["ratio"]) == "~ 3.00×"


def kernel(impl, ratio=1.0, low=None):
    return {
        "operation": "rms_norm",
        "rows": 100,
        "columns": 2560,
        "phase": f"{impl} {report.BOTH}",
        "median_ms": 2.0,
        "ceiling_fraction": 0.91,
        "timer_method": "graph",
        "ratio_to_ours": ratio,
        "ratio_to_ours_low": low or ratio,
        "ratio_to_ours_high": ratio,
    }


@pytest.mark.parametrize(
    ("ratio", "low", "text"), [(1.0, None, "level"), (1.5, 1.3, "1.29× to 1.52×")]
)
def test_a_kernel_stands_beside_its_peers_with_the_span_where_sessions_differ(ratio, low, text):
    rows = [kernel("ours"), kernel("compiled", ratio, low), kernel("liger", 1.8), kernel("quack")]
    assert report.kernels_table(frame(*rows), {}).to_numpy().tolist() == [
        ["rms_norm 100×2,560", "2.00", "91", text, "level"]
    ]


def test_published_times_are_those_of_a_mini_batch():
    beside = report.published_times(report.encoder(STEPS, FLOOR))
    assert len(beside) == 3
    forward = beside.set_index(["way", "phase"]).loc[(report.FUSED, "forward")]
    assert forward["published_ms"] == pytest.approx(1273.94 / 16) and forward["median_ms"] == 27.0
