"""Closed forms: parameters, FLOPs, bytes and the bounds that follow from them. No torch.

Conventions: 2 FLOPs per multiply-add; a backward pass costs twice its forward; elementwise work, norms,
softmax and the embedding gather are not counted. Attention is counted in full (every query against every
key, what an implementation that masks after the product executes) or causal (the half that is not
masked); every function that depends on it says which by `causal`.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from labkit.configs import ModelConfig

PHASE_FORWARDS = {"inference": 1, "forward": 1, "backward": 2, "forward_backward": 3, "train_step": 3}
"""FLOPs of a phase in units of one forward pass. The optimizer step is bound by bytes, not FLOPs."""

ADAMW_BYTES_PER_PARAMETER = 28
"""fp32 AdamW reads p, g, m, v and writes p, m, v: seven transfers of four bytes."""


def num_parameters(config: ModelConfig) -> int:
    """Returns the number of parameters, embedding and untied head included."""
    return 2 * config.vocab_size * config.d_model + num_block_parameters(config) + config.d_model


def num_block_parameters(config: ModelConfig) -> int:
    """Returns the parameters of all blocks: four attention and three SwiGLU matrices, two norm gains each."""
    d, f = config.d_model, config.d_ff
    return config.num_layers * (4 * d * d + 3 * d * f + 2 * d)


def num_matmul_parameters(config: ModelConfig) -> int:
    """Returns the parameters that multiply every token: no embedding table (a gather), no norm gains."""
    d, f = config.d_model, config.d_ff
    return config.num_layers * (4 * d * d + 3 * d * f) + config.vocab_size * d


def attention_flops(config: ModelConfig, batch: int, context: int, *, causal: bool) -> int:
    """Returns FLOPs of QKᵀ and PV over all layers in one forward pass: 4·B·T²·d·L, half of it when causal."""
    full = 4 * batch * context * context * config.d_model * config.num_layers
    return full // 2 if causal else full


def forward_flops(config: ModelConfig, batch: int, context: int, *, causal: bool) -> int:
    """Returns FLOPs of one forward pass over batch × context tokens."""
    linear = 2 * num_matmul_parameters(config) * batch * context
    return linear + attention_flops(config, batch, context, causal=causal)


def phase_flops(config: ModelConfig, batch: int, context: int, phase: str, *, causal: bool) -> int | None:
    """Returns FLOPs of a phase, None for the optimizer step; raises ValueError for an unknown phase."""
    if phase == "optimizer_step":
        return None
    if phase not in PHASE_FORWARDS:
        raise ValueError(f"unknown phase {phase!r}; accepted: {', '.join([*PHASE_FORWARDS, 'optimizer_step'])}")
    return PHASE_FORWARDS[phase] * forward_flops(config, batch, context, causal=causal)


def parameter_bytes(config: ModelConfig, bytes_per_element: int = 4) -> int:
    """Returns bytes of the parameters; the gradients take as much."""
    return num_parameters(config) * bytes_per_element


def optimizer_state_bytes(config: ModelConfig) -> int:
    """Returns bytes of AdamW's two fp32 moments."""
    return num_parameters(config) * 8


def optimizer_step_bytes(config: ModelConfig) -> int:
    """Returns the fewest bytes a fused fp32 AdamW step moves."""
    return num_parameters(config) * ADAMW_BYTES_PER_PARAMETER


