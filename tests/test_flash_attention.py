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
from triton.backends.nvidia import driver

from labkit.kernels import flash_attention as fa
from labkit.kernels import launch as kernel_launch
from labkit.kernels.flash_attention import (
    FlashAttention,
    TiledFlashAttention,
    flash_attention,
    op,
    resolve_impl,
    tiles,
)
from labkit.kernels.flash_attention import plan as plans
from labkit.kernels.flash_attention.hopper import forward, one_pass
from labkit.kernels.flash_attention.hopper import tiles as hopper_tiles
from labkit.kernels.flash_attention.tiled import tiled_attention_backward, tiled_attention_forward
from labkit.kernels.flash_attention.triton import STATISTICS_PADDING, split_head_dim
from labkit.kernels.reference import _scores, attention_reference, repeat_heads
from labkit.numerics import judge

FUNCTIONS = {"triton": FlashAttention, "tiled": TiledFlashAttention}
NAMES = ("out", "lse", "dq", "dk", "dv")
BOTH = (False, True)


@dataclasses.dataclass(frozen=True)
class Case:
    """One problem: (batch, query heads, key heads, queries, keys, head dimension) and how it is
    masked and laid out; `num_splits` is in place of what would be chosen.
    """

    shape: tuple[int, int, int, int, int, int]
    causal: bool = False
    dtype: str = "float32"
    window: tuple[int, int] | None = None
    scale: float | None = None
    layout: str = "contiguous"
    precision: str = "auto"
    num_splits: int | None = None
    seed: int = 0

    def __str__(self):
        default = Case(self.shape)
        changed = {k: v for k, v in vars(self).items() if v != getattr(default, k)}
        return "x".join(map(str, self.shape)) + "".join(f"-{k}={v}" for k, v in changed.items())


LAYOUTS = ("contiguous", "transposed", "sliced", "fused", "columns", "off a boundary", "expanded")


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
        "off a boundary": ((x.numel() + 1,), lambda room: room[1:].view(x.shape)),
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
    """While it is open, what a plan and torch.empty allocate is NaN between canaries; at the end
    the canaries must be alive.
    """
    canary, margin, buffers, empty = -12345.0, 64, [], torch.empty

    def poisoned(size, strides=None, *, dtype=torch.float32, device=None):
        shape = (size,) if isinstance(size, int) else size
        if not dtype.is_floating_point:
            return empty(shape, dtype=dtype, device=device)
        buffer = empty(math.prod(shape) + 2 * margin, dtype=dtype, device=device).fill_(canary)
        buffers.append(buffer)
        inside = buffer[margin:-margin].fill_(math.nan)
        return inside.view(shape) if strides is None else inside.as_strided(shape, strides)

    def poisoned_room(x: plans.Layout):
        return poisoned(x.shape, x.strides, dtype=x.dtype, device=x.device)

    with (
        mock.patch.object(torch, "empty", poisoned),
        mock.patch.object(plans.Layout, "empty", poisoned_room),
    ):
        yield
    assert buffers, "nothing was allocated where it is poisoned: that tests nothing"
    for buffer in buffers:
        assert (buffer[:margin] == canary).all(), "written before an output"
        assert (buffer[-margin:] == canary).all(), "written behind an output"


def mask_of(case: Case) -> dict:
    left, right = op._check_window(case.window, case.causal)
    return {"scale": case.scale or 1 / math.sqrt(case.shape[-1]), "left": left, "right": right}


