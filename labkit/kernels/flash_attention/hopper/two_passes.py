"""FlashAttention's backward on Hopper in Gluon, the same bits every time: one kernel for dK and dV,
one for dQ.

    P = exp2(scale · log2(e) · Q Kᵀ − L)    ∂V = Pᵀ ∂O    ∂S = P ∘ (∂O Vᵀ − D)
    ∂Q = scale · ∂S K    ∂K = scale · ∂Sᵀ Q

Shapes: (batch, heads, length, D), D 64, 72, 80, 96 or 128, bf16 or fp16, causal (aligned to the
bottom right) or not. L in base 2 and D come padded from the Triton kernels of `flash_attention`.

Ideal cost per head: 10·Q·K·D FLOPs (halved when causal); two kernels execute 14·Q·K·D, without
atomics.

How a program is laid out: as in forward.py, with two consumers of 64 rows.
- dK/dV: a program of 128 keys loops over the queries; Sᵀ and ∂Pᵀ are computed directly, so that Pᵀ
  and ∂Sᵀ are register operands.
- dQ: a program of 128 queries loops over the keys; ∂S is the register operand.
- A head dimension between 64 and 128 comes in two parts, 64 columns and a tail of 16 or 32, each
  with its descriptors, tiles and accumulators: what has columns is a tuple of its parts, of one
  part where there is no tail.
- Up to 96 there is shared memory for two sets of a program's own rows. Where loops are equally long
  programs are persistent then, and the producer loads the rows of the next tile while the last is
  computed and stored: with short loops, that is most of the time.

Sources: Shah et al. 2024, "FlashAttention-3"; Dao 2023, "FlashAttention-2".
"""

from collections.abc import Callable

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
    barriers,
    product_layout,
    rows_of,
    shared_by_warps,
    to_low,
    with_tails,
)
from labkit.kernels.flash_attention.plan import Layout
from labkit.kernels.launch import num_multiprocessors

BLOCK = 2 * ROWS  # of a program's own rows: two consumers

# Rows of the loop's tiles, and how many of them are in flight. Bounds: 240 registers a thread of a
# consumer (scores 64 × the tile's rows, the accumulators of 64 rows · D, two for dK/dV); 227 KiB of
# shared memory, of which 128 rows take 256·D bytes per tensor. SETS of a program's own rows: with
# two it may be persistent.
DKDV = {
    64: {"BLOCK_Q": 128, "STAGES": 2, "SETS": 2},
    72: {"BLOCK_Q": 64, "STAGES": 3, "SETS": 2},
    80: {"BLOCK_Q": 64, "STAGES": 3, "SETS": 2},
    96: {"BLOCK_Q": 64, "STAGES": 3, "SETS": 1},
    128: {"BLOCK_Q": 64, "STAGES": 2, "SETS": 1},
}
DQ = {
    64: {"BLOCK_K": 128, "STAGES": 3, "SETS": 2},
    72: {"BLOCK_K": 128, "STAGES": 3, "SETS": 2},
    80: {"BLOCK_K": 128, "STAGES": 3, "SETS": 2},
    96: {"BLOCK_K": 128, "STAGES": 3, "SETS": 1},
    128: {"BLOCK_K": 128, "STAGES": 2, "SETS": 1},
}

# At 96 two sets take tiles of 64 rows, which pays with short loops.
SHORT = 1024
DKDV_SHORT = DKDV | {96: {"BLOCK_Q": 64, "STAGES": 3, "SETS": 2}}
DQ_SHORT = DQ | {96: {"BLOCK_K": 64, "STAGES": 3, "SETS": 2}}

# Plain numbers to the kernels: a length of 1, or one divisible by 16, is no reason to compile them
# anew.
LENGTHS = ("num_tiles_total", "num_heads", "group", "num_queries", "num_keys", "padded_queries")


@shared_by_warps
class DkdvShared:
    """Tiles and descriptors are tuples of their parts; barriers end in _full and _empty."""

    grad_k_desc: Value
    grad_v_desc: Value
    q_s: Value
    grad_out_s: Value
    k_s: Value
    v_s: Value
    lse_s: Value
    delta_s: Value
    keys_s: Value
    queries_s: Value
    kv_full: Value
    kv_empty: Value
    q_full: Value
    q_empty: Value
    grad_out_full: Value
    grad_out_empty: Value
    num_tiles_total: Value
    num_heads: Value
    group: Value
    num_queries: Value
    num_keys: Value
    scale_log2: Value
    q_desc: Value
    grad_out_desc: Value
    k_desc: Value
    v_desc: Value
    lse_desc: Value
    delta_desc: Value
    padded_queries: Value
    BLOCK_Q: Value
    D: Value
    TAIL: Value
    STAGES: Value
    SETS: Value
    CAUSAL: Value
    GROUPED: Value