def block_activation_bytes(
    config: ModelConfig,
    batch: int,
    context: int,
    *,
    precision: str = "fp32",
    attention: str = "eager",
    device_kind: str = "cpu",
) -> int:
    """Returns bytes one block keeps for its backward pass, its input included and its parameters not.

    fp32, per token: ten tensors of width d (the residual before each norm, each norm's normalised and scaled
    output, rotated q and k, v, and the heads' output), four of width d_ff (gate, up, silu(gate) and their
    product) and two of width 1 (the norms' reciprocal root mean squares).
    bf16 is autocast over fp32 parameters: residuals and norms stay fp32 and the scaled output is not kept, but each
    of the five projections that read it keeps a copy of its own in bf16, as all the rest is; so are copies of the
    block's matrices and of the rotary tables, two for q and two for k.
    Eager attention keeps a row of probabilities per head and query and, once for all heads, a row of the causal mask
    (one byte an element). On CUDA, autocast computes the softmax in fp32 and the product with v in bf16, and both
    copies are kept; on the CPU there is only the one in bf16. Fused attention keeps the log-sum-exp (fp32) instead.

    Args:
        config: dimensions; batch, context: of the tokens.
        precision: "fp32" (also for TF32) or "bf16".
        attention: "eager" or "fused".
        device_kind: one of DEVICE_KINDS.

    Raises ValueError for another precision, attention or kind of device.
    """
    element = _element_bytes(precision)
    tokens, d, f = batch * context, config.d_model, config.d_ff
    norms = _norm_kept_bytes(config, batch, context, precision)
    if precision == "bf16":
        copies = 5 * 2 * d * tokens + 2 * (4 * d * d + 3 * d * f) + 4 * 2 * context * config.d_head
    else:
        copies = 0
    heads, feed_forward = element * 4 * d * tokens, element * 4 * f * tokens
    kept = _attention_kept_bytes(config, batch, context, precision, attention, device_kind)
    return 2 * norms + copies + heads + feed_forward + kept


def activation_bytes(
    config: ModelConfig,
    batch: int,
    context: int,
    *,
    precision: str = "fp32",
    attention: str = "eager",
    device_kind: str = "cpu",
) -> int:
    """Returns bytes the whole model and the loss keep for the backward pass, inputs included and parameters not.

    Beside the blocks: token and target indices (int64), the final norm's input, normalised and scaled
    output and reciprocal root mean square, the log-probabilities that cross-entropy keeps (fp32) and the count
    that it divides by, and in fp32 the rotary tables (cosine and sine of d_head values each). With bf16 autocast, the
    head has copies in bf16 of its input and its matrix.

    Args and Raises as in `block_activation_bytes`.
    """
    tables = rotary_table_bytes(config, context) if precision == "fp32" else 0
    made = forward_made_bytes(config, batch, context, precision=precision, attention=attention, device_kind=device_kind)
    return made - 4 + input_bytes(batch, context) + tables


def forward_made_bytes(
    config: ModelConfig, batch: int, context: int, *, precision: str, attention: str, device_kind: str
) -> int:
    """Returns bytes that a forward pass with gradient adds: what it keeps for the backward pass, and the loss.

    Args and Raises as in `block_activation_bytes`.
    """
    block = block_activation_bytes(
        config, batch, context, precision=precision, attention=attention, device_kind=device_kind
    )
    return config.num_layers * block + _head_kept_bytes(config, batch, context, precision) + 4


def input_bytes(batch: int, context: int) -> int:
    """Returns bytes of the token and target indices (int64)."""
    return 2 * 8 * batch * context


def rotary_table_bytes(config: ModelConfig, max_context: int) -> int:
    """Returns bytes of the two rotary tables, fp32."""
    return 2 * 4 * max_context * config.d_head


def residual_stream_bytes(config: ModelConfig, batch: int, context: int) -> int:
    """Returns bytes of what goes from block to block: B·T·d elements, fp32 under autocast too."""
    return 4 * batch * context * config.d_model


def block_gradient_bytes(config: ModelConfig) -> int:
    """Returns bytes of the parameter gradients that one block's backward pass makes, fp32."""
    return 4 * num_block_parameters(config) // config.num_layers


def _element_bytes(precision: str) -> int:
    if precision not in ("fp32", "tf32", "bf16"):
        raise ValueError(f"unknown precision {precision!r}; accepted: fp32, tf32, bf16")
    return 2 if precision == "bf16" else 4


def _norm_kept_bytes(config: ModelConfig, batch: int, context: int, precision: str) -> int:
    """Input, normalised output and reciprocal root mean square; without autocast the scaled output, which is used."""
    widths = 2 if precision == "bf16" else 3
    return batch * context * (4 * widths * config.d_model + 4)


def _attention_kept_bytes(
    config: ModelConfig, batch: int, context: int, precision: str, attention: str, device_kind: str
) -> int:
    """What attention keeps beside q, k, v and its output."""
    _check_device_kind(device_kind)
    if attention == "fused":
        return 4 * batch * config.num_heads * context
    if attention != "eager":
        raise ValueError(f"unknown attention {attention!r}; accepted: eager, fused")
    per_score = 4 if precision != "bf16" else 6 if device_kind == "cuda" else 2
    return per_score * batch * config.num_heads * context**2 + context**2


