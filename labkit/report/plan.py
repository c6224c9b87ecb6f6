"""Will a training step fit, and how long will it take, before it is run.

Memory is the closed form of `accounting`, with what CUDA's allocator and libraries add. Time is a
model of kernels: FLOPs over the measured sustained rate of the matrix products, bytes over that of
a copy, and a constant per layer, each with a coefficient that is fitted to the device times of all
records. How far it errs on records that it was not fitted to stands beside every prediction.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from labkit.device import Datasheet, datasheet, detect
from labkit.records import measured_devices
from labkit.report.chapter import Chapter, Chapters
from labkit.report.facts import spread
from labkit.report.frame import ok_rows, select, usable
from labkit.report.text import gib, number, percent

MIB = 2**20

WORKSPACE_BYTES = 65 * MIB
"""What cuBLAS keeps on Hopper: two workspaces of 32.5 MiB, measured as what a small model's forward
pass takes beyond its tensors.
"""

MORE_WORKSPACE_BYTES = 33 * MIB
"""Of bf16, and of a backward pass, which runs in a thread of its own."""

CHAPTERS = ("01_benchmarking", "02_nsys_analysis", "04_memory")
"""Whose records a plan is fitted to and held against."""

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
    """Returns the model of a transformers config.json; the norms and products are this
    laboratory's.

    A vision encoder has no vocabulary; its patch embedding and pooling are not counted. Raises
    RequestError for a file or an architecture that cannot be read so.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RequestError(f"{path}: cannot be read as a config.json ({error})") from None
    if not isinstance(content, dict):
        raise RequestError(f"{path}: holds no object, as a config.json does")
    parts = [name for name in ("text_config", "vision_config") if name in content]
    if len(parts) > 1:
        raise RequestError(
            f"{path}: holds two models; write its {parts[0]} or its {parts[1]} into a file"
        )
    content = content.get(parts[0], content) if parts else content
    kind = str(content.get("model_type", "unknown"))

    def first(*names: str, default: Any = None) -> Any:
        value = next((content[name] for name in names if content.get(name) is not None), default)
        if not isinstance(value, int) or value < 1:
            raise RequestError(
                f"{path}: architecture {kind!r} has no {' or '.join(names)}; accepted: dense "
                "decoders and vision encoders, as of llama, qwen3, gpt2, siglip_vision_model"
            )
        return value

    experts = [name for name in content if "num_experts" in name or "_experts" in name]
    if experts:
        raise RequestError(
            f"{path}: architecture {kind!r} has {experts[0]}; accepted: models without experts"
        )
    width = first("hidden_size", "n_embd")
    num_heads = first("num_attention_heads", "n_head")
    is_vision = "vision" in kind or "image_size" in content
    return ModelConfig(
        name=kind,
        edition="config.json",
        d_model=width,
        d_ff=first("intermediate_size", "n_inner", default=4 * width),
        num_layers=first("num_hidden_layers", "n_layer"),
        num_heads=num_heads,
        vocab_size=0 if is_vision else first("vocab_size"),
        head_dim=content.get("head_dim") or 0,
        num_key_heads=first("num_key_value_heads", default=num_heads),
        is_gated=content.get("hidden_act") in ("silu", "swiglu") or kind.startswith("gemma"),
        # transformers writes it only where it is not its default.
        is_tied=content.get("tie_word_embeddings", True),
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
            is_compiled=setting.way != "eager",
            shards=setting.num_gpus if setting.gpu_way == "fsdp" else 1,
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
    # Gradients are sent from buckets, which DDP keeps beside them twice, as chapter 07 measures it.
    num_buckets = {"ddp": 2, "zero1": 1, "fsdp": 0}[setting.gpu_way] if setting.num_gpus > 1 else 0
    if share > 1:
        # Two blocks, or the head and a block of its size, are gathered at a time.
        rest += 2 * max(accounting.block_gradient_bytes(config), 4 * config.vocab_size * d)
    parts = {
        "weights": weights / share,
        "AdamW's moments": optimizer / optimizer_share,
        "gradients and activations": rest,
        "buckets": num_buckets * weights,
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
    "matrix products": ("products",),
    "fused attention": ("attention",),
    "elementwise and scores": ("scores", "residual"),
    "AdamW": ("optimizer",),
    "kernels' begin and end": ("layers",),
}
"""The parts of a predicted time, and the terms of each. More terms, as of logits and casts, fit no
better what they were not fitted to.
"""

OF_A_WAY = ("elementwise and scores", "AdamW", "kernels' begin and end")
"""The parts that a way of running the step changes; the products stay the same."""

BOUND = dict(zip(PARTS, ("matmul", "matmul or memory", "memory", "memory", "launch"), strict=True))


def terms(setting: Setting, roofs: Roofs) -> dict[str, float]:
    """Returns the terms of the model of kernels, in seconds where not a number."""
    config = setting.config
    d, layers, tokens = config.d_model, config.num_layers, setting.tokens
    flops_rate = roofs.flops[setting.precision]
    element = 2 if setting.precision == "bf16" else 4
    is_eager = setting.attention == "eager"
    plan = accounting.checkpoint_plan(setting.recompute, layers)
    passes = 2 + accounting.checkpoint_forwards(layers, plan)
    again = passes / 3
    # A fused kernel leaves out what a causal mask hides; an encoder has none.
    pairs = setting.context / 2 if config.vocab_size else setting.context
    attention = 4 * tokens * pairs * config.attention_widths[0] * layers
    scores = layers * setting.batch * config.num_heads * setting.context**2 * element
    # Of the parameters a rank updates its share.
    share = setting.num_gpus if setting.gpu_way != "ddp" else 1
    updated = accounting.num_parameters(config) / share
    return {
        "products": 2 * passes * accounting.num_matmul_parameters(config) * tokens / flops_rate,
        "attention": 0.0 if is_eager else passes * attention / flops_rate,
        "scores": again * scores / roofs.copy if is_eager else 0.0,
        "residual": again * layers * tokens * d * 4 / roofs.copy,
        "optimizer": 28 * updated / roofs.copy,
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
            if _way(row) and row["precision"] in roofs.flops and row.get(value):
                found.append(Sample(_setting(row), roofs, row[value] / 1e3, device))
    return found


def _way(row: Mapping[str, Any]) -> str:
    if row.get("impl") == "fused":
        return "ours"
    # Our attention computes fp32 by other products than the roof's.
    if row["attention"] == "auto" and row["precision"] != "bf16":
        return ""
    # Chapter 04 compiles no step and says nothing of it.
    compiled = row.get("compile")
    ways = {"none": "eager", "regional": "compiled"}
    return ways.get(compiled, "") if isinstance(compiled, str) else "eager"


def _setting(row: Mapping[str, Any]) -> Setting:
    return Setting(
        model_config(row["size"]),
        row["batch"],
        row["context"],
        row["precision"],
        "eager" if row["attention"] == "eager" else "fused",
        _way(row),
        row["plan"] if isinstance(row.get("plan"), str) else "none",
    )


def memory_errors(chapters: Chapters) -> pd.DataFrame:
    """Returns the relative error of `memory` of each recorded step."""
    sections = {"01_benchmarking": ("steps", "execution"), "04_memory": ("peaks", "checkpointing")}
    rows = []
    for name, names in sections.items():
        if name not in chapters:
            continue
        steps = usable(select(chapters[name].records(*names), phase="train_step"), "peak_bytes")
        for row in steps.to_dict("records"):
            if _way(row) and row["precision"] in PRECISIONS:
                setting = _setting(row)
                peak = row["peak_bytes"]
                error = memory(setting)["in all"] / peak - 1
                rows.append(_row(setting, error, peak / 2**30, chapters[name].device))
    return pd.DataFrame(rows, columns=COLUMNS)


def _row(setting: Setting, error: float, measured: float, device: str) -> dict[str, Any]:
    case = f"{setting.config.name}, {setting.context:,}, {setting.precision}"
    row = {"error": error, "measured": measured, "way": setting.way}
    return row | {"case": case, "device": device}


COLUMNS = ("error", "measured", "way", "case", "device")
"""Of what `memory_errors` and `errors` return: the relative error, GiB or ms."""


def fitted(measured: Iterable[Sample], way: str = "eager") -> dict[str, float]:
    """Returns coefficients of `terms` for a way, none below 0.

    Those of "eager", of which most steps are recorded, have the least squares of relative errors;
    of another way the parts OF_A_WAY are theirs times a factor.
    """
    measured = list(measured)
    eager = of_way(measured, "eager")
    rows = pd.DataFrame([terms(one.setting, one.roofs) for one in eager])
    seconds = np.array([one.seconds for one in eager])
    coefficients = _least_squares(rows.div(seconds, axis=0), np.ones(len(eager)))
    if way == "eager":
        return coefficients
    alike = of_way(measured, way)
    parts = pd.DataFrame([predicted(coefficients, one.setting, one.roofs) for one in alike])
    parts = parts.div([1e3 * one.seconds for one in alike], axis=0)
    own = parts[list(OF_A_WAY)]
    factors = _least_squares(own, 1 - (parts["in all"] - own.sum(axis=1)).to_numpy())
    return {
        name: coefficients[name] * factors.get(part, 1.0)
        for part, names in PARTS.items()
        for name in names
    }


def _least_squares(rows: pd.DataFrame, target: np.ndarray) -> dict[str, float]:
    """Returns a coefficient for each column, 0 in place of one below."""
    names = [name for name in rows if rows[name].any()]
    while True:
        matrix = rows[names].to_numpy()
        values = np.linalg.lstsq(matrix, target, rcond=None)[0]
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
"""Steps below which coefficients, and the parts of a time, mean nothing."""

HELD_OUT: dict[str, Callable[[Sample], Any]] = {
    "size": lambda one: one.setting.config.name,
    "context": lambda one: one.setting.context,
    "device": lambda one: one.device,
}


def errors(measured: Sequence[Sample], held_out: str, way: str = "eager") -> pd.DataFrame:
    """Returns the relative error of each step of a way when all of its size, context or device are
    left out of the fit. A device that is left out has its datasheet's roofs.
    """
    key = HELD_OUT[held_out]
    rows = []
    for value in dict.fromkeys(map(key, measured)):
        rest = [one for one in measured if key(one) != value]
        num_eager = len(of_way(rest, "eager"))
        if num_eager < LEAST_SAMPLES or len(of_way(rest, way)) <= len(OF_A_WAY):
            continue
        coefficients = fitted(rest, way)
        sheet = datasheet(value) if held_out == "device" else None
        known = {one.device: one.roofs for one in rest}
        for one in of_way(measured, way):
            if key(one) == value:
                roofs = _of_datasheet(sheet, known) if sheet else one.roofs
                time = predicted(coefficients, one.setting, roofs)["in all"] / 1e3
                error = time / one.seconds - 1
                rows.append(_row(one.setting, error, 1e3 * one.seconds, one.device))
    return pd.DataFrame(rows, columns=COLUMNS)


class Gpu(NamedTuple):
    """A GPU whose roofs are measured: its slug, its chapters, its roofs."""

    slug: str
    chapters: Chapters
    roofs: Roofs


def measured_gpus(root: Path | None = None) -> list[Gpu]:
    """Returns the GPUs of a folder of devices whose roofs are measured."""
    found = []
    for slug in measured_devices(root or FIGURES):
        # Only what is read: a device's records take seconds.
        chapters = {name: Chapter(name, device=slug, output=str(root or "")) for name in CHAPTERS}
        roofs = measured_roofs(chapters)
        if roofs is not None and roofs.memory_bytes:
            found.append(Gpu(slug, chapters, roofs))
    return found


def all_samples(gpus: Iterable[Gpu]) -> list[Sample]:
    return [one for gpu in gpus for one in samples(gpu.chapters, gpu.slug)]


def of_way(measured: Iterable[Sample], way: str) -> list[Sample]:
    return [one for one in measured if one.setting.way == way]


# ---- devices, and what is printed ----------------------------------------------------------------


def roofs_of(device: str, gpus: Iterable[Gpu]) -> Roofs:
    """Returns the measured roofs of a slug, of "this" or of a GPU's name, else those of a datasheet
    times the share that the measured GPUs reach of theirs.

    Raises RequestError for a device that was not measured and has no datasheet.
    """
    measured = {gpu.slug: gpu.roofs for gpu in gpus}
    name = device
    if device == THIS_DEVICE:
        found = detect()
        device = found.slug
        name = found.name
    sheet = datasheet(name)
    for slug, roofs in measured.items():
        if slug == device or (sheet and datasheet(slug) == sheet):
            return roofs
    if sheet is None:
        known = ", ".join(measured) or "no device"
        raise RequestError(
            f"no roofs of {device!r}: chapter 01 did not measure a GPU of that name (measured: "
            f"{known}), and there is no datasheet of it, as of 'NVIDIA A100-SXM4-80GB' or 'RTX "
            "4090'"
        )
    return _of_datasheet(sheet, measured)


def _of_datasheet(sheet: Datasheet, measured: Mapping[str, Roofs]) -> Roofs:
    """Returns a datasheet's peaks times the median share that the measured GPUs sustain of
    theirs.
    """
    shares: dict[str, list[float]] = {}
    for slug, roofs in measured.items():
        own = datasheet(slug)
        if own:
            shares.setdefault("copy", []).append(roofs.copy / own.memory_gb_per_s / 1e9)
            for precision, rate in roofs.flops.items():
                shares.setdefault(precision, []).append(rate / own.tflops(precision) / 1e12)
    reached = {name: float(np.median(values)) for name, values in shares.items()}
    words = ", ".join(f"{name} {percent(share)}" for name, share in reached.items())
    source = f"not measured; {sheet.source}, times what measured GPUs reach of theirs ({words})"
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


def lines(setting: Setting, roofs: Roofs, gpus: Sequence[Gpu], price: float = 0) -> list[str]:
    """Returns what `labkit plan` prints, a line a statement.

    Args:
        gpus: to whose records time is fitted; price: of an hour of one device, for the cost of a
            million tokens.
    """
    config = setting.config
    millions = number(accounting.num_parameters(config) / 1e6)
    limit = roofs.memory_bytes or math.inf
    took = pd.concat([memory_errors(gpu.chapters) for gpu in gpus] or [memory_errors({})])
    return [
        f"Model: {config.name}, {millions} million parameters.",
        *_memory_lines(setting, limit),
        *_error_line("memory", took[took["way"] == setting.way]),
        *_time_lines(setting, roofs, price, all_samples(gpus)),
        f"Roofs: {roofs.source}.",
    ]


def _memory_lines(setting: Setting, limit: float) -> list[str]:
    parts = memory(setting)
    shown = [f"{part} {gib(size)}" for part, size in parts.items() if size and part != "in all"]
    fits = parts["in all"] <= limit
    verdict = "fits" if fits else "does not fit"
    lines = [f"Memory: {gib(parts['in all'])} of {gib(limit)} GiB, {verdict} ({', '.join(shown)})."]
    context = largest(setting, limit, "context", 64)
    batch = largest(setting, limit, "batch", 1)
    if context or batch:
        lines.append(
            f"Largest that fits: context {context:,} at batch {setting.batch}, batch {batch:,} at "
            f"context {setting.context:,}."
        )
    if not fits:
        plan = cheapest_recomputation(setting, limit)
        ways = [f"--recompute {plan}"] if plan else []
        for num_gpus in (2, 4, 8, 16, 32, 64):
            sharded = replace(setting, num_gpus=num_gpus, gpu_way="fsdp")
            if memory(sharded)["in all"] <= limit:
                ways.append(f"--gpus {num_gpus} --gpu-way fsdp")
                break
        lines.append(f"It fits with {' or '.join(ways) or 'neither recomputation nor 64 GPUs'}.")
    return lines


def _time_lines(
    setting: Setting, roofs: Roofs, price: float, measured: Sequence[Sample]
) -> list[str]:
    if setting.precision not in roofs.flops:
        return [f"Time: no rate of {setting.precision} is known."]
    alike = of_way(measured, setting.way)
    if not alike:
        where = "`labkit run 01 02` on a GPU records some"
        return [f"Time: no step of this way is recorded to predict it from; {where}."]
    times = predicted(fitted(measured, setting.way), setting, roofs)
    rate = setting.tokens / times["in all"] * 1e3
    bounds = (f"{part} {number(times[part])} ({BOUND[part]})" for part in PARTS if times[part])
    few = len(alike) < LEAST_SAMPLES
    words = "too few steps of this way are recorded to tell its parts" if few else ", ".join(bounds)
    lines = [
        f"Device time of a step: {number(times['in all'])} ms; {words}.",
        f"{number(rate)} tokens/s a GPU.",
    ]
    if setting.num_gpus > 1:
        lines.append(_communication(setting, times["in all"]))
    if price:
        cost = price / 3600 / rate * 1e6
        lines.append(f"{number(cost)} a million tokens at {number(price)} an hour.")
    for held_out in HELD_OUT:
        words = f"time with its {held_out} held out"
        if held_out == "device":
            words += " and the datasheet in place of its roofs"
        lines += _error_line(words, errors(measured, held_out, setting.way))
    return lines


def _error_line(what: str, found: pd.DataFrame) -> list[str]:
    """Returns the line of an error, none where it is not known."""
    if found.empty:
        return []
    fact = spread(found.assign(case=found["case"] + ", " + found["device"]))
    numbers = "median {median}, 95 % within {most}, worst {worst}".format(**fact.numbers)
    return [f"Error of {what}, {len(found)} steps: {numbers}."]


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
        f"Communication of {setting.gpu_way} over {size} GPUs: {time} ms a step at the "
        f"{LINK_BYTES_PER_S / 1e9:.0f} GB/s that NVLink reaches on an H200, hidden at best, else "
        f"added to {number(step_ms)} ms; other links take longer."
    )
