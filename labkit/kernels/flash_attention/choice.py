"""What runs: the implementation, the products, the tiles, the kernels of the gradients, the number
of splits.

The tables are those of an H200, on which each was the fastest of what was tried, and for other GPUs
tiles that fit.
"""

import functools
import importlib
import logging
import math
from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor

from labkit.kernels.flash_attention.shapes import (
    Layout,
    Problem,
    alignment_of,
    layout_of,
    problem_of,
    with_heads,
)
from labkit.kernels.flash_attention.splits import num_splits_of, row_elements
from labkit.kernels.flash_attention.triton import BF16_SLICES, IS_INTERPRETED, split_head_dim
from labkit.kernels.launch import num_multiprocessors

MAX_HEAD_DIM = 256
IMPLS = ("auto", "gluon", "triton", "tiled")
PRECISIONS = ("auto", "ieee", "tf32x3", "bf16x6", "bf16x3", "tf32")
PRODUCTS_HEAD_DIM = 128  # up to which several products on the tensor cores make one of fp32
# From how many queries of all heads, by widest head dimension, cutting operands into slices takes a
# Hopper GPU less time than it gains, and from how many of one: few queries read their keys once,
# and cutting those is no less.
SLICES_FROM = ((32, 2048), (PRODUCTS_HEAD_DIM, 1024))
SLICES_QUERIES = 256
FEW_QUERIES = 1024  # of all heads, up to which their tiles are smaller
# dK/dV and dQ are one launch up to so many queries and keys, by bytes of an element and widest head
# dimension, and so many programs: of a multiprocessor, or in all where kernels are interpreted.
# Longer loops are split among programs.
JOINT_UNTIL = {2: ((MAX_HEAD_DIM, 1024),), 4: ((64, 256), (MAX_HEAD_DIM, 128))}
JOINT_PROGRAMS, INTERPRETED_PROGRAMS = 4, 8
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
GLUON_BACKWARDS = ("one pass", "two passes", "triton")
# Tiles of a loop, by widest head dimension, up to which the kernel that would combine splits takes
# the host longer to launch than the device gains.
WHOLE = ((64, 8), (MAX_HEAD_DIM, 2))
# Warps that run at once on a multiprocessor, as far as splitting reckons: (widest head dimension,
# warps) by bytes of an element and kernel. Registers bound them; these gave numbers of splits near
# the fastest on an H200.
WARPS_AT_ONCE = {
    (2, "forward"): ((64, 16), (MAX_HEAD_DIM, 8)),
    (2, "dkdv"): ((16, 8), (64, 16), (MAX_HEAD_DIM, 8)),
    (2, "dq"): ((64, 16), (MAX_HEAD_DIM, 8)),
    (4, "forward"): ((32, 24), (MAX_HEAD_DIM, 8)),
    (4, "dkdv"): ((32, 24), (MAX_HEAD_DIM, 8)),
    (4, "dq"): ((32, 24), (MAX_HEAD_DIM, 8)),
}
SHARED_KIB = 227  # of a Hopper multiprocessor, which tiles of slices fill


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


_one_loop = functools.partial(TileConfig, unmasked_loop=False)


@dataclass(frozen=True)
class AttentionConfig:
    """The tiles of the three kernels."""

    forward: TileConfig
    dkdv: TileConfig
    dq: TileConfig


WIDTHS = (16, 32, 64, 80, 96, 128, 192, 256)
"""Widths of the tables: a head dimension takes the first that holds the tiles it is cut into."""


def _table(
    family: str,
    kind: str,
    rows: dict[tuple[int, ...], tuple[TileConfig, TileConfig, TileConfig]],
    causal=None,
):
    """Spreads rows of (forward, dK/dV, dQ) tiles over their widths, and over both masks or the
    named one.
    """
    masks = (False, True) if causal is None else (causal,)
    return {
        (family, kind, width, mask): AttentionConfig(*tiles)
        for widths, tiles in rows.items()
        for width in widths
        for mask in masks
    }


