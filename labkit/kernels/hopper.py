"""What the Gluon kernels for Hopper share: the layouts and descriptors of their tiles, the registers of their warps.

Gluon is experimental and its interface moves between releases of Triton: the names that moved are settled here, and
`hopper_unavailable` of flash_attention.py says whether the kernels load with the installed one.
"""

import functools
import math

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from labkit.kernels.launch import REMEMBERED, Launch

ROWS = 64  # of a consumer warpgroup: those of one wgmma

LOG2_E = math.log2(math.e)
LN_2 = gl.constexpr(math.log(2))

# Releases of Triton before 3.8 have these operations under other names.
async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
async_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global

# Columns past the first 64, by head dimension: products of 64 and of 16 or 32 columns cost what 80 or 96 do, where one
# tile, a power of two wide, would be padded to 128.
TAILS = {64: 0, 72: 16, 80: 16, 96: 32, 128: 0}

# By the number of consumers: the warps' equal shares of the register file at the start, and what a consumer has of it
# once the warps that only move tiles have given all but 24 of their own away.
START_REGISTERS = {2: 168, 3: 128}
CONSUMER_REGISTERS = {2: 240, 3: 160}
PRODUCER_REGISTERS = gl.constexpr(24)


def launch_options(consumers: int) -> dict[str, int]:
    """Returns the options of a launch, with what its kernel takes as REGISTERS."""
    return {"num_warps": 4, "maxnreg": START_REGISTERS[consumers], "REGISTERS": CONSUMER_REGISTERS[consumers]}


@functools.lru_cache(maxsize=REMEMBERED)
def _launch_of(
    kernel, grid: tuple[int, ...], dtype: torch.dtype, device_index: int, constants: tuple, consumers: int
) -> Launch:
    """Returns the launch that these name; dtype and device only tell one from another."""
    return Launch(kernel, grid, {**dict(constants), **launch_options(consumers)})


def launch(kernel, grid: tuple[int, ...], dtype: torch.dtype, arguments: tuple, constants: dict, consumers: int):
    """Launches a kernel whose parameters are the arguments and then the constants.

    What else the launch could depend on is fixed: lengths are not specialised, statistics are aligned.
    """
    device_index = torch.cuda.current_device()
    _launch_of(kernel, grid, dtype, device_index, tuple(constants.items()), consumers)(*arguments)


# ---- numbers of walks -------------------------------------------------------------------------------------------


@gluon.jit
def place_of(index, num_tiles, num_heads, section):
    """The head (of all batches) and the tile that a number stands for.

    The heads of a section take turns, tile by tile; the next section follows when all of their tiles are given out.
    """
    first = index // (section * num_tiles) * section
    width = gl.minimum(section, num_heads - first)
    place = index - first * num_tiles
    return first + place % width, place // width


@gluon.jit
def hand_number(number, turn, number_s, full):
    """Hands this turn's number on; turns have two slots, and whoever hands on awaits that the slot is empty."""
    number_s.index(turn & 1).store(gl.full([1], number, gl.int32, layout=gl.BlockedLayout([1], [32], [1], [0])))
    mbarrier.arrive(full.index(turn & 1), count=1)


@gluon.jit
def handed_number(turn, number_s):
    """This turn's number, which has been awaited."""
    return gl.max(number_s.index(turn & 1).load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0])), 0)


@gluon.jit
def await_number(turn, number_s, full):
    """This turn's number, once it is there."""
    mbarrier.wait(full.index(turn & 1), (turn >> 1) & 1)
    return handed_number(turn, number_s)


# ---- tiles ------------------------------------------------------------------------------------------------------


@functools.cache
def tile_layout() -> gl.NVMMASharedLayout:
    """The layout of 64 or 128 columns."""
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)


@functools.cache
def tail_layout(tail: int) -> gl.NVMMASharedLayout:
    """The layout of the last columns of a head dimension that is no power of two: 16 or 32 of them."""
    return gl.NVMMASharedLayout(swizzle_byte_width=2 * tail, element_bitwidth=16, rank=4)


@functools.cache
def row_layout() -> gl.NVMMASharedLayout:
    """The layout of a row of fp32 statistics."""
    return gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)


@functools.lru_cache(maxsize=REMEMBERED)
def _template(shape: tuple, strides: tuple, dtype: torch.dtype, block: tuple, layout) -> TensorDescriptor:
    """Returns the descriptor of a tensor without elements in place of its own; the checks take longer than a launch."""
    # A dimension of one element may have any stride, of which TMA would still ask for a multiple of 16 bytes.
    outer = [shape[-1] if size == 1 else stride for size, stride in zip(shape[:-1], strides[:-1], strict=True)]
    return TensorDescriptor(torch.empty(0, dtype=dtype), list(shape), [*outer, 1], list(block), layout)


def _described(x: Tensor, block: tuple[int, ...], layout: gl.NVMMASharedLayout) -> TensorDescriptor:
    """Describes tiles of a tensor that starts on a 16-byte boundary."""
    descriptor = object.__new__(TensorDescriptor)
    descriptor.__dict__.update(_template(x.shape, x.stride(), x.dtype, block, layout).__dict__)
    descriptor.base = x
    return descriptor


def tiles_of(x_BHSD: Tensor, num_rows: int) -> TensorDescriptor:
    """Describes tiles of (1, 1, num_rows, 64 or 128) that never cross into the next head."""
    return _described(x_BHSD, (1, 1, num_rows, 128 if x_BHSD.shape[-1] == 128 else 64), tile_layout())


def tail_of(x_BHSD: Tensor, num_rows: int, tail: int) -> TensorDescriptor | None:
    """Describes the columns from 64 on: tiles of (1, 1, num_rows, tail), zeros past the head dimension."""
    return _described(x_BHSD, (1, 1, num_rows, tail), tail_layout(tail)) if tail else None


def described_with_tails(tensors: list[tuple[Tensor, int]], tail: int) -> list[TensorDescriptor | None]:
    """Describes tiles of so many rows of each tensor, each followed by its tail, or by None without one."""
    return [part for x, num_rows in tensors for part in (tiles_of(x, num_rows), tail_of(x, num_rows, tail))]


def rows_of(statistics: Tensor, num_rows: int) -> TensorDescriptor:
    """Describes runs of num_rows row statistics, of all heads one after another."""
    return _described(statistics.view(-1), (num_rows,), row_layout())


@gluon.jit
def to_low(x, DTYPE: gl.constexpr):
    """x in 16 bits, two values by one instruction; Triton's own conversion takes three for them."""
    if DTYPE == gl.bfloat16:
        low = gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=gl.bfloat16, is_pure=True, pack=2
        )
    else:
        low = gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=gl.float16, is_pure=True, pack=2
        )
    return low
