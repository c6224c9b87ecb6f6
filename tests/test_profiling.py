"""Captures are read as they are: every launch in its range, every kernel in its class, nothing left
behind.
"""

import ast
import gzip
import json
import os
import random
import sqlite3
import stat
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pandas as pd
import pytest
import torch

import labkit
from labkit.device import checks
from labkit.measure import profiling
from labkit.measure.profiling import (
    OUTSIDE,
    Nsys,
    ProfileError,
    busy_ns,
    classify,
    launches,
    read_nsys,
)

FIXTURE = Path(__file__).parent / "fixtures" / "nsys_2025.3.1_h200.sqlite"
"""Nsight Systems 2025.3.1 on an H200, cut down to what a reader needs: three matmuls, then range
"measure" with five "step", each with "mm" (one matmul) and "softmax" (one softmax).
"""

PHASES = ("inference", "forward", "backward", "optimizer")
PROCESS = 77 << 24


@pytest.fixture
def export(tmp_path):
    """Writes an export of nsys; times in ns.

    Kernels are (name, launching thread, launch, start, end), ranges (name, or the number of a
    registered one, thread, start, end), memsets (launching thread, launch, start, end).
    """

    def write(kernels=(), ranges=(), memsets=()) -> Path:
        path = tmp_path / f"export{len(list(tmp_path.iterdir()))}.sqlite"
        memsets = dict(enumerate(memsets, start=1001))
        launched = {number: kernel[1:3] for number, kernel in enumerate(kernels, start=1)}
        launched |= {number: memset[:2] for number, memset in memsets.items()}
        tables = {
            'CUPTI_ACTIVITY_KIND_KERNEL (start, "end", streamId, correlationId, globalPid, '
            "demangledName)": [
                (*kernel[3:], 7, number, PROCESS, number)
                for number, kernel in enumerate(kernels, start=1)
            ],
            'CUPTI_ACTIVITY_KIND_RUNTIME (start, "end", globalTid, correlationId)': [
                (at, at + 1, PROCESS + thread, number)
                for number, (thread, at) in launched.items()
                if at is not None
            ],
            'CUPTI_ACTIVITY_KIND_MEMSET (start, "end", streamId, correlationId, globalPid)': [
                (*memset[2:], 7, number, PROCESS) for number, memset in memsets.items()
            ],
            'NVTX_EVENTS (start, "end", eventType, text, textId, globalTid)': [
                *(
                    (
                        *span,
                        *(kind or [59]),
                        *((None, name) if isinstance(name, int) else (name, None)),
                        PROCESS + thread,
                    )
                    for name, thread, *span in ranges
                    for span, kind in [(span[:2], span[2:])]
                ),
                (0, None, 75, "a domain", None, PROCESS + 1),
            ],
            "StringIds (id, value)": [
                (900, "registered"),
                *enumerate((kernel[0] for kernel in kernels), start=1),
            ],
        }
        with sqlite3.connect(path) as connection:
            for table, rows in tables.items():
                if rows or table.startswith("CUPTI_ACTIVITY_KIND_K"):
                    connection.execute(f"CREATE TABLE {table}")
                    places = ", ".join("?" * (table.count(",") + 1))
                    connection.executemany(
                        f"INSERT INTO {table.split()[0]} VALUES ({places})", rows
                    )
        connection.close()
        return path

    return write


def paths(path: Path) -> list[tuple]:
    return launches(read_nsys(path), PHASES)["path"].tolist()


def check_refused(read, path: Path, message: str) -> None:
    """Asserts that a file is an error that says what it lacks and names it."""
    with pytest.raises(ProfileError, match=message) as error:
        read(path)
    assert str(path) in str(error.value)


def test_the_fixture_has_five_steps_each_one_matmul_and_one_softmax_and_three_matmuls_outside():
    trace = read_nsys(FIXTURE, "2025.3.1")
    table = launches(trace, ("mm", "softmax"))
    kernels = table[table["kind"] == "kernel"]
    assert len(kernels) == 14 and (trace.source, trace.version) == ("nsys", "2025.3.1")
    inside = kernels[kernels["range"] != OUTSIDE]
    assert (
        inside["path"].tolist() == [("measure", "step", "mm"), ("measure", "step", "softmax")] * 5
    )
    assert inside["kernel_class"].tolist() == ["matmul", "softmax"] * 5
    assert inside["phase"].tolist() == ["mm", "softmax"] * 5
    outside = kernels[kernels["range"] == OUTSIDE]["kernel_class"].tolist()
    assert outside == ["elementwise", "matmul", "matmul", "matmul"]
    assert set(kernels["short_name"]) == {
        "distribution_elementwise_grid_stride_kernel[normal_kernel:distribution_nullary_kernel:BFloat16]",
        "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT",
        "cunn_SoftMaxForwardReg[BFloat16]",
    }


