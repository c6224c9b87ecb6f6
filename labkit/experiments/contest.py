"""Implementations of one operation against each other: each is held to fp64, then all are timed in
turn.

An `Operation` says what its implementations are given, which formula they are held to and what it
costs; `operations` has those of the chapters, and `operations.register` adds an implementation from
any module. The phases of a contest are "<implementation> <pass>". The implementations of one pass
are timed in turn, so that a drift of the clocks falls on all of them alike. None is timed before
its outputs and gradients have passed the gate of `numerics.judge`; one that fails it has an error
in place of its times. What `labkit bench` is given is also watched: its inputs are others at every
round, and what it gave is judged again after it.
"""

import contextlib
import functools
import gc
import importlib
import math
import secrets
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from labkit import numerics
from labkit.configs import check_known
from labkit.device import Device
from labkit.experiments.sections import (
    Runner,
    Timed,
    empty_cache,
    rate_metrics,
    sustained_metrics,
    time_once_ms,
)
from labkit.experiments.sweep import Case, Measured, PhaseRuns, Refused, Skip
from labkit.kernels.reference import attention_reference
from labkit.measure.memory import storages
from labkit.measure.timing import (
    GRAPH_REPLAY_MS,
    Comparison,
    captured_once,
    compare,
    on_capture_stream,
    synchronize,
    time_callable,
)
from labkit.monitor import Monitor

LAUNCH_LIMIT_MS = 10.0
"""A call that takes longer has no launch to speak of, and its launch is not measured."""

MIN_ROUNDS = 6
"""Samples of each candidate, whatever the time limit: the fewest whose range can hold a median with
95 %.
"""

MAX_ROUNDS = 10
"""The most samples."""

ORACLE_SCORES = 2**25
"""fp64 scores that are held at once (256 MiB a matrix), whatever the length."""

RANKING = "rivals"
"""The section whose candidates are ranked, and so have times by events beside the others."""

IN_TURN = "in turn"
"""A case's parameter "timed", unless its one implementation is timed alone."""

LARGEST_CACHE = 2**28
"""Bytes below which a call may stay in a cache, and have no floor by the memory's rate."""

CEILING_MARGIN = 2
"""How much faster than the session's ceiling a call may be: on a busy machine that is too low. None
is ever faster than the datasheet.
"""

MAX_WRONG_ROUNDS = 1
"""While a phase is timed: chance may take one result out of its budget. What is not computed while
it is timed is wrong in every round.

Of 7,500 draws of attention from plain operators in bf16 and fp16, over 128 and 256 keys, 28 were
beyond it, by 2.1 times at most. The ten that were looked at were all dk in late blocks under a
causal mask, whose few terms the gradient of the largest score may disturb. Of 12,000 rounds of SDPA
and of softmax none was. Three other budgets find less. On 8 blocks, and on 4, none of 3,500 was
beyond, but in bf16 an error of dk's last rows is found from 5 to 13 % and more in place of 3 %.
Held to the largest error of eager in any block 9 were, and an error of all of dk is found from 2.7
to 3.3 % in place of 2.1 to 2.3 %.
"""

LATE_S = 0.3
"""How long a wrong result is waited for, to tell a late one."""

Tensors = Sequence[Tensor]


@dataclass(frozen=True)
class Implementation:
    """One way to compute an operation.

    Attributes:
        function: takes the operation's inputs, `others` and `options`; differentiable.
        unavailable: takes the same; returns why the function cannot run, None if it can.
        module: what the worker must import to know it; "" for those of this package.
    """

    function: Callable
    unavailable: Callable[..., str | None] = lambda *tensors, **options: None
    module: str = ""


