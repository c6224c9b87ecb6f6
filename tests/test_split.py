"""The parts of a step against a rank alone: from traces made by hand, and of a step that pauses."""

import math
import time

import numpy as np
import pandas as pd
import pytest
import torch
import torch.distributed as dist

from labkit.configs import STEP_PARTS
from labkit.experiments import shared_step
from labkit.experiments.split import split, steps_of, transport
from labkit.measure.profiling import Trace

MS = 1_000_000
ALONE = [("gemm", 0, 10), ("norm", 10, 20), ("multi_tensor_adam", 20, 30), ("gemm", 30, 40)]
SENT = ("ncclDevKernel_AllReduce_Sum_f32_RING(args)", 8, 18)
LATER = ("multi_tensor_adam", 25, 35), ("gemm", 35, 45)


def traced(rows, length=40):
    """Four steps of `rows`, (name, begin, end, kind) in ms."""
    begins = MS * length * np.arange(4)
    frames = [
        pd.DataFrame(
            {"name": name, "kind": (kind or ["kernel"])[0], "shape": "", "launched_ns": begins}
            | {"start_ns": begins + begin * MS, "end_ns": begins + end * MS}
            | {"duration_ns": (end - begin) * MS, "blocks": math.nan if kind else 24}
        )
        for name, begin, end, *kind in rows
    ]
    ranges = pd.DataFrame({"name": "step", "start_ns": begins, "end_ns": begins})
    return steps_of(Trace("kineto", "", pd.concat(frames), ranges, 0))


@pytest.mark.parametrize(
    ("rows", "length", "parts"),
    [
        ([*ALONE, SENT], 40, {}),
        # A kernel 5 ms longer, beside a message and beside nothing.
        ([*ALONE[:1], ("norm", 10, 25), *LATER, SENT], 45, {"contention": 5}),
        ([*ALONE[:3], ("gemm", 30, 45), SENT], 45, {"drift": 5}),
        ([*ALONE, (SENT[0], 35, 45)], 45, {"exposed": 5}),
        ([*ALONE, SENT], 45, {"idle": 5}),
        ([*ALONE, ("cat", 40, 45), SENT], 45, {"added": 5}),
        ([*ALONE[:2], ("gemm", 20, 30), SENT], 30, {"saved": 10}),
        # A copy that a rank alone does not make communicates; its addition hides beside kernels.
        ([*ALONE, ("Memcpy DtoD", 38, 45, "memcpy"), ("add", 31, 36)], 45, {"exposed": 5}),
    ],
)
def test_what_lengthens_a_step_is_in_its_part(rows, length, parts):
    found, sent = split(traced(rows, length), traced(ALONE))
    assert {part: found[part] / 1e3 for part in STEP_PARTS} == dict.fromkeys(STEP_PARTS, 0) | parts
    assert (
        found["span"] / 1e3
        == length
        == 40 + sum(sign * found[part] / 1e3 for part, sign in STEP_PARTS.items())
    )
    assert len(sent) == 2 and found["compute"] > 0


def test_the_transport_is_read_off_the_trace():
    for longest, seen in ((SENT, 24), (("Memcpy DtoD", 20, 35, "memcpy"), None)):
        _, sent = split(traced([*ALONE, SENT, longest]), traced(ALONE))
        assert transport(sent) == {"transport": longest[0].partition("(")[0], "blocks": seen}


PAUSE_S = 0.005


@pytest.fixture
def step():
    """A step on gloo, of a rank that waits for no other."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    case = {"size": "nano", "context": 32, "precision": "fp32", "compile": "none", "batch": 1}
    yield shared_step.SharedStep(shared_step.WAYS["naive"], case)
    dist.destroy_process_group()


def test_a_pause_is_in_the_part_of_what_paused(step, monkeypatch):
    """Each collective, then each hook of a step takes 5 ms longer."""
    all_reduce = dist.all_reduce

    def paused_all_reduce(*args, **options):
        with torch.profiler.record_function("gloo:pause"):
            time.sleep(PAUSE_S)
        return all_reduce(*args, **options)

    def profile():
        # The shorter of two, since other processes use these cores.
        tables = [step.profile() for _ in range(2)]
        return min(tables, key=lambda table: split(table, table)[0]["span"])

    usual = profile()
    with monkeypatch.context() as patch:
        patch.setattr(dist, "all_reduce", paused_all_reduce)
        paused = {"exposed": profile()}
    parameters = list(step.model.parameters())
    for p in parameters:
        p.register_post_accumulate_grad_hook(lambda _: time.sleep(PAUSE_S))
    paused["idle"] = profile()
    exposed = split(usual, usual)[0]["exposed"]
    for part, table in paused.items():
        grown = split(table, usual)[0]
        grown["exposed"] -= exposed
        assert part == max(STEP_PARTS, key=grown.get), grown
        assert grown[part] > 0.8e6 * PAUSE_S * len(parameters), grown
