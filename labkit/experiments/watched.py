"""Operations whose implementations `labkit bench` watches, before and while they are timed.

An implementation of attention or of an operation on rows is a function of tensors. One of a model
makes a module, which is held to a copy of itself; one of an optimizer is held to AdamW in fp64 over
all the steps that it has made.
"""

import copy
import functools
import itertools
import math
import secrets
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from labkit import accounting, numerics
from labkit.configs import ModelConfig
from labkit.device import Device
from labkit.experiments.contest import (
    Operation,
    Tensors,
    as_tuple,
    draw,
    fp64_device,
)
from labkit.experiments.operations import (
    IMPLEMENTATIONS,
    new_attention,
    row_operation,
)
from labkit.experiments.sweep import Refused
from labkit.measure.timing import Timing, synchronize
from labkit.models.transformer import TransformerLM, language_model_loss

LARGEST_CACHE = 2**28
"""Bytes below which a call may stay in a cache, and have no floor by the memory's rate."""

CEILING_MARGIN = 2
"""How much faster than the session's ceiling a call may be: on a busy machine that is too low. None
is ever faster than the datasheet.
"""

LATE_S = 0.3
"""How long a wrong result is waited for, to tell a late one."""

MODEL_PASSES = ("forward", "forward_backward", "train_step")

ADAMW = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-15, "weight_decay": 0.1}
"""Of an optimizer's contest: a step that is left out, or decays otherwise, is far from AdamW's; ε
is so small that it does not matter whether it is added before v is corrected or after.
"""

ADAMW_BYTES = 28
"""A step reads a parameter, its gradient and two moments, and writes all but the gradient, fp32."""


@dataclass
class Watched(Operation):
    """An operation with other inputs at every round, which watches what its implementations do.

    Attributes:
        kept: the last outputs by (implementation, pass); a CUDA graph writes them again.
        refusals: why a phase gets no time.
        live: what was made of an implementation, where it makes something.
    """

    kept: dict[tuple[str, str], Tensors] = field(default_factory=dict)
    refusals: dict[str, str] = field(default_factory=dict)
    live: dict[str, tuple] = field(default_factory=dict)

    is_in_place = False
    """Whether a call goes on from what the one before it left, and returns that."""

    num_judged = 2
    """Calls that are judged before any is timed."""

    def __post_init__(self):
        super().__post_init__()
        tensors = (*self.inputs.values(), *self.others, *self.grad_outs)
        self.tensors = [x for x in tensors if isinstance(x, Tensor)]

    def renew(self) -> None:
        """Moves the numbers of every tensor to other places in it, which nobody can foresee."""
        self.__dict__.pop("expected", None)
        for x in self.tensors:
            places = 1 + secrets.randbelow(max(x.numel() - 1, 1))
            values = x.data.flatten().roll(places)
            # As data: autograd would take it for a mistake.
            x.data.copy_(values.view_as(x))

    def run(self, impl: str, name: str) -> Callable[[], Tensors]:
        """Returns a pass as a function of nothing."""
        return super().call(impl, name)

    def worst(self, impl: str, name: str, values: Tensors) -> numerics.Verdict:
        """Returns the worst verdict on what a pass gave; raises AssertionError for a wrong one."""
        return max(self._verdicts(impl, name, values), key=lambda one: one.budget_fraction)

    def _verdicts(self, impl: str, name: str, values: Tensors) -> list[numerics.Verdict]:
        return self.verdicts(name, values)

    def call(self, impl: str, name: str) -> Callable[[], Tensors]:
        """Returns a pass as a function of nothing; what it gives is kept."""
        run = self.run(impl, name)

        def kept() -> Tensors:
            self.kept[impl, name] = values = run()
            return values

        return kept

    def judge(self, impl: str, name: str) -> numerics.Verdict:
        """Returns the worst verdict on a pass.

        Raises Refused for a wrong result, for none, and for one that is not computed by the call,
        from its inputs, into memory of its own.
        """
        self._check_call(impl)
        run = self.run(impl, name)
        earlier = ()
        for _ in range(self.num_judged):
            if self.device.kind == "cuda":
                # The copies below wait for it. Work on another stream that does not wait reads old
                # inputs; work that does ends after the copies.
                torch.cuda._sleep(10**8)
            self.renew()
            inputs = [x.detach().clone() for x in self.tensors]
            values = run()
            copies = [x.detach().clone() for x in values]
            synchronize(self.device.kind)
            for owner, tensors in (("its inputs", self.tensors), ("an earlier call", earlier)):
                if _storages(values) & _storages(tensors):
                    raise Refused(f"its output lies in the memory of {owner}")
            if not _are_equal(inputs, self.tensors):
                raise Refused("it changes its inputs")
            try:
                verdict = self.worst(impl, name, copies)
            except AssertionError as error:
                time.sleep(LATE_S)
                if not _are_equal(copies, values):
                    raise Refused("its work goes on after it has returned") from None
                if earlier:
                    raise Refused("its second result is not that of its inputs: a cache") from None
                raise Refused(str(error)) from None
            if not self.is_in_place:
                _poison(values)
                earlier = values
        return verdict

    def _check_call(self, impl: str) -> None:
        try:
            outs = self.outputs(impl)
        except TypeError as error:
            arguments = ", ".join((*self.inputs, *map(_described, self.others), *self.options))
            raise Refused(f"{error}; it is called with {arguments}") from None
        got, expected = (", ".join(map(_described, values)) for values in (outs, self.grad_outs))
        if got != expected:
            raise Refused(f"it must return {expected}; got {got}")

    def rounds(self, num_rounds: int) -> Iterable:
        """Returns what renews the inputs before each round, and judges what it gave after it."""
        self.kept.clear()  # before anything of this timing is called
        return self._rounds(num_rounds)

    def _rounds(self, num_rounds: int) -> Iterator[None]:
        for _ in range(num_rounds):
            for values in self.kept.values() if not self.is_in_place else ():
                _poison(values)
            self.renew()
            yield
            for (impl, name), values in self.kept.items():
                try:
                    self.worst(impl, name, values)
                except AssertionError:
                    reason = "its outputs are wrong, or not written, while it is timed"
                    self.refusals[f"{impl} {name}"] = reason
        self.kept.clear()

    def confirm(self, phase: str, timing: Timing, metrics: dict) -> None:
        """Adds the mean and the standard deviation of the times to the metrics.

        Raises Refused for a phase that was wrong while it was timed, or faster than can be.
        """
        metrics |= spread(timing.samples_ms)
        if metrics.get("num_bytes", math.inf) < LARGEST_CACHE:
            metrics |= {"ceiling_fraction": None, "datasheet_fraction": None}
        reason = self.refusals.get(phase)
        if not reason and (metrics["ceiling_fraction"] or 0) > CEILING_MARGIN:
            reason = "its time is below the roofline's floor"
        if reason:
            raise Refused(reason)


