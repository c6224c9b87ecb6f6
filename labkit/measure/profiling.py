"""Which kernel ran when, launched in which range: captures of Nsight Systems or torch.profiler,
read into one table.

A capture is read into a `Trace` (`read_nsys`, `read_chrome_trace`); `launches` makes the table of
it, one row per launch, the same whatever the capture was made with:

| column | holds |
|---|---|
| name, short_name, kind | as captured; readable; kernel, memcpy, memset, or operator on a CPU |
| kernel_class | what `classify` makes of the name, or as the caller of `launches` knows it |
| start_ns, end_ns, duration_ns | on the device; an operator's without the operators it calls |
| path, range, phase | ranges open at its launch, outermost first; the innermost; that in `phases` |

A range belongs to a launch if it was open, in the launching process, when the host launched: on the
launching thread, or on another thread before the launching thread opened a range of its own. The
second is how kernels of a backward pass, launched by autograd's own thread, come to the "backward"
range that the main thread holds open.

Sources: Nsight Systems user guide, "SQLite schema reference"; a range's time on the GPU is that of
the kernels that were launched in it (its "projection"), since on the host a range ends when the
launches do.
"""

import contextlib
import functools
import hashlib
import json
import math
import os
import re
import sqlite3
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from labkit.configs import REPOSITORY
from labkit.guard import guarded_folder
from labkit.records import write_bytes_atomic

OUTSIDE = "outside"
"""Range and phase of what was launched in none."""


class ProfileError(RuntimeError):
    """A capture that could not be made or cannot be read; the message names the file and what it
    lacks.
    """


# The first pattern that matches decides, so the order matters: cuBLAS reduces split products,
# FlashAttention-3 is built on CUTLASS, and a kernel that the compiler fused is named after
# everything that went into it.
_KERNEL_PATTERNS = (
    ("communication", r"nccl|all_?reduce|all_?gather|reduce_?scatter"),
    ("attention", r"flash|fmha|attention|sdpa"),
    ("optimizer", r"adam|multi_tensor_apply|fused_?optimizer|fused_?sgd"),
    ("elementwise", r"^triton_poi"),
    ("softmax", r"soft_?max"),
    ("normalisation", r"(layer|rms|batch|group|instance)_?norm"),
    ("reduction", r"^triton_(red|per)"),
    (
        "matmul",
        r"nvjet|gemm|gemv|xmma|cutlass|cublas|splitk|wgmma|matmul|^triton_(\w+_)?mm|^triton_tem|dot_kernel",
    ),
    ("copy", r"copy|catarray|memcpy|memset|transpose|gather|index_?select"),
    (
        "reduction",
        r"reduce|reduction|loss|embedding_backward|scan|cumsum|radixsort|grad_weight|partial|and_scatter"
        r"|cross_entropy",
    ),
    (
        "elementwise",
        r"elementwise|pointwise|fill|arange|where|triu|tril|distribution|index|vectorized|swiglu|gelu"
        r"|rotary|dropout",
    ),
)

_OPERATOR_PATTERNS = (
    ("communication", r"^(c10d|nccl|gloo)"),
    ("attention", r"(^|::)\w*[aA]ttention"),
    ("optimizer", r"adam|^_foreach_|fused_sgd"),
    ("softmax", r"^_?(log_)?softmax"),
    ("normalisation", r"(layer|rms|batch|group|instance)_norm"),
    (
        "matmul",
        r"^(mm|bmm|addmm|addmv|baddbmm|addbmm|mv|dot|linear|matmul|_?mkldnn_linear\w*|_scaled_mm)$",
    ),
    (
        "copy",
        r"^(copy_|_to_copy|clone|contiguous|cat|stack|repeat|embedding|index_select|gather|pad|constant_pad_nd)$",
    ),
    (
        "reduction",
        r"^(sum|mean|amax|amin|max|min|argmax|logsumexp|norm|all|any|cumsum|std)$|loss|embedding_\w*back",
    ),
    (
        "elementwise",
        r"^_?(add|sub|rsub|mul|div|neg|pow|sqrt|rsqrt|exp\d?|log\d?|abs|sin|cos|tanh|sigmoid|silu|gelu|relu"
        r"|where|fill|zero|masked_fill|le|lt|ge|gt|eq|ne|bitwise\w*|logical\w*|isnan|isinf|maximum|minimum"
        r"|clamp\w*|arange|tril|triu|addcmul|addcdiv|lerp|threshold\w*|normal|uniform|(sigmoid|silu|tanh|gelu)"
        r"_backward)_?$",
    ),
)


