"""Derivatives of every differentiable operation of labkit.kernels beyond the first gradient: right,
or refused.

A gradient that has lost its graph trains nothing and says nothing. So each operation is tried, its
kernels in a worker process where they are interpreted, its plain path here, and what is asked for
is what PyTorch computes of the formula in fp64, or an error: a gradient penalty, also where a mode
looks at operators and through torch.func.
"""

import re
from collections.abc import Callable

import pytest
import torch
from conftest import ALL_TESTS
from kernel_operations import OPERATIONS, draw, outputs_of
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

REFUSED = re.compile(
    "has no second derivative"
    "|must override the setup_context staticmethod"  # PyTorch's line about torch.func
    "|no autograd formula was registered"
)
DTYPES = {"kernel": torch.float32, "plain": torch.float64}
# Operations made of others that are tested alone.
SLOW = ("gelu_mlp of a norm", "layer_norm of a sum", "rms_norm of a sum")
QUICK_KERNELS = [name for name in OPERATIONS if ALL_TESTS or name not in SLOW]


class Looking(TorchDispatchMode):
    """Sees every operator and runs it."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def loss_of(function: Callable, tensors) -> Tensor:
    return sum(x.square().sum() for x in outputs_of(function, tensors))


def sum_of(function: Callable, tensors) -> Tensor:
    return sum(x.sum() for x in outputs_of(function, tensors))


def penalty(function: Callable, tensors: list[Tensor]) -> list[Tensor]:
    """Returns the gradients, by all other inputs or the only one, of a loss with the gradient by
    the first in it.
    """
    (slope,) = torch.autograd.grad(sum_of(function, tensors), tensors[0], create_graph=True)
    loss = loss_of(function, tensors) + slope.square().sum()
    others = tensors[1:] or tensors
    return list(torch.autograd.grad(loss, others, allow_unused=True, materialize_grads=True))


def penalty_in_a_mode(function: Callable, tensors: list[Tensor]) -> list[Tensor]:
    with Looking():
        return penalty(function, tensors)


def transformed_penalty(function: Callable, tensors: list[Tensor]) -> list[Tensor]:
    def loss(*arguments):
        slope = torch.func.grad(lambda *inner: sum_of(function, inner))(*arguments)
        return loss_of(function, arguments) + slope.square().sum()

    others = tuple(range(1, len(tensors))) or (0,)
    return list(torch.func.grad(loss, others)(*(x.detach() for x in tensors)))


def attempt(name: str, path: str) -> dict[str, int]:
    """Asserts that all attempts at an operation's second derivatives are right or refused; returns
    how many are.
    """
    outcomes = {"right": 0, "refused": 0}
    for function in (penalty, penalty_in_a_mode, transformed_penalty):
        expected = function(OPERATIONS[name].formula, draw(name, torch.float64))
        try:
            gradients = function(OPERATIONS[name].ours, draw(name, DTYPES[path]))
        except RuntimeError as error:
            assert REFUSED.search(str(error)), error
            outcomes["refused"] += 1
            continue
        tolerance = 1e-3 if path == "kernel" else 1e-9
        for ours, right in zip(gradients, expected, strict=True):
            torch.testing.assert_close(ours.double(), right, rtol=tolerance, atol=tolerance)
        outcomes["right"] += 1
    return outcomes


@pytest.mark.parametrize("name", QUICK_KERNELS)
def test_a_kernels_second_derivatives_are_right_or_refused(name, interpreted):
    # The rotation is linear: its second derivatives here are those of the loss.
    assert interpreted(attempt, name, "kernel")["refused"] or name == "rotary"


@pytest.mark.parametrize("name", sorted(OPERATIONS.keys() - {"weighted_sum"}))
def test_a_plain_paths_second_derivatives_are_right_or_refused(name):
    is_formula = not re.search("norm_linear|mlp|[fF]lash", name)
    assert (attempt(name, "plain")["refused"] == 0) == is_formula
