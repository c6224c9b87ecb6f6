"""What a GPU does under load that lasts: time per call at the clocks that its power limit leaves,
watts, joules.

A timer's samples are bursts, between which the power budget recovers. Back to back for seconds a
GPU is at its power limit, and the same kernels are slower, in another order.

Energy is NVML's count of the millijoules used since the driver was loaded. It advances in steps of
10 to 100 ms, so readings at a window's ends are wrong by up to a step. Power is therefore taken
between a step seen after the window's begin and one before its end, and the counter, which disturbs
the host, is read only until each of them is seen.
"""

import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from labkit.measure.timing import synchronize
from labkit.monitor import Monitor, Reading

BATCH_S = 0.02
"""Calls are issued in batches of about this length, at most two of them in the queue."""

READING_INTERVAL_S = 0.02

ENDS_S = 0.16
"""How long after a window's begin and before its end a step of the energy counter is looked for."""

STEADY = 0.02
"""Both halves of a steady window have the same time per call and the same SM clock, within this
fraction.
"""


class Sustained(NamedTuple):
    """Calls back to back over a window.

    Attributes:
        metrics: a record's metrics, without those that could not be measured.
        telemetry: what else a record keeps: `num_calls`, length of window and warm-up, `drift` and
            `clock_drift` (by which fraction the time per call, and the SM clock where it can be
            read, changed from the window's first half to its second), in `no_energy` why there are
            no watts, and `Monitor.summary` of window and warm-up.
    """

    metrics: dict[str, float | int]
    telemetry: dict[str, Any]


def sustained(
    function: Callable[[], Any],
    *,
    device_kind: str,
    warmup_s: float = 1.0,
    window_s: float = 1.0,
    calls_per_function: int = 1,
    flops: float | None = None,
    num_bytes: float | None = None,
) -> Sustained:
    """Returns what `function` takes when it is called back to back, without waiting for one call
    before the next.

    Args:
        function: what is run, as often as it takes; it must have run before.
        device_kind: "cuda" or "cpu".
        warmup_s, window_s: shortest time of the calls before the window, and of the window, which
            has two at least.
        calls_per_function: how many calls one is, for the replay of a graph of several.
        flops, num_bytes: what one call computes and moves.

    """
    start = math.inf

    def wants_energy(time_s: float) -> bool:
        looks_from = start if time_s < start + ENDS_S else start + window_s - ENDS_S
        seen = {one.energy_mj for one in monitor.readings if one.time_s >= looks_from} - {None}
        return time_s >= looks_from and len(seen) < 2

    # NVML is opened before the warm-up: the GPU must not idle between that and the window.
    with Monitor(device_kind, READING_INTERVAL_S, wants_energy) as monitor:
        begin = time.perf_counter()
        batch = 1
        while min(_batches_s(function, batch, 0.0, device_kind)) < BATCH_S:
            if time.perf_counter() - begin >= warmup_s:
                break
            batch *= 2
        left_s = warmup_s - (time.perf_counter() - begin)
        if left_s > 0:
            _batches_s(function, batch, left_s, device_kind)
        start = time.perf_counter()
        batches_s = _batches_s(function, batch, window_s, device_kind)
        end = time.perf_counter()
    readings = [reading for reading in monitor.readings if start <= reading.time_s <= end]
    clocks = [reading.sm_clock_mhz for reading in readings if reading.sm_clock_mhz]
    watts, no_energy = _power(readings, end - start, device_kind)
    num_calls = batch * calls_per_function * len(batches_s)
    ms_per_call = 1e3 * sum(batches_s) / num_calls
    drift = _drift(batches_s)
    clock_drift = _drift(clocks)
    metrics = {
        "sustained_ms": ms_per_call,
        "steady": int(max(drift, clock_drift) <= STEADY),
    }
    telemetry = {
        **monitor.summary,
        "num_calls": num_calls,
        "window_s": sum(batches_s),
        "warmup_s": start - begin,
        "drift": drift,
        "clock_drift": clock_drift,
    }
    if flops:
        metrics["sustained_tflops"] = flops / ms_per_call / 1e9
    if num_bytes:
        metrics["sustained_gb_per_s"] = num_bytes / ms_per_call / 1e6
    if clocks:
        metrics["sm_clock_mhz"] = statistics.median(clocks)
    if no_energy:
        telemetry["no_energy"] = no_energy
    else:
        joules = watts * ms_per_call * 1e-3
        metrics |= {"joules": joules, "watts": watts}
        if flops:
            metrics["tflop_per_joule"] = flops / joules / 1e12
    return Sustained(metrics, telemetry)


def _batches_s(
    function: Callable, num_calls: int, at_least_s: float, device_kind: str
) -> list[float]:
    """Returns the times of two or more batches of calls, all issued one after another; ends
    synchronised.
    """
    marks = [_mark(device_kind)]
    begin = time.perf_counter()
    while len(marks) <= 2 or time.perf_counter() - begin < at_least_s:
        for _ in itertools.repeat(None, num_calls):
            function()
        marks.append(_mark(device_kind))
        if device_kind == "cuda":
            marks[-2].synchronize()
    synchronize(device_kind)
    if device_kind == "cuda":
        return [1e-3 * one.elapsed_time(other) for one, other in itertools.pairwise(marks)]
    return [other - one for one, other in itertools.pairwise(marks)]


def _mark(device_kind: str) -> Any:
    """Returns a point in the device's time: an event, or without CUDA the clock once the device is
    done.
    """
    if device_kind == "cuda":
        # While the host waits for a blocking event, the sampling thread has the core.
        event = torch.cuda.Event(enable_timing=True, blocking=True)
        event.record()
        return event
    synchronize(device_kind)
    return time.perf_counter()


def _drift(values: Sequence[float]) -> float:
    """Returns by which fraction the mean of the second half differs from that of the first; 0 for
    less than two.
    """
    half = len(values) // 2
    if half == 0:
        return 0.0
    return abs(statistics.fmean(values[half:]) / statistics.fmean(values[:half]) - 1)


def _power(readings: Sequence[Reading], window_s: float, device_kind: str) -> tuple[float, str]:
    """Returns the mean watts between the first and the last step seen of the energy counter, and
    why there are none.
    """
    if device_kind != "cuda":
        return 0.0, f"no energy counter is read on {device_kind}"
    if "MIG" in torch.cuda.get_device_name(0).split():
        return 0.0, "the energy counter is of the whole GPU, not of its MIG slice"
    counts = [reading for reading in readings if reading.energy_mj is not None]
    if not counts:
        return 0.0, "this GPU or driver has no energy counter"
    steps = [
        after
        for before, after in itertools.pairwise(counts)
        # Between the window's ends the counter was not read: a step there was not seen.
        if after.time_s - before.time_s < ENDS_S and after.energy_mj != before.energy_mj
    ]
    if not steps or steps[-1].time_s - steps[0].time_s < window_s / 2:
        return 0.0, "the energy counter advanced too seldom"
    joules = 1e-3 * (steps[-1].energy_mj - steps[0].energy_mj)
    if joules < 0:
        return 0.0, "the energy counter went backwards"
    return joules / (steps[-1].time_s - steps[0].time_s), ""
