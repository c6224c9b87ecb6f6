"""One training step of the 8.1 B model of a course's leaderboard of 2026, two sequences of 32,768
tokens on two GPUs: off the shelf, then with one part of this package after another.

From zero_grad to AdamW, computed in bf16, sharded by PyTorch's fully_shard in every row, so that a
row differs from the one before in what its name says alone. Weights, moments and gradients are
fp32: the leaderboard wants the model's inputs and outputs in bf16 and says nothing of its state.

What a rank holds, by hand (P = 8.126e9 parameters, T = 32,768 tokens, C = 4,096; GB are 10⁹ bytes):

| | GB |
|---|---:|
| fp32 weights and moments, 12 P / 2 | 48.8 |
| fp32 gradients, 4 P / 2, at the end of backward, when activations are gone | 16.3 |
| the inputs of 34 blocks, 2 T C each (0.268) | 9.1 |
| and the outputs of their attention, with the log-sum-exp | 9.3 |
| and the other products that backward reads (q, k, v, out, gate, up), 2.52 a block | 85.6 |
| one block at work, or the loss, with gathered weights and gradients on their way | 10 |

Backward of the last block is the peak. 80 GB hold the state, all inputs and attention outputs, 77
GB, and the products of a block or two; 141 GB those of 26 to 28. For its bytes attention costs most
to recompute: 73 ms a GB on an H100, a product 6. `kept` decides by these forms.

Source: github.com/stanford-cs336/assignment2-systems-leaderboard; Korthikanti et al. 2022,
"Reducing Activation Recomputation in Large Transformer Models" (what is worth keeping).
"""

import functools
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from labkit import accounting
from labkit.configs import STEP_8B_WAYS, ModelConfig, model_config
from labkit.device import Device
from labkit.experiments.sections import empty_cache, memory_bytes, sustained_share
from labkit.experiments.shared_step import RankSeen, own_tokens, slowest, time_steps
from labkit.experiments.sweep import Case, Measured
from labkit.kernels.adamw import FusedAdamW
from labkit.kernels.cross_entropy import linear_cross_entropy
from labkit.models.transformer import Block, RotaryEmbedding, TransformerLM
from labkit.monitor import Monitor
from labkit.parallel.launch import rank_device

NUM_STEPS = 10
NUM_TIMED = 5
"""The last of the steps, back to back; those before them bring the GPU to its power limit."""

ADAMW = {"lr": 1e-5}

CHUNK_ROWS = 2048
"""Tokens whose logits are there at a time, off the shelf: 0.6 GB in bf16."""

RESERVED_BYTES = 3e9
"""What CUDA, NCCL and cuBLAS take of a GPU's memory, and what the allocator cannot use."""

LARGEST_DEVIATION = 0.01
"""Relative, of a loss from that of the first row; beyond it a row has no time."""

ATEN = torch.ops.aten
ATTENTION = [
    torch.ops.labkit.flash_attention.default,
    ATEN._scaled_dot_product_cudnn_attention.default,
    ATEN._scaled_dot_product_flash_attention.default,
    ATEN._scaled_dot_product_efficient_attention.default,
    ATEN._scaled_dot_product_flash_attention_for_cpu.default,
]
CONTEXTS = {
    kept: functools.partial(create_selective_checkpoint_contexts, operators)
    for kept, operators in {
        "input": [],
        "attention": ATTENTION,
        "products": [*ATTENTION, ATEN.mm.default],
    }.items()
}
"""By what a block keeps for backward besides its input: nothing, the output of attention, those of
all products. The rest is computed again. In this order they take more memory.
"""


@dataclass(frozen=True)
class Way:
    """What a row's step is made of.

    Attributes:
        attention, impl: as `TransformerLM` takes them; "fused" has our norms, rotation, SwiGLU and
            loss.
        is_planned: blocks keep what fits, see `kept`; otherwise their inputs alone.
        is_our_adamw: as `update_in_backward`, otherwise torch's fused one after backward.
    """

    attention: str = "sdpa"
    impl: str = "eager"
    is_planned: bool = False
    is_our_adamw: bool = False


_WAYS = (
    Way(),
    Way("auto"),
    Way("auto", "fused"),
    Way("auto", "fused", True),
    Way("auto", "fused", True, True),
    Way("sdpa", "fused", True, True),
)
WAYS = dict(zip(STEP_8B_WAYS, _WAYS, strict=True))


