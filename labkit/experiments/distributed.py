"""Notebook 07: what communication costs, and how little of it has to show in a training step on
several GPUs.

Sections: "ceilings" (of the first GPU), "collectives" (every operation, size and transport),
"steps" (a training step under every way to share it out: data parallel, with a sharded optimizer,
fully sharded, and torch's own).

One launch of the ranks measures all phases of a case. The steps of a case are taken in turn in the
same processes, so that their ratios are of one machine at one time.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from labkit.accounting import OPERATIONS
from labkit.configs import DISTRIBUTED, narrowed
from labkit.device import Device, gpu_links, num_usable_cores
from labkit.experiments.ceilings import CEILINGS, ceiling_cases, ceiling_rates
from labkit.experiments.sections import run_section
from labkit.experiments.shared_step import NUM_WARMUP, WAYS, steps_rank
from labkit.experiments.sweep import Case, Measured, PhaseRun, Skip
from labkit.measure.timing import Timing
from labkit.monitor import Monitor
from labkit.parallel.collectives import time_collective
from labkit.parallel.launch import RankError, launch

__all__ = ["MEASUREMENT_VERSION", "cases", "ceiling_rates", "run_case"]

MEASUREMENT_VERSION = 1

LARGEST_DEVIATION = {"fp32": 1e-3, "bf16": 0.05}
"""How far the loss after the warm-up's steps may be from the naive wrapper's, as a share of how far
that is from the loss of ranks that do not communicate at all. A step beyond it is wrong and has no
time.
"""


def cases(
    profile: str, device_kind: str, *, sizes: Sequence[str] = (), world_sizes: Sequence[int] = ()
) -> list[Case]:
    """Returns the cases of `profile`, narrowed where asked; ValueError for a value that it does not
    have.
    """
    grid = DISTRIBUTED[profile]
    wanted = narrowed(DISTRIBUTED, profile, "world_sizes", world_sizes)
    # Ranks that share a core mostly wait for one another.
    places = torch.cuda.device_count() if device_kind == "cuda" else num_usable_cores()
    here = [n for n in wanted if n <= places] or wanted[:1]
    result = (
        ceiling_cases(tuple(grid.ceilings), grid.case_timeout_s) if device_kind == "cuda" else []
    )
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
            result.append(
                Case("collectives", parameters, phases, grid.case_timeout_s, stop_at_failure=True)
            )
    for size in narrowed(DISTRIBUTED, profile, "sizes", sizes):
        for precision, compile, batch, ways in grid.steps:
            # A negative batch is that of all ranks together.
            batch = batch if batch > 0 else max(1, -batch // here[-1])
            parameters = {
                "size": size,
                "context": grid.context,
                "precision": precision,
                "compile": compile,
            }
            parameters |= {"batch": batch, "world_size": here[-1]}
            wanted = [name for name in WAYS if name in grid.ways[ways]]
            phases = tuple(
                name for name in wanted if device_kind == "cuda" or not name.endswith("copy")
            )
            result.append(Case("steps", parameters, phases, grid.case_timeout_s, grid.time_limit_s))
    return result


def _launched(function: Callable, device: Device, case: Case, *args: Any) -> Iterator[PhaseRun]:
    """Yields the phases of a case, all measured by one launch when the first one is asked for.

    `function` is a generator of (phase, what this rank saw). A phase that every rank finished
    counts even if a rank failed later; the failure is that of the first phase that is missing.
    """
    world_size, transport = case.parameters["world_size"], case.parameters.get("transport", "")
    if device.kind == "cuda" and transport != "gloo" and world_size > torch.cuda.device_count():
        raise Skip(
            f"{world_size} ranks need {world_size} GPUs; there are {torch.cuda.device_count()}"
        )

    @functools.cache
    def everything() -> tuple[dict[str, list[Any]], RankError | None, dict[str, Any]]:
        options = {
            "device": "cpu" if transport == "gloo" else device.kind,
            "timeout_s": case.timeout_s - 30,
        }
        failure = None
        with Monitor(device.kind) as monitor:
            try:
                ranks = launch(function, world_size, case.phases, *args, **options)
            except RankError as error:
                ranks, failure = error.finished, error
        ranks = [dict(items) for items in ranks]  # the last item of each phase
        finished = [phase for phase in case.phases if all(phase in rank for rank in ranks)]
        return (
            {phase: [rank[phase] for rank in ranks] for phase in finished},
            failure,
            monitor.summary,
        )

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
    """Returns what a record observes of the machine: its GPUs, and the library that
    communicates.
    """
    on_gpus = backend == "nccl"
    version = ".".join(map(str, torch.cuda.nccl.version())) if on_gpus else ""
    topology = gpu_links() if on_gpus else "one host"
    return {"backend": backend, "nccl": version, "topology": topology, **more}


# --- collectives ---


def collectives_rank(phases: Sequence[str], transport: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Measures "operation dtype bytes" after another on this rank."""
    torch.set_num_threads(max(1, num_usable_cores() // dist.get_world_size()))
    for phase in phases:
        operation, dtype, num_bytes = phase.split()
        how = "default" if transport in ("nccl", "gloo") else transport
        found = time_collective(operation, int(num_bytes), getattr(torch, dtype), transport=how)
        yield phase, {**found, "backend": dist.get_backend()}


def _collective(case: Case, ranks: list[dict[str, Any]], telemetry: dict[str, Any]) -> Measured:
    found = ranks[0]
    if found["num_wrong"]:
        raise ValueError(f"{found['num_wrong']} wrong elements")
    on_gpus = found["backend"] == "nccl"
    timing = Timing(
        tuple(1e3 * t for t in found["times_s"]), "queued" if on_gpus else "host", 2, "fixed count"
    )
    rates = {name: found[name] for name in ("num_bytes", "num_wrong", "algorithm_gbs", "bus_gbs")}
    rates |= {"launch_median_ms": 1e3 * found["issue_s"]} if on_gpus else {}
    seen = _described(case, found["backend"], operation=found["operation"], dtype=found["dtype"])
    parameters = {"world_size": found["world_size"], "transport": case.parameters["transport"]}
    return Measured(
        {**timing.metrics(), **rates}, parameters, seen, {}, timing.description(), telemetry
    )


def _collectives(device: Device, case: Case, ceilings: dict[str, float]) -> Iterator[PhaseRun]:
    return _launched(collectives_rank, device, case, case.parameters["transport"])


# --- steps ---


def _step(case: Case, ranks: list[dict[str, Any]], telemetry: dict[str, Any]) -> Measured:
    """Returns the record of one way: times and memory of the rank that took most, profile of the
    same rank.
    """
    first = ranks[0]
    alone, naive = first["losses"]["alone"], first["losses"]["naive"]
    expected = alone if first["way"] == "alone" else naive
    deviation = abs(first["loss"] - expected) / abs(alone - naive)
    if not deviation <= LARGEST_DEVIATION[first["case"]["precision"]]:
        raise ValueError(
            f"loss {first['loss']}, {expected} expected, {alone} without communication"
        )
    # The ranks wait for one another, so a step lasts as long as on the slowest.
    slowest = tuple(
        max(of_step) for of_step in zip(*(rank["samples_ms"] for rank in ranks), strict=True)
    )
    timing = Timing(slowest, "window", NUM_WARMUP + 1, "time limit")
    metrics = {name: max(rank["memory"][name] for rank in ranks) for name in first["memory"]}
    metrics |= {"loss": first["loss"], "loss_deviation": deviation}
    if first["profile"]:
        compute = [rank["profile"]["compute_us"] for rank in ranks]
        metrics |= {name: max(rank["profile"][name] for rank in ranks) for name in first["profile"]}
        metrics |= {"imbalance_us": max(compute) - min(compute)}
    samples = {"step_ms": list(slowest)} | (
        {"gather_wait_ms": first["waits_ms"]} if first["waits_ms"] else {}
    )
    origin = min(
        (t for rank in ranks for name, of_rank in rank["spans"].items() for t in of_rank[:1]),
        default=0,
    )
    for number, rank in enumerate(ranks):
        samples |= {
            f"rank {number} {name}": [t - origin for t in x] for name, x in rank["spans"].items()
        }
    parameters = {**first["case"], "world_size": len(ranks)}
    seen = _described(case, first["backend"], **first["observed"])
    return Measured(
        {**timing.metrics(), **metrics}, parameters, seen, samples, timing.description(), telemetry
    )


def _steps(device: Device, case: Case, ceilings: dict[str, float]) -> Iterator[PhaseRun]:
    return _launched(steps_rank, device, case, case.parameters, case.time_limit_s)


run_case = functools.partial(
    run_section, {**CEILINGS, "collectives": _collectives, "steps": _steps}
)
