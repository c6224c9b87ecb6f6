"""`labkit course`: a checkout of assignment 2 of Stanford's CS336, either edition, as it stands.

Its tests run in one process, up to one that crashes or hangs; the others go on in the next. What
its tests/adapters.py has filled in joins the contests of `bench`.
"""

import ast
import contextlib
import functools
import hashlib
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType

import pandas as pd
import torch
import torch.distributed as dist
from torch import Tensor, nn

from labkit import guard
from labkit.configs import RequestError
from labkit.experiments import course_adapters, course_tests
from labkit.experiments.bench import RIVALS, bench

CONTESTS = {
    "get_flashattention_autograd_function_pytorch": "attention",
    "get_flashattention_autograd_function_triton": "attention",
    "get_ddp": "data_parallel",
    "get_ddp_individual_parameters": "data_parallel",
    "get_ddp_bucketed": "data_parallel",
    "get_sharded_optimizer": "optimizer",
}
"""By adapter the operation that it is timed as."""

BASICS = "cs336-basics"
"""Folder of the package that the tests import."""

Outcome = dict
"""How a test, or a file of tests, ended: "test", "state" (passed, skipped, failed, timeout, crashed
or, where NotImplementedError is raised, missing), "seconds", "reason".
"""


# ---- tests ---------------------------------------------------------------------------------------


def run_tests(
    root: Path, timeout_s: float, tests: Sequence[str] | None = None
) -> Iterator[Outcome]:
    """Yields how the tests that are named, or all, ended, by the Python of .venv if there is one.

    They share a process; one that crashes or hangs ends it, and the others go on in the next.
    Raises RequestError for a folder without tests.
    """
    guard.move_temporary_files()
    files = sorted(f"tests/{path.name}" for path in root.glob("tests/test_*.py"))
    if not files:
        raise RequestError(
            f"no tests/test_*.py in {root}; accepted: a checkout of "
            "stanford-cs336/assignment2-systems"
        )
    left = list(tests or files)
    while left:
        yield from _run_pytest(root, timeout_s, left)


def run_ours(checkout: Path, timeout_s: float, tests: Sequence[str]) -> Iterator[Outcome]:
    """Yields how tests end with labkit's adapters, by this Python."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        shutil.copytree(checkout / "tests", root / "tests")
        shutil.copy(course_adapters.__file__, root / "tests/adapters.py")
        (root / BASICS).symlink_to(checkout / BASICS)
        yield from run_tests(root, timeout_s, tests)


def _run_pytest(root: Path, timeout_s: float, left: list[str]) -> Iterator[Outcome]:
    """Yields how files, or the tests of them, ended in one process, each of which is taken off
    `left`. The last one may have ended the process.
    """
    python = root / ".venv/bin/python"
    receiver, sender = multiprocessing.Pipe(duplex=False)
    command = [
        python if python.is_file() else sys.executable,
        "-P",
        course_tests.__file__,
        str(sender.fileno()),
        "--color=no",
        "--rootdir=.",
        "--tb=short",
        "--override-ini=addopts=",
        f"--override-ini=pythonpath=. {BASICS}",
        "--continue-on-collection-errors",
        # The last line of a crash is what it says, not a list of modules.
        "--capture=no",
        "-pno:faulthandler",
        *left,
    ]
    current = left[0]
    start = time.monotonic()

    def ended(state: str, text: str, prefix: str = "") -> Iterator[Outcome]:
        seconds = time.monotonic() - start
        state, reason = _ending(state, text)
        reason = f"{prefix}{reason}"[:200]
        # A file that cannot be imported may be here by its tests.
        tests = [test for test in left if f"{test}::".startswith(f"{current}::")]
        for test in tests or left[:1]:
            left.remove(test)
            yield {"test": test, "state": state, "seconds": seconds, "reason": reason}

    with (
        tempfile.TemporaryFile("w+", errors="replace") as log,
        subprocess.Popen(
            command,
            cwd=root,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            pass_fds=[sender.fileno()],
        ) as process,
    ):
        sender.close()
        try:
            while left and receiver.poll(timeout_s):
                node, state, text = receiver.recv()
                if state == "tests":
                    left[:] = text
                    continue
                current = node
                if state == "begins":
                    start = time.monotonic()
                else:
                    yield from ended(state, text)
            if left:
                yield from ended("timeout", "")
        except EOFError:
            code = process.wait(timeout_s)
            log.seek(0)
            yield from ended("crashed", log.read(), f"exit code {code}: ")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with its ranks


def _ending(state: str, text: str) -> tuple[str, str]:
    """Returns the state and the reason of a test by pytest's state and text."""
    lines = re.findall(r"^E +(.*\w\S*)", text, re.MULTILINE)
    if state == "skipped" or not lines:
        return state, text.strip().split("\n")[-1]
    # The last one is what a rank raised.
    named = [n for n, line in enumerate(lines) if re.match(r"[\w.]*(Error|Exception)\b", line)]
    first = named[-1] if named else 0
    reason = " ".join(lines[first:])
    if reason == "AssertionError":  # a rank's says no more than its line
        reason = f"{reason}: {lines[first - 1]}"
    return "missing" if reason == "NotImplementedError" else "failed", reason


