"""Memory as measured and as predicted: bytes in use, histories and their owners, residuals, hostile
files.
"""

import math
import os
import pickle
import random
import struct
import time

import pytest
import torch
from chapters import CPU
from torch import nn

from labkit import accounting
from labkit.configs import FIGURES, MEMORY, ModelConfig, model_config
from labkit.experiments import memory as experiment
from labkit.experiments import step as steps
from labkit.measure import snapshots
from labkit.measure.memory import (
    OwnerLog,
    Recorder,
    measure_usage,
    packed_bytes,
    residuals,
    saved_bytes,
)
from labkit.measure.snapshots import (
    BEFORE,
    Allocation,
    History,
    SnapshotError,
    history_since,
    pair_events,
)
from labkit.models.transformer import RMSNorm, TransformerLM, language_model_loss
from labkit.records import RecordStore, newest

MIB = 2**20

SCALARS = 256
"""The loss, its gradient and the optimizer's step counters: a few bytes each, which the closed
forms leave out.
"""


@pytest.fixture(autouse=True)
def one_thread():
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def test_a_history_adds_up():
    history = History(
        pair_events([(10, 100, "a"), (20, 50, "b"), (10, -100, ""), (10, 30, "c")], {5: 1000}), 4
    )
    assert history.totals().tolist() == [1000, 1100, 1150, 1050, 1080]
    assert (history.peak_bytes, history.peak_position) == (1150, 1)
    assert [a.num_bytes for a in history.allocations if a.is_alive(1)] == [1000, 100, 50]
    assert [a.num_bytes for a in history.allocations if a.is_alive(3)] == [1000, 50, 30]
    assert Allocation(10, 100, 0, 2, "a") in history.allocations


def test_phases_lie_between_marks():
    history = History(
        pair_events([(n, 1, "") for n in range(6)], {}), 6, marks=[("one", 1), ("two", 4)]
    )
    assert history.phases() == [("one", 1, 4), ("two", 4, 6)]
    assert [history.phase_at(n) for n in (BEFORE, 0, 1, 3, 4, 5)] == [
        "before",
        "before",
        "one",
        "one",
        "two",
        "two",
    ]


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([(1, 8, ""), (1, 8, "")], "allocates 0x1, which is in use"),
        ([(1, -8, "")], "frees 0x1, which is not in use"),
    ],
)
def test_events_that_contradict_one_another_are_refused(events, message):
    with pytest.raises(SnapshotError, match=message):
        pair_events(events, {})


def test_a_thinned_series_keeps_the_peak_and_adds_up():
    generator = random.Random(0)
    events, alive = [], []
    sizes = [generator.randint(1, 1000) for _ in range(3000)]
    for address, num_bytes in enumerate(sizes):
        events.append((address, num_bytes, ""))
        alive.append(address)
        if generator.random() < 0.6:
            gone = alive.pop(generator.randrange(len(alive)))
            events.append((gone, -sizes[gone], ""))
    history = History(pair_events(events, {}), len(events))
    kept, series = history.series(
        lambda allocation: "even" if allocation.address % 2 == 0 else "odd", 50
    )
    assert len(kept) == len(series["even"]) == len(series["odd"]) <= 50
    sums = [even + odd for even, odd in zip(series["even"], series["odd"], strict=True)]
    assert max(sums) == history.peak_bytes and kept == sorted(set(kept))
    assert sums == history.totals()[kept].tolist()


