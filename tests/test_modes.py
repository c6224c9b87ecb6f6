"""Every operation of labkit.kernels under autocast, on the meta device, in inference mode, of
memory full of NaN, with what is no tensor, and counted by FlopCounterMode: what is documented, or
one line that says what is wrong.
"""

import pytest
import torch
from test_fused_kernels import poisoned
from test_gradients import OPERATIONS, Operation, cases, draw, loss_of, outputs_of
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from labkit.kernels import cross_entropy, fused, gelu_mlp, linear, rotary
from labkit.kernels.layer_norm import layer_norm
from labkit.kernels.rms_norm import rms_norm
from labkit.kernels.swiglu import swiglu
from labkit.kernels.weighted_sum import weighted_sum

OURS = [name for name in cases("kernel") if "lash" not in name]
PRODUCTS = ("gelu_mlp", "gelu_mlp of a norm", "norm_linear", "dropout_linear")


def is_interpreted() -> bool:
    return fused.IS_INTERPRETED


def run(function, tensors: list[Tensor], backward_under_autocast: bool = False) -> list[Tensor]:
    """Returns the outputs and gradients of an operation under autocast of bf16."""
    with torch.autocast("cpu", torch.bfloat16):
        outputs = outputs_of(function, tensors)
        loss = sum(x.float().square().sum() for x in outputs)
        if backward_under_autocast:
            return [*outputs, *torch.autograd.grad(loss, tensors)]
    return [*outputs, *torch.autograd.grad(loss, tensors)]


def under_autocast(name: str) -> None:
    """Asserts dtypes, and that values are the formula's within bf16's rounding, wherever backward
    runs.
    """
    operation = OPERATIONS[name]
    exact_tensors = draw(operation, torch.float64)
    outputs = outputs_of(operation.formula, exact_tensors)
    loss = sum(x.square().sum() for x in outputs)
    exact = [*outputs, *torch.autograd.grad(loss, exact_tensors)]
    narrow = name in PRODUCTS or "norm" in name
    for inside in (False, True):
        tensors = draw(operation, torch.float32)
        found = run(operation.ours, tensors, inside)
        assert found[0].dtype == (torch.bfloat16 if narrow else torch.float32)
        assert all(x.dtype == torch.float32 for x in found[1:])
        for ours, right in zip(found, exact, strict=True):
            error = (ours.double() - right).abs().max() / right.abs().max()
            assert error <= (0.03 if narrow or name == "linear_cross_entropy" else 1e-5)


@pytest.mark.parametrize("name", [name for name in OURS if name != "column_sums"])
def test_autocast_gives_the_documented_dtypes(name, interpreted):
    if "plain" in OPERATIONS[name].paths:
        under_autocast(name)
    interpreted(under_autocast, name)


def on_meta(x):
    return x.to("meta") if isinstance(x, Tensor) else x


@pytest.mark.parametrize("name", [name for name in OURS if "plain" in OPERATIONS[name].paths])
def test_on_the_meta_device_shapes_and_dtypes_are_those_of_a_cpu(name, monkeypatch):
    import test_gradients

    expected = outputs_of(OPERATIONS[name].ours, draw(OPERATIONS[name], torch.float32))
    for constant in ("TARGETS", "SEED", "ANGLES"):
        monkeypatch.setattr(test_gradients, constant, getattr(test_gradients, constant).to("meta"))
    tensors = [
        x.detach().to("meta").requires_grad_() for x in draw(OPERATIONS[name], torch.float32)
    ]
    outputs = outputs_of(OPERATIONS[name].ours, tensors)
    assert [(x.shape, x.dtype, x.device.type) for x in outputs] == [
        (x.shape, x.dtype, "meta") for x in expected
    ]
    grads = torch.autograd.grad(sum(x.sum() for x in outputs), tensors)
    assert [(x.shape, x.dtype) for x in grads] == [(x.shape, x.dtype) for x in tensors]


