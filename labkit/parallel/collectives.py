"""Times the collectives of torch.distributed and checks their results; copies between GPUs.

Sizes and rates as nccl-tests (doc/PERFORMANCE.md) defines them: the size S is that of the larger of
a rank's input and output; the algorithm bandwidth is S/t, the bus bandwidth that times
`bus_factor`. GB/s = 10⁹ bytes a second.

Transports: "default" is the process group's own (NCCL or gloo). "ctas_N" is NCCL with at most N
thread blocks. "copy" is `PeerMemory`, "low_contention" torch's operators that do the same.
"""

import functools
import itertools
import os
import re
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor

from labkit.accounting import OPERATIONS, bus_factor
from labkit.configs import check_known
from labkit.parallel.launch import moment, rank_device

# Their names until torch 2.12, of which later versions warn.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

OPERATIONS_OF = dict.fromkeys(("copy", "low_contention"), ("all_gather", "reduce_scatter"))
"""Of transports by copy engines; the others have all OPERATIONS."""

NUM_WARMUP = 2
NUM_SAMPLES = 20
LEAST_SAMPLES = 3
SAMPLES_S = 5.0
"""Of a call that is long, fewer samples are taken: as many as fit into this time."""

NUM_CALLS = 5
"""Calls of a sample on CUDA."""


def start(
    operation: Callable,
    pairs: Sequence[tuple[Tensor, Tensor]],
    *options: Any,
    group: dist.ProcessGroup | None = None,
) -> list[Any]:
    """Starts a collective for each (output, input), by NCCL all of them in one launch; returns what
    to wait for.
    """
    # With gloo's coalesced gather ranks aborted twice under load; why is not known.
    if dist.get_backend() == "gloo":
        return [operation(*pair, *options, async_op=True) for pair in pairs]
    with dist._coalescing_manager(group, async_ops=True) as work:
        for pair in pairs:
            operation(*pair, *options, group=group)
    return [work]


def average_in(dtype: torch.dtype, tensors: Sequence[Tensor]) -> None:
    """Replaces tensors of one dtype by their averages over the ranks, sent as `dtype`, added as
    they are.

    Each rank adds what all have of its share, so a value is rounded twice whatever the number of
    ranks: before it is sent, and as an average.
    """
    world_size = dist.get_world_size()
    sizes = [x.numel() for x in tensors]
    share_size = -(-sum(sizes) // world_size)
    sent = tensors[0].new_empty(world_size * share_size, dtype=dtype)
    pieces = sent[: sum(sizes)].split(sizes)
    pieces = [piece.view_as(x) for piece, x in zip(pieces, tensors, strict=True)]
    torch._foreach_copy_(pieces, tensors)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    share = received.view(world_size, share_size).mean(0, dtype=tensors[0].dtype)
    all_gather(sent, share.to(dtype))
    torch._foreach_copy_(tensors, pieces)


def check_ranks_agree(values: list) -> None:
    """Raises ValueError, on every rank alike, for values that differ from rank 0's. Collective."""
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, values)
    for rank, values in enumerate(everyone):
        for first, other in itertools.zip_longest(everyone[0], values):
            if first != other:
                raise ValueError(f"rank {rank} has {other}; accepted: what rank 0 has, {first}")


def most_of_ranks(values: float | list) -> Tensor:
    """Returns numbers as a tensor, each as the largest of all ranks. Collective."""
    most = torch.tensor(values, device=rank_device())
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return most


def _symmetric(num_elements: int, dtype: torch.dtype) -> tuple[Tensor, Any]:
    """Returns a tensor that all ranks can read and write, and the handle of its memory.
    Collective.
    """
    # Multicast can put a host's GPUs out of service, and a copy needs none.
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    tensor = symmetric_memory.empty(num_elements, dtype=dtype, device=rank_device())
    return tensor, symmetric_memory.rendezvous(tensor, dist.group.WORLD)