def _head_kept_bytes(config: ModelConfig, batch: int, context: int, precision: str) -> int:
    """Final norm, log-probabilities, the loss's count; under autocast the head's copies of its input and matrix."""
    tokens = batch * context
    kept = _norm_kept_bytes(config, batch, context, precision) + 4 * tokens * config.vocab_size + 4
    if precision == "bf16":
        kept += 2 * (tokens + config.vocab_size) * config.d_model
    return kept


PEAK_PHASES = ("inference", "forward", "train_step")
"""inference: forward without gradient, to the logits. forward: with gradient, to the loss. train_step: forward,
backward and a fused AdamW step, the optimizer's state made before, the gradients during it."""


def peak_moments(
    config: ModelConfig, batch: int, context: int, phase: str, *, precision: str, attention: str, device_kind: str
) -> dict[str, int]:
    """Returns the bytes in use at each moment of a phase that can be its peak; the largest of them is the prediction.

    Counted are parameters, optimizer state, gradients, inputs, what autograd keeps, and the tensors that live at that
    moment besides; not the workspaces of libraries, nor what an allocator rounds up.

    Args:
        phase: one of PEAK_PHASES; the others as in `block_activation_bytes`.

    Raises ValueError for another phase, precision, attention or kind of device.

    Source: the model's code, read line by line for what each local name still holds; PyTorch's backward formulas, and
    its softmax's backward on CUDA, which writes one matrix more (see `attention_peak_bytes`).
    """
    known = {"precision": precision, "attention": attention, "device_kind": device_kind}
    if phase == "inference":
        moments = _inference_moments(config, batch, context, **known)
    elif phase == "forward":
        moments = _forward_moments(config, batch, context, **known)
    elif phase == "train_step":
        moments = _train_step_moments(config, batch, context, **known)
    else:
        raise ValueError(f"unknown phase {phase!r}; accepted: {', '.join(PEAK_PHASES)}")
    resident = parameter_bytes(config) + input_bytes(batch, context) + rotary_table_bytes(config, context)
    if phase == "train_step":
        resident += optimizer_state_bytes(config)
    return {name: resident + num_bytes for name, num_bytes in moments.items()}


def peak_bytes(config: ModelConfig, batch: int, context: int, phase: str, **known: str) -> int:
    """Returns the largest of `peak_moments`; Args and Raises as there."""
    return max(peak_moments(config, batch, context, phase, **known).values())


def _attention_scratch_bytes(
    config: ModelConfig, batch: int, context: int, precision: str, attention: str, device_kind: str
) -> int:
    """Most bytes of a forward pass that live inside attention: x, the norm's output, q, k, v before and after rotation.

    Eager in fp32: two score matrices (masked scores and probabilities) while v is copied and the output made. Under
    autocast on CUDA: scores in bf16 and, around the softmax, in fp32, and its result, before v is copied.
    """
    tokens, d, element = batch * context, config.d_model, _element_bytes(precision)
    scores = batch * config.num_heads * context**2
    streams = tokens * d * (2 * 4 + 5 * element)
    if attention == "fused":
        return streams + tokens * (element * d + 4 * config.num_heads)
    product = streams + 2 * element * d * tokens + context**2
    if precision == "bf16" and device_kind == "cuda":
        return max(streams + context**2 + 10 * scores, product + 8 * scores)
    return product + 2 * element * scores


def _inference_moments(
    config: ModelConfig, batch: int, context: int, *, precision: str, attention: str, device_kind: str
) -> dict[str, int]:
    tokens, d, f, v = batch * context, config.d_model, config.d_ff, config.vocab_size
    element = _element_bytes(precision)
    # Autocast keeps a copy of every matrix that it has cast until it is left, so the last block has most of them.
    matrices = 2 * config.num_layers * (4 * d * d + 3 * d * f) if precision == "bf16" else 0
    later = 2 * (3 * d * f + d * d) if precision == "bf16" else 0
    head = 2 * v * d + 2 * d * tokens if precision == "bf16" else 0
    attention_bytes = _attention_scratch_bytes(config, batch, context, precision, attention, device_kind)
    return {
        "attention, last block": matrices - later + attention_bytes,
        "feed-forward, last block": matrices - min(later, 2 * d * f) + tokens * (3 * 4 * d + 3 * element * f),
        "logits": matrices + head + tokens * (2 * 4 * d + element * v),
    }