@shared_by_warps
class DqShared:
    """As `DkdvShared`, for dQ."""

    grad_q_desc: Value
    lse_ptr: Value
    delta_ptr: Value
    q_s: Value
    grad_out_s: Value
    k_s: Value
    v_s: Value
    q_full: Value
    q_empty: Value
    k_full: Value
    k_empty: Value
    v_full: Value
    v_empty: Value
    num_tiles_total: Value
    num_heads: Value
    num_queries: Value
    num_keys: Value
    padded_queries: Value
    scale_log2: Value
    q_desc: Value
    grad_out_desc: Value
    k_desc: Value
    v_desc: Value
    group: Value
    BLOCK_K: Value
    D: Value
    TAIL: Value
    STAGES: Value
    SETS: Value
    CAUSAL: Value


@gluon.jit
def _buffers(
    desc,
    tail_desc,
    COUNT: gl.constexpr,
    NUM_ROWS: gl.constexpr,
    D: gl.constexpr,
    TAIL: gl.constexpr,
):
    """Room for so many tiles."""
    parts = (gl.allocate_shared_memory(desc.dtype, [COUNT, 1, 1, NUM_ROWS, D], desc.layout),)
    if TAIL:
        tail = gl.allocate_shared_memory(
            desc.dtype, [COUNT, 1, 1, NUM_ROWS, TAIL], tail_desc.layout
        )
        parts = (parts[0], tail)
    return parts


@gluon.jit
def _load(s, desc, batch, head, row, full, tiles_s, place):
    async_load(desc[0], [batch, head, row, 0], full, tiles_s[0].index(place))
    if s.TAIL:
        async_load(desc[1], [batch, head, row, s.D], full, tiles_s[1].index(place))


@gluon.jit
def _store(s, desc, batch, head, row, tiles_s, place):
    async_store(desc[0], [batch, head, row, 0], tiles_s[0].index(place))
    if s.TAIL:
        async_store(desc[1], [batch, head, row, s.D], tiles_s[1].index(place))


@gluon.jit
def _tile(s, tiles_s, place, NUM_ROWS: gl.constexpr):
    """One of the tiles."""
    parts = (tiles_s[0].index(place).reshape([NUM_ROWS, s.D]),)
    if s.TAIL:
        parts = (parts[0], tiles_s[1].index(place).reshape([NUM_ROWS, s.TAIL]))
    return parts


@gluon.jit
def _zeros(s):
    """Accumulators of 64 rows."""
    MAIN: gl.constexpr = product_layout(s.D)
    parts = (gl.zeros([64, s.D], gl.float32, layout=MAIN),)
    if s.TAIL:
        LAST: gl.constexpr = product_layout(s.TAIL)
        parts = (parts[0], gl.zeros([64, s.TAIL], gl.float32, layout=LAST))
    return parts


@gluon.jit
def _times_transposed(s, a, b, registers):
    """A Bᵀ, a sum over the columns of both, in flight in registers whose values are no longer of
    use.
    """
    product = warpgroup_mma(a[0], b[0].permute((1, 0)), registers, use_acc=False, is_async=True)
    if s.TAIL:
        product = warpgroup_mma(a[1], b[1].permute((1, 0)), product, is_async=True)
    return product


@gluon.jit
def _plus_product(s, a, b, acc):
    """acc + A B, in flight, with the columns of B; A is no tuple."""
    parts = (warpgroup_mma(a, b[0], acc[0], is_async=True),)
    if s.TAIL:
        parts = (parts[0], warpgroup_mma(a, b[1], acc[1], is_async=True))
    return parts


@gluon.jit
def _wait(s, in_flight: gl.constexpr, acc):
    """Accumulators whose products are done, while so many later ones are in flight."""
    if s.TAIL:
        parts = warpgroup_mma_wait(2 * in_flight, deps=(acc[0], acc[1]))
    else:
        parts = (warpgroup_mma_wait(in_flight, deps=(acc[0],)),)
    return parts


