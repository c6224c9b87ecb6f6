"""RMSNorm and LayerNorm in Triton, alone or after the addition of a residual.

    s = x + r (or x)    σ = 1/√(mean (s − μ)² + ε)    n = σ (s − μ)    y = n ∘ w + b
    g = ∂y ∘ w    ∂x = ∂r = σ (g − mean g − n · mean(g ∘ n)) + ∂s
    ∂w = Σ_rows ∂y ∘ n    ∂b = Σ_rows ∂y

RMSNorm has no b, its μ is 0, and mean g does not enter. Squares are fp32: of a row with elements
beyond 1.8e19, RMSNorm gives zeros and LayerNorm zeros or NaN, as PyTorch's do. Memory bounds both.
Elements moved: forward 2·N·C, with a residual 4·N·C; backward 3·N·C, with the gradient of the sum
4·N·C. Kept for backward: s, w, and μ and σ of each row.

Forward, a program takes whole rows into registers. Backward, persistent programs loop over rows,
the next ones on their way to shared memory; each adds its part of the parameters' gradients in
registers, in fp32, and one more kernel adds the parts: no atomics, so bit-equal repeats. There a
row is read in pieces of a power of two: padded to one, a row of 2,560 columns would be computed as
4,096, and arithmetic would bound the kernel.

Shape suffixes: N rows, C columns, P programs.
"""

import functools

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from labkit.kernels.column_sums import add_columns
from labkit.kernels.fused import (
    autocast_dtype,
    check,
    check_shape,
    load_fp32,
    operator,
    rows_of,
    runs_kernel,
    wide,
    wrap_triton,
)
from labkit.kernels.launch import num_multiprocessors

MAX_COLUMNS = 32768  # 32 elements of a row a thread, of 1,024 threads

# Of the persistent programs of backward.
PIECE = 256  # elements of a warp
MAX_PIECES = 4  # of a row
PIECES_AT_ONCE = {1: 50, 2: 38}  # in a multiprocessor's registers, by the number of parameters
MAX_PROGRAMS = 8  # of a multiprocessor
BYTES_AHEAD = 98304  # on their way to shared memory, which every device since Ampere has
MAX_STAGES = 3


