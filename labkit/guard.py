"""A process that clears up after this one, however this one ends: nothing that it started goes on, no folder stays.

A signal can come at any instant, during imports too, and nobody can catch SIGKILL. So another process waits for it. The
module loads nothing that takes time.
"""

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
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

ENDING_S = 5
"""How long ranks have to end after SIGTERM, and as long again after SIGKILL."""

RANK = """
from pathlib import Path
from labkit import guard
guard.begin_rank({parent})
from labkit.parallel.launch import run_rank
run_rank(Path({folder!r}))
"""


@contextlib.contextmanager
def guarded_folder(environment: Mapping[str, str] | None = None) -> Iterator[tuple[Path, subprocess.Popen]]:
    """Gives a new folder of this user alone, and the guard that removes it when the block or this process ends.

    Whatever has the folder's path in its environment is ended first (on Linux). Asked to on its stdin, the guard starts
    ranks, see `_run_ranks`.
    """
    folder = Path(tempfile.gettempdir(), f"labkit-{secrets.token_hex(8)}")
    command = [sys.executable, "-P", "-m", __spec__.name, str(os.getpid()), str(folder)]
    # A session of its own: what a terminal or a batch system sends to all of a job's processes does not end it.
    guard = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, start_new_session=True, text=True)
    try:
        folder.mkdir(mode=0o700)
        yield folder, guard
    finally:
        with contextlib.suppress(BrokenPipeError):
            guard.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            guard.wait(3 * ENDING_S)
        # There is something left to do if the guard was stopped or killed.
        guard.kill()
        guard.wait()
        _clear(folder)


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


def _run_ranks(folder: Path, is_wanted: Callable[[float], bool], num_ranks: int, timeout_s: float) -> None:
    """Runs ranks until all are done, one fails, or they are wanted no more; then none runs, and "exits" is written.

    It holds the exit code of each rank, which ranks had ended when the first failure was seen, and which were stopped.
    """
    code = RANK.format(parent=os.getpid(), folder=str(folder))
    ranks, codes, stopped = [], {}, []
    for rank in range(num_ranks):
        environment = {**os.environ, "LABKIT_RANKS": str(folder)}
        environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
        command = [sys.executable, "-P", "-u", "-c", code]
        with open(folder / f"{rank}.stderr", "wb") as log:
            ranks.append(subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stderr=log))

    def reap(options: int = 0) -> None:
        for rank, process in enumerate(ranks):
            if rank not in codes:
                pid, status = os.waitpid(process.pid, os.WNOHANG | options)
                if pid and os.WIFSTOPPED(status):
                    stopped.append(rank)
                elif pid:
                    codes[rank] = os.waitstatus_to_exitcode(status)

    def is_well() -> bool:
        """Whether those that have ended were done: one that a library ended has code 0 too."""
        return all(code == 0 and (folder / f"{rank}.done").exists() for rank, code in codes.items())

    deadline = time.monotonic() + timeout_s
    while is_wanted(0.05) and len(codes) < num_ranks and is_well() and time.monotonic() < deadline:
        reap()
    reap(os.WUNTRACED)
    first = list(codes)
    for number in (signal.SIGTERM, signal.SIGKILL):
        for rank, process in enumerate(ranks):
            if rank not in codes:
                os.kill(process.pid, number)
                os.kill(process.pid, signal.SIGCONT)  # while it is stopped it cannot say where it stands
        deadline = time.monotonic() + ENDING_S
        while len(codes) < num_ranks and time.monotonic() < deadline:
            time.sleep(0.02)
            reap()
    part = folder / "exits.part"
    part.write_text(
        json.dumps({"codes": [codes.get(rank) for rank in range(num_ranks)], "first": first, "stopped": stopped})
    )
    part.rename(folder / "exits")


def _clear(folder: Path) -> None:
    """Kills what has the folder's path in its environment (where there is /proc) and removes the folder."""
    deadline = time.monotonic() + ENDING_S
    while (left := _started_in(folder)) and time.monotonic() < deadline:  # until none starts another
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    shutil.rmtree(folder, ignore_errors=True)


def _started_in(folder: Path) -> list[int]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it is another user's, or has ended
            if str(folder).encode() in (process / "environ").read_bytes():
                found.append(int(process.name))
    return found


def main() -> None:
    """Is the guard of a folder: `PARENT FOLDER`."""
    parent, folder = int(sys.argv[1]), Path(sys.argv[2])
    # It ends when its work is done, which may be after its parent was ended by the same signal.
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)

    def is_wanted(wait_s: float) -> bool:
        # The other end of stdin closes with the parent, unless a process that the parent forked holds it too.
        return os.getppid() == parent and not select.select([0], [], [], wait_s)[0]

    if request := sys.stdin.readline():
        _run_ranks(folder, is_wanted, **json.loads(request))
    while is_wanted(1):
        pass
    _clear(folder)


if __name__ == "__main__":
    main()
