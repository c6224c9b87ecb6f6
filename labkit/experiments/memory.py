"""Notebook 04: where memory goes in a training step, what autograd keeps, and what recomputing it
saves.

Sections: "peaks" (every size, context and precision), "timeline" (every allocation of a step, with
its owner), "block" (what one block keeps for its backward pass), "checkpointing" (blocks
recomputed), "course" (peaks of the model as a course writes it).
"""

import contextlib
import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from labkit import accounting
from labkit.configs import MEMORY, model_config
from labkit.device import Device, detect
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
from labkit.experiments.step import Step, course_parameters, step_parameters
from labkit.experiments.sweep import Case, Measured, PhaseRun, Skip
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
    """Returns the cases of `profile`, those of the peaks narrowed to values of its grid
    where asked.
    """
    grid = MEMORY[profile]
    wanted_sizes = sizes or grid.sizes
    wanted_contexts = contexts or grid.contexts
    limit = grid.case_timeout_s
    planned = []
    for shape in itertools.product(wanted_sizes, wanted_contexts, grid.precisions):
        planned.append(Case("peaks", step_parameters(*shape), PEAK_PHASES, limit))
    for size, context, precision in grid.course:
        if size in wanted_sizes and context in wanted_contexts:
            parameters = course_parameters(size, context, precision)
            planned.append(Case("course", parameters, COURSE_PHASES, limit))
    for shape in grid.timelines:
        planned.append(Case("timeline", step_parameters(*shape), TIMELINE_PHASES, limit))
    for part, code in PARTS:
        parameters = {"part": part, "code": code, **vars(grid.block), "precision": "fp32"}
        planned.append(Case("block", parameters, ("saved",), limit))
    for attention, plans in grid.checkpoint_plans.items():
        for plan in plans:
            parameters = step_parameters(*grid.checkpointed, attention=attention)
            parameters["plan"] = plan
            limits = (limit, grid.time_limit_s)
            planned.append(Case("checkpointing", parameters, ("train_step",), *limits))
    return planned


def inputs(step: Step) -> list[Tensor]:
    """Returns what is there beside parameters: token indices and the model's tables."""
    return [step.tokens, step.targets, *step.model.buffers()]


def gradients(step: Step) -> list[Tensor]:
    return [parameter.grad for parameter in step.model.parameters() if parameter.grad is not None]


def optimizer_state(step: Step) -> list[Tensor]:
    """Returns the tensors of the optimizer's state on this device; none before its first step."""
    if "optimizer" not in vars(step):
        return []
    values = [value for state in step.optimizer.state.values() for value in state.values()]
    return [x for x in values if isinstance(x, Tensor) and x.device.type == step.device.kind]


def resident(step: Step) -> list[Tensor]:
    """Returns every tensor that stays from step to step."""
    return [*step.model.parameters(), *inputs(step), *gradients(step), *optimizer_state(step)]


@contextlib.contextmanager
def _open_step(device: Device, case: Case) -> Iterator[Step]:
    """Gives the step of a case, and as its `built` the metrics of the memory that building it
    took.
    """
    usage = measure_usage(functools.partial(Step, device, case.parameters), device.kind)
    step = usage.result
    step.built = _left_behind("parameter", usage, beside=num_bytes(inputs(step)))
    del usage
    with contextlib.closing(step):
        yield step


def _device_bytes(device: Device) -> int | None:
    return memory_bytes(device) if device.kind == "cuda" else None


