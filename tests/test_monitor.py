"""A measurement says what disturbed it: other processes, a quota, a stop, a throttled GPU."""

import functools
import os
import signal
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import pytest

from labkit import device
from labkit import monitor as monitor_module
from labkit.device import Device, checks
from labkit.monitor import Monitor

SOME_CPU = Device("cpu", "AMD EPYC 7763 64-Core Processor", "cpu-amd-epyc-7763")

LOAD = {*monitor_module.LOAD, "disturbed", "disturbed_by"}
"""What a monitor says of the host, in the measure in which the system tells."""


def of_the_gpu(summary: dict) -> dict:
    return {name: value for name, value in summary.items() if name not in LOAD}


@pytest.mark.parametrize("kind", ["cpu", "mps", "cuda"])
def test_the_monitor_off_the_gpu_or_without_nvml_asks_no_gpu(monkeypatch, kind):
    loaded = []
    if kind == "cuda":
        monkeypatch.setitem(sys.modules, "pynvml", None)
    else:
        monkeypatch.setattr(
            monitor_module,
            "open_nvml",
            lambda: types.SimpleNamespace(__enter__=lambda: loaded.append(1)),
        )
    before = threading.active_count()
    with Monitor(kind, interval_s=0.001) as monitor:
        pass
    assert threading.active_count() == before, "the thread goes on"
    assert of_the_gpu(monitor.summary) == {}
    assert not loaded, "NVML was opened for a device that has none"


QUERIES = (
    "nvmlDeviceGetTotalEnergyConsumption",
    "nvmlDeviceGetClockInfo",
    "nvmlDeviceGetPowerUsage",
    "nvmlDeviceGetTemperature",
    "nvmlDeviceGetCurrentClocksThrottleReasons",
)


class FakeNvml(types.ModuleType):
    """NVML of a GPU with the readings given, as pynvml spells it; the last one is repeated,
    `refused` queries fail.
    """

    NVMLError = type("NVMLError", (Exception,), {})
    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    def __init__(self, monkeypatch, readings, pids=(), refused=()):
        super().__init__("pynvml")
        monkeypatch.setitem(sys.modules, "pynvml", self)
        self.readings, self.refused, self.position, self.open = readings, refused, 0, 0
        self.all_read = threading.Event()
        self.nvmlInit, self.nvmlShutdown = (functools.partial(self.hold, by) for by in (1, -1))
        self.nvmlDeviceGetHandleByIndex = self.nvmlDeviceGetHandleByUUID = lambda index: (
            f"gpu {index}"
        )
        self.nvmlDeviceGetComputeRunningProcesses = lambda _: [
            types.SimpleNamespace(pid=pid) for pid in pids
        ]
        for query in QUERIES:
            setattr(self, query, functools.partial(self.answer, query))

    def hold(self, by):
        self.open += by

    def answer(self, query, *_):
        if query in self.refused:
            raise self.NVMLError
        answers = (1000 * self.position, *self.readings[self.position])
        if query == QUERIES[-1]:
            self.position = min(self.position + 1, len(self.readings) - 1)
            if self.position == len(self.readings) - 1:
                self.all_read.set()
        return answers[QUERIES.index(query)]


def test_the_monitor_sums_up_what_the_gpu_did(monkeypatch):
    idle, power_cap, hot, application_setting = 0x1, 0x4, 0x40, 0x2
    readings = [
        (1980, 650_000, 60, idle),
        (1700, 700_500, 71, power_cap | hot),
        (1900, 690_000, 70, application_setting),
    ]
    nvml = FakeNvml(monkeypatch, readings, pids=(os.getpid(), 1))
    before = threading.active_count()
    with Monitor("cuda", interval_s=0.001, wants_energy=lambda time_s: time_s > 0) as monitor:
        assert nvml.all_read.wait(timeout=20.0)
        assert nvml.open == 1
    assert nvml.open == 0, "NVML stays open"
    assert threading.active_count() == before, "the thread goes on"
    summary = monitor.summary
    assert len(monitor.readings) >= 2
    assert monitor.readings == sorted(monitor.readings) and monitor.readings[0][1:4] == (
        0,
        1980,
        650_000,
    )
    assert (summary["power_w_max"], summary["temperature_c_max"]) == (700.5, 71)
    # Neither idling nor a clock that the user set is throttling.
    assert summary["throttle_reasons"] == ["hardware thermal slowdown", "software power cap"]
    assert summary["foreign_processes"] == 1
    assert summary["disturbed"] and "1 other process on the GPU" in summary["disturbed_by"]


