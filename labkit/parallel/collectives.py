"""Times the collectives of torch.distributed, checks their results and fits a latency and a
bandwidth to them.

Sizes and rates as nccl-tests (doc/PERFORMANCE.md) defines them: the size S is that of the larger of
a rank's input and output; the algorithm bandwidth is S/t, the bus bandwidth that times
`bus_factor`. GB/s = 10⁹ bytes a second.

Transports: "default" is the process group's own (NCCL or gloo). "ctas_N" is NCCL with at most N
thread blocks. "zero_cta" is NCCL 2.28 and later on its own symmetric memory, which has copy engines
move the data where it can. "copy" is `PeerCopy`. A process can use one kind of symmetric memory: do
not mix "zero_cta" and "copy" in a launch.
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
from labkit.parallel.launch import rank_device

# Their names until torch 2.12, of which later versions warn.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

NUM_WARMUP, NUM_SAMPLES = 2, 20
NUM_CALLS = 5
"""Calls of a sample on CUDA."""


def start(operation: Callable, pairs: Sequence[tuple[Tensor, Tensor]], *options: Any) -> list[Any]:
    """Starts a collective for each (output, input), by NCCL all of them in one launch; returns what
    to wait for.
    """
    # With gloo's coalesced gather ranks aborted twice under load; why is not known.
    if dist.get_backend() == "gloo":
        return [operation(*pair, *options, async_op=True) for pair in pairs]
    with dist._coalescing_manager(async_ops=True) as work:
        for pair in pairs:
            operation(*pair, *options)
    return [work]


def check_ranks_agree(values: list, problem: str = "") -> None:
    """Raises ValueError, on every rank alike, for the problem of a rank, or for values that differ
    from rank 0's. Collective.
    """
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (problem, values))
    for rank, (problem, values) in enumerate(everyone):
        if problem:
            raise ValueError(f"rank {rank}: {problem}")
        for first, other in itertools.zip_longest(everyone[0][1], values):
            if first != other:
                raise ValueError(f"rank {rank} has {other}; accepted: what rank 0 has, {first}")


class PeerMemory:
    """A buffer of `num_elements` on every rank, which all ranks can read and write: `buffers`, by
    rank.
    """

    def __init__(self, num_elements: int, dtype: torch.dtype):
        # Multicast can put a host's GPUs out of service, and a copy needs none.
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        own = symmetric_memory.empty(num_elements, dtype=dtype, device=rank_device())
        self.memory = symmetric_memory.rendezvous(own, dist.group.WORLD)
        self.buffers = [
            self.memory.get_buffer(peer, own.shape, dtype) for peer in range(self.world_size)
        ]
        self.buffers[self.rank] = self.buffer = own


class PeerCopy(PeerMemory):
    """All-gather and reduce-scatter by copies between the GPUs' symmetric memories: no
    multiprocessor communicates.

    Holds a buffer of `num_elements` on every rank, in equal shards, one for each rank. Both
    operations run on the current stream, between barriers of all ranks, which are kernels of one
    small block.
    """

    def __init__(self, num_elements: int, dtype: torch.dtype):
        if num_elements % dist.get_world_size():
            raise ValueError(
                f"{num_elements} elements for {dist.get_world_size()} ranks; accepted: a multiple"
            )
        super().__init__(num_elements, dtype)
        self.shards = [buffer.chunk(self.world_size) for buffer in self.buffers]

    def all_gather(self) -> None:
        """Copies the peers' shards, each at its place in its rank's buffer, to their places in the
        own buffer.
        """
        self.memory.barrier()
        for step in range(1, self.world_size):
            # Each rank reads from another peer at a time.
            peer = (self.rank + step) % self.world_size
            self.shards[self.rank][peer].copy_(self.shards[peer][peer])
        self.memory.barrier()

    def all_reduce(self, staging: "PeerCopy") -> None:
        """Replaces the buffer by its average over the ranks; `staging` is as large and holds
        nothing that lasts.
        """
        staging.average_scatter([self.shards[self.rank][self.rank]], [self.buffer])
        self.all_gather()

    def average_scatter(self, shards: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        """Is `reduce_scatter`, but for averages."""
        self.reduce_scatter(shards, sources)
        torch._foreach_div_(shards, self.world_size)

    def reduce_scatter(self, shards: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        """Writes this rank's share of the sum over the ranks of each of `sources` to its shard.

        Each rank copies to its peers what is theirs, then adds what it got. The buffer holds all
        `sources` together.
        """
        pieces = [source.chunk(self.world_size) for source in sources]
        sizes = [len(shard) for shard in shards]

        def staged(holder: int, sender: int) -> Sequence[Tensor]:
            return self.shards[holder][sender][: sum(sizes)].split(sizes)

        self.memory.barrier()
        for step in range(1, self.world_size):
            peer = (self.rank + step) % self.world_size
            for target, source in zip(staged(peer, self.rank), pieces, strict=True):
                target.copy_(source[peer])
        self.memory.barrier()
        totals = [source[self.rank] for source in pieces]
        for peer in range(self.world_size):
            if peer != self.rank:
                parts = zip(totals, staged(self.rank, peer), shards, strict=True)
                totals = [torch.add(total, part, out=shard) for total, part, shard in parts]


class CopyWork:
    """Calls a function on another stream, behind what the current one has to do; `wait` has the
    current one wait.
    """

    def __init__(self, stream: torch.cuda.Stream, function: Callable, *args: Any):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            function(*args)
            self._event = stream.record_event()

    def wait(self) -> None:
        self._event.wait()


def time_collective(
    operation: str, num_bytes: int, dtype: torch.dtype = torch.float32, *, transport="default"
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
        dict of operation, transport, dtype, world_size, num_bytes; times_s (one a sample), seconds
        and issue_s (medians of these, and until the host had issued a call), algorithm_gbs,
        bus_gbs; num_wrong, the elements over all ranks that are not exactly what they must be.

    Raises ValueError for an unknown operation or transport, and fewer bytes than an element for
    each rank.
    """
    world_size, device = dist.get_world_size(), rank_device()
    if operation not in OPERATIONS:
        raise ValueError(f"unknown operation {operation!r}; accepted: {', '.join(OPERATIONS)}")
    shard = num_bytes // (dtype.itemsize * world_size)
    if shard < 1:
        raise ValueError(
            f"{num_bytes} bytes of {dtype}; accepted: {dtype.itemsize * world_size} bytes and more"
        )
    _check_transport(transport, operation)
    call, output, expected = _prepared(operation, shard, dtype, transport)
    call()
    wrong = (output != expected).sum()
    dist.all_reduce(wrong)
    for _ in range(NUM_WARMUP):
        _sample(call, device)
    samples = torch.tensor([_sample(call, device) for _ in range(NUM_SAMPLES)], device=device)
    # On the slowest rank of each sample, since the others wait for it.
    dist.all_reduce(samples, dist.ReduceOp.MAX)
    times, issues = samples.T.tolist()
    seconds = statistics.median(times)
    num_bytes = shard * world_size * dtype.itemsize
    return {
        "operation": operation,
        "transport": transport,
        "dtype": str(dtype).removeprefix("torch."),
        "world_size": world_size,
        "num_bytes": num_bytes,
        "times_s": times,
        "seconds": seconds,
        "issue_s": statistics.median(issues),
        "algorithm_gbs": num_bytes / seconds / 1e9,
        "bus_gbs": num_bytes / seconds / 1e9 * bus_factor(operation, world_size),
        "num_wrong": int(wrong),
    }


