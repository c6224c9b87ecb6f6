"""LayerNorm in Triton, alone or after the addition of a residual, forward and backward.

    s = x + r (or x)    μ = mean s    σ = 1/√(mean (s − μ)² + ε)    n = σ (s − μ)    y = n ∘ w + b
    g = ∂y ∘ w    ∂x = ∂r = σ (g − mean g − n · mean(g ∘ n)) + ∂s    ∂w = Σ_rows ∂y ∘ n    ∂b = Σ_rows ∂y

Shapes: x, r, s, y (N rows, C columns), w, b (C,). Memory bounds it. Elements moved: forward 2·N·C, with a residual
4·N·C; backward 3·N·C, with the gradient of the sum 4·N·C. Kept for backward: s, w, and μ and σ of each row.

Source: Ba et al. 2016, "Layer Normalization", equation 4.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from labkit.kernels.fused import operator, runs_kernel, wide, wrap_triton
from labkit.kernels.norms import checked_dtype, differentiate, norm_backward, norm_bwd_kernel, norm_forward


@triton.jit
def layer_norm_fwd_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, sum_ptr, mean_ptr, scale_ptr, stride_x, stride_r, num_rows, eps,
    C: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One program normalises ROWS rows."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    cols = tl.arange(0, BLOCK)[None, :]
    inside = (rows < num_rows) & (cols < C)
    x = tl.load(x_ptr + rows * stride_x + cols, mask=inside, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        x += tl.load(residual_ptr + rows * stride_r + cols, mask=inside, other=0.0).to(tl.float32)
        # What is normalised is the sum as stored, which backward reads.
        rounded = x.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + rows * C + cols, rounded, mask=inside)
        x = rounded.to(tl.float32)
    weight = tl.load(weight_ptr + cols, mask=cols < C, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + cols, mask=cols < C, other=0.0).to(tl.float32)
    mean = tl.sum(x, axis=1, keep_dims=True) / C
    # Beyond C are zeros, which are not at the mean and must not count.
    centred = tl.where(cols < C, x - mean, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, axis=1, keep_dims=True) / C + eps)
    tl.store(mean_ptr + rows, mean, mask=rows < num_rows)
    tl.store(scale_ptr + rows, scale, mask=rows < num_rows)
    y = centred * scale * weight + bias
    tl.store(y_ptr + rows * C + cols, y.to(y_ptr.dtype.element_ty), mask=inside)


@operator("layer_norm")
def _forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype
) -> list[Tensor]:
    return norm_forward(wrap_triton(layer_norm_fwd_kernel), x, residual, [weight, bias], 2, eps, dtype)


@operator("layer_norm_backward")
def _backward(
    total: Tensor, weight: Tensor, mean: Tensor, scale: Tensor, grad_y: Tensor, grad_total: Tensor | None,
    x_dtype: torch.dtype,
) -> list[Tensor]:  # fmt: skip
    return norm_backward(wrap_triton(norm_bwd_kernel), total, weight, mean, scale, grad_y, grad_total, x_dtype)


differentiate(_forward, _backward, num_parameters=2)


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, residual: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """Returns LayerNorm over the last dimension of x or, with a residual, (that of the sum, the sum).

    Args:
        x: (..., C), fp32, bf16 or fp16, any strides; C up to 32768. Without a GPU also fp64 (in plain PyTorch).
        weight, bias: (C,), both of x's dtype or fp32.
        residual: of x's shape, dtype of x or fp32, which the sum has; it is rounded before it is normalised.

    Returns:
        The normalised tensor in the dtype of the sum, under autocast in autocast's; all arithmetic is fp32.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit; an empty last dimension.

    Error budget: that of `labkit.numerics.judge` for the formula in the same dtype, against fp64.
    """
    dtype = checked_dtype(x, residual, weight=weight, bias=bias)
    if runs_kernel(x):
        y, _, _, *total = _forward(x, residual, weight, bias, eps, dtype)
        return (y, *total) if total else y
    total = x if residual is None else x + residual
    parameters = (parameter.to(wide(total).dtype) for parameter in (weight, bias))
    y = F.layer_norm(wide(total), weight.shape, *parameters, eps).to(dtype)
    return y if residual is None else (y, total)
