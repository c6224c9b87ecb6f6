"""Which kernel ran when, launched in which range: captures of Nsight Systems or torch.profiler,
read into one table.

A capture is read into a `Trace` (`read_nsys`, `read_chrome_trace`); `launches` makes the table of
it, one row per launch, the same whatever the capture was made with:

| column | holds |
|---|---|
| name, short_name, kind | as captured; readable; kernel, memcpy, memset, or operator on a CPU |
| kernel_class | one of CLASSES, from the name |
| start_ns, end_ns, duration_ns | on the device; an operator's without the operators it calls |
| stream | CUDA stream; the thread of an operator |
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
import gzip
import hashlib
import json
import os
import re
import secrets
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from labkit.device import find_nsys

OUTSIDE = "outside"
"""Range and phase of what was launched in none."""

CLASSES = (
    "matmul",
    "attention",
    "softmax",
    "normalisation",
    "elementwise",
    "reduction",
    "copy",
    "optimizer",
    "communication",
    "other",
)
"""Classes of kernels; "other" is what no pattern matches."""


class ProfileError(Exception):
    """A capture that could not be made or cannot be read; the message names the file and what it
    lacks.
    """


# The first pattern that matches decides, so the order matters: cuBLAS reduces split products,
# FlashAttention-3 is built on CUTLASS, and a kernel that the compiler fused is named after
# everything that went into it.
_KERNEL_PATTERNS = (
    ("communication", r"nccl|all_?reduce|all_?gather|reduce_?scatter"),
    ("attention", r"flash|fmha|attention|sdpa|^hopper_(fwd|bwd)_"),
    ("optimizer", r"adam|write_addresses|multi_tensor_apply|fused_?optimizer|fused_?sgd"),
    ("elementwise", r"^triton_poi"),
    ("softmax", r"soft_?max"),
    ("normalisation", r"(layer|rms|batch|group|instance)_?norm|^norm_(fwd|bwd)_kernel"),
    ("reduction", r"^triton_(red|per)|^weighted_sum_"),
    (
        "matmul",
        r"nvjet|gemm|gemv|xmma|cutlass|cublas|splitk|wgmma|matmul|^triton_(\w+_)?mm|^triton_tem|dot_kernel"
        r"|linear_gelu",
    ),
    ("copy", r"copy|catarray|memcpy|memset|transpose|gather|index_?select"),
    (
        "reduction",
        r"reduce|reduction|loss|embedding_backward|scan|cumsum|radixsort|grad_weight|partial|and_scatter"
        r"|cross_entropy|column_sums",
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

_KERNELS = tuple((name, re.compile(pattern, re.IGNORECASE)) for name, pattern in _KERNEL_PATTERNS)
_OPERATORS = tuple((name, re.compile(pattern)) for name, pattern in _OPERATOR_PATTERNS)

# Copies that change the dtype: PyTorch casts to 16 bits by kernels of their own, from 16 bits by
# its general copy with a cast on load.
_CAST = re.compile(
    r"float\w*_copy_kernel|direct_copy.*LoadWithCast|templated.*direct_copy|^aten::_to_copy$",
    re.DOTALL,
)


def classify(name: str, kind: str = "kernel") -> str:
    """Returns the class, one of CLASSES, of a kernel or of a CPU operator ("aten::mm") by its name.

    Operators that only make a view or allocate are "other", like autograd's own bookkeeping.
    """
    patterns = _KERNELS
    if kind == "operator":
        name, patterns = name.removeprefix("aten::"), _OPERATORS
    return next(
        (kernel_class for kernel_class, pattern in patterns if pattern.search(name)), "other"
    )


def is_cast(name: str) -> bool:
    """Returns whether a kernel or operator of this name copies a tensor to another dtype."""
    return _CAST.search(name) is not None


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
    if name.startswith("_Z"):
        name = "::".join(_mangled_identifiers(name)) or name
    name = re.sub(r"<unnamed>|\(anonymous namespace\)|^void ", "", name)
    name = re.sub(
        r"^cutlass::Kernel\d*<(\w+::)*(\w+).*", r"\2", name
    )  # what tells CUTLASS's kernels apart
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
    shared = Counter(short.values())
    ends = {
        name: f"#{hashlib.sha1(name.encode()).hexdigest()[:4]}"
        for name in short
        if shared[short[name]] > 1
    }
    return {name: text + ends.get(name, "") for name, text in short.items()}


def _mangled_identifiers(name: str) -> list[str]:
    """Returns the namespaces and the function of a mangled C++ name, without template arguments."""
    found, position = [], len("_ZN") if name.startswith("_ZN") else len("_Z")
    while match := re.compile(r"\d{1,6}").match(name, position):
        begin, length = match.end(), int(match.group())
        found.append(name[begin : begin + length])
        position = begin + length
    return found


_OPERATION_COLUMNS = [
    "name",
    "kind",
    "start_ns",
    "end_ns",
    "duration_ns",
    "stream",
    "process",
    "thread",
    "launched_ns",
]
_RANGE_COLUMNS = ["name", "start_ns", "end_ns", "process", "thread"]


@dataclass(frozen=True)
class Trace:
    """What a capture holds.

    Attributes:
        source: "nsys", "kineto" (CUDA kernels by torch.profiler) or "kineto cpu" (its CPU
            operators).
        version: of the profiler.
        operations: one row per kernel, copy or CPU operator; `launched_ns` (host) is NaN where no
            launch is known.
        ranges: name, start, end, process, thread.
        total_ns: sum of the kernels' (operators') times in the capture, to check the table against.
    """

    source: str
    version: str
    operations: pd.DataFrame
    ranges: pd.DataFrame
    total_ns: int


# The tables and columns read from an export, each with a condition on its values in SQL. Times
# beyond 2^53 ns (104 days) would not be exact in floating point.
_TIME = f"typeof({{0}}) = 'integer' AND {{0}} BETWEEN {-(1 << 53)} AND {1 << 53}"
_INTEGER, _TEXT = "typeof({0}) = 'integer'", "typeof({0}) = 'text'"
_OR_NULL = "({0} IS NULL OR %s)"
_END = f'{_TIME} AND "end" >= start'
_OF_DEVICE = {
    "start": _TIME,
    "end": _END,
    "streamId": _INTEGER,
    "correlationId": _OR_NULL % _INTEGER,
    "globalPid": _INTEGER,
}
_IN_STRINGS = "({0} IS NULL OR {0} IN (SELECT id FROM StringIds))"
_NSYS_TABLES = {
    "StringIds": {"id": _INTEGER, "value": _TEXT},
    "CUPTI_ACTIVITY_KIND_KERNEL": {**_OF_DEVICE, "demangledName": _IN_STRINGS},
    "CUPTI_ACTIVITY_KIND_RUNTIME": {
        "start": _TIME,
        "globalTid": _INTEGER,
        "correlationId": _OR_NULL % _INTEGER,
    },
    "NVTX_EVENTS": {
        "eventType": _INTEGER,
        "start": _TIME,
        "end": _OR_NULL % f"({_END})",
        "text": _OR_NULL % _TEXT,
        "textId": _IN_STRINGS,
        "globalTid": _INTEGER,
    },
    "CUPTI_ACTIVITY_KIND_MEMCPY": _OF_DEVICE,
    "CUPTI_ACTIVITY_KIND_MEMSET": _OF_DEVICE,
}
_GRAPHS = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
_MISSING_TABLE = {
    "StringIds": "is no export of Nsight Systems",
    "CUPTI_ACTIVITY_KIND_KERNEL": "holds no kernel",
    "CUPTI_ACTIVITY_KIND_RUNTIME": "holds no launch of a kernel",
    "NVTX_EVENTS": "holds no NVTX range",
}
_PUSH_POP_RANGE, _START_END_RANGE = 59, 60
_READ_ROWS = {
    "CUPTI_ACTIVITY_KIND_RUNTIME": "correlationId IS NOT NULL",
    "NVTX_EVENTS": (
        f"(eventType IN ({_PUSH_POP_RANGE}, {_START_END_RANGE}) OR typeof(eventType) <> 'integer')"
    ),
}
_THREADS_PER_PROCESS = (
    1 << 24
)  # a global thread id is the process's with the thread's in the lowest 24 bits


def read_nsys(path: Path | str, version: str = "") -> Trace:
    """Returns what an SQLite export of Nsight Systems holds.

    Args:
        path: of the export (`nsys export --type sqlite`); it is opened for reading only.
        version: of nsys, for the Trace.

    Raises:
        ProfileError: not an SQLite file of nsys, no kernels, launches or ranges, or an impossible
            row (a missing time, an end before its start, a string id given twice); names the file
            and what is wrong.
    """
    path = Path(path)
    uri = f"file:{urllib.parse.quote(str(path))}?mode=ro"
    try:
        with contextlib.closing(sqlite3.connect(uri, uri=True)) as connection:
            tables = _checked_tables(connection, path)
            return Trace("nsys", version, *_read_tables(connection, path, tables))
    except (
        sqlite3.Error,
        UnicodeError,
        MemoryError,
    ) as error:  # the last two: a damaged text or length
        raise ProfileError(f"{path} cannot be read as SQLite: {_one_line(error)}") from error


def _one_line(said: object) -> str:
    """Returns SQLite's message in one short line; it may quote a whole schema."""
    return " ".join(str(said).split())[:200] or type(said).__name__


