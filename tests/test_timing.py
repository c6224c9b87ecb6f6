"""A sample holds the call and nothing else, sampling stops for the reason it gives, and rankings
are earned.

Most tests run on a clock that only the timed functions advance: exact times, and no time lost.
"""

import gc
import json
import math
import random
import re
import statistics
import time
import types
from collections import Counter

import numpy as np
import pytest
import torch

from labkit.configs import LAUNCH_BOUND
from labkit.device import detect
from labkit.measure import timing
from labkit.measure.timing import (
    METHODS,
    Timing,
    bootstrap_median,
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
    """The clock adds milliseconds to seconds: some roundings at the size of its reading, here below
    1e5 s.
    """
    return pytest.approx(values, rel=1e-6, abs=1e-6)


def make_timing(samples, **changes) -> Timing:
    return Timing(
        samples_ms=tuple(samples), method="host", num_warmup=0, stop_reason="fixed count", **changes
    )


def timed_here(function, num_samples: int | None = None, **options) -> Timing:
    """Returns the timing of a function on the CPU, of a fixed number of samples if one is given."""
    fixed = {} if num_samples is None else {"min_samples": num_samples, "max_samples": num_samples}
    return time_callable(function, device_kind="cpu", **fixed, **options)


def test_metrics_name_their_unit_and_are_what_they_say():
    samples = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0]
    metrics = make_timing(samples, host_ms=(3.0, 5.0), launch_ms=(1.0, 2.0)).metrics()
    assert metrics == {
        "median_ms": 6.0,
        "p20_ms": pytest.approx(np.quantile(samples, 0.2), rel=1e-15),
        "p80_ms": pytest.approx(np.quantile(samples, 0.8), rel=1e-15),
        "min_ms": 1.0,
        "n": 6,
        "half_width_fraction": median_half_width(samples),
        "host_median_ms": 4.0,
        "launch_median_ms": 1.5,
    }
    assert json.loads(json.dumps(metrics, allow_nan=False)) == metrics


def test_one_sample_says_nothing_of_its_spread():
    metrics = make_timing([2.0]).metrics()
    assert metrics["half_width_fraction"] is None
    assert (
        metrics["median_ms"] == metrics["p20_ms"] == metrics["p80_ms"] == metrics["min_ms"] == 2.0
    )
    assert "host_median_ms" not in metrics and "launch_median_ms" not in metrics
    assert median_half_width([2.0]) == math.inf
    json.dumps(metrics, allow_nan=False)


def test_the_description_says_how_it_was_timed():
    described = Timing(
        (1.0,), method="window", num_warmup=3, stop_reason="time limit"
    ).description()
    assert described == {"method": "window", "num_warmup": 3, "stop_reason": "time limit"}


def num_outside(n: int) -> int:
    """Returns how many samples the interval of n samples leaves out on each side, read off its
    width.

    Powers of three: the distance of every two of them is another, so the width tells the two ends.
    """
    samples = [3.0**i for i in range(n)]
    width = 2 * median_half_width(samples) * statistics.median(samples)
    fits = [
        k for k in range(n // 2) if math.isclose(samples[-1 - k] - samples[k], width, rel_tol=1e-9)
    ]
    assert len(fits) == 1
    return fits[0]


def coverage(n: int, outside: int) -> float:
    """Returns the probability that the median lies between the two samples: fewer than that many
    heads or tails.
    """
    return 1 - 2 * sum(math.comb(n, k) for k in range(outside + 1)) / 2**n


def test_the_interval_of_ten_samples_runs_from_the_second_to_the_ninth():
    samples = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0]
    random.Random(0).shuffle(samples)
    assert median_half_width(samples) == pytest.approx((256.0 - 2.0) / 2 / 24.0, rel=1e-15)


