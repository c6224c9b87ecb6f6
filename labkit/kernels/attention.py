"""Every implementation of attention by its name: ours, PyTorch's and its rivals, behind one call.

    O = softmax(Q Kᵀ / √D + causal mask) V, causal aligned to the bottom right

| name | what runs |
|---|---|
| eager, compiled | `attention_reference`, as it reads or compiled: the scores are materialised |
| sdpa | F.scaled_dot_product_attention, its backend chosen by PyTorch |
| sdpa_math, sdpa_flash, sdpa_cudnn, sdpa_efficient | that backend of it and no other |
| flex | FlexAttention compiled, its causal block mask made once per pair of lengths |
| fa3 | FlashAttention-3, out of an installed xformers |
| fa3_deterministic | the same, its gradients added in a fixed order, as ours are |
| tiled, triton, gluon, auto | `flash_attention`; `resolve_impl` says which one auto is |
| triton_compiled | forward as triton, backward by `attention_backward`, compiled |
| triton_ieee | as triton, fp32 products on the CUDA cores |

A rival is imported when it is first asked for. What cannot run raises; nothing stands in for it.

Shape suffixes: B batch, H heads, S length, D head dimension.
"""

import ctypes
import functools
import importlib.util
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from labkit.configs import check_known
from labkit.kernels import flash_attention as labkit_flash
from labkit.kernels.fused import first_order, with_dense_rows
from labkit.kernels.reference import attention_backward, attention_reference

SDPA_BACKENDS = {
    "sdpa_math": SDPBackend.MATH,
    "sdpa_flash": SDPBackend.FLASH_ATTENTION,
    "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa_efficient": SDPBackend.EFFICIENT_ATTENTION,
}
FA3 = ("fa3", "fa3_deterministic")
OURS = {
    **{name: {"impl": name} for name in ("tiled", "triton", "gluon", "auto")},
    "triton_compiled": {"impl": "triton"},
    "triton_ieee": {"impl": "triton", "precision": "ieee"},
}
"""What `flash_attention` is told by each of our names."""

IMPLS = ("eager", "compiled", "sdpa", *SDPA_BACKENDS, "flex", *FA3, *OURS)

MAX_COMPILED_SHAPES = 256
"""Shapes that one process may compile a function for; PyTorch's own limit of eight stops a grid of
lengths.
"""


def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, impl: str) -> Tensor:
    """Returns softmax(q kᵀ / √D) v, shaped as q, by the implementation called `impl`,
    differentiable.

    Args:
        q: (batch, heads, n_queries, D), or (batch, n_queries, D) of one head; `unavailable_reason`
            checks dtypes and D.
        k, v: as q, with n_keys rows.
        causal: query i sees keys up to i + (n_keys − n_queries).
        impl: one of IMPLS.

    Raises:
        ValueError: an unknown name; no FlashAttention-3; a causal mask that SDPA would align
            otherwise. RuntimeError: the SDPA backend asked for does not take these tensors; none
            other is tried.
    """
    tensors = _with_heads(impl, q, k, v)
    if impl == "triton_compiled":
        out = CompiledBackwardFunction.apply(*tensors, causal)
    elif impl in OURS:
        out = labkit_flash.flash_attention(*tensors, causal=causal, **OURS[impl])
    elif impl in FA3:
        out = _fa3(*tensors, causal, impl == "fa3_deterministic")
    elif impl == "flex":
        out = _flex(*tensors, causal)
    elif impl == "sdpa":
        out = _sdpa(*tensors, causal)
    elif impl in SDPA_BACKENDS:
        with sdpa_kernel(SDPA_BACKENDS[impl]):
            out = _sdpa(*tensors, causal)
    else:
        function = attention_reference if impl == "eager" else _compiled(attention_reference)
        out = function(*tensors, causal=causal)
    return out.squeeze(1) if q.dim() == 3 else out


