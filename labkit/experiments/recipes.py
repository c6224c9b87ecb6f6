"""Precisions by name, fp16 with a scaled loss and bf16 throughout among them, and a training step
in each.
"""

import contextlib
import math
from dataclasses import dataclass

import torch
from torch import nn

from labkit.device import Device
from labkit.experiments.sections import require_precision
from labkit.experiments.sweep import Skip
from labkit.experiments.workload import Workload

LARGEST_LOSS_DEVIATION = 0.05
"""A step whose loss at initialisation is further off its closed form than this fraction is not
timed.
"""

MAX_HALVINGS = 24
"""Halvings of the loss scale within which the gradients must become finite (2¹⁶ to 2⁻⁸)."""


@dataclass(frozen=True)
class Recipe:
    """What makes up a precision: autocast's dtype, the parameters', a scaled loss, TF32
    products.
    """

    autocast: torch.dtype | None = None
    parameters: torch.dtype = torch.float32
    is_scaled: bool = False
    is_tf32: bool = False

    def autocasting(self, device_kind: str) -> contextlib.AbstractContextManager:
        return torch.autocast(
            device_kind, self.autocast or torch.bfloat16, enabled=self.autocast is not None
        )

    def scaler(self, device_kind: str) -> torch.amp.GradScaler:
        return torch.amp.GradScaler(device_kind, enabled=self.is_scaled)


RECIPES = {
    "fp32": Recipe(),
    "tf32": Recipe(is_tf32=True),
    "bf16": Recipe(autocast=torch.bfloat16),
    "fp16": Recipe(autocast=torch.float16, is_scaled=True),
    "fp16_unscaled": Recipe(autocast=torch.float16),
    "bf16_pure": Recipe(parameters=torch.bfloat16),
}
"""Precisions by the name that records give them; "fp16_unscaled" is only trained in, to see what
scaling does.
"""


def live_recipe(device_kind: str, model: nn.Module, scaler: torch.amp.GradScaler) -> Recipe:
    """Returns the recipe as read back inside an autocast context from the model, the scaler and
    PyTorch's settings.
    """
    enabled = torch.is_autocast_enabled(device_kind)
    return Recipe(
        autocast=torch.get_autocast_dtype(device_kind) if enabled else None,
        parameters=model.head.weight.dtype,
        is_scaled=scaler.is_enabled(),
        is_tf32=torch.get_float32_matmul_precision() == "high",
    )


def recipe_name(recipe: Recipe) -> str:
    """Returns the name of a recipe, its fields where it has none."""
    return {known: name for name, known in RECIPES.items()}.get(recipe, str(recipe))


def require_recipe(device: Device, precision: str, *, is_timed: bool) -> None:
    """Raises Skip for a precision that the device lacks; where times are taken, also for one that
    it emulates.
    """
    require_precision(device, "bf16" if precision == "bf16_pure" else precision)
    if is_timed and device.kind == "cpu" and RECIPES[precision].autocast == torch.float16:
        raise Skip(f"{device.name}: PyTorch emulates float16 matrix products on most processors")


class PrecisionWorkload(Workload):
    """The workload in any of RECIPES: the same phases, timed in the same way."""

    def __init__(self, device: Device, parameters: dict):
        super().__init__(device, parameters)
        self.recipe = RECIPES[self.precision]
        self.model.to(self.recipe.parameters)
        self.scaler = self.recipe.scaler(device.kind)

    def autocast(self) -> contextlib.AbstractContextManager:
        return self.recipe.autocasting(self.device.kind)

    def live_precision(self) -> str:
        with self.autocast():
            return recipe_name(live_recipe(self.device.kind, self.model, self.scaler))

    def forward_backward(self) -> None:
        self.scaler.scale(self.forward()).backward()

    def forward_for_backward(self) -> tuple:
        self.model.zero_grad()
        return (self.scaler.scale(self.forward()),)

    def optimize(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def train_step(self) -> None:
        self.optimizer.zero_grad()
        self.forward_backward()
        self.optimize()

    def settle(self) -> None:
        """Halves the loss scale until the gradients are finite; raises AssertionError if they do
        not become so.
        """
        for _ in range(MAX_HALVINGS):
            self.model.zero_grad()
            self.forward_backward()
            if all(parameter.grad.isfinite().all() for parameter in self.model.parameters()):
                return
            if not self.scaler.is_enabled():
                break
            self.scaler.update(self.scaler.get_scale() / 2)
        scale = self.scaler.get_scale()
        raise AssertionError(
            f"gradients are not finite in {self.precision} at a loss scale of {scale}"
        )

    def check_loss(self) -> float:
        """Returns the loss at initialisation; raises AssertionError where it is not near its closed
        form.

        The head's rows are N(0, 0.02²) and the hidden state has d features of mean square 1, so
        logits have a variance of 0.0004·d, and the mean cross-entropy is ln V plus half of it.
        """
        with torch.no_grad():
            loss = float(self.forward())
        vocab_size, d_model = self.model.head.weight.shape
        expected = math.log(vocab_size) + 0.0004 * d_model / 2
        if not abs(loss / expected - 1) <= LARGEST_LOSS_DEVIATION:
            raise AssertionError(
                f"the loss is {loss:.4g} in {self.precision}, {expected:.4g} was expected"
            )
        return loss
