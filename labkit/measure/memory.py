"""The memory a callable takes: its peak, every allocation and its origin, what autograd keeps for
backward.

| device | bytes in use come from |
|---|---|
| cuda | the caching allocator: its counters, and its recorded history |
| cpu  | the profiler's memory events: every allocation and free of PyTorch's CPU allocator |

Both give every allocation and free in order; `snapshots` turns them into a history that can be
drawn.
"""

import contextlib
import gc
import linecache
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.profiler import profile, record_function
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode

from labkit.measure.snapshots import History, frame_text, history_since, in_use_before, pair_events

DEVICE_KINDS = ("cuda", "cpu")

_POSITION = "labkit position "


@dataclass(frozen=True)
class Usage:
    """Bytes that a call took beyond what was in use before it.

    Attributes:
        peak_bytes: the most at any moment of the call.
        kept_bytes: still in use after it, with its result; negative if the call freed more than it
            allocated.
        requested_bytes: the part of kept_bytes that tensors asked for. CUDA's caching allocator
            adds to it: it rounds sizes up to 512 bytes and leaves up to 1 MiB of a cached block
            unsplit.
        result: what it returned.
    """

    peak_bytes: int
    kept_bytes: int
    requested_bytes: int
    result: Any


def measure_usage(function: Callable[[], Any], device_kind: str) -> Usage:
    """Returns the bytes that one call of `function` takes.

    Args:
        device_kind: "cuda" (by the caching allocator's counters) or "cpu" (by the profiler's memory
            events).

    Raises ValueError for another kind of device.
    """
    gc.collect()
    if device_kind == "cuda":
        torch.cuda.synchronize()
        before, requested_before = torch.cuda.memory_allocated(), _requested_bytes()
        torch.cuda.reset_peak_memory_stats()
        result = function()
        torch.cuda.synchronize()
        peak_bytes, kept_bytes = (
            torch.cuda.max_memory_allocated() - before,
            torch.cuda.memory_allocated() - before,
        )
        return Usage(peak_bytes, kept_bytes, _requested_bytes() - requested_before, result)
    with Recorder(device_kind) as recorder:
        result = function()
    totals = recorder.history.totals() - recorder.history.totals()[0]
    kept_bytes = int(totals[-1])
    return Usage(int(totals.max()), kept_bytes, kept_bytes, result)


def _requested_bytes() -> int:
    return torch.cuda.memory_stats()["requested_bytes.all.current"]