def _checked_tables(connection: sqlite3.Connection, path: Path) -> set[str]:
    """Returns the names of the export's tables, their rows checked; nsys omits tables without
    events.
    """
    state = connection.execute("PRAGMA quick_check(1)").fetchone()
    if state != ("ok",):
        raise ProfileError(f"{path} cannot be read as SQLite: {_one_line(state)}")
    tables = {
        name
        for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
    }
    if _GRAPHS in tables and (
        num_whole := connection.execute(f"SELECT COUNT(*) FROM {_GRAPHS}").fetchone()[0]
    ):
        raise ProfileError(
            f"{path} holds {num_whole} CUDA graphs as a whole, without their kernels; accepted: a "
            f"capture "
            "with --cuda-graph-trace=node"
        )
    for table, columns in _NSYS_TABLES.items():
        if table not in tables:
            if table in _MISSING_TABLE:
                raise ProfileError(f"{path} {_MISSING_TABLE[table]}: it has no table {table}")
            continue
        present = {row[1] for row in connection.execute(f"PRAGMA table_info({table})")}
        if missing := [column for column in columns if column not in present]:
            raise ProfileError(
                f"{path} is no export of Nsight Systems: its table {table} has no column "
                f"{missing[0]}"
            )
        _check_rows(connection, path, table, columns)
    twice = connection.execute(
        "SELECT id FROM StringIds GROUP BY id HAVING COUNT(*) > 1 LIMIT 1"
    ).fetchone()
    if twice:
        raise ProfileError(f"{path}: its table StringIds has the id {twice[0]} more than once")
    return tables


