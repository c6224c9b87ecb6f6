"""Will a training step fit, and how long will it take, before it is run.

Memory is the closed form of `accounting`, with what CUDA's allocator and libraries add. Time is a
model of kernels: FLOPs over the measured sustained rate of the matrix products, bytes over that of
a copy or between it and that of fp32, and a constant per layer, each with a coefficient that is
fitted to the device times of all records. How far it errs on records that it was not fitted to
stands beside every prediction.
"""

import bisect
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from labkit import accounting
from labkit.configs import (
    BATCH_SIZE,
    FIGURES,
    PRECISIONS,
    SIZES,
    ModelConfig,
    RequestError,
    model_config,
)
from labkit.device import Datasheet, datasheet, slug_of
from labkit.records import measured_devices
from labkit.report.chapter import Chapter
from labkit.report.facts import spread
from labkit.report.frame import Row, ok_rows, select, usable
from labkit.report.text import gib, number, percent

MIB = 2**20

WORKSPACE_BYTES = 65 * MIB
"""What cuBLAS keeps on Hopper: two workspaces of 32.5 MiB, measured as what a small model's forward
pass takes beyond its tensors.
"""

MORE_WORKSPACE_BYTES = 33 * MIB
"""Of bf16, and of a backward pass, which runs in a thread of its own."""


