"""Notebook 07: what communication costs, and how little of it has to show in a training step on several GPUs.

Sections: "ceilings" (of the first GPU), "collectives" (every operation, size and transport), "steps" (a training step
under every way to share it out: data parallel, with a sharded optimizer, fully sharded, and torch's own).

One launch of the ranks measures all phases of a case. The steps of a case are taken in turn in the same processes, so
that their ratios are of one machine at one time.
"""

import functools
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pandas as pd
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from labkit import hardware, numerics
from labkit.accounting import num_parameters
from labkit.communication import OPERATIONS
from labkit.configs import DISTRIBUTED, model_config, narrowed
from labkit.experiments.ceilings import CEILINGS, ceiling_cases, ceiling_name, ceiling_value
from labkit.experiments.sections import run_section
from labkit.experiments.sweep import Case, Measured, PhaseRun, Skip
from labkit.measure.profiling import busy_ns, capture_with_kineto
from labkit.measure.timing import Timing, collector_paused, synchronize
from labkit.models.transformer import Block, TransformerLM, language_model_loss
from labkit.parallel import data_parallel
from labkit.parallel.collectives import time_collective
from labkit.parallel.fully_sharded import FullyShardedDataParallel
from labkit.parallel.launch import RankError, launch, rank_device
from labkit.parallel.sharded_optimizer import ShardedOptimizer

__all__ = ["MEASUREMENT_VERSION", "cases", "ceiling_name", "ceiling_value", "run_case"]

MEASUREMENT_VERSION = 1

NUM_WARMUP, NUM_PROFILED = 2, 2
LEARNING_RATE = 1e-4

LARGEST_DEVIATION = {"fp32": 1e-3, "bf16": 0.05}
"""How far the loss after the warm-up's steps may be from the naive wrapper's, as a share of how far that is from the
loss of ranks that do not communicate at all. A step beyond it is wrong and has no time."""

TIMELINES = ("naive", "bucketed 100 MB", "bucketed copy")
"""Ways whose intervals of computing and communicating are kept, for one step of every rank."""

SHORTEST_GAP_NS = 100_000
"""Gaps below this are no gaps in a timeline: they could not be seen."""

COMMUNICATION = r"nccl|barrier"
"""In the names of kernels that communicate; copies do where they are not on the stream that computes."""

NUM_ROUNDS = 2
"""How often the ways of a case are taken in turn."""


