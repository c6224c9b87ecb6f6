"""What one transformer block, or a part of it, keeps for its backward pass, compiled or not."""

from typing import Any

import torch
from torch import Tensor, nn

from labkit import numerics
from labkit.configs import ModelConfig
from labkit.device import Device
from labkit.experiments.sections import empty_cache, num_bytes
from labkit.experiments.sweep import Case, Measured
from labkit.experiments.workload import run_blocks
from labkit.measure.memory import Residual, measure_usage, packed_bytes, residuals, saved_bytes
from labkit.models.transformer import Block, RMSNorm, RotaryEmbedding

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

LARGEST_DIFFERENCE = 1e-4
"""Relative difference of a compiled result from the eager one above which it is wrong."""


def measure_part(device: Device, case: Case, phase: str) -> Measured:
    """Lists what a part keeps for its backward pass; a compiled one is held against the eager
    one.
    """
    part = PartOfBlock(device, case.parameters)
    measured = Measured(part.measure(), part.described(), part.observed())
    del part
    empty_cache(device)
    return measured


class PartOfBlock:
    """The live objects of one case: an RMSNorm, a block, or four of them; their input and its
    gradient.
    """

    def __init__(self, device: Device, parameters: dict):
        torch.manual_seed(0)
        numerics.set_precision(parameters["precision"])
        self.device, self.name = device, parameters["part"]
        self.is_compiled = parameters["code"] == "compiled"
        d_model, context = parameters["d_model"], parameters["context"]
        self.config = ModelConfig(
            "block", "notebook 04", d_model, parameters["d_ff"], 1, parameters["num_heads"]
        )
        if self.name == "rms_norm":
            self.modules = nn.ModuleList([RMSNorm(d_model, device=device.kind)])
        else:
            num_blocks = 4 if self.name.startswith("four_blocks") else 1
            self.modules = nn.ModuleList(
                Block(self.config, "eager", device=device.kind) for _ in range(num_blocks)
            )
        self.rotary = RotaryEmbedding(
            self.config.d_head, context, self.config.rope_theta, device=device.kind
        )
        shape = (parameters["batch"], context, d_model)
        self.x_BTC = torch.randn(shape, device=device.kind, requires_grad=True)
        self.grad_out_BTC = torch.randn(shape, device=device.kind)
        self.plan = [2] if self.name.endswith("by_pairs") else []

    def forward(self) -> Tensor:
        if self.name == "rms_norm":
            return self.modules[0](self.x_BTC)
        return run_blocks(list(self.modules), self.x_BTC, self.rotary, self.plan)

    def gradients(self) -> list[Tensor]:
        """Returns the gradients of the input and the parameters after a forward and backward pass
        of their own.
        """
        return list(
            torch.autograd.grad(
                self.forward(), [self.x_BTC, *self.modules.parameters()], self.grad_out_BTC
            )
        )

    def measure(self) -> dict[str, Any]:
        metrics: dict[str, Any] = {}
        if self.is_compiled:
            exact = [self.forward().detach(), *self.gradients()]
            for module in self.modules:
                module.compile(backend=COMPILERS[self.device.kind], dynamic=False)
            pairs = zip([self.forward().detach(), *self.gradients()], exact, strict=True)
            worst = max(float((x - reference).norm() / reference.norm()) for x, reference in pairs)
            if not worst <= LARGEST_DIFFERENCE:
                raise AssertionError(
                    f"compiled and eager differ by {worst:.2g}, more than {LARGEST_DIFFERENCE:g}"
                )
            metrics["relative_difference"] = worst
            del exact, pairs
        resident = [*self.modules.parameters(), *self.rotary.buffers()]
        self.found, out = residuals(
            self.forward, self.modules, resident, is_compiled=self.is_compiled
        )
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
        metrics["gradient_bytes"] = num_bytes(
            [parameter.grad for parameter in self.modules.parameters()]
        )
        self.modules.zero_grad()
        self.x_BTC.grad = None
        metrics["made_bytes"] = measure_usage(self.forward, self.device.kind).kept_bytes
        return metrics

    def described(self) -> dict[str, Any]:
        """Returns the case as read back from the live objects."""
        batch, context, d_model = self.x_BTC.shape
        num_compiled = sum(module._compiled_call_impl is not None for module in self.modules)
        first = self.modules[0]
        is_block = isinstance(first, Block)
        name = {1: "block", 4: "four_blocks"}[len(self.modules)] if is_block else "rms_norm"
        return {
            "part": f"{name}_by_pairs" if self.plan else name,
            "code": {0: "eager", len(self.modules): "compiled"}.get(
                num_compiled, f"{num_compiled} compiled"
            ),
            "d_model": d_model,
            "d_ff": first.feed_forward.up_proj.weight.shape[0] if is_block else self.config.d_ff,
            "num_heads": first.attention.num_heads if is_block else self.config.num_heads,
            "context": context,
            "batch": batch,
            "precision": numerics.dtype_name(self.x_BTC.dtype),
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
        seen: dict[str, Any] = {"residuals": []}
        for key, group in groups.items():
            num_distinct = sum(residual.is_new for residual in group)
            counts = {
                "count": len(group),
                "num_distinct": num_distinct,
                "saved_bytes": saved_bytes(group),
            }
            seen["residuals"].append({**dict(zip(names, key, strict=True)), **counts})
        if self.is_compiled:
            seen["compiler"] = COMPILERS[self.device.kind]
            seen["num_replacements"] = torch._dynamo.utils.counters["inductor"]["fuse_attention"]
        return seen