class CachingAllocator:
    """A caching allocator as its documentation describes it, with a trace of requests alone.

    Best fit among free blocks of the pool; segments of 2 MiB for up to 1 MiB, of 20 MiB for up to
    10 MiB, of multiples of 2 MiB above; a block is cut if 512 bytes are left of it in a small
    segment, more than 1 MiB in a large one.
    """

    def __init__(self):
        self.blocks, self.segments, self.trace = (
            [],
            {},
            [],
        )  # a block is [address, bytes, segment, is free]
        self.next_address, self.in_use, self.peak = 2**30, 0, 0

    def segment_list(self):
        blocks = {segment: [] for segment in self.segments}
        for _, size, segment, is_free in sorted(self.blocks):
            blocks[segment].append(
                {"size": size, "state": "inactive" if is_free else "active_allocated"}
            )
        return [
            {"address": x, "total_size": size, "blocks": blocks[x]}
            for x, size in self.segments.items()
        ]

    def _note(self, action, address, size):
        self.trace.append({"action": action, "addr": address, "size": size})

    def malloc(self, asked):
        size = max(512, (asked + 511) // 512 * 512)
        is_small = size <= MIB
        free = [
            b
            for b in self.blocks
            if b[3] and b[1] >= size and (self.segments[b[2]] == 2 * MIB) == is_small
        ]
        if free:
            block = min(free, key=lambda b: (b[1], b[0]))
        else:
            segment = (
                2 * MIB
                if is_small
                else 20 * MIB
                if size < 10 * MIB
                else -(-size // (2 * MIB)) * 2 * MIB
            )
            block = [self.next_address, segment, self.next_address, True]
            self.segments[self.next_address] = segment
            self._note("segment_alloc", self.next_address, segment)
            self.blocks.append(block)
            self.next_address += segment + (0 if random.Random(size).random() < 0.5 else 2 * MIB)
        left = block[1] - size
        if left >= 512 if is_small else left > MIB:
            self.blocks.append([block[0] + size, left, block[2], True])
            block[1] = size
        block[3] = False
        self.in_use += block[1]
        self.peak = max(self.peak, self.in_use)
        self._note("alloc", block[0], asked)
        return block, asked

    def free(self, given):
        block, asked = given
        self._note("free_requested", block[0], asked)
        self._note("free_completed", block[0], asked)
        self.in_use -= block[1]
        block[3] = True
        for other in list(self.blocks):  # join neighbours in the segment
            low, high = sorted((block, other))
            if (
                other is not block
                and other[3]
                and other[2] == block[2]
                and low[0] + low[1] == high[0]
            ):
                self.blocks.remove(other)
                block[0], block[1] = low[0], low[1] + high[1]

    def empty_cache(self):
        for block in [b for b in self.blocks if b[3] and b[1] == self.segments[b[2]]]:
            self._note("segment_free", block[0], block[1])
            self.blocks.remove(block)
            del self.segments[block[2]]


@pytest.mark.parametrize("seed", range(8))
def test_cutting_and_joining_of_blocks_is_followed_to_the_byte(seed):
    """A trace has the bytes asked for; the allocator counts those of the blocks that it gave."""
    generator = random.Random(seed)
    sizes = [
        1,
        511,
        512,
        513,
        300_000,
        MIB - 5,
        MIB,
        MIB + 1,
        3 * MIB,
        9 * MIB,
        10 * MIB,
        25 * MIB,
        26 * MIB + 7,
    ]
    allocator, alive = CachingAllocator(), []

    def run(num_steps):
        for _ in range(num_steps):
            if alive and generator.random() < 0.47:
                allocator.free(alive.pop(generator.randrange(len(alive))))
            else:
                alive.append(
                    allocator.malloc(max(1, generator.choice(sizes) - generator.randint(0, 3)))
                )
            if generator.random() < 0.02:
                allocator.empty_cache()

    run(150)
    segments, first = allocator.segment_list(), len(allocator.trace)
    allocator.peak = allocator.in_use
    run(400)
    history = history_since(segments, allocator.trace[first:])
    assert history.peak_bytes == allocator.peak
    assert history.totals()[-1] == allocator.in_use
    asked = sum(size for _, size in alive)
    assert asked < allocator.in_use, "nothing was rounded up: the test shows nothing"


@pytest.mark.parametrize(
    ("action", "message"),
    [
        ("alloc", "event 0 of the trace, alloc at 0x10, fits no block"),
        ("segment_map", "expandable_segments"),
    ],
)
def test_a_trace_that_does_not_fit_its_segments_is_refused(action, message):
    with pytest.raises(SnapshotError, match=message):
        history_since([], [{"action": action, "addr": 16, "size": 1}])


def test_the_frame_is_the_innermost_outside_pytorch():
    frames = [
        {"filename": "/x/site-packages/torch/nn/functional.py", "line": 1, "name": "linear"},
        {"filename": "/x/project/model.py", "line": 7, "name": "forward"},
        {"filename": "/x/project/train.py", "line": 9, "name": "main"},
    ]
    assert snapshots.frame_text(frames) == "model.py:7 forward"
    assert snapshots.frame_text([{"filename": "??", "line": 0, "name": "start"}]) == ""


def test_usage_is_the_peak_and_what_stays():
    def work():
        scratch = torch.empty(1000, dtype=torch.uint8)
        kept = torch.empty(300, dtype=torch.uint8)
        del scratch
        return kept, torch.empty(100, dtype=torch.uint8)

    usage = measure_usage(work, "cpu")
    assert (usage.peak_bytes, usage.kept_bytes, usage.requested_bytes) == (1300, 400, 400)
    kept, _ = usage.result
    assert kept.shape == (300,)


def test_freeing_what_was_made_in_an_earlier_recording_is_negative():
    made = measure_usage(lambda: [torch.empty(500, dtype=torch.uint8)], "cpu").result
    usage = measure_usage(made.clear, "cpu")
    assert (usage.peak_bytes, usage.kept_bytes, usage.requested_bytes) == (0, -500, -500)


def test_a_device_whose_allocations_are_not_recorded_is_refused():
    with pytest.raises(
        ValueError, match="memory of device 'abacus' cannot be recorded; accepted: cuda, cpu"
    ):
        measure_usage(lambda: None, "abacus")


class Small(nn.Module):
    def __init__(self, device="cpu"):
        super().__init__()
        self.first = nn.Linear(32, 64, bias=False, device=device)
        self.second = nn.Linear(64, 8, bias=False, device=device)

    def forward(self, x):
        return self.second(torch.exp(self.first(x)))


def recorded_small(device):
    """Returns a recorded forward and backward pass of a small model, the owner of each event, and
    the model.
    """
    model, x = Small(device), torch.randn(16, 32, device=device)
    model(x).sum().backward()
    model.zero_grad()
    with Recorder(device, [*model.parameters(), x]) as recorder:
        log = OwnerLog(recorder, model)
        with log:
            recorder.mark("forward")
            out = model(x).sum()
            recorder.mark("backward")
            out.backward()
        log.close()
    return recorder.history, log.owners(), model


def check_small(history, owners, model):
    made = [a for a in history.allocations if a.begin != BEFORE]
    gradient = model.first.weight.grad.data_ptr()
    (of_gradient,) = [a for a in made if a.address == gradient and a.end is None]
    owner = owners[of_gradient.begin]
    assert history.phase_at(of_gradient.begin) == "backward"
    assert (owner.operator, owner.module) == ("aten.mm", "first")
    assert owner.frame.startswith("test_memory.py:") and owner.frame.endswith(" forward")
    assert owner.code == "return self.second(torch.exp(self.first(x)))"
    exponentials = [a for a in made if owners[a.begin].operator == "aten.exp"]
    assert [(owners[a.begin].module, history.phase_at(a.begin)) for a in exponentials] == [
        ("", "forward")
    ]
    assert {name for name, _, _ in history.phases()} == {"forward", "backward"}
    assert history.peak_bytes == history.reported_peak_bytes
    assert not model._forward_hooks and not model.first._forward_pre_hooks


def test_each_allocation_has_its_phase_operator_module_and_line():
    history, owners, model = recorded_small("cpu")
    check_small(history, owners, model)
    resident = [a.num_bytes for a in history.allocations if a.begin == BEFORE]
    assert sorted(resident) == [8 * 64 * 4, 16 * 32 * 4, 32 * 64 * 4]
    largest = {
        (owners[a.begin].module, a.num_bytes) for a in history.allocations if a.begin != BEFORE
    }
    assert ("first", 16 * 64 * 4) in largest and ("second", 16 * 8 * 4) in largest


@pytest.mark.gpu
def test_on_cuda_the_history_peaks_where_the_allocator_does():
    check_small(*recorded_small("cuda"))
    generator = random.Random(0)
    held = [
        torch.empty(generator.randint(1, 40 * MIB), dtype=torch.uint8, device="cuda")
        for _ in range(10)
    ]
    with Recorder("cuda") as recorder:
        for _ in range(300):
            if held and generator.random() < 0.5:
                held.pop(generator.randrange(len(held)))
            else:
                size = generator.choice((100, 10**5, 2 * 10**6, 3 * 10**7)) + generator.randint(
                    0, 10**4
                )
                held.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
    assert recorder.history.peak_bytes == recorder.history.reported_peak_bytes
    assert recorder.history.totals()[-1] == torch.cuda.memory_allocated()


@pytest.mark.gpu
def test_on_cuda_what_was_asked_for_is_told_from_the_blocks_given():
    usage = measure_usage(
        lambda: [torch.empty(1000, dtype=torch.uint8, device="cuda") for _ in range(3)], "cuda"
    )
    assert (usage.requested_bytes, usage.kept_bytes) == (3 * 1000, 3 * 1024)


@pytest.mark.gpu
def test_a_snapshot_that_pytorch_dumps_is_read(tmp_path):
    in_use = torch.cuda.memory_stats()["requested_bytes.all.current"]
    torch.cuda.memory._record_memory_history(context="alloc", stacks="python")
    try:
        first, second = (
            torch.empty(size * MIB, dtype=torch.uint8, device="cuda") for size in (1, 3)
        )
        del first
        third = torch.empty(2 * MIB, dtype=torch.uint8, device="cuda")
        torch.cuda.memory._dump_snapshot(str(tmp_path / "snapshot.pickle"))
        del second, third
    finally:
        torch.cuda.memory._record_memory_history(None)
    assert snapshots.read_history(tmp_path / "snapshot.pickle").peak_bytes == in_use + 5 * MIB


def test_an_rms_norm_keeps_six_residuals_four_of_them_distinct():
    norm, x = RMSNorm(8), torch.randn(2, 3, 8, requires_grad=True)
    found, out = residuals(lambda: norm(x), norm, list(norm.parameters()), is_compiled=False)
    assert [residual.operator for residual in found] == ["pow", "rsqrt", "mul", "mul", "mul", "mul"]
    assert (
        sum(residual.is_new for residual in found) == 4
        and sum(residual.is_resident for residual in found) == 1
    )
    assert saved_bytes(found) == 4 * (
        2 * 48 + 6
    )  # the input, its normalised value, one number a token
    assert packed_bytes(found) == 4 * (3 * 48 + 2 * 6)
    assert out.requires_grad


def test_residuals_know_their_module():
    model = Small()
    x = torch.randn(16, 32, requires_grad=True)
    found, _ = residuals(lambda: model(x), model, list(model.parameters()), is_compiled=False)
    assert [(r.operator, r.module, r.is_resident) for r in found] == [
        ("linear", "first", True),
        ("linear", "first", False),
        ("exp", "", False),
        ("linear", "second", True),
        ("linear", "second", False),
    ]
    assert not found[-1].is_new, "the input of the second matrix is the exponential, kept once"


# One in which the scores weigh most, one the feed-forward part, one the logits.
SHAPES = {
    "scores": (ModelConfig("scores", "test", 64, 128, 3, 4, vocab_size=50), 3, 200),
    "feed-forward": (ModelConfig("feed-forward", "test", 64, 1024, 3, 4, vocab_size=50), 3, 40),
    "logits": (ModelConfig("logits", "test", 64, 128, 3, 4, vocab_size=3000), 3, 40),
}


@pytest.fixture
def device_kind(request, monkeypatch):
    """Autocast on CUDA computes softmax in fp32, on the CPU in bf16."""
    softmax = torch.softmax
    if request.param == "cuda":
        monkeypatch.setattr(torch, "softmax", lambda x, dim: softmax(x.float(), dim=dim))
    return request.param


class Step:
    """A model with its phases."""

    def __init__(self, shape, precision="fp32", attention="eager", device_kind="cpu"):
        self.config, self.batch, self.context = SHAPES[shape]
        torch.manual_seed(0)
        self.model = TransformerLM(self.config, max_context=self.context, attention=attention)
        size = (self.batch, self.context)
        self.tokens, self.targets = (torch.randint(self.config.vocab_size, size) for _ in range(2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        self.precision = precision
        kind = "eager" if attention == "eager" else "fused"
        self.known = {"precision": precision, "attention": kind, "device_kind": device_kind}

    def forward(self):
        with torch.autocast("cpu", torch.bfloat16, enabled=self.precision == "bf16"):
            return language_model_loss(self.model(self.tokens), self.targets)

    def inference(self):
        with (
            torch.no_grad(),
            torch.autocast("cpu", torch.bfloat16, enabled=self.precision == "bf16"),
        ):
            self.model(self.tokens)

    def train_step(self):
        self.forward().backward()
        self.optimizer.step()

    def resident_bytes(self, phase):
        num_bytes = accounting.parameter_bytes(self.config) + accounting.input_bytes(
            self.batch, self.context
        )
        num_bytes += accounting.rotary_table_bytes(self.config, self.context)
        return num_bytes + (
            accounting.optimizer_state_bytes(self.config) if phase == "train_step" else 0
        )

    def peak(self, phase):
        if phase == "train_step":
            self.train_step()
            self.model.zero_grad()
        return measure_usage(getattr(self, phase), "cpu").peak_bytes + self.resident_bytes(phase)

    def moments(self, phase):
        return accounting.peak_moments(self.config, self.batch, self.context, phase, **self.known)


@pytest.mark.parametrize("phase", ["inference", "forward", "train_step"])
@pytest.mark.parametrize(
    ("shape", "precision", "device_kind"),
    # bf16 where the scores weigh most: a CPU without bf16 of its own has scratch space in large
    # products.
    [*((shape, "fp32", "cpu") for shape in SHAPES), ("scores", "bf16", "cuda")],
    indirect=["device_kind"],
)
def test_peaks_are_predicted_to_the_byte(shape, precision, device_kind, phase):
    step = Step(shape, precision, device_kind=device_kind)
    peak = step.peak(phase)
    if (phase, device_kind) == ("train_step", "cuda"):
        peak += (
            4 * step.batch * step.config.num_heads * step.context**2
        )  # one matrix of scores more
    assert 0 <= peak - max(step.moments(phase).values()) < SCALARS


def test_every_moment_is_somewhere_the_peak():
    found = {
        (phase, max(m, key=m.get))
        for shape in SHAPES
        for phase in ("inference", "forward", "train_step")
        for m in [Step(shape).moments(phase)]
    }
    assert found == {
        ("inference", "attention, last block"),
        ("inference", "feed-forward, last block"),
        ("inference", "logits"),
        ("forward", "attention, last block"),
        ("forward", "loss"),
        ("train_step", "backward: attention, last block"),
        ("train_step", "backward: feed-forward, last block"),
        ("train_step", "backward: loss"),
    }


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("precision", "attention", "device_kind"),
    [
        *(
            (precision, attention, "cpu")
            for precision in ("fp32", "bf16")
            for attention in ("eager", "sdpa_flash")
        ),
        ("bf16", "eager", "cuda"),
    ],
    indirect=["device_kind"],
)
def test_activation_bytes_are_what_autograd_keeps(shape, precision, attention, device_kind):
    """The distinct storages, parameters left out."""
    step = Step(shape, precision, attention, device_kind)
    found, _ = residuals(step.forward, step.model, list(step.model.parameters()), is_compiled=False)
    predicted = accounting.activation_bytes(step.config, step.batch, step.context, **step.known)
    assert saved_bytes(found) == predicted


def test_on_an_h200_the_peaks_of_notebook_01_are_predicted():
    """Within 3 %, and 96 MiB of workspaces, which notebook 01 counts in."""
    path = FIGURES / "nvidia-h200" / "records" / "01_benchmarking.jsonl"
    compared = 0
    for record in newest(RecordStore(path).load()):
        case = record.case
        if record.section != "steps" or record.status != "ok" or case["precision"] == "tf32":
            continue
        if record.phase in ("inference", "forward", "train_step"):
            predicted = accounting.peak_bytes(
                model_config(case["size"]),
                case["batch"],
                case["context"],
                record.phase,
                precision=case["precision"],
                attention="eager",
                device_kind="cuda",
            )
            assert abs(record.metrics["peak_bytes"] - predicted) <= 0.03 * predicted + 96 * MIB, (
                record.case
            )
            compared += 1
    assert compared > 90


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"precision": "fp8"}, "unknown precision 'fp8'; accepted: fp32, tf32, bf16"),
        ({"attention": "magic"}, "unknown attention 'magic'; accepted: eager, fused"),
        ({"device_kind": "abacus"}, "unknown kind of device 'abacus'; accepted: cuda, cpu, mps"),
        (
            {"phase": "sideways"},
            "unknown phase 'sideways'; accepted: inference, forward, train_step",
        ),
    ],
)
def test_what_the_accounting_does_not_know_is_refused(changed, message):
    known = {"precision": "fp32", "attention": "eager", "device_kind": "cpu"} | changed
    with pytest.raises(ValueError, match=message):
        accounting.peak_moments(SHAPES["scores"][0], 1, 8, known.pop("phase", "forward"), **known)


