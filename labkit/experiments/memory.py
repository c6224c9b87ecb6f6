"""Notebook 04: where memory goes in a training step, what autograd keeps, and what recomputing it saves.

Sections: "peaks" (every size, context and precision), "timeline" (every allocation of a step, with its owner), "block"
(what one block keeps for its backward pass), "checkpointing" (blocks recomputed), "snapshot" (files read safely).
"""

import dataclasses
import functools
import gc
import math
import pickle
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from labkit import accounting, hardware
from labkit.configs import BATCH_SIZE, MEMORY, MemoryGrid, ModelConfig, model_config, narrowed
from labkit.experiments.benchmarking import Workload
from labkit.experiments.ceilings import empty_cache, require_precision
from labkit.experiments.sweep import Case, Measured, PhaseRun, Skip
from labkit.measure.memory import (
    DEVICE_KINDS,
    Owner,
    OwnerLog,
    Recorder,
    Residual,
    Usage,
    measure_usage,
    packed_bytes,
    residuals,
    saved_bytes,
)
from labkit.measure.snapshots import BEFORE, Allocation, History, SnapshotError, read_history
from labkit.measure.timing import time_callable
from labkit.models.transformer import Block, RMSNorm, RotaryEmbedding, language_model_loss

__all__ = ["MEASUREMENT_VERSION", "cases", "run_case"]

MEASUREMENT_VERSION = 2

PEAK_PHASES = ("inference", "forward", "train_step")
TIMELINE_PHASES = ("inference", "train_step")
PARTS = (
    ("rms_norm", "eager"),
    ("rms_norm", "compiled"),
    ("block", "eager"),
    ("block", "compiled"),
    ("four_blocks", "compiled"),
    ("four_blocks_by_pairs", "compiled"),
)
"""What is looked into, and whether it is compiled."""

SNAPSHOT_FILES = ("genuine", "calls a function", "names a class", "refers outside", "another pickle", "cut off", "text")

BEYOND_DOUBT = 1.1
"""A phase that is predicted to need more than 1.1 times the device's memory is not tried."""

TIMELINE_POINTS = 400
LARGEST = 14
"""Groups of equal allocations that a record names."""

LARGEST_ERROR = {"fp32": 1e-4, "bf16": 5e-2}
"""Relative difference of a compiled or recomputed result from the plain one above which it is wrong."""

COMPILERS = {"cuda": "inductor", "cpu": "aot_eager_decomp_partition"}
"""The compiler by kind of device. What is kept for the backward pass is decided before code is generated, in the same
way by both, and generating code for a CPU takes longer than all the rest."""


# ---- the cases -------------------------------------------------------------------------------------------------------


def cases(profile: str, device_kind: str, *, sizes: Sequence[str] = (), contexts: Sequence[int] = ()) -> list[Case]:
    """Returns the cases of `profile`, those of the peaks narrowed to `sizes` and `contexts` where these are given.

    Raises ValueError for a size or context that the profile does not have.
    """
    grid = MEMORY[profile]
    wanted_sizes = narrowed(MEMORY, profile, "sizes", sizes)
    wanted_contexts = narrowed(MEMORY, profile, "contexts", contexts)
    timeout_s = grid.case_timeout_s
    return [
        *(
            Case("peaks", _parameters(size, context, precision), PEAK_PHASES, timeout_s)
            for size in wanted_sizes
            for context in wanted_contexts
            for precision in grid.precisions
        ),
        *(Case("timeline", _parameters(*timeline), TIMELINE_PHASES, timeout_s) for timeline in grid.timelines),
        *(
            Case("block", {"part": part, "code": code, **vars(grid.block), "precision": "fp32"}, ("saved",), timeout_s)
            for part, code in PARTS
        ),
        *_checkpoint_cases(grid),
        *(Case("snapshot", {"file": file}, ("load",), timeout_s) for file in SNAPSHOT_FILES),
    ]


def _parameters(size: str, context: int, precision: str, attention: str = "eager") -> dict:
    return {
        "size": size,
        "context": context,
        "batch": BATCH_SIZE,
        "precision": precision,
        "compile": "none",
        "attention": attention,
    }


