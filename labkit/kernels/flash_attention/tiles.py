"""The tiles of the Triton kernels: one table, a row for each kind of device, arithmetic and width.

Those of Hopper were the fastest of what was tried on an H200. Those of other devices fit 99 KiB of
shared memory, the least since Ampere (8.6, 8.9, 12.0). tests/test_kernel_compilation.py holds all
rows to their limits: 255 registers a thread, 227 KiB of shared memory on Hopper, no spills and no
serialised products.
"""

import functools
from dataclasses import dataclass

import torch

from labkit.kernels.flash_attention.triton import split_head_dim


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

WIDTHS = (16, 32, 64, 80, 96, 128, 192, 256)
"""A head dimension takes the first that holds the tiles it is cut into."""

# (family of devices, arithmetic): {widths: (forward, dK/dV, dQ)}
TILES = {
    # 128 rows are two warpgroups of 64, the rows of one wgmma; their accumulators take D/2
    # registers at 8 warps, and those of dK/dV as many again.
    ("hopper", "16-bit"): {
        (16,): (_two(64, 128, 4, 3), _two(64, 128, 4, 2), _two(64, 64, 4, 3)),
        # Fewer queries of dK/dV let several programs of one warpgroup share a multiprocessor.
        (32,): (_two(64, 128, 4, 3), _one(32, 64, 4, 3), _two(64, 64, 4, 3)),
        # Forward: of twelve tiles at 1,16,16384,64 causal the fastest, 448 TFLOP/s; 64 × 64 had
        # 393. dQ: 64 keys leave it below 128 registers, so that programs hide each other's waits.
        (64,): (_two(128, 64, 8, 3), _two(64, 128, 8, 2), _two(128, 64, 8, 2)),
        # Forward: 128 × 128 keep wgmma at its widest, and a third stage no longer fits.
        (80, 96): (_two(128, 128, 8, 2), _two(64, 128, 8, 2), _two(128, 64, 8, 2)),
        (128,): (_two(128, 128, 8, 2), _two(64, 128, 8, 3), _two(128, 64, 8, 2)),
        # Not tuned: 32 × 32 are the largest whose dK/dV stays near the register file.
        (192, 256): (_two(128, 64, 8, 2), _one(32, 32, 4, 2), _two(64, 32, 8, 2)),
    },
    # dK/dV: the masks of a second loop no longer fit in registers.
    ("hopper, causal", "16-bit"): {
        (96, 128): (_two(128, 128, 8, 2), _one(64, 128, 8, 3), _two(128, 64, 8, 2)),
    },
    # The tile at each sequence's end is rarely full: small ones take 0.6 to 1.04 of the time.
    ("hopper, packed", "16-bit"): {
        (64, 80, 96): (_two(64, 64, 4, 3), _one(64, 64, 4, 3), _two(64, 32, 4, 3)),
        (128,): (_two(64, 64, 4, 3), _one(32, 64, 4, 3), _two(64, 32, 4, 3)),
    },
    ("generic", "16-bit"): {
        (16, 32, 64): (_two(64, 64, 4, 2), _one(32, 64, 4, 2), _two(64, 32, 4, 2)),
        (80, 96, 128): (_two(64, 32, 4, 2), _one(32, 64, 8, 2), _two(64, 32, 8, 2)),
        (192, 256): (_two(64, 32, 8, 1), _one(16, 32, 4, 1), _two(32, 32, 4, 1)),
    },
    # On the CUDA cores, where a product keeps whole rows of both operands in registers: more warps
    # and fewer keys, or D 128 spills kilobytes.
    ("any", "ieee"): {
        (16, 32, 64): (_two(64, 32, 8, 2), _one(32, 64, 8, 2), _two(64, 16, 8, 2)),
        (80, 96, 128): (_two(64, 16, 8, 2), _one(16, 64, 8, 2), _two(64, 16, 8, 2)),
        (192, 256): (_two(32, 16, 8, 1), _one(16, 32, 8, 1), _two(32, 16, 8, 1)),
    },
    # Operands twice as wide: half the tiles of 16 bits, and rounding leaves registers for one loop.
    # 64 rows by 16 columns, a tail's for example, are for 4 warps: of 8, each four would take 8
    # columns, and triton 3.6 reads beyond its shared memory.
    ("hopper", "tf32"): {
        (16, 32, 64): (_one(128, 32, 8, 2), _one(32, 128, 8, 2), _one(64, 32, 4, 2)),
        (80, 96): (_one(64, 32, 4, 2), _one(16, 128, 8, 2), _one(64, 32, 4, 2)),
        (128,): (_two(128, 32, 8, 2), _one(32, 32, 8, 1), _one(128, 32, 8, 1)),
        (192, 256): (_two(32, 16, 8, 1), _one(16, 32, 8, 1), _two(32, 16, 8, 1)),
    },
    ("generic", "tf32"): {
        (16, 32, 64): (_two(64, 32, 4, 2), _one(32, 32, 8, 1), _two(64, 32, 8, 2)),
        (80, 96, 128): (_two(32, 32, 4, 1), _one(16, 32, 4, 1), _two(32, 16, 4, 1)),
        (192, 256): (_two(16, 16, 4, 1), _one(16, 16, 4, 1), _two(16, 16, 4, 1)),
    },
    # Three TF32 products for one: the halves of every operand take registers beside the
    # accumulators. dK/dV from D 80 on spills up to a kilobyte; past D 128 it would be 22, and true
    # fp32 runs.
    ("hopper", "tf32x3"): {
        (16, 32): (_one(64, 32, 4, 2), _one(32, 64, 4, 1), _one(64, 32, 4, 1)),
        (64,): (_one(64, 32, 4, 2), _one(32, 128, 8, 2), _one(64, 32, 4, 1)),
        (80, 96): (_two(128, 32, 8, 2), _one(32, 128, 8, 1), _one(64, 32, 4, 1)),
        (128,): (_one(128, 32, 8, 1), _one(32, 64, 8, 1), _one(64, 32, 8, 1)),
    },
    ("generic", "tf32x3"): {
        (16, 32, 64): (_one(64, 32, 4, 2), _one(32, 32, 8, 1), _one(64, 16, 8, 2)),
        (80, 96, 128): (_one(32, 32, 4, 1), _one(16, 32, 8, 1), _one(32, 16, 4, 1)),
    },
    # Six bf16 products for one: the slices take 1.5 times the shared memory of fp32, and P and dS
    # alone are cut in registers. A tail's loads are in flight (two stages): with one it is put into
    # shared memory from registers, and triton 3.6 computes wrongly with it (seen at 72 and 80).
    # Past D 80 kernels spill, dK/dV at 128 up to 1.4 kilobytes, and are faster than tiles that do
    # not.
    ("hopper", "bf16x6"): {
        (16, 32): (_two(64, 64, 4, 3), _two(64, 64, 4, 2), _two(64, 64, 4, 2)),
        (64,): (_two(128, 64, 8, 2), _two(32, 64, 4, 2), _two(128, 64, 8, 2)),
        (80, 96): (_two(128, 64, 8, 2), _two(32, 128, 8, 2), _two(128, 32, 8, 2)),
        (128,): (_two(128, 64, 8, 1), _one(32, 64, 4, 2), _one(64, 32, 4, 2)),
    },
}

