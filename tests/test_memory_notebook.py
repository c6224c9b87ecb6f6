"""Notebook 04: a case is what its label says, the report what the records say, the smoke profile a whole chapter."""

import dataclasses
import json
import os
import subprocess
import sys

import pytest
import torch
from chapters import CPU, H200_BYTES

from labkit import accounting, hardware, notebooks
from labkit.configs import MEMORY, ModelConfig, model_config
from labkit.experiments import memory as experiment
from labkit.experiments.memory import cases, run_case
from labkit.experiments.sweep import Case, Skip
from labkit.measure.snapshots import History, SnapshotError, pair_events
from labkit.records import Record, RecordStore
from labkit.report import figures
from labkit.report import memory as report
from labkit.report.chapter import Chapter

NOTEBOOK = "04_memory"
OTHER_BYTES = 70 * 2**20
BLOCK_REST = 2**20


# ---- the cases -------------------------------------------------------------------------------------------------------


def test_full_is_every_size_and_context_in_both_precisions():
    found = {
        (c.parameters["size"], c.parameters["context"], c.parameters["precision"])
        for c in cases("full", "cuda") if c.section == "peaks"
    }  # fmt: skip
    sizes = ("small", "medium", "large", "xl-2025", "2.7b", "10b")
    contexts = (128, 256, 512, 1024, 2048)
    assert found == {(size, context, p) for size in sizes for context in contexts for p in ("fp32", "bf16")}


def test_full_has_the_published_block_and_every_kind_of_plan():
    found = cases("full", "cuda")
    (shape,) = {
        tuple(c.parameters[n] for n in ("d_model", "d_ff", "num_heads", "context", "batch", "precision"))
        for c in found if c.section == "block"
    }  # fmt: skip
    assert shape == (2560, 10240, 16, 2048, 4, "fp32")
    for attention in ("eager", "sdpa_flash"):
        plans = {c.parameters["plan"] for c in found if c.parameters.get("attention") == attention and
                 c.section == "checkpointing"}  # fmt: skip
        assert {"none", "1", "32"} <= plans and any("/" in plan for plan in plans)
    assert {c.parameters["size"] for c in found if c.section in ("timeline", "checkpointing")} == {"2.7b"}


def test_the_peaks_are_narrowed():
    found = [c for c in cases("full", "cuda", sizes=["xl-2026"], contexts=[512]) if c.section == "peaks"]
    assert [c.parameters["precision"] for c in found] == ["fp32", "bf16"]
    assert {(c.parameters["size"], c.parameters["context"]) for c in found} == {("2.7b", 512)}


# ---- running one -----------------------------------------------------------------------------------------------------


def test_a_phase_far_beyond_the_memory_is_skipped_and_one_near_it_is_not(monkeypatch):
    parameters = {"size": "2.7b", "context": 2048, "batch": 4, "precision": "fp32", "attention": "eager"}
    cuda = hardware.Device("cuda", "a GPU", "a-gpu")
    monkeypatch.setattr(experiment, "_device_bytes", lambda device: H200_BYTES)
    experiment._require_room(cuda, parameters, "inference")
    with pytest.raises(Skip, match="predicted to need 185 GB of 150 GB"):
        experiment._require_room(cuda, parameters, "train_step")
    needed = accounting.peak_bytes(
        model_config("2.7b"), 4, 2048, "train_step", precision="fp32", attention="eager", device_kind="cuda"
    )
    monkeypatch.setattr(experiment, "_device_bytes", lambda device: needed / 1.09)
    experiment._require_room(cuda, parameters, "train_step")


def test_a_device_that_records_no_allocations_is_skipped(monkeypatch):
    monkeypatch.setattr(experiment.hardware, "detect", lambda: hardware.Device("mps", "an Apple", "mps-x"))
    with pytest.raises(Skip, match="does not record the allocations of 'mps'"):
        next(run_case(cases("smoke", "mps")[0], {}))