def classify(name: str, kind: str = "kernel") -> str:
    """Returns the class of a kernel or of a CPU operator ("aten::mm"): that of the first pattern
    that matches its name, else "other".

    Operators that only make a view or allocate are "other", like autograd's own bookkeeping.
    """
    if kind == "operator":
        name = name.removeprefix("aten::")
        patterns = _OPERATOR_PATTERNS
    else:
        name = name.lower()
        patterns = _KERNEL_PATTERNS
    for kernel_class, pattern in patterns:
        if re.search(pattern, name):
            return kernel_class
    return "other"


def short_name(name: str) -> str:
    """Returns a readable name: no return type or namespace; of the template's arguments what is
    computed, in 16 bits.

    >>> short_name("void at::native::vectorized_elementwise_kernel<4, at::native::BinaryFunctor<"
    ...            "float, float, float, at::native::binary_internal::MulFunctor<float> >, "
    ...            "std::array<char*, 3ul> >(int, T2, T3)")
    'vectorized_elementwise_kernel[BinaryFunctor:MulFunctor]'
    >>> short_name("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT")
    'nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT'
    """
    name = re.sub(r"<unnamed>|\(anonymous namespace\)|^void ", "", name)
    # What tells CUTLASS's kernels apart is the argument of their template.
    name = re.sub(r"^cutlass::Kernel\d*<(\w+::)*(\w+).*", r"\2", name)
    base, _, arguments = name.partition("<")
    base = base.partition("(")[0].rstrip(":").rpartition("::")[2]
    computed = re.findall(
        r"\w*Functor\w*|\w+_functor\b|\w+Ops\b|\w+_kernel(?:_cuda|_impl|_gpu)?\b", arguments
    )
    kept = [
        word
        for word in dict.fromkeys(computed)
        if word != base and not re.match("gpu_kernel|launch_", word)
    ][:2]
    kept += dict.fromkeys(re.findall(r"\b(?:c10::)?(BFloat16|Half)\b", arguments))
    return (f"{base}[{':'.join(kept)}]" if kept else base or name)[:96]


def distinct_names(names: Iterable[str]) -> dict[str, str]:
    """Returns the short name of each name; those that would share one end in "#" and four digits of
    their own.
    """
    short = {name: short_name(name) for name in names}
    num_sharing = Counter(short.values())
    for name, text in short.items():
        if num_sharing[text] > 1:
            short[name] = f"{text}#{hashlib.sha1(name.encode()).hexdigest()[:4]}"
    return short


@dataclass(frozen=True)
class Trace:
    """What a capture holds; raises ProfileError if that would say nothing, or is impossible.

    Attributes:
        source: "nsys", "kineto" (CUDA kernels by torch.profiler) or "kineto cpu" (its CPU
            operators).
        version: of the profiler.
        operations: one row per kernel, copy or CPU operator, on a process's thread; `launched_ns`
            (host) is NaN where no launch is known.
        ranges: name, start_ns, end_ns, process, thread.
    """

    source: str
    version: str
    operations: pd.DataFrame
    ranges: pd.DataFrame

    def __post_init__(self):
        kernels = self.operations[~self.operations["kind"].isin(["memcpy", "memset"])]
        if kernels["launched_ns"].isna().all():
            raise ProfileError("holds no launch of a kernel and no operator")
        if self.ranges.empty:
            raise ProfileError("holds no range")
        for frame in (self.operations, self.ranges):
            if (frame["start_ns"] > frame["end_ns"]).any():
                raise ProfileError("has an event that ends before it starts")


def _with_launches(operations: pd.DataFrame, calls: pd.DataFrame) -> pd.DataFrame:
    """Returns what ran on a device, with thread and time of the call that launched it."""
    launch = ["process", "correlation"]  # correlation ids count from the start of each process
    calls = calls[[*launch, "thread", "launched_ns"]].drop_duplicates(launch)
    operations = operations.merge(calls, on=launch, how="left")
    return operations.assign(duration_ns=operations["end_ns"] - operations["start_ns"])


