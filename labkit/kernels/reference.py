"""Eager oracles: the operations as their formulas read, in plain PyTorch, in any dtype up to fp64.

They are slow and materialise everything; the kernels are held against them.

Shape suffixes: B batch, H query heads, Q query length, K key length, D head dimension.
"""

import math

import torch
from torch import Tensor


def visible(queries: Tensor, keys: Tensor, left: int, right: int) -> Tensor:
    """Returns which key each query sees, (Q, K) bool, by their positions: as many `left` and
    `right` of its own, −1 without limit.
    """
    distance = keys - queries[:, None]
    if left < 0:
        return distance <= right
    is_near = distance >= -left
    return is_near if right < 0 else is_near & (distance <= right)


def _scores(
    q_BHQD: Tensor, k_BHKD: Tensor, causal: bool, scale: float | None, window
) -> tuple[Tensor, Tensor | None]:
    """Returns the scaled scores, −inf where a query does not see a key, and the (Q, K) mask of what
    it sees.
    """
    scale = 1 / math.sqrt(q_BHQD.shape[-1]) if scale is None else scale
    scores_BHQK = q_BHQD @ k_BHKD.transpose(-2, -1) * scale
    left, right = window or (-1, -1)
    right = 0 if causal else right
    if left < 0 and right < 0:
        return scores_BHQK, None
    num_queries, num_keys = scores_BHQK.shape[-2:]
    queries = torch.arange(num_queries, device=q_BHQD.device) + (num_keys - num_queries)
    visible_QK = visible(queries, torch.arange(num_keys, device=q_BHQD.device), left, right)
    return scores_BHQK.masked_fill(~visible_QK, -math.inf), visible_QK


def repeat_heads(kv_BHKD: Tensor, like_BHQD: Tensor) -> Tensor:
    """Repeats each key head for the query heads of its group: query head h reads key head h //
    group.
    """
    if kv_BHKD.dim() < 3 or kv_BHKD.shape[-3] == like_BHQD.shape[-3]:
        return kv_BHKD
    return kv_BHKD.repeat_interleave(like_BHQD.shape[-3] // kv_BHKD.shape[-3], dim=-3)


def attention_reference(
    q_BHQD: Tensor,
    k_BHKD: Tensor,
    v_BHKD: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: tuple[int, int] | None = None,
) -> Tensor:
    """Returns softmax(scale · q kᵀ) v with the scores materialised.

    Args:
        q_BHQD, k_BHKD, v_BHKD: queries, keys and values, (..., length, D), one floating dtype. With
            four dimensions the keys may have fewer heads than the queries: each serves a group of
            consecutive query heads.
        causal: query i sees keys up to i + (K − Q), that is, aligned to the bottom right.
        scale: of the scores; None is 1/√D.
        window: (left, right): query i sees keys from i + (K − Q) − left to i + (K − Q) + right; −1
            is without limit.

    Returns:
        The output, (..., Q, D), dtype of the inputs; zeros for a query that sees no key.

    Source: Vaswani et al. 2017, "Attention Is All You Need", equation 1; grouped heads: Ainslie et
    al. 2023.
    """
    k_BHKD, v_BHKD = repeat_heads(k_BHKD, q_BHQD), repeat_heads(v_BHKD, q_BHQD)
    scores_BHQK, visible_QK = _scores(q_BHQD, k_BHKD, causal, scale, window)
    probabilities_BHQK = torch.softmax(scores_BHQK, dim=-1)
    # A row without a key is 0/0 in the softmax. Causal or not, this happens to no row while K ≥ Q
    # without a window, and then the mask below must not cost the plain case an operation.
    if visible_QK is not None and (window is not None or k_BHKD.shape[-2] < q_BHQD.shape[-2]):
        probabilities_BHQK = probabilities_BHQK.masked_fill(
            ~visible_QK.any(dim=-1, keepdim=True), 0
        )
    return probabilities_BHQK @ v_BHKD


def attention_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, grad_out: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients by q, k and v, the scores computed again from what a forward kernel
    keeps.

    Args:
        q, k, v, out, grad_out: (..., length, D); lse: (..., length), log Σ exp of the scores, fp32.
    """
    # exp(−∞ − ∞) = 0: a row that saw no key passes no gradient on.
    lse = lse.masked_fill(lse == -math.inf, math.inf)
    scores, _ = _scores(q, k, causal, None, None)
    weights = torch.exp(scores - lse[..., None]).to(q.dtype)
    row_sums = (out * grad_out).sum(-1, keepdim=True)
    grad_scores = weights * (grad_out @ v.mT - row_sums) / math.sqrt(q.shape[-1])
    return grad_scores @ k, grad_scores.mT @ q, weights.mT @ grad_out
