"""FlashAttention in Triton and in tiled PyTorch against an fp64 oracle, and what the public
function promises.

The kernels run on the CPU under Triton's interpreter, which has to be chosen before triton is
imported: one worker process is started with it, computes the errors of a case, and the test here
judges them. On a CUDA device the same cases run compiled (marker gpu).

Shape suffixes as in labkit.kernels.flash_attention.
"""

import contextlib
import dataclasses
import functools
import importlib
import inspect
import itertools
import math
import re
import types
from unittest import mock

import pytest
import torch
import triton
from conftest import ALL_TESTS, more, off_boundary
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from labkit.kernels import flash_attention as fa
from labkit.kernels import launch
from labkit.kernels.flash_attention import (
    FlashAttention,
    choice,
    flash_attention,
    launches,
    op,
    resolve_impl,
    shapes,
    splits,
)
from labkit.kernels.flash_attention import triton as triton_kernels
from labkit.kernels.flash_attention.choice import INTERPRETER_CONFIG, select_config
from labkit.kernels.flash_attention.hopper import forward, one_pass
from labkit.kernels.flash_attention.hopper import tiles as hopper_tiles
from labkit.kernels.flash_attention.tiled import (
    TiledFlashAttention,
    tiled_attention_backward,
    tiled_attention_forward,
)
from labkit.kernels.flash_attention.triton import STATISTICS_PADDING, split_head_dim
from labkit.kernels.reference import _repeat_heads, _scores, attention_reference
from labkit.numerics import judge

FUNCTIONS = {"triton": FlashAttention, "tiled": TiledFlashAttention}
NAMES = ("out", "lse", "dq", "dk", "dv")


def attention_lse_reference(q, k, *, causal=False, scale=None, window=None):
    """Returns log Σ exp(scale · q kᵀ) of each query; −∞ for one that sees no key."""
    return torch.logsumexp(_scores(q, _repeat_heads(k, q), causal, scale, window)[0], dim=-1)


@dataclasses.dataclass(frozen=True)
class Case:
    """One problem: (batch, query heads, key heads, queries, keys, head dimension) and how it is
    masked and laid out.
    """

    shape: tuple[int, int, int, int, int, int]
    causal: bool = False
    dtype: str = "float32"
    window: tuple[int, int] | None = None
    scale: float | None = None
    layout: str = "contiguous"
    packed: bool = False
    precision: str = "auto"
    num_splits: int | None = None
    kernels: str | None = None
    seed: int = 0

    def __str__(self):
        default = Case(self.shape)
        fields = [
            f.name
            for f in dataclasses.fields(self)
            if getattr(self, f.name) != getattr(default, f.name)
        ]
        return "x".join(map(str, self.shape)) + "".join(
            f"-{name}={getattr(self, name)}" for name in fields
        )


LAYOUTS = ("contiguous", "transposed", "sliced", "fused", "columns", "expanded")


def lay_out(x: Tensor, layout: str) -> Tensor:
    """Returns x (B, H, S, D) with the same values in another memory layout; what lies between them
    is NaN.
    """
    batch, heads, length, dim = x.shape
    shape, viewed = {
        "transposed": ((batch, length, heads, dim), lambda room: room.transpose(1, 2)),
        "sliced": ((batch, heads, 2 * length, dim), lambda room: room[:, :, ::2]),
        "fused": ((batch, length, 3, heads, dim), lambda room: room[:, :, 1].transpose(1, 2)),
        "columns": ((batch, heads, dim, length), lambda room: room.transpose(2, 3)),
    }.get(layout, (x.shape, lambda room: room))
    return viewed(x.new_full(shape, math.nan)).copy_(x)


def draw(case: Case, device: str) -> tuple[Tensor, ...]:
    """Returns q, k, v and the gradient of the output, in the case's dtype and layout."""
    batch, heads, key_heads, num_queries, num_keys, dim = case.shape
    generator, dtype = torch.Generator().manual_seed(case.seed), getattr(torch, case.dtype)

    def normal(num_heads: int, length: int) -> Tensor:
        x = torch.randn((batch, num_heads, length, dim), generator=generator, dtype=torch.float64)
        return lay_out(x.to(dtype).to(device), case.layout)

    q, k, v = normal(heads, num_queries), normal(key_heads, num_keys), normal(key_heads, num_keys)
    # What o.sum().backward() passes: every stride is zero.
    ones = torch.ones((), dtype=dtype, device=device).expand(q.shape)
    return q, k, v, ones if case.layout == "expanded" else normal(heads, num_queries)


@contextlib.contextmanager
def poisoned_outputs():
    """While it is open, torch.empty and its kin give NaN between canaries; at the end the canaries
    must be alive.
    """
    canary, margin, buffers, empty = -12345.0, 64, [], torch.empty

    def poisoned(*size, **factory):
        shape = torch.Size(size[0] if len(size) == 1 and not isinstance(size[0], int) else size)
        if not factory.get("dtype", torch.get_default_dtype()).is_floating_point:
            return empty(shape, **factory)
        buffer = empty(shape.numel() + 2 * margin, **factory).fill_(canary)
        buffer[margin : margin + shape.numel()] = math.nan
        buffers.append((buffer, shape.numel()))
        return buffer[margin : margin + shape.numel()].view(shape)

    def poisoned_strided(shape, strides, **factory):
        return poisoned(shape, **factory).view(-1).as_strided(shape, strides)

    def poisoned_like(x):
        return poisoned_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)

    with mock.patch.multiple(
        torch, empty=poisoned, empty_like=poisoned_like, empty_strided=poisoned_strided
    ):
        yield
    assert buffers, "nothing was allocated by torch.empty: the poison tests nothing"
    for buffer, numel in buffers:
        expected = torch.full((margin,), canary, dtype=buffer.dtype, device=buffer.device)
        assert torch.equal(buffer[:margin], expected), "written before an output"
        assert torch.equal(buffer[margin + numel :], expected), "written behind an output"


def mask_of(case: Case) -> dict:
    left, right = op._check_window(case.window, case.causal)
    return {"scale": op._check_scale(case.scale, case.shape[-1]), "left": left, "right": right}