@functools.cache
def row_tile(num_columns: int) -> dict[str, int]:
    """Returns the constants of a launch with a tile of whole rows a program: 16 elements of a row a
    thread.
    """
    block = triton.next_power_of_2(num_columns)
    return {
        "C": num_columns,
        "BLOCK": block,
        "ROWS": max(1, 2048 // block),
        "num_warps": min(max(block // 512, 2), 32),
    }


@functools.cache
def persistent_tile(
    num_columns: int, bytes_a_column: int, num_parameters: int
) -> tuple[dict[str, int], int]:
    """Returns the constants of a launch of persistent programs, and how many of these a
    multiprocessor has.

    A program takes a row at a time, a thread 8 elements of each piece. `bytes_a_column` are read of
    a row for each column.
    """
    num_warps = triton.next_power_of_2(-(-num_columns // (PIECE * MAX_PIECES)))
    width = PIECE * num_warps
    pieces = -(-num_columns // width)
    programs = min(max(1, PIECES_AT_ONCE[num_parameters] // (num_warps * pieces)), MAX_PROGRAMS)
    stages = min(1 + BYTES_AHEAD // (pieces * width * bytes_a_column), MAX_STAGES)
    tile = {
        "C": num_columns,
        "WIDTH": width,
        "PIECES": pieces,
        "STAGES": stages,
        "num_warps": num_warps,
    }
    return tile, programs


@triton.jit
def norm_fwd_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    sum_ptr,
    scale_ptr,
    mean_ptr,
    stride_x,
    stride_r,
    num_rows,
    eps,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One program normalises ROWS rows, around their means if there is a bias."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    cols = tl.arange(0, BLOCK)[None, :]
    inside = (rows < num_rows) & (cols < C)
    x = load_fp32(x_ptr + rows * stride_x + cols, inside)
    if residual_ptr is not None:
        x += load_fp32(residual_ptr + rows * stride_r + cols, inside)
        # What is normalised is the sum as stored, which backward reads.
        rounded = x.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + rows * C + cols, rounded, mask=inside)
        x = rounded.to(tl.float32)
    weight = load_fp32(weight_ptr + cols, cols < C)
    if bias_ptr is not None:
        mean = tl.sum(x, axis=1, keep_dims=True) / C
        tl.store(mean_ptr + rows, mean, mask=rows < num_rows)
        # Beyond C are zeros, which are not at the mean and must not count.
        x = tl.where(cols < C, x - mean, 0.0)
    # The compiler hands a Python number over in fp64, which every element would then be.
    eps = tl.cast(eps, tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=1, keep_dims=True) / C + eps)
    tl.store(scale_ptr + rows, scale, mask=rows < num_rows)
    y = x * scale * weight
    if bias_ptr is not None:
        y += load_fp32(bias_ptr + cols, cols < C)
    tl.store(y_ptr + rows * C + cols, y, mask=inside)


@triton.jit
def add_pairs(a, b, other_a, other_b):
    return a + other_a, b + other_b


@triton.jit
def norm_bwd_kernel(
    sum_ptr,
    weight_ptr,
    scale_ptr,
    mean_ptr,
    grad_y_ptr,
    grad_sum_ptr,
    grad_ptr,
    grad_x_ptr,
    parts_ptr,
    num_rows,
    C: tl.constexpr,
    WIDTH: tl.constexpr,
    PIECES: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Each program loops over dense rows, and adds its part of ∂w and, of LayerNorm, which has
    means, of ∂b.
    """
    lanes = tl.arange(0, WIDTH)
    weights, grad_weights, grad_biases = (), (), ()
    for piece in tl.static_range(PIECES):
        cols = piece * WIDTH + lanes
        weights += (load_fp32(weight_ptr + cols, cols < C),)
        grad_weights += (tl.zeros((WIDTH,), dtype=tl.float32),)
        if mean_ptr is not None:
            grad_biases += (tl.zeros((WIDTH,), dtype=tl.float32),)
    step = tl.num_programs(0)
    # Two numbers of a row ahead, like its elements.
    first = tl.program_id(0)
    next_mean = 0.0 if mean_ptr is None else tl.load(mean_ptr + first, mask=first < num_rows)
    next_scale = tl.load(scale_ptr + first, mask=first < num_rows)
    for number in tl.range(first, num_rows, step, num_stages=STAGES):
        row = tl.cast(number, tl.int64)
        mean, scale = next_mean, next_scale
        if mean_ptr is not None:
            next_mean = tl.load(mean_ptr + row + step, mask=row + step < num_rows)
        next_scale = tl.load(scale_ptr + row + step, mask=row + step < num_rows)
        normed, grad_normed, weights_now, biases_now = (), (), (), ()
        slopes, shifts = tl.zeros((WIDTH,), dtype=tl.float32), tl.zeros((WIDTH,), dtype=tl.float32)
        for piece in tl.static_range(PIECES):
            cols = piece * WIDTH + lanes
            x = load_fp32(sum_ptr + row * C + cols, cols < C)
            grad_y = load_fp32(grad_y_ptr + row * C + cols, cols < C)
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
        # Both sums in one reduction, for it is the threads' waiting for one another that takes
        # time.
        slope, shift = tl.reduce((slopes, shifts), 0, add_pairs)
        shift = 0.0 if mean_ptr is None else shift
        for piece in tl.static_range(PIECES):
            cols = piece * WIDTH + lanes
            grad = scale * (grad_normed[piece] - shift / C - normed[piece] * (slope / C))
            if grad_sum_ptr is not None:
                grad += load_fp32(grad_sum_ptr + row * C + cols, cols < C)
            tl.store(grad_ptr + row * C + cols, grad, mask=cols < C)
            if grad_x_ptr is not None:
                tl.store(grad_x_ptr + row * C + cols, grad, mask=cols < C)
    num_parameters: tl.constexpr = 1 if mean_ptr is None else 2
    parts_ptr += first * num_parameters * C
    for piece in tl.static_range(PIECES):
        cols = piece * WIDTH + lanes
        tl.store(parts_ptr + cols, grad_weights[piece], mask=cols < C)
        if mean_ptr is not None:
            tl.store(parts_ptr + C + cols, grad_biases[piece], mask=cols < C)


@operator("norm")
def norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    dtype: torch.dtype,
) -> list[Tensor]:
    """Returns [y, σ of each row, μ of each row with a bias, sum with a residual], σ and μ in
    fp32.
    """
    x_NC = rows_of(x)
    y = x.new_empty(x.shape, dtype=dtype)
    scale = x.new_empty(x.shape[:-1], dtype=torch.float32)
    mean = residual_NC = total = None
    if bias is not None:
        bias = bias.contiguous()
        mean = torch.empty_like(scale)
    if residual is not None:
        residual_NC = rows_of(residual)
        total = residual.new_empty(x.shape)
    tile = row_tile(int(x.shape[-1]))
    wrap_triton(norm_fwd_kernel)[(-(-x_NC.shape[0] // tile["ROWS"]),)](
        x_NC,
        residual_NC,
        weight.contiguous(),
        bias,
        y,
        total,
        scale,
        mean,
        x_NC.stride(0),
        0 if residual is None else residual_NC.stride(0),
        x_NC.shape[0],
        eps,
        **tile,
    )
    return [output for output in (y, scale, mean, total) if output is not None]


@operator("norm_backward")
def norm_backward(
    total: Tensor,
    weight: Tensor,
    scale: Tensor,
    mean: Tensor | None,
    grad_y: Tensor,
    grad_total: Tensor | None,
    x_dtype: torch.dtype,
) -> list[Tensor]:
    """Returns the gradients of the sum, of the parameters (one a row), and that of x if its dtype
    is another.
    """
    # Hooks on saved tensors may have laid them out anew.
    total = total.contiguous()
    scale = scale.contiguous()
    grad_y = grad_y.contiguous()
    bytes_a_column = total.element_size() + grad_y.element_size()
    if grad_total is not None:
        grad_total = grad_total.contiguous()
        bytes_a_column += grad_total.element_size()
    grad = torch.empty_like(total)
    grad_x = None
    if x_dtype != total.dtype:
        grad_x = torch.empty_like(total, dtype=x_dtype)
        bytes_a_column += grad_x.element_size()  # stored by way of shared memory
    # Columns are a constant of the kernels, no symbol of the compiler's.
    num_columns = int(weight.shape[0])
    num_parameters = 1 if mean is None else 2
    tile, programs = persistent_tile(num_columns, bytes_a_column, num_parameters)
    programs *= num_multiprocessors(total.device.index)
    parts_PC = scale.new_empty(programs, num_parameters * num_columns)
    wrap_triton(norm_bwd_kernel)[(programs,)](
        total,
        weight.contiguous(),
        scale,
        None if mean is None else mean.contiguous(),
        grad_y,
        grad_total,
        grad,
        grad_x,
        parts_PC,
        scale.numel(),
        **tile,
    )
    sums = add_columns(parts_PC, weight.dtype).view(num_parameters, -1)
    return [grad, sums] if grad_x is None else [grad, sums, grad_x]


def _setup(ctx, inputs, output) -> None:
    x, residual, weight, bias = inputs[:4]
    ctx.x_dtype = x.dtype
    ctx.has_residual = residual is not None
    total = output[-1] if ctx.has_residual else x
    ctx.save_for_backward(total, weight, output[1], None if bias is None else output[2])
    # None, not zeros to be read, for a sum that nothing used.
    ctx.set_materialize_grads(False)


def _gradients(ctx, grad_y, *others):
    if grad_y is None:
        grad_y = torch.zeros_like(ctx.saved_tensors[0])
    grad_total = others[-1] if ctx.has_residual else None
    grad, sums, *grad_x = norm_backward(*ctx.saved_tensors, grad_y, grad_total, ctx.x_dtype)
    grad_weight, grad_bias = (*sums, None)[:2]
    grad_residual = grad if ctx.has_residual else None
    return *(grad_x or [grad]), grad_residual, grad_weight, grad_bias, None, None


norm.register_autograd(_gradients, setup_context=_setup)


Norm = tuple[Tensor, Tensor, Tensor, float]
"""What gives LayerNorm of a sum again: the sum, the norm's weight and bias, and its ε."""


def check_norm(normed: Tensor, norm: Norm) -> None:
    """Raises ValueError for shapes that cannot have given `normed`; dtypes show in backward."""
    total, weight, bias, _ = norm
    check_shape("norm's sum", total, *normed.shape)
    check_shape("norm's weight", weight, normed.shape[-1])
    check_shape("norm's bias", bias, normed.shape[-1])


def _normalise(
    x: Tensor, residual: Tensor | None, eps: float, **parameters: Tensor
) -> Tensor | tuple[Tensor, Tensor]:
    """Returns x normalised or, with a residual, (the sum normalised, the sum): around the mean if
    there is a bias beside the weight.

    Where no kernel runs PyTorch's function does, on a sum in fp32 or fp64.

    Raises TypeError and ValueError for tensors that do not fit.
    """
    others = parameters if residual is None else {"residual": residual, **parameters}
    check({"x": x, **others}, may_be_fp32=True)
    for name, tensor in others.items():
        check_shape(name, tensor, *(x.shape if name == "residual" else x.shape[-1:]))
    dtype = autocast_dtype(x) or (x if residual is None else residual).dtype
    if runs_kernel(x):
        if x.shape[-1] > MAX_COLUMNS:
            raise ValueError(
                f"the last dimension of x must be at most {MAX_COLUMNS}, got {x.shape[-1]}"
            )
        y, *_, total = norm(x, residual, parameters["weight"], parameters.get("bias"), eps, dtype)
    else:
        total = x if residual is None else (x + residual).to(residual.dtype)
        function = F.layer_norm if "bias" in parameters else F.rms_norm
        exact = wide(total)
        widened = {name: tensor.to(exact) for name, tensor in parameters.items()}
        y = function(exact, x.shape[-1:], **widened, eps=eps).to(dtype)
    return y if residual is None else (y, total)


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """Returns x / √(mean x² + eps) ∘ weight over the last dimension or, with a residual, (that of
    the sum, the sum).

    Args:
        x: (..., C), fp32, bf16 or fp16, any strides; C up to 32768 on a GPU. fp64 in plain
            PyTorch.
        weight: (C,), dtype of x or fp32.
        residual: of x's shape, dtype of x or fp32, which the sum has; it is rounded before it is
            normalised.

    Returns:
        The normalised tensor in the dtype of the sum, under autocast in autocast's; all arithmetic
        is fp32.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices that do not fit; an empty last dimension.

    Error budget: that of `labkit.numerics.judge` for the formula in the same dtype, against fp64.

    Source: Zhang & Sennrich 2019, "Root Mean Square Layer Normalization", equation 4.
    """
    return _normalise(x, residual, eps, weight=weight)


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, residual: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """Returns LayerNorm over the last dimension of x or, with a residual, (that of the sum, the
    sum).

    Args:
        bias: (C,), dtype of x or fp32; all else, Returns, Raises and Error budget as in `rms_norm`.

    Source: Ba et al. 2016, "Layer Normalization", equation 4.
    """
    return _normalise(x, residual, eps, weight=weight, bias=bias)
