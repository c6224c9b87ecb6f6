"""The MLP of a vision transformer, W₂ gelu(W₁ x + b₁) + b₂, which keeps one hidden tensor at most.

    z = x W₁ᵀ + b₁    h = gelu(z) = z σ(2u)    u = √(2/π) (z + 0.044715 z³)    y = h W₂ᵀ + b₂
    ∂z = (∂y W₂) ∘ gelu'(z)    ∂W₁ = ∂zᵀ x    ∂b₁ = Σ ∂z    ∂W₂ = ∂yᵀ h    ∂b₂ = Σ ∂y    ∂x = ∂z W₁

tanh-GELU is written with the logistic function, 1 + tanh u = 2 σ(2u): one exponential, and no
cancellation.

h is never kept, since backward has to read z anyway; z is kept, or one more matmul computes it
again. Where z is kept, the product and GELU are PyTorch's. Where it is not, cuBLAS has an epilogue
that writes h alone, exact enough for 16 bits. In backward one elementwise kernel multiplies by
gelu'(z), writes h again and sums ∂b₁. All that in the epilogue of ∂y W₂ was slower: cuBLAS gains
more on the product than the kernel costs. A product in Triton that writes z and h from its
accumulator made forward 2 % faster, a training step of SigLIP 2 no faster at all.

Ideal cost: 4·M·C·F FLOPs forward, 8·M·C·F backward. Between its products forward moves 2·M·F
elements, none where z is not kept; backward moves 4·M·F.

Shape suffixes: M rows, C width of the residual stream, F width of the hidden layer, T blocks of
rows.

Source: Hendrycks & Gimpel 2016, "Gaussian Error Linear Units", section 2 (the tanh form).
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from labkit.kernels.column_sums import column_sums
from labkit.kernels.fused import (
    check_shape,
    first_order,
    load_fp32,
    operator,
    outside_autocast,
    product_inputs,
    rows_of,
    runs_kernel,
    wide,
    wrap_triton,
)
from labkit.kernels.norms import Norm, check_norm, layer_norm

# Of a program of the elementwise kernel: rows, rows at a time, columns.
BLOCK_M = tl.constexpr(256)
STEP_M = tl.constexpr(2)
BLOCK_F = tl.constexpr(512)


@triton.jit
def gelu_and_slope(z):
    """GELU and its derivative."""
    # σ(2u), by which GELU multiplies z; the exponent is −2u · log₂ e.
    g = 1 / (1 + tl.exp2(-2.302208198 * z * (1 + 0.044715 * z * z)))
    h = z * g
    # Past this z, 1 − g or h is 0, and 0 · ∞ would be NaN where z² overflows.
    square = tl.minimum(z * z, 1e8)
    return h, g + h * (1 - g) * (1.5957691216 + 0.2140644488 * square)


@triton.jit
def gelu_bwd_kernel(grad_h_ptr, z_ptr, grad_z_ptr, h_ptr, sums_ptr, num_rows, num_cols):
    """∂z and h (M, F), and ∂b₁ (T, F) summed over each program's rows, from ∂h and z (M, F), all
    dense.
    """
    tile = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    sums = tl.zeros((STEP_M, BLOCK_F), dtype=tl.float32)  # added across threads once, at the end
    for step in tl.range(0, BLOCK_M, STEP_M, num_stages=3):
        rows = tile * BLOCK_M + step + tl.arange(0, STEP_M)
        inside = (rows < num_rows)[:, None] & (cols < num_cols)[None, :]
        place = rows[:, None] * num_cols + cols[None, :]
        h, slope = gelu_and_slope(load_fp32(z_ptr + place, inside))
        grad_z = load_fp32(grad_h_ptr + place, inside) * slope
        tl.store(h_ptr + place, h, mask=inside)
        tl.store(grad_z_ptr + place, grad_z, mask=inside)
        sums += grad_z
    tl.store(sums_ptr + tile * num_cols + cols, tl.sum(sums, axis=0), mask=cols < num_cols)


@operator("gelu_backward")
def _gelu_backward(grad_h: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns ∂z, h and ∂b₁ in fp32 (in fp64 of fp64)."""
    if not runs_kernel(z):
        grad_z = torch.ops.aten.gelu_backward(grad_h, z.clamp(-1e4, 1e4), approximate="tanh")
        return grad_z, F.gelu(z, approximate="tanh"), wide(grad_z).sum(0)
    z = z.contiguous()  # hooks on saved tensors may have laid it out anew
    num_rows, num_cols = z.shape
    grid = -(-num_rows // BLOCK_M.value), -(-num_cols // BLOCK_F.value)
    grad_z, h = torch.empty_like(z), torch.empty_like(z)
    sums_TF = z.new_empty(grid[0], num_cols, dtype=torch.float32)
    wrap_triton(gelu_bwd_kernel)[grid](grad_h, z, grad_z, h, sums_TF, num_rows, num_cols)
    return grad_z, h, sums_TF.sum(0)


class GeluMLP(torch.autograd.Function):
    """The MLP of dense (M, C) rows; see `gelu_mlp`."""

    @staticmethod
    @outside_autocast
    def forward(ctx, x, fc1_weight, fc1_bias, fc2_weight, fc2_bias, keep, total, *norm):
        if not keep and x.is_cuda and x.element_size() == 2:
            h_MF = torch._addmm_activation(fc1_bias, x, fc1_weight.T, use_gelu=True)
        else:
            z_MF = F.linear(x, fc1_weight, fc1_bias)
            h_MF = F.gelu(z_MF, approximate="tanh")
        *norm, ctx.eps = norm
        kept_x = x if total is None else total
        kept_z = z_MF if keep else None
        ctx.save_for_backward(kept_x, *norm, kept_z, fc1_weight, fc1_bias, fc2_weight)
        return F.linear(h_MF, fc2_weight, fc2_bias)

    @staticmethod
    @first_order("gelu_mlp")
    @outside_autocast
    def backward(ctx, grad_y_MC: Tensor):
        x_MC, norm_weight, norm_bias, z_MF, fc1_weight, fc1_bias, fc2_weight = ctx.saved_tensors
        if norm_weight is not None:
            # The sum is of another dtype where autocast chose that of the products.
            normed = layer_norm(x_MC, norm_weight, norm_bias, ctx.eps)
            x_MC = rows_of(normed).to(fc1_weight.dtype)
        if z_MF is None:
            z_MF = F.linear(x_MC, fc1_weight, fc1_bias)
        grad_y_MC = grad_y_MC.contiguous()
        grad_z_MF, h_MF, grad_bias_F = _gelu_backward(grad_y_MC @ fc2_weight, z_MF)
        return (
            grad_z_MF @ fc1_weight,
            grad_z_MF.T @ x_MC,
            grad_bias_F.to(fc1_bias.dtype),
            grad_y_MC.T @ h_MF,
            column_sums(grad_y_MC),
            *[None] * 5,
        )


def gelu_mlp(
    x: Tensor,
    fc1_weight: Tensor,
    fc1_bias: Tensor,
    fc2_weight: Tensor,
    fc2_bias: Tensor,
    *,
    keep: bool = True,
    norm: Norm | None = None,
) -> Tensor:
    """Returns W₂ gelu(W₁ x + b₁) + b₂ with tanh-GELU.

    Args:
        x: (..., C), fp32, bf16 or fp16, on a CPU also fp64.
        fc1_weight, fc1_bias: (F, C) and (F,), dtype and device of x.
        fc2_weight, fc2_bias: (C, F) and (C,), the same. Under autocast all are cast to its dtype
            first, and may differ.
        keep: whether z, (..., F), is kept for backward, or computed there again. Nothing is where
            no gradient is due.
        norm: (s, weight, bias, ε) where x is LayerNorm of a sum s that is kept anyway: then x is
            not, but computed again. No gradient goes to s but through x.

    Returns:
        The output, (..., C), dtype of x, under autocast that of autocast.

    Raises:
        ValueError, TypeError: arguments that do not fit, by name.

    Error budget: outputs 2×, gradients 3× those of the same MLP in PyTorch and the same dtype,
    against fp64.
    """
    x, *parameters = product_inputs(
        x=x, fc1_weight=fc1_weight, fc1_bias=fc1_bias, fc2_weight=fc2_weight, fc2_bias=fc2_bias
    )
    width, hidden = x.shape[-1], fc1_bias.numel()
    check_shape("fc1_bias", fc1_bias, hidden)
    check_shape("fc1_weight", fc1_weight, hidden, width)
    check_shape("fc2_weight", fc2_weight, width, hidden)
    check_shape("fc2_bias", fc2_bias, width)
    if x.numel() == 0:
        raise ValueError(f"x must hold at least one row; got shape {tuple(x.shape)}")
    if norm:
        check_norm(x, norm)
    is_trained = any(tensor.requires_grad for tensor in (x, *parameters[:3]))
    keep = keep and torch.is_grad_enabled() and is_trained
    x_MC = rows_of(x).contiguous()
    norm = norm or (None,) * 4
    return GeluMLP.apply(x_MC, *[p.contiguous() for p in parameters], keep, *norm).view(x.shape)
