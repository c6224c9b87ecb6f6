"""What a notebook holds: the records of its device, and how its facts, figures and tables are
shown.
"""

import base64
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
from IPython.display import Markdown
from matplotlib.figure import Figure

from labkit.configs import FIGURES
from labkit.records import (
    Record,
    RecordError,
    RecordStore,
    by_session,
    folder_of,
    newest,
    read_environment,
    to_frame,
    write_bytes_atomic,
    write_text_atomic,
)
from labkit.report import facts, figures, tables, verdicts

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

    def _repr_mimebundle_(self, include=None, exclude=None):
        return self.image, self.metadata


class Chapter:
    """One notebook's records on one device.

    Args:
        notebook: its file name without the ending.
        device: slug of the device to show.
        output: folder that holds one folder per device; "" for the repository's figures/.
        save_figures: write the SVG figures and CSV tables beside the records (`labkit run` and
            `labkit report` do).

    Raises:
        RecordError: the records cannot be read, or are of another device.
    """

    def __init__(self, notebook: str, *, device: str, output: str = "", save_figures: bool = False):
        self.notebook = notebook
        self.number = notebook.split("_")[0]
        self.output = output
        self.asked_device = device
        self.folder = folder_of(Path(output or FIGURES), device, notebook)
        self.device = self.folder.name
        self.save_figures = save_figures

    @property
    def environment(self) -> dict:
        """Returns the recorded environment, {} without one."""
        return read_environment(self.folder)

    @property
    def device_name(self) -> str:
        return self.environment.get("device", {}).get("name", self.device)

    @property
    def device_kind(self) -> str:
        """Returns "cuda", "cpu" or "mps" as recorded; without an environment, as the slug
        begins.
        """
        by_slug = {"cpu": "cpu", "mps": "mps"}.get(self.device.split("-")[0], "cuda")
        return self.environment.get("device", {}).get("kind", by_slug)

    def of(self, notebook: str) -> "Chapter":
        """Returns another notebook's chapter on the same device."""
        return Chapter(notebook, device=self.asked_device, output=self.output)

    def all_records(self) -> list[Record]:
        """Returns the shown record of each measurement, read again only where the file has
        changed.
        """
        return self._loaded().shown

    def every_record(self) -> list[Record]:
        """Returns the records of all sessions that may enter a number: those of the shown records'
        own commits.
        """
        loaded = self._loaded()
        return [
            record
            for record in loaded.every
            if _commit(record) == loaded.commit_of.get(record.resume_key())
        ]

    def _loaded(self) -> "_Loaded":
        path = self.folder / "records" / f"{self.notebook}.jsonl"
        loaded = _load(path, RecordStore(path).state())
        if loaded.devices not in ([], [self.device]):
            devices = ", ".join(loaded.devices)
            raise RecordError(
                f"{self.folder} holds records of {devices}, not of {self.device!r} alone"
            )
        return loaded

    def records(self, *sections: str) -> pd.DataFrame:
        """Returns the shown records of these sections, one row each; `attrs` has the device's name
        and its kind.

        Shown is the newest record of a measurement; of a call that its host held up, that of the
        fastest session. Where a row was measured in several sessions of its own commit, the column
        "sessions" has its metrics by session, as `verdicts` reads them. Records of another commit
        enter nothing.
        """
        loaded = self._loaded()
        records = [record for record in loaded.shown if record.section in sections]
        frame = to_frame(records)
        same = [loaded.same_commit(record) for record in records]
        if any(len(others) > 1 for others in same):
            frame["sessions"] = [
                {one.session: one.metrics for one in others if one.metrics} for others in same
            ]
        frame.attrs |= {"device": self.device_name, "device_kind": self.device_kind}
        return frame

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
        torch = ", ".join(sorted({record.software.get("torch", "") for record in records} - {""}))
        parts = [self.device_name, f"torch {torch}" if torch else "", dates_of(records)]
        parts.append(f"commit {commits}" if commits else "")
        return Markdown(f"*{' · '.join(part for part in parts if part)}*")

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
        sentence = facts.sentence(fact, text, **texts)
        marked = any(one.marked for one in ((fact,) if isinstance(fact, facts.Fact) else fact))
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
        frame = self._built(build, *arguments, **options)
        if frame is None or frame.empty:
            return Markdown(f"*{caption}: {_why_not(self.device, arguments)}.*")
        if len(frame) > tables.MAX_ROWS or len(frame.columns) > tables.MAX_COLUMNS:
            most = f"{tables.MAX_ROWS} × {tables.MAX_COLUMNS}"
            raise ValueError(
                f"{caption!r} has {len(frame)} × {len(frame.columns)} cells; accepted: {most}"
            )
        return Markdown(f"*{caption}*\n\n{tables.to_markdown(frame)}")

    def figure(
        self,
        build: Callable[..., Figure | None],
        *arguments,
        name: str,
        caption: str,
        here: pd.DataFrame | None = None,
        **options,
    ) -> "Drawn | Markdown":
        """Shows the figure `build(*arguments, **options)` and, where wanted, saves it as
        NN_name.svg.

        `caption` says what is drawn, with units; `here` has rows of this machine for
        `figures.mark_here`.
        """
        figure = self._built(build, *arguments, **options)
        if figure is None:
            return Markdown(f"*{caption}: {_why_not(self.device, arguments)}.*")
        if here is not None:
            figures.mark_here(figure, here)
        file_name = f"{self.number}_{name}.svg"
        if (
            self.save_figures and here is None
        ):  # drawing takes most of a chapter's time: what is saved is what is shown
            content = figures.svg(figure)
            write_bytes_atomic(self.folder / file_name, content)
            image = {"image/svg+xml": content.decode()}
        else:
            image = {"image/png": base64.b64encode(figures.png(figure)).decode()}
        metadata = {FIGURE: {"file": file_name, "caption": caption}} if here is None else {}
        return Drawn(image, caption, metadata)

    def more(self, **derived: tuple) -> Markdown:
        """Links the CSV files of all sections and of `derived`, and writes them where wanted.

        Args:
            derived: by name a function and its arguments; not called when nothing in a frame among
                these was measured.
        """
        sections = dict.fromkeys(record.section for record in self.all_records())
        frames = {section: self.records(section) for section in sections}
        frames |= {name: self._built(*made) for name, made in derived.items()}
        frames = {
            name: frame for name, frame in frames.items() if frame is not None and not frame.empty
        }
        if not frames:
            return Markdown(f"*Not measured on {self.device}.*")
        if self.save_figures:
            (self.folder / "tables").mkdir(exist_ok=True)
            for name, frame in frames.items():
                write_text_atomic(
                    self.folder / "tables" / f"{self.number}_{name}.csv", tables.to_csv(frame)
                )
        files = f"[{len(frames)} full tables](../figures/{self.device}/tables/#{self.number})"
        return Markdown(
            f"*More:* {files}. *Try it:* [notebook "
            f"{self.number}](../notebooks/{self.notebook}.ipynb)."
        )

    @staticmethod
    def _built(build: Callable, *arguments, **options):
        frames = [argument for argument in arguments if isinstance(argument, pd.DataFrame)]
        return build(*arguments, **options) if all(map(_is_measured, frames)) else None


