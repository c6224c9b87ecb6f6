"""Notebook 03: numbers are rounded as the formats say, a case is what its label says, the report what records say."""

import dataclasses
import functools
import itertools
import json
import math
import os
import re

import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from chapters import CPU, on_a_cpu
from matplotlib.collections import PathCollection

from labkit import hardware, notebooks, numerics
from labkit.configs import BATCH_SIZE, BENCHMARKING, MIXED_PHASES, MIXED_PRECISION, REFERENCE_DEVICE
from labkit.experiments import benchmarking
from labkit.experiments import mixed_precision as experiment
from labkit.experiments.mixed_precision import cases, run_case
from labkit.experiments.recipes import PrecisionWorkload
from labkit.experiments.sweep import Case, Skip
from labkit.experiments.training import Training, successor_sequences
from labkit.experiments.workload import step_parameters
from labkit.records import Record, RecordStore, to_frame
from labkit.report import figures
from labkit.report import mixed_precision as report
from labkit.report.chapter import Chapter

NOTEBOOK = "03_mixed_precision"


@pytest.fixture(autouse=True)
def this_device_is_a_cpu(request, monkeypatch):
    yield from on_a_cpu(monkeypatch, is_detected="gpu" not in request.keywords)


def measure(one: Case) -> dict:
    """Returns what the phases of a case give, measured in this process."""
    return {phase: run() for phase, run in run_case(one, {})}


def of_section(section: str, profile: str = "full") -> list[Case]:
    return [one for one in cases(profile, "cuda") if one.section == section]


def text(sentences) -> str:
    return "\n".join(sentences)


