"""Attention backward on Hopper in Gluon in one pass over the tiles: five products each, the parts
of ∂Q added up.

    P = exp2(scale · log2(e) · Q Kᵀ − L)    ∂V = Pᵀ ∂O    ∂S = P ∘ (∂O Vᵀ − D)
    ∂Q = scale · ∂S K    ∂K = scale · ∂Sᵀ Q

Shapes: (batch, heads, length, D), D 64 or 128, bf16 or fp16, as many key heads as query heads,
causal (aligned to the bottom right) or not. L in base 2 and D come padded from the Triton kernels
of `flash_attention`.

Ideal cost per head: 10·Q·K·D FLOPs (halved when causal), and that is what it executes. The two
kernels of two_passes.py compute S and ∂P twice, 14·Q·K·D. The accumulator of ∂Q is fp32, 4·Q·D
bytes of memory a head more, converted afterwards.

The programs of a head, one for 128 keys, add their parts of a tile of ∂Q in order, the first keys'
program first, and so with equal bits every time. They follow one another then, each a tile behind
the one before it, which it sees by a semaphore in global memory, the count of tiles added: they
wait where they start together or end together. `ordering_pays` says where they would wait longer
than the two kernels take.

Persistent programs take work tiles, 128 keys of one head each, from a counter, and load the next
one while the last ends. A work tile only ever waits for one of a smaller number, which some program
has begun: there is no deadlock.

How a program is laid out: a producer warp loads by TMA, two consumer warpgroups of 64 keys each
multiply, and two writer warps add their tiles of ∂Q to the accumulator in global memory by TMA,
each every other tile: in order, one tile's time is too short for a warp to await its turn, add, and
await that what it added is there. Sᵀ and ∂Pᵀ are computed directly, so that Pᵀ is a register
operand of the product into ∂V; ∂Sᵀ goes through shared memory, from which both warpgroups compute
their part of ∂S K for all 128 keys.

A consumer's iteration i, with the products that are in flight while it computes:

    issue S(i), ∂P(i), ∂K(i − 1)
    P = exp2(S)  under ∂P, ∂K
    ∂S = P ∘ (∂P − D), to shared memory,  under ∂K
    issue ∂Q(i − 1), ∂V(i)        |  ∂Q(i − 1) to shared memory  under ∂V

∂K and ∂Q lag by a tile: the other warpgroup's ∂S is there before it is needed, and ∂K takes its ∂S
from shared memory too, for in registers over the loop's back edge ptxas would serialise all
products (C7512), and spill.

Every program starts at the last query tile, and the programs of several heads take turns: those
that run at once then add to many different tiles. The more heads, the shorter the programs of a
head wait for one another, and the fewer read the same tiles from the cache while they are there.
When causal, the longest programs come first.

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
    warpgroup_mma,
    warpgroup_mma_wait,
)

from labkit.kernels.flash_attention.hopper.tiles import (
    LN_2,
    LOG2_E,
    PRODUCER_REGISTERS,
    ROWS,
    TileLaunch,
    Value,
    async_load,
    async_store,
    await_number,
    barrier,
    barriers,
    decode_tile,
    described_as,
    hand_number,
    handed_number,
    product_layout,
    rows_of,
    shared_by_warps,
    tiles_of,
)
from labkit.kernels.flash_attention.plan import Layout
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

# Queries of a tile, and how many tiles of Q and of ∂O are in flight. Bounds: 240 registers a thread
# of a consumer (scores and ∂P of 64 keys × BLOCK_Q, two accumulators of 64 rows · D, one tile of
# ∂Q); 227 KiB of shared memory, of which K and V take 512·D bytes, a query tile 2·BLOCK_Q·D bytes
# per tensor, and ∂S and ∂Q 32 KiB or more.
SINGLE = {
    64: {"BLOCK_Q": 128, "STAGES": 3, "STAGES_GRAD_OUT": 2},
    128: {"BLOCK_Q": 64, "STAGES": 3, "STAGES_GRAD_OUT": 2},
}
# Heads whose programs take turns, at most and causal always, for at the end of a head loops are
# short; and how much of its time a multiprocessor may wait where loops are equally long and fewer
# heads are enough.
HEADS_IN_FLIGHT = {64: 64, 128: 32}
WAITING = 0.02
MOST_WAITING = {64: 0.16, 128: 0.3}  # see `ordering_pays`

# Plain numbers to the kernels: a length of 1, or one divisible by 16, is no reason to compile them
# anew.
LENGTHS = (
    "num_heads",
    "num_heads_total",
    "num_queries",
    "num_keys",
    "padded_queries",
    "num_tiles",
    "heads_in_flight",
    "num_work_tiles",
)


@shared_by_warps
class Shared:
    """Tiles end in _s and lie in shared memory; barriers end in _full and _empty."""

    grad_k_desc: Value
    grad_v_desc: Value
    q_s: Value
    grad_out_s: Value
    k_s: Value
    v_s: Value
    lse_s: Value
    delta_s: Value
    grad_scores_s: Value
    grad_q_s: Value
    numbers_s: Value
    staged_s: Value
    k_full: Value
    v_full: Value
    k_empty: Value
    v_empty: Value
    q_full: Value
    q_empty: Value
    grad_out_full: Value
    grad_out_empty: Value
    grad_scores_full: Value
    grad_q_full: Value
    grad_q_empty: Value
    staged: Value
    passed: Value
    work_s: Value
    work_full: Value
    work_empty: Value
    num_heads: Value
    num_heads_total: Value
    num_queries: Value
    num_keys: Value
    scale_log2: Value
    heads_in_flight: Value
    num_work_tiles: Value
    q_desc: Value
    grad_out_desc: Value
    k_desc: Value
    v_desc: Value
    lse_desc: Value
    delta_desc: Value
    tile_counter_ptr: Value
    padded_queries: Value
    dq_accum_desc: Value
    dq_semaphore_ptr: Value
    BLOCK_Q: Value
    D: Value
    STAGES: Value
    STAGES_GRAD_OUT: Value
    CAUSAL: Value
    EVEN_K: Value


@gluon.jit
def _decode_tile(s, index):
    """A work tile's head, counted over the batch, and its tile of keys; `heads_in_flight` heads
    take turns.
    """
    num_tiles = (s.num_keys + BLOCK_K - 1) // BLOCK_K
    return decode_tile(index, num_tiles, s.num_heads_total, s.heads_in_flight)


@gluon.jit
def _query_tiles(s, key_tile):
    """The last query tile, where the loop of a key tile starts, and the length of the loop, at
    least 1.
    """
    last = (s.num_queries + s.BLOCK_Q - 1) // s.BLOCK_Q - 1
    low = key_tile * 0
    if s.CAUSAL:
        low = gl.maximum(key_tile * BLOCK_K - (s.num_keys - s.num_queries), 0) // s.BLOCK_Q
    return last, last + 1 - low


@gluon.jit
def _producer(s):
    # From a counter, so that whoever waits for a work tile waits for a program that runs.
    index = gl.atomic_add(s.tile_counter_ptr, 1)
    hand_number(index, 0, s.work_s, s.work_full)
    turn = 0
    j = 0
    while index < s.num_work_tiles:
        head_total, key_tile = _decode_tile(s, index)
        last_tile, count = _query_tiles(s, key_tile)
        batch = head_total // s.num_heads
        head = head_total % s.num_heads
        statistics = head_total * s.padded_queries
        free = (turn & 1) ^ 1
        for i in range(count):
            row = (last_tile - i) * s.BLOCK_Q
            b = j % s.STAGES
            mbarrier.wait(s.q_empty.index(b), ((j // s.STAGES) & 1) ^ 1)
            mbarrier.expect(
                s.q_full.index(b), s.q_desc.block_type.nbytes + s.lse_desc.block_type.nbytes
            )
            async_load(s.q_desc, [batch, head, row, 0], s.q_full.index(b), s.q_s.index(b))
            async_load(s.lse_desc, [statistics + row], s.q_full.index(b), s.lse_s.index(b))
            if i == 0:
                mbarrier.wait(s.k_empty, free)
                mbarrier.expect(s.k_full, 2 * s.k_desc.block_type.nbytes)
                for c in gl.static_range(2):
                    async_load(
                        s.k_desc,
                        [batch, head, key_tile * BLOCK_K + c * 64, 0],
                        s.k_full,
                        s.k_s.index(c),
                    )
                mbarrier.wait(s.v_empty, free)
                mbarrier.expect(s.v_full, 2 * s.v_desc.block_type.nbytes)
                for c in gl.static_range(2):
                    async_load(
                        s.v_desc,
                        [batch, head, key_tile * BLOCK_K + c * 64, 0],
                        s.v_full,
                        s.v_s.index(c),
                    )
            b = j % s.STAGES_GRAD_OUT
            mbarrier.wait(s.grad_out_empty.index(b), ((j // s.STAGES_GRAD_OUT) & 1) ^ 1)
            mbarrier.expect(
                s.grad_out_full.index(b),
                s.grad_out_desc.block_type.nbytes + s.delta_desc.block_type.nbytes,
            )
            async_load(
                s.grad_out_desc,
                [batch, head, row, 0],
                s.grad_out_full.index(b),
                s.grad_out_s.index(b),
            )
            async_load(
                s.delta_desc, [statistics + row], s.grad_out_full.index(b), s.delta_s.index(b)
            )
            j += 1
        # Taken while the last tiles are computed: sooner, another program would wait for one that
        # has not begun.
        index = gl.atomic_add(s.tile_counter_ptr, 1)
        turn += 1
        mbarrier.wait(s.work_empty.index(turn & 1), ((turn >> 1) & 1) ^ 1)
        hand_number(index, turn, s.work_s, s.work_full)


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
    index = await_number(0, s.work_s, s.work_full)
    turn = 0
    # Query tiles of all work tiles before this one.
    j = 0
    while index < s.num_work_tiles:
        head_total, key_tile = _decode_tile(s, index)
        last_tile, count = _query_tiles(s, key_tile)
        parts = head_total * (last_tile + 1) * 32
        # Every other tile of all; of this work tile's the even ones or the odd ones.
        odd = (j + W) & 1
        key_tiles = (s.num_keys + BLOCK_K - 1) // BLOCK_K
        mine = s.dq_semaphore_ptr + (head_total * key_tiles + key_tile) * WRITERS + odd
        # Those tiles of the program before; the first waits for none.
        added = gl.where(key_tile == 0, count, 0)
        for i in range(odd, count, WRITERS):
            q_tile = last_tile - i
            if i >= added:
                added = _await_more_than(i, mine - WRITERS)
            mbarrier.wait(s.grad_q_full.index(W), ((j + i) // WRITERS) & 1)
            for c in gl.static_range(2):
                # The first program writes: what it writes to needs no zeros.
                if key_tile == 0:
                    async_store(
                        s.dq_accum_desc, [parts + (q_tile * 2 + c) * 16, 0], s.grad_q_s.index(c)
                    )
                else:
                    async_add(
                        s.dq_accum_desc, [parts + (q_tile * 2 + c) * 16, 0], s.grad_q_s.index(c)
                    )
            tma.store_wait(0)
            mbarrier.arrive(s.grad_q_empty, count=1)
            _publish(i + 1, mine)
        j += count
        mbarrier.arrive(s.work_empty.index(turn & 1), count=1)
        turn += 1
        index = await_number(turn, s.work_s, s.work_full)


@gluon.jit
def _grad_q_product(s, zero, stage_before, C: gl.constexpr):
    """∂S K over the 128 keys, for warpgroup C's 64 × 64 part: two products in flight."""
    DTYPE: gl.constexpr = s.k_s.dtype
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    # A tile of 128 columns lies in memory as two tiles of 64.
    TILES_Q: gl.constexpr = s.BLOCK_Q // 64
    TILES_D: gl.constexpr = s.D // 64
    left = reinterpret(s.grad_scores_s, DTYPE, [4 * TILES_Q, 64, 64], LAYOUT)
    right = reinterpret(s.k_s, DTYPE, [2 * TILES_D, 64, 64], LAYOUT)
    PART_Q: gl.constexpr = C if s.BLOCK_Q == 128 else 0
    PART_D: gl.constexpr = 0 if s.BLOCK_Q == 128 else C
    GRAD_Q: gl.constexpr = product_layout(64)
    grad_q = gl.zeros([64, 64], gl.float32, layout=GRAD_Q)
    grad_q = warpgroup_mma(
        left.index(stage_before * 2 * TILES_Q + PART_Q).permute((1, 0)),
        right.index(PART_D + zero),
        grad_q,
        use_acc=False,
        is_async=True,
    )
    return warpgroup_mma(
        left.index((stage_before * 2 + 1) * TILES_Q + PART_Q).permute((1, 0)),
        right.index(TILES_D + PART_D + zero),
        grad_q,
        is_async=True,
    )