@dataclass(frozen=True)
class Setting:
    """A training step of a model with AdamW.

    Attributes:
        precision: "fp32", "tf32" or "bf16" (autocast); attention: "eager", or "fused", which keeps
            no scores; way: one of STEP_WAYS; recompute: as `accounting.checkpoint_plan` takes it.
        num_gpus, gpu_way: over how many GPUs, and how, one of GPU_WAYS; the batch is a rank's, of
            "tp" that of all.
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

    @property
    def is_tensor_parallel(self) -> bool:
        return self.gpu_way == "tp" and self.num_gpus > 1

    @property
    def rank_config(self) -> ModelConfig:
        """The part of the model that a rank computes: all, or as many heads, columns of the
        feed-forward layers and rows of the vocabulary as tensor parallel ranks have each. Norms and
        what runs between blocks are whole. Source: Shoeybi et al. 2019, "Megatron-LM", section 3.
        """
        config = self.config
        if not self.is_tensor_parallel:
            return config
        whole = {
            "num_heads": config.num_heads,
            "num_key_heads": config.num_key_heads or config.num_heads,
            "d_ff": config.d_ff,
        }
        part = {}
        for name, size in whole.items():
            if size % self.num_gpus:
                raise RequestError(f"{self.num_gpus} GPUs cannot share out {name} {size} evenly")
            part[name] = size // self.num_gpus
        part["vocab_size"] = -(-config.vocab_size // self.num_gpus)  # with rows of no token
        return replace(config, head_dim=config.d_head, **part)


class Roofs(NamedTuple):
    """Sustained rates of a device, FLOP/s by precision and B/s of a "copy"; its memory in bytes;
    its power limit (W), None where unknown, and what its recorded steps of a way draw (W).
    """

    rates: Mapping[str, float]
    memory_bytes: float
    source: str
    power_limit_w: float | None
    drawn_w: Mapping[str, float]


class Sharing(NamedTuple):
    """What GPUs share out: a stage as `accounting.zero_bytes` takes it, how many buckets as large
    as all gradients DDP's way keeps beside them, as chapter 07 measures it, and how often a rank
    sends what it holds of the parameters.
    """

    stage: int
    num_buckets: int
    num_transfers: int


SHARING = {
    "ddp": Sharing(0, 2, accounting.STEP_TRANSFERS["data_parallel"]),
    "zero1": Sharing(1, 1, accounting.STEP_TRANSFERS["sharded_optimizer"]),
    "fsdp": Sharing(3, 0, accounting.STEP_TRANSFERS["fully_sharded"]),
    "tp": Sharing(0, 0, 0),  # it sends activations
}
"""By one of GPU_WAYS."""


# ---- models --------------------------------------------------------------------------------------


OTHER_ARCHITECTURES = (
    "_experts",
    "conv",
    "kv_lora_rank",
    "multi_query",
    "type_vocab_size",
    "kv_channels",
    "dff",
    "_ff",
    "ff_intermediate",
    "ffn_dim",
    "feed_forward",
    "block_configs",
    "per_layer",
    "recurrent",
    "_cycles",
    "text_config",
    "vision_config",
)
"""Parts of keys of a config.json that say of layers that are not planned here: experts,
convolutions, also of a state space, latent attention, one key head without `num_key_value_heads`,
an encoder such as BERT, feed-forward layers under other names (OPT, whose embedding may be
narrower), layers that differ or are run again, two models in one.
"""

GATED = ("silu", "swiglu", "bitnet", "gemma", "modernbert")
"""Names of functions that gate, and parts of those of architectures that gate by another one."""

VISION = {
    "clip_vision_model": 0,
    "dinov2": 0,
    "siglip_vision_model": 12,
    "siglip2_vision_model": 12,
    "vit": 1,
}
"""By vision encoder the parameters behind its blocks, about so many times the width squared."""

MOST_LAYERS = 10_000
"""The closed form walks through them."""


def read_config(path: Path) -> ModelConfig:
    """Returns the model of a transformers config.json; the norms and products are this
    laboratory's.

    A vision encoder has no vocabulary. Raises RequestError for a file or an architecture that
    cannot be read so.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("not one object")
    except (OSError, ValueError, RecursionError) as error:
        raise RequestError(f"{path}: cannot be read as a config.json ({error})") from None
    kind = str(content.get("model_type", "unknown"))

    def refuse(what: str) -> None:
        raise RequestError(
            f"{path}: architecture {kind!r} has {what}; accepted: dense decoders (…ForCausalLM), "
            f"whose heads may share keys, as of llama, qwen3, gpt2, and {', '.join(VISION)}; of "
            "two models in one, such as a text_config, the one in a file of its own"
        )

    def first(*names: str, default: int | None = None) -> int:
        value = next((content[name] for name in names if content.get(name) is not None), default)
        if type(value) is not int or (value != default and value < 1):
            refuse(f"no {' or '.join(names)}")
        return value

    width = first("hidden_size", "n_embd")
    for name, value in content.items():
        if value and any(part in name for part in OTHER_ARCHITECTURES):
            refuse(name)
    num_rows = first("n_positions") if kind == "gpt2" else 0  # others rotate
    if kind in VISION:
        patch = first("patch_size")
        side = first("image_size", default=0) // patch
        # Positions, the values of a patch, and what follows the blocks.
        num_rows = first("num_patches", default=side**2) + 3 * patch**2 + VISION[kind] * width
    elif re.search("bert(?!-decoder)|text_model", kind) or not re.search(
        "CausalLM|LMHead", str(content.get("architectures") or "CausalLM")
    ):
        refuse("no head of a causal language model")
    name = kind
    if content.get("sliding_window") and content.get("use_sliding_window", True):
        name += f", planned as if its window of {first('sliding_window'):,} tokens were the context"
    names = f"{kind} {content.get('hidden_act')} {content.get('activation_function')}"
    return ModelConfig(
        name=name,
        d_model=width,
        d_ff=first("intermediate_size", "n_inner", default=4 * width),
        num_layers=first("num_hidden_layers", "n_layer"),
        num_heads=first("num_attention_heads", "n_head"),
        vocab_size=0 if kind in VISION else first("vocab_size"),
        head_dim=first("head_dim", default=0),
        num_key_heads=first("num_key_value_heads", default=0),
        is_gated=any(part in names for part in GATED),
        # transformers writes it only where it is not its default.
        is_tied=content.get("tie_word_embeddings", True),
        num_rows=num_rows,
    )


# ---- memory --------------------------------------------------------------------------------------


def _rounding(num_bytes: int) -> float:
    """Returns what CUDA's caching allocator hands out beyond `num_bytes`.

    It takes 20 MiB for a tensor below 10 MiB and multiples of 2 MiB above, and leaves a rest of at
    most 1 MiB with the tensor. Source: PyTorch, c10/cuda/CUDACachingAllocator.cpp.
    """
    if num_bytes <= MIB:
        return 0
    num_tensors = 1
    rest = -num_bytes % (2 * MIB)
    if num_bytes < 10 * MIB:
        num_tensors, rest = divmod(20 * MIB, num_bytes)
    return rest / num_tensors if rest <= MIB else 0


