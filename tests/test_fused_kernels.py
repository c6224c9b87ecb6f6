"""The fused kernels against fp64, interpreted on the CPU in a worker process and compiled on a GPU;
their operators; and that every kernel, as launched, compiles for three GPUs without spilling.
"""

import contextlib
import functools
import itertools
import math
import re
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from conftest import more
from test_kernel_compilation import SHARED_LIMIT, compile_source, spilled_bytes
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from triton.compiler import ASTSource

from labkit.kernels import column_sums, fused, layer_norm, norms, rms_norm, rotary, swiglu
from labkit.kernels import cross_entropy as ce
from labkit.models.transformer import RotaryEmbedding
from labkit.numerics import judge

EPS = 1e-5
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
not_interpreted = pytest.mark.skipif(
    fused.IS_INTERPRETED, reason="interpreted kernels are neither compiled nor traced"
)


def is_interpreted() -> bool:
    return fused.IS_INTERPRETED


def rms_norm_formula(x, weight, residual=None):
    total = x if residual is None else x + residual
    y = (
        fused.wide(total)
        * torch.rsqrt(fused.wide(total).pow(2).mean(-1, keepdim=True) + EPS)
        * weight
    )
    return y.to(total.dtype) if residual is None else (y.to(total.dtype), total)


def layer_norm_formula(x, weight, bias, residual=None):
    total = x if residual is None else x + residual
    y = F.layer_norm(total, weight.shape, weight.to(total.dtype), bias.to(total.dtype), EPS)
    return y if residual is None else (y, total)


def cross_entropy_formula(logits, targets):
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


FUNCTIONS = {
    "rms norm": (lambda x, w, r=None: rms_norm.rms_norm(x, w, EPS, r), rms_norm_formula),
    "layer norm": (
        lambda x, w, b, r=None: layer_norm.layer_norm(x, w, b, EPS, r),
        layer_norm_formula,
    ),
    "swiglu": (swiglu.swiglu, lambda gate, up: F.silu(gate) * up),
    "rotary": (
        lambda q, k, by: rotary.rotary(q, k, by.cos_TD, by.sin_TD),
        lambda q, k, by: (by(q), by(k)),
    ),
    "cross entropy": (ce.cross_entropy, cross_entropy_formula),
    "cross entropy in place": (
        lambda x, t: ce.cross_entropy(x.clone(), t, inplace=True),
        cross_entropy_formula,
    ),
    "linear cross entropy": (
        lambda h, w, t: ce.linear_cross_entropy(h, w, t, chunk_rows=5),
        lambda h, w, t: cross_entropy_formula(h @ w.T, t),
    ),
}
"""Ours, and the formula in any dtype; a norm whose name ends in "+ sum" has a residual."""

NORMS = ["rms norm", "rms norm + sum", "layer norm", "layer norm + sum"]
NAMES = [*NORMS, *list(FUNCTIONS)[2:]]


def shapes_of(name: str, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Returns the shapes of an operation's tensors for that of its first."""
    if "norm" in name:
        return [shape] + [shape[-1:]] * (2 if "layer" in name else 1) + [shape] * ("sum" in name)
    others = {
        "swiglu": [shape],
        "rotary": [(shape[0], 1, *shape[2:])],
        "linear cross entropy": [(61, shape[-1])],
    }
    return [shape, *others.get(name, [])]


def draw(
    name: str, shape, dtype: torch.dtype, layout: str, device: str
) -> tuple[list[Tensor], list]:
    """Returns the tensors to differentiate by, and the others."""
    generator = torch.Generator().manual_seed(0)
    tensors = [
        torch.randn(s, generator=generator).to(dtype).to(device) for s in shapes_of(name, shape)
    ]
    if layout == "mixed":  # a 16-bit branch beside fp32: what autocast gives
        tensors = [tensors[0], *(x.float() for x in tensors[1:])]
    elif layout == "rows apart":  # columns of a wider tensor, whose others are NaN
        wide = [
            torch.full((*x.shape[:-1], 2 * x.shape[-1]), math.nan, dtype=dtype, device=device)
            for x in tensors
        ]
        tensors = [w[..., : x.shape[-1]].copy_(x) for w, x in zip(wide, tensors, strict=True)]
    elif layout == "columns apart":
        tensors = [x.transpose(0, -1).contiguous().transpose(0, -1) for x in tensors]
    elif layout == "heads beside":  # as a projection writes them
        tensors = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]
    if name == "rotary":
        return tensors, [RotaryEmbedding(shape[-1], shape[-2] + 3, 10_000.0, device=device)]
    if "entropy" in name:
        classes = 61 if "linear" in name else shape[-1]
        return tensors, [torch.randint(classes, shape[:-1], generator=generator).to(device)]
    return tensors, []