def _check_rows(
    connection: sqlite3.Connection, path: Path, table: str, columns: Mapping[str, str]
) -> None:
    """Raises ProfileError for the first impossible value that is read from a table."""
    for column, condition in columns.items():
        condition = condition.format(f'"{column}"')
        start = "start" if column == "end" else "NULL"
        row = connection.execute(
            f'SELECT "{column}", {start} FROM {table} '
            f"WHERE {_READ_ROWS.get(table, 'TRUE')} AND ({condition}) IS NOT TRUE LIMIT 1"
        ).fetchone()
        if row:
            also = f" and start {row[1]}" if column == "end" else ""
            raise ProfileError(
                f"{path}: a row of its table {table} has {column} {row[0]!r:.60}{also}"
            )


def _read_tables(
    connection: sqlite3.Connection, path: Path, tables: set[str]
) -> tuple[pd.DataFrame, pd.DataFrame, int]:
    def frame(query: str) -> pd.DataFrame:
        cursor = connection.execute(query)
        return pd.DataFrame(
            cursor.fetchall(), columns=[column for column, *_ in cursor.description]
        )

    correlation = "COALESCE(correlationId, -1) AS correlationId"
    parts = [
        f"SELECT names.value AS name, 'kernel' AS kind, start, end, streamId, globalPid, "
        f"{correlation} "
        "FROM CUPTI_ACTIVITY_KIND_KERNEL LEFT JOIN StringIds AS names ON names.id = demangledName"
    ]
    for kind in ("memcpy", "memset"):
        if (table := f"CUPTI_ACTIVITY_KIND_{kind.upper()}") in tables:
            parts.append(
                f"SELECT '{kind}', '{kind}', start, end, streamId, globalPid, {correlation} FROM "
                f"{table}"
            )
    operations = frame(" UNION ALL ".join(parts))
    is_kernel = operations["kind"] == "kernel"
    if not is_kernel.any():
        raise ProfileError(f"{path} holds no kernel: its table CUPTI_ACTIVITY_KIND_KERNEL is empty")
    total_ns = int((operations["end"] - operations["start"])[is_kernel].sum())
    runtime = frame(
        "SELECT correlationId, globalTid AS thread, start AS launched_ns FROM "
        "CUPTI_ACTIVITY_KIND_RUNTIME "
        "WHERE correlationId >= 0"
    ).astype("int64")
    # Correlation ids count from the start of each process.
    operations["process"] = operations["globalPid"] // _THREADS_PER_PROCESS
    runtime["process"] = runtime["thread"] // _THREADS_PER_PROCESS
    runtime = runtime.drop_duplicates(["process", "correlationId"])
    operations = operations.merge(runtime, on=["process", "correlationId"], how="left")
    operations = operations.rename(
        columns={"start": "start_ns", "end": "end_ns", "streamId": "stream"}
    )
    operations["duration_ns"] = operations["end_ns"] - operations["start_ns"]
    operations["name"] = operations["name"].fillna("unnamed")
    if operations.loc[operations["kind"] == "kernel", "launched_ns"].isna().all():
        raise ProfileError(
            f"{path} holds no launch of a kernel: CUPTI_ACTIVITY_KIND_RUNTIME has none of its "
            f"kernels'"
        )

    ranges = frame(
        "SELECT COALESCE(text, value) AS name, start AS start_ns, end AS end_ns, globalTid AS "
        "thread FROM NVTX_EVENTS "
        f"LEFT JOIN StringIds ON id = textId WHERE eventType IN ({_PUSH_POP_RANGE}, "
        f"{_START_END_RANGE}) "
        "AND COALESCE(text, value) IS NOT NULL"
    )
    if ranges.empty:
        raise ProfileError(f"{path} holds no NVTX range: its table NVTX_EVENTS has none")
    end_of_capture = (
        max(operations["end_ns"].max(), operations["launched_ns"].max(), ranges["start_ns"].max())
        + 1
    )
    ranges["end_ns"] = (
        ranges["end_ns"].astype(float).fillna(end_of_capture)
    )  # one that was never closed
    ranges["process"] = ranges["thread"] // _THREADS_PER_PROCESS
    return operations[_OPERATION_COLUMNS], ranges[_RANGE_COLUMNS], total_ns


