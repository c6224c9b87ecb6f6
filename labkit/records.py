"""The measurements: one JSON line per measured phase, appended and fsynced, loaded for the report.

A record is written once and never changed. Measuring something again appends a newer record of the same
identity, and readers take the newest. Nothing here imports torch, and pandas only what makes a frame: whoever measures
spares its half a second.
"""

import contextlib
import json
import math
import os
import re
import reprlib
import secrets
import time
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, asdict, dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_origin

if TYPE_CHECKING:
    import pandas as pd

SCHEMA_VERSION = 1
STATUSES = ("ok", "oom", "error", "skipped", "timeout")


MAX_DEPTH = 16
"""Dicts and lists inside one another that a recorded value may have."""


class RecordError(Exception):
    """A file of a device's folder that cannot be read or written; the message names it and, of records, the line."""


@dataclass(frozen=True)
class Record:
    """One phase of one case, measured on one device.

    Fields:
        notebook: its file name without the ending, e.g. "01_benchmarking".
        section: the question inside the notebook, e.g. "steps".
        case: the parameters that tell this case from the others of its section, as read back from the
            live objects (as requested where the case failed before there were any).
        observed: the rest of what ran, read back from the live objects: dimensions, dtypes, fused or not.
        phase: what was timed inside the case.
        status: one of STATUSES; `reason` says why when it is not "ok".
        metrics: numbers with their unit in the name ("median_ms", "peak_bytes"); empty unless ok.
        samples: the raw samples behind the metrics, by name with unit, where there are few; None where not finite.
        timer: method, number of warm-up steps, why it stopped.
        telemetry: clocks, power, temperature and throttle reasons during the timed window, load of the host, and
            whether other processes disturbed it.
        device: slug; software: versions; source: commit and dirty flag; session: one `labkit run`.
        measurement_version: raised whenever how something is measured changes.
        recorded_at: UTC, ISO 8601.
    """

    notebook: str
    section: str
    case: dict[str, Any]
    phase: str
    status: str
    device: str
    measurement_version: int
    reason: str = ""
    metrics: dict[str, float | int | None] = field(default_factory=dict)
    samples: dict[str, list[float | None]] = field(default_factory=dict)
    timer: dict[str, Any] = field(default_factory=dict)
    telemetry: dict[str, Any] = field(default_factory=dict)
    observed: dict[str, Any] = field(default_factory=dict)
    software: dict[str, str] = field(default_factory=dict)
    source: dict[str, Any] = field(default_factory=dict)
    session: str = ""
    recorded_at: str = ""
    schema_version: int = SCHEMA_VERSION

    @property
    def identity(self) -> str:
        """What makes two records measurements of the same thing."""
        return json.dumps([self.notebook, self.section, self.case, self.phase], sort_keys=True)

    def resume_key(self) -> str:
        """Identity together with what a measurement must share to be taken over by a resumed run."""
        return json.dumps([self.identity, self.device, software_key(self.software), self.measurement_version])


def software_key(software: dict[str, str]) -> list[str]:
    """The versions that decide whether an earlier measurement still stands.

    Of the driver only the branch counts (580 of 580.159.04): its patch releases do not invalidate timings.
    """
    branch = software.get("driver", "").split(".")[0]
    return [software.get("torch", ""), software.get("triton", ""), software.get("cuda", ""), branch]


