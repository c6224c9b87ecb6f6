"""What the tests of several chapters share."""

from dataclasses import replace
from pathlib import Path

import nbformat
import pytest
from typer.testing import CliRunner

from labkit import cli, notebooks
from labkit.device import Device, cpu_name, slugify
from labkit.experiments.sweep import Case, Measured, Skip
from labkit.records import HOST_SECTION, Record, RecordStore

CPU = Device("cpu", "a processor", "cpu-a-processor")
H200 = Device("cuda", "NVIDIA H200", "nvidia-h200")


def in_section(found: list[Case], section: str) -> list[Case]:
    return [case for case in found if case.section == section]


def measure(run_case, case: Case, ceilings: dict[str, float] | None = None) -> dict[str, Measured]:
    """Returns what the phases of a case give, measured in this process."""
    case = replace(case, ceilings=ceilings or {})
    return {phase: run() for phase, run in run_case(case)}


def measure_all(
    run_case, case: Case, ceilings: dict[str, float] | None = None
) -> tuple[dict[str, Measured], dict[str, Exception]]:
    """Returns what the phases give, as the session's worker would: after a failure, but for a Skip,
    the rest is asked for again.
    """
    remaining, measured, failed = list(case.phases), {}, {}
    while remaining:
        left = replace(case, phases=tuple(remaining), ceilings=ceilings or {})
        for phase, measure_phase in run_case(left):
            remaining.remove(phase)
            try:
                measured[phase] = measure_phase()
            except Exception as error:
                failed[phase] = error
                if not isinstance(error, Skip):
                    break
    return measured, failed


def store_of(folder: Path, notebook: str) -> RecordStore:
    """Returns where a notebook's records of a device are written; makes the device's folder."""
    (folder / "records").mkdir(parents=True, exist_ok=True)
    return RecordStore(folder / "records" / f"{notebook}.jsonl")


def labkit(*arguments):
    """Returns what the command line does with these arguments."""
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


def write_notebook(folder: Path, source: str) -> None:
    """Writes notebook 09_written, of a parameters cell and another one."""
    cells = [nbformat.v4.new_code_cell(text) for text in ("a = 1", source)]
    cells[0].metadata["tags"] = ["parameters"]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), folder / "09_written.ipynb")


def recorded(notebook: str, folder: Path) -> list[Record]:
    """Returns the records of a run without those of its host."""
    records = RecordStore(folder / "records" / f"{notebook}.jsonl").load()
    return [record for record in records if record.section != HOST_SECTION]


def execute_smoke(notebook: str, output: Path, **narrowed):
    """The notebook executed in the smoke profile without a GPU, narrowed to these parameters;
    returns the device's folder and what it became.
    """
    slug = f"cpu-{slugify(cpu_name())}"
    values = {
        "device": slug,
        "measure": True,
        "profile": "smoke",
        "output": str(output),
        "save_figures": True,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        return output / slug, notebooks.execute(notebook, values | narrowed)
