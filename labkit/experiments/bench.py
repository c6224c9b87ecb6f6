"""`labkit bench`: anyone's function in the contests that chapters 05 to 08 share.

It is watched, in the worker process, before and while it is timed. Refused by name are

- the result of an earlier call, and a buffer that every call returns,
- an output in the memory of an input, and an input or a setting of PyTorch that is changed,
- work that goes on after the call has returned, on another stream or thread, or when it is read,
- calls that write nothing while they are timed, such as kernels that a CUDA graph drops,
- gradients that are not the ranks' averages, on other tokens, after the timing,
- a time below the roofline's floor.

What a function must be, by operation:

- attention: f(q, k, v, causal=…) of (batch, heads, length, d_head), differentiable.
- rms_norm, layer_norm, swiglu, rotary, cross_entropy, linear_cross_entropy, gelu_mlp: a function of
  the tensors that the formula takes; differentiable. `labkit bench --help` lists them,
  `operations` has the formulas: the norms are of a sum, with ε = 10⁻⁶, and return it too; rotary's
  `turn` is a function of one tensor, and holds cos_TD and sin_TD (length, d_head).
- optimizer: a class, C(params, lr=…, betas=…, eps=…, weight_decay=…), whose step() is AdamW's.
- adamw: f(params, grads, exp_avgs, exp_avg_sqs, step, lr=…, betas=…, eps=…, weight_decay=…), which
  updates lists of fp32 tensors in place; `step` counts from 1.
  Both are held to fp64 over all their steps.
- model: a class or function that makes a Module, C(vocab_size=…, context_length=…, d_model=…,
  num_layers=…, num_heads=…, d_ff=…, rope_theta=…), of logits (batch, context, vocabulary) from
  tokens (batch, context). Its number of parameters is that of untied embeddings, no biases and a
  gated feed-forward layer; its results are held to a copy of itself, and so it has no dropout.
- data_parallel: a class, C(module), that is called as the module is. Its method
  finish_gradient_synchronization(), where it has one, is called after each backward pass, and its
  argument bucket_size_mb, where it has one, is 100. Gradients must be averages over the ranks.

The function shares the process and could change labkit itself: this finds mistakes and cheats in a
kernel, and is no guard against hostile code. Each has a contest of its own, in which ours is timed
in turn with it, in a process of its own; so have the others. One that hangs or crashes harms none.

Records go to <output>/<device>/bench/. A function is recorded as NAME@HASH, the first digits of the
SHA-256 of the file that holds it. A chapter shows what its parameter `own` names, and no other.
"""

import ast
import functools
import hashlib
import importlib.util
import inspect
import math
import multiprocessing
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd
import torch
import torch.distributed as dist
from torch import nn

from labkit import numerics
from labkit.configs import FIGURES, THIS_DEVICE, RequestError, check_known
from labkit.device import Device, detect
from labkit.experiments import attention, distributed
from labkit.experiments.contest import IN_TURN, Implementation, contest_section
from labkit.experiments.operations import (
    DEFINITIONS,
    HEAD,
    IMPLEMENTATIONS,
    MODEL,
    MODEL_PASSES,
    SHAPE,
    StepFunction,
    watched,
)
from labkit.experiments.sections import ceiling_cases, run_section
from labkit.experiments.shared_step import WAYS, RankSeen, SharedStep, Way, steps_rank
from labkit.experiments.sweep import Case, Measured, PhaseRuns, Refused, Session, measure
from labkit.models.transformer import language_model_loss
from labkit.parallel.data_parallel import finish_gradients
from labkit.records import SESSION_SECTIONS, to_frame

MEASUREMENT_VERSION = 1

WRAPPERS = ("ours", "alone", "naive", "flat", "overlapped", "ddp")

RIVALS = IMPLEMENTATIONS | {"data_parallel": dict.fromkeys(WRAPPERS)}
"""By operation and name; of data_parallel ways of chapter 07, ours with buckets of 100 MB."""

