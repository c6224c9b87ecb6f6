"""Notebook 04: where memory goes in a training step, what autograd keeps, and what recomputing it
saves.

Sections: "peaks" (every size, context and precision), "timeline" (every allocation of a step),
"block" (what one block, or a part of it, keeps for its backward pass, compiled or not),
"checkpointing" (blocks recomputed).
"""

import contextlib
import functools
import itertools
from collections.abc import Callable

import pandas as pd
import torch
from torch import Tensor, nn

from labkit.configs import GRIDS, ModelConfig, check_known
from labkit.device import Device
from labkit.experiments.sections import Plan, empty_cache, run_section, section, timed
from labkit.experiments.step import Step, run_blocks, step_parameters
from labkit.experiments.sweep import Case, Measured
from labkit.measure.memory import (
    BEFORE,
    Allocation,
    History,
    Recorder,
    Residual,
    measure_usage,
    residuals,
    saved_bytes,
    storage_bytes,
    storages,
)
from labkit.models.transformer import Block, RMSNorm, RotaryEmbedding
from labkit.numerics import live_precision

MEASUREMENT_VERSION = 2

TIMELINE_POINTS = 400

PARTS = (
    ("rms_norm", "eager"),
    ("rms_norm", "compiled"),
    ("block", "eager"),
    ("block", "compiled"),
    ("four_blocks", "compiled"),
    ("four_blocks_by_pairs", "compiled"),
)
"""What is looked into, and whether it is compiled."""

COMPILERS = {"cuda": "inductor", "cpu": "aot_eager_decomp_partition"}
"""The compiler by kind of device. What is kept is decided before code is generated, in the same way
by both.
"""


def cases(profile: str, device_kind: str) -> list[Case]:
    """Returns the cases of `profile`."""
    grid = GRIDS["04_memory"][profile]
    planned = Plan(grid)
    for shape in itertools.product(grid.sizes, grid.contexts, grid.precisions):
        planned.add("peaks", step_parameters(*shape), "inference", "forward", "train_step")
    for shape in grid.timelines:
        planned.add("timeline", step_parameters(*shape), "inference", "train_step")
    for part, code in PARTS:
        if code in grid.block_codes:
            parameters = {"part": part, "code": code, **grid.block, "precision": "fp32"}
            planned.add("block", parameters, "saved", compiles=code == "compiled")
    for attention, plans in grid.checkpoint_plans.items():
        for plan in plans:
            parameters = step_parameters(*grid.checkpointed, attention=attention)
            planned.add("checkpointing", parameters | {"plan": plan}, "train_step")
    return planned


def optimizer_state(step: Step) -> list[Tensor]:
    """Returns the tensors of the optimizer's state; none before its first step."""
    return [value for state in step.optimizer.state.values() for value in state.values()]


def resident(step: Step) -> list[Tensor]:
    """Returns every tensor that stays from step to step."""
    inputs = [step.tokens, step.targets, *step.model.buffers()]
    return [*step.model.parameters(), *inputs, *optimizer_state(step)]


def _make_state(step: Step, phase: str) -> None:
    """Makes what stays from step to step, before a phase."""
    if phase == "train_step":
        step.train_step()  # makes the optimizer's state
    step.model.zero_grad()


def _measure_peak(step: Step, case: Case, phase: str) -> Measured:
    """Runs a phase once; returns the peak of its bytes, with those of the tensors that stay from
    step to step. On a GPU the peak includes workspaces of libraries, and what the allocator rounds
    sizes up to.
    """
    # Libraries take their workspaces at their first call in each thread.
    step.loss_on(step.tokens[:1, :16], step.targets[:1, :16]).backward()
    _make_state(step, phase)
    empty_cache()
    used_bytes, result = measure_usage(getattr(step, phase), step.device.kind)
    if phase != "inference" and not torch.isfinite(result):
        raise AssertionError(f"the loss is {result.item()}")
    peak_bytes = storage_bytes(resident(step)) + used_bytes
    if step.device.kind == "cuda":
        peak_bytes = torch.cuda.max_memory_allocated()
    return Measured({"peak_bytes": peak_bytes}, step.described())


# ---- timeline ------------------------------------------------------------------------------------


