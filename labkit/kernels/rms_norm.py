"""RMSNorm in Triton, alone or after the addition of a residual, forward and backward.

    s = x + r (or x)    σ = 1/√(mean s² + ε)    n = σ s    y = n ∘ w
    g = ∂y ∘ w    ∂x = ∂r = σ (g − n · mean(g ∘ n)) + ∂s    ∂w = Σ_rows ∂y ∘ n

Shapes: x, r, s, y (N rows, C columns), w (C,). Memory bounds it. Elements moved: forward 2·N·C, with a residual 4·N·C;
backward 3·N·C, with the gradient of the sum 4·N·C. Kept for backward: s, w, and σ of each row.

Source: Zhang & Sennrich 2019, "Root Mean Square Layer Normalization", equation 4.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from labkit.kernels.fused import operator, runs_kernel, wide, wrap_triton
from labkit.kernels.norms import checked_dtype, differentiate, norm_backward, norm_forward


@triton.jit
def rms_norm_fwd_kernel(
    x_ptr, residual_ptr, weight_ptr, y_ptr, sum_ptr, scale_ptr, stride_x, stride_r, num_rows, eps,
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
    scale = tl.rsqrt(tl.sum(x * x, axis=1, keep_dims=True) / C + eps)
    tl.store(scale_ptr + rows, scale, mask=rows < num_rows)
    tl.store(y_ptr + rows * C + cols, (x * scale * weight).to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def rms_norm_bwd_kernel(
    sum_ptr, weight_ptr, scale_ptr, grad_y_ptr, grad_sum_ptr, grad_ptr, grad_x_ptr, parts_ptr,
    stride_s, stride_gy, stride_gs, num_rows,
    C: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Each program walks along the rows, ROWS at a time, and adds its part of ∂w."""
    cols = tl.arange(0, BLOCK)[None, :]
    weight = tl.load(weight_ptr + cols, mask=cols < C, other=0.0).to(tl.float32)
    grad_weight = tl.zeros((BLOCK,), dtype=tl.float32)
    step = tl.num_programs(0) * ROWS
    # One number of a row ahead, like its elements.
    first_rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    next_scale = tl.load(scale_ptr + first_rows, mask=first_rows < num_rows, other=0.0)
    for first in tl.range(tl.program_id(0) * ROWS, num_rows, step, num_stages=STAGES):
        rows = tl.cast(first, tl.int64) + tl.arange(0, ROWS)[:, None]
        inside = (rows < num_rows) & (cols < C)
        x = tl.load(sum_ptr + rows * stride_s + cols, mask=inside, other=0.0).to(tl.float32)
        grad_y = tl.load(grad_y_ptr + rows * stride_gy + cols, mask=inside, other=0.0).to(tl.float32)
        scale = next_scale
        next_scale = tl.load(scale_ptr + rows + step, mask=rows + step < num_rows, other=0.0)
        normed = x * scale
        grad_weight += tl.sum(grad_y * normed, axis=0)
        slope = tl.sum(grad_y * weight * normed, axis=1, keep_dims=True)
        grad = scale * (grad_y * weight - normed * (slope / C))
        if grad_sum_ptr is not None:
            grad += tl.load(grad_sum_ptr + rows * stride_gs + cols, mask=inside, other=0.0).to(tl.float32)
        tl.store(grad_ptr + rows * C + cols, grad.to(grad_ptr.dtype.element_ty), mask=inside)
        if grad_x_ptr is not None:
            tl.store(grad_x_ptr + rows * C + cols, grad.to(grad_x_ptr.dtype.element_ty), mask=inside)
    cols = tl.arange(0, BLOCK)
    tl.store(parts_ptr + tl.program_id(0) * C + cols, grad_weight, mask=cols < C)


@operator("rms_norm")
def _forward(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype) -> list[Tensor]:
    return norm_forward(wrap_triton(rms_norm_fwd_kernel), x, residual, [weight], 1, eps, dtype)


@operator("rms_norm_backward")
def _backward(
    total: Tensor, weight: Tensor, scale: Tensor, grad_y: Tensor, grad_total: Tensor | None, x_dtype: torch.dtype
) -> list[Tensor]:
    kernel = wrap_triton(rms_norm_bwd_kernel)
    return norm_backward(kernel, total, weight, [scale], grad_y, grad_total, 1, x_dtype)


differentiate(_forward, _backward, num_parameters=1)


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
    """Returns x / √(mean x² + eps) ∘ weight over the last dimension or, with a residual, (that of the sum, the sum).

    Args:
        x: (..., C), fp32, bf16 or fp16, any strides; C up to 32768. Without a GPU also fp64 (in plain PyTorch).
        weight: (C,), dtype of x or fp32.
        residual: of x's shape, dtype of x or fp32, which the sum has; it is rounded before it is normalised.

    Returns:
        The normalised tensor in the dtype of the sum, under autocast in autocast's; all arithmetic is fp32.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit; an empty last dimension.

    Error budget: that of `labkit.numerics.judge` for the formula in the same dtype, against fp64.
    """
    dtype = checked_dtype(x, residual, weight=weight)
    if runs_kernel(x):
        y, _, *total = _forward(x, residual, weight, eps, dtype)
        return (y, *total) if total else y
    total = x if residual is None else x + residual
    y = (wide(total) * torch.rsqrt(wide(total).square().mean(-1, keepdim=True) + eps) * weight).to(dtype)
    return y if residual is None else (y, total)
