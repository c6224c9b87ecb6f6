"""Any grid of cases through an isolated worker process, with progress, timeouts and resume.

A worker runs a case phase by phase, and each phase becomes a record as soon as it is measured.
After an out-of-memory, an error, a crash or a timeout the worker is replaced, so that one case
cannot harm the next.

Workers are forked from a server that has imported the experiment's module and never touched the
device: a new one costs a fork and a device context instead of importing torch again.
"""

import contextlib
import datetime
import fcntl
import gc
import importlib
import json
import math
import multiprocessing
import os
import secrets
import signal
import stat
import statistics
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import Any

from tqdm import tqdm

from labkit import guard, notebooks
from labkit.configs import (
    ALL_DEVICES,
    FIGURES,
    REFERENCE_DEVICE,
    SIGLIP2_SIZES,
    SIZES,
    THIS_DEVICE,
    RequestError,
    chosen_profile,
)
from labkit.device import (
    Device,
    detect,
    device_key,
    environment,
    has_gpu_driver,
    machine_id,
    measured_by,
    num_usable_cores,
    software_versions,
)
from labkit.monitor import LOAD
from labkit.records import (
    HOST_SECTION,
    SESSION_SECTION,
    SESSION_SECTIONS,
    Metrics,
    Record,
    RecordStore,
    as_content,
    check_plausible,
    done_path,
    source_state,
    write_text_atomic,
)

MAX_REPEATS = 2
"""How often a phase that other processes disturb is measured again, each time in a fresh process.
"""

SHARED_TEMPORARY = Path("/tmp")
"""Wherever TMPDIR points, which can differ between processes."""

LOCK_HELD = "LABKIT_LOCK_HELD"
"""Environment variable that tells child processes which device's lock this process holds for them.
"""

PRELOADED = ["labkit.experiments.preloaded"]
"""What the server imports."""

Ceilings = dict[str, float | None]
"""Metrics of a session's ceilings, as "gemm bf16 achieved_tflops" or "copy fp32
sustained_gb_per_s".
"""


@dataclass(frozen=True)
class Case:
    """A unit of work for the worker: the phases share what building the case costs.

    Attributes:
        section: the question it belongs to; parameters: JSON values that identify it within the
            section.
        phases: what is measured, in order.
        time_limit_s: for the timed samples of one phase, see `time_callable`.
        timeout_s: limit for building the case, and for each phase.
        fresh_process: run in a new process.
        stop_at_failure: when a phase fails, skip those after it, which need its result.
        sustained: phases that are also run back to back, see `sections.sustained_metrics`.
        compiles: it compiles kernels, which is done for several cases at a time before any is
            measured.
        modules: what a contest's worker imports first: they register implementations.
        entrants: functions of the user's that join it, see `bench.Entrant`.
        experiment: the module that runs it; the session fills it in.
        ceilings: the session's, which fills them in.
    """

    section: str
    parameters: dict
    phases: tuple[str, ...]
    timeout_s: float
    time_limit_s: float = 3.0
    fresh_process: bool = False
    stop_at_failure: bool = False
    sustained: tuple[str, ...] = ()
    compiles: bool = False
    modules: tuple[str, ...] = ()
    entrants: tuple = ()
    experiment: str = ""
    ceilings: Ceilings = field(default_factory=dict)


@dataclass(frozen=True)
class Measured:
    """What became of one phase of one case; fields as in Record."""

    metrics: Metrics
    case: dict
    observed: dict = field(default_factory=dict)
    samples: dict[str, list[float]] = field(default_factory=dict)
    timer: dict = field(default_factory=dict)
    telemetry: dict = field(default_factory=dict)
    status: str = "ok"
    reason: str = ""

    @property
    def disturbance(self) -> tuple[bool, bool, float]:
        """Orders attempts at a phase, the best first: a disturbed measurement is better than
        none.
        """
        is_disturbed = bool(self.telemetry.get("disturbed"))
        return self.status != "ok", is_disturbed, self.telemetry.get("cpu_wait_fraction", 0.0)


