"""What a device can do at best: the rates of a matrix product and of a copy, measured in every session.

The other results of a session are divided by these. An experiment takes its "ceilings" section, and the two functions
that a session asks of it (`ceiling_name`, `ceiling_value`), from here.
"""

import gc
from collections.abc import Sequence

import torch

from labkit import hardware
from labkit.experiments.sweep import SESSION_SECTION, Case, Measured, Skip
from labkit.measure.timing import time_callable

CEILING_SIZES = {"cuda": 8192, "mps": 2048, "cpu": 1024}
"""M = N = K of the matrix product: large enough that the device, not the launch, is what is measured."""

COPY_BYTES = {"cuda": 2**31, "mps": 2**28, "cpu": 2**26}
"""Bytes of the copied buffer, well past every cache; as much is written again."""

CEILING_TIME_S = {"cuda": 3.0, "mps": 3.0, "cpu": 0.5}
"""Limit of the samples of one ceiling: a CPU never becomes steady enough to stop before it."""


def ceiling_cases(precisions: Sequence[str], timeout_s: float) -> list[Case]:
    """Returns the section's cases: a matrix product in each precision and one copy."""
    gemms = [{"kind": "gemm", "precision": precision} for precision in precisions]
    copy = {"kind": "copy", "precision": "fp32"}
    return [Case(SESSION_SECTION, parameters, ("rate",), timeout_s) for parameters in (*gemms, copy)]


def measure_ceiling(device: hardware.Device, case: Case) -> Measured:
    """Returns the rate that a case of `ceiling_cases` reaches."""
    measure = _measure_gemm if case.parameters["kind"] == "gemm" else _measure_copy
    return measure(device, case)


def ceiling_name(case: Case) -> str:
    """Returns the key under which a ceiling reaches the other cases: "copy" or "gemm <precision>"."""
    kind, precision = case.parameters["kind"], case.parameters["precision"]
    return "copy" if kind == "copy" else f"gemm {precision}"


def ceiling_value(measured: Measured) -> float:
    """Returns the rate: TFLOP/s of a matrix product, GB/s of a copy."""
    return measured.metrics.get("achieved_tflops") or measured.metrics["achieved_gb_per_s"]


def _measure_gemm(device: hardware.Device, case: Case) -> Measured:
    """C = A·B, all n × n, random normal data: zeros would draw less power and clock higher."""
    precision = case.parameters["precision"]
    require_precision(device, precision)
    n = CEILING_SIZES[device.kind]
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    a, b = (torch.randn(n, n, device=device.kind, dtype=dtype) for _ in range(2))
    with hardware.GpuMonitor(device.kind) as monitor:
        timing = time_callable(
            torch.matmul, device_kind=device.kind, inputs=[(a, b)], time_limit_s=CEILING_TIME_S[device.kind]
        )
    tflops = 2 * n**3 / (timing.median_ms * 1e-3) / 1e12
    peak = device.peaks.tflops(precision) if device.peaks else None
    live = {torch.bfloat16: "bf16"}.get(a.dtype) or {"highest": "fp32", "high": "tf32"}[
        torch.get_float32_matmul_precision()
    ]
    return Measured(
        metrics={
            **timing.metrics(),
            "achieved_tflops": tflops,
            "datasheet": peak,
            "datasheet_fraction": tflops / peak if peak else None,
        },
        case={"kind": "gemm", "precision": live},
        observed={"m": a.shape[0], "n": b.shape[1], "k": a.shape[1]},
        timer=timing.description(),
        telemetry=monitor.summary,
    )


def copy_buffers(device: hardware.Device) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a target and a source of COPY_BYTES each."""
    source = torch.randn(COPY_BYTES[device.kind] // 4, device=device.kind)
    return torch.empty_like(source), source


def _measure_copy(device: hardware.Device, case: Case) -> Measured:
    """A copy inside the device, counting the bytes read and the bytes written."""
    target, source = copy_buffers(device)
    with hardware.GpuMonitor(device.kind) as monitor:
        timing = time_callable(
            target.copy_, device_kind=device.kind, inputs=[(source,)], time_limit_s=CEILING_TIME_S[device.kind]
        )
    return Measured(
        metrics={**timing.metrics(), **copy_rate(device, source, timing.median_ms)},
        case=case.parameters,
        observed={"num_bytes": source.nbytes},
        timer=timing.description(),
        telemetry=monitor.summary,
    )


def copy_rate(device: hardware.Device, source: torch.Tensor, time_ms: float) -> dict:
    """Returns the rate at which `source` was read and as much written, and its share of the datasheet's."""
    rate = 2 * source.nbytes / (time_ms * 1e-3) / 1e9
    peak = device.peaks.memory_gb_per_s if device.peaks else None
    return {
        "achieved_gb_per_s": rate,
        "datasheet": peak,
        "datasheet_fraction": rate / peak if peak else None,
    }


def require_precision(device: hardware.Device, precision: str) -> None:
    """Raises Skip for a precision that the device lacks, or only emulates: it would be timed as something else."""
    if precision == "tf32" and (device.kind != "cuda" or torch.cuda.get_device_capability() < (8, 0)):
        raise Skip(f"{device.name} has no TF32")
    if precision == "bf16" and device.kind == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise Skip(f"{device.name} has no bfloat16")


def empty_cache(device: hardware.Device) -> None:
    """Gives memory that no tensor holds back to the device."""
    gc.collect()
    if device.kind == "cuda":
        torch.cuda.empty_cache()