# ---- floating-point formats --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("value", [0.01, 0.75, 1.0, 3.0, 8.0, 15.5, 1000.0, 2.0**-14, 2.0**-20])
def test_spacing_is_the_distance_to_the_next_number(dtype, value):
    bits = {2: torch.int16, 4: torch.int32}[torch.finfo(dtype).bits // 8]
    number = torch.tensor([value], dtype=dtype)
    following = (number.view(bits) + 1).view(dtype)
    assert numerics.spacing(float(number), dtype) == float(following.double() - number.double())


def test_a_binade_begins_at_a_power_of_two():
    values = {1.0: 1.0, 1.5: 1.0, 2.0 - 2.0**-52: 1.0, 2.0: 2.0, 0.01: 2.0**-7, 2.0**-20: 2.0**-20}
    assert {value: numerics.binade(value) for value in values} == values


def test_spacing_of_what_the_format_does_not_have_is_refused():
    for value in (0.0, -1.0, math.inf, 70000.0):
        with pytest.raises(ValueError, match=r"has no binade in torch\.float16; accepted: above 0, up to 65504"):
            numerics.spacing(value, torch.float16)


@pytest.mark.parametrize("term", [0.01, 0.3, 0.125, 1.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_sum_stalls_where_half_the_spacing_reaches_the_term(term, dtype):
    added = torch.tensor(term, dtype=dtype)
    stall = torch.tensor(numerics.stall_value(float(added), dtype), dtype=dtype)
    before = stall - numerics.spacing(float(stall) * 0.75, dtype)
    assert stall + added == stall
    assert before + added != before


def test_published_sums_come_out():
    """Four variants of adding 0.01 a thousand times, as public tables have them."""
    sums = {key: values for key, values in report.published_sums().items()}
    assert sorted({value for values in sums.values() for value in values}) == [9.9531, 10.0001, 10.0021]
    for one in of_section("accumulation", "smoke"):
        key = tuple(one.parameters[name] for name in report.SERIES_KEYS)
        if key in sums:
            measured = measure(one)["sum"]
            assert measured.case == one.parameters
            assert {f"{measured.metrics['final_sum']:.4f}"} == {f"{value:.4f}" for value in sums[key]}


@pytest.mark.parametrize("method", ["kahan", "pairwise"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_better_addition_ends_within_two_spacings_of_the_exact_sum(method, dtype):
    term = torch.tensor(0.01, dtype=dtype)
    sums = numerics.running_sums(term, 1000, dtype, method, every=100).double()
    exact = float(term) * torch.arange(100, 1001, 100)
    allowed = torch.tensor([2 * numerics.spacing(float(value), dtype) for value in exact])
    assert sums.shape == (10,)
    assert ((sums - exact).abs() <= allowed).all()


def test_running_sums_are_those_of_every_so_many_terms():
    term = torch.tensor(0.01, dtype=torch.bfloat16)
    for method in numerics.METHODS:
        every = numerics.running_sums(term, 60, torch.bfloat16, method)
        some = numerics.running_sums(term, 60, torch.bfloat16, method, every=20)
        assert torch.equal(every[19::20], some) and every.dtype == torch.bfloat16
    with pytest.raises(ValueError, match="unknown method 'magic'; accepted: sequential, kahan, pairwise"):
        numerics.running_sums(term, 10, torch.bfloat16, "magic")


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 65])
def test_tree_sum_rounds_every_addition(size):
    x = torch.arange(1.0, size + 1)
    assert numerics.tree_sum(x.expand(2, size)).tolist() == [[size * (size + 1) / 2]] * 2
    # 256 + 1 is 256 in bf16; a sum with an fp32 accumulator inside would be 258.
    assert float(numerics.tree_sum(torch.tensor([256.0, 1.0, 1.0], dtype=torch.bfloat16))) == 256


@pytest.mark.parametrize("kind", numerics.NORMS)
def test_normalise_is_pytorchs_function_where_nothing_is_rounded(kind):
    x = torch.randn(5, 33, dtype=torch.float64) + 3
    function = F.layer_norm if kind == "layer_norm" else F.rms_norm
    result, mean_square = numerics.normalise(x, kind, 1e-3, torch.float64)
    torch.testing.assert_close(result, function(x, (33,), eps=1e-3), rtol=1e-12, atol=1e-12)
    centred = x - x.mean(-1, keepdim=True) if kind == "layer_norm" else x
    torch.testing.assert_close(mean_square, centred.square().mean(-1, keepdim=True))
    with pytest.raises(ValueError, match="unknown normalisation 'batch_norm'; accepted: layer_norm, rms_norm"):
        numerics.normalise(x, "batch_norm", 1e-3, torch.float64)


# ---- the cases -------------------------------------------------------------------------------------------------


def test_full_times_each_step_in_the_precisions_that_notebook_01_lacks_directly_after_bf16_autocast():
    steps = of_section("steps")
    found = [(c.parameters["size"], c.parameters["context"], c.parameters["precision"]) for c in steps]
    sizes, precisions = BENCHMARKING["full"].sizes, ("bf16", "fp16", "bf16_pure")
    assert found == [(s, c, p) for s in sizes for c in (128, 256, 512, 1024) for p in precisions]
    assert {one.phases for one in steps} == {("forward", "backward", "train_step")}
    assert not any(one.fresh_process for one in steps), "the three share a worker"


@pytest.mark.parametrize("profile", ["smoke", "full"])
def test_notebook_01_measures_the_same_steps_in_its_precisions(profile):
    """So that its records can stand in the same table: the parameters differ in the precision alone."""
    theirs = [c.parameters for c in benchmarking.cases(profile, "cuda") if c.section == "steps"]
    for one in of_section("steps", profile):
        for precision in BENCHMARKING[profile].precisions:
            assert {**one.parameters, "precision": precision} in theirs


def test_every_section_covers_what_is_asked_of_it():
    series = {tuple(c.parameters[k] for k in report.SERIES_KEYS) for c in of_section("accumulation")}
    assert series >= set(report.PUBLISHED_SUMS.values())
    assert {key[:2] for key in series} >= {(m, a) for m in ("kahan", "pairwise") for a in ("fp16", "bf16")}
    scales = sorted({c.parameters["scale"] for c in of_section("normalisation")})
    assert (scales[0], scales[-1]) == (1e-4, 1e4)
    variants = {(c.parameters["norm"], c.parameters["statistics"]) for c in of_section("normalisation")}
    assert variants == {(n, s) for n in ("layer_norm", "rms_norm") for s in ("fp16", "bf16", "fp32", "library")}
    assert {(c.parameters["model"], c.parameters["autocast"]) for c in of_section("dtypes")} == {
        (model, dtype) for model in ("toy", "small") for dtype in ("fp16", "bf16")
    }
    training = of_section("training")
    assert {c.parameters["precision"] for c in training} == {*BENCHMARKING["full"].precisions, "fp16", "fp16_unscaled",
                                                            "bf16_pure"}  # fmt: skip
    assert {c.parameters["num_steps"] for c in training} == {200}


def test_the_steps_are_narrowed():
    narrowed = cases("full", "cuda", sizes=["xl-2026"], contexts=[512])
    steps = [one.parameters for one in narrowed if one.section == "steps"]
    assert {(p["size"], p["context"]) for p in steps} == {("2.7b", 512)} and len(steps) == 3


# ---- a case is what its label says -----------------------------------------------------------------------------


def step(precision: str, context: int = 8, batch: int = 1) -> dict:
    return {**step_parameters("nano", context, precision), "batch": batch}


def test_a_step_in_pure_bf16_is_one():
    one = Case("steps", step("bf16_pure"), MIXED_PHASES, 60.0, 0.001)
    measured = measure(one)
    assert list(measured) == list(MIXED_PHASES)
    for phase in measured.values():
        assert phase.case == one.parameters
        assert phase.observed["parameter_dtype"] == "bfloat16"
        assert phase.metrics["median_ms"] > 0 and phase.metrics["n"] >= 3
    assert measured["forward"].metrics["loss"] == pytest.approx(math.log(10_000), rel=0.05)
    assert measured["train_step"].metrics["num_skipped_steps"] == 0


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "fp16_unscaled", "bf16_pure"])
def test_a_precision_is_read_back_from_what_runs(precision):
    workload = PrecisionWorkload(CPU, step(precision))
    assert workload.described() == step(precision)
    workload.model.to(torch.float64)
    assert workload.described() != step(precision)
    if precision == "fp16":
        workload = PrecisionWorkload(CPU, step(precision))
        workload.scaler = torch.amp.GradScaler("cpu", enabled=False)
        assert workload.described()["precision"] == "fp16_unscaled"


def test_fp16_is_not_timed_where_it_is_emulated_nor_tf32_trained_where_there_is_none():
    with pytest.raises(Skip, match="a processor: PyTorch emulates float16"):
        measure(Case("steps", step("fp16"), MIXED_PHASES, 60.0, 0.001))
    with pytest.raises(Skip, match="a processor has no TF32"):
        measure(next(one for one in of_section("training", "smoke") if one.parameters["precision"] == "tf32"))


def test_the_loss_scale_is_halved_until_the_gradients_are_finite():
    workload = PrecisionWorkload(CPU, step("fp16", context=4))
    workload.forward_backward()
    workload.scaler.update(2.0**20)
    workload.forward_backward()
    assert not all(parameter.grad.isfinite().all() for parameter in workload.model.parameters())
    workload.settle()
    assert workload.scaler.get_scale() < 2.0**20
    assert all(parameter.grad.isfinite().all() for parameter in workload.model.parameters())


def test_a_wrong_loss_or_gradient_gives_no_time():
    workload = PrecisionWorkload(CPU, step("bf16_pure"))
    assert workload.check_loss() > 0
    with torch.no_grad():
        workload.model.head.weight.mul_(100)
    with pytest.raises(AssertionError, match=r"the loss is .* in bf16_pure, 9\.2\d+ was expected"):
        workload.check_loss()
    with torch.no_grad():
        workload.model.head.weight.fill_(math.nan)
    with pytest.raises(AssertionError, match="gradients are not finite in bf16_pure at a loss scale of 1"):
        workload.settle()
    with pytest.raises(AssertionError, match="the loss is nan"):
        workload.check_loss()


def test_hooks_read_the_dtypes_of_the_live_modules():
    (one,) = [c for c in of_section("dtypes", "smoke") if c.parameters == {"model": "toy", "autocast": "bf16"}]
    measured = measure(one)["read"]
    assert measured.case == one.parameters
    dtypes = dict(measured.observed["dtypes"])
    assert next(iter(dtypes)) == "parameters" and list(dtypes)[-3:] == ["logits", "loss", "gradients"]
    assert dtypes["parameters"] == dtypes["gradients"] == dtypes["loss"] == "float32"
    assert dtypes["fc1_output"] == dtypes["relu_output"] == dtypes["logits"] == "bfloat16"


def test_modules_of_one_name_that_differ_are_shown_to():
    blocks = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2).double())

    def forward():
        logits = blocks[1](blocks[0](torch.ones(1, 2)).double())
        return logits.sum(), logits

    dtypes, loss = experiment.read_dtypes(blocks, forward)
    assert dtypes["*_output"] == "float32 and float64" == dtypes["parameters"]
    assert loss == float(forward()[0].detach()) and not any(module._forward_hooks for module in blocks.modules())