@gluon.jit
def _in_register_order(x):
    """The (64, 64) result of a product as (16, 256): a thread's registers in groups of four, one
    after the other.

    Stored like that they need one address and no swizzle; the order of the dimensions of the first
    view is warp, upper or lower half, row, column / 8, column pair, column.
    """
    return x.reshape([4, 2, 8, 8, 4, 2]).permute((3, 0, 2, 4, 1, 5)).reshape([16, 256])


@gluon.jit
def _consumer(s, C: gl.constexpr):
    DTYPE: gl.constexpr = s.grad_k_desc.dtype
    SCORES: gl.constexpr = product_layout(s.BLOCK_Q)
    GRAD: gl.constexpr = product_layout(s.D)
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=GRAD, k_width=2)
    NUMBERS: gl.constexpr = gl.SwizzledSharedLayout(vec=1, per_phase=1, max_phase=1, order=[0])
    QUERIES: gl.constexpr = gl.SliceLayout(0, SCORES)
    index = await_number(0, s.work_s, s.work_full)
    turn = 0
    # Query tiles of all work tiles before this one.
    base = 0
    while index < s.num_work_tiles:
        head_total, key_tile = _decode_tile(s, index)
        last_tile, count = _query_tiles(s, key_tile)
        after = base + count
        # The warpgroup's keys that there are; and the first query that sees its first key, from the
        # query at which the loop would have been at the very first tile of all.
        present = s.num_keys - (key_tile * BLOCK_K + C * 64)
        diagonal = s.num_queries - present - (last_tile + base) * s.BLOCK_Q
        grad_k = gl.zeros([64, s.D], gl.float32, layout=GRAD)
        grad_v = gl.zeros([64, s.D], gl.float32, layout=GRAD)
        mbarrier.wait(s.k_full, turn & 1)
        mbarrier.wait(s.v_full, turn & 1)
        # What the work tile before left in the places of ∂S is out.
        mbarrier.wait(s.staged, (turn & 1) ^ 1)
        for j in range(base, after):
            # Always 0, but not for the compiler, which would keep the addresses of K and V in 24
            # registers.
            zero = (s.num_queries + j) >> 31
            k = s.k_s.index(C + zero).reshape([64, s.D])
            v = s.v_s.index(C + zero).reshape([64, s.D])
            stage_q = j % s.STAGES
            stage_grad_out = j % s.STAGES_GRAD_OUT
            before = (j + s.STAGES - 1) % s.STAGES
            stage_before = (j + 1) & 1
            q = s.q_s.index(stage_q).reshape([s.BLOCK_Q, s.D])
            grad_out = s.grad_out_s.index(stage_grad_out).reshape([s.BLOCK_Q, s.D])
            mbarrier.wait(s.q_full.index(stage_q), (j // s.STAGES) & 1)
            scores_mma = warpgroup_mma(
                k,
                q.permute((1, 0)),
                gl.zeros([64, s.BLOCK_Q], gl.float32, layout=SCORES),
                use_acc=False,
                is_async=True,
            )
            mbarrier.wait(s.grad_out_full.index(stage_grad_out), (j // s.STAGES_GRAD_OUT) & 1)
            grad_p_mma = warpgroup_mma(
                v,
                grad_out.permute((1, 0)),
                gl.zeros([64, s.BLOCK_Q], gl.float32, layout=SCORES),
                use_acc=False,
                is_async=True,
            )
            # The products of the tile before. For the first they are of anything: the next one into
            # ∂K starts anew, and ∂Q goes nowhere.
            grad_k_mma = warpgroup_mma(
                s.grad_scores_s.index(stage_before * 2 + C),
                s.q_s.index(before).reshape([s.BLOCK_Q, s.D]),
                grad_k,
                use_acc=j > base + 1,
                is_async=True,
            )
            scores = warpgroup_mma_wait(2, deps=(scores_mma,))
            if s.CAUSAL:
                if diagonal + j * s.BLOCK_Q > -63:
                    # Passes at once; without it ptxas makes the branch into selects that every tile
                    # pays for.
                    mbarrier.wait(s.passed, 1)
                    # From shared memory: as constants the numbers of rows and columns stay in
                    # registers through the loop.
                    keys = reinterpret(s.numbers_s, gl.int32, [64], NUMBERS).load(
                        gl.SliceLayout(1, SCORES)
                    ) + (diagonal + j * s.BLOCK_Q)
                    queries = reinterpret(s.numbers_s, gl.int32, [s.BLOCK_Q], NUMBERS).load(QUERIES)
                    scores = gl.where(keys[:, None] <= queries[None, :], scores, float("-inf"))
            elif not s.EVEN_K:
                # Keys past the end are zeros, but exp2(0 - lse) may overflow, and inf * 0 would
                # reach ∂Q.
                if present < 64:
                    mbarrier.wait(s.passed, 1)
                    keys = reinterpret(s.numbers_s, gl.int32, [64], NUMBERS).load(
                        gl.SliceLayout(1, SCORES)
                    )
                    scores = gl.where((keys < present)[:, None], scores, float("-inf"))
            lse = s.lse_s.index(stage_q).load(QUERIES)
            p = gl.exp2(scores * s.scale_log2 - lse[None, :])
            # The other warpgroup's ∂S(j − 1) is there, and ∂S(j − 2) has been read; passes at once
            # at the very first. Here rather than where it is needed: without a branch between them,
            # ptxas moves the wait for ∂P ahead of the exponentials.
            mbarrier.wait(s.grad_scores_full, stage_before)
            p_low = gl.convert_layout(p.to(DTYPE), OPERAND)
            grad_p = warpgroup_mma_wait(1, deps=(grad_p_mma,))
            delta = s.delta_s.index(stage_grad_out).load(QUERIES)
            grad_scores = (p * (grad_p - delta[None, :])).to(DTYPE)
            s.grad_scores_s.index((j & 1) * 2 + C).store(grad_scores)
            fence_async_shared()
            grad_q_mma = _grad_q_product(s, zero, stage_before, C)
            grad_v_mma = warpgroup_mma(p_low, grad_out, grad_v, is_async=True)
            grad_k, grad_q = warpgroup_mma_wait(1, deps=(grad_k_mma, grad_q_mma))
            mbarrier.arrive(s.grad_scores_full, count=1)
            mbarrier.arrive(s.q_empty.index(before), count=1, pred=j > base)
            # ∂Q before the last one is out; what goes nowhere waits for the last one of the work
            # tile before.
            mbarrier.wait(s.grad_q_empty, (j & 1) ^ (j == base).to(gl.int32))
            s.grad_q_s.index(C).store(_in_register_order(grad_q))
            fence_async_shared()
            mbarrier.arrive(s.grad_q_full.index((j + 1) % WRITERS), count=1, pred=j > base)
            grad_v = warpgroup_mma_wait(0, deps=(grad_v_mma,))
            mbarrier.arrive(s.grad_out_empty.index(stage_grad_out), count=1)
        mbarrier.arrive(s.v_empty, count=1)
        last = after - 1
        grad_k_mma = warpgroup_mma(
            s.grad_scores_s.index((last & 1) * 2 + C),
            s.q_s.index(last % s.STAGES).reshape([s.BLOCK_Q, s.D]),
            grad_k,
            use_acc=last > base,
            is_async=True,
        )
        mbarrier.wait(s.grad_scores_full, last & 1)
        grad_q_mma = _grad_q_product(s, 0, last & 1, C)
        # Once more, so that none of these stay in registers through the loop.
        head_total, key_tile = _decode_tile(s, handed_number(turn, s.work_s))
        batch = head_total // s.num_heads
        head = head_total % s.num_heads
        k1 = key_tile * BLOCK_K + C * 64
        # ∂S of the tile before the last has been read: its place carries ∂V and ∂K out. At 128
        # columns it has room for one of the four, and another place for a second. TMA clips rows
        # past the end.
        if s.D == 64:
            carriers = reinterpret(s.grad_scores_s, DTYPE, [8, 1, 1, 64, s.D], s.grad_v_desc.layout)
            of_grad_v = carriers.index((((last + 1) & 1) * 2 + C) * 2)
            of_grad_k = carriers.index((((last + 1) & 1) * 2 + C) * 2 + 1)
        else:
            if C == 0:
                of_grad_v = s.staged_s.index(0)
            else:
                of_grad_v = reinterpret(
                    s.grad_scores_s, DTYPE, [2, 1, 1, 64, s.D], s.grad_v_desc.layout
                ).index((last + 1) & 1)
            of_grad_k = of_grad_v
        of_grad_v.reshape([64, s.D]).store(grad_v.to(DTYPE))
        fence_async_shared()
        async_store(s.grad_v_desc, [batch, head, k1, 0], of_grad_v)
        grad_k = warpgroup_mma_wait(2, deps=(grad_k_mma,))
        grad_q = warpgroup_mma_wait(0, deps=(grad_q_mma,))
        mbarrier.arrive(s.k_empty, count=1)
        mbarrier.arrive(s.q_empty.index(last % s.STAGES), count=1)
        mbarrier.wait(s.grad_q_empty, (last & 1) ^ 1)
        s.grad_q_s.index(C).store(_in_register_order(grad_q))
        fence_async_shared()
        mbarrier.arrive(s.grad_q_full.index(last % WRITERS), count=1)
        if s.D == 128:
            tma.store_wait(0)
        of_grad_k.reshape([64, s.D]).store((grad_k * (s.scale_log2 * LN_2)).to(DTYPE))
        fence_async_shared()
        async_store(s.grad_k_desc, [batch, head, k1, 0], of_grad_k)
        base = after
        mbarrier.arrive(s.work_empty.index(turn & 1), count=1)
        turn += 1
        tma.store_wait(0)
        mbarrier.arrive(s.staged, count=1)
        index = await_number(turn, s.work_s, s.work_full)


@gluon.jit(do_not_specialize=LENGTHS)
def hopper_bwd_single_kernel(
    q_desc,
    grad_out_desc,
    k_desc,
    v_desc,
    grad_k_desc,
    grad_v_desc,
    lse_desc,
    delta_desc,
    dq_accum_desc,
    dq_semaphore_ptr,
    tile_counter_ptr,
    num_heads,
    num_heads_total,
    num_queries,
    num_keys,
    padded_queries,
    heads_in_flight,
    num_work_tiles,
    scale_log2,
    BLOCK_Q: gl.constexpr,
    D: gl.constexpr,
    STAGES: gl.constexpr,
    STAGES_GRAD_OUT: gl.constexpr,
    CAUSAL: gl.constexpr,
    EVEN_K: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """∂K and ∂V of 128 keys of one head after another, and their part of ∂Q, added to its
    accumulator.
    """
    DTYPE: gl.constexpr = q_desc.dtype
    TILE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    q_s = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BLOCK_Q, D], q_desc.layout)
    grad_out_s = gl.allocate_shared_memory(
        DTYPE, [STAGES_GRAD_OUT, 1, 1, BLOCK_Q, D], grad_out_desc.layout
    )
    k_s = gl.allocate_shared_memory(DTYPE, [2, 1, 1, 64, D], k_desc.layout)
    v_s = gl.allocate_shared_memory(DTYPE, [2, 1, 1, 64, D], v_desc.layout)
    grad_scores_s = gl.allocate_shared_memory(DTYPE, [4, 64, BLOCK_Q], TILE)
    grad_q_s = gl.allocate_shared_memory(gl.float32, [2, 16, 256], dq_accum_desc.layout)
    staged_s = k_s
    if D == 128:
        staged_s = gl.allocate_shared_memory(DTYPE, [1, 1, 1, 64, D], grad_k_desc.layout)
    lse_s = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_Q], lse_desc.layout)
    delta_s = gl.allocate_shared_memory(gl.float32, [STAGES_GRAD_OUT, BLOCK_Q], delta_desc.layout)
    # The numbers from 0 on, for the masks.
    NUMBERS: gl.constexpr = gl.SwizzledSharedLayout(vec=1, per_phase=1, max_phase=1, order=[0])
    numbers_s = gl.allocate_shared_memory(gl.int32, [BLOCK_Q], NUMBERS)
    numbers_s.store(gl.arange(0, BLOCK_Q, layout=gl.BlockedLayout([1], [32], [4], [0])))
    k_full = barrier()
    v_full = barrier()
    k_empty = barrier()
    v_empty = barrier()
    staged = barrier()
    # Nobody arrives here: whoever waits for the phase before the first passes.
    passed = barrier()
    # The work tile after this one, as the producer takes it.
    work_s = gl.allocate_shared_memory(
        gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    )
    work_full = barriers(2)
    work_empty = barriers(2)
    grad_scores_full = barrier()
    q_full = barriers(STAGES)
    q_empty = barriers(STAGES)
    grad_out_full = barriers(STAGES_GRAD_OUT)
    grad_out_empty = barriers(STAGES_GRAD_OUT)
    grad_q_full = barriers(WRITERS)
    grad_q_empty = barrier()
    mbarrier.init(k_full, count=1)
    mbarrier.init(v_full, count=1)
    mbarrier.init(k_empty, count=2)
    mbarrier.init(v_empty, count=2)
    mbarrier.init(staged, count=2)
    mbarrier.init(passed, count=1)
    for slot in gl.static_range(2):
        mbarrier.init(work_full.index(slot), count=1)
        mbarrier.init(work_empty.index(slot), count=2 + WRITERS)
    mbarrier.init(grad_scores_full, count=2)
    for b in gl.static_range(STAGES):
        mbarrier.init(q_full.index(b), count=1)
        mbarrier.init(q_empty.index(b), count=2)
    for b in gl.static_range(STAGES_GRAD_OUT):
        mbarrier.init(grad_out_full.index(b), count=1)
        mbarrier.init(grad_out_empty.index(b), count=2)
    for b in gl.static_range(WRITERS):
        mbarrier.init(grad_q_full.index(b), count=2)
    mbarrier.init(grad_q_empty, count=1)
    fence_async_shared()
    shared = Shared(
        grad_k_desc,
        grad_v_desc,
        q_s,
        grad_out_s,
        k_s,
        v_s,
        lse_s,
        delta_s,
        grad_scores_s,
        grad_q_s,
        numbers_s,
        staged_s,
        k_full,
        v_full,
        k_empty,
        v_empty,
        q_full,
        q_empty,
        grad_out_full,
        grad_out_empty,
        grad_scores_full,
        grad_q_full,
        grad_q_empty,
        staged,
        passed,
        work_s,
        work_full,
        work_empty,
        num_heads,
        num_heads_total,
        num_queries,
        num_keys,
        scale_log2,
        heads_in_flight,
        num_work_tiles,
        q_desc,
        grad_out_desc,
        k_desc,
        v_desc,
        lse_desc,
        delta_desc,
        tile_counter_ptr,
        padded_queries,
        dq_accum_desc,
        dq_semaphore_ptr,
        BLOCK_Q,
        D,
        STAGES,
        STAGES_GRAD_OUT,
        CAUSAL,
        EVEN_K,
    )
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


@triton.jit(do_not_specialize=LENGTHS)
def hopper_bwd_convert_kernel(
    dq_accum_ptr,
    grad_q_ptr,
    stride_b,
    stride_h,
    stride_s,
    num_queries,
    num_tiles,
    scale,
    D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
):
    """∂Q = scale · sum of one (64, 64) part, out of the order of `_in_register_order`."""
    part = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    tile = part // 2
    head_total = batch * tl.num_programs(1) + head
    # A tile of 128 queries has two parts of 64 queries, one of 64 has two of 64 columns.
    first = tile * BLOCK_Q + (part % 2 * 64 if BLOCK_Q == 128 else 0)
    cols = tl.arange(0, 64)[None, :] + (0 if BLOCK_Q == 128 else part % 2 * 64)
    total = tl.load(dq_accum_ptr + (head_total * num_tiles * 2 + part) * 4096 + tl.arange(0, 4096))
    total = tl.reshape(total, (8, 4, 8, 4, 2, 2)).permute((1, 4, 2, 0, 3, 5)).reshape(64, 64)
    rows = first + tl.arange(0, 64)
    to = (
        grad_q_ptr
        + batch * stride_b
        + head * stride_h
        + rows.to(tl.int64)[:, None] * stride_s
        + cols
    )
    tl.store(
        to, (total * scale).to(grad_q_ptr.dtype.element_ty), mask=(rows < num_queries)[:, None]
    )


def _dq_accum_layout() -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)


