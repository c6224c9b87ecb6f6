"""The kernels of FlashAttention-2 in Triton; plan.py launches them, tiles.py has their tiles.

How they are laid out:
- A program owns a tile of rows and loops over tiles of the other length, or of a part of it
  (split-K); tiles that every row sees in full take no masking.
- exp2 with log2(e)·scale folded in: one multiply-add and one exponential per score.
- ∂K and ∂V are what ∂Q is with the roles of queries and keys exchanged, so that one kernel computes
  either. For keys it computes Sᵀ and ∂Pᵀ directly: a transposed result as an operand gave wrong
  gradients on Hopper (triton issue 6124), and this way Pᵀ and ∂Sᵀ stay in registers.
- A head dimension that is no power of two is a power of two and a narrower tail (72 = 64 + 16, 96 =
  64 + 32), so that 72 and 80 do not pay for 128. A tile is a tuple of those parts.
- fp32 is several products on the tensor cores for one: three of TF32, whose operands are split in
  registers, or six of bf16 between three slices of each, which a kernel cuts beforehand. An operand
  is a tuple of its slices.

Formulas, shapes and ideal costs stand in op.py. Backward is two launches, dK/dV and then dQ,
14·Q·K·D FLOPs a head: nothing is added from several programs, so that bits are equal every time.

Source: Dao 2023, "FlashAttention-2", algorithms 1 and 2.
"""

import math

import triton
import triton.language as tl

DELTA_BLOCK_Q = tl.constexpr(32)

# No query tile is longer, so that the statistics of a whole tile are always there to load.
STATISTICS_PADDING = tl.constexpr(128)

NUM_SLICES = 3
"""Slices of 8 bits that an operand of fp32 is cut into for six products of bf16."""

LOG2_E = math.log2(math.e)

# Causal work tiles that are ordered by the length of their loops: about two for each program that
# runs at once.
SECTION_TILES = tl.constexpr(512)

# Plain numbers to the kernels: a length of 1, or one divisible by 16, is no reason to compile them
# anew.
LENGTHS = ("max_queries", "max_keys", "max_own", "max_other", "num_heads", "num_sequences")
LENGTHS += ("left", "right", "before", "after", "num_counters")


@triton.constexpr_function
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


@triton.constexpr_function
def is_padded(head_dim: int, width: int) -> bool:
    """Returns whether the last part of a head dimension is wider than what it holds."""
    return head_dim % width != 0


