"""One training step: model, batch, precision, optimizer, compilation and recomputation, and its
phases. Most chapters build it, run a phase and free it.
"""

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from labkit import accounting, numerics
from labkit.configs import (
    BATCH_SIZE,
    SIZES,
    WARMUP_COUNTS,
    WARMUP_MEASURED_STEPS,
    model_config,
)
from labkit.device import Device
from labkit.experiments.sections import (
    KEPT_SAMPLES,
    Timed,
    empty_cache,
    fractions,
    sustained_metrics,
    time_once_ms,
    timed_with_peak,
)
from labkit.experiments.sweep import Case, Measured, PhaseRun
from labkit.kernels import course
from labkit.kernels.adamw import FusedAdamW
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


def course_parameters(size: str, context: int, precision: str) -> dict[str, str | int]:
    """Returns the parameters of a step of the model as a course writes it."""
    return step_parameters(size, context, precision, attention="course", impl="course")


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


def adamw(parameters, **options) -> torch.optim.Optimizer:
    """Returns AdamW, fused where this device has it."""
    try:
        return torch.optim.AdamW(parameters, fused=True, **options)
    except RuntimeError:
        return torch.optim.AdamW(parameters, **options)


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
        capturable: a CUDA graph can hold `train_step`: AdamW counts its steps on the device, and
            `loss` stays where the graph writes it.
    """

    def __init__(self, device: Device, parameters: dict, *, capturable: bool = False):
        self.device = device
        self.capturable = capturable
        self.precision = parameters["precision"]
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
        self.plan = accounting.checkpoint_plan(
            parameters.get("plan", "none"), len(self.model.blocks)
        )
        self.compile = parameters.get("compile", "none")
        if self.compile == "whole":
            self.model.compile()
        elif self.compile != "none":
            for block in self.model.blocks:
                block.compile()

    @functools.cached_property
    def optimizer(self) -> torch.optim.Optimizer:
        """AdamW, made at first use: its state is what does not fit first."""
        parameters = self.model.parameters()
        if self.model.impl == "course":
            return course.AdamW(parameters)
        if self.model.impl == "fused":
            return FusedAdamW(parameters)
        return adamw(parameters, capturable=self.capturable and self.device.kind == "cuda")

    def autocast(self) -> contextlib.AbstractContextManager:
        dtype = self.recipe.autocast
        return torch.autocast(self.device.kind, dtype or torch.bfloat16, enabled=dtype is not None)

    def inference(self) -> None:
        with torch.no_grad(), self.autocast():
            self.model(self.tokens)

    def loss_on(self, tokens_BT: Tensor, targets_BT: Tensor, plan: Sequence[int] = ()) -> Tensor:
        """Returns the mean loss on a batch, its blocks recomputed as `plan` says."""
        model = self.model
        with self.autocast():
            if plan:
                x_BTC = model.embedding(tokens_BT)
                x_BTC = run_blocks(list(model.blocks), x_BTC, model.rotary, plan)
                return language_model_loss(model.head(model.norm(x_BTC)), targets_BT)
            if model.impl == "eager":  # compiled whole, the model ends with its logits
                return language_model_loss(model(tokens_BT), targets_BT)
            return model(tokens_BT, targets_BT)

    def forward(self) -> Tensor:
        return self.loss_on(self.tokens, self.targets, self.plan)

    def forward_backward(self) -> None:
        self.scaler.scale(self.forward()).backward()

    def optimize(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def train_step(self) -> None:
        self.optimizer.zero_grad()
        loss = self.forward()
        self.scaler.scale(loss).backward()
        if self.capturable:
            self.loss = loss.detach()
        del loss
        self.optimize()

    def run_parts(
        self, phase: str, part: Callable[[str], contextlib.AbstractContextManager]
    ) -> Tensor:
        """Runs a phase with each of its parts inside `part(name)`: "inference", or "forward",
        "backward" and, of a training step, "optimizer".

        Returns the logits of an inference, the loss of any other phase, without gradient.
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
            scaled.backward()
        loss = loss.detach()
        del scaled
        if phase == "train_step":
            with part("optimizer"):
                self.optimize()
        return loss

    def time_phase(self, phase: str, **limits) -> Timing:
        """Returns the times of one of configs.PHASES. Only the phase itself is timed: what it needs
        is made before.
        """
        function, inputs = getattr(self, phase, None), ((),)
        if phase == "forward_backward":
            inputs = self._zero_grad
        elif phase == "backward":
            function, inputs = Tensor.backward, self._scaled_loss
        elif phase == "optimizer_step":
            self._scaled_loss()[0].backward()
            function = self.optimize
        return time_callable(function, inputs=inputs, device_kind=self.device.kind, **limits)

    def _zero_grad(self) -> tuple:
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
                is_tf32=torch.get_float32_matmul_precision() == "high",
            )
        return {recipe: name for name, recipe in RECIPES.items()}.get(live, str(live))

    def described(self) -> dict:
        """Returns the case as read back from the live objects."""
        model = self.model
        batch, context = self.tokens.shape
        d_ff, d_model = model.blocks[0].feed_forward.up_proj.weight.shape
        dims = (d_model, d_ff, len(model.blocks), model.blocks[0].attention.num_heads)
        names = [
            c.name for c in SIZES.values() if (c.d_model, c.d_ff, c.num_layers, c.num_heads) == dims
        ]
        num_compiled = sum(block._compiled_call_impl is not None for block in model.blocks)
        compiled = {0: "none", len(model.blocks): "regional"}.get(
            num_compiled, f"{num_compiled} blocks"
        )
        attention = sorted({block.attention.attention for block in model.blocks})
        impls = sorted({block.impl for block in model.blocks} | {model.impl})
        return {
            "size": names[0] if names else str(dims),
            "context": context,
            "batch": batch,
            "precision": self.live_precision(),
            "compile": compiled if model._compiled_call_impl is None else "whole",
            "attention": " and ".join(attention),
            **({} if impls == ["eager"] else {"impl": " and ".join(impls)}),
        }

    def observed(self) -> dict:
        """Returns what else there is to know of the live objects."""
        dtype = str(self.model.head.weight.dtype).removeprefix("torch.")
        observed = {
            "num_parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "parameter_dtype": dtype,
        }
        if "optimizer" in self.__dict__:
            observed["optimizer"] = type(self.optimizer).__name__
            observed["optimizer_fused"] = bool(self.optimizer.defaults.get("fused"))
        return observed

    def close(self) -> None:
        """Frees what the step holds."""
        for name in ("model", "tokens", "targets", "optimizer", "loss"):
            self.__dict__.pop(name, None)
        if self.compile != "none":  # importing the compiler to reset it takes seconds
            torch.compiler.reset()
        empty_cache(self.device)


