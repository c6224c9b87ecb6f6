"""How long a callable takes: every sample, and the method.

"The time of a GPU function" is four different quantities, hence four methods:

| method | what a sample is | use it for |
|---|---|---|
| window | one call between two synchronisations, by device events and host clock | whole steps |
| graph  | device time of one call in a CUDA-graph replay: no launch | kernels |
| flush  | events around one call after the L2 cache was overwritten | cross-check of graph |
| host   | host clock around one call | everything on a CPU |

`window` measures what a user waits for, launch cost included; `graph` what the device alone needs,
and so does `flush` where the host issues the call while the cache is overwritten. They disagree for
launch-bound work: a result, not noise.
"""

import contextlib
import gc
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch

from labkit.configs import check_known

INTERVAL = 0.95
"""Probability that the stated interval of a median holds the true one."""

MIN_SAMPLES_AT_LIMIT = 3
METHODS = {"cuda": ("window", "graph", "flush"), "cpu": ("host",)}
"""Methods by kind of device, the usual one first."""


# A replay repeats the calls until it lasts this long, well above the events' resolution (half a
# microsecond) and the cost of starting a replay.
GRAPH_REPLAY_MS = 2.0


@dataclass(frozen=True)
class Timing:
    """What a timer saw.

    Attributes:
        samples_ms: one time per sample, in order, after the warm-up; device time except for method
            "host".
        method: one of METHODS; "queued" for a collective between GPUs.
        host_ms: host clock around the same samples, synchronised (methods "window" and "host").
        launch_ms: host time until the call returned, before the device had finished ("window").
    """

    samples_ms: tuple[float, ...]
    method: str
    host_ms: tuple[float, ...] = ()
    launch_ms: tuple[float, ...] = ()

    @property
    def n(self) -> int:
        return len(self.samples_ms)

    @property
    def median_ms(self) -> float:
        return statistics.median(self.samples_ms)

    def metrics(self) -> dict[str, float | int | None]:
        """Returns a record's metrics, units in the names; None for a spread of one sample."""
        low, high = np.quantile(self.samples_ms, (0.2, 0.8)).tolist()
        summary = {
            "median_ms": self.median_ms,
            "p20_ms": low,
            "p80_ms": high,
            "min_ms": min(self.samples_ms),
            "mean_ms": statistics.fmean(self.samples_ms),
            "std_ms": statistics.stdev(self.samples_ms) if self.n > 1 else None,
            "n": self.n,
            "half_width_fraction": median_half_width(self.samples_ms) if self.n > 1 else None,
        }
        if self.host_ms:
            summary["host_median_ms"] = statistics.median(self.host_ms)
        if self.launch_ms:
            summary["launch_median_ms"] = statistics.median(self.launch_ms)
        return summary


