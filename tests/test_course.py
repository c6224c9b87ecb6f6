"""The model as a course writes it: the same results as ours, recorded apart."""

import pytest
from chapters import CPU, in_section, measure

from labkit.experiments import attention, benchmarking, memory, nsys_analysis
from labkit.experiments.step import Step, step_parameters
from labkit.kernels import course
from labkit.numerics import relative_error

EXPERIMENTS = {
    "01": (benchmarking, 15, "median_ms"),
    "02": (nsys_analysis, 3, "done_ms"),
    "04": (memory, 6, "peak_bytes"),
    "05": (attention, 5, "median_ms"),
}
"""Experiment, its cases in full, and a metric that each phase of them has."""


@pytest.fixture(autouse=True)
def this_device_is_a_cpu(monkeypatch, on_a_cpu):
    monkeypatch.setattr(nsys_analysis, "freeze_modules", lambda: None)


def test_the_model_trains_as_the_eager_one_from_the_same_parameters():
    label = step_parameters("nano", 32, "fp32", attention="course")
    eager, plain = (Step(CPU, label | {"attention": x, "impl": x}) for x in ("eager", "course"))
    assert plain.described() == label and isinstance(plain.optimizer, course.AdamW)
    plain.model.load_state_dict(eager.model.state_dict())
    for _ in range(3):
        assert relative_error(plain.forward(), eager.forward()) < 1e-6
        for live in (eager, plain):
            live.train_step()
        for mine, theirs in zip(plain.model.parameters(), eager.model.parameters(), strict=True):
            assert relative_error(mine.grad, theirs.grad) < 2e-5
    assert relative_error(plain.model(plain.tokens), eager.model(eager.tokens)) < 1e-4


@pytest.mark.parametrize("number", EXPERIMENTS)
def test_it_is_measured_under_its_own_label(number):
    experiment, num_cases, metric = EXPERIMENTS[number]
    full = experiment.cases("full", "cuda")
    assert len(in_section(full, "course")) == num_cases
    for case in full:
        assert ("course" in case.parameters.values()) == (case.section == "course")
    (case,) = in_section(experiment.cases("smoke", "cpu"), "course")
    for found in measure(experiment.run_case, case).values():
        assert found.case == case.parameters and found.metrics[metric] > 0
