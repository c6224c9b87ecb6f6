"""A model trained on a synthetic task in one precision: its loss, which gradients vanish, what
never moves.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from labkit import numerics
from labkit.configs import model_config
from labkit.device import Device
from labkit.experiments.recipes import RECIPES, live_recipe, recipe_name
from labkit.experiments.sections import empty_cache
from labkit.experiments.sweep import Measured
from labkit.experiments.workload import adamw
from labkit.models.transformer import TransformerLM, language_model_loss

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


class Training:
    """A run of the synthetic task in one precision: the live objects, and what is read from
    them.
    """

    def __init__(self, device: Device, parameters: dict):
        self.device, self.parameters = device, parameters
        self.recipe = RECIPES[parameters["precision"]]
        numerics.set_precision(parameters["precision"])
        torch.manual_seed(0)
        config = replace(model_config(parameters["size"]), vocab_size=parameters["vocab_size"])
        self.model = TransformerLM(
            config, max_context=parameters["context"], attention="eager", device=device.kind
        ).to(self.recipe.parameters)
        self.scaler = self.recipe.scaler(device.kind)
        self.optimizer = adamw(self.model.parameters(), lr=parameters["learning_rate"])
        shape = (parameters["num_steps"], parameters["batch"], parameters["context"])
        self.data = successor_sequences(parameters["num_tokens"], *shape).to(device.kind)
        self.initial = [parameter.detach().clone() for parameter in self.model.parameters()]

    def matrices(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Returns those of `tensors`, one per parameter, of a matrix but the embedding, whose rows
        are not all seen.
        """
        pairs = zip(self.model.parameters(), tensors, strict=True)
        return [x for p, x in pairs if p.dim() == 2 and p is not self.model.embedding.weight]

    def run(self) -> Measured:
        """Trains and returns losses, shares of the gradients and what of the parameters never
        moved.
        """
        num_steps = len(self.data)
        look_at = set(range(0, num_steps, max(1, num_steps // NUM_LOOKS)))
        losses, looks, num_skipped = [], {}, 0
        for step, sequences in enumerate(self.data):
            self.optimizer.zero_grad()
            with self.recipe.autocasting(self.device.kind):
                self.live = recipe_name(live_recipe(self.device.kind, self.model, self.scaler))
                logits = self.model(sequences[:, :-1])
                loss = language_model_loss(logits, sequences[:, 1:])
            if step in look_at:
                logits.retain_grad()
            self.scaler.scale(loss).backward()
            scale = self.scaler.get_scale()
            if step in look_at:
                looks[step] = self.look(logits.grad)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            num_skipped += self.scaler.get_scale() < scale
            losses.append(loss.detach())
        return self._measured([float(loss) for loss in losses], looks, num_skipped)

    def look(self, logit_grad: Tensor) -> dict[str, float]:
        """Returns the shares of the gradients' elements that are 0."""
        gradients = self.matrices([parameter.grad for parameter in self.model.parameters()])
        groups = {"zero_weight_gradients": gradients, "zero_logit_gradients": [logit_grad]}
        return {name: _share([x == 0 for x in group]) for name, group in groups.items()}

    def _measured(
        self, losses: list[float], looks: dict[int, dict[str, float]], num_skipped: int
    ) -> Measured:
        last = losses[-max(1, round(LAST_STEPS * len(losses))) :]
        columns = {
            name: [look[name] for look in looks.values()] for name in next(iter(looks.values()))
        }
        pairs = zip(self.model.parameters(), self.initial, strict=True)
        return Measured(
            metrics={
                "final_loss": statistics.fmean(last) if all(map(math.isfinite, last)) else None,
                "num_skipped_steps": num_skipped,
                "final_loss_scale": self.scaler.get_scale(),
                "unmoved_gains": _share([now == before for now, before in pairs if now.dim() == 1]),
            },
            case=self.described(),
            samples={
                "loss": [loss if math.isfinite(loss) else None for loss in losses],
                "look_step": list(looks),
                **columns,
            },
        )

    def described(self) -> dict:
        """Returns the case as read back from the live objects."""
        num_steps, batch, length = self.data.shape
        return {
            "precision": self.live,
            "size": self.model.config.name,
            "vocab_size": self.model.head.weight.shape[0],
            "num_tokens": self.parameters["num_tokens"],
            "context": length - 1,
            "batch": batch,
            "num_steps": num_steps,
            "learning_rate": self.optimizer.param_groups[0]["lr"],
        }


def _share(marks: Sequence[Tensor]) -> float:
    """Returns the share of all elements that are marked."""
    return sum(int(x.sum()) for x in marks) / sum(x.numel() for x in marks)


def measure_training(device: Device, parameters: dict) -> Measured:
    """Returns the losses and gradients of the synthetic task in one precision."""
    try:
        return Training(device, parameters).run()
    finally:
        empty_cache(device)
