"""Derivatives of every differentiable operation of labkit.kernels beyond the first gradient: right,
or refused.

A gradient that has lost its graph trains nothing and says nothing. So each operation is tried, its
kernels in a worker process where they are interpreted, its plain path here, and what is asked for
is what PyTorch computes of the formula in fp64, or an error: a gradient penalty for each input, a
product with the Hessian, also where a mode looks at operators and through torch.func; and tangents
of forward mode.
"""

import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from conftest import ALL_TESTS, more
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import labkit.kernels
from labkit.kernels import (
    cross_entropy,
    flash_attention,
    fused,
    gelu_mlp,
    layer_norm,
    linear,
    rms_norm,
    rotary,
    swiglu,
)
from labkit.kernels.column_sums import column_sums
from labkit.kernels.flash_attention.qkv import flash_attention_qkv
from labkit.kernels.flash_attention.tiled import TiledFlashAttention
from labkit.kernels.reference import attention_reference
from labkit.kernels.weighted_sum import weighted_sum

EPS = 1e-5
TARGETS, SEED = torch.tensor([4, 0, 2, 2, 1]), torch.tensor(7)
CU_SEQLENS = torch.tensor([0, 2, 6], dtype=torch.int32)
ANGLES = torch.linspace(0, 3, 4 * 8).view(4, 8)


def is_interpreted() -> bool:
    return fused.IS_INTERPRETED


@dataclass(frozen=True)
class Operation:
    """Ours and the formula, both of the tensors to differentiate by.

    paths: "plain", "kernel", and what the operation has of them.
    """

    ours: Callable
    formula: Callable
    shapes: tuple[tuple[int, ...], ...]
    paths: tuple[str, ...] = ("plain", "kernel")


def attend(q, k, v):
    """Attention of (total, heads, d) as packed by CU_SEQLENS."""
    parts = [x.transpose(0, 1).split(CU_SEQLENS.diff().tolist(), 1) for x in (q, k, v)]
    outs = [attention_reference(*(x[None] for x in part))[0] for part in zip(*parts, strict=True)]
    return torch.cat(outs, 1).transpose(0, 1)


def rotate(q, k):
    def turn(x):
        first, second = x.chunk(2, -1)
        return x * ANGLES.cos().to(x) + torch.cat((-second, first), -1) * ANGLES.sin().to(x)

    return turn(q), turn(k)


def mlp(x, w1, b1, w2, b2):
    return F.linear(F.gelu(F.linear(x, w1, b1), approximate="tanh"), w2, b2)


def normed_mlp(total, gain, shift, *parameters):
    normed = layer_norm.layer_norm(total, gain, shift, EPS)
    return gelu_mlp.gelu_mlp(normed, *parameters, keep=False, norm=(total, gain, shift, EPS))


def normed_linear(total, gain, shift, weight, bias):
    norm = (total, gain, shift, EPS)
    return linear.norm_linear(layer_norm.layer_norm(*norm), weight, bias, norm)


def layer_norm_formula(x, weight, bias, residual=None):
    total = x if residual is None else x + residual
    y = F.layer_norm(total, weight.shape, weight, bias, EPS)
    return y if residual is None else (y, total)


def rms_norm_formula(x, weight, residual):
    return F.rms_norm(x + residual, weight.shape, weight, EPS), x + residual


MLP_SHAPES = ((8, 6), (8,), (6, 8), (6,))
HEADS = ((1, 2, 4, 8),) * 3
ROWS = ((6, 2, 8),) * 3
BY_PACK = {"cu_seqlens_q": CU_SEQLENS, "cu_seqlens_k": CU_SEQLENS}

