"""The device is named once and right, no other product's peaks are lent to it, and nothing private
is recorded.
"""

import getpass
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit import device as device_module
from labkit import records
from labkit.device import (
    Check,
    Device,
    checks,
    datasheet,
    environment,
    slugify,
)
from labkit.records import source_state

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
    device = device_module.detect()
    assert device.slug == device_module.detect().slug
    if torch.cuda.is_available():
        assert (device.kind, device.name) == ("cuda", torch.cuda.get_device_name(0))
        assert device.default_profile == "full"
    else:
        assert device.kind in ("mps", "cpu")
        assert device.name == device_module.cpu_name() != ""
        assert device.slug == f"{device.kind}-{slugify(device.name)}"
        assert device.default_profile == "smoke"
        assert device.peaks is None


def test_without_a_driver_the_device_is_the_same_and_torch_is_not_imported_for_it():
    code = (
        "import sys; from labkit import device; print(device.detect().slug, 'torch' in sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    slug, imported = result.stdout.split()
    assert slug == device_module.detect().slug
    assert imported == str(device_module.has_gpu_driver())


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


@pytest.mark.parametrize("sheet", device_module.DATASHEETS, ids=lambda sheet: sheet.pattern)
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
    home, repository = str(Path.home()), str(records.REPOSITORY)
    real_uname, real_platform = os.uname(), platform.uname()
    for holder, name in (
        (socket, "gethostname"),
        (socket, "getfqdn"),
        (platform, "node"),
        (getpass, "getuser"),
        (os, "getlogin"),
    ):
        monkeypatch.setattr(holder, name, lambda *_: CANARY)
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

    record = environment(device_module.detect())
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
    versions = device_module.software_versions()
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
    monkeypatch.setattr(records, "REPOSITORY", tmp_path)
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
    monkeypatch.setattr(records, "REPOSITORY", tmp_path)
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


def no_nsys() -> str:
    return "not found"


def assert_complete(results: list[Check]) -> None:
    assert len({result.name for result in results}) == len(results)
    for result in results:
        assert result.detail, f"{result.name} does not say what was found"
        if result.present:
            assert result.disables == "", f"{result.name} is there and disables something"
        else:
            assert result.disables, f"{result.name} lacks and does not say what that disables"


def test_every_lack_of_this_machine_says_what_it_disables():
    results = checks(no_nsys)
    assert_complete(results)
    present = {result.name: result.present for result in results}
    assert present["torch"] and present["device"]
    assert present["GPU"] == torch.cuda.is_available()


def test_a_machine_that_lacks_everything_says_so_line_by_line(monkeypatch):
    monkeypatch.setattr(device_module, "detect", lambda: SOME_CPU)
    monkeypatch.setattr(device_module, "driver_version", lambda: "")
    monkeypatch.setattr(device_module, "software_versions", lambda: {"triton": ""})
    monkeypatch.setattr(shutil, "which", lambda name: None)
    results = checks(no_nsys)
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
    (only,) = checks(no_nsys)
    assert only.name == "torch" and not only.present
    assert "labkit report" in only.disables


def test_a_machine_is_told_from_others_of_its_kind(monkeypatch):
    monkeypatch.delenv("LABKIT_MACHINE", raising=False)
    own = device_module.machine_id.__wrapped__()
    assert re.fullmatch("[0-9a-f]{8}", own) and device_module.machine_id.__wrapped__() == own
    monkeypatch.setenv("LABKIT_MACHINE", "lab-2")
    assert device_module.machine_id.__wrapped__() == "lab-2"
