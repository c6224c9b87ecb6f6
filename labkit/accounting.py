"""Closed forms: parameters, FLOPs, bytes and the bounds that follow from them. No torch.

Conventions: 2 FLOPs per multiply-add; a backward pass costs twice its forward; elementwise work,
norms, softmax and the embedding gather are not counted. Attention is counted in full (every query
against every key, which an implementation that masks after the product executes) or, with `causal`,
by the half that is not masked.

Of communication: W is a rank's bandwidth in B/s in one direction. A ring moves (N−1)/N of the size
S = that of the larger of a rank's input and output (once, for an all-reduce twice).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import Any

from labkit.configs import PHASES, PRECISIONS, ModelConfig, RequestError, check_known

PHASE_FORWARDS = {
    "inference": 1,
    "forward": 1,
    "backward": 2,
    "forward_backward": 3,
    "train_step": 3,
}
"""FLOPs of a phase in units of one forward pass. The optimizer step is bound by bytes, not FLOPs.
"""


def num_parameters(config: ModelConfig) -> int:
    """Returns the number of parameters, embeddings and head included."""
    num_tables = 1 if config.is_tied else 2
    num_rows = num_tables * config.vocab_size + config.num_rows
    return num_rows * config.d_model + num_block_parameters(config) + config.d_model


def num_block_parameters(config: ModelConfig) -> int:
    """Returns the parameters of all blocks: four attention and three SwiGLU matrices, two norm
    gains each.
    """
    return config.num_layers * (_block_matrix_parameters(config) + 2 * config.d_model)


def _block_matrix_parameters(config: ModelConfig) -> int:
    num_matrices = 3 if config.is_gated else 2
    return config.d_model * (2 * sum(config.attention_widths) + num_matrices * config.d_ff)


def num_matmul_parameters(config: ModelConfig) -> int:
    """Returns the parameters that multiply every token: no embedding table (a gather), no norm
    gains.
    """
    return config.num_layers * _block_matrix_parameters(config) + config.vocab_size * config.d_model


def phase_flops(
    config: ModelConfig, batch: int, context: int, phase: str, *, causal: bool
) -> int | None:
    """Returns FLOPs of a phase over batch × context tokens, None for the optimizer step; ValueError
    for an unknown phase.

    A forward pass has 2 a parameter and token, and 4·B·T²·L times the heads' width of QKᵀ and PV,
    half of it when causal.
    """
    if phase == "optimizer_step":
        return None
    check_known("phase", phase, PHASES)
    products = 2 * num_matmul_parameters(config) * batch * context
    attention = 4 * batch * context**2 * config.attention_widths[0] * config.num_layers
    return PHASE_FORWARDS[phase] * (products + attention // (1 + causal))


def parameter_bytes(config: ModelConfig) -> int:
    """Returns bytes of the fp32 parameters; the gradients take as much."""
    return 4 * num_parameters(config)


def optimizer_state_bytes(config: ModelConfig) -> int:
    """Returns bytes of AdamW's two fp32 moments."""
    return 8 * num_parameters(config)


def optimizer_step_bytes(config: ModelConfig) -> int:
    """Returns the fewest bytes a fused fp32 AdamW step moves: it reads p, g, m, v and writes p, m,
    v.
    """
    return 7 * 4 * num_parameters(config)


def block_gradient_bytes(config: ModelConfig) -> int:
    """Returns bytes of the parameter gradients that one block's backward pass makes, fp32."""
    return 4 * num_block_parameters(config) // config.num_layers


