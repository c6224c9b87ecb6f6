"""FlashAttention's forward on Hopper in Gluon: TMA loads by one warp, asynchronous products by two or three warpgroups.

    S = scale · Q Kᵀ    P = softmax(S)    O = P V    L = log Σ exp S

Shapes: (batch, heads, length, D), D 64 or 128, bf16 or fp16, causal (aligned to the bottom right) or not. Everything
else that `flash_attention` takes runs in its Triton kernels.

Ideal cost per head: 4·Q·K·D FLOPs, halved when causal.

How a program is laid out: a producer warp issues TMA loads into rings of tiles, each guarded by a barrier for "full"
and one for "empty"; consumer warpgroups of 64 rows each multiply. The producer gives its registers to them.
- The product of tile i − 1 with V runs under the softmax of tile i. Three consumers at D 64, where the exponentials
  take as long as the products: one multiplies while the others take theirs. Two at D 128, whose accumulators need the
  registers. Short tiles run in persistent programs.
- A descriptor has batch, head, row and column as dimensions of their own: TMA loads zeros past a sequence's last row
  and stores nothing there.

Sources: Shah et al. 2024, "FlashAttention-3"; Dao 2023, "FlashAttention-2".
"""

import triton
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

from labkit.kernels.hopper import (
    LN_2,
    LOG2_E,
    PRODUCER_REGISTERS,
    ROWS,
    async_load,
    async_store,
    launch_options,
    num_multiprocessors,
    tiles_of,
    to_low,
)

# ---- tile configurations --------------------------------------------------------------------------------------

# Keys of a tile, how many tiles are in flight, and warpgroups of 64 queries. Bounds: 160 or 240 registers a thread of
# a consumer (scores 64 × BLOCK_K and the accumulator of 64 rows · D); 227 KiB of shared memory, of which 128 rows take
# 256·D bytes per tensor.
FORWARD = {
    64: {"BLOCK_K": 128, "STAGES": 3, "CONSUMERS": 3},
    128: {"BLOCK_K": 128, "STAGES": 2, "CONSUMERS": 2},
}

# Plain numbers to the kernels: a length of 1, or one divisible by 16, is no reason to compile them anew.
LENGTHS = ("num_heads", "num_heads_total", "group", "num_queries", "num_keys")

# ---- forward --------------------------------------------------------------------------------------------------


@gluon.jit
def _fwd_tile(t, num_q_tiles, num_heads_total, CAUSAL: gl.constexpr):
    """Which tile of queries and which head (of all batches) the t-th one is.

    Heads one after another share their keys in the L2 cache. When causal the longest tiles of all heads come first:
    the programs take them in turn, so that all of them are given equal work.
    """
    if CAUSAL:
        tile = num_q_tiles - 1 - t // num_heads_total
        head = t % num_heads_total
    else:
        tile = t % num_q_tiles
        head = t // num_q_tiles
    return tile, head


@gluon.jit
def _num_key_tiles(rows_end, num_queries, num_keys, BLOCK_K: gl.constexpr, CAUSAL: gl.constexpr):
    """How many key tiles the queries before `rows_end` walk; one at least, so that a row without keys is written."""
    end = num_keys
    if CAUSAL:
        end = gl.maximum(gl.minimum(end, rows_end + (num_keys - num_queries)), 1)
    return (end + BLOCK_K - 1) // BLOCK_K


