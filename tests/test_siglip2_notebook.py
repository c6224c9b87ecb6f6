"""Notebook 08: its batches, its cases, a run of its sections on a CPU, and what its report says of made-up records."""

import math
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from chapters import CPU, in_section, measure, on_a_cpu

from labkit import notebooks
from labkit.configs import REFERENCE_DEVICE, SIGLIP2_SIZES
from labkit.experiments import fused_contest, siglip2
from labkit.experiments.sweep import Case, Skip
from labkit.models.siglip2 import IMPLS
from labkit.report import encoder_parts
from labkit.report import siglip2 as report
from labkit.report.chapter import Chapter


@pytest.fixture
def here(monkeypatch):
    yield from on_a_cpu(monkeypatch)


# --- experiment ---


@pytest.mark.parametrize(("num_images", "side"), [(2, 4), (64, 16)])
def test_both_workloads_have_as_many_patches(num_images, side):
    same, mixed = (siglip2.draw_grids(workload, num_images, side).prod(1) for workload in "AB")
    assert same.tolist() == [side**2] * num_images
    assert mixed.sum() == same.sum() and torch.equal(mixed, siglip2.draw_grids("B", num_images, side).prod(1))
    assert mixed.max() <= 4 * side**2 * 1.1
    if side == 16:  # most are small, few are large
        assert mixed.median() < 0.7 * side**2 and mixed.max() > 2 * side**2 and len(mixed) > num_images
    with pytest.raises(ValueError, match="unknown workload 'C'; accepted: A, B"):
        siglip2.draw_grids("C", num_images, side)


def test_a_way_whose_attention_cannot_run_here_is_skipped_with_the_reason():
    batch = siglip2.Batch.of(CPU, {"size": "tiny", "workload": "A", "images": 1, "precision": "fp32"})
    with pytest.raises(Skip, match="FlashAttention-3 needs a CUDA device; the tensors are on cpu"):
        siglip2._encoder(batch, "fused, FlashAttention-3")


def test_only_what_reads_the_grids_on_the_host_breaks_a_graph(here):
    found = {impl: siglip2.graph_breaks(CPU, "fp32", impl) for impl in ("eager", "positions", "fused")}
    assert found["eager"] > 0 and found["positions"] == found["fused"] == 0
    parameters = {"size": "tiny", "workload": "A", "images": 1, "precision": "fp32", "way": "eager"}
    case = Case("steps", parameters, ("forward", "step"), timeout_s=60.0, time_limit_s=0.01)
    seen = {phase: run().observed.get("breaks_of_one_graph") for phase, run in siglip2.run_case(case, {})}
    assert seen == {"forward": None, "step": found["eager"]}


def test_work_is_counted():
    parameters = {"size": "tiny", "workload": "B", "images": 2, "precision": "fp32"}
    batch, c = siglip2.Batch.of(CPU, parameters), SIGLIP2_SIZES["tiny"]
    sizes = batch.grids.prod(1).tolist()
    weights = c.patch_dim * c.d_model + c.num_layers * (4 * c.d_model**2 + 2 * c.d_model * c.d_ff)
    scores = sum(n * n for n in sizes) * c.d_model * c.num_layers
    assert batch.flops == 2 * sum(sizes) * weights + 4 * scores
    assert batch.patches.shape == (sum(sizes), c.patch_dim) and batch.grad.shape == (sum(sizes), c.d_model)


def test_a_cpu_compiles_nothing_and_a_gpu_measures_every_way():
    smoke, full = siglip2.cases("smoke", "cpu"), siglip2.cases("full", "cuda")
    assert not [case for case in smoke if "compile" in str(case.parameters)]
    ways = [case.parameters["way"] for case in in_section(full, "steps") if case.parameters["workload"] == "A"]
    assert {*IMPLS, "eager + compile", "fused + compile", "transformers sdpa + compile"} <= set(ways)
    assert len(ways) == len(set(ways)) and all(case.fresh_process for case in in_section(full, "steps"))
    assert {case.parameters["precision"] for case in in_section(full, "accuracy")} == {"bf16", "fp16", "fp32"}


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
    results = measure(siglip2.run_case, case, {"gemm fp32": 1.0, "sustained gemm fp32": 1.0, "copy": 10.0})
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
        assert results["cu_seqlens forward"].metrics["out_error"] < 1e-6 > results["fused forward"].metrics["out_error"]
    if section == "accuracy":
        errors = results["fused"].metrics
        assert 0 < errors["out_error"] < 1e-5 and 0 < errors["gradient_error"] < 1e-4


