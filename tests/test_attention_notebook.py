"""Chapter 05's queries, from a few rows made by hand."""

import pandas as pd
import pytest

from labkit import accounting
from labkit.report import attention as report

CASE = {"batch": 8, "precision": "bf16", **report.LONG}


def call(impl="eager", phase="forward", median_ms=8.0, **values) -> dict:
    timer = {"median_ms": median_ms, "host_median_ms": median_ms, "launch_median_ms": 0.1}
    return {"status": "ok", "impl": impl, "phase": phase, **CASE, **timer, **values}


ROOFS = pd.DataFrame(
    [
        {"status": "ok", "kind": "copy", "precision": "fp32", "achieved_gb_per_s": 4000.0},
        {"status": "ok", "kind": "gemm", "precision": "bf16", "achieved_tflops": 800.0},
    ]
)


def test_a_prediction_counts_passes_at_the_copy_rate_and_products_at_theirs():
    impls = ("eager", "compiled", "sdpa_flash")
    rows = [call(impl, phase) for impl in impls for phase in ("forward", "backward")]
    found = report.predicted(pd.DataFrame(rows), ROOFS).set_index(["impl", "phase"])
    pass_ms = 2 * 8 * 16384**2 / 4000e9 * 1e3
    product_ms = 2 * 8 * 16384**2 * 64 / 800e12 * 1e3
    assert product_ms < pass_ms, "so a product that reads or writes the scores takes a pass"
    times = {
        ("eager", "forward"): 6 * pass_ms,
        ("eager", "backward"): 12 * pass_ms,
        ("compiled", "forward"): 4 * pass_ms,
        ("sdpa_flash", "forward"): 2 * product_ms,
        ("sdpa_flash", "backward"): 5 * product_ms,
    }
    for case, time_ms in times.items():
        assert found.loc[case, "predicted_ms"] == pytest.approx(time_ms)


def test_kept_bytes_are_those_of_what_ran():
    """A compiled formula that became SDPA keeps what SDPA keeps."""
    ran = {
        ("eager", 0.0): "eager",
        ("compiled", 0.0): "eager",
        ("compiled_heads", 2.0): "fused",
        ("sdpa_flash", 0.0): "fused",
        ("sdpa_math", 0.0): "math",
    }
    rows = [call(impl, saved_bytes=1.0, num_replacements=number) for impl, number in ran]
    forms = [accounting.attention_saved_bytes(kind, 8, 16384, 64, 2) for kind in ran.values()]
    assert report.counted(pd.DataFrame(rows))["predicted_bytes"].tolist() == forms
