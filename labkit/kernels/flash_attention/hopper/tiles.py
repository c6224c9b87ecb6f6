"""What the Gluon kernels for Hopper share: tiles in shared memory and who waits for whom, products
of tiles, the descriptors that a launch takes.

A head dimension between 64 and 128 comes in two parts, 64 columns and a tail of 16 or 32, each with
its descriptors, tiles, products and accumulators: what has columns is a tuple of its parts, of one
part where there is no tail.

Gluon is experimental and its interface moves between releases of Triton: the names that moved are
settled here, and `not_loading` of ../tiles.py says whether the kernels load with the installed
one.
"""

import copy
import math

import torch
from torch import Tensor
from triton.backends.nvidia import driver
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language import core

from labkit.kernels.flash_attention.plan import Layout
from labkit.kernels.launch import REMEMBERED, Launch

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

# The order of work tiles. What a step of a program reads, 64 KiB at D 128 (forward K and V of 128
# keys for 8.4 MFLOP; backward Q, dO and the sum of dQ of 64 queries for 10.5, and the sum is
# written back), is 42 and 60 GB/s a program at 690 and 570 TFLOP/s. 132 programs that share
# nothing ask for 5.5 and 8 TB/s of an H100's 3.35: 2, 32, 32768, 128 causal ran at 406 and 315
# TFLOP/s, and has 725 and 641 in this order, as many as 16 heads. So SHARERS programs or more work
# on one head, near one another: the L2 cache holds what is between them. Fewer heads read less;
# but programs of a head's backward wait for one another, and the last tiles of a section are too
# few to end together.
SHARERS = 6

# Plain numbers to the kernels: a length of 1, or one divisible by 16, is no reason to compile them
# anew.
LENGTHS = ("num_heads", "num_heads_total", "group", "num_queries", "num_keys", "section", "run")
LENGTHS += ("num_splits", "padded_queries", "num_tiles", "first_tile", "num_work_tiles")

# By the number of consumers: the warps' equal shares of the register file at the start, and what a
# consumer has of it once the warps that only move tiles have given all but 24 of their own away.
START_REGISTERS = {2: 168, 3: 128}
CONSUMER_REGISTERS = {2: 240, 3: 160}
PRODUCER_REGISTERS = gl.constexpr(24)


@gluon.constexpr_function
def product_layout(columns):
    """The layout of a warpgroup's product of so many columns, 64 rows of it."""
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16]
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


