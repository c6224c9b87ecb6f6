"""What a rank does that fails, by itself: importing the models takes longer than failing."""

import os
import signal
import time

import torch
import torch.distributed as dist

from labkit.parallel.launch import rank_device


def fault(kind: str):
    """Yields the rank's process, then rank 1 fails in the way that is asked for."""
    yield os.getpid()
    dist.barrier()
    if dist.get_rank() == 1:
        if kind == "crash":
            raise ZeroDivisionError("of rank 1")
        if kind == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "hang":
            time.sleep(600)
    size = 4 + 1000 * dist.get_rank() if kind == "shape" else 4
    x = torch.ones(size, device=rank_device())
    dist.all_reduce(x)
    x.sum().item()  # waits for it
    yield "after"