@dataclass
class Operation:
    """One operation on the tensors of one case: what is computed, what it is held to, and its cost.

    Attributes:
        device, precision: of the case, and of the ceiling.
        inputs: the tensors to differentiate by; others, options: what an implementation takes after
            them.
        grad_outs: the gradient of each output.
        formula: of (*inputs in fp64, dtype); the outputs, computed in `dtype`.
        costs: what `rate_metrics` is told of each pass, "flops" or "num_bytes"; the one that needs
            no other first.
        terms: of the longest sum behind "out", and behind a "gradient", where that has others.
        implementations: by name; baseline: the one that ratios divide by.
        method: of `timing`, on CUDA; num_warmup: untimed calls of each. num_rounds: timed calls of
            each, 0 for as many as the time limit holds.
        is_watched: whether inputs are others at every call that is judged and every round that is
            timed, after which it is judged again. The chapters' are not: fp64 of their lengths
            would be computed anew at every round.
        is_in_place: whether a call goes on from what the one before it left, and returns that.
        num_judged: watched calls before any is timed.
        kept: the last outputs by (implementation, pass); a CUDA graph writes them again.
        num_wrong: rounds after which the result of a phase was wrong.
    """

    device: Device
    precision: str
    grad_outs: Tensors
    costs: dict[str, dict[str, int | str]]
    terms: dict[str, int]
    implementations: dict[str, Implementation]
    inputs: dict[str, Tensor] = field(default_factory=dict)
    formula: Callable | None = None
    baseline: str = "ours"
    others: tuple = ()
    options: dict = field(default_factory=dict)
    method: str = "graph"
    num_warmup: int = 1
    num_rounds: int = 0
    is_watched: bool = False
    is_in_place = False
    num_judged = 2

    def __post_init__(self):
        self.kept: dict[tuple[str, str], Tensors] = {}
        self.num_wrong = Counter()
        self.dtype = numerics.tensor_dtype(self.precision)
        for x in self.inputs.values():
            x.requires_grad_()
        tensors = (*self.inputs.values(), *self.others, *self.grad_outs)
        self.tensors = [x for x in tensors if isinstance(x, Tensor)]
        # What is emptied before it is timed would stay empty, and be right.
        self.drawn = _copies(self.tensors) if self.is_watched else []

    # ---- what is computed ----

    def apply(self, function: Callable) -> Any:
        """Returns what a function gives of all that an implementation takes."""
        return function(*self.inputs.values(), *self.others, **self.options)

    def check(self, impl: str) -> None:
        """Raises Skip, which says why, for an implementation that cannot run on these tensors,
        RequestError for an unknown one.
        """
        check_known("implementation", impl, self.implementations)
        reason = self.apply(self.implementations[impl].unavailable)
        if reason:
            raise Skip(reason)

    def outputs(self, impl: str) -> Tensors:
        return as_tuple(self.apply(self.implementations[impl].function))

    def gradients(self, outs: Tensors, **options) -> Tensors:
        # A loss may come as fp32 or as its logits do.
        grads = [grad.to(out.dtype) for grad, out in zip(self.grad_outs, outs, strict=True)]
        return torch.autograd.grad(outs, [*self.inputs.values()], grads, **options)

    def run(self, impl: str, name: str) -> Callable[[], Tensors]:
        """Returns a pass as a function of nothing."""
        if name == "forward":
            return functools.partial(self.outputs, impl)
        if name == "forward_backward":
            return functools.partial(self._both_passes, impl)
        # A backward pass runs on the stream of its forward pass, which must be the one that is
        # captured.
        with on_capture_stream() if self.device.kind == "cuda" else contextlib.nullcontext():
            outs = self.outputs(impl)
        return functools.partial(self.gradients, outs, retain_graph=True)

    def _both_passes(self, impl: str) -> Tensors:
        outs = self.outputs(impl)
        gradients = self.gradients(outs)
        # What is watched may leave out a forward pass that its backward pass does not need.
        return (*outs, *gradients) if self.is_watched else gradients

    # ---- what it is held to ----

    @functools.cached_property
    def expected(self) -> list[tuple[Tensors, Tensors]]:
        """Outputs and gradients of the formula in fp64, and in the dtype of the inputs."""
        formulas = (functools.partial(self.formula, dtype=x) for x in (torch.float64, self.dtype))
        inputs = [*self.inputs.values()]
        return [by_formula(formula, inputs, self.grad_outs) for formula in formulas]

    def references(self, name: str, impl: str) -> list[Tensors]:
        """Returns the outputs ("forward") or the gradients (another pass) that an implementation
        is held to, in fp64 and as eager gives them; of both passes, watched, both.
        """
        if self.is_watched and name == "forward_backward":
            return [(*outs, *gradients) for outs, gradients in self.expected]
        return [results[name != "forward"] for results in self.expected]

    def worst(self, impl: str, name: str, values: Tensors) -> numerics.Verdict:
        """Returns the worst verdict on what a pass of an implementation gave.

        Raises AssertionError for a wrong result.
        """
        gradients = []
        if name not in ("forward", "step"):
            gradients = [f"d{each}" for each in self.inputs] or ["gradient"] * len(values)
        names = ["out"] * (len(values) - len(gradients)) + gradients
        verdicts = []
        for key, *tensors in zip(names, values, *self.references(name, impl), strict=True):
            # A vector is one row as a gradient, and a number of each row as an output.
            shape = (-1, 1) if key == "out" else (1, -1)
            rows = (x if x.dim() > 1 else x.reshape(shape) for x in tensors)
            # What is computed from numbers of 16 bits is as exact as those, whatever its own dtype.
            num_terms = self.terms.get(key, self.terms["out"])
            verdicts.append(numerics.judge(key, *rows, dtype=self.dtype, num_terms=num_terms))
        return max(verdicts, key=lambda verdict: verdict.budget_fraction)

    def judge(self, impl: str, name: str) -> numerics.Verdict:
        """Returns the worst verdict on a pass; raises AssertionError for a wrong result, and as
        `check`.

        One that is watched raises Refused for a wrong result, for none, and for one that is not
        computed by the call, from its inputs, into memory of its own.
        """
        self.check(impl)
        if not self.is_watched:
            values = self.run(impl, "forward" if name == "forward" else "forward_backward")()
            return self.worst(impl, name, values)
        self.kept.clear()  # before anything that is timed is called
        settings = _settings(self.device.kind)
        first = self._check_call(impl)
        run = self.run(impl, name)
        earlier = ()
        for _ in range(self.num_judged):
            if self.device.kind == "cuda":
                # The copies below wait for it. Work on another stream that does not wait reads old
                # inputs; work that does ends after the copies.
                torch.cuda._sleep(10**8)
            # One that forgets to multiply by a loss's gradient is right where that is 1.
            self.renew(loss_gradient=0.5)
            inputs = _copies(self.tensors)
            values = run()
            copies = _copies(values)
            synchronize(self.device.kind)
            for owner, tensors in (("its inputs", self.tensors), ("an earlier call", earlier)):
                if storages(values).keys() & storages(tensors).keys():
                    raise Refused(f"its output lies in the memory of {owner}")
            if not are_equal(inputs, self.tensors):
                raise Refused("it changes its inputs")
            if settings != _settings(self.device.kind):
                raise Refused("it changes PyTorch's settings")
            try:
                verdict = self.worst(impl, name, copies)
            except AssertionError as error:
                reason = str(error)
                if earlier or (name == "forward" and are_equal(copies, first)):
                    reason = "its second result is not that of its inputs: a cache"
                time.sleep(LATE_S)
                if not are_equal(copies, values):
                    reason = "its work goes on after it has returned"
                raise Refused(reason) from None
            if not self.is_in_place:
                _poison(values)
                earlier = values
        return verdict

    def _check_call(self, impl: str) -> Tensors:
        """Returns a copy of what a forward pass gives; raises Refused for another form of it."""
        try:
            outs = self.run(impl, next(iter(self.costs)))()
        except TypeError as error:
            arguments = ", ".join((*self.inputs, *map(_described, self.others), *self.options))
            raise Refused(f"{error}; it is called with {arguments}") from None
        got, expected = (", ".join(map(_described, values)) for values in (outs, self.grad_outs))
        if got != expected:
            raise Refused(f"it must return {expected}; got {got}")
        return _copies(outs)

    # ---- while it is timed ----

    def call(self, impl: str, name: str) -> Callable[[], Tensors]:
        """Returns a pass that is timed; where it is watched, what it gives is kept."""
        run = self.run(impl, name)
        if not self.is_watched:
            return run

        def kept() -> Tensors:
            self.kept[impl, name] = values = run()
            return values

        return kept

    def renew(self, loss_gradient: float = 1.0) -> None:
        """Moves the numbers of every tensor to other places in it, which nobody can foresee."""
        self.__dict__.pop("expected", None)
        for x, drawn in zip(self.tensors, self.drawn, strict=True):
            places = 1 + secrets.randbelow(max(x.numel() - 1, 1))
            values = drawn.flatten().roll(places)
            drawn.copy_(values.view_as(drawn))  # from where it is, as no two rounds may be alike
            # As data: autograd would take it for a mistake.
            x.data.copy_(drawn)
            if not x.dim():
                x.data.fill_(loss_gradient)

    def rounds(self, num_rounds: int) -> Iterator[None]:
        """Yields once a round; where it is watched, with other inputs, and what each implementation
        gave is judged after it.
        """
        if not self.is_watched:
            yield from [None] * num_rounds
            return
        for _ in range(num_rounds):
            for values in self.kept.values() if not self.is_in_place else ():
                _poison(values)
            self.renew()
            inputs = _copies(self.tensors)
            yield
            # At once: work that goes on may be done when the oracle is.
            given = {key: _copies(values) for key, values in self.kept.items()}
            for x, before in zip(self.tensors, inputs, strict=True):
                x.data.copy_(before)  # it may have been emptied
            for (impl, name), values in given.items():
                try:
                    self.worst(impl, name, values)
                except AssertionError:
                    self.num_wrong[f"{impl} {name}"] += 1
        self.kept.clear()

    def confirm(self, phase: str, metrics: dict) -> None:
        """Raises Refused for a phase that was wrong while it was timed, or faster than can be."""
        if metrics.get("num_bytes", math.inf) < LARGEST_CACHE:
            metrics |= {"ceiling_fraction": None, "datasheet_fraction": None}
        if self.num_wrong[phase] > MAX_WRONG_ROUNDS:
            raise Refused("its outputs are wrong, or not written, while it is timed")
        if (metrics["ceiling_fraction"] or 0) > CEILING_MARGIN:
            raise Refused("its time is below the roofline's floor")


