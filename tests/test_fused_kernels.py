"""The fused kernels against fp64, interpreted on the CPU in a worker process and compiled on a GPU;
and their operators.
"""

import itertools
import math
from functools import partial
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from conftest import more, off_boundary
from kernel_operations import (
    EPS,
    OPERATIONS,
    draw,
    layer_norm_formula,
    poisoned_memory,
    results,
)
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from labkit.kernels import column_sums, launch, linear, rotary
from labkit.kernels import cross_entropy as ce
from labkit.kernels.norms import layer_norm, rms_norm
from labkit.kernels.swiglu import swiglu
from labkit.numerics import judge

FP32, BF16, FP16 = DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def laid_out(x: Tensor, layout: str) -> Tensor:
    """Returns a leaf of the same values whose memory is laid out otherwise."""
    x = x.detach()
    if layout == "rows apart":  # columns of a wider tensor, whose others are NaN
        wider = x.new_full((*x.shape[:-1], 2 * x.shape[-1]), math.nan)
        x = wider[..., : x.shape[-1]].copy_(x)
    elif layout == "off a boundary":
        x = off_boundary(x)
    elif layout == "sign apart":  # as of conj().imag
        x = torch._neg_view(-x)
    elif layout:  # as a projection writes heads, or each column by itself
        dims = (1, 2) if layout == "heads beside" else (0, -1)
        x = x.transpose(*dims).contiguous().transpose(*dims)
    return x.requires_grad_()


def tensors_of(name: str, size, dtype: torch.dtype, layout: str, device) -> list[Tensor]:
    if layout == "mixed":  # a 16-bit branch beside fp32: what autocast gives
        first, *others = draw(name, dtype, size)
        return [first, *(x.detach().float().requires_grad_() for x in others)]
    return [laid_out(x.to(device), layout) for x in draw(name, dtype, size)]


def measure(name: str, size, dtype: torch.dtype, layout: str = "", device: str = "cpu") -> None:
    """Asserts that outputs and gradients are within the error budget, and every element written."""
    ours, formula = OPERATIONS[name].ours, OPERATIONS[name].formula
    tensors = tensors_of(name, size, dtype, layout, device)
    exact_tensors = [x.detach().double().requires_grad_() for x in tensors]
    with (
        poisoned_memory(),
        # So that few rows make many chunks.
        mock.patch.object(ce, "loss_chunk_rows", return_value=128),
    ):
        values = results(ours, tensors)
    eager, exact = results(formula, tensors), results(formula, exact_tensors)
    for number, triple in enumerate(zip(values, eager, exact, strict=True)):
        assert triple[0].shape == triple[2].shape
        value, same, oracle = (x.double().reshape((1,) * (2 - x.dim()) + x.shape) for x in triple)
        kind = "out" if number < len(values) - len(tensors) else "gradient"
        # Logits that are rounded to 16 bits make a loss as inexact as they are.
        is_rounded = name == "linear_cross_entropy" and kind == "out"
        kept = dtype if is_rounded else values[number].dtype
        judge(kind, value, oracle, same, dtype=kept, num_terms=max(size))


CASES = [
    ("rms_norm", (1, 3), ""),
    ("rms_norm", (9, 300), "columns apart"),
    ("rms_norm of a sum", (5, 7, 40), ""),
    ("layer_norm", (5, 7, 40), ""),
    ("layer_norm of a sum", (9, 300), "rows apart"),
    ("swiglu", (8, 128), ""),
    ("swiglu", (8, 128), "sign apart"),
    ("swiglu", (3, 5, 41), "columns apart"),
    ("rotary", (1, 1, 1, 2), ""),
    ("rotary", (2, 3, 33, 12), "heads beside"),
    ("rotary", (2, 3, 9, 6), "columns apart"),
    ("cross_entropy", (2, 2), ""),
    ("cross_entropy", (3, 5001), "rows apart"),
    ("cross_entropy", (7, 61), ""),
    ("linear_cross_entropy", (2, 70, 24), ""),  # in two chunks
    ("gelu_mlp", (37, 24), "off a boundary"),
    ("gelu_mlp of a norm", (5, 40), ""),
    ("weighted_sum", (17, 257), "rows apart"),
    ("weighted_sum", (3, 5, 40), "columns apart"),
]
NAMES = list(dict.fromkeys(name for name, _, _ in CASES))
SUMS = ("rms_norm of a sum", "layer_norm of a sum")
ON_GPU = [
    ("rms_norm", (4099, 8192), ""),
    ("layer_norm of a sum", (4099, 1600), ""),
    ("swiglu", (1027, 4304), "rows apart"),
    ("rotary", (4, 25, 513, 64), "heads beside"),
    ("cross_entropy", (515, 50257), ""),
    ("linear_cross_entropy", (515, 768), ""),
    ("gelu_mlp", (1000, 1152), ""),
    ("weighted_sum", (4099, 4097), ""),
]


