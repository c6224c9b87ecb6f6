"""FlashAttention-2, forward and backward: attention whose memory is linear in the lengths.

    S = scale · Q Kᵀ    P = softmax(S)    O = P V    L = log Σ exp S  (natural units, kept for backward)
    D = rowsum(∂O ∘ O)    ∂V = Pᵀ ∂O    ∂S = P ∘ (∂O Vᵀ − D)    ∂Q = scale · ∂S K    ∂K = scale · ∂Sᵀ Q

Shapes: q (B, H, Q, D), k and v (B, G, K, D) with H a multiple of G; or (B, length, D); or, packed with cumulative
lengths, (total length, heads, D). The plain-PyTorch statement of the same algorithm is flash_attention_tiled.py.

Ideal cost per head: 4·Q·K·D FLOPs forward and 10·Q·K·D backward (halved when causal), (2·Q + 2·K)·D elements moved
forward. Backward runs as two kernels, dK/dV and then dQ, and so executes 14·Q·K·D, or on a Hopper GPU as one of
10·Q·K·D. Nothing is added in an order that varies: equal bits every time.

Here is what a user calls and what stands around the kernels: checks, the choice among them, their launches, autograd.
The kernels are those of flash_attention_triton.py and, on a Hopper GPU, of the three flash_attention_hopper files;
splits.py shares long walks among programs.

Shape suffixes: B batch, H query heads, G key heads, S length, Q query length, K key length, D head dimension.

Source: Dao 2023, "FlashAttention-2"; Dao et al. 2022, "FlashAttention"; Ainslie et al. 2023 for grouped heads.
"""

import contextlib
import dataclasses
import functools
import importlib
import itertools
import logging
import math
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import Parameter
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from torch.utils.weak import WeakTensorKeyDictionary

from labkit.kernels.flash_attention_tiled import tiled_attention_backward, tiled_attention_forward
from labkit.kernels.flash_attention_triton import (
    BF16_SLICES,
    DELTA_BLOCK_Q,
    INTERPRETER_CONFIG,
    IS_INTERPRETED,
    LOG2_E,
    STATISTICS_PADDING,
    AttentionConfig,
    TileConfig,
    attention_slices_kernel,
    flash_attention_bwd_delta_kernel,
    flash_attention_bwd_dkdv_kernel,
    flash_attention_bwd_dq_kernel,
    flash_attention_bwd_kernel,
    flash_attention_fwd_kernel,
    select_config,
    select_joint_config,
    slice_elements,
    split_head_dim,
)
from labkit.kernels.launch import REMEMBERED, Launch
from labkit.kernels.splits import (
    empty_lse,
    empty_parts,
    gradients_launch,
    num_multiprocessors,
    num_splits_of,
    output_launch,
    row_elements,
)

MAX_HEAD_DIM = 256
IMPLS = ("auto", "gluon", "triton", "tiled")
PRECISIONS = ("auto", "ieee", "tf32x3", "bf16x6", "bf16x3", "tf32")
PRODUCTS_HEAD_DIM = 128  # up to which several products on the tensor cores make one of fp32
# From how many queries of all heads, by widest head dimension, cutting operands into slices takes a Hopper GPU less
# time than it gains, and from how many of one: few queries read their keys once, and cutting those is no less.
SLICES_FROM = ((32, 2048), (PRODUCTS_HEAD_DIM, 1024))
SLICES_QUERIES = 256
SLICES_BLOCK = 16
FEW_QUERIES = 1024  # of all heads, up to which their tiles are smaller
# dK/dV and dQ are one launch up to so many queries and keys, by bytes of an element and widest head dimension, and so
# many programs: of a multiprocessor, or in all where kernels are interpreted. Longer walks are shared among programs.
JOINT_UNTIL = {2: ((MAX_HEAD_DIM, 1024),), 4: ((64, 256), (MAX_HEAD_DIM, 128))}
JOINT_PROGRAMS, INTERPRETED_PROGRAMS = 4, 8
TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TILED_DTYPES = (*TRITON_DTYPES, torch.float64)
GLUON_DTYPES = (torch.bfloat16, torch.float16)
GLUON_HEAD_DIMS = (64, 72, 80, 96, 128)
SINGLE_PASS_HEAD_DIMS = (64, 128)
# Tiles of 128 queries up to which "auto" runs the Triton kernels on an H200: at D 64 those are as fast or faster, else
# up to 3 us slower, which the host gains by arguments without tile descriptors.
SMALL, SMALL_AT_64 = 4, 32
STAYING_UNTIL = 1024  # queries and keys at D 64, full: two passes whose programs stay take less time than one
GLUON_BACKWARDS = ("one pass", "two passes", "triton")

# Tiles of a walk, by widest head dimension, up to which the kernel that would put shares together takes the host longer
# to launch than the device gains.
WHOLE = ((64, 8), (MAX_HEAD_DIM, 2))

# Warps that run at once on a multiprocessor, as far as splitting reckons: (widest head dimension, warps) by bytes of an
# element and kernel. Registers bound them; these gave numbers of splits near the fastest on an H200.
WARPS_AT_ONCE = {
    (2, "forward"): ((64, 16), (MAX_HEAD_DIM, 8)),
    (2, "dkdv"): ((16, 8), (64, 16), (MAX_HEAD_DIM, 8)),
    (2, "dq"): ((64, 16), (MAX_HEAD_DIM, 8)),
    (4, "forward"): ((32, 24), (MAX_HEAD_DIM, 8)),
    (4, "dkdv"): ((32, 24), (MAX_HEAD_DIM, 8)),
    (4, "dq"): ((32, 24), (MAX_HEAD_DIM, 8)),
}
SHARED_KIB = 227  # of a Hopper multiprocessor, which tiles of slices fill

# ---- launchers ------------------------------------------------------------------------------------------------


class _Layout(NamedTuple):
    """What a launch depends on of a tensor: all but its address, of which whether it is a multiple of 16 bytes."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    on_boundary: bool

    def as_4d(self, packed: bool) -> "_Layout":
        """(B, S, D) as (B, 1, S, D), and a packed (total, H, D) as (1, H, total, D), its batch stride 0.

        The kernels find a packed sequence by its first row, whichever its number in the batch.
        """
        if len(self.shape) == 4:
            return self
        (size_0, size_1, size_d), (stride_0, stride_1, stride_d) = self.shape, self.strides
        if packed:
            return self._replace(shape=(1, size_1, size_0, size_d), strides=(0, stride_1, stride_0, stride_d))
        return self._replace(shape=(size_0, 1, size_1, size_d), strides=(stride_0, 0, stride_1, stride_d))

    def dense(self) -> "_Layout":
        """A dense tensor of the same shape, heads inside the rows where they are so here.

        A transposed (B, S, H, D) then gets an output that transposes back without a copy; a view into a fused QKV
        tensor gets one without the holes.
        """
        if len(self.shape) == 4 and self.strides[1] < self.strides[2]:
            _, heads, length, head_dim = self.shape
            strides = (length * heads * head_dim, head_dim, heads * head_dim, 1)
        else:
            strides = tuple(math.prod(self.shape[axis + 1 :]) for axis in range(len(self.shape)))
        return _Layout(self.shape, strides, self.dtype, True)


def _layout(x: Tensor) -> _Layout:
    return _Layout(x.shape, x.stride(), x.dtype, x.data_ptr() % 16 == 0)


def _alignment(*layouts: _Layout) -> int:
    """Elements in 16 bytes where every row of every tensor starts on such a boundary, else 1."""
    elements = 16 // layouts[0].dtype.itemsize
    for x in layouts:
        if x.strides[-1] != 1 or not x.on_boundary or any(stride % elements for stride in x.strides[:-1]):
            return 1
    return elements


def _empty(layout: _Layout, like: Tensor) -> Tensor:
    """Returns room for the dense layout of a tensor, on its device; the tensor's own strides cost least."""
    if like.stride() == layout.strides:
        return torch.empty_like(like)
    return torch.empty_strided(layout.shape, layout.strides, dtype=layout.dtype, device=like.device)