def check_plausible(metrics: dict[str, float | int | None]) -> None:
    """Raises ValueError for a number that cannot be.

    These are a time that is not positive, a negative count, an efficiency above 100 % of the datasheet peak, and a
    minimum, p20, median and p80 out of order. Each says that the measurement is broken, so it must not become a row.
    """
    for name, value in metrics.items():
        if value is None:
            continue
        if not math.isfinite(value):
            raise ValueError(f"{name} is {value}")
        if value < 0 and (name == "n" or name.startswith("num_") or name.endswith("_bytes")):
            raise ValueError(f"{name} is {value}: a count cannot be negative")
        if name.endswith("_ms") and name != "std_ms" and value <= 0:
            raise ValueError(f"{name} is {value}: a time must be positive")
        if name.endswith("datasheet_fraction") and value > 1:
            raise ValueError(f"{name} is {value:.3f}: more than the datasheet peak of this device")
    ordered = [(name, metrics[name]) for name in _ORDERED if metrics.get(name) is not None]
    for (lower, low), (upper, high) in pairwise(ordered):
        if low > high:
            raise ValueError(f"{lower} is {low} and {upper} is {high}: out of order")


_ORDERED = ("min_ms", "p20_ms", "median_ms", "p80_ms")
_TYPES = {f.name: get_origin(f.type) or f.type for f in fields(Record)}
_REQUIRED = [f.name for f in fields(Record) if f.default is MISSING and f.default_factory is MISSING]
_NUMBERS_OR_NULL = {int, float, type(None)}


def validate(content: Any) -> None:
    """Raises ValueError, naming the field, where parsed JSON is not a record as `Record` describes it."""
    if not isinstance(content, dict):
        raise ValueError(f"not a record but {type(content).__name__}")
    version = content.get("schema_version")
    if type(version) is not int or not 1 <= version <= SCHEMA_VERSION:
        raise ValueError(f"schema version {_shown(version)}; this labkit reads up to {SCHEMA_VERSION}")
    if unknown := content.keys() - _TYPES.keys():
        raise ValueError(f"unknown fields {', '.join(sorted(name[:40] for name in unknown))}")
    if missing := [name for name in _REQUIRED if name not in content]:
        raise ValueError(f"no field {missing[0]}")
    for name, value in content.items():
        if type(value) is not _TYPES[name]:
            raise _unfit(name, value, _JSON_NAMES[_TYPES[name]])
        if value == "" and name in _REQUIRED:
            raise _unfit(name, value, "a name")
        if type(value) is dict:
            _check_values(name, value)
    if content["status"] not in STATUSES:
        raise _unfit("status", content["status"], ", ".join(STATUSES))
    if content["measurement_version"] < 0:
        raise _unfit("measurement_version", content["measurement_version"], "0 and above")
    metrics = content.get("metrics", {})
    for name, value in metrics.items():
        if type(value) not in _NUMBERS_OR_NULL:
            raise _unfit(f"metrics.{name}", value, "a number or null")
    for name, values in content.get("samples", {}).items():
        if type(values) is not list or not _NUMBERS_OR_NULL.issuperset(map(type, values)):
            raise _unfit(f"samples.{name}", values, "a list of numbers and null")
    for name, value in content.get("software", {}).items():
        if type(value) is not str:
            raise _unfit(f"software.{name}", value, "a text")
    if type(commit := content.get("source", {}).get("commit", "")) is not str:
        raise _unfit("source.commit", commit, "a text")
    reasons = content.get("telemetry", {}).get("throttle_reasons", [])
    if type(reasons) is not list or not {str}.issuperset(map(type, reasons)):
        raise _unfit("telemetry.throttle_reasons", reasons, "a list of texts")
    if metrics and content["status"] != "ok":
        raise _unfit("metrics", metrics, f"{{}} where the status is {content['status']}")
    try:
        check_plausible(metrics)
    except ValueError as error:
        raise ValueError(f"field metrics.{error}") from None


_JSON_NAMES = {str: "a text", int: "a whole number", float: "a number", dict: "an object"}


def _unfit(field_name: str, value: Any, accepted: str) -> ValueError:
    return ValueError(f"field {field_name[:80]} is {_shown(value)}; accepted: {accepted}")


def _shown(value: Any) -> str:
    return reprlib.repr(value)


