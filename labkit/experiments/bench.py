"""`labkit bench`: anyone's function in the contests that chapters 05, 06 and 08 share.

It is watched, in the worker process, before and while it is timed. Refused by name are

- the result of an earlier call, and a buffer that every call returns,
- an output in the memory of an input, and an input that is changed,
- work that goes on after the call has returned, on another stream or thread,
- calls that write nothing while they are timed, such as kernels that a CUDA graph drops,
- a time below the roofline's floor.

The function shares the process and could change labkit itself: this finds mistakes and cheats in a
kernel, and is no guard against hostile code. One that hangs or crashes ends its own contest; the
others are measured again without it.

Records go to <output>/<device>/bench/, which no chapter reads. A function is recorded as NAME@HASH,
the first digits of the SHA-256 of the file that holds it.
"""

import ast
import functools
import hashlib
import importlib.util
import inspect
import math
import multiprocessing
import secrets
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor

from labkit import numerics
from labkit.configs import FIGURES, THIS_DEVICE, RequestError
from labkit.device import Device, detect
from labkit.experiments.ceilings import CEILINGS, ceiling_cases, ceiling_rates
from labkit.experiments.contest import (
    ContestCase,
    Implementation,
    Operation,
    Tensors,
    contest_section,
)
from labkit.experiments.operations import (
    DEFINITIONS,
    HEAD,
    IMPLEMENTATIONS,
    SHAPE,
    new_attention,
    row_operation,
)
from labkit.experiments.sections import run_section
from labkit.experiments.sweep import (
    Case,
    PhaseRun,
    Progress,
    Refused,
    Session,
    measuring_lock,
)
from labkit.measure.timing import synchronize
from labkit.records import SESSION_SECTION, Record, newest, to_frame

__all__ = ["MEASUREMENT_VERSION", "bench", "ceiling_rates", "run_case"]

MEASUREMENT_VERSION = 1

# The first kernel is a lesson, and its case is given in other words.
OPERATIONS = [name for name in IMPLEMENTATIONS if name != "weighted_sum"]

LEAST_ROWS = 128
"""Rows, or positions, of the smallest case: on fewer, chance alone may take an honest result out of
its budget. Of 300 draws none took three quarters of it at 64, and eight of 60 went beyond at 32.
"""

LARGEST_CACHE = 2**28
"""Bytes below which a call may stay in a cache, and have no floor by the memory's rate."""

CEILING_MARGIN = 2
"""How much faster than the session's ceiling a call may be: on a busy machine that is too low. None
is ever faster than the datasheet.
"""

LATE_S = 0.3
"""How long a wrong result is waited for, to tell a late one."""


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


# ---- what is watched -----------------------------------------------------------------------------


