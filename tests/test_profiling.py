"""Captures are read as they are: every launch in its range, every kernel in its class, nothing left
behind.
"""

import json
import os
import sqlite3
import sys
from pathlib import Path

import pandas as pd
import pytest
from processes import holding, is_true_within

from labkit.configs import FIGURES
from labkit.device import checks
from labkit.kernels import KERNEL_CLASSES
from labkit.measure import profiling
from labkit.measure.profiling import (
    OUTSIDE,
    Nsys,
    ProfileError,
    Trace,
    busy_ns,
    classify,
    launches,
    read_chrome_trace,
    read_nsys,
    statistics_by,
)
from labkit.records import RecordStore
from labkit.report.nsys_analysis import recorded

FIXTURE = Path(__file__).parent / "fixtures" / "nsys_2025.3.1_h200.sqlite"
"""Nsight Systems 2025.3.1 on an H200, cut down to what a reader needs: three matmuls, then range
"measure" with five "step", each with "mm" (one matmul) and "softmax" (one softmax).
"""

PHASES = ("inference", "forward", "backward", "optimizer")


def test_the_fixture_has_five_steps_each_one_matmul_and_one_softmax_and_three_matmuls_outside():
    before = FIXTURE.read_bytes()
    trace = read_nsys(FIXTURE, "2025.3.1")
    assert FIXTURE.read_bytes() == before
    table = launches(trace, ("mm", "softmax"))
    kernels = table[table["kind"] == "kernel"]
    assert len(kernels) == 14 and (table["kind"] == "memset").sum() == 8
    inside = kernels[kernels["range"] != OUTSIDE]
    assert (
        inside["path"].tolist() == [("measure", "step", "mm"), ("measure", "step", "softmax")] * 5
    )
    assert inside["kernel_class"].tolist() == ["matmul", "softmax"] * 5
    outside = kernels[kernels["range"] == OUTSIDE]["kernel_class"]
    assert outside.tolist() == ["elementwise", *["matmul"] * 3]
    total_us = statistics_by(kernels, ["range"])["total_us"].sum()
    assert kernels["duration_ns"].sum() == pytest.approx(total_us * 1e3)


def test_a_launch_lies_in_the_ranges_that_are_open():
    columns = ["name", "start_ns", "end_ns", "process", "thread"]
    ranges = [
        ("step", 5, 50, 1, 1),
        ("forward", 10, 20, 1, 1),
        ("backward", 22, 38, 1, 1),
        ("another's", 11, 49, 2, 1),
    ]
    expected = {
        (1, 7): ("step",),
        (1, 12): ("step", "forward"),
        # Autograd's own thread launches while the first one holds "backward" open.
        (2, 25): ("step", "backward"),
        (2, 60): (),
        (1, None): (),
    }
    kernel = {"name": "a kernel", "kind": "kernel", "stream": 7, "duration_ns": 1, "process": 1}
    operations = [
        kernel | {"start_ns": n, "end_ns": n + 1, "thread": thread, "launched_ns": launched}
        for n, (thread, launched) in enumerate(expected)
    ]
    ranges = pd.DataFrame(ranges, columns=columns)
    trace = Trace("nsys", "", pd.DataFrame(operations), ranges)
    assert launches(trace, PHASES)["path"].tolist() == list(expected.values())


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("DROP TABLE CUPTI_ACTIVITY_KIND_KERNEL", "no such table: CUPTI_ACTIVITY_KIND_KERNEL"),
        ("UPDATE CUPTI_ACTIVITY_KIND_RUNTIME SET correlationId = 10000000", "holds no launch"),
        ("UPDATE NVTX_EVENTS SET eventType = 75", "holds no range"),
        ('UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET "end" = 7', "ends before it starts"),
        (
            "CREATE TABLE CUPTI_ACTIVITY_KIND_GRAPH_TRACE AS SELECT 1 AS start",
            "CUDA graphs as a whole, .*; accepted: a capture with --cuda-graph-trace=node",
        ),
    ],
)
def test_what_no_capture_can_hold_is_refused(tmp_path, statement, message):
    path = tmp_path / "not sql?.sqlite"
    path.write_bytes(FIXTURE.read_bytes())
    with sqlite3.connect(path) as connection:
        connection.executescript(statement)
    connection.close()
    with pytest.raises(ProfileError, match=rf"not sql\?\.sqlite .*{message}"):
        read_nsys(path)