FOUR_BLOCKS = ModelConfig("four blocks", "test", 64, 128, 4, 4, vocab_size=50)


@pytest.fixture
def workload(monkeypatch):
    """Returns a function that makes a workload of four small blocks with a plan of
    recomputation.
    """
    monkeypatch.setattr(steps, "model_config", lambda name: FOUR_BLOCKS)
    parameters = {
        "size": "",
        "context": 128,
        "batch": 2,
        "precision": "fp32",
        "compile": "none",
        "attention": "eager",
    }
    return lambda plan: steps.Step(CPU, parameters | {"plan": plan})


@pytest.mark.parametrize("plan", ["1", "3", "4", "4/2", "4/2/1"])
def test_recomputed_steps_peak_where_predicted_and_change_no_gradient(workload, plan):
    recomputing = workload(plan)
    assert experiment.gradient_difference(recomputing) == 0
    assert experiment.count_block_forwards(recomputing) == accounting.checkpoint_forwards(
        4, recomputing.plan
    )
    recomputing.model.zero_grad()
    resident = sum(x.untyped_storage().nbytes() for x in experiment.resident(recomputing))
    measured = resident + measure_usage(recomputing.train_step, "cpu").peak_bytes
    known = {"precision": "fp32", "attention": "eager", "device_kind": "cpu"}
    moments = accounting.checkpoint_moments(FOUR_BLOCKS, 2, 128, recomputing.plan, **known)
    assert 0 <= measured - max(moments.values()) < SCALARS