OPERATIONS = {
    "rms_norm": Operation(
        lambda x, w: rms_norm.rms_norm(x, w, EPS),
        lambda x, w: F.rms_norm(x, w.shape, w, EPS),
        ((5, 6), (6,)),
    ),
    "rms_norm of a sum": Operation(
        lambda x, w, r: rms_norm.rms_norm(x, w, EPS, r), rms_norm_formula, ((5, 6), (6,), (5, 6))
    ),
    "layer_norm": Operation(
        lambda x, w, b: layer_norm.layer_norm(x, w, b, EPS),
        layer_norm_formula,
        ((5, 6), (6,), (6,)),
    ),
    "layer_norm of a sum": Operation(
        lambda x, w, b, r: layer_norm.layer_norm(x, w, b, EPS, r),
        layer_norm_formula,
        ((5, 6), (6,), (6,), (5, 6)),
    ),
    "swiglu": Operation(swiglu.swiglu, lambda gate, up: F.silu(gate) * up, ((5, 6), (5, 6))),
    "rotary": Operation(
        lambda q, k: rotary.rotary(q, k, ANGLES.cos(), ANGLES.sin()), rotate, HEADS[:2]
    ),
    "cross_entropy": Operation(
        lambda x: cross_entropy.cross_entropy(x, TARGETS),
        lambda x: F.cross_entropy(x, TARGETS),
        ((5, 6),),
    ),
    "cross_entropy in place": Operation(
        lambda x: cross_entropy.cross_entropy(x * 1, TARGETS, inplace=True),
        lambda x: F.cross_entropy(x, TARGETS),
        ((5, 6),),
    ),
    "linear_cross_entropy": Operation(
        lambda h, w: cross_entropy.linear_cross_entropy(h, w, TARGETS, chunk_rows=2),
        lambda h, w: F.cross_entropy(h @ w.T, TARGETS),
        ((5, 4), (6, 4)),
    ),
    "gelu_mlp": Operation(gelu_mlp.gelu_mlp, mlp, ((5, 6), *MLP_SHAPES)),
    "gelu_mlp of a norm": Operation(
        normed_mlp,
        lambda x, g, s, *p: mlp(layer_norm_formula(x, g, s), *p),
        ((5, 6), (6,), (6,), *MLP_SHAPES),
    ),
    "norm_linear": Operation(
        normed_linear,
        lambda x, g, s, w, b: F.linear(layer_norm_formula(x, g, s), w, b),
        ((5, 6), (6,), (6,), (4, 6), (4,)),
    ),
    "dropout_linear": Operation(  # of which nothing is dropped
        lambda x, w, b: linear.dropout_linear(x, w, b, 0.0, SEED), F.linear, ((5, 6), (4, 6), (4,))
    ),
    "weighted_sum": Operation(
        weighted_sum, lambda x, w: (x * w).sum(-1), ((5, 6), (6,)), ("kernel",)
    ),
    "column_sums": Operation(column_sums, lambda x: x.sum(0), ((5, 6),)),
    "flash_attention": Operation(
        lambda *qkv: flash_attention.flash_attention(
            *qkv, impl="triton" if is_interpreted() else "auto"
        ),
        attention_reference,
        HEADS,
    ),
    "flash_attention, tiled": Operation(
        lambda *qkv: flash_attention.flash_attention(*qkv, causal=True, impl="tiled"),
        lambda *qkv: attention_reference(*qkv, causal=True),
        HEADS,
    ),
    "flash_attention, packed": Operation(
        lambda *qkv: flash_attention.flash_attention(
            *qkv, **BY_PACK, impl="triton" if is_interpreted() else "auto"
        ),
        attend,
        ROWS,
    ),
    "flash_attention_qkv": Operation(
        lambda qkv: flash_attention_qkv(qkv, CU_SEQLENS, 4),
        lambda qkv: attend(*qkv.unbind(1)),
        ((6, 3, 2, 8),),
    ),
    "FlashAttention": Operation(
        flash_attention.FlashAttention.apply, attention_reference, HEADS, ("kernel",)
    ),
    "TiledFlashAttention": Operation(TiledFlashAttention.apply, attention_reference, HEADS),
}
ELSEWHERE = {
    "FlashAttention3Function"
}  # tests/test_attention_impls.py, with a stand-in for its library
REFUSED = re.compile(
    "has no second derivative"
    "|must override the setup_context staticmethod"  # PyTorch's line about torch.func
    "|no autograd formula was registered"
)


