"""What the fused kernels share: how they become PyTorch operators, and what they accept."""

import functools
import hashlib
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch._library import triton as torch_triton
from torch.autograd import forward_ad
from torch.nn.parameter import Parameter
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from labkit.kernels.launch import Launcher

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# What TRITON_INTERPRET said when this module was imported: interpreted kernels run on CPU tensors.
IS_INTERPRETED = triton.knobs.runtime.interpret

LIBRARY = torch.library.Library("labkit", "FRAGMENT")

# What the compiler keeps on disk it would find again by the names of operators and the kernels of
# forward passes alone, and run the tiles and backward passes of another version of this folder.
_SOURCES = sorted(Path(__file__).parent.rglob("*.py"))
_DIGEST = hashlib.sha256(b"".join(path.read_bytes() for path in _SOURCES))
torch.compiler.config.cache_key_tag += f"labkit {_DIGEST.hexdigest()}"


class Operator:
    """The operator `labkit::name`, called past PyTorch's dispatcher where nothing looks at
    operators: the dispatcher takes longer than a launch.

    A compiler, a mode, a transform or a subclass of tensors is shown the operator, as is what the
    direct way could not do: a gradient that nothing defines.
    """

    def __init__(self, name: str, function: Callable, opaque: bool):
        self.name = name
        self.function = function
        self.gradients = None
        if opaque:
            # `custom_op` would check in Python, at each call, for 30 us, that no output shares
            # memory with an input; the tests do.
            schema = torch.library.infer_schema(function, mutates_args=())
            LIBRARY.define(f"{name}{schema}", tags=torch.Tag.pt2_compliant_tag)
            LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        else:
            make = torch.library.custom_op if IS_INTERPRETED else torch.library.triton_op
            # PyTorch would look for the kernels, for the key of its cache, and import the compiler
            # for that: seconds of every process. The tag above names them all.
            find_kernels = torch_triton.get_inner_triton_kernels
            torch_triton.get_inner_triton_kernels = lambda function: []
            try:
                make(f"labkit::{name}", function, mutates_args=())
            finally:
                torch_triton.get_inner_triton_kernels = find_kernels
            if IS_INTERPRETED:
                self.register_fake(function)
        self.op = getattr(torch.ops.labkit, name).default

    def register_fake(self, function: Callable) -> Callable:
        """Registers what tells the compiler shapes, dtypes and strides of the outputs."""
        return torch.library.register_fake(f"labkit::{self.name}", function, lib=LIBRARY)

    def register_autograd(self, gradients: Callable, *, setup_context: Callable) -> None:
        """Registers `gradients(ctx, *grads)`, which returns a tuple."""
        gradients = first_order(self.name)(gradients)
        self.gradients = gradients
        self.setup_context = setup_context
        registered = gradients
        if self.function.__annotations__["return"] == list[Tensor]:
            # PyTorch passes the gradients of a list as one list.
            def registered(ctx, grads):
                return gradients(ctx, *grads)

        torch.library.register_autograd(
            f"labkit::{self.name}", registered, setup_context=setup_context, lib=LIBRARY
        )

    def __call__(self, *arguments):
        refuse_forward_mode(self.name)
        tensors = [x for x in arguments if isinstance(x, Tensor)]
        if is_watched(tensors):
            return self.op(*arguments)
        if not torch.is_grad_enabled() or not any(x.requires_grad for x in tensors):
            return self.run(arguments)
        return _Direct.apply(self, *arguments) if self.gradients else self.op(*arguments)

    def run(self, arguments: tuple):
        """Calls the function so that its kernels are launched, not traced."""
        # PyTorch's context manager for this takes longer than a launch.
        torch_triton.wrap_triton_enabled.value = False
        try:
            return self.function(*arguments)
        finally:
            torch_triton.wrap_triton_enabled.value = True


def refuse_forward_mode(name: str) -> None:
    """Raises where forward mode is on: a launch would drop its tangents, like the dispatcher."""
    if forward_ad._current_level >= 0:
        raise NotImplementedError(f"{name} has no derivative in forward mode")


def is_watched(tensors: Sequence[Tensor]) -> bool:
    """Returns whether a compiler, a mode, a transform or a subclass of tensors looks at
    operators.
    """
    return (
        torch.compiler.is_compiling()
        # Of a view like conj().imag the sign is kept apart, and the dispatcher applies it.
        or any(type(x) not in (Tensor, Parameter) or x.is_neg() for x in tensors)
        or torch._C._are_functorch_transforms_active()
        or is_in_torch_dispatch_mode()
    )


class _Direct(torch.autograd.Function):
    """An operator's gradient as it was registered."""

    @staticmethod
    def forward(ctx, operator: Operator, *arguments):
        outputs = operator.run(arguments)
        operator.setup_context(ctx, arguments, outputs)
        ctx.operator = operator
        return tuple(outputs) if isinstance(outputs, list) else outputs

    @staticmethod
    def backward(ctx, *grads):
        return None, *ctx.operator.gradients(ctx, *grads)


def operator(name: str, *, opaque: bool = False) -> Callable:
    """Returns a decorator that makes a function of kernel launches the operator `labkit::name`.

    The compiler sees the launches inside, unless it is opaque, as all are where kernels are
    interpreted.
    """
    return lambda function: Operator(name, function, opaque)