def inference(name: str) -> None:
    """Asserts that tensors of inference mode give what others do, in that mode and after it."""
    operation = OPERATIONS[name]
    expected = outputs_of(operation.ours, draw(operation, torch.float32))
    with torch.inference_mode():
        tensors = [x.detach().clone() for x in draw(operation, torch.float32)]
        inside = outputs_of(operation.ours, tensors)
    assert tensors[0].is_inference()
    for found in (inside, outputs_of(operation.ours, tensors)):
        assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", OURS)
def test_tensors_of_inference_mode_are_taken(name, interpreted):
    if "plain" in OPERATIONS[name].paths:
        inference(name)
    interpreted(inference, name)


def from_memory_full_of_nan(name: str) -> None:
    """Asserts that no output and no gradient holds what its memory held before, nor that of a
    non-contiguous input.
    """
    operation = OPERATIONS[name]
    apart = [
        x.detach().repeat_interleave(2, -1)[..., ::2].requires_grad_()
        for x in draw(operation, torch.float32)
    ]
    with poisoned():
        outputs = outputs_of(operation.ours, apart)
        grads = torch.autograd.grad(sum(x.square().sum() for x in outputs), apart)
    tensors = draw(operation, torch.float64)
    expected = outputs_of(operation.formula, tensors)
    exact = torch.autograd.grad(sum(x.square().sum() for x in expected), tensors)
    for found, right in zip((*outputs, *grads), (*expected, *exact), strict=True):
        torch.testing.assert_close(found.double(), right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", [name for name in OURS if name != "column_sums"])
def test_every_element_is_written(name, interpreted):
    interpreted(from_memory_full_of_nan, name)


X, W, SQUARE = torch.zeros(3, 4), torch.zeros(4), torch.zeros(4, 4)
TARGETS = torch.zeros(3, dtype=torch.int64)
HEADS = X[None, None]


@pytest.mark.parametrize(
    ("call", "name", "given"),
    [
        (lambda: rms_norm(None, W, 1e-5), "x", "NoneType"),
        (lambda: rms_norm(X, None, 1e-5), "weight", "NoneType"),
        (lambda: rms_norm(X, W, 1e-5, 1.0), "residual", "float"),
        (lambda: layer_norm(X, W, None, 1e-5), "bias", "NoneType"),
        (lambda: swiglu(X, None), "up", "NoneType"),
        (lambda: rotary.rotary(HEADS, None, X, X), "k", "NoneType"),
        (lambda: rotary.rotary(HEADS, HEADS, X, None), "sin", "NoneType"),
        (lambda: cross_entropy.cross_entropy(X, None), "targets", "NoneType"),
        (lambda: cross_entropy.linear_cross_entropy(X, None, TARGETS), "weight", "NoneType"),
        (lambda: gelu_mlp.gelu_mlp(X, SQUARE, None, SQUARE, W), "fc1_bias", "NoneType"),
        (lambda: linear.dropout_linear(X, SQUARE, None, 0.1, TARGETS[0]), "bias", "NoneType"),
        (lambda: linear.norm_linear([1.0], SQUARE, W, (X, W, W, 1e-5)), "normed", "list"),
        (lambda: weighted_sum(X, None), "weight", "NoneType"),
    ],
)
@pytest.mark.parametrize("autocast", [False, True])
def test_what_is_no_tensor_is_refused_by_name(call, name, given, autocast):
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        with pytest.raises(TypeError, match=f"^{name} must be a tensor, got {given}$"):
            call()


def of_no_rows() -> None:
    """Asserts that a batch without rows has outputs and gradients without rows, and zeros for
    parameters.
    """
    heads = [torch.randn(2, 0, 3, 4).requires_grad_(), torch.randn(2, 1, 3, 4).requires_grad_()]
    with poisoned():
        turned = rotary.rotary(*heads, X, X)
    assert turned[0].shape == (2, 0, 3, 4) and torch.equal(turned[1], torch.zeros(2, 1, 3, 4))
    x, weight, square = (torch.randn(s).requires_grad_() for s in ((0, 4), (4,), (4, 4)))
    calls = [
        lambda: rms_norm(x, weight, 1e-5),
        lambda: layer_norm(x, weight, weight, 1e-5),
        lambda: swiglu(x, x),
    ]
    calls += [lambda: linear.norm_linear(x, square, weight, (x.detach(), weight, weight, 1e-5))]
    calls += [lambda: linear.dropout_linear(x, square, weight, 0.5, TARGETS[0])]
    if is_interpreted():
        calls.append(lambda: weighted_sum(x, weight))
    for call in calls:
        out = call()
        grads = torch.autograd.grad(out.sum(), (x, weight, square), allow_unused=True)
        assert out.numel() == 0 and grads[0].shape == (0, 4)
        assert all(
            torch.equal(grad, torch.zeros_like(grad)) for grad in grads[1:] if grad is not None
        )


def test_a_batch_may_be_empty(interpreted):
    of_no_rows()
    interpreted(of_no_rows)


def counted(name: str, **options) -> None:
    """Asserts that the operations a step counts for are the formula's."""
    operation: Operation = OPERATIONS[name]
    counts = []
    for function in (lambda *x: operation.ours(*x, **options), operation.formula):
        with FlopCounterMode(display=False) as counter:
            loss_of(function, draw(operation, torch.float32)).backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize("name", ["linear_cross_entropy", "norm_linear", "dropout_linear"])
def test_the_products_are_counted(name, interpreted):
    counted(name)
    interpreted(counted, name)


def linear_gelu_counted() -> None:
    x, weight, bias = torch.randn(5, 8), torch.randn(12, 8), torch.randn(12)
    with FlopCounterMode(display=False) as counter:
        gelu_mlp._linear_gelu(x, weight, bias)
    assert counter.get_total_flops() == 2 * 5 * 8 * 12


def test_the_product_inside_a_kernel_is_counted(interpreted):
    interpreted(linear_gelu_counted)


def far_from_zero(dtype: torch.dtype) -> None:
    """Asserts the limits of the activations and their gradients at the ends of a dtype's range."""
    big = torch.finfo(dtype).max
    ends = torch.tensor(
        [[-big, -big / 3, -1e4, -200.0, -30.0, 0.0, 30.0, 200.0, 1e4, big / 3, big]]
    ).to(dtype)
    slope, value, sums = gelu_mlp._gelu_backward(torch.ones_like(ends), ends)
    expected = (ends > 0).double() + 0.5 * (ends == 0)
    assert torch.equal(slope.double(), expected) and torch.equal(sums.double(), expected[0])
    assert torch.equal(value, ends.clamp(min=0))
    gate = ends.clone().requires_grad_()
    y = swiglu(gate, torch.ones_like(gate))
    (grad,) = torch.autograd.grad(y.sum(), gate)
    torch.testing.assert_close(y, ends.clamp(min=0), rtol=0, atol=1e-10)
    torch.testing.assert_close(grad.double(), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("dtype", fused.DTYPES, ids=str)
def test_activations_have_their_limits_far_from_zero(dtype, interpreted):
    far_from_zero(dtype)
    interpreted(far_from_zero, dtype)


def rows_of_any_size(dtype: torch.dtype) -> None:
    """Asserts that norms of rows as small and as large as squares in fp32 allow are those of
    fp64.
    """
    info = torch.finfo(dtype)
    for size in (0.0, max(1e-15, info.smallest_normal), 1.0, min(1e18, info.max / 4)):
        x = (torch.linspace(-1, 3, 8).expand(2, 8) * size).to(dtype)
        weight = torch.ones(8, dtype=dtype)
        for ours, right in (
            (rms_norm(x, weight, 1e-12), torch.nn.functional.rms_norm(x.double(), (8,), eps=1e-12)),
            (
                layer_norm(x, weight, 0 * weight, 1e-12),
                torch.nn.functional.layer_norm(x.double(), (8,), eps=1e-12),
            ),
        ):
            torch.testing.assert_close(ours.double(), right, rtol=4 * info.eps, atol=4 * info.eps)


@pytest.mark.parametrize("dtype", fused.DTYPES, ids=str)
def test_norms_of_rows_of_any_size(dtype, interpreted):
    rows_of_any_size(dtype)
    interpreted(rows_of_any_size, dtype)
