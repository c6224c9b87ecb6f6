"""FlashAttention-2, forward and backward: attention whose memory is linear in the lengths.

    S = scale · Q Kᵀ    P = softmax(S)    O = P V
    L = log Σ exp S  (natural units, kept for backward)
    D = rowsum(∂O ∘ O)    ∂V = Pᵀ ∂O    ∂S = P ∘ (∂O Vᵀ − D)
    ∂Q = scale · ∂S K    ∂K = scale · ∂Sᵀ Q

Shapes: q (B, H, Q, D), k and v (B, G, K, D) with H a multiple of G; or (B, length, D); or, packed
with cumulative lengths, (total length, heads, D). The plain-PyTorch statement of the same algorithm
is tiled.py.

Ideal cost per head: 4·Q·K·D FLOPs forward and 10·Q·K·D backward (halved when causal), (2·Q + 2·K)·D
elements moved forward. Backward runs as two kernels, dK/dV and then dQ, and so executes 14·Q·K·D,
or on a Hopper GPU as one of 10·Q·K·D. Nothing is added in an order that varies: equal bits every
time.

Here is what a user calls: the checks, autograd and the operators that torch.compile sees.

Shape suffixes: B batch, H query heads, G key heads, S length, Q query length, K key length, D head
dimension.

Source: Dao 2023, "FlashAttention-2"; Dao et al. 2022, "FlashAttention"; Ainslie et al. 2023 for
grouped heads.
"""

import functools
import itertools
import math

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from labkit.accounting import attention_pairs
from labkit.kernels.flash_attention.plan import Plan, facts_of, plan_of
from labkit.kernels.flash_attention.tiled import tiled_attention_backward, tiled_attention_forward
from labkit.kernels.flash_attention.tiles import (
    IMPLS,
    MAX_HEAD_DIM,
    PRECISIONS,
    TILED_DTYPES,
    TRITON_DTYPES,
    listed,
    resolve_impl,
)
from labkit.kernels.fused import (
    autocast_dtype,
    first_order,
    is_watched,
    operator,
    refuse_forward_mode,
)
from labkit.kernels.launch import REMEMBERED

ALIKE = ("dtype", "device", "number of dimensions", "head dimension", "batch size")

# ---- checks --------------------------------------------------------------------------------------


def _check_kinds(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raises for what is no tensor with strides."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor; got {type(x).__name__}")
        if x.is_nested or x.layout != torch.strided:
            raise ValueError(
                f"{name} must be neither sparse nor nested; got a tensor of layout {x.layout}"
            )


