"""Sums of a matrix's columns in Triton: the gradient of a bias, Σ_rows ∂y.

Memory bounds it: N·C elements are read. Programs share the rows, in fp32, and a second launch adds
their parts: no atomics, so bit-equal repeats.

Shape suffixes: N rows, C columns, P parts.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from labkit.kernels.fused import load_fp32, operator, runs_kernel, wide, wrap_triton
from labkit.kernels.launch import num_multiprocessors

# Tiles of the launch that adds parts, PROGRAMS for each multiprocessor, and of the one that adds
# those: a thousand rows, few columns, so a tall tile, whose loads are on their way at once. With 64
# rows and 32 columns the backward pass of a norm took 15.1 us for 8.2 on an H200 (2,048 rows of
# 768), and 62 for 57 (16,384 of 1,600).
PARTS = {"ROWS": 32, "COLUMNS": 64, "num_warps": 4}
ONE_PART = {"ROWS": 512, "COLUMNS": 16, "num_warps": 16}
PROGRAMS = 8


@triton.jit
def column_sums_kernel(
    x_ptr, sums_ptr, num_rows, num_columns, rows_a_part, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """One program adds COLUMNS columns of `rows_a_part` rows, in fp32; sums are (parts,
    columns).
    """
    cols = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    first = tl.program_id(1) * rows_a_part
    end = tl.minimum(first + rows_a_part, num_rows)
    sums = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(first, end, ROWS):
        rows = start + tl.arange(0, ROWS)[:, None]
        inside = (rows < end) & (cols < num_columns)
        sums += load_fp32(x_ptr + rows.to(tl.int64) * num_columns + cols, inside)
    place = sums_ptr + tl.program_id(1) * num_columns + cols
    tl.store(place, tl.sum(sums, axis=0, keep_dims=True), mask=cols < num_columns)


def add_columns(
    x_NC: Tensor, dtype: torch.dtype, num_parts: int = 1, tile: dict[str, int] = ONE_PART
) -> Tensor:
    """Returns the sums (P, C) of the columns of so many parts of a dense x (N, C), in one launch of
    an operator.
    """
    num_rows, num_columns = x_NC.shape
    rows_a_part = -(-num_rows // num_parts)
    sums_PC = x_NC.new_empty(num_parts, num_columns, dtype=dtype)
    grid = -(-num_columns // tile["COLUMNS"]), num_parts
    wrap_triton(column_sums_kernel)[grid](x_NC, sums_PC, num_rows, num_columns, rows_a_part, **tile)
    return sums_PC


@operator("column_sums")
def _column_sums(x_NC: Tensor) -> Tensor:
    programs = PROGRAMS * num_multiprocessors(x_NC.device.index)
    num_parts = max(1, programs // -(-int(x_NC.shape[1]) // PARTS["COLUMNS"]))
    return add_columns(add_columns(x_NC, torch.float32, num_parts, PARTS), x_NC.dtype).view(-1)


def column_sums(x: Tensor) -> Tensor:
    """Returns the sums (C,) of the columns of x (N, C), added in fp32 and rounded once.

    Args:
        x: fp32, bf16 or fp16, whose dtype the sums have; fp64 in plain PyTorch, sums in fp64.
    """
    return _column_sums(x.contiguous()) if runs_kernel(x) else wide(x).sum(0).to(x.dtype)
