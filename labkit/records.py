"""The measurements: one JSON line per measured phase, appended and fsynced, loaded for the report.

A record is written once and never changed. Measuring something again appends a newer record of the
same identity, and readers take the newest. What all records of a session share stands in a line of
its own before them. Nothing here imports torch, and only `to_frame` imports pandas, which takes
half a second.
"""

import contextlib
import json
import math
import os
import re
import reprlib
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from labkit.configs import REPOSITORY, RequestError

if TYPE_CHECKING:
    import pandas as pd

SCHEMA_VERSION = 2
"""1: every record in full. 2: SHARED stands once per session, and what has its default is left out.
A record names its session, so that it is of no other, whoever writes to the file; older ones are of
the one whose line stands before.
"""

SHARED = (
    "notebook",
    "profile",
    "device",
    "machine",
    "measurement_version",
    "software",
    "source",
    "schema_version",
)
"""Fields that all records of a session and file share."""
STATUSES = ("ok", "oom", "error", "skipped", "timeout")

LOCK_WAIT_S = 30.0
"""Gives the processes of a killed run time to end."""

MAX_DEPTH = 16
"""How deeply dicts and lists of a recorded value may be nested."""


class RecordError(Exception):
    """A file in a device's folder that cannot be read or written; the message names it, and the
    line of a record.
    """


@dataclass(frozen=True)
class Record:
    """One phase of one case, measured on one device.

    Fields:
        notebook: its file name without the ending, e.g. "01_benchmarking".
        section: the question inside the notebook, e.g. "steps".
        case: the parameters that tell this case from the others of its section, as read back from
            the live objects (as requested where the case failed before there were any).
        observed: the rest of what ran, read back from the live objects: dimensions, dtypes, fused
            or not.
        phase: what was timed inside the case.
        status: one of STATUSES; `reason` says why when it is not "ok".
        metrics: numbers with their unit in the name ("median_ms", "peak_bytes"); empty unless ok.
        samples: the raw samples behind the metrics, by name with unit, where there are few; None
            where not finite.
        timer: method, number of warm-up steps, why it stopped.
        telemetry: clocks, power, temperature and throttle reasons during the timed window, whether
            other processes disturbed it, and only where they did how much they loaded the host.
        device: slug; machine: which one of that name, see `device.machine_id`; software:
            versions; source: commit and dirty flag; session: one `labkit run`; profile: which grid
            it ran.
        measurement_version: raised whenever how something is measured changes.
        recorded_at: UTC, ISO 8601.
    """

    notebook: str
    section: str
    case: dict[str, Any]
    phase: str
    device: str
    measurement_version: int
    status: str = "ok"
    reason: str = ""
    metrics: dict[str, float | int | None] = field(default_factory=dict)
    samples: dict[str, list[float | None]] = field(default_factory=dict)
    timer: dict[str, Any] = field(default_factory=dict)
    telemetry: dict[str, Any] = field(default_factory=dict)
    observed: dict[str, Any] = field(default_factory=dict)
    software: dict[str, str] = field(default_factory=dict)
    source: dict[str, Any] = field(default_factory=dict)
    machine: str = ""
    profile: str = ""
    session: str = ""
    recorded_at: str = ""
    schema_version: int = SCHEMA_VERSION

    @property
    def identity(self) -> str:
        """What makes two records measurements of the same thing."""
        return json.dumps([self.notebook, self.section, self.case, self.phase], sort_keys=True)

    def resume_key(self) -> str:
        """Identity together with what a measurement must share to be taken over by a resumed run,
        or compared.

        Of the driver only the branch counts (580 of 580.159.04): its patch releases do not
        invalidate timings.
        """
        versions = [self.software.get(name, "") for name in ("torch", "triton", "cuda", "driver")]
        versions[-1] = versions[-1].split(".")[0]
        return json.dumps([self.identity, self.device, versions, self.measurement_version])


