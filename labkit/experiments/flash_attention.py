"""Notebook 06: FlashAttention against every other implementation, each held to the fp64 oracle
before it is timed.

Sections: "ceilings" (measured anew each session), "speed" (the grid of lengths and head
dimensions), "tiles" (the forward kernel over its tile sizes), "rivals" (the shapes on which
everything is ranked), "memory" (peaks).

A case of "speed" and "rivals" is a contest. Shapes: B batch, H heads, S length, D head dimension.
"""

import dataclasses
import functools
import itertools

import torch
import triton.errors

from labkit.configs import GRIDS, MATERIALISING, PASSES
from labkit.device import Device
from labkit.experiments.contest import IN_TURN, RANKING, contest_section
from labkit.experiments.operations import add_contest, new_attention
from labkit.experiments.sections import Plan, empty_cache, rate_metrics, run_section, section, timed
from labkit.experiments.sweep import Case, Measured, Skip
from labkit.kernels import flash_attention as labkit_flash
from labkit.kernels.flash_attention.tiles import TileConfig
from labkit.measure.timing import time_callable

MEASUREMENT_VERSION = 2

TILE_FIELDS = ("block_q", "block_k", "num_warps", "num_stages")


def cases(profile: str, device_kind: str) -> list[Case]:
    """Returns the cases of `profile`."""
    grid = GRIDS["06_flash_attention"][profile]
    plan = Plan(grid, grid.impls)
    for tile in grid.tiles:
        parameters = {**grid.tiles_shape, "precision": "bf16"}
        parameters |= zip(TILE_FIELDS, tile, strict=True)
        plan.add("tiles", parameters, "forward", compiles=True)
    for shape in grid.rivalries:
        add_contest(
            plan,
            RANKING,
            "attention",
            {**shape, "precision": "bf16"},
            grid.rivals,
            compiles=True,
            time_limit_s=grid.rivals_time_limit_s,
            sustained=tuple(f"{impl} {name}" for name in PASSES[:2] for impl in grid.sustained),
        )
    # Shape by shape what is timed in turn, and what is timed alone.
    for precision, impls in grid.impls.items():
        for d_head, length in itertools.product(grid.d_heads, grid.lengths):
            here = [
                impl
                for impl in impls
                if length in grid.by_shape.get(impl, {d_head: grid.lengths}).get(d_head, ())
            ]
            shape = _one_head(length, d_head, precision)
            in_turn = [impl for impl in here if impl not in MATERIALISING]
            add_contest(
                plan, "speed", "attention", {**shape, "timed": IN_TURN}, in_turn, compiles=True
            )
            for impl in here:
                if impl in MATERIALISING:
                    plan.add(
                        "speed",
                        {**shape, "timed": f"alone: {impl}"},
                        *(f"{impl} {name}" for name in PASSES),
                        compiles=impl != "eager",
                    )
    for precision, impls in grid.memory_impls.items():
        for impl, length in itertools.product(impls, grid.memory_lengths):
            parameters = {**_one_head(length, grid.memory_d_head, precision), "impl": impl}
            # Nothing is left to compile: its kernels are those of "speed".
            plan.add("memory", parameters, "forward", "forward_backward")
    return plan


def _one_head(length: int, d_head: int, precision: str) -> dict:
    """Returns the parameters of causal attention at batch 1 with one head."""
    return {
        "batch": 1,
        "heads": 1,
        "length": length,
        "d_head": d_head,
        "causal": True,
        "precision": precision,
    }


def _measure_tile(device: Device, case: Case, phase: str) -> Measured:
    """The forward kernel with other tiles than the shipped ones, held to the same gate."""
    if device.kind != "cuda" and not labkit_flash.IS_INTERPRETED:
        raise Skip(f"the Triton kernel needs a CUDA device; this is {device.kind}")
    operation = new_attention(device, case.parameters)
    tensors = [x.detach() for x in operation.inputs.values()]
    shipped = labkit_flash.resolve_tiles(*tensors[:2], **operation.options)
    tile = TileConfig(*(case.parameters[name] for name in TILE_FIELDS))
    config = dataclasses.replace(shipped, forward=tile)
    right = 0 if operation.options["causal"] else -1
    plan = labkit_flash.plan_of(*tensors, right=right, config=config)
    run = functools.partial(plan.forward, *tensors)
    try:
        out, _ = run()
    except triton.errors.TritonError as error:
        raise Skip(f"{type(error).__name__}: {error}".split("\n")[0]) from None
    verdict = operation.worst("ours", "forward", [out])
    times = timed(
        device,
        time_callable,
        run,
        method="graph" if device.kind == "cuda" else "host",
        num_warmup=1,
        time_limit_s=case.time_limit_s,
    )
    median_ms = times.timing.median_ms
    work = operation.costs["forward"]
    metrics = rate_metrics(device, case.ceilings, median_ms, operation.precision, **work)
    return times.measured(metrics | verdict._asdict(), case.parameters)


def _measure_memory(device: Device, case: Case, phase: str) -> Measured:
    """The peak of a forward pass, or of a forward and a backward pass, inputs included."""
    if device.kind != "cuda":
        raise Skip("the peak of memory is what CUDA's allocator counts")
    impl = case.parameters["impl"]
    small = new_attention(device, case.parameters | {"length": 128})
    small.check(impl)
    # What a library sets aside at its first call, and keeps, is not the call's.
    small.call(impl, "forward_backward")()
    empty_cache()
    before = torch.cuda.memory_allocated()
    operation = new_attention(device, case.parameters)
    torch.cuda.reset_peak_memory_stats()
    operation.call(impl, phase)()
    return Measured({"peak_bytes": torch.cuda.max_memory_allocated() - before}, case.parameters)


SECTIONS = {
    "speed": contest_section(new_attention),
    RANKING: contest_section(new_attention),
    "tiles": section(_measure_tile),
    "memory": section(_measure_memory),
}

run_case = functools.partial(run_section, SECTIONS)
