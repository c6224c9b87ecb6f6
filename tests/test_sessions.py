"""Rows of several sessions are paired by what they measured, each kind of time apart, and the
limits are the limits.
"""

from functools import partial

import pytest
from chapters import labkit, store_of

from labkit.configs import FIGURES, REFERENCE_DEVICE
from labkit.records import Record, RecordStore
from labkit.report import benchmarking, card, facts, sessions
from labkit.report.chapter import Chapter

NOTEBOOK = "01_benchmarking"


def record(session, median_ms=1.0, *, row="a", method="graph", **changed):
    content = {
        "section": "steps",
        "phase": "forward",
        "metrics": {"median_ms": median_ms},
        "timer": {"method": method},
        "source": {"commit": "0123456"},
        "measurement_version": 2,
    }
    known = {"notebook": NOTEBOOK, "case": {"row": row}, "device": "a-gpu"}
    return Record(session=session, **known, **content | changed)


def differences(*records):
    return sessions.differences({NOTEBOOK: records})


def test_a_row_is_compared_with_its_first_session():
    found = differences(
        record("s1", 1.0),
        record("s1", 9.0, row="b"),
        record("s2", 0.98),
        record("s3", 1.04),
        record("s2", 9.9, row="c"),
    )
    assert set(found["row"]) == {"steps: a, forward"} and set(found["kind"]) == {"device"}
    assert found[["lowest_ms", "highest_ms"]].to_numpy().tolist() == [[0.98, 1.0], [1.0, 1.04]]
    assert found["difference"].tolist() == pytest.approx([1 / 0.98 - 1, 0.04])
    assert sessions.table_worst(found)["difference"].tolist() == ["4 %"], "each row once"


@pytest.mark.parametrize(
    "changed",
    [
        {"measurement_version": 3},
        {"software": {"torch": "2.99"}},
        {"session": "s1"},
        {"source": {"commit": "another"}},
        {"status": "oom", "metrics": {}, "timer": {}},
    ],
)
def test_what_was_measured_otherwise_is_another_row(changed):
    assert differences(record("s1"), record(**{"session": "s2"} | changed)).empty


def test_the_host_is_no_row():
    assert differences(*(record(session, section="host") for session in ("s1", "s2"))).empty


@pytest.mark.parametrize(
    ("method", "launch_ms", "kinds"),
    [
        ("graph", 0.0, ["device", "sustained", sessions.OTHER_CALLS]),
        # The call's time is not counted twice.
        ("window", 2.69, [sessions.OTHER_CALLS, "sustained"]),
        # Back to back it waits for the host as well.
        ("window", 2.71, [sessions.WAITING] * 2),
    ],
)
def test_every_kind_of_time_is_a_row_of_its_own(method, launch_ms, kinds):
    times = {"median_ms": 3.0, "host_median_ms": 3.0, "sustained_ms": 2.0}
    metrics = times | {"launch_median_ms": launch_ms}
    found = differences(*(record(s, method=method, metrics=metrics) for s in ("s1", "s2")))
    assert found["kind"].tolist() == kinds


def test_a_step_waits_where_its_forward_does():
    forward = {"metrics": dict.fromkeys(("median_ms", "host_median_ms", "launch_median_ms"), 3.0)}
    rows = [
        record(session, method="window", **changed)
        for session in ("s1", "s2")
        for changed in (forward, {"phase": "step"})
    ]
    assert set(differences(*rows)["kind"]) == {sessions.WAITING}


def test_too_few_rows_of_a_kind_fail():
    # One of 20 rows, that is 5 %, may be off.
    level = [*[1.02] * 19, 1.5]
    for method, times, failed in [
        ("graph", level, []),
        ("graph", [*level[1:], 1.06], ["device"]),
        ("graph", [1.049] * 20, []),
        ("window", [1.9] * 20, []),
    ]:
        first = [record("s1", row=row, method=method) for row in range(20)]
        second = [record("s2", ms, row=row, method=method) for row, ms in enumerate(times)]
        found = differences(*first, *second)
        assert sessions.failed(found) == failed
    assert sessions.failed(differences(*first)), "nothing to compare"
    lack = facts.measured(sessions.shares(found), "share", times="device times", twice=True)
    assert lack.missing == "device times, twice"
    (axis,) = benchmarking.repeats(found).axes
    assert [label.get_text() for label in axis.get_yticklabels()] == [sessions.OTHER_CALLS]


def test_the_command_shows_the_rows_and_fails_only_when_checking(tmp_path):
    store = store_of(tmp_path / "a-gpu", NOTEBOOK)
    store.append(record("s1"))
    compare = partial(labkit, "compare", "--sessions", "a-gpu", "--output", tmp_path)
    assert "No commit has a row of two sessions." in compare().output
    store.append(record("s2", 1.01))
    assert compare("--check", "--notebook", "01").exit_code == 0
    store.append(record("s3", 1.2))
    result = compare()
    within = "Two sessions agree: 50 % of 2 device times within 5 %."
    assert result.exit_code == 0 and result.output.startswith(within)
    assert "| steps: a, forward |" in result.output
    assert compare("--check").exit_code == 1
    chapter = Chapter(NOTEBOOK, device="a-gpu", output=str(tmp_path))
    assert within in card.page({NOTEBOOK: chapter}, {})


def test_the_reference_devices_sessions_agree():
    chapters = {
        path.stem: RecordStore(path).load()
        for path in sorted((FIGURES / REFERENCE_DEVICE / "records").glob("*.jsonl"))
    }
    found = sessions.differences(chapters)
    assert not sessions.failed(found), sessions.sentence(found)
    assert (found["difference"] >= 0).all() and (
        found["kind"].value_counts() > [50, 50, 50, 30]
    ).all()
