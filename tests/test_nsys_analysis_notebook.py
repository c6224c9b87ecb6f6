"""Notebook 02: a step is captured as it runs, a record says what was captured, the report what the records say."""

import dataclasses
import functools
import itertools
import json
import operator
import os
from collections import Counter

import pandas as pd
import pytest
import torch
from chapters import CPU, H200, H200_BYTES, execute_smoke, finished, on_a_cpu

from labkit import accounting, hardware
from labkit.configs import FIGURES, NSYS_ANALYSIS, model_config
from labkit.experiments import nsys_analysis as experiment
from labkit.experiments.nsys_analysis import cases
from labkit.experiments.workload import Workload
from labkit.measure import profiling
from labkit.measure.profiling import Nsys
from labkit.records import Record, RecordStore, to_frame
from labkit.report import figures
from labkit.report import nsys_analysis as report
from labkit.report import profiles as rows
from labkit.report.chapter import Chapter

NOTEBOOK = "02_nsys_analysis"
CANARY = "a-canary-that-sings-in-no-file"


@pytest.fixture(autouse=True)
def this_device_is_a_cpu(request, monkeypatch):
    # A worker ends without looking back; this process does not.
    monkeypatch.setattr(experiment, "freeze_modules", lambda: None)
    yield from on_a_cpu(monkeypatch, is_detected="gpu" not in request.keywords)


def memory_of(num_bytes: int, monkeypatch) -> None:
    properties = dataclasses.make_dataclass("P", ["total_memory"])(num_bytes)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)


def committed(notebook: str) -> list[Record]:
    return RecordStore(FIGURES / "nvidia-h200" / "records" / f"{notebook}.jsonl").load()


def parameters(size="nano", context=16, precision="fp32", attention="eager") -> dict:
    return {"size": size, "context": context, "batch": 4, "precision": precision, "compile": "none",
            "attention": attention}  # fmt: skip


def test_full_is_every_size_and_context_in_fp32_and_bf16_and_some_with_flash_attention():
    found = [one.parameters for one in cases("full", "cuda")]
    eager = Counter((c["size"], c["context"], c["precision"]) for c in found if c["attention"] == "eager")
    sizes = ("small", "medium", "large", "xl-2025", "2.7b", "10b")
    assert eager == Counter((s, t, p) for s in sizes for t in (128, 256, 512, 2048) for p in ("fp32", "bf16"))
    flash = {(c["size"], c["context"], c["precision"]) for c in found if c["attention"] == "auto"}
    assert {(s, t, "bf16") for s in sizes for t in (512, 2048)} < flash < set(eager)
    assert all(isinstance(one.timeout_s, float) and one.stop_at_failure for one in cases("full", "cuda"))
    for profile in ("smoke", "full"):
        for key in NSYS_ANALYSIS[profile].timelines:
            assert any(experiment.is_timeline(one.parameters) for one in cases(profile, "cpu")), key


def test_a_case_brings_those_after_it_of_its_size_alone():
    found = cases("full", "cuda", sizes=["small", "10b"], contexts=[2048])
    assert [one.parameters["size"] for one in found] == ["small"] * 4 + ["10b"] * 4
    for size in ("small", "10b"):
        mine = [one for one in found if one.parameters["size"] == size]
        for number, one in enumerate(mine):
            assert [taken for taken, _ in one.together] == [later.parameters for later in mine[number + 1 :]]
    assert {one.phases for one in found} == {("inference", "train_step"), ("inference", "forward_backward")}


def test_what_fits_an_h200_is_tried_and_little_that_does_not(monkeypatch):
    """Held against notebook 01's committed records: nothing that ran there is skipped here."""
    memory_of(H200_BYTES, monkeypatch)
    seen = Counter()
    for record in committed("01_benchmarking"):
        phase = {"backward": "forward_backward", "train_step": "train_step"}.get(record.phase)
        if record.section == "steps" and phase and record.case["precision"] != "tf32":
            is_tried = experiment._has_room(H200, record.case, phase)
            assert is_tried or record.status == "oom", (record.case, record.phase)
            seen[record.status, is_tried] += 1
    assert seen["ok", True] > 100 and seen["oom", False] >= 10 and seen["oom", True] <= 2


