"""A thousand damaged files: each is an error that names the file, or is read to a result that can
be used.

Files of every kind are damaged byte by byte (cut, flipped, overwritten, duplicated) and value by
value (another type, NULL, NaN, a huge number, a missing, duplicated or foreign entry). Each test
draws from a seed of its own.
"""

import copy
import json
import pickle
import random
import sqlite3
import warnings
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest

from labkit import records
from labkit.measure.profiling import (
    ProfileError,
    launches,
    read_chrome_trace,
    read_nsys,
    statistics_by,
)
from labkit.measure.snapshots import SnapshotError, read_history
from labkit.records import Record, RecordError, RecordStore, newest, to_frame
from labkit.report import card

FIXTURE = Path(__file__).parent / "fixtures" / "nsys_2025.3.1_h200.sqlite"
NOTEBOOK = "01_benchmarking"

HOSTILE = [
    None,
    True,
    -1,
    0,
    2**31,
    2**63 - 1,
    -(2**63),
    0.5,
    1e300,
    "",
    "banana",
    "59",
    "é\n",
    b"\xff\xfe",
    [],
]
ONLY_IN_PYTHON = [
    2**63,
    2**80,
    10**400,
    float("nan"),
    float("inf"),
    -float("inf"),
    {},
    [[]],
    {"a": [None]},
    "\ud800",
]


def nested(depth: int):
    return [nested(depth - 1)] if depth else []


