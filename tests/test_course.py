"""The model as a course writes it: the same results as ours, recorded apart."""

import pytest
import torch
import torch.nn.functional as F
from chapters import CPU, in_section, measure, on_a_cpu

from labkit.configs import model_config
from labkit.experiments import attention, benchmarking, memory, nsys_analysis
from labkit.experiments.captured_step import capture_steps
from labkit.experiments.step import Step, course_parameters
from labkit.kernels import course
from labkit.kernels.reference import attention_reference
from labkit.measure import profiling
from labkit.measure.profiling import RangeMarker
from labkit.models.transformer import TransformerLM
from labkit.numerics import relative_error

EXPERIMENTS = {"01": benchmarking, "02": nsys_analysis, "04": memory, "05": attention}


@pytest.fixture(autouse=True)
def this_device_is_a_cpu(monkeypatch):
    monkeypatch.setattr(nsys_analysis, "freeze_modules", lambda: None)
    yield from on_a_cpu(monkeypatch)


def with_gradients(function, *inputs):
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = function(*leaves)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), leaves)]


OPERATIONS = {
    "softmax": (lambda x: course.softmax(x, -1), lambda x: torch.softmax(x, -1), (3, 17)),
    "softmax of the first": (lambda x: course.softmax(x, 0), lambda x: torch.softmax(x, 0), (5, 3)),
    "silu": (course.silu, F.silu, (3, 17)),
    "loss": (
        lambda x: course.cross_entropy(x, torch.tensor([[0, 10, 4]])),
        lambda x: F.cross_entropy(x[0], torch.tensor([0, 10, 4])),
        (1, 3, 11),
    ),
}


@pytest.mark.parametrize(("ours", "theirs", "shape"), OPERATIONS.values(), ids=OPERATIONS)
@pytest.mark.parametrize("scale", [1, 1000])
def test_each_operation_gives_what_pytorchs_gives(ours, theirs, shape, scale):
    x = scale * torch.randn(shape, generator=torch.Generator().manual_seed(0))
    for mine, exact in zip(
        with_gradients(ours, x), with_gradients(theirs, x.double()), strict=True
    ):
        # Below that, probabilities vanish in fp32 and not in fp64.
        assert (mine - exact).abs().max() < 1e-6 * max(1.0, float(exact.abs().max()))


@pytest.mark.parametrize(
    ("causal", "num_queries", "num_keys"), [(False, 5, 9), (True, 9, 9), (True, 5, 9), (True, 1, 1)]
)
def test_attention_is_that_of_the_formula(causal, num_queries, num_keys):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, 3, n, 8, generator=generator) for n in (num_queries, num_keys, num_keys)
    )
    found = with_gradients(lambda *x: course.attention(*x, causal=causal), q, k, v)
    exact = with_gradients(
        lambda *x: attention_reference(*x, causal=causal), q.double(), k.double(), v.double()
    )
    for mine, theirs in zip(found, exact, strict=True):
        assert (mine - theirs).abs().max() < 2e-6


