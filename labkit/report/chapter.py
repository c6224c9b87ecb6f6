"""What a notebook holds: the records of its device, and how tables, figures and findings are shown."""

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
from labkit.report import figures, tables, verdicts
from labkit.report.findings import count, disturbed_note

FIGURE_METADATA = "labkit_figure"
"""Key in an output's metadata under which the report finds the figure's file name and its description."""

MAX_FINDINGS = 3
"""Findings shown per section."""


class Drawn(NamedTuple):
    """A figure as a notebook shows it: its image by MIME type, its alternative text and its metadata."""

    image: dict[str, str]
    description: str
    metadata: dict[str, Any]

    def __repr__(self) -> str:
        return self.description

    def _repr_mimebundle_(self, include=None, exclude=None):
        return self.image, self.metadata


class Chapter:
    """One notebook's records on one device.

    Args:
        notebook: its file name without the ending.
        device: slug of the device to show.
        output: folder that holds one folder per device; "" for the repository's figures/.
        save_figures: write the SVG figures and CSV tables beside the records (`labkit run` and `labkit report` do).

    Raises:
        RecordError: the records cannot be read, or are of another device.
    """

    def __init__(self, notebook: str, *, device: str, output: str = "", save_figures: bool = False):
        self.notebook = notebook
        self.number = notebook.split("_")[0]
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
        """Returns "cuda", "cpu" or "mps" as recorded; without an environment, as the slug begins."""
        by_slug = {"cpu": "cpu", "mps": "mps"}.get(self.device.split("-")[0], "cuda")
        return self.environment.get("device", {}).get("kind", by_slug)

    def all_records(self) -> list[Record]:
        """Returns the shown record of each measurement, read again only where the file has changed."""
        return self._loaded().shown

    def sessions(self, *without: str) -> list[list[Record]]:
        """Returns each measurement's records, one of every session that has it, but for those of these sections."""
        found = (list(of_sessions.values()) for of_sessions in self._loaded().by_session.values())
        return [records for records in found if records[0].section not in without]

    def _loaded(self) -> "_Loaded":
        path = self.folder / "records" / f"{self.notebook}.jsonl"
        loaded = _load(path, RecordStore(path).state())
        if loaded.devices not in ([], [self.device]):
            devices = ", ".join(loaded.devices)
            raise RecordError(f"{self.folder} holds records of {devices}, not of {self.device!r} alone")
        return loaded

    def records(self, *sections: str, every_session: bool = False) -> pd.DataFrame:
        """Returns the shown records of these sections, one row each; `attrs` has the device's name and its kind.

        Shown is the newest record of a measurement; of a call that its host held up, that of the fastest session.
        With `every_session` also the older records of each measurement, such as the ceilings of earlier sessions.
        Where a row was measured in several, the column "sessions" has its metrics by session, as `verdicts` reads them.
        """
        loaded = self._loaded()
        records = loaded.every if every_session else loaded.shown
        records = [record for record in records if record.section in sections]
        frame = to_frame(records)
        same = [loaded.by_session[record.resume_key()].values() for record in records]
        if any(len(others) > 1 for others in same):
            frame["sessions"] = [{one.session: one.metrics for one in others if one.metrics} for others in same]
        frame.attrs |= {"device": self.device_name, "device_kind": self.device_kind}
        return frame

    def source(self) -> Markdown:
        """Shows in one line what the chapter's records are of: device, dates, software and commit."""
        records = self.all_records()
        if not records:
            return Markdown(f"*Not measured on {self.device}; `labkit run {self.number}` measures it.*")
        commits = commits_of(records)
        torch = ", ".join(sorted({record.software.get("torch", "") for record in records} - {""}))
        parts = [self.device_name, f"torch {torch}" if torch else "", dates_of(records)]
        return Markdown(f"*{' · '.join(filter(None, [*parts, f'commit {commits}' if commits else '']))}*")

    def table(self, build: Callable[..., pd.DataFrame], *arguments, caption: str, **options) -> Markdown:
        """Shows the table `build(*arguments, **options)` under its caption, with at most MAX_ROWS rows.

        Neither this nor `figure` and `findings` call `build` when nothing in a frame among `arguments` was measured.
        "{time}" in the caption becomes the kind of time that the first frame holds; what all rows share is added to it.
        """
        frame = self._built(build, *arguments, **options)
        caption = caption.replace("{time}", kinds_of_time(arguments))
        if frame is None or frame.empty:
            return Markdown(f"*{caption}: {_why_not(self.device, arguments)}.*")
        if len(frame) > tables.MAX_ROWS:
            caption += f" (the first {tables.MAX_ROWS} of {len(frame):,} rows)"
            frame = frame.head(tables.MAX_ROWS)
        frame, same = tables.without_constants(frame)
        caption += f"; all rows: {same}" if same else ""
        return Markdown(f"*{caption}*\n\n{tables.to_markdown(frame)}")

    def figure(
        self,
        build: Callable[..., Figure | None],
        *arguments,
        name: str,
        description: str,
        here: pd.DataFrame | None = None,
        **options,
    ) -> "Drawn | Markdown":
        """Shows the figure `build(*arguments, **options)` and, where wanted, saves it as NN_name.svg.

        `description` is its alternative text; `here` has rows of this machine for `figures.mark_here`.
        """
        figure = self._built(build, *arguments, **options)
        if figure is None:
            return Markdown(f"*{description}: {_why_not(self.device, arguments)}.*")
        if here is not None:
            figures.mark_here(figure, here)
        file_name = f"{self.number}_{name}.svg"
        if self.save_figures and here is None:  # drawing takes most of a chapter's time: what is saved is what is shown
            content = figures.svg(figure)
            write_bytes_atomic(self.folder / file_name, content)
            image = {"image/svg+xml": content.decode()}
        else:
            image = {"image/png": base64.b64encode(figures.png(figure)).decode()}
        metadata = {FIGURE_METADATA: {"file": file_name, "description": description}} if here is None else {}
        return Drawn(image, description, metadata)

    def findings(self, build: Callable[..., Sequence[str]], *arguments, **options) -> Markdown:
        """Shows at most MAX_FINDINGS computed sentences as a list, and how often the machine was busy."""
        sentences = list(self._built(build, *arguments, **options) or [])[:MAX_FINDINGS]
        if not sentences:
            why = _why_not(self.device, arguments)
            return Markdown(f"*{why[0].upper()}{why[1:]}.*")
        frames = [x for x in arguments if isinstance(x, pd.DataFrame) and "disturbed" in x]
        busy = [f"{tables.DISTURBED}{note}" for note in disturbed_note(pd.concat(frames))] if frames else []
        return Markdown("\n".join(f"- {sentence}" for sentence in [*sentences, *busy]))

    def full_tables(self, **derived: tuple) -> Markdown:
        """Links the CSV files of all sections and of `derived`, and writes them where wanted.

        Args:
            derived: by name a function and its arguments; not called when nothing in a frame among these was measured.
        """
        frames = {section: self.records(section) for section in dict.fromkeys(r.section for r in self.all_records())}
        links = []
        for name, frame in {**frames, **{name: self._built(*made) for name, made in derived.items()}}.items():
            if frame is None or frame.empty:
                continue
            file_name = f"{self.number}_{name}.csv"
            if self.save_figures:
                (self.folder / "tables").mkdir(exist_ok=True)
                write_text_atomic(self.folder / "tables" / file_name, tables.to_csv(frame))
            links.append(f"[{name}](../figures/{self.device}/tables/{file_name})")
        return Markdown(f"Full tables (CSV): {', '.join(links)}." if links else f"*Not measured on {self.device}.*")

    @staticmethod
    def _built(build: Callable, *arguments, **options):
        frames = [argument for argument in arguments if isinstance(argument, pd.DataFrame)]
        return build(*arguments, **options) if all(map(_is_measured, frames)) else None


