"""The vision encoder's kernels: the MLP against fp64, dropout's mask, their operators, and that
they compile.
"""

import contextlib
import functools
import math
import re

import pytest
import torch
import torch.nn.functional as F
from conftest import more, off_boundary
from test_kernel_compilation import compile_source, spilled_bytes
from torch import Tensor
from triton.compiler import ASTSource

from labkit.kernels import column_sums, fused, gelu_mlp, linear
from labkit.kernels.flash_attention import qkv as qkv_attention

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def is_interpreted() -> bool:
    torch.set_num_threads(1)
    return fused.IS_INTERPRETED


@contextlib.contextmanager
def poisoned_memory():
    """While it is open, memory that is allocated without values holds NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(3).isnan().all() and torch.ones(2).new_empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def draw(*shape: int, seed: int = 1, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


MLP_SHAPES = [(37, 24, 80), (1, 8, 8), (130, 40, 136)]


def mlp_pairs(
    path: str, keep: bool, shape: tuple[int, int, int], dtype=torch.float32, device="cpu"
):
    """Returns (error against fp64, its budget) of the output and every gradient."""
    num_rows, width, hidden = shape
    shapes = ((num_rows, width), (hidden, width), (hidden,), (width, hidden), (width,))
    tensors = [
        draw(*shape, seed=seed, scale=shape[-1] ** -0.5).to(dtype)
        for seed, shape in enumerate(shapes)
    ]
    tensors[0] = (draw(num_rows, width) * 4).to(dtype)  # both tails of GELU

    def eager(x, w1, b1, w2, b2):
        return F.linear(F.gelu(F.linear(x, w1, b1), approximate="tanh"), w2, b2)

    def results(function, kind, device="cpu") -> list[Tensor]:
        leaves = [tensor.to(device, kind).requires_grad_() for tensor in tensors]
        out = function(*leaves)
        grads = torch.autograd.grad(out, leaves, draw(num_rows, width, seed=9).to(device, kind))
        return [x.detach().double().cpu() for x in (out, *grads)]

    exact, allowed = results(eager, torch.float64), results(eager, dtype, device)
    with poisoned_memory() if device == "cpu" else contextlib.nullcontext():
        ours = results(functools.partial(gelu_mlp.gelu_mlp, path=path, keep=keep), dtype, device)
    pairs = []
    for index, (x, y, z) in enumerate(zip(ours, allowed, exact, strict=True)):
        assert x.isfinite().all()
        band = torch.finfo(dtype).eps / 2 * z.abs().max().item()
        pairs.append(
            ((x - z).abs().max().item(), (3 if index else 2) * ((y - z).abs().max().item() + band))
        )
    return pairs


@pytest.mark.parametrize("shape", MLP_SHAPES, ids=str)
@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("path", gelu_mlp.PATHS[1:])
def test_the_mlp_is_within_the_error_budget(path, keep, shape, interpreted):
    pairs = interpreted(mlp_pairs, path, keep, shape)
    pairs += mlp_pairs("auto", keep, shape) + mlp_pairs("separate", keep, shape, torch.bfloat16)
    assert all(error <= budget for error, budget in pairs), pairs


def mlp_off_boundary(dtype) -> None:
    shapes = ((5, 16), (24, 16), (24,), (16, 24), (16,))
    on = [draw(*shape, seed=seed).to(dtype) for seed, shape in enumerate(shapes)]
    off = [off_boundary(x) for x in on]
    assert all(x.data_ptr() % 16 for x in off)
    assert torch.equal(*(gelu_mlp.gelu_mlp(*tensors, path="epilogue") for tensors in (on, off)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_the_mlp_takes_dense_tensors_that_start_off_a_boundary(dtype, interpreted):
    interpreted(mlp_off_boundary, dtype)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("path", gelu_mlp.PATHS[1:])
def test_on_a_gpu_the_mlp_is_within_the_error_budget(path, dtype):
    if (path, dtype) == ("epilogue", torch.float32):
        with pytest.raises(
            ValueError, match=r"path='epilogue' takes bf16 and fp16; got torch\.float32"
        ):
            mlp_pairs(path, True, MLP_SHAPES[1], dtype, "cuda")
        return
    for shape in (*MLP_SHAPES[1:], (1000, 1152, 4304)):
        for keep in (True, False):
            pairs = mlp_pairs(path, keep, shape, dtype, "cuda")
            assert all(error <= budget for error, budget in pairs), (shape, keep, pairs)


def call_mlp(x=None, path="auto", **parameters):
    shapes = {"fc1_weight": (8, 4), "fc1_bias": (8,), "fc2_weight": (4, 8), "fc2_bias": (4,)}
    given = {name: parameters.get(name, torch.zeros(shape)) for name, shape in shapes.items()}
    return gelu_mlp.gelu_mlp(torch.zeros(3, 4) if x is None else x, *given.values(), path=path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"path": "fast"}, "path must be one of auto, epilogue, separate; got 'fast'"),
        ({"path": "epilogue"}, "path='epilogue' takes tensors on a CUDA device; got cpu"),
        ({"x": torch.zeros(3, 5)}, r"fc1_weight must be of shape \(8, 5\), got \(8, 4\)"),
        ({"x": torch.zeros(0, 4)}, r"x must hold at least one row; got shape \(0, 4\)"),
        ({"x": torch.zeros(3, 4).long()}, "x must be of torch.float32, .*, got torch.int64"),
        ({"fc2_bias": torch.zeros(3)}, r"fc2_bias must be of shape \(4,\), got \(3,\)"),
        (
            {"fc2_weight": torch.zeros(4, 8).half()},
            "fc2_weight must have the dtype of x, torch.float32, got torch.float16",
        ),
        (
            {"fc1_bias": torch.zeros(8, device="meta")},
            "fc1_bias must be on the device of x, cpu, got meta",
        ),
    ],
)
def test_the_mlp_refuses_bad_input(arguments, message):
    with pytest.raises(ValueError, match=message):
        call_mlp(**arguments)


def dropped(shape: tuple[int, int], p: float) -> None:
    """Asserts that the mask is the seed's, the same in backward, and drops the share p."""
    seed = torch.tensor(2**40 + 1)
    with poisoned_memory():
        scaled_mask = linear.seeded_dropout(torch.ones(shape), p, seed)
        leaves = [
            x.requires_grad_() for x in (draw(*shape), draw(8, shape[1], seed=3), draw(8, seed=4))
        ]
        out = linear.dropout_linear(*leaves, p, seed)
        grads = torch.autograd.grad(out, leaves, direction := draw(*out.shape, seed=2))
    x, weight, bias = leaves
    expected = (x * scaled_mask) @ weight.T + bias
    expected_grads = (
        direction @ weight * scaled_mask,
        direction.T @ (x * scaled_mask),
        direction.sum(0),
    )
    for ours, theirs in zip((out, *grads), (expected, *expected_grads), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert set(scaled_mask.unique().tolist()) <= {0.0, torch.tensor(1.0).div(1 - p).item()}
    num = scaled_mask.numel()
    assert abs((scaled_mask == 0).sum().item() - p * num) <= 5 * math.sqrt(p * (1 - p) * num)
    other = linear.seeded_dropout(torch.ones(shape), p, seed + 1)
    assert ((other == 0) & (scaled_mask == 0)).sum().item() <= p * p * num + 5 * p * math.sqrt(num)


@pytest.mark.parametrize(("shape", "p"), [((301, 40), 0.1), ((64, 64), 0.5), ((1, 3), 0.0)])
def test_the_mask_of_dropout_is_its_seeds(shape, p, interpreted):
    interpreted(dropped, shape, p)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"p": 1.0}, "p must be from 0 up to but without 1; got 1.0"),
        ({"x": torch.zeros(3, 5)}, r"x must be of shape \(3, 4\), got \(3, 5\)"),
        ({"seed": torch.tensor(1.0)}, "seed must be one int64 on cpu; got .* torch.float32"),
        (
            {"weight": torch.zeros(2, 4).half()},
            "weight must have the dtype of x, torch.float32, got torch.float16",
        ),
    ],
)
def test_dropout_refuses_bad_input(options, message, interpreted):
    arguments = {
        "x": torch.zeros(3, 4),
        "weight": torch.zeros(2, 4),
        "bias": torch.zeros(2),
        "p": 0.1,
    }
    with pytest.raises(ValueError, match=message):
        interpreted(
            functools.partial(
                linear.dropout_linear, **(arguments | {"seed": torch.tensor(1)} | options)
            )
        )


