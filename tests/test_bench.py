"""`labkit bench`: cheats are refused by name, honest functions are ranked, and what fails harms no
other.
"""

import functools
import importlib.metadata
import itertools
import linecache
import os
import re
import subprocess
import sys
import threading
import time
import unittest.mock
from pathlib import Path

import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from chapters import CPU, in_section, measure, measure_all
from torch.optim.adamw import adamw

from labkit.configs import ModelConfig, RequestError
from labkit.experiments import bench, operations
from labkit.experiments.contest import Implementation
from labkit.models.transformer import TransformerLM

IMPLEMENTATIONS = operations.IMPLEMENTATIONS


def right(q, k, v, causal):
    with torch.no_grad():
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


SHAPES = {
    "attention": {"batch": 1, "heads": 2, "length": 64, "d_head": 16, "causal": True},
    "model": {**bench._sizes("model", "2x16x32x64x2x2", "cpu"), "warmup": 1, "steps": 3},
    "optimizer": {"rows": 128, "columns": 64},
}
SHAPES |= dict.fromkeys(["adamw", "cross_entropy", "linear_cross_entropy"], SHAPES["optimizer"])


def outcome(monkeypatch, function, op="attention", name="forward", **sizes) -> list:
    """Returns what a pass of a function gave, and that of another implementation beside it:
    metrics, or the error.
    """
    if op == "adamw":
        function = functools.partial(operations.StepFunction, function)
    monkeypatch.setitem(bench.RIVALS[op], "mine@0", Implementation(function))
    parameters = {"operation": op, **SHAPES[op], **sizes, "precision": "fp32"}
    other = "torch" if name == "step" else "eager"
    case = bench.Case("contest", parameters, (f"mine@0 {name}", f"{other} {name}"), 60.0, 0.01)
    ceilings = {"gemm fp32 achieved_tflops": 1e3 if torch.cuda.is_available() else 1.0}
    measured, failed = measure_all(bench.run_case, case, ceilings)
    return [failed.get(phase) or measured[phase].metrics for phase in case.phases]


# ---- cheats --------------------------------------------------------------------------------------


KEPT = {}


def caches_the_result(q, k, v, *, causal):
    return KEPT.setdefault("out", right(q, k, v, causal)).clone()


def returns_one_buffer(q, k, v, *, causal):
    return KEPT.setdefault("out", torch.empty_like(q.data)).copy_(right(q, k, v, causal))


def writes_into_an_input(q, k, v, *, causal):
    return q.data.copy_(right(q, k, v, causal))


def changes_an_input(q, k, v, *, causal):
    out = right(q, k, v, causal)
    k.data.neg_()
    return out


def is_timed() -> bool:
    KEPT[len(KEPT)] = None
    return len(KEPT) > 3  # of which one is looked at and two are judged


def works_until_it_is_timed(q, k, v, *, causal):
    return torch.empty_like(q) if is_timed() else right(q, k, v, causal)


def works_in_a_thread(q, k, v, *, causal):
    out = torch.zeros_like(q.data)

    def work():
        time.sleep(0.05)
        out.copy_(right(q, k, v, causal))

    threading.Thread(target=work).start()
    return out


def empties_its_inputs_when_it_is_timed(q, k, v, *, causal):
    if is_timed():
        v.data.zero_()
    return right(q, k, v, causal)


def computes_when_it_is_read(q, k, v, *, causal):
    return right(q, k, v, causal).as_subclass(torch.nn.Buffer)


def leaves_autocast_on(q, k, v, *, causal):
    out = right(q, k, v, causal)
    torch.set_autocast_enabled(q.device.type, True)
    return out


def gives_another_loss(x, classes, targets):
    return F.cross_entropy(x @ classes.T, targets) + 1


CLOCK = time.perf_counter


def slows_the_clock(q, k, v, *, causal):
    time.perf_counter = lambda: CLOCK() / 1e6
    return right(q, k, v, causal)


def works_on_another_stream(q, k, v, *, causal):
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        return right(q, k, v, causal)


def skips_what_is_captured(q, k, v, *, causal):
    if torch.cuda.is_current_stream_capturing():
        return torch.empty_like(q)
    return right(q, k, v, causal)


def ignores_the_gradient_of_its_loss(logits, targets):
    loss = F.cross_entropy(logits, targets)
    loss.register_hook(torch.ones_like)
    return loss


class KeepsItsLogits(TransformerLM):
    def __init__(self, *, context_length, **sizes):
        super().__init__(ModelConfig("mine", **sizes), max_context=context_length)

    def forward(self, tokens):
        logits = super().forward(tokens)
        return KEPT.setdefault("logits", logits.detach()) + 0 * logits


