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
from labkit.kernels.flash_attention.plan import Call, Layout, Plan, facts_of, layout_of, tiles_for
from labkit.kernels.flash_attention.tiled import tiled_attention_backward, tiled_attention_forward
from labkit.kernels.flash_attention.tiles import (
    MAX_HEAD_DIM,
    TILED_DTYPES,
    TRITON_DTYPES,
    AttentionConfig,
    resolve_impl,
    resolve_precision,
)
from labkit.kernels.fused import (
    autocast_dtype,
    check_kind,
    check_shape,
    first_order,
    is_watched,
    operator,
    refuse_forward_mode,
)
from labkit.kernels.launch import REMEMBERED

# ---- checks --------------------------------------------------------------------------------------


def _check_tensors(q: Tensor, k: Tensor, v: Tensor, packed: bool) -> None:
    """Raises for q, k and v that do not fit together."""
    form = "(batch, length, d) or (batch, heads, length, d)"
    accepted_dims, lengths, heads = (3, 4), -2, -3
    if packed:
        form = "(total, heads, d) with cu_seqlens"
        accepted_dims, lengths, heads = (3,), 0, 1
    for name, x in zip("qkv", (q, k, v), strict=True):
        check_kind(name, x, TILED_DTYPES if x is q else [q.dtype], like=q)
        if x.is_nested or x.layout != torch.strided:
            raise ValueError(f"{name} must be neither sparse nor nested, got layout {x.layout}")
        if x.dim() not in accepted_dims or x.numel() == 0:
            raise ValueError(f"{name} must be {form}, each at least 1; got shape {tuple(x.shape)}")
    if q.shape[-1] > MAX_HEAD_DIM:
        raise ValueError(f"the head dimension of q must be 1 to {MAX_HEAD_DIM}; got {q.shape[-1]}")
    expected = list(q.shape)
    expected[lengths] = k.shape[lengths]
    if packed or q.dim() == 4:
        expected[heads] = k.shape[heads]
        if q.shape[heads] % k.shape[heads]:
            raise ValueError(
                f"the heads of k must divide those of q, {q.shape[heads]}; got {k.shape[heads]}"
            )
    check_shape("k", k, *expected)
    check_shape("v", v, *k.shape)


def check_packing(q: Tensor, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k) -> None:
    """Raises for arguments of a packed batch that do not fit together, or are given without one;
    the values of cumulative lengths are `check_lengths`'s, which has to read them.
    """
    packed = cu_seqlens_q is not None or cu_seqlens_k is not None
    if packed:
        for name, x in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
            check_kind(name, x, (torch.int32, torch.int64), like=q)
            if x.dim() != 1 or x.shape[0] < 2 or not x.is_contiguous():
                raise ValueError(
                    f"{name} must be dense, of shape (batch + 1,) with a batch of at least one; "
                    f"got shape {tuple(x.shape)}, strides {x.stride()}"
                )
        check_shape("cu_seqlens_k", cu_seqlens_k, *cu_seqlens_q.shape)
    for name, max_seqlen in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        if max_seqlen is None:
            continue
        if not packed:
            raise ValueError(
                f"{name} must be None without cu_seqlens_q and cu_seqlens_k; got {max_seqlen!r}"
            )
        if not isinstance(max_seqlen, int):
            raise TypeError(f"{name} must be None or an int; got {type(max_seqlen).__name__}")


def _check_window(window, causal: bool) -> tuple[int, int]:
    """Returns (left, right), −1 without limit, of a window and the causal flag."""
    if not isinstance(causal, bool):
        raise TypeError(f"causal must be True or False; got {type(causal).__name__}")
    if window is None:
        return -1, 0 if causal else -1
    if type(window) is int:  # no bool, which is one too
        window = window, window
    is_pair = isinstance(window, tuple | list) and [type(w) for w in window] == [int, int]
    if not is_pair or min(window) < -1:
        raise ValueError(
            f"window must be None, a number of keys to each side, or (left, right) with −1 for no "
            f"limit; got {window!r}"
        )
    left, right = window
    return left, 0 if causal else right


