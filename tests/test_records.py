"""What is written comes back, a killed run costs at most its last line, and nothing damaged is read
as data.
"""

import errno
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import asdict, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit import records
from labkit.configs import FIGURES, REFERENCE_DEVICE
from labkit.records import Record, RecordError, RecordStore, newest

SOFTWARE = {"torch": "2.11.0", "triton": "3.6.0", "cuda": "13.0", "driver": "580.159.04"}


def make_record(**changes) -> Record:
    record = Record(
        notebook="01_benchmarking",
        section="steps",
        case={"size": "small", "context": 128},
        phase="forward",
        device="nvidia-h200",
        measurement_version=1,
        metrics={"median_ms": 1.25, "n": 10, "std_ms": None},
        samples={"device_ms": [1.0, 1.5, None]},
        timer={"method": "window"},
        software=SOFTWARE,
        source={"commit": "abc", "dirty": False},
        recorded_at="2026-01-02T03:04:05Z",
    )
    return replace(record, **changes)


PHASES = [make_record(), make_record(phase="backward", reason="é"), make_record(phase="third")]


@pytest.fixture
def store(tmp_path) -> RecordStore:
    return RecordStore(tmp_path / "01_benchmarking.jsonl")


def append(store: RecordStore, *written: Record) -> list[Record]:
    for record in written:
        store.append(record)
    return list(written)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(), values, max_size=3),
    max_leaves=6,
)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(case=st.dictionaries(st.text(), VALUES, max_size=4))
def test_any_record_comes_back_equal_and_in_order(tmp_path_factory, case):
    store = RecordStore(tmp_path_factory.mktemp("any") / "records.jsonl")
    failed = make_record(status="oom", reason="“2 GiB”\nneeded by \\udcff.so", metrics={})
    written = append(store, make_record(case=case), failed)
    assert RecordStore(str(store.path)).load() == written
    assert [r.resume_key() for r in store.load()] == [r.resume_key() for r in written]


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"status": "failed"}, "field status is 'failed'; accepted: ok, oom, error, skipped"),
        ({"metrics": {"median_ms": math.nan}}, "JSON"),
    ],
)
def test_what_would_not_be_read_again_is_not_written(store, changes, complaint):
    with pytest.raises(ValueError, match=complaint):
        store.append(make_record(**changes))
    assert not store.path.exists()


def test_append_returns_after_the_whole_line_was_synced(store, monkeypatch):
    sizes = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: sizes.append(store.path.stat().st_size))
    append(store, make_record(samples={"device_ms": [0.1234567] * 20_000}), make_record())
    assert sizes[-1] == store.path.stat().st_size and len(sizes) == 2
    assert store.path.read_bytes().count(b"shared") == 1, "what a session shares stands once"


def test_floats_are_rounded_but_a_case_keeps_its_identity(store):
    # JSON has no tuples; a resumed run compares the case as built with the case as loaded.
    metrics = {"median_ms": 1 / 3}
    (written,) = append(store, make_record(metrics=metrics, case={"scale": (1 / 3, 2)}))
    (record,) = store.load()
    assert record.metrics == {"median_ms": 0.3333333}
    assert record.identity == written.identity


def test_a_last_line_torn_at_any_byte_costs_only_itself(store, monkeypatch, capsys):
    # Many syncs would measure the disk.
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    append(store, *PHASES)
    whole = store.path.read_bytes()
    start = whole.rstrip(b"\n").rindex(b"\n") + 1
    torn = store.path.with_suffix(".torn")
    for end in range(start + 1, len(whole) - 1, 20):
        torn.unlink(missing_ok=True)
        store.path.write_bytes(whole[:end])
        assert store.load() == PHASES[:2] and store.path.read_bytes() == whole[:end]
        store.repair()
        assert store.path.read_bytes() == whole[:start]
        assert torn.read_bytes() == whole[start:end] + b"\n", "nothing is deleted"
        assert f"ended in {end - start} bytes of a torn line" in capsys.readouterr().err
        append(store, PHASES[2])
        assert store.load() == PHASES
    torn.unlink()
    torn.mkdir()
    store.path.write_bytes(whole[:-1])
    with pytest.raises(RecordError, match=f"{torn}: cannot be"):
        store.repair()


HOLDER = """
import sys
import threading
from labkit.records import RecordStore
with RecordStore(sys.argv[1]).locked():
    print("locked", flush=True)
    sys.stdin.read()
"""


