"""pytest as a script, `EVENTS FOLDER ARGUMENT…`, that writes how its tests go into the file EVENTS,
one JSON line each, and finds what is not installed in FOLDER.

A checkout's own Python runs it, which may have no labkit.
"""

import json
import os
import re
import sys


def _write(event):
    with open(sys.argv[1], "a", encoding="utf-8") as file:
        print(json.dumps(event), file=file)


def _write_outcome(report):
    state = report.outcome
    reason = ""
    if report.skipped:
        reason = report.longrepr[2].removeprefix("Skipped: ")
    elif report.failed:
        lines = re.findall(r"^E +(.*\w\S*)", report.longreprtext, re.MULTILINE)
        # The last one is what a rank raised.
        named = [n for n, line in enumerate(lines) if re.match(r"[\w.]*(Error|Exception)\b", line)]
        first = named[-1] if named else 0
        reason = " ".join(lines[first:])
        if reason == "AssertionError":  # a rank's says no more than its line
            reason = f"{reason}: {lines[first - 1]}"
    if reason == "NotImplementedError":
        state = "missing"
    seconds = getattr(report, "duration", 0)
    _write({"test": report.nodeid, "state": state, "seconds": seconds, "reason": reason[:200]})


def pytest_collection_finish(session):
    """Tells all tests, in their order."""
    _write([item.nodeid for item in session.items])


def pytest_collectreport(report):
    """Tells what cannot be imported."""
    if report.failed:
        _write_outcome(report)


def pytest_runtest_logreport(report):
    """Tells how a test ended."""
    if report.when == "call" or not report.passed:
        _write_outcome(report)


if __name__ == "__main__":  # not in a test's own processes
    import pytest

    sys.path[:0] = [os.getcwd()]
    sys.path += [sys.argv[2]]
    sys.exit(pytest.main(sys.argv[3:], plugins=[sys.modules[__name__]]))