def results(function, tensors: list[Tensor], others: list) -> list[Tensor]:
    """Returns the outputs and, for gradients of theirs drawn at random, the gradients of the
    tensors.
    """
    leaves = [x.detach().requires_grad_() for x in tensors]
    outputs = function(*leaves, *others)
    outputs = list(outputs) if isinstance(outputs, tuple) else [outputs]
    generator = torch.Generator().manual_seed(1)
    gradients = [torch.randn(x.shape, generator=generator).to(x.dtype).to(x) for x in outputs]
    return [x.detach() for x in outputs] + list(torch.autograd.grad(outputs, leaves, gradients))


@contextlib.contextmanager
def poisoned():
    """Fills what is allocated with NaN, so that what a kernel leaves out shows."""

    def filled(allocate, *args, **kwargs):
        x = allocate(*args, **kwargs)
        return x if isinstance(x, FakeTensor) or not x.is_floating_point() else x.fill_(math.nan)

    with contextlib.ExitStack() as stack:
        for name in ("empty", "empty_like"):
            stack.enter_context(
                mock.patch.object(torch, name, functools.partial(filled, getattr(torch, name)))
            )
        yield


def measure(
    name: str, shape, dtype: torch.dtype, layout: str = "", device: str = "cpu"
) -> list[float]:
    """Returns the share of the error budget that each output and each gradient takes; above 1 it
    raises.
    """
    ours, formula = FUNCTIONS[name.removesuffix(" + sum")]
    tensors, others = draw(name, shape, dtype, layout, device)
    with poisoned():
        values = results(ours, tensors, others)
    eager, exact = (
        results(formula, tensors, others),
        results(formula, [x.double() for x in tensors], others),
    )
    fractions = []
    for number, triple in enumerate(zip(values, eager, exact, strict=True)):
        assert triple[0].shape == triple[2].shape
        value, same, oracle = (x.double().reshape((1,) * (2 - x.dim()) + x.shape) for x in triple)
        kind = "out" if number < len(values) - len(tensors) else "gradient"
        # Logits that are rounded to 16 bits make a loss as inexact as they are, whatever its own
        # dtype.
        of = dtype if name == "linear cross entropy" and kind == "out" else values[number].dtype
        verdict = judge(kind, value, oracle, same, dtype=of, num_terms=max(shape))
        fractions.append(verdict.budget_fraction)
    return fractions


CASES = [(name, shape, "") for name in NORMS for shape in [(1, 3), (5, 7, 40), (9, 300)]]
CASES += [
    (name, (9, 40), layout)
    for name in [*NORMS, "swiglu"]
    for layout in ("rows apart", "columns apart")
]
CASES += [("swiglu", shape, "") for shape in [(1, 1), (3, 5, 40), (2, 1030)]]
CASES += [
    ("rotary", (1, 1, 1, 2), ""),
    ("rotary", (2, 3, 33, 12), ""),
    ("rotary", (2, 3, 9, 16), "heads beside"),
]
CASES += [("rotary", (2, 3, 9, 6), "columns apart"), ("rotary", (2, 3, 9, 6), "rows apart")]
CASES += [("cross entropy", shape, "") for shape in [(2, 2), (3, 5, 61), (3, 5001)]]
CASES += [("cross entropy", (7, 61), "rows apart"), ("cross entropy in place", (7, 61), "")]
CASES += [("linear cross entropy", shape, "") for shape in [(1, 3), (2, 6, 24), (17, 40)]]
ON_GPU = [(name, (4099, c), "") for name in NORMS for c in (768, 1152, 1600, 2560, 8192)]
ON_GPU += [("swiglu", (1027, 4304), "rows apart"), ("rotary", (4, 25, 513, 64), "heads beside")]
ON_GPU += [("cross entropy", (515, 50257), ""), ("linear cross entropy", (515, 768), "")]
ON_GPU += [(name, (4099, 1600), "mixed") for name in NORMS[1::2]]


