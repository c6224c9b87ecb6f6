"""The memory a callable takes: its peak, every allocation and its origin, what autograd keeps for
backward.

| device | bytes in use come from |
|---|---|
| cuda | the caching allocator: its counters, and a snapshot of its recorded history |
| cpu  | the profiler's memory events: every allocation and free of PyTorch's CPU allocator |

Both give every allocation and free in order: a `History`, which can be drawn. Its bytes are those
that tensors asked for; those of `measure_usage` are CUDA's blocks, which are larger by up to 512
bytes, or by up to 1 MiB where a cached block stays unsplit.
"""

import contextlib
import gc
import io
import pickle
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.profiler import profile, record_function
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils.module_tracker import ModuleTracker

BEFORE = -1
"""Position of what was allocated before the recording began."""


class SnapshotError(ValueError):
    """A history that contradicts itself, or a file that is no snapshot; the message says how."""


@dataclass
class Allocation:
    """One block of memory.

    Attributes:
        address, num_bytes: as the allocator counts them.
        begin: position in the history of the event that made it; BEFORE if it was there already.
        end: position of the event that gave it back; None if none did. frame: "file.py:line
            function" of the innermost Python frame outside PyTorch; "" where unknown.
    """

    address: int
    num_bytes: int
    begin: int
    end: int | None
    frame: str = ""

    def is_alive(self, position: int) -> bool:
        """Returns whether it is in use after the event at `position`."""
        return self.begin <= position and (self.end is None or position < self.end)


@dataclass
class History:
    """An allocator's allocations, and named moments between its events.

    Attributes:
        allocations: in the order in which they were made; those from before come first.
        num_events: how many allocations and frees were recorded.
        marks: (name, position of the first event after the moment), in order.
    """

    allocations: list[Allocation]
    num_events: int
    marks: list[tuple[str, int]] = field(default_factory=list)

    def totals(self, allocations: Sequence[Allocation] | None = None) -> np.ndarray:
        """Returns the bytes in use at the start and after each event, by these allocations or by
        all of them.
        """
        steps = np.zeros(self.num_events + 1, dtype=np.int64)
        for allocation in self.allocations if allocations is None else allocations:
            steps[allocation.begin + 1] += allocation.num_bytes
            if allocation.end is not None:
                steps[allocation.end + 1] -= allocation.num_bytes
        return np.cumsum(steps)

    @cached_property
    def peak_bytes(self) -> int:
        return int(self.totals().max())

    def phases(self) -> list[tuple[str, int, int]]:
        """Returns (name, first position, position after the last) between the marks."""
        marks = [*self.marks, ("", self.num_events)]
        return [(name, begin, end) for (name, begin), (_, end) in pairwise(marks)]

    def series(
        self, category: Callable[[Allocation], str], num_points: int
    ) -> tuple[list[int], dict[str, list[int]]]:
        """Returns the bytes in use by category over the history, thinned so that every peak stays.

        Args:
            category: the name under which an allocation counts.
            num_points: the most points kept; of each stretch of equal length the one with the most
                bytes in use.

        Returns:
            Numbers of events before each point, and bytes of each category at each point.
        """
        grouped = defaultdict(list)
        for allocation in self.allocations:
            grouped[category(allocation)].append(allocation)
        total = self.totals()
        edges = np.unique(np.linspace(0, len(total), num_points + 1).astype(int))
        kept = [int(low + total[low:high].argmax()) for low, high in pairwise(edges)]
        return kept, {
            name: self.totals(members)[kept].tolist() for name, members in grouped.items()
        }


def pair_events(
    events: Sequence[tuple[int, int, str]], before: Mapping[int, int]
) -> list[Allocation]:
    """Returns the allocations behind a sequence of events.

    Args:
        events: (address, bytes, frame); bytes are negative where the block is freed.
        before: bytes by address of what was in use when the recording began.

    Raises SnapshotError for a block allocated twice, or freed with another size or without having
    been allocated.
    """
    allocations = [Allocation(address, size, BEFORE, None) for address, size in before.items()]
    alive = {allocation.address: allocation for allocation in allocations}
    for position, (address, num_bytes, frame) in enumerate(events):
        block = alive.pop(address, None)
        in_use = block.num_bytes if block else 0
        if in_use != max(0, -num_bytes):
            change = "frees" if num_bytes < 0 else "allocates"
            raise SnapshotError(
                f"event {position} {change} {abs(num_bytes)} bytes at {address:#x}, where {in_use} "
                "are in use"
            )
        if block:
            block.end = position
        else:
            alive[address] = Allocation(address, num_bytes, position, None, frame)
            allocations.append(alive[address])
    return allocations


