"""FlashAttention: read op.py (what a user calls), plan.py (what is launched), tiles.py (what runs,
and its tiles), and then the kernels.

tiled.py states the algorithm in plain PyTorch, triton.py has it as kernels, hopper/ as kernels for
that architecture; splits.py splits the forward loop among programs, and qkv.py takes queries, keys
and values as one projection.
"""

from labkit.kernels.flash_attention.op import (
    FlashAttention,
    TiledFlashAttention,
    flash_attention,
    plan_of,
    resolve_tiles,
)
from labkit.kernels.flash_attention.tiles import resolve_impl
from labkit.kernels.fused import IS_INTERPRETED

__all__ = [
    "IS_INTERPRETED",
    "FlashAttention",
    "TiledFlashAttention",
    "flash_attention",
    "plan_of",
    "resolve_impl",
    "resolve_tiles",
]
