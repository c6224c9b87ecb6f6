"""What the host takes to issue work: microseconds for an operator and for a kernel launch.

Call times of small work are the host's more than the device's, and two machines with the same GPU
differ by up to 2×. These times say which host a session had.
"""

import itertools
from dataclasses import replace

import torch
import triton
import triton.language as tl

from labkit.measure.timing import Timing, synchronize, time_callable

NUM_CALLS = 100
"""Calls per sample, few enough that the device's queue never fills and holds the host up."""


@triton.jit
def _store_zero_kernel(x_ptr, num_elements, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + offsets, 0.0, mask=offsets < num_elements)


_CALLS = {
    "operator": lambda x: torch.add(x, x),
    "triton_launch": lambda x: _store_zero_kernel[(1,)](x, x.numel(), BLOCK=64),
}

PROBES = {"cuda": tuple(_CALLS), "cpu": ("operator",)}
"""By kind of device. operator: one addition of 64 elements. triton_launch: one kernel of one block.
"""


def probe(name: str, device_kind: str) -> Timing:
    """Returns the host's time of one call, the device not waited for; a sample is the mean of
    NUM_CALLS in a row.

    Args:
        name: one of the device's PROBES; device_kind: where the operand is.
    """
    call = _CALLS[name]
    x = torch.ones(64, device=device_kind)

    def calls() -> None:
        for _ in itertools.repeat(None, NUM_CALLS):
            call(x)

    def drained() -> tuple:
        synchronize(device_kind)
        return ()

    # To the timer this is work of the CPU, so it does not wait for the device; `drained` does,
    # before each sample.
    timing = time_callable(calls, inputs=drained, device_kind="cpu", time_limit_s=0.2)
    one = tuple(sample_ms / NUM_CALLS for sample_ms in timing.samples_ms)
    return replace(timing, samples_ms=one, host_ms=one)
