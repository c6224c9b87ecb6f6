"""One training step: model, batch, precision, optimizer, compilation and recomputation, and its
phases, called or as one CUDA graph. Most chapters build it, run a phase and free it.
"""

import contextlib
import functools
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from labkit import accounting, numerics
from labkit.configs import (
    BATCH_SIZE,
    COMPILE_MODES,
    WARMUP_COUNTS,
    WARMUP_MEASURED_STEPS,
    check_known,
    model_config,
)
from labkit.device import Device
from labkit.experiments.sections import (
    empty_cache,
    rate_metrics,
    section,
    sustained_metrics,
    time_once_ms,
    timed,
    timed_with_peak,
)
from labkit.experiments.sweep import Case, Measured, Skip
from labkit.kernels.adamw import FusedAdamW
from labkit.measure.timing import Timing, captured_once, on_capture_stream, time_callable
from labkit.models.transformer import RotaryEmbedding, TransformerLM, language_model_loss

NUM_COMPARED = 5
"""Steps, each on its own tokens, whose losses are compared between a graph and the called step."""

NUM_LEARNED_IDS = 16
"""The tokens of these steps are drawn from so few that each step makes the next loss smaller."""

LARGEST_LOSS_DIFFERENCE = 1e-3
"""Relative, on average over these steps. On an H100 and an H200 every graph had none at all. Small
models that leave out the optimizer are off by 0.05 and more, with old gradients or old tokens by
0.004 (in pure bf16 by 0.0023).
"""

Marker = Callable[[str], contextlib.AbstractContextManager]
"""Gives a `with` block of this name, such as a range that a profiler captures."""


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


@dataclass(frozen=True)
class Recipe:
    """What makes up a precision.

    Attributes:
        autocast: dtype of matrix products under autocast; None without autocast.
        parameters: their dtype.
        is_scaled: the loss is scaled, so that small gradients do not vanish.
        is_tf32: fp32 matrices are multiplied as TF32.
    """

    autocast: torch.dtype | None = None
    parameters: torch.dtype = torch.float32
    is_scaled: bool = False
    is_tf32: bool = False


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