def cases(profile: str, device_kind: str, *, sizes: Sequence[str] = (), world_sizes: Sequence[int] = ()) -> list[Case]:
    """Returns the cases of `profile`, narrowed where asked; ValueError for a value that it does not have."""
    grid = DISTRIBUTED[profile]
    wanted = narrowed(DISTRIBUTED, profile, "world_sizes", world_sizes)
    here = [n for n in wanted if device_kind != "cuda" or n <= torch.cuda.device_count()] or wanted[:1]
    result = ceiling_cases(tuple(grid.ceilings), grid.case_timeout_s) if device_kind == "cuda" else []
    for world_size in here:
        for transport in grid.transports if device_kind == "cuda" else ("gloo",):
            operations = {"copy": ("all_gather", "reduce_scatter"), "zero_cta": ("all_gather",)}
            phases = tuple(
                f"{operation} {dtype} {num_bytes}"
                for operation in operations.get(transport, OPERATIONS)
                for dtype in (grid.dtypes if transport in ("nccl", "gloo") else grid.dtypes[:1])
                for num_bytes in grid.collective_bytes
                if transport != "gloo" or num_bytes <= grid.most_gloo_bytes
            )
            parameters = {"world_size": world_size, "transport": transport}
            # A transport that fails here would fail for every phase, each in a launch of its own.
            result.append(Case("collectives", parameters, phases, grid.case_timeout_s, stop_at_failure=True))
    for size in narrowed(DISTRIBUTED, profile, "sizes", sizes):
        for precision, compile, batch, ways in grid.steps:
            # A negative batch is that of all ranks together.
            batch = batch if batch > 0 else max(1, -batch // here[-1])
            parameters = {"size": size, "context": grid.context, "precision": precision, "compile": compile}
            parameters |= {"batch": batch, "world_size": here[-1]}
            phases = tuple(name for name in WAYS if name in getattr(grid, ways) and _runs(name, device_kind))
            result.append(Case("steps", parameters, phases, grid.case_timeout_s, grid.time_limit_s))
    return result


def _runs(way: str, device_kind: str) -> bool:
    return device_kind == "cuda" or way not in ("bucketed copy", "fsdp copy")


def _launched(function: Callable, device: hardware.Device, case: Case, *args: Any) -> Iterator[PhaseRun]:
    """Yields the phases of a case, all measured by one launch when the first one is asked for.

    `function` is a generator of (phase, what this rank saw). A phase that every rank finished counts even if a rank
    failed later; the failure is that of the first phase that is missing.
    """
    world_size, transport = case.parameters["world_size"], case.parameters.get("transport", "")
    if device.kind == "cuda" and transport != "gloo" and world_size > torch.cuda.device_count():
        raise Skip(f"{world_size} ranks need {world_size} GPUs; there are {torch.cuda.device_count()}")

    @functools.cache
    def everything() -> tuple[dict[str, list[Any]], RankError | None, dict[str, Any]]:
        options = {"device": "cpu" if transport == "gloo" else device.kind, "timeout_s": case.timeout_s - 30}
        failure = None
        with hardware.Monitor(device.kind) as monitor:
            try:
                ranks = launch(function, world_size, case.phases, *args, **options)
            except RankError as error:
                ranks, failure = error.finished, error
        ranks = [dict(items) for items in ranks]  # the last item of each phase
        finished = [phase for phase in case.phases if all(phase in rank for rank in ranks)]
        return {phase: [rank[phase] for rank in ranks] for phase in finished}, failure, monitor.summary

    def measure(phase: str, make: Callable[..., Measured]) -> Measured:
        found, failure, telemetry = everything()
        if phase in found:
            return make(case, found[phase], telemetry)
        if failure is not None and "OutOfMemoryError" in failure.summary:
            raise torch.OutOfMemoryError(failure.summary)
        raise RuntimeError(failure.summary if failure else f"no rank measured {phase}")

    make = _collective if case.section == "collectives" else _step
    for phase in case.phases:
        yield phase, functools.partial(measure, phase, make)


def _described(case: Case, backend: str, **more: Any) -> dict[str, Any]:
    """Returns what a record observes of the machine: its GPUs, and the library that communicates."""
    on_gpus = backend == "nccl"
    version = ".".join(map(str, torch.cuda.nccl.version())) if on_gpus else ""
    topology = hardware.gpu_links() if on_gpus else "one host"
    return {"backend": backend, "nccl": version, "topology": topology, **more}


# --- collectives ---


def collectives_rank(phases: Sequence[str], transport: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Measures "operation dtype bytes" after another on this rank."""
    torch.set_num_threads(max(1, hardware.num_usable_cores() // dist.get_world_size()))
    for phase in phases:
        operation, dtype, num_bytes = phase.split()
        how = "default" if transport in ("nccl", "gloo") else transport
        found = time_collective(operation, int(num_bytes), getattr(torch, dtype), transport=how)
        yield phase, {**found, "backend": dist.get_backend()}


def _collective(case: Case, ranks: list[dict[str, Any]], telemetry: dict[str, Any]) -> Measured:
    found = ranks[0]
    if found["num_wrong"]:
        raise ValueError(f"{found['num_wrong']} wrong elements")
    timing = Timing(tuple(1e3 * t for t in found["times_s"]), "window", 2, "fixed count")
    rates = {name: found[name] for name in ("num_bytes", "num_wrong", "algorithm_gbs", "bus_gbs")}
    seen = _described(case, found["backend"], operation=found["operation"], dtype=found["dtype"])
    parameters = {"world_size": found["world_size"], "transport": case.parameters["transport"]}
    return Measured({**timing.metrics(), **rates}, parameters, seen, {}, timing.description(), telemetry)


def _collectives(device: hardware.Device, case: Case, ceilings: dict[str, float]) -> Iterator[PhaseRun]:
    return _launched(collectives_rank, device, case, case.parameters["transport"])


# --- steps ---


def _fully_shard(model: TransformerLM, dtype: torch.dtype | None) -> nn.Module:
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
    for module in (*model.blocks, model):
        fully_shard(module, mp_policy=policy)
    return model


def _ddp(model: TransformerLM, dtype: torch.dtype | None) -> nn.Module:
    device = rank_device()
    on = [device] if device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=on, gradient_as_bucket_view=True, broadcast_buffers=False)


def _ours(wrapper: type[nn.Module], **options: Any) -> Callable[[TransformerLM, torch.dtype | None], nn.Module]:
    return lambda model, dtype: wrapper(model, **options)


def _fsdp(**options: Any) -> Callable[[TransformerLM, torch.dtype | None], nn.Module]:
    return lambda model, dtype: FullyShardedDataParallel(model, dtype, units=(Block,), **options)


ADAMW = {"lr": LEARNING_RATE, "fused": True}


@dataclass(frozen=True)
class Way:
    """How a step is shared out: what wraps (model, compute dtype), what makes the optimizer, what casts."""

    wrap: Callable[[TransformerLM, torch.dtype | None], nn.Module]
    optimizer: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]
    autocast: bool = True


def _adamw(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, **ADAMW)


def _sharded_adamw(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return ShardedOptimizer(parameters, torch.optim.AdamW, **ADAMW)


def _zero_adamw(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, **ADAMW)


_BUCKETED = {mb: _ours(data_parallel.BucketedDataParallel, bucket_size_mb=mb) for mb in (1, 10, 100, 1000)}
WAYS = {
    "alone": Way(lambda model, dtype: model, _adamw),
    "naive": Way(_ours(data_parallel.NaiveDataParallel), _adamw),
    "flat": Way(_ours(data_parallel.FlatDataParallel), _adamw),
    "overlapped": Way(_ours(data_parallel.OverlappedDataParallel), _adamw),
    **{f"bucketed {mb} MB": Way(wrap, _adamw) for mb, wrap in _BUCKETED.items()},
    "bucketed copy": Way(_ours(data_parallel.BucketedDataParallel, bucket_size_mb=100, transport="copy"), _adamw),
    "ddp": Way(_ddp, _adamw),
    "sharded optimizer": Way(_BUCKETED[100], _sharded_adamw),
    "zero redundancy": Way(_ddp, _zero_adamw),
    "fsdp": Way(_fsdp(), _adamw, autocast=False),
    "fsdp copy": Way(_fsdp(transport="copy"), _adamw, autocast=False),
    "fully_shard": Way(_fully_shard, _adamw, autocast=False),
}
"""The ways to run a step. "alone": every rank by itself, at the same time, with no communication. "copy": by copy
engines instead of NCCL. "ddp", "zero redundancy" and "fully_shard" are torch's."""


class _Run:
    """A model under one way on this rank: its steps, and what its memory holds."""

    def __init__(self, way: Way, parameters: dict[str, Any]):
        device, self.way = rank_device(), way
        torch.manual_seed(0)
        config, shape = model_config(parameters["size"]), (parameters["batch"], parameters["context"])
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
        """Runs one training step; `before` is called between its backward pass and the optimizer."""
        if self.graph is not None:
            self.graph.replay()
            return
        self.optimizer.zero_grad()
        with torch.autocast(rank_device().type, torch.bfloat16, enabled=self.way.autocast and self.dtype is not None):
            loss = language_model_loss(self.model(self.tokens).float(), self.targets)
        loss.backward()
        if finish := getattr(self.model, "finish_gradient_synchronization", None):
            finish()
        if before:
            before()
        self.optimizer.step()
        self.losses.append(loss.detach())

    def warm_up(self) -> float:
        """Returns the mean loss over the ranks after NUM_WARMUP steps; notes what memory holds on the way."""
        if rank_device().type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        for _ in range(NUM_WARMUP):
            self.step(before=lambda: self.memory.update(before_step_bytes=_allocated()))
        self.memory["symmetric_bytes"] = getattr(self.model, "symmetric_bytes", None)
        self.memory |= {"after_step_bytes": _allocated(), "peak_bytes": _peak()} | self._components()
        self.memory = {name: value for name, value in self.memory.items() if value is not None}
        if self.compile == "graph":
            self._capture()
            self.step()
        loss = self.losses[-1].clone()
        dist.all_reduce(loss)
        return loss.item() / dist.get_world_size()

    def _capture(self) -> None:
        """Makes a CUDA graph of a whole step, collectives and optimizer included, that every later step replays."""
        self.optimizer.zero_grad()
        gc.collect()
        torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        # NCCL's own threads may ask for events meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self.step()
        self.graph = graph

    def _components(self) -> dict[str, int]:
        local = [getattr(p, "_local_tensor", p) for p in self.model.parameters()]
        gradients = [getattr(p.grad, "_local_tensor", p.grad) for p in self.model.parameters() if p.grad is not None]
        inner = getattr(self.optimizer, "optim", self.optimizer)  # ZeroRedundancyOptimizer keeps its own inside
        state = [getattr(x, "_local_tensor", x) for s in inner.state.values() for x in s.values() if torch.is_tensor(x)]
        named = {"parameter_bytes": local, "gradient_bytes": gradients, "state_bytes": state}
        return {name: sum(x.nbytes for x in tensors) for name, tensors in named.items()}

    def time(self, num_steps: int) -> list[float]:
        """Returns milliseconds of each of `num_steps` steps, one right after the other."""
        dist.barrier()
        synchronize(rank_device().type)
        with collector_paused():
            moments = [_moment()]
            for _ in range(num_steps):
                self.step()
                moments.append(_moment())
            synchronize(rank_device().type)
        if rank_device().type != "cuda":
            return [1e3 * (end - begin) for begin, end in pairwise(moments)]
        return [begin.elapsed_time(end) for begin, end in pairwise(moments)]

    def gather_waits(self) -> list[float]:
        """Returns the milliseconds that each gather of a fully sharded step made the current stream wait."""
        if not isinstance(self.model, FullyShardedDataParallel) or rank_device().type != "cuda":
            return []
        self.model.waits = []
        with collector_paused():
            self.step()
            torch.cuda.synchronize()
        waits, self.model.waits = self.model.waits, None
        return [begin.elapsed_time(end) for _, begin, end in waits]

    def profile(self, *, timeline: bool) -> tuple[dict[str, float], dict[str, list[float]]]:
        """Returns (µs a step, timeline in ms) of this rank's kernels and copies, from torch.profiler."""

        def steps() -> None:
            for _ in range(NUM_PROFILED):
                with torch.profiler.record_function("step"):
                    self.step()

        dist.barrier()
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
        case = {"size": self.config.name, "context": context, "precision": dtype, "compile": self.compile}
        shape = next(self.model.parameters()).dtype
        seen = {"wrapper": type(self.model).__name__, "optimizer": type(self.optimizer).__name__}
        seen |= {"parameter_dtype": str(shape).removeprefix("torch."), "num_parameters": num_parameters(self.config)}
        return {"case": {**case, "batch": batch}, "observed": seen}

    def close(self) -> None:
        del self.model, self.optimizer, self.losses, self.graph
        gc.collect()
        if rank_device().type == "cuda":
            torch.cuda.empty_cache()


def _allocated() -> int | None:
    return torch.cuda.memory_allocated() if rank_device().type == "cuda" else None


def _peak() -> int | None:
    return torch.cuda.max_memory_allocated() if rank_device().type == "cuda" else None


def _moment() -> Any:
    if rank_device().type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _merged(name: str, table: pd.DataFrame) -> dict[str, list[float]]:
    """Returns begins and ends (ms) of the intervals in which a kernel ran, without gaps below SHORTEST_GAP_NS."""
    begins, ends = [], []
    for begin, end in table.sort_values("start_ns")[["start_ns", "end_ns"]].itertuples(index=False):
        if ends and begin - ends[-1] < SHORTEST_GAP_NS:
            ends[-1] = max(ends[-1], end)
        else:
            begins.append(begin)
            ends.append(end)
    return {f"{name}_begin_ms": [t / 1e6 for t in begins], f"{name}_end_ms": [t / 1e6 for t in ends]}


def steps_rank(phases: Sequence[str], parameters: dict[str, Any], time_limit_s: float):
    """Runs each way's steps in turn, NUM_ROUNDS times, and yields (way, what this rank has seen so far) each time."""
    torch.set_num_threads(max(1, hardware.num_usable_cores() // dist.get_world_size()))
    found: dict[str, dict[str, Any]] = {
        way: {"way": way, "samples_ms": [], "profile": {}, "spans": {}} for way in phases
    }
    losses = {}
    for way in ("alone", "naive"):
        run = _Run(WAYS[way], parameters)
        losses[way] = run.warm_up()
        run.close()
    for number in range(NUM_ROUNDS):
        for way in phases:
            run = _Run(WAYS[way], parameters)
            loss = run.warm_up()
            step_ms = torch.tensor(max(run.time(1)), device=rank_device())
            dist.all_reduce(step_ms, dist.ReduceOp.MAX)
            seen = found[way]
            seen["samples_ms"] += run.time(min(max(int(1e3 * time_limit_s / step_ms.item()), 2), 10))
            seen |= {"loss": loss, "losses": losses, "memory": run.memory}
            seen |= {"waits_ms": run.gather_waits(), "backend": dist.get_backend(), **run.described()}
            if number == 0 and rank_device().type == "cuda" and parameters["precision"] == "bf16":
                seen["profile"], seen["spans"] = run.profile(timeline=way in TIMELINES)
            run.close()
            yield way, seen


def _step(case: Case, ranks: list[dict[str, Any]], telemetry: dict[str, Any]) -> Measured:
    """Returns the record of one way: times and memory of the rank that took most, profile of the same rank."""
    first = ranks[0]
    alone, naive = first["losses"]["alone"], first["losses"]["naive"]
    expected = alone if first["way"] == "alone" else naive
    deviation = abs(first["loss"] - expected) / abs(alone - naive)
    if not deviation <= LARGEST_DEVIATION[first["case"]["precision"]]:
        raise ValueError(f"loss {first['loss']}, {expected} expected, {alone} without communication")
    # The ranks wait for one another, so a step lasts as long as on the slowest.
    slowest = tuple(max(of_step) for of_step in zip(*(rank["samples_ms"] for rank in ranks), strict=True))
    timing = Timing(slowest, "window", NUM_WARMUP + 1, "time limit")
    metrics = {name: max(rank["memory"][name] for rank in ranks) for name in first["memory"]}
    metrics |= {"loss": first["loss"], "loss_deviation": deviation}
    if first["profile"]:
        compute = [rank["profile"]["compute_us"] for rank in ranks]
        metrics |= {name: max(rank["profile"][name] for rank in ranks) for name in first["profile"]}
        metrics |= {"imbalance_us": max(compute) - min(compute)}
    samples = {"step_ms": list(slowest)} | ({"gather_wait_ms": first["waits_ms"]} if first["waits_ms"] else {})
    origin = min((t for rank in ranks for name, of_rank in rank["spans"].items() for t in of_rank[:1]), default=0)
    for number, rank in enumerate(ranks):
        samples |= {f"rank {number} {name}": [t - origin for t in x] for name, x in rank["spans"].items()}
    parameters = {**first["case"], "world_size": len(ranks)}
    seen = _described(case, first["backend"], **first["observed"])
    return Measured({**timing.metrics(), **metrics}, parameters, seen, samples, timing.description(), telemetry)


def _steps(device: hardware.Device, case: Case, ceilings: dict[str, float]) -> Iterator[PhaseRun]:
    return _launched(steps_rank, device, case, case.parameters, case.time_limit_s)


run_case = functools.partial(run_section, {**CEILINGS, "collectives": _collectives, "steps": _steps})
