"""Memory as measured and as predicted: bytes in use, histories and their owners, residuals, hostile
files.
"""

import os
import pickle
import random
import struct

import pytest
import torch
from chapters import CPU
from torch import nn

from labkit import accounting
from labkit.configs import ModelConfig
from labkit.experiments import memory as experiment
from labkit.experiments import step as steps
from labkit.measure.memory import (
    BEFORE,
    Allocation,
    History,
    Recorder,
    SnapshotError,
    measure_usage,
    pair_events,
    read_history,
    residuals,
)

MIB = 2**20

SCALARS = 256
"""The loss, its gradient and the optimizer's step counters: a few bytes each, which the closed
forms leave out.
"""


def test_a_history_adds_up_and_its_phases_lie_between_marks():
    events = [(10, 100, "a"), (20, 50, "b"), (10, -100, ""), (10, 30, "c")]
    history = History(pair_events(events, {5: 1000}), 4, marks=[("one", 1), ("two", 3)])
    assert history.totals().tolist() == [1000, 1100, 1150, 1050, 1080]
    assert (history.peak_bytes, history.totals().argmax()) == (1150, 2)
    assert [a.num_bytes for a in history.allocations if a.is_alive(1)] == [1000, 100, 50]
    assert history.phases() == [("one", 1, 3), ("two", 3, 4)]


def test_a_thinned_series_keeps_the_peak_and_adds_up():
    sizes = random.Random(0).sample(range(1, 1000), 500)
    events = [(address, num_bytes, "") for address, num_bytes in enumerate(sizes)]
    events += [(address, -num_bytes, "") for address, num_bytes in enumerate(sizes)]
    history = History(pair_events(events, {}), len(events))
    kept, series = history.series(lambda a: "even" if a.address % 2 == 0 else "odd", 50)
    sums = [even + odd for even, odd in zip(series["even"], series["odd"], strict=True)]
    assert len(kept) <= 50 and max(sums) == history.peak_bytes
    assert sums == history.totals()[kept].tolist()


class Small(nn.Module):
    def __init__(self, device="cpu"):
        super().__init__()
        self.first = nn.Linear(32, 64, bias=False, device=device)
        self.second = nn.Linear(64, 8, bias=False, device=device)

    def forward(self, x):
        return self.second(torch.exp(self.first(x)))


def check_a_small_step(device) -> list[Allocation]:
    """Asserts what a forward and a backward pass allocate; returns what was there before."""
    model, x = Small(device), torch.randn(16, 32, device=device)
    model(x).sum().backward()
    model.zero_grad()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with Recorder(device, [*model.parameters(), x]) as recorder:
        recorder.mark("forward")
        out = model(x).sum()
        recorder.mark("backward")
        out.backward()
    history = recorder.history
    address = model.first.weight.grad.data_ptr()
    (gradient,) = [a for a in history.allocations if a.address == address and a.end is None]
    (forward, begin, middle), (backward, _, end) = history.phases()
    assert (forward, backward) == ("forward", "backward") and end == history.num_events
    assert begin < middle <= gradient.begin
    if device == "cuda":
        assert history.peak_bytes == torch.cuda.memory_stats()["requested_bytes.all.peak"]
    return [a for a in history.allocations if a.begin == BEFORE]


def test_what_a_step_allocates_lies_in_its_phase():
    before = check_a_small_step("cpu")
    assert sorted(a.num_bytes for a in before) == [8 * 64 * 4, 16 * 32 * 4, 32 * 64 * 4]


@pytest.mark.gpu
def test_on_cuda_the_history_peaks_where_the_allocator_does():
    check_a_small_step("cuda")
    used_bytes, _ = measure_usage(
        lambda: torch.empty(1000, dtype=torch.uint8, device="cuda"), "cuda"
    )
    assert used_bytes == 1024


@pytest.mark.gpu
def test_a_snapshot_that_pytorch_dumps_is_read(tmp_path):
    in_use = torch.cuda.memory_stats()["requested_bytes.all.current"]
    torch.cuda.memory._record_memory_history(context="alloc", stacks="python")
    try:
        tensors = [torch.empty(size * MIB, dtype=torch.uint8, device="cuda") for size in (1, 3)]
        del tensors[0]
        tensors.append(torch.empty(2 * MIB, dtype=torch.uint8, device="cuda"))
        torch.cuda.memory._dump_snapshot(str(tmp_path / "snapshot.pickle"))
    finally:
        torch.cuda.memory._record_memory_history(None)
    assert read_history(tmp_path / "snapshot.pickle").peak_bytes == in_use + 5 * MIB


def test_residuals_know_their_operator_and_their_module():
    model, x = Small(), torch.randn(16, 32, requires_grad=True)
    kept = residuals(lambda: model(x), list(model.parameters()), is_compiled=False)
    assert [(r.operator, r.module, r.is_resident) for r in kept] == [
        ("linear", "first", True),
        ("linear", "first", False),
        ("exp", "", False),
        ("linear", "second", True),
        ("linear", "second", False),
    ]
    assert not kept[-1].is_new, "the input of the second matrix is the exponential, kept once"