def test_a_compiled_part_that_computes_something_else_gives_no_bytes(monkeypatch):
    monkeypatch.setattr(experiment.hardware, "detect", lambda: CPU)
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module, **_: module.weight.data.mul_(2))
    (one,) = [c for c in cases("smoke", "cpu") if c.parameters.get("part") == "rms_norm"
              and c.parameters["code"] == "compiled"]  # fmt: skip
    with pytest.raises(AssertionError, match="compiled and eager differ by"):
        dict(run_case(one, {}))["saved"]()


# ---- the report says what the records say ----------------------------------------------------------------------------


def record(one: Case, phase: str, status: str = "ok", **content) -> Record:
    return Record(
        notebook=NOTEBOOK, section=one.section, case=one.parameters, phase=phase, status=status, device="abacus",
        measurement_version=1, **content,
    )  # fmt: skip


def synthetic_records() -> list[Record]:
    """Records of the full grid on a device of the H200's memory on which every prediction is exact."""
    makers = {
        "peaks": synthetic_peak, "timeline": synthetic_timeline, "block": synthetic_part,
        "checkpointing": synthetic_plan, "snapshot": synthetic_file,
    }  # fmt: skip
    return [makers[one.section](one, phase) for one in cases("full", "cuda") for phase in one.phases]


def known(one: Case) -> dict:
    attention = "eager" if one.parameters["attention"] == "eager" else "fused"
    return {"precision": one.parameters["precision"], "attention": attention, "device_kind": "cuda"}


def synthetic_peak(one: Case, phase: str) -> Record:
    config, p = model_config(one.parameters["size"]), one.parameters
    peak = accounting.peak_bytes(config, p["batch"], p["context"], phase, **known(one))
    if peak > 1.1 * H200_BYTES:
        return record(one, phase, "skipped", reason="predicted to need far more")
    if peak + OTHER_BYTES > H200_BYTES:
        return record(one, phase, "oom", reason="OutOfMemoryError")
    metrics = {"peak_bytes": peak + OTHER_BYTES, "other_bytes": OTHER_BYTES, "device_bytes": H200_BYTES}
    if phase == "train_step":
        weights = accounting.parameter_bytes(config)
        parts = {"parameter": weights, "gradient": weights, "optimizer": accounting.optimizer_state_bytes(config)}
    elif phase == "forward":
        parts = {"made": accounting.forward_made_bytes(config, p["batch"], p["context"], **known(one))}
    else:
        parts = {}
    for part, num_bytes in parts.items():
        metrics |= {f"{part}_requested_bytes": num_bytes, f"{part}_bytes": num_bytes + BLOCK_REST}
    return record(one, phase, metrics=metrics)


def synthetic_timeline(one: Case, phase: str) -> Record:
    largest = {
        "num_bytes": 2**30, "operator": "aten.mul", "module": "blocks.31.attention", "frame": "reference.py:32 _scores",
        "code": "scores = a | b", "category": "temporary", "phase": "forward", "count": 32, "count_at_peak": 1,
    }  # fmt: skip
    return record(
        one, phase,
        metrics={
            "peak_bytes": 4 * 2**30, "reported_peak_bytes": 4 * 2**30, "plain_peak_bytes": 4 * 2**30, "num_events": 100,
            "num_allocations": 60, "parameters_at_peak_bytes": 3 * 2**30, "temporary_at_peak_bytes": 2**30,
        },
        samples={"event": [0, 50, 100], "parameters_mib": [3072.0] * 3, "temporary_mib": [0.0, 1024.0, 0.0]},
        observed={
            "phases": [["forward", 0, 60], ["backward", 60, 100]], "peak_position": 49, "peak_phase": "forward",
            "peak_owner": {"operator": "aten.mul", "module": "blocks.31", "frame": "reference.py:32 _scores"},
            "largest": [largest],
        },
    )  # fmt: skip


