"""Rows of several sessions are paired by what they measured, each kind of time apart, and the
limits are the limits.
"""

import dataclasses

import pytest
from typer.testing import CliRunner

from labkit import cli
from labkit.configs import FIGURES, REFERENCE_DEVICE
from labkit.records import Record, RecordStore
from labkit.report import card, sessions, verdicts
from labkit.report.chapter import Chapter

NOTEBOOK = "01_benchmarking"


def record(
    session,
    median_ms=1.0,
    *,
    row="a",
    method="graph",
    status="ok",
    section="steps",
    phase="forward",
    commit="0123456",
    **metrics,
):
    measured = (
        {"median_ms": median_ms, "half_width_fraction": 0.001, **metrics} if status == "ok" else {}
    )
    timer = {"method": method} if status == "ok" else {}
    return Record(
        notebook=NOTEBOOK,
        section=section,
        case={"size": row},
        phase=phase,
        status=status,
        device="a-gpu",
        measurement_version=2,
        metrics=measured,
        timer=timer,
        session=session,
        source={"commit": commit},
    )


def differences(*records):
    return sessions.differences({NOTEBOOK: records})


def test_a_row_is_compared_with_itself_in_other_sessions():
    found = differences(
        record("s1", 1.0),
        record("s1", 9.0, row="b"),
        record("s2", 0.98),
        record("s3", 1.04),
        record("s2", 9.9, row="c"),
    )
    assert set(found["row"]) == {"steps a forward"} and set(found["kind"]) == {"device"}
    assert list(zip(found["lowest_ms"], found["highest_ms"], strict=True)) == [
        (0.98, 1.0),
        (1.0, 1.04),
    ], "to the first"
    assert found["difference"].tolist() == pytest.approx([1 / 0.98 - 1, 0.04])
    assert sessions.table_worst(found)["difference"].tolist() == ["4 %"], "each row once"


def test_what_was_measured_otherwise_is_another_row():
    one, other = record("s1"), record("s2", 2.0)
    for changed in (
        dataclasses.replace(other, measurement_version=3),
        dataclasses.replace(other, software={"torch": "2.99"}),
        dataclasses.replace(other, session="s1"),
        record("s2", 2.0, commit="another"),
        record("s2", status="oom"),
        record("s2", 2.0, section="host"),
    ):
        assert differences(one, changed).empty
    assert differences(record("s1", section="host"), record("s2", section="host")).empty


def test_every_kind_of_time_is_a_row_of_its_own():
    def both(session, factor, method):
        times = {
            "sustained_ms": 2.0 * factor,
            "host_median_ms": 3.0 * factor,
            "flush_median_ms": 4.0 * factor,
        }
        return record(session, factor, method=method, **times)

    found = differences(both("s1", 1.0, "graph"), both("s2", 1.1, "graph"))
    assert dict(zip(found["row"], found["kind"], strict=True)) == {
        "steps a forward": "device",
        "steps a forward, sustained_ms": "sustained",
        "steps a forward, host_median_ms": sessions.OTHER_CALLS,
        "steps a forward, flush_median_ms": sessions.OTHER_CALLS,
    }
    found = differences(both("s1", 1.0, "window"), both("s2", 1.1, "window"))
    assert found["kind"].tolist() == [sessions.OTHER_CALLS, "sustained"], (
        "the call's time is not counted twice"
    )


@pytest.mark.parametrize(
    ("launch_ms", "kinds"),
    [(2.69, [sessions.OTHER_CALLS, "sustained"]), (2.71, [sessions.WAITING])],
)
def test_a_call_that_waits_for_the_host_is_told_apart_and_its_sustained_time_is_no_other(
    launch_ms, kinds
):
    times = {"launch_median_ms": launch_ms, "host_median_ms": 3.0, "sustained_ms": 2.0}
    found = differences(
        *(record(session, 3.0, method="window", **times) for session in ("s1", "s2"))
    )
    assert found["kind"].tolist() == kinds


LEVEL = [*[1.02] * 19, 1.5]
"""What 20 rows of a second session take: one, that is 5 %, is off."""


