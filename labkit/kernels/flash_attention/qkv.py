"""FlashAttention of packed sequences whose queries, keys and values are one projection, and so are
their gradients.

`flash_attention` reads such q, k and v where they are, but its gradients take a copy of 6·M·H·D
elements to be joined. Here the kernels write them beside one another. Sequences of one length are a
batch, and run by the kernels for that.

Shape suffixes: M tokens of all sequences, H heads, D head dimension.
"""

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from labkit.kernels.flash_attention.op import (
    _check_packing,
    _check_tensors,
    _flops,
    check_lengths,
    flash_attention,
)
from labkit.kernels.flash_attention.plan import plan_of
from labkit.kernels.flash_attention.tiles import TRITON_DTYPES, resolve_impl
from labkit.kernels.fused import autocast_dtype, operator, runs_kernel


def _are_equal(qkv: Tensor, cu_seqlens: Tensor, longest: int | None) -> bool:
    """Whether all sequences must be of one length, since the longest is as long as their mean."""
    return longest is not None and longest * (cu_seqlens.shape[0] - 1) == qkv.shape[0]


def _as_batch(x_MHD: Tensor, length: int) -> Tensor:
    """Returns (sequences, H, length, D), a view."""
    return x_MHD.view(-1, length, *x_MHD.shape[1:]).transpose(1, 2)


def _from_batch(x_BHSD: Tensor) -> Tensor:
    return x_BHSD.transpose(1, 2).flatten(0, 1)


@operator("flash_attention_qkv", opaque=True)
def _forward(qkv: Tensor, cu_seqlens: Tensor, longest: int | None) -> tuple[Tensor, Tensor]:
    tensors = qkv.unbind(1)
    check_lengths(*tensors[:2], cu_seqlens, cu_seqlens, longest, longest)
    if not _are_equal(qkv, cu_seqlens, longest):
        return plan_of(*tensors, cu_seqlens, cu_seqlens).forward(*tensors, cu_seqlens, cu_seqlens)
    q, k, v = (_as_batch(x, longest) for x in tensors)
    out, lse = plan_of(q, k, v, impl=resolve_impl(q)).forward(q, k, v)
    return _from_batch(out), lse


@_forward.register_fake
def _(qkv, cu_seqlens, longest):
    num_tokens, _, num_heads, head_dim = qkv.shape
    is_batch = _are_equal(qkv, cu_seqlens, longest)
    statistics = (
        (cu_seqlens.shape[0] - 1, num_heads, longest) if is_batch else (num_heads, num_tokens)
    )
    return qkv.new_empty(num_tokens, num_heads, head_dim), qkv.new_empty(
        statistics, dtype=torch.float32
    )


@operator("flash_attention_qkv_backward", opaque=True)
def _backward(
    grad_out: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, cu_seqlens: Tensor, longest: int | None
) -> Tensor:
    grad_qkv, (q, k, v) = torch.empty_like(qkv), qkv.unbind(1)
    grads = grad_qkv.unbind(1)
    if _are_equal(qkv, cu_seqlens, longest):
        grad_out, q, k, v, out, *grads = (
            _as_batch(x, longest) for x in (grad_out, q, k, v, out, *grads)
        )
        plan_of(q, k, v, impl=resolve_impl(q)).backward(
            grad_out, q, k, v, out, lse, grads=tuple(grads)
        )
    else:
        plan = plan_of(q, k, v, cu_seqlens, cu_seqlens)
        plan.backward(grad_out, q, k, v, out, lse, cu_seqlens, cu_seqlens, grads=tuple(grads))
    return grad_qkv


@_backward.register_fake
def _(_grad_out, qkv, *_):
    return torch.empty_like(qkv)


def _setup_context(ctx, inputs, output) -> None:
    qkv, cu_seqlens, ctx.longest = inputs
    ctx.save_for_backward(qkv, *output, cu_seqlens)


def _gradients(ctx, grad_out: Tensor, _grad_lse):
    return _backward(grad_out, *ctx.saved_tensors, ctx.longest), None, None


_forward.register_autograd(_gradients, setup_context=_setup_context)


@register_flop_formula(torch.ops.labkit.flash_attention_qkv, get_raw=True)
def _(qkv, cu_seqlens, *_, **__):
    return _flops(4, *qkv.unbind(1)[:2], cu_seqlens, cu_seqlens, -1, -1)


@register_flop_formula(torch.ops.labkit.flash_attention_qkv_backward, get_raw=True)
def _(_grad_out, qkv, _out, _lse, cu_seqlens, *_, **__):
    return _flops(10, *qkv.unbind(1)[:2], cu_seqlens, cu_seqlens, -1, -1)


def flash_attention_qkv(qkv: Tensor, cu_seqlens: Tensor, longest: int | None = None) -> Tensor:
    """Returns attention within each sequence, (M, H, D), of a projection to queries, keys and
    values.

    Args:
        qkv: (M, 3, H, D), dense; fp32, bf16, fp16 or fp64; under autocast it is cast.
        cu_seqlens, longest: as `flash_attention` takes cu_seqlens_q and max_seqlen_q. A longest
            that is the mean says that all sequences are as long.

    Raises:
        ValueError, TypeError: as `flash_attention` does; a projection of another shape.

    Error budget: that of `flash_attention`.
    """
    if qkv.dim() != 4 or qkv.shape[1] != 3 or not qkv.is_contiguous():
        got = f"shape {tuple(qkv.shape)} and strides {qkv.stride()}"
        raise ValueError(f"qkv must be dense, of shape (tokens, 3, heads, d); got {got}")
    q, k, v = qkv.unbind(1)
    if runs_kernel(qkv) and qkv.dtype in TRITON_DTYPES:
        _check_tensors(q, k, v, packed=True)
        _check_packing(q, cu_seqlens, cu_seqlens, longest, longest)
        qkv = qkv.to(autocast_dtype(qkv) or qkv.dtype)
        return _forward(qkv, cu_seqlens, longest)[0]
    lengths = {"max_seqlen_q": longest, "max_seqlen_k": longest}
    return flash_attention(q, k, v, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, **lengths)