def as_tuple(out: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return out if isinstance(out, tuple) else (out,)


# ---- tensors and the oracle ----------------------------------------------------------------------


def draw(device: Device, precision: str, *shapes: tuple[int, ...]) -> list[Tensor]:
    """Returns random normal tensors."""
    kind = device.kind
    generator = torch.Generator(kind).manual_seed(0)
    dtype = numerics.tensor_dtype(precision)
    return [torch.randn(shape, generator=generator, device=kind).to(dtype) for shape in shapes]


def by_formula(formula: Callable, inputs: Tensors, grad_outs: Tensors) -> tuple[Tensors, Tensors]:
    """Returns the outputs and the gradients of a formula of inputs in fp64, as fp64."""
    leaves = [x.detach().to(torch.float64).requires_grad_() for x in inputs]
    outs = as_tuple(formula(*leaves))
    grads = [grad.to(out) for grad, out in zip(grad_outs, outs, strict=True)]
    return [out.detach().double() for out in outs], torch.autograd.grad(outs, leaves, grads)


def attention_formula(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, dtype: torch.dtype = torch.float64
) -> Tensor:
    """Returns attention by the eager formula in `dtype`, as fp64, ORACLE_SCORES scores at once at
    most, of one sequence or head after another where not all fit; they are computed again in the
    backward pass.

    q, k, v: (..., length, D), fp64.
    """

    def some_rows(*parts: Tensor) -> Tensor:
        return attention_reference(*(x.to(dtype) for x in parts), causal=causal).double()

    length = q.shape[-2]
    if q.dim() > 2 and q[..., 0].numel() * length > ORACLE_SCORES:
        # Products of a few rows of all of them take up to four times as long.
        one = functools.partial(attention_formula, causal=causal, dtype=dtype)
        return torch.stack([one(*parts) for parts in zip(q, k, v, strict=True)])
    num_rows = max(1, ORACLE_SCORES // (q.shape[:-2].numel() * length))
    blocks = []
    for q_rows in q.split(num_rows, dim=-2):
        # Aligned to the bottom right, the mask of the last rows over the keys up to them is theirs.
        num_keys = len(blocks) * num_rows + q_rows.shape[-2] if causal else length
        keys, values = k[..., :num_keys, :], v[..., :num_keys, :]
        # There are no random numbers to keep.
        blocks.append(
            checkpoint(
                some_rows, q_rows, keys, values, use_reentrant=False, preserve_rng_state=False
            )
        )
    return torch.cat(blocks, dim=-2)


def _copies(tensors: Tensors) -> list[Tensor]:
    return [x.detach().clone() for x in tensors]


def _settings(kind: str) -> tuple:
    """Returns what of PyTorch's settings changes what others compute, or how fast."""
    return (
        torch.get_num_threads(),
        torch.is_autocast_enabled(kind),
        numerics.live_precision(torch.float32),
    )


def are_equal(some: Tensors, others: Tensors) -> bool:
    # What is no number equals itself.
    return all(
        torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(some, others, strict=True)
    )


def _poison(tensors: Tensors) -> None:
    """Makes every number no number, whatever its format."""
    for x in tensors:
        x.untyped_storage().fill_(0xFF)


def _described(x: object) -> str:
    if type(x) not in (Tensor, nn.Parameter):  # another class may compute when it is read
        return type(x).__name__
    # A loss may come as fp32 or as its logits do.
    return f"{x.dtype if x.dim() else 'a loss'} {tuple(x.shape)} on {x.device.type}"


# ---- the contest ---------------------------------------------------------------------------------


def contest_section(problem: Callable[[Device, dict], Operation]) -> Runner:
    """Returns the runner of a section whose cases are contests; `problem` gives the operation of a
    device and a case's parameters.
    """

    def run(device: Device, case: Case) -> PhaseRuns:
        for module in case.modules:
            importlib.import_module(module)
        # A graph whose buffers are given to the first backward pass can have no second one.
        importlib.import_module("torch._functorch.config").donated_buffer = False
        try:
            yield from contest(problem(device, case.parameters), case)
        finally:
            counters = torch._dynamo.utils.counters
            if counters["frames"]:
                # What is compiled is for one shape: kept, it would only make the look-up of the
                # next longer.
                counters.clear()
                torch.compiler.reset()
                gc.unfreeze()
            empty_cache()

    return run


def contest(operation: Operation, case: Case) -> PhaseRuns:
    """Yields the phases pass by pass: those that cannot be had, then those that were timed."""

    device = operation.device

    def measure(impl: str, name: str, timed: Timed, metrics: dict) -> Measured:
        phase = f"{impl} {name}"
        median_ms = timed.timing.median_ms
        work = operation.costs[name]
        metrics |= rate_metrics(device, case.ceilings, median_ms, operation.precision, **work)
        if operation.is_watched:
            operation.confirm(phase, metrics)
        metrics["is_auto"] = int(impl == operation.baseline)
        if phase in case.sustained:
            metrics |= sustained_metrics(
                device,
                case.ceilings,
                timed,
                operation.call(impl, name),
                operation.precision,
                flops=metrics["flops"],
            )
        precision = numerics.live_precision(operation.dtype)
        return timed.measured(metrics, {**case.parameters, "precision": precision})

    is_in_turn = case.parameters.get("timed", IN_TURN) == IN_TURN
    baselines = [operation.baseline] if is_in_turn else []
    entrants = defaultdict(list)  # by pass
    for phase in case.phases:
        impl, name = phase.split(" ")
        entrants[name].append(impl)
    for name, impls in entrants.items():
        verdicts = {}
        # A baseline that is not among them has been measured, or has failed.
        for impl in dict.fromkeys(impls + baselines):
            try:
                verdicts[impl] = operation.judge(impl, name)
            except Exception as error:
                if impl in impls:
                    # It ends the process, but for a Skip; the next goes on.
                    yield f"{impl} {name}", functools.partial(_raise, error)
        judged = [impl for impl in impls if impl in verdicts]
        if not judged:
            continue
        for impl, timed, metrics in time_in_turn(operation, case, name, judged, verdicts):
            yield f"{impl} {name}", functools.partial(measure, impl, name, timed, metrics)


def _raise(error: Exception):
    raise error


def time_in_turn(
    operation: Operation,
    case: Case,
    name: str,
    impls: Sequence[str],
    verdicts: dict[str, numerics.Verdict],
) -> list[tuple[str, Timed, dict]]:
    """Returns the times of one pass by implementation, and metrics beside them, the verdict's
    among them; they are timed in turn with a baseline that has a verdict.
    """
    # The timer collects garbage before every sampling; what PyTorch and its compiler keep need not
    # be searched each time, which takes longer than most samplings.
    gc.freeze()
    kind = operation.device.kind
    calls = {impl: operation.call(impl, name) for impl in verdicts}
    has_baseline = operation.baseline in calls
    once_ms = {impl: time_once_ms(call, kind) for impl, call in calls.items()}
    least_ms = GRAPH_REPLAY_MS if kind == "cuda" else 0
    round_ms = sum(max(time_ms, least_ms) for time_ms in once_ms.values())
    num_rounds = max(MIN_ROUNDS, min(MAX_ROUNDS, int(1e3 * case.time_limit_s / round_ms)))
    with Monitor(kind) as monitor:
        reference = operation.baseline if has_baseline else impls[0]
        comparison = _compared(operation, calls, reference, operation.num_rounds or num_rounds)
    times = []
    for impl in impls:
        metrics = verdicts[impl]._asdict()
        if has_baseline:
            keys = ("ratio_to_ours", "ratio_to_ours_low", "ratio_to_ours_high")
            metrics |= zip(keys, comparison.ratio[impl], strict=True)
        # The host's share of a backward pass is in that of both.
        if kind == "cuda" and name != "backward":
            limits = {"device_kind": kind, "num_warmup": 2, "min_samples": 10, "max_samples": 10}
            if once_ms[impl] < LAUNCH_LIMIT_MS:
                launched = time_callable(calls[impl], method="window", **limits).metrics()
                metrics |= {key: launched[key] for key in ("launch_median_ms", "host_median_ms")}
            if case.section == RANKING:
                flushed = time_callable(calls[impl], method="flush", **limits)
                metrics["flush_median_ms"] = flushed.median_ms
        times.append((impl, Timed(comparison.timings[impl], dict(monitor.summary)), metrics))
    return times


def _compared(
    operation: Operation, calls: dict[str, Callable], baseline: str, num_rounds: int
) -> Comparison:
    """Returns the comparison of calls on CUDA graphs. One that no graph can hold, as it waits for
    the device, is compared with the baseline call by call.
    """
    kind = operation.device.kind

    def compared(calls: dict[str, Callable], method: str) -> Comparison:
        return compare(
            calls,
            baseline=baseline,
            rounds=operation.rounds(num_rounds),
            device_kind=kind,
            method=method,
            num_warmup=operation.num_warmup,
        )

    method = operation.method if kind == "cuda" else "host"
    try:
        return compared(calls, method)
    except RuntimeError as error:
        if method != "graph" or isinstance(error, torch.OutOfMemoryError):
            raise
    by_call = compared(calls, "flush")
    replayed = {impl: call for impl, call in calls.items() if _fits_a_graph(call)}
    if baseline not in replayed:
        return by_call
    by_graph = compared(replayed, "graph")
    return Comparison(by_call.timings | by_graph.timings, by_call.ratio | by_graph.ratio)


def _fits_a_graph(call: Callable) -> bool:
    with contextlib.suppress(RuntimeError):
        captured_once(call)
        return True
    # A capture that broke off leaves PyTorch's random numbers in it, and the next to draw any
    # fails; a whole one takes them out.
    captured_once(torch.zeros(1, device="cuda").zero_)
    return False
