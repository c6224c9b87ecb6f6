"""Every shipped configuration of the attention kernels compiles for its GPUs, without one, and
within their limits.

By itself a test compiles what takes another branch, and with LABKIT_ALL_TESTS=1 every shipped tile.
Triton compiles ahead of time down to the binary; ptxas reports registers, spills and serialised
matrix products (notes C7510–C7515), which cost a tuned kernel more than any tile size gains.
"""

import contextlib
import io
import itertools
import re

import pytest
import sass
import torch
import triton
from conftest import ALL_TESTS, more
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from labkit.kernels.flash_attention import choice, launches, splits
from labkit.kernels.flash_attention import triton as kernels
from labkit.kernels.flash_attention.hopper import forward, one_pass, two_passes
from labkit.kernels.flash_attention.hopper import tiles as hopper_tiles

KERNELS = {
    "forward": kernels.flash_attention_fwd_kernel,
    "dkdv": kernels.flash_attention_bwd_dkdv_kernel,
    "dq": kernels.flash_attention_bwd_dq_kernel,
}
# Bytes of shared memory that one program may take: Hopper, and the least of the devices since
# Ampere.
SHARED_LIMIT = {90: 232448, 80: 101376}
FAMILY = {80: "generic", 90: "hopper", 100: "generic"}
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# The head dimensions that are to be efficient, with a mask and without where they are a power of
# two and common; 80 is 72 with a tail that needs no mask.
TUNED = (
    (16, True),
    (32, True),
    (64, False),
    (64, True),
    (72, True),
    (96, True),
    (128, False),
    (128, True),
)
# The tiles are tuned with triton 3.6, the release of torch 2.11, where none spills. The ptxas of
# later releases places registers otherwise: at D 128, on the edge of 255 registers, up to 12 of a
# thread's go to memory and back.
SPILL_LIMIT = 0 if triton.__version__.startswith("3.6.") else 2 * 12 * 4
# dK/dV and dQ as one kernel, and dK/dV of six products at D 32: up to 15.
FULL_SPILL_LIMIT = 0 if triton.__version__.startswith("3.6.") else 2 * 15 * 4
# The backward in one pass holds all accumulators at once, on the edge of 240 registers. At D 64,
# with tiles of 128 queries, triton 3.6 has no register for up to 22 values (4 bytes, stored and
# loaded), and at D 128 for up to 10: most are a walk's at its begin and end, not its loop's. The
# ptxas of later releases lacks up to 70 and 36.
VALUES = {64: 22, 128: 10} if triton.__version__.startswith("3.6.") else {64: 70, 128: 36}
SINGLE_SPILL_LIMIT = {head_dim: 2 * values * 4 for head_dim, values in VALUES.items()}
SERIALISED = re.compile(r"\(C751[0-5]\)")

pytestmark = pytest.mark.skipif(
    kernels.IS_INTERPRETED, reason="interpreted kernels are not compiled"
)


def compile_kernel(
    kernel,
    tile,
    head_dim,
    dtype,
    capability,
    *,
    masked,
    precision="ieee",
    even=True,
    split_k=False,
    packed=False,
):
    """Returns (compiled kernel, what ptxas said) of one configuration, specialised as for dense
    tensors.
    """
    even = even and not packed
    flags = dense_flags(head_dim, dtype, masked, precision, even) | {
        "BLOCK_Q": tile.block_q,
        "BLOCK_K": tile.block_k,
        "IS_PACKED": packed,
        "SPLIT_K": split_k,
        "UNMASKED_LOOP": tile.unmasked_loop
        and not split_k
        and (kernel == "dkdv" or masked or even),
        "first_program": None,
        **({} if packed else {"cu_q_ptr": None, "cu_k_ptr": None}),
    }
    in_fp32 = split_k or precision in kernels.BF16_SLICES
    return compile_dense(
        KERNELS[kernel],
        flags,
        head_dim,
        dtype,
        capability,
        tile.num_warps,
        tile.num_stages,
        in_fp32,
    )