@pytest.mark.parametrize("n", [2, 3, 4, 5, 6, 7, 8, 9, 10, 15, 20, 50, 101, 200])
def test_the_interval_is_the_narrowest_that_holds_95_percent_or_the_whole_range(n):
    outside = num_outside(n)
    assert coverage(n, outside) >= 0.95 or (n < 6 and outside == 0)
    assert coverage(n, outside + 1) < 0.95, "a narrower one would do"


@pytest.mark.parametrize("num_warmup", [0, 5])
def test_warmup_calls_come_first_and_are_not_samples(clock, num_warmup):
    calls = []

    def function():
        calls.append(None)
        clock.spend(1000.0 if len(calls) == 1 else 2.0)

    timed = timed_here(function, 10, num_warmup=num_warmup)
    assert timed.num_warmup == num_warmup and timed.method == "host"
    assert timed.samples_ms == approximately([2.0 if num_warmup else 1000.0, *[2.0] * 9])
    assert timed.host_ms == timed.samples_ms and timed.launch_ms == ()
    assert len(calls) == num_warmup + timed.n


@pytest.mark.parametrize(
    ("cost_ms", "limit_s", "expected"),
    [(5000.0, 1.0, 1), (600.0, 1.0, 2), (1.0, 1.0, 5), (1.0, 0.0, 1)],
)
def test_warmup_ends_early_when_it_takes_the_time_limit_but_happens(
    clock, cost_ms, limit_s, expected
):
    calls = []
    timed = timed_here(
        lambda: calls.append(clock.spend(cost_ms)), num_warmup=5, time_limit_s=limit_s
    )
    assert timed.num_warmup == len(calls) - timed.n == expected


def test_making_fresh_inputs_is_outside_the_sample(clock):
    made, seen = [], []

    def make_inputs():
        clock.spend(50.0)
        made.append(object())
        return (made[-1], 7)

    def function(first, second):
        seen.append(first)
        assert second == 7
        clock.spend(1.0)

    timed = timed_here(function, 5, inputs=make_inputs, num_warmup=2)
    assert timed.samples_ms == timed.host_ms == approximately([1.0] * 5)
    assert seen == made and len(made) == 7, "each call gets inputs of its own"


def test_inputs_are_used_in_turn_from_the_first(clock):
    seen = []

    def function(value, cost_ms):
        seen.append(value)
        clock.spend(cost_ms)

    timed = timed_here(function, 7, inputs=[("a", 1.0), ("b", 2.0), ("c", 3.0)], num_warmup=1)
    assert seen == list("abcabcab")
    assert timed.samples_ms == approximately([2.0, 3.0, 1.0, 2.0, 3.0, 1.0, 2.0])


def test_a_sleep_is_measured_by_the_clock_on_the_wall():
    inside_ms = []

    def sleep():
        begin = time.perf_counter()
        time.sleep(0.01)
        inside_ms.append((time.perf_counter() - begin) * 1e3)

    timed = timed_here(sleep, 7, num_warmup=1, target_half_width=0)
    around_ms = [
        around - inside for around, inside in zip(timed.samples_ms, inside_ms[1:], strict=True)
    ]
    assert min(timed.samples_ms) >= 10.0
    assert min(around_ms) >= 0, "a sample is shorter than what it holds"
    # Two readings of a clock and a call: microseconds, so a hundredth of the sleep is much.
    assert statistics.median(around_ms) < 0.1


def costs_with_spread(clock):
    costs = random.Random(0)
    return lambda: clock.spend(costs.uniform(1.0, 3.0))


def test_sampling_stops_once_the_median_is_known(clock):
    timed = timed_here(lambda: clock.spend(2.0), min_samples=10, max_samples=200)
    assert timed.stop_reason == "converged"
    assert 10 <= timed.n < 15, "the width is looked at every five samples"
    assert median_half_width(timed.samples_ms) <= 0.005


