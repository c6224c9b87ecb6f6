"""FlashAttention's backward on Hopper in Gluon, the same bits every time: one kernel for dK and dV, one for dQ.

    P = exp2(scale · log2(e) · Q Kᵀ − L)    ∂V = Pᵀ ∂O    ∂S = P ∘ (∂O Vᵀ − D)
    ∂Q = scale · ∂S K    ∂K = scale · ∂Sᵀ Q

Shapes: (batch, heads, length, D), D 64 or 128, bf16 or fp16, causal (aligned to the bottom right) or not. L in base 2
and D come padded from the Triton kernels of `flash_attention`.

Ideal cost per head: 10·Q·K·D FLOPs (halved when causal); two kernels execute 14·Q·K·D, without atomics.

How a program is laid out: as in flash_attention_hopper.py, with two consumers of 64 rows.
- dK/dV: 128 keys walk the queries; Sᵀ and ∂Pᵀ are computed themselves, so that Pᵀ and ∂Sᵀ are register operands.
- dQ: 128 queries walk the keys; ∂S is the register operand.

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
    rows_of,
    tiles_of,
    to_low,
)

BLOCK = 2 * ROWS  # of a program's own rows: two consumers

# ---- tile configurations --------------------------------------------------------------------------------------

# Rows of the tiles that are walked, and how many of them are in flight. Bounds: 240 registers a thread of a consumer
# (scores 64 × the tile's rows, the accumulators of 64 rows · D, two for dK/dV); 227 KiB of shared memory, of which 128
# rows take 256·D bytes per tensor.
DKDV = {64: {"BLOCK_Q": 128, "STAGES": 2}, 128: {"BLOCK_Q": 64, "STAGES": 2}}
DQ = {64: {"BLOCK_K": 128, "STAGES": 3}, 128: {"BLOCK_K": 128, "STAGES": 2}}

# Plain numbers to the kernels: a length of 1, or one divisible by 16, is no reason to compile them anew.
LENGTHS = ("group", "num_queries", "num_keys", "padded_queries")

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
        p_low = gl.convert_layout(to_low(p, DTYPE), OPERAND)
        grad_v_mma = warpgroup_mma(p_low, grad_out, grad_v, is_async=True)
        grad_p = warpgroup_mma_wait(1, deps=(grad_p_mma,))
        delta = delta_s.index(stage).load(COLS)
        grad_scores_low = gl.convert_layout(to_low(p * (grad_p - delta[None, :]), DTYPE), OPERAND)
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
        grad_scores_low = gl.convert_layout(to_low(grad_scores, DTYPE), OPERAND)
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


# ---- launcher ------------------------------------------------------------------------------------------------


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
    flags = {"D": head_dim, "CAUSAL": causal, **launch_options(2)}
    tiles = DKDV[head_dim]
    statistics = (rows_of(x, tiles["BLOCK_Q"]) for x in (lse_log2_BHS, delta_BHS))
    hopper_bwd_dkdv_kernel[triton.cdiv(num_keys, BLOCK), num_key_heads, num_batches](
        *(tiles_of(x, tiles["BLOCK_Q"]) for x in (q_BHSD, grad_out_BHSD)),
        *(tiles_of(x, ROWS) for x in (k_BGSD, v_BGSD, grad_k_BGSD, grad_v_BGSD)),
        *statistics,
        *lengths,
        GROUPED=num_heads > num_key_heads,
        **tiles,
        **flags,
    )
    tiles = DQ[head_dim]
    hopper_bwd_dq_kernel[triton.cdiv(num_queries, BLOCK), num_heads, num_batches](
        *(tiles_of(x, ROWS) for x in (q_BHSD, grad_out_BHSD)),
        *(tiles_of(x, tiles["BLOCK_K"]) for x in (k_BGSD, v_BGSD)),
        tiles_of(grad_q_BHSD, ROWS),
        lse_log2_BHS,
        delta_BHS,
        *lengths,
        **tiles,
        **flags,
    )