class LeavesBlocksOut(KeepsItsLogits):
    def __init__(self, *, num_layers, **sizes):
        super().__init__(num_layers=1, **sizes)


class StepsUntilItIsTimed(torch.optim.AdamW):
    calls = 0

    def step(self):
        self.calls += 1
        if self.calls <= 6:
            super().step()


def in_place(params, grads, exp_avgs, exp_avg_sqs, step, *, betas, **options):
    steps = [torch.tensor(step - 1.0) for _ in params]
    options |= {"amsgrad": False, "maximize": False, "beta1": betas[0], "beta2": betas[1]}
    adamw(params, grads, exp_avgs, exp_avg_sqs, [], steps, **options)


def decays_nothing(*tensors, weight_decay, **options):
    in_place(*tensors, weight_decay=0, **options)


CHEATS = {
    caches_the_result: "a cache",
    returns_one_buffer: "in the memory of an earlier call",
    writes_into_an_input: "in the memory of its inputs",
    changes_an_input: "changes its inputs",
    works_until_it_is_timed: "wrong, or not written, while it is timed",
    works_in_a_thread: "goes on after it has returned",
    empties_its_inputs_when_it_is_timed: "wrong, or not written, while it is timed",
    computes_when_it_is_read: "must return .*; got Buffer",
    leaves_autocast_on: "changes PyTorch's settings",
    ignores_the_gradient_of_its_loss: "error of dlogits",
    gives_another_loss: "error of out",
    KeepsItsLogits: "a cache",
    LeavesBlocksOut: "has .* parameters, not",
    StepsUntilItIsTimed: "wrong, or not written, while it is timed",
    decays_nothing: "wrong: the error of out",
    slows_the_clock: "below the roofline's floor",
    works_on_another_stream: "goes on after it has returned",
    skips_what_is_captured: "wrong, or not written, while it is timed",
}
"""Cheats, or mistakes, and why they are refused; the last two need CUDA."""

OTHERS = {
    ignores_the_gradient_of_its_loss: ("cross_entropy", "forward_backward"),
    gives_another_loss: ("linear_cross_entropy", "forward_backward"),
    KeepsItsLogits: ("model", "forward"),
    LeavesBlocksOut: ("model", "train_step"),
    StepsUntilItIsTimed: ("optimizer", "step"),
    decays_nothing: ("adamw", "step"),
}
"""The operation and the pass of those that are not attention forward."""

# By events of the device, the host's clock does not matter.
ON_GPU = [cheat for cheat in CHEATS if cheat is not slows_the_clock]


@pytest.fixture
def this_device_is_a_cpu(monkeypatch, on_a_cpu):
    monkeypatch.setattr(time, "perf_counter", CLOCK)


on_cpu = pytest.mark.usefixtures("this_device_is_a_cpu")


def check_refused(monkeypatch, cheat, **sizes) -> None:
    KEPT.clear()
    error, other = outcome(monkeypatch, cheat, *OTHERS.get(cheat, ()), **sizes)
    for kind in ("cpu", "cuda"):
        torch.set_autocast_enabled(kind, False)
    assert isinstance(error, bench.Refused) and re.search(CHEATS[cheat], str(error))
    if cheat in (slows_the_clock, leaves_autocast_on):
        assert isinstance(other, bench.Refused)  # it read the same clock, or had that setting
    else:
        assert other["median_ms"] > 0 and other["std_ms"] > 0


@on_cpu
@pytest.mark.parametrize("cheat", [*CHEATS][:-2])
def test_a_cheat_is_refused_by_name_and_the_other_goes_on(monkeypatch, cheat):
    check_refused(monkeypatch, cheat)


@pytest.mark.gpu
@pytest.mark.parametrize("cheat", ON_GPU)
def test_a_cheat_on_cuda_is_refused_by_name(monkeypatch, cheat):
    check_refused(monkeypatch, cheat, length=2048)  # of attention


@on_cpu
@pytest.mark.parametrize(
    "function, reason",
    [
        (lambda q, k, v, *, causal: right(q, k, v, False), "wrong: the error of out"),
        (lambda q, k: q, "it is called with q, k, v, causal"),
        (lambda q, k, v, *, causal: q[..., :8], r"must return torch.float32 \(1, 2, 64, 16\) on"),
        (lambda q, k, v, *, causal: q.half(), "got torch.float16"),
        (lambda q, k, v, *, causal: None, "got NoneType"),
    ],
)
def test_what_is_wrong_has_no_time(monkeypatch, function, reason):
    error, other = outcome(monkeypatch, function)
    assert isinstance(error, bench.Refused) and other["median_ms"] > 0
    assert re.search(reason, str(error)) and "\n" not in str(error)


