"""Notebook 05: a case is what its label says, the accounting what autograd keeps, the report what the records say."""

import dataclasses
import functools
import itertools
import math
import re

import chapters
import pandas as pd
import pytest
import torch
from chapters import CPU, H200_BYTES, execute_smoke, finished, in_section, on_a_cpu
from conftest import more

from labkit import accounting, published
from labkit.configs import ATTENTION, MATERIALISING, REFERENCE_DEVICE
from labkit.experiments import attention as experiment
from labkit.experiments.attention import AttentionCall, cases, run_case
from labkit.experiments.sweep import Case, Skip
from labkit.kernels.attention import attention
from labkit.kernels.reference import attention_reference
from labkit.report import attention as report
from labkit.report import figures
from labkit.report.chapter import Chapter
from labkit.report.tables import select

NOTEBOOK = "05_attention"
SECTIONS = ("ceilings", "attention", "transformer")


@pytest.fixture(autouse=True)
def this_device_is_a_cpu(monkeypatch):
    yield from on_a_cpu(monkeypatch)


def parameters(impl="eager", precision="fp32", d_head=16, length=32, batch=8) -> dict:
    return {"impl": impl, "precision": precision, "d_head": d_head, "length": length, "batch": batch}


def case(**chosen) -> Case:
    return Case("attention", parameters(**chosen), ("forward", "backward"), 60.0, 0.01, stop_at_failure=True)


measure = functools.partial(chapters.measure, run_case)


def calls(profile: str) -> list[dict]:
    return [one.parameters for one in in_section(cases(profile, "cuda"), "attention")]


def test_full_is_every_head_dimension_and_length_of_the_published_grid_in_every_series():
    table = published.load("attention_pytorch")
    theirs = {(d_head, length) for d_head, length in zip(table["d_model"], table["seq_len"], strict=True)}
    assert len(theirs) == 20
    for precision, impls in ATTENTION["full"].series.items():
        for impl in impls:
            own = [c for c in calls("full") if (c["impl"], c["precision"]) == (impl, precision)]
            assert theirs <= {(c["d_head"], c["length"]) for c in own}, (precision, impl)
    assert set(table["batch_size"]) == {c["batch"] for c in calls("full")} == {8}


def test_full_has_every_sdpa_backend_in_both_precisions_and_tf32_compiled_only():
    series = {(c["impl"], c["precision"]) for c in calls("full")}
    backends = ("sdpa_math", "sdpa_flash", "sdpa_cudnn", "sdpa_efficient")
    expected = {(impl, precision) for impl in ("eager", "compiled", *backends) for precision in ("fp32", "bf16")}
    assert series == expected | {("compiled", "tf32"), ("compiled_heads", "fp32"), ("compiled_heads", "bf16")}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_full_goes_on_past_the_memory_of_an_h200(precision):
    """For eager with every head dimension, as the accounting has it."""
    own = [c for c in calls("full") if (c["impl"], c["precision"]) == ("eager", precision)]
    for d_head in ATTENTION["full"].d_heads:
        shapes = [(8, c["length"], d_head, report.ELEMENT_BYTES[precision]) for c in own if c["d_head"] == d_head]
        needs = [accounting.attention_peak_bytes("backward", *shape, device_kind="cuda") for shape in shapes]
        assert needs[0] < H200_BYTES < needs[-1]


def test_a_backward_pass_is_not_tried_after_a_failed_forward_pass():
    found = in_section(cases("full", "cuda"), "attention")
    assert {(one.phases, one.stop_at_failure) for one in found} == {(("forward", "backward"), True)}


