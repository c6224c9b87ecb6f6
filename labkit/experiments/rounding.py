"""What rounding does to long sums, and to normalisations by the dtype of their statistics."""

import pandas as pd
import torch
import torch.nn.functional as F

from labkit.configs import NORM_SETTINGS
from labkit.device import Device
from labkit.experiments.sweep import Case, Measured, Skip
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
"""Terms of the sequential sums, in which a 16-bit accumulator must come to a halt."""

TRACE_EVERY = 10
"""Additions between two recorded running sums."""


def measure_sum(device: Device, case: Case, phase: str) -> Measured:
    """Returns 0.01 added a thousand times: the running sum, the rounding of its binades, where it
    comes to a halt.
    """
    parameters = case.parameters
    accumulator = DTYPES[parameters["accumulator"]]
    num_terms = parameters["num_terms"]
    is_sequential = parameters["method"] == "sequential"
    term = torch.tensor(TERM, dtype=DTYPES[parameters["term"]], device=device.kind)
    added = term.to(accumulator) if parameters["cast"] == "explicit" else term
    length = LONG_SUM if is_sequential else num_terms
    rounded = running_sums(added, length, accumulator, parameters["method"])
    sums = rounded.tolist()
    exact = TERM * num_terms
    metrics = {
        "final_sum": sums[num_terms - 1],
        "exact_sum": exact,
        "error": sums[num_terms - 1] - exact,
        "term_error": (float(term) - TERM) * num_terms,
        "rounded_term": float(term),
        "stall_predicted": stall_value(float(term), accumulator),
    }
    samples = {"running_sum": sums[TRACE_EVERY - 1 : num_terms : TRACE_EVERY]}
    if is_sequential:
        num_moving = num_terms
        if sums[-1] == sums[-2]:
            num_moving = sums.index(sums[-1]) + 1
            metrics["stall_measured"] = sums[-1]
            metrics["stall_terms"] = num_moving
        samples |= binades(sums[:num_moving], accumulator)
    dtypes = {"accumulator": dtype_name(rounded.dtype), "term": dtype_name(term.dtype)}
    return Measured(metrics, {**parameters, **dtypes}, {"trace_every": TRACE_EVERY}, samples)


def binades(sums: list[float], accumulator: torch.dtype) -> dict[str, list[float]]:
    """Returns for each binade [2ᵏ, 2ᵏ⁺¹) that running sums pass through how its additions were
    rounded.

    `binade_start`; `binade_spacing` of the accumulator's numbers; `binade_additions`: sums in it
    that another follows; `binade_mean_step`: what an addition added there.
    """
    steps = pd.Series(sums).diff().iloc[1:].groupby([binade(value) for value in sums[:-1]])
    table = steps.agg(["size", "mean"])
    return {
        "binade_start": table.index.tolist(),
        "binade_spacing": [spacing(start, accumulator) for start in table.index],
        "binade_additions": table["size"].astype(int).tolist(),
        "binade_mean_step": table["mean"].tolist(),
    }


def measure_normalisation(device: Device, case: Case, phase: str) -> Measured:
    """Returns the error of a normalisation against fp64 on the same, already rounded, input.

    `relative_error` is over finite rows; `rounding_error` that of the exact result rounded once,
    which none can beat.
    """
    parameters = case.parameters
    norm = parameters["norm"]
    statistics = parameters["statistics"]
    shape = (parameters["rows"], parameters["features"])
    offset, epsilon = NORM_SETTINGS[parameters["setting"]]
    dtype = DTYPES[parameters["input"]]
    # The same on every device.
    drawn = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    x = ((drawn + offset) * parameters["scale"]).to(dtype)
    if not x.isfinite().all():
        raise Skip(f"the input itself overflows {parameters['input']}")
    exact, exact_square = normalise(x.double(), norm, epsilon, torch.float64)
    x = x.to(device.kind)
    metrics: dict = {}
    if statistics == "library":
        function = F.layer_norm if norm == "layer_norm" else F.rms_norm
        result = function(x, shape[-1:], eps=epsilon).cpu()
    else:
        result, mean_square = (y.cpu() for y in normalise(x, norm, epsilon, DTYPES[statistics]))
        statistics = dtype_name(mean_square.dtype)
        vanished = (mean_square == 0) & (exact_square > 0)
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
    described = {**parameters, "input": dtype_name(x.dtype), "statistics": statistics}
    return Measured(metrics, described)
