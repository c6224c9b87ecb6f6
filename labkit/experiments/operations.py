"""The operations of the chapters' contests, and their implementations: ours, PyTorch's, others'.

One more implementation is one line, in any module that is imported before a session is opened:

    operations.register("swiglu", "mine", my_swiglu)

It then is in every case of that operation, held to the same gate and timed in turn with the others.
An operation is given by its tensors and its formula. Ideal bytes are those that must be read and
written once; the ceiling is the session's copy, or its matrix product where products bound the
operation.
"""

import functools
import importlib.util
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from labkit import accounting
from labkit.configs import PASSES
from labkit.device import Device
from labkit.experiments.contest import (
    ContestCase,
    Implementation,
    Operation,
    attention_formula,
    draw,
)
from labkit.experiments.sections import empty_cache
from labkit.kernels import flash_attention as labkit_flash
from labkit.kernels.attention import IMPLS, attention, unavailable_reason, what_runs
from labkit.kernels.cross_entropy import cross_entropy, linear_cross_entropy
from labkit.kernels.fused import wide
from labkit.kernels.gelu_mlp import gelu_mlp
from labkit.kernels.layer_norm import layer_norm
from labkit.kernels.rms_norm import rms_norm
from labkit.kernels.rotary import rotary
from labkit.kernels.swiglu import swiglu
from labkit.kernels.weighted_sum import weighted_sum
from labkit.models.transformer import RotaryEmbedding

EPS, VOCABULARY, HEAD = 1e-6, 10_000, 64

HIDDEN = 4304 / 1152
"""Of the MLP, over its width: that of SigLIP 2."""


def register(
    operation: str,
    name: str,
    function: Callable,
    unavailable: Callable[[Operation], str | None] = lambda operation: None,
) -> None:
    """Adds an implementation to every case of an operation, of cases that are made from then on.

    Args:
        operation: one of IMPLEMENTATIONS.
        name: of the implementation, in records and tables.
        function: of a module that a worker can import, where this is called again; takes what the
            operation's formula takes (attention: q, k, v and `causal`); differentiable.
        unavailable: returns why it cannot run a case of the operation, None if it can.

    Raises ValueError for an unknown operation, and for a name that is taken or has a space.
    """
    if operation not in IMPLEMENTATIONS:
        accepted = ", ".join(IMPLEMENTATIONS)
        raise ValueError(f"unknown operation {operation!r}; accepted: {accepted}")
    taken = IMPLEMENTATIONS[operation]
    if name in taken or " " in name:
        raise ValueError(
            f"name must be new and without a space, got {name!r}; taken: {', '.join(taken)}"
        )
    taken[name] = Implementation(function, unavailable, function.__module__)


def contest_case(
    section: str,
    operation: str,
    parameters: dict,
    impls: Sequence[str],
    passes: Sequence[str] = PASSES,
    **limits,
) -> ContestCase:
    """Returns the case of a contest of `impls` and of all registered ones."""
    registered = IMPLEMENTATIONS[operation].items()
    modules = {name: each.module for name, each in registered if each.module}
    entrants = dict.fromkeys((*impls, *modules))
    phases = tuple(f"{impl} {name}" for name in passes for impl in entrants)
    return ContestCase(section, parameters, phases, modules=tuple(modules.values()), **limits)


# ---- attention -----------------------------------------------------------------------------------


SHAPE = ("batch", "heads", "length", "d_head", "causal", "precision")
"""What a case of attention is given by."""


class Attention(Operation):
    """Attention on one shape; ratios are to what "auto" runs there, in TF32 to the kernel that is
    told to.
    """

    names = ("q", "k", "v")

    def __init__(self, device: Device, parameters: dict):
        empty_cache(device)
        self.device = device
        *self.size, causal, self.precision = (parameters[name] for name in SHAPE)
        self.options = {"causal": causal}
        # Some kernels multiply fp32 as several products of TF32, and the peak of plain fp32 is not
        # theirs.
        self.peak_precision = "tf32" if self.precision == "fp32" else self.precision
        self.implementations = IMPLEMENTATIONS["attention"]
        *self.inputs, grad_out = draw(device.kind, self.precision, *4 * [self.size])
        self.grad_outs = [grad_out]
        for x in self.inputs:
            x.requires_grad_()
        self.baseline = what_runs("auto", *self.inputs[:2], causal=causal)
        if self.precision == "tf32" and self.baseline == "triton":
            self.baseline = "triton_tf32"

    def formula(self, *inputs: Tensor, dtype: torch.dtype) -> Tensor:
        return attention_formula(*inputs, **self.options, dtype=dtype)

    def num_terms(self, name: str) -> int:
        return self.size[2]

    def cost(self, name: str) -> dict:
        batch, heads, *size = self.size
        flops = accounting.attention_call_flops(name, batch * heads, *size, **self.options)
        return {"flops": flops}

    def metrics(self, impl: str) -> dict:
        return {"is_auto": int(impl == self.baseline)}


