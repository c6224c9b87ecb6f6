"""The SigLIP 2 encoder and its kernels: every implementation against fp64 image by image, and
against transformers.

Shape suffixes as in labkit.models.siglip2: I images, M patches of all images, C d_model, K values
of a patch.
"""

import copy
import dataclasses
import functools
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from conftest import more
from test_vision_kernels import DTYPES, draw, poisoned_memory
from torch import Tensor

from labkit.configs import SIGLIP2_SIZES
from labkit.kernels import fused
from labkit.models.siglip2 import IMPLS, Siglip2Encoder

TINY = dataclasses.replace(SIGLIP2_SIZES["tiny"], d_model=48, d_ff=80)
# Shorter and longer than the table of positions, one patch, a side of one, the table's own.
GRIDS = ((3, 5), (1, 1), (4, 4), (7, 2), (1, 9), (6, 11))


def is_interpreted() -> bool:
    torch.set_num_threads(1)
    return fused.IS_INTERPRETED


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


def batch(grids=GRIDS, dtype=torch.float32, config=TINY) -> tuple[Tensor, Tensor]:
    num_patches = sum(height * width for height, width in grids)
    return draw(num_patches, config.patch_dim).to(dtype), torch.tensor(grids)


# ---- the encoder against fp64, image by image ----------------------------------------------------


def encode_reference(weights: dict[str, Tensor], config, patches_MK: Tensor, grids) -> Tensor:
    """Every image on its own from the published formulas, in the weights' dtype, sharing no code
    with labkit.
    """

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def norm(x: Tensor, name: str) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        scaled = centred / torch.sqrt(centred.pow(2).mean(-1, keepdim=True) + 1e-6)
        return scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    side = config.position_side
    table = weights["position_embedding.weight"].T.reshape(1, -1, side, side)
    outs = []
    for (height, width), patches in zip(
        grids, patches_MK.split([h * w for h, w in grids]), strict=True
    ):
        positions = F.interpolate(table, (height, width), mode="bilinear", antialias=True)
        x = linear(patches, "patch_embedding") + positions.flatten(2)[0].T
        for layer in (f"layers.{index}" for index in range(config.num_layers)):
            normed = norm(x, f"{layer}.layer_norm1")
            q, k, v = (
                linear(normed, f"{layer}.self_attn.{name}_proj")
                .view(len(x), config.num_heads, -1)
                .transpose(0, 1)
                for name in "qkv"
            )
            heads = torch.softmax(q @ k.transpose(1, 2) / math.sqrt(config.d_head), dim=-1) @ v
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
    patches_MK = patches_MK.detach().requires_grad_()
    out_MC = encode(patches_MK)
    leaves = {"patches": patches_MK, **weights}
    grads = torch.autograd.grad(
        out_MC, list(leaves.values()), draw(*out_MC.shape, seed=2).to(out_MC)
    )
    results = {"out": out_MC.detach(), **dict(zip(leaves, grads, strict=True))}
    for name in [name for name in results if "qkv_proj" in name]:
        parts = zip("qkv", results.pop(name).chunk(3), strict=True)
        results |= {name.replace("qkv", letter): part for letter, part in parts}
    return {name: value.double() for name, value in results.items()}


def run_model(model: Siglip2Encoder, patches_MK: Tensor, grids) -> dict[str, Tensor]:
    return with_gradients(
        lambda patches: model(patches, grids), dict(model.named_parameters()), patches_MK
    )


