"""Notebook 06: what a case measures is gated and is what its label says, and the report says what the records say.

The report's tests run on invented records of the full grid: times from a simple model of a device, so that what each
table, figure and finding must say is known.
"""

import dataclasses
import functools
import itertools
import json
import math
import os
import re
from collections import Counter

import pytest
from chapters import CPU, in_section, recorded, run_smoke

from labkit import accounting, lessons
from labkit.configs import LEADERBOARD, MATERIALISING, PASSES
from labkit.experiments import flash_attention as experiment
from labkit.experiments.flash_attention import cases
from labkit.experiments.sweep import Case
from labkit.numerics import Verdict
from labkit.records import Record, RecordStore
from labkit.report import figures
from labkit.report import flash_attention as report
from labkit.report.chapter import Chapter

NOTEBOOK = "06_flash_attention"
DEVICE = "invented-device"

RATES = {
    "gluon": 500.0, "triton": 400.0, "fa3": 520.0, "sdpa_cudnn": 450.0, "sdpa_flash": 300.0,
    "sdpa_efficient": 150.0, "flex": 350.0, "compiled": 60.0, "eager": 30.0,
    "fa3_deterministic": 430.0, "triton_ieee": 90.0, "triton_tf32": 800.0,
}  # fmt: skip
"""TFLOP/s of each implementation on the invented device in bf16; a tenth of it in fp32 and TF32."""

FLOOR_MS, LAUNCH_MS, CEILING = 0.005, 0.04, {"bf16": 700.0, "fp32": 50.0, "tf32": 350.0}


def timed(time_ms: float, **metrics) -> dict:
    ends = {"median_ms": time_ms, "p20_ms": 0.99 * time_ms, "p80_ms": 1.01 * time_ms, "half_width_fraction": 0.002}
    return {"metrics": {**ends, **metrics}}


def ratio_metrics(ratio: float, low: float, high: float) -> dict:
    return {"ratio_to_ours": ratio, "ratio_to_ours_low": low, "ratio_to_ours_high": high}


def contest(p: dict, impl: str, name: str) -> dict:
    """Returns what a contest of attention would have recorded, by a fixed rate and a floor."""
    share = 1 if p["precision"] == "bf16" else 0.1
    auto = {"bf16": "gluon", "fp32": "triton", "tf32": "triton_tf32"}[p["precision"]]
    flops = accounting.attention_call_flops(name, p["batch"] * p["heads"], p["length"], p["d_head"], causal=p["causal"])
    time_ms, ours_ms = (FLOOR_MS + flops / (RATES[one] * share * 1e9) for one in (impl, auto))
    calls = {"launch_median_ms": LAUNCH_MS, "host_median_ms": max(LAUNCH_MS, time_ms) + 0.01}
    calls |= {"flush_median_ms": 1.01 * time_ms}
    rates = {"achieved_tflops": flops / time_ms / 1e9, "ceiling": CEILING[p["precision"]], "is_auto": int(impl == auto)}
    ratios = ratio_metrics(*(by * time_ms / ours_ms for by in (1, 0.99, 1.01)))
    errors = Verdict(2e-3, 2e-3, 0.4).metrics()
    return timed(time_ms, **rates, **errors, **ratios, **(calls if name != "backward" else {}))