class Recorder:
    """Records every allocation and free while a `with` block runs; `history` holds them afterwards.

    On CUDA `history.reported_peak_bytes` is `max_memory_allocated` of the block, and the history
    includes all that was in use before. On the CPU it comes from the profiler's running total, and
    of what was in use before the history includes `resident` and whatever was freed in the block.

    Args:
        device_kind: "cuda" or "cpu".
        resident: tensors that exist before the block and stay (CPU only).

    Raises:
        ValueError: another kind of device.
        SnapshotError: at the end of the block, if the allocator's events contradict one another.
    """

    def __init__(self, device_kind: str, resident: Sequence[Tensor] = ()):
        if device_kind not in DEVICE_KINDS:
            accepted = ", ".join(DEVICE_KINDS)
            raise ValueError(
                f"memory of device {device_kind!r} cannot be recorded; accepted: {accepted}"
            )
        self.device_kind = device_kind
        self._resident = {
            x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in resident
        }
        self.history = History([], 0)
        self._marks: list[tuple[str, int]] = []
        self._num_positions = 0

    def mark(self, name: str) -> None:
        """Begins the phase called `name`."""
        self._marks.append((name, self.position()))

    def position(self) -> int:
        """Returns a number for this moment, which `position_of` later turns into a position in the
        history.
        """
        if self.device_kind == "cuda":
            return self._num_allocator_events()
        with record_function(f"{_POSITION}{self._num_positions}"):
            self._num_positions += 1
        return self._num_positions - 1

    def position_of(self, moment: int) -> int:
        """Returns how many recorded events came before a moment that `position` gave."""
        return (
            moment - self._first_event
            if self.device_kind == "cuda"
            else self._events_before[moment]
        )

    def __enter__(self) -> "Recorder":
        gc.collect()
        if self.device_kind == "cuda":
            torch.cuda.synchronize()
            torch.cuda.memory._record_memory_history(None)
            torch.cuda.memory._record_memory_history(context="alloc", stacks="python")
            segments = torch.cuda.memory._snapshot()["segments"]
            self._segments = [
                segment for segment in segments if segment["device"] == torch.cuda.current_device()
            ]
            self._first_event = self._num_allocator_events()
            torch.cuda.reset_peak_memory_stats()
        else:
            self._profile = profile(profile_memory=True)
            self._profile.__enter__()
        return self

    def __exit__(self, error_type, *error) -> None:
        if self.device_kind == "cuda":
            self._end_cuda(error_type is None)
        else:
            self._profile.__exit__(error_type, *error)
            self._end_cpu()
        if error_type is None:
            self.history.marks = [(name, self.position_of(moment)) for name, moment in self._marks]

    def _end_cuda(self, completed: bool) -> None:
        torch.cuda.synchronize()
        try:
            if completed:
                peak = torch.cuda.max_memory_allocated()
                trace = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
                # Taking the first snapshot is an event of its own; the block begins after it.
                begin = next(
                    (number for number, entry in enumerate(trace) if entry["action"] == "snapshot"),
                    -1,
                )
                self.history = history_since(self._segments, trace[begin + 1 :])
                self.history.reported_peak_bytes = peak
        finally:
            torch.cuda.memory._record_memory_history(None)

    def _end_cpu(self) -> None:
        events, moments, reported = [], {}, []
        tree = self._profile.kineto_results.experimental_event_tree()
        for event in sorted(_flat(tree), key=lambda event: event.start_time_ns):
            if event.name.startswith(_POSITION):
                moments[int(event.name.removeprefix(_POSITION))] = len(events)
            elif event.name == "[memory]" and event.extra_fields.device.type == "cpu":
                memory = event.extra_fields
                events.append((memory.ptr, memory.alloc_size, ""))
                reported.append(memory.total_allocated)
        self._events_before = moments
        before = self._resident | in_use_before(events, {})
        self.history = History(pair_events(events, before), len(events))
        # The running total starts with the process's first profile, not with this one.
        offset = sum(before.values()) - (reported[0] - events[0][1] if events else 0)
        self.history.reported_peak_bytes = offset + max(reported, default=0)

    @staticmethod
    def _num_allocator_events() -> int:
        """Returns how many allocations and frees CUDA's allocator has seen."""
        counts = torch._C._cuda_memoryStats(torch.cuda.current_device())["allocation"]["all"]
        return counts["allocated"] + counts["freed"]


def _flat(events: Sequence) -> Iterator:
    """Yields the events of a tree, each before its children."""
    pending = list(reversed(events))
    while pending:
        event = pending.pop()
        yield event
        pending += reversed(event.children)


@dataclass(frozen=True)
class Owner:
    """What made an allocation.

    Attributes:
        operator: PyTorch's operator, "aten.mm"; "" outside of any.
        module: path of the innermost module whose forward or backward pass made it.
        frame: "file.py:line function" in the forward pass; code: the text of that line.
    """

    operator: str = ""
    module: str = ""
    frame: str = ""
    code: str = ""


@contextlib.contextmanager
def _module_path(model: nn.Module) -> Iterator[list[str]]:
    """Gives a list whose last entry is the path of the innermost module in its forward pass, "" for
    the model.
    """
    path = [""]

    def leave(*_) -> None:  # a hook's result would replace the module's output
        path.pop()

    with contextlib.ExitStack() as hooks:
        for name, module in model.named_modules():
            enter = module.register_forward_pre_hook(lambda *_, name=name: path.append(name))
            hooks.callback(enter.remove)
            hooks.callback(module.register_forward_hook(leave, always_call=True).remove)
        yield path


