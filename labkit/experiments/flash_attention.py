"""Notebook 06: FlashAttention against every other implementation, each held to the fp64 oracle before it is timed.

Sections: "ceilings" (measured anew each session), "algorithm" (online softmax on a small case), "weighted_sum" (the
first Triton kernel), "speed" (the grid of lengths and head dimensions), "tiles" (the forward kernel over its tile
sizes), "rivals" (the shapes on which everything is ranked), "memory" (peaks).

A case of "weighted_sum", "speed" and "rivals" is a contest: its phases are "<implementation> <pass>", and the
implementations of one pass are timed in turn, so that a drift of the clocks falls on all of them alike. None is timed
before its output and gradients have passed the gate; one that fails it has an error in place of its times.

Shape suffixes: B batch, H heads, S length, D head dimension.
"""

import abc
import contextlib
import dataclasses
import functools
import gc
import importlib
import time
from collections.abc import Callable, Iterator, Sequence

import torch
import triton.errors
from torch import Tensor

from labkit import accounting, hardware
from labkit.configs import FLASH_ATTENTION, MATERIALISING, PASSES, FlashAttentionGrid, Rivalry, narrowed
from labkit.experiments.ceilings import (
    ceiling_cases,
    ceiling_name,
    ceiling_value,
    empty_cache,
    measure_ceiling,
    require_precision,
)
from labkit.experiments.sweep import SESSION_SECTION, Case, Measured, PhaseRun, Skip
from labkit.kernels import flash_attention as labkit_flash
from labkit.kernels.attention import OUR_OPTIONS, attention, unavailable_reason, what_runs
from labkit.kernels.flash_attention_tiled import tiled_attention_backward, tiled_attention_forward
from labkit.kernels.flash_attention_triton import TileConfig
from labkit.kernels.reference import attention_reference
from labkit.kernels.weighted_sum import weighted_sum
from labkit.measure.timing import (
    GRAPH_REPLAY_MS,
    Comparison,
    Timing,
    compare,
    on_capture_stream,
    synchronize,
    time_callable,
)

__all__ = ["MEASUREMENT_VERSION", "cases", "ceiling_name", "ceiling_value", "run_case"]

MEASUREMENT_VERSION = 2

DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16}

OUTPUT_BUDGET, GRADIENT_BUDGET = 2, 3
"""Largest error against fp64, as a multiple of the eager error in the same dtype and the rounding of a result."""

NUM_BLOCKS = 16
"""Blocks of rows in which errors are judged apart: behind a causal mask the rows shrink as 1/√position, and a largest
difference over all of them would see the first ones only."""

ORACLE_SCORES = 2**27
"""fp64 scores that the oracle holds at once (1 GiB a matrix), whatever the length."""

LAUNCH_LIMIT_MS = 10.0
"""A call that takes longer has no launch to speak of, and its launch is not measured."""

MIN_ROUNDS, MAX_ROUNDS, MAX_RANKING_ROUNDS = 3, 10, 15
"""Samples of each candidate: the fewest, whatever the time limit, and the most; more where candidates are ranked."""

ALGORITHM = {"length": 96, "d_head": 16}
TRACED_QUERIES = 3

COMPILED = ("compiled", "flex")


# ---- the cases ---------------------------------------------------------------------------------------------


def cases(profile: str, device_kind: str, *, lengths: Sequence[int] = (), d_heads: Sequence[int] = ()) -> list[Case]:
    """Returns the cases of `profile`, narrowed to `lengths` and `d_heads` where these are given.

    Raises ValueError for a length or head dimension that the profile does not have.
    """
    grid = FLASH_ATTENTION[profile]
    for parameter, wanted in (("lengths", lengths), ("d_heads", d_heads)):
        narrowed(FLASH_ATTENTION, profile, parameter, wanted)  # rivals and memory have values beside these
    attention_cases = [*_rival_cases(grid), *_speed_cases(grid), *_memory_cases(grid)]
    return [
        *ceiling_cases(tuple(grid.impls), grid.case_timeout_s),
        *_algorithm_cases(grid),
        *_weighted_sum_cases(grid),
        *_tile_cases(grid),
        *(
            case
            for case in attention_cases
            if (not lengths or case.parameters["length"] in lengths)
            and (not d_heads or case.parameters["d_head"] in d_heads)
        ),
    ]


def _shape(shape: Rivalry, precision: str) -> dict:
    return {**dataclasses.asdict(shape), "precision": precision}


def _contest_case(grid: FlashAttentionGrid, section: str, parameters: dict, impls: Sequence[str]) -> Case:
    phases = tuple(f"{impl} {name}" for name in PASSES for impl in impls)
    return Case(section, parameters, phases, grid.case_timeout_s, grid.time_limit_s)


