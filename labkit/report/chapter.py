"""What a notebook holds: the records of its device, and how its facts, figures and tables are
shown.
"""

import base64
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pandas as pd
from IPython.display import Markdown

from labkit import notebooks
from labkit.configs import FIGURES, RequestError
from labkit.records import (
    Record,
    RecordError,
    RecordStore,
    by_session,
    check_measured,
    folder_of,
    newest,
    read_environment,
    single,
    to_frame,
    write_bytes_atomic,
    write_text_atomic,
)
from labkit.report import facts, tables
from labkit.report.text import listing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FIGURE = "labkit_figure"
"""Key in an output's metadata under which the report finds a figure's file name and caption."""

FACT = "labkit_fact"
"""Key in an output's metadata that tells a fact's sentence from other text, with its key for the
card.
"""


class Drawn(NamedTuple):
    """A figure as a notebook shows it: its image by MIME type, its caption and its metadata."""

    image: dict[str, str]
    caption: str
    metadata: dict[str, Any]

    def __repr__(self) -> str:
        return self.caption

    def _repr_mimebundle_(self, **_):
        return self.image, self.metadata


class Chapter:
    """One notebook's records on one device.

    Args:
        notebook: its file name without the ending.
        device: slug of the device to show.
        output: folder that holds one folder per device; "" for the repository's figures/.
        save_figures: write the SVG figures and CSV tables beside the records (`labkit run` and
            `labkit report` do).
        own: name of a function of the user's in the records of `labkit bench`, which is shown too.

    Attributes:
        environment: as recorded, {} without one; gpu: what it says of the GPU, {} where there is
            none; device_kind: "cuda" or "cpu".

    Raises:
        RecordError: the environment cannot be read; later, the records cannot, or are of another
            device.
    """

    def __init__(
        self,
        notebook: str,
        *,
        device: str,
        output: str = "",
        save_figures: bool = False,
        own: str = "",
    ):
        self.notebook = notebook
        self.number = notebook.split("_")[0]
        self.output = output
        self.asked_device = device
        self.folder = folder_of(Path(output or FIGURES), device, notebook)
        self.device = self.folder.name
        self.environment = read_environment(self.folder)
        self.gpu = self.environment.get("gpu", {})
        recorded = self.environment.get("device", {})
        self.device_name = recorded.get("name", self.device)
        by_slug = "cpu" if device.startswith("cpu-") else "cuda"
        self.device_kind = recorded.get("kind", by_slug)
        self.save_figures = save_figures
        self.own = {own: f"yours: {own.split('@')[0]}"} if own else {}

    def of(self, notebook: str) -> "Chapter":
        """Returns another notebook's chapter on the same device, of several on one of them."""
        return Chapter(notebook, device=single(self.asked_device), output=self.output)

    def all_records(self) -> list[Record]:
        """Returns the shown record of each measurement, read again only where the file has
        changed.
        """
        return [measurement.shown for measurement in self._measurements()]

    def every_record(self) -> list[Record]:
        """Returns the records of all sessions that may enter a number: those of the shown records'
        own commits.
        """
        return [record for measurement in self._measurements() for record in measurement.sessions]

    def _measurements(self) -> list["_Measurement"]:
        path = self.folder / "records" / f"{self.notebook}.jsonl"
        return _load(path, RecordStore(path).state())

    def records(self, *sections: str) -> pd.DataFrame:
        """Returns the shown records of these sections, one row each.

        Shown is the newest record of a measurement, one of the profile key only where the grid has
        none. The column "sessions" has the metrics of each session of its own commit, as `verdicts`
        reads them. Records of another commit enter nothing.
        """
        measurements = [one for one in self._measurements() if one.shown.section in sections]
        frame = to_frame(measurement.shown for measurement in measurements)
        frame["sessions"] = [
            {record.session: record.metrics for record in measurement.sessions if record.metrics}
            for measurement in measurements
        ]
        return frame

    def with_own(self, frame: pd.DataFrame, section: str) -> pd.DataFrame:
        """Returns the records of a section with those of the user's function, for a figure or a
        table. No fact is of them.
        """
        path = self.folder / "bench" / "records" / f"{self.notebook}.jsonl"
        records = [
            record
            for record in newest(RecordStore(path).load(plain=True) if self.own else [])
            if record.section == section
            and {record.phase.split(" ")[0], record.case.get("impl")} & self.own.keys()
        ]
        return pd.concat([frame, to_frame(records)], ignore_index=True) if records else frame

    def source(self) -> Markdown:
        """Shows in one line what the chapter's records are of: device, dates, software and
        commit.
        """
        records = self.all_records()
        if not records:
            return Markdown(
                f"*Not measured on {self.device}; `labkit run {self.number}` measures it.*"
            )
        commits = commits_of(records)
        commit = f"commit {commits}" if commits else ""
        parts = [self.device_name, versions_of("torch", records), dates_of(records), commit]
        return Markdown(f"*{' · '.join(filter(None, parts))}*")

    def say(
        self,
        fact: facts.Fact | Sequence[facts.Fact],
        text: str = "",
        *,
        key: str = "",
        **texts: str,
    ) -> Markdown:
        """Shows a fact as a sentence, see `facts.sentence`; `key` names it for the report's first
        page.
        """
        several = [fact] if isinstance(fact, facts.Fact) else fact
        sentence = facts.sentence(*several, text=text, **texts)
        marked = any(one.marked for one in several)
        return Markdown(f"- {sentence}", metadata={FACT: {"key": key, "marked": marked}})

    def table(
        self, build: Callable[..., pd.DataFrame], *arguments, caption: str, **options
    ) -> Markdown:
        """Shows the table `build(*arguments, **options)` under its caption.

        Neither this nor `figure` calls `build` when nothing in a frame among `arguments` was
        measured.

        Raises:
            ValueError: more rows or columns than a page's table has.
        """
        frame = _built(build, *arguments, **options)
        if frame is None or frame.empty:
            return self._nothing(caption, arguments)
        num_rows, num_columns = frame.shape
        if num_rows > tables.MAX_ROWS or num_columns > tables.MAX_COLUMNS:
            raise ValueError(
                f"{caption!r} has {num_rows} × {num_columns} cells; accepted: {tables.MAX_ROWS} × "
                f"{tables.MAX_COLUMNS}"
            )
        return Markdown(f"*{caption}*\n\n{tables.to_markdown(frame)}")

    def figure(
        self, build: Callable[..., "Figure | None"], *arguments, name: str, caption: str, **options
    ) -> Drawn | Markdown:
        """Shows the figure `build(*arguments, **options)` and, where wanted, saves it as
        NN_name.svg.

        `caption` says what is drawn, with units.
        """
        from labkit.report import figures  # matplotlib takes half a second; a plan draws nothing

        figure = _built(build, *arguments, **options)
        if figure is None:
            return self._nothing(caption, arguments)
        file_name = f"{self.number}_{name}.svg"
        if self.save_figures:
            # Drawing takes most of a chapter's time: what is saved is what is shown.
            content = figures.svg(figure)
            write_bytes_atomic(self.folder / file_name, content)
            image = {"image/svg+xml": content.decode()}
        else:
            image = {"image/png": base64.b64encode(figures.png(figure)).decode()}
        return Drawn(image, caption, {FIGURE: {"file": file_name, "caption": caption}})

    def more(self, **derived: tuple) -> Markdown:
        """Links the CSV files of all sections and of `derived`, and writes them where wanted.

        Args:
            derived: by name a function and its arguments; not called when nothing in a frame among
                these was measured.
        """
        made = {one.section: (self.records, one.section) for one in self.all_records()} | derived
        frames = {name: _built(*build) for name, build in made.items()}
        frames = {
            name: frame for name, frame in frames.items() if frame is not None and not frame.empty
        }
        if not frames:
            return Markdown(f"*Not measured on {self.device}.*")
        if self.save_figures:
            folder = self.folder / "tables"
            folder.mkdir(exist_ok=True)
            for name, frame in frames.items():
                write_text_atomic(folder / f"{self.number}_{name}.csv", tables.to_csv(frame))
        files = f"[{len(frames)} full tables](../figures/{self.device}/tables/#{self.number})"
        notebook = f"[notebook {self.number}](../notebooks/{self.notebook}.ipynb)"
        return Markdown(f"*More:* {files}, {notebook}.")

    def _nothing(self, caption: str, arguments: Sequence) -> Markdown:
        """Shows that nothing was measured, and why where all was tried and failed."""
        text = f"not measured on {self.device}"
        for frame in arguments:
            if isinstance(frame, pd.DataFrame) and not frame.empty and not _is_measured(frame):
                text = f"all {len(frame)} attempts on {self.device} failed"
                if frame["status"].iloc[0] == "skipped":
                    text = f"not possible on {self.device}"
                text += f": {str(frame['reason'].iloc[0])[:120]}"
        return Markdown(f"*{caption}: {text}.*")


