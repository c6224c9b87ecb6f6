"""An experiment whose cases misbehave on request, and sessions of it, also in processes to kill.

A case's parameters say what it does: `behaviour`, one of CLAIMS or FAULTS, happens at `at`: in one
of its phases, while it is built ("build") or after its last phase ("after"). Each step is noted in
the file `log` before it is taken, so that a test sees what ran, in which process and when, whatever
became of the process.

torch is imported only by the faults that need it, so that a worker of this experiment starts at
once.
"""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from labkit.configs import SIZES
from labkit.experiments import sweep
from labkit.experiments.sweep import Case, Measured, PhaseRuns, Session, Skip
from labkit.records import source_state

MEASUREMENT_VERSION = 1
NOTEBOOK = "90_faulty_experiment"
PHASES = ("first", "second", "third")
MARK = "LABKIT_TEST_MARK"
"""Environment variable of a session in a process to kill: every process that it starts inherits
it.
"""


def _raise(error: BaseException) -> None:
    raise error


def _skip(case: Case) -> None:
    raise Skip(
        "this device has no such unit"
    )  # here: `_raise` would hold the error, and with it all frames


def _torch_out_of_memory(case: Case) -> None:
    import torch

    raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")


def _cpu_out_of_memory(case: Case) -> None:
    import torch

    torch.empty(2**50, dtype=torch.uint8)


def _hang_with_the_interpreter(case: Case) -> None:
    # Matching this takes 2^60 steps, all of them without letting another thread of the process run.
    re.fullmatch("(a+)+b", "a" * 60)


def _start_child(case: Case) -> None:
    _note(case, "child", pid=subprocess.Popen(["sleep", "600"]).pid)


def _end_when_done(case: Case) -> None:
    send = Connection.send

    def send_and_end(connection: Connection, message: tuple) -> None:
        send(connection, message)
        if message[0] == "skipped":
            os._exit(3)

    Connection.send = send_and_end


def _fail_when_repeated(case: Case) -> None:
    if _num_attempts(case) > 1:
        os._exit(3)


def _count_blocks(case: Case) -> None:
    from torch._inductor import config

    with open(Path(case.parameters["log"]).with_name("blocks"), "a") as file:
        file.write(f"{SIZES['small'].num_layers} {config.autotune_local_cache}\n")


FAULTS: dict[str, Callable[[Case], None]] = {
    "none": lambda case: None,
    "torch_out_of_memory": _torch_out_of_memory,
    "memory_error": lambda case: _raise(MemoryError("no room for the list")),
    "cpu_out_of_memory": _cpu_out_of_memory,
    "unrelated_text": lambda case: _raise(
        RuntimeError("page 3 of 'Running out of memory' was not found\nsecond line")
    ),
    "exit": lambda case: os._exit(3),
    "kill": lambda case: os.kill(os.getpid(), signal.SIGKILL),
    "hang": lambda case: time.sleep(600),
    "hang_with_the_interpreter": _hang_with_the_interpreter,
    "skip": _skip,
    "brief": lambda case: time.sleep(0.01),
    "child": _start_child,
    "end_when_done": _end_when_done,
    "busy_then_exit": _fail_when_repeated,
    "count_blocks": _count_blocks,
}
FAULTS |= {
    f"child_and_{name}": lambda case, fault=FAULTS[name]: (_start_child(case), fault(case))
    for name in ("hang", "hang_with_the_interpreter")
}

CLAIMS: dict[str, dict] = {
    "nan": {"metrics": {"median_ms": math.nan}},
    "other_label": {"case": {"name": "something else"}},
    "foreign_number": {"metrics": {"median_ms": 1.5, "error": np.float32(0.1)}},
    "unpicklable": {"observed": {"model": lambda: None}},
}

CPU_WAITS = {
    "busy_once": (0.5, 0.0),
    "busy": (0.5, 0.2, 0.4),
    "busy_then_exit": (0.5,),
}
"""How much of its window each attempt at a phase waits for a core; 0: undisturbed."""