def test_the_fixture_adds_up():
    trace = read_nsys(FIXTURE)
    table = launches(trace, ())
    kernels = table[table["kind"] == "kernel"]
    by_range = profiling.statistics_by(kernels, ["range"]).set_index("range")["total_us"]
    assert by_range.sum() * 1e3 == pytest.approx(trace.total_ns, rel=1e-12)
    assert set(by_range.index) == {"mm", "softmax", OUTSIDE}
    with sqlite3.connect(f"file:{FIXTURE}?mode=ro", uri=True) as connection:
        (total,) = connection.execute(
            'SELECT SUM("end" - start) FROM CUPTI_ACTIVITY_KIND_KERNEL'
        ).fetchone()
    assert trace.total_ns == total == kernels["duration_ns"].sum()
    assert (table["kind"] == "memset").sum() == 8


def test_reading_changes_nothing():
    before = FIXTURE.read_bytes()
    read_nsys(FIXTURE)
    assert FIXTURE.read_bytes() == before
    assert b"PATH=" not in before and b"HOME" not in before


def test_what_autograds_thread_launches_belongs_to_the_backward_that_the_main_thread_holds_open(
    export,
):
    path = export(
        [
            ("gemm_forward", 1, 12, 100, 110),
            (
                "gemm_backward",
                2,
                25,
                110,
                130,
            ),  # launched by another thread, while "backward" is open on the first
            ("adam", 1, 42, 130, 131),
            ("gemm_later", 2, 60, 140, 150),  # nothing is open any more
        ],
        [
            ("step", 1, 5, 50),
            ("forward", 1, 10, 20),
            ("backward", 1, 22, 38),
            ("optimizer", 1, 40, 45),
        ],
    )
    table = launches(read_nsys(path), PHASES)
    assert table["phase"].tolist() == ["forward", "backward", "optimizer", OUTSIDE]
    assert table["path"].tolist() == [
        ("step", "forward"),
        ("step", "backward"),
        ("step", "optimizer"),
        (),
    ]


@pytest.mark.parametrize(
    ("kernels", "ranges", "expected"),
    [
        (
            [("a", 2, 26, 0, 1), ("b", 2, 29, 1, 2), ("c", 2, 33, 2, 3)],
            [
                ("step", 1, 5, 50),
                ("backward", 1, 22, 38),
                ("block 1", 2, 24, 28),
                ("block 0", 2, 32, 36),
                ("mm", 2, 33, 34),
            ],
            [
                ("step", "backward", "block 1"),
                ("step", "backward"),
                ("step", "backward", "block 0", "mm"),
            ],
        ),
        (
            [("a", 1, 15, 0, 1), ("b", 2, 15, 1, 2)],
            [("forward", 1, 10, 20), ("block", 1, 11, 19), ("copying", 2, 12, 18)],
            [("forward", "block"), ("forward", "block", "copying")],
        ),
        (
            [("a", 1, 15, 0, 1), ("b", 1, 25, 1, 2), ("c", 1, 70, 2, 3)],
            [
                (900, 1, 10, 30),
                ("inner", 1, 14, 16),
                ("held", 1, 24, 26, 60),
                ("never closed", 1, 50, None),
                ("empty", 1, 25, 25),
            ],
            [("registered", "inner"), ("registered", "held"), ("never closed",)],
        ),
        ([("a", 1, None, 0, 7), ("b", 1, 5, 7, 9)], [("forward", 1, 0, 90)], [(), ("forward",)]),
    ],
    ids=[
        "ranges of autograd's own thread lie inside the backward",
        "a range that another thread opens later encloses nothing of this one",
        "registered, nested, unclosed, start-end and empty ranges",
        "a kernel without a known launch is outside",
    ],
)
def test_a_launch_lies_in_the_ranges_that_are_open(export, kernels, ranges, expected):
    assert paths(export(kernels, ranges)) == expected


def test_a_launch_of_another_process_is_in_no_range_of_this_one(export):
    path = export([("a", 1, 15, 0, 1)], [("forward", 1, 10, 20)])
    with sqlite3.connect(path) as connection:
        other = 78 << 24
        connection.execute(
            "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (5, 6, 7, 1, ?, 1)", (other,)
        )
        connection.execute(
            "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (16, 17, ?, 1)", (other + 1,)
        )
    assert paths(path) == [("forward",), ()]


def test_copies_and_memsets_are_rows_of_their_own_and_no_kernels(export):
    trace = read_nsys(
        export([("gemm", 1, 5, 10, 20)], [("forward", 1, 0, 90)], memsets=[(1, 6, 30, 34)])
    )
    table = launches(trace, PHASES)
    assert table[["kind", "kernel_class", "phase"]].to_numpy().tolist() == [
        ["kernel", "matmul", "forward"],
        ["memset", "copy", "forward"],
    ]
    assert trace.total_ns == 10 and busy_ns(table) == 14