@contextlib.contextmanager
def _reading(path: Path | str, kind: str) -> Iterator[None]:
    """Makes whatever goes wrong a ProfileError that names the file, without its folder, since
    records hold no paths. In a damaged file values of any type may stand anywhere.
    """
    name = Path(path).name
    try:
        yield
    except ProfileError as error:
        raise ProfileError(f"{name} {error}") from None
    except Exception as error:
        # pandas quotes the whole query.
        reason = " ".join(str(error.__cause__ or error).split())[:200]
        raise ProfileError(f"{name} cannot be read as {kind}: {reason}") from error


# A global thread id is the process's with the thread's in the lowest 24 bits.
_NSYS_OPERATIONS = """
SELECT {name} AS name, '{kind}' AS kind, start AS start_ns, [end] AS end_ns,
    globalPid >> 24 AS process, COALESCE(correlationId, -1) AS correlation
FROM CUPTI_ACTIVITY_KIND_{table}"""

_NSYS_CALLS = """
SELECT globalTid AS thread, globalTid >> 24 AS process, correlationId AS correlation,
    start AS launched_ns
FROM CUPTI_ACTIVITY_KIND_RUNTIME WHERE correlationId >= 0"""

# Types 59 and 60 are ranges of push and pop, of start and end. One without an end was left open by
# an exception in a backward pass, and would hold whatever its thread launches afterwards.
_NSYS_RANGES = """
SELECT CAST(COALESCE(text, value) AS TEXT) AS name, start AS start_ns, [end] AS end_ns,
    globalTid >> 24 AS process, globalTid AS thread
FROM NVTX_EVENTS LEFT JOIN StringIds ON id = textId
WHERE COALESCE(text, textId) IS NOT NULL AND eventType IN (59, 60) AND [end] IS NOT NULL"""

_NSYS_NAMES = {
    "kernel": "CAST(IFNULL((SELECT value FROM StringIds WHERE id = demangledName), '?') AS TEXT)",
    "memcpy": "'memcpy'",
    "memset": "'memset'",
}
"""How a launch is called, by its kind."""


def read_nsys(path: Path | str, version: str = "") -> Trace:
    """Returns what an SQLite export of Nsight Systems holds.

    Args:
        path: of the export (`nsys export --type sqlite`); it is opened for reading only.
        version: of nsys, for the Trace.

    Raises:
        ProfileError: not an SQLite file of nsys, no kernels, launches or ranges, or an impossible
            row (a missing time, an end before its start); names the file and what is wrong.
    """
    uri = f"{Path(path).absolute().as_uri()}?mode=ro"
    with (
        _reading(path, "an SQLite export of Nsight Systems"),
        contextlib.closing(sqlite3.connect(uri, uri=True)) as connection,
    ):

        def rows(query: str) -> pd.DataFrame:
            table = pd.read_sql_query(query, connection)
            return table.astype({name: "int64" for name in table if name not in ("name", "kind")})

        tables = rows("SELECT name FROM sqlite_master")["name"].tolist()
        graphs = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
        if graphs in tables and connection.execute(f"SELECT 1 FROM {graphs}").fetchone():
            raise ProfileError(
                "holds CUDA graphs as a whole, without their kernels; accepted: a capture with "
                "--cuda-graph-trace=node"
            )
        operations = [
            rows(_NSYS_OPERATIONS.format(name=name, kind=kind, table=kind.upper()))
            for kind, name in _NSYS_NAMES.items()
            # A table without copies is left out.
            if kind == "kernel" or f"CUPTI_ACTIVITY_KIND_{kind.upper()}" in tables
        ]
        operations = _with_launches(pd.concat(operations, ignore_index=True), rows(_NSYS_CALLS))
        return Trace("nsys", version, operations, rows(_NSYS_RANGES))


_CHROME_KINDS = {
    "kernel": "kernel",
    "gpu_memcpy": "memcpy",
    "gpu_memset": "memset",
    "cpu_op": "operator",
}
_LAUNCH_CATEGORIES = ("cuda_runtime", "cuda_driver")
_CATEGORIES = ("user_annotation", *_LAUNCH_CATEGORIES, *_CHROME_KINDS)


