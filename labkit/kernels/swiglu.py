"""SwiGLU's gate in Triton: silu(g) ∘ u, forward and backward in one pass each.

    y = g σ(g) ∘ u    ∂g = ∂y ∘ u ∘ σ(g) (1 + g (1 − σ(g)))    ∂u = ∂y ∘ g σ(g)
    σ(g) = 1/(1 + exp(−g))

Shapes: g, u, y (N rows, C columns). Memory bounds it. Elements moved: 3·N·C forward, 5·N·C
backward, which computes σ(g) again: nothing is kept but the inputs.

Source: Shazeer 2020, "GLU Variants Improve Transformer", equation 6.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import silu

from labkit.kernels.fused import (
    check,
    check_shape,
    operator,
    rows_of,
    runs_kernel,
    wide,
    wrap_triton,
)

TILE = 1024  # elements: 8 of a thread, loads of 16 bytes
WIDTHS = (1024, 512, 256)  # of a tile: the first that divides the columns, else the last


@triton.jit
def swiglu_fwd_kernel(
    gate_ptr,
    up_ptr,
    y_ptr,
    stride_g,
    stride_u,
    num_rows,
    num_columns,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One program computes a tile."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    cols = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (rows < num_rows) & (cols < num_columns)
    gate = tl.load(gate_ptr + rows * stride_g + cols, mask=inside).to(tl.float32)
    up = tl.load(up_ptr + rows * stride_u + cols, mask=inside).to(tl.float32)
    y = gate * tl.sigmoid(gate) * up
    tl.store(y_ptr + rows * num_columns + cols, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def swiglu_bwd_kernel(
    gate_ptr,
    up_ptr,
    grad_y_ptr,
    grad_gate_ptr,
    grad_up_ptr,
    stride_g,
    stride_u,
    stride_gy,
    num_rows,
    num_columns,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One program computes a tile of both gradients."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    cols = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (rows < num_rows) & (cols < num_columns)
    gate = tl.load(gate_ptr + rows * stride_g + cols, mask=inside).to(tl.float32)
    up = tl.load(up_ptr + rows * stride_u + cols, mask=inside).to(tl.float32)
    grad_y = tl.load(grad_y_ptr + rows * stride_gy + cols, mask=inside).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    grad_gate = grad_y * up * sigmoid * (1 + gate * (1 - sigmoid))
    tl.store(
        grad_gate_ptr + rows * num_columns + cols,
        grad_gate.to(grad_gate_ptr.dtype.element_ty),
        mask=inside,
    )
    grad_up = grad_y * gate * sigmoid
    tl.store(
        grad_up_ptr + rows * num_columns + cols,
        grad_up.to(grad_up_ptr.dtype.element_ty),
        mask=inside,
    )


def _tiling(x_NC: Tensor) -> tuple[tuple[int, int], dict[str, int]]:
    """Returns the grid and the tile of a program."""
    width = next((width for width in WIDTHS if x_NC.shape[1] % width == 0), WIDTHS[-1])
    tile = {"ROWS": TILE // width, "COLUMNS": width}
    return tuple(
        -(-size // of_tile) for size, of_tile in zip(x_NC.shape, tile.values(), strict=True)
    ), tile


def _rows(*tensors: Tensor) -> list[Tensor]:
    """Returns the tensors as (rows, columns), dense ones in rows of a tile: its elements are then
    adjacent.
    """
    if tensors[0].numel() % WIDTHS[0] == 0 and all(x.is_contiguous() for x in tensors):
        return [x.view(-1, WIDTHS[0]) for x in tensors]
    return [rows_of(x) for x in tensors]


@operator("swiglu")
def _forward(gate: Tensor, up: Tensor) -> Tensor:
    y, read = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device), _rows(gate, up)
    if y.numel():
        (grid, tile), strides = _tiling(read[0]), [x_NC.stride(0) for x_NC in read]
        wrap_triton(swiglu_fwd_kernel)[grid](*read, y, *strides, *read[0].shape, **tile)
    return y


@operator("swiglu_backward")
def _backward(gate: Tensor, up: Tensor, grad_y: Tensor) -> tuple[Tensor, Tensor]:
    grad_gate, grad_up = (
        torch.empty(gate.shape, dtype=gate.dtype, device=gate.device) for _ in range(2)
    )
    read = _rows(gate, up, grad_y)
    if gate.numel():
        (grid, tile), strides = _tiling(read[0]), [x_NC.stride(0) for x_NC in read]
        wrap_triton(swiglu_bwd_kernel)[grid](
            *read, grad_gate, grad_up, *strides, *read[0].shape, **tile
        )
    return grad_gate, grad_up


_forward.register_autograd(
    lambda ctx, grad_y: _backward(*ctx.saved_tensors, grad_y),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Returns silu(gate) ∘ up, rounded once.

    Args:
        gate, up: (..., C), one dtype of fp32, bf16, fp16 (without a GPU also fp64), which is kept,
            under autocast too. Any strides; views whose columns are adjacent, such as the halves of
            one projection, are not copied.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices that do not fit; an empty last dimension.

    Error budget: that of `labkit.numerics.judge` for the formula in the same dtype, against fp64.
    """
    check({"gate": gate, "up": up})
    check_shape("up", up, *gate.shape)
    if runs_kernel(gate):
        return _forward(gate, up)
    return (silu(wide(gate)) * wide(up)).to(gate.dtype)