def test_a_grid_is_narrowed():
    found = in_section(cases("full", "cuda", lengths=[256], d_heads=[64]), "attention")
    narrowed = [one.parameters for one in found]
    assert narrowed == [c for c in calls("full") if (c["length"], c["d_head"]) == (256, 64)]
    assert len(narrowed) > 10


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("impl", ["eager", "sdpa_math", "sdpa_flash"])
def test_a_case_gives_times_bytes_and_errors_under_its_own_label(impl, precision):
    one = case(impl=impl, precision=precision)
    measured = measure(one)
    assert list(measured) == ["forward", "backward"]
    for phase in measured.values():
        assert phase.case == one.parameters
        assert phase.metrics["median_ms"] > 0 and phase.metrics["n"] >= 3
        assert phase.observed["dtype"] == {"fp32": "float32", "bf16": "bfloat16"}[precision]
        assert phase.observed["memory_source"] == "tensors of the autograd graph"
    kind = report.KINDS[impl]
    shape = (8, 32, 16, report.ELEMENT_BYTES[precision])
    forward = measured["forward"].metrics
    assert forward["saved_bytes"] == accounting.attention_saved_bytes(kind, *shape)
    assert forward["in_use_bytes"] == accounting.attention_in_use_bytes(kind, *shape)
    names = {name for name in measured["backward"].metrics if name.endswith("_error")}
    assert names == {"dq_relative_error", "dk_relative_error", "dv_relative_error"}
    for phase in measured.values():
        errors = [value for name, value in phase.metrics.items() if name.endswith("_error")]
        assert all(0 < error < experiment.LARGEST_ERROR[precision] for error in errors)


@pytest.mark.parametrize("impl", ["eager", "sdpa_flash"])
def test_a_masked_case_is_held_to_the_masked_oracle(impl):
    masked = dataclasses.replace(case(impl=impl), section="masked", parameters={**parameters(impl), "causal": True})
    for phase in measure(masked).values():
        assert phase.case == masked.parameters and phase.metrics["median_ms"] > 0
    call = AttentionCall(CPU, {**parameters(impl), "causal": True})
    assert torch.allclose(call.forward()[:, 0], call.inputs[2][:, 0]), "the first query sees the first key alone"
    call.function = lambda *tensors, causal: attention_reference(*tensors)
    with pytest.raises(AssertionError, match="output_relative_error is"):
        call.errors("forward")


def test_masked_cases_are_of_one_length_and_each_has_its_unmasked_one():
    masked = [one.parameters for one in in_section(cases("full", "cuda"), "masked")]
    assert len(masked) == 12 and {one["length"] for one in masked} == {16384}
    assert all({k: v for k, v in one.items() if k != "causal"} in calls("full") for one in masked)
    assert "compiled" not in {one.parameters["impl"] for one in in_section(cases("smoke", "cpu"), "masked")}


def test_a_label_that_is_not_what_ran_is_not_its_case():
    flash = functools.partial(attention, impl="sdpa_flash")
    for impl, wrong in (("sdpa_flash", attention_reference), ("eager", flash)):
        assert AttentionCall(CPU, parameters(impl=impl)).described() == parameters(impl=impl)
        call = AttentionCall(CPU, parameters(impl=impl))
        call.function = wrong
        assert call.described() != parameters(impl=impl)


@pytest.mark.parametrize("impl", ["sdpa_cudnn", "sdpa_efficient"])
def test_a_backend_that_refuses_is_skipped_with_its_reason(impl):
    with pytest.raises(Skip, match="No viable backend"):
        measure(case(impl=impl))


def test_tf32_is_skipped_where_there_is_none():
    with pytest.raises(Skip, match="a processor has no TF32"):
        measure(case(impl="compiled", precision="tf32"))


def test_an_unknown_implementation_is_refused():
    with pytest.raises(ValueError, match="unknown implementation 'magic'; accepted: eager, compiled"):
        AttentionCall(CPU, parameters(impl="magic"))


def test_what_cannot_be_the_first_out_of_memory_is_skipped(monkeypatch):
    """The shortest length that does not fit is tried; where half of it does not fit either, nothing is."""
    monkeypatch.setattr(experiment, "memory_bytes", lambda device: 24 * 10**9)
    tried = {}
    for impl, precision in itertools.product(MATERIALISING, ("fp32", "bf16")):
        for length in (4096, 8192, 16384, 32768, 65536):
            try:
                experiment._require_room(CPU, parameters(impl, precision, length=length))
                tried[impl, precision] = length
            except Skip as skip:
                assert f"at length {length // 2} the scores alone take" in str(skip)
    # 8 · 32768² · 4 B are 34 GB, 8 · 32768² · 2 B are 17 GB: the math backend computes in fp32.
    assert tried == {
        ("eager", "fp32"): 32768, ("eager", "bf16"): 65536, ("compiled", "fp32"): 32768, ("compiled", "bf16"): 65536,
        ("sdpa_math", "fp32"): 32768, ("sdpa_math", "bf16"): 32768,
    }  # fmt: skip
    experiment._require_room(CPU, parameters("sdpa_flash", length=2**20))


