"""Runs a module-level function on N ranks of this machine and gathers what each rank yields.

A guard (`labkit.guard`) sees to it that no rank outlives the call, however that ends (on Linux;
elsewhere a rank ends itself when its time is over). They find one another through a file, and
connect over the loopback interface alone: what a rank is sent, it unpickles.
"""

import contextlib
import datetime
import faulthandler
import importlib
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from labkit.guard import guarded_folder
from labkit.records import write_text_atomic

GRACE_S = 15
"""Seconds beyond the ranks' own. They end themselves when their time is over; after all of it they
are ended, which bounds their imports too.
"""

ENDING_S = 5
"""How long ranks have to end after SIGTERM."""

RANK = "from pathlib import Path; from labkit.parallel.launch import run_rank; run_rank(Path({!r}))"

CAUSE = r".*Watchdog caught .*|Timeout \(.*\)!|Fatal Python error: .*"
"""What NCCL's watchdog and faulthandler say of the end that they are to."""

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


class RankError(RuntimeError):
    """A rank failed. The message holds the first failing rank's traceback and where the others
    were.

    Fields:
        rank: the first rank that failed.
        summary: one line, with the last one of its message, unless that is of a stack.
        finished: for each rank, what its function had yielded before the end.
    """

    def __init__(self, message: str, rank: int, finished: list[list[Any]]):
        super().__init__(message)
        self.rank = rank
        self.finished = finished
        first, *others = message.split("\nrank ")[0].splitlines()
        last = others[-1] if others else ""
        self.summary = first if last.startswith(" ") else f"{first} {last}".strip()


def launch(
    function: Callable | str,
    nproc: int,
    *args: Any,
    device: str | None = None,
    timeout_s: float = 600,
    collective_timeout_s: float = 120,
) -> list[list[Any]]:
    """Returns the list of what `function(*args)` yielded on each of `nproc` ranks, in rank order.

    The ranks share an initialised process group; `rank_device()` is the device of each.

    Args:
        function: module-level generator, or its name as "module:function". Arguments and what it
            yields are pickled.
        nproc: number of ranks.
        device: "cuda", a GPU a rank with NCCL, or "cpu", with gloo; CUDA where there is a GPU.
        timeout_s: seconds for everything after the ranks' imports; collective_timeout_s: seconds
            for one collective.

    Raises:
        ValueError: a function that cannot be named, an unknown device, fewer GPUs than ranks.
        RankError: a rank raised, died, or did not end in time. No process outlives the call.
    """
    name = function
    if not isinstance(function, str):
        name = f"{function.__module__}:{function.__qualname__}"
    if name.count(":") != 1 or "<" in name or name.startswith("__main__:"):
        raise ValueError(
            f"cannot start {name!r} on a rank; accepted: a function of an importable module"
        )
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    num_gpus = torch.cuda.device_count()
    if device not in ("cpu", "cuda") or nproc < 1 or (device == "cuda" and nproc > num_gpus):
        raise ValueError(
            f"{nproc} ranks on {device!r}; accepted: 1 and more on cpu, up to {num_gpus} on cuda"
        )
    call = [name, args, device, timeout_s, collective_timeout_s]
    with guarded_folder() as (folder, _):
        (folder / "call").write_bytes(pickle.dumps(call))
        ranks = [_started(folder, rank, nproc) for rank in range(nproc)]
        try:
            failed = _failed_first(folder, ranks, timeout_s + GRACE_S)
        finally:
            stopped = _ended(ranks)
        finished = [_read_items(folder / f"{rank}.items") for rank in range(nproc)]
        if failed or len(list(folder.glob("*.done"))) < nproc:
            message, first = _failure(folder, nproc, timeout_s, failed, stopped)
            raise RankError(f"{name}: {message}", first, finished)
    return finished


def _started(folder: Path, rank: int, num_ranks: int) -> subprocess.Popen:
    environment = _environment() | {"LABKIT_RANKS": str(folder), "RANK": str(rank)}
    environment |= {"LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
    command = [sys.executable, "-P", "-u", "-c", RANK.format(str(folder))]
    with open(folder / f"{rank}.stderr", "wb") as log:
        return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stderr=log)


def _failed_first(
    folder: Path, ranks: Sequence[subprocess.Popen], timeout_s: float
) -> dict[int, int]:
    """Waits until all ranks are done, one has failed or their time is over; returns the exit codes
    of those that have failed by then.
    """
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        codes = [process.poll() for process in ranks]
        # One that a library ends in the middle has code 0 too.
        failed = {
            rank: code
            for rank, code in enumerate(codes)
            if code or (code == 0 and not (folder / f"{rank}.done").exists())
        }
        if failed or None not in codes:
            return failed
        time.sleep(0.02)
    return {}