def in_use_before(
    events: Sequence[tuple[int, int, str]], in_use: Mapping[int, int]
) -> dict[int, int]:
    """Returns bytes by address of what was in use before the events, given the same after them."""
    before = dict(in_use)
    for address, num_bytes, _ in reversed(events):
        if num_bytes >= 0:
            before.pop(address, None)
        else:
            before[address] = -num_bytes
    return before


def _history(snapshot: dict, device: int) -> History:
    """Returns what a snapshot of CUDA's allocator holds of a device: what was in use when its trace
    began, and the trace.
    """
    in_use = {}  # bytes by address
    for segment in snapshot["segments"]:
        if segment.get("device", 0) == device:
            address = segment["address"]
            for block in segment["blocks"]:
                if block["state"] == "active_allocated":
                    in_use[address] = block.get("requested_size", block["size"])
                address += block["size"]
    events = []
    for entry in snapshot["device_traces"][device]:
        # From its request on, a block that is freed no longer counts as in use.
        sign = {"alloc": 1, "free_requested": -1}.get(entry["action"])
        if sign:
            frame = frame_text(entry.get("frames", ()))
            events.append((entry["addr"], sign * entry["size"], frame))
    return History(pair_events(events, in_use_before(events, in_use)), len(events))


class _PlainUnpickler(pickle._Unpickler):
    """Builds containers, strings and numbers; refuses whatever a pickle names, which is how it
    would execute something.

    It is the unpickler written in Python, which reserves nothing for a number that a file only
    claims.
    """

    def find_class(self, module: str, name: str) -> Any:
        raise SnapshotError(f"it names {module}.{name}, and a snapshot holds no code")


def read_history(path: Path | str) -> History:
    """Returns the history in a file that `torch.cuda.memory._dump_snapshot` wrote, of the device on
    which most happened, or which has most in use. Nothing in the file is executed.

    Without a recorded trace the history has no events, only what was in use.

    Raises:
        SnapshotError: the file cannot be read, is not a pickle of containers, strings and numbers
            alone, or not a snapshot; the message names the file and what was found.
    """
    try:
        snapshot = _PlainUnpickler(io.BytesIO(Path(path).read_bytes())).load()
        histories = [_history(snapshot, n) for n in range(len(snapshot["device_traces"]))]
        return max(histories, key=lambda history: (history.num_events, history.peak_bytes))
    except SnapshotError as error:
        raise SnapshotError(f"{path}: refused: {error!s:.400}") from None
    except Exception as error:  # what a broken file runs into, in the unpickler or here
        reason = f"{type(error).__name__}: {error}"
        raise SnapshotError(f"{path}: not an allocator snapshot ({reason:.400})") from None


def frame_text(frames: Sequence[dict]) -> str:
    """Returns "file.py:line function" of the innermost Python frame outside PyTorch; "" without
    one.
    """
    for frame in frames:
        name = frame["filename"].replace("\\", "/")
        if name.endswith(".py") and "/torch/" not in name:
            return f"{name.rsplit('/', 1)[-1]}:{frame['line']} {frame['name']}"
    return ""


def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Returns bytes by address of the distinct storages behind `tensors`; several may be views of
    one.
    """
    behind = [x.untyped_storage() for x in tensors]
    return {storage.data_ptr(): storage.nbytes() for storage in behind}


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Returns the bytes of the distinct storages behind `tensors`."""
    return sum(storages(tensors).values())


def measure_usage(function: Callable[[], Any], device_kind: str) -> tuple[int, Any]:
    """Returns the most bytes that a call of `function` takes at any moment, beyond what was in use
    before, and its result.

    Args:
        device_kind: "cuda" (by the caching allocator's counters) or "cpu" (by the profiler's memory
            events).
    """
    gc.collect()
    if device_kind == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = function()
        return torch.cuda.max_memory_allocated() - before, result
    with Recorder(device_kind) as recorder:
        result = function()
    history = recorder.history
    return history.peak_bytes - int(history.totals()[0]), result


_MARK = "labkit mark: "
"""Begins the name under which the CPU's profiler sees a mark."""


