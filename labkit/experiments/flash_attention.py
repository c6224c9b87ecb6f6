"""Notebook 06: FlashAttention against every other implementation, each held to the fp64 oracle
before it is timed.

Sections: "ceilings" (measured anew each session), "algorithm" (online softmax on a small case),
"weighted_sum" (the first Triton kernel), "speed" (the grid of lengths and head dimensions), "tiles"
(the forward kernel over its tile sizes), "rivals" (the shapes on which everything is ranked),
"memory" (peaks).

A case of "weighted_sum", "speed" and "rivals" is a contest. Shapes: B batch, H heads, S length, D
head dimension.
"""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence

import torch
import triton.errors
from torch import Tensor

from labkit import accounting, hardware, numerics
from labkit.configs import FLASH_ATTENTION, MATERIALISING, PASSES, Grid, Rivalry, narrowed
from labkit.experiments.ceilings import CEILINGS, ceiling_cases, ceiling_rates
from labkit.experiments.contest import Contest, contest_section
from labkit.experiments.oracle import Problem, attention_problem, draw, expected, fp64_device
from labkit.experiments.sections import empty_cache, fractions, run_section, section, timed
from labkit.experiments.sweep import Case, Measured, PhaseRun, Skip
from labkit.kernels import flash_attention as labkit_flash
from labkit.kernels.attention import OUR_OPTIONS, attention, unavailable_reason, what_runs
from labkit.kernels.flash_attention.tiled import tiled_attention_backward, tiled_attention_forward
from labkit.kernels.flash_attention.tiles import TileConfig
from labkit.kernels.weighted_sum import weighted_sum
from labkit.measure.timing import time_callable
from labkit.numerics import Verdict, judge, tensor_dtype

__all__ = ["MEASUREMENT_VERSION", "cases", "ceiling_rates", "run_case"]

MEASUREMENT_VERSION = 2

ALGORITHM = {"length": 96, "d_head": 16}
TRACED_QUERIES = 3
TILE_FIELDS = ("block_q", "block_k", "num_warps", "num_stages")


def cases(
    profile: str, device_kind: str, *, lengths: Sequence[int] = (), d_heads: Sequence[int] = ()
) -> list[Case]:
    """Returns the cases of `profile`, narrowed where asked; ValueError for a value that it does not
    have.
    """
    grid = FLASH_ATTENTION[profile]
    for parameter, wanted in (("lengths", lengths), ("d_heads", d_heads)):
        narrowed(
            FLASH_ATTENTION, profile, parameter, wanted
        )  # rivals and memory have values beside these
    limit = grid.case_timeout_s
    tiles_shape = _shape(grid.tiles_shape, "bf16")
    memory = [
        {**_shape(Rivalry(1, 1, length, grid.memory_d_head, True), precision), "impl": impl}
        for precision, impls in grid.memory_impls.items()
        for impl in impls
        for length in grid.memory_lengths
    ]
    found = [
        Case(
            "algorithm",
            {**ALGORITHM, "tile": tile, "causal": causal, "precision": "fp32"},
            ("errors",) if causal else ("errors", "trace"),
            limit,
        )
        for tile in grid.algorithm_tiles
        for causal in (False, True)
    ]
    for rows, dim in grid.weighted_sums:
        parameters = {"rows": rows, "dim": dim, "precision": "fp32"}
        found.append(_contest_case(grid, "weighted_sum", parameters, tuple(_WEIGHTED_SUMS)))
    for tile in grid.tiles:
        parameters = {**tiles_shape, **dict(zip(TILE_FIELDS, tile, strict=True))}
        found.append(Case("tiles", parameters, ("forward",), limit, grid.time_limit_s))
    narrowable = [
        *(
            _contest_case(grid, "rivals", _shape(rivalry, "bf16"), grid.rivals)
            for rivalry in grid.rivalries
        ),
        *_speed_cases(grid),
        *(Case("memory", each, ("forward", "forward_backward"), limit) for each in memory),
    ]
    for case in narrowable:
        p = case.parameters
        if (not lengths or p["length"] in lengths) and (not d_heads or p["d_head"] in d_heads):
            found.append(case)
    return [*ceiling_cases(tuple(grid.impls), limit), *found]


def _shape(shape: Rivalry, precision: str) -> dict:
    return {**dataclasses.asdict(shape), "precision": precision}


def _shape_of(q_BHSD: Tensor, causal: bool) -> dict:
    """Returns a case's shape and precision as read back from a tensor and from what PyTorch was
    told.
    """
    return _shape(Rivalry(*q_BHSD.shape, causal), numerics.live_precision(q_BHSD.dtype))