class _Loaded(NamedTuple):
    """A file's records: the shown one of each measurement, all of them, these by session, and their devices."""

    shown: list[Record]
    every: list[Record]
    by_session: dict[str, dict[str, Record]]
    devices: list[str]


@functools.lru_cache(maxsize=16)  # chapters and the front page read one another's
def _load(path: Path, state: tuple[int, ...]) -> _Loaded:
    """Reads a file of records; its `state` tells its versions apart."""
    records = RecordStore(path).load(plain=True)
    sessions = by_session(records)
    shown = [_least_held_up(record, sessions[record.resume_key()]) for record in newest(records)]
    return _Loaded(shown, records, sessions, sorted({record.device for record in records}))


def _least_held_up(newest: Record, sessions: Mapping[str, Record]) -> Record:
    """Returns the newest record; of a call issued for over half of its time the fastest of the same commit.

    That must be a tenth less: calls of one session belong together.
    """
    if verdicts.KIND_OF_METHOD.get(newest.timer.get("method")) != "call" or verdicts.issued(newest.metrics) <= 0.5:
        return newest
    same = [x for x in sessions.values() if x.metrics and x.source.get("commit") == newest.source.get("commit")]
    fastest = min(same, key=lambda record: record.metrics["median_ms"])
    return fastest if newest.metrics["median_ms"] > 1.1 * fastest.metrics["median_ms"] else newest


def _is_measured(frame: pd.DataFrame) -> bool:
    return not frame.empty and ("status" not in frame or bool((frame["status"] == "ok").any()))


def _why_not(device: str, arguments: Sequence) -> str:
    """Returns "not measured on nvidia-h200", and why where all was tried and failed."""
    for frame in arguments:
        if isinstance(frame, pd.DataFrame) and not frame.empty and not _is_measured(frame):
            status, reason = frame["status"].iloc[0], frame["reason"].iloc[0]
            why = f"the first by {status} ({reason[:120]})" if reason else f"the first by {status}"
            return f"not measured on {device}: {count(len(frame), 'attempt')} failed, {why}"
    return f"not measured on {device}"


def dates_of(records: Sequence[Record]) -> str:
    """Returns "2026-11-21 to 2026-11-23", one date where both are the same, "" where none is recorded."""
    dates = sorted(record.recorded_at[:10] for record in records if record.recorded_at)
    return " to ".join(dict.fromkeys([*dates[:1], *dates[-1:]]))


def commits_of(records: Sequence[Record]) -> str:
    """Returns the first eight digits of the commits that the records were measured with."""
    return ", ".join(sorted({record.source.get("commit", "")[:8] for record in records} - {""}))


def kinds_of_time(arguments: Sequence) -> str:
    """Returns "call time", "device time" or both, as the first frame among `arguments` was timed."""
    for frame in arguments:
        if isinstance(frame, pd.DataFrame) and "timer_method" in frame:
            methods = frame["timer_method"].dropna().unique()
            kinds = sorted({verdicts.kind_of_time({"timer_method": method}) for method in methods})
            return f"{' and '.join(kinds)} time"
    return "time"
