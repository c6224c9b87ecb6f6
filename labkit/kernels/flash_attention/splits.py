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

from labkit.kernels.flash_attention.triton import start_of
from labkit.kernels.launch import Launch

MOST_SPLITS = 32

# What splitting costs, in the time of one tile (on an H200 1.4 us in 16 bits, several times that in
# fp32): the begin and end of a program, and the second kernel.
COST_OF_A_PROGRAM = 4
COST_OF_COMBINING = 7

# Elements that a program puts together, and of how many splits it loads them at once.
COMBINED_ELEMENTS = 512
SPLITS_AT_ONCE = 4


def num_splits_of(num_work_tiles: int, num_tiles: int, programs: int, causal: bool) -> int:
    """Returns among how many programs every loop is split; no split of the longest one is empty.

    The least time by a count of tiles: causal splits are of all lengths, begin with the longest,
    and end with it or when all are given out; full ones run in equal waves. Where `programs` was
    right the number chosen was near the fastest on an H200.

    Args:
        num_work_tiles: tiles of queries, of all heads and batches.
        num_tiles: of the longest loop.
        programs: how many run at once.
        causal: whether loops are of all lengths up to that, and not all as long.
    """

    def time(num_splits: int) -> float:
        longest = COST_OF_A_PROGRAM + triton.cdiv(num_tiles, num_splits)
        num_programs = num_work_tiles * num_splits
        combining = COST_OF_COMBINING if num_splits > 1 else 0
        if not causal:
            return triton.cdiv(num_programs, programs) * longest + combining
        mean = COST_OF_A_PROGRAM + (num_tiles + 1) / 2 / num_splits
        return max(longest, num_programs * mean / programs) + combining

    num_splits = min(range(1, min(num_tiles, MOST_SPLITS) + 1), key=time)
    return triton.cdiv(num_tiles, triton.cdiv(num_tiles, num_splits))


@triton.jit(do_not_specialize=["num_rows", "length", "num_heads", "num_splits"])
def attention_combine_kernel(
    parts_ptr,
    parts_lse_ptr,
    out_ptr,
    lse_ptr,
    out_strides,
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
    tl.store(lse_ptr + rows, maximum + tl.log(divisor), mask=valid)
    head = rows // length
    starts = start_of(out_strides, head // num_heads, head % num_heads, rows % length, 1)
    out_ptrs = out_ptr + starts[:, None] + cols[None, :]
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=mask)


def row_elements(head_dim: int) -> int:
    """Returns how many elements lie between rows of parts: whole tiles of 16 columns are
    written.
    """
    return -(-head_dim // 16) * 16


def combine_launch(out, num_splits: int) -> tuple[Launch, tuple]:
    """Returns what combines the parts that splits write of an output, whose 4D layout this is, and
    the layouts of those, fp32: (splits, rows, `row_elements`) of the output, and (splits, rows) of
    the log-sum-exp. It is called with both, the output and the log-sum-exp.
    """
    batch, num_heads, length, head_dim = out.shape
    num_rows = batch * num_heads * length
    padded = triton.next_power_of_2(head_dim)
    block = COMBINED_ELEMENTS // padded
    row = row_elements(head_dim)
    flags = {
        "HEAD_DIM": head_dim,
        "PADDED": padded,
        "ROW": row,
        "BLOCK": block,
        "STAGES": SPLITS_AT_ONCE,
    }
    numbers = (out.strides[:3], num_rows, length, num_heads, num_splits)
    launch = Launch(attention_combine_kernel, (triton.cdiv(num_rows, block),), flags, numbers)
    shapes = ((num_splits, num_rows, row), (num_splits, num_rows))
    return launch, tuple(
        out._replace(shape=shape, dtype=torch.float32).contiguous() for shape in shapes
    )
