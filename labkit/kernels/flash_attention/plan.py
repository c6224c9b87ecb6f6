"""What attention of a call launches: worked out once, remembered, and then only launched.

A `Call` is what a launch depends on, a `Plan` is what is launched for it forward and, by the layout
of the gradient, backward.

Shape suffixes: B batch, H query heads, S length, D head dimension.
"""

import contextlib
import functools
import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from labkit.kernels.flash_attention.choice import (
    backward_kernels,
    capability_of,
    hopper_kernels,
    resolve_precision,
)
from labkit.kernels.flash_attention.splits import (
    combine_launch,
    empty_splits,
    num_splits_of,
    row_elements,
)
from labkit.kernels.flash_attention.tiles import (
    INTERPRETER_TILES,
    AttentionConfig,
    TileConfig,
    select_tiles,
)
from labkit.kernels.flash_attention.triton import (
    DELTA_BLOCK_Q,
    IS_INTERPRETED,
    LOG2_E,
    NUM_SLICES,
    STATISTICS_PADDING,
    attention_slices_kernel,
    flash_attention_bwd_delta_kernel,
    flash_attention_bwd_dkdv_kernel,
    flash_attention_bwd_dq_kernel,
    flash_attention_fwd_kernel,
    slice_elements,
    split_head_dim,
)
from labkit.kernels.launch import REMEMBERED, Launch, num_multiprocessors

SLICES_BLOCK = 16  # rows that a program cuts into slices
# Tiles of a loop up to which the kernel that would combine splits takes the host longer to launch
# than the device gains.
WHOLE, WHOLE_PAST_64 = 8, 2
# Warps of the forward kernel that run at once on a multiprocessor, as far as splitting reckons:
# ((widest head dimension, warps), …) by bytes of an element. Registers bound them; these gave
# numbers of splits near the fastest on an H200.
WARPS_AT_ONCE = {2: ((64, 16), (256, 8)), 4: ((32, 24), (256, 8))}
SHARED_KIB = 227  # of a Hopper multiprocessor, which tiles of slices fill

KERNELS = {
    "forward": flash_attention_fwd_kernel,
    "dkdv": flash_attention_bwd_dkdv_kernel,
    "dq": flash_attention_bwd_dq_kernel,
}


