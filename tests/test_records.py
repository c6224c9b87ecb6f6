"""What is written comes back, a killed run costs at most its last line, and nothing damaged is read
as data.
"""

import errno
import fcntl
import io
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit import cli, notebooks, records
from labkit.device import detect
from labkit.records import Record, RecordError, RecordStore, newest, to_frame
from labkit.report import render

SOFTWARE = {
    "torch": "2.11.0",
    "triton": "3.6.0",
    "cuda": "13.0",
    "driver": "580.159.04",
    "python": "3.12.3",
}


def make_record(**changes) -> Record:
    record = Record(
        notebook="01_benchmarking",
        section="steps",
        case={"size": "small", "context": 128},
        phase="forward",
        status="ok",
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


@pytest.fixture
def store(tmp_path) -> RecordStore:
    return RecordStore(tmp_path / "01_benchmarking.jsonl")


def test_records_come_back_equal_and_in_order(store):
    written = [
        make_record(),
        make_record(status="oom", reason="CUDA out of memory: “2 GiB”\nneeded", metrics={}),
        make_record(phase="backward"),
        # Entries of telemetry are free.
        make_record(
            telemetry={"disturbed": True, "other_cpu_cores": 0.5, "disturbed_by": ["make", None]}
        ),
    ]
    for record in written:
        store.append(record)
    assert store.load() == written
    assert RecordStore(str(store.path)).load() == written


def test_a_missing_file_holds_no_records(store):
    assert store.load() == []
    store.repair()
    assert not store.path.exists()


INTEGERS = st.integers(-(2**63), 2**63 - 1)
JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | INTEGERS
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(), values, max_size=3),
    max_leaves=6,
)
METRIC_VALUES = st.none() | INTEGERS | st.floats(allow_nan=False, allow_infinity=False)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    case=st.dictionaries(st.text(), JSON_VALUES, max_size=4),
    metrics=st.dictionaries(st.text(), METRIC_VALUES, max_size=4),
)
def test_any_case_and_metrics_come_back_equal(tmp_path_factory, case, metrics):
    store = RecordStore(tmp_path_factory.mktemp("any") / "records.jsonl")
    written = [make_record(case=case, metrics=records._rounded(metrics)), make_record()]
    for record in written:
        store.append(record)
    loaded = store.load()
    assert loaded == written
    assert [r.identity for r in loaded] == [r.identity for r in written]
    assert [r.resume_key() for r in loaded] == [r.resume_key() for r in written]


def test_a_case_with_tuples_keeps_its_identity(store):
    # JSON has no tuples; a resumed run compares the case as built with the case as loaded.
    record = make_record(case={"shape": (4, 128)})
    store.append(record)
    assert store.load()[0].identity == record.identity


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        (
            {"status": "failed"},
            f"field status is 'failed'; accepted: {', '.join(records.STATUSES)}",
        ),
        ({"section": ""}, "field section is ''"),
        *(({"metrics": {"median_ms": value}}, "JSON") for value in (math.nan, math.inf, -math.inf)),
    ],
)
def test_what_would_not_be_read_again_is_refused_before_anything_is_written(
    store, changes, complaint
):
    with pytest.raises(ValueError, match=complaint):
        store.append(make_record(**changes))
    assert not store.path.exists()


def test_append_is_one_write_of_one_line(store, monkeypatch):
    """Two writes could be torn apart by a kill, or interleaved with another process's."""
    writes = []

    class CountedFile(io.FileIO):
        def write(self, data):
            writes.append(bytes(data))
            return super().write(data)

    def counted_open(path, mode):
        return io.BufferedWriter(CountedFile(path, mode))

    monkeypatch.setattr(records, "open", counted_open, raising=False)
    # Longer than any buffer between Python and the file.
    long_record = make_record(samples={"device_ms": [0.1234567] * 20_000})
    for record in (make_record(), long_record):
        writes.clear()
        store.append(record)
        assert len(writes) == 1
        # With the first record of a session goes the line of what they share.
        assert writes[0].endswith(b"\n") and writes[0].count(b"\n") == (
            1 if record is long_record else 2
        )
    assert store.load() == [make_record(), long_record]


