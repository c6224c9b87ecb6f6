"""`labkit course` on checkouts in any state: small stand-ins for the course's tests."""

import pytest
import torch
import torch.nn.functional as F
from chapters import labkit

from labkit import cli
from labkit.configs import RequestError
from labkit.experiments import assignment, bench, course_adapters

ADAPTERS = """
from course_package import name

def mine():
    from labkit.kernels.flash_attention import TiledFlashAttention
    return TiledFlashAttention
    raise NotImplementedError

get_flashattention_autograd_function_pytorch = mine

def get_ddp(module):
    "For example: return DDP(module)"
    raise NotImplementedError
"""

TESTS = """
import os, time
import pytest
from course_package import name
from .adapters import get_ddp

def test_passed(): assert name == "installed nowhere"
def test_missing(): get_ddp(None)
def test_failed(): raise AssertionError("\\none is not two")
def test_failed_rank(): raise Exception("Traceback\\n  assert x < 1\\nAssertionError\\n")
def test_skipped(): pytest.skip("no GPU")
def test_crashed(): print("no memory", flush=True); os.abort()
@pytest.mark.parametrize("x", ["a"])
def test_timeout(x): time.sleep(1000)
def test_passed_after(): pass
"""

REASONS = {
    "missing": "NotImplementedError",
    "failed": "AssertionError: one is not two",
    "failed_rank": "AssertionError: assert x < 1",
    "skipped": "no GPU",
    "crashed": "exit code -6: no memory",
}


@pytest.fixture
def checkout(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # they take seconds
    basics = tmp_path / "cs336-basics"
    basics.mkdir()
    (basics / "course_package.py").write_text("name = 'installed nowhere'")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/__init__.py").touch()
    (tmp_path / "tests/adapters.py").write_text(ADAPTERS)
    (tmp_path / "tests/test_all.py").write_text(TESTS)
    return tmp_path


def test_every_end_of_a_test_is_named_and_the_others_go_on(checkout):
    (checkout / "tests/test_broken.py").write_text("import nowhere")
    (checkout / "tests/test_ends.py").write_text("import os\nos._exit(5)")
    broken, ended, *found = assignment.run_tests(checkout, timeout_s=8)
    assert ended["test"] == "tests/test_ends.py" and "exit code 5" in ended["reason"]
    assert broken["test"] == "tests/test_broken.py" and broken["state"] == "failed"
    assert "No module named 'nowhere'" in broken["reason"] and len(found) == 8
    for outcome in found:
        name = outcome["test"].split("::test_")[1].removesuffix("[a]")
        assert outcome["state"] == name.split("_")[0]
        assert REASONS.get(name, "") in outcome["reason"]


def test_what_is_filled_in_joins_a_contest_under_a_hash_of_all_sources(checkout, monkeypatch):
    filled, empty = assignment.adapters_of(checkout)
    assert filled == ["get_flashattention_autograd_function_pytorch"] and empty == ["get_ddp"]
    labels = []

    def measured(function, **options):
        assert options["op"] == "attention"
        own = bench._entrant(function, checkout)
        labels.append(own.label)
        q, k, v = torch.randn(3, 1, 2, 64, 16)
        out = bench._load(own)(q, k, v, causal=True)
        torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v, is_causal=True))

    monkeypatch.setattr(assignment, "bench", measured)
    for text in ("", "# changed"):
        (checkout / "cs336-basics/more.py").write_text(text)
        list(assignment.contests(checkout, filled, "", 60))
    assert len(set(labels)) == 2


def test_a_wrapper_and_a_sharded_optimizer_train_on_one_rank():
    module = torch.nn.Linear(2, 3)
    before = module.bias.detach().clone()
    optimizer = assignment.entrant(course_adapters, "get_sharded_optimizer")(
        module.parameters(), lr=0.1
    )
    wrapped = assignment.entrant(course_adapters, "get_ddp_bucketed")(module)
    for _ in range(2):
        wrapped(torch.ones(1, 2)).sum().backward()
        wrapped.finish_gradient_synchronization()  # else labkit's refuses the second backward
        optimizer.step()
    torch.distributed.destroy_process_group()
    assert (module.bias < before - 0.1).all()


@pytest.mark.parametrize(
    "file, text, message",
    [
        ("adapters.py", None, "no adapters in .*No such file"),
        ("adapters.py", "def f(:", "no adapters in .*invalid syntax"),
        ("test_all.py", None, "accepted: a checkout of stanford-cs336"),
    ],
)
def test_what_is_not_there_is_one_line_before_any_test(checkout, capsys, file, text, message):
    path = checkout / "tests" / file
    path.unlink()
    if text:
        path.write_text(text)
    with pytest.raises(RequestError, match=message):
        cli.course(checkout)
    assert not capsys.readouterr().out


def test_a_failure_is_tried_with_labkits_adapters(checkout):
    name = next(iter(assignment.CONTESTS))
    (checkout / "tests/test_all.py").write_text(
        f"from .adapters import *\ndef test_it(): assert 'Tiled' in {name}().__name__"
    )
    (checkout / "tests/adapters.py").write_text(f"def {name}(): return int")
    result = labkit("course", checkout, "--no-contests")
    assert result.exit_code == 1 and "1 failed" in result.output
    failed, passed = (x for x in result.output.split("\n") if "test_it" in x)
    assert failed.startswith("failed") and passed.startswith("passed")


def test_labkit_has_every_adapter_of_both_editions():
    names = (
        "ddp_individual_parameters_on_after_backward ddp_bucketed_on_after_backward "
        "ddp_bucketed_on_train_batch_start ddp_on_after_backward get_fsdp fsdp_on_after_backward "
        "fsdp_gather_full_params"
    )
    for name in (*names.split(), *assignment.CONTESTS):
        assert callable(getattr(course_adapters, name))