@functools.lru_cache(maxsize=1)
def _last_attention(device: Device, *values) -> Attention:
    return Attention(device, dict(zip(SHAPE, values, strict=True)))


def attention_of(device: Device, parameters: dict) -> Attention:
    """Returns the operation of a case's parameters; the last one is kept, for the cases of a shape
    follow one another.
    """
    return _last_attention(device, *(parameters[name] for name in SHAPE))


# ---- operations on rows --------------------------------------------------------------------------


def shapes_of(rows: int, columns: int) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the tensors to differentiate by, by the names that formulas give
    them.
    """
    hidden = round(HIDDEN * columns) // 8 * 8
    return {
        **dict.fromkeys(("x", "residual", "gate", "up", "logits"), (rows, columns)),
        **dict.fromkeys(("weight", "bias"), (columns,)),
        **dict.fromkeys(("q", "k"), (1, rows, columns // HEAD, HEAD)),
        "classes": (VOCABULARY, columns),
        "w1": (hidden, columns),
        "b1": (hidden,),
        "w2": (columns, hidden),
        "b2": (columns,),
    }


def _rms_norm(x, weight, residual):
    total = x + residual
    in_fp32 = wide(total)
    scale = torch.rsqrt(in_fp32.square().mean(-1, keepdim=True) + EPS)
    return (in_fp32 * scale * weight).to(x.dtype), total


def _layer_norm(x, weight, bias, residual):
    total = x + residual
    return F.layer_norm(total, weight.shape, weight, bias, EPS), total


def _swiglu(gate, up):
    return F.silu(gate) * up


def _rotary(q, k, turn):
    return turn(q.transpose(1, 2)), turn(k.transpose(1, 2))


def _cross_entropy(logits, targets):
    return F.cross_entropy(wide(logits), targets)


def _linear_cross_entropy(x, classes, targets):
    return _cross_entropy(x @ classes.T, targets)


def _mlp(x, w1, b1, w2, b2):
    return F.linear(F.gelu(F.linear(x, w1, b1), approximate="tanh"), w2, b2)


def _weighted_sum(x, weight):
    return (x * weight).sum(dim=-1)


@dataclass(frozen=True)
class Definition:
    """What is computed of rows.

    Attributes:
        formula: of tensors named as in `shapes_of`, then of `targets` or `turn`.
        ours: the same by our kernel.
        elements: read and written of each of the first tensor's, forward and backward, where bytes
            bound the operation.
        passes: without "forward" where a forward pass computes the gradients too.
    """

    formula: Callable
    ours: Callable
    elements: tuple[int, int] = (0, 0)
    passes: tuple[str, ...] = ("forward", "forward_backward")


DEFINITIONS = {
    "weighted_sum": Definition(_weighted_sum, weighted_sum),
    "rms_norm": Definition(
        _rms_norm, lambda x, weight, residual: rms_norm(x, weight, EPS, residual), (4, 4)
    ),
    "layer_norm": Definition(
        _layer_norm,
        lambda x, weight, bias, residual: layer_norm(x, weight, bias, EPS, residual),
        (4, 4),
    ),
    "swiglu": Definition(_swiglu, swiglu, (3, 5)),
    "rotary": Definition(
        _rotary,
        lambda q, k, turn: rotary(q.transpose(1, 2), k.transpose(1, 2), turn.cos_TD, turn.sin_TD),
        (4, 4),
    ),
    "cross_entropy": Definition(_cross_entropy, cross_entropy, (1, 2)),
    "linear_cross_entropy": Definition(
        _linear_cross_entropy, linear_cross_entropy, passes=("forward_backward",)
    ),
    "gelu_mlp": Definition(_mlp, gelu_mlp),
}


class RowOperation(Operation):
    """An operation of DEFINITIONS on tensors of one shape; ratios are to ours."""

    baseline = "ours"

    def __init__(self, device: Device, parameters: dict):
        self.device, self.name = device, parameters["operation"]
        self.size = (parameters["rows"], parameters["columns"])
        self.precision = self.peak_precision = parameters["precision"]
        self.implementations = IMPLEMENTATIONS[self.name]
        shapes = shapes_of(*self.size)
        arguments = inspect.signature(DEFINITIONS[self.name].formula).parameters
        self.names = [name for name in arguments if name in shapes]
        self.inputs = draw(device.kind, self.precision, *(shapes[name] for name in self.names))
        self.matrices = [x for x in self.inputs if x.dim() == 2 and x.shape != self.size]
        for matrix in self.matrices:
            # As it is initialised, so that a product is of its input's size.
            matrix *= matrix.shape[-1] ** -0.5
        for x in self.inputs:
            x.requires_grad_()
        rows, columns = self.size
        if "targets" in arguments:
            num_classes = VOCABULARY if self.matrices else columns
            generator = torch.Generator().manual_seed(1)
            targets = torch.randint(num_classes, (rows,), generator=generator)
            self.others = (targets.to(device.kind),)
        if "turn" in arguments:
            self.others = (RotaryEmbedding(HEAD, rows, 10_000.0, device.kind),)
        with torch.no_grad():
            outs = self.outputs("eager")
        torch.manual_seed(2)
        self.grad_outs = [torch.randn_like(x) if x.dim() else torch.ones_like(x) for x in outs]

    def formula(self, *inputs: Tensor, dtype: torch.dtype) -> Tensor | tuple[Tensor, ...]:
        return DEFINITIONS[self.name].formula(*(x.to(dtype) for x in inputs), *self.others)

    def num_terms(self, name: str) -> int:
        return max(self.size)

    def cost(self, name: str) -> dict:
        if self.matrices:
            forward_flops = 2 * self.size[0] * sum(x.numel() for x in self.matrices)
            return {"flops": forward_flops * (1 if name == "forward" else 3)}
        forward, backward = DEFINITIONS[self.name].elements
        elements = forward if name == "forward" else forward + backward
        return {"num_bytes": elements * self.inputs[0].nbytes}


class WeightedSum(RowOperation):
    """Σ_d x_nd w_d: the first kernel against the formula; ratios are to the kernel."""

    def __init__(self, device: Device, parameters: dict):
        named = {"operation": "weighted_sum", "columns": parameters["dim"]}
        super().__init__(device, parameters | named)
        self.baseline = None if self.unavailable("triton") else "triton"

    def num_terms(self, name: str) -> int:
        rows, dim = self.size
        return {"out": dim, "dx": 1, "dweight": rows}[name]

    def cost(self, name: str) -> dict:
        element_bytes = self.inputs[0].element_size()
        return {"num_bytes": accounting.weighted_sum_bytes(name, *self.size, element_bytes)}


# ---- implementations -----------------------------------------------------------------------------


def triton_unavailable(operation: Operation) -> str | None:
    """Returns why no kernel of ours runs on the device, None if they do."""
    kind = operation.device.kind
    if kind == "cuda" or labkit_flash.IS_INTERPRETED:
        return None
    return f"the Triton kernel needs a CUDA device; this is {kind}"


_load = functools.cache(importlib.import_module)

LIGER = {
    "rms_norm": lambda liger, x, weight, residual: liger.liger_fused_add_rms_norm(
        x, residual, weight, EPS, in_place=False
    ),
    "swiglu": lambda liger, gate, up: liger.liger_swiglu(gate, up),
    # It overwrites its logits.
    "cross_entropy": lambda liger, logits, targets: liger.liger_cross_entropy(
        logits.clone(), targets
    ),
    "linear_cross_entropy": lambda liger, *tensors: liger.liger_fused_linear_cross_entropy(
        *tensors
    ),
}
QUACK = {
    "rms_norm": lambda quack, x, weight, residual: quack.rmsnorm(
        x, weight, residual=residual, eps=EPS, prenorm=True
    ),
}
"""Calls of others' packages by operation."""


