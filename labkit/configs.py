"""What is measured: model sizes, and the grid of cases that each profile of each notebook covers.

Nothing here imports torch, so the command line and the report can name sizes without it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

VOCAB_SIZE = 10_000
BATCH_SIZE = 4
ROPE_THETA = 10_000.0
RMS_NORM_EPS = 1e-5

REFERENCE_DEVICE = "nvidia-h200"
"""Slug of the device that the committed notebooks and the top-level report show."""

THIS_DEVICE = "this"
"""Stands for the slug of the machine that it is used on."""

REPOSITORY = Path(__file__).resolve().parent.parent
FIGURES = REPOSITORY / "figures"
NOTEBOOKS = REPOSITORY / "notebooks"


class RequestError(ValueError):
    """The user asked for something that is not possible: one line, on the command line and in a notebook."""

    def _render_traceback_(self) -> list[str]:  # what IPython shows in place of a traceback
        return [f"{type(self).__name__}: {self}"]


@dataclass(frozen=True)
class ModelConfig:
    """Dimensions of a decoder-only language model.

    `edition` says which public list of sizes the name comes from: "xl" is a 1.998 B model in the 2025 list and a
    3.407 B model in the 2026 list, so a bare "xl" is not accepted anywhere.
    """

    name: str
    edition: str
    d_model: int
    d_ff: int
    num_layers: int
    num_heads: int
    vocab_size: int = VOCAB_SIZE
    rope_theta: float = ROPE_THETA

    @property
    def d_head(self) -> int:
        return self.d_model // self.num_heads


SIZES: dict[str, ModelConfig] = {
    config.name: config
    for config in (
        ModelConfig("nano", "labkit smoke", 128, 512, 2, 2),
        ModelConfig("micro", "labkit smoke", 192, 768, 3, 3),
        ModelConfig("small", "2025 and 2026", 768, 3072, 12, 12),
        ModelConfig("medium", "2025 and 2026", 1024, 4096, 24, 16),
        ModelConfig("large", "2025 and 2026", 1280, 5120, 36, 20),
        ModelConfig("xl-2025", "2025", 1600, 6400, 48, 25),
        ModelConfig("2.7b", "2025; xl of 2026", 2560, 10240, 32, 32),
        ModelConfig("10b", "2026", 4608, 12288, 50, 36),
    )
}
SIZE_ALIASES = {"xl-2026": "2.7b", "2.7b-2025": "2.7b", "10b-2026": "10b"}


def model_config(name: str) -> ModelConfig:
    """Returns the size called `name` (or an alias of it); raises RequestError that names the accepted ones."""
    if name == "xl":
        raise RequestError("size 'xl' means two models: say 'xl-2025' (1.998 B) or 'xl-2026' (3.407 B, also '2.7b')")
    try:
        return SIZES[SIZE_ALIASES.get(name, name)]
    except KeyError:
        raise RequestError(f"unknown size {name!r}; accepted: {', '.join([*SIZES, *SIZE_ALIASES])}") from None


PRECISIONS = ("fp32", "tf32", "bf16")
"""fp32: TF32 off. tf32: fp32 tensors, TF32 matmuls. bf16: autocast to bfloat16 over fp32 parameters."""

COMPILE_MODES = ("none", "regional", "whole")
"""none: eager. regional: each block through torch.compile. whole: the model through torch.compile."""

LAUNCH_BOUND = 0.9
"""Share of the time until work is done above which issuing it sets the pace: the device waits for the host."""

PHASES = ("inference", "forward", "backward", "forward_backward", "optimizer_step", "train_step")
COMPILE_PHASES = ("compile", "forward", "forward_backward", "train_step")
WARMUP_PHASES = ("forward", "forward_backward")
WARMUP_COUNTS = (0, 1, 2, 5)
WARMUP_MEASURED_STEPS = 10


_PUBLIC_SIZES = ("small", "medium", "large", "xl-2025", "2.7b", "10b")
_CONTEXTS = (128, 256, 512, 1024, 2048)


@dataclass(frozen=True)
class BenchmarkingGrid:
    """The cases of notebook 01 in one profile. Of this grid and all others the defaults are the full profile.

    `warmup_contexts`: of `contexts` those whose steps are traced from a fresh process.
    `whole_compile_sizes`: sizes whose whole model is compiled as one graph. That takes longer the more layers there
    are, so the deep sizes are compiled block by block only; on the CPU all are.
    `time_limit_s` bounds the timed steps of one phase, `case_timeout_s` everything one case does.
    """

    sizes: tuple[str, ...] = _PUBLIC_SIZES
    contexts: tuple[int, ...] = _CONTEXTS
    precisions: tuple[str, ...] = PRECISIONS
    warmup_contexts: tuple[int, ...] = _CONTEXTS
    compile_sizes: tuple[str, ...] = _PUBLIC_SIZES
    compile_contexts: tuple[int, ...] = (128, 256, 512)
    compile_precisions: tuple[str, ...] = PRECISIONS
    whole_compile_sizes: tuple[str, ...] = ("small",)
    time_limit_s: float = 2.0
    case_timeout_s: float = 300.0


BENCHMARKING: dict[str, BenchmarkingGrid] = {
    "smoke": BenchmarkingGrid(
        sizes=("nano", "micro"),
        contexts=(16, 32, 64),
        precisions=("fp32", "bf16"),
        warmup_contexts=(64,),
        compile_sizes=("nano",),
        compile_contexts=(64,),
        compile_precisions=("fp32",),
        whole_compile_sizes=(),
        time_limit_s=0.05,
        case_timeout_s=120.0,
    ),
    "full": BenchmarkingGrid(),
}
PROFILES = tuple(BENCHMARKING)
AUTO_PROFILE = "auto"
"""Stands for "full" on a GPU and for "smoke" elsewhere."""

ATTENTION_BATCH = 8
"""Sequences of one attention call in notebook 05, as in the published grid: no heads, so eight score matrices."""

ATTENTION_PASSES = 100
"""Timed passes of one case in notebook 05, as published; a case that takes long is ended by its time limit before."""

_SDPA = ("sdpa_math", "sdpa_flash", "sdpa_cudnn", "sdpa_efficient")


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


@dataclass(frozen=True)
class AttentionGrid:
    """The cases of notebook 05 in one profile.

    `series`: implementations by precision. `lengths` are run with every one of `d_heads`. `long_lengths`, by
    precision, look for the first out-of-memory: eager with all `d_heads`, the others with `long_d_head`.
    `compiled_lengths`: of `lengths` those that are also compiled.
    `heads_lengths`: for which, with `long_d_head`, the formula is also compiled with a dimension of heads in front.
    `model_sizes`, `model_contexts`: of the compiled transformer whose backward pass is timed; none on the CPU, where
    compiling it takes too long.
    `time_limit_s` and `case_timeout_s` are as in notebook 01.
    """

    series: dict[str, tuple[str, ...]] = field(
        default_factory=lambda: {
            "fp32": ("eager", "compiled", *_SDPA), "tf32": ("compiled",), "bf16": ("eager", "compiled", *_SDPA),
        }
    )  # fmt: skip
    lengths: tuple[int, ...] = (256, 1024, 4096, 8192, 16384)
    d_heads: tuple[int, ...] = (16, 32, 64, 128)
    long_lengths: dict[str, tuple[int, ...]] = field(
        default_factory=lambda: {"fp32": (32768, 65536), "tf32": (32768, 65536), "bf16": (32768, 65536, 131072)}
    )
    long_d_head: int = 64
    compiled_lengths: tuple[int, ...] = (256, 1024, 4096, 8192, 16384)
    heads_lengths: tuple[int, ...] = (1024, 4096, 16384)
    model_sizes: tuple[str, ...] = ("small", "medium", "large", "xl-2025")
    model_contexts: tuple[int, ...] = (128, 512)
    time_limit_s: float = 0.4
    case_timeout_s: float = 120.0


ATTENTION: dict[str, AttentionGrid] = {
    "smoke": AttentionGrid(
        series={
            "fp32": ("eager", "compiled", "sdpa_math", "sdpa_flash", "sdpa_cudnn"),
            "bf16": ("eager", "sdpa_flash"),
        },
        lengths=(64, 128, 256),
        d_heads=(16,),
        long_lengths={},
        long_d_head=16,
        compiled_lengths=(64,),
        heads_lengths=(64,),
        model_sizes=(),
        model_contexts=(),
        time_limit_s=0.1,
    ),
    "full": AttentionGrid(),
}


PASSES = ("forward", "backward", "forward_backward")
"""What is timed of an operation in notebook 06; each directly, none by subtraction."""

MATERIALISING = ("eager", "compiled", "sdpa_math")
"""Implementations that write the scores to memory. Each is timed alone; all others in turn, in one process."""


@dataclass(frozen=True)
class Rivalry:
    """A shape on which every implementation whose memory is linear is ranked: bf16, forward, backward and both."""

    batch: int
    heads: int
    length: int
    d_head: int
    causal: bool


LEADERBOARD = Rivalry(1, 16, 16384, 64, True)
"""The shape of a public course leaderboard: the time of forward and backward together."""

_ALL_LENGTHS = tuple(2**exponent for exponent in range(7, 17))
_FEW_LENGTHS = (1024, 4096, 16384)


@dataclass(frozen=True)
class FlashAttentionGrid:
    """The cases of notebook 06 in one profile.

    `impls`: implementations by precision, run for every one of `lengths` and `d_heads` at batch 1, one head, causal
    (the shapes of the published figures), with two exceptions. `by_shape` gives some their lengths by head dimension;
    of its keys "precision implementation", "implementation" and "precision" the first that is there counts. PyTorch's
    own choice of backend ("sdpa") takes `short_lengths`, where choosing is what could cost.
    SDPA's flash and cuDNN backends, FlashAttention-3 and the Hopper kernel take 16-bit tensors only.
    `rivalries`, `rivals`: the shapes on which `rivals` are ranked.
    `memory_lengths`, `memory_impls` (by precision), `memory_d_head`: of the peaks of memory.
    `tiles`: (rows of the query tile, rows of the key tile, warps, stages) tried on `tiles_shape`.
    `weighted_sums`: (rows, summed elements) of the first kernel. `algorithm_tiles`: tiles of the small case.
    `time_limit_s`: of one pass of everything that is timed in turn, `rivals_time_limit_s` the same for the rivals;
    `case_timeout_s` as in notebook 01.
    """

    impls: dict[str, tuple[str, ...]] = field(
        default_factory=lambda: {
            "bf16": _names("gluon triton eager compiled sdpa sdpa_math sdpa_flash sdpa_efficient sdpa_cudnn flex fa3"),
            "fp32": _names("triton triton_ieee eager compiled sdpa sdpa_math sdpa_efficient flex"),
            "tf32": _names("triton_tf32 eager compiled sdpa_efficient"),
        }
    )
    lengths: tuple[int, ...] = _ALL_LENGTHS
    d_heads: tuple[int, ...] = (16, 32, 64, 72, 80, 128)
    by_shape: dict[str, dict[int, tuple[int, ...]]] = field(
        default_factory=lambda: {
            **{name: {64: _ALL_LENGTHS, 128: (*_FEW_LENGTHS, 65536)} for name in ("compiled", "flex", "tf32")},
            **{name: {64: _FEW_LENGTHS, 128: _FEW_LENGTHS} for name in ("sdpa_math", "triton_ieee", "fp32 flex")},
        }
    )
    short_lengths: tuple[int, ...] = (128, 256, 512)
    rivalries: tuple[Rivalry, ...] = (
        Rivalry(4, 32, 4096, 64, True),
        Rivalry(1, 32, 16384, 64, True),
        Rivalry(1, 32, 16384, 64, False),
        Rivalry(4, 16, 4096, 128, True),
        Rivalry(1, 16, 16384, 128, True),
        Rivalry(1, 16, 16384, 128, False),
        LEADERBOARD,
        Rivalry(64, 16, 256, 72, False),
    )
    rivals: tuple[str, ...] = _names(
        "gluon gluon_unordered triton sdpa_flash sdpa_cudnn sdpa_efficient flex fa3 fa3_deterministic"
    )
    memory_lengths: tuple[int, ...] = tuple(2**exponent for exponent in range(10, 18))
    memory_impls: dict[str, tuple[str, ...]] = field(
        default_factory=lambda: {
            "bf16": _names("gluon triton eager sdpa_math sdpa_flash sdpa_efficient sdpa_cudnn fa3"),
            "fp32": _names("triton eager sdpa_efficient"),
        }
    )
    memory_d_head: int = 64
    tiles: tuple[tuple[int, int, int, int], ...] = tuple(
        (q, k, 4 if q <= 64 else 8, 3) for q in (16, 32, 64, 128, 256) for k in (16, 32, 64, 128)
    )
    tiles_shape: Rivalry = LEADERBOARD
    weighted_sums: tuple[tuple[int, int], ...] = ((65536, 1024), (50001, 999))
    algorithm_tiles: tuple[int, ...] = (8, 16, 32, 64)
    time_limit_s: float = 0.5
    rivals_time_limit_s: float = 4.0
    case_timeout_s: float = 300.0


FLASH_ATTENTION: dict[str, FlashAttentionGrid] = {
    "smoke": FlashAttentionGrid(
        impls={
            "fp32": _names(
                "tiled triton gluon eager compiled sdpa sdpa_math sdpa_flash sdpa_efficient sdpa_cudnn flex fa3"
            ),
            "bf16": _names("tiled triton gluon eager sdpa_math sdpa_flash"),
        },
        lengths=(128, 256, 512),
        d_heads=(16, 64),
        by_shape={"compiled": {16: (128,)}, "flex": {16: (128,)}},
        rivalries=(Rivalry(1, 2, 256, 64, True), Rivalry(2, 1, 128, 16, False)),
        rivals=_names("tiled triton gluon gluon_unordered sdpa_flash sdpa_cudnn fa3"),
        memory_lengths=(128, 256),
        memory_impls={"fp32": ("eager", "tiled")},
        memory_d_head=16,
        tiles=((16, 16, 4, 1), (32, 16, 4, 1)),
        tiles_shape=Rivalry(1, 1, 64, 16, True),
        weighted_sums=((1001, 99),),
        time_limit_s=0.1,
        rivals_time_limit_s=0.1,
        case_timeout_s=120.0,
    ),
    "full": FlashAttentionGrid(),
}


MIXED_PRECISIONS = ("bf16", "fp16", "bf16_pure")
"""What notebook 03 times in one session. bf16: as in PRECISIONS. fp16: autocast to float16 over fp32 parameters, the
loss scaled. bf16_pure: parameters, gradients and optimizer state in bfloat16, no autocast."""

MIXED_PHASES = ("forward", "backward", "train_step")

NORM_SETTINGS = {"centred": (0.0, 1e-5), "offset": (16.0, 1e-5), "small epsilon": (0.0, 1e-8)}
"""Inputs of a normalisation by name: (mean in standard deviations, epsilon)."""

_DECADES = tuple(10.0**exponent for exponent in range(-4, 5))


@dataclass(frozen=True)
class Task:
    """A synthetic task: each of `num_tokens` tokens is always followed by the same one, and the model learns which."""

    size: str
    vocab_size: int
    num_tokens: int
    context: int
    batch: int
    num_steps: int
    learning_rate: float


@dataclass(frozen=True)
class MixedPrecisionGrid:
    """The cases of notebook 03 in one profile.

    `sizes`, `contexts`: of the timed steps. `operator_sizes`: whose operators are counted, at `operator_context`.
    `transformer`: whose dtypes are read.
    `norm_shape`: (rows, features); `norm_scales`: standard deviations of the input. `epilogue_shape`: (rows, columns)
    of a product, `epilogue_depths`: the lengths of its sums.
    `time_limit_s` and `case_timeout_s` are as in notebook 01.
    """

    sizes: tuple[str, ...] = _PUBLIC_SIZES
    contexts: tuple[int, ...] = (128, 256, 512, 1024)
    operator_sizes: tuple[str, ...] = ("small", "medium", "large", "xl-2025")
    operator_context: int = 128
    transformer: str = "small"
    norm_shape: tuple[int, int] = (256, 2560)
    norm_scales: tuple[float, ...] = _DECADES
    epilogue_shape: tuple[int, int] = (1024, 4096)
    epilogue_depths: tuple[int, ...] = (256, 1024, 4096)
    task: Task = Task("small", VOCAB_SIZE, 256, context=128, batch=8, num_steps=200, learning_rate=3e-4)
    time_limit_s: float = 0.4
    case_timeout_s: float = 180.0


MIXED_PRECISION: dict[str, MixedPrecisionGrid] = {
    "smoke": MixedPrecisionGrid(
        sizes=("nano",),
        contexts=(32,),
        operator_sizes=("nano",),
        operator_context=4,
        transformer="nano",
        norm_shape=(16, 256),
        norm_scales=_DECADES[::4],
        epilogue_shape=(128, 256),
        epilogue_depths=(256,),
        task=Task("nano", 64, 64, context=16, batch=1, num_steps=12, learning_rate=3e-3),
        time_limit_s=0.05,
        case_timeout_s=120.0,
    ),
    "full": MixedPrecisionGrid(),
}


@dataclass(frozen=True)
class NsysAnalysisGrid:
    """The cases of notebook 02 in one profile.

    `contexts`: with eager attention, in every precision. `flash_contexts`: by precision, with FlashAttention.
    `without_optimizer`: sizes whose AdamW state fits no GPU of today, so that forward and backward are captured alone.
    `timelines`: (size, context, precision, attention) of the training steps that are kept launch by launch.
    """

    sizes: tuple[str, ...] = _PUBLIC_SIZES
    contexts: tuple[int, ...] = _CONTEXTS
    precisions: tuple[str, ...] = ("fp32", "bf16")
    flash_contexts: dict[str, tuple[int, ...]] = field(default_factory=lambda: {"fp32": (512, 2048), "bf16": _CONTEXTS})
    without_optimizer: tuple[str, ...] = ("10b",)
    timelines: tuple[tuple[str, int, str, str], ...] = (
        ("small", 512, "fp32", "eager"),
        ("small", 512, "bf16", "eager"),
        ("small", 512, "bf16", "auto"),
    )
    case_timeout_s: float = 300.0


NSYS_ANALYSIS: dict[str, NsysAnalysisGrid] = {
    "smoke": NsysAnalysisGrid(
        sizes=("nano", "micro"),
        contexts=(32, 64),
        flash_contexts={"fp32": (64,)},
        without_optimizer=(),
        timelines=(("nano", 64, "fp32", "eager"),),
        case_timeout_s=120.0,
    ),
    "full": NsysAnalysisGrid(),
}


@dataclass(frozen=True)
class BlockShape:
    """One transformer block and its input, in fp32 with eager attention."""

    d_model: int
    d_ff: int
    num_heads: int
    context: int
    batch: int


_CHECKPOINT_PLANS = ("none", "1", "2", "4", "6", "8", "16", "32", "6/1")


@dataclass(frozen=True)
class MemoryGrid:
    """The cases of notebook 04 in one profile.

    `timelines`: (size, context, precision) of the steps whose every allocation is recorded.
    `block`: whose residuals are listed. `checkpointed`: (size, context, precision) of the steps with recomputed blocks.
    `checkpoint_plans`, by implementation of attention: see `accounting.checkpoint_plan`.
    `time_limit_s` and `case_timeout_s` are as in notebook 01.
    """

    sizes: tuple[str, ...] = _PUBLIC_SIZES
    contexts: tuple[int, ...] = _CONTEXTS
    precisions: tuple[str, ...] = ("fp32", "bf16")
    timelines: tuple[tuple[str, int, str], ...] = (("2.7b", 512, "fp32"), ("2.7b", 512, "bf16"))
    block: BlockShape = BlockShape(2560, 10240, 16, 2048, 4)
    checkpointed: tuple[str, int, str] = ("2.7b", 2048, "bf16")
    checkpoint_plans: dict[str, tuple[str, ...]] = field(
        default_factory=lambda: {"eager": _CHECKPOINT_PLANS, "sdpa_flash": _CHECKPOINT_PLANS}
    )
    time_limit_s: float = 2.0
    case_timeout_s: float = 180.0


MEMORY: dict[str, MemoryGrid] = {
    "smoke": MemoryGrid(
        sizes=("nano",),
        contexts=(32, 64),
        timelines=(("nano", 64, "fp32"),),
        block=BlockShape(64, 256, 4, 128, 2),
        checkpointed=("nano", 64, "fp32"),
        checkpoint_plans={"eager": ("none", "1", "2/1"), "sdpa_flash": ("none",)},
        time_limit_s=0.05,
        case_timeout_s=120.0,
    ),
    "full": MemoryGrid(),
}


GRIDS: dict[str, dict] = {
    "01_benchmarking": BENCHMARKING,
    "02_nsys_analysis": NSYS_ANALYSIS,
    "03_mixed_precision": MIXED_PRECISION,
    "04_memory": MEMORY,
    "05_attention": ATTENTION,
    "06_flash_attention": FLASH_ATTENTION,
}
"""Each notebook's grid by profile."""