def _check_tensors(q: Tensor, k: Tensor, v: Tensor, packed: bool) -> None:
    """Raises for q, k and v that do not fit together."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if packed and x.dim() != 3:
            raise ValueError(
                f"{name} must be (total, heads, d) with cu_seqlens; got shape {tuple(x.shape)}"
            )
        if x.dim() not in (3, 4):
            raise ValueError(
                f"{name} must be (batch, length, d) or (batch, heads, length, d); got shape "
                f"{tuple(x.shape)}"
            )
        if x.dtype not in TILED_DTYPES:
            raise ValueError(f"{name} must be of dtype {listed(TILED_DTYPES)}; got {x.dtype}")

    def alike(x: Tensor) -> tuple:
        batch_size = None if packed else x.shape[0]
        return x.dtype, x.device, x.dim(), x.shape[-1], batch_size

    for name, x in (("k", k), ("v", v)):
        for what, expected, got in zip(ALIKE, alike(q), alike(x), strict=True):
            if got != expected:
                raise ValueError(f"{name} must have the {what} of q, {expected}; got {got}")
    if v.shape != k.shape:
        raise ValueError(f"v must have the shape of k, {tuple(k.shape)}; got {tuple(v.shape)}")
    if not 1 <= q.shape[-1] <= MAX_HEAD_DIM:
        raise ValueError(f"the head dimension of q must be 1 to {MAX_HEAD_DIM}; got {q.shape[-1]}")
    for name, x in (("q", q), ("k", k)):
        if x.numel() == 0:
            raise ValueError(
                f"{name} must hold at least one batch, head and row; got shape {tuple(x.shape)}"
            )
    axis = 1 if packed else -3
    if (q.dim() == 4 or packed) and q.shape[axis] % k.shape[axis]:
        raise ValueError(
            f"the heads of k must divide those of q, {q.shape[axis]}; got {k.shape[axis]}"
        )


def _check_cu_seqlens(name: str, cu_seqlens, device: torch.device) -> None:
    """Raises for cumulative lengths of a wrong kind; their values are `check_lengths`'s, which has
    to read them.
    """
    if cu_seqlens is None:
        raise ValueError(
            f"{name} must be given too: a packed batch takes both cu_seqlens_q and cu_seqlens_k"
        )
    dtype = getattr(cu_seqlens, "dtype", type(cu_seqlens).__name__)
    if dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} must be an int32 or int64 tensor; got {dtype}")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
        shape = tuple(cu_seqlens.shape)
        raise ValueError(
            f"{name} must be of shape (batch + 1,) with a batch of at least one; got shape {shape}"
        )
    if cu_seqlens.device != device:
        raise ValueError(f"{name} must be on the device of q, {device}; got {cu_seqlens.device}")
    if not cu_seqlens.is_contiguous():
        raise ValueError(f"{name} must be contiguous; got stride {cu_seqlens.stride(0)}")


def check_packing(q: Tensor, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k) -> None:
    """Raises for arguments of a packed batch that do not fit together, or are given without one."""
    packed = cu_seqlens_q is not None or cu_seqlens_k is not None
    if packed:
        _check_cu_seqlens("cu_seqlens_q", cu_seqlens_q, q.device)
        _check_cu_seqlens("cu_seqlens_k", cu_seqlens_k, q.device)
        if cu_seqlens_q.shape != cu_seqlens_k.shape:
            shapes = f"{tuple(cu_seqlens_q.shape)}; got {tuple(cu_seqlens_k.shape)}"
            raise ValueError(f"cu_seqlens_k must have the shape of cu_seqlens_q, {shapes}")
    for name, max_seqlen in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        if max_seqlen is None:
            continue
        if not packed:
            raise ValueError(
                f"{name} must be None without cu_seqlens_q and cu_seqlens_k; got {max_seqlen!r}"
            )
        if isinstance(max_seqlen, bool) or not isinstance(max_seqlen, int):
            raise TypeError(f"{name} must be None or an int; got {type(max_seqlen).__name__}")


def _check_window(window, causal: bool) -> tuple[int, int]:
    """Returns (left, right), −1 without limit, of a window and the causal flag."""
    if not isinstance(causal, bool):
        raise TypeError(f"causal must be True or False; got {type(causal).__name__}")
    if window is None:
        return -1, 0 if causal else -1
    if isinstance(window, int) and not isinstance(window, bool):
        window = (window, window)
    accepted = isinstance(window, tuple | list) and len(window) == 2
    if not accepted or any(isinstance(w, bool) or not isinstance(w, int) or w < -1 for w in window):
        raise ValueError(
            f"window must be None, a number of keys to each side, or (left, right) with −1 for no "
            f"limit; got {window!r}"
        )
    left, right = window
    return left, (0 if right < 0 else min(right, 0)) if causal else right


def _check_scale(scale) -> None:
    if scale is None:
        return
    if isinstance(scale, bool) or not isinstance(scale, float | int):
        raise TypeError(
            f"scale must be None or a positive finite number; got {type(scale).__name__}"
        )
    if not 0 < scale < math.inf:
        raise ValueError(f"scale must be None or a positive finite number; got {scale}")


def _check_names(impl, precision) -> None:
    for name, value, accepted in (("impl", impl, IMPLS), ("precision", precision, PRECISIONS)):
        if value not in accepted:
            raise ValueError(f"{name} must be one of {listed(accepted)}; got {value!r}")


def check_lengths(
    q: Tensor, k: Tensor, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
) -> None:
    """Raises for cumulative lengths that cannot be, which it has to read: it waits for the device.

    On a CUDA device they are not read where both longest are given: whoever gives them answers for
    the lengths too.
    """
    if q.is_cuda:
        if max_seqlen_q is not None and max_seqlen_k is not None:
            return
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "max_seqlen_q and max_seqlen_k must be given where a CUDA graph is captured; got "
                "None"
            )
    sides = (("q", q.shape[0], max_seqlen_q), ("k", k.shape[0], max_seqlen_k))
    lengths = torch.stack((cu_seqlens_q, cu_seqlens_k)).tolist()
    for values, (side, total, max_seqlen) in zip(lengths, sides, strict=True):
        name = f"cu_seqlens_{side}"
        if values[0] != 0:
            raise ValueError(f"{name} must start at 0; got {values[0]}")
        longest = 0
        for begin, end in itertools.pairwise(values):
            if begin >= end:
                raise ValueError(f"{name} must be increasing; got {begin} and then {end}")
            longest = max(longest, end - begin)
        if values[-1] != total:
            raise ValueError(
                f"{name} must end at the number of rows of {side}, {total}; got {values[-1]}"
            )
        if max_seqlen is not None and max_seqlen < longest:
            raise ValueError(
                f"max_seqlen_{side} must be at least the longest sequence, {longest}; got "
                f"{max_seqlen}"
            )


# ---- the plan of a call --------------------------------------------------------------------------


def _empty_like_layout(x: Tensor) -> Tensor:
    """Returns room laid out as `Layout.dense` has it; x may be a tensor without an address."""
    if x.dim() == 4 and x.stride(1) < x.stride(2):
        return x.new_empty(x.transpose(1, 2).shape).transpose(1, 2)
    return x.new_empty(x.shape)


def _empty_outputs(q: Tensor, packed: bool) -> tuple[Tensor, Tensor]:
    """Returns room for the output and the log-sum-exp."""
    lse_shape = (q.shape[1], q.shape[0]) if packed else q.shape[:-1]
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return _empty_like_layout(q), q.new_empty(lse_shape, dtype=lse_dtype)


def _sequences(cu_seqlens_q, cu_seqlens_k, of_queries: tuple, of_keys: tuple, lse: Tensor):
    """Yields views of these tensors, those of queries first and the log-sum-exp last, of each
    sequence of a packed batch as (1, H, S, D), or as they are where none is packed.
    """
    if cu_seqlens_q is None:
        yield *of_queries, *of_keys, lse
        return
    pairs_q, pairs_k = (itertools.pairwise(x.tolist()) for x in (cu_seqlens_q, cu_seqlens_k))
    for (begin_q, end_q), (begin_k, end_k) in zip(pairs_q, pairs_k, strict=True):
        rows = [x[begin_q:end_q] for x in of_queries] + [x[begin_k:end_k] for x in of_keys]
        yield *(x.transpose(0, 1).unsqueeze(0) for x in rows), lse[:, begin_q:end_q].unsqueeze(0)


class TiledPlan:
    """The same in plain PyTorch: what `Plan` does, as impl "tiled"."""

    def __init__(self, scale: float, left: int, right: int):
        self.mask = {"scale": scale, "left": left, "right": right}

    def forward(self, q, k, v, cu_seqlens_q=None, cu_seqlens_k=None) -> tuple[Tensor, Tensor]:
        out, lse = _empty_outputs(q, cu_seqlens_q is not None)
        # What no sequence covers.
        out.zero_()
        lse.fill_(-math.inf)
        sequences = _sequences(cu_seqlens_q, cu_seqlens_k, (q, out), (k, v), lse)
        for q_s, out_s, k_s, v_s, lse_s in sequences:
            out_s[:], lse_s[:] = tiled_attention_forward(q_s, k_s, v_s, **self.mask)
        return out, lse

    def backward(
        self, grad_out, q, k, v, out, lse, cu_seqlens_q=None, cu_seqlens_k=None
    ) -> tuple[Tensor, Tensor, Tensor]:
        grads = tuple(_empty_like_layout(x).zero_() for x in (q, k, v))
        of_queries, of_keys = (grad_out, q, out, grads[0]), (k, v, *grads[1:])
        for sequence in _sequences(cu_seqlens_q, cu_seqlens_k, of_queries, of_keys, lse):
            grad_out_s, q_s, out_s, grad_q_s, k_s, v_s, grad_k_s, grad_v_s, lse_s = sequence
            arguments = (grad_out_s, q_s, k_s, v_s, out_s, lse_s)
            grad_q_s[:], grad_k_s[:], grad_v_s[:] = tiled_attention_backward(
                *arguments, **self.mask
            )
        return grads


_PLANS: dict[tuple, Plan | TiledPlan] = {}


def _checked_plan(inputs: tuple, options: tuple) -> Plan | TiledPlan:
    """Returns what attention of these tensors runs; raises for tensors that do not fit together.

    `inputs` are q, k, v and both cumulative lengths, `options` scale, left, right, precision and
    impl, as `_forward` takes them.
    Both are worked out at the first call of a kind. Later ones find the plan, for checks alone
    would take the host longer than a launch.
    """
    q, k, v, *cu_seqlens = inputs
    packed = cu_seqlens[0] is not None
    try:
        lengths = tuple(map(facts_of, cu_seqlens)) if packed else None
        key = (facts_of(q), facts_of(k), facts_of(v), lengths, options)
    except (AttributeError, RuntimeError):
        # Of what is no tensor, or of a sparse or nested one, which has no strides.
        _check_kinds(q, k, v)
        raise
    plan = _PLANS.get(key)
    if plan is None:
        scale, left, right, precision, impl = options
        _check_tensors(q, k, v, packed)
        _check_names(impl, precision)
        impl = resolve_impl(q, impl, left=left, right=right, packed=packed)
        if impl == "tiled":
            plan = TiledPlan(scale or 1 / math.sqrt(q.shape[-1]), left, right)
        else:
            plan = plan_of(*inputs, scale, left, right, precision, impl)
        if len(_PLANS) >= REMEMBERED:
            _PLANS.clear()
        _PLANS[key] = plan
    return plan


# ---- operators -----------------------------------------------------------------------------------


@operator("flash_attention", opaque=True)
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    scale: float | None,
    left: int,
    right: int,
    precision: str,
    impl: str,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
) -> tuple[Tensor, Tensor]:
    inputs = (q, k, v, cu_seqlens_q, cu_seqlens_k)
    plan = _checked_plan(inputs, (scale, left, right, precision, impl))
    if cu_seqlens_q is not None:
        check_lengths(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return plan.forward(*inputs)


@_forward.register_fake
def _(q, k, v, cu_seqlens_q, *_):
    return _empty_outputs(q, cu_seqlens_q is not None)


@operator("flash_attention_backward", opaque=True)
def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    scale: float | None,
    left: int,
    right: int,
    precision: str,
    impl: str,
    grad_out: Tensor,
    out: Tensor,
    lse: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    cu_seqlens = (cu_seqlens_q, cu_seqlens_k)
    plan = _checked_plan((q, k, v, *cu_seqlens), (scale, left, right, precision, impl))
    return plan.backward(grad_out, q, k, v, out, lse, *cu_seqlens)


@_backward.register_fake
def _(q, k, v, *_):
    return tuple(map(_empty_like_layout, (q, k, v)))


def _setup_context(ctx, inputs, output) -> None:
    ctx.options = inputs[5:10]
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*inputs[:5], *output)


def _gradients(ctx, grad_out: Tensor, _grad_lse: Tensor | None = None) -> tuple:
    *inputs, out, lse = ctx.saved_tensors
    # Hooks on saved tensors may have laid them out anew: it looks for their plan.
    is_shown = is_watched((grad_out, *inputs[:3]))
    run = _backward.op if is_shown else _backward.function
    return *run(*inputs, *ctx.options, grad_out, out, lse), *(None,) * 9


_forward.register_autograd(_gradients, setup_context=_setup_context)


def _flops(q, k, _v, cu_q, cu_k, _scale, left: int, right: int, *_, factor: int = 4, **__) -> int:
    """Returns `factor` FLOPs for each pair of a query and a key that a mask shows, and element of a
    head.

    Of a packed batch it reads the lengths.
    """
    num_heads = math.prod(q.shape[:-2])
    lengths = [(q.shape[-2], k.shape[-2])]
    if cu_q is not None:
        num_heads = q.shape[1]
        lengths = zip(cu_q.diff().tolist(), cu_k.diff().tolist(), strict=True)
    pairs = sum(attention_pairs(*of_sequence, left, right) for of_sequence in lengths)
    return int(factor * num_heads * pairs * q.shape[-1])


for target, factor in (("flash_attention", 4), ("flash_attention_backward", 10)):
    formula = functools.partial(_flops, factor=factor)
    register_flop_formula(getattr(torch.ops.labkit, target), get_raw=True)(formula)


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    window: int | tuple[int, int] | None = None,
    precision: str = "auto",
    impl: str = "auto",
) -> Tensor:
    """Returns softmax(scale · q kᵀ + mask) v without ever holding the scores.

    Args:
        q: (batch, heads, n_queries, d) or (batch, n_queries, d), or with cu_seqlens (total, heads,
            d); fp32, bf16, fp16, or fp64 (tiled only); any strides; d from 1 to 256.
        k, v: as q, with n_keys rows; their heads divide those of q, and query head h reads key head
            h // (heads / key heads).
        causal: query i sees keys up to i + (n_keys − n_queries), aligned to the bottom right.
        scale: positive, of the scores; None is 1/√d.
        cu_seqlens_q, cu_seqlens_k: cumulative lengths of the sequences of a packed batch, (batch +
            1,) int32 or int64: from 0, increasing, to the number of rows. Both or neither. Checking
            them waits for the device.
        max_seqlen_q, max_seqlen_k: at least the longest sequence. With both, lengths on a CUDA
            device are not read, as the capture of a CUDA graph wants it, and the caller answers for
            them. Nothing beyond the tensors is then touched, whatever they are, and rows behind the
            last sequence get zeros, and zero gradients.
        window: how many keys a query sees to each side of its own on the diagonal, or (left,
            right); −1 is no limit.
        precision: of products of fp32: "ieee" on the CUDA cores; "tf32x3", three products on the
            tensor cores for one, which hold 22 bits; "bf16x6", six of bf16 between three slices of
            each operand, which hold 24; "tf32", one of 11 bits, outside the error budget of fp32;
            "auto", "bf16x6" on Hopper where queries are many, else "tf32x3". Elsewhere than on
            Hopper "bf16x6" is "tf32x3". Past d 128 all but "tf32" are "ieee". For slices q, k, v
            and the gradient of the output are copied, half as large again. "triton" only.
        impl: "gluon" (Hopper), "triton" (CUDA), "tiled" (plain PyTorch, any device) or "auto"; see
            `resolve_impl`.

    Returns:
        The output, shaped as q and of its dtype (of the autocast dtype under autocast); zeros for a
        query that sees no key, which gets and gives zero gradients. Gradients are equal bit for bit
        between runs.

    Raises:
        ValueError, TypeError: arguments that do not fit, by name.

    Error budget: outputs 2×, gradients 3× those of eager attention in the same dtype, against fp64.

    Source: Dao 2023, "FlashAttention-2", algorithms 1 and 2.
    """
    is_shown = is_watched((q, k, v))
    if is_shown:
        _check_kinds(q, k, v)
    dtype = autocast_dtype(q)
    if dtype is not None:
        q, k, v = (x.to(dtype) if x.dtype in TRITON_DTYPES else x for x in (q, k, v))
    packed = cu_seqlens_q is not None or cu_seqlens_k is not None
    cu_seqlens, longest = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
    check_packing(q, *cu_seqlens, *longest)
    left, right = _check_window(window, causal)
    _check_scale(scale)
    refuse_forward_mode("flash_attention")
    options = (scale, left, right, precision, impl)
    # The meta device has no memory to launch on: its tensors are shown to the operator.
    if is_shown or q.is_meta:
        _check_tensors(q, k, v, packed)
        _check_names(impl, precision)
        return _forward.op(q, k, v, *cu_seqlens, *options, *longest)[0]
    inputs = (q, k, v, *cu_seqlens)
    plan = _checked_plan(inputs, options)
    if packed:
        check_lengths(q, k, *cu_seqlens, *longest)
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return _attend(plan, options, *inputs)
    return plan.forward(*inputs)[0]


class _EagerAttention(torch.autograd.Function):
    """A plan past PyTorch's dispatcher, which takes longer than a launch."""

    @staticmethod
    def forward(ctx, plan, options, *inputs) -> Tensor:
        out, lse = plan.forward(*inputs)
        ctx.options = options
        ctx.save_for_backward(*inputs, out, lse)
        return out

    @staticmethod
    @first_order("flash_attention")
    def backward(ctx, grad_out: Tensor):
        return None, None, *_gradients(ctx, grad_out)[:5]