_RANGES_OF_TORCH = r"Optimizer\.|ProfilerStep#"
_OF_A_PROCESS = ("user_annotation", "cpu_op", "cuda_runtime", "cuda_driver")
_CHROME_KINDS = {"kernel": "kernel", "gpu_memcpy": "memcpy", "gpu_memset": "memset"}


def read_chrome_trace(path: Path | str, version: str = "") -> Trace:
    """Returns what a trace exported by torch.profiler holds: its CUDA kernels, or its CPU operators
    if it has none.

    Args:
        path: of the JSON file that `export_chrome_trace` wrote, or of a gzip of it; of one process.
        version: of torch, for the Trace.

    Raises:
        ProfileError: no such trace, or one without operators or ranges; names the file and the
            lack.
    """
    path = Path(path)
    try:
        content = path.read_bytes()
        events = json.loads(
            gzip.decompress(content) if content.startswith(b"\x1f\x8b") else content
        )["traceEvents"]
        events = pd.DataFrame([event for event in events if event.get("ph") == "X"])
        if events.empty:
            raise ProfileError(f"{path} holds no event")
        for name, thread in zip(events["name"], events["tid"], strict=True):
            if not isinstance(name, str) or not isinstance(thread, int | str):
                raise ValueError(
                    f"an event has the name {str(name)[:60]!r} and the thread {str(thread)[:60]!r}"
                )
        # Each process counts the launches anew, and no kernel says whose it is.
        if (num_processes := events["pid"][events["cat"].isin(_OF_A_PROCESS)].nunique()) > 1:
            raise ProfileError(
                f"{path} holds events of {num_processes} processes; accepted: the trace of one rank"
            )
        ranges, operations = _chrome_ranges(events), _chrome_kernels(events)
        on_device = len(operations) > 0
        if not on_device:
            operations = _cpu_operators(events)
    except (
        OSError,
        EOFError,
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        OverflowError,
        RecursionError,
    ) as error:
        raise ProfileError(
            f"{path} is no trace of torch.profiler: {type(error).__name__}: {error}"
        ) from error
    if operations.empty:
        raise ProfileError(f"{path} holds neither a CUDA kernel nor a CPU operator")
    if on_device and operations["launched_ns"].isna().all():
        raise ProfileError(
            f"{path} holds no launch of a kernel: no event of CUDA's runtime has a kernel's "
            f"correlation"
        )
    if ranges.empty:
        raise ProfileError(f"{path} holds no range: it has no event of category user_annotation")
    counted = (
        operations[operations["kind"] == "kernel"]
        if on_device
        else operations[operations["depth"] == 0]
    )
    total_ns = int((counted["end_ns"] - counted["start_ns"]).sum())
    source = "kineto" if on_device else "kineto cpu"
    return Trace(source, version, operations[_OPERATION_COLUMNS], ranges, total_ns)


