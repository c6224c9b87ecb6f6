"""The closed forms against what PyTorch itself counts: parameters, FLOPs, saved bytes, optimizer state."""

import dataclasses

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from labkit import accounting
from labkit.configs import PHASES, SIZES, ModelConfig
from labkit.models.transformer import TransformerLM, language_model_loss

# Dimensions without common factors, so that no two terms of a formula can stand in for one another.
ODD = ModelConfig("odd", "test", d_model=42, d_ff=110, num_layers=3, num_heads=7, vocab_size=97)
SMALL_CASES = {
    "odd": (ODD, 3, 10),
    "nano": (SIZES["nano"], 2, 24),
    "one token": (dataclasses.replace(ODD, num_layers=1), 1, 1),
}
small_cases = pytest.mark.parametrize(("config", "batch", "context"), SMALL_CASES.values(), ids=SMALL_CASES)


def build(config: ModelConfig, batch: int, context: int, device: str = "cpu") -> tuple:
    """Returns a model with eager attention, tokens and targets; each of the two a tensor of its own."""
    torch.manual_seed(0)
    model = TransformerLM(config, max_context=context, attention="eager", device=device)
    tokens, targets = (torch.randint(config.vocab_size, (batch, context), device=device) for _ in range(2))
    return model, tokens, targets


# ---- parameters ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [*SIZES.values(), ODD], ids=lambda config: config.name)
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
def test_parameter_and_optimizer_bytes_are_those_of_the_tensors(config, batch, context):
    model, tokens, targets = build(config, batch, context)
    optimizer = torch.optim.AdamW(model.parameters())
    language_model_loss(model(tokens), targets).backward()
    optimizer.step()

    parameter_bytes = sum(parameter.nbytes for parameter in model.parameters())
    gradient_bytes = sum(parameter.grad.nbytes for parameter in model.parameters())
    # AdamW keeps a step counter per tensor too (four bytes each), which the closed form leaves out.
    moment_bytes = sum(
        tensor.nbytes for state in optimizer.state.values() for name, tensor in state.items() if name != "step"
    )
    assert accounting.parameter_bytes(config) == parameter_bytes == gradient_bytes
    assert accounting.optimizer_state_bytes(config) == moment_bytes
    read, written = parameter_bytes + gradient_bytes + moment_bytes, parameter_bytes + moment_bytes
    assert accounting.optimizer_step_bytes(config) == read + written


def test_parameter_bytes_follow_the_element_size():
    model = TransformerLM(ODD, max_context=8, device="meta", dtype=torch.bfloat16)
    assert accounting.parameter_bytes(ODD, bytes_per_element=2) == sum(p.nbytes for p in model.parameters())


# ---- FLOPs --------------------------------------------------------------------------------------------------


def counted_flops(function) -> int:
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


@small_cases
@pytest.mark.parametrize("phase", ["inference", "forward", "backward", "forward_backward", "train_step"])
def test_phase_flops_are_the_matrix_products_that_run(config, batch, context, phase):
    """Eager attention masks after the product, so what runs is the full count.

    A backward pass is exactly two forwards: each product gives two, one per operand. The first layer is no
    exception: what goes into it is the embedding, which has a gradient of its own.
    """
    model, tokens, targets = build(config, batch, context)
    optimizer = torch.optim.SGD(model.parameters())

    def loss():
        return language_model_loss(model(tokens), targets)

    def train_step():
        loss().backward()
        optimizer.step()

    runs = {
        "inference": torch.no_grad()(lambda: model(tokens)),
        "forward": loss,
        "backward": loss().backward,
        "forward_backward": lambda: loss().backward(),
        "train_step": train_step,
    }
    assert counted_flops(runs[phase]) == accounting.phase_flops(config, batch, context, phase, causal=False)


@pytest.mark.parametrize("name", ["xl-2025", "10b"])
def test_forward_flops_hold_for_a_large_size(name):
    config = dataclasses.replace(SIZES[name], num_layers=2)
    model, tokens, _ = build(config, 4, 128, device="meta")
    assert counted_flops(lambda: model(tokens)) == accounting.forward_flops(config, 4, 128, causal=False)


def test_causal_attention_is_half_of_the_full_and_the_rest_is_untouched():
    full = accounting.attention_flops(ODD, 3, 10, causal=False)
    causal = accounting.attention_flops(ODD, 3, 10, causal=True)
    assert 2 * causal == full
    forward = [accounting.forward_flops(ODD, 3, 10, causal=flag) for flag in (False, True)]
    assert forward[0] - forward[1] == full - causal


def test_attention_flops_are_the_difference_that_the_square_of_the_context_makes():
    # The rest grows in proportion to the tokens: twice the context at half the batch leaves it the same.
    once = counted_flops(lambda: build(ODD, 4, 10, device="meta")[0](torch.zeros(4, 10, dtype=int, device="meta")))
    twice = counted_flops(lambda: build(ODD, 2, 20, device="meta")[0](torch.zeros(2, 20, dtype=int, device="meta")))
    assert twice - once == accounting.attention_flops(ODD, 4, 10, causal=False)


def test_every_phase_has_its_flops_and_an_unknown_one_is_refused():
    for phase in PHASES:
        flops = accounting.phase_flops(ODD, 3, 10, phase, causal=True)
        # The optimizer step has no matrix products: bytes bound it.
        assert flops is None if phase == "optimizer_step" else flops > 0
    with pytest.raises(ValueError) as caught:
        accounting.phase_flops(ODD, 3, 10, "sideways", causal=True)
    assert "'sideways'" in str(caught.value)
    assert all(phase in str(caught.value) for phase in PHASES)


# ---- activations --------------------------------------------------------------------------------------------


def saved_bytes(function, excluded: set[int]) -> int:
    """Returns the bytes of the distinct storages that autograd keeps for the backward pass of `function`.

    Several saved tensors may be views of one storage, which takes its memory once; parameters are kept anyway.
    """
    saved = []

    def pack(tensor):
        saved.append(tensor)  # also keeps the storage alive, so that no address comes up twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = function()
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in saved}
    del result
    return sum(num_bytes for address, num_bytes in storages.items() if address not in excluded)


@small_cases
def test_activation_bytes_are_what_autograd_keeps(config, batch, context):
    model, tokens, targets = build(config, batch, context)
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept = saved_bytes(lambda: language_model_loss(model(tokens), targets), parameters)
    assert kept == accounting.activation_bytes(config, batch, context)


@small_cases
def test_block_activation_bytes_are_what_one_block_keeps(config, batch, context):
    model, _, _ = build(config, batch, context)
    block = model.blocks[0]
    x_BTC = torch.randn(batch, context, config.d_model, requires_grad=True)
    tables = {buffer.untyped_storage().data_ptr() for buffer in model.rotary.buffers()}
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept = saved_bytes(lambda: block(x_BTC, model.rotary), parameters | tables)
    assert kept == accounting.block_activation_bytes(config, batch, context)
