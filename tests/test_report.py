"""The report says what the records say: a changed record changes the table, the CSV, the figure and the finding."""

import dataclasses
import itertools
import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path

import conftest
import matplotlib
import numpy as np
import pandas as pd
import pytest

from labkit import notebooks
from labkit.configs import FIGURES, LAUNCH_BOUND, PHASES, REFERENCE_DEVICE, REPOSITORY, SIZES
from labkit.records import Record, RecordError, RecordStore, folder_of, measured_devices, newest
from labkit.report import benchmarking as report
from labkit.report import figures, findings, forms, front, render, tables, verdicts
from labkit.report.chapter import Chapter

NOTEBOOK = "01_benchmarking"


@pytest.fixture
def folder(tmp_path):
    """A copy of the reference device's records of chapter 01, free to be changed; returns the device's folder."""
    target = tmp_path / REFERENCE_DEVICE
    (target / "records").mkdir(parents=True)
    for name in ("environment.json", f"records/{NOTEBOOK}.jsonl", f"records/{NOTEBOOK}.done.json"):
        shutil.copy(FIGURES / REFERENCE_DEVICE / name, target / name)
    return target


def chapter(folder, **options):
    return Chapter(NOTEBOOK, device=folder.name, output=str(folder.parent), **options)


def change(folder, section, phase, status="ok", metrics=None, **case):
    """Appends newer records like the newest matching ones, with other metrics, as a new measurement would."""
    store = RecordStore(folder / "records" / f"{NOTEBOOK}.jsonl")
    known = [r for r in newest(store.load()) if (r.section, r.phase, r.status) == (section, phase, "ok")]
    changed = [record for record in known if case.items() <= record.case.items()]
    assert changed
    for record in changed:
        around = dict.fromkeys(("min_ms", "p20_ms", "p80_ms"), metrics["median_ms"]) if metrics else {}
        values = {**record.metrics, **around, **(metrics or {})} if status == "ok" else {}
        store.append(dataclasses.replace(record, status=status, metrics=values, timer=record.timer if values else {}))


def row(median_ms, half_width=0.0, method="graph", session="a", **columns):
    base = {"status": "ok", "median_ms": median_ms, "half_width_fraction": half_width, "timer_method": method}
    return {**base, "session": session, **columns}


@pytest.mark.parametrize(
    ("theirs", "ours", "verdict"),
    [
        (row(2.0), row(1.0), "ahead"),
        (row(1.0), row(2.0), "behind"),
        (row(1.006), row(1.0), "level"),  # two entries that run one kernel differ by so much
        (row(1.05, 0.06), row(1.0), "undecided"),
        (row(1.05), row(1.0), "ahead"),
        (row(1.05, session="b"), row(1.0), "ahead"),
        (row(1.08, method="window", session="b"), row(1.0, method="host"), "undecided"),  # another day's host
        (row(1.08, method="window"), row(1.0, method="host"), "ahead"),
    ],
)
def test_verdicts_come_from_the_interval_of_the_ratio(theirs, ours, verdict):
    ratio = verdicts.ratio(theirs, ours)
    assert ratio.verdict == verdict and ratio.low <= ratio.mid <= ratio.high


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (0.97, 1.03, "level"),
        (0.969, 1.03, "undecided"),
        (0.97, 1.031, "undecided"),
        (1.0, 1.04, "undecided"),
        (1.001, 1.04, "ahead"),
        (0.96, 1.0, "undecided"),
        (0.96, 0.999, "behind"),
    ],
)
def test_level_is_within_three_percent_of_one_and_what_touches_one_is_undecided(low, high, verdict):
    assert verdicts.Ratio(1.0, low, high).verdict == verdict


@pytest.mark.parametrize(
    ("launch_ms", "method", "is_host_bound"),
    [
        (1.1, "graph", True),
        (1.0, "graph", False),
        (0.9, "graph", False),
        (None, "graph", False),
        (1.1, "window", False),
    ],
)
def test_a_call_is_host_bound_where_issuing_it_takes_longer_than_running_it(launch_ms, method, is_host_bound):
    assert verdicts.host_bound(row(1.0, method=method, launch_median_ms=launch_ms)) is is_host_bound


@pytest.mark.parametrize(("launch_ms", "is_bound"), [(LAUNCH_BOUND, True), (LAUNCH_BOUND - 1e-3, False), (None, False)])
def test_a_call_is_launch_bound_from_the_limit_on(launch_ms, is_bound):
    assert verdicts.launch_bound({"launch_median_ms": launch_ms, "host_median_ms": 1.0}) is is_bound