def eager(case: Case, dtype: torch.dtype, tensors: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """Returns what attention_reference gives in a dtype: output, log-sum-exp and gradients, all in
    fp64.
    """
    *leaves, grad_out = (x.to(dtype).contiguous() for x in tensors)
    leaves = [x.requires_grad_() for x in leaves]
    q, k, v = leaves
    mask = {"causal": case.causal, "window": case.window, "scale": case.scale}
    out = attention_reference(q, k, v, **mask)
    grads = torch.autograd.grad(out, leaves, grad_out)
    # −∞ for a query that sees no key.
    lse = torch.logsumexp(_scores(q, repeat_heads(k, q), **mask)[0], dim=-1)
    return {name: x.detach().double() for name, x in zip(NAMES, (out, lse, *grads), strict=True)}


@contextlib.contextmanager
def chosen(case: Case):
    """Takes a case's number of splits while it is open, in plans of its own."""
    forget_plans()
    splits = contextlib.nullcontext()
    if case.num_splits is not None:
        splits = mock.patch.object(plans, "forward_splits", lambda *_: case.num_splits)
    with splits:
        yield
    forget_plans()


def ours(case: Case, impl: str, tensors: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """Returns what the kernels give, from poisoned outputs."""
    q, k, v, grad_out = tensors
    mask = mask_of(case)
    if impl == "tiled":
        # Tiles smaller than the shipped ones, so that short lengths have several.
        mask |= {"tile": 16}
        out, lse = tiled_attention_forward(q, k, v, **mask)
        grads = tiled_attention_backward(grad_out, q, k, v, out, lse, **mask)
    else:
        with poisoned_outputs(), chosen(case):
            plan = fa.plan_of(q, k, v, precision=case.precision, impl=impl, **mask)
            out, lse = plan.forward(q, k, v)
            grads = plan.backward(grad_out, q, k, v, out, lse)
    for x, like in zip((out, *grads), (q, q, k, v), strict=True):
        assert x.dtype == like.dtype and x.shape == like.shape
    return {name: x.double() for name, x in zip(NAMES, (out, lse, *grads), strict=True)}


def largest(x: Tensor) -> float:
    return x.abs().max().item() if x.numel() else 0.0


def measure(case: Case, impl: str, device: str = "cpu") -> dict[str, tuple[float, float]]:
    """Returns, by quantity, our largest error against fp64 and the budget it has.

    Outputs: twice, gradients: three times the error of eager attention in the same dtype plus a
    band; the log-sum-exp: 1e-3. The band is one rounding of the
    largest value, and what fp32 arithmetic inside cannot do without: S is off by u·scale·|q|·|k|,
    which is P's relative error (eager attention has it too, but over a few rows its luck is no
    yardstick). Of the gradients also: P is recomputed as exp(S − L), off by u·|L|; ∂P − D is a
    difference of values that may cancel (a row with one key has nothing else), off by u·|∂P|; and D
    is taken from the output as stored, rounded to its dtype, independently in each of its d terms.
    """
    tensors = draw(case, device)
    exact = eager(case, torch.float64, tensors)
    same_dtype = eager(case, getattr(torch, case.dtype), tensors)
    result = ours(case, impl, tensors)
    empty = torch.isinf(exact["lse"])
    assert torch.equal(empty, torch.isneginf(result["lse"])), (
        "−inf for another set of rows than those without a key"
    )
    assert not result["out"][empty].any() and not result["dq"][empty].any(), (
        "a row without a key is not zero"
    )
    measured = {"lse": (largest((exact["lse"] - result["lse"])[~empty]), 1e-3)}
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


def check(measured: dict[str, tuple[float, float]], *where: str) -> None:
    over = {name: pair for name, pair in measured.items() if not pair[0] <= pair[1]}
    assert not over, f"{where} (error, budget) over budget: {over}"


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
    Case((1, 1, 1, 1, 80, 64), causal=True),
    Case((1, 2, 1, 64, 64, 72), causal=True),
    Case((1, 1, 1, 35, 34, 111)),
    Case((1, 1, 1, 18, 17, 256), causal=True),
    # More queries than keys: the first see none.
    Case((1, 4, 2, 65, 20, 16), causal=True),
    Case((1, 2, 1, 70, 90, 16), window=(7, 3)),
    Case((1, 1, 1, 90, 50, 16), window=(0, 0)),
    Case((1, 1, 1, 64, 96, 32), causal=True, window=(33, -1), scale=1.5),
    *(Case((2, 2, 2, 35, 37, 24), causal=True, layout=layout) for layout in LAYOUTS[1:]),
]
SLICES_CASES = [
    Case((1, 2, 1, 65, 80, 16), causal=True, precision="bf16x6"),
    Case((1, 2, 2, 40, 47, 72), precision="bf16x6", num_splits=2, layout="expanded"),
]
# Loops shared among several programs: with empty shares, grouped heads, rows that see no key.
SPLIT_CASES = [
    Case((1, 2, 1, 50, 83, 24), causal=True, num_splits=3),
    Case((1, 2, 1, 65, 20, 59), causal=True, num_splits=5, layout="transposed"),
]

# No bf16 here: the interpreter's bf16 product is wrong, the compiled one is tested on a GPU.
INTERPRETED = [
    *(dataclasses.replace(case, dtype="float16") for case in (*CASES, *SPLIT_CASES)),
    *(case for case in CASES if case.shape[:3] == (1, 1, 1)),
    *SLICES_CASES,
]


@pytest.mark.parametrize("case", INTERPRETED, ids=str)
def test_interpreted_kernels_are_within_the_budget(case, interpreted):
    check(interpreted(measure, case, "triton"))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_tiled_attention_is_within_the_budget(case):
    check(measure(dataclasses.replace(case, dtype="bfloat16"), "tiled"))
    # In fp64 it is the oracle.
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
    return st.builds(
        Case,
        shapes,
        causal=st.booleans(),
        dtype=st.sampled_from(dtypes),
        window=st.none() | st.tuples(edges, edges),
        scale=st.none() | st.floats(0.01, 2.0),
        layout=st.sampled_from(LAYOUTS),
        num_splits=st.none() | st.integers(1, 4),
        seed=st.integers(0, 2**31 - 1),
    )


random_shapes = settings(
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    database=None,
)


@settings(random_shapes, max_examples=100 if ALL_TESTS else 8)
@given(case=cases(40, ("float32", "float16")))
def test_interpreted_kernels_on_random_shapes(interpreted, case):
    check(interpreted(measure, case, "triton"))


@settings(random_shapes, max_examples=100 if ALL_TESTS else 30)
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
@pytest.mark.parametrize("axis", range(4))
@runs_interpreted
def test_strides_beyond_two_to_the_31_give_the_same_bits(axis, where):
    shape = (1 + (axis == 0), 1 + (axis == 1), 68, 16)
    device = "cuda" if where == "compiled" else "cpu"
    dense = torch.randn(shape, generator=torch.Generator().manual_seed(0)).half().to(device)
    strides = list(dense.stride())
    strides[axis] = 2**31 // max(1, shape[axis] - 1) + 64
    # The memory in between is never touched, so that a CPU does not have to hold it.
    num_elements = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1
    view = torch.empty(num_elements, dtype=torch.float16, device=device).as_strided(shape, strides)
    view.copy_(dense)
    case = Case((*shape[:2], *shape[1:3], *shape[2:]), causal=True)
    results = [ours(case, "triton", (x,) * 4) for x in (view, dense)]
    for name in NAMES:
        assert torch.equal(results[0][name], results[1][name]), name


@pytest.mark.parametrize("impl", FUNCTIONS)
@runs_interpreted
def test_the_functions_save_one_log_sum_exp(impl):
    case = Case((2, 3, 3, 33, 47, 8), causal=True)
    tensors = draw(case, "cpu")
    exact = eager(case, torch.float64, tensors)
    leaves = [x.requires_grad_() for x in tensors[:3]]
    out = FUNCTIONS[impl].apply(*leaves, True)
    (lse,) = [x for x in out.grad_fn.saved_tensors if x.shape == (2, 3, 33)]
    grads = torch.autograd.grad(out, leaves, tensors[3])
    for x, name in zip((out, lse, *grads), NAMES, strict=True):
        torch.testing.assert_close(x.double(), exact[name], rtol=1e-5, atol=1e-5)


# Some are tiles of the interpreted kernels, full.
LENGTHS_Q = (17, 1, 32, 46, 33)
LENGTHS_K = (30, 5, 32, 64, 12)


def cumulative(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def one_by_one(
    dtype: torch.dtype, tensors: tuple, cu_q: Tensor, cu_k: Tensor, **mask
) -> list[Tensor]:
    """Returns the output and the gradients of a packed batch by the formula in `dtype`, sequence by
    sequence; zeros for rows of none.
    """
    *packed, grad_out = (x.detach().to(dtype).requires_grad_() for x in tensors)
    out = torch.zeros_like(packed[0])
    pairs = (itertools.pairwise(cu_seqlens.tolist()) for cu_seqlens in (cu_q, cu_k))
    for rows_q, rows_k in zip(*pairs, strict=True):
        sequence = (
            x[slice(*rows)].transpose(0, 1)[None]
            for x, rows in zip(packed, (rows_q, rows_k, rows_k), strict=True)
        )
        out[slice(*rows_q)] = attention_reference(*sequence, **mask)[0].transpose(0, 1)
    return [out, *torch.autograd.grad(out, packed, grad_out)]


def check_packed(
    lengths_q, lengths_k, heads, head_dim, dtype, *, device="cpu", kernels=None, **mask
) -> None:
    """Asserts that a packed batch is its sequences one by one, forward and backward."""
    generator = torch.Generator().manual_seed(0)
    of_queries, of_keys = (sum(lengths_q), heads[0], head_dim), (sum(lengths_k), heads[1], head_dim)
    *inputs, grad_out = tensors = [
        torch.randn(shape, generator=generator).to(device, dtype).requires_grad_()
        for shape in (of_queries, of_keys, of_keys, of_queries)
    ]
    cu_seqlens = [cumulative(lengths).to(device) for lengths in (lengths_q, lengths_k)]
    packing = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), cu_seqlens, strict=True))
    kernels = kernels or {}
    # The tiled one allocates zeros.
    poison = contextlib.nullcontext if kernels.get("impl") == "tiled" else poisoned_outputs
    with poison():
        out = flash_attention(*inputs, **packing, **mask, **kernels)
    found = (out, *torch.autograd.grad(out, inputs, grad_out))
    exact, eager = (
        one_by_one(each, tensors, *cu_seqlens, **mask) for each in (torch.float64, dtype)
    )
    for name, *values in zip(("out", "dq", "dk", "dv"), found, exact, eager, strict=True):
        value, *expected = (x.detach().transpose(0, 1).double() for x in values)
        judge(name, value, *expected, dtype=dtype, num_terms=max(*lengths_q, *lengths_k))


