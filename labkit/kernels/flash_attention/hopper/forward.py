"""FlashAttention's forward on Hopper in Gluon: TMA loads by one warp, asynchronous products by two
or three warpgroups.

    S = scale · Q Kᵀ    P = softmax(S)    O = P V    L = log Σ exp S

Shapes: (batch, heads, length, D), D 64, 72, 80, 96 or 128, bf16 or fp16, causal (aligned to the
bottom right) or not. Everything else that `flash_attention` takes runs in its Triton kernels.

Ideal cost per head: 4·Q·K·D FLOPs, halved when causal.

How a program is laid out: a producer warp issues TMA loads into rings of tiles, each guarded by a
barrier for "full" and one for "empty"; consumer warpgroups of 64 rows each multiply. The producer
gives its registers to them.
- The product of tile i − 1 with V runs under the softmax of tile i: ptxas awaits it after the row
  maxima. Awaited after the exponentials, as written here, it made the whole 7 % slower (a branch
  before the wait keeps them ahead of it).
- Three consumers at D 64, where the exponentials take as long as the products: one multiplies while
  the others take theirs. Two elsewhere: the accumulators need the registers.
- A program takes one tile of queries after another, and the next queries load under the end of the
  last. There are two buffers for them; the output leaves through the one that its queries came in.
- With few tiles of queries each one's keys are split among several programs, and a kernel after it
  combines them.
- D 72, 80 and 96 are 64 columns and a tail of 16 or 32, each with its own tiles, products and
  accumulator.
- A descriptor has batch, head, row and column as dimensions of their own: TMA loads zeros past a
  sequence's last row and stores nothing there.

Sources: Shah et al. 2024, "FlashAttention-3"; Dao 2023, "FlashAttention-2".
"""

from collections.abc import Callable

import torch
from torch import Tensor
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
    TAILS,
    TileLaunch,
    async_load,
    async_store,
    await_number,
    decode_tile,
    hand_number,
    to_low,
    with_tails,
)
from labkit.kernels.flash_attention.shapes import Layout, with_heads
from labkit.kernels.flash_attention.splits import (
    empty_lse,
    empty_parts,
    num_splits_of,
    output_launch,
    row_elements,
)
from labkit.kernels.launch import num_multiprocessors

# Keys of a tile, how many tiles are in flight, and warpgroups of 64 queries. Bounds: 160 or 240
# registers a thread of a consumer (scores 64 × BLOCK_K and the accumulator of 64 rows · D); 227 KiB
# of shared memory, of which 128 rows take 256·D bytes per tensor.
FORWARD = {
    64: {"BLOCK_K": 128, "STAGES": 5, "CONSUMERS": 3},
    72: {"BLOCK_K": 128, "STAGES": 2, "CONSUMERS": 2},
    80: {"BLOCK_K": 128, "STAGES": 2, "CONSUMERS": 2},
    96: {"BLOCK_K": 128, "STAGES": 3, "CONSUMERS": 2},
    128: {"BLOCK_K": 128, "STAGES": 2, "CONSUMERS": 2},
}
# Up to so many queries: 128 of them fill a tile where 192 often do not (256 queries: 343 TFLOP/s,
# not 225).
SHORT = 1024
FORWARD_SHORT = FORWARD | {64: {"BLOCK_K": 128, "STAGES": 4, "CONSUMERS": 2}}

# A program that takes several tiles of queries loads the next one under the end of the last, which
# pays while tiles are short (18 % at 1,024 keys). Others are given out evenly, and when long by the
# hardware's own queue. Causal tiles are of all lengths and come longest first: from so many keys on
# the hardware gives each to the first multiprocessor that is free, or, with more than so many for
# each, programs take theirs from a counter (5 % at 4,096 keys, 8 % at 16,384, 9 % at 1,536). A
# program takes one tile ahead, which with few of them is too soon (1, 8, 4096, 128: 74 us, not 57),
# and the counter costs a launch, which below so many keys it does not earn.
PERSISTENT_UNTIL = 8192
QUEUE_FROM = 2048
DYNAMIC_FROM = 3
DYNAMIC_FROM_KEYS = 512

# Where there are about as many key heads as programs (SECTIONS_FROM for each), every program reads
# keys of its own, at 128 columns faster than memory gives them. Then the tiles of so many heads
# come first as have their keys and values in half of Hopper's L2 cache (16, 16, 1024, 128: 7 to 14
# % faster; before, 0.63 GB were read of tensors of 0.20). With fewer heads several programs share
# each one's keys anyway, and a section's last tiles are too few to end together (1, 16, 16384, 128:
# 9 % slower).
SECTION_BYTES = 24 << 20
SECTION_COLUMNS = 128
SECTIONS_FROM = 2 / 3

