"""Every shipped configuration of the attention kernels compiles for its GPUs, without one, and
within their limits; so does every other kernel.

By itself a test compiles what takes another branch, and with LABKIT_ALL_TESTS=1 every shipped tile.
Triton compiles ahead of time down to the binary; ptxas reports registers, spills and serialised
matrix products (notes C7510–C7515), which cost a tuned kernel more than any tile size gains.
"""

import contextlib
import functools
import io
import re
import types
from unittest import mock

import pytest
import sass
import torch
import triton
from conftest import more
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from labkit.kernels import (
    adamw,
    column_sums,
    cross_entropy,
    fused,
    gelu_mlp,
    launch,
    linear,
    norms,
    rotary,
    swiglu,
    weighted_sum,
)
from labkit.kernels.flash_attention import plan, splits, tiles
from labkit.kernels.flash_attention import triton as kernels
from labkit.kernels.flash_attention.hopper import forward, one_pass, two_passes
from labkit.kernels.flash_attention.hopper import tiles as hopper_tiles
from labkit.kernels.flash_attention.tiles import TILES, AttentionConfig, TileConfig
from labkit.kernels.layer_norm import layer_norm
from labkit.kernels.rms_norm import rms_norm

# Bytes of shared memory that one program may take, by compute capability.
SHARED_LIMIT = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376}
# Up to 15 registers of a thread, of dK/dV of six products at D 32.
SLICES_SPILL_LIMIT = 0 if triton.__version__.startswith("3.6.") else 2 * 15 * 4
# The head dimensions that are to be efficient, with a mask and without where they are a power of
# two and common; 80 is 72 with a tail that needs no mask.
TUNED = [(16, True), (32, True), (64, False), (72, True), (96, True), (128, False), (128, True)]
# The tiles are tuned with triton 3.6, the release of torch 2.11, where none spills. The ptxas of
# later releases places registers otherwise: at D 128, on the edge of 255 registers, up to 12 of a
# thread's go to memory and back.
SPILL_LIMIT = 0 if triton.__version__.startswith("3.6.") else 2 * 12 * 4
# The backward in one pass holds all accumulators at once, on the edge of 240 registers. At D 64,
# with tiles of 128 queries, triton 3.6 has no register for up to 22 values (4 bytes, stored and
# loaded), and at D 128 for up to 10: most are a walk's at its begin and end, not its loop's. The
# ptxas of later releases lacks up to 70 and 36.
VALUES = {64: 22, 128: 10} if triton.__version__.startswith("3.6.") else {64: 70, 128: 36}
SINGLE_SPILL_LIMIT = {head_dim: 2 * values * 4 for head_dim, values in VALUES.items()}
SERIALISED = re.compile(r"\(C751[0-5]\)")

KERNELS = ("forward", "dkdv", "dq")

OTHER_MODULES = (
    adamw,
    column_sums,
    cross_entropy,
    gelu_mlp,
    linear,
    norms,
    rotary,
    swiglu,
    weighted_sum,
)
OTHER_KERNELS = {
    name: value
    for module in OTHER_MODULES
    for name, value in vars(module).items()
    if isinstance(value, triton.JITFunction) and name.endswith("_kernel")
}

pytestmark = pytest.mark.skipif(
    kernels.IS_INTERPRETED, reason="interpreted kernels are not compiled"
)


