"""Notebooks: the rules of their cells, their parameters, and what the command line refuses."""

import ast
import errno
import re
import sys
import types

import pytest
from chapters import store_of, write_notebook

from labkit import cli, notebooks
from labkit.configs import FIGURES, REFERENCE_DEVICE, REPOSITORY, RequestError
from labkit.device import detect
from labkit.experiments import sweep
from labkit.lessons import open_chapter
from labkit.records import Record, RecordStore, check, folder_of
from labkit.report import render

NAMES = notebooks.names()
HERE = detect().slug


def code_cells(name):
    return [cell for cell in notebooks.read(name).cells if cell.cell_type == "code"]


def tags(cell) -> set[str]:
    return set(cell.metadata.get("tags", []))


@pytest.mark.parametrize("name", NAMES)
def test_cells_are_thin_and_show_their_last_line(name):
    for cell in code_cells(name):
        tree = ast.parse(cell.source)
        definitions = ast.FunctionDef | ast.ClassDef | ast.Lambda
        # A lesson may show a function as a reader would write it.
        if "lesson" not in tags(cell):
            assert not any(isinstance(node, definitions) for node in ast.walk(tree)), cell.source
        statements = [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]
        assert len(statements) <= 12, cell.source
        earlier = [ast.unparse(line) for line in tree.body[:-1] if isinstance(line, ast.Expr)]
        assert not any(line.startswith("chapter.") for line in earlier), cell.source


@pytest.mark.parametrize("name", NAMES)
def test_prose_holds_no_result(name):
    result = re.compile(r"(?<!\w)\d[\d.,]*\s*(ms|µs|s|×|x|TFLOP/s|GB/s|GiB|MiB)\b")
    for cell in notebooks.read(name).cells:
        # A lesson may ask with a number: how long, if a launch takes so long?
        if cell.cell_type == "markdown" and "lesson" not in tags(cell):
            assert not result.search(cell.source), f"{name}: a typed result in\n{cell.source}"


@pytest.mark.parametrize("name", NAMES)
def test_parameters_show_the_reference_device_without_measuring(name):
    (cell,) = [cell for cell in code_cells(name) if "parameters" in tags(cell)]
    defaults = {}
    exec(cell.source, defaults)
    assert (defaults["device"], defaults["profile"]) == (REFERENCE_DEVICE, "auto")
    assert defaults["measure"] is defaults["save_figures"] is False
    assert all("#" in line for line in cell.source.splitlines()), "every parameter says what it is"


@pytest.mark.parametrize("name", NAMES)
def test_outputs_are_stored_and_none_is_an_error(name):
    """nbval compares nothing in a notebook without outputs. Only a lesson prints."""
    outputs = [(cell, output) for cell in code_cells(name) for output in cell.outputs]
    assert len(outputs) >= 5
    for cell, output in outputs:
        assert output.output_type != "error"
        if output.output_type == "stream":
            assert output.name == "stdout" and "lesson" in tags(cell)


@pytest.mark.parametrize("name", NAMES)
def test_the_committed_report_holds_what_the_notebook_shows(name):
    report = (REPOSITORY / "report.md").read_text(encoding="utf-8")
    assert f"\n#{notebooks.read(name).cells[0].source.splitlines()[0]}\n" in report
    assert check(folder_of(FIGURES, REFERENCE_DEVICE, name))[name]
    for cell in code_cells(name):
        if not {"remove_cell", "lesson"} & tags(cell):
            for output in cell.outputs:
                text = output.get("data", {}).get("text/markdown", "").strip()
                assert text.replace("](../", "](") in report, "run `labkit report --save-notebooks`"


