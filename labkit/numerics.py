"""Numerics of floating-point formats: spacing, three ways to add, normalisation with chosen statistics, errors.

Every function rounds after each single operation, in the dtype that it is told: what a kernel does that keeps a
quantity in that dtype. Library reductions do not (they add in fp32 inside and round once).
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
"""Formats by the name that records give them."""

NORMS = ("layer_norm", "rms_norm")


def dtype_name(dtype: torch.dtype) -> str:
    """Returns the short name of a floating-point dtype: "fp32", "fp16" or "bf16", else PyTorch's own."""
    return {known: name for name, known in DTYPES.items()}.get(dtype, str(dtype).removeprefix("torch."))


def spacing(value: float, dtype: torch.dtype) -> float:
    """Returns the distance between neighbouring numbers of `dtype` in the binade of `value` (positive, finite).

    Raises ValueError for a value that has no binade in `dtype`.
    """
    limits = torch.finfo(dtype)
    if not 0 < value <= limits.max:
        raise ValueError(f"value {value!r} has no binade in {dtype}; accepted: above 0, up to {limits.max:g}")
    return max(binade(value), limits.smallest_normal) * limits.eps


def binade(value: float) -> float:
    """Returns the largest power of two that is not above `value` (positive, finite)."""
    return math.ldexp(1.0, math.frexp(value)[1] - 1)


def stall_value(term: float, dtype: torch.dtype) -> float:
    """Returns the sum from which adding `term` (positive, a number of `dtype`) changes nothing.

    It is the first power of two whose neighbours are so far apart that the term is at most half of the distance: the
    exact sum then rounds back, a tie too, since a power of two is even.
    """
    return 2.0 ** math.ceil(math.log2(2 * term / torch.finfo(dtype).eps))


# ---- adding one term many times ------------------------------------------------------------------------------


def _sequential(term: Tensor, num_terms: int, accumulator: torch.dtype, every: int) -> list[Tensor]:
    total = torch.zeros((), dtype=accumulator, device=term.device)
    sums = []
    for num_added in range(1, num_terms + 1):
        total += term
        if num_added % every == 0:
            sums.append(total.clone())
    return sums


def _kahan(term: Tensor, num_terms: int, accumulator: torch.dtype, every: int) -> list[Tensor]:
    total, lost = (torch.zeros((), dtype=accumulator, device=term.device) for _ in range(2))
    sums = []
    for num_added in range(1, num_terms + 1):
        corrected = term.to(accumulator) - lost
        larger = total + corrected
        lost = (larger - total) - corrected
        total = larger
        if num_added % every == 0:
            sums.append(total)
    return sums


def _pairwise(term: Tensor, num_terms: int, accumulator: torch.dtype, every: int) -> list[Tensor]:
    terms = term.to(accumulator).expand(num_terms)
    return [tree_sum(terms[:num_added])[0] for num_added in range(every, num_terms + 1, every)]


METHODS: dict[str, Callable[[Tensor, int, torch.dtype, int], list[Tensor]]] = {
    "sequential": _sequential,
    "kahan": _kahan,
    "pairwise": _pairwise,
}
"""Ways to add, by name. kahan: what an addition loses is carried to the next one. pairwise: neighbours are added, then
neighbouring sums."""


def running_sums(term: Tensor, num_terms: int, accumulator: torch.dtype, method: str, *, every: int = 1) -> Tensor:
    """Returns the sums of so many copies of `term` for every multiple of `every` up to `num_terms`.

    Args:
        term: a scalar; its dtype may be another than the accumulator's, which the result has.
        method: one of METHODS.

    Raises ValueError for another method.

    Source: Kahan 1965 (compensated summation); Higham 1993 (pairwise: the error grows with log n, not n).
    """
    if method not in METHODS:
        raise ValueError(f"unknown method {method!r}; accepted: {', '.join(METHODS)}")
    return torch.stack(METHODS[method](term, num_terms, accumulator, every))


def tree_sum(x: Tensor) -> Tensor:
    """Returns the sum over the last dimension (kept, of size 1), neighbours first, every addition rounded."""
    while x.shape[-1] > 1:
        odd = x[..., x.shape[-1] // 2 * 2 :]
        pairs = x[..., : x.shape[-1] // 2 * 2]
        x = torch.cat((pairs[..., 0::2] + pairs[..., 1::2], odd), dim=-1)
    return x


# ---- normalisation -------------------------------------------------------------------------------------------


def normalise(x: Tensor, kind: str, epsilon: float, statistics: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns (normalised x in its own dtype, mean square per row in `statistics`), without gain and bias.

    LayerNorm subtracts the mean first, so that its mean square is the variance; RMSNorm does not. Every operation of
    the statistics, ε and the division by the root are in `statistics`.

    Args:
        x: (rows, features); kind: one of NORMS; epsilon: added to the mean square.

    Raises ValueError for another kind.

    Source: Ba et al. 2016, equation 4; Zhang & Sennrich 2019, equation 4.
    """
    if kind not in NORMS:
        raise ValueError(f"unknown normalisation {kind!r}; accepted: {', '.join(NORMS)}")
    y = x.to(statistics)
    if kind == "layer_norm":
        y = y - tree_sum(y) / y.shape[-1]
    mean_square = tree_sum(y * y) / y.shape[-1]
    small = torch.tensor(epsilon, dtype=statistics, device=x.device)
    return (y * torch.rsqrt(mean_square + small)).to(x.dtype), mean_square


def relative_error(result: Tensor, exact: Tensor) -> float:
    """Returns ‖result − exact‖ / ‖exact‖ in fp64."""
    result, exact = result.detach().cpu().double(), exact.detach().cpu().double()
    return float((result - exact).norm() / exact.norm())
