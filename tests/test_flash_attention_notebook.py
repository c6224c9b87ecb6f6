"""Notebook 06 from its measurements to its figures, on a CPU."""

import pytest
from chapters import execute_smoke, recorded


@pytest.mark.slow
def test_the_smoke_profile_runs_through(tmp_path):
    file = tmp_path / "own.py"
    file.write_text("from labkit.kernels.course import attention as mine\n")
    narrowed = {"lengths": [128], "d_heads": [16, 64], "own": f"{file}:mine"}
    folder, _ = execute_smoke("06_flash_attention", tmp_path, **narrowed)
    assert "yours: mine" in (folder / "06_lengths.svg").read_text()
    records = recorded("06_flash_attention", folder)
    assert {record.status for record in records} == {"ok", "skipped"}
    speed = [one for one in records if one.section == "speed" and one.status == "ok"]
    timed = {record.phase.split(" ")[0] for record in speed}
    assert timed == {"tiled", "eager", "compiled", "sdpa_flash"}
