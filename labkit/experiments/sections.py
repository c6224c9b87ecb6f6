"""How a case is run: its section's live objects, its phases one after another, and what all
sections need for it; and the two sections that every session begins with.

"host" is how long the host takes to issue work, see `measure.host`. "ceilings" is what the device
can do at best: the rates of a matrix product and of a copy, in bursts and sustained, by which the
session's results are divided.
"""

import functools
import gc
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from labkit import numerics
from labkit.configs import Grid, check_known
from labkit.device import Device, detect
from labkit.experiments.sweep import Case, Ceilings, Measured, PhaseRuns, Skip
from labkit.measure import host
from labkit.measure.power import sustained
from labkit.measure.timing import Timing, captured, synchronize, time_callable
from labkit.monitor import Monitor
from labkit.records import HOST_SECTION, SESSION_SECTION

Runner = Callable[[Device, Case], PhaseRuns]
"""Yields the phases of a case on a device."""

KEPT_SAMPLES = 20
"""A record keeps its samples where there are at most this many."""

SUSTAINED_S = {"cuda": 1.0, "cpu": 0.1}
"""Length of a sustained window and of the same calls before it. A CPU is neither metered nor at its
power limit so soon: its windows only show that they can be had.
"""

CEILING_SIZES = {"cuda": 8192, "cpu": 1024, "cpu bf16": 512}
"""M = N = K of the matrix product: large enough that the device, not the launch, is what is
measured. Without instructions for bf16 a CPU takes seconds for 1,024.
"""

COPY_BYTES = {"cuda": 2**31, "cpu": 2**26}
"""Bytes of the copied buffer, well past every cache; as much is written again."""

CEILING_TIME_S = {"cuda": 3.0, "cpu": 0.5}
"""Limit of the samples of one ceiling: a CPU never becomes steady enough to stop before it."""


class Plan(list[Case]):
    """The cases of a chapter, within the limits of its grid: first the ceilings in `precisions`."""

    def __init__(self, grid: Grid, precisions: Iterable[str] = ()):
        super().__init__(ceiling_cases(precisions, grid.case_timeout_s))
        self.limits = {"timeout_s": grid.case_timeout_s, "time_limit_s": grid.time_limit_s}

    def add(self, section: str, parameters: dict, *phases: str, **options) -> None:
        self.append(Case(section, parameters, phases, **self.limits | options))


def section(measure: Callable[..., Measured], live: Callable | None = None) -> Runner:
    """Returns the usual runner: `measure` gets (live object, case, phase), and returns the phase's
    measurement.

    Args:
        live: makes the live object of the device and a case's parameters, and is closed after the
            phases where it can be; without it, that is the device.
    """

    def run(device: Device, case: Case) -> PhaseRuns:
        subject = live(device, case.parameters) if live else device
        try:
            for phase in case.phases:
                yield phase, functools.partial(measure, subject, case, phase)
        finally:
            if hasattr(subject, "close"):
                subject.close()

    return run


def run_section(sections: Mapping[str, Runner], case: Case) -> PhaseRuns:
    """Yields each phase of `case` with the function that measures it, in the case's precision;
    raises Skip for one that the device lacks, or only emulates: it would be timed as something
    else.

    A case that every session begins with needs no entry in `sections`.
    """
    device = detect()
    precision = case.parameters.get("precision", "fp32")
    is_cuda = device.kind == "cuda"
    if precision == "tf32" and not (is_cuda and torch.cuda.get_device_capability() >= (8, 0)):
        raise Skip(f"{device.name} has no TF32")
    if precision in ("bf16", "bf16_pure") and is_cuda:
        if not torch.cuda.is_bf16_supported(including_emulation=False):
            raise Skip(f"{device.name} has no bfloat16")
    numerics.set_precision(precision)
    yield from (OF_EVERY_SESSION | sections)[case.section](device, case)


@dataclass(frozen=True)
class Timed:
    """What a timer gave, and what the GPU's clocks, power and temperature were."""

    timing: Timing
    telemetry: dict

    def measured(
        self,
        metrics: dict,
        case: dict,
        observed: dict | None = None,
        *,
        keep: str = "",
    ) -> Measured:
        """Returns a measurement with the timer's own metrics before `metrics`; few times are kept
        under `keep`.
        """
        timing = self.timing
        is_kept = keep and timing.n <= KEPT_SAMPLES
        samples = {keep: list(timing.samples_ms)} if is_kept else {}
        metrics = timing.metrics() | metrics
        timer = {"method": timing.method}
        return Measured(metrics, case, observed or {}, samples, timer, self.telemetry)


def timed(device: Device, timer: Callable[..., Timing], *args, **options) -> Timed:
    """Returns what `timer` gives of these and the device's kind, with the GPU watched meanwhile."""
    with Monitor(device.kind) as monitor:
        timing = timer(*args, device_kind=device.kind, **options)
    return Timed(timing, monitor.summary)


def sustained_metrics(
    device: Device,
    ceilings: Ceilings,
    timed: Timed,
    call: Callable,
    precision: str,
    **work: float,
) -> dict:
    """Returns the metrics of `call` run back to back, see `measure.power`; its window joins the
    telemetry of `timed`.

    Args:
        ceilings: the session's, {} for a call that is one. timed: what its timer gave. What was
            replayed from a CUDA graph is replayed here, and not held up by the host. work: `flops`
            or `num_bytes` of a call.
    """
    is_replayed = timed.timing.method == "graph"
    length_s = SUSTAINED_S[device.kind]
    run, num_calls = captured(call) if is_replayed else (call, 1)
    window = sustained(
        run,
        device_kind=device.kind,
        warmup_s=length_s,
        window_s=length_s,
        calls_per_function=num_calls,
        **work,
    )
    timed.telemetry["sustained"] = window.telemetry
    if window.telemetry.get("disturbed"):
        timed.telemetry.update(disturbed=True, disturbed_by=window.telemetry["disturbed_by"])
    return window.metrics | sustained_share(ceilings, window.metrics, precision)


