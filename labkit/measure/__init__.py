"""Measuring a callable: how long it takes, what memory it needs, where its time goes. Knows nothing of models."""

import os

# PyTorch's profiler announces every start and stop on stderr unless told before it is first used.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
