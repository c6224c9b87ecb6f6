"""What RMSNorm and LayerNorm share around their kernels: launches, autograd, checks.

Forward, a program takes whole rows into registers. Backward, programs stay on their multiprocessor and walk along rows,
the next ones on their way to shared memory; each adds its part of the parameters' gradients in registers, in fp32, and
one more kernel adds the parts: no atomics, so bit-equal repeats.

Shape suffixes: N rows, C columns, P programs.
"""

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from labkit.kernels.column_sums import add_columns
from labkit.kernels.fused import IS_INTERPRETED, autocast_dtype, check, check_shape, rows_of, runs_kernel
from labkit.kernels.splits import num_multiprocessors

# 32 elements of a row a thread, of 1,024 threads.
MAX_COLUMNS = 32768
# Of programs that stay: warps of a multiprocessor where a row is long, and the most bytes that one has on their way to
# shared memory, which every device since Ampere has.
STAYING_WARPS, BYTES_AHEAD, MAX_STAGES = 8, 98304, 3
INTERPRETED_PROGRAMS = 3


def row_tile(num_columns: int) -> dict[str, int]:
    """Returns the constants of a launch with a tile of whole rows a program: 16 elements of a row a thread."""
    block = triton.next_power_of_2(num_columns)
    return {"C": num_columns, "BLOCK": block, "ROWS": max(1, 2048 // block), "num_warps": min(max(block // 512, 2), 32)}


def walk_tile(num_columns: int, bytes_a_column: int) -> tuple[dict[str, int], int]:
    """Returns the constants of a launch whose programs stay, and these for each multiprocessor.

    A thread has 32 elements of a step, of several rows where they are short: threads wait for one another at each sum
    along a row, and rows that are summed together wait once. `bytes_a_column` are read of a row for each column.
    """
    block = triton.next_power_of_2(num_columns)
    num_warps = min(max(block // 1024, 4), 32)
    programs = 4 if block <= 2048 else max(1, STAYING_WARPS // num_warps)
    rows = max(1, 4096 // block)
    stages = min(1 + BYTES_AHEAD // (rows * block * bytes_a_column), MAX_STAGES)
    tile = {"C": num_columns, "BLOCK": block, "ROWS": rows, "STAGES": stages, "num_warps": num_warps}
    return tile, programs


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
    statistics: Sequence[Tensor],
    grad_y: Tensor,
    grad_total: Tensor | None,
    num_parameters: int,
    x_dtype: torch.dtype,
) -> list[Tensor]:
    """Returns the gradients of the sum, of the parameters (one a row), and that of x if its dtype is another."""
    grad = torch.empty(total.shape, dtype=total.dtype, device=total.device)
    grad_x = None if x_dtype == total.dtype else torch.empty(total.shape, dtype=x_dtype, device=total.device)
    read = [None if x is None else rows_of(x) for x in (total, grad_y, grad_total)]
    # Columns are a constant of the kernels, no symbol of the compiler's.
    tile, programs = walk_tile(int(weight.shape[0]), sum(x.element_size() for x in read if x is not None))
    programs = INTERPRETED_PROGRAMS if IS_INTERPRETED else programs * num_multiprocessors(total.device.index)
    shape = programs, num_parameters * weight.shape[0]
    parts_PC = torch.empty(shape, dtype=torch.float32, device=weight.device)
    strides = [0 if x is None else x.stride(0) for x in read]
    total_NC, *gradients = read
    kernel[(programs,)](
        total_NC, weight.contiguous(), *statistics, *gradients, grad, grad_x, parts_PC, *strides, total_NC.shape[0],
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
