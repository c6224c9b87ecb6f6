"""Notebook 01: how long the phases of training take, warm-up, precision, compilation, distance to the limit.

Sections: "ceilings" (matrix product and copy rates, measured anew each session), "timer" (the timer's
methods against one another and an independent measurement), "steps" (every phase, size, context and
precision, eager), "warmup" (every step from a fresh process), "compile" (torch.compile).
"""

import contextlib
import functools
import importlib
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from labkit import accounting, hardware
from labkit.configs import (
    BATCH_SIZE,
    BENCHMARKING,
    COMPILE_MODES,
    COMPILE_PHASES,
    PHASES,
    SIZES,
    WARMUP_COUNTS,
    WARMUP_MEASURED_STEPS,
    WARMUP_PHASES,
    BenchmarkingGrid,
    model_config,
    narrowed,
)
from labkit.experiments.ceilings import (
    CEILING_SIZES,
    CEILING_TIME_S,
    COPY_BYTES,
    ceiling_cases,
    ceiling_name,
    ceiling_value,
    copy_buffers,
    copy_rate,
    empty_cache,
    measure_ceiling,
    require_precision,
)
from labkit.experiments.sweep import Case, Measured, PhaseRun
from labkit.measure.timing import Timing, synchronize, time_callable
from labkit.models.transformer import TransformerLM, language_model_loss

__all__ = ["CEILING_SIZES", "COPY_BYTES", "Workload", "cases", "ceiling_name", "ceiling_value", "run_case"]
"""With what a session takes from every experiment, and the sizes that its tests make small."""

MEASUREMENT_VERSION = 2
"""2: the timer's interval of the median has the 95 % it states; in version 1 it was one order statistic too
narrow on each side and held at least 88 %."""

STANDING_VERSIONS = (1,)
"""Versions that a resumed run need not measure again: their times were taken in the same way, and the report
states the interval that they reach."""

ATTENTION = "eager"
"""Scores materialised, as in the published figures that stand beside ours."""

TIMER_PHASES = {"cuda": ("window", "graph", "flush", "independent"), "mps": ("host", "independent"),
                "cpu": ("host", "independent")}  # fmt: skip


# ---- the cases ---------------------------------------------------------------------------------------------


def cases(profile: str, device_kind: str, *, sizes: Sequence[str] = (), contexts: Sequence[int] = ()) -> list[Case]:
    """Returns the cases of `profile`, narrowed to `sizes` and `contexts` where these are given.

    Raises ValueError for a size or context that the profile does not have.
    """
    grid = BENCHMARKING[profile]
    wanted_sizes = narrowed(BENCHMARKING, profile, "sizes", sizes)
    wanted_contexts = narrowed(BENCHMARKING, profile, "contexts", contexts)
    return [
        *ceiling_cases(grid.precisions, grid.case_timeout_s),
        Case("timer", {"kind": "negate"}, TIMER_PHASES[device_kind], grid.case_timeout_s),
        *_warmup_cases(grid, wanted_sizes, wanted_contexts),
        *_step_cases(grid, wanted_sizes, wanted_contexts),
        *_compile_cases(grid, wanted_sizes, wanted_contexts),
    ]


def _parameters(size: str, context: int, precision: str, compile_mode: str = "none") -> dict:
    return {
        "size": size,
        "context": context,
        "batch": BATCH_SIZE,
        "precision": precision,
        "compile": compile_mode,
        "attention": ATTENTION,
    }


def _step_cases(grid: BenchmarkingGrid, sizes: Sequence[str], contexts: Sequence[int]) -> list[Case]:
    return [
        Case("steps", _parameters(size, context, precision), PHASES, grid.case_timeout_s, grid.time_limit_s)
        for size in sizes
        for context in contexts
        for precision in grid.precisions
    ]


def _warmup_cases(grid: BenchmarkingGrid, sizes: Sequence[str], contexts: Sequence[int]) -> list[Case]:
    return [
        Case("warmup", _parameters(size, context, "fp32"), (phase,), grid.case_timeout_s, fresh_process=True)
        for size in sizes
        for context in grid.warmup_contexts
        if context in contexts
        for phase in WARMUP_PHASES
    ]