# Hopper, 16 bits. Bounds: 255 registers per thread, of which 128 rows · D accumulators take D/2 at
# 8 warps (and as many again for the second accumulator of dK/dV); 227 KiB of shared memory; no
# spills and no serialised wgmma, which tests/test_kernel_compilation.py compiles for. 128 rows are
# two warpgroups of 64, the rows of one wgmma.
# - Forward: up to D 64 one warpgroup a program, of which several share an SM and hide each other's
#   waits; past it 128 queries and 128 keys keep wgmma at its widest, and a third stage no longer
#   fits in shared memory.
# - dK/dV: S^T and dP^T of 128 keys × 64 queries are what the registers leave room for; fewer let
#   several programs of one warpgroup share an SM at D 32. When causal, the masks of a second loop
#   no longer fit in them at D 96 and 128: one loop, every tile masked.
# - dQ: 64 keys leave it below 128 registers up to D 64, so that programs share an SM and hide each
#   other's waits.
# - D 192 and 256 run but are not tuned: 32 × 32 tiles are the largest whose dK/dV stays near the
#   register file.
_HOPPER_WIDE = {
    (192, 256): (TileConfig(128, 64, 8, 2), _one_loop(32, 32, 4, 2), TileConfig(64, 32, 8, 2)),
}
_HOPPER_16_BIT = {
    (16,): (TileConfig(64, 128, 4, 3), TileConfig(64, 128, 4, 2), TileConfig(64, 64, 4, 3)),
    (32,): (TileConfig(64, 128, 4, 3), _one_loop(32, 64, 4, 3), TileConfig(64, 64, 4, 3)),
    (64,): (TileConfig(64, 64, 4, 3), TileConfig(64, 128, 8, 2), TileConfig(128, 64, 8, 2)),
}
_HOPPER_16_BIT_FULL = {
    (80, 96): (TileConfig(128, 128, 8, 2), TileConfig(64, 128, 8, 2), TileConfig(128, 64, 8, 2)),
    (128,): (TileConfig(128, 128, 8, 2), TileConfig(64, 128, 8, 3), TileConfig(128, 64, 8, 2)),
}
_HOPPER_16_BIT_CAUSAL = {
    (80,): (TileConfig(128, 128, 8, 2), TileConfig(64, 128, 8, 2), TileConfig(128, 64, 8, 2)),
    (96, 128): (TileConfig(128, 128, 8, 2), _one_loop(64, 128, 8, 3), TileConfig(128, 64, 8, 2)),
}
# Packed, where the tile at each sequence's end is rarely full: small ones take 0.6 to 1.04 of the
# time of those above.
_HOPPER_16_BIT_PACKED = {
    (64, 80, 96): (TileConfig(64, 64, 4, 3), _one_loop(64, 64, 4, 3), TileConfig(64, 32, 4, 3)),
    (128,): (TileConfig(64, 64, 4, 3), _one_loop(32, 64, 4, 3), TileConfig(64, 32, 4, 3)),
}
# Ampere and after, 16 bits: 99 KiB of shared memory, the least of that family (8.6, 8.9, 12.0),
# bound the tiles.
_GENERIC_16_BIT = {
    (16, 32, 64): (TileConfig(64, 64, 4, 2), _one_loop(32, 64, 4, 2), TileConfig(64, 32, 4, 2)),
    (80, 96, 128): (TileConfig(64, 32, 4, 2), _one_loop(32, 64, 8, 2), TileConfig(64, 32, 8, 2)),
    (192, 256): (TileConfig(64, 32, 8, 1), _one_loop(16, 32, 4, 1), TileConfig(32, 32, 4, 1)),
}
# True fp32 runs on the CUDA cores, where a product keeps whole rows of both operands in registers:
# more warps and fewer keys, or D 128 spills kilobytes.
_IEEE = {
    (16, 32, 64): (TileConfig(64, 32, 8, 2), _one_loop(32, 64, 8, 2), TileConfig(64, 16, 8, 2)),
    (80, 96, 128): (TileConfig(64, 16, 8, 2), _one_loop(16, 64, 8, 2), TileConfig(64, 16, 8, 2)),
    (192, 256): (TileConfig(32, 16, 8, 1), _one_loop(16, 32, 8, 1), TileConfig(32, 16, 8, 1)),
}
# TF32 runs on the tensor cores with operands twice as wide, so that tiles are half those of 16
# bits; with the registers that rounding takes, one loop is faster than two. 64 rows by 16 columns,
# a tail's for example, are for 4 warps: of 8, each four would take 8 columns, and triton 3.6 reads
# beyond its shared memory.
_TF32 = {
    (16, 32, 64): (_one_loop(128, 32, 8, 2), _one_loop(32, 128, 8, 2), _one_loop(64, 32, 4, 2)),
    (80, 96): (_one_loop(64, 32, 4, 2), _one_loop(16, 128, 8, 2), _one_loop(64, 32, 4, 2)),
    (128,): (TileConfig(128, 32, 8, 2), _one_loop(32, 32, 8, 1), _one_loop(128, 32, 8, 1)),
    (192, 256): (TileConfig(32, 16, 8, 1), _one_loop(16, 32, 8, 1), TileConfig(32, 16, 8, 1)),
}
# Within 99 KiB, D 256 leaves 16 rows of everything.
_TF32_NARROW = {
    (16, 32, 64): (TileConfig(64, 32, 4, 2), _one_loop(32, 32, 8, 1), TileConfig(64, 32, 8, 2)),
    (80, 96, 128): (TileConfig(32, 32, 4, 1), _one_loop(16, 32, 4, 1), TileConfig(32, 16, 4, 1)),
    (192, 256): (TileConfig(16, 16, 4, 1), _one_loop(16, 16, 4, 1), TileConfig(16, 16, 4, 1)),
}
# Three TF32 products for one: the halves of every operand take registers beside the accumulators,
# so that one loop is all that fits, and dK/dV from D 80 on spill up to a kilobyte. Past D 128 they
# are 22 kilobytes, and true fp32 runs.
_TF32X3 = {
    (16, 32): (_one_loop(64, 32, 4, 2), _one_loop(32, 64, 4, 1), _one_loop(64, 32, 4, 1)),
    (64,): (_one_loop(64, 32, 4, 2), _one_loop(32, 128, 8, 2), _one_loop(64, 32, 4, 1)),
    (80, 96): (TileConfig(128, 32, 8, 2), _one_loop(32, 128, 8, 1), _one_loop(64, 32, 4, 1)),
    (128,): (_one_loop(128, 32, 8, 1), _one_loop(32, 64, 8, 1), _one_loop(64, 32, 8, 1)),
}
_TF32X3_NARROW = {
    (16, 32, 64): (_one_loop(64, 32, 4, 2), _one_loop(32, 32, 8, 1), _one_loop(64, 16, 8, 2)),
    (80, 96, 128): (_one_loop(32, 32, 4, 1), _one_loop(16, 32, 8, 1), _one_loop(32, 16, 4, 1)),
}
# Six bf16 products for one: three slices of every operand, cut beforehand, take 1.5 times the
# shared memory of fp32, and P and dS alone are cut in registers. A tail's loads are in flight (two
# stages): with one stage it is put into shared memory from registers, and triton 3.6 computes
# wrongly with it (seen at 72 and 80). Past D 80 kernels spill, dK/dV at 128 up to 1.4 kilobytes,
# and are faster than tiles that do not.
_BF16X6 = {
    (16, 32): (TileConfig(64, 64, 4, 3), TileConfig(64, 64, 4, 2), TileConfig(64, 64, 4, 2)),
    (64,): (TileConfig(128, 64, 8, 2), TileConfig(32, 64, 4, 2), TileConfig(128, 64, 8, 2)),
    (80, 96): (TileConfig(128, 64, 8, 2), TileConfig(32, 128, 8, 2), TileConfig(128, 32, 8, 2)),
    (128,): (TileConfig(128, 64, 8, 1), _one_loop(32, 64, 4, 2), _one_loop(64, 32, 4, 2)),
}
# Three for one: two slices, as large as fp32.
_BF16X3 = {
    (16, 32, 64): (TileConfig(64, 64, 4, 3), TileConfig(64, 64, 4, 2), TileConfig(64, 64, 4, 2)),
    (80,): (TileConfig(128, 64, 8, 3), TileConfig(64, 128, 8, 2), TileConfig(64, 32, 4, 3)),
    (96,): (TileConfig(128, 64, 8, 3), TileConfig(64, 128, 8, 2), TileConfig(128, 64, 8, 2)),
    (128,): (TileConfig(128, 64, 8, 2), TileConfig(32, 128, 8, 2), TileConfig(128, 64, 8, 1)),
}
# Both, of so few queries that loops are split: smaller tiles make more programs.
_BF16X6_FEW = {
    (64,): (TileConfig(64, 64, 4, 3), TileConfig(32, 64, 4, 2), TileConfig(64, 64, 4, 2)),
    (80, 96): (TileConfig(64, 64, 4, 2), TileConfig(32, 64, 4, 2), TileConfig(64, 64, 4, 2)),
    (128,): (TileConfig(64, 32, 4, 3), _one_loop(32, 32, 4, 2), _one_loop(64, 64, 4, 1)),
}
_BF16X3_FEW = {
    (80, 96): (TileConfig(64, 64, 4, 3), TileConfig(64, 128, 8, 2), TileConfig(64, 32, 4, 3)),
    (128,): (TileConfig(64, 64, 4, 3), _one_loop(64, 64, 4, 2), TileConfig(64, 64, 4, 2)),
}
# dK/dV and dQ in one launch, where programs are few: so are the rows that each owns, for there to
# be more. In fp32 the kernels' spills with tails outweigh the launch.
_JOINT_16_BIT = {
    (16, 64): (_one_loop(128, 32, 4, 2), _one_loop(32, 64, 4, 2)),
    (32,): (_one_loop(64, 32, 4, 2), TileConfig(32, 64, 4, 2)),
    (80, 96): (_one_loop(64, 64, 4, 2), _one_loop(64, 64, 4, 2)),
    (128,): (_one_loop(64, 32, 4, 2), _one_loop(64, 64, 4, 2)),
}
_JOINT_TF32X3 = {
    (16, 32, 64, 128): (_one_loop(32, 32, 4, 1), _one_loop(32, 32, 4, 1)),
}