def _chrome_times(rows: pd.DataFrame) -> pd.DataFrame:
    start_us, duration_us = rows["ts"].astype(float), rows["dur"].astype(float)
    is_possible = (duration_us >= 0) & (start_us.abs() < 2**53) & (duration_us < 2**53)
    if not is_possible.all():
        event = rows[~is_possible].iloc[0]
        raise ValueError(f"an event at {event['ts']!r:.60} lasts {event['dur']!r:.60}")
    start_ns = (start_us * 1e3).round().astype("int64")
    end_ns = ((start_us + duration_us) * 1e3).round().astype("int64")
    return rows.assign(start_ns=start_ns, end_ns=end_ns)


def _chrome_ranges(events: pd.DataFrame) -> pd.DataFrame:
    rows = events[
        (events["cat"] == "user_annotation") & ~events["name"].str.match(_RANGES_OF_TORCH)
    ]
    return (
        _chrome_times(rows)
        .assign(process=0, thread=rows["tid"])[_RANGE_COLUMNS]
        .reset_index(drop=True)
    )


def _chrome_kernels(events: pd.DataFrame) -> pd.DataFrame:
    rows = events[events["cat"].isin(_CHROME_KINDS)]
    if rows.empty:
        return pd.DataFrame(columns=_OPERATION_COLUMNS)
    rows = _chrome_times(rows).assign(
        kind=rows["cat"].map(_CHROME_KINDS),
        stream=[arguments.get("stream", -1) for arguments in rows["args"]],
        correlation=[arguments.get("correlation", -1) for arguments in rows["args"]],
    )
    calls = events[events["cat"].isin(["cuda_runtime", "cuda_driver"])]
    calls = _chrome_times(calls).assign(
        correlation=[arguments.get("correlation", -1) for arguments in calls["args"]],
        thread=calls["tid"],
    )
    calls = calls.drop_duplicates("correlation").rename(columns={"start_ns": "launched_ns"})
    rows = rows.merge(calls[["correlation", "thread", "launched_ns"]], on="correlation", how="left")
    return rows.assign(process=0, duration_ns=rows["end_ns"] - rows["start_ns"])[_OPERATION_COLUMNS]


def _cpu_operators(events: pd.DataFrame) -> pd.DataFrame:
    """Returns every operator with its own time, that of the operators it calls taken off, and how
    deep it is called.
    """
    rows = events[events["cat"] == "cpu_op"]
    if rows.empty:
        return pd.DataFrame(columns=[*_OPERATION_COLUMNS, "depth"])
    rows = _chrome_times(rows).sort_values(
        ["tid", "start_ns", "end_ns"], ascending=[True, True, False]
    )
    own = (rows["end_ns"] - rows["start_ns"]).to_numpy().copy()
    depth = np.zeros(len(rows), dtype=int)
    thread, open_operators = None, []
    for number, (tid, start, end) in enumerate(
        zip(rows["tid"], rows["start_ns"], rows["end_ns"], strict=True)
    ):
        if tid != thread:
            thread, open_operators = tid, []
        while open_operators and open_operators[-1][1] <= start:
            open_operators.pop()
        if open_operators:
            own[open_operators[-1][0]] -= end - start
        depth[number] = len(open_operators)
        open_operators.append((number, end))
    return rows.assign(
        kind="operator",
        duration_ns=np.maximum(own, 0),
        stream=rows["tid"],
        process=0,
        thread=rows["tid"],
        launched_ns=rows["start_ns"],
        depth=depth,
    )[[*_OPERATION_COLUMNS, "depth"]].reset_index(drop=True)