@pytest.mark.parametrize("seed", range(4))
def test_paths_are_what_looking_at_every_range_gives(export, seed):
    """Ranges of three threads at random, nested on each; the rule is applied to every launch by
    brute force.
    """
    generator = random.Random(seed)

    def nested(thread, start, end, depth):
        if end - start < 6 or depth > 3:
            return
        first = generator.randint(start + 1, end - 4)
        last = generator.randint(first + 2, end - 1)
        found.append((f"r{len(found)}", thread, first * 2, last * 2))
        nested(thread, first, last, depth + 1)
        nested(thread, last, end, depth)

    found = []
    for thread in (1, 2, 3):
        nested(thread, 0, 100, 0)
    kernels = [
        ("k", generator.randint(1, 4), generator.randint(0, 100) * 2 + 1, n, n + 1)
        for n in range(60)
    ]

    def expected(thread, moment):
        is_open = [r for r in found if r[2] <= moment < r[3]]
        own = sorted((r for r in is_open if r[1] == thread), key=lambda r: r[2])
        others = [r for r in is_open if r[1] != thread and (not own or r[2] < own[0][2])]
        return tuple(r[0] for r in [*sorted(others, key=lambda r: r[2]), *own])

    got = paths(export(kernels, found))
    wanted = [expected(thread, moment) for _, thread, moment, *_ in kernels]
    # Ranges of different threads that begin together have no order of their own.
    assert [sorted(path) for path in got] == [sorted(path) for path in wanted]
    assert any(len(path) >= 3 for path in got) and () in got


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("DROP TABLE StringIds", "is no export of Nsight Systems: it has no table StringIds"),
        (
            "ALTER TABLE StringIds RENAME COLUMN id TO x",
            "is no export of .*: its table StringIds has no column id",
        ),
        (
            "DROP TABLE CUPTI_ACTIVITY_KIND_KERNEL",
            "holds no kernel: it has no table CUPTI_ACTIVITY_KIND_KERNEL",
        ),
        (
            "DELETE FROM CUPTI_ACTIVITY_KIND_KERNEL",
            "holds no kernel: its table CUPTI_ACTIVITY_KIND_KERNEL is empty",
        ),
        (
            "DROP TABLE CUPTI_ACTIVITY_KIND_RUNTIME",
            "holds no launch .*: it has no table CUPTI_ACTIVITY_KIND_RUNTIME",
        ),
        ("DELETE FROM CUPTI_ACTIVITY_KIND_RUNTIME", "holds no launch of a kernel"),
        ("DROP TABLE NVTX_EVENTS", "holds no NVTX range: it has no table NVTX_EVENTS"),
        (
            "DELETE FROM NVTX_EVENTS WHERE eventType = 59",
            "holds no NVTX range: its table NVTX_EVENTS has none",
        ),
        ("UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET start = NULL", "KIND_KERNEL has start None"),
        ("UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET start = 'now'", "KIND_KERNEL has start 'now'"),
        ('UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET "end" = 7', "KIND_KERNEL has end 7 and start 20"),
        (
            'UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET "end" = 1 << 62',
            "has end 4611686018427387904 and start 20",
        ),
        ("UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET demangledName = 5", "has demangledName 5"),
        ("UPDATE CUPTI_ACTIVITY_KIND_RUNTIME SET start = 1.5", "KIND_RUNTIME has start 1.5"),
        ("UPDATE CUPTI_ACTIVITY_KIND_MEMSET SET streamId = NULL", "KIND_MEMSET has streamId None"),
        ('UPDATE NVTX_EVENTS SET "end" = 9', "NVTX_EVENTS has end 9 and start 10"),
        ("UPDATE NVTX_EVENTS SET text = x'00'", r"NVTX_EVENTS has text b'\\x00'"),
        (
            "UPDATE NVTX_EVENTS SET text = CAST(x'ff' AS TEXT)",
            "cannot be read as SQLite: Could not decode",
        ),
        ("INSERT INTO StringIds VALUES (1, 'again')", "StringIds has the id 1 more than once"),
        (
            "UPDATE CUPTI_ACTIVITY_KIND_RUNTIME SET correlationId = 77",
            "holds no launch of a kernel",
        ),
        (
            "UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET correlationId = NULL",
            "holds no launch of a kernel",
        ),
    ],
)
def test_what_no_capture_can_hold_is_refused(export, statement, message):
    path = export([("a", 1, 15, 20, 30)], [("forward", 1, 10, 20)], memsets=[(1, 16, 40, 50)])
    assert len(read_nsys(path).operations) == 2
    with sqlite3.connect(path) as connection:
        connection.execute(statement)
    connection.close()
    check_refused(read_nsys, path, message)


def test_corrupt_and_absent_files_are_errors_that_name_the_file(tmp_path):
    (tmp_path / "corrupt.sqlite").write_bytes(b"SQLite format 3\0" + b"\xff" * 4000)
    (tmp_path / "not a database?.sqlite").write_text("hello " * 200)
    (tmp_path / "half.sqlite").write_bytes(FIXTURE.read_bytes()[:9000])
    for path in (*tmp_path.iterdir(), tmp_path / "absent.sqlite"):
        check_refused(read_nsys, path, "cannot be read as SQLite")
    assert not (tmp_path / "absent.sqlite").exists()


ELEMENTWISE = "void at::native::{}<4, at::native::{}, std::array<char*, 2ul> >(int, T2, T3)"