@pytest.mark.parametrize(
    ("dtype", "scale", "expected"),
    [
        ("fp16", 1.0, {"overflowed_fraction": 0.0, "vanished_fraction": 0.0}),
        ("fp16", 1e4, {"overflowed_fraction": 1.0}),
        ("fp16", 1e-4, {"vanished_fraction": 1.0}),
        ("bf16", 1e4, {"overflowed_fraction": 0.0, "nonfinite_fraction": 0.0}),
        ("bf16", 1e-4, {"vanished_fraction": 0.0}),
    ],
)
def test_fp16_statistics_leave_its_range_and_bf16s_do_not(dtype, scale, expected):
    """A mean square is the scale squared: 10⁸ is more than 65504, 10⁻⁸ less than half of 2⁻²⁴."""
    names = {"norm": "rms_norm", "setting": "centred", "input": dtype, "statistics": dtype, "scale": scale}
    parameters = {**names, "rows": 8, "features": 64}
    measured = experiment.measure_normalisation(CPU, parameters)
    assert measured.case == parameters
    assert expected.items() <= measured.metrics.items()
    assert measured.metrics["rounding_error"] <= (2.0**-11 if dtype == "fp16" else 2.0**-8)


def test_an_epsilon_that_vanishes_makes_the_result_infinite():
    names = {"norm": "rms_norm", "setting": "small epsilon", "input": "fp16", "statistics": "fp16", "scale": 1e-4}
    metrics = experiment.measure_normalisation(CPU, {**names, "rows": 4, "features": 64}).metrics
    assert metrics["epsilon"] == 0 and metrics["nonfinite_fraction"] == 1 and metrics["relative_error"] is None
    kept = experiment.measure_normalisation(CPU, {**names, "statistics": "fp32", "rows": 4, "features": 64}).metrics
    assert kept["nonfinite_fraction"] == 0 and kept["relative_error"] < 1e-3


def test_an_input_that_overflows_by_itself_is_skipped():
    names = {"norm": "layer_norm", "setting": "offset", "input": "fp16", "statistics": "fp32", "scale": 1e4}
    with pytest.raises(Skip, match="the input itself overflows fp16"):
        experiment.measure_normalisation(CPU, {**names, "rows": 4, "features": 64})


def test_a_carried_sum_is_rounded_once_and_a_rounded_one_twice():
    names = {"dtype": "bf16", "gelu": "erf", "rows": 64, "columns": 64, "depth": 32}
    errors = {}
    for epilogue in ("carried", "rounded"):
        measured = experiment.measure_epilogue(CPU, {**names, "epilogue": epilogue})
        assert measured.case == {**names, "epilogue": epilogue}
        errors[epilogue] = measured.metrics["relative_error"]
        assert sum(measured.samples["bin_elements"]) <= 64 * 64
        assert max(measured.samples["bin_error"]) >= errors[epilogue] >= min(measured.samples["bin_error"])
    assert errors["carried"] <= 2.0**-8 < 2.0**-8 * 3 and errors["carried"] < errors["rounded"] < 3 * 2.0**-8


def test_operators_are_counted_below_autocast_and_views_are_not():
    x = torch.randn(4, 4)
    with experiment.OperatorCounter() as counter:
        x.t().view(4, 4)
        x[1:].unsqueeze(0)
        (x + 1).to(torch.bfloat16)
    assert (counter.num_operators, counter.num_casts, counter.cast_bytes) == (2, 1, 64 + 32)
    with experiment.OperatorCounter() as counter:
        x.clone()
        x.to(torch.float32)
        torch.empty(4, 4).copy_(x)
    assert counter.num_casts == 0
    weight = torch.nn.Parameter(x)
    with experiment.OperatorCounter() as counter, torch.autocast("cpu", torch.bfloat16):
        F.linear(F.linear(x, weight), weight)
    assert counter.num_casts == 2, "the input's and, once, the weight's"


def test_autocast_casts_every_weight_once_and_fp32_none():
    counts = {p: experiment.count_operators(PrecisionWorkload(CPU, step(p, context=4))) for p in ("fp32", "bf16")}
    assert all(counter.num_casts == 0 for counter in counts["fp32"].values())
    num_matrices = 2 * 7 + 1
    assert counts["bf16"]["forward"].num_casts > num_matrices
    assert counts["bf16"]["backward"].num_casts > num_matrices, "the gradients come back to fp32"
    added = counts["bf16"]["forward"].num_operators - counts["fp32"]["forward"].num_operators
    assert added == counts["bf16"]["forward"].num_casts


def test_the_task_is_a_permutation_and_the_same_every_time():
    data = successor_sequences(16, 3, 4, 10)
    assert data.shape == (3, 4, 11)
    successors: dict[int, set] = {}
    for sequence in data.flatten(0, 1).tolist():
        for token, following in itertools.pairwise(sequence):
            successors.setdefault(token, set()).add(following)
    assert all(len(found) == 1 for found in successors.values())
    assert torch.equal(data, successor_sequences(16, 3, 4, 10))


