"""What the fused kernels share: how they become PyTorch operators, and what they accept."""

from collections.abc import Callable

import torch
import triton
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
IS_INTERPRETED = triton.knobs.runtime.interpret


def operator(name: str, mutates_args: tuple[str, ...] = ()) -> Callable:
    """Returns a decorator that makes a function of kernel launches the operator `labkit::name`.

    The compiler sees the launches inside. Interpreted kernels cannot be traced: then the operator is opaque.
    """
    if not IS_INTERPRETED:
        return torch.library.triton_op(f"labkit::{name}", mutates_args=mutates_args)

    def register(function: Callable):
        opaque = torch.library.custom_op(f"labkit::{name}", function, mutates_args=mutates_args)
        opaque.register_fake(function)
        return opaque

    return register


class Launcher:
    """A kernel that launches on its tensors' device, whichever is the current one; fake tensors launch nothing."""

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        def launch(*arguments, **constants):
            if not any(isinstance(argument, FakeTensor) for argument in arguments):
                with torch.cuda.device_of(arguments[0]):
                    self.kernel[grid](*arguments, **constants)

        return launch


def wrap_triton(kernel):
    """Returns what launches a kernel inside an operator, and is seen there by the compiler while it traces.

    PyTorch finds an operator's kernels, for the key of its cache, by the calls of this name in its source.
    """
    wrapped = kernel if IS_INTERPRETED else torch.library.wrap_triton(kernel)
    return Launcher(kernel) if wrapped is kernel else wrapped


def runs_kernel(x: Tensor) -> bool:
    """Returns whether a kernel runs on the tensor's device; elsewhere the formula in plain PyTorch does."""
    return x.is_cuda or IS_INTERPRETED


def check(tensors: dict[str, Tensor | None], may_be_fp32: tuple[str, ...] = ()) -> None:
    """Raises ValueError unless all tensors are on the first one's device and of its dtype, a floating one.

    Args:
        tensors: by name; None is passed over. The last dimension of the first must not be empty.
        may_be_fp32: names of those that may be fp32 beside a 16-bit first.
    """
    (first, x), *others = [(name, tensor) for name, tensor in tensors.items() if tensor is not None]
    accepted = DTYPES if runs_kernel(x) else (*DTYPES, torch.float64)
    if x.dtype not in accepted:
        raise ValueError(f"{first} must be of {', '.join(map(str, accepted))} on {x.device.type}, got {x.dtype}")
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(f"the last dimension of {first} must not be empty, got shape {tuple(x.shape)}")
    for name, tensor in others:
        fitting = {x.dtype: None, torch.float32: None} if name in may_be_fp32 else {x.dtype: None}
        if tensor.device != x.device:
            raise ValueError(f"{name} must be on the device of {first}, {x.device}, got {tensor.device}")
        if tensor.dtype not in fitting:
            text = " or ".join(map(str, fitting))
            raise ValueError(f"{name} must have the dtype of {first}, {text}, got {tensor.dtype}")


def check_shape(name: str, tensor: Tensor | None, *shape: int) -> None:
    """Raises ValueError unless a tensor is None or of the shape."""
    if tensor is not None and tensor.shape != shape:
        raise ValueError(f"{name} must be of shape {tuple(shape)}, got {tuple(tensor.shape)}")


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Returns the dtype in which autocast has a product take x, None where it would not touch it."""
    kind = x.device.type
    if x.dtype == torch.float64 or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def wide(x: Tensor) -> Tensor:
    """Returns x in the dtype of a formula's sums: fp32, fp64 for fp64."""
    return x if x.dtype == torch.float64 else x.float()


def rows_of(x: Tensor) -> Tensor:
    """Returns x as (rows, columns) with adjacent columns, a view where its strides allow."""
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(-1) == 1 else x.contiguous()
