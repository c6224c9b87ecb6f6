"""Which device this is: slug, datasheet peaks with their source, environment, and what it lacks.

torch is imported inside the functions that need it, so that reading a committed environment needs
none.
"""

import contextlib
import ctypes
import hashlib
import importlib.metadata
import os
import platform
import re
import shutil
import sys
import tomllib
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from labkit import __version__
from labkit.configs import ALL_DEVICES, DATA, THIS_DEVICE
from labkit.monitor import Monitor, cpu_quota, foreign_processes, open_nvml
from labkit.records import source_state


@dataclass(frozen=True)
class Datasheet:
    """Dense peaks of one product, as data/datasheets.toml says: TFLOP/s, and GB/s (1e9 B/s) and GB
    of its memory, and its power limit.
    """

    pattern: str
    fp32_tflops: float
    memory_gb_per_s: float
    memory_gb: float
    source: str
    tf32_tflops: float | None = None
    bf16_tflops: float | None = None
    power_limit_w: float | None = None
    has_inline_ecc: bool = False

    @property
    def memory_bytes(self) -> float:
        """About what a program sees: datasheets say GB where they mean GiB, the driver keeps up to
        two percent, and inline error correction takes a sixteenth.
        """
        # PyTorch reports of A100 80 GB 79.2 GiB, B200 178.4, RTX 4090 23.6, L40 44.4, T4 14.6.
        return self.memory_gb * 2**30 * (0.91 if self.has_inline_ecc else 0.98)

    def tflops(self, precision: str) -> float | None:
        """Returns the peak for "fp32", "tf32" or "bf16"; None for a format without one here."""
        return getattr(self, f"{precision}_tflops", None)


_TABLE = (DATA / "datasheets.toml").read_text("utf-8")
DATASHEETS = [Datasheet(**row) for row in tomllib.loads(_TABLE)["datasheets"]]


def datasheet(device_name: str) -> Datasheet | None:
    """Returns the peaks of the product called `device_name`, or of that slug, None if it is not in
    the table.

    Laptop parts, slices of a GPU (MIG) and products whose name only contains another's have none:
    no number is better than one divided by another GPU's peak.
    """
    if re.search(r"\bMIG\b|Laptop|Max-Q|\d[ -]D$", device_name, re.IGNORECASE):
        return None
    for sheet in DATASHEETS:
        pattern = sheet.pattern.replace(" ", "[ -]")
        if re.search(rf"\b(?:{pattern})\b", device_name, re.IGNORECASE):
            return sheet
    return None


NODES = "LABKIT_NODES"
"""Environment variable of a run on several nodes: their number, and where node 0 listens."""


@dataclass(frozen=True)
class Device:
    """The device that is measured: `kind` is "cuda" or "cpu"; `slug` names its folder."""

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
    """Returns the device labkit measures here: the first CUDA GPU, else the CPU."""
    # Importing torch just to learn that there is no GPU takes seconds.
    if "torch" in sys.modules or has_gpu_driver():
        import torch

        if torch.cuda.is_available():
            name = torch.cuda.get_device_name(0)
            return Device("cuda", name, slugify(name))
    name = cpu_name()
    return Device("cpu", name, f"cpu-{slugify(name)}")


def slug_of(device: str) -> str:
    """Returns the slug that a user means: this machine's for "this", else `device` itself."""
    return detect().slug if device == THIS_DEVICE else device


def num_nodes() -> int:
    """Returns on how many machines this process launches ranks, see `parallel.launch.lead`."""
    return int(os.environ.get(NODES, "1").split()[0])


def num_gpus() -> int:
    """Returns how many GPUs these machines have, each as many as this one."""
    import torch

    return torch.cuda.device_count() * num_nodes()


def measured_by(notebook: str) -> Device:
    """Returns what `notebook` measures here: `detect()`, of ALL_DEVICES all GPUs as one device,
    "2x-nvidia-h200".
    """
    device = detect()
    if device.kind != "cuda" or notebook not in ALL_DEVICES:
        return device
    count = num_gpus()
    if count == 1:
        return device
    return replace(device, name=f"{count} × {device.name}", slug=f"{count}x-{device.slug}")


