"""The rules of the house: imports run one way, reading a report needs no torch, one room for
everything.
"""

import ast
import importlib
import io
import subprocess
import sys
import time
import tokenize
import types
from pathlib import Path

import pytest

import labkit
from labkit import notebooks

PACKAGE = Path(labkit.__file__).parent
REPOSITORY = PACKAGE.parent

# From the top: a module may import from its own layer only within its own folder, and from the
# layers below.
LAYERS = [
    ["__main__"],
    ["cli", "lessons"],
    ["report", "experiments"],
    ["parallel", "models"],
    ["kernels", "measure"],
    [
        "accounting",
        "numerics",
        "published",
        "device",
        "monitor",
        "records",
        "notebooks",
        "guard",
    ],
    ["configs"],
    ["__init__"],
]
PLAIN = LAYERS[5]
LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}

WITHOUT_TORCH = (
    "configs",
    "records",
    "accounting",
    "published",
    "notebooks",
    "device",
    "monitor",
    "cli",
    "experiments",
    "report",
)


def modules():
    return sorted(PACKAGE.rglob("*.py"))


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_rooms(path: Path) -> set[str]:
    """Rooms of labkit that a module imports anywhere in it, also inside its functions."""
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the direction"
            if node.module == "labkit":
                rooms |= {alias.name if alias.name in LEVEL else "__init__" for alias in node.names}
            elif node.module and node.module.startswith("labkit."):
                rooms.add(node.module.split(".")[1])
        elif isinstance(node, ast.Import):
            rooms |= {
                alias.name.split(".")[1] for alias in node.names if alias.name.startswith("labkit.")
            }
    return rooms


def test_every_room_has_a_layer():
    assert {room_of(path) for path in modules()} <= set(LEVEL)


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_run_one_way(path):
    room = room_of(path)
    for imported in imported_rooms(path) - {room}:
        # Modules of the plain-file layer may use one another; report and experiments meet only in
        # the records.
        sideways = LEVEL[imported] == LEVEL[room] and room in PLAIN
        assert LEVEL[imported] > LEVEL[room] or sideways, (
            f"{path.name} imports {imported}, which is not below it"
        )


def test_chapters_import_nothing_from_one_another():
    chapters = {name.split("_", 1)[1] for name in notebooks.names()}
    for chapter in chapters:
        path = PACKAGE / "report" / f"{chapter}.py"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("labkit.report"):
                names = {alias.name for alias in node.names} | {
                    node.module.removeprefix("labkit.report.")
                }
                assert not names & chapters, f"{chapter} imports {names & chapters}"


def test_import_walk_sees_a_wrong_direction(tmp_path):
    wrong = tmp_path / "wrong.py"
    wrong.write_text(
        "def f():\n    from labkit.experiments import sweep\n    from labkit import cli\n"
    )
    assert imported_rooms(wrong) == {"experiments", "cli"}


def test_reading_a_report_needs_neither_torch_nor_triton():
    names = [f"labkit.{room}" for room in WITHOUT_TORCH]
    names += [
        f"labkit.report.{path.stem}"
        for path in (PACKAGE / "report").glob("*.py")
        if path.stem != "__init__"
    ]
    code = (
        "import sys, importlib\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        "print([name for name in ('torch', 'triton') if name in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


def test_importing_labkit_is_fast():
    def fastest(code: str) -> float:
        times = []
        for _ in range(3):
            begin = time.perf_counter()
            subprocess.run([sys.executable, "-c", code], check=True)
            times.append(time.perf_counter() - begin)
        return min(times)

    assert fastest("import labkit") - fastest("pass") < 0.5
    assert fastest("import labkit.cli") - fastest("pass") < 1.0


def test_top_level_holds_only_what_was_agreed():
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    if tracked.returncode != 0:
        pytest.skip("not a git checkout")
    agreed = {
        "notebooks",
        "labkit",
        "figures",
        "tests",
        "pyproject.toml",
        "report.md",
        "README.md",
        "LICENSE",
    }
    names = {line.split("/")[0] for line in tracked.stdout.splitlines()}
    assert {name for name in names if not name.startswith(".")} <= agreed


NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def weight(source: str) -> int:
    """Returns the tokens of a module's code: what a reader takes in, however the lines are packed.

    Strings that stand alone, which are docstrings, count for nothing.
    """
    docstrings = {
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    }
    return sum(
        token.type not in NO_CODE
        and not (token.type == tokenize.STRING and token.start[0] in docstrings)
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
    )


def test_the_package_is_small():
    """One limit for all of it, in tokens: comments are free, and fuller lines gain nothing."""
    assert sum(weight(path.read_text(encoding="utf-8")) for path in modules()) <= 192_000


def test_weight_counts_neither_comments_nor_docstrings():
    assert weight('"""Says what it is."""\n\n# Why.\nx = 1\n') == weight("x = 1") == 3


def test_no_room_for_leftovers():
    for path in modules():
        assert path.stem not in ("utils", "helpers", "misc", "common")
        assert not path.stem.endswith(("_v2", "_optimized", "_new"))


def test_public_functions_say_what_they_return():
    missing = []
    for path in modules():
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                documented = ast.get_docstring(node) or path.name in ("cli.py",)
                short = isinstance(node, ast.FunctionDef) and len(node.body) <= 2
                if not documented and not short:
                    missing.append(f"{path.name}: {node.name}")
    assert not missing


def test_modules_have_what_tests_replace_in_them():
    """Tests for a GPU included, which elsewhere do not run and so would not say that a name has
    changed.
    """
    found = 0
    for path in sorted(Path(__file__).parent.glob("test_*.py")):
        names = vars(importlib.import_module(path.stem))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Call(
                    ast.Attribute(attr="setattr" | "object"),
                    [ast.Name(owner), ast.Constant(str(name)), *_],
                    [],
                ):
                    if isinstance(module := names.get(owner), types.ModuleType):
                        assert hasattr(module, name), (
                            f"{path.name}:{node.lineno}: no {name} in {owner}"
                        )
                        found += 1
    assert found > 50
