"""`labkit bench`: anyone's function in the contests that chapters 05 to 08 share.

It is watched, in the worker process, before and while it is timed. Refused by name are

- the result of an earlier call, and a buffer that every call returns,
- an output in the memory of an input, and an input that is changed,
- work that goes on after the call has returned, on another stream or thread,
- calls that write nothing while they are timed, such as kernels that a CUDA graph drops,
- gradients that are not the ranks' averages, on other tokens, after the timing,
- a time below the roofline's floor.

What a function must be, by operation:

- attention: f(q, k, v, causal=…) of (batch, heads, length, d_head), differentiable.
- rms_norm, layer_norm, swiglu, rotary, cross_entropy, linear_cross_entropy, gelu_mlp: a function of
  the tensors that the formula takes, see `operations`; differentiable.
- optimizer: a class, C(params, lr=…, betas=…, eps=…, weight_decay=…), whose step() is AdamW's.
- adamw: f(params, grads, exp_avgs, exp_avg_sqs, step, lr=…, betas=…, eps=…, weight_decay=…), which
  updates lists of fp32 tensors in place; `step` counts from 1.
  Both are held to fp64 over all their steps.
- model: a class or function that makes a Module, C(vocab_size=…, context_length=…, d_model=…,
  num_layers=…, num_heads=…, d_ff=…, rope_theta=…), of logits (batch, context, vocabulary) from
  tokens (batch, context). Its number of parameters is that of untied embeddings, no biases and a
  gated feed-forward layer; its results are held to a copy of itself, in fp64 where it runs in
  that, and so it has no dropout.
- data_parallel: a class, C(module), that is called as the module is. Its method
  finish_gradient_synchronization(), where it has one, is called after each backward pass, and its
  argument bucket_size_mb, where it has one, is 100. Gradients must be averages over the ranks.

The function shares the process and could change labkit itself: this finds mistakes and cheats in a
kernel, and is no guard against hostile code. One that hangs or crashes ends its own contest; the
others are measured again without it.

Records go to <output>/<device>/bench/. A function is recorded as NAME@HASH, the first digits of the
SHA-256 of the file that holds it. A chapter shows what its parameter `own` names, and no other.
"""

import ast
import copy
import functools
import hashlib
import importlib.util
import inspect
import math
import multiprocessing
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import torch.distributed as dist
from torch import nn

from labkit import numerics
from labkit.configs import FIGURES, THIS_DEVICE, RequestError
from labkit.device import Device, detect
from labkit.experiments import attention, distributed
from labkit.experiments.ceilings import CEILINGS, ceiling_cases, ceiling_rates
from labkit.experiments.contest import IN_TURN, ContestCase, Implementation, contest_section
from labkit.experiments.operations import DEFINITIONS, HEAD, IMPLEMENTATIONS, SHAPE
from labkit.experiments.sections import run_section
from labkit.experiments.shared_step import WAYS, Way, steps_rank
from labkit.experiments.sweep import (
    Case,
    Measured,
    PhaseRun,
    Progress,
    Refused,
    Session,
    measuring_lock,
)
from labkit.experiments.watched import MODEL, MODEL_PASSES, StepFunction, spread, watched
from labkit.models.transformer import language_model_loss
from labkit.parallel.launch import rank_device
from labkit.records import SESSION_SECTION, SESSION_SECTIONS, Record, newest, to_frame

__all__ = ["MEASUREMENT_VERSION", "bench", "ceiling_rates", "run_case"]

MEASUREMENT_VERSION = 1

DATA_PARALLEL = {
    "ours": "bucketed 100 MB",
    **{way: way for way in ("alone", "naive", "flat", "overlapped", "ddp")},
}
"""What the rivals of a wrapper are called in chapter 07."""

RIVALS = {
    **IMPLEMENTATIONS,
    "adamw": IMPLEMENTATIONS["optimizer"],
    "data_parallel": DATA_PARALLEL,
}
"""By operation and name."""

# The first kernel is a lesson, and its case is given in other words.
OPERATIONS = [name for name in RIVALS if name != "weighted_sum"]

USUAL = {
    "attention": "sdpa,sdpa_cudnn,fa3,ours",
    "model": "eager,sdpa,ours",
    "adamw": "torch,course,ours",
    "optimizer": "torch,course,ours",
    "data_parallel": "alone,naive,ddp,ours",
}
"""By operation the rivals where none are named."""

