"""What a launch opens, leaves behind and says: sockets, processes and folders after kills, the rank
that is blamed.
"""

import os
import subprocess
import sys
import threading
from pathlib import Path

import launch_ranks
import pytest
from conftest import more
from launch_ranks import MARK
from processes import holding, is_true_within

from labkit.parallel.launch import RankError, launch

on_linux = pytest.mark.skipif(
    sys.platform != "linux", reason="processes are followed through /proc"
)


@pytest.fixture
def mark(request, monkeypatch, tmp_path):
    """Marks every process of this test's calls, whose temporary files go where the test sees
    them.
    """
    monkeypatch.setenv(MARK, request.node.name)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    return f"{MARK}={request.node.name}\0".encode()


def left_in(folder: Path) -> list[Path]:
    return list((folder / "temporary").iterdir())


def listening(pids: list[int]) -> list[str]:
    """Returns the addresses, in hexadecimal, at which processes listen."""
    links = {
        os.readlink(link)
        for pid in pids
        for link in Path(f"/proc/{pid}/fd").iterdir()
        if link.is_symlink()
    }
    rows = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    return [
        row[1].split(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in links
    ]


@on_linux
def test_ranks_listen_on_the_loopback_interface_alone(mark, tmp_path):
    results = []
    path = tmp_path / "seen"
    call = threading.Thread(
        target=lambda: results.append(launch(launch_ranks.wait_for, 2, str(path), device="cpu"))
    )
    call.start()
    try:
        assert is_true_within(
            60, lambda: len(list(tmp_path.glob("temporary/labkit-*/*.items"))) == 2
        )
        assert is_true_within(
            60, lambda: all(p.stat().st_size for p in tmp_path.glob("temporary/labkit-*/*.items"))
        )
        (folder,) = left_in(tmp_path)
        assert folder.stat().st_mode & 0o77 == 0
        pids = holding(mark)
        addresses = listening(pids)
    finally:
        path.touch()
        call.join()
    assert len(pids) == 3 and len(results) == 1
    # 127.0.0.1, or ::1: gloo's sockets.
    assert addresses and set(addresses) <= {"0100007F", "00000000000000000000000001000000"}
    assert not left_in(tmp_path) and not holding(mark)


@on_linux
@pytest.mark.parametrize(
    "delays", [(0.0, 0.02, 0.05, 0.1, 0.2), (0.4, 0.8, 1.6)], ids=["start", "imports"]
)
def test_a_call_that_is_killed_leaves_nothing(mark, tmp_path, delays):
    signals = ["SIGKILL", "SIGTERM", "SIGINT", "SIGHUP"]
    code = f"import launch_ranks; launch_ranks.kill_calls({delays}, {signals})"
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])
    }
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=100)
    assert is_true_within(10, lambda: not holding(mark) and not left_in(tmp_path)), (
        holding(mark),
        left_in(tmp_path),
    )


@pytest.mark.parametrize(
    ("function", "arguments", "rank", "message"),
    [
        (
            launch_ranks.end,
            ("exit",),
            1,
            r"rank 1 of 2 failed first \(exit status 0, before it was done\)",
        ),
        (
            launch_ranks.end,
            ("stop",),
            0,
            r"rank 0 of 2 failed first \(exit status 1; rank 1 was stopped\)(\n.*)*was at:",
        ),
        (
            launch_ranks.unknown_class,
            (),
            0,
            r"rank 0 returned cannot be read here\nModuleNotFoundError: .*only_in",
        ),
        (launch_ranks.kill_guard, (), None, "process that guards the ranks was ended or stopped"),
        *more(
            (
                launch_ranks.end,
                ("signal",),
                1,
                r"rank 1 of 2 failed first \(killed by SIGTERM\)(\n.*)* in end\n",
            ),
            (
                launch_ranks.end,
                ("real-time signal",),
                1,
                r"rank 1 of 2 failed first \(killed by signal 40\)",
            ),
            (launch_ranks.end, ("crash",), 1, r"rank 1 of 2 failed first \(killed by SIGSEGV\)"),
            (
                launch_ranks.stop_all,
                (),
                0,
                r"no end in 1 s; rank 0 was stopped; rank 1 was stopped",
            ),
        ),
    ],
)
def test_what_ended_first_is_said(mark, tmp_path, function, arguments, rank, message):
    timeout_s = 1 if function is launch_ranks.stop_all else 60
    with pytest.raises(RankError, match=message) as caught:
        launch(function, 2, *arguments, device="cpu", timeout_s=timeout_s, collective_timeout_s=3)
    assert caught.value.rank == rank and "Current thread" not in caught.value.summary
    assert [len(items) for items in caught.value.finished] == [1, 1]
    assert not left_in(tmp_path) and not holding(mark)


@on_linux
def test_no_process_that_a_rank_starts_outlives_the_call(mark, tmp_path):
    pids = launch(launch_ranks.start_child, 2, device="cpu")
    assert len({pid for of_rank in pids for pid in of_rank}) == 4
    assert not left_in(tmp_path) and not holding(mark)


def test_what_goes_wrong_before_the_function_begins_is_said(tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text("import time; time.sleep(600)")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("labkit.parallel.launch.GRACE_S", 6)
    with pytest.raises(
        RankError, match=r"rank 0 of 2 failed first \(no end in 0\.1 s\)(\n.*)*torch\.py"
    ) as caught:
        launch(launch_ranks.wait_for, 2, "/nowhere", device="cpu", timeout_s=0.1)
    assert caught.value.finished == [[], []]
    monkeypatch.undo()
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "x")
    with pytest.raises(
        RankError, match=r"failed first \(exit status 1\)(\n.*)*TORCH_DISTRIBUTED_DEBUG"
    ):
        launch(launch_ranks.wait_for, 2, "/nowhere", device="cpu", timeout_s=60)


@pytest.mark.parametrize(
    "times", [{"timeout_s": 0}, {"collective_timeout_s": -1}, {"timeout_s": float("nan")}]
)
def test_times_that_are_none_are_refused(times):
    with pytest.raises(ValueError, match=r"0 s, 120 s|600 s, -1 s|nan s, .*accepted: more than 0"):
        launch(launch_ranks.wait_for, 1, "", device="cpu", **times)
