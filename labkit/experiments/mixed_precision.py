"""Notebook 03: what low precision does to sums, dtypes, normalisations and epilogues, and what a step gains by it.

Sections: "accumulation" (one term added many times), "dtypes" (under autocast, read by hooks from live modules),
"normalisation" (LayerNorm and RMSNorm by the dtype of their statistics), "epilogue" (a rounding between matrix product
and GELU), "steps" (time and memory in the precisions that notebook 01 does not have, beside one that it has),
"operators" (what autocast issues beside the work), "training" (loss and gradients of a synthetic task).
"""

import contextlib
import functools
import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from labkit import hardware
from labkit.configs import (
    BATCH_SIZE,
    MIXED_PHASES,
    MIXED_PRECISION,
    MIXED_PRECISIONS,
    NORM_SETTINGS,
    MixedPrecisionGrid,
    model_config,
    narrowed,
)
from labkit.experiments.benchmarking import ATTENTION, Workload
from labkit.experiments.ceilings import empty_cache, require_precision
from labkit.experiments.sweep import Case, Measured, PhaseRun, Skip
from labkit.models.transformer import TransformerLM, language_model_loss
from labkit.numerics import DTYPES, binade, dtype_name, normalise, relative_error, running_sums, spacing, stall_value

MEASUREMENT_VERSION = 2
"""2: bf16 autocast is timed too, between the other precisions of the same step, so that they are compared within a
session; in version 1 there was only notebook 01's, of other sessions and other hosts."""

TERM = 0.01
NUM_TERMS = 1000
LONG_SUM = 10_000
"""Terms of the long sums, in which a 16-bit accumulator must come to a halt."""

TRACE_EVERY = 10
"""Additions between two recorded running sums."""

SERIES = (
    ("sequential", "fp32", "fp32", "none"),
    ("sequential", "fp16", "fp16", "none"),
    ("sequential", "fp32", "fp16", "implicit"),
    ("sequential", "fp32", "fp16", "explicit"),
    ("sequential", "bf16", "bf16", "none"),
    ("sequential", "fp32", "bf16", "implicit"),
    ("kahan", "fp32", "fp32", "none"),
    ("kahan", "fp16", "fp16", "none"),
    ("kahan", "bf16", "bf16", "none"),
    ("pairwise", "fp32", "fp32", "none"),
    ("pairwise", "fp16", "fp16", "none"),
    ("pairwise", "bf16", "bf16", "none"),
)
"""(method, accumulator, term, cast of the term to the accumulator). implicit: by type promotion in the addition."""

NORM_VARIANTS = (
    ("fp32", "fp32"),
    ("fp16", "fp16"),
    ("fp16", "fp32"),
    ("fp16", "library"),
    ("bf16", "bf16"),
    ("bf16", "fp32"),
    ("bf16", "library"),
)
"""(dtype of input and output, dtype of the statistics). library: PyTorch's own function, which chooses."""

EPILOGUES = (("rounded", "erf"), ("carried", "erf"), ("rounded", "tanh"), ("carried", "tanh"), ("library", "tanh"))
"""(what happens between the product and GELU, form of GELU). library: `torch._addmm_activation`, on CUDA the epilogue
of cuBLASLt, which has the tanh form only."""

PREACTIVATION_STD = 1.5
PREACTIVATION_EDGES = (-5.0, -4.0, -3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0, 5.0)

LARGEST_LOSS_DEVIATION = 0.05
"""A step's loss at initialisation may be this fraction off its closed form; beyond, the step is wrong and not timed."""

LARGEST_DTYPE_DEVIATION = 0.05
"""The loss under autocast may be this fraction off that in fp32, on the same model and data."""

MAX_HALVINGS = 24
"""Halvings of the loss scale within which the gradients must become finite (2¹⁶ to 2⁻⁸)."""

OPERATOR_PHASES = ("forward", "backward", "optimizer_step")
OPERATOR_PRECISIONS = ("fp32", "bf16", "fp16", "bf16_pure")


