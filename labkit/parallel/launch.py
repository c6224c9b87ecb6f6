"""Runs a module-level function on N ranks of this machine and gathers what each rank returns.

`torchrun`'s elastic launcher starts the ranks in a process of its own, so that a notebook keeps its signal handlers and
can end everything at a deadline.
"""

import contextlib
import ctypes
import datetime
import faulthandler
import importlib
import inspect
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

GRACE_S = 30
"""After the deadline ranks end themselves; this much later the launcher and all of them are killed."""


class RankError(RuntimeError):
    """A rank failed. The message holds the first failing rank's traceback and where the others were.

    Fields:
        rank: the first rank that failed, None where no rank started.
        summary: one line, with the last one of its message that is no stack frame.
        finished: for each rank, what its function had yielded before the end.
    """

    def __init__(self, message: str, rank: int | None, finished: list[list[Any]]):
        super().__init__(message)
        self.rank, self.finished = rank, finished
        lines = message.split("\nrank ")[0].splitlines()
        lines = [line for line in lines if line.strip() and not re.match(r'\s*(File "|Thread 0x|frame #|#\d)', line)]
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

    The ranks share an initialised process group; `rank_device()` is the device of each. Where `function` is a
    generator, a rank's result is the list of what it yielded, and what was yielded before a failure is kept.

    Args:
        function: module-level function, or its name as "module:function". Arguments and results are pickled.
        nproc: number of ranks.
        device: "cuda" or "cpu"; CUDA where there is a GPU. With gloo, ranks may share a GPU.
        backend: "nccl" or "gloo"; NCCL for CUDA and gloo for the CPU.
        timeout_s: seconds for everything; collective_timeout_s: seconds for one collective.

    Raises:
        ValueError: a function that cannot be named, an unknown device or backend, NCCL without one GPU a rank.
        RankError: a rank raised, died, or did not end in time. No process outlives the call.
    """
    name = function if isinstance(function, str) else f"{function.__module__}:{function.__qualname__}"
    if name.count(":") != 1 or "<" in name or name.startswith("__main__:"):
        raise ValueError(f"cannot start {name!r} on a rank; accepted: a function of an importable module")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    backend = backend or ("nccl" if device == "cuda" else "gloo")
    _check(nproc, device, backend)
    call = dict(name=name, args=args, device=device, backend=backend)
    call |= dict(timeout_s=timeout_s, collective_timeout_s=collective_timeout_s)
    with tempfile.TemporaryDirectory(prefix="labkit-ranks-") as directory:
        folder = Path(directory)
        (folder / "call").write_bytes(pickle.dumps(call))
        status = _wait_for_agent(folder, nproc, timeout_s)
        results = [_read_items(folder / f"{rank}.items") for rank in range(nproc)]
        if status != 0 or not all(done for _, done in results):
            raise _failure(folder, nproc, name, timeout_s, [items for items, _ in results])
    return [items if done == "generator" else items[0] for items, done in results]


def rank_device() -> torch.device:
    """Returns the device of this rank; on CUDA it is also the current device."""
    device_type = _device_type or ("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device("cuda", torch.cuda.current_device()) if device_type == "cuda" else torch.device("cpu")


def moment() -> Any:
    """Returns a point in this rank's time: an event of the current stream, without CUDA the seconds of the clock."""
    if rank_device().type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


# Asked for at first use: a process that has asked for GPUs when this module was imported could not fork.
_device_type = ""


def _check(nproc: int, device: str, backend: str) -> None:
    if device not in ("cpu", "cuda") or (device == "cuda" and not torch.cuda.is_available()):
        raise ValueError(f"device {device!r}; accepted here: {'cpu, cuda' if torch.cuda.is_available() else 'cpu'}")
    if backend not in ("gloo", "nccl") or (backend, device) == ("nccl", "cpu"):
        raise ValueError(f"backend {backend!r} on {device}; accepted: {'gloo' if device == 'cpu' else 'gloo, nccl'}")
    most = torch.cuda.device_count() if backend == "nccl" else None
    if nproc < 1 or (most is not None and nproc > most):
        raise ValueError(f"{nproc} ranks with {backend}; accepted: 1 {f'to {most} (GPUs)' if most else 'and more'}")


