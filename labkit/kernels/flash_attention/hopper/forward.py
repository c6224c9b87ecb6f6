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
- With a tail, tiles are released at hardware barriers: before an arrival at one in shared memory
  Gluon has the warpgroup meet, which costs these shorter products up to a seventh of their time.
- A descriptor has batch, head, row and column as dimensions of their own: TMA loads zeros past a
  sequence's last row and stores nothing there.

Sources: Shah et al. 2024, "FlashAttention-3"; Dao 2023, "FlashAttention-2".
"""

import functools
from collections.abc import Callable

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
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
    counting,
    decode_tile,
    even_section,
    finished,
    parts,
    plus_product,
    product_layout,
    queue,
    ring,
    shared_by_warps,
    store,
    tiles_of,
    times_transposed,
    to_low,
)
from labkit.kernels.flash_attention.plan import Layout
from labkit.kernels.flash_attention.splits import num_splits_of
from labkit.kernels.launch import current_stream, l2_cache_bytes, num_multiprocessors

BLOCK_K = gl.constexpr(128)  # keys of a tile

# How many tiles are in flight, and warpgroups of 64 queries. Bounds: 160 or 240 registers a thread
# of a consumer (scores 64 × BLOCK_K and the accumulator of 64 rows · D); 227 KiB of shared memory,
# of which 128 rows take 256·D bytes per tensor.
FORWARD = {
    64: {"STAGES": 5, "CONSUMERS": 3},
    72: {"STAGES": 4, "CONSUMERS": 2},
    80: {"STAGES": 2, "CONSUMERS": 2},
    96: {"STAGES": 3, "CONSUMERS": 2},
    128: {"STAGES": 2, "CONSUMERS": 2},
}
# Up to so many queries: 128 of them fill a tile where 192 often do not (256 queries: 343 TFLOP/s,
# not 225).
SHORT = 1024
FORWARD_SHORT = FORWARD | {64: {"STAGES": 4, "CONSUMERS": 2}}

# A program that takes several tiles of queries loads the next one under the end of the last, which
# pays while tiles are short (18 % at 1,024 keys). Others are given out evenly, and when long by the
# hardware's own queue. Causal tiles are of all lengths and come longest first: from so many keys on
# the hardware gives each to the first multiprocessor that is free, or, with more than so many for
# each, programs take theirs from a counter (8 % at 384 keys, 9 % at 1,536, 5 % at 4,096, 8 % at
# 16,384; −2 to 4 % at 128 to 256). A program takes one tile ahead, which with few of them is too
# soon (1, 8, 4096, 128: 74 us, not 57).
PERSISTENT_UNTIL = 8192
QUEUE_FROM = 2048
DYNAMIC_FROM = 3


@shared_by_warps
class Shared:
    """What the warps of a program share."""

    q: Value
    k: Value
    v: Value
    out_descs: Value
    parts_ptr: Value
    lse_ptr: Value
    numbers_s: Value
    tiles: Value
    tile_counter_ptr: Value
    num_heads: Value
    num_heads_total: Value
    group: Value
    num_queries: Value
    num_keys: Value
    num_splits: Value
    section: Value
    scale_log2: Value
    D: Value
    CAUSAL: Value
    EVEN_K: Value
    CONSUMERS: Value
    DYNAMIC: Value
    SPLIT_K: Value


@gluon.jit
def _num_work_tiles(s):
    """The tiles of queries of a head, and the heads of all batches and splits of their keys."""
    ROWS_Q: gl.constexpr = 64 * s.CONSUMERS
    num_head_splits = s.num_heads_total * s.num_splits if s.SPLIT_K else s.num_heads_total
    return (s.num_queries + ROWS_Q - 1) // ROWS_Q, num_head_splits


@gluon.jit
def _work_tile(s, t):
    """The first query of the t-th work tile, its head and split, the first key tile that it takes
    and how many it takes: one at least, so that a row without keys is written.

    Programs that take tiles one after another share their keys in the L2 cache. When causal the
    longest tiles of a section come first; a key head has those of all query heads that read it.
    """
    num_q_tiles, num_head_splits = _num_work_tiles(s)
    if s.CAUSAL:
        key_head_split, before = decode_tile(
            t, num_q_tiles * s.group, num_head_splits // s.group, s.section, s.group
        )
        head_split = key_head_split * s.group + before % s.group
        tile = num_q_tiles - 1 - before // s.group
    else:
        tile = t % num_q_tiles
        head_split = t // num_q_tiles
    q0 = tile * 64 * s.CONSUMERS
    num_tiles = _num_key_tiles(s, q0 + 64 * s.CONSUMERS)
    first = 0
    if s.SPLIT_K:
        # Past the last key where none is left for this split.
        length = (num_tiles + s.num_splits - 1) // s.num_splits
        first = head_split // s.num_heads_total * length
        num_tiles = gl.maximum(gl.minimum(num_tiles - first, length), 1)
    return q0, head_split, first, num_tiles


@gluon.jit
def _num_key_tiles(s, rows_end):
    """How many key tiles the queries before `rows_end` see, at least one."""
    end = s.num_keys
    if s.CAUSAL:
        end = gl.maximum(gl.minimum(end, rows_end + (s.num_keys - s.num_queries)), 1)
    return (end + BLOCK_K - 1) // BLOCK_K


@gluon.jit
def _producer(s):
    num_q_tiles, num_head_splits = _num_work_tiles(s)
    j = 0
    turn = 0
    t = gl.program_id(0)
    while t < num_q_tiles * num_head_splits:
        following = t + gl.num_programs(0)
        q0, head_split, first, num_tiles = _work_tile(s, t)
        head_total = head_split % s.num_heads_total if s.SPLIT_K else head_split
        batch = head_total // s.num_heads
        head = head_total % s.num_heads
        key_head = head // s.group
        for i in range(num_tiles):
            start = (first + num_tiles - 1 - i) * BLOCK_K
            s.k.load(j, batch, key_head, start)
            if i == 0:
                for c in gl.static_range(s.CONSUMERS):
                    s.q.load(turn * s.CONSUMERS + c, batch, head, q0 + c * 64)
            s.v.load(j, batch, key_head, start)
            if s.DYNAMIC:
                # Taken behind the first loads of this tile, which would wait for the answer.
                if i == 0:
                    taken = gl.atomic_add(s.tile_counter_ptr, 1, sem="relaxed")
                    following = gl.num_programs(0) + taken
                    if taken == num_q_tiles * num_head_splits - 1:
                        # Nobody takes another: the next launch begins at 0.
                        gl.store(s.tile_counter_ptr, 0)
            j += 1
        if s.DYNAMIC:
            s.tiles.hand(turn, following)
        t = following
        turn += 1


@gluon.jit
def _mask(s, scores, end, diagonal, SCORES: gl.constexpr):
    """The scores of visible keys, −inf elsewhere: keys before `end`, and before `diagonal` plus the
    number of the row; both count from the tile's first key.
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
def _times_rows(acc, factor):
    """Accumulators, each row times its factor."""
    return [
        part * gl.convert_layout(factor, gl.SliceLayout(1, part.type.layout))[:, None]
        for part in acc
    ]