def _check_scale(scale) -> None:
    if scale is None:
        return
    if isinstance(scale, bool) or not isinstance(scale, float | int):
        raise TypeError(
            f"scale must be None or a positive finite number; got {type(scale).__name__}"
        )
    if not 0 < scale < math.inf:
        raise ValueError(f"scale must be None or a positive finite number; got {scale}")


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
    layout = Layout(x.shape, x.stride(), x.dtype, x.device, True)
    return x.new_empty_strided(x.shape, layout.dense().strides)


class TiledPlan:
    """The same in plain PyTorch: what `Plan` does, as impl "tiled"."""

    def __init__(self, scale: float, left: int, right: int, packed: bool):
        self.mask = {"scale": scale, "left": left, "right": right}
        self.packed = packed

    def by_heads(self, *tensors: Tensor) -> list[Tensor]:
        """Returns packed tensors (total, H, D) as (H, total, D) and back, others as they are."""
        return [x.transpose(0, 1) if self.packed else x for x in tensors]

    def options(self, cu_seqlens: tuple[Tensor, ...]) -> dict:
        """Returns the mask and where each sequence of a packed batch begins and ends."""
        if not self.packed:
            return self.mask
        rows = [itertools.pairwise(x.tolist()) for x in cu_seqlens]
        return self.mask | {"sequences": list(zip(*rows, strict=True))}

    def forward(self, q, k, v, *cu_seqlens) -> tuple[Tensor, Tensor]:
        out, lse = tiled_attention_forward(*self.by_heads(q, k, v), **self.options(cu_seqlens))
        return _empty_like_layout(q).copy_(*self.by_heads(out)), lse

    def backward(self, grad_out, q, k, v, out, lse, *cu_seqlens) -> tuple[Tensor, Tensor, Tensor]:
        inputs = self.by_heads(grad_out, q, k, v, out)
        grads = tiled_attention_backward(*inputs, lse, **self.options(cu_seqlens))
        pairs = zip((q, k, v), self.by_heads(*grads), strict=True)
        return tuple(_empty_like_layout(x).copy_(grad) for x, grad in pairs)


_PLANS: dict[tuple, Plan | TiledPlan] = {}


def plan_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    scale: float | None = None,
    left: int = -1,
    right: int = -1,
    precision: str = "auto",
    impl: str = "triton",
    config: AttentionConfig | None = None,
) -> Plan | TiledPlan:
    """Returns what attention of these tensors runs; raises for tensors that do not fit together.

    It is worked out at the first call of a kind. Later ones find the plan, for checks alone would
    take the host longer than a launch.

    Args:
        scale: None is 1/√d.
        left, right: how many keys a query sees before and after its own on the diagonal, −1 without
            limit.
        config: in place of the shipped tiles of "triton".
    """
    packed = cu_seqlens_q is not None
    cu_seqlens = (cu_seqlens_q, cu_seqlens_k) if packed else ()
    try:
        lengths = tuple(map(facts_of, cu_seqlens))
        options = (scale, left, right, precision, impl, config)
        key = (facts_of(q), facts_of(k), facts_of(v), lengths, options)
    except (AttributeError, RuntimeError):
        # Of what is no tensor, or of a sparse or nested one, which has no strides.
        _check_tensors(q, k, v, packed)
        raise
    plan = _PLANS.get(key)
    if plan is None:
        _check_tensors(q, k, v, packed)
        impl = resolve_impl(q, impl, left=left, right=right, packed=packed)
        precision = resolve_precision(q, precision, packed=packed)
        scale = scale or 1 / math.sqrt(q.shape[-1])
        if impl == "tiled":
            plan = TiledPlan(scale, left, right, packed)
        else:
            layouts = map(layout_of, (q, k, v))
            lengths = tuple(map(layout_of, cu_seqlens))
            plan = Plan(Call(*layouts, lengths, scale, left, right, precision, impl, config))
        if len(_PLANS) >= REMEMBERED:
            _PLANS.clear()
        _PLANS[key] = plan
    return plan