def dense_flags(head_dim: int, dtype: str, masked: bool, precision: str, even: bool) -> dict:
    """Returns the flags that do not depend on a tile."""
    block_d, tail_d = kernels.split_head_dim(head_dim)
    return {
        "HEAD_DIM": head_dim,
        "BLOCK_D": block_d,
        "TAIL_D": tail_d,
        "HAS_LEFT": False,
        "HAS_RIGHT": masked,
        "PRECISION": precision,
        "ALIGNMENT": 16 // TYPES[dtype].itemsize,
        "WIDE": False,
        "EVEN_K": even,
        "EVEN_Q": even,
        "PADDING": kernels.STATISTICS_PADDING,
        "group": 1,
    }


def compile_dense(function, flags, head_dim, dtype, capability, num_warps, num_stages, in_fp32):
    """Compiles a kernel specialised as for dense tensors; `in_fp32`: its results are, whatever it
    loads.
    """
    signature, constants, attributes = {}, {}, {}
    for index, name in enumerate(function.arg_names):
        divisible = False
        if name in flags or (name.startswith("stride_") and name.endswith("d")):
            signature[name], constants[name] = "constexpr", flags.get(name, 1)
        elif name.endswith("_ptr"):
            is_result = name == "out_ptr" or (name.startswith("grad_") and name != "grad_out_ptr")
            statistic = "lse" in name or "delta" in name
            signature[name] = "*fp32" if statistic or (is_result and in_fp32) else f"*{dtype}"
            if name.endswith("_slices_ptr"):
                signature[name] = "*bf16"
            elif name.startswith("cu_"):
                signature[name] = "*i32"
            divisible = True
        elif name.startswith("stride_"):
            signature[name] = "i32"
            # The row stride is the head dimension itself; statistics are padded, the log-sum-exp is
            # not.
            divisible = not name.startswith("stride_l") and (
                not name.endswith("s") or head_dim % 16 == 0
            )
        else:
            signature[name] = "fp32" if name.startswith("scale") else "i32"
        if divisible:
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(function, signature, constants, attributes)
    return compile_source(source, capability, {"num_warps": num_warps, "num_stages": num_stages})


def compile_source(source, capability: int, options: dict):
    with contextlib.redirect_stdout(io.StringIO()) as log, triton.knobs.nvidia.scope():
        triton.knobs.nvidia.dump_ptxas_log = True
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return compiled, log.getvalue()


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    # A kernel from the cache would come without what ptxas said.
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


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


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    ("head_dim", "masked", "options"),
    [
        *((*tuned, {}) for tuned in (TUNED if ALL_TESTS else [(64, True)])),
        # Lengths that fill no tile.
        (72, False, {"even": False}),
        *more((128, True, {"even": False})),
        # Split-K, at the head dimensions that the Hopper kernels leave to these, whose bound is
        # that of 64.
        (64, True, {"split_k": True}),
        (72, False, {"packed": True}),
        *more(*((d, m, {"packed": True}) for d in (64, 96, 128) for m in (True, False))),
    ],
    ids=str,
)
def test_tuned_tiles_on_hopper_neither_spill_nor_serialise(head_dim, masked, options, kernel):
    batch = "packed" if "packed" in options else ""
    tile = getattr(choice.select_config(head_dim, torch.bfloat16, masked, 90, batch=batch), kernel)
    check_tuned(*compile_kernel(kernel, tile, head_dim, "bf16", 90, masked=masked, **options))