def _checkpoint_cases(grid: MemoryGrid) -> list[Case]:
    return [
        Case(
            "checkpointing",
            {**_parameters(grid.checkpoint_size, context, grid.checkpoint_precision, attention), "plan": plan},
            ("train_step",),
            grid.case_timeout_s,
            grid.time_limit_s,
        )
        for context in grid.checkpoint_contexts
        for attention, plans in grid.checkpoint_plans.items()
        for plan in plans
    ]


# ---- running one -----------------------------------------------------------------------------------------------------


def run_case(case: Case, ceilings: dict[str, float]) -> Iterator[PhaseRun]:
    """Yields each phase of `case` with the function that measures it. Runs in the worker process."""
    device = hardware.detect()
    _freeze_modules()
    if device.kind not in DEVICE_KINDS:
        raise Skip(f"{device.name}: PyTorch does not record the allocations of {device.kind!r}")
    require_precision(device, case.parameters.get("precision", "fp32"))
    if case.section == "block":
        yield "saved", functools.partial(_measure_part, device, case)
    elif case.section == "snapshot":
        yield "load", functools.partial(_measure_snapshot, device, case)
    else:
        yield from _with_workload(device, case)


@functools.cache
def _freeze_modules() -> None:
    """Takes all that importing made out of later collections, several of which every measurement makes."""
    gc.collect()
    gc.freeze()


def _with_workload(device: hardware.Device, case: Case) -> Iterator[PhaseRun]:
    measure = {"peaks": _measure_peak, "timeline": _measure_timeline, "checkpointing": _measure_checkpointing}
    usage = measure_usage(functools.partial(RecomputingWorkload, device, case.parameters), device.kind)
    workload, built = usage.result, dataclasses.replace(usage, result=None)
    del usage
    try:
        for phase in case.phases:
            yield phase, functools.partial(measure[case.section], workload, case, phase, built)
    finally:
        workload.close()


def run_blocks(blocks: Sequence[nn.Module], x_BTC: Tensor, rotary: RotaryEmbedding, plan: Sequence[int]) -> Tensor:
    """Returns the output of `blocks`, one after another, some of them recomputed in the backward pass.

    Args:
        plan: numbers of blocks. [] keeps everything; [k, *rest] keeps the input of every k blocks, and applies `rest`
            within those k while they are recomputed.
    """
    if not plan:
        for block in blocks:
            x_BTC = block(x_BTC, rotary)
        return x_BTC
    num_blocks, *rest = plan
    for first in range(0, len(blocks), num_blocks):
        part = blocks[first : first + num_blocks]
        # No dropout anywhere, so there is no state of random numbers to keep.
        x_BTC = checkpoint(run_blocks, part, x_BTC, rotary, rest, use_reentrant=False, preserve_rng_state=False)
    return x_BTC


class RecomputingWorkload(Workload):
    """Notebook 01's workload whose blocks may be recomputed in the backward pass, as the case's plan says."""

    def __init__(self, device: hardware.Device, parameters: dict):
        super().__init__(device, parameters)
        self.plan = accounting.checkpoint_plan(parameters.get("plan", "none"), len(self.model.blocks))

    def forward(self) -> Tensor:
        return self.loss(self.tokens, self.targets, self.plan) if self.plan else super().forward()

    def loss(self, tokens_BT: Tensor, targets_BT: Tensor, plan: Sequence[int]) -> Tensor:
        """Returns the loss, with gradient."""
        model = self.model
        with self.autocast():
            x_BTC = run_blocks(list(model.blocks), model.embedding(tokens_BT), model.rotary, plan)
            return language_model_loss(model.head(model.norm(x_BTC)), targets_BT)

    def close(self) -> None:
        """Frees what the case holds."""
        del self.model, self.tokens, self.targets
        self.__dict__.pop("optimizer", None)
        empty_cache(self.device)

    def inputs(self) -> list[Tensor]:
        """Returns what is there beside parameters: token indices and the model's tables."""
        return [self.tokens, self.targets, *self.model.buffers()]

    def gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]

    def optimizer_state(self) -> list[Tensor]:
        """Returns the tensors of the optimizer's state on this device; none before its first step."""
        if "optimizer" not in self.__dict__:
            return []
        tensors = [x for state in self.optimizer.state.values() for x in state.values() if isinstance(x, Tensor)]
        return [x for x in tensors if x.device.type == self.device.kind]

    def resident(self) -> list[Tensor]:
        """Returns every tensor that stays from step to step."""
        return [*self.model.parameters(), *self.inputs(), *self.gradients(), *self.optimizer_state()]


