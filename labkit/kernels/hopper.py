"""What the Gluon kernels for Hopper share: the layouts and descriptors of their tiles, the registers of their warps.

Gluon is experimental and its interface moves between releases of Triton: the names that moved are settled here, and
`hopper_unavailable` of flash_attention.py says whether the kernels load with the installed one.
"""

import functools
import math

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

ROWS = 64  # of a consumer warpgroup: those of one wgmma

LOG2_E = math.log2(math.e)
LN_2 = gl.constexpr(math.log(2))

# Releases of Triton before 3.8 have these operations under other names.
async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
async_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global

# By the number of consumers: the warps' equal shares of the register file at the start, and what a consumer has of it
# once the warps that only move tiles have given all but 24 of their own away.
START_REGISTERS = {2: 168, 3: 128}
CONSUMER_REGISTERS = {2: 240, 3: 160}
PRODUCER_REGISTERS = gl.constexpr(24)


def launch_options(consumers: int) -> dict[str, int]:
    """Returns the options of a launch, with what its kernel takes as REGISTERS."""
    return {"num_warps": 4, "maxnreg": START_REGISTERS[consumers], "REGISTERS": CONSUMER_REGISTERS[consumers]}


@functools.cache
def num_multiprocessors(device_index: int) -> int:
    return torch.cuda.get_device_properties(device_index).multi_processor_count


# ---- tiles ------------------------------------------------------------------------------------------------------


def tile_layout() -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)


def row_layout() -> gl.NVMMASharedLayout:
    """The layout of a row of fp32 statistics."""
    return gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)


def tiles_of(x_BHSD: Tensor, num_rows: int) -> TensorDescriptor:
    """Describes tiles of (1, 1, num_rows, D) that never cross into the next head."""
    batch, heads, length, head_dim = x_BHSD.shape
    # A dimension of one element may have any stride, of which TMA would still ask for a multiple of 16 bytes.
    strides = [
        head_dim if n == 1 else stride for n, stride in zip((batch, heads, length), x_BHSD.stride(), strict=False)
    ]
    return TensorDescriptor(x_BHSD, list(x_BHSD.shape), [*strides, 1], [1, 1, num_rows, head_dim], tile_layout())


def rows_of(statistics: Tensor, num_rows: int) -> TensorDescriptor:
    """Describes runs of num_rows row statistics, of all heads one after another."""
    return TensorDescriptor(statistics, [statistics.numel()], [1], [num_rows], row_layout())


@gluon.jit
def to_low(x, DTYPE: gl.constexpr):
    """x in 16 bits, two values by one instruction; Triton's own conversion takes three for them."""
    if DTYPE == gl.bfloat16:
        low = gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=gl.bfloat16, is_pure=True, pack=2
        )
    else:
        low = gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=gl.float16, is_pure=True, pack=2
        )
    return low