CONFIGS: dict[tuple[str, str, int, bool], AttentionConfig] = {
    **_table("hopper", "16-bit", _HOPPER_16_BIT | _HOPPER_16_BIT_FULL | _HOPPER_WIDE, causal=False),
    **_table(
        "hopper", "16-bit", _HOPPER_16_BIT | _HOPPER_16_BIT_CAUSAL | _HOPPER_WIDE, causal=True
    ),
    **_table("hopper, packed", "16-bit", _HOPPER_16_BIT_PACKED),
    **_table("generic", "16-bit", _GENERIC_16_BIT),
    **_table("hopper", "ieee", _IEEE),
    **_table("generic", "ieee", _IEEE),
    **_table("hopper", "tf32x3", _TF32X3),
    **_table("generic", "tf32x3", _TF32X3_NARROW),
    **_table("hopper", "bf16x6", _BF16X6),
    **_table("hopper, few queries", "bf16x6", _BF16X6_FEW),
    **_table("hopper", "bf16x3", _BF16X3),
    **_table("hopper, few queries", "bf16x3", _BF16X3_FEW),
    **_table("hopper", "tf32", _TF32),
    **_table("generic", "tf32", _TF32_NARROW),
}
"""The shipped tiles by (family of devices, kind of arithmetic, width, causal); see `select_config`.
"""

