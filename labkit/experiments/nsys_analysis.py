"""Notebook 02: where a step's time goes, kernel by kernel, from captures of Nsight Systems or torch.profiler.

Section "profiles": per size, context, precision and attention one capture of an inference and of a training step.
Under nsys cases of one size share a capture, since starting and reading one costs more than most cases, but no more
than run in about a minute: of a capture that is cut off nothing is recorded. With torch.profiler each phase is
captured in the worker itself.

A step is captured twice, after one step that warms up: first with ranges around every block, norm and part of
attention, then with the phases' ranges alone. Times and launches come from the second, which runs as it would
unmarked; what is inside which range comes from the first.
"""

import contextlib
import functools
import gc
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd
import torch
from torch.overrides import TorchFunctionMode

from labkit import accounting, hardware
from labkit.configs import BATCH_SIZE, NSYS_ANALYSIS, REPOSITORY, NsysAnalysisGrid, model_config, narrowed
from labkit.experiments.benchmarking import Workload
from labkit.experiments.ceilings import empty_cache, require_precision
from labkit.experiments.sweep import Case, Measured, PhaseRun, Skip
from labkit.kernels.attention import what_runs
from labkit.measure import profiling
from labkit.measure.profiling import Nsys, ProfileError, RangeMarker, Trace
from labkit.measure.timing import synchronize
from labkit.models import transformer

__all__ = ["MEASUREMENT_VERSION", "ProfiledCase", "cases", "run_case"]

MEASUREMENT_VERSION = 1

FLASH = "auto"
"""The attention beside eager: labkit's FlashAttention, whichever implementation it takes for these tensors."""

STEP_PHASES = ("inference", "forward", "backward", "optimizer")
"""Ranges that are phases of a step."""

KERNEL_KINDS = ("kernel", "operator")
"""Kinds of launches whose time is kernel time: no copies by the copy engine, no memsets."""

NUM_WARMUP = 1
NUM_CAPTURED = 2
KEPT_KERNELS = 12
"""Kernels that a record keeps of each phase: those with most time, and as many of those that are no matmul."""

CAPTURE_MARGIN_S = 20.0
"""By how much a capture's own limit is below its case's, so that it ends its processes itself."""

LONGEST_CAPTURE_S = 45.0
"""Estimated time of a capture's cases above which it takes no further one along."""

ESTIMATED_TFLOPS = {"fp32": 35.0, "bf16": 200.0}
"""Rates below what captured steps of the largest sizes reached on an H200, for that estimate alone."""

ESTIMATED_CASE_S, ESTIMATED_BYTES_PER_S = 1.5, 25e9
"""What a case took there beside its steps: so long, and the bytes of its parameters at so many a second."""

LARGEST_DIFFERENCE = 1e-2
"""Relative difference of the output with and without ranges above which marking has changed what is computed."""


@dataclass(frozen=True)
class ProfiledCase(Case):
    """A case, and the parameters and phases of those after it that a capture of it takes along."""

    together: tuple[tuple[dict, tuple[str, ...]], ...] = ()


# ---- the cases ---------------------------------------------------------------------------------------------------


def cases(profile: str, device_kind: str, *, sizes: Sequence[str] = (), contexts: Sequence[int] = ()) -> list[Case]:
    """Returns the cases of `profile`, narrowed to `sizes` and `contexts` where these are given.

    Raises ValueError for a size or context that the profile does not have.
    """
    grid = NSYS_ANALYSIS[profile]
    wanted_sizes = narrowed(NSYS_ANALYSIS, profile, "sizes", sizes)
    wanted_contexts = narrowed(NSYS_ANALYSIS, profile, "contexts", contexts)
    return [case for size in wanted_sizes for case in _cases_of(grid, size, wanted_contexts)]


def _cases_of(grid: NsysAnalysisGrid, size: str, contexts: Sequence[int]) -> list[Case]:
    phases = ("inference", "forward_backward" if size in grid.without_optimizer else "train_step")
    found = [
        {"size": size, "context": context, "batch": BATCH_SIZE, "precision": precision, "compile": "none",
         "attention": attention}
        for context in contexts
        for precision in grid.precisions
        for attention in ("eager", FLASH)
        if attention == "eager" or context in grid.flash_contexts.get(precision, ())
    ]  # fmt: skip
    rest = [(parameters, phases) for parameters in found]
    return [
        ProfiledCase(
            "profiles",
            parameters,
            phases,
            grid.case_timeout_s,
            stop_at_failure=True,
            together=tuple(rest[number + 1 :]),
        )
        for number, parameters in enumerate(found)
    ]


