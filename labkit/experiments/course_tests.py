"""Runs pytest and sends what begins and how it ends.

`course_tests.py DESCRIPTOR ARGUMENTS` is run by the Python of a checkout, which may lack
labkit. It is its own plugin, and sends (node, "begins" or a state, text) of files, whose tests are
collected, and of tests; between them ("", "tests", their nodes).
"""

import sys
from multiprocessing import connection
from typing import Any

STATES = ("failed", "skipped", "passed")


def pytest_collectstart(collector: Any) -> None:
    pipe.send((collector.nodeid, "begins", ""))


def pytest_collectreport(report: Any) -> None:
    if not report.passed:
        send_end(report)


def pytest_collection_finish(session: Any) -> None:
    pipe.send(("", "tests", [item.nodeid for item in session.items]))


def pytest_runtest_protocol(item: Any, nextitem: Any) -> bool:
    pipe.send((item.nodeid, "begins", ""))
    reports = runner.runtestprotocol(item, log=False, nextitem=nextitem)
    send_end(min(reports, key=lambda report: STATES.index(report.outcome)))
    return True


def send_end(report: Any) -> None:
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
    pipe.send((report.nodeid, report.outcome, text.removeprefix("Skipped: ")))


if __name__ == "__main__":
    # Not above: each rank of a test imports this file again.
    import pytest
    from _pytest import runner

    descriptor, *arguments = sys.argv[1:]
    pipe = connection.Connection(int(descriptor))
    sys.exit(pytest.main(arguments, plugins=[sys.modules[__name__]]))