@pytest.mark.parametrize(
    ("name", "kernel_class"),
    [
        ("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT", "matmul"),
        ("nvjet_tss_128x64_64x6_4x1_v_bz_TNN", "matmul"),
        ("ampere_sgemm_128x64_tn", "matmul"),
        ("sm90_xmma_gemm_f32f32_f32f32_f32_nn_n_tilesize64x64x8_cublas", "matmul"),
        (
            "void cutlass::Kernel2<cutlass_80_simt_sgemm_128x32_8x5_nt_align1>"
            "(cutlass_80_simt::Params)",
            "matmul",
        ),
        (
            "void gemv2T_kernel_val<int, int, float, float, float, float, 128, 16, 4, 4, "
            "false>(float)",
            "matmul",
        ),
        (
            "void cublasLt::splitKreduce_kernel<32, 16, int, float, float, float, "
            "float>(cublasLt::Params)",
            "matmul",
        ),
        ("triton_tem_fused_mm_3", "matmul"),
        ("triton_mm", "matmul"),
        ("triton_poi_fused__to_copy_mm_2", "elementwise"),
        ("triton_red_fused__softmax_5", "softmax"),
        ("triton_per_fused_mean_pow_1", "reduction"),
        (
            "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, "
            "4>>(Flash_fwd_params)",
            "attention",
        ),
        (
            "void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<>>>"
            "(flash::Params)",
            "attention",
        ),
        (
            "fmha_cutlassF_f32_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel<float>)",
            "attention",
        ),
        (
            "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_6_128x128x64",
            "attention",
        ),
        (
            "void (anonymous namespace)::softmax_warp_forward<float, float, float, 8, false, "
            "false>(float*)",
            "softmax",
        ),
        (
            "void at::native::(anonymous namespace)::cunn_SoftMaxBackwardSmem<4, float, float, "
            "float>(float*)",
            "softmax",
        ),
        (
            "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float>(int)",
            "normalisation",
        ),
        (
            ELEMENTWISE.format(
                "vectorized_elementwise_kernel", "BinaryFunctor<MulFunctor<float> >"
            ),
            "elementwise",
        ),
        (
            ELEMENTWISE.format("unrolled_elementwise_kernel", "CUDAFunctor_add<float>"),
            "elementwise",
        ),
        (
            ELEMENTWISE.format(
                "vectorized_elementwise_kernel", "bfloat16_copy_kernel_cuda(TensorIterator&)"
            ),
            "copy",
        ),
        (
            "void at::native::(anonymous namespace)::CatArrayBatchedCopy<float, unsigned int, 4, "
            "64, 64>(float*)",
            "copy",
        ),
        (
            "void at::native::reduce_kernel<512, 1, ReduceOp<float, at::native::MeanOps<float> > "
            ">(R)",
            "reduction",
        ),
        (
            "void at::native::(anonymous namespace)::"
            "multi_tensor_apply_kernel<FusedAdamMathFunctor>(T)",
            "optimizer",
        ),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*, unsigned long)", "communication"),
        (
            "void at::native::(anonymous namespace)::"
            "distribution_elementwise_grid_kernel<float>(long)",
            "elementwise",
        ),
        ("somebodys_own_kernel", "other"),
    ],
)
def test_kernels_are_classed_by_name(name, kernel_class):
    assert classify(name) == kernel_class


@pytest.mark.parametrize(
    ("names", "kernel_class"),
    [
        (("aten::mm", "aten::addmm"), "matmul"),
        (("aten::_softmax_backward_data", "aten::_log_softmax"), "softmax"),
        (
            (
                "aten::_scaled_dot_product_flash_attention_for_cpu",
                "labkit::flash_attention_backward",
                "EagerFlashAttention",
                "EagerFlashAttentionBackward",
            ),
            "attention",
        ),
        (("aten::_to_copy",), "copy"),
        (("aten::silu_backward", "aten::masked_fill_"), "elementwise"),
        (("aten::mean", "aten::nll_loss_forward"), "reduction"),
        (("aten::_fused_adamw_",), "optimizer"),
        (("aten::transpose", "autograd::engine::evaluate_function: MmBackward0"), "other"),
    ],
)
def test_cpu_operators_are_classed_by_name(names, kernel_class):
    assert {name: classify(name, "operator") for name in names} == dict.fromkeys(
        names, kernel_class
    )


def test_every_kernel_of_this_project_has_a_class():
    nodes = [
        node
        for path in (Path(labkit.__file__).parent / "kernels").rglob("*.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel")
    ]
    names = [
        node.name for node in nodes if any("jit" in ast.unparse(x) for x in node.decorator_list)
    ]
    assert len(names) >= 8 and "hopper_fwd_kernel" in names
    assert {name: classify(name) for name in names if classify(name) == "other"} == {}
    assert {classify(name) for name in names if "flash" in name or "hopper" in name} == {
        "attention"
    }


def test_classes_are_the_agreed_ones():
    named = {
        kernel_class
        for patterns in (profiling._KERNELS, profiling._OPERATORS)
        for kernel_class, _ in patterns
    }
    assert named | {"other"} == set(profiling.CLASSES)


