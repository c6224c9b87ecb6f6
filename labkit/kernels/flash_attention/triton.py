"""The kernels of FlashAttention-2 in Triton; plan.py launches them, tiles.py has their tiles.

How they are laid out:
- A program owns a tile of rows and loops over tiles of the other length, or of a part of it
  (split-K); tiles that every row sees in full take no masking.
- exp2 with log2(e)·scale folded in: one multiply-add and one exponential per score.
- The dK/dV kernel computes Sᵀ and ∂Pᵀ directly: a transposed result as an operand gave wrong
  gradients on Hopper (triton issue 6124), and this way Pᵀ and ∂Sᵀ stay in registers.
- A head dimension that is no power of two is a power of two and a narrower tail (72 = 64 + 16, 96 =
  64 + 32), so that 72 and 80 do not pay for 128.
- fp32 is several products on the tensor cores for one: three of TF32, whose operands are split in
  registers, or six of bf16 between three slices of each, which a kernel cuts beforehand.

Formulas, shapes and ideal costs stand in op.py. Backward is two kernels, dK/dV and then dQ,
14·Q·K·D FLOPs a head: nothing is added from several programs, so that bits are equal every time.

Source: Dao 2023, "FlashAttention-2", algorithms 1 and 2.
"""

import math

import triton
import triton.language as tl

DELTA_BLOCK_Q = 32

# No query tile is longer, so that the statistics of a whole tile are always there to load.
STATISTICS_PADDING = 128


def split_head_dim(head_dim: int, aligned: bool = True) -> tuple[int, int]:
    """Returns (block, tail): the powers of two that a head dimension is cut into, tail 0 where one
    holds it.

    16 is the least that the tensor cores take. A tail that would fill the block up to its double is
    no saving. Rows that start off a 16-byte boundary are not cut: triton 3.6 reads such a tail from
    beyond its shared memory.
    """
    block = max(16, triton.next_power_of_2(head_dim))
    if block == head_dim or block <= 32 or not aligned:
        return block, 0
    half = block // 2
    tail = max(16, triton.next_power_of_2(head_dim - half))
    return (half, tail) if tail < half else (block, 0)


NUM_SLICES = 3
"""Slices of 8 bits that an operand of fp32 is cut into for six products of bf16."""


