"""FlashAttention-2 in plain PyTorch: the algorithm as it reads, tile by tile, on any device.

Forward, for a tile of queries, over the tiles of keys, with running maximum m, sum l and output o:

    S = scale · Q Kᵀ          m' = max(m, rowmax S)       P = exp(S − m')
    l' = exp(m − m') l + rowsum P                         o' = exp(m − m') o + P V
    at the end  O = o / l  and the log-sum-exp  L = m + log l

Backward, from L, with D = rowsum(∂O ∘ O), the tiles of P recomputed and never stored:

    P = exp(S − L)    ∂V += Pᵀ ∂O    ∂P = ∂O Vᵀ
    ∂S = P ∘ (∂P − D)    ∂Q += scale · ∂S K    ∂K += scale · ∂Sᵀ Q

FLOPs: 4·Q·K·D forward and 10·Q·K·D backward per head, half of it when causal; memory is linear in Q
+ K.

Shape suffixes: Q queries, K keys, D head dimension, H heads; leading dimensions are written `...`.

Source: Dao 2023, "FlashAttention-2", algorithms 1 and 2.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from labkit.kernels.fused import outside_autocast
from labkit.kernels.reference import visible

# Long enough that a matrix product is most of a tile's work on a CPU, short enough that a tile
# stays in its cache.
TILE_Q = 128
TILE_K = 128


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _tiles(
    num_queries: int,
    num_keys: int,
    sequences: Sequence[tuple],
    left: int,
    right: int,
    tile_q: int,
    tile_k: int,
):
    """Yields slices of queries, each with how far before its own key a query stands, and with the
    slices of keys that any of its queries sees.
    """
    for (q_first, q_last), (k_first, k_last) in sequences or [((0, num_queries), (0, num_keys))]:
        diagonal = k_last - q_last
        for q_begin in range(q_first, q_last, tile_q):
            q_end = min(q_begin + tile_q, q_last)
            begin = 0 if left < 0 else max(0, q_begin + diagonal - left - k_first)
            end = k_last if right < 0 else min(k_last, q_end + diagonal + right)
            starts = range(k_first + begin // tile_k * tile_k, end, tile_k)
            keys = [slice(start, min(start + tile_k, k_last)) for start in starts]
            yield slice(q_begin, q_end), diagonal, keys


def _mask(
    scores_QK: Tensor, queries: slice, keys: slice, diagonal: int, left: int, right: int
) -> Tensor:
    """Returns the tile of scores, −inf where the query does not see the key."""
    if left < 0 and right < 0:
        return scores_QK
    positions_Q, positions_K = (
        torch.arange(rows.start, rows.stop, device=scores_QK.device) for rows in (queries, keys)
    )
    visible_QK = visible(positions_Q + diagonal, positions_K, left, right)
    return scores_QK.masked_fill(~visible_QK, -math.inf)


def _shared_heads(x: Tensor, q: Tensor) -> Tensor:
    """Returns keys or values (H_k, K, D) once for each of q's heads."""
    return x.repeat_interleave(q.shape[-3] // x.shape[-3], dim=-3)


def _sum_over_group(grad: Tensor, x: Tensor) -> Tensor:
    """Returns the gradient of x (H_k, K, D) from that of its copies for each query head."""
    return grad.unflatten(-3, (x.shape[-3], -1)).sum(dim=-3).to(x.dtype)


@outside_autocast
def tiled_attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    left: int,
    right: int,
    tile_q: int = TILE_Q,
    tile_k: int = TILE_K,
    sequences: Sequence[tuple] = (),
) -> tuple[Tensor, Tensor]:
    """Returns the output, (..., Q, D) in q's dtype, and the log-sum-exp, (..., Q) in fp32 (fp64 for
    fp64).

    Args:
        q, k, v: (..., heads, length, D), a batch of one head also without a dimension of heads; k
            and v may have fewer heads.
        scale: of the scores.
        left, right: how many keys each query sees before and after its own on the diagonal, which
            is aligned to the bottom right; −1 is without limit.
        tile_q, tile_k: rows and columns of a tile.
        sequences: of a packed batch, the begin and the end of each one's queries and of its keys,
            which see no others. Rows of none get zeros, and −∞.
    """
    out = torch.zeros_like(q)
    dtype = accumulation_dtype(q.dtype)
    k, v = (_shared_heads(x, q).to(dtype) for x in (k, v))
    scaled_q = q.to(dtype) * scale
    lse = torch.full(q.shape[:-1], -math.inf, dtype=dtype, device=q.device)
    tiles = _tiles(q.shape[-2], k.shape[-2], sequences, left, right, tile_q, tile_k)
    for queries, diagonal, key_tiles in tiles:
        q_QD = scaled_q[..., queries, :]
        maximum_Q = q_QD.new_full(q_QD.shape[:-1], -math.inf)
        sum_Q, acc_QD = torch.zeros_like(maximum_Q), torch.zeros_like(q_QD)
        for keys in key_tiles:
            scores_QK = q_QD @ k[..., keys, :].mT
            scores_QK = _mask(scores_QK, queries, keys, diagonal, left, right)
            new_maximum_Q = torch.maximum(maximum_Q, scores_QK.amax(dim=-1))
            # While a row has seen no key its maximum is −inf, and −inf − (−inf) would be NaN.
            shift_Q = new_maximum_Q.masked_fill(new_maximum_Q == -math.inf, 0)
            p_QK = torch.exp(scores_QK - shift_Q[..., None])
            rescale_Q = torch.exp(maximum_Q - shift_Q)
            sum_Q = rescale_Q * sum_Q + p_QK.sum(dim=-1)
            acc_QD = rescale_Q[..., None] * acc_QD + p_QK @ v[..., keys, :]
            maximum_Q = new_maximum_Q
        # A row without any key: zeros, and log 0 = −inf.
        out[..., queries, :] = acc_QD / sum_Q.masked_fill(sum_Q == 0, 1)[..., None]
        lse[..., queries] = maximum_Q + torch.log(sum_Q)
    return out, lse