@pytest.mark.parametrize(
    ("name", "short"),
    [
        (
            ELEMENTWISE.format(
                "vectorized_elementwise_kernel",
                "BinaryFunctor<float, at::native::MulFunctor<float> >",
            ),
            "vectorized_elementwise_kernel[BinaryFunctor:MulFunctor]",
        ),
        (
            "void at::native::elementwise_kernel<128, 2, "
            "at::native::gpu_kernel_impl_nocast<at::native::"
            "direct_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda(float)#1}>(at::TensorIteratorBase&)>(int)",
            "elementwise_kernel[direct_copy_kernel_cuda]",
        ),
        (
            "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, "
            "at::native::MeanOps<float, float> > >(R)",
            "reduce_kernel[MeanOps]",
        ),
        (
            "void (anonymous namespace)::softmax_warp_forward<float, 8>(float*)",
            "softmax_warp_forward",
        ),
        (
            "_ZN2at6native12_GLOBAL__N_122cunn_SoftMaxForwardRegIN3c108BFloat16EfS4_EEvPT1_",
            "cunn_SoftMaxForwardReg",
        ),
        ("ampere_sgemm_128x64_tn", "ampere_sgemm_128x64_tn"),
        (
            "void cutlass::Kernel2<cutlass_80_simt_sgemm_256x128_8x4_nt_align1>(T1::Params)",
            "cutlass_80_simt_sgemm_256x128_8x4_nt_align1",
        ),
        ("unnamed", "unnamed"),
    ],
)
def test_short_names(name, short):
    assert profiling.short_name(name) == short


def test_two_kernels_keep_two_names():
    xmma = (
        "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize128x128x8_stage3_"
        "warpsize2x2x1_ffma_aligna4_alignc{}_execute"
    )
    add = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<{}> >(int)"
    names = [
        xmma.format(2),
        xmma.format(4),
        add.format("float"),
        add.format("c10::BFloat16"),
        "softmax_warp<float, 9>",
    ]
    short = profiling.distinct_names([*names, "softmax_warp<float, 10>", *names])
    assert len(set(short.values())) == 6
    assert short[names[3]] == "vectorized_elementwise_kernel[CUDAFunctor_add:BFloat16]"
    assert short == profiling.distinct_names(reversed(short)), (
        "whatever the order in which they ran"
    )


def test_casts_are_told_from_other_copies():
    copy = "direct_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda}"
    casts = {
        ELEMENTWISE.format(
            "vectorized_elementwise_kernel", "bfloat16_copy_kernel_cuda(TensorIteratorBase&)"
        ): True,
        ELEMENTWISE.format("unrolled_elementwise_kernel", f"{copy}, memory::LoadWithCast<1>"): True,
        ELEMENTWISE.format("vectorized_elementwise_kernel", copy): False,
        "aten::_to_copy": True,
        "aten::copy_": False,
        "Memcpy DtoD": False,
    }
    assert {name: profiling.is_cast(name) for name in casts} == casts


@pytest.fixture(scope="module")
def kineto():
    """A forward and a backward pass on the CPU, captured."""
    marker = profiling.RangeMarker("kineto")
    x = torch.randn(64, 64, requires_grad=True)

    def run():
        with marker("step"):
            with marker("forward"), marker("block 0"):
                loss = torch.softmax(x @ x, dim=-1).square().sum()
            with marker("backward"):
                loss.backward()
        torch.randn(8)

    return profiling.capture_with_kineto(run, "cpu")


def test_cpu_operators_come_into_the_same_table(kineto):
    table = launches(kineto, PHASES)
    assert (kineto.source, kineto.version) == ("kineto cpu", torch.__version__)
    assert list(table) == list(launches(read_nsys(FIXTURE), ()))
    forward = table[table["path"] == ("step", "forward", "block 0")]
    assert {"matmul", "softmax", "reduction"} <= set(forward["kernel_class"])
    backward = table[table["phase"] == "backward"]
    assert (backward["short_name"] == "aten::mm").sum() == 2
    assert "aten::_softmax_backward_data" in set(backward["short_name"])
    assert OUTSIDE in set(table["range"])


def test_operators_own_times_add_up_to_the_outermost_operators(kineto):
    table = launches(kineto, PHASES)
    assert table["duration_ns"].sum() == pytest.approx(kineto.total_ns, rel=1e-3)
    assert busy_ns(table) == pytest.approx(kineto.total_ns, rel=1e-3)


def event(cat, name, ts, dur, tid, **args):
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        "ts": ts,
        "dur": dur,
        "pid": 1,
        "tid": tid,
        "args": args,
    }


def write_trace(path: Path, events: list[dict]) -> Path:
    content = json.dumps({"traceEvents": events}).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_trace_with_cuda_kernels_is_read_by_correlation(tmp_path, name):
    """Kernels launched by autograd's thread, as on a GPU; the operators that launched them are no
    rows then.
    """
    events = [
        {"ph": "M", "name": "process_name", "pid": 1},
        event("user_annotation", "step 0", 0.0, 100.0, 1),
        event("user_annotation", "forward", 1.0, 10.0, 1),
        event("user_annotation", "backward", 12.0, 20.0, 1),
        event("user_annotation", "Optimizer.step#AdamW.step", 0.5, 99.0, 1),
        event("cpu_op", "aten::mm", 2.0, 4.0, 1),
        event("cuda_runtime", "cudaLaunchKernel", 3.0, 1.0, 1, correlation=5),
        event("cuda_driver", "cuLaunchKernelEx", 14.0, 1.0, 2, correlation=6),
        event("kernel", "ampere_sgemm_128x64_tn", 20.001, 8.5, 7, stream=7, correlation=5),
        event("kernel", "nvjet_tss_128x64", 30.0, 2.0, 7, stream=7, correlation=6),
        event("gpu_memset", "Memset (Device)", 33.0, 1.0, 7, stream=7, correlation=99),
        event("gpu_user_annotation", "forward", 20.0, 8.0, 7),
    ]
    trace = profiling.read_chrome_trace(write_trace(tmp_path / name, events))
    table = launches(trace, PHASES)
    assert trace.source == "kineto" and trace.total_ns == 10_500
    assert table["kind"].tolist() == ["kernel", "kernel", "memset"]
    assert table["phase"].tolist() == ["forward", "backward", OUTSIDE]
    assert table["path"].tolist()[1] == ("step 0", "backward")
    assert table["start_ns"].tolist()[0] == 20_001 and table["duration_ns"].tolist() == [
        8500,
        2000,
        1000,
    ]