def test_a_gradient_that_recomputing_changes_gives_no_time(workload, monkeypatch):
    recomputing = workload("2")
    plain = steps.run_blocks

    def scaled(blocks, x, rotary, plan):
        return plain(blocks, x, rotary, plan) * (2.0 if plan else 1.0)

    monkeypatch.setattr(steps, "run_blocks", scaled)
    with pytest.raises(
        AssertionError, match=r"gradients differ by .* from those without recomputation"
    ):
        experiment.gradient_difference(recomputing)


def test_blocks_that_do_not_run_as_planned_are_not_the_case(workload):
    recomputing = workload("4")
    assert experiment.plan_text(recomputing, 2.0) == "4"
    assert experiment.plan_text(recomputing, 1.0) == "4, but each block ran 1 times"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0", "unknown plan '0'"),
        ("2/4", "unknown plan '2/4'"),
        ("all", "unknown plan 'all'; accepted: 'none'"),
        ("4/4", "unknown plan"),
        ("", "unknown plan ''"),
        ("9", "plan '9' groups 9 blocks; the model has 8"),
    ],
)
def test_a_plan_that_is_none_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        accounting.checkpoint_plan(text, 8)


def test_every_plan_of_the_grids_can_be_run():
    for grid in MEMORY.values():
        for plans in grid.checkpoint_plans.values():
            for plan in plans:
                accounting.checkpoint_plan(plan, model_config(grid.checkpointed[0]).num_layers)