def test_a_compiled_transformers_case_is_notebook_01s(monkeypatch):
    """Only what notebook 01 lacks is measured: the backward pass alone, by notebook 01's own code."""
    found = in_section(cases("full", "cuda"), "transformer")
    assert {one.phases for one in found} == {("backward",)}
    assert {one.parameters["compile"] for one in found} == {"regional"}
    steps = [(n, precision) for n, those in ATTENTION["full"].model_precisions.items() for precision in those]
    assert steps == [(128, "fp32"), (512, "fp32"), (512, "bf16")]
    seen = {(one.parameters["size"], (one.parameters["context"], one.parameters["precision"])) for one in found}
    assert seen == set(itertools.product(ATTENTION["full"].model_sizes, steps))
    small = {**found[0].parameters, "size": "nano", "context": 32, "compile": "none"}
    measured = measure(dataclasses.replace(found[0], parameters=small, time_limit_s=0.01))
    assert list(measured) == ["backward"]
    assert measured["backward"].case == small and measured["backward"].metrics["median_ms"] > 0


def test_the_oracle_is_the_formula_in_fp64_however_it_is_cut(monkeypatch):
    call = AttentionCall(CPU, parameters(length=33, d_head=5))
    q, k, v = (x.detach()[-1].double().requires_grad_() for x in call.inputs)
    out = attention_reference(q, k, v)
    out.backward(call.grad_out[-1].double())
    exact = {"out": out.detach(), "dq": q.grad, "dk": k.grad, "dv": v.grad}
    for num_scores in (1, 33 * 7, 2**25):
        monkeypatch.setattr(experiment, "ORACLE_SCORES", num_scores)
        call.__dict__.pop("oracle", None)
        for name, value in call.oracle.items():
            torch.testing.assert_close(value, exact[name], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_wrong_result_in_the_last_sequence_gives_no_time(phase):
    call = AttentionCall(CPU, parameters())

    def wrong(q, k, v):
        factor = torch.ones(q.shape[0], 1, 1)
        factor[-1] = 1.01
        right = attention_reference(q, k, v)
        # In the backward pass alone: the value is right, its gradient is not.
        return right * factor if phase == "forward" else right.detach() + (right - right.detach()) * factor

    assert call.errors(phase)
    call.function = wrong
    with pytest.raises(AssertionError, match=r"eager: (output|dq)_relative_error is 0.01, more than 0.0001"):
        call.errors(phase)


def test_a_result_that_is_not_a_number_gives_no_time():
    call = AttentionCall(CPU, parameters())
    call.function = lambda q, k, v: attention_reference(q, k, v) * float("nan")
    with pytest.raises(AssertionError, match="is nan, more than"):
        call.errors("forward")


@pytest.fixture(scope="module")
def recorded() -> dict[str, pd.DataFrame]:
    """The reference device's records by section, with the ceilings of all sessions and notebook 01's steps.

    Of each row's session alone: tests change times, and the intervals would cover those of other sessions.
    """
    own, models = (Chapter(notebook, device=REFERENCE_DEVICE) for notebook in (NOTEBOOK, "01_benchmarking"))
    frames = {section: own.records(section, every_session=section == "ceilings") for section in SECTIONS}
    frames["models"] = models.records("steps", "compile")
    return {name: frame.drop(columns="sessions", errors="ignore") for name, frame in frames.items()}


def test_on_cuda_the_peaks_are_those_that_were_measured(recorded):
    rows = report.memory(recorded["attention"]).query("impl == 'eager'")
    for phase in ("forward", "backward"):
        known = rows.dropna(subset=[f"peak_{phase}"])
        assert set(known["precision"]) == {"fp32", "bf16"} and set(known["d_head"]) == set(ATTENTION["full"].d_heads)
        assert (known[f"peak_{phase}"] == known[f"predicted_{phase}"]).all()


def test_on_cuda_memory_runs_out_where_it_was_measured_to(recorded):
    rows = report.limits(recorded["attention"]).query("impl == 'eager'")
    assert len(rows) == 2 * len(ATTENTION["full"].d_heads)
    assert (rows["length_told"] == rows["length_oom"]).all() and (rows["phase_told"] == rows["phase_oom"]).all()
    # By the bytes given out alone the backward pass in fp32 would have fitted.
    shape = (8, 32768, 64, 4)
    peak = accounting.attention_peak_bytes("backward", *shape, device_kind="cuda")
    held = accounting.attention_reserved_bytes("backward", *shape, device_kind="cuda")
    assert peak < H200_BYTES < held
    # At the failed request for the fifth block, four were held: three given out, one cut for the gradient of v.
    lost = recorded["attention"].query("status == 'oom' and impl == 'eager' and precision == 'fp32' and d_head == 64")
    found = re.search(r"allocate (\S+) GiB.* (\S+) GiB is reserved", lost["reason"].iloc[0], re.DOTALL)
    matrix, grad_v = (4 * 8 * 32768 * width / 2**30 for width in (32768, 64))
    assert [float(size) for size in found.groups()] == pytest.approx([matrix, matrix - grad_v], abs=0.005)


def changed(frame: pd.DataFrame, values: dict, **case) -> pd.DataFrame:
    """Returns a copy of records in which those of this case have other values; functions are given the old ones."""
    rows, frame = select(frame, **case).index, frame.copy()
    assert len(rows)
    for column, value in values.items():
        frame.loc[rows, column] = value(frame.loc[rows, column]) if callable(value) else value
    return frame


CASE_64 = {"precision": "bf16", "d_head": 64, "length": 16384, "phase": "forward"}


def everything(calls, ceilings, models, backward) -> dict[str, str]:
    """Returns all that the chapter shows, as text."""
    arguments = {"traffic": (calls, ceilings), "transformer": (models, backward)}
    shown = {}
    for name in ("times", "traffic", "memory", "compile", "transformer", "published"):
        for form in ("table", "figure", "findings"):
            if build := getattr(report, f"{form}_{name}", None):
                made = build(*arguments.get(name, (calls,)))
                shown[build.__name__] = figures.svg(made).decode() if form == "figure" and made else str(made)
                shown[build.__name__] = made.to_string() if form == "table" else shown[build.__name__]
    return shown


@pytest.fixture(scope="module")
def unchanged(recorded) -> dict[str, str]:
    return everything(*(recorded[name] for name in ("attention", "ceilings", "models", "transformer")))


@pytest.mark.parametrize(
    ("impl", "precision", "follow"),
    [
        ("eager", "bf16", "table_times figure_times findings_times figure_traffic findings_traffic table_compile"),
        ("compiled", "fp32", "figure_times figure_traffic table_compile findings_compile table_published"),
    ],
)
def test_a_changed_time_changes_all_that_shows_it(recorded, unchanged, impl, precision, follow):
    slower = {name: lambda old: 1.7 * old + 20 for name in ("median_ms", "p20_ms", "p80_ms")}
    others = changed(recorded["attention"], slower, **CASE_64 | {"impl": impl, "precision": precision})
    new = everything(others, *(recorded[name] for name in ("ceilings", "models", "transformer")))
    assert {name for name in new if unchanged[name] != new[name]} >= set(follow.split())
    assert all(unchanged[name] == new[name] for name in ("table_memory", "table_transformer"))


def test_tf32_is_never_held_against_fp32_eager(recorded):
    """What TF32 gives is precision; what compiling gives is told within one precision."""
    calls, models = recorded["attention"], recorded["models"]
    assert set(report.over_eager(calls)["precision"]) == {"fp32", "bf16"}
    pairs = report.model_pairs(models, recorded["transformer"])
    slower = changed(models, {"median_ms": lambda old: 10 * old}, precision="fp32", compile="none")
    others = report.model_pairs(slower, recorded["transformer"])
    same = (pairs["ratio"] == others["ratio"]).groupby(pairs["precision"]).all()
    assert same.to_dict() == {"fp32": False, "tf32": True, "bf16": True}


def test_a_prediction_is_of_the_rates_of_its_own_session(recorded):
    calls = changed(recorded["attention"], {"session": "a"})
    rates = recorded["ceilings"].drop_duplicates(["kind", "precision"], keep="last").assign(session="a")
    twice = {"achieved_gb_per_s": lambda old: 2 * old, "achieved_tflops": lambda old: 2 * old}

    def predicted(ceilings):
        return select(report.predicted_times(calls, ceilings), impl="eager", **CASE_64)["predicted_ms"].tolist()

    known = rates.set_index(["kind", "precision"])
    pass_ms = 2 * 8 * 16384**2 / known["achieved_gb_per_s"]["copy", "fp32"] / 1e6
    product_ms = 2 * 8 * 16384**2 * 64 / known["achieved_tflops"]["gemm", "bf16"] / 1e9
    assert predicted(rates) == [pytest.approx(4 * pass_ms + 2 * max(pass_ms, product_ms))]
    other = changed(rates, twice).assign(session="b")
    assert predicted(other) == [] and predicted(pd.concat([rates, other])) == predicted(rates)
    assert predicted(changed(rates, twice)) == [pytest.approx(predicted(rates)[0] / 2)]
    fused = select(report.predicted_times(calls, rates), impl=report.FUSED)
    assert len(fused) and not fused["passes"].any()


def test_what_is_within_the_noise_is_not_ahead_and_what_the_host_bounds_is_left_out(recorded):
    calls, flash = recorded["attention"], {"impl": "sdpa_flash", "precision": "bf16"}
    eager = select(calls, impl="eager", **CASE_64)["median_ms"].item()
    for gain, session, verdict in ((1.02, "a", "undecided"), (1.08, "b", "undecided"), (1.08, "a", "ahead")):
        frame = changed(calls, {"half_width_fraction": 0.001, "session": "a"}, **CASE_64)
        frame = changed(frame, {"median_ms": eager / gain, "session": session}, **flash | CASE_64)
        pair = select(report.over_eager(frame), **flash | CASE_64).iloc[0]
        assert pair["ratio"] == pytest.approx(gain) and pair["verdict"] == verdict
    assert "SDPA flash" in report.findings_times(calls)[0]
    bound = changed(calls, {"launch_median_ms": 1e4, "host_median_ms": 1e4}, **flash, status="ok")
    assert "SDPA flash" not in report.findings_times(bound)[0]


def test_bytes_are_compared_exactly(recorded):
    calls = recorded["attention"]
    frame = changed(calls, {"saved_bytes": lambda old: old + 1}, impl="eager", **CASE_64)
    good, fewer = (int(re.search(r"(\d+) of", report.findings_memory(f)[0])[1]) for f in (calls, frame))
    assert fewer == good - 1
    line = report.table_memory(frame).set_index(["precision", "implementation"]).loc["bf16", "eager"]
    assert line["kept − predicted (bytes)"] == "1" and line["in use − predicted (bytes)"] == "0"
    on_cpu = calls.copy()
    on_cpu.attrs["device_kind"] = "cpu"
    assert not re.search(r"[1-9]\d* of \d+ at eager's backward peak", report.findings_memory(on_cpu)[0])


def test_where_memory_runs_out_is_held_against_the_closed_form(recorded):
    calls = recorded["attention"]
    assert report.findings_memory(calls)[2].count("as predicted for 4 of 4") == 2
    earlier = {"impl": "eager", "precision": "fp32", "d_head": 64, "length": 8192, "phase": "backward"}
    frame = changed(calls, {"status": "oom"}, **earlier)
    assert "as predicted for 3 of 4" in report.findings_memory(frame)[2]
    assert report.table_memory(frame).iloc[0]["out of memory at"] == "8,192, backward"
    assert figures.svg(report.figure_times(frame)) != figures.svg(report.figure_times(calls))


def test_a_mask_is_shown_beside_the_same_calls_without(recorded):
    calls = select(recorded["attention"], impl=["eager", "sdpa_flash"], precision="bf16", d_head=64, length=16384)
    masked = calls.assign(median_ms=calls["median_ms"] / calls["impl"].map({"eager": 0.8, "sdpa_flash": 1.6}))
    table = report.table_mask(calls, masked).set_index("impl")
    assert "(0.800×)" in table.loc["eager", "forward (ms): none → causal"]
    assert "(1.60×)" in table.loc["SDPA flash", "backward (ms): none → causal"]
    (text,) = report.findings_mask(calls, masked)
    assert "the formula, which computes every score, 2 behind (0.800×)" in text
    assert "fused kernels, which leave tiles out, 2 ahead (1.60×)" in text
    assert report.findings_mask(calls, masked.iloc[:0]) == [] and report.table_mask(calls, masked.iloc[:0]).empty


def test_a_replacement_by_sdpa_is_what_the_compiler_reported(recorded, monkeypatch):
    own, calls = Chapter(NOTEBOOK, device=REFERENCE_DEVICE), recorded["attention"]
    monkeypatch.setattr(own, "records", lambda section: calls)
    for number, text in ((2, "in 3 of 3 cases in bf16"), (0, "in 0 of 3 cases in bf16")):
        calls = changed(calls, {"num_replacements": number}, impl="compiled_heads", precision="bf16", status="ok")
        calls = changed(calls, {"num_replacements": 0}, impl="compiled", precision="bf16", status="ok")
        assert text in report.findings_compile(calls)[0]
        assert bool(report.front(own)) == bool(number) == ("→" in report.findings_compile(calls)[0])
        rows = report.memory(calls).query("impl == 'compiled_heads' and precision == 'bf16'")
        scores = 2 * rows["batch"] * rows["length"] ** 2
        assert ((rows["predicted_saved"] > scores) == (number == 0)).all()


def test_published_rows_stand_beside_ours_as_times_of_unknown_kind(recorded):
    matched = report.published_calls(recorded["attention"])
    assert len(matched) == 3 * 20 * 2
    assert not matched.duplicated(["impl", "precision", "d_head", "length", "phase"]).any()
    assert (matched["ratio"] == matched["published_ms"] / matched["median_ms"]).all()
    table = report.table_published(recorded["attention"])
    assert set(table["kind of time"]) == {"call"} and set(table["caveat"]) == {"mask unknown"}


COLUMNS = ["launch_median_ms", "peak_bytes", "device_bytes", "num_replacements"]


@pytest.mark.parametrize("missing", [[], COLUMNS, *more(*([column] for column in COLUMNS))], ids=str)
def test_records_of_a_smaller_run_are_shown(recorded, missing):
    """As of a CPU: some columns, implementations and the ceilings' other sessions are not there."""
    calls = recorded["attention"]
    fewer = calls.drop(columns=missing) if missing else select(calls, impl="eager", d_head=16)
    shown = everything(fewer, recorded["ceilings"].iloc[:1], recorded["models"], recorded["transformer"].iloc[:0])
    assert len(shown) == 12 and "eager" in shown["table_times"]


def test_where_every_call_failed_no_figure_is_shown(recorded):
    failed = changed(recorded["attention"], {"status": "error"})
    empty = everything(failed, *(recorded[name] for name in ("ceilings", "models", "transformer")))
    assert empty["figure_times"] == empty["figure_traffic"] == "None" and "failed" in empty["findings_times"]


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """The smoke profile executed here."""
    folder, _ = execute_smoke(NOTEBOOK, tmp_path_factory.mktemp("figures"))
    return folder


@pytest.mark.slow
def test_smoke_measures_every_case_and_writes_figures(measured):
    records = finished(NOTEBOOK, measured)
    assert not [record for record in records if record.status in ("error", "timeout", "oom")]
    assert {record.case["impl"] for record in records if record.status == "skipped"} == {"sdpa_cudnn"}
    assert {path.name for path in measured.glob("05_*.svg")} == {"05_times.svg", "05_traffic.svg"}


@pytest.mark.slow
def test_smoke_holds_the_accounting_and_sees_what_the_compiler_replaced(measured):
    frame = Chapter(NOTEBOOK, device=measured.name, output=str(measured.parent)).records("attention")
    rows = report.memory(frame)
    assert {"eager", "compiled", "compiled_heads", "sdpa_math", "sdpa_flash"} == set(rows["impl"])
    assert (rows["in_use_bytes"] == rows["predicted_in_use"]).all()
    assert (rows["saved_bytes"] == rows["predicted_saved"]).all()
    replaced = frame[frame["status"] == "ok"].groupby("impl")["num_replacements"].max()
    assert replaced["compiled"] == 0 and replaced["compiled_heads"] > 0 and math.isnan(replaced["eager"])
