"""Checks every collective, transport and wrapper on the ranks at hand and prints PASS or FAIL with numbers.

`python -m labkit.parallel.launch --nproc 2 labkit.parallel.selfcheck:run`, and with `zero_cta` behind it for that
transport, which wants a process of its own; `--backend gloo` for gloo, on CUDA tensors where there is a GPU.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from labkit.communication import OPERATIONS
from labkit.parallel import data_parallel
from labkit.parallel.collectives import time_collective
from labkit.parallel.fully_sharded import FullyShardedDataParallel
from labkit.parallel.launch import rank_device
from labkit.parallel.sharded_optimizer import ShardedOptimizer

VOCABULARY, WIDTH = 512, 256


class _Block(nn.Sequential):
    """A norm and a feed-forward layer, with and without bias."""

    def __init__(self):
        layers = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH, bias=False)
        super().__init__(*layers)


WRAPPERS: dict[str, tuple[Callable[[nn.Module], nn.Module], float]] = {
    **{name: (getattr(data_parallel, f"{name}DataParallel"), 1e-4) for name in ("Naive", "Flat", "Overlapped")},
    "Bucketed, 1 MB": (partial(data_parallel.BucketedDataParallel, bucket_size_mb=1), 1e-4),
    "Bucketed, 1 MB, copy": (partial(data_parallel.BucketedDataParallel, bucket_size_mb=1, transport="copy"), 1e-4),
    "FullySharded": (FullyShardedDataParallel, 1e-4),
    "FullySharded, blocks": (partial(FullyShardedDataParallel, units=(_Block,)), 1e-4),
    "FullySharded, copy": (partial(FullyShardedDataParallel, transport="copy"), 1e-4),
    "FullySharded, bf16, copy": (
        partial(FullyShardedDataParallel, compute_dtype=torch.bfloat16, transport="copy"),
        0.05,
    ),
    "FullySharded, compiled": (FullyShardedDataParallel, 1e-3),
    "FullySharded, bf16": (partial(FullyShardedDataParallel, compute_dtype=torch.bfloat16), 0.05),
}
"""How a model is wrapped, and how far from one process three steps may end, as a share of a parameter's way."""


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
        if "copy" in name and not on_nccl:
            continue
        # gloo gathers CPU tensors only.
        if on_nccl or rank_device().type == "cpu" or "Fully" not in name:
            failed += _check(name, _training, wrap, tolerance, compiled="compiled" in name)
    if not transports:
        failed += _check("sharded AdamW", _training, *WRAPPERS["Naive"], sharded=True)
    if failed:
        raise RuntimeError(f"{len(failed)} checks failed: {', '.join(failed)}")


def _check(name: str, check: Callable[..., tuple[bool, str]], *args, **options) -> list[str]:
    try:
        passed, numbers = check(*args, **options)
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
    wrap: Callable[[nn.Module], nn.Module], tolerance: float, *, compiled: bool = False, sharded: bool = False
) -> tuple[bool, str]:
    """Compares three steps with one process that takes every rank's batch in turn."""
    device = rank_device()
    expected, module = _model(0).to(device), _model(dist.get_rank()).to(device)
    start = [p.detach().clone() for p in expected.parameters()]
    if compiled:
        module = nn.Sequential(*(torch.compile(layer) if isinstance(layer, _Block) else layer for layer in module))
    model = wrap(module)
    # Steps that rounding of the parameters does not hide.
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (expected, model)]
    if sharded:
        sharded_adamw = ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
        optimizers = [torch.optim.AdamW(expected.parameters(), lr=0.01), sharded_adamw]
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(VOCABULARY, (dist.get_world_size(), 128), generator=generator).to(device)
        for each in optimizers:
            each.zero_grad()
        for batch in tokens:
            (F.cross_entropy(expected(batch), batch) / len(tokens)).backward()
        F.cross_entropy(model(tokens[dist.get_rank()]).float(), tokens[dist.get_rank()]).backward()
        model.finish_gradient_synchronization()
        for each in optimizers:
            each.step()
    found = model.gather_full_params() if hasattr(model, "gather_full_params") else dict(module.named_parameters())
    triples = zip(found.values(), expected.parameters(), start, strict=True)
    worst = max(((a - b).norm() / (b - begin).norm()).item() for a, b, begin in triples)
    held = sum(p.nbytes for p in model.parameters()) / sum(p.nbytes for p in expected.parameters())
    return (
        worst <= tolerance,
        f"off by {worst:.1e} of the way (at most {tolerance}), holds {held:.2f} of the parameters",
    )


def _model(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), _Block(), _Block(), _Block(), nn.Linear(WIDTH, VOCABULARY))
