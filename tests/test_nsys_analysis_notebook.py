"""Chapter 02: what its queries and figures make of invented captures; its experiment is in
test_nsys_analysis.py.
"""

import pandas as pd
import pytest

from labkit.report import nsys_analysis as report

CASE = {"size": "2.7b", "context": 512, "attention": "eager"}
FP32 = {"precision": "fp32"}
BF16 = {"precision": "bf16"}


def captured(precision="fp32", phase="train_step", *, matmul=900.0, copies=0.0, **changes):
    """A step of which products take `matmul` µs in forward, twice that in backward, and softmax
    100 µs.
    """
    part = "inference" if phase == "inference" else "forward"
    classes = [(part, "matmul", matmul), (part, "softmax", 100.0), (part, "copy", copies)]
    classes += [("backward", "matmul", 2 * matmul)]
    core = f"{part}/block/attention/core"
    ranges = [(f"{core}/scores", "matmul", matmul), (f"{core}/softmax", "softmax", 100.0)]

    def table(rows: list, *names: str) -> pd.DataFrame:
        return pd.DataFrame(rows, columns=[*names, "total_us"])

    tables = {
        "classes": table(classes, "phase", "kernel_class"),
        "ranges": table([*ranges, (part, "matmul", 1.0)], "path", "kernel_class"),
    }
    return {
        **CASE,
        "precision": precision,
        "phase": phase,
        "batch": 4,
        "status": "ok",
        "timer_method": "nsys",
        "disturbed": False,
        "observed": {"tables": tables},
        **changes,
    }


def classes(*rows):
    return report.by_class(report.tables(pd.DataFrame(rows), "classes"))


def test_shares_and_times_of_a_step_are_those_of_its_classes():
    rows = classes(captured(), captured("bf16", attention="auto"))
    row = rows.iloc[0]
    assert row["matmul_ms"] == pytest.approx(2.7) and row["rest_ms"] == pytest.approx(0.1)
    assert row["total_ms"] == pytest.approx(2.8) and row["matmul_share"] == pytest.approx(2.7 / 2.8)
    assert rows["way"].tolist() == ["fp32", "bf16, FlashAttention"]


def test_softmax_and_products_move_their_fewest_bytes_in_their_time():
    steps = pd.DataFrame([captured("bf16", "inference"), captured("bf16")])
    (row,) = report.attention(steps).to_dict("records")
    scores = 4 * 32 * 32 * 512**2  # batch, layers, heads of 2.7b
    assert row["softmax_gb_per_s"] == pytest.approx(8 * scores / 100e-6 / 1e9)
    assert row["matmul_gb_per_s"] == pytest.approx(2 * (2 + 4 * 80 / 512) * scores / 900e-6 / 1e9)
    assert row["total_ms"] == pytest.approx(1.0), "what is outside attention's core is not in it"