def _compile_cases(grid: BenchmarkingGrid, sizes: Sequence[str], contexts: Sequence[int]) -> list[Case]:
    return [
        Case(
            "compile", _parameters(size, context, precision, mode), COMPILE_PHASES, grid.case_timeout_s,
            grid.time_limit_s, stop_at_failure=True,
        )
        for size in grid.compile_sizes
        if size in sizes
        for context in grid.compile_contexts
        if context in contexts
        for precision in grid.compile_precisions
        for mode in COMPILE_MODES[1:]
        if mode == "regional" or size in grid.whole_compile_sizes
    ]  # fmt: skip


# ---- running one -------------------------------------------------------------------------------------------


def run_case(case: Case, ceilings: dict[str, float]) -> Iterator[PhaseRun]:
    """Yields each phase of `case` with the function that measures it. Runs in the worker process."""
    device = hardware.detect()
    if case.section == "ceilings":
        yield "rate", functools.partial(measure_ceiling, device, case)
    elif case.section == "timer":
        for phase in case.phases:
            yield phase, functools.partial(_measure_timer, device, phase)
    else:
        with _workload(device, case) as workload:
            for phase in case.phases:
                yield phase, functools.partial(_measure_phase, workload, case, phase, ceilings)


class Workload:
    """The live objects of one case: model, optimizer and data, and the phases as callables.

    `described` and `observed` read back what runs from the objects themselves, so that a record says what
    ran and not what was asked for.
    """

    def __init__(self, device: hardware.Device, parameters: dict):
        self.device = device
        self.precision = parameters["precision"]
        config = model_config(parameters["size"])
        torch.manual_seed(0)
        self.model = TransformerLM(
            config, max_context=parameters["context"], attention=parameters["attention"], device=device.kind
        )
        shape = (parameters["batch"], parameters["context"])
        self.tokens, self.targets = (torch.randint(config.vocab_size, shape, device=device.kind) for _ in range(2))
        torch.set_float32_matmul_precision("high" if self.precision == "tf32" else "highest")
        if parameters["compile"] == "whole":
            self.model.compile()
        elif parameters["compile"] == "regional":
            for block in self.model.blocks:
                block.compile()

    @functools.cached_property
    def optimizer(self) -> torch.optim.Optimizer:
        """AdamW, fused where this device has it. Made at first use: its state is what does not fit first."""
        try:
            return torch.optim.AdamW(self.model.parameters(), fused=True)
        except RuntimeError:
            return torch.optim.AdamW(self.model.parameters())

    def autocast(self) -> contextlib.AbstractContextManager:
        return torch.autocast(self.device.kind, torch.bfloat16, enabled=self.precision == "bf16")

    def inference(self) -> None:
        with torch.no_grad(), self.autocast():
            self.model(self.tokens)

    def forward(self) -> torch.Tensor:
        with self.autocast():
            return language_model_loss(self.model(self.tokens), self.targets)

    def forward_backward(self) -> None:
        self.forward().backward()

    def train_step(self) -> None:
        self.optimizer.zero_grad()
        self.forward_backward()
        self.optimizer.step()

    def zero_grad(self) -> tuple:
        self.model.zero_grad()
        return ()

    def forward_for_backward(self) -> tuple:
        self.model.zero_grad()
        return (self.forward(),)

    def time_phase(self, phase: str, **limits) -> Timing:
        """Returns the times of one phase. Only the phase itself is timed: what it needs is made before."""
        measure = functools.partial(time_callable, device_kind=self.device.kind, **limits)
        if phase == "inference":
            return measure(self.inference)
        if phase == "forward":
            return measure(self.forward)
        if phase == "backward":
            return measure(torch.Tensor.backward, inputs=self.forward_for_backward)
        if phase == "forward_backward":
            return measure(self.forward_backward, inputs=self.zero_grad)
        if phase == "optimizer_step":
            self.forward_for_backward()[0].backward()
            return measure(self.optimizer.step)
        if phase == "train_step":
            return measure(self.train_step)
        raise ValueError(f"unknown phase {phase!r}; accepted: {', '.join(PHASES)}")

    def live_precision(self) -> str:
        """Returns the precision as autocast and the setting of matrix products have it."""
        with self.autocast():
            if torch.is_autocast_enabled(self.device.kind):
                return {torch.bfloat16: "bf16"}[torch.get_autocast_dtype(self.device.kind)]
            return {"highest": "fp32", "high": "tf32"}[torch.get_float32_matmul_precision()]

    def described(self) -> dict:
        """Returns the case as read back from the live objects."""
        model, (batch, context) = self.model, self.tokens.shape
        dims = (
            model.embedding.weight.shape[1],
            model.blocks[0].feed_forward.up_proj.weight.shape[0],
            len(model.blocks),
            model.blocks[0].attention.num_heads,
        )
        names = [c.name for c in SIZES.values() if (c.d_model, c.d_ff, c.num_layers, c.num_heads) == dims]
        whole_compiled = model._compiled_call_impl is not None
        num_compiled = sum(block._compiled_call_impl is not None for block in model.blocks)
        regional = {0: "none", len(model.blocks): "regional"}.get(num_compiled, f"{num_compiled} blocks")
        attention = sorted({block.attention.attention for block in model.blocks})
        return {
            "size": names[0] if names else str(dims),
            "context": context,
            "batch": batch,
            "precision": self.live_precision(),
            "compile": "whole" if whole_compiled else regional,
            "attention": " and ".join(attention),
        }

    def observed(self) -> dict:
        """Returns what else there is to know of the live objects."""
        seen = {
            "num_parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "parameter_dtype": str(self.model.head.weight.dtype).removeprefix("torch."),
        }
        if "optimizer" in self.__dict__:
            seen["optimizer"] = type(self.optimizer).__name__
            seen["optimizer_fused"] = bool(self.optimizer.defaults.get("fused"))
        return seen


