"""Training on gloo ranks against one process, and bad input: see parallel_ranks.py."""

import parallel_ranks
import pytest
from conftest import more

from labkit.parallel.launch import RankError, launch

CHECKS = [name for name in vars(parallel_ranks) if name.startswith("check_")]


@pytest.fixture(scope="module", params=[2, *more(4)])
def launched(request):
    """Which checks each rank has passed, and the error of the one that came next."""
    try:
        ranks = launch(parallel_ranks.run, request.param, CHECKS, device="cpu")
        return ranks, None
    except RankError as error:
        return error.finished, error


@pytest.mark.parametrize("check", CHECKS)
def test_on_ranks(check, launched):
    ranks, error = launched
    if not all(check in passed for passed in ranks):
        raise error
