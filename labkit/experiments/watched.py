"""Operations whose implementations `labkit bench` watches, before and while they are timed.

An implementation of attention or of an operation on rows is a function of tensors. One of a model
makes a module, which is held to a copy of itself; one of an optimizer is held to AdamW in fp64 over
all the steps that it has made.
"""

import copy
import functools
import math
import secrets
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

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
from labkit.models.transformer import language_model_loss

LARGEST_CACHE = 2**28
"""Bytes below which a call may stay in a cache, and have no floor by the memory's rate."""

CEILING_MARGIN = 2
"""How much faster than the session's ceiling a call may be: on a busy machine that is too low. None
is ever faster than the datasheet.
"""

LATE_S = 0.3
"""How long a wrong result is waited for, to tell a late one."""

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
class Watched(Operation):
    """An operation with other inputs at every round, which watches what its implementations do.

    Attributes:
        kept: the last outputs by (implementation, pass); a CUDA graph writes them again.
        refusals: why a phase gets no time.
    """

    kept: dict[tuple[str, str], Tensors] = field(default_factory=dict)
    refusals: dict[str, str] = field(default_factory=dict)
    is_in_place = False
    """Whether a call goes on from what the one before it left, and returns that."""

    first_pass = "forward"
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
        return max(self.verdicts_of(impl, name, values), key=lambda one: one.budget_fraction)

    def verdicts_of(self, impl: str, name: str, values: Tensors) -> list[numerics.Verdict]:
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
            outs = self.run(impl, self.first_pass)()
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
class Made(Watched):
    """An operation whose implementations make something, which stays from call to call.

    Each has two twins, in fp64 and in its own precision, which are given the same tensors.
    """

    live: dict[str, tuple[list, list]] = field(default_factory=dict)
    before: dict[tuple[str, str], Tensors] = field(default_factory=dict)

    def renew(self) -> None:
        super().renew()
        self.given = [x.clone() for x in self.tensors]

    def run(self, impl: str, name: str) -> Callable[[], Tensors]:
        if impl not in self.live:
            self.renew()
            self.live[impl] = self.make(self.implementations[impl].function), []
        (own, *_), calls = self.live[impl]

        def call() -> Tensors:
            calls.append(self.given)
            return self.act(own, name, self.tensors)

        return call

    def verdicts_of(self, impl: str, name: str, values: Tensors) -> list[numerics.Verdict]:
        (_, exact, eager), calls = self.live[impl]
        names = ["out" if name in ("forward", "step") else "gradient"] * len(values)
        given = calls if self.is_in_place else calls[-1:]
        expected = _wide([self.act(eager, name, tensors) for tensors in given][-1])
        try:
            exactly = _wide([self.act(exact, name, tensors) for tensors in given][-1])
        except torch.OutOfMemoryError:
            raise
        except Exception:  # some kernels take no fp64
            exactly = expected
        calls.clear()
        before = self.before.get((impl, name))
        self.before[impl, name] = expected
        if before and _are_equal(before, expected):
            raise AssertionError("wrong: other tensors, the same result")
        verdicts = self.compared(names, values, exactly, expected)
        if exactly is expected:
            return [numerics.Verdict(None, None, one.budget_fraction) for one in verdicts]
        return verdicts


