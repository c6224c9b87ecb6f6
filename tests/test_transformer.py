"""The model is the one its formulas say, in every implementation, with no look ahead.

Shape suffixes as in labkit.models.transformer: B batch, T tokens, C d_model, H heads, D head
dimension, V vocabulary.
"""

import math
from unittest import mock

import pytest
import torch
from torch import Tensor

from labkit.configs import RMS_NORM_EPS, SIZES, ModelConfig
from labkit.models.transformer import (
    ATTENTION,
    MODEL_IMPLS,
    RMSNorm,
    TransformerLM,
)

TINY = ModelConfig("tiny", d_model=48, d_ff=80, num_layers=2, num_heads=3, vocab_size=61)


def build(attention: str = "eager", **options) -> TransformerLM:
    """Returns a model with weights drawn large enough that attention is far from uniform, gains
    unlike one.
    """
    torch.manual_seed(0)
    model = TransformerLM(TINY, max_context=40, attention=attention, **options)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=2 / math.sqrt(parameter.shape[1]))
            else:
                parameter.uniform_(0.5, 1.5)
    return model


def draw_tokens(context: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(TINY.vocab_size, (2, context), generator=generator)


def unit_roundoff(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2


def rotate_reference(x_BHTD: Tensor, theta: float) -> Tensor:
    """RoPE as a product of complex numbers: pair i of position t is multiplied by
    exp(i·t·θ^(−2i/D)).
    """
    num_tokens, d_head = x_BHTD.shape[-2:]
    position = torch.arange(num_tokens, dtype=torch.float64)[:, None]
    angle = position * theta ** (-2 * torch.arange(d_head // 2, dtype=torch.float64) / d_head)
    pairs = torch.complex(*x_BHTD.chunk(2, dim=-1))
    turned = pairs * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((turned.real, turned.imag), dim=-1)


def norm_reference(x: Tensor, weight: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + RMS_NORM_EPS) * weight


MATRICES = (
    *(f"attention.{name}_proj" for name in ("q", "k", "v", "out")),
    *(f"feed_forward.{name}_proj" for name in ("gate", "up", "down")),
)
IN_BLOCK = ("attention_norm", "feed_forward_norm", *MATRICES)


def logits_reference(weights: dict[str, Tensor], tokens_BT: Tensor) -> Tensor:
    """The whole model from its published formulas, in the weights' dtype (fp64), sharing no code
    with labkit.
    """
    x_BTC = weights["embedding.weight"][tokens_BT]
    hidden_TT = torch.ones(2 * tokens_BT.shape[1:]).triu(1).bool()
    for layer in range(TINY.num_layers):
        block = {name: weights[f"blocks.{layer}.{name}.weight"] for name in IN_BLOCK}
        normed = norm_reference(x_BTC, block["attention_norm"])
        q, k, v, out, gate, up, down = (block[name].T for name in MATRICES)
        q, k, v = (
            (normed @ matrix).unflatten(2, (TINY.num_heads, -1)).transpose(1, 2)
            for matrix in (q, k, v)
        )
        q, k = rotate_reference(q, TINY.rope_theta), rotate_reference(k, TINY.rope_theta)
        scores = (q @ k.mT / math.sqrt(TINY.d_head)).masked_fill(hidden_TT, -math.inf)
        heads = torch.softmax(scores, dim=-1) @ v
        x_BTC = x_BTC + heads.transpose(1, 2).flatten(2) @ out
        normed = norm_reference(x_BTC, block["feed_forward_norm"])
        gated = normed @ gate * torch.sigmoid(normed @ gate)
        x_BTC = x_BTC + gated * (normed @ up) @ down
    return norm_reference(x_BTC, weights["norm.weight"]) @ weights["head.weight"].T


def with_gradients(logits_BTV: Tensor, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the logits and the gradient of a fixed weighted sum of them by every parameter."""
    direction = torch.linspace(-1, 1.5, logits_BTV.numel()).view(logits_BTV.shape).to(logits_BTV)
    gradients = torch.autograd.grad(logits_BTV, list(weights.values()), direction)
    return {"logits": logits_BTV.detach(), **dict(zip(weights, gradients, strict=True))}


def test_eager_computes_the_formulas():
    """A sum of n products is off by at most n·u of the sum of their magnitudes; the longest here
    has d_ff. Wrong formulas are off by the size of the values themselves.
    """
    model, tokens_BT = build(), draw_tokens(33)
    parameters = dict(model.named_parameters())
    weights = {name: p.detach().double().requires_grad_() for name, p in parameters.items()}
    exact = with_gradients(logits_reference(weights, tokens_BT), weights)
    bound = TINY.num_layers * TINY.d_ff * unit_roundoff(torch.float32)
    for name, value in with_gradients(model(tokens_BT), parameters).items():
        assert (value - exact[name]).abs().max() <= bound * exact[name].abs().max(), name


def loss_and_gradients(
    impl: str, compiled: bool, autocast: bool, device: str, dtype=torch.float32
) -> dict[str, Tensor]:
    model, tokens_BT = build(impl=impl).to(device, dtype), draw_tokens(5).to(device)
    if compiled:
        model.compile(backend="aot_eager" if device == "cpu" else "inductor", fullgraph=True)
    with torch.autocast(device, torch.bfloat16, enabled=autocast):
        loss = model(tokens_BT, tokens_BT.roll(-1, 1))
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {"loss": loss.detach()} | gradients


def check_loss_and_gradients(run, compiled=False, autocast=False, device="cpu") -> None:
    """Asserts that the fused model's errors against fp64 are at most thrice the eager one's and a
    rounding, and that gradients have the parameters' dtype.
    """
    exact = loss_and_gradients("eager", False, False, device, torch.float64)
    eager = loss_and_gradients("eager", False, autocast, device)
    other = run(loss_and_gradients, "fused", compiled, autocast, device)
    rounding = unit_roundoff(torch.bfloat16 if autocast else torch.float32)
    for name, reference in exact.items():
        errors = [((x[name] - reference).norm() / reference.norm()).item() for x in (other, eager)]
        assert errors[0] <= 3 * (errors[1] + rounding), (name, errors)
        assert name == "loss" or other[name].dtype == torch.float32


def call(function, *arguments):
    return function(*arguments)


def test_other_implementations_are_as_near_to_the_formulas_as_eager(interpreted):
    check_loss_and_gradients(interpreted)
    check_loss_and_gradients(interpreted, autocast=True)
    check_loss_and_gradients(call, compiled=True, autocast=True)


@pytest.mark.gpu
@pytest.mark.parametrize(("compiled", "autocast"), [(False, False), (True, True)])
def test_on_a_gpu_the_fused_model_is_as_near_to_the_formulas_as_eager(compiled, autocast):
    check_loss_and_gradients(call, compiled, autocast, "cuda")


def test_a_model_runs_the_attention_that_it_names_and_no_token_sees_a_later_one(monkeypatch):
    """Each attention by itself is held to its budget in test_attention_impls."""
    sdpa = mock.Mock(side_effect=ATTENTION["sdpa"])
    monkeypatch.setitem(ATTENTION, "sdpa", sdpa)
    model, tokens_BT = build("sdpa"), draw_tokens(12)
    before_BTV = model(tokens_BT)
    assert [call.kwargs for call in sdpa.mock_calls] == [{"causal": True}] * TINY.num_layers
    torch.testing.assert_close(before_BTV, build()(tokens_BT), rtol=1e-4, atol=1e-4)
    changed_BT = tokens_BT.clone()
    changed_BT[1, 5] = (changed_BT[1, 5] + 1) % TINY.vocab_size
    differs_BT = (model(changed_BT) != before_BTV).any(dim=-1)
    assert differs_BT.tolist() == [12 * [False], 5 * [False] + 7 * [True]]


@pytest.mark.parametrize("impl", MODEL_IMPLS)
def test_parameters_are_those_of_the_formulas_and_drawn_as_documented(impl):
    torch.manual_seed(0)
    model = TransformerLM(SIZES["nano"], max_context=8, impl=impl)
    layers = range(SIZES["nano"].num_layers)
    expected = {f"blocks.{layer}.{name}.weight" for layer in layers for name in IN_BLOCK}
    expected |= {"embedding.weight", "norm.weight", "head.weight"}
    # A head that is tied to the embedding would not be listed; tables of positions are not saved.
    assert {name for name, _ in model.named_parameters()} == expected == set(model.state_dict())
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            assert torch.equal(parameter, torch.ones_like(parameter)), name
        else:
            # The deviation estimated from n draws scatters by 1/sqrt(2n): five sigmas.
            bound = 5 / math.sqrt(2 * parameter.numel())
            assert abs(parameter.std().item() / 0.02 - 1) <= bound, name


# At 1e-3 the mean square is below the epsilon, which then decides.
@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e4])
def test_rms_norm_of_16_bits_is_its_formula_rounded_once(scale):
    generator = torch.Generator().manual_seed(3)
    norm, x = RMSNorm(64), (scale * torch.randn(5, 7, 64, generator=generator)).bfloat16()
    torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    reference = norm_reference(x.double(), norm.weight.double())
    relative = (norm(x).double() - reference).abs() / reference.abs()
    # The mean of 64 squares is off by at most 66 roundings, of which the root halves the effect;
    # then four more, and in bf16 a last one. Statistics in bf16 would be off by several.
    bound = (66 / 2 + 4) * unit_roundoff(torch.float32) + unit_roundoff(torch.bfloat16)
    assert norm(x).dtype == torch.bfloat16 and relative.max().item() <= bound