@pytest.mark.parametrize("operation", fused_contest.OPERATIONS)
def test_each_operation_of_the_contest_is_held_to_its_formula(operation):
    limits = {"timeout_s": 9.0}
    (case,) = fused_contest.kernel_cases([(operation, 32, 128)], ("ours", "eager"), "fp32", limits)
    contest = fused_contest.FusedContest(CPU, case, {"copy": 1.0, "gemm fp32": 1.0})
    assert contest.described() == case.parameters
    for impl, name in (phase.split(" ") for phase in case.phases):
        assert 0 < contest.judge(impl, name).budget_fraction <= 1
        assert contest.rates(impl, name, 1.0)["ceiling_fraction"] > 0
    assert contest.unavailable("quack")
    contest.inputs = tuple((1.01 * x).detach().requires_grad_() for x in contest.inputs)
    with pytest.raises(AssertionError, match="wrong"):
        contest.judge("ours", "forward_backward" if operation == "linear_cross_entropy" else "forward")


def test_a_peer_that_is_not_installed_is_skipped(monkeypatch):
    monkeypatch.setattr(siglip2.importlib.util, "find_spec", lambda name: None)
    batch = siglip2.Batch.of(CPU, {"size": "tiny", "workload": "A", "images": 1, "precision": "fp32"})
    with pytest.raises(Skip, match="transformers is not installed"):
        siglip2._transformers(batch, "transformers sdpa")


def test_a_wrong_gradient_has_no_error_to_record():
    case = siglip2.Case("accuracy", {"size": "tiny", "precision": "fp32"}, ("fused",), 1.0)
    exact = {"out": torch.ones(4, dtype=torch.float64), "weight": torch.ones(4, dtype=torch.float64)}
    eager = {name: (x + 1e-6).float() for name, x in exact.items()}
    wrong = eager | {"weight": eager["weight"] * 1.1}
    assert siglip2._measure_accuracy(lambda impl: (eager, eager, exact), case, "fused").metrics["out_error"] > 0
    with pytest.raises(AssertionError, match=r"\(weight\)"):
        siglip2._measure_accuracy(lambda impl: (wrong, eager, exact), case, "fused")


# --- report ---

MADE = {"section": "", "status": "ok", "reason": "", "samples": {}, "session": "s", "disturbed": False,
        "half_width_fraction": 0.0, "timer_method": "window", "precision": "bf16"}  # fmt: skip


def frame(*rows):
    made = pd.DataFrame([MADE | row for row in rows])
    made.attrs |= {"device": "a GPU", "device_kind": "cuda"}
    return made


def step(way, sustained, *, launched=None, workload="A", phase="forward_backward", **more):
    """A row as a step leaves it; one with a time of its launches was replayed from a graph."""
    observed = {"is_replayed": bool(launched), "num_patches": 16_384}
    observed |= {"breaks_of_one_graph": more.pop("graph_breaks")} if "graph_breaks" in more else {}
    times = {"sustained_ms": sustained, "median_ms": 0.9 * sustained, "call_ms": launched or sustained}
    row = {"way": way, "workload": workload, "phase": phase, "images": 64, "size": "so400m", "observed": observed}
    return row | times | {"peak_bytes": 8 * 2**30, "padded_fraction": 0.0} | more


def steps(*more):
    return frame(
        step("eager", 200.0, peak_bytes=20 * 2**30),
        step("eager + compile", 180.0, peak_bytes=18 * 2**30, graph_breaks=27),
        step("cu_seqlens", 150.0),
        step("positions", 151.0, launched=152.0),
        step("norm", 110.0, launched=140.0),
        step("fused", 80.0, launched=160.0, watts=690.0, sm_clock_mhz=1500.0, peak_bytes=9 * 2**30, graph_breaks=0),
        step("fused", 30.0, launched=50.0, phase="forward"),
        step("eager + compile", 60.0, phase="forward"),
        step("transformers sdpa", 120.0),
        step("fused", 82.0, launched=102.0, workload="B"),
        step("transformers sdpa", 246.0, workload="B", padded_fraction=0.6),
        *more,
    )


FLOOR = frame({"workload": "A", "phase": "forward_backward", "sustained_ms": 60.0, "observed": {}})