@gluon.jit
def barriers(NUM: gl.constexpr, COUNT: gl.constexpr):
    """So many barriers, whose phases end when so many have arrived."""
    found = gl.allocate_shared_memory(gl.int64, [NUM, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUM):
        mbarrier.init(found.index(i), count=COUNT)
    return found


ARRIVE = gl.constexpr("bar.arrive $1, $2; mov.u32 $0, 0;")
AWAIT = gl.constexpr("bar.sync $1, $2; mov.u32 $0, 0;")


@gluon.jit
def at_hardware_barrier(OPERATION: gl.constexpr, barrier, num_threads):
    """Counts the warps at work at one of the 16 hardware barriers, and with AWAIT waits for all."""
    NUM_WARPS: gl.constexpr = gl.num_warps()
    ONCE_A_THREAD: gl.constexpr = gl.BlockedLayout([1], [32], [NUM_WARPS], [0])
    barriers = gl.full([32 * NUM_WARPS], barrier, gl.int32, layout=ONCE_A_THREAD)
    gl.inline_asm_elementwise(
        OPERATION, "=r,r,r", [barriers, num_threads], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def parts(desc, tail_desc):
    """The descriptors of a tensor's columns: those of the first 64 or 128, and of the tail if there
    is one.
    """
    if tail_desc is None:
        return (desc,)
    else:
        return (desc, tail_desc)


@shared_by_warps
class Ring:
    """Tiles in shared memory, each a tuple of its parts, used in turn.

    One warp loads the tiles j = 0, 1, …, each once its place is empty; whoever reads one waits for
    it and releases it. With a tile come the statistics of its rows if there are any.

    Places are released at barriers in shared memory, before which Gluon has the warpgroup meet, or
    at hardware barriers from FIRST on, where no warp waits for another. Triton itself uses those up
    to 5.
    """

    descs: Value
    tiles: Value
    row_desc: Value
    rows: Value
    full: Value
    empty: Value
    NUM: Value
    FIRST: Value
    THREADS: Value

    @gluon.jit
    def load(self, j, batch, head, row, row_total=0):
        """`row_total`: the row's number among those of all heads, where its statistics are."""
        NBYTES: gl.constexpr = (
            self.descs[0].block_type.nbytes
            + (self.descs[1].block_type.nbytes if len(self.descs) == 2 else 0)
            + (0 if self.row_desc is None else self.row_desc.block_type.nbytes)
        )
        place = j % self.NUM
        full = self.full.index(place)
        if self.FIRST is None:
            mbarrier.wait(self.empty.index(place), ((j // self.NUM) & 1) ^ 1)
        elif j >= self.NUM:
            at_hardware_barrier(AWAIT, self.FIRST + place, self.THREADS)
        mbarrier.expect(full, NBYTES)
        for i in gl.static_range(len(self.descs)):
            tile = self.tiles[i].index(place)
            async_load(self.descs[i], [batch, head, row, i * 64], full, tile)
        if self.row_desc is not None:
            async_load(self.row_desc, [row_total], full, self.rows.index(place))

    @gluon.jit
    def wait(self, j):
        mbarrier.wait(self.full.index(j % self.NUM), (j // self.NUM) & 1)

    @gluon.jit
    def release(self, j, pred=True):
        place = j % self.NUM
        if self.FIRST is None:
            mbarrier.arrive(self.empty.index(place), count=1, pred=pred)
        else:
            at_hardware_barrier(ARRIVE, self.FIRST + place, self.THREADS)

    @gluon.jit
    def whole(self, place):
        """The tile in a place, as it is loaded and stored."""
        return [part.index(place) for part in self.tiles]

    @gluon.jit
    def at(self, place):
        """The tile in a place, as (rows, columns)."""
        return [part.reshape([part.shape[2], part.shape[3]]) for part in self.whole(place)]

    @gluon.jit
    def tile(self, j):
        return self.at(j % self.NUM)


@gluon.jit
def room(desc, NUM: gl.constexpr):
    """Shared memory for so many tiles."""
    shape: gl.constexpr = [NUM] + desc.block_type.shape  # noqa: RUF005 (no such syntax in kernels)
    return gl.allocate_shared_memory(desc.dtype, shape, desc.layout)


@gluon.jit
def ring(
    descs, NUM: gl.constexpr, READERS: gl.constexpr, row_desc=None, FIRST: gl.constexpr = None
):
    """An empty `Ring` with room for so many tiles, each released by so many warpgroups."""
    tiles = [room(desc, NUM) for desc in descs]
    rows = None
    if row_desc is not None:
        rows = room(row_desc, NUM)
    full = barriers(NUM, 1)
    empty = barriers(NUM, READERS) if FIRST is None else None
    THREADS: gl.constexpr = 128 * READERS + 32  # those that release a place, and the loading warp
    return Ring(descs, tiles, row_desc, rows, full, empty, NUM, FIRST, THREADS)


@gluon.jit
def accumulator(COLUMNS: gl.constexpr):
    """Zeros for 64 rows of a product with so many columns."""
    return gl.zeros([64, COLUMNS], gl.float32, layout=product_layout(COLUMNS))


@gluon.jit
def accumulators(tile):
    """Zeros for 64 rows of a product with as many columns as the tile."""
    return [accumulator(gl.constexpr(part.shape[1])) for part in tile]


@gluon.jit
def times_transposed(a, b, registers):
    """A Bᵀ, a sum over the columns of both, in flight in registers whose values are no longer of
    use.
    """
    product = warpgroup_mma(a[0], b[0].permute((1, 0)), registers, use_acc=False, is_async=True)
    for i in gl.static_range(1, len(a)):
        product = warpgroup_mma(a[i], b[i].permute((1, 0)), product, is_async=True)
    return product


@gluon.jit
def plus_product(a, b, acc, use_acc=True):
    """acc + A B, in flight, with the columns of B; A is no tuple. Without `use_acc` just A B."""
    first = warpgroup_mma(a, b[0], acc[0], use_acc=use_acc, is_async=True)
    if len(b) == 1:
        return (first,)
    else:
        return (first, warpgroup_mma(a, b[1], acc[1], use_acc=use_acc, is_async=True))


@gluon.jit
def finished(acc, LATER: gl.constexpr):
    """Accumulators whose products are done, while so many later ones are in flight."""
    if len(acc) == 1:
        return (warpgroup_mma_wait(LATER, deps=acc),)
    else:
        return warpgroup_mma_wait(LATER, deps=acc)


@gluon.jit
def store(acc, tile, descs, batch, head, row):
    """Starts to write accumulators, through a tile in shared memory, to 64 rows of a tensor; those
    past its end are left out.
    """
    for i in gl.static_range(len(tile)):
        part = tile[i].reshape([64, tile[i].shape[3]])
        part.store(to_low(acc[i], part.dtype))
    fence_async_shared()
    for i in gl.static_range(len(tile)):
        async_store(descs[i], [batch, head, row, i * 64], tile[i])


@gluon.jit
def counting(NUM: gl.constexpr):
    """The numbers from 0 on in shared memory, for masks: as constants they would stay in registers
    through a loop.
    """
    numbers = gl.allocate_shared_memory(
        gl.int32, [NUM], gl.SwizzledSharedLayout(vec=1, per_phase=1, max_phase=1, order=[0])
    )
    numbers.store(gl.arange(0, NUM, layout=gl.BlockedLayout([1], [32], [4], [0])))
    return numbers


@shared_by_warps
class Queue:
    """Numbers of work tiles, which one warp takes from a counter and hands to the others, one a
    turn, through two slots.

    compute-sanitizer's racecheck reports hazards between `hand` and `number`, for it does not
    follow mbarriers across warps: every arrive is preceded by a barrier of its warpgroup, as the
    PTX shows, and memcheck is clean.
    """

    numbers: Value
    full: Value
    empty: Value

    @gluon.jit
    def hand(self, turn, number):
        mbarrier.wait(self.empty.index(turn & 1), ((turn >> 1) & 1) ^ 1)
        self.numbers.index(turn & 1).store(
            gl.full([1], number, gl.int32, layout=gl.BlockedLayout([1], [32], [1], [0]))
        )
        mbarrier.arrive(self.full.index(turn & 1), count=1)

    @gluon.jit
    def await_number(self, turn):
        mbarrier.wait(self.full.index(turn & 1), (turn >> 1) & 1)
        return self.number(turn)

    @gluon.jit
    def number(self, turn):
        """This turn's number, which has been awaited."""
        layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        return gl.max(self.numbers.index(turn & 1).load(layout), 0)

    @gluon.jit
    def release(self, turn):
        mbarrier.arrive(self.empty.index(turn & 1), count=1)


@gluon.jit
def queue(READERS: gl.constexpr):
    numbers = gl.allocate_shared_memory(
        gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    )
    return Queue(numbers, barriers(2, 1), barriers(2, READERS))


@gluon.jit
def decode_tile(index, num_tiles, num_heads, section, run):
    """The head (of all batches) and the tile that a number stands for.

    The heads of a section take turns, each with a run of tiles; the next section follows when all
    of their tiles are given out.
    """
    first = index // (section * num_tiles) * section
    width = gl.minimum(section, num_heads - first)
    place = index - first * num_tiles
    start = place // (width * run) * run
    length = gl.minimum(run, num_tiles - start)
    place -= start * width
    return first + place // length, start + place % length


def even_section(num_heads: int, most: int) -> int:
    """Returns how many heads, at most so many, make a section: a small last one would leave
    programs idle.
    """
    most = max(1, most)  # on a slice of a GPU with fewer programs than share a head
    return -(-num_heads // -(-num_heads // most))


def described_as(
    shape: tuple, strides: tuple, dtype: torch.dtype, block: tuple
) -> TensorDescriptor:
    """Describes tiles of a tensor whose place a tensor without elements takes.

    Of 16-bit numbers 128 columns lie as two times 64; fp32 ones lie one after the other.
    """
    # A dimension of one element may have any stride, of which TMA would still ask for a multiple of
    # 16 bytes.
    outer = [
        shape[-1] if size == 1 else stride
        for size, stride in zip(shape[:-1], strides[:-1], strict=True)
    ]
    swizzle = 0 if dtype == torch.float32 else min(128, 2 * block[-1])
    layout = gl.NVMMASharedLayout(
        swizzle_byte_width=swizzle, element_bitwidth=8 * dtype.itemsize, rank=len(block)
    )
    base = torch.empty(0, dtype=dtype)
    return TensorDescriptor(base, list(shape), [*outer, 1], list(block), layout)


def tiles_of(x_BHSD: Layout, num_rows: int, tail: int) -> tuple:
    """Describes tiles of (1, 1, num_rows, 64 or 128) that never cross into the next head, and of a
    tail, (1, 1, num_rows, tail) of the columns from 64 on, zeros past the head dimension.

    None where there is no tail.
    """
    shape, strides, dtype, *_ = x_BHSD

    def described(num_columns: int) -> TensorDescriptor:
        return described_as(shape, strides, dtype, (1, 1, num_rows, num_columns))

    return described(64 if tail else shape[-1]), described(tail) if tail else None


def rows_of(num_elements: int, num_rows: int) -> TensorDescriptor:
    """Describes runs of num_rows row statistics, of all heads one after another."""
    return described_as((num_elements,), (1,), torch.float32, (num_rows,))


class TileLaunch(Launch):
    """The launch of a kernel whose first parameters are tiles: called with all of its tensors.

    Tiles are described to the device by tensor maps, up to 14 a launch, which Triton encodes anew
    in every call. Of a fixed layout a map depends on the address alone: a tensor's are kept by it.
    """

    def __init__(
        self,
        kernel,
        grid: tuple[int, ...],
        tiles: list[tuple],
        numbers: tuple,
        constants: dict,
        consumers: int,
    ):
        """`tiles`: of each of the first tensors, the descriptions that the kernel takes."""
        registers = CONSUMER_REGISTERS[consumers]
        options = {"num_warps": 4, "maxnreg": START_REGISTERS[consumers], "REGISTERS": registers}
        super().__init__(kernel, grid, constants | options, numbers)
        self.tiles = tiles
        # What Triton knows of each tile, once the kernel is compiled.
        self.facts: list[list] = []
        self.encoded: list[dict[int, list]] = [{} for _ in tiles]

    def __call__(self, *tensors: Tensor | None) -> None:
        """The tensors that come in tiles start on 16-byte boundaries."""
        num_tiled = len(self.tiles)
        arguments = []
        if self.run is None:
            for x, tiles in zip(tensors, self.tiles, strict=False):
                arguments += _placed(x, tiles)
            super().__call__(*arguments, *tensors[num_tiled:])
            return
        if not self.facts:
            facts = iter(self.compiled.metadata.tensordesc_meta)
            self.facts = [[tile and next(facts) for tile in tiles] for tiles in self.tiles]
        addresses = [None if x is None else x.data_ptr() for x in tensors]
        for place, encoded in enumerate(self.encoded):
            address = addresses[place]
            if address not in encoded:
                if len(encoded) >= REMEMBERED:
                    encoded.clear()
                tiles = _placed(tensors[place], self.tiles[place])
                encoded[address] = _encode(tiles, self.facts[place])
            arguments += encoded[address]
        super().__call__(*arguments, *addresses[num_tiled:])


def _placed(x: Tensor, tiles: tuple) -> list[TensorDescriptor | None]:
    """Returns a tensor's tiles, without Triton's checks, which take longer than a launch."""
    placed = [copy.copy(tile) for tile in tiles]
    for tile in placed:
        if tile is not None:
            tile.base = x
    return placed


def _encode(tiles: list[TensorDescriptor | None], facts: list) -> list:
    """Returns what Triton hands to a launch for tiles."""
    # From Triton 3.8 on it takes a third argument, which it does not use.
    unused = (None,) * (driver.make_tensordesc_arg.__code__.co_argcount - 2)
    encoded = []
    for tile, fact in zip(tiles, facts, strict=True):
        encoded += [None] if tile is None else driver.make_tensordesc_arg(tile, fact, *unused)
    return encoded