def memory(setting: Setting) -> dict[str, float]:
    """Returns bytes at the peak of a training step: weights, moments, gradients and activations,
    libraries, and the total.

    Raises RequestError for a setting that does not exist.
    """
    config = setting.rank_config
    if config.num_layers > MOST_LAYERS:
        raise RequestError(f"{config.num_layers} layers; accepted: up to {MOST_LAYERS:,}")
    peak = accounting.peak_bytes(
        config,
        setting.batch,
        setting.context,
        "train_step",
        plan=accounting.checkpoint_plan(setting.recompute, config.num_layers),
        precision=setting.precision,
        attention=setting.attention,
        device_kind="cuda",
        is_compiled=setting.way != "eager",
        loss_in_chunks=setting.way == "ours",
        shards=setting.num_gpus if setting.gpu_way == "fsdp" else 1,
    )
    sharing = SHARING[setting.gpu_way]
    num_parameters = accounting.num_parameters(config)
    held = accounting.zero_bytes(num_parameters, setting.num_gpus, sharing.stage)
    rest = peak - 12 * num_parameters  # weights and AdamW's moments
    d, f = config.d_model, config.d_ff
    table = 4 * config.vocab_size * d
    matrices = [(4 * d * d, 4 * config.num_layers), (4 * d * f, 3 * config.num_layers), (table, 2)]
    lost = 3 * sum(number * _rounding(size) for size, number in matrices)
    num_buckets = sharing.num_buckets if setting.num_gpus > 1 else 0
    if sharing.stage == 3 and setting.num_gpus > 1:
        # Two blocks, or the head and a block of its size, are gathered at a time.
        rest += 2 * max(accounting.block_gradient_bytes(config), table)
    parts = {
        "weights": held["weights"],
        "AdamW's moments": held["moments"],
        "gradients and activations": rest,
        "buckets": num_buckets * 4 * num_parameters,
        "libraries and allocator": lost + WORKSPACE_BYTES + MORE_WORKSPACE_BYTES,
    }
    return parts | {"in all": sum(parts.values())}


def too_large(case: Row, phases: Sequence[str], limit: float) -> bool:
    """Returns whether a case of the chapters holds a training step that needs more than `limit`
    bytes.
    """
    is_step = "train_step" in phases or "graph_step" in phases
    if not is_step or case.get("size") not in SIZES or case.get("precision") not in PRECISIONS:
        return False
    return memory(_setting(case))["in all"] > limit


def largest(setting: Setting, limit: float, name: str, step: int) -> int:
    """Returns the largest multiple of `step` of a field, "batch" or "context", with which a step
    fits into `limit` bytes; 0 where none does.
    """

    def takes(number: int) -> float:
        return memory(replace(setting, **{name: number * step}))["in all"]

    return step * bisect.bisect_right(range(1, 2**40), limit, key=takes)


def cheapest_recomputation(setting: Setting, limit: float) -> str | None:
    """Returns the recomputation of least time with which a step fits, None where it fits with none
    of those that are tried.
    """
    sizes = [size for size in (16, 8, 4, 2, 1) if size <= setting.config.num_layers]
    for plan in ("none", *map(str, sizes)):
        if memory(replace(setting, recompute=plan))["in all"] <= limit:
            return plan
    return None


# ---- time ----------------------------------------------------------------------------------------

BOUND = {
    "matrix products": "matmul",
    "fused attention": "matmul or memory",
    "elementwise": "memory and multiprocessors",
    "AdamW": "memory",
    "kernels' begin and end": "launch",
}
"""The parts of a predicted time, and what bounds each. More parts, as of logits and casts, fit no
better what they were not fitted to.
"""


