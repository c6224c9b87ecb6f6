"""The published tables are complete; `step_times` relabels no time wrongly and lets no disputed one
through.
"""

import re
from importlib import resources

import numpy as np
import pandas as pd
import pytest

from labkit import published

END_TO_END_KEYS = (
    "source gpu model d_model d_ff num_layers num_heads batch_size context_length dtype compiled"
)
TABLES = {
    "all_reduce": (12, "source device backend world_size size_mb seconds status note"),
    "attention_kernels": (
        5,
        "source gpu implementation batch_size heads seq_len d_head causal dtype phase time_ms "
        "rate_tflops status",
    ),
    "attention_pytorch": (
        160,
        "source gpu table variant batch_size d_model seq_len pass reported_value "
        "reported_unit_note ms_per_pass "
        "memory_mib status",
    ),
    "attention_scores_precision": (
        10,
        "source gpu model context_length dtype attention_scores_ms statistic status note",
    ),
    "end_to_end": (
        295,
        f"{END_TO_END_KEYS} warmup_steps phase mean_ms std_ms first_step_ms second_step_ms status "
        f"note measure_steps "
        "statistic total_ms warmup_total_ms",
    ),
    "flash_attention": (
        68,
        "source gpu batch_size causal seq_len d_model dtype q_tile k_tile best fwd_pytorch_ms "
        "fwd_triton_ms "
        "fwd_speedup bwd_pytorch_ms bwd_triton_ms bwd_speedup e2e_pytorch_ms e2e_triton_ms "
        "e2e_speedup status",
    ),
    "gemm_fraction": (
        52,
        "source gpu model context_length phase gemm_percent qualifier status note",
    ),
    "kernels_nsys": (
        130,
        "source gpu model context_length phase rank kernel time_percent total_ms instances avg_us "
        "med_us min_us max_us "
        "std_us status ranking kernel_class approximate time_percent_low time_percent_high note",
    ),
    "memory_peaks": (
        10,
        "source gpu model batch_size context_length dtype phase peak_gib approximate status note",
    ),
    "mixed_precision": (
        34,
        "source kind component accumulator_dtype value_dtype autocast_dtype reported_dtype "
        "reported_value status note",
    ),
    "nsys_forward": (
        40,
        "source gpu model context_length timeit_ms nsys_ms status timeit_origin note",
    ),
    "nvtx_fwd_bwd": (
        14,
        "source gpu model context_length forward_ms backward_ms step_total_ms backward_to_forward "
        "status note",
    ),
    "saved_for_backward": (
        3,
        "source part code d_model d_ff num_heads context_length batch_size dtype attention "
        "saved_mib status",
    ),
    "interconnects": (5, "source gpu link bf16_tflops link_gb_per_s status note"),
    "siglip2": (
        2,
        "source gpu variant dtype batch_size max_patches mini_batch_size forward_ms backward_ms "
        "peak_mib status note",
    ),
    "softmax_vs_matmul": (
        26,
        "source gpu model context_length softmax_ms matmul_ms matmul_scope attention_total_ms "
        "softmax_percent "
        "softmax_percent_of matmul_percent softmax_to_matmul_percent matmul_approximate status "
        "note",
    ),
}
# d_model, d_ff, num_layers, num_heads
CANONICAL_DIMS = {
    "small": (768, 3072, 12, 12),
    "medium": (1024, 4096, 24, 16),
    "large": (1280, 5120, 36, 20),
    "xl-2025": (1600, 6400, 48, 25),
    "2.7b": (2560, 10240, 32, 32),
}
STEP_TIME_COLUMNS = (
    "source gpu size context batch precision compile warmup_steps phase statistic published_ms "
    "std_ms status caveat"
).split()
OPTIMIZER_STEP_NOTE = "published_script_also_runs_optimizer_step"


@pytest.fixture(scope="module")
def raw() -> pd.DataFrame:
    return published.load("end_to_end")


@pytest.fixture(scope="module")
def everything() -> pd.DataFrame:
    """Every row in labkit's vocabulary, with those that `step_times` leaves out marked
    "disputed".
    """
    rows = [
        published._row_in_labkit_vocabulary(row)
        for row in published.load("end_to_end").to_dict("records")
    ]
    return pd.DataFrame(rows).astype(
        {"context": "Int64", "batch": "Int64", "warmup_steps": "Int64"}
    )


@pytest.fixture(scope="module")
def usable() -> pd.DataFrame:
    return published.step_times()


def notes_of(raw: pd.DataFrame) -> pd.Series:
    return raw["note"].fillna("")


@pytest.mark.parametrize("table", TABLES)
def test_table_is_complete(table):
    rows, columns = TABLES[table]
    loaded = published.load(table)
    assert len(loaded) == rows
    assert list(loaded.columns) == columns.split()
    assert set(loaded["status"]) <= {"ok", "oom", "not_reported"}


