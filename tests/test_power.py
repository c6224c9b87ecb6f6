"""Sustained times are of calls back to back, power is the counter's; what there is not is absent
with its reason.
"""

import itertools
import json
import time
import types

import pytest
import torch

from labkit.measure import power
from labkit.measure.power import sustained
from labkit.monitor import Reading

CALL_S = 0.004
WATTS, STEP_S = 250.0, 0.05


class Clock:
    """A clock that only calls move."""

    def __init__(self):
        self.now_s, self.call_s, self.calls = 1000.0, CALL_S, 0

    def call(self) -> None:
        self.calls += 1
        self.now_s += self.call_s(self.calls) if callable(self.call_s) else self.call_s


def readings(begin_s, end_s, watts=WATTS, step_s=STEP_S, clocks=None):
    """Returns what a GPU says every 20 ms whose counter is brought up to date every `step_s`."""
    times = [begin_s + 0.02 * number for number in range(1, int((end_s - begin_s) / 0.02))]
    return [
        Reading(
            time_s,
            round(1e3 * watts * (time_s // step_s) * step_s),
            clock,
            690_000,
            60,
            0,
        )
        for time_s, clock in zip(times, clocks or itertools.repeat(1500), strict=False)
    ]


@pytest.fixture
def gpu(monkeypatch):
    """A GPU whose time is that of a `Clock`, and whose NVML says what `says` returns of begin and
    end.
    """
    clock = Clock()
    fake = types.SimpleNamespace(clock=clock, says=readings, most_queued=0)

    class Event:
        queued = 0

        def __init__(self, **options):
            assert options == {"enable_timing": True, "blocking": True}

        def record(self):
            self.time_s = clock.now_s
            Event.queued += 1
            fake.most_queued = max(fake.most_queued, Event.queued)

        def synchronize(self):
            Event.queued = 1

        def elapsed_time(self, other):
            return 1e3 * (other.time_s - self.time_s)

    class Monitor:
        def __init__(self, device_kind, interval_s, wants_energy):
            assert device_kind == "cuda" and interval_s <= 0.02
            self.wants_energy, self.readings, self.summary = wants_energy, [], {"disturbed": False}

        def __enter__(self):
            self.begin_s = clock.now_s
            return self

        def __exit__(self, *_):
            for one in fake.says(self.begin_s, clock.now_s):
                energy_mj = one.energy_mj if self.wants_energy(one.time_s) else None
                self.readings.append(one._replace(energy_mj=energy_mj))

    cuda = types.SimpleNamespace(Event=Event, get_device_name=lambda index: "NVIDIA H200")
    monkeypatch.setattr(power, "torch", types.SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(power, "time", types.SimpleNamespace(perf_counter=lambda: clock.now_s))
    monkeypatch.setattr(power, "Monitor", Monitor)
    monkeypatch.setattr(power, "synchronize", lambda device_kind: None)
    return fake


def measured(gpu, **options) -> tuple[dict, dict]:
    """Returns metrics and telemetry of a window."""
    window = sustained(gpu.clock.call, device_kind="cuda", **options)
    return window.metrics, window.telemetry


def test_a_window_holds_calls_back_to_back_and_their_energy(gpu):
    metrics, telemetry = measured(gpu, warmup_s=1.0, window_s=2.0, flops=8e12, num_bytes=4e9)
    assert 2.0 <= telemetry["window_s"] < 2.1 and 1.0 <= telemetry["warmup_s"] < 1.1
    assert telemetry["window_s"] == pytest.approx(telemetry["num_calls"] * CALL_S)
    assert gpu.most_queued <= 3, "the host runs away from the device"
    assert metrics == {
        "sustained_ms": pytest.approx(4.0),
        "steady": 1,
        "sustained_tflops": pytest.approx(2000.0),
        "sustained_gb_per_s": pytest.approx(1000.0),
        "joules": pytest.approx(metrics["watts"] * CALL_S),
        "watts": pytest.approx(WATTS, rel=0.03),
        "tflop_per_joule": pytest.approx(8 / (metrics["watts"] * CALL_S)),
        "sm_clock_mhz": 1500,
    }
    assert "no_energy" not in telemetry and json.loads(json.dumps([metrics, telemetry]))


@pytest.mark.parametrize("step_s", [0.001, 0.1])
def test_a_counter_that_advances_in_steps_gives_the_same_power_for_every_step(gpu, step_s):
    gpu.says = lambda begin_s, end_s: readings(begin_s, end_s, step_s=step_s)
    for window_s in (1.0, 1.04, 1.08):
        # Read at the ends of the worst of these windows, steps of 0.1 s would give several percent
        # too little or much.
        metrics, _ = measured(gpu, window_s=window_s)
        assert metrics["watts"] == pytest.approx(WATTS, rel=0.03)


@pytest.mark.parametrize(
    ("says", "reason"),
    [
        (lambda *_: [], "this GPU or driver has no energy counter"),
        (lambda *ends: readings(*ends, step_s=10.0), "the energy counter advanced too seldom"),
        (lambda *ends: readings(*ends, watts=-5.0), "the energy counter went backwards"),
    ],
)
def test_without_energy_the_reason_is_given_and_the_time_is_measured(gpu, says, reason):
    gpu.says = says
    metrics, telemetry = measured(gpu, flops=8e12)
    assert telemetry["no_energy"] == reason and metrics["sustained_ms"] == pytest.approx(4.0)
    assert not {"joules", "watts", "tflop_per_joule"} & metrics.keys()


def test_a_window_is_steady_if_neither_its_clock_nor_its_time_drifts(gpu):
    gpu.says = lambda *ends: readings(*ends, clocks=itertools.count(1980, -5))
    metrics, telemetry = measured(gpu)
    assert telemetry["clock_drift"] > power.STEADY > telemetry["drift"]
    assert metrics["steady"] == 0
    gpu.clock.calls = 0
    gpu.clock.call_s = lambda number: 0.004 if number < 400 else 0.0043
    assert measured(gpu)[0]["steady"] == 0


def test_a_replay_counts_as_the_calls_that_it_holds_and_a_long_one_is_made_twice(gpu):
    metrics, telemetry = measured(gpu, calls_per_function=8)
    assert metrics["sustained_ms"] == pytest.approx(0.5) and telemetry["num_calls"] % 8 == 0
    gpu.clock.call_s = 5.0
    metrics, telemetry = measured(gpu)
    assert telemetry["num_calls"] == 2 and metrics["sustained_ms"] == pytest.approx(5000.0)


@pytest.mark.gpu(alone=True)
def test_joules_of_a_matrix_product_agree_with_the_counter_read_by_hand():
    from labkit.monitor import open_nvml

    n = 8192
    flops = 2 * n**3
    a = torch.randn(n, n, device="cuda", dtype=torch.bfloat16)
    num_calls = 1000  # as many as the queue holds, so that the host is free to read
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with open_nvml() as (nvml, handle):
        metrics = sustained(
            lambda: a @ a, device_kind="cuda", warmup_s=2.0, window_s=2.5, flops=flops
        ).metrics
        for event in (begin, end):
            for _ in range(num_calls):
                a @ a
            event.record()
        begin.synchronize()
        seen_s = {}  # when each count was seen first; all but the first of them at a step
        while not end.query():
            seen_s.setdefault(nvml.nvmlDeviceGetTotalEnergyConsumption(handle), time.perf_counter())
    _, (first_mj, first_s), *_, (last_mj, last_s) = seen_s.items()
    milliwatts = (last_mj - first_mj) / (last_s - first_s)
    by_hand = flops * num_calls / begin.elapsed_time(end) / 1e6 / milliwatts
    assert metrics["tflop_per_joule"] == pytest.approx(by_hand, rel=0.05)
