"""Closed forms: what collectives cost, how far each parallelism scales, what a rank has to hold. No
torch.

W is a rank's bandwidth in B/s in one direction, C its FLOP/s, B the tokens of a step over all
ranks. A ring moves (N−1)/N of the size S = that of the larger of a rank's input and output (once,
for an all-reduce twice). Limits on an FFN layer count its matrices at 2 bytes an element and 2
FLOPs per multiply-add, backward at twice the forward.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")


def bus_factor(operation: str, world_size: int) -> float:
    """Returns bus bandwidth over algorithm bandwidth as nccl-tests defines it; ValueError for
    another operation.
    """
    if operation not in OPERATIONS:
        raise ValueError(f"unknown operation {operation!r}; accepted: {', '.join(OPERATIONS)}")
    if operation == "broadcast":
        return 1.0
    return (2 if operation == "all_reduce" else 1) * (world_size - 1) / world_size


def ring_seconds(
    operation: str, num_bytes: float, world_size: int, bandwidth: float, latency_s: float = 0
) -> float:
    """Returns seconds of a ring collective of size S: `bus_factor`·S/W and a latency for each of
    its steps.
    """
    if world_size == 1:
        return 0.0
    steps = (world_size - 1) * (2 if operation == "all_reduce" else 1)
    return bus_factor(operation, world_size) * num_bytes / bandwidth + steps * latency_s


class Line(NamedTuple):
    """t = latency_s + num_bytes / bandwidth; `residuals` are (measured − fitted) / measured of each
    point.
    """

    latency_s: float
    bandwidth: float
    residuals: tuple[float, ...]


def fit_line(num_bytes: Sequence[float], seconds: Sequence[float]) -> Line:
    """Returns the α–β line of least squared relative residuals; ValueError below two sizes, or for
    a time of 0.
    """
    if len(set(num_bytes)) < 2 or len(num_bytes) != len(seconds):
        raise ValueError(
            f"{len(set(num_bytes))} sizes for {len(seconds)} times; accepted: 2 and more, one "
            f"time each"
        )
    if not np.min(seconds) > 0:
        raise ValueError(f"{np.min(seconds)} seconds; accepted: above 0")
    x, t = np.asarray(num_bytes), np.asarray(seconds)
    slope, alpha = np.polyfit(x, t, 1, w=1 / t).tolist()
    residuals = tuple(((t - alpha - slope * x) / t).tolist())
    return Line(alpha, 1 / slope if slope else math.inf, residuals)


def bucket_overhead_s(
    num_bytes: float, num_buckets: float, bandwidth: float, latency_s: float
) -> float:
    """Returns exposed seconds of an overlapped all-reduce in buckets: the last one's transfer a
    latency for each.
    """
    return num_bytes / (num_buckets * bandwidth) + num_buckets * latency_s


def best_bucket_bytes(num_bytes: float, bandwidth: float, latency_s: float) -> float:
    """Returns the bucket size √(s·w·o) at which `bucket_overhead_s` is least."""
    return math.sqrt(num_bytes * bandwidth * latency_s)


class LayerCost(NamedTuple):
    """FLOPs and sent bytes of one rank, of an FFN layer."""

    forward_flops: float
    forward_bytes: float
    backward_flops: float
    backward_bytes: float


def ffn_cost(
    tokens: float,
    d_model: int,
    d_ff: int,
    *,
    data: int = 1,
    tensor: int = 1,
    sharded: bool = False,
    num_matrices: int = 3,
) -> LayerCost:
    """Returns what one rank computes and sends for an FFN layer on a grid of `data` × `tensor`
    ranks.

    Data parallel ranks all-reduce gradients in backward. Sharded, they gather weights in both
    passes and reduce-scatter gradients. Tensor parallel ranks all-reduce the activations of the
    layer's output, and of its input's gradient.
    """
    flops = 2 * num_matrices * tokens * d_model * d_ff / (data * tensor)
    weight_bytes = 2 * num_matrices * d_model * d_ff / tensor * (data - 1) / data
    activation_bytes = 2 * (2 * tokens * d_model / data) * (tensor - 1) / tensor
    forward = activation_bytes + (weight_bytes if sharded else 0)
    return LayerCost(flops, forward, 2 * flops, activation_bytes + 2 * weight_bytes)


def max_data_ranks(tokens: float, bandwidth: float, flops: float) -> float:
    """Returns the ranks up to which data parallel and fully sharded training hide their
    communication: 1 + B·W/C.
    """
    return 1 + tokens * bandwidth / flops


def max_tensor_ranks(
    d_ff: int, bandwidth: float, flops: float, *, num_matrices: int = 3, backward: bool = False
) -> float:
    """Returns the ranks up to which tensor parallelism hides its communication: 1 + m/2·D_FF·W/C,
    backward 1 + m·…
    """
    return 1 + num_matrices * (1 if backward else 0.5) * d_ff * bandwidth / flops


def max_grid_ranks(
    tokens: float,
    d_ff: int,
    bandwidth: float,
    flops: float,
    *,
    overlapped: bool,
    num_matrices: int = 3,
) -> tuple[float, float]:
    """Returns the largest fully sharded × tensor parallel grid, as (data, tensor), that stays bound
    by compute.

    Overlapped, the two communicate at once and each keeps its own limit. Else their times add up:
    with m matrices, m·D_FF·(data − 1) + 2·B·(tensor − 1) ≤ m·B·D_FF·W/C, and the product is largest
    where both terms are half of the sum without the −1; for three matrices and large grids it is
    about ⅜·B·D_FF·(W/C)².
    """
    if overlapped:
        tensor = max_tensor_ranks(d_ff, bandwidth, flops, num_matrices=num_matrices)
        return max_data_ranks(tokens, bandwidth, flops), tensor
    weights, activations = num_matrices * d_ff, 2 * tokens
    half = (num_matrices * tokens * d_ff * bandwidth / flops + weights + activations) / 2
    return half / weights, half / activations


def min_grid_tokens(
    d_ff: int,
    flops: float,
    *,
    data: int,
    tensor: int,
    data_bandwidth: float,
    tensor_bandwidth: float,
    overlapped: bool,
    num_matrices: int = 2,
    exact: bool = True,
) -> float:
    """Returns the fewest tokens of a step with which a data × tensor grid is bound by compute;
    infinity for none.

    `exact` counts what a ring sends, (N−1)/N of the size. False counts the whole size, as the CS336
    accounting exercise of 2025 does: it asks for more tokens, by data/(data − 1) where overlapped.
    """
    data_steps, tensor_steps = (data - 1, tensor - 1) if exact else (data, tensor)
    tokens = data_steps * flops / data_bandwidth
    tensor_share = tensor_steps * flops * 2 / (num_matrices * d_ff * tensor_bandwidth)
    if tensor_share >= 1:
        return math.inf
    return tokens if overlapped else tokens / (1 - tensor_share)


def pipeline_bubble(num_stages: int, num_microbatches: int, interleave: int = 1) -> float:
    """Returns the idle fraction of a pipeline (GPipe, 1F1B): (p − 1)/(v·m + p − 1), v model chunks
    a stage.
    """
    return (num_stages - 1) / (interleave * num_microbatches + num_stages - 1)


def zero_bytes(
    num_parameters: float, world_size: int, stage: int, *, compute_bytes: int = 2
) -> dict[str, float]:
    """Returns bytes a rank holds, by component: fp32 master weights, gradients, AdamW's moments,
    weights that compute.

    Stage 1 shards the moments and, where another copy computes, the master weights; stage 2 the
    gradients, 3 all. With `compute_bytes` 0 the master weights compute. `ShardedOptimizer` is stage
    1 with 0. What a fully sharded layer gathers while it runs comes on top. ValueError for a stage
    beyond 0 to 3.
    """
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"stage {stage}; accepted: 0, 1, 2, 3")
    from_stage = {"master": 1 if compute_bytes else 3, "gradients": 2, "moments": 1, "compute": 3}
    bytes_each = {"master": 4, "gradients": 4, "moments": 8, "compute": compute_bytes}
    return {
        name: num_parameters * each / (world_size if stage >= from_stage[name] else 1)
        for name, each in bytes_each.items()
    }


STEP_TRANSFERS = {"data_parallel": 2, "zero_1": 2, "sharded_optimizer": 3, "fully_sharded": 3}
"""How often (N−1)/N of the parameters' bytes leave a rank in a step. ZeRO-1 reduce-scatters
gradients and gathers parameters; our sharded optimizer all-reduces gradients (twice) and broadcasts
parameters; fully sharded, weights are gathered in forward and backward and gradients
reduce-scattered.
"""
