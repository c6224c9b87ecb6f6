"""Devices beside one another: what is alike is compared, what is not is named, nothing becomes
zero.
"""

import pytest

from labkit.records import Record, RecordStore
from labkit.report import compare, figures

NOTEBOOK = "01_benchmarking"
CASE = {"size": "small", "context": 512, "precision": "bf16", "batch": 4}


def record(device, context=512, time=10.0, method="graph", **fields):
    metrics = {"median_ms": time, "half_width_fraction": 0.001, "peak_bytes": 2**30}
    content = {
        "notebook": NOTEBOOK,
        "section": "execution",
        "case": CASE | {"context": context},
        "phase": "graph_step",
        "device": device,
        "measurement_version": 2,
        "metrics": metrics,
        "timer": {"method": method},
        "session": device,
    }
    return Record(**content | fields)


def failed(device, context, status, reason=""):
    return record(device, context, status=status, reason=reason, metrics={}, timer={})


def written(root, device, records):
    store = RecordStore(root / device / "records" / f"{NOTEBOOK}.jsonl")
    store.path.parent.mkdir(parents=True)
    for one in records:
        store.append(one)
    return compare.side(device, root)


@pytest.fixture
def sides(tmp_path):
    base = [
        record("a", 128, 10.0),
        record("a", 256, 10.0),
        failed("a", 512, "oom"),
        failed("a", 1024, "skipped", "no bfloat16"),
        record("a", 2048, observed={"num_parameters": 1}),
        record("a", 4096),
    ]
    other = [
        record("b", 128, 5.0),
        record("b", 256, 10.1),
        record("b", 512),
        record("b", 1024),
        record("b", 2048, observed={"num_parameters": 2}),
        record("b", 4096, method="window", phase="train_step"),
    ]
    return written(tmp_path, "a", base), written(tmp_path, "b", other)


def test_rows_that_both_have_get_a_ratio_with_its_interval(sides):
    rows = compare.Comparison(*sides).common
    times = rows[rows["kind"] == "device"].set_index("case")
    assert list(times["ratio"]) == pytest.approx([2.0, 10 / 10.1])
    assert list(times["verdict"]) == ["ahead", "undecided"]
    assert (times["low"] < times["ratio"]).all() and (times["ratio"] < times["high"]).all()
    assert set(rows[rows["kind"] == "memory"]["verdict"]) == {"level"}


def test_what_one_device_lacks_is_said_with_its_reason(sides):
    single = compare.Comparison(*sides).single
    reasons = dict(zip(single["case"] + " " + single["has"], single["why"], strict=True))
    words = "small (129 M), batch 4, context {}, bf16 {}"
    assert reasons == {
        words.format("512", "b"): "did not fit",
        words.format("1,024", "b"): "not possible: no bfloat16",
        words.format("4,096", "a"): "not measured",
        words.format("4,096", "b"): "not measured",
    }


def test_what_is_unlike_is_named_and_enters_no_ratio(tmp_path, sides):
    comparison = compare.Comparison(*sides)
    assert dict(comparison.unlike) == {"01_benchmarking, execution: num_parameters differs": 1}
    call = record("c", 128, method="window", phase="train_step")
    device = record("d", 128, phase="train_step")
    version = record("d", 256, measurement_version=1)
    sides = [
        written(tmp_path, "c", [call, record("c", 256), record("c")]),
        written(tmp_path, "d", [device, version, record("d")]),
    ]
    # Their peaks of memory are alike all the same.
    comparison = compare.Comparison(*sides)
    assert set(comparison.common["kind"]) == {"device", "memory"}
    assert len(comparison.common) == 3
    assert list(comparison.unlike) == ["01_benchmarking was measured in two ways, 2 and 1"]


def test_roofs_are_compared_by_what_a_unit_takes(tmp_path):
    def roof(device, rate, k):
        metrics = {"median_ms": 1.0, "sustained_ms": 1.0, "sustained_tflops": rate}
        case = {"kind": "gemm", "precision": "fp32"}
        fields = {"section": "ceilings", "phase": "rate", "metrics": metrics, "observed": {"k": k}}
        return record(device, **fields | {"case": case})

    sides = [
        written(tmp_path, "a", [roof("a", 50.0, 8192)]),
        written(tmp_path, "b", [roof("b", 0.5, 1024)]),
    ]
    (row,) = compare.Comparison(*sides).common.to_dict("records")
    assert (row["kind"], row["ratio"]) == ("sustained", pytest.approx(0.01))


def test_a_page_has_findings_a_figure_and_every_row(sides):
    comparison = compare.Comparison(*sides)
    text = compare.page(comparison, {NOTEBOOK: "01.svg"})
    assert text.startswith("# b beside a\n")
    assert "Device times, 2 rows: b is" in text and "1 ahead and 1 undecided" in text
    assert "1 row: 01_benchmarking, execution: num_parameters differs." in text
    assert figures.svg(compare.figure(comparison, NOTEBOOK)).startswith(b"<?xml")
    assert compare.figure(comparison, "02_nsys_analysis") is None


def test_a_report_lists_the_other_devices_of_its_kind(tmp_path, sides):
    written(tmp_path, "cpu-c", [record("cpu-c", 128, 1000.0)])
    damaged = tmp_path / "d" / "records" / f"{NOTEBOOK}.jsonl"
    damaged.parent.mkdir(parents=True)
    damaged.write_text("{}\n")
    text = compare.others(sides[0].chapters, tmp_path)
    head, _, *rows = [line for line in text.splitlines() if line.startswith("|")]
    assert head == "| device | rows in common | device times |"
    assert rows == ["| b | 4 | 1.50× |"] and "`labkit compare a b`" in text
    assert compare.others(sides[0].chapters, tmp_path / "a") == ""


def test_a_device_measured_twice_has_two_names(tmp_path):
    sides = [
        written(tmp_path / root, "a", [record("a", 128, time)])
        for root, time in (("first", 10.0), ("again", 5.0))
    ]
    comparison = compare.Comparison(*sides)
    assert (comparison.base.name, comparison.other.name) == ("a", "a in again")
    assert "a in again is 2.00× as fast" in compare.page(comparison, {})
