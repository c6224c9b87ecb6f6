"""A case that fails harms no other, nothing outlives a session, and a killed session is resumed
exactly.
"""

import errno
import json
import multiprocessing
import os
import random
import re
import signal
import time
from collections import Counter, defaultdict
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
from conftest import ALL_TESTS
from faulty_experiment import MARK, NOTEBOOK, PHASES, make_case, open_session, prepare, start
from processes import holding, is_true_within

from labkit import configs
from labkit.device import detect
from labkit.experiments import sweep
from labkit.records import Record, RecordError, RecordStore, newest

TIMEOUT_S = 2.5
GONE_WITHIN_S = 5.0


pytestmark = pytest.mark.usefixtures("plain_workers")


@pytest.fixture
def log(tmp_path) -> Path:
    return tmp_path / "steps_taken"


@pytest.fixture
def output(tmp_path) -> Path:
    return tmp_path / "figures"


def taken(log: Path) -> list[dict]:
    """Returns the steps that workers noted, oldest first; a line that is just being written is left
    out.
    """
    return [json.loads(line) for line in log.read_text().split("\n")[:-1]] if log.exists() else []


def started(log: Path, name: str, without: str = "") -> list[str]:
    """Returns the steps of one case, without its building."""
    steps = [step["step"] for step in taken(log) if step["name"] == name]
    return [step for step in steps if step not in ("build", without)]


def store(output: Path) -> RecordStore:
    return RecordStore(output / detect().slug / "records" / f"{NOTEBOOK}.jsonl")


def records_of(output: Path, name: str) -> dict[str, Record]:
    """Returns the records of one case by phase; a phase recorded twice fails."""
    records = [record for record in store(output).load() if record.case["name"] == name]
    by_phase = {record.phase: record for record in records}
    assert len(by_phase) == len(records)
    return by_phase


def outcome(output: Path, name: str) -> dict[str, tuple[str, str]]:
    return {
        phase: (record.status, record.reason) for phase, record in records_of(output, name).items()
    }


def run(output: Path, plan: list[sweep.Case], *, fresh: bool = False) -> None:
    sweep.measure([open_session(output, plan, fresh=fresh)])


ENDED = {
    "torch_out_of_memory": ("oom", "OutOfMemoryError: Tried to allocate 2.00 GiB"),
    "memory_error": ("oom", "MemoryError: no room for the list"),
    "cpu_out_of_memory": ("oom", "DefaultCPUAllocator: can't allocate memory"),
    "unrelated_text": ("error", "RuntimeError: page 3 of 'Running out of memory' was not found"),
    "exit": ("error", "the worker ended with exit code 3"),
    "kill": ("error", "the worker was killed by SIGKILL"),
    "unpicklable": ("error", "pickle"),  # cannot be sent
    "hang": ("timeout", f"no result within {TIMEOUT_S:g} s"),
    "hang_with_the_interpreter": ("timeout", f"no result within {TIMEOUT_S:g} s"),
    "child_and_hang": ("timeout", f"no result within {TIMEOUT_S:g} s"),
}
"""Faults that end the worker, and what the record then says, in one line."""

REFUSED = {
    "nan": ("error", "refused: median_ms is nan"),
    "other_label": ("error", "ran {'name': 'something else'}"),
    "foreign_number": ("error", "float32"),  # cannot be written
}
"""Results that cannot be true: the worker is sound, the number is not."""

KEPT = REFUSED | {"skip": ("skipped", "this device has no such unit"), "child": ("ok", "")}
ALL_OK = dict.fromkeys(PHASES, ("ok", ""))

HITS = [
    *((behaviour, "second", ("second",)) for behaviour in (*ENDED, *KEPT)),
    # A case that cannot be built loses all its phases at once.
    *((behaviour, "build", PHASES) for behaviour in ("memory_error", "exit", "hang", "skip")),
    # A failure after the last phase takes nothing back.
    *((behaviour, "after", ()) for behaviour in ("memory_error", "exit", "end_when_done")),
]