@dataclass(frozen=True)
class Recipe:
    """What makes up a precision: autocast's dtype, the parameters', a scaled loss, TF32 products."""

    autocast: torch.dtype | None = None
    parameters: torch.dtype = torch.float32
    is_scaled: bool = False
    is_tf32: bool = False

    def autocasting(self, device_kind: str) -> contextlib.AbstractContextManager:
        return torch.autocast(device_kind, self.autocast or torch.bfloat16, enabled=self.autocast is not None)

    def scaler(self, device_kind: str) -> torch.amp.GradScaler:
        return torch.amp.GradScaler(device_kind, enabled=self.is_scaled)

    def set_matmul(self) -> None:
        torch.set_float32_matmul_precision("high" if self.is_tf32 else "highest")


RECIPES = {
    "fp32": Recipe(),
    "tf32": Recipe(is_tf32=True),
    "bf16": Recipe(autocast=torch.bfloat16),
    "fp16": Recipe(autocast=torch.float16, is_scaled=True),
    "fp16_unscaled": Recipe(autocast=torch.float16),
    "bf16_pure": Recipe(parameters=torch.bfloat16),
}
"""Precisions by the name that records give them; "fp16_unscaled" is only trained in, to see what scaling does."""


def live_recipe(device_kind: str, model: nn.Module, scaler: torch.amp.GradScaler) -> Recipe:
    """Returns the recipe as read back inside an autocast context from the model, the scaler and PyTorch's settings."""
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


# ---- the cases ---------------------------------------------------------------------------------------------


def cases(profile: str, device_kind: str, *, sizes: Sequence[str] = (), contexts: Sequence[int] = ()) -> list[Case]:
    """Returns the cases of `profile`, the steps narrowed to `sizes` and `contexts` where these are given.

    Raises ValueError for a size or context that the profile does not have.
    """
    grid = MIXED_PRECISION[profile]
    wanted_sizes = narrowed(MIXED_PRECISION, profile, "sizes", sizes)
    wanted_contexts = narrowed(MIXED_PRECISION, profile, "contexts", contexts)
    limit = grid.case_timeout_s
    return [
        *(Case("accumulation", parameters, ("sum",), limit) for parameters in _sums()),
        *(Case("dtypes", parameters, ("read",), limit) for parameters in _dtype_parameters(grid)),
        *(Case("normalisation", parameters, ("error",), limit) for parameters in _normalisations(grid)),
        *(Case("epilogue", parameters, ("error",), limit) for parameters in _epilogues(grid)),
        *(
            Case("steps", _step(size, context, precision), MIXED_PHASES, limit, grid.time_limit_s)
            for size in wanted_sizes
            for context in wanted_contexts
            for precision in MIXED_PRECISIONS
        ),
        *(
            Case("operators", _step(size, grid.operator_context, precision), OPERATOR_PHASES, limit)
            for size in grid.operator_sizes
            for precision in OPERATOR_PRECISIONS
        ),
        *(Case("training", _training(grid, precision), ("training",), limit) for precision in RECIPES),
    ]


def _sums() -> Iterator[dict]:
    for method, accumulator, term, cast in SERIES:
        yield {"method": method, "accumulator": accumulator, "term": term, "cast": cast, "num_terms": NUM_TERMS}


def _dtype_parameters(grid: MixedPrecisionGrid) -> Iterator[dict]:
    for model in ("toy", grid.transformer):
        for dtype in ("fp16", "bf16"):
            yield {"model": model, "autocast": dtype}


def _normalisations(grid: MixedPrecisionGrid) -> Iterator[dict]:
    for norm in ("layer_norm", "rms_norm"):
        for setting in NORM_SETTINGS:
            for dtype, statistics_dtype in NORM_VARIANTS:
                for scale in grid.norm_scales:
                    names = {"norm": norm, "setting": setting, "input": dtype, "statistics": statistics_dtype}
                    yield {**names, "scale": scale, "rows": grid.norm_shape[0], "features": grid.norm_shape[1]}


def _epilogues(grid: MixedPrecisionGrid) -> Iterator[dict]:
    for dtype in ("bf16", "fp16"):
        for depth in grid.epilogue_depths:
            for epilogue, form in EPILOGUES:
                names = {"dtype": dtype, "epilogue": epilogue, "gelu": form}
                yield {**names, "rows": grid.epilogue_shape[0], "columns": grid.epilogue_shape[1], "depth": depth}


