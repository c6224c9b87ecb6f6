"""A measurement says what disturbed it: other processes, a quota, a stop, a throttled GPU."""

import os
import signal
import subprocess
import sys
import threading
import time
from itertools import chain, repeat
from pathlib import Path

import pytest
from stub_nvml import StubNvml

from labkit import device as device_module
from labkit import monitor as monitor_module
from labkit.monitor import Monitor


def test_the_monitor_sums_up_what_the_gpu_did_and_ends_with_its_block(monkeypatch):
    idle, application_setting, power_cap, hot = 0x1, 0x2, 0x4, 0x40
    num_open = []
    all_read = threading.Event()

    def reasons():
        yield from (idle, power_cap | hot)
        all_read.set()
        yield from repeat(application_setting)

    nvml = StubNvml(
        pids=(os.getpid(), 1),
        nvmlInit=lambda: num_open.append("GPU"),
        nvmlShutdown=num_open.pop,
        nvmlDeviceGetTotalEnergyConsumption=7,
        nvmlDeviceGetClockInfo=1980,
        nvmlDeviceGetPowerUsage=chain([650_000, 700_500], repeat(690_000)).__next__,
        nvmlDeviceGetTemperature=chain([60, 71], repeat(70)).__next__,
        nvmlDeviceGetCurrentClocksThrottleReasons=reasons().__next__,
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(monitor_module, "_nvml_handle", lambda nvml: True)
    monitor = Monitor("cuda", interval_s=0.001, wants_energy=lambda time_s: time_s > 0)
    num_threads = threading.active_count()
    with pytest.raises(KeyError), monitor:
        assert all_read.wait(20.0) and len(num_open) == 1
        raise KeyError
    assert not num_open, "NVML stays open"
    assert threading.active_count() == num_threads, "the thread goes on"
    assert monitor.readings == sorted(monitor.readings)
    assert monitor.readings[0][1:4] == (7, 1980, 650_000)
    assert (monitor.summary["power_w_max"], monitor.summary["temperature_c_max"]) == (700.5, 71)
    # Neither idling nor a clock that the user set is throttling.
    throttled = monitor.summary["throttle_reasons"]
    assert throttled == ["hardware thermal slowdown", "software power cap"]
    assert monitor.summary["disturbed"] and monitor.summary["foreign_processes"] == 1
    assert "other processes on the GPU: 1" in monitor.summary["disturbed_by"]
    monkeypatch.setattr(monitor_module, "LONGEST_COUNT_S", 0)
    monitor._read()
    assert monitor.readings[-1].energy_mj is None


class FakeHost:
    """The kernel's counters as /proc gives them, of this process of two threads and its child."""

    def __init__(self, folder: Path, monkeypatch):
        self.folder = folder
        self.clock_s, self.own_s, self.child_s = 100.0, 50.0, 3.0
        self.used_s, self.stolen_s, self.waited_s = 90.0, 1.0, 9.0
        monkeypatch.setattr(monitor_module, "CGROUPS", folder / "cgroup")
        monkeypatch.setattr(monitor_module, "PROC", folder)
        monkeypatch.setattr(time, "monotonic", lambda: self.clock_s)
        monkeypatch.setattr(time, "process_time", lambda: self.own_s)
        monkeypatch.setattr(os, "sysconf", lambda name: 100)
        monkeypatch.setattr(os, "cpu_count", lambda: 2)
        self.put("self/cgroup", "")
        self.passes(0.0, 0.0)

    def put(self, path: str, text: str) -> None:
        (self.folder / path).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / path).write_text(text)

    def set_groups(self, own_groups: str, **files: str) -> None:
        self.put("self/cgroup", own_groups)
        for path, text in files.items():
            self.put(f"cgroup/{path}", text)

    def passes(
        self, window_s: float, own_s: float, other_s=0.0, waited_s=0.0, stolen_s=0.0, child_s=0.0
    ) -> None:
        """Lets a window go by, in which the second of our threads waits."""
        self.clock_s += window_s
        self.own_s += own_s
        self.child_s += child_s
        self.used_s += own_s + child_s + other_s
        self.stolen_s += stolen_s
        self.waited_s += waited_s
        for task, wait_s, child in (
            ("self/task/1", 7.0, "77"),
            ("self/task/2", self.waited_s, ""),
            ("77/task/77", 0, ""),
        ):
            self.put(f"{task}/schedstat", f"5 {round(1e9 * wait_s)} 3\n")
            self.put(f"{task}/children", child)
        ticks = round(100 * self.child_s)
        self.put("77/stat", f"77 (a ) b) S 1 1 1 0 0 0 0 0 0 0 0 0 0 {ticks} 0 20 0 1\n")
        user, stolen = round(100 * self.used_s), round(100 * self.stolen_s)
        self.put("stat", f"cpu  {user} 0 0 4000 50 0 0 {stolen} 0 0\ncpu0 0 0\n")


