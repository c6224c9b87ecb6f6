"""Attention whose arguments are rewritten behind its back, and attention under PyTorch's modes and
transforms.

Shape suffixes as in labkit.kernels.flash_attention.
"""

import contextlib
import functools
import math
import types

import pytest
import torch
from test_flash_attention import (
    cumulative,
    one_by_one,
    poisoned_outputs,
    runs_interpreted,
)
from test_siglip2 import draw
from torch.autograd import forward_ad

from labkit.kernels import flash_attention as fa
from labkit.kernels.flash_attention import flash_attention
from labkit.kernels.flash_attention.op import check_lengths

IMPLS = ["triton", "tiled"]


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


def unchecked(cu_q: list[int], cu_k: list[int], right: int, dtype=torch.int32) -> tuple:
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


@pytest.mark.parametrize(
    ("cu_q", "cu_k", "right"),
    [([0, 17, 18, 30], [0, 17, 18, 30], 0), ([0, 0, 9, 21], [0, 9, 9, 40], -1)],
)
@runs_interpreted
def test_rows_of_no_sequence_are_zero(cu_q, cu_k, right):
    """So are their gradients, and no sequence sees them; a sequence may be empty."""
    tensors, out, lse, grads = unchecked(cu_q, cu_k, right)
    cu_seqlens = torch.tensor([cu_q, cu_k])
    expected = one_by_one(torch.float64, tensors, *cu_seqlens, window=(-1, right))
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


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize("impl", IMPLS)
@runs_interpreted
def test_forward_mode_is_refused(impl):
    """No tangent is dropped."""
    q, k = draw(1, 2, 8, 4), draw(1, 2, 8, 4, seed=2)
    attend = functools.partial(flash_attention, impl=impl)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, k)
        for mode in (contextlib.nullcontext(), torch.no_grad()):
            with mode, pytest.raises(NotImplementedError, match="forward mode"):
                attend(dual, k, k)
