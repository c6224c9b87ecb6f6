"""Every operation of labkit.kernels under autocast, with what is no tensor or
holds no rows, and counted by FlopCounterMode: what is documented, or one line that says what is
wrong.
"""

import pytest
import torch
import torch.nn.functional as F
from kernel_operations import OPERATIONS, cases, draw, results
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from labkit.kernels import fused
from labkit.kernels.layer_norm import layer_norm
from labkit.kernels.rms_norm import rms_norm
from labkit.kernels.swiglu import swiglu

OURS = [name for name in cases("kernel") if "lash" not in name]


def is_interpreted() -> bool:
    return fused.IS_INTERPRETED


def on_each_path(function, name: str, interpreted) -> None:
    if "plain" in OPERATIONS[name].paths:
        function(name)
    interpreted(function, name)


def of_no_rows(name: str) -> None:
    """Asserts that a batch without rows has outputs and gradients without rows, and zeros for
    parameters.
    """
    tensors = draw(name, torch.float32, (2, 3, 0, 8) if name == "rotary" else (0, 6))
    first, *gradients = results(OPERATIONS[name].ours, tensors)
    # The mean of no loss is no number.
    assert first.isnan() if "entropy" in name else first.numel() == 0
    assert all(not x.any() for x in gradients)


@pytest.mark.parametrize(
    "name", [name for name in OURS if "mlp" not in name and name != "column_sums"]
)
def test_a_batch_may_be_empty(name, interpreted):
    on_each_path(of_no_rows, name, interpreted)


def counted(name: str) -> None:
    """Asserts that the operations a step counts for are the formula's."""
    counts = []
    for function in (OPERATIONS[name].ours, OPERATIONS[name].formula):
        with FlopCounterMode(display=False) as counter:
            results(function, draw(name, torch.float32))
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize(
    "name", ["linear_cross_entropy", "norm_linear", "dropout_linear", "gelu_mlp"]
)
def test_the_products_are_counted(name, interpreted):
    on_each_path(counted, name, interpreted)


def far_from_zero(dtype: torch.dtype) -> None:
    """Asserts the limits of the activations and their gradients at the ends of a dtype's range."""
    big = torch.finfo(dtype).max
    ends = torch.tensor([[-big, -big / 3, -1e4, -200, -30, 0.0, 30, 200, 1e4, big / 3, big]])
    ends = ends.to(dtype)
    expected = (ends > 0).double() + 0.5 * (ends == 0)
    y, grad = results(lambda x: swiglu(x, torch.ones_like(x)), [ends.requires_grad_()])
    direction = torch.linspace(-1, 1.5, 11).to(dtype).double()
    torch.testing.assert_close(y, ends.clamp(min=0), rtol=0, atol=1e-10)
    torch.testing.assert_close(grad.double(), expected * direction, rtol=1e-2, atol=1e-10)


def rows_of_any_size(dtype: torch.dtype) -> None:
    """Asserts that norms of rows as small and as large as squares in fp32 allow are those of
    fp64.
    """
    info = torch.finfo(dtype)
    weight = torch.ones(8, dtype=dtype)
    for size in (0.0, max(1e-15, info.smallest_normal), min(1e18, info.max / 4)):
        x: Tensor = (torch.linspace(-1, 3, 8).expand(2, 8) * size).to(dtype)
        pairs = [(rms_norm(x, weight, 1e-12), F.rms_norm(x.double(), (8,), eps=1e-12))]
        pairs += [
            (layer_norm(x, weight, 0 * weight, 1e-12), F.layer_norm(x.double(), (8,), eps=1e-12))
        ]
        for ours, right in pairs:
            torch.testing.assert_close(ours.double(), right, rtol=4 * info.eps, atol=4 * info.eps)


@pytest.mark.parametrize("dtype", fused.DTYPES, ids=str)
@pytest.mark.parametrize("check", [far_from_zero, rows_of_any_size])
def test_limits_hold_at_the_ends_of_a_dtype(check, dtype, interpreted):
    check(dtype)
    interpreted(check, dtype)