@pytest.mark.parametrize(
    ("causal", "window"), [(False, None), (True, (6, -1)), *more((True, None), (False, (3, 4)))]
)
@pytest.mark.parametrize("impl", FUNCTIONS)
@runs_interpreted
def test_a_packed_batch_is_its_sequences_one_by_one(impl, causal, window):
    mask = {"causal": causal, "window": window}
    kernels = {"impl": impl, "precision": "bf16x6" if causal else "auto"}
    check_packed(LENGTHS_Q, LENGTHS_K, (2, 1), 24, torch.float32, kernels=kernels, **mask)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 72, 128])
def test_a_packed_batch_of_long_sequences_is_within_the_budget(head_dim):
    lengths = (700, 1, 64, 256, 33, 1500)
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    for dtype, causal in itertools.product(dtypes, BOTH):
        check_packed(lengths, lengths, (2, 2), head_dim, dtype, device="cuda", causal=causal)


@pytest.mark.parametrize("impl", FUNCTIONS)
def test_the_operators_pass_opcheck(impl, interpreted):
    interpreted(check_operators, impl)


def check_operators(impl: str) -> None:
    options = (0.3, -1, 0, "ieee", impl)
    # How an operator is registered does not depend on its implementation, which is an argument.
    checks = {"test_utils": ("test_schema", "test_faketensor")} if impl == "triton" else {}
    dense = draw(Case((2, 2, 1, 18, 21, 8), layout="transposed"), "cpu")[:3]
    packed = [x[0].transpose(0, 1) for x in dense]
    lengths = cumulative((10, 8)), cumulative((9, 12))
    forward, backward = torch.ops.labkit.flash_attention, torch.ops.labkit.flash_attention_backward
    for tensors, cu_seqlens in ((dense, (None, None)), (packed, lengths)):
        inputs = (*(x.detach() for x in tensors), *cu_seqlens)
        out, lse = forward(*inputs, *options, None, None)
        saved = (*inputs, *options, torch.ones_like(out), out, lse)
        torch.library.opcheck(backward.default, saved, **checks)
        leaves = [x.detach().requires_grad_() for x in tensors]
        arguments = (*leaves, *cu_seqlens, *options, None, 12)
        torch.library.opcheck(forward.default, arguments, **checks, atol=1e-5, rtol=1e-5)


