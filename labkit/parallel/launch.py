"""Runs a module-level function on N ranks of this machine and gathers what each rank returns.

The ranks are started by a guard (`labkit.guard`), so that none outlives the call, however that
ends. They find one another through a file, and connect over the loopback interface alone: what a
rank is sent, it unpickles.
"""

import contextlib
import datetime
import faulthandler
import importlib
import inspect
import json
import math
import os
import pickle
import re
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from labkit.guard import guarded_folder
from labkit.records import write_text_atomic

GRACE_S = 30
"""Seconds beyond the ranks' own. They end themselves when their time is over; after half of this
the guard ends them, which bounds their imports too; after all of it the guard itself is ended.
"""

NO_MESSAGE = (
    r'\s*(File "|Thread 0x|Current thread|<no Python|\.\.\.$|Extension modules:|frame #|#\d)'
)
"""Lines of a stack, or about it."""

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"

# Of a launched rank, else "". CUDA is asked for at first use: a process that did so when it
# imported this module could not fork.
_device_type = ""


class RankError(RuntimeError):
    """A rank failed. The message holds the first failing rank's traceback and where the others
    were.

    Fields:
        rank: the first rank that failed, None where no rank started.
        summary: one line, with the last one of its message that is no stack frame.
        finished: for each rank, what its function had yielded before the end.
    """

    def __init__(self, message: str, rank: int | None, finished: list[list[Any]]):
        super().__init__(message)
        self.rank, self.finished = rank, finished
        lines = message.split("\nrank ")[0].splitlines()
        lines = [line for line in lines if line.strip() and not re.match(NO_MESSAGE, line)]
        self.summary = " ".join(dict.fromkeys([lines[0], lines[-1].strip()]))


def launch(
    function: Callable | str,
    nproc: int,
    *args: Any,
    device: str | None = None,
    backend: str | None = None,
    timeout_s: float = 600,
    collective_timeout_s: float = 120,
) -> list[Any]:
    """Returns what `function(*args)` returned on each of `nproc` ranks, in rank order.

    The ranks share an initialised process group; `rank_device()` is the device of each. Where
    `function` is a generator, a rank's result is the list of what it yielded, and what was yielded
    before a failure is kept.

    Args:
        function: module-level function, or its name as "module:function". Arguments and results are
            pickled.
        nproc: number of ranks.
        device: "cuda" or "cpu"; CUDA where there is a GPU. With gloo, ranks may share a GPU.
        backend: "nccl" or "gloo"; NCCL for CUDA and gloo for the CPU.
        timeout_s: seconds for everything after the ranks' imports; collective_timeout_s: seconds
            for one collective.

    Raises:
        ValueError: a function that cannot be named, an unknown device or backend, NCCL without one
            GPU a rank, no time. RankError: a rank raised, died, or did not end in time. No process
            outlives the call.
    """
    name = function
    if not isinstance(function, str):
        name = f"{function.__module__}:{function.__qualname__}"
    if name.count(":") != 1 or "<" in name or name.startswith("__main__:"):
        raise ValueError(
            f"cannot start {name!r} on a rank; accepted: a function of an importable module"
        )
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    backend = backend or ("nccl" if device == "cuda" else "gloo")
    _check(nproc, device, backend)
    if not min(timeout_s, collective_timeout_s) > 0:
        raise ValueError(
            f"{timeout_s} s, {collective_timeout_s} s for a collective; accepted: more than 0"
        )
    group = dict(device=device, backend=backend, timeout_s=collective_timeout_s)
    call = dict(name=name, args=args, timeout_s=timeout_s, group=group)
    with guarded_folder(_environment()) as (folder, guard):
        (folder / "call").write_bytes(pickle.dumps(call))
        exits = _run(guard, folder / "exits", nproc, timeout_s)
        kinds = [_last_lines(folder / f"{rank}.done") for rank in range(nproc)]
        results = [_read_items(folder / f"{rank}.items") for rank in range(nproc)]
        finished = [items for items, _ in results]
        if exits is None:
            text = f"{name}: the process that guards the ranks was ended or stopped"
            raise RankError(text, None, finished)
        failed, stopped = exits
        if failed or not all(kinds):
            raise _failure(folder, name, timeout_s, dict(failed), stopped, finished)
    for rank, (_, problem) in enumerate(results):
        if problem:
            text = f"{name}: what rank {rank} returned cannot be read here\n{problem}"
            raise RankError(text, rank, finished)
    pairs = zip(finished, kinds, strict=True)
    return [items if kind == "generator" else items[0] for items, kind in pairs]


def rank_device() -> torch.device:
    """Returns the device of this rank; on CUDA it is also the current device."""
    if _device_type == "cuda" or (not _device_type and torch.cuda.is_available()):
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