def test_each_step_stands_beside_the_one_before():
    found = report.saved(steps()).set_index("way")
    assert list(found.index) == ["cu_seqlens", "positions", "norm", "fused"]  # "attention" has no record
    assert found["saved_ms"].tolist() == [50.0, -1.0, 41.0, 30.0]
    assert found["verdict"].tolist() == ["ahead", "level", "ahead", "ahead"]
    assert found.loc["fused", "saved_bytes"] == -(2**30)


def test_a_table_of_steps_has_launched_and_replayed_times():
    failed = step("attention", 1.0, status="error", reason="boom", observed={}, sustained_ms=None, peak_bytes=None)
    table = report.table_steps(steps(failed), FLOOR).set_index("way")
    fused = table.loc[report.NAMES["fused"]]
    assert list(fused) == ["30.0", "80.0", "160", "9.00", "82.0", "75 %", "0"]
    assert table.loc[report.NAMES["eager + compile"], "breaks, as one graph"] == "27"
    assert table.loc[report.NAMES["attention"], "both (ms)"] == "error"
    assert not [way for way in table.index if "transformers" in way]


@pytest.mark.parametrize(("way", "launch_ms", "shown"), [("eager", 95.0, "100 †"), ("eager", 80.0, "100"),
                                                         ("norm", 95.0, "100")])  # fmt: skip
def test_a_launch_bound_forward_is_marked_unless_it_was_replayed(way, launch_ms, shown):
    forward = {"phase": "forward", "launch_median_ms": launch_ms, "host_median_ms": 100.0}
    replay = {"launched": 110.0} if way == "norm" else {}
    table = report.table_steps(steps(step(way, 100.0, **forward, **replay)), FLOOR).set_index("way")
    assert table.loc[report.NAMES[way], "forward (ms)"] == shown


def test_findings_of_steps_follow_their_records():
    whole, each, bound = report.findings_steps(steps(), FLOOR)
    assert whole.startswith("Forward + backward of 64 images of 256 patches in bf16, sustained: ")
    assert "eager, layers compiled 180 ms, fused 80.0; ahead, 2.25×; peak 18.0 and 9.00 GiB" in whole
    assert (
        "positions at once level (-1.00 ms, +0 MiB)" in each and "fused (+ MLP) ahead (+30.00 ms, -1,024 MiB)" in each
    )
    assert "In bursts the fused encoder takes 72.0 ms; sustained 80.0 at 690 W and 1,500 MHz" in bound
    assert "the products alone need 75 %" in bound and "instead of replayed 160" in bound
    failing = report.findings_steps(steps(step("attention", 1.0, status="error", reason="boom")), FLOOR)
    assert len(failing) == 3 and failing[0].endswith("9.00 GiB. 1 measurement of 12 failed: boom (1).")
    # Without a compiled original the plain one stands in for it, by name.
    rest = steps()
    rest = rest[rest["way"] != "eager + compile"]
    assert "eager 200 ms, fused 80.0; ahead, 2.50×" in report.findings_steps(rest, FLOOR)[0]


def test_padding_stands_beside_the_peer_that_pads():
    table = report.table_sizes(steps()).set_index("way")
    peer = table.loc["transformers sdpa"]
    assert (peer["one size, over ours"], peer["many sizes, over ours"]) == ("1.50×", "3.00×")
    assert (peer["one size (ms)"], peer["many sizes (ms)"]) == ("120", "246")
    assert not {report.NAMES[way] for way in ("positions", "norm")} & set(table.index)
    same, many = report.findings_sizes(steps())
    assert "ahead in 3 of 3 cases (1.50× to 2.50×, most for eager); launched" in same and "0.750× to 1.25× our" in same
    assert "ahead (3.00×, transformers" in many and many.endswith("Padding, 60 %, makes it 2.50× the rows.")


def test_an_encoder_with_others_attention_is_no_peer_but_is_named_where_it_is_ahead():
    other = step("fused, FlashAttention-3", 74.0, launched=75.0, workload="B")
    same, many = report.findings_sizes(steps(other))
    assert "FlashAttention" not in same and "ahead (3.00×, transformers" in many
    assert "With others' attention in place of ours it takes 0.902× (FlashAttention-3, ours behind) the time." in many


