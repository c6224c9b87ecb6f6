"""Runs pytest and sends what begins and how it ends: `course_tests.py DESCRIPTOR ARGUMENTS`.

It is run by the Python of a checkout, which may lack labkit.
"""

import multiprocessing
import os
import sys
from multiprocessing.connection import Connection
from typing import Any


class Reporter:
    """A plugin of pytest. It sends ("begin", node) and ("end", node, state, text) of files, whose
    tests are collected, and of tests; between them ("tests", nodes).
    """

    def __init__(self, connection: Connection):
        self.send = connection.send

    def pytest_collectstart(self, collector: Any) -> None:
        self.send(("begin", collector.nodeid))

    def pytest_collectreport(self, report: Any) -> None:
        if not report.passed:
            self._end(report)

    def pytest_collection_finish(self, session: Any) -> None:
        self.send(("tests", [item.nodeid for item in session.items]))

    def pytest_runtest_protocol(self, item: Any, nextitem: Any) -> bool:
        from _pytest.runner import runtestprotocol

        self.send(("begin", item.nodeid))
        reports = runtestprotocol(item, log=False, nextitem=nextitem)
        states = ("failed", "skipped", "passed")
        self._end(min(reports, key=lambda report: states.index(report.outcome)))
        return True

    def _end(self, report: Any) -> None:
        is_skipped = isinstance(report.longrepr, tuple)
        text = report.longrepr[2].removeprefix("Skipped: ") if is_skipped else report.longreprtext
        self.send(("end", report.nodeid, report.outcome, text))


if __name__ == "__main__":
    import pytest  # not above: each rank of a test imports this file again

    descriptor, preload, *arguments = sys.argv[1:]
    if preload:
        # Each rank that is spawned would import it again.
        multiprocessing.set_forkserver_preload([preload])
        get_context = multiprocessing.get_context
        multiprocessing.get_context = lambda method=None: get_context(
            "forkserver" if method == "spawn" else method
        )
    sys.path.insert(0, os.getcwd())  # as `python -m pytest` has it
    pytest.main(arguments, plugins=[Reporter(Connection(int(descriptor)))])