def test_every_table_is_documented_with_its_row_count():
    folder = resources.files("labkit") / "data" / "published"
    readme = (folder / "README.md").read_text(encoding="utf-8")
    documented = {
        name: int(rows)
        for name, rows in re.findall(r"^\| (\w+)\.csv \| (\d+) \|", readme, flags=re.MULTILINE)
    }
    assert documented == {table: rows for table, (rows, _) in TABLES.items()}
    assert {entry.name for entry in folder.iterdir()} == {
        "README.md",
        *(f"{table}.csv" for table in TABLES),
    }


def test_every_source_is_described():
    readme = (resources.files("labkit") / "data" / "published" / "README.md").read_text(
        encoding="utf-8"
    )
    sources = {source for table in TABLES for source in published.load(table)["source"]}
    assert {source for source in sources if f"`{source}`" not in readme} == set()


def test_unknown_table_names_the_value_and_the_accepted_names():
    with pytest.raises(ValueError) as raised:
        published.load("end_to_end.csv")
    assert (
        str(raised.value)
        == f"unknown published table 'end_to_end.csv'; accepted: {', '.join(sorted(TABLES))}"
    )


def test_attention_values_are_seconds_of_100_passes():
    attention = published.load("attention_pytorch")
    np.testing.assert_allclose(attention["ms_per_pass"], attention["reported_value"] * 1e3 / 100)


def test_mean_and_total_of_a_run_agree(raw):
    runs = raw[raw["total_ms"].notna()]
    assert len(runs) == 60
    from_mean_ms = runs["mean_ms"] * runs["measure_steps"] + runs["warmup_total_ms"]
    # Each mean is printed to 0.1 ms, and the sums to 0.1 ms.
    assert ((from_mean_ms - runs["total_ms"]).abs() <= 0.05 * runs["measure_steps"] + 0.1).all()


def test_columns_and_types(everything, usable):
    for table in (everything, usable):
        assert list(table.drop(columns="disputed", errors="ignore").columns) == STEP_TIME_COLUMNS
        assert (table[["context", "batch", "warmup_steps"]].dtypes == "Int64").all()
        assert (table[["published_ms", "std_ms"]].dtypes == "float64").all()
        assert list(table.index) == list(range(len(table)))


def test_every_row_is_read_in_order(raw, everything):
    assert len(everything) == len(raw)
    np.testing.assert_array_equal(everything["published_ms"], raw["mean_ms"])
    np.testing.assert_array_equal(everything["std_ms"], raw["std_ms"])
    for column, raw_column in {
        "source": "source",
        "gpu": "gpu",
        "status": "status",
        "statistic": "statistic",
    }.items():
        assert list(everything[column]) == list(raw[raw_column])
    for column, raw_column in {
        "context": "context_length",
        "batch": "batch_size",
        "warmup_steps": "warmup_steps",
    }.items():
        assert everything[column].equals(raw[raw_column].astype("Int64"))


def test_disputed_rows_are_left_out(raw, everything, usable):
    disputed = (
        (raw["statistic"] != "mean")
        | raw["context_length"].isna()
        | (raw["mean_ms"] < 0)
        | notes_of(raw).str.contains("companion_data|profiled_under_nsys")
    )
    # Two quotes, sixteen profiled rows, one negative difference.
    assert disputed.sum() == 19
    assert everything["disputed"].equals(disputed.rename("disputed"))
    pd.testing.assert_frame_equal(
        usable, everything[~disputed].reset_index(drop=True).drop(columns="disputed")
    )
    assert usable["context"].notna().all()


def test_contradicted_quotes_are_left_out_and_their_fp32_partners_stay(everything, usable):
    a100_40gb = everything[everything["gpu"] == "A100 40GB"]
    assert sorted(a100_40gb["published_ms"]) == [68, 73, 440, 1090]
    assert sorted(usable.loc[usable["gpu"] == "A100 40GB", "published_ms"]) == [68, 1090]
    assert set(usable.loc[usable["gpu"] == "A100 40GB", "precision"]) == {"fp32"}


def test_out_of_memory_rows_stay_without_a_time(raw, usable):
    out_of_memory = usable["status"] == "oom"
    assert out_of_memory.sum() == (raw["status"] == "oom").sum() == 60
    assert usable["published_ms"].isna().equals(out_of_memory.rename("published_ms"))
    assert (usable.loc[~out_of_memory, "published_ms"] > 0).all()
    assert set(usable["status"]) == {"ok", "oom"}
    assert not usable.loc[out_of_memory, "caveat"].str.contains("first iteration").any()


def test_forward_backward_that_steps_the_optimizer_is_a_train_step(raw, everything):
    relabelled = notes_of(raw).str.contains(OPTIMIZER_STEP_NOTE)
    assert relabelled.sum() == 60
    assert set(raw.loc[relabelled, "phase"]) == {"forward_backward"}
    assert set(everything.loc[relabelled, "phase"]) == {"train_step"}
    assert everything.loc[relabelled, "caveat"].str.contains("also steps the optimizer").all()
    assert list(everything.loc[~relabelled, "phase"]) == list(raw.loc[~relabelled, "phase"])
    assert not everything.loc[~relabelled, "caveat"].str.contains("also steps the optimizer").any()
    assert set(everything["phase"]) == {"forward", "backward", "forward_backward", "train_step"}