@pytest.mark.parametrize("dtype", [*DTYPES[:2], *more(torch.float16)], ids=str)
@pytest.mark.parametrize(("name", "shape", "layout"), CASES, ids=str)
def test_it_is_within_the_error_budget(name, shape, layout, dtype, interpreted):
    assert max(interpreted(measure, name, shape, dtype, layout)) <= 1


@pytest.mark.parametrize("name", NORMS[1::2])
def test_a_16_bit_branch_is_added_to_an_fp32_residual(name, interpreted):
    assert max(interpreted(measure, name, (5, 40), torch.bfloat16, "mixed")) <= 1


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "shape", "layout"), CASES + ON_GPU, ids=str)
def test_compiled_it_is_within_the_error_budget(name, shape, layout, dtype):
    assert max(measure(name, shape, dtype, layout, "cuda")) <= 1


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_without_a_gpu_it_is_the_formula(name, dtype):
    assert max(measure(name, (2, 3, 5, 12) if name == "rotary" else (5, 12), dtype)) <= 1


def check_operators(device: str = "cpu") -> None:
    """Asserts of every operator that it is what its schema says: dtypes that differ, views,
    gradients to take.
    """

    def x(*shape, dtype=torch.float32, grad=False):
        return torch.randn(shape, device=device).to(dtype).requires_grad_(grad)

    leaf = functools.partial(x, grad=True)
    branch, weight, total, statistics = leaf(5, 40, dtype=torch.bfloat16), leaf(40), x(5, 40), x(5)
    q, k = leaf(2, 9, 3, 12).transpose(1, 2), leaf(2, 9, 1, 12).transpose(1, 2)
    by, targets = RotaryEmbedding(12, 9, 1e4, device=device), torch.randint(40, (5,), device=device)
    grad_y, narrow = x(5, 40, dtype=torch.bfloat16), torch.bfloat16
    for operation, arguments in (
        (norms.norm, (branch, leaf(5, 40), weight, None, EPS, narrow)),
        (norms.norm, (branch, None, weight, None, EPS, narrow)),
        (norms.norm_backward, (total, x(40), statistics, None, grad_y, total, narrow)),
        (norms.norm, (branch, leaf(5, 40), weight, leaf(40), EPS, narrow)),
        (norms.norm_backward, (total, x(40), statistics, statistics, grad_y, None, narrow)),
        (swiglu._forward, leaf(5, 80).chunk(2, dim=-1)),
        (swiglu._backward, (total, total, total)),
        (rotary._rotary, (q, k, by.cos_TD, by.sin_TD, False)),
        (ce._forward, (leaf(5, 40), targets, False)),
        (ce._backward, (total, targets, x(5, 3), x(), x(5, 40))),
        (ce._linear_forward, (leaf(5, 8), leaf(8, 40).T, targets, True, 2)),
    ):
        torch.library.opcheck(operation.op, arguments)


def check_compiled(autocast: bool, device: str = "cpu", backend: str = "aot_eager") -> None:
    """Asserts that in one graph without a break the operations give what they give outside."""
    for name in NAMES:
        function = FUNCTIONS[name.removesuffix(" + sum")][0]
        dtype, layout = (
            (torch.bfloat16, "mixed") if autocast and name in NORMS else (torch.float32, "")
        )
        tensors, others = draw(
            name, (2, 3, 9, 12) if name == "rotary" else (9, 40), dtype, layout, device
        )
        torch._dynamo.reset()
        # The compiler may leave out a cast to bf16 and back, which the operation makes outside, so
        # under autocast fp32 results differ by bf16's rounding.
        tolerance = {"rtol": 1.6e-2, "atol": 1e-5} if autocast else {}
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            inside = results(
                torch.compile(function, backend=backend, fullgraph=True), tensors, others
            )
            torch.testing.assert_close(inside, results(function, tensors, others), **tolerance)


def test_the_operators_are_what_their_schemas_say(interpreted):
    interpreted(check_operators)


@pytest.mark.parametrize("autocast", [False, *more(True)])
def test_the_compiler_takes_them_whole(autocast, interpreted):
    interpreted(check_compiled, autocast)