def test_a_replay_is_never_divided_by_a_call():
    with pytest.raises(ValueError, match="a ratio of a call and a device time"):
        verdicts.ratio(row(2.0, method="graph"), row(1.0, method="window"))
    with pytest.raises(ValueError, match="unknown timer method 'sundial'; accepted: graph"):
        verdicts.kind_of_time({"timer_method": "sundial"})


def test_paired_ratios_keep_their_interval():
    line = row(1.0) | {"ratio_to_ours": 1.012, "ratio_to_ours_low": 1.011, "ratio_to_ours_high": 1.013}
    assert verdicts.paired(line).verdict == "level"
    line |= {"ratio_to_ours": 1.2, "ratio_to_ours_low": 1.19, "ratio_to_ours_high": 1.21}
    assert verdicts.paired(line).verdict == "ahead"


def sessions_of(**values):
    """Returns the column "sessions" of a row with these times of sessions."""
    return {name: {"median_ms": ms} if isinstance(ms, float) else ms for name, ms in values.items()}


def test_where_sessions_were_measured_their_ratios_are_the_interval():
    theirs = row(2.0, sessions=sessions_of(a=2.0, b=2.6))
    ours = row(1.0, sessions=sessions_of(a=1.0, b=1.0, c=9.0))
    assert verdicts.ratio(theirs, ours)[1:] == (2.0, 2.6)
    # Each session's host slows both sides down: the ratio holds although the times do not.
    ours = row(1.0, sessions=sessions_of(a=1.0, b=1.3))
    assert verdicts.ratio(theirs, ours)[1:] == (2.0, 2.0)
    # No session has both: the extremes.
    ours = row(1.0, session="d", sessions=sessions_of(c=0.9, d=1.0))
    assert verdicts.ratio(theirs, ours)[1:] == pytest.approx((2.0, 2.6 / 0.9))


def test_the_interval_within_the_session_is_kept_where_sessions_agree_better():
    theirs, ours = (row(ms, 0.02, sessions=sessions_of(a=ms, b=ms)) for ms in (1.04, 1.0))
    ratio = verdicts.ratio(theirs, ours)
    assert ratio[1:] == pytest.approx((1.04 * 0.96, 1.04 * 1.04)) and ratio.verdict == "undecided"


@pytest.mark.parametrize("sessions", [None, math.nan, {}, sessions_of(a=2.0), sessions_of(a=2.0, b={"n": 3})])
def test_with_one_session_the_interval_is_widened_as_before(sessions):
    once = verdicts.ratio(row(2.0), row(1.0))
    assert verdicts.ratio(row(2.0, sessions=sessions), row(1.0, sessions=sessions_of(a=1.0, b=1.0))) == once


def test_paired_ratios_cover_the_intervals_of_all_sessions():
    paired = {"ratio_to_ours": 1.2, "ratio_to_ours_low": 1.19, "ratio_to_ours_high": 1.21}
    other = {"ratio_to_ours": 1.0, "ratio_to_ours_low": 0.98, "ratio_to_ours_high": 1.02}
    ratio = verdicts.paired(row(1.0, sessions=sessions_of(a=paired, b=other)) | paired)
    assert ratio == (1.2, 0.98, 1.21) and ratio.verdict == "undecided"


def test_sustained_times_are_compared_with_sustained_times_only():
    both = {"sustained_ms": 3.0}
    assert verdicts.ratio(row(2.0, **both), row(1.0, method="window", **both), "sustained_ms").verdict == "level"
    ahead = row(2.0, sustained_ms=3.3) | {"half_width_fraction": 0.5}  # of the timer's samples, which are not compared
    assert verdicts.ratio(ahead, row(2.0, **both), "sustained_ms").verdict == "ahead"
    assert verdicts.ratio(ahead | {"drift": 0.3}, row(2.0, **both), "sustained_ms").low == pytest.approx(
        0.85 * 1.1 / 1.01
    )
    assert verdicts.kind_of_time(row(1.0), "host_median_ms") == "call"
    assert verdicts.kind_of_time(row(1.0, method="window"), "flush_median_ms") == "call"


def test_exact_quantities_have_no_tolerance():
    assert [verdicts.exact(99, 100), verdicts.exact(100, 100), verdicts.exact(101, 100)] == ["ahead", "level", "behind"]