class RoundedProducts(TorchDispatchMode):
    """Matrix products of operands rounded to TF32's 10 bits of fraction, ties away from zero."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default):
            args = [
                ((x.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)
                for x in args
            ]
        return func(*args, **(kwargs or {}))


def eager(case: Case, dtype: torch.dtype, tensors: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """Returns what attention_reference gives in a dtype: output, log-sum-exp and gradients, all in
    fp64.
    """
    *leaves, grad_out = (x.to(dtype).contiguous() for x in tensors)
    leaves = [x.requires_grad_() for x in leaves]
    options = {"causal": case.causal, "window": case.window, "scale": case.scale}
    out = attention_reference(*leaves, **options)
    grads = torch.autograd.grad(out, leaves, grad_out)
    lse = attention_lse_reference(*leaves[:2], **options)
    return {name: x.detach().double() for name, x in zip(NAMES, (out, lse, *grads), strict=True)}


def ours(case: Case, impl: str, tensors: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """Returns what the kernels give, from poisoned outputs."""
    q, k, v, grad_out = tensors
    mask = mask_of(case)
    if impl == "tiled":
        # Tiles smaller than the shipped ones, so that short lengths have several.
        mask |= {"tile_q": 32, "tile_k": 16}
        out, lse = tiled_attention_forward(q, k, v, **mask)
        grads = tiled_attention_backward(grad_out, q, k, v, out, lse, **mask)
    else:
        with poisoned_outputs():
            options = {
                "precision": case.precision,
                "impl": impl,
                "num_splits": case.num_splits,
                **mask,
            }
            plan, cu_seqlens = (
                fa.plan_of(q, k, v, **options),
                (mask.get("cu_seqlens_q"), mask.get("cu_seqlens_k")),
            )
            out, lse = plan.forward(q, k, v, *cu_seqlens)
            grads = plan.backward(grad_out, q, k, v, out, lse, *cu_seqlens, kernels=case.kernels)
    for x, like in zip((out, *grads), (q, q, k, v), strict=True):
        assert x.dtype == like.dtype and x.shape == like.shape
    return {name: x.double() for name, x in zip(NAMES, (out, lse, *grads), strict=True)}


def largest(x: Tensor) -> float:
    return x.abs().max().item() if x.numel() else 0.0


def measure(case: Case, impl: str, device: str = "cpu") -> dict[str, tuple[float, float]]:
    """Returns, by quantity, our largest error against fp64 and the budget it has.

    Outputs: twice, gradients: three times the error of eager attention in the same dtype plus a
    band; the log-sum-exp: 1e-3, and twice eager's error in TF32. The band is one rounding of the
    largest value, and what fp32 arithmetic inside cannot do without: S is off by u·scale·|q|·|k|,
    which is P's relative error (eager attention has it too, but over a few rows its luck is no
    yardstick). Of the gradients also: P is recomputed as exp(S − L), off by u·|L|; ∂P − D is a
    difference of values that may cancel (a row with one key has nothing else), off by u·|∂P|; and D
    is taken from the output as stored, rounded to its dtype, independently in each of its d terms.
    """
    tensors = draw(case, device)
    exact = eager(case, torch.float64, tensors)
    is_tf32 = case.precision in ("tf32", "bf16x3") and case.dtype == "float32"
    with RoundedProducts() if is_tf32 else contextlib.nullcontext():
        same_dtype = eager(case, getattr(torch, case.dtype), tensors)
    result = ours(case, impl, tensors)
    empty = torch.isinf(exact["lse"])
    assert torch.equal(empty, torch.isneginf(result["lse"])), (
        "−inf for another set of rows than those without a key"
    )
    assert not result["out"][empty].any() and not result["dq"][empty].any(), (
        "a row without a key is not zero"
    )
    differs, same_differs = (
        largest((exact["lse"] - x["lse"])[~empty]) for x in (result, same_dtype)
    )
    measured = {"lse": (differs, 1e-3 + 2 * same_differs if is_tf32 else 1e-3)}
    q, k, v, grad_out = (x.double().abs() for x in tensors)
    inside, stored = (torch.finfo(dtype).eps / 2 for dtype in (torch.float32, tensors[0].dtype))
    scale = mask_of(case)["scale"]
    score = scale * largest(
        q @ k.repeat_interleave(q.shape[1] // k.shape[1], dim=1).transpose(-2, -1)
    )
    exponent = largest(exact["lse"][~empty]) + score
    largest_grad_p = (grad_out.flatten(0, -2).amax(0) @ v.flatten(0, -2).amax(0)).item()
    terms = largest((exact["out"].cpu() * tensors[3].double().cpu()).square().sum(-1).sqrt())
    differences = scale * (inside * (1 + exponent) * largest_grad_p + stored * terms)
    # P is not negative, so that this is the sum of the magnitudes that ∂V sums.
    summed = largest(eager(case, torch.float64, (*tensors[:3], tensors[3].abs()))["dv"])
    inherent = {
        "out": inside * score * largest(v),
        "dq": differences * largest(k),
        "dk": differences * largest(q),
        "dv": inside * exponent * summed,
    }
    for name in inherent:
        assert torch.isfinite(result[name]).all(), f"{name} is not finite"
        error, eager_error = (largest(x[name] - exact[name]) for x in (result, same_dtype))
        band = stored * largest(exact[name]) + inherent[name]
        measured[name] = (error, (2 if name == "out" else 3) * (eager_error + band))
    return measured


def check(measured: dict[str, tuple[float, float]]) -> None:
    over = {name: pair for name, pair in measured.items() if not pair[0] <= pair[1]}
    assert not over, f"(error, budget) over budget: {over}"


def is_interpreted() -> bool:
    torch.set_num_threads(1)
    return type(triton_kernels.flash_attention_fwd_kernel).__name__ == "InterpretedFunction"


def runs_interpreted(test):
    """Makes a test run in the worker, whose kernels are interpreted, but where it is about another
    implementation.
    """

    @functools.wraps(test)
    def run(interpreted, **arguments):
        if arguments.get("impl") == "tiled" or arguments.get("where") == "compiled":
            return test(**arguments)
        return interpreted(run_here, test.__module__, test.__name__, arguments)

    parameters = [*inspect.signature(test).parameters.values()]
    fixture = inspect.Parameter("interpreted", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    run.__signature__ = inspect.Signature([fixture, *parameters])
    return run


def run_here(module: str, name: str, arguments: dict) -> None:
    getattr(importlib.import_module(module), name).__wrapped__(**arguments)


CASES = [
    Case((1, 1, 1, 1, 1, 1)),
    Case((2, 2, 2, 64, 64, 16), causal=True),
    Case((1, 2, 2, 33, 65, 32)),
    Case((1, 1, 1, 1, 239, 64), causal=True),
    Case((1, 1, 1, 113, 203, 40), causal=True),
    Case((1, 1, 1, 113, 203, 40)),
    Case((1, 1, 1, 97, 97, 59), causal=True),
    Case((1, 2, 1, 64, 64, 72), causal=True),
    Case((1, 1, 1, 50, 49, 72)),
    Case((1, 2, 1, 65, 47, 80)),
    Case((1, 1, 1, 48, 80, 96), causal=True),
    Case((1, 1, 1, 35, 34, 111)),
    Case((1, 1, 1, 40, 33, 128), causal=True),
    Case((1, 1, 1, 20, 35, 192)),
    Case((1, 1, 1, 18, 17, 256), causal=True),
    # More queries than keys: the first see none.
    Case((1, 2, 2, 65, 20, 16), causal=True),
    Case((2, 4, 2, 40, 41, 16), causal=True),
    Case((2, 6, 1, 33, 20, 16)),
    Case((1, 2, 1, 70, 70, 16), causal=True, window=(20, -1)),
    Case((1, 2, 1, 70, 90, 16), window=(7, 3)),
    Case((1, 1, 1, 90, 50, 16), window=(0, 0)),
    Case((1, 1, 1, 64, 64, 16), window=(-1, 5)),
    Case((1, 1, 1, 64, 96, 32), window=(33, -1)),
    Case((1, 1, 1, 40, 40, 16), causal=True, scale=1.5),
    *(Case((2, 2, 2, 35, 37, 24), causal=True, layout=layout) for layout in LAYOUTS[1:]),
]
# The kernels round operands to TF32, or cut them into slices of bf16, so that the interpreter's
# products are those of the tensor cores.
TF32_CASES = [
    Case((1, 1, 1, 96, 128, 16), causal=True, precision="tf32"),
    Case((1, 2, 1, 65, 80, 16), causal=True, precision="bf16x6"),
    Case((1, 2, 1, 40, 40, 128), causal=True, precision="bf16x6", layout="expanded"),
    *more(
        Case((1, 2, 1, 65, 47, 80), precision="tf32", num_splits=2),
        Case((1, 4, 2, 47, 70, 33), precision="bf16x6", layout="columns"),
        Case((1, 2, 2, 70, 47, 80), precision="bf16x6", num_splits=2),
    ),
    Case((1, 2, 1, 65, 80, 72), causal=True, precision="bf16x3"),
    Case((1, 2, 2, 70, 47, 16), precision="bf16x3", num_splits=2, layout="columns"),
]
# Walks shared among several programs: with shares that are empty, of grouped heads, of rows that
# see no key.
SPLIT_CASES = [
    Case((1, 1, 1, 96, 128, 16), causal=True, num_splits=2),
    Case((1, 2, 1, 50, 83, 24), causal=True, num_splits=3),
    Case((2, 1, 1, 40, 41, 72), num_splits=2),
    Case((1, 2, 1, 65, 20, 59), causal=True, num_splits=5, layout="transposed"),
    Case((1, 1, 1, 90, 110, 16), window=(30, 3), num_splits=2),
]

# No bf16 here: the interpreter's bf16 product is wrong, the compiled one is tested on a GPU. Heads
# and layouts are addresses, counted in elements, which one dtype tests; the shapes of one head are
# tested in both.
INTERPRETED = [
    dataclasses.replace(case, dtype=dtype)
    for case in (*CASES, *SPLIT_CASES)
    for dtype in ("float32", "float16")
    if dtype == "float16"
    or (case.shape[:3] == (1, 1, 1) and max(case.shape) < (200 if ALL_TESTS else 97))
] + TF32_CASES


@pytest.mark.parametrize("case", INTERPRETED, ids=str)
def test_interpreted_kernels_are_within_the_budget(case, interpreted):
    check(interpreted(measure, case, "triton"))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_tiled_attention_is_within_the_budget(case, dtype):
    check(measure(dataclasses.replace(case, dtype=dtype), "tiled"))


@pytest.mark.parametrize("case", [CASES[6], CASES[15], CASES[19]], ids=str)
def test_tiled_attention_in_fp64_is_the_oracle(case):
    tensors = draw(dataclasses.replace(case, dtype="float64"), "cpu")
    exact, result = eager(case, torch.float64, tensors), ours(case, "tiled", tensors)
    for name, x in exact.items():
        torch.testing.assert_close(result[name], x, rtol=1e-12, atol=1e-12)


def cases(max_length: int, dtypes: tuple[str, ...], head_dims: tuple[int, ...] = ()):
    """Draws any problem up to a length; `head_dims` where each of them is compiled anew."""
    lengths, edges = st.integers(1, max_length), st.integers(-1, max_length)
    dims = st.sampled_from(head_dims) if head_dims else st.integers(1, 80)
    shapes = st.builds(
        lambda batch, group, key_heads, *sizes: (batch, key_heads * group, key_heads, *sizes),
        st.integers(1, 2),
        st.integers(1, 3),
        st.integers(1, 2),
        lengths,
        lengths,
        dims,
    )
    window, scale = st.none() | st.tuples(edges, edges), st.none() | st.floats(0.01, 2.0)
    num_splits, seed, layout = (
        st.none() | st.integers(1, 4),
        st.integers(0, 2**31 - 1),
        st.sampled_from(LAYOUTS),
    )
    options = {
        "causal": st.booleans(),
        "dtype": st.sampled_from(dtypes),
        "window": window,
        "scale": scale,
    }
    return st.builds(Case, shapes, **options, layout=layout, num_splits=num_splits, seed=seed)


random_shapes = settings(
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    database=None,
)


@settings(random_shapes, max_examples=100 if ALL_TESTS else 8)
@given(case=cases(40, ("float32", "float16")))
def test_interpreted_kernels_on_random_shapes(interpreted, case):
    check(interpreted(measure, case, "triton"))


@settings(random_shapes, max_examples=100)
@given(case=cases(90, ("float32", "float16", "bfloat16")))
def test_tiled_attention_on_random_shapes(case):
    check(measure(case, "tiled"))


def test_the_budget_refuses_a_wrong_kernel(monkeypatch):
    """One that is off by a key, and one that returns zeros."""
    right, case = ours, Case((1, 1, 1, 40, 40, 16), causal=True)
    off_by_one = right(
        dataclasses.replace(case, causal=False, window=(-1, 1)), "tiled", draw(case, "cpu")
    )
    zeros = {name: torch.zeros_like(x) for name, x in off_by_one.items()}
    for wrong in (off_by_one, zeros):
        monkeypatch.setitem(globals(), "ours", lambda *_, wrong=wrong: wrong)
        with pytest.raises(AssertionError, match=r"'out': .* 'dq': .* 'dk': .* 'dv': "):
            check(measure(case, "tiled"))


@pytest.mark.parametrize("where", ["interpreted", pytest.param("compiled", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("axis", ["batch", "head", "row", "column"])
@runs_interpreted
def test_offsets_beyond_two_to_the_31_give_the_same_bits(axis, where):
    *_, length, dim = shape = (2 if axis == "batch" else 1, 2 if axis == "head" else 1, 68, 16)
    span = 2**31 + 64
    strides = {
        "batch": (span, length * dim, dim, 1),
        "head": (length * dim, span, dim, 1),
        # A stride that fits into int32, and tiles that do, whose later starts do not.
        "row": (dim, 2 * dim, 4 * span // 3 // (length - 1) + 16, 1),
        "column": (4 * length, length, 1, span // (dim - 1) + 16),
    }[axis]
    device = "cuda" if where == "compiled" else "cpu"
    # The memory in between is never touched, so that a CPU does not have to hold it.
    num_elements = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1
    view = torch.empty(num_elements, dtype=torch.float16, device=device).as_strided(shape, strides)
    dense = torch.randn(shape, generator=torch.Generator().manual_seed(0)).half().to(device)
    view.copy_(dense)
    if axis == "column":
        # Columns that lie together load through other instructions than rows do, and round
        # otherwise.
        dense = dense.transpose(2, 3).contiguous().transpose(2, 3)
    mask = {"scale": 0.25, "left": -1, "right": 0}
    results = []
    for x in (view, dense):
        plan = fa.plan_of(x, x, x, **mask)
        out, lse = plan.forward(x, x, x)
        results.append((out, lse, *plan.backward(x, x, x, x, out, lse)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("causal", [None, False, True])
@pytest.mark.parametrize(
    "shapes", [((3, 40, 16), (3, 56, 16)), ((2, 3, 33, 8), (2, 3, 47, 8))], ids=["3d", "4d"]
)
@pytest.mark.parametrize("impl", FUNCTIONS)
@runs_interpreted
def test_the_functions_save_one_log_sum_exp_and_take_three_or_four_dimensions(impl, shapes, causal):
    function, (shape_q, shape_k) = FUNCTIONS[impl], shapes
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(shape, generator=generator).requires_grad_()
        for shape in (shape_q, shape_k, shape_k)
    )
    out = function.apply(q, k, v) if causal is None else function.apply(q, k, v, causal)
    saved = [x for x in out.grad_fn.saved_tensors if x.shape == shape_q[:-1]]
    assert len(saved) == 1
    expected_lse = attention_lse_reference(q.double(), k.double(), causal=bool(causal))
    assert (saved[0] - expected_lse).abs().max().item() <= 1e-5
    expected = attention_reference(q.double(), k.double(), v.double(), causal=bool(causal))
    assert (out - expected).abs().max().item() <= 1e-5
    # An expanded gradient, as sum() passes it.
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    expected_grads = torch.autograd.grad(expected.sum(), (q, k, v))
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        assert (grad - expected_grad).abs().max().item() <= 1e-4


LENGTHS_Q, LENGTHS_K = (
    (17, 1, 32, 46, 33),
    (30, 5, 32, 64, 12),
)  # some are tiles of the interpreted kernels, full


def cumulative(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


@pytest.mark.parametrize(
    ("causal", "window"), [(False, None), (True, (6, -1)), *more((True, None), (False, (3, 4)))]
)
@pytest.mark.parametrize("impl", FUNCTIONS)
@runs_interpreted
def test_a_packed_batch_is_its_sequences_one_by_one(impl, causal, window):
    """Forward and backward, within the fp32 budget."""
    generator = torch.Generator().manual_seed(0)
    cu_q, cu_k = cumulative(LENGTHS_Q), cumulative(LENGTHS_K)
    q = torch.randn((sum(LENGTHS_Q), 4, 24), generator=generator).requires_grad_()
    k, v = (
        torch.randn((sum(LENGTHS_K), 2, 24), generator=generator).requires_grad_() for _ in range(2)
    )
    with poisoned_outputs():
        out = flash_attention(
            q, k, v, causal=causal, window=window, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, impl=impl
        )
    grad_out = torch.randn(out.shape, generator=generator)
    grads = torch.autograd.grad(out, (q, k, v), grad_out)
    expected = one_by_one(
        torch.float64, (q, k, v, grad_out), cu_q, cu_k, causal=causal, window=window
    )
    for x, y in zip((out, *grads), expected, strict=True):
        assert (x - y).abs().max().item() <= 1e-5 * max(1.0, y.abs().max().item())


def one_by_one(
    dtype: torch.dtype, tensors: tuple, cu_q: Tensor, cu_k: Tensor, **mask
) -> list[Tensor]:
    """Returns the output and the gradients of a packed batch by the formula in `dtype`, sequence by
    sequence.
    """
    *packed, grad_out = (x.detach().to(dtype).requires_grad_() for x in tensors)
    parts = []
    for rq, rk in zip(
        itertools.pairwise(cu_q.tolist()), itertools.pairwise(cu_k.tolist()), strict=True
    ):
        sequence = (
            x[slice(*rows)].transpose(0, 1)[None]
            for x, rows in zip(packed, (rq, rk, rk), strict=True)
        )
        parts.append(attention_reference(*sequence, **mask)[0].transpose(0, 1))
    out = torch.cat(parts)
    return [out, *torch.autograd.grad(out, packed, grad_out)]


@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        ("cpu", torch.float32),
        *(
            pytest.param("cuda", dtype, marks=pytest.mark.gpu)
            for dtype in (torch.float16, torch.bfloat16)
        ),
    ],
)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", [64, 72, 128])
def test_a_packed_batch_of_long_sequences_is_within_the_budget(device, dtype, causal, dim):
    lengths = (700, 1, 64, 256, 33, 1500)
    cu_seqlens, generator = cumulative(lengths).to(device), torch.Generator().manual_seed(0)
    tensors = [
        torch.randn((sum(lengths), 2, dim), generator=generator).to(device, dtype) for _ in range(4)
    ]
    *inputs, grad_out = (x.requires_grad_() for x in tensors)
    with poisoned_outputs():
        out = flash_attention(
            *inputs, causal=causal, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens
        )
    found = (out, *torch.autograd.grad(out, inputs, grad_out))
    exact, eager = (
        one_by_one(each, tensors, cu_seqlens, cu_seqlens, causal=causal)
        for each in (torch.float64, dtype)
    )
    for name, *values in zip(("out", "dq", "dk", "dv"), found, exact, eager, strict=True):
        value, *expected = (x.detach().transpose(0, 1).double() for x in values)
        judge(name, value, *expected, dtype=dtype, num_terms=max(lengths))


@pytest.mark.parametrize("impl", FUNCTIONS)
def test_the_operators_pass_opcheck(impl, interpreted):
    interpreted(check_operators, impl)


def check_operators(impl: str) -> None:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator).requires_grad_()

    options = (0.3, -1, 0, "ieee", impl)
    dense = (normal(2, 2, 18, 8), normal(2, 1, 21, 8), normal(2, 1, 21, 8), None, None, *options)
    transposed = (normal(1, 18, 2, 8).detach().transpose(1, 2).requires_grad_() for _ in range(3))
    transposed = (*transposed, None, None, *options)
    cu_seqlens = cumulative((10, 8))
    packed_batch = (*(normal(18, 2, 8) for _ in range(3)), cu_seqlens, cu_seqlens, *options)
    forward, backward = (
        torch.ops.labkit.flash_attention_forward,
        torch.ops.labkit.flash_attention_backward,
    )
    for inputs, lengths in (
        (dense, (None, None)),
        (transposed, (None, None)),
        (packed_batch, (None, 12)),
    ):
        torch.library.opcheck(forward.default, (*inputs, *lengths), atol=1e-5, rtol=1e-5)
    inputs = tuple(x.detach() if isinstance(x, Tensor) else x for x in dense)
    out, lse = forward(*inputs, None, None)
    torch.library.opcheck(backward.default, (*inputs, torch.ones_like(out), out, lse))


def test_a_launch_looks_its_kernel_up_once(monkeypatch):
    launched = []

    class Compiled:
        """Stands for a compiled kernel, which is launched with hooks, by its grid, or without."""

        function, packed_metadata = 2**40, (4, 1, 0)

        def __getitem__(self, grid):
            return lambda *arguments: launched.append(("with hooks", grid, *arguments))

        def run(self, *arguments):
            *grid, stream, function, metadata, told, on_entry, on_exit = arguments[:9]
            assert (stream, function, metadata) == (77, self.function, self.packed_metadata)
            assert told is on_entry is on_exit is None
            launched.append(("without", tuple(grid), *arguments[9:]))

    class Kernel:
        arg_names, looked_up = ("x", "number", "FLAG", "BLOCK"), 0

        def __getitem__(self, grid):
            def look_up(x, number, *, BLOCK, FLAG, num_warps):
                self.looked_up += 1
                Compiled()[grid](x, number, FLAG, BLOCK)
                return Compiled()

            return look_up

    monkeypatch.setattr(launch, "JITFunction", Kernel)
    of_device = types.SimpleNamespace(
        get_current_device=lambda: 7, get_current_stream=lambda device: 11 * device
    )
    monkeypatch.setattr(launch, "driver", types.SimpleNamespace(active=of_device))
    kernel = Kernel()
    one = launch.Launch(kernel, (7,), {"num_warps": 4, "BLOCK": 64, "FLAG": True}, numbers=(5,))
    for x in "abc":
        one(x)
    launch.knobs.runtime.launch_exit_hook.add(print)
    one("d")
    launch.knobs.runtime.launch_exit_hook.remove(print)
    assert kernel.looked_up == 1
    # What the compiled kernel takes is what the first call was looked up by, constants in the order
    # of its parameters.
    ways = ("with hooks", "without", "without", "with hooks")
    assert launched == [
        (way, (7, 1, 1), x, 5, True, 64) for way, x in zip(ways, "abcd", strict=True)
    ]


def test_a_checked_call_leaves_the_next_to_be_checked():
    q = torch.randn((1, 2, 4, 8))
    flash_attention(q, q, q, scale=1.0)
    flash_attention(q, q, q, scale=1)
    for bad in ({"scale": True}, {"impl": ["tiled"]}, {"scale": torch.tensor(1.0)}):
        with pytest.raises((TypeError, ValueError), match=next(iter(bad))):
            flash_attention(q, q, q, **bad)
    with pytest.raises(ValueError, match="k must have the dtype of q"):
        flash_attention(q, q.double(), q, scale=1.0)


def test_a_launch_is_another_where_a_tensor_starts_off_a_boundary():
    storage = torch.zeros(65)
    on, off = storage[:64].view(1, 8, 8), storage[1:].view(1, 8, 8)
    assert shapes.layout_of(on) == shapes.layout_of(on.clone()) != shapes.layout_of(off)
    assert (
        shapes.alignment_of(shapes.layout_of(on)) == 4
        and shapes.alignment_of(shapes.layout_of(on), shapes.layout_of(off)) == 1
    )


@pytest.mark.parametrize("shape", [(2, 3, 40, 64), (1, 1, 1, 72), (1, 4, 7, 128)])
def test_a_descriptor_is_what_triton_makes_of_the_tensor(shape):
    dim = shape[-1]
    for x in (
        torch.zeros(shape, dtype=torch.float16),
        torch.zeros((*shape[:-1], 2 * dim), dtype=torch.float16),
    ):
        x = x[..., :dim]
        strides = [
            dim if size == 1 else stride for size, stride in zip(shape, x.stride(), strict=True)
        ]
        block = [1, 1, 64, 128 if dim == 128 else 64]
        got = hopper_tiles._of(hopper_tiles.tiles_of(shapes.layout_of(x), 64), x)
        expected = TensorDescriptor(x, list(shape), strides, block, hopper_tiles.tile_layout())
        assert got.base is x and vars(got) == vars(expected)
    statistics, layout = torch.zeros((2, 256)), hopper_tiles.row_layout()
    got, expected = (
        hopper_tiles.rows_of(512, 64),
        TensorDescriptor(statistics, [512], [1], [64], layout),
    )
    assert vars(got) | {"base": None} == vars(expected) | {"base": None}
    with pytest.raises(AssertionError, match="16-byte"):
        hopper_tiles.tiles_of(
            shapes.Layout((1, 1, 8, 64), (520, 520, 65, 1), torch.float16, True), 64
        )


@pytest.fixture
def cuda_launcher(monkeypatch):
    """What the installed Triton launches a kernel of two tiles by, and lists of what was launched
    and encoded.
    """
    from triton.backends.nvidia import driver as nvidia

    launched, encoded = [], []

    def encode(address, *facts):
        encoded.append(address)
        return (address, *map(str, facts))

    utils = types.SimpleNamespace(fill_tma_descriptor=encode, fill_tma_descriptor_tiled=encode)
    active = types.SimpleNamespace(
        utils=utils,
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 77,
        allocate_default_profile_scratch=None,
    )
    monkeypatch.setattr(triton.runtime.driver, "_active", active)
    monkeypatch.setattr(triton.runtime.driver, "_default", active, raising=False)
    tiles = "tensordesc<fp16[1, 1, 64, 64]>"
    signature = dict(enumerate([tiles, "constexpr", tiles, "*fp32", "i32", "constexpr"]))
    facts = {
        "swizzle": 3,
        "elem_size": 2,
        "elem_type": 6,
        "block_size": [1, 1, 64, 64],
        "fp4_padded": False,
    }
    launcher = object.__new__(nvidia.CudaLauncher)
    launcher.__dict__ = {
        "launch": nvidia.wrap_handle_tensordesc(
            lambda *x: launched.append(x), signature, [facts, facts]
        ),
        "num_ctas": 1,
        "global_scratch_size": 0,
        "global_scratch_align": 1,
        "profile_scratch_size": 0,
        "profile_scratch_align": 1,
        "launch_cooperative_grid": False,
        "launch_pdl": False,
        "gsan_enabled": False,
        "arg_annotations": (),
        "kernel_signature": b"",
    }
    return launcher, launched, encoded


def flat(values) -> list:
    return [y for x in values for y in (flat(x) if isinstance(x, tuple | list) else [x])]


@pytest.mark.parametrize("knows", [True, False])
def test_tensor_maps_are_encoded_once_for_an_address(cuda_launcher, monkeypatch, knows):
    """What reaches the driver is what Triton hands it, by way of its own code, in the first
    call.
    """
    launcher, launched, encoded = cuda_launcher
    compiled = types.SimpleNamespace(run=launcher, function=2**40, packed_metadata=(4, 1, 0))

    class Compiled(types.SimpleNamespace):
        def __getitem__(self, grid):
            return functools.partial(
                launcher, *grid, 77, self.function, self.packed_metadata, None, None, None
            )

    class Kernel:
        arg_names = ("x", "x_tail", "y", "sums", "length", "BLOCK")

        def __getitem__(self, grid):
            def look_up(*arguments, BLOCK, **_):
                Compiled(**vars(compiled))[grid](*arguments, BLOCK)
                return Compiled(**vars(compiled))

            return look_up

    monkeypatch.setattr(launch, "JITFunction", Kernel)
    if not knows:  # a release that has its own elsewhere
        monkeypatch.setattr(
            hopper_tiles.inspect, "getclosurevars", lambda _: inspect.ClosureVars({}, {}, {}, set())
        )
    x, y, other, sums = (torch.zeros((1, 2, 70, 64), dtype=torch.float16) for _ in range(4))
    described = hopper_tiles.with_tails([(shapes.layout_of(x), 64)], 0)
    described.append((1, hopper_tiles.tiles_of(shapes.layout_of(y), 64)))
    tile_launch = hopper_tiles.TileLaunch(
        Kernel(), (5,), described, (70,), {"BLOCK": 64}, consumers=2
    )
    for pair in ((x, y), (x, y), (x, other), (y, x), (x, y)):
        tile_launch(pair, sums)
    same, again, with_other, turned, last = map(flat, launched)
    assert (
        same == again == last and len({len(launch) for launch in (same, with_other, turned)}) == 1
    )
    names = {tensor.data_ptr(): name for name, tensor in (("x", x), ("y", y), ("other", other))}
    found = [
        [names[v] for v in one if type(v) is int and v in names]
        for one in (same, with_other, turned)
    ]
    assert found == [["x", "y"], ["x", "other"], ["y", "x"]]
    assert len(encoded) == (2 + 2 + 1 + 2 if knows else 10)


@pytest.mark.parametrize("impl", ["triton", "tiled"])
@runs_interpreted
def test_tensors_may_come_back_from_hooks_with_another_layout(impl):
    """As `torch.autograd.graph.save_on_cpu` returns them: dense, whatever they were."""
    options = {"generator": torch.Generator().manual_seed(0)}
    q, k, v = (
        torch.randn((1, 48, 2, 16), **options).transpose(1, 2).requires_grad_() for _ in range(3)
    )
    results = []
    for hook in (lambda x: x, Tensor.contiguous):
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, hook):
            out = flash_attention(q, k, v, causal=True, impl=impl)
        results.append(torch.autograd.grad(out.square().sum(), (q, k, v)))
    assert not q.is_contiguous()
    for kept, moved in zip(*results, strict=True):
        torch.testing.assert_close(moved, kept)


def forget_plans() -> None:
    launches._plan_of.cache_clear()
    op._planned.clear()


@pytest.fixture
def fresh_plans():
    """Launches are planned anew, and those that the test has planned are forgotten."""
    forget_plans()
    yield
    forget_plans()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@runs_interpreted
def test_a_gradient_may_start_off_a_boundary(dtype):
    q, k, v, grad_out = draw(Case((1, 2, 2, 48, 48, 16), dtype=dtype), "cpu")
    q.requires_grad_()
    out = flash_attention(q, k, v, impl="triton")
    on, off = (
        torch.autograd.grad(out, q, x, retain_graph=True)[0]
        for x in (grad_out, off_boundary(grad_out))
    )
    assert torch.equal(on, off)


def test_what_tma_reads_starts_on_a_boundary(fresh_plans):
    """A dense tensor that does not is copied, though `contiguous` would return it as it is."""
    read = []

    def launcher(part):
        return types.SimpleNamespace(
            plan_forward=lambda *_, **__: lambda *tensors: read.extend(tensors[:3])
        )

    q, k, v, _ = draw(Case((1, 2, 2, 8, 8, 64), dtype="float16"), "cpu")
    with mock.patch.object(launches, "hopper_kernels", launcher):
        fa.plan_of(off_boundary(q), k, v, impl="gluon").forward(off_boundary(q), k, v)
    assert (
        torch.equal(read[0], q) and [x.data_ptr() % 16 for x in read] == [0, 0, 0] and read[1] is k
    )


ONE, TWO, TRITON = choice.GLUON_BACKWARDS


@pytest.mark.parametrize(
    ("shape", "causal", "expected"),
    [
        # The measured shapes.
        ((4, 32, 32, 4096, 64), True, ONE),
        ((1, 16, 16, 16384, 128), False, ONE),
        ((16, 16, 16, 2048, 64), False, ONE),
        ((64, 16, 16, 256, 72), False, TWO),
        ((64, 16, 16, 256, 64), False, TWO),
        ((64, 16, 16, 256, 64), True, ONE),
        # Programs of one head wait for one another.
        ((1, 1, 1, 32768, 64), True, TWO),
        ((1, 2, 2, 16384, 64), True, TWO),
        ((1, 1, 1, 65536, 64), True, ONE),
        ((1, 1, 1, 16384, 64), False, TWO),
        ((1, 1, 1, 16384, 128), False, TWO),
        ((256, 1, 1, 256, 64), False, TWO),
        # Those that run at once, with the shorter a walk the longer a wait; and heads that are
        # several.
        ((1, 1, 1, 16384, 64), True, ONE),
        ((1, 4, 4, 8192, 64), True, ONE),
        ((1, 1, 1, 32768, 128), True, ONE),
        # Few tiles of keys; and what the single pass does not take.
        ((1, 1, 1, 8192, 128), True, TRITON),
        ((1, 32, 4, 2048, 64), True, TRITON),
        ((1, 32, 8, 16384, 64), True, TWO),
    ],
)
def test_the_backward_is_the_one_that_suits_the_shape(shape, causal, expected, monkeypatch):
    batch, heads, key_heads, length, dim = shape
    q, k = (
        torch.empty((batch, number, length, dim), device="meta") for number in (heads, key_heads)
    )
    monkeypatch.setattr(choice, "num_multiprocessors", lambda _: 132)
    for unavailable, found in (
        (None, expected),
        ("no such operation", TRITON if expected == TRITON else TWO),
    ):
        monkeypatch.setattr(
            choice, "hopper_single_unavailable", lambda unavailable=unavailable: unavailable
        )
        assert fa.resolve_backward(q, k, "gluon", causal=causal) == found
    assert fa.resolve_backward(q, k, "triton", causal=causal) == "triton"


@pytest.mark.parametrize(
    ("num_heads", "length", "head_dim", "causal", "expected"),
    [
        # Short loops at the end of a causal head: as many heads as there may be.
        (128, 4096, 64, True, 64),
        (64, 4096, 128, True, 32),
        (16, 16384, 128, True, 16),
        # Long loops that wait little, and shorter ones.
        (32, 16384, 64, False, 2),
        (16, 16384, 128, False, 2),
        (128, 2048, 64, False, 26),
        # Two rounds of 40 rather than one of 64 and one of 16.
        (80, 4096, 64, True, 40),
        (1, 256, 64, False, 1),
    ],
)
def test_as_many_heads_take_turns_as_it_takes_to_wait_little(
    num_heads, length, head_dim, causal, expected
):
    assert one_pass.heads_in_flight(num_heads, length, length, head_dim, causal, 132) == expected


@pytest.mark.parametrize(
    ("kernels", "expected"),
    [("one pass", ["one_pass"]), ("two passes", ["two_passes"]), ("triton", [])],
)
@runs_interpreted
def test_the_kernels_that_are_named_are_launched(kernels, expected):
    """Of Gluon, without a GPU to run them."""
    called = []

    def launcher(part):
        return types.SimpleNamespace(plan_backward=lambda *_, **__: lambda *_: called.append(part))

    q, k, v, grad_out = draw(Case((1, 2, 2, 8, 8, 64), dtype="float16"), "cpu")
    lse = q.new_zeros((1, 2, 8), dtype=torch.float32)
    forget_plans()
    with mock.patch.object(launches, "hopper_kernels", launcher):
        fa.plan_of(q, k, v, impl="gluon").backward(grad_out, q, k, v, q, lse, kernels=kernels)
    forget_plans()
    assert called == expected


def test_a_triton_without_the_single_pass_is_logged(monkeypatch, caplog):
    def missing(part):
        raise AttributeError("create_async_tma_reduce")

    monkeypatch.setattr(choice, "hopper_kernels", missing)
    # The undecorated function: what the installed Triton gives stays in the cache.
    reason = choice.hopper_single_unavailable.__wrapped__()
    assert "AttributeError: create_async_tma_reduce" in reason
    assert "gradients take two passes" in caplog.text


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("num_tiles", [1, 3, 22, 66, 67, 171, 500, 3000])
@pytest.mark.parametrize("num_key_tiles", [1, 2, 3, 8, 31, 32, 512])
def test_keys_are_split_so_that_no_split_is_empty(num_tiles, num_key_tiles, causal):
    num_splits = splits.num_splits_of(num_tiles, num_key_tiles, 132, causal, part_kib=48)
    share = -(-num_key_tiles // num_splits)
    assert 1 <= num_splits <= splits.MOST_SPLITS
    assert (num_splits - 1) * share < num_key_tiles <= num_splits * share
    assert num_splits == 1 or share >= splits.TILES_OF_A_SPLIT[2]


@pytest.mark.parametrize(
    ("num_tiles", "num_key_tiles", "causal", "fewest", "most"),
    [
        # One head of 4,096 to 32,768 keys at D 64: the numbers of splits that ran within 8 % of the
        # fastest.
        (22, 32, True, 5, 8),
        (43, 64, True, 4, 6),
        (86, 128, True, 3, 3),
        (171, 256, True, 2, 5),
        (86, 128, False, 3, 6),
        (171, 256, False, 3, 6),
        # Every multiprocessor has work: nothing to gain.
        (128, 16, False, 1, 1),
        (256, 32, True, 1, 1),
        (2816, 32, True, 1, 1),
        # Too few keys to share.
        (4, 4, True, 1, 1),
        (1, 3, False, 1, 1),
    ],
)
def test_keys_are_split_where_splitting_was_seen_to_pay(
    num_tiles, num_key_tiles, causal, fewest, most
):
    assert (
        fewest <= splits.num_splits_of(num_tiles, num_key_tiles, 132, causal, part_kib=48) <= most
    )


@pytest.mark.parametrize(
    ("kernel", "dtype", "shape", "causal", "fewest", "most"),
    [
        # One head on an H200: the numbers of splits that ran within 10 % of the fastest of 1, 2, 4,
        # 8 and 16.
        ("forward", "bfloat16", (1, 1, 1, 16384, 16384, 64), True, 3, 8),
        ("forward", "float32", (1, 1, 1, 1024, 1024, 64), True, 6, 16),
        ("forward", "float32", (1, 1, 1, 4096, 4096, 64), True, 5, 16),
        ("forward", "float32", (1, 1, 1, 16384, 16384, 64), True, 2, 8),
        ("dkdv", "bfloat16", (1, 1, 1, 4096, 4096, 64), True, 4, 12),
        ("dq", "float32", (1, 1, 1, 4096, 4096, 64), True, 5, 16),
        # So little work that the second kernel takes longer to launch than the splits gain.
        ("forward", "bfloat16", (1, 1, 1, 1024, 1024, 16), True, 1, 1),
        ("dq", "bfloat16", (1, 1, 1, 512, 512, 64), True, 1, 1),
        # Every multiprocessor has work: nothing to gain.
        ("dkdv", "bfloat16", (1, 1, 1, 65536, 65536, 16), True, 1, 1),
        ("forward", "bfloat16", (4, 32, 32, 4096, 4096, 64), True, 1, 1),
        ("dkdv", "bfloat16", (1, 16, 16, 16384, 16384, 128), False, 1, 1),
        ("dq", "float32", (64, 16, 16, 256, 256, 72), False, 1, 1),
    ],
)
def test_loops_are_split_where_splitting_was_seen_to_pay(
    kernel, dtype, shape, causal, fewest, most, monkeypatch
):
    monkeypatch.setattr(choice, "num_multiprocessors", lambda _: 132)
    batch, heads, key_heads, num_queries, num_keys, dim = shape
    q = torch.empty((batch, heads, num_queries, dim), dtype=getattr(torch, dtype), device="meta")
    k = torch.empty((batch, key_heads, num_keys, dim), dtype=q.dtype, device="meta")
    q_layout, k_layout = (shapes.Layout(x.shape, x.stride(), x.dtype, True) for x in (q, k))
    problem = shapes.problem_of(q_layout, k_layout, -1, 0 if causal else -1, None)
    tile = getattr(select_config(dim, q.dtype, causal, 90, fa.resolve_precision(q)), kernel)
    given = (problem, tile, kernel, torch.device("cuda", 0), q.dtype, fa.resolve_precision(q))
    num_work_tiles, num_splits = choice.work_tiles_of(*given, None)
    rows = num_keys if kernel == "dkdv" else num_queries
    assert (
        num_work_tiles
        == -(-rows // (tile.block_k if kernel == "dkdv" else tile.block_q)) * heads * batch
    )
    assert fewest <= num_splits <= most
    assert choice.work_tiles_of(*given, 5)[1] == 5


@pytest.mark.parametrize("dim", [64, 72, 128])
def test_packed_sequences_have_tiles_of_their_own(dim, monkeypatch):
    monkeypatch.setattr(choice, "_capability", lambda _: 90)
    x = torch.empty((500, 2, dim), dtype=torch.bfloat16)
    layouts, cu_seqlens = (shapes.layout_of(x),) * 3, torch.tensor([0, 100, 500], dtype=torch.int32)
    packing = (shapes.layout_of(cu_seqlens),) * 2
    for right in (-1, 0):
        problem = shapes.problem_of(*layouts[:2], -1, right, packing)
        found = choice.config_for(layouts, problem, "ieee", torch.device("cuda", 0))
        assert found == select_config(dim, x.dtype, right == 0, 90, batch="packed")
        assert found != select_config(dim, x.dtype, right == 0, 90) and found.forward.num_warps == 4


def test_packed_sequences_are_not_split_and_whole_gradients_not_put_together():
    q = torch.empty((100, 2, 16))
    cu_seqlens = torch.tensor([0, 40, 100])
    packing = (shapes.layout_of(cu_seqlens),) * 2
    problem = shapes.problem_of(shapes.layout_of(q), shapes.layout_of(q), -1, 0, packing)
    tile = INTERPRETER_CONFIG.forward
    assert choice.work_tiles_of(problem, tile, "forward", q.device, q.dtype, "ieee", 3) == (
        2 * (100 // 32 + 3),
        1,
    )
    assert splits.gradients_launch(((1, 1, 8, 16),) * 3, ((128, 128, 16, 1),) * 3, (1, 1)) is None


def room(
    shape: tuple[int, int, int, int], transposed: bool, dtype: torch.dtype = torch.float16
) -> Tensor:
    """Returns room for (B, H, S, D), its heads inside the rows if `transposed`."""
    if transposed:
        return torch.empty(
            [shape[axis] for axis in (0, 2, 1, 3)], dtype=dtype, device="cpu"
        ).transpose(1, 2)
    return torch.empty(shape, dtype=dtype, device="cpu")


both_layouts = pytest.mark.parametrize(
    "transposed", [False, True], ids=["heads outside", "heads inside"]
)


@both_layouts
@pytest.mark.parametrize("head_dim", [64, 72])
@runs_interpreted
def test_the_splits_of_the_keys_make_the_output_of_all(head_dim, transposed):
    """Also of rows for which a split has no key."""
    generator = torch.Generator().manual_seed(0)
    batch, heads, num_queries, num_keys = 2, 3, 37, 50
    q = torch.randn((batch, heads, num_queries, head_dim), generator=generator, dtype=torch.float64)
    k, v = (
        torch.randn((batch, heads, num_keys, head_dim), generator=generator, dtype=torch.float64)
        for _ in range(2)
    )
    scores = q @ k.transpose(-2, -1) / math.sqrt(head_dim)
    scores[:, :, :5] = -math.inf  # rows without any key
    scores[:, :, 5:20, 16:] = -math.inf  # and rows without any in the later splits
    parts, parts_lse = [], []
    for begin in (0, 17, 34):
        lse = scores[..., begin : begin + 17].logsumexp(-1)
        weights = torch.exp(scores[..., begin : begin + 17] - lse.nan_to_num(neginf=0.0)[..., None])
        parts.append((weights @ v[:, :, begin : begin + 17]).flatten(0, 2))
        parts_lse.append(lse.flatten())
    beyond = splits.row_elements(head_dim) - head_dim
    padded = torch.nn.functional.pad(torch.stack(parts), (0, beyond), value=math.nan)
    with poisoned_outputs():
        out = room((batch, heads, num_queries, head_dim), transposed)
        lse = torch.empty((batch, heads, num_queries), dtype=torch.float32, device="cpu")
        launch_of_all = splits.output_launch(out.shape, out.stride(), len(parts_lse))
        launch_of_all(padded.float()[..., :head_dim], torch.stack(parts_lse).float(), out, lse)
    expected_lse = scores.logsumexp(-1)
    expected = torch.exp(scores - expected_lse.nan_to_num(neginf=0.0)[..., None]) @ v
    torch.testing.assert_close(lse, expected_lse.float(), rtol=0, atol=1e-5)
    torch.testing.assert_close(out, expected.half(), rtol=2**-10, atol=1e-6)


@pytest.mark.parametrize("many_programs", [1, 1024], ids=["large blocks", "small blocks"])
@pytest.mark.parametrize("num_splits", [(3, 3), (1, 11), (9, 1)], ids=["all", "k and v", "q"])
@pytest.mark.parametrize("head_dim", [16, 59])
@runs_interpreted
def test_the_splits_of_gradients_are_added(head_dim, num_splits, many_programs):
    """And those that are whole left as they are."""
    splits.MANY_PROGRAMS = many_programs
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 6, 37, head_dim), (2, 3, 41, head_dim), (2, 3, 41, head_dim))
    parts = []
    for number, shape in zip((num_splits[0], num_splits[1], num_splits[1]), shapes, strict=True):
        part = torch.randn((number, *shape[:3], splits.row_elements(head_dim)), generator=generator)
        part[..., head_dim:] = math.nan
        parts.append(part[..., :head_dim] if number > 1 else None)
    with poisoned_outputs():
        grads = [room(shape, index == 2, torch.float32) for index, shape in enumerate(shapes)]
    before = [grad.clone() for grad in grads]
    strides = tuple(grad.stride() for grad in grads)
    splits.gradients_launch(shapes, strides, num_splits)(*parts, *grads)
    for grad, part, poison in zip(grads, parts, before, strict=True):
        expected = poison if part is None else part.sum(0)
        torch.testing.assert_close(grad, expected, equal_nan=True)


@both_layouts
@pytest.mark.parametrize("num_queries", [1, 128, 300])
@pytest.mark.parametrize("head_dim", choice.SINGLE_PASS_HEAD_DIMS)
@runs_interpreted
def test_the_sums_of_the_single_pass_are_put_in_order(head_dim, num_queries, transposed):
    """Scaled, in place and at every stride; they lie as the kernel adds them."""
    batch, heads, block_q = 2, 3, one_pass.SINGLE[head_dim]["BLOCK_Q"]
    num_tiles = -(-num_queries // block_q)
    exact = torch.randn(
        (batch, heads, num_tiles * block_q, head_dim), generator=torch.Generator().manual_seed(0)
    )
    parts = exact.unflatten(2, (-1, 64)).unflatten(4, (-1, 64)).transpose(3, 4).reshape(-1, 64, 64)
    sums = (
        parts.reshape(-1, 4, 2, 8, 8, 4, 2)
        .permute(0, 4, 1, 3, 5, 2, 6)
        .reshape(-1, 256)
        .contiguous()
    )
    with poisoned_outputs():
        grad_q = room((batch, heads, num_queries, head_dim), transposed)
        one_pass.hopper_bwd_convert_kernel[num_tiles * 2, heads, batch](
            sums,
            grad_q,
            *grad_q.stride()[:3],
            num_queries,
            num_tiles,
            0.3,
            D=head_dim,
            BLOCK_Q=block_q,
        )
    torch.testing.assert_close(grad_q, (exact[:, :, :num_queries] * 0.3).half(), rtol=0, atol=0)


@pytest.mark.parametrize(
    "case",
    [
        Case((1, 2, 2, 50, 40, 16), causal=True),
        Case((1, 2, 1, 30, 60, 72), window=(20, 5)),
        Case((1, 1, 1, 40, 40, 33), precision="bf16x6"),
    ],
    ids=str,
)
@runs_interpreted
def test_few_programs_are_launched_at_once(case):
    """dK/dV and dQ, with the same bits as by two launches."""
    tensors, whole = draw(case, "cpu"), launches.Launch.__call__
    results, launched = [], []

    def noted(launch, *arguments):
        launched[-1].append(launch.kernel)
        whole(launch, *arguments)

    for most in (choice.INTERPRETED_PROGRAMS, 0):
        forget_plans()
        launched.append([])
        with (
            mock.patch.object(choice, "INTERPRETED_PROGRAMS", most),
            mock.patch.object(launches.Launch, "__call__", noted),
        ):
            results.append(ours(case, "triton", tensors))
    forget_plans()
    apart = [
        triton_kernels.flash_attention_bwd_dkdv_kernel,
        triton_kernels.flash_attention_bwd_dq_kernel,
    ]
    assert (
        launched[0][-1:] == [triton_kernels.flash_attention_bwd_kernel]
        and launched[1][-2:] == apart
    )
    assert all(torch.equal(results[0][name], results[1][name]) for name in ("dq", "dk", "dv"))


VIEWS = {
    "dense": ((2, 3, 5, 64), (2, 3, 9, 64), lambda x: x),
    "heads inside, grouped": ((2, 5, 4, 33), (2, 9, 2, 33), lambda x: x.transpose(1, 2)),
    "columns of a packed batch": ((7, 2, 80), (11, 2, 80), lambda x: x[:, :, 3:]),
    "expanded": ((1, 1, 40, 16), (1, 1, 20, 16), lambda x: x.expand(2, 3, *x.shape[2:])),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("precision", ["bf16x6", "bf16x3"])
@runs_interpreted
def test_slices_are_the_whole(view, precision):
    """Of 8 bits each: three to the bit, two to 16 bits."""
    query_shape, key_shape, viewed = VIEWS[view]
    seed = torch.Generator().manual_seed(0)

    def drawn(shape):
        powers = torch.exp2(torch.randint(-40, 40, shape, generator=seed).float())
        return viewed(torch.randn(shape, generator=seed) * powers)

    tensors = [drawn(shape) for shape in (query_shape, key_shape, key_shape, query_shape)]
    packed = len(query_shape) == 3
    for count in (3, 4):
        cut = launches._slices(tuple(map(shapes.layout_of, tensors[:count])), precision, packed)
        with poisoned_outputs():
            slices = cut(*tensors[:count], *(None,) * (4 - count))
        assert slices[count:] == (None,) * (4 - count)
        for x, room, layout in zip(tensors, slices, cut.layouts, strict=False):
            row = layout.strides[2]
            of_row = room.as_strided((*layout.shape[:3], row), layout.strides)
            of_row = of_row.unflatten(-1, (triton_kernels.BF16_SLICES[precision], -1))[
                ..., : x.shape[-1]
            ]
            assert torch.equal(of_row.bfloat16().float(), of_row), "a slice does not fit in bf16"
            whole = (x.transpose(0, 1).unsqueeze(0) if packed else x).double()
            missing = (of_row.double().sum(-2) - whole).abs()
            assert torch.all(missing <= (0 if precision == "bf16x6" else 2.0**-16) * whole.abs())


@pytest.mark.parametrize("impl", FUNCTIONS)
@runs_interpreted
def test_it_compiles_into_a_full_graph(impl):
    """Which gives what eager gives, forward and backward."""
    q, k, v = (
        torch.randn((1, 2, 20, 8), generator=torch.Generator().manual_seed(i)) for i in range(3)
    )
    cu_seqlens = cumulative((12, 8))

    def model(q, k, v):
        dense = flash_attention(q * 2, k, v, causal=True, impl=impl)
        packing = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens}
        rows = [x[0].transpose(0, 1) for x in (dense, k, v)]
        return flash_attention(*rows, window=(5, -1), **packing, impl=impl).square().sum()

    results = []
    for function in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        loss = function(*leaves)
        results.append((loss, *torch.autograd.grad(loss, leaves)))
    for x, y in zip(*results, strict=True):
        torch.testing.assert_close(x, y)


def test_a_transform_of_functions_gives_the_gradients_of_autograd():
    q, k, v = (torch.randn(1, 2, 8, 4) for _ in range(3))

    def summed(q, k, v):
        return flash_attention(q, k, v, causal=True).square().sum()

    transformed = torch.func.grad(summed, argnums=(0, 1, 2))(q, k, v)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    for x, y in zip(transformed, torch.autograd.grad(summed(*leaves), leaves), strict=True):
        assert torch.equal(x, y)


def test_one_input_that_needs_a_gradient_makes_a_graph_and_none_makes_none():
    tensors = [torch.randn(1, 2, 8, 4) for _ in range(3)]
    assert not flash_attention(*tensors).requires_grad
    for index in range(3):
        leaves = [x.clone().requires_grad_(number == index) for number, x in enumerate(tensors)]
        with torch.no_grad():
            assert not flash_attention(*leaves).requires_grad
        flash_attention(*leaves).sum().backward()
        assert [leaf.grad is not None for leaf in leaves] == [
            number == index for number in range(3)
        ]


def test_under_autocast_it_runs_in_the_autocast_dtype():
    q, k, v = (torch.randn(1, 2, 8, 4).requires_grad_() for _ in range(3))
    with torch.autocast("cpu", torch.bfloat16):
        # What a rotation in fp32 leaves behind: q and k in fp32, v in bf16.
        out = flash_attention(q, k, v.bfloat16(), causal=True)
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert q.grad.dtype == torch.float32 and torch.isfinite(q.grad).all()
    assert torch.equal(out, flash_attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), causal=True))


def test_a_window_as_a_number_reaches_to_both_sides():
    q, k, v = (torch.randn(1, 20, 4) for _ in range(3))
    assert torch.equal(flash_attention(q, k, v, window=3), flash_attention(q, k, v, window=(3, 3)))
    assert torch.equal(
        flash_attention(q, k, v, window=3, causal=True),
        flash_attention(q, k, v, window=(3, 0), causal=False),
    )


def test_the_output_keeps_heads_inside_the_rows_where_the_queries_have_them_so():
    x = torch.randn(2, 20, 3, 8).transpose(1, 2)
    assert flash_attention(x, x, x).transpose(1, 2).is_contiguous()


def test_auto_names_what_it_runs():
    assert (
        resolve_impl(torch.zeros(1, 2, 3)) == resolve_impl(torch.zeros(1, 2, 3), "tiled") == "tiled"
    )


UNPADDED = {72: (64, 16), 80: (64, 16), 96: (64, 32), 64: (64, 0), 128: (128, 0)}


@pytest.mark.parametrize("head_dim", range(1, 257))
def test_every_head_dimension_is_cut_into_tiles_that_hold_it(head_dim):
    block, tail = split_head_dim(head_dim)
    assert block + tail >= head_dim and block >= 16 and (tail == 0 or 16 <= tail < block)
    assert block & (block - 1) == 0 and tail & (tail - 1) == 0
    assert (block, tail) == UNPADDED.get(head_dim, (block, tail))
    # Never more than the next power of two.
    assert block + tail <= max(16, 2 ** math.ceil(math.log2(head_dim)))
    for dtype, causal, capability in itertools.product(
        choice.TRITON_DTYPES, (False, True), (80, 90)
    ):
        assert (
            select_config(head_dim, dtype, causal, capability).forward.block_q <= STATISTICS_PADDING
        )


Q, PACKED = (2, 4, 6, 8), (10, 2, 8)


def zeros(*shape, **factory):
    return torch.zeros(shape, **factory)


def cu(*values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype)


def call(q=None, k=None, v=None, shape=Q, **options):
    return flash_attention(*(zeros(*shape) if x is None else x for x in (q, k, v)), **options)


def call_packed(cu_q, cu_k=None, **options):
    return call(
        shape=PACKED, cu_seqlens_q=cu_q, cu_seqlens_k=cu_q if cu_k is None else cu_k, **options
    )


def call_gluon(dim=64, **options):
    return call(*[zeros(2, 4, 6, dim).half()] * 3, impl="gluon", **options)


BAD_TYPES = {
    "q must be a tensor; got list": lambda: call(q=[1.0]),
    "scale must be None or a positive finite number; got Tensor": lambda: call(
        scale=torch.ones(())
    ),
    "scale must be None or a positive finite number; got str": lambda: call(scale="0.5"),
    "cu_seqlens_q must be an int32 or int64 tensor; got list": lambda: call_packed([0, 10]),
    "cu_seqlens_q must be an int32 or int64 tensor; got ": lambda: call_packed(
        cu(0, 10, dtype=torch.float32)
    ),
    "max_seqlen_k must be None or an int": lambda: call_packed(cu(0, 10), max_seqlen_k=10.0),
}
BAD_VALUES = {
    "q must be (batch, length, d) or": lambda: call(shape=(6, 8)),
    "k must have as many dimensions as q, 4": lambda: call(k=zeros(4, 6, 8)),
    "q must be of dtype torch.float32": lambda: call(q=zeros(*Q, dtype=int)),
    "v must have the dtype of q, torch.float32; got torch.float16": lambda: call(
        v=zeros(*Q).half()
    ),
    "k must be on the device of q, cpu; got meta": lambda: call(k=zeros(*Q, device="meta")),
    "k must have the head dimension of q, 8; got 9": lambda: call(k=zeros(2, 4, 6, 9)),
    "head dimension of q must be 1 to 256; got 257": lambda: call(shape=(1, 1, 2, 257)),
    "head dimension of q must be 1 to 256; got 0": lambda: call(shape=(1, 1, 2, 0)),
    "v must have the shape of k": lambda: call(v=zeros(2, 4, 7, 8)),
    "k must have the batch size of q, 2": lambda: call(k=zeros(3, 4, 6, 8), v=zeros(3, 4, 6, 8)),
    "heads of k must divide those of q, 4": lambda: call(k=zeros(2, 3, 6, 8), v=zeros(2, 3, 6, 8)),
    "q must hold at least one batch": lambda: call(shape=(0, 4, 6, 8)),
    "k must hold at least one batch": lambda: call(k=zeros(2, 4, 0, 8), v=zeros(2, 4, 0, 8)),
    "scale must be None or a positive finite number; got 0.0": lambda: call(scale=0.0),
    "scale must be None or a positive finite number; got nan": lambda: call(scale=math.nan),
    "window must be None, a number of keys to each side, or (left, right) with": lambda: call(
        window=(1, 2, 3)
    ),
    "window must be None, a number of keys to each side": lambda: call(window=-2),
    "impl must be one of auto, gluon, triton, tiled; got 'cuda'": lambda: call(impl="cuda"),
    "impl='triton' takes q, k and v on a CUDA device; got cpu": lambda: call(impl="triton"),
    "impl='gluon' takes q, k and v of dtype torch.bfloat16": lambda: call(impl="gluon"),
    "takes head dimensions 64, 72, 80, 96, 128; got 8": lambda: call_gluon(8),
    "on a Hopper GPU; got cpu": call_gluon,
    "impl='gluon' takes no window": lambda: call_gluon(window=2),
    "precision must be one of auto, ieee, tf32x3, bf16x6, bf16x3, tf32; got": lambda: call(
        precision="tf64"
    ),
    "max_seqlen_q must be None without cu_seqlens_q": lambda: call(max_seqlen_q=6),
    "cu_seqlens_q must be given too": lambda: call(shape=PACKED, cu_seqlens_k=cu(0, 10)),
    "q must be (total, heads, d)": lambda: call(cu_seqlens_q=cu(0, 2)),
    "cu_seqlens_q must be of shape": lambda: call_packed(cu(0)),
    "cu_seqlens_q must start at 0; got 1": lambda: call_packed(cu(1, 10)),
    "must be increasing; got 7 and then 4": lambda: call_packed(cu(0, 7, 4, 10)),
    "must be increasing; got 7 and then 7": lambda: call_packed(cu(0, 7, 7, 10)),
    "must end at the number of rows of q, 10; got 11": lambda: call_packed(cu(0, 11)),
    "must end at the number of rows of k": lambda: call_packed(cu(0, 10), cu(0, 12)),
    "must end at the number of rows of q, 10; got 9": lambda: call_packed(cu(0, 9)),
    "cu_seqlens_k must have the shape of": lambda: call_packed(cu(0, 10), cu(0, 5, 10)),
    "max_seqlen_q must be at least": lambda: call_packed(cu(0, 7, 10), max_seqlen_q=6),
    "on a CUDA device; got cpu": lambda: FlashAttention.apply(*[zeros(2, 6, 8)] * 3),
    "must be 1 to 256": lambda: FlashAttention.apply(*[zeros(2, 6, 300)] * 3),
    f"kernels must be None or one of {str(choice.GLUON_BACKWARDS)[1:-1]}; got 'single'": lambda: (
        fa.plan_of(*[zeros(*Q)] * 3, impl="gluon").backward(
            *[zeros(*Q)] * 5, zeros(*Q[:3]), kernels="single"
        )
    ),
    "q must be (batch, n_queries, d)": lambda: TiledFlashAttention.apply(
        *[zeros(2, 6, 8)] * 2, zeros(2, 5, 8)
    ),
}


@pytest.mark.parametrize(
    ("message", "wrong"), [*BAD_TYPES.items(), *BAD_VALUES.items()], ids=[*BAD_TYPES, *BAD_VALUES]
)
def test_bad_input_is_refused_by_name(wrong, message):
    with pytest.raises(TypeError if message in BAD_TYPES else ValueError, match=re.escape(message)):
        wrong()


def test_cumulative_lengths_changed_in_place_are_read_again():
    cu_seqlens = cu(0, 4, 10)
    call_packed(cu_seqlens)
    cu_seqlens[1] = 12
    with pytest.raises(ValueError, match="must be increasing; got 12 and then 10"):
        call_packed(cu_seqlens)


BOTH = (False, True)
EFFICIENT_DIMS = (16, 64, 72, 96, 128, 256)
LONG_CASES = [
    *CASES,
    Case((1, 2, 2, 1023, 1024, 64), causal=True),
    *(
        Case((2, 2, 2, length, length, dim), causal=causal)
        for dim in (16, 32, 40, 59, 64, 72, 80, 96, 111, 128, 192, 256)
        for length, causal in itertools.product((256, 384), BOTH)
    ),
    Case((1, 4, 2, 500, 777, 128), causal=True, window=(200, -1)),
    # Rows off every 16-byte boundary, of a head dimension that would otherwise be cut in two.
    *(
        Case((1, 2, 1, 237, 394, dim), layout=x)
        for dim in (33, 72)
        for x in ("contiguous", "columns", "expanded")
    ),
    # "auto", of all others here, is several products for one of fp32 up to a head dimension of 128.
    *(
        Case((1, 4, 2, 333, 500, dim), causal=causal, precision=precision)
        for precision in ("ieee", "bf16x6", "bf16x3", "tf32")
        for dim, causal in itertools.product(EFFICIENT_DIMS, BOTH)
    ),
    *(
        Case((1, heads, 2, 333, 900, dim), causal=causal, num_splits=num_splits)
        for dim in EFFICIENT_DIMS
        for heads, causal, num_splits in ((2, True, 3), (4, False, 7))
    ),
    *(
        Case((1, 1, 1, length, length, 32), causal=causal)
        for length in (1000, 4096)
        for causal in BOTH
    ),
]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("case", LONG_CASES, ids=str)
def test_compiled_kernels_are_within_the_budget(case, dtype):
    check(measure(dataclasses.replace(case, dtype=dtype), "triton", "cuda"))


on_hopper = pytest.mark.gpu(capability=(9, 0))


def backwards_of(case: Case) -> tuple[str, ...]:
    """Returns the Gluon backwards that take a case."""
    _, heads, key_heads, *_, dim = case.shape
    single = dim in choice.SINGLE_PASS_HEAD_DIMS and heads == key_heads
    return ("two passes", "one pass") if single else ("two passes",)


HOPPER_CASES = [
    *(
        Case((2, 2, 2, num_queries, num_keys, dim), causal=causal)
        for dim in choice.GLUON_HEAD_DIMS
        for num_queries, num_keys in (
            (1, 1),
            (64, 64),
            (65, 65),
            (128, 384),
            (300, 127),
            (127, 300),
            (1, 257),
            (640, 64),
        )
        for causal in BOTH
    ),
    Case((2, 6, 2, 300, 427, 64), causal=True),
    Case((1, 4, 1, 200, 200, 128)),
    *(Case((2, 4, 2, 257, 257, 64), causal=True, layout=layout) for layout in LAYOUTS[1:]),
    Case((1, 2, 2, 400, 400, 128), causal=True, scale=1.5),
    # The tiles of long sequences, few enough that the hardware gives each to the next free
    # multiprocessor.
    *(
        Case((1, heads, heads, 2100, 2100, dim), causal=True)
        for dim in choice.GLUON_HEAD_DIMS
        for heads in (1, 11)
    ),
    *(
        Case((1, 3, 1, 2048, 2048, dim), causal=causal)
        for dim in choice.GLUON_HEAD_DIMS
        for causal in BOTH
    ),
    # So few tiles of queries that their keys are split, also where some splits have none that a
    # query sees.
    *(
        Case((batch, 2, 1, num_queries, num_keys, dim), causal=causal)
        for dim in choice.GLUON_HEAD_DIMS
        for batch, num_queries, num_keys in (
            (1, 1, 3000),
            (2, 257, 1111),
            (1, 1500, 700),
            (1, 1024, 1024),
        )
        for causal in BOTH
    ),
    # Enough tiles that the programs draw theirs from a counter.
    *(Case((1, 64, 8, 1300, 2100, dim), causal=True) for dim in choice.GLUON_HEAD_DIMS),
]


@on_hopper
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    ("case", "kernels"), [(case, x) for case in HOPPER_CASES for x in backwards_of(case)], ids=str
)
def test_hopper_kernels_are_within_the_budget(case, dtype, kernels):
    check(measure(dataclasses.replace(case, dtype=dtype, kernels=kernels), "gluon", "cuda"))


@on_hopper
@pytest.mark.parametrize("dim", choice.GLUON_HEAD_DIMS)
def test_splits_drawn_from_a_counter_are_within_the_budget(dim, monkeypatch, fresh_plans):
    monkeypatch.setattr(forward, "DYNAMIC_FROM", 0)
    check(measure(Case((1, 4, 1, 2048, 2048, dim), causal=True, dtype="bfloat16"), "gluon", "cuda"))


@on_hopper
@pytest.mark.parametrize("shape", [(1, 5, 5), (3, 6, 2)], ids=str)
@pytest.mark.parametrize("fitting", [1, 2, 4])
def test_heads_in_sections_are_within_the_budget(shape, fitting, monkeypatch, fresh_plans):
    num_keys, dim = 1300, 128
    monkeypatch.setattr(forward, "DYNAMIC_FROM", 0)
    monkeypatch.setattr(forward, "SECTIONS_FROM", 0)
    monkeypatch.setattr(forward, "SECTION_BYTES", fitting * 4 * num_keys * dim)
    check(
        measure(Case((*shape, 1200, num_keys, dim), causal=True, dtype="bfloat16"), "gluon", "cuda")
    )


@pytest.mark.parametrize(
    ("heads", "key_heads", "num_keys", "expected"),
    [
        (64, 64, 4096, 64),  # two programs share the keys of a head
        (128, 16, 2048, 128),  # and here eight heads do, as they are grouped
        (128, 128, 256, 128),  # all fit
        (256, 256, 1024, 32),  # 48 fit, and 32 is the largest divisor
        (512, 128, 2048, 64),  # 24 key heads fit, with 4 heads each
        (101, 101, 4096, 12),  # a prime number has no divisor
        (128, 128, 131072, 1),  # not even one fits
    ],
)
def test_sections_are_as_many_heads_as_fit(heads, key_heads, num_keys, expected):
    assert forward._section(heads, key_heads, 4 * num_keys * 128, programs=132) == expected


@on_hopper
@pytest.mark.timeout(3600)  # most examples compile kernels of their own
@settings(random_shapes, max_examples=2000)
@given(case=cases(700, ("float16", "bfloat16"), choice.GLUON_HEAD_DIMS), which=st.integers(0, 2))
def test_hopper_kernels_on_random_shapes(case, which):
    backwards = backwards_of(case)
    kernels = backwards[which % len(backwards)]
    check(measure(dataclasses.replace(case, window=None, kernels=kernels), "gluon", "cuda"))


@pytest.mark.gpu
@pytest.mark.timeout(3600)  # most examples compile kernels of their own
@settings(random_shapes, max_examples=2000)
@given(case=cases(700, ("float32", "float16", "bfloat16"), (16, 33, 64, 72, 80, 128, 200)))
def test_compiled_kernels_on_random_shapes(case):
    check(measure(case, "triton", "cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("case", "impl"),
    [
        # Split-K, and many tiles.
        *(
            (Case((2, heads, heads, 2100, 2100, dim), causal=causal, dtype="bfloat16"), impl)
            for heads, dim in itertools.product((1, 32), (16, 64, 72, 128))
            for causal, impl in itertools.product(BOTH, ("auto", "triton"))
        ),
        # Slices of two widths, one launch of each dtype, programs that stay.
        (Case((1, 2, 2, 2100, 2100, 64), causal=True), "auto"),
        (Case((1, 2, 2, 2100, 2100, 128)), "auto"),
        (Case((1, 4, 2, 300, 300, 72), causal=True, dtype="bfloat16"), "auto"),
        (Case((1, 4, 2, 200, 250, 64)), "auto"),
        (Case((64, 8, 8, 500, 500, 64), dtype="bfloat16"), "auto"),
    ],
    ids=str,
)
def test_a_thousand_forwards_and_250_backwards_are_bit_equal(case, impl):
    q, k, v, grad_out = draw(case, "cuda")
    options = mask_of(case) | {"impl": resolve_impl(q, impl)}
    if (
        case.shape[1] == 32
        and case.shape[-1] in choice.SINGLE_PASS_HEAD_DIMS
        and options["impl"] == "gluon"
    ):
        assert fa.resolve_backward(q, k, "gluon", causal=case.causal) == "one pass"
    plan = fa.plan_of(q, k, v, **options)
    out, lse = plan.forward(q, k, v)
    for _ in range(1000):
        again = plan.forward(q, k, v)
        assert torch.equal(out, again[0]) and torch.equal(lse, again[1])
    grads = plan.backward(grad_out, q, k, v, out, lse)
    for _ in range(250):
        again = plan.backward(grad_out, q, k, v, out, lse)
        assert all(torch.equal(x, y) for x, y in zip(grads, again, strict=True))
