"""Fixtures that several test files share."""

import atexit
import concurrent.futures
import functools
import gc
import importlib.metadata
import multiprocessing.forkserver
import os
import sys
import tempfile
import types
from collections import Counter
from dataclasses import replace
from unittest import mock

import pytest

# Before torch is imported, here or in any process that a test starts. Several files are tested at a
# time, and threads that wait for one another on cores that others use wait many times longer than
# one thread works.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# As in the processes that measure: the compiler tries no instruction sets first.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

# What is imported until the first test stays.
gc.disable()

# Tests that measure side by side do not wait for one another, nor for a run of the user's.
LOCKS = tempfile.TemporaryDirectory(prefix="labkit-tests-")
os.environ["XDG_RUNTIME_DIR"] = LOCKS.name

ALL_TESTS = False
"""Whether every variant is tested: `pytest -m all`, before a release and where kernels change."""


def pytest_configure(config):
    global ALL_TESTS
    ALL_TESTS = config.option.markexpr == "all"
    if getattr(config.option, "numprocesses", None) and config.option.markexpr != "gpu":
        # A file, and so a notebook, stays in one process, with what it has measured.
        config.option.dist = "loadfile"
        config.option.loadscopereorder = False
    if getattr(config.option, "nbval", False):
        config.option.nbval_current_env = True
        config.option.nbval_cell_timeout = 120


def more(*cases):
    """Returns the cases with `-m all`, else none: of each branch that they take another is kept."""
    return cases if ALL_TESTS else ()


def off_boundary(x):
    """Returns a dense copy of a tensor that starts an element past a 16-byte boundary."""
    return x.new_empty(x.numel() + 1)[1:].view(x.shape).copy_(x)


LONGEST_FIRST = (
    "test_sweep.py",
    "test_report.py",
    "test_flash_attention_notebook.py",
    "07_distributed.ipynb",
    "test_parallel.py",
    "test_flash_attention.py",
    "test_nsys_analysis.py",
    "test_distributed.py",
    "test_siglip2.py",
    "test_bench.py",
    "test_benchmarking.py",
    "test_fused_kernels.py",
    "test_missing_records.py",
    "test_new_chapter.py",
    "test_notebooks.py",
    "test_memory.py",
    "test_transformer.py",
)
"""Files of twenty seconds and more. One of them begun late would keep one core at work and leave
the others idle.
"""

SCATTERED_LAST = "test_kernel_compilation.py"
"""Minutes of compiling in tests that share nothing: each goes to whichever process is free, after
all else is begun.
"""