class OwnerLog(TorchDispatchMode):
    """Notes the module and line behind each operator, so that allocations have an owner.

    A backward operator belongs to the line that made its autograd node, known by the node's
    sequence number.

    Args:
        recorder: gives the positions; the log is used inside its block.
        model: the model whose modules are named.
    """

    def __init__(self, recorder: Recorder, model: nn.Module):
        super().__init__()
        self._recorder = recorder
        self._notes: list[tuple[int, Owner]] = []
        self._by_node: dict[int, Owner] = {}
        self._hooks = contextlib.ExitStack()
        self._path = self._hooks.enter_context(_module_path(model))

    def close(self) -> None:
        """Removes the hooks from the model."""
        self._hooks.close()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        operator = str(function).rsplit(".", 1)[0]
        node = torch._C._current_autograd_node()
        if node is None:
            owner = Owner(operator, self._path[-1], *_calling_line())
            # The operator's node exists by now; later operators may make none.
            self._by_node.setdefault(torch._C._autograd._get_sequence_nr() - 1, owner)
        else:
            owner = replace(self._by_node.get(node._sequence_nr(), Owner()), operator=operator)
        self._notes.append((self._recorder.position(), owner))
        return function(*args, **(kwargs or {}))

    def owners(self) -> list[Owner]:
        """Returns the owner of each event of the recorder's history, once it has ended."""
        positions = [self._recorder.position_of(moment) for moment, _ in self._notes]
        found = [Owner()] * self._recorder.history.num_events
        for (_, owner), begin, end in zip(
            self._notes, positions, [*positions[1:], len(found)], strict=True
        ):
            found[begin:end] = [owner] * (end - begin)
        return found


_FRAMES_TO_PASS = (str(Path(torch.__file__).parent), __file__)


def _calling_line() -> tuple[str, str]:
    """Returns "file.py:line function" of the innermost frame outside PyTorch and this module, and
    the line's text.
    """
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith(_FRAMES_TO_PASS) and code.co_filename.endswith(".py"):
            where = frame_text(
                [{"filename": code.co_filename, "line": frame.f_lineno, "name": code.co_name}]
            )
            return where, linecache.getline(code.co_filename, frame.f_lineno).strip()
        frame = frame.f_back
    return "", ""


@dataclass(frozen=True)
class Residual:
    """One tensor that an operator saves for its backward pass.

    Attributes:
        operator: the Python function, "linear", "softmax"; "" inside a compiled graph.
        module: path of the innermost module; "" inside a compiled graph.
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

    def __init__(self):
        super().__init__()
        self.name = ""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        outer, self.name = (
            self.name,
            (resolve_name(function) or function.__name__).rsplit(".", 1)[-1],
        )
        try:
            return function(*args, **(kwargs or {}))
        finally:
            self.name = outer


def residuals(
    function: Callable[[], Any], module: nn.Module, resident: Sequence[Tensor], *, is_compiled: bool
) -> tuple[list[Residual], Any]:
    """Returns what autograd saves during `function`, in order, and the function's result.

    Args:
        function: a forward pass with gradient.
        module: the module whose parts are named.
        resident: what is kept anyway: parameters and tables. is_compiled: `function` runs compiled
            code, whose parts have no names: looking into it would compile it again.
    """
    kept_anyway = {x.untyped_storage()._cdata for x in resident}
    path, seen, found = [""], {}, []
    current = _CurrentFunction()

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        found.append(
            Residual(
                operator=current.name,
                module=path[-1],
                shape=tuple(tensor.shape),
                dtype=str(tensor.dtype).removeprefix("torch."),
                num_bytes=storage.nbytes(),
                is_new=storage._cdata not in seen,
                is_resident=storage._cdata in kept_anyway,
            )
        )
        seen.setdefault(storage._cdata, tensor)  # kept alive, so that its storage is not used again
        return tensor

    with contextlib.ExitStack() as stack:
        if not is_compiled:
            stack.enter_context(current)
            path = stack.enter_context(_module_path(module))
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            result = function()
    return found, result


def saved_bytes(found: Sequence[Residual]) -> int:
    """Returns the bytes of the distinct storages among residuals, without those that are kept
    anyway.
    """
    return sum(
        residual.num_bytes for residual in found if residual.is_new and not residual.is_resident
    )


def packed_bytes(found: Sequence[Residual]) -> int:
    """Returns the bytes of all residuals that are not kept anyway, each counted as often as it is
    saved.
    """
    kept = (residual for residual in found if not residual.is_resident)
    return sum(
        math.prod(residual.shape) * getattr(torch, residual.dtype).itemsize for residual in kept
    )
