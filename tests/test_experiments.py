"""What holds for the experiments of all notebooks: their cases, what they refuse, their size."""

import importlib
import json
import re
from collections import Counter

import pytest
import torch

from labkit import notebooks
from labkit.configs import FIGURES, GRIDS, NARROWED, REFERENCE_DEVICE, RequestError
from labkit.experiments.sweep import asked_cases
from labkit.records import HOST_SECTION, RecordStore, folder_of

PROFILES = ("smoke", "full", "key", "quick")

UNPLANNED = {
    HOST_SECTION: "",
    "algorithm": "",
    "accumulation": '"method": "(kahan|pairwise)"',
    "dtypes": '"model": "small"',
}
"""What is recorded and in no grid, as it is the host's or no longer measured: by section a pattern
of its cases.
"""


def experiment_of(notebook: str):
    return importlib.import_module(f"labkit.experiments.{notebook.split('_', 1)[1]}")


def keys(found: list) -> list[tuple[str, str, str]]:
    """Returns what tells one measurement of these cases or records from another."""
    return [
        (one.section, json.dumps(parameters, sort_keys=True), phase)
        for one in found
        for parameters in [one.parameters if hasattr(one, "parameters") else one.case]
        for phase in (one.phases if hasattr(one, "phases") else [one.phase])
    ]


@pytest.mark.parametrize("notebook", GRIDS)
@pytest.mark.parametrize("profile", PROFILES)
def test_no_phase_is_measured_twice_and_every_case_survives_json(notebook, profile):
    found = experiment_of(notebook).cases(profile, "cuda")
    assert set(Counter(keys(found)).values()) == {1}
    assert all(json.loads(json.dumps(case.parameters)) == case.parameters for case in found)


@pytest.mark.parametrize("notebook", GRIDS)
def test_what_is_recorded_stays_recorded(notebook):
    """Each committed record is measured as today and, but for what is no longer measured, of a case
    of the grid: a run resumes and measures none anew.
    """
    experiment = experiment_of(notebook)
    folder = folder_of(FIGURES, REFERENCE_DEVICE, notebook)
    records = RecordStore(folder / "records" / f"{notebook}.jsonl").load()
    assert {one.measurement_version for one in records} == {experiment.MEASUREMENT_VERSION}
    planned = experiment.cases("full", "cuda")
    if notebook == "07_distributed":
        planned += experiment.cases("full", "cuda", workload=["8b"])
    left = set(keys(records)) - set(keys(planned))
    assert all(re.search(UNPLANNED[section], case) for section, case, _ in left)


@pytest.mark.parametrize(
    "path",
    sorted(FIGURES.glob("*/records/*.done.json")),
    ids=lambda path: f"{path.parts[-3]} {path.name}",
)
def test_a_committed_chapter_says_how_much_of_its_grid_is_missing(path, monkeypatch):
    device = path.parts[-3]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4 if "4x" in device else 2)
    done, kind = json.loads(path.read_text()), "cpu" if "cpu" in device else "cuda"
    notebook = path.with_suffix("").stem
    records = RecordStore(path.with_name(f"{notebook}.jsonl")).load()
    grid = set(keys(experiment_of(notebook).cases(done["profile"], kind)))
    assert grid and done["num_missing"] == len(grid - set(keys(records)))


def test_the_only_gpu_of_a_machine_needs_no_ceilings_for_communication(monkeypatch):
    for num_gpus, has_ceilings in ((1, False), (2, True)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda num_gpus=num_gpus: num_gpus)
        planned = experiment_of("07_distributed").cases("quick", "cuda")
        assert ("ceilings" in {case.section for case in planned}) == has_ceilings


@pytest.mark.parametrize("notebook", GRIDS)
def test_a_grid_is_narrowed_to_values_that_it_has(notebook, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    experiment, grid = experiment_of(notebook), GRIDS[notebook]["full"]
    planned = keys(experiment.cases("full", "cuda"))
    for option in [option for option in NARROWED if hasattr(grid, option)]:
        smallest = min(getattr(grid, option)) if option != "sizes" else grid.sizes[0]
        narrowed = notebooks.narrowing(notebook, "full", {option: smallest})
        fewer = asked_cases(experiment, "full", "cuda", narrowed)
        assert 0 < len(keys(fewer)) < len(planned)
        key = option.removesuffix("s")
        assert {case.parameters[key] for case in fewer if key in case.parameters} <= {smallest}
        with pytest.raises(RequestError, match="accepted: "):
            notebooks.narrowing(notebook, "full", {option: [smallest, "7"]})
