"""The device is named once and right, no other product's peaks are lent to it, and nothing private
is recorded.
"""

import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import types
from itertools import cycle
from pathlib import Path

import pytest
import torch
from stub_nvml import StubNvml

from labkit import device as device_module
from labkit import records
from labkit.device import DATASHEETS, Device, checks, datasheet, detect, environment, slugify
from labkit.monitor import Monitor
from labkit.records import source_state

SOME_CPU = Device("cpu", "AMD EPYC 7763 64-Core Processor", "cpu-amd-epyc-7763")


def test_the_detected_device_is_the_one_torch_has_and_torch_is_not_imported_for_a_cpu():
    device = detect()
    if torch.cuda.is_available():
        assert (device.kind, device.name) == ("cuda", torch.cuda.get_device_name(0))
    else:
        assert device.name == device_module.cpu_name() != "" and device.peaks is None
        assert device.slug == f"{device.kind}-{slugify(device.name)}"
    assert device.default_profile == ("full" if device.kind == "cuda" else "smoke")
    code = (
        "import sys; from labkit import device; print(device.detect().slug, 'torch' in sys.modules)"
    )
    slug, is_imported = subprocess.check_output([sys.executable, "-c", code], text=True).split()
    assert (slug, is_imported) == (device.slug, str(device_module.has_gpu_driver()))


PRODUCTS = {
    "NVIDIA H200 NVL": (4800, 835.5),
    "NVIDIA H200": (4800, 989.4),
    "NVIDIA A100-SXM4-40GB": (1555, 312.0),
    "Tesla T4": (320, None),
    "": None,
    # Names that contain another product's.
    "NVIDIA RTX A1000": None,
    "NVIDIA GeForce RTX 4080 SUPER": None,
    "NVIDIA GeForce RTX 4090 Laptop GPU": None,
    "NVIDIA A100-SXM4-40GB MIG 1g.5gb": None,
}
"""GB/s of memory and TFLOP/s in bf16 of products that have a datasheet."""


@pytest.mark.parametrize(("name", "peaks"), PRODUCTS.items())
def test_a_product_has_its_own_datasheet_or_none(name, peaks):
    sheet = datasheet(name)
    assert (sheet and (sheet.memory_gb_per_s, sheet.tflops("bf16"))) == peaks
    assert Device("cuda", name, slugify(name)).peaks is sheet
    assert Device("cpu", name, "cpu-of-that-name").peaks is None, "peaks are those of a GPU only"


def test_datasheets_are_complete_and_order_their_units():
    for sheet in DATASHEETS:
        assert sheet.source and sheet.memory_gb_per_s > 0 and sheet.fp32_tflops > 0
        if sheet.tf32_tflops is not None:
            assert sheet.fp32_tflops <= sheet.tf32_tflops
            # Half the bits, twice the rate, on every tensor core; a sparse figure would show here.
            assert sheet.bf16_tflops / sheet.tf32_tflops == pytest.approx(2, rel=0.02)


CANARY = "canary-9f3a61"


def test_the_environment_says_what_a_reader_needs_and_nothing_private(monkeypatch, tmp_path):
    """Every way to the host's, the user's and the environment's names gives a canary."""
    for holder, name in ((socket, "gethostname"), (platform, "node"), (os, "getlogin")):
        monkeypatch.setattr(holder, name, lambda *_: CANARY)
    uname, fields = platform.uname(), list(os.uname())
    fields[1] = CANARY
    monkeypatch.setattr(platform, "uname", lambda: uname._replace(node=CANARY))
    monkeypatch.setattr(os, "uname", lambda: os.uname_result(fields))
    home = str(Path.home())
    for name in ("HOME", "USER", "LOGNAME", "HOSTNAME", "API_TOKEN", "VIRTUAL_ENV", CANARY):
        monkeypatch.setenv(name, f"/home/{CANARY}")
    monkeypatch.chdir(tmp_path)
    record = environment(SOME_CPU)
    text = json.dumps(record)
    assert record == json.loads(text), "the environment is written as JSON"
    for private in (CANARY, str(records.REPOSITORY), str(tmp_path), sys.prefix, f"{home}/"):
        assert private not in text
    assert record["device"] == {"kind": "cpu", "name": SOME_CPU.name, "slug": SOME_CPU.slug}
    assert record["software"]["torch"] == torch.__version__
    assert set(record["source"]) == {"commit", "dirty"}
    assert record["cpu"]["num_torch_threads"] == torch.get_num_threads()
    assert record["datasheet"] is None and "gpu" not in record


UNKNOWN = {"commit": "unknown", "dirty": None}


