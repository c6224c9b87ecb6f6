"""What RMSNorm and LayerNorm share: the backward kernel, launches, autograd, checks.

Forward, a program takes whole rows into registers. Backward, programs stay on their multiprocessor and walk from row to
row, the next ones on their way to shared memory; each adds its part of the parameters' gradients in registers, in fp32,
and one more kernel adds the parts: no atomics, so bit-equal repeats. There a row is read in pieces of a power of two:
padded to one, a row of 2,560 columns would be computed as 4,096, and arithmetic would bound the kernel.

Shape suffixes: N rows, C columns, P programs.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from labkit.kernels.column_sums import add_columns
from labkit.kernels.fused import IS_INTERPRETED, autocast_dtype, check, check_shape, rows_of, runs_kernel
from labkit.kernels.splits import num_multiprocessors

MAX_COLUMNS = 32768  # 32 elements of a row a thread, of 1,024 threads
# Of programs that stay: elements of a piece a warp; most pieces of a row; pieces that a multiprocessor has registers for
# at once, with one parameter's gradient and with two; its most programs; most bytes that one of them has on their way to
# shared memory, which every device since Ampere has.
PIECE, MAX_PIECES, PIECES_AT_ONCE, MAX_PROGRAMS = 256, 4, {1: 50, 2: 38}, 16
BYTES_AHEAD, MAX_STAGES = 98304, 3
INTERPRETED_PROGRAMS = 3


def row_tile(num_columns: int) -> dict[str, int]:
    """Returns the constants of a launch with a tile of whole rows a program: 16 elements of a row a thread."""
    block = triton.next_power_of_2(num_columns)
    return {"C": num_columns, "BLOCK": block, "ROWS": max(1, 2048 // block), "num_warps": min(max(block // 512, 2), 32)}


def walk_tile(num_columns: int, bytes_a_column: int, num_parameters: int) -> tuple[dict[str, int], int]:
    """Returns the constants of a launch whose programs stay, and these for each multiprocessor.

    A program takes a row at a time, a thread 8 elements of each piece. `bytes_a_column` are read of a row for each
    column.
    """
    num_warps = triton.next_power_of_2(-(-num_columns // (PIECE * MAX_PIECES)))
    pieces = -(-num_columns // (PIECE * num_warps))
    programs = min(max(1, PIECES_AT_ONCE[num_parameters] // (num_warps * pieces)), MAX_PROGRAMS)
    stages = min(1 + BYTES_AHEAD // (pieces * PIECE * num_warps * bytes_a_column), MAX_STAGES)
    tile = {"C": num_columns, "WIDTH": PIECE * num_warps, "PIECES": pieces, "STAGES": stages, "num_warps": num_warps}
    return tile, programs


@triton.jit
def add_pairs(a, b, other_a, other_b):
    return a + other_a, b + other_b


@triton.jit
def norm_bwd_kernel(
    sum_ptr, weight_ptr, mean_ptr, scale_ptr, grad_y_ptr, grad_sum_ptr, grad_ptr, grad_x_ptr, parts_ptr,
    stride_s, stride_gy, stride_gs, num_rows,
    C: tl.constexpr, WIDTH: tl.constexpr, PIECES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Each program walks along the rows, and adds its part of ∂w and, of LayerNorm, which has means, of ∂b."""
    lanes = tl.arange(0, WIDTH)
    weights, grad_weights, grad_biases = (), (), ()
    for piece in tl.static_range(PIECES):
        cols = piece * WIDTH + lanes
        weights += (tl.load(weight_ptr + cols, mask=cols < C, other=0.0).to(tl.float32),)
        grad_weights += (tl.zeros((WIDTH,), dtype=tl.float32),)
        if mean_ptr is not None:
            grad_biases += (tl.zeros((WIDTH,), dtype=tl.float32),)
    step = tl.num_programs(0)
    # Two numbers of a row ahead, like its elements.
    next_mean = 0.0 if mean_ptr is None else tl.load(mean_ptr + tl.program_id(0), mask=tl.program_id(0) < num_rows)
    next_scale = tl.load(scale_ptr + tl.program_id(0), mask=tl.program_id(0) < num_rows)
    for number in tl.range(tl.program_id(0), num_rows, step, num_stages=STAGES):
        row = tl.cast(number, tl.int64)
        mean, scale = next_mean, next_scale
        if mean_ptr is not None:
            next_mean = tl.load(mean_ptr + row + step, mask=row + step < num_rows)
        next_scale = tl.load(scale_ptr + row + step, mask=row + step < num_rows)
        normed, grad_normed, weights_now, biases_now = (), (), (), ()
        slopes, shifts = tl.zeros((WIDTH,), dtype=tl.float32), tl.zeros((WIDTH,), dtype=tl.float32)
        for piece in tl.static_range(PIECES):
            cols = piece * WIDTH + lanes
            x = tl.load(sum_ptr + row * stride_s + cols, mask=cols < C, other=0.0).to(tl.float32)
            grad_y = tl.load(grad_y_ptr + row * stride_gy + cols, mask=cols < C, other=0.0).to(tl.float32)
            # Not zero beyond C, but there grad_y is.
            normed += ((x - mean) * scale,)
            grad_normed += (grad_y * weights[piece],)
            weights_now += (grad_weights[piece] + grad_y * normed[piece],)
            if mean_ptr is not None:
                biases_now += (grad_biases[piece] + grad_y,)
            slopes += grad_normed[piece] * normed[piece]
            shifts += grad_normed[piece]
        grad_weights = weights_now
        if mean_ptr is not None:
            grad_biases = biases_now
        # Both sums in one reduction, for it is the threads' waiting for one another that takes time.
        slope, shift = tl.reduce((slopes, shifts), 0, add_pairs)
        shift = 0.0 if mean_ptr is None else shift
        for piece in tl.static_range(PIECES):
            cols = piece * WIDTH + lanes
            grad = scale * (grad_normed[piece] - shift / C - normed[piece] * (slope / C))
            if grad_sum_ptr is not None:
                grad += tl.load(grad_sum_ptr + row * stride_gs + cols, mask=cols < C, other=0.0).to(tl.float32)
            tl.store(grad_ptr + row * C + cols, grad.to(grad_ptr.dtype.element_ty), mask=cols < C)
            if grad_x_ptr is not None:
                tl.store(grad_x_ptr + row * C + cols, grad.to(grad_x_ptr.dtype.element_ty), mask=cols < C)
    num_parameters: tl.constexpr = 1 if mean_ptr is None else 2
    parts_ptr += tl.program_id(0) * num_parameters * C
    for piece in tl.static_range(PIECES):
        cols = piece * WIDTH + lanes
        tl.store(parts_ptr + cols, grad_weights[piece], mask=cols < C)
        if mean_ptr is not None:
            tl.store(parts_ptr + C + cols, grad_biases[piece], mask=cols < C)