def _algorithm_cases(grid: FlashAttentionGrid) -> list[Case]:
    return [
        Case(
            "algorithm",
            {**ALGORITHM, "tile": tile, "causal": causal, "precision": "fp32"},
            ("errors",) if causal else ("errors", "trace"),
            grid.case_timeout_s,
        )
        for tile in grid.algorithm_tiles
        for causal in (False, True)
    ]


def _weighted_sum_cases(grid: FlashAttentionGrid) -> list[Case]:
    return [
        _contest_case(
            grid, "weighted_sum", {"rows": rows, "dim": dim, "precision": "fp32"}, tuple(_WEIGHTED_SUMS)
        )
        for rows, dim in grid.weighted_sums
    ]  # fmt: skip


def _speed_cases(grid: FlashAttentionGrid) -> list[Case]:
    """Shape by shape, so that one oracle serves what is timed in turn and what is timed alone."""
    found = []
    for precision, impls in grid.impls.items():
        for d_head in grid.d_heads:
            for length in grid.lengths:
                here = [impl for impl in impls if _is_measured(grid, impl, precision, length, d_head)]
                if not here:
                    continue
                in_turn = [impl for impl in here if impl not in MATERIALISING]
                shape = _shape(Rivalry(1, 1, length, d_head, True), precision)
                found.append(_contest_case(grid, "speed", {**shape, "timed": "in turn"}, in_turn))
                for impl in here:
                    if impl in MATERIALISING:
                        found.append(_contest_case(grid, "speed", {**shape, "timed": f"alone: {impl}"}, [impl]))
    return found


def _is_measured(grid: FlashAttentionGrid, impl: str, precision: str, length: int, d_head: int) -> bool:
    for key in (f"{precision} {impl}", impl, precision):
        if key in grid.by_shape:
            return length in grid.by_shape[key].get(d_head, ())
    return impl != "sdpa" or length in grid.short_lengths


def _rival_cases(grid: FlashAttentionGrid) -> list[Case]:
    found = [_contest_case(grid, "rivals", _shape(rivalry, "bf16"), grid.rivals) for rivalry in grid.rivalries]
    return [dataclasses.replace(case, time_limit_s=grid.rivals_time_limit_s) for case in found]


def _tile_cases(grid: FlashAttentionGrid) -> list[Case]:
    names = ("block_q", "block_k", "num_warps", "num_stages")
    return [
        Case(
            "tiles",
            {**_shape(grid.tiles_shape, "bf16"), **dict(zip(names, tile, strict=True))},
            ("forward",),
            grid.case_timeout_s,
            grid.time_limit_s,
        )
        for tile in grid.tiles
    ]


def _memory_cases(grid: FlashAttentionGrid) -> list[Case]:
    return [
        Case(
            "memory",
            {**_shape(Rivalry(1, 1, length, grid.memory_d_head, True), precision), "impl": impl},
            ("forward", "forward_backward"),
            grid.case_timeout_s,
        )
        for precision, impls in grid.memory_impls.items()
        for impl in impls
        for length in grid.memory_lengths
    ]


_MATMUL_PRECISIONS = {"fp32": "highest", "tf32": "high", "bf16": "highest"}


def _precision_of(x: Tensor) -> str:
    """Returns the precision of a case as read back from a tensor and from what PyTorch was told."""
    told = torch.get_float32_matmul_precision()
    return next(name for name, dtype in DTYPES.items() if (dtype, _MATMUL_PRECISIONS[name]) == (x.dtype, told))


# ---- running one -------------------------------------------------------------------------------------------


def run_case(case: Case, ceilings: dict[str, float]) -> Iterator[PhaseRun]:
    """Yields each phase of `case` with the function that measures it. Runs in the worker process."""
    device = hardware.detect()
    if case.section == SESSION_SECTION:
        yield "rate", functools.partial(measure_ceiling, device, case)
        return
    require_precision(device, case.parameters["precision"])
    torch.set_float32_matmul_precision(_MATMUL_PRECISIONS[case.parameters["precision"]])
    if case.section == "algorithm":
        for phase in case.phases:
            yield phase, functools.partial(_measure_algorithm, device, case, phase)
    elif case.section == "tiles":
        yield "forward", functools.partial(_measure_tile, device, case, ceilings)
    elif case.section == "memory":
        yield from _measure_memory(device, case)
    else:
        contest = WeightedSumContest if case.section == "weighted_sum" else AttentionContest
        try:
            yield from _run_contest(contest(device, case, ceilings), case)
        finally:
            if any(phase.split(" ")[0] in COMPILED for phase in case.phases):
                # What is compiled is for one shape: kept, it would only make the look-up of the next longer.
                torch.compiler.reset()
                gc.unfreeze()
            empty_cache(device)


