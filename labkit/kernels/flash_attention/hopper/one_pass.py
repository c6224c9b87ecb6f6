"""Attention backward on Hopper in Gluon in one pass over the tiles: five products each, the parts
of ∂Q added up.

    P = exp2(scale · log2(e) · Q Kᵀ − L)    ∂V = Pᵀ ∂O    ∂S = P ∘ (∂O Vᵀ − D)
    ∂Q = scale · ∂S K    ∂K = scale · ∂Sᵀ Q

Shapes: (batch, heads, length, D), D 64, 72, 80, 96 or 128, bf16 or fp16, causal (aligned to the
bottom right) or not; the key heads divide the query heads. L in base 2 and D come padded from the
Triton kernels of `flash_attention`.

Ideal cost per head: 10·Q·K·D FLOPs (halved when causal), and that is what it executes. Kernels for
keys and for queries compute S and ∂P twice, 14·Q·K·D. The accumulator of ∂Q is fp32, 4·Q·D bytes of
memory a head more, converted afterwards.

The programs of a head, one for 128 keys, add their parts of a tile of ∂Q in an order that never
varies, and so with equal bits every time. Each waits for the one before it, which it sees by a
semaphore in global memory, the count of tiles added.
- Full masks: a loop runs from the last tile to the first, and the first keys' program adds first.
  Programs that start together follow one another a tile apart.
- Causal: a loop begins at the diagonal, where programs that start together each have another tile.
  Those that run at once, a wave, add in the order in which they come to it, the last keys' first,
  and after the wave before (4, 32, 4096, 64 on an H100: 1.49 ms, not 1.54).
- Causal with grouped heads: as full masks. At the diagonal programs come to a tile too far apart
  for the L2 cache (2, 32 heads of 8, 8192, 128 on an H200: 5.77 ms, not 4.44).
Programs wait where they start together or end together. Where few heads take turns that is up to
half of the time, and still no longer than the Triton kernels take (29 shapes on an H100: 0.53 to
1.01 of their time; 1, 1, 4096, 128 full 199 us and 198). Two passes of this architecture's own,
which waited for nothing, took less there: 0.62 of the time at 1, 1, 16384, 64 full, 0.8 with up to
four heads, 0.83 at 64, 16, 256, 64 full; they are given up for one kernel to keep.

Persistent programs take work tiles, 128 keys of one key head each, from a counter, and load the
next one while the last ends. A work tile only ever waits for one of a smaller number, which some
program has begun: there is no deadlock.

How a program is laid out: a producer warp loads by TMA, two consumer warpgroups of 64 keys each
multiply, and two writer warps add their tiles of ∂Q to the accumulator in global memory by TMA,
each every other tile: in order, one tile's time is too short for a warp to await its turn, add, and
await that what it added is there. Sᵀ and ∂Pᵀ are computed directly, so that Pᵀ and ∂Sᵀ are register
operands of the products into ∂V and ∂K; ∂Sᵀ also goes through shared memory, from which both
warpgroups compute their part of ∂S K for all 128 keys.

A consumer's iteration i, with the products that are in flight while it computes:

    issue S(i), ∂P(i)
    P = exp2(S)  under ∂P;  issue ∂V(i) at D 64
    ∂S = P ∘ (∂P − D), to shared memory
    issue ∂Q(i − 1), ∂V(i) elsewhere, ∂K(i)  |  ∂Q(i − 1) to shared memory  under ∂V, ∂K

∂Q lags by a tile: the other warpgroup's ∂S is there before it is needed. ∂K does not, for with ∂S
in registers over the loop's back edge ptxas would serialise all products (C7512).

The programs of several heads take turns: those that run at once then add to many different tiles.
The more heads, the shorter the programs of a head wait for one another, and the fewer read the same
tiles from the cache while they are there. When causal, the longest programs come first, but for
those of a wave.

Sources: Dao 2023, "FlashAttention-2"; Shah et al. 2024, "FlashAttention-3".
"""

import math
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_wait,
)

from labkit.kernels.flash_attention.hopper.tiles import (
    LENGTHS,
    LN_2,
    LOG2_E,
    PRODUCER_REGISTERS,
    ROWS,
    SHARERS,
    TAILS,
    TileLaunch,
    Value,
    accumulator,
    accumulators,
    async_store,
    barriers,
    counting,
    decode_tile,
    described_as,
    even_section,
    parts,
    plus_product,
    product_layout,
    queue,
    ring,
    room,
    rows_of,
    shared_by_warps,
    store,
    tiles_of,
    times_transposed,
)
from labkit.kernels.flash_attention.plan import Layout
from labkit.kernels.flash_attention.triton import start_of
from labkit.kernels.launch import Launch, num_multiprocessors

