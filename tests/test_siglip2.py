"""The SigLIP 2 encoder: every implementation against fp64 image by image, and against transformers.

Shape suffixes as in labkit.models.siglip2: I images, M patches of all images, C d_model, K values
of a patch.
"""

import dataclasses
import functools
import math
import re

import pytest
import torch
import torch.nn.functional as F
from kernel_operations import poisoned_memory
from torch import Tensor

from labkit.configs import SIGLIP2_SIZES
from labkit.models.siglip2 import IMPLS, Siglip2Encoder

TINY = dataclasses.replace(SIGLIP2_SIZES["tiny"], d_model=48, d_ff=80)
# Shorter and longer than the table of positions, one patch, a side of one, the table's own.
GRIDS = ((3, 5), (1, 1), (4, 4), (7, 2), (1, 9), (6, 11))


DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def draw(*shape: int, seed: int = 1, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def build(impl: str, dtype=torch.float32, config=TINY, **options) -> Siglip2Encoder:
    """Returns a model in eval mode, its gains and biases unlike ones and zeros."""
    torch.manual_seed(0)
    model = Siglip2Encoder(config, impl, dtype=dtype, **options).eval()
    state = model.state_dict()
    for seed, name in enumerate(sorted(state)):
        if state[name].dim() == 1:
            state[name].add_(draw(*state[name].shape, seed=seed, scale=0.2))
    model.load_state_dict(state)
    return model


def batch(grids=GRIDS, dtype=torch.float32) -> tuple[Tensor, Tensor]:
    num_patches = sum(height * width for height, width in grids)
    return draw(num_patches, TINY.patch_dim).to(dtype), torch.tensor(grids)


# ---- the encoder against fp64, image by image ----------------------------------------------------


def encode_reference(weights: dict[str, Tensor], grids, patches_MK: Tensor) -> Tensor:
    """Every image on its own from the published formulas, in the weights' dtype, sharing no code
    with labkit.
    """

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def norm(x: Tensor, name: str) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        scaled = centred / torch.sqrt(centred.pow(2).mean(-1, keepdim=True) + 1e-6)
        return scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    side, outs = TINY.position_side, []
    table = weights["position_embedding.weight"].T.reshape(1, -1, side, side)
    for grid, patches in zip(grids, patches_MK.split([h * w for h, w in grids]), strict=True):
        positions = F.interpolate(table, grid, mode="bilinear", antialias=True)
        x = linear(patches, "patch_embedding") + positions.flatten(2)[0].T
        for layer in (f"layers.{index}" for index in range(TINY.num_layers)):
            normed = norm(x, f"{layer}.layer_norm1")
            q, k, v = (
                linear(normed, f"{layer}.self_attn.{name}_proj")
                .unflatten(1, (TINY.num_heads, -1))
                .transpose(0, 1)
                for name in "qkv"
            )
            heads = torch.softmax(q @ k.mT / math.sqrt(TINY.d_head), dim=-1) @ v
            x = x + linear(heads.transpose(0, 1).flatten(1), f"{layer}.self_attn.out_proj")
            z = linear(norm(x, f"{layer}.layer_norm2"), f"{layer}.mlp.fc1")
            gelu = z / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))
            x = x + linear(gelu, f"{layer}.mlp.fc2")
        outs.append(norm(x, "post_layernorm"))
    return torch.cat(outs)


def with_gradients(encode, weights: dict[str, Tensor], patches_MK: Tensor) -> dict[str, Tensor]:
    """Returns the output and the gradient of a weighted sum of it by every weight, q, k and v
    apart.
    """
    leaves = {"patches": patches_MK.detach().requires_grad_(), **weights}
    out_MC = encode(leaves["patches"])
    direction = draw(*out_MC.shape, seed=2).to(out_MC)
    grads = torch.autograd.grad(out_MC, list(leaves.values()), direction)
    results = {"out": out_MC.detach(), **dict(zip(leaves, grads, strict=True))}
    for name in [name for name in results if "qkv_proj" in name]:
        for letter, part in zip("qkv", results.pop(name).chunk(3), strict=True):
            results[name.replace("qkv", letter)] = part
    return {name: value.double() for name, value in results.items()}


