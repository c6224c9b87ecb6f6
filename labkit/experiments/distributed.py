"""Notebook 07: what communication costs, and how little of it has to show in a training step on
several GPUs.

Sections: "ceilings" (of the first GPU), "collectives" (every operation, size and transport),
"steps" (a training step under every way to share it out: data parallel, with a sharded optimizer,
fully sharded, and torch's own), "8b" (see `step_8b`; seven minutes, only where asked for).

One launch of the ranks measures all phases of a case. The steps of a case are taken in turn in the
same processes, so that their ratios are of one machine at one time.
"""

import functools
import itertools
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from labkit.accounting import OPERATIONS
from labkit.configs import GRIDS
from labkit.device import Device, gpu_links, num_gpus, num_nodes, num_usable_cores
from labkit.experiments import step_8b
from labkit.experiments.sections import Plan, run_section
from labkit.experiments.shared_step import RankSeen, slowest, steps_rank
from labkit.experiments.sweep import Case, Measured, PhaseRuns, Skip
from labkit.measure.timing import Timing
from labkit.monitor import Monitor
from labkit.parallel.collectives import OPERATIONS_OF, time_collective
from labkit.parallel.launch import RankError, launch

MEASUREMENT_VERSION = 1

DEFAULTS = ("nccl", "gloo")
"""Transports that are a backend as it comes, measured in all dtypes."""

RANKS_OF = {"weak": slice(-1), "strong": slice(None)}
"""Of ways by name, which numbers of ranks they are for; all others are for the most."""

LARGEST_DEVIATION = {"fp32": 1e-3, "bf16": 0.05}
"""How far the loss after the warm-up's steps may be from the naive wrapper's, as a share of how far
that is from the loss of ranks that do not communicate at all. A step beyond it is wrong and has no
time.
"""