def test_what_a_session_shares_stands_once_and_floats_are_rounded(store):
    other = make_record(session="b", software={"torch": "2.99"})
    written = [
        make_record(session="a"),
        make_record(session="a", phase="backward"),
        other,
        make_record(session="a"),
    ]
    for record in written[:2]:
        store.append(record)
    for record in written[2:]:  # by a process that has not written the others
        RecordStore(store.path).append(record)
    assert store.load() == written
    assert [b"shared" in line for line in store.path.read_bytes().splitlines()] == [
        True,
        False,
        False,
        True,
        False,
        False,
    ]
    store.append(
        replace(written[0], software={"torch": "3.0"})
    )  # another program in the same session
    assert store.load()[-1].software == {"torch": "3.0"} and store.load()[0].software == SOFTWARE
    metrics = {"median_ms": 1 / 3, "relative_error": 1 / 3}
    store.append(make_record(metrics=metrics, case={"scale": 1 / 3}))
    assert store.load()[-1].metrics == {"median_ms": 0.3333333, "relative_error": 0.3333}
    assert store.load()[-1].case == {"scale": 1 / 3}


def test_append_returns_after_the_whole_line_was_synced(store, monkeypatch):
    contents_at_sync = []
    monkeypatch.setattr(
        os, "fsync", lambda descriptor: contents_at_sync.append(store.path.read_bytes())
    )
    store.append(make_record())
    assert contents_at_sync == [store.path.read_bytes()]


@pytest.mark.parametrize("num_kept", [0, 2])
def test_a_last_line_torn_at_any_byte_costs_only_itself_and_a_whole_file_stays(
    store, monkeypatch, num_kept
):
    # Hundreds of syncs would measure the disk; that appends sync is tested above.
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    kept = [make_record(), make_record(phase="backward")][:num_kept]
    for record in kept:
        store.append(record)
    num_kept_bytes = store.path.stat().st_size if kept else 0
    store.append(make_record(phase="optimizer_step", reason="é"))
    whole = store.path.read_bytes()
    if not kept:  # what the session shares is a line of its own
        num_kept_bytes = whole.index(b"\n") + 1
    again = make_record(phase="train_step")
    torn = store.path.with_suffix(".torn")
    for end in range(num_kept_bytes, len(whole) - 1):
        torn.unlink(missing_ok=True)
        store.path.write_bytes(whole[:end])
        assert store.load() == kept
        assert store.path.read_bytes() == whole[:end], "reading changed the file"
        store.repair()
        assert store.path.read_bytes() == whole[:num_kept_bytes]
        assert end == num_kept_bytes or torn.read_bytes() == whole[num_kept_bytes:end] + b"\n", (
            "nothing is deleted"
        )
        store.append(again)
        assert store.load() == [*kept, again]


ENDS = {"unix": b"\n", "dos": b"\r\n", "old mac": b"\r"}


@pytest.mark.parametrize("has_last", [True, False], ids=["last end", "no last end"])
@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_other_line_ends_and_a_missing_last_one_cost_no_record(store, capsys, end, has_last):
    written = [make_record(), make_record(phase="backward", reason="é")]
    for record in written:
        store.append(record)
    content = end.join(store.path.read_bytes().splitlines()) + (end if has_last else b"")
    store.path.write_bytes(content)
    assert RecordStore(store.path).load() == written and store.path.read_bytes() == content
    store.repair()
    assert (
        store.path.read_bytes() == content + (b"" if has_last else b"\n")
        and not capsys.readouterr().err
    )
    again = make_record(phase="optimizer_step")
    store.append(again)
    assert store.load() == [*written, again]


def test_what_is_no_record_at_the_end_of_a_file_is_kept_beside_it_and_said(store, capsys):
    store.append(make_record())
    whole = store.path.read_bytes()
    for torn in (b'{"metrics":{"median_ms":1.', b"\x00" * 9):
        store.path.write_bytes(whole + torn)
        store.repair()
        assert store.path.read_bytes() == whole
        assert f"{store.path} ended in {len(torn)} bytes of a torn line" in capsys.readouterr().err
    assert (
        store.path.with_suffix(".torn").read_bytes()
        == b'{"metrics":{"median_ms":1.\n' + b"\x00" * 9 + b"\n"
    )


