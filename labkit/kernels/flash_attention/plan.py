"""What attention of a call launches: worked out once, remembered, and then only launched.

A `Call` is what a launch depends on, a `Plan` is what is launched for it forward and, by the layout
of the gradient, backward.

Shape suffixes: B batch, H query heads, S length, D head dimension.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from labkit.kernels.flash_attention.splits import combine_launch, num_splits_of, row_elements
from labkit.kernels.flash_attention.tiles import (
    INTERPRETER_TILES,
    AttentionConfig,
    TileConfig,
    capability_of,
    hopper_kernels,
    select_tiles,
)
from labkit.kernels.flash_attention.triton import (
    DELTA_BLOCK_Q,
    LOG2_E,
    NUM_SLICES,
    STATISTICS_PADDING,
    attention_slices_kernel,
    flash_attention_bwd_delta_kernel,
    flash_attention_bwd_kernel,
    flash_attention_fwd_kernel,
    slice_elements,
)
from labkit.kernels.fused import IS_INTERPRETED
from labkit.kernels.launch import Launch, num_multiprocessors

SLICES_BLOCK = 16  # rows that a program cuts into slices
# Elements between rows from which offsets inside a tile of 128 rows might not fit in int32.
FAR_APART = 2**23

# What compiled graphs allocate by, in a third of the time: it knows no defaults and no dispatch.
empty_strided_cuda = torch._C._dynamo.guards._empty_strided_cuda


class Layout(NamedTuple):
    """What a launch depends on of a tensor: all but its address, of which whether it is a multiple
    of 16 bytes.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    on_boundary: bool

    def as_4d(self, packed: bool) -> "Layout":
        """(B, S, D) as (B, 1, S, D), and a packed (total, H, D) as (1, H, total, D)."""
        if len(self.shape) == 4:
            return self

        axes = (3, 1, 0, 2) if packed else (0, 3, 1, 2)
        shape = (*self.shape, 1)
        strides = (*self.strides, 0)
        return self._replace(
            shape=tuple(shape[axis] for axis in axes),
            strides=tuple(strides[axis] for axis in axes),
        )

    def dense(self) -> "Layout":
        """A dense tensor of the same shape, heads inside the rows where they are so here.

        A transposed (B, S, H, D) then gets an output that transposes back without a copy; a view
        into a fused QKV tensor gets one without the holes.
        """
        if len(self.shape) == 4 and self.strides[1] < self.strides[2]:
            _, heads, length, head_dim = self.shape
            strides = (length * heads * head_dim, head_dim, heads * head_dim, 1)
            return self.contiguous()._replace(strides=strides)
        return self.contiguous()

    def contiguous(self) -> "Layout":
        """What `Tensor.contiguous` copies to."""
        strides = tuple(math.prod(self.shape[axis + 1 :]) for axis in range(len(self.shape)))
        return self._replace(strides=strides, on_boundary=True)

    def of_rows(self) -> "Layout":
        """Dense statistics of the rows, fp32."""
        return self._replace(shape=self.shape[:-1], dtype=torch.float32).contiguous()

    def empty(self) -> Tensor:
        """Returns room for a dense layout, on a GPU on the current one."""
        if self.device.type == "cuda":
            return empty_strided_cuda(self.shape, self.strides, self.dtype)
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device)


def facts_of(x: Tensor) -> tuple:
    """Returns the fields of a tensor's layout, which a plain tuple holds in half the time."""
    return x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16 == 0


def layout_of(x: Tensor) -> Layout:
    layout = Layout(*facts_of(x))
    return layout._replace(shape=tuple(x.shape))  # of which a torch.Size is no room made


def alignment_of(*layouts: Layout) -> int:
    """Elements in 16 bytes where every row of every tensor starts on such a boundary, else 1."""
    elements = 16 // layouts[0].dtype.itemsize
    aligned = all(
        x.on_boundary and not any(stride % elements for stride in x.strides[:-1]) for x in layouts
    )
    return elements if aligned else 1