@pytest.mark.parametrize("operator", ["cuda_runtime", "cpu_op"])
def test_a_trace_of_several_ranks_merged_is_refused(tmp_path, operator):
    """Both ranks count their launches from 1: which kernel is whose cannot be told."""
    rank = [
        event("user_annotation", "forward", 0.0, 10.0, 1),
        event(operator, "launch", 1.0, 1.0, 1, correlation=1),
        event("kernel", "gemm", 2.0, 3.0, 7, stream=7, correlation=1),
    ]
    assert (
        len(
            profiling.read_chrome_trace(
                write_trace(tmp_path / "one.json", rank[: -1 if operator == "cpu_op" else 3])
            ).operations
        )
        == 1
    )
    other = [entry | {"pid": 2, "ts": entry["ts"] + 20} for entry in rank]
    path = write_trace(tmp_path / "both.json", rank + other)
    check_refused(
        profiling.read_chrome_trace,
        path,
        "holds events of 2 processes; accepted: the trace of one rank",
    )


def test_graphs_captured_as_a_whole_are_refused(export):
    path = export([("a", 1, 15, 20, 30)], [("forward", 1, 10, 20)])
    with sqlite3.connect(path) as connection:
        connection.execute(
            'CREATE TABLE CUPTI_ACTIVITY_KIND_GRAPH_TRACE (start, "end", streamId, correlationId)'
        )
    assert len(read_nsys(path).operations) == 1
    with sqlite3.connect(path) as connection:
        connection.executemany(
            "INSERT INTO CUPTI_ACTIVITY_KIND_GRAPH_TRACE VALUES (?, ?, 7, 8)", [(40, 50), (60, 70)]
        )
    connection.close()
    check_refused(
        read_nsys,
        path,
        "holds 2 CUDA graphs as a whole, .*; accepted: a capture with --cuda-graph-trace=node",
    )


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("_Z" + "9" * 5000, "9" * 96),
        ("_Z99999f", "f"),
        *((name, name) for name in ("<lambda>", "(anonymous)", "::")),
    ],
)
def test_names_that_no_compiler_made_have_a_short_name_too(name, short):
    assert profiling.short_name(name) == short


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("not json", "is no trace of torch.profiler"),
        ("[]", "is no trace of torch.profiler"),
        ("{}", "is no trace of torch.profiler"),
        ('{"traceEvents": []}', "holds no event"),
        (
            '{"traceEvents": [{"ph": "X", "cat": "user_annotation", "name": "a", "ts": 1, "dur": '
            '1, "pid": 1, "tid": 1}]}',
            "holds neither a CUDA kernel nor a CPU operator",
        ),
        (
            '{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "a", "ts": 1, "dur": 1, "pid": '
            '1, "tid": 1}]}',
            "holds no range",
        ),
    ],
)
def test_a_trace_that_is_none_is_an_error_that_names_the_file(tmp_path, content, message):
    path = tmp_path / "trace.json"
    path.write_text(content)
    check_refused(profiling.read_chrome_trace, path, message)


def test_unknown_kinds_of_ranges_are_refused_and_none_marks_nothing():
    with pytest.raises(
        ValueError, match="unknown kind of range 'emoji'; accepted: nvtx, kineto, none"
    ):
        profiling.RangeMarker("emoji")
    with profiling.RangeMarker("none")("anything"):
        pass


def test_busy_time_counts_what_overlaps_once():
    def table(*spans):
        return pd.DataFrame(spans, columns=["start_ns", "end_ns"])

    assert busy_ns(table((0, 10), (20, 30))) == 20
    assert busy_ns(table((20, 30), (0, 25))) == 30
    assert busy_ns(table((0, 100), (10, 20), (50, 120))) == 120
    assert busy_ns(table()) == 0


def test_statistics_of_a_group_by_hand():
    table = pd.DataFrame({"name": ["a", "a", "b"], "duration_ns": [1000, 3000, 9000]})
    found = profiling.statistics_by(table, ["name"])
    assert found["name"].tolist() == ["b", "a"]
    a = found.iloc[1]
    assert (a["launches"], a["total_us"], a["min_us"], a["max_us"]) == (2, 4, 1, 3)


DAEMON = """
import os, subprocess, sys, time
code = (
    "import os, sys, time; os.setsid(); "
    "open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(600)"
)
subprocess.Popen([sys.executable, "-c", code, sys.argv[1]])
while not os.path.exists(sys.argv[1]) or not open(sys.argv[1]).read():
    time.sleep(0.02)
print("started", flush=True)
time.sleep(float(sys.argv[2]))
"""