@pytest.mark.parametrize(
    ("head_dim", "dtype", "masked", "even"),
    [
        (72, "bf16", True, False),
        (64, "fp32", True, True),
        *more((64, "bf16", False, True), (16, "bf16", True, True), (128, "bf16", True, True)),
    ],
)
def test_the_joint_launch_neither_spills_nor_serialises(head_dim, dtype, masked, even):
    precision = "tf32x3" if dtype == "fp32" else "ieee"
    dkdv, dq = choice.JOINT_CONFIGS[
        choice._kind(TYPES[dtype], precision), choice.tile_width(head_dim)
    ]
    flags = dense_flags(head_dim, dtype, masked, precision, even) | {
        "DKDV_BLOCK_Q": dkdv.block_q,
        "DKDV_BLOCK_K": dkdv.block_k,
        "DKDV_UNMASKED_LOOP": dkdv.unmasked_loop,
        "DQ_BLOCK_Q": dq.block_q,
        "DQ_BLOCK_K": dq.block_k,
        "DQ_UNMASKED_LOOP": dq.unmasked_loop and (masked or even),
    }
    options = (head_dim, dtype, 90, dkdv.num_warps, dkdv.num_stages, dtype == "fp32")
    compiled, log = compile_dense(kernels.flash_attention_bwd_kernel, flags, *options)
    check_limits(compiled, log, FULL_SPILL_LIMIT)
    # wgmma takes 64 rows; 32 are for the instruction of Ampere.
    assert re.search(r"wgmma.mma_async|mma.sync", compiled.asm["ptx"])


def test_tiles_of_the_joint_launch_have_one_number_of_warps_and_stages():
    for dkdv, dq in choice.JOINT_CONFIGS.values():
        assert (dkdv.num_warps, dkdv.num_stages) == (dq.num_warps, dq.num_stages)


def test_tails_of_slices_are_loaded_ahead():
    tailed = [
        tile
        for (_, kind, width, _), config in choice.CONFIGS.items()
        if kind in kernels.BF16_SLICES and width in (80, 96)
        for tile in (config.forward, config.dkdv, config.dq)
    ]
    assert tailed and all(tile.num_stages > 1 for tile in tailed)


def shipped() -> list[tuple]:
    """Every (family, kind, width, kernel, tile, masked), each tile once however many masks share
    it.
    """
    rows = {}
    for (family, kind, width, masked), config in choice.CONFIGS.items():
        for kernel in KERNELS:
            rows.setdefault((family, kind, width, kernel, getattr(config, kernel)), masked)
    return [(*row, masked) for row, masked in rows.items()]


SHIPPED = shipped()


def test_the_tuned_tiles_are_all_that_are_shipped_for_them():
    tuned = {
        (kernel, getattr(choice.select_config(head_dim, torch.bfloat16, masked, 90), kernel))
        for head_dim, masked in TUNED
        for kernel in KERNELS
    }
    shipped_tiles = {
        row[3:5] for row in SHIPPED if row[:2] == ("hopper", "16-bit") and row[2] <= 128
    }
    assert shipped_tiles == tuned


def test_no_warpgroup_takes_eight_columns_of_tf32():
    """Of 64 rows by 16 columns each of two warpgroups would; triton 3.6 reads beyond its shared
    memory then.
    """
    for family, kind, width, kernel, tile, _ in SHIPPED:
        if kind in ("tf32", "tf32x3") and family == "hopper":
            block, tail = kernels.split_head_dim(width)
            rows, inner = (
                (tile.block_k, tile.block_q) if kernel == "dkdv" else (tile.block_q, tile.block_k)
            )
            columns = [n for n in (inner, block, tail) if n]
            assert tile.num_warps == 4 or rows != 64 or min(columns) > 16, (
                kind,
                width,
                kernel,
                tile,
            )


def nearness_to_64(item: tuple) -> tuple:
    """Sorts last what is nearest to 64 wide, where (kernel, tile) has (width, masked)."""
    return -abs(item[1][0] - 64), str(item)