class Call(NamedTuple):
    """What a launch depends on. `cu_seqlens` are the layouts of cumulative lengths, and none of
    their values, empty for a batch that is not packed; `config` is None for the shipped tiles.
    """

    q: Layout
    k: Layout
    v: Layout
    cu_seqlens: tuple[Layout, ...]
    scale: float
    left: int
    right: int
    precision: str
    impl: str
    config: AttentionConfig | None

    @property
    def packed(self) -> bool:
        return bool(self.cu_seqlens)

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

    def strides(self, *layouts: Layout) -> tuple[tuple[int, int, int], ...]:
        """Returns the distances of batches, heads and rows, of batches 0 where they are packed: the
        kernels find a sequence by its first row, whichever its number.
        """
        return tuple((0 if self.packed else x.strides[0], *x.strides[1:3]) for x in layouts)

    def num_tiles(self, length: int, block: int) -> int:
        """Returns how many tiles of `block` rows all sequences have, of the length of each or, in a
        packed batch, of all; those are as in `_sequence_of`.
        """
        num_batches = self.sizes[0]
        if self.packed:
            return length // block + num_batches
        return triton.cdiv(length, block) * num_batches


# ---- the Triton kernels --------------------------------------------------------------------------


def tiles_for(call: Call, layouts: tuple[Layout, ...]) -> AttentionConfig:
    """Returns the tiles of a call's kernels for operands of these layouts."""
    if call.config is not None:
        return call.config
    if call.q.device.type != "cuda":
        return INTERPRETER_TILES
    q = call.q
    aligned = alignment_of(*layouts) > 1
    capability = capability_of(q.device)
    return select_tiles(q.shape[-1], q.dtype, capability, call.precision, aligned, call.packed)