def added(shape: tuple[int, int], dtype: torch.dtype, device: str = "cpu") -> None:
    """Asserts that columns are added in fp32 and rounded once."""
    x = draw(*shape).to(device, dtype)
    with poisoned_memory():
        sums = column_sums.column_sums(x)
    assert sums.dtype == dtype
    torch.testing.assert_close(
        sums, x.double().sum(0).to(dtype), atol=1e-5, rtol=2 * torch.finfo(dtype).eps
    )


COLUMNS = [(1, 1), (301, 40), (700, 130)]


@pytest.mark.parametrize("shape", COLUMNS, ids=str)
def test_columns_are_added_in_fp32(shape, interpreted):
    for dtype in (torch.float16, torch.float32):
        interpreted(added, shape, dtype)
    added(shape, torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("shape", [*COLUMNS, (16384, 4304)], ids=str)
def test_on_a_gpu_columns_are_added_in_fp32(shape):
    added(shape, torch.bfloat16, "cuda")


def equal_sequences(
    dtype: torch.dtype = torch.float32, length: int = 10, d_head: int = 8, device: str = "cpu"
) -> None:
    """Asserts that sequences of one length get what they get packed, forward and backward."""
    qkv = draw(4 * length, 3, 2, d_head).to(device, dtype).requires_grad_()
    cu_seqlens = torch.arange(0, 4 * length + 1, length, dtype=torch.int32, device=device)
    direction = draw(4 * length, 2, d_head, seed=2).to(device, dtype)
    assert qkv_attention._are_equal(qkv, cu_seqlens, length)
    found = []
    for longest in (
        length,
        length + 1,
    ):  # a longest that no sequence reaches is allowed, and packs them
        out = qkv_attention.flash_attention_qkv(qkv, cu_seqlens, longest)
        found.append((out, *torch.autograd.grad(out, qkv, direction)))
    tolerance = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(*found, rtol=tolerance, atol=tolerance)


def test_equal_sequences_are_a_batch(interpreted):
    interpreted(equal_sequences)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_on_a_gpu_equal_sequences_are_a_batch(dtype):
    equal_sequences(dtype, 256, 72, "cuda")


def test_attention_refuses_a_projection_of_another_shape():
    with pytest.raises(
        ValueError,
        match=r"qkv must be dense, of shape \(tokens, 3, heads, d\); got shape \(4, 2, 1, 8\)",
    ):
        qkv_attention.flash_attention_qkv(torch.zeros(4, 2, 1, 8), torch.tensor([0, 4]))


def opcheck() -> None:
    x, w1, b1 = draw(20, 8), draw(24, 8), draw(24)
    torch.library.opcheck(torch.ops.labkit.linear_gelu.default, (x, w1, b1))
    torch.library.opcheck(
        torch.ops.labkit.gelu_backward.default, (draw(20, 24), draw(20, 24, seed=2))
    )
    torch.library.opcheck(torch.ops.labkit.dropout.default, (x, 0.1, torch.tensor(3)))
    qkv, cu_seqlens = (
        draw(20, 3, 2, 8).requires_grad_(),
        torch.tensor([0, 7, 20], dtype=torch.int32),
    )
    equal = torch.tensor([0, 10, 20], dtype=torch.int32)
    for lengths, longest in ((cu_seqlens, 13), *more((cu_seqlens, None), (equal, 10))):
        torch.library.opcheck(torch.ops.labkit.flash_attention_qkv.default, (qkv, lengths, longest))
    torch.library.opcheck(torch.ops.labkit.column_sums.default, (x,))


def test_the_operators_pass_opcheck(interpreted):
    interpreted(opcheck)


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    # A kernel from the cache would come without what ptxas said.
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def compile_kernel(
    function, constants: dict, types: dict[str, str], capability: int, options: dict
):
    """Returns (compiled kernel, what ptxas said): i32 unless `types` or `constants` name a
    parameter.
    """
    signature = {
        name: "constexpr" if name in constants else types.get(name, "i32")
        for name in function.arg_names
    }
    names = [
        name
        for name in function.arg_names
        if name not in constants and "desc" not in name and name != "p"
    ]
    attributes = {(function.arg_names.index(name),): [["tt.divisibility", 16]] for name in names}
    return compile_source(
        ASTSource(function, signature, constants, attributes), capability, options
    )


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_the_matmul_compiles(capability, empty_cache):
    tile = dict(gelu_mlp.HOPPER if capability == 90 else gelu_mlp.GENERIC)
    options = {name: tile.pop(name) for name in ("num_warps", "num_stages")}
    rows, cols, depth = tile["ROWS"], tile["COLS"], tile["DEPTH"]
    types = dict.fromkeys(("z_desc", "h_desc"), f"tensordesc<bf16{[rows, cols // 2]}>") | {
        "bias_ptr": "*bf16"
    }
    types |= {
        "x_desc": f"tensordesc<bf16{[rows, depth]}>",
        "weight_desc": f"tensordesc<bf16{[cols, depth]}>",
    }
    compiled, log = compile_kernel(gelu_mlp.linear_gelu_kernel, tile, types, capability, options)
    if capability == 90:
        assert spilled_bytes(log) == 0
        # As many programs of a multiprocessor as there are to be: a KiB of each is the system's.
        assert gelu_mlp.PROGRAMS * (compiled.metadata.shared + 1024) <= 228 * 1024
        assert (
            "wgmma.mma_async" in compiled.asm["ptx"]
            and "cp.async.bulk.tensor" in compiled.asm["ptx"]
        )


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_the_elementwise_kernels_compile_without_spilling(capability, empty_cache):
    blocks = {"BLOCK_M": gelu_mlp.BLOCK_M, "STEP_M": gelu_mlp.STEP_M, "BLOCK_F": gelu_mlp.BLOCK_F}
    types = {
        name: "*bf16" for name in ("grad_h_ptr", "z_ptr", "grad_z_ptr", "h_ptr", "x_ptr", "out_ptr")
    }
    types |= {"sums_ptr": "*fp32", "seed_ptr": "*i64", "p": "fp32"}
    run = {"RUN": linear.RUN, "ROUNDS": linear.ROUNDS}
    # 16 bytes a thread, steps ahead to shared memory or to registers.
    ahead, now = (
        r"cp\.async\.cg\.shared\.global \[.*\], \[.*\], 0x10",
        r"ld\.global(\.\w+)*\.v4\.b32",
    )
    for function, constants, load in (
        (gelu_mlp.gelu_bwd_kernel, blocks, ahead),
        (linear.dropout_kernel, run, now),
    ):
        compiled, log = compile_kernel(function, constants, types, capability, {"num_warps": 4})
        assert spilled_bytes(log) == 0
        assert re.search(load, compiled.asm["ptx"])
