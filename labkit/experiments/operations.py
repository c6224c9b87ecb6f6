"""The operations of the chapters' contests, and their implementations: ours, PyTorch's, others'.

One more implementation is one line, in any module that is imported before a session is opened:

    operations.register("swiglu", "mine", my_swiglu)

It then is in every case of that operation, held to the same gate and timed in turn with the others.
An operation is given by its tensors and its formula. Ideal bytes are those that must be read and
written once; the ceiling is the session's copy, or its matrix product where products bound the
operation.
"""

import dataclasses
import functools
import importlib.util
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from labkit import accounting, numerics
from labkit.configs import PASSES, Rivalry
from labkit.device import Device
from labkit.experiments.contest import (
    ContestCase,
    Implementation,
    Operation,
    as_tuple,
    attention_formula,
    draw,
)
from labkit.experiments.sections import empty_cache
from labkit.kernels import flash_attention as labkit_flash
from labkit.kernels.attention import IMPLS, OUR_OPTIONS, attention, unavailable_reason, what_runs
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
    *,
    is_alone: bool = False,
    **limits,
) -> ContestCase:
    """Returns the case of a contest of `impls` and, unless one is alone, of all registered ones."""
    registered = IMPLEMENTATIONS[operation].items() if not is_alone else ()
    modules = {name: each.module for name, each in registered if each.module}
    entrants = dict.fromkeys((*impls, *modules))
    phases = tuple(f"{impl} {name}" for name in passes for impl in entrants)
    return ContestCase(section, parameters, phases, modules=tuple(modules.values()), **limits)


# ---- attention -----------------------------------------------------------------------------------


class Attention(Operation):
    """Attention on one shape; ratios are to what "auto" runs there, in TF32 to the kernel that is
    told to.
    """

    names = ("q", "k", "v")

    def __init__(self, device: Device, shape: Rivalry, precision: str, *, drawn_on: str = ""):
        empty_cache(device)
        self.device, self.shape, self.precision = device, shape, precision
        # Some kernels multiply fp32 as several products of TF32, and the peak of plain fp32 is not
        # theirs.
        self.peak_precision = "tf32" if precision == "fp32" else precision
        self.implementations = IMPLEMENTATIONS["attention"]
        self.options = {"causal": shape.causal}
        size = (shape.batch, shape.heads, shape.length, shape.d_head)
        drawn = draw(drawn_on or device.kind, precision, *4 * [size])
        *self.inputs, grad_out = (x.to(device.kind) for x in drawn)
        self.grad_outs = [grad_out]
        for x in self.inputs:
            x.requires_grad_()
        self.baseline = what_runs("auto", *self.inputs[:2], **self.options)
        if precision == "tf32" and self.baseline == "triton":
            self.baseline = "triton_tf32"

    def formula(self, *inputs: Tensor, dtype: torch.dtype) -> Tensor:
        return attention_formula(*inputs, **self.options, dtype=dtype)

    def num_terms(self, name: str) -> int:
        return self.shape.length

    def cost(self, name: str) -> dict:
        shape = self.shape
        call = (name, shape.batch * shape.heads, shape.length, shape.d_head)
        return {"flops": accounting.attention_call_flops(*call, causal=shape.causal)}

    def described(self) -> dict:
        q = self.inputs[0]
        shape = dataclasses.asdict(Rivalry(*q.shape, self.shape.causal))
        return {**shape, "precision": numerics.live_precision(q.dtype)}

    def metrics(self, impl: str) -> dict:
        return {"is_auto": int(impl == self.baseline)}

    def observed(self, impl: str) -> dict:
        q, k, _ = self.inputs
        ran = what_runs(impl, q, k, **self.options) if impl in IMPLS else impl
        observed = {"ran": ran, "auto": self.baseline}
        options = OUR_OPTIONS.get(impl, {})
        if options.get("impl") == "triton" and q.dtype == torch.float32:
            # Several products may make one.
            precision = options.get("precision", "auto")
            observed["products"] = labkit_flash.resolve_precision(q, precision)
        if ran.startswith("gluon"):
            observed["backward"] = labkit_flash.resolve_backward(q, k, "gluon", **self.options)
        return observed


@functools.lru_cache(maxsize=1)
def attention_problem(device: Device, shape: Rivalry, precision: str) -> Attention:
    """Returns the operation on a shape; the last one is kept, for a shape's cases follow one
    another.
    """
    return Attention(device, shape, precision)


def _attention(impl: str) -> Implementation:
    def unavailable(problem: Attention) -> str | None:
        return unavailable_reason(impl, *problem.inputs[:2], **problem.options)

    return Implementation(functools.partial(attention, impl=impl), unavailable)


# ---- operations on rows --------------------------------------------------------------------------


