"""A decoder-only language model: RMSNorm, causal attention with rotary positions, SwiGLU, untied
head.

Shape suffixes: B batch, T tokens of the context, C d_model, H heads, D head dimension, V
vocabulary.

Sources: pre-norm blocks, RMSNorm, SwiGLU and rotary positions as in Touvron et al. 2023 (LLaMA);
RMSNorm: Zhang & Sennrich 2019, equation 4; SwiGLU: Shazeer 2020, equation 6; RoPE: Su et al. 2021,
eq. 34.
"""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from labkit.configs import RMS_NORM_EPS, ModelConfig, check_known
from labkit.kernels.attention import IMPLS, attention
from labkit.kernels.cross_entropy import linear_cross_entropy
from labkit.kernels.norms import rms_norm
from labkit.kernels.rotary import rotary as rotate
from labkit.kernels.swiglu import swiglu

Linear = functools.partial(nn.Linear, bias=False)
"""Every matrix of the model is without a bias."""

Stream = Tensor | tuple[Tensor, Tensor]
"""What goes from block to block, (B, T, C); with fused blocks two tensors that the next norm adds.
"""

ATTENTION: dict[str, Callable[..., Tensor]] = {
    impl: functools.partial(attention, impl=impl) for impl in IMPLS
}
"""Implementations of attention by the name that `TransformerLM(attention=...)` takes."""

MODEL_IMPLS = ("eager", "fused")
"""Of all but attention. fused: one kernel each for an addition and its norm, the rotation, SwiGLU's
gate, the loss.
"""


class RMSNorm(nn.Module):
    """x / rms(x) · weight, the statistics in fp32 whatever the input's dtype."""

    def __init__(self, d_model: int, is_fused: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d_model))
        self.is_fused = is_fused

    def forward(self, x: Stream) -> Tensor:
        if self.is_fused:
            return self.with_sum(x)[0]
        x_fp32 = x.float()
        inverse_rms = torch.rsqrt(x_fp32.pow(2).mean(-1, keepdim=True) + RMS_NORM_EPS)
        return (x_fp32 * inverse_rms * self.weight).to(x.dtype)

    def with_sum(self, x: Stream) -> tuple[Tensor, Tensor]:
        """Returns the norm of what comes from a fused block, and the sum that it is of."""
        if isinstance(x, tuple):
            return rms_norm(x[0], self.weight, RMS_NORM_EPS, x[1])
        return rms_norm(x, self.weight, RMS_NORM_EPS), x


class RotaryEmbedding(nn.Module):
    """Rotates the two halves of each head's dimension by position · θ^(−2i/D)."""

    def __init__(self, d_head: int, max_context: int, theta: float):
        super().__init__()
        # Computed on the CPU, so that the values are the same on every device.
        exponent = -torch.arange(0, d_head, 2, dtype=torch.float64, device="cpu") / d_head
        position = torch.arange(max_context, dtype=torch.float64, device="cpu")
        angle_TD = torch.outer(position, theta**exponent).repeat(1, 2)
        for name, table_TD in (("cos_TD", angle_TD.cos()), ("sin_TD", angle_TD.sin())):
            table_TD = table_TD.float().to(torch.get_default_device())
            self.register_buffer(name, table_TD, persistent=False)

    def forward(self, x_BHTD: Tensor) -> Tensor:
        num_tokens = x_BHTD.shape[-2]
        cos_TD = self.cos_TD[:num_tokens].to(x_BHTD.dtype)
        sin_TD = self.sin_TD[:num_tokens].to(x_BHTD.dtype)
        first, second = x_BHTD.chunk(2, dim=-1)
        return x_BHTD * cos_TD + torch.cat((-second, first), dim=-1) * sin_TD