def launches(trace: Trace, phases: Sequence[str]) -> pd.DataFrame:
    """Returns the table of the module's docstring, in order of start.

    Args:
        trace: a capture.
        phases: names of the ranges that are phases; the outermost one of a path counts.
    """
    table = trace.operations.sort_values("start_ns", kind="stable").reset_index(drop=True)
    pairs = table[["name", "kind"]].drop_duplicates()
    short = distinct_names(pairs["name"][pairs["kind"] != "operator"])
    known = {
        (name, kind): (name[:96] if kind == "operator" else short[name], classify(name, kind))
        for name, kind in pairs.itertuples(index=False)
    }
    keys = list(zip(table["name"], table["kind"], strict=True))
    table["short_name"] = [known[key][0] for key in keys]
    table["kernel_class"] = [known[key][1] for key in keys]
    table["path"] = _paths(table, trace.ranges)
    table["range"] = [path[-1] if path else OUTSIDE for path in table["path"]]
    table["phase"] = [
        next((name for name in path if name in phases), OUTSIDE) for path in table["path"]
    ]
    return table


def _paths(operations: pd.DataFrame, ranges: pd.DataFrame) -> list[tuple[str, ...]]:
    """Returns the names of the ranges that each operation was launched in, outermost first."""
    names, starts = ranges["name"].tolist(), ranges["start_ns"].tolist()
    owners = list(zip(ranges["process"], ranges["thread"], strict=True))
    launches_of = list(zip(operations["process"], operations["thread"], strict=True))
    # At the same moment ranges close before others open, outer ones first, and launches come last.
    events = []
    for number, (start, end) in enumerate(zip(starts, ranges["end_ns"], strict=True)):
        if end > start:
            events += [(end, 0, 0, number), (start, 1, -end, number)]
    events += [(moment, 2, 0, row) for row, moment in operations["launched_ns"].dropna().items()]
    paths: list[tuple[str, ...]] = [()] * len(operations)
    is_open: dict = defaultdict(
        lambda: defaultdict(list)
    )  # by process and thread: numbers of ranges
    for _, kind, _, number in sorted(events):
        if kind == 2:
            process, thread = launches_of[number]
            paths[number] = tuple(names[n] for n in _enclosing(is_open[process], thread, starts))
        else:
            process, thread = owners[number]
            stack = is_open[process][thread]
            stack.append(number) if kind == 1 else stack.remove(number)
    return paths


def _enclosing(is_open: Mapping[int, list[int]], thread: int, starts: Sequence[int]) -> list[int]:
    """Returns the numbers of the ranges around a launch of `thread`: its own, inside earlier ones
    of other threads.
    """
    own = is_open.get(thread, [])
    outermost = starts[own[0]] if own else np.inf
    others = [
        n
        for other, numbers in is_open.items()
        if other != thread
        for n in numbers
        if starts[n] < outermost
    ]
    return [*sorted(others, key=starts.__getitem__), *own]


def busy_ns(table: pd.DataFrame) -> int:
    """Returns the time (ns) during which at least one of these launches was running."""
    starts, ends = table["start_ns"].to_numpy(), table["end_ns"].to_numpy()
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], np.maximum.accumulate(ends[order])
    gaps = np.maximum(starts[1:] - ends[:-1], 0).sum()
    return int(ends[-1] - starts[0] - gaps) if len(starts) else 0


def statistics_by(table: pd.DataFrame, columns: Sequence[str]) -> pd.DataFrame:
    """Returns launches, total, min and max (µs) of each group, the largest total first.

    Args:
        table: rows of `launches`.
        columns: that make a group.
    """
    microseconds = table.assign(us=table["duration_ns"] / 1e3).groupby(list(columns), sort=False)[
        "us"
    ]
    result = microseconds.agg(launches="count", total_us="sum", min_us="min", max_us="max")
    return result.sort_values("total_us", ascending=False, kind="stable").reset_index()


class RangeMarker:
    """Opens and closes ranges on the calling thread.

    Args:
        kind: "nvtx" (what nsys captures), "kineto" (what torch.profiler captures) or "none".

    Raises ValueError for another kind.
    """

    KINDS = ("nvtx", "kineto", "none")

    def __init__(self, kind: str):
        if kind not in self.KINDS:
            raise ValueError(f"unknown kind of range {kind!r}; accepted: {', '.join(self.KINDS)}")
        self.kind = kind
        self._open = threading.local()

    def open(self, name: str) -> None:
        """Opens a range inside those that this thread has open."""
        if self.kind == "nvtx":
            torch.cuda.nvtx.range_push(name)
        elif self.kind == "kineto":
            recorded = torch.profiler.record_function(name)
            recorded.__enter__()
            self._open.__dict__.setdefault("stack", []).append(recorded)

    def close(self) -> None:
        """Closes the range that this thread opened last."""
        if self.kind == "nvtx":
            torch.cuda.nvtx.range_pop()
        elif self.kind == "kineto":
            self._open.stack.pop().__exit__(None, None, None)

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self.open(name)
        try:
            yield
        finally:
            self.close()