@triton.constexpr_function
def slice_elements(head_dim: int) -> int:
    """Returns how many elements lie between the slices of a row: each starts on a 16-byte
    boundary.
    """
    return -(-head_dim // 8) * 8


LOG2_E = math.log2(math.e)

# Causal work tiles that are ordered by the length of their loops: about two for each program that
# runs at once.
SECTION_TILES = tl.constexpr(512)

# Plain numbers to the kernels: a length of 1, or one divisible by 16, is no reason to compile them
# anew.
LENGTHS = (
    "max_queries",
    "max_keys",
    "num_heads",
    "num_key_heads",
    "left",
    "right",
    "num_splits",
    "num_sequences",
)


@triton.jit
def _offsets(rows, cols, stride_row, stride_col, WIDE: tl.constexpr, ALIGNMENT: tl.constexpr):
    """Element offsets of a tile from its first row, in int64 where the tile itself spans 2³¹
    elements.
    """
    if WIDE:
        rows = rows.to(tl.int64)
        cols = cols.to(tl.int64)
    row_offsets = rows * stride_row
    if ALIGNMENT > 1:
        # A row stride of 72 is divisible by 8 but not by 16, the only divisor that Triton finds out
        # by itself; without this hint the loads fall apart into single elements.
        row_offsets = tl.multiple_of(row_offsets, ALIGNMENT)
    return row_offsets[:, None] + (cols * stride_col)[None, :]


@triton.jit
def _start_of(index, stride, ALIGNMENT: tl.constexpr):
    """The offset of a row, head or batch from the first, in int64: tensors of more than 2³¹
    elements exist.
    """
    offset = tl.cast(index, tl.int64) * stride
    if ALIGNMENT > 1:
        offset = tl.multiple_of(offset, ALIGNMENT)
    return offset


@triton.jit
def _bf16_slices(x):
    """Three numbers of 8 bits each, as bf16 has them, whose sum is x exactly."""
    high = (x.to(tl.int32, bitcast=True) & -0x10000).to(tl.float32, bitcast=True)
    rest = x - high
    middle = (rest.to(tl.int32, bitcast=True) & -0x10000).to(tl.float32, bitcast=True)
    return high, middle, rest - middle


@triton.jit
def _operand(x, DTYPE: tl.constexpr, PRECISION: tl.constexpr):
    """x as an operand of `_product`: a tuple of its slices, or of itself. In TF32 it is rounded to
    its 11 bits.

    The tensor cores cut off the bits that they do not take, which shrinks every product: four times
    the error of eager.
    """
    if PRECISION == "bf16x6":
        high, middle, low = _bf16_slices(x)
        operand = (high.to(DTYPE), middle.to(DTYPE), low.to(DTYPE))
    elif PRECISION == "tf32" and DTYPE == tl.float32:
        bits = (x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000  # the nearest, ties away from zero
        operand = (bits.to(tl.float32, bitcast=True),)
    else:
        operand = (x.to(DTYPE),)
    return operand


@triton.jit
def _product(a, b, acc, TRANSPOSED: tl.constexpr, PRECISION: tl.constexpr):
    """acc + a b, or acc + a bᵀ; of slices all products but the smallest, the larger the later.

    Tensor cores cut sums off. Six products are summed up apart from `acc`, to which they are added
    rounded: within it the error would grow with the number of tiles.
    """
    if PRECISION == "bf16x6":
        total = None
        for i in tl.static_range(6):
            left = a[(2, 1, 0, 1, 0, 0)[i]]
            right = b[(0, 1, 2, 0, 1, 0)[i]]
            total = tl.dot(left, tl.trans(right) if TRANSPOSED else right, total)
        acc = total if acc is None else acc + total
    else:
        acc = tl.dot(a[0], tl.trans(b[0]) if TRANSPOSED else b[0], acc, input_precision=PRECISION)
    return acc


@triton.jit
def _load_tile(
    ptr,
    offsets,
    row_mask,
    cols,
    HEAD_DIM: tl.constexpr,
    MASK_ROWS: tl.constexpr,
    MASK_COLS: tl.constexpr,
):
    """A tile, zero beyond the last row and beyond the head dimension."""
    if MASK_ROWS and MASK_COLS:
        tile = tl.load(
            ptr + offsets, mask=row_mask[:, None] & (cols < HEAD_DIM)[None, :], other=0.0
        )
    elif MASK_ROWS:
        tile = tl.load(ptr + offsets, mask=row_mask[:, None], other=0.0)
    elif MASK_COLS:
        tile = tl.load(ptr + offsets, mask=(cols < HEAD_DIM)[None, :], other=0.0)
    else:
        tile = tl.load(ptr + offsets)
    return tile


@triton.jit
def _load(
    ptr,
    offsets,
    row_mask,
    cols,
    HEAD_DIM: tl.constexpr,
    MASK_ROWS: tl.constexpr,
    MASK_COLS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """A tile as an operand: itself, or the slices that `attention_slices_kernel` puts behind each
    other.
    """
    tile = _load_tile(ptr, offsets, row_mask, cols, HEAD_DIM, MASK_ROWS, MASK_COLS)
    SLICE: tl.constexpr = slice_elements(HEAD_DIM)
    if PRECISION == "bf16x6":
        middle = _load_tile(ptr + SLICE, offsets, row_mask, cols, HEAD_DIM, MASK_ROWS, MASK_COLS)
        low = _load_tile(ptr + 2 * SLICE, offsets, row_mask, cols, HEAD_DIM, MASK_ROWS, MASK_COLS)
        operand = (tile, middle, low)
    else:
        operand = _operand(tile, tile.dtype, PRECISION)
    return operand


@triton.jit
def _store(ptr, offsets, tile, row_mask, cols, HEAD_DIM: tl.constexpr, MASK_COLS: tl.constexpr):
    if MASK_COLS:
        tl.store(
            ptr + offsets,
            tile.to(ptr.dtype.element_ty),
            mask=row_mask[:, None] & (cols < HEAD_DIM)[None, :],
        )
    else:
        tl.store(ptr + offsets, tile.to(ptr.dtype.element_ty), mask=row_mask[:, None])


@triton.jit
def _visible(queries, keys, left, right, num_keys, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr):
    """Which key each query sees; `queries` are positions among the keys and broadcast against
    `keys`.
    """
    visible = keys < num_keys
    if HAS_RIGHT:
        visible = visible & (keys <= queries + right)
    if HAS_LEFT:
        visible = visible & (keys >= queries - left)
    return visible


@triton.jit
def _begin_of(cu_ptr, batch, num_sequences, num_rows):
    """Where a sequence of a packed batch begins and the one before it ends.

    It lies within the rows, whatever cumulative lengths say that nobody has checked.
    """
    inner = (batch > 0) & (batch < num_sequences)
    begin = tl.load(cu_ptr + batch, mask=inner, other=0)
    return tl.minimum(tl.maximum(tl.where(batch < num_sequences, begin, num_rows), 0), num_rows)


@triton.jit
def _sequence(
    cu_ptr, batch, num_sequences, num_rows, HAS_REST: tl.constexpr, IS_PACKED: tl.constexpr
):
    """The first row of a sequence and its number of rows.

    The last sequence of a packed batch is the rows behind all others (HAS_REST), which see no row
    of another tensor.
    """
    if IS_PACKED:
        first = _begin_of(cu_ptr, batch, num_sequences, num_rows)
        length = tl.maximum(_begin_of(cu_ptr, batch + 1, num_sequences, num_rows) - first, 0).to(
            tl.int32
        )
        if not HAS_REST:
            length = tl.where(batch + 1 < num_sequences, length, 0)
        first = first.to(tl.int64)
    else:
        first = tl.full((), 0, tl.int64)
        length = num_rows
    return first, length


@triton.jit
def _sequence_of(tile, cu_ptr, num_sequences, num_rows, BLOCK: tl.constexpr):
    """The sequence that a tile of a packed batch belongs to, and the tile's number there.

    The tiles of sequence b begin at cu[b] // BLOCK + b. Each has enough of them; its last may lie
    past its end.
    """
    batch, end = tl.cast(0, tl.int32), num_sequences
    while end - batch > 1:
        middle = (batch + end) // 2
        is_before = _begin_of(cu_ptr, middle, num_sequences, num_rows) // BLOCK + middle <= tile
        batch, end = tl.where(is_before, middle, batch), tl.where(is_before, end, middle)
    return batch, tile - (_begin_of(cu_ptr, batch, num_sequences, num_rows) // BLOCK + batch).to(
        tl.int32
    )


@triton.jit
def _statistics_row(first_q, batch, IS_PACKED: tl.constexpr, PADDING: tl.constexpr):
    """Where a sequence's row statistics begin: sequences are padded so that whole tiles load
    without a mask.
    """
    row = first_q
    if IS_PACKED:
        row = (first_q + tl.cast(batch, tl.int64) * PADDING) // PADDING * PADDING
    return row


@triton.jit
def _key_ranges(
    q_begin,
    num_queries,
    num_keys,
    left,
    right,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
):
    """Bounds of the keys that a tile of queries sees: [begin, full_begin) with masks, [full_begin,
    full_end) seen by every query, [full_end, end) with masks again. The first is empty without a
    window.
    """
    diagonal = num_keys - num_queries + q_begin
    begin = tl.cast(0, tl.int32)
    end = num_keys
    full_begin = begin
    full_end = num_keys // BLOCK_K * BLOCK_K
    if HAS_RIGHT:
        end = tl.maximum(tl.minimum(end, diagonal + BLOCK_Q + right), 0)
        full_end = tl.maximum(tl.minimum(full_end, (diagonal + right + 1) // BLOCK_K * BLOCK_K), 0)
    if HAS_LEFT:
        begin = tl.maximum(diagonal - left, 0) // BLOCK_K * BLOCK_K
        full_begin = tl.maximum(diagonal + BLOCK_Q - 1 - left, 0)
        full_begin = (full_begin + BLOCK_K - 1) // BLOCK_K * BLOCK_K
        full_begin = tl.maximum(tl.minimum(full_begin, end), begin)
        # The masked tiles before the full ones end on a tile boundary, so that no key is met twice.
        full_begin = (full_begin + BLOCK_K - 1) // BLOCK_K * BLOCK_K
        full_end = tl.maximum(full_end, full_begin)
    return begin, full_begin, full_end, end


@triton.jit
def _query_ranges(
    k_begin,
    num_queries,
    num_keys,
    left,
    right,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
):
    """Bounds of the queries that see a tile of keys, as in `_key_ranges`: when causal the masked
    tiles come first.
    """
    diagonal = k_begin - (num_keys - num_queries)
    begin = tl.cast(0, tl.int32)
    end = num_queries
    full_begin = begin
    full_end = num_queries
    if HAS_LEFT:
        end = tl.maximum(tl.minimum(end, diagonal + BLOCK_K + left), 0)
        full_end = tl.minimum(full_end, tl.maximum(diagonal + left + 1, 0)) // BLOCK_Q * BLOCK_Q
    if HAS_RIGHT:
        begin = tl.maximum(diagonal - right, 0) // BLOCK_Q * BLOCK_Q
        full_begin = tl.maximum(diagonal + BLOCK_K - 1 - right, 0)
        full_begin = tl.maximum(tl.minimum(full_begin, end), begin)
        full_begin = (full_begin + BLOCK_Q - 1) // BLOCK_Q * BLOCK_Q
        full_end = tl.maximum(full_end, full_begin)
    return begin, full_begin, full_end, end


@triton.jit
def _decode_program_id(
    max_length,
    num_heads,
    num_splits,
    cu_ptr,
    num_sequences,
    BLOCK: tl.constexpr,
    UNEQUAL: tl.constexpr,
    LONGEST_LAST: tl.constexpr,
    SPLIT_K: tl.constexpr,
    IS_PACKED: tl.constexpr,
):
    """A program's tile of BLOCK rows, head, batch and split, and the place of its result among
    those of all splits.

    UNEQUAL: the tiles with the longest loops start first, so that they do not end last: a causal
    head's last queries (LONGEST_LAST), or its first keys. With splits that order is over all heads;
    without, over sections of heads whose keys stay in the cache.
    """
    program, num_tiles = tl.program_id(0), tl.cdiv(max_length, BLOCK)
    if IS_PACKED:
        num_tiles = tl.num_programs(0) // num_heads
    if SPLIT_K:
        num_head_splits = tl.num_programs(0) // num_tiles
        tile = program // num_head_splits
        head_split = program % num_head_splits
        split = head_split % num_splits
        head = head_split // num_splits % num_heads
        batch = head_split // num_splits // num_heads
        result = split * (num_head_splits // num_splits // num_heads) + batch
    else:
        if UNEQUAL:
            section = tl.cdiv(SECTION_TILES, num_tiles)
            first_head = program // (section * num_tiles) * section
            heads = tl.minimum(section, tl.num_programs(0) // num_tiles - first_head)
            place = program - first_head * num_tiles
            tile = place // heads
            head_total = first_head + place % heads
        else:
            tile = program % num_tiles
            head_total = program // num_tiles
        split = 0
        head = head_total % num_heads
        batch = head_total // num_heads
        result = batch
    if LONGEST_LAST:
        tile = num_tiles - 1 - tile
    if IS_PACKED:
        batch, tile = _sequence_of(tile, cu_ptr, num_sequences, max_length, BLOCK)
    return tile, head, batch, split, result


@triton.jit
def _loop_of(stage: tl.constexpr, begin, full_begin, full_end, end, UNMASKED_LOOP: tl.constexpr):
    """Bounds of the tiles before those visible in full (stage 0), of these (1), and of those behind
    (2; or of all).
    """
    if stage == 0:
        return begin, full_begin
    if stage == 1:
        return full_begin, full_end
    return full_end if UNMASKED_LOOP else begin, end


@triton.jit
def _split_range(
    begin, full_begin, full_end, end, split, num_splits, BLOCK: tl.constexpr, SPLIT_K: tl.constexpr
):
    """The bounds of one of `num_splits` equal parts of a loop; the last parts may be empty."""
    if SPLIT_K:
        num_tiles = (tl.maximum(end - begin, 0) + BLOCK - 1) // BLOCK
        length = (num_tiles + num_splits - 1) // num_splits * BLOCK
        begin = tl.minimum(begin + split * length, end)
        end = tl.minimum(begin + length, end)
        full_begin = tl.maximum(tl.minimum(full_begin, end), begin)
        full_end = tl.maximum(tl.minimum(full_end, end), begin)
    return begin, full_begin, full_end, end


@triton.jit(do_not_specialize=LENGTHS)
def flash_attention_fwd_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    cu_q_ptr,
    cu_k_ptr,
    stride_qb,
    stride_qh,
    stride_qs,
    stride_qd,
    stride_kb,
    stride_kh,
    stride_ks,
    stride_kd,
    stride_vb,
    stride_vh,
    stride_vs,
    stride_vd,
    stride_ob,
    stride_oh,
    stride_os,
    stride_od,
    stride_lb,
    stride_lh,
    num_heads,
    group,
    max_queries,
    max_keys,
    num_sequences,
    scale_log2,
    left,
    right,
    num_splits,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TAIL_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    IS_PACKED: tl.constexpr,
    SPLIT_K: tl.constexpr,
    PRECISION: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    WIDE: tl.constexpr,
    UNMASKED_LOOP: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """One program: the output and the log-sum-exp of BLOCK_Q queries of one head.

    SPLIT_K: over one of `num_splits` parts of their keys; the results of a split lie behind those
    of the one before.
    """
    tile, head, batch, split, result = _decode_program_id(
        max_queries,
        num_heads,
        num_splits,
        cu_q_ptr,
        num_sequences,
        BLOCK_Q,
        HAS_RIGHT and not HAS_LEFT,
        HAS_RIGHT,
        SPLIT_K,
        IS_PACKED,
    )
    first_q, num_queries = _sequence(cu_q_ptr, batch, num_sequences, max_queries, True, IS_PACKED)
    first_k, num_keys = _sequence(cu_k_ptr, batch, num_sequences, max_keys, False, IS_PACKED)
    q_begin = tile * BLOCK_Q
    if q_begin >= num_queries:
        return

    rows_q = tl.arange(0, BLOCK_Q)
    rows_k = tl.arange(0, BLOCK_K)
    cols = tl.arange(0, BLOCK_D)
    mask_q = rows_q < num_queries - q_begin
    MASK_COLS: tl.constexpr = BLOCK_D > HEAD_DIM
    DTYPE: tl.constexpr = q_ptr.dtype.element_ty
    MASK_TAIL: tl.constexpr = BLOCK_D + TAIL_D > HEAD_DIM

    q_ptr += _start_of(batch, stride_qb, ALIGNMENT) + _start_of(head, stride_qh, ALIGNMENT)
    q_ptr += _start_of(first_q + q_begin, stride_qs, ALIGNMENT)
    k_ptr += _start_of(batch, stride_kb, ALIGNMENT) + _start_of(head // group, stride_kh, ALIGNMENT)
    k_ptr += _start_of(first_k, stride_ks, ALIGNMENT)
    v_ptr += _start_of(batch, stride_vb, ALIGNMENT) + _start_of(head // group, stride_vh, ALIGNMENT)
    v_ptr += _start_of(first_k, stride_vs, ALIGNMENT)
    out_ptr += _start_of(result, stride_ob, ALIGNMENT) + _start_of(head, stride_oh, ALIGNMENT)
    out_ptr += _start_of(first_q + q_begin, stride_os, ALIGNMENT)
    lse_ptr += _start_of(result, stride_lb, 1) + _start_of(head, stride_lh, 1) + first_q + q_begin

    q_offsets = _offsets(rows_q, cols, stride_qs, stride_qd, WIDE, ALIGNMENT)
    k_offsets = _offsets(rows_k, cols, stride_ks, stride_kd, WIDE, ALIGNMENT)
    v_offsets = _offsets(rows_k, cols, stride_vs, stride_vd, WIDE, ALIGNMENT)
    q = _load(q_ptr, q_offsets, mask_q, cols, HEAD_DIM, True, MASK_COLS, PRECISION)
    acc = tl.zeros((BLOCK_Q, BLOCK_D), dtype=tl.float32)
    if TAIL_D > 0:
        tail = BLOCK_D + tl.arange(0, TAIL_D)
        q_tail_offsets = _offsets(rows_q, tail, stride_qs, stride_qd, WIDE, ALIGNMENT)
        k_tail_offsets = _offsets(rows_k, tail, stride_ks, stride_kd, WIDE, ALIGNMENT)
        v_tail_offsets = _offsets(rows_k, tail, stride_vs, stride_vd, WIDE, ALIGNMENT)
        q_tail = _load(q_ptr, q_tail_offsets, mask_q, tail, HEAD_DIM, True, MASK_TAIL, PRECISION)
        acc_tail = tl.zeros((BLOCK_Q, TAIL_D), dtype=tl.float32)
    maximum = tl.full((BLOCK_Q,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_Q,), dtype=tl.float32)

    begin, full_begin, full_end, end = _key_ranges(
        q_begin, num_queries, num_keys, left, right, BLOCK_Q, BLOCK_K, HAS_LEFT, HAS_RIGHT
    )
    begin, full_begin, full_end, end = _split_range(
        begin, full_begin, full_end, end, split, num_splits, BLOCK_K, SPLIT_K
    )
    positions = (num_keys - num_queries + q_begin + rows_q)[:, None]
    # Keys before, on and after the tiles that every query sees. A second loop behind the first
    # makes ptxas serialise the matrix products of both (C7515) where it only exists for a last
    # partial tile, so that none is emitted then: keys that fill their tiles take one loop without
    # masks, others one loop with masks.
    for stage in tl.static_range(
        2 if not UNMASKED_LOOP else (0 if HAS_LEFT else 1),
        2 if UNMASKED_LOOP and EVEN_K and not HAS_RIGHT else 3,
    ):
        loop_begin, loop_end = _loop_of(stage, begin, full_begin, full_end, end, UNMASKED_LOOP)
        for start in tl.range(loop_begin, loop_end, BLOCK_K):
            k_tile_ptr = k_ptr + _start_of(start, stride_ks, ALIGNMENT)
            v_tile_ptr = v_ptr + _start_of(start, stride_vs, ALIGNMENT)
            mask_k = rows_k < num_keys - start
            k = _load(
                k_tile_ptr, k_offsets, mask_k, cols, HEAD_DIM, stage != 1, MASK_COLS, PRECISION
            )
            scores = _product(q, k, None, True, PRECISION)
            if TAIL_D > 0:
                k_tail = _load(
                    k_tile_ptr,
                    k_tail_offsets,
                    mask_k,
                    tail,
                    HEAD_DIM,
                    stage != 1,
                    MASK_TAIL,
                    PRECISION,
                )
                scores = _product(q_tail, k_tail, scores, True, PRECISION)
            if stage != 1:
                visible = _visible(
                    positions, (start + rows_k)[None, :], left, right, num_keys, HAS_LEFT, HAS_RIGHT
                )
                scores = tl.where(visible, scores, float("-inf"))
            new_maximum = tl.maximum(maximum, tl.max(scores, axis=1) * scale_log2)
            if stage != 1:
                # While a row has seen no key its maximum is −inf, and −inf − (−inf) would be NaN.
                shift = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
            else:
                shift = new_maximum
            p = tl.exp2(scores * scale_log2 - shift[:, None])
            rescale = tl.exp2(maximum - shift)
            total = total * rescale + tl.sum(p, axis=1)
            v = _load(
                v_tile_ptr, v_offsets, mask_k, cols, HEAD_DIM, stage != 1, MASK_COLS, PRECISION
            )
            p = _operand(p, DTYPE, PRECISION)
            acc = _product(p, v, acc * rescale[:, None], False, PRECISION)
            if TAIL_D > 0:
                v_tail = _load(
                    v_tile_ptr,
                    v_tail_offsets,
                    mask_k,
                    tail,
                    HEAD_DIM,
                    stage != 1,
                    MASK_TAIL,
                    PRECISION,
                )
                acc_tail = _product(p, v_tail, acc_tail * rescale[:, None], False, PRECISION)
            maximum = new_maximum

    # A row without any key: zeros, and −inf.
    divisor = tl.where(total == 0.0, 1.0, total)[:, None]
    out_offsets = _offsets(rows_q, cols, stride_os, stride_od, WIDE, ALIGNMENT)
    _store(out_ptr, out_offsets, acc / divisor, mask_q, cols, HEAD_DIM, MASK_COLS)
    if TAIL_D > 0:
        out_tail_offsets = _offsets(rows_q, tail, stride_os, stride_od, WIDE, ALIGNMENT)
        _store(out_ptr, out_tail_offsets, acc_tail / divisor, mask_q, tail, HEAD_DIM, MASK_TAIL)
    lse = (maximum + tl.log2(tl.where(total == 0.0, 1.0, total))) * 0.6931471805599453
    tl.store(lse_ptr + rows_q, tl.where(total == 0.0, float("-inf"), lse), mask=mask_q)


@triton.jit(do_not_specialize=LENGTHS)
def flash_attention_bwd_delta_kernel(
    out_ptr,
    grad_out_ptr,
    lse_ptr,
    delta_ptr,
    lse_log2_ptr,
    cu_q_ptr,
    stride_ob,
    stride_oh,
    stride_os,
    stride_od,
    stride_gb,
    stride_gh,
    stride_gs,
    stride_gd,
    stride_lb,
    stride_lh,
    stride_pb,
    stride_ph,
    num_heads,
    max_queries,
    num_sequences,
    HEAD_DIM: tl.constexpr,
    PADDED_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    IS_PACKED: tl.constexpr,
    PADDING: tl.constexpr,
):
    """One program: rowsum(∂O ∘ O) of BLOCK_Q queries, and their log-sum-exp in base 2, for the
    kernels after it.

    It fills the padding too, with 0 and +∞: exp2(· − ∞) = 0 then keeps what lies beyond a sequence
    out of every sum.
    """
    # Heads one after another: where they lie inside the rows, neighbours read the same rows.
    head = tl.program_id(0) % num_heads
    begin = tl.program_id(0) // num_heads * BLOCK_Q
    if IS_PACKED:
        batch, tile = _sequence_of(begin // PADDING, cu_q_ptr, num_sequences, max_queries, PADDING)
    else:
        num_tiles = tl.cdiv(max_queries, PADDING)
        batch, tile = begin // PADDING // num_tiles, begin // PADDING % num_tiles
    first_q, num_queries = _sequence(cu_q_ptr, batch, num_sequences, max_queries, True, IS_PACKED)
    rows = tile * PADDING + begin % PADDING + tl.arange(0, BLOCK_Q)
    mask = rows < num_queries
    cols = tl.arange(0, PADDED_D)
    inside = mask[:, None] & (cols < HEAD_DIM)[None, :]
    wide_rows = (first_q + rows)[:, None]
    wide_cols = cols.to(tl.int64)[None, :]

    out_ptr += _start_of(batch, stride_ob, 1) + _start_of(head, stride_oh, 1)
    grad_out_ptr += _start_of(batch, stride_gb, 1) + _start_of(head, stride_gh, 1)
    out = tl.load(out_ptr + wide_rows * stride_os + wide_cols * stride_od, mask=inside, other=0.0)
    grad_out = tl.load(
        grad_out_ptr + wide_rows * stride_gs + wide_cols * stride_gd, mask=inside, other=0.0
    )
    delta = tl.sum(out.to(tl.float32) * grad_out.to(tl.float32), axis=1)
    lse_ptr += _start_of(batch, stride_lb, 1) + _start_of(head, stride_lh, 1) + first_q
    lse = tl.load(lse_ptr + rows, mask=mask, other=float("-inf"))
    # A row that saw no key passes no gradient on either.
    lse_log2 = tl.where(lse == float("-inf"), float("inf"), lse * 1.4426950408889634)
    statistics = _start_of(batch, stride_pb, 1) + _start_of(head, stride_ph, 1) + rows
    statistics += _statistics_row(first_q, batch, IS_PACKED, PADDING)
    padded = rows < (num_queries + PADDING - 1) // PADDING * PADDING
    tl.store(delta_ptr + statistics, delta, mask=padded)
    tl.store(lse_log2_ptr + statistics, lse_log2, mask=padded)


@triton.jit(do_not_specialize=LENGTHS)
def flash_attention_bwd_dkdv_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    grad_out_ptr,
    lse_log2_ptr,
    delta_ptr,
    grad_k_ptr,
    grad_v_ptr,
    cu_q_ptr,
    cu_k_ptr,
    stride_qb,
    stride_qh,
    stride_qs,
    stride_qd,
    stride_kb,
    stride_kh,
    stride_ks,
    stride_kd,
    stride_vb,
    stride_vh,
    stride_vs,
    stride_vd,
    stride_gb,
    stride_gh,
    stride_gs,
    stride_gd,
    stride_dkb,
    stride_dkh,
    stride_dks,
    stride_dkd,
    stride_dvb,
    stride_dvh,
    stride_dvs,
    stride_dvd,
    stride_pb,
    stride_ph,
    num_key_heads,
    group,
    max_queries,
    max_keys,
    num_sequences,
    scale_log2,
    scale,
    left,
    right,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TAIL_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    IS_PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    WIDE: tl.constexpr,
    UNMASKED_LOOP: tl.constexpr,
    PADDING: tl.constexpr,
    EVEN_Q: tl.constexpr,
):
    """One program: ∂K and ∂V of BLOCK_K keys of one key head, over all queries of the head's
    group.
    """
    tile, head, batch, _, _ = _decode_program_id(
        max_keys,
        num_key_heads,
        1,
        cu_k_ptr,
        num_sequences,
        BLOCK_K,
        HAS_RIGHT and not HAS_LEFT,
        False,
        False,
        IS_PACKED,
    )
    first_q, num_queries = _sequence(cu_q_ptr, batch, num_sequences, max_queries, False, IS_PACKED)
    first_k, num_keys = _sequence(cu_k_ptr, batch, num_sequences, max_keys, True, IS_PACKED)
    k_begin = tile * BLOCK_K
    if IS_PACKED:
        if k_begin >= num_keys:
            return

    rows_q = tl.arange(0, BLOCK_Q)
    rows_k = tl.arange(0, BLOCK_K)
    cols = tl.arange(0, BLOCK_D)
    mask_k = rows_k < num_keys - k_begin
    MASK_COLS: tl.constexpr = BLOCK_D > HEAD_DIM
    DTYPE: tl.constexpr = q_ptr.dtype.element_ty
    MASK_TAIL: tl.constexpr = BLOCK_D + TAIL_D > HEAD_DIM

    q_ptr += _start_of(batch, stride_qb, ALIGNMENT) + _start_of(first_q, stride_qs, ALIGNMENT)
    grad_out_ptr += _start_of(batch, stride_gb, ALIGNMENT) + _start_of(
        first_q, stride_gs, ALIGNMENT
    )
    k_ptr += _start_of(batch, stride_kb, ALIGNMENT) + _start_of(head, stride_kh, ALIGNMENT)
    k_ptr += _start_of(first_k + k_begin, stride_ks, ALIGNMENT)
    v_ptr += _start_of(batch, stride_vb, ALIGNMENT) + _start_of(head, stride_vh, ALIGNMENT)
    v_ptr += _start_of(first_k + k_begin, stride_vs, ALIGNMENT)
    grad_k_ptr += _start_of(batch, stride_dkb, ALIGNMENT) + _start_of(head, stride_dkh, ALIGNMENT)
    grad_k_ptr += _start_of(first_k + k_begin, stride_dks, ALIGNMENT)
    grad_v_ptr += _start_of(batch, stride_dvb, ALIGNMENT) + _start_of(head, stride_dvh, ALIGNMENT)
    grad_v_ptr += _start_of(first_k + k_begin, stride_dvs, ALIGNMENT)
    statistics = _start_of(batch, stride_pb, 1) + _statistics_row(
        first_q, batch, IS_PACKED, PADDING
    )

    q_offsets = _offsets(rows_q, cols, stride_qs, stride_qd, WIDE, ALIGNMENT)
    g_offsets = _offsets(rows_q, cols, stride_gs, stride_gd, WIDE, ALIGNMENT)
    k_offsets = _offsets(rows_k, cols, stride_ks, stride_kd, WIDE, ALIGNMENT)
    v_offsets = _offsets(rows_k, cols, stride_vs, stride_vd, WIDE, ALIGNMENT)
    k = _load(k_ptr, k_offsets, mask_k, cols, HEAD_DIM, True, MASK_COLS, PRECISION)
    v = _load(v_ptr, v_offsets, mask_k, cols, HEAD_DIM, True, MASK_COLS, PRECISION)
    grad_k = tl.zeros((BLOCK_K, BLOCK_D), dtype=tl.float32)
    grad_v = tl.zeros((BLOCK_K, BLOCK_D), dtype=tl.float32)
    if TAIL_D > 0:
        tail = BLOCK_D + tl.arange(0, TAIL_D)
        q_tail_offsets = _offsets(rows_q, tail, stride_qs, stride_qd, WIDE, ALIGNMENT)
        g_tail_offsets = _offsets(rows_q, tail, stride_gs, stride_gd, WIDE, ALIGNMENT)
        k_tail_offsets = _offsets(rows_k, tail, stride_ks, stride_kd, WIDE, ALIGNMENT)
        v_tail_offsets = _offsets(rows_k, tail, stride_vs, stride_vd, WIDE, ALIGNMENT)
        k_tail = _load(k_ptr, k_tail_offsets, mask_k, tail, HEAD_DIM, True, MASK_TAIL, PRECISION)
        v_tail = _load(v_ptr, v_tail_offsets, mask_k, tail, HEAD_DIM, True, MASK_TAIL, PRECISION)
        grad_k_tail = tl.zeros((BLOCK_K, TAIL_D), dtype=tl.float32)
        grad_v_tail = tl.zeros((BLOCK_K, TAIL_D), dtype=tl.float32)

    begin, full_begin, full_end, end = _query_ranges(
        k_begin, num_queries, num_keys, left, right, BLOCK_Q, BLOCK_K, HAS_LEFT, HAS_RIGHT
    )
    keys = (k_begin + rows_k)[:, None]
    for member in range(group):
        query_head = head * group + member
        q_head_ptr = q_ptr + _start_of(query_head, stride_qh, ALIGNMENT)
        g_head_ptr = grad_out_ptr + _start_of(query_head, stride_gh, ALIGNMENT)
        head_statistics = statistics + _start_of(query_head, stride_ph, 1)
        # Queries on the diagonal, past it, and at the end of a window. Rows beyond the last query
        # are loaded as zeros and have a log-sum-exp of +∞, so that they add nothing anywhere.
        for stage in tl.static_range(
            0 if HAS_RIGHT and UNMASKED_LOOP else 1, 3 if HAS_LEFT and UNMASKED_LOOP else 2
        ):
            loop_begin, loop_end = _loop_of(
                stage if UNMASKED_LOOP else 2, begin, full_begin, full_end, end, UNMASKED_LOOP
            )
            for start in tl.range(loop_begin, loop_end, BLOCK_Q):
                q_tile_ptr = q_head_ptr + _start_of(start, stride_qs, ALIGNMENT)
                g_tile_ptr = g_head_ptr + _start_of(start, stride_gs, ALIGNMENT)
                mask_q = rows_q < num_queries - start
                q = _load(
                    q_tile_ptr, q_offsets, mask_q, cols, HEAD_DIM, not EVEN_Q, MASK_COLS, PRECISION
                )
                grad_out = _load(
                    g_tile_ptr, g_offsets, mask_q, cols, HEAD_DIM, not EVEN_Q, MASK_COLS, PRECISION
                )
                delta = tl.load(delta_ptr + head_statistics + start + rows_q)
                scores_t = _product(k, q, None, True, PRECISION)
                # ∂Pᵀ − D straight from the accumulator: D occupies no registers of its own, and the
                # product runs under the exponentials.
                grad_p_t = tl.broadcast_to(-delta[None, :], (BLOCK_K, BLOCK_Q))
                grad_p_t = _product(v, grad_out, grad_p_t, True, PRECISION)
                if TAIL_D > 0:
                    q_tail = _load(
                        q_tile_ptr,
                        q_tail_offsets,
                        mask_q,
                        tail,
                        HEAD_DIM,
                        not EVEN_Q,
                        MASK_TAIL,
                        PRECISION,
                    )
                    grad_out_tail = _load(
                        g_tile_ptr,
                        g_tail_offsets,
                        mask_q,
                        tail,
                        HEAD_DIM,
                        not EVEN_Q,
                        MASK_TAIL,
                        PRECISION,
                    )
                    scores_t = _product(k_tail, q_tail, scores_t, True, PRECISION)
                    grad_p_t = _product(v_tail, grad_out_tail, grad_p_t, True, PRECISION)
                lse_log2 = tl.load(lse_log2_ptr + head_statistics + start + rows_q)
                p_t = tl.exp2(scores_t * scale_log2 - lse_log2[None, :])
                if (HAS_LEFT or HAS_RIGHT) and (stage != 1 or not UNMASKED_LOOP):
                    positions = (num_keys - num_queries + start + rows_q)[None, :]
                    visible = _visible(positions, keys, left, right, num_keys, HAS_LEFT, HAS_RIGHT)
                    p_t = tl.where(visible, p_t, 0.0)
                p_t_low = _operand(p_t, DTYPE, PRECISION)
                grad_v = _product(p_t_low, grad_out, grad_v, False, PRECISION)
                grad_scores_t = _operand(p_t * grad_p_t, DTYPE, PRECISION)
                grad_k = _product(grad_scores_t, q, grad_k, False, PRECISION)
                if TAIL_D > 0:
                    grad_v_tail = _product(p_t_low, grad_out_tail, grad_v_tail, False, PRECISION)
                    grad_k_tail = _product(grad_scores_t, q_tail, grad_k_tail, False, PRECISION)

    grad_k_offsets = _offsets(rows_k, cols, stride_dks, stride_dkd, WIDE, ALIGNMENT)
    grad_v_offsets = _offsets(rows_k, cols, stride_dvs, stride_dvd, WIDE, ALIGNMENT)
    _store(grad_k_ptr, grad_k_offsets, grad_k * scale, mask_k, cols, HEAD_DIM, MASK_COLS)
    _store(grad_v_ptr, grad_v_offsets, grad_v, mask_k, cols, HEAD_DIM, MASK_COLS)
    if TAIL_D > 0:
        grad_k_tail_offsets = _offsets(rows_k, tail, stride_dks, stride_dkd, WIDE, ALIGNMENT)
        grad_v_tail_offsets = _offsets(rows_k, tail, stride_dvs, stride_dvd, WIDE, ALIGNMENT)
        _store(
            grad_k_ptr, grad_k_tail_offsets, grad_k_tail * scale, mask_k, tail, HEAD_DIM, MASK_TAIL
        )
        _store(grad_v_ptr, grad_v_tail_offsets, grad_v_tail, mask_k, tail, HEAD_DIM, MASK_TAIL)


@triton.jit(do_not_specialize=LENGTHS)
def flash_attention_bwd_dq_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    grad_out_ptr,
    lse_log2_ptr,
    delta_ptr,
    grad_q_ptr,
    cu_q_ptr,
    cu_k_ptr,
    stride_qb,
    stride_qh,
    stride_qs,
    stride_qd,
    stride_kb,
    stride_kh,
    stride_ks,
    stride_kd,
    stride_vb,
    stride_vh,
    stride_vs,
    stride_vd,
    stride_gb,
    stride_gh,
    stride_gs,
    stride_gd,
    stride_dqb,
    stride_dqh,
    stride_dqs,
    stride_dqd,
    stride_pb,
    stride_ph,
    num_heads,
    group,
    max_queries,
    max_keys,
    num_sequences,
    scale_log2,
    scale,
    left,
    right,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TAIL_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    IS_PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    WIDE: tl.constexpr,
    UNMASKED_LOOP: tl.constexpr,
    PADDING: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """One program: ∂Q of BLOCK_Q queries of one head."""
    tile, head, batch, _, _ = _decode_program_id(
        max_queries,
        num_heads,
        1,
        cu_q_ptr,
        num_sequences,
        BLOCK_Q,
        HAS_RIGHT and not HAS_LEFT,
        HAS_RIGHT,
        False,
        IS_PACKED,
    )
    first_q, num_queries = _sequence(cu_q_ptr, batch, num_sequences, max_queries, True, IS_PACKED)
    first_k, num_keys = _sequence(cu_k_ptr, batch, num_sequences, max_keys, False, IS_PACKED)
    q_begin = tile * BLOCK_Q
    if IS_PACKED:
        if q_begin >= num_queries:
            return

    rows_q = tl.arange(0, BLOCK_Q)
    rows_k = tl.arange(0, BLOCK_K)
    cols = tl.arange(0, BLOCK_D)
    mask_q = rows_q < num_queries - q_begin
    MASK_COLS: tl.constexpr = BLOCK_D > HEAD_DIM
    DTYPE: tl.constexpr = q_ptr.dtype.element_ty
    MASK_TAIL: tl.constexpr = BLOCK_D + TAIL_D > HEAD_DIM

    q_ptr += _start_of(batch, stride_qb, ALIGNMENT) + _start_of(head, stride_qh, ALIGNMENT)
    q_ptr += _start_of(first_q + q_begin, stride_qs, ALIGNMENT)
    grad_out_ptr += _start_of(batch, stride_gb, ALIGNMENT) + _start_of(head, stride_gh, ALIGNMENT)
    grad_out_ptr += _start_of(first_q + q_begin, stride_gs, ALIGNMENT)
    grad_q_ptr += _start_of(batch, stride_dqb, ALIGNMENT) + _start_of(head, stride_dqh, ALIGNMENT)
    grad_q_ptr += _start_of(first_q + q_begin, stride_dqs, ALIGNMENT)
    k_ptr += _start_of(batch, stride_kb, ALIGNMENT) + _start_of(head // group, stride_kh, ALIGNMENT)
    k_ptr += _start_of(first_k, stride_ks, ALIGNMENT)
    v_ptr += _start_of(batch, stride_vb, ALIGNMENT) + _start_of(head // group, stride_vh, ALIGNMENT)
    v_ptr += _start_of(first_k, stride_vs, ALIGNMENT)
    statistics = _start_of(batch, stride_pb, 1) + _start_of(head, stride_ph, 1) + q_begin + rows_q
    statistics += _statistics_row(first_q, batch, IS_PACKED, PADDING)

    q_offsets = _offsets(rows_q, cols, stride_qs, stride_qd, WIDE, ALIGNMENT)
    g_offsets = _offsets(rows_q, cols, stride_gs, stride_gd, WIDE, ALIGNMENT)
    k_offsets = _offsets(rows_k, cols, stride_ks, stride_kd, WIDE, ALIGNMENT)
    v_offsets = _offsets(rows_k, cols, stride_vs, stride_vd, WIDE, ALIGNMENT)
    q = _load(q_ptr, q_offsets, mask_q, cols, HEAD_DIM, True, MASK_COLS, PRECISION)
    grad_out = _load(grad_out_ptr, g_offsets, mask_q, cols, HEAD_DIM, True, MASK_COLS, PRECISION)
    grad_q = tl.zeros((BLOCK_Q, BLOCK_D), dtype=tl.float32)
    if TAIL_D > 0:
        tail = BLOCK_D + tl.arange(0, TAIL_D)
        q_tail_offsets = _offsets(rows_q, tail, stride_qs, stride_qd, WIDE, ALIGNMENT)
        g_tail_offsets = _offsets(rows_q, tail, stride_gs, stride_gd, WIDE, ALIGNMENT)
        k_tail_offsets = _offsets(rows_k, tail, stride_ks, stride_kd, WIDE, ALIGNMENT)
        v_tail_offsets = _offsets(rows_k, tail, stride_vs, stride_vd, WIDE, ALIGNMENT)
        q_tail = _load(q_ptr, q_tail_offsets, mask_q, tail, HEAD_DIM, True, MASK_TAIL, PRECISION)
        grad_out_tail = _load(
            grad_out_ptr, g_tail_offsets, mask_q, tail, HEAD_DIM, True, MASK_TAIL, PRECISION
        )
        grad_q_tail = tl.zeros((BLOCK_Q, TAIL_D), dtype=tl.float32)
    lse_log2 = tl.load(lse_log2_ptr + statistics)[:, None]
    delta = tl.load(delta_ptr + statistics)[:, None]

    begin, full_begin, full_end, end = _key_ranges(
        q_begin, num_queries, num_keys, left, right, BLOCK_Q, BLOCK_K, HAS_LEFT, HAS_RIGHT
    )
    positions = (num_keys - num_queries + q_begin + rows_q)[:, None]
    for stage in tl.static_range(
        2 if not UNMASKED_LOOP else (0 if HAS_LEFT else 1),
        2 if UNMASKED_LOOP and EVEN_K and not HAS_RIGHT else 3,
    ):
        loop_begin, loop_end = _loop_of(stage, begin, full_begin, full_end, end, UNMASKED_LOOP)
        for start in tl.range(loop_begin, loop_end, BLOCK_K):
            k_tile_ptr = k_ptr + _start_of(start, stride_ks, ALIGNMENT)
            v_tile_ptr = v_ptr + _start_of(start, stride_vs, ALIGNMENT)
            mask_k = rows_k < num_keys - start
            k = _load(
                k_tile_ptr, k_offsets, mask_k, cols, HEAD_DIM, stage != 1, MASK_COLS, PRECISION
            )
            v = _load(
                v_tile_ptr, v_offsets, mask_k, cols, HEAD_DIM, stage != 1, MASK_COLS, PRECISION
            )
            scores = _product(q, k, None, True, PRECISION)
            grad_p = _product(grad_out, v, None, True, PRECISION)
            if TAIL_D > 0:
                k_tail = _load(
                    k_tile_ptr,
                    k_tail_offsets,
                    mask_k,
                    tail,
                    HEAD_DIM,
                    stage != 1,
                    MASK_TAIL,
                    PRECISION,
                )
                v_tail = _load(
                    v_tile_ptr,
                    v_tail_offsets,
                    mask_k,
                    tail,
                    HEAD_DIM,
                    stage != 1,
                    MASK_TAIL,
                    PRECISION,
                )
                scores = _product(q_tail, k_tail, scores, True, PRECISION)
                grad_p = _product(grad_out_tail, v_tail, grad_p, True, PRECISION)
            p = tl.exp2(scores * scale_log2 - lse_log2)
            if stage != 1:
                visible = _visible(
                    positions, (start + rows_k)[None, :], left, right, num_keys, HAS_LEFT, HAS_RIGHT
                )
                p = tl.where(visible, p, 0.0)
            grad_scores = _operand(p * (grad_p - delta), DTYPE, PRECISION)
            grad_q = _product(grad_scores, k, grad_q, False, PRECISION)
            if TAIL_D > 0:
                grad_q_tail = _product(grad_scores, k_tail, grad_q_tail, False, PRECISION)

    grad_q_offsets = _offsets(rows_q, cols, stride_dqs, stride_dqd, WIDE, ALIGNMENT)
    _store(grad_q_ptr, grad_q_offsets, grad_q * scale, mask_q, cols, HEAD_DIM, MASK_COLS)
    if TAIL_D > 0:
        grad_q_tail_offsets = _offsets(rows_q, tail, stride_dqs, stride_dqd, WIDE, ALIGNMENT)
        _store(
            grad_q_ptr, grad_q_tail_offsets, grad_q_tail * scale, mask_q, tail, HEAD_DIM, MASK_TAIL
        )


@triton.jit
def _cut(
    x_ptr,
    slices_ptr,
    stride_b,
    stride_h,
    stride_s,
    stride_d,
    num_heads,
    length,
    num_rows,
    HEAD_DIM: tl.constexpr,
    PADDED_D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes the slices of BLOCK rows of x, (batch, heads, length, HEAD_DIM) of any strides, dense:
    a row's in one.
    """
    SLICE: tl.constexpr = slice_elements(HEAD_DIM)
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    cols = tl.arange(0, PADDED_D)[None, :].to(tl.int64)
    head = rows // length
    starts = (head // num_heads).to(tl.int64) * stride_b + (head % num_heads).to(
        tl.int64
    ) * stride_h
    starts += (rows % length).to(tl.int64) * stride_s
    mask = (rows < num_rows)[:, None] & (cols < HEAD_DIM)
    x = tl.load(x_ptr + starts[:, None] + cols * stride_d, mask=mask, other=0.0)
    slices = _bf16_slices(x)
    to = slices_ptr + rows.to(tl.int64)[:, None] * (3 * SLICE) + cols
    for i in tl.static_range(3):
        tl.store(to + i * SLICE, slices[i].to(slices_ptr.dtype.element_ty), mask=mask)


@triton.jit(
    do_not_specialize=(
        "num_heads",
        "num_key_heads",
        "num_queries",
        "num_keys",
        "num_query_rows",
        "num_key_rows",
    )
)
def attention_slices_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    grad_out_ptr,
    q_slices_ptr,
    k_slices_ptr,
    v_slices_ptr,
    grad_out_slices_ptr,
    stride_qb,
    stride_qh,
    stride_qs,
    stride_qd,
    stride_kb,
    stride_kh,
    stride_ks,
    stride_kd,
    stride_vb,
    stride_vh,
    stride_vs,
    stride_vd,
    stride_gb,
    stride_gh,
    stride_gs,
    stride_gd,
    num_heads,
    num_key_heads,
    num_queries,
    num_keys,
    num_query_rows,
    num_key_rows,
    HEAD_DIM: tl.constexpr,
    PADDED_D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Cuts fp32 operands into slices of bf16: the second dimension of the grid is which; without
    grad_out, three.
    """
    which = tl.program_id(1)
    if which == 0:
        _cut(
            q_ptr,
            q_slices_ptr,
            stride_qb,
            stride_qh,
            stride_qs,
            stride_qd,
            num_heads,
            num_queries,
            num_query_rows,
            HEAD_DIM,
            PADDED_D,
            BLOCK,
        )
    elif which == 1:
        _cut(
            k_ptr,
            k_slices_ptr,
            stride_kb,
            stride_kh,
            stride_ks,
            stride_kd,
            num_key_heads,
            num_keys,
            num_key_rows,
            HEAD_DIM,
            PADDED_D,
            BLOCK,
        )
    elif which == 2:
        _cut(
            v_ptr,
            v_slices_ptr,
            stride_vb,
            stride_vh,
            stride_vs,
            stride_vd,
            num_key_heads,
            num_keys,
            num_key_rows,
            HEAD_DIM,
            PADDED_D,
            BLOCK,
        )
    elif grad_out_ptr is not None:
        _cut(
            grad_out_ptr,
            grad_out_slices_ptr,
            stride_gb,
            stride_gh,
            stride_gs,
            stride_gd,
            num_heads,
            num_queries,
            num_query_rows,
            HEAD_DIM,
            PADDED_D,
            BLOCK,
        )


# What TRITON_INTERPRET said when this module was imported: interpreted kernels run on CPU tensors.
IS_INTERPRETED = not isinstance(flash_attention_fwd_kernel, triton.JITFunction)