# Plain numbers to the kernels: a length of 1, or one divisible by 16, is no reason to compile them
# anew.
LENGTHS = (
    "num_heads",
    "num_heads_total",
    "group",
    "num_queries",
    "num_keys",
    "num_splits",
    "section",
)


@gluon.jit
def _fwd_tile(t, num_q_tiles, num_heads_total, section, CAUSAL: gl.constexpr):
    """Which tile of queries and which head (of all batches) the t-th one is.

    Heads one after another share their keys in the L2 cache. When causal the longest tiles of all
    heads of a section come first: each program takes the next one when it is done.
    """
    if CAUSAL:
        head, before = decode_tile(t, num_q_tiles, num_heads_total, section)
        tile = num_q_tiles - 1 - before
    else:
        tile = t % num_q_tiles
        head = t // num_q_tiles
    return tile, head


@gluon.jit
def _fwd_next(t, turn, tile_s, tile_full, tile_empty, DYNAMIC: gl.constexpr):
    """The consumer's tile after t: the one that the producer took from the counter, or the next in
    a fixed order.
    """
    if DYNAMIC:
        t = await_number(turn, tile_s, tile_full)
        mbarrier.arrive(tile_empty.index(turn & 1), count=1)
    else:
        t += gl.num_programs(0)
    return t


@gluon.jit
def _num_key_tiles(rows_end, num_queries, num_keys, BLOCK_K: gl.constexpr, CAUSAL: gl.constexpr):
    """How many key tiles the queries before `rows_end` see; one at least, so that a row without
    keys is written.
    """
    end = num_keys
    if CAUSAL:
        end = gl.maximum(gl.minimum(end, rows_end + (num_keys - num_queries)), 1)
    return (end + BLOCK_K - 1) // BLOCK_K


@gluon.jit
def _split_range(num_tiles, split, num_splits, SPLIT_K: gl.constexpr):
    """The first key tile of a split and how many it has; one at least, past the last key where none
    is left.
    """
    first = 0
    if SPLIT_K:
        length = (num_tiles + num_splits - 1) // num_splits
        first = split * length
        num_tiles = gl.maximum(gl.minimum(num_tiles - first, length), 1)
    return first, num_tiles


@gluon.jit
def _load(desc, tail_desc, batch, head, row, full, tile, tail, TAIL: gl.constexpr):
    """A tile of rows, and its columns from 64 on where the head dimension has them."""
    nbytes: gl.constexpr = desc.block_type.nbytes + (tail_desc.block_type.nbytes if TAIL else 0)
    mbarrier.expect(full, nbytes)
    async_load(desc, [batch, head, row, 0], full, tile)
    if TAIL:
        async_load(tail_desc, [batch, head, row, 64], full, tail)