@dataclass
class Watched(Operation):
    """An operation with other inputs at every round, which watches what its implementations do.

    Attributes:
        kept: the last outputs by (implementation, pass); a CUDA graph writes them again.
        refusals: why a phase gets no time.
    """

    kept: dict[tuple[str, str], Tensors] = field(default_factory=dict)
    refusals: dict[str, str] = field(default_factory=dict)

    def __post_init__(self):
        super().__post_init__()
        tensors = (*self.inputs.values(), *self.others, *self.grad_outs)
        self.tensors = [x for x in tensors if isinstance(x, Tensor)]

    def renew(self) -> None:
        """Moves the numbers of every tensor to other places in it, which nobody can foresee."""
        self.__dict__.pop("expected", None)
        for x in self.tensors:
            values = x.data.flatten().roll(1 + secrets.randbelow(x.numel()))
            # As data: autograd would take it for a mistake.
            x.data.copy_(values.view_as(x))

    def call(self, impl: str, name: str) -> Callable[[], Tensors]:
        """Returns a pass as a function of nothing; what it gives is kept."""
        run = super().call(impl, name)

        def kept() -> Tensors:
            self.kept[impl, name] = values = run()
            return values

        return kept

    def judge(self, impl: str, name: str) -> numerics.Verdict:
        """Returns the worst verdict on a pass.

        Raises AssertionError for a wrong result, ValueError for none, Refused for one that is not
        computed by the call, from its inputs, into memory of its own.
        """
        self._check_call(impl)
        run = super().call(impl, name)
        earlier = ()
        for _ in range(2):
            if self.device.kind == "cuda":
                # The copies below wait for it. Work on another stream that does not wait reads old
                # inputs; work that does ends after the copies.
                torch.cuda._sleep(10**8)
            self.renew()
            inputs = [x.detach().clone() for x in self.tensors]
            values = run()
            copies = [x.detach().clone() for x in values]
            synchronize(self.device.kind)
            for owner, tensors in (("its inputs", self.tensors), ("an earlier call", earlier)):
                if _storages(values) & _storages(tensors):
                    raise Refused(f"its output lies in the memory of {owner}")
            if not _are_equal(inputs, self.tensors):
                raise Refused("it changes its inputs")
            try:
                verdict = max(self.verdicts(name, copies), key=lambda one: one.budget_fraction)
            except AssertionError:
                time.sleep(LATE_S)
                if not _are_equal(copies, values):
                    raise Refused("its work goes on after it has returned") from None
                if earlier:
                    raise Refused("its second result is not that of its inputs: a cache") from None
                raise
            _poison(values)
            earlier = values
        return verdict

    def _check_call(self, impl: str) -> None:
        try:
            outs = self.outputs(impl)
        except TypeError as error:
            arguments = ", ".join((*self.inputs, *map(_described, self.others), *self.options))
            raise ValueError(f"{error}; it is called with {arguments}") from None
        got, expected = (", ".join(map(_described, values)) for values in (outs, self.grad_outs))
        if got != expected:
            raise ValueError(f"it must return {expected}; got {got}")

    def rounds(self, num_rounds: int) -> Iterable:
        """Returns what renews the inputs before each round, and judges what it gave after it."""
        self.kept.clear()  # before anything of this timing is called
        return self._rounds(num_rounds)

    def _rounds(self, num_rounds: int) -> Iterator[None]:
        for _ in range(num_rounds):
            for values in self.kept.values():
                _poison(values)
            self.renew()
            yield
            for (impl, name), values in self.kept.items():
                try:
                    self.verdicts(name, values)
                except AssertionError:
                    reason = "its outputs are wrong, or not written, while it is timed"
                    self.refusals[f"{impl} {name}"] = reason
        self.kept.clear()

    def confirm(self, phase: str, metrics: dict) -> None:
        """Raises Refused for a phase that was wrong while it was timed, or faster than can be."""
        if metrics.get("num_bytes", math.inf) < LARGEST_CACHE:
            metrics |= {"ceiling_fraction": None, "datasheet_fraction": None}
        reason = self.refusals.get(phase)
        if not reason and (metrics["ceiling_fraction"] or 0) > CEILING_MARGIN:
            reason = "its time is below the roofline's floor"
        if reason:
            raise Refused(reason)


def _storages(tensors: Iterable[Tensor]) -> set[int]:
    return {x.untyped_storage().data_ptr() for x in tensors}


def _are_equal(some: Tensors, others: Tensors) -> bool:
    # What is no number equals itself.
    return all(
        torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(some, others, strict=True)
    )


def _poison(tensors: Tensors) -> None:
    """Makes every number no number, whatever its format."""
    for x in tensors:
        x.untyped_storage().fill_(0xFF)


def _described(x: object) -> str:
    if not isinstance(x, Tensor):
        return type(x).__name__
    # A loss may come as fp32 or as its logits do.
    return f"{x.dtype if x.dim() else 'a loss'} {tuple(x.shape)} on {x.device.type}"


# ---- in the worker -------------------------------------------------------------------------------


def _problem(device: Device, parameters: dict) -> Watched:
    new = new_attention if parameters["operation"] == "attention" else row_operation
    return Watched(**vars(new(device, parameters)) | {"baseline": "ours"})