def terms(setting: Setting, roofs: Roofs) -> dict[str, float]:
    """Returns the parts of the model of kernels in milliseconds, before they are fitted."""
    config = setting.rank_config
    d, layers, tokens = config.d_model, config.num_layers, setting.tokens
    flops_rate = roofs.rates[setting.precision] / 1e3
    copy_rate = roofs.rates["copy"] / 1e3
    # Elementwise kernels wait for memory and for the multiprocessors: from an H100 to an H200,
    # which differ in memory alone, they gain about the root of what a copy gains.
    elementwise_rate = math.sqrt(copy_rate * roofs.rates["fp32"] / 1e3)
    is_eager = setting.attention == "eager"
    plan = accounting.checkpoint_plan(setting.recompute, layers)
    passes = 2 + accounting.checkpoint_forwards(layers, plan)
    num_blocks = passes / 3 * layers  # those that are computed again count again
    # The head is behind all blocks: its product is never computed again.
    matrices = passes * accounting.num_matmul_parameters(config)
    matrices -= (passes - 3) * config.vocab_size * d
    # A fused kernel leaves out what a causal mask hides; an encoder has none.
    pairs = setting.context / 2 if config.vocab_size else setting.context
    attention = 4 * tokens * pairs * config.attention_widths[0] * layers
    block_bytes = 4 * tokens * d
    if setting.is_tensor_parallel:
        # Of 34 bytes that a block keeps of a token and a dimension 24 are shared out (Korthikanti
        # et al. 2022, "Reducing Activation Recomputation", section 4.2).
        block_bytes *= (10 + 24 / setting.num_gpus) / 34
    if is_eager:
        # Of three elementwise kernels one passes over scores. Autocast's have two bytes around the
        # products and four around the softmax.
        score_bytes = 3 if setting.precision == "bf16" else 4
        if setting.way == "compiled" and setting.context > 1024:
            # Shorter rows stay in registers. Softmax and its gradient, by one compiled kernel each,
            # read longer ones twice: 36 bytes of a score are moved, products included, for 28.
            score_bytes *= 36 / 28
        block_bytes += setting.batch * config.num_heads * setting.context**2 * score_bytes / 3
    # Of the parameters a rank updates its share.
    num_ranks = setting.num_gpus if SHARING[setting.gpu_way].stage else 1
    update = accounting.optimizer_step_bytes(config) / num_ranks
    return {
        "matrix products": 2 * matrices * tokens / flops_rate,
        "fused attention": 0.0 if is_eager else passes * attention / flops_rate,
        "elementwise": num_blocks * block_bytes / elementwise_rate,
        "AdamW": update / copy_rate,
        "kernels' begin and end": num_blocks * 1e-2,
    }


def measured_roofs(chapter: Chapter) -> Roofs | None:
    """Returns the roofs that a GPU's chapter 01 measured, None without them."""
    rates = {}
    for row in ok_rows(chapter.records("ceilings")).to_dict("records"):
        if row["kind"] == "copy":
            rates["copy"] = row["sustained_gb_per_s"] * 1e9
        else:
            rates[row["precision"]] = row["sustained_tflops"] * 1e12
    gpu = chapter.gpu
    if not {"copy", "fp32"} <= rates.keys() or not gpu.get("memory_bytes"):
        return None
    # Between launched kernels a GPU waits for the host and draws less.
    steps = usable(select(chapter.records("execution"), phase="graph_step"), "watts")
    ways = [_way(row) for row in steps.to_dict("records")]
    drawn = steps["watts"].groupby(ways).median().to_dict()
    source = f"measured on {chapter.asked_device}"
    return Roofs(rates, gpu["memory_bytes"], source, gpu.get("power_limit_w"), drawn)


def _steps(chapter: Chapter, sections: Iterable[str], phase: str, value: str) -> list[dict]:
    """Returns the recorded steps of a chapter that a plan knows: with its columns the Setting, the
    way, what tells a step apart, and what was measured, a time in milliseconds or bytes.
    """
    steps = []
    rows = usable(select(chapter.records(*sections), phase=phase, precision=PRECISIONS), value)
    # What a chapter does not vary, it does not say.
    rows = rows.fillna({"compile": "none", "plan": "none"})
    for row in rows.to_dict("records"):
        way = _way(row)
        if not way:
            continue
        row |= {
            "setting": _setting(row, way),
            "way": way,
            "case": f"{row['size']}, {row['context']:,}, {row['precision']}",
            "device": chapter.device,
            "measured": row[value],
        }
        steps.append(row)
    return steps


def _setting(case: Row, way: str = "eager") -> Setting:
    """Returns the step of a case of the chapters."""
    is_eager = case.get("attention", "eager") == "eager"
    return Setting(
        model_config(case["size"]),
        case.get("batch", BATCH_SIZE),
        case["context"],
        case["precision"],
        "eager" if is_eager else "fused",
        way,
        case.get("plan", "none"),
    )


def _way(row: Row) -> str:
    """Returns one of STEP_WAYS, "" for what none plans."""
    if row.get("impl") == "fused":
        return "ours"
    # Our attention computes fp32 by other products than the roof's.
    if row["attention"] == "auto" and row["precision"] != "bf16":
        return ""
    return {"none": "eager", "regional": "compiled"}.get(row.get("compile", "none"), "")


