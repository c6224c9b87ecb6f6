"""Rotary positions of queries and keys in one Triton launch, forward and backward.

    y_a = a cos θ_a − b sin θ_a    y_b = b cos θ_b + a sin θ_b
    for columns i and i + D/2, each with its own angle
    ∂a = ∂y_a cos θ_a + ∂y_b sin θ_b    ∂b = ∂y_b cos θ_b − ∂y_a sin θ_a

In a rotation both angles are θ(t, i); where positions have two axes, the halves of the tables may
differ.

Shapes: q (B, H, T, D), k (B, G, T, D), tables (at least T, D). Memory bounds it: each element is
read and written once; the tables stay in the caches.

Shape suffixes: B batch, H query heads, G key heads, T tokens, D head dimension.

Source: Su et al. 2021, "RoFormer", equation 34, with the halves of a head paired as in
`RotaryEmbedding`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from labkit.kernels.fused import (
    check,
    check_kind,
    check_shape,
    operator,
    runs_kernel,
    wide,
    with_dense_rows,
    wrap_triton,
)

# Pairs of a tile: 16 of a thread.
TILE_PAIRS = 2048


@triton.jit
def rotary_kernel(
    q_ptr,
    k_ptr,
    turned_q_ptr,
    turned_k_ptr,
    cos_ptr,
    sin_ptr,
    stride_qb,
    stride_qh,
    stride_qt,
    stride_kb,
    stride_kh,
    stride_kt,
    rows_q,
    rows_k,
    heads_q,
    heads_k,
    num_tokens,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):
    """The first programs turn a tile of query rows each, the others of key rows; rows are counted
    as they are written: by batch, token and head.
    """
    tile = tl.program_id(0)
    tiles_q = tl.cdiv(rows_q, ROWS)
    if tile < tiles_q:
        x_ptr, y_ptr = q_ptr, turned_q_ptr
        stride_b, stride_h, stride_t = stride_qb, stride_qh, stride_qt
        num_rows, num_heads = rows_q, heads_q
    else:
        tile -= tiles_q
        x_ptr, y_ptr = k_ptr, turned_k_ptr
        stride_b, stride_h, stride_t = stride_kb, stride_kh, stride_kt
        num_rows, num_heads = rows_k, heads_k
    rows = tile * ROWS + tl.arange(0, ROWS)[:, None]
    cols = tl.arange(0, BLOCK)[None, :]
    inside = (rows < num_rows) & (cols < D // 2)
    tokens = rows // num_heads % num_tokens
    batches = rows // num_heads // num_tokens
    x_ptrs = x_ptr + batches.to(tl.int64) * stride_b + tokens.to(tl.int64) * stride_t + cols
    x_ptrs += (rows % num_heads).to(tl.int64) * stride_h
    first = tl.load(x_ptrs, mask=inside).to(tl.float32)
    second = tl.load(x_ptrs + D // 2, mask=inside).to(tl.float32)
    angles = tokens * D + cols
    first_cos = tl.load(cos_ptr + angles, mask=inside)
    second_cos = tl.load(cos_ptr + angles + D // 2, mask=inside)
    first_sin = tl.load(sin_ptr + angles, mask=inside)
    second_sin = tl.load(sin_ptr + angles + D // 2, mask=inside)
    if TRANSPOSED:
        first_sin, second_sin = -second_sin, -first_sin
    y_ptrs = y_ptr + rows.to(tl.int64) * D + cols
    tl.store(y_ptrs, first * first_cos - second * first_sin, mask=inside)
    tl.store(y_ptrs + D // 2, second * second_cos + first * second_sin, mask=inside)


@operator("rotary")
def _rotary(
    q_BHTD: Tensor, k_BGTD: Tensor, cos_TD: Tensor, sin_TD: Tensor, transposed: bool
) -> tuple[Tensor, Tensor]:
    """Returns turned queries and keys, the heads of a token adjacent in memory as a projection
    writes them.
    """
    q_BHTD = with_dense_rows(q_BHTD)
    k_BGTD = with_dense_rows(k_BGTD)
    batch, heads_q, num_tokens, d = q_BHTD.shape
    heads_k = k_BGTD.shape[1]
    turned_q_BTHD = q_BHTD.new_empty(batch, num_tokens, heads_q, d)
    turned_k_BTGD = k_BGTD.new_empty(batch, num_tokens, heads_k, d)
    rows_q = batch * num_tokens * heads_q
    rows_k = batch * num_tokens * heads_k
    block = triton.next_power_of_2(int(d) // 2)
    per_tile = max(1, TILE_PAIRS // block)
    wrap_triton(rotary_kernel)[(-(-rows_q // per_tile) + -(-rows_k // per_tile),)](
        q_BHTD,
        k_BGTD,
        turned_q_BTHD,
        turned_k_BTGD,
        cos_TD.contiguous(),
        sin_TD.contiguous(),
        *q_BHTD.stride()[:3],
        *k_BGTD.stride()[:3],
        rows_q,
        rows_k,
        heads_q,
        heads_k,
        num_tokens,
        D=int(d),
        BLOCK=block,
        ROWS=per_tile,
        TRANSPOSED=transposed,
    )
    return turned_q_BTHD.transpose(1, 2), turned_k_BTGD.transpose(1, 2)


def _setup(ctx, inputs, output) -> None:
    _, _, cos_TD, sin_TD, ctx.transposed = inputs
    ctx.save_for_backward(cos_TD, sin_TD)


def _gradients(ctx, grad_q, grad_k):
    return *_rotary(grad_q, grad_k, *ctx.saved_tensors, not ctx.transposed), None, None, None


_rotary.register_autograd(_gradients, setup_context=_setup)


def rotary(q_BHTD: Tensor, k_BGTD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> tuple[Tensor, Tensor]:
    """Returns queries and keys, each pair of columns i and i + D/2 turned by its position's angle,
    rounded once.

    Args:
        q_BHTD, k_BGTD: one dtype of fp32, bf16, fp16 (fp64 in plain PyTorch), which is kept,
            under autocast too; the keys may have fewer heads. Strides are any, best those of a
            projection's output, viewed.
        cos_TD, sin_TD: cosines and sines, fp32, at least T rows of D. The kernel has no gradient
            by them: where one is due the formula runs in plain PyTorch.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices that do not fit; an odd or empty last
            dimension.

    Error budget: that of `labkit.numerics.judge` for the formula in the same dtype, against fp64.
    """
    check({"q": q_BHTD, "k": k_BGTD})
    if q_BHTD.dim() != 4 or k_BGTD.dim() != 4 or q_BHTD.shape[3] % 2:
        raise ValueError(
            f"q and k must be (B, H, T, even D), got {tuple(q_BHTD.shape)} and "
            f"{tuple(k_BGTD.shape)}"
        )
    batch, _, num_tokens, d = q_BHTD.shape
    check_shape("k", k_BGTD, batch, k_BGTD.shape[1], num_tokens, d)
    for name, table in {"cos": cos_TD, "sin": sin_TD}.items():
        check_kind(name, table, [torch.float32], like=q_BHTD)
        check_shape(name, table, max(num_tokens, len(table)), d)
    if runs_kernel(q_BHTD) and not (cos_TD.requires_grad or sin_TD.requires_grad):
        return _rotary(q_BHTD, k_BGTD, cos_TD, sin_TD, False)
    return tuple(_formula(x, cos_TD[:num_tokens], sin_TD[:num_tokens]) for x in (q_BHTD, k_BGTD))


def _formula(x_BHTD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    first, second = wide(x_BHTD).chunk(2, dim=-1)
    return (wide(x_BHTD) * cos_TD + torch.cat((-second, first), dim=-1) * sin_TD).to(x_BHTD.dtype)
