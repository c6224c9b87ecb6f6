"""What a device can do at best: the rates of a matrix product and of a copy, by which a session's
results are divided.

Each rate is taken in bursts and sustained. An experiment takes its "ceilings" section and
`ceiling_rates` from here.
"""

import time
from collections.abc import Callable, Sequence

import torch

from labkit import numerics
from labkit.device import Device
from labkit.experiments.sections import Timed, section, sustained_metrics, timed
from labkit.experiments.sweep import Case, Measured
from labkit.measure.timing import time_callable
from labkit.records import SESSION_SECTION

CEILING_SIZES = {"cuda": 8192, "mps": 2048, "cpu": 1024}
"""M = N = K of the matrix product: large enough that the device, not the launch, is what is
measured.
"""

COPY_BYTES = {"cuda": 2**31, "mps": 2**28, "cpu": 2**26}
"""Bytes of the copied buffer, well past every cache; as much is written again."""

CEILING_TIME_S = {"cuda": 3.0, "mps": 3.0, "cpu": 0.5}
"""Limit of the samples of one ceiling: a CPU never becomes steady enough to stop before it."""


def ceiling_cases(precisions: Sequence[str], timeout_s: float) -> list[Case]:
    """Returns the section's cases: a matrix product in each precision and one copy."""
    gemms = [{"kind": "gemm", "precision": precision} for precision in precisions]
    copy = {"kind": "copy", "precision": "fp32"}
    return [
        Case(SESSION_SECTION, parameters, ("rate",), timeout_s) for parameters in (*gemms, copy)
    ]


def ceiling_name(case: Case) -> str:
    """Returns the key under which a ceiling reaches the other cases: "copy" or "gemm
    <precision>".
    """
    kind, precision = case.parameters["kind"], case.parameters["precision"]
    return "copy" if kind == "copy" else f"gemm {precision}"


def ceiling_rates(case: Case, measured: Measured) -> dict[str, float]:
    """Returns the rates (TFLOP/s of a matrix product, GB/s of a copy) by name: in bursts, and
    "sustained <name>".
    """
    name, unit = ceiling_name(case), "gb_per_s" if case.parameters["kind"] == "copy" else "tflops"
    return {
        name: measured.metrics[f"achieved_{unit}"],
        f"sustained {name}": measured.metrics[f"sustained_{unit}"],
    }


def _measure(device: Device, case: Case, phase: str) -> Measured:
    """C = A·B, all n × n, of random normal data (zeros would draw less power), or a copy inside the
    device.
    """
    if case.parameters["kind"] == "copy":
        target, source = copy_buffers(device)
        times = _burst(device, target.copy_, source)
        rate = copy_rate(device, source, times.timing.median_ms)
        rate |= sustained_metrics(
            device, times, lambda: target.copy_(source), num_bytes=2 * source.nbytes
        )
        return times.measured(rate, case.parameters, {"num_bytes": source.nbytes})
    precision, n = case.parameters["precision"], CEILING_SIZES[device.kind]
    numerics.set_precision(precision)
    a, b = (
        torch.randn(n, n, device=device.kind, dtype=numerics.tensor_dtype(precision))
        for _ in range(2)
    )
    times = _burst(device, torch.matmul, a, b)
    tflops = 2 * n**3 / (times.timing.median_ms * 1e-3) / 1e12
    peak = device.peaks.tflops(precision) if device.peaks else None
    rates = {
        "achieved_tflops": tflops,
        "datasheet": peak,
        "datasheet_fraction": tflops / peak if peak else None,
    }
    return times.measured(
        rates | sustained_metrics(device, times, lambda: torch.matmul(a, b), flops=2 * n**3),
        case={"kind": "gemm", "precision": numerics.live_precision(a.dtype)},
        observed={"m": a.shape[0], "n": b.shape[1], "k": a.shape[1]},
    )


def _burst(device: Device, function: Callable, *inputs: torch.Tensor) -> Timed:
    """Returns the times of `function(*inputs)`, on a GPU of ten calls after a second's rest.

    A GPU at its power limit, by what ran before or by many calls, is up to a fifth slower.
    """
    if device.kind != "cuda":
        return timed_call(device, function, *inputs)
    time.sleep(1)
    return timed_call(device, function, *inputs, min_samples=10, max_samples=10)


CEILINGS = {SESSION_SECTION: section(_measure)}
"""The section, as an experiment's table takes it."""


def timed_call(device: Device, function: Callable, *inputs: torch.Tensor, **options) -> Timed:
    """Returns the times of `function(*inputs)` within the limit of a ceiling."""
    options |= {"device_kind": device.kind, "time_limit_s": CEILING_TIME_S[device.kind]}
    return timed(device, time_callable, function, inputs=[inputs], **options)


def copy_buffers(device: Device) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a target and a source of COPY_BYTES each."""
    source = torch.randn(COPY_BYTES[device.kind] // 4, device=device.kind)
    return torch.empty_like(source), source


def copy_rate(device: Device, source: torch.Tensor, time_ms: float) -> dict:
    """Returns the rate at which `source` was read and as much written, and its share of the
    datasheet's.
    """
    rate = 2 * source.nbytes / (time_ms * 1e-3) / 1e9
    peak = device.peaks.memory_gb_per_s if device.peaks else None
    return {
        "achieved_gb_per_s": rate,
        "datasheet": peak,
        "datasheet_fraction": rate / peak if peak else None,
    }