def _step(size: str, context: int, precision: str) -> dict:
    """Returns the parameters of notebook 01 for the same step, so that the records of both stand in one table."""
    names = {"size": size, "context": context, "batch": BATCH_SIZE, "precision": precision}
    return {**names, "compile": "none", "attention": ATTENTION}


def _training(grid: MixedPrecisionGrid, precision: str) -> dict:
    task = grid.task
    return {
        "precision": precision,
        "size": task.size,
        "vocab_size": task.vocab_size,
        "num_tokens": task.num_tokens,
        "context": task.context,
        "batch": task.batch,
        "num_steps": task.num_steps,
        "learning_rate": task.learning_rate,
    }


# ---- running one -------------------------------------------------------------------------------------------


def run_case(case: Case, ceilings: dict[str, float]) -> Iterator[PhaseRun]:
    """Yields each phase of `case` with the function that measures it. Runs in the worker process."""
    device = hardware.detect()
    if "precision" in case.parameters:
        require_recipe(device, case.parameters["precision"], is_timed=case.section == "steps")
    if case.section == "steps":
        with _workload(device, case.parameters) as workload:
            for phase in case.phases:
                yield phase, functools.partial(_measure_step, workload, case, phase)
    elif case.section == "operators":
        with _workload(device, case.parameters) as workload:
            counts = count_operators(workload)
            for phase in case.phases:
                yield phase, functools.partial(_counted, workload, counts[phase])
    else:
        measure = {
            "accumulation": measure_sum,
            "dtypes": measure_dtypes,
            "normalisation": measure_normalisation,
            "epilogue": measure_epilogue,
            "training": measure_training,
        }[case.section]
        for phase in case.phases:
            yield phase, functools.partial(measure, device, case.parameters)


def require_recipe(device: hardware.Device, precision: str, *, is_timed: bool) -> None:
    """Raises Skip for a precision that the device lacks; where times are taken, also for one that it emulates."""
    require_precision(device, "bf16" if precision == "bf16_pure" else precision)
    if is_timed and device.kind == "cpu" and RECIPES[precision].autocast == torch.float16:
        raise Skip(f"{device.name}: PyTorch emulates float16 matrix products on most processors")


def _place(device: hardware.Device) -> str:
    """Returns where fp64 oracles are computed: on the device, but mps has no fp64."""
    return "cpu" if device.kind == "mps" else device.kind


