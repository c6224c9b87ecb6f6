"""Hundreds of damaged files: each is an error that names the file, or is read to a result that can
be used.

Files of every kind are damaged byte by byte (cut, flipped, overwritten, doubled) and value by value
(another type, NaN, a huge number, an entry that is missing or foreign).
"""

import copy
import json
import pickle
import random
import sqlite3
import warnings
from dataclasses import asdict
from pathlib import Path

from labkit.measure.memory import SnapshotError, read_history
from labkit.measure.profiling import ProfileError, launches, read_chrome_trace, read_nsys
from labkit.records import Record, RecordError, RecordStore, newest, to_frame

FIXTURE = Path(__file__).parent / "fixtures" / "nsys_2025.3.1_h200.sqlite"
NOTEBOOK = "01_benchmarking"

HOSTILE = [None, True, -1, 0, 2**31, 2**63 - 1, -(2**63), 0.5, 1e300, "", "banana", "59", "é\n"]
ONLY_IN_PYTHON = [[], {}, 2**63, 10**400, float("nan"), -float("inf"), [[]] * 300, "\ud800"]


def damage_bytes(content: bytes, generator: random.Random) -> bytes:
    """Cuts, flips, overwrites, doubles or takes out bytes."""
    begin = generator.randrange(len(content))
    end = min(len(content), begin + generator.choice([1, 4, 64]))
    flipped = bytes([content[begin] ^ 1 << generator.randrange(8)])
    noise = generator.choice([generator.randbytes(end - begin), b"\xff", b"NaN", b"[" * 5000])
    return generator.choice(
        [
            content[:begin],
            content[:begin] + flipped + content[begin + 1 :],
            content[:begin] + noise + content[end:],
            content[:end] + content[begin:],
            content[:begin] + content[end:],
        ]
    )


def damage_value(value, generator: random.Random) -> None:
    """Replaces, renames or takes out one entry somewhere in a value made of dicts and lists."""
    inner = value
    while isinstance(inner, dict | list) and inner and (inner is value or generator.random() < 0.8):
        holder = inner
        key = generator.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
        inner = holder[key]
    kind = generator.randrange(6)
    if kind == 0:
        del holder[key]
    elif kind == 1 and isinstance(holder, dict):
        holder[generator.choice(["colour", "", "é" * 300])] = holder.pop(key)
    elif kind == 2:
        holder[key] = str(inner)
    else:
        holder[key] = copy.deepcopy(generator.choice(HOSTILE + ONLY_IN_PYTHON))


def damaged(value, generator: random.Random, encode=lambda value: json.dumps(value).encode()):
    """Returns a file of a value, of which bytes or an entry are damaged."""
    if generator.random() < 0.4:
        return damage_bytes(encode(value), generator)
    value = copy.deepcopy(value)
    damage_value(value, generator)
    return encode(value)


def check_damaged(path: Path, error: type[Exception], num_files: int, write, use) -> None:
    """Asserts that a damaged file is used, or refused by a message that names it in a few lines.

    And that the damage of all of them was neither harmless nor all found by the first check.
    """
    generator = random.Random(0)
    num_read, messages = 0, []
    for _ in range(num_files):
        path.unlink(missing_ok=True)
        write(generator)
        try:
            with warnings.catch_warnings():
                # A number that overflowed on the way.
                warnings.simplefilter("error", RuntimeWarning)
                use()
            num_read += 1
        except error as refused:
            message = str(refused)
            assert path.name in message, message
            assert len(message) < len(str(path)) + 500, message
            assert path.suffix != ".jsonl" or ", line " in message, message
            messages.append(message)
    assert num_read and len(set(messages)) >= num_files // 10


def use_trace(trace) -> None:
    table = launches(trace, ("mm", "softmax"))
    times = table[["start_ns", "end_ns", "duration_ns"]]
    assert (times.dtypes == "int64").all() and (table["duration_ns"] >= 0).all()
    assert (table["end_ns"] >= table["start_ns"]).all() and trace.total_ns >= 0
    assert table["launched_ns"].notna().any() and len(trace.ranges) > 0


