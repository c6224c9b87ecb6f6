"""Implementations of one operation against each other: each is held to fp64, then all are timed in
turn.

The phases of a contest are "<implementation> <pass>". The implementations of one pass are timed in
turn, so that a drift of the clocks falls on all of them alike. None is timed before its output and
gradients have passed the gate of `numerics.judge`; one that fails it has an error in place of its
times.
"""

import abc
import contextlib
import functools
import gc
import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from labkit.configs import PASSES
from labkit.device import Device
from labkit.experiments.sections import Runner, Timed, empty_cache, sustained_metrics, time_once_ms
from labkit.experiments.sweep import Case, Measured, PhaseRun, Skip
from labkit.measure import timing as timer
from labkit.measure.timing import Comparison, Timing, compare, on_capture_stream, time_callable
from labkit.monitor import Monitor
from labkit.numerics import Verdict

LAUNCH_LIMIT_MS = 10.0
"""A call that takes longer has no launch to speak of, and its launch is not measured."""

MIN_ROUNDS, MAX_ROUNDS, MAX_RANKING_ROUNDS = 3, 10, 15
"""Samples of each candidate: the fewest, whatever the time limit, and the most; more where
candidates are ranked.
"""

COMPILED = ("compiled", "flex")


@dataclass(frozen=True)
class Results:
    """What timing one pass of a contest gave."""

    comparison: Comparison
    launches: dict[str, Timing]
    flushed: dict[str, Timing]
    telemetry: dict


class Contest(abc.ABC):
    """One problem and those who solve it.

    Attributes:
        baseline: the implementation that the ratios divide by; None for none in particular.
        is_ranking: more samples, and the times once more by another method of the timer.
        gradient_names: in the order of `inputs`.
    """

    baseline: str | None = None
    is_ranking = False
    gradient_names: tuple[str, ...]
    inputs: tuple[Tensor, ...]
    grad_out: Tensor

    def __init__(self, device: Device, case: Case, ceilings: dict[str, float]):
        self.device, self.parameters, self.ceilings, self.sustained = (
            device,
            case.parameters,
            ceilings,
            case.sustained,
        )
        # A graph whose buffers are given to the first backward pass can have no second one.
        importlib.import_module("torch._functorch.config").donated_buffer = False

    @abc.abstractmethod
    def unavailable(self, impl: str) -> str | None:
        """Returns why an implementation cannot run here, None if it can."""

    @abc.abstractmethod
    def forward(self, impl: str) -> Tensor: ...

    @abc.abstractmethod
    def verdict(self, name: str, value: Tensor) -> Verdict:
        """Returns the verdict on "out" or a gradient; raises AssertionError for a wrong one."""

    @abc.abstractmethod
    def described(self) -> dict:
        """Returns the case as read back from the tensors."""

    @abc.abstractmethod
    def rates(self, impl: str, name: str, median_ms: float) -> dict: ...

    def observed(self, impl: str) -> dict:
        return {}

    def both(self, impl: str) -> tuple[Tensor, ...]:
        return torch.autograd.grad(self.forward(impl), self.inputs, self.grad_out)

    def judge(self, impl: str, name: str) -> Verdict:
        """Returns the worst verdict on what a pass gives; raises AssertionError for a wrong
        result.
        """
        if name == "forward":
            return self.verdict("out", self.forward(impl))
        verdicts = [
            self.verdict(*each) for each in zip(self.gradient_names, self.both(impl), strict=True)
        ]
        return max(verdicts, key=lambda verdict: verdict.budget_fraction)

    def call(self, impl: str, name: str) -> Callable:
        """Returns a pass as a function of nothing."""
        if name != "backward":
            return functools.partial(self.forward if name == "forward" else self.both, impl)
        # A backward pass runs on the stream of its forward pass, which must be the one that is
        # captured.
        with on_capture_stream() if self.device.kind == "cuda" else contextlib.nullcontext():
            out = self.forward(impl)
        return functools.partial(
            torch.autograd.grad, out, self.inputs, self.grad_out, retain_graph=True
        )

    def measured(self, impl: str, name: str, results: Results, verdict: Verdict) -> Measured:
        """Returns the measurement of one implementation's pass."""
        timing = results.comparison.timings[impl]
        metrics = {**self.rates(impl, name, timing.median_ms), **verdict.metrics()}
        if impl in results.launches:
            launch = results.launches[impl].metrics()
            metrics |= {key: launch[key] for key in ("launch_median_ms", "host_median_ms")}
        if impl in results.flushed:
            metrics["flush_median_ms"] = results.flushed[impl].median_ms
        if results.comparison.baseline == self.baseline:
            keys = ("ratio_to_ours", "ratio_to_ours_low", "ratio_to_ours_high")
            metrics |= dict(zip(keys, results.comparison.ratio[impl], strict=True))
        found = Timed(timing, dict(results.telemetry))
        if f"{impl} {name}" in self.sustained:
            ceiling = self.ceilings.get(f"sustained gemm {self.parameters['precision']}")
            call, flops = self.call(impl, name), metrics["flops"]
            metrics |= sustained_metrics(self.device, found, call, flops=flops, ceiling=ceiling)
        return found.measured(metrics, self.described(), self.observed(impl))


