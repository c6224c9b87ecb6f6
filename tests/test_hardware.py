"""The device is named once and right, no other product's peaks are lent to it, and nothing private
is recorded.
"""

import functools
import getpass
import json
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit import hardware
from labkit.hardware import (
    Check,
    Device,
    Monitor,
    checks,
    datasheet,
    environment,
    slugify,
    source_state,
)

SOME_CPU = Device("cpu", "AMD EPYC 7763 64-Core Processor", "cpu-amd-epyc-7763")


@pytest.mark.parametrize(
    ("name", "slug"),
    [
        ("NVIDIA H200", "nvidia-h200"),
        ("NVIDIA A100-SXM4-40GB", "nvidia-a100-sxm4-40gb"),
        ("NVIDIA A100 80GB PCIe", "nvidia-a100-80gb-pcie"),
        ("NVIDIA H100 80GB HBM3", "nvidia-h100-80gb-hbm3"),
        ("NVIDIA GeForce RTX 4090", "nvidia-geforce-rtx-4090"),
        ("Tesla T4", "tesla-t4"),
        ("Intel(R) Xeon(R) CPU @ 2.20GHz", "intel-xeon"),
        ("Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz", "intel-xeon-platinum-8481c"),
        ("13th Gen Intel(R) Core(TM) i7-1360P", "13th-gen-intel-core-i7-1360p"),
        ("AMD EPYC 7763 64-Core Processor", "amd-epyc-7763"),
        ("AMD Ryzen 9 7950X 16-Core Processor", "amd-ryzen-9-7950x"),
        ("Apple M2 Pro", "apple-m2-pro"),
        ("  --odd__name--  ", "odd-name"),
        ("", ""),
    ],
)
def test_slugs(name, slug):
    assert slugify(name) == slug


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.text())
def test_a_slug_is_a_plain_folder_name_and_its_own_slug(name):
    slug = slugify(name)
    assert re.fullmatch(r"([a-z0-9]+(-[a-z0-9]+)*)?", slug)
    assert slugify(slug) == slug


def test_the_detected_device_is_the_one_torch_has():
    device = hardware.detect()
    assert device.slug == hardware.detect().slug
    if torch.cuda.is_available():
        assert (device.kind, device.name) == ("cuda", torch.cuda.get_device_name(0))
        assert device.default_profile == "full"
    else:
        assert device.kind in ("mps", "cpu")
        assert device.name == hardware.cpu_name() != ""
        assert device.slug == f"{device.kind}-{slugify(device.name)}"
        assert device.default_profile == "smoke"
        assert device.peaks is None


