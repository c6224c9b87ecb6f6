"""Notebook 03: what low precision does to sums, dtypes and normalisations, and what a step gains by
it.

Sections: "accumulation" (one term added many times), "dtypes" (under autocast, read by hooks from
live modules), "normalisation" (LayerNorm and RMSNorm by the dtype of their statistics), "steps"
(time and memory in the precisions that notebook 01 does not have, beside one that it has),
"operators" (what autocast issues), "training" (losses of a synthetic task).
"""

import functools
import itertools
import math
from collections import OrderedDict, defaultdict

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from labkit.configs import (
    GRIDS,
    MIXED_PHASES,
    MIXED_PRECISIONS,
    NORM_SETTINGS,
    check_known,
)
from labkit.device import Device
from labkit.experiments.sections import Plan, run_section, section
from labkit.experiments.step import Step, run_steps, step_parameters
from labkit.experiments.sweep import Case, Measured, Skip
from labkit.numerics import (
    DTYPES,
    NORMS,
    dtype_name,
    normalise,
    relative_error,
    running_sums,
    stall_value,
    tensor_dtype,
)

MEASUREMENT_VERSION = 2
"""2: bf16 autocast is timed too, between the other precisions of the same step, so that they are
compared within a session; in version 1 there was only notebook 01's, of other sessions and other
hosts.
"""

TERM = 0.01
NUM_TERMS = 1000
LONG_SUM = 10_000
"""Terms of the sums, in which a 16-bit accumulator must come to a halt."""

TRACE_EVERY = 10
"""Additions between two recorded running sums."""