def contest_section(kind: type[Contest]) -> Runner:
    """Returns the runner of a section whose cases are contests of one kind."""

    def run(device: Device, case: Case, ceilings: dict[str, float]) -> Iterator[PhaseRun]:
        try:
            yield from _run_contest(kind(device, case, ceilings), case)
        finally:
            if any(phase.split(" ")[0] in COMPILED for phase in case.phases):
                # What is compiled is for one shape: kept, it would only make the look-up of the
                # next longer.
                torch.compiler.reset()
                gc.unfreeze()
            empty_cache(device)

    return run


def _run_contest(contest: Contest, case: Case) -> Iterator[PhaseRun]:
    """Yields the phases of a contest, pass by pass: those that cannot be had first, then those that
    were timed.
    """
    wanted = [tuple(phase.split(" ")) for phase in case.phases]
    impls = list(dict.fromkeys(impl for impl, _ in wanted))
    reasons = {impl: contest.unavailable(impl) for impl in impls}
    for impl, name in wanted:
        if reasons[impl]:
            yield f"{impl} {name}", functools.partial(_raise, Skip(reasons[impl]))
    for name in PASSES:
        entrants = [impl for impl in impls if (impl, name) in wanted and not reasons[impl]]
        verdicts = {}
        for impl in entrants:
            try:
                verdicts[impl] = contest.judge(impl, name)
            except Exception as error:
                if len(impls) == 1:
                    raise
                yield (
                    f"{impl} {name}",
                    functools.partial(_raise, error),
                )  # ends the process; the next goes on
        if entrants:
            # The timer collects garbage before every sampling; what PyTorch and its compiler keep
            # need not be searched each time, which takes longer than most samplings.
            gc.freeze()
            baseline = contest.baseline
            if baseline and baseline not in entrants:  # it has been measured, or has failed
                try:
                    contest.judge(baseline, name)
                except Exception:
                    baseline = None
            results = _time_in_turn(contest, name, entrants, baseline, case.time_limit_s)
            for impl in entrants:
                yield (
                    f"{impl} {name}",
                    functools.partial(contest.measured, impl, name, results, verdicts[impl]),
                )


def _raise(error: Exception):
    raise error


def _compared(calls: dict[str, Callable], limits: dict) -> Comparison:
    """Returns the comparison of calls on CUDA graphs; what none can hold stands beside the
    baseline, call by call.
    """
    if limits["device_kind"] != "cuda":
        return compare(calls, method="host", **limits)
    try:
        return compare(calls, method="graph", **limits)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        baseline = limits["baseline"]
        replayed = {impl: call for impl, call in calls.items() if timer.can_be_captured(call)}
        if baseline not in replayed:
            return compare(calls, method="flush", **limits)
        launched = {
            impl: call for impl, call in calls.items() if impl not in replayed or impl == baseline
        }
        first, last = (
            compare(launched, method="flush", **limits),
            compare(replayed, method="graph", **limits),
        )
        return Comparison(first.timings | last.timings, baseline, first.ratio | last.ratio)


def _time_in_turn(
    contest: Contest, name: str, impls: Sequence[str], baseline: str | None, time_limit_s: float
) -> Results:
    """Returns the device's times of one pass, all implementations in turn, and the host's of
    issuing it.
    """
    kind = contest.device.kind
    calls = {
        impl: contest.call(impl, name) for impl in dict.fromkeys([*impls, baseline or impls[0]])
    }
    once_ms = {impl: time_once_ms(call, kind) for impl, call in calls.items()}
    round_ms = sum(
        max(time_ms, timer.GRAPH_REPLAY_MS if kind == "cuda" else 0) for time_ms in once_ms.values()
    )
    max_rounds = MAX_RANKING_ROUNDS if contest.is_ranking else MAX_ROUNDS
    num_rounds = max(MIN_ROUNDS, min(max_rounds, int(1e3 * time_limit_s / round_ms)))
    limits = {
        "baseline": baseline or impls[0],
        "device_kind": kind,
        "num_warmup": 1,
        "num_rounds": num_rounds,
    }
    with Monitor(kind) as monitor:
        comparison = _compared(calls, limits)
    few = {"device_kind": kind, "num_warmup": 2, "min_samples": 10, "max_samples": 10}
    launches, flushed = {}, {}
    if (
        kind == "cuda" and name != "backward"
    ):  # the host's share of a backward pass is in that of both
        for impl in impls:
            if once_ms[impl] < LAUNCH_LIMIT_MS:
                launches[impl] = time_callable(calls[impl], method="window", **few)
            if contest.is_ranking:
                flushed[impl] = time_callable(calls[impl], method="flush", **few)
    return Results(comparison, launches, flushed, monitor.summary)
