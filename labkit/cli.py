"""The command line. Heavy packages load only inside the command that needs them."""

import errno
import gc
import os
import shlex
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer import Argument, Option

from labkit import __version__
from labkit.configs import (
    ALL_DEVICES,
    AUTO_PROFILE,
    FIGURES,
    GPU_WAYS,
    OWN,
    PRECISIONS,
    REFERENCE_DEVICE,
    STEP_WAYS,
    THIS_DEVICE,
    RequestError,
    chosen_profile,
)

if TYPE_CHECKING:
    from labkit.experiments.sweep import Session
    from labkit.report.chapter import Chapters

USAGE_ERROR = 2
INTERRUPTED = 130

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Measure a transformer on this machine and write a report from the measurements.",
)


def _folder_option(**limits: bool) -> Any:
    return Option(
        "--output",
        "-o",
        metavar="DIR",
        resolve_path=True,
        help="Folder that holds one folder per device. Default: figures/.",
        **limits,
    )


OutputOption = Annotated[Path | None, _folder_option()]
RecordedOption = Annotated[Path | None, _folder_option(exists=True, file_okay=False)]

ContextOption = Annotated[int, Option(min=1, help="Context length in tokens.")]

DimensionOption = Annotated[int | None, Option(min=1, help="In place of the model's.")]

PrecisionOption = Annotated[Literal[PRECISIONS], Option(help="bf16: autocast.")]


def main() -> None:
    """Runs the command line; every expected error is one line on stderr."""
    # A terminal may be of another encoding than UTF-8.
    if sys.stdout:  # or it is closed
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        from labkit.notebooks import NotebookError
        from labkit.records import RecordError

        app()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except (RequestError, NotebookError, RecordError) as error:
        print(f"labkit: {error}", file=sys.stderr)
        sys.exit(USAGE_ERROR if isinstance(error, RequestError) else 1)
    except OSError as error:
        if error.errno not in (
            errno.ENOSPC,
            errno.EDQUOT,
            errno.EROFS,
            errno.EACCES,
            errno.ENAMETOOLONG,
        ):
            raise
        print(f"labkit: {error.filename or 'a file'}: {error.strerror}", file=sys.stderr)
        sys.exit(1)


def _version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit()