def run_model(model: Siglip2Encoder, patches_MK: Tensor, grids_I2) -> dict[str, Tensor]:
    encode = functools.partial(model, grids=grids_I2)
    return with_gradients(encode, dict(model.named_parameters()), patches_MK)


@functools.cache
def reference(dtype: torch.dtype, grids=GRIDS) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Returns what is exact for weights and patches of a dtype, and eager's in it."""
    model, (patches_MK, grids_I2) = build("eager", dtype), batch(grids, dtype)
    weights = {name: p.detach().double().requires_grad_() for name, p in model.named_parameters()}
    encode = functools.partial(encode_reference, weights, grids)
    exact = with_gradients(encode, weights, patches_MK.double())
    return exact, run_model(model, patches_MK, grids_I2)


def scale(results: dict[str, Tensor], name: str) -> float:
    """A softmax does not change with the bias of k, whose gradient is rounding alone: its scale is
    that of q's bias.
    """
    return results[name.replace("k_proj.bias", "q_proj.bias")].abs().max().item()


def check_errors(impl: str, dtype: torch.dtype, device="cpu", grids=GRIDS, recomputed=0) -> None:
    """Asserts that errors against fp64 are in the budget: 2 (gradients 3) × (eager's + a rounding
    of the largest value).
    """
    exact, eager = reference(dtype, grids)
    patches_MK, grids_I2 = batch(grids, dtype)
    with poisoned_memory():
        model = build(impl, dtype, recomputed=recomputed).to(device)
        results = run_model(model, patches_MK.to(device), grids_I2)
    for name, value in exact.items():
        allowed = (eager[name] - value).abs().max().item()
        rounding = torch.finfo(dtype).eps / 2 * scale(exact, name)
        error = (results[name].cpu() - value).abs().max().item()
        assert error <= (2 if name == "out" else 3) * (allowed + rounding), name


def test_eager_computes_the_formulas():
    """A sum of n products is off by at most n·u of the sum of their magnitudes; the longest here is
    over d_ff.
    """
    exact, eager = reference(torch.float32)
    for name, value in exact.items():
        roundings = TINY.num_layers * TINY.d_ff * torch.finfo(torch.float32).eps / 2
        assert (eager[name] - value).abs().max().item() <= roundings * scale(exact, name), name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("impl", IMPLS[1:])
def test_every_step_is_within_the_error_budget(impl, dtype):
    check_errors(impl, dtype)


def test_interpreted_the_kernels_are_within_the_error_budget(interpreted):
    # Images of as many patches each, which attention takes as a batch.
    interpreted(check_errors, "fused", torch.float32, "cpu", ((3, 5), (5, 3)), 1)


@pytest.mark.gpu
@pytest.mark.parametrize("impl", IMPLS)
def test_on_a_gpu_every_step_is_within_the_error_budget(impl):
    for dtype in DTYPES:
        check_errors(impl, dtype, "cuda")