@dataclass
class WatchedModel(Watched):
    """Training steps of language models, each on the same tokens and targets.

    A model is held to a copy of itself that was made before its first call, in fp64 where it runs
    in that. `options` are what it is made with.
    """

    def __post_init__(self):
        batch, context, vocabulary = self.grad_outs[0].shape
        self.tensors = [
            torch.randint(vocabulary, (batch, context), device=self.device.kind) for _ in range(2)
        ]
        self.before: dict[tuple[str, str], Tensors] = {}

    @property
    def dtype(self) -> torch.dtype:
        return numerics.tensor_dtype(self.precision)

    def outputs(self, impl: str) -> tuple[Tensor, ...]:
        return tuple(out.to(self.dtype) for out in self.run(impl, "forward")())

    def run(self, impl: str, name: str) -> Callable[[], Tensors]:
        model, optimizer, _ = self._made(impl)
        return functools.partial(self._pass, model, name, optimizer)

    def _made(self, impl: str) -> tuple[nn.Module, torch.optim.Optimizer, nn.Module]:
        if impl not in self.live:
            torch.manual_seed(0)
            model = self.implementations[impl].function(**self.options)
            if not isinstance(model, nn.Module):
                raise Refused(f"it must make a torch.nn.Module; got {type(model).__name__}")
            model.to(self.device.kind)
            number = sum(p.numel() for p in model.parameters())
            if number != self.terms["parameters"]:
                raise Refused(
                    f"these dimensions have {self.terms['parameters']:,} parameters, untied and "
                    f"without biases; it has {number:,}"
                )
            # Steps of length 0: the weights stay those of the copy.
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
            self.live[impl] = model, optimizer, copy.deepcopy(model)
        return self.live[impl]

    def _pass(
        self,
        model: nn.Module,
        name: str,
        optimizer: torch.optim.Optimizer | None = None,
        is_exact: bool = False,
    ) -> Tensors:
        """Returns the logits of "forward", the gradients of another pass."""
        tokens, targets = self.tensors
        model.zero_grad()
        is_cast = self.dtype == torch.bfloat16 and not is_exact
        with torch.autocast(self.device.kind, torch.bfloat16, enabled=is_cast):
            logits = model(tokens)
            if name == "forward":
                return as_tuple(logits)
            loss = language_model_loss(logits, targets)
        loss.backward()
        if optimizer and name == "train_step":
            optimizer.step()
        gradients = [p.grad for p in model.parameters()]
        if None in gradients:
            raise Refused("it must give every parameter a gradient")
        return gradients

    def _verdicts(self, impl: str, name: str, values: Tensors) -> list[numerics.Verdict]:
        *_, untouched = self._made(impl)
        eager = self._pass(copy.deepcopy(untouched), name)
        if name == "forward" and impl in self.before and _are_equal(self.before[impl], eager):
            raise AssertionError("wrong: other tokens, the same logits")
        self.before[impl] = eager
        names = ["out" if name == "forward" else "gradient"] * len(values)
        try:
            exact = self._pass(in_fp64(untouched), name, is_exact=True)
        except torch.OutOfMemoryError:
            raise
        except Exception:  # some kernels take no fp64
            verdicts = self.compared(names, values, *2 * [_wide(eager)])
            return [numerics.Verdict(None, None, one.budget_fraction) for one in verdicts]
        return self.compared(names, values, _wide(exact), _wide(eager))