@dataclasses.dataclass(frozen=True)
class _Problem:
    """What the kernels are told beyond the tensors; lengths are the longest of a packed batch."""

    num_batches: int
    num_heads: int
    num_key_heads: int
    max_queries: int
    max_keys: int
    head_dim: int
    left: int
    right: int
    packed: bool


class _Packing(NamedTuple):
    """What a launch depends on of a packed batch."""

    num_sequences: int
    max_queries: int
    max_keys: int
    cu_seqlens_q: _Layout
    cu_seqlens_k: _Layout


def _problem(q: _Layout, k: _Layout, left: int, right: int, packing: _Packing | None) -> _Problem:
    packed = packing is not None
    (num_batches, num_heads, max_queries, head_dim), key_shape = q.as_4d(packed).shape, k.as_4d(packed).shape
    num_key_heads, max_keys = key_shape[1:3]
    if packed:
        num_batches, max_queries, max_keys = packing[:3]
    # A limit that no pair of positions reaches is none, and its loop then costs nothing.
    left = -1 if left >= max_keys else left
    right = -1 if right >= max_queries else right
    return _Problem(num_batches, num_heads, num_key_heads, max_queries, max_keys, head_dim, left, right, packed)


def _packing(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k) -> _Packing | None:
    """Returns the longest lengths of a packed batch, checked; None of one that is not packed."""
    if cu_seqlens_q is None:
        return None
    return _Packing(
        cu_seqlens_q.shape[0] - 1,
        _longest(cu_seqlens_q, "q", q.shape[0], max_seqlen_q),
        _longest(cu_seqlens_k, "k", k.shape[0], max_seqlen_k),
        _layout(cu_seqlens_q),
        _layout(cu_seqlens_k),
    )


def _is_wide(layouts: tuple[_Layout, ...], block: int, head_dim: int) -> bool:
    """Whether a single tile spans 2³¹ elements, so that offsets inside it need int64."""
    return any(block * abs(x.strides[-2]) + 2 * head_dim * abs(x.strides[-1]) >= 2**31 for x in layouts)


def _kernel_flags(
    layouts: tuple[_Layout, ...], problem: _Problem, tile: TileConfig, precision: str, num_splits: int
) -> dict:
    alignment = _alignment(*layouts)
    block_d, tail_d = split_head_dim(problem.head_dim, aligned=alignment > 1)
    return {
        "HEAD_DIM": problem.head_dim,
        "BLOCK_D": block_d,
        "TAIL_D": tail_d,
        "BLOCK_Q": tile.block_q,
        "BLOCK_K": tile.block_k,
        "HAS_LEFT": problem.left >= 0,
        "HAS_RIGHT": problem.right >= 0,
        "IS_PACKED": problem.packed,
        "SPLIT_WALK": num_splits > 1,
        "PRECISION": precision,
        "ALIGNMENT": alignment,
        "WIDE": _is_wide(layouts, max(tile.block_q, tile.block_k), problem.head_dim),
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }


def _query_walk_flags(problem: _Problem, tile: TileConfig, num_splits: int) -> dict[str, bool]:
    """Flags of the kernel that walks along the queries, whose statistics are padded: two loops, of a share one."""
    even = not problem.packed and problem.max_queries % tile.block_q == 0
    return {"EVEN_Q": even, "SPLIT": tile.split and num_splits == 1}


def _key_walk_flags(problem: _Problem, tile: TileConfig, num_splits: int) -> dict[str, bool]:
    """Flags of the kernels that walk along the keys: two loops where the mask has an edge, one where it has none.

    A share is walked in one: with the ends of two, cut down to it, ptxas serialises the products of both (C7515).
    """
    even = not problem.packed and problem.max_keys % tile.block_k == 0
    has_edge = problem.left >= 0 or problem.right >= 0
    split = tile.split and (has_edge or even) and num_splits == 1
    return {"EVEN_K": even, "SPLIT": split}


@functools.cache
def _capability(device_index: int) -> int:
    major, minor = torch.cuda.get_device_capability(device_index)
    return 10 * major + minor


def _config(layouts: tuple[_Layout, ...], problem: _Problem, precision: str, device: torch.device) -> AttentionConfig:
    if device.type != "cuda":
        return INTERPRETER_CONFIG
    # A window's tiles are masked on both sides, as causal ones are on one.
    masked = problem.left >= 0 or problem.right >= 0
    aligned = _alignment(*layouts) > 1
    capability = _capability(device.index)
    few = problem.num_batches * problem.num_heads * problem.max_queries <= FEW_QUERIES
    return select_config(problem.head_dim, layouts[0].dtype, masked, capability, precision, aligned, few)


def _by_head_dim(table: tuple[tuple[int, int], ...], head_dim: int) -> int:
    """Returns what a table of (widest head dimension, number) has for a head dimension."""
    return next(number for widest, number in table if head_dim <= widest)


def _blocks(tile: TileConfig, kernel: str) -> tuple[int, int]:
    """Returns the rows that a kernel's program owns, and those of a tile along its walk."""
    return (tile.block_k, tile.block_q) if kernel == "dkdv" else (tile.block_q, tile.block_k)


def _num_walks(problem: _Problem, tile: TileConfig, kernel: str) -> int:
    """Returns how many tiles of own rows a kernel has, of all heads and batches; it walks along the other length."""
    own, _ = _blocks(tile, kernel)
    length, num_heads = problem.max_queries, problem.num_heads
    if kernel == "dkdv":
        length, num_heads = problem.max_keys, problem.num_key_heads
    return triton.cdiv(length, own) * num_heads * problem.num_batches


def _joint_tiles(
    layouts: tuple[_Layout, ...], problem: _Problem, precision: str, device: torch.device
) -> tuple[TileConfig, TileConfig] | None:
    """Returns the tiles of "dkdv" and "dq" as one launch, None where there are none or programs are too many.

    Few programs leave most of a device idle, and take as long as the longest of them: tiles of few own rows then.
    """
    dtype = layouts[0].dtype
    longest = _by_head_dim(JOINT_UNTIL[dtype.itemsize], problem.head_dim)
    if problem.packed or max(problem.max_queries, problem.max_keys) > longest:
        return None
    if device.type == "cuda":
        aligned, capability = _alignment(*layouts) > 1, _capability(device.index)
        tiles = select_joint_config(problem.head_dim, dtype, capability, precision, aligned)
        most = JOINT_PROGRAMS * num_multiprocessors(device.index)
    else:
        tiles, most = (INTERPRETER_CONFIG.dkdv, INTERPRETER_CONFIG.dq), INTERPRETED_PROGRAMS
    if tiles is None:
        return None
    dkdv, dq = tiles
    return tiles if _num_walks(problem, dkdv, "dkdv") + _num_walks(problem, dq, "dq") <= most else None


def _tma_ready(x: Tensor) -> Tensor:
    """Returns x where TMA can read it, with rows from 16-byte boundaries at positive distances, else a dense copy."""
    if x.is_contiguous() and x.data_ptr() % 16 == 0:  # rows of GLUON_HEAD_DIMS are multiples of 16 bytes
        return x
    strides = [stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1]
    return x.contiguous() if _alignment(_layout(x)) == 1 or not all(stride > 0 for stride in strides) else x


