"""A training step on this rank under every way to share it out: its times, memory and kernels, for
notebook 07.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import pandas as pd
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from labkit import numerics
from labkit.configs import ModelConfig
from labkit.device import Device
from labkit.experiments.split import STEP, split, steps_of, transport
from labkit.experiments.step import Step
from labkit.measure.profiling import capture_with_kineto
from labkit.measure.timing import Timing, captured_once, collector_paused, synchronize
from labkit.models.transformer import Block, language_model_loss
from labkit.parallel import data_parallel
from labkit.parallel.collectives import most_of_ranks
from labkit.parallel.fully_sharded import FullyShardedDataParallel
from labkit.parallel.launch import moment, rank_device
from labkit.parallel.sharded_optimizer import ShardedOptimizer

NUM_WARMUP = 2
NUM_PROFILED = 2
ADAMW = {"lr": 1e-4, "fused": True}

TIMELINES = ("naive", "bucketed 100 MB", "bucketed copy")
"""Ways whose intervals of computing and communicating are kept, for one step of every rank."""

SHORTEST_GAP_NS = 100_000
"""Gaps below this are no gaps in a timeline: they could not be seen."""

NUM_ROUNDS = 2
"""How often the ways of a case are taken in turn."""

RankSeen = Iterator[tuple[str, dict]]
"""What a rank yields: a phase's name and what this rank saw of it."""


def _fully_shard(model: nn.Module, *, compute_dtype: torch.dtype | None) -> nn.Module:
    # takes seconds, as the import below
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=compute_dtype)
    for module in (*model.blocks, model):
        fully_shard(module, mp_policy=policy)
    return model


def _zero_redundancy(parameters: Sequence[nn.Parameter], **options: Any) -> torch.optim.Optimizer:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, **options)


@dataclass(frozen=True)
class Way:
    """How a step is shared out.

    Attributes:
        wrap: makes of a model the one that is trained.
        optimizer: of (parameters, **options of AdamW).
        is_cast_by_wrapper: the wrapper casts to 16 bits, not autocast.
    """

    wrap: Callable[..., nn.Module]
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
    is_cast_by_wrapper: bool = False


BUCKETED = partial(data_parallel.BucketedDataParallel, bucket_size_mb=100)
DDP = partial(DistributedDataParallel, gradient_as_bucket_view=True, broadcast_buffers=False)
FSDP = partial(FullyShardedDataParallel, units=(Block,))

WAYS = {
    "alone": Way(lambda model: model),
    "naive": Way(data_parallel.NaiveDataParallel),
    "flat": Way(data_parallel.FlatDataParallel),
    "overlapped": Way(data_parallel.OverlappedDataParallel),
    **{f"bucketed {mb} MB": Way(partial(BUCKETED, bucket_size_mb=mb)) for mb in (1, 10, 100, 1000)},
    "bucketed 16 blocks": Way(partial(BUCKETED, transport="ctas_16")),
    "bucketed bf16": Way(partial(BUCKETED, sent_as=torch.bfloat16)),
    "bucketed copy": Way(partial(BUCKETED, transport="copy")),
    "ddp": Way(DDP),
    "sharded optimizer": Way(BUCKETED, partial(ShardedOptimizer, optimizer_cls=torch.optim.AdamW)),
    "zero redundancy": Way(DDP, _zero_redundancy),
    "fsdp": Way(FSDP, is_cast_by_wrapper=True),
    "fsdp 16 blocks": Way(partial(FSDP, transport="ctas_16"), is_cast_by_wrapper=True),
    "fsdp copy": Way(partial(FSDP, transport="copy"), is_cast_by_wrapper=True),
    "fully_shard": Way(_fully_shard, is_cast_by_wrapper=True),
}
"""The ways to run a step. "alone": every rank by itself, at the same time, with no communication.
"16 blocks": NCCL with at most so many. "bf16": gradients are sent in half the bytes and added in
fp32. "copy": by copy engines instead of NCCL. "ddp", "zero redundancy" and "fully_shard" are
torch's.
"""