def in_fp64(model: nn.Module) -> nn.Module:
    """Returns a copy; of ours, whose kernels take no fp64, the eager model."""
    if isinstance(model, TransformerLM):
        plain = TransformerLM(
            model.config, max_context=model.max_context, device=next(model.parameters()).device
        )
        plain.load_state_dict(model.state_dict())
        return plain.double()
    return copy.deepcopy(model).double()


class StepFunction:
    """A function of AdamW's step as an optimizer, which holds its state."""

    def __init__(self, function: Callable, params: Sequence[Tensor], **options):
        self.function = function
        self.params = params
        self.options = options
        self.moments = [[torch.zeros_like(p) for p in params] for _ in range(2)]
        self.num_steps = 0

    @torch.no_grad()
    def step(self) -> None:
        self.num_steps += 1
        grads = [p.grad for p in self.params]
        self.function(self.params, grads, *self.moments, self.num_steps, **self.options)


@dataclass
class WatchedOptimizer(Watched):
    """AdamW's step on fp32 parameters, each implementation's own, and on gradients that all share.

    They are held to PyTorch's in fp64, after as many steps on the same gradients.
    """

    is_in_place = True
    num_judged = 5

    def __post_init__(self):
        super().__post_init__()
        self.renew()

    def renew(self) -> None:
        super().renew()
        self.gradients = [x.clone() for x in self.tensors]

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    def outputs(self, impl: str) -> Tensors:
        return self.run(impl, "step")()

    def run(self, impl: str, name: str) -> Callable[[], Tensors]:
        params, optimizer, steps, _ = self._made(impl)

        def step() -> Tensors:
            steps.append(self.gradients)
            optimizer.step()
            return params

        return step

    def _made(self, impl: str) -> tuple[list, torch.optim.Optimizer, list, dict]:
        """Returns its parameters, the optimizer, the gradients of the steps that PyTorch's have not
        made, and these by their decay, in fp64 and fp32.

        A course decays after the update, PyTorch before it: either is AdamW.
        """
        if impl not in self.live:
            shapes = [x.shape for x in self.tensors]
            starts = [0.02 * x for x in draw(self.device.kind, "fp32", *shapes)]
            place = fp64_device(self.device.kind)

            def copied(**dtype: Any) -> list[nn.Parameter]:
                return [nn.Parameter(x.to(copy=True, **dtype)) for x in starts]

            params = copied()
            for p, grad in zip(params, self.tensors, strict=True):
                p.grad = grad
            optimizer = self.implementations[impl].function(params, **ADAMW)
            held_to = {}
            for decay in (ADAMW["weight_decay"], 0):
                options = ADAMW | {"weight_decay": decay}
                sides = copied(device=place, dtype=torch.float64), copied()
                held_to[decay] = [torch.optim.AdamW(side, **options) for side in sides]
            self.live[impl] = params, optimizer, [], held_to
        return self.live[impl]

    @torch.no_grad()
    def _verdicts(self, impl: str, name: str, values: Tensors) -> list[numerics.Verdict]:
        *_, steps, held_to = self._made(impl)
        for decay, pair in held_to.items():
            for gradients, optimizer in itertools.product(steps, pair):
                params = optimizer.param_groups[0]["params"]
                for p, grad in zip(params, gradients, strict=True):
                    p.grad = grad.to(p)
                optimizer.step()
                if not decay:
                    torch._foreach_mul_(params, 1 - ADAMW["lr"] * ADAMW["weight_decay"])
        steps.clear()
        failure = None
        for pair in held_to.values():
            sides = (_wide(one.param_groups[0]["params"]) for one in pair)
            try:
                return self.compared(["out"] * len(values), values, *sides)
            except AssertionError as error:
                failure = error
        raise failure