@pytest.mark.parametrize(
    ("name", "size", "dtype", "layout"),
    [
        *((name, (5, 40), BF16, "mixed") for name in SUMS),
        *((name, size, FP32, layout) for name, size, layout in CASES),
        *((name, OPERATIONS[name].size, BF16, "") for name in NAMES),
        *more(*((name, size, FP16, layout) for name, size, layout in CASES)),
    ],
    ids=str,
)
def test_it_is_within_the_error_budget(name, size, dtype, layout, interpreted):
    interpreted(measure, name, size, dtype, layout)


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "size", "layout"), CASES + ON_GPU, ids=str)
def test_compiled_it_is_within_the_error_budget(name, size, layout):
    for dtype in DTYPES:
        measure(name, size, dtype, layout, "cuda")


@pytest.mark.parametrize("name", list(OPERATIONS)[:12])
def test_without_a_gpu_it_is_the_formula(name):
    measure(name, OPERATIONS[name].size, BF16)


def check_columns() -> None:
    """Asserts that columns are added in fp32 and rounded once."""
    (x,) = draw("column_sums", FP16, (700, 130))
    with poisoned_memory():
        sums = column_sums.column_sums(x.detach())
    torch.testing.assert_close(sums, x.double().sum(0).half(), atol=1e-5, rtol=2**-9)


def check_compiled(
    name: str, autocast: bool, device: str = "cpu", backend: str = "aot_eager"
) -> None:
    """Asserts that in one graph without a break the operation gives what it gives outside."""
    tensors = [x.detach().to(device).requires_grad_() for x in draw(name, FP32)]
    # The compiler may leave out a cast to bf16 and back, which the operation makes outside.
    tolerance = {"rtol": 1.6e-2, "atol": 1e-5} if autocast else {}
    compiled = torch.compile(OPERATIONS[name].ours, backend=backend, fullgraph=True)
    with torch.autocast(device, BF16, enabled=autocast):
        inside, outside = results(compiled, tensors), results(OPERATIONS[name].ours, tensors)
    torch.testing.assert_close(inside, outside, **tolerance)


WHOLE = ["rms_norm of a sum", "cross_entropy", "linear_cross_entropy", "gelu_mlp"]
WHOLE += ["flash_attention"]


@pytest.mark.parametrize(
    ("name", "autocast"),
    [*((name, False) for name in WHOLE), *more(*((name, True) for name in list(OPERATIONS)[:12]))],
)
def test_the_compiler_takes_it_whole(name, autocast, interpreted):
    interpreted(check_compiled, name, autocast)


@pytest.mark.gpu
@pytest.mark.parametrize("name", list(OPERATIONS)[:12])
def test_on_a_gpu_the_compiler_takes_it_whole(name):
    for autocast in (False, True):
        check_compiled(name, autocast, "cuda", "inductor")


def check_unused_outputs() -> None:
    x, w, b, residual = draw("layer_norm of a sum", FP32)
    for number in (0, 1):
        ours, right = (
            torch.autograd.grad(function(x, w, b, residual)[number].square().sum(), (x, residual))
            for function in (OPERATIONS["layer_norm of a sum"].ours, layer_norm_formula)
        )
        torch.testing.assert_close(ours, right)


INF, NAN = math.inf, math.nan