def read_chrome_trace(path: Path | str, version: str = "") -> Trace:
    """Returns what a trace exported by torch.profiler holds: its CUDA kernels, or its CPU operators
    if it has none.

    Args:
        path: of the JSON file that `export_chrome_trace` wrote, of one process.
        version: of torch, for the Trace.

    Raises:
        ProfileError: no such trace, or one without operators or ranges; names the file and the
            lack.
    """
    with _reading(path, "a trace of torch.profiler"):
        entries = json.loads(Path(path).read_bytes())["traceEvents"]
        events = [
            _event(entry)
            for entry in entries
            if entry.get("ph") == "X" and entry.get("cat") in _CATEGORIES
        ]
        if not events:
            raise ProfileError("holds no event")
        events = pd.DataFrame(events).astype({"start_ns": "int64", "end_ns": "int64"})
        events["kind"] = events["category"].map(_CHROME_KINDS)
        ranges = events[events["category"] == "user_annotation"]
        ranges = ranges[~ranges["name"].str.startswith(("Optimizer.", "ProfilerStep#"))]
        operators = events[events["kind"] == "operator"]
        on_device = events[events["kind"].notna() & (events["kind"] != "operator")]
        if on_device.empty:
            return Trace("kineto cpu", version, _with_own_times(operators), ranges)
        calls = events[events["category"].isin(_LAUNCH_CATEGORIES)]
        calls = calls.rename(columns={"start_ns": "launched_ns"})
        operations = _with_launches(on_device.drop(columns="thread"), calls)
        return Trace("kineto", version, operations, ranges)


def _event(entry: dict) -> dict:
    """Returns the values of an event that are read, times in ns."""
    start_us = float(entry["ts"])
    arguments = entry.get("args", {})
    return {
        "category": entry["cat"],
        "name": str(entry["name"]),
        "start_ns": round(start_us * 1e3),
        "end_ns": round((start_us + float(entry["dur"])) * 1e3),
        "process": 0,  # a kernel's is the number of its device
        "thread": str(entry["tid"]),
        "correlation": arguments.get("correlation", -1),
        "blocks": math.prod(arguments["grid"]) if "grid" in arguments else math.nan,
        "shape": str([arguments.get(name) for name in ("grid", "block", "bytes")]),
    }


def _with_own_times(operators: pd.DataFrame) -> pd.DataFrame:
    """Returns every operator with its own time, that of the operators it calls taken off."""
    operators = operators.sort_values(["start_ns", "end_ns"], ascending=[True, False])
    own_ns = (operators["end_ns"] - operators["start_ns"]).tolist()
    running = defaultdict(list)  # by thread, outermost first: an operator's number and end
    for number, row in enumerate(operators.itertuples()):
        callers = running[row.thread]
        while callers and callers[-1][1] <= row.start_ns:
            callers.pop()
        if callers:
            own_ns[callers[-1][0]] -= row.end_ns - row.start_ns
        callers.append((number, row.end_ns))
    return operators.assign(
        duration_ns=np.maximum(own_ns, 0),
        launched_ns=operators["start_ns"],
    )


def launches(trace: Trace, phases: Sequence[str], classes: Mapping[str, str] = {}) -> pd.DataFrame:
    """Returns the table of the module's docstring, in order of start.

    Args:
        trace: a capture.
        phases: names of the ranges that are phases; the outermost one of a path counts.
        classes: of kernels whose names do not say them, by name.
    """
    table = trace.operations.sort_values("start_ns", kind="stable", ignore_index=True)
    names = table["name"].unique()
    if trace.source == "kineto cpu":
        short = {name: name[:96] for name in names}
        kernel_classes = {name: classify(name, "operator") for name in names}
    else:
        short = distinct_names(names)
        kernel_classes = {name: classify(name) for name in names} | classes
    table["short_name"] = table["name"].map(short)
    table["kernel_class"] = table["name"].map(kernel_classes)
    table["path"] = _paths(table, trace.ranges)
    table["range"] = [path[-1] if path else OUTSIDE for path in table["path"]]
    table["phase"] = [
        next((name for name in path if name in phases), OUTSIDE) for path in table["path"]
    ]
    return table