def _forward_moments(
    config: ModelConfig, batch: int, context: int, *, precision: str, attention: str, device_kind: str
) -> dict[str, int]:
    known = {"precision": precision, "attention": attention, "device_kind": device_kind}
    tokens, v = batch * context, config.vocab_size
    logits = 4 * v * tokens + (2 * v * tokens if precision == "bf16" else 0)
    return {
        "attention, last block": _attention_forward_bytes(config, batch, context, **known),
        "loss": forward_made_bytes(config, batch, context, **known) + logits,
    }


def _attention_forward_bytes(
    config: ModelConfig, batch: int, context: int, *, precision: str, attention: str, device_kind: str
) -> int:
    """All blocks but the last as kept, and of the last what its attention keeps and needs while it runs.

    Eager: q, k and v as projected, q and k as rotated (the product keeps copies of these), the output; masked scores
    and probabilities; the mask and its complement. Under autocast also the norm's output, and on CUDA, around the
    softmax, before v is copied and the output made, the scores in fp32 beside those in bf16.
    """
    known = {"precision": precision, "attention": attention, "device_kind": device_kind}
    stream, element = batch * context * config.d_model, _element_bytes(precision)
    scores = batch * config.num_heads * context**2
    earlier = (config.num_layers - 1) * block_activation_bytes(config, batch, context, **known)
    part = _attention_part_bytes(config, batch, context, precision)
    norm_output = 4 * stream if precision == "bf16" else 0
    before = earlier + part + norm_output
    if attention == "fused":
        return before + 3 * element * stream + 4 * batch * config.num_heads * context
    product = before + 6 * element * stream + 2 * context**2
    if precision == "bf16" and device_kind == "cuda":
        return max(product - 2 * element * stream + 10 * scores, product + 8 * scores)
    return product + 2 * element * scores


def _attention_part_bytes(config: ModelConfig, batch: int, context: int, precision: str) -> int:
    """What a block keeps up to the scores: the norm, q, k and v, with autocast the copies that they were made from."""
    tokens, d = batch * context, config.d_model
    part = _norm_kept_bytes(config, batch, context, precision) + 3 * _element_bytes(precision) * d * tokens
    if precision == "bf16":
        part += 3 * 2 * d * tokens + 2 * 3 * d * d + 4 * 2 * context * config.d_head
    return part


def _train_step_moments(
    config: ModelConfig, batch: int, context: int, *, precision: str, attention: str, device_kind: str
) -> dict[str, int]:
    """The backward pass frees a block's activations as it makes its gradients, so a peak is at one of its ends."""
    known = {"precision": precision, "attention": attention, "device_kind": device_kind}
    tokens, d, f, v = batch * context, config.d_model, config.d_ff, config.vocab_size
    element = _element_bytes(precision)
    block = block_activation_bytes(config, batch, context, **known)
    earlier = (config.num_layers - 1) * block
    later_gradients = (config.num_layers - 1) * block_gradient_bytes(config)
    head_gradients = 4 * (v * d + d)
    residual_gradient = residual_stream_bytes(config, batch, context)
    feed_forward = block + residual_gradient + 2 * element * f * tokens + head_gradients + 4 * d * f
    scores = batch * config.num_heads * context**2
    # Probabilities, their gradient and the scores' gradient; on CUDA one product more. Autocast casts to fp32 there.
    per_score = 3 * element if device_kind != "cuda" else 16
    attention_bytes = (
        _attention_part_bytes(config, batch, context, precision)
        + residual_gradient
        + (per_score * scores + context**2 if attention == "eager" else 4 * element * d * tokens)
        + head_gradients
        + 4 * (3 * d * f + d + d * d)
    )
    forward = _forward_moments(config, batch, context, **known)
    return {
        **{f"forward: {name}": num_bytes for name, num_bytes in forward.items()},
        "backward: loss": forward_made_bytes(config, batch, context, **known) + 2 * 4 * v * tokens,
        "backward: feed-forward, last block": earlier + feed_forward,
        "backward: attention, last block": earlier + attention_bytes,
        "backward: feed-forward, first block": later_gradients + feed_forward,
        "backward: attention, first block": later_gradients + attention_bytes,
        "backward: embedding": parameter_bytes(config) + residual_gradient,
    }


