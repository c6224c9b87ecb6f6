"""labkit: a transformer-systems laboratory. Importing it loads neither torch nor triton."""

import importlib
import os

# PyTorch's profiler announces every start and stop on stderr unless told before torch is imported.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

__version__ = "0.4.0"


def __getattr__(name: str):
    if name == "bench":
        return importlib.import_module("labkit.experiments.bench").bench
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
