"""A whole training step as one CUDA graph: zero_grad, forward, loss, backward and AdamW, replayed
by one launch, and held against the called step.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from labkit.experiments.sections import empty_cache
from labkit.experiments.step import Step
from labkit.measure.timing import captured_once, on_capture_stream

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


def capture_step(step: Step) -> tuple[Callable[[], None], dict[str, float]]:
    """Returns the replay of a capturable step's graph, and metrics: its peak of memory, and how far
    it is off the called step.

    Raises:
        AssertionError: as `compared`.
    """
    with on_capture_stream():
        called = trained(step, step.train_step)
    step.optimizer.zero_grad()
    empty_cache(step.device)
    torch.cuda.reset_peak_memory_stats()
    graph = captured_once(step.train_step)
    peak_bytes = torch.cuda.max_memory_allocated()
    differences = compared(called, trained(step, graph.replay))
    return graph.replay, {"peak_bytes": peak_bytes, **differences}


def trained(step: Step, function: Callable[[], None]) -> tuple[Tensor, Tensor]:
    """Returns the losses of NUM_COMPARED calls of `function` from a fixed start, and what they
    changed in samples of all parameters together, fp64.

    Everything is set in place: a graph knows tensors by their address.
    """
    generator = torch.Generator(step.device.kind).manual_seed(0)
    with torch.no_grad():
        for parameter in step.model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.02, generator=generator)
            else:
                parameter.fill_(1)
        for parameter, state in step.optimizer.state.items():
            for name, tensor in state.items():
                if name == "master":
                    tensor.copy_(parameter)
                else:
                    tensor.zero_()
    before, losses = _samples(step), []
    for _ in range(NUM_COMPARED):
        for ids in (step.tokens, step.targets):
            ids.random_(step.model.config.vocab_size, generator=generator)
        function()
        losses.append(step.loss.clone())
    return torch.stack(losses), _samples(step) - before


def _samples(step: Step) -> Tensor:
    """Returns COMPARED_ELEMENTS or less of each trained parameter, one after another, fp64."""
    samples = []
    for parameter in step.model.parameters():
        flat = step.optimizer.state[parameter].get("master", parameter).detach().flatten()
        samples.append(flat[:: -(-flat.numel() // COMPARED_ELEMENTS)].double())
    return torch.cat(samples)


def compared(called: tuple[Tensor, Tensor], graphed: tuple[Tensor, Tensor]) -> dict[str, float]:
    """Returns the largest relative difference of a loss, and that of all updates together (root of
    squares), of what `trained` returns.

    Raises AssertionError where one is not below its value in LARGEST_DIFFERENCES. A loss in 16 bits
    may also be off by two roundings.
    """
    losses, updates = called[0].double(), called[1]
    differences = {
        "loss_difference": float(((graphed[0].double() - losses).abs() / losses.abs()).max()),
        "update_difference": float((graphed[1] - updates).norm() / updates.norm()),
    }
    rounding = {"loss_difference": 2 * torch.finfo(called[0].dtype).eps}
    for name, value in differences.items():
        limit = max(LARGEST_DIFFERENCES[name], rounding.get(name, 0.0))
        if not value <= limit:
            raise AssertionError(
                f"the graph trains otherwise than the called step: {name} {value:.3g} above "
                f"{limit:g}"
            )
    return differences