def test_without_a_driver_the_device_is_the_same_and_torch_is_not_imported_for_it():
    code = (
        "import sys; from labkit import hardware; "
        "print(hardware.detect().slug, 'torch' in sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    slug, imported = result.stdout.split()
    assert slug == hardware.detect().slug
    assert imported == str(hardware.has_gpu_driver())


@pytest.mark.parametrize(
    ("name", "memory_gb_per_s", "bf16_tflops", "source"),
    [
        ("NVIDIA H200 NVL", 4800, 835.5, "H200 NVL"),
        ("NVIDIA H200", 4800, 989.4, "H200 SXM"),
        ("NVIDIA H100 PCIe", 2000, 756.0, "H100 PCIe"),
        ("NVIDIA H100 NVL", 3900, 835.5, "H100 NVL"),
        ("NVIDIA H100 80GB HBM3", 3350, 989.4, "H100 SXM"),
        ("NVIDIA A100 80GB PCIe", 1935, 312.0, "80GB PCIe"),
        ("NVIDIA A100-PCIE-80GB", 1935, 312.0, "80GB PCIe"),
        ("NVIDIA A100-SXM4-80GB", 2039, 312.0, "80GB SXM"),
        ("NVIDIA A100-SXM4-40GB", 1555, 312.0, "40GB"),
        ("NVIDIA A100-PCIE-40GB", 1555, 312.0, "40GB"),
        ("NVIDIA A10G", 600, 70.0, "A10G"),
        ("NVIDIA A10", 600, 125.0, "A10 "),
        ("NVIDIA L4", 300, 121.0, "L4 "),
        ("NVIDIA L40S", 864, 362.05, "L40S"),
        ("NVIDIA GeForce RTX 5090", 1792, 209.5, "Blackwell"),
        ("NVIDIA GeForce RTX 4090", 1008, 165.2, "Ada"),
        ("NVIDIA GeForce RTX 3090 Ti", 1008, 80.0, "GA102"),
        ("NVIDIA GeForce RTX 3090", 936, 71.0, "GA102"),
        ("Tesla V100-SXM2-32GB", 900, None, "V100"),
        ("Tesla T4", 320, None, "T4"),
    ],
)
def test_a_product_has_its_own_datasheet(name, memory_gb_per_s, bf16_tflops, source):
    sheet = datasheet(name)
    assert (sheet.memory_gb_per_s, sheet.bf16_tflops) == (memory_gb_per_s, bf16_tflops)
    assert source in sheet.source
    assert Device("cuda", name, slugify(name)).peaks is sheet
    assert Device("cpu", name, "cpu-of-that-name").peaks is None, "peaks are those of a GPU only"


@pytest.mark.parametrize(
    "name",
    [
        "",
        "NVIDIA L40",
        "NVIDIA A30",
        "NVIDIA A10M",
        "NVIDIA T400 4GB",
        "NVIDIA GeForce RTX 4080",
        "AMD Instinct MI300X",
        "NVIDIA H20",
        # Names that contain another product's.
        "NVIDIA GH200 480GB",
        "NVIDIA RTX A1000",
        "Quadro GV100",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
    ],
)
def test_a_product_that_is_not_in_the_table_has_no_peaks(name):
    assert datasheet(name) is None


@pytest.mark.parametrize("sheet", hardware.DATASHEETS, ids=lambda sheet: sheet.pattern)
def test_a_datasheet_is_complete_and_orders_its_units(sheet):
    re.compile(sheet.pattern)
    assert sheet.source and sheet.memory_gb_per_s > 0
    assert sheet.tflops("fp32") == sheet.fp32_tflops > 0
    assert sheet.tflops("tf32") == sheet.tf32_tflops
    assert sheet.tflops("bf16") == sheet.bf16_tflops
    if sheet.tf32_tflops is not None:
        assert sheet.fp32_tflops <= sheet.tf32_tflops
        # Half the bits, twice the rate, on every tensor core; a sparse figure would show here.
        assert sheet.bf16_tflops / sheet.tf32_tflops == pytest.approx(2, rel=0.02)


def test_an_unknown_precision_is_refused_with_the_accepted_ones():
    with pytest.raises(ValueError, match="unknown precision 'fp8'; accepted: fp32, tf32, bf16"):
        datasheet("NVIDIA H200").tflops("fp8")


CANARY = "canary-9f3a61"


def strings_in(value) -> list[str]:
    if isinstance(value, dict):
        return [text for pair in value.items() for part in pair for text in strings_in(part)]
    if isinstance(value, list | tuple):
        return [text for part in value for text in strings_in(part)]
    return [value] if isinstance(value, str) else []


def test_the_environment_holds_nothing_private(monkeypatch, tmp_path, fresh_source_state):
    """Every way to the host's, the user's and the environment's names gives a canary, which must
    not come up.
    """
    home, repository = str(Path.home()), str(hardware.REPOSITORY)
    real_uname, real_platform = os.uname(), platform.uname()
    for module, name in (
        (socket, "gethostname"),
        (socket, "getfqdn"),
        (platform, "node"),
        (getpass, "getuser"),
        (os, "getlogin"),
    ):
        monkeypatch.setattr(module, name, lambda *_: CANARY)
    monkeypatch.setattr(platform, "uname", lambda: real_platform._replace(node=CANARY))
    fields = (
        real_uname.sysname,
        CANARY,
        real_uname.release,
        real_uname.version,
        real_uname.machine,
    )
    monkeypatch.setattr(os, "uname", lambda: os.uname_result(fields))
    for name in (
        "HOME",
        "USER",
        "LOGNAME",
        "USERNAME",
        "HOSTNAME",
        "LABKIT_CANARY",
        "API_TOKEN",
        "VIRTUAL_ENV",
    ):
        monkeypatch.setenv(name, f"/home/{CANARY}")
    monkeypatch.setenv(CANARY, "1")
    monkeypatch.chdir(tmp_path)

    record = environment(hardware.detect())
    assert record == json.loads(json.dumps(record)), "the environment is written as JSON"
    texts = strings_in(record)
    assert record["os"] in texts
    for text in texts:
        assert CANARY not in text
        assert repository not in text and str(tmp_path) not in text and sys.prefix not in text
        assert len(home) < 2 or home not in text


def test_the_environment_says_what_a_reader_needs():
    record = environment(SOME_CPU)
    assert record["device"] == {"kind": "cpu", "name": SOME_CPU.name, "slug": SOME_CPU.slug}
    assert record["software"]["torch"] == torch.__version__
    assert record["software"]["python"] == platform.python_version()
    assert set(record["source"]) == {"commit", "dirty"}
    assert record["cpu"]["num_torch_threads"] == torch.get_num_threads()
    assert record["cpu"]["num_cores"] == os.cpu_count()
    assert record["datasheet"] is None
    assert "gpu" not in record


def test_versions_are_texts_and_empty_where_there_is_nothing(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    versions = hardware.software_versions()
    assert {"python", "torch", "triton", "cuda", "driver", "labkit"} == set(versions)
    assert all(isinstance(version, str) for version in versions.values())
    assert versions["driver"] == ""
    if torch.version.cuda is None:
        assert versions["cuda"] == ""


@pytest.fixture
def fresh_source_state(monkeypatch):
    """source_state() is asked once a process; here each test asks anew, and leaves nothing
    behind.
    """
    for name in ("LABKIT_COMMIT", "LABKIT_DIRTY"):
        monkeypatch.delenv(name, raising=False)
    source_state.cache_clear()
    yield
    source_state.cache_clear()


@pytest.mark.parametrize(("dirty", "expected"), [("1", True), ("0", False), (None, False)])
def test_the_commit_can_be_given_where_the_history_is_not_at_hand(
    fresh_source_state, monkeypatch, dirty, expected
):
    monkeypatch.setenv("LABKIT_COMMIT", "0123abc")
    if dirty is not None:
        monkeypatch.setenv("LABKIT_DIRTY", dirty)
    assert source_state() == {"commit": "0123abc", "dirty": expected}
    assert environment(SOME_CPU)["source"] == {"commit": "0123abc", "dirty": expected}
    monkeypatch.setenv("LABKIT_COMMIT", "changed")
    assert source_state()["commit"] == "0123abc", (
        "one run has one source, whatever happens to the tree meanwhile"
    )


def test_without_git_or_history_the_source_is_unknown(fresh_source_state, monkeypatch, tmp_path):
    monkeypatch.setattr(hardware, "REPOSITORY", tmp_path)
    assert source_state() == {"commit": "unknown", "dirty": None}
    (tmp_path / ".git").mkdir()
    monkeypatch.setenv("PATH", "")
    source_state.cache_clear()
    assert source_state() == {"commit": "unknown", "dirty": None}


@pytest.fixture
def repository(tmp_path, monkeypatch, fresh_source_state) -> Path:
    if not shutil.which("git"):
        pytest.skip("needs git")
    # The user's own configuration (signing, hooks) stays out.
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    monkeypatch.setenv("GIT_CONFIG_SYSTEM", os.devnull)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "code.py").write_text("1\n")
    (tmp_path / "report.md").write_text("1\n")
    identity = ["-c", "user.name=test", "-c", "user.email=test@example.org"]
    for command in (["init", "-q"], ["add", "."], [*identity, "commit", "-q", "-m", "first"]):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True, capture_output=True)
    monkeypatch.setattr(hardware, "REPOSITORY", tmp_path)
    return tmp_path


