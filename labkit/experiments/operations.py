"""The operations of the chapters' contests, and their implementations: ours, PyTorch's, others'.

One more implementation is one line, in any module that is imported before a session is opened:

    operations.register("swiglu", "mine", my_swiglu)

It then is in every case of that operation, held to the same gate and timed in turn with the others.
So is what an installed package offers under the entry point "swiglu:mine" of ENTRY_POINTS.
An operation is given by its tensors and its formula. Ideal bytes are those that must be read and
written once; the ceiling is the session's copy, or its matrix product where products bound the
operation.
"""

import copy
import functools
import importlib.metadata
import importlib.util
import inspect
import logging
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from labkit import accounting
from labkit.configs import PASSES, ModelConfig, check_known
from labkit.device import Device
from labkit.experiments.contest import (
    Implementation,
    Operation,
    Tensors,
    are_equal,
    as_tuple,
    attention_formula,
    draw,
)
from labkit.experiments.sections import Plan, empty_cache
from labkit.experiments.sweep import Refused
from labkit.kernels import flash_attention as labkit_flash
from labkit.kernels.adamw import FusedAdamW
from labkit.kernels.attention import IMPLS, attention, unavailable_reason
from labkit.kernels.cross_entropy import cross_entropy, linear_cross_entropy
from labkit.kernels.fused import wide
from labkit.kernels.gelu_mlp import gelu_mlp
from labkit.kernels.norms import layer_norm, rms_norm
from labkit.kernels.rotary import rotary
from labkit.kernels.swiglu import swiglu
from labkit.models.transformer import RotaryEmbedding, TransformerLM, language_model_loss

EPS, VOCABULARY, HEAD = 1e-6, 10_000, 64

ENTRY_POINTS = "labkit.implementations"

HIDDEN = 4304 / 1152
"""Of the MLP, over its width: that of SigLIP 2."""


def register(operation: str, name: str, function: Callable) -> None:
    """Adds an implementation to every case of an operation, of cases that are made from then on.

    Args:
        operation: one of IMPLEMENTATIONS.
        name: of the implementation, in records and tables.
        function: of a module that a worker can import, where this is called again; takes what the
            operation's formula takes (attention: q, k, v and `causal`); differentiable.

    Raises ValueError for an unknown operation, and for a name that is taken or has a space.
    """
    check_known("operation", operation, IMPLEMENTATIONS)
    taken = IMPLEMENTATIONS[operation]
    if name in taken or " " in name:
        raise ValueError(
            f"name must be new and without a space, got {name!r}; taken: {', '.join(taken)}"
        )
    taken[name] = Implementation(function, module=function.__module__)


def add_contest(
    plan: Plan,
    section: str,
    operation: str,
    parameters: dict,
    impls: Sequence[str],
    passes: Sequence[str] = PASSES,
    **options,
) -> None:
    """Adds the case of a contest of `impls` and of all registered ones."""
    registered = IMPLEMENTATIONS[operation].items()
    modules = {name: each.module for name, each in registered if each.module}
    entrants = dict.fromkeys((*impls, *modules))
    phases = (f"{impl} {name}" for name in passes for impl in entrants)
    plan.add(section, parameters, *phases, modules=tuple(modules.values()), **options)


# ---- attention -----------------------------------------------------------------------------------


SHAPE = ("batch", "heads", "length", "d_head", "causal", "precision")
"""What a case of attention is given by."""


def new_attention(device: Device, parameters: dict) -> Operation:
    """Returns attention on one shape, without a dimension of heads where no "heads" are given;
    ratios are to what "auto" runs there.
    """
    empty_cache()
    *size, causal, precision = (parameters[name] for name in SHAPE if name in parameters)
    q, k, v, grad_out = draw(device, precision, *4 * [size])
    baseline = labkit_flash.resolve_impl(q)
    length = size[-2]
    call = (math.prod(size[:-2]), *size[-2:])
    return Operation(
        device,
        precision,
        inputs={"q": q, "k": k, "v": v},
        grad_outs=[grad_out],
        formula=functools.partial(attention_formula, causal=causal),
        costs={
            name: {
                "flops": accounting.attention_call_flops(name, *call, causal=causal),
                # Some kernels multiply fp32 as several products of TF32, and the peak of plain fp32
                # is not theirs.
                "peak_precision": "tf32" if precision == "fp32" else precision,
            }
            for name in PASSES
        },
        terms={"out": length},
        implementations=IMPLEMENTATIONS["attention"],
        baseline=baseline,
        options={"causal": causal},
    )


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


def _rotary(q, k, turn):
    return turn(q.transpose(1, 2)), turn(k.transpose(1, 2))