def _run_contest(contest: "Contest", case: Case) -> Iterator[PhaseRun]:
    """Yields the phases of a contest, pass by pass: those that cannot be had first, then those that were timed."""
    wanted = [tuple(phase.split(" ")) for phase in case.phases]
    impls = list(dict.fromkeys(impl for impl, _ in wanted))
    reasons = {impl: contest.unavailable(impl) for impl in impls}
    for impl, name in wanted:
        if reasons[impl]:
            yield f"{impl} {name}", functools.partial(_raise, Skip(reasons[impl]))
    for name in PASSES:
        entrants = [impl for impl in impls if (impl, name) in wanted and not reasons[impl]]
        verdicts = {}
        for impl in entrants:
            try:
                verdicts[impl] = contest.judge(impl, name)
            except Exception as error:
                if len(impls) == 1:
                    raise
                yield f"{impl} {name}", functools.partial(_raise, error)  # ends the process; the next goes on
        if entrants:
            # The timer collects garbage before every sampling; what PyTorch and its compiler keep need not be
            # searched each time, which takes longer than most samplings.
            gc.freeze()
            baseline = contest.baseline
            if baseline not in entrants and not (baseline and _passes(contest, baseline, name)):
                baseline = None
            results = _time_in_turn(contest, name, entrants, baseline, case.time_limit_s)
            for impl in entrants:
                yield f"{impl} {name}", functools.partial(contest.measured, impl, name, results, verdicts[impl])


def _passes(contest: "Contest", impl: str, name: str) -> bool:
    """Whether one that is not among the entrants (it has been measured, or has failed) is right all the same."""
    try:
        contest.judge(impl, name)
    except Exception:
        return False
    return True


def _raise(error: Exception):
    raise error


@dataclasses.dataclass(frozen=True)
class Results:
    """What timing one pass of a contest gave."""

    comparison: Comparison
    launches: dict[str, Timing]
    flushed: dict[str, Timing]
    telemetry: dict
    num_candidates: int


def _time_in_turn(
    contest: "Contest", name: str, impls: Sequence[str], baseline: str | None, time_limit_s: float
) -> Results:
    """Returns the device's times of one pass, all implementations in turn, and the host's of issuing it."""
    kind = contest.device.kind
    calls = {impl: contest.call(impl, name) for impl in dict.fromkeys([*impls, baseline or impls[0]])}
    once_ms = {impl: _time_once(call, kind) for impl, call in calls.items()}
    round_ms = sum(max(time_ms, GRAPH_REPLAY_MS if kind == "cuda" else 0) for time_ms in once_ms.values())
    max_rounds = MAX_RANKING_ROUNDS if contest.is_ranking else MAX_ROUNDS
    num_rounds = max(MIN_ROUNDS, min(max_rounds, int(1e3 * time_limit_s / round_ms)))
    limits = {"baseline": baseline or impls[0], "device_kind": kind, "num_warmup": 1, "num_rounds": num_rounds}
    with hardware.GpuMonitor(kind) as monitor:
        try:
            comparison = compare(calls, method="graph" if kind == "cuda" else "host", **limits)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            if kind != "cuda":
                raise
            # What cannot be captured into a graph is timed call by call; the record names the method.
            comparison = compare(calls, method="flush", **limits)
    few = {"device_kind": kind, "num_warmup": 2, "min_samples": 10, "max_samples": 10}
    launches, flushed = {}, {}
    if kind == "cuda" and name != "backward":  # the host's share of a backward pass is in that of both
        for impl in impls:
            if once_ms[impl] < LAUNCH_LIMIT_MS:
                launches[impl] = time_callable(calls[impl], method="window", **few)
            if contest.is_ranking:
                flushed[impl] = time_callable(calls[impl], method="flush", **few)
    return Results(comparison, launches, flushed, monitor.summary, len(calls))


def _time_once(call: Callable, device_kind: str) -> float:
    """Returns the host's time of one call, which the calls that passed the gate have warmed up, in ms."""
    synchronize(device_kind)
    begin = time.perf_counter()
    call()
    synchronize(device_kind)
    return (time.perf_counter() - begin) * 1e3


# ---- the gate ----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Verdict:
    """How far a result is from fp64.

    Attributes:
        relative_error: norm of the error over the norm of the result.
        eager_relative_error: the same of the eager formula in the same dtype.
        budget_fraction: the error over what is allowed; above 1 the result is wrong.
    """

    relative_error: float
    eager_relative_error: float
    budget_fraction: float

    @staticmethod
    def worst(verdicts: Sequence["Verdict"]) -> "Verdict":
        return max(verdicts, key=lambda verdict: verdict.budget_fraction)

    def metrics(self) -> dict[str, float]:
        return dataclasses.asdict(self)