def unavailable_reason(impl: str, q: Tensor, k: Tensor, *, causal: bool) -> str | None:
    """Returns why `impl` cannot run here for tensors like these (v like k), or None if it can.

    Args as in `attention`; nothing is computed, so values do not matter. SDPA is asked about equal
    lengths: of others `attention` refuses its causal mask. Raises ValueError for an unknown name.
    """
    q, k = _with_heads(impl, q, k)
    if impl in SDPA_BACKENDS:
        return _sdpa_reason(SDPA_BACKENDS[impl], q, k, causal)
    if impl in FA3:
        return _fa3_reason(q)
    if impl in OURS:
        if "precision" in OURS[impl] and q.dtype != torch.float32:
            return f"{impl} is about products of torch.float32; got {q.dtype}"
        try:
            labkit_flash.resolve_impl(q, OURS[impl]["impl"])
        except ValueError as error:
            return str(error)
    if impl == "flex" and not q.is_cuda:
        return f"FlexAttention has no backward pass on {q.device.type}"
    return None


def _with_heads(impl: str, *tensors: Tensor) -> list[Tensor]:
    """Returns (B, S, D) as (B, 1, S, D), others as they are; raises ValueError for an unknown
    name.
    """
    check_known("attention", impl, IMPLS)
    return [x.unsqueeze(1) if x.dim() == 3 else x for x in tensors]


# ---- ours ----------------------------------------------------------------------------------------


class CompiledBackwardFunction(torch.autograd.Function):
    """Forward by the Triton kernel, backward by the formula, compiled: it takes memory that grows
    as the square of the length. Takes q, k, v (B, H, S, D) and causal.
    """

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, causal: bool):
        plan = labkit_flash.plan_of(q, k, v, right=0 if causal else -1)
        out, lse = plan.forward(q, k, v)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.causal = causal
        return out

    @staticmethod
    @first_order("triton_compiled")
    def backward(ctx, grad_out: Tensor):
        backward = _compiled(attention_backward)
        return *backward(*ctx.saved_tensors, grad_out, ctx.causal), None


# ---- PyTorch's -----------------------------------------------------------------------------------


@functools.cache
def _compiled(function: Callable) -> Callable:
    """One graph per shape: with `fullgraph` a shape beyond the limit raises instead of running
    uncompiled.
    """
    torch._dynamo.config.recompile_limit = MAX_COMPILED_SHAPES
    torch._dynamo.config.accumulated_recompile_limit = MAX_COMPILED_SHAPES
    return torch.compile(function, dynamic=False, fullgraph=True)


def _sdpa(q_BHSD: Tensor, k_BHSD: Tensor, v_BHSD: Tensor, causal: bool) -> Tensor:
    num_queries, num_keys = q_BHSD.shape[-2], k_BHSD.shape[-2]
    if causal and num_queries != num_keys:
        raise ValueError(
            "scaled_dot_product_attention aligns its causal mask to the top left, which differs "
            f"for {num_queries} queries and {num_keys} keys"
        )
    return F.scaled_dot_product_attention(q_BHSD, k_BHSD, v_BHSD, is_causal=causal)


def _sdpa_reason(backend: SDPBackend, q: Tensor, k: Tensor, causal: bool) -> str | None:
    with warnings.catch_warnings(record=True) as caught, sdpa_kernel(backend):
        warnings.simplefilter("always")
        try:
            torch._fused_sdp_choice(q, k, k, None, 0.0, causal)
        except RuntimeError as error:
            # PyTorch's reasons are warnings, among them that the others are disabled, as they are.
            texts = [str(warning.message).split(" (Triggered internally")[0] for warning in caught]
            heads = ("not used because", "runtime disabled")
            reasons = [text for text in texts if not any(head in text for head in heads)]
            return " ".join(reasons or [str(error).split("\n")[0]])
    return None


