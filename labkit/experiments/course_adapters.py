"""labkit's adapters for the tests of assignment 2 of Stanford's CS336, editions 2025 and 2026.

As the tests/adapters.py of a checkout they let its official tests judge labkit. Names, arguments
and results are the course's.
"""

import functools

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labkit.kernels.flash_attention import FlashAttention, TiledFlashAttention
from labkit.parallel.data_parallel import BucketedDataParallel, OverlappedDataParallel
from labkit.parallel.fully_sharded import FullyShardedDataParallel
from labkit.parallel.sharded_optimizer import ShardedOptimizer

get_ddp = get_ddp_individual_parameters = OverlappedDataParallel
get_ddp_bucketed = BucketedDataParallel
get_sharded_optimizer = ShardedOptimizer


def get_flashattention_autograd_function_pytorch() -> type:
    """Returns the tiled algorithm in plain PyTorch."""
    return TiledFlashAttention


def get_flashattention_autograd_function_triton() -> type:
    """Returns the Triton kernels, which need a CUDA device."""
    return FlashAttention


class get_fsdp(FullyShardedDataParallel):  # noqa: N801
    """labkit's, but parameters are plain tensors, what this rank holds: a test gathers gradients,
    and a `foreach` optimizer, the default on a GPU, takes no DTensors beside them.
    """

    # The tests' norms compute with fp32 weights, and another rounding of what comes before a ReLU
    # is another gradient where it changes a sign.
    _casts_vectors = False

    def _sharded(self, module: nn.Module) -> dict:
        parameters = super()._sharded(module)
        for parameter in parameters.values():
            whole = parameter.outer
            held = parameter.outer = nn.Parameter(parameter.local, whole.requires_grad)
            # What labkit reads of a DTensor, and the rows of all ranks.
            held._local_tensor, held.num_rows = held.data, len(whole)
            parameter.add_gradient = functools.partial(_add_gradient, held)
        return parameters


def _add_gradient(p: nn.Parameter, gradient: Tensor) -> None:
    p.grad = gradient if p.grad is None else p.grad + gradient


def fsdp_gather_full_params(fsdp_model: nn.Module) -> dict[str, Tensor]:
    """Returns the whole parameters by name. Collective."""
    return {name: all_rows(p) for name, p in fsdp_model.module.named_parameters()}


def all_rows(p: nn.Parameter) -> Tensor:
    """Gathers without DTensor's `full_tensor()`, which crashes with gloo on a GPU (PyTorch's pull
    request 132709), the backend of the tests.
    """
    if getattr(p, "num_rows", len(p)) == len(p):  # replicated
        return p.detach()
    shards: list = [None] * dist.get_world_size()
    dist.all_gather_object(shards, p.detach().cpu())
    return torch.cat(shards).to(p.device)


def ddp_on_after_backward(ddp_model: nn.Module, optimizer: object) -> None:
    """Has every gradient be the average over the ranks."""
    ddp_model.finish_gradient_synchronization()


fsdp_on_after_backward = ddp_on_after_backward
ddp_individual_parameters_on_after_backward = ddp_bucketed_on_after_backward = ddp_on_after_backward


def ddp_bucketed_on_train_batch_start(ddp_model: nn.Module, optimizer: object) -> None:
    """Does nothing: each bucket knows when it is whole."""
