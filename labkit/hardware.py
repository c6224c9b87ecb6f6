"""Which device this is: its slug, its datasheet peaks with their source, its environment, its
clocks, its load.

torch is imported inside the functions that need it, so that reading a committed environment needs
none.
"""

import contextlib
import ctypes
import hashlib
import importlib.metadata
import itertools
import multiprocessing
import os
import platform
import re
import shutil
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from labkit import __version__
from labkit.configs import ALL_DEVICES, REPOSITORY


@dataclass(frozen=True)
class Datasheet:
    """Dense peaks of one product, as data/datasheets.toml says: TFLOP/s, and GB/s (1e9 B/s) of its
    memory.
    """

    pattern: str
    fp32_tflops: float
    memory_gb_per_s: float
    source: str
    tf32_tflops: float | None = None
    bf16_tflops: float | None = None

    def tflops(self, precision: str) -> float | None:
        """Returns the peak for "fp32", "tf32" or "bf16"; raises ValueError for another
        precision.
        """
        if precision not in ("fp32", "tf32", "bf16"):
            raise ValueError(f"unknown precision {precision!r}; accepted: fp32, tf32, bf16")
        return getattr(self, f"{precision}_tflops")


DATASHEETS = [
    Datasheet(**row)
    for row in tomllib.loads(
        (resources.files("labkit") / "data" / "datasheets.toml").read_text("utf-8")
    )["datasheets"]
]


def datasheet(device_name: str) -> Datasheet | None:
    """Returns the peaks of the product called `device_name`, None if it is not in the table.

    Laptop parts, slices of a GPU (MIG) and products whose name only contains another's have none:
    no number is better than one divided by another GPU's peak.
    """
    if re.search(r"\bMIG\b|Laptop|Max-Q|\d D$", device_name):
        return None
    return next(
        (sheet for sheet in DATASHEETS if re.search(rf"\b(?:{sheet.pattern})\b", device_name)), None
    )


@dataclass(frozen=True)
class Device:
    """The device that is measured: `kind` is "cuda", "mps" or "cpu"; `slug` names its folder."""

    kind: str
    name: str
    slug: str

    @property
    def default_profile(self) -> str:
        return "full" if self.kind == "cuda" else "smoke"

    @property
    def peaks(self) -> Datasheet | None:
        return datasheet(self.name) if self.kind == "cuda" else None


def slugify(name: str) -> str:
    """Returns `name` in lower case, with every run of characters other than letters and digits as
    one dash.

    >>> slugify("NVIDIA A100-SXM4-40GB")
    'nvidia-a100-sxm4-40gb'
    """
    name = re.sub(r"\((R|TM|C)\)|@.*$|\bCPU\b|\d+-Core Processor", " ", name)
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def detect() -> Device:
    """Returns the device labkit measures here: the first CUDA GPU, else Apple's mps, else the
    CPU.
    """
    kind = "cpu"
    if (
        "torch" in sys.modules or has_gpu_driver()
    ):  # importing torch just to learn that there is no GPU takes seconds
        import torch

        if torch.cuda.is_available():
            name = torch.cuda.get_device_name(0)
            return Device("cuda", name, slugify(name))
        kind = "mps" if torch.backends.mps.is_available() else "cpu"
    name = cpu_name()
    return Device(kind, name, f"{kind}-{slugify(name)}")


def measured_by(notebook: str) -> Device:
    """Returns what `notebook` measures here: `detect()`, of ALL_DEVICES all GPUs as one device,
    "2x-nvidia-h200".
    """
    device = detect()
    if device.kind != "cuda" or notebook not in ALL_DEVICES:
        return device
    import torch

    count = torch.cuda.device_count()
    return (
        replace(device, name=f"{count} × {device.name}", slug=f"{count}x-{device.slug}")
        if count > 1
        else device
    )


def gpu_links() -> str:
    """Returns how the first GPU is linked to others, "NVLink, 18 links" or "PCIe"; "unknown"
    without NVML.
    """
    with _nvml() as nvml:
        if nvml is None:
            return "unknown"
        handle, num_links = _nvml_handle(nvml), 0
        with contextlib.suppress(nvml.NVMLError):  # past the last link
            while nvml.nvmlDeviceGetNvLinkState(handle, num_links):
                num_links += 1
        return f"NVLink, {num_links} links" if num_links else "PCIe"


def device_key(device: Device) -> str:
    """Returns an identifier of this physical device: a GPU's UUID, else "cpu" or "mps"."""
    if device.kind != "cuda":
        return device.kind
    import torch

    return str(getattr(torch.cuda.get_device_properties(0), "uuid", device.slug))


