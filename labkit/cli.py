"""The command line. Heavy packages load only inside the command that needs them."""

import itertools
import logging
import shlex
import sys
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import typer

from labkit import __version__
from labkit.configs import (
    AUTO_PROFILE,
    FIGURES,
    PRECISIONS,
    REFERENCE_DEVICE,
    THIS_DEVICE,
    RequestError,
    chosen_profile,
)

USAGE_ERROR = 2
INTERRUPTED = 130

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Measure a transformer on this machine and write a report from the measurements.",
)

OutputOption = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        metavar="DIR",
        resolve_path=True,
        help="Folder that holds one folder per device. Default: figures/.",
    ),
]

DeviceOption = Annotated[
    str, typer.Option(help="Slug of the device, as `labkit devices` lists it; this: this machine.")
]


def main() -> None:
    """Runs the command line; every expected error is one line on stderr."""
    from labkit.notebooks import NotebookError
    from labkit.records import RecordError

    try:
        app()
    except (RequestError, NotebookError, RecordError) as error:
        print(f"labkit: {error}", file=sys.stderr)
        sys.exit(USAGE_ERROR if isinstance(error, RequestError) else 1)


def _version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit()


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


@app.command()
def run(
    context: typer.Context,
    notebook: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NOTEBOOK]...", help="Number or name (01, benchmarking). Default: all."
        ),
    ] = None,
    profile: Annotated[
        str,
        typer.Option(
            help="Grid of cases: smoke; full; key, the rows of full that sentences quote, to be "
            "measured in other sessions with --fresh; or auto: full on a GPU, smoke elsewhere."
        ),
    ] = AUTO_PROFILE,
    output: OutputOption = None,
    parameter: Annotated[
        list[str] | None,
        typer.Option(
            "-p",
            metavar="KEY=VALUE",
            help="Set a notebook parameter, e.g. -p sizes=small,medium. Repeatable.",
        ),
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Measure again what is recorded already.")
    ] = False,
    no_wait: Annotated[
        bool,
        typer.Option(
            "--no-wait", help="End with exit code 2 if another run is measuring on this device."
        ),
    ] = False,
) -> None:
    """Measure this device: execute the notebooks in order and write its report.

    What this machine has recorded with the same software and way of measuring is kept, so an
    interrupted run continues where it stopped.
    """
    from labkit import notebooks, records
    from labkit.device import detect, measured_by
    from labkit.experiments.sweep import measuring_lock

    names = [notebooks.resolve(name) for name in notebook or notebooks.names()]
    device = detect()
    profile = chosen_profile(profile, device.default_profile)
    options = dict(assignment.partition("=")[::2] for assignment in parameter or [])
    parameters = {name: notebooks.narrowing(name, profile, options) for name in names}
    root = _writable(output)
    folders = {name: root / measured_by(name).slug for name in names}
    # Fails now, not after hours of measuring, if the report could not read something.
    records.newest_of(folders)
    values = {
        "device": device.slug,
        "measure": True,
        "profile": profile,
        "output": str(output or ""),
        "fresh": fresh,
        "save_figures": True,
    }
    # Until this command ends, so that its rendering disturbs no other run.
    context.with_resource(measuring_lock(device, ", ".join(names), wait=not no_wait))
    target = root / device.slug
    print(f"Measuring {device.name} with the {profile} profile into {target}", file=sys.stderr)
    start = time.monotonic()
    failures = {}
    executed = {}
    try:
        for name in names:
            print(f"\n{name}", file=sys.stderr)
            try:
                executed[name] = notebooks.execute(
                    name, parameters[name] | values, show_progress=True
                )
            except notebooks.NotebookError as error:
                failures[name] = str(error)
    except KeyboardInterrupt:
        # It would print the interrupted cell's traceback.
        logging.getLogger("asyncio").setLevel(logging.CRITICAL)
        kept = "Finished measurements are recorded; the same command goes on from there."
        print(f"\nInterrupted. {kept}", file=sys.stderr)
        sys.exit(INTERRUPTED)
    from labkit.report import card, render

    written = []
    try:
        written = render.rebuild(
            device.slug,
            output=output,
            top_level=device.slug == REFERENCE_DEVICE,
            html=True,
            measured=executed,
        )
    except (RequestError, notebooks.NotebookError, records.RecordError) as error:
        # Beside what may have failed before it.
        failures["report"] = f"no report: {error}"
    _summary(folders, failures)
    print(f"{(time.monotonic() - start) / 60:.1f} minutes")
    if written:
        for line in card.lines(render.chapters_of(device.slug, output)):
            print(line)
        print(f"Report: {written[0]} and, to open in a browser, {written[-1]}")
    if failures:
        sys.exit(1)


def _summary(folders: Mapping[str, Path], failures: dict[str, str]) -> None:
    from labkit.records import newest_of, to_frame
    from labkit.report.text import disturbed_note

    records = newest_of(folders)
    print(file=sys.stderr)
    for name in folders:
        counts = Counter(record.status for record in records[name])
        states = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
        print(f"{name}: {states or 'no records'}{'  FAILED' if name in failures else ''}")
    for error in failures.values():
        print(f"labkit: {error}", file=sys.stderr)
    for sentence in disturbed_note(to_frame(itertools.chain(*records.values()))):
        print(sentence)


def _writable(output: Path | None) -> Path:
    """Returns the folder of the results, created if needed; raises RequestError if it cannot be."""
    root = (output or FIGURES).resolve()
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RequestError(f"cannot write to {root}: {error.strerror}") from None
    return root