def _check_values(name: str, value: Any) -> None:
    """Raises ValueError for numbers that are not finite or need more than 64 bits, and for what is nested too deeply.

    Python's parser makes infinity of 1e999, and a frame has no column for 2^80.
    """
    inside = [value]
    for _ in range(MAX_DEPTH):
        inside = [x for outer in inside for x in (outer.values() if type(outer) is dict else outer)]
        for x in inside:
            kind = type(x)
            if (kind is float and not math.isfinite(x)) or (kind is int and not -(2**63) <= x < 2**63):
                key = next((f".{key}" for key, held in value.items() if held is x), "")
                raise _unfit(f"{name}{key}", x, "finite numbers of at most 64 bits")
        inside = [x for x in inside if type(x) is dict or type(x) is list]
        if not inside:
            return
    raise ValueError(f"field {name} is nested more than {MAX_DEPTH} deep")


def _parse(text: bytes) -> Any:
    """Returns the JSON value in UTF-8 `text`; raises ValueError where there is none."""
    try:
        content = json.loads(text.decode("utf-8"))
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if re.search(rb"\\u[dD][89a-fA-F]", text):  # half of a surrogate pair: parsed, but no file takes it
        json.dumps(content, ensure_ascii=False).encode("utf-8")
    return content


# What the report reads of environment.json: with "?" it may be absent where its part is present.
_ENVIRONMENT = {
    "device.name?": str,
    "device.kind?": str,
    "gpu.num_multiprocessors": int,
    "gpu.memory_bytes": int,
    "gpu.compute_capability": str,
    "gpu.power_limit_w?": float,
    "gpu.max_sm_clock_mhz?": int,
    "cpu.name": str,
    "cpu.num_cores": int,
}
_DONE = {"num_missing": int, "profile": str}


def read_environment(folder: Path) -> dict[str, Any]:
    """Returns the environment.json of a device's folder; {} if there is none. Raises RecordError if it is damaged."""
    path = folder / "environment.json"
    content = _read_object(path, _ENVIRONMENT) or {}
    gpu = content.get("gpu", {})
    if "power_limit_w" in gpu and "max_sm_clock_mhz" not in gpu:
        raise RecordError(f"{path}: no field gpu.max_sm_clock_mhz beside gpu.power_limit_w")
    return content


def done_path(folder: Path, notebook: str) -> Path:
    """Returns the file that says a notebook reached its end, in the folder of a device."""
    return folder / "records" / f"{notebook}.done.json"


def read_done(folder: Path, notebook: str) -> dict[str, Any] | None:
    """Returns what a notebook wrote at its end: "num_missing", "profile" and more; None if it did not get there.

    Raises RecordError if the file is damaged.
    """
    return _read_object(done_path(folder, notebook), _DONE)


def _read_object(path: Path, types: dict[str, type]) -> dict[str, Any] | None:
    """Returns the JSON object in a file, None without a file; raises RecordError where a field is not of its type."""
    if (text := _read_bytes(path)) is None:
        return None
    try:
        content = _parse(text)
        if not isinstance(content, dict):
            raise ValueError(f"not an object but {type(content).__name__}")
        _check_values("at the top", content)
        for name, kind in types.items():
            *parts, last = name.rstrip("?").split(".")
            holder = content
            for part in parts:
                holder = holder.get(part, {})
                if type(holder) is not dict:
                    raise _unfit(part, holder, "an object")
            if last not in holder:
                if name.endswith("?") or (parts and not holder):
                    continue
                raise ValueError(f"no field {name}")
            value = holder[last]
            if type(value) is not kind and not (kind is float and type(value) is int):
                raise _unfit(name.rstrip("?"), value, _JSON_NAMES[kind])
            if kind is not str and value < 0:
                raise _unfit(name.rstrip("?"), value, "0 and above")
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
    """Returns the newest records of a device's folder by notebook, having read all that a report reads there.

    Raises RecordError for the first file that is damaged.
    """
    read_environment(folder)
    found = {}
    for path in sorted((folder / "records").glob("[0-9][0-9]_*.jsonl")):
        found[path.stem] = newest(RecordStore(path).load())
        read_done(folder, path.stem)
    return found


