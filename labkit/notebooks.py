"""The notebooks as programs: finding them by number or name, narrowing their grids, executing them.

Nothing here imports torch.
"""

import ast
import functools
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from labkit import guard
from labkit.configs import GRIDS, NARROWED, NOTEBOOKS, OWN, Grid, RequestError, model_config

# Where jsonschema, which nbformat imports, finds this package, it takes four seconds to build 38
# grammars of addresses.
sys.modules.setdefault("rfc3987_syntax", None)

CELL_TIMEOUT_S = 6 * 3600
"""For a cell that hangs beyond every case's own timeout; a dead kernel is noticed at once."""

LESSON = "lesson"
"""Tag of the cells that teach: predictions, live examples, things to try. The report leaves them
out.
"""


class NotebookError(Exception):
    """A notebook that did not complete; the message says which and why."""


def names() -> list[str]:
    """Returns the names of all notebooks, in order: ["01_benchmarking", …]; RequestError where they
    are not at hand.
    """
    stems = sorted(path.stem for path in NOTEBOOKS.glob("[0-9][0-9]_*.ipynb"))
    if not stems:
        how = "install a clone of labkit's repository by `pip install -e .`"
        raise RequestError(f"no notebooks in {NOTEBOOKS}; {how}")
    return stems


def resolve(name: str) -> str:
    """Returns the notebook with this number ("01", "1"), name ("benchmarking") or both
    ("01_benchmarking").

    Raises RequestError for another one.
    """
    for candidate in names():
        number, title = candidate.split("_", 1)
        if name in (candidate, f"{candidate}.ipynb", title, number, number.lstrip("0")):
            return candidate
    accepted = f"{', '.join(names())} (or the number, or the name alone)"
    raise RequestError(f"unknown notebook {name!r}; accepted: {accepted}")


def path(name: str) -> Path:
    return NOTEBOOKS / f"{name}.ipynb"


def read(name: str):
    """Returns the notebook as an nbformat node."""
    import nbformat

    return nbformat.read(path(name), as_version=4)


@functools.cache  # a comparison of devices asks for each of hundreds of rows
def title(name: str) -> str:
    """Returns the notebook's title, "01 · Benchmarking"."""
    return read(name).cells[0].source.splitlines()[0].lstrip("# ")


def without_lessons(notebook):
    """Returns the notebook without the cells tagged "lesson", which run live examples and hold no
    result.
    """
    cells = [cell for cell in notebook.cells if LESSON not in cell.metadata.get("tags", [])]
    return type(notebook)(notebook, cells=cells)


def narrowing(name: str, profile: str, options: Mapping) -> dict[str, list]:
    """Returns what `options` name of a notebook's grid, in the grid's order; nothing for an option
    without a value, which leaves the grid whole.

    A size may be given by an alias. Raises RequestError for an option or a value that the grid of
    `profile` does not have; it names the profile that has it, if one does.
    """
    grids = {other: _narrowed_by(grid) for other, grid in GRIDS.get(name, {}).items()}
    accepted = grids.get(profile, {})
    result = {}
    for key, value in options.items():
        if key not in accepted:
            names = ", ".join(accepted) or "none"
            if name in OWN:
                names += ", and own=FILE.py:NAME, in 08 after OPERATION:, for a function of yours"
            raise RequestError(f"unknown parameter {key!r} of {name}; accepted: {names}")
        wanted = listed(key, value)
        if key == "sizes":
            wanted = [model_config(str(size)).name for size in wanted]
        for one in wanted:
            if one not in accepted[key]:
                others = [other for other, grid in grids.items() if one in grid[key]]
                hint = f'; set profile = "{others[0]}"' if others else ""
                raise RequestError(
                    f"{NARROWED[key]} {one!r} is not in profile {profile!r} of {name}; "
                    f"accepted: {', '.join(map(str, accepted[key]))}{hint}"
                )
        if wanted:
            result[key] = [one for one in accepted[key] if one in wanted]
    return result