def damage_bytes(content: bytes, generator: random.Random) -> bytes:
    """Cuts, flips, overwrites, doubles or takes out bytes; not always at random, since a header is
    soon hit.
    """
    position = generator.randrange(len(content))
    end = min(len(content), position + generator.choice([1, 4, 64]))
    kind = generator.randrange(6)
    if kind == 0:
        return content[:position]
    if kind == 1:
        flipped = bytearray(content)
        for _ in range(generator.choice([1, 3, 30])):
            flipped[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
        return bytes(flipped)
    if kind == 2:
        return content[:position] + generator.randbytes(end - position) + content[end:]
    if kind == 3:
        return content[:end] + content[position:]
    if kind == 4:
        return content[:position] + content[end:]
    return (
        content[:position]
        + generator.choice([b"\xff", b"\0", b"\xed\xa0\x80", b"NaN", b"[" * 5000])
        + content[end:]
    )


def damage_value(value, generator: random.Random):
    """Replaces, takes out or doubles one entry somewhere in a value made of dicts and lists, which
    it changes.
    """
    holder = value
    while True:
        keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
        if not keys:
            return value
        key = generator.choice(keys)
        inner = holder[key]
        if not isinstance(inner, dict | list) or not inner or generator.random() < 0.2:
            break
        holder = inner
    kind = generator.randrange(8)
    if kind == 0:
        del holder[key]
    elif kind == 1 and isinstance(holder, list):
        holder.insert(key, copy.deepcopy(inner))
    elif kind == 1:
        holder[generator.choice(["colour", "", "é" * 300])] = inner
    elif kind == 2 and isinstance(inner, int | float):
        holder[key] = -inner
    elif kind == 3:
        holder[key] = nested(generator.choice([3, 30, 300]))
    elif kind == 4:
        holder[key] = str(inner)
    else:
        holder[key] = copy.deepcopy(generator.choice(HOSTILE + ONLY_IN_PYTHON))
    return value


def as_json(value) -> bytes:
    return json.dumps(value, default=lambda held: held.decode("latin-1")).encode()


def damaged(value, generator: random.Random, *, encode=as_json, bytes_share: float = 0.4) -> bytes:
    """Returns a file of a value, of which bytes or an entry are damaged."""
    if generator.random() < bytes_share:
        return damage_bytes(encode(value), generator)
    return encode(damage_value(copy.deepcopy(value), generator))


def check_damaged(
    path: Path, error: type[Exception], num_files: int, least_refused: int, write, use
) -> None:
    """Asserts that a damaged file is used, or refused by a message that names it in a few lines.

    And that the damage of all of them was neither harmless nor all found by the first check.
    """
    outcomes = []
    for number in range(num_files):
        path.unlink(missing_ok=True)
        write(number)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter(
                    "error", RuntimeWarning
                )  # a number that overflowed on the way
                use()
            outcomes.append("read")
        except error as refused:
            message = str(refused)
            assert str(path) in message, message
            assert len(message) < len(str(path)) + 500, message
            assert path.suffix != ".jsonl" or ", line " in message, message
            outcomes.append(message)
    refused = [message for message in outcomes if message != "read"]
    assert len(refused) >= least_refused and len(set(refused)) >= least_refused // 4
    assert "read" in outcomes


def use_trace(path: Path, read) -> None:
    trace = read(path)
    table = launches(trace, ("mm", "softmax"))
    statistics_by(table, ["kernel_class", "range"])
    times = table[["start_ns", "end_ns", "duration_ns"]]
    assert (times.dtypes == "int64").all() and (table["duration_ns"] >= 0).all()
    assert (table["end_ns"] >= table["start_ns"]).all() and trace.total_ns >= 0
    assert table["launched_ns"].notna().any() and len(trace.ranges) > 0


def damage_capture(path: Path, generator: random.Random) -> None:
    """Damages bytes of an export, or cells, rows and columns of its tables without the guards of
    their schema.
    """
    if generator.random() < 0.4:
        path.write_bytes(damage_bytes(FIXTURE.read_bytes(), generator))
        return
    with sqlite3.connect(FIXTURE) as source:
        tables = [
            name
            for (name,) in source.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        ]
        content = {}
        for table in tables:
            cursor = source.execute(f"SELECT * FROM {table}")
            content[table] = (
                [column for column, *_ in cursor.description],
                [list(row) for row in cursor],
            )
    source.close()
    table = generator.choice(tables)
    names, rows = content[table]
    read = {
        "start",
        "end",
        "streamId",
        "correlationId",
        "globalPid",
        "globalTid",
        "demangledName",
        "eventType",
        "id",
        "value",
        "text",
        "textId",
    }
    column = names.index(generator.choice([name for name in names if name in read]))
    kind = generator.randrange(10)
    if kind == 0:
        rows.clear()
    elif kind == 1:
        rows.insert(0, list(generator.choice(rows)))
    elif kind == 2:
        names[column] = "colour"
    elif kind == 3:
        del content[table]
    else:
        value = generator.choice(HOSTILE[:-1])
        for row in rows if generator.random() < 0.3 else [generator.choice(rows)]:
            row[column] = value
    with sqlite3.connect(path) as connection:
        for table, (names, rows) in content.items():
            columns = ", ".join(f'"{name}"' for name in names)
            connection.execute(f"CREATE TABLE {table} ({columns})")
            connection.executemany(
                f"INSERT INTO {table} VALUES ({', '.join('?' * len(names))})", rows
            )
        if generator.random() < 0.2:
            text = generator.choice(["StringIds SET value", "NVTX_EVENTS SET text"])
            if text.split()[0] in content:
                if text.split()[-1] in content[text.split()[0]][0]:
                    connection.execute(f"UPDATE {text} = CAST(x'ff41' AS TEXT) WHERE rowid = 1")
    connection.close()


def test_damaged_captures(tmp_path):
    generator, path = random.Random(1), tmp_path / "capture.sqlite"
    damage, use = lambda _: damage_capture(path, generator), lambda: use_trace(path, read_nsys)
    check_damaged(path, ProfileError, 300, 150, damage, use)


def test_damaged_traces_of_torch_profiler(tmp_path):
    def event(cat, name, ts, dur, tid=1, **args):
        return {
            "ph": "X",
            "cat": cat,
            "name": name,
            "ts": ts,
            "dur": dur,
            "pid": 1,
            "tid": tid,
            "args": args,
        }

    launched = [
        event("user_annotation", "forward", 1.0, 10.0),
        event("cpu_op", "aten::mm", 2.0, 4.0),
        event("cpu_op", "aten::softmax", 7.0, 2.5),
    ]
    kernels = [
        event("cuda_runtime", "cudaLaunchKernel", 3.0, 1.0, correlation=5),
        event("kernel", "ampere_sgemm_128x64_tn", 20.0, 8.5, 7, stream=7, correlation=5),
    ]
    generator, path = random.Random(2), tmp_path / "trace.json"

    def write(number):
        path.write_bytes(
            damaged({"traceEvents": launched + (kernels if number % 2 else [])}, generator)
        )

    check_damaged(path, ProfileError, 100, 40, write, lambda: use_trace(path, read_chrome_trace))


def genuine_record() -> Record:
    return Record(
        notebook=NOTEBOOK,
        section="steps",
        case={"size": "small", "shape": [4, 128]},
        phase="forward",
        status="ok",
        device="a-device",
        measurement_version=3,
        metrics={
            "min_ms": 0.9,
            "p20_ms": 1.0,
            "median_ms": 1.25,
            "p80_ms": 1.5,
            "n": 10,
            "peak_bytes": 4096,
        },
        samples={"device_ms": [1.0, 1.5, 1.25]},
        timer={"method": "window", "num_warmup": 5},
        telemetry={
            "throttle_reasons": ["power"],
            "sm_clock_mhz_min": 1980,
            "disturbed_by": {"make": [1, 2.5]},
        },
        observed={"dtypes": {"weight": "bf16"}, "kernels": [{"name": "mm", "us": 3.5}]},
        software={"torch": "2.11.0", "driver": "580.159.04"},
        source={"commit": "abcdef123456", "dirty": False},
        recorded_at="2026-01-02T03:04:05+00:00",
    )


def render_environment(environment: dict, loaded: list[Record]) -> None:
    """Renders what the report shows of an environment and of records."""
    told = {"all_records": lambda: loaded, "every_record": lambda: loaded}
    chapter = SimpleNamespace(device_name="a-device", environment=environment, **told)
    card.provenance({NOTEBOOK: chapter}).encode("utf-8")


def test_damaged_records(tmp_path):
    generator, path, copied = (
        random.Random(3),
        tmp_path / f"{NOTEBOOK}.jsonl",
        tmp_path / "copy.jsonl",
    )
    line = as_json(asdict(genuine_record())) + b"\n"

    def write(_):
        copied.unlink(missing_ok=True)
        if generator.random() < 0.35:
            path.write_bytes(damage_bytes(line + line, generator))
        else:
            path.write_bytes(
                line + as_json(damage_value(asdict(genuine_record()), generator)) + b"\n"
            )

    def use():
        loaded = newest(RecordStore(path).load())
        to_frame(loaded).to_markdown()
        render_environment({}, loaded)
        for record in loaded:
            record.resume_key()
            RecordStore(copied).append(record)
        if loaded:
            assert newest(RecordStore(copied).load())[-1] in loaded

    check_damaged(path, RecordError, 250, 100, write, use)


ENVIRONMENT = {
    "device": {"name": "an H200", "kind": "cuda", "slug": "a-device"},
    "gpu": {
        "num_multiprocessors": 132,
        "memory_bytes": 2**37,
        "compute_capability": "9.0",
        "power_limit_w": 700.0,
        "max_sm_clock_mhz": 1980,
    },
    "cpu": {"name": "a processor", "num_cores": 16},
    "datasheet": None,
}
DONE = {"notebook": NOTEBOOK, "session": "x", "profile": "full", "num_missing": 0}


@pytest.mark.parametrize(
    ("name", "genuine", "seed"), [("environment", ENVIRONMENT, 4), ("done", DONE, 5)]
)
def test_damaged_environments_and_done_files(tmp_path, name, genuine, seed):
    generator = random.Random(seed)
    path = (
        tmp_path / "environment.json"
        if name == "environment"
        else records.done_path(tmp_path, NOTEBOOK)
    )
    path.parent.mkdir(exist_ok=True)

    def use():
        if name == "environment":
            render_environment(records.read_environment(tmp_path), [genuine_record()])
        else:
            done = records.read_done(tmp_path, NOTEBOOK)
            assert done["num_missing"] >= 0 and done["profile"].encode("utf-8") is not None

    check_damaged(
        path, RecordError, 100, 40, lambda _: path.write_bytes(damaged(genuine, generator)), use
    )


def test_damaged_snapshots(tmp_path):
    frames = [{"filename": "/x/model.py", "line": 7, "name": "forward"}]
    genuine = {
        "segments": [
            {
                "device": 0,
                "address": 0,
                "total_size": 8192,
                "blocks": [
                    {"size": 1024, "requested_size": 1000, "state": "active_allocated"},
                    {"size": 7168, "requested_size": 0, "state": "inactive"},
                ],
            },
        ],
        "device_traces": [
            [
                {"action": "free_requested", "addr": 4096, "size": 400, "frames": frames},
                {"action": "free_completed", "addr": 4096, "size": 400, "frames": frames},
                {"action": "alloc", "addr": 2048, "size": 50, "frames": frames},
                {"action": "alloc", "addr": 0, "size": 1000, "frames": frames},
                {"action": "free_requested", "addr": 2048, "size": 50, "frames": frames},
            ]
        ],
    }
    generator = random.Random(8)
    generator, path = random.Random(8), tmp_path / "snapshot.pickle"

    def use():
        history = read_history(path)
        totals = history.totals()
        assert (totals >= 0).all() and history.peak_bytes == totals.max() < 2**63
        history.series(lambda allocation: allocation.frame, 10)

    write = lambda _: path.write_bytes(damaged(genuine, generator, encode=pickle.dumps))  # noqa: E731
    check_damaged(path, SnapshotError, 250, 100, write, use)
