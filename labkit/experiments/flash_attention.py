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
from collections.abc import Iterator

import torch
import triton.errors
from torch import Tensor

from labkit import numerics
from labkit.configs import FLASH_ATTENTION, MATERIALISING, Grid, Rivalry
from labkit.device import Device
from labkit.experiments.ceilings import CEILINGS, ceiling_cases, ceiling_rates
from labkit.experiments.contest import IN_TURN, contest_section
from labkit.experiments.operations import (
    IMPLEMENTATIONS,
    Attention,
    WeightedSum,
    attention_problem,
    contest_case,
    triton_unavailable,
)
from labkit.experiments.sections import empty_cache, run_section, section, timed
from labkit.experiments.sweep import Case, Measured, PhaseRun, Skip
from labkit.kernels import flash_attention as labkit_flash
from labkit.kernels.flash_attention.tiled import tiled_attention_backward, tiled_attention_forward
from labkit.kernels.flash_attention.tiles import TileConfig
from labkit.measure.timing import time_callable

__all__ = ["MEASUREMENT_VERSION", "cases", "ceiling_rates", "run_case"]

MEASUREMENT_VERSION = 2

ALGORITHM = {"length": 96, "d_head": 16}
TRACED_QUERIES = 3
TILE_FIELDS = ("block_q", "block_k", "num_warps", "num_stages")


def cases(profile: str, device_kind: str, *, lengths=(), d_heads=()) -> list[Case]:
    """Returns the cases of `profile`, narrowed to values of its grid where asked."""
    grid = FLASH_ATTENTION[profile]
    timeout = {"timeout_s": grid.case_timeout_s}
    limits = {**timeout, "time_limit_s": grid.time_limit_s}
    found = ceiling_cases(tuple(grid.impls), grid.case_timeout_s)
    for tile, causal in itertools.product(grid.algorithm_tiles, (False, True)):
        parameters = {**ALGORITHM, "tile": tile, "causal": causal, "precision": "fp32"}
        phases = ("errors",) if causal else ("errors", "trace")
        found.append(Case("algorithm", parameters, phases, **timeout))
    for rows, dim in grid.weighted_sums:
        parameters = {"rows": rows, "dim": dim, "precision": "fp32"}
        impls = IMPLEMENTATIONS["weighted_sum"]
        found.append(contest_case("weighted_sum", "weighted_sum", parameters, impls, **limits))
    for tile in grid.tiles:
        parameters = _shape(grid.tiles_shape, "bf16") | dict(zip(TILE_FIELDS, tile, strict=True))
        found.append(Case("tiles", parameters, ("forward",), **limits))
    sustained = [f"{impl} {name}" for name in ("forward", "backward") for impl in grid.sustained]
    narrowable = [
        contest_case(
            "rivals",
            "attention",
            _shape(rivalry, "bf16"),
            grid.rivals,
            **timeout,
            time_limit_s=grid.rivals_time_limit_s,
            sustained=tuple(sustained),
        )
        for rivalry in grid.rivalries
    ]
    narrowable += _speed_cases(grid, limits)
    for precision, impls in grid.memory_impls.items():
        for impl, length in itertools.product(impls, grid.memory_lengths):
            shape = _shape(Rivalry(1, 1, length, grid.memory_d_head, True), precision)
            phases = ("forward", "forward_backward")
            narrowable.append(Case("memory", {**shape, "impl": impl}, phases, **timeout))
    for case in narrowable:
        p = case.parameters
        if (not lengths or p["length"] in lengths) and (not d_heads or p["d_head"] in d_heads):
            found.append(case)
    return found


def _shape(shape: Rivalry, precision: str) -> dict:
    return {**dataclasses.asdict(shape), "precision": precision}


def _speed_cases(grid: Grid, limits: dict) -> Iterator[Case]:
    """Yields shape by shape, so that one oracle serves what is timed in turn and what is timed
    alone.
    """
    for precision, impls in grid.impls.items():
        for d_head, length in itertools.product(grid.d_heads, grid.lengths):
            here = [impl for impl in impls if length in _lengths(grid, impl, precision, d_head)]
            alone = [impl for impl in here if impl in MATERIALISING]
            shape = _shape(Rivalry(1, 1, length, d_head, True), precision)
            if here:
                case, in_turn = {**shape, "timed": IN_TURN}, [x for x in here if x not in alone]
                yield contest_case("speed", "attention", case, in_turn, **limits)
            for impl in alone:
                case = {**shape, "timed": f"alone: {impl}"}
                yield contest_case("speed", "attention", case, [impl], is_alone=True, **limits)


def _lengths(grid: Grid, impl: str, precision: str, d_head: int) -> tuple[int, ...]:
    """Returns the lengths at which an implementation is measured."""
    for key in (f"{precision} {impl}", impl, precision):
        if key in grid.by_shape:
            return grid.by_shape[key].get(d_head, ())
    return grid.by_shape.get("any", {}).get(d_head, grid.lengths)


def attention_of(device: Device, parameters: dict) -> Attention:
    """Returns the attention of a case's parameters."""
    names = ("batch", "heads", "length", "d_head", "causal")
    shape = Rivalry(*(parameters[name] for name in names))
    return attention_problem(device, shape, parameters["precision"])