def _random(*shape: int, seed: int = 0) -> Tensor:
    """Returns standard normal numbers, the same on every device."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# ---- accumulation ------------------------------------------------------------------------------------------


def measure_sum(device: hardware.Device, parameters: dict) -> Measured:
    """Returns 0.01 added a thousand times: the running sum, the rounding of its binades, where it comes to a halt."""
    term = torch.tensor(TERM, dtype=DTYPES[parameters["term"]], device=device.kind)
    accumulator = DTYPES[parameters["accumulator"]]
    is_explicit = parameters["cast"] == "explicit"
    method, num_terms = parameters["method"], parameters["num_terms"]
    added = term.to(accumulator) if is_explicit else term
    is_sequential = method == "sequential"
    every = 1 if is_sequential else TRACE_EVERY
    sums = running_sums(added, LONG_SUM if is_sequential else num_terms, accumulator, method, every=every)
    trace = sums[: num_terms // every].double().cpu()
    final, exact = float(trace[-1]), TERM * num_terms
    metrics = {
        "final_sum": final,
        "exact_sum": exact,
        "error": final - exact,
        "term_error": (float(term) - TERM) * num_terms,
        "rounded_term": float(term),
        "stall_predicted": stall_value(float(term), accumulator),
    }
    samples = {"running_sum": trace[TRACE_EVERY // every - 1 :: TRACE_EVERY // every].tolist()}
    if is_sequential:
        long_sum = sums.double().cpu()
        if long_sum[-1] == long_sum[-2]:
            metrics["stall_measured"] = float(long_sum[-1])
            metrics["stall_terms"] = int((long_sum == long_sum[-1]).nonzero()[0]) + 1
        samples |= binades(long_sum[: metrics.get("stall_terms", num_terms)], accumulator)
    names = {"method": method, "accumulator": dtype_name(sums.dtype), "term": dtype_name(term.dtype)}
    cast = "none" if term.dtype == sums.dtype else "implicit" if added.dtype == term.dtype else "explicit"
    return Measured(
        metrics=metrics,
        case={**names, "cast": cast, "num_terms": len(trace) * every},
        observed={"trace_every": TRACE_EVERY, "terms_of_the_long_sum": len(sums) * every},
        samples=samples,
    )


def binades(sums: Tensor, accumulator: torch.dtype) -> dict[str, list[float]]:
    """Returns for each binade [2ᵏ, 2ᵏ⁺¹) that running sums (fp64) pass through how its additions were rounded.

    `binade_start`; `binade_spacing` of the accumulator's numbers; `binade_additions`: sums in it that another follows;
    `binade_mean_step`: what an addition added there.
    """
    steps = sums.diff()
    starts = torch.tensor([binade(value) for value in sums[:-1].tolist()], dtype=sums.dtype)
    rows: dict[str, list[float]] = {"binade_start": [], "binade_spacing": [], "binade_additions": []}
    rows["binade_mean_step"] = []
    for start in starts.unique().tolist():
        inside = steps[starts == start]
        rows["binade_start"].append(start)
        rows["binade_spacing"].append(spacing(start, accumulator))
        rows["binade_additions"].append(len(inside))
        rows["binade_mean_step"].append(float(inside.mean()))
    return rows


# ---- dtypes under autocast -----------------------------------------------------------------------------------


class ToyModel(nn.Module):
    """Linear → ReLU → LayerNorm → Linear, the small model whose dtypes are published."""

    def __init__(self, in_features: int = 8, out_features: int = 5, **factory):
        super().__init__()
        self.fc1 = nn.Linear(in_features, 10, bias=False, **factory)
        self.relu = nn.ReLU()
        self.layer_norm = nn.LayerNorm(10, **factory)
        self.fc2 = nn.Linear(10, out_features, bias=False, **factory)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.layer_norm(self.relu(self.fc1(x))))


def read_dtypes(model: nn.Module, forward: Callable[[], tuple[Tensor, Tensor]]) -> tuple[dict[str, str], float]:
    """Returns (dtypes by component, loss) of one forward and backward pass, read by hooks where tensors pass.

    Components: the parameters, every module's output (the modules of all blocks under one name, their dtypes joined if
    they differ), the logits, the loss and the parameters' gradients.

    Args:
        forward: runs the model under autocast and returns (loss, logits).
    """
    seen: dict[str, list[str]] = {"parameters": [], "logits": [], "loss": [], "gradients": []}

    def note(name: str, tensor: Tensor) -> None:
        dtypes = seen.setdefault(name, [])
        if (text := str(tensor.dtype).removeprefix("torch.")) not in dtypes:
            dtypes.append(text)

    def hook(name: str, module: nn.Module, inputs: tuple, output: Tensor) -> None:
        note(name, output)

    handles = [
        module.register_forward_hook(functools.partial(hook, f"{_without_index(name)}_output"))
        for name, module in model.named_modules()
        if name and not isinstance(module, nn.ModuleList)
    ]
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
    return {name: " and ".join(dtypes) for name, dtypes in (seen | ends).items()}, float(loss.detach())


def _without_index(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def measure_dtypes(device: hardware.Device, parameters: dict) -> Measured:
    """Returns the dtypes of a model's parts under autocast, and its loss beside that in fp32."""
    torch.manual_seed(0)
    RECIPES["fp32"].set_matmul()
    if parameters["model"] == "toy":
        model = ToyModel(device=device.kind)
        inputs, targets = torch.randn(16, 8, device=device.kind), torch.arange(16, device=device.kind) % 5
    else:
        config = model_config(parameters["model"])
        model = TransformerLM(config, max_context=16, attention=ATTENTION, device=device.kind)
        inputs, targets = (torch.randint(config.vocab_size, (1, 16), device=device.kind) for _ in range(2))
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
        observed={"dtypes": [list(pair) for pair in dtypes.items()], "num_modules": len(list(model.modules()))},
    )