def samples(devices: Iterable[Chapter]) -> pd.DataFrame:
    """Returns the training steps whose device time is recorded, as sums of kernels in chapter 02 or
    as graphs in chapter 01, by which a device is given. Columns as of `_steps`, the device's
    roofs, and the parts of `terms`.
    """
    rows = []
    for chapter in devices:
        roofs = measured_roofs(chapter)
        if roofs is None:
            continue
        graphs = _steps(chapter, ["execution"], "graph_step", "median_ms")
        sums = _steps(chapter.of("02_nsys_analysis"), ["profiles"], "train_step", "step_kernel_ms")
        rows += [
            step | {"roofs": roofs} | terms(step["setting"], roofs)
            for step in (*graphs, *sums)
            if step["setting"].precision in roofs.rates
        ]
    return pd.DataFrame(rows)


def memory_errors(devices: Iterable[Chapter]) -> pd.DataFrame:
    """Returns the recorded steps of devices, by their chapter 01, with the relative error of
    `memory` and what was measured in GiB.
    """
    # A step that is also captured runs on a second stream, which has a workspace of its own.
    sections = (
        ("01_benchmarking", ["steps"], 0),
        ("01_benchmarking", ["execution"], WORKSPACE_BYTES),
        ("04_memory", ["peaks", "checkpointing"], 0),
    )
    rows = []
    for chapter in devices:
        for name, names, workspace in sections:
            for step in _steps(chapter.of(name), names, "train_step", "peak_bytes"):
                expected = memory(step["setting"])["in all"] + workspace
                error = expected / step["measured"] - 1
                rows.append(step | {"error": error, "measured": step["measured"] / 2**30})
    return pd.DataFrame(rows)


def fitted(measured: pd.DataFrame, way: str) -> dict[str, float]:
    """Returns coefficients of `terms` for a way, those of least squares of relative errors."""
    steps = select(measured, way=way)
    rows = steps[list(BOUND)].div(steps["measured"], axis=0)
    # No part is faster than its roof.
    beyond = _least_squares(rows, 1 - rows.sum(axis=1))
    return {part: 1 + value for part, value in beyond.items()}


def _least_squares(rows: pd.DataFrame, target: pd.Series) -> dict[str, float]:
    """Returns a coefficient for each column, 0 in place of one below."""
    names = list(rows)
    while True:
        matrix = rows[names].to_numpy()
        values = np.linalg.lstsq(matrix, target, rcond=None)[0]
        if (values >= 0).all():
            return dict.fromkeys(rows, 0.0) | dict(zip(names, values, strict=True))
        names.pop(np.argmin(values * np.linalg.norm(matrix, axis=0)))


def predicted(coefficients: Mapping[str, float], setting: Setting, roofs: Roofs) -> dict:
    """Returns milliseconds by part, and in all."""
    parts = {part: coefficients[part] * ms for part, ms in terms(setting, roofs).items()}
    return parts | {"in all": sum(parts.values())}


LEAST_SAMPLES = 8
"""Steps below which coefficients, and the parts of a time, mean nothing."""


def errors(measured: pd.DataFrame, held_out: str, way: str = "eager") -> pd.DataFrame:
    """Returns the steps of a way, each with its relative error when all of its size, context or
    device are left out of the fit. A device that is left out has its datasheet's roofs.
    """
    if measured.empty:
        return measured
    rows = []
    for value, left_out in measured.groupby(held_out, sort=False):
        rest = measured[measured[held_out] != value]
        if len(select(rest, way=way)) < LEAST_SAMPLES:
            continue
        coefficients = fitted(rest, way)
        sheet = datasheet(value) if held_out == "device" else None
        known = dict(zip(rest["device"], rest["roofs"], strict=True))
        for step in select(left_out, way=way).to_dict("records"):
            roofs = _of_datasheet(sheet, known) if sheet else step["roofs"]
            time = predicted(coefficients, step["setting"], roofs)["in all"]
            rows.append(step | {"error": time / step["measured"] - 1})
    return pd.DataFrame(rows)


def measured_gpus(root: Path | None = None) -> dict[str, Chapter]:
    """Returns by slug chapter 01 of the GPUs of a folder of devices whose roofs are measured."""
    gpus = {}
    for slug in measured_devices(root or FIGURES):
        chapter = Chapter("01_benchmarking", device=slug, output=str(root or ""))
        if measured_roofs(chapter):
            gpus[slug] = chapter
    return gpus


