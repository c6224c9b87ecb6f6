"""Mean cross-entropy of logits, and of hidden states with the language-model head, whose logits are
never all there.

    M = max_v x_v    L = log Σ_v exp(x_v − M)    loss = mean (L − (x_target − M))
    ∂x = (exp(x − M − L) − [v = target]) · ∂loss / K

K of the rows count; of the others, whose target is −100, loss and ∂x are 0. M is taken off before
anything is rounded, so that an offset common to all logits of a row changes nothing.

Of logits: one program reads a row once, with a running maximum and sum (online softmax); backward
reads it again and writes ∂x. With the head, x = h Wᵀ is made for a chunk of rows at a time, one
kernel turns it into losses and K ∂x in place, and the products K ∂h = K ∂x W and K ∂W = K ∂xᵀ h
follow at once: 6·N·V·C FLOPs, the memory of one chunk.

Shape suffixes: N rows, C d_model, V vocabulary.

Source: Milakov & Gimelshein 2018, "Online normalizer calculation for softmax"; chunks as in Hsu et
al. 2024, "Liger Kernel", section 3.2.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from labkit.accounting import loss_chunk_rows
from labkit.kernels.fused import (
    check,
    check_integers,
    load_fp32,
    operator,
    outside_autocast,
    product_inputs,
    rows_of,
    runs_kernel,
    wide,
    wrap_triton,
)
from labkit.kernels.launch import Launcher

MAX_BLOCK = 4096
NUM_WARPS = 8
IGNORED = tl.constexpr(-100)  # as F.cross_entropy has it
LOWEST = tl.constexpr(torch.finfo(torch.float32).min)


@triton.jit
def _statistics(row_ptr, num_columns, BLOCK: tl.constexpr):
    """Returns M and L of a row."""
    # Finite, so that a block of −∞ alone gives no NaN.
    maximum = LOWEST
    sums = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, num_columns, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(row_ptr + cols, mask=cols < num_columns, other=-float("inf")).to(tl.float32)
        larger = tl.maximum(maximum, tl.max(x))
        sums = sums * tl.exp(maximum - larger) + tl.exp(x - larger)
        maximum = larger
    return maximum, tl.log(tl.sum(sums))


@triton.jit
def _write_gradient(
    row_ptr, grad_row_ptr, maximum, log_sum, target, factor, start, num_columns, BLOCK: tl.constexpr
):
    factor = tl.where((target >= 0) & (target < num_columns), factor, float("nan"))
    factor = tl.where(target == IGNORED, 0.0, factor)
    cols = start + tl.arange(0, BLOCK)
    x = load_fp32(row_ptr + cols, cols < num_columns)
    grad = (tl.exp(x - maximum - log_sum) - tl.where(cols == target, 1.0, 0.0)) * factor
    tl.store(grad_row_ptr + cols, grad, mask=cols < num_columns)


@triton.jit
def cross_entropy_fwd_kernel(
    logits_ptr,
    targets_ptr,
    rows_ptr,
    stride,
    num_columns,
    BLOCK: tl.constexpr,
    INTO_GRADIENT: tl.constexpr,
):
    """One program computes a row's (loss, whether it counts, M, L) and, INTO_GRADIENT, replaces the
    logits by that loss's gradient.
    """
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride
    target = tl.load(targets_ptr + row)
    maximum, log_sum = _statistics(row_ptr, num_columns, BLOCK)
    exists = (target >= 0) & (target < num_columns)
    chosen = tl.load(row_ptr + target, mask=exists, other=float("nan")).to(tl.float32)
    counts = target != IGNORED
    tl.store(rows_ptr + 4 * row, tl.where(counts, log_sum - (chosen - maximum), 0.0))
    tl.store(rows_ptr + 4 * row + 1, counts)
    tl.store(rows_ptr + 4 * row + 2, maximum)
    tl.store(rows_ptr + 4 * row + 3, log_sum)
    if INTO_GRADIENT:
        # Every thread has read the target's logit before one overwrites it.
        tl.debug_barrier()
        for start in range(0, num_columns, BLOCK):
            _write_gradient(
                row_ptr, row_ptr, maximum, log_sum, target, 1.0, start, num_columns, BLOCK
            )


@triton.jit
def cross_entropy_bwd_kernel(
    logits_ptr,
    targets_ptr,
    rows_ptr,
    num_counted_ptr,
    grad_loss_ptr,
    grad_ptr,
    stride,
    num_columns,
    BLOCK: tl.constexpr,
):
    """One program computes a block of a row of ∂x."""
    row = tl.program_id(0).to(tl.int64)
    factor = tl.load(grad_loss_ptr).to(tl.float32) / tl.load(num_counted_ptr)
    maximum, log_sum = tl.load(rows_ptr + 4 * row + 2), tl.load(rows_ptr + 4 * row + 3)
    target, start = tl.load(targets_ptr + row), tl.program_id(1) * BLOCK
    row_ptr, grad_row_ptr = logits_ptr + row * stride, grad_ptr + row * num_columns
    _write_gradient(
        row_ptr, grad_row_ptr, maximum, log_sum, target, factor, start, num_columns, BLOCK
    )


def _constants(num_columns: int) -> dict[str, int]:
    block = min(MAX_BLOCK, triton.next_power_of_2(int(num_columns)))
    return {"BLOCK": block, "num_warps": NUM_WARPS}


def _mean(rows_N4: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the mean loss of the rows that count, and how many do, in fp32."""
    total, num_counted = rows_N4[:, :2].sum(0).unbind()
    return total / num_counted, num_counted