def is_timeline(parameters: dict) -> bool:
    """Returns whether a case's training step is kept launch by launch."""
    key = tuple(parameters[name] for name in ("size", "context", "precision", "attention"))
    return any(key in grid.timelines for grid in NSYS_ANALYSIS.values())


def run_case(case: Case, ceilings: dict[str, float]) -> Iterator[PhaseRun]:
    """Yields each phase of `case` with the function that measures it. Runs in the worker process."""
    device = hardware.detect()
    _freeze()
    require_precision(device, case.parameters["precision"])
    nsys = Nsys.find() if device.kind == "cuda" else None
    if nsys:
        for phase in case.phases:
            yield phase, functools.partial(_from_shared_capture, nsys, device, case, phase)
        return
    with _workload(device, case.parameters) as workload:
        for phase in case.phases:
            yield phase, functools.partial(_capture_here, workload, case, phase)


def require_room(device: hardware.Device, parameters: dict, phase: str) -> None:
    """Raises Skip for what cannot fit: parameters, gradients, optimizer state and what backward needs are too much.

    A lower bound, so that what might fit is tried: of the activations' closed form (fp32, eager) bf16 autocast keeps
    at least half, but one and a half times the probabilities, in fp32 for the softmax and in bf16 for the product;
    FlashAttention keeps none.
    """
    if device.kind != "cuda" or phase == "inference":
        return
    config = model_config(parameters["size"])
    batch, context = parameters["batch"], parameters["context"]
    probabilities = 4 * batch * config.num_heads * context * context * config.num_layers
    masks = context * context * config.num_layers
    others = accounting.activation_bytes(config, batch, context) - probabilities - masks
    is_bf16 = parameters["precision"] == "bf16"
    needed = 2 * accounting.parameter_bytes(config) + others // (2 if is_bf16 else 1)
    if parameters["attention"] == "eager":
        needed += masks + (probabilities * 3 // 2 if is_bf16 else probabilities)
    if phase == "train_step":
        needed += accounting.optimizer_state_bytes(config)
    total = torch.cuda.get_device_properties(0).total_memory
    if needed > total:
        raise Skip(f"needs at least {needed / 1e9:.0f} GB by its closed form; the device has {total / 1e9:.0f} GB")


@functools.cache
def _freeze() -> None:
    """Takes what lives by now, the imported modules above all, out of later collections: every case makes some."""
    gc.collect()
    gc.freeze()


# ---- a step, marked ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _workload(device: hardware.Device, parameters: dict) -> Iterator[Workload]:
    workload = Workload(device, parameters)
    try:
        yield workload
    finally:
        del workload.model
        workload.__dict__.pop("optimizer", None)
        empty_cache(device)


_PARTS = {"matmul": "scores", "mul": "scores", "softmax": "softmax"}
_LAUNCHES_NOTHING = ("transpose", "dim", "__get__", "size")


class _AttentionParts(TorchFunctionMode):
    """Opens a range around each function of the attention formula while it is active.

    The first product and the scaling make the scores, the second product is that with the values; what is neither
    product, scaling nor softmax is the mask's.
    """

    def __init__(self, marker: RangeMarker):
        super().__init__()
        self.marker = marker
        self.after_softmax = False

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = func.__name__
        if name in _LAUNCHES_NOTHING:
            return func(*args, **(kwargs or {}))
        part = "value product" if self.after_softmax and name == "matmul" else _PARTS.get(name, "mask")
        self.after_softmax |= part == "softmax"
        with self.marker(part):
            return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def marked(workload: Workload, marker: RangeMarker) -> Iterator[None]:
    """Marks blocks, norms, attention and its parts, feed-forward, embedding and head while the block runs.

    Attention is wrapped under the name by which the model finds it, so what is computed stays the same functions.
    """
    model, handles = workload.model, []

    def around(module: torch.nn.Module, name: str) -> None:
        handles.append(module.register_forward_pre_hook(lambda *_: marker.open(name)))
        handles.append(module.register_forward_hook(lambda *_: marker.close(), always_call=True))

    def around_backward(module: torch.nn.Module, name: str) -> None:
        handles.append(module.register_full_backward_pre_hook(lambda *_: marker.open(name)))
        handles.append(module.register_full_backward_hook(lambda *_: marker.close()))

    def attention(*tensors: torch.Tensor, causal: bool) -> torch.Tensor:
        parts = _AttentionParts(marker) if impl == "eager" else contextlib.nullcontext()
        with marker("core"), parts:
            return original(*tensors, causal=causal)

    for number, block in enumerate(model.blocks):
        around(block, f"block {number}")
        around_backward(block, f"block {number}")
        around(block.attention, "attention")
        around(block.feed_forward, "feed-forward")
        around(block.attention_norm, "norm")
        around(block.feed_forward_norm, "norm")
    around(model.embedding, "embedding")
    around(model.norm, "norm")
    around(model.head, "head")
    impl = model.blocks[0].attention.attention
    original, transformer.ATTENTION[impl] = transformer.ATTENTION[impl], attention
    try:
        yield
    finally:
        transformer.ATTENTION[impl] = original
        for handle in handles:
            handle.remove()


@dataclass(frozen=True)
class Step:
    """What the host saw of one captured step.

    Attributes:
        issued_ms, done_ms: from the start of the step until all work was issued and until all was done, host clock.
        outcome: mean and root mean square of the logits, or the loss.
    """

    issued_ms: float
    done_ms: float
    outcome: list[float]


def _run(workload: Workload, phase: str, marker: RangeMarker) -> torch.Tensor:
    """Runs one step with its phases marked; returns the logits of inference, the loss of any other step."""
    if phase == "inference":
        with marker("inference"), torch.no_grad(), workload.autocast():
            return workload.model(workload.tokens)
    if phase == "train_step":
        workload.optimizer.zero_grad()
    with marker("forward"):
        loss = workload.forward()
    with marker("backward"):
        loss.backward()
    if phase == "train_step":
        with marker("optimizer"):
            workload.optimizer.step()
    return loss.detach()


def capture_steps(workload: Workload, phase: str, marker: RangeMarker, label: str) -> list[Step]:
    """Runs the two captured steps of a phase, "<label> step 0" with every range and "<label> step 1" with the phases'.

    The warm-up is `warm_up`'s, before.

    Raises AssertionError if marking changed the output, or the loss is no number.
    """
    kind, steps = workload.device.kind, []
    for number in range(NUM_CAPTURED):
        if phase == "forward_backward":
            workload.model.zero_grad()
        synchronize(kind)
        begin = time.perf_counter()
        with marked(workload, marker) if number == 0 else contextlib.nullcontext(), marker(f"{label} step {number}"):
            result = _run(workload, phase, marker)
            issued = time.perf_counter()
            synchronize(kind)
            done = time.perf_counter()
        steps.append(Step(1e3 * (issued - begin), 1e3 * (done - begin), _summary(result)))
        del result
    _check(steps, phase)
    return steps


def warm_up(workload: Workload, phase: str) -> None:
    """Runs the phase's uncaptured steps, on memory that no earlier phase holds."""
    workload.model.zero_grad()
    empty_cache(workload.device)
    for _ in range(NUM_WARMUP):
        _run(workload, phase, RangeMarker("none"))
        if phase == "forward_backward":
            workload.model.zero_grad()


def _summary(result: torch.Tensor) -> list[float]:
    if result.dim() == 0:
        return [float(result)]
    return [float(result.float().mean()), float(result.float().square().mean().sqrt())]


def _check(steps: Sequence[Step], phase: str) -> None:
    values = [value for step in steps for value in step.outcome]
    if not all(math.isfinite(value) for value in values):
        raise AssertionError(f"{phase}: the result is {values}")
    if phase == "train_step":  # the weights differ between its steps
        return
    scale = max(abs(value) for value in values)
    for with_ranges, without in zip(steps[0].outcome, steps[1].outcome, strict=True):
        if abs(with_ranges - without) > LARGEST_DIFFERENCE * scale:
            raise AssertionError(f"{phase}: marking ranges changed the result from {without:g} to {with_ranges:g}")


def _observed(workload: Workload) -> dict:
    """Returns what else there is to know of the live objects, among it which attention "auto" is here."""
    config, impl = workload.model.config, workload.model.blocks[0].attention.attention
    dtype = torch.bfloat16 if workload.precision == "bf16" else torch.float32
    like_queries = torch.empty((1, 1, 1, config.d_head), dtype=dtype, device=workload.device.kind)
    attention_runs = what_runs(impl, like_queries, like_queries, causal=True)
    return {**workload.observed(), "attention_runs": attention_runs}


# ---- a capture in this process ---------------------------------------------------------------------------------------


def _capture_here(workload: Workload, case: Case, phase: str) -> Measured:
    """Captures one phase by torch.profiler."""
    device, marker, steps = workload.device, RangeMarker("kineto"), []
    require_room(device, case.parameters, phase)
    warm_up(workload, phase)
    with hardware.GpuMonitor(device.kind) as monitor:
        trace = profiling.capture_with_kineto(
            lambda: steps.extend(capture_steps(workload, phase, marker, "case")), device.kind
        )
    answer = {"case": workload.described(), "observed": _observed(workload), "steps": [vars(step) for step in steps]}
    return replace(_measured(_Capture.of(trace), "case", answer), telemetry=monitor.summary)


# ---- a capture of another process ------------------------------------------------------------------------------------

_captured: dict[str, Callable[[], Measured]] = {}
"""Results that this worker has from a shared capture and that no case has asked for yet, by case and phase."""


def _key(parameters: dict, phase: str) -> str:
    return json.dumps([parameters, phase], sort_keys=True)


def _from_shared_capture(nsys: Nsys, device: hardware.Device, case: ProfiledCase, phase: str) -> Measured:
    """Returns the measurement of a phase, from a capture of this case and of some after it if there is none yet."""
    require_room(device, case.parameters, phase)
    if _key(case.parameters, phase) not in _captured:
        remaining = case.phases[case.phases.index(phase) :]
        group = group_to_capture(device, [(case.parameters, remaining), *case.together])
        _captured.clear()
        _captured.update(_capture_group(nsys, device, group, case.timeout_s))
    return _captured.pop(_key(case.parameters, phase))()


def group_to_capture(device: hardware.Device, group: Sequence[tuple[dict, tuple[str, ...]]]) -> list:
    """Returns the first of these cases, and those after it while the estimate stays within LONGEST_CAPTURE_S.

    Phases that cannot fit are left out, and so are cases that have no other.
    """
    taken, total = [], 0.0
    for parameters, phases in group:
        fitting = tuple(phase for phase in phases if _has_room(device, parameters, phase))
        if not fitting:
            continue
        total += estimated_s(parameters, fitting)
        if taken and total > LONGEST_CAPTURE_S:
            break
        taken.append((parameters, fitting))
    return taken


def _has_room(device: hardware.Device, parameters: dict, phase: str) -> bool:
    try:
        require_room(device, parameters, phase)
    except Skip:
        return False
    return True


def estimated_s(parameters: dict, phases: Sequence[str]) -> float:
    """Returns about how long a case takes in a capture: to build it, and each phase's warm-up and captured steps."""
    config = model_config(parameters["size"])
    flops = sum(
        accounting.phase_flops(config, parameters["batch"], parameters["context"], phase, causal=False)
        for phase in phases
    )
    steps_s = (NUM_WARMUP + NUM_CAPTURED) * flops / (1e12 * ESTIMATED_TFLOPS[parameters["precision"]])
    return ESTIMATED_CASE_S + accounting.parameter_bytes(config) / ESTIMATED_BYTES_PER_S + steps_s


def _capture_group(nsys: Nsys, device: hardware.Device, group: Sequence, timeout_s: float) -> dict[str, Callable]:
    """Captures the steps of many cases in one process; returns what gives each measurement, or raises its failure."""
    asked_for = [(parameters, phase) for parameters, phases in group for phase in phases]
    requests = [
        {"label": f"case {number}", "parameters": parameters, "phase": phase}
        for number, (parameters, phase) in enumerate(asked_for)
    ]
    with tempfile.TemporaryDirectory(prefix="labkit-requests-") as folder:
        asked, answered = Path(folder) / "requests.json", Path(folder) / "answers.jsonl"
        asked.write_text(json.dumps(requests), encoding="utf-8")
        command = [sys.executable, "-m", __name__, str(asked), str(answered)]
        paths = [str(REPOSITORY), profiling.allowed_environment().get("PYTHONPATH", "")]
        variables = {"PYTHONPATH": ":".join(path for path in paths if path)}
        trace, failure = None, ""
        with hardware.GpuMonitor(device.kind) as monitor:
            try:
                trace = nsys.capture(command, timeout_s=timeout_s - CAPTURE_MARGIN_S, variables=variables)
            except ProfileError as error:
                failure = str(error)
        telemetry = {name: value for name, value in monitor.summary.items() if name != "foreign_processes"}
        lines = answered.read_text(encoding="utf-8").splitlines() if answered.exists() else []
    answers = [json.loads(line) for line in lines]
    if not answers:
        raise ProfileError(failure or "the captured process ended before its first step")
    if trace is None and any(answer["status"] == "ok" for answer in answers):
        raise ProfileError(failure)
    capture = _Capture.of(trace) if trace else None
    return {
        _key(answer["parameters"], answer["phase"]): functools.partial(_outcome, capture, answer, telemetry)
        for answer in answers
    }


def _outcome(capture: "_Capture | None", answer: dict, telemetry: dict) -> Measured:
    if answer["status"] == "oom":
        raise torch.OutOfMemoryError(answer["reason"])
    if answer["status"] != "ok":
        raise RuntimeError(answer["reason"])
    return replace(_measured(capture, answer["label"], answer), telemetry=telemetry)


def serve(requests: Sequence[dict], answer: Callable[[dict], None], device: hardware.Device) -> None:
    """Runs the requested steps one after the other with NVTX ranges; ends after the first failure.

    Args:
        requests: label, parameters and phase of each; those of one case follow one another.
        answer: called with each request's answer as soon as there is one.
        device: to run on.
    """
    marker = RangeMarker("nvtx" if device.kind == "cuda" else "none")
    parameters, stack = None, contextlib.ExitStack()
    with stack:
        for request in requests:
            try:
                if request["parameters"] != parameters:
                    stack.close()
                    parameters = request["parameters"]
                    workload = stack.enter_context(_workload(device, parameters))
                warm_up(workload, request["phase"])
                steps = capture_steps(workload, request["phase"], marker, request["label"])
                found = {"case": workload.described(), "observed": _observed(workload)}
                answer({**request, **found, "status": "ok", "steps": [vars(step) for step in steps]})
            except Exception as error:
                status = "oom" if isinstance(error, torch.OutOfMemoryError) else "error"
                reason = f"{error}".split("\n")[0][:500]
                answer({**request, "status": status, "reason": reason})
                return  # what it left behind must not reach the next case


# ---- from a capture to a record ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Capture:
    """A capture by its steps.

    Attributes:
        source, version: as of the Trace.
        totals: kernel time of the whole capture: as it adds it up itself, in any range by the table, outside of all.
        steps: rows of `profiling.launches` by the outermost range.
    """

    source: str
    version: str
    totals: dict[str, float]
    steps: dict[str, pd.DataFrame]

    @classmethod
    def of(cls, trace: Trace) -> "_Capture":
        table = profiling.launches(trace, STEP_PHASES)
        kernels = table[table["kind"].isin(KERNEL_KINDS)]
        is_outside = kernels["range"] == profiling.OUTSIDE
        totals = {
            "capture_kernel_ms": trace.total_ns / 1e6,
            "capture_in_ranges_ms": kernels.loc[~is_outside, "duration_ns"].sum() / 1e6,
            "capture_outside_us": kernels.loc[is_outside, "duration_ns"].sum() / 1e3,
        }
        outermost = [path[0] if path else profiling.OUTSIDE for path in table["path"]]
        return cls(trace.source, trace.version, totals, dict(iter(table.groupby(outermost))))


def _measured(capture: _Capture, label: str, answer: dict) -> Measured:
    """Returns the measurement of one phase: its metrics, and in `observed` its tables by kernel, class and range."""
    names = [f"{label} step {number}" for number in range(NUM_CAPTURED)]
    if missing := [name for name in names if name not in capture.steps]:
        raise ProfileError(f"the capture holds no launch in the range '{missing[0]}'")
    with_ranges, plain = (capture.steps[name] for name in names)
    kernels = plain[plain["kind"].isin(KERNEL_KINDS)]
    steps = [Step(**step) for step in answer["steps"]]
    metrics = {
        **_times(plain, "step"),
        "num_launches": len(kernels),
        "num_casts": int(kernels["name"].map(profiling.is_cast).sum()),
        "issued_ms": steps[1].issued_ms,
        "done_ms": steps[1].done_ms,
        "done_with_ranges_ms": steps[0].done_ms,
        "num_launches_with_ranges": int(with_ranges["kind"].isin(KERNEL_KINDS).sum()),
        **capture.totals,
    }
    for phase in STEP_PHASES:
        if len(rows := plain[plain["phase"] == phase]):
            metrics |= _times(rows, phase)
    tables = {
        "kernels": _columns(_kept_kernels(kernels)),
        "classes": _columns(profiling.statistics_by(kernels, ["phase", "kernel_class"])),
        "ranges": _columns(_by_range(with_ranges, label)),
    }
    if is_timeline(answer["case"]) and "backward" in set(plain["phase"]):
        tables["timeline"] = _timeline(with_ranges)
    return Measured(
        metrics=metrics,
        case=answer["case"],
        observed={
            **answer["observed"],
            "tables": tables,
            "profiler": capture.source,
            "profiler_version": capture.version,
        },
        timer={"method": capture.source, "num_warmup": NUM_WARMUP},
    )


def _times(rows: pd.DataFrame, name: str) -> dict[str, float]:
    """Returns the time of these launches' kernels, that from the first's start to the last's end, and the idle part."""
    projected = rows["end_ns"].max() - rows["start_ns"].min()
    kernels = rows[rows["kind"].isin(KERNEL_KINDS)]
    return {
        f"{name}_kernel_ms": kernels["duration_ns"].sum() / 1e6,
        f"{name}_projected_ms": projected / 1e6,
        f"{name}_idle_fraction": 1 - profiling.busy_ns(rows) / projected,
    }


def _kept_kernels(kernels: pd.DataFrame) -> pd.DataFrame:
    """Returns the kernels with most time, and with most that are no matmul, of each phase and of a step of several."""
    kept = []
    by_phase = list(kernels.groupby("phase", sort=False))
    for phase, rows in by_phase if len(by_phase) == 1 else [("step", kernels), *by_phase]:
        found = profiling.statistics_by(rows, ["short_name", "kernel_class"])
        others = found[found["kernel_class"] != "matmul"].head(KEPT_KERNELS)
        top = found[(found.index < KEPT_KERNELS) | found.index.isin(others.index)]
        kept.append(top.assign(phase=phase))
    return pd.concat(kept, ignore_index=True)


def _by_range(rows: pd.DataFrame, label: str) -> pd.DataFrame:
    """Returns the kernels' time by path of ranges below the step, the blocks together, and class."""
    kernels = rows[rows["kind"].isin(KERNEL_KINDS)]
    paths = {}
    for path in kernels["path"].unique():
        below = path[path.index(f"{label} step 0") + 1 :]
        paths[path] = "/".join("block" if name.startswith("block ") else name for name in below) or profiling.OUTSIDE
    found = profiling.statistics_by(kernels.assign(path=kernels["path"].map(paths)), ["path", "kernel_class"])
    return found[["path", "kernel_class", "launches", "total_us"]]


def _timeline(rows: pd.DataFrame) -> dict[str, list]:
    """Returns every launch of a step: start and duration (µs), class, stream, phase and block (−1 for none).

    Classes and phases are numbers; `class_names` and `phase_names` say of what.
    """
    blocks = {path: next((int(n[6:]) for n in path if n.startswith("block ")), -1) for path in rows["path"].unique()}
    start = rows["start_ns"].min()
    return {
        "class_names": list(profiling.CLASSES),
        "phase_names": list(STEP_PHASES),
        "start_us": [round((value - start) / 1e3, 2) for value in rows["start_ns"]],
        "duration_us": [round(value / 1e3, 2) for value in rows["end_ns"] - rows["start_ns"]],
        "kernel_class": [profiling.CLASSES.index(name) for name in rows["kernel_class"]],
        "stream": [int(stream) for stream in rows["stream"]],
        "phase": [STEP_PHASES.index(phase) if phase in STEP_PHASES else -1 for phase in rows["phase"]],
        "block": [blocks[path] for path in rows["path"]],
    }


def _columns(frame: pd.DataFrame) -> dict[str, list]:
    """Returns a table by columns as JSON takes it, times to a hundredth of a microsecond."""
    return {
        name: [None if isinstance(value, float) and math.isnan(value) else value for value in column.tolist()]
        for name, column in frame.round(2).items()
    }


# ---- the captured process -------------------------------------------------------------------------------------------


def main(arguments: Sequence[str]) -> None:
    """Serves the requests of a file, in the process that nsys has started: requests.json answers.jsonl."""
    asked, answered = map(Path, arguments)
    with answered.open("a", encoding="utf-8") as file:

        def answer(content: dict) -> None:
            file.write(json.dumps(content) + "\n")
            file.flush()

        _freeze()
        serve(json.loads(asked.read_text(encoding="utf-8")), answer, hardware.detect())
    gc.unfreeze()  # or its modules are reported as leaks when the process ends


if __name__ == "__main__":
    main(sys.argv[1:])
