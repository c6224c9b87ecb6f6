"""The live objects of a training step: model, optimizer and data, and the phases of a step as
callables.
"""

import contextlib
import functools
import importlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from labkit import accounting, numerics
from labkit.configs import BATCH_SIZE, PHASES, SIZES, model_config
from labkit.device import Device
from labkit.experiments.sections import empty_cache
from labkit.experiments.sweep import Case
from labkit.kernels import course
from labkit.measure.timing import Timing, time_callable
from labkit.models.transformer import RotaryEmbedding, TransformerLM, language_model_loss


def step_parameters(
    size: str,
    context: int,
    precision: str,
    *,
    compile: str = "none",
    attention: str = "eager",
    impl: str = "eager",
) -> dict[str, str | int]:
    """Returns the parameters of a step's case, the same in every notebook so that their records
    share a table.

    Those of the eager model do not name it: they were recorded before there was another.
    """
    parameters = {
        "size": size,
        "context": context,
        "batch": BATCH_SIZE,
        "precision": precision,
        "compile": compile,
        "attention": attention,
    }
    return parameters if impl == "eager" else {**parameters, "impl": impl}


def adamw(parameters, **options) -> torch.optim.Optimizer:
    """Returns AdamW, fused where this device has it."""
    try:
        return torch.optim.AdamW(parameters, fused=True, **options)
    except RuntimeError:
        return torch.optim.AdamW(parameters, **options)


def course_parameters(*step) -> dict[str, str | int]:
    """Returns the parameters of a step of the model as a course writes it, of size, context and
    precision.
    """
    return step_parameters(*step, attention="course", impl="course")


class Workload:
    """The live objects of a case of `step_parameters`, from which a record's case is read back."""

    def __init__(self, device: Device, parameters: dict):
        self.device, self.precision = device, parameters["precision"]
        config = model_config(parameters["size"])
        torch.manual_seed(0)
        self.model = TransformerLM(
            config,
            max_context=parameters["context"],
            attention=parameters["attention"],
            impl=parameters.get("impl", "eager"),
            device=device.kind,
        )
        shape = (parameters["batch"], parameters["context"])
        self.tokens, self.targets = (
            torch.randint(config.vocab_size, shape, device=device.kind) for _ in range(2)
        )
        numerics.set_precision(self.precision)
        self.is_compiled = parameters["compile"] != "none"
        if parameters["compile"] == "whole":
            self.model.compile()
        elif parameters["compile"] == "regional":
            for block in self.model.blocks:
                block.compile()

    @functools.cached_property
    def optimizer(self) -> torch.optim.Optimizer:
        """AdamW, made at first use: its state is what does not fit first."""
        return (course.AdamW if self.model.impl == "course" else adamw)(self.model.parameters())

    def autocast(self) -> contextlib.AbstractContextManager:
        return torch.autocast(self.device.kind, torch.bfloat16, enabled=self.precision == "bf16")

    def inference(self) -> None:
        with torch.no_grad(), self.autocast():
            self.model(self.tokens)

    def forward(self) -> Tensor:
        with self.autocast():
            if self.model.impl == "eager":  # compiled whole, the model ends with its logits
                return language_model_loss(self.model(self.tokens), self.targets)
            return self.model(self.tokens, self.targets)

    def forward_backward(self) -> None:
        self.forward().backward()

    def train_step(self) -> None:
        self.optimizer.zero_grad()
        self.forward_backward()
        self.optimizer.step()

    def zero_grad(self) -> tuple:
        self.model.zero_grad()
        return ()

    def forward_for_backward(self) -> tuple:
        self.model.zero_grad()
        return (self.forward(),)

    def time_phase(self, phase: str, **limits) -> Timing:
        """Returns the times of one phase. Only the phase itself is timed: what it needs is made
        before.
        """
        if phase not in PHASES:
            raise ValueError(f"unknown phase {phase!r}; accepted: {', '.join(PHASES)}")
        if phase == "optimizer_step":
            self.forward_for_backward()[0].backward()
            function = self.optimizer.step
        else:
            function = Tensor.backward if phase == "backward" else getattr(self, phase)
        inputs = {"backward": self.forward_for_backward, "forward_backward": self.zero_grad}.get(
            phase, ((),)
        )
        return time_callable(function, inputs=inputs, device_kind=self.device.kind, **limits)

    def live_precision(self) -> str:
        """Returns the precision as autocast and the setting of matrix products have it."""
        with self.autocast():
            if torch.is_autocast_enabled(self.device.kind):
                return {torch.bfloat16: "bf16"}[torch.get_autocast_dtype(self.device.kind)]
            return numerics.live_precision(torch.float32)

    def described(self) -> dict:
        """Returns the case as read back from the live objects."""
        model, (batch, context) = self.model, self.tokens.shape
        d_ff, d_model = model.blocks[0].feed_forward.up_proj.weight.shape
        dims = (d_model, d_ff, len(model.blocks), model.blocks[0].attention.num_heads)
        names = [
            c.name for c in SIZES.values() if (c.d_model, c.d_ff, c.num_layers, c.num_heads) == dims
        ]
        whole_compiled = model._compiled_call_impl is not None
        num_compiled = sum(block._compiled_call_impl is not None for block in model.blocks)
        regional = {0: "none", len(model.blocks): "regional"}.get(
            num_compiled, f"{num_compiled} blocks"
        )
        attention = sorted({block.attention.attention for block in model.blocks})
        impls = sorted({block.impl for block in model.blocks} | {model.impl})
        return {
            "size": names[0] if names else str(dims),
            "context": context,
            "batch": batch,
            "precision": self.live_precision(),
            "compile": "whole" if whole_compiled else regional,
            "attention": " and ".join(attention),
            **({} if impls == ["eager"] else {"impl": " and ".join(impls)}),
        }

    def observed(self) -> dict:
        """Returns what else there is to know of the live objects."""
        num_parameters = sum(parameter.numel() for parameter in self.model.parameters())
        dtype = str(self.model.head.weight.dtype).removeprefix("torch.")
        seen = {"num_parameters": num_parameters, "parameter_dtype": dtype}
        if "optimizer" in self.__dict__:
            seen["optimizer"] = type(self.optimizer).__name__
            seen["optimizer_fused"] = bool(self.optimizer.defaults.get("fused"))
        return seen

    def close(self) -> None:
        """Frees what the case holds."""
        del self.model, self.tokens, self.targets
        self.__dict__.pop("optimizer", None)
        if self.is_compiled:  # importing the compiler to reset it takes seconds
            torch.compiler.reset()
        empty_cache(self.device)