def test_lines_that_run_into_one_another_are_refused_and_left(store):
    for phase in ("forward", "backward"):
        store.append(make_record(phase=phase))
    content = store.path.read_bytes().replace(b"\n", b"")
    store.path.write_bytes(content)
    store.repair()
    for _ in range(2):
        with pytest.raises(RecordError, match="line 1: not JSON: Extra data"):
            store.load()
    assert store.path.read_bytes() == content + b"\n"


def test_two_writers_without_a_lock_keep_their_records_apart(store, monkeypatch):
    monkeypatch.setattr(
        RecordStore, "state", lambda self: (0,)
    )  # neither sees what the other has written
    written = [
        make_record(phase=f"{number}", session="ab"[number % 2], machine="ab"[number % 2])
        for number in range(8)
    ]
    writers = {"a": RecordStore(store.path), "b": RecordStore(store.path)}
    for record in written:
        writers[record.session].append(record)
    assert store.load() == written
    assert store.path.read_bytes().count(b"shared") == 2


def test_a_record_of_an_older_file_is_of_the_session_above_it(store):
    store.append(make_record(session="a"))
    head, line = store.path.read_bytes().splitlines(keepends=True)
    store.path.write_bytes(
        head
        + line.replace(b'"session":"a",', b"")
        + head.replace(b'"a"', b'"b"')
        + line.replace(b'"session":"a",', b"")
    )
    assert [record.session for record in store.load()] == ["a", "b"] and b'"session":"a"' in line


@pytest.mark.parametrize(
    ("number", "said"), [(errno.ENOSPC, "No space left on device"), (errno.EDQUOT, "quota")]
)
def test_a_record_that_cannot_be_written_is_named(store, monkeypatch, number, said):
    def full(descriptor):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(
        RecordError, match=rf"{store.path}: .*steps.*forward.* cannot be written \(.*{said}"
    ):
        store.append(make_record())


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS])
def test_a_file_system_without_locks_is_called_that(store, monkeypatch, number):
    def refused(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refused)
    expected = re.escape(f"01_benchmarking.lock: cannot be locked ({os.strerror(number)})")
    with pytest.raises(RecordError, match=expected), store.locked():
        pytest.fail("nothing is locked")


def test_what_is_no_file_or_no_folder_is_refused_at_once(tmp_path):
    (tmp_path / "records").write_text("")
    with pytest.raises(RecordError, match="records: is no folder"):
        records.check(tmp_path)
    (tmp_path / "records").unlink()
    (tmp_path / "records").mkdir()
    pipe = tmp_path / "records" / "01_benchmarking.jsonl"
    os.mkfifo(pipe)
    with pytest.raises(RecordError, match=f"{pipe}: is no file"):
        records.check(tmp_path)