@functools.cache
def _hopper(part: str = ""):
    """The Gluon kernels, loaded when they are first needed: Gluon's interface moves between releases of Triton."""
    return importlib.import_module(f"labkit.kernels.flash_attention_hopper{part}")


def _not_loading(*parts: str) -> str | None:
    try:
        for part in parts:
            _hopper(part)
    except (ImportError, AttributeError, TypeError) as error:
        return f"the Gluon kernels do not load with triton {triton.__version__} ({type(error).__name__}: {error})"
    return None


@functools.cache
def hopper_unavailable() -> str | None:
    """Returns why the Gluon kernels cannot run with the installed Triton, None where they can."""
    return _not_loading("", "_backward")


@functools.cache
def hopper_single_unavailable() -> str | None:
    """Returns why the backward in one pass cannot run with the installed Triton, None where it can; logs a lack."""
    reason = _not_loading("_single")
    if reason:
        logging.getLogger(__name__).warning("gradients take two passes: %s", reason)
    return reason


def _gluon_objection(device: torch.device) -> str | None:
    """Returns why the Gluon kernels cannot run on a device, None where they can; a lack of theirs is logged."""
    if device.type != "cuda":
        return f"takes q, k and v on a Hopper GPU; got {device}"
    index = torch.cuda.current_device() if device.index is None else device.index
    if _capability(index) != 90:
        return f"takes q, k and v on a GPU of compute capability 9.0; got {_capability(index) / 10}"
    reason = hopper_unavailable()
    if reason:
        logging.getLogger(__name__).warning("attention falls back to impl='triton': %s", reason)
    return reason


# As torch.compiler.assume_constant_result marks it, which would import the compiler: four seconds of a process.
_gluon_objection._dynamo_marked_constant = True


def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and _capability(device.index) == 90


_is_hopper._dynamo_marked_constant = True


def _on_device_of(q: Tensor):
    """Triton launches on the current device, which need not be that of the tensors."""
    if q.is_cuda and q.device.index != torch.cuda.current_device():
        return torch.cuda.device(q.device)
    return contextlib.nullcontext()


def _with_heads(x: Tensor) -> Tensor:
    """Views (B, S, D) as (B, 1, S, D)."""
    return x.unsqueeze(1) if x.dim() == 3 else x


def _strides(*layouts: _Layout) -> tuple[int, ...]:
    return tuple(stride for x in layouts for stride in x.strides)


def _result(whole: _Layout, num_splits: int) -> _Layout:
    """What a kernel writes to: a result, or the parts that all splits make of it (`empty_parts`), one batch of them."""
    if num_splits == 1:
        return whole
    batch, heads, length, head_dim = whole.shape
    row = row_elements(head_dim)
    strides = (heads * length * row, length * row, row, 1)
    return _Layout((num_splits * batch, heads, length, head_dim), strides, torch.float32, True)


