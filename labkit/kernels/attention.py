"""Every implementation of attention by its name: ours, PyTorch's and its rivals, behind one call.

    O = softmax(Q Kᵀ / √D + causal mask) V, causal aligned to the bottom right

| name | what runs |
|---|---|
| eager, compiled | `attention_reference`, as it reads or compiled: the scores are materialised |
| sdpa | F.scaled_dot_product_attention, its backend chosen by PyTorch; `what_runs` says which |
| sdpa_math, sdpa_flash, sdpa_cudnn, sdpa_efficient | that backend of it and no other |
| flex | FlexAttention compiled, its causal block mask made once per pair of lengths |
| fa3 | FlashAttention-3, from flash_attn_interface or out of an installed xformers |
| fa3_deterministic | the same, its gradients added in a fixed order, as ours are |
| tiled, triton, gluon, auto | `flash_attention`; `what_runs` says which one auto is |
| triton_ieee, triton_tf32 | as triton, fp32 products on the CUDA cores or as one of TF32 |

A rival is imported when it is first asked for. What cannot run raises; nothing stands in for it.

Shape suffixes: B batch, H heads, S length, D head dimension.
"""

import ctypes
import functools
import importlib.util
import math
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from labkit.kernels import flash_attention as labkit_flash
from labkit.kernels.fused import first_order
from labkit.kernels.reference import attention_reference

SDPA_BACKENDS = {
    "sdpa_math": SDPBackend.MATH,
    "sdpa_flash": SDPBackend.FLASH_ATTENTION,
    "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa_efficient": SDPBackend.EFFICIENT_ATTENTION,
}
OUR_OPTIONS: dict[str, dict] = {
    **{impl: {"impl": impl} for impl in ("tiled", "triton", "gluon", "auto")},
    "triton_ieee": {"impl": "triton", "precision": "ieee"},
    "triton_tf32": {"impl": "triton", "precision": "tf32"},
}
"""What `flash_attention` is told by each of our names."""

OURS = tuple(OUR_OPTIONS)
FA3 = ("fa3", "fa3_deterministic")
IMPLS = ("eager", "compiled", "sdpa", *SDPA_BACKENDS, "flex", *FA3, *OURS)

MAX_COMPILED_SHAPES = 256
"""Shapes that one process may compile a function for; PyTorch's own limit of eight stops a grid of
lengths.
"""


@functools.cache
def _compiled(function: Callable) -> Callable:
    """One graph per shape: with `fullgraph` a shape beyond the limit raises instead of running
    uncompiled.
    """
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, MAX_COMPILED_SHAPES)
    config.accumulated_recompile_limit = max(
        config.accumulated_recompile_limit, MAX_COMPILED_SHAPES
    )
    return torch.compile(function, dynamic=False, fullgraph=True)


def _sdpa(q_BHSD: Tensor, k_BHSD: Tensor, v_BHSD: Tensor, causal: bool) -> Tensor:
    if causal and q_BHSD.shape[-2] != k_BHSD.shape[-2]:
        raise ValueError(_top_left(q_BHSD, k_BHSD))
    return F.scaled_dot_product_attention(q_BHSD, k_BHSD, v_BHSD, is_causal=causal)


def _sdpa_on(
    backend: SDPBackend, q_BHSD: Tensor, k_BHSD: Tensor, v_BHSD: Tensor, causal: bool
) -> Tensor:
    with sdpa_kernel(backend):
        return _sdpa(q_BHSD, k_BHSD, v_BHSD, causal)


def _top_left(q: Tensor, k: Tensor) -> str:
    lengths = f"{q.shape[-2]} queries and {k.shape[-2]} keys"
    return (
        "scaled_dot_product_attention aligns its causal mask to the top left, "
        f"which differs for {lengths}"
    )


def _sdpa_unavailable(impl: str, q: Tensor, k: Tensor, causal: bool) -> str | None:
    if causal and q.shape[-2] != k.shape[-2]:
        return _top_left(q, k)
    if impl == "sdpa":
        return None
    with warnings.catch_warnings(record=True) as caught, sdpa_kernel(SDPA_BACKENDS[impl]):
        warnings.simplefilter("always")
        try:
            torch._fused_sdp_choice(q, k, k, None, 0.0, causal)
        except RuntimeError as error:
            # The reasons come as warnings. One is that the other backends are disabled, which we
            # did.
            texts = [
                re.sub(r"\s*\(Triggered internally.*", "", str(warning.message))
                for warning in caught
            ]
            reasons = [
                text
                for text in texts
                if "not used because" not in text and "runtime disabled" not in text
            ]
            return " ".join(reasons or [str(error).split("\n")[0]])
    return None