def checkpoint_plan(text: str, num_layers: int) -> tuple[int, ...]:
    """Returns a plan of recomputation as numbers of blocks: () for "none", (4,) for "4", (8, 2) for "8/2".

    The blocks are run in groups of the first number, of which only the inputs are kept; while a group is recomputed,
    the same is done within it by the next number.

    Raises ValueError for a text that is no plan, and for numbers that do not fall or exceed `num_layers`.
    """
    if text == "none":
        return ()
    try:
        plan = tuple(int(part) for part in text.split("/"))
    except ValueError:
        plan = ()
    if not plan or any(low >= high for high, low in pairwise(plan)) or plan[-1] < 1:
        raise ValueError(f"unknown plan {text!r}; accepted: 'none', or falling numbers of blocks such as '4' or '8/2'")
    if plan[0] > num_layers:
        raise ValueError(f"plan {text!r} groups {plan[0]} blocks; the model has {num_layers}")
    return plan


def checkpoint_forwards(num_layers: int, plan: Sequence[int]) -> float:
    """Returns how often a block's forward pass runs in one training step, on average over the blocks.

    Once, and once more for each level of the plan; but recomputing stops when it has all that the backward pass asks
    for, so a group that is itself grouped is recomputed without its last part.
    """
    return 1 + _num_recomputed(num_layers, plan) / num_layers


def _num_recomputed(num_blocks: int, plan: Sequence[int]) -> int:
    if not plan:
        return 0
    size, *rest = plan
    recomputed = 0
    for group in _group_sizes(num_blocks, size):
        left_out = _group_sizes(group, rest[0])[-1] if rest else 0
        recomputed += group - left_out + _num_recomputed(group, rest)
    return recomputed


def _group_sizes(num_blocks: int, size: int) -> list[int]:
    return [min(size, num_blocks - first) for first in range(0, num_blocks, size)]


def checkpoint_moments(
    config: ModelConfig,
    batch: int,
    context: int,
    plan: Sequence[int],
    *,
    precision: str,
    attention: str,
    device_kind: str,
) -> dict[str, int]:
    """Returns the bytes in use at each moment of a training step with recomputed blocks that can be its peak.

    At the end of the forward pass there is one residual tensor for each group of blocks. In the backward pass the
    group at hand has one for each group within it and, for the innermost, all that its blocks keep.

    Args:
        plan: as `checkpoint_plan` gives it; the others as in `peak_moments`.

    Raises ValueError as `peak_moments` does.
    """
    known = {"precision": precision, "attention": attention, "device_kind": device_kind}
    if not plan:
        return peak_moments(config, batch, context, "train_step", **known)
    layers, d, f = config.num_layers, config.d_model, config.d_ff
    stream, gradients = residual_stream_bytes(config, batch, context), block_gradient_bytes(config)
    group_inputs = len(_group_sizes(layers, plan[0])) * stream
    resident = (
        parameter_bytes(config)
        + optimizer_state_bytes(config)
        + input_bytes(batch, context)
        + rotary_table_bytes(config, context)
    )
    head = _head_kept_bytes(config, batch, context, precision) + 4
    logits = (4 + (2 if precision == "bf16" else 0)) * batch * context * config.vocab_size
    cast_bytes = 2 * layers * (4 * d * d + 3 * d * f) if precision == "bf16" else 0
    found = {
        "forward: attention, last block": group_inputs
        + cast_bytes
        + _attention_scratch_bytes(config, batch, context, precision, attention, device_kind),
        "forward: loss": group_inputs + cast_bytes + head + logits,
        "backward: loss": group_inputs + head + 2 * 4 * config.vocab_size * batch * context,
        "backward: embedding": parameter_bytes(config) + stream,
    }
    of_size = {}
    for size, num_later, num_inputs in _recomputed_groups(layers, plan):
        if size not in of_size:
            of_size[size] = _train_step_moments(replace(config, num_layers=size), batch, context, **known)
        for name in ("feed-forward, last block", "attention, last block", "feed-forward, first block",
                     "attention, first block"):  # fmt: skip
            num_bytes = num_inputs * stream + num_later * gradients + of_size[size][f"backward: {name}"]
            key = f"backward: {name} of a group"
            found[key] = max(num_bytes, found.get(key, 0))
    return {name: resident + num_bytes for name, num_bytes in found.items()}