def gpu_links() -> str:
    """Returns how the first GPU is linked to others, "NVLink, 18 links" or "PCIe"; "unknown"
    without NVML.
    """
    with open_nvml() as (nvml, handle):
        if not handle:
            return "unknown"
        num_links = 0
        with contextlib.suppress(nvml.NVMLError):  # past the last link
            for link in range(nvml.NVML_NVLINK_MAX_LINKS):
                num_links += nvml.nvmlDeviceGetNvLinkState(handle, link)  # 1, or 0 if inactive
        return f"NVLink, {num_links} links" if num_links else "PCIe"


def device_key(device: Device) -> str:
    """Returns an identifier of this physical device: a GPU's UUID, else "cpu"."""
    if device.kind != "cuda":
        return device.kind
    import torch

    return str(torch.cuda.get_device_properties(0).uuid)


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


def has_gpu_driver() -> bool:
    """Returns False only where torch cannot have a GPU: without NVIDIA's driver library."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


@cache
def cpu_name() -> str:
    """Returns the processor's product name as the operating system gives it."""
    with contextlib.suppress(OSError):
        text = Path("/proc/cpuinfo").read_text("utf-8")
        if match := re.search(r"^model name\s*:(.*)$", text, re.MULTILINE):
            return match[1].strip()
    return platform.processor() or platform.machine()


def software_versions() -> dict[str, str]:
    """Returns the versions a measurement depends on; "" for what is not there, none of a peer."""
    import torch

    versions = {"triton": ""}
    # Peers; FlashAttention-3 comes with xformers.
    for name in "triton", "transformers", "liger-kernel", "quack-kernels", "xformers":
        with contextlib.suppress(ImportError):
            # Without metadata, as of a package half removed, Python has no version.
            versions[name] = importlib.metadata.version(name) or ""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        **versions,
        "cuda": torch.version.cuda or "",
        "driver": driver_version(),
        "labkit": __version__,
    }


def driver_version() -> str:
    """Returns the NVIDIA driver's version, "" without one."""
    with open_nvml() as (nvml, _):
        return nvml.nvmlSystemGetDriverVersion() if nvml else ""


@cache
def machine_id() -> str:
    """Returns eight hexadecimal digits that tell this machine from others of its device's name.

    They follow from the number of the operating system's installation, without one from the host's
    name. LABKIT_MACHINE takes their place where both change between runs, as in containers.
    """
    if machine := os.environ.get("LABKIT_MACHINE"):
        return machine
    path = Path("/etc/machine-id")
    installation = path.read_text("utf-8").strip() if path.exists() else ""
    return hashlib.sha256((installation or platform.node()).encode()).hexdigest()[:8]


def environment(device: Device) -> dict[str, Any]:
    """Returns what a reader needs to judge and repeat a measurement; no host names, no paths."""
    import torch

    record = {
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
        gpu = record["gpu"] = {
            "num_gpus": torch.cuda.device_count(),
            "compute_capability": f"{properties.major}.{properties.minor}",
            "num_multiprocessors": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
            "l2_bytes": properties.L2_cache_size,
        }
        with open_nvml() as (nvml, handle):
            if handle:  # of a MIG slice, and of many laptops, NVML does not say these
                with contextlib.suppress(nvml.NVMLError):
                    clock_mhz = nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM)
                    gpu["max_sm_clock_mhz"] = clock_mhz
                with contextlib.suppress(nvml.NVMLError):
                    gpu["power_limit_w"] = nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000
    record["datasheet"] = asdict(device.peaks) if device.peaks else None
    record["lacks"] = {
        part.name: f"{part.detail} (disables: {part.disables})"
        for part in parts(device)
        if not part.present
    }
    return record


class Check(NamedTuple):
    """One line of `labkit doctor`: what was looked for, whether it is present, what its absence
    disables.
    """

    name: str
    present: bool
    detail: str
    disables: str


MEASURING = "measuring anything; `labkit report` still works"
"""What needs triton and torch."""

LEAST_MEMORY_BYTES = 16e9
"""Of a GPU: below, many cases of the full profile do not fit."""