@functools.lru_cache(maxsize=32)
def _causal_block_mask(num_queries: int, num_keys: int, device: torch.device):
    from torch.nn.attention.flex_attention import create_block_mask

    def is_visible(_batch, _head, query: Tensor, key: Tensor) -> Tensor:
        return key <= query + (num_keys - num_queries)

    # Whatever mode asks first: a mask that was made in inference mode would serve no training after
    # it.
    with torch.inference_mode(False):
        return create_block_mask(is_visible, None, None, num_queries, num_keys, device=device)


def _flex(q_BHSD: Tensor, k_BHSD: Tensor, v_BHSD: Tensor, causal: bool) -> Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    mask = _causal_block_mask(q_BHSD.shape[-2], k_BHSD.shape[-2], q_BHSD.device) if causal else None
    return _compiled(flex_attention)(q_BHSD, k_BHSD, v_BHSD, block_mask=mask)


# ---- FlashAttention-3 ----------------------------------------------------------------------------


@functools.cache
def fa3_missing() -> str | None:
    """Loads FlashAttention-3 out of an installed xformers, which is not imported; returns why that
    cannot be done, None if it could.
    """
    spec = importlib.util.find_spec("xformers")
    library = Path(spec.origin).parent / "flash_attn_3" / "_C.so" if spec else None
    if not library or not library.exists():
        return "FlashAttention-3 is not installed: no xformers with flash_attn_3/_C.so"
    # It is built for CUDA 12 whatever torch is built for. By path: of the wheels that share the
    # folder "nvidia", some make it a package that hides the others.
    runtimes = [Path(folder) / "nvidia/cuda_runtime/lib/libcudart.so.12" for folder in sys.path]
    runtime = next((path for path in runtimes if path.exists()), "libcudart.so.12")
    try:
        ctypes.CDLL(str(runtime), mode=ctypes.RTLD_GLOBAL)
        torch.ops.load_library(str(library))
    except OSError as error:
        # The first line, its paths without folders.
        reason = re.sub(r"\S*/", "", str(error.__cause__ or error).split("\n")[0])
        return f"FlashAttention-3 is installed, but does not load: {reason}"
    return None


class FlashAttention3Function(torch.autograd.Function):
    """FlashAttention-3's operators as one differentiable function, once `fa3_missing` is None.

    It takes q, k, v (B, S, H, D), causal, deterministic and {}; of packed sequences (T, H, D) and
    cu_seqlens_q etc.
    """

    @staticmethod
    def forward(
        ctx, q: Tensor, k: Tensor, v: Tensor, causal: bool, deterministic: bool, packed: dict
    ):
        q, k, v = (with_dense_rows(x) for x in (q, k, v))
        out, lse, *_ = torch.ops.flash_attn_3.fwd(q, k, v, is_causal=causal, **packed)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.options = {"is_causal": causal, "deterministic": deterministic, **packed}
        return out

    @staticmethod
    @first_order("fa3")
    def backward(ctx, grad_out: Tensor):
        scale = grad_out.shape[-1] ** -0.5
        grads = torch.ops.flash_attn_3.bwd(
            with_dense_rows(grad_out), *ctx.saved_tensors, softmax_scale=scale, **ctx.options
        )
        return *grads[:3], None, None, None


def _fa3(
    q_BHSD: Tensor, k_BHSD: Tensor, v_BHSD: Tensor, causal: bool, deterministic: bool
) -> Tensor:
    if reason := fa3_missing():
        raise ValueError(reason)
    tensors_BSHD = (x.transpose(1, 2) for x in (q_BHSD, k_BHSD, v_BHSD))
    return FlashAttention3Function.apply(*tensors_BSHD, causal, deterministic, {}).transpose(1, 2)


def _fa3_reason(q: Tensor) -> str | None:
    if not q.is_cuda:
        return f"FlashAttention-3 needs a CUDA device; the tensors are on {q.device.type}"
    major, minor = torch.cuda.get_device_capability(q.device)
    if major != 9:
        return f"FlashAttention-3 needs compute capability 9.x; this device has {major}.{minor}"
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"FlashAttention-3 takes torch.bfloat16 and torch.float16; got {q.dtype}"
    return fa3_missing()
