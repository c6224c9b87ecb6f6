"""FlashAttention on Hopper in Gluon: TMA loads by one warp, asynchronous products by two or three warpgroups.

    S = scale · Q Kᵀ    P = softmax(S)    O = P V    L = log Σ exp S
    ∂V = Pᵀ ∂O    ∂S = P ∘ (∂O Vᵀ − D)    ∂Q = scale · ∂S K    ∂K = scale · ∂Sᵀ Q

Shapes: (batch, heads, length, D), D 64 or 128, bf16 or fp16, causal (aligned to the bottom right) or not. Everything
else that `flash_attention` takes runs in its Triton kernels, whose row statistics (L in base 2 and D, padded) the
backward here reads.

Ideal cost per head: 4·Q·K·D FLOPs forward, 10·Q·K·D backward (halved when causal); backward runs as two kernels and
executes 14·Q·K·D: no atomics, equal bits every time.

How a program is laid out: a producer warp issues TMA loads into rings of tiles, each guarded by a barrier for "full"
and one for "empty"; consumer warpgroups of 64 rows each multiply. The producer gives its registers to them.
- Forward: the product of tile i − 1 with V runs under the softmax of tile i. Three consumers at D 64, where the
  exponentials take as long as the products: one multiplies while the others take theirs. Two at D 128, whose
  accumulators need the registers. Short tiles run in persistent programs.
- dK/dV: 128 keys walk the queries; Sᵀ and ∂Pᵀ are computed themselves, so that Pᵀ and ∂Sᵀ are register operands.
- dQ: 128 queries walk the keys; ∂S is the register operand.
- A descriptor has batch, head, row and column as dimensions of their own: TMA loads zeros past a sequence's last row
  and stores nothing there.

Gluon is experimental and its interface moves between releases of Triton: `hopper_unavailable` of flash_attention.py
says whether these kernels load with the installed one.

Sources: Shah et al. 2024, "FlashAttention-3"; Dao 2023, "FlashAttention-2".
"""

import functools
import math

import torch
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
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

ROWS = 64  # of a consumer warpgroup: those of one wgmma
BLOCK = 2 * ROWS  # of a program's own rows in the backward kernels: two consumers

LOG2_E = math.log2(math.e)
LN_2 = gl.constexpr(math.log(2))

# Older releases of Triton have these operations under longer names.
async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
async_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global

# ---- tile configurations --------------------------------------------------------------------------------------

# Rows of the tiles that are walked, and how many of them are in flight. Bounds: 240 registers a thread of a consumer
# (scores 64 × BLOCK, the accumulators of 64 rows · D, once forward and for dQ, twice for dK/dV); 227 KiB of shared
# memory, of which 128 rows take 256·D bytes per tensor.
FORWARD = {
    64: {"BLOCK_K": 128, "STAGES": 3, "CONSUMERS": 3},
    128: {"BLOCK_K": 128, "STAGES": 2, "CONSUMERS": 2},
}
DKDV = {64: {"BLOCK_Q": 128, "STAGES": 2}, 128: {"BLOCK_Q": 64, "STAGES": 2}}
DQ = {64: {"BLOCK_K": 128, "STAGES": 3}, 128: {"BLOCK_K": 128, "STAGES": 2}}

# By the number of consumers: the warps' equal shares of the register file at the start, and what a consumer has of it
# once the producer has given all but 24 of its own away.
START_REGISTERS = {2: 168, 3: 128}
CONSUMER_REGISTERS = {2: 240, 3: 160}
PRODUCER_REGISTERS = gl.constexpr(24)

# Plain numbers to the kernels: a length of 1, or one divisible by 16, is no reason to compile them anew.
LENGTHS = ("num_heads", "num_heads_total", "group", "num_queries", "num_keys", "padded_queries")


@gluon.jit
def _to_low(x, DTYPE: gl.constexpr):
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
    return p, gl.convert_layout(_to_low(p, q.dtype), gl.DotOperandLayout(0, OUT, 2)), acc, maximum, total


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
        p_low = gl.convert_layout(_to_low(p, q.dtype), gl.DotOperandLayout(0, OUT, 2))
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


# ---- dK and dV --------------------------------------------------------------------------------------------------