class Layout(NamedTuple):
    """What a launch depends on of a tensor: all but its address, of which whether it is a multiple
    of 16 bytes.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    on_boundary: bool

    def as_4d(self, packed: bool) -> "Layout":
        """(B, S, D) as (B, 1, S, D), and a packed (total, H, D) as (1, H, total, D), its batch
        stride 0.

        The kernels find a packed sequence by its first row, whichever its number in the batch.
        """
        if len(self.shape) == 4:
            return self
        size_0, size_1, head_dim = self.shape
        stride_0, stride_1, stride_d = self.strides
        if packed:
            shape = (1, size_1, size_0, head_dim)
            return self._replace(shape=shape, strides=(0, stride_1, stride_0, stride_d))
        shape = (size_0, 1, size_1, head_dim)
        return self._replace(shape=shape, strides=(stride_0, 0, stride_1, stride_d))

    def dense(self) -> "Layout":
        """A dense tensor of the same shape, heads inside the rows where they are so here.

        A transposed (B, S, H, D) then gets an output that transposes back without a copy; a view
        into a fused QKV tensor gets one without the holes.
        """
        if len(self.shape) == 4 and self.strides[1] < self.strides[2]:
            _, heads, length, head_dim = self.shape
            strides = (length * heads * head_dim, head_dim, heads * head_dim, 1)
            return Layout(self.shape, strides, self.dtype, True)
        return self.contiguous()

    def contiguous(self) -> "Layout":
        """What `Tensor.contiguous` copies to."""
        strides = tuple(math.prod(self.shape[axis + 1 :]) for axis in range(len(self.shape)))
        return Layout(self.shape, strides, self.dtype, True)


def layout_of(x: Tensor) -> Layout:
    return Layout(x.shape, x.stride(), x.dtype, x.data_ptr() % 16 == 0)


def alignment_of(*layouts: Layout) -> int:
    """Elements in 16 bytes where every row of every tensor starts on such a boundary, else 1."""
    elements = 16 // layouts[0].dtype.itemsize
    for x in layouts:
        on_boundaries = x.on_boundary and not any(stride % elements for stride in x.strides[:-1])
        if x.strides[-1] != 1 or not on_boundaries:
            return 1
    return elements


class Call(NamedTuple):
    """What a launch depends on. `cu_seqlens` are the layouts of cumulative lengths, and none of
    their values; `config` is None for the shipped tiles.
    """

    q: Layout
    k: Layout
    v: Layout
    device: torch.device
    cu_seqlens: tuple[Layout, Layout] | None
    scale: float
    left: int
    right: int
    precision: str
    impl: str
    config: AttentionConfig | None

    @property
    def packed(self) -> bool:
        return self.cu_seqlens is not None

    @property
    def sizes(self) -> tuple[int, int, int, int, int, int]:
        """Batches, heads, key heads, queries, keys, head dimension.

        Of a packed batch the lengths are all rows of q and k, and a batch is a sequence or what
        lies behind the last.
        """
        num_batches, num_heads, num_queries, head_dim = self.q.as_4d(self.packed).shape
        _, num_key_heads, num_keys, _ = self.k.as_4d(self.packed).shape
        if self.packed:
            (num_batches,) = self.cu_seqlens[0].shape
        return num_batches, num_heads, num_key_heads, num_queries, num_keys, head_dim

    def num_tiles(self, block: int, of_keys: bool = False) -> int:
        """Returns how many tiles of `block` rows all sequences have; those of packed ones are as in
        `_sequence_of`.
        """
        num_batches, _, _, num_queries, num_keys, _ = self.sizes
        length = num_keys if of_keys else num_queries
        if self.packed:
            return length // block + num_batches
        return triton.cdiv(length, block) * num_batches


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


# ---- room ----------------------------------------------------------------------------------------


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


def _on_device_of(q: Tensor):
    """Triton launches on the current device, which need not be that of the tensors."""
    if q.is_cuda and q.device.index != torch.cuda.current_device():
        return torch.cuda.device(q.device)
    return contextlib.nullcontext()


# ---- the Triton kernels --------------------------------------------------------------------------


def tiles_for(call: Call, layouts: tuple[Layout, ...]) -> AttentionConfig:
    """Returns the tiles of a call's kernels for operands of these layouts."""
    if call.config is not None:
        return call.config
    if call.device.type != "cuda":
        return INTERPRETER_TILES
    # A window's tiles are masked on both sides, as causal ones are on one.
    return select_tiles(
        call.q.shape[-1],
        call.q.dtype,
        call.left >= 0 or call.right >= 0,
        capability_of(call.device.index),
        call.precision,
        alignment_of(*layouts) > 1,
        call.packed,
    )


