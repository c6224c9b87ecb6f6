"""Each fused kernel beside what users would take instead: eager PyTorch, torch.compile, Liger,
QuACK.

An operation is given by its tensors and its formula; the implementations are held to the formula in
fp64, see `contest`. Ideal bytes are those that must be read and written once; the ceiling is the
session's copy, or its matrix product where products bound the operation.
"""

import functools
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from labkit import numerics
from labkit.device import Device
from labkit.experiments.contest import Contest
from labkit.experiments.oracle import draw
from labkit.experiments.sections import fractions
from labkit.experiments.sweep import Case
from labkit.kernels.cross_entropy import cross_entropy, linear_cross_entropy
from labkit.kernels.fused import wide
from labkit.kernels.gelu_mlp import gelu_mlp
from labkit.kernels.layer_norm import layer_norm
from labkit.kernels.rms_norm import rms_norm
from labkit.kernels.rotary import rotary
from labkit.kernels.swiglu import swiglu
from labkit.models.transformer import RotaryEmbedding

PASSES = ("forward", "forward_backward")
IN_PLACE = "ours_in_place"
"""Ours on a copy of the logits, as Liger's is run: both overwrite them by their gradient."""

EPS, VOCABULARY, HEAD = 1e-6, 10_000, 64


@dataclass(frozen=True)
class Operation:
    """What is computed, of tensors whose shapes follow from (rows, columns).

    Attributes:
        shapes: of the tensors to differentiate by; others: (rows, columns, device) → what comes
            after them.
        elements: read and written of each of the first tensor's, forward and backward; flops:
            (rows, columns) → FLOPs of a forward pass, where products bound the operation.
        passes: without "forward" where a forward pass computes the gradients too.
    """

    ours: Callable
    formula: Callable
    shapes: Callable[[int, int], Sequence[tuple[int, ...]]]
    elements: tuple[int, int] = (0, 0)
    flops: Callable[[int, int], int] | None = None
    others: Callable[..., tuple] = lambda *_: ()
    passes: tuple[str, ...] = PASSES


def _rms_norm(x, weight, residual):
    total = x + residual
    in_fp32 = wide(total)
    return (in_fp32 * torch.rsqrt(in_fp32.square().mean(-1, keepdim=True) + EPS) * weight).to(
        x.dtype
    ), total


def _layer_norm(x, weight, bias, residual):
    total = x + residual
    return F.layer_norm(total, weight.shape, weight, bias, EPS), total


def _cross_entropy(logits, targets):
    return F.cross_entropy(wide(logits), targets)


def _targets(rows: int, num_classes: int, device: str) -> tuple[Tensor]:
    return (
        torch.randint(num_classes, (rows,), generator=torch.Generator().manual_seed(1)).to(device),
    )


def _mlp(x, w1, b1, w2, b2):
    return F.linear(F.gelu(F.linear(x, w1, b1), approximate="tanh"), w2, b2)


def _norm_shapes(num_vectors: int) -> Callable:
    return lambda rows, columns: [(rows, columns), *num_vectors * [(columns,)], (rows, columns)]


HIDDEN = 4304 / 1152
"""Of the MLP, over its width: that of SigLIP 2."""


def _mlp_shapes(rows: int, columns: int) -> list[tuple[int, ...]]:
    hidden = round(HIDDEN * columns) // 8 * 8
    return [(rows, columns), (hidden, columns), (hidden,), (columns, hidden), (columns,)]


