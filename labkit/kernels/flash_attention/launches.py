"""Launching the kernels: what each launch takes is worked out once per layout of the tensors and
remembered.
"""

import contextlib
import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from labkit.kernels.flash_attention.choice import (
    GLUON_BACKWARDS,
    AttentionConfig,
    TileConfig,
    backward_kernels,
    config_for,
    hopper_kernels,
    joint_tiles,
    listed,
    num_work_tiles_of,
    resolve_precision,
    work_tiles_of,
)
from labkit.kernels.flash_attention.shapes import (
    Layout,
    Packing,
    Problem,
    alignment_of,
    layout_of,
    problem_of,
    with_heads,
)
from labkit.kernels.flash_attention.splits import (
    empty_lse,
    empty_parts,
    gradients_launch,
    output_launch,
    row_elements,
)
from labkit.kernels.flash_attention.triton import (
    BF16_SLICES,
    DELTA_BLOCK_Q,
    IS_INTERPRETED,
    LOG2_E,
    STATISTICS_PADDING,
    attention_slices_kernel,
    flash_attention_bwd_delta_kernel,
    flash_attention_bwd_dkdv_kernel,
    flash_attention_bwd_dq_kernel,
    flash_attention_bwd_kernel,
    flash_attention_fwd_kernel,
    slice_elements,
    split_head_dim,
)
from labkit.kernels.launch import REMEMBERED, Launch

SLICES_BLOCK = 16


class Call(NamedTuple):
    """What a launch depends on beside the layouts of its tensors; `config` and `num_splits` are
    None for the best.
    """

    device: torch.device
    packing: Packing | None
    scale: float
    left: int
    right: int
    precision: str
    impl: str
    config: AttentionConfig | None
    num_splits: int | None


def _empty(layout: Layout, like: Tensor) -> Tensor:
    """Returns room for the dense layout of a tensor, on its device; the tensor's own strides cost
    least.
    """
    if like.stride() == layout.strides:
        return torch.empty_like(like)
    return torch.empty_strided(layout.shape, layout.strides, dtype=layout.dtype, device=like.device)


def empty_like_layout(x: Tensor) -> Tensor:
    """Returns room for `Layout.dense`; x may be a tensor without an address."""
    return _empty(Layout(x.shape, x.stride(), x.dtype, True).dense(), x)


def empty_outputs(q: Tensor, packed: bool) -> tuple[Tensor, Tensor]:
    """Returns room for the output and the log-sum-exp."""
    lse_shape = (q.shape[1], q.shape[0]) if packed else q.shape[:-1]
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return empty_like_layout(q), torch.empty(lse_shape, dtype=lse_dtype, device=q.device)


def _dense(x: Tensor) -> Tensor:
    """Returns a dense copy, which starts on a boundary; `contiguous` would return a dense tensor
    that does not.
    """
    return x.clone(memory_format=torch.contiguous_format)


def _kernel_flags(
    layouts: tuple[Layout, ...], problem: Problem, tile: TileConfig, precision: str, num_splits: int
) -> dict:
    alignment = alignment_of(*layouts)
    block_d, tail_d = split_head_dim(problem.head_dim, aligned=alignment > 1)
    block, columns = max(tile.block_q, tile.block_k), 2 * problem.head_dim
    return {
        "HEAD_DIM": problem.head_dim,
        "BLOCK_D": block_d,
        "TAIL_D": tail_d,
        "BLOCK_Q": tile.block_q,
        "BLOCK_K": tile.block_k,
        "HAS_LEFT": problem.left >= 0,
        "HAS_RIGHT": problem.right >= 0,
        "IS_PACKED": problem.packed,
        "SPLIT_K": num_splits > 1,
        "PRECISION": precision,
        "ALIGNMENT": alignment,
        # A tile that spans 2³¹ elements: offsets inside it need int64.
        "WIDE": any(
            block * abs(x.strides[-2]) + columns * abs(x.strides[-1]) >= 2**31 for x in layouts
        ),
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }


def _query_loop_flags(problem: Problem, tile: TileConfig, num_splits: int) -> dict[str, bool]:
    """Flags of the kernel that loops over queries, whose statistics are padded: two loops, or one
    of a split.
    """
    even = not problem.packed and problem.max_queries % tile.block_q == 0
    return {"EVEN_Q": even, "UNMASKED_LOOP": tile.unmasked_loop and num_splits == 1}


def _key_loop_flags(problem: Problem, tile: TileConfig, num_splits: int) -> dict[str, bool]:
    """Flags of the kernels that loop over keys: two loops where the mask has an edge, one where it
    has none.

    A split has one loop: with the bounds of two, cut down to it, ptxas serialises the products of
    both (C7515).
    """
    even = not problem.packed and problem.max_keys % tile.block_k == 0
    has_edge = problem.left >= 0 or problem.right >= 0
    unmasked_loop = tile.unmasked_loop and (has_edge or even) and num_splits == 1
    return {"EVEN_K": even, "UNMASKED_LOOP": unmasked_loop}


def _ready_for_tma(*layouts: Layout) -> tuple[tuple[bool, ...], list[Layout]]:
    """Returns which tensors TMA cannot read until they are copied, and the layouts in which it
    reads all, 4D.

    Rows must start on 16-byte boundaries, at positive distances.
    """
    copied = tuple(
        alignment_of(x) == 1
        or any(size > 1 and stride <= 0 for size, stride in zip(x.shape, x.strides, strict=True))
        for x in layouts
    )
    ready = (x.contiguous() if copy else x for copy, x in zip(copied, layouts, strict=True))
    return copied, [x.as_4d(packed=False) for x in ready]


def _on_copies(copies: tuple[bool, ...], launch: Callable[..., None]) -> Callable[..., None]:
    """Returns what launches a Hopper kernel, with those of its inputs copied that TMA cannot
    read.
    """

    def run(inputs, results, _) -> None:
        if any(copies):
            inputs = [_dense(x) if copy else x for copy, x in zip(copies, inputs, strict=True)]
        launch(*inputs, *results)

    return run


def _on_device_of(q: Tensor):
    """Triton launches on the current device, which need not be that of the tensors."""
    if q.is_cuda and q.device.index != torch.cuda.current_device():
        return torch.cuda.device(q.device)
    return contextlib.nullcontext()


def _strides(*layouts: Layout) -> tuple[int, ...]:
    return tuple(stride for x in layouts for stride in x.strides)


def _result(whole: Layout, num_splits: int) -> Layout:
    """What a kernel writes to: a result, or the parts that all splits make of it (`empty_parts`),
    one batch of them.
    """
    if num_splits == 1:
        return whole
    batch, heads, length, head_dim = whole.shape
    row = row_elements(head_dim)
    strides = (heads * length * row, length * row, row, 1)
    return Layout((num_splits * batch, heads, length, head_dim), strides, torch.float32, True)