@pytest.mark.skipif(not shutil.which("git"), reason="needs git")
def test_changed_code_makes_a_tree_dirty_and_what_measuring_writes_does_not(tmp_path, monkeypatch):
    # The user's own configuration (signing, hooks) stays out.
    for name in ("GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM"):
        monkeypatch.setenv(name, os.devnull)
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "LABKIT_COMMIT", "LABKIT_DIRTY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(records, "REPOSITORY", tmp_path)
    # What is asked once a process is asked anew.
    state = source_state.__wrapped__
    assert state() == UNKNOWN, "there is no history yet"
    (tmp_path / "code.py").write_text("1\n")
    identity = ["-c", "user.name=test", "-c", "user.email=test@example.org"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "first"]):
        subprocess.run(["git", *identity, *command], cwd=tmp_path, check=True)
    head = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=tmp_path, text=True)
    for path in ("report.md", "figures/new", "notebooks/new"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text("2\n")
    assert state() == {"commit": head.strip(), "dirty": False}
    (tmp_path / "new.py").write_text("2\n")
    assert state()["dirty"] is True
    # As where the tree belongs to another user, which git refuses.
    (tmp_path / ".git" / "HEAD").write_text("broken")
    assert state() == UNKNOWN
    assert source_state() is source_state(), "one run has one source"


def test_a_machine_that_lacks_everything_says_so_line_by_line(monkeypatch):
    monkeypatch.setattr(device_module, "detect", lambda: SOME_CPU)
    monkeypatch.setattr(device_module, "driver_version", lambda: "")
    monkeypatch.setattr(device_module, "software_versions", lambda: {"triton": ""})
    monkeypatch.setattr(device_module, "cpu_quota", lambda: 1.5)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    rows = {row.name: row for row in checks(lambda: "it does not start")}
    assert [name for name, row in rows.items() if row.present] == ["torch", "device"]
    assert all(row.detail and (row.disables or row.present) for row in rows.values())
    assert rows["nsys"].detail == "it does not start"
    # What is still possible is said too, so that a laptop's owner knows to go on.
    assert "smoke" in rows["GPU"].disables and "gloo" in rows["GPU"].disables


def stub_gpu(
    monkeypatch, name="NVIDIA H200", capability=(9, 0), memory_gib=140, nvml=None, missing=()
):
    properties = types.SimpleNamespace(
        major=capability[0],
        minor=capability[1],
        total_memory=memory_gib * 2**30,
        multi_processor_count=132,
        L2_cache_size=2**25,
        uuid="0",
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    for compiler in ("CC", "CXX"):
        monkeypatch.delenv(compiler, raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None if name in missing else name)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    return Device("cuda", name, slugify(name))


ANSWERS = {
    "nvmlSystemGetDriverVersion": "580.1",
    "nvmlDeviceGetMaxClockInfo": 1980,
    "nvmlDeviceGetEnforcedPowerLimit": 700_000,
    "nvmlDeviceGetNvLinkState": cycle([0, 1]).__next__,  # every other link is inactive
}
WHOLE_GPU_ONLY = (
    "nvmlDeviceGetEnforcedPowerLimit",
    "nvmlDeviceGetMaxClockInfo",
    "nvmlDeviceGetNvLinkState",
)
NO_LEAVE = StubNvml(refused=["nvmlDeviceGetHandleByUUID"], **ANSWERS)
HOPPER = "Hopper's matrix products"


@pytest.mark.parametrize(
    ("gpu", "lacks"),
    [
        ({"nvml": StubNvml(**ANSWERS)}, {}),
        ({"nvml": None}, {"NVIDIA driver and NVML": "power"}),
        ({"nvml": NO_LEAVE}, {}),
        ({"nvml": StubNvml([1, 1], **ANSWERS)}, {"GPU to itself": "2 other processes"}),
        (
            {
                "name": "NVIDIA H200 MIG 1g.18gb",
                "nvml": StubNvml(refused=WHOLE_GPU_ONLY, **ANSWERS),
            },
            {"whole GPU": "energy", "datasheet peaks": "measured ceiling"},
        ),
        (
            {"name": "NVIDIA GeForce RTX 3080", "capability": (8, 6), "memory_gib": 10},
            {
                "16 GB of memory": "10.0 GiB (disables: steps of the larger models",
                HOPPER: "8.6, no TMA",
            },
        ),
        (
            {"name": "NVIDIA B200", "capability": (10, 0)},
            {HOPPER: "10.0, TMA (disables: kernels for compute capability 9.0; our attention runs"},
        ),
        (
            {"name": "Tesla T4", "capability": (7, 5), "memory_gib": 15},
            {"compute capability 8.0": "7.5 (disables: bf16 and TF32", HOPPER: "GELU"},
        ),
        ({"missing": ("cc", "gcc", "clang")}, {"C compiler": "rows are errors"}),
        ({"missing": ("c++", "g++", "clang++")}, {"C++ compiler": "rows are errors"}),
    ],
    ids=str,
)
def test_each_lack_of_a_gpu_is_named_with_what_runs_instead(monkeypatch, gpu, lacks):
    nvml = gpu.get("nvml", StubNvml(**ANSWERS))
    record = environment(stub_gpu(monkeypatch, **gpu | {"nvml": nvml}))
    assert record["lacks"].keys() == lacks.keys()
    for name, words in lacks.items():
        assert words in record["lacks"][name]
    # What NVML does not say is left out, and no error.
    says_limits = nvml not in (None, NO_LEAVE) and "whole GPU" not in lacks
    assert record["gpu"].get("power_limit_w") == (700 if says_limits else None)
    links = "NVLink, 3 links" if says_limits else "PCIe"
    assert device_module.gpu_links() == ("unknown" if nvml in (None, NO_LEAVE) else links)


def test_a_gpu_that_may_not_be_asked_is_measured_all_the_same(monkeypatch):
    stub_gpu(monkeypatch, nvml=NO_LEAVE)
    with Monitor("cuda", interval_s=0.001) as monitor:
        pass
    assert "sm_clock_mhz_median" not in monitor.summary


def test_without_torch_only_that_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    (only,) = checks(str)
    assert only.name == "torch" and not only.present and "labkit report" in only.disables


def test_a_machine_is_told_from_others_of_its_kind(monkeypatch):
    monkeypatch.delenv("LABKIT_MACHINE", raising=False)
    own = device_module.machine_id.__wrapped__()
    assert re.fullmatch("[0-9a-f]{8}", own) and device_module.machine_id.__wrapped__() == own
    monkeypatch.setenv("LABKIT_MACHINE", "lab-2")
    assert device_module.machine_id.__wrapped__() == "lab-2"