def test_a_notebook_is_named_by_number_or_name():
    for name in ("01", "1", "benchmarking", "01_benchmarking", "01_benchmarking.ipynb"):
        assert notebooks.resolve(name) == "01_benchmarking"
    for name in ("", "0", "9", "bench", "01_"):
        with pytest.raises(RequestError, match="accepted: 01_benchmarking"):
            notebooks.resolve(name)


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Writes a notebook of a parameters cell and another one, and returns its name."""

    def write(source: str) -> str:
        write_notebook(tmp_path, source)
        monkeypatch.setattr(notebooks, "NOTEBOOKS", tmp_path)
        return "09_written"

    return write


def test_a_cell_that_fails_while_records_are_shown_is_an_error(written):
    with pytest.raises(notebooks.NotebookError, match="09_written: ZeroDivisionError"):
        notebooks.show(written("1 / 0"), {})
    with pytest.raises(notebooks.NotebookError, match="09_written: size 'xl'"):
        notebooks.show(written("from labkit import configs; configs.model_config('xl')"), {})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device": "nvidia-h9000"}, f"which is '{HERE}'; to measure here, set device = \"this\""),
        ({"measure": False}, f"nothing has been measured on '{HERE}'"),
        ({"sizes": "nano,10b"}, "'10b' is not in profile 'smoke' of 01_benchmarking; accepted"),
        ({"colour": "red"}, "unknown parameter 'colour' of 01_benchmarking; accepted: sizes, con"),
    ],
)
def test_what_a_chapter_cannot_do_is_one_short_line(tmp_path, changes, message):
    arguments = {"device": "this", "profile": "smoke", "output": str(tmp_path), "measure": True}
    with pytest.raises(RequestError, match=re.escape(message)) as raised:
        open_chapter("01_benchmarking", **arguments | changes)
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 400
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "DeadKernelError"),
        ("import time; time.sleep(60)", "Timeout"),
    ],
)
def test_a_kernel_that_dies_or_hangs_is_an_error(written, monkeypatch, source, message):
    monkeypatch.setattr(notebooks, "CELL_TIMEOUT_S", 2)
    with pytest.raises(notebooks.NotebookError, match=message):
        notebooks.execute(written(source), {})


@pytest.fixture
def ended(monkeypatch, capsys):
    """Returns a function that runs the command line to its exit: the code and what it said."""

    def run(*arguments) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["labkit", *map(str, arguments)])
        with pytest.raises(SystemExit) as raised:
            cli.main()
        return raised.value.code, capsys.readouterr().err

    return run


def a_record(output, device: str) -> RecordStore:
    """Returns the store of a notebook of that device, with one record."""
    store = store_of(output / device, "01_benchmarking")
    store.append(Record("01_benchmarking", "steps", {}, "forward", device, 1, status="oom"))
    return store


def contents(folder) -> dict:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("command", "code", "words"),
    [
        (("run", "07", "--nnodes", "2", "--master-addr", "a..b"), 2, "no machine of the name"),
        (("run", "01", "-p", "sizes=nano", "-p", "sizes=x"), 2, "a parameter twice; accepted"),
        (("run", "99"), 2, "unknown notebook '99'; accepted: 01_benchmarking"),
        (("run", "01", "-p", "sizes=huge"), 2, "unknown size 'huge'; accepted: nano"),
        (("run", "-p", "device=x"), 2, "unknown parameter 'device' of 01_benchmarking; accepted:"),
        (("compare", "cpu-x", "cpu-y"), 2, "cpu-x and cpu-y have no row in common"),
        (("compare", "cpu-x", "abacus"), 2, "nothing has been measured on 'abacus'"),
        (("compare", "cpu-x", "empty"), 2, "empty is no folder of a device"),
        (("compare", "cpu-x"), 2, "say what to compare: two devices"),
        (("compare", "cpu-x", "cut"), 1, "01_benchmarking.jsonl, line 1: not JSON"),
        (("compare", "--sessions", "a" * 5000), 2, f"measured on '{'a' * 80}' in"),
        # Records elsewhere are those of no device.
        (("report", "--device", "../cpu-z"), 2, "nothing has been measured on '../cpu-z'"),
        (("report", "--device", "hollow"), 2, "hollow holds no record"),
        (("plan", "small", "--layers", "99999999"), 2, "99999999 layers; accepted: up to 10,000"),
        (("plan", "small", "--heads", "7"), 2, "7 heads do not divide the width 768"),
        (("verify", "empty"), 2, "is no folder of a device"),
    ],
)
def test_what_cannot_be_done_is_one_line_with_its_exit_code(
    command, code, words, tmp_path, monkeypatch, ended
):
    """And changes no file."""
    output = tmp_path / "figures"
    for folder, device in ((output, "cpu-x"), (output, "cpu-y"), (tmp_path, "cpu-z")):
        a_record(folder, device)
    a_record(output, "hollow").path.write_text("")
    (output / "empty").mkdir()
    if "cut" in command:
        a_record(output, "cut").path.write_text("{\n")
    monkeypatch.chdir(output)
    before = contents(tmp_path)
    options = [] if command[0] == "verify" else ["--output", output]
    found, said = ended(*command, *options)
    assert found == code and words in said and len(said.splitlines()) == 1
    assert contents(tmp_path) == before


def test_a_folder_that_takes_no_file_is_one_line(tmp_path, monkeypatch, ended):
    def refuse(*_, **options):
        raise PermissionError(errno.EACCES, "Permission denied", "figures")

    monkeypatch.setattr(sweep.Session, "__init__", refuse)
    code, said = ended("run", "05", "--profile", "smoke", "--output", tmp_path)
    assert (code, said) == (1, "labkit: figures: Permission denied\n")


def test_output_that_cannot_be_written_is_refused(tmp_path, ended):
    (tmp_path / "file").write_text("")
    code, said = ended("run", "--output", tmp_path / "file" / "figures")
    assert code == 2 and f"cannot write to {tmp_path / 'file' / 'figures'}" in said


def test_only_the_reference_device_writes_the_top_level_report(monkeypatch):
    written = []
    monkeypatch.setattr(render, "write_text_atomic", lambda path, _: written.append(path))
    monkeypatch.setattr(render, "_save_outputs", lambda *_: None)
    monkeypatch.setattr(render, "_report", lambda *_: "")
    monkeypatch.setattr(notebooks, "show", lambda *_: types.SimpleNamespace(cells=[]))
    for device in ("cpu-intel-xeon-processor", REFERENCE_DEVICE):
        cli.report(device)
    pages = [FIGURES / REFERENCE_DEVICE / "report.md", REPOSITORY / "report.md"]
    assert written == [FIGURES / "cpu-intel-xeon-processor/report.md", *pages]