def num_usable_cores() -> int:
    """Returns how many physical cores this process may use, the whole cores of its quota included
    (Linux only).
    """
    cores = set()
    for cpu in os.sched_getaffinity(0):
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.add(siblings.read_text() if siblings.exists() else cpu)
    quota = cpu_quota()
    return min(len(cores), max(1, int(quota))) if quota else len(cores)


CGROUPS = Path("/sys/fs/cgroup")


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


def has_gpu_driver() -> bool:
    """Returns False only where torch cannot have a GPU: on Linux without NVIDIA's driver library
    and AMD's device.
    """
    if sys.platform != "linux" or os.path.exists("/dev/kfd"):
        return True
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


@cache
def cpu_name() -> str:
    """Returns the processor's product name as the operating system gives it."""
    if sys.platform == "darwin":
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    with contextlib.suppress(OSError):
        if found := re.search(
            r"^model name\s*:(.*)$", Path("/proc/cpuinfo").read_text("utf-8"), re.MULTILINE
        ):
            return found[1].strip()
    return platform.processor() or platform.machine()


def software_versions() -> dict[str, str]:
    """Returns the versions a measurement depends on; "" for what is not there."""
    import torch

    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = ""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton,
        "cuda": torch.version.cuda or "",
        "driver": driver_version(),
        "labkit": __version__,
    }


def driver_version() -> str:
    """Returns the NVIDIA driver's version, "" without one."""
    with _nvml() as nvml:
        return nvml.nvmlSystemGetDriverVersion() if nvml else ""


@cache
def machine_id() -> str:
    """Returns eight hexadecimal digits that tell this machine from others of its device's name.

    They follow from the number of the operating system's installation, without one from the host's
    name. LABKIT_MACHINE takes their place where both change between runs, as in containers.
    """
    if given := os.environ.get("LABKIT_MACHINE"):
        return given
    number = Path("/etc/machine-id")
    own = number.read_text(encoding="utf-8") if number.exists() else ""
    return hashlib.sha256((own.strip() or platform.node()).encode()).hexdigest()[:8]


@cache
def source_state() -> dict[str, Any]:
    """Returns {"commit", "dirty"} of the code that runs.

    Where there is no git history, LABKIT_COMMIT and LABKIT_DIRTY ("0" or "1") give them; without
    these, commit is "unknown" and dirty None.
    """
    if commit := os.environ.get("LABKIT_COMMIT"):
        return {"commit": commit, "dirty": os.environ.get("LABKIT_DIRTY", "0") != "0"}
    if not shutil.which("git") or not (REPOSITORY / ".git").exists():
        return {"commit": "unknown", "dirty": None}

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(REPOSITORY), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        # Measuring writes under figures/ and re-renders the report; neither changes what is
        # measured.
        changed = git("status", "--porcelain", "--", ".", ":!figures", ":!report.md", ":!notebooks")
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(changed)}
    except subprocess.CalledProcessError:  # no commit yet, or a tree that git refuses to read
        return {"commit": "unknown", "dirty": None}


def environment(device: Device) -> dict[str, Any]:
    """Returns what a reader needs to judge and repeat a measurement; no host names, no paths."""
    import torch

    record: dict[str, Any] = {
        "device": asdict(device),
        "software": software_versions(),
        "source": source_state(),
        "os": f"{platform.system()} {platform.release()}",
        "cpu": {
            "name": cpu_name(),
            "num_cores": os.cpu_count(),
            "num_torch_threads": torch.get_num_threads(),
        },
    }
    if device.kind == "cuda":
        properties = torch.cuda.get_device_properties(0)
        record["gpu"] = {
            "num_gpus": torch.cuda.device_count(),
            "compute_capability": f"{properties.major}.{properties.minor}",
            "num_multiprocessors": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
            "l2_bytes": properties.L2_cache_size,
            **gpu_limits(),
        }
    record["datasheet"] = asdict(device.peaks) if device.peaks else None
    return record


@contextlib.contextmanager
def _nvml() -> Iterator[Any]:
    """Gives pynvml initialised, or None where there is no NVIDIA driver or no nvidia-ml-py."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no package, no driver, no permission
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def _nvml_handle(nvml: Any) -> Any:
    """Returns NVML's handle of torch's cuda:0 (CUDA_VISIBLE_DEVICES does not affect NVML's
    order).
    """
    import torch

    if torch.cuda.is_available():
        uuid = getattr(torch.cuda.get_device_properties(0), "uuid", None)
        with contextlib.suppress(nvml.NVMLError):  # an older torch has no UUID
            return nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    return nvml.nvmlDeviceGetHandleByIndex(0)


def gpu_limits() -> dict[str, Any]:
    """Returns the GPU's maximal clocks (MHz) and enforced power limit (W); {} without NVML."""
    with _nvml() as nvml:
        if nvml is None:
            return {}
        handle = _nvml_handle(nvml)
        return {
            "max_sm_clock_mhz": nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM),
            "max_memory_clock_mhz": nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_MEM),
            "power_limit_w": nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000,
        }


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

