"""The measurements: one JSON line per measured phase, appended and fsynced, loaded for the report.

A record is written once and never changed. Measuring something again appends a newer record of the
same identity, and readers take the newest. What all records of a session share stands in a line of
its own before them. Nothing here imports torch, and only `to_frame` imports pandas, which takes
half a second.
"""

import contextlib
import fcntl
import json
import math
import os
import re
import reprlib
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, fields
from functools import cache, cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_origin

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
STATUSES = ("ok", "oom", "error", "skipped", "timeout", "refused")

Metrics = dict[str, float | int | None]
"""Numbers by name, with their unit in it."""

HOST_SECTION, SESSION_SECTION = SESSION_SECTIONS = ("host", "ceilings")
"""Sections that every session measures again, before any other: its call times are of its own host,
whatever the experiment, and its results are divided by its own ceilings.
"""


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
        timer: its method.
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
    metrics: Metrics = field(default_factory=dict)
    samples: dict[str, list[float | int | None]] = field(default_factory=dict)
    timer: dict[str, Any] = field(default_factory=dict)
    telemetry: dict[str, Any] = field(default_factory=dict)
    observed: dict[str, Any] = field(default_factory=dict)
    software: dict[str, str] = field(default_factory=dict)
    source: dict[str, str | bool | None] = field(default_factory=dict)
    machine: str = ""
    profile: str = ""
    session: str = ""
    recorded_at: str = ""
    schema_version: int = SCHEMA_VERSION

    @cached_property
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

    def git(*arguments: str) -> str:
        return subprocess.check_output(
            ["git", *arguments], cwd=REPOSITORY, text=True, stderr=subprocess.DEVNULL
        ).strip()

    # An installation may lie in another project's tree.
    if (REPOSITORY / ".git").exists():
        with contextlib.suppress(OSError, subprocess.CalledProcessError):  # no git, or no commit
            # Measuring writes under figures/ and re-renders the report; neither changes what is
            # measured.
            own = ("--", ".", ":!figures", ":!report.md", ":!notebooks")
            return {
                "commit": git("rev-parse", "HEAD"),
                "dirty": bool(git("status", "--porcelain", *own)),
            }
    return {"commit": "unknown", "dirty": None}


def check_plausible(metrics: Metrics, longest_ms: float = math.inf) -> None:
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


_DEFAULTS = asdict(Record(None, None, None, None, None, None))  # None: it has no default


def _checked(content: dict[str, Any]) -> Record:
    """Returns the record that a JSON object holds; raises ValueError or TypeError, naming the
    field, where it holds none.
    """
    version = content.get("schema_version")
    if version not in range(1, SCHEMA_VERSION + 1):
        raise ValueError(
            f"schema version {reprlib.repr(version)}; this labkit reads up to {SCHEMA_VERSION}"
        )
    record = Record(**content)
    for one in fields(Record):
        value = getattr(record, one.name)
        kind = get_origin(one.type) or one.type
        if not isinstance(value, kind):
            raise ValueError(
                f"field {one.name} is {reprlib.repr(value)}; accepted: {kind.__name__}"
            )
    if record.status not in STATUSES:
        raise ValueError(f"field status is {record.status!r}; accepted: {', '.join(STATUSES)}")
    if record.metrics and record.status != "ok":
        raise ValueError(f"there are metrics although the status is {record.status}")
    check_plausible(record.metrics)
    return record


_MARKUP = re.compile(
    rb"(?i)[<>`]|\](?=\()|\\(?:u(?:00(?:[01].|28|3[ce]|5[cd]|60)|d[89a-f]..)|[nrt\\])"
)
"""In JSON, also written as numbers: <, >, `, a link's ](, line ends and other control characters,
backslashes, and halves of surrogate pairs, which cannot be written alone. The report shows a quote
mark in their place, for Markdown and HTML would not show them as they are.
"""


