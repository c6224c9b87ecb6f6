"""Notebook 03: what low precision does to sums, dtypes and normalisations, and what a step gains by
it.

Sections: "accumulation" (one term added many times), "dtypes" (under autocast, read by hooks from
live modules), "normalisation" (LayerNorm and RMSNorm by the dtype of their statistics), "steps"
(time and memory in the precisions that notebook 01 does not have, beside one that it has),
"operators" (what autocast issues), "training" (loss and gradients of a synthetic task).
"""

import contextlib
import functools
import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from labkit import numerics
from labkit.configs import (
    MIXED_PHASES,
    MIXED_PRECISION,
    MIXED_PRECISIONS,
    NORM_SETTINGS,
    model_config,
)
from labkit.device import Device
from labkit.experiments.rounding import NUM_TERMS, measure_normalisation, measure_sum
from labkit.experiments.sections import Runner, run_section, section, timed_with_peak
from labkit.experiments.step import RECIPES, Step, step_parameters
from labkit.experiments.sweep import Case, Measured, PhaseRun, Skip
from labkit.experiments.training import measure_training
from labkit.models.transformer import TransformerLM
from labkit.numerics import DTYPES, NORMS, dtype_name

MEASUREMENT_VERSION = 2
"""2: bf16 autocast is timed too, between the other precisions of the same step, so that they are
compared within a session; in version 1 there was only notebook 01's, of other sessions and other
hosts.
"""

SERIES = (
    *(
        (method, dtype, dtype, "none")
        for method in ("sequential", "kahan", "pairwise")
        for dtype in DTYPES
    ),
    ("sequential", "fp32", "fp16", "implicit"),
    ("sequential", "fp32", "fp16", "explicit"),
    ("sequential", "fp32", "bf16", "implicit"),
)
"""(method, accumulator, term, cast of the term to the accumulator). implicit: by type promotion in
the addition.
"""

NORM_VARIANTS = (
    ("fp32", "fp32"),
    *(
        (dtype, statistics)
        for dtype in ("fp16", "bf16")
        for statistics in (dtype, "fp32", "library")
    ),
)
"""(dtype of input and output, dtype of the statistics). library: PyTorch's own function, which
chooses.
"""

LARGEST_DTYPE_DEVIATION = 0.05
"""The loss under autocast may be this fraction off that in fp32, on the same model and data."""

OPERATOR_PHASES = ("forward", "backward", "optimizer_step")
OPERATOR_PRECISIONS = ("fp32", "bf16", "fp16", "bf16_pure")
COUNTS = ("num_operators", "num_casts", "cast_bytes")

LARGEST_LOSS_DEVIATION = 0.05
"""A step whose loss at initialisation is further off its closed form than this fraction is not
timed.
"""

MAX_HALVINGS = 24
"""Halvings of the loss scale within which the gradients must become finite (2¹⁶ to 2⁻⁸)."""


def cases(
    profile: str, device_kind: str, *, sizes: Sequence[str] = (), contexts: Sequence[int] = ()
) -> list[Case]:
    """Returns the cases of `profile`, the steps narrowed to values of its grid where
    asked.
    """
    grid = MIXED_PRECISION[profile]
    wanted_sizes = sizes or grid.sizes
    wanted_contexts = contexts or grid.contexts
    limit = grid.case_timeout_s
    planned = []
    for method, accumulator, term, cast in SERIES:
        parameters = {"method": method, "accumulator": accumulator, "term": term, "cast": cast}
        parameters["num_terms"] = NUM_TERMS
        planned.append(Case("accumulation", parameters, ("sum",), limit))
    for model, dtype in itertools.product(("toy", grid.transformer), ("fp16", "bf16")):
        planned.append(Case("dtypes", {"model": model, "autocast": dtype}, ("read",), limit))
    rows, features = grid.norm_shape
    for norm, setting, (dtype, statistics), scale in itertools.product(
        NORMS, NORM_SETTINGS, NORM_VARIANTS, grid.norm_scales
    ):
        parameters = {
            "norm": norm,
            "setting": setting,
            "input": dtype,
            "statistics": statistics,
            "scale": scale,
            "rows": rows,
            "features": features,
        }
        planned.append(Case("normalisation", parameters, ("error",), limit))
    for step in itertools.product(wanted_sizes, wanted_contexts, MIXED_PRECISIONS):
        parameters = step_parameters(*step)
        planned.append(Case("steps", parameters, MIXED_PHASES, limit, grid.time_limit_s))
    for size, precision in itertools.product(grid.operator_sizes, OPERATOR_PRECISIONS):
        parameters = step_parameters(size, grid.operator_context, precision)
        planned.append(Case("operators", parameters, OPERATOR_PHASES, limit))
    for precision in RECIPES:
        parameters = {"precision": precision, **vars(grid.task)}
        planned.append(Case("training", parameters, ("training",), limit))
    return planned


