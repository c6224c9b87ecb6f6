"""SwiGLU's gate in Triton: silu(g) ∘ u, forward and backward in one pass each.

    y = g σ(g) ∘ u    ∂g = ∂y ∘ u ∘ σ(g) (1 + g (1 − σ(g)))    ∂u = ∂y ∘ g σ(g)
    σ(g) = 1/(1 + exp(−g))

Shapes: g, u, y (N elements). Memory bounds it. Elements moved: 3·N forward, 5·N backward, which
computes σ(g) again: nothing is kept but the inputs.

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
    load_fp32,
    operator,
    runs_kernel,
    wide,
    wrap_triton,
)

BLOCK = tl.constexpr(1024)  # elements of a program: 8 of a thread, loads of 16 bytes


@triton.jit
def _places(num_elements):
    """The places of a program's BLOCK elements, and which of them exist.

    No pointer passes through here: where a pointer comes in and a place goes out, PyTorch takes the
    inputs for written too, and a compiled model copies them first.
    """
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    return place, place < num_elements


@triton.jit
def swiglu_fwd_kernel(gate_ptr, up_ptr, y_ptr, num_elements):
    """One program computes BLOCK elements."""
    place, inside = _places(num_elements)
    gate = load_fp32(gate_ptr + place, inside)
    up = load_fp32(up_ptr + place, inside)
    tl.store(y_ptr + place, gate * tl.sigmoid(gate) * up, mask=inside)


@triton.jit
def swiglu_bwd_kernel(gate_ptr, up_ptr, grad_y_ptr, grad_gate_ptr, grad_up_ptr, num_elements):
    """One program computes BLOCK elements of both gradients."""
    place, inside = _places(num_elements)
    gate = load_fp32(gate_ptr + place, inside)
    up = load_fp32(up_ptr + place, inside)
    grad_y = load_fp32(grad_y_ptr + place, inside)
    sigmoid = tl.sigmoid(gate)
    grad_gate = grad_y * up * sigmoid * (1 + gate * (1 - sigmoid))
    tl.store(grad_gate_ptr + place, grad_gate, mask=inside)
    tl.store(grad_up_ptr + place, grad_y * gate * sigmoid, mask=inside)


def _grid(x: Tensor) -> tuple[int]:
    return (-(-x.numel() // BLOCK.value),)


@operator("swiglu")
def _forward(gate: Tensor, up: Tensor) -> Tensor:
    gate = gate.contiguous()
    y = torch.empty_like(gate)
    wrap_triton(swiglu_fwd_kernel)[_grid(y)](gate, up.contiguous(), y, y.numel())
    return y


@operator("swiglu_backward")
def _backward(gate: Tensor, up: Tensor, grad_y: Tensor) -> tuple[Tensor, Tensor]:
    gate = gate.contiguous()
    grad_gate = torch.empty_like(gate)
    grad_up = torch.empty_like(gate)
    wrap_triton(swiglu_bwd_kernel)[_grid(gate)](
        gate, up.contiguous(), grad_y.contiguous(), grad_gate, grad_up, gate.numel()
    )
    return grad_gate, grad_up


_forward.register_autograd(
    lambda ctx, grad_y: _backward(*ctx.saved_tensors, grad_y),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Returns silu(gate) ∘ up, rounded once.

    Args:
        gate, up: (..., C), one dtype of fp32, bf16, fp16 (fp64 in plain PyTorch), which is kept,
            under autocast too. What is not dense is copied first.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices that do not fit; an empty last dimension.

    Error budget: that of `labkit.numerics.judge` for the formula in the same dtype, against fp64.
    """
    check({"gate": gate, "up": up})
    check_shape("up", up, *gate.shape)
    if runs_kernel(gate):
        return _forward(gate, up)
    return (silu(wide(gate)) * wide(up)).to(gate.dtype)