@functools.cache
def reference(dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Returns what is exact for weights and patches of a dtype, and eager's in it."""
    model, (patches_MK, grids) = build("eager", dtype), batch(dtype=dtype)
    weights = {name: p.detach().double().requires_grad_() for name, p in model.named_parameters()}
    encode = functools.partial(encode_reference, weights, TINY, grids=GRIDS)
    return with_gradients(encode, weights, patches_MK.double()), run_model(model, patches_MK, grids)


def excess(results: dict[str, Tensor], dtype: torch.dtype) -> dict[str, float]:
    """Returns each error against fp64 over the budget: 2 (gradients 3) × (eager's + a rounding of
    the largest value).

    A softmax does not change with the bias of k, whose gradient is rounding alone: its scale is
    that of q's bias.
    """
    exact, eager = reference(dtype)
    fractions = {}
    for name, value in exact.items():
        scale = exact[name.replace("k_proj.bias", "q_proj.bias")].abs().max().item()
        error, allowed = ((x - value).abs().max().item() for x in (results[name], eager[name]))
        budget = (2 if name == "out" else 3) * (allowed + torch.finfo(dtype).eps / 2 * scale)
        fractions[name] = error / budget if math.isfinite(error) else math.inf
    return fractions


def test_eager_computes_the_formulas():
    """A sum of n products is off by at most n·u of the sum of their magnitudes; the longest here is
    over d_ff.
    """
    exact, eager = reference(torch.float32)
    for name, value in exact.items():
        scale = exact[name.replace("k_proj.bias", "q_proj.bias")].abs().max().item()
        bound = TINY.num_layers * TINY.d_ff * torch.finfo(torch.float32).eps / 2 * scale
        assert (eager[name] - value).abs().max().item() <= bound, name


def impl_excess(impl: str, dtype: torch.dtype, options: dict) -> dict[str, float]:
    with poisoned_memory():
        patches_MK, grids = batch(dtype=dtype)
        return excess(run_model(build(impl, dtype, **options), patches_MK, grids), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("impl", IMPLS[1:])
def test_every_step_is_within_the_error_budget(impl, dtype):
    fractions = impl_excess(impl, dtype, {})
    assert all(fraction <= 1 for fraction in fractions.values()), fractions


@pytest.mark.parametrize(
    "options",
    more({}, {"recomputed": 1}),
    ids=str,
)
def test_interpreted_the_kernels_are_within_the_error_budget(options, interpreted):
    fractions = interpreted(impl_excess, "fused", torch.float32, options)
    assert all(fraction <= 1 for fraction in fractions.values()), fractions


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("impl", IMPLS)
def test_on_a_gpu_every_step_is_within_the_error_budget(impl, dtype):
    patches_MK, grids = batch(dtype=dtype)
    results = run_model(build(impl, dtype).cuda(), patches_MK.cuda(), grids)
    fractions = excess({name: value.cpu() for name, value in results.items()}, dtype)
    assert all(fraction <= 1 for fraction in fractions.values()), fractions


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
    assert TINY.patch_dim == 3 * config.patch_size**2
    theirs = transformers.Siglip2VisionModel(config).eval()
    patches_MK, grids_I2 = batch()
    sizes = grids_I2.prod(1).tolist()
    padded = torch.nn.utils.rnn.pad_sequence(patches_MK.split(sizes), batch_first=True)
    mask = torch.arange(padded.shape[1]) < grids_I2.prod(1)[:, None]
    expected_MC = theirs(padded, mask, grids_I2).last_hidden_state[mask]
    for impl in IMPLS:
        ours = build(impl)
        ours.load_from_transformers(theirs)
        torch.testing.assert_close(ours(patches_MK, grids_I2), expected_MC, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("impl", IMPLS)
def test_state_dicts_interchange_both_ways(impl):
    eager, other = build("eager"), Siglip2Encoder(TINY, impl)
    other.load_state_dict(eager.state_dict())
    state = other.state_dict()
    assert state.keys() == eager.state_dict().keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in eager.state_dict().items())
    Siglip2Encoder(TINY, "eager").load_state_dict(state)
    del state["layers.0.self_attn.k_proj.weight"]
    with pytest.raises(RuntimeError, match=r"layers\.0\.self_attn"):
        other.load_state_dict(state)


def test_one_seed_draws_the_same_parameters_in_every_implementation():
    states = []
    for impl in IMPLS:
        torch.manual_seed(3)
        states.append(Siglip2Encoder(TINY, impl).state_dict())
    for state in states[1:]:
        assert all(torch.equal(tensor, states[0][name]) for name, tensor in state.items())


@pytest.mark.parametrize("impl", IMPLS)
def test_no_image_sees_another(impl):
    model, (patches_MK, grids_I2) = build(impl), batch()
    whole_MC = model(patches_MK, grids_I2)
    sizes = grids_I2.prod(1).tolist()
    for image, (patches, rows) in enumerate(
        zip(patches_MK.split(sizes), whole_MC.split(sizes), strict=True)
    ):
        torch.testing.assert_close(
            model(patches, grids_I2[image : image + 1]), rows, rtol=1e-4, atol=1e-5
        )


def test_a_packing_is_of_the_values_of_grids():
    model, (patches_MK, grids_I2) = build("fused"), batch()
    packing = model.pack(grids_I2)
    assert packing.longest == 66 and packing.cu_seqlens.tolist() == [0, 15, 16, 32, 46, 55, 121]
    assert torch.equal(model(patches_MK, packing), model(patches_MK, grids_I2))
    with pytest.raises(TypeError, match="grids must be a tensor with impl='eager'; got a packing"):
        build("eager")(patches_MK, packing)
    assert model.double().pack(grids_I2).positions.dtype == torch.float64


@pytest.mark.parametrize("impl", IMPLS)
def test_grids_that_are_rewritten_are_read_again(impl):
    """By what does not raise a tensor's version too."""
    model, (patches_MK, grids_I2) = build(impl), batch()
    before = model(patches_MK, grids_I2)
    swapped = torch.tensor([[5, 3], *GRIDS[1:]])
    expected = model(patches_MK, swapped)
    grids_I2.numpy()[0] = (5, 3)
    after = model(patches_MK, grids_I2)
    assert torch.equal(after, expected) and not torch.equal(after, before)
    grids_I2.data[0] = torch.tensor([5, 4])
    with pytest.raises(ValueError, match="they sum to 126, and there are 121"):
        model(patches_MK, grids_I2)


@pytest.mark.parametrize("impl", IMPLS)
def test_autocast_is_near_what_it_casts(impl):
    """Forward and backward; from "norm" on the last norm gives the dtype of autocast."""
    model, (patches_MK, grids_I2) = build(impl), batch()
    weights = dict(model.named_parameters())

    def encode(patches_MK):
        with torch.autocast("cpu", torch.bfloat16):
            out_MC = model(patches_MK, grids_I2)
        assert out_MC.dtype == (torch.bfloat16 if impl in IMPLS[4:] else torch.float32)
        return out_MC

    found, plain = (
        with_gradients(encode, weights, patches_MK),
        run_model(model, patches_MK, grids_I2),
    )
    for name, value in plain.items():
        scale = plain[name.replace("k_proj.bias", "q_proj.bias")].abs().max()
        assert (found[name] - value).abs().max() <= 0.1 * scale, name


@pytest.mark.parametrize("impl", IMPLS)
def test_a_model_on_the_meta_device_gives_shapes(impl):
    model, (patches_MK, grids_I2) = Siglip2Encoder(TINY, impl, device="meta").train(), batch()
    patches_MK = patches_MK.to("meta")
    model(patches_MK, grids_I2).sum().backward()
    assert model(patches_MK, grids_I2).shape == (patches_MK.shape[0], TINY.d_model)
    assert all(weight.grad.shape == weight.shape for weight in model.parameters())
    if IMPLS.index(impl) > 1:  # those before interpolate image by image
        assert model(patches_MK, grids_I2.to("meta")).shape == (patches_MK.shape[0], TINY.d_model)
    # Filled with a state, it is the model that the state is of.
    filled, whole = model.to_empty(device="cpu").eval(), build(impl)
    filled.load_state_dict(whole.state_dict())
    assert torch.equal(filled(*batch()), whole(*batch()))


@pytest.mark.parametrize("impl", ["eager", "cu_seqlens", "fused"])
def test_copies_and_calls_of_functions_are_the_model(impl):
    model, (patches_MK, grids_I2) = build(impl), batch()
    expected = model(patches_MK, grids_I2)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(patches_MK, grids_I2), expected)
        assert other.state_dict().keys() == model.state_dict().keys()
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    assert torch.equal(
        torch.func.functional_call(build(impl).double(), weights, (patches_MK, grids_I2)), expected
    )


ONE = torch.tensor([[2, 3]])
BAD_INPUT = {
    "patches missing": (
        draw(5, 48),
        ONE,
        "must sum to the number of patches; they sum to 6, and there are 5",
    ),
    "a zero side": (
        draw(6, 48),
        torch.tensor([[2, 3], [0, 4]]),
        "sides of at least 1; image 1 has 0 x 4",
    ),
    "a negative side": (
        draw(6, 48),
        torch.tensor([[-2, -3]]),
        "sides of at least 1; image 0 has -2 x -3",
    ),
    "no patches": (draw(0, 48), ONE, r"patches must be .* at least one; got \(0, 48\)"),
    "no images": (
        draw(6, 48),
        torch.empty(0, 2, dtype=torch.int64),
        r"at least one; got shape \(0, 2\)",
    ),
    "a width": (draw(6, 40), ONE, r"patches must be \(patches of all images, 48\)"),
    "one side": (draw(6, 48), torch.tensor([2, 3]), r"grids must be \(images, 2\)"),
    "dtypes": (
        draw(6, 48).half(),
        ONE,
        "as the parameters are, torch.float32 on cpu; got torch.float16 on cpu",
    ),
    "devices": (draw(6, 48).to("meta"), ONE, "as the parameters are, .* got torch.float32 on meta"),
    "grids elsewhere": (
        draw(6, 48),
        ONE.to("meta"),
        "grids must be on the CPU or on cpu .* got meta",
    ),
    "floats": (
        draw(6, 48),
        ONE.float(),
        "grids must be an int32 or int64 tensor or a packing; got torch.float32",
    ),
    "a list": (
        draw(6, 48),
        [[2, 3]],
        "grids must be an int32 or int64 tensor or a packing; got list",
    ),
}


@pytest.mark.parametrize("impl", ["eager", "fused"])
@pytest.mark.parametrize("case", BAD_INPUT)
def test_a_bad_batch_is_refused(case, impl):
    patches_MK, grids, message = BAD_INPUT[case]
    with pytest.raises(TypeError if case in ("floats", "a list") else ValueError, match=message):
        build(impl)(patches_MK, grids)


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        (TINY, {"impl": "fast"}, "unknown impl 'fast'; accepted: eager, .*fused"),
        (
            dataclasses.replace(TINY, num_heads=5),
            {},
            "d_model must be a multiple of num_heads, 5; got 48",
        ),
        (
            dataclasses.replace(TINY, num_heads=0),
            {},
            "d_model must be a multiple of num_heads, 0; got 48",
        ),
        (TINY, {"recomputed": 1}, "recomputed must be from 0 to 0 with impl='eager'; got 1"),
        (TINY, {"impl": "fused", "recomputed": 3}, "recomputed must be from 0 to 2"),
    ],
)
def test_a_bad_model_is_refused(config, options, message):
    with pytest.raises(ValueError, match=message):
        Siglip2Encoder(config, **options)