# Releases of Triton before 3.8 have these operations under other names.
reinterpret = (
    getattr(gl.shared_memory_descriptor, "reinterpret", None)
    or gl.shared_memory_descriptor._reinterpret
)
async_add = getattr(tma, "async_atomic_add", None)
if async_add is None:
    # Nor is there a function for this one, only the operation; a release without that fails here,
    # on import.
    from triton._C.libtriton import gluon_ir, ir
    from triton.experimental.gluon.language._core import builtin

    CREATE_REDUCE = gluon_ir.GluonOpBuilder.create_async_tma_reduce
    REDUCE_KIND = ir.DESCRIPTOR_REDUCE_KIND.ADD

    @builtin
    def async_add(tensor_desc, coord, src, _semantic=None):
        """Adds a tile of shared memory to global memory."""
        coord = _semantic._convert_to_ir_values(coord, require_i64=False)
        CREATE_REDUCE(_semantic.builder, REDUCE_KIND, tensor_desc.handle, coord, src.handle)


BLOCK_K = gl.constexpr(2 * ROWS)  # keys of a program
WRITERS = gl.constexpr(2)  # warps that add to ∂Q
FIRST_SEMAPHORE = gl.constexpr(4)  # among the counters, behind the 16 bytes of that of work tiles

# Queries of a tile, and how many tiles of Q and of ∂O are in flight. Bounds: 240 registers a thread
# of a consumer (scores and ∂P of 64 keys × BLOCK_Q, two accumulators of 64 rows · D, one tile of
# ∂Q); 227 KiB of shared memory, of which K and V take 512·D bytes, a query tile 2·BLOCK_Q·D bytes
# per tensor, and ∂S and ∂Q 32 KiB or more.
BLOCK_Q = {64: 128, 72: 64, 80: 64, 96: 64, 128: 64}

# How much of its time a multiprocessor may wait where loops are equally long: fewer heads are
# enough then (1, 16, 16384, 128: 661 TFLOP/s, not 548).
WAITING = 0.02

# Waves that a head's tiles take where that leaves few heads: each reads all queries once more, but
# fewer and longer ones wait for one another at their ends (2, 32, 32768, 128 on an H100, sustained:
# 563 TFLOP/s in 43 waves, 574 in 21, 580 in 15; at 64 columns, burst, 573, 570 and 561).
ENOUGH_WAVES = 20


@shared_by_warps
class Shared:
    """What the warps of a program share: tiles of the queries of a loop and of the program's keys,
    what lies in shared memory (_s), and barriers.
    """

    q: Value
    grad_out: Value
    k: Value
    v: Value
    grad_k_descs: Value
    grad_v_descs: Value
    grad_scores_s: Value
    grad_q_s: Value
    numbers_s: Value
    carrier_s: Value
    grad_scores_full: Value
    grad_q_full: Value
    grad_q_empty: Value
    stored: Value
    passed: Value
    work: Value
    dq_accum_descs: Value
    counters_ptr: Value
    num_heads: Value
    num_heads_total: Value
    group: Value
    num_queries: Value
    num_keys: Value
    padded_queries: Value
    section: Value
    run: Value
    num_work_tiles: Value
    scale_log2: Value
    BLOCK_Q: Value
    D: Value
    CAUSAL: Value
    EVEN_K: Value
    WAVES: Value


@gluon.jit
def _take_work_tile(s):
    """The number of the next work tile: its key head's, times the tiles of a head, plus its own."""
    # From a counter, so that whoever waits for a work tile waits for a program that runs.
    index = gl.atomic_add(s.counters_ptr, 1)
    num_tiles = (s.num_keys + BLOCK_K - 1) // BLOCK_K
    last = s.num_work_tiles - 1
    head_total, key_tile = decode_tile(
        gl.minimum(index, last), num_tiles, s.num_heads_total, s.section, s.run
    )
    if s.WAVES:
        # The last keys of a wave come first.
        first = key_tile // s.run * s.run
        key_tile = first + gl.minimum(first + s.run, num_tiles) - 1 - key_tile
    return gl.where(index > last, index, head_total * num_tiles + key_tile)


