"""LayerNorm, alone or after the addition of a residual; the kernels are in `norms`.

Source: Ba et al. 2016, "Layer Normalization", equation 4.
"""

from torch import Tensor

from labkit.kernels.norms import normalise


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, residual: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """Returns LayerNorm over the last dimension of x or, with a residual, (that of the sum, the
    sum).

    Args:
        x: (..., C), fp32, bf16 or fp16, any strides; C up to 32768 on a GPU. fp64 in plain
            PyTorch.
        weight, bias: (C,), dtype of x or fp32.
        residual: of x's shape, dtype of x or fp32, which the sum has; it is rounded before it is
            normalised.

    Returns:
        The normalised tensor in the dtype of the sum, under autocast in autocast's; all arithmetic
        is fp32.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices that do not fit; an empty last dimension.

    Error budget: that of `labkit.numerics.judge` for the formula in the same dtype, against fp64.
    """
    return normalise(x, residual, eps, weight=weight, bias=bias)