def test_pairs_skip_what_failed_and_what_has_no_partner():
    rows = [
        row(4.0, size="small", context=128, precision="fp32", launch_median_ms=0.95, host_median_ms=1.0),
        row(2.0, size="small", context=128, precision="bf16"),
        row(4.0, size="small", context=256, precision="fp32"),
        {"status": "oom", "size": "small", "context": 256, "precision": "bf16"},
        row(1.0, size="large", context=128, precision="bf16"),
    ]
    (pair,) = forms.pairs(pd.DataFrame(rows), "precision", "fp32", keys=["size", "context"]).to_dict("records")
    assert (pair["ratio"], pair["verdict"], pair["launch_bound"]) == (2.0, "ahead", True)


def test_a_summary_names_the_exceptions():
    frame = pd.DataFrame(
        {"verdict": ["ahead", "ahead", "behind"], "ratio": [1.5, 3.0, 0.8], "size": "small", "context": [128, 256, 512]}
    )
    text = forms.summary(frame, forms.case_name)
    assert text == "ahead in 2 of 3 cases (1.50× to 3.00×, most for small at 256), behind in 1 (0.800×, small at 512)"


def test_a_call_is_shown_in_the_fastest_session_of_its_commit_where_its_host_held_it_up_and_else_in_its_last(tmp_path):
    (tmp_path / "abacus" / "records").mkdir(parents=True)
    store = RecordStore(tmp_path / "abacus" / "records" / f"{NOTEBOOK}.jsonl")
    for session, is_slow in (("first", False), ("slow host", True)):
        for size, factor, launch, method, commit in (
            ("held up", 3.0, 0.8, "window", "b"), ("much alike", 1.05, 0.95, "window", "b"),
            ("the device's", 3.0, 0.4, "window", "b"), ("replayed", 3.0, 0.95, "graph", "b"),
            ("of older code", 3.0, 0.8, "window", "b" if is_slow else "a"),
        ):  # fmt: skip
            time = factor if is_slow else 1.0
            times = {"median_ms": time, "host_median_ms": time, "launch_median_ms": launch * time}
            more = {"timer": {"method": method}, "source": {"commit": commit}, "session": f"{session} {commit}"}
            store.append(Record(NOTEBOOK, "steps", {"size": size}, "forward", "abacus", 2, metrics=times, **more))
    rows = Chapter(NOTEBOOK, device="abacus", output=str(tmp_path)).records("steps")
    shown = dict(zip(rows["size"], rows["session"], strict=True))
    assert [size for size, session in shown.items() if session == "first b"] == ["held up"] and len(shown) == 5


def test_launch_bound_steps_come_back_in_torch_operators_where_these_were_timed_beside_them():
    def step(size, share, **operators):
        times = {"launch_median_ms": share, "host_median_ms": 1.0, "size": size, "precision": "bf16", "context": 128}
        slow, fast = ({"median_ms": ms, "launch_median_ms": share, "host_median_ms": 1.0} for ms in (40.0, 20.0))
        both = {"a": slow | {k: 2 * v for k, v in operators.items()}, "b": fast | operators}
        return row(20.0, "window", session="b", phase="train_step", sessions=both, flops=1, **times, **operators)

    hosts = pd.DataFrame([{"status": "ok", "phase": "operator", "median_ms": 0.006}])
    steps = [step("large", 0.5)], [step("small", 1.0)], [step("small", 1.0, operator_us=7.0)]
    said = [report.findings_pace(pd.DataFrame(steps[0] + rows), hosts)[0] for rows in steps[1:]]
    assert said[0].endswith("(6.00 µs for a torch operator, where measured): from session to session they change by "
                            "2.00×, those that no host bound by 2.00×.")  # fmt: skip
    assert "(7.00 µs for" in said[1] and "2.00× (1.00× counted in torch operators timed beside them), those" in said[1]


def test_calls_are_compared_in_the_fastest_session_that_has_both():
    def both(a, b):
        return {"sessions": {"a": {"median_ms": a}, "b": {"median_ms": b}}}

    theirs, ours = row(6.0, method="window", session="c") | both(4.0, 9.0), row(9.0, method="window") | both(2.0, 9.0)
    assert verdicts.ratio(theirs, ours) == (2.0, 1.0, 2.0)


@pytest.mark.parametrize(("share", "widening"), [(0.1, 0.2), (0.5, 0.7), (1.0, 2.4)])
def test_calls_on_two_hosts_may_differ_by_what_issuing_them_takes(share, widening):
    line = {"launch_median_ms": share, "host_median_ms": 1.0}
    assert verdicts.noise("call", False, line, {}) == pytest.approx(widening)
    assert verdicts.noise("call", True, line) == verdicts.NOISE["call", True]