def forward_splits(call: Call, tile: TileConfig) -> int:
    """Returns among how many programs the forward kernel splits the keys of a tile of queries."""
    _, num_heads, _, num_queries, num_keys, head_dim = call.sizes
    device = call.q.device
    if device.type != "cuda" or call.packed or call.left >= 0:
        return 1
    # Registers bound the warps that run at once on a multiprocessor: with these the numbers of
    # splits were near the fastest on an H200.
    warps = 16 if head_dim * call.q.dtype.itemsize <= 128 else 8
    programs = max(1, warps // tile.num_warps) * num_multiprocessors(device.index)
    num_work_tiles = call.num_tiles(num_queries, tile.block_q) * num_heads
    num_tiles = triton.cdiv(num_keys, tile.block_k)
    return num_splits_of(num_work_tiles, num_tiles, programs, call.right >= 0)


def _flags(call: Call, tile: TileConfig, layouts: tuple[Layout, ...]) -> dict:
    """Returns the constants that forward and backward kernels share."""
    return {
        "HEAD_DIM": call.q.shape[-1],
        "PRECISION": call.precision,
        "ALIGNMENT": alignment_of(*layouts),
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }


def _backward_launch(
    call: Call,
    layouts: tuple[Layout, ...],
    grads: tuple[Layout, ...],
    tile: TileConfig,
    statistics: Layout,
) -> Launch:
    """Returns the launch on layouts, 4D, of q, k, v and the gradient of the output: of the
    gradients of k and v where there are two, else of q's.
    """
    num_batches, num_heads, num_key_heads, num_queries, num_keys, _ = call.sizes
    q, k, v, grad_out = layouts
    of_keys = len(grads) == 2
    has_edge = call.left >= 0 or call.right >= 0
    sides = [
        ((k, v), num_keys, tile.block_k, call.right, num_key_heads),
        ((q, grad_out), num_queries, tile.block_q, call.left, num_heads),
    ]
    if not of_keys:
        sides.reverse()
    own, own_length, own_block, before, own_heads = sides[0]
    other, other_length, other_block, after, _ = sides[1]
    even = not call.packed and other_length % other_block == 0
    flags = _flags(call, tile, (*layouts, *grads)) | {
        "OF_KEYS": of_keys,
        "OWN_BLOCK": own_block,
        "OTHER_BLOCK": other_block,
        "HAS_BEFORE": before >= 0,
        "HAS_AFTER": after >= 0,
        # The statistics of queries are padded: keys have two loops always.
        "UNMASKED_LOOP": tile.unmasked_loop and (has_edge or even or of_keys),
        "EVEN": even,
    }
    numbers = (
        call.strides(*own),
        call.strides(*other),
        call.strides(*grads),
        *call.strides(statistics),
        own_heads,
        num_heads // num_key_heads,
        own_length,
        other_length,
        num_batches,
        call.scale * LOG2_E,
        call.scale,
        before,
        after,
    )
    num_programs = call.num_tiles(own_length, own_block) * own_heads
    return Launch(flash_attention_bwd_kernel, (num_programs,), flags, numbers)


def _statistics_launch(
    call: Call,
    out: Layout,
    grad_out: Layout,
    statistics: Layout,
    others: tuple[Layout, ...],
) -> Launch:
    """Returns the launch that writes the row statistics, and zeros to the first of the others."""
    num_batches, num_heads, _, num_queries, _, head_dim = call.sizes
    numbers = (
        *call.strides(out, grad_out, out.of_rows(), statistics),
        num_heads,
        num_queries,
        num_batches,
        others[0].shape[0] if others else 0,
    )
    flags = {
        "HEAD_DIM": head_dim,
        "PADDED_D": triton.next_power_of_2(head_dim),
        "ALIGNMENT": alignment_of(out, grad_out),
    }
    padding = STATISTICS_PADDING.value
    tiles_a_padding = padding // DELTA_BLOCK_Q.value
    num_programs = call.num_tiles(num_queries, padding) * tiles_a_padding * num_heads
    return Launch(flash_attention_bwd_delta_kernel, (num_programs,), flags, numbers)


def _as_they_are(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tensors


def slices_of(
    call: Call, layouts: tuple[Layout, ...]
) -> tuple[tuple[Layout, ...], Callable[..., tuple]]:
    """Returns the layouts of what a call multiplies of tensors, 4D, and what turns them into it:
    their bf16 slices behind one another in a row, or the tensors.

    Interpreted kernels keep the slices in fp32, of which they can multiply.
    """
    if call.precision != "bf16x6":
        return layouts, _as_they_are
    dtype = torch.float32 if IS_INTERPRETED else torch.bfloat16
    head_dim = layouts[0].shape[-1]
    row = NUM_SLICES * slice_elements(head_dim)
    sliced = tuple(x._replace(shape=(*x.shape[:3], row), dtype=dtype).contiguous() for x in layouts)
    num_rows = tuple(math.prod(x.shape[:3]) for x in layouts)
    _, num_heads, lengths, _ = zip(*(x.shape for x in layouts), strict=True)
    flags = {
        "HEAD_DIM": head_dim,
        "PADDED_D": triton.next_power_of_2(head_dim),
        "BLOCK": SLICES_BLOCK,
    }
    grid = (triton.cdiv(max(num_rows), SLICES_BLOCK), len(layouts))
    numbers = (call.strides(*layouts), num_heads, lengths, num_rows)
    launch = Launch(attention_slices_kernel, grid, flags, numbers)

    def cut(*tensors: Tensor) -> tuple[Tensor, ...]:
        slices = tuple([x.empty() for x in sliced])
        launch(tensors, slices)
        return slices

    return sliced, cut


def _triton_forward(
    call: Call, inputs: tuple[Layout, ...], out: Layout
) -> tuple[Callable[..., None], int]:
    """Returns what writes the output, or its parts, and the log-sum-exp: write((q, k, v), out,
    parts, lse, cu_seqlens); and among how many programs the keys are split, each with its part.
    """
    num_batches, num_heads, num_key_heads, num_queries, num_keys, head_dim = call.sizes
    inputs, cut = slices_of(call, inputs)
    tile = tiles_for(call, (*inputs, out)).forward
    num_splits = forward_splits(call, tile)
    if num_splits > 1:
        # The outputs of all splits, one batch of them after another.
        shape = (*out.shape[:3], row_elements(head_dim))
        out = out._replace(shape=shape, dtype=torch.float32).contiguous()
    has_edge = call.left >= 0 or call.right >= 0
    even = not call.packed and num_keys % tile.block_k == 0
    flags = _flags(call, tile, (*inputs, out)) | {
        "BLOCK_Q": tile.block_q,
        "BLOCK_K": tile.block_k,
        "HAS_LEFT": call.left >= 0,
        "HAS_RIGHT": call.right >= 0,
        "SPLIT_K": num_splits > 1,
        # Two loops where the mask has an edge, one where it has none, and of a split: with the
        # bounds of two, cut down to it, ptxas serialises the products of both (C7515).
        "UNMASKED_LOOP": tile.unmasked_loop and (has_edge or even) and num_splits == 1,
        "EVEN_K": even,
    }
    numbers = (
        *call.strides(*inputs, out, out.of_rows()),
        num_heads,
        num_heads // num_key_heads,
        num_queries,
        num_keys,
        num_batches,
        num_splits,
        call.scale * LOG2_E,
        call.left,
        call.right,
    )
    num_programs = call.num_tiles(num_queries, tile.block_q) * num_heads * num_splits
    launch = Launch(flash_attention_fwd_kernel, (num_programs,), flags, numbers)

    def write(inputs, out, parts, lse, cu_seqlens) -> None:
        launch(*cut(*inputs), out if parts is None else parts, lse, *cu_seqlens)

    return write, num_splits


def _triton_backward(
    call: Call,
    inputs: tuple[Layout, ...],
    grads: tuple[Layout, ...],
    statistics: Layout,
) -> Callable[..., None]:
    """Returns what writes the gradients: run((q, k, v, grad_out), (lse_log2, delta, …), grads,
    cu_seqlens).
    """
    inputs, cut = slices_of(call, inputs)
    config = tiles_for(call, (*inputs, *grads))
    dkdv = _backward_launch(call, inputs, grads[1:], config.dkdv, statistics)
    dq = _backward_launch(call, inputs, grads[:1], config.dq, statistics)

    def run(inputs, scratch, grads, cu_seqlens) -> None:
        q, k, v, grad_out = cut(*inputs)
        cu_q, cu_k = cu_seqlens
        statistics = scratch[:2]
        grad_q, *grads_of_keys = grads
        dkdv((k, v), (q, grad_out), *statistics, tuple(grads_of_keys), cu_k, cu_q)
        dq((q, grad_out), (k, v), *statistics, (grad_q,), cu_q, cu_k)

    return run


# ---- the plan ------------------------------------------------------------------------------------


def _is_copied(call: Call, x: Layout) -> bool:
    """Whether the kernels read a dense copy of an input: its columns lie apart, or its rows too
    far, or they start off 16-byte boundaries without need; TMA also wants distances to be positive.
    """
    elements = 16 // x.dtype.itemsize
    off_boundaries = x.shape[-1] % elements == 0 and alignment_of(x) == 1
    row_stride = x.as_4d(call.packed).strides[2]
    is_apart = x.strides[-1] != 1 or row_stride >= FAR_APART
    is_expanded = any(n > 1 and stride == 0 for n, stride in zip(x.shape, x.strides, strict=True))
    return is_apart or off_boundaries or (call.impl == "gluon" and is_expanded)


def _read(
    call: Call, *layouts: Layout
) -> tuple[tuple[Layout, ...], Callable[..., Sequence[Tensor]]]:
    """Returns the layouts, 4D, of what kernels read of inputs, and what turns the inputs into it:
    some are copied. `contiguous` would return a dense one off a boundary as it is.
    """
    copied = [_is_copied(call, x) for x in layouts]

    def read(*tensors: Tensor) -> list[Tensor]:
        return [
            x.clone(memory_format=torch.contiguous_format) if each else x
            for x, each in zip(tensors, copied, strict=True)
        ]

    dense = (x.contiguous() if each else x for x, each in zip(layouts, copied, strict=True))
    return tuple(x.as_4d(call.packed) for x in dense), read if any(copied) else _as_they_are


def _is_elsewhere(device_index: int | None) -> bool:
    """Whether a GPU is not the current one, on which memory is allocated and Triton launches."""
    return device_index is not None and device_index != torch._C._cuda_getDevice()


class Plan:
    """Attention of a call: what is launched forward and, for each layout of a gradient,
    backward.
    """

    def __init__(self, call: Call):
        num_queries, num_keys = call.sizes[3:5]
        # A limit that no pair of positions reaches is none, and its loop then costs nothing.
        self.call = call = call._replace(
            left=-1 if call.left >= num_keys else call.left,
            right=-1 if call.right >= num_queries else call.right,
        )
        self.device_index = call.q.device.index
        inputs, self.read = _read(call, call.q, call.k, call.v)
        self.out = call.q.dense()
        self.grads = tuple(x.dense() for x in call[:3])
        self.launched_backward: dict[tuple, tuple] = {}
        out = self.out.as_4d(call.packed)
        self.lse = self.out.of_rows()
        if call.packed:
            self.lse = self.lse._replace(shape=out.shape[1:3]).contiguous()
        if call.impl == "gluon":
            plan = hopper_kernels("forward").plan
            self.write_outputs, num_splits = plan(*inputs, out, call.scale, call.right == 0)
        else:
            self.write_outputs, num_splits = _triton_forward(call, inputs, out)
        self.combine, self.parts = combine_launch(out, num_splits) if num_splits > 1 else (None, ())

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Returns the output, shaped as q, and the log-sum-exp in fp32, natural units.

        The log-sum-exp is (batch[, heads], n_queries), or (heads, total) for a packed batch.
        """
        if _is_elsewhere(self.device_index):
            with torch.cuda.device(self.device_index):
                return self.forward(q, k, v, *cu_seqlens)
        out = self.out.empty()
        lse = self.lse.empty()
        inputs = self.read(q, k, v)
        cu_seqlens = cu_seqlens or (None, None)
        if self.combine is None:
            self.write_outputs(inputs, out, None, lse, cu_seqlens)
        else:
            parts = [x.empty() for x in self.parts]
            self.write_outputs(inputs, out, *parts, cu_seqlens)
            self.combine(*parts, out, lse)
        return out, lse

    def _plan_backward(self, grad_out: Layout, out: Layout) -> tuple:
        """Returns what the inputs are read by; the layouts of the log-sum-exp in base 2, of delta
        and of what else the kernels write for one another; what writes the first of these, and what
        writes the gradients.
        """
        call = self.call
        (*inputs, out), read = _read(call, call.q, call.k, call.v, grad_out, out)
        grads = tuple(x.as_4d(call.packed) for x in self.grads)
        num_batches, num_heads, _, num_queries, _, _ = call.sizes
        # The statistics of a packed batch are one set.
        num_sets = 1 if call.packed else num_batches
        padding = STATISTICS_PADDING.value
        num_rows = call.num_tiles(num_queries, padding) // num_sets * padding
        statistics = self.lse._replace(shape=(num_sets, num_heads, num_rows)).contiguous()
        if call.impl == "gluon":
            plan = hopper_kernels("one_pass").plan
            causal = call.right == 0
            counters, sums, run = plan(*inputs, grads, num_rows, call.scale, causal)
            scratch = (statistics, statistics, counters, sums)
        else:
            run = _triton_backward(call, tuple(inputs), grads, statistics)
            scratch = (statistics, statistics)
        write_statistics = _statistics_launch(call, out, inputs[3], statistics, scratch[2:])
        return read, scratch, write_statistics, run

    def backward(
        self,
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        *cu_seqlens: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the gradients of q, k and v, shaped as they are."""
        if _is_elsewhere(self.device_index):
            with torch.cuda.device(self.device_index):
                return self.backward(grad_out, q, k, v, out, lse, *cu_seqlens)
        # A kernel also depends on whether the log-sum-exp starts on a boundary.
        key = (facts_of(grad_out), facts_of(out), lse.data_ptr() % 16)
        planned = self.launched_backward.get(key)
        if planned is None:
            layouts = (Layout(*facts) for facts in key[:2])
            planned = self.launched_backward[key] = self._plan_backward(*layouts)
        read, layouts, write_statistics, write_gradients = planned
        grads = tuple([x.empty() for x in self.grads])
        scratch = [x.empty() for x in layouts]
        *inputs, out = read(q, k, v, grad_out, out)
        cu_seqlens = cu_seqlens or (None, None)
        counters = scratch[2] if len(scratch) > 2 else None
        write_statistics(out, inputs[3], lse.contiguous(), *scratch[:2], counters, cu_seqlens[0])
        write_gradients(inputs, scratch, grads, cu_seqlens)
        return grads
