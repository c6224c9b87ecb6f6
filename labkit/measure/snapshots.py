"""Reads a snapshot file of PyTorch's CUDA allocator without executing anything from it."""

import io
import pickle
import reprlib
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

from labkit.measure.memory import History, SnapshotError, frame_text, in_use_before, pair_events

LIMIT = 2**60
"""No device has an address or an allocation of this size."""


class _PlainUnpickler(pickle._Unpickler):
    """Builds containers, strings and numbers, in time that grows with the file; refuses all else.

    A pickle must name what it executes, and every name goes through `find_class` or
    `persistent_load`. The unpickler is the one written in Python, which reserves nothing for a
    number that a file only claims. Tuples become lists, which cannot be keys: to hash one that
    holds another twice, and so on 60 times, takes for ever.
    """

    dispatch = {**pickle._Unpickler.dispatch, pickle.TUPLE[0]: pickle._Unpickler.load_list}  # noqa: RUF012
    del dispatch[pickle.LONG4[0]]  # a number of millions of digits as a key is hashed with each use

    def load_short_tuple(self, count: int) -> None:
        self.stack[-count:] = [self.stack[-count:]]

    dispatch[pickle.TUPLE1[0]] = partial(load_short_tuple, count=1)
    dispatch[pickle.TUPLE2[0]] = partial(load_short_tuple, count=2)
    dispatch[pickle.TUPLE3[0]] = partial(load_short_tuple, count=3)

    def find_class(self, module: str, name: str) -> Any:
        raise SnapshotError(f"it names {module}.{name}, and a snapshot holds no code")

    def persistent_load(self, pid: Any) -> Any:
        raise SnapshotError("it refers to an external object")


def read_history(path: Path | str) -> History:
    """Returns the history in a file that `torch.cuda.memory._dump_snapshot` wrote, of the device on
    which most happened, or which has most in use. Nothing in the file is executed.

    Bytes are those requested, since a file does not say what the allocator rounded them to. Without
    a recorded trace the history has no events, only what was in use.

    Raises:
        SnapshotError: the file cannot be read, is not a pickle of containers, strings and numbers
            alone, or not a snapshot; the message names the file and what was found.
    """
    try:
        content = Path(path).read_bytes()
        return _history(_PlainUnpickler(io.BytesIO(content)).load())
    except OSError as error:
        raise SnapshotError(f"{path}: cannot be read ({error.strerror})") from None
    except SnapshotError as error:
        raise SnapshotError(f"{path}: refused: {error!s:.400}") from None
    except Exception as error:  # what a broken file runs into, in the unpickler or here
        reason = f"{type(error).__name__}: {error}"
        raise SnapshotError(f"{path}: not an allocator snapshot ({reason:.400})") from None


def _history(snapshot: dict) -> History:
    for name in ("segments", "device_traces"):
        if type(snapshot) is not dict or type(snapshot.get(name)) is not list:
            raise SnapshotError(f"it has no list {name!r}, so it is no allocator snapshot")
    traces = dict(enumerate(snapshot["device_traces"]))
    in_use: dict[int, dict[int, int]] = defaultdict(dict)  # by device: bytes by address
    # What a file writes once and refers to often must not take the time of as many copies.
    seen_blocks = set()
    frame_texts: dict[int, str] = {}
    for segment in snapshot["segments"]:
        blocks = segment["blocks"]
        if id(blocks) in seen_blocks:
            raise SnapshotError("two segments have the same blocks")
        seen_blocks.add(id(blocks))
        device = _number(segment, "device", 0)
        address = _number(segment, "address")
        for block in blocks:
            num_bytes = _number(block, "size")
            if block["state"] == "active_allocated":
                in_use[device][address] = _number(block, "requested_size", num_bytes)
            address += num_bytes

    def weight(device: int) -> tuple[int, int]:
        return len(traces.get(device, ())), sum(in_use[device].values())

    device = max({*traces, *in_use}, key=weight, default=0)
    events = []
    for entry in traces.get(device, ()):
        action = entry["action"]
        if action in ("alloc", "free_requested"):
            frames = entry.get("frames", ())
            if id(frames) not in frame_texts:
                frame_texts[id(frames)] = _checked_frame_text(frames)
            num_bytes = _number(entry, "size")
            if num_bytes == 0:
                raise SnapshotError("an event has the size 0")
            address = _number(entry, "addr")
            sign = 1 if action == "alloc" else -1
            events.append((address, sign * num_bytes, frame_texts[id(frames)]))
    history = History(pair_events(events, in_use_before(events, in_use[device])), len(events))
    if sum(allocation.num_bytes for allocation in history.allocations) >= 2**63:
        raise SnapshotError("its allocations add up to 2^63 bytes or more")
    return history


def _number(entry: dict, name: str, default: int | None = None) -> int:
    value = entry[name] if default is None else entry.get(name, default)
    if type(value) is not int or not 0 <= value < LIMIT:
        raise SnapshotError(f"{name} is {reprlib.repr(value)}; accepted: 0 to {LIMIT - 1}")
    return value


def _checked_frame_text(frames: list[dict]) -> str:
    for frame in frames:
        types = [type(frame[name]) for name in ("filename", "line", "name")]
        if types != [str, int, str]:
            raise SnapshotError("a frame has not the texts filename and name and a number line")
    return frame_text(frames)