class ToyModel(nn.Module):
    """Linear → ReLU → LayerNorm → Linear, the small model whose dtypes are published."""

    def __init__(self, **factory):
        super().__init__()
        self.fc1 = nn.Linear(8, 10, bias=False, **factory)
        self.relu = nn.ReLU()
        self.layer_norm = nn.LayerNorm(10, **factory)
        self.fc2 = nn.Linear(10, 5, bias=False, **factory)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.layer_norm(self.relu(self.fc1(x))))


def read_dtypes(
    model: nn.Module, forward: Callable[[], tuple[Tensor, Tensor]]
) -> tuple[dict[str, str], float]:
    """Returns (dtypes by component, loss) of one forward and backward pass, read by hooks where
    tensors pass.

    Components: the parameters, every module's output (those of all blocks under one name), logits,
    loss, gradients.

    Args:
        forward: runs the model under autocast and returns (loss, logits).
    """
    dtypes: dict[str, list[str]] = {}

    def note(name: str, tensor: Tensor) -> None:
        names = dtypes.setdefault(name, [])
        text = str(tensor.dtype).removeprefix("torch.")
        if text not in names:
            names.append(text)

    def watch(module: nn.Module, name: str):
        return module.register_forward_hook(lambda module, inputs, output: note(name, output))

    for parameter in model.parameters():
        note("parameters", parameter)
    handles = []
    for name, module in model.named_modules():
        if name and not isinstance(module, nn.ModuleList):
            shared_name = re.sub(r"(?<![^.])\d+(?![^.])", "*", name)
            handles.append(watch(module, f"{shared_name}_output"))
    try:
        loss, logits = forward()
        loss.backward()
    finally:
        for handle in handles:
            handle.remove()
    note("logits", logits)
    note("loss", loss)
    for parameter in model.parameters():
        note("gradients", parameter.grad)
        parameter.grad = None
    texts = {name: " and ".join(names) for name, names in dtypes.items()}
    return texts, float(loss.detach())


def measure_dtypes(device: Device, parameters: dict) -> Measured:
    """Returns the dtypes of a model's parts under autocast, and its loss beside that in fp32."""
    torch.manual_seed(0)
    numerics.set_precision("fp32")
    if parameters["model"] == "toy":
        model = ToyModel(device=device.kind)
        inputs = torch.randn(16, 8, device=device.kind)
        targets = torch.arange(16, device=device.kind) % 5
    else:
        config = model_config(parameters["model"])
        model = TransformerLM(config, max_context=16, attention="eager", device=device.kind)
        inputs = torch.randint(config.vocab_size, (1, 16), device=device.kind)
        targets = torch.randint(config.vocab_size, (1, 16), device=device.kind)

    def forward() -> tuple[Tensor, Tensor]:
        logits = model(inputs)
        return F.cross_entropy(logits.flatten(0, -2), targets.flatten()), logits

    autocast = torch.autocast(device.kind, DTYPES[parameters["autocast"]])
    with autocast:
        live = dtype_name(torch.get_autocast_dtype(device.kind))
    dtypes, loss = read_dtypes(model, autocast(forward))
    with torch.no_grad():
        loss_fp32 = float(forward()[0])
    if not abs(loss / loss_fp32 - 1) <= LARGEST_DTYPE_DEVIATION:
        raise AssertionError(f"the loss is {loss:.4g} under autocast and {loss_fp32:.4g} in fp32")
    return Measured(
        metrics={"loss": loss, "loss_fp32": loss_fp32},
        case={"model": parameters["model"], "autocast": live},
        observed={
            "dtypes": [list(pair) for pair in dtypes.items()],
            "num_modules": len(list(model.modules())),
        },
    )


@contextlib.contextmanager
def _timed_step(device: Device, case: Case) -> Iterator[Step]:
    if device.kind == "cpu" and RECIPES[case.parameters["precision"]].autocast == torch.float16:
        raise Skip(f"{device.name}: PyTorch emulates float16 matrix products on most processors")
    with contextlib.closing(Step(device, case.parameters)) as step:
        yield step