def _json_line(**changes) -> bytes:
    content = {**asdict(make_record()), **changes}
    return json.dumps({name: value for name, value in content.items() if value is not ...}).encode()


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (_json_line()[:-20], "not JSON: "),
        (_json_line() + _json_line(), "not JSON: "),
        (b"", "not JSON: "),
        (b"\xff\xfe\x00", "not JSON: "),
        (b"\x00" * 64, "not JSON: "),
        (b"[1, 2]", "not an object but list"),
        (b"null", "not an object but NoneType"),
        (
            _json_line(schema_version=records.SCHEMA_VERSION + 1),
            f"schema version {records.SCHEMA_VERSION + 1}",
        ),
        (_json_line(schema_version="1"), "schema version '1'"),
        (_json_line(schema_version=...), "schema version None"),
        (_json_line(colour="red", shade="dark"), "unknown fields colour, shade"),
        (_json_line(phase=...), "no field phase"),
        (_json_line(phase=""), "field phase is ''; accepted: a non-empty text"),
        (
            _json_line(status="banana"),
            "field status is 'banana'; accepted: ok, oom, error, skipped, timeout",
        ),
        (_json_line(status="oom"), "where the status is oom"),
        (_json_line(section=None), "field section is None; accepted: a non-empty text"),
        (
            _json_line(measurement_version=True),
            "field measurement_version is True; accepted: a whole number",
        ),
        (
            _json_line(measurement_version=-1),
            "field measurement_version is -1; accepted: a whole number from 0",
        ),
        (_json_line(case=[1]), "field case is [1]; accepted: an object"),
        (
            _json_line(metrics={"median_ms": "1.0"}),
            "field metrics.median_ms is '1.0'; accepted: a number or null",
        ),
        (
            _json_line(metrics={"median_ms": math.nan}),
            "field metrics.median_ms is nan; accepted: finite",
        ),
        (
            _json_line(metrics={"num_bytes": -1}),
            "field metrics.num_bytes is -1: a count cannot be negative",
        ),
        (
            _json_line(metrics={"p20_ms": 2.0, "median_ms": 1.0, "p80_ms": 3.0}),
            "field metrics.p20_ms is 2.0 and median_ms is 1.0: out of order",
        ),
        (
            _json_line(metrics={"p20_ms": 1.0, "median_ms": 4.0, "p80_ms": 3.0}),
            "field metrics.median_ms is 4.0 and p80_ms is 3.0: out of order",
        ),
        (
            _json_line(samples={"device_ms": [1.0, "2"]}),
            "field samples.device_ms is [1.0, '2']; accepted: a list of",
        ),
        (
            _json_line(case={"context": 2**80}),
            "field case.context is 1208925819614629174706176; accepted: finite",
        ),
        (_json_line(telemetry={"other_cpu_cores": [[math.inf]]}), "field telemetry is inf"),
        (_json_line(telemetry={"throttle_reasons": 3}), "field telemetry.throttle_reasons is 3"),
        (_json_line(software={"torch": 2}), "field software.torch is 2; accepted: a text"),
        (_json_line(source={"commit": 12}), "field source.commit is 12; accepted: a text"),
        (_json_line(timer={"method": "\ud800"}), "not JSON: 'utf-8' codec"),
        (
            _json_line(observed={"a": "@"}).replace(b'"@"', b"[" * 40 + b"]" * 40),
            "field observed is nested more than 16",
        ),
        (b"[" * 100_000, "not JSON: nested too deeply"),
    ],
)
def test_a_line_that_is_no_record_is_named_and_left_as_it_is(store, line, complaint):
    content = b"\n".join([_json_line(), line, _json_line(), b""])
    store.path.write_bytes(content)
    with pytest.raises(RecordError) as caught:
        store.load()
    message = str(caught.value)
    assert f"{store.path}, line 2: " in message
    assert complaint in message
    assert store.path.read_bytes() == content


def test_a_reason_that_is_no_utf_8_is_recorded(store):
    store.append(make_record(status="error", reason="no file \udcff.so", metrics={}))
    assert store.load()[0].reason == "no file \\udcff.so"


@pytest.mark.parametrize("name", ["environment.json", "records/02_nsys_analysis.jsonl"])
def test_run_and_report_stop_at_a_damaged_file_before_any_kernel_starts(
    tmp_path, monkeypatch, name
):
    folder = tmp_path / detect().slug
    (folder / "records").mkdir(parents=True)
    RecordStore(folder / "records" / "01_benchmarking.jsonl").append(make_record())
    (folder / name).write_bytes(b"{]\n")
    monkeypatch.setattr(notebooks, "execute", lambda *_, **__: pytest.fail("a kernel was started"))
    for command in (
        lambda: cli.run(["01"], profile="smoke", output=tmp_path),
        lambda: render.rebuild(folder.name, output=tmp_path),
    ):
        with pytest.raises(RecordError) as caught:
            command()
        assert str(folder / name) in str(caught.value)


