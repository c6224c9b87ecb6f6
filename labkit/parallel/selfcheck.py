"""Checks every collective, transport and wrapper on the ranks at hand and prints PASS or FAIL with numbers.

`python -m labkit.parallel.launch --nproc 2 labkit.parallel.selfcheck:run`, and with `zero_cta` behind it for that
transport, which wants a process of its own; `--backend gloo` for gloo, on CUDA tensors where there is a GPU.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from labkit.communication import OPERATIONS
from labkit.configs import SIZES
from labkit.models.transformer import Block, TransformerLM, language_model_loss
from labkit.parallel import data_parallel
from labkit.parallel.collectives import time_collective
from labkit.parallel.fully_sharded import FullyShardedDataParallel
from labkit.parallel.launch import rank_device
from labkit.parallel.sharded_optimizer import ShardedOptimizer

WRAPPERS: dict[str, tuple[Callable[[nn.Module], nn.Module], float]] = {
    "naive": (data_parallel.NaiveDataParallel, 1e-4),
    "flat": (data_parallel.FlatDataParallel, 1e-4),
    "overlapped": (data_parallel.OverlappedDataParallel, 1e-4),
    "bucketed, 1 MB": (partial(data_parallel.BucketedDataParallel, bucket_size_mb=1), 1e-4),
    "fully sharded": (FullyShardedDataParallel, 1e-4),
    "fully sharded, blocks": (partial(FullyShardedDataParallel, units=(Block,)), 1e-4),
    "fully sharded, compiled": (FullyShardedDataParallel, 1e-3),
    "fully sharded, bf16": (partial(FullyShardedDataParallel, compute_dtype=torch.bfloat16), 0.05),
}
"""How a model is wrapped, and how far from one process three steps may end, as a share of the farthest way made."""


def run(*transports: str) -> None:
    """Prints one line a check on rank 0; raises RuntimeError at the end where one failed."""
    on_nccl = dist.get_backend() == "nccl"
    failed = []
    for transport in transports or (("default", "ctas_4", "ctas_16", "copy") if on_nccl else ("default",)):
        for operation in OPERATIONS if transport != "copy" else ("all_gather", "reduce_scatter"):
            for num_bytes in (10**4, 10**7, 10**9) if on_nccl else (10**4, 10**7):
                failed += _check(
                    f"{transport} {operation} {num_bytes:.0e} B", _collective, transport, operation, num_bytes
                )
    for name, (wrap, tolerance) in WRAPPERS.items() if not transports else ():
        # gloo gathers CPU tensors only.
        if on_nccl or rank_device().type == "cpu" or "fully" not in name:
            failed += _check(name, _training, wrap, tolerance, "compiled" in name, torch.optim.SGD)
    if not transports:
        failed += _check("sharded AdamW", _training, WRAPPERS["naive"][0], 1e-4, False, torch.optim.AdamW)
    if failed:
        raise RuntimeError(f"{len(failed)} checks failed: {', '.join(failed)}")


def _check(name: str, check: Callable[..., tuple[bool, str]], *args) -> list[str]:
    try:
        passed, numbers = check(*args)
    except Exception as error:
        passed, numbers = False, f"{type(error).__name__}: {error}"
    if dist.get_rank() == 0 or not passed:
        print(f"{'PASS' if passed else 'FAIL'} {name} (rank {dist.get_rank()}): {numbers}", flush=True)
    return [] if passed else [name]


def _collective(transport: str, operation: str, num_bytes: int) -> tuple[bool, str]:
    found = time_collective(operation, num_bytes, torch.bfloat16, transport=transport)
    numbers = f"{found['seconds'] * 1e6:.0f} µs, bus {found['bus_gbs']:.1f} GB/s, {found['num_wrong']} wrong"
    return found["num_wrong"] == 0, numbers


def _training(
    wrap: Callable[[nn.Module], nn.Module], tolerance: float, compiled: bool, optimizer_cls: type[torch.optim.Optimizer]
) -> tuple[bool, str]:
    """Compares three steps with one process that takes every rank's batch in turn."""
    device, config = rank_device(), SIZES["nano"]
    torch.manual_seed(0)
    expected = TransformerLM(config, max_context=64, device=device)
    start = [p.detach().clone() for p in expected.parameters()]
    torch.manual_seed(dist.get_rank())
    module = TransformerLM(config, max_context=64, device=device)
    if compiled:
        module.blocks = nn.ModuleList(torch.compile(block) for block in module.blocks)
    model = wrap(module)
    sharded = optimizer_cls is torch.optim.AdamW
    optimizer = ShardedOptimizer(model.parameters(), optimizer_cls, lr=0.01) if sharded else None
    optimizers = [
        optimizer_cls(expected.parameters(), lr=0.01),
        optimizer or optimizer_cls(model.parameters(), lr=0.01),
    ]
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(config.vocab_size, (dist.get_world_size(), 2, 64), generator=generator).to(device)
        for each in optimizers:
            each.zero_grad()
        for batch in tokens:
            (language_model_loss(expected(batch), batch) / len(tokens)).backward()
        language_model_loss(model(tokens[dist.get_rank()]).float(), tokens[dist.get_rank()]).backward()
        model.finish_gradient_synchronization()
        for each in optimizers:
            each.step()
    found = model.gather_full_params() if hasattr(model, "gather_full_params") else dict(module.named_parameters())
    triples = zip(found.values(), expected.parameters(), start, strict=True)
    worst = max(((a - b).abs().max() / (b - begin).abs().max()).item() for a, b, begin in triples)
    held = sum(p.nbytes for p in model.parameters()) / sum(p.nbytes for p in expected.parameters())
    return (
        worst <= tolerance,
        f"off by {worst:.1e} of the way (at most {tolerance}), holds {held:.2f} of the parameters",
    )