PROC = Path("/proc")

BUSY_FRACTION = 0.05
"""A window is disturbed if others used this many cores and our threads waited for this fraction of
it.
"""

SHORTEST_WAIT_S = 0.002
"""Shorter waits in a whole window come from waking up, even on an idle machine. A time slice is
longer.
"""

SHORTEST_STOP_S = 0.1
"""A process that shows no life for this much longer than it means to sleep was stopped: by a
signal, with its virtual machine, or its clock was set. A thread that holds the interpreter
meanwhile computes, or waits for a core.
"""


@dataclass(frozen=True)
class _HostReading:
    """Counters of the kernel's scheduler at `time_s`, in seconds.

    CPU time of all processes and the hypervisor (`used_s`), of the hypervisor per core
    (`stolen_s`), of this process and its descendants (`own_s`); how long each of their threads
    (`waited_s`), or any of the machine (`pressure_s`), was ready to run and had no core; how long
    the quota kept cores from its group (`throttled_s`, summed over cores).
    """

    time_s: float
    used_s: float
    stolen_s: float
    own_s: float
    waited_s: dict[str, float]
    pressure_s: float | None
    throttled_s: float


def _host_reading() -> _HostReading | None:
    """Returns the current counters; None where the system has none (anything but Linux)."""
    own_s, waited_s, pressure_s = time.process_time() + sum(os.times()[2:4]), {}, None
    try:
        ticks_per_s = os.sysconf("SC_CLK_TCK")
        ticks = [int(text) for text in (PROC / "stat").read_text().split("\n", 1)[0].split()[1:9]]
        _add_waits("self", waited_s)
    except (AttributeError, OSError):
        return None
    for pid in _descendants():
        with contextlib.suppress(OSError):  # it has ended meanwhile
            own_s += (
                sum(map(int, (PROC / pid / "stat").read_text().rpartition(")")[2].split()[11:15]))
                / ticks_per_s
            )
            _add_waits(pid, waited_s)
    with contextlib.suppress(OSError):
        pressure_s = (
            int((PROC / "pressure" / "cpu").read_text().split("\n", 1)[0].split("total=")[1]) / 1e6
        )
    used_s, stolen_s = (
        (sum(ticks) - ticks[3] - ticks[4]) / ticks_per_s,
        ticks[7] / ticks_per_s / (os.cpu_count() or 1),
    )
    return _HostReading(
        time.monotonic(), used_s, stolen_s, own_s, waited_s, pressure_s, _throttled_s()
    )


def _throttled_s() -> float:
    found = re.findall(r"\bthrottled_(usec|time) (\d+)", " ".join(_cpu_files("cpu.stat")))
    return sum(
        int(number) * (1e-6 if unit == "usec" else 1e-9) for unit, number in found
    )  # of v2, of v1 in ns


def _add_waits(pid: str, waited_s: dict[str, float]) -> None:
    for task in (PROC / pid / "task").iterdir():
        waited_s[task.name] = int((task / "schedstat").read_text().split()[1]) / 1e9


def _descendants(pid: str = "self") -> Iterator[str]:
    """Yields the living descendants of process `pid`."""
    with contextlib.suppress(OSError):  # it has ended meanwhile
        for task in (PROC / pid / "task").iterdir():
            for child in (task / "children").read_text().split():
                yield child
                yield from _descendants(child)


LOAD = ("other_cpu_cores", "cpu_wait_fraction", "cpu_pressure")
"""What a monitor says of the host beside whether that disturbed."""