def test_what_is_handed_to_a_launch_for_tiles_is_kept_by_their_address():
    """What the installed Triton makes of tiles and of addresses, without its look-ups."""
    launched, encoded = [], []
    launcher = functools.partial(lambda *arguments: launched.append(arguments))  # not in Python

    def encode(tiles, *_):
        encoded.append(tiles.base.data_ptr())
        return encoded[-1:]

    def compiled(launch):
        run = object.__new__(driver.CudaLauncher)
        # Whatever it is that the installed release knows of a kernel.
        facts = dict.fromkeys(driver.CudaLauncher.__init__.__code__.co_names, 0)
        vars(run).update(facts, launch=launch)
        metadata = types.SimpleNamespace(tensordesc_meta=[{}])
        return types.SimpleNamespace(run=run, function=3, packed_metadata=4, metadata=metadata)

    signature = {0: "tensordesc<fp16[1, 1, 64, 64]>", 1: "constexpr", 2: "*fp32", 3: "i32"}
    x, y, z = (torch.zeros((1, 2, 70, 64), dtype=torch.float16) for _ in range(3))
    tiles = [hopper_tiles.tiles_of(plans.layout_of(x), 64, 0)]
    kernel = types.SimpleNamespace(arg_names=())
    tile_launch = hopper_tiles.TileLaunch(kernel, (5,), tiles, (70,), {}, consumers=2)
    with (
        mock.patch.object(driver, "make_tensordesc_arg", encode),
        mock.patch.object(triton.runtime.driver, "_active", object()),
        mock.patch.object(kernel_launch, "current_stream", lambda: 7),
    ):
        of_tiles = compiled(driver.wrap_handle_tensordesc(launcher, signature, [{}]))
        tile_launch.compiled = of_tiles
        tile_launch.run = kernel_launch.unhooked(of_tiles, (5, 1, 1))
        for tensor, other in ((x, y), (y, z), (x, z)):
            tile_launch(tensor, other)
        kernel_launch.unhooked(compiled(launcher), (5, 1, 1))(x.data_ptr(), None, z.data_ptr(), 70)
    assert encoded == [tensor.data_ptr() for tensor in (x, y)]
    expected = ((x, y), (y, z), (x, z), (x, z))
    for arguments, (tensor, other) in zip(launched, expected, strict=True):
        # Triton 3.9 hands on a kernel's arguments as one.
        last = arguments[-1] if isinstance(arguments[-1], tuple | list) else arguments[-4:]
        facts = (5, 1, 1, 7, 3)
        assert (*arguments[:5], *last) == (*facts, tensor.data_ptr(), None, other.data_ptr(), 70)


