"""A training step on this rank under every way to share it out: its times, memory and kernels, for
notebook 07.
"""

import functools
import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pandas as pd
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from labkit import numerics
from labkit.accounting import num_parameters
from labkit.device import Device, num_usable_cores
from labkit.experiments.sections import empty_cache
from labkit.experiments.step import Step
from labkit.measure.profiling import busy_ns, capture_with_kineto
from labkit.measure.timing import captured_once, collector_paused, synchronize
from labkit.models.transformer import Block, language_model_loss
from labkit.parallel import data_parallel
from labkit.parallel.fully_sharded import FullyShardedDataParallel
from labkit.parallel.launch import moment, rank_device
from labkit.parallel.sharded_optimizer import ShardedOptimizer

NUM_WARMUP, NUM_PROFILED = 2, 2
LEARNING_RATE = 1e-4

TIMELINES = ("naive", "bucketed 100 MB", "bucketed copy")
"""Ways whose intervals of computing and communicating are kept, for one step of every rank."""

SHORTEST_GAP_NS = 100_000
"""Gaps below this are no gaps in a timeline: they could not be seen."""

COMMUNICATION = r"nccl|barrier"
"""In the names of kernels that communicate; copies do where they are not on the stream that
computes.
"""

NUM_ROUNDS = 2
"""How often the ways of a case are taken in turn."""

Wrap = Callable[[nn.Module, torch.dtype | None], nn.Module]
"""Wraps a model that computes in a dtype, None for its own."""