def test_a_fault_costs_what_it_hits_and_the_worker_if_it_ends_that(output, log):
    plan = [make_case("first", log)]
    for behaviour, at, _ in HITS:
        slow = {"timeout_s": TIMEOUT_S} if "hang" in behaviour else {}
        plan.append(make_case(f"{behaviour} {at}", log, behaviour, at, **slow))
        plan.append(make_case(f"after {behaviour} {at}", log))
    run(output, plan)
    steps = taken(log)
    children = {step["pid"] for step in steps if step["step"] == "child"}
    assert len(children) == 2 and is_true_within(
        GONE_WITHIN_S, lambda: not children & set(holding(b"="))
    )
    assert not any(step.get("num_alive") for step in steps), "one case lies beside the next"
    before = "first"
    for behaviour, at, lost in HITS:
        name, after = f"{behaviour} {at}", f"after {behaviour} {at}"
        records = records_of(output, name)
        assert set(records) == set(PHASES)
        for phase, record in records.items():
            status, reason = (ENDED | KEPT)[behaviour] if phase in lost else ("ok", "")
            assert record.status == status, (name, phase, record.reason)
            assert reason in record.reason and "\n" not in record.reason, (name, phase)
            assert (status == "ok") == bool(record.metrics), (name, phase)
        assert outcome(output, after) == ALL_OK
        assert started(log, name, without="child") == ([] if at == "build" else list(PHASES))
        workers = {
            record.observed["pid"]
            for one in (before, name, after)
            for record in records_of(output, one).values()
            if record.status == "ok"
        }
        assert len(workers) == (1 if behaviour in KEPT else 2), name
        before = after


def test_stop_at_failure_skips_what_comes_after_and_the_session_counts(output, log, capsys):
    behaviours = ("exit", "skip", "other_label")
    plan = [make_case(one, log, one, "second", stop_at_failure=True) for one in behaviours]
    run(output, [*plan, make_case("after", log)])
    for behaviour in behaviours:
        status, _ = (ENDED | KEPT)[behaviour]
        first, second, third = outcome(output, behaviour).values()
        assert (first, second[0]) == (("ok", ""), status)
        assert third == ("skipped", f"not run: second before it ended {status}")
    # A worker that goes on may have begun the next phase.
    assert started(log, "exit") == ["first", "second"]
    assert outcome(output, "after") == ALL_OK
    assert "steps: 2 error, 6 ok, 4 skipped\n" in capsys.readouterr().out


def test_fresh_process_gets_a_worker_that_has_done_nothing(output, log):
    plan = [
        make_case("a", log),
        make_case("b", log, fresh_process=True),
        make_case("c", log),
        make_case("d", log, "exit", "second"),
        make_case("e", log, "skip", "first", fresh_process=True),
    ]
    run(output, plan)
    first_case_of = {}
    for step in taken(log):
        first_case_of.setdefault(step["worker"], step["name"])
    # The case after a fresh one may reuse its worker, and what follows a failure gets another.
    assert "".join(first_case_of.values()) == "abde"


def test_each_session_measures_its_own_ceilings_first_and_they_reach_the_other_cases(output, log):
    def named(ceilings: dict) -> dict:
        return {key.split()[0]: x for key, x in ceilings.items() if key.endswith(" rate")}

    roof = {"section": "ceilings", "phases": ("rate",)}
    behaviours = {"copy": "none", "product": "none", "broken": "nan"}
    ceilings = [make_case(name, log, kind, **roof) for name, kind in behaviours.items()]
    plan = [make_case("a", log), *ceilings, make_case("b", log, "exit", "first")]
    run(output, plan)
    sections = [record.section for record in store(output).load()]
    assert sections == ["ceilings"] * 3 + ["steps"] * 6
    run(output, [*plan, make_case("c", log)])
    rates = defaultdict(dict)  # by session
    for record in store(output).load():
        if record.section == "ceilings" and record.metrics:
            rates[record.session][record.case["name"]] = record.metrics["rate"]
    first, second = rates.values()
    assert set(first) == set(second) == {"copy", "product"} and first != second
    # The phases after the one that took the worker with it get them too.
    for name, num_phases, expected_rates in (("a", 3, first), ("b", 2, first), ("c", 3, second)):
        records = [record for record in records_of(output, name).values() if record.observed]
        found = [named(record.observed["ceilings"]) for record in records]
        assert found == [expected_rates] * num_phases


def test_a_disturbed_phase_is_repeated_in_fresh_processes_and_the_least_disturbed_kept(output, log):
    expected = {
        "busy_once": (2.0, False, [*PHASES, "second"]),
        "busy": (2.0, True, [*PHASES, "second", "second"]),
        "busy_then_exit": (1.0, True, [*PHASES, "second"]),
    }
    run(output, [make_case(behaviour, log, behaviour, "second") for behaviour in expected])
    for behaviour, (kept, disturbed, steps) in expected.items():
        assert outcome(output, behaviour) == ALL_OK
        record = records_of(output, behaviour)["second"]
        assert (record.metrics["median_ms"], record.telemetry["disturbed"]) == (kept, disturbed)
        assert ("cpu_wait_fraction" in record.telemetry) is disturbed
        assert started(log, behaviour) == steps
        attempts = [s for s in taken(log) if (s["name"], s["step"]) == (behaviour, "second")]
        assert len({attempt["worker"] for attempt in attempts}) == len(attempts)