def kept(config: ModelConfig, context: int, world_size: int, room: float) -> list[str]:
    """Returns what each block keeps, a key of CONTEXTS, where a rank has `room` bytes.

    The last blocks keep most: backward begins with them, before gradients take their room. On an
    H100 these forms say 79.7 GB where 76.8 were taken, and what looks spare is not: with the
    products of two more blocks, 81.8 GB, the last row took 0.88 of the first's time for 0.81, since
    the allocator waits for the GPU and gives memory back.
    """
    stream = 2 * context * config.d_model
    hidden = 2 * context * config.d_ff
    state = 12 * accounting.num_parameters(config) / world_size
    # Of the block at work all results and their gradients, two gathered blocks, gradients in bf16
    # and on their way in fp32; the loss has the head's weight and gradient in the same dtypes.
    work = 15 * stream + 5 * hidden + 3 * accounting.block_gradient_bytes(config)
    loss = 2 * stream + 14 * config.vocab_size * config.d_model
    room -= state + max(work, loss) + config.num_layers * stream
    sizes = {
        "attention": stream + 4 * context * config.num_heads,
        "products": 4 * stream + 2 * hidden,
    }
    levels = ["input"] * config.num_layers
    for less, more in pairwise(CONTEXTS):
        number = min(max(int(room / sizes[more]), 0), levels.count(less))
        room -= number * sizes[more]
        levels[len(levels) - number :] = [more] * number
    return levels


def _stream(block: Block, x_BTC: Tensor, rotary: RotaryEmbedding) -> Tensor:
    out = Block.forward(block, x_BTC, rotary)
    # A fused block leaves its last addition to the next norm; two tensors to keep are too many.
    return out[0] + out[1] if isinstance(out, tuple) else out


def _run_block(block: Block, x_BTC: Tensor, rotary: RotaryEmbedding, *, kept: str) -> Tensor:
    """Returns a block's output. Compiled around the checkpoint, backward leaves out what it does
    not read, the block's last product say.
    """
    return checkpoint(
        _stream,
        block,
        x_BTC,
        rotary,
        use_reentrant=False,
        preserve_rng_state=False,
        context_fn=CONTEXTS[kept],
    )


def _chunk_loss(norm: nn.Module, x_NC: Tensor, weight_VC: Tensor, targets_N: Tensor) -> Tensor:
    return F.cross_entropy((norm(x_NC) @ weight_VC.T).float(), targets_N, reduction="sum")


class _Loss(nn.Module):
    """The last norm, the head and the mean loss, whose logits are never all there."""

    def __init__(self, model: TransformerLM, chunk_loss: Callable[..., Tensor]):
        super().__init__()
        self.norm = model.norm
        self.head = model.head
        self.is_fused = model.impl == "fused"
        self.chunk_loss = chunk_loss

    def forward(self, x_BTC: Tensor, targets_BT: Tensor) -> Tensor:
        weight = self.head.weight
        if self.is_fused:
            return linear_cross_entropy(self.norm(x_BTC), weight, targets_BT)
        chunks = zip(
            x_BTC.flatten(0, 1).split(CHUNK_ROWS),
            targets_BT.flatten().split(CHUNK_ROWS),
            strict=True,
        )
        losses = [
            checkpoint(self.chunk_loss, self.norm, x_NC, weight, targets_N, use_reentrant=False)
            for x_NC, targets_N in chunks
        ]
        return torch.stack(losses).sum() / targets_BT.numel()


def update_in_backward(parameters: Iterable[nn.Parameter]) -> None:
    """Has `FusedAdamW` update each shard on the stream that reduced its gradient, which then goes.

    Otherwise all gradients lie in that stream's memory until the next step, and activations, of
    another stream, have the allocator wait for the GPU and give it back first: three times a step
    on an H100.
    """
    for parameter in parameters:
        shard = nn.Parameter(parameter.detach().to_local())
        optimizer = FusedAdamW([shard], **ADAMW)

        def update(parameter, shard=shard, optimizer=optimizer) -> None:
            shard.grad = parameter.grad.to_local()
            optimizer.step()
            shard.grad = parameter.grad = None

        parameter.register_post_accumulate_grad_hook(update)