@cache
def source_state() -> dict[str, Any]:
    """Returns {"commit", "dirty"} of the code that runs.

    Where there is no git history, LABKIT_COMMIT and LABKIT_DIRTY ("0" or "1") give them; without
    these, commit is "unknown" and dirty None.
    """
    if commit := os.environ.get("LABKIT_COMMIT"):
        return {"commit": commit, "dirty": os.environ.get("LABKIT_DIRTY", "0") != "0"}
    unknown = {"commit": "unknown", "dirty": None}
    if not shutil.which("git") or not (REPOSITORY / ".git").exists():
        return unknown

    def git(*arguments: str) -> str:
        return subprocess.check_output(
            ["git", *arguments], cwd=REPOSITORY, text=True, stderr=subprocess.DEVNULL
        ).strip()

    try:
        # Measuring writes under figures/ and re-renders the report; neither changes what is
        # measured.
        changed = git("status", "--porcelain", "--", ".", ":!figures", ":!report.md", ":!notebooks")
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(changed)}
    except subprocess.CalledProcessError:  # no commit yet, or a tree that git refuses to read
        return unknown


def check_plausible(metrics: dict[str, float | int | None], longest_ms: float = math.inf) -> None:
    """Raises ValueError for an impossible number, which shows that the measurement is broken.

    These are a time that is not positive or above `longest_ms`, which all of the measurement may
    take, a negative count, more than the datasheet's peak, and a minimum, p20, median and p80 out
    of order.
    """
    known = {name: value for name, value in metrics.items() if value is not None}
    for name, value in known.items():
        is_count = name == "n" or name.startswith("num_") or name.endswith("_bytes")
        is_time = name.endswith("_ms")
        if not math.isfinite(value):
            raise ValueError(f"{name} is {value}")
        if is_count and value < 0:
            raise ValueError(f"{name} is {value}: a count cannot be negative")
        if is_time and value <= 0 and name != "std_ms":
            raise ValueError(f"{name} is {value}: a time must be positive")
        if is_time and value > longest_ms:
            raise ValueError(
                f"{name} is {value}: longer than the whole measurement's limit of {longest_ms:g} ms"
            )
        if name.endswith("datasheet_fraction") and value > 1:
            raise ValueError(f"{name} is {value:.3f}: more than the datasheet peak of this device")
    ordered = [name for name in ("min_ms", "p20_ms", "median_ms", "p80_ms") if name in known]
    for low, high in pairwise(ordered):
        if known[low] > known[high]:
            raise ValueError(f"{low} is {known[low]} and {high} is {known[high]}: out of order")


class Kind(NamedTuple):
    """What a value in a file must be: a test, and how an error describes what it accepts."""

    fits: Callable[[Any], bool]
    accepted: str


def _typed(accepted: str, *types: type) -> Kind:
    return Kind(lambda value: type(value) in types, accepted)


def list_of(types: set[type], accepted: str) -> Kind:
    return Kind(
        lambda values: type(values) is list and types.issuperset(map(type, values)), accepted
    )


_NUMBER_TYPES = (int, float, type(None))
TEXT = _typed("a text", str)
OBJECT = _typed("an object", dict)
NUMBER = _typed("a number or null", *_NUMBER_TYPES)
NAME = Kind(lambda value: type(value) is str and value != "", "a non-empty text")
COUNT = Kind(lambda value: type(value) is int and value >= 0, "a whole number from 0")
AMOUNT = Kind(lambda value: type(value) in (int, float) and value >= 0, "a number from 0")

_RECORD = {
    **dict.fromkeys(("notebook", "section", "phase", "device"), NAME),
    **dict.fromkeys(("reason?", "machine?", "profile?", "session?", "recorded_at?"), TEXT),
    **dict.fromkeys(("software.*", "source.commit?"), TEXT),
    **dict.fromkeys(("case", "observed?", "metrics?", "samples?", "timer?", "telemetry?"), OBJECT),
    "status?": Kind(STATUSES.__contains__, ", ".join(STATUSES)),
    "measurement_version": COUNT,
    "metrics.*": NUMBER,
    "samples.*": list_of({*_NUMBER_TYPES}, "a list of numbers and null"),
    "telemetry.throttle_reasons?": list_of({str}, "a list of texts"),
    "telemetry.sustained?": OBJECT,
}
# None stands for what has no default.
_DEFAULTS = asdict(Record(None, None, None, None, None, None))
_HEADER = {"session": TEXT, "shared": OBJECT}

