"""The closed forms against what PyTorch itself counts, and those of communication against their
derivations.
"""

import dataclasses
import functools

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from labkit import accounting
from labkit.configs import SIZES, ModelConfig
from labkit.measure.memory import residuals, saved_bytes
from labkit.models.transformer import TransformerLM, language_model_loss

# Dimensions without common factors, so that no two terms of a formula can stand in for one another.
ODD = ModelConfig("odd", d_model=42, d_ff=110, num_layers=3, num_heads=7, vocab_size=97)
small_cases = pytest.mark.parametrize(
    "config, batch, context",
    [(ODD, 3, 10), (dataclasses.replace(ODD, num_layers=1), 1, 1)],
)


@pytest.mark.parametrize("config", [*SIZES.values(), ODD])
def test_parameter_counts_are_those_of_the_modules(config):
    model = TransformerLM(config, max_context=8, device="meta")

    def count(module):
        return sum(parameter.numel() for parameter in module.parameters())

    assert accounting.num_parameters(config) == count(model)
    assert accounting.num_block_parameters(config) == count(model.blocks)
    # Every matrix multiplies every token but the embedding table, which is looked up.
    matrices = sum(parameter.numel() for parameter in model.parameters() if parameter.dim() == 2)
    assert accounting.num_matmul_parameters(config) == matrices - count(model.embedding)


@small_cases
@pytest.mark.parametrize("phase", ["forward", "backward", "train_step"])
def test_phase_flops_are_the_matrix_products_that_run(config, batch, context, phase):
    """Eager attention masks after the product, so what runs is the full count.

    A backward pass is exactly two forwards: each product gives two, one per operand. The first
    layer is no exception: what goes into it is the embedding, which has a gradient of its own.
    """
    model = TransformerLM(config, max_context=context, attention="eager")
    tokens, targets = torch.randint(config.vocab_size, (2, batch, context))
    optimizer = torch.optim.SGD(model.parameters())

    def loss():
        return language_model_loss(model(tokens), targets)

    def train_step():
        loss().backward()
        optimizer.step()

    runs = {"forward": loss, "backward": loss().backward, "train_step": train_step}
    with FlopCounterMode(display=False) as counter:
        runs[phase]()
    predicted = accounting.phase_flops(config, batch, context, phase, causal=False)
    assert counter.get_total_flops() == predicted


@small_cases
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("impl, kind", [("eager", "eager"), ("sdpa_flash", "fused")])
def test_a_block_keeps_what_autograd_keeps(config, batch, context, precision, impl, kind):
    model = TransformerLM(config, max_context=context, attention=impl)
    x_BTC = torch.randn(batch, context, config.d_model, requires_grad=True)
    block = model.blocks[0]
    resident = [*model.parameters(), *model.rotary.buffers()]
    run = functools.partial(block, x_BTC, model.rotary)
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        kept = residuals(run, resident, is_compiled=False)
    known = {"precision": precision, "attention": kind}
    predicted = accounting.block_activation_bytes(config, batch, context, **known)
    assert saved_bytes(kept) == predicted


@pytest.mark.parametrize("sizes", [(7, 7), (5, 9)])
@pytest.mark.parametrize("limits", [(-1, 0), (3, 1)])
def test_pairs_are_those_that_the_mask_shows(sizes, limits):
    before, after = (99 if limit < 0 else limit for limit in limits)
    own = sizes[1] - sizes[0]
    shown = torch.ones(sizes).tril(own + after).triu(own - before)
    halves = shown.diagonal(own).sum() / 2 if after == 0 else 0
    assert accounting.attention_pairs(*sizes, *limits) == shown.sum() - halves


@pytest.mark.parametrize("operation", accounting.OPERATIONS)
def test_a_ring_sends_a_shard_in_each_of_its_steps(operation):
    n = 8
    num_steps = {"all_reduce": 2 * (n - 1), "broadcast": n}.get(operation, n - 1)
    assert accounting.bus_factor(operation, n) == pytest.approx(num_steps / n)
    seconds = accounting.ring_seconds(operation, 1e9, n, 1.8e11)
    assert seconds == pytest.approx(num_steps / n * 1e9 / 1.8e11)