@cache
def _median_interval_rank(n: int) -> int:
    """Returns how many samples lie outside the median's 95 % interval on each side (0 for n below
    6).

    The interval between the order statistics l and n + 1 − l covers the median with probability
    1 − 2·P(Binomial(n, ½) ≤ l − 1): for ten samples, from the second to the ninth.
    """
    tails = itertools.accumulate(math.comb(n, order) for order in range(n // 2))
    num_outside = sum(2 * tail / 2**n <= 1 - INTERVAL for tail in tails)
    return max(num_outside - 1, 0)


def median_interval(samples: Sequence[float]) -> tuple[float, float, float]:
    """Returns the median and the ends of its distribution-free 95 % interval.

    It runs between two order statistics chosen by the binomial distribution. Below six samples no
    pair reaches 95 % and the whole range is taken. Raises ValueError for fewer than two, which
    would be certain of themselves.
    """
    if len(samples) < 2:
        raise ValueError(f"an interval of {len(samples)} values; accepted: 2 and more")
    ordered = sorted(samples)
    rank = _median_interval_rank(len(ordered))
    return statistics.median(ordered), ordered[rank], ordered[-1 - rank]


def median_half_width(samples: Sequence[float]) -> float:
    """Returns half of `median_interval` as a fraction of the median; around 0 not a number."""
    median, low, high = median_interval(samples)
    return (high - low) / 2 / (median or math.nan)


def synchronize(device_kind: str) -> None:
    """Waits until everything queued on the device, on every stream, has finished."""
    if device_kind == "cuda":
        torch.cuda.synchronize()


def time_callable(
    function: Callable[..., Any],
    *,
    device_kind: str,
    inputs: Callable[[], tuple] = tuple,
    method: str | None = None,
    num_warmup: int = 5,
    min_samples: int = 10,
    max_samples: int = 200,
    target_half_width: float = 0.005,
    time_limit_s: float = 3.0,
) -> Timing:
    """Returns the times of `function(*inputs())`, sampled until the median is known well enough.

    Args:
        function: what is timed; its result is dropped.
        device_kind: "cuda" or "cpu".
        inputs: makes the arguments before each sample, outside the timed region; for a graph, which
            repeats one call, before its capture.
        method: one of the device's METHODS, by default the first.
        num_warmup: untimed calls first. They end after `time_limit_s`, but one is always made
            unless this is 0.
        min_samples, max_samples: bounds on the number of samples.
        target_half_width: sampling stops once half of the median's 95 % interval is below this
            fraction.
        time_limit_s: sampling stops after this time; with fewer than `min_samples`, after three
            times as long and at least three samples.

    Raises:
        ValueError: a method that the device has not.
    """
    method = method or METHODS[device_kind][0]
    sampler = _sampler(method, function, inputs, device_kind)
    with collector_paused():
        _warm_up(sampler, num_warmup, time_limit_s)
        samples = _sample(sampler, min_samples, max_samples, target_half_width, time_limit_s)
    return _timing(samples, method)


def _timing(samples: Sequence[tuple], method: str) -> Timing:
    """Returns the Timing of what a sampler gave; raises ValueError for a time that is not
    positive.
    """
    device_ms, *others = zip(*samples, strict=True)
    if min(device_ms) <= 0:
        raise ValueError(
            f"a sample of {min(device_ms)} ms: shorter than the clock tells; time several calls as "
            "one"
        )
    return Timing(device_ms, method, *others)


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Keeps Python's garbage collector out of the samples, and leaves it as it was."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _warm_up(sampler: "_Sampler", num_warmup: int, time_limit_s: float) -> None:
    begin = time.perf_counter()
    for number in range(num_warmup):
        if number > 0 and time.perf_counter() - begin >= time_limit_s:
            return
        sampler()


def _sample(
    sampler: "_Sampler",
    min_samples: int,
    max_samples: int,
    target_half_width: float,
    time_limit_s: float,
) -> list[tuple]:
    """Returns samples up to the first of the limits of `time_callable`."""
    samples = []
    begin = time.perf_counter()
    while True:
        samples.append(sampler())
        elapsed_s = time.perf_counter() - begin
        if len(samples) == max_samples:
            return samples
        if len(samples) >= min_samples:
            if elapsed_s >= time_limit_s:
                return samples
            # A sort of all samples after each of them would take the time of short calls.
            if len(samples) % 5 == 0 and target_half_width > 0:
                if median_half_width([sample[0] for sample in samples]) <= target_half_width:
                    return samples
        elif elapsed_s >= 3 * time_limit_s and len(samples) >= MIN_SAMPLES_AT_LIMIT:
            return samples


_Sampler = Callable[[], tuple[float, ...]]
"""Takes one sample: device time, the host's clock around it, host time until the call returned; the
last two may be absent.
"""


def _sampler(
    method: str, function: Callable, inputs: Callable[[], tuple], device_kind: str
) -> _Sampler:
    """Returns what takes a sample; raises ValueError for a method that the device has not."""
    check_known(f"method on {device_kind}", method, METHODS[device_kind])
    num_calls = 1
    if method == "graph":
        function, num_calls = captured(partial(function, *inputs()))
        inputs = tuple
    timer = _host_times_ms if method == "host" else _device_timer()
    prepare = partial(synchronize, device_kind)
    if method == "flush":
        # Twice the L2 cache, so that nothing of the inputs stays in it.
        num_bytes = 2 * torch.cuda.get_device_properties(0).L2_cache_size
        prepare = torch.empty(num_bytes, dtype=torch.int8, device=device_kind).zero_

    def sample() -> tuple[float, ...]:
        arguments = inputs()
        prepare()
        times_ms = timer(function, *arguments)
        return times_ms if method in ("window", "host") else (times_ms[0] / num_calls,)

    return sample


def _host_times_ms(function: Callable, *arguments: Any) -> tuple[float, float]:
    begin = time.perf_counter()
    function(*arguments)
    elapsed_ms = (time.perf_counter() - begin) * 1e3
    return elapsed_ms, elapsed_ms


def _device_timer() -> Callable[..., tuple[float, float, float]]:
    """Returns what gives the times (ms) of one call on CUDA: the device's, between two events, the
    host's until the device is done, and until the call returned.
    """
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def times_ms(function: Callable, *arguments: Any) -> tuple[float, float, float]:
        begin = time.perf_counter()
        start.record()
        function(*arguments)
        end.record()
        launched = time.perf_counter()
        synchronize("cuda")
        finished = time.perf_counter()
        return start.elapsed_time(end), (finished - begin) * 1e3, (launched - begin) * 1e3

    return times_ms


@contextlib.contextmanager
def on_capture_stream() -> Iterator[None]:
    """Runs its block on the stream on which PyTorch captures graphs, in order with the current
    stream.

    It is one stream for the whole process, because PyTorch keeps 32 MiB for cuBLAS on every stream
    and thread that has multiplied matrices, and may cut them from a cached block whose rest then
    fits no large tensor.
    """
    stream = torch.cuda.graph(torch.cuda.CUDAGraph()).capture_stream
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


def captured_once(
    function: Callable[[], Any], *, error_mode: str = "global"
) -> torch.cuda.CUDAGraph:
    """Returns a CUDA graph of one call, whose tensors keep their places until the graph is gone.

    Args:
        function: has run before, so that nothing is compiled, loaded or tuned while it is captured.
        error_mode: `capture_error_mode` of `torch.cuda.graph`.

    Raises:
        torch.OutOfMemoryError: it does not fit. CUDA's own error would be that of the capture that
        this broke off.
    """
    gc.collect()  # the graph takes none of the memory that garbage holds
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, capture_error_mode=error_mode):
            function()
    except Exception as error:
        # What ended the block, where the end of the capture failed for it.
        if isinstance(error.__context__, torch.OutOfMemoryError):
            raise error.__context__ from None
        raise
    return graph


def captured(function: Callable[[], Any]) -> tuple[Callable[[], None], int]:
    """Returns the replay of a CUDA graph of calls, GRAPH_REPLAY_MS long, and their number."""

    def run(num_calls: int) -> None:
        for _ in range(num_calls):
            function()

    # Before its capture, work must have run once on another stream than the default one.
    with on_capture_stream():
        run(1)
    graph = captured_once(partial(run, 1))
    timer = _device_timer()
    timer(graph.replay)
    replay_ms, *_ = timer(graph.replay)
    num_calls = max(1, math.ceil(GRAPH_REPLAY_MS / max(replay_ms, 1e-3)))
    if num_calls > 1:
        graph = captured_once(partial(run, num_calls))

    def replay() -> None:
        graph.replay()

    replay.function = function  # whose arguments' memory each replay reads
    return replay, num_calls


class Comparison(NamedTuple):
    """Candidates timed in turn in one process.

    Attributes:
        timings: by candidate.
        ratio: candidate's time over the baseline's, by candidate: (median, low, high) of the paired
            ratios' 95 % interval. Below 1 the candidate is faster.
    """

    timings: dict[str, Timing]
    ratio: dict[str, tuple[float, float, float]]


def compare(
    candidates: Mapping[str, Callable[..., Any]],
    *,
    baseline: str,
    device_kind: str,
    method: str | None = None,
    num_warmup: int = 5,
    rounds: Iterable = range(30),
) -> Comparison:
    """Times every candidate once per round, in a new random order each round, and pairs the rounds.

    A drift of the clocks then affects all candidates alike, and pairing removes it from the ratio.

    Args:
        candidates: callables without arguments.
        baseline: the candidate that the ratios divide by.
        rounds: as many samples of each, two at least; it is advanced outside of what is timed.
        Others as in `time_callable`.

    Raises:
        ValueError: the baseline is not among the candidates; else as in `time_callable`.
    """
    check_known("baseline", baseline, candidates)
    method = method or METHODS[device_kind][0]
    samplers = {
        name: _sampler(method, function, tuple, device_kind)
        for name, function in candidates.items()
    }
    generator = np.random.default_rng(0)
    samples = {name: [] for name in samplers}
    with collector_paused():
        for sampler in samplers.values():
            for _ in range(num_warmup):
                sampler()
        for _ in rounds:
            for name in generator.permutation(list(samplers)):
                samples[name].append(samplers[name]())
    timings = {name: _timing(rows, method) for name, rows in samples.items()}
    base_ms = np.array(timings[baseline].samples_ms)
    ratio = {
        name: median_interval((timing.samples_ms / base_ms).tolist())
        for name, timing in timings.items()
    }
    return Comparison(timings, ratio)
