"""What a device can do at best: ceilings, the timer beside another clock, the host, steps run back
to back.
"""

from functools import partial

import chapters
import pytest
import torch
from chapters import in_section

from labkit.experiments import sections
from labkit.experiments.benchmarking import cases, run_case
from labkit.experiments.sweep import Case

measure = partial(chapters.measure, run_case)


pytestmark = pytest.mark.usefixtures("briefly_on_a_cpu")


@pytest.fixture
def small_ceilings(monkeypatch):
    monkeypatch.setattr(sections, "CEILING_SIZES", {"cpu": 64})
    monkeypatch.setitem(sections.COPY_BYTES, "cpu", 2**20)
    monkeypatch.setitem(sections.CEILING_TIME_S, "cpu", 0.05)
    monkeypatch.setitem(sections.SUSTAINED_S, "cpu", 0.03)


OF_PRODUCT = ({"m": 64, "n": 64, "k": 64}, "achieved_tflops", 2 * 64**3 / 1e12)
# What is read and what is written.
OF_COPY = ({"num_bytes": 2**20}, "achieved_gb_per_s", 2 * 2**20 / 1e9)


def test_a_ceiling_is_a_rate_in_bursts_and_sustained(small_ceilings):
    for case in in_section(cases("smoke", "cpu"), "ceilings"):
        observed, unit, work = OF_COPY if case.parameters["kind"] == "copy" else OF_PRODUCT
        found = measure(case)["rate"]
        assert (found.case, found.observed) == (case.parameters, observed)
        burst = work / (found.metrics["median_ms"] * 1e-3)
        sustained = work / (found.metrics["sustained_ms"] * 1e-3)
        assert found.metrics[unit] == pytest.approx(burst)
        assert (found.metrics["datasheet"], found.metrics["datasheet_fraction"]) == (None, None)
        assert found.metrics[unit.replace("achieved", "sustained")] == pytest.approx(sustained)
        assert found.telemetry["sustained"]["no_energy"] == "no energy counter is read on cpu"
        assert not {"joules", "watts", "tflop_per_joule", "sm_clock_mhz"} & found.metrics.keys()


def test_the_label_of_a_product_is_read_back_from_its_operands(small_ceilings, monkeypatch):
    float32 = partial(torch.randn, dtype=torch.float32)
    monkeypatch.setattr(torch, "randn", lambda *shape, dtype, **rest: float32(*shape, **rest))
    case = Case("ceilings", {"kind": "gemm", "precision": "bf16"}, ("rate",), 60.0)
    assert measure(case)["rate"].case == {"kind": "gemm", "precision": "fp32"}
