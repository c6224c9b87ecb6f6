"""Weighted sum of the last dimension in Triton, forward and backward: the smallest kernel with all
parts of a real one.

    y_n = Σ_d x_nd w_d        ∂x_nd = ∂y_n w_d        ∂w_d = Σ_n ∂y_n x_nd

Shapes: x (..., D), w (D,), y (...). Ideal cost: 2·N·D FLOPs against N·D elements read, so memory
bounds it: forward reads x once, backward reads x once and writes ∂x once. A program owns a tile of
rows and loops over D; both dimensions may end inside a tile, and the masks there keep what lies
beyond out of every sum and every store.

Shape suffixes: N rows (the leading dimensions flattened), D the summed dimension, T tiles of rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from labkit.kernels.fused import check, check_shape, load_fp32, operator, runs_kernel, wrap_triton

# 16 × 256 fp32 elements are 32 registers per thread at 4 warps: enough loads in flight to fill the
# memory pipe, far from the 255 registers of a thread. Smaller D takes one tile of the next power of
# two.
BLOCK_N = tl.constexpr(16)
MAX_BLOCK_D = 256


@triton.jit
def weighted_sum_fwd_kernel(
    x_ptr,
    weight_ptr,
    y_ptr,
    num_rows,
    dim,
    BLOCK_D: tl.constexpr,
):
    """One program sums BLOCK_N rows, a BLOCK_D-wide tile at a time, in fp32."""
    # int64: rows · dim passes 2³¹ elements on a large x.
    rows = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    y = tl.zeros((BLOCK_N,), dtype=tl.float32)
    for start in range(0, dim, BLOCK_D):
        cols = start + tl.arange(0, BLOCK_D)
        inside = (rows < num_rows)[:, None] & (cols < dim)[None, :]
        x = load_fp32(x_ptr + rows[:, None] * dim + cols[None, :], inside)
        weight = load_fp32(weight_ptr + cols, cols < dim)[None, :]
        y += tl.sum(x * weight, axis=1)
    tl.store(y_ptr + rows, y, mask=rows < num_rows)


@triton.jit
def weighted_sum_bwd_kernel(
    x_ptr,
    weight_ptr,
    grad_y_ptr,
    grad_x_ptr,
    partial_grad_weight_ptr,
    num_rows,
    dim,
    BLOCK_D: tl.constexpr,
):
    """One program writes its rows of ∂x and its own row of partial sums of ∂w: no atomics, so
    bit-equal repeats.
    """
    tile = tl.program_id(0).to(tl.int64)
    rows = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    grad_y = load_fp32(grad_y_ptr + rows, rows < num_rows)[:, None]
    for start in range(0, dim, BLOCK_D):
        cols = start + tl.arange(0, BLOCK_D)
        inside = (rows < num_rows)[:, None] & (cols < dim)[None, :]
        place = rows[:, None] * dim + cols[None, :]
        x = load_fp32(x_ptr + place, inside)
        weight = load_fp32(weight_ptr + cols, cols < dim)[None, :]
        tl.store(grad_x_ptr + place, grad_y * weight, mask=inside)
        partial = tl.sum(grad_y * x, axis=0)
        tl.store(partial_grad_weight_ptr + tile * dim + cols, partial, mask=cols < dim)


def _block(dim: int) -> int:
    return min(MAX_BLOCK_D, triton.next_power_of_2(int(dim)))


@operator("weighted_sum")
def weighted_sum_forward(x_ND: Tensor, weight_D: Tensor) -> Tensor:
    """Returns the weighted sums (N,) of the rows of x (N, D), dtype of x, summed in fp32."""
    num_rows, dim = x_ND.shape
    y_N = x_ND.new_empty(num_rows)
    wrap_triton(weighted_sum_fwd_kernel)[(-(-num_rows // BLOCK_N.value),)](
        x_ND.contiguous(), weight_D.contiguous(), y_N, num_rows, dim, BLOCK_D=_block(dim)
    )
    return y_N


@operator("weighted_sum_backward")
def weighted_sum_backward(
    x_ND: Tensor, weight_D: Tensor, grad_y_N: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of x (N, D) and of the weight (D,), in their dtypes."""
    num_rows, dim = x_ND.shape
    num_tiles = -(-num_rows // BLOCK_N.value)
    grad_x_ND = x_ND.new_empty(num_rows, dim)
    partial_TD = x_ND.new_empty(num_tiles, dim, dtype=torch.float32)
    wrap_triton(weighted_sum_bwd_kernel)[(num_tiles,)](
        x_ND.contiguous(),
        weight_D.contiguous(),
        grad_y_N.contiguous(),
        grad_x_ND,
        partial_TD,
        num_rows,
        dim,
        BLOCK_D=_block(dim),
    )
    return grad_x_ND, partial_TD.sum(dim=0).to(weight_D.dtype)


weighted_sum_forward.register_autograd(
    lambda ctx, grad_y_N: weighted_sum_backward(*ctx.saved_tensors, grad_y_N),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def weighted_sum(x: Tensor, weight: Tensor) -> Tensor:
    """Returns Σ_d x[..., d] · weight[d].

    Args:
        x: (..., D), fp32, bf16 or fp16. What is not dense is copied first.
        weight: (D,), dtype and device of x.

    Returns:
        The sums, (...), dtype of x, under autocast too.

    Raises:
        ValueError, TypeError: arguments that do not fit, by name; a CPU tensor without
            TRITON_INTERPRET=1.

    Error budget: twice that of (x * weight).sum(-1) in the same dtype, against fp64; summed in
    fp32.
    """
    check({"x": x, "weight": weight})
    check_shape("weight", weight, x.shape[-1])
    if not runs_kernel(x):
        raise ValueError(
            f"x must be fp32, bf16 or fp16 on a CUDA device, or TRITON_INTERPRET=1 set; got "
            f"{x.dtype} on {x.device}"
        )
    return weighted_sum_forward(x.reshape(-1, x.shape[-1]), weight).view(x.shape[:-1])