ENVIRONMENT = {
    "device": {"name": "an H200", "kind": "cuda", "slug": "nvidia-h200"},
    "gpu": {"num_multiprocessors": 132, "memory_bytes": 2**37, "compute_capability": "9.0"},
    "cpu": {"name": "a processor", "num_cores": 16},
    "datasheet": None,
}


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("environment.json", b"{", "Expecting property name"),
        ("environment.json", b"\xff{}", "can't decode byte 0xff"),
        ("environment.json", [], "not an object but list"),
        (
            "environment.json",
            {"device": "an H200"},
            "field device is 'an H200'; accepted: an object",
        ),
        (
            "environment.json",
            {"gpu": {**ENVIRONMENT["gpu"], "memory_bytes": "all"}},
            "field gpu.memory_bytes is 'all'",
        ),
        (
            "environment.json",
            {"gpu": {**ENVIRONMENT["gpu"], "memory_bytes": -1}},
            "field gpu.memory_bytes is -1",
        ),
        ("environment.json", {"cpu": {"name": "a processor"}}, "no field cpu.num_cores"),
        ("records/01_steps.done.json", {}, "no field num_missing"),
        (
            "records/01_steps.done.json",
            {"num_missing": -2, "profile": "full"},
            "num_missing is -2; accepted: a whole",
        ),
        ("records/01_steps.jsonl", b"{}\n", "line 1: schema version None"),
    ],
)
def test_a_damaged_file_of_a_devices_folder_is_named(tmp_path, name, content, complaint):
    (tmp_path / "records").mkdir()
    RecordStore(tmp_path / "records" / "01_steps.jsonl").append(make_record())
    (tmp_path / "environment.json").write_text(json.dumps(ENVIRONMENT))
    records.done_path(tmp_path, "01_steps").write_text(
        json.dumps({"num_missing": 0, "profile": "full"})
    )
    assert records.check(tmp_path) == {"01_steps": [make_record()]}
    (tmp_path / name).write_bytes(
        content if isinstance(content, bytes) else json.dumps(content).encode()
    )
    with pytest.raises(RecordError) as caught:
        records.check(tmp_path)
    assert str(tmp_path / name) in str(caught.value) and complaint in str(caught.value)


@pytest.mark.parametrize(
    ("session", "text"), [("this", "1 ok\n"), ("before", "1 ok; all recorded before, --fresh ")]
)
def test_a_run_that_measured_nothing_says_how_to(tmp_path, capsys, session, text):
    (tmp_path / "records").mkdir()
    RecordStore(tmp_path / "records" / "01_benchmarking.jsonl").append(make_record(session=session))
    done = {"num_missing": 0, "profile": "full", "session": "this"}
    records.done_path(tmp_path, "01_benchmarking").write_text(json.dumps(done))
    cli._summary({"01_benchmarking": tmp_path}, {}, 1.0)
    assert f"01_benchmarking: {text}" in capsys.readouterr().out


def test_a_folder_without_environment_and_end_is_read(tmp_path):
    assert (
        records.read_environment(tmp_path) == {} and records.read_done(tmp_path, "01_steps") is None
    )
    assert records.check(tmp_path) == {}


def test_a_write_that_is_cut_short_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "report.md"
    path.write_text("old")
    path.chmod(0o640)

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(os, "replace", killed)
        records.write_text_atomic(path, "new")
    assert path.read_text() == "old"
    assert records.write_text_atomic(path, "nëw") == path
    assert path.read_text(encoding="utf-8") == "nëw" and path.stat().st_mode & 0o777 == 0o640
    assert os.listdir(tmp_path) == ["report.md"]


def test_a_file_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    path = tmp_path / "there is none" / "report.md"
    with pytest.raises(
        RecordError, match=r"report\.md: cannot be written \(No such file or directory\)"
    ):
        records.write_text_atomic(path, "new")
    monkeypatch.setattr(
        os, "replace", lambda *_: (_ for _ in ()).throw(PermissionError(13, "Permission denied"))
    )
    with pytest.raises(RecordError, match=r"report\.md: cannot be written \(Permission denied\)"):
        records.write_text_atomic(tmp_path / "report.md", "new")
    assert os.listdir(tmp_path) == []