class Payload:
    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def hostile(canary):
    """Yields pickles that would leave `canary` behind, by every way that a pickle has of naming
    code.
    """
    path = str(canary)
    yield "reduce", pickle.dumps(Payload(os.mkdir, path))
    yield "old global", b"cos\nmkdir\n(S'" + path.encode() + b"'\ntR."
    yield "inst", b"(S'" + path.encode() + b"'\nios\nmkdir\n."
    yield "obj", b"(cos\nmkdir\nS'" + path.encode() + b"'\no."
    name = path.encode()
    text = b"\x8c" + bytes([len(name)]) + name
    yield "stack global", b"\x80\x04\x8c\x02os\x8c\x05mkdir\x93" + text + b"\x85R."
    yield "builtin", pickle.dumps(Payload(exec, f"import os; os.mkdir({path!r})"))
    yield (
        "deep",
        pickle.dumps({"segments": [{"blocks": [Payload(os.mkdir, path)]}], "device_traces": []}),
    )
    yield "in a key", pickle.dumps({("a", 1): Payload(os.mkdir, path)})


def test_nothing_in_a_hostile_file_runs(tmp_path):
    canary, path = tmp_path / "canary", tmp_path / "snapshot.pickle"
    kinds = 0
    for name, content in hostile(canary):
        path.write_bytes(content)
        with pytest.raises(
            SnapshotError, match=r"snapshot\.pickle: refused: it names \w+\.\w+, and"
        ) as raised:
            snapshots.load_snapshot(path)
        assert str(path) in str(raised.value), name
        assert not canary.exists(), name
        kinds += 1
    assert kinds == 8
    pickle.loads(next(content for name, content in hostile(canary) if name == "old global"))
    assert canary.exists(), "the files are not hostile at all"


