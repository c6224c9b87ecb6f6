"""Devices beside one another: what is alike is compared, what is not is named, nothing becomes
zero.
"""

import pytest
from chapters import store_of

from labkit.records import Record
from labkit.report import compare

NOTEBOOK = "01_benchmarking"


def failed(status, reason=""):
    return {"status": status, "reason": reason, "metrics": {}, "timer": {}}


def metrics(time):
    return {"metrics": {"median_ms": time, "half_width_fraction": 0.001, "peak_bytes": 2**30}}


def roof(rate, k):
    return {
        "section": "ceilings",
        "case": {"kind": "gemm", "precision": "fp32"},
        "phase": "rate",
        "metrics": {"median_ms": 1.0, "host_median_ms": 1.0, "sustained_tflops": rate},
        "observed": {"k": k},
    }


STEP = {"phase": "train_step"}
PAIRS = {
    128: (metrics(10.0), metrics(5.0)),
    256: (metrics(10.0), metrics(10.1)),
    512: (failed("oom"), {}),
    1024: (failed("skipped", "no bfloat16"), {}),
    2048: ({"observed": {"num_parameters": 1}}, {"observed": {"num_parameters": 2}}),
    4096: ({}, None),
    8192: ({}, {"measurement_version": 1}),
    # Their peaks of memory are alike all the same.
    16384: (STEP, STEP | {"timer": {"method": "window"}}),
    0: (roof(50.0, 8192), roof(0.5, 1024)),
}
"""What two devices measured, by context."""


def written(root, device, content):
    store = store_of(root / device, NOTEBOOK)
    for context, fields in content.items():
        known = metrics(10.0) | {
            "section": "execution",
            "phase": "graph_step",
            "measurement_version": 2,
            "timer": {"method": "graph"},
            "session": device,
            "case": {"size": "small", "context": context, "precision": "bf16", "batch": 4},
        }
        store.append(Record(notebook=NOTEBOOK, device=device, **known | fields))
    return compare.side(device, root)


@pytest.fixture
def sides(tmp_path):
    return [
        written(
            tmp_path, name, {key: pair[n] for key, pair in PAIRS.items() if pair[n] is not None}
        )
        for n, name in enumerate("ab")
    ]


def test_what_is_alike_gets_a_ratio_and_what_is_not_is_named(sides):
    comparison = compare.Comparison(*sides)
    rows = comparison.common
    times = rows[rows["kind"] == "device"]
    assert list(times["ratio"]) == pytest.approx([2.0, 10 / 10.1])
    assert list(times["verdict"]) == ["ahead", "undecided"]
    assert (times["low"] < times["ratio"]).all() and (times["ratio"] < times["high"]).all()
    assert list(rows[rows["kind"] == "memory"]["verdict"]) == ["level"] * 3
    # A roof by what a unit takes, whatever its size.
    assert list(rows[rows["section"] == "ceilings"]["ratio"]) == pytest.approx([0.01])
    apart = comparison.apart
    assert dict(zip(apart["case"] + " " + apart["measured on"], apart["why"], strict=True)) == {
        "small (129 M), batch 4, context 512, bf16 b": "did not fit",
        "small (129 M), batch 4, context 1,024, bf16 b": "not possible: no bfloat16",
        "small (129 M), batch 4, context 2,048, bf16 a and b": "num_parameters differs",
        "small (129 M), batch 4, context 4,096, bf16 a": "not measured",
        "small (129 M), batch 4, context 8,192, bf16 a and b": "measured in two ways, 2 and 1",
    }


def test_a_page_has_findings_and_every_row(sides):
    comparison = compare.Comparison(*sides)
    text = compare.page(comparison, {NOTEBOOK: "01.svg"})
    assert "Device times, 2 rows: b is" in text and "1 ahead and 1 undecided" in text
    assert "| a and b | num_parameters differs | 1 |" in text


def test_a_report_lists_the_other_devices(tmp_path, sides):
    written(tmp_path, "cpu-c", {128: metrics(1000.0)})
    written(tmp_path, "2x-a", {128: metrics(5.0)})
    store_of(tmp_path / "d", NOTEBOOK).path.write_text("{}\n")
    text = compare.others(sides[0], tmp_path)
    head, _, *rows = [line for line in text.splitlines() if line.startswith("|")]
    assert head == "| device | rows in common | device times |"
    assert rows == [
        "| [b](../figures/b/report.md) | 6 | 1.50× |",
        "| [cpu-c](../figures/cpu-c/report.md) | 2 | 0.0100× |",
    ]
    assert text.endswith(" Several GPUs together: [2x-a](../figures/2x-a).")
    assert compare.others(sides[0], tmp_path / "a") == ""


def test_a_device_measured_twice_has_two_names(tmp_path):
    runs = {"first": 10.0, "again": 9.5}
    sides = [written(tmp_path / root, "a", {128: metrics(time)}) for root, time in runs.items()]
    comparison = compare.Comparison(*sides)
    assert (comparison.base, comparison.other) == ("a", "a in again")
    assert "a in again is 1.05× as fast" in compare.page(comparison, {})
    (axis,) = compare.figure(comparison, NOTEBOOK).axes
    least, most = axis.get_xlim()
    assert sum(least < tick < most for tick in axis.get_xticks()) > 2, "of a narrow range, too"
