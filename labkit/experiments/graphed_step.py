"""A whole training step as one CUDA graph: zero_grad, forward, loss, backward and AdamW, replayed
by one launch.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from labkit.device import Device
from labkit.experiments.recipes import PrecisionWorkload
from labkit.experiments.sections import empty_cache
from labkit.experiments.sweep import Skip
from labkit.experiments.workload import adamw
from labkit.kernels.adamw import FusedAdamW
from labkit.measure.timing import captured_once, on_capture_stream

ATTENTION = {"eager": "eager", "fused": "auto"}
"""Implementation of attention by the model's: the fused model has ours."""

NUM_COMPARED = 3
"""Steps, each on its own tokens, after which losses and parameters of the graph are held against
the called step's.
"""

COMPARED_ELEMENTS = 65_536
"""Of each parameter at most so many elements are compared, evenly spaced: a second copy of all
might not fit.
"""

LARGEST_DIFFERENCES = {"loss_difference": 1e-3, "update_difference": 0.1}
"""Relative. A step whose sums come in another order flips Adam's sign where a gradient is almost
nothing; one that leaves out the optimizer, or keeps old gradients or tokens, is off by 0.3 or
more.
"""


def require_graphs(device: Device) -> None:
    """Raises Skip where there are no CUDA graphs."""
    if device.kind != "cuda":
        raise Skip(f"{device.name} has no CUDA graphs")


class GraphedWorkload(PrecisionWorkload):
    """The workload whose training step can become one CUDA graph; its `loss` stays where the graph
    writes it.

    The fused model's blocks keep their matrices in autocast's dtype, of which `FusedAdamW` has fp32
    masters.
    """

    captured: torch.cuda.CUDAGraph | None = None

    def __init__(self, device: Device, parameters: dict):
        super().__init__(device, parameters)
        if self.model.impl == "fused" and self.recipe.autocast:
            for module in self.model.blocks.modules():
                if isinstance(module, torch.nn.Linear):
                    module.to(self.recipe.autocast)

    @functools.cached_property
    def optimizer(self) -> torch.optim.Optimizer:
        """AdamW; on CUDA its count of steps is on the device too, so that a graph can hold it."""
        if self.model.impl == "fused":
            return FusedAdamW(self.model.parameters())
        return adamw(self.model.parameters(), capturable=self.device.kind == "cuda")

    def train_step(self) -> None:
        self.optimizer.zero_grad()
        loss = self.forward()
        loss.backward()
        self.optimizer.step()
        self.loss = loss.detach()

    def graph(self) -> tuple[Callable[[], None], dict[str, float]]:
        """Returns the replay of the captured step, and metrics: its peak of memory, and how far it
        is off.

        Raises:
            AssertionError: after NUM_COMPARED steps it is further off the called step than
                LARGEST_DIFFERENCES.
        """
        with on_capture_stream():
            called = self.trained(self.train_step)
        self.optimizer.zero_grad()
        empty_cache(self.device)
        torch.cuda.reset_peak_memory_stats()
        self.captured = captured_once(self.train_step)
        peak_bytes = torch.cuda.max_memory_allocated()
        differences = compared(called, self.trained(self.captured.replay))
        return self.captured.replay, {"peak_bytes": peak_bytes, **differences}

    def trained(self, step: Callable[[], None]) -> tuple[Tensor, list[Tensor]]:
        """Returns the losses of NUM_COMPARED steps from a fixed start, and what they changed in
        samples of parameters.

        Everything is set in place: a graph knows tensors by their address.
        """
        generator = torch.Generator(self.device.kind).manual_seed(0)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.normal_(
                    std=0.02, generator=generator
                ) if parameter.dim() > 1 else parameter.fill_(1)
            for parameter, state in self.optimizer.state.items():
                for name, tensor in state.items():
                    tensor.copy_(parameter) if name == "master" else tensor.zero_()
        begin, losses = self._samples(), []
        for _ in range(NUM_COMPARED):
            for ids in (self.tokens, self.targets):
                ids.random_(self.model.config.vocab_size, generator=generator)
            step()
            losses.append(self.loss.clone())
        updates = [
            after.double() - before.double()
            for before, after in zip(begin, self._samples(), strict=True)
        ]
        return torch.stack(losses), updates

    def _samples(self) -> list[Tensor]:
        trained = (self.optimizer.state[p].get("master", p) for p in self.model.parameters())
        flat = [parameter.detach().flatten() for parameter in trained]
        return [x[:: -(-x.numel() // COMPARED_ELEMENTS)].clone() for x in flat]

    def close(self) -> None:
        self.captured = None
        self.__dict__.pop("loss", None)
        super().close()


def compared(
    called: tuple[Tensor, list[Tensor]], graphed: tuple[Tensor, list[Tensor]]
) -> dict[str, float]:
    """Returns the largest relative difference of a loss, and that of all updates together (root of
    squares).

    Raises AssertionError where one is not below its value in LARGEST_DIFFERENCES. A loss in 16 bits
    may also be off by two roundings.
    """
    losses, updates = called[0].double(), torch.cat(called[1])
    found = {
        "loss_difference": float(((graphed[0].double() - losses).abs() / losses.abs()).max()),
        "update_difference": float((torch.cat(graphed[1]) - updates).norm() / updates.norm()),
    }
    limits = dict(LARGEST_DIFFERENCES)
    limits["loss_difference"] = max(limits["loss_difference"], 2 * torch.finfo(called[0].dtype).eps)
    for name, value in found.items():
        if not value <= (limit := limits[name]):
            raise AssertionError(
                f"the graph trains otherwise than the called step: {name} {value:.3g} above "
                f"{limit:g}"
            )
    return found