def traced(*events, segments=()) -> bytes:
    """Returns a snapshot of one device with these (action, address, bytes)."""
    trace = [dict(zip(("action", "addr", "size"), event, strict=False)) for event in events]
    return pickle.dumps({"segments": [*segments], "device_traces": [trace]})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        # Registered, persistent and outside objects.
        *(
            (b"\x80\x05" + code, "")
            for code in (b"\x82\x01.", b"\x83\x01\x00.", b"\x84\x01\x00\x00\x00.", b"P1\n.")
        ),
        (b"\x80\x05\x97.", ""),
        (b"", "not a readable pickle"),
        (b"hello", "not a readable pickle"),
        (b"\x80\x05\x8e" + struct.pack("<Q", 2**60) + b"x.", "not a readable pickle"),
        (pickle.dumps([1, 2]), "not a snapshot but a list"),
        (pickle.dumps({"a": 1, "b": 2}), "no list 'segments'; found 'a', 'b'"),
        (pickle.dumps({"segments": []}), "no list 'device_traces'"),
        (pickle.dumps({"segments": {}, "device_traces": []}), "no list 'segments'"),
        # What does not add up.
        (pickle.dumps({"segments": [], "device_traces": [3]}), ""),
        *(
            (traced(("alloc", *rest)), "")
            for rest in ((), (1, 2**80), (1, math.nan), (1, -2), (math.nan, 2))
        ),
        (traced(("alloc", 1, 2), ("alloc", 1, 2)), ""),
        (traced(("alloc", 1, 2), ("free_requested", 1, 3)), ""),
        (traced(segments=[1]), ""),
        *(
            (traced(segments=[{"address": 0, "blocks": [block]}]), "")
            for block in (
                {"state": "active_allocated"},
                {"state": "active_allocated", "size": 2**80},
                {"state": "inactive", "size": 1.5},
            )
        ),
    ],
)
def test_what_is_no_snapshot_is_refused_by_name(tmp_path, content, message):
    path = tmp_path / "mine.pickle"
    path.write_bytes(content)
    with pytest.raises(SnapshotError, match=rf"mine\.pickle: .*{message}"):
        snapshots.read_history(path)