# ---- normalisation -------------------------------------------------------------------------------------------


def measure_normalisation(device: hardware.Device, parameters: dict) -> Measured:
    """Returns the error of a normalisation against fp64 on the same, already rounded, input.

    `relative_error` is over the rows whose results are finite; `rounding_error` that of the exact result rounded once
    to the output's dtype, which no implementation can beat.
    """
    norm, shape = parameters["norm"], (parameters["rows"], parameters["features"])
    offset, epsilon = NORM_SETTINGS[parameters["setting"]]
    dtype, statistics_name = DTYPES[parameters["input"]], parameters["statistics"]
    x = ((_random(*shape) + offset) * parameters["scale"]).to(dtype).to(device.kind)
    if not x.isfinite().all():
        raise Skip(f"the input itself overflows {parameters['input']}")
    exact, exact_square = normalise(x.to(_place(device)).double(), norm, epsilon, torch.float64)
    metrics: dict = {}
    if statistics_name == "library":
        function = F.layer_norm if norm == "layer_norm" else F.rms_norm
        result = function(x, shape[-1:], eps=epsilon)
    else:
        result, mean_square = normalise(x, norm, epsilon, DTYPES[statistics_name])
        statistics_name = dtype_name(mean_square.dtype)
        metrics |= {
            "overflowed_fraction": float((~mean_square.isfinite()).double().mean()),
            "vanished_fraction": float(((mean_square == 0).cpu() & (exact_square > 0).cpu()).double().mean()),
            "epsilon": float(torch.tensor(epsilon, dtype=mean_square.dtype)),
        }
    result, exact = result.cpu(), exact.cpu()
    finite = result.isfinite().all(-1)
    metrics |= {
        "nonfinite_fraction": float((~finite).double().mean()),
        "relative_error": relative_error(result[finite], exact[finite]) if finite.any() else None,
        "rounding_error": relative_error(exact.to(dtype), exact),
    }
    names = {
        "norm": norm,
        "setting": parameters["setting"],
        "input": dtype_name(x.dtype),
        "statistics": statistics_name,
    }
    return Measured(
        metrics=metrics,
        case={**names, "scale": parameters["scale"], "rows": x.shape[0], "features": x.shape[1]},
        observed={"output": dtype_name(result.dtype), "oracle": "fp64"},
    )


# ---- a matmul's epilogue --------------------------------------------------------------------------------------


def measure_epilogue(device: hardware.Device, parameters: dict) -> Measured:
    """Returns the error of GELU(x·wᵀ) in 16 bits against fp32 on the same rounded operands, by pre-activation.

    `fp32_error` is that of the fp32 result itself, against fp64.
    """
    dtype, form, epilogue = DTYPES[parameters["dtype"]], parameters["gelu"], parameters["epilogue"]
    rows, columns, depth = (parameters[name] for name in ("rows", "columns", "depth"))
    RECIPES["fp32"].set_matmul()
    x = _random(rows, depth).to(dtype).to(device.kind)
    w = (_random(columns, depth, seed=1) * PREACTIVATION_STD / math.sqrt(depth)).to(dtype).to(device.kind)
    gelu = functools.partial(F.gelu, approximate="none" if form == "erf" else "tanh")
    preactivation = F.linear(x.float(), w.float())
    reference = gelu(preactivation)
    exact = gelu(F.linear(x.to(_place(device)).double(), w.to(_place(device)).double()))
    if epilogue == "rounded":
        result = gelu(F.linear(x, w))
    elif epilogue == "carried":
        result = reference.to(dtype)
    else:
        if not hasattr(torch, "_addmm_activation"):
            raise Skip("this PyTorch has no _addmm_activation")
        result = torch._addmm_activation(x.new_zeros(columns), x, w.t(), use_gelu=True)
    place = preactivation.to(_place(device))
    norms = reference.to(place.device).double()
    difference = result.to(place.device).double() - norms
    samples: dict[str, list] = {"bin_low": [], "bin_high": [], "bin_error": [], "bin_elements": []}
    for low, high in itertools.pairwise(PREACTIVATION_EDGES):
        inside = (place >= low) & (place < high)
        if inside.any():
            samples["bin_low"].append(low)
            samples["bin_high"].append(high)
            samples["bin_error"].append(float(difference[inside].norm() / norms[inside].norm()))
            samples["bin_elements"].append(int(inside.sum()))
    return Measured(
        metrics={
            "relative_error": relative_error(result, reference),
            "largest_error": float(difference.abs().max()),
            "fp32_error": relative_error(reference, exact),
        },
        case={
            "dtype": dtype_name(result.dtype),
            "epilogue": epilogue,
            "gelu": form,
            "rows": result.shape[0],
            "columns": result.shape[1],
            "depth": w.shape[1],
        },
        observed={"product": dtype_name(x.dtype), "matmul_precision": torch.get_float32_matmul_precision()},
        samples=samples,
    )