@contextlib.contextmanager
def _workload(device: hardware.Device, case: Case) -> Iterator[Workload]:
    require_precision(device, case.parameters["precision"])
    workload = Workload(device, case.parameters)
    try:
        yield workload
    finally:
        del workload.model
        workload.__dict__.pop("optimizer", None)
        if case.parameters["compile"] != "none":  # importing the compiler to reset it takes seconds
            torch.compiler.reset()
        empty_cache(device)


def _measure_phase(workload: Workload, case: Case, phase: str, ceilings: dict[str, float]) -> Measured:
    device = workload.device
    limits: dict = {"time_limit_s": case.time_limit_s}
    if case.section == "warmup":
        num_steps = max(WARMUP_COUNTS) + WARMUP_MEASURED_STEPS
        limits = {"num_warmup": 0, "min_samples": num_steps, "max_samples": num_steps, "time_limit_s": 5.0}
    workload.model.zero_grad()
    empty_cache(device)
    if device.kind == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with hardware.GpuMonitor(device.kind) as monitor:
        if phase == "compile":
            timing = _time_first_call(workload)
        else:
            timing = workload.time_phase(phase, **limits)
    metrics = {**timing.metrics(), **_efficiency(workload, case, phase, timing, ceilings)}
    if device.kind == "cuda":
        metrics["peak_bytes"] = torch.cuda.max_memory_allocated()
    samples = {"step_ms": list(timing.samples_ms)}
    if timing.launch_ms:
        samples["host_ms"] = list(timing.host_ms)
    return Measured(
        metrics=metrics,
        case=workload.described(),
        observed=workload.observed(),
        samples=samples if case.section == "warmup" or timing.n <= 20 else {},
        timer=timing.description(),
        telemetry=monitor.summary,
    )