def capture_with_kineto(
    function: Callable[[], None],
    device_kind: str,
    *,
    keep: Path | None = None,
    stacks: bool = False,
) -> Trace:
    """Calls `function` under torch.profiler and returns what it captured.

    Args:
        function: marks its ranges with a RangeMarker of kind "kineto".
        device_kind: "cuda" captures kernels, any other CPU operators.
        keep: where the trace is kept as a file; None deletes it. stacks: with the Python lines that
            call.

    Raises ProfileError as `read_chrome_trace`.
    """
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device_kind == "cuda" else [])]
    with profile(activities=activities, with_stack=stacks) as profiler:
        function()
        if device_kind == "cuda":
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory(prefix="labkit-kineto-") as folder:
        path = keep or Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        with _without_folder(folder):
            return read_chrome_trace(path, torch.__version__)


@contextlib.contextmanager
def _without_folder(folder: str) -> Iterator[None]:
    """Removes the name of a temporary folder from errors, since records hold no paths."""
    try:
        yield
    except ProfileError as error:
        raise ProfileError(str(error).replace(f"{folder}{os.sep}", "")) from error


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
    "OMP_NUM_THREADS",
    "TRITON_CACHE_DIR",
    "TORCHINDUCTOR_CACHE_DIR",
)
"""The variables that a captured process gets: a capture stores each with its value."""

LIBRARIES = "LABKIT_NSYS_LIBRARIES"
"""Variable with folders, separated as in PATH, of libraries that nsys's own tools lack, such as
libdw.
"""

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

_UNKNOWN_OPTION = re.compile(r"unrecogni[sz]ed option", re.IGNORECASE)

_TOKEN = "LABKIT_CAPTURE"

MAX_ENDING_S = 30.0
"""How long to wait for a killed process to end; one that waits for a device may not."""


def allowed_environment() -> dict[str, str]:
    """Returns the variables of this process's environment that a captured process may have."""
    return {name: os.environ[name] for name in ALLOWED_ENVIRONMENT if name in os.environ}


