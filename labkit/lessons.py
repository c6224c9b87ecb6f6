"""What the notebooks call: opening a chapter, a kernel's source, one case measured on this machine.

The lessons run live, on any machine, and leave no record.
"""

import importlib
import inspect
import os
import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
from IPython.display import Markdown

from labkit import notebooks
from labkit.configs import AUTO_PROFILE, FIGURES, THIS_DEVICE, RequestError, check_known
from labkit.device import detect, slug_of
from labkit.experiments import sweep
from labkit.records import check_measured
from labkit.report.chapter import Chapter


def open_chapter(
    notebook: str,
    *,
    device: str,
    measure: bool = False,
    profile: str = AUTO_PROFILE,
    fresh: bool = False,
    output: str = "",
    save_figures: bool = False,
    own: str = "",
    **options: Any,
) -> Chapter:
    """Returns a notebook's chapter; with `measure`, measures first what is not recorded yet.

    Args and Raises: as `experiments.sweep.Session`; save_figures: as Chapter; own: as
    `experiments.bench.own_session`, "" for none. Without `measure`, `device` is any that has
    records.
    """
    for name, flag in {"measure": measure, "fresh": fresh}.items():
        # The text "false", which papermill passes on, would count as true.
        if not isinstance(flag, bool):
            raise RequestError(f"{name} must be True or False, not {flag!r}")
    label = ""
    if own:
        # With PyTorch, which the other parts do not need.
        from labkit.experiments.bench import own_entrant, own_session

        label = own_entrant(notebook, own)[1].label
    if measure:
        settings = {
            "device": device,
            "profile": profile,
            "output": output,
            "fresh": fresh,
            "options": options,
        }
        sessions = [sweep.Session(notebook, **settings)]
        if own:
            sessions.append(own_session(notebook, own, **settings))
        sweep.measure(sessions)
        device = sessions[0].device.slug
    else:
        device = slug_of(device)
        try:
            check_measured(device, Path(output or FIGURES))
        except RequestError as error:
            raise RequestError(
                f'{error}; to measure this machine, set measure = True and device = "{THIS_DEVICE}"'
            ) from None
    return Chapter(notebook, device=device, output=output, save_figures=save_figures, own=label)


def show_source(function: Any, start: str = "", lines: int = 20) -> Markdown:
    """Shows `lines` lines of the source of a Python function, class or Triton kernel.

    Args:
        start: text in the first line shown; "" for the definition.

    Raises RequestError if no line holds `start`.
    """
    source = inspect.getsource(getattr(function, "fn", function)).splitlines()
    matches = [number for number, line in enumerate(source) if start in line]
    if not matches:
        raise RequestError(
            f"no line of {getattr(function, '__name__', function)!r} holds {start!r}"
        )
    text = textwrap.dedent("\n".join(source[matches[0] : matches[0] + lines]))
    return Markdown(f"```python\n{text}\n```")


def interpret_kernels() -> None:
    """Makes Triton run kernels in Python, on the CPU, where there is no GPU; RuntimeError if it is
    loaded already.
    """
    if detect().kind == "cuda":
        return
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError(
            "Triton is loaded already: restart the kernel and call interpret_kernels before its "
            "import, with measure = False, which shows what is recorded, and own = ''"
        )
    os.environ["TRITON_INTERPRET"] = "1"


def controls(function: Callable[..., Any], **choices: list) -> Any:
    """Shows a menu for each choice, and what the function returns for what is chosen.

    Args:
        choices: the values of each argument, the first one first. Without ipywidgets the function
            is called with the first ones.

    Raises RequestError for no choices, and for what is no list of values.
    """
    if not choices or not all(values and type(values) is list for values in choices.values()):
        raise RequestError(
            f"choices {choices}; accepted: for each argument of the function a list of at least "
            "one value, such as length=[128, 256]"
        )
    try:
        import ipywidgets
    except ImportError:
        return function(**{name: values[0] for name, values in choices.items()})
    # Without this option the menus are shown, and no result.
    return ipywidgets.interactive(function, {"auto_display": True}, **choices)


def measure_here(notebook: str, section: str, phase: str, **changes: Any) -> pd.DataFrame:
    """Measures one case on this machine, in this process, and returns it as a frame of one row.

    Args:
        notebook: "01_benchmarking"; section: of its records; phase: what to time.
        changes: parameters of the case that differ from the section's first one in the smoke
            profile.

    Returns:
        The case's parameters, metrics and `observed` as columns, as `Chapter.records` names them.

    Raises:
        RequestError: an unknown section, phase or parameter, or a value that it cannot have; names
            the accepted ones.
        Skip: this machine cannot run it.
    """
    check_known("notebook", notebook, notebooks.names())
    experiment = importlib.import_module(f"labkit.experiments.{notebook.split('_', 1)[1]}")
    first_of = {}
    for case in experiment.cases("smoke", detect().kind):
        first_of.setdefault(case.section, case)
    check_known("section", section, first_of)
    case = first_of[section]
    check_known("phase", phase, case.phases)
    for name, value in changes.items():
        check_known("parameter", name, case.parameters)
        usual = case.parameters[name]
        if type(value) is not type(usual) or (type(usual) is int and not 0 < value <= 10**6):
            raise RequestError(
                f"{name} {value!r}; accepted: what is of the type of {usual!r}, of whole numbers "
                "1 to 1,000,000"
            )
    case = replace(case, parameters=case.parameters | changes, phases=(phase,))
    for name, run in experiment.run_case(case):
        measured = run()
        if name == phase:
            break
    if measured.case != case.parameters:
        raise RequestError(f"asked for {case.parameters}, ran {measured.case}")
    others = {"observed": measured.observed, "phase": phase, "status": "ok"}
    return pd.DataFrame([measured.case | measured.metrics | others])
