"""Eager oracles: the operations as their formulas read, in plain PyTorch, in any dtype up to fp64.

They are slow and materialise everything; the kernels are held against them.

Shape suffixes: B batch, H heads, Q query length, K key length, D head dimension.
"""

import math

import torch
from torch import Tensor


def attention_reference(q_BHQD: Tensor, k_BHKD: Tensor, v_BHKD: Tensor, *, causal: bool = False) -> Tensor:
    """Returns softmax(q kᵀ / √D) v with the scores materialised.

    Args:
        q_BHQD, k_BHKD, v_BHKD: queries, keys and values, (..., length, D), one floating dtype.
        causal: query i sees keys up to i + (K − Q), that is, aligned to the bottom right.

    Returns:
        The output, (..., Q, D), dtype of the inputs.

    Source: Vaswani et al. 2017, "Attention Is All You Need", equation 1.
    """
    num_queries, num_keys = q_BHQD.shape[-2], k_BHKD.shape[-2]
    scores_BHQK = q_BHQD @ k_BHKD.transpose(-2, -1) * (1 / math.sqrt(q_BHQD.shape[-1]))
    if causal:
        query = torch.arange(num_queries, device=q_BHQD.device)[:, None] + (num_keys - num_queries)
        key = torch.arange(num_keys, device=q_BHQD.device)[None, :]
        scores_BHQK = scores_BHQK.masked_fill(key > query, -math.inf)
    return torch.softmax(scores_BHQK, dim=-1) @ v_BHKD
