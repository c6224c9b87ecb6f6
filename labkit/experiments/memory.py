"""Notebook 04: where memory goes in a training step, what autograd keeps, and what recomputing it
saves.

Sections: "peaks" (every size, context and precision), "timeline" (every allocation of a step, with
its owner), "block" (what one block keeps for its backward pass), "checkpointing" (blocks
recomputed), "course" (peaks of the model as a course writes it).
"""

import contextlib
import dataclasses
import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from labkit import accounting, hardware
from labkit.configs import MEMORY, model_config, narrowed
from labkit.experiments.part_of_block import PARTS, measure_part
from labkit.experiments.sections import (
    empty_cache,
    freeze_modules,
    memory_bytes,
    num_bytes,
    run_section,
    section,
    timed,
)
from labkit.experiments.sweep import Case, Measured, PhaseRun, Skip
from labkit.experiments.workload import RecomputingWorkload, course_parameters, step_parameters
from labkit.measure.memory import (
    BEFORE,
    DEVICE_KINDS,
    Allocation,
    History,
    Owner,
    OwnerLog,
    Recorder,
    Usage,
    measure_usage,
)
from labkit.measure.timing import time_callable

__all__ = ["MEASUREMENT_VERSION", "cases", "run_case"]

MEASUREMENT_VERSION = 2

PEAK_PHASES = ("inference", "forward", "train_step")
COURSE_PHASES = ("forward", "train_step")
TIMELINE_PHASES = ("inference", "train_step")
BEYOND_DOUBT = 1.1
"""A phase that is predicted to need more than 1.1 times the device's memory is not tried."""

TIMELINE_POINTS = 400
LARGEST = 14
"""Groups of equal allocations that a record names."""

LARGEST_DIFFERENCE = {"fp32": 1e-4, "bf16": 5e-2}
"""Relative difference of a recomputed gradient's norm from the plain one above which it is wrong.
"""


def cases(
    profile: str, device_kind: str, *, sizes: Sequence[str] = (), contexts: Sequence[int] = ()
) -> list[Case]:
    """Returns the cases of `profile`, those of the peaks narrowed; ValueError for a value that it
    does not have.
    """
    grid = MEMORY[profile]
    wanted_sizes = narrowed(MEMORY, profile, "sizes", sizes)
    wanted_contexts = narrowed(MEMORY, profile, "contexts", contexts)
    timeout_s = grid.case_timeout_s
    recomputed = [
        {**step_parameters(*grid.checkpointed, attention=attention), "plan": plan}
        for attention, plans in grid.checkpoint_plans.items()
        for plan in plans
    ]
    steps = itertools.product(wanted_sizes, wanted_contexts, grid.precisions)
    course = [
        step for step in grid.course if step[0] in wanted_sizes and step[1] in wanted_contexts
    ]
    parts = [
        {"part": part, "code": code, **vars(grid.block), "precision": "fp32"}
        for part, code in PARTS
    ]
    return [
        *(Case("peaks", step_parameters(*step), PEAK_PHASES, timeout_s) for step in steps),
        *(Case("course", course_parameters(*step), COURSE_PHASES, timeout_s) for step in course),
        *(
            Case("timeline", step_parameters(*step), TIMELINE_PHASES, timeout_s)
            for step in grid.timelines
        ),
        *(Case("block", part, ("saved",), timeout_s) for part in parts),
        *(
            Case("checkpointing", each, ("train_step",), timeout_s, grid.time_limit_s)
            for each in recomputed
        ),
    ]


@contextlib.contextmanager
def _recomputing(device: hardware.Device, case: Case) -> Iterator[RecomputingWorkload]:
    """Gives the workload of a case, and as its `built` the memory that building it took."""
    usage = measure_usage(
        functools.partial(RecomputingWorkload, device, case.parameters), device.kind
    )
    live = usage.result
    live.built = dataclasses.replace(usage, result=None)
    del usage
    with contextlib.closing(live):
        yield live


