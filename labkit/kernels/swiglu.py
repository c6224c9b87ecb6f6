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
    tl.store(y_ptr + rows * num_columns + cols, y, mask=inside)


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
    tl.store(grad_gate_ptr + rows * num_columns + cols, grad_gate, mask=inside)
    grad_up = grad_y * gate * sigmoid
    tl.store(grad_up_ptr + rows * num_columns + cols, grad_up, mask=inside)


def _launch(launcher, read: tuple[Tensor, ...], written: tuple[Tensor, ...]) -> None:
    """Launches a kernel over tiles of all elements."""
    if read[0].numel() % WIDTHS[0] == 0 and all(x.is_contiguous() for x in read):
        # The elements of a tile are then adjacent.
        rows = [x.view(-1, WIDTHS[0]) for x in read]
    else:
        rows = [rows_of(x) for x in read]
    num_rows, num_columns = rows[0].shape
    width = next((width for width in WIDTHS if num_columns % width == 0), WIDTHS[-1])
    height = TILE // width
    launcher[(-(-num_rows // height), -(-num_columns // width))](
        *rows,
        *written,
        *[x.stride(0) for x in rows],
        num_rows,
        num_columns,
        ROWS=height,
        COLUMNS=width,
    )


@operator("swiglu")
def _forward(gate: Tensor, up: Tensor) -> Tensor:
    y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    _launch(wrap_triton(swiglu_fwd_kernel), (gate, up), (y,))
    return y


@operator("swiglu_backward")
def _backward(gate: Tensor, up: Tensor, grad_y: Tensor) -> tuple[Tensor, Tensor]:
    grad_gate = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    grad_up = torch.empty_like(grad_gate)
    _launch(wrap_triton(swiglu_bwd_kernel), (gate, up, grad_y), (grad_gate, grad_up))
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