def judge(name: str, value: Tensor, reference: Tensor, eager: Tensor, *, dtype: torch.dtype, num_terms: int) -> Verdict:
    """Returns the verdict on one output or gradient; raises AssertionError where its error is outside the budget.

    Judged are the largest difference, and the norm of the difference in each of up to NUM_BLOCKS blocks of rows.
    Allowed is a multiple of what eager has, of the rounding of the result to its dtype, and of the roundings of its
    sum: n terms in fp32, in whatever order, are off by √n of them where their signs are random.

    Args:
        name: "out", or another for a gradient.
        value: (..., rows, D), what is judged.
        reference: the same in fp64; eager: the same by the eager formula in `dtype`, as fp64.
        dtype: whose rounding the result has.
        num_terms: of the longest sum.
    """
    rounding = torch.finfo(dtype).eps / 2 + num_terms**0.5 * torch.finfo(torch.float32).eps / 2
    budget = OUTPUT_BUDGET if name == "out" else GRADIENT_BUDGET
    value = value.detach().to(reference.device, torch.float64)
    of_value, of_eager = (_errors(x, reference) for x in (value, eager))
    allowed = [budget * (error + rounding) for error in of_eager]
    fraction = max(error / limit for error, limit in zip(of_value, allowed, strict=True))
    if not value.isfinite().all() or not fraction <= 1:
        raise AssertionError(f"wrong: the error of {name} is {fraction:.3g} times what is allowed")
    norm = reference.norm()
    return Verdict(((value - reference).norm() / norm).item(), ((eager - reference).norm() / norm).item(), fraction)