@pytest.mark.gpu
@needs_gpu
def test_on_a_gpu_the_operators_are_what_their_schemas_say():
    check_operators("cuda")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("autocast", [False, True])
def test_on_a_gpu_the_compiler_takes_them_whole(autocast):
    check_compiled(autocast, "cuda", "inductor")


@not_interpreted
def test_the_compiler_sees_the_kernels_inside():
    with FakeTensorMode(), torch.no_grad():
        x, weight = (torch.empty(shape, device="cuda") for shape in ((64, 768), (768,)))
        for residual in (x, None):
            graph = make_fx(lambda x, r, w: norms.norm.function(x, r, w, None, EPS, x.dtype))(
                x, residual, weight
            )
            assert "triton_kernel_wrapper_mutation" in [
                str(node.target) for node in graph.graph.nodes
            ]


def dtypes_under_autocast() -> list[torch.dtype]:
    with torch.autocast("cpu", torch.bfloat16):
        x, weight = torch.randn(3, 8), torch.randn(8)
        y, total = rms_norm.rms_norm(x.bfloat16(), weight, EPS, residual=x)
        loss = ce.linear_cross_entropy(
            x, torch.randn(5, 8).bfloat16(), torch.zeros(3, dtype=torch.int64)
        )
        results = (
            y,
            layer_norm.layer_norm(x, weight, weight, EPS),
            total,
            swiglu.swiglu(x, x),
            loss,
        )
        return [z.dtype for z in results]


def test_under_autocast_a_norm_gives_what_the_next_product_takes(interpreted):
    expected = [torch.bfloat16] * 2 + [torch.float32] * 3
    assert interpreted(dtypes_under_autocast) == dtypes_under_autocast() == expected


def unused_outputs() -> None:
    x, weight, bias, residual = (
        torch.randn(s).requires_grad_() for s in ((3, 8), (8,), (8,), (3, 8))
    )
    for name, inputs in (
        ("rms norm", (x, weight, residual)),
        ("layer norm", (x, weight, bias, residual)),
    ):
        norm = functools.partial(FUNCTIONS[name][0], *inputs)
        of_total = torch.autograd.grad(norm()[1].sum(), (x, residual, weight), allow_unused=True)
        assert torch.equal(of_total[0], torch.ones(3, 8)) and torch.equal(of_total[1], of_total[0])
        assert of_total[2] is None
        of_y, of_both = (
            torch.autograd.grad(z, (x, weight)) for z in (norm()[0].sum(), sum(norm()).sum())
        )
        torch.testing.assert_close(of_both[0], of_y[0] + 1)
        assert torch.equal(of_both[1], of_y[1])


def test_an_output_that_nothing_uses_adds_no_gradient(interpreted):
    interpreted(unused_outputs)


def in_place() -> None:
    logits, targets = torch.randn(4, 9, requires_grad=True).clone(), torch.tensor([0, 3, 8, 2])
    loss = ce.cross_entropy(logits, targets, inplace=True)
    (grad,) = torch.autograd.grad(loss, logits, retain_graph=True)
    assert grad.data_ptr() == logits.data_ptr()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_the_gradient_in_place_is_the_logits(interpreted):
    interpreted(in_place)


INF, NAN = math.inf, math.nan
LAST = torch.cat(
    [torch.full((4096,), -INF), torch.tensor([1.0, 3.0])]
)  # nothing in the first block of a row


def edge_rows(dtype: torch.dtype) -> list[Tensor]:
    """Returns rows of logits that cost a formula without care its accuracy, or its result."""
    big = torch.finfo(dtype).max
    offsets = [
        torch.tensor([2.0, -1.0, 0.5]) + offset for offset in (1e4, 1e6, -1e6, 1e30) if offset < big
    ]
    rows = [[2e4, 2e4 - 8, 0.0], [big] * 3, [-big] * 3, [big, -big, big], [-big, -big / 1.25, -big]]
    rows += [
        [1e9] * 4,
        [0.0, -INF, 1.0],
        [-INF, 0.0, 1.0],
        [-INF] * 3,
        [INF, 0.0, 1.0],
        [NAN, 0.0, 1.0],
    ]
    return [row.to(dtype) for row in [*offsets, *map(torch.tensor, rows), LAST, LAST.flip(0)]]