def edge_rows(dtype: torch.dtype) -> list[Tensor]:
    """Returns rows of logits that cost a formula without care its accuracy, or its result."""
    big = torch.finfo(dtype).max
    offset = min(1e30, big / 2)
    rows = [
        [offset + 2, offset - 1, offset],
        [2e4, 2e4 - 8, 0.0],
        [-big] * 3,
        [big, -big, big],
        [0.0, -INF, 1.0],
        [-INF] * 3,
        [INF, 0.0, 1.0],
        [NAN, 0.0, 1.0],
        [-INF] * 4096 + [1.0, 3.0],  # nothing in its first block
    ]
    return [torch.tensor(row).to(dtype) for row in rows]


def check_edges(dtype: torch.dtype) -> None:
    """Asserts that loss and gradient are `F.cross_entropy`'s in fp64, rounded."""
    for row, target in itertools.product(edge_rows(dtype), (0, 1, -100)):
        targets = torch.full((2,), target)
        exact = row.double().repeat(2, 1).requires_grad_()
        loss, grad = results(lambda x, t=targets: F.cross_entropy(x, t), [exact])
        functions = [lambda x, t=targets: ce.cross_entropy(x, t)]
        if row.isfinite().all():  # times a 0 of the identity, infinity would be NaN
            identity = torch.eye(len(row), dtype=dtype)
            functions.append(lambda x, t=targets, w=identity: ce.linear_cross_entropy(x, w, t))
        for function in functions:
            ours = results(function, [row.repeat(2, 1).requires_grad_()])
            torch.testing.assert_close(ours[0], loss.float(), rtol=1e-6, atol=1e-6, equal_nan=True)
            atol = 1e-6 + torch.finfo(dtype).eps
            torch.testing.assert_close(ours[1], grad.to(dtype), rtol=0, atol=atol, equal_nan=True)


def check_targets_outside() -> None:
    """Asserts that a target outside gives NaN, and to the gradient of its row alone."""
    weight = torch.eye(7)
    for outside in (-1, 7, 2**40):
        targets = torch.tensor([-100, outside, 3])
        for function in (ce.cross_entropy, lambda x, t: ce.linear_cross_entropy(x, weight, t)):
            x = torch.randn(3, 7).requires_grad_()
            loss, grad = results(lambda x, f=function, t=targets: f(x, t), [x])
            assert loss.isnan() and grad.isnan().all(1).tolist() == [False, True, False]


def check_dropout() -> None:
    """Asserts that the mask is the seed's, the same in backward, and drops the share p."""
    size, p, seed = (301, 40), 0.1, torch.tensor(2**40 + 1)
    tensors = draw("dropout_linear", FP32, size)
    mask = linear.seeded_dropout(torch.ones(size), p, seed)
    with poisoned_memory():
        ours = results(lambda *x: linear.dropout_linear(*x, p, seed), tensors)
    expected = results(lambda x, w, b: F.linear(x * mask, w, b), tensors)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
    assert set(mask.unique().tolist()) == {0.0, torch.tensor(1.0).div(1 - p).item()}
    assert abs((mask == 0).double().mean() - p) <= 5 * math.sqrt(p / mask.numel())
    assert not torch.equal(mask, linear.seeded_dropout(torch.ones(size), p, seed + 1))


@pytest.mark.parametrize(
    "check",
    [
        check_columns,
        check_unused_outputs,
        partial(check_edges, FP32),
        partial(check_edges, FP16),
        check_targets_outside,
        check_dropout,
    ],
)
def test_interpreted_a_kernel_holds_what_its_formula_does(check, interpreted):
    interpreted(check)


def check_no_rows(name: str) -> None:
    """Asserts that a batch without rows has outputs and gradients without rows, and zeros for
    parameters.
    """
    tensors = draw(name, FP32, (2, 3, 0, 8) if name == "rotary" else (0, 6))
    first, *gradients = results(OPERATIONS[name].ours, tensors)
    # The mean of no loss is no number.
    assert first.isnan() if "entropy" in name else first.numel() == 0
    assert all(not x.any() for x in gradients)