def _cross_entropy(logits, targets):
    return F.cross_entropy(wide(logits), targets)


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
    "rms_norm": Definition(
        _rms_norm, lambda x, weight, residual: rms_norm(x, weight, EPS, residual), (4, 4)
    ),
    "layer_norm": Definition(
        _layer_norm,
        lambda x, weight, bias, residual: layer_norm(x, weight, bias, EPS, residual),
        (4, 4),
    ),
    "swiglu": Definition(lambda gate, up: F.silu(gate) * up, swiglu, (3, 5)),
    "rotary": Definition(
        _rotary,
        lambda q, k, turn: rotary(q.transpose(1, 2), k.transpose(1, 2), turn.cos_TD, turn.sin_TD),
        (4, 4),
    ),
    "cross_entropy": Definition(_cross_entropy, cross_entropy, (1, 2)),
    "linear_cross_entropy": Definition(
        lambda x, classes, targets: _cross_entropy(x @ classes.T, targets),
        linear_cross_entropy,
        passes=("forward_backward",),
    ),
    "gelu_mlp": Definition(
        lambda x, w1, b1, w2, b2: F.linear(F.gelu(F.linear(x, w1, b1), approximate="tanh"), w2, b2),
        gelu_mlp,
    ),
}


def row_operation(device: Device, parameters: dict) -> Operation:
    """Returns an operation of DEFINITIONS on tensors of one shape; ratios are to ours."""
    name, precision = parameters["operation"], parameters["precision"]
    rows, columns = parameters["rows"], parameters["columns"]
    check_known("operation", name, DEFINITIONS)
    definition, shapes = DEFINITIONS[name], shapes_of(rows, columns)
    arguments = inspect.signature(definition.formula).parameters
    names = [argument for argument in arguments if argument in shapes]
    tensors = draw(device, precision, *(shapes[each] for each in names))
    matrices = [x for x in tensors if x.dim() == 2 and x.shape != (rows, columns)]
    for matrix in matrices:
        # As it is initialised, so that a product is of its input's size.
        matrix *= matrix.shape[-1] ** -0.5
    others: tuple = ()
    if "targets" in arguments:
        num_classes = VOCABULARY if matrices else columns
        generator = torch.Generator().manual_seed(1)
        others = (torch.randint(num_classes, (rows,), generator=generator).to(device.kind),)
    if "turn" in arguments:
        others = (RotaryEmbedding(HEAD, rows, 10_000.0).to(device.kind),)
    outs = as_tuple(definition.formula(*tensors, *others))
    torch.manual_seed(2)
    unit = "num_bytes"
    forward, backward = (number * tensors[0].nbytes for number in definition.elements)
    if matrices:
        unit = "flops"
        forward = 2 * rows * sum(matrix.numel() for matrix in matrices)
        backward = 2 * forward
    return Operation(
        device,
        precision,
        inputs=dict(zip(names, tensors, strict=True)),
        grad_outs=[torch.randn_like(x) if x.dim() else torch.ones_like(x) for x in outs],
        formula=lambda *inputs, dtype: definition.formula(*(x.to(dtype) for x in inputs), *others),
        costs={"forward": {unit: forward}, "forward_backward": {unit: forward + backward}},
        terms={"out": max(rows, columns)},
        implementations=IMPLEMENTATIONS[name],
        others=others,
    )


# ---- what is made, and stays from call to call ---------------------------------------------------


MODEL = ("d_model", "d_ff", "num_layers", "num_heads")
MODEL_PASSES = ("forward", "forward_backward", "train_step")

ADAMW = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-15, "weight_decay": 1.0}
"""Of an optimizer's contest, on parameters near 1. What a course does otherwise than PyTorch, to
add ε to v before it is corrected and to decay after the update, changes less than a rounding; a
step that is left out, or does not decay, a thousand.
"""

ADAMW_BYTES = 28
"""A step reads a parameter, its gradient and two moments, and writes all but the gradient, fp32."""