@pytest.mark.parametrize(("precision", "attention"), [("fp32", "eager"), ("bf16", "eager"), ("fp32", "auto")])
def test_the_bound_of_what_backward_keeps_is_a_lower_one(precision, attention, monkeypatch):
    """Against the bytes that autograd saves on this machine, for shapes whose probabilities weigh much or little."""
    for context in (16, 128):
        case = parameters(context=context, precision=precision, attention=attention)
        workload, kept = Workload(CPU, case), []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, kept=kept: kept.append(x) or x, lambda x: x):
            loss = workload.forward()
        own = {parameter.untyped_storage().data_ptr() for parameter in workload.model.parameters()}
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in kept}
        saved = sum(num_bytes for pointer, num_bytes in storages.items() if pointer not in own)
        bound = 2 * accounting.parameter_bytes(model_config("nano"))
        low, high = 0, 10**12
        while high - low > 1:  # the memory at which the case stops being skipped
            middle = (low + high) // 2
            memory_of(middle, monkeypatch)
            has_room = experiment._has_room(H200, case, "forward_backward")
            low, high = (low, middle) if has_room else (middle, high)
        assert 0.3 * saved < high - bound <= saved, (context, saved, high - bound)
        del loss


SIZES, CONTEXTS = ("small", "2.7b"), (512, 1024, 2048)
GEMM, SOFTMAX, ADD = "nvjet_sm90_tst_128x256", "softmax_warp_forward", "vectorized_elementwise_kernel[AddFunctor]"


def tables_of(context: int, attention: str, phase: str, softmax: float, gemm: str) -> dict:
    """Tables of a step in which forward is 600 µs of matmul, 200 of softmax (times `softmax`) and 200 of additions a
    thousand tokens, backward twice that, the optimizer 100."""
    unit = context / 1000
    times = {gemm: ("matmul", 600.0), SOFTMAX: ("softmax", 200.0 * softmax), ADD: ("elementwise", 200.0)}
    if attention != "eager":
        times[SOFTMAX] = ("attention", 100.0)
    scale = {"inference": 1.0} if phase == "inference" else {"forward": 1.0, "backward": 2.0}
    rows = [(part, name, of_class, 10, us * unit * factor) for part, factor in scale.items()
            for name, (of_class, us) in times.items()]  # fmt: skip
    if phase == "train_step":
        rows.append(("optimizer", "FusedAdam", "optimizer", 1, 100.0 * unit))
    frame = pd.DataFrame(rows, columns=["phase", "short_name", "kernel_class", "launches", "total_us"])
    kernels = frame.assign(min_us=1.0, max_us=9.0)
    if phase != "inference":
        whole = kernels.groupby(["short_name", "kernel_class", "min_us", "max_us"], as_index=False)
        kernels = pd.concat([whole[["launches", "total_us"]].sum().assign(phase="step"), kernels])
    core = f"{'inference' if phase == 'inference' else 'forward'}/block/attention/core"
    ranges = [
        (f"{core}/scores", "matmul", 50.0 * unit**2), (f"{core}/value product", "matmul", 50.0 * unit**2),
        (f"{core}/softmax", "softmax", 200.0 * softmax * unit**2), (f"{core}/mask", "elementwise", 100.0 * unit**2),
    ] if attention == "eager" else [(core, "attention", 100.0 * unit**2)]  # fmt: skip
    ranges += [(core.removesuffix("/core"), "matmul", 200.0 * unit), (core.split("/")[0], "matmul", 400.0 * unit)]
    return {
        "kernels": kernels.to_dict("list"),
        "classes": frame.drop(columns="short_name").to_dict("list"),
        "ranges": pd.DataFrame(ranges, columns=["path", "kernel_class", "total_us"]).to_dict("list"),
    }


