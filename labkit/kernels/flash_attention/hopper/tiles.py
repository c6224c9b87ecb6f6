"""What the Gluon kernels for Hopper share: the layouts and descriptors of their tiles, the
registers of their warps.

Gluon is experimental and its interface moves between releases of Triton: the names that moved are
settled here, and `not_loading` of ../tiles.py says whether the kernels load with the installed
one.
"""

import copy
import functools
import inspect
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language import core

from labkit.kernels.flash_attention.plan import Layout
from labkit.kernels.launch import Launch, is_hooked, unhooked

ROWS = 64  # of a consumer warpgroup: those of one wgmma

LOG2_E = math.log2(math.e)
LN_2 = gl.constexpr(math.log(2))

# Releases of Triton before 3.8 have these operations under other names.
async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
async_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global

Value = core.base_value
"""What a field of `shared_by_warps` is: a tensor or a number, a descriptor, shared memory, or a
constant.
"""


def shared_by_warps(cls: type) -> type:
    """Makes a class of annotated fields what a kernel hands to its warps as one argument.

    It is Gluon's aggregate, whose constructor takes the fields in their order by itself only from
    Triton 3.9 on. A tuple would do but for its constants, which it loses once it has a name.
    """
    names = list(cls.__annotations__)

    def fill(self, *values) -> None:
        for name, value in zip(names, values, strict=True):
            setattr(self, name, value if isinstance(value, Value) else gl.constexpr(value))

    fill.__triton_builtin__ = True
    cls.__init__ = fill
    return core._aggregate(cls)


# Columns past the first 64, by head dimension: products of 64 and of 16 or 32 columns cost what 80
# or 96 do, where one tile, a power of two wide, would be padded to 128.
TAILS = {64: 0, 72: 16, 80: 16, 96: 32, 128: 0}

# By the number of consumers: the warps' equal shares of the register file at the start, and what a
# consumer has of it once the warps that only move tiles have given all but 24 of their own away.
START_REGISTERS = {2: 168, 3: 128}
CONSUMER_REGISTERS = {2: 240, 3: 160}
PRODUCER_REGISTERS = gl.constexpr(24)

MOST_MAPS = 16384  # kept for a launch


def launch_options(consumers: int) -> dict[str, int]:
    """Returns the options of a launch, with what its kernel takes as REGISTERS."""
    return {
        "num_warps": 4,
        "maxnreg": START_REGISTERS[consumers],
        "REGISTERS": CONSUMER_REGISTERS[consumers],
    }


@gluon.constexpr_function
def product_layout(columns):
    """The layout of a warpgroup's product of so many columns, 64 rows of it."""
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16]
    )


@gluon.jit
def barrier():
    """Room for a barrier, which has yet to be initialised."""
    return gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())


@gluon.jit
def barriers(NUM: gl.constexpr):
    """Room for so many barriers, which have yet to be initialised."""
    return gl.allocate_shared_memory(gl.int64, [NUM, 1], mbarrier.MBarrierLayout())


@gluon.jit
def decode_tile(index, num_tiles, num_heads, section):
    """The head (of all batches) and the tile that a number stands for.

    The heads of a section take turns, tile by tile; the next section follows when all of their
    tiles are given out.
    """
    first = index // (section * num_tiles) * section
    width = gl.minimum(section, num_heads - first)
    place = index - first * num_tiles
    return first + place % width, place // width


@gluon.jit
def hand_number(number, turn, number_s, full):
    """Hands this turn's number on; turns have two slots, and whoever hands on awaits that the slot
    is empty.
    """
    number_s.index(turn & 1).store(
        gl.full([1], number, gl.int32, layout=gl.BlockedLayout([1], [32], [1], [0]))
    )
    mbarrier.arrive(full.index(turn & 1), count=1)


@gluon.jit
def handed_number(turn, number_s):
    """This turn's number, which has been awaited."""
    return gl.max(
        number_s.index(turn & 1).load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0])), 0
    )


@gluon.jit
def await_number(turn, number_s, full):
    """This turn's number, once it is there."""
    mbarrier.wait(full.index(turn & 1), (turn >> 1) & 1)
    return handed_number(turn, number_s)


@functools.cache
def tile_layout() -> gl.NVMMASharedLayout:
    """The layout of 64 or 128 columns."""
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)


@functools.cache
def tail_layout(tail: int) -> gl.NVMMASharedLayout:
    """The layout of the last columns of a head dimension that is no power of two: 16 or 32 of
    them.
    """
    return gl.NVMMASharedLayout(swizzle_byte_width=2 * tail, element_bitwidth=16, rank=4)


@functools.cache
def row_layout() -> gl.NVMMASharedLayout:
    """The layout of a row of fp32 statistics."""
    return gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)