def forward_splits(call: Call, tile: TileConfig) -> int:
    """Returns among how many programs the forward kernel splits the keys of a tile of queries."""
    _, num_heads, _, _, num_keys, head_dim = call.sizes
    num_tiles = triton.cdiv(num_keys, tile.block_k)
    whole = WHOLE if head_dim <= 64 else WHOLE_PAST_64
    if call.device.type != "cuda" or call.packed or call.left >= 0 or num_tiles <= whole:
        return 1
    itemsize = call.q.dtype.itemsize
    warps = next(warps for widest, warps in WARPS_AT_ONCE[itemsize] if head_dim <= widest)
    programs = max(1, warps // tile.num_warps)
    if call.precision == "bf16x6":
        num_rows = tile.block_q + tile.block_k * 2 * tile.num_stages
        shared_kib = num_rows * row_elements(head_dim) * 2 * NUM_SLICES / 1024
        programs = max(1, min(programs, int(SHARED_KIB // shared_kib)))
    return num_splits_of(
        call.num_tiles(tile.block_q) * num_heads,
        num_tiles,
        programs * num_multiprocessors(call.device.index),
        call.right >= 0,
        part_kib=tile.block_q * row_elements(head_dim) * 4 / 1024,
        itemsize=itemsize,
    )


def _strides(*layouts: Layout) -> tuple[int, ...]:
    return tuple(stride for x in layouts for stride in x.strides)


def _launch(
    kernel: str,
    call: Call,
    operands: tuple[Layout, ...],
    tile: TileConfig,
    statistics_strides: tuple[int, int],
    num_splits: int = 1,
) -> Launch:
    """Returns the launch of one of KERNELS on operands, 4D, in the order of its parameters."""
    num_batches, num_heads, num_key_heads, num_queries, num_keys, head_dim = call.sizes
    group = num_heads // num_key_heads
    alignment = alignment_of(*operands)
    block_d, tail_d = split_head_dim(head_dim, aligned=alignment > 1)
    block, columns = max(tile.block_q, tile.block_k), 2 * head_dim
    has_edge = call.left >= 0 or call.right >= 0
    flags = {
        "HEAD_DIM": head_dim,
        "BLOCK_D": block_d,
        "TAIL_D": tail_d,
        "BLOCK_Q": tile.block_q,
        "BLOCK_K": tile.block_k,
        "HAS_LEFT": call.left >= 0,
        "HAS_RIGHT": call.right >= 0,
        "IS_PACKED": call.packed,
        "PRECISION": call.precision,
        "ALIGNMENT": alignment,
        # A tile that spans 2³¹ elements: offsets inside it need int64.
        "WIDE": any(
            block * abs(x.strides[-2]) + columns * abs(x.strides[-1]) >= 2**31 for x in operands
        ),
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }
    own_numbers = (call.scale * LOG2_E, call.scale, call.left, call.right)
    if kernel == "dkdv":
        # The statistics of queries are padded: two loops always.
        even = not call.packed and num_queries % tile.block_q == 0
        flags |= {"EVEN_Q": even, "UNMASKED_LOOP": tile.unmasked_loop}
        num_heads = num_key_heads
        num_tiles = call.num_tiles(tile.block_k, of_keys=True)
    else:
        # Two loops where the mask has an edge, one where it has none, and of a split: with the
        # bounds of two, cut down to it, ptxas serialises the products of both (C7515).
        even = not call.packed and num_keys % tile.block_k == 0
        two_loops = tile.unmasked_loop and (has_edge or even) and num_splits == 1
        flags |= {"EVEN_K": even, "UNMASKED_LOOP": two_loops}
        num_tiles = call.num_tiles(tile.block_q)
    if kernel == "forward":
        flags["SPLIT_K"] = num_splits > 1
        own_numbers = (call.scale * LOG2_E, call.left, call.right, num_splits)
    else:
        flags["PADDING"] = STATISTICS_PADDING
    numbers = (
        *_strides(*operands),
        *statistics_strides,
        num_heads,
        group,
        num_queries,
        num_keys,
        num_batches,
        *own_numbers,
    )
    return Launch(KERNELS[kernel], (num_tiles * num_heads * num_splits,), flags, numbers)


def slices_of(call: Call, *grad_out: Layout) -> tuple[tuple[Layout, ...], Callable[..., tuple]]:
    """Returns the layouts of the bf16 slices of q, k, v and, where it is given, grad_out, and what
    cuts them: it returns vectors, for the kernels go by the layouts.

    Interpreted kernels keep the slices in fp32, of which they can multiply.
    """
    dtype = torch.float32 if IS_INTERPRETED else torch.bfloat16
    _, num_heads, num_key_heads, num_queries, num_keys, head_dim = call.sizes
    whole = [x.as_4d(call.packed) for x in (call.q, call.k, call.v, *grad_out)]
    row = NUM_SLICES * slice_elements(head_dim)
    layouts = []
    for x in whole:
        _, heads, length, _ = x.shape
        batch_stride = 0 if call.packed else heads * length * row
        layouts.append(Layout(x.shape, (batch_stride, length * row, row, 1), dtype, True))
    rows = [math.prod(x.shape[:3]) for x in whole]
    sizes = [num_rows * row for num_rows in rows]
    # Without grad_out, whose place is the last, the strides there are anything.
    strides = _strides(*whole) if grad_out else _strides(*whole, whole[0])
    numbers = (*strides, num_heads, num_key_heads, num_queries, num_keys, *rows[:2])
    padded = triton.next_power_of_2(head_dim)
    flags = {"HEAD_DIM": head_dim, "PADDED_D": padded, "BLOCK": SLICES_BLOCK}
    grid = (triton.cdiv(max(rows), SLICES_BLOCK), len(whole))
    launch = Launch(attention_slices_kernel, grid, flags, numbers)
    absent = () if grad_out else (None,)

    def cut(*tensors: Tensor) -> tuple[Tensor, ...]:
        slices = torch.empty(sum(sizes), dtype=dtype, device=tensors[0].device).split(sizes)
        launch(*tensors, *absent, *slices, *absent)
        return slices

    return tuple(layouts), cut


def _inputs(
    call: Call, *grad_out: Layout
) -> tuple[tuple[Layout, ...], Callable[..., tuple] | None]:
    """Returns the layouts in which the kernels read the inputs, 4D, and what first cuts them into
    slices, None where they are read as they are.
    """
    if call.precision == "bf16x6":
        return slices_of(call, *grad_out)
    return tuple(x.as_4d(call.packed) for x in (call.q, call.k, call.v, *grad_out)), None


def _triton_forward(call: Call, out: Layout) -> Callable[..., None]:
    """Returns what writes the output and the log-sum-exp: run((q, k, v), out, lse, cu_seqlens)."""
    layouts, cut = _inputs(call)
    tile = tiles_for(call, (*layouts, out)).forward
    num_splits = forward_splits(call, tile)
    _, num_heads, num_rows, head_dim = out.shape
    combine = None
    written = out
    if num_splits > 1:
        combine = combine_launch(out.shape, out.strides, num_splits)
        # The outputs of all splits, one batch of them after another.
        row = row_elements(head_dim)
        strides = (num_heads * num_rows * row, num_rows * row, row, 1)
        written = Layout(out.shape, strides, torch.float32, True)
    lse_strides = (0 if call.packed else num_heads * num_rows, num_rows)
    launch = _launch("forward", call, (*layouts, written), tile, lse_strides, num_splits)

    def run(inputs, out, lse, cu_seqlens) -> None:
        if cut is not None:
            inputs = cut(*inputs)
        if combine is None:
            launch(*inputs, out, lse, *cu_seqlens)
        else:
            parts = empty_splits(num_splits, lse, head_dim)
            launch(*inputs, *parts, *cu_seqlens)
            combine(*parts, out, lse)

    return run


def _triton_backward(
    call: Call, grad_out: Layout, grads: tuple[Layout, ...], statistics_strides: tuple[int, int]
) -> Callable[..., None]:
    """Returns what writes the gradients: run((q, k, v, grad_out), (lse_log2, delta), grads,
    cu_seqlens).
    """
    layouts, cut = _inputs(call, grad_out)
    config = tiles_for(call, (*layouts, *grads))
    grad_q, *grads_kv = grads
    dkdv = _launch("dkdv", call, (*layouts, *grads_kv), config.dkdv, statistics_strides)
    dq = _launch("dq", call, (*layouts, grad_q), config.dq, statistics_strides)

    def run(inputs, statistics, grads, cu_seqlens) -> None:
        if cut is not None:
            inputs = cut(*inputs)
        grad_q, grad_k, grad_v = grads
        dkdv(*inputs, *statistics, grad_k, grad_v, *cu_seqlens)
        dq(*inputs, *statistics, grad_q, *cu_seqlens)

    return run


def _delta_launch(
    call: Call, out: Layout, grad_out: Layout, lse: Layout, statistics_strides: tuple[int, int]
) -> Launch:
    num_batches, num_heads, _, num_queries, _, head_dim = call.sizes
    lse_strides = (0, lse.strides[0])
    if not call.packed:
        batch_stride, *head_stride, _ = lse.strides
        lse_strides = (batch_stride, *(head_stride or [0]))
    numbers = (
        *_strides(out.as_4d(call.packed), grad_out.as_4d(call.packed)),
        *lse_strides,
        *statistics_strides,
        num_heads,
        num_queries,
        num_batches,
    )
    flags = {
        "HEAD_DIM": head_dim,
        "PADDED_D": triton.next_power_of_2(head_dim),
        "BLOCK_Q": DELTA_BLOCK_Q,
        "IS_PACKED": call.packed,
        "PADDING": STATISTICS_PADDING,
    }
    num_tiles = call.num_tiles(STATISTICS_PADDING) * (STATISTICS_PADDING // DELTA_BLOCK_Q)
    return Launch(flash_attention_bwd_delta_kernel, (num_tiles * num_heads,), flags, numbers)


# ---- the plan ------------------------------------------------------------------------------------


def _on_tma(layouts: tuple[Layout, ...]) -> tuple[list[bool], list[Layout]]:
    """Returns which tensors TMA cannot read until they are copied, and the layouts in which it
    reads all, 4D.

    Rows must start on 16-byte boundaries, at positive distances.
    """
    copied = [
        alignment_of(x) == 1
        or any(size > 1 and stride <= 0 for size, stride in zip(x.shape, x.strides, strict=True))
        for x in layouts
    ]
    ready = (x.contiguous() if copy else x for copy, x in zip(copied, layouts, strict=True))
    return copied, [x.as_4d(packed=False) for x in ready]


def _gluon(kernels: str, call: Call, inputs: tuple[Layout, ...], *rest) -> Callable[..., None]:
    """Returns what launches kernels of a module of hopper/, with those of its inputs copied that
    TMA cannot read: run(inputs, …, cu_seqlens).
    """
    copies, loaded = _on_tma(inputs)
    launch = hopper_kernels(kernels).plan(
        *loaded, *rest, call.device.index, scale=call.scale, causal=call.right == 0
    )
    if not any(copies):
        return launch

    def run(inputs, *others) -> None:
        ready = [_dense(x) if copy else x for copy, x in zip(copies, inputs, strict=True)]
        launch(ready, *others)

    return run


class Plan:
    """Attention of a call: what is launched forward and, for each layout of a gradient,
    backward.
    """

    def __init__(self, call: Call):
        self.call = call
        self.layouts = call[:3]
        self.forwards: tuple | None = None
        self.backwards: dict[tuple, tuple] = {}

    def of(self, q: Tensor, k: Tensor, v: Tensor) -> "Plan":
        """Returns this plan or, of tensors that came back from a hook with other layouts,
        theirs.
        """
        layouts = (layout_of(q), layout_of(k), layout_of(v))
        return self if layouts == self.layouts else _plan_of(Call(*layouts, *self.call[3:]))

    def _plan_forward(self) -> tuple[Layout, tuple[int, ...], Callable[..., None]]:
        """Returns the layout of the output, the shape of the log-sum-exp, and what writes both."""
        call = self.call
        out = call.q.dense()
        out_4d = out.as_4d(call.packed)
        lse_shape = out_4d.shape[1:3] if call.packed else out.shape[:-1]
        if call.impl == "gluon":
            return out, lse_shape, _gluon("forward", call, self.layouts, out_4d)
        return out, lse_shape, _triton_forward(call, out_4d)

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
        if self.forwards is None:
            self.forwards = self._plan_forward()
        layout, lse_shape, run = self.forwards
        out = _empty(layout, q)
        lse = torch.empty(lse_shape, dtype=torch.float32, device=q.device)
        with _on_device_of(q):
            run((q, k, v), out, lse, (cu_seqlens_q, cu_seqlens_k))
        return out, lse

    def _plan_backward(
        self, grad_out: Layout, out: Layout, lse: Layout, grads: tuple[Layout, ...] | None
    ) -> tuple:
        """Returns whether grad_out is copied first, the layouts of the gradients, the shape of the
        row statistics, what writes these, and what writes those.
        """
        call = self.call
        num_batches, num_heads, *_ = call.sizes
        grads = grads or tuple(x.dense() for x in self.layouts)
        grads_4d = tuple(x.as_4d(call.packed) for x in grads)
        # The statistics of a packed batch are one set.
        num_sets = 1 if call.packed else num_batches
        num_rows = call.num_tiles(STATISTICS_PADDING) // num_sets * STATISTICS_PADDING
        strides = (0 if call.packed else num_heads * num_rows, num_rows)
        if call.impl == "gluon":
            q, k, _ = (x.as_4d(packed=False).shape for x in self.layouts)
            kernels = backward_kernels(q, k, call.device.index, call.right == 0)
            inputs = (*self.layouts, grad_out)
            run = _gluon(kernels.replace(" ", "_"), call, inputs, grads_4d, num_rows)
        else:
            run = _triton_backward(call, grad_out, grads_4d, strides)
        # o.sum().backward() passes strides of zero: one copy costs less than loads of single
        # elements.
        copied = call.precision != "bf16x6" and alignment_of(grad_out) == 1
        copied = copied and alignment_of(*self.layouts) > 1
        delta = _delta_launch(call, out, grad_out, lse, strides)
        return copied, grads, (2, num_sets, num_heads, num_rows), delta, run

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
        grads: tuple[Tensor, Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the gradients of q, k and v, shaped as they are.

        `grads` is where the gradients are written to, in place of room of their own.
        """
        grad_out = grad_out.resolve_neg()
        room = None if grads is None else tuple(map(layout_of, grads))
        layouts = (layout_of(grad_out), layout_of(out), layout_of(lse), room)
        plan = self.backwards.get(layouts)
        if plan is None:
            plan = self.backwards[layouts] = self._plan_backward(*layouts)
        copied, grad_layouts, statistics_shape, write_statistics, run = plan
        if copied:
            others = (q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k)
            return self.backward(_dense(grad_out), *others, grads=grads)
        if grads is None:
            layout_q, layout_k, layout_v = grad_layouts
            grads = (_empty(layout_q, q), _empty(layout_k, k), _empty(layout_v, v))
        statistics = torch.empty(statistics_shape, dtype=torch.float32, device=q.device)
        delta, lse_log2 = statistics.unbind()
        with _on_device_of(q):
            write_statistics(out, grad_out, lse, delta, lse_log2, cu_seqlens_q)
            cu_seqlens = (cu_seqlens_q, cu_seqlens_k)
            run((q, k, v, grad_out), (lse_log2, delta), grads, cu_seqlens)
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
) -> Plan:
    """Returns what attention of these tensors launches, whose arguments other than these are not
    checked.

    `scale` None is 1/√d. `left` and `right` are how many keys a query sees before and after its own
    on the diagonal, −1 without limit; `impl` is "triton" or "gluon"; `config` overrides the tiles
    of "triton".
    """
    cu_seqlens = None
    if cu_seqlens_q is not None:
        cu_seqlens = (layout_of(cu_seqlens_q), layout_of(cu_seqlens_k))
    precision = resolve_precision(q, precision, packed=cu_seqlens is not None)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    # A limit that no pair of positions reaches is none, and its loop then costs nothing.
    rows = 0 if cu_seqlens else -2
    left = -1 if left >= k.shape[rows] else left
    right = -1 if right >= q.shape[rows] else right
    layouts = (layout_of(q), layout_of(k), layout_of(v))
    options = (q.device, cu_seqlens, scale, left, right, precision, impl, config)
    return _plan_of(Call(*layouts, *options))


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
