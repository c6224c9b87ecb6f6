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

from labkit.kernels.fused import outside_autocast, wide
from labkit.kernels.reference import repeat_heads, visible

# Rows and columns of a tile: long enough that a matrix product is most of its work on a CPU, short
# enough that it stays in the cache.
TILE = 128


def _score_tiles(
    scaled_q: Tensor,
    k: Tensor,
    *,
    left: int,
    right: int,
    tile: int = TILE,
    sequences: Sequence[tuple] = (),
):
    """Yields each tile of scores of which a mask shows any: its queries and its keys as slices, and
    the scores (..., Q, K), −inf where a query does not see a key.

    Args:
        scaled_q: the queries times the scale of the scores; k: a key head for each of theirs.
        left, right: how many keys each query sees before and after its own on the diagonal, which
            is aligned to the bottom right; −1 is without limit.
        tile: rows and columns of a tile.
        sequences: of a packed batch, the begin and the end of each one's queries and of its keys,
            which see no others.
    """
    whole = [((0, scaled_q.shape[-2]), (0, k.shape[-2]))]
    for (q_first, q_last), (k_first, k_last) in sequences or whole:
        # How far before its own key a query stands.
        diagonal = k_last - q_last
        for q_begin in range(q_first, q_last, tile):
            q_end = min(q_begin + tile, q_last)
            begin = 0 if left < 0 else max(0, q_begin + diagonal - left - k_first)
            end = k_last if right < 0 else min(k_last, q_end + diagonal + right)
            for k_begin in range(k_first + begin // tile * tile, end, tile):
                k_end = min(k_begin + tile, k_last)
                queries = slice(q_begin, q_end)
                keys = slice(k_begin, k_end)
                scores_QK = scaled_q[..., queries, :] @ k[..., keys, :].mT
                if left >= 0 or right >= 0:
                    positions_Q = torch.arange(q_begin, q_end, device=k.device) + diagonal
                    positions_K = torch.arange(k_begin, k_end, device=k.device)
                    visible_QK = visible(positions_Q, positions_K, left, right)
                    scores_QK = scores_QK.masked_fill(~visible_QK, -math.inf)
                yield queries, keys, scores_QK


def _sum_over_group(grad: Tensor, x: Tensor) -> Tensor:
    """Returns the gradient of x (H_k, K, D) from that of its copies for each query head."""
    return grad.unflatten(-3, (x.shape[-3], -1)).sum(dim=-3).to(x.dtype)


@outside_autocast
def tiled_attention_forward(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, **mask
) -> tuple[Tensor, Tensor]:
    """Returns the output, (..., Q, D) in q's dtype, and the log-sum-exp, (..., Q) in fp32 (fp64 for
    fp64). Rows that see no key get zeros, and −∞.

    Args:
        q, k, v: (..., heads, length, D), a batch of one head also without a dimension of heads; k
            and v may have fewer heads.
        scale: of the scores.
        mask: left, right, tile and sequences as in `_score_tiles`.
    """
    k, v = (wide(repeat_heads(x, q)) for x in (k, v))
    scaled_q = wide(q) * scale
    acc = torch.zeros_like(scaled_q)
    total = acc.new_zeros(q.shape[:-1])
    maximum = torch.full_like(total, -math.inf)
    for queries, keys, scores_QK in _score_tiles(scaled_q, k, **mask):
        new_maximum_Q = torch.maximum(maximum[..., queries], scores_QK.amax(dim=-1))
        # While a row has seen no key its maximum is −inf, and −inf − (−inf) would be NaN.
        shift_Q = new_maximum_Q.masked_fill(new_maximum_Q == -math.inf, 0)
        p_QK = torch.exp(scores_QK - shift_Q[..., None])
        rescale_Q = torch.exp(maximum[..., queries] - shift_Q)
        total[..., queries] = rescale_Q * total[..., queries] + p_QK.sum(dim=-1)
        rescaled_QD = rescale_Q[..., None] * acc[..., queries, :]
        acc[..., queries, :] = rescaled_QD + p_QK @ v[..., keys, :]
        maximum[..., queries] = new_maximum_Q
    # A row without any key: zeros, and log 0 = −inf.
    out = acc / total.masked_fill(total == 0, 1)[..., None]
    return out.to(q.dtype), maximum + torch.log(total)


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
    **mask,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of q, k and v, in their shapes and dtypes; arguments as in
    `tiled_attention_forward`.
    """
    wide_q, grad_out = wide(q), wide(grad_out)
    shared_k, shared_v = (wide(repeat_heads(x, q)) for x in (k, v))
    delta = (grad_out * wide(out)).sum(dim=-1)
    # exp(−∞ − ∞) = 0: a row that saw no key passes no gradient on.
    lse = lse.masked_fill(lse == -math.inf, math.inf)
    grad_q, grad_k, grad_v = map(torch.zeros_like, (wide_q, shared_k, shared_v))
    # In the order of the forward pass, so that exp(S − L) subtracts equal roundings.
    for queries, keys, scores_QK in _score_tiles(wide_q * scale, shared_k, **mask):
        grad_out_QD = grad_out[..., queries, :]
        p_QK = torch.exp(scores_QK - lse[..., queries, None])
        grad_p_QK = grad_out_QD @ shared_v[..., keys, :].mT
        grad_scores_QK = scale * p_QK * (grad_p_QK - delta[..., queries, None])
        grad_q[..., queries, :] += grad_scores_QK @ shared_k[..., keys, :]
        grad_k[..., keys, :] += grad_scores_QK.mT @ wide_q[..., queries, :]
        grad_v[..., keys, :] += p_QK.mT @ grad_out_QD
    return grad_q.to(q.dtype), _sum_over_group(grad_k, k), _sum_over_group(grad_v, v)