PASSES = {name: definition.passes for name, definition in DEFINITIONS.items()} | {
    "adamw": ("step",),
    "optimizer": ("step",),
    "data_parallel": ("step",),
    "model": MODEL_PASSES,
}
"""By operation, of all but attention."""

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


@dataclass(frozen=True)
class BenchCase(ContestCase):
    """A contest that functions of the user join."""

    entrants: tuple[Entrant, ...] = ()


# ---- in the worker -------------------------------------------------------------------------------


def _load(entrant: Entrant) -> Callable:
    """Returns the function; raises Refused where its file has none of that name."""
    sys.path.insert(0, str(entrant.path.parent))  # for what lies beside it
    spec = importlib.util.spec_from_file_location(f"bench_{entrant.path.stem}", entrant.path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    if not hasattr(module, entrant.name):
        raise Refused(f"{entrant.path.name} has no {entrant.name}")
    return getattr(module, entrant.name)


def _contest(device: Device, case: BenchCase, ceilings: dict[str, float]) -> Iterator[PhaseRun]:
    operation = case.parameters.get("operation", "attention")
    if operation == "data_parallel":
        arguments = case.entrants, case.parameters, case.time_limit_s
        steps = (wrapper_rank, _measured_wrapper, device, case, *arguments)
        yield from distributed.run_ranks(*steps)
        return
    for entrant in case.entrants:
        function = _load(entrant)
        if operation == "adamw":
            function = functools.partial(StepFunction, function)
        RIVALS[operation][entrant.label] = Implementation(function)
    yield from contest_section(watched)(device, case, ceilings)


def wrapper_rank(
    phases: Sequence[str], entrants: Sequence[Entrant], *arguments: Any
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Runs chapter 07's steps on this rank, some of them under wrappers of the user's."""
    ways = {phase.removesuffix(" step"): phase for phase in phases}
    WAYS.update({name: WAYS[way] for name, way in DATA_PARALLEL.items()})
    pairs = {}
    for entrant in entrants:
        if entrant.label in ways:
            wrap = functools.partial(_wrapped, _load(entrant), pairs, entrant.label)
            WAYS[entrant.label] = Way(wrap)
    for way, seen in steps_rank(list(ways), *arguments):
        deviation = _gradient_deviation(*pairs[way]) if way in pairs else 0.0
        yield ways[way], seen | {"gradient_deviation": deviation}


def _wrapped(wrapper: Callable, pairs: dict, label: str, module: nn.Module, **_: Any) -> nn.Module:
    plain = copy.deepcopy(module)
    has_buckets = "bucket_size_mb" in inspect.signature(wrapper).parameters
    wrapped = wrapper(module, **({"bucket_size_mb": 100} if has_buckets else {}))
    pairs[label] = wrapped, plain
    return wrapped


def _gradient_deviation(wrapped: nn.Module, plain: nn.Module) -> float:
    """Returns the largest relative difference between a gradient and the ranks' average of that of
    rank 0's parameters without a wrapper. Collective.
    """
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    tokens = torch.randint(plain.config.vocab_size, (2, plain.max_context), generator=generator)
    tokens = tokens.to(rank_device())
    pairs = list(zip(wrapped.parameters(), plain.parameters(), strict=True))
    for p, mine in pairs:
        mine.data.copy_(p)
        dist.broadcast(mine.data, src=0)
    for model in (wrapped, plain):
        model.zero_grad()
        language_model_loss(model(tokens), tokens).backward()
    if finish := getattr(wrapped, "finish_gradient_synchronization", None):
        finish()
    for _, mine in pairs:
        dist.all_reduce(mine.grad, dist.ReduceOp.AVG)
    return max(
        math.inf if p.grad is None else numerics.relative_error(p.grad, mine.grad)
        for p, mine in pairs
    )


def _measured_wrapper(case: BenchCase, ranks: distributed.Seen) -> Measured:
    deviation = max(rank["gradient_deviation"] for rank in ranks)
    if not deviation <= LARGEST_DEVIATION:
        raise Refused(f"its gradients are not the ranks' averages, but {deviation:.2g} off")
    measured = distributed.measured_step(case, ranks)
    metrics = measured.metrics | spread(measured.samples["step_ms"])
    metrics["budget_fraction"] = deviation / LARGEST_DEVIATION
    return replace(measured, case=case.parameters | measured.case, metrics=metrics)


def _attention_call(
    device: Device, case: BenchCase, ceilings: dict[str, float]
) -> Iterator[PhaseRun]:
    """Chapter 05's calls, which are not timed in turn, of a function that has been watched."""
    (entrant,) = case.entrants
    function = _load(entrant)
    IMPLEMENTATIONS["attention"][entrant.label] = Implementation(function)
    shape = {**case.parameters, "heads": 1, "causal": False}
    for name in ("forward", "forward_backward"):
        watched(device, shape).judge(entrant.label, name)
    attention.enter(entrant.label, functools.partial(function, causal=False))
    yield from attention.run_case(case, ceilings)


SECTIONS = {
    **CEILINGS,
    **dict.fromkeys(("contest", "speed", "rivals", "kernels"), _contest),
    "attention": _attention_call,
}


def run_case(case: Case, ceilings: dict[str, float]) -> Iterator[PhaseRun]:
    """Yields each phase of a case with the function that measures it. Runs in the worker
    process.
    """
    numerics.set_precision(case.parameters.get("precision", "fp32"))
    return run_section(SECTIONS, case, ceilings)


def cases(profile: str, device_kind: str) -> list[Case]:
    """Returns no case: a bench is not of a grid."""
    return []


# ---- the session ---------------------------------------------------------------------------------


class BenchSession(Session):
    """A session that records apart from the chapters."""

    subfolder = "bench"

    def run(self) -> None:
        """Measures the ceilings and the contest, whatever was measured before."""
        *ceilings, contest = self.cases
        with (
            measuring_lock(self.device, "bench"),
            self.store.locked(),
            Progress([self]) as progress,
        ):
            self._run_section(SESSION_SECTION, ceilings, progress)
            self._run_contest(contest, progress)

    def _run_contest(self, case: BenchCase, progress: Progress) -> None:
        """Measures a contest. Where a function has ended it for all, each has one of its own, and
        the others one without it.
        """
        self._run_section("contest", [case], progress)
        failed = [x for x in self.records() if x.reason and x.phase in case.phases]
        reasons = {x.reason for x in failed if "@" in x.phase}
        if not any(x.reason in reasons for x in failed if "@" not in x.phase):
            return
        for entrants in zip(case.entrants) if len(case.entrants) > 1 else [()]:
            labels = [one.label for one in entrants]
            phases = [x for x in case.phases if "@" not in x or x.split(" ")[0] in labels]
            self._run_contest(replace(case, phases=tuple(phases), entrants=entrants), progress)

    def records(self) -> list[Record]:
        """Returns the newest record of each phase of this session's contest."""
        records = newest(self.store.load())
        return [x for x in records if (x.session, x.section) == (self.id, "contest")]


OWN_SECTIONS = ("attention", "speed", "rivals", "kernels")
"""Of the chapters, what a function of the user's is measured in."""


def own_entrant(notebook: str, own: str) -> tuple[str, Entrant]:
    """Returns the operation and the function that a notebook's parameter `own` names.

    Raises RequestError for another operation, or a file that is not there.
    """
    if notebook != "08_siglip2":
        return "attention", _entrant(own, FIGURES)
    operation, _, function = own.partition(":")
    accepted = [name for name in DEFINITIONS if name in OPERATIONS]
    if operation not in accepted:
        form = "OPERATION:FILE.py:NAME, OPERATION one of " + ", ".join(accepted)
        raise RequestError(f"own {own!r} of {notebook}; accepted: {form}")
    return operation, _entrant(function, FIGURES)


class OwnSession(Session):
    """A session of a function of the user's in a chapter's contests, recorded apart from it.

    Args:
        own: "FILE.py:NAME", in chapter 08 after the operation and a colon.
    """

    subfolder = "bench"

    def __init__(self, notebook: str, own: str, **options: Any):
        super().__init__(notebook, **options)
        self.module_name = __name__
        operation, entrant = own_entrant(notebook, own)
        cases = {}
        for case in self.cases:
            parameters = case.parameters
            phases = case.phases
            computed = parameters.get("operation", "attention")
            is_alone = parameters.get("timed", IN_TURN) != IN_TURN
            if case.section not in OWN_SECTIONS or computed != operation or is_alone:
                continue
            if "impl" in parameters:
                parameters = parameters | {"impl": entrant.label}
            else:
                # A backward pass alone has the inputs of a forward pass before it.
                names = dict.fromkeys(phase.split(" ")[1] for phase in phases)
                phases = tuple(f"{entrant.label} {x}" for x in names if x != "backward")
            limits = {"timeout_s": case.timeout_s, "time_limit_s": case.time_limit_s}
            own_case = BenchCase(case.section, parameters, phases, **limits, entrants=(entrant,))
            cases[case.section, str(parameters)] = own_case
        always = [case for case in self.cases if case.section in SESSION_SECTIONS]
        self.cases = [*always, *cases.values()]


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
        op: one of OPERATIONS.
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
    _check("operation", op, OPERATIONS)
    _check("precision", precision, ("fp32", "bf16"))
    if precision != "fp32" and op in ("adamw", "optimizer"):
        raise RequestError(f"precision {precision!r} of {op}; accepted: fp32")
    if warmup < 1 or steps < 2:
        raise RequestError(f"{warmup} warm-up calls and {steps} steps; accepted: from 1, from 2")
    rivals = (against or USUAL.get(op, "eager,compiled,ours")).split(",")
    for name in rivals:
        _check(f"implementation of {op}", name, RIVALS[op])
    device = detect()
    parameters = {"operation": op, **_sizes(op, shape, device.kind), "precision": precision}
    if op == "attention":
        parameters["causal"] = causal
    if op == "model":
        parameters |= {"warmup": warmup, "steps": steps}
    if op == "data_parallel":
        size = "small" if device.kind == "cuda" else "nano"
        parameters |= {"size": size, "compile": "none"}
        if parameters["world_size"] > torch.cuda.device_count():
            parameters["transport"] = "gloo"  # on the CPU
    folder = Path(output or FIGURES) / device.slug / "bench"
    entrants = tuple(_entrant(function, folder) for function in functions)
    impls = dict.fromkeys((*(one.label for one in entrants), *rivals))
    passes = PASSES.get(op, ("forward", "forward_backward"))
    phases = tuple(f"{impl} {name}" for name in passes for impl in impls)
    limit_s = timeout_s + START_S if op == "data_parallel" else timeout_s
    contest = BenchCase("contest", parameters, phases, limit_s, entrants=entrants)
    options = {"device": THIS_DEVICE, "profile": "smoke", "fresh": True, "options": {}}
    session = BenchSession("00_bench", output=output, **options)
    session.cases = [*ceiling_cases([precision], timeout_s), contest]
    session.run()
    frame = to_frame(session.records())
    frame[["implementation", "pass"]] = frame.pop("phase").str.split(" ", expand=True).values
    frame = frame.reindex(columns=COLUMNS)
    ours_ms = frame[frame["implementation"] == "ours"].set_index("pass")["median_ms"]
    ratio = frame["median_ms"] / frame["pass"].map(ours_ms)
    frame["ratio_to_ours"] = frame["ratio_to_ours"].fillna(ratio)
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
    "disturbed",
    "reason",
]
"""What `bench` returns of the records."""


def _check(what: str, value: str, accepted: Iterable[str]) -> None:
    if value not in accepted:
        raise RequestError(f"unknown {what} {value!r}; accepted: {', '.join(accepted)}")


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
    sizes = [int(text) if text.isdecimal() else 0 for text in (shape or example).split("x")]
    if len(sizes) != len(names) or 0 in sizes or sizes[-2] < least or sizes[-1] % step:
        raise RequestError(
            f"shape {shape!r} of {op}; accepted: {' x '.join(names)}, such as {example}; "
            f"{names[-2]} from {least}, {names[-1]} in steps of {step}"
        )
    named = dict(zip(names, sizes, strict=True))
    if op == "model" and named["d_model"] % (2 * named["num_heads"]):
        raise RequestError(
            f"num_heads {named['num_heads']} of d_model {named['d_model']}; accepted: what divides "
            "it into even parts"
        )
    return named


def _entrant(function: Callable | str, folder: Path) -> Entrant:
    """Returns where a function lies; one of a notebook's cell is written to a file in `folder`."""
    name = getattr(function, "__qualname__", "")
    try:
        if isinstance(function, str):
            file, _, name = function.rpartition(":")
            source = Path(file).read_text(encoding="utf-8")
        else:
            file = inspect.getsourcefile(function)
            source = "".join(inspect.findsource(function)[0])
    except (OSError, TypeError, ValueError) as error:
        raise RequestError(f"no source of {function!r}: {error}") from None
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