def norm_forward(
    kernel,
    x: Tensor,
    residual: Tensor | None,
    parameters: Sequence[Tensor],
    num_statistics: int,
    eps: float,
    dtype: torch.dtype,
) -> list[Tensor]:
    """Returns [y, statistics of the rows in fp32, sum if there is a residual] as computed by a wrapped kernel."""
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    statistics = [torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device) for _ in range(num_statistics)]
    total = None if residual is None else torch.empty(x.shape, dtype=residual.dtype, device=x.device)
    x_NC, residual_NC = rows_of(x), None if residual is None else rows_of(residual)
    tile = row_tile(int(x.shape[-1]))
    if x.numel():
        strides = x_NC.stride(0), 0 if residual is None else residual_NC.stride(0)
        kernel[(-(-x_NC.shape[0] // tile["ROWS"]),)](
            x_NC, residual_NC, *(p.contiguous() for p in parameters), y, total, *statistics, *strides, x_NC.shape[0],
            eps, **tile,
        )  # fmt: skip
    return [y, *statistics] if total is None else [y, *statistics, total]


def norm_backward(
    kernel,
    total: Tensor,
    weight: Tensor,
    mean: Tensor | None,
    scale: Tensor,
    grad_y: Tensor,
    grad_total: Tensor | None,
    x_dtype: torch.dtype,
) -> list[Tensor]:
    """Returns the gradients of the sum, of the parameters (one a row), and that of x if its dtype is another."""
    grad = torch.empty(total.shape, dtype=total.dtype, device=total.device)
    grad_x = None if x_dtype == total.dtype else torch.empty(total.shape, dtype=x_dtype, device=total.device)
    read = [None if x is None else rows_of(x) for x in (total, grad_y, grad_total)]
    # Columns are a constant of the kernels, no symbol of the compiler's.
    num_columns, num_parameters = int(weight.shape[0]), 1 if mean is None else 2
    tile, programs = walk_tile(num_columns, sum(x.element_size() for x in read if x is not None), num_parameters)
    programs = INTERPRETED_PROGRAMS if IS_INTERPRETED else programs * num_multiprocessors(total.device.index)
    parts_PC = torch.empty((programs, num_parameters * num_columns), dtype=torch.float32, device=weight.device)
    strides = [0 if x is None else x.stride(0) for x in read]
    total_NC, *gradients = read
    kernel[(programs,)](
        total_NC, weight.contiguous(), mean, scale, *gradients, grad, grad_x, parts_PC, *strides, total_NC.shape[0],
        **tile,
    )  # fmt: skip
    sums = add_columns(parts_PC, weight.dtype).view(num_parameters, -1)
    return [grad, sums] if grad_x is None else [grad, sums, grad_x]


def differentiate(forward, backward, num_parameters: int) -> None:
    """Gives `forward(x, residual, *parameters, eps, dtype)` its gradient.

    It is `backward(sum, weight, *statistics, grad_y, grad_sum, x_dtype)`.
    """

    def setup_context(ctx, inputs, output) -> None:
        x, residual, weight = inputs[:3]
        ctx.has_residual, ctx.x_dtype = residual is not None, x.dtype
        _, *statistics = output[:-1] if ctx.has_residual else output
        ctx.save_for_backward(output[-1] if ctx.has_residual else x, weight, *statistics)
        # None, not zeros to be read, for a sum or a normalised tensor that nothing used.
        ctx.set_materialize_grads(False)

    def gradients(ctx, grads):
        grad_y, grad_total = grads[0], grads[-1] if ctx.has_residual else None
        if grad_y is None:
            grad, of_parameters = grad_total, [None] * num_parameters
            grad_x = None if grad is None else grad.to(ctx.x_dtype)
        else:
            grad, of_parameters, *others = backward(*ctx.saved_tensors, grad_y, grad_total, ctx.x_dtype)
            grad_x = others[0] if others else grad
        return grad_x, grad if ctx.has_residual else None, *of_parameters, None, None

    forward.register_autograd(gradients, setup_context=setup_context)


def checked_dtype(x: Tensor, residual: Tensor | None, **parameters: Tensor) -> torch.dtype:
    """Returns the dtype of the normalised tensor; raises ValueError for tensors that do not fit."""
    check({"x": x, "residual": residual, **parameters}, may_be_fp32=("residual", *parameters))
    check_shape("residual", residual, *x.shape)
    for name, parameter in parameters.items():
        check_shape(name, parameter, x.shape[-1])
    if len({parameter.dtype for parameter in parameters.values()}) > 1:
        raise ValueError(f"{' and '.join(parameters)} must have one dtype")
    if runs_kernel(x) and x.shape[-1] > MAX_COLUMNS:
        raise ValueError(f"the last dimension of x must be at most {MAX_COLUMNS}, got {x.shape[-1]}")
    return autocast_dtype(x) or (x if residual is None else residual).dtype