def _programs_at_once(problem: _Problem, tile: TileConfig, kernel: str, dtype: torch.dtype, precision: str) -> int:
    """Returns how many programs of a kernel run on a multiprocessor at once, as far as splitting reckons."""
    programs = _by_head_dim(WARPS_AT_ONCE[dtype.itemsize, kernel], problem.head_dim) // tile.num_warps
    if precision in BF16_SLICES:
        own, walked = _blocks(tile, kernel)
        num_rows = own * (1 if kernel == "forward" else 2) + walked * 2 * tile.num_stages
        shared_kib = num_rows * row_elements(problem.head_dim) * 2 * BF16_SLICES[precision] / 1024
        programs = min(programs, int(SHARED_KIB // shared_kib))
    return max(1, programs)


def _walks(
    problem: _Problem,
    tile: TileConfig,
    kernel: str,
    device: torch.device,
    dtype: torch.dtype,
    precision: str,
    num_splits: int | None,
) -> tuple[int, int]:
    """Returns how many walks a kernel makes, one a tile of rows, and among how many programs it shares each.

    `dtype` is that of q, `num_splits` is that number where it is given; packed sequences are never shared.
    """
    num_walks = _num_walks(problem, tile, kernel)
    if problem.packed:
        return num_walks, 1
    if num_splits or device.type != "cuda" or problem.left >= 0:
        return num_walks, num_splits or 1
    own, walked = _blocks(tile, kernel)
    length, num_results = (problem.max_queries, 2) if kernel == "dkdv" else (problem.max_keys, 1)
    num_tiles = triton.cdiv(length, walked)
    if num_tiles <= _by_head_dim(WHOLE, problem.head_dim):
        return num_walks, 1
    programs = num_multiprocessors(device.index) * _programs_at_once(problem, tile, kernel, dtype, precision)
    part_kib = num_results * own * row_elements(problem.head_dim) * 4 / 1024
    causal = problem.right >= 0
    cost = {"part_kib": part_kib, "itemsize": dtype.itemsize}
    return num_walks, num_splits_of(num_walks, num_tiles, programs, causal, **cost)


class _Slices(NamedTuple):
    """The launch that cuts fp32 tensors into slices of bf16, and the layouts that the kernels find them in."""

    launch: Launch
    layouts: tuple[_Layout, ...]
    sizes: tuple[int, ...]

    def __call__(self, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        """Returns the slices of q, k, v and grad_out, None for None, as vectors: the kernels go by the layouts."""
        room = torch.empty(sum(self.sizes), dtype=self.layouts[0].dtype, device=tensors[0].device).split(self.sizes)
        slices = (*room, None)[:4]
        self.launch(*tensors, *slices)
        return slices


def _slices(tensors: tuple[_Layout, ...], precision: str, packed: bool) -> _Slices | None:
    """Returns how q, k, v and, where there are four, grad_out are cut, None where they are not.

    Interpreted kernels keep the slices in fp32, of which they can multiply.
    """
    if precision not in BF16_SLICES:
        return None
    dtype = torch.float32 if IS_INTERPRETED else torch.bfloat16
    whole = tuple(x.as_4d(packed) for x in tensors)
    (_, num_heads, num_queries, head_dim), (_, num_key_heads, num_keys, _) = whole[0].shape, whole[1].shape
    num_slices = BF16_SLICES[precision]
    row = num_slices * slice_elements(head_dim)
    layouts = []
    for x in whole:
        _, heads, length, _ = x.shape
        layouts.append(_Layout(x.shape, (0 if packed else heads * length * row, length * row, row, 1), dtype, True))
    rows = [math.prod(x.shape[:3]) for x in whole]
    # Without grad_out, whose place is the last, the strides there are anything.
    strides = _strides(*(*whole, whole[0])[:4])
    numbers = (*strides, num_heads, num_key_heads, num_queries, num_keys, *rows[:2])
    flags = {"HEAD_DIM": head_dim, "PADDED_D": triton.next_power_of_2(head_dim)}
    flags |= {"BLOCK": SLICES_BLOCK, "SLICES": num_slices}
    grid = (triton.cdiv(max(rows), SLICES_BLOCK), len(tensors))
    launch = Launch(attention_slices_kernel, grid, flags, numbers)
    return _Slices(launch, tuple(layouts), tuple(n * row for n in rows))


class _ForwardPlan(NamedTuple):
    """The launch of a forward kernel, what cuts its inputs into slices, what puts splits together, and the room for
    its results."""

    slices: _Slices | None
    launch: Launch
    num_splits: int
    combine: Launch | None
    out: _Layout
    lse_shape: tuple[int, ...]


@functools.lru_cache(maxsize=REMEMBERED)
def _plan_forward(
    q: _Layout,
    k: _Layout,
    v: _Layout,
    device: torch.device,
    packing: _Packing | None,
    scale: float,
    left: int,
    right: int,
    precision: str,
    config: AttentionConfig | None,
    num_splits: int | None,
) -> _ForwardPlan:
    packed = packing is not None
    problem = _problem(q, k, left, right, packing)
    slices = _slices((q, k, v), precision, packed)
    loaded = slices.layouts if slices else tuple(x.as_4d(packed) for x in (q, k, v))
    layouts = (*loaded, q.dense().as_4d(packed))
    tile = (config or _config(layouts, problem, precision, device)).forward
    num_walks, num_splits = _walks(problem, tile, "forward", device, q.dtype, precision, num_splits)
    operands = (*layouts[:3], _result(layouts[3], num_splits))
    *_, num_rows, _ = layouts[0].shape
    numbers = (
        *_strides(*operands),
        *((0, num_rows) if packed else (problem.num_heads * num_rows, num_rows)),
        problem.num_heads,
        problem.num_heads // problem.num_key_heads,
        problem.max_queries,
        problem.max_keys,
        scale * LOG2_E,
        problem.left,
        problem.right,
        num_splits,
    )
    flags = _kernel_flags(operands, problem, tile, precision, num_splits) | _key_walk_flags(problem, tile, num_splits)
    launch = Launch(flash_attention_fwd_kernel, (num_walks * num_splits,), flags, numbers)
    lse_shape = (problem.num_heads, num_rows) if packed else q.shape[:-1]
    combine = output_launch(layouts[3].shape, layouts[3].strides, num_splits)
    return _ForwardPlan(slices, launch, num_splits, combine, q.dense(), lse_shape)


def flash_attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    left: int = -1,
    right: int = -1,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    precision: str = "auto",
    impl: str = "triton",
    config: AttentionConfig | None = None,
    num_splits: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Launches the forward kernel; returns the output, shaped as q, and the log-sum-exp in fp32, natural units.

    The log-sum-exp is (batch[, heads], n_queries), or (heads, total) for a packed batch. `left` and `right` are how
    many keys a query sees before and after its own on the diagonal, −1 without limit; `impl` is "triton" or "gluon";
    `config` overrides the tiles of "triton", `num_splits` among how many programs it shares the keys of a tile.
    """
    if impl == "gluon":
        out, lse = _empty_outputs(q, packed=False)
        tensors = (*(_tma_ready(x) for x in (q, k, v)), out)
        with _on_device_of(q):
            _hopper().hopper_forward(*(_with_heads(x) for x in tensors), lse, scale=scale, causal=right == 0)
        return out, lse
    packing = _packing(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    layouts = (_layout(q), _layout(k), _layout(v))
    precision = resolve_precision(q, precision, packed=packing is not None)
    plan = _plan_forward(*layouts, q.device, packing, scale, left, right, precision, config, num_splits)
    out = _empty(plan.out, q)
    lse = torch.empty(plan.lse_shape, dtype=torch.float32, device=q.device)
    with _on_device_of(q):
        if plan.slices:
            q, k, v, _ = plan.slices(q, k, v, None)
        if plan.combine is None:
            plan.launch(q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k)
        else:
            whole = _with_heads(out)
            parts, parts_lse = empty_parts(plan.num_splits, whole), empty_lse(plan.num_splits, whole)
            plan.launch(q, k, v, parts, parts_lse, None, None)
            plan.combine(parts, parts_lse, out, lse)
    return out, lse


def _statistics_shape(q: _Layout, problem: _Problem) -> tuple[int, int, int]:
    """Sets, heads and padded rows of the row statistics of a backward.

    A packed sequence starts on a boundary of its own, at most one padding after each sequence before it.
    """
    num_rows = problem.max_queries
    if problem.packed:
        num_rows = q.as_4d(True).shape[-2] + STATISTICS_PADDING * problem.num_batches
    return (
        1 if problem.packed else problem.num_batches,
        problem.num_heads,
        triton.cdiv(num_rows, STATISTICS_PADDING) * STATISTICS_PADDING,
    )


def _delta_launch(
    out: _Layout, grad_out: _Layout, lse: _Layout, problem: _Problem, statistics_strides: tuple[int, int]
) -> Launch:
    packed = problem.packed
    padded_queries = triton.cdiv(problem.max_queries, STATISTICS_PADDING) * STATISTICS_PADDING
    num_tiles = padded_queries // DELTA_BLOCK_Q
    numbers = (
        *_strides(out.as_4d(packed), grad_out.as_4d(packed)),
        *((0, lse.strides[0]) if packed else (*lse.strides[:-1], 0)[:2]),
        *statistics_strides,
        problem.num_heads,
        problem.max_queries,
        num_tiles,
    )
    flags = {
        "HEAD_DIM": problem.head_dim,
        "PADDED_D": triton.next_power_of_2(problem.head_dim),
        "BLOCK_Q": DELTA_BLOCK_Q,
        "IS_PACKED": packed,
        "PADDING": STATISTICS_PADDING,
    }
    grid = (num_tiles * problem.num_heads * problem.num_batches,)
    return Launch(flash_attention_bwd_delta_kernel, grid, flags, numbers)


class _GradientLaunch(NamedTuple):
    """The launch of a backward kernel, whose results are gradients or, of several splits, their parts."""

    launch: Launch
    num_splits: int

    def __call__(
        self, inputs: tuple[Tensor, ...], grads: tuple[Tensor, ...], cu_seqlens: tuple
    ) -> tuple[Tensor | None, ...]:
        """Returns the parts, None of whole gradients."""
        if self.num_splits == 1:
            self.launch(*inputs, *grads, *cu_seqlens)
            return (None,) * len(grads)
        parts = tuple(empty_parts(self.num_splits, _with_heads(x)) for x in grads)
        self.launch(*inputs, *parts, *cu_seqlens)
        return parts


def _gradient_numbers(problem: _Problem, scale: float) -> tuple[int | float, ...]:
    """Returns what the kernels of the gradients take after their numbers of heads."""
    group = problem.num_heads // problem.num_key_heads
    lengths = (problem.max_queries, problem.max_keys)
    return group, *lengths, scale * LOG2_E, scale, problem.left, problem.right


def _gradient_launch(
    kernel: str,
    inputs: tuple[_Layout, ...],
    grads: tuple[_Layout, ...],
    problem: _Problem,
    statistics_strides: tuple[int, int],
    device: torch.device,
    scale: float,
    precision: str,
    tile: TileConfig,
    num_splits: int | None,
) -> _GradientLaunch:
    """Returns the launch of "dkdv" or "dq"; the layouts are 4D."""
    is_dkdv = kernel == "dkdv"
    num_walks, num_splits = _walks(problem, tile, kernel, device, grads[0].dtype, precision, num_splits)
    operands = (*inputs, *(_result(x, num_splits) for x in grads))
    numbers = (
        *_strides(*operands),
        *statistics_strides,
        problem.num_key_heads if is_dkdv else problem.num_heads,
        *_gradient_numbers(problem, scale),
        num_splits,
    )
    flags = {
        **_kernel_flags(operands, problem, tile, precision, num_splits),
        **(_query_walk_flags if is_dkdv else _key_walk_flags)(problem, tile, num_splits),
        "PADDING": STATISTICS_PADDING,
        "first_program": None,
    }
    function = flash_attention_bwd_dkdv_kernel if is_dkdv else flash_attention_bwd_dq_kernel
    return _GradientLaunch(Launch(function, (num_walks * num_splits,), flags, numbers), num_splits)


def _joint_launch(
    inputs: tuple[_Layout, ...],
    grads: tuple[_Layout, ...],
    problem: _Problem,
    statistics_strides: tuple[int, int],
    device: torch.device,
    scale: float,
    precision: str,
) -> Launch | None:
    """Returns one launch of "dkdv" and "dq", None where `_joint_tiles` has none; it writes the gradients of q last."""
    operands = (*inputs, *grads[1:], grads[0])
    tiles = _joint_tiles(operands, problem, precision, device)
    if tiles is None:
        return None
    dkdv, dq = tiles
    num_dkdv, num_dq = _num_walks(problem, dkdv, "dkdv"), _num_walks(problem, dq, "dq")
    numbers = (
        *_strides(*operands),
        *statistics_strides,
        num_dkdv,
        problem.num_heads,
        problem.num_key_heads,
        *_gradient_numbers(problem, scale),
    )
    of_dkdv = _kernel_flags(operands, problem, dkdv, precision, 1) | _query_walk_flags(problem, dkdv, 1)
    of_dq = _kernel_flags(operands, problem, dq, precision, 1) | _key_walk_flags(problem, dq, 1)
    own = ("BLOCK_Q", "BLOCK_K", "SPLIT")
    flags = {
        **{name: flag for name, flag in (of_dkdv | of_dq).items() if name not in (*own, "IS_PACKED", "SPLIT_WALK")},
        **{f"DKDV_{name}": of_dkdv[name] for name in own},
        **{f"DQ_{name}": of_dq[name] for name in own},
        "WIDE": of_dkdv["WIDE"] or of_dq["WIDE"],
        "PADDING": STATISTICS_PADDING,
    }
    return Launch(flash_attention_bwd_kernel, (num_dkdv + num_dq,), flags, numbers)


class _BackwardPlan(NamedTuple):
    """The launches of a backward, what cuts its inputs into slices, and the room for gradients and row statistics."""

    copies_grad_out: bool
    slices: _Slices | None
    grads: tuple[_Layout, ...]
    statistics: tuple[int, ...]
    delta: Launch
    joint: Launch | None
    dkdv: _GradientLaunch
    dq: _GradientLaunch
    combine: Launch | None


@functools.lru_cache(maxsize=REMEMBERED)
def _plan_backward(
    grad_out: _Layout,
    q: _Layout,
    k: _Layout,
    v: _Layout,
    out: _Layout,
    lse: _Layout,
    device: torch.device,
    packing: _Packing | None,
    scale: float,
    left: int,
    right: int,
    precision: str,
    config: AttentionConfig | None,
    num_splits: int | None,
    grads: tuple[_Layout, ...] | None,
) -> _BackwardPlan:
    packed = packing is not None
    problem = _problem(q, k, left, right, packing)
    grads = grads or tuple(x.dense() for x in (q, k, v))
    slices = _slices((q, k, v, grad_out), precision, packed)
    inputs = slices.layouts if slices else tuple(x.as_4d(packed) for x in (q, k, v, grad_out))
    grads_4d = tuple(x.as_4d(packed) for x in grads)
    is_given = config is not None or num_splits is not None
    config = config or _config((*inputs, *grads_4d), problem, precision, device)
    num_sets, num_heads, num_rows = _statistics_shape(q, problem)
    # The statistics of a packed batch are one set.
    statistics_strides = (0 if packed else num_heads * num_rows, num_rows)
    options = (problem, statistics_strides, device, scale, precision)
    dkdv = _gradient_launch("dkdv", inputs, grads_4d[1:], *options, config.dkdv, num_splits)
    dq = _gradient_launch("dq", inputs, grads_4d[:1], *options, config.dq, num_splits)
    whole = (tuple(x.shape for x in grads_4d), tuple(x.strides for x in grads_4d))
    return _BackwardPlan(
        copies_grad_out=not slices and _alignment(grad_out) == 1 and _alignment(q, k, v) > 1,
        slices=slices,
        grads=grads,
        statistics=(2, num_sets, num_heads, num_rows),
        delta=_delta_launch(out, grad_out, lse, problem, statistics_strides),
        joint=None if is_given else _joint_launch(inputs, grads_4d, *options),
        dkdv=dkdv,
        dq=dq,
        combine=gradients_launch(*whole, (dq.num_splits, dkdv.num_splits)),
    )


def resolve_tiles(q: Tensor, k: Tensor, *, causal: bool, precision: str = "auto") -> AttentionConfig:
    """Returns the tiles that the Triton kernels run with: what a record should name.

    Args:
        q, k: (B, H, S, D) or (B, S, D), dense.
        precision: as `flash_attention` takes it.
    """
    layouts = (_layout(q), _layout(k))
    problem = _problem(*layouts, -1, 0 if causal else -1, None)
    precision = resolve_precision(q, precision)
    tiles = _config(layouts, problem, precision, q.device)
    dkdv, dq = _joint_tiles(layouts, problem, precision, q.device) or (tiles.dkdv, tiles.dq)
    return dataclasses.replace(tiles, dkdv=dkdv, dq=dq)


def resolve_backward(q: Tensor, k: Tensor, impl: str, *, causal: bool) -> str:
    """Returns which kernels compute the gradients after an `impl` as `resolve_impl` returns it: its own, or after
    "gluon" one of GLUON_BACKWARDS.

    "triton" where the tiles of keys are few: its kernels share their walks among programs, Gluon's do not. "one pass"
    where the shares of q's gradient are added in one order without much waiting; "two passes" else, as always at other
    head dimensions than 64 and 128, with grouped heads, and with short full walks at 64, one after the other in a
    program that stays.

    Args:
        q, k: (B, H, S, D) or (B, S, D).
    """
    if impl != "gluon":
        return impl
    q, k = _with_heads(q), _with_heads(k)
    (num_batches, num_heads, num_queries, head_dim), (_, num_key_heads, num_keys, _) = q.shape, k.shape
    programs = num_multiprocessors(q.device.index)
    if -(-num_keys // 128) * num_key_heads * num_batches <= programs // 2:
        return "triton"
    stays = head_dim == 64 and not causal and max(num_queries, num_keys) <= STAYING_UNTIL
    if stays or num_heads != num_key_heads or head_dim not in SINGLE_PASS_HEAD_DIMS or hopper_single_unavailable():
        return "two passes"
    shape = (num_batches * num_heads, num_queries, num_keys, head_dim)
    return "one pass" if _hopper("_single").ordering_pays(*shape, causal, programs) else "two passes"


def flash_attention_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    scale: float,
    left: int = -1,
    right: int = -1,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    precision: str = "auto",
    impl: str = "triton",
    config: AttentionConfig | None = None,
    num_splits: int | None = None,
    kernels: str | None = None,
    grads: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Launches the backward kernels; returns the gradients of q, k and v, shaped as they are.

    `config` and `num_splits` as in `flash_attention_forward`; of dK and dV it is the queries that are shared. `kernels`
    is one of GLUON_BACKWARDS in place of what `resolve_backward` finds for "gluon". `grads` is where the gradients are
    written to, in place of room of their own.
    """
    if kernels is not None and kernels not in GLUON_BACKWARDS:
        raise ValueError(f"kernels must be None or one of {_names(map(repr, GLUON_BACKWARDS))}; got {kernels!r}")
    packing = _packing(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    precision = resolve_precision(q, precision, packed=packing is not None)
    layouts = (_layout(q), _layout(k), _layout(v), _layout(out), _layout(lse))
    room = None if grads is None else tuple(map(_layout, grads))
    options = (q.device, packing, scale, left, right, precision, config, num_splits, room)
    plan = _plan_backward(_layout(grad_out), *layouts, *options)
    if plan.copies_grad_out:
        # o.sum().backward() passes strides of zero: one copy costs less than loads of single elements.
        grad_out = grad_out.contiguous()
        plan = _plan_backward(_layout(grad_out), *layouts, *options)
    grads = grads or tuple(_empty(layout, x) for layout, x in zip(plan.grads, (q, k, v), strict=True))
    delta, lse_log2 = torch.empty(plan.statistics, dtype=torch.float32, device=q.device).unbind()
    with _on_device_of(q):
        plan.delta(out, grad_out, lse, delta, lse_log2, cu_seqlens_q)
        if impl == "gluon":
            causal = right == 0
            kernels = kernels or resolve_backward(q, k, impl, causal=causal)
            if kernels != "triton":
                tensors = (_with_heads(_tma_ready(x)) for x in (grad_out, q, k, v))
                results = (_with_heads(x) for x in grads)
                launcher = _hopper("_single" if kernels == "one pass" else "_backward").hopper_backward
                launcher(*tensors, lse_log2, delta, *results, scale=scale, causal=causal)
                return grads
        inputs = (q, k, v, grad_out)
        if plan.slices:
            inputs = plan.slices(*inputs)
        inputs = (*inputs, lse_log2, delta)
        if plan.joint is not None:
            plan.joint(*inputs, *grads[1:], grads[0])
            return grads
        parts_kv = plan.dkdv(inputs, grads[1:], (cu_seqlens_q, cu_seqlens_k))
        parts_q = plan.dq(inputs, grads[:1], (cu_seqlens_q, cu_seqlens_k))
        if plan.combine is not None:
            plan.combine(*parts_q, *parts_kv, *grads)
    return grads


# ---- checks ---------------------------------------------------------------------------------------------------


def _names(values) -> str:
    return ", ".join(str(value) for value in values)


def _is_small(q: Tensor) -> bool:
    """Whether the queries are so few that the Triton kernels take less time than Gluon's, or less time to launch."""
    num_tiles = triton.cdiv(q.shape[-2], 128) * math.prod(q.shape[:-2])
    return num_tiles <= (SMALL_AT_64 if q.shape[-1] == 64 else SMALL)


def resolve_impl(q: Tensor, impl: str = "auto", *, left: int = -1, right: int = -1, packed: bool = False) -> str:
    """Returns the implementation that `flash_attention` runs for these queries: what a record should name.

    Args:
        q: the queries; their device, dtype and head dimension decide.
        impl: one of IMPLS. "auto" is "gluon" on a Hopper GPU for what those kernels take (bf16 and fp16, head
            dimension 64, 72, 80, 96 or 128, no window, not packed) unless the queries are few, else "triton" on a CUDA
            device in a dtype that it takes, else "tiled".
        left, right: the mask's limits, −1 for none; (−1, 0) is causal.
        packed: whether sequences are packed.

    Raises:
        ValueError: an unknown name; an implementation named that cannot run these.
    """
    if impl not in IMPLS:
        raise ValueError(f"impl must be one of {_names(IMPLS)}; got {impl!r}")
    if impl == "auto" and (not q.is_cuda or q.dtype not in TRITON_DTYPES):
        return "tiled"
    if impl in ("auto", "gluon"):
        objection = None
        if q.dtype not in GLUON_DTYPES:
            objection = f"takes q, k and v of dtype {_names(GLUON_DTYPES)}; got {q.dtype}"
        elif q.shape[-1] not in GLUON_HEAD_DIMS:
            objection = f"takes head dimensions {_names(GLUON_HEAD_DIMS)}; got {q.shape[-1]}"
        elif packed or left >= 0 or right > 0:
            objection = f"takes no {'packed sequences' if packed else 'window'}"
        objection = objection or _gluon_objection(q.device)
        if objection is None:
            return "triton" if impl == "auto" and _is_small(q) else "gluon"
        if impl == "gluon":
            raise ValueError(f"impl='gluon' {objection}")
        return "triton"
    if impl == "triton":
        if not q.is_cuda and not IS_INTERPRETED:
            raise ValueError(f"impl='triton' takes q, k and v on a CUDA device; got {q.device} ('tiled' takes any)")
        if q.dtype not in TRITON_DTYPES:
            raise ValueError(f"impl='triton' takes q, k and v of dtype {_names(TRITON_DTYPES)}; got {q.dtype}")
    return impl


def resolve_precision(q: Tensor, precision: str = "auto", *, packed: bool = False) -> str:
    """Returns the products that the Triton kernels run in fp32, of PRECISIONS but "auto": what a record should name.

    Raises ValueError for a name that is none of PRECISIONS.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"precision must be one of {_names(PRECISIONS)}; got {precision!r}")
    head_dim = q.shape[-1]
    if head_dim > PRODUCTS_HEAD_DIM:
        return "tf32" if precision in ("tf32", "bf16x3") else "ieee"
    if q.dtype != torch.float32 or (q.is_cuda and not _is_hopper(q.device)):
        return {"auto": "tf32x3", "bf16x6": "tf32x3", "bf16x3": "tf32"}.get(precision, precision)
    if precision in ("auto", "tf32") and _is_hopper(q.device):
        num_queries = q.shape[0] if packed else q.shape[-2]
        if num_queries >= SLICES_QUERIES and q.numel() >= _by_head_dim(SLICES_FROM, head_dim) * head_dim:
            return {"auto": "bf16x6", "tf32": "bf16x3"}[precision]
    return "tf32x3" if precision == "auto" else precision


def _check_tensors(q: Tensor, k: Tensor, v: Tensor, packed: bool) -> None:
    """Raises for q, k and v that do not fit together."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor; got {type(x).__name__}")
        if packed and x.dim() != 3:
            raise ValueError(f"{name} must be (total, heads, d) with cu_seqlens; got shape {tuple(x.shape)}")
        if x.dim() not in (3, 4):
            raise ValueError(
                f"{name} must be (batch, length, d) or (batch, heads, length, d); got shape {tuple(x.shape)}"
            )
        if x.dtype not in TILED_DTYPES:
            raise ValueError(f"{name} must be of dtype {_names(TILED_DTYPES)}; got {x.dtype}")
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            raise ValueError(f"{name} must have the dtype of q, {q.dtype}; got {x.dtype}")
        if x.device != q.device:
            raise ValueError(f"{name} must be on the device of q, {q.device}; got {x.device}")
        if x.dim() != q.dim():
            raise ValueError(f"{name} must have as many dimensions as q, {q.dim()}; got shape {tuple(x.shape)}")
        if x.shape[-1] != q.shape[-1]:
            raise ValueError(f"{name} must have the head dimension of q, {q.shape[-1]}; got {x.shape[-1]}")
    if v.shape != k.shape:
        raise ValueError(f"v must have the shape of k, {tuple(k.shape)}; got {tuple(v.shape)}")
    if not 1 <= q.shape[-1] <= MAX_HEAD_DIM:
        raise ValueError(f"the head dimension of q must be 1 to {MAX_HEAD_DIM}; got {q.shape[-1]}")
    for name, x in (("q", q), ("k", k)):
        if x.numel() == 0:
            raise ValueError(f"{name} must hold at least one batch, head and row; got shape {tuple(x.shape)}")
    if not packed and k.shape[0] != q.shape[0]:
        raise ValueError(f"k must have the batch size of q, {q.shape[0]}; got {k.shape[0]}")
    heads = 1 if packed else -3
    if q.dim() == 4 or packed:
        num_heads, num_key_heads = q.shape[heads], k.shape[heads]
        if num_heads % num_key_heads:
            raise ValueError(f"the heads of k must divide those of q, {num_heads}; got {num_key_heads}")


def _check_cu_seqlens(cu_seqlens: Tensor, name: str, device: torch.device) -> None:
    """Raises for cumulative lengths of a wrong kind; their values are `_longest`'s, which has to read them."""
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype not in (torch.int32, torch.int64):
        got = cu_seqlens.dtype if isinstance(cu_seqlens, Tensor) else type(cu_seqlens).__name__
        raise TypeError(f"{name} must be an int32 or int64 tensor; got {got}")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
        shape = tuple(cu_seqlens.shape)
        raise ValueError(f"{name} must be of shape (batch + 1,) with a batch of at least one; got shape {shape}")
    if cu_seqlens.device != device:
        raise ValueError(f"{name} must be on the device of q, {device}; got {cu_seqlens.device}")
    if not cu_seqlens.is_contiguous():
        raise ValueError(f"{name} must be contiguous; got stride {cu_seqlens.stride(0)}")


def _check_packing(q: Tensor, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k) -> None:
    """Raises for arguments of a packed batch that do not fit together, or are given without one."""
    packed = cu_seqlens_q is not None or cu_seqlens_k is not None
    if packed:
        for name, cu_seqlens in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
            if cu_seqlens is None:
                raise ValueError(f"{name} must be given too: a packed batch takes both cu_seqlens_q and cu_seqlens_k")
            _check_cu_seqlens(cu_seqlens, name, q.device)
        if cu_seqlens_q.shape != cu_seqlens_k.shape:
            shapes = f"{tuple(cu_seqlens_q.shape)}; got {tuple(cu_seqlens_k.shape)}"
            raise ValueError(f"cu_seqlens_k must have the shape of cu_seqlens_q, {shapes}")
    for name, max_seqlen in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        if max_seqlen is not None and not packed:
            raise ValueError(f"{name} must be None without cu_seqlens_q and cu_seqlens_k; got {max_seqlen!r}")
        if max_seqlen is not None and (isinstance(max_seqlen, bool) or not isinstance(max_seqlen, int)):
            raise TypeError(f"{name} must be None or an int; got {type(max_seqlen).__name__}")


def _resolve(
    q: Tensor, k: Tensor, v: Tensor, packed: bool, causal, scale, window, precision, impl
) -> tuple[float, int, int, str, str]:
    """Returns (scale, left, right, precision, impl) as the operators take them; raises for bad ones."""
    _check_tensors(q, k, v, packed)
    left, right = _check_window(window, causal)
    impl = resolve_impl(q, impl, left=left, right=right, packed=packed)
    precision = resolve_precision(q, precision, packed=packed)
    return _check_scale(scale, q.shape[-1]), left, right, precision, impl


_resolved = {}


def _resolve_once(q: Tensor, k: Tensor, v: Tensor, asked: tuple) -> tuple[float, int, int, str, str, bool]:
    """`_resolve` without packing and window, remembered: it takes the host longer than a launch."""
    try:
        tensors = tuple((x.shape, x.dtype, x.device) for x in (q, k, v))
        # With types, since 1 and True are the same to a dictionary.
        key = (tensors, asked, tuple(map(type, asked)))
        options = _resolved.get(key)
    except (AttributeError, TypeError):
        # No tensors, or what has no hash: for the checks to say so.
        return _resolve(q, k, v, False, *asked)
    if options is None:
        if len(_resolved) >= REMEMBERED:
            _resolved.clear()
        options = _resolved[key] = _resolve(q, k, v, False, *asked)
    return options


# Reading the values waits for the device, so each tensor is read once per content (its version counts writes).
_lengths_seen = WeakTensorKeyDictionary()


def _longest(cu_seqlens: Tensor, which: str, total: int, max_seqlen: int | None) -> int:
    """Returns the longest sequence, max_seqlen where it is given; raises for cumulative lengths that cannot be."""
    name = f"cu_seqlens_{which}"
    key = (cu_seqlens._version, total)
    seen = _lengths_seen.get(cu_seqlens)
    if seen is None or seen[0] != key:
        values = cu_seqlens.tolist()
        if values[0] != 0:
            raise ValueError(f"{name} must start at 0; got {values[0]}")
        lengths = [end - begin for begin, end in itertools.pairwise(values)]
        if min(lengths) <= 0:
            index = next(index for index, length in enumerate(lengths) if length <= 0)
            raise ValueError(f"{name} must be increasing; got {values[index]} and then {values[index + 1]}")
        if values[-1] != total:
            raise ValueError(f"{name} must end at the number of rows of {which}, {total}; got {values[-1]}")
        seen = (key, max(lengths))
        _lengths_seen[cu_seqlens] = seen
    if max_seqlen is None:
        return seen[1]
    if max_seqlen < seen[1]:
        raise ValueError(f"max_seqlen_{which} must be at least the longest sequence, {seen[1]}; got {max_seqlen}")
    return max_seqlen


def _check_window(window, causal: bool) -> tuple[int, int]:
    """Returns (left, right), −1 without limit, of a window and the causal flag."""
    if window is None:
        window = (-1, -1)
    elif isinstance(window, int) and not isinstance(window, bool):
        window = (window, window)
    accepted = isinstance(window, tuple | list) and len(window) == 2
    if not accepted or any(isinstance(w, bool) or not isinstance(w, int) or w < -1 for w in window):
        raise ValueError(
            f"window must be None, a number of keys to each side, or (left, right) with −1 for no limit; got {window!r}"
        )
    left, right = window
    return left, (0 if right < 0 else min(right, 0)) if causal else right


def _check_scale(scale, head_dim: int) -> float:
    if scale is None:
        return 1 / math.sqrt(head_dim)
    if isinstance(scale, bool) or not isinstance(scale, float | int):
        raise TypeError(f"scale must be None or a positive finite number; got {type(scale).__name__}")
    if not 0 < scale < math.inf:
        raise ValueError(f"scale must be None or a positive finite number; got {scale}")
    return float(scale)


# ---- autograd -------------------------------------------------------------------------------------------------


class FlashAttention(torch.autograd.Function):
    """Attention by the Triton kernels, `apply(q, k, v, is_causal=False)`, scale 1/√D.

    q is (batch, n_queries, d) or (batch, heads, n_queries, d), k and v likewise with n_keys, on a CUDA device. Saved
    for backward: q, k, v, the output, and one tensor of shape (batch[, heads], n_queries), the log-sum-exp in natural
    units. `flash_attention` is the same with every option, and what torch.compile takes.

    Error budget: outputs 2×, gradients 3× those of eager attention in the same dtype, against fp64.
    """

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
        _check_tensors(q, k, v, packed=False)
        resolve_impl(q, "triton")
        ctx.mask = {"scale": 1 / math.sqrt(q.shape[-1]), "left": -1, "right": 0 if is_causal else -1}
        out, lse = flash_attention_forward(q, k, v, **ctx.mask)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        return *flash_attention_backward(grad_out, *ctx.saved_tensors, **ctx.mask), None


def _sequences(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor):
    """Yields the slices of the queries and of the keys of each sequence of a packed batch."""
    ends_q, ends_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for (begin_q, end_q), (begin_k, end_k) in zip(itertools.pairwise(ends_q), itertools.pairwise(ends_k), strict=True):
        yield slice(begin_q, end_q), slice(begin_k, end_k)


def _rows(x: Tensor, rows: slice) -> Tensor:
    """One sequence of a packed (total, H, D) as (1, H, S, D)."""
    return x[rows].transpose(0, 1).unsqueeze(0)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None, max_seqlen_k: int | None, scale: float, left: int, right: int, precision: str, impl: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    packing = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    packing |= {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
    mask = {"scale": scale, "left": left, "right": right}
    if impl in ("triton", "gluon"):
        return flash_attention_forward(q, k, v, precision=precision, impl=impl, **mask, **packing)
    out, lse = _empty_outputs(q, cu_seqlens_q is not None)
    if cu_seqlens_q is None:
        tiled_out, tiled_lse = tiled_attention_forward(q, k, v, **mask)
        return out.copy_(tiled_out), lse.copy_(tiled_lse)
    _packing(q, k, **packing)
    for rows_q, rows_k in _sequences(cu_seqlens_q, cu_seqlens_k):
        tiled_out, tiled_lse = tiled_attention_forward(_rows(q, rows_q), _rows(k, rows_k), _rows(v, rows_k), **mask)
        out[rows_q] = tiled_out[0].transpose(0, 1)
        lse[:, rows_q] = tiled_lse[0]
    return out, lse


_forward_op = torch.library.custom_op("labkit::flash_attention_forward", _forward, mutates_args=())


def _empty_like_layout(x: Tensor) -> Tensor:
    """Returns room for `_Layout.dense`; x may be a tensor without an address."""
    layout = _Layout(x.shape, x.stride(), x.dtype, True).dense()
    return torch.empty_strided(layout.shape, layout.strides, dtype=x.dtype, device=x.device)


def _empty_outputs(q: Tensor, packed: bool) -> tuple[Tensor, Tensor]:
    lse_shape = (q.shape[1], q.shape[0]) if packed else q.shape[:-1]
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return _empty_like_layout(q), torch.empty(lse_shape, dtype=lse_dtype, device=q.device)


@_forward_op.register_fake
def _(q, k, v, cu_seqlens_q, *_):
    return _empty_outputs(q, cu_seqlens_q is not None)


def _gradients(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None, max_seqlen_q: int | None, max_seqlen_k: int | None, scale: float, left: int,
    right: int, precision: str, impl: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    mask = {"scale": scale, "left": left, "right": right}
    if impl in ("triton", "gluon"):
        packing = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
        packing |= {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k, "precision": precision, "impl": impl}
        return flash_attention_backward(grad_out, q, k, v, out, lse, **mask, **packing)
    grads = tuple(_empty_like_layout(x) for x in (q, k, v))
    if cu_seqlens_q is None:
        tiled_grads = tiled_attention_backward(grad_out, q, k, v, out, lse, **mask)
        return tuple(grad.copy_(tiled) for grad, tiled in zip(grads, tiled_grads, strict=True))
    for rows_q, rows_k in _sequences(cu_seqlens_q, cu_seqlens_k):
        arguments = ((grad_out, rows_q), (q, rows_q), (k, rows_k), (v, rows_k), (out, rows_q))
        statistics = lse[:, rows_q].unsqueeze(0)
        tiled_grads = tiled_attention_backward(*(_rows(x, rows) for x, rows in arguments), statistics, **mask)
        for grad, tiled, rows in zip(grads, tiled_grads, (rows_q, rows_k, rows_k), strict=True):
            grad[rows] = tiled[0].transpose(0, 1)
    return grads


_backward_op = torch.library.custom_op("labkit::flash_attention_backward", _gradients, mutates_args=())


@_backward_op.register_fake
def _(grad_out, q, k, v, *_):
    return _empty_like_layout(q), _empty_like_layout(k), _empty_like_layout(v)


def _setup_context(ctx, inputs, output) -> None:
    q, k, v, cu_seqlens_q, cu_seqlens_k, *ctx.options = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k)


def _backward(ctx, grad_out: Tensor, _grad_lse):
    grads = _backward_op(grad_out, *ctx.saved_tensors, *ctx.options)
    return *grads, *(None,) * (2 + len(ctx.options))


_forward_op.register_autograd(_backward, setup_context=_setup_context)


class TransformedFlashAttention(torch.autograd.Function):
    """The operators under torch.func, which takes functions whose context is set up apart, and no custom operator."""

    forward = staticmethod(_forward)
    setup_context = staticmethod(_setup_context)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out: Tensor, _grad_lse):
        return *_gradients(grad_out, *ctx.saved_tensors, *ctx.options), *(None,) * (2 + len(ctx.options))


class EagerFlashAttention(torch.autograd.Function):
    """The operators without the way through the dispatcher, which takes a custom operator longer than its launch.

    A context that is set up apart would cost as much: its function is bound to its signature anew in every call. The
    options are one argument, since every argument costs time of its own.
    """

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q, cu_seqlens_k, options: tuple) -> Tensor:
        out, lse = _forward(q, k, v, cu_seqlens_q, cu_seqlens_k, *options)
        ctx.options = options
        ctx.save_for_backward(q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out: Tensor):
        return *_gradients(grad_out, *ctx.saved_tensors, *ctx.options), None, None, None


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
        q: (batch, heads, n_queries, d) or (batch, n_queries, d), or with cu_seqlens (total, heads, d); fp32, bf16,
            fp16, or fp64 (tiled only); any strides; d from 1 to 256.
        k, v: as q, with n_keys rows; their heads divide those of q, and query head h reads key head
            h // (heads / key heads).
        causal: query i sees keys up to i + (n_keys − n_queries), aligned to the bottom right.
        scale: positive, of the scores; None is 1/√d.
        cu_seqlens_q, cu_seqlens_k: cumulative lengths of the sequences of a packed batch, (batch + 1,) int32 or
            int64: from 0, increasing, to the number of rows. Both or neither.
        max_seqlen_q, max_seqlen_k: the longest sequence, where it is known; else it is read from the device, which
            waits for it, once per tensor.
        window: how many keys a query sees to each side of its own on the diagonal, or (left, right); −1 is no limit.
        precision: of products of fp32: "ieee" on the CUDA cores; "tf32x3", three products on the tensor cores for one,
            which hold 22 bits; "bf16x6", six of bf16 between three slices of each operand, which hold 24; "tf32", one
            of 11 bits, outside the error budget of fp32; "bf16x3", three of bf16 between two slices, which hold 16;
            "auto", "bf16x6" on Hopper where queries are many, else "tf32x3", and "tf32" is "bf16x3" there. Elsewhere
            those of bf16 are "tf32x3" and "tf32". Past d 128 the last two are "tf32" and all others "ieee". For slices
            q, k, v and the gradient of the output are copied, half as large again or as large. "triton" only.
        impl: "gluon" (Hopper), "triton" (CUDA), "tiled" (plain PyTorch, any device) or "auto"; see `resolve_impl`.

    Returns:
        The output, shaped as q and of its dtype (of the autocast dtype under autocast); zeros for a query that sees
        no key, which gets and gives zero gradients. Gradients are equal bit for bit between runs.

    Raises:
        ValueError, TypeError: arguments that do not fit, by name.

    Error budget: outputs 2×, gradients 3× those of eager attention in the same dtype, against fp64.

    Source: Dao 2023, "FlashAttention-2", algorithms 1 and 2.
    """
    packed = cu_seqlens_q is not None or cu_seqlens_k is not None
    if isinstance(q, Tensor) and torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = (x.to(dtype) if isinstance(x, Tensor) and x.dtype in TRITON_DTYPES else x for x in (q, k, v))
    asked = (causal, scale, window, precision, impl)
    if packed or window is not None or torch.compiler.is_compiling():
        options = _resolve(q, k, v, packed, *asked)
    else:
        options = _resolve_once(q, k, v, asked)
    if packed or (max_seqlen_q, max_seqlen_k) != (None, None):
        _check_packing(q, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    tensors = (q, k, v, cu_seqlens_q, cu_seqlens_k)
    options = (max_seqlen_q, max_seqlen_k, *options)
    # Whatever looks at operators (a compiler, a mode, a subclass of tensors) is shown one.
    if torch.compiler.is_compiling() or is_in_torch_dispatch_mode() or type(q) not in (Tensor, Parameter):
        return _forward_op(*tensors, *options)[0]
    if torch._C._are_functorch_transforms_active():
        return TransformedFlashAttention.apply(*tensors, *options)[0]
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return EagerFlashAttention.apply(*tensors, options)
    return _forward(*tensors, *options)[0]