def test_a_changed_time_changes_table_csv_figure_finding_and_front_page(folder):
    def shown():
        frame, both = chapter(folder).records("steps"), chapter(folder).records("steps", "compile")
        return (
            report.table_modes(both).to_string(),
            tables.to_csv(frame),
            figures.svg(report.figure_phases(frame)),
            report.findings_modes(both, chapter(folder).records("execution")),
            front.findings({NOTEBOOK: chapter(folder)}),
        )

    before = shown()
    for size, precision in (("2.7b", "bf16"), ("xl-2025", "fp32")):  # where the device sets the pace
        case = {"size": size, "context": 512, "precision": precision, "compile": "none"}
        change(folder, "steps", "train_step", metrics={"median_ms": 1e6, "host_median_ms": 1e6}, **case)
    after = shown()
    assert all(old != new for old, new in zip(before, after, strict=True))
    assert "1,000,000" in after[0] and "1e+06" in after[1] and "2.7b at 512" in after[3][0]
    assert "of 2.7b at 512" in before[4][0] and "of 2.7b" not in after[4][0]


def test_a_second_session_widens_the_interval_of_its_rows_and_of_no_others(folder):
    def bf16_over_fp32(context):
        rows = chapter(folder).records("steps")
        rows = tables.select(rows, size="2.7b", context=context, phase="train_step", precision=["fp32", "bf16"])
        (pair,) = forms.pairs(rows, "precision", "fp32", keys=["size", "context"]).to_dict("records")
        return pair["low"], pair["high"]

    store = RecordStore(folder / "records" / f"{NOTEBOOK}.jsonl")
    once = list({record.identity: record for record in store.load()}.values())
    store.path.unlink()
    for record in once:
        store.append(record)
    assert "sessions" not in chapter(folder).records("steps")
    before = {context: bf16_over_fp32(context) for context in (256, 512)}
    case = {"size": "2.7b", "context": 512}
    for record in newest(store.load()):
        if (record.section, record.phase, record.status) == ("steps", "train_step", "ok"):
            if case.items() <= record.case.items() and record.case["precision"] in ("fp32", "bf16"):
                factor = 0.5 if record.case["precision"] == "bf16" else 1.0
                times = {k: v * factor for k, v in record.metrics.items() if k.endswith("_ms")}
                store.append(dataclasses.replace(record, session="another", metrics={**record.metrics, **times}))
    frame = chapter(folder).records("steps")
    assert {len(sessions) for sessions in frame["sessions"]} == {0, 1, 2}
    low, high = bf16_over_fp32(512)
    assert high > 1.9 * low and bf16_over_fp32(256) == before[256] != before[512] != (low, high)
    assert "another" not in tables.to_csv(frame)


def test_sustained_roofs_stand_beside_the_bursts_where_they_were_measured(folder):
    measured = chapter(folder).records("ceilings")
    roofs = measured.drop(columns=[name for name in measured if name.startswith("sustained_")])
    assert "sustained" not in report.table_roofs(roofs)
    measured = roofs.assign(sustained_ms=1.7, steady=1.0, sustained_tflops=655.4, watts=691.0, tflop_per_joule=0.948)
    measured = measured.assign(sm_clock_mhz=1485.0, sustained_gb_per_s=math.nan)
    measured.loc[measured["precision"] == "tf32", ["steady", "watts"]] = (0.0, math.nan)
    reason = "the energy counter went backwards"
    measured["no_energy"] = [reason if precision == "tf32" else None for precision in measured["precision"]]
    table = report.table_roofs(measured).set_index("roof")
    shown = ["sustained", "power (W)", "TFLOP/J", "SM clock (MHz)"]
    assert table.loc["matrix product, bf16 (TFLOP/s)", shown].tolist() == ["655", "691", "0.948", "1,485"]
    assert table.loc["matrix product, tf32 (TFLOP/s)", shown].tolist() == [
        "~ 655",
        reason,
        "~ 0.948",
        "1,485",
    ]
    assert table.loc["copy, read + write (GB/s)", "sustained"] == "–"