OPERATIONS = {
    "rms_norm": Operation(
        lambda x, w, r: rms_norm(x, w, EPS, r), _rms_norm, _norm_shapes(1), elements=(4, 4)
    ),
    "layer_norm": Operation(
        lambda x, w, b, r: layer_norm(x, w, b, EPS, r),
        _layer_norm,
        _norm_shapes(2),
        elements=(4, 4),
    ),
    "swiglu": Operation(
        swiglu, lambda gate, up: F.silu(gate) * up, lambda n, c: [(n, c), (n, c)], elements=(3, 5)
    ),
    "rotary": Operation(
        lambda q, k, turn: rotary(q.transpose(1, 2), k.transpose(1, 2), turn.cos_TD, turn.sin_TD),
        lambda q, k, turn: (turn(q.transpose(1, 2)), turn(k.transpose(1, 2))),
        lambda n, c: 2 * [(1, n, c // HEAD, HEAD)],
        elements=(4, 4),
        others=lambda n, c, device: (RotaryEmbedding(HEAD, n, 10_000.0, device),),
    ),
    "cross_entropy": Operation(
        cross_entropy, _cross_entropy, lambda n, c: [(n, c)], elements=(1, 2), others=_targets
    ),
    "linear_cross_entropy": Operation(
        linear_cross_entropy,
        lambda h, w, t: _cross_entropy(h @ w.T, t),
        lambda n, c: [(n, c), (VOCABULARY, c)],
        flops=lambda n, c: 2 * n * c * VOCABULARY,
        passes=PASSES[1:],
        others=lambda n, c, device: _targets(n, VOCABULARY, device),
    ),
    "gelu_mlp": Operation(
        gelu_mlp, _mlp, _mlp_shapes, flops=lambda n, c: 4 * n * c * _mlp_shapes(n, c)[2][0]
    ),
}


def kernel_cases(
    kernels: Sequence[tuple], impls: Sequence[str], precision: str, limits: dict
) -> list[Case]:
    """Returns a case within these limits for each (operation, rows, columns)."""
    result = []
    for name, rows, columns in kernels:
        entrants = [*impls, *([IN_PLACE] if name == "cross_entropy" else [])]
        phases = tuple(f"{impl} {which}" for which in OPERATIONS[name].passes for impl in entrants)
        parameters = {"operation": name, "rows": rows, "columns": columns, "precision": precision}
        result.append(Case("kernels", parameters, phases, **limits))
    return result


class FusedContest(Contest):
    """One operation on tensors of one shape; ratios are to ours."""

    baseline = "ours"

    def __init__(self, device: Device, case: Case, ceilings: dict[str, float]):
        super().__init__(device, case, ceilings)
        rows, columns, precision = (
            self.parameters[name] for name in ("rows", "columns", "precision")
        )
        self.operation, self.shape = OPERATIONS[self.parameters["operation"]], (rows, columns)
        shapes = self.operation.shapes(rows, columns)
        self.gradient_names = tuple(f"d{number}" for number in range(len(shapes)))
        drawn = draw(device.kind, precision, *shapes)
        # A weight matrix as it is initialised, so that a product is of the size of its input.
        scaled = [
            x * x.shape[-1] ** -0.5 if number and x.dim() == 2 and x.shape != shapes[0] else x
            for number, x in enumerate(drawn)
        ]
        self.inputs = tuple(x.requires_grad_() for x in scaled)
        self.others = self.operation.others(rows, columns, device.kind)
        with torch.no_grad():
            outs = _outputs(self.operation.formula(*self.inputs, *self.others))
        torch.manual_seed(2)
        self.grad_out = tuple(torch.randn_like(x) if x.dim() else torch.ones_like(x) for x in outs)

    def unavailable(self, impl: str) -> str | None:
        if impl == "compiled" and self.device.kind != "cuda":
            return "is compiled on a GPU only"
        if impl in PACKAGES:
            package, operations, _ = PACKAGES[impl]
            if self.parameters["operation"] not in operations:
                return f"{package} has no operation that does the same"
            if self.device.kind != "cuda" or importlib.util.find_spec(package) is None:
                return f"{package} is not installed, or there is no GPU"
        return None

    @functools.cached_property
    def _functions(self) -> dict[str, Callable]:
        return {
            "ours": self.operation.ours,
            IN_PLACE: lambda logits, targets: cross_entropy(logits.clone(), targets, inplace=True),
            "eager": self.operation.formula,
            "compiled": torch.compile(
                self.operation.formula,
                mode="max-autotune-no-cudagraphs",
                fullgraph=True,
                dynamic=False,
            ),
        }

    def forward(self, impl: str) -> Tensor | tuple[Tensor, ...]:
        of_package = impl in PACKAGES
        function = (
            PACKAGES[impl][2](self.parameters["operation"]) if of_package else self._functions[impl]
        )
        return function(*self.inputs, *self.others)

    def both(self, impl: str) -> tuple[Tensor, ...]:
        # A loss may come as fp32 or as its logits do.
        outs = _outputs(self.forward(impl))
        grads = [grad.to(x.dtype) for grad, x in zip(self.grad_out, outs, strict=True)]
        return torch.autograd.grad(outs, self.inputs, grads)

    @functools.cached_property
    def _expected(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Results of the formula in fp64 and in the inputs' dtype."""
        found = []
        for dtype in (torch.float64, self.inputs[0].dtype):
            leaves = [x.detach().to(dtype).requires_grad_() for x in self.inputs]
            outs = _outputs(self.operation.formula(*leaves, *self.others))
            grads = torch.autograd.grad(
                outs, leaves, [g.to(x.dtype) for g, x in zip(self.grad_out, outs, strict=True)]
            )
            values = dict(zip(self.gradient_names, grads, strict=True))
            values |= {f"out{number}": x.detach() for number, x in enumerate(outs)}
            found.append({name: value.double() for name, value in values.items()})
        return tuple(found)

    def verdict(self, name: str, value: Tensor | tuple[Tensor, ...]) -> numerics.Verdict:
        named = (
            {f"out{place}": x for place, x in enumerate(_outputs(value))}
            if name == "out"
            else {name: value}
        )
        # What is computed from numbers of 16 bits is as exact as those, whatever its own dtype.
        verdicts = [
            numerics.judge(
                name,
                *(_rows(x) for x in (value, *(e[key] for e in self._expected))),
                dtype=self.inputs[0].dtype,
                num_terms=max(self.shape),
            )
            for key, value in named.items()
        ]
        return max(verdicts, key=lambda verdict: verdict.budget_fraction)

    def described(self) -> dict:
        rows, columns = self.inputs[0].reshape(self.shape[0], -1).shape
        precision = numerics.live_precision(self.inputs[0].dtype)
        return {
            "operation": self.parameters["operation"],
            "rows": rows,
            "columns": columns,
            "precision": precision,
        }

    def rates(self, impl: str, name: str, median_ms: float) -> dict:
        seconds, (forward, backward) = median_ms * 1e-3, self.operation.elements
        if self.operation.flops:
            flops = self.operation.flops(*self.shape) * (1 if name == "forward" else 3)
            rate, precision = flops / seconds / 1e12, self.parameters["precision"]
            peak = self.device.peaks.tflops(precision) if self.device.peaks else None
            ceiling = self.ceilings.get(f"gemm {precision}")
            return {"flops": flops, "achieved_tflops": rate, **fractions(rate, ceiling, peak)}
        num_bytes = (forward + backward * (name != "forward")) * self.inputs[0].nbytes
        rate, peak = (
            num_bytes / seconds / 1e9,
            self.device.peaks.memory_gb_per_s if self.device.peaks else None,
        )
        return {
            "num_bytes": num_bytes,
            "achieved_gb_per_s": rate,
            **fractions(rate, self.ceilings.get("copy"), peak),
        }


def _outputs(out: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return out if isinstance(out, tuple) else (out,)


def _rows(x: Tensor) -> Tensor:
    """Returns x with two dimensions, a vector as one row, in fp64."""
    return x.detach().double().reshape(-1, x.shape[-1] if x.dim() else 1)


@functools.cache
def _liger(name: str) -> Callable:
    from liger_kernel.transformers import functional as liger

    if name == "rms_norm":
        return lambda x, w, r: liger.liger_fused_add_rms_norm(x, r, w, EPS, in_place=False)
    if name == "linear_cross_entropy":
        return liger.liger_fused_linear_cross_entropy
    if name == "cross_entropy":  # it overwrites its logits
        return lambda logits, targets: liger.liger_cross_entropy(logits.clone(), targets)
    return liger.liger_swiglu


@functools.cache
def _quack(_name: str) -> Callable:
    import quack

    return lambda x, w, r: quack.rmsnorm(x, w, residual=r, eps=EPS, prenorm=True)


PACKAGES = {
    "liger": (
        "liger_kernel",
        ("rms_norm", "swiglu", "cross_entropy", "linear_cross_entropy"),
        _liger,
    ),
    "quack": ("quack", ("rms_norm",), _quack),
}
"""Others' packages by implementation: what to import, the operations that it has, and what gives
their functions.
"""