@app.callback()
def _options(
    version: Annotated[
        bool, Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


@app.command()
def run(
    context: typer.Context,
    notebook: Annotated[
        list[str] | None,
        Argument(metavar="[NOTEBOOK]...", help="Number or name (01, benchmarking). Default: all."),
    ] = None,
    profile: Annotated[
        str,
        Option(
            help="Grid of cases: smoke; quick, what a first report needs; key, the rows of full "
            "that sentences quote, with --fresh in another session; full; or auto: on a GPU "
            "quick, key and full, a report after each; smoke elsewhere."
        ),
    ] = AUTO_PROFILE,
    output: OutputOption = None,
    parameter: Annotated[
        list[str] | None,
        Option(
            "-p",
            metavar="KEY=VALUE",
            help="Set a notebook parameter, e.g. -p sizes=small,medium, or in chapters 05 and 06 "
            "own=FILE.py:NAME, in 08 own=OPERATION:FILE.py:NAME, a function of yours. Repeatable.",
        ),
    ] = None,
    fresh: Annotated[
        bool, Option("--fresh", help="Measure again what is recorded already.")
    ] = False,
    no_wait: Annotated[
        bool,
        Option(
            "--no-wait", help="End with exit code 2 if another run is measuring on this device."
        ),
    ] = False,
    dry_run: Annotated[
        bool,
        Option(
            "--dry-run", help="Show cases, expected minutes and what will not fit; measure nothing."
        ),
    ] = False,
    nnodes: Annotated[
        int,
        Option(
            min=1,
            help="Of chapter 07 on several machines, as torchrun's: how many there are. Each runs "
            "this command; the first one measures, and the others start their ranks for it.",
        ),
    ] = 1,
    node_rank: Annotated[int, Option(min=0, help="Which of them this one is.")] = 0,
    master_addr: Annotated[str, Option(help="Where the others reach the first.")] = "",
    master_port: Annotated[int, Option(min=1, max=65535, help="Its port.")] = 29500,
) -> None:
    """Measure this device and write its report: the notebooks, executed by papermill.

    What this machine has recorded with the same software and way of measuring is kept, so an
    interrupted run continues where it stopped.
    """
    from labkit import notebooks, records
    from labkit.device import detect, measured_by
    from labkit.experiments import sweep

    # torch warns of the closed connection from which a follower learns that node 0 has ended, and
    # of memory that is older than a profile.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    names = list(dict.fromkeys(map(notebooks.resolve, notebook or notebooks.names())))
    if nnodes > 1 or node_rank:
        from labkit.parallel import launch

        if node_rank >= nnodes or not master_addr or not set(names) <= set(ALL_DEVICES):
            raise RequestError(
                f"node {node_rank} of {nnodes} for {', '.join(names)}, the first at "
                f"{master_addr!r}; accepted: chapter 07, nodes 0 to {nnodes - 1}, and an address"
            )
        try:
            socket.getaddrinfo(master_addr, master_port)
        except (OSError, UnicodeError) as error:
            raise RequestError(f"no machine of the name {master_addr!r}: {error}") from None
        if node_rank:
            print(f"Starts ranks for {master_addr} until that ends.", flush=True)
            launch.follow(node_rank, nnodes, master_addr, master_port)
            return
        context.obj = launch.lead(nnodes, master_addr, master_port)  # as long as the command
    device = detect()
    assignments = [assignment.partition("=")[::2] for assignment in parameter or []]
    options = dict(assignments)
    if len(options) < len(assignments):
        raise RequestError("a parameter twice; accepted: once, its values with commas between them")
    narrowed = dict(options)
    own = narrowed.pop("own", "")
    rounds = [chosen_profile(profile, device.default_profile)]
    if profile == AUTO_PROFILE and device.kind == "cuda" and not options and not fresh:
        rounds = ["quick", "key", *rounds]
    if own:
        from labkit.experiments.bench import own_entrant, own_session
    for name in names:
        notebooks.narrowing(name, rounds[-1], narrowed if own and name in OWN else options)
        if own:
            own_entrant(name, own)
    root = _writable(output)
    folders = {name: root / measured_by(name).slug for name in names}
    # Fails now, not after hours of measuring, if the report could not read something.
    shown = [records.folder_of(root, device.slug, name) for name in notebooks.names()]
    for folder in {*folders.values(), *shown}:
        records.check(folder)
    if not dry_run:
        # Until this command ends, so that its rendering disturbs no other run.
        context.with_resource(sweep.measuring_lock(device, ", ".join(names), wait=not no_wait))
    start = time.monotonic()
    planned: set[tuple[str, ...]] = set()
    for round_profile in rounds:
        settings = {
            "device": THIS_DEVICE,
            "profile": round_profile,
            "output": root,
            "fresh": fresh,
            "options": narrowed,
        }
        sessions = [sweep.Session(name, **settings) for name in names]
        if own:
            sessions += [own_session(name, own, **settings) for name in names]
        if dry_run:
            _print_plan(round_profile, sessions, planned)
            continue
        print(
            f"Measuring {device.name}, profile {round_profile}, into {root / device.slug}",
            file=sys.stderr,
        )
        try:
            sweep.measure(sessions)
        except KeyboardInterrupt:
            print(
                "\nInterrupted. Finished measurements are recorded; the same command goes on from "
                "there.",
                file=sys.stderr,
            )
            raise
        joined = {name: {"own": own} for name in names if own}
        _write_report(device.slug, output, folders, start, joined)


def _print_plan(profile: str, sessions: Sequence["Session"], planned: set[tuple[str, ...]]) -> None:
    """Prints of each notebook the cases that a run would measure, and which steps will not fit;
    what is in `planned`, of the rounds before, is left out.
    """
    from labkit.experiments.sections import memory_bytes
    from labkit.experiments.sweep import expected_seconds
    from labkit.report import plan

    unfit = Counter()
    minutes = 0.0
    for session in sessions:
        cases = []
        for case in session.pending():
            head = session.notebook, case.section, str(case.parameters)
            phases = tuple(phase for phase in case.phases if (*head, phase) not in planned)
            planned |= {(*head, phase) for phase in phases}
            if phases:
                cases.append(replace(case, phases=phases))
        session_minutes = sum(expected_seconds(session, case) for case in cases) / 60
        minutes += session_minutes
        words = f"{len(cases)} cases, about {session_minutes:.1f} minutes"
        print(f"{profile} {session.notebook}: {words if cases else 'all recorded'}")
        for case in cases:
            if plan.too_large(case.parameters, case.phases, memory_bytes(session.device)):
                unfit[str(case.parameters["size"])] += 1
    print(f"{profile}: about {minutes:.1f} minutes")
    for size, number in unfit.items():
        print(f"{profile}: {number} cases of {size} will not fit and are recorded so")


def _write_report(
    device: str,
    output: Path | None,
    folders: Mapping[str, Path],
    start: float,
    own: Mapping[str, Mapping[str, str]],
) -> None:
    """Says what was measured, then executes the notebooks, writes the report and says what came
    out.
    """
    from labkit import records
    from labkit.report import card, render
    from labkit.report.text import disturbed_note

    measured = {
        name: records.newest(records.RecordStore(folder / "records" / f"{name}.jsonl").load())
        for name, folder in folders.items()
    }
    print(file=sys.stderr)
    for name in folders:
        print(f"{name}: {card.status_counts(measured[name]) or 'no records'}")
    for sentence in disturbed_note([record for newest in measured.values() for record in newest]):
        print(sentence)
    written = render.rebuild(device, output=output, html=True, by_papermill=True, own=own)
    print(f"{(time.monotonic() - start) / 60:.1f} minutes")
    for line in card.lines(render.chapters_of(device, output)):
        print(line)
    print(f"Report: {written[0]} and, to open in a browser, {written[-1]}")


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
    device: Annotated[
        str, Option(help="Slug of the device, as `labkit devices` lists it; this: this machine.")
    ] = REFERENCE_DEVICE,
    output: RecordedOption = None,
    html: Annotated[
        bool, Option("--html", help="Also write report.html, one self-contained page.")
    ] = False,
    save_notebooks: Annotated[
        bool,
        Option(
            "--save-notebooks",
            help="Also refresh the outputs stored in notebooks/ (reference device).",
        ),
    ] = False,
) -> None:
    """Rebuild a device's report from its records alone; the reference device's is the top-level
    report.md too.
    """
    from labkit.device import slug_of
    from labkit.report import render

    gc.freeze()  # otherwise each collection would walk through all modules
    for path in render.rebuild(
        slug_of(device), output=output, html=html, save_notebooks=save_notebooks
    ):
        print(path)


@app.command()
def devices(
    output: RecordedOption = None,
) -> None:
    """List what has been measured, a row a folder: device, chapters, when, software."""
    from labkit.report import render, tables

    table = render.devices_summary(output or FIGURES)
    print("nothing measured yet: run `labkit run`" if table.empty else tables.to_markdown(table))


@app.command()
def compare(
    device: Annotated[
        list[str] | None,
        Argument(
            metavar="[DEVICE]...",
            help="Slugs, folders or this; the first is the baseline. With --sessions one, "
            "by default the reference device.",
        ),
    ] = None,
    sessions: Annotated[
        bool, Option("--sessions", help="Compare the sessions of a device with one another.")
    ] = False,
    notebook: Annotated[
        str | None, Option(help="Number or name (01, benchmarking). Default: all.")
    ] = None,
    output: RecordedOption = None,
    to: Annotated[
        Path | None,
        Option(
            metavar="DIR", help="Write compare.md, compare.html, every row as CSV and the figures."
        ),
    ] = None,
    check: Annotated[
        bool,
        Option(
            "--check",
            help="With --sessions, end with exit code 1 if too few rows of a kind of time agree.",
        ),
    ] = False,
) -> None:
    """Put devices beside one another: what both measured alike, and what only one has.

    With --sessions: how well sessions of the same commit (`labkit run --fresh`) agree.
    """
    from labkit import notebooks
    from labkit.report import compare as report

    if (check and not sessions) or (sessions and (to or len(device or []) > 1)):
        raise RequestError("--check goes with --sessions, which takes one device and no --to")
    names = [notebooks.resolve(notebook)] if notebook else notebooks.names()
    if sessions:
        _compare_sessions(report.side((device or [REFERENCE_DEVICE])[0], output, names), check)
        return
    devices = list(dict.fromkeys(device or []))
    if len(devices) < 2:
        raise RequestError(
            "say what to compare: two devices, such as `labkit compare nvidia-h200 this`, or "
            "--sessions"
        )
    base, *others = [report.side(name, output, names) for name in devices]
    comparisons = [report.Comparison(base, other) for other in others]
    if to is None:
        print("\n".join(report.page(one, {}) for one in comparisons), end="")
        return
    for path in report.write(comparisons, _writable(to)):
        print(path)


def _compare_sessions(measured: "Chapters", check: bool) -> None:
    from labkit.records import RecordStore
    from labkit.report import sessions as report
    from labkit.report.tables import to_markdown

    chapters = {
        name: RecordStore(chapter.folder / "records" / f"{name}.jsonl").load()
        for name, chapter in measured.items()
    }
    differences = report.differences(chapters)
    if differences.empty:
        print("No commit has a row of two sessions.")
    else:
        print(report.sentence(differences))
        print(to_markdown(report.table_worst(differences)))
    if check and report.failed(differences):
        sys.exit(1)


@app.command()
def verify(
    folder: Annotated[Path, Argument(help="A device's folder, such as figures/nvidia-h200.")],
) -> None:
    """Check a device's folder before it is shared: records, commit, marks, size, and that its
    tables follow from its records.
    """
    from labkit.report import verify as report

    findings = report.findings(folder.resolve())
    for finding in findings:
        print(f"{'ok' if finding.is_fine else 'no'}  {finding.name}: {finding.detail}")
    if not all(finding.is_fine for finding in findings):
        sys.exit(1)


@app.command()
def plan(
    model: Annotated[
        str,
        Argument(help="A size of chapter 01 (small, 2.7b), or a config.json of transformers."),
    ] = "small",
    batch: Annotated[
        int, Option(min=1, help="Sequences of a step, on each GPU; of tp on all.")
    ] = 4,
    context: ContextOption = 512,
    precision: PrecisionOption = "bf16",
    attention: Annotated[
        Literal["fused", "eager"], Option(help="eager keeps the scores.")
    ] = "fused",
    way: Annotated[
        Literal[STEP_WAYS],
        Option(help="Stock PyTorch, each block compiled, or compiled with labkit's kernels."),
    ] = "compiled",
    recompute: Annotated[
        str, Option(help="none, or how many blocks are recomputed together: 4, or 8/2.")
    ] = "none",
    gpus: Annotated[int, Option(min=1, help="Number of GPUs.")] = 1,
    gpu_way: Annotated[
        Literal[GPU_WAYS],
        Option(
            help="What the GPUs share out: nothing but the batches, the moments, all, or every "
            "matrix for one batch of them all."
        ),
    ] = "ddp",
    device: Annotated[
        str, Option(help="this, a measured device's slug, or a GPU's name (RTX 4090).")
    ] = REFERENCE_DEVICE,
    price: Annotated[float, Option(min=0, max=1e9, help="Of one GPU's hour, in any currency.")] = 0,
    d_model: DimensionOption = None,
    d_ff: DimensionOption = None,
    layers: DimensionOption = None,
    heads: DimensionOption = None,
    vocabulary: DimensionOption = None,
    output: RecordedOption = None,
) -> None:
    """Say before it is run whether a training step with AdamW fits, how long it takes, what bounds
    it and how many joules it takes.
    """
    from labkit.configs import model_config
    from labkit.report import plan as report

    config = report.read_config(Path(model)) if model.endswith(".json") else model_config(model)
    free = {
        "d_model": d_model,
        "d_ff": d_ff,
        "num_layers": layers,
        "num_heads": heads,
        "vocab_size": vocabulary,
    }
    config = replace(config, **{name: value for name, value in free.items() if value})
    if not config.head_dim and config.d_model % config.num_heads:
        raise RequestError(f"{config.num_heads} heads do not divide the width {config.d_model}")
    if config.num_heads % (config.num_key_heads or 1):
        raise RequestError(f"{config.num_key_heads} key heads do not divide {config.num_heads}")
    setting = report.Setting(
        config, batch, context, precision, attention, way, recompute, gpus, gpu_way
    )
    measured = report.measured_gpus(output)
    roofs = report.roofs_of(device, measured)
    for line in report.lines(setting, roofs, measured, price):
        print(line)


@app.command()
def profile(
    size: Annotated[
        str,
        Argument(help="Size of the model, as in chapter 01. Default: small, without a GPU nano."),
    ] = "",
    context: ContextOption = 512,
    precision: Annotated[
        Literal[PRECISIONS] | None,
        # Most processors emulate bf16, which takes them minutes.
        Option(help="bf16: autocast. Default: bf16, without a GPU fp32."),
    ] = None,
    attention: Annotated[
        Literal["eager", "auto"], Option(help="auto: our FlashAttention.")
    ] = "eager",
    phase: Literal["inference", "forward_backward", "train_step"] = "train_step",
    output: Annotated[
        Path, Option("--output", "-o", dir_okay=False, help="The capture, without suffix.")
    ] = Path("capture"),
) -> None:
    """Capture one step and its call stacks with Nsight Systems, else torch.profiler; keep it, and
    say how by hand.
    """
    from labkit.configs import model_config
    from labkit.device import detect
    from labkit.experiments import captured_step

    is_cuda = detect().kind == "cuda"
    name = model_config(size or ("small" if is_cuda else "nano")).name
    precision = precision or ("bf16" if is_cuda else "fp32")
    case = (name, str(context), precision, attention, phase)
    _writable(output.parent)
    try:
        path = captured_step.keep_capture(case, output)
    except (RuntimeError, TimeoutError) as error:
        sys.exit(f"labkit: {error}")
    viewer = "at ui.perfetto.dev" if path.suffix == ".json" else "in Nsight Systems"
    print(f"Capture: {path} (open it {viewer})")
    print(f"By hand: {captured_step.nsys_line(case, output)}")
    capture = shlex.quote(f"{output}.nsys-rep")
    print(f"Its kernels: nsys stats --report cuda_gpu_kern_sum,nvtx_gpu_proj_sum {capture}")
    print(
        "A capture holds every environment variable of its process: do not publish one that you "
        "made by hand."
    )


@app.command()
def bench(
    op: Annotated[
        str, Option(help="attention, swiglu, …; adamw, optimizer, model, data_parallel.")
    ],
    functions: Annotated[
        list[str] | None,
        Argument(metavar="FILE.py:NAME", help="Functions or classes; none: the rivals."),
    ] = None,
    shape: Annotated[
        str,
        Option(
            help="1x16x4096x64 (batch, heads, length, d_head) of attention; 4x512x768x3072x12x12 "
            "(batch, context, d_model, d_ff, layers, heads) of model; 4x512x2 (batch, context, "
            "ranks) of data_parallel; else 8192x4096 (rows, columns)."
        ),
    ] = "",
    against: Annotated[
        str, Option(help="Its rivals: sdpa_cudnn,fa3,ours. Default: ours and the usual ones.")
    ] = "",
    precision: Annotated[Literal["fp32", "bf16"], Option(help="Of the tensors.")] = "fp32",
    causal: Annotated[bool, Option(help="Whether attention has a causal mask.")] = True,
    warmup: Annotated[int, Option(help="Of a model: untimed calls.")] = 5,
    steps: Annotated[int, Option(help="Of a model: timed calls.")] = 10,
    timeout: Annotated[float, Option(min=1, help="Seconds for one pass of all.")] = 300,
    output: OutputOption = None,
) -> None:
    """Hold functions of your own to fp64 and time them in turn with labkit's and others'.

    A function is differentiable. attention: f(q, k, v, causal=…). rms_norm: f(x, weight, residual)
    and layer_norm: f(x, weight, bias, residual), of the pair (norm of x + residual, x + residual)
    with ε = 10⁻⁶. swiglu: f(gate, up). rotary: f(q, k, turn) of (batch, length, heads, d_head), the
    pair turned and (batch, heads, length, d_head). cross_entropy: f(logits, targets), the mean.
    linear_cross_entropy: f(x, weight, targets). gelu_mlp: f(x, w1, b1, w2, b2) with tanh. adamw:
    f(params, grads, exp_avgs, exp_avg_sqs, step, lr=…, betas=…, eps=…, weight_decay=…), in place.
    optimizer: a class C(params, lr=…, …) with step(). model: C(vocab_size=…, context_length=…,
    d_model=…, num_layers=…, num_heads=…, d_ff=…, rope_theta=…). data_parallel: C(module), and where
    it has one finish_gradient_synchronization().
    """
    from labkit.experiments import bench as contest

    frame = contest.bench(
        *(functions or []),
        op=op,
        shape=shape,
        against=against,
        precision=precision,
        causal=causal,
        warmup=warmup,
        steps=steps,
        output=str(_writable(output)),
        timeout_s=timeout,
    )
    print(frame.to_markdown(index=False, floatfmt=".3g"))
    is_ok = frame["status"] == "ok"
    is_own = frame["implementation"].str.contains("@")
    if not (is_ok[is_own].all() if is_own.any() else is_ok.any()):
        sys.exit(1)


@app.command()
def course(
    checkout: Annotated[
        Path,
        Argument(metavar="PATH", resolve_path=True, help="Of assignment 2 of CS336."),
    ],
    contests: Annotated[
        bool, Option(help="Whether what is filled in is timed beside labkit's.")
    ] = True,
    timeout: Annotated[
        float, Option(min=1, max=1e6, help="Seconds for one test, and for one pass of a contest.")
    ] = 300,
    output: OutputOption = None,
) -> None:
    """Run the tests of a checkout of CS336's assignment 2, and enter its adapters into `bench`."""
    from labkit.experiments import assignment

    def states(outcomes: Iterable[dict]) -> dict[str, str]:
        """Prints outcomes as they come; returns the states of tests."""
        known = {}
        for outcome in outcomes:
            known[outcome["test"]] = outcome["state"]
            print("{state:8}{seconds:6.1f} s  {test}  {reason}".format(**outcome), flush=True)
        return known

    # Before minutes of tests.
    folder = str(_writable(output))
    filled, empty = assignment.adapters_of(checkout)
    known = states(assignment.run_tests(checkout, timeout))
    failed = [
        test for test, state in known.items() if state not in ("passed", "skipped", "missing")
    ]
    again = [test for test in failed if "::" in test]  # without files that cannot be imported
    if again:
        print("Again with labkit's adapters. What fails here too, such as a comparison bit by bit,")
        print("may fail with any on this machine:", flush=True)
        states(assignment.run_ours(checkout, timeout, again))
    print("Tests: " + ", ".join(f"{n} {state}" for state, n in Counter(known.values()).items()))
    print(f"Empty adapters: {', '.join(empty) or 'none'}")
    print(f"In contests, if adapters.py names them: {', '.join(filled) or 'none'}", flush=True)
    for frame in assignment.contests(checkout, filled if contests else [], folder, timeout):
        print(frame.to_markdown(index=False, floatfmt=".3g"), flush=True)
    if failed:
        sys.exit(1)


@app.command()
def doctor() -> None:
    """Show what this machine has and lacks, and what each lack disables."""
    from labkit.device import checks

    def nsys_failure() -> str:
        from labkit.measure.profiling import Nsys

        nsys = Nsys.find()
        return nsys.failure() if nsys else "none on PATH that starts"

    for check in checks(nsys_failure):
        disables = "" if check.present else f"  (disables: {check.disables})"
        print(f"{'ok' if check.present else 'no'}  {check.name}: {check.detail}{disables}")