def test_it_agrees_with_transformers():
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    torch.manual_seed(0)
    config = transformers.Siglip2VisionConfig(
        hidden_size=TINY.d_model,
        intermediate_size=TINY.d_ff,
        num_hidden_layers=TINY.num_layers,
        num_attention_heads=TINY.num_heads,
        patch_size=4,
        num_patches=TINY.position_side**2,
    )
    theirs = transformers.Siglip2VisionModel(config).eval()
    patches_MK, grids_I2 = batch()
    sizes_I = grids_I2.prod(1)
    padded = torch.nn.utils.rnn.pad_sequence(patches_MK.split(sizes_I.tolist()), batch_first=True)
    mask = torch.arange(padded.shape[1]) < sizes_I[:, None]
    expected_MC = theirs(padded, mask, grids_I2).last_hidden_state[mask]
    prefixes = re.compile(r"^(vision_model\.)?(embeddings\.|encoder\.)?")
    state = {prefixes.sub("", name): value for name, value in theirs.state_dict().items()}
    state = {name: value for name, value in state.items() if not name.startswith("head.")}
    for impl in IMPLS:
        ours = build(impl)
        ours.load_state_dict(state)
        torch.testing.assert_close(ours(patches_MK, grids_I2), expected_MC, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("impl", ["eager", "fused"])
def test_grids_that_are_rewritten_are_read_again(impl):
    """By what does not raise a tensor's version too."""
    model, (patches_MK, grids_I2) = build(impl), batch()
    before = model(patches_MK, grids_I2)
    grids_I2.numpy()[0] = (5, 3)
    after = model(patches_MK, grids_I2)
    assert torch.equal(after, model(patches_MK, torch.tensor([[5, 3], *GRIDS[1:]])))
    assert not torch.equal(after, before)


def test_attention_that_would_not_run_is_refused():
    with pytest.raises(ValueError, match="attend with impl='positions'; accepted: from 'attention"):
        build("positions", attend=print)


# ---- modes and copies ----------------------------------------------------------------------------


@pytest.mark.parametrize("impl", IMPLS)
def test_autocast_is_near_what_it_casts(impl):
    """Forward and backward; from "norm" on the last norm gives the dtype of autocast."""
    model, (patches_MK, grids_I2) = build(impl), batch()

    def encode(patches_MK: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            out_MC = model(patches_MK, grids_I2)
        assert out_MC.dtype == (torch.bfloat16 if impl in IMPLS[4:] else torch.float32)
        return out_MC

    results = with_gradients(encode, dict(model.named_parameters()), patches_MK)
    plain = run_model(model, patches_MK, grids_I2)
    for name, value in plain.items():
        assert (results[name] - value).abs().max() <= 0.1 * scale(plain, name), name


@pytest.mark.parametrize(
    ("num_patches", "grids", "message"),
    [
        (6, torch.tensor([[-2, -3]]), "of sides of at least 1; got tensor"),
        (5, torch.tensor([[2, 3]]), "grids of 6 patches; accepted: of as many as there are, 5"),
        (6, torch.tensor([[2.0, 3.0]]), "grids must be an int32 or int64 tensor"),
    ],
)
def test_bad_grids_are_refused(num_patches, grids, message):
    for impl in ("cu_seqlens", "fused"):
        with pytest.raises(ValueError, match=message):
            build(impl)(draw(num_patches, 48), grids)


def test_compiled_as_one_graph_it_is_the_same():
    """With a packing; test_siglip2_experiment counts where others break the graph."""
    torch._dynamo.reset()
    model = build("fused", config=dataclasses.replace(TINY, dropout=0.0, num_layers=1)).train()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    patches_MK, grids_I2 = batch(GRIDS[1:])
    encode = functools.partial(compiled, grids=model.pack(grids_I2))
    results = with_gradients(encode, dict(model.named_parameters()), patches_MK)
    for name, value in run_model(model, patches_MK, grids_I2).items():
        torch.testing.assert_close(results[name], value, rtol=1e-4, atol=1e-4, msg=name)


# ---- training ------------------------------------------------------------------------------------


def trained(impl: str) -> list[bool]:
    """Returns what holds of dropout in training: repeated by a seed, random, none in eval mode."""
    model, inputs, outs = build(impl).train(), batch(GRIDS[:3]), []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        outs.append(model(*inputs))
    plain = model.eval()(*inputs)
    return [torch.equal(outs[0], other) for other in (outs[1], outs[2], plain)]


@pytest.mark.parametrize("impl", ["eager", "fused"])
def test_training_drops_what_a_seed_says(impl, interpreted):
    assert trained(impl) == [True, False, False]
    assert impl == "eager" or interpreted(trained, impl) == [True, False, False]