JOINT_CONFIGS: dict[tuple[str, int], tuple[TileConfig, TileConfig]] = {
    (kind, width): tiles
    for kind, rows in (("16-bit", _JOINT_16_BIT), ("tf32x3", _JOINT_TF32X3))
    for widths, tiles in rows.items()
    for width in widths
}
"""The shipped tiles of dK/dV and dQ in one launch on Hopper, by (kind of arithmetic, width)."""

# Several tiles and every loop within lengths that the interpreter gets through.
INTERPRETER_CONFIG = AttentionConfig(
    TileConfig(32, 16, 4, 1), TileConfig(16, 32, 4, 1), TileConfig(32, 16, 4, 1)
)


def tile_width(head_dim: int, aligned: bool = True) -> int:
    """Returns the width of the tables, one of WIDTHS, that a head dimension belongs to."""
    block, tail = split_head_dim(head_dim, aligned)
    return next(width for width in WIDTHS if width >= block + tail)


def _kind(dtype: torch.dtype, precision: str) -> str:
    """Slices are 16 bits wide, but several products are not one."""
    return "16-bit" if dtype.itemsize == 2 and precision not in BF16_SLICES else precision


def select_config(
    head_dim: int,
    dtype: torch.dtype,
    causal: bool,
    capability: int,
    precision: str = "ieee",
    aligned: bool = True,
    batch: str = "",
) -> AttentionConfig:
    """Returns the shipped tiles of the three kernels.

    Args:
        head_dim: 1 to 256.
        dtype: fp32, bf16 or fp16, of the operands that the kernels load.
        causal: whether the mask has a diagonal.
        capability: of the device, 10 · major + minor: 90 is Hopper. Other devices take tiles that
            fit 99 KiB of shared memory, the least of those since Ampere.
        precision: of fp32; all but "ieee" and "tf32" up to head dimension 128, slices of bf16 on
            Hopper alone.
        aligned: whether every row of every tensor starts on a 16-byte boundary.
        batch: "packed" or "few queries" where it is, for which Hopper may have tiles of its own.
    """
    key = (_kind(dtype, precision), tile_width(head_dim, aligned), causal)
    if capability != 90:
        return CONFIGS["generic", *key]
    return CONFIGS.get((f"hopper, {batch}", *key)) or CONFIGS["hopper", *key]