@gluon.jit
def _put(s, acc, factor, tile):
    """Writes accumulators, times a factor, to a tile."""
    tile[0].store((acc[0] * factor).to(tile[0].dtype))
    if s.TAIL:
        tile[1].store((acc[1] * factor).to(tile[1].dtype))


@gluon.jit
def _dkdv_tiles(s, k0):
    """The first query of the loop, on a tile boundary, and the number of query tiles."""
    q0 = k0 * 0
    if s.CAUSAL:
        q0 = gl.maximum(k0 - (s.num_keys - s.num_queries), 0) // s.BLOCK_Q * s.BLOCK_Q
    return q0, gl.maximum(s.num_queries - q0 + s.BLOCK_Q - 1, 0) // s.BLOCK_Q


@gluon.jit
def _tiles_of_program(s, STEP: gl.constexpr, C: gl.constexpr):
    """What a warp or warpgroup C does: STEP, which loads or computes, for each tile of the
    program's own rows.

    One set has a branch of its own here and in `_decode_tile`: counts through a loop over tiles
    take registers that other head dimensions have not left.
    """
    # Read in each partition: what is handed over to one stays in its registers.
    t = gl.program_id(0)
    turn = t * 0
    j = t * 0
    if s.SETS == 1:
        STEP(s, t, turn, j, C)
    else:
        while t < s.num_tiles_total:
            j = STEP(s, t, turn, j, C)
            t += gl.num_programs(0)
            turn += 1


@gluon.jit
def _decode_tile(s, t, num_rows):
    """The tile of 128 rows, the head and the batch of the t-th tile of all; with one set, of the
    program's only one.
    """
    tile = gl.program_id(0)
    head = gl.program_id(1)
    batch = gl.program_id(2)
    if s.SETS > 1:
        tiles = (num_rows + 127) // 128
        tile = t % tiles
        head = t // tiles % s.num_heads
        batch = t // tiles // s.num_heads
    return tile, head, batch