def _rivalry(parameters: dict) -> Rivalry:
    return Rivalry(**{field.name: parameters[field.name] for field in dataclasses.fields(Rivalry)})


def _contest_case(grid: Grid, section: str, parameters: dict, impls: Sequence[str]) -> Case:
    phases = tuple(f"{impl} {name}" for name in PASSES for impl in impls)
    if section != "rivals":
        return Case(section, parameters, phases, grid.case_timeout_s, grid.time_limit_s)
    sustained = tuple(
        f"{impl} {name}" for name in ("forward", "backward") for impl in grid.sustained
    )
    return Case(
        section,
        parameters,
        phases,
        grid.case_timeout_s,
        grid.rivals_time_limit_s,
        sustained=sustained,
    )


def _speed_cases(grid: Grid) -> Iterator[Case]:
    """Yields shape by shape, so that one oracle serves what is timed in turn and what is timed
    alone.
    """
    for precision, impls in grid.impls.items():
        for d_head, length in itertools.product(grid.d_heads, grid.lengths):
            here = [impl for impl in impls if _is_measured(grid, impl, precision, length, d_head)]
            alone = [impl for impl in here if impl in MATERIALISING]
            shape = _shape(Rivalry(1, 1, length, d_head, True), precision)
            if here:
                in_turn = [impl for impl in here if impl not in alone]
                yield _contest_case(grid, "speed", {**shape, "timed": "in turn"}, in_turn)
            for impl in alone:
                yield _contest_case(grid, "speed", {**shape, "timed": f"alone: {impl}"}, [impl])


def _is_measured(grid: Grid, impl: str, precision: str, length: int, d_head: int) -> bool:
    for key in (f"{precision} {impl}", impl, precision):
        if key in grid.by_shape:
            return length in grid.by_shape[key].get(d_head, ())
    return length in grid.by_shape.get("any", {}).get(d_head, grid.lengths)


class AttentionContest(Contest):
    """Attention on one shape; ratios are to what "auto" runs there, in TF32 to the kernel that is
    told to.
    """

    gradient_names = ("dq", "dk", "dv")

    def __init__(self, device: hardware.Device, case: Case, ceilings: dict[str, float]):
        super().__init__(device, case, ceilings)
        self.shape, self.precision = _rivalry(self.parameters), self.parameters["precision"]
        shape = (self.shape.batch, self.shape.heads, self.shape.length, self.shape.d_head)
        self.like = torch.empty(
            shape, dtype=tensor_dtype(self.precision), device=device.kind, requires_grad=True
        )
        self.auto = what_runs("auto", self.like, self.like, causal=self.shape.causal)
        if self.precision == "tf32" and self.auto == "triton":
            self.auto = "triton_tf32"
        self.baseline = self.auto if self.parameters.get("timed", "in turn") == "in turn" else None
        self.is_ranking = case.section == "rivals"

    @functools.cached_property
    def problem(self) -> Problem:
        return attention_problem(self.device, self.shape, self.precision)

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return self.problem.inputs

    @property
    def grad_out(self) -> Tensor:
        return self.problem.grad_out

    def unavailable(self, impl: str) -> str | None:
        return unavailable_reason(impl, self.like, self.like, causal=self.shape.causal)

    def forward(self, impl: str) -> Tensor:
        return attention(*self.inputs, causal=self.shape.causal, impl=impl)

    def verdict(self, name: str, value: Tensor) -> Verdict:
        return self.problem.judge(name, value)

    def described(self) -> dict:
        timed_how = {"timed": self.parameters["timed"]} if "timed" in self.parameters else {}
        return {**_shape_of(self.inputs[0], self.shape.causal), **timed_how}

    def observed(self, impl: str) -> dict:
        observed = {
            "ran": what_runs(impl, self.like, self.like, causal=self.shape.causal),
            "auto": self.auto,
        }
        options = OUR_OPTIONS.get(impl, {})
        if (
            options.get("impl") == "triton" and self.like.dtype == torch.float32
        ):  # several products may make one
            observed["products"] = labkit_flash.resolve_precision(
                self.like, options.get("precision", "auto")
            )
        if observed["ran"].startswith("gluon"):
            observed["backward"] = labkit_flash.resolve_backward(
                self.like, self.like, "gluon", causal=self.shape.causal
            )
        return observed

    def rates(self, impl: str, name: str, median_ms: float) -> dict:
        return {
            **_flop_rates(self.device, self.shape, self.precision, name, median_ms, self.ceilings),
            "is_auto": int(impl == self.auto),
        }


