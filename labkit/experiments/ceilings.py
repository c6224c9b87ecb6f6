"""What a device can do at best: the rates of a matrix product and of a copy, by which a session's
results are divided.

Each rate is taken in bursts and sustained. An experiment takes its "ceilings" section from here.
"""

import functools
import time
from collections.abc import Sequence

import torch

from labkit import numerics
from labkit.device import Device
from labkit.experiments.sections import (
    rate_metrics,
    section,
    sustained_metrics,
    timed,
)
from labkit.experiments.sweep import Case, Measured
from labkit.measure.timing import time_callable
from labkit.records import SESSION_SECTION

CEILING_SIZES = {"cuda": 8192, "cpu": 1024}
"""M = N = K of the matrix product: large enough that the device, not the launch, is what is
measured.
"""

COPY_BYTES = {"cuda": 2**31, "cpu": 2**26}
"""Bytes of the copied buffer, well past every cache; as much is written again."""

CEILING_TIME_S = {"cuda": 3.0, "cpu": 0.5}
"""Limit of the samples of one ceiling: a CPU never becomes steady enough to stop before it."""


def ceiling_cases(precisions: Sequence[str], timeout_s: float) -> list[Case]:
    """Returns the section's cases: a matrix product in each precision and one copy."""
    parameters = [{"kind": "gemm", "precision": precision} for precision in precisions]
    parameters.append({"kind": "copy", "precision": "fp32"})
    return [Case(SESSION_SECTION, one, ("rate",), timeout_s) for one in parameters]


def ceiling_rates(case: Case, measured: Measured) -> dict[str, float]:
    """Returns the rates by the name under which they reach the other cases: "copy" (GB/s) or "gemm
    <precision>" (TFLOP/s) in bursts, and "sustained <name>".
    """
    name = "copy"
    unit = "gb_per_s"
    if case.parameters["kind"] == "gemm":
        name = f"gemm {case.parameters['precision']}"
        unit = "tflops"
    return {
        name: measured.metrics[f"achieved_{unit}"],
        f"sustained {name}": measured.metrics[f"sustained_{unit}"],
    }


def _measure(device: Device, case: Case, phase: str) -> Measured:
    """C = A·B, all n × n, of random normal data (zeros would draw less power), or a copy inside the
    device.
    """
    described = dict(case.parameters)
    precision = described["precision"]
    if described["kind"] == "copy":
        source = torch.randn(COPY_BYTES[device.kind] // 4, device=device.kind)
        call = functools.partial(torch.empty_like(source).copy_, source)
        work = {"num_bytes": 2 * source.nbytes}
        observed = {"num_bytes": source.nbytes}
    else:
        n = CEILING_SIZES[device.kind]
        dtype = numerics.tensor_dtype(precision)
        a, b = (torch.randn(n, n, device=device.kind, dtype=dtype) for _ in range(2))
        call = functools.partial(torch.matmul, a, b)
        work = {"flops": 2 * n**3}
        described["precision"] = numerics.live_precision(a.dtype)
        observed = {"m": a.shape[0], "n": b.shape[1], "k": a.shape[1]}
    options = {"device_kind": device.kind, "time_limit_s": CEILING_TIME_S[device.kind]}
    if device.kind == "cuda":
        # At its power limit, by what ran before or by many calls, a GPU is up to a fifth slower.
        time.sleep(1)
        options |= {"min_samples": 10, "max_samples": 10}
    times = timed(device, time_callable, call, **options)
    metrics = rate_metrics(device, {}, times.timing.median_ms, precision, **work)
    metrics |= sustained_metrics(device, times, call, **work)
    return times.measured(metrics, described, observed)


CEILINGS = {SESSION_SECTION: section(_measure)}
"""The section, as an experiment's table takes it."""
