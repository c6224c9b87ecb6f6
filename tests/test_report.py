"""The report says what the records say: a changed record changes the table, the figure and the finding."""

import dataclasses
import json
import math
import re
import shutil

import pandas as pd
import pytest

from labkit.configs import FIGURES, REFERENCE_DEVICE
from labkit.records import Record, RecordError, RecordStore, newest
from labkit.report import benchmarking as report
from labkit.report import figures, findings, render, tables
from labkit.report.chapter import Chapter

NOTEBOOK = "01_benchmarking"


@pytest.fixture
def folder(tmp_path):
    """A copy of the committed reference device, free to be changed; returns its folder."""
    target = tmp_path / REFERENCE_DEVICE
    shutil.copytree(FIGURES / REFERENCE_DEVICE, target)
    return target


def chapter(folder):
    return Chapter(NOTEBOOK, device=folder.name, output=str(folder.parent))


def change(folder, match, **metrics):
    """Appends newer records like the newest ones that `match`, with other metrics, as a new measurement would."""
    store = RecordStore(folder / "records" / f"{NOTEBOOK}.jsonl")
    changed = [record for record in newest(store.load()) if match(record)]
    assert changed
    for record in changed:
        store.append(dataclasses.replace(record, metrics={**record.metrics, **metrics}))


def is_case(record, section, phase, **case):
    return (
        record.section == section
        and record.phase == phase
        and record.status == "ok"
        and case.items() <= record.case.items()
    )


# ---- a changed record ------------------------------------------------------------------------------------------


def test_a_changed_time_changes_table_and_figure(folder):
    before = chapter(folder).records("steps")
    change(
        folder,
        lambda record: is_case(record, "steps", "forward", size="small", context=512, precision="fp32"),
        median_ms=12345.0, p20_ms=12345.0, p80_ms=12345.0,
    )  # fmt: skip
    after = chapter(folder).records("steps")
    old, new = (report.table_phases(frame, "fp32") for frame in (before, after))
    differing = (old != new).to_numpy().sum()
    assert differing == 1 and "12,345" in new.to_string() and "12,345" not in old.to_string()
    old, new = (figures.svg(report.figure_phases(frame, "fp32")) for frame in (before, after))
    assert old != new


def test_a_crossed_threshold_changes_the_finding(folder):
    assert "agree with the independent" in report.findings_timer(chapter(folder).records("timer"))[0]
    reference = chapter(folder).records("timer").set_index("phase")["median_ms"]["independent"]
    change(folder, lambda record: is_case(record, "timer", "graph"), median_ms=1.06 * reference)
    (sentence,) = report.findings_timer(chapter(folder).records("timer"))
    assert "do **not** agree" in sentence and "6.0 % (graph)" in sentence


def test_bf16_that_loses_is_said_to_lose(folder):
    before = " ".join(report.findings_precision(chapter(folder).records("steps")))
    change(
        folder,
        lambda record: is_case(record, "steps", "train_step", size="medium", context=1024, precision="bf16"),
        median_ms=1e6,
    )
    after = " ".join(report.findings_precision(chapter(folder).records("steps")))
    assert "medium at 1024" not in re.search(r"bf16.*not faster for(.*)", before + "not faster for")[1]
    assert "least for medium at 1024" in after and "medium at 1024" in re.search(r"bf16.*not faster for(.*)", after)[1]


def test_an_out_of_memory_is_a_word_in_the_table_and_a_mark_in_the_figure(folder):
    store = RecordStore(folder / "records" / f"{NOTEBOOK}.jsonl")
    (record,) = [
        record
        for record in newest(store.load())
        if is_case(record, "steps", "train_step", size="small", context=128, precision="fp32")
    ]
    before = figures.svg(report.figure_phases(chapter(folder).records("steps"), "fp32"))
    store.append(dataclasses.replace(record, status="oom", reason="OutOfMemoryError", metrics={}, timer={}))
    frame = chapter(folder).records("steps")
    row = report.table_phases(frame, "fp32").set_index(["size", "context"]).loc[("small", 128)]
    assert row["training step"] == "oom"
    assert figures.svg(report.figure_phases(frame, "fp32")) != before
    assert any(
        "small" in text and "out of memory at context 128 in fp32" in text for text in report.findings_phases(frame)
    )


