"""The rules of the house: imports run one way, reading a report needs no torch, the package is
small.
"""

import ast
import io
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

import labkit
from labkit import notebooks

PACKAGE = Path(labkit.__file__).parent
TESTS = Path(__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))

# From the top: a module may import from its own layer only within its own folder, and from the
# layers below.
LAYERS = [
    ["__main__"],
    ["cli", "lessons"],
    ["report", "experiments"],
    ["parallel", "models"],
    ["kernels", "measure"],
    ["accounting", "numerics", "published", "device", "monitor", "records", "notebooks", "guard"],
    ["configs"],
    ["__init__"],
]
LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}

WITHOUT_TORCH = (
    "cli",
    "configs",
    "records",
    "accounting",
    "published",
    "notebooks",
    "device",
    "monitor",
    "experiments",
    "report",
)


def imports(path: Path) -> set[str]:
    """Returns the full names of what a module imports anywhere in it, also inside its functions."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the direction"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return names


def imported_rooms(path: Path) -> set[str]:
    names = [name.split(".") for name in imports(path) if name.startswith("labkit.")]
    return {room if room in LEVEL else "__init__" for _, room, *_ in names}


def test_imports_run_one_way():
    wrong = []
    for path in MODULES:
        room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        for imported in imported_rooms(path) - {room}:
            # Modules of the plain-file layer may use one another; report and experiments meet only
            # in the records.
            is_sideways = LEVEL[imported] == LEVEL[room] and room in LAYERS[5]
            if LEVEL[imported] <= LEVEL[room] and not is_sideways:
                wrong.append(f"{path}: {imported} is not below {room}")
    assert not wrong


def test_chapters_import_nothing_from_one_another():
    chapters = {name.split("_", 1)[1] for name in notebooks.names()}
    for chapter in chapters:
        for name in imports(PACKAGE / "report" / f"{chapter}.py"):
            if name.startswith("labkit.report."):
                assert not chapters & set(name.split(".")), f"{chapter} imports {name}"


def test_reading_a_report_needs_neither_torch_nor_triton_and_a_model_no_compiler():
    names = [f"labkit.{room}" for room in WITHOUT_TORCH]
    report = (PACKAGE / "report").rglob("*.py")
    names += [".".join(("labkit", *path.relative_to(PACKAGE).parts))[:-3] for path in report]
    code = (
        "import sys, importlib, labkit.report.plan\n"
        "print('matplotlib' in sys.modules)\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        "print([name for name in ('torch', 'triton') if name in sys.modules])\n"
        "import labkit.models.siglip2\n"
        "print('torch._dynamo' in sys.modules)"
    )
    said = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert said.split() == ["False", "[]", "False"]


NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def weight(source: str) -> tuple[int, int]:
    """Returns the tokens of a module's code, and the lines that hold one.

    Tokens are what a reader takes in, however the lines are packed. Comments count for nothing, nor
    do strings that stand alone, which are docstrings.
    """
    docstrings = {
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    num_tokens, lines = 0, set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        is_docstring = token.type == tokenize.STRING and token.start[0] in docstrings
        if token.type not in NO_CODE and not is_docstring:
            num_tokens += 1
            lines.update(range(token.start[0], token.end[0] + 1))
    return num_tokens, len(lines)


# What stands; it may only fall. The design asks for 125,000 of the package.
@pytest.mark.parametrize(
    ("folder", "most_tokens", "most_a_line"),
    [(PACKAGE, 154_164, 10), (TESTS, 90_000, 11)],
)
def test_the_whole_grows_no_heavier(folder, most_tokens, most_a_line):
    """One total: what grows in one file has to go in another, and not into fuller lines."""
    weights = [weight(path.read_text(encoding="utf-8")) for path in folder.rglob("*.py")]
    num_tokens, num_lines = map(sum, zip(*weights, strict=True))
    assert num_tokens <= min(most_tokens, most_a_line * num_lines)
