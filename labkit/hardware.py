"""Which device this is: its slug, its datasheet peaks with their source, its environment, its clocks.

torch is imported inside the functions that need it, so that reading a committed environment needs none.
"""

import ctypes
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
import threading
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

from labkit import __version__
from labkit.configs import REPOSITORY


@dataclass(frozen=True)
class Datasheet:
    """Dense peaks of one product as its maker prints them.

    Rates in TFLOP/s without sparsity, fp32 without tensor cores, bf16 with fp32 accumulation;
    bandwidth in GB/s (1e9 B/s). None where the product has no such unit.
    """

    pattern: str
    fp32_tflops: float
    tf32_tflops: float | None
    bf16_tflops: float | None
    memory_gb_per_s: float
    source: str

    def tflops(self, precision: str) -> float | None:
        """Returns the peak for "fp32", "tf32" or "bf16"; raises ValueError for another precision."""
        if precision not in ("fp32", "tf32", "bf16"):
            raise ValueError(f"unknown precision {precision!r}; accepted: fp32, tf32, bf16")
        return getattr(self, f"{precision}_tflops")


# The first pattern that occurs in the device's name counts, so the longer names come first.
DATASHEETS = (
    Datasheet(r"H200 NVL", 60.0, 417.5, 835.5, 4800, "NVIDIA H200 datasheet, H200 NVL"),
    Datasheet(r"H200", 66.9, 494.7, 989.4, 4800, "NVIDIA H200 datasheet, H200 SXM"),
    Datasheet(r"H100 PCIe", 51.2, 378.0, 756.0, 2000, "NVIDIA H100 PCIe product brief"),
    Datasheet(r"H100 NVL", 60.0, 417.5, 835.5, 3900, "NVIDIA H100 datasheet, H100 NVL"),
    Datasheet(r"H100", 66.9, 494.7, 989.4, 3350, "NVIDIA H100 datasheet, H100 SXM"),
    Datasheet(r"A100.*80GB.*PCIe|A100-PCIE-80GB", 19.5, 156.0, 312.0, 1935, "NVIDIA A100 datasheet, 80GB PCIe"),
    Datasheet(r"A100.*80GB", 19.5, 156.0, 312.0, 2039, "NVIDIA A100 datasheet, 80GB SXM"),
    Datasheet(r"A100", 19.5, 156.0, 312.0, 1555, "NVIDIA A100 datasheet, 40GB"),
    Datasheet(r"A10G", 35.0, 35.0, 70.0, 600, "NVIDIA A10G datasheet"),
    Datasheet(r"A10", 31.2, 62.5, 125.0, 600, "NVIDIA A10 datasheet"),
    Datasheet(r"L40S", 91.6, 183.0, 362.05, 864, "NVIDIA L40S datasheet"),
    Datasheet(r"L4", 30.3, 60.0, 121.0, 300, "NVIDIA L4 datasheet"),
    Datasheet(r"RTX 5090", 104.8, 104.8, 209.5, 1792, "NVIDIA RTX Blackwell GPU architecture whitepaper"),
    Datasheet(r"RTX 4090", 82.6, 82.6, 165.2, 1008, "NVIDIA Ada GPU architecture whitepaper"),
    Datasheet(r"RTX 3090 Ti", 40.0, 40.0, 80.0, 1008, "NVIDIA Ampere GA102 GPU architecture whitepaper"),
    Datasheet(r"RTX 3090", 35.6, 35.6, 71.0, 936, "NVIDIA Ampere GA102 GPU architecture whitepaper"),
    Datasheet(r"V100-SXM2", 15.7, None, None, 900, "NVIDIA V100 datasheet, SXM2"),
    Datasheet(r"T4", 8.1, None, None, 320, "NVIDIA T4 datasheet"),
)