def _peer(module: str, function: Callable | None) -> Implementation:
    """Returns a call of another package, which is imported when it is first made."""
    package = module.split(".")[0]

    def unavailable(operation: Operation) -> str | None:
        if function is None:
            return f"{package} has no operation that does the same"
        if operation.device.kind != "cuda" or importlib.util.find_spec(package) is None:
            return f"{package} is not installed, or there is no GPU"
        return None

    return Implementation(lambda *tensors: function(_load(module), *tensors), unavailable)


@functools.cache
def _compiled(operation: str) -> Callable:
    mode = None if operation == "weighted_sum" else "max-autotune-no-cudagraphs"
    formula = DEFINITIONS[operation].formula
    return torch.compile(formula, fullgraph=True, dynamic=False, mode=mode)


def _implementations(operation: str) -> dict[str, Implementation]:
    return {
        "ours": Implementation(DEFINITIONS[operation].ours),
        "eager": Implementation(DEFINITIONS[operation].formula),
        "compiled": Implementation(lambda *tensors: _compiled(operation)(*tensors)),
        "liger": _peer("liger_kernel.transformers.functional", LIGER.get(operation)),
        "quack": _peer("quack", QUACK.get(operation)),
    }


def _attention(impl: str) -> Implementation:
    def unavailable(operation: Attention) -> str | None:
        return unavailable_reason(impl, *operation.inputs[:2], **operation.options)

    return Implementation(functools.partial(attention, impl=impl), unavailable)


IMPLEMENTATIONS = {name: _implementations(name) for name in DEFINITIONS}
IMPLEMENTATIONS["weighted_sum"] = {
    "eager": IMPLEMENTATIONS["weighted_sum"]["eager"],
    "compiled": IMPLEMENTATIONS["weighted_sum"]["compiled"],
    "triton": Implementation(weighted_sum, triton_unavailable),
}
IMPLEMENTATIONS["attention"] = {impl: _attention(impl) for impl in IMPLS}
"""By operation and name; `register` adds to them."""

# On a copy of the logits, as Liger's is run: both overwrite them by their gradient.
register(
    "cross_entropy",
    "ours_in_place",
    lambda logits, targets: cross_entropy(logits.clone(), targets, inplace=True),
)