def _narrowed_by(grid: Grid) -> dict[str, list]:
    """Returns the values of a grid that one can name, by parameter."""
    values = {key: getattr(grid, key) for key in NARROWED if hasattr(grid, key)}
    for lengths in getattr(grid, "long_lengths", {}).values():  # of some series only
        values["lengths"] += lengths
    for shape in getattr(grid, "rivalries", ()):
        values["d_heads"] += (shape["d_head"],)
    for way in getattr(grid, "executions", ()):
        values["contexts"] += way["contexts"]
    return {key: list(values[key] if key == "sizes" else sorted({*values[key]})) for key in values}


def listed(key: str, value: Any) -> list:
    """Returns the values of the parameter `key`, given as a list, as text with commas, or as one
    number, as plain papermill hands it over.

    Raises RequestError for text that holds no value.
    """
    if not isinstance(value, str):
        return list(value) if isinstance(value, list | tuple) else [value]
    items = re.findall(r"[^\s,'\"\[\]]+", value)
    if not items and value != "[]":
        raise RequestError(f"parameter {key!r} has no value; leave it out, or set [], for all")
    return [int(item) if item.isdecimal() else item for item in items]


def show(name: str, values: Mapping):
    """Executes a notebook's cells but the lessons in this process and returns it with what their
    last lines show.

    For notebooks that measure nothing: starting a kernel takes longer than running most of them.

    Args:
        name: of the notebook; its file is not changed.
        values: parameters to set.

    Raises:
        NotebookError: a cell raised.
    """
    from IPython.core.formatters import DisplayFormatter
    from nbformat.v4 import new_output

    notebook = without_lessons(read(name))
    variables = {}
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        body = ast.parse(cell.source).body
        last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
        try:
            exec(compile(ast.Module(body, []), name, "exec"), variables)
            shown = last and eval(compile(ast.Expression(last.value), name, "eval"), variables)
        except Exception as error:
            kind = "" if isinstance(error, RequestError) else f"{type(error).__name__}: "
            raise NotebookError(f"{name}: {kind}{error}") from error
        if "parameters" in cell.metadata.get("tags", []):
            variables |= values
        cell["outputs"] = []
        if shown is not None:
            data, metadata = DisplayFormatter().format(shown)
            cell.outputs.append(new_output("execute_result", data, metadata=metadata))
    return notebook


def execute(name: str, values: Mapping, *, lessons: bool = False):
    """Executes a notebook in a new kernel of this Python and returns it with its outputs.

    Args:
        name: of the notebook; its file is not changed.
        values: parameters to set.
        lessons: execute the cells tagged "lesson" too; without them only measurements use the
            device.

    Raises:
        NotebookError: a cell raised, the kernel died, or a cell exceeded CELL_TIMEOUT_S.
    """
    import papermill
    from jupyter_client.kernelspec import KernelSpecManager
    from jupyter_client.manager import AsyncKernelManager

    class ThisPython(AsyncKernelManager):
        """Starts this Python: a kernel spec of the same name may be another environment's."""

        def _kernel_spec_manager_default(self) -> KernelSpecManager:
            return KernelSpecManager(kernel_dirs=[])

    guard.move_temporary_files()  # of the kernel: it is ended too fast to remove them
    os.environ.setdefault(
        "PYDEVD_DISABLE_FILE_VALIDATION", "1"
    )  # the kernel's debugger warns about frozen modules
    try:
        return papermill.execute_notebook(
            read(name) if lessons else without_lessons(read(name)),
            None,  # no file: papermill would write all of it before and after every cell
            parameters=dict(values),
            kernel_name="python3",
            kernel_manager_class=ThisPython,
            progress_bar=False,
            execution_timeout=CELL_TIMEOUT_S,
            # Silences its transport, and the interrupt before its end, which it logs as an error.
            extra_arguments=[
                "--IPKernelApp.log_level=50",
                f"--IPKernelApp.ignore_cwd={guard.ignores_folder()}",
            ],
            # asked to end, it would warn of what its event loop still holds
            shutdown_kernel="immediate",
        )
    except papermill.PapermillExecutionError as error:
        kind = "" if error.ename == RequestError.__name__ else f"{error.ename}: "
        raise NotebookError(f"{name}: {kind}{error.evalue}") from error
    except (RuntimeError, TimeoutError) as error:  # a dead kernel is a RuntimeError
        raise NotebookError(f"{name}: {type(error).__name__}: {error}") from error
