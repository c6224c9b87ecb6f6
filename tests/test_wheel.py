"""A wheel holds all that a run and a report read, and finds it away from the clone."""

import os
import shutil
import subprocess
import sys
import zipfile

import pytest

from labkit import notebooks
from labkit.configs import REPOSITORY

pytest.importorskip("setuptools", minversion="69")

BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"

LOOK = """
from labkit import configs, device, notebooks, published
assert not configs.IS_CLONE and configs.FIGURES.parent == configs.Path.cwd()
assert configs.GRIDS and device.DATASHEETS and notebooks.read(notebooks.names()[0]).cells
print(*notebooks.names())
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The unpacked wheel, built from a copy so that nothing is left in the clone."""
    source = tmp_path_factory.mktemp("source")
    for name in ("labkit", "notebooks"):
        ignored = shutil.ignore_patterns("__pycache__", ".*")
        shutil.copytree(REPOSITORY / name, source / name, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, source)
    command = [sys.executable, "-c", BUILD, str(source)]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    (packed,) = source.glob("*.whl")
    unpacked = tmp_path_factory.mktemp("unpacked")
    zipfile.ZipFile(packed).extractall(unpacked)
    return unpacked


def test_every_file_of_the_package_is_inside(wheel):
    def files(root):
        paths = (path.relative_to(root) for path in root.rglob("*"))
        return {str(path) for path in paths if path.suffix in (".py", ".toml", ".css", ".csv")}

    assert files(wheel / "labkit") == files(REPOSITORY / "labkit")
    packed = {path.stem for path in (wheel / "labkit" / "data" / "notebooks").glob("*.ipynb")}
    assert packed == set(notebooks.names())


def run(wheel, folder, *arguments: str) -> str:
    """Returns what Python says with this wheel alone."""
    environment = {**os.environ, "PYTHONPATH": str(wheel)}
    command = [sys.executable, *arguments]
    found = subprocess.run(command, cwd=folder, env=environment, text=True, capture_output=True)
    assert found.returncode == 0, found.stderr
    return found.stdout


def test_it_finds_notebooks_grids_and_datasheets_and_writes_where_it_is_called(wheel, tmp_path):
    found = run(wheel, tmp_path, "-c", LOOK)
    assert found.split() == notebooks.names()


def test_without_any_record_a_plan_says_what_memory_it_takes(wheel, tmp_path):
    plan = run(wheel, tmp_path, "-m", "labkit", "plan", "medium")
    _, _, memory, _, time, _ = plan.splitlines()
    assert memory.startswith("Memory: ") and "fits" in memory
    assert time.startswith("Time: no step of this way is recorded")