def _recomputed_groups(num_blocks: int, plan: Sequence[int]) -> list[tuple[int, int, int]]:
    """Returns (blocks, blocks behind it in the model, inputs held beside its own) of each group that is recomputed.

    Groups are gone through from the last to the first, so those in front still hold their input. The first group
    within a group has that group's input, which counts once.
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


def best_checkpoint_interval(config: ModelConfig, batch: int, context: int, **known: str) -> int:
    """Returns the number of blocks k for which recomputing every k blocks is predicted to peak lowest.

    Args and Raises as in `peak_moments`.
    """
    return min(
        range(1, config.num_layers + 1),
        key=lambda k: max(checkpoint_moments(config, batch, context, (k,), **known).values()),
    )


def balanced_checkpoint_interval(config: ModelConfig, batch: int, context: int, **known: str) -> float:
    """Returns the k that makes (N/k)·R + k·A least: √(N·R/A), which is √N where a block keeps no more than its input.

    N blocks, R bytes of the residual stream, A bytes that a block keeps.

    Args and Raises as in `block_activation_bytes`. Source: Chen et al. 2016, "Training Deep Nets with Sublinear Memory
    Cost", section 4.1.
    """
    kept = block_activation_bytes(config, batch, context, **known)
    return math.sqrt(config.num_layers * residual_stream_bytes(config, batch, context) / kept)


ATTENTION_KINDS = ("eager", "math", "fused")
"""eager: the formula as it reads. math: SDPA's math backend, which scales copies of q and k and computes in fp32.
fused: a kernel that keeps the log-sum-exp (fp32) in place of the scores."""

DEVICE_KINDS = ("cuda", "cpu", "mps")
"""Kinds of device, since what a pass holds depends on how PyTorch implements it there. What is known of the CPU is
taken for mps too."""


def attention_saved_bytes(kind: str, batch: int, length: int, d_head: int, element_bytes: int) -> int:
    """Returns bytes of the distinct tensors that one attention call keeps for its backward pass, inputs included.

    Args:
        kind: one of ATTENTION_KINDS.
        batch: sequences times heads; length: of queries and keys alike.
        element_bytes: of the inputs: 4 for fp32, 2 for bf16.

    Raises ValueError for another kind.
    """
    row, scores = batch * length * d_head, batch * length * length
    if kind == "eager":
        return element_bytes * (3 * row + scores)
    if kind == "math":
        return 4 * (3 * row + scores)
    if kind == "fused":
        return element_bytes * 4 * row + 4 * batch * length
    raise ValueError(f"unknown kind of attention {kind!r}; accepted: {', '.join(ATTENTION_KINDS)}")


def attention_in_use_bytes(kind: str, batch: int, length: int, d_head: int, element_bytes: int) -> int:
    """Returns bytes in use between the forward and the backward pass: inputs, what is kept, and the output.

    Args and Raises as in `attention_saved_bytes`.
    """
    row = element_bytes * batch * length * d_head
    saved = attention_saved_bytes(kind, batch, length, d_head, element_bytes)
    if kind == "fused":  # the output is kept
        return saved
    if kind == "eager":  # the inputs are kept
        return saved + row
    num_kept_inputs = 1 if element_bytes == 4 else 0  # v needs no scaling, so in fp32 it is not copied
    return saved + row + (3 - num_kept_inputs) * row


def attention_peak_bytes(
    phase: str, batch: int, length: int, d_head: int, element_bytes: int, *, device_kind: str
) -> int:
    """Returns the most bytes in use during a pass of eager attention, inputs and output included.

    Forward: the scaled scores and the probabilities together, while the output is made. Backward: the
    probabilities, their gradient and the scores' gradient together, beside the gradient of v. On CUDA there is a
    fourth matrix then, which the softmax's backward writes before it calls its kernel: gradient times probabilities.

    Args:
        phase: "forward" or "backward"; batch to element_bytes as in `attention_saved_bytes`.
        device_kind: one of DEVICE_KINDS.

    Raises ValueError for another phase or kind of device.

    Source: PyTorch, aten/src/ATen/native/cuda/SoftMax.cu, `softmax_backward_cuda_out`.
    """
    row, scores = batch * length * d_head, batch * length * length
    extra = _extra_matrices(device_kind)
    if phase == "forward":
        return element_bytes * (4 * row + 2 * scores)
    if phase == "backward":
        return element_bytes * (5 * row + (3 + extra) * scores)
    raise ValueError(f"unknown phase {phase!r}; accepted: forward, backward")


def attention_reserved_bytes(
    phase: str, batch: int, length: int, d_head: int, element_bytes: int, *, device_kind: str
) -> int:
    """Returns the most device memory that a pass of eager attention makes the allocator hold, inputs included.

    It is the peak of `attention_peak_bytes`, but for CUDA's backward pass one matrix more: the caching allocator cuts
    the gradient of v from the smallest cached block that is large enough, that of the freed scaled scores. A block
    that is cut holds no other matrix, and does not go back to the device while a part of it is in use.

    Args and Raises as in `attention_peak_bytes`.

    Source: PyTorch, c10/cuda/CUDACachingAllocator.cpp; allocations up to 1 MiB come from blocks of their own.
    """
    peak = attention_peak_bytes(phase, batch, length, d_head, element_bytes, device_kind=device_kind)
    row, scores = (element_bytes * batch * length * width for width in (d_head, length))
    is_cut = phase == "backward" and device_kind == "cuda" and 2**20 < row < scores
    return peak + scores - row if is_cut else peak


def attention_score_passes(phase: str, *, device_kind: str) -> int:
    """Returns how often a pass of eager attention reads or writes all score matrices.

    Forward: written by the product, read and written by the scaling and by the softmax, read by the product with v.
    Backward: the probabilities read for the gradient of v; their gradient written; the softmax's backward reads both
    and writes one; the scaling reads and writes one; the products for q and k read one each. On CUDA the softmax's
    backward first multiplies gradient and probabilities: two matrices read and one written more.

    Args:
        phase: "forward" or "backward".
        device_kind: one of DEVICE_KINDS.

    Raises ValueError for another phase or kind of device.
    """
    extra = _extra_matrices(device_kind)
    try:
        return {"forward": 6, "backward": 9 + 3 * extra}[phase]
    except KeyError:
        raise ValueError(f"unknown phase {phase!r}; accepted: forward, backward") from None


def _extra_matrices(device_kind: str) -> int:
    """Returns how many matrices the softmax's backward makes beside its result."""
    _check_device_kind(device_kind)
    return 1 if device_kind == "cuda" else 0