@pytest.mark.parametrize("impl", ["triton", "tiled"])
@runs_interpreted
def test_tensors_may_come_back_from_hooks_with_another_layout(impl):
    """As `torch.autograd.graph.save_on_cpu` returns them: dense, whatever they were."""
    tensors = draw(Case((1, 2, 2, 48, 48, 16), layout="transposed"), "cpu")
    q, k, v = (x.requires_grad_() for x in tensors[:3])
    results = []
    for hook in (lambda x: x, Tensor.contiguous):
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, hook):
            out = flash_attention(q, k, v, causal=True, impl=impl)
        results.append(torch.autograd.grad(out.square().sum(), (q, k, v)))
    assert not q.is_contiguous()
    for kept, moved in zip(*results, strict=True):
        torch.testing.assert_close(moved, kept)


def forget_plans() -> None:
    op._PLANS.clear()


def test_what_tma_reads_starts_on_a_boundary():
    """A dense tensor that does not is copied, though `contiguous` would return it as it is."""
    read = []

    def hopper_kernels(part):
        return types.SimpleNamespace(
            plan=lambda *_, **__: (lambda inputs, *_: read.extend(inputs), 1),
        )

    q, k, v, _ = draw(Case((1, 2, 2, 8, 8, 64), dtype="float16"), "cpu")
    with (
        mock.patch.object(plans, "hopper_kernels", hopper_kernels),
        mock.patch.object(op, "resolve_impl", lambda *_, **__: "gluon"),
    ):
        fa.plan_of(off_boundary(q), k, v, impl="gluon").forward(off_boundary(q), k, v)
    forget_plans()
    assert torch.equal(read[0], q) and read[1] is k
    assert [x.data_ptr() % 16 for x in read] == [0, 0, 0]