# ---- steps ---------------------------------------------------------------------------------------------------


class PrecisionWorkload(Workload):
    """Notebook 01's workload in any of RECIPES: the same phases, timed in the same way."""

    def __init__(self, device: hardware.Device, parameters: dict):
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
        """Halves the loss scale until the gradients are finite, as the first training steps would.

        Raises AssertionError when they do not become so, or are not without a scale.
        """
        for _ in range(MAX_HALVINGS):
            self.model.zero_grad()
            self.forward_backward()
            if all(parameter.grad.isfinite().all() for parameter in self.model.parameters()):
                return
            if not self.scaler.is_enabled():
                break
            self.scaler.update(self.scaler.get_scale() / 2)
        raise AssertionError(
            f"gradients are not finite in {self.precision} at a loss scale of {self.scaler.get_scale()}"
        )

    def check_loss(self) -> float:
        """Returns the loss at initialisation; raises AssertionError where it is not near its closed form.

        The head's rows are N(0, 0.02²) and the normalised hidden state has d features of mean square 1, so logits have
        a variance of 0.0004·d, and the mean cross-entropy is ln V plus half of it.
        """
        with torch.no_grad():
            loss = float(self.forward())
        vocab_size, d_model = self.model.head.weight.shape
        expected = math.log(vocab_size) + 0.0004 * d_model / 2
        if not abs(loss / expected - 1) <= LARGEST_LOSS_DEVIATION:
            raise AssertionError(f"the loss is {loss:.4g} in {self.precision}, {expected:.4g} was expected")
        return loss


@contextlib.contextmanager
def _workload(device: hardware.Device, parameters: dict) -> Iterator[PrecisionWorkload]:
    workload = PrecisionWorkload(device, parameters)
    try:
        yield workload
    finally:
        del workload.model
        workload.__dict__.pop("optimizer", None)
        empty_cache(device)


def _measure_step(workload: PrecisionWorkload, case: Case, phase: str) -> Measured:
    """Returns one phase's time and peak memory, after its loss (forward) or its gradients have been looked at."""
    device = workload.device
    metrics: dict = {}
    if phase == "forward":
        metrics["loss"] = workload.check_loss()
    else:
        workload.settle()
    scale = workload.scaler.get_scale()
    workload.model.zero_grad()
    empty_cache(device)
    if device.kind == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with hardware.GpuMonitor(device.kind) as monitor:
        timing = workload.time_phase(phase, time_limit_s=case.time_limit_s)
    if device.kind == "cuda":
        metrics["peak_bytes"] = torch.cuda.max_memory_allocated()
    if phase == "train_step":
        if not all(parameter.isfinite().all() for parameter in workload.model.parameters()):
            raise AssertionError(f"training in {workload.precision} has made a parameter infinite or no number")
        # Each step whose gradients overflow is left out, and halves the scale.
        metrics["num_skipped_steps"] = round(math.log2(scale / workload.scaler.get_scale()))
    tokens = workload.tokens.numel()
    return Measured(
        metrics={
            **timing.metrics(),
            **metrics,
            "loss_scale": workload.scaler.get_scale(),
            "tokens_per_s": tokens / (timing.median_ms * 1e-3),
        },
        case=workload.described(),
        observed=workload.observed(),
        samples={"step_ms": list(timing.samples_ms)} if timing.n <= 20 else {},
        timer=timing.description(),
        telemetry=monitor.summary,
    )


