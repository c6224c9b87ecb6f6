"""Notebook 03: what low precision does to sums, dtypes and normalisations, and what a step gains by
it.

Sections: "accumulation" (one term added many times), "dtypes" (under autocast, read by hooks from
live modules), "normalisation" (LayerNorm and RMSNorm by the dtype of their statistics), "steps"
(time and memory in the precisions that notebook 01 does not have, beside one that it has),
"operators" (what autocast issues), "training" (loss and gradients of a synthetic task).
"""

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
    narrowed,
)
from labkit.device import Device, detect
from labkit.experiments.recipes import RECIPES, PrecisionWorkload, Recipe, require_recipe
from labkit.experiments.rounding import NUM_TERMS, measure_normalisation, measure_sum
from labkit.experiments.sections import Runner, run_section, section, timed_with_peak
from labkit.experiments.sweep import Case, Measured, PhaseRun
from labkit.experiments.training import measure_training
from labkit.experiments.workload import step_parameters, workload
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


def cases(
    profile: str, device_kind: str, *, sizes: Sequence[str] = (), contexts: Sequence[int] = ()
) -> list[Case]:
    """Returns the cases of `profile`, the steps narrowed where asked; ValueError for a value that
    it does not have.
    """
    grid = MIXED_PRECISION[profile]
    wanted_sizes = narrowed(MIXED_PRECISION, profile, "sizes", sizes)
    wanted_contexts = narrowed(MIXED_PRECISION, profile, "contexts", contexts)
    limit = grid.case_timeout_s
    sums = [
        dict(zip(("method", "accumulator", "term", "cast"), series, strict=True))
        for series in SERIES
    ]
    models = itertools.product(("toy", grid.transformer), ("fp16", "bf16"))
    normalisations = [
        {"norm": norm, "setting": setting, "input": dtype, "statistics": statistics, "scale": scale}
        for norm, setting, (dtype, statistics), scale in itertools.product(
            NORMS, NORM_SETTINGS, NORM_VARIANTS, grid.norm_scales
        )
    ]
    norm_shape = dict(zip(("rows", "features"), grid.norm_shape, strict=True))
    steps = itertools.product(wanted_sizes, wanted_contexts, MIXED_PRECISIONS)
    counted = itertools.product(grid.operator_sizes, (grid.operator_context,), OPERATOR_PRECISIONS)
    return [
        *(Case("accumulation", {**each, "num_terms": NUM_TERMS}, ("sum",), limit) for each in sums),
        *(
            Case("dtypes", {"model": model, "autocast": dtype}, ("read",), limit)
            for model, dtype in models
        ),
        *(
            Case("normalisation", {**each, **norm_shape}, ("error",), limit)
            for each in normalisations
        ),
        *(
            Case("steps", step_parameters(*step), MIXED_PHASES, limit, grid.time_limit_s)
            for step in steps
        ),
        *(Case("operators", step_parameters(*step), OPERATOR_PHASES, limit) for step in counted),
        *(
            Case("training", {"precision": each, **vars(grid.task)}, ("training",), limit)
            for each in RECIPES
        ),
    ]


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
    seen: dict[str, list[str]] = {"parameters": [], "logits": [], "loss": [], "gradients": []}

    def note(name: str, tensor: Tensor) -> None:
        dtypes = seen.setdefault(name, [])
        if (text := str(tensor.dtype).removeprefix("torch.")) not in dtypes:
            dtypes.append(text)

    handles = []
    for name, module in model.named_modules():
        if name and not isinstance(module, nn.ModuleList):
            shared = re.sub(r"(?<![^.])\d+(?![^.])", "*", name)
            handles.append(
                module.register_forward_hook(
                    lambda *passed, name=f"{shared}_output": note(name, passed[-1])
                )
            )
    try:
        loss, logits = forward()
        loss.backward()
    finally:
        for handle in handles:
            handle.remove()
    note("logits", logits)
    note("loss", loss)
    for parameter in model.parameters():
        note("parameters", parameter)
        note("gradients", parameter.grad)
        parameter.grad = None
    ends = {name: seen.pop(name) for name in ("logits", "loss", "gradients")}
    return {name: " and ".join(dtypes) for name, dtypes in (seen | ends).items()}, float(
        loss.detach()
    )


