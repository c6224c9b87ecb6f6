"""Any grid of cases through an isolated worker process, with progress, timeouts and resume.

A worker runs a case phase by phase, and each phase becomes a record as soon as it is measured.
After an out-of-memory, an error, a crash or a timeout the worker is replaced, so that one case
cannot harm the next.

Workers are forked from a server that has imported the experiment's module and never touched the
device: a new one costs a fork and a device context instead of importing torch again.
"""

import contextlib
import datetime
import gc
import importlib
import inspect
import json
import multiprocessing
import os
import secrets
import signal
import stat
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TextIO

from tqdm import tqdm

from labkit import guard, notebooks
from labkit.configs import FIGURES, THIS_DEVICE, RequestError, chosen_profile
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
    Record,
    RecordStore,
    check_measured,
    check_plausible,
    done_path,
    source_state,
    write_text_atomic,
)

MAX_REPEATS = 2
"""How often a phase that other processes disturb is measured again, each time in a fresh process.
"""

MOST_IN_VAIN = 2
"""After this many phases in a row that stayed disturbed, none is repeated until one was measured
undisturbed.
"""

SHARED_TEMPORARY = Path("/tmp")
"""Wherever TMPDIR points, which can differ between processes."""

LOCK_HELD = "LABKIT_LOCK_HELD"
"""Environment variable that tells child processes which device's lock this process holds for them.
"""

THREAD_POLICY = {"OMP_WAIT_POLICY": "passive", "KMP_BLOCKTIME": "0"}
"""For GNU's and for LLVM's OpenMP. Where another process occupies a core, threads that spin while
they wait take the core that the others need, and a step takes a hundred times as long.
"""

COMPILER = "torch._inductor.compile_fx"

PRELOADED = ("torch._dynamo", COMPILER)
"""What the server imports beside the experiment; each worker would take seconds to import it for
its first optimizer or compilation. The compiler only without a GPU, which the server must not
touch.
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
    """

    section: str
    parameters: dict[str, Any]
    phases: tuple[str, ...]
    timeout_s: float
    time_limit_s: float = 3.0
    fresh_process: bool = False
    stop_at_failure: bool = False
    sustained: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        return " ".join([self.section, *(str(value) for value in self.parameters.values())])


@dataclass(frozen=True)
class Measured:
    """What one phase of one case gave; fields as in Record."""

    metrics: dict[str, float | int | None]
    case: dict[str, Any]
    observed: dict[str, Any] = field(default_factory=dict)
    samples: dict[str, list[float]] = field(default_factory=dict)
    timer: dict[str, Any] = field(default_factory=dict)
    telemetry: dict[str, Any] = field(default_factory=dict)


class Skip(Exception):
    """Raised by an experiment for a case that this device or installation cannot run; the text says
    why.
    """


PhaseRun = tuple[str, Callable[[], Measured]]
"""A phase's name and the function that measures it; `run_case` of an experiment yields these."""


# Allocation failures that are raised as a plain RuntimeError.
_OUT_OF_MEMORY_TEXTS = (
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "MPS backend out of memory",
    "DefaultCPUAllocator: can't allocate memory",
)


def _status(error: BaseException) -> str:
    """Returns the status of a record whose measurement raised `error`."""
    import torch

    if isinstance(error, Skip):
        return "skipped"
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return "oom"
    if isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY_TEXTS):
        return "oom"
    return "timeout" if isinstance(error, TimeoutError) else "error"