@pytest.mark.parametrize(
    ("capability", "kind"),
    [
        (80, "16-bit"),
        (90, "tf32x3"),
        (100, "16-bit"),
        *more(*itertools.product((80, 100), ("tf32", "tf32x3")), (90, "16-bit"), (90, "tf32")),
        *more((90, "bf16x3"), (90, "bf16x6"), (90, "ieee")),
    ],
)
def test_every_shipped_tile_compiles_and_fits(capability, kind):
    # True fp32 takes no tensor core, and becomes the same on both: its tiles are compiled for one,
    # and fit the other.
    families = tuple(FAMILY.values()) if kind == "ieee" else FAMILY[capability]
    rows = [row for row in SHIPPED if row[0].startswith(families) and row[1] == kind]
    if (capability, kind) == (90, "16-bit"):
        # The others are compiled, and held to more, above.
        rows = [row for row in rows if row[2] > 128]
    generic = {row[3:5] for row in rows if row[0] == FAMILY[80]}
    # Widths that share a tile differ in nothing but size: the widest of them is the one that has to
    # fit.
    widest = {}
    for _, _, width, kernel, tile, masked in rows:
        widest[kernel, tile] = max(widest.get((kernel, tile), (0, False)), (width, masked))
    assert widest
    if not ALL_TESTS:
        # Of each kernel one tile, at the width that most are asked for.
        widest = {
            (kernel, tile): found
            for (kernel, tile), found in sorted(widest.items(), key=nearness_to_64)
        }
        widest = {key: widest[key] for key in {key[0]: key for key in widest}.values()}
    for (kernel, tile), (width, masked) in widest.items():
        dtype, precision = "bf16" if kind in kernels.BF16_SLICES else "fp32", kind
        if kind == "16-bit":
            dtype, precision = "fp16", "ieee"
        compiled, log = compile_kernel(
            kernel, tile, width, dtype, capability, masked=masked, precision=precision
        )
        assert compiled.metadata.shared <= SHARED_LIMIT[80 if (kernel, tile) in generic else 90], (
            kernel,
            tile,
            width,
        )
        # True fp32 at D 128 and the untuned D 256 may spill a little; kilobytes mean a tile of the
        # wrong size.
        unspilled = 64 if kind in ("tf32x3", *kernels.BF16_SLICES) else 96
        limit = FULL_SPILL_LIMIT if kind == "bf16x6" else SPILL_LIMIT
        limit = limit if width <= unspilled and capability == 90 else 4096
        assert spilled_bytes(log) <= limit, (kernel, tile, width, spilled_bytes(log))


@pytest.mark.parametrize(
    ("head_dim", "capability"),
    itertools.product((16, 72, 128, 256), (80, 90, 100)) if ALL_TESTS else [(72, 90)],
)
def test_the_kernels_around_them_do_not_spill(head_dim, capability):
    padded = triton.next_power_of_2(head_dim)
    shape = {"HEAD_DIM": head_dim, "PADDED_D": padded}
    delta = {
        **shape,
        "BLOCK_Q": kernels.DELTA_BLOCK_Q,
        "IS_PACKED": False,
        "PADDING": kernels.STATISTICS_PADDING,
    }
    around = [(kernels.flash_attention_bwd_delta_kernel, delta | {"cu_q_ptr": None})]
    for slices in kernels.BF16_SLICES.values():
        around.append(
            (
                kernels.attention_slices_kernel,
                {**shape, "BLOCK": launches.SLICES_BLOCK, "SLICES": slices},
            )
        )
    combining = (splits.attention_combine_kernel, splits.attention_combine_gradients_kernel)
    blocks = [splits._flags(head_dim, num_rows) for num_rows in (128, 2**20)]
    assert blocks[0]["BLOCK"] * 2 == blocks[1]["BLOCK"]
    around += [(kernel, flags) for kernel in combining for flags in blocks]
    for function, flags in around:
        compiled, log = compile_dense(
            function, flags, head_dim, "fp32", capability, 4, 3, in_fp32=True
        )
        assert spilled_bytes(log) == 0, (function.__name__, flags)
        # Several splits are on their way at once.
        assert function not in combining or "cp.async" in compiled.asm["ptx"]