def _paths(operations: pd.DataFrame, ranges: pd.DataFrame) -> list[tuple[str, ...]]:
    """Returns the names of the ranges that each operation was launched in, outermost first."""
    launched = operations.dropna(subset="launched_ns").sort_values("launched_ns")
    moments = launched["launched_ns"].to_numpy()
    rows = list(launched.itertuples())
    paths = [()] * len(operations)
    in_own_range = set()
    ranges = ranges.sort_values(["start_ns", "end_ns"], ascending=[True, False])
    for range_ in ranges.itertuples():
        first, last = np.searchsorted(moments, [range_.start_ns, range_.end_ns])
        for row in rows[first:last]:
            is_own = row.thread == range_.thread
            # Another thread's range counts if it was opened before this thread's first.
            if row.process == range_.process and (is_own or row.Index not in in_own_range):
                paths[row.Index] += (range_.name,)
                if is_own:
                    in_own_range.add(row.Index)
    return paths


def busy_ns(table: pd.DataFrame) -> int:
    """Returns the time (ns) during which at least one of these launches was running."""
    table = table.sort_values("start_ns")
    # Where a launch starts, all before it end at the latest of their ends.
    previous_end = table["end_ns"].cummax().shift(fill_value=table["start_ns"].min())
    begin = np.maximum(table["start_ns"], previous_end)
    return int((table["end_ns"] - begin).clip(lower=0).sum())


def statistics_by(table: pd.DataFrame, columns: Sequence[str]) -> pd.DataFrame:
    """Returns launches and total, median and standard deviation (µs) of each group, the largest
    total first.

    Args:
        table: rows of `launches`.
        columns: that make a group.
    """
    us = (table["duration_ns"] / 1e3).groupby([table[name] for name in columns], sort=False)
    result = us.agg(launches="count", total_us="sum", median_us="median", std_us="std").fillna(0)
    return result.sort_values("total_us", ascending=False, kind="stable").reset_index()