def _host_load(begin: _HostReading, end: _HostReading) -> tuple[dict[str, Any], list[str]]:
    """Returns the host's load between two readings, and what slowed this process down.

    Another process disturbs only if a thread of ours waits for its core: one busy core of 16 does
    not. Threads also wait a little on waking up, and long where this process has more threads than
    cores, so others must have run too.
    """
    window_s = max(end.time_s - begin.time_s, 1e-9)
    other_s = max(0.0, (end.used_s - begin.used_s) - (end.own_s - begin.own_s))
    waited_s = max(
        waited_s - begin.waited_s.get(task, 0.0) for task, waited_s in end.waited_s.items()
    )
    waited_s += end.stolen_s - begin.stolen_s
    load = {
        "other_cpu_cores": round(other_s / window_s, 4),
        "cpu_wait_fraction": round(waited_s / window_s, 4),
    }
    if begin.pressure_s is not None and end.pressure_s is not None:
        load["cpu_pressure"] = round((end.pressure_s - begin.pressure_s) / window_s, 4)
    causes, throttled_s = [], end.throttled_s - begin.throttled_s
    # CPU time is counted in ticks, so in a short window the time of others may not show.
    others_ran = other_s + 1 / os.sysconf("SC_CLK_TCK") >= BUSY_FRACTION * window_s
    if others_ran and waited_s >= max(SHORTEST_WAIT_S, BUSY_FRACTION * window_s):
        causes.append(
            f"other processes used {load['other_cpu_cores']:.2g} CPU cores and a thread waited "
            f"for a core "
            f"{100 * load['cpu_wait_fraction']:.0f} % of the time"
        )
    if throttled_s >= BUSY_FRACTION * window_s:
        causes.append(
            f"its own CPU quota stopped it {100 * throttled_s / window_s:.0f} % of the time, over "
            f"all cores"
        )
    return load, causes


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


def throttle_reasons(readings: Iterable[Reading]) -> list[str]:
    """Returns why the GPU throttled at any of these readings."""
    masks = [reading.throttle_mask or 0 for reading in readings]
    return sorted(
        text for bit, text in THROTTLE_REASONS.items() if any(mask & bit for mask in masks)
    )


