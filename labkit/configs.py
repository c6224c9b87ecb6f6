"""What is measured: model sizes, and the grid of cases of each notebook in each profile, from
`data/grids.toml`.

Nothing here imports torch, so the command line and the report can name sizes without it.
"""

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, make_dataclass
from pathlib import Path
from typing import Any

BATCH_SIZE = 4
RMS_NORM_EPS = 1e-5

REFERENCE_DEVICE = "nvidia-h200"
"""Slug of the device that the committed notebooks and the top-level report show."""

THIS_DEVICE = "this"
"""Stands for the slug of the machine that it is used on."""

ALL_DEVICES = ("07_distributed",)
"""Notebooks that measure all GPUs of a machine together. Their records lie in a folder such as
"2x-nvidia-h200".
"""

OWN = ("05_attention", "06_flash_attention", "08_siglip2")
"""Notebooks whose parameter `own` names a function of the user's, which joins their contests."""

REPOSITORY = Path(__file__).resolve().parent.parent
IS_CLONE = (REPOSITORY / "pyproject.toml").is_file()
"""Whether this is a clone of the repository, not an installed wheel."""

FIGURES = REPOSITORY / "figures" if IS_CLONE else Path.cwd() / "figures"
DATA = Path(__file__).resolve().parent / "data"
NOTEBOOKS = DATA / "notebooks"
"""In a clone a link to notebooks/."""


class RequestError(ValueError):
    """The user asked for something that is not possible: one line, on the command line and in a
    notebook.
    """

    def _render_traceback_(self) -> list[str]:  # what IPython shows in place of a traceback
        return [f"{type(self).__name__}: {self}"]


def check_known(what: str, value: Any, accepted: Iterable[str]) -> None:
    """Raises RequestError, which names the accepted ones, for a value that is none of them."""
    if value not in tuple(accepted):  # a list has no place in a dict
        raise RequestError(f"unknown {what} {value!r}; accepted: {', '.join(accepted)}")


@dataclass(frozen=True)
class ModelConfig:
    """Dimensions of a decoder-only language model; without a vocabulary, of an encoder that masks
    nothing.

    The last five are of published models, which are planned but not built here: a head's width
    where it is not d_model / num_heads, the number of key heads where queries share them, whether
    the feed-forward layer has three matrices and not two, whether the head multiplies by the
    embedding's table, and rows of width d_model in other tables, such as that of positions.
    """

    name: str
    d_model: int
    d_ff: int
    num_layers: int
    num_heads: int
    vocab_size: int = 10_000
    rope_theta: float = 10_000.0
    head_dim: int = 0
    num_key_heads: int = 0
    is_gated: bool = True
    is_tied: bool = False
    num_rows: int = 0

    @property
    def d_head(self) -> int:
        return self.head_dim or self.d_model // self.num_heads

    @property
    def attention_widths(self) -> tuple[int, int]:
        """Widths of all queries and of all keys."""
        return self.num_heads * self.d_head, (self.num_key_heads or self.num_heads) * self.d_head


# Beside each the public lists that have it. "xl" is a 1.998 B model in that of 2025 and a 3.407 B
# model in that of 2026, so a bare "xl" is not accepted anywhere.
SIZES: dict[str, ModelConfig] = {
    config.name: config
    for config in (
        ModelConfig("nano", 128, 512, 2, 2),  # labkit's smoke profile
        ModelConfig("micro", 192, 768, 3, 3),  # the same
        ModelConfig("small", 768, 3072, 12, 12),  # 2025 and 2026
        ModelConfig("medium", 1024, 4096, 24, 16),  # 2025 and 2026
        ModelConfig("large", 1280, 5120, 36, 20),  # 2025 and 2026
        ModelConfig("xl-2025", 1600, 6400, 48, 25),  # 2025
        ModelConfig("2.7b", 2560, 10240, 32, 32),  # 2025; xl of 2026
        ModelConfig("8b", 4096, 11008, 34, 32, vocab_size=151_936),  # 2026's leaderboard
        ModelConfig("10b", 4608, 12288, 50, 36),  # 2026
    )
}
SIZE_ALIASES = {"xl-2026": "2.7b", "2.7b-2025": "2.7b", "10b-2026": "10b"}


def model_config(name: str) -> ModelConfig:
    """Returns the size called `name` (or an alias of it); raises RequestError that names the
    accepted ones.
    """
    if name == "xl":
        raise RequestError(
            "size 'xl' means two models: say 'xl-2025' (1.998 B) or 'xl-2026' (3.407 B, also "
            "'2.7b')"
        )
    check_known("size", name, [*SIZES, *SIZE_ALIASES])
    return SIZES[SIZE_ALIASES.get(name, name)]


@dataclass(frozen=True)
class Siglip2Config:
    """Dimensions of a SigLIP 2 vision encoder of images in patches.

    `patch_dim` is the values of a patch, `position_side` the rows and columns of the table of
    position embeddings, `dropout` the share of the attention output that is dropped in training.
    """

    name: str
    d_model: int
    d_ff: int
    num_layers: int
    num_heads: int
    patch_dim: int = 16 * 16 * 3
    position_side: int = 16
    dropout: float = 0.1

    @property
    def d_head(self) -> int:
        return self.d_model // self.num_heads


LAYER_NORM_EPS = 1e-6