@outside_autocast
def tiled_attention_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    scale: float,
    left: int,
    right: int,
    tile_q: int = TILE_Q,
    tile_k: int = TILE_K,
    sequences: Sequence[tuple] = (),
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of q, k and v, in their shapes and dtypes; arguments as in
    `tiled_attention_forward`.
    """
    dtype = accumulation_dtype(q.dtype)
    wide_q, grad_out = q.to(dtype), grad_out.to(dtype)
    shared_k, shared_v = (_shared_heads(x, q).to(dtype) for x in (k, v))
    delta = (grad_out * out.to(dtype)).sum(dim=-1)
    # exp(−∞ − ∞) = 0: a row that saw no key passes no gradient on.
    lse = lse.masked_fill(lse == -math.inf, math.inf)
    grad_q, grad_k, grad_v = map(torch.zeros_like, (wide_q, shared_k, shared_v))
    tiles = _tiles(q.shape[-2], k.shape[-2], sequences, left, right, tile_q, tile_k)
    for queries, diagonal, key_tiles in tiles:
        q_QD = wide_q[..., queries, :]
        grad_out_QD = grad_out[..., queries, :]
        for keys in key_tiles:
            k_KD = shared_k[..., keys, :]
            v_KD = shared_v[..., keys, :]
            # In the order of the forward pass, so that exp(S − L) subtracts equal roundings.
            scores_QK = (q_QD * scale) @ k_KD.mT
            scores_QK = _mask(scores_QK, queries, keys, diagonal, left, right)
            p_QK = torch.exp(scores_QK - lse[..., queries, None])
            grad_p_QK = grad_out_QD @ v_KD.mT
            grad_scores_QK = scale * p_QK * (grad_p_QK - delta[..., queries, None])
            grad_q[..., queries, :] += grad_scores_QK @ k_KD
            grad_k[..., keys, :] += grad_scores_QK.mT @ q_QD
            grad_v[..., keys, :] += p_QK.mT @ grad_out_QD
    return grad_q.to(q.dtype), _sum_over_group(grad_k, k), _sum_over_group(grad_v, v)