def graph_breaks(impl: str, grids) -> int:
    model, (patches_MK, _) = build(impl), batch()
    torch._dynamo.reset()
    return torch._dynamo.explain(model)(patches_MK, grids(model)).graph_break_count


def test_only_the_original_breaks_the_graph():
    assert graph_breaks("eager", lambda _: torch.tensor(GRIDS)) > 0
    assert graph_breaks("fused", lambda _: torch.tensor(GRIDS)) == 0
    assert graph_breaks("fused", lambda model: model.pack(torch.tensor(GRIDS))) == 0


def test_compiled_as_one_graph_it_is_the_same():
    torch._dynamo.reset()
    model = build("fused", config=dataclasses.replace(TINY, dropout=0.0)).train()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for grids in (GRIDS, GRIDS[1:], GRIDS[2:]):
        patches_MK, grids_I2 = batch(grids)
        expected = run_model(model, patches_MK, grids_I2)
        weights = dict(model.named_parameters())
        results = with_gradients(
            lambda patches, grids=grids_I2: compiled(patches, grids), weights, patches_MK
        )
        for name, value in expected.items():
            torch.testing.assert_close(results[name], value, rtol=1e-4, atol=1e-4, msg=name)


# ---- training ------------------------------------------------------------------------------------


def trained(impl: str) -> list[bool]:
    """Returns what holds of dropout in training: random, repeated by a seed, none in eval mode."""
    model, (patches_MK, grids_I2) = build(impl).train(), batch()
    outs = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        outs.append(model(patches_MK, grids_I2))
    outs += [model.eval()(patches_MK, grids_I2) for _ in range(2)]
    return [
        torch.equal(a, b)
        for a, b in ((outs[0], outs[1]), (outs[0], outs[2]), (outs[0], outs[3]), outs[3:])
    ]


