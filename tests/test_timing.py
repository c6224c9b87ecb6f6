"""A sample holds the call and nothing else, sampling stops for the reason it gives, and rankings
are earned.

Most tests run on a clock that only the timed functions advance: exact times, and no time lost.
"""

import gc
import itertools
import math
import random
import statistics
import time
import types

import numpy as np
import pytest
import torch

from labkit.configs import LAUNCH_BOUND
from labkit.measure import timing
from labkit.measure.timing import (
    METHODS,
    Timing,
    compare,
    median_half_width,
    time_callable,
)


class Clock:
    """A clock that stands still until somebody spends time."""

    def __init__(self):
        self.now_s = 0.0

    def spend(self, ms: float) -> None:
        self.now_s += ms * 1e-3


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(timing, "time", types.SimpleNamespace(perf_counter=lambda: clock.now_s))
    return clock


def approximately(values):
    """The clock adds milliseconds to seconds: some roundings at the size of its reading."""
    return pytest.approx(values, rel=1e-6, abs=1e-6)


def timed_here(function, num_samples: int | None = None, **options) -> Timing:
    """Returns the timing of a function on the CPU, of a fixed number of samples if one is given."""
    fixed = {} if num_samples is None else {"min_samples": num_samples, "max_samples": num_samples}
    return time_callable(function, device_kind="cpu", **fixed, **options)


def test_metrics_are_what_they_say():
    samples = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
    timed = Timing(samples, "window", host_ms=(3.0, 5.0), launch_ms=(1.0, 2.0))
    known = {"median_ms": 6.0, "mean_ms": 10.5, "std_ms": pytest.approx(np.std(samples, ddof=1))}
    known |= {"p20_ms": 2.0, "p80_ms": 16.0, "min_ms": 1.0, "n": 6}
    known |= {"host_median_ms": 4.0, "launch_median_ms": 1.5}
    assert timed.metrics() == known | {"half_width_fraction": median_half_width(samples)}


def coverage(n: int, num_outside: int) -> float:
    """Returns the probability that the median lies between two samples: fewer than that many heads
    or tails.
    """
    return 1 - 2 * sum(math.comb(n, k) for k in range(num_outside + 1)) / 2**n


@pytest.mark.parametrize(("n", "num_outside"), [(5, 0), (6, 0), (9, 1), (50, 17)])
def test_the_interval_is_the_narrowest_that_holds_95_percent_or_the_whole_range(n, num_outside):
    samples = [3.0**i for i in range(n)]
    width = 2 * median_half_width(random.Random(0).sample(samples, n)) * statistics.median(samples)
    assert width == pytest.approx(samples[-1 - num_outside] - samples[num_outside])
    assert coverage(n, num_outside) >= 0.95 or n < 6
    assert coverage(n, num_outside + 1) < 0.95, "a narrower one would do"


@pytest.mark.parametrize(
    ("cost_ms", "limit_s", "expected"),
    [(600.0, 1.0, 2), (1.0, 1.0, 5), (1.0, 0.0, 1)],
)
def test_warmup_calls_come_first_and_end_early_at_the_time_limit(clock, cost_ms, limit_s, expected):
    calls = []
    timed = timed_here(
        lambda: calls.append(clock.spend(cost_ms)), num_warmup=5, time_limit_s=limit_s
    )
    assert len(calls) - timed.n == expected
    assert timed.host_ms == timed.samples_ms == approximately([cost_ms] * timed.n)
    assert timed.method == "host" and timed.launch_ms == ()


def test_making_fresh_inputs_is_outside_the_sample_but_counts_towards_the_limit(clock):
    made, seen = [], []

    def make_inputs():
        clock.spend(1000.0)
        made.append(object())
        return (made[-1], 7)

    def function(first, second):
        seen.append(first)
        clock.spend(second)

    timed = timed_here(function, inputs=make_inputs, num_warmup=2, time_limit_s=1.0)
    assert timed.samples_ms == approximately([7.0] * 3)
    assert seen == made, "each call gets inputs of its own"


@pytest.mark.parametrize(
    ("spread_ms", "options", "num_samples"),
    [
        (0.0, {}, range(10, 15)),
        (1.0, {"target_half_width": 0.08, "time_limit_s": 1e6}, range(16, 200)),
        # A target of zero never converges.
        (0.0, {"max_samples": 50, "target_half_width": 0}, [50]),
        (1.0, {"min_samples": 12, "max_samples": 12}, [12]),
        (1.0, {"max_samples": 500, "time_limit_s": 0.1}, range(40, 60)),
    ],
)
def test_sampling_stops_at_its_target_or_at_a_limit(clock, spread_ms, options, num_samples):
    costs = random.Random(0)
    timed = timed_here(
        lambda: clock.spend(costs.uniform(2.0 - spread_ms, 2.0 + spread_ms)),
        num_warmup=0,
        **options,
    )
    assert timed.n in num_samples
    if "max_samples" not in options:
        target = options.get("target_half_width", 0.005)
        assert median_half_width(timed.samples_ms) <= target
        assert timed.n < 15 or median_half_width(timed.samples_ms[:10]) > target
    if options.get("time_limit_s") == 0.1:
        assert sum(timed.samples_ms[:-1]) < 100.0 <= sum(timed.samples_ms) + 1e-6