def _measure_peak(step: Step, case: Case, phase: str) -> Measured:
    """Runs a phase once, a training step first part by part and then whole; returns its bytes.

    `resident_bytes` are of the tensors that were there before; `other_bytes` what the allocator
    counts beside tensors: workspaces of libraries, and what it rounds sizes up to.
    """
    kind, model = step.device.kind, step.model
    _require_room(step.device, case.parameters, phase)
    # Libraries take their workspaces at their first call in each thread.
    step.loss_on(step.tokens[:1, :16], step.targets[:1, :16]).backward()
    model.zero_grad()
    empty_cache(step.device)
    metrics: dict[str, int | None] = {}
    if phase == "train_step":
        vars(step).pop("optimizer", None)
        metrics |= step.built
        metrics |= _left_behind("gradient", measure_usage(step.forward_backward, kind))
        metrics |= _left_behind("optimizer", measure_usage(step.optimizer.step, kind))
        model.zero_grad()
    usage = measure_usage(getattr(step, phase), kind)
    if phase == "forward":
        metrics |= _left_behind("made", usage)
        if not torch.isfinite(usage.result):
            raise AssertionError(f"the loss is {usage.result.item()}")
    metrics["added_bytes"] = added = usage.peak_bytes
    del usage
    metrics |= _peak_bytes(step, added)
    return Measured(metrics, step.described(), step.observed())


def _peak_bytes(step: Step, added: int) -> dict[str, int | None]:
    """Returns the peak of the phase that has just run and took `added` bytes, and what stays from
    step to step.
    """
    step.model.zero_grad()
    resident_bytes = num_bytes(resident(step))
    is_cuda = step.device.kind == "cuda"
    return {
        "resident_bytes": resident_bytes,
        "other_bytes": torch.cuda.memory_allocated() - resident_bytes if is_cuda else 0,
        "peak_bytes": torch.cuda.max_memory_allocated() if is_cuda else resident_bytes + added,
        "device_bytes": _device_bytes(step.device),
    }


def _left_behind(part: str, usage: Usage, beside: int = 0) -> dict[str, int]:
    """Returns the bytes of a part, without `beside` of them: the allocator's blocks, and what was
    asked of them.
    """
    return {
        f"{part}_bytes": usage.kept_bytes - beside,
        f"{part}_requested_bytes": usage.requested_bytes - beside,
    }


def _require_room(device: Device, parameters: dict, phase: str) -> None:
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


