"""Linear layers that do not keep their input, but compute it again in backward from what is kept
anyway.

    dropout_linear    y = W dropout(x) + b
                      dropout(x) = m ∘ x / (1 − p)    m = [r ≥ p], r uniform in [0, 1)
                      ∂W = ∂yᵀ dropout(x)     ∂x = m ∘ (∂y W) / (1 − p)
    norm_linear       y = W n + b    ∂W = ∂yᵀ n, n = LayerNorm(s) of a sum s that the norm keeps

r is Philox of a seed and the element's number, so whoever has the seed has the mask: neither m nor
dropout(x) is kept. Ideal cost beside the products, in elements of the input: dropout_linear moves 2
forward and 4 backward, norm_linear moves 2 backward.

Source: Srivastava et al. 2014, "Dropout"; Salmon et al. 2011, "Parallel random numbers: as easy as
1, 2, 3" (Philox).
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from labkit.kernels.column_sums import column_sums
from labkit.kernels.fused import (
    check_integers,
    check_shape,
    first_order,
    load_fp32,
    operator,
    outside_autocast,
    product_inputs,
    runs_kernel,
    wrap_triton,
)
from labkit.kernels.norms import Norm, check_norm, layer_norm

# Elements; one call of Philox gives four numbers, for four runs.
RUN = tl.constexpr(1024)
# Of Philox, which pass every test of randomness.
ROUNDS = tl.constexpr(7)


@triton.jit
def dropout_kernel(x_ptr, out_ptr, seed_ptr, p, num_elements):
    """Elements of m ∘ x / (1 − p), all dense."""
    program = tl.program_id(0).to(tl.int64)
    bits = tl.randint4x(tl.load(seed_ptr), program * RUN + tl.arange(0, RUN), n_rounds=ROUNDS)
    # The compiler hands a Python number over in fp64, which every element would then be.
    p = tl.cast(p, tl.float32)
    scale = 1 / (1 - p)
    for run in tl.static_range(4):
        place = program * (4 * RUN) + run * RUN + tl.arange(0, RUN)
        x = load_fp32(x_ptr + place, place < num_elements)
        kept = tl.where(tl.uint_to_uniform_float(bits[run]) >= p, x * scale, 0.0)
        tl.store(out_ptr + place, kept, mask=place < num_elements)


@operator("dropout")
def seeded_dropout(x: Tensor, p: float, seed: Tensor) -> Tensor:
    """Returns m ∘ x / (1 − p); `seed` is one int64 on its device."""
    x = x.contiguous()
    out = torch.empty_like(x)
    wrap_triton(dropout_kernel)[(-(-x.numel() // (4 * RUN.value)),)](x, out, seed, p, x.numel())
    return out


class DropoutLinear(torch.autograd.Function):
    """Dropout and a linear layer of rows; see `dropout_linear`."""

    @staticmethod
    @outside_autocast
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor, p: float, seed: Tensor) -> Tensor:
        ctx.p = p
        ctx.save_for_backward(x, weight, seed)
        return F.linear(seeded_dropout(x, p, seed), weight, bias)

    @staticmethod
    @first_order("dropout_linear")
    @outside_autocast
    def backward(ctx, grad_y: Tensor):
        x, weight, seed = ctx.saved_tensors
        return (
            seeded_dropout(grad_y @ weight, ctx.p, seed),
            grad_y.T @ seeded_dropout(x, ctx.p, seed),
            column_sums(grad_y),
            None,
            None,
        )


class NormLinear(torch.autograd.Function):
    """A linear layer of normalised rows; see `norm_linear`."""

    @staticmethod
    @outside_autocast
    def forward(ctx, normed, weight, bias, total, norm_weight, norm_bias, eps: float) -> Tensor:
        ctx.eps = eps
        ctx.save_for_backward(weight, total, norm_weight, norm_bias)
        return F.linear(normed, weight, bias)

    @staticmethod
    @first_order("norm_linear")
    @outside_autocast
    def backward(ctx, grad_y: Tensor):
        weight, *norm = ctx.saved_tensors
        # The sum is of another dtype where autocast chose that of the product.
        grad_weight = grad_y.T @ layer_norm(*norm, ctx.eps).to(weight.dtype)
        return grad_y @ weight, grad_weight, column_sums(grad_y), None, None, None, None


def _inputs(name: str, x: Tensor, weight: Tensor, bias: Tensor) -> list[Tensor]:
    """Returns the tensors of a linear layer as `product_inputs`, their shapes checked too."""
    inputs = product_inputs(**{name: x}, weight=weight, bias=bias)
    features = x.shape[-1]
    check_shape(name, x, len(x), features)
    check_shape("weight", weight, len(weight), features)
    check_shape("bias", bias, len(weight))
    return inputs


def dropout_linear(x: Tensor, weight: Tensor, bias: Tensor, p: float, seed: Tensor) -> Tensor:
    """Returns W dropout(x) + b.

    Args:
        x: (rows, features), fp32, bf16 or fp16 on a CUDA device; on a CPU also fp64, by PyTorch's
            dropout, which keeps a mask and takes its random numbers from PyTorch's generator, not
            from the seed.
        weight, bias: (outputs, features) and (outputs,), dtype and device of x. Under autocast all
            three are cast to its dtype first, which the output has, and may differ.
        p: the share of elements that are dropped, from 0 up to but without 1.
        seed: one int64 on the device of x.

    Raises:
        ValueError, TypeError: arguments that do not fit, by name.
    """
    if not 0 <= p < 1:
        raise ValueError(f"p must be from 0 up to but without 1; got {p}")
    x, weight, bias = _inputs("x", x, weight, bias)
    if not runs_kernel(x):
        return F.linear(F.dropout(x, p), weight, bias)
    check_integers("seed", seed, x)
    return DropoutLinear.apply(x, weight, bias, p, seed)


def norm_linear(normed: Tensor, weight: Tensor, bias: Tensor, norm: Norm) -> Tensor:
    """Returns W n + b.

    Args:
        normed: n, (rows, features), which is LayerNorm of the sum.
        weight, bias: (outputs, features) and (outputs,), dtype and device of n; under autocast as
            in `dropout_linear`.
        norm: the sum s, the norm's weight and bias, and its ε. No gradient goes to s but through n.

    Raises:
        ValueError, TypeError: arguments that do not fit, by name.
    """
    inputs = _inputs("normed", normed, weight, bias)
    check_norm(normed, norm)
    return NormLinear.apply(*inputs, *norm)
