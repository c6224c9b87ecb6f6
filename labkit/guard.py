"""A process that clears up after this one, however this one ends: nothing that it started goes on,
no folder stays.

A signal can come at any instant, during imports too, and nobody can catch SIGKILL. So another
process waits for it. It loads nothing that takes time.
"""

import atexit
import contextlib
import ctypes
import faulthandler
import json
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

ENDING_S = 5
"""How long ranks have to end after SIGTERM."""

RANK = """
from pathlib import Path
from labkit import guard
guard.begin_rank({})
from labkit.parallel.launch import run_rank
run_rank(Path({!r}))
"""


@contextlib.contextmanager
def guarded_folder(
    environment: Mapping[str, str] | None = None,
) -> Iterator[tuple[Path, subprocess.Popen]]:
    """Gives a new folder of this user alone, and the guard that removes it when the block or this
    process ends.

    Whatever has the folder's path in its environment is ended first (on Linux). Asked to on its
    stdin, the guard starts ranks, see `_run_ranks`.
    """
    folder = Path(tempfile.gettempdir(), f"labkit-{secrets.token_hex(4)}")
    command = [sys.executable, "-I", __file__, str(os.getpid()), str(folder)]
    # A session of its own: what a terminal or a batch system sends to all processes of a job does
    # not reach it.
    guard = subprocess.Popen(
        command, stdin=subprocess.PIPE, env=environment, start_new_session=True, text=True
    )
    try:
        folder.mkdir(mode=0o700)
        yield folder, guard
    finally:
        with contextlib.suppress(BrokenPipeError, subprocess.TimeoutExpired):
            guard.stdin.close()
            guard.wait(3 * ENDING_S)
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


def shared_file(name: str) -> Path | None:
    """Returns a file that this process shares with what it started and what started it, and that
    goes with them; None before `move_temporary_files`.
    """
    folder = Path(tempfile.gettempdir())
    return folder / f"{name}.shared" if folder.name.startswith("labkit-") else None


def end_with(parent: int) -> None:
    """Has this process killed as soon as `parent`, which started it, has ended. Linux only."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before
            os._exit(1)


def begin_rank(parent: int) -> None:
    """Has a rank end with its guard, and say on stderr where it stands when it is ended.

    Written without the interpreter's help, so a rank that hangs in a collective says so too.
    """
    end_with(parent)
    faulthandler.enable()
    faulthandler.register(signal.SIGTERM, chain=True)


def _is_wanted(parent: int, wait_s: float) -> bool:
    """Whether the parent lives and waits still; at most `wait_s` are taken to find out.

    Its end of stdin closes with it, unless a process that it forked holds that too.
    """
    return os.getppid() == parent and not select.select([sys.stdin], [], [], wait_s)[0]


def _run_ranks(parent: int, folder: Path, num_ranks: int, timeout_s: float) -> None:
    """Runs ranks until all are done, one fails, or they are wanted no more; then none runs, and
    "exits" is written.

    It says which had failed by then, with their exit codes, and which were stopped.
    """
    ranks = []
    for rank in range(num_ranks):
        environment = {**os.environ, "LABKIT_RANKS": str(folder)}
        environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
        command = [sys.executable, "-P", "-u", "-c", RANK.format(os.getpid(), str(folder))]
        with open(folder / f"{rank}.stderr", "wb") as log:
            ranks.append(
                subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stderr=log)
            )
    failed = {}
    deadline = time.monotonic() + timeout_s
    while not failed and _is_wanted(parent, 0.05) and time.monotonic() < deadline:
        codes = [process.poll() for process in ranks]
        # One that a library ends in the middle has code 0 too.
        failed = {
            rank: code
            for rank, code in enumerate(codes)
            if code or (code == 0 and not (folder / f"{rank}.done").exists())
        }
        if None not in codes:
            break
    options = os.WNOHANG | os.WUNTRACED
    running = [process for process in ranks if process.poll() is None]
    stopped = [
        ranks.index(process)
        for process in running
        if os.WIFSTOPPED(os.waitpid(process.pid, options)[1])
    ]
    for process in running:
        process.terminate()
        process.send_signal(signal.SIGCONT)  # while it is stopped it cannot say where it stands
    deadline = time.monotonic() + ENDING_S
    while any(process.poll() is None for process in running) and time.monotonic() < deadline:
        time.sleep(0.02)
    for process in running:
        process.kill()
        process.wait()
    part = folder / "exits.part"
    part.write_text(json.dumps([list(failed.items()), stopped]))
    part.rename(folder / "exits")


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
    if request := sys.stdin.readline():
        _run_ranks(parent, folder, **json.loads(request))
    while _is_wanted(parent, 1):
        pass
    _clear(folder)


if __name__ == "__main__":
    main()
