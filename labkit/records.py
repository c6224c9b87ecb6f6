"""The measurements: one JSON line per measured phase, appended and fsynced, loaded for the report.

A record is written once and never changed. Measuring something again appends a newer record of the same
identity, and readers take the newest. Nothing here imports torch, and pandas only what makes a frame: whoever measures
spares its half a second.
"""

import contextlib
import json
import math
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

SCHEMA_VERSION = 1
STATUSES = ("ok", "oom", "error", "skipped", "timeout")


class RecordError(Exception):
    """A record, or a file of records, that cannot be used; the message names the file and the line."""


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
        samples: the raw samples behind the metrics, by name with unit, where there are few.
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
    samples: dict[str, list[float]] = field(default_factory=dict)
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
    """Raises ValueError for a time that is not positive or an efficiency above 100 % of the datasheet peak.

    Such a number says that the measurement is broken, whatever its cause, so it must not become a row.
    """
    for name, value in metrics.items():
        if value is None:
            continue
        if not math.isfinite(value):
            raise ValueError(f"{name} is {value}")
        if name.endswith("_ms") and name != "std_ms" and value <= 0:
            raise ValueError(f"{name} is {value}: a time must be positive")
        if name.endswith("datasheet_fraction") and value > 1:
            raise ValueError(f"{name} is {value:.3f}: more than the datasheet peak of this device")


class RecordStore:
    """The append-only JSON-lines file of one notebook on one device."""

    def __init__(self, path: Path | str):
        self.path = Path(path)

    def append(self, record: Record) -> None:
        """Writes one record as one line and returns after it has reached the disk."""
        if record.status not in STATUSES:
            raise ValueError(f"unknown status {record.status!r}; accepted: {', '.join(STATUSES)}")
        line = json.dumps(asdict(record), sort_keys=True, allow_nan=False) + "\n"
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())

    def load(self) -> list[Record]:
        """Returns every record, oldest first.

        A last line without its newline is what a killed run leaves behind: it is left out. Anything else
        that does not parse raises RecordError with file and line, and nothing is changed.
        """
        if not self.path.exists():
            return []
        lines = self.path.read_bytes().split(b"\n")
        records = []
        for number, line in enumerate(lines[:-1], start=1):
            try:
                content = json.loads(line)
            except ValueError as error:
                raise RecordError(f"{self.path}, line {number}: not a JSON record ({error})") from error
            records.append(self._parse(content, number))
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

    def _parse(self, content: Any, number: int) -> Record:
        if not isinstance(content, dict):
            raise RecordError(f"{self.path}, line {number}: not a record but {type(content).__name__}")
        version = content.get("schema_version")
        if not isinstance(version, int) or version > SCHEMA_VERSION:
            raise RecordError(
                f"{self.path}, line {number}: schema version {version!r}; this labkit reads up to {SCHEMA_VERSION}"
            )
        unknown = content.keys() - {f.name for f in fields(Record)}
        if unknown:
            raise RecordError(f"{self.path}, line {number}: unknown fields {', '.join(sorted(unknown))}")
        try:
            return Record(**content)
        except TypeError as error:
            raise RecordError(f"{self.path}, line {number}: {error}") from error


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
