"""Every implementation of attention by name is the same function, is the one that its name says, or
says why not.

Shape suffixes as in labkit.kernels.attention: B batch, H heads, S length, D head dimension.
"""

import functools
import itertools
import sys

import pytest
import torch
from torch import Tensor

from labkit.kernels.attention import IMPLS, SDPA_BACKENDS, attention, unavailable_reason
from labkit.kernels.reference import _scores, attention_backward, attention_reference

SHAPES = {
    "even": ((2, 3, 64, 16), 64),
    "odd": ((1, 2, 77, 24), 77),
    "one row": ((2, 1, 1, 16), 1),
    "no heads": ((3, 50, 16), 50),
    "fewer queries": ((1, 2, 30, 16), 47),
}


def draw(shape: str, dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
    """Returns q, k, v (with gradients) and the gradient of the output."""
    q_shape, num_keys = SHAPES[shape]
    generator = torch.Generator().manual_seed(0)
    k_shape = (*q_shape[:-2], num_keys, q_shape[-1])
    tensors = [
        torch.randn(s, generator=generator, dtype=torch.float64)
        for s in (q_shape, k_shape, k_shape, q_shape)
    ]
    *leaves, grad_out = (x.to(dtype).to(device) for x in tensors)
    return [*(x.requires_grad_() for x in leaves), grad_out]


def results(function, q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor) -> dict[str, Tensor]:
    out = function(q, k, v)
    assert out.shape == q.shape and out.dtype == q.dtype
    grads = torch.autograd.grad(out, (q, k, v), grad_out)
    values = (x.detach().double().cpu() for x in (out, *grads))
    return dict(zip(("out", "dq", "dk", "dv"), values, strict=True))


def check_errors(
    impl: str, shape: str, dtype: torch.dtype, causal: bool, device: str = "cpu"
) -> None:
    """Asserts errors against fp64 of at most 2 (output) or 3 (gradients) times eager's and one
    rounding.

    On a GPU as `judge` does, with those of a sum in any order: SDPA's products there are three of
    TF32 each.
    """
    tensors = draw(shape, dtype, device)
    values = results(functools.partial(attention, causal=causal, impl=impl), *tensors)
    exact, eager = (
        results(functools.partial(attention_reference, causal=causal), *leaves)
        for kind in (torch.float64, dtype)
        for leaves in [[x.detach().to(kind).requires_grad_() for x in tensors]]
    )
    num_terms = tensors[1].shape[-2] if device == "cuda" else 0
    rounding = (torch.finfo(dtype).eps + num_terms**0.5 * torch.finfo(torch.float32).eps) / 2
    for name, reference in exact.items():
        # P∘dP and P∘D are rounded apart, and with one key their difference is exactly zero.
        largest = max(reference.abs().max(), exact["dv"].abs().max())
        error, allowed = ((x[name] - reference).abs().max() for x in (values, eager))
        budget = (2 if name == "out" else 3) * (allowed + rounding * largest)
        assert error <= budget, (name, shape, causal)


ON_A_CPU = ("eager", "compiled", "sdpa", "sdpa_math", "sdpa_flash", "tiled", "auto")


def is_refused(impl: str, shape: str, causal: bool) -> bool:
    """Whether `test_sdpa_is_refused_where_its_mask_is_another` has the case."""
    return impl.startswith("sdpa") and causal and shape == "fewer queries"


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("impl", ON_A_CPU)
def test_every_implementation_is_the_same_function(impl, causal):
    for shape in ["odd"] if impl == "compiled" else SHAPES:
        if not is_refused(impl, shape, causal):
            check_errors(impl, shape, torch.float32 if causal else torch.bfloat16, causal)


@pytest.mark.gpu
@pytest.mark.parametrize("impl", IMPLS)
def test_every_implementation_of_the_gpu_is_the_same_function(impl):
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    cases, reasons = [*itertools.product(SHAPES, dtypes, (False, True))], []
    for shape, dtype, causal in cases:
        q, k, *_ = draw(shape, dtype, "cuda")
        if reason := unavailable_reason(impl, q, k, causal=causal):
            reasons.append(reason)
        elif not is_refused(impl, shape, causal):
            check_errors(impl, shape, dtype, causal, "cuda")
    if len(reasons) == len(cases):
        pytest.skip(reasons[0])


def test_what_runs_on_a_cpu_is_known_and_the_others_give_a_reason():
    q, k, *_ = draw("even", torch.float32)
    reasons = {impl: unavailable_reason(impl, q, k, causal=True) for impl in IMPLS}
    assert tuple(impl for impl, reason in reasons.items() if not reason) == ON_A_CPU
    assert "xformers" not in sys.modules


@pytest.mark.parametrize("impl", ["sdpa_cudnn", "sdpa_efficient"])
def test_a_backend_that_cannot_run_raises_and_none_stands_in(impl):
    q, k, v, _ = draw("even", torch.float32)
    assert unavailable_reason(impl, q, k, causal=False)
    with pytest.raises(RuntimeError):
        attention(q, k, v, impl=impl)


def test_sdpa_is_refused_where_its_mask_is_another():
    q, k, v, _ = draw("fewer queries", torch.float32)
    for impl in ("sdpa", *SDPA_BACKENDS):
        with pytest.raises(ValueError, match="top left, which differs for 30 queries and 47 keys"):
            attention(q, k, v, causal=True, impl=impl)


def test_a_query_without_a_key_passes_no_gradient_on():
    q, *keys, grad_out = draw("odd", torch.float64)
    k, v = (x[..., :1, :] for x in keys)
    scores, _ = _scores(q, k, True, None, None)
    grads = attention_backward(q, k, v, q, scores.logsumexp(-1), grad_out, True)
    assert all(grad.isfinite().all() for grad in grads) and not grads[0][..., :-1, :].any()
