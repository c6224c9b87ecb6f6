"""Will a training step fit, and how long will it take, before it is run.

Memory is the closed form of `accounting`, with what CUDA's allocator and libraries add. Time is a
model of kernels: FLOPs over the measured sustained rate of the matrix products, bytes over that of
a copy, and a constant per layer, each with a coefficient that is fitted to the device times of all
records. How far it errs on records that it was not fitted to stands beside every prediction.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from labkit import accounting
from labkit.configs import (
    BATCH_SIZE,
    FIGURES,
    PRECISIONS,
    SIZES,
    THIS_DEVICE,
    ModelConfig,
    RequestError,
    model_config,
)
from labkit.device import datasheet, detect
from labkit.records import measured_devices
from labkit.report.chapter import Chapters, chapters_of
from labkit.report.frame import ok_rows
from labkit.report.text import gib, number, percent

MIB = 2**20

WORKSPACE_BYTES = 65 * MIB
"""What cuBLAS keeps on Hopper: two workspaces of 32.5 MiB, measured as what a small model's forward
pass takes beyond its tensors.
"""

MORE_WORKSPACE_BYTES = 33 * MIB
"""Of bf16, and of a backward pass, which runs in a thread of its own."""

PLANS = ("none", "16", "8", "4", "2", "1")
"""Recomputation that is tried where a step does not fit, the cheapest first."""


@dataclass(frozen=True)
class Setting:
    """A training step of a model with AdamW.

    Attributes:
        precision: "fp32", "tf32" or "bf16" (autocast); attention: "eager", or "fused", which keeps
            no scores; way: one of STEP_WAYS; recompute: as `accounting.checkpoint_plan` takes it.
        num_gpus, gpu_way: over how many GPUs, and how, one of GPU_WAYS; the batch is a rank's.
    """

    config: ModelConfig
    batch: int = 4
    context: int = 512
    precision: str = "bf16"
    attention: str = "fused"
    way: str = "eager"
    recompute: str = "none"
    num_gpus: int = 1
    gpu_way: str = "ddp"

    @property
    def tokens(self) -> int:
        return self.batch * self.context


class Roofs(NamedTuple):
    """Sustained rates of a device: FLOP/s by precision, B/s of a copy; its memory in bytes."""

    flops: Mapping[str, float]
    copy: float
    memory_bytes: float | None
    source: str


# ---- models --------------------------------------------------------------------------------------


def read_config(path: Path) -> ModelConfig:
    """Returns the model of this laboratory's kind with the width, depth, heads, vocabulary and
    parameters of a block of a transformers config.json.

    Grouped heads and an MLP of two matrices become a narrower or wider feed-forward layer of as
    many parameters. Raises RequestError for a file or an architecture that cannot be read so.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RequestError(f"{path}: cannot be read as a config.json ({error})") from None
    content = content.get("text_config", content.get("vision_config", content))

    def first(*names: str, default: Any = None) -> Any:
        value = next((content[name] for name in names if content.get(name) is not None), default)
        if value is None:
            known = content.get("model_type", "unknown")
            raise RequestError(f"{path}: architecture {known!r} has no {' or '.join(names)}")
        return value

    width = first("hidden_size", "n_embd")
    num_heads = first("num_attention_heads", "n_head")
    head_dim = first("head_dim", default=width // num_heads)
    hidden = first("intermediate_size", "n_inner", default=4 * width)
    key_heads = first("num_key_value_heads", default=num_heads)
    is_gated = content.get("hidden_act") in ("silu", "swiglu")
    attention = 2 * width * head_dim * (num_heads + key_heads)
    parameters = attention + (3 if is_gated else 2) * width * hidden
    return ModelConfig(
        name=str(content.get("model_type", path.stem)),
        edition="config.json",
        d_model=width,
        d_ff=max(1, round((parameters - 4 * width**2) / (3 * width))),
        num_layers=first("num_hidden_layers", "n_layer"),
        num_heads=num_heads,
        vocab_size=first("vocab_size", default=1),
    )


# ---- memory --------------------------------------------------------------------------------------


def _rounding(num_bytes: int) -> float:
    """Returns what CUDA's caching allocator hands out beyond `num_bytes`.

    It takes 20 MiB for a tensor below 10 MiB and multiples of 2 MiB above, and leaves a rest of at
    most 1 MiB with the tensor. Source: PyTorch, c10/cuda/CUDACachingAllocator.cpp.
    """
    if num_bytes <= MIB:
        return 0
    num_tensors = max(1, 20 * MIB // num_bytes) if num_bytes < 10 * MIB else 1
    segment = 20 * MIB if num_bytes < 10 * MIB else -(-num_bytes // (2 * MIB)) * 2 * MIB
    rest = segment - num_tensors * num_bytes
    return rest / num_tensors if rest <= MIB else 0


def memory(setting: Setting) -> dict[str, float]:
    """Returns bytes at the peak of a training step: weights, moments, gradients and activations,
    libraries, and the total.

    Raises RequestError for a setting that does not exist.
    """
    config = setting.config
    try:
        plan = accounting.checkpoint_plan(setting.recompute, config.num_layers)
        moments = accounting.checkpoint_moments(
            config,
            setting.batch,
            setting.context,
            plan,
            precision=setting.precision,
            attention=setting.attention,
            device_kind="cuda",
        )
    except ValueError as error:
        raise RequestError(str(error)) from None
    weights = accounting.parameter_bytes(config)
    optimizer = accounting.optimizer_state_bytes(config)
    rest = max(moments.values()) - weights - optimizer
    d, f = config.d_model, config.d_ff
    matrices = {4 * d * d: 4 * config.num_layers, 4 * d * f: 3 * config.num_layers}
    matrices[4 * config.vocab_size * d] = matrices.get(4 * config.vocab_size * d, 0) + 2
    lost = 3 * sum(number * _rounding(size) for size, number in matrices.items())
    share = {"ddp": 1, "zero1": 1, "fsdp": setting.num_gpus}[setting.gpu_way]
    optimizer_share = setting.num_gpus if setting.gpu_way != "ddp" else 1
    if share > 1:
        # Two blocks are gathered at a time; gradients are shared out as they are made.
        blocks = 2 * accounting.block_gradient_bytes(config)
        rest = max(blocks, rest - weights * (1 - 1 / share)) + blocks
    parts = {
        "weights": weights / share,
        "AdamW's moments": optimizer / optimizer_share,
        "gradients and activations": rest,
        "libraries and allocator": lost + WORKSPACE_BYTES + MORE_WORKSPACE_BYTES,
    }
    return parts | {"in all": sum(parts.values())}


def too_large(case: Mapping[str, Any], phases: Sequence[str], limit: float) -> bool:
    """Returns whether a case of the chapters holds a training step that needs more than `limit`
    bytes.
    """
    is_step = "train_step" in phases or "graph_step" in phases
    if not is_step or case.get("size") not in SIZES or case.get("precision") not in PRECISIONS:
        return False
    attention = "eager" if case.get("attention", "eager") in ("eager", "course") else "fused"
    config = model_config(case["size"])
    known = case.get("batch", BATCH_SIZE), case["context"], case["precision"], attention
    setting = Setting(config, *known, recompute=str(case.get("plan", "none")))
    return memory(setting)["in all"] > limit


def largest(setting: Setting, limit: float, name: str, step: int) -> int:
    """Returns the largest multiple of `step` of a field, "batch" or "context", with which a step
    fits into `limit` bytes; 0 where none does.
    """

    def fits(number: int) -> bool:
        return memory(replace(setting, **{name: number * step}))["in all"] <= limit

    high = 1
    while fits(high) and high < 2**20:
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * step


def cheapest_recomputation(setting: Setting, limit: float) -> str | None:
    """Returns the first of PLANS with which a step fits, None where none does."""
    plans = [plan for plan in PLANS if plan == "none" or int(plan) <= setting.config.num_layers]
    fitting = (
        plan for plan in plans if memory(replace(setting, recompute=plan))["in all"] <= limit
    )
    return next(fitting, None)


# ---- time ----------------------------------------------------------------------------------------

PARTS = {
    "matrix products": ("products", "products, narrow"),
    "attention": ("eager attention", "fused attention", "scores"),
    "elementwise": ("residual", "feed-forward", "logits", "casts"),
    "AdamW": ("optimizer",),
    "kernels' begin and end": ("layers",),
}
"""The parts of a predicted time, and the terms of each."""

BOUND = dict(zip(PARTS, ("matmul", "matmul or memory", "memory", "memory", "launch"), strict=True))


def terms(setting: Setting, roofs: Roofs) -> dict[str, float]:
    """Returns the terms of the model of kernels, in seconds where not a number."""
    config = setting.config
    d, f, layers, tokens = config.d_model, config.d_ff, config.num_layers, setting.tokens
    flops_rate = roofs.flops[setting.precision]
    element = 2 if setting.precision == "bf16" else 4
    is_eager = setting.attention == "eager"
    plan = accounting.checkpoint_plan(setting.recompute, layers)
    passes = 2 + accounting.checkpoint_forwards(layers, plan)
    products = 2 * passes * accounting.num_matmul_parameters(config) * tokens / flops_rate
    attention = passes * 4 * tokens * setting.context * d * layers / flops_rate
    scores = layers * setting.batch * config.num_heads * setting.context**2 * element
    parameters = accounting.num_parameters(config)
    again = passes / 3
    return {
        "products": products,
        # A matrix product of a narrow model reaches less of the rate.
        "products, narrow": products * 1000 / d,
        "eager attention": attention if is_eager else 0.0,
        "fused attention": 0.0 if is_eager else attention / 2,
        "scores": again * scores / roofs.copy if is_eager else 0.0,
        "residual": again * layers * tokens * d * 4 / roofs.copy,
        "feed-forward": again * layers * tokens * f * element / roofs.copy,
        "logits": tokens * config.vocab_size * 4 / roofs.copy,
        "casts": 4 * parameters / roofs.copy if setting.precision == "bf16" else 0.0,
        "optimizer": 28 * parameters / roofs.copy,
        "layers": again * layers * 1e-5,
    }


class Sample(NamedTuple):
    """A measured step: what it was, on which roofs, its device time in seconds."""

    setting: Setting
    roofs: Roofs
    seconds: float
    device: str


def measured_roofs(chapters: Chapters) -> Roofs | None:
    """Returns the roofs that a device's chapter 01 measured, None without them."""
    if "01_benchmarking" not in chapters:
        return None
    chapter = chapters["01_benchmarking"]
    rows = ok_rows(chapter.records("ceilings")).to_dict("records")
    flops = {
        row["precision"]: row["sustained_tflops"] * 1e12 for row in rows if row["kind"] == "gemm"
    }
    copy = [row["sustained_gb_per_s"] * 1e9 for row in rows if row["kind"] == "copy"]
    memory_bytes = (chapter.environment.get("gpu") or {}).get("memory_bytes")
    return Roofs(flops, copy[0], memory_bytes, "measured") if flops and copy else None


def samples(chapters: Chapters, device: str) -> list[Sample]:
    """Returns the training steps whose device time is recorded, as sums of kernels in chapter 02 or
    as graphs in chapter 01.
    """
    roofs = measured_roofs(chapters)
    if roofs is None or roofs.memory_bytes is None:
        return []
    found = []
    sources = {
        ("01_benchmarking", "execution", "graph_step"): "median_ms",
        ("02_nsys_analysis", "profiles", "train_step"): "step_kernel_ms",
    }
    for (name, section, phase), value in sources.items():
        if name not in chapters:
            continue
        for row in ok_rows(chapters[name].records(section), phase=phase).to_dict("records"):
            way = _way(row)
            if way and row["precision"] in roofs.flops and row.get(value):
                setting = Setting(
                    model_config(row["size"]),
                    row["batch"],
                    row["context"],
                    row["precision"],
                    "eager" if row["attention"] == "eager" else "fused",
                    way,
                )
                found.append(Sample(setting, roofs, row[value] / 1e3, device))
    return found


def _way(row: Mapping[str, Any]) -> str:
    if row.get("impl") == "fused":
        return "ours"
    # Our attention computes fp32 by other products than the roof's.
    if row["attention"] == "auto" and row["precision"] != "bf16":
        return ""
    return {"none": "eager", "regional": "compiled"}.get(row["compile"], "")


def fitted(measured: Sequence[Sample]) -> dict[str, float]:
    """Returns coefficients of `terms`, none below 0, with the least squares of relative errors."""
    rows = pd.DataFrame([terms(one.setting, one.roofs) for one in measured])
    relative = rows.div([one.seconds for one in measured], axis=0)
    names = [name for name in rows if rows[name].any()]
    while True:
        matrix = relative[names].to_numpy()
        values = np.linalg.lstsq(matrix, np.ones(len(matrix)), rcond=None)[0]
        if (values >= 0).all():
            return dict.fromkeys(rows, 0.0) | dict(zip(names, values.tolist(), strict=True))
        names.pop(int(np.argmin(values * np.linalg.norm(matrix, axis=0))))


def predicted(coefficients: Mapping[str, float], setting: Setting, roofs: Roofs) -> dict:
    """Returns milliseconds by part, and in all."""
    values = terms(setting, roofs)
    parts = {
        part: 1e3 * sum(coefficients[name] * values[name] for name in names)
        for part, names in PARTS.items()
    }
    return parts | {"in all": sum(parts.values())}


LEAST_SAMPLES = 20
"""Steps below which the parts of a fitted time mean nothing."""

HELD_OUT: dict[str, Callable[[Sample], Any]] = {
    "size": lambda one: one.setting.config.name,
    "context": lambda one: one.setting.context,
    "device": lambda one: one.device,
}


def errors(measured: Sequence[Sample], held_out: str) -> pd.DataFrame:
    """Returns the relative error of each step when all of its size, context or device are left out
    of the fit: error, case.
    """
    key = HELD_OUT[held_out]
    rows = []
    for value in dict.fromkeys(map(key, measured)):
        rest = [one for one in measured if key(one) != value]
        left = [one for one in measured if key(one) == value]
        if len(rest) < len(PARTS):
            continue
        coefficients = fitted(rest)
        for one in left:
            time = predicted(coefficients, one.setting, one.roofs)["in all"] / 1e3
            setting = one.setting
            case = f"{setting.config.name}, {setting.context}, {setting.precision}, {one.device}"
            rows.append({"error": time / one.seconds - 1, "case": case})
    return pd.DataFrame(rows, columns=["error", "case"])


def _measured_gpus(root: Path) -> Iterator[tuple[str, Chapters, Roofs]]:
    """Yields the GPUs whose roofs are measured: slug, chapters, roofs."""
    for device in measured_devices(root):
        chapters = chapters_of(device, root)
        roofs = measured_roofs(chapters)
        if roofs is not None and roofs.memory_bytes:
            yield device, chapters, roofs


def all_samples(root: Path | None = None) -> list[Sample]:
    """Returns the samples of every measured GPU."""
    gpus = _measured_gpus(root or FIGURES)
    return [one for device, chapters, _ in gpus for one in samples(chapters, device)]


def of_way(measured: Iterable[Sample], way: str) -> list[Sample]:
    return [one for one in measured if one.setting.way == way]


# ---- devices, and what is printed ----------------------------------------------------------------


def roofs_of(device: str, root: Path | None = None) -> Roofs:
    """Returns the measured roofs of a slug or of "this", else those of a datasheet times the share
    that the measured GPUs reach of theirs.

    Raises RequestError for a device that was not measured and has no datasheet.
    """
    root = root or FIGURES
    name = device
    if device == THIS_DEVICE:
        found = detect()
        device = found.slug
        name = found.name
    if device in measured_devices(root):
        roofs = measured_roofs(chapters_of(device, root))
        if roofs is not None and roofs.memory_bytes:
            return roofs
    sheet = datasheet(name)
    if sheet is None:
        known = ", ".join(measured_devices(root)) or "no device"
        raise RequestError(
            f"no roofs of {device!r}: chapter 01 did not measure a GPU of that name (measured: "
            f"{known}), and there is no datasheet of it, as of 'NVIDIA A100-SXM4-80GB' or 'RTX "
            "4090'"
        )
    reached = _reached(root)
    words = ", ".join(f"{name} {percent(share)}" for name, share in reached.items())
    source = f"{sheet.source}, times what measured GPUs reach of theirs ({words})"
    if not reached:
        reached = dict.fromkeys(("copy", *PRECISIONS), 1.0)
        source = f"{sheet.source}, its peaks, for no measured GPU says what is reached of them"
    flops = {
        precision: share * sheet.tflops(precision) * 1e12
        for precision, share in reached.items()
        if precision != "copy" and sheet.tflops(precision)
    }
    copy = reached["copy"] * sheet.memory_gb_per_s * 1e9
    return Roofs(flops, copy, sheet.memory_gb * 1e9, source)


def _reached(root: Path) -> dict[str, float]:
    """Returns the median share of their datasheets that the measured GPUs sustain."""
    shares: dict[str, list[float]] = {}
    for _, chapters, roofs in _measured_gpus(root):
        sheet = datasheet(next(iter(chapters.values())).device_name)
        if sheet:
            shares.setdefault("copy", []).append(roofs.copy / sheet.memory_gb_per_s / 1e9)
            for precision, rate in roofs.flops.items():
                shares.setdefault(precision, []).append(rate / sheet.tflops(precision) / 1e12)
    return {name: float(np.median(values)) for name, values in shares.items()}


def lines(
    setting: Setting, roofs: Roofs, measured: Sequence[Sample], price: float = 0
) -> list[str]:
    """Returns what `labkit plan` prints, a line a statement.

    Args:
        measured: the samples of all devices; price: of an hour of one device, for the cost of a
            million tokens.
    """
    parts = memory(setting)
    limit = roofs.memory_bytes or math.inf
    shown = [f"{part} {gib(num_bytes)}" for part, num_bytes in parts.items() if part != "in all"]
    fits = parts["in all"] <= limit
    verdict = "fits" if fits else "does not fit"
    lines = [
        f"Memory: {gib(parts['in all'])} of {gib(limit)} GiB, {verdict} ({', '.join(shown)}).",
        f"Largest that fits: context {largest(setting, limit, 'context', 64):,} at batch "
        f"{setting.batch}, batch {largest(setting, limit, 'batch', 1):,} at context "
        f"{setting.context:,}.",
    ]
    plan = cheapest_recomputation(setting, limit)
    if not fits:
        words = f"recomputing in groups of {plan} blocks" if plan else "no recomputation makes it"
        lines.append(f"The cheapest way to fit: {words}.")
    if setting.precision not in roofs.flops:
        return [*lines, f"Time: no rate of {setting.precision} is known."]
    alike = of_way(measured, setting.way)
    if not alike:
        where = "`labkit run 01 02` on a GPU records some"
        return [*lines, f"Time: no step of this way is recorded to predict it from; {where}."]
    times = predicted(fitted(alike), setting, roofs)
    rate = setting.tokens / times["in all"] * 1e3
    bounds = (f"{part} {number(times[part])} ({BOUND[part]})" for part in PARTS)
    few = len(alike) < LEAST_SAMPLES
    words = "too few steps of this way are recorded to tell its parts" if few else ", ".join(bounds)
    lines.append(f"Device time of a step: {number(times['in all'])} ms; {words}.")
    lines.append(f"{number(rate)} tokens/s a GPU.")
    if setting.num_gpus > 1:
        lines.append(_communication(setting, times["in all"]))
    if price:
        cost = price / 3600 / rate * 1e6
        lines.append(f"{number(cost)} a million tokens at {number(price)} an hour.")
    for held_out in HELD_OUT:
        found = errors(alike, held_out)
        if len(found):
            size = found["error"].abs()
            worst = found.loc[size.idxmax()]
            lines.append(
                f"Error with its {held_out} held out, {len(found)} steps: median "
                f"{percent(size.median())}, 95 % within {percent(size.quantile(0.95))}, worst "
                f"{percent(worst['error'])} ({worst['case']})."
            )
    return [*lines, f"Roofs: {roofs.source}."]


LINK_BYTES_PER_S = 300e9
"""Bandwidth of a ring over NVLink on Hopper, as chapter 07 measures it for large messages."""


def _communication(setting: Setting, step_ms: float) -> str:
    gradients = accounting.parameter_bytes(setting.config)
    size = setting.num_gpus
    operations = {
        "ddp": ["all_reduce"],
        "zero1": ["all_reduce", "all_gather"],
        "fsdp": ["all_gather", "all_gather", "reduce_scatter"],
    }[setting.gpu_way]
    seconds = sum(
        accounting.ring_seconds(operation, gradients, size, LINK_BYTES_PER_S)
        for operation in operations
    )
    time = number(1e3 * seconds)
    return (
        f"Communication of {setting.gpu_way} over {size} GPUs: {time} ms a step at "
        f"{LINK_BYTES_PER_S / 1e9:.0f} GB/s, hidden at best, else added to {number(step_ms)} ms."
    )
