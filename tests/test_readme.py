"""What README shows is so: its table of devices, and the script for a cluster."""

import os
import re
import subprocess

from labkit.configs import FIGURES, REPOSITORY
from labkit.report import render, tables

README = (REPOSITORY / "README.md").read_text(encoding="utf-8")


def block(beginning: str) -> str:
    """Returns the code block that begins so."""
    (text,) = (
        text
        for text in re.findall(r"```\w+\n(.*?)```", README, flags=re.DOTALL)
        if text.startswith(beginning)
    )
    return text


def test_the_table_of_devices_is_that_of_the_folders(monkeypatch):
    monkeypatch.chdir(REPOSITORY)  # from which README links
    table = tables.to_markdown(render.devices_summary(FIGURES))
    assert f"\n\n{table}\n\n" in README, "run `labkit devices`"
    for target in re.findall(r"\]\((figures/[^)]*)\)", table):
        assert (REPOSITORY / target).exists()


STUBS = {
    # Runs the script at once, as the job of its number.
    "sbatch": 'SLURM_JOB_ID=7 SLURM_JOB_PARTITION=gpus exec bash "$@"',
    "srun": 'exec "$@"',
    # The first job's time ends while it measures, the second comes to the end.
    "labkit": """
        echo "$LABKIT_MACHINE labkit $*" >> calls
        if [ "$(grep -c labkit calls)" = 1 ]; then
            kill -USR1 "$PPID"
            sleep 60
        fi
    """,
    "scontrol": 'echo "scontrol $*" >> calls',
}


def test_a_slurm_job_queues_itself_again_and_goes_on_as_the_same_machine(tmp_path):
    script = tmp_path / "labkit.sh"
    script.write_text(block("#!/usr/bin/env bash\n#SBATCH"))
    for name, text in STUBS.items():
        stub = tmp_path / name
        stub.write_text(f"#!/usr/bin/env bash\n{text}\n")
        stub.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    environment.pop("LABKIT_MACHINE", None)
    codes = []
    for _ in range(2):
        command = ["sbatch", str(script), "05", "06"]
        job = subprocess.Popen(command, cwd=tmp_path, env=environment, start_new_session=True)
        codes.append(job.wait(timeout=30))
        if codes[-1]:  # Slurm ends what a job leaves
            os.killpg(job.pid, 9)
    assert codes == [128 + 10, 0]
    assert (tmp_path / "calls").read_text().splitlines() == [
        "gpus labkit run 05 06",
        "scontrol requeue 7",
        "gpus labkit run 05 06",
    ]