def _check_transport(transport: str, operation: str) -> None:
    backend, accepted = dist.get_backend(), "default"
    if backend == "nccl":
        accepted = "default, ctas_N (N above 0), zero_cta, copy"
    is_known = re.fullmatch(r"default|ctas_[1-9][0-9]*|zero_cta|copy", transport)
    if not is_known or (backend != "nccl" and transport != "default"):
        raise ValueError(f"transport {transport!r} with {backend}; accepted here: {accepted}")
    if transport == "copy" and operation not in ("all_gather", "reduce_scatter"):
        raise ValueError(f"{operation} by copy; accepted: all_gather, reduce_scatter")
    if transport == "zero_cta" and not hasattr(dist.ProcessGroupNCCL, "NCCL_CTA_POLICY_ZERO"):
        raise ValueError(
            "transport 'zero_cta' needs NCCL 2.28; accepted here: default, ctas_N, copy"
        )


def _sample(call: Callable[[], Any], device: torch.device) -> tuple[float, float]:
    """Returns the seconds of a call, on CUDA of the device, and those until the host had issued
    it.
    """
    dist.barrier()
    since = time.perf_counter()
    if device.type != "cuda":
        call()
        seconds = time.perf_counter() - since
        return seconds, seconds
    # The device spins for two milliseconds: until the host has issued what follows.
    torch.cuda._sleep(4_000_000)
    call()  # the ranks meet
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(NUM_CALLS):
        call()
    end.record()
    issued = (time.perf_counter() - since) / (NUM_CALLS + 1)
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / NUM_CALLS, issued