def compile_plan(
    capability: int,
    head_dim: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    causal: bool = False,
    precision: str = "ieee",
    even: bool = True,
    packed: bool = False,
    num_splits: int = 1,
    config: AttentionConfig | None = None,
    only: tuple[str, ...] = KERNELS,
) -> dict[str, tuple]:
    """Returns the (compiled kernel, what ptxas said), by name, of what a plan launches forward and
    backward for dense tensors of a device that is not there: KERNELS, or `only` these.
    """
    found = {}

    def compile_launch(launched, *arguments) -> None:
        name = launched.kernel.__name__
        if "OF_KEYS" in launched.constants:
            name = "dkdv" if launched.constants["OF_KEYS"] else "dq"
        name = "forward" if name == "flash_attention_fwd_kernel" else name
        if name in only:
            warm = launched.kernel.warmup
            options = {"grid": launched.grid, **launched.constants}
            found[name] = logged(lambda: warm(*arguments, *launched.numbers, **options))

    length = 1024 if even else 1000
    shape = (length, 2, head_dim) if packed else (2, 2, length, head_dim)
    q, k, v = (torch.empty(shape, dtype=dtype, device="meta") for _ in range(3))
    cu_seqlens = (torch.empty(4, dtype=torch.int32, device="meta"),) * 2 if packed else ()

    def on_meta(x: plan.Layout) -> torch.Tensor:
        return torch.empty_strided(x.shape, x.strides, dtype=x.dtype, device="meta")

    device = torch.device("cuda", 0)
    with (
        device_of(capability),
        mock.patch.object(launch.Launch, "__call__", compile_launch),
        mock.patch.object(plan, "capability_of", lambda _: capability),
        mock.patch.object(tiles, "capability_of", lambda _: capability),
        mock.patch.object(plan, "forward_splits", lambda *_: num_splits),
        mock.patch.object(plan.Layout, "empty", on_meta),
    ):
        layouts = (plan.layout_of(x)._replace(device=device) for x in (q, k, v))
        lengths = tuple(map(plan.layout_of, cu_seqlens)) or None
        right = 0 if causal else -1
        call = plan.Call(*layouts, lengths, None, -1, right, precision, "triton", config)
        whole = plan.Plan(call)
        out, lse = whole.forward(q, k, v, *cu_seqlens)
        whole.backward(torch.empty_like(q), q, k, v, out, lse, *cu_seqlens)
    return found


def device_of(capability: int):
    """Has Triton compile for a device that is not there."""
    driver = types.SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", capability, 32),
        # Triton keeps kernels by the number of the device.
        get_current_device=lambda: capability,
        get_current_stream=lambda _: 0,
    )
    return mock.patch.object(triton.runtime.driver, "_active", driver)


def logged(compile_it) -> tuple:
    """Returns what a function returns, and what ptxas said meanwhile."""
    with contextlib.redirect_stdout(io.StringIO()) as log, triton.knobs.nvidia.scope():
        triton.knobs.nvidia.dump_ptxas_log = True
        return compile_it(), log.getvalue()


def compile_source(source, capability: int, options: dict):
    target = GPUTarget("cuda", capability, 32)
    return logged(lambda: triton.compile(source, target=target, options=options))


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    # A kernel from the cache would come without what ptxas said.
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for kernel in (
        kernels.flash_attention_fwd_kernel,
        kernels.flash_attention_bwd_kernel,
        kernels.flash_attention_bwd_delta_kernel,
        kernels.attention_slices_kernel,
        splits.attention_combine_kernel,
        *OTHER_KERNELS.values(),
    ):
        kernel.device_caches.clear()


def spilled_bytes(log: str) -> int:
    """Returns the bytes that ptxas spills; a log without the figure is an error, never a zero."""
    figures = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    assert figures, f"ptxas reported no spills figure: {log!r}"
    return sum(int(stores) + int(loads) for stores, loads in figures)


def check_limits(compiled, log: str, most_spilled: int) -> None:
    """Asserts that a kernel for Hopper keeps to what it may spill and share, and serialises no
    product.
    """
    assert spilled_bytes(log) <= most_spilled
    assert not SERIALISED.search(log), SERIALISED.search(log)
    assert compiled.metadata.shared <= SHARED_LIMIT[90]


def check_tuned(compiled, log: str) -> None:
    check_limits(compiled, log, SPILL_LIMIT)
    assert "wgmma.mma_async" in compiled.asm["ptx"]
    # The loads of the loop are vectors: cp.async takes at least 4 bytes, so that single elements
    # would go without it.
    assert re.search(r"cp\.async\.c[ag]\.shared\.global", compiled.asm["ptx"])


@pytest.mark.parametrize(
    ("head_dim", "options", "only"),
    [
        (64, {"causal": True}, ("forward", "dq")),
        # Lengths that fill no tile.
        (72, {"even": False}, ("dkdv",)),
        (72, {"packed": True}, ("forward",)),
        *more(
            *((head_dim, {"causal": causal}, KERNELS) for head_dim, causal in TUNED),
            (128, {"causal": True, "packed": True}, KERNELS),
            # Split-K, at a head dimension that the Hopper kernels leave to this one.
            (32, {"causal": True, "num_splits": 3}, ("forward",)),
        ),
    ],
    ids=str,
)
def test_tuned_tiles_on_hopper_neither_spill_nor_serialise(head_dim, options, only):
    found = compile_plan(90, head_dim, only=only, **options)
    assert set(found) == set(only)
    for compiled, log in found.values():
        check_tuned(compiled, log)