def _active_s(schedstat: Path) -> float:
    """Returns how long a thread has run or waited for a core."""
    try:
        return sum(map(int, schedstat.read_text().split()[:2])) / 1e9
    except OSError:  # where nothing tells work from a stop, all time counts as work
        return time.perf_counter()


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
        self.device_kind, self.interval_s, self.wants_energy = device_kind, interval_s, wants_energy
        self.summary: dict[str, Any] = {}
        self.readings: list[Reading] = []
        self._stop = threading.Event()
        self._opened = contextlib.ExitStack()
        self._stopped_s = 0.0

    def __enter__(self) -> "Monitor":
        self._module = self._opened.enter_context(_nvml()) if self.device_kind == "cuda" else None
        if self._module:
            self._handle = _nvml_handle(self._module)
        self._watched = PROC / "self" / "task" / str(threading.get_native_id()) / "schedstat"
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._begin = _host_reading()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        end = _host_reading()  # the sampling thread has ended, so that its waits do not count
        load, causes = _host_load(self._begin, end) if self._begin and end else ({}, [])
        if self._stopped_s:
            causes.append(f"the process was stopped for {self._stopped_s:.2g} s")
        gpu: dict[str, Any] = {}
        if self._module:
            if not self.readings:
                self._read()
            gpu = self._summarise()
            self._opened.close()
        if others := gpu.get("foreign_processes"):
            causes.append(f"{others} other process{'' if others == 1 else 'es'} on the GPU")
        self.summary = gpu | load
        if self.summary or causes:
            self.summary |= {"disturbed": bool(causes)} | (
                {"disturbed_by": "; ".join(causes)} if causes else {}
            )

    def _run(self) -> None:
        while self._goes_on():
            if self._module:
                self._read()

    def _goes_on(self) -> bool:
        """Returns after an interval whether the block still runs; counts how long the process was
        stopped meanwhile.
        """
        own = PROC / "thread-self" / "schedstat"
        begin_s, active_s, own_s = time.perf_counter(), _active_s(self._watched), _active_s(own)
        is_over = self._stop.wait(self.interval_s)
        active_s = _active_s(self._watched) - active_s
        # This thread too may wait for a core, on a machine that others keep busy.
        asleep_s = self.interval_s + _active_s(own) - own_s
        lost_s = time.perf_counter() - begin_s - max(asleep_s, active_s)
        if lost_s > SHORTEST_STOP_S:
            self._stopped_s += lost_s
        return not is_over

    def _read(self) -> None:
        nvml, time_s = self._module, time.perf_counter()

        def ask(query: Callable[..., int], *which: int) -> int | None:
            try:
                return query(self._handle, *which)
            except nvml.NVMLError:
                return None

        values = (
            ask(nvml.nvmlDeviceGetTotalEnergyConsumption) if self.wants_energy(time_s) else None,
            ask(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_SM),
            ask(nvml.nvmlDeviceGetPowerUsage),
            ask(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU),
            ask(nvml.nvmlDeviceGetCurrentClocksThrottleReasons),
        )
        if any(value is not None for value in values):
            self.readings.append(Reading(time_s, *values))

    def _summarise(self) -> dict[str, Any]:
        if not self.readings:
            return {}
        columns = (
            sorted(x for x in column if x is not None) or [None]
            for column in zip(*self.readings, strict=True)
        )
        _, _, clocks, powers, temperatures, masks = columns
        summary = {
            "sm_clock_mhz_median": clocks[len(clocks) // 2],
            "power_w_max": powers[-1] and powers[-1] / 1000,
            "temperature_c_max": temperatures[-1],
            "throttle_reasons": None if masks == [None] else throttle_reasons(self.readings),
        }
        known = {name: value for name, value in summary.items() if value is not None}
        others = foreign_processes(self._module, self._handle)
        return known | ({"foreign_processes": others} if others else {})


def foreign_processes(nvml: Any, handle: Any) -> int | None:
    """Returns how many processes of others use the GPU, None where NVML does not say."""
    try:
        running = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except nvml.NVMLError:
        return None
    session = multiprocessing.parent_process()
    own = {os.getpid(), session.pid if session else None, *map(int, _descendants())}
    return sum(process.pid not in own for process in running)


def find_nsys() -> str | None:
    """Returns the path of nsys, from PATH, an install of Nsight Systems or of Nsight Compute; else
    None.
    """
    if found := shutil.which("nsys"):
        return found
    for root in ("/opt/nvidia/nsight-systems", "/opt/nvidia/nsight-compute"):
        for folder, _, files in os.walk(root):
            if "nsys" in files and "target-linux" in folder:
                return os.path.join(folder, "nsys")
    return None


@dataclass(frozen=True)
class Check:
    """One line of `labkit doctor`: what was looked for, whether it is present, what its absence
    disables.
    """

    name: str
    present: bool
    detail: str
    disables: str = ""


def checks(nsys_failure: Callable[[], str] = str) -> list[Check]:
    """Returns what this machine has and lacks; `nsys_failure` says why the nsys that was found is
    of no use.
    """
    try:
        import torch
    except ImportError as error:
        return [
            Check("torch", False, str(error), "measuring anything; `labkit report` still works")
        ]
    device, driver, triton, nsys = (
        detect(),
        driver_version(),
        software_versions()["triton"],
        find_nsys(),
    )
    cuda, peaks, quota = device.kind == "cuda", device.peaks, cpu_quota()
    failure = nsys_failure() if nsys else ""
    compiler = (
        shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++") or shutil.which("clang++")
    )
    nccl = cuda and torch.distributed.is_available() and torch.distributed.is_nccl_available()
    found = [
        ("torch", True, torch.__version__, ""),
        ("device", True, f"{device.name} ({device.kind}), figures/{device.slug}/", ""),
        (
            "GPU",
            cuda,
            device.name if cuda else "no CUDA GPU",
            "the full profile; the smoke profile runs on the CPU",
        ),
        (
            "NVIDIA driver and NVML",
            driver,
            driver or "not found",
            "clocks, power and throttling in the records",
        ),
        ("triton", triton, triton or "not installed", "Triton kernels, torch.compile on a GPU"),
        (
            "C++ compiler",
            compiler,
            "found" if compiler else "not found",
            "torch.compile on the CPU",
        ),
        (
            "no CPU quota",
            not quota,
            f"{quota:.2g} cores by its control group" if quota else "none in force",
            "trust in timings of the CPU made now; what the quota stops is marked",
        ),
        (
            "datasheet peaks",
            peaks,
            peaks.source if peaks else "not in the table",
            "utilisation against the datasheet; the measured ceiling remains",
        ),
        (
            "nsys",
            nsys and not failure,
            failure or ("found" if nsys else "not found"),
            "Nsight Systems captures; torch.profiler is used",
        ),
        (
            "NCCL",
            nccl,
            "available" if nccl else "not available",
            "collectives between GPUs; gloo on the CPU remains",
        ),
    ]
    if cuda:
        with Monitor("cuda") as monitor:
            pass
        reasons, others = (
            monitor.summary.get("throttle_reasons"),
            monitor.summary.get("foreign_processes"),
        )
        clock = f"SM clock {monitor.summary.get('sm_clock_mhz_median')} MHz"
        found += [
            (
                "not throttled",
                not reasons,
                ", ".join(reasons or []) or clock,
                "trust in timings made now",
            ),
            (
                "GPU to itself",
                not others,
                f"{others or 0} other processes on the GPU",
                "trust in timings made now",
            ),
        ]
    return [
        Check(name, bool(has), detail, "" if has else disables)
        for name, has, detail, disables in found
    ]
