"""Notebook 08's experiment: its batches, its cases, and a run of its sections on a CPU."""

import math

import pytest
import torch
from chapters import CPU, in_section, measure

from labkit.configs import SIGLIP2_SIZES
from labkit.experiments import siglip2
from labkit.experiments.siglip2 import Batch, cases, run_case
from labkit.experiments.sweep import Case

TINY = {"size": "tiny", "workload": "B", "images": 2, "precision": "fp32"}


pytestmark = pytest.mark.usefixtures("on_a_cpu")


def test_both_workloads_have_as_many_patches():
    same, mixed = (siglip2.draw_grids(workload, 64, 16).prod(1) for workload in "AB")
    assert same.tolist() == [16**2] * 64 and mixed.sum() == same.sum()
    assert torch.equal(mixed, siglip2.draw_grids("B", 64, 16).prod(1))
    # Most are small, few are large.
    assert mixed.median() < 0.7 * 16**2 and 2 * 16**2 < mixed.max() <= 4.4 * 16**2
    with pytest.raises(ValueError, match="unknown workload 'C'; accepted: A, B"):
        siglip2.draw_grids("C", 64, 16)


def test_work_is_counted():
    batch, c = Batch(CPU, TINY), SIGLIP2_SIZES["tiny"]
    sizes = batch.grids.prod(1).tolist()
    weights = c.patch_dim * c.d_model + c.num_layers * (4 * c.d_model**2 + 2 * c.d_model * c.d_ff)
    scores = sum(n * n for n in sizes) * c.d_model * c.num_layers
    assert batch.flops == 2 * sum(sizes) * weights + 4 * scores


@pytest.mark.parametrize("section", ["floor", "steps", "profile", "accuracy", "kernels"])
def test_sections_run_on_a_cpu(section):
    found = in_section(cases("smoke", "cpu"), section)
    case = next((case for case in found if case.parameters.get("way") == "fused"), found[0])
    ceilings = {f"gemm fp32 {kind}_tflops": 1.0 for kind in ("achieved", "sustained")}
    ceilings["copy fp32 achieved_gb_per_s"] = 10.0
    results = measure(run_case, case, ceilings)
    assert set(results) == set(case.phases)
    for result in results.values():
        assert result.case == case.parameters
        assert all(math.isfinite(x) for x in result.metrics.values() if x is not None)
    metrics = {phase: result.metrics for phase, result in results.items()}
    if section == "steps":
        assert metrics["forward_backward"]["flops"] == 3 * metrics["forward"]["flops"]
        assert metrics["forward_backward"]["sustained_ms"] > 0
    if section == "accuracy":
        assert 0 < metrics["fused"]["out_error"] < 1e-5 > metrics["fused"]["gradient_error"] / 10


def test_a_wrong_gradient_has_no_error_to_record(monkeypatch):
    right = siglip2._results
    weight = "post_layernorm.weight"

    def wrong(size, precision, impl, *others):
        found = right(size, precision, impl, *others)
        return found | {weight: found[weight] * (1.1 if impl == "fused" else 1)}

    monkeypatch.setattr(siglip2, "_results", wrong)
    case = Case("accuracy", {"size": "tiny", "precision": "fp32"}, ("fused",), 60.0)
    with pytest.raises(AssertionError, match=rf"\({weight}\)"):
        measure(run_case, case)