# `apply` itself also looks for transforms, which are shown the operator, in as much time again.
_attend = super(torch.autograd.Function, _EagerAttention).apply


class FlashAttention(torch.autograd.Function):
    """Attention by the Triton kernels, `apply(q, k, v, is_causal=False)`, scale 1/√D.

    q is (batch, n_queries, d) or (batch, heads, n_queries, d), k and v likewise with n_keys, on a
    CUDA device. Saved for backward: q, k, v, the output, and one tensor of shape (batch[, heads],
    n_queries), the log-sum-exp in natural units. `flash_attention` is the same with every option,
    and what torch.compile takes.

    Error budget: outputs 2×, gradients 3× those of eager attention in the same dtype, against fp64.
    """

    @staticmethod
    def forward(
        ctx, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, impl: str = "triton"
    ) -> Tensor:
        inputs = (q, k, v, None, None)
        options = (None, -1, 0 if is_causal else -1, "auto", impl)
        return _EagerAttention.forward(ctx, _checked_plan(inputs, options), options, *inputs)

    @staticmethod
    def backward(ctx, grad_out: Tensor):
        return *_EagerAttention.backward(ctx, grad_out)[2:5], None


class TiledFlashAttention(FlashAttention):
    """The same in plain PyTorch, on any device."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
        return FlashAttention.forward(ctx, q, k, v, is_causal, "tiled")
