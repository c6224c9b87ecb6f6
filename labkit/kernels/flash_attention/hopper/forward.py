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
    Value,
    async_load,
    async_store,
    await_number,
    barriers,
    decode_tile,
    hand_number,
    product_layout,
    shared_by_warps,
    to_low,
    with_tails,
)
from labkit.kernels.flash_attention.plan import Layout
from labkit.kernels.flash_attention.splits import (
    combine_launch,
    empty_splits,
    num_splits_of,
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


@shared_by_warps
class Shared:
    """Tiles end in _s and lie in shared memory, `tail` are the columns from 64 on; barriers end in
    _full and _empty.
    """

    out_desc: Value
    out_tail_desc: Value
    parts_ptr: Value
    lse_ptr: Value
    q_s: Value
    q_tail_s: Value
    k_s: Value
    k_tail_s: Value
    v_s: Value
    v_tail_s: Value
    numbers_s: Value
    q_full: Value
    q_empty: Value
    k_full: Value
    k_empty: Value
    v_full: Value
    v_empty: Value
    tile_s: Value
    tile_full: Value
    tile_empty: Value
    num_heads: Value
    num_heads_total: Value
    num_queries: Value
    num_keys: Value
    num_splits: Value
    section: Value
    scale_log2: Value
    q_desc: Value
    q_tail_desc: Value
    k_desc: Value
    k_tail_desc: Value
    v_desc: Value
    v_tail_desc: Value
    tile_counter_ptr: Value
    group: Value
    BLOCK_K: Value
    D: Value
    TAIL: Value
    STAGES: Value
    CAUSAL: Value
    EVEN_K: Value
    CONSUMERS: Value
    DYNAMIC: Value
    SPLIT_K: Value


@gluon.jit
def _fwd_tile(s, t, num_q_tiles, num_head_splits):
    """Which tile of queries and which head (of all batches) the t-th one is.

    Heads one after another share their keys in the L2 cache. When causal the longest tiles of all
    heads of a section come first: each program takes the next one when it is done.
    """
    if s.CAUSAL:
        head, before = decode_tile(t, num_q_tiles, num_head_splits, s.section)
        tile = num_q_tiles - 1 - before
    else:
        tile = t % num_q_tiles
        head = t // num_q_tiles
    return tile, head


@gluon.jit
def _fwd_next(s, t, turn):
    """The consumer's tile after t: the one that the producer took from the counter, or the next in
    a fixed order.
    """
    if s.DYNAMIC:
        t = await_number(turn, s.tile_s, s.tile_full)
        mbarrier.arrive(s.tile_empty.index(turn & 1), count=1)
    else:
        t += gl.num_programs(0)
    return t


@gluon.jit
def _num_key_tiles(s, rows_end):
    """How many key tiles the queries before `rows_end` see; one at least, so that a row without
    keys is written.
    """
    end = s.num_keys
    if s.CAUSAL:
        end = gl.maximum(gl.minimum(end, rows_end + (s.num_keys - s.num_queries)), 1)
    return (end + s.BLOCK_K - 1) // s.BLOCK_K


@gluon.jit
def _split_range(s, num_tiles, split):
    """The first key tile of a split and how many it has; one at least, past the last key where none
    is left.
    """
    first = 0
    if s.SPLIT_K:
        length = (num_tiles + s.num_splits - 1) // s.num_splits
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
def _fwd_producer(s):
    ROWS_Q: gl.constexpr = 64 * s.CONSUMERS
    STAGES: gl.constexpr = s.STAGES
    num_q_tiles = (s.num_queries + ROWS_Q - 1) // ROWS_Q
    j = 0
    turn = 0
    t = gl.program_id(0)
    num_head_splits = s.num_heads_total * s.num_splits if s.SPLIT_K else s.num_heads_total
    while t < num_q_tiles * num_head_splits:
        following = t + gl.num_programs(0)
        tile, head_split = _fwd_tile(s, t, num_q_tiles, num_head_splits)
        head_total = head_split % s.num_heads_total if s.SPLIT_K else head_split
        batch = head_total // s.num_heads
        head = head_total % s.num_heads
        q0 = tile * ROWS_Q
        num_tiles = _num_key_tiles(s, q0 + ROWS_Q)
        first, num_tiles = _split_range(s, num_tiles, head_split // s.num_heads_total)
        for i in range(num_tiles):
            stage = j % STAGES
            free = ((j // STAGES) & 1) ^ 1
            start = (first + num_tiles - 1 - i) * s.BLOCK_K
            mbarrier.wait(s.k_empty.index(stage), free)
            key_head = head // s.group
            full = s.k_full.index(stage)
            k = s.k_s.index(stage)
            k_tail = s.k_tail_s.index(stage)
            _load(s.k_desc, s.k_tail_desc, batch, key_head, start, full, k, k_tail, s.TAIL)
            if i == 0:
                for c in gl.static_range(s.CONSUMERS):
                    place = (turn & 1) * s.CONSUMERS + c
                    mbarrier.wait(s.q_empty.index(place), ((turn >> 1) & 1) ^ 1)
                    row = q0 + c * 64
                    full = s.q_full.index(place)
                    q = s.q_s.index(place)
                    q_tail = s.q_tail_s.index(place)
                    _load(s.q_desc, s.q_tail_desc, batch, head, row, full, q, q_tail, s.TAIL)
            mbarrier.wait(s.v_empty.index(stage), free)
            key_head = head // s.group
            full = s.v_full.index(stage)
            v = s.v_s.index(stage)
            v_tail = s.v_tail_s.index(stage)
            _load(s.v_desc, s.v_tail_desc, batch, key_head, start, full, v, v_tail, s.TAIL)
            if s.DYNAMIC:
                # Taken behind the first loads of this tile, which would wait for the answer.
                if i == 0:
                    following = gl.num_programs(0) + gl.atomic_add(
                        s.tile_counter_ptr, 1, sem="relaxed"
                    )
            j += 1
        if s.DYNAMIC:
            mbarrier.wait(s.tile_empty.index(turn & 1), ((turn >> 1) & 1) ^ 1)
            hand_number(following, turn, s.tile_s, s.tile_full)
        t = following
        turn += 1


@gluon.jit
def _fwd_mask(s, scores, end, diagonal, SCORES: gl.constexpr):
    """The scores of visible keys, −inf elsewhere: keys before `end`, and before `diagonal` plus the
    number of the row.

    Both count from the tile's first key. The numbers come from shared memory: as constants they
    stay in registers through the loop.
    """
    keys = s.numbers_s.load(gl.SliceLayout(0, SCORES))
    if s.CAUSAL:
        rows = s.numbers_s.slice(0, 64).load(gl.SliceLayout(1, SCORES))
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
def _scores(s, q, q_tail, stage, before):
    """Q Kᵀ, in flight, in the registers of `before`: a tile of zeros would be as many more, set
    anew each time.
    """
    k = s.k_s.index(stage)
    k_tail = s.k_tail_s.index(stage)
    scores = warpgroup_mma(
        q, k.reshape([s.BLOCK_K, s.D]).permute((1, 0)), before, use_acc=False, is_async=True
    )
    if s.TAIL:
        scores = warpgroup_mma(
            q_tail, k_tail.reshape([s.BLOCK_K, s.TAIL]).permute((1, 0)), scores, is_async=True
        )
    return scores


@gluon.jit
def _values(s, p_low, stage, acc, acc_tail):
    """P V added to both parts of the output, in flight."""
    v = s.v_s.index(stage)
    v_tail = s.v_tail_s.index(stage)
    acc = warpgroup_mma(p_low, v.reshape([s.BLOCK_K, s.D]), acc, is_async=True)
    if s.TAIL:
        v_tail = v_tail.reshape([s.BLOCK_K, s.TAIL])
        acc_tail = warpgroup_mma(p_low, v_tail, acc_tail, is_async=True)
    return acc, acc_tail


@gluon.jit
def _await_values(s, acc, acc_tail):
    """Both parts of the output once no product is in flight."""
    if s.TAIL:
        acc, acc_tail = warpgroup_mma_wait(0, deps=(acc, acc_tail))
    else:
        acc = warpgroup_mma_wait(0, deps=(acc,))
    return acc, acc_tail


@gluon.jit
def _times_rows(s, acc, acc_tail, factor, OUT: gl.constexpr, OUT_TAIL: gl.constexpr):
    """Both parts of the output, each row times its factor."""
    acc = acc * gl.convert_layout(factor, gl.SliceLayout(1, OUT))[:, None]
    if s.TAIL:
        acc_tail = acc_tail * gl.convert_layout(factor, gl.SliceLayout(1, OUT_TAIL))[:, None]
    return acc, acc_tail


@gluon.jit
def _fwd_step(
    s,
    i,
    q,
    q_tail,
    p,
    p_low,
    acc,
    acc_tail,
    maximum,
    total,
    end,
    diagonal,
    MASKED: gl.constexpr,
    SCORES: gl.constexpr,
    OUT: gl.constexpr,
    OUT_TAIL: gl.constexpr,
):
    """The scores and the softmax of tile i, and the product with V of tile i − 1 under them."""
    STAGES: gl.constexpr = s.STAGES
    stage = i % STAGES
    before = (i - 1) % STAGES
    mbarrier.wait(s.k_full.index(stage), (i // STAGES) & 1)
    scores_mma = _scores(s, q, q_tail, stage, p)
    mbarrier.wait(s.v_full.index(before), ((i - 1) // STAGES) & 1)
    acc_mma, acc_tail_mma = _values(s, p_low, before, acc, acc_tail)
    scores = warpgroup_mma_wait(2 if s.TAIL else 1, deps=(scores_mma,))
    mbarrier.arrive(s.k_empty.index(stage), count=1)
    if MASKED:
        scores = _fwd_mask(s, scores, end, diagonal, SCORES)
    p, maximum, total, rescale = _softmax(scores, maximum, total, s.scale_log2, MASKED)
    acc, acc_tail = _await_values(s, acc_mma, acc_tail_mma)
    mbarrier.arrive(s.v_empty.index(before), count=1)
    acc, acc_tail = _times_rows(s, acc, acc_tail, rescale, OUT, OUT_TAIL)
    p_low = gl.convert_layout(to_low(p, q.dtype), gl.DotOperandLayout(0, OUT, 2))
    return p, p_low, acc, acc_tail, maximum, total


@gluon.jit
def _store_part(s, parts, acc, q1, column, WIDTH: gl.constexpr, LAYOUT: gl.constexpr):
    """Writes 64 rows of a split's output, in fp32, from `column` on."""
    ROW: gl.constexpr = s.D + s.TAIL
    rows = q1 + gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
    cols = column + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, LAYOUT))
    mask = (rows < s.num_queries)[:, None]
    gl.store(parts + (rows * ROW)[:, None] + cols[None, :], acc, mask=mask)


@gluon.jit
def _fwd_consumer(s, C: gl.constexpr):
    D: gl.constexpr = s.D
    TAIL: gl.constexpr = s.TAIL
    STAGES: gl.constexpr = s.STAGES
    ROWS_Q: gl.constexpr = 64 * s.CONSUMERS
    SCORES: gl.constexpr = product_layout(s.BLOCK_K)
    OUT: gl.constexpr = product_layout(D)
    OUT_TAIL: gl.constexpr = product_layout(TAIL if TAIL else 16)
    MASKED: gl.constexpr = s.CAUSAL or not s.EVEN_K
    num_q_tiles = (s.num_queries + ROWS_Q - 1) // ROWS_Q
    p = gl.zeros([64, s.BLOCK_K], gl.float32, layout=SCORES)
    # The number of the next key tile that the producer loads, counted over all tiles of queries.
    j = 0
    turn = 0
    t = gl.program_id(0)
    num_head_splits = s.num_heads_total * s.num_splits if s.SPLIT_K else s.num_heads_total
    while t < num_q_tiles * num_head_splits:
        tile, head_split = _fwd_tile(s, t, num_q_tiles, num_head_splits)
        place = (turn & 1) * s.CONSUMERS + C
        q = s.q_s.index(place).reshape([64, D])
        q_tail = q
        if TAIL:
            q_tail = s.q_tail_s.index(place).reshape([64, TAIL])
        q0 = tile * ROWS_Q
        q1 = q0 + C * 64
        # The first key that the first query does not see; each further query sees one more.
        diagonal = q1 + (s.num_keys - s.num_queries) + 1
        num_tiles = _num_key_tiles(s, q0 + ROWS_Q)
        first, num_tiles = _split_range(s, num_tiles, head_split // s.num_heads_total)
        # The number of the key tile after the last one of this tile of queries.
        after = j + num_tiles
        num_full = s.num_keys // s.BLOCK_K
        if s.CAUSAL:
            # The loop begins at the last keys. Those that only the consumers of later queries see
            # are passed over.
            num_mine = _num_key_tiles(s, q1 + 64)
            if s.SPLIT_K:
                num_mine = gl.maximum(gl.minimum(num_mine - first, num_tiles), 1)
            for _ in range(num_tiles - num_mine):
                mbarrier.wait(s.k_full.index(j % STAGES), (j // STAGES) & 1)
                mbarrier.arrive(s.k_empty.index(j % STAGES), count=1)
                mbarrier.wait(s.v_full.index(j % STAGES), (j // STAGES) & 1)
                mbarrier.arrive(s.v_empty.index(j % STAGES), count=1)
                j += 1
            num_full = gl.minimum(num_full, gl.maximum(diagonal, 0) // s.BLOCK_K)
            if s.SPLIT_K:
                num_full = gl.maximum(num_full - first, 0)
        maximum = gl.full([64], float("-inf"), gl.float32, layout=gl.SliceLayout(1, SCORES))
        total = gl.zeros([64], gl.float32, layout=gl.SliceLayout(1, SCORES))
        acc = gl.zeros([64, D], gl.float32, layout=OUT)
        acc_tail = gl.zeros([64, TAIL if TAIL else 16], gl.float32, layout=OUT_TAIL)
        mbarrier.wait(s.q_full.index(place), (turn >> 1) & 1)
        mbarrier.wait(s.k_full.index(j % STAGES), (j // STAGES) & 1)
        scores = warpgroup_mma_wait(0, deps=(_scores(s, q, q_tail, j % STAGES, p),))
        mbarrier.arrive(s.k_empty.index(j % STAGES), count=1)
        start = (first + after - j - 1) * s.BLOCK_K
        if MASKED:
            scores = _fwd_mask(s, scores, s.num_keys - start, diagonal - start, SCORES)
        p, maximum, total, _rescale = _softmax(scores, maximum, total, s.scale_log2, MASKED)
        p_low = gl.convert_layout(to_low(p, q.dtype), gl.DotOperandLayout(0, OUT, 2))
        # The tile before has left its buffer, which the queries after this one may have. Only the
        # thread that stored it can wait for that; the barrier in this tells the others.
        tma.store_wait(0)
        mbarrier.arrive(s.q_empty.index(s.CONSUMERS - place + 2 * C), count=1, pred=turn > 0)
        # What takes masks comes first, and the loop behind it takes none.
        first_full = j + 1
        if s.CAUSAL:
            first_full = gl.maximum(after - num_full, first_full)
            for i in range(j + 1, first_full):
                start = (first + after - i - 1) * s.BLOCK_K
                p, p_low, acc, acc_tail, maximum, total = _fwd_step(
                    s,
                    i,
                    q,
                    q_tail,
                    p,
                    p_low,
                    acc,
                    acc_tail,
                    maximum,
                    total,
                    s.num_keys - start,
                    diagonal - start,
                    True,
                    SCORES,
                    OUT,
                    OUT_TAIL,
                )
        for i in range(first_full, after):
            p, p_low, acc, acc_tail, maximum, total = _fwd_step(
                s,
                i,
                q,
                q_tail,
                p,
                p_low,
                acc,
                acc_tail,
                maximum,
                total,
                0,
                0,
                False,
                SCORES,
                OUT,
                OUT_TAIL,
            )
        last = after - 1
        mbarrier.wait(s.v_full.index(last % STAGES), (last // STAGES) & 1)
        acc_mma, acc_tail_mma = _values(s, p_low, last % STAGES, acc, acc_tail)
        # A row without any key: zeros, and −inf.
        divisor = gl.where(total == 0.0, 1.0, total)
        lse = gl.where(total == 0.0, float("-inf"), (maximum + gl.log2(divisor)) * LN_2)
        rows = q1 + gl.arange(0, 64, layout=gl.SliceLayout(1, SCORES))
        mask = rows < s.num_queries
        gl.store(s.lse_ptr + head_split.to(gl.int64) * s.num_queries + rows, lse, mask=mask)
        acc, acc_tail = _await_values(s, acc_mma, acc_tail_mma)
        mbarrier.arrive(s.v_empty.index(last % STAGES), count=1)
        acc, acc_tail = _times_rows(s, acc, acc_tail, 1.0 / divisor, OUT, OUT_TAIL)
        if s.SPLIT_K:
            parts = s.parts_ptr + head_split.to(gl.int64) * s.num_queries * (D + TAIL)
            _store_part(s, parts, acc, q1, 0, D, OUT)
            if TAIL:
                _store_part(s, parts, acc_tail, q1, D, TAIL, OUT_TAIL)
        else:
            # The output takes the place of the queries.
            q.store(to_low(acc, q.dtype))
            if TAIL:
                q_tail.store(to_low(acc_tail, q.dtype))
            fence_async_shared()
            batch = head_split // s.num_heads
            head = head_split % s.num_heads
            async_store(s.out_desc, [batch, head, q1, 0], s.q_s.index(place))
            if TAIL:
                async_store(s.out_tail_desc, [batch, head, q1, 64], s.q_tail_s.index(place))
        j = after
        t = _fwd_next(s, t, turn)
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
    q_full = barriers(2 * CONSUMERS)
    q_empty = barriers(2 * CONSUMERS)
    k_full = barriers(STAGES)
    k_empty = barriers(STAGES)
    v_full = barriers(STAGES)
    v_empty = barriers(STAGES)
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
        tile_full = barriers(2)
        tile_empty = barriers(2)
        for slot in gl.static_range(2):
            mbarrier.init(tile_full.index(slot), count=1)
            mbarrier.init(tile_empty.index(slot), count=CONSUMERS)
    fence_async_shared()
    shared = Shared(
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
        q_desc,
        q_tail_desc,
        k_desc,
        k_tail_desc,
        v_desc,
        v_tail_desc,
        tile_counter_ptr,
        group,
        BLOCK_K,
        D,
        TAIL,
        STAGES,
        CAUSAL,
        EVEN_K,
        CONSUMERS,
        DYNAMIC,
        SPLIT_K,
    )
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_fwd_consumer, (shared, 0)),
                (_fwd_consumer, (shared, 1)),
                (_fwd_producer, (shared,)),
            ],
            [4, 1],
            [REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_fwd_consumer, (shared, 0)),
                (_fwd_consumer, (shared, 1)),
                (_fwd_consumer, (shared, 2)),
                (_fwd_producer, (shared,)),
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


def plan(
    q: Layout, k: Layout, v: Layout, out: Layout, device_index: int, *, scale: float, causal: bool
) -> Callable[..., None]:
    """Returns what writes the output and the log-sum-exp (fp32, natural units, dense):
    run((q, k, v), out, lse, cu_seqlens).

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
    num_splits = num_splits_of(num_tiles, -(-num_keys // block_k), programs, causal)
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
    combine = combine_launch(out.shape, out.strides, num_splits) if num_splits > 1 else None

    def run(inputs, out, lse, _) -> None:
        tile_counter = torch.zeros(1, dtype=torch.int32, device=out.device) if dynamic else None
        if combine is None:
            launch((*inputs, out), None, lse, tile_counter)
        else:
            parts = empty_splits(num_splits, lse, head_dim)
            launch((*inputs, out), *parts, tile_counter)
            combine(*parts, out, lse)

    return run