def measure_dtypes(device: Device, parameters: dict) -> Measured:
    """Returns the dtypes of a model's parts under autocast, and its loss beside that in fp32."""
    torch.manual_seed(0)
    numerics.set_precision("fp32")
    if parameters["model"] == "toy":
        model = ToyModel(device=device.kind)
        inputs, targets = (
            torch.randn(16, 8, device=device.kind),
            torch.arange(16, device=device.kind) % 5,
        )
    else:
        config = model_config(parameters["model"])
        model = TransformerLM(config, max_context=16, attention="eager", device=device.kind)
        inputs, targets = (
            torch.randint(config.vocab_size, (1, 16), device=device.kind) for _ in range(2)
        )
    live = []

    def forward(dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
        with Recipe(autocast=dtype).autocasting(device.kind):
            if torch.is_autocast_enabled(device.kind):
                live.append(dtype_name(torch.get_autocast_dtype(device.kind)))
            logits = model(inputs)
            return F.cross_entropy(logits.flatten(0, -2), targets.flatten()), logits

    dtypes, loss = read_dtypes(model, functools.partial(forward, DTYPES[parameters["autocast"]]))
    with torch.no_grad():
        loss_fp32 = float(forward(None)[0])
    if not abs(loss / loss_fp32 - 1) <= LARGEST_DTYPE_DEVIATION:
        raise AssertionError(f"the loss is {loss:.4g} under autocast and {loss_fp32:.4g} in fp32")
    return Measured(
        metrics={"loss": loss, "loss_fp32": loss_fp32},
        case={"model": parameters["model"], "autocast": " and ".join(live)},
        observed={
            "dtypes": [list(pair) for pair in dtypes.items()],
            "num_modules": len(list(model.modules())),
        },
    )


def _measure_step(workload: PrecisionWorkload, case: Case, phase: str) -> Measured:
    """Returns one phase's time and peak memory, after its loss (forward) or its gradients have been
    looked at.
    """
    device = workload.device
    metrics: dict = {}
    if phase == "forward":
        metrics["loss"] = workload.check_loss()
    else:
        workload.settle()
    scale = workload.scaler.get_scale()
    workload.model.zero_grad()
    found, peak = timed_with_peak(
        device, workload.time_phase, phase, time_limit_s=case.time_limit_s
    )
    metrics |= peak
    if phase == "train_step":
        if not all(parameter.isfinite().all() for parameter in workload.model.parameters()):
            raise AssertionError(
                f"training in {workload.precision} has made a parameter inf or NaN"
            )
        # Each step whose gradients overflow is left out, and halves the scale.
        metrics["num_skipped_steps"] = round(math.log2(scale / workload.scaler.get_scale()))
    metrics["loss_scale"] = workload.scaler.get_scale()
    metrics["tokens_per_s"] = workload.tokens.numel() / (found.timing.median_ms * 1e-3)
    return found.measured(metrics, workload.described(), workload.observed(), keep="step_ms")


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


def count_operators(workload: PrecisionWorkload) -> dict[str, OperatorCounter]:
    """Returns the operators of a forward pass, a backward pass and an optimizer step, after one
    step that warms up.
    """
    workload.train_step()
    workload.model.zero_grad()
    counters = {phase: OperatorCounter() for phase in OPERATOR_PHASES}
    with counters["forward"]:
        loss = workload.forward()
    scaled = workload.scaler.scale(loss)
    with counters["backward"]:
        scaled.backward()
    with counters["optimizer_step"]:
        workload.optimize()
    return counters


def _run_operators(device: Device, case: Case, ceilings: dict[str, float]) -> Iterator[PhaseRun]:
    with workload(device, case, PrecisionWorkload) as live:
        counts = count_operators(live)
        for phase in case.phases:
            found = {
                name: getattr(counts[phase], name)
                for name in ("num_operators", "num_casts", "cast_bytes")
            }
            yield phase, functools.partial(Measured, found, live.described(), live.observed())


def _probe(measure: Callable[[Device, dict], Measured]) -> Runner:
    return section(lambda device, case, phase: measure(device, case.parameters))


SECTIONS = {
    "accumulation": _probe(measure_sum),
    "dtypes": _probe(measure_dtypes),
    "normalisation": _probe(measure_normalisation),
    "steps": section(_measure_step, functools.partial(workload, kind=PrecisionWorkload)),
    "operators": _run_operators,
    "training": _probe(measure_training),
}


def run_case(case: Case, ceilings: dict[str, float]) -> Iterator[PhaseRun]:
    """Yields each phase of `case` with the function that measures it. Runs in the worker
    process.
    """
    if "precision" in case.parameters:
        require_recipe(detect(), case.parameters["precision"], is_timed=case.section == "steps")
    yield from run_section(SECTIONS, case, ceilings)