def write_bytes_atomic(path: Path, content: bytes) -> Path:
    """Writes a file so that a reader, or a killed run, sees the old content or the new one; returns `path`.

    The file keeps its permissions, and a link stays one. Raises RecordError where it cannot be written.
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

    def append(self, record: Record) -> None:
        """Writes one record as one line and returns after it has reached the disk.

        Raises ValueError or TypeError, before anything is written, for a record that `load` would refuse.
        """
        content = asdict(record)
        # An error may quote a file name that is not UTF-8.
        content["reason"] = record.reason.encode("utf-8", "backslashreplace").decode("utf-8")
        line = json.dumps(content, sort_keys=True, allow_nan=False) + "\n"
        validate(_parse(line.encode("utf-8")))
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())

    def load(self) -> list[Record]:
        """Returns every record, oldest first.

        A last line without its newline is what a killed run leaves behind: it is left out. Anything else
        that does not parse raises RecordError with file and line, and nothing is changed.
        """
        lines = (_read_bytes(self.path) or b"").split(b"\n")
        records = []
        for number, line in enumerate(lines[:-1], start=1):
            try:
                content = _parse(line)
            except ValueError as error:
                raise RecordError(f"{self.path}, line {number}: not a JSON record ({error})") from error
            try:
                validate(content)
            except ValueError as error:
                raise RecordError(f"{self.path}, line {number}: {error}") from error
            records.append(Record(**content))
        return records

    def repair(self) -> None:
        """Cuts off a last line without its newline, so that the next append starts a line of its own."""
        if not self.path.exists():
            return
        content = self.path.read_bytes()
        end = content.rfind(b"\n") + 1
        if end != len(content):
            with open(self.path, "r+b") as file:
                file.truncate(end)
                os.fsync(file.fileno())

    @contextlib.contextmanager
    def locked(self, wait_s: float = 30.0) -> Iterator[None]:
        """Holds the file for one writing process; raises RecordError if another one keeps it for `wait_s`.

        The wait covers the moments in which the processes of a killed run are still ending.
        """
        try:
            import fcntl
        except ImportError:  # not a POSIX system: no advisory locks, one writer is the user's care
            yield
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path.with_suffix(".lock"), "w") as lock:
            deadline = time.monotonic() + wait_s
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except OSError:
                    if time.monotonic() > deadline:
                        raise RecordError(f"{self.path}: another labkit run is writing to it") from None
                    time.sleep(0.1)
            yield


def newest(records: Iterable[Record]) -> list[Record]:
    """Returns the newest record of each identity, in the order in which the identities first appeared."""
    return list({record.identity: record for record in records}.values())


def single_device(records: Iterable[Record]) -> str:
    """Returns the device slug that all records share; raises RecordError when there are several or none."""
    devices = sorted({record.device for record in records})
    if len(devices) != 1:
        raise RecordError(f"records of one device are needed, these are of: {', '.join(devices) or 'none'}")
    return devices[0]


def to_frame(records: Iterable[Record]) -> "pd.DataFrame":
    """Returns one row per record: section, phase, status, reason, disturbed, samples, observed, session; then the
    columns of case, metrics and timer.

    "disturbed" is True where other processes slowed a measurement down, False where they did not or nobody looked.
    """
    import pandas as pd

    return pd.DataFrame(
        [
            {
                "section": record.section,
                "phase": record.phase,
                "status": record.status,
                "reason": record.reason,
                "disturbed": bool(record.telemetry.get("disturbed", False)),
                "samples": record.samples,
                "observed": record.observed,
                "session": record.session,
                **record.case,
                **record.metrics,
                **{f"timer_{name}": value for name, value in record.timer.items()},
            }
            for record in records
        ]
    )
