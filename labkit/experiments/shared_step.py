"""A training step on this rank under every way to share it out: its times, memory and kernels, for
notebook 07.
"""

import functools
import gc
from collections.abc import Callable, Iterator, Sequence
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
from labkit.configs import model_config
from labkit.device import num_usable_cores
from labkit.measure.profiling import busy_ns, capture_with_kineto
from labkit.measure.timing import captured_once, collector_paused, synchronize
from labkit.models.transformer import Block, TransformerLM, language_model_loss
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


def _fully_shard(model: TransformerLM, dtype: torch.dtype | None) -> nn.Module:
    from torch.distributed.fsdp import (
        MixedPrecisionPolicy,
        fully_shard,
    )  # takes seconds, as the one below

    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
    for module in (*model.blocks, model):
        fully_shard(module, mp_policy=policy)
    return model


def _ddp(model: TransformerLM, dtype: torch.dtype | None) -> nn.Module:
    device = rank_device()
    on = [device] if device.type == "cuda" else None
    return DistributedDataParallel(
        model, device_ids=on, gradient_as_bucket_view=True, broadcast_buffers=False
    )


def _ours(
    wrapper: type[nn.Module], **options: Any
) -> Callable[[TransformerLM, torch.dtype | None], nn.Module]:
    return lambda model, dtype: wrapper(model, broadcast_buffers=False, **options)


def _fsdp(**options: Any) -> Callable[[TransformerLM, torch.dtype | None], nn.Module]:
    options |= {"units": (Block,), "broadcast_buffers": False}
    return lambda model, dtype: FullyShardedDataParallel(model, dtype, **options)


ADAMW = {"lr": LEARNING_RATE, "fused": True}


@dataclass(frozen=True)
class Way:
    """How a step is shared out: what wraps (model, compute dtype), what makes the optimizer, what
    casts.
    """

    wrap: Callable[[TransformerLM, torch.dtype | None], nn.Module]
    optimizer: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]
    autocast: bool = True


_adamw = functools.partial(torch.optim.AdamW, **ADAMW)


def _zero_adamw(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, **ADAMW)


_BUCKETED = {
    mb: _ours(data_parallel.BucketedDataParallel, bucket_size_mb=mb) for mb in (1, 10, 100, 1000)
}
WAYS = {
    "alone": Way(lambda model, dtype: model, _adamw),
    "naive": Way(_ours(data_parallel.NaiveDataParallel), _adamw),
    "flat": Way(_ours(data_parallel.FlatDataParallel), _adamw),
    "overlapped": Way(_ours(data_parallel.OverlappedDataParallel), _adamw),
    **{f"bucketed {mb} MB": Way(wrap, _adamw) for mb, wrap in _BUCKETED.items()},
    "bucketed copy": Way(
        _ours(data_parallel.BucketedDataParallel, bucket_size_mb=100, transport="copy"), _adamw
    ),
    "ddp": Way(_ddp, _adamw),
    "sharded optimizer": Way(
        _BUCKETED[100], lambda ps: ShardedOptimizer(ps, torch.optim.AdamW, **ADAMW)
    ),
    "zero redundancy": Way(_ddp, _zero_adamw),
    "fsdp": Way(_fsdp(), _adamw, autocast=False),
    "fsdp copy": Way(_fsdp(transport="copy"), _adamw, autocast=False),
    "fully_shard": Way(_fully_shard, _adamw, autocast=False),
}
"""The ways to run a step. "alone": every rank by itself, at the same time, with no communication.
"copy": by copy engines instead of NCCL. "ddp", "zero redundancy" and "fully_shard" are torch's.
"""