USUAL = {
    "attention": "sdpa,sdpa_cudnn,fa3,ours",
    "model": "eager,sdpa,ours",
    "adamw": "torch,ours",
    "optimizer": "torch,ours",
    "data_parallel": "alone,naive,ddp,ours",
}
"""By operation the rivals where none are named."""

HELD_TO = {"model": "a copy of itself", "data_parallel": "the ranks' average"}
"""By operation what a result is held to, and its relative error is of; all others are held to fp64.
"""

PASSES = {
    "attention": ("forward", "forward_backward"),
    "model": MODEL_PASSES,
    **{name: definition.passes for name, definition in DEFINITIONS.items()},
}
"""By operation; of all others a step."""

LARGEST_DEVIATION = 1e-3
"""Of a gradient from the ranks' average, relative: sums in another order are off by 1e-6."""

START_S = 30
"""Seconds beyond the limit that ranks have to start."""

LEAST_ROWS = 128
"""Rows, or positions, of the smallest case: on fewer, chance alone may take an honest result out of
its budget. Of 300 draws none took three quarters of it at 64, and eight of 60 went beyond at 32.
"""


@dataclass(frozen=True)
class Entrant:
    """A function of a file; `label` is the name of its records."""

    path: Path
    name: str
    label: str


# ---- in the worker -------------------------------------------------------------------------------