def test_every_head_dimension_is_cut_into_tiles_that_hold_it():
    for head_dim in range(1, 257):
        block, tail = split_head_dim(head_dim)
        # Never more than the next power of two.
        assert head_dim <= block + tail <= max(16, 2 ** math.ceil(math.log2(head_dim)))
        for capability, packed in itertools.product((80, 90), BOTH):
            shipped = tiles.select_tiles(head_dim, torch.bfloat16, capability, packed=packed)
            assert shipped.forward.block_q <= STATISTICS_PADDING.value


@pytest.mark.parametrize("head_dim", [64, 72, 128])
@runs_interpreted
def test_the_sums_of_the_single_pass_are_put_in_order(head_dim):
    """Scaled, in place, heads inside the rows; they lie as the kernel adds them. Of a tile
    that nobody adds to, zeros.
    """
    batch, heads, num_queries, block_q = 2, 3, 300, one_pass.BLOCK_Q[head_dim]
    num_tiles = -(-num_queries // block_q)
    tail = hopper_tiles.TAILS[head_dim]
    width = 64 + tail if tail else head_dim
    exact = torch.randn(
        (batch, heads, num_tiles * block_q, width), generator=torch.Generator().manual_seed(0)
    )
    exact[:, :, :block_q] = math.nan
    tiles_64 = exact.unflatten(2, (-1, 64)).flatten(0, 2)
    # Of each 64 rows the parts of 64 columns and of the tail.
    parts = [
        part.reshape(len(part), 4, 2, 8, -1, 4, 2).permute(0, 4, 1, 3, 5, 2, 6).flatten(1)
        for part in tiles_64.split(64, dim=2)
    ]
    sums = torch.cat(parts, dim=1).flatten()
    with poisoned_outputs():
        shape = (batch, num_queries, heads, head_dim)
        grad_q = torch.empty(shape, dtype=torch.float16, device="cpu").transpose(1, 2)
        one_pass.hopper_bwd_convert_kernel[num_tiles * 2, heads, batch](
            sums,
            grad_q,
            grad_q.stride()[:3],
            num_queries,
            num_tiles,
            1,
            0.3,
            HEAD_DIM=head_dim,
            TAIL=tail,
            BLOCK_Q=block_q,
        )
    expected = (exact[:, :, :num_queries, :head_dim].nan_to_num() * 0.3).half()
    torch.testing.assert_close(grad_q, expected, rtol=0, atol=0)


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
    x = torch.randn(1, 20, 4)
    both, before = (flash_attention(x, x, x, window=(3, right)) for right in (3, 0))
    assert torch.equal(flash_attention(x, x, x, window=3), both)
    assert torch.equal(flash_attention(x, x, x, window=3, causal=True), before)


def test_the_output_keeps_heads_inside_the_rows_where_the_queries_have_them_so():
    x = torch.randn(2, 20, 3, 8).transpose(1, 2)
    assert flash_attention(x, x, x).transpose(1, 2).is_contiguous()


Q, PACKED = (2, 4, 6, 8), (10, 2, 8)


zeros = torch.zeros


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
    "q must be a tensor, got list": {"q": [1.0]},
    "scale must be None or a positive finite number; got Tensor": {"scale": torch.ones(())},
    "cu_seqlens_q must be a tensor, got NoneType": {"shape": PACKED, "cu_seqlens_k": cu(0, 10)},
    "max_seqlen_k must be None or an int": lambda: call_packed(cu(0, 10), max_seqlen_k=10.0),
}
BAD_VALUES = {
    "q must be (batch, length, d) or": {"shape": (6, 8)},
    "or torch.float64 on cpu, got torch.int64": {"q": zeros(*Q, dtype=int)},
    "q must be neither sparse nor nested": {"q": zeros(*Q).to_sparse()},
    "v must be torch.float32 on cpu, got torch.float16": {"v": zeros(*Q).half()},
    "head dimension of q must be 1 to 256; got 257": {"shape": (1, 1, 2, 257)},
    "k must be of shape (2, 4, 6, 8), got (3,": {"k": zeros(3, 4, 6, 8), "v": zeros(3, 4, 6, 8)},
    "heads of k must divide those of q, 4": {"k": zeros(2, 3, 6, 8), "v": zeros(2, 3, 6, 8)},
    "each at least 1; got shape (0, 4, 6, 8)": {"shape": (0, 4, 6, 8)},
    "scale must be None or a positive finite number; got 0.0": {"scale": 0.0},
    "window must be None, a number of keys to each side, or (left, right) with": {
        "window": (1, 2, 3)
    },
    "impl must be one of auto, gluon, triton, tiled; got 'cuda'": {"impl": "cuda"},
    "impl='triton' takes q, k and v on a CUDA device; got cpu": {"impl": "triton"},
    "takes head dimensions 64, 72, 80, 96, 128; got 8": lambda: call_gluon(8),
    "on a Hopper GPU (compute capability 9.0); got cpu": call_gluon,
    "precision must be one of auto, ieee, tf32x3, bf16x6; got": {"precision": "tf64"},
    "must be torch.int32 or torch.int64 on cpu, got torch.float32": lambda: call_packed(
        cu(0, 10, dtype=torch.float32)
    ),
    "q must be (total, heads, d)": {"cu_seqlens_q": cu(0, 2), "cu_seqlens_k": cu(0, 2)},
    "cu_seqlens_q must be dense, of shape": lambda: call_packed(cu(0)),
    "cu_seqlens_q must start at 0; got 1": lambda: call_packed(cu(1, 10)),
    "must be increasing; got 7 and then 4": lambda: call_packed(cu(0, 7, 4, 10)),
    "cu_seqlens_k must be of shape (2,), got (3,)": lambda: call_packed(cu(0, 10), cu(0, 5, 10)),
    "max_seqlen_q must be at least": lambda: call_packed(cu(0, 7, 10), max_seqlen_q=6),
    "on a CUDA device; got cpu": lambda: FlashAttention.apply(*[zeros(2, 6, 8)] * 3),
    "v must be of shape (2, 6, 8), got (2, 5, 8)": lambda: TiledFlashAttention.apply(
        *[zeros(2, 6, 8)] * 2, zeros(2, 5, 8)
    ),
}