def test_newest_keeps_the_last_of_each_identity_in_the_order_measured():
    first, other = make_record(metrics={"median_ms": 1.0}), make_record(phase="backward")
    again = make_record(metrics={"median_ms": 2.0}, device="elsewhere", recorded_at="later")
    assert newest([first, other, again]) == [other, again]
    assert newest([]) == []


def test_a_session_that_repeats_rows_does_not_replace_them():
    first, repeated = make_record(session="a"), make_record(session="b", profile="key")
    assert newest([first, repeated]) == newest([repeated, first]) == [first]
    again = make_record(session="c", profile="key")
    assert newest([repeated, again]) == [again], "there is no other"
    assert newest([first, repeated, later := make_record(session="d")]) == [later]


def test_what_was_measured_otherwise_is_another_measurement():
    old, new = (make_record(measurement_version=version) for version in (1, 2))
    assert old.resume_key() != new.resume_key() and old.identity == new.identity


def test_sessions_of_a_measurement_are_kept_apart_each_by_its_newest_record():
    one, again, other = (
        make_record(session=session, metrics={"median_ms": ms})
        for session, ms in (("a", 1.0), ("a", 1.1), ("b", 1.2))
    )
    elsewhere = make_record(session="c", software={"torch": "2.99"})
    found = records.by_session([one, other, elsewhere, again])
    assert found == {
        one.resume_key(): {"a": again, "b": other},
        elsewhere.resume_key(): {"c": elsewhere},
    }
    assert [*found[one.resume_key()]] == ["a", "b"]


def test_a_row_without_joules_says_why_and_others_have_no_such_column():
    reason = "this GPU or driver has no energy counter"
    plain = make_record(telemetry={"sustained": {"num_calls": 3}})
    without = make_record(telemetry={"sustained": {"num_calls": 3, "no_energy": reason}})
    assert to_frame([plain, without])["no_energy"].fillna("").tolist() == ["", reason]
    assert "no_energy" not in to_frame([plain, make_record(telemetry={"disturbed": False})])
    with pytest.raises(ValueError, match=r"field telemetry\.sustained is 3; accepted: an object"):
        records.validate(asdict(make_record(telemetry={"sustained": 3})))


@pytest.mark.parametrize(
    "changes",
    [
        {"notebook": "02"},
        {"section": "warmup"},
        {"phase": "backward"},
        {"case": {"size": "small", "context": 256}},
        {"case": {"size": "small", "context": 128, "batch": 4}},
    ],
    ids=str,
)
def test_identity_is_notebook_section_case_and_phase(changes):
    assert make_record(**changes).identity != make_record().identity
    assert make_record(**changes).resume_key() != make_record().resume_key()


def test_identity_does_not_depend_on_the_order_of_the_parameters():
    assert make_record(case={"context": 128, "size": "small"}).identity == make_record().identity


@pytest.mark.parametrize(
    "changes",
    [
        {"device": "nvidia-h100"},
        {"measurement_version": 3},
        {"software": {}},
        *(
            {"software": {**SOFTWARE, name: version}}
            for name, version in (
                ("torch", "2.13.0"),
                ("triton", "3.7.0"),
                ("cuda", "13.1"),
                ("driver", "590.159.04"),
                ("driver", ""),
            )
        ),
    ],
    ids=str,
)
def test_a_run_does_not_take_over_what_was_measured_otherwise(changes):
    changed = make_record(**changes)
    assert changed.resume_key() != make_record().resume_key()
    assert changed.identity == make_record().identity, "these say how, not what"


@pytest.mark.parametrize(
    "changes",
    [
        {"software": {**SOFTWARE, "driver": "580.65.06"}},
        {"software": {**SOFTWARE, "driver": "580"}},
        {"software": {**SOFTWARE, "python": "3.13.0", "labkit": "9"}},
        {"source": {"commit": "def", "dirty": True}},
        {
            "session": "another",
            "recorded_at": "later",
            "metrics": {},
            "status": "oom",
            "reason": "full",
        },
    ],
    ids=str,
)
def test_a_run_takes_over_what_stands(changes):
    assert make_record(**changes).resume_key() == make_record().resume_key()