def wrap_triton(kernel):
    """Returns what launches a kernel inside an operator, and is seen there by the compiler while it
    traces.
    """
    wrapped = kernel if IS_INTERPRETED else torch.library.wrap_triton(kernel)
    return Launcher(kernel) if wrapped is kernel else wrapped


def first_order(name: str) -> Callable:
    """Returns a decorator for an autograd `backward(ctx, *grads)`, whose tuple of gradients then
    refuses to be differentiated.

    torch's own `once_differentiable` passes on gradients without a graph where the incoming ones
    have none, as of a sum: a gradient penalty then trains nothing, in silence.
    """

    refusal = f"{name} has no second derivative: differentiate the formula in plain PyTorch instead"

    def decorate(backward: Callable) -> Callable:
        @functools.wraps(backward)
        def refusing(ctx, *grads):
            if not torch.is_grad_enabled():
                return backward(ctx, *grads)
            # Whether one requires a gradient is not asked: a tensor that only an outer transform of
            # torch.func differentiates by denies it.
            sources = [x for x in (*grads, *ctx.saved_tensors) if isinstance(x, Tensor)]
            with torch.no_grad():
                gradients = backward(ctx, *grads)
            # PyTorch's node that passes tensors on, and raises when it is differentiated.
            refuse = torch._C._functions.DelayedError(refusal, len(gradients) + len(sources))
            return refuse(*gradients, *sources)[: len(gradients)]

        return refusing

    return decorate


@triton.jit
def load_fp32(pointers, inside):
    """Loads elements as fp32, zeros where they are not inside."""
    return tl.load(pointers, mask=inside, other=0.0).to(tl.float32)


def runs_kernel(x: Tensor) -> bool:
    """Returns whether a kernel takes the tensor; the formula in plain PyTorch takes all others."""
    return x.dtype in DTYPES and (x.is_cuda or (IS_INTERPRETED and x.is_cpu))


def check_kind(name: str, tensor: Tensor, dtypes: Collection[torch.dtype], like: Tensor) -> None:
    """Raises TypeError for what is no tensor, ValueError for another dtype or the device of
    another.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if tensor.dtype not in dtypes or tensor.device != like.device:
        raise ValueError(
            f"{name} must be {' or '.join(sorted(map(str, dtypes)))} on {like.device}, got "
            f"{tensor.dtype} on {tensor.device}"
        )


def check(tensors: dict[str, Tensor], *, may_be_fp32: bool = False) -> None:
    """Raises TypeError or ValueError unless all tensors are on the first one's device and of its
    dtype, a floating one.

    Args:
        tensors: by name; the last dimension of the first must not be empty.
        may_be_fp32: whether the others may be fp32 beside a 16-bit first.
    """
    (first, x), *others = tensors.items()
    check_kind(first, x, (*DTYPES, torch.float64), like=x)
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(
            f"the last dimension of {first} must not be empty, got shape {tuple(x.shape)}"
        )
    dtypes = {x.dtype, torch.float32} if may_be_fp32 else {x.dtype}
    for name, tensor in others:
        check_kind(name, tensor, dtypes, like=x)


def check_shape(name: str, tensor: Tensor, *shape: int) -> None:
    """Raises ValueError unless a tensor is of the shape."""
    if tensor.shape != shape:
        raise ValueError(f"{name} must be of shape {tuple(shape)}, got {tuple(tensor.shape)}")


def check_integers(name: str, tensor: Tensor, like: Tensor, *shape: int) -> None:
    """Raises unless a tensor holds int64 of the shape on the device of another."""
    check_kind(name, tensor, [torch.int64], like)
    check_shape(name, tensor, *shape)


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Returns the dtype in which autocast has a product take x, None where it would not touch
    it.
    """
    kind = x.device.type
    # Autocast knows nothing of the meta device, and raises.
    if x.dtype == torch.float64 or kind == "meta" or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def product_inputs(**tensors: Tensor) -> list[Tensor]:
    """Returns the tensors of a product, checked as by `check`, in the dtype in which autocast has
    it take them.
    """
    for name, tensor in tensors.items():
        check_kind(name, tensor, (*DTYPES, torch.float64), like=tensor)
        tensors[name] = tensor.to(autocast_dtype(tensor) or tensor.dtype)
    check(tensors)
    return list(tensors.values())


def outside_autocast(function: Callable) -> Callable:
    """Decorates what multiplies tensors in the dtypes that it is given, which autocast would change
    again.
    """

    @functools.wraps(function)
    def wrapped(*arguments, **options):
        x = next(x for x in arguments if isinstance(x, Tensor))
        if autocast_dtype(x) is None:
            return function(*arguments, **options)
        with torch.autocast(x.device.type, enabled=False):
            return function(*arguments, **options)

    return wrapped


def wide(x: Tensor) -> Tensor:
    """Returns x in the dtype of a formula's sums: fp32, fp64 for fp64."""
    return x if x.dtype == torch.float64 else x.float()


def with_dense_rows(x: Tensor) -> Tensor:
    """Returns x with adjacent columns: itself, or a copy."""
    return x if x.stride(-1) == 1 else x.contiguous()


def rows_of(x: Tensor) -> Tensor:
    """Returns x as (rows, columns) with adjacent columns, a view where its strides allow."""
    return with_dense_rows(x if x.dim() == 2 else x.reshape(-1, x.shape[-1]))