@gluon.jit
def _dkdv_load(s, t, turn, j, C: gl.constexpr):
    """Loads what one tile of keys takes; `turn` such tiles and `j` tiles of queries have been
    loaded.
    """
    tile, head, batch = _decode_tile(s, t, s.num_keys)
    k0 = tile * 128
    q0, num_tiles = _dkdv_tiles(s, k0)
    for c in gl.static_range(2):
        place = (turn % s.SETS) * 2 + c
        if s.SETS > 1:
            mbarrier.wait(s.kv_empty.index(place), ((turn // s.SETS) & 1) ^ 1)
        mbarrier.expect(s.kv_full.index(place), 2 * 64 * (s.D + s.TAIL) * 2)
        _load(s, s.k_desc, batch, head, k0 + c * 64, s.kv_full.index(place), s.k_s, place)
        _load(s, s.v_desc, batch, head, k0 + c * 64, s.kv_full.index(place), s.v_s, place)
    for i in range(num_tiles * s.group):
        stage = j % s.STAGES
        free = ((j // s.STAGES) & 1) ^ 1
        # One query head of the group after another.
        query_head = head * s.group + i // num_tiles
        start = q0 + i % num_tiles * s.BLOCK_Q
        statistics = (batch * s.num_heads * s.group + query_head) * s.padded_queries
        mbarrier.wait(s.q_empty.index(stage), free)
        mbarrier.expect(s.q_full.index(stage), s.BLOCK_Q * (s.D + s.TAIL) * 2 + s.BLOCK_Q * 4)
        _load(s, s.q_desc, batch, query_head, start, s.q_full.index(stage), s.q_s, stage)
        async_load(s.lse_desc, [statistics + start], s.q_full.index(stage), s.lse_s.index(stage))
        mbarrier.wait(s.grad_out_empty.index(stage), free)
        mbarrier.expect(
            s.grad_out_full.index(stage), s.BLOCK_Q * (s.D + s.TAIL) * 2 + s.BLOCK_Q * 4
        )
        full = s.grad_out_full.index(stage)
        _load(s, s.grad_out_desc, batch, query_head, start, full, s.grad_out_s, stage)
        async_load(
            s.delta_desc, [statistics + start], s.grad_out_full.index(stage), s.delta_s.index(stage)
        )
        j += 1
    return j


@gluon.jit
def _dkdv_compute(s, t, turn, j, C: gl.constexpr):
    """dK and dV of 64 keys; `turn` tiles of keys and `j` of queries are done. Returns j as it is
    then.
    """
    DTYPE: gl.constexpr = s.grad_k_desc[0].dtype
    SCORES: gl.constexpr = product_layout(s.BLOCK_Q)
    GRAD: gl.constexpr = product_layout(s.D)
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=GRAD, k_width=2)
    PARTS: gl.constexpr = 2 if s.TAIL else 1
    COLS: gl.constexpr = gl.SliceLayout(0, SCORES)
    tile, head, batch = _decode_tile(s, t, s.num_keys)
    k0 = tile * 128
    q0, num_tiles = _dkdv_tiles(s, k0)
    k1 = k0 + C * 64
    # A key is seen by the queries from its own place on, counted here from the first query of the
    # loop.
    diagonal = k1 - (s.num_keys - s.num_queries) - q0
    grad_k = _zeros(s)
    grad_v = _zeros(s)
    grad_scores_low = gl.zeros([64, s.BLOCK_Q], DTYPE, layout=OPERAND)
    place = (turn % s.SETS) * 2 + C
    k = _tile(s, s.k_s, place, 64)
    v = _tile(s, s.v_s, place, 64)
    mbarrier.wait(s.kv_full.index(place), (turn // s.SETS) & 1)
    # The product into dK is issued one tile later, ahead of the next scores: a product in flight
    # over the loop's back edge makes ptxas serialise all of them (C7512). The first one is of
    # zeros.
    for i in range(num_tiles * s.group):
        stage = j % s.STAGES
        full = (j // s.STAGES) & 1
        before = (j - (i > 0).to(gl.int32)) % s.STAGES
        q = _tile(s, s.q_s, stage, s.BLOCK_Q)
        grad_out = _tile(s, s.grad_out_s, stage, s.BLOCK_Q)
        mbarrier.wait(s.q_full.index(stage), full)
        q_before = _tile(s, s.q_s, before, s.BLOCK_Q)
        grad_k_mma = _plus_product(s, grad_scores_low, q_before, grad_k)
        zeros = gl.zeros([64, s.BLOCK_Q], gl.float32, layout=SCORES)
        scores_mma = _times_transposed(s, k, q, zeros)
        grad_k = _wait(s, 1, grad_k_mma)
        mbarrier.arrive(s.q_empty.index(before), count=1, pred=i > 0)
        mbarrier.wait(s.grad_out_full.index(stage), full)
        zeros = gl.zeros([64, s.BLOCK_Q], gl.float32, layout=SCORES)
        grad_p_mma = _times_transposed(s, v, grad_out, zeros)
        scores = warpgroup_mma_wait(PARTS, deps=(scores_mma,))
        if s.CAUSAL:
            below = diagonal - (i % num_tiles if s.GROUPED else i) * s.BLOCK_Q
            if below > -63:
                # From shared memory: as constants the numbers of rows and columns stay in
                # registers.
                keys = s.keys_s.load(gl.SliceLayout(1, SCORES)) + below
                scores = gl.where(
                    keys[:, None] <= s.queries_s.load(COLS)[None, :], scores, float("-inf")
                )
        lse = s.lse_s.index(stage).load(COLS)
        p = gl.exp2(scores * s.scale_log2 - lse[None, :])
        p_low = gl.convert_layout(to_low(p, DTYPE), OPERAND)
        grad_v_mma = _plus_product(s, p_low, grad_out, grad_v)
        grad_p = warpgroup_mma_wait(PARTS, deps=(grad_p_mma,))
        delta = s.delta_s.index(stage).load(COLS)
        grad_scores_low = gl.convert_layout(to_low(p * (grad_p - delta[None, :]), DTYPE), OPERAND)
        grad_v = _wait(s, 0, grad_v_mma)
        mbarrier.arrive(s.grad_out_empty.index(stage), count=1)
        j += 1
    if num_tiles > 0:
        last = (j + s.STAGES - 1) % s.STAGES
        q = _tile(s, s.q_s, last, s.BLOCK_Q)
        grad_k = _wait(s, 0, _plus_product(s, grad_scores_low, q, grad_k))
        if s.SETS > 1:
            mbarrier.arrive(s.q_empty.index(last), count=1)
    # Only this warpgroup reads its halves of K and V: they carry the results out, and TMA clips
    # rows past the end.
    _put(s, grad_v, 1.0, v)
    _put(s, grad_k, s.scale_log2 * LN_2, k)
    fence_async_shared()
    _store(s, s.grad_v_desc, batch, head, k1, s.v_s, place)
    _store(s, s.grad_k_desc, batch, head, k1, s.k_s, place)
    tma.store_wait(0)
    if s.SETS > 1:
        mbarrier.arrive(s.kv_empty.index(place), count=1)
    return j


@gluon.jit(do_not_specialize=LENGTHS)
def hopper_bwd_dkdv_kernel(
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
    num_tiles_total,
    num_heads,
    group,
    num_queries,
    num_keys,
    padded_queries,
    scale_log2,
    BLOCK_Q: gl.constexpr,
    D: gl.constexpr,
    TAIL: gl.constexpr,
    STAGES: gl.constexpr,
    SETS: gl.constexpr,
    CAUSAL: gl.constexpr,
    GROUPED: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """dK and dV of 128 keys of one head; when causal the first tiles, seen by the most queries,
    start first.
    """
    q_s = _buffers(q_desc, q_tail_desc, STAGES, BLOCK_Q, D, TAIL)
    grad_out_s = _buffers(grad_out_desc, grad_out_tail_desc, STAGES, BLOCK_Q, D, TAIL)
    k_s = _buffers(k_desc, k_tail_desc, 2 * SETS, 64, D, TAIL)
    v_s = _buffers(v_desc, v_tail_desc, 2 * SETS, 64, D, TAIL)
    lse_s = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_Q], lse_desc.layout)
    delta_s = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_Q], delta_desc.layout)
    # The numbers from 0 on, for the masks.
    NUMBERS: gl.constexpr = gl.SwizzledSharedLayout(vec=1, per_phase=1, max_phase=1, order=[0])
    keys_s = gl.allocate_shared_memory(gl.int32, [64], NUMBERS)
    queries_s = gl.allocate_shared_memory(gl.int32, [BLOCK_Q], NUMBERS)
    if CAUSAL:
        keys_s.store(gl.arange(0, 64, layout=gl.BlockedLayout([1], [32], [4], [0])))
        queries_s.store(gl.arange(0, BLOCK_Q, layout=gl.BlockedLayout([1], [32], [4], [0])))
    kv_full = barriers(2 * SETS)
    kv_empty = barriers(2 * SETS)
    q_full = barriers(STAGES)
    q_empty = barriers(STAGES)
    grad_out_full = barriers(STAGES)
    grad_out_empty = barriers(STAGES)
    for place in gl.static_range(2 * SETS):
        mbarrier.init(kv_full.index(place), count=1)
        mbarrier.init(kv_empty.index(place), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(q_full.index(stage), count=1)
        mbarrier.init(grad_out_full.index(stage), count=1)
        mbarrier.init(q_empty.index(stage), count=2)
        mbarrier.init(grad_out_empty.index(stage), count=2)
    fence_async_shared()
    shared = DkdvShared(
        (grad_k_desc, grad_k_tail_desc),
        (grad_v_desc, grad_v_tail_desc),
        q_s,
        grad_out_s,
        k_s,
        v_s,
        lse_s,
        delta_s,
        keys_s,
        queries_s,
        kv_full,
        kv_empty,
        q_full,
        q_empty,
        grad_out_full,
        grad_out_empty,
        num_tiles_total,
        num_heads,
        group,
        num_queries,
        num_keys,
        scale_log2,
        (q_desc, q_tail_desc),
        (grad_out_desc, grad_out_tail_desc),
        (k_desc, k_tail_desc),
        (v_desc, v_tail_desc),
        lse_desc,
        delta_desc,
        padded_queries,
        BLOCK_Q,
        D,
        TAIL,
        STAGES,
        SETS,
        CAUSAL,
        GROUPED,
    )
    gl.warp_specialize(
        [
            (_tiles_of_program, (shared, gl.constexpr(_dkdv_compute), 0)),
            (_tiles_of_program, (shared, gl.constexpr(_dkdv_compute), 1)),
            (_tiles_of_program, (shared, gl.constexpr(_dkdv_load), 0)),
        ],
        [4, 1],
        [REGISTERS, PRODUCER_REGISTERS],
    )


@gluon.jit
def _decode_dq_tile(s, t):
    """The first query, the head and the batch of the t-th tile of all."""
    tile, head, batch = _decode_tile(s, t, s.num_queries)
    if s.CAUSAL:
        # The last queries see the most keys: the longest programs of a head start first.
        tile = (s.num_queries + 127) // 128 - 1 - tile
    return tile * 128, head, batch


@gluon.jit
def _dq_tiles(s, q0):
    """The number of key tiles that 128 queries see."""
    end = s.num_keys
    if s.CAUSAL:
        end = gl.maximum(gl.minimum(end, q0 + 128 + (s.num_keys - s.num_queries)), 0)
    return (end + s.BLOCK_K - 1) // s.BLOCK_K


@gluon.jit
def _dq_load(s, t, turn, j, C: gl.constexpr):
    """Loads what one tile of queries takes, as `_dkdv_load`."""
    q0, head, batch = _decode_dq_tile(s, t)
    num_tiles = _dq_tiles(s, q0)
    for c in gl.static_range(2):
        place = (turn % s.SETS) * 2 + c
        if s.SETS > 1:
            mbarrier.wait(s.q_empty.index(place), ((turn // s.SETS) & 1) ^ 1)
        mbarrier.expect(s.q_full.index(place), 2 * 64 * (s.D + s.TAIL) * 2)
        _load(s, s.q_desc, batch, head, q0 + c * 64, s.q_full.index(place), s.q_s, place)
        _load(
            s, s.grad_out_desc, batch, head, q0 + c * 64, s.q_full.index(place), s.grad_out_s, place
        )
    for i in range(num_tiles):
        stage = j % s.STAGES
        free = ((j // s.STAGES) & 1) ^ 1
        mbarrier.wait(s.k_empty.index(stage), free)
        mbarrier.expect(s.k_full.index(stage), s.BLOCK_K * (s.D + s.TAIL) * 2)
        _load(
            s, s.k_desc, batch, head // s.group, i * s.BLOCK_K, s.k_full.index(stage), s.k_s, stage
        )
        mbarrier.wait(s.v_empty.index(stage), free)
        mbarrier.expect(s.v_full.index(stage), s.BLOCK_K * (s.D + s.TAIL) * 2)
        _load(
            s, s.v_desc, batch, head // s.group, i * s.BLOCK_K, s.v_full.index(stage), s.v_s, stage
        )
        j += 1
    return j


@gluon.jit
def _dq_compute(s, t, turn, j, C: gl.constexpr):
    """dQ of 64 queries, as `_dkdv_compute`."""
    DTYPE: gl.constexpr = s.grad_q_desc[0].dtype
    SCORES: gl.constexpr = product_layout(s.BLOCK_K)
    GRAD: gl.constexpr = product_layout(s.D)
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=GRAD, k_width=2)
    PARTS: gl.constexpr = 2 if s.TAIL else 1
    rows = gl.arange(0, 64, layout=gl.SliceLayout(1, SCORES))
    cols = gl.arange(0, s.BLOCK_K, layout=gl.SliceLayout(0, SCORES))
    p = gl.zeros([64, s.BLOCK_K], gl.float32, layout=SCORES)
    grad_scores = gl.zeros([64, s.BLOCK_K], gl.float32, layout=SCORES)
    q0, head, batch = _decode_dq_tile(s, t)
    num_tiles = _dq_tiles(s, q0)
    q1 = q0 + C * 64
    # The first key that a query does not see.
    ends = rows * 0 + s.num_keys
    if s.CAUSAL:
        ends = gl.minimum(ends, q1 + rows + (s.num_keys - s.num_queries) + 1)
    full_end = s.num_keys
    if s.CAUSAL:
        full_end = gl.minimum(full_end, q1 + (s.num_keys - s.num_queries) + 1)
    statistics = (batch * s.num_heads + head).to(gl.int64) * s.padded_queries + q1
    lse = gl.load(s.lse_ptr + statistics + rows)[:, None]
    delta = gl.load(s.delta_ptr + statistics + rows)[:, None]
    grad_q = _zeros(s)
    grad_scores_low = gl.zeros([64, s.BLOCK_K], DTYPE, layout=OPERAND)
    place = (turn % s.SETS) * 2 + C
    q = _tile(s, s.q_s, place, 64)
    grad_out = _tile(s, s.grad_out_s, place, 64)
    mbarrier.wait(s.q_full.index(place), (turn // s.SETS) & 1)
    # As in dK/dV: the product into dQ is issued one tile later, and the first one is of zeros.
    for i in range(num_tiles):
        stage = j % s.STAGES
        full = (j // s.STAGES) & 1
        before = (j - (i > 0).to(gl.int32)) % s.STAGES
        k = _tile(s, s.k_s, stage, s.BLOCK_K)
        v = _tile(s, s.v_s, stage, s.BLOCK_K)
        mbarrier.wait(s.k_full.index(stage), full)
        k_before = _tile(s, s.k_s, before, s.BLOCK_K)
        grad_q_mma = _plus_product(s, grad_scores_low, k_before, grad_q)
        scores_mma = _times_transposed(s, q, k, p)
        grad_q = _wait(s, 1, grad_q_mma)
        mbarrier.arrive(s.k_empty.index(before), count=1, pred=i > 0)
        mbarrier.wait(s.v_full.index(stage), full)
        grad_p_mma = _times_transposed(s, grad_out, v, grad_scores)
        scores = warpgroup_mma_wait(PARTS, deps=(scores_mma,))
        p = gl.exp2(scores * s.scale_log2 - lse)
        if i * s.BLOCK_K + s.BLOCK_K > full_end:
            p = gl.where(cols[None, :] < (ends - i * s.BLOCK_K)[:, None], p, 0.0)
        grad_p = warpgroup_mma_wait(0, deps=(grad_p_mma,))
        mbarrier.arrive(s.v_empty.index(stage), count=1)
        grad_scores = p * (grad_p - delta)
        grad_scores_low = gl.convert_layout(to_low(grad_scores, DTYPE), OPERAND)
        j += 1
    if num_tiles > 0:
        last = (j + s.STAGES - 1) % s.STAGES
        k = _tile(s, s.k_s, last, s.BLOCK_K)
        grad_q = _wait(s, 0, _plus_product(s, grad_scores_low, k, grad_q))
        if s.SETS > 1:
            mbarrier.arrive(s.k_empty.index(last), count=1)
    _put(s, grad_q, s.scale_log2 * LN_2, q)
    fence_async_shared()
    _store(s, s.grad_q_desc, batch, head, q1, s.q_s, place)
    tma.store_wait(0)
    if s.SETS > 1:
        mbarrier.arrive(s.q_empty.index(place), count=1)
    return j


@gluon.jit(do_not_specialize=LENGTHS)
def hopper_bwd_dq_kernel(
    q_desc,
    q_tail_desc,
    grad_out_desc,
    grad_out_tail_desc,
    k_desc,
    k_tail_desc,
    v_desc,
    v_tail_desc,
    grad_q_desc,
    grad_q_tail_desc,
    lse_ptr,
    delta_ptr,
    num_tiles_total,
    num_heads,
    group,
    num_queries,
    num_keys,
    padded_queries,
    scale_log2,
    BLOCK_K: gl.constexpr,
    D: gl.constexpr,
    TAIL: gl.constexpr,
    STAGES: gl.constexpr,
    SETS: gl.constexpr,
    CAUSAL: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """dQ of 128 queries of one head."""
    q_s = _buffers(q_desc, q_tail_desc, 2 * SETS, 64, D, TAIL)
    grad_out_s = _buffers(grad_out_desc, grad_out_tail_desc, 2 * SETS, 64, D, TAIL)
    k_s = _buffers(k_desc, k_tail_desc, STAGES, BLOCK_K, D, TAIL)
    v_s = _buffers(v_desc, v_tail_desc, STAGES, BLOCK_K, D, TAIL)
    q_full = barriers(2 * SETS)
    q_empty = barriers(2 * SETS)
    k_full = barriers(STAGES)
    k_empty = barriers(STAGES)
    v_full = barriers(STAGES)
    v_empty = barriers(STAGES)
    for place in gl.static_range(2 * SETS):
        mbarrier.init(q_full.index(place), count=1)
        mbarrier.init(q_empty.index(place), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=2)
        mbarrier.init(v_empty.index(stage), count=2)
    fence_async_shared()
    shared = DqShared(
        (grad_q_desc, grad_q_tail_desc),
        lse_ptr,
        delta_ptr,
        q_s,
        grad_out_s,
        k_s,
        v_s,
        q_full,
        q_empty,
        k_full,
        k_empty,
        v_full,
        v_empty,
        num_tiles_total,
        num_heads,
        num_queries,
        num_keys,
        padded_queries,
        scale_log2,
        (q_desc, q_tail_desc),
        (grad_out_desc, grad_out_tail_desc),
        (k_desc, k_tail_desc),
        (v_desc, v_tail_desc),
        group,
        BLOCK_K,
        D,
        TAIL,
        STAGES,
        SETS,
        CAUSAL,
    )
    gl.warp_specialize(
        [
            (_tiles_of_program, (shared, gl.constexpr(_dq_compute), 0)),
            (_tiles_of_program, (shared, gl.constexpr(_dq_compute), 1)),
            (_tiles_of_program, (shared, gl.constexpr(_dq_load), 0)),
        ],
        [4, 1],
        [REGISTERS, PRODUCER_REGISTERS],
    )


def _grid(
    num_rows: int, num_heads: int, num_batches: int, sets: int, device_index: int
) -> tuple[tuple, int]:
    """Returns the grid and the number of tiles: a program for a tile, or as many persistent ones as
    run at once.
    """
    tiles = -(-num_rows // BLOCK)
    total = tiles * num_heads * num_batches
    if sets == 1:
        return (tiles, num_heads, num_batches), total
    return (min(total, num_multiprocessors(device_index)), 1, 1), total


def _tiles(long: dict, short: dict, head_dim: int, inner: int, causal: bool) -> dict[str, int]:
    """Returns the tiles by how many rows are looped over.

    Causal loops are of all lengths: a program has one tile, and the hardware gives the next to a
    multiprocessor that is free.
    """
    return long[head_dim] | {"SETS": 1} if causal else (short if inner <= SHORT else long)[head_dim]


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
    """Returns what writes the gradients: run((q, k, v, grad_out), (lse_log2, delta), (grad_q,
    grad_k, grad_v), cu_seqlens).

    The layouts are 4D. lse_log2 and delta are fp32 and dense, their rows padded to a multiple of
    128 with +inf and 0: 2^(· − ∞) = 0 keeps what lies beyond the last query out of every sum.
    """
    num_batches, num_heads, num_queries, head_dim = q.shape
    num_key_heads, num_keys = k.shape[1:3]
    group = num_heads // num_key_heads
    numbers = (group, num_queries, num_keys, padded_queries, scale * LOG2_E)
    tail = TAILS[head_dim]
    columns = {"D": 64 if tail else head_dim, "TAIL": tail, "CAUSAL": causal}
    tiles = _tiles(DKDV, DKDV_SHORT, head_dim, num_queries, causal)
    inner = tiles["BLOCK_Q"]
    statistics = rows_of(num_batches * num_heads * padded_queries, inner)
    own = [(x, ROWS) for x in (k, v, *grads[1:])]
    described = [
        *with_tails([(q, inner), (grad_out, inner), *own], tail),
        (6, statistics),
        (7, statistics),
    ]
    grid, key_tiles = _grid(num_keys, num_key_heads, num_batches, tiles["SETS"], device_index)
    constants = {**tiles, **columns, "GROUPED": group > 1}
    dkdv = TileLaunch(
        hopper_bwd_dkdv_kernel, grid, described, (key_tiles, num_key_heads, *numbers), constants, 2
    )
    tiles = _tiles(DQ, DQ_SHORT, head_dim, num_keys, causal)
    inner = tiles["BLOCK_K"]
    described = with_tails(
        [(q, ROWS), (grad_out, ROWS), (k, inner), (v, inner), (grads[0], ROWS)], tail
    )
    grid, query_tiles = _grid(num_queries, num_heads, num_batches, tiles["SETS"], device_index)
    constants = {**tiles, **columns}
    dq = TileLaunch(
        hopper_bwd_dq_kernel, grid, described, (query_tiles, num_heads, *numbers), constants, 2
    )

    def run(inputs, statistics, grads, _) -> None:
        q, k, v, grad_out = inputs
        grad_q, grad_k, grad_v = grads
        dkdv((q, grad_out, k, v, grad_k, grad_v, *statistics))
        dq((q, grad_out, k, v, grad_q), *statistics)

    return run