# Every release of Triton since 3.6 loads and compiles these: a test of the one that is installed.
HOPPER_KERNELS = {
    "forward": (
        forward.hopper_fwd_kernel,
        (forward.FORWARD, forward.FORWARD_SHORT),
        ("k_desc", "v_desc"),
    ),
    "dkdv": (
        two_passes.hopper_bwd_dkdv_kernel,
        (two_passes.DKDV, two_passes.DKDV_SHORT),
        ("q_desc", "grad_out_desc"),
    ),
    "dq": (
        two_passes.hopper_bwd_dq_kernel,
        (two_passes.DQ, two_passes.DQ_SHORT),
        ("k_desc", "v_desc"),
    ),
}


def compile_gluon(function, dtype, constants, consumers, *, inner, rows):
    """Compiles a Gluon kernel: its `inner` tiles have so many `rows`, all others those of a
    warpgroup.
    """
    launch = hopper_tiles.launch_options(consumers)
    constants = {**constants, **launch}

    def kind(name: str) -> str:
        if name in constants:
            return "constexpr"
        if name in ("lse_desc", "delta_desc"):
            return f"tensordesc<fp32[{rows}],{hopper_tiles.row_layout()!r}>"
        if name == "dq_accum_desc":
            return f"tensordesc<fp32[16, 256],{one_pass._dq_accum_layout()!r}>"
        if name.endswith("_desc"):
            is_tail = name.endswith("_tail_desc")
            layout = (
                hopper_tiles.tail_layout(constants["TAIL"])
                if is_tail
                else hopper_tiles.tile_layout()
            )
            num_rows = rows if name.replace("_tail", "") in inner else hopper_tiles.ROWS
            block = [1, 1, num_rows, constants["TAIL" if is_tail else "D"]]
            return f"tensordesc<{dtype}{block},{layout!r}>"
        if name.endswith("_ptr"):
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
    tiles = one_pass.SINGLE[head_dim]
    constants = {"D": head_dim, "CAUSAL": causal, "EVEN_K": even, **tiles}
    inner = ("q_desc", "grad_out_desc")
    return compile_gluon(
        one_pass.hopper_bwd_single_kernel, dtype, constants, 2, inner=inner, rows=tiles["BLOCK_Q"]
    )


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
    function, tables, inner = HOPPER_KERNELS[kernel]
    tiles = tables[short][head_dim]
    if kernel != "forward":
        tiles = two_passes._tiles(*tables, head_dim, two_passes.SHORT + (not short), causal)
    tail = hopper_tiles.TAILS[head_dim]
    constants = {
        "D": 64 if tail else head_dim,
        "TAIL": tail,
        "CAUSAL": causal,
        "EVEN_K": even,
        "GROUPED": grouped,
    }
    constants |= {**tiles, "DYNAMIC": dynamic and causal and not split_k, "SPLIT_K": split_k}
    absent = [] if tail else [name for name in function.arg_names if name.endswith("_tail_desc")]
    absent += ["tile_counter_ptr"] * (not constants["DYNAMIC"]) + ["parts_ptr"] * (not split_k)
    constants |= dict.fromkeys(absent)
    rows = tiles.get("BLOCK_K") or tiles["BLOCK_Q"]
    return compile_gluon(
        function, dtype, constants, tiles.get("CONSUMERS", 2), inner=inner, rows=rows
    )


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


CAUSAL, FULL, OTHER = (
    {"causal": True},
    {"causal": False},
    {"causal": False, "even": False, "grouped": True},
)