NARROWED = {"sizes": "size", "contexts": "context", "lengths": "length", "d_heads": "head dimension"}
"""Parameters of notebooks that name the values of a grid to be measured, and what one such value is called."""


def chosen_profile(profile: str, default: str) -> str:
    """Returns the profile that is meant: `default` for "auto"; raises RequestError for one that does not exist."""
    if profile not in (AUTO_PROFILE, *PROFILES):
        raise RequestError(f"unknown profile {profile!r}; accepted: {', '.join([AUTO_PROFILE, *PROFILES])}")
    return default if profile == AUTO_PROFILE else profile


def narrowed(grids: dict, profile: str, parameter: str, wanted: Sequence = ()) -> list:
    """Returns the `wanted` values of `grids[profile]` in the grid's order; all of them where none is named.

    Args:
        parameter: one of NARROWED.
        wanted: values; a size may be an alias.

    Raises RequestError for a value that the profile does not have; it names the profile that has it, if one does.
    """
    accepted = _values(grids[profile], parameter)
    if parameter == "sizes":
        wanted = [model_config(str(name)).name for name in wanted]
    for value in wanted:
        if value not in accepted:
            text = f"{NARROWED[parameter]} {value!r} is not in profile {profile!r}"
            others = [name for name, grid in grids.items() if value in _values(grid, parameter)]
            hint = f'; set profile = "{others[0]}"' if others else ""
            raise RequestError(f"{text}; accepted: {', '.join(map(str, accepted))}{hint}")
    return [value for value in accepted if not wanted or value in wanted]


def _values(grid, parameter: str) -> list:
    values = list(getattr(grid, parameter))
    if parameter == "lengths" and isinstance(grid, AttentionGrid):
        values += [length for longer in grid.long_lengths.values() for length in longer]
    return values if parameter == "sizes" else sorted(set(values))