def _built(build: Callable, *arguments, **options):
    frames = [argument for argument in arguments if isinstance(argument, pd.DataFrame)]
    return build(*arguments, **options) if all(map(_is_measured, frames)) else None


def _is_measured(frame: pd.DataFrame) -> bool:
    return not frame.empty and ("status" not in frame or (frame["status"] == "ok").any())


Chapters = Mapping[str, Chapter]
"""The chapters of a device, by the names of their notebooks."""


def chapters_of(device: str, output: Path | None) -> Chapters:
    """Returns the chapters of a device that have records; raises RequestError where none has."""
    root = output or FIGURES
    check_measured(device, root)
    chapters = [Chapter(name, device=device, output=str(root)) for name in notebooks.names()]
    measured = {chapter.notebook: chapter for chapter in chapters if chapter.all_records()}
    if not measured:
        raise RequestError(f"{root / device} holds no record")
    return measured


class _Measurement(NamedTuple):
    """The shown record of a measurement, and those of all sessions of its commit, one a session."""

    shown: Record
    sessions: list[Record]


@functools.lru_cache(maxsize=64)  # chapters read one another's, a report those of all devices
def _load(path: Path, state: tuple[int, ...]) -> list[_Measurement]:
    """Reads a file of records; its `state` tells its versions apart."""
    records = RecordStore(path).load(plain=True)
    folder = path.parent.parent
    devices = sorted({record.device for record in records})
    if devices not in ([], [folder.name]):
        raise RecordError(
            f"{folder} holds records of {', '.join(devices)}, not of {folder.name!r} alone"
        )
    by_key = by_session(records)
    measurements = []
    for record in newest(records):
        sessions = by_key[record.resume_key()].values()
        same = [one for one in sessions if _commit(one) == _commit(record)]
        measurements.append(_Measurement(record, same))
    return measurements


def _commit(record: Record) -> str:
    return record.source.get("commit", "")


def session_records(chapters: Chapters) -> list[Record]:
    """Returns the records of all chapters and sessions that may enter a number."""
    return [record for chapter in chapters.values() for record in chapter.every_record()]


def dates_of(records: Iterable[Record]) -> str:
    """Returns "2026-11-21 to 2026-11-23", one date where both are the same, "" where none is
    recorded.
    """
    dates = sorted(record.recorded_at[:10] for record in records if record.recorded_at)
    return " to ".join(dict.fromkeys([*dates[:1], *dates[-1:]]))


def commits_of(records: Iterable[Record]) -> str:
    """Returns the first eight digits of the commits that the records were measured with."""
    return ", ".join(sorted({_commit(record)[:8] for record in records} - {""}))


def versions_of(package: str, records: Iterable[Record]) -> str:
    """Returns the versions of a package that the records were measured with, "torch 2.12.0 and
    2.13.0"; "" for none.
    """
    versions = {record.software.get(package) or "" for record in records} - {""}
    return f"{package} {listing(sorted(versions))}" if versions else ""