def _check_device_kind(device_kind: str) -> None:
    if device_kind not in DEVICE_KINDS:
        raise ValueError(f"unknown kind of device {device_kind!r}; accepted: {', '.join(DEVICE_KINDS)}")


def attention_call_flops(phase: str, batch: int, length: int, d_head: int, *, causal: bool) -> int:
    """Returns FLOPs of one attention call by the usual convention: 4·S²·D forward, 2.5 times that backward.

    The backward pass has five products where the forward has two; what a kernel recomputes beyond them does not
    count. Halved when causal, whatever the length.

    Args:
        phase: "forward", "backward" or "forward_backward".
        batch: sequences times heads; length: of queries and keys alike.

    Raises ValueError for another phase.
    """
    factor = {"forward": 4, "backward": 10, "forward_backward": 14}
    if phase not in factor:
        raise ValueError(f"unknown phase {phase!r}; accepted: {', '.join(factor)}")
    full = factor[phase] * batch * length * length * d_head
    return full // 2 if causal else full


def weighted_sum_bytes(phase: str, rows: int, dim: int, element_bytes: int) -> int:
    """Returns the fewest bytes that the weighted sum of `rows` rows of `dim` elements moves.

    Forward reads the rows and the weight and writes the sums; backward reads the rows, the weight and the sums'
    gradient and writes the gradients of the rows and the weight.

    Args and Raises as in `attention_call_flops`.
    """
    forward = rows * dim + dim + rows
    backward = 2 * rows * dim + 2 * dim + rows
    elements = {"forward": forward, "backward": backward, "forward_backward": forward + backward}
    if phase not in elements:
        raise ValueError(f"unknown phase {phase!r}; accepted: {', '.join(elements)}")
    return element_bytes * elements[phase]
