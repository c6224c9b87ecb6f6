"""What the tests of several chapters share."""

from collections.abc import Iterator
from pathlib import Path

import torch

from labkit import hardware
from labkit.experiments.sweep import HOST_SECTION, Case, Measured
from labkit.records import Record, RecordStore

CPU = hardware.Device("cpu", "a processor", "cpu-a-processor")
H200 = hardware.Device("cuda", "NVIDIA H200", "nvidia-h200")
H200_BYTES = 150_109_880_320


def of_the_chapter(folder: Path, notebook: str) -> list[Record]:
    """Returns a device's records of a notebook without those of the session's host, of which a CPU skips one."""
    records = RecordStore(folder / "records" / f"{notebook}.jsonl").load()
    host = [record for record in records if record.section == HOST_SECTION]
    assert {record.phase for record in host if record.status == "skipped"} <= {"triton_launch"} and len(host) >= 4
    return [record for record in records if record.section != HOST_SECTION]


def on_a_cpu(monkeypatch, *, is_detected: bool = True) -> Iterator[None]:
    """What runs meanwhile is measured on the CPU by one thread, and what it sets for the process is set back.

    One thread, since threads that wait for one another on a busy machine wait long.
    """
    if is_detected:
        monkeypatch.setattr(hardware, "detect", lambda: CPU)
    precision, num_threads = torch.get_float32_matmul_precision(), torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)
    torch.set_float32_matmul_precision(precision)


def in_section(found: list[Case], section: str) -> list[Case]:
    return [case for case in found if case.section == section]


def measure(run_case, case: Case, ceilings: dict[str, float] | None = None) -> dict[str, Measured]:
    """Returns what the phases of a case give, measured in this process."""
    return {phase: run() for phase, run in run_case(case, ceilings or {})}