@gluon.jit
def _query_tiles(s, key_tile):
    """The first tile of queries that see a tile of keys, and the one after the last."""
    first = key_tile * 0
    if s.CAUSAL:
        first = gl.maximum(key_tile * BLOCK_K - (s.num_keys - s.num_queries), 0) // s.BLOCK_Q
    return first, (s.num_queries + s.BLOCK_Q - 1) // s.BLOCK_Q


@gluon.jit
def _work_tile(s, index):
    """A work tile's key head, counted over the batch, its tile of keys, the query tile where its
    loop starts, and the length of the loop, at least 1.
    """
    num_tiles = (s.num_keys + BLOCK_K - 1) // BLOCK_K
    head_total = index // num_tiles
    key_tile = index % num_tiles
    first, end = _query_tiles(s, key_tile)
    start = first if s.WAVES else end - 1
    return head_total, key_tile, start, (end - first) * s.group


@gluon.jit
def _step(s, start, i):
    """The query tile of step i of a loop, and which of its key head's query heads."""
    along = i // s.group
    return start + along if s.WAVES else start - along, i % s.group


@gluon.jit
def _producer(s):
    index = _take_work_tile(s)
    s.work.hand(0, index)
    turn = 0
    j = 0
    while index < s.num_work_tiles:
        head_total, key_tile, start, count = _work_tile(s, index)
        batch = head_total // s.num_heads
        head = head_total % s.num_heads
        for i in range(count):
            query_tile, member = _step(s, start, i)
            row = query_tile * s.BLOCK_Q
            query_head = head * s.group + member
            row_total = (head_total * s.group + member) * s.padded_queries + row
            s.q.load(j, batch, query_head, row, row_total)
            if i == 0:
                for c in gl.static_range(2):
                    s.k.load(turn * 2 + c, batch, head, key_tile * BLOCK_K + c * 64)
                for c in gl.static_range(2):
                    s.v.load(turn * 2 + c, batch, head, key_tile * BLOCK_K + c * 64)
            s.grad_out.load(j, batch, query_head, row, row_total)
            j += 1
        # Taken while the last tiles are computed: sooner, another program would wait for one that
        # has not begun.
        index = _take_work_tile(s)
        turn += 1
        s.work.hand(turn, index)