class _Loaded(NamedTuple):
    """A file's records: the shown one of each measurement, all of them, these by session, and their
    devices.
    """

    shown: list[Record]
    every: list[Record]
    by_session: dict[str, dict[str, Record]]
    commit_of: dict[str, str]
    devices: list[str]

    def same_commit(self, record: Record) -> list[Record]:
        """Returns the records of a measurement, one a session, that are of the shown one's
        commit.
        """
        sessions = self.by_session[record.resume_key()].values()
        return [one for one in sessions if _commit(one) == _commit(record)]


@functools.lru_cache(maxsize=16)  # chapters read one another's
def _load(path: Path, state: tuple[int, ...]) -> _Loaded:
    """Reads a file of records; its `state` tells its versions apart."""
    records = RecordStore(path).load(plain=True)
    sessions = by_session(records)
    shown = [_least_held_up(record, sessions[record.resume_key()]) for record in newest(records)]
    commits = {record.resume_key(): _commit(record) for record in shown}
    return _Loaded(shown, records, sessions, commits, sorted({record.device for record in records}))


def _commit(record: Record) -> str:
    return record.source.get("commit", "")


def _least_held_up(newest: Record, sessions: Mapping[str, Record]) -> Record:
    """Returns the newest record; of a call issued for over half of its time the fastest of the same
    commit.

    That must be a tenth less: calls of one session belong together.
    """
    is_call = verdicts.KIND_OF_METHOD.get(newest.timer.get("method")) == verdicts.CALL
    if not is_call or verdicts.issued(newest.metrics) <= 0.5:
        return newest
    same = [one for one in sessions.values() if one.metrics and _commit(one) == _commit(newest)]
    fastest = min(same, key=lambda record: record.metrics["median_ms"])
    return fastest if newest.metrics["median_ms"] > 1.1 * fastest.metrics["median_ms"] else newest


def _is_measured(frame: pd.DataFrame) -> bool:
    return not frame.empty and ("status" not in frame or bool((frame["status"] == "ok").any()))


def _why_not(device: str, arguments: Sequence) -> str:
    """Returns "not measured on nvidia-h200", and why where all was tried and failed."""
    for frame in arguments:
        if isinstance(frame, pd.DataFrame) and not frame.empty and not _is_measured(frame):
            reason = str(frame["reason"].iloc[0])[:120]
            if frame["status"].iloc[0] == "skipped":
                return f"not possible on {device}: {reason}"
            return f"all {len(frame)} attempts on {device} failed: {reason}"
    return f"not measured on {device}"


def dates_of(records: Sequence[Record]) -> str:
    """Returns "2026-11-21 to 2026-11-23", one date where both are the same, "" where none is
    recorded.
    """
    dates = sorted(record.recorded_at[:10] for record in records if record.recorded_at)
    return " to ".join(dict.fromkeys([*dates[:1], *dates[-1:]]))


def commits_of(records: Sequence[Record]) -> str:
    """Returns the first eight digits of the commits that the records were measured with."""
    return ", ".join(sorted({_commit(record)[:8] for record in records} - {""}))