class PeerMemory:
    """All-gather and reduce-scatter by copies between the GPUs' symmetric memories: no
    multiprocessor communicates.

    Every rank holds a buffer of at least `num_elements`, which all ranks can read and write, in
    equal shards, one for each rank: `buffers` and `shards`, by rank. The operations run on the
    current stream, between barriers of all ranks, which are kernels of one small block. What they
    read and write beside the buffers may be any memory.
    """

    def __init__(self, num_elements: int, dtype: torch.dtype):
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        size = -(-num_elements // self.world_size) * self.world_size
        self.buffer, self.memory = _symmetric(size, dtype)
        ranks = range(self.world_size)
        self.buffers = [self.memory.get_buffer(rank, (size,), dtype) for rank in ranks]
        self.buffers[self.rank] = self.buffer
        self.shards = [buffer.chunk(self.world_size) for buffer in self.buffers]
        # Each rank reads from, or writes to, another peer at a time.
        self.peers = [(self.rank + step) % self.world_size for step in ranks[1:]]

    def all_gather(self, output: Tensor) -> None:
        """Copies the shards of all ranks, each at its place in its rank's buffer, to `output`."""
        pieces = output.tensor_split(self.world_size)
        self.memory.barrier()
        for peer in (self.rank, *self.peers):
            pieces[peer].copy_(self.shards[peer][peer][: len(pieces[peer])])
        self.memory.barrier()

    def reduce_scatter(self, shards: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        """Writes this rank's share of the sum over the ranks of each of `sources` to its shard.

        Each rank copies to its peers what is theirs, then adds what it got. The buffer holds all
        `sources` together.
        """
        pieces = [source.tensor_split(self.world_size) for source in sources]

        def staged(holder: int, sender: int) -> Sequence[Tensor]:
            sizes = [len(piece[holder]) for piece in pieces]
            return self.shards[holder][sender][: sum(sizes)].split(sizes)

        self.memory.barrier()
        for peer in self.peers:
            for target, piece in zip(staged(peer, self.rank), pieces, strict=True):
                target.copy_(piece[peer])
        self.memory.barrier()
        for shard, piece in zip(shards, pieces, strict=True):
            shard.copy_(piece[self.rank])
        for peer in self.peers:
            torch._foreach_add_(shards, staged(self.rank, peer))

    def average_scatter(self, shards: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        """Is `reduce_scatter`, but for averages."""
        self.reduce_scatter(shards, sources)
        torch._foreach_div_(shards, self.world_size)

    def all_reduce(self, values: Tensor) -> None:
        """Replaces a flat tensor by its average over the ranks."""
        size = len(values.tensor_split(self.world_size)[self.rank])
        # No peer writes there.
        shard = self.shards[self.rank][self.rank][:size]
        self.average_scatter([shard], [values])
        self.all_gather(values)


def start_on(stream: torch.cuda.Stream | None, function: Callable, *args: Any) -> Any:
    """Calls a function on another stream, behind what the current one has to do; returns what has
    the current one wait for it. Without a stream, as on a CPU, it is called at once.
    """
    if stream is None:
        function(*args)
        done = torch.futures.Future()
        done.set_result(None)
        return done
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function(*args)
        return stream.record_event()


def time_collective(
    operation: str, num_bytes: int, dtype: torch.dtype, *, transport="default"
) -> dict[str, Any]:
    """Returns what a collective of size `num_bytes` takes, the same dict on every rank. Collective.

    A sample is one call after all ranks have met, on the slowest of them. On CUDA it is in device
    time: by events around five calls that the host has issued before the first begins. Elsewhere it
    is the host's clock around a call.

    Args:
        operation: one of OPERATIONS; num_bytes: nccl-tests' size, rounded down to whole elements a
            rank.
        dtype: of the elements; transport: see the module's text.

    Returns:
        dict of world_size, num_bytes; times_s (one a sample), seconds and issue_s
        (medians of these, and until the host had issued a call), bus_gbs; num_wrong, the elements
        over all ranks that are not exactly what they must be.

    Raises ValueError for an unknown operation or transport, and fewer bytes than an element for
    each rank.
    """
    world_size = dist.get_world_size()
    accepted = OPERATIONS_OF.get(transport, OPERATIONS)
    check_known(f"operation by transport {transport!r}", operation, accepted)
    least = dtype.itemsize * world_size
    if num_bytes < least:
        raise ValueError(f"{num_bytes} bytes of {dtype}; accepted: {least} bytes and more")
    num_bytes -= num_bytes % least
    call, output, expected = _prepared(operation, num_bytes // least, dtype, transport)
    result = call()
    output = result if torch.is_tensor(result) else output
    wrong = torch.count_nonzero(output != expected)  # a sum would copy all as int64
    dist.all_reduce(wrong)
    for _ in range(NUM_WARMUP):
        warm_s, _ = _sample(call)
    num_samples = int(SAMPLES_S / most_of_ranks(warm_s).item())  # on all ranks alike
    num_samples = min(max(num_samples, LEAST_SAMPLES), NUM_SAMPLES)
    # On the slowest rank of each sample, since the others wait for it.
    samples = most_of_ranks([_sample(call) for _ in range(num_samples)])
    times, issues = samples.T.tolist()
    seconds = statistics.median(times)
    return {
        "world_size": world_size,
        "num_bytes": num_bytes,
        "times_s": times,
        "seconds": seconds,
        "issue_s": statistics.median(issues),
        "bus_gbs": num_bytes / seconds / 1e9 * bus_factor(operation, world_size),
        "num_wrong": int(wrong),
    }


def _sample(call: Callable[[], Any]) -> tuple[float, float]:
    """Returns the seconds of a call, on CUDA of the device, and those until the host had issued
    it.
    """
    dist.barrier()
    since = time.perf_counter()
    if rank_device().type != "cuda":
        call()
        seconds = time.perf_counter() - since
        return seconds, seconds
    # The device spins for two milliseconds: until the host has issued what follows.
    torch.cuda._sleep(4_000_000)
    call()  # the ranks meet
    begin = moment()
    for _ in range(NUM_CALLS):
        call()
    end = moment()
    issued = (time.perf_counter() - since) / (NUM_CALLS + 1)
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / NUM_CALLS, issued


def _prepared(
    operation: str, shard: int, dtype: torch.dtype, transport: str
) -> tuple[Callable[[], Any], Tensor, Tensor]:
    """Returns the call, its output and the output that is right: small whole numbers, which any
    order sums exactly.
    """
    rank = dist.get_rank()
    num_ranks = dist.get_world_size()
    group = group_of(transport, "default", *OPERATIONS_OF)
    num_inputs = shard if operation == "all_gather" else num_ranks * shard
    # At most 10, so that even bf16 holds the sum over 25 ranks; a rank's are this and its offset.
    digits = torch.arange(8, dtype=dtype, device=rank_device())
    numbers = digits.repeat(-(-num_inputs // 8))[:num_inputs]
    offsets = [peer % 4 for peer in range(num_ranks)]
    received = numbers
    if operation in ("reduce_scatter", "all_to_all"):
        received = numbers.chunk(num_ranks)[rank]
    expected = received  # of a broadcast: rank 0's offset is 0
    if operation in ("all_reduce", "reduce_scatter"):
        expected = (received * num_ranks).add_(sum(offsets))
    elif operation != "broadcast":
        expected = torch.cat([received + offset for offset in offsets])
    own = numbers + offsets[rank]
    if transport == "copy":
        peers = PeerMemory(num_ranks * shard, dtype)
        if operation == "all_gather":
            peers.shards[rank][rank].copy_(own)
            return lambda: peers.all_gather(peers.buffer), peers.buffer, expected
        output = torch.empty_like(expected)
        return lambda: peers.reduce_scatter([output], [own]), output, expected
    if transport == "low_contention":
        options = ["sum"] if operation == "reduce_scatter" else []
        function = getattr(torch.ops.symm_mem, f"_low_contention_{operation}")
        wait = torch.ops._c10d_functional.wait_tensor
        name = dist.group.WORLD.group_name
        readable, _ = _symmetric(num_inputs, dtype)
        readable.copy_(own)
        return lambda: wait(function(readable, *options, name)), own, expected
    # In place; only the first call's result is checked.
    output = own if operation in ("all_reduce", "broadcast") else torch.empty_like(expected)
    call = {
        "all_reduce": (dist.all_reduce, own),
        "broadcast": (dist.broadcast, own, 0),
        "all_gather": (all_gather, output, own),
        "reduce_scatter": (reduce_scatter, output, own),
        "all_to_all": (dist.all_to_all_single, output, own),
    }[operation]
    return functools.partial(*call, group=group), output, expected


@functools.cache
def _of_few_blocks(num_ctas: int, world: dist.ProcessGroup) -> dist.ProcessGroup:
    """Returns a group whose kernels have so many thread blocks at most; the same for the same
    world.
    """
    options = dist.ProcessGroupNCCL.Options()
    options.config.min_ctas = 1
    options.config.max_ctas = num_ctas
    return dist.new_group(backend="nccl", pg_options=options, device_id=rank_device())


def group_of(transport: str, default: str, *copies: str) -> dist.ProcessGroup | None:
    """Returns the process group of a transport: `default`, with NCCL also "ctas_N" and `copies`;
    None for the default one. Collective.

    Raises ValueError for another transport.
    """
    backend = dist.get_backend()
    accepted = [default]
    if backend == "nccl":
        accepted += ["ctas_N (N above 0)", *copies]
        num_ctas = re.fullmatch(r"ctas_([1-9][0-9]*)", transport)
        if num_ctas:
            return _of_few_blocks(int(num_ctas[1]), dist.group.WORLD)
    if transport not in accepted:
        raise ValueError(
            f"transport is {transport!r}; accepted with {backend}: {', '.join(accepted)}"
        )
    return None