def run_blocks(
    blocks: Sequence[nn.Module], x_BTC: Tensor, rotary: RotaryEmbedding, plan: Sequence[int]
) -> Tensor:
    """Returns the output of `blocks`, one after another, some of them recomputed in the backward
    pass.

    Args:
        plan: numbers of blocks. () keeps everything; (k, *rest) keeps the input of every k blocks,
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


def load_compiler(device: Device) -> None:
    """Imports the compiler and, on a CPU, lets it try the instruction sets, before its caches are
    disabled.
    """
    importlib.import_module("torch._inductor.compile_fx")
    if device.kind == "cpu":
        importlib.import_module("torch._inductor.cpu_vec_isa").valid_vec_isa_list()


class Step:
    """The live objects of a training step, from which a record's case is read back.

    Args:
        parameters: a case's, see `step_parameters`; `plan` names blocks that are recomputed,
            `vocab_size` replaces the size's own.
    """

    def __init__(self, device: Device, parameters: dict):
        self.device = device
        self.precision = parameters["precision"]
        check_known("precision", self.precision, RECIPES)
        self.recipe = RECIPES[self.precision]
        config = model_config(parameters["size"])
        config = replace(config, vocab_size=parameters.get("vocab_size", config.vocab_size))
        torch.manual_seed(0)
        self.model = TransformerLM(
            config,
            max_context=parameters["context"],
            attention=parameters.get("attention", "eager"),
            impl=parameters.get("impl", "eager"),
            device=device.kind,
        )
        shape = (parameters["batch"], parameters["context"])
        self.tokens = torch.randint(config.vocab_size, shape, device=device.kind)
        self.targets = torch.randint(config.vocab_size, shape, device=device.kind)
        numerics.set_precision(self.precision)
        self.model.to(self.recipe.parameters)
        if self.model.impl == "fused" and self.recipe.autocast:
            # FusedAdamW has fp32 masters of the blocks' matrices.
            for module in self.model.blocks.modules():
                if isinstance(module, nn.Linear):
                    module.to(self.recipe.autocast)
        self.scaler = torch.amp.GradScaler(device.kind, enabled=self.recipe.is_scaled)
        plan = parameters.get("plan", "none")
        self.plan = accounting.checkpoint_plan(plan, len(self.model.blocks))
        self.compile = parameters.get("compile", "none")
        check_known("compile", self.compile, (*COMPILE_MODES, "graph"))  # of a shared step
        if self.compile == "whole":
            self.model.compile()
        elif self.compile != "none":
            for block in self.model.blocks:
                block.compile()

    @functools.cached_property
    def optimizer(self) -> torch.optim.Optimizer:
        """AdamW, made at first use: its state is what does not fit first."""
        parameters = self.model.parameters()
        if self.model.impl == "fused":
            return FusedAdamW(parameters)
        return torch.optim.AdamW(parameters, fused=True)

    def autocast(self) -> contextlib.AbstractContextManager:
        dtype = self.recipe.autocast
        return torch.autocast(self.device.kind, dtype or torch.bfloat16, enabled=dtype is not None)

    def loss_on(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """Returns the mean loss on a batch."""
        model = self.model
        with self.autocast():
            if self.plan:
                x_BTC = model.embedding(tokens_BT)
                x_BTC = run_blocks(list(model.blocks), x_BTC, model.rotary, self.plan)
                return language_model_loss(model.head(model.norm(x_BTC)), targets_BT)
            if model.impl == "eager":  # compiled whole, the model ends with its logits
                return language_model_loss(model(tokens_BT), targets_BT)
            return model(tokens_BT, targets_BT)

    def forward(self) -> Tensor:
        return self.loss_on(self.tokens, self.targets)

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def optimize(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def run(self, phase: str, part: Marker = contextlib.nullcontext) -> Tensor:
        """Runs "inference", "forward_backward" or "train_step" with each of its parts inside
        `part(name)`: "inference", or "forward", "backward" and, of a training step, "optimizer".

        Returns the logits of an inference, the loss of any other phase, without gradient; `loss`
        stays where a CUDA graph writes it.
        """
        if phase == "inference":
            with part("inference"), torch.no_grad(), self.autocast():
                return self.model(self.tokens)
        if phase == "train_step":
            self.optimizer.zero_grad()
        with part("forward"):
            loss = self.forward()
        scaled = self.scaler.scale(loss)
        with part("backward"):
            self.backward(scaled)
        del scaled  # with the graph behind it
        self.loss = loss = loss.detach()
        if phase == "train_step":
            with part("optimizer"):
                self.optimize()
        return loss

    inference = functools.partialmethod(run, "inference")
    forward_backward = functools.partialmethod(run, "forward_backward")
    train_step = functools.partialmethod(run, "train_step")

    def time_phase(self, phase: str, **limits) -> Timing:
        """Returns the times of one of configs.PHASES. Only the phase itself is timed: what it needs
        is made before. `limits` are `time_callable`'s, its `device_kind` among them.
        """
        function = getattr(self, phase, None)
        inputs = tuple
        if phase == "forward_backward":
            inputs = self._without_gradients
        elif phase == "backward":
            function = Tensor.backward
            inputs = self._scaled_loss
        elif phase == "optimizer_step":
            self._scaled_loss()[0].backward()
            function = self.optimize
        return time_callable(function, inputs=inputs, **limits)

    def _without_gradients(self) -> tuple:
        self.model.zero_grad()
        return ()

    def _scaled_loss(self) -> tuple[Tensor]:
        self.model.zero_grad()
        return (self.scaler.scale(self.forward()),)

    def live_precision(self) -> str:
        """Returns the name of the recipe as read back from autocast, model, scaler and PyTorch's
        settings; its fields where it has no name.
        """
        kind = self.device.kind
        with self.autocast():
            enabled = torch.is_autocast_enabled(kind)
            live = Recipe(
                autocast=torch.get_autocast_dtype(kind) if enabled else None,
                parameters=self.model.head.weight.dtype,
                is_scaled=self.scaler.is_enabled(),
                is_tf32=torch.get_float32_matmul_precision() != "highest",
            )
        return {recipe: name for name, recipe in RECIPES.items()}.get(live, str(live))

    def described(self) -> dict:
        """Returns the case as read back from the live objects."""
        model = self.model
        batch, context = self.tokens.shape
        compiled = "none"
        if model._compiled_call_impl is not None:
            compiled = "whole"
        elif all(block._compiled_call_impl is not None for block in model.blocks):
            compiled = "regional"
        parameters = step_parameters(
            model.config.name,
            context,
            self.live_precision(),
            compile=compiled,
            attention=model.blocks[0].attention.attention,
            impl=model.impl,
        )
        return parameters | {"batch": batch}

    def close(self) -> None:
        """Frees what the step holds."""
        if self.compile != "none":  # importing the compiler to reset it takes seconds
            torch.compiler.reset()
        vars(self).clear()
        empty_cache()


def _measure_phase(step: Step, case: Case, phase: str) -> Measured:
    device = step.device
    if device.kind == "cpu" and step.precision == "fp16":
        raise Skip(f"{device.name}: PyTorch emulates float16 matrix products on most processors")
    call = step.train_step  # no other call is also sustained, but for its graph's replay
    limits = {"time_limit_s": case.time_limit_s}
    if case.section == "warmup":
        num_steps = max(WARMUP_COUNTS) + WARMUP_MEASURED_STEPS
        limits |= {"num_warmup": 0, "min_samples": num_steps, "max_samples": num_steps}
    step.model.zero_grad()
    if phase == "compile":
        times, metrics = timed_with_peak(device, _time_first_call, step)
    elif phase == "graph_step":
        call, metrics = capture_step(step)
        times = timed(device, time_callable, call, **limits)
    else:
        times, metrics = timed_with_peak(device, step.time_phase, phase, **limits)
    if phase in ("train_step", "graph_step") and not step.loss.isfinite():
        raise AssertionError(f"the loss is {step.loss:g} after the timed steps")
    config = step.model.config
    median_ms = times.timing.median_ms
    precision = step.precision.removesuffix("_pure")  # of the matrix products
    against = (device, case.ceilings, median_ms, precision)
    if phase == "optimizer_step":
        # Of bf16 parameters, gradients and moments are in bf16 too.
        num_bytes = accounting.optimizer_step_bytes(config) * step.recipe.parameters.itemsize // 4
        metrics |= rate_metrics(*against, num_bytes=num_bytes)
    elif phase != "compile":
        counted = "train_step" if phase == "graph_step" else phase
        flops = accounting.phase_flops(config, *step.tokens.shape, counted, causal=False)
        metrics |= rate_metrics(*against, flops=flops)
        metrics["tokens_per_s"] = step.tokens.numel() / (median_ms * 1e-3)
    if phase in case.sustained:
        metrics |= sustained_metrics(device, case.ceilings, times, call, precision, flops=flops)
    return times.measured(metrics, step.described(), keep="step_ms")


run_steps = section(_measure_phase, Step)
"""Runs the phases of a training step, as notebooks 01, 03 and 05 take it into their sections."""


def _time_first_call(step: Step, device_kind: str) -> Timing:
    """Returns the time of the first forward and backward, which compiles both; no cache of an
    earlier run counts.
    """
    load_compiler(step.device)
    with torch.compiler.config.patch(force_disable_caches=True):
        first_ms = time_once_ms(step.forward_backward, device_kind)
    return Timing((first_ms,), "host")


# ---- a step as one CUDA graph --------------------------------------------------------------------


def capture_step(step: Step) -> tuple[Callable[[], None], dict[str, float]]:
    """Returns the replay of the training step's CUDA graph, and metrics: its peak of memory, and
    how far its losses are off the called step's.

    Raises Skip where there are no CUDA graphs, AssertionError as `loss_difference`.
    """
    if step.device.kind != "cuda":
        raise Skip(f"{step.device.name} has no CUDA graphs")
    for group in step.optimizer.param_groups:
        group["capturable"] = True
    with on_capture_stream():
        called = losses_of(step, step.train_step)
    step.optimizer.zero_grad()
    empty_cache()
    torch.cuda.reset_peak_memory_stats()
    graph = captured_once(step.train_step)
    peak_bytes = torch.cuda.max_memory_allocated()
    difference = loss_difference(called, losses_of(step, graph.replay))
    return graph.replay, {"peak_bytes": peak_bytes, "loss_difference": difference}


def losses_of(step: Step, function: Callable[[], object]) -> Tensor:
    """Returns the losses of NUM_COMPARED calls of `function` from a fixed start.

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
    losses = []
    for _ in range(NUM_COMPARED):
        for ids in (step.tokens, step.targets):
            ids.random_(NUM_LEARNED_IDS, generator=generator)
        function()
        losses.append(step.loss.clone())
    return torch.stack(losses)


def loss_difference(called: Tensor, graphed: Tensor) -> float:
    """Returns the mean relative difference of the losses of two runs.

    Raises AssertionError where it is too large. One loss in 16 bits may be off by one rounding.
    """
    difference = float(((graphed.double() - called) / called).abs().mean())
    limit = max(LARGEST_LOSS_DIFFERENCE, torch.finfo(called.dtype).eps / (NUM_COMPARED - 1))
    if not difference <= limit:
        raise AssertionError(
            f"the graph trains otherwise than the called step: losses {graphed.tolist()}, "
            f"{called.tolist()} expected"
        )
    return difference