NESTED = b"K\x00" + b"2\x86" * 60
"""A pair of twice the same pair, and so on: 2^60 numbers for whoever looks at all of them."""


def shared(*, blocks=(), events=(), num_repeats=1):
    """Returns a snapshot in which the same blocks, or the same event, stand `num_repeats` times."""
    segments = [{"address": address, "blocks": blocks} for address in (0, 2**40) if blocks]
    return pickle.dumps({"segments": segments, "device_traces": [list(events) * num_repeats]})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x80\x04" + NESTED + b"Q.", "refused: it refers to an external object"),
        (b"\x80\x04K\x00r" + struct.pack("<I", 2**31) + b".", "not a snapshot but a int"),
        (b"\x80\x04K\x00" + b"r" + struct.pack("<I", 2**32 - 1) + b"0", "not a readable pickle"),
        (b"\x80\x04}" + NESTED + b"K\x00s.", "not a readable pickle .TypeError: unhashable"),
        (b"\x80\x04(" + NESTED + b"K\x00d.", "not a readable pickle .TypeError: unhashable"),
        (b"\x80\x04(" + NESTED + b"\x91.", "not a readable pickle .TypeError: unhashable"),
        (
            b"\x80\x04\x8b" + struct.pack("<I", 2**20) + b"\x01" * 2**20 + b"0" * 100,
            "not a readable pickle",
        ),
        (
            b"\x80\x04}(\x8c\x08segments](" + NESTED + b"e\x8c\x0ddevice_traces]u.",
            "not an object but list",
        ),
        (
            shared(blocks=[{"size": 0, "state": "inactive"}] * 100),
            "two segments have the same blocks",
        ),
        (
            shared(
                events=[
                    {
                        "action": "alloc",
                        "addr": 0,
                        "size": 1,
                        "num": 0,
                        "frames": [{"filename": "a", "line": 1, "name": "b"}] * 20_000,
                    }
                ],
                num_repeats=20_000,
            ),
            "which is in use",
        ),
    ],
)
def test_a_small_file_takes_no_long_time(tmp_path, content, message):
    path = tmp_path / "mine.pickle"
    path.write_bytes(content)
    begin = time.process_time()
    with pytest.raises(SnapshotError, match=rf"mine\.pickle: .*{message}"):
        snapshots.read_history(path)
    assert time.process_time() - begin < 5