def check_edges(dtype: torch.dtype) -> None:
    """Asserts that loss and gradient are `F.cross_entropy`'s in fp64, rounded."""
    for row, target in itertools.product(edge_rows(dtype), (0, 1)):
        logits, target = row.expand(3, -1), torch.full((3,), target)
        loss, grad = results(F.cross_entropy, [logits.double()], [target])
        functions = [ce.cross_entropy, FUNCTIONS["cross entropy in place"][0]]
        if row.isfinite().all():  # times a 0 of the identity, infinity would be NaN
            identity = torch.eye(len(row), dtype=dtype)
            functions.append(
                lambda x, t, w=identity: ce.linear_cross_entropy(x, w, t, chunk_rows=2)
            )
        for function in functions:
            ours = results(function, [logits.contiguous()], [target])
            exact = [loss.float(), grad.to(dtype)]
            torch.testing.assert_close(ours[0], exact[0], rtol=1e-6, atol=1e-6, equal_nan=True)
            atol = 1e-6 + torch.finfo(dtype).eps
            torch.testing.assert_close(ours[1], exact[1], rtol=0, atol=atol, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cross_entropy_is_exact_at_the_edges_of_a_dtype(dtype, interpreted):
    check_edges(dtype)
    interpreted(check_edges, dtype)


def check_targets_outside() -> None:
    """Asserts that a target outside, −100 too, gives NaN, and to the gradient of its row alone."""
    for outside in (-100, -1, 7, 2**40):
        targets = torch.tensor([1, outside, 3, 6])
        for name in ("cross entropy", "cross entropy in place"):
            loss, grad = results(FUNCTIONS[name][0], [torch.randn(4, 7)], [targets])
            assert loss.isnan() and grad.isnan().all(1).tolist() == [False, True, False, False]
        loss, *grads = results(
            FUNCTIONS["linear cross entropy"][0], [torch.randn(4, 5), torch.randn(7, 5)], [targets]
        )
        assert loss.isnan() and grads[0].isnan().all(1).tolist() == [False, True, False, False]
        assert grads[1].isnan().all()


def test_a_target_outside_is_nan_in_a_kernel_and_an_error_without(interpreted):
    interpreted(check_targets_outside)
    for outside in (-100, -1, 7):
        for call in (
            lambda t: ce.cross_entropy(X, t),
            lambda t: ce.linear_cross_entropy(X, torch.zeros(7, 4), t),
        ):
            with pytest.raises(IndexError, match=f"Target {outside} is out of bounds"):
                call(torch.tensor([0, outside, 1]))


def of_no_rows() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    loss, grad = results(ce.cross_entropy, [torch.randn(0, 7)], [none])
    assert loss.isnan() and grad.shape == (0, 7)
    loss, *grads = results(ce.linear_cross_entropy, [torch.randn(0, 5), torch.randn(7, 5)], [none])
    assert loss.isnan() and grads[0].shape == (0, 5) and torch.equal(grads[1], torch.zeros(7, 5))


def test_the_loss_of_no_rows_is_nan_and_changes_no_weight(interpreted):
    of_no_rows()
    interpreted(of_no_rows)


def check_tables_with_two_axes() -> None:
    """Asserts that each half of a head turns by its own half of the tables, there and back."""
    generator = torch.Generator().manual_seed(0)
    q, k = (
        torch.randn(1, 2, 5, 8, generator=generator),
        torch.randn(1, 1, 5, 8, generator=generator),
    )
    angles = torch.randn(5, 8, generator=generator, dtype=torch.float64)

    def formula(q, k):
        turned = [torch.cat((-x[..., 4:], x[..., :4]), -1) for x in (q, k)]
        return tuple(
            x * angles.cos() + y * angles.sin() for x, y in zip((q, k), turned, strict=True)
        )

    tables = angles.cos().float(), angles.sin().float()
    ours = results(lambda q, k: rotary.rotary(q, k, *tables), [q, k], [])
    for found, exact in zip(ours, results(formula, [q.double(), k.double()], []), strict=True):
        torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)


def test_the_halves_of_rotarys_tables_may_differ(interpreted):
    check_tables_with_two_axes()
    interpreted(check_tables_with_two_axes)