def synthetic_part(one: Case, phase: str) -> Record:
    p = one.parameters
    config = ModelConfig("block", "test", p["d_model"], p["d_ff"], 1, p["num_heads"])
    eager = accounting.block_activation_bytes(config, p["batch"], p["context"])
    stream = accounting.residual_stream_bytes(config, p["batch"], p["context"])
    saved = {"rms_norm": 2 * stream, "block": eager, "four_blocks": 4 * eager, "four_blocks_by_pairs": 2 * stream}
    num_residuals = 6 if p["part"] == "rms_norm" else 39
    if p["code"] == "compiled":
        saved["rms_norm"], num_residuals = stream, num_residuals // 2
    groups = [
        {"operator": name, "module": "attention", "shape": "4 × 2048", "dtype": "float32", "is_resident": False,
         "count": 2, "num_distinct": 1, "saved_bytes": share * saved[p["part"]] // 100}
        for name, share in (("softmax", 40), ("mul", 20), ("silu", 15), ("linear", 10), ("pow", 10), ("rsqrt", 5))
    ]  # fmt: skip
    return record(
        one, phase,
        metrics={
            "num_residuals": num_residuals, "num_resident_residuals": 1, "num_distinct": 4,
            "saved_bytes": saved[p["part"]], "made_bytes": saved[p["part"]], "stream_bytes": stream,
            "gradient_bytes": accounting.block_gradient_bytes(config), "relative_difference": 1e-7,
        },
        observed={"residuals": groups, "compiler": "inductor", "num_replacements": 0},
    )  # fmt: skip


def synthetic_plan(one: Case, phase: str) -> Record:
    p, config = one.parameters, model_config(one.parameters["size"])
    plan = accounting.checkpoint_plan(p["plan"], config.num_layers)
    peak = max(accounting.checkpoint_moments(config, p["batch"], p["context"], plan, **known(one)).values())
    if peak + OTHER_BYTES > H200_BYTES:
        return record(one, phase, "oom", reason="OutOfMemoryError")
    time_ms = 1000 * (2 + accounting.checkpoint_forwards(config.num_layers, plan)) / 3
    return record(
        one, phase,
        metrics={
            "peak_bytes": peak + OTHER_BYTES, "other_bytes": OTHER_BYTES, "median_ms": time_ms, "resident_bytes": 1,
            "device_bytes": H200_BYTES, "forwards_per_block": accounting.checkpoint_forwards(config.num_layers, plan),
        },
    )  # fmt: skip


def synthetic_file(one: Case, phase: str) -> Record:
    is_genuine = one.parameters["file"] == "genuine"
    metrics = {"accepted": int(is_genuine), "executed": 0, "expected_peak_bytes": 5 if is_genuine else None}
    return record(one, phase, metrics=metrics | ({"peak_bytes": 5} if is_genuine else {}),
                  observed={"message": "" if is_genuine else "snapshot.pickle: refused"})  # fmt: skip


SYNTHETIC = synthetic_records()


@pytest.fixture
def frames(tmp_path):
    """Returns a function that gives the sections' frames of the synthetic records, some of them changed."""

    def make(match=None, status="ok", observed=None, **metrics):
        path = tmp_path / "abacus" / "records" / f"{NOTEBOOK}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        lines, num_changed = [], 0
        for one in SYNTHETIC:
            if match is not None and match.items() <= {**one.case, "phase": one.phase, "section": one.section}.items():
                changed = {name: f(one.metrics.get(name)) if callable(f) else f for name, f in metrics.items()}
                one = dataclasses.replace(
                    one, status=status, metrics={**one.metrics, **changed} if status == "ok" else {},
                    observed=one.observed | (observed or {}),
                )  # fmt: skip
                num_changed += 1
            lines.append(json.dumps(dataclasses.asdict(one)))
        assert match is None or num_changed
        path.write_text("\n".join(lines) + "\n")
        chapter = Chapter(NOTEBOOK, device="abacus", output=str(tmp_path))
        return {name: chapter.records(name) for name in ("peaks", "timeline", "block", "checkpointing", "snapshot")}

    return make


def text(sentences) -> str:
    return "\n".join(sentences)


def test_exact_predictions_are_said_to_hold(frames):
    sentences = text(report.findings_peaks(frames()["peaks"]))
    assert (
        "**Peaks**: with what the allocator counts beside tensors (70.0 MiB) the prediction is within 3.0 %"
        in sentences
    )
    assert "misses" not in sentences
    for part, bound in (("Parameters", "3.0 %"), ("Gradients", "3.0 %"), ("Activations", "10 %")):
        assert f"**{part}**: the accounting is within {bound} of what tensors asked for in" in sentences


def test_a_peak_that_is_not_predicted_is_named_and_changes_table_and_figure(frames):
    one = {"section": "peaks", "phase": "forward", "size": "large", "context": 512, "precision": "bf16"}
    before, after = frames()["peaks"], frames(one, peak_bytes=lambda value: int(1.05 * value))["peaks"]
    sentences = text(report.findings_peaks(after))
    assert "(forward of large at 512 in bf16). It misses for forward in bf16 (1)." in sentences
    old, new = (report.table_peaks(frame, "bf16") for frame in (before, after))
    assert (old != new).to_numpy().sum() == 2
    assert (report.table_peaks(before, "fp32") == report.table_peaks(after, "fp32")).to_numpy().all()
    old, new = (figures.svg(report.figure_peaks(frame, "bf16")) for frame in (before, after))
    assert old != new


def test_activations_that_are_not_predicted_are_counted(frames):
    one = {"section": "peaks", "phase": "forward", "size": "small", "context": 128, "precision": "fp32"}
    sentences = text(report.findings_peaks(frames(one, made_requested_bytes=lambda value: int(1.2 * value))["peaks"]))
    assert "; the largest difference is +20 % (small at 128 in fp32)." in sentences
    num_forward = len([r for r in SYNTHETIC if r.section == "peaks" and r.phase == "forward" and r.status == "ok"])
    assert f"in {num_forward - 1} of {num_forward} cases; the largest difference is +20 %" in sentences


def test_blocks_larger_than_what_was_asked_for_are_said_apart(frames):
    one = {"section": "peaks", "phase": "train_step", "size": "small", "context": 128, "precision": "fp32"}
    frame = frames(one, gradient_bytes=lambda value: int(1.5 * value))["peaks"]
    sentences = text(report.findings_peaks(frame))
    assert (
        "blocks are larger than what tensors asked for by up to +50 % (gradients of small at 128 in fp32)" in sentences
    )
    assert "**Gradients**: the accounting is within 3.0 % of what tensors asked for" in sentences
    assert "+50 %" in set(report.table_parts(frame)["blocks: more by"])
    assert not report.table_parts(frame)["gradients: off by"].str.contains("50").any()


def test_what_ran_out_of_memory_is_held_against_the_accounting(frames):
    one = {"section": "peaks", "phase": "train_step", "size": "small", "context": 256, "precision": "fp32"}
    frame = frames(one, status="oom")["peaks"]
    frame["device_bytes"] = frame["device_bytes"].fillna(H200_BYTES)
    sentences = text(report.findings_peaks(frame))
    assert "training step of small at 256 in fp32" in sentences and "ran out of memory:" in sentences
    row = report.table_peaks(frame, "fp32").query("size == 'small' and context == 256").iloc[0]
    assert row["training step (GiB)"] == "oom" and row["training step, ratio"] == "–"
    assert "phases were not tried, predicted to need" in sentences


def test_autocast_that_needs_more_is_said_to(frames):
    before = text(report.findings_peaks(frames()["peaks"]))
    assert "bf16 autocast: the peak of inference is" in before
    one = {"section": "peaks", "phase": "inference", "size": "small", "context": 128, "precision": "bf16"}
    after = text(report.findings_peaks(frames(one, peak_bytes=lambda value: 9 * value)["peaks"]))
    assert "most for small at 128." in after and after != before


def test_published_peaks_stand_beside_ours(frames):
    matched = report.published_peaks(frames()["peaks"])
    assert set(matched["size"]) == {"xl-2025"} and len(matched) == 10
    table = report.table_published(frames()["peaks"])
    assert "about 15.0" in set(table["published (GiB)"]) and "13.0" in set(table["published (GiB)"])


def test_a_timeline_that_is_a_byte_off_is_said_to_be(frames):
    exact = text(report.findings_timelines(frames()["timeline"]))
    assert (
        "equals the allocator's own to the byte in 4 of 4 recordings. Recording itself changed the peak in none."
        in exact
    )
    assert (
        "parameters 75 % and temporary 25 %" in exact and "`aten.mul` of `blocks.31` (reference.py:32 _scores)" in exact
    )
    one = {"section": "timeline", "phase": "inference", "precision": "fp32"}
    off = text(report.findings_timelines(frames(one, peak_bytes=4 * 2**30 + 512)["timeline"]))
    assert "in 3 of 4 recordings; inference of 2.7b at 512 in fp32 is off by 512 bytes" in off
    changed = text(report.findings_timelines(frames(one, plain_peak_bytes=4 * 2**30 - 1024)["timeline"]))
    assert "changed the peak in inference of 2.7b at 512 in fp32 (by 1,024 bytes)" in changed


def test_the_largest_allocations_have_size_owner_and_phase(frames):
    frame = frames()["timeline"]
    row = report.table_largest(frame, "fp32", "train_step").iloc[0]
    assert (row["MiB"], row["times"], row["phase"], row["module"]) == (
        "1,024.00",
        32,
        "forward",
        "`blocks.31.attention`",
    )
    assert row["frame"] == "reference.py:32 _scores" and "a | b" in row["code"]
    assert report.table_largest(frame, "tf32", "train_step").empty
    assert figures.svg(report.figure_timelines(frame, "fp32")) == figures.svg(report.figure_timelines(frame, "fp32"))


def test_the_operators_that_keep_most_are_those_of_the_records(frames):
    sentences = text(report.findings_blocks(frames()["block"]))
    assert "have 95 % of its" in sentences and "softmax (attention) 40 %, mul (attention) 20 %" in sentences
    assert "**RMSNorm**: eager keeps 6 residuals" in sentences and "compiled 3 (80.00 MiB): less, 0.500×" in sentences
    assert "Four compiled blocks keep 12,432.25 MiB, 4.00× what one keeps; recomputed by pairs, 160.00 MiB" in sentences
    assert "The residual stream is 80.00 MiB (by formula 80.00: exact)" in sentences
    assert "four blocks, recomputed by pairs 160.00 MiB, ours 1.00×" in sentences
    assert "block 3,651.31 MiB, ours 0.851×" in sentences
    part = {"section": "block", "part": "block", "code": "compiled"}
    more = text(report.findings_blocks(frames(part, saved_bytes=lambda value: 2 * value)["block"]))
    assert "**Block**: eager keeps 39" in more and "more, 2.00×" in more
    replaced = text(report.findings_blocks(frames(part, observed={"num_replacements": 2})["block"]))
    assert "the compiler put SDPA in the formula's place 2 times" in replaced


def test_gradients_that_are_not_predicted_are_said_to_differ(frames):
    assert "(predicted 400.02: exact)" in text(report.findings_blocks(frames()["block"]))
    one = {"section": "block", "part": "block", "code": "eager"}
    sentences = text(report.findings_blocks(frames(one, gradient_bytes=lambda value: 2 * value)["block"]))
    assert "(predicted 400.02: +100 %)" in sentences


def test_the_best_interval_is_measured_against_the_predicted(frames):
    sentences = text(report.findings_checkpointing(frames()["checkpointing"]))
    assert "of single levels k = 1 peaks lowest, as predicted." in sentences
    assert "**Eager attention** at 2,048: without recomputation the step ends oom (predicted" in sentences
    assert "from √N = 5.7 to k = 0." in sentences and "Nested, the lowest peak (6 blocks, then 1) is" in sentences
    one = {"section": "checkpointing", "attention": "eager", "plan": "4"}
    frame = frames(one, peak_bytes=30 * 2**30)["checkpointing"]
    sentences = text(report.findings_checkpointing(frame))
    assert "of single levels k = 4 peaks lowest, predicted was k = 1." in sentences
    assert "The predicted peak is within 3.0 % in" in sentences and "(eager attention, 4 blocks)" in sentences


def test_the_frontier_holds_what_nothing_beats(frames):
    rows = report.checkpointing(frames()["checkpointing"])
    rows = rows[rows["attention"] == "sdpa_flash"]
    best = report.frontier(rows)
    assert best["peak_bytes"].is_monotonic_increasing and best["median_ms"].is_monotonic_decreasing
    for row in best.to_dict("records"):
        beats = rows[(rows["peak_bytes"] < row["peak_bytes"]) & (rows["median_ms"] <= row["median_ms"])]
        assert beats.empty
    for time_ms, is_on_it in ((1.0, True), (1e6, False)):
        one = {"section": "checkpointing", "attention": "sdpa_flash", "plan": "8"}
        changed = report.checkpointing(frames(one, median_ms=time_ms)["checkpointing"])
        changed = changed[changed["attention"] == "sdpa_flash"]
        assert ("8" in set(report.frontier(changed)["plan"])) == is_on_it


def test_a_changed_step_time_moves_a_point_of_the_figure(frames):
    one = {"section": "checkpointing", "attention": "sdpa_flash", "plan": "1"}
    before, after = frames()["checkpointing"], frames(one, median_ms=2000.0)["checkpointing"]
    assert figures.svg(report.figure_checkpointing(before)) != figures.svg(report.figure_checkpointing(after))


def test_a_hostile_file_that_got_through_is_said_to(frames):
    assert "6 of 6 files that are no genuine snapshot were refused; code of none of them ran." in text(
        report.findings_files(frames()["snapshot"])
    )
    one = {"section": "snapshot", "file": "names a class"}
    assert "5 of 6 files that are no genuine snapshot were refused; code of 1 of them ran." in text(
        report.findings_files(frames(one, accepted=1, executed=1)["snapshot"])
    )
    genuine = {"section": "snapshot", "file": "genuine"}
    assert "its peak is **not** the 5 bytes" in text(report.findings_files(frames(genuine, peak_bytes=4)["snapshot"]))
    refused = frames(genuine, accepted=0, observed={"message": "because"})["snapshot"]
    assert "The genuine snapshot was **refused**: because." in text(report.findings_files(refused))


def test_without_records_every_section_says_so(tmp_path):
    frame = Chapter(NOTEBOOK, device="abacus", output=str(tmp_path)).records("peaks")
    arguments = {
        "table_peaks": (frame, "fp32"), "figure_peaks": (frame, "fp32"), "figure_timelines": (frame, "fp32"),
        "table_largest": (frame, "fp32", "train_step"), "table_residuals": (frame, "block", "eager"),
        "table_snapshot": (None,), "figure_snapshot": (None,),
    }  # fmt: skip
    for name in dir(report):
        if name.startswith(("table_", "findings_")):
            assert len(getattr(report, name)(*arguments.get(name, (frame,)))) == 0, name
        elif name.startswith("figure_"):
            assert getattr(report, name)(*arguments.get(name, (frame,))) is None, name


@pytest.mark.parametrize("missing", ["peaks", "timeline", "block", "checkpointing", "snapshot"])
def test_with_one_phase_of_each_section_everything_renders(frames, missing):
    """As a run that was interrupted leaves it: only the first records of each section."""
    for name, frame in frames().items():
        part = frame.iloc[: 0 if name == missing else 1]
        part.attrs |= frame.attrs
        if name == "peaks":
            assert len(report.table_peaks(part, "fp32")) == len(part) and report.findings_peaks(part) is not None
            assert (report.figure_peaks(part, "fp32") is None) == part.empty
        elif name == "timeline":
            assert len(report.table_timelines(part)) == len(part) and len(report.findings_timelines(part)) <= 2
        elif name == "block":
            assert len(report.table_blocks(part)) == len(part)
            assert len(report.findings_blocks(part)) == 0
        elif name == "checkpointing":
            assert len(report.table_checkpointing(part)) == len(part)
            assert report.findings_checkpointing(part) == []  # the first plan, without recomputation, did not fit


def test_a_snapshot_is_drawn_by_the_lines_that_allocated(tmp_path):
    events = [(n, 100 * n, f"model.py:{n} forward") for n in range(1, 12)] + [(3, -300, "")]
    history = History(pair_events(events, {99: 50}), len(events))
    table = report.table_snapshot(history)
    assert table["frame"].iloc[0] == "model.py:11 forward" and "before" in set(table["frame"])
    assert report.figure_snapshot(history) is not None
    assert report.open_snapshot("") is None
    (tmp_path / "x").write_bytes(b"no")
    with pytest.raises(SnapshotError, match="x: not a readable pickle"):
        report.open_snapshot(str(tmp_path / "x"))


# ---- the notebook on this machine ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """The smoke profile executed here, from the notebook to the report."""
    output = tmp_path_factory.mktemp("figures")
    command = [sys.executable, "-m", "labkit", "run", "04", "--profile", "smoke", "--output", str(output)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "LABKIT_CANARY": "canary-3f1c"}
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert result.returncode == 0, result.stderr[-3000:]
    (folder,) = output.iterdir()
    return folder


@pytest.mark.slow
def test_smoke_measures_every_case_and_writes_figures_and_report(measured):
    records = RecordStore(measured / "records" / f"{NOTEBOOK}.jsonl").load()
    assert {record.status for record in records} == {"ok"}
    done = json.loads((measured / "records" / f"{NOTEBOOK}.done.json").read_text(encoding="utf-8"))
    assert done["num_missing"] == 0
    assert {path.name for path in measured.glob("04_*.svg")} == {
        "04_peaks_fp32.svg", "04_peaks_bf16.svg", "04_timeline_fp32.svg", "04_checkpointing.svg",
    }  # fmt: skip
    chapter = (measured / "report.md").read_text(encoding="utf-8")
    for cell in notebooks.read(NOTEBOOK).cells:
        if cell.cell_type == "markdown" and cell.source.startswith("## "):
            assert f"#{cell.source.splitlines()[0]}" in chapter
    assert all("canary-3f1c" not in path.read_text(encoding="utf-8") for path in measured.rglob("*") if path.is_file())


@pytest.mark.slow
def test_smoke_holds_what_the_chapter_promises(measured):
    chapter = Chapter(NOTEBOOK, device=measured.name, output=str(measured.parent))
    frame = chapter.records("peaks")
    assert (report.parts(frame)["deviation"].abs() < 1e-3).all()
    rows = report.peaks(frame)
    assert (rows[rows["precision"] == "fp32"]["deviation"].abs() < 1e-3).all()
    timelines = chapter.records("timeline")
    assert (timelines["peak_bytes"] == timelines["reported_peak_bytes"]).all()
    assert (timelines["peak_bytes"] == timelines["plain_peak_bytes"]).all()
    assert max(len(json.dumps(row)) for row in timelines["samples"]) < 300_000
    counts = {(row["part"], row["code"]): row["num_residuals"] for row in report.blocks(chapter.records("block"))}
    assert counts["rms_norm", "eager"] == 6 and counts["rms_norm", "compiled"] == 3
    assert counts["four_blocks_by_pairs", "compiled"] == 2
    assert (report.checkpointing(chapter.records("checkpointing"))["deviation"].abs() < 1e-3).all()
    files = chapter.records("snapshot").set_index("file")
    assert files["accepted"].to_dict() == {name: int(name == "genuine") for name in experiment.SNAPSHOT_FILES}
    assert not files["executed"].any()
    assert len(report.table_residuals(chapter.records("block"), "block", "eager")) > 5
    assert MEMORY["smoke"].timelines[0][0] == timelines["size"].iloc[0]