def load_compiler(device: hardware.Device) -> None:
    """Imports the compiler and, on a CPU, lets it try the instruction sets: neither is compiling.

    What it finds is kept on this machine, as long as its caches have not been disabled before.
    """
    importlib.import_module("torch._inductor.compile_fx")
    if device.kind == "cpu":
        importlib.import_module("torch._inductor.cpu_vec_isa").valid_vec_isa_list()


def _time_first_call(workload: Workload) -> Timing:
    """Returns the time of the first forward and backward, which compiles both; no cache of an earlier run counts."""
    load_compiler(workload.device)
    torch.compiler.config.force_disable_caches = True
    begin = time.perf_counter()
    workload.forward_backward()
    synchronize(workload.device.kind)
    return Timing((1e3 * (time.perf_counter() - begin),), "host", 0, "fixed count")


def _efficiency(workload: Workload, case: Case, phase: str, timing: Timing, ceilings: dict[str, float]) -> dict:
    """Returns rates of a phase and their fractions of the session's ceilings and of the datasheet's peaks."""
    parameters = case.parameters
    config = model_config(parameters["size"])
    batch, context, precision = parameters["batch"], parameters["context"], parameters["precision"]
    seconds = timing.median_ms * 1e-3
    peaks = workload.device.peaks
    if phase == "compile":
        return {}
    if phase == "optimizer_step":
        rate = accounting.optimizer_step_bytes(config) / seconds / 1e9
        ceiling, peak = ceilings.get("copy"), peaks.memory_gb_per_s if peaks else None
        result: dict = {"achieved_gb_per_s": rate}
    else:
        flops = accounting.phase_flops(config, batch, context, phase, causal=False)
        rate = flops / seconds / 1e12
        ceiling, peak = ceilings.get(f"gemm {precision}"), peaks.tflops(precision) if peaks else None
        result = {
            "flops": flops,
            "flops_causal": accounting.phase_flops(config, batch, context, phase, causal=True),
            "achieved_tflops": rate,
            "tokens_per_s": batch * context / seconds,
        }
    result["ceiling"] = ceiling
    result["ceiling_fraction"] = rate / ceiling if ceiling else None
    result["datasheet_fraction"] = rate / peak if peak else None
    return result


# ---- the timer's own truth ------------------------------------------------------------------------------------


def _measure_timer(device: hardware.Device, method: str) -> Measured:
    """A kernel of known bytes by each method of the timer; "independent" shares no code with any of them.

    The kernel reads one buffer and writes its negative to another. It is not `copy_`: that becomes a memcpy
    node in a CUDA graph, which runs on another engine and is another operation to time.

    Independent: thirty calls queued one behind another between two events (or two readings of the host
    clock), divided by thirty. Every method's result is checked bit by bit afterwards.
    """
    target, source = copy_buffers(device)
    target.fill_(float("nan"))
    negate = functools.partial(torch.neg, out=target)
    with hardware.GpuMonitor(device.kind) as monitor:
        if method == "independent":
            samples = [_time_queued_calls(device, negate, source, num_calls=30) for _ in range(5)]
            timing = Timing(tuple(samples), "independent", 1, "fixed count")
        else:
            limit = CEILING_TIME_S[device.kind]
            timing = time_callable(
                negate, device_kind=device.kind, inputs=[(source,)], method=method, time_limit_s=limit
            )
    if not torch.equal(target, -source):
        raise AssertionError("the timed kernel's result is wrong")
    return Measured(
        metrics={**timing.metrics(), **copy_rate(device, source, timing.median_ms)},
        case={"kind": "negate"},
        observed={"num_bytes": source.nbytes},
        timer=timing.description(),
        telemetry=monitor.summary,
    )


def _time_queued_calls(device: hardware.Device, function: Callable, source: torch.Tensor, num_calls: int) -> float:
    function(source)
    synchronize(device.kind)
    if device.kind == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
    begin = time.perf_counter()
    for _ in range(num_calls):
        function(source)
    if device.kind == "cuda":
        end.record()
    synchronize(device.kind)
    elapsed_ms = start.elapsed_time(end) if device.kind == "cuda" else (time.perf_counter() - begin) * 1e3
    return elapsed_ms / num_calls