SIGLIP2_SIZES: dict[str, Siglip2Config] = {
    config.name: config
    for config in (
        Siglip2Config("tiny", 144, 536, 2, 2, patch_dim=48, position_side=4),
        Siglip2Config("so400m", 1152, 4304, 27, 16),
    )
}


def siglip2_config(name: str) -> Siglip2Config:
    """Returns the encoder's size called `name`; raises RequestError that names the accepted
    ones.
    """
    check_known("size", name, SIGLIP2_SIZES)
    return SIGLIP2_SIZES[name]


PRECISIONS = ("fp32", "tf32", "bf16")
"""fp32: TF32 off. tf32: fp32 tensors, TF32 matmuls. bf16: autocast to bfloat16 over fp32
parameters.
"""

COMPILE_MODES = ("none", "regional", "whole")
"""none: eager. regional: each block through torch.compile. whole: the model through torch.compile.
"""

STEP_WAYS = ("eager", "compiled", "ours")
"""Of a planned step. eager: stock PyTorch. compiled: each block. ours: compiled with this package's
kernels.
"""

GPU_WAYS = ("ddp", "zero1", "fsdp", "tp")
"""Of a planned step. ddp: every rank holds all. zero1: the optimizer's moments are shared out.
fsdp: also weights and gradients. tp, tensor parallel: every matrix, for one batch of all ranks.
"""

LAUNCH_BOUND = 0.9
"""Share of the time until work is done above which issuing it sets the pace: the device waits for
the host.
"""

STEP_PARTS = {
    "exposed": 1,
    "contention": 1,
    "drift": 1,
    "added": 1,
    "idle": 1,
    "saved": -1,
}
"""What makes a step of several ranks longer than alone, with its sign; see `experiments.split`."""

STEP_8B_WAYS = (
    "off the shelf",
    "our attention",
    "and our fused operations",
    "and recomputing little",
    "and our AdamW, in backward",
    "all but our attention",
)
"""Each adds to the one above it, but for the last."""

PHASES = ("inference", "forward", "backward", "forward_backward", "optimizer_step", "train_step")
STEP_PHASES = ("forward", "backward", "optimizer_step", "train_step")
"""Of PHASES, what notebook 01 times of every size, context and precision."""

COMPILE_PHASES = ("compile", "forward", "forward_backward", "train_step")
EXECUTION_PHASES = ("train_step", "graph_step")
"""A training step as it is called, and the same replayed from one CUDA graph."""

WARMUP_PHASES = ("forward", "forward_backward")
WARMUP_COUNTS = (0, 1, 2, 5)
WARMUP_MEASURED_STEPS = 10

PROFILES = ("smoke", "full", "key", "quick")
AUTO_PROFILE = "auto"
"""Stands for "full" on a GPU and for "smoke" elsewhere."""

PASSES = ("forward", "backward", "forward_backward")
"""What is timed of an operation in notebook 06; each directly, none by subtraction."""

MATERIALISING = ("eager", "compiled", "sdpa_math", "triton_compiled")
"""Implementations that write the scores to memory. Each is timed alone; all others in turn, in one
process.
"""

MIXED_PRECISIONS = ("bf16", "fp16", "bf16_pure")
"""What notebook 03 times in one session. bf16: as in PRECISIONS. fp16: autocast to float16 over
fp32 parameters, the loss scaled. bf16_pure: parameters, gradients and optimizer state in bfloat16,
no autocast.
"""

MIXED_PHASES = ("forward", "backward", "train_step")

NORM_SETTINGS = {"centred": (0.0, 1e-5), "offset": (16.0, 1e-5), "small epsilon": (0.0, 1e-8)}
"""Inputs of a normalisation by name: (mean in standard deviations, epsilon)."""


class Grid:
    """The cases of one notebook in one profile; its attributes are the notebook's keys in
    `data/grids.toml`.
    """


def _grid_value(value):
    """Returns a value of TOML with lists as tuples, and keys that are digits as numbers."""
    if isinstance(value, list):
        return tuple(map(_grid_value, value))
    if isinstance(value, dict):
        return {int(k) if k.isdigit() else k: _grid_value(v) for k, v in value.items()}
    return value


def read_grids(text: str) -> dict[str, dict[str, Grid]]:
    """Returns the grids in the TOML `text` by notebook and profile.

    A table that is not there is as "full", and one that lacks keys is for these. Raises TypeError
    for a key that "full" has not.
    """
    grids = {}
    for notebook, tables in tomllib.loads(text).items():
        grid = make_dataclass(notebook, tables["full"], bases=(Grid,), frozen=True)
        grids[notebook] = {
            profile: grid(**_grid_value(tables["full"] | tables.get(profile, {})))
            for profile in PROFILES
        }
    return grids


GRIDS = read_grids((DATA / "grids.toml").read_text(encoding="utf-8"))
"""Each notebook's grid by profile."""


NARROWED = {
    "sizes": "size",
    "contexts": "context",
    "lengths": "length",
    "d_heads": "head dimension",
    "world_sizes": "number of ranks",
    "workload": "workload",
}
"""Parameters of notebooks that name the values of a grid to be measured, and what one such value is
called.
"""


def chosen_profile(profile: str, default: str) -> str:
    """Returns the profile that is meant: `default` for "auto"; raises RequestError for one that
    does not exist.
    """
    check_known("profile", profile, (AUTO_PROFILE, *PROFILES))
    return default if profile == AUTO_PROFILE else profile