def listed(values) -> str:
    return ", ".join(str(value) for value in values)


@functools.cache
def _capability(device_index: int) -> int:
    major, minor = torch.cuda.get_device_capability(device_index)
    return 10 * major + minor


@functools.cache
def hopper_kernels(name: str):
    """The Gluon kernels, loaded when they are first needed: Gluon's interface moves between
    releases of Triton.
    """
    return importlib.import_module(f"labkit.kernels.flash_attention.hopper.{name}")


def _not_loading(*names: str) -> str | None:
    try:
        for name in names:
            hopper_kernels(name)
    except (ImportError, AttributeError, TypeError) as error:
        return (
            f"the Gluon kernels do not load with triton {triton.__version__} "
            f"({type(error).__name__}: {error})"
        )
    return None


@functools.cache
def hopper_unavailable() -> str | None:
    """Returns why the Gluon kernels cannot run with the installed Triton, None where they can."""
    return _not_loading("forward", "two_passes")


@functools.cache
def hopper_single_unavailable() -> str | None:
    """Returns why the backward in one pass cannot run with the installed Triton, None where it can;
    logs a lack.
    """
    reason = _not_loading("one_pass")
    if reason:
        logging.getLogger(__name__).warning("gradients take two passes: %s", reason)
    return reason


def _gluon_objection(device: torch.device) -> str | None:
    """Returns why the Gluon kernels cannot run on a device, None where they can; a lack of theirs
    is logged.
    """
    if device.type != "cuda":
        return f"takes q, k and v on a Hopper GPU; got {device}"
    index = torch.cuda.current_device() if device.index is None else device.index
    if _capability(index) != 90:
        return f"takes q, k and v on a GPU of compute capability 9.0; got {_capability(index) / 10}"
    reason = hopper_unavailable()
    if reason:
        logging.getLogger(__name__).warning("attention falls back to impl='triton': %s", reason)
    return reason


# As torch.compiler.assume_constant_result marks it, which would import the compiler: four seconds
# of a process.
_gluon_objection._dynamo_marked_constant = True