def _fully_shard(model: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    # takes seconds, as the import below
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
    for module in (*model.blocks, model):
        fully_shard(module, mp_policy=policy)
    return model


def _ddp(model: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    device = rank_device()
    device_ids = [device] if device.type == "cuda" else None
    return DistributedDataParallel(
        model, device_ids=device_ids, gradient_as_bucket_view=True, broadcast_buffers=False
    )


def _ours(wrapper: type[nn.Module], **options: Any) -> Wrap:
    return lambda model, dtype: wrapper(model, broadcast_buffers=False, **options)


def _bucketed(megabytes: int, **options: Any) -> Wrap:
    return _ours(data_parallel.BucketedDataParallel, bucket_size_mb=megabytes, **options)


def _fsdp(**options: Any) -> Wrap:
    return lambda model, dtype: FullyShardedDataParallel(
        model, dtype, units=(Block,), broadcast_buffers=False, **options
    )


ADAMW = {"lr": LEARNING_RATE, "fused": True}
_adamw = functools.partial(torch.optim.AdamW, **ADAMW)


def _sharded_adamw(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return ShardedOptimizer(parameters, torch.optim.AdamW, **ADAMW)


def _zero_adamw(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, **ADAMW)


@dataclass(frozen=True)
class Way:
    """How a step is shared out: what wraps the model, what makes the optimizer, and whether
    autocast casts, not the wrapper.
    """

    wrap: Wrap
    optimizer: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer] = _adamw
    autocast: bool = True


WAYS = {
    "alone": Way(lambda model, dtype: model),
    "naive": Way(_ours(data_parallel.NaiveDataParallel)),
    "flat": Way(_ours(data_parallel.FlatDataParallel)),
    "overlapped": Way(_ours(data_parallel.OverlappedDataParallel)),
    **{f"bucketed {mb} MB": Way(_bucketed(mb)) for mb in (1, 10, 100, 1000)},
    "bucketed copy": Way(_bucketed(100, transport="copy")),
    "ddp": Way(_ddp),
    "sharded optimizer": Way(_bucketed(100), _sharded_adamw),
    "zero redundancy": Way(_ddp, _zero_adamw),
    "fsdp": Way(_fsdp(), autocast=False),
    "fsdp copy": Way(_fsdp(transport="copy"), autocast=False),
    "fully_shard": Way(_fully_shard, autocast=False),
}
"""The ways to run a step. "alone": every rank by itself, at the same time, with no communication.
"copy": by copy engines instead of NCCL. "ddp", "zero redundancy" and "fully_shard" are torch's.
"""


class SharedStep(Step):
    """A step under one way on this rank, on tokens of its own, and what its memory holds."""

    def __init__(self, way: Way, parameters: dict[str, Any]):
        device = Device(rank_device().type, "", "")
        super().__init__(device, {**parameters, "attention": "sdpa"})
        self.way = way
        self.config = self.model.config
        generator = torch.Generator().manual_seed(dist.get_rank())
        shape = (2, *self.tokens.shape)
        tokens = torch.randint(self.config.vocab_size, shape, generator=generator)
        self.tokens, self.targets = tokens.to(rank_device())
        self.model = way.wrap(self.model, self.recipe.autocast)
        self.optimizer = way.optimizer(list(self.model.parameters()))
        for group in self.optimizer.param_groups:
            group["capturable"] = self.compile == "graph"
        self.memory = {"init_bytes": _allocated()}
        self.graph: torch.cuda.CUDAGraph | None = None

    def autocast(self) -> AbstractContextManager:
        return super().autocast() if self.way.autocast else nullcontext()

    def forward(self) -> torch.Tensor:
        with self.autocast():
            return language_model_loss(self.model(self.tokens).float(), self.targets)

    def run(self, *, before: Callable[[], None] | None = None) -> None:
        """Runs one training step; `before` is called between its backward pass and the
        optimizer.
        """
        if self.graph is not None:
            self.graph.replay()
            return
        self.optimizer.zero_grad()
        loss = self.forward()
        loss.backward()
        if finish := getattr(self.model, "finish_gradient_synchronization", None):
            finish()
        if before:
            before()
        self.optimizer.step()
        self.loss = loss.detach()

    def warm_up(self) -> float:
        """Returns the mean loss over the ranks after NUM_WARMUP steps; notes what memory holds on
        the way.
        """
        if self.device.kind == "cuda":
            torch.cuda.reset_peak_memory_stats()
        for _ in range(NUM_WARMUP):
            self.run(before=lambda: self.memory.update(before_step_bytes=_allocated()))
        self.memory["symmetric_bytes"] = getattr(self.model, "symmetric_bytes", None)
        self.memory["after_step_bytes"] = _allocated()
        self.memory["peak_bytes"] = torch.cuda.max_memory_allocated() or None
        self.memory |= self._components()
        self.memory = {name: value for name, value in self.memory.items() if value is not None}
        if self.compile == "graph":
            self.optimizer.zero_grad()
            # The graph holds a step's collectives too, and NCCL's own threads may ask for events
            # meanwhile.
            self.graph = captured_once(self.run, error_mode="thread_local")
            self.run()
        loss = self.loss.clone()
        dist.all_reduce(loss)
        return loss.item() / dist.get_world_size()

    def _components(self) -> dict[str, int]:
        """Returns the bytes of this rank's parts of parameters, gradients and optimizer state."""

        def local_bytes(tensors: Iterable[Any]) -> int:
            return sum(getattr(x, "_local_tensor", x).nbytes for x in tensors if torch.is_tensor(x))

        parameters = list(self.model.parameters())
        # ZeroRedundancyOptimizer keeps its own inside.
        state = getattr(self.optimizer, "optim", self.optimizer).state
        return {
            "parameter_bytes": local_bytes(parameters),
            "gradient_bytes": local_bytes(parameter.grad for parameter in parameters),
            "state_bytes": local_bytes(x for values in state.values() for x in values.values()),
        }

    def time(self, num_steps: int) -> list[float]:
        """Returns milliseconds of each of `num_steps` steps, one right after the other."""
        dist.barrier()
        synchronize(self.device.kind)
        with collector_paused():
            moments = [moment()]
            for _ in range(num_steps):
                self.run()
                moments.append(moment())
            synchronize(self.device.kind)
        if self.device.kind != "cuda":
            return [1e3 * (end - begin) for begin, end in pairwise(moments)]
        return [begin.elapsed_time(end) for begin, end in pairwise(moments)]

    def gather_waits(self) -> list[float]:
        """Returns the milliseconds that each gather of a fully sharded step made the current stream
        wait.
        """
        if not isinstance(self.model, FullyShardedDataParallel) or self.device.kind != "cuda":
            return []
        self.model.waits = []
        with collector_paused():
            self.run()
            torch.cuda.synchronize()
        waits, self.model.waits = self.model.waits, None
        return [begin.elapsed_time(end) for begin, end in waits]

    def profile(self, *, timeline: bool) -> tuple[dict[str, float], dict[str, list[float]]]:
        """Returns (µs a step, timeline in ms) of this rank's kernels and copies, from
        torch.profiler.
        """
        host = _host_group()

        def steps() -> None:
            # Profilers take their time to start; a rank that waits for another would seem to
            # communicate.
            dist.barrier(host)
            for _ in range(NUM_PROFILED):
                with torch.profiler.record_function("step"):
                    self.run()

        with collector_paused():
            table = capture_with_kineto(steps, "cuda").operations
        by_name, is_copy = table["name"].str.contains(COMMUNICATION), table["kind"] == "memcpy"
        computing_stream = table[~by_name].groupby("stream")["duration_ns"].sum().idxmax()
        is_communication = by_name | (is_copy & (table["stream"] != computing_stream))
        computing, communicating = table[~is_communication], table[is_communication]
        times_ns = {
            "compute_us": computing["duration_ns"].sum(),
            "communication_us": busy_ns(communicating),
            "exposed_us": busy_ns(table) - busy_ns(computing),
        }
        times_us = {name: float(ns) / 1e3 / NUM_PROFILED for name, ns in times_ns.items()}
        if not timeline:
            return times_us, {}
        return times_us, merged("computing", computing) | merged("communicating", communicating)

    def described(self) -> dict[str, Any]:
        """Returns the case as read back from the live objects."""
        batch, context = self.tokens.shape
        dtype = self.recipe.autocast
        precision = numerics.dtype_name(dtype) if dtype else numerics.live_precision(torch.float32)
        return {
            "size": self.config.name,
            "context": context,
            "precision": precision,
            "compile": self.compile,
            "batch": batch,
        }

    def observed(self) -> dict[str, Any]:
        """Returns what else there is to know of the live objects."""
        dtype = next(self.model.parameters()).dtype
        return {
            "wrapper": type(self.model).__name__,
            "optimizer": type(self.optimizer).__name__,
            "parameter_dtype": str(dtype).removeprefix("torch."),
            "num_parameters": num_parameters(self.config),
        }

    def close(self) -> None:
        """Frees what the step holds; what is compiled stays for the next way."""
        del self.model, self.optimizer, self.loss, self.graph
        empty_cache(self.device)


@functools.cache
def _host_group() -> dist.ProcessGroup:
    """Returns the group of all ranks in which they meet without a kernel."""
    return dist.new_group(backend="gloo")


def _allocated() -> int | None:
    return torch.cuda.memory_allocated() or None  # 0 without a GPU


def merged(name: str, table: pd.DataFrame) -> dict[str, list[float]]:
    """Returns begins and ends (ms) of the intervals in which a kernel ran, without gaps below
    SHORTEST_GAP_NS.
    """
    rows = table.sort_values("start_ns")
    begins, ends = rows["start_ns"], rows["end_ns"].cummax()
    is_first = ~(begins - ends.shift() < SHORTEST_GAP_NS)  # of its interval
    is_last = is_first.shift(-1, fill_value=True)
    return {
        f"{name}_begin_ms": (begins[is_first] / 1e6).tolist(),
        f"{name}_end_ms": (ends[is_last] / 1e6).tolist(),
    }


def steps_rank(
    phases: Sequence[str], parameters: dict[str, Any], time_limit_s: float
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Runs each way's steps in turn, NUM_ROUNDS times, and yields (way, what this rank has seen so
    far) each time.
    """
    torch.set_num_threads(max(1, num_usable_cores() // dist.get_world_size()))
    losses = {}
    for way in ("alone", "naive"):
        step = SharedStep(WAYS[way], parameters)
        losses[way] = step.warm_up()
        step.close()
    # Otherwise each collection would walk through all modules; the first optimizer imports the
    # compiler.
    gc.freeze()
    seen: dict[str, dict[str, Any]] = {
        way: {"way": way, "losses": losses, "samples_ms": [], "profile": {}, "spans": {}}
        for way in phases
    }
    for number in range(NUM_ROUNDS):
        for way in phases:
            step = SharedStep(WAYS[way], parameters)
            loss = step.warm_up()
            step_ms = torch.tensor(max(step.time(1)), device=rank_device())
            dist.all_reduce(step_ms, dist.ReduceOp.MAX)
            num_steps = min(max(int(1e3 * time_limit_s / step_ms.item()), 2), 10)
            seen[way]["samples_ms"] += step.time(num_steps)
            seen[way] |= {
                "loss": loss,
                "memory": step.memory,
                "waits_ms": step.gather_waits(),
                "backend": dist.get_backend(),
                "case": step.described(),
                "observed": step.observed(),
            }
            if number == 0 and step.device.kind == "cuda" and step.precision == "bf16":
                is_kept = way in TIMELINES
                seen[way]["profile"], seen[way]["spans"] = step.profile(timeline=is_kept)
            step.close()
            yield way, seen[way]