def invented(case: Case, phase: str) -> dict:
    """Returns the fields of a record of the case."""
    p = case.parameters
    if case.section == "ceilings":
        return timed(1.0)
    if phase == "errors":
        found = {name: Verdict(2e-7, 1e-7, 0.5).metrics() for name in ("out", "dq", "dk", "dv")}
        return {"metrics": {f"{name}_{key}": value for name, values in found.items() for key, value in values.items()}}
    if phase == "trace":
        names = [f"query {query} {name}" for query in range(3) for name in ("maximum", "denominator", "distance")]
        return {"samples": {name: [float(step >= 1) for step in range(p["length"] // p["tile"])] for name in names}}
    if case.section == "memory":
        size = 2 if p["precision"] == "bf16" else 4
        scores = 3 * p["length"] ** 2 * size if p["impl"] in MATERIALISING else 0
        if scores and p["length"] > 65536:
            return {"status": "oom", "reason": "OutOfMemoryError: no room"}
        return {"metrics": {"peak_bytes": 10 * p["length"] * p["d_head"] * size + scores}}
    if case.section == "tiles":
        if (p["block_q"], p["block_k"]) == (256, 128):
            return {"status": "skipped", "reason": "OutOfResources: out of resource: shared memory"}
        time_ms = 1 + abs(math.log2(p["block_q"] / 128)) + abs(math.log2(p["block_k"] / 128))
        return timed(time_ms, achieved_tflops=100.0, is_shipped=int((p["block_q"], p["block_k"]) == (128, 128)))
    impl, name = phase.split(" ")
    if case.section == "weighted_sum":
        return timed({"eager": 3.5, "compiled": 1.2, "triton": 1.0}[impl])
    if impl == "eager" and p["precision"] != "bf16" and p["length"] == 65536:
        return {"status": "oom", "reason": "OutOfMemoryError: CUDA out of memory"}
    if impl == "fa3" and p["d_head"] == 72:
        return {"status": "skipped", "reason": "FlashAttention-3 is not installed"}
    if impl == "sdpa_efficient" and p["d_head"] == 16 and p["length"] == 1024 and name == "backward":
        return {"status": "error", "reason": "AssertionError: wrong: the error of dq is 7.5 times what is allowed"}
    products = {"products": "tf32x3" if p["length"] < 4096 else "bf16x6"} if impl == "triton" else {}
    return {**contest(p, impl, name), "observed": products}


@functools.cache
def full_records() -> str:
    """Returns lines of records of every case of the full grid."""
    known = {"device": DEVICE, "measurement_version": experiment.MEASUREMENT_VERSION}
    fields = {"status": "ok", "timer": {"method": "graph"}}
    records = (
        Record(NOTEBOOK, case.section, case.parameters, phase, **known, **{**fields, **invented(case, phase)})
        for case in cases("full", "cuda")
        for phase in case.phases
    )
    return "".join(json.dumps(dataclasses.asdict(record)) + "\n" for record in records)


@pytest.fixture
def chapter(tmp_path):
    (tmp_path / DEVICE / "records").mkdir(parents=True)
    (tmp_path / DEVICE / "environment.json").write_text(json.dumps({"device": {"name": "an invented device"}}))
    (tmp_path / DEVICE / "records" / f"{NOTEBOOK}.jsonl").write_text(full_records())
    return Chapter(NOTEBOOK, device=DEVICE, output=str(tmp_path))


def test_the_full_grid_is_every_length_head_dimension_and_precision():
    speed = in_section(cases("full", "cuda"), "speed")
    in_turn = [case for case in speed if case.parameters["timed"] == "in turn"]
    shapes = [(p["precision"], p["d_head"], p["length"]) for p in (case.parameters for case in in_turn)]
    lengths = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
    few = {72: (1024, 4096, 16384)}
    wanted = [(d, length) for d in (16, 32, 64, 72, 128) for length in few.get(d, lengths)]
    expected = [(p, *shape) for p in ("bf16", "fp32") for shape in wanted]
    by_shape = [*((64, length) for length in (1024, 4096, 16384, 65536)), (128, 4096), (128, 16384)]
    assert shapes == expected + [("tf32", *shape) for shape in by_shape]
    assert {(p["batch"], p["heads"], p["causal"]) for p in (case.parameters for case in speed)} == {(1, 1, True)}
    measured = Counter(phase.split(" ")[0] for case in speed for phase in case.phases)
    assert set(measured) == {
        "gluon", "triton", "triton_ieee", "triton_tf32", "eager", "compiled", "sdpa_flash",
        "sdpa_efficient", "sdpa_cudnn", "fa3",
    }  # fmt: skip
    assert measured["triton"] == 3 * 2 * 43 and measured["eager"] == 3 * (2 * 43 + len(by_shape))
    assert measured["triton_tf32"] == 3 * len(by_shape) and measured["triton_ieee"] == 3 * (3 + 1)
    # What compiles for a shape has few, one of each smaller head dimension.
    assert measured["compiled"] == 3 * (2 * (len(by_shape) + 2) + 5)
    assert measured["gluon"] == measured["fa3"] == 3 * 43, "16-bit only"


def test_what_materialises_the_scores_is_timed_alone_and_the_rest_in_turn():
    for case in in_section(cases("full", "cuda"), "speed"):
        impls = {phase.split(" ")[0] for phase in case.phases}
        if case.parameters["timed"] == "in turn":
            assert impls & {"gluon", "triton", "triton_tf32"} and not impls & set(MATERIALISING)
        else:
            assert {case.parameters["timed"]} == {f"alone: {impl}" for impl in impls} and impls <= set(MATERIALISING)
        assert Counter(phase.split(" ")[1] for phase in case.phases) == dict.fromkeys(PASSES, len(impls))


def test_cases_of_one_shape_follow_one_another():
    """The oracle of the last shape is kept: taken apart they would compute it again each time."""
    speed = in_section(cases("full", "cuda"), "speed")
    shapes = [tuple(case.parameters[name] for name in ("precision", "d_head", "length")) for case in speed]
    assert sum(one != next_one for one, next_one in itertools.pairwise(shapes)) == len(set(shapes)) - 1


def test_the_rivals_meet_on_the_eight_shapes():
    rivals = in_section(cases("full", "cuda"), "rivals")
    shapes = [tuple(case.parameters[name] for name in ("batch", "heads", "length", "d_head", "causal"))
              for case in rivals]  # fmt: skip
    assert shapes == [
        (4, 32, 4096, 64, True),
        (1, 32, 16384, 64, True),
        (1, 32, 16384, 64, False),
        (4, 16, 4096, 128, True),
        (1, 16, 16384, 128, True),
        (1, 16, 16384, 128, False),
        (1, 16, 16384, 64, True),
        (64, 16, 256, 72, False),
    ]
    assert dataclasses.astuple(LEADERBOARD) in shapes
    for case in rivals:
        impls = {phase.split(" ")[0] for phase in case.phases}
        assert {"gluon", "triton", "sdpa_flash", "sdpa_cudnn", "flex", "fa3", "fa3_deterministic"} <= impls


def test_options_narrow_the_grid():
    found = cases("full", "cuda", lengths=[4096], d_heads=[64])
    for section, name, value in (("speed", "length", 4096), ("rivals", "d_head", 64), ("memory", "length", 4096)):
        assert {case.parameters[name] for case in in_section(found, section)} == {value}
    assert len(in_section(found, "ceilings")) == 4


def change(chapter: Chapter, section_and_phase: str, case: dict | None = None, **fields) -> None:
    """Appends newer records like those of a section and phase (an expression), with other metrics or another status."""
    store = RecordStore(chapter.folder / "records" / f"{NOTEBOOK}.jsonl")
    section, phase = section_and_phase.split(" ", 1)
    changed = [
        record for record in chapter.all_records()
        if record.section == section and re.fullmatch(phase, record.phase)
        and (case or {}).items() <= record.case.items() and (record.status == "ok" or "status" in fields)
    ]  # fmt: skip
    assert changed
    own = {"metrics": {}, **fields} if "status" in fields else fields if "samples" in fields else None
    if "median_ms" in fields:
        fields |= dict.fromkeys(("min_ms", "p20_ms", "p80_ms"), fields["median_ms"])
    for record in changed:
        store.append(dataclasses.replace(record, **(own or {"metrics": {**record.metrics, **fields}})))


def lines_of(table) -> dict[str, dict]:
    """Returns a table's rows by the text of their first column."""
    return {row[table.columns[0]]: row for row in table.to_dict("records")}


SHAPE_NAME = "4,16,4096,128 causal"
AT_4096, AT_65536 = {"length": 4096, "d_head": 128}, {"length": 65536, "d_head": 128}
FA3 = ("speed fa3 backward", {"precision": "bf16", "length": 1024, "d_head": 64}, {"budget_fraction": 0.97})
TRACE = ("algorithm trace", {"tile": 8}, {"samples": {"query 0 maximum": [float(step) for step in range(12)]}})
GLUON_AT_65536 = ("memory forward_backward", {"impl": "gluon", "length": 65536})
NUM_BYTES = 10 * 65536 * 64 * 2
ERRORS = ("algorithm", "speed", "rivals")

FINDINGS = [  # of which sections, what is changed, what must be said
    ("errors", ERRORS, FA3, ["97 % of the error allowed (FlashAttention-3, bf16, backward, d 64 at 1,024)",
                              "2.00× the error", "2 measurements of", "wrong:"]),
    ("errors", ERRORS, TRACE, ["11 of 11 later tiles"]),
    ("tiles", ["tiles"], (), ["128 × 128 are the fastest of 11"]),
    *(("tiles", ["tiles"], ("tiles forward", {"block_q": 64, "block_k": 64}, {"median_ms": time_ms}),
       [f"The shipped 128 × 128 is {word}"]) for time_ms, word in ((0.995, "level"), (0.5, "behind"))),
    ("weighted_sum", ["weighted_sum"], (), ["6 ahead (3.50×) against eager"]),
    ("weighted_sum", ["weighted_sum"], ("weighted_sum triton backward", {"rows": 65536}, {"median_ms": 100.0}),
     ["5 ahead, 1 behind"]),
    ("products", ["speed"], ("speed triton forward", {"precision": "fp32", **AT_65536},
                             {"achieved_tflops": 0.5 * CEILING["bf16"] / 6}), ["50 % of a sixth of bf16's"]),
    ("products", ["speed"], ("speed triton forward", {"precision": "fp32", "length": 16384, "d_head": 64},
                             {"median_ms": 1e5}), ["11 ahead, 1 behind"]),
    ("products", ["speed"], ("speed triton_ieee.*", {}, {"status": "skipped", "reason": "-"}), []),
    ("memory", ["memory", "speed"], (), ["level at 8 of 8 lengths", "eager in bf16 at 131,072, ours needs 160 MiB"]),
    ("memory", ["memory", "speed"], (*GLUON_AT_65536, {"peak_bytes": NUM_BYTES + 1}),
     ["level at 7 and behind at 1 of 8 lengths"]),
    ("memory", ["memory", "speed"], (*GLUON_AT_65536, {"peak_bytes": 100 * (NUM_BYTES + 1)}),
     ["at worst 100× at 65,536"]),
    ("published", ["speed", "rivals"], ("rivals gluon forward_backward", {"heads": 16, "length": 16384},
                                        {"median_ms": 1.234}),
     ["5.36 ms on an H100, kind of time unknown; ours here 1.23 ms in device time"]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "sections", "changed", "expected"), FINDINGS)
def test_a_finding_follows_the_records(chapter, name, sections, changed, expected):
    if changed:
        change(chapter, *changed[:2], **changed[2])
    sentences = getattr(report, f"findings_{name}")(*map(chapter.records, sections))
    assert all(any(text in sentence for sentence in sentences) for text in expected)
    assert bool(sentences) == bool(expected)
    assert name != "published" or "×" not in sentences[-1], "no ratio of two kinds of time"


@pytest.mark.parametrize(
    ("ratio", "low", "high", "shown"),
    [
        (1.2, 1.18, 1.22, "ahead 1.20×"),
        (1.01, 1.005, 1.015, "level 1.01×"),  # the whole interval is above one, and within what sessions differ by
        (1.03, 0.95, 1.1, "undecided 1.03×"),
        (0.9, 0.88, 0.92, "behind 0.900×"),
    ],
)
def test_a_verdict_follows_the_paired_interval(chapter, ratio, low, high, shown):
    change(chapter, "rivals fa3 forward_backward", AT_4096, **ratio_metrics(ratio, low, high))
    rivals, verdict = chapter.records("rivals"), shown.split(" ")[0]
    assert lines_of(report.table_rivals(rivals))[SHAPE_NAME]["both"] == shown
    fa3 = report.strongest(rivals)[1]
    counted = f"{(fa3[fa3['name'] == 'forward_backward']['verdict'] == verdict).sum()} {verdict}"
    assert counted in report.findings_rivals(rivals)[0] and counted in report.front(chapter)[0][0]


def test_a_call_and_a_flushed_cache_are_compared_with_their_like(chapter):
    def line() -> dict:
        return lines_of(report.table_rivals(chapter.records("rivals")))[SHAPE_NAME]

    before = line()
    change(chapter, "rivals gluon forward_backward", AT_4096, host_median_ms=1e3)
    change(chapter, "rivals fa3 forward_backward", AT_4096, **ratio_metrics(1.2, 1.19, 1.21))
    after = line()
    assert after["both"].startswith("ahead") and after["both, call"].startswith("behind 0.00")
    assert after["both, flush"] == before["both, flush"]
    assert f"In call time {SHAPE_NAME} is behind" in report.findings_rivals(chapter.records("rivals"))[0]
    change(chapter, "rivals gluon forward_backward", AT_4096, flush_median_ms=1e3)
    after = line()
    assert after["both, flush"].startswith("behind 0.00") and after["both"].startswith("ahead")


def test_host_bound_and_device_bound_cases_are_never_counted_together(chapter):
    def cells() -> dict:
        table = report.table_lengths(chapter.records("speed"))
        return table[(table["precision"] == "bf16") & (table["against"] == "SDPA cuDNN")].to_dict("records")[0]

    def change_cudnn(length: int, ratio: float) -> None:
        case = {"precision": "bf16", "d_head": 64, "length": length}
        change(chapter, "speed sdpa_cudnn forward_backward", case, **ratio_metrics(ratio, ratio, ratio))

    host, device, before = "host-bound: device time", "device-bound: device time", cells()
    assert all(text != "–" for text in before.values())
    change_cudnn(128, 9.0)
    after = cells()
    assert "9.00×" in after[host] and "9.00×" not in before[host] and after[device] == before[device]
    change_cudnn(65536, 0.5)
    assert "1 behind (0.500" in cells()[device]
    assert "issuing a call takes longer" in report.findings_lengths(chapter.records("speed"))[0]
    change(chapter, "speed .* forward.*", launch_median_ms=1e-4)
    assert cells()["host-bound: call time"] == "–"
    assert "issuing" not in " ".join(report.findings_lengths(chapter.records("speed")))


def test_ours_is_what_auto_runs(chapter):
    at = {"length": 256}
    change(chapter, "rivals gluon forward_backward", at, is_auto=0)
    change(chapter, "rivals triton forward_backward", at, is_auto=1, median_ms=77.7)
    change(chapter, "rivals fa3 forward_backward", at, status="ok", reason="")
    compared = report.compared(chapter.records("rivals"))
    assert set(compared[(compared["length"] == 256) & (compared["name"] == "forward_backward")]["ours_ms"]) == {77.7}


def test_tables_hold_words_and_figures_marks_for_what_failed(chapter):
    contests = [chapter.records(name) for name in ERRORS[1:]]
    table = lines_of(report.table_errors(*contests))
    assert table["SDPA efficient"]["bf16"].endswith(", 1 wrong") and table["Gluon (ours)"]["fp32"] == "–"
    change(chapter, *FA3[:2], **FA3[2])
    assert lines_of(report.table_errors(chapter.records("speed")))["FlashAttention-3"]["bf16"].startswith("0.97 of ")
    change(chapter, "tiles forward", {"block_q": 64, "block_k": 64}, achieved_tflops=555.0)
    tiles = lines_of(report.table_tiles(chapter.records("tiles")))
    assert tiles[64][64] == "555" and tiles[128][128].endswith("(shipped)") and tiles[256][128] == "skipped"
    assert "oom" in report.table_memory(chapter.records("memory"), chapter.records("speed")).to_string()
    change(chapter, *GLUON_AT_65536, peak_bytes=100 * NUM_BYTES)
    assert "8,000" in report.table_memory(chapter.records("memory"), chapter.records("speed")).to_string()


def test_published_times_stand_beside_the_device_bound_ones_only(chapter):
    matches = report.published_times(chapter.records("speed"))
    assert len(matches) and set(matches["timer_method"]) == {"graph"}
    assert not ((matches["length"] <= 512) & (matches["precision"] == "bf16")).any(), "the host binds these"
    row = matches[(matches["length"] == 65536) & (matches["d_head"] == 64) & (matches["precision"] == "bf16")]
    row = row[(row["kernel"] == "Triton") & (row["phase"] == "forward")].iloc[0]
    assert row["published_ms"] == 6.297 and row["ratio"] == pytest.approx(6.297 / row["median_ms"])


def test_versions_are_data():
    frame = report.versions()
    assert set(frame["kept"]) == {"yes", "no"} and set(frame.dropna()["compared"]) == {"one process", "two processes"}
    table = report.table_versions(frame)
    assert not table.duplicated(["pass", "change"]).any() and set(table["change"]) <= set(frame["change"])


EVIDENCE = {
    "algorithm": [report.figure_online_softmax],
    "tiles": [report.table_tiles, report.findings_tiles],
    "weighted_sum": [report.findings_weighted_sum],
    "speed": [report.table_errors, report.figure_lengths, report.table_lengths, report.findings_lengths,
              report.published_times, report.table_published],
    "rivals": [report.table_errors, report.figure_rivals, report.table_rivals, report.findings_rivals],
    "memory": [report.figure_memory, report.table_memory, report.findings_memory],
}  # fmt: skip


@pytest.mark.parametrize("kept", ["as on a CPU", "nothing ok", "bf16 alone"])
def test_records_of_another_device_are_shown_without_what_they_lack(chapter, kept):
    """A CPU has no launch, no ceiling, no graph; all may have failed; a precision may be missing."""
    speed = []
    for section, functions in EVIDENCE.items():
        frame = chapter.records(section)
        if kept == "as on a CPU":
            missing = [name for name in frame if re.match("launch_|host_|flush_|ceiling|ratio_to", name)]
            frame = frame[~frame["phase"].str.startswith(("gluon", "fa3"))].drop(columns=missing)
            frame = frame.assign(timer_method="host", is_auto=frame["phase"].str.startswith("triton ").astype(int))
        elif kept == "nothing ok":
            case = [name for record in chapter.all_records() if record.section == section for name in record.case]
            columns = dict.fromkeys(["section", "phase", "status", "reason", "observed", *case])
            frame = frame.assign(status="skipped", reason="no")[list(columns)]
        elif "precision" in frame and "bf16" in set(frame["precision"]):
            frame = frame[frame["precision"] == "bf16"]
        frame.attrs |= {"device": "abacus", "device_kind": "cpu"}
        speed = [frame] if section == "speed" else speed
        for function in functions:
            shown = function(frame, *speed) if section == "memory" else function(frame)
            assert "nan" not in str(shown if isinstance(shown, list) else ""), function.__name__
            if kept == "as on a CPU" and isinstance(shown, list):
                assert "device time" not in " ".join(shown), function.__name__


def test_what_only_older_records_have_is_called_as_it_is_there(chapter):
    older = {name: chapter.records(name) for name in EVIDENCE}
    for name in ("speed", "rivals", "memory"):
        older[name] = older[name].assign(phase=older[name]["phase"].str.replace("sdpa_flash", "gone"))
        older[name].attrs |= chapter.records(name).attrs
    older["memory"] = older["memory"].assign(impl=older["memory"]["impl"].replace("sdpa_flash", "gone"))
    for section, functions in EVIDENCE.items():
        speed = [older["speed"]] if section == "memory" else []
        for function in functions:
            shown = function(older[section], *speed)
            assert "SDPA flash" not in str(shown), function.__name__
    assert report.NAMES["gone"] == "gone"


def test_without_records_every_section_says_so(tmp_path):
    empty = Chapter(NOTEBOOK, device="abacus", output=str(tmp_path))
    for section, functions in EVIDENCE.items():
        frames = [empty.records("speed")] * (1 + (section == "memory"))
        for function in functions:
            assert "ot measured on abacus" in empty.table(function, *frames, caption="it").data
    assert report.front(empty) == []


@pytest.mark.parametrize(
    ("make", "section", "changed"),
    [
        (report.figure_lengths, "speed", ("speed sdpa_cudnn forward_backward", {}, {"median_ms": 50.0})),
        (report.figure_rivals, "rivals", ("rivals sdpa_cudnn forward", {}, {"achieved_tflops": 50.0})),
        (report.figure_memory, "memory", (*GLUON_AT_65536, {"peak_bytes": 100 * NUM_BYTES})),
        (report.figure_online_softmax, "algorithm", TRACE),
    ],
)
def test_figures_are_the_same_bytes_twice_and_follow_their_records(chapter, make, section, changed):
    sections = [section, "speed"] if section == "memory" else [section]

    def drawn() -> str:
        return figures.svg(make(*map(chapter.records, sections)))

    before = drawn()
    assert before == drawn()
    change(chapter, *changed[:2], **changed[2])
    assert drawn() != before


def test_kernels_are_interpreted_only_where_triton_is_not_loaded_yet(monkeypatch):
    monkeypatch.setattr(lessons.hardware, "detect", lambda: CPU)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(RuntimeError, match="restart the kernel"):
        lessons.interpret_kernels()
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    lessons.interpret_kernels()
    monkeypatch.setattr(lessons.hardware, "detect", lambda: dataclasses.replace(CPU, kind="cuda"))
    monkeypatch.delenv("TRITON_INTERPRET")
    lessons.interpret_kernels()
    assert "TRITON_INTERPRET" not in os.environ


@pytest.mark.slow
def test_the_smoke_profile_runs_through(tmp_path):
    folder = run_smoke(NOTEBOOK, tmp_path, "lengths=128", "d_heads=16")
    records = recorded(NOTEBOOK, folder)
    text = (folder / "report.md").read_text(encoding="utf-8")
    sections = {"ceilings", "algorithm", "weighted_sum", "speed", "rivals", "tiles", "memory"}
    assert {record.section for record in records} == sections
    assert {record.status for record in records} == {"ok", "skipped"}
    timed = {record.phase.split(" ")[0] for record in records if record.section == "speed" and record.status == "ok"}
    assert timed == {"tiled", "eager", "compiled", "sdpa_flash"}
    skipped = {record.phase.split(" ")[0]: record.reason for record in records if record.status == "skipped"}
    assert all(skipped[impl] for impl in ("triton", "gluon", "fa3", "sdpa_cudnn", "sdpa_efficient"))
    for name in ("06_online_softmax.svg", "06_lengths.svg", "06_rivals.svg"):
        assert f"({name})" in text and (folder / name).exists()
