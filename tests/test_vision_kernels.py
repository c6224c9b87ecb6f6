"""Attention of the vision encoder's projection."""

import pytest
import torch
from kernel_operations import poisoned_memory
from torch import Tensor

from labkit.kernels import fused
from labkit.kernels.flash_attention import qkv as qkv_attention

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
__all__ = ["DTYPES", "draw", "poisoned_memory"]


def is_interpreted() -> bool:
    torch.set_num_threads(1)
    return fused.IS_INTERPRETED


def draw(*shape: int, seed: int = 1, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def equal_sequences(
    dtype: torch.dtype = torch.float32, length: int = 10, d_head: int = 8, device: str = "cpu"
) -> None:
    """Asserts that sequences of one length get what they get packed, forward and backward."""
    qkv = draw(4 * length, 3, 2, d_head).to(device, dtype).requires_grad_()
    cu_seqlens = torch.arange(0, 4 * length + 1, length, dtype=torch.int32, device=device)
    direction = draw(4 * length, 2, d_head, seed=2).to(device, dtype)
    results = []
    # A longest that no sequence reaches is allowed, and packs them.
    for longest in (length, length + 1):
        out = qkv_attention.flash_attention_qkv(qkv, cu_seqlens, longest)
        results.append((out, *torch.autograd.grad(out, qkv, direction)))
    tolerance = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(*results, rtol=tolerance, atol=tolerance)


def test_equal_sequences_are_a_batch(interpreted):
    interpreted(equal_sequences)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_on_a_gpu_equal_sequences_are_a_batch(dtype):
    equal_sequences(dtype, 256, 72, "cuda")


def test_attention_refuses_a_projection_of_another_shape():
    message = r"qkv must be dense, of shape \(tokens, 3, heads, d\); got shape \(4, 2, 1, 8\)"
    with pytest.raises(ValueError, match=message):
        qkv_attention.flash_attention_qkv(torch.zeros(4, 2, 1, 8), torch.tensor([0, 4]))
