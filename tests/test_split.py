"""The parts of a step against a rank alone, from traces made by hand."""

import math

import numpy as np
import pandas as pd
import pytest

from labkit.configs import STEP_PARTS
from labkit.experiments.split import split, steps_of, transport
from labkit.measure.profiling import Trace

MS = 1_000_000
ALONE = [("gemm", 0, 10), ("norm", 10, 20), ("multi_tensor_adam", 20, 30), ("gemm", 30, 40)]
SENT = ("ncclDevKernel_AllReduce_Sum_f32_RING(args)", 8, 18)
LATER = ("multi_tensor_adam", 25, 35), ("gemm", 35, 45)


def traced(rows, length=40, source="kineto", messages=()):
    """Four steps of `rows`, (name, begin, end, kind) in ms, and of ranges that are messages."""
    begins = MS * length * np.arange(4)
    frames = [
        pd.DataFrame(
            {"name": name, "kind": (kind or ["kernel"])[0], "shape": "", "launched_ns": begins}
            | {"start_ns": begins + begin * MS, "end_ns": begins + end * MS}
            | {"duration_ns": (end - begin) * MS, "blocks": math.nan if kind else 24}
        )
        for name, begin, end, *kind in rows
    ]
    ranges = pd.concat(
        pd.DataFrame({"name": name, "start_ns": begins + begin * MS, "end_ns": begins + end * MS})
        for name, begin, end in (("step", 0, 0), *messages)
    )
    return steps_of(Trace(source, "", pd.concat(frames), ranges))


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


def test_on_a_cpu_what_only_calls_operators_computes_nothing_and_messages_are_ranges():
    rows = [("aten::mm", 0, 10), ("aten::add", 20, 40), ("autograd::engine", 0, 40)]
    found, sent = split(
        traced(rows, source="kineto cpu", messages=[("gloo:all_reduce", 15, 20)]),
        traced(rows, source="kineto cpu"),
    )
    assert [found[part] / 1e3 for part in ("compute", "exposed", "idle")] == [30, 5, -5]
    assert transport(sent) == {"transport": "gloo:all_reduce", "blocks": None}