@dataclass
class Made(Operation):
    """An operation whose implementations make something, which stays from call to call.

    Each has twins, the first of them the most exact, which are given the same tensors.
    """

    live: dict[str, tuple[list, list]] = field(default_factory=dict)
    before: dict[tuple[str, str], Tensors] = field(default_factory=dict)

    def renew(self, **options) -> None:
        # In place, those of earlier calls would change, which the twins may yet be given.
        self.tensors = [x.clone() for x in self.tensors]
        super().renew(**options)

    def run(self, impl: str, name: str) -> Callable[[], Tensors]:
        if impl not in self.live:
            self.live[impl] = self.make(self.implementations[impl].function), []
        (own, *_), calls = self.live[impl]

        def call() -> Tensors:
            calls.append(self.tensors)
            return self.act(own, name, self.tensors)

        return call

    def references(self, name: str, impl: str) -> list[Tensors]:
        (_, *twins), calls = self.live[impl]
        results = []
        for twin in twins:
            for tensors in calls if self.is_in_place else calls[-1:]:
                expected = self.act(twin, name, tensors)
            results.append([x.detach().to(torch.float64, copy=True) for x in expected])
        calls.clear()
        before = self.before.get((impl, name))
        self.before[impl, name] = results[0]
        if before and are_equal(before, results[0]):
            raise AssertionError("wrong: other tensors, the same result")
        return [results[0], results[-1]]


@dataclass
class Model(Made):
    """Passes of language models of one size, of logits (batch, context, vocabulary).

    The twin is a copy that was made before the first call.
    """

    num_parameters: int = 0

    def make(self, function: Callable) -> list[tuple]:
        torch.manual_seed(0)
        model = function(**self.options)
        if not isinstance(model, nn.Module):
            raise Refused(f"it must make a torch.nn.Module; got {type(model).__name__}")
        model.to(self.device.kind)
        number = sum(p.numel() for p in model.parameters())
        if number != self.num_parameters:
            expected = f"a gated model without biases has {self.num_parameters:,} parameters"
            raise Refused(f"{expected}, not {number:,}")
        # Steps of length 0: the weights stay those of the twin.
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
        return [(model, optimizer), (copy.deepcopy(model), None)]

    def act(self, made: tuple, name: str, tensors: Tensors) -> Tensors:
        """Returns the logits of "forward", the gradients of another pass."""
        model, optimizer = made
        if not optimizer:
            model = copy.deepcopy(model)  # one that has kept nothing
        tokens, targets = tensors[0]
        model.zero_grad()
        is_cast = self.precision == "bf16"
        with torch.autocast(self.device.kind, torch.bfloat16, enabled=is_cast):
            logits = model(tokens)
            if name == "forward":
                return as_tuple(logits.to(self.dtype) if optimizer else logits)
            loss = language_model_loss(logits, targets)
        loss.backward()
        if optimizer and name == "train_step":
            optimizer.step()
        gradients = [p.grad for p in model.parameters()]
        if None in gradients:
            raise Refused("it must give every parameter a gradient")
        return gradients


class StepFunction:
    """A function of AdamW's step as an optimizer, which holds its state."""

    def __init__(self, function: Callable, params: Sequence[Tensor], **options):
        self.function = functools.partial(function, **options)
        self.moments = [[torch.zeros_like(p) for p in params] for _ in range(2)]
        self.params = params
        self.num_steps = 0

    @torch.no_grad()
    def step(self) -> None:
        self.num_steps += 1
        grads = [p.grad for p in self.params]
        self.function(self.params, grads, *self.moments, self.num_steps)


@dataclass
class Optimizer(Made):
    """AdamW's step on fp32 parameters, each implementation's own; the twins are PyTorch's."""

    is_in_place = True
    num_judged = 5

    def make(self, function: Callable) -> list[tuple]:
        starts = draw(self.device, "fp32", *(x.shape for x in self.tensors))
        made = []
        for optimizer, dtype in (
            (function, torch.float32),
            (torch.optim.AdamW, torch.float64),
            (torch.optim.AdamW, torch.float32),
        ):
            params = [nn.Parameter(x.to(dtype, copy=True)) for x in starts]
            made.append((params, optimizer(params, **ADAMW)))
        return made

    def act(self, made: tuple, name: str, tensors: Tensors) -> Tensors:
        """Returns the parameters after a step on these gradients."""
        params, optimizer = made
        for p, grad in zip(params, tensors, strict=True):
            p.grad = grad.to(p)
        optimizer.step()
        return params


# ---- implementations -----------------------------------------------------------------------------


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

    def unavailable(x: Tensor, *others) -> str | None:
        if function is None:
            return f"{package} has no operation that does the same"
        if not x.is_cuda or importlib.util.find_spec(package) is None:
            return f"{package} is not installed, or there is no GPU"
        return None

    return Implementation(lambda *tensors: function(_load(module), *tensors), unavailable)


@functools.cache
def _compiled(operation: str) -> Callable:
    # Otherwise each tile that does not fit is printed as an error.
    logging.getLogger("torch._inductor.select_algorithm").setLevel(logging.CRITICAL)
    return torch.compile(
        DEFINITIONS[operation].formula,
        fullgraph=True,
        dynamic=False,
        mode="max-autotune-no-cudagraphs",
    )


