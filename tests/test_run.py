"""A run: its rounds, what it shows before and while it measures, and the commands that read what it
wrote.
"""

import contextlib
import re
from dataclasses import replace

import pytest
from chapters import labkit, store_of
from faulty_experiment import make_case, open_session, steps_of

from labkit import cli
from labkit.configs import REFERENCE_DEVICE, SIZES
from labkit.device import detect
from labkit.experiments import sweep

CPU = "cpu-intel-xeon-processor"

pytestmark = pytest.mark.usefixtures("plain_workers")


@pytest.fixture
def rounds(monkeypatch):
    """Lists the profile and the notebook of each session of a run that measures nothing, a list a
    round, and "report" for each report.
    """
    steps = []

    def measure(sessions):
        steps.append([(session.profile, session.notebook) for session in sessions])

    monkeypatch.setattr(sweep, "measure", measure)
    monkeypatch.setattr(cli, "_write_report", lambda *_: steps.append("report"))
    return steps


def claim_gpu(monkeypatch):
    gpu = replace(detect(), kind="cuda", slug="a-gpu")
    monkeypatch.setattr("labkit.device.detect", lambda: gpu)
    monkeypatch.setattr(sweep, "detect", lambda: gpu)
    monkeypatch.setattr(sweep, "measuring_lock", lambda *_, **__: contextlib.nullcontext())
    for module in ("labkit.device", "labkit.experiments.sweep"):
        monkeypatch.setattr(f"{module}.measured_by", lambda _: gpu)


@pytest.mark.parametrize(
    ("is_gpu", "arguments", "profiles"),
    [
        (True, (), ["quick", "key", "full"]),
        (True, ("--fresh",), ["full"]),
        (True, ("-p", "lengths=1024"), ["full"]),
        (True, ("--profile", "quick"), ["quick"]),
        (False, (), ["smoke"]),
    ],
)
def test_a_gpu_is_measured_quickly_first_and_each_round_ends_with_a_report(
    is_gpu, arguments, profiles, rounds, tmp_path, monkeypatch
):
    if is_gpu:
        claim_gpu(monkeypatch)
    result = labkit("run", "05", *arguments, "-o", tmp_path)
    assert result.exit_code == 0, result.output
    assert rounds[::2] == [[(profile, "05_attention")] for profile in profiles]
    assert rounds[1::2] == ["report"] * len(profiles)


def test_a_dry_run_counts_each_case_once_and_what_will_not_fit(rounds, tmp_path, monkeypatch):
    """And does nothing."""
    claim_gpu(monkeypatch)
    monkeypatch.setattr("labkit.experiments.sections.memory_bytes", lambda _: 80e9)
    result = labkit("run", "01", "--dry-run", "-o", tmp_path)
    assert result.exit_code == 0, result.output
    quick, *later = (int(one) for one in re.findall(r"01_benchmarking: (\d+) cases", result.output))
    alone = labkit("run", "01", "--profile", "full", "--dry-run", "-o", tmp_path)
    (whole,) = (int(one) for one in re.findall(r"01_benchmarking: (\d+) cases", alone.output))
    # A case of which a round measures some phases is in a later one too.
    assert 0 < quick and whole - quick <= sum(later) and all(0 < one < whole for one in later)
    assert re.search(r"full: \d+ cases of 10b will not fit", result.output)
    assert not re.search(r"cases of small will not fit", result.output)
    assert re.search(r"full \w+: \d+ cases, about \d+\.\d minutes", alone.output)
    assert rounds == [] and not list(tmp_path.iterdir())


def test_what_the_report_could_not_read_ends_a_run_before_it_measures(
    rounds, tmp_path, monkeypatch
):
    claim_gpu(monkeypatch)
    damaged = store_of(tmp_path / "2x-a-gpu", "07_distributed").path
    damaged.write_text("{}\n")
    error = labkit("run", "05", "-o", tmp_path).exception
    assert f"{damaged}, line 1: schema version None" in str(error) and not rounds


def test_a_chapter_that_cannot_be_imported_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "broken.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sweep, "experiment_of", lambda _: "broken")
    error = labkit("run", "05", "-o", tmp_path).exception
    assert str(error) == "broken cannot be imported: ZeroDivisionError: division by zero"


