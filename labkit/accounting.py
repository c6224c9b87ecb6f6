"""Closed forms: parameters, FLOPs, bytes and the bounds that follow from them. No torch.

Conventions: 2 FLOPs per multiply-add; a backward pass costs twice its forward; elementwise work, norms,
softmax and the embedding gather are not counted. Attention is counted in full (every query against every
key, what an implementation that masks after the product executes) or causal (the half that is not
masked); every function that depends on it says which by `causal`.
"""

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


def block_activation_bytes(config: ModelConfig, batch: int, context: int) -> int:
    """Returns bytes one fp32 block with eager attention keeps for its backward pass.

    Per token: ten tensors of width d (the residual before each norm, each norm's normalised and scaled
    output, rotated q and k, v, and the heads' output), four of width d_ff (gate, up, silu(gate) and their
    product) and two of width 1 (the norms' reciprocal root mean squares); per head and query one row of
    probabilities (fp32) and, once for all heads, one row of the causal mask (one byte an element).
    """
    tokens = batch * context
    per_token = 10 * config.d_model + 4 * config.d_ff + 2
    probabilities = batch * config.num_heads * context * context
    return 4 * (tokens * per_token + probabilities) + context * context


def activation_bytes(config: ModelConfig, batch: int, context: int) -> int:
    """Returns bytes the whole fp32 model with eager attention and the loss keep for the backward pass.

    Beside the blocks: token and target indices (int64), the final norm's input, normalised and scaled
    output and reciprocal root mean square, the log-probabilities that cross-entropy keeps and the count
    that it divides by, and the rotary tables (cosine and sine of d_head values each).
    """
    tokens = batch * context
    head = 4 * tokens * (3 * config.d_model + 1 + config.vocab_size) + 2 * 8 * tokens + 4
    rotary = 2 * 4 * context * config.d_head
    return config.num_layers * block_activation_bytes(config, batch, context) + head + rotary


def model_flop_utilisation(flops: float, time_ms: float, peak_tflops: float) -> float:
    """Returns achieved FLOP rate over `peak_tflops`; the caller names the FLOP convention and the peak."""
    return flops / (time_ms * 1e-3) / (peak_tflops * 1e12)


# ---- one attention call ----------------------------------------------------------------------------------------


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
    if device_kind not in DEVICE_KINDS:
        raise ValueError(f"unknown kind of device {device_kind!r}; accepted: {', '.join(DEVICE_KINDS)}")
    return 1 if device_kind == "cuda" else 0


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