class Skip(RequestError):
    """Raised by an experiment for a case that this device or installation cannot run; the text says
    why. A lesson shows it as one line.
    """


class Refused(Exception):
    """Raised by an experiment for a time that does not say what it should; the text says why."""


PhaseRuns = Iterator[tuple[str, Callable[[], Measured]]]
"""What `run_case` of an experiment yields: a phase's name and the function that measures it."""


# Allocation failures that are raised as another error.
_OUT_OF_MEMORY_TEXTS = (
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "DefaultCPUAllocator: can't allocate memory",
)


def failure(error: BaseException) -> tuple[str, str]:
    """Returns the status and the reason of a record whose measurement raised `error`."""
    import torch

    if isinstance(error, Skip):
        return "skipped", str(error)
    if isinstance(error, Refused):
        return "refused", str(error)
    reason = f"{type(error).__name__}: {error}"
    is_known = any(text in reason for text in _OUT_OF_MEMORY_TEXTS)
    if is_known or isinstance(error, torch.OutOfMemoryError | MemoryError):
        return "oom", reason
    return "timeout" if isinstance(error, TimeoutError) else "error", reason


def _worker_main(connection: Connection, is_rehearsal: bool) -> None:
    """Runs cases until the connection closes; ends after the first failure.

    Answers with ("phase", its name) before a phase and with ("ok", Measured), or "skipped" and the
    reason, after it; at last with a status and the reason of the phases that were not begun.
    """
    os.setpgrp()  # so that whatever a case starts is ended together with the worker
    if is_rehearsal:
        for sizes in (SIZES, SIGLIP2_SIZES):
            sizes.update({name: replace(one, num_layers=1) for name, one in sizes.items()})
        # What fails here fails again, and is told, where it is measured. Compilers write to the
        # file itself.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        # torch.compile's choices are timed beside other rehearsals: what is measured chooses anew.
        importlib.import_module("torch._inductor.config").autotune_local_cache = False
    # What is done on purpose: compiling without caches where that is timed, fp32 without TF32, a
    # matrix product as a process's first use of the device, and compiling what is made but once.
    for message in (
        "dynamo_pgo force",
        "TensorFloat32 tensor cores",
        "Attempting to run cuBLAS",
        "Dynamo detected a call to a `functools.lru_cache`",
    ):
        warnings.filterwarnings("ignore", message=message)
    gc.freeze()  # otherwise each collection between phases would walk through all modules
    while True:
        try:
            case = connection.recv()
        except EOFError:
            return
        status = "skipped"
        reason = "the experiment has no such phase"
        try:
            for phase, run in importlib.import_module(case.experiment).run_case(case):
                connection.send(("phase", phase))
                try:
                    connection.send(("ok", run()))
                except Skip as error:
                    connection.send(("skipped", str(error)))
                finally:
                    del run  # it holds the case's tensors, which would lie beside the next case's
        except BaseException as error:
            status, reason = failure(error)
            # What fails in a function of the user's is told in its record alone.
            if status == "error" and not case.entrants:
                traceback.print_exception(error)
        connection.send((status, reason))
        if status != "skipped":
            os._exit(0)  # a failed device context must run no destructors and no other case