def make_case(
    name: str,
    log: Path | str,
    behaviour: str = "none",
    at: str = "",
    *,
    section: str = "steps",
    phases: Sequence[str] = PHASES,
    timeout_s: float = 60.0,
    **flags: bool,
) -> Case:
    """Returns a case that does `behaviour` at `at` ("" for every phase of it)."""
    parameters = {"name": name, "behaviour": behaviour, "at": at, "log": str(log)}
    return Case(section, parameters, tuple(phases), timeout_s, **flags)


def cases(profile: str, device_kind: str) -> list[Case]:
    return []


class Subject:
    """What a case builds for its phases, as others build tensors."""


ALIVE: weakref.WeakSet[Subject] = weakref.WeakSet()


def run_case(case: Case) -> PhaseRuns:
    _note(case, "build", num_alive=len(ALIVE))
    ALIVE.add(subject := Subject())
    if case.parameters["at"] == "build":
        FAULTS[case.parameters["behaviour"]](case)
    for phase in case.phases:
        yield phase, partial(_measure, case, phase, subject)
    if case.parameters["at"] == "after":
        FAULTS[case.parameters["behaviour"]](case)


def _measure(case: Case, phase: str, subject: Subject) -> Measured:
    _note(case, phase)
    measured = Measured(
        metrics={
            "median_ms": 1.5,
            "rate": time.monotonic_ns(),
        },  # an integer: a record rounds floats
        case=dict(case.parameters),
        observed={"pid": os.getpid(), "ceilings": dict(case.ceilings)},
        samples={"step_ms": [1.0, 2.0]},
    )
    behaviour, at = case.parameters["behaviour"], case.parameters["at"]
    if at and at != phase:
        return measured
    if behaviour in CPU_WAITS:
        attempt = _num_attempts(case)
        waited = CPU_WAITS[behaviour][min(attempt, len(CPU_WAITS[behaviour])) - 1]
        telemetry = {"disturbed": waited > 0, "cpu_wait_fraction": waited}
        measured = replace(measured, metrics={"median_ms": float(attempt)}, telemetry=telemetry)
    if behaviour in CLAIMS:
        return replace(measured, **CLAIMS[behaviour])
    FAULTS.get(behaviour, FAULTS["none"])(case)
    return measured


def steps_of(log: Path) -> list[tuple[str, str]]:
    """Returns the case and the step of each line of a log."""
    entries = map(json.loads, log.read_text().splitlines())
    return [(entry["name"], entry["step"]) for entry in entries]


def _num_attempts(case: Case) -> int:
    """Returns how often the phase at which the case misbehaves has begun so far, in any process."""
    steps = steps_of(Path(case.parameters["log"]))
    return steps.count((case.parameters["name"], case.parameters["at"]))


def _note(case: Case, step: str, **more: float) -> None:
    entry = {
        "name": case.parameters["name"],
        "step": step,
        "worker": os.getpid(),
        "mark": os.environ.get(MARK, ""),
        **more,
    }
    with open(case.parameters["log"], "a", encoding="utf-8") as file:
        file.write(json.dumps(entry) + "\n")


class FaultySession(Session):
    """A session of this module: the name that a session makes from the notebook's is not taken
    over.
    """

    module_name = property(lambda self: __name__, lambda self, name: None)


def open_session(output: Path | str, plan: Sequence[Case], *, fresh: bool = False) -> Session:
    """Returns a session of `plan` on this machine that records under `output`."""
    session = FaultySession(
        NOTEBOOK, device="this", profile="smoke", output=output, fresh=fresh, options={}
    )
    session.cases = list(plan)  # without the host, which this experiment cannot measure
    return session


def prepare(stderr: Path) -> None:
    """Makes this process one whose forks are sessions, and whose stderr is a file.

    It has everything imported, which takes longer than the session itself. It must not ask for the
    device: CUDA does not work in a fork of a process that has used it.
    """
    import torch  # noqa: F401

    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(os.open(stderr, os.O_WRONLY | os.O_CREAT), 2)
    # Workers that need neither a compiler nor a chapter need not wait for them.
    sweep.PRELOADED = []
    source_state()


def start(output: Path, plan: Sequence[Case], mark: str = "") -> int:
    """Returns the id of a fork of this process, which runs a session."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.environ[MARK] = mark
        # A shell without job control starts what it puts in the background deaf to interrupts, and
        # all that starts.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sweep.measure([open_session(output, plan)])
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)