def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and _capability(device.index) == 90


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
        return "tf32" if precision in ("tf32", "bf16x3") else "ieee"
    if q.dtype != torch.float32 or (q.is_cuda and not _is_hopper(q.device)):
        return {"auto": "tf32x3", "bf16x6": "tf32x3", "bf16x3": "tf32"}.get(precision, precision)
    if precision in ("auto", "tf32") and _is_hopper(q.device):
        num_queries = q.shape[0] if packed else q.shape[-2]
        if (
            num_queries >= SLICES_QUERIES
            and q.numel() >= _by_head_dim(SLICES_FROM, head_dim) * head_dim
        ):
            return {"auto": "bf16x6", "tf32": "bf16x3"}[precision]
    return "tf32x3" if precision == "auto" else precision


def _by_head_dim(table: tuple[tuple[int, int], ...], head_dim: int) -> int:
    """Returns what a table of (widest head dimension, number) has for a head dimension."""
    return next(number for widest, number in table if head_dim <= widest)


def config_for(
    layouts: tuple[Layout, ...], problem: Problem, precision: str, device: torch.device
) -> AttentionConfig:
    """Returns the tiles for operands of these layouts."""
    if device.type != "cuda":
        return INTERPRETER_CONFIG
    # A window's tiles are masked on both sides, as causal ones are on one.
    masked = problem.left >= 0 or problem.right >= 0
    aligned = alignment_of(*layouts) > 1
    capability = _capability(device.index)
    few = problem.num_batches * problem.num_heads * problem.max_queries <= FEW_QUERIES
    batch = "packed" if problem.packed else "few queries" if few else ""
    return select_config(
        problem.head_dim, layouts[0].dtype, masked, capability, precision, aligned, batch
    )


def _blocks(tile: TileConfig, kernel: str) -> tuple[int, int]:
    """Returns the rows that a kernel's program owns, and those of a tile of its loop."""
    return (tile.block_k, tile.block_q) if kernel == "dkdv" else (tile.block_q, tile.block_k)


def num_work_tiles_of(problem: Problem, tile: TileConfig, kernel: str) -> int:
    """Returns how many tiles of own rows a kernel has, of all heads and batches; it loops over the
    other length.
    """
    own, _ = _blocks(tile, kernel)
    num_heads = problem.num_key_heads if kernel == "dkdv" else problem.num_heads
    return problem.num_tiles(own, of_keys=kernel == "dkdv") * num_heads


def joint_tiles(
    layouts: tuple[Layout, ...], problem: Problem, precision: str, device: torch.device
) -> tuple[TileConfig, TileConfig] | None:
    """Returns the tiles of "dkdv" and "dq" as one launch, None where there are none or programs are
    too many.

    Few programs leave most of a device idle, and take as long as the longest of them: tiles of few
    own rows then.
    """
    dtype = layouts[0].dtype
    longest = _by_head_dim(JOINT_UNTIL[dtype.itemsize], problem.head_dim)
    if problem.packed or max(problem.max_queries, problem.max_keys) > longest:
        return None
    if device.type == "cuda":
        key = (_kind(dtype, precision), tile_width(problem.head_dim, alignment_of(*layouts) > 1))
        tiles = JOINT_CONFIGS.get(key) if _is_hopper(device) else None
        most = JOINT_PROGRAMS * num_multiprocessors(device.index)
    else:
        tiles, most = (INTERPRETER_CONFIG.dkdv, INTERPRETER_CONFIG.dq), INTERPRETED_PROGRAMS
    if tiles is None:
        return None
    dkdv, dq = tiles
    return (
        tiles
        if num_work_tiles_of(problem, dkdv, "dkdv") + num_work_tiles_of(problem, dq, "dq") <= most
        else None
    )


def resolve_tiles(
    q: Tensor, k: Tensor, *, causal: bool, precision: str = "auto"
) -> AttentionConfig:
    """Returns the tiles that the Triton kernels run with: what a record should name.

    Args:
        q, k: (B, H, S, D) or (B, S, D), dense.
        precision: as `flash_attention` takes it.
    """
    layouts = (layout_of(q), layout_of(k))
    problem = problem_of(*layouts, -1, 0 if causal else -1, None)
    precision = resolve_precision(q, precision)
    tiles = config_for(layouts, problem, precision, q.device)
    dkdv, dq = joint_tiles(layouts, problem, precision, q.device) or (tiles.dkdv, tiles.dq)
    return replace(tiles, dkdv=dkdv, dq=dq)


