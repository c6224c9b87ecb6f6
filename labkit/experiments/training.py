"""A model trained on a synthetic task in one precision: its loss, which gradients vanish, what
never moves.
"""

import contextlib
import math
import statistics
from collections.abc import Sequence

import torch
from torch import Tensor

from labkit.device import Device
from labkit.experiments.step import Step, adamw
from labkit.experiments.sweep import Measured
from labkit.models.transformer import language_model_loss

NUM_LOOKS = 10
"""How often during a training run the gradients are looked at."""

LAST_STEPS = 0.1
"""The final loss is the mean over this share of the steps."""


def successor_sequences(num_tokens: int, num_steps: int, batch: int, context: int) -> Tensor:
    """Returns (steps, batch, context + 1) token ids in which each is followed by its successor in
    one permutation.
    """
    generator = torch.Generator().manual_seed(0)
    successor = torch.randperm(num_tokens, generator=generator)
    columns = [torch.randint(num_tokens, (num_steps, batch), generator=generator)]
    for _ in range(context):
        columns.append(successor[columns[-1]])
    return torch.stack(columns, dim=-1)


def measure_training(device: Device, parameters: dict) -> Measured:
    """Returns the losses of the synthetic task in one precision, the shares of the gradients'
    elements that are 0, and what of the parameters never moved.
    """
    with contextlib.closing(Step(device, parameters)) as step:
        step.optimizer = adamw(step.model.parameters(), lr=parameters["learning_rate"])
        return _train(step, parameters)


def _train(step: Step, parameters: dict) -> Measured:
    model, scaler = step.model, step.scaler
    shape = (parameters["num_steps"], parameters["batch"], parameters["context"])
    data = successor_sequences(parameters["num_tokens"], *shape).to(step.device.kind)
    # The embedding's rows are not all seen.
    matrices = [p for p in model.parameters() if p.dim() == 2 and p is not model.embedding.weight]
    gains = [p for p in model.parameters() if p.dim() == 1]
    initial_gains = [gain.detach().clone() for gain in gains]
    losses, num_skipped = [], 0
    looks: dict[str, list] = {
        "look_step": [],
        "zero_weight_gradients": [],
        "zero_logit_gradients": [],
    }
    for number, sequences in enumerate(data):
        is_looked_at = number % max(1, len(data) // NUM_LOOKS) == 0
        step.optimizer.zero_grad()
        with step.autocast():
            logits = model(sequences[:, :-1])
            loss = language_model_loss(logits, sequences[:, 1:])
        if is_looked_at:
            logits.retain_grad()
        scaler.scale(loss).backward()
        scale = scaler.get_scale()
        if is_looked_at:
            looks["look_step"].append(number)
            looks["zero_weight_gradients"].append(_share([p.grad == 0 for p in matrices]))
            looks["zero_logit_gradients"].append(_share([logits.grad == 0]))
        step.optimize()
        num_skipped += scaler.get_scale() < scale
        losses.append(loss.detach())
    losses = [float(loss) for loss in losses]
    last = losses[-max(1, round(LAST_STEPS * len(losses))) :]
    pairs = zip(gains, initial_gains, strict=True)
    num_steps, batch, length = data.shape
    return Measured(
        metrics={
            "final_loss": statistics.fmean(last) if all(map(math.isfinite, last)) else None,
            "num_skipped_steps": num_skipped,
            "final_loss_scale": scaler.get_scale(),
            "unmoved_gains": _share([gain == before for gain, before in pairs]),
        },
        case={
            "precision": step.live_precision(),
            "size": model.config.name,
            "vocab_size": model.head.weight.shape[0],
            "num_tokens": parameters["num_tokens"],
            "context": length - 1,
            "batch": batch,
            "num_steps": num_steps,
            "learning_rate": step.optimizer.param_groups[0]["lr"],
        },
        samples={
            "loss": [loss if math.isfinite(loss) else None for loss in losses],
            **looks,
        },
    )


def _share(marks: Sequence[Tensor]) -> float:
    """Returns the share of all elements that are marked."""
    return sum(int(x.sum()) for x in marks) / sum(x.numel() for x in marks)
