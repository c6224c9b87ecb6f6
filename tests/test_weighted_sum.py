"""The weighted sum in Triton against fp64, interpreted on the CPU in a worker process and compiled
on a GPU.
"""

import math

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from labkit.kernels import weighted_sum as ws
from labkit.kernels.weighted_sum import weighted_sum

# Lengths on both sides of a tile, in both dimensions, and of several leading dimensions.
SHAPES = [(1, 1), (16, 256), (17, 257), (15, 255), (3, 5, 40), (2, 513), (100, 3), (300,), (0, 7)]


def is_interpreted() -> bool:
    return type(ws.weighted_sum_fwd_kernel).__name__ == "InterpretedFunction"


def draw(
    shape: tuple[int, ...], dtype: torch.dtype, layout: str, device: str
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator).to(dtype).to(device)
    weight = torch.randn(shape[-1], generator=generator).to(dtype).to(device)
    grad_y = torch.randn(shape[:-1], generator=generator).to(dtype).to(device)
    if layout == "transposed":
        x = x.transpose(0, -1).contiguous().transpose(0, -1)
    elif layout == "sliced":
        x, weight = (y.repeat_interleave(2, dim=-1)[..., ::2] for y in (x, weight))
    elif layout == "expanded":
        grad_y = torch.ones((), dtype=dtype, device=device).expand(grad_y.shape)
    return x, weight, grad_y


def results(function, x: Tensor, weight: Tensor, grad_y: Tensor) -> tuple[Tensor, ...]:
    leaves = [y.detach().requires_grad_() for y in (x, weight)]
    out = function(*leaves)
    return out.detach(), *torch.autograd.grad(out, leaves, grad_y)


def eager(x: Tensor, weight: Tensor) -> Tensor:
    return (x * weight).sum(-1)


def measure(
    shape, dtype: torch.dtype, layout: str, device: str = "cpu"
) -> list[tuple[float, float]]:
    """Returns (error, budget) of the output and both gradients: twice eager's error and a rounding
    of the largest.
    """
    tensors = draw(shape, dtype, layout, device)
    ours = results(weighted_sum, *tensors)
    same_dtype = results(eager, *tensors)
    exact = results(eager, *(x.double() for x in tensors))
    pairs = []
    for x, y, z in zip(ours, same_dtype, exact, strict=True):
        assert x.dtype == dtype and x.shape == z.shape
        if z.numel() == 0:
            continue
        assert torch.isfinite(x).all()
        band = torch.finfo(dtype).eps / 2 * z.abs().max().item()
        pairs.append(((x - z).abs().max().item(), 2 * ((y - z).abs().max().item() + band)))
    return pairs


def check(pairs: list[tuple[float, float]]) -> None:
    assert all(error <= budget for error, budget in pairs), pairs


CASES = [(shape, "contiguous") for shape in SHAPES]
CASES += [((17, 40), layout) for layout in ("transposed", "sliced", "expanded")] + [
    ((3, 5, 40), "transposed")
]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "layout"), CASES, ids=str)
def test_it_is_within_twice_the_error_of_eager(shape, layout, dtype, interpreted):
    check(interpreted(measure, shape, dtype, layout))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "layout"), [*CASES, ((4099, 4097), "contiguous")], ids=str)
def test_compiled_it_is_within_twice_the_error_of_eager(shape, layout, dtype):
    check(measure(shape, dtype, layout, "cuda"))


def outside_is_untouched() -> bool:
    """Whether NaN beyond both tails reaches no sum, and writes stay inside, for rows and columns
    inside a tile.
    """
    storage = torch.full((40, 300), math.nan)
    x, weight = storage[:17, :19], torch.full((300,), math.nan)[:19]
    x.fill_(1.0)
    weight.fill_(2.0)
    y = ws.weighted_sum_forward(x, weight)
    grad_x, grad_weight = ws.weighted_sum_backward(x, weight, torch.ones(17))
    inside = torch.isfinite(storage).sum().item() == 17 * 19
    return (
        inside
        and (y == 38).all().item()
        and (grad_x == 2).all().item()
        and (grad_weight == 17).all().item()
    )


def test_nothing_beyond_the_tails_is_read_or_written(interpreted):
    assert interpreted(outside_is_untouched)


def numerical_gradients() -> bool:
    torch.manual_seed(0)
    x, weight = torch.randn(5, 7, requires_grad=True), torch.randn(7, requires_grad=True)
    return torch.autograd.gradcheck(weighted_sum, (x, weight), eps=1e-2, atol=1e-3, rtol=1e-3)


@pytest.mark.filterwarnings("ignore:Input #")
def test_the_gradients_are_the_numerical_ones(interpreted):
    assert interpreted(numerical_gradients)


def opcheck() -> None:
    x, weight = torch.randn(5, 7, requires_grad=True), torch.randn(7, requires_grad=True)
    torch.library.opcheck(ws.weighted_sum_forward.op, (x, weight))
    torch.library.opcheck(
        ws.weighted_sum_backward.op, (x.detach().T, weight.detach()[:5], torch.randn(14)[::2])
    )


def test_the_operators_are_what_their_schemas_say(interpreted):
    interpreted(opcheck)


@pytest.mark.skipif(ws.runs_kernel(torch.zeros(1)), reason="interpreted kernels are not traced")
def test_the_compiler_sees_the_kernels_inside():
    with FakeTensorMode(), torch.no_grad():
        x, weight = torch.empty(64, 768, device="cuda"), torch.empty(768, device="cuda")
        for operator, arguments in (
            (ws.weighted_sum_forward, (x, weight)),
            (ws.weighted_sum_backward, (x, weight, weight.new_empty(64))),
        ):
            graph = make_fx(operator.function)(*arguments)
            assert "triton_kernel_wrapper_mutation" in [
                str(node.target) for node in graph.graph.nodes
            ]


@pytest.mark.parametrize(
    ("x", "weight", "message"),
    [
        (torch.zeros(3, 4), torch.zeros(5), r"weight must be of shape \(4,\), got \(5,\)"),
        (torch.zeros(3, 4), torch.zeros(4, 1), r"weight must be of shape \(4,\)"),
        (
            torch.zeros(3, 4),
            torch.zeros(4).half(),
            "weight must have the dtype of x, torch.float32, got torch.float16",
        ),
        (
            torch.zeros(3, 4).long(),
            torch.zeros(4).long(),
            "x must be of torch.float32, .*, got torch.int64",
        ),
        (
            torch.zeros(3, 4),
            torch.zeros(4, device="meta"),
            "weight must be on the device of x, cpu, got meta",
        ),
        (
            torch.zeros(3, 0),
            torch.zeros(0),
            r"the last dimension of x must not be empty, got shape \(3, 0\)",
        ),
        (torch.zeros(3, 4), torch.zeros(4), "x must be a CUDA tensor"),
    ],
)
def test_bad_input_is_refused(x, weight, message):
    with pytest.raises(ValueError, match=message):
        weighted_sum(x, weight)