def test_tiles_keep_clear_of_what_triton_miscompiles():
    for (family, arithmetic), rows in TILES.items():
        for width, shipped in rows.items():
            block, tail = kernels.split_head_dim(width)
            if arithmetic == "bf16x6" and tail:
                assert min(tile.num_stages for tile in shipped) > 1, "a tail is not loaded ahead"
            for kernel, tile in zip(KERNELS, shipped, strict=True):
                if (family, arithmetic) != ("hopper", "tf32"):
                    continue
                # 64 rows by 16 columns each of two warpgroups would take eight columns.
                rows, inner = (tile.block_q, tile.block_k)
                if kernel == "dkdv":
                    rows, inner = inner, rows
                columns = [n for n in (inner, block, tail) if n]
                assert tile.num_warps == 4 or rows != 64 or min(columns) > 16, (width, kernel)


def products(arithmetic: str, width: int) -> list[str]:
    """Returns the products that run with a row's tiles."""
    if arithmetic == "fp32":
        return ["ieee", "tf32"] if width > 128 else ["ieee"]
    return {"tf32": ["tf32", "tf32x3"], "16-bit": ["ieee"]}.get(arithmetic, [arithmetic])


@pytest.mark.parametrize(
    ("family", "arithmetic", "capability", "width"),
    [
        ("any", "16-bit", 86, 64),
        ("any", "16-bit", 120, 64),
        ("hopper", "bf16x6", 90, 64),
        *more(
            *(
                (family, arithmetic, capability, width)
                for (family, arithmetic), rows in TILES.items()
                for capability in SHARED_LIMIT
                for width in rows
                if (family == "any") == (capability != 90)
            )
        ),
    ],
)
def test_every_shipped_tile_compiles_and_fits(family, arithmetic, capability, width):
    """Of a row at its widest head dimension."""
    shipped = TILES[family, arithmetic][width]
    dtype = torch.float16 if arithmetic == "16-bit" else torch.float32
    for precision in products(arithmetic, width):
        options = {"precision": precision, "config": AttentionConfig(*shipped)}
        packed = family.endswith("packed")
        found = compile_plan(capability, width, dtype, packed=packed, **options)
        for kernel, (compiled, log) in found.items():
            where = (kernel, width, precision)
            assert compiled.metadata.shared <= SHARED_LIMIT[capability], where
            # True fp32 at D 128 and the untuned D 256 may spill a little; kilobytes mean a tile
            # of the wrong size.
            unspilled = 96 if arithmetic == "16-bit" else 64
            limit = SLICES_SPILL_LIMIT if arithmetic == "bf16x6" else SPILL_LIMIT
            limit = limit if width <= unspilled and family != "any" else 4096
            assert spilled_bytes(log) <= limit, (*where, spilled_bytes(log))


@pytest.mark.parametrize("head_dim", [72, *more(16, 128, 256)])
def test_the_kernels_around_them_do_not_spill(head_dim):
    around = ("flash_attention_bwd_delta_kernel", "attention_slices_kernel")
    around += ("attention_combine_kernel",)
    precision = "bf16x6" if head_dim <= 128 else "ieee"
    options = {"precision": precision, "num_splits": 3, "only": around}
    found = compile_plan(90, head_dim, torch.float32, **options)
    assert len(found) == (3 if precision == "bf16x6" else 2)
    for name, (_, log) in found.items():
        assert spilled_bytes(log) == 0, name
    # Several splits are on their way at once.
    assert "cp.async" in found["attention_combine_kernel"][0].asm["ptx"]


def run_other_operations(dtype: torch.dtype, width: int) -> None:
    """Runs every other operation and its gradients, and a step of AdamW, on rows of `width`."""

    def some(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, requires_grad=True)

    x, weight, bias = some(64, width), some(width), some(width)
    targets = torch.zeros(64, dtype=torch.int64)
    angles = torch.zeros(64, 64)
    seed = torch.zeros((), dtype=torch.int64)
    outputs = [
        rms_norm(x, weight, 1e-5),
        *rms_norm(x, weight, 1e-5, some(64, width)),
        layer_norm(x, weight, bias, 1e-5),
        *layer_norm(x, weight, bias, 1e-5, some(64, width)),
        swiglu.swiglu(x, some(64, width)),
        *rotary.rotary(some(1, 2, 64, 64), some(1, 2, 64, 64), angles, angles),
        cross_entropy.cross_entropy(x, targets),
        cross_entropy.linear_cross_entropy(some(64, 64), some(width, 64), targets),
        weighted_sum.weighted_sum(x, weight),
        gelu_mlp.gelu_mlp(some(64, 64), some(width, 64), bias, some(64, width), some(64)),
        linear.dropout_linear(some(64, 64), some(width, 64), bias, 0.1, seed),
    ]
    torch.stack([output.float().sum() for output in outputs]).sum().backward()
    adamw.FusedAdamW([x]).step()


