"""What one transformer block, or a part of it, keeps for its backward pass, compiled or not."""

import torch
from torch import Tensor, nn

from labkit import numerics
from labkit.configs import ModelConfig
from labkit.device import Device
from labkit.experiments.sections import empty_cache, num_bytes
from labkit.experiments.step import run_blocks
from labkit.experiments.sweep import Case, Measured
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
    try:
        return _measure(device, case.parameters)
    finally:
        empty_cache(device)


def _measure(device: Device, parameters: dict) -> Measured:
    torch.manual_seed(0)
    numerics.set_precision(parameters["precision"])
    kind, part = device.kind, parameters["part"]
    is_compiled = parameters["code"] == "compiled"
    d_model, context = parameters["d_model"], parameters["context"]
    config = ModelConfig(
        "block", "notebook 04", d_model, parameters["d_ff"], 1, parameters["num_heads"]
    )
    if part == "rms_norm":
        modules = nn.ModuleList([RMSNorm(d_model).to(kind)])
    else:
        num_blocks = 4 if part.startswith("four_blocks") else 1
        blocks = (Block(config, "eager").to(kind) for _ in range(num_blocks))
        modules = nn.ModuleList(blocks)
    rotary = RotaryEmbedding(config.d_head, context, config.rope_theta).to(kind)
    shape = (parameters["batch"], context, d_model)
    x_BTC = torch.randn(shape, device=kind, requires_grad=True)
    grad_out_BTC = torch.randn(shape, device=kind)
    plan = (2,) if part.endswith("by_pairs") else ()

    def forward() -> Tensor:
        if part == "rms_norm":
            return modules[0](x_BTC)
        return run_blocks(list(modules), x_BTC, rotary, plan)

    def results() -> list[Tensor]:
        """Returns the output, and the gradients of the input and the parameters."""
        out = forward()
        leaves = [x_BTC, *modules.parameters()]
        return [out.detach(), *torch.autograd.grad(out, leaves, grad_out_BTC)]

    metrics: dict[str, float] = {}
    if is_compiled:
        exact = results()
        for module in modules:
            module.compile(backend=COMPILERS[kind], dynamic=False)
        metrics["relative_difference"] = _largest_difference(results(), exact)
        del exact
    resident = [*modules.parameters(), *rotary.buffers()]
    kept, out = residuals(forward, modules, resident, is_compiled=is_compiled)
    metrics |= {
        "num_residuals": len(kept),
        "num_resident_residuals": sum(residual.is_resident for residual in kept),
        "num_distinct": sum(residual.is_new for residual in kept),
        "saved_bytes": saved_bytes(kept),
        "packed_bytes": packed_bytes(kept),
        "stream_bytes": out.untyped_storage().nbytes(),
    }
    modules.zero_grad()
    out.backward(grad_out_BTC)
    del out
    metrics["gradient_bytes"] = num_bytes([parameter.grad for parameter in modules.parameters()])
    modules.zero_grad()
    x_BTC.grad = None
    metrics["made_bytes"] = measure_usage(forward, kind).kept_bytes
    observed: dict = {"residuals": _grouped(kept)}
    if is_compiled:
        observed["compiler"] = COMPILERS[kind]
        observed["num_replacements"] = torch._dynamo.utils.counters["inductor"]["fuse_attention"]
    return Measured(metrics, _described(parameters, modules, x_BTC, plan), observed)


def _largest_difference(results: list[Tensor], exact: list[Tensor]) -> float:
    """Returns the largest relative difference; raises AssertionError for a wrong result."""
    pairs = zip(results, exact, strict=True)
    worst = max(float((x - reference).norm() / reference.norm()) for x, reference in pairs)
    if not worst <= LARGEST_DIFFERENCE:
        raise AssertionError(
            f"compiled and eager differ by {worst:.2g}, more than {LARGEST_DIFFERENCE:g}"
        )
    return worst


def _described(parameters: dict, modules: nn.ModuleList, x_BTC: Tensor, plan: tuple) -> dict:
    """Returns the case as read back from the live objects; RMSNorm has neither d_ff nor heads."""
    batch, context, d_model = x_BTC.shape
    num_compiled = sum(module._compiled_call_impl is not None for module in modules)
    code = {0: "eager", len(modules): "compiled"}.get(num_compiled, f"{num_compiled} compiled")
    described = {
        **parameters,
        "part": "rms_norm",
        "code": code,
        "d_model": d_model,
        "context": context,
        "batch": batch,
        "precision": numerics.dtype_name(x_BTC.dtype),
    }
    block = modules[0]
    if isinstance(block, Block):
        name = {1: "block", 4: "four_blocks"}[len(modules)]
        described["part"] = f"{name}_by_pairs" if plan else name
        described["d_ff"] = block.feed_forward.up_proj.weight.shape[0]
        described["num_heads"] = block.attention.num_heads
    return described


def _grouped(kept: list[Residual]) -> list[dict]:
    """Returns the residuals, like ones together."""
    groups: dict[tuple, list[Residual]] = {}
    for residual in kept:
        module = residual.module.removeprefix("0.") if residual.module != "0" else ""
        shape = " × ".join(map(str, residual.shape))
        key = (residual.operator, module, shape, residual.dtype, residual.is_resident)
        groups.setdefault(key, []).append(residual)
    names = ("operator", "module", "shape", "dtype", "is_resident")
    return [
        {
            **dict(zip(names, key, strict=True)),
            "count": len(group),
            "num_distinct": sum(residual.is_new for residual in group),
            "saved_bytes": saved_bytes(group),
        }
        for key, group in groups.items()
    ]