def _measure_timeline(step: Step, case: Case, phase: str) -> Measured:
    """Records every allocation of a step that is like all later ones."""
    _make_state(step, phase)
    with Recorder(step.device.kind, resident(step)) as recorder:

        def part(name: str) -> contextlib.AbstractContextManager:
            names = {"inference": "forward", "optimizer": "optimizer step"}
            recorder.mark(names.get(name, name))
            return contextlib.nullcontext()

        step.run(phase, part)
    history = recorder.history
    category = _categories(step, history)
    events, series = history.series(category, TIMELINE_POINTS)
    peak = events.index(history.totals().argmax())
    metrics = {
        "peak_bytes": history.peak_bytes,
        "num_events": history.num_events,
    }
    for name, values in series.items():
        metrics[f"{name.replace(' ', '_')}_at_peak_bytes"] = values[peak]
    mib = {f"{name}_mib": [round(x / 2**20, 2) for x in y] for name, y in series.items()}
    observed = {"phases": [list(part) for part in history.phases()]}
    return Measured(metrics, step.described(), observed, {"event": events, **mib})


def _categories(step: Step, history: History) -> Callable[[Allocation], str]:
    """Returns the function that says what an allocation is.

    Activations are what the forward pass leaves for the backward pass, gradients what that leaves
    for the optimizer; temporary is what else the step makes.
    """
    known = dict.fromkeys(storages(step.model.parameters()), "parameters")
    known |= dict.fromkeys(storages(optimizer_state(step)), "optimizer state")
    # Of the forward and the backward pass; an inference is itself the last phase.
    ends = [end for *_, end in history.phases()[:-1]]

    def category(allocation: Allocation) -> str:
        if allocation.begin == BEFORE:
            return known.get(allocation.address, "other")
        for kept_as, end in zip(("activations", "gradients"), ends, strict=False):
            if allocation.is_alive(end - 1):
                return kept_as
        return "temporary"

    return category


# ---- what a block keeps --------------------------------------------------------------------------


def _measure_part(device: Device, case: Case, phase: str) -> Measured:
    """Lists what a part of the model keeps for its backward pass."""
    parameters = case.parameters
    part = parameters["part"]
    check_known("part", part, dict(PARTS))
    is_compiled = parameters["code"] == "compiled"
    kind = device.kind
    d_model = parameters["d_model"]
    shape = (parameters["batch"], parameters["context"], d_model)
    config = ModelConfig("", d_model, parameters["d_ff"], 1, parameters["num_heads"])
    rotary = RotaryEmbedding(config.d_head, shape[1], config.rope_theta).to(kind)
    x_BTC = torch.randn(shape, device=kind, requires_grad=True)
    if part == "rms_norm":
        modules = nn.ModuleList([RMSNorm(d_model)]).to(kind)
        forward = functools.partial(modules[0], x_BTC)
    else:
        num_blocks = 1 if part == "block" else 4
        modules = nn.ModuleList(Block(config, "eager") for _ in range(num_blocks)).to(kind)
        plan = (2,) if part.endswith("by_pairs") else ()
        forward = functools.partial(run_blocks, list(modules), x_BTC, rotary, plan)
    if is_compiled:
        for module in modules:
            module.compile(backend=COMPILERS[kind], dynamic=False)
        forward()
    kept_anyway = [*modules.parameters(), *rotary.buffers()]
    kept = residuals(forward, kept_anyway, is_compiled=is_compiled)
    metrics = {
        "saved_bytes": saved_bytes(kept),
        "stream_bytes": x_BTC.nbytes,
    }
    is_live = all(module._compiled_call_impl for module in modules)
    live = {"code": "compiled" if is_live else "eager", "precision": live_precision(x_BTC.dtype)}
    return Measured(metrics, parameters | live, {"residuals": _grouped(kept)})


def _grouped(kept: list[Residual]) -> list[dict]:
    """Returns the residuals that count in `saved_bytes`, like ones together."""
    table = pd.DataFrame([vars(residual) for residual in kept])
    table = table[table["is_new"] & ~table["is_resident"]]
    table["shape"] = table["shape"].map(lambda shape: " × ".join(map(str, shape)))
    like = table.groupby(["operator", "module", "shape", "dtype"], sort=False)["num_bytes"]
    groups = like.agg(count="size", saved_bytes="sum")
    return groups.reset_index().to_dict("records")


# ---- recomputation -------------------------------------------------------------------------------


def _measure_checkpointing(step: Step, case: Case, phase: str) -> Measured:
    """Takes the peak of a training step some of whose blocks are recomputed, and its time."""
    peak = _measure_peak(step, case, phase)
    times = timed(
        step.device,
        step.time_phase,
        phase,
        num_warmup=0,  # two steps have run
        min_samples=3,
        max_samples=20,
        time_limit_s=case.time_limit_s,
    )
    plan = "/".join(map(str, step.plan)) or "none"
    return times.measured(peak.metrics, step.described() | {"plan": plan}, keep="step_ms")


SECTIONS = {
    "peaks": section(_measure_peak, Step),
    "timeline": section(_measure_timeline, Step),
    "block": section(_measure_part),
    "checkpointing": section(_measure_checkpointing, Step),
}


run_case = functools.partial(run_section, SECTIONS)