def test_the_monitor_ends_with_a_block_that_fails(monkeypatch):
    nvml = FakeNvml(monkeypatch, [(1980, 100_000, 40, 0)])
    before = threading.active_count()
    with pytest.raises(KeyError), Monitor("cuda", interval_s=0.001):
        raise KeyError
    assert threading.active_count() == before and nvml.open == 0


EVERYTHING = {
    "sm_clock_mhz_median": 1980,
    "power_w_max": 100.0,
    "temperature_c_max": 40,
    "throttle_reasons": ["hardware power brake"],
}


@pytest.mark.parametrize(
    ("refused", "lacks"),
    [
        ((), ()),
        (QUERIES[:1], ()),
        (QUERIES[1:2], ("sm_clock_mhz_median",)),
        (QUERIES[2:3], ("power_w_max",)),
        (QUERIES[3:4], ("temperature_c_max",)),
        (QUERIES[4:], ("throttle_reasons",)),
        (QUERIES, EVERYTHING),
    ],
)
def test_a_window_shorter_than_the_interval_has_one_reading_of_what_the_gpu_says(
    monkeypatch, refused, lacks
):
    nvml = FakeNvml(monkeypatch, [(1980, 100_000, 40, 0x80)], (os.getpid(),), refused)
    with (
        Monitor("cuda", interval_s=60.0) as unasked,
        Monitor("cuda", 60.0, lambda time_s: True) as monitor,
    ):
        pass
    assert all(reading.energy_mj is None for reading in unasked.readings)
    assert of_the_gpu(monitor.summary) == {
        name: value for name, value in EVERYTHING.items() if name not in lacks
    }
    missing = [[value is None for value in reading[1:]] for reading in monitor.readings]
    assert missing == ([] if refused == QUERIES else [[query in refused for query in QUERIES]])
    assert nvml.open == 0


class FakeHost:
    """The kernel's counters as /proc gives them, all in seconds since the machine was started."""

    def __init__(self, folder: Path, monkeypatch):
        self.folder, self.clock_s, self.own_s = folder, 100.0, 50.0
        self.groups, self.own_groups = {}, ""
        monkeypatch.setattr(monitor_module, "CGROUPS", folder / "cgroup")
        monkeypatch.setattr(monitor_module, "PROC", folder)
        monkeypatch.setattr(monitor_module.time, "monotonic", lambda: self.clock_s)
        monkeypatch.setattr(monitor_module.time, "process_time", lambda: self.own_s)
        monkeypatch.setattr(monitor_module.os, "sysconf", lambda name: 100)
        monkeypatch.setattr(monitor_module.os, "cpu_count", lambda: 2)
        self.used_s, self.stolen_s, self.child_s, self.waits_s = (
            90.0,
            1.0,
            3.0,
            {"1": 7.0, "2": 9.0},
        )
        self.write()

    def write(self) -> None:
        tasks = {("self", task): wait_s for task, wait_s in self.waits_s.items()} | {
            ("77", "77"): 0.0
        }
        for (pid, task), wait_s in tasks.items():
            (self.folder / pid / "task" / task).mkdir(parents=True, exist_ok=True)
            (self.folder / pid / "task" / task / "schedstat").write_text(
                f"5 {round(1e9 * wait_s)} 3\n"
            )
            (self.folder / pid / "task" / task / "children").write_text(
                "77 " if task == "1" else ""
            )
        ticks = f"0 0 0 {round(100 * self.child_s)} 0"
        (self.folder / "77" / "stat").write_text(
            f"77 (a ) b) S 1 1 1 0 0 0 0 0 0 0 {ticks} 20 0 1\n"
        )
        user, stolen = round(100 * self.used_s), round(100 * self.stolen_s)
        (self.folder / "stat").write_text(f"cpu  {user} 0 0 4000 50 0 0 {stolen} 0 0\ncpu0 0 0\n")
        for folder, files in self.groups.items():
            (self.folder / "cgroup" / folder).mkdir(parents=True, exist_ok=True)
            for name, text in files.items():
                (self.folder / "cgroup" / folder / name).write_text(text)
        (self.folder / "self" / "cgroup").write_text(self.own_groups)
        (self.folder / "pressure").mkdir(exist_ok=True)
        total = round(1e6 * sum(self.waits_s.values()))
        (self.folder / "pressure" / "cpu").write_text(
            f"some avg10=0.00 avg60=0.00 avg300=0.00 total={total}\n"
        )

    def passes(
        self, window_s: float, own_s: float, other_s=0.0, waited_s=0.0, stolen_s=0.0, child_s=0.0
    ) -> None:
        """Lets a window go by, in which the second of our threads waits."""
        self.clock_s += window_s
        self.own_s += own_s
        self.child_s += child_s
        self.used_s += own_s + child_s + other_s
        self.stolen_s += stolen_s
        self.waits_s["2"] += waited_s
        self.write()


