"""Notebooks: the rules of their cells, their parameters, and an execution on this machine in the
smoke profile.
"""

import ast
import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import conftest
import nbformat
import pytest
from typer.testing import CliRunner

from labkit import cli, notebooks
from labkit.configs import (
    COMPILE_PHASES,
    FIGURES,
    REFERENCE_DEVICE,
    STEP_PHASES,
    WARMUP_PHASES,
    RequestError,
)
from labkit.device import detect
from labkit.experiments import captured_step, open_session
from labkit.records import Record, RecordStore, check, folder_of
from labkit.report import render

NAMES = notebooks.names()
HERE = detect().slug


def code_cells(name):
    return [cell for cell in notebooks.read(name).cells if cell.cell_type == "code"]


@pytest.mark.parametrize("name", NAMES)
def test_cells_are_thin(name):
    for cell in code_cells(name):
        tree = ast.parse(cell.source)
        defined = [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Lambda)
        ]
        assert not defined, f"a cell of {name} defines something:\n{cell.source}"
        assert len([line for line in cell.source.splitlines() if line.strip()]) <= 12, cell.source
        earlier = [ast.unparse(line) for line in tree.body[:-1] if isinstance(line, ast.Expr)]
        assert not any(line.startswith("chapter.") for line in earlier), (
            f"only the last line is shown:\n{cell.source}"
        )


@pytest.mark.parametrize("name", NAMES)
def test_prose_holds_no_result(name):
    result = re.compile(r"(?<!\w)\d[\d.,]*\s*(ms|µs|s|×|x|TFLOP/s|GB/s|GiB|MiB)\b")
    for cell in notebooks.read(name).cells:
        # A lesson may ask with a number: how long, if a launch takes so long?
        if cell.cell_type == "markdown" and "lesson" not in cell.metadata.get("tags", []):
            assert not result.search(cell.source), f"{name}: a typed result in\n{cell.source}"


@pytest.mark.parametrize("name", NAMES)
def test_parameters_show_the_reference_device_without_measuring(name):
    defaults = notebooks.parameters(name)
    assert (defaults["device"], defaults["profile"]) == (REFERENCE_DEVICE, "auto")
    assert defaults["measure"] is defaults["save_figures"] is False
    (cell,) = [cell for cell in code_cells(name) if "parameters" in cell.metadata.get("tags", [])]
    assert all("#" in line for line in cell.source.splitlines()), "every parameter says what it is"


@pytest.mark.parametrize("name", NAMES)
def test_outputs_are_stored_and_none_is_an_error(name):
    """nbval compares nothing in a notebook without outputs. Only a lesson prints, and nothing
    warns.
    """
    outputs = [(cell, output) for cell in code_cells(name) for output in cell.outputs]
    assert len(outputs) >= 5
    for cell, output in outputs:
        printed = (
            output.output_type == "stream"
            and output.name == "stdout"
            and "lesson" in cell.metadata.tags
        )
        assert printed or output.output_type not in ("error", "stream"), output


@pytest.mark.parametrize("name", NAMES)
def test_committed_report_holds_what_the_notebook_shows(name):
    report = (notebooks.NOTEBOOKS.parent / "report.md").read_text(encoding="utf-8")
    title = notebooks.read(name).cells[0].source.splitlines()[0]
    assert f"\n#{title}\n" in report
    if not check(folder_of(FIGURES, REFERENCE_DEVICE, name)).get(name):
        number = name.split("_")[0]
        assert f"*Not measured on {REFERENCE_DEVICE}; `labkit run {number}` measures it.*" in report
        return
    for cell in code_cells(name):
        if {"remove_cell", "lesson"} & set(cell.metadata.get("tags", [])):
            continue
        for output in cell.outputs:
            text = output.get("data", {}).get("text/markdown", "").strip().replace("](../", "](")
            assert text in report, "run `labkit report --save-notebooks`"


@pytest.mark.parametrize(
    "name", ["01", "1", "benchmarking", "01_benchmarking", "01_benchmarking.ipynb"]
)
def test_resolve(name):
    assert notebooks.resolve(name) == "01_benchmarking"