# ---- adapters ------------------------------------------------------------------------------------


def adapters_of(checkout: Path) -> tuple[list[str], list[str]]:
    """Returns the adapters that join a contest, and those that only raise NotImplementedError.

    Raises RequestError where there is no tests/adapters.py, or it is not Python.
    """
    path = checkout / "tests/adapters.py"
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError) as error:
        raise RequestError(
            f"no adapters in {path}: {error}; accepted: a checkout of "
            "stanford-cs336/assignment2-systems"
        ) from None
    empty = [
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and ast.unparse(node.body[-1]).startswith("raise NotImplementedError")
        and ast.Return not in map(type, ast.walk(node))
    ]
    # Defined, imported or assigned.
    known = {getattr(node, "name", getattr(node, "id", "")) for node in ast.walk(tree)}
    return [name for name in CONTESTS if name in known.difference(empty)], empty


def contests(
    checkout: Path, names: Sequence[str], output: str, timeout_s: float
) -> Iterator[pd.DataFrame]:
    """Yields what `bench` returns of adapters of CONTESTS, an operation after another."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "course.py")
        file.write_text(entrants_source(checkout, names), encoding="utf-8")
        for op in RIVALS:
            functions = [f"{file}:{name}" for name in names if CONTESTS[name] == op]
            if functions:
                yield bench(*functions, op=op, output=output, timeout_s=timeout_s)


def entrants_source(checkout: Path, names: Sequence[str]) -> str:
    """Returns the file that `bench` loads and hashes: another one where a source differs."""
    digest = hashlib.sha256()
    for path in sorted(checkout.glob("[!.]*/**/*.py")):
        digest.update(path.read_bytes())
    libraries = [str(path) for path in checkout.glob(".venv/lib/python*/site-packages")]
    lines = [
        f"# {digest.hexdigest()}",
        "import sys",
        f"sys.path[:0] = {[str(checkout), str(checkout / BASICS)]}",
        f"sys.path += {libraries}  # for what this Python lacks",
        "from tests import adapters",
        "from labkit.experiments.assignment import entrant",
        *(f"{name} = entrant(adapters, {name!r})" for name in names),
    ]
    return "\n".join(lines)


def entrant(adapters: ModuleType, name: str) -> Callable:
    """Returns an adapter of CONTESTS as its contest calls it."""
    adapter = getattr(adapters, name)
    if CONTESTS[name] == "attention":
        return functools.partial(_attend, functools.cache(adapter))
    if CONTESTS[name] == "optimizer":
        return functools.partial(_on_one_rank, adapter)
    return functools.partial(_wrapped, adapters, name)


def _attend(function: Callable, q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    """Applies a Function of (batch, length, d)."""
    out = function().apply(*(x.flatten(0, 1) for x in (q, k, v)), causal)
    return out.unflatten(0, q.shape[:2])


def _on_one_rank(adapter: Callable, params: list, **options) -> torch.optim.Optimizer:
    if not dist.is_initialized():
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    return adapter(params, torch.optim.AdamW, **options)


def _wrapped(adapters: ModuleType, name: str, module: nn.Module) -> nn.Module:
    """Returns a module in a wrapper whose steps are functions beside it."""
    options = {"bucket_size_mb": 100} if name == "get_ddp_bucketed" else {}
    wrapped = getattr(adapters, name)(module, **options)
    # The functions may ask for an optimizer; the contest's own makes the steps.
    arguments = wrapped, torch.optim.SGD(wrapped.parameters(), lr=0)
    prefix = name.removeprefix("get_")
    begin = getattr(adapters, f"{prefix}_on_train_batch_start", None)
    finish = getattr(adapters, f"{prefix}_on_after_backward")
    outer = nn.Sequential(wrapped)  # the wrapper may have a method of the same name
    outer.finish_gradient_synchronization = functools.partial(finish, *arguments)
    if begin:
        outer.register_forward_pre_hook(lambda *_: begin(*arguments))
    return outer