@pytest.mark.parametrize(
    ("capability", "dtype", "width"),
    [
        *((capability, torch.bfloat16, 2560) for capability in (86, 90, 120)),
        *more(
            *(
                (capability, dtype, width)
                for capability in SHARED_LIMIT
                for dtype in (torch.float32, torch.float16)
                # The widest whose rows are loaded ahead in backward, and the widest of all.
                for width in (256, 8192, norms.MAX_COLUMNS)
            )
        ),
    ],
)
def test_every_other_kernel_compiles_and_fits(monkeypatch, capability, dtype, width):
    found = {}

    def compile_only(kernel, grid, *arguments, **constants) -> None:
        compiled, log = logged(lambda: kernel.warmup(*arguments, grid=grid, **constants))
        if log:  # not where the same was compiled before
            found.setdefault(kernel.__name__, []).append((compiled, log))

    # On tensors of a CPU, whose results are not looked at.
    for module in OTHER_MODULES:
        monkeypatch.setattr(module, "runs_kernel", lambda x: x.dtype in fused.DTYPES, False)
        monkeypatch.setattr(module, "num_multiprocessors", lambda _: 100, False)
    has_epilogue = capability == 90 and dtype.itemsize == 2
    monkeypatch.setattr(gelu_mlp, "_has_epilogue", lambda *_: has_epilogue)
    monkeypatch.setattr(
        launch.Launcher,
        "launch",
        lambda launcher, *rest, **constants: compile_only(launcher.kernel, *rest, **constants),
    )
    monkeypatch.setattr(
        triton.JITFunction,
        "__getitem__",
        lambda kernel, grid: functools.partial(compile_only, kernel, grid),
    )
    with device_of(capability):
        run_other_operations(dtype, width)
    left_out = set() if has_epilogue else {"linear_gelu_kernel"}
    assert found.keys() == OTHER_KERNELS.keys() - left_out
    for name, compiled_and_log in found.items():
        for compiled, log in compiled_and_log:
            assert compiled.metadata.shared <= SHARED_LIMIT[capability], name
            # The longest rows of all do not fit in registers.
            limit = 4096 if width == norms.MAX_COLUMNS else 0
            assert spilled_bytes(log) <= limit, name


def compile_gluon(function, dtype, constants, consumers, *, inner, rows):
    """Compiles a Gluon kernel: its `inner` tiles have so many `rows`, all others those of a
    warpgroup.
    """
    launch = hopper_tiles.launch_options(consumers)
    constants = {**constants, **launch}

    def kind(name: str) -> str:
        if name in constants:
            return "constexpr"
        if name in ("lse_desc", "delta_desc") or (
            name in ("lse", "delta") and constants["OWN_KEYS"]
        ):
            return f"tensordesc<fp32[{rows}],{hopper_tiles.fp32_layout(1)!r}>"
        if name.startswith("dq_accum"):
            num_rows = constants["TAIL"] // 4 if "tail" in name else 16
            return f"tensordesc<fp32[{num_rows}, 256],{hopper_tiles.fp32_layout(2)!r}>"
        if name.endswith("_desc"):
            is_tail = name.endswith("_tail_desc")
            num_rows = rows if name.replace("_tail", "") in inner else hopper_tiles.ROWS
            num_columns = constants["TAIL" if is_tail else "D"]
            layout = hopper_tiles.tile_layout(num_columns)
            return f"tensordesc<{dtype}{[1, 1, num_rows, num_columns]},{layout!r}>"
        if name.endswith("_ptr") or name in ("lse", "delta"):
            return "*i32" if name in ("dq_semaphore_ptr", "tile_counter_ptr") else "*fp32"
        return "fp32" if name.startswith("scale") else "i32"

    signature = {name: kind(name) for name in function.arg_names}
    indexed = {
        (i,): constants[name] for i, name in enumerate(function.arg_names) if name in constants
    }
    source = GluonASTSource(function, signature, indexed)
    return compile_source(source, 90, {name: launch[name] for name in ("num_warps", "maxnreg")})