# ---- devices, and what is printed ----------------------------------------------------------------


def roofs_of(device: str, gpus: Mapping[str, Chapter]) -> Roofs:
    """Returns the measured roofs of a slug, of "this" or of a GPU's name, else those of a datasheet
    times the share that the measured GPUs reach of theirs.

    Raises RequestError for a device that was not measured and has no datasheet.
    """
    measured = {slug: measured_roofs(chapter) for slug, chapter in gpus.items()}
    name = slug_of(device)
    sheet = datasheet(name)
    for slug, roofs in measured.items():
        if slug == name or (sheet and datasheet(slug) == sheet):
            return roofs
    if sheet is None:
        known = ", ".join(measured) or "no device"
        raise RequestError(
            f"no roofs of {name!r}: chapter 01 did not measure a GPU of that name (measured: "
            f"{known}), and there is no datasheet of it, as of 'NVIDIA A100-SXM4-80GB' or 'RTX "
            "4090'"
        )
    return _of_datasheet(sheet, measured)


def _of_datasheet(sheet: Datasheet, measured: Mapping[str, Roofs]) -> Roofs:
    """Returns a datasheet's peaks times the median share that the measured GPUs sustain of
    theirs.
    """
    shares = pd.DataFrame(
        pd.Series(roofs.rates) / _peaks(datasheet(slug))
        for slug, roofs in measured.items()
        if datasheet(slug)
    )
    rates = _peaks(sheet)
    source = f"{sheet.source}, its peaks, for no measured GPU says what is reached of them"
    if len(shares):
        reached = shares.median()
        rates *= reached
        words = ", ".join(f"{name} {percent(share)}" for name, share in reached.items())
        source = f"not measured; {sheet.source}, times what measured GPUs reach of theirs ({words})"
    rates = rates.dropna().to_dict()
    return Roofs(rates, sheet.memory_bytes, source, sheet.power_limit_w, {})


def _peaks(sheet: Datasheet) -> pd.Series:
    """Returns rates as those of `Roofs`, NaN of a precision that the product has no unit for."""
    peaks = {name: (sheet.tflops(name) or math.nan) * 1e12 for name in PRECISIONS}
    return pd.Series({"copy": sheet.memory_gb_per_s * 1e9, **peaks})


def lines(
    setting: Setting, roofs: Roofs, gpus: Mapping[str, Chapter], price: float = 0
) -> list[str]:
    """Returns what `labkit plan` prints, a line a statement.

    Args:
        gpus: to whose records time is fitted; price: of an hour of one device, for the cost of a
            million tokens.
    """
    config = setting.config
    millions = number(accounting.num_parameters(config) / 1e6)
    shared = f"{setting.num_gpus} GPUs, {setting.gpu_way}" if setting.num_gpus > 1 else "1 GPU"
    batch_of = "" if setting.is_tensor_parallel else " a GPU"
    return [
        f"Model: {config.name}, {millions} million parameters.",
        f"Step: batch {setting.batch}{batch_of}, context {setting.context:,}, {setting.precision}, "
        f"attention {setting.attention}, {setting.way}, recompute {setting.recompute}, {shared}.",
        *_memory_lines(setting, roofs.memory_bytes),
        *_error_line("memory", select(memory_errors(gpus.values()), way=setting.way)),
        *_time_lines(setting, roofs, price, samples(gpus.values())),
        f"Roofs: {roofs.source}.",
    ]


def _memory_lines(setting: Setting, limit: float) -> list[str]:
    parts = memory(setting)
    needed = parts.pop("in all")
    shown = [f"{part} {gib(size)}" for part, size in parts.items() if size]
    fits = needed <= limit
    verdict = "fits" if fits else "does not fit"
    lines = [f"Memory: {gib(needed)} of {gib(limit)} GiB, {verdict} ({', '.join(shown)})."]
    context = largest(setting, limit, "context", 64)
    batch = largest(setting, limit, "batch", 1)
    if context or batch:
        lines.append(
            f"Largest that fits: context {context:,} at batch {setting.batch}, batch {batch:,} at "
            f"context {setting.context:,}."
        )
    if not fits:
        ways: dict[str, str] = {}
        for num_gpus in (1, 2, 4, 8, 16, 32, 64):
            sharded = replace(setting, num_gpus=num_gpus, gpu_way="fsdp")
            plan = cheapest_recomputation(sharded, limit)
            if plan:
                ways.setdefault(plan, f"--recompute {plan} --gpus {num_gpus} --gpu-way fsdp")
        words = " or ".join(ways.values()) or "neither 64 GPUs nor recomputation"
        lines.append(f"It fits with {words}.")
    return lines


