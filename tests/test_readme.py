"""What README shows is so: its table of devices, and the scripts for a cluster and a container."""

import os
import re
import subprocess

from labkit.configs import FIGURES, REPOSITORY
from labkit.report import render, tables

README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
CONTRIBUTING = (REPOSITORY / "CONTRIBUTING.md").read_text(encoding="utf-8")


def block(beginning: str) -> str:
    """Returns the code block that begins so."""
    (text,) = (
        text
        for text in re.findall(r"```\w+\n(.*?)```", README, flags=re.DOTALL)
        if text.startswith(beginning)
    )
    return text


def test_the_table_of_devices_is_that_of_the_folders():
    table = tables.to_markdown(render.devices_summary(FIGURES))
    assert f"\n\n{table}\n\n" in README, "run `labkit devices --summary`"
    for target in re.findall(r"\]\((figures/[^)]*)\)", table):
        assert (REPOSITORY / target).exists()


def test_folders_without_records_make_an_empty_table(tmp_path):
    (tmp_path / "notes").mkdir()
    assert render.devices_summary(tmp_path).empty


def test_the_command_that_checks_a_device_is_named():
    section = CONTRIBUTING.split("## Add a device")[1].split("\n## ")[0]
    assert "`labkit verify figures/<device>`" in section
    assert "`labkit devices --summary`" in section


def test_the_container_installs_a_clone_with_what_compiling_needs():
    lines = block("FROM ").splitlines()
    instructions = [line.split()[0] for line in lines if not line.startswith("#")]
    assert instructions == ["FROM", "RUN", "WORKDIR", "COPY", "RUN", "ENV", "ENTRYPOINT", "CMD"]
    assert len(lines) <= 10
    (packages,) = (line for line in lines if "apt-get install" in line)
    assert {"g++", "git"} <= set(packages.split())
    # The volume of the command below is where a clone's results lie.
    folder = next(line.split()[1] for line in lines if line.startswith("WORKDIR"))
    assert f'"$PWD/figures:{folder}/figures"' in README


SBATCH = {"job-name", "gpus", "exclusive", "time", "requeue", "open-mode", "signal"}

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
    options = re.findall(r"^#SBATCH --([\w-]+)", script.read_text(), flags=re.MULTILINE)
    assert set(options) == SBATCH
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