def capture_with_kineto(
    function: Callable[[], None],
    device_kind: str,
    *,
    keep: Path | None = None,
) -> Trace:
    """Calls `function` under torch.profiler and returns what it captured.

    Args:
        function: marks its ranges with `torch.profiler.record_function`.
        device_kind: "cuda" captures kernels, any other CPU operators.
        keep: where the trace is kept as a file, with the Python lines that call; None deletes it.

    Raises ProfileError as `read_chrome_trace`; RecordError where it cannot be kept.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device_kind == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with warnings.catch_warnings():
        # torch 2.11 warns that events of earlier cycles are lost, of which there are none. With
        # acc_events it does not, but makes Python objects of all events, 5 s for 20,000.
        warnings.filterwarnings("ignore", message=".*clears events at the end of each cycle")
        with torch.profiler.profile(activities=activities, with_stack=bool(keep)) as profiler:
            function()
            if device_kind == "cuda":
                torch.cuda.synchronize()
    with tempfile.TemporaryDirectory(prefix="labkit-kineto-") as folder:
        # Not where it is kept: the profiler does not say that a disk is full.
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        if keep:
            write_bytes_atomic(keep, path.read_bytes())
        return read_chrome_trace(path, torch.__version__)


ALLOWED_ENVIRONMENT = (
    "PATH",
    "HOME",
    "LANG",
    "LD_LIBRARY_PATH",
    "PYTHONPATH",
    "VIRTUAL_ENV",
    "CC",
    "CXX",
    "CUDA_HOME",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",  # which GPU a number of the variable before names
    "OMP_NUM_THREADS",
    "TRITON_CACHE_DIR",
    "TORCHINDUCTOR_CACHE_DIR",
)
"""The variables that a captured process gets: a capture stores each with its value."""

TRACED = ("--trace=cuda,nvtx", "--cuda-graph-trace=node", "--force-overwrite=true")
NO_STACKS = ("--sample=none", "--cpuctxsw=none")
STACKS = ("--sample=process-tree", "--python-backtrace=cuda", "--cudabacktrace=kernel")
"""Options of `nsys profile`. With STACKS each launch has the lines of C++ and Python that made it,
at a cost.
"""

NEWER_OPTIONS = ("--cuda-event-trace=false",)
"""Turns off what some releases trace by default and what costs host time; all else that does is off
by default. Source: https://docs.nvidia.com/nsight-systems/UserGuide/index.html, options of the
profile command.
"""


@dataclass(frozen=True)
class Nsys:
    """Nsight Systems as found here."""

    version: str

    @classmethod
    def find(cls) -> "Nsys | None":
        """Returns the nsys of PATH; None where there is none that runs."""
        try:
            answer = _nsys(["--version"], 60.0)
        except (ProfileError, subprocess.TimeoutExpired):
            return None
        version = re.search(r"Nsight Systems version ([\d.]+)", answer)
        # CUDA's script of this name only looks for nsys.
        return cls(version[1]) if version else None

    @classmethod
    @functools.cache
    def usable(cls) -> "Nsys | None":
        """Returns what `find` does, None also where its captures cannot be read; stderr then says
        why.
        """
        nsys = cls.find()
        failure = nsys.failure() if nsys else ""
        if failure:
            print(f"labkit: torch.profiler takes the place of nsys: {failure}", file=sys.stderr)
            return None
        return nsys

    def failure(self) -> str:
        """Returns why a capture of an empty program cannot be made and exported; "" if it can."""
        try:
            self.capture([sys.executable, "-c", "pass"], timeout_s=60.0, reads=False)
        except (ProfileError, TimeoutError) as error:
            return str(error)
        return ""

    def capture(
        self,
        command: Sequence[str],
        *,
        timeout_s: float,
        keep: Path | None = None,
        reads: bool = True,
    ) -> Trace | None:
        """Runs `command` under nsys and returns what was captured.

        Args:
            command: program and arguments; it marks its ranges with NVTX.
            timeout_s: for the program and the export together.
            keep: where the capture (.nsys-rep) is kept, with call stacks if nsys can; None deletes
                it.
            reads: False to return None without reading it, since an empty program launches nothing.

        Raises:
            TimeoutError: it took longer; every process that it started has been ended.
            ProfileError: nsys or its export failed, or what they left cannot be read.
            RecordError: the capture cannot be kept.
        """
        end_s = time.monotonic() + timeout_s
        # The guard ends whatever has the folder's path in its environment, also what has left the
        # group of its parent.
        with guarded_folder() as (folder, _):

            def nsys(*arguments: str) -> str:
                left_s = max(0.1, end_s - time.monotonic())
                try:
                    # nsys writes raw captures to TMPDIR first, and may leave them there.
                    return _nsys(arguments, left_s, {"TMPDIR": str(folder)})
                except subprocess.TimeoutExpired:
                    raise TimeoutError(
                        f"nsys was stopped: the capture took longer than {timeout_s:g} s"
                    ) from None

            report = folder / "capture.nsys-rep"
            export = folder / "capture.sqlite"
            sampling = STACKS if keep else NO_STACKS
            # An older release that is given a newer option starts nothing, nor does one that may
            # not sample.
            for options in ((*sampling, *NEWER_OPTIONS), sampling, NO_STACKS):
                target = f"--output={folder / 'capture'}"
                output = nsys("profile", *TRACED, *options, "--stats=false", target, *command)
                if report.exists():
                    break
            else:
                raise ProfileError(f"nsys left no report: {_last_line(output)}")
            if keep:
                write_bytes_atomic(keep, report.read_bytes())
            options = ("--type=sqlite", "--force-overwrite=true", f"--output={export}")
            output = nsys("export", *options, str(report))
            if not export.exists():
                raise ProfileError(f"nsys export left no SQLite file: {_last_line(output)}")
            return read_nsys(export, self.version) if reads else None


def _nsys(arguments: Sequence[str], timeout_s: float, variables: Mapping[str, str] = {}) -> str:
    """Returns the output of nsys; its environment is what ALLOWED_ENVIRONMENT names of this
    process's, and `variables`.

    Raises:
        subprocess.TimeoutExpired: it took longer; it has been ended, not what it started.
        ProfileError: it cannot be started.
    """
    allowed = {name: os.environ[name] for name in ALLOWED_ENVIRONMENT if name in os.environ}
    # What the program started may outlive it and hold a pipe open, but no file.
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        try:
            subprocess.run(
                ["nsys", *arguments],
                env=allowed | variables,
                timeout=timeout_s,
                cwd=REPOSITORY,  # or `python -m` would import what lies in this folder
                check=False,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        except OSError as error:
            raise ProfileError(f"nsys cannot be started: {error.strerror}") from error
        output.seek(0)
        return output.read()


def _last_line(text: str) -> str:
    """Returns the last line of a program's output without folders, since records hold no paths."""
    last = text.strip().rpartition("\n")[2].strip()[:300] or "no output"
    return re.sub(r"\S*/(?=\S)", "", last)
