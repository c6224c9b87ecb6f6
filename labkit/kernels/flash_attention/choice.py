"""What runs: the implementation, the products, the kernels of the gradients; tiles.py has tiles.

Limits were found on an H200.
"""

import functools
import importlib
import logging
import math

import torch
import triton
from torch import Tensor

from labkit.kernels.flash_attention.triton import IS_INTERPRETED
from labkit.kernels.launch import num_multiprocessors

MAX_HEAD_DIM = 256
IMPLS = ("auto", "gluon", "triton", "tiled")
PRECISIONS = ("auto", "ieee", "tf32x3", "bf16x6", "tf32")
PRODUCTS_HEAD_DIM = 128  # up to which several products on the tensor cores make one of fp32
# From how many queries of one head and of all cutting operands into slices takes a Hopper GPU less
# time than it gains: few queries read their keys once, and cutting those is no less.
SLICES_QUERIES = 256
SLICES_ALL_QUERIES, SLICES_ALL_QUERIES_AT_32 = 1024, 2048
TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TILED_DTYPES = (*TRITON_DTYPES, torch.float64)
GLUON_DTYPES = (torch.bfloat16, torch.float16)
GLUON_HEAD_DIMS = (64, 72, 80, 96, 128)
SINGLE_PASS_HEAD_DIMS = (64, 128)
# Tiles of 128 queries up to which "auto" runs the Triton kernels on an H200: at D 64 those are as
# fast or faster, else up to 3 us slower, which the host gains by arguments without tile
# descriptors.
SMALL, SMALL_AT_64 = 4, 32
# queries and keys at D 64, full: two passes of persistent programs take less time than one
PERSISTENT_UNTIL = 1024


def listed(values) -> str:
    return ", ".join(str(value) for value in values)


@functools.cache
def capability_of(device_index: int) -> int:
    major, minor = torch.cuda.get_device_capability(device_index)
    return 10 * major + minor


@functools.cache
def hopper_kernels(name: str):
    """The Gluon kernels, loaded when they are first needed: Gluon's interface moves between
    releases of Triton.
    """
    return importlib.import_module(f"labkit.kernels.flash_attention.hopper.{name}")


@functools.cache
def not_loading(name: str, instead: str) -> str | None:
    """Returns why a module of Gluon kernels does not load with the installed Triton, None where it
    does; logs what runs instead.
    """
    try:
        hopper_kernels(name)
    except (ImportError, AttributeError, TypeError) as error:
        reason = (
            f"the Gluon kernels do not load with triton {triton.__version__} "
            f"({type(error).__name__}: {error})"
        )
        logging.getLogger(__name__).warning("%s: %s", instead, reason)
        return reason
    return None


def _gluon_objection(device: torch.device) -> str | None:
    """Returns why the Gluon kernels cannot run on a device, None where they can."""
    if device.type != "cuda":
        return f"takes q, k and v on a Hopper GPU; got {device}"
    index = torch.cuda.current_device() if device.index is None else device.index
    if capability_of(index) != 90:
        return (
            f"takes q, k and v on a GPU of compute capability 9.0; got {capability_of(index) / 10}"
        )
    instead = "attention falls back to impl='triton'"
    return not_loading("forward", instead) or not_loading("two_passes", instead)


# As torch.compiler.assume_constant_result marks it, which would import the compiler: four seconds
# of a process.
_gluon_objection._dynamo_marked_constant = True


def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and capability_of(device.index) == 90


_is_hopper._dynamo_marked_constant = True


def _is_small(q: Tensor) -> bool:
    """Whether the queries are so few that the Triton kernels take less time than Gluon's, or less
    time to launch.
    """
    num_tiles = triton.cdiv(q.shape[-2], 128) * math.prod(q.shape[:-2])
    return num_tiles <= (SMALL_AT_64 if q.shape[-1] == 64 else SMALL)