def test_a_launch_bound_disagreement_is_explained_and_another_is_not(folder):
    case = {"size": "small", "context": 1024, "precision": "fp32"}
    change(folder, lambda record: is_case(record, "steps", "forward_backward", **case), median_ms=1.0)
    text = " ".join(report.findings_phases(chapter(folder).records("steps")))
    assert re.search(r"Not explained by the launch: .*small at 1024 in fp32", text)
    change(
        folder,
        lambda record: is_case(record, "steps", "forward_backward", **case),
        median_ms=1.0, launch_median_ms=0.95, host_median_ms=1.0,
    )  # fmt: skip
    text = " ".join(report.findings_phases(chapter(folder).records("steps")))
    assert "small at 1024 in fp32" not in "".join(re.findall(r"Not explained by the launch:.*", text))


def test_every_recorded_phase_is_in_the_table_of_all_statistics():
    frame = Chapter(NOTEBOOK, device=REFERENCE_DEVICE).records("steps")
    table = report.table_all_statistics(frame)
    medians = table[[name for name in table if name.endswith(": median")]].to_numpy()
    assert (medians != "–").sum() == len(frame) and (medians == "oom").sum() == (frame["status"] == "oom").sum()
    for statistic in tables.STATISTICS[1:]:
        cells = table[[name for name in table if name.endswith(f": {statistic}")]].to_numpy()
        assert (cells != "–").sum() == (frame["status"] == "ok").sum()


def test_a_row_of_statistics_says_how_it_was_timed(folder):
    case = {"size": "small", "context": 128, "precision": "fp32"}
    store = RecordStore(folder / "records" / f"{NOTEBOOK}.jsonl")
    (record,) = [r for r in newest(store.load()) if is_case(r, "steps", "forward", **case)]
    metrics = record.metrics | {"median_ms": 2.0, "p20_ms": 1.5, "p80_ms": 2.5, "mean_ms": 2.1, "std_ms": 0.25, "n": 7}
    store.append(dataclasses.replace(record, metrics=metrics, timer=record.timer | {"stop_reason": "time limit"}))
    table = report.table_all_statistics(chapter(folder).records("steps"))
    row = table.set_index(["phase", "size", "context"]).loc[("forward", "small", 128)]
    cells = [row[f"fp32: {name}"] for name in tables.STATISTICS]
    assert cells == ["2.00", "1.50–2.50", "2.10 ± 0.25", f"{int(record.timer['num_warmup'])}+7†"]


# ---- nothing measured, mixed devices -------------------------------------------------------------------------


def test_without_records_every_section_says_so(tmp_path):
    empty = Chapter(NOTEBOOK, device="abacus", output=str(tmp_path))
    frame = empty.records("steps")
    assert frame.empty
    for name in dir(report):
        if name.startswith(("table_", "findings_")):
            function = getattr(report, name)
            arguments = (frame, "fp32") if name in ("table_phases", "table_utilisation") else (frame,)
            assert len(function(*arguments)) == 0, name
        elif name.startswith("figure_"):
            arguments = (frame, "fp32") if name == "figure_phases" else (frame,)
            assert getattr(report, name)(*arguments) is None, name
    assert "not measured on abacus" in empty.table(frame, "Times").data
    assert "Not measured on abacus" in empty.findings([]).data
    assert "not measured on abacus" in empty.figure(None, "times", "Times").data


def test_records_of_two_devices_are_refused(folder):
    store = RecordStore(folder / "records" / f"{NOTEBOOK}.jsonl")
    store.append(dataclasses.replace(store.load()[0], device="abacus", phase="other"))
    with pytest.raises(RecordError, match=f"abacus, {REFERENCE_DEVICE}"):
        chapter(folder).records("steps")


def test_records_in_another_devices_folder_are_refused(folder):
    other = folder.rename(folder.parent / "abacus")
    with pytest.raises(ValueError, match=f"holds records of '{REFERENCE_DEVICE}'"):
        chapter(other).records("steps")