SERIES = (
    *((dtype, dtype, "none") for dtype in DTYPES),
    ("fp32", "fp16", "implicit"),
    ("fp32", "fp16", "explicit"),
    ("fp32", "bf16", "implicit"),
)
"""(accumulator, term, cast of the term to the accumulator). implicit: by type promotion in the
addition.
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

OPERATOR_PRECISIONS = ("fp32", "bf16", "fp16", "bf16_pure")

LAST_STEPS = 0.1
"""The final loss is the mean over this share of the steps."""


def cases(profile: str, device_kind: str) -> list[Case]:
    """Returns the cases of `profile`."""
    grid = GRIDS["03_mixed_precision"][profile]
    plan = Plan(grid)
    for accumulator, term, cast in SERIES:
        parameters = {
            "method": "sequential",
            "accumulator": accumulator,
            "term": term,
            "cast": cast,
            "num_terms": NUM_TERMS,
        }
        plan.add("accumulation", parameters, "sum")
    for dtype in ("fp16", "bf16"):
        plan.add("dtypes", {"model": "toy", "autocast": dtype}, "read")
    rows, features = grid.norm_shape
    for norm, setting, (dtype, statistics_name), scale in itertools.product(
        NORMS, NORM_SETTINGS, NORM_VARIANTS, grid.norm_scales
    ):
        parameters = {
            "norm": norm,
            "setting": setting,
            "input": dtype,
            "statistics": statistics_name,
            "scale": scale,
            "rows": rows,
            "features": features,
        }
        plan.add("normalisation", parameters, "error")
    for step in itertools.product(grid.sizes, grid.contexts, MIXED_PRECISIONS):
        plan.add("steps", step_parameters(*step), *MIXED_PHASES)
    for size, precision in itertools.product(grid.operator_sizes, OPERATOR_PRECISIONS):
        parameters = step_parameters(size, grid.operator_context, precision)
        plan.add("operators", parameters, "forward", "backward", "optimizer_step")
    for precision in grid.trainings:
        plan.add("training", {"precision": precision, **grid.task}, "training")
    return plan


# ---- sums and normalisations --------------------------------------------------------------------


def measure_sum(device: Device, case: Case, phase: str) -> Measured:
    """Returns 0.01 added a thousand times: the running sum, and where it comes to a halt."""
    parameters = case.parameters
    accumulator = tensor_dtype(parameters["accumulator"])
    num_terms = parameters["num_terms"]
    check_known("cast", parameters["cast"], ("none", "implicit", "explicit"))
    term = torch.tensor(TERM, dtype=tensor_dtype(parameters["term"]), device=device.kind)
    added = term.to(accumulator) if parameters["cast"] == "explicit" else term
    rounded = running_sums(added, max(LONG_SUM, num_terms), accumulator)
    sums = rounded.tolist()
    exact = TERM * num_terms
    metrics = {
        "exact_sum": exact,
        "error": sums[num_terms - 1] - exact,
        "stall_predicted": stall_value(float(term), accumulator),
    }
    samples = {"running_sum": sums[TRACE_EVERY - 1 : num_terms : TRACE_EVERY]}
    if sums[-1] == sums[-2]:
        metrics["stall_measured"] = sums[-1]
    live = {
        "method": "sequential",
        "accumulator": dtype_name(rounded.dtype),
        "term": dtype_name(term.dtype),
    }
    return Measured(metrics, parameters | live, {"trace_every": TRACE_EVERY}, samples)


def measure_normalisation(device: Device, case: Case, phase: str) -> Measured:
    """Returns the error of a normalisation against fp64 on the same, already rounded, input, over
    finite rows.
    """
    parameters = case.parameters
    norm = parameters["norm"]
    statistics = parameters["statistics"]
    shape = (parameters["rows"], parameters["features"])
    check_known("setting", parameters["setting"], NORM_SETTINGS)
    offset, epsilon = NORM_SETTINGS[parameters["setting"]]
    dtype = tensor_dtype(parameters["input"])
    # The same on every device.
    drawn = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    x = ((drawn + offset) * parameters["scale"]).to(dtype)
    if not x.isfinite().all():
        raise Skip(f"the input itself overflows {parameters['input']}")
    exact, _ = normalise(x.double(), norm, epsilon, torch.float64)
    x = x.to(device.kind)
    metrics = {}
    if statistics == "library":
        function = F.layer_norm if norm == "layer_norm" else F.rms_norm
        result = function(x, shape[-1:], eps=epsilon).cpu()
    else:
        result, mean_square = (
            y.cpu() for y in normalise(x, norm, epsilon, tensor_dtype(statistics))
        )
        statistics = dtype_name(mean_square.dtype)
        metrics["overflowed_fraction"] = float((~mean_square.isfinite()).double().mean())
    finite = result.isfinite().all(-1)
    metrics |= {
        "nonfinite_fraction": float((~finite).double().mean()),
        "relative_error": relative_error(result[finite], exact[finite]) if finite.any() else None,
    }
    return Measured(metrics, parameters | {"input": dtype_name(x.dtype), "statistics": statistics})


# ---- dtypes --------------------------------------------------------------------------------------


def _measure_dtypes(device: Device, case: Case, phase: str) -> Measured:
    """Returns the dtypes of the parts of the small model whose dtypes are published, under
    autocast, noted by hooks where tensors pass.

    Parts: the parameters, every layer's output, logits, loss, gradients.
    """
    layers = OrderedDict(
        fc1=nn.Linear(8, 10, bias=False),
        relu=nn.ReLU(),
        layer_norm=nn.LayerNorm(10),
        fc2=nn.Linear(10, 5, bias=False),
    )
    model = nn.Sequential(layers).to(device.kind)
    inputs = torch.randn(16, 8, device=device.kind)
    targets = torch.arange(16, device=device.kind) % 5
    dtypes = []

    def note(part: str, *tensors: Tensor) -> None:
        names = sorted({str(x.dtype).removeprefix("torch.") for x in tensors})
        dtypes.append([part, " and ".join(names)])

    note("parameters", *model.parameters())
    for name, layer in layers.items():
        layer.register_forward_hook(lambda *call, name=name: note(f"{name}_output", call[-1]))
    with torch.autocast(device.kind, tensor_dtype(case.parameters["autocast"])):
        live = dtype_name(torch.get_autocast_dtype(device.kind))
        logits = model(inputs)
        loss = F.cross_entropy(logits, targets)
    loss.backward()
    note("logits", logits)
    note("loss", loss)
    note("gradients", *(parameter.grad for parameter in model.parameters()))
    return Measured(
        metrics={"loss": loss.item()},
        case={"model": "toy", "autocast": live},
        observed={"dtypes": dtypes},
    )


# ---- operators -----------------------------------------------------------------------------------


CASTS = {torch.ops.aten._to_copy.default: 0, torch.ops.aten.copy_.default: 1}
"""Operators that cast, with the argument that they read."""


class OperatorCounter(TorchDispatchMode):
    """Counts the operators that reach the device below autocast, and casts among them; views start
    no kernel.
    """

    def __init__(self):
        super().__init__()
        self.counts = {"num_operators": 0, "num_casts": 0}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function.is_view or function is torch.ops.aten._unsafe_view.default:
            return result
        self.counts["num_operators"] += 1
        if function in CASTS and args[CASTS[function]].dtype != result.dtype:
            self.counts["num_casts"] += 1
        return result


def _measure_operators(step: Step, case: Case, phase: str) -> Measured:
    """Returns the operators of a part of a training step, after one that warms up."""
    step.train_step()
    counters = defaultdict(OperatorCounter)
    step.run("train_step", counters.__getitem__)
    return Measured(counters[phase.removesuffix("_step")].counts, step.described())


# ---- training ------------------------------------------------------------------------------------


def _measure_training(step: Step, case: Case, phase: str) -> Measured:
    """Returns the losses of the synthetic task in one precision, and what share of the gains never
    moved. Each token is followed by its successor in a fixed permutation, the next one and the
    first one after the last.
    """
    parameters = case.parameters
    step.optimizer.param_groups[0]["lr"] = parameters["learning_rate"]
    num_tokens = parameters["num_tokens"]
    shape = (parameters["num_steps"], parameters["batch"], 1)
    first = torch.randint(num_tokens, shape, generator=torch.Generator().manual_seed(0))
    data = (first + torch.arange(parameters["context"] + 1)) % num_tokens
    data = data.to(step.device.kind)
    losses = []
    for sequences in data:
        step.tokens = sequences[:, :-1]
        step.targets = sequences[:, 1:]
        losses.append(step.train_step().item())
    finite = [loss if math.isfinite(loss) else None for loss in losses]
    last = finite[-max(1, round(LAST_STEPS * len(losses))) :]
    gains = torch.cat([p for p in step.model.parameters() if p.dim() == 1])
    metrics = {
        "final_loss": None if None in last else sum(last) / len(last),
        # They begin as 1.
        "unmoved_gains": (gains == 1).sum().item() / gains.numel(),
    }
    return Measured(
        metrics,
        parameters | {"precision": step.live_precision(), "size": step.model.config.name},
        samples={"loss": finite},
    )


SECTIONS = {
    "accumulation": section(measure_sum),
    "dtypes": section(_measure_dtypes),
    "normalisation": section(measure_normalisation),
    "steps": run_steps,
    "operators": section(_measure_operators, Step),
    "training": section(_measure_training, Step),
}

run_case = functools.partial(run_section, SECTIONS)
