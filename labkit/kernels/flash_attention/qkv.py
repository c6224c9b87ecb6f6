"""FlashAttention of packed sequences whose queries, keys and values are one projection."""

import torch
from torch import Tensor

from labkit.kernels.flash_attention.op import check_lengths, check_packing, flash_attention


def flash_attention_qkv(qkv: Tensor, cu_seqlens: Tensor, longest: int | None = None) -> Tensor:
    """Returns attention within each sequence, (tokens, heads, d), of a projection to queries, keys
    and values. Sequences of one length are a batch, and run by the kernels for that.

    Args:
        qkv: (tokens, 3, heads, d), dense; fp32, bf16, fp16 or fp64; under autocast it is cast.
        cu_seqlens, longest: as `flash_attention` takes cu_seqlens_q and max_seqlen_q. A longest
            that is the mean says that all sequences are as long.

    Raises:
        ValueError, TypeError: as `flash_attention` does; a projection of another shape.

    Error budget: that of `flash_attention`.
    """
    if qkv.dim() != 4 or qkv.shape[1] != 3 or not qkv.is_contiguous():
        got = f"shape {tuple(qkv.shape)} and strides {qkv.stride()}"
        raise ValueError(f"qkv must be dense, of shape (tokens, 3, heads, d); got {got}")
    if cu_seqlens is None:  # three dimensions would be a batch's
        raise TypeError("cu_seqlens must be a tensor, got NoneType")
    q, k, v = qkv.unbind(1)
    check_packing(q, cu_seqlens, cu_seqlens, longest, longest)
    if longest is not None and longest * (cu_seqlens.shape[0] - 1) == qkv.shape[0] > 0:
        if not torch.compiler.is_compiling():
            check_lengths(q, k, cu_seqlens, cu_seqlens, longest, longest)
        batch = (x.unflatten(0, (-1, longest)).transpose(1, 2) for x in (q, k, v))
        return flash_attention(*batch).transpose(1, 2).flatten(0, 1)
    return flash_attention(
        q,
        k,
        v,
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_k=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_k=longest,
    )