@pytest.mark.parametrize("kernel", HOPPER_KERNELS)
@pytest.mark.parametrize(
    ("head_dim", "dtype", "options"),
    [
        (72, "bf16", CAUSAL | {"grouped": True}),
        *more(
            (64, "bf16", CAUSAL), (72, "bf16", CAUSAL), (96, "bf16", FULL), (128, "bf16", CAUSAL)
        ),
        *more((64, "fp16", FULL), (80, "fp16", OTHER), (128, "fp16", OTHER)),
    ],
    ids=str,
)
def test_hopper_kernels_neither_spill_nor_serialise(head_dim, dtype, options, kernel, request):
    if (
        (kernel, head_dim) == ("forward", 64)
        and options is CAUSAL
        and not triton.__version__.startswith("3.6.")
    ):
        # A known shortfall: with tiles taken from a counter ptxas of later releases moves 13
        # registers, not 12.
        request.applymarker(
            pytest.mark.xfail(strict=True, reason="104 bytes spilled; 96 are allowed")
        )
    compiled, log = compile_hopper(kernel, head_dim, dtype, **options)
    # Of dK/dV at 64 with two sets of own rows, two values.
    limit = 16 if (kernel, head_dim, options["causal"]) == ("dkdv", 64, False) else 0
    check_gluon(compiled, log, 64 if options is OTHER else max(limit, SPILL_LIMIT))
    # No product is padded: 64 or 128 columns, and those of the tail.
    widths = {int(n) for n in re.findall(r"wgmma\.mma_async\S*\.m64n(\d+)k16", compiled.asm["ptx"])}
    tiles, tail = HOPPER_KERNELS[kernel][1][0][head_dim], hopper_tiles.TAILS[head_dim]
    columns = {64, tail} if tail else {head_dim}
    assert widths == columns | {tiles.get("BLOCK_K") or tiles["BLOCK_Q"]}


SHORT, SPLIT_K = {"even": False, "short": True}, {"split_k": True}


@pytest.mark.parametrize(
    ("kernel", "head_dim", "options", "most_spilled"),
    [
        ("forward", 96, FULL | SPLIT_K | {"even": False}, SPILL_LIMIT),
        *more(
            ("forward", 64, FULL | SHORT, 64),
            ("forward", 64, CAUSAL | SHORT | {"dynamic": False}, 64),
            ("dkdv", 96, FULL | SHORT, SPILL_LIMIT),
            ("dq", 96, FULL | SHORT, SPILL_LIMIT),
            ("forward", 64, CAUSAL | SPLIT_K, SPILL_LIMIT),
        ),
    ],
)
def test_short_sequences_and_split_keys_neither_spill_nor_serialise(
    kernel, head_dim, options, most_spilled
):
    check_gluon(*compile_hopper(kernel, head_dim, "bf16", **options), most_spilled)


@pytest.mark.parametrize(
    ("head_dim", "dtype", "causal", "even"),
    [
        (128, "fp16", True, True),
        *more((64, "fp16", False, False), (64, "bf16", True, True), (128, "bf16", False, True)),
    ],
)
def test_the_single_pass_spills_next_to_nothing_and_does_not_serialise(
    head_dim, dtype, causal, even
):
    compiled, log = compile_single(head_dim, dtype, causal=causal, even=even)
    check_gluon(compiled, log, SINGLE_SPILL_LIMIT[head_dim])
    assert "cp.reduce.async.bulk.tensor" in compiled.asm["ptx"]


def test_the_hopper_kernels_load_with_the_installed_triton():
    assert choice.hopper_unavailable() is None
    assert choice.hopper_single_unavailable() is None
    assert set(choice.SINGLE_PASS_HEAD_DIMS) == set(one_pass.SINGLE)
    tables = (
        forward.FORWARD,
        forward.FORWARD_SHORT,
        two_passes.DKDV,
        two_passes.DQ,
        hopper_tiles.TAILS,
    )
    assert all(set(table) == set(choice.GLUON_HEAD_DIMS) for table in tables)


def test_the_limits_refuse_a_tile_that_is_too_large():
    tile = choice.TileConfig(128, 128, 4, 2)
    compiled, log = compile_kernel("forward", tile, 128, "bf16", 90, masked=True)
    assert spilled_bytes(log) > SPILL_LIMIT
    with pytest.raises(AssertionError):
        check_tuned(compiled, log)
