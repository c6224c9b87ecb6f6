"""Runs a module-level function on N ranks and gathers what each rank yields.

The ranks are of this machine, or of several nodes that share them evenly: node 0 leads, see `lead`,
the others `follow` it and start what it launches. Those of a node are forked from one process,
which imports torch once for them and touches no device.

A guard (`labkit.guard`) sees to it that no rank outlives the call, however that ends (on Linux;
elsewhere a rank ends itself when its time is over). They find one another through a file, and
connect over the loopback interface alone: what a rank is sent, it unpickles. Nodes meet at a port
of node 0, so whoever reaches that must be trusted.
"""

import contextlib
import datetime
import faulthandler
import itertools
import json
import multiprocessing
import os
import pickle
import pkgutil
import re
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from labkit.configs import RequestError
from labkit.device import NODES, num_gpus, num_nodes, num_usable_cores
from labkit.guard import guarded_folder
from labkit.records import write_text_atomic

GRACE_S = 15
"""Seconds beyond the ranks' own. They end themselves when their time is over, and are ended after
these; after twice these the process that forks them is ended, which bounds its imports too.
"""

ENDING_S = 5
"""How long ranks have to end after SIGTERM."""

DONE = 80
"""Exit code of a rank that is done: one that a library ends in the middle has code 0 too."""

PARENT = """\
import gc
from pathlib import PosixPath

gc.disable()  # what is imported stays
import {}
from labkit.parallel.launch import fork_ranks

gc.freeze()
gc.enable()
fork_ranks({!r}, {})
"""

CAUSE = r".*Watchdog caught .*|Timeout \(.*\)!|Fatal Python error: .*"
"""What NCCL's watchdog and faulthandler say of the end that they are to."""

LAUNCHES = "launches"
"""What counts them, in the store of several nodes."""


class RankError(RuntimeError):
    """A rank failed. The message holds the first failing rank's traceback and where the others
    were.

    Fields:
        summary: one line, with the last one of its message, unless that is of a stack.
        finished: for each rank, what its function had yielded before the end.
    """

    def __init__(self, message: str, finished: list[list[Any]]):
        super().__init__(message)
        self.finished = finished
        first, *others = message.split("\nrank ")[0].splitlines()
        last = others[-1] if others else ""
        self.summary = first if last.startswith(" ") else f"{first} {last}".strip()