@pytest.mark.parametrize(
    ("window", "disturbed"),
    [
        ({"window_s": 1.0, "own_s": 1.9, "other_s": 0.03, "waited_s": 0.02}, False),
        ({"window_s": 1.0, "own_s": 1.5, "other_s": 0.5, "waited_s": 0.48}, True),
        ({"window_s": 1.0, "own_s": 1.0, "other_s": 0.99, "waited_s": 0.01}, False),
        ({"window_s": 1.0, "own_s": 1.99, "waited_s": 0.5}, False),
        ({"window_s": 1.0, "own_s": 0.1, "child_s": 1.8, "waited_s": 0.4}, False),
        ({"window_s": 1.0, "own_s": 1.0, "stolen_s": 0.6}, True),
        ({"window_s": 0.006, "own_s": 0.003, "waited_s": 0.003}, True),
        ({"window_s": 0.006, "own_s": 0.005, "waited_s": 0.001}, False),
    ],
    ids=[
        "idle",
        "busy core",
        "busy core that is not ours",
        "more threads than cores",
        "our own child",
        "hypervisor",
        "one time slice",
        "waking up",
    ],
)
def test_a_window_is_disturbed_where_our_threads_wait_for_other_processes(
    window, disturbed, tmp_path, monkeypatch
):
    host = FakeHost(tmp_path, monkeypatch)
    with Monitor("cpu") as monitor:
        host.passes(**window)
    summary = monitor.summary
    assert summary["disturbed"] is disturbed and ("disturbed_by" in summary) is disturbed
    other_s = window.get("other_s", 0) + window.get("stolen_s", 0)
    assert summary["other_cpu_cores"] == pytest.approx(
        other_s / window["window_s"], abs=0.011 / window["window_s"]
    )
    assert summary["cpu_pressure"] == pytest.approx(
        window.get("waited_s", 0) / window["window_s"], abs=1e-3
    )


V1 = "9:cpuset:/a\n4:cpu,cpuacct:/docker/ab\n0::/docker/ab\n"
CONTROL_GROUPS = [
    # v2: no group, at the root, in a nested group, above it; v1: none, its own, seen from inside a
    # container.
    ("", {}, None),
    ("0::/\n", {".": {"cpu.max": "max 100000\n"}}, None),
    ("0::/\n", {".": {"cpu.max": "50000 100000\n"}}, 0.5),
    ("0::/a/b\n", {"a": {"cpu.max": "max 100000\n"}, "a/b": {"cpu.max": "150000 100000\n"}}, 1.5),
    ("0::/a/b\n", {"a": {"cpu.max": "20000 10000\n"}, "a/b": {"cpu.max": "300000 100000\n"}}, 2.0),
    ("0::/../../a\n", {"a": {"cpu.max": "250000 100000\n"}}, 2.5),
    (
        V1,
        {"cpu,cpuacct/docker/ab": {"cpu.cfs_quota_us": "-1\n", "cpu.cfs_period_us": "100000\n"}},
        None,
    ),
    (
        V1,
        {"cpu,cpuacct/docker/ab": {"cpu.cfs_quota_us": "20000\n", "cpu.cfs_period_us": "100000\n"}},
        0.2,
    ),
    (V1, {"cpu,cpuacct": {"cpu.cfs_quota_us": "350000\n", "cpu.cfs_period_us": "100000\n"}}, 3.5),
    (V1, {"cpuset/a": {"cpu.cfs_quota_us": "10000\n", "cpu.cfs_period_us": "100000\n"}}, None),
]