LINK_BYTES_PER_S = 300e9
"""Bandwidth of a ring over NVLink on Hopper, as chapter 07 measures it for large messages."""


def communication_ms(setting: Setting) -> float:
    """Returns how long a step's collectives take over NVLink.

    Tensor parallel ranks add up activations behind the attention and the feed-forward layer of each
    block, as often as it runs forward, and their gradients before both.
    """
    config = setting.config
    if setting.is_tensor_parallel:
        plan = accounting.checkpoint_plan(setting.recompute, config.num_layers)
        passes = 1 + accounting.checkpoint_forwards(config.num_layers, plan)
        times = 2 * config.num_layers * passes
        element_bytes = 2 if setting.precision == "bf16" else 4
        operation = "all_reduce"
        sent = setting.tokens * config.d_model * element_bytes
    else:
        times = SHARING[setting.gpu_way].num_transfers
        operation = "all_gather"
        sent = accounting.parameter_bytes(config)
    ring_s = accounting.ring_seconds(operation, sent, setting.num_gpus, LINK_BYTES_PER_S)
    return 1e3 * times * ring_s


def _time_lines(setting: Setting, roofs: Roofs, price: float, measured: pd.DataFrame) -> list[str]:
    if setting.precision not in roofs.rates:
        return [f"Time: no rate of {setting.precision} is known."]
    alike = select(measured, way=setting.way)
    if alike.empty:
        return [
            "Time: no step of this way is recorded to predict it from; `labkit run 01 02` on a GPU "
            "records some."
        ]
    times = predicted(fitted(measured, setting.way), setting, roofs)
    step_ms = times["in all"]
    sent_ms = communication_ms(setting)
    tokens = setting.tokens
    wall_ms = max(step_ms, sent_ms)
    meanwhile = (
        f"at best it runs during the {number(step_ms)} ms of kernels, else it is added to them"
    )
    if setting.is_tensor_parallel:
        tokens /= setting.num_gpus
        wall_ms = step_ms + sent_ms
        meanwhile = f"the next kernels wait for it, so it is added to their {number(step_ms)} ms"
    rate = tokens / wall_ms * 1e3
    words = ", ".join(
        f"{part} {number(times[part])} ({bound})" for part, bound in BOUND.items() if times[part]
    )
    if len(alike) < LEAST_SAMPLES:
        words = "too few steps of this way are recorded to tell its parts"
    lines = [
        f"Device time of a step: {number(step_ms)} ms; {words}.",
        f"{number(rate)} tokens/s a GPU{' at best' if sent_ms else ''}.",
    ]
    if setting.context > alike["context"].max():
        # In short contexts, to which it is fitted, fused attention is far from its rate.
        lines.append(
            "No recorded context is as long: the time is a guess, too long with fused attention."
        )
    watts = roofs.drawn_w.get(setting.way, roofs.power_limit_w)
    if watts:
        joules = watts * step_ms / 1e3
        source = "such steps draw" if setting.way in roofs.drawn_w else "is its power limit"
        lines.append(
            f"Energy of a step: {number(joules)} J a GPU, {number(tokens / joules)} "
            f"tokens/J, at {watts:.0f} W, which {source}."
        )
    if sent_ms:
        lines.append(
            f"Communication of {setting.gpu_way} over {setting.num_gpus} GPUs: {number(sent_ms)} "
            f"ms a step at the {LINK_BYTES_PER_S / 1e9:.0f} GB/s that NVLink reaches on an H200; "
            f"{meanwhile}; other links take longer."
        )
    if price:
        cost = price / 3600 / rate * 1e6
        lines.append(f"{number(cost)} a million tokens at {number(price)} an hour.")
    for held_out in ("size", "context", "device"):
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
    numbers = "median {median}, at most {most}, worst {worst}".format(**fact.numbers)
    return [f"Error of {what}: {numbers}."]