def _measure_algorithm(device: Device, case: Case, phase: str) -> Measured:
    """The tiled algorithm against the formula, or what its running statistics are after each tile
    of keys.
    """
    p = case.parameters
    shape = Rivalry(1, 1, p["length"], p["d_head"], p["causal"])
    # The host's, so that every device shows the same case.
    problem = Attention(device, shape, p["precision"], drawn_on="cpu")
    inputs = [x.detach() for x in problem.inputs]
    options = {"scale": p["d_head"] ** -0.5, "left": -1, "right": 0 if p["causal"] else -1}
    options |= {"tile_q": p["tile"], "tile_k": p["tile"]}
    length, d_head = inputs[0].shape[2:]
    described = {**p, "length": length, "d_head": d_head}
    if phase == "trace":
        samples = _online_softmax(*inputs, options)
        return Measured({"num_tiles": -(-length // p["tile"])}, described, samples=samples)
    out, lse = tiled_attention_forward(*inputs, **options)
    grads = tiled_attention_backward(*problem.grad_outs, *inputs, out, lse, **options)
    verdicts = [*problem.verdicts("forward", [out]), *problem.verdicts("backward", grads)]
    metrics = {
        f"{name}_{key}": number
        for name, verdict in zip(("out", "dq", "dk", "dv"), verdicts, strict=True)
        for key, number in verdict.metrics().items()
    }
    return Measured(metrics, described)


def _online_softmax(q: Tensor, k: Tensor, v: Tensor, options: dict) -> dict[str, list[float]]:
    """Returns some queries' statistics after each tile of keys: what it returns for the keys up to
    there alone.
    """
    tile, num_keys = options["tile_k"], k.shape[-2]
    q = q[..., :TRACED_QUERIES, :]
    scores = (q @ k.transpose(-2, -1))[0, 0].double() * options["scale"]
    final, _ = tiled_attention_forward(q, k, v, **options)
    steps = []
    for end in range(tile, num_keys + tile, tile):
        out, lse = tiled_attention_forward(q, k[..., :end, :], v[..., :end, :], **options)
        maxima = scores[:, :end].amax(dim=-1)
        denominators = (lse[0, 0].double() - maxima).exp()
        distances = ((out - final).norm(dim=-1) / final.norm(dim=-1))[0, 0]
        steps.append(torch.stack([maxima, denominators, distances]))
    by_query = torch.stack(steps, dim=-1)
    return {
        f"query {query} {name}": by_query[place, query].tolist()
        for place, name in enumerate(("maximum", "denominator", "distance"))
        for query in range(TRACED_QUERIES)
    }


def _measure_tile(device: Device, case: Case, ceilings: dict[str, float]) -> Measured:
    """The forward kernel with other tiles than the shipped ones, held to the same gate."""
    if reason := triton_unavailable(device):
        raise Skip(reason)
    problem = attention_of(device, case.parameters)
    tensors = [x.detach() for x in problem.inputs]
    shipped = labkit_flash.resolve_tiles(*tensors[:2], **problem.options)
    tile = TileConfig(*(case.parameters[name] for name in TILE_FIELDS))
    config = dataclasses.replace(shipped, forward=tile)
    right = 0 if problem.shape.causal else -1
    plan = labkit_flash.plan_of(*tensors, right=right, config=config)
    run = functools.partial(plan.forward, *tensors)
    try:
        out, _ = run()
    except triton.errors.TritonError as error:
        raise Skip(f"{type(error).__name__}: {error}".split("\n")[0]) from None
    verdict = problem.verdicts("forward", [out])[0]
    limits = {"device_kind": device.kind, "num_warmup": 1, "time_limit_s": case.time_limit_s}
    method = "graph" if device.kind == "cuda" else "host"
    found = timed(device, time_callable, run, method=method, **limits)
    metrics = problem.rates("forward", found.timing.median_ms, ceilings) | verdict.metrics()
    tile_case = {name: getattr(tile, name) for name in TILE_FIELDS}
    metrics["is_shipped"] = int(tile == shipped.forward)
    return found.measured(metrics, problem.described() | tile_case)


@contextlib.contextmanager
def _memory_call(device: Device, case: Case) -> Iterator[tuple[Attention, int]]:
    """Gives the operation, and the bytes that were allocated before its tensors."""
    if device.kind != "cuda":
        raise Skip("the peak of memory is what CUDA's allocator counts")
    p = case.parameters
    attention_problem.cache_clear()
    small = Attention(device, Rivalry(1, 1, 128, p["d_head"], p["causal"]), p["precision"])
    if reason := small.unavailable(p["impl"]):
        raise Skip(reason)
    # What a library sets aside at its first call, and keeps, is not the call's.
    small.gradients(p["impl"])
    empty_cache(device)
    before = torch.cuda.memory_allocated()
    yield attention_of(device, p), before


def _measure_memory(call: tuple[Attention, int], case: Case, phase: str) -> Measured:
    """The peak of a forward pass, or of a forward and a backward pass, inputs included."""
    (problem, before), impl = call, case.parameters["impl"]
    torch.cuda.reset_peak_memory_stats()
    problem.call(impl, phase)()
    return Measured(
        {"peak_bytes": torch.cuda.max_memory_allocated() - before},
        {**problem.described(), "impl": impl},
        {"ran": problem.observed(impl)["ran"]},
    )


SECTIONS = {
    **CEILINGS,
    "algorithm": section(_measure_algorithm),
    "weighted_sum": contest_section(WeightedSum),
    "speed": contest_section(attention_of),
    "rivals": contest_section(attention_of, is_ranking=True),
    "tiles": lambda *arguments: [("forward", functools.partial(_measure_tile, *arguments))],
    "memory": section(_measure_memory, _memory_call),
}


def run_case(case: Case, ceilings: dict[str, float]) -> Iterator[PhaseRun]:
    """Yields each phase of `case` with the function that measures it. Runs in the worker
    process.
    """
    numerics.set_precision(case.parameters.get("precision", "fp32"))
    return run_section(SECTIONS, case, ceilings)
