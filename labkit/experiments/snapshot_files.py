"""Snapshots of memory as a reader may be given them: genuine, hostile and broken, and whether reading them is safe."""

import io
import pickle
import tempfile
from pathlib import Path
from typing import Any

import torch

from labkit import hardware
from labkit.experiments.sections import empty_cache
from labkit.experiments.sweep import Case, Measured
from labkit.measure.snapshots import SnapshotError, read_history

SNAPSHOT_FILES = ("genuine", "calls a function", "names a class", "refers outside", "another pickle", "cut off", "text")


class _Call:
    """Pickled as a call that would leave a file behind."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


class _Persistent(pickle.Pickler):
    """Writes every string as a reference to something outside the file."""

    def persistent_id(self, obj: Any) -> str | None:
        return obj if isinstance(obj, str) else None


def measure_snapshot(device: hardware.Device, case: Case, phase: str) -> Measured:
    """Writes a file of the asked kind, genuine or hostile, and loads it as a path that a reader gives."""
    name = case.parameters["file"]
    with tempfile.TemporaryDirectory() as folder:
        path, canary = Path(folder) / "snapshot.pickle", Path(folder) / "executed"
        expected = None
        if name == "genuine":
            expected = write_genuine(device, path)
        else:
            path.write_bytes(_bad_file(name, canary))
        metrics: dict[str, int | None] = {"accepted": 1, "expected_peak_bytes": expected}
        message = ""
        try:
            metrics["peak_bytes"] = read_history(path).peak_bytes
        except SnapshotError as error:
            metrics["accepted"], message = 0, str(error).replace(str(path), path.name).replace(folder, "…")
        metrics["executed"] = int(canary.exists())
    return Measured(metrics=metrics, case={"file": name}, observed={"message": message})


def _bad_file(name: str, canary: Path) -> bytes:
    """Returns the content of a file that must not be read; `canary` is the file that one of them would leave."""
    plain = {"segments": [], "device_traces": [[]]}
    persistent = io.BytesIO()
    _Persistent(persistent).dump(plain)
    return {
        "calls a function": pickle.dumps({**plain, "extra": _Call(canary)}),
        "names a class": pickle.dumps({**plain, "extra": Path("somewhere")}),
        "refers outside": persistent.getvalue(),
        "another pickle": pickle.dumps({"weights": [1.0, 2.0]}),
        "cut off": pickle.dumps({**plain, "extra": list(range(1000))})[:-100],
        "text": b"{'segments': []}\n",
    }[name]


def write_genuine(device: hardware.Device, path: Path) -> int:
    """Writes a snapshot as PyTorch dumps it; without CUDA, which alone has them, one put together here.

    Three tensors, of which two live at once.
    """
    sizes = (2**20, 3 * 2**20, 2**21)
    if device.kind != "cuda":
        actions = (("alloc", 0), ("alloc", 1), ("free_requested", 0), ("free_completed", 0), ("alloc", 2))
        frames = [{"filename": "/somewhere/made_up.py", "line": 1, "name": "no_device"}]
        trace = [
            {"action": action, "addr": 2**24 * number, "size": sizes[number], "stream": 0, "frames": frames}
            for action, number in actions
        ]
        blocks = [{"size": sizes[number], "requested_size": sizes[number], "state": "active_allocated"}
                  for number in (1, 2)]  # fmt: skip
        segments = [
            {"device": 0, "address": 2**24 * number, "total_size": block["size"], "blocks": [block]}
            for number, block in zip((1, 2), blocks, strict=True)
        ]
        path.write_bytes(pickle.dumps({"segments": segments, "device_traces": [trace]}))
        return sizes[1] + sizes[2]
    empty_cache(device)
    in_use = torch.cuda.memory_stats()["requested_bytes.all.current"]
    torch.cuda.memory._record_memory_history(None)
    torch.cuda.memory._record_memory_history(context="alloc", stacks="python")
    try:
        first, second = (torch.empty(size, dtype=torch.uint8, device="cuda") for size in sizes[:2])
        del first
        third = torch.empty(sizes[2], dtype=torch.uint8, device="cuda")
        torch.cuda.memory._dump_snapshot(str(path))
        del second, third
    finally:
        torch.cuda.memory._record_memory_history(None)
    return in_use + sizes[1] + sizes[2]
