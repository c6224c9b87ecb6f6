"""FlashAttention of packed sequences whose queries, keys and values are one projection, and so are their gradients.

`flash_attention` reads such q, k and v where they are, but its gradients take a copy of 6·M·H·D elements to be joined.
Here the kernels write them beside one another.

Shape suffixes: M tokens of all sequences, H heads, D head dimension.
"""

import math

import torch
from torch import Tensor
from torch.library import custom_op

from labkit.kernels.flash_attention import flash_attention, flash_attention_backward, flash_attention_forward
from labkit.kernels.fused import runs_kernel


def _options(qkv: Tensor, cu_seqlens: Tensor, longest: int | None) -> dict:
    packing = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens, "max_seqlen_q": longest, "max_seqlen_k": longest}
    return {"scale": 1 / math.sqrt(qkv.shape[-1]), **packing}


@custom_op("labkit::flash_attention_qkv", mutates_args=())
def _forward(qkv: Tensor, cu_seqlens: Tensor, longest: int | None) -> tuple[Tensor, Tensor]:
    return flash_attention_forward(*qkv.unbind(1), **_options(qkv, cu_seqlens, longest))


@_forward.register_fake
def _(qkv, _cu_seqlens, _longest):
    num_tokens, _, num_heads, head_dim = qkv.shape
    lse = qkv.new_empty(num_heads, num_tokens, dtype=torch.float32)
    return qkv.new_empty(num_tokens, num_heads, head_dim), lse


@custom_op("labkit::flash_attention_qkv_backward", mutates_args=())
def _backward(
    grad_out: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, cu_seqlens: Tensor, longest: int | None
) -> Tensor:
    grad_qkv = torch.empty_like(qkv)
    options = _options(qkv, cu_seqlens, longest)
    flash_attention_backward(grad_out, *qkv.unbind(1), out, lse, grads=grad_qkv.unbind(1), **options)
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


def flash_attention_qkv(qkv: Tensor, cu_seqlens: Tensor, longest: int | None = None) -> Tensor:
    """Returns attention within each sequence, (M, H, D), of a projection to queries, keys and values.

    Args:
        qkv: (M, 3, H, D), dense; fp32, bf16 or fp16, on a CPU also fp64.
        cu_seqlens, longest: as `flash_attention` takes cu_seqlens_q and max_seqlen_q.

    Raises:
        ValueError, TypeError: as `flash_attention` does; a projection of another shape.

    Error budget: that of `flash_attention`.
    """
    if qkv.dim() != 4 or qkv.shape[1] != 3 or not qkv.is_contiguous():
        got = f"shape {tuple(qkv.shape)} and strides {qkv.stride()}"
        raise ValueError(f"qkv must be dense, of shape (tokens, 3, heads, d); got {got}")
    if runs_kernel(qkv):
        return _forward(qkv, cu_seqlens, longest)[0]
    packing = {name: value for name, value in _options(qkv, cu_seqlens, longest).items() if name != "scale"}
    return flash_attention(*qkv.unbind(1), **packing)