def _device_bytes(device: hardware.Device) -> int | None:
    return memory_bytes(device) if device.kind == "cuda" else None


def _measure_peak(workload: RecomputingWorkload, case: Case, phase: str) -> Measured:
    """Runs a phase once, a training step first part by part and then whole; returns its bytes.

    `resident_bytes` are of the tensors that were there before; `other_bytes` what the allocator
    counts beside tensors: workspaces of libraries, and what it rounds sizes up to.
    """
    _require_room(workload.device, case.parameters, phase)
    kind = workload.device.kind
    # Libraries take their workspaces at their first call in each thread.
    few = slice(0, 16)
    workload.loss(workload.tokens[:1, few], workload.targets[:1, few], ()).backward()
    workload.model.zero_grad()
    empty_cache(workload.device)
    metrics: dict[str, int | None] = {}
    if phase == "train_step":
        workload.__dict__.pop("optimizer", None)
        metrics |= _left_behind("parameter", workload.built, beside=num_bytes(workload.inputs()))
        metrics |= _left_behind("gradient", measure_usage(workload.forward_backward, kind))
        metrics |= _left_behind("optimizer", measure_usage(workload.optimizer.step, kind))
        workload.model.zero_grad()
    usage = measure_usage(getattr(workload, phase), kind)
    if phase == "forward":
        metrics |= _left_behind("made", usage)
        if not torch.isfinite(usage.result):
            raise AssertionError(f"the loss is {usage.result.item()}")
    metrics["added_bytes"] = added = usage.peak_bytes
    del usage
    metrics |= _peak_bytes(workload, added)
    return Measured(metrics, workload.described(), workload.observed())


def _peak_bytes(workload: RecomputingWorkload, added: int) -> dict[str, int | None]:
    """Returns the peak of the phase that has just run and took `added` bytes, and what stays from
    step to step.
    """
    workload.model.zero_grad()
    resident = num_bytes(workload.resident())
    is_cuda = workload.device.kind == "cuda"
    return {
        "resident_bytes": resident,
        "other_bytes": torch.cuda.memory_allocated() - resident if is_cuda else 0,
        "peak_bytes": torch.cuda.max_memory_allocated() if is_cuda else resident + added,
        "device_bytes": _device_bytes(workload.device),
    }


def _left_behind(part: str, usage: Usage, beside: int = 0) -> dict[str, int]:
    """Returns the bytes of a part, without `beside` of them: the allocator's blocks, and what was
    asked of them.
    """
    return {
        f"{part}_bytes": usage.kept_bytes - beside,
        f"{part}_requested_bytes": usage.requested_bytes - beside,
    }


def _require_room(device: hardware.Device, parameters: dict, phase: str) -> None:
    """Raises Skip for a phase that is predicted to need far more memory than there is."""
    total = _device_bytes(device)
    predicted = accounting.peak_bytes(
        model_config(parameters["size"]),
        parameters["batch"],
        parameters["context"],
        phase,
        precision=parameters["precision"],
        attention="eager" if parameters["attention"] in ("eager", "course") else "fused",
        device_kind=device.kind,
    )
    if total and predicted > BEYOND_DOUBT * total:
        raise Skip(f"predicted to need {predicted / 1e9:.0f} GB of {total / 1e9:.0f} GB")