def datasheet(device_name: str) -> Datasheet | None:
    """Returns the peaks of the product called `device_name`, None if it is not in the table.

    There is no default: a number divided by another GPU's peak is worse than no number. So a laptop's part, a
    slice of a GPU (MIG) and a product whose name only contains another's have none either.
    """
    if re.search(r"\bMIG\b|Laptop|Max-Q|\d D$", device_name):
        return None
    for sheet in DATASHEETS:
        if re.search(rf"\b(?:{sheet.pattern})\b", device_name):
            return sheet
    return None


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
    """Returns `name` in lower case with every run of other characters than letters and digits as one dash.

    >>> slugify("NVIDIA A100-SXM4-40GB")
    'nvidia-a100-sxm4-40gb'
    """
    name = re.sub(r"\((R|TM|C)\)|@.*$|\bCPU\b|\d+-Core Processor", " ", name)
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def detect() -> Device:
    """Returns the device labkit measures here: the first CUDA GPU, else Apple's mps, else the CPU."""
    if "torch" in sys.modules or has_gpu_driver():  # importing torch only to hear that there is none takes seconds
        import torch

        if torch.cuda.is_available():
            name = torch.cuda.get_device_name(0)
            return Device("cuda", name, slugify(name))
        if torch.backends.mps.is_available():
            name = cpu_name()
            return Device("mps", name, f"mps-{slugify(name)}")
    name = cpu_name()
    return Device("cpu", name, f"cpu-{slugify(name)}")


def has_gpu_driver() -> bool:
    """Returns False only where torch can have no GPU: on Linux without NVIDIA's driver library and AMD's device."""
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
        return subprocess.run(
            ["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True, check=False
        ).stdout.strip()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def software_versions() -> dict[str, str]:
    """Returns the versions a measurement depends on; "" for what is not there."""
    import torch

    def version(package: str) -> str:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return ""

    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": version("triton"),
        "cuda": torch.version.cuda or "",
        "driver": driver_version(),
        "labkit": __version__,
    }


def driver_version() -> str:
    """Returns the NVIDIA driver's version, "" without one."""
    with _nvml() as nvml:
        return nvml.nvmlSystemGetDriverVersion() if nvml else ""


@cache
def source_state() -> dict[str, Any]:
    """Returns {"commit", "dirty"} of the code that runs.

    LABKIT_COMMIT and LABKIT_DIRTY ("0" or "1") stand in where the history is not at hand; without either,
    commit is "unknown" and dirty None.
    """
    if commit := os.environ.get("LABKIT_COMMIT"):
        return {"commit": commit, "dirty": os.environ.get("LABKIT_DIRTY", "0") != "0"}
    if not shutil.which("git") or not (REPOSITORY / ".git").exists():
        return {"commit": "unknown", "dirty": None}

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(REPOSITORY), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        # Measuring writes under figures/ and re-renders the report; neither changes what is measured.
        changed = git("status", "--porcelain", "--", ".", ":!figures", ":!report.md", ":!notebooks")
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(changed)}
    except subprocess.CalledProcessError:  # no commit yet, or a tree that git refuses to read
        return {"commit": "unknown", "dirty": None}