class Recorder:
    """Records every allocation and free while a `with` block runs; `history` holds them afterwards.

    Of what was in use before, the history includes all on CUDA; on the CPU `resident` and whatever
    was freed in the block.

    Args:
        device_kind: "cuda" or "cpu".
        resident: tensors that exist before the block and stay (CPU only).

    Raises:
        SnapshotError: at the end of the block, if the allocator's events contradict one another.
    """

    def __init__(self, device_kind: str, resident: Sequence[Tensor] = ()):
        self._is_cuda = device_kind == "cuda"
        self._resident = storages(resident)
        self._marks: list[tuple[str, int]] = []

    def mark(self, name: str) -> None:
        """Begins the phase called `name`."""
        if self._is_cuda:
            self._marks.append((name, self._num_allocator_events() - self._first_event))
        else:
            with record_function(f"{_MARK}{name}"):
                pass

    def __enter__(self) -> "Recorder":
        gc.collect()
        self._recording = self._on_cuda() if self._is_cuda else self._on_cpu()
        self._recording.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._recording.__exit__(*error)

    @contextlib.contextmanager
    def _on_cuda(self) -> Iterator[None]:
        """Records by the caching allocator's own history."""
        torch.cuda.synchronize()
        torch.cuda.memory._record_memory_history(None)
        torch.cuda.memory._record_memory_history(context="alloc", stacks="python")
        self._first_event = self._num_allocator_events()
        try:
            yield
            torch.cuda.synchronize()
            self.history = _history(torch.cuda.memory._snapshot(), torch.cuda.current_device())
            self.history.marks = self._marks
        finally:
            torch.cuda.memory._record_memory_history(None)

    @contextlib.contextmanager
    def _on_cpu(self) -> Iterator[None]:
        """Records by the profiler's memory events."""
        with profile(profile_memory=True) as profiler:
            yield
        events = []
        tree = profiler.kineto_results.experimental_event_tree()
        for event in sorted(_flat(tree), key=lambda event: event.start_time_ns):
            if event.name.startswith(_MARK):
                self._marks.append((event.name.removeprefix(_MARK), len(events)))
            elif event.name == "[memory]" and event.extra_fields.device.type == "cpu":
                memory = event.extra_fields
                events.append((memory.ptr, memory.alloc_size, ""))
        before = self._resident | in_use_before(events, {})
        self.history = History(pair_events(events, before), len(events), self._marks)

    @staticmethod
    def _num_allocator_events() -> int:
        """Returns how many allocations and frees CUDA's allocator has seen."""
        counts = torch._C._cuda_memoryStats(torch.cuda.current_device())["allocation"]["all"]
        return counts["allocated"] + counts["freed"]


def _flat(events: Sequence) -> Iterator:
    """Yields the events of a tree, each before its children."""
    for event in events:
        yield event
        yield from _flat(event.children)


@dataclass(frozen=True)
class Residual:
    """One tensor that an operator saves for its backward pass.

    Attributes:
        operator: the Python function, "linear", "softmax"; "" inside a compiled graph.
        module: path of the innermost module, within the outermost; "" for that and inside a
            compiled graph.
        shape, dtype: of the tensor. num_bytes: of its storage.
        is_new: no earlier residual has this storage.
        is_resident: the storage is kept anyway, as a parameter's or a table's.
    """

    operator: str
    module: str
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    is_new: bool
    is_resident: bool


class _CurrentFunction(TorchFunctionMode):
    """Its `name` is that of PyTorch's running function."""

    name = ""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        outer = self.name
        self.name = (resolve_name(function) or function.__name__).rsplit(".", 1)[-1]
        try:
            return function(*args, **(kwargs or {}))
        finally:
            self.name = outer


def residuals(
    function: Callable[[], Any], resident: Sequence[Tensor], *, is_compiled: bool
) -> list[Residual]:
    """Returns what autograd saves during `function`, in order.

    Args:
        function: a forward pass with gradient.
        resident: what is kept anyway: parameters and tables. is_compiled: `function` runs compiled
            code, whose parts have no names: looking into it would compile it again.
    """
    kept_anyway = {x.untyped_storage()._cdata for x in resident}
    tensors: dict[int, Tensor] = {}  # by storage; kept alive, so that none is used again
    saved = []
    current = _CurrentFunction()
    tracker = ModuleTracker()

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        innermost = max(tracker.parents, key=lambda name: name.count("."))
        saved.append(
            Residual(
                operator=current.name,
                module=innermost.partition(".")[2],
                shape=tuple(tensor.shape),
                dtype=str(tensor.dtype).removeprefix("torch."),
                num_bytes=storage.nbytes(),
                is_new=storage._cdata not in tensors,
                is_resident=storage._cdata in kept_anyway,
            )
        )
        tensors.setdefault(storage._cdata, tensor)
        return tensor

    with contextlib.ExitStack() as stack:
        if not is_compiled:
            stack.enter_context(current)
            stack.enter_context(tracker)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            function()
    return saved


def saved_bytes(saved: Sequence[Residual]) -> int:
    """Returns the bytes of the distinct storages among residuals, without those that are kept
    anyway.
    """
    return sum(one.num_bytes for one in saved if one.is_new and not one.is_resident)