def _finite(text: str) -> float:
    """Returns a number of JSON; raises ValueError for what no float holds: 1e999, NaN."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:40]} is not finite")
    return number


def _rounded(text: str) -> float:
    """Returns a number with the seven digits that clocks and counters know."""
    return float(f"{float(text):.7g}")


def _parse(text: bytes, parse_float: Callable[[str], float] = _finite) -> dict[str, Any]:
    """Returns the JSON object in UTF-8 `text`; raises ValueError where there is none."""
    try:
        content = json.loads(text, parse_float=parse_float, parse_constant=_finite)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{reprlib.repr(content)} is no JSON object")
    return content


def _line(content: Any) -> bytes:
    """Returns a value as a line of JSON; raises ValueError for what JSON has not."""
    text = json.dumps(content, sort_keys=True, allow_nan=False, separators=(",", ":"))
    return f"{text}\n".encode()


def as_content(record: Record) -> dict[str, Any]:
    """Returns what JSON holds of a record; raises ValueError or TypeError for one that `load` would
    refuse.
    """
    content = asdict(record)
    # The reason may quote a file name that is not UTF-8.
    content["reason"] = record.reason.encode("utf-8", "backslashreplace").decode("utf-8")
    # A case keeps its identity to the last digit.
    case = _parse(_line(content["case"]))
    content = _parse(_line(content), _rounded) | {"case": case}
    _checked(content)
    return content


def read_environment(folder: Path) -> dict[str, Any]:
    """Returns the environment.json in a device's folder; {} if there is none. Raises RecordError if
    it is damaged.
    """
    return _read_object(folder / "environment.json", device=dict, gpu=dict)


def done_path(folder: Path, notebook: str) -> Path:
    """Returns the file in a device's folder that is written when all cases of a notebook were
    tried.
    """
    return folder / "records" / f"{notebook}.done.json"


def read_done(folder: Path, notebook: str) -> dict[str, Any]:
    """Returns what a notebook's last session wrote in the end ("num_missing", "profile"); {} if it
    did not come so far.

    Raises RecordError if the file is damaged.
    """
    return _read_object(done_path(folder, notebook), num_missing=int, profile=str)


def _read_object(path: Path, **kinds: type) -> dict[str, Any]:
    """Returns the JSON object in a file, {} without a file; raises RecordError for another
    content, or for what is there under a name but not of its kind.
    """
    text = _read_bytes(path)
    if text is None:
        return {}
    try:
        content = _parse(_MARKUP.sub(b"'", text))
        for name, kind in kinds.items():
            if not isinstance(content.get(name, kind()), kind):
                raise ValueError(f"{name} is {content[name]!r}; accepted: {kind.__name__}")
    except ValueError as error:
        raise RecordError(f"{path}: {error}") from error
    return content


def _read_bytes(path: Path) -> bytes | None:
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
    records = {}
    for path in sorted(folder.glob("records/[0-9][0-9]_*.jsonl")):
        records[path.stem] = newest(RecordStore(path).load())
        read_done(folder, path.stem)
    return records


def single(device: str) -> str:
    """Returns the slug of one of several devices: "gpu" of "2x-gpu"."""
    return re.sub(r"^\d+x-", "", device)


def folder_of(root: Path, device: str, notebook: str) -> Path:
    """Returns the folder with the notebook's records of `device`: that of several in one machine,
    "2x-<device>", where there are such, else its own. Of several such, the one with most records.
    """
    num_lines = {}
    for path in root.glob(f"*/records/{notebook}.jsonl"):
        folder = path.parent.parent
        if folder.name != device and single(folder.name) == device:
            num_lines[folder] = path.read_bytes().count(b"\n")
    return max(num_lines, key=num_lines.get, default=root / device)


def measured_devices(root: Path) -> list[str]:
    """Returns the slugs of the devices that have records under `root`."""
    return sorted({path.parent.parent.name for path in root.glob("*/records/*.jsonl")})


def check_measured(device: str, root: Path) -> None:
    """Raises RequestError, naming those that have, where neither `device` nor several of it have
    records in `root`.
    """
    known = measured_devices(root)
    if not any(device in (name, single(name)) for name in known):
        measured = ", ".join(known) or "none"
        raise RequestError(
            f"nothing has been measured on {str(device)[:80]!r} in {root}; measured: {measured}"
        )


def check_device_folder(folder: Path) -> None:
    """Raises RequestError where a folder holds no records of a device."""
    if not any(folder.glob("records/*.jsonl")):
        raise RequestError(f"{folder} is no folder of a device: it has no records/NN_name.jsonl")


def write_bytes_atomic(path: Path, content: bytes) -> Path:
    """Writes a file so that a reader, or a killed run, sees the old content or the new one; returns
    `path`.

    Raises RecordError where it cannot be written.
    """
    temporary = path.with_name(f".{path.name[:80]}.{secrets.token_hex(4)}.part")
    try:
        try:
            temporary.write_bytes(content)
            os.replace(temporary, path)
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
        # The line that this store has written last of what records share.
        self._shared = b""

    def append(self, record: Record) -> None:
        """Writes one record as one line and returns after it has reached the disk.

        The first of a session is written together with the line of what they share.

        Raises ValueError or TypeError, before anything is written, for a record that `load` would
        refuse; RecordError where it cannot be written.
        """
        content = as_content(record)
        session = {"session": record.session}
        shared = {name: content.pop(name) for name in SHARED}
        own = {name: value for name, value in content.items() if value != _DEFAULTS[name]}
        header = _line(session | {"shared": shared})
        line = _line(session | own)
        if header != self._shared:
            line = header + line
        try:
            with open(self.path, "ab") as file:
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise RecordError(
                f"{self.path}: {record.identity} cannot be written ({error.strerror})"
            ) from error
        self._shared = header

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

        A killed run may leave a torn last line, one without a line end, which is skipped. Any other
        line that is not a record raises RecordError with file and line.
        """
        text = _read_bytes(self.path) or b""
        if plain:
            text = _MARKUP.sub(b"'", text)
        records = []
        shared = {}
        session = ""
        *lines, _ = text.split(b"\n")  # what ends without a line end is torn
        for number, line in enumerate(lines, start=1):
            try:
                content = _parse(line)
                if "shared" in content:
                    session = content["session"]
                    shared[session] = content["shared"]
                    continue
                content = {"session": session} | content
                content = shared.get(str(content["session"]), {}) | content
                records.append(_checked(content))
            except Exception as error:  # in a damaged line any value may stand anywhere
                raise RecordError(f"{self.path}, line {number}: {error}") from error
        return records

    def repair(self) -> None:
        """Makes the next append start a new line: a torn last one goes into a .torn file."""
        content = _read_bytes(self.path) or b""
        torn = content.rpartition(b"\n")[2]
        if torn:
            kept = self.path.with_suffix(".torn")
            where = f"{len(torn)} bytes of a torn line, now in {kept.name}"
            print(f"labkit: {self.path} ended in {where}", file=sys.stderr)
            write_bytes_atomic(kept, (_read_bytes(kept) or b"") + torn + b"\n")
            os.truncate(self.path, len(content) - len(torn))

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Locks the file for this process; says so on stderr where it must wait for another one.

        Raises RecordError where nothing can be locked.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path.with_suffix(".lock"), "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print(f"labkit: waiting for another run to write {self.path}", file=sys.stderr)
                fcntl.flock(lock, fcntl.LOCK_EX)
            except OSError as error:  # some network file systems lock nothing
                raise RecordError(f"{lock.name}: cannot be locked ({error.strerror})") from error
            yield