def _ended(ranks: Sequence[subprocess.Popen]) -> list[int]:
    """Ends the ranks that still run; returns which of them a signal had stopped."""
    running = [process for process in ranks if process.poll() is None]
    options = os.WNOHANG | os.WUNTRACED
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
    return stopped


def rank_device() -> torch.device:
    """Returns the device of this rank; on CUDA it is also the current device."""
    if dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def moment() -> Any:
    """Returns a point in this rank's time: an event of the current stream, without CUDA the seconds
    of the clock.
    """
    if rank_device().type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _environment() -> dict[str, str]:
    """Returns the ranks' environment: this process's, and sockets that other machines do not
    reach.
    """
    return {
        "OMP_NUM_THREADS": "1",
        # Before NCCL's watchdog ends a rank that hangs, it waits four times this long, a minute if
        # left alone.
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "500",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
        "NCCL_SOCKET_IFNAME": LOOPBACK,
        **os.environ,
        "GLOO_SOCKET_IFNAME": LOOPBACK,
        # A rank that never communicates must not leave while another still connects to it.
        "TORCH_DIST_INIT_BARRIER": "1",
        "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)),
    }


def run_rank(folder: Path) -> None:
    """Is a rank: writes what the function yields, and `done` or `error`, into the folder."""
    # When it is ended it says on stderr where it stands, in a collective that hangs too.
    faulthandler.enable()
    faulthandler.register(signal.SIGTERM, chain=True)
    rank = int(os.environ["RANK"])
    try:
        call = pickle.loads((folder / "call").read_bytes())
        name, args, device, timeout_s, collective_timeout_s = call
        faulthandler.dump_traceback_later(timeout_s, exit=True)
        module, name = name.split(":")
        function = getattr(importlib.import_module(module), name)
        world_size = int(os.environ["WORLD_SIZE"])
        timeout = datetime.timedelta(seconds=collective_timeout_s)
        store = dist.FileStore(str(folder / "store"), world_size)
        store.set_timeout(timeout)
        group = {"store": store, "rank": rank, "world_size": world_size, "timeout": timeout}
        if device == "cuda":
            torch.cuda.set_device(rank)
            dist.init_process_group("nccl", **group, device_id=torch.device(device, rank))
        else:
            dist.init_process_group("gloo", **group)
        with open(folder / f"{rank}.items", "wb") as file:
            for item in function(*args):
                pickle.dump(item, file)
                file.flush()
        dist.destroy_process_group()
        (folder / f"{rank}.done").touch()
    except BaseException:
        error = json.dumps([time.time_ns(), traceback.format_exc()])
        write_text_atomic(folder / f"{rank}.error", error)
        # At once: destructors of a process group can wait for ranks that are gone.
        os._exit(1)


def _read_items(path: Path) -> list[Any]:
    """Returns what a rank has yielded; the last of it may be cut off."""
    items: list[Any] = []
    cut_off = (FileNotFoundError, EOFError, pickle.UnpicklingError)
    with contextlib.suppress(*cut_off), open(path, "rb") as file:
        while True:
            items.append(pickle.load(file))
    return items


def _failure(
    folder: Path, nproc: int, timeout_s: float, failed: dict[int, int], stopped: list[int]
) -> tuple[str, int]:
    """Returns what to say of a failure, and the rank that failed first.

    Args:
        failed: exit codes of the ranks that ended first; stopped: ranks that a signal had stopped.
    """
    errors = {int(path.stem): json.loads(path.read_text()) for path in folder.glob("*.error")}
    logs = [
        (folder / f"{rank}.stderr").read_text(errors="replace").splitlines()
        for rank in range(nproc)
    ]
    # A rank that died without a word took its peers along, and their errors say so.
    silent = [rank for rank in failed if rank not in errors]
    first = [*silent, *sorted(errors, key=errors.get), *stopped, 0][0]
    code = failed.get(first)
    text = "\n".join(logs[first][-40:])
    if first in errors:
        how = "exit status 1"
        text = errors[first][1]
    elif code is None:
        how = f"no end in {timeout_s:g} s"
    elif code < 0:
        how = f"killed by signal {-code}, {signal.strsignal(-code)}"
    else:
        how = f"exit status {code}" if code else "exit status 0, before it was done"
    how += "".join(f"; rank {rank} was stopped" for rank in stopped)
    causes = [line for line in logs[first] if re.match(CAUSE, line)]
    parts = [f"rank {first} of {nproc} failed first ({how})", text, *causes[:1]]
    for rank, log in enumerate(logs):
        if log and rank != first:
            parts += [f"rank {rank} was at:", *log[-20:]]
    return "\n".join(parts), first