@dataclass(frozen=True)
class Definition:
    """What is computed of tensors whose shapes follow from (rows, columns).

    Attributes:
        shapes: of the tensors to differentiate by; others: (rows, columns, device) → what comes
            after them.
        elements: read and written of each of the first tensor's, forward and backward; flops:
            (rows, columns) → FLOPs of a forward pass, where products bound the operation.
        passes: without "forward" where a forward pass computes the gradients too.
    """

    function: Callable
    ours: Callable
    shapes: Callable[[int, int], list[tuple[int, ...]]]
    elements: tuple[int, int] = (0, 0)
    flops: Callable[[int, int], int] | None = None
    others: Callable[..., tuple] = lambda *_: ()
    passes: tuple[str, ...] = ("forward", "forward_backward")


def _rms_norm(x, weight, residual):
    total = x + residual
    in_fp32 = wide(total)
    scale = torch.rsqrt(in_fp32.square().mean(-1, keepdim=True) + EPS)
    return (in_fp32 * scale * weight).to(x.dtype), total


def _layer_norm(x, weight, bias, residual):
    total = x + residual
    return F.layer_norm(total, weight.shape, weight, bias, EPS), total


def _cross_entropy(logits, targets):
    return F.cross_entropy(wide(logits), targets)


def _targets(rows: int, num_classes: int, device: str) -> tuple[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return (torch.randint(num_classes, (rows,), generator=generator).to(device),)


def _mlp(x, w1, b1, w2, b2):
    return F.linear(F.gelu(F.linear(x, w1, b1), approximate="tanh"), w2, b2)


def _mlp_shapes(rows: int, columns: int) -> list[tuple[int, ...]]:
    hidden = round(HIDDEN * columns) // 8 * 8
    return [(rows, columns), (hidden, columns), (hidden,), (columns, hidden), (columns,)]


def _weighted_sum(x, weight):
    return (x * weight).sum(dim=-1)


DEFINITIONS = {
    "weighted_sum": Definition(_weighted_sum, weighted_sum, lambda n, c: [(n, c), (c,)]),
    "rms_norm": Definition(
        _rms_norm,
        lambda x, weight, residual: rms_norm(x, weight, EPS, residual),
        lambda n, c: [(n, c), (c,), (n, c)],
        elements=(4, 4),
    ),
    "layer_norm": Definition(
        _layer_norm,
        lambda x, weight, bias, residual: layer_norm(x, weight, bias, EPS, residual),
        lambda n, c: [(n, c), (c,), (c,), (n, c)],
        elements=(4, 4),
    ),
    "swiglu": Definition(
        lambda gate, up: F.silu(gate) * up, swiglu, lambda n, c: [(n, c), (n, c)], elements=(3, 5)
    ),
    "rotary": Definition(
        lambda q, k, turn: (turn(q.transpose(1, 2)), turn(k.transpose(1, 2))),
        lambda q, k, turn: rotary(q.transpose(1, 2), k.transpose(1, 2), turn.cos_TD, turn.sin_TD),
        lambda n, c: 2 * [(1, n, c // HEAD, HEAD)],
        elements=(4, 4),
        others=lambda n, c, device: (RotaryEmbedding(HEAD, n, 10_000.0).to(device),),
    ),
    "cross_entropy": Definition(
        _cross_entropy, cross_entropy, lambda n, c: [(n, c)], elements=(1, 2), others=_targets
    ),
    "linear_cross_entropy": Definition(
        lambda x, weight, targets: _cross_entropy(x @ weight.T, targets),
        linear_cross_entropy,
        lambda n, c: [(n, c), (VOCABULARY, c)],
        flops=lambda n, c: 2 * n * c * VOCABULARY,
        passes=("forward_backward",),
        others=lambda n, c, device: _targets(n, VOCABULARY, device),
    ),
    "gelu_mlp": Definition(
        _mlp, gelu_mlp, _mlp_shapes, flops=lambda n, c: 4 * n * c * _mlp_shapes(n, c)[2][0]
    ),
}


class RowOperation(Operation):
    """An operation of DEFINITIONS on tensors of one shape; ratios are to ours."""

    baseline = "ours"

    def __init__(self, device: Device, parameters: dict):
        self.device, self.name = device, parameters["operation"]
        self.shape = (parameters["rows"], parameters["columns"])
        self.precision = parameters["precision"]
        self.definition = DEFINITIONS[self.name]
        self.implementations = IMPLEMENTATIONS[self.name]
        shapes = self.definition.shapes(*self.shape)
        self.names = list(inspect.signature(self.definition.function).parameters)[: len(shapes)]
        self.inputs = draw(device.kind, self.precision, *shapes)
        for number, x in enumerate(self.inputs):
            if number and x.dim() == 2 and x.shape != shapes[0]:
                # A weight matrix as it is initialised, so that a product is of its input's size.
                x *= x.shape[-1] ** -0.5
            x.requires_grad_()
        self.others = self.definition.others(*self.shape, device.kind)
        with torch.no_grad():
            outs = as_tuple(self.definition.function(*self.inputs, *self.others))
        torch.manual_seed(2)
        self.grad_outs = [torch.randn_like(x) if x.dim() else torch.ones_like(x) for x in outs]

    def formula(self, *inputs: Tensor, dtype: torch.dtype) -> Tensor | tuple[Tensor, ...]:
        return self.definition.function(*(x.to(dtype) for x in inputs), *self.others)

    def num_terms(self, name: str) -> int:
        return max(self.shape)

    def rows(self, x: Tensor, is_gradient: bool) -> Tensor:
        # A vector is one row as a gradient, and a number of each row as an output.
        return x.reshape(-1, x.shape[-1] if is_gradient or x.dim() > 1 else 1)

    def cost(self, name: str) -> dict:
        if self.definition.flops:
            return {"flops": self.definition.flops(*self.shape) * (1 if name == "forward" else 3)}
        forward, backward = self.definition.elements
        elements = forward if name == "forward" else forward + backward
        return {"num_bytes": elements * self.inputs[0].nbytes}

    def described(self) -> dict:
        rows, columns = self.inputs[0].reshape(self.shape[0], -1).shape
        precision = numerics.live_precision(self.inputs[0].dtype)
        return {"operation": self.name, "rows": rows, "columns": columns, "precision": precision}


class WeightedSum(RowOperation):
    """Σ_d x_nd w_d: the first kernel against the formula; ratios are to the kernel."""

    def __init__(self, device: Device, parameters: dict):
        named = {"operation": "weighted_sum", "columns": parameters["dim"]}
        super().__init__(device, parameters | named)
        self.baseline = None if self.unavailable("triton") else "triton"

    def num_terms(self, name: str) -> int:
        rows, dim = self.shape
        return {"out": dim, "dx": 1, "dweight": rows}[name]

    def cost(self, name: str) -> dict:
        element_bytes = self.inputs[0].element_size()
        return {"num_bytes": accounting.weighted_sum_bytes(name, *self.shape, element_bytes)}

    def described(self) -> dict:
        found = super().described()
        return {"rows": found["rows"], "dim": found["columns"], "precision": found["precision"]}


# ---- implementations -----------------------------------------------------------------------------


def triton_unavailable(device: Device) -> str | None:
    """Returns why no kernel of ours runs on the device, None if they do."""
    if device.kind == "cuda" or labkit_flash.IS_INTERPRETED:
        return None
    return f"the Triton kernel needs a CUDA device; this is {device.kind}"


PEERS = {
    "liger": (
        "liger_kernel.transformers.functional",
        {
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
        },
    ),
    "quack": (
        "quack",
        {
            "rms_norm": lambda quack, x, weight, residual: quack.rmsnorm(
                x, weight, residual=residual, eps=EPS, prenorm=True
            )
        },
    ),
}
"""Others' packages by implementation: the module of their functions, and calls of these by
operation.
"""

_load = functools.cache(importlib.import_module)


def _peer(impl: str, operation: str) -> Implementation:
    """Returns another package's function, which is imported when it is first called."""
    module, functions = PEERS[impl]
    package = module.split(".")[0]

    def unavailable(problem: Operation) -> str | None:
        if operation not in functions:
            return f"{package} has no operation that does the same"
        if problem.device.kind != "cuda" or importlib.util.find_spec(package) is None:
            return f"{package} is not installed, or there is no GPU"
        return None

    return Implementation(
        lambda *tensors: functions[operation](_load(module), *tensors), unavailable
    )


@functools.cache
def _compiled(operation: str, mode: str | None = None) -> Callable:
    formula = DEFINITIONS[operation].function
    return torch.compile(formula, fullgraph=True, dynamic=False, mode=mode)


def _compile(operation: str) -> Implementation:
    return Implementation(
        lambda *tensors: _compiled(operation, "max-autotune-no-cudagraphs")(*tensors),
        lambda problem: None if problem.device.kind == "cuda" else "is compiled on a GPU only",
    )


IMPLEMENTATIONS: dict[str, dict[str, Implementation]] = {
    name: {
        "ours": Implementation(formula.ours),
        "eager": Implementation(formula.function),
        "compiled": _compile(name),
        **{impl: _peer(impl, name) for impl in PEERS},
    }
    for name, formula in DEFINITIONS.items()
}
IMPLEMENTATIONS["weighted_sum"] = {
    "eager": Implementation(_weighted_sum),
    "compiled": Implementation(lambda *tensors: _compiled("weighted_sum")(*tensors)),
    "triton": Implementation(weighted_sum, lambda problem: triton_unavailable(problem.device)),
}
IMPLEMENTATIONS["attention"] = {impl: _attention(impl) for impl in IMPLS}
"""By operation and name; `register` adds to them."""

# On a copy of the logits, as Liger's is run: both overwrite them by their gradient.
register(
    "cross_entropy",
    "ours_in_place",
    lambda logits, targets: cross_entropy(logits.clone(), targets, inplace=True),
)