def timeline() -> dict:
    launches = [(10.0 * n, 8.0, n % 5, 7, 1 + n // 8, (n % 8) // 2 if n < 16 else -1) for n in range(20)]
    names = ("start_us", "duration_us", "kernel_class", "stream", "phase", "block")
    columns = dict(zip(names, map(list, zip(*launches, strict=True)), strict=True))
    return {"class_names": list(profiling.CLASSES), "phase_names": list(experiment.STEP_PHASES), **columns}


def record(
    size, context, precision, attention, phase, *, softmax=1.0, gemm=GEMM, alike=False, metrics=lambda _: {}, **changes
) -> Record:
    """`metrics` gives those that are others, by the context; `alike`: ranges take the same time as classes."""
    unit = context / 1000
    passes = {"inference": 1.0} if phase == "inference" else {"forward": 1.0, "backward": 2.0, "optimizer": 0.1}
    known = {"num_launches": 5000, "num_casts": 0 if precision == "fp32" else 500, "issued_ms": unit / 4,
             "done_ms": 4 * unit, "done_with_ranges_ms": 5 * unit}  # fmt: skip
    for name, factor in {**passes, "step": sum(passes.values())}.items():
        known |= {f"{name}_kernel_ms": factor * unit, f"{name}_projected_ms": factor * unit * 1.02,
                  f"{name}_idle_fraction": 0.02}  # fmt: skip
    tables = tables_of(context, attention, phase, softmax, gemm)
    if (size, context, phase) == ("small", 512, "train_step"):
        tables["timeline"] = timeline()
    if alike:
        classes = pd.DataFrame(tables["classes"]).groupby("kernel_class", as_index=False)["total_us"].sum()
        tables["ranges"] = classes.assign(path="inference").to_dict("list")
    base = {
        "notebook": NOTEBOOK, "section": "profiles", "phase": phase, "status": "ok", "device": "nvidia-h200",
        "case": parameters(size, context, precision, attention), "measurement_version": 1, "session": "a",
        "metrics": known | metrics(context), "timer": {"method": "nsys"},
        "observed": {"profiler": "nsys", "attention_runs": "gluon", "tables": tables},
    }  # fmt: skip
    return Record(**{**base, **changes})


def profiles(*changes: tuple[dict, dict]) -> pd.DataFrame:
    """The frame of invented records; those that match the first of a pair are made with the second."""
    names, records = ("size", "context", "precision", "attention", "phase"), []
    for key in itertools.product(SIZES, CONTEXTS, ("fp32", "bf16"), ("eager", "auto"), ("inference", "train_step")):
        known = dict(zip(names, key, strict=True)).items()
        own = [fields for match, fields in changes if match.items() <= known]
        records.append(record(*key, **functools.reduce(operator.or_, own, {})))
    frame = to_frame(records)
    frame.attrs |= {"device": "a device", "device_kind": "cuda"}
    return frame


def test_shares_are_those_of_the_tables():
    found = rows.classes(profiles()).set_index(["size", "context", "precision", "attention", "view"])
    case = found.loc[("small", 512, "fp32", "eager")]
    assert case["matmul_share"][["inference", "forward", "backward", "forward_backward"]].tolist() == [0.6] * 4
    assert case["matmul_share"]["train_step"] == pytest.approx(1800 / 3100)
    assert case.filter(like="_share").sum(axis=1).tolist() == pytest.approx([1.0] * 5)
    table = report.table_classes(profiles())
    assert table["matmul"].tolist()[0] == "60.0 → 58.1" and "rest" not in table
    kernels = rows.kernels(profiles())
    assert set(kernels[kernels["view"] == "forward_backward"]["kernel"]) == {
        "`nvjet_tst_128x256`", "`softmax_warp_forward`", "`vectorized_elementwise[AddFunctor]`"}  # fmt: skip


def test_softmax_is_compared_with_the_products_by_time_flops_and_bytes():
    found = rows.attention_times(profiles()).set_index(["size", "context", "precision", "attention"])
    row, unit = found.loc[("small", 1024, "fp32", "eager")], 1.024
    assert row["matmul_us"] == pytest.approx(100 * unit**2) and row["softmax_us"] == pytest.approx(200 * unit**2)
    assert row["other_us"] == pytest.approx(100 * unit**2) and row["core_us"] == pytest.approx(400 * unit**2)
    assert row["block_us"] == pytest.approx(400 * unit**2 + 200 * unit)
    assert row["forward_us"] == pytest.approx(400 * unit**2 + 600 * unit)
    assert row["time_ratio"] == pytest.approx(2.0) and row["flop_ratio"] == 5 / (4 * 64)
    # Softmax reads and writes the scores; the products write and read them, and move q, k, v and the output.
    assert row["bytes_ratio"] == pytest.approx(2 * 1024 / (4 * 64 + 2 * 1024))
    assert rows.bytes_ratio("small", 1024, "bf16") == pytest.approx(2 * row["bytes_ratio"])
    assert found.loc[("small", 1024, "bf16", "auto")][["time_ratio", "flop_ratio"]].isna().all()


def test_a_changed_softmax_changes_table_figure_finding_and_front_page(monkeypatch):
    def shown(frame) -> list:
        monkeypatch.setattr(Chapter, "records", lambda self, *sections: frame)
        drawn = [figures.svg(make(frame)) for make in (report.figure_classes, report.figure_softmax)]
        tables = (report.table_attention, report.table_classes, report.table_kernels)
        told = [report.findings_attention(frame), report.findings_classes(frame)]
        return [*drawn, *(make(frame).to_csv() for make in tables), *told, report.front(Chapter(NOTEBOOK, device="x"))]

    before, again, after = shown(profiles()), shown(profiles()), shown(profiles(({}, {"softmax": 3.0})))
    assert before == again and all(old != new for old, new in zip(before, after, strict=True))


def step_time(factor: float) -> tuple[dict, dict]:
    ours = {"precision": "fp32", "attention": "auto", "phase": "train_step"}
    return ours, {"metrics": lambda context: {"step_kernel_ms": factor * 3.1 * context / 1000}}


def waiting(**metrics) -> tuple[dict, dict]:
    """A step that idles for 30 % under the profiler."""
    one = {"size": "small", "context": 512, "precision": "bf16", "attention": "eager"}
    return one, {"metrics": lambda _: {"step_idle_fraction": 0.3, "num_launches": 10_000, **metrics}}


MARKED_ALIKE = ({}, {"alike": True, "metrics": lambda _: {"done_with_ranges_ms": 30.0}})
GROWING = ({}, {"metrics": lambda context: {"forward_kernel_ms": context / 128, "forward_projected_ms": 7.0}})
LAST = {"size": "2.7b", "context": 2048, "phase": "train_step"}
NOT_CAPTURED = (
    (LAST, {"status": "timeout", "reason": "TimeoutError: nsys was stopped"}),
    ({**LAST, "precision": "fp32"}, {"status": "skipped", "reason": "needs at least 192 GB by its closed form"}),
)
BF16_LEVEL = "in bf16 (gluon) level in 6 of 6 cases"

FINDINGS = [  # what is changed, what must be said, what must not
    ("attention", (), ["memory, not arithmetic"], []),
    ("attention", [({}, {"softmax": 0.01})], [], ["memory, not arithmetic"]),  # bytes do not account for its time
    *(("attention", [step_time(factor)], [f"in fp32 (gluon) {verdict} in 6 of 6 cases", BF16_LEVEL], [])
      for factor, verdict in ((2.0, "behind"), (1.005, "level"), (0.5, "ahead"))),
    ("passes", (), ["up to 1.25× as long"], ["trust"]),  # the ranges' kernels take other times here
    ("passes", [MARKED_ALIKE], ["up to 14.6× as long", "take 1.00× their time without", "trust",
                                "after 25 % of the projected time"], []),
    ("passes", NOT_CAPTURED, ["TimeoutError: nsys was stopped (2)"], []),
    ("idle", (), ["Without a profiler 0 of 24 steps leave the device idle 10 % or more."], ["as long"]),
    ("idle", [waiting(unprofiled_ms=2.0, step_kernel_ms=1.59)],
     ["1 of 24 steps leave", "kernels end", "0.159 µs", "(most: small at 512 in bf16, 2.00 → 2.05 ms; 1 step)"], []),
    ("idle", [waiting(unprofiled_ms=1.6, step_kernel_ms=1.59)], [" 0 of 24 steps leave", "1.28× as long"], []),
    ("idle", NOT_CAPTURED, ["2 steps of 24 (2.7b) were not tried"], []),
    ("kernels", (), ["same one leads in 12 of 12 cases"], []),
    ("published", [GROWING], ["From context 512 to 1,024", "our kernel time 2.00×"], []),  # not the projected time
]  # fmt: skip


@pytest.mark.parametrize(("name", "changes", "expected", "absent"), FINDINGS)
def test_a_finding_follows_the_records(name, changes, expected, absent):
    told = "\n".join(getattr(report, f"findings_{name}")(profiles(*changes)))
    assert all(text in told for text in expected) and not any(text in told for text in absent)


def test_the_largest_kernels_of_a_step_stand_beside_those_of_its_forward_pass():
    table = report.table_kernels(profiles()).set_index("kernel of 2.7b at 512 in bf16")
    row = table.loc["`nvjet_tst_128x256`"]
    names = ["forward (ms)", "both (ms)", "launches, both", "share, forward", "share, both", "what it does"]
    assert row[names].tolist() == ["0.307", "0.922", "20", "60 %", "60 %", "matrix product"]
    assert "`FusedAdam`" not in table.index


def test_idle_is_shown_by_the_step_without_a_profiler():
    table = report.table_idle(profiles(waiting(unprofiled_ms=2.0, step_kernel_ms=1.5)))
    case = table["size"] + " " + table["precision"]
    idle = dict(zip(case, table["idle without"], strict=True))
    assert idle == {"small fp32": "≤ 2.0 %", "2.7b fp32": "≤ 2.0 %", "small bf16": "25 %", "2.7b bf16": "≤ 2.0 %"}


def test_idle_shares_agree_with_the_launch_bound_steps_of_notebook_01():
    found, calls = (Chapter(name, device="nvidia-h200").records(section)
                    for name, section in ((NOTEBOOK, "profiles"), ("01_benchmarking", "steps")))  # fmt: skip
    both = rows.idle_in_calls(rows.whole_steps(found), calls)
    assert len(both) > 30 and (both["idle"] > 0).all(), "a step's kernels take longer than the step"
    bound, others = (both["idle"][both["launch_bound"] == is_bound] for is_bound in (True, False))
    assert bound.min() > report.IDLE and others.median() < report.IDLE
    sentence = report.findings_idle(found, calls)[0]
    assert "By these kernel times 01's launch-bound calls idle" in sentence
    most = both.loc[both["idle"] == others.max()].iloc[0]
    assert f"most: {most['size']} at {most['context']} in {most['precision']}, issued after" in sentence


def test_other_kernels_are_those_of_forward_that_are_no_product():
    found = rows.largest_kernels(profiles(), others=True)
    assert set(found["kernel"]) == {"`softmax_warp_forward`", "`vectorized_elementwise[AddFunctor]`"}
    assert len(found) == 2 * 2 * len(SIZES) * len(CONTEXTS) * 2 and set(found["attention"]) == {"eager"}


def test_published_figures_stand_beside_ours():
    found = report.published_profiles(profiles(GROWING))
    rtx = found[(found["gpu"] == "RTX 5090") & (found["size"] == "small") & (found["context"] == 512)]
    by_quantity = {(row.quantity, row.view): (row.published, pytest.approx(row.ours)) for row in rtx.itertuples()}
    assert by_quantity["matmuls (%)", "inference"] == (80.0, 60.0)
    assert by_quantity["matmuls (%)", "train_step"] == (53.5, 100 * 1800 / 3100)
    assert by_quantity["softmax / products", "inference"] == (0.5, 2.0)
    assert by_quantity["forward (ms)", "forward"] == (81.12, 4.0)
    assert {"matmuls (%)", "softmax / products", "forward (ms)"} <= set(report.table_published(profiles())["quantity"])


def test_what_was_not_captured_is_marked():
    marks = [[text.get_text() for text in axis.texts] for axis in report.figure_classes(profiles(*NOT_CAPTURED)).axes]
    assert marks == [[], ["×", "×"]]


@pytest.mark.parametrize("kept", ["inference", "train_step", "eager", "failed"])
def test_every_part_renders_from_few_records(kept):
    """As after the first cases of a run, or where no case fits."""
    frame = profiles(*([({}, {"status": "error", "reason": "it broke"})] if kept == "failed" else []))
    few = frame[(frame["phase"] == kept) | (frame["attention"] == kept) | (kept == "failed")].reset_index(drop=True)
    few.attrs = frame.attrs
    for name in dir(report):
        if name.startswith(("table_", "findings_", "figure_")):
            made = getattr(report, name)(few)
            assert isinstance(made, pd.DataFrame | list) or made is None or made.axes, name
    assert (report.figure_timeline(few) is None) == (kept in ("inference", "failed"))
    assert len(report.table_passes(few)) == (4 if kept == "inference" else 4 if kept == "eager" else 0)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """The notebook executed here in the smoke profile, with a canary in the environment."""
    return execute_smoke(NOTEBOOK, tmp_path_factory.mktemp("figures"), LABKIT_CANARY=CANARY)


@pytest.mark.slow
def test_smoke_captures_every_case_and_writes_figures(measured):
    folder, _ = measured
    path = folder / "records" / f"{NOTEBOOK}.jsonl"
    records = finished(NOTEBOOK, folder)
    assert {record.status for record in records} == {"ok"} and len(records) == 2 * len(cases("smoke", "cpu"))
    assert {record.observed["profiler"] for record in records} == {"kineto cpu"}
    drawn = {path.name for path in folder.glob("02_*.svg")}
    assert drawn == {"02_classes.svg", "02_timeline.svg", "02_softmax.svg"}
    assert max(map(len, path.read_text().splitlines())) < 1_000_000


@pytest.mark.slow
def test_smoke_adds_up_and_says_what_it_used(measured):
    folder, executed = measured
    frame = Chapter(NOTEBOOK, device=folder.name, output=str(folder.parent)).records("profiles")
    total = frame["capture_in_ranges_ms"] + frame["capture_outside_us"] / 1e3
    assert ((total / frame["capture_kernel_ms"] - 1).abs() < 1e-3).all()
    outputs = [output for cell in executed.cells for output in cell.get("outputs", [])]
    shown = "\n".join(output.get("data", {}).get("text/markdown", "") for output in outputs)
    ours, _, published = shown.partition("Published profiles beside ours")
    assert "An inference pass under the profiler" in ours and "ot measured" not in ours
    assert "not measured" in published, "no published size is in the smoke profile"
    found = rows.attention_times(frame)
    assert (found[found["attention"] == "eager"][["matmul_us", "softmax_us", "other_us"]] > 0).all(axis=None)


@pytest.mark.slow
def test_the_environment_is_in_no_file(measured):
    folder, executed = measured
    for path in folder.rglob("*"):
        if path.is_file():
            assert CANARY.encode() not in path.read_bytes(), path
    assert CANARY not in json.dumps(executed)
    records = (folder / "records" / f"{NOTEBOOK}.jsonl").read_text(encoding="utf-8")
    assert os.environ.get("HOME", "/root") + "/" not in records and "/tmp/" not in records


@pytest.fixture(scope="module")
def gpu_capture():
    """Two cases of the small model in one capture of nsys; skipped where there is no GPU or no nsys."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    nsys = Nsys.find()
    if nsys is None:
        pytest.skip("needs nsys")
    group = [
        (parameters("small", 512, precision, attention), ("inference", "train_step"))
        for precision, attention in (("fp32", "eager"), ("bf16", "auto"))
    ]
    return experiment._capture_group(nsys, hardware.detect(), group, 300.0)


@pytest.mark.gpu
def test_nsys_captures_steps_whose_kernels_are_all_in_their_phases(gpu_capture):
    measured = {key: outcome() for key, outcome in gpu_capture.items()}
    assert len(measured) == 4
    for key, found in measured.items():
        metrics = found.metrics
        assert found.observed["profiler"] == "nsys" and metrics["num_launches"] > 300
        total = metrics["capture_in_ranges_ms"] + metrics["capture_outside_us"] / 1e3
        assert total == pytest.approx(metrics["capture_kernel_ms"], rel=1e-3)
        assert metrics["num_launches"] == metrics["num_launches_with_ranges"]
        classes = pd.DataFrame(found.observed["tables"]["classes"]).groupby("kernel_class")["total_us"].sum()
        assert classes.get("other", 0) < 0.02 * classes.sum()
        if "fp32" in key:  # in bf16 at this size the elementwise kernels may take longer than the matmuls
            assert classes.idxmax() == "matmul"
    step = measured[experiment._key(parameters("small", 512), "train_step")].metrics
    assert step["backward_kernel_ms"] > 1.5 * step["forward_kernel_ms"], "backward kernels reach their range"


@pytest.mark.gpu
def test_torch_profiler_gives_the_same_table_as_nsys(gpu_capture):
    case = dataclasses.replace(cases("full", "cuda", sizes=["small"], contexts=[512])[0])
    with experiment.workload(hardware.detect(), case) as workload:
        ours = experiment._capture_here(workload, case, "train_step")
    theirs = gpu_capture[experiment._key(case.parameters, "train_step")]()
    assert ours.observed["profiler"] == "kineto"
    assert ours.metrics["num_launches"] == theirs.metrics["num_launches"]
    for phase in ("forward", "backward", "optimizer"):
        assert ours.metrics[f"{phase}_kernel_ms"] == pytest.approx(theirs.metrics[f"{phase}_kernel_ms"], rel=0.05)
