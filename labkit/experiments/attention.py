"""Notebook 05: one attention call, its time, its memory and its error, by implementation, head
dimension and length.

Sections: "ceilings" (measured anew each session), "attention" (forward and backward of every
implementation), "masked" ("attention" with a causal mask, at few lengths).
"""

import functools
import importlib
import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from labkit import numerics
from labkit.configs import GRIDS
from labkit.device import Device
from labkit.experiments.contest import Implementation
from labkit.experiments.operations import new_attention
from labkit.experiments.sections import Plan, empty_cache, memory_bytes, run_section, section, timed
from labkit.experiments.sweep import Case, Measured
from labkit.kernels.attention import IMPLS
from labkit.kernels.reference import attention_reference
from labkit.measure.memory import residuals, saved_bytes, storage_bytes
from labkit.measure.timing import time_callable

MEASUREMENT_VERSION = 1

ATTENTION_BATCH = 8
"""Sequences of one attention call, as in the published grid: no heads, so eight score matrices."""

ATTENTION_PASSES = 100
"""Timed passes of one case, as published; a case that takes long is ended by its time limit before.
"""


def cases(profile: str, device_kind: str) -> list[Case]:
    """Returns the cases of `profile`."""
    grid = GRIDS["05_attention"][profile]
    plan = Plan(grid, grid.series)

    def add(section: str, impl: str, precision: str, d_head: int, length: int, **mask) -> None:
        call = {
            "impl": impl,
            "precision": precision,
            "d_head": d_head,
            "length": length,
            "batch": ATTENTION_BATCH,
            **mask,
        }
        compiles = impl.startswith("compiled")
        plan.add(section, call, "forward", "backward", stop_at_failure=True, compiles=compiles)

    # A series of rising lengths after the other.
    for precision, impls in grid.series.items():
        for impl, d_head in itertools.product(impls, grid.d_heads):
            is_long = d_head == grid.long_d_head
            # A course's grid of widths is of the formula and its compiled form in fp32.
            if not is_long and (precision != "fp32" or impl not in ("eager", "compiled")):
                continue
            series = grid.compiled_lengths if impl == "compiled" else grid.lengths
            if impl == "eager" or is_long:
                series = (*series, *grid.long_lengths.get(precision, ()))
            for length in series:
                add("attention", impl, precision, d_head, length)
        if "compiled" in impls and precision != "tf32":
            for length in grid.heads_lengths:
                add("attention", "compiled_heads", precision, grid.long_d_head, length)
    for precision in ("fp32", "bf16"):
        for impl, length in itertools.product(grid.series.get(precision, ()), grid.masked_lengths):
            if impl != "compiled" or length in grid.compiled_lengths:
                add("masked", impl, precision, grid.long_d_head, length, causal=True)
    return plan


class AttentionCall:
    """The live objects of one case: the operation, of tensors (batch, length, d_head), and its one
    implementation.

    "compiled_heads", which lets the compiler recognise attention, and what is entered in
    `operations` have one head in front of the length.

    Raises Skip for what cannot run here, RequestError for an unknown implementation. The label is
    what runs: of SDPA's backends only the one asked for is allowed, and PyTorch raises where that
    cannot run.
    """

    def __init__(self, device: Device, parameters: dict):
        self.device = device
        self.impl = parameters["impl"]
        self.is_compiled = self.impl in ("compiled", "compiled_heads")
        heads = {} if self.impl in IMPLS else {"heads": 1}
        self.operation = new_attention(device, {"causal": False, **heads, **parameters})
        self.inputs = [*self.operation.inputs.values()]
        function = attention_reference  # on the tensors as they are
        if self.is_compiled:
            # With it the passes that replace the formula are skipped, and not counted.
            importlib.import_module("torch._functorch.config").enable_autograd_cache = False
            torch._dynamo.utils.counters.clear()
            torch.compiler.reset()
            function = torch.compile(function, dynamic=False, fullgraph=True)
        if self.is_compiled or self.impl == "eager":
            self.operation.implementations = {self.impl: Implementation(function)}
        self.operation.check(self.impl)
        self.function = self.operation.implementations[self.impl].function

    def forward(self) -> Tensor:
        return self.function(*self.inputs, **self.operation.options)

    def forward_for_backward(self) -> tuple[Tensor, Tensor]:
        """Returns what `Tensor.backward` takes, after a forward pass of its own; earlier gradients
        are dropped.
        """
        for x in self.inputs:
            x.grad = None
        return self.forward(), *self.operation.grad_outs

    def passes(self, phase: str) -> tuple[Callable, Callable]:
        """Returns the function of a pass, and what makes its arguments."""
        if phase == "backward":
            return Tensor.backward, self.forward_for_backward
        return self.forward, tuple

    def memory(self, phase: str) -> dict[str, int]:
        """Returns the bytes of one pass: kept for the backward pass, and on CUDA the peak with the
        inputs.
        """
        for x in self.inputs:
            x.grad = None
        empty_cache()
        is_cuda = self.device.kind == "cuda"
        others = torch.cuda.memory_allocated() - storage_bytes(self.inputs)
        function, inputs = self.passes(phase)
        arguments = inputs()
        if is_cuda:
            torch.cuda.reset_peak_memory_stats()
        out = function(*arguments)
        metrics = {"device_bytes": memory_bytes(self.device)}
        if is_cuda:
            metrics["peak_bytes"] = torch.cuda.max_memory_allocated() - others
        if phase == "forward":
            del out
            # As compiled: no names are asked for, and a function may be compiled by itself.
            saved = residuals(self.forward, [], is_compiled=True)
            # Without the seeds of SDPA, which are plain numbers.
            metrics["saved_bytes"] = saved_bytes([one for one in saved if one.shape])
        return metrics

    def error(self, phase: str) -> dict[str, float]:
        """Returns the relative error of one pass against fp64, of the worst gradient; raises
        AssertionError for a wrong result.
        """
        # In a cached block of the scores' size it would leave no room for the next scores.
        empty_cache()
        _ = self.operation.expected  # before the pass, whose memory it may need
        name = "output" if phase == "forward" else "gradient"
        verdict = self.operation.judge(self.impl, phase)
        return {f"{name}_relative_error": verdict.relative_error}


def _measure(call: AttentionCall, case: Case, phase: str) -> Measured:
    function, inputs = call.passes(phase)
    metrics = {}
    if call.is_compiled:
        function(*inputs())
        # How many times the compiler put SDPA in the place of the formula.
        metrics["num_replacements"] = torch._dynamo.utils.counters["inductor"]["fuse_attention"]
    times = timed(
        call.device,
        time_callable,
        function,
        inputs=inputs,
        max_samples=ATTENTION_PASSES,
        target_half_width=0.0,
        time_limit_s=case.time_limit_s,
    )
    metrics |= call.memory(phase) | call.error(phase)
    # A result with another mask is far from the oracle's.
    precision = numerics.live_precision(call.operation.dtype)
    return times.measured(metrics, {**case.parameters, "precision": precision}, keep="pass_ms")


SECTIONS = dict.fromkeys(("attention", "masked"), section(_measure, AttentionCall))

run_case = functools.partial(run_section, SECTIONS)
