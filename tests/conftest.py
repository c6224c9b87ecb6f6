"""Fixtures that several test files share."""

import concurrent.futures
import multiprocessing
import os

import pytest


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