def _num_bytes(tensors: Sequence[Tensor]) -> int:
    return sum(x.untyped_storage().nbytes() for x in tensors)


def _memory_bytes(device: hardware.Device) -> int | None:
    return torch.cuda.get_device_properties(0).total_memory if device.kind == "cuda" else None


def _kind_of_attention(impl: str) -> str:
    return "eager" if impl == "eager" else "fused"


# ---- peaks -----------------------------------------------------------------------------------------------------------


def _measure_peak(workload: RecomputingWorkload, case: Case, phase: str, built: Usage) -> Measured:
    """Runs a phase once, the training step once more with the optimizer's state in place; returns its bytes.

    `resident_bytes` are of the tensors that were there before; `other_bytes` what the allocator counts beside tensors:
    workspaces of libraries, and what it rounds sizes up to.
    """
    _require_room(workload.device, case.parameters, phase)
    kind = workload.device.kind
    _make_workspaces(workload)
    metrics: dict[str, int | None] = {}
    if phase == "train_step":
        metrics |= _measure_parts_of_step(workload, built)
        workload.model.zero_grad()
        usage = measure_usage(workload.train_step, kind)
    elif phase == "forward":
        usage = measure_usage(workload.forward, kind)
        metrics |= _left_behind("made", usage)
        loss = usage.result
        if not torch.isfinite(loss):
            raise AssertionError(f"the loss is {loss.item()}")
        del loss
    else:
        usage = measure_usage(workload.inference, kind)
    metrics["added_bytes"] = usage.peak_bytes
    del usage
    workload.model.zero_grad()
    metrics["resident_bytes"] = _num_bytes(workload.resident())
    if kind == "cuda":
        metrics["other_bytes"] = torch.cuda.memory_allocated() - metrics["resident_bytes"]
        metrics["peak_bytes"] = torch.cuda.max_memory_allocated()
    else:
        metrics["other_bytes"] = 0
        metrics["peak_bytes"] = metrics["resident_bytes"] + metrics["added_bytes"]
    return Measured(
        metrics={**metrics, "device_bytes": _memory_bytes(workload.device)},
        case=workload.described(),
        observed={**workload.observed(), "memory_source": _source(kind)},
    )


def _make_workspaces(workload: RecomputingWorkload) -> None:
    """Runs a few tokens forward and backward: libraries take their workspaces at their first call in each thread."""
    few = slice(0, 16)
    workload.loss(workload.tokens[:1, few], workload.targets[:1, few], ()).backward()
    workload.model.zero_grad()
    empty_cache(workload.device)


def _measure_parts_of_step(workload: RecomputingWorkload, built: Usage) -> dict[str, int]:
    """Runs the first training step part by part; returns what each leaves behind by the allocator's account."""
    kind = workload.device.kind
    workload.__dict__.pop("optimizer", None)
    return {
        **_left_behind("parameter", built, beside=_num_bytes(workload.inputs())),
        **_left_behind("gradient", measure_usage(workload.forward_backward, kind)),
        **_left_behind("optimizer", measure_usage(workload.optimizer.step, kind)),
    }


def _left_behind(part: str, usage: Usage, beside: int = 0) -> dict[str, int]:
    """Returns the bytes of a part, without `beside` of them: the allocator's blocks, and what was asked of them."""
    return {
        f"{part}_bytes": usage.kept_bytes - beside,
        f"{part}_requested_bytes": usage.requested_bytes - beside,
    }


def _require_room(device: hardware.Device, parameters: dict, phase: str) -> None:
    """Raises Skip for a phase that is predicted to need far more memory than there is."""
    total = _memory_bytes(device)
    predicted = accounting.peak_bytes(
        model_config(parameters["size"]),
        parameters["batch"],
        parameters["context"],
        phase,
        precision=parameters["precision"],
        attention=_kind_of_attention(parameters["attention"]),
        device_kind=device.kind,
    )
    if total and predicted > BEYOND_DOUBT * total:
        raise Skip(f"predicted to need {predicted / 1e9:.0f} GB of {total / 1e9:.0f} GB")