def described_as(
    shape: tuple, strides: tuple, dtype: torch.dtype, block: tuple, layout
) -> TensorDescriptor:
    """Describes tiles of a tensor whose place a tensor without elements takes."""
    # A dimension of one element may have any stride, of which TMA would still ask for a multiple of
    # 16 bytes.
    outer = [
        shape[-1] if size == 1 else stride
        for size, stride in zip(shape[:-1], strides[:-1], strict=True)
    ]
    return TensorDescriptor(
        torch.empty(0, dtype=dtype), list(shape), [*outer, 1], list(block), layout
    )


def tiles_of(x_BHSD: Layout, num_rows: int) -> TensorDescriptor:
    """Describes tiles of (1, 1, num_rows, 64 or 128) that never cross into the next head."""
    block = (1, 1, num_rows, 128 if x_BHSD.shape[-1] == 128 else 64)
    return described_as(x_BHSD.shape, x_BHSD.strides, x_BHSD.dtype, block, tile_layout())


def with_tails(
    tensors: list[tuple[Layout, int]], tail: int
) -> list[tuple[int, TensorDescriptor | None]]:
    """Describes tiles of so many rows of each tensor, by its number, each time followed by those of
    its tail.

    Those are (1, 1, num_rows, tail) of the columns from 64 on, zeros past the head dimension; None
    without a tail.
    """
    found = []
    for number, (x, num_rows) in enumerate(tensors):
        block, layout = (1, 1, num_rows, tail), tail_layout(tail) if tail else None
        found.append((number, tiles_of(x, num_rows)))
        found.append(
            (number, described_as(x.shape, x.strides, x.dtype, block, layout) if tail else None)
        )
    return found


def rows_of(num_elements: int, num_rows: int) -> TensorDescriptor:
    """Describes runs of num_rows row statistics, of all heads one after another."""
    return described_as((num_elements,), (1,), torch.float32, (num_rows,), row_layout())


class TileLaunch:
    """The launch of a kernel whose first parameters are tiles: it is called with the tensors, then
    with what follows.

    Triton describes tiles to the device by tensor maps, up to 14 of them, and encodes each anew in
    every call. With the layout fixed a map depends on the address alone, so those of the addresses
    seen are kept.
    """

    def __init__(
        self,
        kernel,
        grid: tuple[int, ...],
        tiles: list,
        numbers: tuple,
        constants: dict,
        consumers: int,
    ):
        """`tiles`: which of a call's tensors each parameter is of, and its description, None where
        it is left out.
        """
        self.launch, self.tiles = (
            Launch(kernel, grid, constants | launch_options(consumers), numbers),
            tiles,
        )
        self.run: Callable[..., None] | None = None
        self.encode: Callable[[int, TensorDescriptor], list] | None = None
        self.maps: dict[tuple[int, int], list] = {}

    def __call__(self, tensors: Sequence[Tensor], *others) -> None:
        if self.encode is None or is_hooked():
            self.launch(*(_of(tiles, tensors[which]) for which, tiles in self.tiles), *others)
            if self.launch.compiled is not None and self.run is None:
                self.run, self.encode = _mapped(self.launch)
            return
        addresses, arguments, place = [x.data_ptr() for x in tensors], [], 0
        for which, tiles in self.tiles:
            if tiles is None:
                arguments.append(None)
                continue
            arguments += self.maps.get((place, addresses[which])) or self._map(
                place, _of(tiles, tensors[which])
            )
            place += 1
        self.run(*arguments, *others, *self.launch.last)

    def _map(self, place: int, tiles: TensorDescriptor) -> list:
        if len(self.maps) >= MOST_MAPS:
            self.maps.clear()
        found = self.maps[place, tiles.base.data_ptr()] = self.encode(place, tiles)
        return found


def _of(tiles: TensorDescriptor | None, x: Tensor) -> TensorDescriptor | None:
    """Returns these tiles of a tensor that starts on a 16-byte boundary; Triton's checks take
    longer than a launch.
    """
    if tiles is None:
        return None
    descriptor = object.__new__(TensorDescriptor)
    descriptor.__dict__.update(tiles.__dict__, base=x)
    return descriptor


def _mapped(
    launch: Launch,
) -> tuple[Callable[..., None], Callable[[int, TensorDescriptor], list] | None]:
    """Returns what runs a compiled kernel on encoded tiles, and what encodes them, by their place
    among all.

    The second is None where Triton does so elsewhere than in its releases 3.6 to 3.9.
    """
    run = launch.compiled.run
    try:
        names = inspect.getclosurevars(run.launch)
        names = {**names.globals, **names.nonlocals}
        launcher, encode, facts = (
            names[x] for x in ("launcher", "make_tensordesc_arg", "tensordesc_meta")
        )
        unused = (None,) * (encode.__code__.co_argcount - 2)
    except (AttributeError, KeyError, TypeError):
        return launch.run, None
    if not facts or None in facts:
        return launch.run, None
    plain = copy.copy(run)
    plain.launch = launcher
    return unhooked(launch.compiled, launch.grid, plain), lambda number, tiles: encode(
        tiles, facts[number], *unused
    )


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