def test_published_times_are_of_a_mini_batch_and_of_all_images():
    table = report.table_published(steps())
    assert table["forward (ms)"].tolist() == ["131", "60.0", "79.6", "30.0"]
    assert table["forward × 16 (ms)"].tolist() == ["2,100", "960.0", "1,274", "480.0"]
    assert table["backward (ms)"].tolist()[1::2] == ["120", "50.0"]
    assert table["peak (MiB)"].tolist() == ["19,288", "18,432", "12,137", "9,216"]
    (sentence,) = report.findings_published(steps())
    assert "published 1.65× forward and 0.976× backward" in sentence and "here 2.00× forward and 2.40×" in sentence


def test_profiles_stand_before_and_after():
    rows = [{"way": way, "phase": "forward_backward", "kernels_ms": total, "num_launches": n, "matmul_ms": 60.0,
             "elementwise_ms": other, "observed": {}}
            for way, total, n, other in (("eager", 100.0, 3000, 40.0), ("fused", 75.0, 1000, 15.0))]  # fmt: skip
    profile = frame(*rows)
    before, left = report.findings_profile(profile)
    assert (
        "100 ms in 3,000 launches as first written, 75.0 in 1,000 fused; most goes from elementwise 40.0 to 15.0"
        in before
    )
    assert "matmul 80 % and elementwise 20 %" in left
    assert len(report.figure_profile(profile).axes[0].patches) == 4


def test_parts_of_the_encoder_stand_beside_the_fused_ones():
    rows = [
        {"phase": f"{impl} {which}", "module": "MLP", "median_ms": ms, "peak_bytes": 2**30, "observed": {}, **more}
        for impl, which, ms, more in (
            ("cu_seqlens", "forward", 1.0, {"out_error": 3e-3}), ("fused", "forward", 0.8, {"out_error": 2e-3}),
            ("cu_seqlens", "forward_backward", 3.0, {}), ("fused", "forward_backward", 2.0, {}),
        )
    ]  # fmt: skip
    (row,) = encoder_parts.table(frame(*rows)).to_dict("records")
    assert list(row.values()) == [
        "MLP, bf16",
        "1.00 → 0.800 (1.25×)",
        "3.00 → 2.00 (1.50×)",
        "1.00 → 1.00",
        "3.0e-3 → 2.0e-3",
    ]
    (sentence,) = encoder_parts.findings(frame(*rows))
    assert sentence.endswith("attention alone, call time: ahead (1.50×, MLP in bf16).")
    failed = frame({"phase": "fused forward", "module": "MLP", "status": "error", "reason": "boom", "observed": {}})
    (row,) = encoder_parts.table(failed).to_dict("records")
    assert list(row.values())[1:] == ["–", "–", "– → –", "– → –"] and "boom" in encoder_parts.findings(failed)[0]


def test_errors_stand_beside_those_of_eager():
    made = {"out_error": 2e-3, "eager_out_error": 2e-3, "gradient_error": 6e-3, "eager_gradient_error": 5e-3}
    itself = made | {"gradient_error": 5e-3}
    rows = [{"phase": "eager", "observed": {}, **itself}, {"phase": "fused", "observed": {}, **made}]
    accuracy = frame(*rows, {"phase": "norm", "observed": {}, "status": "error", "reason": "wrong"})
    table = report.table_accuracy(accuracy).set_index("impl")
    assert list(table.index) == ["eager", "norm", "fused"]
    assert list(table.loc["fused"]) == ["2.0e-3 (1.00×)", "6.0e-3 (1.20×)"] and set(table.loc["norm"]) == {"error"}
    failed, sentence = report.findings_accuracy(accuracy)
    assert (
        "wrong" in failed
        and "1.00× those of eager" in sentence
        and "1.20× for the worst gradient, in 1 case" in sentence
    )


def kernel(phase, ms, ratio=1.0, **more):
    num_bytes = {"num_bytes": 4e9 if phase.endswith(" forward") else 8e9, "flops": None}
    row = {"phase": phase, "operation": "rms_norm", "rows": 100, "columns": 2560, "median_ms": ms, "observed": {}}
    ratios = dict.fromkeys(("ratio_to_ours", "ratio_to_ours_low", "ratio_to_ours_high"), ratio)
    return row | num_bytes | ratios | {"ceiling_fraction": num_bytes["num_bytes"] / ms / 1e6 / 4000} | more


