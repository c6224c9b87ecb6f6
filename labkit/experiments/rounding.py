"""What rounding does to long sums, and to normalisations by the dtype of their statistics."""

import torch
import torch.nn.functional as F
from torch import Tensor

from labkit.configs import NORM_SETTINGS
from labkit.device import Device
from labkit.experiments.contest import fp64_device
from labkit.experiments.sweep import Measured, Skip
from labkit.numerics import (
    DTYPES,
    binade,
    dtype_name,
    normalise,
    relative_error,
    running_sums,
    spacing,
    stall_value,
)

TERM = 0.01
NUM_TERMS = 1000
LONG_SUM = 10_000
"""Terms of the long sums, in which a 16-bit accumulator must come to a halt."""

TRACE_EVERY = 10
"""Additions between two recorded running sums."""


def measure_sum(device: Device, parameters: dict) -> Measured:
    """Returns 0.01 added a thousand times: the running sum, the rounding of its binades, where it
    comes to a halt.
    """
    accumulator, method = DTYPES[parameters["accumulator"]], parameters["method"]
    num_terms = parameters["num_terms"]
    term = torch.tensor(TERM, dtype=DTYPES[parameters["term"]], device=device.kind)
    added = term.to(accumulator) if parameters["cast"] == "explicit" else term
    is_sequential = method == "sequential"
    every = 1 if is_sequential else TRACE_EVERY
    length = LONG_SUM if is_sequential else num_terms
    sums = running_sums(added, length, accumulator, method, every=every)
    trace = sums[: num_terms // every].double().cpu()
    final, exact = float(trace[-1]), TERM * num_terms
    metrics = {
        "final_sum": final,
        "exact_sum": exact,
        "error": final - exact,
        "term_error": (float(term) - TERM) * num_terms,
        "rounded_term": float(term),
        "stall_predicted": stall_value(float(term), accumulator),
    }
    stride = TRACE_EVERY // every
    samples = {"running_sum": trace[stride - 1 :: stride].tolist()}
    if is_sequential:
        long_sum = sums.double().cpu()
        if long_sum[-1] == long_sum[-2]:
            metrics["stall_measured"] = float(long_sum[-1])
            metrics["stall_terms"] = int((long_sum == long_sum[-1]).nonzero()[0]) + 1
        samples |= binades(long_sum[: metrics.get("stall_terms", num_terms)], accumulator)
    dtypes = {"accumulator": dtype_name(sums.dtype), "term": dtype_name(term.dtype)}
    observed = {"trace_every": TRACE_EVERY}
    return Measured(metrics, {**parameters, **dtypes}, observed, samples)


def binades(sums: Tensor, accumulator: torch.dtype) -> dict[str, list[float]]:
    """Returns for each binade [2ᵏ, 2ᵏ⁺¹) that running sums (fp64) pass through how its additions
    were rounded.

    `binade_start`; `binade_spacing` of the accumulator's numbers; `binade_additions`: sums in it
    that another follows; `binade_mean_step`: what an addition added there.
    """
    starts = torch.tensor([binade(value) for value in sums[:-1].tolist()], dtype=sums.dtype)
    inside = {start: sums.diff()[starts == start] for start in starts.unique().tolist()}
    return {
        "binade_start": list(inside),
        "binade_spacing": [spacing(start, accumulator) for start in inside],
        "binade_additions": [len(steps) for steps in inside.values()],
        "binade_mean_step": [float(steps.mean()) for steps in inside.values()],
    }


def measure_normalisation(device: Device, parameters: dict) -> Measured:
    """Returns the error of a normalisation against fp64 on the same, already rounded, input.

    `relative_error` is over finite rows; `rounding_error` that of the exact result rounded once,
    which none can beat.
    """
    norm, statistics_name = parameters["norm"], parameters["statistics"]
    shape = (parameters["rows"], parameters["features"])
    offset, epsilon = NORM_SETTINGS[parameters["setting"]]
    dtype = DTYPES[parameters["input"]]
    # The same on every device.
    drawn = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    x = ((drawn + offset) * parameters["scale"]).to(dtype).to(device.kind)
    if not x.isfinite().all():
        raise Skip(f"the input itself overflows {parameters['input']}")
    x_64 = x.to(fp64_device(device.kind)).double()
    exact, exact_square = normalise(x_64, norm, epsilon, torch.float64)
    exact = exact.cpu()
    metrics: dict = {}
    if statistics_name == "library":
        function = F.layer_norm if norm == "layer_norm" else F.rms_norm
        result = function(x, shape[-1:], eps=epsilon).cpu()
    else:
        result, mean_square = normalise(x, norm, epsilon, DTYPES[statistics_name])
        result, mean_square = result.cpu(), mean_square.cpu()
        statistics_name = dtype_name(mean_square.dtype)
        vanished = (mean_square == 0) & (exact_square.cpu() > 0)
        metrics |= {
            "overflowed_fraction": float((~mean_square.isfinite()).double().mean()),
            "vanished_fraction": float(vanished.double().mean()),
            "epsilon": float(torch.tensor(epsilon, dtype=mean_square.dtype)),
        }
    finite = result.isfinite().all(-1)
    metrics |= {
        "nonfinite_fraction": float((~finite).double().mean()),
        "relative_error": relative_error(result[finite], exact[finite]) if finite.any() else None,
        "rounding_error": relative_error(exact.to(dtype), exact),
    }
    described = {**parameters, "input": dtype_name(x.dtype), "statistics": statistics_name}
    return Measured(metrics, described)