def test_what_is_recorded_is_run_again_on_another_machine_or_when_asked(output, log, monkeypatch):
    behaviours = ["none", "memory_error", "exit", "skip", "nan"]
    plan = [make_case(behaviour, log, behaviour, "second") for behaviour in behaviours]
    run(output, plan)
    recorded, steps = store(output).path.read_bytes(), log.read_bytes()
    run(output, plan)
    assert (store(output).path.read_bytes(), log.read_bytes()) == (recorded, steps)
    run(output, plan[:1], fresh=True)
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(sweep, "machine_id", lambda: "another")
        run(output, plan[:1])
        run(output, plan[:1])
    assert started(log, "none") == [*PHASES, *PHASES, *PHASES]
    assert store(output).path.read_bytes().startswith(recorded)
    assert newest(store(output).load())[-3:] == store(output).load()[-3:]


def test_a_full_disk_ends_the_session_in_one_line_and_costs_one_record(output, log, monkeypatch):
    """The last line is torn, as where a part of it still had room; the next session goes on."""
    plan = [make_case("only", log)]
    fsync = os.fsync

    def fill(descriptor: int) -> None:
        if len(store(output).load()) == 2:
            os.ftruncate(descriptor, os.fstat(descriptor).st_size - 20)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    with monkeypatch.context() as full, pytest.raises(RecordError) as error:
        full.setattr(os, "fsync", fill)
        run(output, plan)
    assert re.search("second.* cannot be written .No space left", str(error.value))
    assert "\n" not in str(error.value)
    assert list(records_of(output, "only")) == [PHASES[0]]
    run(output, plan)
    assert set(records_of(output, "only")) == set(PHASES)
    assert started(log, "only").count(PHASES[0]) == 1


class Server:
    """Runs sessions of the faulty experiment in processes of their own, which another forks."""

    def __init__(self, stderr: Path):
        self.stderr = stderr
        context = multiprocessing.get_context("spawn")
        self.forking = ProcessPoolExecutor(1, context, prepare, (stderr,))

    def start(self, output: Path, plan: list[sweep.Case], mark: str = "") -> int:
        """Starts a session and returns its process id."""
        return self.forking.submit(start, output, plan, mark).result()

    def end(self, pid: int) -> int:
        """Waits for a session and returns its exit code, negative for a signal."""
        _, status = self.forking.submit(os.waitpid, pid, 0).result()
        return os.waitstatus_to_exitcode(status)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = Server(tmp_path_factory.mktemp("server") / "stderr")
    with server.forking:
        yield server


def are_gone(mark: str) -> bool:
    """Returns whether no process has inherited `mark`, a few seconds from now at the latest."""
    return is_true_within(GONE_WITHIN_S, lambda: not holding(f"{MARK}={mark}\0".encode()))


def recorded(output: Path) -> Counter[tuple[str, str]]:
    """Returns how often each phase of each case was recorded."""
    return Counter((record.case["name"], record.phase) for record in store(output).load())


def lines(output: Path) -> bytes:
    """Returns the records' file up to the last whole line."""
    path = store(output).path
    content = path.read_bytes() if path.exists() else b""
    return content[: content.rfind(b"\n") + 1]


@pytest.mark.slow
def test_a_session_killed_at_random_points_is_resumed_exactly(output, log, server):
    generator = random.Random(20)
    num_kills = 20 if ALL_TESTS else 8
    num_cases = 12 * num_kills
    # A worker's death now and then, so that the session is also killed while it replaces one.
    faults = {7: ("exit", "second")}
    plan = [
        make_case(f"case {i}", log, *faults.get(i % 16, ("brief",)), phases=PHASES[:2])
        for i in range(num_cases)
    ]
    grid = {(case.parameters["name"], phase) for case in plan for phase in case.phases}

    def started_by(mark: str) -> Counter[tuple[str, str]]:
        steps = [(step["name"], step["step"]) for step in taken(log) if step["mark"] == mark]
        return Counter(step for step in steps if step in grid)

    for kill in range(num_kills):
        mark = f"{os.getpid()}-{kill}"
        before, done_before = lines(output), recorded(output)
        pid = server.start(output, plan, mark)
        if kill % 4:  # while it measures, else anywhere from its start
            assert is_true_within(30, lambda mark=mark: started_by(mark))
        time.sleep(generator.uniform(0, 0.25 if kill % 4 else 0.6))
        assert len(recorded(output)) < len(grid), "the grid is too small for this machine"
        os.kill(pid, signal.SIGKILL)
        assert server.end(pid) == -signal.SIGKILL
        assert are_gone(mark)

        ran, done = started_by(mark), recorded(output)
        assert lines(output).startswith(before), "a record was lost or changed"
        assert set(done.values()) <= {1}, "a phase was recorded twice"
        assert not ran.keys() & done_before.keys(), "a recorded phase was run again"
        # The worker goes on to the next phase of a case while the one before it is being written.
        in_flight = {name for name, _ in ran.keys() - done.keys()}
        assert len(in_flight) <= 1, "more than the case in flight was lost"

    assert server.end(server.start(output, plan)) == 0
    assert recorded(output) == dict.fromkeys(grid, 1)
    statuses = Counter(record.status for record in store(output).load())
    num_exits = len([i for i in range(num_cases) if i % 16 == 7])
    assert statuses == {"ok": 2 * num_cases - num_exits, "error": num_exits}