# Several tiles and every loop within lengths that the interpreter gets through.
INTERPRETER_TILES = AttentionConfig(_two(32, 16, 4, 1), _two(16, 32, 4, 1), _two(32, 16, 4, 1))


def select_tiles(
    head_dim: int,
    dtype: torch.dtype,
    causal: bool,
    capability: int,
    precision: str = "ieee",
    aligned: bool = True,
    packed: bool = False,
) -> AttentionConfig:
    """Returns the shipped tiles of the three kernels.

    Args:
        head_dim: 1 to 256.
        dtype: fp32, bf16 or fp16, of q, k and v.
        causal: whether the mask has an edge.
        capability: of the device, 10 · major + minor: 90 is Hopper.
        precision: of fp32; "tf32x3" and "bf16x6" up to head dimension 128, the latter on Hopper
            alone.
        aligned: whether every row of every tensor starts on a 16-byte boundary.
        packed: whether sequences are.
    """
    cut = sum(split_head_dim(head_dim, aligned))
    width = next(width for width in WIDTHS if width >= cut)
    arithmetic = "16-bit" if dtype.itemsize == 2 else precision
    family = "hopper" if capability == 90 else "generic"
    special = [f"{family}, packed"] * packed + [f"{family}, causal"] * causal
    for name in (*special, family, "any"):
        for widths, tiles in TILES.get((name, arithmetic), {}).items():
            if width in widths:
                return AttentionConfig(*tiles)
    raise ValueError(f"no tiles for head dimension {head_dim} of {dtype} as {precision}")
