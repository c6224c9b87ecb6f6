"""What goes on beside a measurement: load of the host, CPU quota, what the GPU says of itself.

Nothing here imports torch but `_nvml_handle`, for the UUID of torch's GPU.
"""

import contextlib
import itertools
import multiprocessing
import os
import re
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")

THROTTLE_REASONS = {
    0x4: "software power cap",
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}
"""NVML's nvmlClocksEventReason bits that mean throttling (idling and clocks set by the user do
not).
"""

BUSY_FRACTION = 0.05
"""A window is disturbed if others used this many cores and our threads waited for this fraction of
it.
"""

SHORTEST_WAIT_S = 0.002
"""Shorter waits in a whole window come from waking up, even on an idle machine. A time slice is
longer.
"""

SHORTEST_STOP_S = 0.1
"""A process that neither runs nor means to sleep for longer was stopped: by a signal, with its
virtual machine, or its clock was set.
"""

LONGEST_COUNT_S = 0.03
"""The energy counter usually takes 7 ms. When it counted is not known where the driver holds a
reading up for longer: on an H200 beside another at work one read 507 W at the limit of 700 W.
"""

LOAD = ("other_cpu_cores", "cpu_wait_fraction")
"""What a monitor says of the host beside whether that disturbed."""


def _cpu_files(*names: str) -> Iterator[str]:
    """Yields the text of these files for each control group that shares out CPU time to this
    process, v1 and v2.
    """
    with contextlib.suppress(OSError):  # no control groups
        for line in (PROC / "self" / "cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "cpu" not in controllers.split(","):
                continue
            # A container sees its own group as the root, whatever the path says.
            inner = [name for name in path.split("/") if name not in ("", "..")]
            for folder in itertools.accumulate(inner, Path.joinpath, initial=CGROUPS / controllers):
                with contextlib.suppress(OSError):  # this version or level has no such file
                    yield " ".join((folder / name).read_text() for name in names)


def cpu_quota() -> float | None:
    """Returns the cores whose time the control groups of this process leave it (Linux); None
    without a quota.
    """
    texts = [*_cpu_files("cpu.max"), *_cpu_files("cpu.cfs_quota_us", "cpu.cfs_period_us")]
    limits = [re.match(r"(\d+)\s+(\d+)", text) for text in texts]  # "max", or -1, is none
    return min((int(limit[1]) / int(limit[2]) for limit in limits if limit), default=None)


def descendants(pid: str = "self") -> Iterator[str]:
    """Yields the living descendants of process `pid`."""
    with contextlib.suppress(OSError):  # it has ended meanwhile
        for task in (PROC / pid / "task").iterdir():
            for child in (task / "children").read_text().split():
                yield child
                yield from descendants(child)


class _HostReading(NamedTuple):
    """Counters of the kernel's scheduler at `time_s`, in seconds.

    CPU time of all processes and the hypervisor (`used_s`), of the hypervisor per core
    (`stolen_s`), of this process and its descendants (`own_s`); how long each of their threads
    (`waited_s`) was ready to run and had no core; how long the quota kept cores from its group
    (`throttled_s`).
    """

    time_s: float
    used_s: float
    stolen_s: float
    own_s: float
    waited_s: dict[str, float]
    throttled_s: float


def _host_reading() -> _HostReading | None:
    """Returns the current counters; None where the system has none, as some sandboxes."""
    try:
        ticks_per_s = os.sysconf("SC_CLK_TCK")
        ticks = [int(text) for text in (PROC / "stat").read_text().split()[1:9]]
        waited_s = _waits("self")
    except OSError:
        return None
    own_s = time.process_time() + sum(os.times()[2:4])
    for pid in descendants():
        with contextlib.suppress(OSError):  # it has ended meanwhile
            after_name = (PROC / pid / "stat").read_text().rpartition(")")[2].split()
            own_s += sum(map(int, after_name[11:15])) / ticks_per_s
            waited_s |= _waits(pid)
    # For how long the quota kept cores from this process's groups, summed over cores.
    throttled = re.findall(r"\bthrottled_(usec|time) (\d+)", " ".join(_cpu_files("cpu.stat")))
    units = {"usec": 1e-6, "time": 1e-9}  # of v2 and v1
    _, _, _, idle, waiting, _, _, stolen = ticks
    return _HostReading(
        time_s=time.monotonic(),
        used_s=(sum(ticks) - idle - waiting) / ticks_per_s,
        stolen_s=stolen / ticks_per_s / (os.cpu_count() or 1),
        own_s=own_s,
        waited_s=waited_s,
        throttled_s=sum(int(number) * units[unit] for unit, number in throttled),
    )


def _waits(pid: str) -> dict[str, float]:
    """Returns for how long each thread of a process was ready to run and had no core."""
    return {
        task.name: int((task / "schedstat").read_text().split()[1]) / 1e9
        for task in (PROC / pid / "task").iterdir()
    }


def _host_load(begin: _HostReading, end: _HostReading) -> tuple[dict[str, Any], list[str]]:
    """Returns the host's load between two readings, and what slowed this process down.

    Another process disturbs only if a thread of ours waits for its core: one busy core of 16 does
    not. Threads also wait a little on waking up, and long where this process has more threads than
    cores, so others must have run too.
    """
    window_s = max(end.time_s - begin.time_s, 1e-9)
    other_s = max(0.0, (end.used_s - begin.used_s) - (end.own_s - begin.own_s))
    longest_s = max(total - begin.waited_s.get(task, 0.0) for task, total in end.waited_s.items())
    waited_s = longest_s + end.stolen_s - begin.stolen_s
    throttled_s = end.throttled_s - begin.throttled_s
    load = {
        "other_cpu_cores": round(other_s / window_s, 4),
        "cpu_wait_fraction": round(waited_s / window_s, 4),
    }
    causes = []
    # CPU time is counted in ticks, so in a short window the time of others may not show.
    others_ran = other_s + 1 / os.sysconf("SC_CLK_TCK") >= BUSY_FRACTION * window_s
    if others_ran and waited_s >= max(SHORTEST_WAIT_S, BUSY_FRACTION * window_s):
        causes.append(
            f"other processes used {load['other_cpu_cores']:.2g} CPU cores and a thread waited "
            f"for a core {100 * load['cpu_wait_fraction']:.0f} % of the time"
        )
    if throttled_s >= BUSY_FRACTION * window_s:
        causes.append(
            f"its own CPU quota stopped it {100 * throttled_s / window_s:.0f} % of the time, over "
            f"all cores"
        )
    return load, causes


@contextlib.contextmanager
def open_nvml() -> Iterator[tuple[Any, Any]]:
    """Gives pynvml initialised, None where there is no NVIDIA driver or no nvidia-ml-py, and its
    handle of torch's cuda:0, None also where this process may not ask about the GPU.
    """
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no package, no driver, no permission
        yield None, None
        return
    try:
        yield pynvml, _nvml_handle(pynvml)
    finally:
        pynvml.nvmlShutdown()


def _nvml_handle(nvml: Any) -> Any:
    """Returns NVML's handle of torch's cuda:0, None where it gives none, as in a container without
    leave to ask: CUDA_VISIBLE_DEVICES does not affect NVML's order, whose first may be another GPU.
    """
    import torch

    if torch.cuda.is_available():
        uuid = torch.cuda.get_device_properties(0).uuid
        for kind in ("GPU", "MIG"):
            with contextlib.suppress(nvml.NVMLError):
                return nvml.nvmlDeviceGetHandleByUUID(f"{kind}-{uuid}")
    return None


def foreign_processes(nvml: Any, handle: Any) -> int:
    """Returns how many processes of others use the GPU, 0 where NVML does not say."""
    try:
        running = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except nvml.NVMLError:
        return 0
    own = {os.getpid(), *map(int, descendants())}
    if session := multiprocessing.parent_process():
        own.add(session.pid)
    return sum(process.pid not in own for process in running)


class Reading(NamedTuple):
    """What a GPU says of itself at `time_s` of `time.perf_counter`, in NVML's units; None for what
    it does not say.
    """

    time_s: float
    energy_mj: int | None
    sm_clock_mhz: int | None
    power_mw: int | None
    temperature_c: int | None
    throttle_mask: int | None


def _throttle_reasons(masks: list[int]) -> list[str]:
    return sorted(
        text for bit, text in THROTTLE_REASONS.items() if any(mask & bit for mask in masks)
    )


class Monitor:
    """Samples the host's load and, on a GPU, its SM clock, power, temperature and throttle reasons
    during a block.

    Afterwards `summary` holds what this machine reports of them, `disturbed` (whether something
    slowed the block down) and `disturbed_by` (what: other processes, a CPU quota, a stop of this
    process); `readings` has the samples. The sampling thread sleeps between readings of about a
    millisecond, and NVML's calls release the interpreter. Only the energy counter takes 7 ms, in
    which the host issues work more slowly: it is read where `wants_energy` says so of the time.
    """

    def __init__(
        self,
        device_kind: str,
        interval_s: float = 0.1,
        wants_energy: Callable[[float], bool] = lambda time_s: False,
    ):
        self.device_kind = device_kind
        self.interval_s = interval_s
        self.wants_energy = wants_energy
        self.summary: dict[str, Any] = {}
        self.readings: list[Reading] = []
        self._is_over = threading.Event()
        self._resources = contextlib.ExitStack()
        self._lost_s = 0.0

    def __enter__(self) -> "Monitor":
        self._handle = None
        if self.device_kind == "cuda":
            self._nvml, self._handle = self._resources.enter_context(open_nvml())
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._begin = _host_reading()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()
        end = _host_reading()  # the sampling thread has ended, so that its waits do not count
        causes = []
        stopped_s = self._lost_s
        if self._begin and end:
            load, causes = _host_load(self._begin, end)
            self.summary |= load
            # On a machine that others keep busy, time is lost in waiting for a core.
            stopped_s -= load["cpu_wait_fraction"] * (end.time_s - self._begin.time_s)
        if stopped_s > SHORTEST_STOP_S:
            causes.append(f"the process was stopped for {stopped_s:.2g} s")
        if self._handle:
            if not self.readings:
                self._read()
            self.summary |= self._gpu_summary()
            others = foreign_processes(self._nvml, self._handle)
            if others:
                self.summary["foreign_processes"] = others
                causes.append(f"other processes on the GPU: {others}")
        self._resources.close()
        if self.summary or causes:
            self.summary["disturbed"] = bool(causes)
        if causes:
            self.summary["disturbed_by"] = "; ".join(causes)

    def _run(self) -> None:
        is_over = False
        while not is_over:
            begin_s = time.perf_counter()
            begin_cpu_s = time.process_time()
            is_over = self._is_over.wait(self.interval_s)
            # A thread that holds the interpreter meanwhile computes.
            computed_s = time.process_time() - begin_cpu_s
            lost_s = time.perf_counter() - begin_s - self.interval_s - computed_s
            if lost_s > SHORTEST_STOP_S:
                self._lost_s += lost_s
            if self._handle and not is_over:
                self._read()

    def _read(self) -> None:
        nvml = self._nvml
        time_s = time.perf_counter()

        def ask(query: Callable[..., int], *which: int) -> int | None:
            try:
                return query(self._handle, *which)
            except nvml.NVMLError:
                return None

        energy_mj = None
        if self.wants_energy(time_s):
            energy_mj = ask(nvml.nvmlDeviceGetTotalEnergyConsumption)
            if time.perf_counter() - time_s > LONGEST_COUNT_S:
                energy_mj = None
        reading = Reading(
            time_s,
            energy_mj,
            ask(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_SM),
            ask(nvml.nvmlDeviceGetPowerUsage),
            ask(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU),
            ask(nvml.nvmlDeviceGetCurrentClocksThrottleReasons),
        )
        if any(value is not None for value in reading[1:]):
            self.readings.append(reading)

    def _gpu_summary(self) -> dict[str, Any]:
        summary = {}
        for name, field, statistic in (
            ("sm_clock_mhz_median", "sm_clock_mhz", statistics.median_high),
            ("power_w_max", "power_mw", lambda values: max(values) / 1000),
            ("temperature_c_max", "temperature_c", max),
            ("throttle_reasons", "throttle_mask", _throttle_reasons),
        ):
            values = [getattr(reading, field) for reading in self.readings]
            known = [value for value in values if value is not None]
            if known:
                summary[name] = statistic(known)
        return summary