def _measure_step(step: Step, case: Case, phase: str) -> Measured:
    """Returns one phase's time and peak memory, after its loss (forward) or its gradients have been
    looked at.
    """
    scaler, model, metrics = step.scaler, step.model, {}
    if phase == "forward":
        metrics["loss"] = check_loss(step)
    else:
        settle_scale(step)
    scale = scaler.get_scale()
    model.zero_grad()
    limits = {"time_limit_s": case.time_limit_s}
    times, peak = timed_with_peak(step.device, step.time_phase, phase, **limits)
    metrics |= peak
    if phase == "train_step":
        if not all(parameter.isfinite().all() for parameter in model.parameters()):
            raise AssertionError(f"training in {step.precision} has made a parameter inf or NaN")
        # Each step whose gradients overflow is left out, and halves the scale.
        metrics["num_skipped_steps"] = round(math.log2(scale / scaler.get_scale()))
    metrics["loss_scale"] = scaler.get_scale()
    metrics["tokens_per_s"] = step.tokens.numel() / (times.timing.median_ms * 1e-3)
    return times.measured(metrics, step.described(), step.observed(), keep="step_ms")


def settle_scale(step: Step) -> None:
    """Halves the loss scale until the gradients are finite; raises AssertionError if they do not
    become so.
    """
    for _ in range(MAX_HALVINGS):
        step.model.zero_grad()
        step.forward_backward()
        if all(parameter.grad.isfinite().all() for parameter in step.model.parameters()):
            return
        if not step.scaler.is_enabled():
            break
        step.scaler.update(step.scaler.get_scale() / 2)
    scale = step.scaler.get_scale()
    raise AssertionError(f"gradients are not finite in {step.precision} at a loss scale of {scale}")


def check_loss(step: Step) -> float:
    """Returns the loss at initialisation; raises AssertionError where it is not near its closed
    form.

    The head's rows are N(0, 0.02²) and the hidden state has d features of mean square 1, so logits
    have a variance of 0.0004·d, and the mean cross-entropy is ln V plus half of it.
    """
    with torch.no_grad():
        loss = float(step.forward())
    vocab_size, d_model = step.model.head.weight.shape
    expected = math.log(vocab_size) + 0.0004 * d_model / 2
    if not abs(loss / expected - 1) <= LARGEST_LOSS_DEVIATION:
        raise AssertionError(
            f"the loss is {loss:.4g} in {step.precision}, {expected:.4g} was expected"
        )
    return loss


class OperatorCounter(TorchDispatchMode):
    """Counts the operators that reach the device below autocast, and casts among them; views start
    no kernel.
    """

    def __init__(self):
        super().__init__()
        self.num_operators = self.num_casts = self.cast_bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if _is_view(function):
            return result
        self.num_operators += 1
        if function in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default):
            source = [tensor for tensor in tree_leaves(args) if isinstance(tensor, Tensor)][-1]
            if source.dtype != result.dtype:
                self.num_casts += 1
                self.cast_bytes += source.nbytes + result.nbytes
        return result


def _is_view(function) -> bool:
    aliases = [value.alias_info for value in function._schema.returns]
    is_alias = any(alias is not None and not alias.is_write for alias in aliases)
    return is_alias or function is torch.ops.aten._unsafe_view.default


def count_operators(step: Step) -> dict[str, OperatorCounter]:
    """Returns the operators of a forward pass, a backward pass and an optimizer step, after one
    step that warms up.
    """
    step.train_step()
    step.model.zero_grad()
    counters = {part: OperatorCounter() for part in ("forward", "backward", "optimizer")}
    step.run_parts("train_step", counters.__getitem__)
    return counters


def _run_operators(device: Device, case: Case, ceilings: dict[str, float]) -> Iterator[PhaseRun]:
    with contextlib.closing(Step(device, case.parameters)) as step:
        counters = count_operators(step)
        for phase in case.phases:
            counts = vars(counters[phase.removesuffix("_step")])
            metrics = {name: counts[name] for name in COUNTS}
            yield phase, functools.partial(Measured, metrics, step.described(), step.observed())


def _probe(measure: Callable[[Device, dict], Measured]) -> Runner:
    return section(lambda device, case, phase: measure(device, case.parameters))


SECTIONS = {
    "accumulation": _probe(measure_sum),
    "dtypes": _probe(measure_dtypes),
    "normalisation": _probe(measure_normalisation),
    "steps": section(_measure_step, _timed_step),
    "operators": _run_operators,
    "training": _probe(measure_training),
}

run_case = functools.partial(run_section, SECTIONS)