# What the report reads of environment.json.
_ENVIRONMENT = {
    "device.name?": TEXT,
    "device.kind?": TEXT,
    "gpu.num_multiprocessors": COUNT,
    "gpu.memory_bytes": COUNT,
    "gpu.compute_capability": TEXT,
    "gpu.power_limit_w?": AMOUNT,
    "gpu.max_sm_clock_mhz?": COUNT,
    "cpu.name": TEXT,
    "cpu.num_cores": COUNT,
}
_DONE = {"num_missing": COUNT, "profile": TEXT}


def check_fields(content: Any, kinds: Mapping[str, Kind]) -> None:
    """Raises ValueError, naming the field, where parsed content is not a dict with fields of these
    kinds.

    Args:
        kinds: by name of the field: "a", "a.b" for the entry b of a dict a, "a.*" for all entries
            of a. A field may be absent if its name ends with "?", or if the dict that it belongs to
            is absent or empty.
    """
    if type(content) is not dict:
        raise ValueError(f"not an object but {type(content).__name__}")
    for name, kind in kinds.items():
        outer, _, last = name.rstrip("?").rpartition(".")
        holder = content.get(outer, {}) if outer else content
        if type(holder) is not dict:
            raise _unfit(outer, holder, "an object")
        if last != "*" and last not in holder and not name.endswith("?") and (holder or not outer):
            raise ValueError(f"no field {name}")
        for key in holder if last == "*" else [last]:
            if key in holder and not kind.fits(holder[key]):
                raise _unfit(f"{outer}.{key}".lstrip("."), holder[key], kind.accepted)


def validate(content: dict[str, Any]) -> None:
    """Raises ValueError, naming the field, where a JSON object is not a record as `Record`
    describes it.
    """
    version = content.get("schema_version")
    if type(version) is not int or not 1 <= version <= SCHEMA_VERSION:
        raise ValueError(
            f"schema version {reprlib.repr(version)}; this labkit reads up to {SCHEMA_VERSION}"
        )
    if unknown := content.keys() - _DEFAULTS.keys():
        raise ValueError(f"unknown fields {', '.join(sorted(name[:40] for name in unknown))}")
    check_fields(content, _RECORD)
    _check_values(content)
    metrics = content.get("metrics", {})
    status = content.get("status", "ok")
    if metrics and status != "ok":
        raise _unfit("metrics", metrics, f"{{}} where the status is {status}")
    try:
        check_plausible(metrics)
    except ValueError as error:
        raise ValueError(f"field metrics.{error}") from None


def _unfit(field_name: str, value: Any, accepted: str) -> ValueError:
    return ValueError(f"field {field_name[:80]} is {reprlib.repr(value)}; accepted: {accepted}")


def _check_values(holder: dict | list, name: str = "", depth: int = 0) -> None:
    """Raises ValueError for numbers that are not finite or need more than 64 bits, and for too deep
    nesting.

    Python parses 1e999 as infinity, and no column of a frame holds 2^80.
    """
    if depth > MAX_DEPTH:
        raise ValueError(f"field {name[:80]} is nested more than {MAX_DEPTH} deep")
    for key, value in holder.items() if type(holder) is dict else enumerate(holder):
        kind = type(value)
        if kind is dict or kind is list:
            _check_values(value, f"{name}.{key}".lstrip("."), depth + 1)
        elif (kind is float and not math.isfinite(value)) or (
            kind is int and not -(2**63) <= value < 2**63
        ):
            where = f"{name}.{key}".lstrip(".")
            raise _unfit(where, value, "finite numbers of at most 64 bits")


_MARKUP = re.compile(rb"(?i)[<>`]|\](?=\()|\\(?:u00(?:[01].|28|3[ce]|5[cd]|60)|[nrt\\])")
"""In JSON, also written as numbers: <, >, `, a link's ](, line ends and other control characters,
backslashes.
"""