@pytest.mark.parametrize("impl", ["eager", "fused"])
def test_training_drops_what_a_seed_says(impl, interpreted):
    assert trained(impl) == [True, False, False, True]
    assert interpreted(trained, impl) == [True, False, False, True]


def kept_elements(recomputed: int) -> tuple[int, int]:
    """Returns the elements of activations that a forward in training keeps, and how many there are
    to be.

    Of a layer: two sums, q, k and v, the attention output, the hidden layer, four statistics and a
    log-sum-exp a head.
    """
    model, (patches_MK, grids_I2) = build("fused", recomputed=recomputed).train(), batch()
    packing = model.pack(grids_I2)
    known = {
        x.untyped_storage().data_ptr() for x in (patches_MK, *model.parameters(), *packing[:2])
    }
    kept = {}

    def keep(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        model(patches_MK, packing)
    elements = sum(
        x.untyped_storage().nbytes() // 4 for address, x in kept.items() if address not in known
    )
    width, hidden = 6 * TINY.d_model + TINY.num_heads + 4, TINY.d_ff
    layers = TINY.num_layers * width + (TINY.num_layers - recomputed) * hidden
    seeds = 2 * TINY.num_layers
    return elements, patches_MK.shape[0] * (layers + TINY.d_model + 2) + seeds


@pytest.mark.parametrize("recomputed", [1, *more(0, 2)])
def test_backward_is_left_nothing_that_it_computes_again(recomputed, interpreted):
    kept, expected = interpreted(kept_elements, recomputed)
    assert kept == expected


def test_it_runs_in_inference_mode():
    model, (patches_MK, grids_I2) = build("fused"), batch()
    expected_MC = model(patches_MK, grids_I2)
    with torch.inference_mode():
        assert torch.equal(model(patches_MK, torch.tensor(GRIDS)), expected_MC)
    assert torch.equal(model(patches_MK, torch.tensor(GRIDS)), expected_MC)