def loss_chunk_rows(vocabulary: int, element_bytes: int) -> int:
    """Returns how many rows of logits our loss with the head has at a time: 128 MiB of them.

    Each chunk reads and writes all of the head's gradient in fp32: of few rows, that would take
    longer than the product.
    """
    return max(2**27 // (vocabulary * element_bytes) // 128 * 128, 2048)


DEVICE_KINDS = ("cuda", "cpu")
"""Kinds of device: what a pass holds depends on PyTorch's implementation there."""


COMPILED_KEEPS = 0.62
FUSED_KEEPS = 0.67
"""Shares of a block's activations, scores aside, that are left when it is compiled, and when it is
compiled with our kernels: what is cheap is computed again. Not derived: they put the peaks of 50
recorded steps of five sizes within 3 %.
"""


@dataclass
class _Pass:
    """A pass over batch × context tokens: numbers of elements, and bytes of its parts.

    Args and Raises as in `block_activation_bytes`.
    """

    config: ModelConfig
    batch: int
    context: int
    precision: str = "fp32"
    attention: str = "eager"
    device_kind: str = "cpu"
    is_compiled: bool = False
    shards: int = 1
    loss_in_chunks: bool = False

    def __post_init__(self):
        check_known("precision", self.precision, PRECISIONS)
        check_known("attention", self.attention, ("eager", "fused"))
        check_known("kind of device", self.device_kind, DEVICE_KINDS)
        config = self.config
        self.is_bf16 = self.precision == "bf16"
        self.is_fused = self.attention == "fused"
        self.is_cuda = self.device_kind == "cuda"
        # Autocast computes the softmax in fp32 on CUDA alone.
        self.casts_softmax = self.is_bf16 and self.is_cuda
        # Bytes of an element of the matrix products' inputs and results, and of autocast's copies.
        self.element = element = 2 if self.is_bf16 else 4
        copy = 2 if self.is_bf16 else 0

        # Elements: the residual, the logits, one block's scores, one mask (a byte each), and the
        # rotary tables, two for q and two for k.
        d = config.d_model
        self.tokens = tokens = self.batch * self.context
        self.stream = stream = tokens * d
        self.logits = tokens * config.vocab_size
        self.scores = self.batch * config.num_heads * self.context**2
        self.mask = self.context**2
        rotary = 4 * self.context * config.d_head

        # Bytes. Autocast's copies of all blocks' matrices are kept until it is left; shared out,
        # matrices are gathered in 16 bits for one block at a time.
        matrix_copies = copy * _block_matrix_parameters(config) if self.shards == 1 else 0
        self.cast_bytes = config.num_layers * matrix_copies
        self.head_copies = copy * (tokens + config.vocab_size) * d
        # Input, normalized output, reciprocal rms and, if matrices read it uncast, scaled output.
        norm = 4 * ((2 if self.is_bf16 else 3) * stream + tokens)
        # What attention keeps besides q, k, v and its output.
        self.log_sum_exp_bytes = scores_bytes = 4 * config.num_heads * tokens
        if not self.is_fused:
            per_score = element
            if self.casts_softmax:
                # In fp32 and, unless it is compiled, in bf16.
                per_score = 4 if self.is_compiled else 6
            scores_bytes = per_score * self.scores + self.mask
        hidden = (4 if config.is_gated else 2) * config.d_ff
        widths = element * tokens * (2 * sum(config.attention_widths) + hidden)
        kept = 2 * norm + copy * (5 * stream + rotary) + widths
        if self.is_compiled:
            kept = round((FUSED_KEEPS if self.loss_in_chunks else COMPILED_KEEPS) * kept)
        self.block_bytes = kept + scores_bytes + matrix_copies
        # What a block keeps up to the scores: the norm, q, k and v, the copies they were made from.
        attention_copies = copy * (3 * stream + 3 * d * d + rotary)
        self.attention_part_bytes = norm + 3 * element * stream + attention_copies
        if self.loss_in_chunks and config.vocab_size:
            # The gradients of hidden states and head, made in the forward pass, and one chunk.
            vocabulary = config.vocab_size
            self.logits = 0
            self.head_bytes = norm + self.head_copies + element * stream + 4 * vocabulary * d
            rows = min(tokens, loss_chunk_rows(vocabulary, element))
            self.loss_bytes = element * rows * vocabulary
        else:
            # Final norm, log-probabilities, loss and its count.
            self.head_bytes = norm + 4 * self.logits + self.head_copies + 8
            # The logits and, under autocast, their copy in fp32.
            self.loss_bytes = (6 if self.is_bf16 else 4) * self.logits
        # What a forward pass with gradient adds: what it keeps, and the loss.
        self.made_bytes = config.num_layers * self.block_bytes + self.head_bytes
        # What all blocks but the last keep.
        self.earlier_bytes = (config.num_layers - 1) * self.block_bytes
        # Token and target indices (int64), rotary tables.
        self.resident_bytes = parameter_bytes(config) + 2 * 8 * tokens + 2 * rotary


def block_activation_bytes(config: ModelConfig, batch: int, context: int, **known: Any) -> int:
    """Returns bytes one block keeps for its backward pass, its input included and its parameters
    not.

    fp32, per token: ten tensors of width d (the residual before each norm, each norm's normalized
    and scaled output, rotated q and k, v, and the heads' output), four of width d_ff (gate, up,
    silu(gate) and their product) and two of width 1 (the norms' reciprocal root mean squares). bf16
    is autocast over fp32 parameters: residuals and norms stay fp32. The scaled output is not kept,
    but each of the five projections that read it keeps its own bf16 copy. All the rest is bf16, and
    there are copies of the block's matrices and of the rotary tables, two for q and two for k.
    Eager attention keeps a row of probabilities per head and query and, once for all heads, a row
    of the causal mask (one byte an element). On CUDA, autocast computes the softmax in fp32 and the
    product with v in bf16, and both copies are kept; on the CPU there is only the one in bf16.
    Fused attention keeps the log-sum-exp (fp32) instead.

    Args:
        known: precision ("fp32", the default, "tf32" or "bf16"), attention ("eager", the default,
            or "fused"), device_kind (one of DEVICE_KINDS, by default "cpu"), is_compiled,
            loss_in_chunks (as `kernels.cross_entropy` computes it with the head) and shards, over
            how many ranks a gradient is shared out once it is made.

    Raises ValueError for another precision, attention or kind of device.
    """
    return _Pass(config, batch, context, **known).block_bytes


def peak_moments(
    config: ModelConfig,
    batch: int,
    context: int,
    phase: str,
    *,
    plan: Sequence[int] = (),
    **known: Any,
) -> dict[str, int]:
    """Returns the bytes in use at each moment of a phase that can be its peak; the largest of them
    is the prediction.

    Counted are parameters, optimizer state, gradients, inputs, what autograd keeps, and the tensors
    that live at that moment besides; not the workspaces of libraries, nor what an allocator rounds
    up.

    Args:
        phase: "forward" (with gradient, to the loss) or "train_step" (forward, backward and a
            fused AdamW step, the optimizer's state made before, the gradients during it).
        plan: of the blocks that a training step recomputes, as `checkpoint_plan` gives it; the
            others as in `block_activation_bytes`.

    Raises ValueError for another phase, precision, attention or kind of device.

    Source: the model's code, read line by line for what each local name still holds; PyTorch's
    backward formulas, and its softmax's backward on CUDA, which writes one matrix more, gradient
    times probabilities, before it calls its kernel (aten/src/ATen/native/cuda/SoftMax.cu,
    `softmax_backward_cuda_out`).
    """
    makers = {"forward": _forward_moments, "train_step": _train_step_moments}
    check_known("phase", phase, makers)
    run = _Pass(config, batch, context, **known)
    resident = run.resident_bytes
    if phase == "train_step":
        resident += optimizer_state_bytes(config)
    moments = _recomputed_moments(run, plan) if plan else makers[phase](run)
    return {name: resident + num_bytes for name, num_bytes in moments.items()}


def peak_bytes(config: ModelConfig, batch: int, context: int, phase: str, **known: Any) -> int:
    """Returns the largest of `peak_moments`; Args and Raises as there."""
    return max(peak_moments(config, batch, context, phase, **known).values())


def _attention_moment(run: _Pass, held: int, num_streams: int, num_masks: int) -> int:
    """Returns the most bytes in use inside a forward pass of attention.

    Eager in fp32: two score matrices (masked scores and probabilities) while v is copied and the
    output made. Under autocast on CUDA: scores in bf16 and, around the softmax, in fp32, and its
    result, before v is copied and the output made. Fused: the log-sum-exp.

    Args:
        held: bytes of all else; num_streams, num_masks: tensors as large as q, and masks, that live
            when eager attention makes the output. Fused, half as many are left of the first.
    """
    if run.is_fused:
        return held + num_streams // 2 * run.element * run.stream + run.log_sum_exp_bytes
    held += num_masks * run.mask + num_streams * run.element * run.stream
    if run.casts_softmax:
        return held + max(10 * run.scores - 2 * run.element * run.stream, 8 * run.scores)
    return held + 2 * run.element * run.scores


def _attention_without_gradient(run: _Pass) -> int:
    """Besides: x, the norm's output, q, k, v before and after rotation."""
    held = run.stream * (2 * 4 + 5 * run.element)
    return _attention_moment(run, held, num_streams=2, num_masks=1)


def _forward_moments(run: _Pass) -> dict[str, int]:
    """In attention: all blocks but the last as kept, and what the last one's attention keeps.

    Eager: q, k and v as projected, q and k as rotated (the product keeps copies of these), the
    output; the mask and its complement. Under autocast also the norm's output.
    """
    held = run.earlier_bytes + run.attention_part_bytes
    if run.is_bf16:
        held += 4 * run.stream
    return {
        "attention, last block": _attention_moment(run, held, num_streams=6, num_masks=2),
        "loss": run.made_bytes + run.loss_bytes,
    }


def _train_step_moments(run: _Pass) -> dict[str, int]:
    """The backward pass frees a block's activations as it makes its gradients, so a peak is at one
    of its ends.
    """
    d = run.config.d_model
    f = run.config.d_ff
    # What every moment of a block has: the residual's gradient and those of the head and the final
    # norm.
    gradients = 4 * (run.stream + (run.config.vocab_size * d + d) // run.shards)
    # Probabilities, their gradient and the scores' gradient; on CUDA one product more. Autocast
    # casts to fp32 there. Compiled, the softmax's backward is one kernel.
    per_score = 3 * run.element
    if run.is_cuda:
        per_score = 4 + 2 * run.element if run.is_compiled else 16
    scratch = per_score * run.scores + run.mask
    if run.is_fused:
        scratch = 4 * run.element * run.stream
    parts = {
        "feed-forward": run.block_bytes + 2 * run.element * f * run.tokens + 4 * d * f,
        "attention": run.attention_part_bytes + scratch + 4 * (3 * d * f + d + d * d),
    }
    later_blocks = run.config.num_layers - 1
    later_gradients = later_blocks * block_gradient_bytes(run.config) // run.shards
    moments = {f"forward: {name}": most for name, most in _forward_moments(run).items()}
    moments["backward: loss"] = run.made_bytes + 2 * 4 * run.logits
    for block, others in (("last", run.earlier_bytes), ("first", later_gradients)):
        for part, part_bytes in parts.items():
            moments[f"backward: {part}, {block} block"] = others + part_bytes + gradients
    moments["backward: embedding"] = _all_gradients(run) + 4 * run.stream
    return moments


def _all_gradients(run: _Pass) -> int:
    """Returns bytes of all gradients; a tied table's two are both there before they are added."""
    return parameter_bytes(replace(run.config, is_tied=False)) // run.shards


def checkpoint_plan(text: str, num_layers: int) -> tuple[int, ...]:
    """Returns a plan of recomputation as numbers of blocks: () for "none", (4,) for "4", (8, 2) for
    "8/2".

    The blocks are run in groups of the first number, of which only the inputs are kept; while a
    group is recomputed, the same is done within it by the next number.

    Raises RequestError for a text that is no plan, and for numbers that do not fall or exceed
    `num_layers`.
    """
    if text == "none":
        return ()
    try:
        plan = tuple(map(int, text.split("/")))
    except ValueError:
        plan = ()
    if not plan or any(low >= high for high, low in pairwise(plan)) or plan[-1] < 1:
        raise RequestError(
            f"unknown plan {text!r}; accepted: 'none', or falling numbers of blocks such as '4' "
            f"or '8/2'"
        )
    if plan[0] > num_layers:
        raise RequestError(f"plan {text!r} groups {plan[0]} blocks; the model has {num_layers}")
    return plan


def checkpoint_forwards(num_layers: int, plan: Sequence[int]) -> float:
    """Returns how often a block's forward pass runs in one training step, on average over the
    blocks.

    Once, and once more for each level of the plan, but a group that is itself grouped is recomputed
    without its last part: recomputing stops when it has all that the backward pass asks for.
    """
    num_recomputed = 0
    groups = [num_layers]
    for level, size in enumerate(plan):
        parts = [_group_sizes(group, size) for group in groups]
        num_recomputed += num_layers
        if level > 0:
            num_recomputed -= sum(sizes[-1] for sizes in parts)
        groups = chain.from_iterable(parts)
    return 1 + num_recomputed / num_layers


def _group_sizes(num_blocks: int, size: int) -> list[int]:
    return [min(size, num_blocks - first) for first in range(0, num_blocks, size)]


def _recomputed_moments(run: _Pass, plan: Sequence[int]) -> dict[str, int]:
    """At the end of the forward pass there is one residual tensor for each group of blocks. In the
    backward pass the group at hand has one for each group within it and, for the innermost, all
    that its blocks keep.
    """
    config = run.config
    stream = 4 * run.stream
    gradients = block_gradient_bytes(config) // run.shards
    inputs = len(_group_sizes(config.num_layers, plan[0])) * stream
    moments = {
        "forward: attention, last block": inputs
        + run.cast_bytes
        + _attention_without_gradient(run),
        "forward: loss": inputs + run.cast_bytes + run.head_bytes + run.loss_bytes,
        "backward: loss": inputs + run.head_bytes + 2 * 4 * run.logits,
        "backward: embedding": _all_gradients(run) + stream,
    }
    for size, num_later, num_inputs in _recomputed_groups(config.num_layers, plan):
        group = replace(run, config=replace(config, num_layers=size))
        others = num_inputs * stream + num_later * gradients
        for name, num_bytes in _train_step_moments(group).items():
            if name.startswith("backward") and name.endswith("block"):
                name = f"{name} of a group"
                moments[name] = max(moments.get(name, 0), others + num_bytes)
    return moments


def _recomputed_groups(num_blocks: int, plan: Sequence[int]) -> list[tuple[int, int, int]]:
    """Returns (blocks, blocks behind it, inputs held besides its own) of each recomputed group.

    The last group comes first, so those in front still hold their input. The first within a group
    shares its input.
    """
    if not plan:
        return [(num_blocks, 0, 0)]
    size, *rest = plan
    sizes = _group_sizes(num_blocks, size)
    return [
        (blocks, num_later + sum(sizes[number + 1 :]), num_inputs + number)
        for number, group in enumerate(sizes)
        for blocks, num_later, num_inputs in _recomputed_groups(group, rest)
    ]


def attention_saved_bytes(
    kind: str, batch: int, length: int, d_head: int, element_bytes: int
) -> int:
    """Returns bytes of the distinct tensors that one attention call keeps for its backward pass,
    inputs included.

    Args:
        kind: "eager" (the formula as it reads), "math" (SDPA's math backend, which scales copies of
            q and k and computes in fp32) or "fused" (a kernel that keeps the log-sum-exp, fp32, in
            place of the scores).
        batch: sequences times heads; length: of queries and keys alike.
        element_bytes: of the inputs: 4 for fp32, 2 for bf16.

    Raises ValueError for another kind.
    """
    check_known("kind of attention", kind, ("eager", "math", "fused"))
    row = batch * length * d_head
    scores = batch * length * length
    if kind == "fused":
        return element_bytes * 4 * row + 4 * batch * length
    return (4 if kind == "math" else element_bytes) * (3 * row + scores)


def attention_call_flops(phase: str, batch: int, length: int, d_head: int, *, causal: bool) -> int:
    """Returns FLOPs of one attention call: 4·S²·D forward, 2.5 times that backward, half of it when
    causal.

    The backward pass has five products where the forward has two; what a kernel recomputes does not
    count.

    Args:
        phase: "forward", "backward" or "forward_backward".
        batch: sequences times heads; length: of queries and keys alike.

    Raises ValueError for another phase.
    """
    factor = {"forward": 4, "backward": 10, "forward_backward": 14}
    check_known("phase", phase, factor)
    return factor[phase] * batch * length * length * d_head // (1 + causal)


def attention_pairs(num_queries: int, num_keys: int, left: int, right: int) -> float:
    """Returns how many pairs of a query and a key a mask shows, aligned to the bottom right.

    `left` and `right` are how many keys a query sees before and after its own, −1 without limit. Of
    a causal mask (right 0) a query's own key counts half: of as many queries as keys that is half
    of all pairs.
    """
    before, after = (num_queries + num_keys if limit < 0 else limit for limit in (left, right))
    own_keys = range(num_keys - num_queries, num_keys)
    pairs = sum(max(0, min(num_keys, own + after + 1) - max(0, own - before)) for own in own_keys)
    return pairs - min(num_queries, num_keys) / 2 if right == 0 else pairs


OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")


def bus_factor(operation: str, world_size: int) -> float:
    """Returns bus bandwidth over algorithm bandwidth as nccl-tests defines it; ValueError for
    another operation.
    """
    check_known("operation", operation, OPERATIONS)
    if operation == "broadcast":
        return 1.0
    return (2 if operation == "all_reduce" else 1) * (world_size - 1) / world_size


def ring_seconds(operation: str, num_bytes: float, world_size: int, bandwidth: float) -> float:
    """Returns seconds of a ring collective of size S between two ranks and more: `bus_factor`·S/W,
    without latencies.
    """
    return bus_factor(operation, world_size) * num_bytes / bandwidth


def zero_bytes(num_parameters: float, world_size: int, stage: int) -> dict[str, float]:
    """Returns bytes a rank holds, by component, fp32: weights, gradients, AdamW's moments.

    Stage 1, which `ShardedOptimizer` is, shards the moments, stage 2 also the gradients, 3 all.
    What a fully sharded layer gathers while it runs comes on top. ValueError for a stage beyond 0
    to 3.
    """
    if stage not in range(4):
        raise ValueError(f"stage {stage}; accepted: 0, 1, 2, 3")
    parts = {"weights": (4, 3), "gradients": (4, 2), "moments": (8, 1)}
    return {
        name: num_parameters * num_bytes / (world_size if stage >= first_stage else 1)
        for name, (num_bytes, first_stage) in parts.items()
    }


STEP_TRANSFERS = {"data_parallel": 2, "zero_1": 2, "sharded_optimizer": 3, "fully_sharded": 3}
"""How often (N−1)/N of the parameters' bytes leave a rank in a step. ZeRO-1 reduce-scatters
gradients and gathers parameters; our sharded optimizer all-reduces gradients (twice) and broadcasts
parameters; fully sharded, weights are gathered in forward and backward and gradients
reduce-scattered.
"""