def compile_single(head_dim, dtype, *, causal, even):
    """Returns (compiled kernel, what ptxas said) of the backward in one pass."""
    block_q = one_pass.BLOCK_Q[head_dim]
    tail = hopper_tiles.TAILS[head_dim]
    constants = {"D": 64 if tail else head_dim, "TAIL": tail, "CAUSAL": causal, "EVEN_K": even}
    constants["BLOCK_Q"] = block_q
    if not tail:
        names = one_pass.hopper_bwd_single_kernel.arg_names
        constants |= dict.fromkeys(name for name in names if "_tail" in name)
    inner = ("q_desc", "grad_out_desc")
    return compile_gluon(
        one_pass.hopper_bwd_single_kernel, dtype, constants, 2, inner=inner, rows=block_q
    )


# Every release of Triton since 3.6 loads and compiles these: a test of the one that is installed.
HOPPER_KERNELS = {
    "forward": (forward.hopper_fwd_kernel, ("k_desc", "v_desc")),
    "dkdv": (two_passes.hopper_bwd_kernel, ("x_desc", "y_desc")),
    "dq": (two_passes.hopper_bwd_kernel, ("x_desc", "y_desc")),
}


def tiles_of(kernel: str, head_dim: int, causal: bool, short: bool) -> dict:
    if kernel == "forward":
        return (forward.FORWARD_SHORT if short else forward.FORWARD)[head_dim]
    length = two_passes.SHORT + (not short)
    return two_passes.tiles(head_dim, length, own_keys=kernel == "dkdv", causal=causal)


def compile_hopper(
    kernel,
    head_dim,
    dtype,
    *,
    causal,
    even=True,
    grouped=False,
    short=False,
    split_k=False,
    dynamic=True,
):
    """Returns (compiled kernel, what ptxas said) of a shipped configuration."""
    function, inner = HOPPER_KERNELS[kernel]
    tiles = tiles_of(kernel, head_dim, causal, short)
    tail = hopper_tiles.TAILS[head_dim]
    constants = {
        "D": 64 if tail else head_dim,
        "TAIL": tail,
        "CAUSAL": causal,
        "EVEN_K": even,
        "GROUPED": grouped,
        "OWN_KEYS": kernel == "dkdv",
        **tiles,
        "DYNAMIC": dynamic and causal and not split_k,
        "SPLIT_K": split_k,
    }
    absent = [] if tail else [name for name in function.arg_names if name.endswith("_tail_desc")]
    absent += [] if kernel == "dkdv" else ["grad_y_desc", "grad_y_tail_desc"]
    absent += ["tile_counter_ptr"] * (not constants["DYNAMIC"]) + ["parts_ptr"] * (not split_k)
    constants |= dict.fromkeys(absent)
    rows = tiles.get("BLOCK_K") or tiles["BLOCK"]
    consumers = tiles.get("CONSUMERS", 2)
    return compile_gluon(function, dtype, constants, consumers, inner=inner, rows=rows)


def check_gluon(compiled, log: str, most_spilled: int) -> None:
    assert not sass.misread_descriptors(sass.disassemble(compiled.asm["cubin"]))
    check_limits(compiled, log, most_spilled)
    for instruction in ("wgmma.mma_async", "cp.async.bulk.tensor", "setmaxnreg"):
        assert instruction in compiled.asm["ptx"], instruction


LOOPS = """
        /*0000*/                   UIADD3 UR6, UR9, 0x80, URZ ;
        /*0010*/                   UMOV UR7, 0x40000040 ;
{before}
        /*0040*/               @P0 BRA `(.L_x_2) ;
{behind}
.L_x_1:
        /*0070*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24 ;
        /*0080*/               @P1 BRA `(.L_x_1) ;
.L_x_2:
        /*0090*/                   HGMMA.64x64x16.F32.BF16 R88, R120, gdesc[UR4].tnspB, R88 ;
{again}
        /*00a0*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24, gsb0 ;
        /*00b0*/                   EXIT ;
"""
LEFT = """        /*0020*/                   UIADD3 UR4, UR8, 0x2, URZ ;
        /*0030*/                   UMOV UR5, 0x40000040 ;"""


@pytest.mark.parametrize(
    ("before", "behind", "again", "misread"),
    [
        (LEFT, "", "", 0),
        ("", LEFT, LEFT, 0),
        # Where the first loop is passed over nothing is there, or something else.
        ("", LEFT, "", 1),
        (LEFT.replace("UR8", "UR10"), LEFT, "", 1),
        ("", "", "", 2),
    ],
    ids=["before both", "before each", "before one", "stale", "nowhere"],
)
def test_descriptors_that_a_path_leaves_out_are_found(before, behind, again, misread):
    text = LOOPS.format(before=before, behind=behind, again=again)
    assert len(sass.misread_descriptors(text)) == misread