def resolve_backward(q: Tensor, k: Tensor, impl: str, *, causal: bool) -> str:
    """Returns which kernels compute the gradients after an `impl` as `resolve_impl` returns it: its
    own, or after "gluon" one of GLUON_BACKWARDS.

    "triton" where the tiles of keys are few: its kernels split their loops among programs, Gluon's
    do not. "one pass" where the parts of q's gradient are added in one order without much waiting;
    "two passes" else, as always at other head dimensions than 64 and 128, with grouped heads, and
    with short full masks at 64, in persistent programs.

    Args:
        q, k: (B, H, S, D) or (B, S, D).
    """
    if impl != "gluon":
        return impl
    return backward_kernels(with_heads(q).shape, with_heads(k).shape, q.device.index, causal)


def backward_kernels(
    q_shape: tuple[int, ...], k_shape: tuple[int, ...], device_index: int, causal: bool
) -> str:
    """Returns what `resolve_backward` does after "gluon", by shapes (B, H, S, D)."""
    (num_batches, num_heads, num_queries, head_dim), (_, num_key_heads, num_keys, _) = (
        q_shape,
        k_shape,
    )
    programs = num_multiprocessors(device_index)
    if -(-num_keys // 128) * num_key_heads * num_batches <= programs // 2:
        return "triton"
    persistent = head_dim == 64 and not causal and max(num_queries, num_keys) <= PERSISTENT_UNTIL
    if (
        persistent
        or num_heads != num_key_heads
        or head_dim not in SINGLE_PASS_HEAD_DIMS
        or hopper_single_unavailable()
    ):
        return "two passes"
    shape = (num_batches * num_heads, num_queries, num_keys, head_dim)
    return (
        "one pass"
        if hopper_kernels("one_pass").ordering_pays(*shape, causal, programs)
        else "two passes"
    )


def _programs_at_once(
    problem: Problem, tile: TileConfig, kernel: str, dtype: torch.dtype, precision: str
) -> int:
    """Returns how many programs of a kernel run on a multiprocessor at once, as far as splitting
    reckons.
    """
    programs = (
        _by_head_dim(WARPS_AT_ONCE[dtype.itemsize, kernel], problem.head_dim) // tile.num_warps
    )
    if precision in BF16_SLICES:
        own, inner = _blocks(tile, kernel)
        num_rows = own * (1 if kernel == "forward" else 2) + inner * 2 * tile.num_stages
        shared_kib = num_rows * row_elements(problem.head_dim) * 2 * BF16_SLICES[precision] / 1024
        programs = min(programs, int(SHARED_KIB // shared_kib))
    return max(1, programs)


def work_tiles_of(
    problem: Problem,
    tile: TileConfig,
    kernel: str,
    device: torch.device,
    dtype: torch.dtype,
    precision: str,
    num_splits: int | None,
) -> tuple[int, int]:
    """Returns how many tiles of rows a kernel has, and among how many programs it splits the loop
    of each.

    `dtype` is that of q, `num_splits` is that number where it is given; packed sequences are never
    split.
    """
    num_work_tiles = num_work_tiles_of(problem, tile, kernel)
    if problem.packed:
        return num_work_tiles, 1
    if num_splits or device.type != "cuda" or problem.left >= 0:
        return num_work_tiles, num_splits or 1
    own, inner = _blocks(tile, kernel)
    length, num_results = (problem.max_queries, 2) if kernel == "dkdv" else (problem.max_keys, 1)
    num_tiles = triton.cdiv(length, inner)
    if num_tiles <= _by_head_dim(WHOLE, problem.head_dim):
        return num_work_tiles, 1
    programs = num_multiprocessors(device.index) * _programs_at_once(
        problem, tile, kernel, dtype, precision
    )
    part_kib = num_results * own * row_elements(problem.head_dim) * 4 / 1024
    causal = problem.right >= 0
    cost = {"part_kib": part_kib, "itemsize": dtype.itemsize}
    return num_work_tiles, num_splits_of(num_work_tiles, num_tiles, programs, causal, **cost)