def resolve_tiles(
    q: Tensor, k: Tensor, *, causal: bool, precision: str = "auto"
) -> AttentionConfig:
    """Returns the tiles that the Triton kernels run with: what a record should name.

    Args:
        q, k: (B, H, S, D) or (B, S, D), dense.
        precision: as `flash_attention` takes it.
    """
    call = plan_of(q, k, k, right=0 if causal else -1, precision=precision).call
    return tiles_for(call, call[:3])


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
    plan = plan_of(*inputs, scale, left, right, precision, impl)
    if cu_seqlens_q is not None:
        check_lengths(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return plan.forward(*inputs)


@_forward.register_fake
def _(q, k, v, cu_seqlens_q, *_):
    lse_shape = q.shape[:-1] if cu_seqlens_q is None else (q.shape[1], q.shape[0])
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return _empty_like_layout(q), q.new_empty(lse_shape, dtype=lse_dtype)


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
    plan = plan_of(q, k, v, *cu_seqlens, scale, left, right, precision, impl)
    return plan.backward(grad_out, q, k, v, out, lse, *cu_seqlens)


@_backward.register_fake
def _(q, k, v, *_):
    return tuple(map(_empty_like_layout, (q, k, v)))


def _setup_context(ctx, inputs, output) -> None:
    ctx.options = inputs[5:10]
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*inputs[:5], *output)


def _gradients(ctx, grad_out: Tensor, _grad_lse: Tensor | None = None) -> tuple:
    q, k, v, *cu_seqlens, out, lse = ctx.saved_tensors
    # Hooks on saved tensors may have laid them out anew: it looks for their plan.
    run = _backward.op if is_watched((grad_out, q, k, v)) else _backward.function
    inputs = (q, k, v, *(cu_seqlens or (None, None)))
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
            each operand, which hold 24; "auto", "bf16x6" on Hopper where queries are many, else
            "tf32x3". Elsewhere than on Hopper "bf16x6" is "tf32x3". Past d 128 all are "ieee". For
            slices q, k, v and the gradient of the output are copied, half as large again. "triton"
            only.
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
        for name, x in zip("qkv", (q, k, v), strict=True):
            check_kind(name, x, TILED_DTYPES, like=q)
    dtype = autocast_dtype(q)
    if dtype is not None:
        q, k, v = (x.to(dtype) if x.dtype in TRITON_DTYPES else x for x in (q, k, v))
    inputs = (q, k, v, cu_seqlens_q, cu_seqlens_k)
    longest = (max_seqlen_q, max_seqlen_k)
    check_packing(q, cu_seqlens_q, cu_seqlens_k, *longest)
    left, right = _check_window(window, causal)
    _check_scale(scale)
    refuse_forward_mode("flash_attention")
    options = (scale, left, right, precision, impl)
    packed = cu_seqlens_q is not None
    # The meta device has no memory to launch on: its tensors are shown to the operator.
    if is_shown or q.is_meta:
        _check_tensors(q, k, v, packed)
        return _forward.op(*inputs, *options, *longest)[0]
    plan = plan_of(*inputs, *options)
    if packed:
        check_lengths(q, k, cu_seqlens_q, cu_seqlens_k, *longest)
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
        # Of a view like conj().imag the sign is kept apart.
        q, k, v = (x.resolve_neg() for x in (q, k, v))
        inputs = (q, k, v, None, None)
        ctx.options = (None, -1, 0 if is_causal else -1, "auto", impl)
        out, lse = plan_of(*inputs, *ctx.options).forward(*inputs)
        # Tensors alone: the course's tests read the shape of each.
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, grad_out: Tensor):
        return *_EagerAttention.backward(ctx, grad_out)[2:5], None


class TiledFlashAttention(FlashAttention):
    """The same in plain PyTorch, on any device."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
        return FlashAttention.forward(ctx, q, k, v, is_causal, "tiled")
