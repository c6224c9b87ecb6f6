"""The MLP of a vision transformer, W₂ gelu(W₁ x + b₁) + b₂, with the activation inside its matmuls.

    z = x W₁ᵀ + b₁    h = gelu(z) = z σ(2u)    u = √(2/π) (z + 0.044715 z³)    y = h W₂ᵀ + b₂
    ∂z = (∂y W₂) ∘ gelu'(z)    ∂W₁ = ∂zᵀ x    ∂b₁ = Σ ∂z    ∂W₂ = ∂yᵀ h    ∂b₂ = Σ ∂y    ∂x = ∂z W₁

tanh-GELU is written with the logistic function, 1 + tanh u = 2 σ(2u): one exponential, and no
cancellation.

h is never kept, since backward has to read z anyway; z is kept, or one more matmul computes it
again. Where z is kept, on a Hopper GPU and in 16 bits, x W₁ᵀ is a persistent matmul in Triton whose
epilogue applies bias and GELU to its accumulator and writes z and h; elsewhere the product and GELU
are PyTorch's. Where z is not kept, cuBLAS has an epilogue that writes h alone, exact enough for 16
bits. In backward one elementwise kernel multiplies by gelu'(z), writes h again and sums ∂b₁. All
that in the epilogue of ∂y W₂ was slower: cuBLAS gains more on the product than the kernel costs.

Ideal cost: 4·M·C·F FLOPs forward, 8·M·C·F backward. Between its products forward moves M·F elements
of z, 2·M·F without the epilogue; backward moves 4·M·F.

Shape suffixes: M rows, C width of the residual stream, F width of the hidden layer, T blocks of
rows.

Source: Hendrycks & Gimpel 2016, "Gaussian Error Linear Units", section 2 (the tanh form).
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula
from triton.tools.tensor_descriptor import TensorDescriptor

from labkit.kernels.column_sums import column_sums
from labkit.kernels.fused import (
    IS_INTERPRETED,
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
from labkit.kernels.launch import Launcher, num_multiprocessors
from labkit.kernels.layer_norm import layer_norm

# Of the matmul, for Hopper; GROUP tiles, one below the other, go column by column, for L2.
TILE = {"ROWS": 128, "COLS": 128, "DEPTH": 64, "GROUP": 8, "num_warps": 4, "num_stages": 3}
# Of a multiprocessor: where shared memory has room for both, one multiplies in the other's
# epilogue.
PROGRAMS = 2
# Of a program of the elementwise kernel: rows, rows at a time, columns.
BLOCK_M = tl.constexpr(256)
STEP_M = tl.constexpr(2)
BLOCK_F = tl.constexpr(512)


@triton.jit
def gate(z):
    """σ(2u), by which GELU multiplies z; the exponent is −2u · log₂ e."""
    return 1 / (1 + tl.exp2(-2.302208198 * z * (1 + 0.044715 * z * z)))


@triton.jit
def gelu_and_slope(z):
    """GELU and its derivative."""
    g = gate(z)
    h = z * g
    # Past this z, 1 − g or h is 0, and 0 · ∞ would be NaN where z² overflows.
    square = tl.minimum(z * z, 1e8)
    return h, g + h * (1 - g) * (1.5957691216 + 0.2140644488 * square)


@triton.jit
def finish(acc, z_desc, h_desc, bias_ptr, row, col, num_cols):
    """The epilogue of one half of a tile."""
    cols = col + tl.arange(0, acc.shape[1])
    z = acc + tl.load(bias_ptr + cols, mask=cols < num_cols, other=0.0).to(tl.float32)[None, :]
    z_desc.store([row, col], z)
    h_desc.store([row, col], z * gate(z))


@triton.jit
def linear_gelu_kernel(
    bias_ptr,
    x_desc,
    weight_desc,
    z_desc,
    h_desc,
    num_rows,
    num_cols,
    depth,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Tiles of z and h (M, F) from x (M, C), W₁ (F, C) and b₁."""
    tiles_m, tiles_f = tl.cdiv(num_rows, ROWS), tl.cdiv(num_cols, COLS)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_f, tl.num_programs(0), flatten=True):
        first = tile // (GROUP * tiles_f) * GROUP
        height = tl.minimum(tiles_m - first, GROUP)
        row, col = (first + tile % height) * ROWS, tile % (GROUP * tiles_f) // height * COLS
        acc = tl.zeros((ROWS, COLS), dtype=tl.float32)
        for k in range(0, depth, DEPTH):
            acc = tl.dot(
                x_desc.load([row, k]), weight_desc.load([col, k]).T, acc, input_precision="ieee"
            )
        # An epilogue of half the columns at a time leaves the loop more shared memory.
        left, right = tl.split(acc.reshape(ROWS, 2, COLS // 2).permute(0, 2, 1))
        finish(left, z_desc, h_desc, bias_ptr, row, col, num_cols)
        finish(right, z_desc, h_desc, bias_ptr, row, col + COLS // 2, num_cols)


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


def _has_epilogue(x: Tensor, weight: Tensor) -> bool:
    """Returns whether the kernel makes z and h of x Wᵀ, of rows that descriptors describe."""
    if any(size * x.element_size() % 16 for size in weight.shape):
        return False
    if IS_INTERPRETED:
        return runs_kernel(x) and x.dtype != torch.bfloat16  # which it multiplies wrongly
    # In fp32 its accumulators spill.
    is_narrow = x.is_cuda and x.element_size() == 2
    return is_narrow and torch.cuda.get_device_capability(x.device)[0] == 9


# Opaque to the compiler: torch.library.triton_op takes no tensor descriptors.
@operator("linear_gelu", opaque=True)
def _linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Returns z and h."""
    # TMA reads from 16-byte boundaries, off which a dense tensor may start.
    x, weight = (t if t.data_ptr() % 16 == 0 else t.clone() for t in (x, weight))
    z, h = _empty_hidden(x, weight, bias)
    rows, cols, depth = TILE["ROWS"], TILE["COLS"], TILE["DEPTH"]
    num_tiles = -(-z.shape[0] // rows) * -(-z.shape[1] // cols)
    num_programs = min(num_tiles, PROGRAMS * num_multiprocessors(x.device.index))
    half = [rows, cols // 2]
    # What is loaded or stored of each tensor at a time.
    blocks = [rows, depth], [cols, depth], half, half
    descriptors = map(TensorDescriptor.from_tensor, (x, weight, z, h), blocks)
    Launcher(linear_gelu_kernel)[(num_programs,)](bias, *descriptors, *z.shape, x.shape[1], **TILE)
    return z, h


@_linear_gelu.register_fake
def _empty_hidden(x, weight, _bias):
    z = x.new_empty(x.shape[0], weight.shape[0])
    return z, torch.empty_like(z)


register_flop_formula(torch.ops.labkit.linear_gelu)(
    lambda x, weight, *_, **__: 2 * x[0] * x[1] * weight[0]
)


@operator("gelu_backward")
def _gelu_backward(grad_h: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns ∂z, h and ∂b₁ in fp32 (in fp64 of fp64)."""
    if not runs_kernel(z):
        grad_z = torch.ops.aten.gelu_backward(grad_h, z.clamp(-1e4, 1e4), approximate="tanh")
        return grad_z, F.gelu(z, approximate="tanh"), wide(grad_z).sum(0)
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
            z_MF = None
            h_MF = torch._addmm_activation(fc1_bias, x, fc1_weight.T, use_gelu=True)
        elif _has_epilogue(x, fc1_weight):
            z_MF, h_MF = _linear_gelu(x, fc1_weight, fc1_bias)
        else:
            z_MF = F.linear(x, fc1_weight, fc1_bias)
            h_MF = F.gelu(z_MF, approximate="tanh")
        z_MF = z_MF if keep else None
        norm_weight, norm_bias, ctx.eps = norm
        kept = x if total is None else total
        ctx.save_for_backward(kept, norm_weight, norm_bias, z_MF, fc1_weight, fc1_bias, fc2_weight)
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
    norm: tuple[Tensor, Tensor, Tensor, float] | None = None,
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
    is_trained = any(tensor.requires_grad for tensor in (x, *parameters[:3]))
    keep = keep and torch.is_grad_enabled() and is_trained
    x_MC = rows_of(x).contiguous()
    norm = norm or (None, None, None, None)
    return GeluMLP.apply(x_MC, *[p.contiguous() for p in parameters], keep, *norm).view(x.shape)