def test_sampling_goes_on_until_the_median_is_known_that_well(clock):
    options = {
        "target_half_width": 0.08,
        "max_samples": 10_000,
        "time_limit_s": 1e6,
        "num_warmup": 0,
    }
    timed = timed_here(costs_with_spread(clock), **options)
    assert timed.stop_reason == "converged"
    assert median_half_width(timed.samples_ms) <= 0.08
    assert timed.n > 15
    assert median_half_width(timed.samples_ms[:10]) > 0.08


@pytest.mark.parametrize(
    ("options", "reason", "num_samples"),
    [
        (
            {"max_samples": 50, "target_half_width": 0},
            "sample limit",
            50,
        ),  # a target of zero never converges
        ({"max_samples": 30, "time_limit_s": 1e6}, "sample limit", 30),
        ({"min_samples": 12, "max_samples": 12}, "fixed count", 12),
    ],
)
@pytest.mark.parametrize("spread", [False, True])
def test_sampling_stops_at_the_sample_limit(clock, options, reason, num_samples, spread):
    function = (
        costs_with_spread(clock)
        if spread or "time_limit_s" in options
        else lambda: clock.spend(2.0)
    )
    timed = timed_here(function, **options)
    assert (timed.stop_reason, timed.n) == (reason, num_samples)


def test_sampling_stops_at_the_time_limit(clock):
    timed = timed_here(costs_with_spread(clock), max_samples=500, time_limit_s=0.1)
    assert timed.stop_reason == "time limit"
    assert sum(timed.samples_ms[:-1]) < 100.0 <= sum(timed.samples_ms) + 1e-6


@pytest.mark.parametrize(
    ("cost_ms", "expected"), [(100_000.0, 3), (1000.5, 3), (500.5, 6), (300.5, 10)]
)
def test_a_slow_function_gets_three_samples_at_least_and_three_times_the_limit_at_most(
    clock, cost_ms, expected
):
    timed = timed_here(lambda: clock.spend(cost_ms), min_samples=10, time_limit_s=1.0)
    assert timing.MIN_SAMPLES_AT_LIMIT == 3
    assert (timed.stop_reason, timed.n) == ("time limit", expected)


def test_the_making_of_inputs_counts_towards_the_limit(clock):
    # A backward pass of a millisecond behind a forward of a second would otherwise run for minutes.
    def make_inputs():
        clock.spend(1000.0)
        return ()

    timed = timed_here(lambda: clock.spend(1.0), inputs=make_inputs, time_limit_s=1.0)
    assert (timed.stop_reason, timed.n) == ("time limit", 3)


def must_not_run(*_):
    pytest.fail("something was timed before the arguments were looked at")


