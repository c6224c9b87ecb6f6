"""The parts of a step against a rank alone, from traces made by hand; parallel_ranks has one of
sleeps.
"""

import math

import pandas as pd
import pytest

from labkit.experiments.split import PARTS, split, steps_of, transport
from labkit.measure.profiling import Trace

MS = 1_000_000
ALONE = [("gemm", 0, 10), ("norm", 10, 20), ("multi_tensor_adam", 20, 30), ("gemm", 30, 40)]
SENT = ("ncclDevKernel_AllReduce_Sum_f32_RING(args)", 8, 18)
LATER = ("multi_tensor_adam", 25, 35), ("gemm", 35, 45)


def traced(rows, length=40):
    """Three steps of `rows`, (name, begin, end, kind) in ms, of which the last ends the window."""
    launches = []
    for step in range(3):
        for name, begin, end, *kind in rows:
            times = [(step * length + at) * MS for at in (begin, end)]
            launches.append(
                {"name": name, "kind": (kind or ["kernel"])[0], "stream": 7, "shape": ""}
                | {"start_ns": times[0], "end_ns": times[1], "duration_ns": times[1] - times[0]}
                | {"launched_ns": step * length * MS, "blocks": math.nan if kind else 24}
            )
    begins = [step * length * MS for step in range(3)]
    ranges = pd.DataFrame({"name": "step", "start_ns": begins, "end_ns": begins})
    return steps_of(Trace("kineto", "", pd.DataFrame(launches), ranges, 0))


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
    assert {part: found[part] / 1e3 for part in PARTS} == dict.fromkeys(PARTS, 0) | parts
    assert (
        found["span"] / 1e3
        == length
        == 40 + sum(sign * found[part] / 1e3 for part, sign in PARTS.items())
    )
    assert len(sent) == 2 and found["compute"] > 0


def test_the_transport_is_read_off_the_trace():
    copy = ("Memcpy DtoD", 30, 35, "memcpy")
    _, sent = split(traced([*ALONE, SENT, copy]), traced(ALONE))
    assert transport(sent, 2) == [
        {"name": "ncclDevKernel_AllReduce_Sum_f32_RING", "blocks": 24, "launches": 1, "us": 10_000},
        {"name": "Memcpy DtoD", "blocks": None, "launches": 1, "us": 5000},
    ]