def _load(entrant: Entrant) -> Callable:
    """Returns the function; raises AttributeError where its file has none of that name."""
    sys.path.insert(0, str(entrant.path.parent))  # for what lies beside it
    spec = importlib.util.spec_from_file_location(f"bench_{entrant.path.stem}", entrant.path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return getattr(module, entrant.name)


def _contest(device: Device, case: BenchCase, ceilings: dict[str, float]) -> Iterator[PhaseRun]:
    taken = IMPLEMENTATIONS[case.parameters["operation"]]
    for entrant in case.entrants:
        taken[entrant.label] = Implementation(_load(entrant))
    yield from contest_section(_problem)(device, case, ceilings)


SECTIONS = {**CEILINGS, "contest": _contest}


run_case = functools.partial(run_section, SECTIONS)
"""Yields each phase of a case with the function that measures it. Runs in the worker process."""


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


def bench(
    *functions: Callable | str,
    op: str,
    shape: str = "",
    against: str = "",
    precision: str = "fp32",
    causal: bool = True,
    output: str = "",
    timeout_s: float = 300.0,
) -> pd.DataFrame:
    """Returns how functions fare in the contest of an operation, one row an implementation and
    pass, the fastest first; one that has no time says why in "status" and "reason".
    "ratio_to_ours" is its time over ours, with the interval beside it.

    Args:
        functions: "FILE.py:NAME", or what the top level of a file or of a notebook's cell defines,
            which imports all that it needs. They take what the operation's formula takes.
        op: one of OPERATIONS.
        shape: "batch x heads x length x d_head" of attention, else "rows x columns"; "" for one
            that suits the device.
        against: names of other implementations, with commas between them; "ours" is ours.
        precision: "fp32" or "bf16".
        causal: whether attention has a causal mask.
        output: folder of all results; "" for the repository's figures/.
        timeout_s: limit of one pass of all implementations.

    Raises RequestError for what cannot be asked.
    """
    if multiprocessing.parent_process():
        raise RequestError('the file that is measured calls bench: do it if __name__ == "__main__"')
    _check("operation", op, OPERATIONS)
    _check("precision", precision, ("fp32", "bf16"))
    usual = "sdpa,sdpa_cudnn,fa3,ours" if op == "attention" else "eager,compiled,ours"
    rivals = (against or usual).split(",")
    for name in rivals:
        _check(f"implementation of {op}", name, IMPLEMENTATIONS[op])
    device = detect()
    parameters = {"operation": op, **_sizes(op, shape, device.kind)}
    parameters |= {"causal": causal} if op == "attention" else {}
    folder = Path(output or FIGURES) / device.slug / "bench"
    entrants = tuple(_entrant(function, folder) for function in functions)
    impls = dict.fromkeys((*(one.label for one in entrants), *rivals))
    passes = DEFINITIONS[op].passes if op in DEFINITIONS else ("forward", "forward_backward")
    contest = BenchCase(
        "contest",
        {**parameters, "precision": precision},
        tuple(f"{impl} {name}" for name in passes for impl in impls),
        timeout_s,
        entrants=entrants,
    )
    options = {"device": THIS_DEVICE, "profile": "smoke", "fresh": True, "options": {}}
    session = BenchSession("00_bench", output=output, **options)
    session.cases = [*ceiling_cases([precision], timeout_s), contest]
    session.run()
    frame = to_frame(session.records())
    frame[["implementation", "pass"]] = frame.pop("phase").str.split(" ", expand=True).values
    return frame.reindex(columns=COLUMNS).sort_values(["pass", "median_ms"], ignore_index=True)


COLUMNS = [
    "pass",
    "implementation",
    "status",
    "median_ms",
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


def _sizes(op: str, shape: str, kind: str) -> dict:
    """Returns the sizes of an operation by the name that a case gives them."""
    names = ("rows", "columns")
    step = HEAD
    usual = "8192x4096" if kind == "cuda" else "1024x256"
    if op == "attention":
        names = SHAPE[:4]
        step = 1
        usual = "1x16x4096x64" if kind == "cuda" else "1x2x256x64"
    sizes = [int(text) if text.isdecimal() else 0 for text in (shape or usual).split("x")]
    if len(sizes) != len(names) or 0 in sizes or sizes[-2] < LEAST_ROWS or sizes[-1] % step:
        raise RequestError(
            f"shape {shape!r} of {op}; accepted: {' x '.join(names)}, such as {usual}; "
            f"{names[-2]} from {LEAST_ROWS}, {names[-1]} in steps of {step}"
        )
    return dict(zip(names, sizes, strict=True))


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