X, W, T = torch.zeros(3, 4), torch.zeros(4), torch.zeros(3, dtype=torch.int64)
X4, TABLE = X[None, None], torch.zeros(5, 4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: rms_norm.rms_norm(X, torch.zeros(5), EPS),
            r"weight must be of shape \(4,\), got \(5,\)",
        ),
        (
            lambda: rms_norm.rms_norm(X, W.half(), EPS),
            "dtype of x, torch.float32, got torch.float16",
        ),
        (
            lambda: rms_norm.rms_norm(X.half(), W.bfloat16(), EPS),
            "torch.float16 or torch.float32, got",
        ),
        (lambda: rms_norm.rms_norm(X, W, EPS, X.half()), "residual must have the dtype of x"),
        (
            lambda: rms_norm.rms_norm(X, W, EPS, X[:2]),
            r"residual must be of shape \(3, 4\), got \(2, 4\)",
        ),
        (
            lambda: rms_norm.rms_norm(X.long(), W, EPS),
            "x must be of torch.float32, .* on cpu, got torch.int64",
        ),
        (
            lambda: rms_norm.rms_norm(X[:, :0], W[:0], EPS),
            r"dimension of x must not be empty, got shape \(3, 0\)",
        ),
        (
            lambda: layer_norm.layer_norm(X, W, W.to("meta"), EPS),
            "bias must be on the device of x, cpu, got meta",
        ),
        (
            lambda: layer_norm.layer_norm(X.half(), W, W.half(), EPS),
            "weight and bias must have one dtype",
        ),
        (
            lambda: swiglu.swiglu(X, X.half()),
            "up must have the dtype of gate, torch.float32, got torch.float16",
        ),
        (lambda: swiglu.swiglu(X, X[:2]), "up must be of shape"),
        (lambda: rotary.rotary(X, X, TABLE, TABLE), r"q and k must be \(B, H, T, even D\)"),
        (
            lambda: rotary.rotary(X4, X4[..., :2, :], TABLE, TABLE),
            "k must be as q but for the heads",
        ),
        (lambda: rotary.rotary(X4, X4, TABLE[:2], TABLE), "cos must be .* at least 3 rows of 4"),
        (
            lambda: rotary.rotary(X4, X4, TABLE, TABLE.half()),
            "sin must be contiguous torch.float32 on cpu",
        ),
        (lambda: ce.cross_entropy(X, T[:2]), r"targets must be of shape \(3,\), got \(2,\)"),
        (
            lambda: ce.cross_entropy(X, T.int()),
            "targets must be torch.int64 on cpu, got torch.int32",
        ),
        (
            lambda: ce.cross_entropy(X.T, T.new_zeros(4), inplace=True),
            "inplace=True needs contiguous logits",
        ),
        (lambda: ce.linear_cross_entropy(X, X.T, T), r"weight must be \(V, 4\), got \(4, 3\)"),
        (
            lambda: ce.linear_cross_entropy(X, X, T, chunk_rows=0),
            "chunk_rows must be at least 1, got 0",
        ),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def launches(columns: int, dtype: torch.dtype, residual: torch.dtype | None) -> list[tuple]:
    """Returns (kernel, arguments, constants) of all launches on a GPU of 132 multiprocessors,
    tensors being fake.
    """
    recorded = []

    class Recorder:
        def __init__(self, kernel):
            self.kernel = kernel

        def __getitem__(self, grid):
            return lambda *arguments, **constants: recorded.append(
                (self.kernel, arguments, constants)
            )

    def x(*shape, dtype=dtype):
        return torch.empty(shape, dtype=dtype, device="cuda")

    with contextlib.ExitStack() as stack:
        for module in (column_sums, norms, swiglu, rotary, ce):
            stack.enter_context(mock.patch.object(module, "wrap_triton", Recorder))
        for module in (norms, column_sums):
            stack.enter_context(mock.patch.object(module, "num_multiprocessors", lambda index: 132))
        stack.enter_context(FakeTensorMode())
        r = None if residual is None else x(4096, columns, dtype=residual)
        statistics, table = x(4096, dtype=torch.float32), x(512, 64, dtype=torch.float32)
        for bias, mean in ((None, None), (x(columns), statistics)):
            y, *_ = norms.norm(x(4096, columns), r, x(columns), bias, EPS, dtype)
            norms.norm_backward(y if r is None else r, x(columns), statistics, mean, y, r, dtype)
        gate, up = x(4096, 2 * columns).chunk(2, dim=-1)
        swiglu._backward(gate, up, swiglu._forward(gate, up))
        q = x(8, 512, columns // 64, 64).transpose(1, 2)
        rotary._rotary(q, q, table, table, False)
        logits, targets, into = x(4096, 10_000), x(4096, dtype=torch.int64), {"INTO_GRADIENT": True}
        column_sums._column_sums(x(4096, columns))
        loss, rows = ce._forward(logits, targets, False)
        ce._backward(logits, targets, rows, loss, logits)
        chunk = (logits, targets, rows, *logits.stride()[:1], logits.shape[1])
        recorded.append((ce.cross_entropy_fwd_kernel, chunk, into | ce._constants(logits.shape[1])))
    return recorded


def source_of(kernel, arguments, constants) -> tuple[ASTSource, dict]:
    """Returns what is to be compiled for a launch, specialised as the launch is, and its
    options.
    """
    names = {int: "i32", float: "fp32", torch.int64: "*i64"}
    names |= {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}
    values = dict(zip(kernel.arg_names, arguments, strict=False)) | constants
    options = {"num_warps": values.pop("num_warps", 4)}
    signature, fixed, attributes = {}, {}, {}
    for index, name in enumerate(kernel.arg_names):
        value = values[name]
        if kernel.params[index].is_constexpr or value is None:
            signature[name], fixed[name] = "constexpr", value
            continue
        signature[name] = names[value.dtype if isinstance(value, Tensor) else type(value)]
        if isinstance(value, Tensor) or value % 16 == 0:
            attributes[(index,)] = [["tt.divisibility", 16]]
    return ASTSource(kernel, signature, fixed, attributes), options


@not_interpreted
@pytest.mark.parametrize(
    ("columns", "dtype", "residual", "capability"),
    [
        (1152, DTYPES[2], None, 80),
        (8192, DTYPES[0], DTYPES[0], 90),
        *more((768, DTYPES[1], DTYPES[1], 100), (1600, DTYPES[1], DTYPES[0], 90)),
    ],
)
def test_every_launch_compiles_without_spilling(
    columns, dtype, residual, capability, tmp_path, monkeypatch
):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    sources = [source_of(*launch) for launch in launches(columns, dtype, residual)]
    for source, options in {
        source.hash(): (source, options) for source, options in sources
    }.values():
        compiled, log = compile_source(source, capability, options)
        name, ptx = source.fn.fn.__name__, compiled.asm["ptx"]
        assert spilled_bytes(log) == 0, name
        assert compiled.metadata.shared <= SHARED_LIMIT[80], name
        assert re.search(r"ld\.global\S*\.v4", ptx), f"{name} loads less than 16 bytes at a time"
        if "norm_bwd" in name:
            assert re.search(r"cp\.async\.c[ag]\S+ .*, 0x10", ptx), (
                f"{name} has no rows on their way"
            )


def test_a_launch_is_kept_for_what_its_kernel_was_compiled_for():
    class Kernel:
        arg_names = ()

        def __getitem__(self, grid):
            return lambda *arguments, **constants: ran.append((grid[:1], arguments[1:], constants))

    ran, launcher, x = [], fused.Launcher(Kernel()), torch.zeros(64)
    calls = [
        ((1,), (x, 32), {"BLOCK": 8}),
        (
            (1,),
            (x + 1, 48),
            {"BLOCK": 8},
        ),  # of the same dtype and alignment, and a multiple of 16 too
        ((2,), (x, 32), {"BLOCK": 8}),
        ((1,), (x, 32), {"BLOCK": 16}),
        ((1,), (x.half(), 32), {"BLOCK": 8}),
        ((1,), (x[1:], 32), {"BLOCK": 8}),
        ((1,), (x, 33), {"BLOCK": 8}),
        ((1,), (x, 1), {"BLOCK": 8}),
        ((1,), (x, 2**31), {"BLOCK": 8}),
        ((1,), (x, None), {"BLOCK": 8}),
    ]
    for grid, arguments, constants in calls:
        launcher[grid](*arguments, **constants)
    assert ran == [(grid, arguments[1:], constants) for grid, arguments, constants in calls]
    assert len(launcher.launches) == len(calls) - 1
