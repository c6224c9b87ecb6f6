"""Rounding: spacing of a format, sums and normalisations in it, and what notebook 03 measures of
them.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from chapters import CPU

from labkit import numerics
from labkit.experiments.rounding import measure_normalisation
from labkit.experiments.sweep import Skip


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("value", [0.01, 1.0, 15.5, 2.0**-14, 2.0**-20])
def test_spacing_is_the_distance_to_the_next_number(dtype, value):
    bits = {2: torch.int16, 4: torch.int32}[torch.finfo(dtype).bits // 8]
    number = torch.tensor([value], dtype=dtype)
    following = (number.view(bits) + 1).view(dtype)
    assert numerics.spacing(float(number), dtype) == float(following.double() - number.double())


def test_spacing_of_what_the_format_does_not_have_is_refused():
    for value in (0.0, -1.0, math.inf, 70000.0):
        with pytest.raises(
            ValueError, match=r"has no binade in torch\.float16; accepted: above 0, up to 65504"
        ):
            numerics.spacing(value, torch.float16)


@pytest.mark.parametrize("term", [0.01, 0.125])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_sum_stalls_where_half_the_spacing_reaches_the_term(term, dtype):
    added = torch.tensor(term, dtype=dtype)
    stall = torch.tensor(numerics.stall_value(float(added), dtype), dtype=dtype)
    before = stall - numerics.spacing(float(stall) * 0.75, dtype)
    assert stall + added == stall
    assert before + added != before


@pytest.mark.parametrize("method", ["kahan", "pairwise"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_better_addition_ends_within_two_spacings_of_the_exact_sum(method, dtype):
    term = torch.tensor(0.01, dtype=dtype)
    sums = numerics.running_sums(term, 1000, dtype, method, every=100).double()
    exact = float(term) * torch.arange(100, 1001, 100)
    allowed = torch.tensor([2 * numerics.spacing(float(value), dtype) for value in exact])
    assert sums.shape == (10,)
    assert ((sums - exact).abs() <= allowed).all()


def test_running_sums_are_those_of_every_so_many_terms():
    term = torch.tensor(0.01, dtype=torch.bfloat16)
    for method in numerics.METHODS:
        every = numerics.running_sums(term, 60, torch.bfloat16, method)
        some = numerics.running_sums(term, 60, torch.bfloat16, method, every=20)
        assert torch.equal(every[19::20], some) and every.dtype == torch.bfloat16
    with pytest.raises(
        ValueError, match="unknown method 'magic'; accepted: sequential, kahan, pairwise"
    ):
        numerics.running_sums(term, 10, torch.bfloat16, "magic")


@pytest.mark.parametrize("size", [1, 7, 64])
def test_tree_sum_rounds_every_addition(size):
    x = torch.arange(1.0, size + 1)
    assert numerics.tree_sum(x.expand(2, size)).tolist() == [[size * (size + 1) / 2]] * 2
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
    with pytest.raises(
        ValueError, match="unknown normalisation 'batch_norm'; accepted: layer_norm, rms_norm"
    ):
        numerics.normalise(x, "batch_norm", 1e-3, torch.float64)


def normalisation(dtype: str, scale: float, **changes) -> dict:
    parameters = {
        "norm": "rms_norm",
        "setting": "centred",
        "input": dtype,
        "statistics": dtype,
        "scale": scale,
        "rows": 8,
        "features": 64,
    }
    return parameters | changes


@pytest.mark.parametrize(
    ("dtype", "scale", "expected"),
    [
        ("fp16", 1e4, {"overflowed_fraction": 1.0}),
        ("fp16", 1e-4, {"vanished_fraction": 1.0}),
        ("bf16", 1e4, {"overflowed_fraction": 0.0, "nonfinite_fraction": 0.0}),
        ("bf16", 1e-4, {"vanished_fraction": 0.0}),
    ],
)
def test_fp16_statistics_leave_its_range_and_bf16s_do_not(dtype, scale, expected):
    """A mean square is the scale squared: 10⁸ is more than 65504, 10⁻⁸ less than half of 2⁻²⁴."""
    parameters = normalisation(dtype, scale)
    measured = measure_normalisation(CPU, parameters)
    assert measured.case == parameters
    assert expected.items() <= measured.metrics.items()
    assert measured.metrics["rounding_error"] <= (2.0**-11 if dtype == "fp16" else 2.0**-8)


def test_an_epsilon_that_vanishes_makes_the_result_infinite():
    parameters = normalisation("fp16", 1e-4, setting="small epsilon")
    lost = measure_normalisation(CPU, parameters).metrics
    assert (lost["epsilon"], lost["nonfinite_fraction"], lost["relative_error"]) == (0, 1, None)
    kept = measure_normalisation(CPU, parameters | {"statistics": "fp32"}).metrics
    assert kept["nonfinite_fraction"] == 0 and kept["relative_error"] < 1e-3


def test_an_input_that_overflows_by_itself_is_skipped():
    with pytest.raises(Skip, match="the input itself overflows fp16"):
        measure_normalisation(CPU, normalisation("fp16", 1e4, norm="layer_norm", setting="offset"))
