"""What ranks do that are looked at from outside, and calls of `launch` that are killed at chosen
instants.
"""

import os
import subprocess
import time
from pathlib import Path

import torch
import torch.distributed as dist

from labkit.parallel.launch import rank_device


def end(how: str | int):
    """Yields the rank's process, then rank 1 ends as asked for, by a signal if that is a number,
    while rank 0 waits for it.
    """
    yield os.getpid()
    dist.barrier()
    if dist.get_rank() == 1:
        if how == "raise":
            raise ZeroDivisionError("of rank 1")
        if how == "hang":
            time.sleep(600)
        if how == "exit":
            os._exit(0)
        if isinstance(how, int):
            os.kill(os.getpid(), how)
    x = torch.ones(4, device=rank_device())
    dist.all_reduce(x)
    x.sum().item()  # waits for it
    yield torch.get_num_threads()


def start_children(path):
    """Yields, once the ranks are connected, the rank and its device, a process that it starts in a
    session of its own, and one that stays in the rank's; goes on when the file is there.
    """
    dist.all_reduce(torch.ones(4))
    yield dist.get_rank()
    yield str(rank_device())
    for apart in (True, False):
        yield subprocess.Popen(["sleep", "600"], start_new_session=apart).pid
    while not Path(path).exists():
        time.sleep(0.02)