def newest(records: Iterable[Record]) -> list[Record]:
    """Returns the newest record of each identity, in the order in which these were measured.

    Records of profile "key" repeat the full grid's, to see whether they come back, and count only
    where there are none of it: a comparison's sides are of one session. What a session skipped, as
    without a package, hides nothing that its commit measured before.
    """
    latest: dict[str, Record] = {}
    for record in records:
        before = latest.get(record.identity, record)
        was_measured = before.status == "ok" and before.source == record.source
        if record.status == "skipped" and was_measured:
            continue
        if record.profile != "key" or before.profile in ("key", "quick"):
            latest.pop(record.identity, None)
            latest[record.identity] = record
    return list(latest.values())


def by_session(records: Iterable[Record]) -> dict[str, dict[str, Record]]:
    """Returns, by resume key, the newest record of each session, the sessions oldest first."""
    sessions = {}
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
        if record.reason.endswith("ended oom"):  # what needs that result does not fit either
            row["status"] = "oom"
        row["disturbed"] = bool(record.telemetry.get("disturbed"))
        row |= record.case | record.metrics
        row |= {f"timer_{name}": value for name, value in record.timer.items()}
        sustained = record.telemetry.get("sustained", {})
        row |= {name: sustained[name] for name in ("drift", "no_energy") if name in sustained}
        rows.append(row)
    return pd.DataFrame(rows)