# One in which the scores weigh most, one the feed-forward part, one the logits; batch and context.
SHAPES = {
    "scores": (ModelConfig("scores", 64, 128, 3, 4, vocab_size=50), 3, 200),
    "feed-forward": (ModelConfig("feed-forward", 64, 1024, 3, 4, vocab_size=50), 3, 40),
    "logits": (ModelConfig("logits", 64, 128, 3, 4, vocab_size=3000), 3, 40),
    "four blocks": (ModelConfig("four blocks", 64, 128, 4, 4, vocab_size=50), 2, 128),
}


@pytest.fixture
def workload(monkeypatch):
    """Returns a function that makes a workload of a shape."""
    monkeypatch.setattr(steps, "model_config", lambda name: SHAPES[name][0])

    def make(shape, plan="none"):
        _, batch, context = SHAPES[shape]
        parameters = steps.step_parameters(shape, context, "fp32")
        return steps.Step(CPU, parameters | {"batch": batch, "plan": plan})

    return make


def peak_bytes(workload, phase: str) -> int:
    """Returns the most in use in a phase that is like all later ones."""
    if phase == "train_step":
        workload.train_step()
        workload.model.zero_grad()
    resident = sum(x.untyped_storage().nbytes() for x in experiment.resident(workload))
    return resident + measure_usage(getattr(workload, phase), "cpu")[0]


@pytest.mark.parametrize("phase", ["forward", "train_step"])
@pytest.mark.parametrize("shape", ["scores", "feed-forward", "logits"])
def test_peaks_are_predicted_to_the_byte(workload, shape, phase):
    known = {"precision": "fp32", "attention": "eager", "device_kind": "cpu"}
    predicted = max(accounting.peak_moments(*SHAPES[shape], phase, **known).values())
    assert 0 <= peak_bytes(workload(shape), phase) - predicted < SCALARS


@pytest.mark.parametrize("plan", ["1", "3", "4/2/1"])
def test_recomputed_steps_peak_where_predicted_and_change_no_gradient(workload, plan):
    recomputing, plain = workload("four blocks", plan=plan), workload("four blocks")
    forwards = []
    for block in recomputing.model.blocks:
        block.register_forward_pre_hook(lambda *_: forwards.append(1))
    assert recomputing.forward_backward() == plain.forward_backward()
    both = zip(recomputing.model.parameters(), plain.model.parameters(), strict=True)
    assert all(torch.equal(p.grad, other.grad) for p, other in both)
    assert len(forwards) / 4 == accounting.checkpoint_forwards(4, recomputing.plan)
    recomputing.model.zero_grad()
    known = {"precision": "fp32", "device_kind": "cpu", "plan": recomputing.plan}
    moments = accounting.peak_moments(*SHAPES["four blocks"], "train_step", **known)
    measured = peak_bytes(recomputing, "train_step")
    assert 0 <= measured - max(moments.values()) < SCALARS


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("2/4", "unknown plan '2/4'"),
        ("9", "plan '9' groups 9 blocks; the model has 8"),
    ],
)
def test_a_plan_that_is_none_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        accounting.checkpoint_plan(text, 8)


class Payload:
    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def test_nothing_in_a_hostile_file_runs(tmp_path):
    canary, path = tmp_path / "canary", tmp_path / "snapshot.pickle"
    payload, name = Payload(os.mkdir, str(canary)), str(canary).encode()
    contents = {
        "reduce": pickle.dumps(payload),
        "old global": b"cos\nmkdir\n(S'" + name + b"'\ntR.",
        "inst": b"(S'" + name + b"'\nios\nmkdir\n.",
        "deep": pickle.dumps({"segments": [{"blocks": [payload]}], "device_traces": []}),
    }
    for name, content in contents.items():
        path.write_bytes(content)
        with pytest.raises(
            SnapshotError, match=r"snapshot\.pickle: refused: it names \w+\.\w+, and"
        ):
            read_history(path)
        assert not canary.exists(), name
    pickle.loads(contents["old global"])
    assert canary.exists(), "the files are not hostile at all"


def snapshot(*events, segments=()) -> bytes:
    """Returns a snapshot with these (action, address, bytes)."""
    trace = [dict(zip(("action", "addr", "size"), event, strict=True)) for event in events]
    return pickle.dumps({"segments": [*segments], "device_traces": [trace]})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x80\x05P1\n.", "persistent"),
        (b"hello", "not an allocator snapshot"),
        # What does not add up.
        (snapshot(("alloc", 1, 2**80)), "not an allocator snapshot"),
        (snapshot(("alloc", 1, 2), ("alloc", 1, 2)), "where 2 are in use"),
        # Small files that claim much.
        (b"\x80\x05\x8e" + struct.pack("<Q", 2**60) + b"x.", "not an allocator snapshot"),
    ],
)
def test_what_is_no_snapshot_is_refused_by_name(tmp_path, content, message):
    path = tmp_path / "mine.pickle"
    path.write_bytes(content)
    with pytest.raises(SnapshotError, match=rf"mine\.pickle: .*{message}"):
        read_history(path)


USED = {"size": 1024, "requested_size": 1000, "state": "active_allocated"}


def test_what_was_in_use_before_a_trace_is_told_from_its_end(tmp_path):
    free = {"size": 0, "state": "inactive"}
    segments = [{"address": 0, "segment_pool_id": (0, 0), "blocks": [USED, free]}]
    trace = [("free_requested", 1024, 400), ("alloc", 2048, 50), ("free_requested", 2048, 50)]
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(snapshot(*trace, segments=segments))
    assert read_history(path).totals().tolist() == [1400, 1000, 1050, 1000]
