"""Numerics of floating-point formats: running sums, normalisation, errors and the budget for
them.

Sums and normalisation round after every operation, in the dtype they are given, as a kernel does
that keeps a quantity in that dtype. Library reductions do not: they add in fp32 and round once.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from labkit.configs import check_known

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
"""Formats by the name that records give them."""

NORMS = ("layer_norm", "rms_norm")

OUTPUT_BUDGET = 2
GRADIENT_BUDGET = 3
"""Largest error against fp64, as a multiple of the eager error in the same dtype plus the rounding
of the result.
"""

NUM_BLOCKS = 16
"""Blocks of rows judged separately: rows shrink as 1/√position under a causal mask, so the first
would hide others.
"""


def tensor_dtype(precision: str) -> torch.dtype:
    """Returns the dtype of tensors in "fp32", "tf32" (fp32 tensors), "fp16" or "bf16"."""
    dtypes = {**DTYPES, "tf32": torch.float32}
    check_known("precision", precision, dtypes)
    return dtypes[precision]


def set_precision(precision: str) -> None:
    """Has PyTorch multiply fp32 matrices as TF32 for "tf32", in full fp32 for any other
    precision.
    """
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")


def live_precision(dtype: torch.dtype) -> str:
    """Returns the precision in which PyTorch, as it is set now, multiplies matrices of `dtype`."""
    # "medium" allows TF32 too.
    if dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest":
        return "tf32"
    return dtype_name(dtype)


def dtype_name(dtype: torch.dtype) -> str:
    """Returns the short name of a floating-point dtype: "fp32", "fp16" or "bf16", else PyTorch's
    own.
    """
    return {known: name for name, known in DTYPES.items()}.get(
        dtype, str(dtype).removeprefix("torch.")
    )


def stall_value(term: float, dtype: torch.dtype) -> float:
    """Returns the sum from which adding `term` (positive, a number of `dtype`) changes nothing.

    It is the first power of two whose spacing is at least twice the term: the exact sum then rounds
    back, even a tie.
    """
    return 2.0 ** math.ceil(math.log2(2 * term / torch.finfo(dtype).eps))


def running_sums(term: Tensor, num_terms: int, accumulator: torch.dtype) -> Tensor:
    """Returns the sums of 1, 2, … `num_terms` copies of `term`, added one by one.

    Args:
        term: a scalar; its dtype may be another than the accumulator's, which the result has.
    """
    total = torch.zeros((), dtype=accumulator, device=term.device)
    sums = []
    for _ in range(num_terms):
        total = (total + term).to(accumulator)
        sums.append(total)
    return torch.stack(sums)


def tree_sum(x: Tensor) -> Tensor:
    """Returns the sum over the last dimension (kept, of size 1), neighbours first, every addition
    rounded.
    """
    while x.shape[-1] > 1:
        num_paired = x.shape[-1] // 2 * 2
        sums = x[..., 0:num_paired:2] + x[..., 1:num_paired:2]
        x = torch.cat((sums, x[..., num_paired:]), dim=-1)
    return x


def normalise(
    x: Tensor, kind: str, epsilon: float, statistics: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Returns (normalised x in its own dtype, mean square per row in `statistics`), without gain
    and bias.

    LayerNorm subtracts the mean first, so that its mean square is the variance; RMSNorm does not.
    Every operation of the statistics, ε and the division by the root are in `statistics`.

    Args:
        x: (rows, features); kind: one of NORMS; epsilon: added to the mean square.

    Raises ValueError for another kind.

    Source: Ba et al. 2016, equation 4; Zhang & Sennrich 2019, equation 4.
    """
    check_known("normalisation", kind, NORMS)
    y = x.to(statistics)
    if kind == "layer_norm":
        y = y - tree_sum(y) / y.shape[-1]
    mean_square = tree_sum(y * y) / y.shape[-1]
    small = torch.tensor(epsilon, dtype=statistics, device=x.device)
    return (y * torch.rsqrt(mean_square + small)).to(x.dtype), mean_square


def relative_error(result: Tensor, exact: Tensor) -> float:
    """Returns ‖result − exact‖ / ‖exact‖ in fp64, ‖result‖ where that is zero throughout; raises
    ValueError for two shapes.
    """
    if result.shape != exact.shape:
        raise ValueError(f"a result of shape {tuple(result.shape)}; accepted: {tuple(exact.shape)}")
    exact = exact.detach().double()
    return float((result.detach().to(exact) - exact).norm() / (exact.norm() or 1))


class Verdict(NamedTuple):
    """How far a result is from fp64: error norm over result norm.

    `budget_fraction`: the error over what is allowed; above 1 the result is wrong.
    """

    relative_error: float
    budget_fraction: float


def judge(
    name: str,
    value: Tensor,
    reference: Tensor,
    eager: Tensor,
    *,
    dtype: torch.dtype,
    num_terms: int,
) -> Verdict:
    """Returns the verdict on one output or gradient.

    Judged are the largest difference, and the norm of the difference in each of up to NUM_BLOCKS
    blocks of rows. Allowed is a multiple of eager's own error plus the roundings of the result to
    its dtype and of its sum: n terms added in fp32 in any order are off by √n roundings where their
    signs are random.

    Args:
        name: "out", or anything else for a gradient.
        value: (..., rows, D), what is judged.
        reference: the same in fp64; eager: the same by the eager formula in `dtype`, as fp64.
        dtype: of the result, before any cast to fp64.
        num_terms: of the longest sum.

    Raises AssertionError for a result that is not finite or outside its budget, and where
    eager's is not finite, which would allow anything; ValueError for another shape.
    """
    rounding = torch.finfo(dtype).eps / 2 + num_terms**0.5 * torch.finfo(torch.float32).eps / 2
    budget = OUTPUT_BUDGET if name == "out" else GRADIENT_BUDGET
    value = value.detach().to(reference)
    error = relative_error(value, reference)  # of the same shape, or what follows says less
    errors = _block_errors(value, reference)
    limits = [budget * (each + rounding) for each in _block_errors(eager, reference)]
    fraction = max(each / limit for each, limit in zip(errors, limits, strict=True))
    if not eager.isfinite().all():
        raise AssertionError(f"eager's {name} is not finite, which would allow anything")
    if not value.isfinite().all() or not fraction <= 1:
        raise AssertionError(f"wrong: the error of {name} is {fraction:.3g} times what is allowed")
    return Verdict(error, fraction)


def _block_errors(x: Tensor, reference: Tensor) -> list[float]:
    """Returns the largest difference over the largest value, then the relative error of each block
    of rows.
    """
    # Zero throughout, as dq of a single key: the roundings are then those of terms of order 1.
    largest = reference.abs().max() or 1
    errors = [float((x - reference).abs().max() / largest)]
    rows = -(-reference.shape[-2] // NUM_BLOCKS)
    for block, exact in zip(x.split(rows, dim=-2), reference.split(rows, dim=-2), strict=True):
        if exact.norm() > 0:  # a gradient that is zero throughout has no relative error
            errors.append(relative_error(block, exact))
    return errors