def test_a_timer_that_disagrees_is_said_to(folder):
    timer = chapter(folder).records("timer")
    reference = timer.set_index("phase")["median_ms"]["independent"]
    for factor, sentence in ((1.01, "methods agree"), (1.06, "do not agree")):
        for method in {*timer["phase"]} - {"independent"}:
            change(folder, "timer", method, metrics={"median_ms": (factor if method == "graph" else 1.0) * reference})
        said = report.findings_roofs(chapter(folder).records("timer"))[0]
        assert sentence in said and f"{100 * factor - 100:.1f} % (graph)" in said


def test_out_of_memory_is_a_word_in_the_table_and_a_mark_in_the_figure(folder):
    before = figures.svg(report.figure_phases(chapter(folder).records("steps")))
    change(folder, "steps", "train_step", status="oom", size="small", context=512, precision="fp32")
    frame = chapter(folder).records("steps")
    line = report.table_phases(frame).set_index(["size", "precision"]).loc[("small", "fp32")]
    assert line["training step"] == "oom" and figures.svg(report.figure_phases(frame)) != before
    assert any("out of memory for small from 512 tokens" in text for text in report.findings_phases(frame))


def test_passes_that_the_host_issued_have_no_ratio_in_the_table(folder):
    def ratio(precision):
        table = report.table_phases(chapter(folder).records("steps")).set_index(["size", "precision"])
        return table.loc[("2.7b", precision), "backward / forward, device busy"]

    assert ratio("fp32").endswith("×")
    case = {"size": "2.7b", "context": 512, "precision": "fp32"}
    times = {"launch_median_ms": 95.0, "host_median_ms": 100.0, "median_ms": 100.0}
    change(folder, "steps", "forward", metrics=times, **case)
    assert ratio("fp32") == "–" and ratio("bf16").endswith("×")


def test_a_busy_machine_is_said_in_the_cell_and_on_the_front_page(folder):
    store = RecordStore(folder / "records" / f"{NOTEBOOK}.jsonl")
    record = next(r for r in chapter(folder).all_records() if r.status == "ok" and r.section == "steps")
    store.append(dataclasses.replace(record, telemetry={**record.telemetry, "disturbed": True}))
    words = r"⚠ The machine was busy during 1 of [\d,]+ measurements\."
    assert re.search(rf"^\*\*{words}\*\*$", front.page({NOTEBOOK: chapter(folder)}), flags=re.MULTILINE)
    assert re.search(words, chapter(folder).findings(report.findings_phases, chapter(folder).records("steps")).data)
    assert tables.cell({"status": "ok", "median_ms": 2.0, "disturbed": True}) == "⚠ 2.00"


def test_the_front_page_counts_what_several_sessions_timed(folder):
    def counts() -> tuple[int, int]:
        (text,) = front.table_chapters({NOTEBOOK: chapter(folder)})["timed in several sessions"]
        return tuple(int(number.replace(",", "")) for number in text.split(" of "))

    store = RecordStore(folder / "records" / f"{NOTEBOOK}.jsonl")
    once = next(record for record in chapter(folder).all_records() if record.timer and record.section == "steps")
    once = dataclasses.replace(once, case={**once.case, "context": 3})
    store.append(once)
    several, timed = counts()
    assert 0 < several < timed
    for section, more in ((once.section, 1), ("host", 0)):  # the host is every session's own
        store.append(dataclasses.replace(once, section=section, session=f"another of {section}"))
        assert counts() == (several + more, timed)
        several += more


def test_the_table_of_a_section_is_cut_and_its_csv_is_not(folder):
    steps = chapter(folder).records("steps")
    shown = chapter(folder).table(lambda frame: frame[["phase", "size"]], steps, caption="All")
    assert len(shown.data.splitlines()) == 4 + tables.MAX_ROWS and "the first 12 of 264 rows" in shown.data
    written = chapter(folder, save_figures=True).full_tables()
    assert len((folder / "tables" / "01_steps.csv").read_text().splitlines()) == 265
    assert f"../figures/{REFERENCE_DEVICE}/tables/01_steps.csv" in written.data


def test_without_records_every_form_says_so(tmp_path):
    empty = Chapter(NOTEBOOK, device="abacus", output=str(tmp_path))
    frame = empty.records("steps")
    assert "not measured on abacus" in empty.table(report.table_phases, frame, caption="Times").data
    assert "Not measured on abacus" in empty.findings(report.findings_phases, frame).data
    assert "not measured on abacus" in empty.figure(report.figure_phases, frame, name="a", description="Times").data
    assert "Not measured on abacus" in empty.full_tables().data
    assert "labkit run 01" in empty.source().data