def environment(device: Device) -> dict[str, Any]:
    """Returns what a reader needs to judge and repeat a measurement made here; no host names, no paths."""
    import torch

    record: dict[str, Any] = {
        "device": asdict(device),
        "software": software_versions(),
        "source": source_state(),
        "os": f"{platform.system()} {platform.release()}",
        "cpu": {"name": cpu_name(), "num_cores": os.cpu_count(), "num_torch_threads": torch.get_num_threads()},
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


# ---- NVML -----------------------------------------------------------------------------------------------


class _nvml:  # noqa: N801 - used like a function: `with _nvml() as nvml`
    """Gives pynvml initialised, or None where there is no NVIDIA driver or no nvidia-ml-py."""

    def __enter__(self) -> Any:
        self.module = None
        try:
            import pynvml

            pynvml.nvmlInit()
            self.module = pynvml
        except Exception:  # no package, no driver, no permission: each means "no NVML here"
            pass
        return self.module

    def __exit__(self, *_: object) -> None:
        if self.module:
            self.module.nvmlShutdown()


def _nvml_handle(nvml: Any) -> Any:
    """Returns NVML's handle of the GPU that torch calls cuda:0 (CUDA_VISIBLE_DEVICES reorders torch's only)."""
    import torch

    if torch.cuda.is_available():
        uuid = getattr(torch.cuda.get_device_properties(0), "uuid", None)
        if uuid is not None:
            try:
                return nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
            except nvml.NVMLError:
                pass
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
"""NVML's nvmlClocksEventReason bits that mean the GPU ran slower than asked (idle and user settings do not)."""


class GpuMonitor:
    """Samples SM clock, power, temperature and throttle reasons while a `with` block runs.

    `summary` holds them afterwards: {} where NVML is missing. The sampling thread sleeps between two
    readings of a millisecond or so, and NVML's calls release the interpreter.
    """

    def __init__(self, device_kind: str, interval_s: float = 0.1):
        self.interval_s = interval_s
        self.enabled = device_kind == "cuda"
        self.summary: dict[str, Any] = {}
        self._samples: list[tuple[int, float, int, int]] = []
        self._stop = threading.Event()

    def __enter__(self) -> "GpuMonitor":
        self._nvml = _nvml()
        self._module = self._nvml.__enter__() if self.enabled else None
        if self._module:
            self._handle = _nvml_handle(self._module)
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if not self._module:
            return
        self._stop.set()
        self._thread.join()
        if not self._samples:
            self._read()
        self.summary = self._summarise()
        self._nvml.__exit__()

    def _run(self) -> None:
        while not self._stop.wait(self.interval_s):
            self._read()

    def _read(self) -> None:
        nvml, handle = self._module, self._handle
        try:
            self._samples.append(
                (
                    nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
                    nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
                    nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
                    nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),
                )
            )
        except nvml.NVMLError:
            pass

    def _summarise(self) -> dict[str, Any]:
        if not self._samples:
            return {}
        clocks, powers, temperatures, reasons = zip(*self._samples, strict=True)
        throttled = sorted({text for bit, text in THROTTLE_REASONS.items() for mask in reasons if mask & bit})
        return {
            "num_samples": len(clocks),
            "sm_clock_mhz_min": min(clocks),
            "sm_clock_mhz_median": sorted(clocks)[len(clocks) // 2],
            "power_w_max": max(powers),
            "temperature_c_max": max(temperatures),
            "throttle_reasons": throttled,
            "foreign_processes": foreign_processes(self._module, self._handle),
        }


def foreign_processes(nvml: Any, handle: Any) -> int | None:
    """Returns how many processes beside this one use the GPU, None where NVML does not say."""
    try:
        running = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except nvml.NVMLError:
        return None
    return sum(process.pid != os.getpid() for process in running)


def find_nsys() -> str | None:
    """Returns the path of Nsight Systems' command line, from PATH or from beside Nsight Compute; else None."""
    if found := shutil.which("nsys"):
        return found
    for root in ("/opt/nvidia/nsight-systems", "/opt/nvidia/nsight-compute"):
        for folder, _, files in os.walk(root):
            if "nsys" in files and "target-linux" in folder:
                return os.path.join(folder, "nsys")
    return None


@dataclass(frozen=True)
class Check:
    """One line of `labkit doctor`: what was looked for, whether it is there, what its lack disables."""

    name: str
    present: bool
    detail: str
    disables: str = ""


def checks() -> list[Check]:
    """Returns what this machine has and lacks."""
    results = []

    def check(name: str, present: bool, detail: str, disables: str) -> None:
        results.append(Check(name, present, detail, "" if present else disables))

    try:
        import torch
    except ImportError as error:
        return [Check("torch", False, str(error), "measuring anything; `labkit report` still works")]
    device = detect()
    check("torch", True, torch.__version__, "")
    cuda = device.kind == "cuda"
    check("device", True, f"{device.name} ({device.kind}), figures/{device.slug}/", "")
    check("GPU", cuda, device.name if cuda else "no CUDA GPU", "the full profile; the smoke profile runs on the CPU")
    driver = driver_version()
    check("NVIDIA driver and NVML", bool(driver), driver or "not found", "clocks, power and throttling in the records")
    triton = software_versions()["triton"]
    check("triton", bool(triton), triton or "not installed", "Triton kernels, torch.compile on a GPU")
    compiler = shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++") or shutil.which("clang++")
    check("C++ compiler", bool(compiler), "found" if compiler else "not found", "torch.compile on the CPU")
    check("datasheet peaks", device.peaks is not None, device.peaks.source if device.peaks else "not in the table",
          "utilisation against the datasheet; the measured ceiling remains")  # fmt: skip
    nsys = find_nsys()
    check("nsys", bool(nsys), "found" if nsys else "not found", "Nsight Systems captures; torch.profiler is used")
    nccl = cuda and torch.distributed.is_available() and torch.distributed.is_nccl_available()
    check("NCCL", nccl, "available" if nccl else "not available", "collectives between GPUs; gloo on the CPU remains")
    if cuda:
        with GpuMonitor("cuda") as monitor:
            pass
        state = monitor.summary
        reasons = state.get("throttle_reasons", [])
        check("not throttled", not reasons, ", ".join(reasons) or f"SM clock {state.get('sm_clock_mhz_median')} MHz",
              "trust in timings made now")  # fmt: skip
        others = state.get("foreign_processes")
        check("GPU to itself", not others, f"{others or 0} other processes on the GPU", "trust in timings made now")
    return results