# ---- the operation of a case ---------------------------------------------------------------------


def new_model(device: Device, parameters: dict) -> WatchedModel:
    """Returns the passes of a language model of a case's dimensions."""
    config = model_of(parameters)
    batch, context, precision = (parameters[name] for name in ("batch", "context", "precision"))
    shape = (batch, context, config.vocab_size)
    number = accounting.num_parameters(config)
    size = (config, batch, context)
    return WatchedModel(
        device,
        precision,
        inputs={},
        grad_outs=[torch.empty(shape, dtype=numerics.tensor_dtype(precision), device=device.kind)],
        formula=None,
        costs={
            name: {"flops": accounting.phase_flops(*size, name, causal=False)}
            for name in MODEL_PASSES
        },
        terms={"out": config.d_ff, "gradient": batch * context, "parameters": number},
        implementations=IMPLEMENTATIONS["model"],
        baseline="ours",
        options={
            "vocab_size": config.vocab_size,
            "context_length": context,
            "d_model": config.d_model,
            "num_layers": config.num_layers,
            "num_heads": config.num_heads,
            "d_ff": config.d_ff,
            "rope_theta": config.rope_theta,
        },
        method="window",
        num_warmup=parameters["warmup"],
        num_rounds=parameters["steps"],
    )


def model_of(parameters: dict) -> ModelConfig:
    """Returns the model of a case's dimensions."""
    sizes = (parameters[name] for name in ("d_model", "d_ff", "layers", "heads"))
    return ModelConfig("bench", "a case's dimensions", *sizes)


def new_optimizer(device: Device, parameters: dict) -> WatchedOptimizer:
    """Returns AdamW's step on a matrix, a vector as long as its rows and one as its columns."""
    rows, columns = parameters["rows"], parameters["columns"]
    grads = draw(device.kind, "fp32", (rows, columns), (columns,), (rows,))
    taken = ["params"]
    if parameters["operation"] == "adamw":
        taken += ["grads", "exp_avgs", "exp_avg_sqs", "step"]
    num_bytes = ADAMW_BYTES * sum(x.numel() for x in grads)
    return WatchedOptimizer(
        device,
        "fp32",
        inputs={},
        grad_outs=grads,
        formula=None,
        costs={"step": {"num_bytes": num_bytes}},
        terms={"out": 1},
        implementations=IMPLEMENTATIONS["optimizer"],
        baseline="ours",
        options=dict.fromkeys([*taken, *ADAMW]),
        method="flush",
    )


def watched(device: Device, parameters: dict) -> Watched:
    """Returns the operation of a case, which is attention where it names none."""
    operation = parameters.get("operation", "attention")
    if operation == "model":
        return new_model(device, parameters)
    if operation in ("adamw", "optimizer"):
        return new_optimizer(device, parameters)
    new = new_attention if operation == "attention" else row_operation
    return Watched(**vars(new(device, parameters)) | {"baseline": "ours"})


# ---- tensors -------------------------------------------------------------------------------------


def spread(samples_ms: Sequence[float]) -> dict[str, float]:
    """Returns the metrics that a course asks of times: their mean and standard deviation."""
    return {"mean_ms": statistics.fmean(samples_ms), "std_ms": statistics.stdev(samples_ms)}


def _storages(tensors: Iterable[Tensor]) -> set[int]:
    return {x.untyped_storage().data_ptr() for x in tensors}


def _wide(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [x.detach().double() for x in tensors]


def _are_equal(some: Tensors, others: Tensors) -> bool:
    # What is no number equals itself.
    return all(
        torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(some, others, strict=True)
    )


def _poison(tensors: Tensors) -> None:
    """Makes every number no number, whatever its format."""
    for x in tensors:
        x.untyped_storage().fill_(0xFF)


def _described(x: object) -> str:
    if not isinstance(x, Tensor):
        return type(x).__name__
    # A loss may come as fp32 or as its logits do.
    return f"{x.dtype if x.dim() else 'a loss'} {tuple(x.shape)} on {x.device.type}"
