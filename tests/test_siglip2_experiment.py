"""Notebook 08's experiment: its batches, its cases, and a run of its sections on a CPU."""

import math

import pytest
import torch
from chapters import CPU, in_section, measure, on_a_cpu

from labkit.configs import SIGLIP2_SIZES
from labkit.experiments import siglip2
from labkit.experiments.sweep import Case, Skip
from labkit.models.siglip2 import IMPLS


@pytest.fixture
def here(monkeypatch):
    yield from on_a_cpu(monkeypatch)


@pytest.mark.parametrize(("num_images", "side"), [(2, 4), (64, 16)])
def test_both_workloads_have_as_many_patches(num_images, side):
    same, mixed = (siglip2.draw_grids(workload, num_images, side).prod(1) for workload in "AB")
    assert same.tolist() == [side**2] * num_images
    assert mixed.sum() == same.sum() and torch.equal(
        mixed, siglip2.draw_grids("B", num_images, side).prod(1)
    )
    assert mixed.max() <= 4 * side**2 * 1.1
    if side == 16:  # most are small, few are large
        assert (
            mixed.median() < 0.7 * side**2 and mixed.max() > 2 * side**2 and len(mixed) > num_images
        )
    with pytest.raises(ValueError, match="unknown workload 'C'; accepted: A, B"):
        siglip2.draw_grids("C", num_images, side)


def test_a_way_whose_attention_cannot_run_here_is_skipped_with_the_reason():
    batch = siglip2.Batch.of(
        CPU, {"size": "tiny", "workload": "A", "images": 1, "precision": "fp32"}
    )
    with pytest.raises(Skip, match="FlashAttention-3 needs a CUDA device; the tensors are on cpu"):
        siglip2._encoder(batch, "fused, FlashAttention-3")


def test_only_what_reads_the_grids_on_the_host_breaks_a_graph(here):
    found = {
        impl: siglip2.graph_breaks(CPU, "fp32", impl) for impl in ("eager", "positions", "fused")
    }
    assert found["eager"] > 0 and found["positions"] == found["fused"] == 0
    parameters = {"size": "tiny", "workload": "A", "images": 1, "precision": "fp32", "way": "eager"}
    case = Case("steps", parameters, ("forward", "step"), timeout_s=60.0, time_limit_s=0.01)
    seen = {
        phase: run().observed.get("breaks_of_one_graph")
        for phase, run in siglip2.run_case(case, {})
    }
    assert seen == {"forward": None, "step": found["eager"]}


def test_work_is_counted():
    parameters = {"size": "tiny", "workload": "B", "images": 2, "precision": "fp32"}
    batch, c = siglip2.Batch.of(CPU, parameters), SIGLIP2_SIZES["tiny"]
    sizes = batch.grids.prod(1).tolist()
    weights = c.patch_dim * c.d_model + c.num_layers * (4 * c.d_model**2 + 2 * c.d_model * c.d_ff)
    scores = sum(n * n for n in sizes) * c.d_model * c.num_layers
    assert batch.flops == 2 * sum(sizes) * weights + 4 * scores
    assert batch.patches.shape == (sum(sizes), c.patch_dim) and batch.grad.shape == (
        sum(sizes),
        c.d_model,
    )


def test_a_cpu_compiles_nothing_and_a_gpu_measures_every_way():
    smoke, full = siglip2.cases("smoke", "cpu"), siglip2.cases("full", "cuda")
    assert not [case for case in smoke if "compile" in str(case.parameters)]
    ways = [
        case.parameters["way"]
        for case in in_section(full, "steps")
        if case.parameters["workload"] == "A"
    ]
    assert {*IMPLS, "eager + compile", "fused + compile", "transformers sdpa + compile"} <= set(
        ways
    )
    assert len(ways) == len(set(ways)) and all(
        case.fresh_process for case in in_section(full, "steps")
    )
    assert {case.parameters["precision"] for case in in_section(full, "accuracy")} == {
        "bf16",
        "fp16",
        "fp32",
    }


def test_every_way_gives_the_same_on_a_cpu(here):
    parameters = {"size": "tiny", "workload": "B", "images": 2, "precision": "fp32"}
    batch, outs = siglip2.Batch.of(CPU, parameters), {}
    for way in (*IMPLS, siglip2.RECOMPUTED):
        torch.manual_seed(0)
        model, forward = siglip2._encoder(batch, way)
        model.eval()
        outs[way] = forward()
    assert all(torch.allclose(out, outs["eager"], atol=1e-5) for out in outs.values())
    assert outs["eager"].std() > 0.1


@pytest.mark.parametrize("section", ["floor", "steps", "profile", "modules", "accuracy", "kernels"])
def test_sections_run_on_a_cpu(here, section):
    cases = in_section(siglip2.cases("smoke", "cpu"), section)
    case = next((case for case in cases if case.parameters.get("way") == "fused"), cases[0])
    results = measure(
        siglip2.run_case, case, {"gemm fp32": 1.0, "sustained gemm fp32": 1.0, "copy": 10.0}
    )
    assert set(results) == set(case.phases)
    for result in results.values():
        assert result.case == case.parameters and all(
            math.isfinite(x) for x in result.metrics.values() if x is not None
        )
    if section == "steps":
        both = results["forward_backward"]
        assert both.metrics["sustained_ms"] > 0 and not both.observed["is_replayed"]
        assert both.metrics["flops"] == 3 * results["forward"].metrics["flops"]
    if section == "modules":
        assert (
            results["cu_seqlens forward"].metrics["out_error"]
            < 1e-6
            > results["fused forward"].metrics["out_error"]
        )
    if section == "accuracy":
        errors = results["fused"].metrics
        assert 0 < errors["out_error"] < 1e-5 and 0 < errors["gradient_error"] < 1e-4


def test_a_peer_that_is_not_installed_is_skipped(monkeypatch):
    monkeypatch.setattr(siglip2.importlib.util, "find_spec", lambda name: None)
    batch = siglip2.Batch.of(
        CPU, {"size": "tiny", "workload": "A", "images": 1, "precision": "fp32"}
    )
    with pytest.raises(Skip, match="transformers is not installed"):
        siglip2._transformers(batch, "transformers sdpa")


def test_a_wrong_gradient_has_no_error_to_record():
    case = siglip2.Case("accuracy", {"size": "tiny", "precision": "fp32"}, ("fused",), 1.0)
    exact = {
        "out": torch.ones(4, dtype=torch.float64),
        "weight": torch.ones(4, dtype=torch.float64),
    }
    eager = {name: (x + 1e-6).float() for name, x in exact.items()}
    wrong = eager | {"weight": eager["weight"] * 1.1}
    assert (
        siglip2._measure_accuracy(lambda impl: (eager, eager, exact), case, "fused").metrics[
            "out_error"
        ]
        > 0
    )
    with pytest.raises(AssertionError, match=r"\(weight\)"):
        siglip2._measure_accuracy(lambda impl: (wrong, eager, exact), case, "fused")