def cases(
    profile: str,
    device_kind: str,
    *,
    world_sizes: Sequence[int] = (),
    workload: Sequence[str] = (),
) -> list[Case]:
    """Returns the cases of `profile` on these numbers of ranks; "8b" only where `workload` names
    it, and of the chapter its "collectives" alone where that is named.
    """
    grid = GRIDS["07_distributed"][profile]
    is_cuda = device_kind == "cuda"
    # On the only GPU of a machine every other case is skipped: nothing there needs a ceiling. A
    # machine without GPUs lists the cases of another.
    is_shared = is_cuda and num_gpus() != 1
    plan = Plan(grid, grid.ceilings if is_shared else ())
    if "8b" in workload:
        plan.add(
            "8b",
            {"size": "8b", "context": 32_768, "precision": "bf16", "world_size": 2},
            *step_8b.WAYS,
            timeout_s=grid.board_timeout_s,
        )
    is_whole = not workload or "chapter" in workload
    if not is_whole and "collectives" not in workload:
        return plan
    # Ranks that share a core mostly wait for one another.
    nodes = num_nodes()
    num_places = num_gpus() if is_cuda else nodes * num_usable_cores()
    fitting = [n for n in grid.world_sizes if n <= num_places and n % nodes == 0]
    here = sorted(world_sizes or fitting) or grid.world_sizes[:1]
    for world_size, transport in itertools.product(here, grid.transports if is_cuda else ["gloo"]):
        phases = [
            f"{operation} {dtype} {num_bytes}"
            for operation in OPERATIONS_OF.get(transport, OPERATIONS)
            for dtype in (grid.dtypes if transport in DEFAULTS else grid.dtypes[:1])
            for num_bytes in grid.collective_bytes
            # Between GPUs gloo is only a rival.
            if not is_cuda or transport != "gloo" or num_bytes <= grid.most_gloo_bytes
        ]
        plan.add(
            "collectives",
            {"world_size": world_size, "transport": transport},
            *phases,
            # A transport that fails here would fail for every phase, each in a launch of its own.
            stop_at_failure=True,
        )
    if not is_whole:
        return plan
    for size, (precision, compile, batch, name) in itertools.product(grid.sizes, grid.steps):
        # Without GPUs there are no copy engines, and no thread blocks.
        phases = [way for way in grid.ways[name] if is_cuda or not way.endswith(("copy", "blocks"))]
        for world_size in here[RANKS_OF.get(name, slice(-1, None))]:
            plan.add(
                "steps",
                {
                    "size": size,
                    "context": grid.context,
                    "precision": precision,
                    "compile": compile,
                    # A negative batch is that of all ranks together.
                    "batch": batch if batch > 0 else max(1, -batch // world_size),
                    "world_size": world_size,
                },
                *phases,
            )
    return plan


Seen = list[dict]
"""What each rank saw of a phase."""


def check_gpus(world_size: int) -> str:
    """Returns why a GPU does not reach another's memory, as copies must, "" where all do.

    Raises Skip where there is no GPU of one kind for each rank, or no NCCL.
    """
    if world_size > num_gpus():
        raise Skip(f"{world_size} ranks need {world_size} GPUs; there are {num_gpus()}")
    nodes = num_nodes()
    world_size //= nodes
    if not dist.is_nccl_available():
        raise Skip("this torch is built without NCCL; accepted on GPUs: one with it")
    names = sorted({torch.cuda.get_device_name(number) for number in range(world_size)})
    if len(names) > 1:
        raise Skip(
            f"ranks on {' and '.join(names)}; accepted: GPUs of one kind, see CUDA_VISIBLE_DEVICES"
        )
    for gpu, other in itertools.permutations(range(world_size), 2):
        if not torch.cuda.can_device_access_peer(gpu, other):
            return f"GPU {gpu} cannot access the memory of GPU {other}, as copies must"
    return "" if nodes == 1 else "copies reach no other node's memory"


def run_ranks(
    function: Callable, make: Callable[[Case, Seen], Measured], device: Device, case: Case, *args
) -> PhaseRuns:
    """Yields the phases of a case, all measured by one launch.

    A phase that every rank finished counts even if a rank failed later; the failure is that of the
    phases that are missing.

    Args:
        function: generator of (phase, what this rank saw).
        make: gives the measurement of a phase, without telemetry.
    """
    world_size = case.parameters["world_size"]
    transport = case.parameters.get("transport")
    kind = "cpu" if transport == "gloo" else device.kind
    unlinked = check_gpus(world_size) if kind == "cuda" else ""
    phases = case.phases
    if unlinked:
        phases = [
            name for name in phases if transport not in OPERATIONS_OF and not name.endswith("copy")
        ]

    options = {"device": kind, "timeout_s": case.timeout_s - 30}
    failure = ""
    with Monitor(device.kind) as monitor:
        try:
            ranks = launch(function, world_size, phases, *args, **options) if phases else []
        except RankError as error:
            ranks = error.finished
            failure = error.summary
            if "OutOfMemoryError" not in failure:
                print(error, file=sys.stderr)  # with the rank's traceback
    seen = [dict(items) for items in ranks]  # of each rank, by phase

    def measure(phase: str) -> Measured:
        if phase not in phases:
            raise Skip(unlinked)
        if all(phase in rank for rank in seen):
            measured = make(case, [rank[phase] for rank in seen])
            if kind == "cuda":
                nccl = ".".join(map(str, torch.cuda.nccl.version()))
                measured.observed.update(nccl=nccl, topology=gpu_links())
            return replace(measured, telemetry=monitor.summary)
        if "OutOfMemoryError" in failure:
            raise torch.OutOfMemoryError(failure)
        kind_of_error = TimeoutError if "Timeout (" in failure else RuntimeError
        raise kind_of_error(failure)

    for phase in case.phases:
        yield phase, functools.partial(measure, phase)


# --- collectives ---


def collectives_rank(phases: Sequence[str], transport: str) -> RankSeen:
    """Measures "operation dtype bytes" after another on this rank."""
    how = "default" if transport in DEFAULTS else transport
    for phase in phases:
        operation, dtype, num_bytes = phase.split()
        found = time_collective(operation, int(num_bytes), getattr(torch, dtype), transport=how)
        yield phase, found


def _collective(case: Case, ranks: Seen) -> Measured:
    seen = ranks[0]
    if seen["num_wrong"]:
        raise ValueError(f"{seen['num_wrong']} wrong elements")
    on_gpus = case.parameters["transport"] != "gloo"
    samples_ms = tuple(1e3 * seconds for seconds in seen["times_s"])
    timing = Timing(samples_ms, "queued" if on_gpus else "host")
    metrics = timing.metrics()
    metrics |= {name: seen[name] for name in ("num_bytes", "num_wrong", "bus_gbs")}
    if on_gpus:
        metrics["launch_median_ms"] = 1e3 * seen["issue_s"]
    return Measured(
        metrics,
        case.parameters | {"world_size": seen["world_size"]},
        timer={"method": timing.method},
    )


def _run_collectives(device: Device, case: Case) -> PhaseRuns:
    return run_ranks(collectives_rank, _collective, device, case, case.parameters["transport"])


# --- steps ---


def measured_step(case: Case, ranks: Seen) -> Measured:
    """Returns the record of one way: times and memory of the rank that took most, the parts of a
    step as the ranks' mean.
    """
    first = ranks[0]
    alone, naive = first["losses"]["alone"], first["losses"]["naive"]
    expected = alone if first["way"] == "alone" else naive
    deviation = abs(first["loss"] - expected) / abs(alone - naive)
    if not deviation <= LARGEST_DEVIATION[first["case"]["precision"]]:
        raise ValueError(
            f"loss {first['loss']}, {expected} expected, {alone} without communication"
        )
    timing = slowest(ranks)
    metrics = {**timing.metrics(), "loss": first["loss"], "loss_deviation": deviation}
    for name, size in first["memory"].items():
        if size is not None:
            metrics[name] = max(rank["memory"][name] for rank in ranks)
    for part in first["profile"]:
        # One rank's wait is another's work, so only means add up to a step.
        metrics[f"{part}_us"] = statistics.mean(rank["profile"][part] for rank in ranks)
    samples = {"step_ms": list(timing.samples_ms)}
    starts = [times[0] for rank in ranks for times in rank["spans"].values() if times]
    for number, rank in enumerate(ranks):
        for name, times in rank["spans"].items():
            samples[f"rank {number} {name}"] = [time - min(starts) for time in times]
    return Measured(
        metrics,
        {**first["case"], "world_size": len(ranks)},
        first["observed"],
        samples,
        {"method": timing.method},
    )


def _run_steps(device: Device, case: Case) -> PhaseRuns:
    return run_ranks(steps_rank, measured_step, device, case, case.parameters, case.time_limit_s)


def _run_8b(device: Device, case: Case) -> PhaseRuns:
    if device.kind != "cuda":
        raise Skip(f"the step of 8.1 B needs two GPUs; this is {device.name}")
    return run_ranks(step_8b.board_rank, step_8b.measured, device, case, case.parameters)


SECTIONS = {"collectives": _run_collectives, "steps": _run_steps, "8b": _run_8b}
run_case = functools.partial(run_section, SECTIONS)
