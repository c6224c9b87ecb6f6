"""Split-K: splitting a forward pass's loop over keys among several programs.

Where programs are few, most multiprocessors are idle: the keys of each are then split, every split
writes its output in fp32 and its log-sum-exp, and a second kernel combines them.

    O = Σ_s exp(L_s − L) O_s    L = log Σ_s exp L_s

The splits are added in a fixed order, so that results are equal bit for bit between runs.

Source: Dao et al. 2023, "Flash-Decoding for long-context inference".
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from labkit.kernels.launch import Launch

# The fewest tiles of a split, by bytes of an element, and the most splits.
TILES_OF_A_SPLIT = {2: 2, 4: 1}
MOST_SPLITS = 32

# What splitting costs, in the time of one tile (on an H200 1.4 us in 16 bits, several times that in
# fp32): the begin and end of a program; by bytes of an element, the second kernel, which takes the
# host longer to launch than the device to run; its KiB; and a tile of a causal split, in which
# every tile is masked.
COST_OF_A_PROGRAM = 4.0
COST_OF_COMBINING = {2: 6.5, 4: 2.5}
COST_OF_A_KIB = {2: 0.0004, 4: 0.0001}
COST_OF_A_MASKED_TILE = {2: 1.1, 4: 1.0}

# What a program puts together, four elements to a thread, twice that where programs would be many,
# and of how many splits it loads at once.
COMBINED_ELEMENTS = 512
MANY_PROGRAMS = 1024
SPLITS_AT_ONCE = 4


def num_splits_of(
    num_work_tiles: int,
    num_tiles: int,
    programs: int,
    causal: bool,
    *,
    part_kib: float,
    itemsize: int = 2,
) -> int:
    """Returns among how many programs every loop is split; no split of the longest one is empty.

    The least time by a count of tiles: causal splits are of all lengths, begin with the longest,
    and end with it or when all are given out; full ones run in equal waves. It is as good as
    `programs`: where that was right the number chosen was within 10 % of the fastest on an H200.

    Args:
        num_work_tiles: tiles of queries, of all heads and batches.
        num_tiles: of the longest loop.
        programs: how many run at once.
        causal: whether loops are of all lengths up to that, and not all as long.
        part_kib: what one program leaves for the second kernel, in KiB.
        itemsize: bytes of an element of q, k and v.
    """

    def cost(num_splits: int) -> float:
        tile = COST_OF_A_MASKED_TILE[itemsize] if causal and num_splits > 1 else 1.0
        longest = COST_OF_A_PROGRAM + tile * -(-num_tiles // num_splits)
        if causal:
            mean = COST_OF_A_PROGRAM + tile * (num_tiles + 1) / 2 / num_splits
            time = max(longest, num_work_tiles * num_splits * mean / programs)
        else:
            time = -(-num_work_tiles * num_splits // programs) * longest
        if num_splits == 1:
            return time
        written_kib = part_kib * num_work_tiles * num_splits
        return time + COST_OF_COMBINING[itemsize] + COST_OF_A_KIB[itemsize] * written_kib

    most = max(1, min(num_tiles // TILES_OF_A_SPLIT[itemsize], MOST_SPLITS))
    tiles = (-(-num_tiles // num_splits) for num_splits in range(1, most + 1))
    return min((-(-num_tiles // tiles_each) for tiles_each in tiles), key=cost)


@triton.jit(do_not_specialize=["num_rows", "length", "num_heads", "num_splits"])
def attention_combine_kernel(
    parts_ptr,
    parts_lse_ptr,
    out_ptr,
    lse_ptr,
    stride_ob,
    stride_oh,
    stride_os,
    stride_od,
    num_rows,
    length,
    num_heads,
    num_splits,
    HEAD_DIM: tl.constexpr,
    PADDED: tl.constexpr,
    ROW: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """BLOCK rows of the output from those of all splits, weighted by their parts of Σ exp S. The
    next splits load while one is added.
    """
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    cols = tl.arange(0, PADDED)
    valid = rows < num_rows
    mask = valid[:, None] & (cols < HEAD_DIM)[None, :]
    part_ptrs = parts_ptr + rows.to(tl.int64)[:, None] * ROW + cols[None, :]
    out = tl.zeros((BLOCK, PADDED), dtype=tl.float32)
    lse_ptrs = parts_lse_ptr + rows
    maximum = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for _ in tl.range(num_splits, num_stages=STAGES):
        part = tl.load(part_ptrs, mask=mask, other=0.0)
        part_ptrs += num_rows.to(tl.int64) * ROW
        lse = tl.load(lse_ptrs, mask=valid, other=float("-inf"))
        lse_ptrs += num_rows
        new_maximum = tl.maximum(maximum, lse)
        # A row without any key: zeros, and −inf.
        shift = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        rescale = tl.exp(maximum - shift)
        weight = tl.exp(lse - shift)
        total = total * rescale + weight
        out = out * rescale[:, None] + part * weight[:, None]
        maximum = new_maximum
    divisor = tl.where(total == 0.0, 1.0, total)
    out = out / divisor[:, None]
    tl.store(
        lse_ptr + rows,
        tl.where(total == 0.0, float("-inf"), maximum + tl.log(divisor)),
        mask=valid,
    )
    head = rows // length
    at = (head // num_heads).to(tl.int64) * stride_ob + (head % num_heads).to(tl.int64) * stride_oh
    at += (rows % length).to(tl.int64) * stride_os
    out_ptrs = out_ptr + at[:, None] + cols.to(tl.int64)[None, :] * stride_od
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=mask)


def row_elements(head_dim: int) -> int:
    """Returns how many elements lie between rows of parts: whole tiles of 16 columns are
    written.
    """
    return -(-head_dim // 16) * 16


def empty_splits(num_splits: int, lse: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Returns room for what every split finds, fp32: (splits, rows, `row_elements`) numbers of the
    output, and (splits, rows) of the log-sum-exp; rows are those of `lse`, the whole one.
    """
    num_rows = num_splits * lse.numel()
    return (
        torch.empty(num_rows * row_elements(head_dim), dtype=torch.float32, device=lse.device),
        torch.empty(num_rows, dtype=torch.float32, device=lse.device),
    )


def combine_launch(shape: tuple[int, ...], strides: tuple[int, ...], num_splits: int) -> Launch:
    """Returns what combines all splits of an output of a shape, (B, H, S, D), and of strides.

    It is called with what `empty_splits` has room for, the output and the log-sum-exp.
    """
    batch, num_heads, length, head_dim = shape
    num_rows = batch * num_heads * length
    padded = triton.next_power_of_2(head_dim)
    block = max(1, COMBINED_ELEMENTS // padded)
    if triton.cdiv(num_rows, block) >= MANY_PROGRAMS:
        block *= 2
    flags = {
        "HEAD_DIM": head_dim,
        "PADDED": padded,
        "ROW": row_elements(head_dim),
        "BLOCK": block,
        "STAGES": SPLITS_AT_ONCE,
    }
    numbers = (*strides, num_rows, length, num_heads, num_splits)
    return Launch(attention_combine_kernel, (triton.cdiv(num_rows, block),), flags, numbers)