class SharedStep(Step):
    """A step under one way on this rank, on tokens of its own, and what its memory holds.

    `train_once` runs it, or replays its CUDA graph.
    """

    def __init__(self, way: Way, parameters: dict):
        device = Device(rank_device().type, "", "")
        super().__init__(device, {**parameters, "attention": "sdpa"})
        self.way = way
        self.config = self.model.config
        self.tokens, self.targets = own_tokens(self.config, *self.tokens.shape)
        self.num_parameters = sum(parameter.numel() for parameter in self.model.parameters())
        options = {"compute_dtype": self.recipe.autocast} if way.is_cast_by_wrapper else {}
        self.model = way.wrap(self.model, **options)
        self.optimizer = way.optimizer(
            list(self.model.parameters()), **ADAMW, capturable=self.compile == "graph"
        )
        self.memory = {"init_bytes": _allocated()}
        self.train_once = self.train_step

    def autocast(self) -> AbstractContextManager:
        return nullcontext() if self.way.is_cast_by_wrapper else super().autocast()

    def forward(self) -> Tensor:
        with self.autocast():
            return language_model_loss(self.model(self.tokens).float(), self.targets)

    def backward(self, loss: Tensor) -> None:
        loss.backward()
        data_parallel.finish_gradients(self.model)

    def warm_up(self) -> float:
        """Returns the mean loss over the ranks after NUM_WARMUP steps; notes what memory holds on
        the way.
        """

        def part(name: str) -> AbstractContextManager:
            if name == "optimizer":
                self.memory["before_step_bytes"] = _allocated()
            return nullcontext()

        if self.device.kind == "cuda":
            torch.cuda.reset_peak_memory_stats()
        for _ in range(NUM_WARMUP):
            self.run("train_step", part)
        self.memory |= {
            "symmetric_bytes": getattr(self.model, "symmetric_bytes", None),
            "after_step_bytes": _allocated(),
            "peak_bytes": torch.cuda.max_memory_allocated() or None,
        }
        if self.compile == "graph":
            self.optimizer.zero_grad()
            # The graph holds a step's collectives too, and NCCL's own threads may ask for events
            # meanwhile.
            graph = captured_once(self.train_step, error_mode="thread_local")
            self.train_once = graph.replay
            self.train_once()
        loss = self.loss.clone()
        dist.all_reduce(loss)
        return loss.item() / dist.get_world_size()

    def profile(self) -> pd.DataFrame:
        """Returns `split.steps_of` a trace of NUM_PROFILED steps, one before and one after them."""
        host = dist.new_group(backend="gloo")  # ranks meet in it without a kernel

        def steps() -> None:
            # Profilers take their time to start; a rank that waits for another would seem to
            # communicate.
            dist.barrier(host)
            for _ in range(NUM_PROFILED + 2):
                with torch.profiler.record_function(STEP):
                    self.train_once()

        with collector_paused():
            return steps_of(capture_with_kineto(steps, self.device.kind))

    def described(self) -> dict:
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

    def close(self) -> None:
        """Frees what the step holds; what is compiled stays for the next way."""
        self.compile = "none"
        super().close()


def own_tokens(config: ModelConfig, batch: int, context: int) -> Tensor:
    """Returns tokens and targets of this rank's own, (2, batch, context) int64."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    shape = (2, batch, context)
    return torch.randint(config.vocab_size, shape, generator=generator).to(rank_device())


def time_steps(step: Callable[[], Any], num_steps: int) -> list[float]:
    """Returns milliseconds of each of `num_steps` steps, one right after the other."""
    kind = rank_device().type
    dist.barrier()
    synchronize(kind)
    with collector_paused():
        moments = [moment()]
        for _ in range(num_steps):
            step()
            moments.append(moment())
        synchronize(kind)
    if kind != "cuda":
        return [1e3 * (end - begin) for begin, end in pairwise(moments)]
    return [begin.elapsed_time(end) for begin, end in pairwise(moments)]


def slowest(ranks: Sequence[dict]) -> Timing:
    """Returns the times of the slowest rank in each step: the others wait for it."""
    samples_ms = zip(*(rank["samples_ms"] for rank in ranks), strict=True)
    return Timing(tuple(map(max, samples_ms)), "window")


def _allocated() -> int | None:
    return torch.cuda.memory_allocated() or None  # 0 without a GPU


def spans_of(name: str, table: pd.DataFrame) -> dict[str, list[float]]:
    """Returns begins and ends (ms) of the intervals in which a kernel ran, without gaps below
    SHORTEST_GAP_NS.
    """
    rows = table.sort_values("start_ns")
    rows["end_ns"] = rows["end_ns"].cummax()
    is_first = ~(rows["start_ns"] - rows["end_ns"].shift() < SHORTEST_GAP_NS)  # of its interval
    intervals = rows.groupby(is_first.cumsum())
    return {
        f"{name}_begin_ms": (intervals["start_ns"].first() / 1e6).tolist(),
        f"{name}_end_ms": (intervals["end_ns"].last() / 1e6).tolist(),
    }


def steps_rank(phases: Sequence[str], parameters: dict, time_limit_s: float) -> RankSeen:
    """Runs each way's steps in turn, NUM_ROUNDS times, and yields (way, what this rank has seen so
    far) each time.
    """
    losses = {}
    for way in ("alone", "naive"):
        if way == phases[0]:  # gives its own, before any other is yielded
            continue
        step = SharedStep(WAYS[way], parameters)
        losses[way] = step.warm_up()
        step.close()
    seen = {
        way: {"way": way, "losses": losses, "samples_ms": [], "profile": {}, "spans": {}}
        for way in phases
    }
    for number in range(NUM_ROUNDS):
        for way in phases:
            step = SharedStep(WAYS[way], parameters)
            mine = seen[way]
            mine["loss"] = step.warm_up()
            losses.setdefault(way, mine["loss"])
            once_ms = most_of_ranks(time_steps(step.train_once, 1)).item()
            num_steps = min(max(int(1e3 * time_limit_s / once_ms), 2), 10)
            mine["samples_ms"] += time_steps(step.train_once, num_steps)
            if number == 0:
                mine["memory"] = step.memory
                mine["case"] = step.described()
                mine["observed"] = {"num_parameters": step.num_parameters}
                if "alone" in phases:  # which comes first
                    table = step.profile()
                    if way == "alone":
                        alone = table
                    mine["profile"], sent = split(table, alone)
                    mine["observed"] |= transport(sent)
                    if way in TIMELINES:
                        computing = table[table["step"] < NUM_PROFILED].drop(sent.index)
                        spans = spans_of("computing", computing)
                        mine["spans"] = spans | spans_of("communicating", sent)
            step.close()
            yield way, mine