@triton.constexpr_function
def slice_elements(head_dim: int) -> int:
    """Returns how many elements lie between the slices of a row: each starts on a 16-byte
    boundary.
    """
    return -(-head_dim // 8) * 8


# ---- tiles and their products --------------------------------------------------------------------


@triton.jit
def _columns(HEAD_DIM: tl.constexpr, ALIGNMENT: tl.constexpr):
    """The columns of each part of a head dimension."""
    WIDTHS: tl.constexpr = split_head_dim(HEAD_DIM, ALIGNMENT > 1)
    columns = (tl.arange(0, WIDTHS[0]),)
    if WIDTHS[1]:
        columns += (WIDTHS[0] + tl.arange(0, WIDTHS[1]),)
    return columns


@triton.jit
def start_of(strides, batch, head, row, ALIGNMENT: tl.constexpr):
    """The offset of a row from the first of a tensor, in int64: tensors of more than 2³¹ elements
    exist.
    """
    offset = tl.cast(batch, tl.int64) * strides[0] + tl.cast(head, tl.int64) * strides[1]
    offset += tl.cast(row, tl.int64) * strides[2]
    if ALIGNMENT > 1:
        # A row stride of 72 is divisible by 8 but not by 16, the only divisor that Triton finds out
        # by itself; without this hint the loads fall apart into single elements.
        offset = tl.multiple_of(offset, ALIGNMENT)
    return offset


@triton.jit
def _offsets(rows, cols, stride, ALIGNMENT: tl.constexpr):
    """Element offsets of a tile from its first row."""
    row_offsets = rows * stride
    if ALIGNMENT > 1:
        row_offsets = tl.multiple_of(row_offsets, ALIGNMENT)
    return row_offsets[:, None] + cols[None, :]


@triton.jit
def _bf16_slices(x):
    """Three numbers of 8 bits each, as bf16 has them, whose sum is x exactly."""
    high = (x.to(tl.int32, bitcast=True) & -0x10000).to(tl.float32, bitcast=True)
    rest = x - high
    middle = (rest.to(tl.int32, bitcast=True) & -0x10000).to(tl.float32, bitcast=True)
    return high, middle, rest - middle


@triton.jit
def _operand(x, DTYPE: tl.constexpr, PRECISION: tl.constexpr):
    """x as an operand of a product: a tuple of its slices, or of itself."""
    if PRECISION == "bf16x6":
        high, middle, low = _bf16_slices(x)
        operand = (high.to(DTYPE), middle.to(DTYPE), low.to(DTYPE))
    else:
        operand = (x.to(DTYPE),)
    return operand


@triton.jit
def _load(
    ptr,
    strides,
    batch,
    head,
    first_row,
    rows,
    row_mask,
    columns,
    HEAD_DIM: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """A tile as operands, one for each part of the head dimension; zero where it has no element.

    The slices of a row, as `attention_slices_kernel` cuts it, lie behind one another.
    """
    SLICE: tl.constexpr = slice_elements(HEAD_DIM)
    ptr += start_of(strides, batch, head, first_row, ALIGNMENT)
    parts = ()
    for i in tl.static_range(len(columns)):
        pointers = ptr + _offsets(rows, columns[i], strides[2], ALIGNMENT)
        inside = None if row_mask is None else row_mask[:, None]
        if i == len(columns) - 1 and is_padded(HEAD_DIM, columns[i].shape[0]):
            existing = (columns[i] < HEAD_DIM)[None, :]
            inside = existing if inside is None else inside & existing
        other = None if inside is None else 0.0
        tile = tl.load(pointers, mask=inside, other=other)
        if PRECISION == "bf16x6":
            middle = tl.load(pointers + SLICE, mask=inside, other=other)
            low = tl.load(pointers + 2 * SLICE, mask=inside, other=other)
            operand = (tile, middle, low)
        else:
            operand = _operand(tile, tile.dtype, PRECISION)
        parts += (operand,)
    return parts


@triton.jit
def _store(
    ptr,
    strides,
    batch,
    head,
    first_row,
    rows,
    row_mask,
    columns,
    parts,
    factor,
    HEAD_DIM: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    """Writes the accumulators times a factor."""
    ptr += start_of(strides, batch, head, first_row, ALIGNMENT)
    for i in tl.static_range(len(columns)):
        inside = row_mask[:, None]
        if i == len(columns) - 1 and is_padded(HEAD_DIM, columns[i].shape[0]):
            inside = inside & (columns[i] < HEAD_DIM)[None, :]
        tile = (parts[i] * factor).to(ptr.dtype.element_ty)
        tl.store(ptr + _offsets(rows, columns[i], strides[2], ALIGNMENT), tile, mask=inside)


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
def _inner_product(a, b, acc, PRECISION: tl.constexpr):
    """acc + a bᵀ, over all parts of the head dimension."""
    for i in tl.static_range(len(a)):
        acc = _product(a[i], b[i], acc, True, PRECISION)
    return acc


@triton.jit
def _accumulate(weights, tile, acc, PRECISION: tl.constexpr):
    """acc + weights · tile, each part of the head dimension for itself."""
    parts = ()
    for i in tl.static_range(len(tile)):
        parts += (_product(weights, tile[i], acc[i], False, PRECISION),)
    return parts


@triton.jit
def _zeros(NUM_ROWS: tl.constexpr, columns):
    """Accumulators, one for each part of the head dimension."""
    return [tl.zeros((NUM_ROWS, cols.shape[0]), dtype=tl.float32) for cols in columns]


# ---- which tile, which rows ----------------------------------------------------------------------


@triton.jit
def _begin_of(cu_ptr, batch, num_sequences, num_rows):
    """Where a sequence of a packed batch begins and the one before it ends.

    It lies within the rows, whatever cumulative lengths say that nobody has checked.
    """
    inner = (batch > 0) & (batch < num_sequences)
    begin = tl.load(cu_ptr + batch, mask=inner, other=0)
    return tl.minimum(tl.maximum(tl.where(batch < num_sequences, begin, num_rows), 0), num_rows)


@triton.jit
def _sequence(cu_ptr, batch, num_sequences, num_rows, HAS_REST: tl.constexpr):
    """The first row of a sequence and its number of rows.

    The last sequence of a packed batch is the rows behind all others (HAS_REST), which see no row
    of another tensor.
    """
    first = tl.cast(0, tl.int64)
    length = num_rows
    if cu_ptr is not None:
        begin = _begin_of(cu_ptr, batch, num_sequences, num_rows)
        end = _begin_of(cu_ptr, batch + 1, num_sequences, num_rows)
        length = tl.maximum(end - begin, 0).to(tl.int32)
        if not HAS_REST:
            length = tl.where(batch + 1 < num_sequences, length, 0)
        first = begin.to(tl.int64)
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
    first_tile = _begin_of(cu_ptr, batch, num_sequences, num_rows) // BLOCK + batch
    return batch, tile - first_tile.to(tl.int32)


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
):
    """A program's tile of BLOCK rows, head, batch and split.

    UNEQUAL: the tiles with the longest loops start first, so that they do not end last: a causal
    head's last queries (LONGEST_LAST), or its first keys. That order is over sections of heads
    whose keys stay in the cache.
    """
    program = tl.program_id(0)
    num_tiles = tl.cdiv(max_length, BLOCK)
    if cu_ptr is not None:
        num_tiles = tl.num_programs(0) // num_heads
    section = tl.cdiv(SECTION_TILES, num_tiles) if UNEQUAL else 1
    first_head = program // (section * num_tiles) * section
    width = tl.minimum(section, tl.num_programs(0) // num_tiles - first_head) if UNEQUAL else 1
    place = program - first_head * num_tiles
    tile = place // width
    # Splits are heads of their own.
    head_split = first_head + place % width
    split = head_split % num_splits
    head = head_split // num_splits % num_heads
    batch = head_split // num_splits // num_heads
    if LONGEST_LAST:
        tile = num_tiles - 1 - tile
    if cu_ptr is not None:
        batch, tile = _sequence_of(tile, cu_ptr, num_sequences, max_length, BLOCK)
    return tile, head, batch, split


@triton.jit
def _statistics_row(first_q, batch, cu_q_ptr):
    """Where a sequence's row statistics begin: sequences are padded so that whole tiles load
    without a mask.
    """
    row = first_q
    if cu_q_ptr is not None:
        row += tl.cast(batch, tl.int64) * STATISTICS_PADDING
        row = row // STATISTICS_PADDING * STATISTICS_PADDING
    return row


@triton.jit
def _bounds(
    position,
    length,
    before,
    after,
    OWN_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_BEFORE: tl.constexpr,
    HAS_AFTER: tl.constexpr,
    WHOLE_TILES: tl.constexpr,
    UNMASKED_LOOP: tl.constexpr,
):
    """Four bounds of three loops over the other length: with masks, over tiles that every own row
    sees in full, and with masks again. The first is empty without a window.

    `position` is that of the first own row among the others; it sees as many `before` and `after`
    it. WHOLE_TILES: a tile that reaches past the length takes masks.
    """
    begin = tl.cast(0, tl.int32)
    end = length
    full_begin = begin
    full_end = length // BLOCK * BLOCK if WHOLE_TILES else length
    if HAS_AFTER:
        end = tl.maximum(tl.minimum(end, position + OWN_BLOCK + after), 0)
        full_end = tl.maximum(tl.minimum(full_end, (position + after + 1) // BLOCK * BLOCK), 0)
    if HAS_BEFORE:
        begin = tl.maximum(position - before, 0) // BLOCK * BLOCK
        full_begin = tl.maximum(position + OWN_BLOCK - 1 - before, 0)
        full_begin = tl.maximum(tl.minimum(full_begin, end), begin)
        # The masked tiles before the full ones end on a tile boundary, so that none is met twice.
        full_begin = (full_begin + BLOCK - 1) // BLOCK * BLOCK
        full_end = tl.maximum(full_end, full_begin)
    if not UNMASKED_LOOP:
        full_begin = begin
        full_end = begin
    return begin, full_begin, full_end, end


@triton.jit
def _visible(
    positions, others, length, before, after, HAS_BEFORE: tl.constexpr, HAS_AFTER: tl.constexpr
):
    """Which of the others each own row sees, whose positions are among them."""
    positions = positions[:, None]
    others = others[None, :]
    visible = others < length
    if HAS_AFTER:
        visible = visible & (others <= positions + after)
    if HAS_BEFORE:
        visible = visible & (others >= positions - before)
    return visible


# ---- forward -------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=LENGTHS)
def flash_attention_fwd_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    cu_q_ptr,
    cu_k_ptr,
    q_strides,  # of all tensors: batch, head, row
    k_strides,
    v_strides,
    out_strides,
    lse_strides,
    num_heads,
    group,
    max_queries,
    max_keys,
    num_sequences,
    num_splits,
    scale_log2,
    left,
    right,
    HEAD_DIM: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    SPLIT_K: tl.constexpr,
    PRECISION: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    UNMASKED_LOOP: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """One program: the output and the log-sum-exp of BLOCK_Q queries of one head.

    SPLIT_K: over one of `num_splits` parts of their keys; the results of a split lie behind those
    of the one before.
    """
    IS_CAUSAL: tl.constexpr = HAS_RIGHT and not HAS_LEFT
    tile, head, batch, split = _decode_program_id(
        max_queries,
        num_heads,
        num_splits,
        cu_q_ptr,
        num_sequences,
        BLOCK_Q,
        IS_CAUSAL,
        HAS_RIGHT,
    )
    first_q, num_queries = _sequence(cu_q_ptr, batch, num_sequences, max_queries, True)
    first_k, num_keys = _sequence(cu_k_ptr, batch, num_sequences, max_keys, False)
    q_begin = tile * BLOCK_Q
    if q_begin >= num_queries:
        return

    rows_q = tl.arange(0, BLOCK_Q)
    rows_k = tl.arange(0, BLOCK_K)
    mask_q = rows_q < num_queries - q_begin
    columns = _columns(HEAD_DIM, ALIGNMENT)
    DTYPE: tl.constexpr = q_ptr.dtype.element_ty
    key_head = head // group
    row_q = first_q + q_begin
    where = (head, row_q, rows_q, mask_q, columns)
    q = _load(q_ptr, q_strides, batch, *where, HEAD_DIM, ALIGNMENT, PRECISION)
    acc = _zeros(BLOCK_Q, columns)
    maximum = tl.full((BLOCK_Q,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_Q,), dtype=tl.float32)
    position = num_keys - num_queries + q_begin
    bounds = _bounds(
        position,
        num_keys,
        left,
        right,
        BLOCK_Q,
        BLOCK_K,
        HAS_LEFT,
        HAS_RIGHT,
        True,
        UNMASKED_LOOP,
    )
    if SPLIT_K:
        # One of equal parts of the only loop; the last parts may be empty.
        begin = bounds[0]
        num_tiles = tl.cdiv(tl.maximum(bounds[3] - begin, 0), BLOCK_K)
        length = tl.cdiv(num_tiles, num_splits) * BLOCK_K
        begin = tl.minimum(begin + split * length, bounds[3])
        bounds = (begin, begin, begin, tl.minimum(begin + length, bounds[3]))
    # Keys before, on and after the tiles that every query sees. A second loop behind the first
    # makes ptxas serialise the matrix products of both (C7515) where it only exists for a last
    # partial tile, so that none is emitted then: keys that fill their tiles take one loop without
    # masks, others one loop with masks.
    for stage in tl.static_range(
        2 if not UNMASKED_LOOP else (0 if HAS_LEFT else 1),
        2 if UNMASKED_LOOP and EVEN_K and not HAS_RIGHT else 3,
    ):
        for start in tl.range(bounds[stage], bounds[stage + 1], BLOCK_K):
            mask_k = None
            if stage != 1 and not EVEN_K:
                mask_k = rows_k < num_keys - start
            where_k = (batch, key_head, first_k + start, rows_k)
            k = _load(k_ptr, k_strides, *where_k, mask_k, columns, HEAD_DIM, ALIGNMENT, PRECISION)
            scores = _inner_product(q, k, None, PRECISION)
            if stage != 1:
                visible = _visible(
                    position + rows_q,
                    start + rows_k,
                    num_keys,
                    left,
                    right,
                    HAS_LEFT,
                    HAS_RIGHT,
                )
                scores = tl.where(visible, scores, float("-inf"))
            new_maximum = tl.maximum(maximum, tl.max(scores, axis=1) * scale_log2)
            # While a row has seen no key its maximum is −inf, and −inf − (−inf) would be NaN.
            shift = new_maximum
            if stage != 1:
                shift = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
            p = tl.exp2(scores * scale_log2 - shift[:, None])
            rescale = tl.exp2(maximum - shift)
            total = total * rescale + tl.sum(p, axis=1)
            v = _load(v_ptr, v_strides, *where_k, mask_k, columns, HEAD_DIM, ALIGNMENT, PRECISION)
            acc = [part * rescale[:, None] for part in acc]
            acc = _accumulate(_operand(p, DTYPE, PRECISION), v, acc, PRECISION)
            maximum = new_maximum

    # A row without any key: zeros, and −inf.
    divisor = tl.where(total == 0.0, 1.0, total)
    result = batch + split * num_sequences
    factor = 1 / divisor[:, None]
    _store(out_ptr, out_strides, result, *where, acc, factor, HEAD_DIM, ALIGNMENT)
    lse = (maximum + tl.log2(divisor)) * 0.6931471805599453
    lse_ptr += start_of(lse_strides, result, head, row_q, 1)
    tl.store(lse_ptr + rows_q, lse, mask=mask_q)


# ---- backward ------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=LENGTHS)
def flash_attention_bwd_delta_kernel(
    out_ptr,
    grad_out_ptr,
    lse_ptr,
    lse_log2_ptr,
    delta_ptr,
    counters_ptr,
    cu_q_ptr,
    out_strides,
    grad_out_strides,
    lse_strides,
    statistics_strides,
    num_heads,
    max_queries,
    num_sequences,
    num_counters,
    HEAD_DIM: tl.constexpr,
    PADDED_D: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    """One program: rowsum(∂O ∘ O) of a few queries, and their log-sum-exp in base 2, for the
    kernels after it; and zeros for their counters, if they have any.

    It fills the padding too, with 0 and +∞: exp2(· − ∞) = 0 then keeps what lies beyond a sequence
    out of every sum.
    """
    # Heads one after another: where they lie inside the rows, neighbours read the same rows.
    head = tl.program_id(0) % num_heads
    begin = tl.program_id(0) // num_heads * DELTA_BLOCK_Q
    if cu_q_ptr is not None:
        tile = begin // STATISTICS_PADDING
        batch, tile = _sequence_of(tile, cu_q_ptr, num_sequences, max_queries, STATISTICS_PADDING)
    else:
        num_tiles = tl.cdiv(max_queries, STATISTICS_PADDING)
        batch = begin // STATISTICS_PADDING // num_tiles
        tile = begin // STATISTICS_PADDING % num_tiles
    first_q, num_queries = _sequence(cu_q_ptr, batch, num_sequences, max_queries, True)
    begin = tile * STATISTICS_PADDING + begin % STATISTICS_PADDING
    rows = tl.arange(0, DELTA_BLOCK_Q)
    mask = rows < num_queries - begin
    where = (batch, head, first_q + begin, rows, mask, (tl.arange(0, PADDED_D),))
    out = _load(out_ptr, out_strides, *where, HEAD_DIM, ALIGNMENT, "ieee")
    grad_out = _load(grad_out_ptr, grad_out_strides, *where, HEAD_DIM, ALIGNMENT, "ieee")
    delta = tl.sum(out[0][0].to(tl.float32) * grad_out[0][0].to(tl.float32), axis=1)
    lse_ptr += start_of(lse_strides, batch, head, first_q + begin, 1)
    lse = tl.load(lse_ptr + rows, mask=mask, other=float("-inf"))
    # A row that saw no key passes no gradient on either.
    lse_log2 = tl.where(lse == float("-inf"), float("inf"), lse * 1.4426950408889634)
    first = _statistics_row(first_q, batch, cu_q_ptr)
    statistics = start_of(statistics_strides, batch, head, first + begin, 1) + rows
    padded = rows < tl.cdiv(num_queries, STATISTICS_PADDING) * STATISTICS_PADDING - begin
    tl.store(delta_ptr + statistics, delta, mask=padded)
    tl.store(lse_log2_ptr + statistics, lse_log2, mask=padded)
    if counters_ptr is not None:
        step = tl.num_programs(0) * DELTA_BLOCK_Q
        for start in range(tl.program_id(0) * DELTA_BLOCK_Q, num_counters, step):
            counter = start + tl.arange(0, DELTA_BLOCK_Q)
            tl.store(counters_ptr + counter, 0, mask=counter < num_counters)


@triton.jit(
    do_not_specialize=LENGTHS,
    repr=lambda x: f"flash_attention_bwd_{'dkdv' if x.constants['OF_KEYS'] else 'dq'}_kernel",
)
def flash_attention_bwd_kernel(
    own_ptrs,  # keys and values, or queries and the gradient of the output
    other_ptrs,  # the two others
    lse_log2_ptr,
    delta_ptr,
    grad_ptrs,  # of the own
    cu_own_ptr,
    cu_other_ptr,
    own_strides,
    other_strides,
    grad_strides,
    statistics_strides,
    num_heads,
    group,
    max_own,
    max_other,
    num_sequences,
    scale_log2,
    scale,
    before,
    after,
    OF_KEYS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    OWN_BLOCK: tl.constexpr,
    OTHER_BLOCK: tl.constexpr,
    HAS_BEFORE: tl.constexpr,
    HAS_AFTER: tl.constexpr,
    PRECISION: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    UNMASKED_LOOP: tl.constexpr,
    EVEN: tl.constexpr,
):
    """One program: ∂K and ∂V of OWN_BLOCK keys of one key head, over all queries of the head's
    group (OF_KEYS), or ∂Q of OWN_BLOCK queries of one head.

    Of both pairs the first makes S = own other', the second ∂P = own other'; ∂own of the first is
    ∂S other, that of the second P other. An own row sees others as far as `before` and `after` it.
    EVEN: the others fill their tiles.
    """
    # Causal: queries see no key after them, keys no query before them.
    IS_CAUSAL: tl.constexpr = HAS_BEFORE != HAS_AFTER and HAS_BEFORE == OF_KEYS
    tile, head, batch, _ = _decode_program_id(
        max_own,
        num_heads,
        1,
        cu_own_ptr,
        num_sequences,
        OWN_BLOCK,
        IS_CAUSAL,
        HAS_AFTER and not OF_KEYS,
    )
    first_own, num_own = _sequence(cu_own_ptr, batch, num_sequences, max_own, True)
    first_other, num_other = _sequence(cu_other_ptr, batch, num_sequences, max_other, False)
    own_begin = tile * OWN_BLOCK
    if cu_own_ptr is not None:
        if own_begin >= num_own:
            return

    rows_own = tl.arange(0, OWN_BLOCK)
    rows_other = tl.arange(0, OTHER_BLOCK)
    mask_own = rows_own < num_own - own_begin
    columns = _columns(HEAD_DIM, ALIGNMENT)
    DTYPE: tl.constexpr = own_ptrs[0].dtype.element_ty
    own_row = first_own + own_begin
    where = (batch, head, own_row, rows_own, mask_own, columns)
    own_x = _load(own_ptrs[0], own_strides[0], *where, HEAD_DIM, ALIGNMENT, PRECISION)
    own_y = _load(own_ptrs[1], own_strides[1], *where, HEAD_DIM, ALIGNMENT, PRECISION)
    grad_x = _zeros(OWN_BLOCK, columns)
    grad_y = _zeros(OWN_BLOCK, columns)

    row = _statistics_row(first_other if OF_KEYS else first_own, batch, cu_own_ptr)
    if not OF_KEYS:
        statistics = start_of(statistics_strides, batch, head, row + own_begin, 1) + rows_own
        lse_log2 = tl.load(lse_log2_ptr + statistics)[:, None]
        delta = tl.load(delta_ptr + statistics)[:, None]

    position = num_other - num_own + own_begin
    bounds = _bounds(
        position,
        num_other,
        before,
        after,
        OWN_BLOCK,
        OTHER_BLOCK,
        HAS_BEFORE,
        HAS_AFTER,
        not OF_KEYS,
        UNMASKED_LOOP,
    )
    for member in range(group if OF_KEYS else 1):
        other_head = head * group + member if OF_KEYS else head // group
        if OF_KEYS:
            statistics = start_of(statistics_strides, batch, other_head, row, 1)
        # Queries beyond the last are loaded as zeros and have a log-sum-exp of +∞, so that they add
        # nothing anywhere, and only a mask's edges are masked for keys.
        for stage in tl.static_range(
            2 if not UNMASKED_LOOP else (0 if HAS_BEFORE else 1),
            2 if UNMASKED_LOOP and (EVEN or OF_KEYS) and not HAS_AFTER else 3,
        ):
            for start in tl.range(bounds[stage], bounds[stage + 1], OTHER_BLOCK):
                mask = None
                if not EVEN and (OF_KEYS or stage != 1):
                    mask = rows_other < num_other - start
                where_other = (batch, other_head, first_other + start, rows_other)
                x = _load(
                    other_ptrs[0],
                    other_strides[0],
                    *where_other,
                    mask,
                    columns,
                    HEAD_DIM,
                    ALIGNMENT,
                    PRECISION,
                )
                y = _load(
                    other_ptrs[1],
                    other_strides[1],
                    *where_other,
                    mask,
                    columns,
                    HEAD_DIM,
                    ALIGNMENT,
                    PRECISION,
                )
                if OF_KEYS:
                    delta = tl.load(delta_ptr + statistics + start + rows_other)[None, :]
                scores = _inner_product(own_x, x, None, PRECISION)
                # ∂P − D straight from the accumulator: D occupies no registers of its own, and the
                # product runs under the exponentials.
                grad_p = tl.broadcast_to(-delta, (OWN_BLOCK, OTHER_BLOCK))
                grad_p = _inner_product(own_y, y, grad_p, PRECISION)
                if OF_KEYS:
                    lse_log2 = tl.load(lse_log2_ptr + statistics + start + rows_other)[None, :]
                p = tl.exp2(scores * scale_log2 - lse_log2)
                if stage != 1 and (HAS_BEFORE or HAS_AFTER or not OF_KEYS):
                    visible = _visible(
                        position + rows_own,
                        start + rows_other,
                        num_other,
                        before,
                        after,
                        HAS_BEFORE,
                        HAS_AFTER,
                    )
                    p = tl.where(visible, p, 0.0)
                if OF_KEYS:
                    grad_y = _accumulate(_operand(p, DTYPE, PRECISION), y, grad_y, PRECISION)
                grad_scores = _operand(p * grad_p, DTYPE, PRECISION)
                grad_x = _accumulate(grad_scores, x, grad_x, PRECISION)

    _store(grad_ptrs[0], grad_strides[0], *where, grad_x, scale, HEAD_DIM, ALIGNMENT)
    if OF_KEYS:
        _store(grad_ptrs[1], grad_strides[1], *where, grad_y, 1.0, HEAD_DIM, ALIGNMENT)


@triton.jit
def attention_slices_kernel(
    x_ptrs,
    slices_ptrs,
    strides,
    num_heads,
    lengths,
    num_rows,
    HEAD_DIM: tl.constexpr,
    PADDED_D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Cuts BLOCK rows of an fp32 tensor, (batch, heads, length, HEAD_DIM), into slices of bf16,
    those of a row behind one another: the second dimension of the grid is of which tensor.
    """
    SLICE: tl.constexpr = slice_elements(HEAD_DIM)
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    cols = tl.arange(0, PADDED_D)[None, :]
    for i in tl.static_range(len(x_ptrs)):
        if tl.program_id(1) == i:
            head = rows // lengths[i]
            batch = head // num_heads[i]
            starts = start_of(strides[i], batch, head % num_heads[i], rows % lengths[i], 1)
            mask = (rows < num_rows[i])[:, None] & (cols < HEAD_DIM)
            slices = _bf16_slices(tl.load(x_ptrs[i] + starts[:, None] + cols, mask=mask, other=0.0))
            room = slices_ptrs[i] + rows.to(tl.int64)[:, None] * (3 * SLICE) + cols
            for j in tl.static_range(3):
                part = slices[j].to(slices_ptrs[i].dtype.element_ty)
                tl.store(room + j * SLICE, part, mask=mask)