def _worker_main(connection: Connection, module_name: str) -> None:
    """Runs cases until the connection closes; ends after the first failure."""
    os.setpgrp()  # so that whatever a case starts is ended together with the worker
    _end_with_parent(connection)
    experiment = importlib.import_module(module_name)
    # Where compiling is timed the caches are off on purpose; torch warns of each.
    warnings.filterwarnings("ignore", message="dynamo_pgo force disabled")
    gc.freeze()  # otherwise each collection between phases would walk through all modules
    while True:
        try:
            case, ceilings = connection.recv()
        except EOFError:
            return
        connection.send(("begun",))
        try:
            for phase, run in experiment.run_case(case, ceilings):
                connection.send(("phase", phase))
                try:
                    connection.send(("measured", run()))
                finally:
                    del run  # it holds the case's tensors, which would lie beside the next case's
        except BaseException as error:
            status = _status(error)
            text = str(error) if status == "skipped" else f"{type(error).__name__}: {error}"
            if status == "error":
                print("".join(traceback.format_exception(error)), file=sys.stderr, flush=True)
            connection.send(("failed", status, text.strip().split("\n")[0][:500]))
            if status != "skipped":
                os._exit(0)  # a failed device context must run no destructors and no other case
        else:
            connection.send(("done",))


def _end_with_parent(connection: Connection) -> None:
    """Forks a process that kills this one and its descendants as soon as the session has ended.

    A thread could not run while a case holds the interpreter.
    """
    worker = os.getpid()
    if os.fork() == 0:
        connection.close()  # the session must see the worker's end close when the worker ends
        multiprocessing.parent_process().join()
        _kill_group(worker)
        os._exit(0)


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):  # it has no group of its own yet
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _worker_context(module_name: str) -> multiprocessing.context.BaseContext:
    """Returns the context that starts workers. On Linux it is a fork server that is loading the
    experiment.

    Sets how OpenMP waits and how many threads it starts, for this process too if it has not loaded
    torch yet.
    """
    for name, value in THREAD_POLICY.items():
        os.environ.setdefault(name, value)
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    os.environ.setdefault("OMP_NUM_THREADS", str(num_usable_cores()))
    if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
        # PyTorch's default is a folder that another user may have made and filled, and it loads
        # code from there.
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(_own_folder() / "torchinductor")
    context = multiprocessing.get_context("forkserver")
    has_gpu = has_gpu_driver()
    if not has_gpu:
        # Otherwise the compiler test-compiles for each instruction set of the processor, seconds
        # each, to detect builds of PyTorch by compilers that nobody uses today.
        os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
    context.set_forkserver_preload(
        [module_name, *(name for name in PRELOADED if name != COMPILER or not has_gpu)]
    )
    # The server sees that the session has ended only when it has imported all of that; the guard
    # ends it at once.
    guard.move_temporary_files()
    try:
        forkserver.ensure_running()
    except OSError as error:
        raise RequestError(
            f"cannot start workers: {error} ({tempfile.gettempdir()}; set TMPDIR to a folder with "
            f"a short path)"
        ) from None
    return context


class _Worker:
    """The parent's side of one worker process."""

    def __init__(self, module_name: str):
        context = _worker_context(module_name)
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_worker_main, args=(theirs, module_name))
        self.process.start()
        theirs.close()
        self.used = False

    def send(self, case: Case, ceilings: dict[str, float]) -> None:
        """Sends a case; if the process has ended, `receive` will tell."""
        with contextlib.suppress(OSError):
            self.connection.send((case, ceilings))

    def receive(self, timeout_s: float) -> tuple:
        """Returns the worker's next message; ("failed", …) after `timeout_s` without one, ("ended",
        …) if it ended.
        """
        if not wait([self.connection, self.process.sentinel], timeout_s):
            return ("failed", "timeout", f"no result within {timeout_s:g} s")
        try:
            if self.connection.poll():  # what it sent before it ended comes first
                return self.connection.recv()
        except (EOFError, ConnectionResetError):
            pass
        self.process.join(timeout_s)
        code = self.process.exitcode
        if code is None:
            return (
                "failed",
                "timeout",
                f"the worker closed its connection and did not end within {timeout_s:g} s",
            )
        if code < 0:
            names = {number.value: number.name for number in signal.Signals}
            return ("ended", f"the worker was killed by {names.get(-code, f'signal {-code}')}")
        return ("ended", f"the worker ended with exit code {code}")

    def close(self) -> None:
        _kill_group(self.process.pid)
        self.process.join()
        self.connection.close()