def test_kernels_stand_under_the_copy_rate():
    rows = [
        kernel("ours forward", 1.1),
        kernel("ours forward_backward", 2.3),
        kernel("eager forward_backward", 6.9, 3.0),
        kernel("compiled forward_backward", 2.07, 0.9),
        kernel("liger forward_backward", 1.0, status="skipped"),
    ]
    (row,) = report.table_kernels(frame(*rows)).to_dict("records")
    assert row["operation"] == "rms_norm, 100 × 2,560" and row["both (ms)"] == "2.30"
    assert (row["forward, of the ceiling"], row["backward, of the ceiling"]) == ("91 %", "83 %")
    others = {name: text for name, text in row.items() if name.endswith("/ ours")}
    assert others == {"eager / ours": "3.00×", "torch.compile / ours": "0.900×"}, "who was not timed has no column"
    reached, others = report.findings_kernels(frame(*rows))
    assert "rms_norm 91 % forward and 83 % backward" in reached
    assert "eager 1 ahead (3.00×)" in others and "torch.compile 1 behind (0.900×)" in others


@pytest.mark.parametrize(("of_others", "text"), [([], "1.20×"), ([1.15], "1.20×"), ([1.08, 1.1], "1.08× to 1.20×")])
def test_a_ratio_that_differs_between_sessions_is_shown_as_their_span(of_others, text):
    """Their own verdict is of all sessions; the table must not show the one session that suits us."""
    sessions = {str(place): {"ratio_to_ours": ratio} for place, ratio in enumerate([1.2, *of_others])}
    row = kernel("compiled forward_backward", 1.0, 1.2, status="ok", sessions=sessions)
    assert report.over_ours(row) == text


def test_whatever_is_missing_is_not_measured():
    nothing = {"status": "error", "reason": "boom", "observed": {}}
    failed = frame({"way": "fused", "workload": "A", "phase": "forward_backward", "images": 64, **nothing})
    assert report.figure_steps(failed, FLOOR) is None and report.saved(failed).empty and report.against(failed).empty
    assert report.table_steps(failed, FLOOR)["both (ms)"].tolist() == ["error"]
    assert report.table_sizes(failed)["one size (ms)"].tolist() == ["error"]
    assert report.findings_sizes(failed) == report.findings_published(failed) == []
    assert report.table_published(failed)["forward (ms)"].tolist()[1::2] == ["–", "–"]
    lost = frame({"phase": "ours forward_backward", "operation": "swiglu", "rows": 1, "columns": 2, **nothing})
    assert report.table_kernels(lost)["both (ms)"].tolist() == ["–"] and len(report.findings_kernels(lost)) == 1
    gone = frame({"way": "fused", "phase": "forward_backward", **nothing})
    assert report.figure_profile(gone) is None
    assert len(report.findings_profile(gone)) == 1
    figure = report.figure_steps(steps(), frame({"workload": "A", "phase": "forward_backward", **nothing}))
    labels = [text.get_text() for text in figure.axes[0].get_yticklabels()]
    assert "+ one projection for q, k, v: not measured" in labels and not figure.axes[0].lines


def test_the_front_page_tells_launched_times_from_the_graph():
    ((text, heading),) = report.front(SimpleNamespace(records=lambda _: steps()))
    assert "2.25× as fast" in text and "compiled 180 ms, fused 80.0 (both launched from Python: 180 and 160 ms)" in text
    assert "peak 18.0 and 9.00 GiB" in text
    headings = [cell.source.splitlines()[0] for cell in notebooks.read("08_siglip2").cells if cell.source]
    assert f"## {heading}" in headings
    assert report.front(SimpleNamespace(records=lambda _: pd.DataFrame())) == []
    assert report.front(SimpleNamespace(records=lambda _: frame(step("eager", 1.0)))) == []


def test_the_committed_chapter_shows_what_was_measured():
    chapter = Chapter("08_siglip2", device=REFERENCE_DEVICE)
    found, floor = chapter.records("steps"), chapter.records("floor")
    assert 0 < len(report.table_steps(found, floor)) <= 12 and 0 < len(report.table_sizes(found)) <= 12
    changes = report.saved(found)
    assert 0 < len(changes) < len(report.STEPS) and (changes["sustained_ms"] > report.floor_ms(floor)).all()
    assert len(report.findings_steps(found, floor)) == 3 and len(report.front(chapter)) == 1
