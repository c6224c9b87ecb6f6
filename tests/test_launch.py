"""What a launch opens, leaves behind and says: sockets, processes and folders after kills, the rank
that is blamed.
"""

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import launch_ranks
import pytest
import torch
from processes import holding, is_true_within

from labkit.device import NODES, num_usable_cores
from labkit.parallel.launch import RankError, launch, lead

MARK = "LABKIT_TEST_LAUNCH"
"""Environment variable that every process of a test's calls inherits."""


@pytest.fixture
def left(request, monkeypatch, tmp_path):
    """Returns what gives the processes and temporary files that this test's calls have left."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv(MARK, request.node.name)
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    text = f"{MARK}={request.node.name}\0".encode()
    return lambda: holding(text) + list(folder.iterdir())


def listening(pids: list[int]) -> set[str]:
    """Returns the addresses, in hexadecimal, at which processes listen."""
    sockets = set()
    for pid in pids:
        links = Path(f"/proc/{pid}/fd").iterdir()
        sockets |= {os.readlink(link) for link in links if link.is_symlink()}
    addresses = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A" and f"socket:[{inode}]" in sockets:
                addresses.add(local.split(":")[0])
    return addresses


def test_ranks_listen_on_the_loopback_interface_alone_and_leave_no_process(left, tmp_path):
    path, results = tmp_path / "seen", []

    def call():
        results.extend(launch(launch_ranks.start_children, 2, str(path), device="cpu"))

    thread = threading.Thread(target=call)
    thread.start()
    try:
        # A guard, what forks two ranks, they, two processes of each, and the call's folder.
        assert is_true_within(60, lambda: len(left()) == 9)
        *pids, folder = left()
        assert folder.stat().st_mode & 0o77 == 0
        addresses = listening(pids)
    finally:
        path.touch()
        thread.join()
    (*first, child, other), (*second, _, _) = results
    assert (first, second) == ([0, "cpu"], [1, "cpu"]) and {child, other} <= set(pids)
    # 127.0.0.1, or ::1: gloo's sockets.
    assert addresses and addresses <= {"0100007F", "00000000000000000000000001000000"}
    assert not left()


@pytest.mark.parametrize(
    ("how", "rank", "message"),
    [
        ("raise", 1, r"rank 1 of 2 failed first \(exit status 1\)(\n.*)*ZeroDivisionError"),
        # Where the rank stood for which the failing one waited.
        ("hang", 0, r"in all_reduce(\n.*)*rank 1 was at:(\n.*)*in end"),
        ("exit", 1, r"rank 1 of 2 failed first \(exit status 0, before it was done\)"),
        (9, 1, r"rank 1 of 2 failed first \(killed by signal 9, Killed\)"),
        (19, 0, r"first \(exit status 1; rank 1 was stopped\)(\n.*)*was at:"),
    ],
)
def test_what_ended_first_is_said(left, how, rank, message):
    with pytest.raises(RankError, match=message) as caught:
        launch(launch_ranks.end, 2, how, device="cpu", timeout_s=60, collective_timeout_s=4)
    assert f"rank {rank} of 2 failed first" in str(caught.value)
    assert "Current thread" not in caught.value.summary
    assert [len(items) for items in caught.value.finished] == [1, 1]
    assert not left()


def test_a_deadline_ends_ranks_that_never_communicate(left, monkeypatch):
    monkeypatch.setattr("labkit.parallel.launch.GRACE_S", 200)  # imports may take long
    with pytest.raises(RankError, match=r"(?s)no end in 6 s.*in end") as caught:
        launch(launch_ranks.end, 2, "hang", device="cpu", timeout_s=6)
    assert caught.value.summary.endswith("Timeout (0:00:06)!") and not left()


@pytest.mark.parametrize(
    ("function", "nproc", "options", "message"),
    [
        (launch_ranks.end, 999, {"device": "cuda"}, "999 ranks on 'cuda'; .* up to . on cuda"),
        (lambda: None, 2, {}, "cannot start"),
    ],
)
def test_what_cannot_start_is_refused(function, nproc, options, message):
    with pytest.raises(ValueError, match=message):
        launch(function, nproc, **{"device": "cpu"} | options)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
def test_a_rank_failing_on_a_gpu_ends_the_run_with_its_error(left):
    with pytest.raises(RankError, match=r"ALLREDUCE, NumelIn=4,.*timing out") as caught:
        launch(launch_ranks.end, 2, "hang", device="cuda", timeout_s=60, collective_timeout_s=6)
    assert "rank 0 of 2 failed first" in str(caught.value) and not left()


def test_nodes_share_the_ranks_of_a_launch(monkeypatch, left):
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.setenv(NODES, "1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    leader = [lead(2, "localhost", port)]
    code = f"from labkit.parallel.launch import follow; follow(1, 2, 'localhost', {port})"
    follower = subprocess.Popen([sys.executable, "-c", code])
    try:
        (first, cores), (second, others) = launch(launch_ranks.end, 2, "well", device="cpu")
        assert first != second and cores == others == num_usable_cores()
        with pytest.raises(
            RankError, match=r"(?s)node 1: .*ZeroDivisionError: of rank 1"
        ) as caught:
            launch(launch_ranks.end, 2, "raise", device="cpu")
        assert [len(items) for items in caught.value.finished] == [1, 1]
        with pytest.raises(ValueError, match="3 ranks on 2 nodes; accepted: as many on each"):
            launch(launch_ranks.end, 3, "well", device="cpu")
        leader.clear()
        assert follower.wait(20) == 0
    finally:
        follower.kill()
        follower.wait()
    assert is_true_within(10, lambda: not left())
