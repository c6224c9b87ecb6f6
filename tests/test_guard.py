"""What is left of a guarded folder and of a notebook's kernel when the process that used them is
killed.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from chapters import write_notebook
from processes import holding, is_true_within

from labkit import guard


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """The folder for temporary files of this process and of all that it starts."""
    # A socket's path may have 107 characters.
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr("tempfile.tempdir", folder)
        yield Path(folder)


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_guard_that_is_stopped_or_killed_is_replaced_by_its_parent(
    temporary, monkeypatch, number
):
    monkeypatch.setattr(guard, "ENDING_S", 0.2)
    with guard.guarded_folder() as (_, process):
        os.kill(process.pid, number)
    assert process.poll() == -signal.SIGKILL and not list(temporary.iterdir())


def test_signals_to_all_processes_leave_the_guard_to_its_work(temporary):
    numbers = (signal.SIGHUP, signal.SIGTERM, signal.SIGINT)
    mask = sum(1 << (number - 1) for number in numbers)
    with guard.guarded_folder() as (folder, process):
        status = Path(f"/proc/{process.pid}/status")
        assert is_true_within(
            5, lambda: int(status.read_text().split("SigCgt:")[1].split()[0], 16) & mask == mask
        )
        for number in numbers:
            os.kill(process.pid, number)
        time.sleep(0.2)
        assert process.poll() is None and folder.exists()
    assert not list(temporary.iterdir())


KERNEL = """
import multiprocessing.forkserver, os, time
multiprocessing.forkserver.set_forkserver_preload(["torch"])
multiprocessing.forkserver.ensure_running()
open(os.path.join(os.environ["TMPDIR"], "ready"), "w").write(str(os.getpid()))
time.sleep(600)
"""


def test_a_notebook_that_is_killed_leaves_nothing(temporary, tmp_path):
    write_notebook(tmp_path, KERNEL)
    code = (
        "import pathlib; from labkit import notebooks\n"
        f"notebooks.NOTEBOOKS = pathlib.Path({str(tmp_path)!r})\n"
        "notebooks.execute('09_written', {})"
    )
    parent = subprocess.Popen([sys.executable, "-c", code])
    assert is_true_within(60, lambda: list(temporary.glob("*/ready")))
    parent.kill()
    parent.wait()
    # The kernel itself, and the server of workers, have TMPDIR in their environment as well.
    assert is_true_within(
        10, lambda: not list(temporary.iterdir()) and not holding(bytes(temporary))
    )