def test_one_run_at_a_time_measures_on_a_device(tmp_path, log, server):
    pid = server.start(tmp_path / "a", [make_case("held", log, "hang", "second")])
    assert is_true_within(30, lambda: "second" in started(log, "held"))
    waiting = server.start(tmp_path / "b", [make_case("waiting", log)])
    holder = rf"waiting for another labkit run \({NOTEBOOK}, process {pid}, since \d\d:\d\d\) to "
    assert is_true_within(30, lambda: re.search(holder, server.stderr.read_text()))
    with pytest.raises(configs.RequestError, match="not " + holder):
        sweep.measuring_lock(detect(), NOTEBOOK, wait=False).__enter__()
    assert {step["name"] for step in taken(log)} == {"held"}
    os.kill(pid, signal.SIGKILL)
    assert server.end(pid) == -signal.SIGKILL and server.end(waiting) == 0
    assert outcome(tmp_path / "b", "waiting") == ALL_OK


@pytest.fixture
def lock(tmp_path, monkeypatch):
    """Returns a function that takes the lock of a device of the given key without waiting."""

    def take(key: str = "cpu"):
        monkeypatch.setattr(sweep, "device_key", lambda device: key)
        return sweep.measuring_lock(detect(), NOTEBOOK, wait=False)

    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    (tmp_path / "runtime").mkdir(mode=0o700)
    return take


def test_the_lock_lies_in_a_folder_of_this_user_alone(lock, tmp_path, monkeypatch):
    runtime, victim = tmp_path / "runtime", tmp_path / "victim"
    victim.write_text("precious")
    with lock():
        assert f"process {os.getpid()}, " in (runtime / "labkit-cpu.lock").read_text()
        assert (runtime / "labkit-cpu.lock").stat().st_mode & 0o777 == 0o600
    # A link where the lock should be is not followed.
    (runtime / "labkit-gpu.lock").symlink_to(victim)
    with pytest.raises(configs.RequestError, match=r"cannot lock .*: Too many levels of symbolic"):
        lock("gpu").__enter__()
    # Without a folder that the system made for this user, a folder that others can enter, or made,
    # is refused.
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "nothing"))
    monkeypatch.setattr(sweep, "SHARED_TEMPORARY", tmp_path)
    own = tmp_path / f"labkit-{os.getuid()}"
    with lock():
        assert (own / "labkit-cpu.lock").exists() and own.stat().st_mode & 0o777 == 0o700
    refused = r"labkit-\d+ is not a folder of this user alone; remove it, or set XDG"
    own.chmod(0o777)
    with pytest.raises(configs.RequestError, match=refused):
        lock().__enter__()
    assert victim.read_text() == "precious"


@pytest.mark.parametrize(
    ("behaviour", "kill"),
    [
        ("child_and_hang", signal.SIGTERM),
        ("child_and_hang", signal.SIGINT),
        ("child_and_hang_with_the_interpreter", signal.SIGKILL),
    ],
)
def test_nothing_outlives_a_session_that_is_ended_from_outside(
    output, log, server, behaviour, kill
):
    mark = f"{os.getpid()}-{behaviour}-{kill.name}"
    pid = server.start(output, [make_case("a", log, behaviour, "second")], mark)
    # The worker may be a phase ahead of what is recorded.
    assert is_true_within(30, lambda: "child" in started(log, "a") and recorded(output))
    (child,) = (step["pid"] for step in taken(log) if step["step"] == "child")
    assert child in holding(f"{MARK}={mark}\0".encode())
    time.sleep(0.1)
    os.kill(pid, kill)
    assert server.end(pid) != 0 and are_gone(mark)
    assert recorded(output) == {("a", "first"): 1}