@cache
def _worker_context() -> multiprocessing.context.BaseContext:
    """Returns the context that starts workers, a fork server that is loading the experiments.

    Sets how OpenMP waits and how many threads it starts, for this process too if it has not loaded
    torch yet.

    It is made once: threads of a rehearsal that made it at a time would set back what another of
    them had set in the environment, not what stood there.
    """
    # For GNU's and for LLVM's OpenMP. Where another process occupies a core, threads that spin
    # while they wait take the core that the others need, and a step takes a hundred times as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("KMP_BLOCKTIME", "0")
    os.environ.setdefault("OMP_NUM_THREADS", str(num_usable_cores()))
    if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
        # PyTorch's default is a folder that another user may have made and filled, and it loads
        # code from there.
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(_own_folder() / "torchinductor")
    if not has_gpu_driver():
        # Otherwise the compiler test-compiles for each instruction set of the processor, seconds
        # each, to detect builds of PyTorch by compilers that nobody uses today.
        os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
    # One server serves the sessions of all notebooks.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    # The server sees that the session has ended only when it has imported all of that; the guard
    # ends it at once.
    guard.move_temporary_files()
    resource_tracker.ensure_running()  # not below: it unblocks the signal
    # Interrupted, the server would print where its imports stood.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    safe_path = os.environ.get("PYTHONSAFEPATH", "")
    if guard.ignores_folder():  # the server is `python -c`
        os.environ["PYTHONSAFEPATH"] = "1"
    try:
        forkserver.ensure_running()
    except OSError as error:
        raise RequestError(
            f"cannot start workers: {error} ({tempfile.gettempdir()}; set TMPDIR to a folder with "
            "a short path)"
        ) from None
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        os.environ["PYTHONSAFEPATH"] = safe_path  # not for what else this process starts
    return context


def experiment_of(notebook: str) -> str:
    """Returns the name of the module that measures what a notebook shows."""
    return f"labkit.experiments.{notebook.split('_', 1)[1]}"


def first_line(text: str) -> str:
    return text.strip().split("\n")[0][:500]


def _unmeasured(case: Case, status: str, reason: str) -> Measured:
    """Returns what becomes of a phase that has no metrics."""
    return Measured({}, case.parameters, status=status, reason=first_line(reason))


def _checked(case: Case, phase: str, measured: Measured) -> Measured:
    """Returns a measurement, or an error if it is impossible, of another case or cannot be
    recorded.
    """
    try:
        if measured.case != case.parameters:
            raise ValueError(f"asked for {case.parameters}, ran {measured.case}")
        check_plausible(measured.metrics, 1e3 * case.timeout_s)
        record = Record(
            "", case.section, phase=phase, device="", measurement_version=0, **vars(measured)
        )
        as_content(record)
    except (ValueError, TypeError) as error:  # TypeError: a value that JSON cannot hold
        return _unmeasured(case, "error", f"refused: {error}")
    return measured