@dataclass
class Model(Made):
    """Passes of language models of one size, of logits (batch, context, vocabulary).

    A twin is a copy that was made before the first call.
    """

    def __post_init__(self):
        batch, context, vocabulary = self.grad_outs[0].shape
        shape = (2, batch, context)  # tokens, and targets
        self.tensors = [torch.randint(vocabulary, shape, device=self.device.kind)]

    def make(self, function: Callable) -> list[tuple]:
        torch.manual_seed(0)
        model = function(**self.options)
        if not isinstance(model, nn.Module):
            raise Refused(f"it must make a torch.nn.Module; got {type(model).__name__}")
        model.to(self.device.kind)
        number = sum(p.numel() for p in model.parameters())
        expected = self.terms["parameters"]
        if number != expected:
            raise Refused(
                f"a gated model without biases has {expected:,} parameters, not {number:,}"
            )
        # Steps of length 0: the weights stay those of the twins.
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
        twins = copy.deepcopy(model).double(), copy.deepcopy(model)
        return [(model, optimizer), *((twin, None) for twin in twins)]

    def act(self, made: tuple, name: str, tensors: Tensors) -> Tensors:
        """Returns the logits of "forward", the gradients of another pass."""
        model, optimizer = made
        if not optimizer:
            model = copy.deepcopy(model)  # one that has kept nothing
        dtype = next(model.parameters()).dtype
        ((tokens, targets),) = tensors
        model.zero_grad()
        is_exact = dtype == torch.float64
        is_cast = self.dtype != dtype and not is_exact
        with torch.autocast(self.device.kind, torch.bfloat16, enabled=is_cast):
            logits = model(tokens)
            if name == "forward":
                return as_tuple(logits if is_exact else logits.to(self.dtype))
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
    first_pass = "step"
    num_judged = 5

    def make(self, function: Callable) -> list[tuple]:
        place = fp64_device(self.device.kind)
        starts = draw(self.device.kind, "fp32", *(x.shape for x in self.tensors))
        made = []
        for optimizer, like in (
            (function, {}),
            (torch.optim.AdamW, {"device": place, "dtype": torch.float64}),
            (torch.optim.AdamW, {}),
        ):
            params = [nn.Parameter(x.to(copy=True, **like)) for x in starts]
            made.append((params, optimizer(params, **ADAMW)))
        return made

    def act(self, made: tuple, name: str, tensors: Tensors) -> Tensors:
        """Returns the parameters after a step on these gradients."""
        params, optimizer = made
        for p, grad in zip(params, tensors, strict=True):
            p.grad = grad.to(p)
        optimizer.step()
        return params


# ---- the operation of a case ---------------------------------------------------------------------


def watched(device: Device, parameters: dict) -> Watched:
    """Returns the operation of a case, which is attention where it names none."""
    operation = parameters.get("operation", "attention")
    precision = parameters["precision"]
    given = {"device": device, "precision": precision, "inputs": {}, "formula": None}
    if operation == "model":
        sizes = {name: parameters[name] for name in MODEL}
        config = ModelConfig("bench", "a case's", **sizes)
        batch, context = parameters["batch"], parameters["context_length"]
        logits = (batch, context, config.vocab_size)
        work = (
            accounting.phase_flops(config, batch, context, name, causal=False)
            for name in MODEL_PASSES
        )
        taken = {"vocab_size": config.vocab_size, "rope_theta": config.rope_theta}
        return Model(
            **given,
            grad_outs=[
                torch.empty(logits, dtype=numerics.tensor_dtype(precision), device=device.kind)
            ],
            costs={name: {"flops": flops} for name, flops in zip(MODEL_PASSES, work, strict=True)},
            terms={
                "out": config.d_ff,
                "gradient": batch * context,
                "parameters": accounting.num_parameters(config),
            },
            implementations=IMPLEMENTATIONS["model"],
            baseline="ours",
            options={**sizes, **taken, "context_length": context},
            method="window",
            num_warmup=parameters["warmup"],
            num_rounds=parameters["steps"],
        )
    if operation in ("adamw", "optimizer"):
        rows, columns = parameters["rows"], parameters["columns"]
        grads = draw(device.kind, "fp32", (rows, columns), (columns,))
        names = ["params"]
        if operation == "adamw":
            names += ["grads", "exp_avgs", "exp_avg_sqs", "step"]
        return Optimizer(
            **given,
            grad_outs=grads,
            costs={"step": {"num_bytes": ADAMW_BYTES * (rows + 1) * columns}},
            terms={"out": 1},
            implementations=IMPLEMENTATIONS["optimizer"],
            baseline="ours",
            options=dict.fromkeys([*names, *ADAMW]),
            method="flush",
        )
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