def test_report_of_an_unknown_device_names_the_known(folder):
    with pytest.raises(ValueError, match=f"'abacus'.*measured: {REFERENCE_DEVICE}"):
        render.rebuild("abacus", output=folder.parent)


def test_unfinished_and_incomplete_runs_are_said_to_be(folder):
    done = folder / "records" / f"{NOTEBOOK}.done.json"
    done.write_text(json.dumps({"num_missing": 7, "profile": "full"}))
    assert "7 measurements of the full profile are not recorded" in render._header(
        folder, folder.name, render.records_of(folder)
    )
    done.unlink()
    assert "did not run to its end" in render._header(folder, folder.name, render.records_of(folder))


# ---- the same bytes -------------------------------------------------------------------------------------------


def test_figures_are_the_same_bytes_twice():
    committed = Chapter(NOTEBOOK, device=REFERENCE_DEVICE)
    for make, section in (
        (report.figure_precision_compile, "compile"),
        (report.figure_utilisation, "steps"),
        (report.figure_warmup, "warmup"),
    ):
        frame = committed.records("steps", section) if section == "compile" else committed.records(section)
        assert figures.svg(make(frame)) == figures.svg(make(frame))


def test_committed_report_matches_the_committed_records(tmp_path):
    """A stale report.md, or a stale figure, is found here."""
    shutil.copytree(FIGURES / REFERENCE_DEVICE, tmp_path / REFERENCE_DEVICE)
    render.rebuild(REFERENCE_DEVICE, output=tmp_path)
    fresh = (tmp_path / REFERENCE_DEVICE / "report.md").read_text(encoding="utf-8")
    assert fresh == (FIGURES / REFERENCE_DEVICE / "report.md").read_text(encoding="utf-8")
    top = (FIGURES.parent / "report.md").read_text(encoding="utf-8")
    assert top == re.sub(r"\]\((\d\d_)", rf"](figures/{REFERENCE_DEVICE}/\1", fresh)
    for path in (tmp_path / REFERENCE_DEVICE).glob("*.svg"):
        assert (FIGURES / REFERENCE_DEVICE / path.name).exists()


def test_report_is_short_enough_to_be_rendered():
    """GitHub shows no Markdown past 500 KiB: readers of a longer report would lose its last chapters."""
    assert (FIGURES.parent / "report.md").stat().st_size < 500 * 2**10


def test_report_holds_no_path_of_the_measuring_machine():
    for path in [FIGURES.parent / "report.md", *FIGURES.glob("*/*.json"), *FIGURES.glob("*/records/*")]:
        if path.suffix != ".lock":
            assert not re.search(r"/(home|root|tmp|work|Users)/", path.read_text(encoding="utf-8")), path


# ---- words and cells -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.012345, "0.0123"), (1.5, "1.50"), (123.4, "123"), (12345.6, "12,346"), (0, "0"), (None, "–"), (math.nan, "–"),
     (-2.5, "-2.50"), (1e-9, "0.000000")],
)  # fmt: skip
def test_number(value, text):
    assert findings.number(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.00041, "4.1e-4"), (1.25e-12, "1.2e-12"), (3e10, "3.0e+10"), (0.0, "0.0e+0"), (None, "–"), (math.nan, "–")],
)
def test_scientific(value, text):
    assert findings.scientific(value) == text


def test_speed_words_follow_the_threshold():
    words = [findings.speed_word(1 + step * findings.SAME) for step in (0.99, 1.01, -0.99, -1.01)]
    assert words == ["about the same", "faster", "about the same", "slower"]


def test_power_law_exponent_is_exact_on_a_power_law():
    x = [128, 256, 512, 1024]
    assert findings.power_law_exponent(x, [3 * value**1.7 for value in x]) == pytest.approx(1.7, abs=1e-12)


def test_listing_and_count():
    assert findings.listing("abc") == "a, b and c"
    assert findings.listing("abcdefgh", limit=3) == "a, b, c and 5 more"
    assert findings.count(1, "case") == "1 case" and findings.count(1200, "case") == "1,200 cases"


