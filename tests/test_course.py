"""The model as a course writes it: the same results as ours, recorded apart."""

import pytest
from chapters import in_section, measure

from labkit.experiments import attention, benchmarking, memory, nsys_analysis

EXPERIMENTS = {
    "01": (benchmarking, 15, "median_ms"),
    "02": (nsys_analysis, 3, "done_ms"),
    "04": (memory, 6, "peak_bytes"),
    "05": (attention, 5, "median_ms"),
}
"""Experiment, its cases in full, and a metric that each phase of them has."""

pytestmark = pytest.mark.usefixtures("on_a_cpu")


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