def is_alive(pid: int) -> bool:
    try:
        return (
            "Z"
            not in Path(f"/proc/{pid}/stat")
            .read_text(encoding="utf-8")
            .rsplit(")", 1)[1]
            .split()[0]
        )
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")
@pytest.mark.parametrize("lasts_s", [600, 0])
def test_no_process_is_left_even_one_that_left_the_group(tmp_path, lasts_s):
    note = tmp_path / "pid"
    command = [sys.executable, "-c", DAEMON, str(note), str(lasts_s)]
    begin = time.monotonic()
    if lasts_s:
        with pytest.raises(TimeoutError, match="was stopped: the capture took longer than 3 s"):
            profiling.run_bounded(command, dict(os.environ), 3.0)
    else:
        assert "started" in profiling.run_bounded(command, dict(os.environ), 60.0)
    assert time.monotonic() - begin < 30
    assert not is_alive(int(note.read_text()))


def test_a_program_that_cannot_be_started_is_an_error():
    with pytest.raises(ProfileError, match="no-such-nsys cannot be started: No such file"):
        profiling.run_bounded(["/nowhere/no-such-nsys"], {}, 5.0)


FAKE_NSYS = """#!{python}
import json, os, pathlib, shutil, subprocess, sys
here = pathlib.Path(__file__).resolve().parent
def told(option):
    return next(a.split("=", 1)[1] for a in sys.argv if a.startswith(option + "="))
with open(here / "calls.jsonl", "a") as file:
    file.write(json.dumps({{"arguments": sys.argv[1:], "environment": dict(os.environ)}}) + "\\n")
if sys.argv[1] == "--version":
    print("NVIDIA Nsight Systems version 2025.3.1.90-253135822126v0")
elif sys.argv[1] == "profile" and (here / "old").exists() and "event-trace" in str(sys.argv):
    usage = "usage: nsys profile [<args>] [application]"
    sys.exit("unrecognised option '--cuda-event-trace=false'\\n\\n" + usage)
elif sys.argv[1] == "profile" and (here / "no stacks").exists() and "backtrace" in str(sys.argv):
    sys.exit("CPU sampling is not supported here")
elif sys.argv[1] == "profile":
    number = next(n for n, a in enumerate(sys.argv[2:], 2) if not a.startswith("--"))
    subprocess.run(sys.argv[number:], check=False)
    ending = (here / "leaves").read_text()
    if ending:
        pathlib.Path(told("--output") + ending).write_text(json.dumps(dict(os.environ)))
    print("/somewhere/else: Importer error status: Importation failed.")
elif sys.argv[1] == "export" and (here / "export.sqlite").exists():
    shutil.copy(here / "export.sqlite", told("--output"))
"""