@pytest.mark.parametrize(
    ("method", "value", "times", "fails"),
    [
        ("graph", "median_ms", LEVEL, False),
        ("graph", "median_ms", [*LEVEL[1:], 1.06], True),
        ("graph", "median_ms", [1.049] * 20, False),
        ("window", "median_ms", [1.9] * 20, False),
        ("graph", "sustained_ms", [1.04] * 20, False),
        ("graph", "sustained_ms", [1.06] * 20, True),
    ],
)
def test_too_few_rows_of_a_kind_fail(method, value, times, fails):
    found = differences(
        *(record("s1", row=row, method=method, **{value: 1.0}) for row in range(20)),
        *(
            record("s2", row=row, method=method, **{value: time_ms})
            for row, time_ms in enumerate(times)
        ),
    )
    kind = "sustained" if value == "sustained_ms" else verdicts.KIND_OF_METHOD[method]
    assert sessions.failed(found) == ([kind] if fails else [])


def test_nothing_to_compare_fails():
    assert sessions.failed(differences(record("s1")))


def test_a_session_names_its_host_or_says_that_it_has_none():
    probes = [
        record("s2", 0.0042, section="host", phase="operator", method="host"),
        record("s2", status="skipped", section="host", phase="triton_launch"),
        record("s2", 0.05, section="host", phase="python_loop", method="host"),
    ]
    one, two = sessions.table_sessions(
        {NOTEBOOK: [record("s1", commit="s10123456"), *probes, record("s2")]}
    ).to_dict("records")
    assert (one["session"], one["commit"], one["records"], one["host"]) == (
        "s1",
        "s1012345",
        1,
        "not measured",
    )
    assert (two["records"], two["host"]) == (4, "operator 4.20 µs, python loop 50.0 µs")


@pytest.fixture
def folder(tmp_path):
    target = tmp_path / "a-gpu" / "records"
    target.mkdir(parents=True)
    return target


def compare(*arguments):
    return CliRunner().invoke(cli.app, ["compare", *arguments])


@pytest.mark.parametrize(("second_ms", "code"), [(1.01, 0), (1.2, 1)])
def test_the_command_shows_the_rows_and_fails_only_when_checking(folder, second_ms, code):
    store = RecordStore(folder / f"{NOTEBOOK}.jsonl")
    for one in (record("s1", 1.0), record("s2", second_ms)):
        store.append(one)
    common = ("--sessions", "--device", "a-gpu", "--output", str(folder.parent.parent))
    shown = compare(*common)
    assert (
        shown.exit_code == 0
        and "| steps a forward |" in shown.output
        and "not measured" in shown.output
    )
    share = "0 %" if code else "100 %"
    assert shown.output.startswith(
        f"In another session come back: device times within 5 % in {share}"
    )
    for more in ((), ("--notebook", "01")):
        assert compare(*common, "--check", *more).exit_code == code


def test_the_first_page_says_how_near_later_sessions_came(folder):
    def told():
        chapter = Chapter(NOTEBOOK, device="a-gpu", output=str(folder.parent.parent))
        return card.page({NOTEBOOK: chapter}, {})

    store = RecordStore(folder / f"{NOTEBOOK}.jsonl")
    store.append(record("s1"))
    assert "come back" not in told()
    for one in (record("s2", 1.04), record("s3", 2.0)):
        store.append(one)
    assert "device times within 5 % in 50 % of 2" in told()


def test_one_session_has_nothing_to_compare(folder):
    RecordStore(folder / f"{NOTEBOOK}.jsonl").append(record("s1"))
    common = ("--sessions", "--device", "a-gpu", "--output", str(folder.parent.parent))
    assert "No commit has a row of two sessions." in compare(*common).output
    assert compare(*common, "--check").exit_code == 1


@pytest.mark.parametrize(
    ("arguments", "text"),
    [((), "say what to compare: --sessions"), (("--sessions", "--notebook", "99"), "99")],
)
def test_what_cannot_be_compared_is_said(arguments, text):
    result = compare(*arguments)
    assert result.exit_code != 0 and text in str(result.exception)


def test_a_device_without_records_has_nothing_to_compare():
    result = compare("--sessions", "--device", "no-such", "--check")
    assert str(result.exception).startswith("nothing has been measured on 'no-such' in ")


def test_the_reference_devices_sessions_agree():
    chapters = {
        path.stem: RecordStore(path).load()
        for path in sorted((FIGURES / REFERENCE_DEVICE / "records").glob("*.jsonl"))
    }
    found = sessions.differences(chapters)
    assert not sessions.failed(found), sessions.sentence(found)
    assert (found["difference"] >= 0).all() and (found["kind"].value_counts() > 50).all()
    assert len(sessions.table_sessions(chapters)) >= len(chapters)
