"""What runs: the implementation, the products of fp32 and the tiles.

Limits were found and tiles tuned on an H200. Tiles of other devices fit 99 KiB of shared memory,
the least since Ampere (8.6, 8.9, 12.0). tests/test_kernel_compilation.py holds all rows to their
limits: 255 registers a thread, 227 KiB of shared memory on Hopper, no spills and no serialised
products.
"""

import functools
import importlib
import logging
import math
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from labkit.kernels.flash_attention.triton import split_head_dim
from labkit.kernels.fused import IS_INTERPRETED

MAX_HEAD_DIM = 256
IMPLS = ("auto", "gluon", "triton", "tiled")
PRECISIONS = ("auto", "ieee", "tf32x3", "bf16x6")
PRODUCTS_HEAD_DIM = 128  # up to which several products on the tensor cores make one of fp32
# From how many queries of one head and of all cutting operands into slices takes a Hopper GPU less
# time than it gains: few queries read their keys once, and cutting those is no less.
SLICES_QUERIES = 256
SLICES_ALL_QUERIES, SLICES_ALL_QUERIES_AT_32 = 1024, 2048
TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TILED_DTYPES = (*TRITON_DTYPES, torch.float64)
GLUON_DTYPES = (torch.bfloat16, torch.float16)
GLUON_HEAD_DIMS = (64, 72, 80, 96, 128)
# Tiles of 128 queries up to which "auto" runs the Triton kernels on an H200: at D 64 those are as
# fast or faster, else up to 3 us slower, which the host gains by arguments without tile
# descriptors.
SMALL, SMALL_AT_64 = 4, 32


def listed(values) -> str:
    return ", ".join(map(str, values))


@functools.cache
def capability_of(device: torch.device) -> int:
    """Returns 10 · major + minor: 90 is Hopper; 0 of what is no CUDA device."""
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@functools.cache
def hopper_kernels(name: str):
    """The Gluon kernels, loaded when they are first needed: Gluon's interface moves between
    releases of Triton.
    """
    return importlib.import_module(f"labkit.kernels.flash_attention.hopper.{name}")


@functools.cache
def not_loading() -> str | None:
    """Returns why the Gluon kernels do not load with the installed Triton, None where they do; logs
    what runs instead.
    """
    try:
        for name in ("forward", "one_pass"):
            hopper_kernels(name)
    except (ImportError, AttributeError, TypeError) as error:
        reason = (
            f"the Gluon kernels do not load with triton {triton.__version__} "
            f"({type(error).__name__}: {error})"
        )
        logging.getLogger(__name__).warning("attention falls back to impl='triton': %s", reason)
        return reason
    return None


def _gluon_objection(q, has_window: bool, packed: bool) -> str | None:
    """Returns why the Gluon kernels cannot run, None where they can."""
    if q.dtype not in GLUON_DTYPES:
        return f"takes q, k and v of dtype {listed(GLUON_DTYPES)}; got {q.dtype}"
    if q.shape[-1] not in GLUON_HEAD_DIMS:
        return f"takes head dimensions {listed(GLUON_HEAD_DIMS)}; got {q.shape[-1]}"
    if packed or has_window:
        return f"takes no {'packed sequences' if packed else 'window'}"
    if capability_of(q.device) != 90:
        return f"takes q, k and v on a Hopper GPU (compute capability 9.0); got {q.device}"
    return not_loading()