def _flop_rates(
    device: hardware.Device,
    shape: Rivalry,
    precision: str,
    name: str,
    median_ms: float,
    ceilings: dict,
) -> dict:
    heads = shape.batch * shape.heads
    flops = accounting.attention_call_flops(
        name, heads, shape.length, shape.d_head, causal=shape.causal
    )
    rate = flops / (median_ms * 1e-3) / 1e12
    # Some kernels multiply fp32 as several products of TF32, and the peak of plain fp32 is not
    # theirs.
    peak = (
        device.peaks.tflops("tf32" if precision == "fp32" else precision) if device.peaks else None
    )
    return {
        "flops": flops,
        "achieved_tflops": rate,
        **fractions(rate, ceilings.get(f"gemm {precision}"), peak),
    }


class WeightedSumContest(Contest):
    """Σ_d x_nd w_d: the first kernel against the formula, eager and compiled; ratios are to the
    kernel.
    """

    gradient_names = ("dx", "dweight")

    def __init__(self, device: hardware.Device, case: Case, ceilings: dict[str, float]):
        super().__init__(device, case, ceilings)
        self.rows, self.dim, self.precision = (
            self.parameters[name] for name in ("rows", "dim", "precision")
        )
        self.baseline = None if self.unavailable("triton") else "triton"
        x, weight, self.grad_out = draw(
            device.kind, self.precision, (self.rows, self.dim), (self.dim,), (self.rows,)
        )
        self.inputs = (x.requires_grad_(), weight.requires_grad_())

    def unavailable(self, impl: str) -> str | None:
        return _triton_unavailable(self.device) if impl == "triton" else None

    def forward(self, impl: str) -> Tensor:
        return _WEIGHTED_SUMS[impl](*self.inputs)

    @functools.cached_property
    def _expected(self) -> list[dict[str, Tensor]]:
        """Results of the formula in fp64 and in the inputs' dtype."""
        place, found = fp64_device(self.device.kind), []
        for dtype in (torch.float64, self.inputs[0].dtype):
            *leaves, grad_out = (x.detach().to(place, dtype) for x in (*self.inputs, self.grad_out))
            out = _weighted_sum_formula(*(x.requires_grad_() for x in leaves))
            values = (out.detach(), *torch.autograd.grad(out, leaves, grad_out))
            found.append(
                {
                    n: value.double()
                    for n, value in zip(("out", *self.gradient_names), values, strict=True)
                }
            )
        return found

    def verdict(self, name: str, value: Tensor) -> Verdict:
        num_terms = {"out": self.dim, "dx": 1, "dweight": self.rows}[name]
        # As rows: of one element for the output, one row for the gradient of the weight.
        value, *expected = (
            x if name == "dx" else x[:, None] if name == "out" else x[None]
            for x in (value, *(values[name] for values in self._expected))
        )
        return judge(name, value, *expected, dtype=self.inputs[0].dtype, num_terms=num_terms)

    def described(self) -> dict:
        x, _ = self.inputs
        return {
            "rows": x.shape[0],
            "dim": x.shape[1],
            "precision": numerics.live_precision(x.dtype),
        }

    def rates(self, impl: str, name: str, median_ms: float) -> dict:
        num_bytes = accounting.weighted_sum_bytes(
            name, self.rows, self.dim, self.inputs[0].element_size()
        )
        rate = num_bytes / (median_ms * 1e-3) / 1e9
        peak = self.device.peaks.memory_gb_per_s if self.device.peaks else None
        return {
            "num_bytes": num_bytes,
            "achieved_gb_per_s": rate,
            **fractions(rate, self.ceilings.get("copy"), peak),
        }


def _triton_unavailable(device: hardware.Device) -> str | None:
    if device.kind == "cuda" or labkit_flash.IS_INTERPRETED:
        return None
    return f"the Triton kernel needs a CUDA device; this is {device.kind}"


def _weighted_sum_formula(x: Tensor, weight: Tensor) -> Tensor:
    return (x * weight).sum(dim=-1)


@functools.cache
def _compiled() -> Callable[[Tensor, Tensor], Tensor]:
    return torch.compile(_weighted_sum_formula, dynamic=False, fullgraph=True)


_WEIGHTED_SUMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "eager": _weighted_sum_formula,
    "compiled": lambda *inputs: _compiled()(*inputs),
    "triton": weighted_sum,
}


def _measure_algorithm(device: hardware.Device, case: Case, phase: str) -> Measured:
    """The tiled algorithm against the formula, or what its running statistics are after each tile
    of keys.
    """
    p = case.parameters
    generator = torch.Generator().manual_seed(
        0
    )  # the host's, so that every device shows the same case
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
    reference, eager = expected((q, k, v, grad_out), p["causal"])
    metrics = {}
    for name, value in zip(("out", "dq", "dk", "dv"), (out, *grads), strict=True):
        verdict = judge(
            name, value, reference[name], eager[name], dtype=q.dtype, num_terms=p["length"]
        )
        metrics |= {f"{name}_{key}": number for key, number in verdict.metrics().items()}
    return Measured(metrics, described)