def _check(nproc: int, device: str, backend: str) -> None:
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    if device not in devices:
        raise ValueError(f"device {device!r}; accepted here: {', '.join(devices)}")
    backends = ["gloo"] if device == "cpu" else ["gloo", "nccl"]
    if backend not in backends:
        raise ValueError(f"backend {backend!r} on {device}; accepted: {', '.join(backends)}")
    most = torch.cuda.device_count() if backend == "nccl" else math.inf
    if not 1 <= nproc <= most:
        accepted = "1 and more" if most == math.inf else f"1 to {most} (GPUs)"
        raise ValueError(f"{nproc} ranks with {backend}; accepted: {accepted}")


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


def _run(
    guard: subprocess.Popen, report: Path, nproc: int, timeout_s: float
) -> tuple[list, list[int]] | None:
    """Returns (rank, exit code) of the ranks that failed first and which were stopped; None if the
    guard ended.
    """
    request = {"num_ranks": nproc, "timeout_s": timeout_s + GRACE_S / 2}
    with contextlib.suppress(BrokenPipeError):
        print(json.dumps(request), file=guard.stdin, flush=True)
    deadline = time.monotonic() + timeout_s + GRACE_S
    while not report.exists() and guard.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    return json.loads(report.read_text()) if report.exists() else None


def run_rank(folder: Path) -> None:
    """Is a rank that the guard has started: writes what the function gives, and `done` or `error`,
    into the folder.
    """
    rank = int(os.environ["RANK"])
    try:
        call = pickle.loads((folder / "call").read_bytes())
        faulthandler.dump_traceback_later(call["timeout_s"], exit=True)
        module, name = call["name"].split(":")
        function = getattr(importlib.import_module(module), name)
        _init_process_group(folder / "store", rank, **call["group"])
        result = function(*call["args"])
        is_generator = inspect.isgenerator(result)
        with open(folder / f"{rank}.items", "wb") as file:
            for item in result if is_generator else [result]:
                pickle.dump(item, file)
                file.flush()
        dist.destroy_process_group()
        (folder / f"{rank}.done").write_text("generator" if is_generator else "value")
    except BaseException:
        error = json.dumps([time.time_ns(), traceback.format_exc()])
        write_text_atomic(folder / f"{rank}.error", error)
        # At once: destructors of a process group can wait for ranks that are gone.
        os._exit(1)


def _init_process_group(path: Path, rank: int, device: str, backend: str, timeout_s: float) -> None:
    global _device_type
    _device_type = device
    world_size, device_id = int(os.environ["WORLD_SIZE"]), None
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    if backend == "nccl":
        device_id = rank_device()
    timeout = datetime.timedelta(seconds=timeout_s)
    store = dist.FileStore(str(path), world_size)
    store.set_timeout(timeout)
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        device_id=device_id,
    )


def _read_items(path: Path) -> tuple[list[Any], str]:
    """Returns a rank's items, and why what follows them cannot be read, "" at the end of what it
    wrote.
    """
    items: list[Any] = []
    try:
        with open(path, "rb") as file:
            while True:
                items.append(pickle.load(file))
    except (FileNotFoundError, EOFError):
        return items, ""
    except Exception as error:  # of a class that is not there, or that raises
        return items, f"{type(error).__name__}: {error}"


def _last_lines(path: Path, num_lines: int = 20) -> str:
    """Returns the last lines of a file, "" without one."""
    if not path.exists():
        return ""
    return "\n".join(path.read_text(errors="replace").splitlines()[-num_lines:])


def _failure(
    folder: Path,
    name: str,
    timeout_s: float,
    failed: dict[int, int],
    stopped: list[int],
    finished: list[list[Any]],
) -> RankError:
    errors = {int(path.stem): json.loads(path.read_text()) for path in folder.glob("*.error")}
    # A rank that died without a word took its peers along, and their errors say so.
    silent = [rank for rank in failed if rank not in errors]
    first = [*silent, *sorted(errors, key=errors.get), *stopped, 0][0]
    log, code = folder / f"{first}.stderr", failed.get(first)
    text = _last_lines(log, 40)
    if first in errors:
        how, text = "exit status 1", errors[first][1]
    elif code is None:
        how = f"no end in {timeout_s:g} s"
    elif code < 0:
        names = {number.value: number.name for number in signal.Signals}
        how = f"killed by {names.get(-code, f'signal {-code}')}"
    else:
        how = f"exit status {code}" if code else "exit status 0, before it was done"
    how += "".join(f"; rank {rank} was stopped" for rank in stopped)
    if watchdog := re.search(r"Watchdog caught .*", _last_lines(log, 1000)):
        text += f"\n{watchdog[0]}"
    for rank in range(len(finished)):
        where = _last_lines(folder / f"{rank}.stderr")
        if where and rank != first:
            text += f"\nrank {rank} was at:\n{where}"
    message = f"{name}: rank {first} of {len(finished)} failed first ({how})\n{text}"
    return RankError(message, first, finished)