def test_records_of_another_device_are_refused(folder):
    other = shutil.copytree(folder, folder.parent / "abacus")
    with pytest.raises(RecordError, match=f"holds records of {REFERENCE_DEVICE}, not of 'abacus'"):
        chapter(other).records("steps")
    store = RecordStore(folder / "records" / f"{NOTEBOOK}.jsonl")
    store.append(dataclasses.replace(store.load()[0], device="abacus", phase="other"))
    with pytest.raises(RecordError, match=f"holds records of abacus, {REFERENCE_DEVICE}, not of"):
        chapter(folder).records("steps")


def test_report_of_an_unknown_device_names_the_known(folder):
    with pytest.raises(ValueError, match=f"'abacus'.*measured: {REFERENCE_DEVICE}"):
        render.rebuild("abacus", output=folder.parent)


def test_unfinished_and_incomplete_runs_are_said_to_be(folder):
    done = folder / "records" / f"{NOTEBOOK}.done.json"
    done.write_text(json.dumps({**json.loads(done.read_text()), "num_missing": 7}))
    assert "7 measurements of the full profile are not recorded" in render._not_finished(folder, NOTEBOOK)
    done.unlink()
    assert "did not run to its end" in render._not_finished(folder, NOTEBOOK)


DEVICES = [device for device in measured_devices(FIGURES) if not re.match(r"\d+x-", device)]
"""What several of a device measured together belongs to its report."""


@pytest.fixture(scope="module", params=DEVICES)
def rebuilt(request, tmp_path_factory):
    """A device's report, figures, tables and notebooks made anew from its records; returns slug and folder."""
    target = tmp_path_factory.mktemp("figures")
    for source in {folder_of(FIGURES, request.param, name) for name in notebooks.names()}:
        shutil.copytree(source / "records", target / source.name / "records")
        shutil.copy(source / "environment.json", target / source.name)
    code = (
        "import resource, sys; from pathlib import Path; from labkit.report import render\n"
        "render.rebuild(sys.argv[1], output=Path(sys.argv[2]))\n"
        "used = resource.getrusage(resource.RUSAGE_SELF)\n"
        "print([name for name in ('torch', 'triton', 'papermill') if name in sys.modules])\n"
        "print(f'report of all chapters: {used.ru_utime + used.ru_stime:.1f} s of CPU time')\n"
    )
    command = [sys.executable, "-c", code, request.param, str(target)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    (target / "log").write_text(run.stdout)
    return request.param, target


def test_a_report_is_rebuilt_without_torch_and_without_a_kernel(rebuilt):
    loaded, used = (rebuilt[1] / "log").read_text().splitlines()
    print(used)
    assert loaded == "[]"


MADE = ("*.svg", "*.ipynb", "tables/*.csv", "report.md")


def made(root: Path, device: str) -> dict[str, Path]:
    folders = {root / device, *(folder_of(root, device, name) for name in notebooks.names())}
    paths = [path for folder in folders for pattern in MADE for path in folder.glob(pattern)]
    return {str(path.relative_to(root)): path for path in paths}


def test_committed_report_figures_and_tables_are_those_of_the_committed_records(rebuilt):
    """A stale sentence, figure or table is found here, and a file that nothing makes any more."""
    device, folder = rebuilt
    committed, fresh = made(FIGURES, device), made(folder, device)
    assert committed.keys() == fresh.keys() and f"{device}/report.md" in fresh
    stale = [name for name in fresh if committed[name].read_bytes() != fresh[name].read_bytes()]
    assert not stale, f"run `labkit report --device {device}` (with matplotlib {matplotlib.__version__})"


def test_every_committed_file_of_figures_is_compared_with_what_is_made():
    compared = {name for device in DEVICES for name in made(FIGURES, device)}
    others = {str(path.relative_to(FIGURES)) for path in FIGURES.rglob("*") if path.is_file()} - compared
    assert {name for name in others if not re.search(r"/(records/|environment\.json$|report\.html$)", name)} == set()


@pytest.mark.parametrize("name", notebooks.names()[:1] + list(conftest.more(*notebooks.names()[1:])))
def test_the_images_that_a_notebook_holds_are_those_of_the_committed_records(name):
    """The reference device's executed notebooks are those in notebooks/; nbval compares no image."""
    held, shown = (
        [
            output["data"]["image/png"].strip()
            for cell in notebooks.without_lessons(notebook).cells
            for output in cell.get("outputs", [])
            if "image/png" in output.get("data", {})
        ]
        for notebook in (notebooks.read(name), notebooks.show(name, {}))
    )
    assert held and held == shown, "run `labkit report --save-notebooks`"


def test_the_top_level_report_is_that_of_the_reference_device():
    text = (FIGURES / REFERENCE_DEVICE / "report.md").read_text(encoding="utf-8").replace("](../", "](figures/")
    top = (REPOSITORY / "report.md").read_text(encoding="utf-8")
    assert top == re.sub(r"\]\(((\d\d|front)_|tables/)", rf"](figures/{REFERENCE_DEVICE}/\1", text)


def test_links_of_the_report_lead_somewhere():
    text = (REPOSITORY / "report.md").read_text(encoding="utf-8")
    anchors = [findings.anchor(title) for title in re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)]
    assert len(anchors) == len(set(anchors)), "a heading stands twice: its links would lead to the first"
    assert set(re.findall(r"\]\(#([^)]*)\)", text)) <= set(anchors)
    for target in re.findall(r"\]\((?!#|https?:)([^)]*)\)", text):
        assert (REPOSITORY / target).exists(), target


