"""Rounding: sums and normalisations in a format, and what notebook 03 measures of them."""

import pytest
import torch
import torch.nn.functional as F
from chapters import CPU

from labkit import numerics
from labkit.experiments.mixed_precision import measure_normalisation
from labkit.experiments.sweep import Case, Measured, Skip


@pytest.mark.parametrize("term", [0.01, 0.125])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_sum_stalls_where_half_the_spacing_reaches_the_term(term, dtype):
    added = torch.tensor(term, dtype=dtype)
    stall = torch.tensor(numerics.stall_value(float(added), dtype), dtype=dtype)
    before = stall - stall / 2 * torch.finfo(dtype).eps  # its neighbour below
    assert stall + added == stall
    assert before + added != before


def test_tree_sum_rounds_every_addition():
    assert numerics.tree_sum(torch.arange(1.0, 8).expand(2, 7)).tolist() == [[28.0]] * 2
    # 256 + 1 is 256 in bf16; a sum with an fp32 accumulator inside would be 258.
    assert float(numerics.tree_sum(torch.tensor([256.0, 1.0, 1.0], dtype=torch.bfloat16))) == 256


@pytest.mark.parametrize("kind", numerics.NORMS)
def test_normalise_is_pytorchs_function_where_nothing_is_rounded(kind):
    x = torch.randn(5, 33, dtype=torch.float64) + 3
    function = F.layer_norm if kind == "layer_norm" else F.rms_norm
    result, mean_square = numerics.normalise(x, kind, 1e-3, torch.float64)
    torch.testing.assert_close(result, function(x, (33,), eps=1e-3), rtol=1e-12, atol=1e-12)
    centred = x - x.mean(-1, keepdim=True) if kind == "layer_norm" else x
    torch.testing.assert_close(mean_square, centred.square().mean(-1, keepdim=True))


def normalisation(dtype: str, scale: float, **changes) -> Measured:
    parameters = {
        "norm": "rms_norm",
        "setting": "centred",
        "input": dtype,
        "statistics": dtype,
        "scale": scale,
        "rows": 8,
        "features": 64,
    }
    case = Case("normalisation", parameters | changes, ("error",), 60.0)
    measured = measure_normalisation(CPU, case, "error")
    assert measured.case == case.parameters
    return measured


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("fp16", {"overflowed_fraction": 1.0}),
        ("bf16", {"overflowed_fraction": 0.0, "nonfinite_fraction": 0.0}),
    ],
)
def test_fp16_statistics_leave_its_range_and_bf16s_do_not(dtype, expected):
    """A mean square is the scale squared: 10⁸ is more than 65504."""
    assert expected.items() <= normalisation(dtype, 1e4).metrics.items()


def test_an_epsilon_that_vanishes_makes_the_result_infinite():
    lost = normalisation("fp16", 1e-4, setting="small epsilon").metrics
    assert (lost["nonfinite_fraction"], lost["relative_error"]) == (1, None)
    kept = normalisation("fp16", 1e-4, setting="small epsilon", statistics="fp32").metrics
    assert kept["nonfinite_fraction"] == 0 and kept["relative_error"] < 1e-3


def test_an_input_that_overflows_by_itself_is_skipped():
    with pytest.raises(Skip, match="the input itself overflows fp16"):
        normalisation("fp16", 1e4, norm="layer_norm", setting="offset")