@app.command()
def report(
    device: DeviceOption = REFERENCE_DEVICE,
    output: OutputOption = None,
    html: Annotated[
        bool, typer.Option("--html", help="Also write report.html, one self-contained page.")
    ] = False,
    top_level: Annotated[
        bool,
        typer.Option(
            "--top-level",
            help="Also write the top-level report.md, which shows the reference device.",
        ),
    ] = False,
    save_notebooks: Annotated[
        bool,
        typer.Option(
            "--save-notebooks",
            help="Also refresh the outputs stored in notebooks/ (reference device).",
        ),
    ] = False,
) -> None:
    """Rebuild a device's report from its records alone; the reference device's is the top-level
    report.md too.
    """
    from labkit.report import render

    device = _slug(device)
    if top_level and output:
        raise RequestError(
            "--top-level writes the report of a device in figures/: leave out --output"
        )
    written = render.rebuild(
        device,
        output=output,
        top_level=top_level or device == REFERENCE_DEVICE,
        html=html,
        save_notebooks=save_notebooks,
    )
    for path in written:
        print(path)


@app.command()
def devices(output: OutputOption = None) -> None:
    """List what has been measured: device, notebooks, cases, when, versions."""
    from labkit.report import render

    table = render.devices_table(output or FIGURES)
    nothing = "nothing measured yet: run `labkit run`"
    print(nothing if table.empty else table.to_markdown(index=False))


@app.command()
def compare(
    sessions: Annotated[
        bool, typer.Option("--sessions", help="Compare the sessions of a device with one another.")
    ] = False,
    device: DeviceOption = REFERENCE_DEVICE,
    notebook: Annotated[
        str | None, typer.Option(help="Number or name (01, benchmarking). Default: all.")
    ] = None,
    output: OutputOption = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="End with exit code 1 if too few rows of a kind of time agree."
        ),
    ] = False,
) -> None:
    """Show how well sessions of the same commit (`labkit run --fresh`) agree, each kind of time
    apart.
    """
    from labkit import notebooks
    from labkit.records import RecordStore, check_measured, folder_of
    from labkit.report import sessions as report
    from labkit.report.tables import to_markdown

    if not sessions:
        raise RequestError("say what to compare: --sessions")
    root = output or FIGURES
    slug = _slug(device)
    check_measured(slug, root)
    names = [notebooks.resolve(notebook)] if notebook else notebooks.names()
    chapters = {}
    for name in names:
        path = folder_of(root, slug, name) / "records" / f"{name}.jsonl"
        chapters[name] = RecordStore(path).load()
    differences = report.differences(chapters)
    if differences.empty:
        print("No commit has a row of two sessions.")
    else:
        print(report.sentence(differences))
    tables = [report.table_worst(differences), report.table_sessions(chapters)]
    print("\n\n".join(to_markdown(table) for table in tables if len(table)))
    if check and report.failed(differences):
        sys.exit(1)


@app.command()
def profile(
    size: Annotated[
        str, typer.Argument(help="Size of the model, as in chapter 01 (small, 2.7b).")
    ] = "small",
    context: Annotated[int, typer.Option(min=1, help="Context length in tokens.")] = 512,
    precision: Annotated[Literal[PRECISIONS], typer.Option(help="bf16: autocast.")] = "bf16",
    attention: Annotated[
        Literal["eager", "auto"], typer.Option(help="auto: our FlashAttention.")
    ] = "eager",
    phase: Annotated[
        Literal["inference", "forward_backward", "train_step"], typer.Option()
    ] = "train_step",
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The capture, without suffix.")
    ] = Path("capture"),
) -> None:
    """Capture one step and its call stacks with Nsight Systems, else torch.profiler; keep it, and
    say how by hand.
    """
    from labkit.configs import model_config
    from labkit.experiments import captured_step
    from labkit.measure.profiling import ProfileError

    case = (model_config(size).name, str(context), precision, attention, phase)
    _writable(output.parent)
    try:
        path = captured_step.keep_capture(case, output)
    except (ProfileError, TimeoutError) as error:
        print(f"labkit: {error}", file=sys.stderr)
        sys.exit(1)
    viewer = "at ui.perfetto.dev" if path.suffix == ".json" else "in Nsight Systems"
    print(f"Capture: {path} (open it {viewer})")
    print(f"By hand: {captured_step.nsys_line(case, output)}")
    capture = shlex.quote(f"{output}.nsys-rep")
    print(f"Its kernels: nsys stats --report cuda_gpu_kern_sum,nvtx_gpu_proj_sum {capture}")
    print(
        "A capture holds every environment variable of its process: do not publish one that you "
        "made by hand."
    )


def _slug(device: str) -> str:
    if device != THIS_DEVICE:
        return device
    from labkit.device import detect

    return detect().slug


@app.command()
def doctor() -> None:
    """Show what this machine has and lacks, and what each lack disables."""
    from labkit.device import checks, find_nsys

    def nsys_failure() -> str:
        from labkit.measure.profiling import Nsys

        if not find_nsys():
            return "not found"
        nsys = Nsys.find()
        return nsys.failure() if nsys else "it does not start"

    for check in checks(nsys_failure):
        disables = "" if check.present else f"  (disables: {check.disables})"
        print(f"{'ok' if check.present else 'no'}  {check.name}: {check.detail}{disables}")
