"""One module per notebook: its cases, how one case is run, what records it leaves.

`open_session` is what a notebook calls. Importing this package loads no torch; opening an enabled
session does.
"""

from labkit.experiments.sweep import Session, open_session

__all__ = ["Session", "open_session"]