def _load(entrant: Entrant) -> Callable:
    """Returns the function."""
    sys.path.insert(0, str(entrant.path.parent))  # for what lies beside it
    spec = importlib.util.spec_from_file_location(f"bench_{entrant.path.stem}", entrant.path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return getattr(module, entrant.name)


def _enter(case: Case) -> None:
    """Makes implementations of the case's functions."""
    operation = case.parameters.get("operation", "attention")
    for entrant in case.entrants:
        function = _load(entrant)
        if operation == "adamw":
            function = functools.partial(StepFunction, function)
        RIVALS[operation][entrant.label] = Implementation(function)


def _contest(device: Device, case: Case) -> PhaseRuns:
    _enter(case)
    return contest_section(watched)(device, case)


def _attention_call(device: Device, case: Case) -> PhaseRuns:
    """Chapter 05's calls, which are not timed in turn, of a function that has been watched."""
    label = case.parameters["impl"]
    shape = {**case.parameters, "heads": 1, "causal": False}
    _enter(case)
    for name in PASSES["attention"]:
        watched(device, shape).judge(label, name)
    return attention.run_case(case)


def _wrappers(device: Device, case: Case) -> PhaseRuns:
    return distributed.run_ranks(
        wrapper_rank,
        _measured_wrapper,
        device,
        case,
        case.entrants,
        case.parameters,
        case.time_limit_s,
    )


def wrapper_rank(
    phases: Sequence[str], entrants: Sequence[Entrant], parameters: dict, time_limit_s: float
) -> RankSeen:
    """Runs chapter 07's steps on this rank, ours and those of the phases, which may be under
    wrappers of the user's.
    """
    WAYS["ours"] = WAYS["bucketed 100 MB"]
    wrapped: dict[str, nn.Module] = {}
    for entrant in entrants:
        wrap = functools.partial(_wrapped, _load(entrant), wrapped, entrant.label)
        WAYS[entrant.label] = Way(wrap)
    names = [phase.removesuffix(" step") for phase in phases]
    # What takes part in no communication comes first.
    ways = sorted({"ours", *names}, key=lambda way: (way != "alone", way))
    seen = dict(steps_rank(ways, parameters, time_limit_s))
    for name in names:
        deviation = _gradient_deviation(wrapped[name], parameters) if name in wrapped else 0.0
        yield f"{name} step", seen[name] | {"ours": seen["ours"], "gradient_deviation": deviation}


def _wrapped(wrapper: Callable, wrapped: dict, label: str, module: nn.Module) -> nn.Module:
    if "bucket_size_mb" in inspect.signature(wrapper).parameters:
        wrapper = functools.partial(wrapper, bucket_size_mb=100)
    wrapped[label] = wrapper(module)
    return wrapped[label]


def _gradient_deviation(wrapped: nn.Module, parameters: dict) -> float:
    """Returns the largest relative difference between a gradient and the ranks' average of that of
    rank 0's parameters under the naive wrapper. Collective.
    """
    naive = SharedStep(WAYS["naive"], parameters)
    pairs = list(zip(wrapped.parameters(), naive.model.parameters(), strict=True))
    for p, mine in pairs:
        mine.data.copy_(p)
        dist.broadcast(mine.data, src=0)
    tokens = naive.targets  # none that it has seen
    for model in (wrapped, naive.model):
        model.zero_grad()
        language_model_loss(model(tokens), tokens).backward()
        finish_gradients(model)
    errors = [
        math.inf if p.grad is None else numerics.relative_error(p.grad, mine.grad)
        for p, mine in pairs
    ]
    return torch.tensor(errors).max().item()  # what is no number, where one is


def _measured_wrapper(case: Case, ranks: distributed.Seen) -> Measured:
    deviation = max(rank["gradient_deviation"] for rank in ranks)
    if not deviation <= LARGEST_DEVIATION:
        raise Refused(f"its gradients are not the ranks' averages, but {deviation:.2g} off")
    measured = distributed.measured_step(case, ranks)
    metrics = measured.metrics
    ours = distributed.measured_step(case, [rank["ours"] for rank in ranks]).metrics
    ratio = metrics["median_ms"] / ours["median_ms"]
    half_width = 0.0
    if ranks[0]["way"] != "ours":  # not timed in turn: the interval is that of both medians
        half_width = math.hypot(metrics["half_width_fraction"], ours["half_width_fraction"])
    metrics |= {
        "budget_fraction": deviation / LARGEST_DEVIATION,
        "ratio_to_ours": ratio,
        "ratio_to_ours_low": ratio / (1 + half_width),
        "ratio_to_ours_high": ratio * (1 + half_width),
    }
    return replace(measured, case=case.parameters | measured.case)


SECTIONS = {
    **dict.fromkeys(("contest", "speed", "rivals", "kernels"), _contest),
    "attention": _attention_call,
    "wrappers": _wrappers,
}
run_case = functools.partial(run_section, SECTIONS)


def cases(profile: str, device_kind: str) -> list[Case]:
    """Returns no case: a bench is not of a grid."""
    return []


# ---- the session ---------------------------------------------------------------------------------


SUBFOLDER = "bench"
"""Of a device's folder, for records apart from the chapters."""


def own_entrant(notebook: str, own: str) -> tuple[str, Entrant]:
    """Returns the operation and the function that a notebook's parameter `own` names.

    Raises RequestError for another operation, or a file that is not there or lacks it.
    """
    operation = "attention"
    if notebook == "08_siglip2":
        operation, _, own = own.partition(":")
        check_known("operation of own, OPERATION:FILE.py:NAME,", operation, DEFINITIONS)
    return operation, _entrant(own, FIGURES)


def own_session(notebook: str, own: str, **settings) -> Session:
    """Returns a session of a function of the user's in a chapter's contests.

    Args:
        own: "FILE.py:NAME", in chapter 08 after the operation and a colon.
        settings: as Session's.
    """
    operation, entrant = own_entrant(notebook, own)
    session = Session(notebook, subfolder=SUBFOLDER, **settings)
    session.module_name = __name__
    cases = []
    for case in session.cases:
        parameters = case.parameters
        phases = case.phases
        is_joined = parameters.get("operation", "attention") == operation
        is_joined &= parameters.get("timed", IN_TURN) == IN_TURN
        if case.section in SECTIONS and is_joined:
            if "impl" in parameters:
                parameters = parameters | {"impl": entrant.label}
            else:
                # A backward pass alone has the inputs of a forward pass before it.
                names = dict.fromkeys(phase.split(" ")[1] for phase in phases)
                phases = tuple(f"{entrant.label} {x}" for x in names if x != "backward")
            case = replace(
                case, parameters=parameters, phases=phases, compiles=False, entrants=(entrant,)
            )
        elif case.section not in SESSION_SECTIONS:
            continue
        if case not in cases:
            cases.append(case)
    session.cases = cases
    return session


def bench(
    *functions: Callable | str,
    op: str,
    shape: str = "",
    against: str = "",
    precision: str = "fp32",
    causal: bool = True,
    warmup: int = 5,
    steps: int = 10,
    output: str = "",
    timeout_s: float = 300.0,
) -> pd.DataFrame:
    """Returns how functions fare in the contest of an operation, one row an implementation and
    pass, the fastest first; one that has no time says why in "status" and "reason".
    "ratio_to_ours" is its time over ours, with the interval beside it.

    Args:
        functions: "FILE.py:NAME", or what the top level of a file or of a notebook's cell defines,
            which imports all that it needs. The head of this module says what they must be.
        op: one of RIVALS.
        shape: sizes with an x between them, such as "8192x4096", as FORMS and ROWS name them; ""
            for those that suit the device.
        against: names of other implementations, with commas between them; "ours" is ours.
        precision: "fp32" or "bf16".
        causal: whether attention has a causal mask.
        warmup, steps: of a model, calls before its times and the number of these.
        output: folder of all results; "" for the repository's figures/.
        timeout_s: limit of one pass of all implementations.

    Raises RequestError for what cannot be asked.
    """
    if multiprocessing.parent_process():
        raise RequestError('the file that is measured calls bench: do it if __name__ == "__main__"')
    check_known("operation", op, RIVALS)
    precisions = ["fp32"]
    if op not in ("adamw", "optimizer"):
        precisions.append("bf16")
    check_known(f"precision of {op}", precision, precisions)
    if warmup < 1 or steps < 2:
        raise RequestError(f"{warmup} warm-up calls and {steps} steps; accepted: from 1, from 2")
    rivals = dict.fromkeys(str(against or USUAL.get(op, "eager,compiled,ours")).split(","))
    for name in rivals:
        check_known(f"implementation of {op}", name, RIVALS[op])
    kind = detect().kind
    parameters = {"operation": op, **_sizes(op, shape, kind), "precision": precision}
    if op == "attention":
        parameters["causal"] = causal
    if op == "model":
        parameters |= {"warmup": warmup, "steps": steps}
    section = "contest"
    if op == "data_parallel":
        section = "wrappers"
        timeout_s += START_S
        parameters |= {"size": "small" if kind == "cuda" else "nano", "compile": "none"}
        if parameters["world_size"] > torch.cuda.device_count():
            parameters["transport"] = "gloo"  # on the CPU
    session = Session(
        "00_bench",
        output=output,
        device=THIS_DEVICE,
        profile="smoke",
        fresh=True,
        options={},
        subfolder=SUBFOLDER,
    )
    entrants = dict.fromkeys(_entrant(function, session.folder) for function in functions)

    def contest(impls: Iterable[str], *entrants: Entrant) -> Case:
        phases = tuple(f"{impl} {name}" for name in PASSES.get(op, ("step",)) for impl in impls)
        return Case(section, parameters, phases, timeout_s, fresh_process=True, entrants=entrants)

    timeout_s = min(timeout_s, 1e6)  # no process can be waited for longer than 24 days
    session.cases = [
        *ceiling_cases([precision], timeout_s),
        *(contest([one.label], one) for one in entrants),
        contest(rivals),
    ]
    measure([session])
    frame = to_frame(
        x for x in session.store.load() if (x.session, x.section) == (session.id, section)
    )
    frame[["implementation", "pass"]] = frame.pop("phase").str.split(" ", expand=True).values
    frame = frame.reindex(columns=COLUMNS)
    frame["held_to"] = HELD_TO.get(op, "fp64")
    frame.loc[frame["status"] == "timeout", "reason"] += "; timeout_s (--timeout) allows more"
    return frame.sort_values(["pass", "median_ms"], ignore_index=True)


COLUMNS = [
    "pass",
    "implementation",
    "status",
    "median_ms",
    "mean_ms",
    "std_ms",
    "ratio_to_ours",
    "ratio_to_ours_low",
    "ratio_to_ours_high",
    "ceiling_fraction",
    "budget_fraction",
    "relative_error",
    "held_to",
    "disturbed",
    "reason",
]
"""What `bench` returns of the records."""


FORMS = {
    "attention": (SHAPE[:4], LEAST_ROWS, 1, "1x2x256x64", "1x16x4096x64"),
    "model": (
        ("batch", "context_length", *MODEL),
        1,
        1,
        "4x64x128x512x2x4",
        "4x512x768x3072x12x12",
    ),
    "data_parallel": (("batch", "context", "world_size"), 1, 2, "2x32x2", "4x512x2"),
}
"""By operation the sizes that a shape gives, the least of the last but one, the step of the last,
and what suits a CPU and a GPU.
"""

ROWS = (("rows", "columns"), LEAST_ROWS, HEAD, "1024x256", "8192x4096")
"""Of all other operations."""


def _sizes(op: str, shape: str, kind: str) -> dict:
    """Returns the sizes of an operation by the name that a case gives them."""
    names, least, step, *usual = FORMS.get(op, ROWS)
    example = usual[kind == "cuda"]
    sizes = [int(text) if text.isdecimal() else 0 for text in str(shape or example).split("x")]
    rule = f"{names[-2]} from {least}, {names[-1]} in steps of {step}"
    is_right = len(sizes) == len(names) and min(sizes) and sizes[-2] >= least
    if is_right and op == "model":
        rule = "num_heads that divide d_model into even parts"
        is_right = sizes[2] % (2 * sizes[-1]) == 0
    if not is_right or sizes[-1] % step:
        form = f"{' x '.join(names)}, such as {example}"
        raise RequestError(f"shape {shape!r} of {op}; accepted: {form}; {rule}")
    return dict(zip(names, sizes, strict=True))


def _entrant(function: Callable | str, folder: Path) -> Entrant:
    """Returns where a function lies; one of a notebook's cell is written to a file in `folder`."""
    try:
        if isinstance(function, str):
            file, _, name = function.rpartition(":")
            if not file.endswith(".py") or not name:
                raise ValueError("no file of Python, or no name")
            source = Path(file).read_text(encoding="utf-8")
            known = compile(source, file, "exec").co_names
            if name not in known and "import *" not in source:
                raise ValueError(f"it has no {name}")
        else:
            name = function.__qualname__
            if "<" in name:
                raise ValueError("it has no name at the top level of its file")
            file = inspect.getsourcefile(function)
            source = "".join(inspect.findsource(function)[0])
    except (AttributeError, OSError, SyntaxError, TypeError, ValueError) as error:
        raise RequestError(
            f"no source of {function!r}: {error}; accepted: FILE.py:NAME, in 08 after OPERATION:"
        ) from None
    digest = hashlib.sha256(source.encode()).hexdigest()[:8]
    path = Path(file).resolve()
    if not path.is_file():
        # What a cell calls would be called again: kept are definitions, which have a name, and
        # imports and constants, which call nothing.
        cell = ast.parse(source)
        cell.body = [
            node
            for node in cell.body
            if hasattr(node, "name") or ast.Call not in map(type, ast.walk(node))
        ]
        folder.mkdir(parents=True, exist_ok=True)
        path = folder.resolve() / f"{name}_{digest}.py"
        path.write_text(ast.unparse(cell), encoding="utf-8")
    return Entrant(path, name, f"{name}@{digest}")
