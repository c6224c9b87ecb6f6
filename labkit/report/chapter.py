"""What a notebook holds: the records of its device, and how tables, figures and findings are shown."""

import json
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from IPython.display import Markdown, display
from matplotlib.figure import Figure

from labkit.configs import FIGURES
from labkit.records import Record, RecordStore, newest, single_device, to_frame
from labkit.report import figures, tables

FIGURE_METADATA = "labkit_figure"
"""Key in an output's metadata under which the report finds the figure's file name and its description."""


class Chapter:
    """One notebook's records on one device.

    Args:
        notebook: its file name without the ending.
        device: slug of the device to show.
        output: folder that holds one folder per device; "" for the repository's figures/.
        save_figures: write each figure's SVG beside the records (what `labkit run` and `labkit report` want).

    Raises:
        RecordError: the records cannot be read, or are of another device.
    """

    def __init__(self, notebook: str, *, device: str, output: str = "", save_figures: bool = False):
        self.notebook = notebook
        self.device = device
        self.folder = Path(output or FIGURES) / device
        self.save_figures = save_figures
        self._loaded: tuple[tuple, list[Record]] | None = None

    @property
    def device_name(self) -> str:
        return self.environment_record().get("device", {}).get("name", self.device)

    @property
    def device_kind(self) -> str:
        """Returns "cuda", "cpu" or "mps" as recorded; without an environment, as the slug begins."""
        prefix = self.device.split("-")[0]
        by_slug = prefix if prefix in ("cpu", "mps") else "cuda"
        return self.environment_record().get("device", {}).get("kind", by_slug)

    def all_records(self) -> list[Record]:
        """Returns the newest record of each measurement, read again only where the file has changed."""
        path = self.folder / "records" / f"{self.notebook}.jsonl"
        state = (path.stat().st_size, path.stat().st_mtime_ns) if path.exists() else ()
        if self._loaded is None or self._loaded[0] != state:
            records = newest(RecordStore(path).load())
            if records and single_device(records) != self.device:
                raise ValueError(f"{self.folder} holds records of {records[0].device!r}, not of {self.device!r}")
            self._loaded = (state, records)
        return self._loaded[1]

    def records(self, *sections: str) -> pd.DataFrame:
        """Returns the newest records of these sections, one row each; `attrs` has the device's name and its kind."""
        frame = to_frame(record for record in self.all_records() if record.section in sections)
        frame.attrs |= {"device": self.device_name, "device_kind": self.device_kind}
        return frame

    def environment_record(self) -> dict:
        path = self.folder / "environment.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}

    def environment(self) -> Markdown:
        """Shows what was measured on, with which software, from which commit."""
        return Markdown(environment_table(self.environment_record(), self.all_records(), self.device))

    def table(self, frame: pd.DataFrame, caption: str, *, folded: bool = False) -> Markdown:
        """Shows a table under its caption; a folded one opens on a click where Markdown is rendered as HTML.

        What is the same in every row of a long folded table is said once, in its caption, and what a row repeats of the
        one above is left out: GitHub renders no more than 500 KiB of Markdown.
        """
        if frame.empty:
            return Markdown(f"*{caption}: not measured on {self.device}.*")
        if folded and (same := tables.constants(frame)):
            caption += f" ({', '.join(f'{name}: {value}' for name, value in same.items())})"
            frame = frame.drop(columns=list(same))
        text = tables.to_markdown(tables.grouped(frame) if folded else frame)
        if folded:
            return Markdown(f"<details><summary>{caption}</summary>\n\n{text}\n\n</details>")
        return Markdown(f"*{caption}*\n\n{text}")

    def figure(self, figure: Figure | None, name: str, description: str):
        """Shows a figure and, where wanted, saves it as NN_name.svg; `description` becomes its alternative text."""
        if figure is None:
            return Markdown(f"*{description}: not measured on {self.device}.*")
        file_name = f"{self.notebook.split('_')[0]}_{name}.svg"
        if self.save_figures:  # drawing is most of a chapter's time: what is saved is what is shown
            content = figures.svg(figure)
            (self.folder / file_name).write_bytes(content)
            image = {"image/svg+xml": content.decode()}
        else:
            image = {"image/png": figures.png(figure)}
        metadata = {FIGURE_METADATA: {"file": file_name, "description": description}}
        display({**image, "text/plain": description}, raw=True, metadata=metadata)
        return None

    def findings(self, sentences: Sequence[str]) -> Markdown:
        """Shows computed sentences as a list."""
        if not sentences:
            return Markdown(f"*Not measured on {self.device}.*")
        return Markdown("\n".join(f"- {sentence}" for sentence in sentences))


def environment_table(environment: dict, records: Sequence[Record], device: str) -> str:
    """Returns the facts of a measurement's environment as a Markdown table.

    Versions and commits come from the records themselves, since a sweep may have been resumed with others.
    """
    if not records:
        return f"*Not measured on {device}.*"

    def seen(values) -> str:
        return ", ".join(sorted({str(value) for value in values if value not in (None, "")})) or "–"

    rows = {"device": environment.get("device", {}).get("name", device)}
    if gpu := environment.get("gpu"):
        rows["GPU"] = (
            f"{gpu['num_multiprocessors']} multiprocessors, {gpu['memory_bytes'] / 2**30:.0f} GiB, "
            f"compute capability {gpu['compute_capability']}"
        )
        if "power_limit_w" in gpu:
            rows["limits"] = f"{gpu['power_limit_w']:.0f} W, SM clock up to {gpu['max_sm_clock_mhz']} MHz"
    if cpu := environment.get("cpu"):
        rows["CPU"] = f"{cpu['name']}, {cpu['num_cores']} cores"
    for package in ("torch", "triton", "cuda", "driver", "python"):
        versions = seen(record.software.get(package) for record in records)
        if versions != "–":
            rows[package] = versions
    rows["commit"] = seen(
        f"{record.source['commit'][:12]}{' with uncommitted changes' if record.source.get('dirty') else ''}"
        for record in records
        if record.source.get("commit")
    )
    dates = sorted(record.recorded_at[:10] for record in records if record.recorded_at)
    if dates:
        rows["measured"] = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    counts = pd.Series([record.status for record in records]).value_counts().sort_index()
    rows["records"] = ", ".join(f"{count:,} {status}" for status, count in counts.items())
    by_version: dict[int, list[str]] = {}
    for record in records:
        by_version.setdefault(record.measurement_version, []).append(record.section)
    if len(by_version) > 1 and len({record.notebook for record in records}) == 1:
        rows["measurement versions"] = "; ".join(
            f"{version}: {len(sections):,} records ({', '.join(sorted(set(sections)))})"
            for version, sections in sorted(by_version.items())
        )
    throttled = {reason for record in records for reason in record.telemetry.get("throttle_reasons", [])}
    if any(record.telemetry for record in records):
        affected = sum(bool(record.telemetry.get("throttle_reasons")) for record in records)
        rows["throttling"] = f"{', '.join(sorted(throttled))} during {affected:,} records" if throttled else "none seen"
    return tables.to_markdown(pd.DataFrame(rows.items(), columns=["", "value"]))