def test_a_run_counts_zeros_and_what_did_not_move():
    (one,) = [c for c in of_section("training", "smoke") if c.parameters["precision"] == "bf16_pure"]
    training = Training(CPU, {**one.parameters, "num_steps": 4, "learning_rate": 1e-12})
    measured = training.run()
    assert measured.case == {**one.parameters, "num_steps": 4, "learning_rate": 1e-12}
    # No step reaches half of the spacing of any bf16 number that is not tiny, and all gains are 1.
    assert measured.metrics["unmoved_gains"] == 1 and measured.metrics["unmoved_weights"] > 0.99
    assert len(measured.samples["loss"]) == 4 == len(measured.samples["look_step"])
    gradient = torch.tensor([0.0, 2.0**-26, 2.0**-25, 2.0**-15, 1.0], dtype=torch.bfloat16)
    for parameter in training.matrices(list(training.model.parameters())):
        parameter.grad = gradient.repeat(parameter.numel() // 5 + 1)[: parameter.numel()].view_as(parameter)
    look = training.look(gradient, 1.0)
    assert (look["zero_logit_gradients"], look["vanishing_logit_gradients"]) == (0.2, 0.6)
    assert look["zero_weight_gradients"] == pytest.approx(0.2, abs=1e-3) and look[
        "subnormal_weight_gradients"
    ] == pytest.approx(0.8, abs=1e-3)
    scaled = training.look(gradient * 1024, 1024.0)
    assert scaled["vanishing_logit_gradients"] == 0.6, "thresholds are those of the gradients without their scale"


# ---- the report says what the records say ------------------------------------------------------------------------


def record(one: Case, phase: str, status: str = "ok", **content) -> Record:
    return Record(
        notebook=NOTEBOOK, section=one.section, case=one.parameters, phase=phase, status=status, device="abacus",
        measurement_version=1, **content,
    )  # fmt: skip


def times_of(value: float) -> dict:
    return {
        **dict.fromkeys(("median_ms", "p20_ms", "p80_ms", "mean_ms", "min_ms"), value), "std_ms": 0.0, "n": 10,
        "half_width_fraction": 0.001, "host_median_ms": value + 1.0, "launch_median_ms": 0.5 * value,
    }  # fmt: skip


def synthetic_records() -> list[Record]:
    """Records of the full grid; what is quick to measure is measured here, on small tensors."""
    records = []
    for one in cases("full", "cuda"):
        p = one.parameters
        if one.section == "accumulation":
            measured = experiment.measure_sum(CPU, p)
            content = {"samples": measured.samples, "observed": measured.observed, "metrics": measured.metrics}
            records.append(record(one, "sum", **content))
        elif one.section == "dtypes":
            records.append(record(one, "read", metrics={"loss": 1.0}, observed={"dtypes": synthetic_dtypes(p)}))
        elif one.section == "normalisation":
            records.append(record(one, "error", metrics=synthetic_norm(p)))
        elif one.section == "epilogue":
            error = {"carried": 0.001, "rounded": 0.002, "library": 0.0019}[p["epilogue"]]
            bins = {"bin_low": [-5.0, 0.0], "bin_high": [0.0, 5.0], "bin_error": [error * error * 1e3, error]}
            metrics = {"relative_error": error, "fp32_error": 1e-7, "largest_error": 0.01}
            records.append(record(one, "error", metrics=metrics, samples={**bins, "bin_elements": [10, 10]}))
        elif one.section == "steps":
            for phase in one.phases:
                metrics = {**times_of(20.0), "peak_bytes": 2**33, "num_skipped_steps": 0, "loss_scale": 32768.0}
                if p["size"] == "10b" and p["precision"] in ("bf16", "fp16") and phase == "train_step":
                    records.append(record(one, phase, "oom", reason="OutOfMemoryError"))
                else:
                    records.append(record(one, phase, metrics=metrics))
        elif one.section == "operators":
            for phase in one.phases:
                casts = {"fp32": 0, "bf16": 40, "fp16": 40, "bf16_pure": 5}[p["precision"]]
                metrics = {"num_operators": 100 + casts, "num_casts": casts, "cast_bytes": casts * 2**20}
                records.append(record(one, phase, metrics=metrics))
        else:
            records.append(record(one, "training", **synthetic_training(p)))
    return records


def synthetic_dtypes(p: dict) -> list[list[str]]:
    """As CUDA's autocast has them: LayerNorm and the loss in fp32."""
    low = {"fp16": "float16", "bf16": "bfloat16"}[p["autocast"]]
    if p["model"] == "toy":
        parts = {"parameters": "float32", "fc1_output": low, "relu_output": low, "layer_norm_output": "float32"}
        parts |= {"fc2_output": low, "logits": low, "loss": "float32", "gradients": "float32"}
    else:
        parts = {"parameters": "float32", "blocks.*_output": "float32", "head_output": low, "loss": "float32"}
    return [list(pair) for pair in parts.items()]


def synthetic_norm(p: dict) -> dict:
    unit = {"fp32": 3e-8, "fp16": 2e-4, "bf16": 1.6e-3}[p["input"]]
    low = p["statistics"] == p["input"] != "fp32"
    factor = (30 if (p["norm"], p["setting"]) == ("layer_norm", "offset") else 1.5) if low else 1.0
    metrics = {"nonfinite_fraction": 0.0, "relative_error": factor * unit, "rounding_error": unit}
    if p["statistics"] != "library":
        fp16 = p["statistics"] == "fp16"
        epsilon = 0.0 if fp16 and p["setting"] == "small epsilon" else 1e-5
        metrics |= {"epsilon": epsilon, "overflowed_fraction": float(fp16 and p["scale"] >= 100)}
        metrics["vanished_fraction"] = float(fp16 and p["scale"] <= 1e-4)
        if metrics["vanished_fraction"] and not epsilon:
            metrics |= {"nonfinite_fraction": 1.0, "relative_error": None}
    return metrics


def synthetic_training(p: dict) -> dict:
    precision = p["precision"]
    zeros = {"fp16_unscaled": 0.3, "fp16": 0.01}.get(precision, 0.0)
    metrics = {
        "first_loss": 9.0, "final_loss": {"bf16_pure": 0.8, "bf16": 0.52}.get(precision, 0.5),
        "num_nonfinite_losses": 0, "num_skipped_steps": 2 if precision == "fp16" else 0,
        "final_loss_scale": 16384.0 if precision == "fp16" else 1.0,
        "zero_weight_gradients": zeros / 10, "zero_logit_gradients": zeros,
        "vanishing_weight_gradients": 0.04, "vanishing_logit_gradients": 0.35, "subnormal_weight_gradients": 0.9,
        "unmoved_weights": 0.02 if precision == "bf16_pure" else 0.0,
        "unmoved_gains": 0.99 if precision == "bf16_pure" else 0.0,
    }  # fmt: skip
    samples = {"loss": [9.0, 5.0, None], "look_step": [0, 2]}
    samples |= {"zero_logit_gradients": [zeros] * 2, "zero_weight_gradients": [0.0] * 2}
    return {"metrics": metrics, "samples": samples}


@pytest.fixture(scope="module")
def synthetic():
    return synthetic_records()


@pytest.fixture
def frame(tmp_path, synthetic):
    """Returns a function that gives the frame of a section of the synthetic records, some of them changed."""

    def make(section: str, match=None, status="ok", reason="", **metrics):
        path = tmp_path / "abacus" / "records" / f"{NOTEBOOK}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        lines, num_changed = [], 0
        for one in synthetic:
            if one.section != section:
                continue
            if match is not None and match.items() <= {**one.case, "phase": one.phase}.items():
                changed = {**one.metrics, **metrics} if status == "ok" else {}
                one = dataclasses.replace(one, status=status, reason=reason, metrics=changed)
                num_changed += 1
            lines.append(json.dumps(dataclasses.asdict(one)))
        assert match is None or num_changed
        path.write_text("\n".join(lines) + "\n")
        chapter = Chapter(NOTEBOOK, device="abacus", output=str(tmp_path))
        return report.own_steps(chapter) if section == "steps" else chapter.records(section)

    return make


@functools.cache
def reference_steps():
    return Chapter("01_benchmarking", device=REFERENCE_DEVICE).records("steps")


def test_a_sum_that_is_not_the_published_one_is_said_not_to_be(frame):
    before = text(report.findings_accumulation(frame("accumulation")))
    assert "The 4 sums that others published come out to the fourth decimal: 10.0001, 9.9531, 10.0021" in before
    assert "the sum stays at 32 from the 2,798th term on" in before and "the sum stays at 4 from" in before
    assert "an implicit and an explicit cast give the same sum" in before
    one = {"accumulator": "fp16", "method": "sequential"}
    after = text(report.findings_accumulation(frame("accumulation", one, final_sum=9.9541, stall_measured=16.0)))
    assert "1 of 4 published sums do **not** come out: 9.9541 where 9.9531 was published" in after
    assert "rounding must drop it, but: the sum stays at 16" in after
    table = report.table_accumulation(frame("accumulation", one, final_sum=9.9541)).to_string()
    assert "9.9541" in table and "9.9531" in table


def test_every_binade_adds_the_term_rounded_to_its_spacing(frame):
    rows = report.binades(frame("accumulation"))
    assert set(rows["accumulator"]) == {"fp16", "bf16"}
    inside = rows[rows["additions"] > 100]
    assert ((inside["mean_step"] - inside["predicted_step"]).abs() < 0.01 * inside["term"]).all()
    last = rows[rows["accumulator"] == "fp16"].iloc[-1]
    assert (last["start"], last["spacing"], last["predicted_step"]) == (16, 2.0**-6, 2.0**-6)


def test_a_published_dtype_that_differs_is_named(frame):
    sentences = text(report.findings_dtypes(frame("dtypes")))
    assert (
        "The small model under fp16 autocast: `parameters`, `layer_norm_output`, `loss` and `gradients` are"
        in sentences
    )
    assert "Of 22 published dtypes 21 are what runs here" in sentences
    assert "others differ: `loss` under fp16, float16 in 1 table and float32 here." in sentences
    table = report.table_dtypes(frame("dtypes"), of_toy=True).set_index("component")
    assert table.loc["`loss`", "published, fp16"] == "float16 (1), float32 (1)"
    assert table.loc["`loss`", "under fp16"] == "float32"
    assert "`head_output`" in set(report.table_dtypes(frame("dtypes"), of_toy=False)["component"])


def test_the_finding_about_bf16_statistics_follows_the_records(frame):
    before = text(report.findings_normalisation(frame("normalisation")))
    assert "The mean square overflows in bf16 at no scale (10⁻⁴ to 10⁴)." in before
    assert "The mean square overflows in fp16 at standard deviations: LayerNorm with mean 0" in before
    assert "ε = 10⁻⁸ is 0 in fp16: where the squares vanish too, the result is not finite" in before
    assert "(standard deviation 10⁻⁴)" in before
    assert "For bf16 range is no matter: nothing overflows; digits are" in before
    assert "(most: 30.0×, LayerNorm with mean 16 std, ε 10⁻⁵)" in before
    bf16 = {"input": "bf16", "statistics": "bf16"}
    cheap = text(report.findings_normalisation(frame("normalisation", bf16, relative_error=2e-3)))
    assert "nor are digits by this measure: the error is below 2.00×" in cheap
    broken = {**bf16, "scale": 1e4, "norm": "rms_norm", "setting": "centred"}
    range_lost = text(report.findings_normalisation(frame("normalisation", broken, overflowed_fraction=0.5)))
    assert "For bf16 range is a matter too" in range_lost
    assert (
        "The mean square overflows in bf16 at standard deviations: RMSNorm with mean 0, ε 10⁻⁵ from 10⁴" in range_lost
    )
    library = {"input": "bf16", "statistics": "library", "scale": 1.0}
    other = text(report.findings_normalisation(frame("normalisation", library, relative_error=0.1)))
    assert "PyTorch's own functions on 16-bit input is **not** that" in other and "is that of fp32" in before


def num_marks(figure) -> int:
    return sum(len(marks.get_offsets()) for axis in figure.axes for marks in axis.collections)


def test_a_broken_normalisation_is_a_word_in_the_table_and_a_mark_in_the_figure(frame):
    whole = frame("normalisation")
    table = report.table_normalisation_scales(whole)
    row = table[(table["variant"] == "fp16, statistics fp16") & (table["normalisation"] == "RMSNorm")].iloc[0]
    assert (row["10⁰"], row["10⁴"]) == ("3.0e-4", "overflow")
    small = table[(table["variant"] == "fp16, statistics fp16") & (table["input"].str.contains("10⁻⁸"))].iloc[0]
    assert small["10⁻⁴"] == "not finite"
    worst = report.table_normalisation(whole).set_index(["normalisation", "input", "variant"])
    assert worst.loc[("LayerNorm", "mean 16 std, ε 10⁻⁵", "bf16, statistics bf16"), "of one rounding"] == "30.0×"
    sound = frame("normalisation", {"input": "fp16", "statistics": "fp16"}, overflowed_fraction=0.0)
    marks = [num_marks(report.figure_normalisation(drawn)) for drawn in (whole, sound)]
    # Scales of 100 and more overflow, and where ε is 0 the smallest one gives no finite result.
    assert marks == [2 * (3 * 3 + 1), 2]


def test_a_fused_call_is_told_by_its_error(frame):
    before = text(report.findings_epilogue(frame("epilogue")))
    assert "Rounding to bf16 between product and GELU makes the error 2.00× that of the carried sum" in before
    assert "by pre-activation it is most in [-5, 0), 4.00×" in before
    assert "in bf16 has 1.90× the carried sum's error, nearer to the rounded one's" in before
    after = text(
        report.findings_epilogue(frame("epilogue", {"epilogue": "library", "dtype": "bf16"}, relative_error=1e-3))
    )
    assert (
        "in bf16 has 1.00× the carried sum's error, nearer to that than to the rounded one's: the sum is carried"
        in after
    )
    assert "in fp16 has 1.90×" in after
    one = {"epilogue": "library", "dtype": "bf16", "depth": 4096}
    some = text(report.findings_epilogue(frame("epilogue", one, relative_error=1e-3)))
    assert "with sums of 4,096 terms only" in some


def test_steps_of_both_notebooks_stand_in_one_table(frame):
    steps = report.steps(reference_steps(), frame("steps"))
    assert not steps.duplicated(["size", "context", "precision", "phase"]).any()
    assert set(steps["context"]) == set(MIXED_PRECISION["full"].contexts)
    table = report.table_times(steps, "train_step")
    theirs, ours = ["fp32 (01)", "TF32 (01)", "bf16 autocast (01)"], ["bf16 autocast", "fp16 autocast + GradScaler"]
    assert list(table.columns[2:]) == [*theirs, *ours, "pure bf16"]
    assert len(table) == 24
    line = table.set_index(["size", "context"]).loc[("10b", 128)]
    assert list(line) == ["oom", "oom", "oom", "oom", "oom", "20.0"]
    assert list(report.table_memory(steps, "train_step").columns[2:]) == [*theirs, ours[1], "pure bf16"]
    memory = text(report.findings_memory(steps))
    assert "A training step of 10b at 128, 256, 512 and 1024 fits in pure bf16 only." in memory
    assert "it is 27 % to 88 % of these copies: the rest is made up for" in memory
    alone = report.steps(reference_steps(), frame("steps").iloc[:0])
    assert (
        "pure bf16" not in report.table_times(alone, "train_step") and len(report.table_times(alone, "forward")) == 24
    )
    assert "fits in none of these precisions" in text(report.findings_memory(alone))


HOST = 1.4
"""How much slower the host of the second session is."""


def two_sessions(changes=None, sessions=("b", "b", "b")):
    """Notebook 01's rows and this one's, of a slower host: at 128 the host sets the pace, at 1024 the device does.

    fp16 takes as long as bf16 autocast; pure bf16 has a tenth of the operators less and a device time of 0.8.
    `changes` multiplies the times of a precision of the second session; `sessions` are theirs.
    """
    rows = {"01": [], "03": []}
    for context, phase in itertools.product((128, 1024), MIXED_PHASES):
        issue, on_device = 10.0, {128: 2.0, 1024: 40.0}[context]
        cases = [("01", "fp32", issue * 0.8, 2 * on_device, "a"), ("01", "bf16", issue, on_device, "a")]
        cases += [
            ("03", precision, HOST * issue * work, on_device * (0.8 if precision == "bf16_pure" else 1.0), session)
            for (precision, work), session in zip(
                {"bf16": 1.0, "fp16": 1.0, "bf16_pure": 0.9}.items(), sessions, strict=True
            )
        ]
        for notebook, precision, launch, busy, session in cases:
            factor = (changes or {}).get(precision, 1.0) if notebook == "03" else 1.0
            time = factor * max(launch, busy)
            row = {"size": "small", "context": context, "compile": "none", "precision": precision, "phase": phase}
            row |= {"status": "ok", "reason": "", **times_of(time), "host_median_ms": time}
            row |= {"launch_median_ms": factor * launch, "peak_bytes": 2.0**30}
            rows[notebook].append(row | ({"session": session} if notebook == "03" else {}))
    frames = {name: pd.DataFrame(found) for name, found in rows.items()}
    frames["03"].attrs["device"] = "a device"
    return report.steps(frames["01"], frames["03"])


def test_a_slower_host_makes_no_precision_slower():
    steps = two_sessions()
    sentences = text(report.findings_speed(steps))
    assert "slower" not in sentences
    start = "Against bf16 autocast of the same session a training step in"
    assert (
        f"{start} fp16 autocast + GradScaler is about the same in 1 of 1 case in which neither is launch-bound "
        "(1.00× the speed); at 1.00× the speed in 1 launch-bound case, where the host sets the pace." in sentences
    )
    assert (
        f"{start} pure bf16 is faster in 1 of 1 case in which neither is launch-bound (1.25× the speed); at 1.11×"
        in sentences
    )
    assert (
        "bf16 autocast was timed in notebook 01 and again here, where it takes 1.00× as long in the median of 3 phases "
        "not launch-bound (1.00×), and 1.40× as long in the median of 3 phases launch-bound in either (1.40×)."
        in sentences
    )
    found = report.speedups(steps, "train_step").set_index(["precision", "context"])["ratio"]
    assert found["bf16", 128] == found["fp16", 128] == pytest.approx(0.8)
    assert found["fp16", 1024] == pytest.approx(2.0) and found["bf16_pure", 1024] == pytest.approx(2.5)
    table = report.table_speedups(steps).set_index(["precision", "phase"])["from"]
    assert table["bf16 autocast", "forward"] == "notebook 01" and table["pure bf16", "forward"] == "by bf16 autocast"
    line = report.table_times(steps, "train_step").set_index("context").loc[128]
    assert list(line[1:]) == ["8.00 †", "10.0 †", "14.0 †", "14.0 †", "12.6 †"]


def test_a_precision_that_is_slower_in_its_own_session_is_said_to_be():
    steps = two_sessions({"fp16": 1.2})
    assert "fp16 autocast + GradScaler is slower in 1 of 1 case in which neither" in text(report.findings_speed(steps))
    table = report.table_against_autocast(steps).set_index(["precision", "phase", "launch-bound"])
    assert list(table.loc[("fp16 autocast + GradScaler", "training step", "no")][["faster", "slower"]]) == [0, 1]
    assert table.loc[("pure bf16", "forward", "yes"), "range"] == "1.11×"


def test_a_difference_within_the_medians_intervals_is_none():
    steps = two_sessions({"fp16": 1.2})
    ours = steps["precision"].isin(["fp16", report.ANCHOR])
    for width, word in ((0.05, "slower"), (0.11, "about the same")):
        steps.loc[ours, "half_width_fraction"] = width
        assert f"GradScaler is {word} in 1 of 1 case in which" in text(report.findings_speed(steps))


def test_a_training_step_whose_forward_waits_for_the_host_is_launch_bound():
    steps = two_sessions()
    steps["launch_median_ms"] = 0.1
    assert not report.is_launch_bound(steps).any()
    of_case = (steps["precision"] == "fp16") & (steps["context"] == 1024)
    steps.loc[of_case & (steps["phase"] == "forward"), "launch_median_ms"] = 40.0
    bound = steps[report.is_launch_bound(steps)]
    assert list(bound["phase"]) == ["forward", "train_step"] and set(bound["precision"]) == {"fp16"}
    steps.loc[of_case & (steps["phase"] == "train_step"), "status"] = "oom"
    assert list(steps[report.is_launch_bound(steps)]["phase"]) == ["forward"]


def test_times_of_two_sessions_are_not_compared():
    """As in the records from before bf16 autocast was timed here, and where a run was resumed between two of them."""
    for sessions in (("b", "c", "c"), ("b", "b", "c")):
        steps = two_sessions(sessions=sessions)
        sentences = text(report.findings_speed(steps))
        compared = {"fp16"} if sessions[1] == "b" else set()
        for precision in report.COMPARED:
            lacking = f"{report.NAMES[precision]} is **not** compared with any other precision in 2 of 2 cases"
            assert (lacking in sentences) == (precision not in compared)
        assert set(report.same_session(steps, "train_step")["precision"]) == compared
        assert set(report.speedups(steps, "train_step")["precision"]) == {"bf16", *compared}
    alone = two_sessions()
    alone = alone[alone["precision"] != report.ANCHOR]
    assert "it takes" not in text(report.findings_speed(alone))
    assert report.table_against_autocast(alone).empty and len(report.table_times(alone, "forward")) == 2


def test_the_figure_tells_the_sessions_and_the_launch_bound_points_apart():
    (axis,) = report.figure_speed(two_sessions()).axes
    styles = {line.get_label(): line.get_linestyle() for line in axis.lines}
    assert styles["bf16 autocast (01)"] == "-" == styles["fp32 (01)"]
    assert styles["bf16 autocast"] == styles["pure bf16"] == "--"
    points = [one for one in axis.collections if isinstance(one, PathCollection)]
    assert len(points) == 5, "at 128 each precision is launch-bound"


def test_memory_is_shown_once_and_held_against_notebook_01():
    steps = two_sessions()
    assert "bf16 autocast's peak here is 1.00× notebook 01's over 6 phases." in text(report.findings_memory(steps))
    steps.loc[steps["precision"] == report.ANCHOR, "peak_bytes"] *= 1.1
    sentences = text(report.findings_memory(steps))
    assert "is 1.10× notebook 01's over 6 phases; they differ by more than 3.0 % in 6." in sentences


def test_the_committed_records_render_whatever_sessions_they_are_of():
    chapter = Chapter(NOTEBOOK, device=REFERENCE_DEVICE)
    own = report.own_steps(chapter)
    steps = report.steps(reference_steps(), own)
    pairs = pd.concat([report.same_session(steps, phase) for phase in MIXED_PHASES])
    anchored = set(own.loc[own["precision"] == "bf16", "session"]) if len(own) else set()
    if not anchored:
        assert pairs.empty
        return
    sentences = text(report.findings_speed(steps))
    assert len(pairs) and "bf16 autocast was timed in notebook 01 and again here" in sentences


def test_fp16_steps_that_overflow_are_said_to(frame):
    sentences = text(report.findings_speed(report.steps(reference_steps(), frame("steps"))))
    assert "No timed fp16 step was left out for an overflow: the loss scale (32768) had settled before." in sentences
    skipping = frame("steps", {"size": "small", "context": 128, "precision": "fp16"}, num_skipped_steps=3)
    sentences = text(report.findings_speed(report.steps(reference_steps(), skipping)))
    assert "In small at 128 fp16 steps overflowed while they were timed" in sentences


def test_where_autocast_loses_follows_the_times_and_the_launch(frame):
    steps = report.steps(reference_steps(), frame("steps"))
    operators = frame("operators")
    found = report.losses(steps)
    assert ("small", 128, "forward") in set(found[["size", "context", "phase"]].itertuples(index=False, name=None))
    sentences = text(report.findings_losses(steps, operators, operators.iloc[:0]))
    assert re.search(
        r"bf16 autocast does not make a forward faster than fp32 for small at 128.* launch-bound", sentences
    )
    assert (
        "fp32's forward (small, medium, large and xl-2025) bf16 autocast adds 40 %, of which casts are 100 %"
        in sentences
    )
    assert "notebook 02" not in sentences
    faster = steps.copy()
    faster.loc[faster["precision"] == "bf16", "median_ms"] /= 3
    assert report.losses(faster).empty
    assert "bf16 autocast is faster than fp32 in all" in text(
        report.findings_losses(faster, operators, operators.iloc[:0])
    )
    free = steps.copy()
    free["launch_median_ms"] /= 3
    assert "launch-bound" not in text(report.findings_losses(free, operators, operators.iloc[:0]))


def captured(launches: dict[str, int], copies: dict[str, int]):
    """Returns notebook 02's records of the smallest step: launches and, among them, copies, by precision."""
    records = []
    for precision, total in launches.items():
        classes = {
            "phase": ["forward", "forward", "backward", "outside"],
            "kernel_class": ["matmul", "copy", "matmul", "copy"],
            "launches": [total - copies[precision], copies[precision], 50, 7], "total_us": [100.0, 10.0, 100.0, 1.0],
        }  # fmt: skip
        one = Case("profiles", step_parameters("small", 128, precision), ("train_step",), 60.0)
        records.append(record(one, "train_step", observed={"tables": {"classes": classes}}))
        records.append(record(one, "inference", observed={"tables": {"classes": classes}}))
    return records


def test_copies_are_counted_in_notebook_02s_captures(frame, tmp_path):
    path = tmp_path / "abacus" / "records" / "02_nsys_analysis.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    found = captured({"fp32": 200, "bf16": 300}, {"fp32": 10, "bf16": 90})
    lines = [json.dumps({**dataclasses.asdict(one), "notebook": "02_nsys_analysis"}) for one in found]
    path.write_text("\n".join(lines) + "\n")
    kernels = Chapter("02_nsys_analysis", device="abacus", output=str(tmp_path)).records("profiles")
    table = report.table_launches(kernels).set_index("phase")
    assert list(table.loc["forward"][["kernels, fp32", "kernels, bf16", "copies, bf16"]]) == ["200", "300", "90"]
    assert list(table.index) == ["forward", "backward"]
    steps = report.steps(reference_steps(), frame("steps"))
    sentences = text(report.findings_losses(steps, frame("operators"), kernels))
    # Forward adds 100 launches of 200, the step as many of 250; backward adds none, so the share is left out.
    assert "captures of 3 of these cases autocast launches 0 % to 50 % more kernels than fp32." in sentences
    only_forward = steps[~((steps["phase"] == "backward") & (steps["precision"] == "bf16"))]
    sentences = text(report.findings_losses(only_forward, frame("operators"), kernels))
    assert "launches 40 % to 50 % more kernels than fp32, and of those added 80 % are copies" in sentences
    fewer_others = to_frame(captured({"fp32": 200, "bf16": 220}, {"fp32": 10, "bf16": 90}))
    sentences = text(report.findings_losses(only_forward, frame("operators"), fewer_others))
    assert "the copies alone, which is how a cast is done, are 4.00× as many more, for other kernels" in sentences


def test_training_findings_follow_the_records(frame):
    before = text(report.findings_training(frame("training")))
    assert "In 200 steps fp32 comes from a loss of 9.00 to 0.500 nats" in before
    assert "within 0.05 of that end TF32 (0.500), bf16 autocast (0.520)," in before
    assert "above it end pure bf16 (0.800)" in before
    assert "35 % of the logits' and 4.0 % of the weights' are too small for fp16" in before
    assert "takes fp16's zeros among the logits' gradients from 30 % to 1.0 %" in before
    assert "pure bf16, 99 % of the norm gains and 2.0 % of the weights" in before
    assert "an update of about the learning rate (0.0003) is less than half of that" in before
    pure = {"precision": "bf16_pure"}
    good = frame("training", pure, final_loss=0.5, unmoved_gains=0.0, unmoved_weights=0.0)
    after = text(report.findings_training(good))
    assert "pure bf16 (0.500)" in after and "above it" not in after and "still the number" not in after
    lost = text(report.findings_training(frame("training", pure, final_loss=None)))
    assert "at no number end pure bf16" in lost
    assert "steps fp32 comes" not in text(
        report.findings_training(frame("training", {"precision": "fp32"}, final_loss=None))
    )
    same = text(report.findings_training(frame("training", {"precision": "fp16"}, zero_logit_gradients=0.29)))
    assert "changes little here: 30 % of the logits' gradients are zero without it, 29 % with it" in same
    gone = text(report.findings_training(frame("training", {"precision": "tf32"}, status="skipped", reason="no TF32")))
    assert "TF32 has no result (skipped): no TF32." in gone and "TF32 (" not in gone.split("nats")[1].split("\n")[0]


def test_without_records_every_section_says_so(tmp_path):
    empty = Chapter(NOTEBOOK, device="abacus", output=str(tmp_path)).records("steps")
    arguments = {
        "table_dtypes": ((empty,), {"of_toy": True}),
        "table_times": ((empty, "forward"), {}),
        "table_memory": ((empty, "forward"), {}),
        "findings_losses": ((empty, empty, empty), {}),
    }
    for name in dir(report):
        given, named = arguments.get(name, ((empty,), {}))
        if name.startswith(("table_", "findings_")):
            assert len(getattr(report, name)(*given, **named)) == 0, name
        elif name.startswith("figure_"):
            assert getattr(report, name)(*given, **named) is None, name
    assert report.steps(empty, empty).empty


def test_figures_are_the_same_bytes_twice(frame):
    epilogue = frame("epilogue")
    assert figures.svg(report.figure_epilogue(epilogue)) == figures.svg(report.figure_epilogue(epilogue))


def test_a_size_that_fits_in_no_precision_leaves_the_figures_drawable(frame):
    """Its panel would have a logarithmic axis and no number."""
    steps = report.steps(reference_steps(), frame("steps").iloc[:0])
    steps = steps[steps["size"].isin(["2.7b", "10b"])]
    for make in (report.figure_speed, report.figure_memory):
        drawn = make(steps)
        assert [axis.get_title() for axis in drawn.axes] == ["2.7b"]
        assert figures.svg(drawn)


# ---- the notebook on this machine ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """The smoke profile executed here, without a GPU; returns the device's folder and what the notebook showed."""
    output = tmp_path_factory.mktemp("figures")
    slug = f"cpu-{hardware.slugify(hardware.cpu_name())}"
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        values = {"device": slug, "measure": True, "profile": "smoke", "output": str(output), "save_figures": True}
        executed = notebooks.execute(NOTEBOOK, values)
    finally:
        del os.environ["CUDA_VISIBLE_DEVICES"]
        if before is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = before
    outputs = [output for cell in executed.cells for output in cell.get("outputs", [])]
    return output / slug, "\n".join(output.get("data", {}).get("text/markdown", "") for output in outputs)


@pytest.mark.slow
def test_smoke_measures_every_case_and_draws_its_figures(measured):
    folder, shown = measured
    records = RecordStore(folder / "records" / f"{NOTEBOOK}.jsonl").load()
    assert not [one for one in records if one.status in ("error", "timeout", "oom")]
    skipped = {
        (one.section, one.case.get("precision", one.case.get("input"))) for one in records if one.status == "skipped"
    }
    assert skipped == {("steps", "fp16"), ("training", "tf32"), ("normalisation", "fp16")}
    done = json.loads((folder / "records" / f"{NOTEBOOK}.done.json").read_text(encoding="utf-8"))
    assert done["num_missing"] == 0
    assert {path.name for path in folder.glob("*.svg")} == {
        f"03_{name}.svg" for name in ("accumulation", "normalisation", "epilogue", "speed", "training")
    }
    assert "The 4 sums that others published come out" in shown
    assert "`loss` under fp16, float16 in 1 table and float32 here" in shown


@pytest.mark.slow
def test_smoke_finds_what_the_formats_imply(measured):
    folder, _ = measured
    chapter = Chapter(NOTEBOOK, device=folder.name, output=str(folder.parent))
    sums = chapter.records("accumulation").dropna(subset=["stall_measured"])
    assert len(sums) == 2 and (sums["stall_measured"] == sums["stall_predicted"]).all()
    sentences = text(report.findings_normalisation(chapter.records("normalisation")))
    assert "The mean square overflows in bf16 at no scale" in sentences
    assert "LayerNorm with mean 16 std" in sentences
    epilogues = report.epilogues(chapter.records("epilogue"))
    assert (epilogues["rounded"] > epilogues["carried"]).all()
    training = chapter.records("training")
    ended = training[training["status"] == "ok"]
    assert len(ended) == 5 and (ended["final_loss"] < ended["first_loss"] + 1).all()


# ---- on a GPU ------------------------------------------------------------------------------------------------------

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.mark.gpu
@needs_cuda
def test_on_cuda_sums_and_dtypes_are_the_published_ones():
    for one in of_section("accumulation", "smoke"):
        metrics = measure(one)["sum"].metrics
        for value in report.published_sums().get(tuple(one.parameters[k] for k in report.SERIES_KEYS), []):
            assert f"{metrics['final_sum']:.4f}" == f"{value:.4f}"
    for one in of_section("dtypes", "smoke"):
        dtypes = dict(measure(one)["read"].observed["dtypes"])
        assert dtypes["loss"] == dtypes["gradients"] == "float32"
        assert dtypes.get("layer_norm_output", "float32") == "float32"


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("precision", ["bf16", "fp16", "bf16_pure"])
def test_on_cuda_a_step_is_timed_and_its_memory_counted(precision):
    measured = measure(Case("steps", step(precision, context=32, batch=4), MIXED_PHASES, 60.0, 0.05))
    for phase in measured.values():
        assert phase.case["precision"] == precision
        assert phase.metrics["median_ms"] > 0 and phase.metrics["peak_bytes"] > 0
    assert measured["train_step"].metrics["num_skipped_steps"] == 0


@pytest.mark.gpu
@needs_cuda
def test_on_cuda_casts_of_the_backward_pass_are_counted_too():
    workload = PrecisionWorkload(hardware.detect(), step("bf16", batch=BATCH_SIZE))
    counts = experiment.count_operators(workload)
    assert counts["backward"].num_operators > counts["forward"].num_operators
    assert counts["backward"].num_casts > 2 * 7 + 1