def run_steps(device: Device, case: Case, ceilings: dict[str, float]) -> Iterator[PhaseRun]:
    """Yields each phase of a training step with the function that measures it."""
    with contextlib.closing(Step(device, case.parameters)) as step:
        for phase in case.phases:
            yield phase, functools.partial(_measure_phase, step, case, phase, ceilings)


def _measure_phase(step: Step, case: Case, phase: str, ceilings: dict[str, float]) -> Measured:
    limits: dict = {"time_limit_s": case.time_limit_s}
    if case.section == "warmup":
        num_steps = max(WARMUP_COUNTS) + WARMUP_MEASURED_STEPS
        limits = {"num_warmup": 0, "min_samples": num_steps, "max_samples": num_steps}
        limits["time_limit_s"] = 5.0
    step.model.zero_grad()
    if phase == "compile":
        times, metrics = timed_with_peak(step.device, _time_first_call, step)
    else:
        times, metrics = timed_with_peak(step.device, step.time_phase, phase, **limits)
        function = getattr(step, phase, None)
        metrics |= step_rates(step.device, case, phase, function, times, ceilings)
    samples = {}
    if times.timing.launch_ms and times.timing.n <= KEPT_SAMPLES:
        samples["host_ms"] = list(times.timing.host_ms)
    return times.measured(metrics, step.described(), step.observed(), samples, keep="step_ms")


def _time_first_call(step: Step) -> Timing:
    """Returns the time of the first forward and backward, which compiles both; no cache of an
    earlier run counts.
    """
    load_compiler(step.device)
    torch.compiler.config.force_disable_caches = True
    first_ms = time_once_ms(step.forward_backward, step.device.kind)
    return Timing((first_ms,), "host", 0, "fixed count")


def step_rates(
    device: Device,
    case: Case,
    phase: str,
    function: Callable[[], None] | None,
    times: Timed,
    ceilings: dict[str, float],
) -> dict[str, float | None]:
    """Returns the rates of a phase that took `times`, as fractions of the session's
    ceilings and of the datasheet's peaks too; of a phase in `case.sustained` also those of
    `function` called back to back.
    """
    parameters, peaks = case.parameters, device.peaks
    config, seconds = model_config(parameters["size"]), times.timing.median_ms * 1e-3
    if phase == "optimizer_step":
        rate = accounting.optimizer_step_bytes(config) / seconds / 1e9
        peak = peaks.memory_gb_per_s if peaks else None
        return {"achieved_gb_per_s": rate} | fractions(rate, ceilings.get("copy"), peak)
    precision = parameters["precision"].removesuffix("_pure")  # of the matrix products
    batch, context = parameters["batch"], parameters["context"]
    counted = "train_step" if phase == "graph_step" else phase
    flops, flops_causal = (
        accounting.phase_flops(config, batch, context, counted, causal=causal)
        for causal in (False, True)
    )
    rate = flops / seconds / 1e12
    metrics = {
        "flops": flops,
        "flops_causal": flops_causal,
        "achieved_tflops": rate,
        "tokens_per_s": batch * context / seconds,
    }
    peak = peaks.tflops(precision) if peaks else None
    metrics |= fractions(rate, ceilings.get(f"gemm {precision}"), peak)
    if phase in case.sustained:
        ceiling = ceilings.get(f"sustained gemm {precision}")
        metrics |= sustained_metrics(device, times, function, flops=flops, ceiling=ceiling)
    return metrics