class _Run:
    """A model under one way on this rank: its steps, and what its memory holds."""

    def __init__(self, way: Way, parameters: dict[str, Any]):
        device, self.way = rank_device(), way
        torch.manual_seed(0)
        config, shape = (
            model_config(parameters["size"]),
            (parameters["batch"], parameters["context"]),
        )
        model = TransformerLM(config, max_context=shape[1], attention="sdpa", device=device)
        generator = torch.Generator().manual_seed(dist.get_rank())
        tokens = torch.randint(config.vocab_size, (2, *shape), generator=generator).to(device)
        self.tokens, self.targets = tokens
        numerics.set_precision(parameters["precision"])
        self.dtype = torch.bfloat16 if parameters["precision"] == "bf16" else None
        self.config, self.compile = config, parameters["compile"]
        if self.compile != "none":
            for block in model.blocks:
                block.compile()
        self.model = way.wrap(model, self.dtype)
        self.optimizer = way.optimizer(list(self.model.parameters()))
        for group in self.optimizer.param_groups:
            group["capturable"] = self.compile == "graph"
        self.losses: list[torch.Tensor] = []
        self.memory = {"init_bytes": _allocated()}
        self.graph: torch.cuda.CUDAGraph | None = None

    def step(self, *, before: Callable[[], None] | None = None) -> None:
        """Runs one training step; `before` is called between its backward pass and the
        optimizer.
        """
        if self.graph is not None:
            self.graph.replay()
            return
        self.optimizer.zero_grad()
        with torch.autocast(
            rank_device().type, torch.bfloat16, enabled=self.way.autocast and self.dtype is not None
        ):
            loss = language_model_loss(self.model(self.tokens).float(), self.targets)
        loss.backward()
        if finish := getattr(self.model, "finish_gradient_synchronization", None):
            finish()
        if before:
            before()
        self.optimizer.step()
        self.losses.append(loss.detach())

    def warm_up(self) -> float:
        """Returns the mean loss over the ranks after NUM_WARMUP steps; notes what memory holds on
        the way.
        """
        if rank_device().type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        for _ in range(NUM_WARMUP):
            self.step(before=lambda: self.memory.update(before_step_bytes=_allocated()))
        self.memory["symmetric_bytes"] = getattr(self.model, "symmetric_bytes", None)
        peak = torch.cuda.max_memory_allocated() or None
        self.memory |= {"after_step_bytes": _allocated(), "peak_bytes": peak} | self._components()
        self.memory = {name: value for name, value in self.memory.items() if value is not None}
        if self.compile == "graph":
            self.optimizer.zero_grad()
            # The graph holds a step's collectives too, and NCCL's own threads may ask for events
            # meanwhile.
            self.graph = captured_once(self.step, error_mode="thread_local")
            self.step()
        loss = self.losses[-1].clone()
        dist.all_reduce(loss)
        return loss.item() / dist.get_world_size()

    def _components(self) -> dict[str, int]:
        local = [getattr(p, "_local_tensor", p) for p in self.model.parameters()]
        gradients = [
            getattr(p.grad, "_local_tensor", p.grad)
            for p in self.model.parameters()
            if p.grad is not None
        ]
        inner = getattr(
            self.optimizer, "optim", self.optimizer
        )  # ZeroRedundancyOptimizer keeps its own inside
        state = [
            getattr(x, "_local_tensor", x)
            for s in inner.state.values()
            for x in s.values()
            if torch.is_tensor(x)
        ]
        named = {"parameter_bytes": local, "gradient_bytes": gradients, "state_bytes": state}
        return {name: sum(x.nbytes for x in tensors) for name, tensors in named.items()}

    def time(self, num_steps: int) -> list[float]:
        """Returns milliseconds of each of `num_steps` steps, one right after the other."""
        dist.barrier()
        synchronize(rank_device().type)
        with collector_paused():
            moments = [moment()]
            for _ in range(num_steps):
                self.step()
                moments.append(moment())
            synchronize(rank_device().type)
        if rank_device().type != "cuda":
            return [1e3 * (end - begin) for begin, end in pairwise(moments)]
        return [begin.elapsed_time(end) for begin, end in pairwise(moments)]

    def gather_waits(self) -> list[float]:
        """Returns the milliseconds that each gather of a fully sharded step made the current stream
        wait.
        """
        if not isinstance(self.model, FullyShardedDataParallel) or rank_device().type != "cuda":
            return []
        self.model.waits = []
        with collector_paused():
            self.step()
            torch.cuda.synchronize()
        waits, self.model.waits = self.model.waits, None
        return [begin.elapsed_time(end) for _, begin, end in waits]

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
                    self.step()

        with collector_paused():
            table = capture_with_kineto(steps, "cuda").operations
        by_name, is_copy = table["name"].str.contains(COMMUNICATION), table["kind"] == "memcpy"
        computing_stream = table[~by_name].groupby("stream")["duration_ns"].sum().idxmax()
        is_communication = by_name | (is_copy & (table["stream"] != computing_stream))
        computing, communicating = table[~is_communication], table[is_communication]
        times = {
            "compute_us": computing["duration_ns"].sum(),
            "communication_us": busy_ns(communicating),
            "exposed_us": busy_ns(table) - busy_ns(computing),
        }
        spans = {}
        if timeline:
            for name, rows in (("computing", computing), ("communicating", communicating)):
                spans |= _merged(name, rows)
        return {name: float(value) / 1e3 / NUM_PROFILED for name, value in times.items()}, spans

    def described(self) -> dict[str, Any]:
        """Returns case and observations as read back from the live objects."""
        dtype = "bf16" if self.dtype is not None else numerics.live_precision(torch.float32)
        batch, context = self.tokens.shape
        case = {
            "size": self.config.name,
            "context": context,
            "precision": dtype,
            "compile": self.compile,
        }
        shape = next(self.model.parameters()).dtype
        seen = {"wrapper": type(self.model).__name__, "optimizer": type(self.optimizer).__name__}
        seen |= {
            "parameter_dtype": str(shape).removeprefix("torch."),
            "num_parameters": num_parameters(self.config),
        }
        return {"case": {**case, "batch": batch}, "observed": seen}

    def close(self) -> None:
        del self.model, self.optimizer, self.losses, self.graph
        gc.collect()
        if rank_device().type == "cuda":
            torch.cuda.empty_cache()