def parts(device: Device) -> list[Check]:
    """Returns what measuring uses of this machine, as far as it shows at once; what a part's
    absence disables says what runs instead.
    """
    rows = [
        _part("triton", software_versions()["triton"], MEASURING),
        _part(
            "C compiler",
            _first_of(os.environ.get("CC", "cc"), "gcc", "clang"),
            "Triton's kernels and torch.compile on a GPU; their rows are errors",
        ),
        _part(
            "C++ compiler",
            _first_of(os.environ.get("CXX", "c++"), "g++", "clang++"),
            "torch.compile on the CPU; its rows are errors",
        ),
    ]
    return rows + (_gpu_parts(device) if device.kind == "cuda" else [])


def _first_of(*programs: str) -> str:
    return next(filter(None, map(shutil.which, programs)), "")


def _part(name: str, detail: str, disables: str) -> Check:
    return Check(name, bool(detail), detail or "not found", disables)


def _gpu_parts(device: Device) -> list[Check]:
    import torch

    properties = torch.cuda.get_device_properties(0)
    capability = (properties.major, properties.minor)
    number = f"{properties.major}.{properties.minor}"
    is_slice = bool(re.search(r"\bMIG\b", device.name))
    has_tma = "no TMA" if capability < (9, 0) else "TMA"
    with open_nvml() as (nvml, handle):
        num_others = foreign_processes(nvml, handle) if handle else 0
    return [
        _part(
            "NVIDIA driver and NVML",
            driver_version(),
            "clocks, power, energy, throttling and other processes in the records",
        ),
        _part(
            "datasheet peaks",
            device.peaks.source if device.peaks else "",
            "utilisation against the datasheet; the measured ceiling remains",
        ),
        _part(
            "NCCL",
            "available" if torch.distributed.is_nccl_available() else "",
            "collectives between GPUs; gloo on the CPU remains",
        ),
        Check(
            "whole GPU",
            not is_slice,
            "a slice (MIG)" if is_slice else "no slice (MIG)",
            "the datasheet's peaks, and what NVML says only of a whole GPU: power and energy",
        ),
        Check(
            "GPU to itself",
            not num_others,
            f"{num_others} other processes seen on the GPU",
            "trust in timings made meanwhile, which are marked",
        ),
        Check(
            "16 GB of memory",
            properties.total_memory >= LEAST_MEMORY_BYTES,
            f"{properties.total_memory / 2**30:.1f} GiB",
            "steps of the larger models; their rows say that they did not fit",
        ),
        Check(
            "compute capability 8.0",
            capability >= (8, 0),
            number,
            "bf16 and TF32, whose rows say so; our attention runs in plain PyTorch",
        ),
        Check(
            "Hopper's matrix products",
            capability == (9, 0),
            f"compute capability {number}, {has_tma}",
            "kernels for compute capability 9.0; our attention runs its Triton kernels, GELU "
            "after a product is PyTorch's",
        ),
    ]


def checks(nsys_failure: Callable[[], str]) -> list[Check]:
    """Returns what this machine has and lacks; `nsys_failure` says why nsys is of no use, "" if it
    is.
    """
    try:
        import torch
    except ImportError as error:
        return [Check("torch", False, str(error), MEASURING)]
    device = detect()
    is_cuda = device.kind == "cuda"
    quota = cpu_quota()
    failure = nsys_failure()
    trust = "trust in timings made now"
    rows = [
        Check("torch", True, torch.__version__, ""),
        Check("device", True, f"{device.name} ({device.kind}), figures/{device.slug}/", ""),
        _part(
            "GPU",
            device.name if is_cuda else "",
            "the full profile; the smoke profile runs on the CPU, its collectives by gloo",
        ),
        *parts(device),
        Check(
            "nsys",
            not failure,
            failure or "found",
            "Nsight Systems captures; torch.profiler is used",
        ),
        Check(
            "no CPU quota",
            quota is None,
            f"{quota:.2g} cores by its control group" if quota else "none in force",
            f"{trust} on the CPU; what the quota stops is marked",
        ),
    ]
    if is_cuda:
        with Monitor("cuda") as monitor:
            pass
        reasons = ", ".join(monitor.summary.get("throttle_reasons", ["NVML does not say"]))
        clock = f"SM clock {monitor.summary.get('sm_clock_mhz_median')} MHz"
        rows.append(Check("not throttled", not reasons, reasons or clock, trust))
    return rows