def resolve_impl(
    q: Tensor, impl: str = "auto", *, left: int = -1, right: int = -1, packed: bool = False
) -> str:
    """Returns the implementation that `flash_attention` runs for these queries: what a record
    should name.

    Args:
        q: the queries; their device, dtype and head dimension decide.
        impl: one of IMPLS. "auto" is "gluon" on a Hopper GPU for what those kernels take (bf16 and
            fp16, head dimension 64, 72, 80, 96 or 128, no window, not packed) unless the queries
            are few, else "triton" on a CUDA device of compute capability 8.0 or more in a dtype
            that it takes, else "tiled".
        left, right: the mask's limits, −1 for none; (−1, 0) is causal.
        packed: whether sequences are packed.

    Raises:
        ValueError: an unknown name; an implementation named that cannot run these.
    """
    if impl not in IMPLS:
        raise ValueError(f"impl must be one of {listed(IMPLS)}; got {impl!r}")
    has_window = left >= 0 or right > 0
    if impl == "auto":
        # Before Ampere a device shares 64 KiB or less, in which no tile fits.
        if capability_of(q.device) < 80 or q.dtype not in TRITON_DTYPES:
            return "tiled"
        num_tiles = triton.cdiv(q.shape[-2], 128) * math.prod(q.shape[:-2])
        is_small = num_tiles <= (SMALL_AT_64 if q.shape[-1] == 64 else SMALL)
        objects = _gluon_objection(q, has_window, packed)
        return "triton" if is_small or objects else "gluon"
    objection = None
    if impl == "gluon":
        objection = _gluon_objection(q, has_window, packed)
    elif impl == "triton" and q.device.type != "cuda" and not IS_INTERPRETED:
        objection = f"takes q, k and v on a CUDA device; got {q.device} ('tiled' takes any)"
    elif impl == "triton" and q.dtype not in TRITON_DTYPES:
        objection = f"takes q, k and v of dtype {listed(TRITON_DTYPES)}; got {q.dtype}"
    if objection:
        raise ValueError(f"impl={impl!r} {objection}")
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
        return "ieee"
    if precision not in ("auto", "bf16x6"):
        return precision
    is_hopper = capability_of(q.device) == 90
    if q.dtype != torch.float32 or (q.device.type == "cuda" and not is_hopper):
        return "tf32x3"
    if precision == "bf16x6":
        return precision
    num_queries = q.shape[0 if packed else -2]
    all_queries = math.prod(q.shape[:-1])
    enough = SLICES_ALL_QUERIES_AT_32 if head_dim <= 32 else SLICES_ALL_QUERIES
    pays = is_hopper and num_queries >= SLICES_QUERIES and all_queries >= enough
    return "bf16x6" if pays else "tf32x3"


# ---- the tiles of the Triton kernels -------------------------------------------------------------


@dataclass(frozen=True)
class TileConfig:
    """Rows of a query tile and of a key tile, warps of a program, tiles in flight of the pipelined
    loads.

    `unmasked_loop`: the tiles that every query sees in full have a loop of their own, without
    masks. It pays unless registers are short, for what both loops need is held through both.
    """

    block_q: int
    block_k: int
    num_warps: int
    num_stages: int
    unmasked_loop: bool = True


@dataclass(frozen=True)
class AttentionConfig:
    """The tiles of the three kernels."""

    forward: TileConfig
    dkdv: TileConfig
    dq: TileConfig


_two = TileConfig
_one = functools.partial(TileConfig, unmasked_loop=False)

