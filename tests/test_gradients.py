"""Derivatives of every differentiable operation of labkit.kernels beyond the first gradient: right,
or refused.

A gradient that has lost its graph trains nothing and says nothing. So each operation is tried, its
kernels in a worker process where they are interpreted, its plain path here, and what is asked for
is what PyTorch computes of the formula in fp64, or an error: a gradient penalty, a product with the
Hessian, also where a mode looks at operators and through torch.func; and tangents of forward mode.
"""

import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable

import pytest
import torch
from conftest import ALL_TESTS
from kernel_operations import OPERATIONS, cases, draw, outputs_of
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import labkit.kernels
from labkit.kernels import fused

# tests/test_attention_impls.py tries it, with a stand-in for its library.
ELSEWHERE = {"FlashAttention3Function"}
REFUSED = re.compile(
    "has no second derivative"
    "|must override the setup_context staticmethod"  # PyTorch's line about torch.func
    "|no autograd formula was registered"
)
DTYPES = {"kernel": torch.float32, "plain": torch.float64}
# Operations made of others that are tested alone.
SLOW = ("gelu_mlp of a norm", "layer_norm of a sum", "rms_norm of a sum", "FlashAttention")
SLOW += ("flash_attention_qkv",)
QUICK_KERNELS = [name for name in cases("kernel") if ALL_TESTS or name not in SLOW]


def is_interpreted() -> bool:
    return fused.IS_INTERPRETED


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


def hessian_product(function: Callable, tensors: list[Tensor]) -> list[Tensor]:
    slopes = torch.autograd.grad(loss_of(function, tensors), tensors, create_graph=True)
    product = sum((slope * x.detach()).sum() for slope, x in zip(slopes, tensors, strict=True))
    return list(torch.autograd.grad(product, tensors, allow_unused=True, materialize_grads=True))


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
    for function in (penalty, hessian_product, penalty_in_a_mode, transformed_penalty):
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
    assert interpreted(attempt, name, "kernel")["refused"]


@pytest.mark.parametrize("name", cases("plain"))
def test_a_plain_paths_second_derivatives_are_right_or_refused(name):
    is_formula = not re.search("norm_linear|mlp|[fF]lash", name)
    assert (attempt(name, "plain")["refused"] == 0) == is_formula


def first_gradient(name: str) -> None:
    """Asserts that torch.func differentiates once, or is refused."""
    tensors = draw(name, torch.float32)
    try:
        slope = torch.func.grad(lambda *inner: loss_of(OPERATIONS[name].ours, inner))(*tensors)
    except RuntimeError as error:
        assert REFUSED.search(str(error)), error
        return
    exact = draw(name, torch.float64)
    (right,) = torch.autograd.grad(loss_of(OPERATIONS[name].formula, exact), exact[:1])
    torch.testing.assert_close(slope.double(), right, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["layer_norm", "swiglu", "linear_cross_entropy", "dropout_linear"])
def test_torch_func_differentiates_a_kernel_once(name, interpreted):
    interpreted(first_gradient, name)


def nodes(path: str) -> set[str]:
    """Returns the names of the operators and autograd functions of ours in the graphs of all
    operations.
    """
    names = set()
    for name in cases(path):
        outputs = outputs_of(OPERATIONS[name].ours, draw(name, torch.float32))
        todo = [x.grad_fn for x in outputs]
        while todo:
            node = todo.pop()
            if isinstance(node, torch.autograd.function.BackwardCFunction):
                function = type(node)._forward_cls
                names.add(node.operator.name if function is fused._Direct else function.__name__)
            todo += [following for following, _ in node.next_functions if following is not None]
    return {name for name in names if not name.startswith("Generated")}


def test_no_differentiable_operation_is_forgotten(interpreted):
    existing = set()
    for module in pkgutil.walk_packages(labkit.kernels.__path__, "labkit.kernels."):
        for value in vars(importlib.import_module(module.name)).values():
            if isinstance(value, fused.Operator) and value.gradients:
                existing.add(value.name)
            elif inspect.isclass(value) and issubclass(value, torch.autograd.Function):
                is_ours = value.__module__.startswith("labkit.kernels")
                if is_ours and value.__module__ != fused.__name__:
                    existing.add(value.__name__)
    assert nodes("plain") | interpreted(nodes, "kernel") == existing - ELSEWHERE


def transformed_tangents(function: Callable, tensors: list[Tensor]) -> tuple[Tensor, ...]:
    return torch.func.jvp(
        lambda *inner: outputs_of(function, inner), tuple(tensors), tuple(tensors)
    )[1]


def dual_tangents(function: Callable, tensors: list[Tensor]) -> tuple[Tensor, ...]:
    with forward_ad.dual_level():
        outputs = outputs_of(function, [forward_ad.make_dual(x, x) for x in tensors])
        return tuple(forward_ad.unpack_dual(x).tangent for x in outputs)


def tangents(name: str, path: str) -> set[str]:
    """Asserts that derivatives of forward mode are right, or refused; returns which."""
    outcomes = set()
    for function in (transformed_tangents, dual_tangents):
        exact = [x.detach() for x in draw(name, torch.float64)]
        tensors = [x.detach() for x in draw(name, DTYPES[path])]
        try:
            ours = function(OPERATIONS[name].ours, tensors)
        except (NotImplementedError, RuntimeError) as error:
            assert re.search("jvp function|setup_context staticmethod|forward mode", str(error))
            outcomes.add("refused")
            continue
        for x, right in zip(ours, function(OPERATIONS[name].formula, exact), strict=True):
            torch.testing.assert_close(x.double(), right, rtol=1e-4, atol=1e-4)
        outcomes.add("right")
    return outcomes


@pytest.mark.parametrize("name", cases("kernel"))
def test_forward_mode_is_right_or_refused(name, interpreted):
    if "plain" in OPERATIONS[name].paths:
        tangents(name, "plain")
    if name != "column_sums":  # which has no gradient either
        assert interpreted(tangents, name, "kernel") == {"refused"}


UNBATCHED = re.compile(
    "Batching rule not implemented|setup_context staticmethod|does not have vmap support|randomness"
)


def mapped(name: str, path: str) -> None:
    """Asserts that `torch.func.vmap` gives what a loop does, or is refused."""
    tensors = [x.detach() for x in draw(name, DTYPES[path])]
    batches = [torch.stack((x, 2 * x)) for x in tensors]
    try:
        outputs = torch.func.vmap(lambda *x: outputs_of(OPERATIONS[name].ours, x))(*batches)
    except RuntimeError as error:
        assert UNBATCHED.search(str(error)), error
        return
    for index in range(2):
        expected = outputs_of(OPERATIONS[name].formula, [x[index].double() for x in batches])
        for ours, right in zip(outputs, expected, strict=True):
            torch.testing.assert_close(ours[index].double(), right, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", cases("kernel"))
def test_vmap_is_a_loop_or_refused(name, interpreted):
    if "plain" in OPERATIONS[name].paths:
        mapped(name, "plain")
    interpreted(mapped, name, "kernel")