def test_adamw_is_pytorchs_step_by_step():
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(40, generator=generator)
    ours, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    unused = torch.nn.Parameter(torch.ones(2))
    options = {"lr": 0.03, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    optimizers = course.AdamW([ours, unused], **options), torch.optim.AdamW([theirs], **options)
    for _ in range(5):
        ours.grad = theirs.grad = torch.randn(40, generator=generator) * 10 ** torch.linspace(
            -7, 1, 40
        )
        for optimizer in optimizers:
            optimizer.step()
        assert relative_error(ours.detach(), theirs.detach()) < 1e-6
    assert relative_error(ours.detach(), start) > 0.05 and torch.equal(
        unused.detach(), torch.ones(2)
    )
    defaults = torch.optim.AdamW([theirs]).defaults
    assert course.AdamW([ours]).defaults.items() <= defaults.items()
    assert optimizers[0].step(lambda: 7) == 7


def test_the_model_trains_as_the_eager_one_from_the_same_parameters():
    eager = Step(
        CPU, {**course_parameters("nano", 32, "fp32"), "attention": "eager", "impl": "eager"}
    )
    plain = Step(CPU, course_parameters("nano", 32, "fp32"))
    assert (
        plain.described() == course_parameters("nano", 32, "fp32")
        and "impl" not in eager.described()
    )
    assert plain.model.load_state_dict(eager.model.state_dict())
    for _ in range(3):
        losses = [live.forward() for live in (eager, plain)]
        assert relative_error(losses[1], losses[0]) < 1e-6
        for live in (eager, plain):
            live.train_step()
        for mine, theirs in zip(plain.model.parameters(), eager.model.parameters(), strict=True):
            assert relative_error(mine.grad, theirs.grad) < 2e-5
    logits = [live.model(live.tokens) for live in (eager, plain)]
    assert relative_error(logits[1], logits[0]) < 1e-4
    observed = plain.observed()
    assert isinstance(plain.optimizer, course.AdamW) and observed["optimizer_fused"] is False


def test_autocast_and_an_unknown_impl():
    plain = Step(CPU, course_parameters("nano", 16, "bf16"))
    plain.forward_backward()
    assert all(parameter.grad.isfinite().all() for parameter in plain.model.parameters())
    with pytest.raises(ValueError, match="unknown impl 'lecture'; accepted: eager, fused, course"):
        TransformerLM(model_config("nano"), max_context=8, impl="lecture")


def test_full_runs_it_where_times_of_data_centre_gpus_were_published():
    found = {
        number: in_section(one.cases("full", "cuda"), "course")
        for number, one in EXPERIMENTS.items()
    }
    assert {number: len(cases) for number, cases in found.items()} == {
        "01": 15,
        "02": 3,
        "04": 6,
        "05": 5,
    }
    labels = {
        (case.parameters["attention"], case.parameters["impl"])
        for n in ("01", "02", "04")
        for case in found[n]
    }
    assert labels == {("course", "course")}
    assert {case.parameters["impl"] for case in found["05"]} == {"course"}
    for one in EXPERIMENTS.values():
        others = [case for case in one.cases("full", "cuda") if case.section != "course"]
        assert not any("course" in case.parameters.values() for case in others)


@pytest.mark.parametrize("number", EXPERIMENTS)
def test_smoke_measures_it_under_its_own_label(number):
    experiment = EXPERIMENTS[number]
    (case,) = in_section(experiment.cases("smoke", "cpu"), "course")
    for phase, found in measure(experiment.run_case, case).items():
        assert found.case == case.parameters and phase in case.phases
        time_or_bytes = {"01": "median_ms", "02": "done_ms", "04": "peak_bytes", "05": "median_ms"}[
            number
        ]
        assert found.metrics[time_or_bytes] > 0


def test_the_parts_of_its_attention_are_told_apart():
    live, marker = Step(CPU, course_parameters("nano", 16, "fp32")), RangeMarker("kineto")
    trace = profiling.capture_with_kineto(
        lambda: capture_steps(live, "inference", marker, "case"), "cpu"
    )
    table = profiling.launches(trace, nsys_analysis.STEP_PHASES)
    by_part = {part: set(rows["short_name"]) for part, rows in table.groupby("range")}
    only = {
        "softmax": {"aten::exp", "aten::sub", "aten::sum"},
        "mask": {"aten::where", "aten::tril"},
    }
    for part, names in only.items():
        assert names <= by_part[part], (part, by_part[part])
        assert not any(names & by_part[other] for other in ("scores", "value product"))
    assert (
        "aten::bmm" in by_part["scores"] & by_part["value product"]
        and "aten::bmm" not in by_part["softmax"]
    )
    assert (
        "aten::div" in by_part["scores"] & by_part["softmax"]
        and "aten::div" not in by_part["value product"]
    )