def test_the_lock_of_another_process_is_waited_for_and_ends_with_it(store, capsys):
    command = [sys.executable, "-c", HOLDER, str(store.path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as holder:
        assert holder.stdout.readline() == "locked\n"
        threading.Timer(0.2, holder.kill).start()
        with store.locked():
            assert holder.wait(5) == -signal.SIGKILL
    assert f"waiting for another run to write {store.path}" in capsys.readouterr().err


def _line(**changes) -> bytes:
    content = asdict(make_record(schema_version=1)) | changes
    return json.dumps({name: value for name, value in content.items() if value is not ...}).encode()


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (b"[1]", "[1] is no JSON object"),
        (_line(case={"a": math.nan}), "NaN is not finite"),
        (_line(schema_version=3), "schema version 3; this labkit reads up to 2"),
        (_line(colour="red"), "unexpected keyword argument 'colour'"),
        (_line(phase=...), "missing 1 required positional argument: 'phase'"),
        (_line(status="oom"), "there are metrics although the status is oom"),
        (_line(metrics={"a_ms": "1.0"}), "must be real number, not str"),
        (_line(telemetry=[]), "field telemetry is []; accepted: dict"),
    ],
)
def test_a_line_that_is_no_record_is_named_and_left_as_it_is(store, line, complaint):
    content = b"\n".join([_line(), line, _line(), b""])
    store.path.write_bytes(content)
    with pytest.raises(RecordError) as caught:
        store.load()
    assert f"{store.path}, line 2: " in str(caught.value) and complaint in str(caught.value)
    assert store.path.read_bytes() == content


@pytest.mark.parametrize(
    ("metrics", "complaint"),
    [
        ({"median_ms": 0.0}, "median_ms is 0.0: a time must be positive"),
        ({"std_ms": math.nan}, "std_ms is nan"),
        ({"datasheet_fraction": 1.001}, "is 1.001: more than the datasheet peak"),
        ({"median_ms": 7.2e6}, "7200000.0: longer than the whole measurement's limit of 60000 ms"),
        ({"p20_ms": 2, "median_ms": 1}, "p20_ms is 2 and median_ms is 1: out of order"),
    ],
)
def test_an_impossible_number_is_refused_by_name(metrics, complaint):
    possible = {"std_ms": 0.0, "p80_ms": None, "n": 3, "loss_change": -1.0, "peak_bytes": 0}
    records.check_plausible(possible | {"median_ms": 6e4, "datasheet_fraction": 1.0}, 6e4)
    with pytest.raises(ValueError, match=re.escape(complaint)):
        records.check_plausible(possible | metrics, 6e4)


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("environment.json", '{"device": ', "not JSON"),
        ("environment.json", '{"device": []}', "device is []; accepted: dict"),
        ("records/01_steps.jsonl", "{}\n", "line 1: schema version None"),
    ],
)
def test_a_damaged_file_of_a_devices_folder_is_named(tmp_path, name, content, complaint):
    assert records.check(tmp_path) == {} == records.read_environment(tmp_path)
    (tmp_path / "records").mkdir()
    append(RecordStore(tmp_path / "records" / "01_steps.jsonl"), make_record())
    shutil.copy(FIGURES / REFERENCE_DEVICE / "environment.json", tmp_path)
    assert records.check(tmp_path) == {"01_steps": [make_record()]}
    (tmp_path / name).write_text(content)
    with pytest.raises(RecordError) as caught:
        records.check(tmp_path)
    assert str(tmp_path / name) in str(caught.value) and complaint in str(caught.value)


def test_a_write_that_is_cut_short_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "report.md"
    path.write_text("old")

    def refuse(*_):
        raise PermissionError(errno.EACCES, "Permission denied")

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", refuse)
        with pytest.raises(RecordError, match=r"report\.md: cannot be written \(Permission denied"):
            records.write_text_atomic(path, "new")
    assert path.read_text() == "old"
    assert records.write_text_atomic(path, "nëw") == path
    assert path.read_text(encoding="utf-8") == "nëw" and os.listdir(tmp_path) == ["report.md"]


def test_newest_keeps_the_last_of_each_identity_and_sessions_are_kept_apart():
    first, other = make_record(session="a"), make_record(phase="backward", session="a")
    again, later = make_record(session="a"), make_record(session="b")
    assert newest([first, other, again, later]) == [other, later]
    # A session that repeats key rows replaces none of the full grid, nor does one that lacks a
    # package.
    key, later_key = (make_record(session=session, profile="key") for session in "cd")
    assert newest([first, key]) == newest([key, first]) == [first]
    assert newest([first, make_record(status="skipped")]) == [first]
    assert newest([make_record(profile="quick"), key, later_key]) == [later_key]
    elsewhere = make_record(session="c", software={"torch": "2.99"})
    sessions = records.by_session([first, later, elsewhere, again])
    assert list(sessions.values()) == [{"a": again, "b": later}, {"c": elsewhere}]


@pytest.mark.parametrize(
    ("changes", "is_same", "is_taken_over"),
    [
        ({"case": {"context": 128, "size": "small"}}, True, True),
        ({"software": SOFTWARE | {"driver": "580.65.06", "python": "3.13.0"}}, True, True),
        ({"source": {"commit": "def"}, "session": "b", "metrics": {}, "status": "oom"}, True, True),
        ({"measurement_version": 3}, True, False),
        ({"software": SOFTWARE | {"driver": "590.159.04"}}, True, False),
        ({"phase": "backward"}, False, False),
    ],
    ids=str,
)
def test_a_run_takes_over_what_was_measured_alike(changes, is_same, is_taken_over):
    changed = make_record(**changes)
    assert (changed.identity == make_record().identity) is is_same
    assert (changed.resume_key() == make_record().resume_key()) is is_taken_over