@pytest.fixture
def host(tmp_path, monkeypatch):
    return FakeHost(tmp_path, monkeypatch)


WINDOWS = {
    "idle": (False, {"window_s": 1.0, "own_s": 1.9, "other_s": 0.03, "waited_s": 0.02}),
    "busy core": (True, {"window_s": 1.0, "own_s": 1.5, "other_s": 0.5, "waited_s": 0.48}),
    "more threads than cores": (False, {"window_s": 1.0, "own_s": 1.99, "waited_s": 0.5}),
    "our child": (False, {"window_s": 1.0, "own_s": 0.1, "child_s": 1.8, "waited_s": 0.4}),
    "hypervisor": (True, {"window_s": 1.0, "own_s": 1.0, "stolen_s": 0.6}),
    "one time slice": (True, {"window_s": 0.006, "own_s": 0.003, "waited_s": 0.003}),
    "waking up": (False, {"window_s": 0.006, "own_s": 0.005, "waited_s": 0.001}),
}


@pytest.mark.parametrize(("is_disturbed", "window"), WINDOWS.values(), ids=WINDOWS)
def test_a_window_is_disturbed_where_our_threads_wait_for_others(is_disturbed, window, host):
    with Monitor("cpu") as monitor:
        host.passes(**window)
    summary = monitor.summary
    assert summary["disturbed"] is is_disturbed and ("disturbed_by" in summary) is is_disturbed
    other_s = window.get("other_s", 0) + window.get("stolen_s", 0)
    cores, tolerance = other_s / window["window_s"], 0.011 / window["window_s"]
    assert summary["other_cpu_cores"] == pytest.approx(cores, abs=tolerance)


V1 = "9:cpuset:/a\n4:cpu,cpuacct:/docker/ab\n0::/docker/ab\n"
QUOTA, PERIOD = "cpu.cfs_quota_us", "cpu.cfs_period_us"
CONTROL_GROUPS = [
    ("0::/a/b\n", {"a/cpu.max": "20000 10000\n", "a/b/cpu.max": "300000 100000\n"}, 2.0),
    (V1, {f"cpu,cpuacct/{QUOTA}": "350000\n", f"cpu,cpuacct/{PERIOD}": "100000\n"}, 3.5),
]


@pytest.mark.parametrize(("own_groups", "files", "quota"), CONTROL_GROUPS)
def test_a_cpu_quota_is_seen_wherever_it_is_set(own_groups, files, quota, host, monkeypatch):
    host.set_groups(own_groups, **files)
    assert monitor_module.cpu_quota() == quota
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(10**6, 10**6 + 3))
    assert device_module.num_usable_cores() == min(3, int(quota))


@pytest.mark.parametrize(("throttled_s", "is_disturbed"), [(0.8, True), (0.04, False)])
def test_a_window_in_which_the_own_quota_stopped_it_is_disturbed(throttled_s, is_disturbed, host):
    def counted(total_s: float) -> None:
        text = f"nr_periods 90\nthrottled_time {round(1e9 * total_s)}\n"
        host.set_groups(V1, **{"cpu,cpuacct/docker/ab/cpu.stat": text})

    counted(7)
    with Monitor("cpu") as monitor:
        counted(7 + throttled_s)
        host.passes(window_s=1.0, own_s=0.2, waited_s=throttled_s)  # nobody else runs
    assert monitor.summary["disturbed"] is is_disturbed
    said = "its own CPU quota stopped it 80 % of the time, over all cores"
    assert monitor.summary.get("disturbed_by") == (said if is_disturbed else None)


WATCHED = """
import sys, time
from labkit.monitor import Monitor
with Monitor("cpu") as monitor:
    print("begun", flush=True)
    sys.stdin.readline()
    if sys.argv[1] == "computing":  # the interpreter is held, so that no other thread runs
        sum(range(2 * 10**7))
print(monitor.summary)
"""


@pytest.mark.parametrize("what", ["stopped", "computing"])
def test_a_process_that_was_stopped_says_so_and_one_that_computes_does_not(what):
    command = [sys.executable, "-c", WATCHED, what]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as child:
        assert child.stdout.readline() == "begun\n"
        if what == "stopped":
            os.kill(child.pid, signal.SIGSTOP)
            time.sleep(0.5)
            os.kill(child.pid, signal.SIGCONT)
        summary, _ = child.communicate("on\n", timeout=60)
    assert ("the process was stopped for " in summary) is (what == "stopped"), summary