@operator("cross_entropy")
def _forward(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the mean loss, how many rows count and each row's (loss, whether it counts, M, L)."""
    logits_NV = rows_of(logits)
    num_rows, num_columns = logits_NV.shape
    rows_N4 = logits.new_empty(num_rows, 4, dtype=torch.float32)
    wrap_triton(cross_entropy_fwd_kernel)[(num_rows,)](
        logits_NV,
        targets.contiguous(),
        rows_N4,
        logits_NV.stride(0),
        num_columns,
        INTO_GRADIENT=False,
        **_constants(num_columns),
    )
    return *_mean(rows_N4), rows_N4


@operator("cross_entropy_backward")
def _backward(
    logits: Tensor, targets: Tensor, num_counted: Tensor, rows_N4: Tensor, grad_loss: Tensor
) -> Tensor:
    """Returns the gradient of the logits, contiguous."""
    grad = logits.new_empty(logits.shape)
    logits_NV = rows_of(logits)
    num_rows, num_columns = logits_NV.shape
    constants = _constants(num_columns)
    wrap_triton(cross_entropy_bwd_kernel)[(num_rows, -(-num_columns // constants["BLOCK"]))](
        logits_NV,
        targets.contiguous(),
        rows_N4.contiguous(),  # hooks on saved tensors may have laid it out anew
        num_counted,
        grad_loss,
        grad,
        logits_NV.stride(0),
        num_columns,
        **constants,
    )
    return grad


def _setup(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs, *output[1:])
    ctx.set_materialize_grads(False)


def _gradients(ctx, grad_loss, *_):
    return _backward(*ctx.saved_tensors, grad_loss), None


_forward.register_autograd(_gradients, setup_context=_setup)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Returns the mean cross-entropy in nats, a scalar in fp32 (fp64 for fp64).

    Args:
        logits: (..., V), fp32, bf16 or fp16 (fp64 in plain PyTorch), any strides; autocast
            changes nothing.
        targets: (...), int64, from 0 to V − 1, or −100 for a row that does not count; the mean of
            none is NaN. Another makes the loss and its row's gradient NaN: to raise, the host would
            have to wait for the device. (In plain PyTorch it raises.)

    Raises:
        ValueError, TypeError: shapes, dtypes or devices that do not fit; an empty last dimension.

    Error budget: that of `labkit.numerics.judge` for the formula in the same dtype, against fp64.
    """
    check({"logits": logits})
    check_integers("targets", targets, logits, *logits.shape[:-1])
    if runs_kernel(logits):
        return _forward(logits, targets)[0]
    return _formula(logits, targets)


@operator("linear_cross_entropy", opaque=True)
@outside_autocast
def _linear_forward(
    hidden_NC: Tensor, weight_VC: Tensor, targets_N: Tensor, with_gradients: bool
) -> list[Tensor]:
    """Returns [mean loss, K] or [mean loss, K, K ∂h, K ∂W in fp32]. Opaque, so that nothing
    reorders the chunks.
    """
    num_rows, vocabulary = len(hidden_NC), len(weight_VC)
    chunk_rows = loss_chunk_rows(vocabulary, weight_VC.element_size())
    rows_N4 = hidden_NC.new_empty(num_rows, 4, dtype=torch.float32)
    gradients = _empty_gradients(hidden_NC, weight_VC, with_gradients)
    for start in range(0, max(num_rows, 1), chunk_rows):
        rows = slice(start, start + chunk_rows)
        logits_NV = hidden_NC[rows] @ weight_VC.T
        Launcher(cross_entropy_fwd_kernel)[(len(logits_NV),)](
            logits_NV,
            targets_N[rows],
            rows_N4[rows],
            vocabulary,
            vocabulary,
            INTO_GRADIENT=with_gradients,
            **_constants(vocabulary),
        )
        if with_gradients:
            grad_hidden_NC, grad_weight_VC = gradients
            torch.mm(logits_NV, weight_VC, out=grad_hidden_NC[rows])
            factors = logits_NV.T, hidden_NC[rows]
            beta = int(start > 0)  # of the first chunk, what is there is written over
            if hidden_NC.dtype == torch.float32 or not hidden_NC.is_cuda:
                grad_weight_VC.addmm_(*[x.float() for x in factors], beta=beta)
            else:
                torch.addmm(
                    grad_weight_VC, *factors, beta=beta, out_dtype=torch.float32, out=grad_weight_VC
                )
    return [*_mean(rows_N4), *gradients]


def _empty_gradients(hidden_NC: Tensor, weight_VC: Tensor, with_gradients: bool) -> list[Tensor]:
    if not with_gradients:
        return []
    return [torch.empty_like(hidden_NC), torch.empty_like(weight_VC, dtype=torch.float32)]


@_linear_forward.register_fake
def _(hidden_NC, weight_VC, _targets_N, with_gradients):
    scalars = _mean(hidden_NC.new_empty(1, 4, dtype=torch.float32))
    return [*scalars, *_empty_gradients(hidden_NC, weight_VC, with_gradients)]


register_flop_formula(torch.ops.labkit.linear_cross_entropy)(
    lambda hidden, weight, _targets, with_gradients, **__: (
        (6 if with_gradients else 2) * hidden.numel() * weight[0]
    )
)


def _linear_setup(ctx, inputs, output) -> None:
    ctx.save_for_backward(*output[1:])
    ctx.weight_dtype = inputs[1].dtype
    # No zeros as large as the weight in the place of gradients of gradients, which nothing reads.
    ctx.set_materialize_grads(False)


def _linear_gradients(ctx, grad_loss, *_):
    num_counted, *sums = ctx.saved_tensors
    # One element, not a scalar: the product is computed in fp32 and rounded once. Of no rows that
    # count, gradients are zeros.
    factor = (grad_loss / num_counted.clamp(min=1)).view(1)
    gradients = [
        torch.mul(x, factor, out=torch.empty_like(x, dtype=ctx.weight_dtype)) for x in sums
    ]
    return *gradients, None, None


_linear_forward.register_autograd(_linear_gradients, setup_context=_linear_setup)


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Returns the mean cross-entropy of the logits hidden · weightᵀ in nats, a scalar in fp32 (fp64
    for fp64).

    Gradients are computed on the way forward; kept are those, of the weight in fp32. Logits are
    there for as many rows at a time as take 128 MiB, for 2,048 at least.

    Args:
        hidden: (..., C), weight: (V, C), one dtype of fp32, bf16, fp16 (fp64 in plain PyTorch).
            Under autocast both are cast to its dtype first, and may differ. Logits are rounded to
            their dtype, sums are in fp32.
        targets: (...), int64, as in `cross_entropy`.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices that do not fit; an empty last dimension.

    Error budget: that of `labkit.numerics.judge` for the formula in the same dtype, against fp64.
    """
    hidden, weight = product_inputs(hidden=hidden, weight=weight)
    if weight.shape[1:] != hidden.shape[-1:] or not len(weight):
        raise ValueError(f"weight must be (V, {hidden.shape[-1]}), got {tuple(weight.shape)}")
    check_integers("targets", targets, hidden, *hidden.shape[:-1])
    if not runs_kernel(hidden):
        return _formula(hidden @ weight.T, targets)
    with_gradients = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    hidden_NC = hidden.reshape(-1, hidden.shape[-1])
    return _linear_forward(hidden_NC, weight, targets.flatten().contiguous(), with_gradients)[0]


def _formula(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(wide(logits).reshape(-1, logits.shape[-1]), targets.reshape(-1))