def _is_private(folder: str | Path) -> bool:
    """Returns whether it is a folder, and no link to one, that only this user can enter."""
    try:
        status = os.lstat(folder)
    except OSError:
        return False
    is_own_folder = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
    return is_own_folder and not status.st_mode & 0o077


def _own_folder() -> Path:
    """Returns the folder of this user's files that outlive a process; raises RequestError if
    another user made it.
    """
    folder = SHARED_TEMPORARY / f"labkit-{os.getuid()}"
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700)
    if not _is_private(folder):
        raise RequestError(
            f"{folder} is not a folder of this user alone; remove it, or set XDG_RUNTIME_DIR and "
            "TORCHINDUCTOR_CACHE_DIR to folders that are"
        )
    return folder


def _lock_path(key: str) -> Path:
    """Returns a device's lock file, the same one for all processes of this user."""
    candidates = (os.environ.get("XDG_RUNTIME_DIR", ""), f"/run/user/{os.getuid()}")
    folder = next((name for name in candidates if _is_private(name)), None) or _own_folder()
    return Path(folder, f"labkit-{key}.lock")


@contextlib.contextmanager
def measuring_lock(
    device: Device, notebook: str, folder: Path, *, wait: bool = True
) -> Iterator[None]:
    """Holds this user's lock of a physical device, so that only one run measures on it at a time.

    If it must wait, it says once on stderr for what. The lock ends with the process, however that
    ends, and is shared with the processes that this one starts.

    Args:
        device: what is measured; notebook, folder: what a waiting run says about this one.
        wait: False to raise instead.

    Raises:
        RequestError: another run holds the lock and `wait` is False, or there can be no lock.
    """
    key = device_key(device)
    if os.environ.get(LOCK_HELD) == key:
        yield
        return
    with _locked_file(_lock_path(key), device.name, wait) as file:
        file.truncate(0)
        holder = {
            "notebook": notebook,
            "pid": os.getpid(),
            "folder": str(folder),
            "since": f"{datetime.datetime.now():%H:%M}",
        }
        json.dump(holder, file)
        file.flush()
        os.environ[LOCK_HELD] = key
        try:
            yield
        finally:
            del os.environ[LOCK_HELD]