def test_sizes_carry_the_canonical_dimensions(raw, everything):
    dims = raw[["d_model", "d_ff", "num_layers", "num_heads"]].itertuples(index=False, name=None)
    assert [CANONICAL_DIMS[size] for size in everything["size"]] == list(dims)
    assert set(everything["size"]) == set(CANONICAL_DIMS)


def test_precision_and_compile_say_what_ran(raw, everything):
    seen = set(
        zip(
            raw["dtype"],
            raw["compiled"],
            everything["precision"],
            everything["compile"],
            strict=True,
        )
    )
    assert seen == {
        ("float32", "none", "fp32", "none"),
        ("float32", "compile", "fp32", "whole"),
        ("float32", "compile_tf32", "tf32", "whole"),
        ("bfloat16_autocast", "none", "bf16", "none"),
    }


def test_backward_by_subtraction_says_so_and_is_one(raw, everything):
    is_backward = everything["phase"] == "backward"
    says_so = everything["caveat"].str.contains(
        "difference of two timings, its std their quadrature sum"
    )
    assert is_backward.sum() == 32
    assert says_so.equals(is_backward.rename("caveat"))

    case = ["gpu", "size", "precision", "compile", "warmup_steps"]
    reports = everything[everything["source"] == "a2-report-macbook-rtxpro6000"]
    mean_ms, std_ms = (
        reports.pivot(index=case, columns="phase", values=value)
        for value in ("published_ms", "std_ms")
    )
    np.testing.assert_allclose(
        mean_ms["forward_backward"] - mean_ms["forward"], mean_ms["backward"], atol=0.011
    )
    np.testing.assert_allclose(
        np.hypot(std_ms["forward"], std_ms["forward_backward"]), std_ms["backward"], rtol=1e-5
    )


def test_runs_without_warmup_say_so(usable):
    timed_cold = (usable["warmup_steps"] == 0).fillna(False) & (usable["status"] == "ok")
    says_so = usable["caveat"].str.contains("no warm-up")
    # RTX 5090: 20 timed cases; RTX PRO 6000: 5 sizes x 3 phases less the negative one; A100-SXM4:
    # the warm-up study's.
    assert timed_cold.sum() == 20 + 14 + 1
    assert list(says_so) == list(timed_cold)
    assert set(usable.loc[usable["caveat"].str.contains("what is subtracted"), "phase"]) == {
        "backward"
    }


def test_spread_caveats_name_the_cases_they_are_about(usable):
    wide = usable[usable["caveat"].str.contains("std above half")]
    assert set(zip(wide["gpu"], wide["size"], wide["warmup_steps"], strict=True)) == {
        ("RTX PRO 6000 Workstation", "medium", 1)
    }
    assert sorted(wide["phase"]) == ["backward", "forward", "forward_backward"]

    above_claim = usable[usable["caveat"].str.contains("1 %")]
    assert above_claim[["gpu", "size", "phase", "published_ms"]].values.tolist() == [
        ["A100-SXM4-40GB", "large", "forward_backward", 273.11]
    ]


def test_rtx5090_forward_is_marked_as_run_with_autograd(everything):
    marked = everything["caveat"].str.contains("autograd on")
    expected = (everything["gpu"] == "RTX 5090") & (everything["phase"] == "forward")
    assert expected.sum() == 70
    assert list(marked) == list(expected)


def test_warmup_steps_are_missing_where_not_stated(usable):
    assert usable.loc[usable["gpu"] == "H100 80GB", "warmup_steps"].isna().all()
    assert set(usable.loc[usable["gpu"] == "RTX 5090", "warmup_steps"]) == {0, 1, 5}
    assert set(usable.loc[usable["gpu"] == "A100-SXM4-40GB", "warmup_steps"]) == {0, 1, 2, 5}


def test_merges_with_measurements_on_the_case(usable):
    case = {
        "size": "xl-2025",
        "context": 512,
        "batch": 4,
        "phase": "train_step",
        "compile": "whole",
    }
    ours = pd.DataFrame(
        [
            case | {"precision": "tf32", "median_ms": 1.0},
            case | {"precision": "fp32", "median_ms": 2.0},
        ]
    )
    merged = ours.merge(usable, on=[*case, "precision"])
    assert dict(zip(merged["precision"], merged["published_ms"], strict=True)) == {
        "tf32": 283.5,
        "fp32": 749.4,
    }
    assert set(merged["gpu"]) == {"H100 80GB"}


def test_an_unknown_note_model_or_dtype_is_an_error(monkeypatch, raw):
    for column, value in {
        "note": "measured_on_a_tuesday",
        "model": "xxl",
        "dtype": "float8",
    }.items():
        changed = raw.copy()
        changed.loc[0, column] = value
        monkeypatch.setattr(published, "load", lambda table, changed=changed: changed)
        with pytest.raises(KeyError, match=value):
            published.step_times()