def _errors(x: Tensor, reference: Tensor) -> list[float]:
    """Returns the largest difference over the largest value, then the relative error of each block of rows."""
    errors = [((x - reference).abs().max() / reference.abs().max()).item()]
    rows = -(-reference.shape[-2] // NUM_BLOCKS)
    for block, of_reference in zip(x.split(rows, dim=-2), reference.split(rows, dim=-2), strict=True):
        norm = of_reference.norm()
        if norm > 0:  # a gradient that is zero throughout has no relative error
            errors.append(((block - of_reference).norm() / norm).item())
    return errors


@dataclasses.dataclass(frozen=True)
class Problem:
    """The tensors of one attention call, and its results in fp64 and by the eager formula in their dtype."""

    inputs: tuple[Tensor, Tensor, Tensor]
    grad_out: Tensor
    reference: dict[str, Tensor]
    eager: dict[str, Tensor]

    def judge(self, name: str, value: Tensor) -> Verdict:
        reference, eager = self.reference[name], self.eager[name]
        return judge(name, value, reference, eager, dtype=self.grad_out.dtype, num_terms=value.shape[-2])


def _draw(device_kind: str, precision: str, *shapes: tuple[int, ...]) -> list[Tensor]:
    """Returns random normal tensors."""
    generator = torch.Generator(device_kind).manual_seed(0)
    return [torch.randn(shape, generator=generator, device=device_kind).to(DTYPES[precision]) for shape in shapes]


@functools.lru_cache(maxsize=1)
def _problem(device: hardware.Device, shape: Rivalry, precision: str) -> Problem:
    """Returns the problem of a shape; the last one is kept, for a shape's cases follow one another."""
    empty_cache(device)
    size = (shape.batch, shape.heads, shape.length, shape.d_head)
    *inputs, grad_out = _draw(device.kind, precision, *4 * [size])
    reference, eager = _expected((*inputs, grad_out), shape.causal)
    return Problem(tuple(x.requires_grad_() for x in inputs), grad_out, reference, eager)


def _expected(tensors: Sequence[Tensor], causal: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Returns what q, k, v and the output's gradient give in fp64 and in their dtype."""
    place = _fp64_device(tensors[0].device.type)
    return tuple(
        _by_formula(*(x.to(place, dtype) for x in tensors), causal=causal)
        for dtype in (torch.float64, tensors[0].dtype)
    )


def _fp64_device(device_kind: str) -> str:
    return "cpu" if device_kind == "mps" else device_kind  # mps has no fp64


def _by_formula(q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor, *, causal: bool) -> dict[str, Tensor]:
    """Returns output and gradients by the eager formula, as fp64, some queries at a time so that any length fits."""
    length = q.shape[-2]
    num_rows = max(1, ORACLE_SCORES // (q.shape[0] * q.shape[1] * length))
    results = {name: torch.zeros(q.shape, dtype=torch.float64, device=q.device) for name in ("out", "dq", "dk", "dv")}
    for begin in range(0, length, num_rows):
        rows = slice(begin, min(begin + num_rows, length))
        # Aligned to the bottom right, the mask of the last rows over the keys up to them is theirs.
        keys = slice(0, rows.stop if causal else length)
        leaves = [x[..., part, :].detach().requires_grad_() for x, part in ((q, rows), (k, keys), (v, keys))]
        out = attention_reference(*leaves, causal=causal)
        grads = torch.autograd.grad(out, leaves, grad_out[..., rows, :])
        results["out"][..., rows, :] = out.detach()
        results["dq"][..., rows, :] = grads[0]
        results["dk"][..., keys, :] += grads[1]
        results["dv"][..., keys, :] += grads[2]
    return results


# ---- contests ----------------------------------------------------------------------------------------------


class Contest(abc.ABC):
    """One problem and those who solve it: what `_run_contest` asks of a section.

    Attributes:
        device: where it runs.
        baseline: the implementation that the ratios divide by; None for none in particular.
        is_ranking: whether it is there to rank: more samples, and the times once more by another method of the timer.
    """

    baseline: str | None = None
    is_ranking = False

    def __init__(self, device: hardware.Device, case: Case, ceilings: dict[str, float]):
        self.device, self.parameters, self.ceilings = device, case.parameters, ceilings
        # A graph whose buffers are given to the first backward pass can have no second one.
        importlib.import_module("torch._functorch.config").donated_buffer = False

    @abc.abstractmethod
    def unavailable(self, impl: str) -> str | None:
        """Returns why an implementation cannot run here, None if it can."""

    @abc.abstractmethod
    def results(self, impl: str, name: str) -> dict[str, Tensor]:
        """Returns what a pass gives: "out", or the gradients by name."""

    @abc.abstractmethod
    def verdict(self, name: str, value: Tensor) -> Verdict:
        """Returns the verdict on one of `results`."""

    @abc.abstractmethod
    def forward(self, impl: str) -> Tensor: ...

    @abc.abstractmethod
    def gradients_of(self) -> tuple[tuple[Tensor, ...], Tensor]:
        """Returns the inputs and the gradient of the output."""

    @abc.abstractmethod
    def described(self) -> dict:
        """Returns the case as read back from the tensors."""

    @abc.abstractmethod
    def rates(self, impl: str, name: str, median_ms: float) -> dict: ...

    def observed(self, impl: str) -> dict:
        return {}

    def judge(self, impl: str, name: str) -> Verdict:
        """Returns the verdict on what a pass gives; raises AssertionError for a wrong result."""
        return Verdict.worst([self.verdict(key, value) for key, value in self.results(impl, name).items()])

    def both(self, impl: str) -> tuple[Tensor, ...]:
        inputs, grad_out = self.gradients_of()
        return torch.autograd.grad(self.forward(impl), inputs, grad_out)

    def call(self, impl: str, name: str) -> Callable:
        """Returns a pass as a function of nothing."""
        if name == "forward":
            return functools.partial(self.forward, impl)
        if name == "forward_backward":
            return functools.partial(self.both, impl)
        inputs, grad_out = self.gradients_of()
        # A backward pass runs on the stream of its forward pass, which must be the one that is captured.
        with on_capture_stream() if self.device.kind == "cuda" else contextlib.nullcontext():
            out = self.forward(impl)
        return functools.partial(torch.autograd.grad, out, inputs, grad_out, retain_graph=True)

    def measured(self, impl: str, name: str, results: Results, verdict: Verdict) -> Measured:
        """Returns the record's content of one implementation's pass."""
        timing, launch = results.comparison.timings[impl], results.launches.get(impl)
        metrics = {**timing.metrics(), **self.rates(impl, name, timing.median_ms), **verdict.metrics()}
        if launch:
            metrics["launch_median_ms"] = launch.metrics()["launch_median_ms"]
            metrics["host_median_ms"] = launch.metrics()["host_median_ms"]
        if impl in results.flushed:
            metrics["flush_median_ms"] = results.flushed[impl].median_ms
        if results.comparison.baseline == self.baseline:
            ratio, low, high = results.comparison.ratio[impl]
            metrics |= {"ratio_to_ours": ratio, "ratio_to_ours_low": low, "ratio_to_ours_high": high}
        return Measured(
            metrics=metrics,
            case=self.described(),
            observed={**self.observed(impl), "num_candidates": results.num_candidates},
            timer=timing.description(),
            telemetry=results.telemetry,
        )


class AttentionContest(Contest):
    """Attention on one shape. Ratios are to what "auto" runs there, in TF32 to the kernel that is told to, where those
    take part."""

    def __init__(self, device: hardware.Device, case: Case, ceilings: dict[str, float]):
        super().__init__(device, case, ceilings)
        fields = {field.name: self.parameters[field.name] for field in dataclasses.fields(Rivalry)}
        self.shape, self.precision = Rivalry(**fields), self.parameters["precision"]
        shape = (self.shape.batch, self.shape.heads, self.shape.length, self.shape.d_head)
        self.like = torch.empty(shape, dtype=DTYPES[self.precision], device=device.kind, requires_grad=True)
        self.auto = what_runs("auto", self.like, self.like, causal=self.shape.causal)
        if self.precision == "tf32" and self.auto == "triton":
            self.auto = "triton_tf32"
        is_alone = self.parameters.get("timed", "in turn") != "in turn"
        self.baseline = None if is_alone else self.auto
        self.is_ranking = case.section == "rivals"

    @functools.cached_property
    def problem(self) -> Problem:
        return _problem(self.device, self.shape, self.precision)

    def unavailable(self, impl: str) -> str | None:
        return unavailable_reason(impl, self.like, self.like, causal=self.shape.causal)

    def forward(self, impl: str) -> Tensor:
        return attention(*self.problem.inputs, causal=self.shape.causal, impl=impl)

    def gradients_of(self) -> tuple[tuple[Tensor, ...], Tensor]:
        return self.problem.inputs, self.problem.grad_out

    def results(self, impl: str, name: str) -> dict[str, Tensor]:
        if name == "forward":
            return {"out": self.forward(impl)}
        return dict(zip(("dq", "dk", "dv"), self.both(impl), strict=True))

    def verdict(self, name: str, value: Tensor) -> Verdict:
        return self.problem.judge(name, value)

    def described(self) -> dict:
        q_BHSD, *_ = self.problem.inputs
        batch, heads, length, d_head = q_BHSD.shape
        shape = Rivalry(batch, heads, length, d_head, self.shape.causal)
        timed = {"timed": self.parameters["timed"]} if "timed" in self.parameters else {}
        return {**_shape(shape, _precision_of(q_BHSD)), **timed}

    def observed(self, impl: str) -> dict:
        observed = {"ran": what_runs(impl, self.like, self.like, causal=self.shape.causal), "auto": self.auto}
        if (products := _products(impl, self.like)) and self.like.dtype == torch.float32:
            observed["products"] = products
        if observed["ran"].startswith("gluon"):
            deterministic = OUR_OPTIONS[impl].get("deterministic", True)
            options = {"causal": self.shape.causal, "deterministic": deterministic}
            observed["backward"] = labkit_flash.resolve_backward(self.like, self.like, "gluon", **options)
        return observed

    def rates(self, impl: str, name: str, median_ms: float) -> dict:
        shape = self.shape
        flops = accounting.attention_call_flops(
            name, shape.batch * shape.heads, shape.length, shape.d_head, causal=shape.causal
        )
        return {
            **_flop_rates(self.device, self.precision, flops, median_ms, self.ceilings),
            "is_auto": int(impl == self.auto),
            **(_tile_metrics(impl, self.like, shape.causal) if _products(impl, self.like) else {}),
        }


def _flop_rates(device: hardware.Device, precision: str, flops: int, median_ms: float, ceilings: dict) -> dict:
    rate = flops / (median_ms * 1e-3) / 1e12
    ceiling = ceilings.get(f"gemm {precision}")
    # Some kernels multiply fp32 as several products of TF32, and the peak of plain fp32 is not theirs.
    peak = device.peaks.tflops("tf32" if precision == "fp32" else precision) if device.peaks else None
    return {
        "flops": flops,
        "achieved_tflops": rate,
        "ceiling": ceiling,
        "ceiling_fraction": rate / ceiling if ceiling else None,
        "datasheet_fraction": rate / peak if peak else None,
    }


def _products(impl: str, like: Tensor) -> str | None:
    """Returns which products of fp32 the Triton kernels are told to run; None for an implementation without them."""
    options = OUR_OPTIONS.get(impl, {})
    if options.get("impl") != "triton":
        return None
    return labkit_flash.resolve_precision(like, options.get("precision", "auto"))


def _tile_metrics(impl: str, like: Tensor, causal: bool) -> dict[str, int]:
    """Returns rows of the query and key tiles of the three Triton kernels."""
    precision = OUR_OPTIONS[impl].get("precision", "auto")
    tiles = labkit_flash.resolve_tiles(like, like, causal=causal, precision=precision)
    return {
        f"{kernel}_{side}": getattr(getattr(tiles, kernel), side)
        for kernel in ("forward", "dkdv", "dq")
        for side in ("block_q", "block_k")
    }


class WeightedSumContest(Contest):
    """Σ_d x_nd w_d: the first kernel against the formula, eager and compiled; ratios are to the kernel."""

    baseline = "triton"

    def __init__(self, device: hardware.Device, case: Case, ceilings: dict[str, float]):
        super().__init__(device, case, ceilings)
        self.rows, self.dim = self.parameters["rows"], self.parameters["dim"]
        self.precision = self.parameters["precision"]
        if self.unavailable("triton"):
            self.baseline = None

    @functools.cached_property
    def _tensors(self) -> list[Tensor]:
        return _draw(self.device.kind, self.precision, (self.rows, self.dim), (self.dim,), (self.rows,))

    @functools.cached_property
    def inputs(self) -> tuple[Tensor, Tensor]:
        x, weight, _ = self._tensors
        return x.requires_grad_(), weight.requires_grad_()

    def unavailable(self, impl: str) -> str | None:
        if impl == "triton" and self.device.kind != "cuda" and not labkit_flash.IS_INTERPRETED:
            return f"the Triton kernel needs a CUDA device; this is {self.device.kind}"
        return None

    def forward(self, impl: str) -> Tensor:
        return _WEIGHTED_SUMS[impl](*self.inputs)

    def gradients_of(self) -> tuple[tuple[Tensor, ...], Tensor]:
        return self.inputs, self._tensors[2]

    def results(self, impl: str, name: str) -> dict[str, Tensor]:
        if name == "forward":
            return {"out": self.forward(impl)[:, None]}
        grad_x, grad_weight = self.both(impl)
        return {"dx": grad_x, "dweight": grad_weight[None]}

    @functools.cached_property
    def _expected(self) -> list[dict[str, Tensor]]:
        place, expected = _fp64_device(self.device.kind), []
        for dtype in (torch.float64, DTYPES[self.precision]):
            *leaves, grad_out = (x.detach().to(place, dtype) for x in self._tensors)
            leaves = [x.requires_grad_() for x in leaves]
            out = _weighted_sum_formula(*leaves)
            grad_x, grad_weight = torch.autograd.grad(out, leaves, grad_out)
            values = {"out": out.detach()[:, None], "dx": grad_x, "dweight": grad_weight[None]}
            expected.append({name: value.double() for name, value in values.items()})
        return expected

    def verdict(self, name: str, value: Tensor) -> Verdict:
        reference, eager = self._expected
        num_terms = {"out": self.dim, "dx": 1, "dweight": self.rows}[name]
        dtype = DTYPES[self.precision]
        return judge(name, value, reference[name], eager[name], dtype=dtype, num_terms=num_terms)

    def described(self) -> dict:
        x, _ = self.inputs
        return {"rows": x.shape[0], "dim": x.shape[1], "precision": _precision_of(x)}

    def rates(self, impl: str, name: str, median_ms: float) -> dict:
        num_bytes = accounting.weighted_sum_bytes(name, self.rows, self.dim, self.inputs[0].element_size())
        rate = num_bytes / (median_ms * 1e-3) / 1e9
        ceiling, peaks = self.ceilings.get("copy"), self.device.peaks
        return {
            "num_bytes": num_bytes,
            "achieved_gb_per_s": rate,
            "ceiling": ceiling,
            "ceiling_fraction": rate / ceiling if ceiling else None,
            "datasheet_fraction": rate / peaks.memory_gb_per_s if peaks else None,
        }


def _weighted_sum_formula(x: Tensor, weight: Tensor) -> Tensor:
    return (x * weight).sum(dim=-1)


@functools.cache
def _compiled() -> Callable[[Tensor, Tensor], Tensor]:
    return torch.compile(_weighted_sum_formula, dynamic=False, fullgraph=True)


_WEIGHTED_SUMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "eager": _weighted_sum_formula,
    "compiled": lambda x, weight: _compiled()(x, weight),
    "triton": weighted_sum,
}


# ---- the small case, the tiles, the memory -----------------------------------------------------------------


def _measure_algorithm(device: hardware.Device, case: Case, phase: str) -> Measured:
    """The tiled algorithm against the formula, or what its running statistics are after each tile of keys."""
    p = case.parameters
    generator = torch.Generator().manual_seed(0)  # the host's, so that every device shows the same case
    shape = (1, 1, p["length"], p["d_head"])
    q, k, v, grad_out = (torch.randn(shape, generator=generator).to(device.kind) for _ in range(4))
    options = {"scale": p["d_head"] ** -0.5, "left": -1, "right": 0 if p["causal"] else -1}
    options |= {"tile_q": p["tile"], "tile_k": p["tile"]}
    described = {**p, "length": q.shape[2], "d_head": q.shape[3]}
    if phase == "trace":
        samples = _online_softmax(q, k, v, options)
        return Measured({"num_tiles": -(-p["length"] // p["tile"])}, described, samples=samples)
    out, lse = tiled_attention_forward(q, k, v, **options)
    grads = tiled_attention_backward(grad_out, q, k, v, out, lse, **options)
    reference, eager = _expected((q, k, v, grad_out), p["causal"])
    metrics = {}
    for name, value in zip(("out", "dq", "dk", "dv"), (out, *grads), strict=True):
        verdict = judge(name, value, reference[name], eager[name], dtype=q.dtype, num_terms=p["length"])
        metrics |= {f"{name}_{key}": number for key, number in verdict.metrics().items()}
    return Measured(metrics, described)


def _online_softmax(q: Tensor, k: Tensor, v: Tensor, options: dict) -> dict[str, list[float]]:
    """Returns the statistics of some queries after each tile of keys.

    What the algorithm holds after j tiles is what it returns for the keys of those tiles alone.
    """
    tile, num_keys = options["tile_k"], k.shape[-2]
    q = q[..., :TRACED_QUERIES, :]
    scores = (q @ k.transpose(-2, -1))[0, 0].double() * options["scale"]
    final, _ = tiled_attention_forward(q, k, v, **options)
    samples: dict[str, list[float]] = {}
    for end in range(tile, num_keys + tile, tile):
        out, lse = tiled_attention_forward(q, k[..., :end, :], v[..., :end, :], **options)
        maxima = scores[:, :end].amax(dim=-1)
        values = {
            "maximum": maxima,
            "denominator": (lse[0, 0].double() - maxima).exp(),
            "distance": ((out - final).norm(dim=-1) / final.norm(dim=-1))[0, 0],
        }
        for name, of_queries in values.items():
            for query, value in enumerate(of_queries.tolist()):
                samples.setdefault(f"query {query} {name}", []).append(value)
    return samples


def _measure_tile(device: hardware.Device, case: Case, ceilings: dict[str, float]) -> Measured:
    """The forward kernel with other tiles than the shipped ones, held to the same gate."""
    if device.kind != "cuda" and not labkit_flash.IS_INTERPRETED:
        raise Skip(f"the Triton kernel needs a CUDA device; this is {device.kind}")
    p = case.parameters
    shape = Rivalry(**{field.name: p[field.name] for field in dataclasses.fields(Rivalry)})
    problem = _problem(device, shape, p["precision"])
    q_BHSD, k_BHSD, v_BHSD = (x.detach() for x in problem.inputs)
    shipped = labkit_flash.resolve_tiles(q_BHSD, k_BHSD, causal=shape.causal)
    tile = TileConfig(p["block_q"], p["block_k"], p["num_warps"], p["num_stages"])
    run = functools.partial(
        labkit_flash.flash_attention_forward,
        q_BHSD,
        k_BHSD,
        v_BHSD,
        scale=shape.d_head**-0.5,
        right=0 if shape.causal else -1,
        config=dataclasses.replace(shipped, forward=tile),
    )
    try:
        out, _ = run()
    except triton.errors.TritonError as error:
        raise Skip(f"{type(error).__name__}: {error}".split("\n")[0]) from None
    verdict = problem.judge("out", out)
    with hardware.GpuMonitor(device.kind) as monitor:
        timing = time_callable(
            run,
            device_kind=device.kind,
            method="graph" if device.kind == "cuda" else "host",
            num_warmup=1,
            time_limit_s=case.time_limit_s,
        )
    flops = accounting.attention_call_flops(
        "forward", shape.batch * shape.heads, shape.length, shape.d_head, causal=shape.causal
    )
    batch, heads, length, d_head = q_BHSD.shape
    return Measured(
        metrics={
            **timing.metrics(),
            **_flop_rates(device, p["precision"], flops, timing.median_ms, ceilings),
            **verdict.metrics(),
            "is_shipped": int(tile == shipped.forward),
        },
        case={
            **_shape(Rivalry(batch, heads, length, d_head, shape.causal), p["precision"]),
            **{name: getattr(tile, name) for name in ("block_q", "block_k", "num_warps", "num_stages")},
        },
        timer=timing.description(),
        telemetry=monitor.summary,
    )


def _measure_memory(device: hardware.Device, case: Case) -> Iterator[PhaseRun]:
    """Yields the peaks of a forward pass, and of a forward and a backward pass, inputs included."""
    if device.kind != "cuda":
        raise Skip("the peak of memory is what CUDA's allocator counts")
    p = case.parameters
    impl, causal = p["impl"], p["causal"]
    shape = (p["batch"], p["heads"], p["length"], p["d_head"])
    _problem.cache_clear()
    small = [x.requires_grad_() for x in _draw(device.kind, p["precision"], *3 * [(1, 1, 128, p["d_head"])])]
    if reason := unavailable_reason(impl, small[0], small[1], causal=causal):
        raise Skip(reason)
    # What a library sets aside at its first call, and keeps, is not the call's.
    torch.autograd.grad(attention(*small, causal=causal, impl=impl).sum(), small)
    empty_cache(device)
    before = torch.cuda.memory_allocated()
    *inputs, grad_out = _draw(device.kind, p["precision"], *4 * [shape])
    inputs = [x.requires_grad_() for x in inputs]
    for phase in case.phases:
        torch.cuda.reset_peak_memory_stats()
        out = attention(*inputs, causal=causal, impl=impl)
        if phase == "forward_backward":
            torch.autograd.grad(out, inputs, grad_out)
        del out
        batch, heads, length, d_head = inputs[0].shape
        measured = Measured(
            {"peak_bytes": torch.cuda.max_memory_allocated() - before},
            {**_shape(Rivalry(batch, heads, length, d_head, causal), p["precision"]), "impl": impl},
            {"ran": what_runs(impl, *inputs[:2], causal=causal)},
        )
        yield phase, functools.partial(_returned, measured)


def _returned(measured: Measured) -> Measured:
    return measured