@on_cpu
def test_what_is_made_honestly_passes(monkeypatch):
    # No two rounds are alike, whatever is drawn.
    monkeypatch.setattr("secrets.randbelow", lambda _: 0)
    made = {"adamw": in_place, "optimizer": torch.optim.AdamW}
    for operation, function in made.items():
        mine, other = outcome(monkeypatch, function, operation, "step")
        assert max(mine["budget_fraction"], other["budget_fraction"]) <= 1
    problem = operations.watched(
        CPU, {"operation": "model", **SHAPES["model"], "precision": "bf16"}
    )
    for impl, name in itertools.product(IMPLEMENTATIONS["model"], operations.MODEL_PASSES):
        verdict = problem.judge(impl, name)
        assert verdict.budget_fraction <= 1 and verdict.relative_error < 0.05


# ---- a bench -------------------------------------------------------------------------------------

TUTORIAL = Path(__file__).parent / "fixtures" / "tutorial_attention.py"
SOURCE = """
import os
import torch.nn.functional as F

def wrapped(q, k, v, *, causal):
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

def ends_the_process(q, k, v, *, causal):
    os._exit(3)
"""


CELL = """
import torch.nn.functional as F
IS_USED = True

def wrapped(q, k, v, *, causal):
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal and IS_USED)

print(labkit.bench(wrapped, op="attention"))
"""


RANK = """
import sys
import labkit
from labkit.experiments import sweep

sweep.MAX_REPEATS = 0
*functions, shape, precision, output = sys.argv[1:]
options = {"shape": shape, "precision": precision, "output": output}
frame = labkit.bench(*functions, op="attention", against="sdpa,ours,eager", **options)
frame.to_pickle(f"{output}/frame")
late = labkit.bench(functions[0], op="attention", timeout_s=1e-3, **options)
assert len(late) and late["reason"].str.endswith("; timeout_s (--timeout) allows more").all()
"""


@pytest.mark.parametrize(
    "shape, precision, environment",
    [
        ("1x1x128x16", "fp32", {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}),
        pytest.param("1x16x2048x64", "bf16", {}, marks=pytest.mark.gpu),
    ],
)
def test_honest_functions_are_ranked_and_one_that_crashes_harms_no_other(
    tmp_path, shape, precision, environment
):
    mine = tmp_path / "mine.py"
    mine.write_text(SOURCE)
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    functions = (f"{TUTORIAL}:attention", f"{mine}:wrapped", f"{mine}:ends_the_process")
    # In a process of its own, whose workers interpret kernels where it does.
    command = [sys.executable, script, *functions, shape, precision, tmp_path]
    subprocess.run(command, env=os.environ | environment, check=True)
    frame = pd.read_pickle(tmp_path / "frame")
    is_crashed = frame["implementation"].str.startswith("ends_the_process")
    assert len(frame) == 12 and is_crashed.sum() == 2
    assert frame["reason"][is_crashed].str.contains("exit code 3").all()
    for _, rows in frame[~is_crashed].groupby("pass"):
        assert (rows["status"] == "ok").all() and (rows["ratio_to_ours"] > 0).all()
        assert rows["median_ms"].is_monotonic_increasing
    (path,) = tmp_path.glob("**/*.jsonl")
    assert path.match("*/bench/records/00_bench.jsonl")


def test_a_function_of_a_cell_is_kept_without_what_the_cell_calls(monkeypatch, tmp_path):
    # What IPython makes of a cell, but for what it calls.
    monkeypatch.setitem(linecache.cache, "<cell>", (1, None, CELL.splitlines(True), "<cell>"))
    namespace = {"__name__": "__main__", "print": id, "labkit": unittest.mock.Mock()}
    exec(compile(CELL, "<cell>", "exec"), namespace)
    function = bench._load(bench._entrant(namespace["wrapped"], tmp_path))
    q = torch.randn(1, 1, 4, 8)
    assert torch.equal(function(q, q, q, causal=True), right(q, q, q, True))


@on_cpu
@pytest.mark.parametrize(
    "asked, message",
    [
        ({"op": "softmax"}, "unknown operation 'softmax'; accepted: rms_norm"),
        ({"against": "ours,fa9"}, "unknown implementation of swiglu 'fa9'; accepted: ours, eager"),
        ({"precision": "bf16", "op": "adamw"}, "precision of adamw 'bf16'; accepted: fp32"),
        ({"steps": 1}, "5 warm-up calls and 1 steps; accepted: from 1, from 2"),
        ({"op": "model", "shape": "1x8x30x8x1x4"}, "num_heads that divide d_model"),
        ({"op": "data_parallel", "shape": "2x32x3"}, "world_size in steps of 2"),
        ({"shape": "8x8x8"}, "shape '8x8x8' of swiglu; accepted: rows x columns"),
        ({"shape": "128x-64"}, "rows from 128, columns in steps of 64"),
        ({"function": "nowhere.py:f"}, "no source of 'nowhere.py:f'.*No such file"),
        ({"function": f"{TUTORIAL}:missing"}, "it has no missing"),
        ({"function": len}, "no source of <built-in function len>"),
    ],
)
def test_what_cannot_be_asked_is_one_line(tmp_path, asked, message):
    options = {"op": "swiglu", "output": str(tmp_path)} | asked
    with pytest.raises(RequestError, match=message) as raised:
        bench.bench(options.pop("function", right), **options)
    assert "\n" not in str(raised.value) and not list(tmp_path.iterdir())


