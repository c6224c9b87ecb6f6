"""Chapter 02: what its queries and figures make of invented captures; its experiment is in
test_nsys_analysis.py.
"""

import pandas as pd
import pytest

from labkit.report import figures, verdicts
from labkit.report import nsys_analysis as report
from labkit.report.facts import compare, measured, sentence
from labkit.report.frame import DISTURBED

CASE = {"size": "2.7b", "context": 512, "attention": "eager"}
FP32 = {"precision": "fp32"}
BF16 = {"precision": "bf16"}


def captured(
    precision="fp32", phase="train_step", *, matmul=900.0, copies=0.0, dtype="", **changes
):
    """A step of which products take `matmul` µs in forward, twice that in backward, and all else
    100 µs a pass.
    """
    part = "inference" if phase == "inference" else "forward"
    classes = [(part, "matmul", matmul), (part, "softmax", 100.0)]
    classes += [(part, "copy", copies)] * (copies > 0)
    kernels = [
        (part, "gemm", "matmul", 7, matmul),
        (part, f"mask[masked_fill_kernel{dtype}]", "elementwise", 2, 50.0),
    ]
    kernels += [(part, name, "elementwise", 1, us) for name, us in (("add", 9.0), ("mul", 8.0))]
    if part == "forward":
        classes.append(("backward", "matmul", 2 * matmul))
        kernels += [
            ("backward", "gemm_t", "matmul", 7, 2 * matmul),
            ("step", "gemm", "matmul", 14, 3 * matmul),
        ]
    core = f"{part}/block/attention/core"
    ranges = [
        (f"{core}/scores", "matmul", matmul),
        (f"{core}/softmax", "softmax", 100.0),
        (part, "matmul", 1.0),
    ]
    timeline = {
        "start_us": [0.0, 10.0, 30.0, 50.0],
        "duration_us": [8.0, 8.0, 15.0, 5.0],
        "phase": [1, 1, 2, 3],
    }
    timeline |= {"kernel_class": [0, 1, 0, 2], "block": [0, 0, 0, -1], "stream": [7] * 4}
    timeline |= {"class_names": ["matmul", "softmax", "optimizer"]}
    timeline |= {"phase_names": ["inference", "forward", "backward", "optimizer"]}
    tables = {
        "classes": pd.DataFrame(classes, columns=["phase", "kernel_class", "total_us"]),
        "kernels": pd.DataFrame(
            kernels, columns=["phase", "short_name", "kernel_class", "launches", "total_us"]
        ),
        "ranges": pd.DataFrame(ranges, columns=["path", "kernel_class", "total_us"]),
        "timeline": timeline,
    }
    row = {
        **CASE,
        "precision": precision,
        "phase": phase,
        "batch": 4,
        "status": "ok",
        "timer_method": "nsys",
    }
    return row | {"disturbed": False, "session": "a", "observed": {"tables": tables}} | changes


def classes(*rows):
    return report.by_class(report.tables(pd.DataFrame(rows), "classes"))


def test_shares_and_times_of_a_step_are_those_of_its_classes():
    rows = classes(captured(), captured("bf16", attention="auto"))
    row = rows.iloc[0]
    assert row["matmul_ms"] == pytest.approx(2.7) and row["rest_ms"] == pytest.approx(0.1)
    assert row["total_ms"] == pytest.approx(2.8) and row["matmul_share"] == pytest.approx(2.7 / 2.8)
    assert pd.isna(row["copy_ms"]) and rows["way"].tolist() == ["fp32", "bf16, FlashAttention"]


@pytest.mark.parametrize(
    ("matmul", "copies", "products", "rest"),
    [(9e3, 0.0, "level", "level"), (1e3, 4e3, "ahead", "behind"), (5e4, 0.0, "behind", "level")],
)
def test_products_and_the_rest_are_compared_each_for_itself(matmul, copies, products, rest):
    rows = classes(captured(matmul=9e3), captured("bf16", matmul=matmul, copies=copies))
    facts = [compare(rows, FP32, BF16, value=value, **CASE) for value in ("matmul_ms", "rest_ms")]
    assert [fact.verdict for fact in facts] == [products, rest]
    assert facts[0].time == verdicts.DEVICE and facts[0]["ratio"].value == pytest.approx(
        9e3 / matmul
    )


