"""The sharded optimizer on two gloo ranks beside the unsharded one, through whatever happens
between steps.
"""

import re

import pytest
from sharded_optimizer_ranks import CASES

from labkit.parallel.launch import launch


@pytest.fixture(scope="module")
def ranks():
    return [
        dict(results)
        for results in launch("sharded_optimizer_ranks:found", 2, device="cpu", timeout_s=240)
    ]


def test_a_layer_frozen_with_a_gradient_stays_the_same_on_all_ranks(ranks):
    for found in ranks:
        assert found["frozen"] == [False] * 4


@pytest.mark.parametrize("name", [*(case[0] for case in CASES), "counts in its group"])
def test_it_trains_as_the_unsharded_bit_for_bit(ranks, name):
    for found in ranks:
        assert found[name] == []


def test_hooks_are_called_as_pytorchs(ranks):
    for found in ranks:
        assert found["hooks"] == ["step", "stepped", "ShardedOptimizer", [0, 1, 2, 3], 0, 1]


def test_what_cannot_be_sharded_is_refused_on_every_rank(ranks):
    for found in ranks:
        assert re.search("LBFGS calls its closure itself; accepted: ", found["LBFGS"])
        assert "ordered collections" in found["set"]
        shape, number, fitting = found["other shapes"]
        assert re.search(
            r"rank 1 has a parameter of \(3, 4\), .*rank 0 has, a parameter of \(5,\), ", shape
        )
        assert re.search(r"rank 1 has a parameter of \(3, 4\), .*rank 0 has, None", number)
        assert fitting == ""


def test_masters_pass_through_the_full_state_unrounded(ranks):
    for found in ranks:
        assert found["masters"]