def _locked_file(path: Path, device_name: str, wait: bool) -> TextIO:
    """Returns a file that is locked; see `measuring_lock`."""
    import fcntl

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NOFOLLOW, 0o600)

    try:
        file = open(path, "a+", encoding="utf-8", opener=opener)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            message = f"another labkit run{_lock_holder(file)} to finish measuring on {device_name}"
            if not wait:
                raise RequestError(f"not waiting for {message}") from None
            print(f"labkit: waiting for {message}", file=sys.stderr, flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        raise RequestError(
            f"cannot lock {path}: {error.strerror}; set XDG_RUNTIME_DIR to another folder"
        ) from None
    return file


def _lock_holder(file: TextIO) -> str:
    """Returns who holds a lock as " (05_attention, process 123, since 12:03)"; "" if it has not
    written that yet.
    """
    try:
        file.seek(0)
        holder = json.load(file)
        os.kill(holder["pid"], 0)  # what an ended process wrote says nothing of the holder
        return " ({notebook}, process {pid}, since {since})".format(**holder)
    except (ValueError, KeyError, TypeError, OSError):
        return ""


class Session:
    """One run of a notebook's measurements on this device.

    `measure(section)` runs what is not yet recorded.
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
    ):
        self.notebook = notebook
        self.module_name = f"labkit.experiments.{notebook.split('_', 1)[1]}"
        _worker_context(self.module_name)  # starts loading the experiment in the server
        self.experiment = importlib.import_module(self.module_name)
        self.device = measured_by(notebook)
        self.slug = self.device.slug
        if device not in (THIS_DEVICE, self.slug, detect().slug):
            raise RequestError(
                f"device {str(device)[:80]!r} is not this machine, which is {self.slug!r}; "
                f'to measure here, set device = "{THIS_DEVICE}"'
            )
        self.profile = chosen_profile(profile, self.device.default_profile)
        accepted = list(inspect.signature(self.experiment.cases).parameters)[2:]
        if unknown := options.keys() - set(accepted):
            raise RequestError(
                f"unknown option {sorted(unknown)[0]!r} of {notebook}; accepted: "
                f"{', '.join(accepted)}"
            )
        options = {**options, **notebooks.narrowing(notebook, self.profile, options)}
        from labkit.measure.host import PROBES  # imports torch, as the experiment has

        self.cases: list[Case] = [
            Case(HOST_SECTION, {}, PROBES, 60.0),
            *self.experiment.cases(self.profile, self.device.kind, **options),
        ]
        self.fresh = fresh
        self.id = f"{datetime.datetime.now(datetime.UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(2)}"
        self.folder = Path(output or FIGURES) / self.device.slug
        (self.folder / "records").mkdir(parents=True, exist_ok=True)
        self.store = RecordStore(self.folder / "records" / f"{notebook}.jsonl")
        self.ceilings: dict[str, float] = {}
        self._begun: set[str] = set()
        self._worker: _Worker | None = None
        self._counts: Counter[str] = Counter()
        self._num_in_vain = 0
        self._software = software_versions()
        self._source = source_state()
        with self.store.locked():
            self.store.load()  # raises for an unreadable file before anything is written
            self.store.repair()
        write_json(self.folder / "environment.json", environment(self.device))

    def measure(self, section: str) -> None:
        """Measures the section's cases that are not recorded yet, one record per phase, under the
        device's lock.

        Before the first of them, what the session measures of the device and of its host.
        """
        if not self._pending(section):
            return
        with measuring_lock(self.device, self.notebook, self.folder), self.store.locked():
            for name in dict.fromkeys((*SESSION_SECTIONS, section)):
                if pending := self._pending(name):  # another run may have recorded them meanwhile
                    self._begun.add(name)
                    self._run(name, pending)

    def _pending(self, section: str) -> list[Case]:
        """Returns the section's cases with the phases that are not recorded yet; all of what every
        session measures, once, if anything else is to be measured.
        """
        recorded = set() if self.fresh else self._recorded(machine_id())
        cases = [replace(case, phases=self._missing(case, recorded)) for case in self.cases]
        pending = [case for case in cases if case.phases]
        if section not in SESSION_SECTIONS:
            return [case for case in pending if case.section == section]
        is_needed = any(case.section not in SESSION_SECTIONS for case in pending)
        if section in self._begun or not is_needed:
            return []
        return [case for case in self.cases if case.section == section]

    def finish(self) -> None:
        """Writes the file that says that the notebook reached its end, and how much of its grid has
        no record yet.
        """
        recorded = self._recorded()
        profile = "full" if self.profile == "key" else self.profile
        grid = self.experiment.cases(profile, self.device.kind)
        content = {
            "notebook": self.notebook,
            "session": self.id,
            "profile": profile,
            "num_missing": sum(len(self._missing(case, recorded)) for case in grid),
            "finished_at": _now(),
        }
        write_json(done_path(self.folder, self.notebook), content)

    def _recorded(self, machine: str | None = None) -> set[str]:
        """Returns the resume keys of the records, or of one machine's."""
        return {
            record.resume_key() for record in self.store.load() if machine in (None, record.machine)
        }

    def _missing(self, case: Case, recorded: set[str]) -> tuple[str, ...]:
        return tuple(
            phase
            for phase in case.phases
            if self._record(case, phase, "skipped").resume_key() not in recorded
        )

    def _run(self, section: str, pending: Sequence[Case]) -> None:
        self._counts = Counter()
        try:
            with tqdm(
                pending, desc=section, unit="case", file=sys.stderr, mininterval=1.0
            ) as progress:
                for case in progress:
                    progress.set_postfix_str(case.label, refresh=True)
                    disturbed = self._run_case(case, {}, fresh=case.fresh_process)
                    if disturbed:
                        text = f"{case.label}, again: the machine was busy"
                        progress.set_postfix_str(text, refresh=True)
                    while disturbed:
                        again = replace(case, phases=tuple(disturbed))
                        disturbed = self._run_case(again, disturbed, fresh=True)
        finally:
            self._end_worker()
        statuses = ", ".join(
            f"{number} {status}" for status, number in sorted(self._counts.items())
        )
        print(f"{section}: {statuses}")

    def _end_worker(self) -> None:
        if self._worker:
            self._worker.close()
            self._worker = None

    def _run_case(
        self, case: Case, disturbed: dict[str, list[Measured]], *, fresh: bool
    ) -> dict[str, list[Measured]]:
        """Runs every phase of a case; after a failure the phases that are left run in a new worker.

        Args:
            disturbed: the measurements so far of phases that are measured again.
            fresh: only in workers that have run no other case.

        Returns:
            The measurements of the phases to measure again, which are not recorded yet.
        """
        remaining = list(case.phases)
        while remaining:
            if fresh and self._worker and self._worker.used:
                self._end_worker()
            if self._worker is None:
                self._worker = _Worker(self.module_name)
            part = replace(case, phases=tuple(remaining))
            if not self._run_once(self._worker, part, remaining, disturbed):
                self._end_worker()
        return disturbed

    def _run_once(
        self,
        worker: _Worker,
        case: Case,
        remaining: list[str],
        disturbed: dict[str, list[Measured]],
    ) -> bool:
        """Runs a case in a worker until it is done or fails; returns whether the worker is usable.

        Takes from `remaining` what has a result or can have none. A phase that must be measured
        again goes into `disturbed`, with its measurements so far, instead of the records.
        """

        def fail(phases: Sequence[str], status: str, reason: str) -> None:
            for phase in list(phases):
                remaining.remove(phase)
                if phase in disturbed:  # a disturbed measurement is better than none
                    self._append_measured(case, phase, disturbed.pop(phase))
                else:
                    self._append(case, phase, status, reason=reason)

        def skip_rest(phase: str, status: str) -> None:
            if case.stop_at_failure:
                fail(remaining, "skipped", f"not run: {phase} before it ended {status}")

        reused, worker.used = worker.used, True
        begun, phase = False, None
        worker.send(case, self.ceilings)
        while True:
            kind, *content = worker.receive(case.timeout_s)
            if kind == "begun":
                begun = True
            elif kind == "phase":
                (phase,) = content
            elif kind == "measured":
                remaining.remove(phase)
                attempts = [*disturbed.pop(phase, []), *content]
                if self._is_to_repeat(attempts):
                    disturbed[phase] = attempts
                else:
                    status = self._append_measured(case, phase, attempts)
                    if status != "ok" and case.stop_at_failure:
                        skip_rest(phase, status)
                        return False  # it is measuring the phases that must be skipped
                phase = None
            elif kind == "done":
                fail(remaining, "error", "the experiment gave no such phase")
                return True
            elif kind == "ended" and reused and not begun:
                return False  # the case before it ended the worker: run this one in another
            else:
                status, reason = content if kind == "failed" else ("error", *content)
                # Without a phase, building the case failed: it has no phases at all.
                failed = [phase] if phase else list(remaining)
                fail(failed, status, reason)
                skip_rest(phase, status)
                return status == "skipped"

    def _is_to_repeat(self, attempts: Sequence[Measured]) -> bool:
        """Returns whether to measure a phase again after these attempts, all of them disturbed."""
        disturbed = attempts[-1].telemetry.get("disturbed")
        if not disturbed:
            self._num_in_vain = self._num_in_vain if disturbed is None else 0
            return False
        if len(attempts) <= MAX_REPEATS:
            return self._num_in_vain < MOST_IN_VAIN
        self._num_in_vain += 1
        return False

    def _append_measured(self, case: Case, phase: str, attempts: Sequence[Measured]) -> str:
        """Records the least disturbed of some measurements, as an error if it is impossible or of
        another case; returns the status.
        """
        measured = min(attempts, key=_disturbance)
        content = dict(vars(measured))
        described = content.pop("case")
        if not measured.telemetry.get("disturbed"):  # of the host's load nothing else is asked
            telemetry = measured.telemetry.items()
            content["telemetry"] = {k: v for k, v in telemetry if k not in LOAD}
        try:
            if described != case.parameters:
                raise ValueError(f"asked for {case.parameters}, ran {described}")
            check_plausible(measured.metrics, 1e3 * case.timeout_s)
            self._append(case, phase, "ok", **content)
        except (ValueError, TypeError) as error:  # TypeError: a value that JSON cannot hold
            self._append(case, phase, "error", reason=f"refused: {error}")
            return "error"
        if case.section == SESSION_SECTION:
            self.ceilings |= self.experiment.ceiling_rates(case, measured)
        return "ok"

    def _append(self, case: Case, phase: str, status: str, **content: Any) -> None:
        self.store.append(self._record(case, phase, status, **content))
        self._counts[status] += 1

    def _record(self, case: Case, phase: str, status: str, **content: Any) -> Record:
        return Record(
            notebook=self.notebook,
            section=case.section,
            case=case.parameters,
            phase=phase,
            status=status,
            device=self.device.slug,
            machine=machine_id(),
            measurement_version=self.experiment.MEASUREMENT_VERSION,
            software=self._software,
            source=self._source,
            profile=self.profile,
            session=self.id,
            recorded_at=_now(),
            **content,
        )


def _disturbance(measured: Measured) -> tuple[bool, float]:
    telemetry = measured.telemetry
    return telemetry.get("disturbed", False), telemetry.get("cpu_wait_fraction", 0.0)


@dataclass
class _NoSession:
    """A notebook's session when it only shows the records of the device `slug`."""

    slug: str

    def measure(self, section: str) -> None:
        """Does nothing."""

    def finish(self) -> None:
        """Does nothing."""


def open_session(
    notebook: str, *, measure: bool, device: str, profile: str, output: str, fresh: bool, **options
):
    """Returns the session that measures `notebook` here, or one that does nothing when `measure` is
    False.

    Args:
        notebook: its file name without the ending.
        device: slug, or "this" for this machine's, as the session's `slug` then says. When
            measuring it must be this machine's, so that no result gets another device's name.
        profile: "smoke", "full", "key" for the rows of full that sentences quote, or "auto" for
            full on a GPU and smoke elsewhere.
        output: folder that holds one folder per device; "" for the repository's figures/.
        fresh: measure again what is recorded already.
        options: narrow the grid, as the module's `cases` takes them; lists as `notebooks.listed`
            reads them.

    Raises:
        RequestError: an unknown notebook, another device than this machine, a device without
            records to show, an unknown profile, size or other option.
        RecordError: the record file cannot be read, or another run is writing to it.
    """
    if notebook not in notebooks.names():
        raise RequestError(
            f"unknown notebook {notebook!r}; accepted: {', '.join(notebooks.names())}"
        )
    for name, flag in {"measure": measure, "fresh": fresh}.items():
        if not isinstance(
            flag, bool
        ):  # the text "false", which papermill passes on, would count as true
            raise RequestError(f"{name} must be True or False, not {flag!r}")
    if not measure:
        return _NoSession(_shown_device(device, Path(output or FIGURES)))
    return Session(
        notebook, device=device, profile=profile, output=output, fresh=fresh, options=options
    )


def _shown_device(device: str, root: Path) -> str:
    """Returns the slug of the device to show; raises RequestError if it has no records under
    `root`.
    """
    slug = detect().slug if device == THIS_DEVICE else device
    try:
        check_measured(slug, root)
    except RequestError as error:
        how = f'to measure this machine, set measure = True and device = "{THIS_DEVICE}"'
        raise RequestError(f"{error}; {how}") from None
    return slug


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def write_json(path: Path, content: Any) -> None:
    """Writes `content` as JSON; readers see the old file or the new one, never a part."""
    write_text_atomic(path, json.dumps(content, indent=1, sort_keys=True) + "\n")