@pytest.mark.parametrize(
    ("message", "wrong"), [*BAD_TYPES.items(), *BAD_VALUES.items()], ids=[*BAD_TYPES, *BAD_VALUES]
)
def test_bad_input_is_refused_by_name(wrong, message):
    with pytest.raises(TypeError if message in BAD_TYPES else ValueError, match=re.escape(message)):
        wrong() if callable(wrong) else call(**wrong)


DIMS = (16, 40, 64, 72, 96, 111, 128, 256)
LONG_CASES = [
    *CASES,
    *(Case((2, 2, 2, 384, 384, dim), causal=causal) for dim in DIMS for causal in BOTH),
    # "auto", of all others here, is several products for one of fp32 up to a head dimension of 128.
    *(
        Case((1, 4, 2, 333, 500, dim), causal=dim != 72, precision=precision)
        for precision in ("ieee", "bf16x6")
        for dim in DIMS
    ),
    *(Case((1, 2, 2, 333, 900, dim), causal=dim != 72, num_splits=3) for dim in DIMS),
]


@pytest.mark.gpu
@pytest.mark.parametrize("case", LONG_CASES, ids=str)
def test_compiled_kernels_are_within_the_budget(case):
    for dtype in ("float32", "float16", "bfloat16"):
        check(measure(dataclasses.replace(case, dtype=dtype), "triton", "cuda"), dtype)


on_hopper = pytest.mark.gpu(capability=(9, 0))


HOPPER_CASES = [
    *(
        Case((2, 2, 2, *lengths, dim), causal=causal)
        for dim in tiles.GLUON_HEAD_DIMS
        for lengths in ((1, 1), (640, 64))  # others are drawn at random below
        for causal in BOTH
    ),
    *(
        case
        for dim in tiles.GLUON_HEAD_DIMS
        for case in (
            # Long sequences, few enough that the hardware gives each tile to the next free
            # multiprocessor.
            Case((1, 11, 11, 2100, 2100, dim), causal=True),
            Case((1, 3, 1, 2048, 2048, dim)),
            # So few tiles of queries that their keys are split, also where some splits have none
            # that a query sees.
            Case((1, 2, 1, 1, 3000, dim)),
            Case((1, 2, 1, 1500, 700, dim), causal=True),
            # Enough tiles that the programs draw theirs from a counter.
            Case((1, 64, 8, 1300, 2100, dim), causal=True),
        )
    ),
]