def launch(
    function: Callable,
    nproc: int,
    *args: Any,
    device: str,
    timeout_s: float = 600,
    collective_timeout_s: float = 120,
) -> list[list[Any]]:
    """Returns the list of what `function(*args)` yielded on each of `nproc` ranks, in rank order.

    Every node has as many of them. They share an initialised process group; `rank_device()` is the
    device of each.

    Args:
        function: module-level generator. Arguments and what it yields are pickled.
        nproc: number of ranks.
        device: "cuda", a GPU a rank with NCCL, or "cpu", with gloo.
        timeout_s: seconds for everything after the ranks' imports; collective_timeout_s: seconds
            for one collective.

    Raises:
        ValueError: a function that cannot be named, an unknown device, fewer GPUs than ranks, or
            ranks that the nodes do not share evenly.
        RankError: a rank raised, died, or did not end in time. No process outlives the call.
    """
    name = f"{function.__module__}:{function.__qualname__}"
    if "<" in name or name.startswith("__main__:"):
        raise ValueError(
            f"cannot start {name!r} on a rank; accepted: a function of an importable module"
        )
    nodes = num_nodes()
    if device not in ("cpu", "cuda") or nproc < 1 or (device == "cuda" and nproc > num_gpus()):
        raise ValueError(
            f"{nproc} ranks on {device!r}; accepted: 1 and more on cpu, up to {num_gpus()} on cuda"
        )
    if nproc % nodes:
        raise ValueError(f"{nproc} ranks on {nodes} nodes; accepted: as many on each")
    number = 0
    if nodes > 1:
        store = _joined(datetime.timedelta(seconds=timeout_s + 2 * GRACE_S))
        number = store.add(LAUNCHES, 1)
    call = Call(name, pickle.dumps(args), device, timeout_s, collective_timeout_s, nproc, number)
    if nodes > 1:
        store.set(f"call {number}", pickle.dumps(call))
    replies = [_run(call, 0)]
    for node in range(1, nodes):
        try:
            replies.append(pickle.loads(store.get(f"reply {number} {node}")))
        except dist.DistError:
            replies.append((f"node {node}: no answer", [[]] * (nproc // nodes)))
    finished = [items for _, node_items in replies for items in node_items]
    failures = [text for text, _ in replies if text]
    if failures:
        raise RankError("\n".join(failures), finished)
    return finished


@dataclass(frozen=True)
class Call:
    """What `launch` was called with; its number, from 1 on, 0 where one node takes part."""

    name: str
    args: bytes
    device: str
    timeout_s: float
    collective_timeout_s: float
    nproc: int
    number: int

    @property
    def num_local(self) -> int:
        """How many of the ranks a node has."""
        return self.nproc // num_nodes()


def lead(nodes: int, address: str, port: int) -> dist.TCPStore:
    """Makes this machine node 0 of `nodes`: while the store that it returns is there, this process
    and what it starts launch on all of them.

    Raises RequestError for a port in use and, after up to ten minutes, an address of another
    machine.
    """
    os.environ[NODES] = f"{nodes} {address} {port}"
    try:
        return dist.TCPStore(address, port, is_master=True, wait_for_workers=False)
    except dist.DistError:
        raise RequestError(
            f"{address}:{port} is in use, or another machine's; accepted: a free port of this one"
        ) from None


def follow(node: int, nodes: int, address: str, port: int) -> None:
    """Starts this node's ranks of whatever node 0 launches, until that ends."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's own waits until torch's waiting ends
    os.environ[NODES] = f"{nodes} {address} {port}"
    with contextlib.suppress(dist.DistError):  # node 0 has ended
        store = _joined()
        # From the newest on: node 0 waits for whoever comes late.
        for number in itertools.count(max(1, store.add(LAUNCHES, 0))):
            call = pickle.loads(store.get(f"call {number}"))
            store.set(f"reply {number} {node}", pickle.dumps(_run(call, node)))


def _joined(timeout: datetime.timedelta = datetime.timedelta(days=30)) -> dist.TCPStore:
    _, address, port = os.environ[NODES].split()
    return dist.TCPStore(address, int(port), timeout=timeout)


def _run(call: Call, node: int) -> tuple[str, list[list[Any]]]:
    """Returns the failure of this node's ranks, "" where there is none, and what they yielded; in
    files and failures they are numbered from 0.
    """
    with guarded_folder() as (folder, _):
        (folder / "call").write_bytes(pickle.dumps(call))
        environment = {
            "OMP_NUM_THREADS": "1",
            # Before NCCL's watchdog ends a rank that hangs, it waits four times this long, a minute
            # if left alone.
            "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "500",
            "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
            **os.environ,
            # A rank that never communicates must not leave while another still connects to it.
            "TORCH_DIST_INIT_BARRIER": "1",
            "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)),
            "LABKIT_RANKS": str(folder),
        }
        if num_nodes() == 1:  # sockets that other machines do not reach
            environment.setdefault("NCCL_SOCKET_IFNAME", "lo")
            environment["GLOO_SOCKET_IFNAME"] = "lo"
        modules = "torch"  # other modules than labkit's may touch a device
        if call.name.startswith("labkit.experiments."):  # whose ranks make optimizers
            modules = f"torch._dynamo, {call.name.partition(':')[0]}"
        program = PARENT.format(modules, folder, node * call.num_local)
        path = folder / "failure"
        # Where its time is over, or an interrupt ends it, the guard ends the ranks.
        with open(path, "wb") as log, contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(
                [sys.executable, "-P", "-u", "-c", program],
                env=environment,
                stdin=subprocess.DEVNULL,
                stderr=log,
                timeout=call.timeout_s + 2 * GRACE_S + ENDING_S,
            )
        finished = [_read_items(folder / f"{rank}.items") for rank in range(call.num_local)]
        failure = ""
        if path.exists():
            where = f"node {node}: {call.name}" if call.number else call.name
            failure = f"{where}: {path.read_text() or 'no answer'}"
    return failure, finished


def fork_ranks(folder: Path, first: int) -> None:
    """Is the process that forks this node's ranks. Waits until all are done, one has failed or
    their time is over, and ends those that still run; `failure` then says what failed, or is gone.
    """
    call = pickle.loads((folder / "call").read_bytes())
    fork = multiprocessing.get_context("fork").Process
    ranks = [
        fork(target=run_rank, args=(folder, call, local, first + local))
        for local in range(call.num_local)
    ]
    for rank in ranks:
        rank.start()
    deadline = time.monotonic() + call.timeout_s + GRACE_S
    while time.monotonic() < deadline:
        codes = [rank.exitcode for rank in ranks]
        failed = {rank: code for rank, code in enumerate(codes) if code not in (None, DONE)}
        if failed or None not in codes:
            break
        time.sleep(0.02)
    stopped = _ended(ranks)
    path = folder / "failure"
    if set(codes) == {DONE}:
        path.unlink()
    else:
        write_text_atomic(path, _failure(folder, call, failed, stopped))


def _ended(ranks: Sequence[multiprocessing.Process]) -> list[int]:
    """Ends the ranks that still run; returns which of them a signal had stopped."""
    running = [rank for rank in ranks if rank.is_alive()]
    stopped = [
        ranks.index(rank)
        for rank in running
        if os.WIFSTOPPED(os.waitpid(rank.pid, os.WNOHANG | os.WUNTRACED)[1])
    ]
    for rank in running:
        rank.terminate()
        os.kill(rank.pid, signal.SIGCONT)  # while it is stopped it cannot say where it stands
    deadline = time.monotonic() + ENDING_S
    for rank in running:
        rank.join(max(0, deadline - time.monotonic()))
        rank.kill()
        rank.join()
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


def run_rank(folder: Path, call: Call, local: int, rank: int) -> None:
    """Is a rank: writes what the function yields, and its `error`, into the folder.

    Args:
        local: its number on this node; rank: on all.
    """
    with open(folder / f"{local}.stderr", "ab") as log:
        os.dup2(log.fileno(), 2)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(local)}  # as torchrun has them
    # When it is ended it says on stderr where it stands, in a collective that hangs too.
    faulthandler.enable()
    faulthandler.register(signal.SIGTERM, chain=True)
    try:
        faulthandler.dump_traceback_later(call.timeout_s, exit=True)
        function = pkgutil.resolve_name(call.name)
        timeout = datetime.timedelta(seconds=call.collective_timeout_s)
        if call.number:
            store = dist.PrefixStore(f"ranks of {call.number}", _joined(timeout))
        else:
            store = dist.FileStore(str(folder / "store"), call.nproc)
        store.set_timeout(timeout)
        torch.set_num_threads(max(1, num_usable_cores() // call.num_local))
        device = None
        if call.device == "cuda":
            device = torch.device("cuda", local)
            torch.cuda.set_device(device)
        dist.init_process_group(
            "nccl" if device else "gloo",
            timeout=timeout,
            world_size=call.nproc,
            rank=rank,
            store=store,
            device_id=device,
        )
        with open(folder / f"{local}.items", "wb") as file:
            for item in function(*pickle.loads(call.args)):
                pickle.dump(item, file)
                file.flush()
        dist.destroy_process_group()
        os._exit(DONE)
    except BaseException:
        error = json.dumps([time.time_ns(), traceback.format_exc()])
        write_text_atomic(folder / f"{local}.error", error)
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


def _failure(folder: Path, call: Call, failed: dict[int, int], stopped: list[int]) -> str:
    """Returns what to say of a failure on this node, whose ranks are numbered from 0.

    Args:
        failed: exit codes of the ranks that ended first; stopped: ranks that a signal had stopped.
    """
    errors = {int(path.stem): json.loads(path.read_text()) for path in folder.glob("*.error")}
    logs = {
        int(path.stem): path.read_text(errors="replace").splitlines()
        for path in folder.glob("*.stderr")
    }
    # A rank that died without a word took its peers along, and their errors say so.
    silent = [rank for rank in failed if rank not in errors]
    first = [*silent, *sorted(errors, key=errors.get), *stopped, 0][0]
    code = failed.get(first)
    lines = logs.pop(first, [])
    causes = [line for line in lines if re.match(CAUSE, line)]
    text = "\n".join(lines[-40:])
    if first in errors:
        how = "exit status 1"
        text = errors[first][1]
    elif code is None or "Timeout (" in "".join(causes):  # which ends a rank by itself
        how = f"no end in {call.timeout_s:g} s"
    elif code < 0:
        how = f"killed by signal {-code}, {signal.strsignal(-code)}"
    else:
        how = f"exit status {code}" if code else "exit status 0, before it was done"
    how += "".join(f"; rank {rank} was stopped" for rank in stopped)
    parts = [f"rank {first} of {call.num_local} failed first ({how})", text, *causes[:1]]
    for rank, log in sorted(logs.items()):
        if log:
            parts += [f"rank {rank} was at:", *log[-20:]]
    return "\n".join(parts)