def _wait_for_agent(folder: Path, nproc: int, timeout_s: float) -> int | None:
    """Returns the launcher's exit status, None where it had to be killed."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    # Before NCCL's watchdog ends a rank that hangs, it waits four times this long, a minute if left alone.
    environment = {"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "500", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0", **environment}
    environment = {"OMP_NUM_THREADS": "1", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "5", **environment}
    command = [sys.executable, "-m", __spec__.name, "--agent", str(folder), str(nproc)]
    with open(folder / "agent", "wb") as log:
        agent = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stderr=log)
        try:
            return agent.wait(timeout_s + GRACE_S)
        except subprocess.TimeoutExpired:
            return None
        finally:
            # Asked to end, the launcher ends its ranks; killed, it takes them along (`_die_with_parent`).
            for end in (agent.terminate, agent.kill):
                if agent.poll() is None:
                    end()
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        agent.wait(10)


def _run_agent(folder: Path, nproc: int) -> int:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    _die_with_parent(signal.SIGTERM)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        monitor_interval=0.05,
        logs_specs=DefaultLogsSpecs(log_dir=str(folder / "logs")),
    )
    try:
        elastic_launch(config, sys.executable)("-u", "-m", __spec__.name, "--rank", str(folder))
    except ChildFailedError as error:
        exits = {rank: failure.exitcode for rank, failure in error.failures.items()}
        (folder / "exits").write_text(json.dumps(exits))
        return 1
    return 0


def _run_rank(folder: Path) -> None:
    _die_with_parent(signal.SIGKILL)
    rank = os.environ["RANK"]
    with open(folder / f"{rank}.stderr", "wb") as log:
        os.dup2(log.fileno(), 2)
    call = pickle.loads((folder / "call").read_bytes())
    # Written without the interpreter's help, so a rank that hangs in a collective also says where it stands.
    faulthandler.enable()
    faulthandler.register(signal.SIGTERM, chain=True)
    faulthandler.dump_traceback_later(call["timeout_s"], exit=True)
    try:
        with open(folder / f"{rank}.items", "wb") as file:
            for item in _results(call):
                pickle.dump(item, file)
                file.flush()
    except BaseException:
        (folder / f"{rank}.error").write_text(json.dumps([time.time_ns(), traceback.format_exc()]))
        # At once: destructors of a process group can wait for ranks that are gone.
        os._exit(1)


def _results(call: dict[str, Any]) -> Iterator[Any]:
    """Yields what the function yields or returns, and last which of the two it was."""
    module, name = call["name"].split(":")
    function = getattr(importlib.import_module(module), name)
    with _process_group(call["device"], call["backend"], call["collective_timeout_s"]):
        result = function(*call["args"])
        if inspect.isgenerator(result):
            yield from result
        else:
            yield result
    yield _Done("generator" if inspect.isgenerator(result) else "value")


class _Done(str):
    """Marks the end of a rank's results, so that what was cut off is told from what ended."""


@contextlib.contextmanager
def _process_group(device: str, backend: str, timeout_s: float) -> Iterator[None]:
    global _device_type
    _device_type = device
    index = None
    if device == "cuda":
        index = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(index)
    timeout = datetime.timedelta(seconds=timeout_s)
    dist.init_process_group(backend, timeout=timeout, device_id=index if backend == "nccl" else None)
    yield
    dist.destroy_process_group()


def _die_with_parent(with_signal: int) -> None:
    """Has the kernel send this process a signal when its parent ends, however that ended. Linux only."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, int(with_signal))


def _read_items(path: Path) -> tuple[list[Any], str]:
    """Returns a rank's items and how it ended: "generator", "value", or "" where it did not."""
    items: list[Any] = []
    with contextlib.suppress(FileNotFoundError, EOFError, pickle.UnpicklingError), open(path, "rb") as file:
        while True:
            items.append(pickle.load(file))
    if items and isinstance(items[-1], _Done):
        return items[:-1], str(items[-1])
    return items, ""


def _failure(folder: Path, nproc: int, name: str, timeout_s: float, finished: list[list[Any]]) -> RankError:
    def tail(path: Path, lines: int = 20) -> str:
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:]) if path.exists() else ""

    exits = json.loads((folder / "exits").read_text()) if (folder / "exits").exists() else {}
    exits = {int(rank): code for rank, code in exits.items()}
    errors = {int(path.stem): json.loads(path.read_text()) for path in folder.glob("*.error")}
    # A rank that died without a word took its peers along, and their errors say so. SIGTERM is what the launcher sends.
    silent = [rank for rank, code in exits.items() if rank not in errors and code != -signal.SIGTERM]
    by_time = sorted(errors, key=lambda rank: errors[rank][0])
    first = next(iter([*sorted(silent), *by_time, *sorted(exits)]), None)
    if first is None:
        return RankError(f"{name}: no rank of {nproc} ended in {timeout_s} s\n{tail(folder / 'agent')}", None, finished)
    code = exits.get(first, 1)
    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
    said = errors[first][1] if first in errors else tail(folder / f"{first}.stderr", 40)
    if watchdog := re.search(r"Watchdog caught .*", tail(folder / f"{first}.stderr", 1000)):
        said += f"\n{watchdog[0]}"
    others = [(rank, tail(folder / f"{rank}.stderr")) for rank in range(nproc) if rank != first]
    where = "".join(f"\nrank {rank} was at:\n{text}" for rank, text in others if text)
    return RankError(f"{name}: rank {first} of {nproc} failed first ({how})\n{said}{where}", first, finished)


def main() -> None:
    """Is the launcher, or a rank that it started: `--agent FOLDER NPROC`, `--rank FOLDER`."""
    if sys.argv[1] == "--agent":
        sys.exit(_run_agent(Path(sys.argv[2]), int(sys.argv[3])))
    _run_rank(Path(sys.argv[2]))


if __name__ == "__main__":
    # Under its importable name, so that what is pickled here is found there.
    importlib.import_module(__spec__.name).main()