FAKE_IMPORTER = """#!{python}
import json, os, pathlib, shutil, sys
values = dict(zip(sys.argv[1::2], sys.argv[2::2]))
shutil.copy(values["--input-file"], values["--output-file"])
pathlib.Path(__file__).with_name("environment.json").write_text(json.dumps(dict(os.environ)))
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """An install like the one inside Nsight Compute, of scripts; `leaves` says what `nsys profile`
    writes.
    """
    target, host = (
        tmp_path / "host" / "target-linux-x64",
        tmp_path / "host" / "linux-desktop-glibc_2_11_3-x64",
    )
    for folder, name, text in (
        (target, "nsys", FAKE_NSYS),
        (host, "QdstrmImporter", FAKE_IMPORTER),
    ):
        folder.mkdir(parents=True)
        path = folder / name
        path.write_text(textwrap.dedent(text.format(python=sys.executable)))
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    (target / "leaves").write_text(".nsys-rep")
    (target / "export.sqlite").write_bytes(FIXTURE.read_bytes())
    monkeypatch.setattr(profiling, "find_nsys", lambda: str(target / "nsys"))
    return target


def calls(fake: Path) -> list[dict]:
    return [json.loads(line) for line in (fake / "calls.jsonl").read_text().splitlines()]


def test_nsys_is_found_with_its_version_and_the_importer_beside_it(fake, monkeypatch):
    nsys = Nsys.find()
    assert nsys.version == "2025.3.1.90"
    assert Path(nsys.importer).name == "QdstrmImporter"
    monkeypatch.setattr(profiling, "find_nsys", lambda: None)
    assert Nsys.find() is None
    monkeypatch.setattr(profiling, "find_nsys", lambda: "/bin/false")
    assert Nsys.find() is None


@pytest.mark.parametrize("leaves", [".nsys-rep", ".qdstrm"])
def test_a_capture_is_made_read_and_deleted_without_the_rest_of_the_environment(
    fake, monkeypatch, tmp_path, leaves
):
    (fake / "leaves").write_text(leaves)
    monkeypatch.setenv("LABKIT_CANARY", "tweet-tweet")
    monkeypatch.setenv(profiling.LIBRARIES, "/some/libraries")
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(profiling.tempfile, "tempdir", None)
    note = tmp_path / "seen.json"
    code = "import json, os, sys; json.dump(dict(os.environ), open(sys.argv[1], 'w'))"
    trace = Nsys.find().capture(
        [sys.executable, "-c", code, str(note)], timeout_s=60, variables={"CHOSEN": "yes"}
    )
    assert trace.version == "2025.3.1.90" and len(trace.operations) == 22
    seen = json.loads(note.read_text())
    assert seen["CHOSEN"] == "yes" and "PATH" in seen and "LABKIT_CANARY" not in seen
    profile, *_, exported = calls(fake)[1:]
    assert "--trace=cuda,nvtx" in profile["arguments"]
    for call in calls(fake):
        assert "tweet-tweet" not in call["environment"].values()
    assert "/some/libraries" not in profile["environment"].get("LD_LIBRARY_PATH", "")
    assert exported["environment"]["LD_LIBRARY_PATH"].startswith("/some/libraries")
    imported = fake.parent / "linux-desktop-glibc_2_11_3-x64" / "environment.json"
    assert imported.exists() == (leaves == ".qdstrm")
    assert list((tmp_path / "temporary").iterdir()) == []


def test_a_capture_is_kept_with_call_stacks_where_that_is_asked(fake, tmp_path):
    kept = tmp_path / "kept.nsys-rep"
    Nsys.find().capture([sys.executable, "-c", "pass"], timeout_s=60, keep=kept, stacks=True)
    assert kept.stat().st_size > 0
    arguments = calls(fake)[1]["arguments"]
    assert set(profiling.STACKS) < set(arguments) and not set(profiling.NO_STACKS) & set(arguments)
    (fake / "no stacks").touch()
    Nsys.find().capture([sys.executable, "-c", "pass"], timeout_s=60, stacks=True)
    assert set(profiling.NO_STACKS) < set(calls(fake)[-2]["arguments"]), (
        "where nsys leaves nothing with them"
    )


def test_an_older_release_is_asked_again_without_the_newer_options_and_the_program_runs_once(
    fake, tmp_path
):
    note = tmp_path / "runs"
    command = [sys.executable, "-c", "import sys; open(sys.argv[1], 'a').write('x')", str(note)]
    assert len(Nsys.find().capture(command, timeout_s=60).operations) == 22
    assert (
        set(profiling.NEWER_OPTIONS) < set(calls(fake)[1]["arguments"]) and note.read_text() == "x"
    )
    (fake / "old").touch()
    assert len(Nsys.find().capture(command, timeout_s=60).operations) == 22
    refused, taken, exported = (call["arguments"] for call in calls(fake)[-3:])
    assert [a for a in refused if a not in profiling.NEWER_OPTIONS] == taken
    assert exported[0] == "export" and note.read_text() == "xx"


def test_a_capture_that_fails_says_what_is_missing(fake, tmp_path):
    command = [sys.executable, "-c", "pass"]
    (fake / "leaves").write_text("")
    with pytest.raises(
        ProfileError,
        match=r"^nsys left no report: else: Importer error status: Importation failed\.$",
    ):
        Nsys.find().capture(command, timeout_s=60)
    (fake / "leaves").write_text(".qdstrm")
    without = Nsys(str(fake / "nsys"), "1", None)
    with pytest.raises(
        ProfileError, match="nsys left a raw capture, and there is no QdstrmImporter beside it"
    ):
        without.capture(command, timeout_s=60)
    (fake / "leaves").write_text(".nsys-rep")
    (fake / "export.sqlite").write_text("no database at all " * 100)
    with pytest.raises(ProfileError, match=r"^capture\.sqlite cannot be read as SQLite"):
        Nsys.find().capture(command, timeout_s=60)
    (fake / "export.sqlite").unlink()
    with pytest.raises(ProfileError, match="nsys export left no SQLite file"):
        Nsys.find().capture(command, timeout_s=60)


@pytest.mark.parametrize(
    ("leaves", "failure"),
    [
        (".nsys-rep", ""),
        ("", "nsys left no report: else: Importer error status: Importation failed."),
    ],
)
def test_an_nsys_that_cannot_read_its_captures_is_not_used(fake, capsys, leaves, failure):
    (fake / "leaves").write_text(leaves)
    Nsys.usable.cache_clear()
    nsys = Nsys.usable()
    Nsys.usable.cache_clear()
    assert Nsys.find().failure() == failure and (nsys is None) is bool(failure)
    assert capsys.readouterr().err == (
        f"labkit: torch.profiler takes the place of nsys: {failure}\n" if failure else ""
    )
    (check,) = (one for one in checks(Nsys.find().failure) if one.name == "nsys")
    assert (check.present, check.detail) == (not failure, failure or "found")


def test_a_capture_that_takes_too_long_is_stopped_with_all_that_it_started(fake, tmp_path):
    note = tmp_path / "pid"
    with pytest.raises(TimeoutError, match="nsys was stopped: the capture took longer than 4 s"):
        Nsys.find().capture([sys.executable, "-c", DAEMON, str(note), "600"], timeout_s=4)
    assert not is_alive(int(note.read_text()))
    listed = subprocess.run(
        ["ps", "-eo", "args"], capture_output=True, text=True, check=True
    ).stdout
    assert str(note) not in listed
