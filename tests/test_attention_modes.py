"""Attention whose arguments are rewritten behind its back, and attention under PyTorch's modes and
transforms.

Shape suffixes as in labkit.kernels.flash_attention.
"""

import contextlib
import functools
import itertools
import math
import re
import types

import pytest
import torch
from test_flash_attention import (
    cumulative,
    is_interpreted,  # noqa: F401 - what the fixture `interpreted` asks
    one_by_one,
    poisoned_outputs,
    runs_interpreted,
)
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

from labkit import accounting
from labkit.kernels import flash_attention as fa
from labkit.kernels.flash_attention import flash_attention
from labkit.kernels.flash_attention.op import check_lengths
from labkit.kernels.flash_attention.qkv import flash_attention_qkv
from labkit.kernels.flash_attention.tiled import TiledFlashAttention

IMPLS = ["triton", "tiled"]


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# ---- what a caller rewrites ----------------------------------------------------------------------


@pytest.mark.parametrize("impl", IMPLS)
@runs_interpreted
def test_lengths_that_are_rewritten_are_read_again(impl):
    """Though the tensor's version is not raised, forward and backward."""
    tensors = [draw(12, 2, 16, seed=seed) for seed in range(4)]
    leaves, cu_seqlens = [x.requires_grad_() for x in tensors[:3]], cumulative((6, 6))
    options = {
        "cu_seqlens_q": cu_seqlens,
        "cu_seqlens_k": cu_seqlens,
        "window": (4, 4),
        "impl": impl,
    }
    for values in ([0, 6, 12], [0, 1, 12]):
        cu_seqlens.numpy()[:] = values
        out = flash_attention(*leaves, **options)
        found = (out, *torch.autograd.grad(out, leaves, tensors[3]))
        expected = one_by_one(torch.float64, tensors, cu_seqlens, cu_seqlens, window=(4, 4))
        for x, y in zip(found, expected, strict=True):
            torch.testing.assert_close(x, y.float(), rtol=1e-5, atol=1e-5)
    cu_seqlens.numpy()[:] = [0, 1, 9]
    with pytest.raises(
        ValueError, match="cu_seqlens_q must end at the number of rows of q, 12; got 9"
    ):
        flash_attention(*leaves, **options)


def unchecked(cu_q: list[int], cu_k: list[int], right: int = -1, dtype=torch.int32) -> tuple:
    """Returns tensors of 40 rows, and what the kernels make of lengths that nobody has checked,
    between canaries.
    """
    tensors = [draw(40, heads, 16, seed=seed) for seed, heads in enumerate((2, 1, 1, 2))]
    q, k, v, grad_out = tensors
    cu_seqlens = [torch.tensor(values, dtype=dtype) for values in (cu_q, cu_k)]
    with poisoned_outputs():
        plan = fa.plan_of(q, k, v, *cu_seqlens, right=right)
        out, lse = plan.forward(q, k, v, *cu_seqlens)
        grads = plan.backward(grad_out, q, k, v, out, lse, *cu_seqlens)
    return tensors, out, lse, grads


@pytest.mark.parametrize("right", [-1, 0])
@pytest.mark.parametrize(
    ("cu_q", "cu_k"), [([0, 17, 18, 30], [0, 17, 18, 30]), ([0, 0, 9, 21], [0, 9, 9, 40])]
)
@runs_interpreted
def test_rows_of_no_sequence_are_zero(cu_q, cu_k, right):
    """So are their gradients, and no sequence sees them; a sequence may be empty."""
    tensors, out, lse, grads = unchecked(cu_q, cu_k, right)
    expected = [torch.zeros_like(x, dtype=torch.float64) for x in (out, *grads)]
    for rows_q, rows_k in zip(itertools.pairwise(cu_q), itertools.pairwise(cu_k), strict=True):
        rows = [slice(*rows_q), slice(*rows_k), slice(*rows_k), slice(*rows_q)]
        parts = [x[each] for x, each in zip(tensors, rows, strict=True)]
        if parts[0].numel() and parts[1].numel():
            whole = [torch.tensor([0, len(x)]) for x in parts[:2]]
            found = one_by_one(torch.float64, parts, *whole, window=(-1, right))
            for x, part, each in zip(expected, found, (rows[0], *rows[:3]), strict=True):
                x[each] = part.detach()
    for x, y in zip((out, *grads), expected, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=1e-5, atol=1e-5)
    assert torch.equal(lse[:, cu_q[-1] :], torch.full((2, 40 - cu_q[-1]), -math.inf))


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([0, 30, 10, 40], torch.int32),
        ([30, 90, 35, 40], torch.int32),
        ([0, -500, 20, 40], torch.int64),
    ],
    ids=str,
)
@runs_interpreted
def test_lengths_of_any_values_write_nothing_beyond_a_tensor(values, dtype):
    _, out, _, grads = unchecked(values, values, 0, dtype)
    # What is written is made of rows, which memory around them is not.
    assert all(x[~x.isnan()].abs().max() < 1e3 for x in (out, *grads))