@dataclass(frozen=True)
class Nsys:
    """Nsight Systems as found here: the command line, its version, and the importer of raw captures
    if there is one.
    """

    path: str
    version: str
    importer: str | None

    @classmethod
    def find(cls) -> "Nsys | None":
        """Returns the nsys of PATH, of an Nsight Systems install or of Nsight Compute; None where
        none runs.
        """
        path = find_nsys()
        if path is None:
            return None
        try:
            answer = subprocess.run(
                [path, "--version"],
                capture_output=True,
                text=True,
                timeout=60,
                check=True,
                env=allowed_environment(),
            )
        except (
            OSError,
            subprocess.SubprocessError,
        ):  # CUDA's script of this name only looks for nsys
            return None
        version = re.search(r"\d+(\.\d+)+", answer.stdout)
        # nsys lies in target-linux-x64, the importer in a folder beside that one.
        importers = sorted(Path(path).resolve().parent.parent.glob("*/QdstrmImporter"))
        return cls(
            path, version.group() if version else "", str(importers[0]) if importers else None
        )

    @classmethod
    @functools.cache
    def usable(cls) -> "Nsys | None":
        """Returns what `find` does, None also where its captures cannot be read; stderr then says
        why.
        """
        nsys = cls.find()
        if failure := nsys and nsys.failure():
            print(f"labkit: torch.profiler takes the place of nsys: {failure}", file=sys.stderr)
        return None if failure else nsys

    def failure(self) -> str:
        """Returns why a capture of an empty program cannot be made, imported and exported; "" if it
        can.
        """
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
        variables: Mapping[str, str] | None = None,
        keep: Path | None = None,
        stacks: bool = False,
        reads: bool = True,
    ) -> Trace | None:
        """Runs `command` under nsys and returns what was captured.

        Args:
            command: program and arguments; it marks its ranges with NVTX.
            timeout_s: for the program, the import and the export together.
            variables: added to the allow-listed environment.
            keep: where the capture (.nsys-rep) is kept; None deletes it. stacks: with call stacks
                if nsys can.
            reads: False to return None without reading it, since an empty program launches nothing.

        Raises:
            TimeoutError: it took longer; every process that it started has been ended.
            ProfileError: nsys, the importer or the export failed, or what they left cannot be read.
        """
        bounded = functools.partial(
            run_bounded, timeout_s=timeout_s, end_s=time.monotonic() + timeout_s
        )
        with tempfile.TemporaryDirectory(prefix="labkit-nsys-") as folder, _without_folder(folder):
            # nsys writes raw captures to TMPDIR first, and may leave them there.
            environment = {**allowed_environment(), **(variables or {}), "TMPDIR": folder}
            report = Path(folder) / "capture.nsys-rep"
            export = report.with_suffix(".sqlite")
            options, sampled = (
                [*TRACED, "--stats=false", f"--output={folder}/capture"],
                STACKS if stacks else NO_STACKS,
            )
            folders = [os.environ.get(LIBRARIES, ""), environment.get("LD_LIBRARY_PATH", "")]
            tools = {**environment, "LD_LIBRARY_PATH": os.pathsep.join(filter(None, folders))}
            for others in (
                (*sampled, *NEWER_OPTIONS),
                sampled,
                NO_STACKS,
            ):  # a machine may allow no sampling
                said = bounded([self.path, "profile", *options, *others, *command], environment)
                raw = sorted(Path(folder).rglob("*.qdstrm"))
                if report.exists() or raw or not (stacks or _UNKNOWN_OPTION.search(said)):
                    break  # an older release that is given a newer option starts nothing
            if not report.exists() and raw:
                if self.importer is None:
                    raise ProfileError(
                        "nsys left a raw capture, and there is no QdstrmImporter beside it"
                    )
                command = [self.importer, "--input-file", str(raw[0]), "--output-file", str(report)]
                said = bounded(command, tools)
            if not report.exists():
                raise ProfileError(f"nsys left no report: {_last_line(said)}")
            if keep:
                shutil.copyfile(report, keep)
            arguments = [
                "export",
                "--type=sqlite",
                "--force-overwrite=true",
                f"--output={export}",
                str(report),
            ]
            said = bounded([self.path, *arguments], tools)
            if not export.exists():
                raise ProfileError(f"nsys export left no SQLite file: {_last_line(said)}")
            return read_nsys(export, self.version) if reads else None


def _last_line(text: str) -> str:
    """Returns the last line of a program's output, without folders."""
    lines = text.split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "no output")
    return re.sub(r"\S*/(?=\S)", "", last)[:300]


def run_bounded(
    command: Sequence[str],
    environment: Mapping[str, str],
    timeout_s: float,
    end_s: float | None = None,
) -> str:
    """Runs a program and returns its output; afterwards, even on an error, no process that it
    started is left.

    Args:
        command: program and arguments.
        environment: the program's whole environment.
        timeout_s: limit in seconds; end_s: when it ends, by time.monotonic(), if it has begun
            before.

    Raises:
        TimeoutError: the program took longer.
        ProfileError: it cannot be started.
    """
    end_s = end_s or time.monotonic() + timeout_s
    token = secrets.token_hex(8)
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as said:
        try:
            process = subprocess.Popen(
                list(command),
                env={**environment, _TOKEN: token},
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
            )
        except OSError as error:
            raise ProfileError(
                f"{Path(command[0]).name} cannot be started: {error.strerror}"
            ) from error
        try:
            process.wait(max(0.1, end_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            name = Path(command[0]).name
            raise TimeoutError(
                f"{name} was stopped: the capture took longer than {timeout_s:g} s"
            ) from None
        finally:
            _end_all(process, token)
        said.seek(0)
        return said.read()


def _end_all(process: subprocess.Popen, token: str) -> None:
    """Kills a program and all that it started, known by the variable they inherit, since some leave
    its group.

    The others stay in this process's group and end with it.
    """
    begin, killed = time.monotonic(), set()
    while time.monotonic() - begin < MAX_ENDING_S:
        found = {*_processes_with(token), *([process.pid] if process.poll() is None else [])}
        if not found and not any(_is_ending(pid) for pid in killed):
            return
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        killed |= found
        time.sleep(0.05)


def _is_ending(pid: int) -> bool:
    """Returns whether a killed process still holds resources; its environment is gone first."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state not in ("Z", "X")


def _processes_with(token: str) -> list[int]:
    """Returns the processes with this token in their environment (only where there is /proc)."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if token.encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return found