def check_flops(name: str) -> None:
    """Asserts that the operations a step counts for are the formula's."""
    counts = []
    for function in (OPERATIONS[name].ours, OPERATIONS[name].formula):
        with FlopCounterMode(display=False) as counter:
            results(function, draw(name, FP32))
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


def check_far_from_zero(dtype: torch.dtype) -> None:
    """Asserts the limits of the activations and their gradients at the ends of a dtype's range."""
    big = torch.finfo(dtype).max
    ends = torch.tensor(
        [[-big, -big / 3, -1e4, -200, -30, 0.0, 30, 200, 1e4, big / 3, big]], dtype=dtype
    )
    expected = (ends > 0).double() + 0.5 * (ends == 0)
    y, grad = results(lambda x: swiglu(x, torch.ones_like(x)), [ends.requires_grad_()])
    direction = torch.linspace(-1, 1.5, 11).to(dtype).double()
    torch.testing.assert_close(y, ends.clamp(min=0), rtol=0, atol=1e-10)
    torch.testing.assert_close(grad.double(), expected * direction, rtol=1e-2, atol=1e-10)


def check_rows_of_any_size(dtype: torch.dtype) -> None:
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


PRODUCTS = ["linear_cross_entropy", "norm_linear", "dropout_linear", "gelu_mlp"]


@pytest.mark.parametrize(
    ("check", "argument"),
    [
        *((check_no_rows, name) for name in (*NAMES, *PRODUCTS[1:3]) if "mlp" not in name),
        *((check_flops, name) for name in PRODUCTS),
        *itertools.product((check_far_from_zero, check_rows_of_any_size), DTYPES),
    ],
)
def test_with_and_without_a_kernel_it_holds_what_its_formula_does(check, argument, interpreted):
    interpreted(check, argument)
    if argument != "weighted_sum":
        check(argument)


def test_without_a_gpu_edges_are_the_formulas_and_a_target_outside_is_an_error():
    check_edges(FP16)
    with pytest.raises(IndexError, match="Target 4 is out of bounds"):
        ce.cross_entropy(torch.zeros(3, 4), torch.tensor([0, 4, 1]))


X, W, T = torch.zeros(3, 4), torch.zeros(4), torch.zeros(3, dtype=torch.int64)
X4, TABLE = X[None, None], torch.zeros(5, 4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rms_norm(X, W[:3], EPS), r"weight must be of shape \(4,\), got \(3,\)"),
        (lambda: rms_norm(X, None, EPS), "weight must be a tensor, got NoneType"),
        (lambda: rms_norm(X.long(), W, EPS), "x must be .*torch.float32 or .* got torch.int64"),
        (lambda: layer_norm(X, W, W.to("meta"), EPS), "on cpu, got torch.float32 on meta"),
        (lambda: rotary.rotary(X4, X4, TABLE[:2], TABLE), r"cos must be of shape \(3, 4\)"),
        (lambda: ce.cross_entropy(X, T.int()), "targets must be torch.int64 on cpu, got .*int32"),
        (lambda: ce.linear_cross_entropy(X, X.T, T), r"weight must be \(V, 4\), got \(4, 3\)"),
        (
            lambda: linear.norm_linear(X, X, W[:3], (X[:2], W, W, EPS)),
            r"norm's sum must be of shape \(3, 4\), got \(2, 4\)",
        ),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()


def test_a_launch_is_kept_for_what_its_kernel_was_compiled_for(monkeypatch):
    made = []
    ran = []
    x = torch.zeros(64)

    def make(*facts):
        made.append(facts)
        return lambda *arguments: ran.append(arguments)

    monkeypatch.setattr(launch, "Launch", make)
    launcher = launch.Launcher("a kernel")
    # The first two are alike: a multiple of 16 too.
    calls = [(x, 32), (x + 1, 48), (x.half(), 32), (x[1:], 32), (x, 33), (x, 1), (x, 2**31)]
    for number, call in enumerate([*calls, (x, None)]):
        launcher[(1,)](*call, BLOCK=8)
        assert len(made) == max(1, number) and ran[-1] == call
    launcher[(2,)](x, 32, BLOCK=8)
    launcher[(1,)](x, 32, BLOCK=16)
    assert len(made) == 9