@pytest.mark.parametrize("folder", sorted(FIGURES.glob("*/records")), ids=lambda folder: folder.parent.name)
def test_the_records_of_a_device_are_small(folder):
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 6_000_000


def test_the_report_is_short():
    text = (REPOSITORY / "report.md").read_text(encoding="utf-8")
    first, *chapters = re.split(r"^(?=## \d\d · )", text, flags=re.MULTILINE)
    sizes = {part.splitlines()[0]: len(part.encode()) for part in chapters}
    print(f"report.md: {len(text.encode()):,} bytes; front page {len(first.encode()):,}; {sizes}")
    assert len(first.encode()) <= 20_000 and all(size <= 12_500 for size in sizes.values())
    assert len(text.encode()) <= 20_000 + 12_000 * len(chapters)
    groups = itertools.groupby(text.splitlines(), lambda line: line[:1] == "|")
    assert max(len(list(group)) for is_row, group in groups if is_row) - 2 <= 20
    for name in notebooks.names():
        assert len(list(folder_of(FIGURES, REFERENCE_DEVICE, name).glob(f"{name[:2]}_*.svg"))) <= 4, name


def test_report_holds_no_path_of_the_measuring_machine():
    for path in [REPOSITORY / "report.md", *FIGURES.glob("*/*.json"), *FIGURES.glob("*/records/*")]:
        if path.suffix != ".lock":
            assert not re.search(r"/(home|root|tmp|work|Users)/", path.read_text(encoding="utf-8")), path


# Machado, Oliveira & Fernandes (2009), severity 1, applied to linear RGB.
DEFICIENCIES = {
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
}


def lab(colour: str, deficiency: str) -> np.ndarray:
    """Returns a colour as seen with a deficiency, in CIE L*a*b* under D65."""
    rgb = np.array(matplotlib.colors.to_rgb(colour))
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    seen = np.clip(np.array(DEFICIENCIES[deficiency]) @ linear, 0, 1)
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    x, y, z = np.cbrt(np.maximum(to_xyz @ seen / [0.9505, 1.0, 1.089], 1e-9))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


PRECISION_NAMES = {"fp32", "tf32", "bf16", "fp16", "fp16_unscaled", "bf16_pure"}
TOGETHER = [PRECISION_NAMES, figures.STYLES.keys() & {*PHASES}, {*SIZES}]
TOGETHER.append(figures.STYLES.keys() - set().union(*TOGETHER))
"""Names that may stand in one figure: precisions, phases, sizes, implementations."""


@pytest.mark.parametrize("deficiency", DEFICIENCIES)
@pytest.mark.parametrize("names", TOGETHER, ids=["precisions", "phases", "sizes", "implementations"])
def test_styles_differ_for_every_eye(names, deficiency):
    for one, other in itertools.combinations(sorted(names), 2):
        a, b = figures.STYLES[one], figures.STYLES[other]
        distance = np.linalg.norm(lab(a.colour, deficiency) - lab(b.colour, deficiency))
        assert distance > 15 or (a.marker, a.dash) != (b.marker, b.dash), f"{one} and {other}: {distance:.1f}"


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


def test_listing_and_count():
    assert findings.listing("abc") == "a, b and c"
    assert findings.listing("abcdefgh", limit=3) == "a, b, c and 5 more"
    assert findings.count(1, "case") == "1 case" and findings.count(1200, "case") == "1,200 cases"


