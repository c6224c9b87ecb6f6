"""What is checked of a device's folder before it joins the others: its records, where they come
from, and that its tables follow from them.
"""

import filecmp
import shutil
import tempfile
from pathlib import Path
from typing import NamedTuple

from labkit.configs import RequestError
from labkit.notebooks import NotebookError
from labkit.records import (
    Record,
    RecordError,
    check,
    check_device_folder,
    read_environment,
    single,
)
from labkit.report import render
from labkit.report.text import count, listing

MOST_BYTES = 4e6
"""Of the records of a device: they stay in the repository's history for ever."""

MOST_DISTURBED = 0.1
"""Share of the measurements that other programs may have disturbed."""


class Finding(NamedTuple):
    """One line of `labkit verify`."""

    name: str
    is_fine: bool
    detail: str


def findings(folder: Path) -> list[Finding]:
    """Returns what was checked of a folder such as figures/nvidia-h200; stops where the records
    cannot be read.

    Raises RequestError where `folder` holds no records.
    """
    check_device_folder(folder)
    try:
        chapters = check(folder)
        environment = read_environment(folder)
    except RecordError as error:
        return [Finding("records", False, str(error))]
    records = [record for newest in chapters.values() for record in newest]
    slug = environment.get("device", {}).get("slug")
    size = sum(path.stat().st_size for path in folder.glob("records/*.jsonl"))
    return [
        Finding(
            "records", True, f"{count(len(records), 'record')}, every whole line as the schema says"
        ),
        Finding("device", slug == folder.name, f"environment.json names {slug}"),
        _source(records),
        _marks(records),
        Finding("size", size <= MOST_BYTES, f"{size / 1e6:.1f} MB of {MOST_BYTES / 1e6:.0f} MB"),
        _tables(folder),
    ]


def _source(records: list[Record]) -> Finding:
    commits = sorted({record.source.get("commit", "unknown") for record in records})
    num_changed = sum(record.source.get("dirty") is not False for record in records)
    detail = listing(commit[:8] for commit in commits)
    if num_changed:
        detail += f"; {count(num_changed, 'record')} of changed or unknown code"
    return Finding("commit", "unknown" not in commits and not num_changed, detail)


def _marks(records: list[Record]) -> Finding:
    measured = [record for record in records if record.status == "ok"]
    num_disturbed = sum(bool(record.telemetry.get("disturbed")) for record in measured)
    failed = [record for record in records if record.status in ("error", "timeout")]
    detail = f"{num_disturbed} of {count(len(measured), 'measurement')} disturbed"
    if failed:
        detail += f"; {count(len(failed), 'error')}, the first: {failed[0].reason[:80]}"
    return Finding("marks", num_disturbed <= MOST_DISTURBED * len(measured), detail)


def _tables(folder: Path) -> Finding:
    """Rebuilds the tables from the records, elsewhere, and compares them byte for byte."""
    one = single(folder.name)
    with tempfile.TemporaryDirectory() as root:
        copy = Path(root, folder.name)
        # Chapter 07, in the folder of several devices, reads what one of them measured.
        for beside in {folder, folder.parent / one}:
            if (beside / "records").is_dir():
                shutil.copytree(beside / "records", Path(root, beside.name, "records"))
        if (folder / "environment.json").exists():
            shutil.copy(folder / "environment.json", copy)
        try:
            render.rebuild(one, output=Path(root))
        except (NotebookError, RecordError, RequestError) as error:
            return Finding("tables", False, f"{error}".replace(root, f"{folder.parent}"))
        sides = folder / "tables", copy / "tables"
        names = sorted({path.name for side in sides for path in side.glob("*")})
        _, differ, missing = filecmp.cmpfiles(*sides, names, shallow=False)
    differ += missing
    if differ:
        return Finding("tables", False, f"{listing(differ, 3)} do not follow from the records")
    return Finding("tables", True, f"{count(len(names), 'table')}, each as its records say")