def only_shows_records(item) -> bool:
    """Whether it is a notebook's cell that does nothing else.

    test_report makes all that they show anew, and test_notebooks compares it with what the
    notebooks hold.
    """
    if not hasattr(item, "cell"):
        return False
    tags = set(item.cell.metadata.get("tags", []))
    # A lesson's answer in facts or figures rests on records that the cells before it read.
    return not {"remove_cell", "parameters"} & tags and (
        "lesson" not in tags or "chapter." in item.cell.source
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    if ALL_TESTS:
        for item in items:
            item.add_marker("all")
    else:
        config.hook.pytest_deselected(items=[item for item in items if only_shows_records(item)])
        items[:] = [item for item in items if not only_shows_records(item)]
    order = {name: position for position, name in enumerate(LONGEST_FIRST)} | {
        SCATTERED_LAST: len(LONGEST_FIRST) + 1
    }
    items.sort(key=lambda item: order.get(item.path.name, len(LONGEST_FIRST)))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Skips a test marked `gpu` without a GPU, without one of the `capability` that the mark asks
    for, or, where it compares times (`alone`), beside other tests.
    """
    if marker := item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA GPU")
        found = torch.cuda.get_device_capability()
        asked = marker.kwargs.get("capability", found)
        if found != asked:
            pytest.skip(f"needs a GPU of compute capability {asked}")
        if marker.kwargs.get("alone") and "PYTEST_XDIST_WORKER" in os.environ:
            pytest.skip("needs the GPU alone: without -n")


def pytest_terminal_summary(terminalreporter):
    """Says why cases were skipped, the most frequent reason first."""
    reports = terminalreporter.stats.get("skipped", [])
    reasons = Counter(str(report.longrepr[2]).removeprefix("Skipped: ") for report in reports)
    for reason, number in reasons.most_common():
        terminalreporter.write_line(f"{number} skipped: {reason}")


@atexit.register
def _end_without_tritons_leaks():
    """Closes stderr to what Triton's extension says while the interpreter ends, as Triton's own
    workers do.

    Compiling a Gluon kernel leaks references inside Triton 3.9, which its binding library,
    nanobind, then lists.
    """
    if "triton._C.libtriton" in sys.modules:
        sys.stderr.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return nodeid if SCATTERED_LAST in nodeid else super()._split_scope(nodeid)

    return Scheduling(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.fixture(scope="module", autouse=True)
def what_came_before_is_no_garbage():
    """Spares each of the collections that go with a measurement the walk through all that is
    imported and kept.

    Anew for each file: the files import more, and some of what they measure thaws everything when
    it ends.
    """
    gc.enable()
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def patch_the_language_once() -> None:
    """Halves the time of Triton's interpreter, which replaces all of its language again at every
    call of a function, and makes its table of types again for every tensor.

    Called inside a kernel, a function finds the language replaced already.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    patch = interpreter._patch_lang

    def patch_once(function):
        languages = [
            value for value in function.__globals__.values() if value is tl or value is tl.core
        ]
        if any(tl.core.is_builtin(language.load) for language in languages):
            return patch(function)
        return types.SimpleNamespace(restore=lambda: None)

    interpreter._patch_lang = patch_once
    for kind in (tl.block_type, tl.pointer_type):
        kind.__hash__ = tl.dtype.__hash__
    interpreter._get_np_dtype = functools.cache(interpreter._get_np_dtype)


def is_interpreted() -> bool:
    from labkit.kernels import fused

    gc.freeze()
    gc.enable()
    return fused.IS_INTERPRETED


@pytest.fixture(scope="session")
def interpreted():
    """Calls a function in a process whose kernels are interpreted, one for all files."""
    versions = [
        tuple(map(int, importlib.metadata.version(name).split(".")[:2]))
        for name in ("triton", "numpy")
    ]
    if versions[0] < (3, 7) and versions[1] >= (2, 4):
        pytest.skip("Triton before 3.7 interprets no kernel with NumPy 2.4 or newer")
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(
        max_workers=1, mp_context=context, initializer=patch_the_language_once
    ) as pool:
        # Started while the variable is set; the tests of this process never see it.
        with mock.patch.dict(os.environ, TRITON_INTERPRET="1"):
            assert pool.submit(is_interpreted).result(timeout=120)
        yield lambda function, *arguments: pool.submit(function, *arguments).result(timeout=240)


@pytest.fixture(scope="session")
def plain_workers():
    """Has workers of sessions in this process begin with torch alone, which tells an out-of-memory
    from another error, without the chapters and the compiler.
    """
    multiprocessing.set_forkserver_preload(["torch", "labkit.experiments.sweep"])
    multiprocessing.forkserver.ensure_running()


@pytest.fixture
def on_a_cpu(request, monkeypatch):
    """What runs meanwhile is measured on the CPU by one thread, and what it sets for the process is
    set back; a test marked `gpu` keeps its device.

    One thread, since threads that wait for one another on a busy machine wait long.
    """
    import torch

    if "gpu" not in request.keywords:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr("labkit.device.cpu_name", lambda: "a processor")
    precision, num_threads = torch.get_float32_matmul_precision(), torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)
    torch.set_float32_matmul_precision(precision)


@pytest.fixture
def briefly_on_a_cpu(monkeypatch, on_a_cpu):
    """The smoke profile's times are shorter still."""
    from labkit.configs import GRIDS

    grids = GRIDS["01_benchmarking"]
    monkeypatch.setitem(grids, "smoke", replace(grids["smoke"], time_limit_s=0.02))
