"""FlashAttention's backward on Hopper in Gluon, the same bits every time: one launch for dK and dV,
one for dQ.

    P = exp2(scale · log2(e) · Q Kᵀ − L)    ∂V = Pᵀ ∂O    ∂S = P ∘ (∂O Vᵀ − D)
    ∂Q = scale · ∂S K    ∂K = scale · ∂Sᵀ Q

Shapes: (batch, heads, length, D), D 64, 72, 80, 96 or 128, bf16 or fp16, causal (aligned to the
bottom right) or not. L in base 2 and D come padded from the Triton kernels of `flash_attention`.

Ideal cost per head: 10·Q·K·D FLOPs (halved when causal); two launches execute 14·Q·K·D,
without atomics.

How a program is laid out: as in forward.py, with two consumers of 64 rows.
- dK/dV: a program of 128 keys loops over the queries; Sᵀ and ∂Pᵀ are computed directly, so that Pᵀ
  and ∂Sᵀ are register operands.
- dQ: a program of 128 queries loops over the keys; ∂S is the register operand.
- Both are one kernel: its own rows, of which it computes gradients, are those of X = K and Y = V or
  of X = Q and Y = ∂O, and it loops over the other pair's. In both, S or Sᵀ is a product of the
  two X, ∂P or ∂Pᵀ one of the two Y, and ∂X a sum of products of ∂S or ∂Sᵀ with the loop's X.
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
    tma,
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
    accumulator,
    accumulators,
    counting,
    finished,
    parts,
    plus_product,
    product_layout,
    put,
    ring,
    rows_of,
    shared_by_warps,
    tiles_of,
    times_transposed,
    to_low,
)
from labkit.kernels.flash_attention.plan import Layout
from labkit.kernels.launch import num_multiprocessors

BLOCK_OWN = 2 * ROWS  # of a program's own rows: two consumers

# Rows of the loop's tiles, and how many of them are in flight. Bounds: 240 registers a thread of a
# consumer (scores 64 × the tile's rows, the accumulators of 64 rows · D, two for dK/dV); 227 KiB of
# shared memory, of which 128 rows take 256·D bytes per tensor. SETS of a program's own rows: with
# two it may be persistent.
DKDV = {
    64: {"BLOCK": 128, "STAGES": 2, "SETS": 2},
    72: {"BLOCK": 64, "STAGES": 3, "SETS": 2},
    80: {"BLOCK": 64, "STAGES": 3, "SETS": 2},
    96: {"BLOCK": 64, "STAGES": 3, "SETS": 1},
    128: {"BLOCK": 64, "STAGES": 2, "SETS": 1},
}
DQ = {
    64: {"BLOCK": 128, "STAGES": 3, "SETS": 2},
    72: {"BLOCK": 128, "STAGES": 3, "SETS": 2},
    80: {"BLOCK": 128, "STAGES": 3, "SETS": 2},
    96: {"BLOCK": 128, "STAGES": 3, "SETS": 1},
    128: {"BLOCK": 128, "STAGES": 2, "SETS": 1},
}

# At 96 two sets take tiles of 64 rows, which pays with short loops.
SHORT = 1024
SHORT_AT_96 = {"BLOCK": 64, "STAGES": 3, "SETS": 2}

# Plain numbers to the kernels: a length of 1, or one divisible by 16, is no reason to compile them
# anew.
LENGTHS = ("num_tiles_total", "num_heads", "group", "num_queries", "num_keys", "padded_queries")


@shared_by_warps
class Shared:
    """The program's own tiles of X and Y, the loop's, where gradients of the own ones go, and the
    statistics: as in `hopper_bwd_kernel`.
    """

    own_x: Value
    own_y: Value
    x: Value
    y: Value
    grad_x_descs: Value
    grad_y_descs: Value
    lse: Value
    delta: Value
    keys_s: Value
    queries_s: Value
    num_tiles_total: Value
    num_heads: Value
    group: Value
    num_queries: Value
    num_keys: Value
    padded_queries: Value
    scale_log2: Value
    OWN_KEYS: Value
    BLOCK: Value
    D: Value
    SETS: Value
    CAUSAL: Value
    GROUPED: Value


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
def _decode_tile(s, t):
    """The first of 128 own rows, the head and the batch of the t-th tile of all; with one set, of
    the program's only one.
    """
    num_rows = s.num_keys if s.OWN_KEYS else s.num_queries
    num_tiles = (num_rows + 127) // 128
    tile = gl.program_id(0)
    head = gl.program_id(1)
    batch = gl.program_id(2)
    if s.SETS > 1:
        tile = t % num_tiles
        head = t // num_tiles % s.num_heads
        batch = t // num_tiles // s.num_heads
    if s.CAUSAL and not s.OWN_KEYS:
        # The last queries see the most keys, as the first keys are seen by the most queries: the
        # longest programs of a head start first.
        tile = num_tiles - 1 - tile
    return tile * 128, head, batch


@gluon.jit
def _loop(s, own0):
    """The first row of the loop, on a tile boundary, and the number of its tiles."""
    first = own0 * 0
    end = s.num_queries if s.OWN_KEYS else s.num_keys
    if s.CAUSAL:
        more_keys = s.num_keys - s.num_queries
        if s.OWN_KEYS:
            first = gl.maximum(own0 - more_keys, 0) // s.BLOCK * s.BLOCK
        else:
            end = gl.minimum(end, own0 + 128 + more_keys)
    return first, gl.maximum(end - first + s.BLOCK - 1, 0) // s.BLOCK


@gluon.jit
def _load(s, t, turn, j, C: gl.constexpr):
    """Loads what one tile of own rows takes; `turn` of them and `j` of the loop's tiles have been
    loaded.
    """
    own0, head, batch = _decode_tile(s, t)
    first, num_tiles = _loop(s, own0)
    for c in gl.static_range(2):
        s.own_x.load(turn * 2 + c, batch, head, own0 + c * 64)
        s.own_y.load(turn * 2 + c, batch, head, own0 + c * 64)
    for i in range(num_tiles * s.group if s.OWN_KEYS else num_tiles):
        if s.OWN_KEYS:
            # One query head of the group after another.
            loop_head = head * s.group + i // num_tiles
            row = first + i % num_tiles * s.BLOCK
        else:
            loop_head = head // s.group
            row = i * s.BLOCK
        row_total = (batch * s.num_heads * s.group + loop_head) * s.padded_queries + row
        s.x.load(j, batch, loop_head, row, row_total)
        s.y.load(j, batch, loop_head, row, row_total)
        j += 1
    return j


@gluon.jit
def _compute(s, t, turn, j, C: gl.constexpr):
    """The gradients of 64 own rows; `turn` tiles of own rows and `j` of the loop are done. Returns
    j as it is then.
    """
    DTYPE: gl.constexpr = s.x.descs[0].dtype
    SCORES: gl.constexpr = product_layout(s.BLOCK)
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, product_layout(s.D), 2)
    ROW_NUMBERS: gl.constexpr = gl.SliceLayout(1, SCORES)
    COLUMN_NUMBERS: gl.constexpr = gl.SliceLayout(0, SCORES)
    PARTS: gl.constexpr = len(s.x.descs)
    own0, head, batch = _decode_tile(s, t)
    first, num_tiles = _loop(s, own0)
    own1 = own0 + C * 64
    own = turn * 2 + C
    own_x = s.own_x.tile(own)
    own_y = s.own_y.tile(own)
    grad_x = accumulators(own_x)
    grad_y = accumulators(own_y)
    grad_scores_low = gl.zeros([64, s.BLOCK], DTYPE, layout=OPERAND)
    more_keys = s.num_keys - s.num_queries
    if s.OWN_KEYS:
        # A key is seen by the queries from its own place on, counted here from the first query of
        # the loop.
        diagonal = own1 - more_keys - first
    else:
        rows = gl.arange(0, 64, layout=ROW_NUMBERS)
        # The first key that a query does not see, and that the first of them does not see.
        ends = rows * 0 + s.num_keys
        full_end = s.num_keys
        if s.CAUSAL:
            ends = gl.minimum(ends, own1 + rows + more_keys + 1)
            full_end = gl.minimum(full_end, own1 + more_keys + 1)
        statistics = (batch * s.num_heads + head).to(gl.int64) * s.padded_queries + own1
        lse = gl.load(s.lse + statistics + rows)[:, None]
        delta = gl.load(s.delta + statistics + rows)[:, None]
        p = accumulator(s.BLOCK)
        grad_scores = accumulator(s.BLOCK)
    s.own_x.wait(own)
    s.own_y.wait(own)
    # The product into ∂X is issued one tile later, ahead of the next scores: a product in flight
    # over the loop's back edge makes ptxas serialise all of them (C7512). The first one is of
    # zeros.
    for i in range(num_tiles * s.group if s.OWN_KEYS else num_tiles):
        before = j - (i > 0).to(gl.int32)
        x = s.x.tile(j)
        y = s.y.tile(j)
        s.x.wait(j)
        grad_x_mma = plus_product(grad_scores_low, s.x.tile(before), grad_x)
        # The registers that products come in: those of the tile before, or, where two accumulators
        # leave no room to keep them through the loop, zeros.
        if s.OWN_KEYS:
            p = accumulator(s.BLOCK)
        scores_mma = times_transposed(own_x, x, p)
        grad_x = finished(grad_x_mma, 1)
        s.x.release(before, i > 0)
        s.y.wait(j)
        if s.OWN_KEYS:
            grad_scores = accumulator(s.BLOCK)
        grad_p_mma = times_transposed(own_y, y, grad_scores)
        scores = warpgroup_mma_wait(PARTS, deps=(scores_mma,))
        if s.OWN_KEYS:
            if s.CAUSAL:
                below = diagonal - (i % num_tiles if s.GROUPED else i) * s.BLOCK
                if below > -63:
                    keys = s.keys_s.load(ROW_NUMBERS) + below
                    visible = keys[:, None] <= s.queries_s.load(COLUMN_NUMBERS)[None, :]
                    scores = gl.where(visible, scores, float("-inf"))
            lse = s.x.rows.index(j % s.x.NUM).load(COLUMN_NUMBERS)[None, :]
            p = gl.exp2(scores * s.scale_log2 - lse)
            p_low = gl.convert_layout(to_low(p, DTYPE), OPERAND)
            grad_y_mma = plus_product(p_low, y, grad_y)
            grad_p = warpgroup_mma_wait(PARTS, deps=(grad_p_mma,))
            delta = s.y.rows.index(j % s.y.NUM).load(COLUMN_NUMBERS)[None, :]
            grad_scores = p * (grad_p - delta)
            grad_scores_low = gl.convert_layout(to_low(grad_scores, DTYPE), OPERAND)
            grad_y = finished(grad_y_mma, 0)
            s.y.release(j)
        else:
            p = gl.exp2(scores * s.scale_log2 - lse)
            if (i + 1) * s.BLOCK > full_end:
                keys = gl.arange(0, s.BLOCK, layout=COLUMN_NUMBERS)
                p = gl.where(keys[None, :] < (ends - i * s.BLOCK)[:, None], p, 0.0)
            grad_p = warpgroup_mma_wait(0, deps=(grad_p_mma,))
            s.y.release(j)
            grad_scores = p * (grad_p - delta)
            grad_scores_low = gl.convert_layout(to_low(grad_scores, DTYPE), OPERAND)
        j += 1
    if num_tiles > 0:
        last = j + s.x.NUM - 1
        grad_x = finished(plus_product(grad_scores_low, s.x.tile(last), grad_x), 0)
        s.x.release(last)
    # Only this warpgroup reads its halves of the own tiles: they carry the results out.
    if s.OWN_KEYS:
        put(grad_y, own_y)
        s.own_y.store(own, s.grad_y_descs, batch, head, own1)
    put([part * (s.scale_log2 * LN_2) for part in grad_x], own_x)
    s.own_x.store(own, s.grad_x_descs, batch, head, own1)
    tma.store_wait(0)
    s.own_x.release(own)
    s.own_y.release(own)
    return j


@gluon.jit(
    do_not_specialize=LENGTHS,
    repr=lambda kernel: f"hopper_bwd_{'dkdv' if kernel.constants['OWN_KEYS'] else 'dq'}_kernel",
)
def hopper_bwd_kernel(
    own_x_desc,
    own_x_tail_desc,
    own_y_desc,
    own_y_tail_desc,
    x_desc,
    x_tail_desc,
    y_desc,
    y_tail_desc,
    grad_x_desc,
    grad_x_tail_desc,
    grad_y_desc,
    grad_y_tail_desc,
    lse,
    delta,
    num_tiles_total,
    num_heads,
    group,
    num_queries,
    num_keys,
    padded_queries,
    scale_log2,
    OWN_KEYS: gl.constexpr,
    BLOCK: gl.constexpr,
    D: gl.constexpr,
    STAGES: gl.constexpr,
    SETS: gl.constexpr,
    CAUSAL: gl.constexpr,
    GROUPED: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """dK and dV of 128 keys of one head if OWN_KEYS, else dQ of 128 queries.

    The statistics are loaded as tiles along with the queries of a loop, or through pointers.
    """
    keys_s = counting(64) if OWN_KEYS and CAUSAL else None
    queries_s = counting(BLOCK) if OWN_KEYS and CAUSAL else None
    shared = Shared(
        ring(parts(own_x_desc, own_x_tail_desc), 2 * SETS, 1),
        ring(parts(own_y_desc, own_y_tail_desc), 2 * SETS, 1),
        ring(parts(x_desc, x_tail_desc), STAGES, 2, lse if OWN_KEYS else None),
        ring(parts(y_desc, y_tail_desc), STAGES, 2, delta if OWN_KEYS else None),
        parts(grad_x_desc, grad_x_tail_desc),
        parts(grad_y_desc, grad_y_tail_desc) if OWN_KEYS else None,
        lse,
        delta,
        keys_s,
        queries_s,
        num_tiles_total,
        num_heads,
        group,
        num_queries,
        num_keys,
        padded_queries,
        scale_log2,
        OWN_KEYS,
        BLOCK,
        D,
        SETS,
        CAUSAL,
        GROUPED,
    )
    fence_async_shared()
    gl.warp_specialize(
        [
            (_tiles_of_program, (shared, gl.constexpr(_compute), 0)),
            (_tiles_of_program, (shared, gl.constexpr(_compute), 1)),
            (_tiles_of_program, (shared, gl.constexpr(_load), 0)),
        ],
        [4, 1],
        [REGISTERS, PRODUCER_REGISTERS],
    )


def tiles(head_dim: int, loop_length: int, *, own_keys: bool, causal: bool) -> dict[str, int]:
    """Returns the tiles by how many rows are looped over.

    Causal loops are of all lengths: a program has one tile, and the hardware gives the next to a
    multiprocessor that is free.
    """
    found = (DKDV if own_keys else DQ)[head_dim]
    if causal:
        return found | {"SETS": 1}
    return SHORT_AT_96 if head_dim == 96 and loop_length <= SHORT else found


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
    tail = TAILS[head_dim]

    def launch(
        own: Layout, loop: Layout, tensors: list[Layout], *, own_keys: bool
    ) -> Callable[..., None]:
        """`tensors`: own X and Y, the loop's X and Y, the gradients."""
        _, own_heads, num_rows, _ = own.shape
        constants = {
            "OWN_KEYS": own_keys,
            "D": 64 if tail else head_dim,
            "CAUSAL": causal,
            "GROUPED": own_keys and group > 1,
            **tiles(head_dim, loop.shape[2], own_keys=own_keys, causal=causal),
        }
        block = constants["BLOCK"]
        described = [
            tiles_of(x, block if n in (2, 3) else ROWS, tail) for n, x in enumerate(tensors)
        ]
        if own_keys:
            statistics = rows_of(num_batches * num_heads * padded_queries, block)
            described += [(statistics,), (statistics,)]
        num_tiles = -(-num_rows // BLOCK_OWN)
        total = num_tiles * own_heads * num_batches
        # A program for each tile, or as many persistent ones as run at once.
        grid = (num_tiles, own_heads, num_batches)
        if constants["SETS"] > 1:
            grid = (min(total, num_multiprocessors(device_index)),)
        lengths = (own_heads, group, num_queries, num_keys, padded_queries)
        numbers = (total, *lengths, scale * LOG2_E)
        return TileLaunch(hopper_bwd_kernel, grid, described, numbers, constants, 2)

    grad_q, grad_k, grad_v = grads
    dkdv = launch(k, q, [k, v, q, grad_out, grad_k, grad_v], own_keys=True)
    dq = launch(q, k, [q, grad_out, k, v, grad_q, None], own_keys=False)

    def run(inputs, statistics, grads, _) -> None:
        q, k, v, grad_out = inputs
        grad_q, grad_k, grad_v = grads
        dkdv((k, v, q, grad_out, grad_k, grad_v, *statistics))
        dq((q, grad_out, k, v, grad_q, None), *statistics)

    return run