class CausalSelfAttention(nn.Module):
    """Multi-head attention without biases; `attention` names the implementation, see ATTENTION."""

    def __init__(self, config: ModelConfig, attention: str, is_fused: bool):
        super().__init__()
        self.num_heads = config.num_heads
        self.attention = attention
        width = config.d_model
        self.q_proj = Linear(width, width)
        self.k_proj = Linear(width, width)
        self.v_proj = Linear(width, width)
        self.out_proj = Linear(width, width)
        self.is_fused = is_fused

    def forward(self, x_BTC: Tensor, rotary: RotaryEmbedding) -> Tensor:
        q_BHTD, k_BHTD, v_BHTD = (
            project(x_BTC).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        attend = ATTENTION[self.attention]
        if self.is_fused:
            # A model that is cast to another dtype has its tables cast too.
            q_BHTD, k_BHTD = rotate(q_BHTD, k_BHTD, rotary.cos_TD.float(), rotary.sin_TD.float())
            out_BHTD = attend(q_BHTD, k_BHTD, v_BHTD, causal=True)
        else:
            # The projections are held while attention runs: the closed forms count them, and so do
            # the records.
            out_BHTD = attend(rotary(q_BHTD), rotary(k_BHTD), v_BHTD, causal=True)
        return self.out_proj(out_BHTD.transpose(1, 2).flatten(-2))


class SwiGLU(nn.Module):
    """down(silu(gate(x)) · up(x)): three matrices."""

    def __init__(self, config: ModelConfig, is_fused: bool):
        super().__init__()
        self.gate_proj = Linear(config.d_model, config.d_ff)
        self.up_proj = Linear(config.d_model, config.d_ff)
        self.down_proj = Linear(config.d_ff, config.d_model)
        self.is_fused = is_fused

    def forward(self, x: Tensor) -> Tensor:
        if self.is_fused:
            return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """x + attention(norm(x)), then x + SwiGLU(norm(x)).

    Fused, it leaves the last addition to the next norm.
    """

    def __init__(self, config: ModelConfig, attention: str, is_fused: bool = False):
        super().__init__()
        self.is_fused = is_fused
        self.attention_norm = RMSNorm(config.d_model, is_fused)
        self.attention = CausalSelfAttention(config, attention, is_fused)
        self.feed_forward_norm = RMSNorm(config.d_model, is_fused)
        self.feed_forward = SwiGLU(config, is_fused)

    def forward(self, x_BTC: Stream, rotary: RotaryEmbedding) -> Stream:
        if self.is_fused:
            normed_BTC, x_BTC = self.attention_norm.with_sum(x_BTC)
            stream = self.attention(normed_BTC, rotary), x_BTC
            normed_BTC, x_BTC = self.feed_forward_norm.with_sum(stream)
            return self.feed_forward(normed_BTC), x_BTC
        x_BTC = x_BTC + self.attention(self.attention_norm(x_BTC), rotary)
        return x_BTC + self.feed_forward(self.feed_forward_norm(x_BTC))


class TransformerLM(nn.Module):
    """The language model of `config`; maps token ids (B, T) int64 to logits (B, T, V).

    Given also the targets (B, T), it returns their mean cross-entropy; fused, the logits are made
    in parts.

    Args:
        max_context: the longest T it accepts.
        attention: a key of ATTENTION.
        impl: one of MODEL_IMPLS; the parameters are the same.
        device: of the parameters.

    Raises:
        ValueError: unknown attention or impl; d_model no multiple of num_heads; an odd head
            dimension (the rotation pairs them); dimensions that are only planned; in forward, a
            context longer than max_context.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        max_context: int,
        attention: str = "eager",
        impl: str = "eager",
        device: torch.device | str | None = None,
    ):
        super().__init__()
        check_known("impl", impl, MODEL_IMPLS)
        check_known("attention", attention, ATTENTION)
        if config.d_model % config.num_heads or config.d_head % 2:
            raise ValueError(
                f"d_model {config.d_model} must be num_heads {config.num_heads} "
                "times an even head dimension"
            )
        if (
            config.attention_widths != (config.d_model,) * 2
            or config.is_tied
            or not config.is_gated
        ):
            raise ValueError(
                f"head_dim, num_key_heads, is_gated and is_tied must be as by default; got {config}"
            )
        self.config = config
        self.impl = impl
        is_fused = impl == "fused"
        self.max_context = max_context
        with torch.device(device or torch.get_default_device()):
            self.embedding = nn.Embedding(config.vocab_size, config.d_model)
            blocks = [Block(config, attention, is_fused) for _ in range(config.num_layers)]
            self.blocks = nn.ModuleList(blocks)
            self.norm = RMSNorm(config.d_model, is_fused)
            self.head = Linear(config.d_model, config.vocab_size)
            self.rotary = RotaryEmbedding(config.d_head, max_context, config.rope_theta)
        # Every matrix is drawn from N(0, 0.02²), as GPT-2 does; norm gains stay 1.
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor | None = None) -> Tensor:
        if tokens_BT.shape[-1] > self.max_context:
            raise ValueError(
                f"context {tokens_BT.shape[-1]} is longer than max_context {self.max_context}"
            )
        x_BTC = self.embedding(tokens_BT)
        for block in self.blocks:
            x_BTC = block(x_BTC, self.rotary)
        normed_BTC = self.norm(x_BTC)
        if targets_BT is None:
            return self.head(normed_BTC)
        if self.impl == "fused":
            return linear_cross_entropy(normed_BTC, self.head.weight, targets_BT)
        return language_model_loss(self.head(normed_BTC), targets_BT)


def language_model_loss(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Returns the mean cross-entropy of the next-token targets (int64), a scalar in nats."""
    return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())