def sustained_share(
    ceilings: Ceilings, metrics: dict[str, Any], precision: str
) -> dict[str, float]:
    """Returns the share of the session's sustained ceiling that the "sustained_tflops" of
    `metrics` have; {} where the session has none.
    """
    ceiling = ceilings.get(f"gemm {precision} sustained_tflops")
    if not ceiling:
        return {}
    share = metrics["sustained_tflops"] / ceiling
    return {"sustained_ceiling_fraction": share}


def time_once_ms(call: Callable, device_kind: str) -> float:
    """Returns the host's time (ms) of one call, until the device has done what it issued."""
    synchronize(device_kind)
    begin = time.perf_counter()
    call()
    synchronize(device_kind)
    return (time.perf_counter() - begin) * 1e3


def rate_metrics(
    device: Device,
    ceilings: Ceilings,
    median_ms: float,
    precision: str,
    *,
    peak_precision: str = "",
    flops: int = 0,
    num_bytes: int = 0,
) -> dict:
    """Returns a call's `flops` or `num_bytes`, its rate, the session's ceiling and the datasheet's
    peak, which is that of `peak_precision` where that is another, and the rate's shares of both.
    """
    peaks = device.peaks
    if flops:
        rate = flops / median_ms / 1e9
        metrics = {"flops": flops, "achieved_tflops": rate}
        ceiling = ceilings.get(f"gemm {precision} achieved_tflops")
        peak = peaks.tflops(peak_precision or precision) if peaks else None
    else:
        rate = num_bytes / median_ms / 1e6
        metrics = {"num_bytes": num_bytes, "achieved_gb_per_s": rate}
        ceiling = ceilings.get("copy fp32 achieved_gb_per_s")
        peak = peaks.memory_gb_per_s if peaks else None
    return metrics | {
        "ceiling_fraction": rate / ceiling if ceiling else None,
        "datasheet": peak,
        "datasheet_fraction": rate / peak if peak else None,
    }


def timed_with_peak(
    device: Device, timer: Callable[..., Timing], *args, **options
) -> tuple[Timed, dict]:
    """Returns what `timed` gives, and on CUDA the peak of memory meanwhile; unused memory is given
    back before.
    """
    empty_cache()
    is_cuda = device.kind == "cuda"
    if is_cuda:
        torch.cuda.reset_peak_memory_stats()
    result = timed(device, timer, *args, **options)
    return result, {"peak_bytes": torch.cuda.max_memory_allocated()} if is_cuda else {}


def memory_bytes(device: Device) -> int:
    """Returns the bytes of the GPU's memory, of the host's where there is no CUDA GPU."""
    if device.kind == "cuda":
        return torch.cuda.get_device_properties(0).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def empty_cache() -> None:
    """Gives memory that no tensor holds back to the GPU, if there is one."""
    gc.collect()
    torch.cuda.empty_cache()


# ---- what every session begins with --------------------------------------------------------------


def _measure_host(device: Device, case: Case, name: str) -> Measured:
    return timed(device, host.probe, name).measured({}, case.parameters)


def ceiling_cases(precisions: Iterable[str], timeout_s: float) -> list[Case]:
    """Returns a session's ceilings: a matrix product in each precision and one copy, none without
    a precision.
    """
    parameters = [{"kind": "gemm", "precision": precision} for precision in precisions]
    if parameters:
        parameters.append({"kind": "copy", "precision": "fp32"})
    return [Case(SESSION_SECTION, one, ("rate",), timeout_s) for one in parameters]


def _measure_ceiling(device: Device, case: Case, phase: str) -> Measured:
    """C = A·B, all n × n, of random normal data (zeros would draw less power), or a copy inside the
    device.
    """
    described = dict(case.parameters)
    precision = described["precision"]
    check_known("kind", described["kind"], ("gemm", "copy"))
    if described["kind"] == "copy":
        source = torch.randn(COPY_BYTES[device.kind] // 4, device=device.kind)
        call = functools.partial(torch.empty_like(source).copy_, source)
        work = {"num_bytes": 2 * source.nbytes}
        observed = {"num_bytes": source.nbytes}
    else:
        n = CEILING_SIZES.get(f"{device.kind} {precision}", CEILING_SIZES[device.kind])
        dtype = numerics.tensor_dtype(precision)
        a, b = (torch.randn(n, n, device=device.kind, dtype=dtype) for _ in range(2))
        call = functools.partial(torch.matmul, a, b)
        work = {"flops": 2 * n**3}
        described["precision"] = numerics.live_precision(a.dtype)
        observed = {"m": a.shape[0], "n": b.shape[1], "k": a.shape[1]}
    options = {"time_limit_s": CEILING_TIME_S[device.kind]}
    if device.kind == "cuda":
        # At its power limit, by what ran before or by many calls, a GPU is up to a fifth slower.
        time.sleep(1)
        options |= {"min_samples": 10, "max_samples": 10}
    times = timed(device, time_callable, call, **options)
    metrics = rate_metrics(device, {}, times.timing.median_ms, precision, **work)
    metrics |= sustained_metrics(device, {}, times, call, precision, **work)
    return times.measured(metrics, described, observed)


OF_EVERY_SESSION = {
    HOST_SECTION: section(_measure_host),
    SESSION_SECTION: section(_measure_ceiling),
}