@gluon.jit
def _await_more_than(count, dq_semaphore_ptr):
    """Returns how many tiles the program has added once they are more than `count`; what it added
    is then there.
    """
    return gl.inline_asm_elementwise(
        """{
        .reg .pred early;
        again: ld.acquire.gpu.global.s32 $0, [$1];
        setp.le.s32 early, $0, $2;
        @early bra again;
        shfl.sync.idx.b32 $0, $0, 0, 0x1f, 0xffffffff;
        fence.proxy.async.global;
        }""",
        "=r,l,r",
        [dq_semaphore_ptr, count],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _publish(count, dq_semaphore_ptr):
    """Says that `count` tiles have been added, once all that this warp has added is in global
    memory.
    """
    gl.inline_asm_elementwise(
        """{
        .reg .pred first;
        .reg .u32 lane;
        cp.async.bulk.wait_group 0;
        bar.warp.sync 0xffffffff;
        mov.u32 lane, %laneid;
        setp.eq.u32 first, lane, 0;
        @first st.release.gpu.global.s32 [$1], $2;
        mov.u32 $0, 0;
        }""",
        "=r,l,r",
        [dq_semaphore_ptr, count],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _writer(s, W: gl.constexpr):
    index = s.work.await_number(0)
    turn = 0
    FIRST_ROWS: gl.constexpr = s.dq_accum_descs[0].block_type.shape[0]
    TILE_ROWS: gl.constexpr = FIRST_ROWS + s.dq_accum_descs[1].block_type.shape[0]
    # Query tiles of all work tiles before this one.
    j = 0
    while index < s.num_work_tiles:
        head_total, key_tile, start, count = _work_tile(s, index)
        # Every other tile of all; of this work tile's the even ones or the odd ones.
        odd = (j + W) & 1
        key_tiles = (s.num_keys + BLOCK_K - 1) // BLOCK_K
        counters = s.counters_ptr + FIRST_SEMAPHORE + head_total * key_tiles * WRITERS
        first, end = _query_tiles(s, key_tile)
        before = key_tile - 1
        # By how many steps that program's loop is ahead of this one's.
        ahead = 0
        if s.WAVES:
            # Before this program the next one of its wave adds to the tiles that both have, and to
            # those before them the wave before, whose first keys' program adds last.
            wave_start = key_tile // s.run * s.run
            first_of_next, _ = _query_tiles(s, key_tile + 1)
            both_have = count
            if key_tile + 1 < gl.minimum(wave_start + s.run, key_tiles):
                both_have = first_of_next - first
            before = wave_start - s.run
            first_of_before, _ = _query_tiles(s, before)
            ahead = first - first_of_before
        added = 0
        for i in range(odd, count, WRITERS):
            if s.WAVES:
                if i >= both_have and before < key_tile:
                    before = key_tile + 1
                    ahead = first - first_of_next
                    added = 0
            step = i + ahead
            # The first keys' program, or wave, has none.
            if before >= 0 and step >= added:
                added = _await_more_than(step, counters + before * WRITERS + (step & 1))
            mbarrier.wait(s.grad_q_full.index(W), ((j + i) // WRITERS) & 1)
            query_tile, member = _step(s, start, i)
            row = ((head_total * s.group + member) * end + query_tile) * TILE_ROWS
            for c in gl.static_range(2):
                # The first program writes: what it writes to needs no zeros.
                if before < 0:
                    async_store(s.dq_accum_descs[c], [row + c * FIRST_ROWS, 0], s.grad_q_s[c])
                else:
                    async_add(s.dq_accum_descs[c], [row + c * FIRST_ROWS, 0], s.grad_q_s[c])
            tma.store_wait(0)
            mbarrier.arrive(s.grad_q_empty, count=1)
            _publish(i + 1, counters + key_tile * WRITERS + odd)
        j += count
        s.work.release(turn)
        turn += 1
        index = s.work.await_number(turn)


@gluon.jit
def _grad_q_product(s, zero, j, C: gl.constexpr):
    """∂S K of tile j over the 128 keys, for warpgroup C's part, 64 queries and 64 columns or the
    tail's: two products in flight.
    """
    DTYPE: gl.constexpr = s.grad_scores_s.dtype
    LAYOUT: gl.constexpr = s.grad_scores_s.layout
    HAS_TAIL: gl.constexpr = len(s.k.tiles) == 2
    # A tile of 128 columns lies in memory as two tiles of 64.
    TILES_Q: gl.constexpr = s.BLOCK_Q // 64
    left = reinterpret(s.grad_scores_s, DTYPE, [4 * TILES_Q, 64, 64], LAYOUT)
    PART_Q: gl.constexpr = C if s.BLOCK_Q == 128 else 0
    PART_D: gl.constexpr = C if HAS_TAIL else 0
    first = (j & 1) * 2 * TILES_Q + PART_Q
    COLUMNS: gl.constexpr = s.k.tiles[C].shape[4] if HAS_TAIL else 64
    grad_q = (accumulator(COLUMNS),)
    for half in gl.static_range(2):
        grad_scores = left.index(first + half * TILES_Q).permute((1, 0))
        if s.D == 128:
            k = reinterpret(s.k.tiles[0], DTYPE, [4, 64, 64], LAYOUT).index(half * 2 + C + zero)
        else:
            k = s.k.at(half + zero)[PART_D]
        grad_q = plus_product(grad_scores, (k,), grad_q, half == 1)
    return grad_q[0]


@gluon.jit
def _in_register_order(x):
    """The (64, 64) result of a product as (16, 256), and of a tail as fewer rows: a thread's
    registers in groups of four, one after the other.

    Stored like that they need one address and no swizzle; the order of the dimensions of the first
    view is warp, upper or lower half, row, column / 8, column pair, column.
    """
    COLUMNS: gl.constexpr = x.shape[1]
    ordered = x.reshape([4, 2, 8, COLUMNS // 8, 4, 2]).permute((3, 0, 2, 4, 1, 5))
    return ordered.reshape([COLUMNS // 4, 256])


@gluon.jit
def _put_grad_q(s, grad_q, j, C: gl.constexpr, before, is_one=True):
    """Hands the writers a part of ∂Q of tile j, once tile `before` is out; nothing if not
    `is_one`.
    """
    mbarrier.wait(s.grad_q_empty, before & 1)
    s.grad_q_s[C].store(_in_register_order(grad_q))
    fence_async_shared()
    mbarrier.arrive(s.grad_q_full.index(j % WRITERS), count=1, pred=is_one)


@gluon.jit
def _consumer(s, C: gl.constexpr):
    DTYPE: gl.constexpr = s.grad_scores_s.dtype
    PARTS: gl.constexpr = len(s.k.tiles)
    SCORES: gl.constexpr = product_layout(s.BLOCK_Q)
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, product_layout(s.D), 2)
    KEYS: gl.constexpr = gl.SliceLayout(1, SCORES)
    QUERIES: gl.constexpr = gl.SliceLayout(0, SCORES)
    # ∂S of 128 queries takes long enough for a product. That of 64 with twice the columns does not:
    # ∂V at the end took 2 % less (1, 16, 16384, 128 causal).
    UNDER_GRAD_SCORES: gl.constexpr = s.BLOCK_Q == 128
    index = s.work.await_number(0)
    turn = 0
    # Query tiles of all work tiles before this one.
    base = 0
    while index < s.num_work_tiles:
        _, key_tile, _, count = _work_tile(s, index)
        after = base + count
        # The warpgroup's keys that there are. Steps on the diagonal's side of `edge` are masked:
        # their queries do not see all of these.
        present = s.num_keys - (key_tile * BLOCK_K + C * 64)
        first, _ = _query_tiles(s, key_tile)
        unmasked = (s.num_queries - present + 62 + s.BLOCK_Q) // s.BLOCK_Q
        num_masked = (unmasked - first) * s.group
        edge = base + num_masked if s.WAVES else after - num_masked
        grad_k = accumulators(s.k.at(0))
        grad_v = accumulators(s.v.at(0))
        s.k.wait(turn * 2)
        s.k.wait(turn * 2 + 1)
        s.v.wait(turn * 2 + C)
        # What the work tile before left in the places of ∂S is out.
        mbarrier.wait(s.stored, (turn & 1) ^ 1)
        for j in range(base, after):
            # Always 0, but not for the compiler, which would keep addresses in 24 registers.
            zero = (s.num_queries + j) >> 31
            k = s.k.at(C + zero)
            v = s.v.at(C + zero)
            q = s.q.tile(j)
            grad_out = s.grad_out.tile(j)
            s.q.wait(j)
            scores_mma = times_transposed(k, q, accumulator(s.BLOCK_Q))
            s.grad_out.wait(j)
            grad_p_mma = times_transposed(v, grad_out, accumulator(s.BLOCK_Q))
            scores = warpgroup_mma_wait(PARTS, deps=(scores_mma,))
            # The masks' numbers come from shared memory: as constants they stay in registers.
            if s.CAUSAL:
                if (j < edge) if s.WAVES else (j >= edge):
                    # Passes at once; without it ptxas makes the branch into selects that every tile
                    # pays for.
                    mbarrier.wait(s.passed, 1)
                    # Once more, so that these stay in no registers.
                    _, key_tile_m, start_m, count_m = _work_tile(s, s.work.number(turn))
                    first_key = key_tile_m * BLOCK_K + C * 64 - (s.num_keys - s.num_queries)
                    query_tile, _ = _step(s, start_m, count_m - (after - j))
                    row = query_tile * s.BLOCK_Q
                    keys = s.numbers_s.slice(0, 64).load(KEYS) + (first_key - row)
                    queries = s.numbers_s.load(QUERIES)
                    scores = gl.where(keys[:, None] <= queries[None, :], scores, float("-inf"))
            elif not s.EVEN_K:
                # Keys past the end are zeros, but exp2(0 - lse) may overflow, and inf * 0 would
                # reach ∂Q.
                if present < 64:
                    mbarrier.wait(s.passed, 1)
                    keys = s.numbers_s.slice(0, 64).load(KEYS)
                    scores = gl.where((keys < present)[:, None], scores, float("-inf"))
            lse = s.q.rows.index(j % s.q.NUM).load(QUERIES)
            p = gl.exp2(scores * s.scale_log2 - lse[None, :])
            # The other warpgroup's ∂S(j − 1) is there, and ∂S(j − 2) has been read; passes at once
            # at the very first. Here rather than where it is needed: without a branch between them,
            # ptxas moves the wait for ∂P ahead of the exponentials.
            mbarrier.wait(s.grad_scores_full, (j + 1) & 1)
            p_low = gl.convert_layout(p.to(DTYPE), OPERAND)
            if UNDER_GRAD_SCORES:
                grad_v_mma = plus_product(p_low, grad_out, grad_v)
            grad_p = warpgroup_mma_wait(PARTS if UNDER_GRAD_SCORES else 0, deps=(grad_p_mma,))
            delta = s.grad_out.rows.index(j % s.grad_out.NUM).load(QUERIES)
            grad_scores = (p * (grad_p - delta[None, :])).to(DTYPE)
            s.grad_scores_s.index((j & 1) * 2 + C).store(grad_scores)
            fence_async_shared()
            # Of the tile before; for the first it is of anything, and goes nowhere.
            grad_q_mma = _grad_q_product(s, zero, j + 1, C)
            if not UNDER_GRAD_SCORES:
                grad_v_mma = plus_product(p_low, grad_out, grad_v)
            grad_k_mma = plus_product(
                gl.convert_layout(grad_scores, OPERAND), s.q.tile(j + zero), grad_k
            )
            grad_q = warpgroup_mma_wait(
                PARTS if UNDER_GRAD_SCORES else 2 * PARTS, deps=(grad_q_mma,)
            )
            mbarrier.arrive(s.grad_scores_full, count=1)
            # What goes nowhere waits for the last one of the work tile before.
            tile_out = j - 2 + (j == base).to(gl.int32)
            _put_grad_q(s, grad_q, j + 1, C, tile_out, j > base)
            done = warpgroup_mma_wait(0, deps=grad_v_mma + grad_k_mma)
            grad_v = done[:PARTS]
            grad_k = done[PARTS:]
            s.grad_out.release(j)
            s.q.release(j)
        s.v.release(turn * 2 + C)
        last = after - 1
        mbarrier.wait(s.grad_scores_full, last & 1)
        grad_q_mma = _grad_q_product(s, 0, last, C)
        # Once more, so that none of these stay in registers through the loop.
        head_total, key_tile, _, _ = _work_tile(s, s.work.number(turn))
        batch = head_total // s.num_heads
        head = head_total % s.num_heads
        k1 = key_tile * BLOCK_K + C * 64
        # ∂S of the tile before the last has been read: its place carries ∂V and ∂K out. At 128
        # columns it has room for one of the four, and another place for a second; with a tail there
        # is another place for all. TMA clips rows past the end.
        free = (last + 1) & 1
        LAYOUT: gl.constexpr = s.grad_v_descs[0].layout
        if PARTS == 2:
            grad_v_s = [part.index(C * 2) for part in s.carrier_s]
            grad_k_s = [part.index(C * 2 + 1) for part in s.carrier_s]
        elif s.D == 64:
            carriers = reinterpret(s.grad_scores_s, DTYPE, [8, 1, 1, 64, 64], LAYOUT)
            grad_v_s = (carriers.index((free * 2 + C) * 2),)
            grad_k_s = (carriers.index((free * 2 + C) * 2 + 1),)
        else:
            carriers = reinterpret(s.grad_scores_s, DTYPE, [2, 1, 1, 64, 128], LAYOUT)
            grad_v_s = (s.carrier_s[0].index(0) if C == 0 else carriers.index(free),)
            grad_k_s = grad_v_s
        store(grad_v, grad_v_s, s.grad_v_descs, batch, head, k1)
        grad_q = warpgroup_mma_wait(0, deps=(grad_q_mma,))
        s.k.release(turn * 2)
        s.k.release(turn * 2 + 1)
        _put_grad_q(s, grad_q, last, C, last - 1)
        if s.D == 128:
            tma.store_wait(0)
        grad_k = [part * (s.scale_log2 * LN_2) for part in grad_k]
        store(grad_k, grad_k_s, s.grad_k_descs, batch, head, k1)
        base = after
        s.work.release(turn)
        turn += 1
        tma.store_wait(0)
        mbarrier.arrive(s.stored, count=1)
        index = s.work.await_number(turn)


@gluon.jit(do_not_specialize=LENGTHS)
def hopper_bwd_single_kernel(
    q_desc,
    q_tail_desc,
    grad_out_desc,
    grad_out_tail_desc,
    k_desc,
    k_tail_desc,
    v_desc,
    v_tail_desc,
    grad_k_desc,
    grad_k_tail_desc,
    grad_v_desc,
    grad_v_tail_desc,
    lse_desc,
    delta_desc,
    dq_accum_desc,
    dq_accum_tail_desc,
    counters_ptr,
    num_heads,
    num_heads_total,
    group,
    num_queries,
    num_keys,
    padded_queries,
    section,
    run,
    num_work_tiles,
    scale_log2,
    BLOCK_Q: gl.constexpr,
    D: gl.constexpr,
    CAUSAL: gl.constexpr,
    EVEN_K: gl.constexpr,
    WAVES: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """∂K and ∂V of 128 keys of one head after another, and their part of ∂Q, added to its
    accumulator.
    """
    DTYPE: gl.constexpr = q_desc.dtype
    TILE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    numbers_s = counting(BLOCK_Q)
    descs = parts(grad_k_desc, grad_k_tail_desc)
    carrier_s = None
    if D == 128 or len(descs) == 2:
        carrier_s = [room(desc, 1 if D == 128 else 4) for desc in descs]
    dq_accum_descs = (
        dq_accum_desc,
        dq_accum_desc if dq_accum_tail_desc is None else dq_accum_tail_desc,
    )
    shared = Shared(
        # A third tile in flight gains 1 % when causal, and loses 2 % where loops are equally long.
        ring(parts(q_desc, q_tail_desc), 3 if CAUSAL else 2, 2, lse_desc),
        ring(parts(grad_out_desc, grad_out_tail_desc), 2, 2, delta_desc),
        ring(parts(k_desc, k_tail_desc), 2, 2),
        ring(parts(v_desc, v_tail_desc), 2, 1),
        descs,
        parts(grad_v_desc, grad_v_tail_desc),
        gl.allocate_shared_memory(DTYPE, [4, 64, BLOCK_Q], TILE),
        [room(desc, 1).index(0) for desc in dq_accum_descs],
        numbers_s,
        carrier_s,
        barriers(1, 2).index(0),
        barriers(WRITERS, 2),
        barriers(1, 1).index(0),
        barriers(1, 2).index(0),
        # Nobody arrives here: whoever waits for the phase before the first passes.
        barriers(1, 1).index(0),
        queue(2 + WRITERS),
        dq_accum_descs,
        counters_ptr,
        num_heads,
        num_heads_total,
        group,
        num_queries,
        num_keys,
        padded_queries,
        section,
        run,
        num_work_tiles,
        scale_log2,
        BLOCK_Q,
        D,
        CAUSAL,
        EVEN_K,
        WAVES,
    )
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consumer, (shared, 0)),
            (_consumer, (shared, 1)),
            (_producer, (shared,)),
            (_writer, (shared, 0)),
            (_writer, (shared, 1)),
        ],
        [4, 1, 1, 1],
        [REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
    )


@triton.jit
def _convert(
    part_ptr, past_first, first_ptr, stride_s, num_rows, num_columns, scale, COLUMNS: tl.constexpr
):
    """64 rows of ∂Q, scaled, out of the order of `_in_register_order`; 0 before the first tile."""
    is_there = tl.full((64 * COLUMNS,), past_first, tl.int32) >= 0
    total = tl.load(part_ptr + tl.arange(0, 64 * COLUMNS), mask=is_there, other=0.0)
    total = tl.reshape(total, (COLUMNS // 8, 4, 8, 4, 2, 2)).permute((1, 4, 2, 0, 3, 5))
    rows = tl.arange(0, 64)[:, None]
    cols = tl.arange(0, COLUMNS)[None, :]
    to = first_ptr + rows.to(tl.int64) * stride_s + cols
    low = (total.reshape(64, COLUMNS) * scale).to(first_ptr.dtype.element_ty)
    tl.store(to, low, mask=(rows < num_rows) & (cols < num_columns))


@triton.jit(do_not_specialize=LENGTHS)
def hopper_bwd_convert_kernel(
    dq_accum_ptr,
    grad_q_ptr,
    strides,
    num_queries,
    num_tiles,
    first_tile,
    scale,
    HEAD_DIM: tl.constexpr,
    TAIL: tl.constexpr,
    BLOCK_Q: tl.constexpr,
):
    """∂Q = scale · sum, of one of the two parts of a tile; 0 before `first_tile`."""
    part = tl.program_id(0)
    head = tl.program_id(1)
    batch = tl.program_id(2)
    tile = part // 2
    head_total = batch * tl.num_programs(1) + head
    # A tile of 128 queries has two parts of 64 queries, one of 64 has two of 64 columns.
    second = part % 2
    row = tile * BLOCK_Q + (second * 64 if BLOCK_Q == 128 else 0)
    column = 0 if BLOCK_Q == 128 else second * 64
    part_ptr = dq_accum_ptr + second * 4096
    part_ptr += (head_total.to(tl.int64) * num_tiles + tile) * 64 * (64 + (TAIL or 64))
    to = grad_q_ptr + start_of(strides, batch, head, row, 1) + column
    left = (num_queries - row, HEAD_DIM - column)
    if TAIL and second == 1:
        _convert(part_ptr, tile - first_tile, to, strides[2], *left, scale, TAIL)
    else:
        _convert(part_ptr, tile - first_tile, to, strides[2], *left, scale, 64)


def plan(
    q: Layout,
    k: Layout,
    v: Layout,
    grad_out: Layout,
    grads: tuple[Layout, ...],
    padded_queries: int,
    scale: float,
    causal: bool,
) -> tuple[Layout, Layout, Callable[..., None]]:
    """Returns the layouts of the counters, which begin at zero, and of the sums of ∂Q, and what
    writes the gradients: run((q, k, v, grad_out), (lse_log2, delta, counters, sums), (grad_q,
    grad_k, grad_v), cu_seqlens).

    The layouts are 4D. lse_log2 and delta are fp32 and dense, their rows padded to a multiple of
    128 with +inf and 0: 2^(· − ∞) = 0 keeps what lies beyond the last query out of every sum.
    """
    num_batches, num_heads, num_queries, head_dim = q.shape
    num_key_heads, num_keys = k.shape[1:3]
    group = num_heads // num_key_heads
    num_heads_total = num_batches * num_heads
    num_key_heads_total = num_batches * num_key_heads
    block_q = BLOCK_Q[head_dim]
    num_tiles = -(-num_queries // block_q)
    key_tiles = -(-num_keys // BLOCK_K.value)
    num_work_tiles = key_tiles * num_key_heads_total
    programs = num_multiprocessors(q.device.index)
    tail = TAILS[head_dim]
    # Two parts a tile, of 64 × 64 or of a tail's columns, 256 numbers a row.
    second_rows = tail // 4 or 16
    dq_accum_shape = (num_heads_total * num_tiles * (16 + second_rows), 256)
    statistics = rows_of(num_heads_total * padded_queries, block_q)
    first, second = (
        described_as(dq_accum_shape, (256, 1), torch.float32, (rows, 256))
        for rows in (16, second_rows)
    )
    _, grad_k, grad_v = grads
    described = [
        *(tiles_of(x, block_q, tail) for x in (q, grad_out)),
        *(tiles_of(x, ROWS, tail) for x in (k, v, grad_k, grad_v)),
        (statistics,),
        (statistics,),
        (first, second if tail else None),
    ]
    # No program adds to a tile of ∂Q before this one: its queries see no key.
    first_tile = max(0, num_queries - num_keys) // block_q if causal else 0
    steps = num_tiles * group
    # The last of a head's programs waits for half of a mean loop or less.
    most = max(programs // SHARERS, 4 * programs // steps)
    has_waves = causal and group == 1
    if has_waves:
        most = min(most, math.ceil(ENOUGH_WAVES * programs / key_tiles))
    elif not causal:
        computed = max(1, num_work_tiles / programs) * steps
        most = min(most, math.ceil(programs / (WAITING * computed)))
    section = even_section(num_key_heads_total, most)
    # The programs that run at once, of one head.
    at_once = -(-programs // section) if causal else 1
    heads = (num_key_heads, num_key_heads_total, group)
    lengths = (num_queries, num_keys, padded_queries)
    constants = {
        "D": 64 if tail else head_dim,
        "CAUSAL": causal,
        "EVEN_K": causal or num_keys % BLOCK_K.value == 0,
        "BLOCK_Q": block_q,
        "WAVES": has_waves and at_once > 1,
    }
    launch = TileLaunch(
        hopper_bwd_single_kernel,
        (min(num_work_tiles, programs),),
        described,
        (*heads, *lengths, section, at_once, num_work_tiles, scale * LOG2_E),
        constants,
        2,
    )
    convert = Launch(
        hopper_bwd_convert_kernel,
        (num_tiles * 2, num_heads, num_batches),
        {"HEAD_DIM": head_dim, "TAIL": tail, "BLOCK_Q": block_q},
        (grads[0].strides[:3], num_queries, num_tiles, first_tile, scale),
    )

    def run(inputs, scratch, grads, _) -> None:
        q, k, v, grad_out = inputs
        grad_q, grad_k, grad_v = grads
        lse_log2, delta, counters, sums = scratch
        launch(q, grad_out, k, v, grad_k, grad_v, lse_log2, delta, sums, counters)
        convert(sums, grad_q)

    # The counter of work tiles, alone on its 16 bytes; then how far each of them has come.
    num_counters = FIRST_SEMAPHORE.value + num_work_tiles * WRITERS.value
    counters = Layout((num_counters,), (1,), torch.int32, q.device, True)
    sums = Layout(dq_accum_shape, (256, 1), torch.float32, q.device, True)
    return counters, sums, run