def _plain(text: bytes) -> bytes:
    """Returns JSON with a quote mark for all in its texts that Markdown or HTML would not show as
    it is.
    """
    return _MARKUP.sub(b"'", text)


def _parse(text: bytes) -> dict[str, Any]:
    """Returns the JSON object in UTF-8 `text`; raises ValueError where there is none."""
    try:
        content = json.loads(text.decode("utf-8"))
        # Half a surrogate pair parses, but cannot be written.
        if re.search(rb"\\u[dD][89a-fA-F]", text):
            json.dumps(content, ensure_ascii=False).encode("utf-8")
    except RecursionError:
        raise ValueError("not JSON: nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from None
    if type(content) is not dict:
        raise ValueError(f"not an object but {type(content).__name__}")
    return content


def _line(content: Any) -> bytes:
    """Returns a value as a line of JSON; raises ValueError for what JSON has not."""
    text = json.dumps(content, sort_keys=True, allow_nan=False, separators=(",", ":"))
    return f"{text}\n".encode()


def _rounded(value: Any, digits: int = 7) -> Any:
    """Returns a value with its floats rounded to seven digits, as clocks and counters know,
    fractions to four.
    """
    if type(value) is float:
        return float(f"{value:.{digits}g}")
    if isinstance(value, dict):
        return {
            name: _rounded(inner, 4 if name.endswith(("_fraction", "_error")) else digits)
            for name, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return [_rounded(inner, digits) for inner in value]
    return value


def read_environment(folder: Path) -> dict[str, Any]:
    """Returns the environment.json in a device's folder; {} if there is none. Raises RecordError if
    it is damaged.
    """
    path = folder / "environment.json"
    content = _read_object(path, _ENVIRONMENT) or {}
    gpu = content.get("gpu", {})
    if "power_limit_w" in gpu and "max_sm_clock_mhz" not in gpu:
        raise RecordError(f"{path}: no field gpu.max_sm_clock_mhz beside gpu.power_limit_w")
    return content


def done_path(folder: Path, notebook: str) -> Path:
    """Returns the file in a device's folder that is written when a notebook reaches its end."""
    return folder / "records" / f"{notebook}.done.json"


def read_done(folder: Path, notebook: str) -> dict[str, Any] | None:
    """Returns what a notebook wrote at its end ("num_missing", "profile", …); None if it did not
    reach it.

    Raises RecordError if the file is damaged.
    """
    return _read_object(done_path(folder, notebook), _DONE)


def _read_object(path: Path, kinds: Mapping[str, Kind]) -> dict[str, Any] | None:
    """Returns the JSON object in a file, None without a file; raises RecordError where a field is
    not of its kind.
    """
    text = _read_bytes(path)
    if text is None:
        return None
    try:
        content = _parse(_plain(text))
        check_fields(content, kinds)
        _check_values(content)
    except ValueError as error:
        raise RecordError(f"{path}: {error}") from error
    return content


def _read_bytes(path: Path) -> bytes | None:
    if path.exists() and not path.is_file():  # a pipe would be waited for
        raise RecordError(f"{path}: is no file")
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RecordError(f"{path}: cannot be read ({error.strerror})") from error


def check(folder: Path) -> dict[str, list[Record]]:
    """Reads every file of a device's folder that a report needs; returns the newest records by
    notebook.

    Raises RecordError for the first damaged file.
    """
    read_environment(folder)
    if (folder / "records").is_file():
        raise RecordError(f"{folder / 'records'}: is no folder")
    records = {}
    for path in sorted((folder / "records").glob("[0-9][0-9]_*.jsonl")):
        records[path.stem] = newest(RecordStore(path).load())
        read_done(folder, path.stem)
    return records


def newest_of(folders: Mapping[str, Path]) -> dict[str, list[Record]]:
    """Returns the newest records of each notebook in the folder named with it; every folder is
    checked once.
    """
    checked = {folder: check(folder) for folder in dict.fromkeys(folders.values())}
    return {name: checked[folder].get(name, []) for name, folder in folders.items()}


def folder_of(root: Path, device: str, notebook: str) -> Path:
    """Returns the folder with the notebook's records of `device`: its own, or that of several in
    one machine.

    What is measured on all GPUs of a machine lies in "2x-<device>"; where there are several, the
    most GPUs count.
    """
    holders = {path.parent.parent.name for path in root.glob(f"*/records/{notebook}.jsonl")}
    several = re.compile(rf"(\d+)x-{re.escape(device)}")
    counts = [int(match[1]) for match in map(several.fullmatch, holders) if match]
    if device in holders or not counts:
        return root / device
    return root / f"{max(counts)}x-{device}"


def measured_devices(root: Path) -> list[str]:
    """Returns the slugs of the devices that have records under `root`."""
    return sorted({path.parent.parent.name for path in root.glob("*/records/*.jsonl")})


def check_measured(device: str, root: Path) -> None:
    """Raises RequestError, naming those that have, where neither `device` nor several of it have
    records in `root`.
    """
    known = measured_devices(root)
    if not any(re.fullmatch(rf"(\d+x-)?{re.escape(str(device))}", name) for name in known):
        measured = ", ".join(known) or "none"
        raise RequestError(
            f"nothing has been measured on {str(device)[:80]!r} in {root}; measured: {measured}"
        )


def write_bytes_atomic(path: Path, content: bytes) -> Path:
    """Writes a file so that a reader, or a killed run, sees the old content or the new one; returns
    `path`.

    The file keeps its permissions, and a link stays one. Raises RecordError where it cannot be
    written.
    """
    target = Path(os.path.realpath(path))
    temporary = target.with_name(f".{target.name[:80]}.{secrets.token_hex(4)}.part")
    try:
        try:
            temporary.write_bytes(content)
            if target.exists():
                temporary.chmod(target.stat().st_mode & 0o777)
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise RecordError(f"{path}: cannot be written ({error.strerror})") from error
    return path


def write_text_atomic(path: Path, text: str) -> Path:
    """Writes a text file in UTF-8 as `write_bytes_atomic` does."""
    return write_bytes_atomic(path, text.encode("utf-8"))


class RecordStore:
    """The append-only JSON-lines file of one notebook on one device."""

    def __init__(self, path: Path | str):
        self.path = Path(path)
        # What this store has written down that the records of a session share.
        self._shared: dict[str, dict[str, Any]] = {}

    def append(self, record: Record) -> None:
        """Writes one record as one line and returns after it has reached the disk.

        The first of a session is written together with the line of what they share.

        Raises ValueError or TypeError, before anything is written, for a record that `load` would
        refuse; RecordError where it cannot be written.
        """
        content = asdict(record)
        for name in ("metrics", "samples", "timer", "telemetry", "observed"):
            content[name] = _rounded(content[name])
        # The reason may quote a file name that is not UTF-8.
        content["reason"] = record.reason.encode("utf-8", "backslashreplace").decode("utf-8")
        content = _parse(_line(content))
        validate(content)
        session = {"session": record.session}
        shared = {name: content.pop(name) for name in SHARED}
        own = {name: value for name, value in content.items() if value != _DEFAULTS[name]}
        line = _line(session | own)
        if self._shared.get(record.session) != shared:
            line = _line(session | {"shared": shared}) + line
        try:
            with open(self.path, "ab") as file:
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise RecordError(
                f"{self.path}: {record.identity} cannot be written ({error.strerror})"
            ) from error
        self._shared[record.session] = shared

    def state(self) -> tuple[int, ...]:
        """Returns what is another whenever the file is: its size and its time; () without a
        file.
        """
        if not self.path.exists():
            return ()
        status = self.path.stat()
        return status.st_size, status.st_mtime_ns

    def load(self, *, plain: bool = False) -> list[Record]:
        """Returns every record, oldest first; `plain`: their texts so that Markdown shows them as
        text.

        A killed run may leave a torn last line, which is skipped. Any other line that is not a
        record raises RecordError with file and line.
        """
        text = _read_bytes(self.path) or b""
        if plain:
            text = _plain(text)
        records = []
        shared = {}
        session = ""
        lines = text[: len(text) - _num_torn(text)].splitlines()
        for number, line in enumerate(lines, start=1):
            try:
                content = _parse(line)
                if "shared" in content:
                    check_fields(content, _HEADER)
                    session = content["session"]
                    shared[session] = content["shared"]
                    continue
                content = {"session": session} | content
                content = shared.get(str(content["session"]), {}) | content
                validate(content)
            except ValueError as error:
                raise RecordError(f"{self.path}, line {number}: {error}") from error
            records.append(Record(**content))
        return records

    def repair(self) -> None:
        """Makes the next append start a new line: the last one gets its newline, a torn one goes
        into a .torn file.
        """
        content = _read_bytes(self.path) or b""
        if num_torn := _num_torn(content):
            kept = self.path.with_suffix(".torn")
            print(
                f"labkit: {self.path} ended in {num_torn} bytes of a torn line, now in {kept.name}",
                file=sys.stderr,
            )
            write_bytes_atomic(kept, (_read_bytes(kept) or b"") + content[-num_torn:] + b"\n")
            os.truncate(self.path, len(content) - num_torn)
        elif content and not content.endswith((b"\n", b"\r")):
            with open(self.path, "ab") as file:
                file.write(b"\n")

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Locks the file for this process; raises RecordError if another one holds it for
        LOCK_WAIT_S.
        """
        import fcntl

        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path.with_suffix(".lock"), "w") as lock:
            deadline = time.monotonic() + LOCK_WAIT_S
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise RecordError(
                            f"{self.path}: another labkit run is writing to it"
                        ) from None
                    time.sleep(0.1)
                except OSError as error:  # some network file systems lock nothing
                    raise RecordError(
                        f"{lock.name}: cannot be locked ({error.strerror})"
                    ) from error
            yield


def _num_torn(content: bytes) -> int:
    """Returns how many bytes at a file's end are a line that was cut off: neither ended nor begun
    with a JSON value.
    """
    line = [b"", *content.splitlines(keepends=True)][-1]
    if line.endswith((b"\n", b"\r")):
        return 0
    try:
        json.JSONDecoder().raw_decode(line.decode("utf-8"))
    except (ValueError, RecursionError):
        return len(line)
    return 0


def newest(records: Iterable[Record]) -> list[Record]:
    """Returns the newest record of each identity, in the order in which these were measured.

    Records of profile "key" repeat others, to see whether they come back, and count only where
    there is no other.
    """
    latest: dict[str, Record] = {}
    for record in records:
        if record.profile != "key" or latest.get(record.identity, record).profile == "key":
            latest.pop(record.identity, None)
            latest[record.identity] = record
    return list(latest.values())


HOST_SECTION, SESSION_SECTION = SESSION_SECTIONS = ("host", "ceilings")
"""Sections that every session measures again, before any other: its call times are of its own host,
whatever the experiment, and its results are divided by its own ceilings.
"""


def by_session(records: Iterable[Record]) -> dict[str, dict[str, Record]]:
    """Returns, by resume key, the newest record of each session, the sessions oldest first."""
    sessions: dict[str, dict[str, Record]] = {}
    for record in records:
        sessions.setdefault(record.resume_key(), {})[record.session] = record
    return sessions


def to_frame(records: Iterable[Record]) -> "pd.DataFrame":
    """Returns one row per record: section, phase, status, reason, samples, observed, session,
    disturbed; then the columns of case, metrics and timer.

    "disturbed" is True where other processes slowed a measurement down, False where they did not or
    nobody looked. Of a row that was run back to back, "drift" is the fraction by which its time
    changed meanwhile, "no_energy" why it has no joules.
    """
    import pandas as pd

    columns = ("section", "phase", "status", "reason", "samples", "observed", "session")
    rows = []
    for record in records:
        row = {name: getattr(record, name) for name in columns}
        row["disturbed"] = bool(record.telemetry.get("disturbed", False))
        row |= record.case | record.metrics
        row |= {f"timer_{name}": value for name, value in record.timer.items()}
        sustained = record.telemetry.get("sustained", {})
        row |= {name: sustained[name] for name in ("drift", "no_energy") if name in sustained}
        rows.append(row)
    return pd.DataFrame(rows)