def _is_visible(_batch, _head, query: Tensor, key: Tensor) -> Tensor:
    return key <= query


@functools.lru_cache(maxsize=32)
def _causal_block_mask(num_queries: int, num_keys: int, device: torch.device):
    from torch.nn.attention.flex_attention import create_block_mask

    offset = num_keys - num_queries
    mask = _is_visible if offset == 0 else lambda _batch, _head, query, key: key <= query + offset
    # Whatever mode asks first: a mask that was made in inference mode would serve no training after
    # it.
    with torch.inference_mode(False):
        return create_block_mask(mask, None, None, num_queries, num_keys, device=device)


def _flex(q_BHSD: Tensor, k_BHSD: Tensor, v_BHSD: Tensor, causal: bool) -> Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    mask = _causal_block_mask(q_BHSD.shape[-2], k_BHSD.shape[-2], q_BHSD.device) if causal else None
    return _compiled(flex_attention)(q_BHSD, k_BHSD, v_BHSD, block_mask=mask)


@functools.cache
def load_fa3() -> Callable[..., Tensor] | str:
    """Loads FlashAttention-3; returns its function, or why it cannot run.

    It takes q, k, v (B, S, H, D), causal, deterministic and {}; of packed sequences (T, H, D) and
    cu_seqlens_q etc.
    """
    try:
        if importlib.util.find_spec("flash_attn_interface"):
            import flash_attn_interface

            return functools.partial(_fa3_official, flash_attn_interface)
        library = _xformers_library()
        if library is None:
            return (
                "not installed: neither flash_attn_interface nor xformers with flash_attn_3/_C.so"
            )
        _load_cuda_12_runtime()
        torch.ops.load_library(str(library))
    except (ImportError, OSError) as error:
        what = re.sub(
            r"\S*/", "", str(error.__cause__ or error).split("\n")[0]
        )  # its folders say nothing
        return f"installed, but does not load: {what}"
    return FlashAttention3Function.apply


def _xformers_library() -> Path | None:
    """Returns FlashAttention-3's library inside an installed xformers, found without importing
    xformers.
    """
    spec = importlib.util.find_spec("xformers")
    folders = spec.submodule_search_locations if spec else None
    paths = [Path(folder) / "flash_attn_3" / "_C.so" for folder in folders or ()]
    return next((path for path in paths if path.exists()), None)


def _load_cuda_12_runtime() -> None:
    """Loads libcudart.so.12, for which the library is built whatever CUDA torch is built for."""
    # By path: of the wheels that share the folder "nvidia", some make it a package that hides the
    # others.
    paths = [
        Path(folder) / "nvidia" / "cuda_runtime" / "lib" / "libcudart.so.12" for folder in sys.path
    ]
    path = next((path for path in paths if path.exists()), "libcudart.so.12")
    ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


def _fa3_official(
    module: ModuleType,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    deterministic: bool,
    packed: dict,
) -> Tensor:
    function = module.flash_attn_varlen_func if packed else module.flash_attn_func
    out = function(q, k, v, **packed, causal=causal, deterministic=deterministic)
    return (
        out[0] if isinstance(out, tuple) else out
    )  # releases differ in whether the log-sum-exp comes too


class FlashAttention3Function(torch.autograd.Function):
    """FlashAttention-3's operators as one differentiable function; see `load_fa3`."""

    @staticmethod
    def forward(
        ctx, q: Tensor, k: Tensor, v: Tensor, causal: bool, deterministic: bool, packed: dict
    ):
        q, k, v = (_with_dense_rows(x) for x in (q, k, v))
        out, lse, *_ = torch.ops.flash_attn_3.fwd(q, k, v, is_causal=causal, **packed)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.options = {"is_causal": causal, "deterministic": deterministic, **packed}
        return out

    @staticmethod
    @first_order("fa3")
    def backward(ctx, grad_out: Tensor):
        scale = 1 / math.sqrt(grad_out.shape[-1])
        grads = torch.ops.flash_attn_3.bwd(
            _with_dense_rows(grad_out), *ctx.saved_tensors, softmax_scale=scale, **ctx.options
        )
        return *grads[:3], None, None, None


def _with_dense_rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _run_fa3(impl: str, q_BHSD: Tensor, k_BHSD: Tensor, v_BHSD: Tensor, causal: bool) -> Tensor:
    function = load_fa3()
    if isinstance(function, str):
        raise ValueError(f"impl {impl!r} cannot run: {function}")
    tensors_BSHD = (x.transpose(1, 2) for x in (q_BHSD, k_BHSD, v_BHSD))
    return function(*tensors_BSHD, causal, impl == "fa3_deterministic", {}).transpose(1, 2)