CAUSAL = {"causal": True}
FULL = {"causal": False}
OTHER = {"causal": False, "even": False, "grouped": True}
SHORT = {"even": False, "short": True}
SPLIT_K = {"causal": False, "even": False, "split_k": True}


@pytest.mark.parametrize(
    ("kernel", "head_dim", "dtype", "options"),
    [
        ("forward", 72, "bf16", CAUSAL),
        ("forward", 96, "bf16", SPLIT_K),
        ("dkdv", 72, "bf16", CAUSAL | {"grouped": True}),
        ("dq", 72, "bf16", FULL),
        *more(
            *(
                (kernel, *case)
                for kernel in HOPPER_KERNELS
                for case in (
                    (64, "bf16", CAUSAL),
                    (64, "fp16", FULL),
                    (80, "fp16", OTHER),
                    (96, "bf16", FULL),
                    (128, "bf16", CAUSAL),
                    (128, "fp16", OTHER),
                )
            ),
            ("forward", 64, "bf16", FULL | SHORT),
            ("forward", 64, "bf16", CAUSAL | SHORT | {"dynamic": False}),
            ("forward", 64, "bf16", SPLIT_K),
            ("dkdv", 96, "bf16", FULL | SHORT),
            ("dq", 96, "bf16", FULL | SHORT),
        ),
    ],
    ids=str,
)
def test_hopper_kernels_neither_spill_nor_serialise(kernel, head_dim, dtype, options, request):
    is_low = triton.__version__.startswith("3.6.")
    if (kernel, head_dim) == ("forward", 64) and options is CAUSAL and not is_low:
        # A known shortfall: with tiles taken from a counter ptxas of later releases moves 13
        # registers, not 12.
        request.applymarker(
            pytest.mark.xfail(strict=True, reason="104 bytes spilled; 96 are allowed")
        )
    compiled, log = compile_hopper(kernel, head_dim, dtype, **options)
    # Of dK/dV at 64 with two sets of own rows, two values.
    limit = 16 if (kernel, head_dim, options["causal"]) == ("dkdv", 64, False) else 0
    is_loose = options is OTHER or (head_dim == 64 and "short" in options)
    check_gluon(compiled, log, 64 if is_loose else max(limit, SPILL_LIMIT))
    # No product is padded: 64 or 128 columns, and those of the tail.
    widths = {int(n) for n in re.findall(r"wgmma\.mma_async\S*\.m64n(\d+)k16", compiled.asm["ptx"])}
    tiles = tiles_of(kernel, head_dim, options["causal"], "short" in options)
    tail = hopper_tiles.TAILS[head_dim]
    columns = {64, tail} if tail else {head_dim}
    assert widths == columns | {tiles.get("BLOCK_K") or tiles["BLOCK"]}


@pytest.mark.parametrize(
    ("head_dim", "dtype", "causal", "even"),
    [
        (128, "fp16", True, True),
        (72, "bf16", True, True),
        *more(
            (64, "fp16", False, False),
            (64, "bf16", True, True),
            (96, "fp16", False, False),
            (128, "bf16", False, True),
        ),
    ],
)
def test_the_single_pass_spills_next_to_nothing_and_does_not_serialise(
    head_dim, dtype, causal, even
):
    compiled, log = compile_single(head_dim, dtype, causal=causal, even=even)
    check_gluon(compiled, log, SINGLE_SPILL_LIMIT.get(head_dim, SPILL_LIMIT))
    assert "cp.reduce.async.bulk.tensor" in compiled.asm["ptx"]


def test_the_hopper_kernels_load_with_the_installed_triton():
    assert tiles.not_loading() is None
    tables = (forward.FORWARD, forward.FORWARD_SHORT, two_passes.DKDV, two_passes.DQ)
    for table in (*tables, one_pass.BLOCK_Q, hopper_tiles.TAILS):
        assert set(table) == set(tiles.GLUON_HEAD_DIMS)


def test_the_limits_refuse_a_tile_that_is_too_large():
    config = AttentionConfig(*[TileConfig(128, 128, 4, 2)] * 3)
    options = {"precision": "tf32x3", "config": config, "only": ("forward",)}
    ((compiled, log),) = compile_plan(90, 64, torch.float32, **options).values()
    with pytest.raises(AssertionError):
        check_limits(compiled, log, SPILL_LIMIT)