@gluon.jit
def _step(s, i, q, p, p_low, acc, maximum, total, end, diagonal, MASKED: gl.constexpr):
    """The scores and the softmax of tile i, and the product with V of tile i − 1 under them."""
    SCORES: gl.constexpr = product_layout(BLOCK_K)
    HAS_TAIL: gl.constexpr = len(q) == 2
    s.k.wait(i)
    # V, which came before K, is there. With a tail both products are then issued at once, which is
    # faster (4, 16, 4096, 96 full: 5 %); without one it is slower (128 columns: 1 %).
    if HAS_TAIL:
        s.v.wait(i - 1)
    scores_mma = times_transposed(q, s.k.tile(i), p)
    if not HAS_TAIL:
        s.v.wait(i - 1)
    acc_mma = plus_product(p_low, s.v.tile(i - 1), acc)
    scores = warpgroup_mma_wait(len(q), deps=(scores_mma,))
    if MASKED:
        scores = _mask(s, scores, end, diagonal, SCORES)
    p, maximum, total, rescale = _softmax(scores, maximum, total, s.scale_log2, MASKED)
    acc = finished(acc_mma, 0)
    s.k.release(i)
    s.v.release(i - 1)
    acc = _times_rows(acc, rescale)
    p_low = gl.convert_layout(to_low(p, q[0].dtype), gl.DotOperandLayout(0, product_layout(s.D), 2))
    return p, p_low, acc, maximum, total