class _Slices(NamedTuple):
    """The launch that cuts fp32 tensors into slices of bf16, and the layouts that the kernels find
    them in.
    """

    launch: Launch
    layouts: tuple[Layout, ...]
    sizes: tuple[int, ...]

    def __call__(self, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        """Returns the slices of q, k, v and grad_out, None for None, as vectors: the kernels go by
        the layouts.
        """
        room = torch.empty(
            sum(self.sizes), dtype=self.layouts[0].dtype, device=tensors[0].device
        ).split(self.sizes)
        slices = (*room, None)[:4]
        self.launch(*tensors, *slices)
        return slices


def _slices(tensors: tuple[Layout, ...], precision: str, packed: bool) -> _Slices | None:
    """Returns how q, k, v and, where there are four, grad_out are cut, None where they are not.

    Interpreted kernels keep the slices in fp32, of which they can multiply.
    """
    if precision not in BF16_SLICES:
        return None
    dtype = torch.float32 if IS_INTERPRETED else torch.bfloat16
    whole = tuple(x.as_4d(packed) for x in tensors)
    (_, num_heads, num_queries, head_dim), (_, num_key_heads, num_keys, _) = (
        whole[0].shape,
        whole[1].shape,
    )
    num_slices = BF16_SLICES[precision]
    row = num_slices * slice_elements(head_dim)
    layouts = []
    for x in whole:
        _, heads, length, _ = x.shape
        layouts.append(
            Layout(
                x.shape, (0 if packed else heads * length * row, length * row, row, 1), dtype, True
            )
        )
    rows = [math.prod(x.shape[:3]) for x in whole]
    # Without grad_out, whose place is the last, the strides there are anything.
    strides = _strides(*(*whole, whole[0])[:4])
    numbers = (*strides, num_heads, num_key_heads, num_queries, num_keys, *rows[:2])
    flags = {"HEAD_DIM": head_dim, "PADDED_D": triton.next_power_of_2(head_dim)}
    flags |= {"BLOCK": SLICES_BLOCK, "SLICES": num_slices}
    grid = (triton.cdiv(max(rows), SLICES_BLOCK), len(tensors))
    launch = Launch(attention_slices_kernel, grid, flags, numbers)
    return _Slices(launch, tuple(layouts), tuple(n * row for n in rows))


def _plan_forward(
    q: Layout, k: Layout, v: Layout, call: Call
) -> tuple[Layout, tuple[int, ...], Callable[..., None]]:
    """Returns the layout of the output, the shape of the log-sum-exp, and what writes both:

    `run((q, k, v), (out, lse), cu_seqlens)`.
    """
    packed, precision = call.packing is not None, call.precision
    out = q.dense()
    if call.impl == "gluon":
        copies, loaded = _ready_for_tma(q, k, v)
        plan = hopper_kernels("forward").plan_forward
        launch = plan(
            *loaded, out.as_4d(packed), call.device.index, scale=call.scale, causal=call.right == 0
        )
        return out, q.shape[:-1], _on_copies(copies, launch)
    problem = problem_of(q, k, call.left, call.right, call.packing)
    slices = _slices((q, k, v), precision, packed)
    loaded = slices.layouts if slices else tuple(x.as_4d(packed) for x in (q, k, v))
    layouts = (*loaded, out.as_4d(packed))
    tile = (call.config or config_for(layouts, problem, precision, call.device)).forward
    given = (tile, "forward", call.device, q.dtype, precision, call.num_splits)
    num_work_tiles, num_splits = work_tiles_of(problem, *given)
    operands = (*layouts[:3], _result(layouts[3], num_splits))
    *_, num_rows, _ = layouts[0].shape
    numbers = (
        *_strides(*operands),
        *((0, num_rows) if packed else (problem.num_heads * num_rows, num_rows)),
        problem.num_heads,
        problem.num_heads // problem.num_key_heads,
        problem.max_queries,
        problem.max_keys,
        problem.num_batches,
        call.scale * LOG2_E,
        problem.left,
        problem.right,
        num_splits,
    )
    flags = _kernel_flags(operands, problem, tile, precision, num_splits) | _key_loop_flags(
        problem, tile, num_splits
    )
    launch = Launch(flash_attention_fwd_kernel, (num_work_tiles * num_splits,), flags, numbers)
    combine = output_launch(layouts[3].shape, layouts[3].strides, num_splits)
    lse_shape = (problem.num_heads, num_rows) if packed else q.shape[:-1]

    def run(inputs, results, cu_seqlens) -> None:
        inputs = slices(*inputs, None)[:3] if slices else inputs
        if combine is None:
            launch(*inputs, *results, *cu_seqlens)
        else:
            whole = with_heads(results[0])
            parts = (empty_parts(num_splits, whole), empty_lse(num_splits, whole))
            launch(*inputs, *parts, None, None)
            combine(*parts, *results)

    return out, lse_shape, run


def _statistics_shape(problem: Problem) -> tuple[int, int, int]:
    """Sets, heads and padded rows of the row statistics of a backward; those of packed sequences
    are one set.
    """
    num_sets = 1 if problem.packed else problem.num_batches
    return (
        num_sets,
        problem.num_heads,
        problem.num_tiles(STATISTICS_PADDING) // num_sets * STATISTICS_PADDING,
    )


def _delta_launch(
    out: Layout,
    grad_out: Layout,
    lse: Layout,
    problem: Problem,
    statistics_strides: tuple[int, int],
) -> Launch:
    packed = problem.packed
    numbers = (
        *_strides(out.as_4d(packed), grad_out.as_4d(packed)),
        *((0, lse.strides[0]) if packed else (*lse.strides[:-1], 0)[:2]),
        *statistics_strides,
        problem.num_heads,
        problem.max_queries,
        problem.num_batches,
    )
    flags = {
        "HEAD_DIM": problem.head_dim,
        "PADDED_D": triton.next_power_of_2(problem.head_dim),
        "BLOCK_Q": DELTA_BLOCK_Q,
        "IS_PACKED": packed,
        "PADDING": STATISTICS_PADDING,
    }
    num_tiles = problem.num_tiles(STATISTICS_PADDING) * (STATISTICS_PADDING // DELTA_BLOCK_Q)
    grid = (num_tiles * problem.num_heads,)
    return Launch(flash_attention_bwd_delta_kernel, grid, flags, numbers)


class _GradientLaunch(NamedTuple):
    """The launch of a backward kernel, whose results are gradients or, of several splits, their
    parts.
    """

    launch: Launch
    num_splits: int

    def __call__(self, inputs: tuple, grads: tuple, cu_seqlens: tuple) -> tuple[Tensor | None, ...]:
        """Returns the parts, None of whole gradients."""
        if self.num_splits == 1:
            self.launch(*inputs, *grads, *cu_seqlens)
            return (None,) * len(grads)
        parts = tuple(empty_parts(self.num_splits, with_heads(x)) for x in grads)
        self.launch(*inputs, *parts, *cu_seqlens)
        return parts


class _Gradients(NamedTuple):
    """What all launches of the gradients by the Triton kernels take; the layouts are 4D."""

    inputs: tuple[Layout, ...]
    grads: tuple[Layout, ...]
    problem: Problem
    statistics_strides: tuple[int, int]
    call: Call

    def numbers(self, *own: int) -> tuple[int | float, ...]:
        """Returns what follows the strides: a kernel's own numbers, then those of all."""
        problem, scale = self.problem, self.call.scale
        group = problem.num_heads // problem.num_key_heads
        lengths = (problem.max_queries, problem.max_keys, problem.num_batches)
        return (
            *self.statistics_strides,
            *own,
            group,
            *lengths,
            scale * LOG2_E,
            scale,
            problem.left,
            problem.right,
        )


def _gradient_launch(given: _Gradients, kernel: str, tile: TileConfig) -> _GradientLaunch:
    """Returns the launch of "dkdv" or "dq"."""
    (inputs, grads, problem, _, call), is_dkdv = given, kernel == "dkdv"
    grads = grads[1:] if is_dkdv else grads[:1]
    dtype, precision = grads[0].dtype, call.precision
    num_work_tiles, num_splits = work_tiles_of(
        problem, tile, kernel, call.device, dtype, precision, call.num_splits
    )
    operands = (*inputs, *(_result(x, num_splits) for x in grads))
    num_heads = problem.num_key_heads if is_dkdv else problem.num_heads
    numbers = (*_strides(*operands), *given.numbers(num_heads), num_splits)
    flags = {
        **_kernel_flags(operands, problem, tile, precision, num_splits),
        **(_query_loop_flags if is_dkdv else _key_loop_flags)(problem, tile, num_splits),
        "PADDING": STATISTICS_PADDING,
        "first_program": None,
    }
    function = flash_attention_bwd_dkdv_kernel if is_dkdv else flash_attention_bwd_dq_kernel
    return _GradientLaunch(
        Launch(function, (num_work_tiles * num_splits,), flags, numbers), num_splits
    )


def _joint_launch(given: _Gradients) -> Launch | None:
    """Returns one launch of "dkdv" and "dq", None where `joint_tiles` has none; it writes the
    gradients of q last.
    """
    inputs, grads, problem, _, call = given
    operands, precision = (*inputs, *grads[1:], grads[0]), call.precision
    tiles = joint_tiles(operands, problem, precision, call.device)
    if tiles is None:
        return None
    dkdv, dq = tiles
    num_dkdv, num_dq = (
        num_work_tiles_of(problem, dkdv, "dkdv"),
        num_work_tiles_of(problem, dq, "dq"),
    )
    numbers = (
        *_strides(*operands),
        *given.numbers(num_dkdv, problem.num_heads, problem.num_key_heads),
    )
    of_dkdv = _kernel_flags(operands, problem, dkdv, precision, 1) | _query_loop_flags(
        problem, dkdv, 1
    )
    of_dq = _kernel_flags(operands, problem, dq, precision, 1) | _key_loop_flags(problem, dq, 1)
    own = ("BLOCK_Q", "BLOCK_K", "UNMASKED_LOOP")
    flags = {
        **{
            name: flag
            for name, flag in (of_dkdv | of_dq).items()
            if name not in (*own, "IS_PACKED", "SPLIT_K")
        },
        **{f"DKDV_{name}": of_dkdv[name] for name in own},
        **{f"DQ_{name}": of_dq[name] for name in own},
        "WIDE": of_dkdv["WIDE"] or of_dq["WIDE"],
        "PADDING": STATISTICS_PADDING,
    }
    return Launch(flash_attention_bwd_kernel, (num_dkdv + num_dq,), flags, numbers)


class _BackwardPlan(NamedTuple):
    """The room for gradients and row statistics, what writes the statistics, and then the
    gradients.

    That is `run((q, k, v, grad_out), (lse_log2, delta, *grads), cu_seqlens)`.
    """

    copies_grad_out: bool
    grads: tuple[Layout, ...]
    statistics: tuple[int, ...]
    delta: Launch
    run: Callable[..., None]


def _gradients(given: _Gradients, slices: _Slices | None) -> Callable[..., None]:
    """Returns what launches the Triton kernels of the gradients."""
    inputs, grads, problem, _, call = given
    config = call.config or config_for((*inputs, *grads), problem, call.precision, call.device)
    joint = None if call.config or call.num_splits else _joint_launch(given)
    dkdv, dq = (
        _gradient_launch(given, "dkdv", config.dkdv),
        _gradient_launch(given, "dq", config.dq),
    )
    whole = (tuple(x.shape for x in grads), tuple(x.strides for x in grads))
    combine = gradients_launch(*whole, (dq.num_splits, dkdv.num_splits))

    def run(inputs, results, cu_seqlens) -> None:
        inputs, grads = (*(slices(*inputs) if slices else inputs), *results[:2]), results[2:]
        if joint is not None:
            joint(*inputs, *grads[1:], grads[0])
            return
        parts_kv = dkdv(inputs, grads[1:], cu_seqlens)
        parts_q = dq(inputs, grads[:1], cu_seqlens)
        if combine is not None:
            combine(*parts_q, *parts_kv, *grads)

    return run


def _plan_backward(
    q: Layout,
    k: Layout,
    v: Layout,
    grad_out: Layout,
    out: Layout,
    lse: Layout,
    grads: tuple[Layout, ...] | None,
    kernels: str | None,
    call: Call,
) -> _BackwardPlan:
    if kernels is not None and kernels not in GLUON_BACKWARDS:
        raise ValueError(
            f"kernels must be None or one of {listed(map(repr, GLUON_BACKWARDS))}; got {kernels!r}"
        )
    packed, precision = call.packing is not None, call.precision
    problem = problem_of(q, k, call.left, call.right, call.packing)
    grads = grads or tuple(x.dense() for x in (q, k, v))
    grads_4d = tuple(x.as_4d(packed) for x in grads)
    num_sets, num_heads, num_rows = _statistics_shape(problem)
    # The statistics of a packed batch are one set.
    statistics_strides = (0 if packed else num_heads * num_rows, num_rows)
    copies_grad_out = (
        precision not in BF16_SLICES and alignment_of(grad_out) == 1 and alignment_of(q, k, v) > 1
    )
    causal = call.right == 0
    if call.impl == "gluon":
        kernels = kernels or backward_kernels(
            q.as_4d(packed).shape, k.as_4d(packed).shape, call.device.index, causal
        )
    if call.impl == "gluon" and kernels != "triton":
        copies, loaded = _ready_for_tma(q, k, v, grad_out)
        plan = hopper_kernels(kernels.replace(" ", "_")).plan_backward
        launch = plan(
            *loaded, grads_4d, num_rows, call.device.index, scale=call.scale, causal=causal
        )
        run = _on_copies(copies, launch)
    else:
        slices = _slices((q, k, v, grad_out), precision, packed)
        inputs = slices.layouts if slices else tuple(x.as_4d(packed) for x in (q, k, v, grad_out))
        run = _gradients(_Gradients(inputs, grads_4d, problem, statistics_strides, call), slices)
    delta = _delta_launch(out, grad_out, lse, problem, statistics_strides)
    return _BackwardPlan(copies_grad_out, grads, (2, num_sets, num_heads, num_rows), delta, run)


class Plan:
    """Attention of tensors of these layouts: what is launched forward and, for each layout of a
    gradient, backward.
    """

    def __init__(self, q: Layout, k: Layout, v: Layout, call: Call):
        self.layouts, self.call, self.forwards, self.backwards = (q, k, v), call, None, {}

    def of(self, q: Tensor, k: Tensor, v: Tensor) -> "Plan":
        """Returns this plan or, of tensors that came back from a hook with other layouts,
        theirs.
        """
        layouts = (layout_of(q), layout_of(k), layout_of(v))
        return self if layouts == self.layouts else _plan_of(*layouts, self.call)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Returns the output, shaped as q, and the log-sum-exp in fp32, natural units.

        The log-sum-exp is (batch[, heads], n_queries), or (heads, total) for a packed batch.
        """
        if q.is_neg() or k.is_neg() or v.is_neg():
            raise ValueError(
                "q, k and v must not be negated views, whose sign a kernel does not see; call "
                "resolve_neg"
            )
        self.forwards = self.forwards or _plan_forward(*self.layouts, self.call)
        layout, lse_shape, run = self.forwards
        out = _empty(layout, q)
        lse = torch.empty(lse_shape, dtype=torch.float32, device=q.device)
        with _on_device_of(q):
            run((q, k, v), (out, lse), (cu_seqlens_q, cu_seqlens_k))
        return out, lse

    def backward(
        self,
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
        *,
        kernels: str | None = None,
        grads: tuple[Tensor, Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the gradients of q, k and v, shaped as they are.

        `kernels` is one of GLUON_BACKWARDS in place of what `resolve_backward` finds for "gluon".
        `grads` is where the gradients are written to, in place of room of their own.
        """
        grad_out = grad_out.resolve_neg()
        room = None if grads is None else tuple(map(layout_of, grads))
        given = (layout_of(grad_out), layout_of(out), layout_of(lse), room, kernels)
        plan = self.backwards.get(given)
        if plan is None:
            plan = self.backwards[given] = _plan_backward(*self.layouts, *given, self.call)
        if plan.copies_grad_out:
            # o.sum().backward() passes strides of zero: one copy costs less than loads of single
            # elements.
            others = (q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k)
            return self.backward(_dense(grad_out), *others, kernels=kernels, grads=grads)
        grads = grads or tuple(
            _empty(layout, x) for layout, x in zip(plan.grads, (q, k, v), strict=True)
        )
        delta, lse_log2 = torch.empty(
            plan.statistics, dtype=torch.float32, device=q.device
        ).unbind()
        with _on_device_of(q):
            plan.delta(out, grad_out, lse, delta, lse_log2, cu_seqlens_q)
            plan.run((q, k, v, grad_out), (lse_log2, delta, *grads), (cu_seqlens_q, cu_seqlens_k))
        return grads


_plan_of = functools.lru_cache(maxsize=REMEMBERED)(Plan)


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
    num_splits: int | None = None,
) -> Plan:
    """Returns what attention of these tensors launches, whose arguments other than these are not
    checked.

    `scale` None is 1/√d. `left` and `right` are how many keys a query sees before and after its own
    on the diagonal, −1 without limit; `impl` is "triton" or "gluon"; `config` overrides the tiles
    of "triton", `num_splits` among how many programs it shares the keys of a tile or, of dK and dV,
    the queries.
    """
    packing = None if cu_seqlens_q is None else (layout_of(cu_seqlens_q), layout_of(cu_seqlens_k))
    precision = resolve_precision(q, precision, packed=packing is not None)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    call = Call(q.device, packing, scale, left, right, precision, impl, config, num_splits)
    return _plan_of(layout_of(q), layout_of(k), layout_of(v), call)