# ---- what autocast issues beside the work ----------------------------------------------------------------------


class OperatorCounter(TorchDispatchMode):
    """Counts the operators that reach the device below autocast, and among them the casts to another dtype.

    Views are left out, since they start no kernel.
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
            tensors = [tensor for tensor in tree_leaves(args) if isinstance(tensor, Tensor)]
            source = tensors[-1]
            if source.dtype != result.dtype:
                self.num_casts += 1
                self.cast_bytes += source.nbytes + result.nbytes
        return result


def _is_view(function) -> bool:
    aliases = [value.alias_info for value in function._schema.returns]
    is_alias = any(alias is not None and not alias.is_write for alias in aliases)
    return is_alias or function is torch.ops.aten._unsafe_view.default


def count_operators(workload: PrecisionWorkload) -> dict[str, OperatorCounter]:
    """Returns the operators of a forward pass, a backward pass and an optimizer step, after one step that warms up."""
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


def _counted(workload: PrecisionWorkload, counter: OperatorCounter) -> Measured:
    return Measured(
        metrics={
            "num_operators": counter.num_operators,
            "num_casts": counter.num_casts,
            "cast_bytes": counter.cast_bytes,
        },
        case=workload.described(),
        observed=workload.observed(),
    )


# ---- training --------------------------------------------------------------------------------------------------

NUM_LOOKS = 10
"""How often during a training run the gradients are looked at."""

FP16_VANISHES = 2.0**-25
"""Half of fp16's smallest number: what is not larger rounds to zero."""

FP16_SUBNORMAL = 2.0**-14
"""fp16's smallest number with all its digits."""

LAST_STEPS = 0.1
"""The final loss is the mean over this share of the steps."""


def successor_sequences(num_tokens: int, num_steps: int, batch: int, context: int) -> Tensor:
    """Returns (steps, batch, context + 1) token ids in which each is followed by its successor in one permutation."""
    generator = torch.Generator().manual_seed(0)
    successor = torch.randperm(num_tokens, generator=generator)
    columns = [torch.randint(num_tokens, (num_steps, batch), generator=generator)]
    for _ in range(context):
        columns.append(successor[columns[-1]])
    return torch.stack(columns, dim=-1)


@dataclass
class GradientLook:
    """Shares of the gradients' elements at one step; thresholds are those of gradients without a loss scale."""

    zero_weight: float
    zero_logit: float
    vanishing_weight: float
    vanishing_logit: float
    subnormal_weight: float
    norm: float


