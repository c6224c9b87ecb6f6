"""Fixtures that several test files share."""

import concurrent.futures
import gc
import multiprocessing
import os

import pytest

# Before torch is imported, here or in any process that a test starts. Two files are tested at a time, and threads that
# wait for one another on cores that others use wait many times longer than one thread works.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session", autouse=True)
def imports_are_no_garbage():
    """Spares each of the collections that go with a measurement the walk through everything imported."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="module")
def interpreted(request):
    """Calls a function of the requesting module in a process whose kernels are interpreted.

    The module's `is_interpreted` says, in that process, whether its kernels really are.
    """
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(max_workers=1, mp_context=context) as pool:
        try:
            # Started while the variable is set; the tests of this process never see it.
            assert pool.submit(request.module.is_interpreted).result(timeout=120)
        finally:
            os.environ.pop("TRITON_INTERPRET")
            if before is not None:
                os.environ["TRITON_INTERPRET"] = before
        yield lambda function, *arguments: pool.submit(function, *arguments).result(timeout=240)