def test_markdown_tables_escape_pipes():
    text = tables.to_markdown(pd.DataFrame({"kernel|name": ["void f<a|b>"], "ms": ["1.0"]}))
    assert "void f<a\\|b>" in text and "kernel\\|name" in text


def test_markdown_tables_are_not_padded_and_keep_their_alignment():
    frame = pd.DataFrame({"size": ["small", "xl-2025"], "ms": ["1.0", "12,345"], "note": ["", "a"]})
    assert tables.to_markdown(frame).splitlines() == [
        "| size | ms | note |", "|---|---:|---|", "| small | 1.0 | |", "| xl-2025 | 12,345 | a |",
    ]  # fmt: skip


def test_a_long_folded_table_says_once_what_repeats():
    chapter = Chapter(NOTEBOOK, device=REFERENCE_DEVICE)
    rows = [
        {"GPU": "G", "size": size, "context": context, "ms": f"{context}.5"}
        for size in ("small", "large") for context in range(10)
    ]  # fmt: skip
    text = chapter.table(pd.DataFrame(rows), "Times", folded=True).data
    assert "<summary>Times (GPU: G)</summary>" in text
    lines = text.splitlines()
    assert "| size | context | ms |" in lines and "| small | 0 | 0.5 |" in lines and "| | 9 | 9.5 |" in lines
    assert "| large | 0 | 0.5 |" in lines and sum(line.startswith("| | ") for line in lines) == 18
    whole = chapter.table(pd.DataFrame(rows), "Times").data
    assert "| G | small | 9 | 9.5 |" in whole and len(whole.splitlines()) == 2 + 2 + 20
    short = chapter.table(pd.DataFrame(rows[:5]), "Times", folded=True).data
    assert "| G | small | 4 | 4.5 |" in short


def test_a_selection_is_made_once_for_a_frame():
    calls = []

    @tables.once_per_frame
    def doubled(frame, column):
        calls.append(column)
        return frame.assign(twice=2 * frame[column])

    frame = pd.DataFrame({"a": [1, 2], "b": [3, 4]})
    first = doubled(frame, "a")
    first["twice"] = 0
    assert doubled(frame, "a")["twice"].tolist() == [2, 4] and doubled(frame, "b")["twice"].tolist() == [6, 8]
    assert calls == ["a", "b"]
    assert doubled(frame.copy(), "a")["twice"].tolist() == [2, 4] and calls == ["a", "b", "a"]


def test_published_rows_stand_beside_ours_with_the_ratio():
    frame = Chapter(NOTEBOOK, device=REFERENCE_DEVICE).records("steps", "compile")
    matched = report.published_matches(frame)
    assert {"RTX 5090", "A100-SXM4-40GB", "H100 80GB"} <= set(matched["gpu"])
    assert not matched.duplicated(["source", "gpu", "size", "context", "precision", "compile", "phase"]).any()
    assert (matched["ratio"] == matched["published_ms"] / matched["median_ms"]).all()


def test_environment_table_names_every_version_and_commit():
    def record(**changes):
        base = {"notebook": NOTEBOOK, "section": "s", "case": {}, "phase": "p", "status": "ok", "device": "d"}
        return Record(**{**base, "measurement_version": 1, **changes})

    text = render.environment_table(
        {},
        [
            record(software={"torch": "2.11"}, source={"commit": "a" * 40, "dirty": False}, recorded_at="2026-01-02"),
            record(software={"torch": "2.12"}, source={"commit": "b" * 40, "dirty": True}, recorded_at="2026-01-01"),
        ],
        "d",
    )
    assert "2.11, 2.12" in text and "2026-01-01 to 2026-01-02" in text
    assert "aaaaaaaaaaaa, bbbbbbbbbbbb with uncommitted changes" in text
    assert "measurement versions" not in text
    older = [record(), record(section="t"), record(measurement_version=2)]
    assert "1: 2 records (s, t); 2: 1 records (s)" in render.environment_table({}, older, "d")
    other = [*older, record(notebook="another")]
    assert "measurement versions" not in render.environment_table({}, other, "d"), "each notebook counts its own"