class Training:
    """A run of the synthetic task in one precision: the live objects, and what is read from them."""

    def __init__(self, device: hardware.Device, parameters: dict):
        self.device, self.parameters = device, parameters
        self.recipe = RECIPES[parameters["precision"]]
        self.recipe.set_matmul()
        torch.manual_seed(0)
        config = replace(model_config(parameters["size"]), vocab_size=parameters["vocab_size"])
        self.model = TransformerLM(
            config, max_context=parameters["context"], attention=ATTENTION, device=device.kind
        ).to(self.recipe.parameters)
        self.scaler = self.recipe.scaler(device.kind)
        try:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=parameters["learning_rate"], fused=True)
        except RuntimeError:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=parameters["learning_rate"])
        shape = (parameters["num_steps"], parameters["batch"], parameters["context"])
        self.data = successor_sequences(parameters["num_tokens"], *shape).to(device.kind)
        self.initial = [parameter.detach().clone() for parameter in self.model.parameters()]

    @property
    def weights(self) -> list[Tensor]:
        """The matrices but the embedding's, whose rows of unseen tokens have no gradient."""
        return [p for p in self.model.parameters() if p.dim() == 2 and p is not self.model.embedding.weight]

    def run(self) -> Measured:
        """Trains and returns losses, gradient shares and what of the parameters never moved."""
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
                looks[step] = self._look(logits.grad, scale)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            num_skipped += self.scaler.get_scale() < scale
            losses.append(loss.detach())
        return self._measured([float(loss) for loss in losses], looks, num_skipped)

    def _look(self, logit_grad: Tensor, scale: float) -> GradientLook:
        gradients = [weight.grad for weight in self.weights]

        def share(tensors: Sequence[Tensor], limit: float) -> float:
            small = sum(float((tensor.abs() <= limit * scale).sum()) for tensor in tensors)
            return small / sum(tensor.numel() for tensor in tensors)

        squares = sum(float((gradient.double() / scale).square().sum()) for gradient in gradients)
        return GradientLook(
            zero_weight=share(gradients, 0.0),
            zero_logit=share([logit_grad], 0.0),
            vanishing_weight=share(gradients, FP16_VANISHES),
            vanishing_logit=share([logit_grad], FP16_VANISHES),
            subnormal_weight=share(gradients, FP16_SUBNORMAL),
            norm=math.sqrt(squares),
        )

    def _measured(self, losses: list[float], looks: dict[int, GradientLook], num_skipped: int) -> Measured:
        def mean(name: str) -> float:
            return statistics.fmean(getattr(look, name) for look in looks.values())

        last = losses[-max(1, round(LAST_STEPS * len(losses))) :]
        is_finite = all(map(math.isfinite, losses))
        sampled = list(looks.values())
        return Measured(
            metrics={
                "first_loss": losses[0],
                "final_loss": statistics.fmean(last) if all(map(math.isfinite, last)) else None,
                "num_nonfinite_losses": sum(not math.isfinite(loss) for loss in losses),
                "num_skipped_steps": num_skipped,
                "final_loss_scale": self.scaler.get_scale(),
                "zero_weight_gradients": mean("zero_weight"),
                "zero_logit_gradients": mean("zero_logit"),
                "vanishing_weight_gradients": mean("vanishing_weight"),
                "vanishing_logit_gradients": mean("vanishing_logit"),
                "subnormal_weight_gradients": mean("subnormal_weight"),
                **self._unmoved(),
            },
            case=self.described(),
            observed={"optimizer": type(self.optimizer).__name__, "loss_scale": self.scaler.is_enabled()},
            samples={
                "loss": [loss if math.isfinite(loss) else None for loss in losses],
                "look_step": list(looks),
                "zero_weight_gradients": [look.zero_weight for look in sampled],
                "zero_logit_gradients": [look.zero_logit for look in sampled],
                "gradient_norm": [look.norm if math.isfinite(look.norm) else None for look in sampled],
            }
            | ({} if is_finite else {"nonfinite_steps": [i for i, x in enumerate(losses) if not math.isfinite(x)]}),
        )

    def _unmoved(self) -> dict[str, float]:
        """Returns the shares of matrix elements and of norm gains that are still the numbers that they began as."""
        pairs = list(zip(self.model.parameters(), self.initial, strict=True))
        embedding = self.model.embedding.weight
        groups = {
            "unmoved_weights": [pair for pair in pairs if pair[0].dim() == 2 and pair[0] is not embedding],
            "unmoved_gains": [pair for pair in pairs if pair[0].dim() == 1],
        }
        return {
            name: sum(float((now == before).sum()) for now, before in group) / sum(now.numel() for now, _ in group)
            for name, group in groups.items()
        }

    def described(self) -> dict:
        """Returns the case as read back from the live objects."""
        num_steps, batch, length = self.data.shape
        config = self.model.config
        return {
            "precision": self.live,
            "size": config.name,
            "vocab_size": self.model.head.weight.shape[0],
            "num_tokens": self.parameters["num_tokens"],
            "context": length - 1,
            "batch": batch,
            "num_steps": num_steps,
            "learning_rate": self.optimizer.param_groups[0]["lr"],
        }


def measure_training(device: hardware.Device, parameters: dict) -> Measured:
    """Returns the losses and gradients of the synthetic task in one precision."""
    try:
        return Training(device, parameters).run()
    finally:
        empty_cache(device)