@gluon.jit
def _store_part(s, parts, acc, q1, column, row_elements):
    """Writes 64 rows of a split's output, in fp32, from `column` on."""
    LAYOUT: gl.constexpr = acc.type.layout
    rows = q1 + gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
    cols = column + gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, LAYOUT))
    mask = (rows < s.num_queries)[:, None]
    gl.store(parts + (rows * row_elements)[:, None] + cols[None, :], acc, mask=mask)


@gluon.jit
def _consumer(s, C: gl.constexpr):
    SCORES: gl.constexpr = product_layout(BLOCK_K)
    MASKED: gl.constexpr = s.CAUSAL or not s.EVEN_K
    COLUMNS: gl.constexpr = s.D + (s.q.tiles[1].shape[4] if len(s.q.tiles) == 2 else 0)
    num_q_tiles, num_head_splits = _num_work_tiles(s)
    # Scores come in the registers of those before: a tile of zeros would be as many more, set anew
    # each time.
    p = accumulator(BLOCK_K)
    # The number of the next key tile that the producer loads, counted over all tiles of queries.
    j = 0
    turn = 0
    t = gl.program_id(0)
    while t < num_q_tiles * num_head_splits:
        q0, head_split, first, num_tiles = _work_tile(s, t)
        own = turn * s.CONSUMERS + C
        q = s.q.tile(own)
        q1 = q0 + C * 64
        # The first key that the first query does not see; each further query sees one more.
        diagonal = q1 + (s.num_keys - s.num_queries) + 1
        # The number of the key tile after the last one of this tile of queries.
        after = j + num_tiles
        num_full = s.num_keys // BLOCK_K
        if s.CAUSAL:
            # The loop begins at the last keys. Those that only the consumers of later queries see
            # are passed over.
            num_mine = _num_key_tiles(s, q1 + 64)
            if s.SPLIT_K:
                num_mine = gl.maximum(gl.minimum(num_mine - first, num_tiles), 1)
            for _ in range(num_tiles - num_mine):
                s.k.wait(j)
                s.k.release(j)
                s.v.wait(j)
                s.v.release(j)
                j += 1
            num_full = gl.minimum(num_full, gl.maximum(diagonal, 0) // BLOCK_K)
            if s.SPLIT_K:
                num_full = gl.maximum(num_full - first, 0)
        maximum = gl.full([64], float("-inf"), gl.float32, layout=gl.SliceLayout(1, SCORES))
        total = gl.zeros([64], gl.float32, layout=gl.SliceLayout(1, SCORES))
        acc = accumulators(s.v.tile(j))
        s.q.wait(own)
        # In registers they are not read again for each key tile, a fifth of what is read of shared
        # memory at D 128 (1, 16, 16384, 128 causal: 1 % less time, 2 at the power limit). D 64 has
        # no registers for them; 4, 16, 4096, 80 took 8 % longer.
        if COLUMNS >= 96:
            q = [part.load(gl.DotOperandLayout(0, SCORES, 2)) for part in q]
        s.k.wait(j)
        scores = warpgroup_mma_wait(0, deps=(times_transposed(q, s.k.tile(j), p),))
        s.k.release(j)
        start = (first + after - j - 1) * BLOCK_K
        if MASKED:
            scores = _mask(s, scores, s.num_keys - start, diagonal - start, SCORES)
        p, maximum, total, _ = _softmax(scores, maximum, total, s.scale_log2, MASKED)
        p_low = to_low(p, q[0].dtype)
        p_low = gl.convert_layout(p_low, gl.DotOperandLayout(0, product_layout(s.D), 2))
        # The tile before has left its buffer, which the queries after this one may have. Only the
        # thread that stored it can wait for that; the barrier in this tells the others.
        tma.store_wait(0)
        s.q.release(own + s.CONSUMERS, turn > 0)
        # What takes masks comes first, and the loop behind it takes none.
        first_full = j + 1
        if s.CAUSAL:
            first_full = gl.maximum(after - num_full, first_full)
            for i in range(j + 1, first_full):
                start = (first + after - i - 1) * BLOCK_K
                end = s.num_keys - start
                p, p_low, acc, maximum, total = _step(
                    s, i, q, p, p_low, acc, maximum, total, end, diagonal - start, True
                )
        for i in range(first_full, after):
            p, p_low, acc, maximum, total = _step(
                s, i, q, p, p_low, acc, maximum, total, 0, 0, False
            )
        s.v.wait(after - 1)
        acc_mma = plus_product(p_low, s.v.tile(after - 1), acc)
        # A row without any key: zeros, and −inf.
        divisor = gl.where(total == 0.0, 1.0, total)
        lse = gl.where(total == 0.0, float("-inf"), (maximum + gl.log2(divisor)) * LN_2)
        rows = q1 + gl.arange(0, 64, layout=gl.SliceLayout(1, SCORES))
        first_row = head_split.to(gl.int64) * s.num_queries
        gl.store(s.lse_ptr + first_row + rows, lse, mask=rows < s.num_queries)
        acc = finished(acc_mma, 0)
        s.v.release(after - 1)
        acc = _times_rows(acc, 1.0 / divisor)
        if s.SPLIT_K:
            for n in gl.static_range(len(acc)):
                _store_part(s, s.parts_ptr + first_row * COLUMNS, acc[n], q1, n * 64, COLUMNS)
        else:
            # The output takes the place of the queries.
            batch = head_split // s.num_heads
            head = head_split % s.num_heads
            store(acc, s.q.whole(own % s.q.NUM), s.out_descs, batch, head, q1)
        j = after
        if s.DYNAMIC:
            t = s.tiles.await_number(turn)
            s.tiles.release(turn)
        else:
            t += gl.num_programs(0)
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
    D: gl.constexpr,
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

    DYNAMIC: programs take tiles from the counter at tile_counter_ptr, which begins and ends at 0.
    SPLIT_K: of each split of the keys, the output in fp32 to parts_ptr (num_splits, heads of all
    batches, queries, columns), and its log-sum-exp; out_desc is not used then.
    """
    numbers_s = counting(BLOCK_K) if CAUSAL or not EVEN_K else None
    tiles = queue(CONSUMERS) if DYNAMIC else None
    # 4, 16, 4096, 80 full on an H200: 14 % faster. Without a tail up to 1 % slower.
    HAS_TAIL: gl.constexpr = q_tail_desc is not None
    FIRST_K: gl.constexpr = 6 if HAS_TAIL else None
    FIRST_V: gl.constexpr = 6 + STAGES if HAS_TAIL else None
    shared = Shared(
        # Queries, and afterwards their output, of this tile and of the next.
        ring(parts(q_desc, q_tail_desc), 2 * CONSUMERS, 1),
        ring(parts(k_desc, k_tail_desc), STAGES, CONSUMERS, None, FIRST_K),
        ring(parts(v_desc, v_tail_desc), STAGES, CONSUMERS, None, FIRST_V),
        parts(out_desc, out_tail_desc),
        parts_ptr,
        lse_ptr,
        numbers_s,
        tiles,
        tile_counter_ptr,
        num_heads,
        num_heads_total,
        group,
        num_queries,
        num_keys,
        num_splits,
        section,
        scale_log2,
        D,
        CAUSAL,
        EVEN_K,
        CONSUMERS,
        DYNAMIC,
        SPLIT_K,
    )
    fence_async_shared()
    if CONSUMERS == 2:
        gl.warp_specialize(
            [(_consumer, (shared, 0)), (_consumer, (shared, 1)), (_producer, (shared,))],
            [4, 1],
            [REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_consumer, (shared, 0)),
                (_consumer, (shared, 1)),
                (_consumer, (shared, 2)),
                (_producer, (shared,)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, PRODUCER_REGISTERS],
        )


def _zero(device: torch.device) -> torch.Tensor:
    return torch.zeros(1, dtype=torch.int32, device=device)


@functools.cache
def _counter_of(device: torch.device, _stream: int) -> torch.Tensor:
    return _zero(device)


def _counter(device: torch.device) -> torch.Tensor:
    """Returns a counter at 0: a stream's own, as its launches follow one another; of a graph, which
    is replayed on any stream, a new one.
    """
    if torch.cuda.is_current_stream_capturing():
        return _zero(device)
    return _counter_of(device, current_stream())


def plan(
    q: Layout, k: Layout, v: Layout, out: Layout, scale: float, causal: bool
) -> tuple[Callable[..., None], int]:
    """Returns what writes the output, or its parts, and the log-sum-exp (fp32, natural units,
    dense): write((q, k, v), out, parts, lse, cu_seqlens); and among how many programs the keys of a
    query are split, each with its part.

    The layouts are 4D; the heads of k and v divide those of q.
    """
    num_batches, num_heads, num_queries, head_dim = q.shape
    num_keys = k.shape[2]
    tail = TAILS[head_dim]
    tiles = (FORWARD_SHORT if num_queries <= SHORT else FORWARD)[head_dim]
    block_k = BLOCK_K.value
    consumers = tiles["CONSUMERS"]
    rows = ROWS * consumers
    num_heads_total, num_key_heads = num_heads * num_batches, k.shape[1] * num_batches
    num_tiles = -(-num_queries // rows) * num_heads_total
    programs = num_multiprocessors(q.device.index)
    key_tiles = -(-num_keys // block_k)
    num_splits = num_splits_of(num_tiles, key_tiles, programs, causal)
    group = num_heads_total // num_key_heads
    # Tiles of a section take as long as its longest, or longer.
    enough = 2 * programs * num_key_heads // num_tiles
    fit = l2_cache_bytes(q.device.index) // (4 * num_keys * head_dim)  # with keys and values
    section = even_section(num_key_heads, max(min(programs // SHARERS, fit), enough))
    num_tiles *= num_splits
    queue = causal and num_keys >= QUEUE_FROM
    dynamic = causal and num_tiles > DYNAMIC_FROM * programs
    persistent = dynamic or (num_keys <= PERSISTENT_UNTIL and not queue)
    num_programs = min(num_tiles, programs) if persistent else num_tiles
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
    constants = tiles | {
        "D": 64 if tail else head_dim,
        "CAUSAL": causal,
        "EVEN_K": num_keys % block_k == 0,
        "DYNAMIC": dynamic,
        "SPLIT_K": num_splits > 1,
    }
    tensors = ((q, ROWS), (k, block_k), (v, block_k), (out, ROWS))
    described = [tiles_of(x, num_rows, tail) for x, num_rows in tensors]
    launch = TileLaunch(
        hopper_fwd_kernel, (num_programs,), described, numbers, constants, consumers
    )

    def write(inputs, out, parts, lse, _) -> None:
        launch(*inputs, out, parts, lse, _counter(out.device) if dynamic else None)

    return write, num_splits