def _prepared(
    operation: str, shard: int, dtype: torch.dtype, transport: str
) -> tuple[Callable[[], Any], Tensor, Tensor]:
    """Returns the call, its output and the output that is right: small whole numbers, which any
    order sums exactly.
    """
    rank, n, device = dist.get_rank(), dist.get_world_size(), rank_device()
    group = _group(transport)
    peers = PeerCopy(n * shard, dtype) if transport == "copy" else None

    def empty(num_elements: int) -> Tensor:
        if transport != "zero_cta":
            return torch.empty(num_elements, dtype=dtype, device=device)
        tensor = symmetric_memory.empty(num_elements, dtype=dtype, device=device)
        symmetric_memory.rendezvous(tensor, group)
        return tensor

    num_inputs = shard if operation == "all_gather" else n * shard
    # At most 10, so that even bf16 holds the sum over 25 ranks.
    everyone = [
        (torch.arange(num_inputs, device=device) % 8 + peer % 4).to(dtype) for peer in range(n)
    ]
    own = empty(num_inputs)
    own.copy_(everyone[rank])
    # In place; only the first call's result is checked.
    if operation == "all_reduce":
        return lambda: dist.all_reduce(own, group=group), own, sum(everyone)
    if operation == "broadcast":
        return lambda: dist.broadcast(own, 0, group=group), own, everyone[0]
    if operation == "all_gather":
        expected = torch.cat(everyone)
        if peers is not None:
            peers.shards[rank][rank].copy_(own)
            return peers.all_gather, peers.buffer, expected
        output = empty(n * shard)
        return lambda: all_gather(output, own, group=group), output, expected
    if operation == "reduce_scatter":
        output, expected = empty(shard), sum(everyone).chunk(n)[rank]
        if peers is not None:
            return lambda: peers.reduce_scatter([output], [own]), output, expected
        return lambda: reduce_scatter(output, own, group=group), output, expected
    output, expected = empty(n * shard), torch.cat([values.chunk(n)[rank] for values in everyone])
    return lambda: dist.all_to_all_single(output, own, group=group), output, expected


@functools.cache
def _group(transport: str) -> dist.ProcessGroup | None:
    """Returns the process group of a transport, None for the default one."""
    if transport in ("default", "copy"):
        return None
    options = dist.ProcessGroupNCCL.Options()
    if transport == "zero_cta":
        options.config.cta_policy = dist.ProcessGroupNCCL.NCCL_CTA_POLICY_ZERO
        symmetric_memory.set_backend("NCCL")
    else:
        options.config.min_ctas = 1
        options.config.max_ctas = int(transport.removeprefix("ctas_"))
    return dist.new_group(backend="nccl", pg_options=options, device_id=rank_device())
