"""What a launch of attention depends on: layouts of tensors, the problem, packed sequences.

Shape suffixes: B batch, H query heads, S length, D head dimension.
"""

import itertools
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Layout(NamedTuple):
    """What a launch depends on of a tensor: all but its address, of which whether it is a multiple
    of 16 bytes.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    on_boundary: bool

    def as_4d(self, packed: bool) -> "Layout":
        """(B, S, D) as (B, 1, S, D), and a packed (total, H, D) as (1, H, total, D), its batch
        stride 0.

        The kernels find a packed sequence by its first row, whichever its number in the batch.
        """
        if len(self.shape) == 4:
            return self
        (size_0, size_1, size_d), (stride_0, stride_1, stride_d) = self.shape, self.strides
        if packed:
            return self._replace(
                shape=(1, size_1, size_0, size_d), strides=(0, stride_1, stride_0, stride_d)
            )
        return self._replace(
            shape=(size_0, 1, size_1, size_d), strides=(stride_0, 0, stride_1, stride_d)
        )

    def dense(self) -> "Layout":
        """A dense tensor of the same shape, heads inside the rows where they are so here.

        A transposed (B, S, H, D) then gets an output that transposes back without a copy; a view
        into a fused QKV tensor gets one without the holes.
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
        if (
            x.strides[-1] != 1
            or not x.on_boundary
            or any(stride % elements for stride in x.strides[:-1])
        ):
            return 1
    return elements


@dataclass(frozen=True)
class Problem:
    """What the kernels are told beyond the tensors.

    Of a packed batch the lengths are all rows of q and k, and a batch is a sequence or what lies
    behind the last.
    """

    num_batches: int
    num_heads: int
    num_key_heads: int
    max_queries: int
    max_keys: int
    head_dim: int
    left: int
    right: int
    packed: bool

    def num_tiles(self, block: int, of_keys: bool = False) -> int:
        """Returns how many tiles of `block` rows all sequences have; those of packed ones are as in
        `_sequence_of`.
        """
        length = self.max_keys if of_keys else self.max_queries
        return (
            length // block + self.num_batches
            if self.packed
            else -(-length // block) * self.num_batches
        )


Packing = tuple[Layout, Layout]
"""What a launch depends on of a packed batch: the layouts of its cumulative lengths, and none of
their values.
"""


def check_lengths(
    q: Tensor, k: Tensor, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
) -> None:
    """Raises for cumulative lengths that cannot be, which it has to read: it waits for the device.

    On a CUDA device they are not read where both longest are given: whoever gives them answers for
    the lengths too.
    """
    if q.is_cuda:
        if max_seqlen_q is not None and max_seqlen_k is not None:
            return
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "max_seqlen_q and max_seqlen_k must be given where a CUDA graph is captured; got "
                "None"
            )
    given = (("q", q.shape[0], max_seqlen_q), ("k", k.shape[0], max_seqlen_k))
    read = torch.stack((cu_seqlens_q, cu_seqlens_k)).tolist()
    for values, (which, total, max_seqlen) in zip(read, given, strict=True):
        name = f"cu_seqlens_{which}"
        if values[0] != 0:
            raise ValueError(f"{name} must start at 0; got {values[0]}")
        for begin, end in itertools.pairwise(values):
            if begin >= end:
                raise ValueError(f"{name} must be increasing; got {begin} and then {end}")
        if values[-1] != total:
            raise ValueError(
                f"{name} must end at the number of rows of {which}, {total}; got {values[-1]}"
            )
        longest = max(end - begin for begin, end in itertools.pairwise(values))
        if max_seqlen is not None and max_seqlen < longest:
            raise ValueError(
                f"max_seqlen_{which} must be at least the longest sequence, {longest}; got "
                f"{max_seqlen}"
            )


def problem_of(q: Layout, k: Layout, left: int, right: int, packing: Packing | None) -> Problem:
    """Returns the problem of queries and keys of these layouts."""
    packed = packing is not None
    (num_batches, num_heads, max_queries, head_dim), key_shape = (
        q.as_4d(packed).shape,
        k.as_4d(packed).shape,
    )
    num_key_heads, max_keys = key_shape[1:3]
    if packed:
        (num_batches,) = packing[0].shape
    # A limit that no pair of positions reaches is none, and its loop then costs nothing.
    left = -1 if left >= max_keys else left
    right = -1 if right >= max_queries else right
    return Problem(
        num_batches, num_heads, num_key_heads, max_queries, max_keys, head_dim, left, right, packed
    )


def with_heads(x: Tensor) -> Tensor:
    """Views (B, S, D) as (B, 1, S, D)."""
    return x.unsqueeze(1) if x.dim() == 3 else x