@pytest.mark.parametrize("name", ["", "0", "9", "bench", "01_"])
def test_resolve_names_the_accepted_ones(name):
    with pytest.raises(ValueError, match="accepted: 01_benchmarking"):
        notebooks.resolve(name)


def test_parse_parameters_gives_the_types_of_the_defaults():
    values = notebooks.parse_parameters(
        "01_benchmarking",
        ["fresh=True", "sizes=small,medium", "contexts=128,256", "output=/x=y", "sizes=[]"],
    )
    assert values == {"fresh": True, "sizes": [], "contexts": [128, 256], "output": "/x=y"}


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("fresh=false", "'fresh' takes True or False, got 'false'"),
        ("measure=1", "'measure' takes True or False, got '1'"),
        ("sise=small", "unknown parameter 'sise' of 01_benchmarking; accepted: device, measure"),
        ("fresh", "not of the form KEY=VALUE"),
        ("contexts= ", "parameter 'contexts' has no value"),
    ],
)
def test_parse_parameters_refuses(assignment, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        notebooks.parse_parameters("01_benchmarking", [assignment])


def test_parameters_cell_must_hold_literals(tmp_path, monkeypatch):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("d_ff = 4 * d_model")])
    notebook.cells[0].metadata["tags"] = ["parameters"]
    nbformat.write(notebook, tmp_path / "07_x.ipynb")
    monkeypatch.setattr(notebooks, "NOTEBOOKS", tmp_path)
    with pytest.raises(notebooks.NotebookError, match="literals"):
        notebooks.parameters("07_x")


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Writes a notebook of one cell and returns its name."""

    def write(source: str) -> str:
        cells = [nbformat.v4.new_code_cell("a = 1"), nbformat.v4.new_code_cell(source)]
        cells[0].metadata["tags"] = ["parameters"]
        nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "09_written.ipynb")
        monkeypatch.setattr(notebooks, "NOTEBOOKS", tmp_path)
        return "09_written"

    return write


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("1 / 0", "ZeroDivisionError: division"),
        ("from labkit.configs import model_config; model_config('xl')", "size 'xl'"),
    ],
)
def test_a_cell_that_fails_while_records_are_shown_is_an_error(written, source, message):
    with pytest.raises(notebooks.NotebookError, match=f"^09_written: {message}"):
        notebooks.show(written(source), {})


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("1 / 0", "ZeroDivisionError"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "DeadKernelError"),
        ("import time; time.sleep(60)", "Timeout"),
        (
            "from labkit.configs import model_config; model_config('xl')",
            "^09_written: size 'xl' means two models",
        ),
    ],
)
def test_a_notebook_that_does_not_complete_is_an_error(written, monkeypatch, source, message):
    monkeypatch.setattr(notebooks, "CELL_TIMEOUT_S", 3)
    with pytest.raises(notebooks.NotebookError, match=message) as raised:
        notebooks.execute(written(source), {})
    if "model_config" in source:
        (shown,) = raised.value.__cause__.traceback
        assert shown.startswith("RequestError: size 'xl'") and "\n" not in shown


def session_of(output, **changes):
    arguments = {
        "device": "this",
        "profile": "smoke",
        "output": str(output),
        "fresh": False,
        "measure": True,
    }
    return open_session("01_benchmarking", **arguments | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device": "nvidia-h9000"}, f"which is '{HERE}'; to measure here, set device = \"this\""),
        ({"measure": False}, f"nothing has been measured on '{HERE}'"),
        (
            {"measure": False, "device": "a" * 5000},
            "; measured: none; to measure this machine, set measure = True and",
        ),
        ({"measure": "false"}, "measure must be True or False, not 'false'"),
        (
            {"sizes": "nano,10b"},
            "size '10b' is not in profile 'smoke'; accepted: nano, micro; set profile = \"full\"",
        ),
        ({"contexts": 512}, "context 512 is not in profile 'smoke'"),
        ({"contexts": ""}, "parameter 'contexts' has no value"),
    ],
)
def test_what_a_session_cannot_do_is_one_short_line_that_says_what_to_set(
    tmp_path, changes, message
):
    with pytest.raises(RequestError, match=re.escape(message)) as raised:
        session_of(tmp_path, **changes)
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 400
    assert not list(tmp_path.iterdir())


def test_a_session_takes_lists_as_plain_papermill_hands_them_over(tmp_path):
    plain = session_of(tmp_path, sizes="nano,micro", contexts=32)
    assert plain.cases == session_of(tmp_path, sizes=["nano", "micro"], contexts=[32]).cases
    assert plain.cases != session_of(tmp_path, sizes="nano", contexts=32).cases != []


def test_this_device_and_the_profile_auto_are_those_of_the_machine(tmp_path):
    session = session_of(tmp_path, profile="auto")
    assert (session.slug, session.profile) == (HERE, detect().default_profile)
    session.store.append(session._record(session.cases[0], "operator", "skipped"))
    assert session_of(tmp_path, measure=False).slug == HERE


def labkit(*arguments, **options):
    command = [sys.executable, "-m", "labkit", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


PROGRESS = r"^Measuring .*|^01_benchmarking$|\w+: +\d+%\|[^\r\n\]]*\]|\w+: \d+ ok(, [12] skipped)?$"
"""What a run in which nothing is wrong says on stderr: what it measures, bars, and a line for each
section.
"""

SMALLEST = ("--profile", "smoke", "-p", "sizes=nano", "-p", "contexts=64")
"""The shortest run of the whole chain: one size and one context of the smoke profile."""


@pytest.fixture(scope="module")
def broken_off(tmp_path_factory):
    """That run on this machine's CPU, killed in the middle, gone on with and its kernel killed.

    Returns the folder of the results, the ended process, what it said, and the records and the
    report that were left.
    """
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    output = tmp_path_factory.mktemp("figures")
    command = [sys.executable, "-m", "labkit", "run", "01", *SMALLEST, "--output", str(output)]
    generator = random.Random(0)
    killed = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _wait_for_records(output, generator, 2, 6)
    killed.kill()
    killed.wait()
    num_before = _num_recorded(output)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    kernel = _wait_for(lambda: _kernel_of(process.pid))
    _wait_for_records(output, generator, num_before + 2, num_before + 8)
    os.kill(kernel, signal.SIGKILL)
    _, errors = process.communicate(timeout=240)
    (store,) = output.glob("*/records/*.jsonl")
    report = (store.parent.parent / "report.md").read_text(encoding="utf-8")
    return output, process, errors, store.read_bytes(), report


@pytest.fixture(scope="module")
def measured(broken_off):
    """That run, gone on with to its end."""
    output = broken_off[0]
    result = labkit("run", "01", *SMALLEST, "--output", output)
    assert result.returncode == 0, result.stderr[-3000:]
    (folder,) = output.iterdir()
    return folder, result


def _wait_for_records(output: Path, generator: random.Random, first: int, last: int) -> None:
    """Waits for a random number of records between these, and for a moment more."""
    num_lines = generator.randint(first, last)
    _wait_for(lambda: _num_recorded(output) >= num_lines)
    time.sleep(generator.uniform(0, 0.5))


def _num_recorded(output: Path) -> int:
    return sum(path.read_bytes().count(b"\n") for path in output.glob("*/records/*.jsonl"))


@pytest.mark.slow
def test_a_killed_kernel_is_a_failed_run(broken_off):
    """papermill saves a killed notebook as if it had completed; the exit code must not believe
    it.
    """
    _, process, errors, records, report = broken_off
    assert process.returncode == 1, errors[-2000:]
    assert "01_benchmarking" in errors and "DeadKernelError" in errors
    assert "did not run to its end" in report
    assert records.endswith(b"\n")


@pytest.mark.slow
def test_a_run_killed_twice_loses_and_doubles_nothing(measured):
    folder, _ = measured
    records = RecordStore(folder / "records" / "01_benchmarking.jsonl").load()
    counts = Counter(
        record.identity for record in records if record.section not in ("host", "ceilings")
    )
    assert set(counts.values()) == {1}
    phases = {
        section: {r.phase for r in records if r.section == section}
        for section in ("steps", "warmup", "compile")
    }
    assert phases == {
        "steps": set(STEP_PHASES),
        "warmup": set(WARMUP_PHASES),
        "compile": set(COMPILE_PHASES),
    }
    assert len({record.session for record in records}) == 3


@pytest.mark.slow
def test_run_writes_records_figures_and_report(measured):
    folder, result = measured
    records = RecordStore(folder / "records" / "01_benchmarking.jsonl").load()
    sections = {"host", "ceilings", "timer", "steps", "warmup", "compile", "execution", "course"}
    assert {record.section for record in records} == sections
    assert not [record for record in records if record.status in ("error", "timeout")]
    assert {record.device for record in records} == {folder.name}
    assert (folder / "tables" / "01_steps.csv").exists()
    report = (folder / "report.md").read_text(encoding="utf-8")
    for heading in ("What ran", "Roofs", "A training step", "How the numbers are made"):
        assert f"## {heading}" in report
    assert (
        "labkit-figures-folder" not in report
        and "as fast" not in report.split("## How the numbers")[0]
    )
    assert (folder / "01_benchmarking.ipynb").exists()
    assert f"Report: {folder / 'report.md'}" in result.stdout and "ok" in result.stdout
    assert not re.sub(PROGRESS, "", result.stderr, flags=re.MULTILINE).strip()
    done = json.loads(
        (folder / "records" / "01_benchmarking.done.json").read_text(encoding="utf-8")
    )
    assert done["num_missing"] > 0, "the rest of the smoke grid was not asked for"


@pytest.mark.slow
def test_a_second_session_measures_nothing(measured):
    folder, _ = measured
    store = RecordStore(folder / "records" / "01_benchmarking.jsonl")
    before = store.path.read_bytes()
    session = session_of(folder.parent, sizes="nano", contexts=64)
    for section in dict.fromkeys(case.section for case in session.cases):
        session.measure(section)
    assert store.path.read_bytes() == before


@pytest.mark.slow
def test_report_is_the_same_bytes_twice_and_html_stands_alone(measured):
    folder, _ = measured
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    result = labkit("report", "--device", folder.name, "-o", folder.parent, "--html")
    assert (result.returncode, result.stderr) == (0, "")
    assert {path: path.read_bytes() for path in before} == before and folder / "report.md" in before
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert not re.search(r'(src|href)="(?!data:|#)', page)


@pytest.mark.slow
def test_devices_lists_the_run(measured):
    folder, _ = measured
    result = CliRunner().invoke(cli.app, ["devices", "-o", str(folder.parent)])
    assert folder.name in result.output and "01_benchmarking" in result.output


def _wait_for(look):
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        if found := look():
            return found
        time.sleep(0.05)
    raise AssertionError("waited in vain")


def _kernel_of(pid: int) -> int | None:
    """Returns the process id of the notebook kernel that `pid` started."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8").split()
    except FileNotFoundError:
        pytest.skip("needs /proc with children")
    for child in children:
        if "ipykernel" in Path(f"/proc/{child}/cmdline").read_text(encoding="utf-8"):
            return int(child)
    return None