def test_lengths_on_a_gpu_are_read_unless_both_longest_are_given(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    x, bad = types.SimpleNamespace(is_cuda=True, shape=(10, 2, 8)), cumulative((4, 4))
    check_lengths(x, x, bad, bad, 4, 4)
    for lengths in ((None, None), (4, None), (None, 4)):
        with pytest.raises(ValueError, match="must end at the number of rows of q, 10; got 8"):
            check_lengths(x, x, bad, bad, *lengths)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="must be given where a CUDA graph is captured"):
        check_lengths(x, x, bad, bad, None, 4)


def test_lengths_and_tensors_of_inference_mode_are_taken():
    with torch.inference_mode():
        q, cu_seqlens = draw(12, 2, 16), cumulative((5, 7))
        lengths = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens}
        inside = flash_attention(q, q, q, **lengths)
    assert torch.equal(flash_attention(q, q, q, **lengths), inside)
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
        flash_attention(q, q.clone().requires_grad_(), q, **lengths)


# ---- what is refused -----------------------------------------------------------------------------


def test_tensors_without_strides_are_refused_by_name():
    q = draw(2, 2, 8, 4)
    nested = torch.nested.nested_tensor([q[0], q[1]])
    for name, tensors in (("q", (nested, q, q)), ("v", (q, q, q.to_sparse()))):
        with pytest.raises(ValueError, match=f"{name} must be neither sparse nor nested"):
            flash_attention(*tensors)


@runs_interpreted
def test_a_negation_that_is_left_undone_is_done():
    """The tensor says that its memory holds the negative, which a kernel does not ask."""
    q, k, grad_out = (draw(1, 2, 8, 16, seed=seed) for seed in range(3))
    k.requires_grad_()
    found = []
    for negate in (torch._neg_view, torch.neg):
        out = flash_attention(negate(q), k, k, impl="triton")
        found.append(torch.autograd.grad(out, k, negate(grad_out))[0])
    assert torch.equal(*found)


@pytest.mark.parametrize("impl", IMPLS)
@runs_interpreted
def test_forward_mode_is_refused(impl):
    """No tangent is dropped, and what has none goes on."""
    q, k = draw(1, 2, 8, 4), draw(1, 2, 8, 4, seed=1)
    attend = functools.partial(flash_attention, impl=impl)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, k)
        for mode in (contextlib.nullcontext(), torch.no_grad()):
            with mode, pytest.raises(NotImplementedError, match="forward mode AD"):
                attend(dual, k, k)
        assert torch.equal(attend(q, k, k), attend(q, k, k))


@runs_interpreted
def test_gradients_of_the_functions_have_no_gradient():
    x = draw(1, 6, 8).requires_grad_()
    cases = {
        "flash_attention": (fa.FlashAttention.apply(x, x, x), x),
        "TiledFlashAttention": (TiledFlashAttention.apply(x, x, x), x),
    }
    for name, (out, leaf) in cases.items():
        (grad,) = torch.autograd.grad(out.sum(), leaf, create_graph=True)
        with pytest.raises(RuntimeError, match=f"{name} has no second derivative"):
            grad.square().sum().backward()


BAD_PROJECTIONS = {
    "cu_seqlens_q must be an int32 or int64 tensor; got list": {"cu_seqlens": [0, 6]},
    "max_seqlen_q must be at least the longest sequence, 4; got 3": {"longest": 3},
    "head dimension of q must be 1 to 256; got 300": {"qkv": draw(6, 3, 1, 300)},
    "q must be of dtype": {"qkv": draw(6, 3, 1, 8).int()},
}


def test_a_bad_projection_is_refused_by_name():
    arguments = {"qkv": draw(6, 3, 1, 8), "cu_seqlens": cumulative((2, 4)), "longest": None}
    for message, bad in BAD_PROJECTIONS.items():
        with pytest.raises((TypeError, ValueError), match=re.escape(message)):
            flash_attention_qkv(**(arguments | bad))