def test_a_clean_tree_is_its_commit(repository):
    head = subprocess.check_output(
        ["git", "-C", str(repository), "rev-parse", "HEAD"], text=True
    ).strip()
    assert len(head) == 40
    assert source_state() == {"commit": head, "dirty": False}


@pytest.mark.parametrize(
    ("path", "is_dirty"),
    {
        "code.py": True,
        "new.py": True,
        "report.md": False,
        "figures/new": False,
        "notebooks/new": False,
    }.items(),
)
def test_changed_or_added_code_makes_it_dirty_and_what_measuring_itself_writes_does_not(
    repository, path, is_dirty
):
    (repository / path).parent.mkdir(exist_ok=True)
    (repository / path).write_text("2\n")
    assert source_state()["dirty"] is is_dirty


def test_a_tree_that_git_cannot_read_is_not_called_clean(repository):
    # As where the tree belongs to another user, which git refuses.
    (repository / ".git" / "HEAD").write_text("broken")
    assert source_state() == {"commit": "unknown", "dirty": None}


def assert_complete(results: list[Check]) -> None:
    assert len({result.name for result in results}) == len(results)
    for result in results:
        assert result.detail, f"{result.name} does not say what was found"
        if result.present:
            assert result.disables == "", f"{result.name} is there and disables something"
        else:
            assert result.disables, f"{result.name} lacks and does not say what that disables"