@pytest.mark.parametrize("measure", [time_callable, compare])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "wallclock"}, f"unknown method 'wallclock'; accepted: {', '.join(METHODS)}"),
        *(
            (
                {"method": method, "device_kind": kind},
                f"method '{method}' needs CUDA, the device is '{kind}'",
            )
            for method in ("window", "graph", "flush")
            for kind in ("cpu", "mps")
        ),
        # Looked at before the GPU is touched, so that these need none.
        *(
            (
                {"method": method, "device_kind": "cuda", "inputs": lambda: ()},
                f"method '{method}' repeats its inputs",
            )
            for method in ("graph", "flush")
        ),
        *(
            ({"method": method, "device_kind": "cuda", "inputs": []}, "inputs is empty")
            for method in METHODS
        ),
        ({"inputs": []}, "inputs is empty"),
    ],
)
def test_what_cannot_be_timed_is_refused_before_anything_runs(measure, options, message):
    function, baseline = (
        (must_not_run, {}) if measure is time_callable else ({"a": must_not_run}, {"baseline": "a"})
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        measure(function, **{"device_kind": "cpu"} | options, **baseline)


@pytest.fixture
def collector():
    """Leaves the garbage collector as it was found."""
    was_enabled = gc.isenabled()
    gc.enable()
    yield
    (gc.enable if was_enabled else gc.disable)()


@pytest.mark.parametrize("is_enabled", [True, False])
def test_the_garbage_collector_rests_while_sampling_and_is_then_as_before(collector, is_enabled):
    (gc.enable if is_enabled else gc.disable)()
    seen = []

    def function():
        seen.append(gc.isenabled())

    timed_here(function, 3, num_warmup=1)
    assert gc.isenabled() == is_enabled
    compare(
        {"a": function, "b": function}, baseline="a", device_kind="cpu", num_warmup=1, num_rounds=2
    )
    assert gc.isenabled() == is_enabled
    assert seen == [False] * (4 + 6)


@pytest.mark.parametrize("failing_call", [1, 4])
def test_the_garbage_collector_is_back_after_a_failure(collector, failing_call):
    calls = iter(range(1, 10))

    def function():
        if next(calls) == failing_call:
            raise KeyError

    with pytest.raises(KeyError):
        timed_here(function, num_warmup=2)
    assert gc.isenabled()


def run_comparison(clock, costs, **options):
    """Returns the comparison of candidates that cost what costs[name](its call) says, and the order
    of the calls.
    """
    order = []

    def candidate(name):
        def function():
            order.append(name)
            clock.spend(costs[name](len(order)))

        return function

    result = compare({name: candidate(name) for name in costs}, device_kind="cpu", **options)
    return result, order


def test_every_round_times_every_candidate_in_an_order_of_its_own(clock):
    costs = dict.fromkeys("abc", lambda call: 1.0)
    result, order = run_comparison(clock, costs, baseline="a", num_warmup=2, num_rounds=20)
    rounds = ["".join(order[i : i + 3]) for i in range(6, len(order), 3)]
    assert len(rounds) == 20
    assert all(sorted(r) == list("abc") for r in rounds)
    assert len(set(rounds)) > 3, "one order for all rounds puts one candidate always behind another"
    assert Counter(order[:6]) == {"a": 2, "b": 2, "c": 2}, (
        "warm-up of all comes before the first round"
    )
    assert {name: timed.n for name, timed in result.timings.items()} == {"a": 20, "b": 20, "c": 20}
    assert all(timed.num_warmup == 2 for timed in result.timings.values())

    _, again = run_comparison(clock, costs, baseline="a", num_warmup=2, num_rounds=20)
    assert again == order, "the seed decides"
    _, other = run_comparison(clock, costs, baseline="a", num_warmup=2, num_rounds=20, seed=1)
    assert other != order


def test_the_ratio_of_twice_the_time_is_two(clock):
    costs = {"base": lambda call: 1.0, "twice": lambda call: 2.0}
    result, _ = run_comparison(clock, costs, baseline="base")
    assert result.ratio["twice"] == approximately((2.0, 2.0, 2.0))
    assert result.ratio["base"] == (1.0, 1.0, 1.0)
    result, _ = run_comparison(clock, costs, baseline="twice")
    assert result.ratio["base"] == approximately((0.5, 0.5, 0.5))


def test_the_interval_of_a_noisy_ratio_holds_the_true_one(clock):
    noise = random.Random(12345)
    costs = {
        "base": lambda call: noise.lognormvariate(0, 0.1),
        "twice": lambda call: 2 * noise.lognormvariate(0, 0.1),
    }
    num_held = 0
    for seed in range(40):
        result, _ = run_comparison(clock, costs, baseline="base", num_warmup=1, seed=seed)
        median, low, high = result.ratio["twice"]
        assert low <= median <= high
        # A ratio scatters by √2/10 of itself, the median of 30 by a quarter of that, the interval
        # by four times it.
        assert 0.05 < high - low < 0.8
        assert low > 1
        num_held += low <= 2.0 <= high
    # 38 of 40 are expected, with a standard deviation of 1.4; four of these below is no 95 %
    # interval.
    assert num_held >= 33


@pytest.mark.parametrize("seed", range(5))
def test_a_drifting_clock_separates_nothing(clock, seed):
    # Every call is a hundredth slower than the one before: in a fixed order the second would always
    # lose.
    costs = dict.fromkeys("ab", lambda call: 1.01**call)
    result, _ = run_comparison(clock, costs, baseline="a", num_warmup=0, num_rounds=40, seed=seed)
    _, low, high = result.ratio["b"]
    # Unpaired, the times range over a factor of two; paired, over one call's drift either way.
    assert 1 / 1.0101 <= low <= 1 <= high <= 1.0101


def test_a_ratio_is_the_median_of_paired_ratios_and_not_of_medians(clock):
    base, other = iter([1.0, 10.0, 100.0]), iter([2.0, 30.0, 100.0])
    costs = {"base": lambda call: next(base), "other": lambda call: next(other)}
    result, _ = run_comparison(clock, costs, baseline="base", num_warmup=0, num_rounds=3)
    assert result.ratio["other"][0] == approximately(2.0)


def test_candidates_get_the_same_inputs_in_the_same_round(clock):
    seen = {"a": [], "b": []}
    candidates = {
        name: lambda value, name=name: (seen[name].append(value), clock.spend(1.0)) for name in seen
    }
    compare(
        candidates,
        baseline="a",
        device_kind="cpu",
        inputs=[(1,), (2,), (3,)],
        num_warmup=1,
        num_rounds=4,
    )
    assert seen["a"] == seen["b"] == [1, 2, 3, 1, 2]


def test_an_unknown_baseline_is_refused_with_the_candidates():
    with pytest.raises(ValueError, match="unknown baseline 'c'; accepted: a, b"):
        compare({"a": must_not_run, "b": must_not_run}, baseline="c", device_kind="cpu")


def test_the_bootstrap_interval_holds_the_true_median_as_often_as_it_says():
    generator = random.Random(0)
    num_held = 0
    for _ in range(200):
        median, low, high = bootstrap_median(
            [generator.expovariate(1.0) for _ in range(30)], generator, 200
        )
        assert low <= median <= high
        num_held += low <= math.log(2) <= high
    # 95 % of 200 with a standard deviation of three: outside of four of these it would not be a 95
    # % interval.
    assert 178 <= num_held <= 200
    assert bootstrap_median([2.0] * 5, generator) == (2.0, 2.0, 2.0)


def negate(target: torch.Tensor, source: torch.Tensor) -> None:
    """Reads every byte once and writes every byte once.

    No copy_: it is a transfer, and inside a graph the driver runs it as another kernel, at two
    thirds of the speed on an H200. The methods would then time different work.
    """
    torch.neg(source, out=target)


def launch_bound(timed: Timing) -> bool:
    return statistics.median(timed.launch_ms) >= LAUNCH_BOUND * statistics.median(timed.host_ms)


def gpu_pairs(num_pairs: int = 1) -> tuple[int, list]:
    """Returns a number of bytes well beyond any L2 cache, and pairs of target and source of that
    size.
    """
    free_bytes, _ = torch.cuda.mem_get_info()
    num_bytes = min(2**30, free_bytes // (4 * num_pairs)) // 4 * 4
    return num_bytes, [
        (
            torch.full((num_bytes // 4,), math.nan, device="cuda"),
            torch.randn(num_bytes // 4, device="cuda"),
        )
        for _ in range(num_pairs)
    ]


@pytest.mark.gpu
def test_a_call_that_waits_cannot_be_captured_and_spoils_nothing():
    x = torch.ones(3, device="cuda")
    assert timing.can_be_captured(x.clone) and not timing.can_be_captured(lambda: x.sum().item())
    assert torch.rand(3, device="cuda").sum() > 0 and timing.can_be_captured(x.clone)


@pytest.mark.gpu
def test_the_methods_agree_on_known_bytes():
    """Moving two gigabytes is all device time: launch, events and a cold cache are about a
    hundredth of it.
    """
    num_bytes, pairs = gpu_pairs()
    medians = {}
    for method in ("graph", "flush", "window"):
        pairs[0][0].fill_(math.nan)
        timed = time_callable(negate, device_kind="cuda", inputs=pairs, method=method)
        assert timed.method == method
        assert torch.equal(pairs[0][0], -pairs[0][1]), f"{method} did not run the function"
        medians[method] = timed.median_ms
        if method == "window":
            assert len(timed.host_ms) == len(timed.launch_ms) == timed.n
            assert not launch_bound(timed)
            assert all(
                host >= launch for host, launch in zip(timed.host_ms, timed.launch_ms, strict=True)
            )
        else:
            assert timed.host_ms == timed.launch_ms == ()
    assert max(medians.values()) <= 1.05 * min(medians.values()), medians
    peaks = detect().peaks
    if peaks:
        # Each byte is read once and written once; more than the memory can is a broken clock.
        assert 2 * num_bytes / (min(medians.values()) * 1e-3) <= peaks.memory_gb_per_s * 1e9


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
    assert min(side_ms) > 1.0, "too short to tell from the launch"
    for host_ms, device_ms in zip(timed.host_ms, side_ms, strict=True):
        # Two clocks, host and device, that agree much better than to a hundredth.
        assert host_ms >= 0.99 * device_ms
    # The events are on the current stream, which is why the host clock is kept beside them.
    assert timed.median_ms < 0.5 * statistics.median(side_ms)


@pytest.mark.gpu
def test_a_graph_runs_every_input_equally_often():
    counters = [(torch.zeros((), dtype=torch.int64, device="cuda"),) for _ in range(3)]
    timed = time_callable(
        lambda counter: counter.add_(1),
        device_kind="cuda",
        inputs=counters,
        method="graph",
        num_warmup=2,
    )
    counts = {counter.item() for (counter,) in counters}
    assert len(counts) == 1
    assert counts.pop() > timed.n
    # One addition of one number; a replay of them all lasts milliseconds.
    assert timed.median_ms < 0.1


@pytest.mark.gpu
def test_a_graph_sample_is_one_call_however_many_inputs_rotate():
    _, pairs = gpu_pairs(num_pairs=4)
    one = time_callable(negate, device_kind="cuda", inputs=pairs[:1], method="graph")
    four = time_callable(negate, device_kind="cuda", inputs=pairs, method="graph")
    assert max(one.median_ms, four.median_ms) <= 1.05 * min(one.median_ms, four.median_ms)
    for target, source in pairs:
        assert torch.equal(target, -source)


@pytest.mark.gpu
def test_small_operations_are_launch_bound_and_a_graph_takes_the_launches_out():
    x = torch.zeros(16, device="cuda")

    def function():
        for _ in range(300):
            x.add_(1)

    window = time_callable(function, device_kind="cuda")
    graph = time_callable(function, device_kind="cuda", method="graph")
    assert launch_bound(window)
    assert graph.median_ms < window.median_ms


@pytest.mark.gpu
def test_a_graph_that_is_timed_again_keeps_no_more_memory():
    x = torch.randn(256, 256, device="cuda", requires_grad=True)
    grad_out = torch.randn_like(x)

    def held_after_timing() -> int:
        time_callable(
            lambda: torch.autograd.grad(x @ x, x, grad_out), device_kind="cuda", method="graph"
        )
        return torch.cuda.memory_allocated()

    first = held_after_timing()
    assert [held_after_timing() for _ in range(3)] == [first] * 3


def test_a_time_of_nothing_is_no_time(monkeypatch):
    """As where a clock does not tell two moments apart."""
    monkeypatch.setattr(timing, "time", types.SimpleNamespace(perf_counter=lambda: 5.0))
    for measure in (
        lambda: time_callable(list, device_kind="cpu", max_samples=10),
        lambda: compare({"a": list, "b": list}, baseline="a", device_kind="cpu", num_rounds=2),
    ):
        with pytest.raises(ValueError, match=r"a sample of 0\.0 ms: shorter than the clock tells"):
            measure()
    assert math.isnan(median_half_width([0.0, 0.0, 0.0]))