@gluon.jit
def _fwd_producer(
    q_desc,
    q_tail_desc,
    k_desc,
    k_tail_desc,
    v_desc,
    v_tail_desc,
    q_s,
    q_tail_s,
    k_s,
    k_tail_s,
    v_s,
    v_tail_s,
    q_full,
    q_empty,
    k_full,
    k_empty,
    v_full,
    v_empty,
    tile_s,
    tile_full,
    tile_empty,
    tile_counter_ptr,
    num_heads,
    num_heads_total,
    group,
    num_queries,
    num_keys,
    num_splits,
    section,
    BLOCK_K: gl.constexpr,
    TAIL: gl.constexpr,
    STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
    CONSUMERS: gl.constexpr,
    DYNAMIC: gl.constexpr,
    SPLIT_K: gl.constexpr,
):
    num_q_tiles = (num_queries + 64 * CONSUMERS - 1) // (64 * CONSUMERS)
    j = 0
    turn = 0
    t = gl.program_id(0)
    num_head_splits = num_heads_total * num_splits if SPLIT_K else num_heads_total
    while t < num_q_tiles * num_head_splits:
        following = t + gl.num_programs(0)
        tile, head_split = _fwd_tile(t, num_q_tiles, num_head_splits, section, CAUSAL)
        head_total = head_split % num_heads_total if SPLIT_K else head_split
        batch = head_total // num_heads
        head = head_total % num_heads
        q0 = tile * (64 * CONSUMERS)
        num_tiles = _num_key_tiles(q0 + 64 * CONSUMERS, num_queries, num_keys, BLOCK_K, CAUSAL)
        first, num_tiles = _split_range(
            num_tiles, head_split // num_heads_total, num_splits, SPLIT_K
        )
        for i in range(num_tiles):
            stage = j % STAGES
            free = ((j // STAGES) & 1) ^ 1
            start = (first + num_tiles - 1 - i) * BLOCK_K
            mbarrier.wait(k_empty.index(stage), free)
            _load(
                k_desc,
                k_tail_desc,
                batch,
                head // group,
                start,
                k_full.index(stage),
                k_s.index(stage),
                k_tail_s.index(stage),
                TAIL,
            )
            if i == 0:
                for c in gl.static_range(CONSUMERS):
                    place = (turn & 1) * CONSUMERS + c
                    mbarrier.wait(q_empty.index(place), ((turn >> 1) & 1) ^ 1)
                    _load(
                        q_desc,
                        q_tail_desc,
                        batch,
                        head,
                        q0 + c * 64,
                        q_full.index(place),
                        q_s.index(place),
                        q_tail_s.index(place),
                        TAIL,
                    )
            mbarrier.wait(v_empty.index(stage), free)
            _load(
                v_desc,
                v_tail_desc,
                batch,
                head // group,
                start,
                v_full.index(stage),
                v_s.index(stage),
                v_tail_s.index(stage),
                TAIL,
            )
            if DYNAMIC:
                # Taken behind the first loads of this tile, which would wait for the answer.
                if i == 0:
                    following = gl.num_programs(0) + gl.atomic_add(
                        tile_counter_ptr, 1, sem="relaxed"
                    )
            j += 1
        if DYNAMIC:
            mbarrier.wait(tile_empty.index(turn & 1), ((turn >> 1) & 1) ^ 1)
            hand_number(following, turn, tile_s, tile_full)
        t = following
        turn += 1


@gluon.jit
def _fwd_mask(scores, numbers_s, end, diagonal, CAUSAL: gl.constexpr, SCORES: gl.constexpr):
    """The scores of visible keys, −inf elsewhere: keys before `end`, and before `diagonal` plus the
    number of the row.

    Both count from the tile's first key. The numbers come from shared memory: as constants they
    stay in registers through the loop.
    """
    keys = numbers_s.load(gl.SliceLayout(0, SCORES))
    if CAUSAL:
        rows = numbers_s.slice(0, 64).load(gl.SliceLayout(1, SCORES))
        visible = keys[None, :] < gl.minimum(rows + diagonal, end)[:, None]
    else:
        visible = (keys < end)[None, :]
    return gl.where(visible, scores, float("-inf"))


@gluon.jit
def _softmax(scores, maximum, total, scale_log2, MASKED: gl.constexpr):
    """One step of the online softmax: P, and the maximum, the sum and the factor that the older
    ones shrink by.
    """
    new_maximum = gl.maximum(maximum, gl.max(scores, 1) * scale_log2)
    shift = new_maximum
    if MASKED:
        # While a row has seen no key its maximum is −inf, and −inf − (−inf) would be NaN.
        shift = gl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    p = gl.exp2(scores * scale_log2 - shift[:, None])
    rescale = gl.exp2(maximum - shift)
    return p, new_maximum, total * rescale + gl.sum(p, 1), rescale


@gluon.jit
def _scores(
    q, q_tail, k, k_tail, before, BLOCK_K: gl.constexpr, D: gl.constexpr, TAIL: gl.constexpr
):
    """Q Kᵀ, in flight, in the registers of `before`: a tile of zeros would be as many more, set
    anew each time.
    """
    scores = warpgroup_mma(
        q, k.reshape([BLOCK_K, D]).permute((1, 0)), before, use_acc=False, is_async=True
    )
    if TAIL:
        scores = warpgroup_mma(
            q_tail, k_tail.reshape([BLOCK_K, TAIL]).permute((1, 0)), scores, is_async=True
        )
    return scores


@gluon.jit
def _values(
    p_low, v, v_tail, acc, acc_tail, BLOCK_K: gl.constexpr, D: gl.constexpr, TAIL: gl.constexpr
):
    """P V added to both parts of the output, in flight."""
    acc = warpgroup_mma(p_low, v.reshape([BLOCK_K, D]), acc, is_async=True)
    if TAIL:
        acc_tail = warpgroup_mma(p_low, v_tail.reshape([BLOCK_K, TAIL]), acc_tail, is_async=True)
    return acc, acc_tail


@gluon.jit
def _fwd_step(
    i,
    q,
    q_tail,
    k_s,
    k_tail_s,
    v_s,
    v_tail_s,
    numbers_s,
    k_full,
    k_empty,
    v_full,
    v_empty,
    p,
    p_low,
    acc,
    acc_tail,
    maximum,
    total,
    end,
    diagonal,
    scale_log2,
    BLOCK_K: gl.constexpr,
    D: gl.constexpr,
    TAIL: gl.constexpr,
    STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
    MASKED: gl.constexpr,
    SCORES: gl.constexpr,
    OUT: gl.constexpr,
    OUT_TAIL: gl.constexpr,
):
    """The scores and the softmax of tile i, and the product with V of tile i − 1 under them."""
    stage = i % STAGES
    before = (i - 1) % STAGES
    mbarrier.wait(k_full.index(stage), (i // STAGES) & 1)
    scores_mma = _scores(q, q_tail, k_s.index(stage), k_tail_s.index(stage), p, BLOCK_K, D, TAIL)
    mbarrier.wait(v_full.index(before), ((i - 1) // STAGES) & 1)
    acc_mma, acc_tail_mma = _values(
        p_low, v_s.index(before), v_tail_s.index(before), acc, acc_tail, BLOCK_K, D, TAIL
    )
    scores = warpgroup_mma_wait(2 if TAIL else 1, deps=(scores_mma,))
    mbarrier.arrive(k_empty.index(stage), count=1)
    if MASKED:
        scores = _fwd_mask(scores, numbers_s, end, diagonal, CAUSAL, SCORES)
    p, maximum, total, rescale = _softmax(scores, maximum, total, scale_log2, MASKED)
    if TAIL:
        acc, acc_tail = warpgroup_mma_wait(0, deps=(acc_mma, acc_tail_mma))
    else:
        acc = warpgroup_mma_wait(0, deps=(acc_mma,))
    mbarrier.arrive(v_empty.index(before), count=1)
    acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, OUT))[:, None]
    if TAIL:
        acc_tail = acc_tail * gl.convert_layout(rescale, gl.SliceLayout(1, OUT_TAIL))[:, None]
    p_low = gl.convert_layout(to_low(p, q.dtype), gl.DotOperandLayout(0, OUT, 2))
    return p, p_low, acc, acc_tail, maximum, total


@gluon.jit
def _store_part(
    parts,
    acc,
    q1,
    num_queries,
    column,
    WIDTH: gl.constexpr,
    ROW: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """Writes 64 rows of a split's output, in fp32, from `column` on."""
    rows = q1 + gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
    cols = column + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, LAYOUT))
    gl.store(parts + (rows * ROW)[:, None] + cols[None, :], acc, mask=(rows < num_queries)[:, None])


@gluon.jit
def _fwd_consumer(
    C: gl.constexpr,
    out_desc,
    out_tail_desc,
    parts_ptr,
    lse_ptr,
    q_s,
    q_tail_s,
    k_s,
    k_tail_s,
    v_s,
    v_tail_s,
    numbers_s,
    q_full,
    q_empty,
    k_full,
    k_empty,
    v_full,
    v_empty,
    tile_s,
    tile_full,
    tile_empty,
    num_heads,
    num_heads_total,
    num_queries,
    num_keys,
    num_splits,
    section,
    scale_log2,
    BLOCK_K: gl.constexpr,
    D: gl.constexpr,
    TAIL: gl.constexpr,
    STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
    EVEN_K: gl.constexpr,
    CONSUMERS: gl.constexpr,
    DYNAMIC: gl.constexpr,
    SPLIT_K: gl.constexpr,
):
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_K, 16]
    )
    OUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16]
    )
    OUT_TAIL: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, TAIL if TAIL else 16, 16]
    )
    MASKED: gl.constexpr = CAUSAL or not EVEN_K
    num_q_tiles = (num_queries + 64 * CONSUMERS - 1) // (64 * CONSUMERS)
    p = gl.zeros([64, BLOCK_K], gl.float32, layout=SCORES)
    # The number of the next key tile that the producer loads, counted over all tiles of queries.
    j = 0
    turn = 0
    t = gl.program_id(0)
    num_head_splits = num_heads_total * num_splits if SPLIT_K else num_heads_total
    while t < num_q_tiles * num_head_splits:
        tile, head_split = _fwd_tile(t, num_q_tiles, num_head_splits, section, CAUSAL)
        place = (turn & 1) * CONSUMERS + C
        q = q_s.index(place).reshape([64, D])
        q_tail = q
        if TAIL:
            q_tail = q_tail_s.index(place).reshape([64, TAIL])
        q0 = tile * (64 * CONSUMERS)
        q1 = q0 + C * 64
        # The first key that the first query does not see; each further query sees one more.
        diagonal = q1 + (num_keys - num_queries) + 1
        num_tiles = _num_key_tiles(q0 + 64 * CONSUMERS, num_queries, num_keys, BLOCK_K, CAUSAL)
        first, num_tiles = _split_range(
            num_tiles, head_split // num_heads_total, num_splits, SPLIT_K
        )
        # The number of the key tile after the last one of this tile of queries.
        after = j + num_tiles
        num_full = num_keys // BLOCK_K
        if CAUSAL:
            # The loop begins at the last keys. Those that only the consumers of later queries see
            # are passed over.
            num_mine = _num_key_tiles(q1 + 64, num_queries, num_keys, BLOCK_K, CAUSAL)
            if SPLIT_K:
                num_mine = gl.maximum(gl.minimum(num_mine - first, num_tiles), 1)
            for _ in range(num_tiles - num_mine):
                mbarrier.wait(k_full.index(j % STAGES), (j // STAGES) & 1)
                mbarrier.arrive(k_empty.index(j % STAGES), count=1)
                mbarrier.wait(v_full.index(j % STAGES), (j // STAGES) & 1)
                mbarrier.arrive(v_empty.index(j % STAGES), count=1)
                j += 1
            num_full = gl.minimum(num_full, gl.maximum(diagonal, 0) // BLOCK_K)
            if SPLIT_K:
                num_full = gl.maximum(num_full - first, 0)
        maximum = gl.full([64], float("-inf"), gl.float32, layout=gl.SliceLayout(1, SCORES))
        total = gl.zeros([64], gl.float32, layout=gl.SliceLayout(1, SCORES))
        acc = gl.zeros([64, D], gl.float32, layout=OUT)
        acc_tail = gl.zeros([64, TAIL if TAIL else 16], gl.float32, layout=OUT_TAIL)
        mbarrier.wait(q_full.index(place), (turn >> 1) & 1)
        mbarrier.wait(k_full.index(j % STAGES), (j // STAGES) & 1)
        scores_mma = _scores(
            q, q_tail, k_s.index(j % STAGES), k_tail_s.index(j % STAGES), p, BLOCK_K, D, TAIL
        )
        scores = warpgroup_mma_wait(0, deps=(scores_mma,))
        mbarrier.arrive(k_empty.index(j % STAGES), count=1)
        start = (first + after - j - 1) * BLOCK_K
        if MASKED:
            scores = _fwd_mask(
                scores, numbers_s, num_keys - start, diagonal - start, CAUSAL, SCORES
            )
        p, maximum, total, _rescale = _softmax(scores, maximum, total, scale_log2, MASKED)
        p_low = gl.convert_layout(to_low(p, q.dtype), gl.DotOperandLayout(0, OUT, 2))
        # The tile before has left its buffer, which the queries after this one may have. Only the
        # thread that stored it can wait for that; the barrier in this tells the others.
        tma.store_wait(0)
        mbarrier.arrive(q_empty.index(CONSUMERS - place + 2 * C), count=1, pred=turn > 0)
        # What takes masks comes first, and the loop behind it takes none.
        first_full = j + 1
        if CAUSAL:
            first_full = gl.maximum(after - num_full, first_full)
            for i in range(j + 1, first_full):
                start = (first + after - i - 1) * BLOCK_K
                p, p_low, acc, acc_tail, maximum, total = _fwd_step(
                    i,
                    q,
                    q_tail,
                    k_s,
                    k_tail_s,
                    v_s,
                    v_tail_s,
                    numbers_s,
                    k_full,
                    k_empty,
                    v_full,
                    v_empty,
                    p,
                    p_low,
                    acc,
                    acc_tail,
                    maximum,
                    total,
                    num_keys - start,
                    diagonal - start,
                    scale_log2,
                    BLOCK_K,
                    D,
                    TAIL,
                    STAGES,
                    CAUSAL,
                    True,
                    SCORES,
                    OUT,
                    OUT_TAIL,
                )
        for i in range(first_full, after):
            p, p_low, acc, acc_tail, maximum, total = _fwd_step(
                i,
                q,
                q_tail,
                k_s,
                k_tail_s,
                v_s,
                v_tail_s,
                numbers_s,
                k_full,
                k_empty,
                v_full,
                v_empty,
                p,
                p_low,
                acc,
                acc_tail,
                maximum,
                total,
                0,
                0,
                scale_log2,
                BLOCK_K,
                D,
                TAIL,
                STAGES,
                CAUSAL,
                False,
                SCORES,
                OUT,
                OUT_TAIL,
            )
        last = after - 1
        mbarrier.wait(v_full.index(last % STAGES), (last // STAGES) & 1)
        acc_mma, acc_tail_mma = _values(
            p_low,
            v_s.index(last % STAGES),
            v_tail_s.index(last % STAGES),
            acc,
            acc_tail,
            BLOCK_K,
            D,
            TAIL,
        )
        # A row without any key: zeros, and −inf.
        divisor = gl.where(total == 0.0, 1.0, total)
        lse = gl.where(total == 0.0, float("-inf"), (maximum + gl.log2(divisor)) * LN_2)
        rows = q1 + gl.arange(0, 64, layout=gl.SliceLayout(1, SCORES))
        gl.store(
            lse_ptr + head_split.to(gl.int64) * num_queries + rows, lse, mask=rows < num_queries
        )
        if TAIL:
            acc, acc_tail = warpgroup_mma_wait(0, deps=(acc_mma, acc_tail_mma))
        else:
            acc = warpgroup_mma_wait(0, deps=(acc_mma,))
        mbarrier.arrive(v_empty.index(last % STAGES), count=1)
        acc = acc * gl.convert_layout(1.0 / divisor, gl.SliceLayout(1, OUT))[:, None]
        if TAIL:
            acc_tail = (
                acc_tail * gl.convert_layout(1.0 / divisor, gl.SliceLayout(1, OUT_TAIL))[:, None]
            )
        if SPLIT_K:
            parts = parts_ptr + head_split.to(gl.int64) * num_queries * (D + TAIL)
            _store_part(parts, acc, q1, num_queries, 0, D, D + TAIL, OUT)
            if TAIL:
                _store_part(parts, acc_tail, q1, num_queries, D, TAIL, D + TAIL, OUT_TAIL)
        else:
            # The output takes the place of the queries.
            q.store(to_low(acc, q.dtype))
            if TAIL:
                q_tail.store(to_low(acc_tail, q.dtype))
            fence_async_shared()
            batch = head_split // num_heads
            head = head_split % num_heads
            async_store(out_desc, [batch, head, q1, 0], q_s.index(place))
            if TAIL:
                async_store(out_tail_desc, [batch, head, q1, 64], q_tail_s.index(place))
        j = after
        t = _fwd_next(t, turn, tile_s, tile_full, tile_empty, DYNAMIC)
        turn += 1
    tma.store_wait(0)


@gluon.jit(do_not_specialize=LENGTHS)
def hopper_fwd_kernel(
    q_desc,
    q_tail_desc,
    k_desc,
    k_tail_desc,
    v_desc,
    v_tail_desc,
    out_desc,
    out_tail_desc,
    parts_ptr,
    lse_ptr,
    tile_counter_ptr,
    num_heads,
    num_heads_total,
    group,
    num_queries,
    num_keys,
    num_splits,
    section,
    scale_log2,
    BLOCK_K: gl.constexpr,
    D: gl.constexpr,
    TAIL: gl.constexpr,
    STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
    EVEN_K: gl.constexpr,
    CONSUMERS: gl.constexpr,
    DYNAMIC: gl.constexpr,
    SPLIT_K: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """The output and the log-sum-exp; a program takes tiles of 64 queries a consumer, one after
    another.

    CAUSAL: the tiles of `section` heads come before those of the next as many. DYNAMIC: programs
    take tiles from the counter at tile_counter_ptr, which begins at 0. SPLIT_K: of each split of
    the keys, the output in fp32 to parts_ptr (num_splits, heads of all batches, queries, D + TAIL),
    and its log-sum-exp; out_desc is not used then.
    """
    # Queries, and afterwards their output, of this tile and of the next.
    q_s = gl.allocate_shared_memory(q_desc.dtype, [2 * CONSUMERS, 1, 1, 64, D], q_desc.layout)
    k_s = gl.allocate_shared_memory(k_desc.dtype, [STAGES, 1, 1, BLOCK_K, D], k_desc.layout)
    v_s = gl.allocate_shared_memory(v_desc.dtype, [STAGES, 1, 1, BLOCK_K, D], v_desc.layout)
    q_tail_s = q_s
    k_tail_s = k_s
    v_tail_s = v_s
    if TAIL:
        q_tail_s = gl.allocate_shared_memory(
            q_desc.dtype, [2 * CONSUMERS, 1, 1, 64, TAIL], q_tail_desc.layout
        )
        k_tail_s = gl.allocate_shared_memory(
            k_desc.dtype, [STAGES, 1, 1, BLOCK_K, TAIL], k_tail_desc.layout
        )
        v_tail_s = gl.allocate_shared_memory(
            v_desc.dtype, [STAGES, 1, 1, BLOCK_K, TAIL], v_tail_desc.layout
        )
    q_full = gl.allocate_shared_memory(gl.int64, [2 * CONSUMERS, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [2 * CONSUMERS, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for place in gl.static_range(2 * CONSUMERS):
        mbarrier.init(q_full.index(place), count=1)
        mbarrier.init(q_empty.index(place), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=CONSUMERS)
        mbarrier.init(v_empty.index(stage), count=CONSUMERS)
    # The numbers from 0 on, for the masks.
    numbers_s = gl.allocate_shared_memory(
        gl.int32, [BLOCK_K], gl.SwizzledSharedLayout(vec=1, per_phase=1, max_phase=1, order=[0])
    )
    if CAUSAL or not EVEN_K:
        numbers_s.store(gl.arange(0, BLOCK_K, layout=gl.BlockedLayout([1], [32], [4], [0])))
    # The tile after this one, as the producer takes it. Only where it takes any: barriers that
    # nobody waits for share their memory with the numbers, and what initialises them may come after
    # what is stored there.
    tile_s = numbers_s
    tile_full = k_full
    tile_empty = k_empty
    if DYNAMIC:
        tile_s = gl.allocate_shared_memory(
            gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, order=[0])
        )
        tile_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        tile_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        for slot in gl.static_range(2):
            mbarrier.init(tile_full.index(slot), count=1)
            mbarrier.init(tile_empty.index(slot), count=CONSUMERS)
    fence_async_shared()
    # The tuples are written out: one that is first given a name loses its compile-time constants.
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (
                    _fwd_consumer,
                    (
                        0,
                        out_desc,
                        out_tail_desc,
                        parts_ptr,
                        lse_ptr,
                        q_s,
                        q_tail_s,
                        k_s,
                        k_tail_s,
                        v_s,
                        v_tail_s,
                        numbers_s,
                        q_full,
                        q_empty,
                        k_full,
                        k_empty,
                        v_full,
                        v_empty,
                        tile_s,
                        tile_full,
                        tile_empty,
                        num_heads,
                        num_heads_total,
                        num_queries,
                        num_keys,
                        num_splits,
                        section,
                        scale_log2,
                        BLOCK_K,
                        D,
                        TAIL,
                        STAGES,
                        CAUSAL,
                        EVEN_K,
                        CONSUMERS,
                        DYNAMIC,
                        SPLIT_K,
                    ),
                ),
                (
                    _fwd_consumer,
                    (
                        1,
                        out_desc,
                        out_tail_desc,
                        parts_ptr,
                        lse_ptr,
                        q_s,
                        q_tail_s,
                        k_s,
                        k_tail_s,
                        v_s,
                        v_tail_s,
                        numbers_s,
                        q_full,
                        q_empty,
                        k_full,
                        k_empty,
                        v_full,
                        v_empty,
                        tile_s,
                        tile_full,
                        tile_empty,
                        num_heads,
                        num_heads_total,
                        num_queries,
                        num_keys,
                        num_splits,
                        section,
                        scale_log2,
                        BLOCK_K,
                        D,
                        TAIL,
                        STAGES,
                        CAUSAL,
                        EVEN_K,
                        CONSUMERS,
                        DYNAMIC,
                        SPLIT_K,
                    ),
                ),
                (
                    _fwd_producer,
                    (
                        q_desc,
                        q_tail_desc,
                        k_desc,
                        k_tail_desc,
                        v_desc,
                        v_tail_desc,
                        q_s,
                        q_tail_s,
                        k_s,
                        k_tail_s,
                        v_s,
                        v_tail_s,
                        q_full,
                        q_empty,
                        k_full,
                        k_empty,
                        v_full,
                        v_empty,
                        tile_s,
                        tile_full,
                        tile_empty,
                        tile_counter_ptr,
                        num_heads,
                        num_heads_total,
                        group,
                        num_queries,
                        num_keys,
                        num_splits,
                        section,
                        BLOCK_K,
                        TAIL,
                        STAGES,
                        CAUSAL,
                        CONSUMERS,
                        DYNAMIC,
                        SPLIT_K,
                    ),
                ),
            ],
            [4, 1],
            [REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (
                    _fwd_consumer,
                    (
                        0,
                        out_desc,
                        out_tail_desc,
                        parts_ptr,
                        lse_ptr,
                        q_s,
                        q_tail_s,
                        k_s,
                        k_tail_s,
                        v_s,
                        v_tail_s,
                        numbers_s,
                        q_full,
                        q_empty,
                        k_full,
                        k_empty,
                        v_full,
                        v_empty,
                        tile_s,
                        tile_full,
                        tile_empty,
                        num_heads,
                        num_heads_total,
                        num_queries,
                        num_keys,
                        num_splits,
                        section,
                        scale_log2,
                        BLOCK_K,
                        D,
                        TAIL,
                        STAGES,
                        CAUSAL,
                        EVEN_K,
                        CONSUMERS,
                        DYNAMIC,
                        SPLIT_K,
                    ),
                ),
                (
                    _fwd_consumer,
                    (
                        1,
                        out_desc,
                        out_tail_desc,
                        parts_ptr,
                        lse_ptr,
                        q_s,
                        q_tail_s,
                        k_s,
                        k_tail_s,
                        v_s,
                        v_tail_s,
                        numbers_s,
                        q_full,
                        q_empty,
                        k_full,
                        k_empty,
                        v_full,
                        v_empty,
                        tile_s,
                        tile_full,
                        tile_empty,
                        num_heads,
                        num_heads_total,
                        num_queries,
                        num_keys,
                        num_splits,
                        section,
                        scale_log2,
                        BLOCK_K,
                        D,
                        TAIL,
                        STAGES,
                        CAUSAL,
                        EVEN_K,
                        CONSUMERS,
                        DYNAMIC,
                        SPLIT_K,
                    ),
                ),
                (
                    _fwd_consumer,
                    (
                        2,
                        out_desc,
                        out_tail_desc,
                        parts_ptr,
                        lse_ptr,
                        q_s,
                        q_tail_s,
                        k_s,
                        k_tail_s,
                        v_s,
                        v_tail_s,
                        numbers_s,
                        q_full,
                        q_empty,
                        k_full,
                        k_empty,
                        v_full,
                        v_empty,
                        tile_s,
                        tile_full,
                        tile_empty,
                        num_heads,
                        num_heads_total,
                        num_queries,
                        num_keys,
                        num_splits,
                        section,
                        scale_log2,
                        BLOCK_K,
                        D,
                        TAIL,
                        STAGES,
                        CAUSAL,
                        EVEN_K,
                        CONSUMERS,
                        DYNAMIC,
                        SPLIT_K,
                    ),
                ),
                (
                    _fwd_producer,
                    (
                        q_desc,
                        q_tail_desc,
                        k_desc,
                        k_tail_desc,
                        v_desc,
                        v_tail_desc,
                        q_s,
                        q_tail_s,
                        k_s,
                        k_tail_s,
                        v_s,
                        v_tail_s,
                        q_full,
                        q_empty,
                        k_full,
                        k_empty,
                        v_full,
                        v_empty,
                        tile_s,
                        tile_full,
                        tile_empty,
                        tile_counter_ptr,
                        num_heads,
                        num_heads_total,
                        group,
                        num_queries,
                        num_keys,
                        num_splits,
                        section,
                        BLOCK_K,
                        TAIL,
                        STAGES,
                        CAUSAL,
                        CONSUMERS,
                        DYNAMIC,
                        SPLIT_K,
                    ),
                ),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, PRODUCER_REGISTERS],
        )


def _section(num_heads: int, num_key_heads: int, key_head_bytes: int, programs: int) -> int:
    """Returns of how many heads (of all batches) the causal tiles come first, before those of as
    many others: all, or what fits in SECTION_BYTES, if possible a divisor, for a small last section
    would leave programs idle at the end.
    """
    fit = SECTION_BYTES // key_head_bytes * num_heads // num_key_heads or 1
    if num_heads <= fit or num_key_heads < SECTIONS_FROM * programs:
        return num_heads
    return next((n for n in range(fit, fit // 2, -1) if num_heads % n == 0), fit)


def plan_forward(
    q: Layout, k: Layout, v: Layout, out: Layout, device_index: int, *, scale: float, causal: bool
) -> Callable[..., None]:
    """Returns what writes the output and the log-sum-exp (fp32, natural units, dense), called with
    (q, k, v, out, lse).

    The layouts are 4D; the heads of k and v divide those of q.
    """
    num_batches, num_heads, num_queries, head_dim = q.shape
    num_keys = k.shape[2]
    tail = TAILS[head_dim]
    tiles = (FORWARD_SHORT if num_queries <= SHORT else FORWARD)[head_dim]
    block_k, consumers = tiles["BLOCK_K"], tiles["CONSUMERS"]
    rows = ROWS * consumers
    num_heads_total, num_key_heads = num_heads * num_batches, k.shape[1] * num_batches
    num_tiles = -(-num_queries // rows) * num_heads_total
    programs = num_multiprocessors(device_index)
    part_kib = rows * row_elements(head_dim) * 4 / 1024
    num_splits = num_splits_of(
        num_tiles, -(-num_keys // block_k), programs, causal, part_kib=part_kib
    )
    num_tiles *= num_splits
    queue = causal and num_keys >= QUEUE_FROM
    dynamic = causal and num_keys >= DYNAMIC_FROM_KEYS and num_tiles > DYNAMIC_FROM * programs
    section = num_heads_total * num_splits
    if dynamic and head_dim >= SECTION_COLUMNS:
        section = _section(section, num_key_heads, 4 * num_keys * head_dim, programs)
    persistent = dynamic or (num_keys <= PERSISTENT_UNTIL and not queue)
    num_programs = min(num_tiles, programs) if persistent else num_tiles
    group = num_heads_total // num_key_heads
    numbers = (
        num_heads,
        num_heads_total,
        group,
        num_queries,
        num_keys,
        num_splits,
        section,
        scale * LOG2_E,
    )
    constants = {
        "D": 64 if tail else head_dim,
        "TAIL": tail,
        "BLOCK_K": block_k,
        "STAGES": tiles["STAGES"],
        "CAUSAL": causal,
        "EVEN_K": num_keys % block_k == 0,
        "CONSUMERS": consumers,
        "DYNAMIC": dynamic,
        "SPLIT_K": num_splits > 1,
    }
    described = with_tails([(q, ROWS), (k, block_k), (v, block_k), (out, ROWS)], tail)
    launch = TileLaunch(
        hopper_fwd_kernel, (num_programs,), described, numbers, constants, consumers
    )
    combine = output_launch(out.shape, out.strides, num_splits)

    def run(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> None:
        tile_counter = torch.zeros(1, dtype=torch.int32, device=q.device) if dynamic else None
        if combine is None:
            launch((q, k, v, out), None, lse, tile_counter)
        else:
            whole = with_heads(q)
            parts, parts_lse = empty_parts(num_splits, whole), empty_lse(num_splits, whole)
            launch((q, k, v, out), parts, parts_lse, tile_counter)
            combine(parts, parts_lse, out, lse)

    return run
