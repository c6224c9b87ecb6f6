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

import torch
from torch import Tensor

from labkit.kernels.fused import outside_autocast

# Long enough that a matrix product is most of a tile's work on a CPU, short enough that a tile
# stays in its cache.
TILE_Q = 128
TILE_K = 128


def _accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _tile_pairs(num_queries: int, num_keys: int, left: int, right: int, tile_q: int, tile_k: int):
    """Yields the query slices, each with the slices of keys that any of its queries sees."""
    diagonal = num_keys - num_queries
    for q_begin in range(0, num_queries, tile_q):
        q_end = min(q_begin + tile_q, num_queries)
        k_first = 0 if left < 0 else max(0, q_begin + diagonal - left)
        k_end = num_keys if right < 0 else min(num_keys, q_end + diagonal + right)
        starts = range(k_first // tile_k * tile_k, max(k_end, 0), tile_k)
        yield (
            slice(q_begin, q_end),
            [slice(begin, min(begin + tile_k, num_keys)) for begin in starts],
        )


def _mask(
    scores_QK: Tensor, queries: slice, keys: slice, diagonal: int, left: int, right: int
) -> Tensor:
    """Returns the tile of scores, −inf where the query does not see the key."""
    device = scores_QK.device
    query = torch.arange(queries.start, queries.stop, device=device)[:, None] + diagonal
    key = torch.arange(keys.start, keys.stop, device=device)
    if right >= 0:
        scores_QK = scores_QK.masked_fill(key > query + right, -math.inf)
    if left >= 0:
        scores_QK = scores_QK.masked_fill(key < query - left, -math.inf)
    return scores_QK


def _shared_heads(x: Tensor, q: Tensor) -> Tensor:
    """Returns keys or values (..., H_k, K, D) once for each of q's heads."""
    if q.dim() < 4:
        return x
    return x.repeat_interleave(q.shape[-3] // x.shape[-3], dim=-3)


def _sum_over_group(grad: Tensor, x: Tensor) -> Tensor:
    """Returns the gradient of x (..., H_k, K, D) from that of its copies for each query head."""
    if grad.dim() < 4:
        return grad
    return grad.unflatten(-3, (x.shape[-3], -1)).sum(dim=-3)


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
) -> tuple[Tensor, Tensor]:
    """Returns the output, (..., Q, D) in q's dtype, and the log-sum-exp, (..., Q) in fp32 (fp64 for
    fp64).

    Args:
        q, k, v: (..., length, D); with four dimensions k and v may have fewer heads than q.
        scale: of the scores.
        left, right: how many keys each query sees before and after its own on the diagonal, which
            is aligned to the bottom right; −1 is without limit.
        tile_q, tile_k: rows and columns of a tile.
    """
    out = torch.empty_like(q)
    k, v = _shared_heads(k, q), _shared_heads(v, q)
    dtype = _accumulation_dtype(q.dtype)
    lse = torch.empty(q.shape[:-1], dtype=dtype, device=q.device)
    num_queries, num_keys = q.shape[-2], k.shape[-2]
    for queries, key_tiles in _tile_pairs(num_queries, num_keys, left, right, tile_q, tile_k):
        q_QD = q[..., queries, :].to(dtype) * scale
        maximum_Q = q_QD.new_full(q_QD.shape[:-1], -math.inf)
        sum_Q, acc_QD = torch.zeros_like(maximum_Q), torch.zeros_like(q_QD)
        for keys in key_tiles:
            scores_QK = q_QD @ k[..., keys, :].to(dtype).transpose(-2, -1)
            scores_QK = _mask(scores_QK, queries, keys, num_keys - num_queries, left, right)
            new_maximum_Q = torch.maximum(maximum_Q, scores_QK.amax(dim=-1))
            # While a row has seen no key its maximum is −inf, and −inf − (−inf) would be NaN.
            shift_Q = new_maximum_Q.masked_fill(new_maximum_Q == -math.inf, 0)
            p_QK = torch.exp(scores_QK - shift_Q[..., None])
            rescale_Q = torch.exp(maximum_Q - shift_Q)
            sum_Q = rescale_Q * sum_Q + p_QK.sum(dim=-1)
            acc_QD = rescale_Q[..., None] * acc_QD + p_QK @ v[..., keys, :].to(dtype)
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
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of q, k and v, in their shapes and dtypes; arguments as in
    `tiled_attention_forward`.
    """
    dtype = _accumulation_dtype(q.dtype)
    delta = (grad_out.to(dtype) * out.to(dtype)).sum(dim=-1)
    shared_k, shared_v = _shared_heads(k, q), _shared_heads(v, q)
    grad_q = torch.zeros(q.shape, dtype=dtype, device=q.device)
    grad_k = torch.zeros(shared_k.shape, dtype=dtype, device=q.device)
    grad_v = torch.zeros_like(grad_k)
    num_queries, num_keys = q.shape[-2], k.shape[-2]
    for queries, key_tiles in _tile_pairs(num_queries, num_keys, left, right, tile_q, tile_k):
        q_QD, grad_out_QD = q[..., queries, :].to(dtype), grad_out[..., queries, :].to(dtype)
        lse_Q = lse[..., queries]
        # exp(−inf − ∞) = 0: a row that saw no key passes no gradient on.
        lse_Q = lse_Q.masked_fill(lse_Q == -math.inf, math.inf)
        for keys in key_tiles:
            k_KD = shared_k[..., keys, :].to(dtype)
            v_KD = shared_v[..., keys, :].to(dtype)
            # In the order of the forward pass, so that exp(S − L) subtracts equal roundings.
            scores_QK = (q_QD * scale) @ k_KD.transpose(-2, -1)
            scores_QK = _mask(scores_QK, queries, keys, num_keys - num_queries, left, right)
            p_QK = torch.exp(scores_QK - lse_Q[..., None])
            grad_p_QK = grad_out_QD @ v_KD.transpose(-2, -1)
            grad_scores_QK = scale * p_QK * (grad_p_QK - delta[..., queries, None])
            grad_q[..., queries, :] += grad_scores_QK @ k_KD
            grad_k[..., keys, :] += grad_scores_QK.transpose(-2, -1) @ q_QD
            grad_v[..., keys, :] += p_QK.transpose(-2, -1) @ grad_out_QD
    grad_k, grad_v = _sum_over_group(grad_k, k), _sum_over_group(grad_v, v)
    return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype)