def test_a_frame_has_one_row_per_record_and_a_column_per_number():
    frame = to_frame([make_record(), make_record(status="oom", metrics={}, reason="full")])
    assert list(frame["status"]) == ["ok", "oom"]
    assert list(frame["size"]) == ["small", "small"]
    assert frame["median_ms"][0] == 1.25 and math.isnan(frame["median_ms"][1]), (
        "a failure is no number"
    )
    assert list(frame["timer_method"]) == ["window", "window"]


@pytest.mark.parametrize(
    ("metrics", "complaint"),
    [
        ({"median_ms": 0.0}, "median_ms is 0.0: a time must be positive"),
        ({"median_ms": 1.0, "p20_ms": -0.5}, "p20_ms is -0.5"),
        ({"mean_ms": -1}, "mean_ms is -1"),
        ({"std_ms": math.nan}, "std_ms is nan"),
        ({"median_ms": math.inf}, "median_ms is inf"),
        ({"peak_bytes": -math.inf}, "peak_bytes is -inf"),
        (
            {"datasheet_fraction": 1.001},
            "datasheet_fraction is 1.001: more than the datasheet peak",
        ),
        ({"copy_datasheet_fraction": 3.0}, "copy_datasheet_fraction is 3.000"),
    ],
)
def test_an_impossible_number_is_refused_by_name(metrics, complaint):
    with pytest.raises(ValueError) as caught:
        records.check_plausible(metrics)
    assert complaint in str(caught.value)


def test_a_time_beyond_the_limit_of_the_whole_measurement_is_refused():
    """As where the clock was set meanwhile."""
    with pytest.raises(
        ValueError,
        match=r"median_ms is 7200000\.0: longer than the whole measurement's limit of 60000 ms",
    ):
        records.check_plausible({"median_ms": 7.2e6}, 6e4)
    records.check_plausible({"median_ms": 6e4, "peak_bytes": 10**9}, 6e4)


def test_possible_numbers_pass():
    records.check_plausible(
        {
            "median_ms": 1e-6,
            "std_ms": 0.0,
            "p80_ms": None,
            "n": 3,
            "peak_bytes": 0,
            "loss_change": -1.0,
        }
    )
    records.check_plausible({"datasheet_fraction": 1.0, "other_datasheet_fraction": None})
    records.check_plausible({})


HOLDER = """
import sys
from labkit.records import RecordStore
with RecordStore(sys.argv[1]).locked():
    print("locked", flush=True)
    sys.stdin.read()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="advisory locks and SIGKILL are POSIX")
def test_the_lock_of_another_process_is_respected_and_ends_with_it(store):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(store.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdout.readline() == "locked\n"
        begin = time.monotonic()
        with (
            pytest.raises(RecordError, match=f"{store.path}: another labkit run"),
            store.locked(wait_s=0.25),
        ):
            pytest.fail("two processes hold the lock")
        assert time.monotonic() - begin >= 0.25

        # The kill comes while the next writer waits; nothing of the holder's own runs after it.
        killer = threading.Timer(0.15, os.kill, (holder.pid, signal.SIGKILL))
        killer.start()
        with store.locked(wait_s=20.0):
            assert holder.wait(timeout=20.0) == -signal.SIGKILL
            store.append(make_record())
        killer.join()
    finally:
        holder.kill()
        holder.communicate()
    assert store.load() == [make_record()]


@pytest.mark.skipif(sys.platform == "win32", reason="advisory locks are POSIX")
def test_the_lock_is_given_back_after_an_exception_too(tmp_path):
    store = RecordStore(tmp_path / "not" / "yet" / "there.jsonl")
    with pytest.raises(KeyError), store.locked():
        with pytest.raises(RecordError), store.locked(wait_s=0.0):
            pytest.fail("the lock was held twice")
        raise KeyError
    with store.locked(wait_s=0.0):
        assert not store.path.exists(), "locking must not make an empty file of records"