def test_every_lack_of_this_machine_says_what_it_disables():
    results = checks()
    assert_complete(results)
    present = {result.name: result.present for result in results}
    assert present["torch"] and present["device"]
    assert present["GPU"] == torch.cuda.is_available()


def test_a_machine_that_lacks_everything_says_so_line_by_line(monkeypatch):
    monkeypatch.setattr(hardware, "detect", lambda: SOME_CPU)
    monkeypatch.setattr(hardware, "driver_version", lambda: "")
    monkeypatch.setattr(hardware, "software_versions", lambda: {"triton": ""})
    monkeypatch.setattr(hardware, "find_nsys", lambda: None)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    results = checks()
    assert_complete(results)
    lacking = {result.name for result in results if not result.present}
    assert lacking == {
        "GPU",
        "NVIDIA driver and NVML",
        "triton",
        "C++ compiler",
        "datasheet peaks",
        "nsys",
        "NCCL",
    }
    # What is still possible is said too, so that a laptop's owner knows to go on.
    disables = {result.name: result.disables for result in results}
    assert (
        "smoke" in disables["GPU"]
        and "torch.profiler" in disables["nsys"]
        and "gloo" in disables["NCCL"]
    )


def test_without_torch_only_that_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    (only,) = checks()
    assert only.name == "torch" and not only.present
    assert "labkit report" in only.disables


LOAD = {*hardware.LOAD, "disturbed", "disturbed_by"}
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
            hardware, "_nvml", lambda: types.SimpleNamespace(__enter__=lambda: loaded.append(1))
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
        monkeypatch.setattr(hardware, "CGROUPS", folder / "cgroup")
        monkeypatch.setattr(hardware, "PROC", folder)
        monkeypatch.setattr(hardware.time, "monotonic", lambda: self.clock_s)
        monkeypatch.setattr(hardware.time, "process_time", lambda: self.own_s)
        monkeypatch.setattr(hardware.os, "sysconf", lambda name: 100)
        monkeypatch.setattr(hardware.os, "cpu_count", lambda: 2)
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
    assert hardware.cpu_quota() == quota
    monkeypatch.setattr(hardware.os, "sched_getaffinity", lambda pid: range(10**6, 10**6 + 3))
    assert hardware.num_usable_cores() == (min(3, max(1, int(quota))) if quota else 3)
    monkeypatch.setattr(hardware, "detect", lambda: SOME_CPU)
    (check,) = (check for check in checks() if check.name == "no CPU quota")
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
from labkit.hardware import Monitor
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
    monkeypatch.setattr(hardware, "PROC", tmp_path)
    with Monitor("cpu") as monitor:
        pass
    assert monitor.summary == {}


def test_a_machine_is_told_from_others_of_its_kind(monkeypatch):
    monkeypatch.delenv("LABKIT_MACHINE", raising=False)
    own = hardware.machine_id.__wrapped__()
    assert re.fullmatch("[0-9a-f]{8}", own) and hardware.machine_id.__wrapped__() == own
    monkeypatch.setenv("LABKIT_MACHINE", "lab-2")
    assert hardware.machine_id.__wrapped__() == "lab-2"