@functools.cache
def _host_group() -> dist.ProcessGroup:
    """Returns the group of all ranks in which they meet without a kernel."""
    return dist.new_group(backend="gloo")


def _allocated() -> int | None:
    return torch.cuda.memory_allocated() or None  # 0 without a GPU


def _merged(name: str, table: pd.DataFrame) -> dict[str, list[float]]:
    """Returns begins and ends (ms) of the intervals in which a kernel ran, without gaps below
    SHORTEST_GAP_NS.
    """
    begins, ends = [], []
    for begin, end in table.sort_values("start_ns")[["start_ns", "end_ns"]].itertuples(index=False):
        if ends and begin - ends[-1] < SHORTEST_GAP_NS:
            ends[-1] = max(ends[-1], end)
        else:
            begins.append(begin)
            ends.append(end)
    return {
        f"{name}_begin_ms": [t / 1e6 for t in begins],
        f"{name}_end_ms": [t / 1e6 for t in ends],
    }


def steps_rank(
    phases: Sequence[str], parameters: dict[str, Any], time_limit_s: float
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Runs each way's steps in turn, NUM_ROUNDS times, and yields (way, what this rank has seen so
    far) each time.
    """
    torch.set_num_threads(max(1, num_usable_cores() // dist.get_world_size()))
    found: dict[str, dict[str, Any]] = {
        way: {"way": way, "samples_ms": [], "profile": {}, "spans": {}} for way in phases
    }
    losses = {}
    for way in ("alone", "naive"):
        run = _Run(WAYS[way], parameters)
        losses[way] = run.warm_up()
        run.close()
    # otherwise each collection would walk through all modules; the first optimizer imports the
    # compiler
    gc.freeze()
    for number in range(NUM_ROUNDS):
        for way in phases:
            run = _Run(WAYS[way], parameters)
            loss = run.warm_up()
            step_ms = torch.tensor(max(run.time(1)), device=rank_device())
            dist.all_reduce(step_ms, dist.ReduceOp.MAX)
            seen = found[way]
            seen["samples_ms"] += run.time(
                min(max(int(1e3 * time_limit_s / step_ms.item()), 2), 10)
            )
            seen |= {"loss": loss, "losses": losses, "memory": run.memory}
            seen |= {
                "waits_ms": run.gather_waits(),
                "backend": dist.get_backend(),
                **run.described(),
            }
            if number == 0 and rank_device().type == "cuda" and parameters["precision"] == "bf16":
                seen["profile"], seen["spans"] = run.profile(timeline=way in TIMELINES)
            run.close()
            yield way, seen