def test_kernels_and_operators_of_committed_records_keep_their_class():
    known = {}
    for path in FIGURES.glob("*/records/02_nsys_analysis.jsonl"):
        for record in RecordStore(path).load():
            if "tables" in record.observed:
                kind = "operator" if "cpu" in record.observed["profiler"] else "kernel"
                kernels = recorded(record.observed["tables"]["kernels"])
                for name, kernel_class in kernels[["short_name", "kernel_class"]].to_numpy():
                    known[name.partition("#")[0], kind] = kernel_class
    assert len(known) > 150
    assert known == {
        (name, kind): KERNEL_CLASSES.get(name) or classify(name, kind) for name, kind in known
    }


def test_two_kernels_keep_two_names():
    alike = ["void softmax_warp<float, 9>", "void softmax_warp<float, 10>"]
    short = profiling.distinct_names(alike)
    assert len(set(short.values())) == 2 and short == profiling.distinct_names(reversed(alike))
    assert all(name.startswith("softmax_warp#") for name in short.values())


def event(cat, name, ts, dur, tid, **args):
    keys = {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": 1, "tid": tid}
    return {**keys, "args": args}


def test_a_trace_with_cuda_kernels_is_read_by_correlation(tmp_path):
    """Kernels launched by autograd's thread, as on a GPU; the operators that launched them are no
    rows then.
    """
    events = [
        {"ph": "M", "name": "process_name", "pid": 1},
        event("user_annotation", "step 0", 0.0, 100.0, 1),
        event("user_annotation", "forward", 1.0, 10.0, 1),
        event("user_annotation", "backward", 12.0, 20.0, 1),
        event("cpu_op", "aten::mm", 2.0, 4.0, 1),
        event("cuda_runtime", "cudaLaunchKernel", 3.0, 1.0, 1, correlation=5),
        event("cuda_driver", "cuLaunchKernelEx", 14.0, 1.0, 2, correlation=6),
        event("kernel", "hopper_fwd_kernel", 20.001, 8.5, 7, stream=7, correlation=5),
        event("kernel", "nvjet_tss_128x64", 30.0, 2.0, 7, stream=7, correlation=6),
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    trace = read_chrome_trace(path)
    table = launches(trace, PHASES, KERNEL_CLASSES)
    assert trace.source == "kineto"
    assert table["kernel_class"].tolist() == ["attention", "matmul"]
    assert table["path"].tolist() == [("step 0", "forward"), ("step 0", "backward")]
    assert table["start_ns"].tolist()[0] == 20_001
    assert table["duration_ns"].tolist() == [8500, 2000]


def test_busy_time_counts_what_overlaps_once():
    for spans, expected in (
        ([(20, 30), (0, 10)], 20),
        ([(0, 100), (10, 20), (50, 120)], 120),
        ([], 0),
    ):
        assert busy_ns(pd.DataFrame(spans, columns=["start_ns", "end_ns"])) == expected


FAKE_NSYS = """#!{python}
import json, os, pathlib, shutil, subprocess, sys
here = pathlib.Path(__file__).resolve().parent
def value(option):
    return next(a.split("=", 1)[1] for a in sys.argv if a.startswith(option + "="))
with open(here / "calls.jsonl", "a") as file:
    file.write(json.dumps({{"arguments": sys.argv[1:], "environment": dict(os.environ)}}) + "\\n")
if sys.argv[1] == "--version":
    print("NVIDIA Nsight Systems version 2025.3.1.90-253135822126v0")
elif sys.argv[1] == "profile" and (here / "old").exists() and "event-trace" in str(sys.argv):
    sys.exit("unrecognised option '--cuda-event-trace=false'\\n\\nusage: nsys profile [<args>]")
elif sys.argv[1] == "profile":
    number = next(n for n, a in enumerate(sys.argv[2:], 2) if not a.startswith("--"))
    subprocess.run(sys.argv[number:], check=False)
    ending = (here / "leaves").read_text()
    if ending:
        pathlib.Path(value("--output") + ending).write_text(json.dumps(dict(os.environ)))
    print("/somewhere/else: Importer error status: Importation failed.")
elif sys.argv[1] == "export" and (here / "export.sqlite").exists():
    shutil.copy(here / "export.sqlite", value("--output"))
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """An nsys on PATH that is a script; `leaves` says what its `profile` writes."""
    target = tmp_path / "bin"
    target.mkdir()
    (target / "nsys").write_text(FAKE_NSYS.format(python=sys.executable))
    (target / "nsys").chmod(0o700)
    (target / "leaves").write_text(".nsys-rep")
    (target / "export.sqlite").write_bytes(FIXTURE.read_bytes())
    monkeypatch.setenv("PATH", f"{target}{os.pathsep}{os.environ['PATH']}")
    return target


def calls(fake: Path) -> list[dict]:
    return [json.loads(line) for line in (fake / "calls.jsonl").read_text().splitlines()]


def test_a_capture_is_made_read_and_deleted_without_the_rest_of_the_environment(
    fake, monkeypatch, tmp_path
):
    monkeypatch.setenv("LABKIT_CANARY", "tweet-tweet")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(profiling.tempfile, "tempdir", str(temporary))
    note = tmp_path / "seen.json"
    code = "import json, os, sys; json.dump(dict(os.environ), open(sys.argv[1], 'w'))"
    trace = Nsys.find().capture([sys.executable, "-c", code, str(note)], timeout_s=60)
    assert trace.version == "2025.3.1.90" and len(trace.operations) == 22
    seen = json.loads(note.read_text())
    assert "PATH" in seen and "LABKIT_CANARY" not in seen
    profile, _ = calls(fake)[1:]
    assert "--trace=cuda,nvtx" in profile["arguments"]
    for call in calls(fake):
        assert "tweet-tweet" not in call["environment"].values()
    assert list(temporary.iterdir()) == []


def test_an_nsys_that_refuses_options_is_asked_again_without_them(fake, tmp_path):
    (fake / "old").touch()
    note = tmp_path / "runs"
    command = [sys.executable, "-c", "import sys; open(sys.argv[1], 'a').write('x')", str(note)]
    kept = tmp_path / "kept.nsys-rep"
    assert len(Nsys.find().capture(command, timeout_s=60, keep=kept).operations) == 22
    assert kept.stat().st_size > 0
    _, first, *_, taken, _ = (call["arguments"] for call in calls(fake))
    refused = set(profiling.NEWER_OPTIONS)
    assert refused < set(first) and not refused & set(taken)
    assert note.read_text() == "x", "the program runs once"


def test_a_capture_that_fails_says_what_is_missing(fake):
    (fake / "export.sqlite").write_text("no database at all " * 100)
    with pytest.raises(ProfileError, match=r"^capture\.sqlite cannot be read as an SQLite export"):
        Nsys.find().capture([sys.executable, "-c", "pass"], timeout_s=60)


def test_an_nsys_that_cannot_read_its_captures_is_not_used(fake, capsys):
    (fake / "leaves").write_text("")
    Nsys.usable.cache_clear()
    assert Nsys.usable() is None
    Nsys.usable.cache_clear()
    failure = "nsys left no report: else: Importer error status: Importation failed."
    place = "labkit: torch.profiler takes the place of nsys: "
    assert capsys.readouterr().err == f"{place}{failure}\n"
    (check,) = (one for one in checks(Nsys.find().failure) if one.name == "nsys")
    assert (check.present, check.detail) == (False, failure)


DAEMON = """
import os, subprocess, sys, time
code = "import os, sys, time; os.setsid(); open(sys.argv[1], 'w').close(); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", code, sys.argv[1]])
while not os.path.exists(sys.argv[1]):
    time.sleep(0.02)
time.sleep(600)
"""


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")
def test_no_process_is_left_even_one_that_left_the_group(fake, tmp_path, monkeypatch):
    # Any variable that is passed on tells the processes of this test from others.
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    note = tmp_path / "started"
    command = [sys.executable, "-c", DAEMON, str(note)]
    with pytest.raises(TimeoutError, match="nsys was stopped: the capture took longer than 4 s"):
        Nsys.find().capture(command, timeout_s=4)
    assert note.exists()
    assert is_true_within(5, lambda: not holding(os.fsencode(tmp_path)))