def test_markdown_cells_hold_neither_columns_nor_tags():
    frame = pd.DataFrame({"kernel|name": ["`void f<a|b>`", "<script>"], "ms": ["1.0", "oom"], "note": ["", "a"]})
    assert tables.to_markdown(frame).splitlines() == [
        "| kernel\\|name | ms | note |", "|---|---:|---:|", "| `void f<a\\|b>` | 1.0 | |", "| &lt;script> | oom | a |",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("cell", "rule"),
    [
        ("1.2 → 1.1 (1.1×, undecided)", "---:"),
        ("skipped", "---:"),
        ("fp32", "---:"),
        ("large", "---"),
        ("01_benchmarking", "---"),
        ("2026-11-25", "---"),
    ],
)
def test_words_and_dates_are_set_to_the_left_and_numbers_to_the_right(cell, rule):
    assert tables.to_markdown(pd.DataFrame({"a": ["1.0", cell]})).splitlines()[1] == f"|{rule}|"


MARKUP = (
    "<script>alert(1)</script> <img src=x onerror=alert(1)> ![a](http://evil.example/a.png) [a](javascript:alert(1))"
    "\n\n# A heading\n\n- an item\n\n| a |\n|---|\n\n`</code><b>` a\\ $\\frac{ \x1b[31m ]\\u0028http://evil.example)"
)
FORMULAS = "=cmd|'/C calc'!A0", "@SUM(1)", "+1+cmd", "-1+cmd"


def written_by(folder: Path, text: str, device: str) -> Path:
    """Writes the CPU's records of chapter 01 as of another device, with `text` wherever any is free; their report."""
    source = FIGURES / "cpu-intel-xeon-processor"
    (folder / device / "records").mkdir(parents=True)
    environment = json.loads((source / "environment.json").read_text())
    environment["device"]["name"] = environment["cpu"]["name"] = text
    (folder / device / "environment.json").write_text(json.dumps(environment))
    store = RecordStore(folder / device / "records" / f"{NOTEBOOK}.jsonl")
    hostile = {"software": dict.fromkeys(("torch", "triton"), text), "source": {"commit": text}, "device": device}
    hostile |= dict.fromkeys(("machine", "recorded_at", "session"), text)
    for record in RecordStore(source / "records" / f"{NOTEBOOK}.jsonl").load():
        failed = {"status": "error", "reason": text, "metrics": {}} if record.section == "compile" else {}
        case = record.case | ({"impl": text} if "impl" in record.case else {})
        store.append(dataclasses.replace(record, **hostile, **failed, case=case))
    (folder / device / "records" / f"{NOTEBOOK}.done.json").write_text(json.dumps({"num_missing": 3, "profile": text}))
    return render.rebuild(device, output=folder)[0]


@pytest.mark.parametrize("text", [MARKUP, *FORMULAS[:1], *conftest.more(*FORMULAS[1:])])
def test_text_of_records_and_environments_stays_text(tmp_path, text):
    plain, hostile = (written_by(tmp_path, *of_device) for of_device in (("words", "abacus"), (text, "sundial")))
    said = [path.read_text(encoding="utf-8").replace("sundial", "abacus") for path in (plain, hostile)]
    for structure in (r"^#+ .*", r"\]\([^)]*\)", r"^[|>-]", r"^\s*$"):
        first, second = (re.findall(structure, report, flags=re.MULTILINE)[1:] for report in said)
        assert first == second, "the text made a heading, link, list, table or paragraph"
    assert not re.search("<[a-z/!]", re.sub("`[^`\n]*`", "", said[1])) and said[0] != said[1]
    for path in hostile.parent.glob("tables/*.csv"):
        cells = pd.read_csv(path, dtype=str, keep_default_na=False).to_numpy().flatten().tolist()
        assert not [cell for cell in cells if re.match(r"[=@]|[+-](?![\d.])|[+-].*[a-z]", cell)], path
    assert not [path for path in plain.parent.glob("tables/*.csv") if re.search("^'|,'", path.read_text())]


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


def test_a_column_that_says_the_same_in_all_rows_is_said_once():
    frame = pd.DataFrame({"case": ["a", "b", "c"], "kind": "call", "peak": "1.50", "share": ["–"] * 3})
    table, same = tables.without_constants(frame)
    assert (list(table), same) == (["case", "peak", "share"], "kind call")
    holes = frame.assign(kind=["call", math.nan, math.nan])
    assert list(tables.without_constants(holes)[0]) == list(frame), "a row that says nothing does not say the same"
    assert tables.without_constants(frame.head(2))[1] == ""
