"""A process that clears up after this one, however this one ends: nothing that it started goes on,
no folder stays.

A signal can come at any instant, during imports too, and nobody can catch SIGKILL. So another
process waits for it. It loads nothing that takes time.
"""

import atexit
import contextlib
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ENDING_S = 15
"""How long a guard has to clear up."""


@contextlib.contextmanager
def guarded_folder() -> Iterator[tuple[Path, subprocess.Popen]]:
    """Gives a new folder of this user alone, and the guard that removes it when the block or this
    process ends.

    Whatever has the folder's path in its environment is ended first (on Linux).
    """
    folder = Path(tempfile.gettempdir(), f"labkit-{secrets.token_hex(4)}")
    command = [sys.executable, "-I", __file__, str(os.getpid()), str(folder)]
    # A session of its own: what a terminal or a batch system sends to all processes of a job does
    # not reach it.
    guard = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    try:
        folder.mkdir(mode=0o700)
        yield folder, guard
    finally:
        guard.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            guard.wait(ENDING_S)
        # If it was stopped or killed, there is something left to do.
        guard.kill()
        guard.wait()
        _clear(folder)


@cache
def move_temporary_files() -> None:
    """Has this process and all that it starts from now on put temporary files into a guarded
    folder.
    """
    from multiprocessing import util  # not above: the guard loads nothing that takes time

    stack = contextlib.ExitStack()
    folder, _ = stack.enter_context(guarded_folder())
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    # After multiprocessing has removed its own folder in this one, which it does at -100.
    util.Finalize(None, stack.close, exitpriority=-200)
    # Before multiprocessing waits for workers: this ends them.
    atexit.register(_end_inheritors, folder)


def ignores_folder() -> bool:
    """Returns whether this process imports nothing from the folder that it is in: what it starts
    must not either, or another labkit that lies there would be measured.
    """
    return {"", os.getcwd()}.isdisjoint(sys.path)


def _end_inheritors(folder: Path) -> None:
    """Kills what has the folder's path in its environment, where there is /proc."""
    for _ in range(100):  # until none is left that could start another
        num_left = 0
        for environment in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):  # it is another user's, or has ended
                if bytes(folder) in environment.read_bytes():
                    num_left += 1
                    os.kill(int(environment.parent.name), signal.SIGKILL)
        if not num_left:
            return
        time.sleep(0.05)


def _clear(folder: Path) -> None:
    """Ends what was started in a folder and removes it."""
    _end_inheritors(folder)
    shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    """Is the guard of a folder: `PARENT FOLDER`."""
    parent = int(sys.argv[1])
    folder = Path(sys.argv[2])
    # Its work begins where the same signal may have ended its parent.
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    # Its end of stdin closes with it, unless a process that it forked holds that too.
    while os.getppid() == parent and not select.select([sys.stdin], [], [], 1)[0]:
        pass
    _clear(folder)


if __name__ == "__main__":
    main()