def _fa3_unavailable(q: Tensor) -> str | None:
    if not q.is_cuda:
        return f"FlashAttention-3 needs a CUDA device; the tensors are on {q.device.type}"
    major, minor = torch.cuda.get_device_capability(q.device)
    if major != 9:
        return f"FlashAttention-3 needs compute capability 9.x; this device has {major}.{minor}"
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"FlashAttention-3 takes torch.bfloat16 and torch.float16; got {q.dtype}"
    if q.shape[-1] > 256 or q.shape[-1] % 8:
        return f"FlashAttention-3 takes head dimensions up to 256 that 8 divides; got {q.shape[-1]}"
    function = load_fa3()
    return f"FlashAttention-3 is {function}" if isinstance(function, str) else None


def _ours(impl: str, q_BHSD: Tensor, k_BHSD: Tensor, v_BHSD: Tensor, causal: bool) -> Tensor:
    return labkit_flash.flash_attention(q_BHSD, k_BHSD, v_BHSD, causal=causal, **OUR_OPTIONS[impl])


def _ours_unavailable(impl: str, q: Tensor, k: Tensor) -> str | None:
    if "precision" in OUR_OPTIONS[impl] and q.dtype != torch.float32:
        return f"{impl} is about products of torch.float32; got {q.dtype}"
    impl = OUR_OPTIONS[impl]["impl"]
    if q.shape[-1] > labkit_flash.MAX_HEAD_DIM:
        return (
            f"flash_attention takes head dimensions up to {labkit_flash.MAX_HEAD_DIM}; "
            f"got {q.shape[-1]}"
        )
    try:
        resolved = labkit_flash.resolve_impl(q, impl)
    except ValueError as error:
        return str(error)
    return (
        None
        if impl in ("auto", resolved)
        else f"flash_attention runs {resolved!r} in place of {impl!r} here"
    )


_RUN: dict[str, Callable[[Tensor, Tensor, Tensor, bool], Tensor]] = {
    "eager": lambda q, k, v, causal: attention_reference(q, k, v, causal=causal),
    "compiled": lambda q, k, v, causal: _compiled(attention_reference)(q, k, v, causal=causal),
    "sdpa": _sdpa,
    **{name: functools.partial(_sdpa_on, backend) for name, backend in SDPA_BACKENDS.items()},
    "flex": _flex,
    **{name: functools.partial(_run_fa3, name) for name in FA3},
    **{name: functools.partial(_ours, name) for name in OURS},
}


def _with_heads(impl: str, *tensors: Tensor) -> list[Tensor]:
    """Returns (B, S, D) as (B, 1, S, D), others as they are; raises ValueError for an unknown
    name.
    """
    if impl not in _RUN:
        raise ValueError(f"unknown attention {impl!r}; accepted: {', '.join(IMPLS)}")
    return [x.unsqueeze(1) if x.dim() == 3 else x for x in tensors]


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
    out = _RUN[impl](*tensors, causal)
    return out.squeeze(1) if q.dim() == 3 else out


def unavailable_reason(impl: str, q: Tensor, k: Tensor, *, causal: bool) -> str | None:
    """Returns why `impl` cannot run here for tensors like these (v like k), or None if it can.

    Args as in `attention`; nothing is computed, so values do not matter. Raises ValueError for an
    unknown name.
    """
    q, k = _with_heads(impl, q, k)
    if impl in ("sdpa", *SDPA_BACKENDS):
        return _sdpa_unavailable(impl, q, k, causal)
    if impl == "flex" and not q.is_cuda:
        return f"FlexAttention has no backward pass on {q.device.type}"
    if impl in FA3:
        return _fa3_unavailable(q)
    return _ours_unavailable(impl, q, k) if impl in OURS else None


def what_runs(impl: str, q: Tensor, k: Tensor, *, causal: bool) -> str:
    """Returns the name, one of IMPLS, of what `attention` runs: its own, except for "sdpa" and
    "auto", which choose.

    Args as in `unavailable_reason`, which must have returned None.
    """
    q, k = _with_heads(impl, q, k)
    if impl == "auto":
        return labkit_flash.resolve_impl(q, "auto")
    if impl == "sdpa":
        chosen = SDPBackend(torch._fused_sdp_choice(q, k, k, None, 0.0, causal))
        return next(name for name, backend in SDPA_BACKENDS.items() if backend == chosen)
    return impl