@pytest.mark.parametrize("impl", IMPLS)
@runs_interpreted
def test_a_projection_is_attention_of_its_parts(impl):
    """In fp64, and under autocast."""
    for dtype, lengths, longest, autocast in (
        (torch.float64, (2, 4), 4, False),
        (torch.float32, (2, 4), None, True),
    ):
        qkv, cu_seqlens = draw(6, 3, 1, 8).to(dtype).requires_grad_(), cumulative(lengths)
        with torch.autocast("cpu", torch.float16, enabled=autocast):
            out = flash_attention_qkv(qkv, cu_seqlens, longest)
        assert out.dtype == (torch.float16 if autocast else dtype)
        (grad,) = torch.autograd.grad(out.sum(), qkv)
        tensors = (*qkv.detach().unbind(1), torch.ones(6, 1, 8))
        expected, *grads = one_by_one(torch.float64, tensors, cu_seqlens, cu_seqlens)
        tolerance = {"rtol": 1e-2, "atol": 1e-2} if autocast else {"rtol": 1e-5, "atol": 1e-5}
        torch.testing.assert_close(out.double(), expected, **tolerance)
        torch.testing.assert_close(grad.double(), torch.stack(grads, dim=1), **tolerance)


# ---- transforms of functions ---------------------------------------------------------------------


@pytest.mark.parametrize("impl", IMPLS)
@runs_interpreted
def test_vmap_is_a_loop(impl):
    """Of outputs and of gradients."""
    q, k, v = (draw(2, 1, 1, 3, 4, seed=seed) for seed in range(3))
    attend = functools.partial(flash_attention, causal=True, impl=impl)
    whole = torch.stack([attend(*each) for each in zip(q, k, v, strict=True)])
    assert torch.equal(torch.func.vmap(attend)(q, k, v), whole)

    def loss(q, k, v):
        return attend(q, k, v).square().sum()

    grads = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1, 2)))(q, k, v)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    alone = sum(loss(*each) for each in zip(*leaves, strict=True))
    for x, y in zip(grads, torch.autograd.grad(alone, leaves), strict=True):
        torch.testing.assert_close(x, y)


# ---- the meta device -----------------------------------------------------------------------------


def test_on_the_meta_device_there_are_shapes():
    def shapes_on(device: str) -> list:
        q, k = draw(2, 4, 9, 8).to(device).requires_grad_(), draw(2, 4, 9, 8).to(device)
        out = flash_attention(q, k, k, causal=True, window=(3, -1))
        out.float().sum().backward()
        packed, cu_seqlens = draw(12, 2, 8).to(device), cumulative((5, 7)).to(device)
        lengths = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens}
        rows = flash_attention(packed, packed, packed, **lengths)
        return [out.shape, q.grad.shape, q.grad.dtype, rows.shape]

    assert shapes_on("meta") == shapes_on("cpu")


# ---- FLOPs ---------------------------------------------------------------------------------------


def counted(attend, *inputs: torch.Tensor) -> tuple[int, int, int]:
    """Returns the FLOPs that are counted forward, backward, and backward with no forward pass
    watched.
    """
    leaves = [x.requires_grad_() for x in inputs]
    with FlopCounterMode(display=False) as forward:
        out = attend(*leaves)
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    out = attend(*leaves)
    with FlopCounterMode(display=False) as alone:
        out.sum().backward()
    return tuple(mode.get_total_flops() for mode in (forward, backward, alone))


@pytest.mark.parametrize("impl", IMPLS)
@runs_interpreted
def test_flops_are_those_of_the_closed_forms(impl):
    q, k = draw(1, 2, 16, 8), draw(1, 1, 16, 8)
    for causal in (False, True):
        closed = [
            accounting.attention_call_flops(x, 2, 16, 8, causal=causal)
            for x in ("forward", "backward")
        ]
        attend = functools.partial(flash_attention, causal=causal, impl=impl)
        assert counted(attend, q, k, k.clone()) == (*closed, closed[1])
    window = functools.partial(flash_attention, window=(3, 2), impl=impl)
    pairs = 2 * accounting.attention_pairs(16, 16, 3, 2)
    assert counted(window, q, k, k.clone())[:2] == (4 * pairs * 8, 10 * pairs * 8)


@runs_interpreted
def test_flops_of_a_packed_batch_are_those_of_its_sequences():
    lengths = {"cu_seqlens_q": cumulative((5, 7)), "cu_seqlens_k": cumulative((4, 9))}
    q, k = draw(12, 2, 8), draw(13, 1, 8)
    attend = functools.partial(flash_attention, **lengths, impl="triton")
    assert counted(attend, q, k, k.clone()) == (4 * 83 * 16, 10 * 83 * 16, 10 * 83 * 16)