class Board(nn.Module):
    """A row's model, each block and the loss sharded by itself, and its optimizer, on one sequence
    of this rank's own.

    Args:
        parameters: of the case: size, context, precision ("bf16" or "fp32").
        room: bytes that a rank has; backend: as torch.compile takes it.
    """

    def __init__(self, way: Way, parameters: dict, room: float, backend: str):
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # takes seconds

        super().__init__()
        config = model_config(parameters["size"])
        context = parameters["context"]
        self.levels = ["input"] * config.num_layers
        if way.is_planned:
            self.levels = kept(config, context, dist.get_world_size(), room)
        torch.manual_seed(0)
        model = TransformerLM(
            config,
            max_context=context,
            attention=way.attention,
            impl=way.impl,
            device=rank_device(),
        )
        # Every row has code of its own.
        torch._dynamo.config.recompile_limit = 64
        compiled = functools.partial(torch.compile, backend=backend, dynamic=False)
        run = compiled(_run_block, fullgraph=True)
        self.embedding = model.embedding
        self.blocks = model.blocks
        self.rotary = model.rotary
        self.loss = _Loss(model, compiled(_chunk_loss))
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if parameters["precision"] == "bf16" else None,
            reduce_dtype=torch.float32,
        )
        # Backward begins with the loss: freed, it would be gathered again at once.
        fully_shard(self.loss, mp_policy=policy, reshard_after_forward=False)
        for module in (self.embedding, *self.blocks, self):
            fully_shard(module, mp_policy=policy)
        for block, level in zip(self.blocks, self.levels, strict=True):
            # What is compiled lies within the hooks that gather; all blocks share it.
            block.forward = functools.partial(run, block, kept=level)
        self.optimizer = None
        if way.is_our_adamw:
            update_in_backward(self.parameters())
        else:
            self.optimizer = torch.optim.AdamW(self.parameters(), fused=True, **ADAMW)
        self.tokens, self.targets = own_tokens(config, 1, context)
        self.losses: list[Tensor] = []

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        x_BTC = self.embedding(tokens_BT)
        for block in self.blocks:
            x_BTC = block(x_BTC, self.rotary)
        return self.loss(x_BTC, targets_BT)

    def step(self) -> None:
        """Trains one step and notes its loss on this rank."""
        self.zero_grad()
        # On a GPU, torch 2.11's fully_shard fails where its root gets no argument.
        loss = self(self.tokens, self.targets)
        loss.backward()
        if self.optimizer:
            self.optimizer.step()
        self.losses.append(loss.detach())


def board_rank(
    phases: Sequence[str],
    parameters: dict,
    backend: str = "inductor",
    room: float | None = None,
) -> RankSeen:
    """Trains NUM_STEPS steps with each of WAYS from the same start and yields (way, what this rank
    saw).
    """
    device = Device(rank_device().type, "", "")
    if device.kind == "cuda":
        # Blocks of many sizes come and go; cut from fixed segments they would not fit.
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    room = room or memory_bytes(device) - RESERVED_BYTES
    reference = None
    for way in phases:
        board = Board(WAYS[way], parameters, room, backend)
        if device.kind == "cuda":
            torch.cuda.reset_peak_memory_stats()
        for _ in range(NUM_STEPS - NUM_TIMED):
            board.step()
        with Monitor(device.kind) as monitor:
            samples_ms = time_steps(board.step, NUM_TIMED)
        watts = [one.power_mw / 1e3 for one in monitor.readings if one.power_mw]
        mean = torch.stack(board.losses)
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        losses = mean.tolist()
        reference = reference or losses
        seen = {
            "losses": losses,
            "reference": reference,
            "samples_ms": samples_ms,
            "watts": statistics.fmean(watts) if watts else None,
            "peak_bytes": torch.cuda.max_memory_allocated(),  # 0 without a GPU
            "levels": board.levels,
        }
        del board
        empty_cache()
        yield way, seen


def measured(case: Case, ranks: list[dict]) -> Measured:
    """Returns the record of a row: times of the slower rank, memory of the one with most, watts of
    the first GPU.

    Raises ValueError for losses that are not those of the first row of the launch.
    """
    parameters = case.parameters
    first = ranks[0]
    losses = first["losses"]
    reference = first["reference"]
    deviation = max(
        abs(loss / expected - 1) for loss, expected in zip(losses, reference, strict=True)
    )
    if not deviation <= LARGEST_DEVIATION:
        raise ValueError(f"losses {losses}, {reference} expected")
    timing = slowest(ranks)
    metrics = timing.metrics()
    seconds = metrics["mean_ms"] / 1e3
    flops = accounting.phase_flops(
        model_config(parameters["size"]), 1, parameters["context"], "train_step", causal=True
    )
    metrics |= {
        "sustained_ms": metrics["mean_ms"],
        "sustained_tflops": flops / seconds / 1e12,
        "tokens_per_s": len(ranks) * parameters["context"] / seconds,
        "loss": losses[-1],
        "loss_deviation": deviation,
        "watts": first["watts"],
        "peak_bytes": max(rank["peak_bytes"] for rank in ranks) or None,
    }
    metrics |= sustained_share(case.ceilings, metrics, parameters["precision"])
    return Measured(
        metrics,
        parameters,
        {f"num_{level}": first["levels"].count(level) for level in CONTEXTS},
        {"step_ms": list(timing.samples_ms), "loss": losses},
        {"method": timing.method},
    )