def resolve_impl(
    q: Tensor, impl: str = "auto", *, left: int = -1, right: int = -1, packed: bool = False
) -> str:
    """Returns the implementation that `flash_attention` runs for these queries: what a record
    should name.

    Args:
        q: the queries; their device, dtype and head dimension decide.
        impl: one of IMPLS. "auto" is "gluon" on a Hopper GPU for what those kernels take (bf16 and
            fp16, head dimension 64, 72, 80, 96 or 128, no window, not packed) unless the queries
            are few, else "triton" on a CUDA device in a dtype that it takes, else "tiled".
        left, right: the mask's limits, −1 for none; (−1, 0) is causal.
        packed: whether sequences are packed.

    Raises:
        ValueError: an unknown name; an implementation named that cannot run these.
    """
    if impl not in IMPLS:
        raise ValueError(f"impl must be one of {listed(IMPLS)}; got {impl!r}")
    if impl == "auto" and (not q.is_cuda or q.dtype not in TRITON_DTYPES):
        return "tiled"
    if impl in ("auto", "gluon"):
        objection = None
        if q.dtype not in GLUON_DTYPES:
            objection = f"takes q, k and v of dtype {listed(GLUON_DTYPES)}; got {q.dtype}"
        elif q.shape[-1] not in GLUON_HEAD_DIMS:
            objection = f"takes head dimensions {listed(GLUON_HEAD_DIMS)}; got {q.shape[-1]}"
        elif packed or left >= 0 or right > 0:
            objection = f"takes no {'packed sequences' if packed else 'window'}"
        objection = objection or _gluon_objection(q.device)
        if objection is None:
            return "triton" if impl == "auto" and _is_small(q) else "gluon"
        if impl == "gluon":
            raise ValueError(f"impl='gluon' {objection}")
        return "triton"
    if impl == "triton":
        if not q.is_cuda and not IS_INTERPRETED:
            raise ValueError(
                f"impl='triton' takes q, k and v on a CUDA device; got {q.device} ('tiled' takes "
                f"any)"
            )
        if q.dtype not in TRITON_DTYPES:
            raise ValueError(
                f"impl='triton' takes q, k and v of dtype {listed(TRITON_DTYPES)}; got {q.dtype}"
            )
    return impl


def resolve_precision(q: Tensor, precision: str = "auto", *, packed: bool = False) -> str:
    """Returns the products that the Triton kernels run in fp32, of PRECISIONS but "auto": what a
    record should name.

    Raises ValueError for a name that is none of PRECISIONS.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"precision must be one of {listed(PRECISIONS)}; got {precision!r}")
    head_dim = q.shape[-1]
    if head_dim > PRODUCTS_HEAD_DIM:
        return "tf32" if precision == "tf32" else "ieee"
    if precision not in ("auto", "bf16x6"):
        return precision
    is_hopper = _is_hopper(q.device)
    if q.dtype != torch.float32 or (q.is_cuda and not is_hopper):
        return "tf32x3"
    if precision == "bf16x6":
        return precision
    num_queries = q.shape[0] if packed else q.shape[-2]
    enough = (SLICES_ALL_QUERIES_AT_32 if head_dim <= 32 else SLICES_ALL_QUERIES) * head_dim
    if is_hopper and num_queries >= SLICES_QUERIES and q.numel() >= enough:
        return "bf16x6"
    return "tf32x3"


def resolve_backward(q: Tensor, k: Tensor, impl: str, *, causal: bool) -> str:
    """Returns which kernels compute the gradients after an `impl` as `resolve_impl` returns it: its
    own, or after "gluon" "one pass" or "two passes".

    Args:
        q, k: (B, H, S, D) or (B, S, D).
    """
    if impl != "gluon":
        return impl
    shapes = (x.shape if x.dim() == 4 else x.unsqueeze(1).shape for x in (q, k))
    return backward_kernels(*shapes, q.device.index, causal)


def backward_kernels(
    q_shape: tuple[int, ...], k_shape: tuple[int, ...], device_index: int, causal: bool
) -> str:
    """Returns what `resolve_backward` does after "gluon", by shapes (B, H, S, D).

    "one pass" where the parts of q's gradient are added in one order without much waiting; "two
    passes" else, as always at other head dimensions than 64 and 128, with grouped heads, and with
    short full masks at 64, in persistent programs.
    """
    num_batches, num_heads, num_queries, head_dim = q_shape
    _, num_key_heads, num_keys, _ = k_shape
    persistent = head_dim == 64 and not causal and max(num_queries, num_keys) <= PERSISTENT_UNTIL
    if (
        persistent
        or num_heads != num_key_heads
        or head_dim not in SINGLE_PASS_HEAD_DIMS
        or not_loading("one_pass", "gradients take two passes")
    ):
        return "two passes"
    shape = (num_batches * num_heads, num_queries, num_keys, head_dim)
    programs = num_multiprocessors(device_index)
    pays = hopper_kernels("one_pass").ordering_pays(*shape, causal, programs)
    return "one pass" if pays else "two passes"
