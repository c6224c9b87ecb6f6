"""What ranks do that are looked at from outside, and calls of `launch` that are killed at chosen
instants.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from labkit.parallel.launch import launch

MARK = "LABKIT_TEST_LAUNCH"
"""Environment variable that every process of a call inherits."""


def wait_for(path: str):
    """Yields the process once the ranks are connected, and goes on when the file is there."""
    dist.all_reduce(torch.ones(4))
    yield os.getpid()
    while not Path(path).exists():
        time.sleep(0.02)


def end(how: str, path: str = ""):
    """Rank 1 ends in the middle, as asked for, while rank 0 waits for it."""
    yield os.getpid()
    dist.barrier()
    if dist.get_rank() == 1:
        if how == "exit":
            os._exit(0)
        if how == "signal":
            os.kill(os.getpid(), signal.SIGTERM)
        if how == "real-time signal":
            os.kill(os.getpid(), 40)
        if how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if how == "crash":
            ctypes.string_at(0)
    dist.barrier()


def stop_all():
    yield os.getpid()
    os.kill(os.getpid(), signal.SIGSTOP)


def start_child():
    """Yields a process that the rank starts in a session of its own, then one that stays in the
    rank's.
    """
    for apart in (True, False):
        yield subprocess.Popen(["sleep", "600"], start_new_session=apart).pid


class Unknown:
    """Of a module that the caller cannot import."""


def unknown_class():
    sys.modules["only_in_the_ranks"] = sys.modules[__name__]
    Unknown.__module__ = "only_in_the_ranks"
    yield 1
    yield Unknown()


def kill_guard():
    yield os.getpid()
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(600)


def kill_calls(delays, names):
    """Starts a call for each delay (s) in a process of its own, and sends that one of the signals
    after the delay.
    """
    for number, delay in enumerate(delays):
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            try:
                launch(wait_for, 2, "/nowhere", device="cpu", timeout_s=60)
            finally:
                os._exit(1)
        os.setpgid(pid, pid)
        time.sleep(delay)
        # To all of its group, as a terminal and a batch system do.
        os.killpg(pid, signal.Signals[names[number % len(names)]])
        os.waitpid(pid, 0)