class Looking(TorchDispatchMode):
    """Sees every operator and runs it."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def draw(operation: Operation, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(shape, generator=generator).to(dtype).requires_grad_()
        for shape in operation.shapes
    ]


def outputs_of(function: Callable, tensors) -> tuple[Tensor, ...]:
    found = function(*tensors)
    return found if isinstance(found, tuple) else (found,)


def loss_of(function: Callable, tensors) -> Tensor:
    return sum(x.square().sum() for x in outputs_of(function, tensors))


def sum_of(function: Callable, tensors) -> Tensor:
    return sum(x.sum() for x in outputs_of(function, tensors))


def penalty(function: Callable, tensors: list[Tensor], number: int) -> list[Tensor]:
    """Returns the gradients, by all other inputs or the only one, of a loss with the gradient by
    one input in it.
    """
    (slope,) = torch.autograd.grad(sum_of(function, tensors), tensors[number], create_graph=True)
    others = [x for x in tensors if x is not tensors[number]] or tensors
    loss = loss_of(function, tensors) + slope.square().sum()
    return list(torch.autograd.grad(loss, others, allow_unused=True, materialize_grads=True))


def hessian_product(function: Callable, tensors: list[Tensor], _: int) -> list[Tensor]:
    slopes = torch.autograd.grad(loss_of(function, tensors), tensors, create_graph=True)
    product = sum((slope * x.detach()).sum() for slope, x in zip(slopes, tensors, strict=True))
    return list(torch.autograd.grad(product, tensors, allow_unused=True, materialize_grads=True))


def double_backward(function: Callable, tensors: list[Tensor], _: int) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in tensors]
    loss_of(function, leaves).backward(create_graph=True)
    sum(x.grad.square().sum() for x in leaves).backward()
    return [x.grad for x in leaves]


def penalty_in_a_mode(function: Callable, tensors: list[Tensor], number: int) -> list[Tensor]:
    with Looking():
        return penalty(function, tensors, number)


def transformed_penalty(function: Callable, tensors: list[Tensor], number: int) -> list[Tensor]:
    def loss(*arguments):
        slope = torch.func.grad(lambda *inner: sum_of(function, inner), number)(*arguments)
        return loss_of(function, arguments) + slope.square().sum()

    tensors = [x.detach() for x in tensors]
    others = tuple(index for index in range(len(tensors)) if index != number) or (0,)
    return list(torch.func.grad(loss, others)(*tensors))


ATTEMPTS = (penalty, hessian_product, double_backward, penalty_in_a_mode, transformed_penalty)


def attempt(name: str, path: str) -> dict[str, int]:
    """Asserts that all attempts at an operation's second derivatives are right or refused; returns
    how many are.
    """
    operation, outcomes = OPERATIONS[name], {"right": 0, "refused": 0}
    dtype = torch.float32 if path == "kernel" else torch.float64
    for function in ATTEMPTS:
        numbers = range(len(operation.shapes) if function is penalty else 1)
        for number in numbers if path == "plain" else [*numbers[:1], *more(*numbers[1:])]:
            expected = function(operation.formula, draw(operation, torch.float64), number)
            try:
                found = function(operation.ours, draw(operation, dtype), number)
            except RuntimeError as error:
                assert REFUSED.search(str(error)), error
                outcomes["refused"] += 1
                continue
            tolerance = 1e-3 if path == "kernel" else 1e-9
            for ours, right in zip(found, expected, strict=True):
                torch.testing.assert_close(
                    ours.double(), right, rtol=tolerance, atol=tolerance, msg=function.__name__
                )
            outcomes["right"] += 1
    return outcomes


def cases(path: str) -> list[str]:
    return [name for name, operation in OPERATIONS.items() if path in operation.paths]


SLOW = ("gelu_mlp of a norm", "layer_norm of a sum", "rms_norm of a sum", "FlashAttention")
"""Operations made of others that are tested alone."""


@pytest.mark.parametrize(
    "name", [name for name in cases("kernel") if ALL_TESTS or name not in SLOW]
)
def test_a_kernels_second_derivatives_are_right_or_refused(name, interpreted):
    assert interpreted(attempt, name, "kernel")["refused"]


@pytest.mark.parametrize("name", cases("plain"))
def test_a_plain_paths_second_derivatives_are_right_or_refused(name):
    outcomes = attempt(name, "plain")
    is_formula = not re.search("linear|mlp|[fF]lash", name) or name in (
        "linear_cross_entropy",
        "dropout_linear",
    )
    assert (outcomes["refused"] == 0) == is_formula


def nodes(path: str) -> set[str]:
    """Returns the names of the operators and autograd functions of ours in the graphs of all
    operations.
    """
    names = set()
    for name in cases(path):
        outputs = outputs_of(OPERATIONS[name].ours, draw(OPERATIONS[name], torch.float32))
        todo = [x.grad_fn for x in outputs]
        while todo:
            node = todo.pop()
            if isinstance(node, torch.autograd.function.BackwardCFunction):
                function = type(node)._forward_cls
                names.add(node.operator.name if function is fused._Direct else function.__name__)
            todo += [following for following, _ in node.next_functions if following is not None]
    return names


def test_no_differentiable_operation_is_forgotten(interpreted):
    existing = set()
    for found in pkgutil.walk_packages(labkit.kernels.__path__, "labkit.kernels."):
        for value in vars(importlib.import_module(found.name)).values():
            if isinstance(value, fused.Operator) and value.gradients:
                existing.add(value.name)
            is_function = inspect.isclass(value) and issubclass(value, torch.autograd.Function)
            if (
                is_function
                and value.__module__.startswith("labkit.kernels")
                and value.__module__ != fused.__name__
            ):
                existing.add(value.__name__)
    assert len(existing) >= 12
    tried = nodes("plain") | interpreted(nodes, "kernel")
    assert {name for name in tried if not name.startswith("Generated")} == existing - ELSEWHERE


def transformed_tangents(function: Callable, tensors: list[Tensor]) -> tuple[Tensor, ...]:
    return torch.func.jvp(
        lambda *inner: outputs_of(function, inner), tuple(tensors), tuple(tensors)
    )[1]


def dual_tangents(function: Callable, tensors: list[Tensor]) -> tuple[Tensor, ...]:
    with forward_ad.dual_level():
        outputs = outputs_of(function, [forward_ad.make_dual(x, x) for x in tensors])
        return tuple(forward_ad.unpack_dual(x).tangent for x in outputs)


def tangents(name: str, path: str) -> str:
    """Asserts that derivatives of forward mode are right, or refused; returns which."""
    operation = OPERATIONS[name]
    dtype = torch.float32 if path == "kernel" else torch.float64
    results = []
    for function, kind in ((operation.formula, torch.float64), (operation.ours, dtype)):
        tensors = [x.detach() for x in draw(operation, kind)]

        for differentiate in (transformed_tangents, dual_tangents):
            try:
                results.append(differentiate(function, tensors))
            except (NotImplementedError, RuntimeError) as error:
                assert function is operation.ours
                assert re.search(
                    "implement the jvp function|setup_context staticmethod", str(error)
                ), error
                return "refused"
    for found in results[2:]:
        for ours, right in zip(found, results[0], strict=True):
            torch.testing.assert_close(ours.double(), right, rtol=1e-4, atol=1e-4)
    return "right"


@pytest.mark.parametrize("name", [name for name in cases("kernel") if name != "column_sums"])
def test_a_kernel_refuses_forward_mode(name, interpreted):
    assert interpreted(tangents, name, "kernel") == "refused"


@pytest.mark.parametrize("name", cases("plain"))
def test_forward_mode_of_a_plain_path_is_right_or_refused(name):
    tangents(name, "plain")


UNBATCHED = re.compile(
    "Batching rule not implemented|setup_context staticmethod|does not have vmap support|randomness"
)


def mapped(name: str, path: str) -> None:
    """Asserts that `torch.func.vmap` gives what a loop does, or is refused."""
    operation = OPERATIONS[name]
    tensors = [
        x.detach() for x in draw(operation, torch.float32 if path == "kernel" else torch.float64)
    ]
    batches = [torch.stack((x, 2 * x)) for x in tensors]
    try:
        found = torch.func.vmap(lambda *x: outputs_of(operation.ours, x))(*batches)
    except RuntimeError as error:
        assert UNBATCHED.search(str(error)), error
        return
    for index in range(2):
        expected = outputs_of(operation.formula, [x[index].double() for x in batches])
        for ours, right in zip(found, expected, strict=True):
            torch.testing.assert_close(ours[index].double(), right, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", cases("kernel"))
def test_vmap_is_a_loop_or_refused(name, interpreted):
    if "plain" in OPERATIONS[name].paths:
        mapped(name, "plain")
    interpreted(mapped, name, "kernel")