def test_without_a_trace_the_device_with_most_in_use_counts(tmp_path):
    path = tmp_path / "snapshot.pickle"
    block = {"size": 1024, "requested_size": 1000, "state": "active_allocated"}
    segments = [
        {"device": device, "address": 0, "segment_pool_id": (0, 0), "blocks": [block] * device}
        for device in (0, 2, 1)
    ]
    for traces in ([], [[], [], []]):
        path.write_bytes(pickle.dumps({"segments": segments, "device_traces": traces}))
        history = snapshots.read_history(path)
        assert history.peak_bytes == 2000 and history.num_events == 0
    event = {"action": "alloc", "addr": 4096, "size": 5}
    path.write_bytes(pickle.dumps({"segments": segments, "device_traces": [[], [event]]}))
    assert snapshots.read_history(path).totals().tolist() == [1000, 1005]


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(SnapshotError, match=r"nowhere\.pickle: cannot be read"):
        snapshots.load_snapshot(tmp_path / "nowhere.pickle")


def test_what_was_in_use_before_a_trace_is_told_from_its_end(tmp_path):
    block = {"size": 1024, "requested_size": 1000, "state": "active_allocated"}
    free = {"size": 512, "requested_size": 0, "state": "inactive"}
    trace = [("free_requested", 1024, 400), ("alloc", 2048, 50), ("free_requested", 2048, 50)]
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(
        traced(*trace, segments=[{"device": 0, "address": 0, "blocks": [block, free]}])
    )
    assert snapshots.read_history(path).totals().tolist() == [1400, 1000, 1050, 1000]