def _measure_timeline(workload: RecomputingWorkload, case: Case, phase: str) -> Measured:
    """Records every allocation of a step that is like all later ones, after one that is not
    recorded, as a check.
    """
    _require_room(workload.device, case.parameters, phase)
    kind = workload.device.kind
    if phase == "train_step":
        workload.train_step()  # makes the optimizer's state
        workload.model.zero_grad()
    plain = measure_usage(getattr(workload, phase), kind)
    plain_bytes = torch.cuda.max_memory_allocated() if kind == "cuda" else plain.peak_bytes
    del plain
    workload.model.zero_grad()
    resident = workload.resident()
    with (
        Recorder(kind, resident) as recorder,
        contextlib.closing(OwnerLog(recorder, workload.model)) as log,
        log,
    ):
        gradients = _recorded_step(workload, recorder, phase)
    history = recorder.history
    if kind != "cuda":
        plain_bytes += int(history.totals()[0])
    owners = log.owners()
    owner = owners[history.peak_position] if history.peak_position >= 0 else None
    category = _categories(workload, history, gradients)
    at_peak: Counter[str] = Counter()
    for allocation in history.allocations:
        if allocation.is_alive(history.peak_position):
            at_peak[category(allocation)] += allocation.num_bytes
    kept, series = history.series(category, TIMELINE_POINTS)
    return Measured(
        metrics={
            "peak_bytes": history.peak_bytes,
            "reported_peak_bytes": history.reported_peak_bytes,
            "plain_peak_bytes": plain_bytes,
            "num_events": history.num_events,
            "num_allocations": sum(
                allocation.begin != BEFORE for allocation in history.allocations
            ),
            **{f"{name.replace(' ', '_')}_at_peak_bytes": n for name, n in at_peak.items()},
        },
        case=workload.described(),
        observed={
            **workload.observed(),
            "phases": [list(part) for part in history.phases()],
            "peak_position": history.peak_position,
            "peak_phase": history.phase_at(history.peak_position),
            "peak_owner": {name: getattr(owner, name) for name in ("operator", "module", "frame")}
            if owner
            else {},
            "largest": _largest(history, owners, category),
        },
        samples={"event": kept}
        | {f"{name}_mib": [round(x / 2**20, 2) for x in y] for name, y in series.items()},
    )


def _recorded_step(workload: RecomputingWorkload, recorder: Recorder, phase: str) -> list[int]:
    """Runs the phase part by part under the recorder's marks; returns the addresses of the
    gradients.
    """
    recorder.mark("forward")
    if phase == "inference":
        workload.inference()
        return []
    loss = workload.forward()
    recorder.mark("backward")
    loss.backward()
    del loss
    recorder.mark("optimizer step")
    gradients = [x.untyped_storage().data_ptr() for x in workload.gradients()]
    workload.optimizer.step()
    return gradients


def _categories(
    workload: RecomputingWorkload, history: History, gradients: Sequence[int]
) -> Callable[[Allocation], str]:
    """Returns the function that says what an allocation is.

    Activations are what the forward pass leaves for the backward pass; temporary is what else the
    step makes.
    """
    known = {x.untyped_storage().data_ptr(): "parameters" for x in workload.model.parameters()}
    known |= {x.untyped_storage().data_ptr(): "optimizer state" for x in workload.optimizer_state()}
    of_gradients = set(gradients)
    begin_of = {name: begin for name, begin, _ in history.phases()}
    backward, optimizer_step = begin_of.get("backward"), begin_of.get("optimizer step")

    def category(allocation: Allocation) -> str:
        if allocation.begin == BEFORE:
            return known.get(allocation.address, "other")
        if backward is None:
            return "temporary"
        if allocation.address in of_gradients and allocation.is_alive(optimizer_step - 1):
            return "gradients"
        if allocation.begin < backward and allocation.is_alive(backward - 1):
            return "activations"
        return "temporary"

    return category


def _largest(
    history: History, owners: Sequence[Owner], category: Callable[[Allocation], str]
) -> list[dict]:
    """Returns groups of like allocations that the step made, those of the largest single size
    first.
    """
    groups: dict[tuple, list[Allocation]] = {}
    for allocation in history.allocations:
        if allocation.begin != BEFORE:
            owner, phase = owners[allocation.begin], history.phase_at(allocation.begin)
            key = (
                allocation.num_bytes,
                owner.operator,
                owner.frame or allocation.frame,
                category(allocation),
                phase,
            )
            groups.setdefault(key, []).append(allocation)
    names = ("num_bytes", "operator", "frame", "category", "phase")
    return [
        {
            **dict(zip(names, key, strict=True)),
            "module": owners[group[0].begin].module,
            "code": owners[group[0].begin].code,
            "count": len(group),
            "count_at_peak": sum(
                allocation.is_alive(history.peak_position) for allocation in group
            ),
        }
        for key, group in sorted(
            groups.items(), key=lambda item: (-item[0][0], -len(item[1]), item[0][1:])
        )[:LARGEST]
    ]