def workload(
    device: Device, case: Case, kind: type[Workload] = Workload
) -> contextlib.AbstractContextManager[Workload]:
    """Returns a context that gives the live objects of a case, an instance of `kind`, and frees
    them at the end.
    """
    return contextlib.closing(kind(device, case.parameters))


def run_blocks(
    blocks: Sequence[nn.Module], x_BTC: Tensor, rotary: RotaryEmbedding, plan: Sequence[int]
) -> Tensor:
    """Returns the output of `blocks`, one after another, some of them recomputed in the backward
    pass.

    Args:
        plan: numbers of blocks. [] keeps everything; [k, *rest] keeps the input of every k blocks,
            and applies `rest` within those k while they are recomputed.
    """
    if not plan:
        for block in blocks:
            x_BTC = block(x_BTC, rotary)
        return x_BTC
    num_blocks, *rest = plan
    for first in range(0, len(blocks), num_blocks):
        part = blocks[first : first + num_blocks]
        # No dropout anywhere, so there is no state of random numbers to keep.
        x_BTC = checkpoint(
            run_blocks, part, x_BTC, rotary, rest, use_reentrant=False, preserve_rng_state=False
        )
    return x_BTC


class RecomputingWorkload(Workload):
    """Notebook 01's workload whose blocks may be recomputed in the backward pass, as the case's
    plan says.
    """

    def __init__(self, device: Device, parameters: dict):
        super().__init__(device, parameters)
        self.plan = accounting.checkpoint_plan(
            parameters.get("plan", "none"), len(self.model.blocks)
        )

    def forward(self) -> Tensor:
        return self.loss(self.tokens, self.targets, self.plan) if self.plan else super().forward()

    def loss(self, tokens_BT: Tensor, targets_BT: Tensor, plan: Sequence[int]) -> Tensor:
        """Returns the loss, with gradient."""
        model = self.model
        with self.autocast():
            x_BTC = run_blocks(list(model.blocks), model.embedding(tokens_BT), model.rotary, plan)
            return language_model_loss(model.head(model.norm(x_BTC)), targets_BT)

    def inputs(self) -> list[Tensor]:
        """Returns what is there beside parameters: token indices and the model's tables."""
        return [self.tokens, self.targets, *self.model.buffers()]

    def gradients(self) -> list[Tensor]:
        return [
            parameter.grad for parameter in self.model.parameters() if parameter.grad is not None
        ]

    def optimizer_state(self) -> list[Tensor]:
        """Returns the tensors of the optimizer's state on this device; none before its first
        step.
        """
        if "optimizer" not in self.__dict__:
            return []
        tensors = [
            x
            for state in self.optimizer.state.values()
            for x in state.values()
            if isinstance(x, Tensor)
        ]
        return [x for x in tensors if x.device.type == self.device.kind]

    def resident(self) -> list[Tensor]:
        """Returns every tensor that stays from step to step."""
        return [
            *self.model.parameters(),
            *self.inputs(),
            *self.gradients(),
            *self.optimizer_state(),
        ]


def load_compiler(device: Device) -> None:
    """Imports the compiler and, on a CPU, lets it try the instruction sets, before its caches are
    disabled.
    """
    importlib.import_module("torch._inductor.compile_fx")
    if device.kind == "cpu":
        importlib.import_module("torch._inductor.cpu_vec_isa").valid_vec_isa_list()