def test_damaged_captures(tmp_path):
    path = tmp_path / "capture.sqlite"
    with sqlite3.connect(FIXTURE) as connection:
        cells = [
            (table, column)
            for (table,) in connection.execute("SELECT name FROM sqlite_master WHERE type='table'")
            for _, column, *_ in connection.execute(f"PRAGMA table_info({table})")
        ]
    connection.close()

    def write(generator):
        path.write_bytes(FIXTURE.read_bytes())
        if generator.random() < 0.4:
            path.write_bytes(damage_bytes(FIXTURE.read_bytes(), generator))
            return
        table, column = generator.choice(cells)
        rows = generator.choice(["rowid = 1", "TRUE"])
        with sqlite3.connect(path) as damaging:
            damaging.execute(
                f'UPDATE OR IGNORE {table} SET "{column}" = ? WHERE {rows}',
                [generator.choice(HOSTILE)],
            )
        damaging.close()

    check_damaged(path, ProfileError, 80, write, lambda: use_trace(read_nsys(path)))


def test_damaged_traces_of_torch_profiler(tmp_path):
    def event(cat, name, ts, dur, **args):
        keys = {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": 1, "tid": 1}
        return keys | {"args": args}

    host = [
        event("user_annotation", "forward", 1.0, 10.0),
        event("cpu_op", "aten::mm", 2.0, 4.0),
        event("cpu_op", "aten::softmax", 7.0, 2.5),
    ]
    device = [
        event("cuda_runtime", "cudaLaunchKernel", 3.0, 1.0, correlation=5),
        event("kernel", "ampere_sgemm_128x64_tn", 20.0, 8.5, stream=7, correlation=5),
    ]
    path = tmp_path / "trace.json"

    def write(generator):
        events = generator.choice([host, host + device])
        path.write_bytes(damaged({"traceEvents": events}, generator))

    check_damaged(path, ProfileError, 100, write, lambda: use_trace(read_chrome_trace(path)))


RECORD = Record(
    notebook=NOTEBOOK,
    section="steps",
    case={"size": "small", "shape": [4, 128]},
    phase="forward",
    status="ok",
    device="a-device",
    measurement_version=3,
    metrics={"min_ms": 0.9, "p20_ms": 1.0, "median_ms": 1.25, "p80_ms": 1.5, "n": 10},
    samples={"device_ms": [1.0, 1.5, 1.25]},
    timer={"method": "window", "num_warmup": 5},
    telemetry={"throttle_reasons": ["power"], "disturbed_by": {"make": [1, 2.5]}},
    observed={"dtypes": {"weight": "bf16"}, "kernels": [{"name": "mm", "us": 3.5}]},
    software={"torch": "2.11.0", "driver": "580.159.04"},
    source={"commit": "abcdef123456", "dirty": False},
    recorded_at="2026-01-02T03:04:05+00:00",
)


def test_damaged_records(tmp_path):
    path, copied = tmp_path / f"{NOTEBOOK}.jsonl", tmp_path / "copy.jsonl"
    line = json.dumps(asdict(RECORD)).encode() + b"\n"

    def write(generator):
        copied.unlink(missing_ok=True)
        if generator.random() < 0.35:
            path.write_bytes(damage_bytes(line + line, generator))
        else:
            value = asdict(RECORD)
            damage_value(value, generator)
            path.write_bytes(line + json.dumps(value).encode() + b"\n")

    def use():
        loaded = newest(RecordStore(path).load())
        to_frame(loaded).to_markdown()
        for record in loaded:
            record.resume_key()
            RecordStore(copied).append(record)
        if loaded:
            assert newest(RecordStore(copied).load())[-1] in loaded

    check_damaged(path, RecordError, 150, write, use)


def test_damaged_snapshots(tmp_path):
    frames = [{"filename": "/x/model.py", "line": 7, "name": "forward"}]
    blocks = [
        {"size": 1024, "requested_size": 1000, "state": "active_allocated"},
        {"size": 7168, "requested_size": 0, "state": "inactive"},
    ]
    genuine = {
        "segments": [{"device": 0, "address": 0, "total_size": 8192, "blocks": blocks}],
        "device_traces": [
            [
                {"action": "free_requested", "addr": 4096, "size": 400, "frames": frames},
                {"action": "alloc", "addr": 2048, "size": 50, "frames": frames},
                {"action": "alloc", "addr": 0, "size": 1000, "frames": frames},
                {"action": "free_requested", "addr": 2048, "size": 50, "frames": frames},
            ]
        ],
    }
    path = tmp_path / "snapshot.pickle"

    def write(generator):
        path.write_bytes(damaged(genuine, generator, encode=pickle.dumps))

    def use():
        history = read_history(path)
        totals = history.totals()
        assert (totals >= 0).all() and history.peak_bytes == totals.max() < 2**63
        history.series(lambda allocation: allocation.frame, 10)

    check_damaged(path, SnapshotError, 250, write, use)