def _measure_checkpointing(workload: RecomputingWorkload, case: Case, phase: str) -> Measured:
    """Times a training step and takes its peak; before that, its gradients are held to those
    without recomputing.
    """
    kind = workload.device.kind
    difference = _gradient_difference(workload)
    num_forwards = _count_block_forwards(
        workload
    )  # also the first step, which makes the optimizer's state
    workload.model.zero_grad()
    memory = _peak_bytes(workload, measure_usage(workload.train_step, kind).peak_bytes)
    # Two steps have run: there is nothing left to warm up.
    limits = {
        "num_warmup": 0,
        "min_samples": 3,
        "max_samples": 20,
        "time_limit_s": case.time_limit_s,
    }
    found = timed(workload.device, time_callable, workload.train_step, device_kind=kind, **limits)
    metrics = {
        **memory,
        "forwards_per_block": num_forwards,
        "gradient_relative_difference": difference,
    }
    described = {**workload.described(), "plan": _plan_text(workload, num_forwards)}
    return found.measured(metrics, described, workload.observed(), keep="step_ms")


def _plan_text(workload: RecomputingWorkload, num_forwards: float) -> str:
    """Returns the plan under its name if the blocks ran as often as it makes them, else what was
    seen.
    """
    text = "/".join(map(str, workload.plan)) or "none"
    expected = accounting.checkpoint_forwards(len(workload.model.blocks), workload.plan)
    return (
        text
        if math.isclose(num_forwards, expected)
        else f"{text}, but each block ran {num_forwards:g} times"
    )


def _count_block_forwards(workload: RecomputingWorkload) -> float:
    """Returns how often a block's forward pass runs in a training step, on average over the
    blocks.
    """
    calls = []
    hooks = [
        block.register_forward_pre_hook(lambda *_: calls.append(None) and None)
        for block in workload.model.blocks
    ]
    workload.train_step()
    for hook in hooks:
        hook.remove()
    return len(calls) / len(workload.model.blocks)


def _gradient_difference(workload: RecomputingWorkload) -> float:
    """Returns the largest relative difference of a gradient's norm from that without recomputation,
    on a short batch.

    Raises AssertionError for a wrong one.
    """
    tokens, targets = workload.tokens[:1, :128], workload.targets[:1, :128]

    def norms(plan: Sequence[int]) -> Tensor:
        workload.model.zero_grad()
        workload.loss(tokens, targets, plan).backward()
        found = torch.stack([gradient.norm() for gradient in workload.gradients()])
        workload.model.zero_grad()
        return found

    exact = norms([])
    worst = float(((norms(workload.plan) - exact).abs() / exact).max())
    bound = LARGEST_DIFFERENCE[workload.precision]
    if not worst <= bound:
        raise AssertionError(
            f"gradients differ by {worst:.2g} from those without recomputation, more than {bound:g}"
        )
    return worst


SECTIONS = {
    "peaks": section(_measure_peak, _recomputing),
    "course": section(_measure_peak, _recomputing),
    "timeline": section(_measure_timeline, _recomputing),
    "block": section(measure_part),
    "checkpointing": section(_measure_checkpointing, _recomputing),
}


def run_case(case: Case, ceilings: dict[str, float]) -> Iterator[PhaseRun]:
    """Yields each phase of `case` with the function that measures it. Runs in the worker
    process.
    """
    device = hardware.detect()
    freeze_modules()
    if device.kind not in DEVICE_KINDS:
        raise Skip(f"{device.name}: PyTorch does not record the allocations of {device.kind!r}")
    yield from run_section(SECTIONS, case, ceilings)
