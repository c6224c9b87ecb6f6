"""Every differentiable operation of labkit.kernels beside its formula in plain PyTorch."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from labkit.kernels import flash_attention, fused
from labkit.kernels.column_sums import column_sums
from labkit.kernels.cross_entropy import cross_entropy, linear_cross_entropy
from labkit.kernels.gelu_mlp import gelu_mlp
from labkit.kernels.linear import dropout_linear, norm_linear
from labkit.kernels.norms import layer_norm, rms_norm
from labkit.kernels.reference import attention_reference
from labkit.kernels.rotary import rotary
from labkit.kernels.swiglu import swiglu
from labkit.kernels.weighted_sum import weighted_sum

EPS = 1e-5
IMPL = "triton" if fused.IS_INTERPRETED else "auto"


@dataclass(frozen=True)
class Operation:
    """Ours and the formula, both of the tensors to differentiate by.

    size: the shape of the first where a test asks for no other; others: those of the others, parts
    of it or a function of it.
    """

    ours: Callable
    formula: Callable
    size: tuple[int, ...] = (5, 6)
    others: tuple | Callable = ()


ROW = slice(-1, None)
SAME = slice(None)


def targets_of(x: Tensor, num_classes: int) -> Tensor:
    """Returns a target of each row, every other element of their memory; the second is none."""
    targets = 7 * torch.arange(x.shape[:-1].numel(), device=x.device) % num_classes
    targets[1:2] = -100
    return targets.repeat_interleave(2).view(*x.shape[:-1], 2)[..., 0]


def tables_of(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns cosines and sines, another angle for each element of a head."""
    num_tokens, d = x.shape[-2:]
    angles = torch.linspace(0, 3, (num_tokens + 1) * d, device=x.device).view(num_tokens + 1, d)
    return angles.cos(), angles.sin()


def layer_norm_formula(x, weight, bias, residual=None):
    total = x if residual is None else x + residual
    y = F.layer_norm(total, weight.shape, weight, bias, EPS)
    return y if residual is None else (y, total)


def rms_norm_formula(x, weight, residual):
    return F.rms_norm(x + residual, weight.shape, weight, EPS), x + residual


def rotary_formula(q, k):
    cos, sin = (table[:-1] for table in tables_of(q))

    def turn(x):
        first, second = fused.wide(x).chunk(2, -1)
        turned = torch.cat((-second, first), -1)
        return (fused.wide(x) * cos + turned * sin).to(x.dtype)

    return turn(q), turn(k)


def mlp(x, w1, b1, w2, b2):
    return F.linear(F.gelu(F.linear(x, w1, b1), approximate="tanh"), w2, b2)


def normed_mlp(total, gain, shift, *parameters):
    norm = (total, gain, shift, EPS)
    return gelu_mlp(layer_norm(*norm), *parameters, keep=False, norm=norm)


def normed_linear(total, gain, shift, weight, bias):
    norm = (total, gain, shift, EPS)
    return norm_linear(layer_norm(*norm), weight, bias, norm)


def hidden_layer(size):
    return [(2 * size[-1], size[-1]), (2 * size[-1],), (size[-1], 2 * size[-1]), size[-1:]]


HEADS = (1, 2, 4, 8)
OPERATIONS = {
    "rms_norm": Operation(
        lambda x, w: rms_norm(x, w, EPS),
        lambda x, w: F.rms_norm(x, w.shape, w, EPS),
        others=(ROW,),
    ),
    "rms_norm of a sum": Operation(
        lambda x, w, r: rms_norm(x, w, EPS, r), rms_norm_formula, others=(ROW, SAME)
    ),
    "layer_norm": Operation(
        lambda x, w, b: layer_norm(x, w, b, EPS), layer_norm_formula, others=(ROW, ROW)
    ),
    "layer_norm of a sum": Operation(
        lambda x, w, b, r: layer_norm(x, w, b, EPS, r), layer_norm_formula, others=(ROW, ROW, SAME)
    ),
    "swiglu": Operation(swiglu, lambda gate, up: F.silu(gate) * up, others=(SAME,)),
    "rotary": Operation(
        lambda q, k: rotary(q, k, *tables_of(q)),
        rotary_formula,
        HEADS,
        lambda size: [(size[0], 1, *size[2:])],
    ),
    "cross_entropy": Operation(
        lambda x: cross_entropy(x, targets_of(x, x.shape[-1])),
        lambda x: F.cross_entropy(x.flatten(0, -2), targets_of(x, x.shape[-1]).flatten()),
    ),
    "linear_cross_entropy": Operation(
        lambda h, w: linear_cross_entropy(h, w, targets_of(h, len(w))),
        lambda h, w: F.cross_entropy((h @ w.T).flatten(0, -2), targets_of(h, len(w)).flatten()),
        others=lambda size: [(11, size[-1])],
    ),
    "gelu_mlp": Operation(gelu_mlp, mlp, (5, 8), hidden_layer),
    "gelu_mlp of a norm": Operation(
        normed_mlp,
        lambda x, g, s, *parameters: mlp(layer_norm_formula(x, g, s), *parameters),
        others=lambda size: [size[-1:], size[-1:], *hidden_layer(size)],
    ),
    "norm_linear": Operation(
        normed_linear,
        lambda x, g, s, w, b: F.linear(layer_norm_formula(x, g, s), w, b),
        others=lambda size: [size[-1:], size[-1:], (4, size[-1]), (4,)],
    ),
    "dropout_linear": Operation(  # of which nothing is dropped
        lambda x, w, b: dropout_linear(x, w, b, 0.0, torch.zeros_like(b[0], dtype=int)),
        F.linear,
        others=lambda size: [(4, size[-1]), (4,)],
    ),
    "weighted_sum": Operation(weighted_sum, lambda x, w: (x * w).sum(-1), others=(ROW,)),
    "column_sums": Operation(column_sums, lambda x: x.sum(0)),
    "flash_attention": Operation(
        lambda *qkv: flash_attention.flash_attention(*qkv, impl=IMPL),
        attention_reference,
        HEADS,
        (SAME, SAME),
    ),
}


def draw(name: str, dtype: torch.dtype, size: tuple[int, ...] | None = None) -> list[Tensor]:
    """Returns leaves that are the same in every dtype, but for their roundings."""
    operation, generator = OPERATIONS[name], torch.Generator().manual_seed(0)
    size = size or operation.size
    others = operation.others
    shapes = others(size) if callable(others) else [size[part] for part in others]
    return [
        torch.randn(shape, generator=generator).to(dtype).requires_grad_()
        for shape in (size, *shapes)
    ]


def outputs_of(function: Callable, tensors) -> tuple[Tensor, ...]:
    outputs = function(*tensors)
    return outputs if isinstance(outputs, tuple) else (outputs,)


def results(function: Callable, tensors: list[Tensor]) -> list[Tensor]:
    """Returns the outputs and, for other gradients of each element of theirs, those of the
    tensors.
    """
    outputs = outputs_of(function, tensors)
    directions = [torch.linspace(-1, 1.5, x.numel()).view(x.shape).to(x) for x in outputs]
    return [*(x.detach() for x in outputs), *torch.autograd.grad(outputs, tensors, directions)]


@contextlib.contextmanager
def poisoned_memory():
    """While it is open, memory that is allocated without values holds NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(3).isnan().all() and torch.ones(2).new_empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