class _Worker:
    """The session's side of a process that runs cases. One is started for the first case, and
    another after a failure.
    """

    def __init__(self, is_rehearsal: bool = False):
        self.is_rehearsal = is_rehearsal
        self.process: multiprocessing.Process | None = None

    def outcomes(self, case: Case) -> Iterator[tuple[str, Measured]]:
        """Yields each phase of a case with what became of it."""
        if case.fresh_process:
            self.close()
        left = list(case.phases)
        while left:
            was_used = self.process is not None
            if not was_used:
                self._start()
            with contextlib.suppress(OSError):  # if the process has ended, `_receive` tells
                self.connection.send(replace(case, phases=tuple(left)))
            phase = ""
            while self.process:
                status, content = self._receive(case.timeout_s)
                if status == "phase":
                    phase = content
                    continue
                if status not in ("ok", "skipped"):
                    self.close()
                if status == "ended":
                    if was_used and not phase:
                        break  # perhaps by the case before it: run this one in another
                    status = "error"
                if status != "ok":
                    content = _unmeasured(case, status, content)
                # All that are left where the case could not be built; none at its end.
                ended = [phase] if phase else left
                left = [name for name in left if name not in ended]
                for name in ended:
                    content = _checked(case, name, content)
                    yield name, content
                if left and case.stop_at_failure and content.status != "ok":
                    self.close()  # it may be measuring what must be skipped
                    reason = f"not run: {phase} before it ended {content.status}"
                    skipped = _unmeasured(case, "skipped", reason)
                    yield from ((name, skipped) for name in left)
                    return
                if not phase:
                    break
                phase = ""

    def _start(self) -> None:
        context = _worker_context()
        self.connection, theirs = context.Pipe()
        process = context.Process(target=_worker_main, args=(theirs, self.is_rehearsal))
        process.start()  # an interrupt may come while the server is still importing
        self.process = process
        theirs.close()

    def _receive(self, timeout_s: float) -> tuple[str, Any]:
        """Returns the worker's next message, or that there was none in time, or that it has ended
        by itself.
        """
        if wait([self.connection, self.process.sentinel], timeout_s):
            with contextlib.suppress(EOFError, OSError):
                if self.connection.poll():  # what it sent before it ended comes first
                    return self.connection.recv()
            self.process.join(timeout_s)
        code = self.process.exitcode
        if code is None:
            return "timeout", f"no result within {timeout_s:g} s"
        if code < 0:
            return "ended", f"the worker was killed by {signal.Signals(-code).name}"
        return "ended", f"the worker ended with exit code {code}"

    def close(self) -> None:
        if not self.process:
            return
        with contextlib.suppress(OSError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()  # it may have no group of its own yet
        self.process.join()
        self.connection.close()
        self.process = None


def _own_folder() -> Path:
    """Returns the folder of this user's files that outlive a process; raises RequestError if
    others can enter it, or made it.
    """
    folder = SHARED_TEMPORARY / f"labkit-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = os.lstat(folder)
    is_own_folder = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
    if not is_own_folder or status.st_mode & 0o077:
        raise RequestError(
            f"{folder} is not a folder of this user alone; remove it, or set XDG_RUNTIME_DIR and "
            "TORCHINDUCTOR_CACHE_DIR to folders that are"
        )
    return folder


@contextlib.contextmanager
def measuring_lock(device: Device, notebook: str, *, wait: bool = True) -> Iterator[None]:
    """Holds this user's lock of a physical device, so that only one run measures on it at a time.

    If it must wait, it says once on stderr for what. The lock ends with the process, however that
    ends, and is shared with the processes that this one starts.

    Args:
        device: what is measured; notebook: what a waiting run says about this one.
        wait: False to raise instead.

    Raises:
        RequestError: another run holds the lock and `wait` is False, or there can be no lock.
    """
    key = device_key(device)
    if os.environ.get(LOCK_HELD) == key:
        yield
        return
    # The system makes this folder for the user alone.
    folder = Path(os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}")
    path = (folder if folder.is_dir() else _own_folder()) / f"labkit-{key}.lock"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        file = os.fdopen(descriptor, "r+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            message = f"another labkit run{file.read()} to finish measuring on {device.name}"
            if not wait:
                raise RequestError(f"not waiting for {message}") from None
            print(f"labkit: waiting for {message}", file=sys.stderr, flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        raise RequestError(
            f"cannot lock {path}: {error.strerror}; set XDG_RUNTIME_DIR to another folder"
        ) from None
    with file:
        file.seek(0)
        file.truncate()
        file.write(f" ({notebook}, process {os.getpid()}, since {datetime.datetime.now():%H:%M})")
        file.flush()
        os.environ[LOCK_HELD] = key
        try:
            yield
        finally:
            del os.environ[LOCK_HELD]


def asked_cases(
    experiment: ModuleType, profile: str, device_kind: str, asked: Mapping[str, list]
) -> list[Case]:
    """Returns the cases of `profile` that have the values asked for: of "sizes" those of another
    size are left out, those without one stay.
    """
    planning = {name: asked[name] for name in ("world_sizes", "workload") if name in asked}
    cases = experiment.cases(profile, device_kind, **planning)  # chapter 07 plans by them
    for name in asked.keys() - planning:
        key = name.removesuffix("s")
        cases = [case for case in cases if case.parameters.get(key) in (None, *asked[name])]
    return cases


SHARED_S = 600.0
"""How long the host's probes and the ceilings of one chapter serve the others of a run; later the
clocks and temperatures are others.
"""


class Session:
    """One run of a notebook's measurements on this device; `measure` measures what is not recorded
    yet, and nothing is written before.

    Args:
        notebook: its file name without the ending.
        device: this machine's slug or "this", so that no result gets another device's name.
        profile: one of PROFILES, or "auto" for full on a GPU and smoke elsewhere.
        output: folder that holds one folder per device; "" for the repository's figures/.
        fresh: measure again what is recorded already.
        options: narrow the grid, see `notebooks.narrowing`.
        subfolder: of the device's folder, for what is kept apart from the chapters.

    Raises:
        RequestError: another device than this machine, an unknown profile, size or other value, or
            an experiment that cannot be imported.
        RecordError: the record file cannot be read.
    """

    def __init__(
        self,
        notebook: str,
        *,
        device: str,
        profile: str,
        output: str | Path,
        fresh: bool,
        options: dict,
        subfolder: str = "",
    ):
        self.notebook = notebook
        self.module_name = experiment_of(notebook)
        _worker_context()  # starts loading the experiments in the server
        try:
            self.experiment = importlib.import_module(self.module_name)
        except Exception as error:
            _, reason = failure(error)
            raise RequestError(
                f"{self.module_name} cannot be imported: {first_line(reason)}"
            ) from error
        self.device = measured_by(notebook)
        if device not in (THIS_DEVICE, self.device.slug, detect().slug):
            raise RequestError(
                f"device {str(device)[:80]!r} is not this machine, which is {self.device.slug!r}; "
                f'to measure here, set device = "{THIS_DEVICE}"'
            )
        self.profile = chosen_profile(profile, self.device.default_profile)
        asked = notebooks.narrowing(notebook, self.profile, options)
        from labkit.measure.host import PROBES  # imports torch, as the experiment has

        self.cases = [
            Case(HOST_SECTION, {}, PROBES[self.device.kind], 60.0),
            *asked_cases(self.experiment, self.profile, self.device.kind, asked),
        ]
        self.fresh = fresh
        self.id = f"{datetime.datetime.now(datetime.UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(2)}"
        self.folder = Path(output or FIGURES) / self.device.slug / subfolder
        self.store = RecordStore(self.folder / "records" / f"{notebook}.jsonl")
        self.ceilings: Ceilings = {}
        self.shared = {}  # by case, when it was measured and what that gave
        self._is_busy = False
        self._software = software_versions()
        self.store.load()  # raises for an unreadable file before anything is written

    def run(self, progress: tqdm) -> None:
        """Measures the cases that are not recorded yet, one record per phase. Then writes the file
        that says that all were tried.

        Raises RecordError where another run is writing to the record file.
        """
        done = done_path(self.folder, self.notebook)
        with self.store.locked():
            self.store.repair()
            write_json(self.folder / "environment.json", environment(self.device))
            done.unlink(missing_ok=True)
            pending = self.pending()
            if not pending:
                print(f"{self.notebook}: all recorded before; --fresh measures again")
            for section in dict.fromkeys(case.section for case in pending):
                cases = [one for one in pending if one.section == section]
                self._run_section(section, cases, progress)
        profile = "full" if self.profile == "key" else self.profile
        grid = self.experiment.cases(profile, self.device.kind)
        num_missing = sum(len(case.phases) for case in self._missing(grid, self.store.load()))
        write_json(done, {"profile": profile, "num_missing": num_missing})

    def pending(self) -> list[Case]:
        """Returns the cases that this machine has not recorded yet, and before them what every
        session measures; [] if there is nothing else.
        """
        recorded = [
            record
            for record in self.store.load()
            if record.machine == machine_id() and record.section not in SESSION_SECTIONS
        ]
        missing = self._missing(self.cases, [] if self.fresh else recorded)
        missing.sort(key=lambda case: case.section not in SESSION_SECTIONS)
        is_done = all(case.section in SESSION_SECTIONS for case in missing)
        return [] if is_done else missing

    def _missing(self, cases: list[Case], records: list[Record]) -> list[Case]:
        """Returns the cases with those of their phases that have no record."""
        recorded = {record.resume_key() for record in records}
        missing = []
        for case in cases:
            nothing = Measured({}, case.parameters)
            phases = tuple(
                phase
                for phase in case.phases
                if self._record(case, phase, nothing).resume_key() not in recorded
            )
            if phases:
                missing.append(replace(case, phases=phases))
        return missing

    def _run_section(self, section: str, cases: list[Case], progress: tqdm) -> None:
        counts = Counter()
        outcomes = self._shared if section in SESSION_SECTIONS else self._settled
        with contextlib.closing(_Worker()) as self._worker:
            for case in cases:
                label = " ".join([section, *map(str, case.parameters.values())])
                progress.set_postfix_str(f"{self.notebook[:2]} {label}")
                for phase, measured in outcomes(case):
                    self.store.append(self._record(case, phase, measured))
                    counts[measured.status] += 1
                    if section == SESSION_SECTION:
                        ceiling = " ".join(case.parameters.values())
                        for key, value in measured.metrics.items():
                            self.ceilings[f"{ceiling} {key}"] = value
                # In another order, floats add up to a little more than the total.
                progress.update(min(expected_seconds(self, case), progress.total - progress.n))
        statuses = ", ".join(f"{number} {status}" for status, number in sorted(counts.items()))
        progress.write(f"{self.notebook[:2]} {section}: {statuses}")

    def _shared(self, case: Case) -> list[tuple[str, Measured]]:
        """Returns as `_settled`, or what another chapter of this run measured a short time ago."""
        key = (case.section, *case.parameters.items())
        since_s, outcomes = self.shared.get(key, (-math.inf, []))
        if time.monotonic() - since_s > SHARED_S:
            outcomes = list(self._settled(case))
            self.shared[key] = (time.monotonic(), outcomes)
        return outcomes

    def _settled(self, case: Case) -> Iterator[tuple[str, Measured]]:
        """Yields each phase of a case with what is to be recorded.

        What other processes disturb is measured again in fresh workers, and the least disturbed
        attempt counts. After a phase that stayed disturbed, none is repeated until one was not.
        """
        best = {}  # by phase
        for attempt in range(MAX_REPEATS + 1):
            part = replace(
                case,
                phases=tuple(best) or case.phases,
                fresh_process=case.fresh_process or attempt > 0,
                ceilings=self.ceilings,
                experiment=self.module_name,
            )
            for phase, measured in self._worker.outcomes(part):
                is_disturbed = measured.telemetry.get("disturbed", False)
                measured = min(measured, best.pop(phase, measured), key=lambda one: one.disturbance)
                if is_disturbed and not self._is_busy and attempt < MAX_REPEATS:
                    best[phase] = measured
                else:
                    self._is_busy = is_disturbed
                    yield phase, measured
            if not best:
                return

    def _record(self, case: Case, phase: str, measured: Measured) -> Record:
        content = dict(vars(measured))
        if not measured.telemetry.get("disturbed"):  # of the host's load nothing else is asked
            content["telemetry"] = {
                name: value for name, value in measured.telemetry.items() if name not in LOAD
            }
        return Record(
            notebook=self.notebook,
            section=case.section,
            phase=phase,
            device=self.device.slug,
            machine=machine_id(),
            measurement_version=self.experiment.MEASUREMENT_VERSION,
            software=self._software,
            source=source_state(),
            profile=self.profile,
            session=self.id,
            recorded_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            **content,
        )


DEFAULT_S = 1.0
"""Expected of a phase whose section no device has recorded, as where a wheel is installed. Of an
H200's whole grid one takes 1.4 s, of its quick profile 0.7; of a CPU's smoke run 0.4.
"""


@cache
def _seconds_at_hand(notebook: str, kind: str) -> dict[str, float]:
    """Returns what a phase took on the reference device, or on a CPU that was measured, by its
    section, and by `_name` of its case; {} where nothing is at hand.

    That is the mean time since the record of its section before it. The ranks of chapter 07 measure
    the phases of a case at once, and the first of them has all of its time, the first of a session
    that since it began.
    """
    pattern = f"{kind}-*" if kind != "cuda" else f"*{REFERENCE_DEVICE}"
    for path in sorted(FIGURES.glob(f"{pattern}/records/{notebook}.jsonl")):
        seconds = defaultdict(list)
        since = {}  # by session and section: what was before it may have been measured anew
        for record in RecordStore(path).load():
            at = datetime.datetime.fromisoformat(record.recorded_at)
            series = (record.session, record.section)
            if notebook in ALL_DEVICES and record.section not in SESSION_SECTIONS:
                series = (record.session, "")
                # Other chapters may have been measured before the host.
                began = datetime.datetime.strptime(record.session[:16], "%Y%m%dT%H%M%S%z")
                since.setdefault(series, began)
            if series in since:
                took_s = (at - since[series]).total_seconds()
                seconds[record.section].append(took_s)
                seconds[_name(record.section, record.case)].append(took_s)
            since[series] = at
        if seconds:  # otherwise of a run that ended before its first record was whole
            return {name: statistics.fmean(times) for name, times in seconds.items()}
    return {}


def _name(section: str, parameters: dict) -> str:
    return f"{section} {json.dumps(parameters, sort_keys=True)}"


def expected_seconds(session: Session, case: Case) -> float:
    """Returns how long a case will take, as far as that is known."""
    seconds = _seconds_at_hand(session.notebook, session.device.kind)
    of_section = seconds.get(case.section, DEFAULT_S)
    of_phase = seconds.get(_name(case.section, case.parameters), of_section)
    return max(0.05, of_phase) * len(case.phases)


def progress_bar(sessions: Sequence[Session]) -> tqdm:
    """Returns one bar over the cases of several sessions, in expected seconds, with the time
    left.
    """
    total = sum(expected_seconds(one, case) for one in sessions for case in one.pending())
    return tqdm(
        total=total,
        disable=not total,
        bar_format="{percentage:3.0f}%|{bar:20}| {elapsed}, {remaining} left{postfix}",
        file=sys.stderr,
        mininterval=1.0,
    )


MOST_REHEARSALS = 12
"""Processes that compile at a time; each needs a device context and about 2 GB of the host."""


def rehearse(sessions: Sequence[Session]) -> None:
    """Compiles what the pending cases need, several cases at a time, before anything is timed.

    Each case runs once, a model with one block instead of all: its compiled code is the same, and
    the compilers keep it on disk. What that gives is dropped.
    """
    cases = [
        replace(case, experiment=one.module_name, time_limit_s=0.0, sustained=())
        for one in sessions
        for case in one.pending()
        if case.compiles
    ]
    num_workers = min(len(cases), num_usable_cores(), MOST_REHEARSALS)
    if num_workers < 2:
        return
    bar = tqdm(
        desc=f"Compiling what {len(cases)} cases need, {num_workers} at a time",
        total=len(cases),
        bar_format="{desc}: {n}, {elapsed}",
        file=sys.stderr,
        mininterval=1.0,
    )
    left = iter(cases)

    def rehearse_some() -> None:
        worker = _Worker(is_rehearsal=True)
        for case in left:  # which all threads share
            list(worker.outcomes(case))
            bar.update()
        worker.close()

    # As daemons, which an interrupt does not wait for: what runs would take minutes.
    threads = [threading.Thread(target=rehearse_some, daemon=True) for _ in range(num_workers)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        list(left)  # no other case begins; the guard ends what runs
        bar.close()


def measure(sessions: Sequence[Session]) -> None:
    """Measures what several sessions have not recorded yet, under the device's lock and one bar."""
    first = sessions[0]
    with contextlib.ExitStack() as stack:
        if any(session.pending() for session in sessions):
            stack.enter_context(measuring_lock(first.device, first.notebook))
        # Each worker would first run again the script that measures: multiprocessing takes it from
        # here.
        stack.callback(sys.modules.update, __main__=sys.modules["__main__"])
        sys.modules["__main__"] = ModuleType("__main__")
        # On a CPU it would take the cores that compile each case as it comes.
        if first.device.kind == "cuda":
            rehearse(sessions)
        progress = stack.enter_context(progress_bar(sessions))
        for session in sessions:
            session.shared = first.shared
            session.run(progress)


def write_json(path: Path, content: Any) -> None:
    """Writes `content` as JSON; readers see the old file or the new one, never a part."""
    write_text_atomic(path, json.dumps(content, indent=1, sort_keys=True) + "\n")