# (devices, arithmetic): {head dimension, with what it is padded to, up to which they serve:
# (forward, dK/dV, dQ)}
TILES = {
    # 128 rows are two warpgroups of 64, the rows of one wgmma; their accumulators take D/2
    # registers at 8 warps, and those of dK/dV as many again.
    ("hopper", "16-bit"): {
        16: (_two(64, 128, 4, 3), _two(64, 128, 4, 2), _two(64, 64, 4, 3)),
        # Fewer queries of dK/dV let several programs of one warpgroup share a multiprocessor.
        32: (_two(64, 128, 4, 3), _one(32, 64, 4, 3), _two(64, 64, 4, 3)),
        # Forward: of twelve tiles at 1,16,16384,64 causal the fastest: 447 TFLOP/s on an H200,
        # where 128 × 64 have 432; 441 and 440 on an H100. dQ: 64 keys leave it below 128
        # registers, so that programs hide each other's waits.
        64: (_two(64, 64, 4, 3), _two(64, 128, 8, 2), _two(128, 64, 8, 2)),
        # Forward: 128 × 128 keep wgmma at its widest, and a third stage no longer fits.
        # dK/dV: the masks of a second loop no longer fit in registers.
        128: (_two(128, 128, 8, 2), _one(64, 128, 8, 3), _two(128, 64, 8, 2)),
        # Not tuned: 32 × 32 are the largest whose dK/dV stays near the register file.
        256: (_two(128, 64, 8, 2), _one(32, 32, 4, 2), _two(64, 32, 8, 2)),
    },
    # The tile at each sequence's end is rarely full: small ones take 0.6 to 1.04 of the time.
    ("hopper, packed", "16-bit"): {
        96: (_two(64, 64, 4, 3), _one(64, 64, 4, 3), _two(64, 32, 4, 3)),
        128: (_two(64, 64, 4, 3), _one(32, 64, 4, 3), _two(64, 32, 4, 3)),
    },
    ("any", "16-bit"): {
        64: (_two(64, 64, 4, 2), _one(32, 64, 4, 2), _two(64, 32, 4, 2)),
        128: (_two(64, 32, 4, 2), _one(32, 64, 8, 2), _two(64, 32, 8, 2)),
        256: (_two(64, 32, 8, 1), _one(16, 32, 4, 1), _two(32, 32, 4, 1)),
    },
    # On the CUDA cores a product keeps whole rows of both operands in registers: more warps and
    # fewer keys, or D 128 spills kilobytes.
    ("any", "fp32"): {
        64: (_two(64, 32, 8, 2), _one(32, 64, 8, 2), _two(64, 16, 8, 2)),
        128: (_two(64, 16, 8, 2), _one(16, 64, 8, 2), _two(64, 16, 8, 2)),
        256: (_two(32, 16, 8, 1), _one(16, 32, 8, 1), _two(32, 16, 8, 1)),
    },
    # Three TF32 products for one: the halves of every operand take registers beside the
    # accumulators. dK/dV from D 80 on spills up to a kilobyte; past D 128 it would be 22. 64 rows
    # by 16 columns, a tail's for example, are for 4 warps: of 8, each four would take 8 columns,
    # and triton 3.6 reads beyond its shared memory.
    ("hopper", "tf32"): {
        32: (_one(64, 32, 4, 2), _one(32, 64, 4, 1), _one(64, 32, 4, 1)),
        64: (_one(64, 32, 4, 2), _one(32, 128, 8, 2), _one(64, 32, 4, 1)),
        96: (_two(128, 32, 8, 2), _one(32, 128, 8, 1), _one(64, 32, 4, 1)),
        128: (_one(128, 32, 8, 1), _one(32, 64, 8, 1), _one(64, 32, 8, 1)),
    },
    ("any", "tf32"): {
        64: (_one(64, 32, 4, 2), _one(32, 32, 8, 1), _one(64, 16, 8, 2)),
        128: (_one(32, 32, 4, 1), _one(16, 32, 8, 1), _one(32, 16, 4, 1)),
    },
    # Six bf16 products for one: the slices take 1.5 times the shared memory of fp32, and P and dS
    # alone are cut in registers. A tail's loads are in flight (two stages): with one it is put into
    # shared memory from registers, and triton 3.6 computes wrongly with it (seen at 72 and 80).
    # Past D 80 kernels spill, dK/dV at 128 up to 1.4 kilobytes, and are faster than tiles that do
    # not.
    ("hopper", "bf16x6"): {
        32: (_two(64, 64, 4, 3), _two(64, 64, 4, 2), _two(64, 64, 4, 2)),
        64: (_two(128, 64, 8, 2), _two(32, 64, 4, 2), _two(128, 64, 8, 2)),
        96: (_two(128, 64, 8, 2), _two(32, 128, 8, 2), _two(128, 32, 8, 2)),
        128: (_two(128, 64, 8, 1), _one(32, 64, 4, 2), _one(64, 32, 4, 2)),
    },
}

# Several tiles and every loop within lengths that the interpreter gets through.
INTERPRETER_TILES = AttentionConfig(_two(32, 16, 4, 1), _two(16, 32, 4, 1), _two(32, 16, 4, 1))


def select_tiles(
    head_dim: int,
    dtype: torch.dtype,
    capability: int,
    precision: str = "ieee",
    aligned: bool = True,
    packed: bool = False,
) -> AttentionConfig:
    """Returns the shipped tiles of the three kernels.

    Args:
        head_dim: 1 to 256.
        dtype: fp32, bf16 or fp16, of q, k and v.
        capability: of the device, as `capability_of` says it.
        precision: of fp32; "tf32x3" and "bf16x6" up to head dimension 128, the latter on Hopper
            alone.
        aligned: whether every row of every tensor starts on a 16-byte boundary.
        packed: whether sequences are.
    """
    arithmetic = "16-bit" if dtype.itemsize == 2 else precision.removesuffix("x3")
    is_hopper = capability == 90
    rows = [("hopper, packed", arithmetic)] * (is_hopper and packed)
    rows += [("hopper", arithmetic)] * is_hopper
    rows += [("any", arithmetic), ("any", "fp32")]
    width = sum(split_head_dim(head_dim, aligned))
    found = (tiles for row in rows for most, tiles in TILES.get(row, {}).items() if width <= most)
    return AttentionConfig(*next(found))