def _tiles_each(
    num_heads_total: int,
    num_queries: int,
    num_keys: int,
    head_dim: int,
    causal: bool,
    programs: int,
):
    """Returns how many tiles a multiprocessor computes, at least one program's."""
    work_tiles = max(1, num_heads_total * -(-num_keys // BLOCK_K.value) / programs)
    return work_tiles * -(-num_queries // SINGLE[head_dim]["BLOCK_Q"]) / (2 if causal else 1)


def heads_in_flight(
    num_heads_total: int,
    num_queries: int,
    num_keys: int,
    head_dim: int,
    causal: bool,
    programs: int,
) -> int:
    """Returns how many heads' programs take turns in one pass; the arguments are those of
    `ordering_pays`.
    """
    most = HEADS_IN_FLIGHT[head_dim]
    if not causal:
        tiles = _tiles_each(num_heads_total, num_queries, num_keys, head_dim, causal, programs)
        most = min(most, math.ceil(programs / (WAITING * tiles)))
    # As many in every round of heads.
    return -(-num_heads_total // -(-num_heads_total // most))


def ordering_pays(
    num_heads_total: int,
    num_queries: int,
    num_keys: int,
    head_dim: int,
    causal: bool,
    programs: int,
) -> bool:
    """Returns whether one pass is expected to take less time than the two kernels of the other
    module.

    Counted in tiles: the programs of a head that run at once start one tile after the other, so the
    last of them waits for as many tiles as they are. Beside all tiles that a multiprocessor
    computes, that is to be less than what two kernels take longer than one that waits for none.
    Measured on an H200, full masks: 1.05 to 1.75 of that one's time where 0.07 to 1.0 of the tiles
    are waited for.

    Causal, whoever waits longest has the shortest loop, and none waits in the end where all run at
    once; and the two kernels end on the longest loops of the last head. Of the shapes measured
    ordering paid in 11 of 11 at D 128 and in 12 of 16 at D 64; two of the other four were level,
    and two were of one and two heads.

    Args:
        num_heads_total: of all batches.
        programs: how many run at once.
    """
    key_tiles = -(-num_keys // BLOCK_K.value)
    if causal and (
        head_dim == 128 or num_heads_total >= 4 or num_heads_total * key_tiles <= programs
    ):
        return True
    shape = (num_heads_total, num_queries, num_keys, head_dim, causal, programs)
    waiting = min(key_tiles, programs / heads_in_flight(*shape))
    return waiting < MOST_WAITING[head_dim] * _tiles_each(*shape)


def plan(
    q: Layout,
    k: Layout,
    v: Layout,
    grad_out: Layout,
    grads: tuple[Layout, ...],
    padded_queries: int,
    device_index: int,
    *,
    scale: float,
    causal: bool,
) -> Callable[..., None]:
    """Returns what writes the gradients, as `two_passes.plan` does; q and k have as many
    heads.
    """
    num_batches, num_heads, num_queries, head_dim = q.shape
    num_keys = k.shape[2]
    num_heads_total = num_batches * num_heads
    tiles = SINGLE[head_dim]
    block_q = tiles["BLOCK_Q"]
    num_tiles = -(-num_queries // block_q)
    # Two parts of 64 × 64 a tile, each 16 rows of 256. No program adds to a tile whose queries see
    # no key.
    dq_accum_shape, sees_none = (
        (num_heads_total * num_tiles * 32, 256),
        causal and num_queries > num_keys,
    )
    num_work_tiles = -(-num_keys // BLOCK_K.value) * num_heads_total
    programs = num_multiprocessors(device_index)
    statistics = rows_of(num_heads_total * padded_queries, block_q)
    inner, own = ((q, block_q), (grad_out, block_q)), ((x, ROWS) for x in (k, v, *grads[1:]))
    described = [
        *((n, tiles_of(*each)) for n, each in enumerate((*inner, *own))),
        (6, statistics),
        (7, statistics),
    ]
    described.append(
        (8, described_as(dq_accum_shape, (256, 1), torch.float32, (16, 256), _dq_accum_layout()))
    )
    turns = heads_in_flight(num_heads_total, num_queries, num_keys, head_dim, causal, programs)
    lengths = (num_heads, num_heads_total, num_queries, num_keys, padded_queries)
    constants = {
        "D": head_dim,
        "CAUSAL": causal,
        "EVEN_K": causal or num_keys % BLOCK_K.value == 0,
        **tiles,
    }
    numbers, grid = (
        (*lengths, turns, num_work_tiles, scale * LOG2_E),
        (min(num_work_tiles, programs),),
    )
    launch = TileLaunch(hopper_bwd_single_kernel, grid, described, numbers, constants, 2)
    numbers, constants = (
        (*grads[0].strides[:3], num_queries, num_tiles, scale),
        {"D": head_dim, "BLOCK_Q": block_q},
    )
    convert = Launch(
        hopper_bwd_convert_kernel, (num_tiles * 2, num_heads, num_batches), constants, numbers
    )

    def run(inputs, statistics, grads, _) -> None:
        q, k, v, grad_out = inputs
        grad_q, grad_k, grad_v = grads
        empty = torch.zeros if sees_none else torch.empty
        dq_accum = empty(dq_accum_shape, dtype=torch.float32, device=q.device)
        # The counter of work tiles, alone on its 16 bytes; then how far each of them has come.
        num_counters = 4 + num_work_tiles * WRITERS.value
        counters = torch.zeros(num_counters, dtype=torch.int32, device=q.device)
        tensors = (q, grad_out, k, v, grad_k, grad_v, *statistics, dq_accum)
        launch(tensors, counters[4:], counters)
        convert(dq_accum, grad_q)

    return run
