"""What a launch of attention depends on: layouts of tensors, the problem, packed sequences.

Shape suffixes: B batch, H query heads, S length, D head dimension.
"""

import itertools
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary


class Layout(NamedTuple):
    """What a launch depends on of a tensor: all but its address, of which whether it is a multiple of 16 bytes."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    on_boundary: bool

    def as_4d(self, packed: bool) -> "Layout":
        """(B, S, D) as (B, 1, S, D), and a packed (total, H, D) as (1, H, total, D), its batch stride 0.

        The kernels find a packed sequence by its first row, whichever its number in the batch.
        """
        if len(self.shape) == 4:
            return self
        (size_0, size_1, size_d), (stride_0, stride_1, stride_d) = self.shape, self.strides
        if packed:
            return self._replace(shape=(1, size_1, size_0, size_d), strides=(0, stride_1, stride_0, stride_d))
        return self._replace(shape=(size_0, 1, size_1, size_d), strides=(stride_0, 0, stride_1, stride_d))

    def dense(self) -> "Layout":
        """A dense tensor of the same shape, heads inside the rows where they are so here.

        A transposed (B, S, H, D) then gets an output that transposes back without a copy; a view into a fused QKV
        tensor gets one without the holes.
        """
        if len(self.shape) == 4 and self.strides[1] < self.strides[2]:
            _, heads, length, head_dim = self.shape
            strides = (length * heads * head_dim, head_dim, heads * head_dim, 1)
            return Layout(self.shape, strides, self.dtype, True)
        return self.contiguous()

    def contiguous(self) -> "Layout":
        """What `Tensor.contiguous` copies to."""
        strides = tuple(math.prod(self.shape[axis + 1 :]) for axis in range(len(self.shape)))
        return Layout(self.shape, strides, self.dtype, True)


def layout_of(x: Tensor) -> Layout:
    return Layout(x.shape, x.stride(), x.dtype, x.data_ptr() % 16 == 0)


def alignment_of(*layouts: Layout) -> int:
    """Elements in 16 bytes where every row of every tensor starts on such a boundary, else 1."""
    elements = 16 // layouts[0].dtype.itemsize
    for x in layouts:
        if x.strides[-1] != 1 or not x.on_boundary or any(stride % elements for stride in x.strides[:-1]):
            return 1
    return elements


@dataclass(frozen=True)
class Problem:
    """What the kernels are told beyond the tensors; lengths are the longest of a packed batch, rows all of q and k."""

    num_batches: int
    num_heads: int
    num_key_heads: int
    max_queries: int
    max_keys: int
    head_dim: int
    left: int
    right: int
    packed: bool
    num_rows: tuple[int, int]

    def num_tiles(self, block: int, of_keys: bool = False) -> int:
        """Returns how many tiles of `block` rows all sequences have; those of packed ones are as in `_sequence_of`."""
        if self.packed:
            return self.num_rows[of_keys] // block + self.num_batches
        return -(-(self.max_keys if of_keys else self.max_queries) // block) * self.num_batches


class Packing(NamedTuple):
    """What a launch depends on of a packed batch."""

    num_sequences: int
    max_queries: int
    max_keys: int
    cu_seqlens_q: Layout
    cu_seqlens_k: Layout


# Reading the values waits for the device, so each tensor is read once per content (its version counts writes).
_lengths_seen = WeakTensorKeyDictionary()


def _longest(cu_seqlens: Tensor, which: str, total: int, max_seqlen: int | None) -> int:
    """Returns the longest sequence, max_seqlen where it is given; raises for cumulative lengths that cannot be."""
    name = f"cu_seqlens_{which}"
    key = (cu_seqlens._version, total)
    seen = _lengths_seen.get(cu_seqlens)
    if seen is None or seen[0] != key:
        values = cu_seqlens.tolist()
        if values[0] != 0:
            raise ValueError(f"{name} must start at 0; got {values[0]}")
        lengths = [end - begin for begin, end in itertools.pairwise(values)]
        if min(lengths) <= 0:
            index = next(index for index, length in enumerate(lengths) if length <= 0)
            raise ValueError(f"{name} must be increasing; got {values[index]} and then {values[index + 1]}")
        if values[-1] != total:
            raise ValueError(f"{name} must end at the number of rows of {which}, {total}; got {values[-1]}")
        seen = (key, max(lengths))
        _lengths_seen[cu_seqlens] = seen
    if max_seqlen is None:
        return seen[1]
    if max_seqlen < seen[1]:
        raise ValueError(f"max_seqlen_{which} must be at least the longest sequence, {seen[1]}; got {max_seqlen}")
    return max_seqlen


def packing_of(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k) -> Packing | None:
    """Returns the longest lengths of a packed batch, checked; None of one that is not packed."""
    if cu_seqlens_q is None:
        return None
    return Packing(
        cu_seqlens_q.shape[0] - 1,
        _longest(cu_seqlens_q, "q", q.shape[0], max_seqlen_q),
        _longest(cu_seqlens_k, "k", k.shape[0], max_seqlen_k),
        layout_of(cu_seqlens_q),
        layout_of(cu_seqlens_k),
    )


def problem_of(q: Layout, k: Layout, left: int, right: int, packing: Packing | None) -> Problem:
    """Returns the problem of queries and keys of these layouts."""
    packed = packing is not None
    (num_batches, num_heads, max_queries, head_dim), key_shape = q.as_4d(packed).shape, k.as_4d(packed).shape
    num_key_heads, max_keys = key_shape[1:3]
    rows = (max_queries, max_keys)
    if packed:
        num_batches, max_queries, max_keys = packing[:3]
    # A limit that no pair of positions reaches is none, and its loop then costs nothing.
    left = -1 if left >= max_keys else left
    right = -1 if right >= max_queries else right
    return Problem(num_batches, num_heads, num_key_heads, max_queries, max_keys, head_dim, left, right, packed, rows)


def with_heads(x: Tensor) -> Tensor:
    """Views (B, S, D) as (B, 1, S, D)."""
    return x.unsqueeze(1) if x.dim() == 3 else x