def _source(device_kind: str) -> str:
    return "CUDA caching allocator" if device_kind == "cuda" else "memory events of the profiler"


# ---- the timeline ----------------------------------------------------------------------------------------------------


def _measure_timeline(workload: RecomputingWorkload, case: Case, phase: str, built: Usage) -> Measured:
    """Records every allocation of one step that is like all later ones, and says whose each is.

    A step without any recording comes before it, so that a peak that the recording itself changes is seen.
    """
    kind = workload.device.kind
    if phase == "train_step":
        workload.train_step()  # makes the optimizer's state
        workload.model.zero_grad()
    plain = measure_usage(getattr(workload, phase), kind)
    plain_bytes = torch.cuda.max_memory_allocated() if kind == "cuda" else plain.peak_bytes
    del plain
    workload.model.zero_grad()
    resident = workload.resident()
    with Recorder(kind, resident) as recorder:
        log = OwnerLog(recorder, workload.model)
        try:
            with log:
                gradients = _recorded_step(workload, recorder, phase)
        finally:
            log.close()
    history = recorder.history
    if kind != "cuda":
        plain_bytes += int(history.totals()[0])
    owners = log.owners()
    category = _categories(workload, history, gradients)
    kept, series = history.series(category, TIMELINE_POINTS)
    return Measured(
        metrics={
            "peak_bytes": history.peak_bytes,
            "reported_peak_bytes": history.reported_peak_bytes,
            "plain_peak_bytes": plain_bytes,
            "num_events": history.num_events,
            "num_allocations": sum(allocation.begin != BEFORE for allocation in history.allocations),
            **{f"{name.replace(' ', '_')}_at_peak_bytes": n for name, n in _at_peak(history, category).items()},
        },
        case=workload.described(),
        observed={
            **workload.observed(),
            "memory_source": _source(kind),
            "phases": [list(part) for part in history.phases()],
            "peak_position": history.peak_position,
            "peak_phase": history.phase_at(history.peak_position),
            "peak_owner": _owner_text(owners[history.peak_position]) if history.peak_position >= 0 else {},
            "largest": _largest(history, owners, category),
        },
        samples={"event": kept} | {f"{name}_mib": [round(x / 2**20, 2) for x in y] for name, y in series.items()},
    )


def _recorded_step(workload: RecomputingWorkload, recorder: Recorder, phase: str) -> list[int]:
    """Runs the phase part by part under the recorder's marks; returns the addresses of the gradients."""
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

    Parameters, gradients and optimizer state are known by their address; activations are what the forward pass leaves
    for the backward pass; the rest of what the step makes is temporary.
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