@on_hopper
@pytest.mark.parametrize("case", HOPPER_CASES, ids=str)
def test_hopper_kernels_are_within_the_budget(case):
    for dtype in ("float16", "bfloat16"):
        check(measure(dataclasses.replace(case, dtype=dtype), "gluon", "cuda"), dtype)


@on_hopper
@pytest.mark.parametrize("shape", [(1, 5, 5), (3, 6, 2)], ids=str)
@pytest.mark.parametrize("programs", [3, 8])
def test_programs_in_waves_are_within_the_budget(shape, programs, monkeypatch):
    monkeypatch.setattr(forward, "DYNAMIC_FROM", 0)
    for module in (forward, one_pass):
        monkeypatch.setattr(module, "num_multiprocessors", lambda _: programs)
        monkeypatch.setattr(module, "even_section", lambda *_: 2)
    case = Case((*shape, 1200, 1300, 128), causal=True, dtype="bfloat16")
    check(measure(case, "gluon", "cuda"))


@on_hopper
@pytest.mark.timeout(3600)  # most examples compile kernels of their own
@settings(random_shapes, max_examples=2000)
@given(case=cases(700, ("float16", "bfloat16"), tiles.GLUON_HEAD_DIMS))
def test_hopper_kernels_on_random_shapes(case):
    check(measure(dataclasses.replace(case, window=None), "gluon", "cuda"))


@pytest.mark.gpu
@pytest.mark.timeout(3600)  # most examples compile kernels of their own
@settings(random_shapes, max_examples=2000)
@given(case=cases(700, ("float32", "float16", "bfloat16"), (16, 33, 64, 72, 80, 128, 200)))
def test_compiled_kernels_on_random_shapes(case):
    check(measure(case, "triton", "cuda"))


BIT_EQUAL = [
    # Split-K, and many tiles; slices of two widths; persistent programs.
    *(
        Case((2, heads, heads, 2100, 2100, dim), causal=True, dtype="bfloat16")
        for heads in (1, 32)
        for dim in (64, 72, 128)
    ),
    Case((1, 2, 2, 2100, 2100, 64), causal=True),
    Case((64, 8, 8, 500, 500, 64), dtype="bfloat16"),
]


@pytest.mark.gpu
@pytest.mark.parametrize("impl", ["auto", "triton"])
@pytest.mark.parametrize("case", BIT_EQUAL, ids=str)
def test_a_thousand_forwards_and_250_backwards_are_bit_equal(case, impl):
    q, k, v, grad_out = draw(case, "cuda")
    plan = fa.plan_of(q, k, v, **mask_of(case), impl=resolve_impl(q, impl))
    result = plan.forward(q, k, v)
    for _ in range(1000):
        assert all(map(torch.equal, result, plan.forward(q, k, v)))
    grads = plan.backward(grad_out, q, k, v, *result)
    for _ in range(250):
        assert all(map(torch.equal, grads, plan.backward(grad_out, q, k, v, *result)))


@on_hopper
def test_calls_of_several_streams_and_of_a_graph_share_no_counter_of_tiles():
    case = Case((2, 32, 32, 2100, 2100, 64), causal=True, dtype="bfloat16")
    q, k, v, _ = draw(case, "cuda")
    plan = fa.plan_of(q, k, v, **mask_of(case), impl="gluon")
    expected, _ = plan.forward(q, k, v)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = plan.forward(q, k, v)
    streams = [torch.cuda.Stream() for _ in range(4)]
    for _ in range(20):
        found = []
        torch.cuda.synchronize()
        graph.replay()
        for stream in streams:
            with torch.cuda.stream(stream):
                found += [plan.forward(q, k, v)[0] for _ in range(3)]
        torch.cuda.synchronize()
        assert all(torch.equal(expected, x) for x in (out, *found))
        out.zero_()