def test_a_method_of_another_device_is_refused_before_anything_runs():
    def function():
        pytest.fail("something was timed before the arguments were looked at")

    with pytest.raises(ValueError, match="unknown method on cpu 'graph'; accepted: host"):
        timed_here(function, method="graph")


def test_the_garbage_collector_rests_while_sampling_and_is_then_as_before():
    seen = []

    def function():
        seen.append(gc.isenabled())
        if len(seen) == 7:
            raise KeyError

    timed_here(function, 3, num_warmup=1)
    with pytest.raises(KeyError):
        compare({"a": function}, baseline="a", device_kind="cpu", num_warmup=1)
    assert seen == [False] * 7 and gc.isenabled()


def test_a_time_of_nothing_is_no_time(clock):
    """As where a clock does not tell two moments apart."""
    with pytest.raises(ValueError, match=r"a sample of 0\.0 ms: shorter than the clock tells"):
        time_callable(list, device_kind="cpu", max_samples=10)


def run_comparison(clock, costs, **options):
    """Returns the comparison of candidates, each call of which costs the next of its times, and the
    order of the calls.
    """
    order = []

    def candidate(name):
        def function():
            order.append(name)
            clock.spend(next(costs[name]))

        return function

    functions = {name: candidate(name) for name in costs}
    return compare(functions, baseline="a", device_kind="cpu", **options), "".join(order)


def test_every_round_times_every_candidate_in_an_order_of_its_own(clock):
    costs = dict.fromkeys("abc", itertools.repeat(1.0))
    result, order = run_comparison(clock, costs, num_warmup=2, rounds=range(20))
    assert sorted(order[:6]) == list("aabbcc"), "warm-up of all comes before the first round"
    rounds = [order[i : i + 3] for i in range(6, len(order), 3)]
    assert len(rounds) == 20 and all(sorted(r) == list("abc") for r in rounds)
    assert len(set(rounds)) > 3, "one order for all rounds puts one candidate always behind another"
    assert {timed.n for timed in result.timings.values()} == {20}


def test_a_ratio_is_the_median_of_paired_ratios_and_not_of_medians(clock):
    costs = {"a": iter([1.0, 10.0, 100.0]), "b": iter([2.0, 30.0, 100.0])}
    result, _ = run_comparison(clock, costs, num_warmup=0, rounds=range(3))
    assert result.ratio["b"][0] == approximately(2.0) and result.ratio["a"] == (1.0, 1.0, 1.0)


def negate(target: torch.Tensor, source: torch.Tensor) -> None:
    """Reads every byte once and writes every byte once.

    No copy_: it is a transfer, and inside a graph the driver runs it as another kernel, at two
    thirds of the speed on an H200. The methods would then time different work.
    """
    torch.neg(source, out=target)


@pytest.mark.gpu(alone=True)
def test_the_methods_agree_on_known_bytes():
    """Moving gigabytes is all device time: launch, events and a cold cache are about a hundredth of
    it; a graph's sample is one call.
    """
    num_numbers = min(2**28, torch.cuda.mem_get_info()[0] // 64)
    pair = torch.empty(num_numbers, device="cuda"), torch.randn(num_numbers, device="cuda")
    medians = {}
    for method in METHODS["cuda"]:
        pair[0].fill_(math.nan)
        timed = time_callable(negate, device_kind="cuda", inputs=lambda: pair, method=method)
        assert torch.equal(pair[0], -pair[1])
        medians[method] = timed.median_ms
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(30):
        negate(*pair)
    torch.cuda.synchronize()
    medians["the host's clock"] = (time.perf_counter() - start) * 1e3 / 30
    assert max(medians.values()) <= 1.05 * min(medians.values()), medians


@pytest.mark.gpu
def test_the_window_waits_for_work_on_a_side_stream():
    side = torch.cuda.Stream()
    marks = []

    def function():
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record(side)
        with torch.cuda.stream(side):
            torch.cuda._sleep(10_000_000)
        end.record(side)
        marks.append((start, end))

    timed = time_callable(function, device_kind="cuda", num_warmup=1, min_samples=5, max_samples=5)
    side_ms = [start.elapsed_time(end) for start, end in marks[1:]]
    for host_ms, device_ms in zip(timed.host_ms, side_ms, strict=True):
        # Two clocks, host and device, that agree much better than to a hundredth.
        assert host_ms >= 0.99 * device_ms
    # The events are on the current stream, which is why the host clock is kept beside them.
    assert timed.median_ms < 0.5 * statistics.median(side_ms)


@pytest.mark.gpu(alone=True)
def test_a_graph_takes_the_launches_out_and_keeps_no_memory():
    counter = torch.zeros(16, device="cuda")

    def function():
        for _ in range(300):
            counter.add_(1)

    window = time_callable(function, device_kind="cuda", max_samples=12)
    assert statistics.median(window.launch_ms) >= LAUNCH_BOUND * statistics.median(window.host_ms)
    held = []
    for _ in range(3):
        graph = time_callable(function, device_kind="cuda", method="graph")
        held.append(torch.cuda.memory_allocated())
    assert graph.median_ms < window.median_ms and len(set(held)) == 1
