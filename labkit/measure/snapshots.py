"""The history of an allocator: every allocation with its lifetime, what is in use over time, where
it peaks.

A history comes from live recording (`memory.Recorder`) or from a snapshot file of PyTorch's CUDA
allocator, which is read without executing anything from it. Nothing here imports torch.
"""

import pickle
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from labkit.records import COUNT, LIST, TEXT, Kind, check_fields, list_of

ROUNDING = 512
"""CUDA's allocator hands out multiples of this many bytes."""

MAX_BYTES = 2**48
"""No device holds an allocation of this size."""

SMALL_SEGMENT = 2**21
SMALL_SPLIT, LARGE_SPLIT = 512, 2**20 + 1
"""A cached block is split when at least this many bytes would remain: SMALL_SPLIT in segments of
SMALL_SEGMENT bytes, LARGE_SPLIT in larger ones. Otherwise all of it counts as in use. Source:
PyTorch, c10/cuda/CUDACachingAllocator.cpp.
"""

BEFORE = -1
"""Position of what was allocated before the recording began."""


class SnapshotError(ValueError):
    """A file that is not a snapshot, or an inconsistent one; the message names the file and what
    was found.
    """


@dataclass(frozen=True)
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
        reported_peak_bytes: the peak as the allocator itself reports it; None where it does not.
    """

    allocations: list[Allocation]
    num_events: int
    marks: list[tuple[str, int]] = field(default_factory=list)
    reported_peak_bytes: int | None = None

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

    @cached_property
    def peak_position(self) -> int:
        """Position of the event after which most bytes are in use; BEFORE if that is at the
        start.
        """
        return int(self.totals().argmax()) - 1

    def phases(self) -> list[tuple[str, int, int]]:
        """Returns (name, first position, position after the last) between the marks."""
        ends = [position for _, position in self.marks[1:]] + [self.num_events]
        return [(name, begin, end) for (name, begin), end in zip(self.marks, ends, strict=True)]

    def phase_at(self, position: int) -> str:
        """Returns the phase of the event at `position`; "before" if it precedes the first mark."""
        return next(
            (name for name, begin, end in self.phases() if begin <= position < end), "before"
        )

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
        grouped: dict[str, list[Allocation]] = {}
        for allocation in self.allocations:
            grouped.setdefault(category(allocation), []).append(allocation)
        total = self.totals()
        edges = np.unique(np.linspace(0, len(total), min(num_points, len(total)) + 1).astype(int))
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
    alive = {address: (num_bytes, BEFORE, "") for address, num_bytes in before.items()}
    found: list[Allocation] = []
    for position, (address, num_bytes, frame) in enumerate(events):
        if num_bytes >= 0:
            if address in alive:
                raise SnapshotError(f"event {position} allocates {address:#x}, which is in use")
            alive[address] = (num_bytes, position, frame)
        else:
            if address not in alive:
                raise SnapshotError(f"event {position} frees {address:#x}, which is not in use")
            size, begin, made_in = alive.pop(address)
            if size != -num_bytes:
                raise SnapshotError(
                    f"event {position} frees {-num_bytes} bytes at {address:#x}, where {size} are "
                    f"in use"
                )
            found.append(Allocation(address, size, begin, position, made_in))
    found += [
        Allocation(address, size, begin, None, frame)
        for address, (size, begin, frame) in alive.items()
    ]
    return sorted(found, key=lambda allocation: allocation.begin)


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


class _Layout:
    """The blocks of a caching allocator's segments by address, as they are split and merged.

    A trace holds the bytes requested; the allocator counts those of the block it returned as in
    use.
    """

    def __init__(self, segments: Sequence[dict]):
        self.blocks: dict[
            int, tuple[int, int, bool]
        ] = {}  # by address: bytes, address of the segment, is free
        self.ends: dict[int, int] = {}  # address of the block that ends there
        self.segment_bytes: dict[int, int] = {}
        for segment in segments:
            address = segment["address"]
            self.segment_bytes[address] = segment["total_size"]
            for block in segment["blocks"]:
                self._put(address, block["size"], segment["address"], block["state"] == "inactive")
                address += block["size"]

    def _put(self, address: int, num_bytes: int, segment: int, is_free: bool) -> None:
        self.blocks[address] = (num_bytes, segment, is_free)
        self.ends[address + num_bytes] = address

    def _take(self, address: int) -> tuple[int, int, bool]:
        num_bytes, segment, is_free = self.blocks.pop(address)
        del self.ends[address + num_bytes]
        return num_bytes, segment, is_free

    def add_segment(self, address: int, num_bytes: int) -> None:
        self.segment_bytes[address] = num_bytes
        self._put(address, num_bytes, address, True)

    def remove_segment(self, address: int) -> None:
        self._take(address)
        del self.segment_bytes[address]

    def allocate(self, address: int, requested_bytes: int) -> int:
        """Returns the bytes of the block given for `requested_bytes`; raises KeyError where none is
        free.
        """
        num_bytes, segment, is_free = self.blocks[address]
        rounded = max(ROUNDING, -(-requested_bytes // ROUNDING) * ROUNDING)
        if not is_free or rounded > num_bytes:
            raise KeyError(address)
        least = SMALL_SPLIT if self.segment_bytes[segment] == SMALL_SEGMENT else LARGE_SPLIT
        given = rounded if num_bytes - rounded >= least else num_bytes
        self._put(address, given, segment, False)
        if given < num_bytes:
            self._put(address + given, num_bytes - given, segment, True)
        return given

    def release(self, address: int) -> None:
        """Frees a block and merges it with free neighbours in its segment."""
        num_bytes, segment, _ = self._take(address)
        for neighbour in (address + num_bytes, self.ends.get(address)):
            if self.blocks.get(neighbour, (0, None, False))[1:] == (segment, True):
                num_bytes += self._take(neighbour)[0]
                address = min(address, neighbour)
        self._put(address, num_bytes, segment, True)


def history_since(segments: Sequence[dict], trace: Sequence[dict]) -> History:
    """Returns the history of CUDA's caching allocator with the bytes that it counts as in use.

    Args:
        segments: those of a snapshot taken when the recording began.
        trace: the events since, in order, as in a snapshot's "device_traces".

    Raises SnapshotError where the events do not fit the segments.
    """
    layout = _Layout(segments)
    before = {address: size for address, (size, _, is_free) in layout.blocks.items() if not is_free}
    events: list[tuple[int, int, str]] = []
    for number, entry in enumerate(trace):
        action, address, num_bytes = entry["action"], entry["addr"], entry["size"]
        try:
            if action == "segment_alloc":
                layout.add_segment(address, num_bytes)
            elif action == "segment_free":
                layout.remove_segment(address)
            elif action == "alloc":
                events.append(
                    (
                        address,
                        layout.allocate(address, num_bytes),
                        frame_text(entry.get("frames", ())),
                    )
                )
            elif action == "free_requested":  # from here on `memory_allocated` does not count it
                events.append((address, -layout.blocks[address][0], ""))
            elif action == "free_completed":
                layout.release(address)
            elif action.startswith(("segment_map", "segment_unmap")):
                raise SnapshotError("segments that grow (expandable_segments) cannot be followed")
        except KeyError:
            raise SnapshotError(
                f"event {number} of the trace, {action} at {address:#x}, fits no block"
            ) from None
    return History(pair_events(events, before), len(events))


def frame_text(frames: Sequence[dict]) -> str:
    """Returns "file.py:line function" of the innermost Python frame outside PyTorch; "" without
    one.
    """
    for frame in frames:
        name = frame["filename"].replace("\\", "/")
        if name.endswith(".py") and "/torch/" not in name:
            return f"{name.rsplit('/', 1)[-1]}:{frame['line']} {frame['name']}"
    return ""


def read_history(path: Path | str) -> History:
    """Returns the history in a snapshot file, of the device on which most happened, or which has
    most in use.

    Bytes are those requested, since a file does not say what the allocator rounded them to. Without
    a recorded trace the history has no events, only what was in use.

    Raises SnapshotError as `load_snapshot` does.
    """
    snapshot = load_snapshot(path)
    try:
        check_fields(snapshot, {"device_traces": _TRACES})
        traces = dict(enumerate(snapshot["device_traces"]))
        in_use: dict[int, dict[int, int]] = {device: {} for device in traces}
        # What a file writes once and refers to often must not take the time of as many copies.
        seen, texts = set(), {}
        for segment in snapshot["segments"]:
            check_fields(segment, {"address": COUNT, "blocks": LIST, "device?": COUNT})
            address, blocks = segment["address"], segment["blocks"]
            if id(blocks) in seen:
                raise SnapshotError("two segments have the same blocks")
            seen.add(id(blocks))
            of_device = in_use.setdefault(segment.get("device", 0), {})
            for block in blocks:
                check_fields(block, _BLOCK)
                if block["state"] == "active_allocated":
                    of_device[address] = block.get("requested_size", block["size"])
                address += block["size"]
        most = max(
            in_use,
            key=lambda device: (len(traces.get(device, ())), sum(in_use[device].values())),
            default=0,
        )
        events = []
        for entry in traces.get(most, ()):
            check_fields(entry, {"action": TEXT})
            if entry["action"] in ("alloc", "free_requested"):
                check_fields(entry, _EVENT)
                frames = entry.get("frames", ())
                if id(frames) not in texts:
                    check_fields(entry, {"frames?": _FRAMES})
                    texts[id(frames)] = frame_text(frames)
                sign = 1 if entry["action"] == "alloc" else -1
                events.append((entry["addr"], sign * entry["size"], texts[id(frames)]))
        before = in_use_before(events, in_use.get(most, {}))
        history = History(pair_events(events, before), len(events))
        if sum(allocation.num_bytes for allocation in history.allocations) >= 2**63:
            raise SnapshotError("its allocations add up to 2^63 bytes or more")
        return history
    except ValueError as error:
        raise SnapshotError(f"{path}: not an allocator snapshot: {str(error)[:400]}") from None


_SIZE = Kind(
    lambda value: type(value) is int and 0 <= value < MAX_BYTES, f"0 to {MAX_BYTES - 1} bytes"
)
_FRAME = {"filename": str, "line": int, "name": str}
_FRAMES = Kind(
    lambda frames: (
        type(frames) is list
        and all(
            type(frame) is dict
            and all(type(frame.get(name)) is kind for name, kind in _FRAME.items())
            for frame in frames
        )
    ),
    f"a list of frames, each with {', '.join(_FRAME)}",
)
_TRACES = list_of({list}, "a list of traces")
_EVENT = {
    "addr": COUNT,
    "size": Kind(lambda value: _SIZE.fits(value) and value > 0, f"1 to {MAX_BYTES - 1} bytes"),
}
_BLOCK = {"size": _SIZE, "state": TEXT, "requested_size?": _SIZE}


class _PlainUnpickler(pickle._Unpickler):
    """Builds containers, strings and numbers, in time that grows with the file; refuses all else.

    A pickle must name what it executes, and every name goes through `find_class` or
    `persistent_load`. The unpickler is the one written in Python, which reserves nothing for a
    number that a file only claims. Tuples become lists, which cannot be keys: to hash one that
    holds another twice, and so on 60 times, takes for ever.
    """

    dispatch = {**pickle._Unpickler.dispatch, pickle.TUPLE[0]: pickle._Unpickler.load_list}  # noqa: RUF012
    del dispatch[pickle.LONG4[0]]  # a number of millions of digits as a key is hashed with each use

    def load_few(self, count: int) -> None:
        self.stack[-count:] = [self.stack[-count:]]

    dispatch[pickle.TUPLE1[0]] = partial(load_few, count=1)
    dispatch[pickle.TUPLE2[0]] = partial(load_few, count=2)
    dispatch[pickle.TUPLE3[0]] = partial(load_few, count=3)

    def find_class(self, module: str, name: str) -> Any:
        raise SnapshotError(f"it names {module}.{name}, and a snapshot holds no code")

    def persistent_load(self, pid: Any) -> Any:
        raise SnapshotError("it refers to an external object")


def load_snapshot(path: Path | str) -> dict:
    """Returns the snapshot in a file that `torch.cuda.memory._dump_snapshot` wrote; nothing in it
    is executed.

    Raises:
        SnapshotError: the file cannot be read, is not a pickle of containers, strings and numbers
            alone, or not a snapshot; the message names the file and what was found.
    """
    try:
        with open(path, "rb") as file:
            content = _PlainUnpickler(file).load()
    except OSError as error:
        raise SnapshotError(f"{path}: cannot be read ({error.strerror})") from None
    except SnapshotError as error:
        raise SnapshotError(f"{path}: refused: {error}") from None
    except Exception as error:  # a broken pickle raises whatever its opcodes run into
        raise SnapshotError(
            f"{path}: not a readable pickle ({type(error).__name__}: {error})"
        ) from None
    if not isinstance(content, dict):
        raise SnapshotError(f"{path}: not a snapshot but a {type(content).__name__}")
    for key in ("segments", "device_traces"):
        if not isinstance(content.get(key), list):
            found = (
                ", ".join(reprlib.repr(name) for name in content if isinstance(name, str))
                or "nothing"
            )
            raise SnapshotError(f"{path}: not a snapshot: no list {key!r}; found {found}")
    return content