def _measure_timeline(step: Step, case: Case, phase: str) -> Measured:
    """Records every allocation of a step that is like all later ones, after one that is not
    recorded, as a check.
    """
    kind = step.device.kind
    _require_room(step.device, case.parameters, phase)
    if phase == "train_step":
        step.train_step()  # makes the optimizer's state
        step.model.zero_grad()
    plain = measure_usage(getattr(step, phase), kind)
    plain_bytes = torch.cuda.max_memory_allocated() if kind == "cuda" else plain.peak_bytes
    del plain
    step.model.zero_grad()
    with (
        Recorder(kind, resident(step)) as recorder,
        contextlib.closing(OwnerLog(recorder, step.model)) as log,
        log,
    ):
        _run_recorded(step, recorder, phase)
        gradient_addresses = {x.untyped_storage().data_ptr() for x in gradients(step)}
    history = recorder.history
    if kind != "cuda":
        plain_bytes += int(history.totals()[0])
    owners = log.owners()
    owner = owners[history.peak_position] if history.peak_position >= 0 else None
    category = _categories(step, history, gradient_addresses)
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
        case=step.described(),
        observed={
            **step.observed(),
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


def _run_recorded(step: Step, recorder: Recorder, phase: str) -> None:
    """Runs the phase part by part under the recorder's marks."""

    @contextlib.contextmanager
    def part(name: str) -> Iterator[None]:
        recorder.mark({"inference": "forward", "optimizer": "optimizer step"}.get(name, name))
        yield

    step.run_parts(phase, part)


def _categories(
    step: Step, history: History, gradient_addresses: set[int]
) -> Callable[[Allocation], str]:
    """Returns the function that says what an allocation is.

    Activations are what the forward pass leaves for the backward pass; temporary is what else the
    step makes.
    """
    known = {x.untyped_storage().data_ptr(): "parameters" for x in step.model.parameters()}
    known |= {x.untyped_storage().data_ptr(): "optimizer state" for x in optimizer_state(step)}
    begin_of = {name: begin for name, begin, _ in history.phases()}
    backward, optimizer_step = begin_of.get("backward"), begin_of.get("optimizer step")

    def category(allocation: Allocation) -> str:
        if allocation.begin == BEFORE:
            return known.get(allocation.address, "other")
        if backward is None:
            return "temporary"
        if allocation.address in gradient_addresses and allocation.is_alive(optimizer_step - 1):
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


def _measure_checkpointing(step: Step, case: Case, phase: str) -> Measured:
    """Times a training step and takes its peak; before that, its gradients are held to those
    without recomputing.
    """
    kind = step.device.kind
    difference = gradient_difference(step)
    # This is also the first step, which makes the optimizer's state.
    num_forwards = count_block_forwards(step)
    step.model.zero_grad()
    memory = _peak_bytes(step, measure_usage(step.train_step, kind).peak_bytes)
    # Two steps have run: there is nothing left to warm up.
    limits = {"num_warmup": 0, "min_samples": 3, "max_samples": 20}
    limits |= {"time_limit_s": case.time_limit_s, "device_kind": kind}
    times = timed(step.device, time_callable, step.train_step, **limits)
    metrics = {
        **memory,
        "forwards_per_block": num_forwards,
        "gradient_relative_difference": difference,
    }
    described = {**step.described(), "plan": plan_text(step, num_forwards)}
    return times.measured(metrics, described, step.observed(), keep="step_ms")


def plan_text(step: Step, num_forwards: float) -> str:
    """Returns the plan under its name if the blocks ran as often as it makes them, else what was
    seen.
    """
    text = "/".join(map(str, step.plan)) or "none"
    expected = accounting.checkpoint_forwards(len(step.model.blocks), step.plan)
    if math.isclose(num_forwards, expected):
        return text
    return f"{text}, but each block ran {num_forwards:g} times"


def count_block_forwards(step: Step) -> float:
    """Returns how often a block's forward pass runs in a training step, on average over the
    blocks.
    """
    num_calls = 0

    def count(*_) -> None:
        nonlocal num_calls
        num_calls += 1

    hooks = [block.register_forward_pre_hook(count) for block in step.model.blocks]
    step.train_step()
    for hook in hooks:
        hook.remove()
    return num_calls / len(step.model.blocks)


def gradient_difference(step: Step) -> float:
    """Returns the largest relative difference of a gradient's norm from that without recomputation,
    on a short batch.

    Raises AssertionError for a wrong one.
    """

    def norms(plan: Sequence[int]) -> Tensor:
        step.model.zero_grad()
        step.loss_on(step.tokens[:1, :128], step.targets[:1, :128], plan).backward()
        result = torch.stack([gradient.norm() for gradient in gradients(step)])
        step.model.zero_grad()
        return result

    exact = norms(())
    worst = float(((norms(step.plan) - exact).abs() / exact).max())
    bound = LARGEST_DIFFERENCE[step.precision]
    if not worst <= bound:
        raise AssertionError(
            f"gradients differ by {worst:.2g} from those without recomputation, more than {bound:g}"
        )
    return worst


SECTIONS = {
    "peaks": section(_measure_peak, _open_step),
    "course": section(_measure_peak, _open_step),
    "timeline": section(_measure_timeline, _open_step),
    "block": section(measure_part),
    "checkpointing": section(_measure_checkpointing, _open_step),
}


def run_case(case: Case, ceilings: dict[str, float]) -> Iterator[PhaseRun]:
    """Yields each phase of `case` with the function that measures it. Runs in the worker
    process.
    """
    device = detect()
    freeze_modules()
    if device.kind not in DEVICE_KINDS:
        raise Skip(f"{device.name}: PyTorch does not record the allocations of {device.kind!r}")
    yield from run_section(SECTIONS, case, ceilings)