def test_ranks_that_measure_all_phases_at_once_take_from_the_sessions_start(tmp_path, monkeypatch):
    monkeypatch.setattr(sweep, "FIGURES", tmp_path)
    name = "07_distributed"
    store = store_of(tmp_path / "cpu-a", name)
    when = {"session": "20261127T093048Z-45ae", "recorded_at": "2026-11-27T09:35:28+00:00"}
    for phase in ("all_reduce", "broadcast"):
        store.append(sweep.Record(name, "collectives", {"ranks": 4}, phase, "cpu-a", 1, **when))
    seconds = sweep._seconds_at_hand.__wrapped__(name, "cpu")
    assert seconds == dict.fromkeys(("collectives", 'collectives {"ranks": 4}'), 140.0)


def test_the_bar_counts_the_expected_seconds_of_all_sessions(tmp_path, monkeypatch, capsys):
    log = tmp_path / "log"
    slow, quick, unknown = (make_case(name, log, section=name) for name in ("slow", "quick", "new"))
    # A case that was measured knows more than its section.
    seconds = {"slow": 1.0, sweep._name("slow", slow.parameters): 10.0, "quick": 0.001}
    monkeypatch.setattr(sweep, "_seconds_at_hand", lambda *_: seconds)
    sessions = [
        open_session(tmp_path / "a", [slow, quick]),
        open_session(tmp_path / "b", [unknown]),
    ]
    expected = [sweep.expected_seconds(sessions[0], case) for case in (slow, quick, unknown)]
    assert expected == pytest.approx([30, 0.15, 3])
    with sweep.progress_bar(sessions) as progress:
        assert progress.total == pytest.approx(33.15)
        sessions[0].run(progress)
    output, bar = capsys.readouterr()
    assert output.startswith("90 slow: 3 ok\n") and "90 slow slow none" in bar
    assert f"{100 * 30.15 / 33.15:.0f}%" in bar
    sweep.measure(sessions)
    output, bar = capsys.readouterr()
    assert output.endswith("\n90 new: 3 ok\n")
    assert "100%" in bar and "Compiling" not in bar


def test_a_rehearsal_runs_what_compiles_and_drops_what_it_measured(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(sweep, "num_usable_cores", lambda: 2)
    log = tmp_path / "log"
    plan = [
        make_case("a", log, "count_blocks", compiles=True),
        make_case("b", log, "exit", "second", compiles=True),
        make_case("c", log),
        make_case("d", log, "skip", "first", compiles=True),
    ]
    session, num_layers = open_session(tmp_path / "out", plan), SIZES["small"].num_layers
    sweep.rehearse([session])
    # A rehearsed model has one block, and what was timed beside others is not kept.
    assert set((tmp_path / "blocks").read_text().split()) == {"1", "False"}
    assert SIZES["small"].num_layers == num_layers > 1
    rehearsed = steps_of(log)
    assert {name for name, _ in rehearsed} == {"a", "b", "d"}
    assert ("d", "third") in rehearsed  # after the phase that is skipped
    assert rehearsed.count(("a", "third")) == 1 and ("b", "second") in rehearsed
    assert session.store.load() == [] and session.pending() == plan
    output, errors = capfd.readouterr()
    assert output == "" and "Compiling what 3 cases need, 2 at a time: 3, " in errors
    # One case alone compiles where it is measured.
    sweep.rehearse([open_session(tmp_path / "one", plan[:1])])
    assert steps_of(log) == rehearsed


def test_compare_shows_what_both_have_and_writes_it(tmp_path):
    shown = labkit("compare", REFERENCE_DEVICE, CPU, "--notebook", "01")
    assert shown.exit_code == 0, shown.output
    assert shown.output.startswith(f"# {CPU} beside {REFERENCE_DEVICE}\n")
    written = labkit("compare", REFERENCE_DEVICE, CPU, "--notebook", "01", "--to", tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert {"compare.md", "compare.html", f"{CPU}.csv"} < names
    assert sorted(written.output.split()) == sorted(str(tmp_path / name) for name in names)


def test_plan_says_whether_a_step_fits_and_how_long_it_takes():
    result = labkit("plan", "2.7b", "--context", "8192", "--gpus", "2", "--price", "3")
    assert result.exit_code == 0, result.output
    for words in (
        "does not fit",
        "It fits with --recompute",
        "Device time",
        "ddp over 2",
        "at 3.00",
    ):
        assert words in result.output
    assert "GiB, fits" in labkit("plan", "small", "--device", "RTX 4090").output