@gluon.jit
def _dkdv_tiles(k0, num_queries, num_keys, BLOCK_Q: gl.constexpr, CAUSAL: gl.constexpr):
    """The first query of the walk, on a tile boundary, and the number of query tiles."""
    q0 = k0 * 0
    if CAUSAL:
        q0 = gl.maximum(k0 - (num_keys - num_queries), 0) // BLOCK_Q * BLOCK_Q
    return q0, gl.maximum(num_queries - q0 + BLOCK_Q - 1, 0) // BLOCK_Q


@gluon.jit
def _dkdv_producer(
    q_desc, grad_out_desc, k_desc, v_desc, lse_desc, delta_desc, q_s, grad_out_s, k_s, v_s, lse_s, delta_s, kv_full,
    q_full, q_empty, grad_out_full, grad_out_empty,
    group, num_queries, num_keys, padded_queries,
    BLOCK_Q: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    # Read in each partition: what is handed over to one stays in its registers.
    k0 = gl.program_id(0) * 128
    head = gl.program_id(1)
    batch = gl.program_id(2)
    q0, num_tiles = _dkdv_tiles(k0, num_queries, num_keys, BLOCK_Q, CAUSAL)
    for c in gl.static_range(2):
        mbarrier.expect(kv_full.index(c), k_desc.block_type.nbytes + v_desc.block_type.nbytes)
        async_load(k_desc, [batch, head, k0 + c * 64, 0], kv_full.index(c), k_s.index(c))
        async_load(v_desc, [batch, head, k0 + c * 64, 0], kv_full.index(c), v_s.index(c))
    for i in range(num_tiles * group):
        stage = i % STAGES
        free = ((i // STAGES) & 1) ^ 1
        # One query head of the group after another.
        query_head = head * group + i // num_tiles
        start = q0 + i % num_tiles * BLOCK_Q
        statistics = (batch * gl.num_programs(1) * group + query_head) * padded_queries
        mbarrier.wait(q_empty.index(stage), free)
        mbarrier.expect(q_full.index(stage), q_desc.block_type.nbytes + lse_desc.block_type.nbytes)
        async_load(q_desc, [batch, query_head, start, 0], q_full.index(stage), q_s.index(stage))
        async_load(lse_desc, [statistics + start], q_full.index(stage), lse_s.index(stage))
        mbarrier.wait(grad_out_empty.index(stage), free)
        mbarrier.expect(grad_out_full.index(stage), grad_out_desc.block_type.nbytes + delta_desc.block_type.nbytes)
        async_load(grad_out_desc, [batch, query_head, start, 0], grad_out_full.index(stage), grad_out_s.index(stage))
        async_load(delta_desc, [statistics + start], grad_out_full.index(stage), delta_s.index(stage))


@gluon.jit
def _dkdv_consumer(
    C: gl.constexpr, grad_k_desc, grad_v_desc, q_s, grad_out_s, k_s, v_s, lse_s, delta_s, keys_s, queries_s, kv_full,
    q_full, q_empty, grad_out_full, grad_out_empty,
    group, num_queries, num_keys, scale_log2,
    BLOCK_Q: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, GROUPED: gl.constexpr,
):  # fmt: skip
    DTYPE: gl.constexpr = grad_k_desc.dtype
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_Q, 16]
    )
    GRAD: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=GRAD, k_width=2)
    COLS: gl.constexpr = gl.SliceLayout(0, SCORES)
    k0 = gl.program_id(0) * 128
    q0, num_tiles = _dkdv_tiles(k0, num_queries, num_keys, BLOCK_Q, CAUSAL)
    k1 = k0 + C * 64
    # A key is seen by the queries from its own place on, counted here from the first query of the walk.
    diagonal = k1 - (num_keys - num_queries) - q0
    grad_k = gl.zeros([64, D], gl.float32, layout=GRAD)
    grad_v = gl.zeros([64, D], gl.float32, layout=GRAD)
    grad_scores_low = gl.zeros([64, BLOCK_Q], DTYPE, layout=OPERAND)
    k = k_s.index(C).reshape([64, D])
    v = v_s.index(C).reshape([64, D])
    mbarrier.wait(kv_full.index(C), 0)
    # The product into dK is issued one tile later, ahead of the next scores: a product in flight over the loop's back
    # edge makes ptxas serialise all of them (C7512). The first one is of zeros.
    for i in range(num_tiles * group):
        stage = i % STAGES
        full = (i // STAGES) & 1
        before = (i - (i > 0).to(gl.int32)) % STAGES
        q = q_s.index(stage).reshape([BLOCK_Q, D])
        grad_out = grad_out_s.index(stage).reshape([BLOCK_Q, D])
        mbarrier.wait(q_full.index(stage), full)
        grad_k_mma = warpgroup_mma(grad_scores_low, q_s.index(before).reshape([BLOCK_Q, D]), grad_k, is_async=True)
        scores_mma = warpgroup_mma(
            k, q.permute((1, 0)), gl.zeros([64, BLOCK_Q], gl.float32, layout=SCORES), use_acc=False, is_async=True
        )
        grad_k = warpgroup_mma_wait(1, deps=(grad_k_mma,))
        mbarrier.arrive(q_empty.index(before), count=1, pred=i > 0)
        mbarrier.wait(grad_out_full.index(stage), full)
        grad_p_mma = warpgroup_mma(
            v,
            grad_out.permute((1, 0)),
            gl.zeros([64, BLOCK_Q], gl.float32, layout=SCORES),
            use_acc=False,
            is_async=True,
        )
        scores = warpgroup_mma_wait(1, deps=(scores_mma,))
        if CAUSAL:
            below = diagonal - (i % num_tiles if GROUPED else i) * BLOCK_Q
            if below > -63:
                # From shared memory: as constants the numbers of rows and columns stay in registers through the loop.
                keys = keys_s.load(gl.SliceLayout(1, SCORES)) + below
                scores = gl.where(keys[:, None] <= queries_s.load(COLS)[None, :], scores, float("-inf"))
        lse = lse_s.index(stage).load(COLS)
        p = gl.exp2(scores * scale_log2 - lse[None, :])
        p_low = gl.convert_layout(_to_low(p, DTYPE), OPERAND)
        grad_v_mma = warpgroup_mma(p_low, grad_out, grad_v, is_async=True)
        grad_p = warpgroup_mma_wait(1, deps=(grad_p_mma,))
        delta = delta_s.index(stage).load(COLS)
        grad_scores_low = gl.convert_layout(_to_low(p * (grad_p - delta[None, :]), DTYPE), OPERAND)
        grad_v = warpgroup_mma_wait(0, deps=(grad_v_mma,))
        mbarrier.arrive(grad_out_empty.index(stage), count=1)
    if num_tiles > 0:
        grad_k = warpgroup_mma(
            grad_scores_low, q_s.index((num_tiles * group - 1) % STAGES).reshape([BLOCK_Q, D]), grad_k
        )
    # Only this warpgroup reads its halves of K and V: they carry the results out, and TMA clips rows past the end.
    v.store(grad_v.to(DTYPE))
    k.store((grad_k * (scale_log2 * LN_2)).to(DTYPE))
    fence_async_shared()
    head = gl.program_id(1)
    batch = gl.program_id(2)
    async_store(grad_v_desc, [batch, head, k1, 0], v_s.index(C))
    async_store(grad_k_desc, [batch, head, k1, 0], k_s.index(C))
    tma.store_wait(0)


@gluon.jit
def _dkdv_consumer_0(
    grad_k_desc, grad_v_desc, q_s, grad_out_s, k_s, v_s, lse_s, delta_s, keys_s, queries_s, kv_full, q_full, q_empty,
    grad_out_full, grad_out_empty,
    group, num_queries, num_keys, scale_log2,
    BLOCK_Q: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, GROUPED: gl.constexpr,
):  # fmt: skip
    _dkdv_consumer(
        0, grad_k_desc, grad_v_desc, q_s, grad_out_s, k_s, v_s, lse_s, delta_s, keys_s, queries_s, kv_full, q_full,
        q_empty, grad_out_full, grad_out_empty,
        group, num_queries, num_keys, scale_log2, BLOCK_Q, D, STAGES, CAUSAL, GROUPED,
    )  # fmt: skip


@gluon.jit
def _dkdv_consumer_1(
    grad_k_desc, grad_v_desc, q_s, grad_out_s, k_s, v_s, lse_s, delta_s, keys_s, queries_s, kv_full, q_full, q_empty,
    grad_out_full, grad_out_empty,
    group, num_queries, num_keys, scale_log2,
    BLOCK_Q: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, GROUPED: gl.constexpr,
):  # fmt: skip
    _dkdv_consumer(
        1, grad_k_desc, grad_v_desc, q_s, grad_out_s, k_s, v_s, lse_s, delta_s, keys_s, queries_s, kv_full, q_full,
        q_empty, grad_out_full, grad_out_empty,
        group, num_queries, num_keys, scale_log2, BLOCK_Q, D, STAGES, CAUSAL, GROUPED,
    )  # fmt: skip


@gluon.jit(do_not_specialize=LENGTHS)
def hopper_bwd_dkdv_kernel(
    q_desc, grad_out_desc, k_desc, v_desc, grad_k_desc, grad_v_desc, lse_desc, delta_desc, group, num_queries,
    num_keys,
    padded_queries, scale_log2,
    BLOCK_Q: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, GROUPED: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    """dK and dV of 128 keys of one head; when causal the first tiles, seen by the most queries, start first."""
    DTYPE: gl.constexpr = q_desc.dtype
    q_s = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BLOCK_Q, D], q_desc.layout)
    grad_out_s = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BLOCK_Q, D], grad_out_desc.layout)
    k_s = gl.allocate_shared_memory(DTYPE, [2, 1, 1, 64, D], k_desc.layout)
    v_s = gl.allocate_shared_memory(DTYPE, [2, 1, 1, 64, D], v_desc.layout)
    lse_s = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_Q], lse_desc.layout)
    delta_s = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_Q], delta_desc.layout)
    # The numbers from 0 on, for the masks.
    NUMBERS: gl.constexpr = gl.SwizzledSharedLayout(vec=1, per_phase=1, max_phase=1, order=[0])
    keys_s = gl.allocate_shared_memory(gl.int32, [64], NUMBERS)
    queries_s = gl.allocate_shared_memory(gl.int32, [BLOCK_Q], NUMBERS)
    if CAUSAL:
        keys_s.store(gl.arange(0, 64, layout=gl.BlockedLayout([1], [32], [4], [0])))
        queries_s.store(gl.arange(0, BLOCK_Q, layout=gl.BlockedLayout([1], [32], [4], [0])))
    kv_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    grad_out_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    grad_out_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for c in gl.static_range(2):
        mbarrier.init(kv_full.index(c), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(q_full.index(stage), count=1)
        mbarrier.init(grad_out_full.index(stage), count=1)
        mbarrier.init(q_empty.index(stage), count=2)
        mbarrier.init(grad_out_empty.index(stage), count=2)
    fence_async_shared()
    # Written out: a tuple that is first given a name loses its compile-time constants.
    gl.warp_specialize(
        [
            (_dkdv_consumer_0, (grad_k_desc, grad_v_desc, q_s, grad_out_s, k_s, v_s, lse_s, delta_s, keys_s,
             queries_s, kv_full, q_full, q_empty, grad_out_full, grad_out_empty, group, num_queries, num_keys,
             scale_log2, BLOCK_Q, D, STAGES, CAUSAL, GROUPED,)),
            (_dkdv_consumer_1, (grad_k_desc, grad_v_desc, q_s, grad_out_s, k_s, v_s, lse_s, delta_s, keys_s,
             queries_s, kv_full, q_full, q_empty, grad_out_full, grad_out_empty, group, num_queries, num_keys,
             scale_log2, BLOCK_Q, D, STAGES, CAUSAL, GROUPED,)),
            (_dkdv_producer, (q_desc, grad_out_desc, k_desc, v_desc, lse_desc, delta_desc, q_s, grad_out_s, k_s, v_s,
             lse_s, delta_s, kv_full, q_full, q_empty, grad_out_full, grad_out_empty, group, num_queries, num_keys,
             padded_queries, BLOCK_Q, STAGES, CAUSAL,)),
        ],
        [4, 1],
        [REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


# ---- dQ ---------------------------------------------------------------------------------------------------------


@gluon.jit
def _dq_start(CAUSAL: gl.constexpr):
    """The first query of the program."""
    tile = gl.program_id(0)
    if CAUSAL:
        # The last queries see the most keys: the longest programs of a head start first.
        tile = gl.num_programs(0) - 1 - tile
    return tile * 128


@gluon.jit
def _dq_tiles(q0, num_queries, num_keys, BLOCK_K: gl.constexpr, CAUSAL: gl.constexpr):
    """The number of key tiles that 128 queries walk."""
    end = num_keys
    if CAUSAL:
        end = gl.maximum(gl.minimum(end, q0 + 128 + (num_keys - num_queries)), 0)
    return (end + BLOCK_K - 1) // BLOCK_K


@gluon.jit
def _dq_producer(
    q_desc, grad_out_desc, k_desc, v_desc, q_s, grad_out_s, k_s, v_s, q_full, k_full, k_empty, v_full, v_empty,
    group, num_queries, num_keys,
    BLOCK_K: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    q0 = _dq_start(CAUSAL)
    head = gl.program_id(1)
    batch = gl.program_id(2)
    num_tiles = _dq_tiles(q0, num_queries, num_keys, BLOCK_K, CAUSAL)
    for c in gl.static_range(2):
        mbarrier.expect(q_full.index(c), q_desc.block_type.nbytes + grad_out_desc.block_type.nbytes)
        async_load(q_desc, [batch, head, q0 + c * 64, 0], q_full.index(c), q_s.index(c))
        async_load(grad_out_desc, [batch, head, q0 + c * 64, 0], q_full.index(c), grad_out_s.index(c))
    for i in range(num_tiles):
        stage = i % STAGES
        free = ((i // STAGES) & 1) ^ 1
        mbarrier.wait(k_empty.index(stage), free)
        mbarrier.expect(k_full.index(stage), k_desc.block_type.nbytes)
        async_load(k_desc, [batch, head // group, i * BLOCK_K, 0], k_full.index(stage), k_s.index(stage))
        mbarrier.wait(v_empty.index(stage), free)
        mbarrier.expect(v_full.index(stage), v_desc.block_type.nbytes)
        async_load(v_desc, [batch, head // group, i * BLOCK_K, 0], v_full.index(stage), v_s.index(stage))


@gluon.jit
def _dq_consumer(
    C: gl.constexpr, grad_q_desc, lse_ptr, delta_ptr, q_s, grad_out_s, k_s, v_s, q_full, k_full, k_empty, v_full,
    v_empty,
    num_queries, num_keys, padded_queries, scale_log2,
    BLOCK_K: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    DTYPE: gl.constexpr = grad_q_desc.dtype
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_K, 16]
    )
    GRAD: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=GRAD, k_width=2)
    q0 = _dq_start(CAUSAL)
    head = gl.program_id(1)
    batch = gl.program_id(2)
    num_tiles = _dq_tiles(q0, num_queries, num_keys, BLOCK_K, CAUSAL)
    q1 = q0 + C * 64
    rows = gl.arange(0, 64, layout=gl.SliceLayout(1, SCORES))
    cols = gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, SCORES))
    # The first key that a query does not see.
    ends = rows * 0 + num_keys
    if CAUSAL:
        ends = gl.minimum(ends, q1 + rows + (num_keys - num_queries) + 1)
    full_end = num_keys
    if CAUSAL:
        full_end = gl.minimum(full_end, q1 + (num_keys - num_queries) + 1)
    statistics = (batch * gl.num_programs(1) + head).to(gl.int64) * padded_queries + q1
    lse = gl.load(lse_ptr + statistics + rows)[:, None]
    delta = gl.load(delta_ptr + statistics + rows)[:, None]
    p = gl.zeros([64, BLOCK_K], gl.float32, layout=SCORES)
    grad_scores = gl.zeros([64, BLOCK_K], gl.float32, layout=SCORES)
    grad_q = gl.zeros([64, D], gl.float32, layout=GRAD)
    grad_scores_low = gl.zeros([64, BLOCK_K], DTYPE, layout=OPERAND)
    q = q_s.index(C).reshape([64, D])
    grad_out = grad_out_s.index(C).reshape([64, D])
    mbarrier.wait(q_full.index(C), 0)
    # As in dK/dV: the product into dQ is issued one tile later, and the first one is of zeros.
    for i in range(num_tiles):
        stage = i % STAGES
        full = (i // STAGES) & 1
        before = (i - (i > 0).to(gl.int32)) % STAGES
        k = k_s.index(stage).reshape([BLOCK_K, D])
        v = v_s.index(stage).reshape([BLOCK_K, D])
        mbarrier.wait(k_full.index(stage), full)
        grad_q_mma = warpgroup_mma(grad_scores_low, k_s.index(before).reshape([BLOCK_K, D]), grad_q, is_async=True)
        scores_mma = warpgroup_mma(q, k.permute((1, 0)), p, use_acc=False, is_async=True)
        grad_q = warpgroup_mma_wait(1, deps=(grad_q_mma,))
        mbarrier.arrive(k_empty.index(before), count=1, pred=i > 0)
        mbarrier.wait(v_full.index(stage), full)
        grad_p_mma = warpgroup_mma(grad_out, v.permute((1, 0)), grad_scores, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(1, deps=(scores_mma,))
        p = gl.exp2(scores * scale_log2 - lse)
        if i * BLOCK_K + BLOCK_K > full_end:
            p = gl.where(cols[None, :] < (ends - i * BLOCK_K)[:, None], p, 0.0)
        grad_p = warpgroup_mma_wait(0, deps=(grad_p_mma,))
        mbarrier.arrive(v_empty.index(stage), count=1)
        grad_scores = p * (grad_p - delta)
        grad_scores_low = gl.convert_layout(_to_low(grad_scores, DTYPE), OPERAND)
    if num_tiles > 0:
        grad_q = warpgroup_mma(grad_scores_low, k_s.index((num_tiles - 1) % STAGES).reshape([BLOCK_K, D]), grad_q)
    q.store((grad_q * (scale_log2 * LN_2)).to(DTYPE))
    fence_async_shared()
    async_store(grad_q_desc, [batch, head, q1, 0], q_s.index(C))
    tma.store_wait(0)


@gluon.jit
def _dq_consumer_0(
    grad_q_desc, lse_ptr, delta_ptr, q_s, grad_out_s, k_s, v_s, q_full, k_full, k_empty, v_full, v_empty,
    num_queries, num_keys, padded_queries, scale_log2,
    BLOCK_K: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    _dq_consumer(
        0, grad_q_desc, lse_ptr, delta_ptr, q_s, grad_out_s, k_s, v_s, q_full, k_full, k_empty, v_full, v_empty,
        num_queries, num_keys, padded_queries, scale_log2, BLOCK_K, D, STAGES, CAUSAL,
    )  # fmt: skip


@gluon.jit
def _dq_consumer_1(
    grad_q_desc, lse_ptr, delta_ptr, q_s, grad_out_s, k_s, v_s, q_full, k_full, k_empty, v_full, v_empty,
    num_queries, num_keys, padded_queries, scale_log2,
    BLOCK_K: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    _dq_consumer(
        1, grad_q_desc, lse_ptr, delta_ptr, q_s, grad_out_s, k_s, v_s, q_full, k_full, k_empty, v_full, v_empty,
        num_queries, num_keys, padded_queries, scale_log2, BLOCK_K, D, STAGES, CAUSAL,
    )  # fmt: skip


@gluon.jit(do_not_specialize=LENGTHS)
def hopper_bwd_dq_kernel(
    q_desc, grad_out_desc, k_desc, v_desc, grad_q_desc, lse_ptr, delta_ptr,
    group, num_queries, num_keys, padded_queries, scale_log2,
    BLOCK_K: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """dQ of 128 queries of one head."""
    DTYPE: gl.constexpr = q_desc.dtype
    q_s = gl.allocate_shared_memory(DTYPE, [2, 1, 1, 64, D], q_desc.layout)
    grad_out_s = gl.allocate_shared_memory(DTYPE, [2, 1, 1, 64, D], grad_out_desc.layout)
    k_s = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BLOCK_K, D], k_desc.layout)
    v_s = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BLOCK_K, D], v_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for c in gl.static_range(2):
        mbarrier.init(q_full.index(c), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=2)
        mbarrier.init(v_empty.index(stage), count=2)
    fence_async_shared()
    # Written out: a tuple that is first given a name loses its compile-time constants.
    gl.warp_specialize(
        [
            (_dq_consumer_0, (grad_q_desc, lse_ptr, delta_ptr, q_s, grad_out_s, k_s, v_s, q_full, k_full, k_empty,
             v_full, v_empty, num_queries, num_keys, padded_queries, scale_log2, BLOCK_K, D, STAGES, CAUSAL,)),
            (_dq_consumer_1, (grad_q_desc, lse_ptr, delta_ptr, q_s, grad_out_s, k_s, v_s, q_full, k_full, k_empty,
             v_full, v_empty, num_queries, num_keys, padded_queries, scale_log2, BLOCK_K, D, STAGES, CAUSAL,)),
            (_dq_producer, (q_desc, grad_out_desc, k_desc, v_desc, q_s, grad_out_s, k_s, v_s, q_full, k_full, k_empty,
             v_full, v_empty, group, num_queries, num_keys, BLOCK_K, STAGES, CAUSAL,)),
        ],
        [4, 1],
        [REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


# ---- launchers ------------------------------------------------------------------------------------------------


def _tile_layout() -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)


def _row_layout() -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)


def _tiles(x_BHSD: Tensor, num_rows: int) -> TensorDescriptor:
    """Describes tiles of (1, 1, num_rows, D) that never cross into the next head."""
    batch, heads, length, head_dim = x_BHSD.shape
    # A dimension of one element may have any stride, of which TMA would still ask for a multiple of 16 bytes.
    strides = [
        head_dim if n == 1 else stride for n, stride in zip((batch, heads, length), x_BHSD.stride(), strict=False)
    ]
    return TensorDescriptor(x_BHSD, list(x_BHSD.shape), [*strides, 1], [1, 1, num_rows, head_dim], _tile_layout())


@functools.cache
def _num_multiprocessors(device_index: int) -> int:
    return torch.cuda.get_device_properties(device_index).multi_processor_count


def _launch(consumers: int) -> dict[str, int]:
    return {"num_warps": 4, "maxnreg": START_REGISTERS[consumers], "REGISTERS": CONSUMER_REGISTERS[consumers]}


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
    num_programs = min(num_tiles, _num_multiprocessors(q_BHSD.device.index)) if num_keys <= 8192 else num_tiles
    hopper_fwd_kernel[(num_programs,)](
        _tiles(q_BHSD, ROWS),
        _tiles(k_BGSD, tiles["BLOCK_K"]),
        _tiles(v_BGSD, tiles["BLOCK_K"]),
        _tiles(out_BHSD, ROWS),
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
        **_launch(consumers),
    )


def hopper_backward(
    grad_out_BHSD: Tensor,
    q_BHSD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    lse_log2_BHS: Tensor,
    delta_BHS: Tensor,
    grad_q_BHSD: Tensor,
    grad_k_BGSD: Tensor,
    grad_v_BGSD: Tensor,
    *,
    scale: float,
    causal: bool,
) -> None:
    """Writes the gradients of q, k and v.

    lse_log2 and delta are fp32 and dense, their rows padded to a multiple of 128 with +inf and 0: 2^(· − ∞) = 0 keeps
    what lies beyond the last query out of every sum.
    """
    num_batches, num_heads, num_queries, head_dim = q_BHSD.shape
    num_key_heads, num_keys = k_BGSD.shape[1:3]
    padded_queries = lse_log2_BHS.shape[-1]
    lengths = (num_heads // num_key_heads, num_queries, num_keys, padded_queries, scale * LOG2_E)
    flags = {"D": head_dim, "CAUSAL": causal, **_launch(2)}
    tiles = DKDV[head_dim]
    statistics = (
        TensorDescriptor(x, [x.numel()], [1], [tiles["BLOCK_Q"]], _row_layout()) for x in (lse_log2_BHS, delta_BHS)
    )
    hopper_bwd_dkdv_kernel[triton.cdiv(num_keys, BLOCK), num_key_heads, num_batches](
        *(_tiles(x, tiles["BLOCK_Q"]) for x in (q_BHSD, grad_out_BHSD)),
        *(_tiles(x, ROWS) for x in (k_BGSD, v_BGSD, grad_k_BGSD, grad_v_BGSD)),
        *statistics,
        *lengths,
        GROUPED=num_heads > num_key_heads,
        **tiles,
        **flags,
    )
    tiles = DQ[head_dim]
    hopper_bwd_dq_kernel[triton.cdiv(num_queries, BLOCK), num_heads, num_batches](
        *(_tiles(x, ROWS) for x in (q_BHSD, grad_out_BHSD)),
        *(_tiles(x, tiles["BLOCK_K"]) for x in (k_BGSD, v_BGSD)),
        _tiles(grad_q_BHSD, ROWS),
        lse_log2_BHS,
        delta_BHS,
        *lengths,
        **tiles,
        **flags,
    )