@pytest.mark.parametrize(("own_groups", "groups", "quota"), CONTROL_GROUPS)
def test_a_cpu_quota_is_seen_wherever_it_is_set(own_groups, groups, quota, tmp_path, monkeypatch):
    host = FakeHost(tmp_path, monkeypatch)
    host.own_groups, host.groups = own_groups, groups
    host.write()
    assert monitor_module.cpu_quota() == quota
    monkeypatch.setattr(monitor_module.os, "sched_getaffinity", lambda pid: range(10**6, 10**6 + 3))
    assert device.num_usable_cores() == (min(3, max(1, int(quota))) if quota else 3)
    monkeypatch.setattr(device, "detect", lambda: SOME_CPU)
    (check,) = (check for check in checks(str) if check.name == "no CPU quota")
    assert check.present is (quota is None) and (
        quota is None or check.detail.startswith(f"{quota:.2g} cores")
    )


@pytest.mark.parametrize(
    ("own_groups", "folder", "line", "per_s"),
    [
        ("0::/a/b\n", "a/b", "throttled_usec", 1e6),
        ("0::/a/b\n", "a", "throttled_usec", 1e6),
        (V1, "cpu,cpuacct/docker/ab", "throttled_time", 1e9),
    ],
)
@pytest.mark.parametrize(("throttled_s", "disturbed"), [(0.8, True), (0.04, False)])
def test_a_window_in_which_the_own_quota_stopped_it_is_disturbed(
    own_groups, folder, line, per_s, throttled_s, disturbed, tmp_path, monkeypatch
):
    host = FakeHost(tmp_path, monkeypatch)
    host.own_groups = own_groups
    for total_s in (7.0, 7.0 + throttled_s):
        host.groups = {
            folder: {
                "cpu.stat": f"nr_periods 90\nnr_throttled 85\n{line} {round(per_s * total_s)}\n"
            }
        }
        if total_s == 7.0:
            host.write()
            monitor = Monitor("cpu").__enter__()
    host.passes(window_s=1.0, own_s=0.2, waited_s=throttled_s)  # nobody else runs
    monitor.__exit__()
    assert monitor.summary["disturbed"] is disturbed
    if disturbed:
        assert (
            monitor.summary["disturbed_by"]
            == "its own CPU quota stopped it 80 % of the time, over all cores"
        )


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


@pytest.mark.parametrize(
    ("what", "said"), [("stopped", "the process was stopped for "), ("computing", "")]
)
def test_a_process_that_was_stopped_says_so_and_one_that_computes_does_not(what, said):
    command = [sys.executable, "-c", WATCHED, what]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout.readline() == "begun\n"
        if what == "stopped":
            os.kill(child.pid, signal.SIGSTOP)
            time.sleep(0.5)
            os.kill(child.pid, signal.SIGCONT)
        summary, _ = child.communicate("on\n", timeout=60)
    assert ("was stopped" in summary) is bool(said), summary
    assert said in summary and ("'disturbed': True" in summary or not said)


def test_a_system_without_counters_says_nothing_of_its_load(tmp_path, monkeypatch):
    monkeypatch.setattr(monitor_module, "PROC", tmp_path)
    with Monitor("cpu") as monitor:
        pass
    assert monitor.summary == {}