def test_softmax_and_products_move_their_fewest_bytes_in_their_time():
    steps = pd.DataFrame([captured("bf16", "inference"), captured("bf16", "train_step")])
    (row,) = report.attention(steps).to_dict("records")
    scores = 4 * 32 * 32 * 512**2  # batch, layers, heads of 2.7b
    assert row["softmax_gb_per_s"] == pytest.approx(8 * scores / 100e-6 / 1e9)
    assert row["matmul_gb_per_s"] == pytest.approx(2 * (2 + 4 * 80 / 512) * scores / 900e-6 / 1e9)
    assert row["total_ms"] == pytest.approx(1.0), "what is outside attention's core is not in it"


def test_kernels_are_ranked_within_their_pass():
    made = report.kernels_table(
        pd.DataFrame([captured(), captured(phase="inference")]), **CASE, **FP32
    )
    assert made["kernel"].tolist() == ["`gemm`", "`mask[masked_fill_kernel]`", "`add`", "`gemm_t`"]
    assert made["part"].tolist() == ["forward"] * 3 + ["backward"] and made["ms"].tolist() == [
        0.9,
        0.0,
        0.0,
        1.8,
    ]
    bf16 = captured(matmul=1.0, dtype=":BFloat16")
    (first,) = report.kernels(pd.DataFrame([bf16]), 1, part="forward").to_dict("records")
    assert (first["class"], first["kernel"]) == ("elementwise", "mask[masked_fill_kernel:BFloat16]")


def test_a_timeline_shows_every_phase_and_one_block_closer():
    whole, closer = report.timeline(pd.DataFrame([captured()]), **CASE, **FP32).axes
    assert [text.get_text() for text in whole.texts] == [
        "forward",
        "backward",
        "optimizer",
        "0",
        "0",
    ]
    drawn = [axis.get_legend_handles_labels()[1] for axis in (whole, closer)]
    assert drawn == [["matmul", "softmax", "optimizer"], ["matmul", "softmax"]]
    assert report.timeline(pd.DataFrame([captured()]), **CASE, **BF16) is None


def test_bars_are_stacked_in_order_and_a_way_that_lacks_a_size_leaves_its_place():
    rows = classes(captured(size="small"), captured(), captured("bf16", size="small"))
    one, two = figures.class_bars(rows, "size", "_ms", "ms", "way").axes
    assert [axis.get_title() for axis in (one, two)] == ["fp32", "bf16"]
    widths = [[bar.get_width() for bar in bars] for bars in one.containers]
    assert widths == [pytest.approx([2.7, 2.7]), pytest.approx([0.1, 0.1])]
    assert [bar.get_width() for bar in two.containers[0]] == pytest.approx([2.7, 0.0])
    assert [bar.get_x() for bar in one.containers[1]] == pytest.approx([2.7, 2.7])


@pytest.mark.parametrize(
    "rows", [[], [captured(status="oom", observed={})], [captured(phase="inference")]]
)
def test_what_is_missing_is_said_and_nothing_raises(rows):
    made = pd.DataFrame(rows)
    for fact in (
        measured(classes(*rows), "matmul_share", "%", **CASE, **FP32, phase="train_step"),
        compare(report.attention(made), FP32, BF16, value="softmax_ms", **CASE),
        compare(report.kernels(made), FP32, BF16, value="total_ms", **CASE, part="forward"),
    ):
        assert "Not measured" in sentence(fact, "never")
    assert report.timeline(made, phase="train_step") is None
    assert figures.class_bars(classes(), "size", "_ms", "ms") is None


def test_a_disturbed_capture_marks_every_number_made_of_it():
    made = pd.DataFrame(
        [captured("bf16", "inference", disturbed=True), captured(phase="inference")]
    )
    facts = [measured(report.attention(made), "softmax_gb_per_s", **CASE, **BF16)]
    facts += [compare(report.attention(made), FP32, BF16, value="total_ms", **CASE)]
    facts += [measured(report.kernels(made, 1, part="inference"), "total_ms", **CASE, **BF16)]
    assert all(fact.marked and DISTURBED in str(fact) for fact in facts)
    assert not measured(report.attention(made), "softmax_gb_per_s", **CASE, **FP32).marked