def _at_peak(history: History, category: Callable[[Allocation], str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for allocation in history.allocations:
        if allocation.is_alive(history.peak_position):
            name = category(allocation)
            found[name] = found.get(name, 0) + allocation.num_bytes
    return found


def _largest(history: History, owners: Sequence[Owner], category: Callable[[Allocation], str]) -> list[dict]:
    """Returns groups of like allocations that the step made, those of the largest single size first."""
    groups: dict[tuple, list[Allocation]] = {}
    for allocation in history.allocations:
        if allocation.begin != BEFORE:
            owner = owners[allocation.begin]
            frame = owner.frame or allocation.frame
            key = (
                allocation.num_bytes, owner.operator, frame, category(allocation), history.phase_at(allocation.begin),
            )  # fmt: skip
            groups.setdefault(key, []).append(allocation)
    largest = sorted(groups, key=lambda key: (-key[0], -len(groups[key]), key[1:]))[:LARGEST]
    return [
        {
            "num_bytes": key[0],
            "operator": key[1],
            "module": owners[groups[key][0].begin].module,
            "frame": key[2],
            "code": owners[groups[key][0].begin].code,
            "category": key[3],
            "phase": key[4],
            "count": len(groups[key]),
            "count_at_peak": sum(allocation.is_alive(history.peak_position) for allocation in groups[key]),
        }
        for key in largest
    ]


def _owner_text(owner: Owner) -> dict[str, str]:
    return {"operator": owner.operator, "module": owner.module, "frame": owner.frame}


# ---- one block -------------------------------------------------------------------------------------------------------


def _measure_part(device: hardware.Device, case: Case) -> Measured:
    """Lists what a part keeps for its backward pass; a compiled one is held against the eager one."""
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("highest")
    part = _Part(device, case.parameters)
    try:
        metrics = part.measure()
        return Measured(
            metrics=metrics,
            case=part.described(),
            observed=part.observed(),
        )
    finally:
        part.close()


class _Part:
    """The live objects of one case of section "block"."""

    def __init__(self, device: hardware.Device, parameters: dict):
        self.device = device
        self.parameters = parameters
        shape = (parameters["batch"], parameters["context"], parameters["d_model"])
        self.config = ModelConfig(
            "block", "notebook 04", parameters["d_model"], parameters["d_ff"], 1, parameters["num_heads"]
        )
        self.is_compiled = parameters["code"] == "compiled"
        num_blocks = 4 if parameters["part"].startswith("four_blocks") else 1
        if parameters["part"] == "rms_norm":
            self.modules = nn.ModuleList([RMSNorm(parameters["d_model"], device=device.kind)])
        else:
            self.modules = nn.ModuleList(Block(self.config, "eager", device=device.kind) for _ in range(num_blocks))
        self.rotary = RotaryEmbedding(
            self.config.d_head, parameters["context"], self.config.rope_theta, device=device.kind
        )
        self.x_BTC = torch.randn(shape, device=device.kind, requires_grad=True)
        self.grad_out_BTC = torch.randn(shape, device=device.kind)
        self.plan = [2] if parameters["part"].endswith("by_pairs") else []

    def close(self) -> None:
        del self.modules, self.rotary, self.x_BTC, self.grad_out_BTC
        self.__dict__.pop("found", None)
        empty_cache(self.device)

    def forward(self) -> Tensor:
        if self.parameters["part"] == "rms_norm":
            return self.modules[0](self.x_BTC)
        return run_blocks(list(self.modules), self.x_BTC, self.rotary, self.plan)

    def gradients(self) -> list[Tensor]:
        """Returns the gradients of the input and the parameters after a forward and backward pass of their own."""
        wanted = [self.x_BTC, *self.modules.parameters()]
        return list(torch.autograd.grad(self.forward(), wanted, self.grad_out_BTC))

    def measure(self) -> dict[str, Any]:
        metrics: dict[str, Any] = {}
        if self.is_compiled:
            exact = [self.forward().detach(), *self.gradients()]
            for module in self.modules:
                module.compile(backend=COMPILERS[self.device.kind], dynamic=False)
            metrics["relative_difference"] = self._difference([self.forward().detach(), *self.gradients()], exact)
            del exact
        resident = [*self.modules.parameters(), *self.rotary.buffers()]
        self.found, out = residuals(self.forward, self.modules, resident, is_compiled=self.is_compiled)
        metrics |= {
            "num_residuals": len(self.found),
            "num_resident_residuals": sum(residual.is_resident for residual in self.found),
            "num_distinct": sum(residual.is_new for residual in self.found),
            "saved_bytes": saved_bytes(self.found),
            "packed_bytes": packed_bytes(self.found),
            "stream_bytes": out.untyped_storage().nbytes(),
        }
        self.modules.zero_grad()
        out.backward(self.grad_out_BTC)
        del out
        metrics["gradient_bytes"] = _num_bytes([parameter.grad for parameter in self.modules.parameters()])
        self.modules.zero_grad()
        self.x_BTC.grad = None
        usage = measure_usage(self.forward, self.device.kind)
        metrics["made_bytes"] = usage.kept_bytes
        return metrics

    def _difference(self, results: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
        worst = max(
            float((x - reference).norm() / reference.norm()) for x, reference in zip(results, exact, strict=True)
        )
        if not worst <= LARGEST_ERROR["fp32"]:
            raise AssertionError(f"compiled and eager differ by {worst:.2g}, more than {LARGEST_ERROR['fp32']:g}")
        return worst

    def described(self) -> dict[str, Any]:
        """Returns the case as read back from the live objects."""
        batch, context, d_model = self.x_BTC.shape
        num_compiled = sum(module._compiled_call_impl is not None for module in self.modules)
        first = self.modules[0]
        is_block = isinstance(first, Block)
        name = {1: "block", 4: "four_blocks"}[len(self.modules)] if is_block else "rms_norm"
        return {
            "part": f"{name}_by_pairs" if self.plan else name,
            "code": {0: "eager", len(self.modules): "compiled"}.get(num_compiled, f"{num_compiled} compiled"),
            "d_model": d_model,
            "d_ff": first.feed_forward.up_proj.weight.shape[0] if is_block else self.config.d_ff,
            "num_heads": first.attention.num_heads if is_block else self.config.num_heads,
            "context": context,
            "batch": batch,
            "precision": {torch.float32: "fp32"}.get(self.x_BTC.dtype, str(self.x_BTC.dtype)),
        }

    def observed(self) -> dict[str, Any]:
        """Returns the residuals, like ones together."""
        groups: dict[tuple, list[Residual]] = {}
        for residual in self.found:
            where = residual.module.removeprefix("0.") if residual.module != "0" else ""
            shape = " × ".join(map(str, residual.shape))
            key = (residual.operator, where, shape, residual.dtype, residual.is_resident)
            groups.setdefault(key, []).append(residual)
        names = ("operator", "module", "shape", "dtype", "is_resident")
        seen: dict[str, Any] = {
            "memory_source": _source(self.device.kind),
            "residuals": [
                {
                    **dict(zip(names, key, strict=True)),
                    "count": len(group),
                    "num_distinct": sum(residual.is_new for residual in group),
                    "saved_bytes": saved_bytes(group),
                }
                for key, group in groups.items()
            ],
        }
        if self.is_compiled:
            counters = torch._dynamo.utils.counters
            seen["compiler"] = COMPILERS[self.device.kind]
            seen["num_replacements"] = counters["inductor"]["fuse_attention"]
        return seen


# ---- recomputing -----------------------------------------------------------------------------------------------------


def _measure_checkpointing(workload: RecomputingWorkload, case: Case, phase: str, built: Usage) -> Measured:
    """Times a training step and takes its peak; before that, the gradients are held against those kept whole."""
    kind = workload.device.kind
    difference = _gradient_difference(workload)
    num_forwards = _count_block_forwards(workload)  # also the first step, which makes the optimizer's state
    workload.model.zero_grad()
    resident = _num_bytes(workload.resident())
    added = measure_usage(workload.train_step, kind).peak_bytes
    peak = torch.cuda.max_memory_allocated() if kind == "cuda" else resident + added
    workload.model.zero_grad()
    other = torch.cuda.memory_allocated() - resident if kind == "cuda" else 0
    with hardware.GpuMonitor(kind) as monitor:  # two steps have run: there is nothing left to warm up
        timing = time_callable(
            workload.train_step, device_kind=kind, num_warmup=0, min_samples=3, max_samples=20,
            time_limit_s=case.time_limit_s,
        )  # fmt: skip
    return Measured(
        metrics={
            **timing.metrics(),
            "peak_bytes": peak,
            "resident_bytes": resident,
            "other_bytes": other,
            "device_bytes": _memory_bytes(workload.device),
            "forwards_per_block": num_forwards,
            "gradient_relative_difference": difference,
        },
        case={**workload.described(), "plan": _plan_text(workload, num_forwards)},
        observed={**workload.observed(), "memory_source": _source(kind)},
        samples={"step_ms": list(timing.samples_ms)} if timing.n <= 20 else {},
        timer=timing.description(),
        telemetry=monitor.summary,
    )


def _plan_text(workload: RecomputingWorkload, num_forwards: float) -> str:
    """Returns the plan under its name if the blocks ran as often as it makes them, else what was seen."""
    text = "/".join(map(str, workload.plan)) or "none"
    expected = accounting.checkpoint_forwards(len(workload.model.blocks), workload.plan)
    return text if math.isclose(num_forwards, expected) else f"{text}, but each block ran {num_forwards:g} times"


def _count_block_forwards(workload: RecomputingWorkload) -> float:
    """Returns how often a block's forward pass runs in a training step, on average over the blocks."""
    calls = []
    hooks = [block.register_forward_pre_hook(lambda *_: calls.append(None) and None) for block in workload.model.blocks]
    workload.train_step()
    for hook in hooks:
        hook.remove()
    return len(calls) / len(workload.model.blocks)


def _gradient_difference(workload: RecomputingWorkload) -> float:
    """Returns the largest relative difference of a gradient's norm from that without recomputation, on a short batch.

    Norms, since two sets of gradients of a large model need not fit. Raises AssertionError for a wrong one.
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
    bound = LARGEST_ERROR[workload.precision]
    if not worst <= bound:
        raise AssertionError(f"gradients differ by {worst:.2g} from those without recomputation, more than {bound:g}")
    return worst


# ---- files -----------------------------------------------------------------------------------------------------------

CANARY = "executed"


class _Call:
    """Pickled as a call that would leave a file behind."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


class _Persistent(pickle.Pickler):
    """Writes every string as a reference to something outside the file."""

    def persistent_id(self, obj: Any) -> str | None:
        return obj if isinstance(obj, str) else None


def _measure_snapshot(device: hardware.Device, case: Case) -> Measured:
    """Writes a file of the asked kind, genuine or hostile, and loads it as a path that a reader gives."""
    name = case.parameters["file"]
    with tempfile.TemporaryDirectory() as folder:
        path, canary = Path(folder) / "snapshot.pickle", Path(folder) / CANARY
        expected = _write_snapshot(device, name, path, canary)
        metrics: dict[str, int | None] = {"accepted": 1, "expected_peak_bytes": expected}
        message = ""
        try:
            metrics["peak_bytes"] = read_history(path).peak_bytes
        except SnapshotError as error:
            metrics["accepted"], message = 0, str(error).replace(str(path), path.name).replace(folder, "…")
        metrics["executed"] = int(canary.exists())
    return Measured(metrics=metrics, case={"file": name}, observed={"message": message})


def _write_snapshot(device: hardware.Device, name: str, path: Path, canary: Path) -> int | None:
    """Writes the file; returns the peak in it where it is genuine."""
    plain = {"segments": [], "device_traces": [[]]}
    contents = {
        "calls a function": {**plain, "extra": _Call(canary)},
        "names a class": {**plain, "extra": Path("somewhere")},
        "another pickle": {"weights": [1.0, 2.0]},
    }
    if name == "genuine":
        return _write_genuine(device, path)
    if name in contents:
        path.write_bytes(pickle.dumps(contents[name]))
    elif name == "refers outside":
        with open(path, "wb") as file:
            _Persistent(file).dump(plain)
    elif name == "cut off":
        path.write_bytes(pickle.dumps({**plain, "extra": list(range(1000))})[:-100])
    elif name == "text":
        path.write_text("{'segments': []}\n", encoding="utf-8")
    else:
        raise ValueError(f"unknown file {name!r}; accepted: {', '.join(SNAPSHOT_FILES)}")
    return None


def _write_genuine(device: hardware.Device, path: Path) -> int:
    """Writes a snapshot as PyTorch dumps it; without CUDA, which alone has them, one put together here.

    Three tensors, of which two live at once.
    """
    sizes = (2**20, 3 * 2**20, 2**21)
    if device.kind != "cuda":
        actions = (("alloc", 0), ("alloc", 1), ("free_requested", 0), ("free_completed", 0), ("alloc", 2))
        frames = [{"filename": "/somewhere/made_up.py", "line": 1, "name": "no_device"}]
        trace = [
            {"action": action, "addr": 2**24 * number, "size": sizes[number], "stream": 0, "frames": frames}
            for action, number in actions
        ]
        blocks = [{"size": sizes[number], "requested_size": sizes[number], "state": "active_allocated"}
                  for number in (1, 2)]  # fmt: skip
        segments = [
            {"device": 0, "address": 2**24 * number, "total_size": block["size"], "blocks": [block]}
            for number, block in zip((1, 2), blocks, strict=True)
        ]
        path.write_bytes(pickle.dumps({"segments": segments, "device_traces": [trace]}))
        return sizes[1] + sizes[2]
    empty_cache(device)
    in_use = torch.cuda.memory_stats()["requested_bytes.all.current"]
    torch.cuda.memory._record_memory_history(None)
    torch.cuda.memory._record_memory_history(context="alloc", stacks="python")
    try:
        first, second = (torch.empty(size, dtype=torch.uint8, device="cuda") for size in sizes[:2])
        del first
        third = torch.empty(sizes[2], dtype=torch.uint8, device="cuda")
        torch.cuda.memory._dump_snapshot(str(path))
        del second, third
    finally:
        torch.cuda.memory._record_memory_history(None)
    return in_use + sizes[1] + sizes[2]
