"""What the server of `sweep` imports, so that no worker has to: the chapters' experiments, and what
each worker would take seconds to import for its first optimizer and, without a GPU, its compiler.
"""

import contextlib
import gc
import importlib

from labkit import notebooks
from labkit.device import has_gpu_driver
from labkit.experiments.sweep import experiment_of

modules = [*map(experiment_of, notebooks.names()), "labkit.experiments.bench", "torch._dynamo"]
if not has_gpu_driver():  # with a GPU, which the server must not touch, each worker does
    modules.append("torch._inductor.compile_fx")
gc.disable()  # what is imported stays
for module in modules:
    with contextlib.suppress(Exception):  # the session that needs it says why
        importlib.import_module(module)
gc.enable()