def _online_softmax(q: Tensor, k: Tensor, v: Tensor, options: dict) -> dict[str, list[float]]:
    """Returns some queries' statistics after each tile of keys: what it returns for the keys up to
    there alone.
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
    if reason := _triton_unavailable(device):
        raise Skip(reason)
    p, shape = case.parameters, _rivalry(case.parameters)
    problem = attention_problem(device, shape, p["precision"])
    q_BHSD, k_BHSD, v_BHSD = (x.detach() for x in problem.inputs)
    shipped = labkit_flash.resolve_tiles(q_BHSD, k_BHSD, causal=shape.causal)
    tile = TileConfig(*(p[name] for name in TILE_FIELDS))
    options = {
        "right": 0 if shape.causal else -1,
        "config": dataclasses.replace(shipped, forward=tile),
    }
    plan = labkit_flash.plan_of(q_BHSD, k_BHSD, v_BHSD, **options)
    run = functools.partial(plan.forward, q_BHSD, k_BHSD, v_BHSD)
    try:
        out, _ = run()
    except triton.errors.TritonError as error:
        raise Skip(f"{type(error).__name__}: {error}".split("\n")[0]) from None
    verdict = problem.judge("out", out)
    limits = {"num_warmup": 1, "time_limit_s": case.time_limit_s}
    method = "graph" if device.kind == "cuda" else "host"
    found = timed(device, time_callable, run, device_kind=device.kind, method=method, **limits)
    return found.measured(
        {
            **_flop_rates(
                device, shape, p["precision"], "forward", found.timing.median_ms, ceilings
            ),
            **verdict.metrics(),
            "is_shipped": int(tile == shipped.forward),
        },
        {**_shape_of(q_BHSD, shape.causal), **{name: getattr(tile, name) for name in TILE_FIELDS}},
    )


@contextlib.contextmanager
def _memory_call(device: hardware.Device, case: Case) -> Iterator[tuple[list[Tensor], Tensor, int]]:
    """Gives q, k, v, the gradient of the output, and the bytes that were allocated before them."""
    if device.kind != "cuda":
        raise Skip("the peak of memory is what CUDA's allocator counts")
    p = case.parameters
    impl, causal = p["impl"], p["causal"]
    attention_problem.cache_clear()
    small = [
        x.requires_grad_()
        for x in draw(device.kind, p["precision"], *3 * [(1, 1, 128, p["d_head"])])
    ]
    if reason := unavailable_reason(impl, small[0], small[1], causal=causal):
        raise Skip(reason)
    # What a library sets aside at its first call, and keeps, is not the call's.
    torch.autograd.grad(attention(*small, causal=causal, impl=impl).sum(), small)
    empty_cache(device)
    before = torch.cuda.memory_allocated()
    shape = (p["batch"], p["heads"], p["length"], p["d_head"])
    *inputs, grad_out = draw(device.kind, p["precision"], *4 * [shape])
    yield [x.requires_grad_() for x in inputs], grad_out, before


def _measure_memory(call: tuple[list[Tensor], Tensor, int], case: Case, phase: str) -> Measured:
    """The peak of a forward pass, or of a forward and a backward pass, inputs included."""
    inputs, grad_out, before = call
    impl, causal = case.parameters["impl"], case.parameters["causal"]
    torch.cuda.reset_peak_memory_stats()
    out = attention(*inputs, causal=causal, impl=impl)
    if phase == "forward_backward":
        torch.autograd.grad(out, inputs, grad_out)
    return Measured(
        {"peak_bytes": torch.cuda.max_memory_allocated() - before},
        {**_shape_of(inputs[0], causal), "impl": impl},
        {"ran": what_runs(impl, *inputs[:2], causal=causal)},
    )


SECTIONS = {
    **CEILINGS,
    "algorithm": section(_measure_algorithm),
    "weighted_sum": contest_section(WeightedSumContest),
    "speed": contest_section(AttentionContest),
    "rivals": contest_section(AttentionContest),
    "tiles": lambda *arguments: [("forward", functools.partial(_measure_tile, *arguments))],
    "memory": section(_measure_memory, _memory_call),
}


def run_case(case: Case, ceilings: dict[str, float]) -> Iterator[PhaseRun]:
    """Yields each phase of `case` with the function that measures it. Runs in the worker
    process.
    """
    numerics.set_precision(case.parameters.get("precision", "fp32"))
    return run_section(SECTIONS, case, ceilings)
