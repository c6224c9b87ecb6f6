"""Processes that tests start and look for afterwards, through /proc, and waiting for what they
do.
"""

import time
from collections.abc import Callable
from pathlib import Path


def holding(text: bytes) -> list[int]:
    """Returns the processes whose environment holds a text and that have not ended."""
    found = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        try:
            if text in environment.read_bytes():  # empty once it has ended
                found.append(int(environment.parent.name))
        except OSError:
            pass
    return found


def is_true_within(seconds: float, condition: Callable[[], object]) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