def _implementations(operation: str) -> dict[str, Implementation]:
    return {
        "ours": Implementation(DEFINITIONS[operation].ours),
        "eager": Implementation(DEFINITIONS[operation].formula),
        "compiled": Implementation(lambda *tensors: _compiled(operation)(*tensors)),
        "liger": _peer("liger_kernel.transformers.functional", LIGER.get(operation)),
        "quack": _peer("quack", QUACK.get(operation)),
    }


def _attention(impl: str) -> Implementation:
    def unavailable(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> str | None:
        return unavailable_reason(impl, q, k, causal=causal)

    return Implementation(functools.partial(attention, impl=impl), unavailable)


IMPLEMENTATIONS = {name: _implementations(name) for name in DEFINITIONS}
IMPLEMENTATIONS["attention"] = {impl: _attention(impl) for impl in IMPLS}
IMPLEMENTATIONS["attention"]["ours"] = _attention("auto")


def _model(impl: str, attention: str) -> Implementation:
    """Returns what makes our model, of the dimensions that a course names."""

    def make(*, context_length: int, **sizes) -> TransformerLM:
        config = ModelConfig("bench", **sizes)
        return TransformerLM(config, max_context=context_length, attention=attention, impl=impl)

    return Implementation(make)


IMPLEMENTATIONS["model"] = {
    "ours": _model("fused", "auto"),
    "eager": _model("eager", "eager"),
    "sdpa": _model("eager", "sdpa"),
}
IMPLEMENTATIONS["optimizer"] = {
    "ours": Implementation(FusedAdamW),
    "torch": Implementation(functools.partial(torch.optim.AdamW, fused=True)),
}
IMPLEMENTATIONS["adamw"] = IMPLEMENTATIONS["optimizer"]
"""By operation and name; `register` adds to them."""


def new_model(device: Device, parameters: dict) -> Model:
    """Returns the passes of a model of the dimensions that a case names."""
    precision = parameters["precision"]
    batch = parameters["batch"]
    context = parameters["context_length"]
    sizes = {name: parameters[name] for name in MODEL}
    config = ModelConfig("bench", **sizes)
    vocab_size = config.vocab_size
    return Model(
        device,
        precision,
        others=(torch.randint(vocab_size, (2, batch, context), device=device.kind),),
        grad_outs=draw(device, precision, (batch, context, vocab_size)),
        costs={
            name: {"flops": accounting.phase_flops(config, batch, context, name, causal=False)}
            for name in MODEL_PASSES
        },
        terms={"out": config.d_ff, "gradient": batch * context},
        implementations=IMPLEMENTATIONS["model"],
        options={
            **sizes,
            "vocab_size": vocab_size,
            "context_length": context,
            "rope_theta": config.rope_theta,
        },
        method="window",
        num_warmup=parameters["warmup"],
        num_rounds=parameters["steps"],
        num_parameters=accounting.num_parameters(config),
    )


def new_optimizer(device: Device, parameters: dict) -> Optimizer:
    """Returns AdamW's step on a matrix and a vector."""
    rows = parameters["rows"]
    columns = parameters["columns"]
    names = ["params"]
    if parameters["operation"] == "adamw":
        names += ["grads", "exp_avgs", "exp_avg_sqs", "step"]
    return Optimizer(
        device,
        "fp32",
        grad_outs=draw(device, "fp32", (rows, columns), (columns,)),
        costs={"step": {"num_bytes": ADAMW_BYTES * (rows + 1) * columns}},
        terms={"out": 1},
        implementations=IMPLEMENTATIONS["optimizer"],
        options=dict.fromkeys([*names, *ADAMW]),
        method="flush",
    )


NEW = {
    "attention": new_attention,
    "model": new_model,
    "optimizer": new_optimizer,
    "adamw": new_optimizer,
}
"""What makes an operation of a device and a case's parameters, by its name; of all others
`row_operation`.
"""


def watched(device: Device, parameters: dict) -> Operation:
    """Returns the operation of a case, watched, which is attention where it names none."""
    new = NEW.get(parameters.get("operation", "attention"), row_operation)
    return replace(new(device, parameters), baseline="ours", is_watched=True)


def _register_installed() -> None:
    """Registers what installed packages offer; each is loaded when it is first called, in a
    worker.
    """
    for entry in importlib.metadata.entry_points(group=ENTRY_POINTS):
        operation, _, name = entry.name.partition(":")
        load = functools.cache(entry.load)
        try:
            register(operation, name, lambda *x, load=load, **options: load()(*x, **options))
        except ValueError as error:
            print(f"labkit: entry point {entry.name!r}: {error}", file=sys.stderr)


_register_installed()