@gluon.jit
def _fwd_producer(
    q_desc, k_desc, v_desc, q_s, k_s, v_s, q_full, q_empty, k_full, k_empty, v_full, v_empty,
    num_heads, num_heads_total, group, num_queries, num_keys,
    BLOCK_K: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, CONSUMERS: gl.constexpr,
):  # fmt: skip
    num_q_tiles = (num_queries + 64 * CONSUMERS - 1) // (64 * CONSUMERS)
    j = 0
    turn = 0
    for t in range(gl.program_id(0), num_q_tiles * num_heads_total, gl.num_programs(0)):
        tile, head_total = _fwd_tile(t, num_q_tiles, num_heads_total, CAUSAL)
        batch = head_total // num_heads
        head = head_total % num_heads
        q0 = tile * (64 * CONSUMERS)
        num_tiles = _num_key_tiles(q0 + 64 * CONSUMERS, num_queries, num_keys, BLOCK_K, CAUSAL)
        for i in range(num_tiles):
            stage = j % STAGES
            free = ((j // STAGES) & 1) ^ 1
            start = (num_tiles - 1 - i) * BLOCK_K
            mbarrier.wait(k_empty.index(stage), free)
            mbarrier.expect(k_full.index(stage), k_desc.block_type.nbytes)
            async_load(k_desc, [batch, head // group, start, 0], k_full.index(stage), k_s.index(stage))
            if i == 0:
                for c in gl.static_range(CONSUMERS):
                    mbarrier.wait(q_empty.index(c), (turn & 1) ^ 1)
                    mbarrier.expect(q_full.index(c), q_desc.block_type.nbytes)
                    async_load(q_desc, [batch, head, q0 + c * 64, 0], q_full.index(c), q_s.index(c))
            mbarrier.wait(v_empty.index(stage), free)
            mbarrier.expect(v_full.index(stage), v_desc.block_type.nbytes)
            async_load(v_desc, [batch, head // group, start, 0], v_full.index(stage), v_s.index(stage))
            j += 1
        turn += 1


@gluon.jit
def _fwd_mask(scores, numbers_s, end, diagonal, CAUSAL: gl.constexpr, SCORES: gl.constexpr):
    """The scores of visible keys, −inf elsewhere: keys before `end`, and before `diagonal` plus the number of the
    row.

    Both count from the tile's first key. The numbers come from shared memory: as constants they stay in registers
    through the loop.
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
    """One step of the online softmax: P, and the maximum, the sum and the factor that the older ones shrink by."""
    new_maximum = gl.maximum(maximum, gl.max(scores, 1) * scale_log2)
    shift = new_maximum
    if MASKED:
        # While a row has seen no key its maximum is −inf, and −inf − (−inf) would be NaN.
        shift = gl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    p = gl.exp2(scores * scale_log2 - shift[:, None])
    rescale = gl.exp2(maximum - shift)
    return p, new_maximum, total * rescale + gl.sum(p, 1), rescale


@gluon.jit
def _fwd_step(
    i, q, k_s, v_s, numbers_s, k_full, k_empty, v_full, v_empty, p, p_low, acc, maximum, total,
    end, diagonal, scale_log2,
    BLOCK_K: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, MASKED: gl.constexpr,
    SCORES: gl.constexpr, OUT: gl.constexpr,
):  # fmt: skip
    """The scores and the softmax of tile i, and the product with V of tile i − 1 under them."""
    stage = i % STAGES
    before = (i - 1) % STAGES
    mbarrier.wait(k_full.index(stage), (i // STAGES) & 1)
    # The scores go where the last P was: a tile of zeros would be as many registers more, set anew for every tile.
    k = k_s.index(stage).reshape([BLOCK_K, D])
    scores_mma = warpgroup_mma(q, k.permute((1, 0)), p, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(before), ((i - 1) // STAGES) & 1)
    acc_mma = warpgroup_mma(p_low, v_s.index(before).reshape([BLOCK_K, D]), acc, is_async=True)
    scores = warpgroup_mma_wait(1, deps=(scores_mma,))
    mbarrier.arrive(k_empty.index(stage), count=1)
    if MASKED:
        scores = _fwd_mask(scores, numbers_s, end, diagonal, CAUSAL, SCORES)
    p, maximum, total, rescale = _softmax(scores, maximum, total, scale_log2, MASKED)
    acc = warpgroup_mma_wait(0, deps=(acc_mma,))
    mbarrier.arrive(v_empty.index(before), count=1)
    acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, OUT))[:, None]
    return p, gl.convert_layout(to_low(p, q.dtype), gl.DotOperandLayout(0, OUT, 2)), acc, maximum, total


@gluon.jit
def _fwd_consumer(
    C: gl.constexpr, out_desc, lse_ptr, q_s, k_s, v_s, out_s, numbers_s,
    q_full, q_empty, k_full, k_empty, v_full, v_empty,
    num_heads, num_heads_total, num_queries, num_keys, scale_log2,
    BLOCK_K: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, EVEN_K: gl.constexpr,
    CONSUMERS: gl.constexpr,
):  # fmt: skip
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_K, 16]
    )
    OUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    MASKED: gl.constexpr = CAUSAL or not EVEN_K
    num_q_tiles = (num_queries + 64 * CONSUMERS - 1) // (64 * CONSUMERS)
    q = q_s.index(C).reshape([64, D])
    p = gl.zeros([64, BLOCK_K], gl.float32, layout=SCORES)
    # The number of the next key tile that the producer loads, counted over all tiles of queries.
    j = 0
    turn = 0
    for t in range(gl.program_id(0), num_q_tiles * num_heads_total, gl.num_programs(0)):
        tile, head_total = _fwd_tile(t, num_q_tiles, num_heads_total, CAUSAL)
        q0 = tile * (64 * CONSUMERS)
        q1 = q0 + C * 64
        # The first key that the first query does not see; each further query sees one more.
        diagonal = q1 + (num_keys - num_queries) + 1
        num_tiles = _num_key_tiles(q0 + 64 * CONSUMERS, num_queries, num_keys, BLOCK_K, CAUSAL)
        after = j + num_tiles
        num_full = num_keys // BLOCK_K
        if CAUSAL:
            # The walk begins at the last keys. Those that only the consumers of later queries see are passed over.
            num_mine = _num_key_tiles(q1 + 64, num_queries, num_keys, BLOCK_K, CAUSAL)
            for _ in range(num_tiles - num_mine):
                mbarrier.wait(k_full.index(j % STAGES), (j // STAGES) & 1)
                mbarrier.arrive(k_empty.index(j % STAGES), count=1)
                mbarrier.wait(v_full.index(j % STAGES), (j // STAGES) & 1)
                mbarrier.arrive(v_empty.index(j % STAGES), count=1)
                j += 1
            num_full = gl.minimum(num_full, gl.maximum(diagonal, 0) // BLOCK_K)
        maximum = gl.full([64], float("-inf"), gl.float32, layout=gl.SliceLayout(1, SCORES))
        total = gl.zeros([64], gl.float32, layout=gl.SliceLayout(1, SCORES))
        acc = gl.zeros([64, D], gl.float32, layout=OUT)
        mbarrier.wait(q_full.index(C), turn & 1)
        mbarrier.wait(k_full.index(j % STAGES), (j // STAGES) & 1)
        k = k_s.index(j % STAGES).reshape([BLOCK_K, D])
        scores = warpgroup_mma(q, k.permute((1, 0)), p, use_acc=False)
        mbarrier.arrive(k_empty.index(j % STAGES), count=1)
        start = (after - j - 1) * BLOCK_K
        if MASKED:
            scores = _fwd_mask(scores, numbers_s, num_keys - start, diagonal - start, CAUSAL, SCORES)
        p, maximum, total, _rescale = _softmax(scores, maximum, total, scale_log2, MASKED)
        p_low = gl.convert_layout(to_low(p, q.dtype), gl.DotOperandLayout(0, OUT, 2))
        # What takes masks comes first, and the loop behind it takes none.
        first_full = j + 1
        if CAUSAL:
            first_full = gl.maximum(after - num_full, first_full)
            for i in range(j + 1, first_full):
                start = (after - i - 1) * BLOCK_K
                p, p_low, acc, maximum, total = _fwd_step(
                    i, q, k_s, v_s, numbers_s, k_full, k_empty, v_full, v_empty, p, p_low, acc, maximum, total,
                    num_keys - start, diagonal - start, scale_log2,
                    BLOCK_K, D, STAGES, CAUSAL, True, SCORES, OUT,
                )  # fmt: skip
        for i in range(first_full, after):
            p, p_low, acc, maximum, total = _fwd_step(
                i, q, k_s, v_s, numbers_s, k_full, k_empty, v_full, v_empty, p, p_low, acc, maximum, total,
                0, 0, scale_log2,
                BLOCK_K, D, STAGES, CAUSAL, False, SCORES, OUT,
            )  # fmt: skip
        # The queries of the next tile load under the end of this one. The barrier in this also tells all threads that
        # the last output has left its buffer, which only the thread that stored it can wait for.
        tma.store_wait(0)
        mbarrier.arrive(q_empty.index(C), count=1)
        last = after - 1
        mbarrier.wait(v_full.index(last % STAGES), (last // STAGES) & 1)
        acc = warpgroup_mma(p_low, v_s.index(last % STAGES).reshape([BLOCK_K, D]), acc)
        mbarrier.arrive(v_empty.index(last % STAGES), count=1)
        # A row without any key: zeros, and −inf.
        divisor = gl.where(total == 0.0, 1.0, total)
        acc = acc * gl.convert_layout(1.0 / divisor, gl.SliceLayout(1, OUT))[:, None]
        out_s.index(C).reshape([64, D]).store(acc.to(q.dtype))
        fence_async_shared()
        async_store(out_desc, [head_total // num_heads, head_total % num_heads, q1, 0], out_s.index(C))
        lse = gl.where(total == 0.0, float("-inf"), (maximum + gl.log2(divisor)) * LN_2)
        rows = q1 + gl.arange(0, 64, layout=gl.SliceLayout(1, SCORES))
        gl.store(lse_ptr + head_total.to(gl.int64) * num_queries + rows, lse, mask=rows < num_queries)
        j = after
        turn += 1
    tma.store_wait(0)


@gluon.jit
def _fwd_consumer_0(
    out_desc, lse_ptr, q_s, k_s, v_s, out_s, numbers_s, q_full, q_empty, k_full, k_empty, v_full, v_empty, num_heads,
    num_heads_total, num_queries, num_keys,
    scale_log2,
    BLOCK_K: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, EVEN_K: gl.constexpr,
    CONSUMERS: gl.constexpr,
):  # fmt: skip
    _fwd_consumer(
        0, out_desc, lse_ptr, q_s, k_s, v_s, out_s, numbers_s, q_full, q_empty, k_full, k_empty, v_full, v_empty,
        num_heads, num_heads_total, num_queries, num_keys,
        scale_log2, BLOCK_K, D, STAGES, CAUSAL, EVEN_K, CONSUMERS,
    )  # fmt: skip


@gluon.jit
def _fwd_consumer_1(
    out_desc, lse_ptr, q_s, k_s, v_s, out_s, numbers_s, q_full, q_empty, k_full, k_empty, v_full, v_empty, num_heads,
    num_heads_total, num_queries, num_keys,
    scale_log2,
    BLOCK_K: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, EVEN_K: gl.constexpr,
    CONSUMERS: gl.constexpr,
):  # fmt: skip
    _fwd_consumer(
        1, out_desc, lse_ptr, q_s, k_s, v_s, out_s, numbers_s, q_full, q_empty, k_full, k_empty, v_full, v_empty,
        num_heads, num_heads_total, num_queries, num_keys,
        scale_log2, BLOCK_K, D, STAGES, CAUSAL, EVEN_K, CONSUMERS,
    )  # fmt: skip


@gluon.jit
def _fwd_consumer_2(
    out_desc, lse_ptr, q_s, k_s, v_s, out_s, numbers_s, q_full, q_empty, k_full, k_empty, v_full, v_empty, num_heads,
    num_heads_total, num_queries, num_keys,
    scale_log2,
    BLOCK_K: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, EVEN_K: gl.constexpr,
    CONSUMERS: gl.constexpr,
):  # fmt: skip
    _fwd_consumer(
        2, out_desc, lse_ptr, q_s, k_s, v_s, out_s, numbers_s, q_full, q_empty, k_full, k_empty, v_full, v_empty,
        num_heads, num_heads_total, num_queries, num_keys,
        scale_log2, BLOCK_K, D, STAGES, CAUSAL, EVEN_K, CONSUMERS,
    )  # fmt: skip


@gluon.jit(do_not_specialize=LENGTHS)
def hopper_fwd_kernel(
    q_desc, k_desc, v_desc, out_desc, lse_ptr, num_heads, num_heads_total, group, num_queries, num_keys, scale_log2,
    BLOCK_K: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, EVEN_K: gl.constexpr,
    CONSUMERS: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """The output and the log-sum-exp; a program takes tiles of 64 queries a consumer, one after another."""
    q_s = gl.allocate_shared_memory(q_desc.dtype, [CONSUMERS, 1, 1, 64, D], q_desc.layout)
    k_s = gl.allocate_shared_memory(k_desc.dtype, [STAGES, 1, 1, BLOCK_K, D], k_desc.layout)
    v_s = gl.allocate_shared_memory(v_desc.dtype, [STAGES, 1, 1, BLOCK_K, D], v_desc.layout)
    out_s = gl.allocate_shared_memory(out_desc.dtype, [CONSUMERS, 1, 1, 64, D], out_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for c in gl.static_range(CONSUMERS):
        mbarrier.init(q_full.index(c), count=1)
        mbarrier.init(q_empty.index(c), count=1)
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
    fence_async_shared()
    # The tuples are written out: one that is first given a name loses its compile-time constants.
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_fwd_consumer_0, (out_desc, lse_ptr, q_s, k_s, v_s, out_s, numbers_s, q_full, q_empty, k_full,
                 k_empty, v_full, v_empty, num_heads, num_heads_total,
                 num_queries, num_keys, scale_log2, BLOCK_K, D, STAGES, CAUSAL, EVEN_K, CONSUMERS)),
                (_fwd_consumer_1, (out_desc, lse_ptr, q_s, k_s, v_s, out_s, numbers_s, q_full, q_empty, k_full,
                 k_empty, v_full, v_empty, num_heads, num_heads_total,
                 num_queries, num_keys, scale_log2, BLOCK_K, D, STAGES, CAUSAL, EVEN_K, CONSUMERS)),
                (_fwd_producer, (q_desc, k_desc, v_desc, q_s, k_s, v_s, q_full, q_empty, k_full, k_empty, v_full,
                 v_empty, num_heads, num_heads_total, group,
                 num_queries, num_keys, BLOCK_K, STAGES, CAUSAL, CONSUMERS)),
            ],
            [4, 1],
            [REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_fwd_consumer_0, (out_desc, lse_ptr, q_s, k_s, v_s, out_s, numbers_s, q_full, q_empty, k_full,
                 k_empty, v_full, v_empty, num_heads, num_heads_total,
                 num_queries, num_keys, scale_log2, BLOCK_K, D, STAGES, CAUSAL, EVEN_K, CONSUMERS)),
                (_fwd_consumer_1, (out_desc, lse_ptr, q_s, k_s, v_s, out_s, numbers_s, q_full, q_empty, k_full,
                 k_empty, v_full, v_empty, num_heads, num_heads_total,
                 num_queries, num_keys, scale_log2, BLOCK_K, D, STAGES, CAUSAL, EVEN_K, CONSUMERS)),
                (_fwd_consumer_2, (out_desc, lse_ptr, q_s, k_s, v_s, out_s, numbers_s, q_full, q_empty, k_full,
                 k_empty, v_full, v_empty, num_heads, num_heads_total,
                 num_queries, num_keys, scale_log2, BLOCK_K, D, STAGES, CAUSAL, EVEN_K, CONSUMERS)),
                (_fwd_producer, (q_desc, k_desc, v_desc, q_s, k_s, v_s, q_full, q_empty, k_full, k_empty, v_full,
                 v_empty, num_heads, num_heads_total, group,
                 num_queries, num_keys, BLOCK_K, STAGES, CAUSAL, CONSUMERS)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip


# ---- launchers ------------------------------------------------------------------------------------------------


def hopper_forward(
    q_BHSD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, out_BHSD: Tensor, lse_BHS: Tensor, *, scale: float, causal: bool
) -> None:
    """Writes the output and the log-sum-exp (fp32, natural units, dense) of q, k and v; G divides H."""
    num_batches, num_heads, num_queries, head_dim = q_BHSD.shape
    num_keys = k_BGSD.shape[2]
    tiles = FORWARD[head_dim]
    consumers = tiles["CONSUMERS"]
    num_tiles = triton.cdiv(num_queries, ROWS * consumers) * num_heads * num_batches
    # A program that takes several tiles loads the next one under the end of the last, which pays while tiles are short
    # (18 % at 1,024 keys); with long ones the hardware's own queue evens out the programs better (3 % at 16,384).
    num_programs = min(num_tiles, num_multiprocessors(q_BHSD.device.index)) if num_keys <= 8192 else num_tiles
    hopper_fwd_kernel[(num_programs,)](
        tiles_of(q_BHSD, ROWS),
        tiles_of(k_BGSD, tiles["BLOCK_K"]),
        tiles_of(v_BGSD, tiles["BLOCK_K"]),
        tiles_of(out_BHSD, ROWS),
        lse_BHS,
        num_heads,
        num_heads * num_batches,
        num_heads // k_BGSD.shape[1],
        num_queries,
        num_keys,
        scale * LOG2_E,
        D=head_dim,
        CAUSAL=causal,
        EVEN_K=num_keys % tiles["BLOCK_K"] == 0,
        **tiles,
        **launch_options(consumers),
    )
