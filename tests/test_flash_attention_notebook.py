"""Notebook 06: the grid of its cases, and what the chapter's queries and figures make of a few
hand-made rows.
"""

import pandas as pd
import pytest
from chapters import execute_smoke, recorded

from labkit.report import flash_attention as report


def row(phase: str, **values) -> dict:
    return {"phase": phase, "status": "ok", "precision": "bf16", **values}


def test_ours_in_memory_is_what_auto_ran_at_the_next_shorter_length():
    ran = {"triton": 512, "gluon": 2048}
    timed = [row(f"{impl} forward_backward", is_auto=1.0, length=n) for impl, n in ran.items()]
    impls = [*ran, "fa3"]
    memory = [
        row("forward_backward", impl=impl, length=n) for impl in impls for n in (256, 1024, 4096)
    ]
    found = report.peaks(pd.DataFrame(memory), report.contest(pd.DataFrame(timed)))
    ours = found[found["impl"] == "ours"]
    assert list(ours["length"]) == [1024, 4096] and list(ours["ran"]) == ["triton", "gluon"]


@pytest.mark.slow
def test_the_smoke_profile_runs_through(tmp_path):
    file = tmp_path / "own.py"
    file.write_text("from labkit.kernels.reference import attention_reference as mine\n")
    narrowed = {"lengths": [128], "d_heads": [16, 64], "own": f"{file}:mine"}
    folder, _ = execute_smoke("06_flash_attention", tmp_path, **narrowed)
    assert "yours: mine" in (folder / "06_lengths.svg").read_text()
    records = recorded("06_flash_attention", folder)
    assert {record.status for record in records} == {"ok", "skipped"}
    speed = [one for one in records if one.section == "speed" and one.status == "ok"]
    timed = {record.phase.split(" ")[0] for record in speed}
    assert timed == {"tiled", "eager", "compiled", "sdpa_flash"}