WRAPPERS = """
import torch.distributed as dist
from torch import nn

class Averages(nn.Module):
    calls = 0

    def __init__(self, module, bucket_size_mb):
        assert bucket_size_mb == 100
        super().__init__()
        self.module = module

    def forward(self, *tensors):
        return self.module(*tensors)

    def finish_gradient_synchronization(self):
        for p in self.parameters():
            dist.all_reduce(p.grad, dist.ReduceOp.AVG)

class AveragesUntilItIsTimed(Averages):
    def finish_gradient_synchronization(self):
        self.calls += 1
        if self.calls < 3:
            super().finish_gradient_synchronization()
"""


def test_wrappers_are_timed_beside_ours_and_held_to_the_ranks_average(tmp_path):
    file = tmp_path / "wrappers.py"
    file.write_text(WRAPPERS)
    entrants = tuple(
        bench.Entrant(file, name, f"{name}@0") for name in ("Averages", "AveragesUntilItIsTimed")
    )
    parameters = {
        "operation": "data_parallel",
        **bench._sizes("data_parallel", "1x8x2", "cpu"),
        "size": "nano",
        "compile": "none",
        "precision": "fp32",
        "transport": "gloo",
    }
    # What is refused comes last: another launch would measure what is left.
    phases = tuple(f"{label} step" for label in (entrants[0].label, "ours", entrants[1].label))
    case = bench.Case("wrappers", parameters, phases, 200.0, 0.01, entrants=entrants)
    measured, failed = measure_all(bench.run_case, case)
    assert list(measured) == [phases[0], "ours step"]
    for row in measured.values():
        metrics = row.metrics
        assert row.case == parameters and metrics["std_ms"] > 0 and metrics["budget_fraction"] <= 1
        assert 0 < metrics["ratio_to_ours_low"] <= metrics["ratio_to_ours"]
    assert metrics["ratio_to_ours_low"] == 1  # of ours
    assert all("are not the ranks' averages" in str(error) for error in failed.values())


@on_cpu
@pytest.mark.parametrize(
    "notebook, own, section, phase",
    [
        ("05_attention", "own.py:compiled_mine", "attention", "backward"),
        ("06_flash_attention", "own.py:attention", "rivals", "{} forward_backward"),
        ("08_siglip2", "swiglu:own.py:gated", "kernels", "{} forward"),
    ],
)
def test_a_function_joins_the_contests_of_a_chapter(
    monkeypatch, tmp_path, notebook, own, section, phase
):
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(
        "from labkit.kernels.reference import attention_reference as attention\n"
        "compiled_mine = attention\n"
        "gated = lambda gate, up: gate.sigmoid() * gate * up\n"
    )
    settings = {"device": "this", "profile": "smoke", "output": tmp_path, "fresh": False}
    session = bench.own_session(notebook, own, **settings, options={})
    case = in_section(session.cases, section)[0]
    operation, entrant = bench.own_entrant(notebook, own)
    row = measure(bench.run_case, case)[phase.format(entrant.label)]
    assert row.case == case.parameters and row.metrics["median_ms"] > 0
    assert "num_replacements" not in row.metrics  # of PyTorch's compiled formula
    assert not in_section(session.cases, "memory")
    del IMPLEMENTATIONS[operation][entrant.label]


def test_an_installed_package_offers_implementations(monkeypatch, tmp_path, capsys):
    (tmp_path / "offered.py").write_text("def mine(gate, up):\n    return gate\n")
    monkeypatch.syspath_prepend(tmp_path)
    names = ("swiglu:offered", "swiglu:ours")
    entries = [importlib.metadata.EntryPoint(name, "offered:mine", "") for name in names]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: entries)
    monkeypatch.setitem(IMPLEMENTATIONS, "swiglu", dict(IMPLEMENTATIONS["swiglu"]))
    operations._register_installed()
    assert "offered" not in sys.modules
    offered = IMPLEMENTATIONS["swiglu"]["offered"]
    assert offered.function(1, 2) == 1 and offered.module == operations.__name__
    assert "entry point 'swiglu:ours': name must be new" in capsys.readouterr().err