@pytest.fixture
def refused(monkeypatch, capsys):
    """Returns a function that runs the command line to its error: its exit code and what it
    said.
    """

    def run(*arguments) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["labkit", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return ended.value.code, capsys.readouterr().err

    return run


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "99"], "unknown notebook '99'; accepted: 01_benchmarking"),
        (["run", "--profile", "half"], "unknown profile 'half'; accepted: auto, smoke, full, key"),
        (["run", "01", "-p", "sizes=huge"], "unknown size 'huge'; accepted: nano"),
        (["run", "01", "-p", "sizes=xl"], "'xl' means two models: say 'xl-2025'"),
        (
            ["run", "01", "--profile", "smoke", "-p", "sizes=10b"],
            "size '10b' is not in profile 'smoke'; accepted: nano, micro; set profile = \"full\"",
        ),
        (["run", "06", "-p", "lengths=100"], "length 100 is not in profile"),
        (
            ["run", "05", "--profile", "full", "-p", "d_heads=8"],
            "head dimension 8 is not in profile 'full'; accepted: 16",
        ),
        (["run", "01", "-p", "contexts="], "parameter 'contexts' has no value"),
        (
            ["run", "-p", "device=nvidia-h200"],
            "-p device= is not accepted: `labkit run` measures this machine",
        ),
        (
            ["run", "-p", "measure=False"],
            "-p measure= is not accepted: `labkit run` always measures",
        ),
        (["run", "-p", "output=/tmp"], "-p output= is not accepted: use --output DIR"),
        (["run", "-p", "fresh=false"], "-p fresh= is not accepted: use --fresh"),
        (
            ["run", "-p", "colour=red"],
            "unknown parameter 'colour' of 01_benchmarking; accepted: device",
        ),
        *(
            ([*command, "--device", device], f"nothing has been measured on {device[:80]!r} in")
            for command in (["report"], ["compare", "--sessions"])
            for device in (
                "abacus",
                "",
                ".",
                "..",
                "../abacus",
                "a/../b",
                "/",
                "a" * 5000,
                "*",
                "nvidia-h20?",
            )
        ),
    ],
)
def test_refused_before_anything_runs(arguments, message, tmp_path, refused):
    code, said = refused(*arguments, "--output", tmp_path)
    assert code == 2 and message in said, said
    assert len(said.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_a_path_to_records_elsewhere_is_no_device(tmp_path, refused):
    outside, output = tmp_path / "outside" / "cpu-x", tmp_path / "figures"
    for folder in (outside, output / "cpu-x"):
        (folder / "records").mkdir(parents=True)
        store = RecordStore(folder / "records" / "01_benchmarking.jsonl")
        store.append(Record("01_benchmarking", "steps", {}, "forward", "cpu-x", 1, status="oom"))
    for device in ("../outside/cpu-x", outside):
        for command in (["report"], ["compare", "--sessions"]):
            code, said = refused(*command, "--device", device, "--output", output)
            assert code == 2 and said.endswith("measured: cpu-x\n") and len(said.splitlines()) == 1
    assert [path.name for path in outside.iterdir()] == ["records"]


def test_an_empty_file_of_records_is_no_measurement(tmp_path, refused):
    (tmp_path / "abacus" / "records").mkdir(parents=True)
    (tmp_path / "abacus" / "records" / "01_benchmarking.jsonl").touch()
    code, said = refused("report", "--device", "abacus", "--output", tmp_path)
    assert code == 2 and said.endswith("abacus holds no record\n")


@pytest.mark.parametrize("command", [["run"], ["report"], ["compare", "--sessions"]])
def test_an_installation_without_notebooks_measures_nothing_and_says_so(
    command, tmp_path, monkeypatch, refused
):
    monkeypatch.setattr(notebooks, "NOTEBOOKS", tmp_path / "site-packages" / "notebooks")
    code, said = refused(*command, "--output", tmp_path if command == ["run"] else FIGURES)
    assert code == 2 and "install a clone of labkit's repository by `pip install -e .`" in said
    assert len(said.splitlines()) == 1 and not list(tmp_path.iterdir())


def test_a_kernel_spec_of_the_same_name_is_not_used(written, tmp_path, monkeypatch):
    spec = {"argv": ["/bin/false"], "display_name": "Python 3", "language": "python"}
    (tmp_path / "kernels" / "python3").mkdir(parents=True)
    (tmp_path / "kernels" / "python3" / "kernel.json").write_text(json.dumps(spec))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    notebook = notebooks.execute(written("import sys; sys.executable"), {})
    (shown,) = notebook.cells[-1].outputs
    assert shown["data"]["text/plain"] == repr(sys.executable)


def test_what_failed_before_the_report_did_is_said_too(tmp_path, monkeypatch, refused):
    def failing(reason):
        def fail(*_, **__):
            raise notebooks.NotebookError(reason)

        return fail

    monkeypatch.setattr(cli, "_run_notebook", failing("01_benchmarking: the first"))
    monkeypatch.setattr(render, "rebuild", failing("the second"))
    code, said = refused("run", "01", "--profile", "smoke", "--output", tmp_path)
    assert code == 1
    assert said.endswith("labkit: 01_benchmarking: the first\nlabkit: no report: the second\n")


def test_what_is_printed_to_be_pasted_is_quoted(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(captured_step, "keep_capture", lambda case, output: output)
    output = tmp_path / "my cap; touch x"
    cli.profile("small", 512, "bf16", "eager", "train_step", output)
    by_hand, kernels = (
        line.partition(": ")[2] for line in capsys.readouterr().out.splitlines()[1:3]
    )
    assert f"--output={output}" in shlex.split(by_hand)
    assert shlex.split(kernels)[-1] == f"{output}.nsys-rep"


@pytest.mark.parametrize(
    ("options", "written"),
    [
        ({"device": "cpu-x"}, False),
        ({"device": REFERENCE_DEVICE}, True),
        ({"device": "cpu-x", "top_level": True}, True),
    ],
)
def test_only_the_reference_device_or_a_request_writes_the_top_level_report(
    monkeypatch, options, written
):
    asked = []
    monkeypatch.setattr(
        render, "rebuild", lambda device, **values: asked.append(values["top_level"]) or []
    )
    cli.report(**options)
    assert asked == [written]


SAID = {
    "a profiler": (
        "import torch, labkit.measure.profiling\nwith torch.profiler.profile(): torch.ones(1)"
    ),
    "a leak in Triton": """
import ctypes, conftest
from triton._C.libtriton import ir
context = ir.context()
ctypes.pythonapi.Py_IncRef(ctypes.py_object(context))""",
}


@pytest.mark.parametrize("source", SAID.values(), ids=SAID)
def test_libraries_say_nothing_where_nothing_is_wrong(source):
    result = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, cwd=Path(__file__).parent
    )
    assert (result.returncode, result.stderr) == (0, "")


def test_the_summary_of_the_tests_says_why_cases_were_skipped():
    reasons = ["Skipped: needs nsys", "Skipped: needs a CUDA GPU", "Skipped: needs a CUDA GPU"]
    reports = [SimpleNamespace(longrepr=("test_x.py", 1, reason)) for reason in reasons]
    lines = []
    conftest.pytest_terminal_summary(
        SimpleNamespace(stats={"skipped": reports}, write_line=lines.append)
    )
    assert lines == ["2 skipped: needs a CUDA GPU", "1 skipped: needs nsys"]


def test_unwritable_output_is_refused(tmp_path, refused):
    blocked = tmp_path / "file"
    blocked.write_text("")
    code, said = refused("run", "--output", blocked / "figures")
    assert code == 2 and f"cannot write to {blocked / 'figures'}" in said


def test_corrupt_records_stop_the_report(tmp_path, refused):
    records = tmp_path / "some-device" / "records"
    records.mkdir(parents=True)
    (records / "01_benchmarking.jsonl").write_text("{}\nnot json\n")
    code, said = refused("report", "--device", "some-device", "-o", tmp_path)
    assert code == 1 and "01_benchmarking.jsonl, line 1: schema version None" in said
    assert (records / "01_benchmarking.jsonl").read_text() == "{}\nnot json\n"


def test_rebuild_refuses_to_store_another_devices_outputs(tmp_path):
    (tmp_path / "abacus" / "records").mkdir(parents=True)
    store = RecordStore(tmp_path / "abacus" / "records" / "01_benchmarking.jsonl")
    store.append(Record("01_benchmarking", "steps", {}, "forward", "abacus", 1, status="oom"))
    with pytest.raises(ValueError, match=REFERENCE_DEVICE):
        render.rebuild("abacus", output=tmp_path, save_notebooks=True)


def test_notebooks_executed_together_give_what_each_gives_and_the_first_failure_is_told(
    monkeypatch,
):
    broken = ""

    def execute(name, values, lessons):
        time.sleep({"a": 0.2, "b": 0.1}.get(name, 0))
        if name in broken:
            raise notebooks.NotebookError(f"{name}: broken")
        return name.upper()

    monkeypatch.setattr(notebooks, "execute", execute)
    assert render._execute_all(["a", "b", "c"]) == {"a": "A", "b": "B", "c": "C"}
    broken = "bc"
    with pytest.raises(notebooks.NotebookError, match="b: broken"):
        render._execute_all(["a", "b", "c"])
