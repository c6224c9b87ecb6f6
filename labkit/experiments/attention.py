"""Notebook 05: one attention call, its time, its memory and its error, by implementation, head dimension and length.

Sections: "ceilings" (measured anew each session), "attention" (forward and backward of every
implementation), "transformer" (the backward pass of compiled models, which notebook 01 does not time apart).
"""

import functools
import gc
import os
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from labkit import hardware
from labkit.configs import (
    ATTENTION,
    ATTENTION_BATCH,
    ATTENTION_PASSES,
    BATCH_SIZE,
    MATERIALISING,
    AttentionGrid,
    narrowed,
)
from labkit.experiments import benchmarking
from labkit.experiments.ceilings import (
    ceiling_cases,
    ceiling_name,
    ceiling_value,
    empty_cache,
    measure_ceiling,
    require_precision,
)
from labkit.experiments.sweep import Case, Measured, PhaseRun, Skip
from labkit.kernels.attention import SDPA_BACKENDS, attention, unavailable_reason
from labkit.kernels.reference import attention_reference
from labkit.measure.timing import synchronize, time_callable

__all__ = ["MEASUREMENT_VERSION", "AttentionCall", "cases", "ceiling_name", "ceiling_value", "run_case"]

MEASUREMENT_VERSION = 1

PHASES = ("forward", "backward")

# Part of the name of the autograd node that each implementation must leave behind: the label is what ran.
_NODES = {
    "eager": "SoftmaxBackward",
    "compiled": "CompiledFunctionBackward",
    "compiled_heads": "CompiledFunctionBackward",
    "sdpa_math": "SoftmaxBackward",
    "sdpa_flash": "ScaledDotProductFlashAttention",
    "sdpa_cudnn": "ScaledDotProductCudnnAttention",
    "sdpa_efficient": "ScaledDotProductEfficientAttention",
}
IMPLS = tuple(_NODES)

LARGEST_ERROR = {"fp32": 1e-4, "tf32": 1e-2, "bf16": 5e-2}
"""Relative error against fp64 above which a result is wrong, not imprecise: several times what the precision's
rounding of every product gives (2⁻²⁴, 2⁻¹¹ and 2⁻⁹ an operand). Its time is then no measurement."""

ORACLE_SCORES = 2**25
"""fp64 scores that the oracle holds at once (256 MiB a matrix), whatever the length."""


# ---- the cases ---------------------------------------------------------------------------------------------


def cases(profile: str, device_kind: str, *, lengths: Sequence[int] = (), d_heads: Sequence[int] = ()) -> list[Case]:
    """Returns the cases of `profile`, narrowed to `lengths` and `d_heads` where these are given.

    Raises ValueError for a length or head dimension that the profile does not have.
    """
    grid = ATTENTION[profile]
    wanted_lengths = narrowed(ATTENTION, profile, "lengths", lengths)
    wanted_d_heads = narrowed(ATTENTION, profile, "d_heads", d_heads)
    calls = [
        parameters
        for parameters in _calls(grid)
        if parameters["length"] in wanted_lengths and parameters["d_head"] in wanted_d_heads
    ]
    return [
        *ceiling_cases(tuple(grid.series), grid.case_timeout_s),
        *(
            Case("attention", parameters, PHASES, grid.case_timeout_s, grid.time_limit_s, stop_at_failure=True)
            for parameters in calls
        ),
        *_transformer_cases(grid),
    ]


def _calls(grid: AttentionGrid) -> Iterator[dict]:
    """Yields the parameters of every attention call, a series of rising lengths after the other."""

    def call(impl: str, precision: str, d_head: int, length: int) -> dict:
        names = {"impl": impl, "precision": precision, "d_head": d_head, "length": length}
        return {**names, "batch": ATTENTION_BATCH}

    for precision, impls in grid.series.items():
        for impl in impls:
            for d_head in grid.d_heads:
                lengths = grid.compiled_lengths if impl == "compiled" else grid.lengths
                if impl == "eager" or d_head == grid.long_d_head:
                    lengths = (*lengths, *grid.long_lengths.get(precision, ()))
                for length in lengths:
                    yield call(impl, precision, d_head, length)
        if "compiled" in impls and precision != "tf32":
            for length in grid.heads_lengths:
                yield call("compiled_heads", precision, grid.long_d_head, length)


def _transformer_cases(grid: AttentionGrid) -> list[Case]:
    return [
        Case(
            "transformer",
            {
                "size": size,
                "context": context,
                "batch": BATCH_SIZE,
                "precision": "fp32",
                "compile": "regional",
                "attention": benchmarking.ATTENTION,
            },
            ("backward",),
            grid.case_timeout_s,
            grid.time_limit_s,
        )
        for size in grid.model_sizes
        for context in grid.model_contexts
    ]


# ---- running one -------------------------------------------------------------------------------------------


def run_case(case: Case, ceilings: dict[str, float]) -> Iterator[PhaseRun]:
    """Yields each phase of `case` with the function that measures it. Runs in the worker process."""
    device = hardware.detect()
    if case.section == "ceilings":
        yield "rate", functools.partial(measure_ceiling, device, case)
        return
    if case.section == "transformer":
        yield from benchmarking.run_case(case, ceilings)
        return
    require_precision(device, case.parameters["precision"])
    _require_room(device, case.parameters)
    call = AttentionCall(device, case.parameters)
    try:
        call.require_available()
        for phase in case.phases:
            yield phase, functools.partial(_measure, call, case, phase)
    finally:
        call.close()


def _require_room(device: hardware.Device, parameters: dict) -> None:
    """Raises Skip where half the length cannot fit either: this is then not the first length to run out of memory."""
    total = _memory_bytes(device)
    element_bytes = 2 if parameters["precision"] == "bf16" and parameters["impl"] != "sdpa_math" else 4
    half = parameters["length"] // 2
    scores = element_bytes * parameters["batch"] * half * half
    if parameters["impl"] in MATERIALISING and scores > total:
        raise Skip(f"at length {half} the scores alone take {scores / 1e9:.0f} GB; the device has {total / 1e9:.0f} GB")


def _memory_bytes(device: hardware.Device) -> int:
    if device.kind == "cuda":
        return torch.cuda.get_device_properties(0).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class AttentionCall:
    """The live objects of one case: q, k, v and the gradient of the output, and what is done with them.

    No heads: tensors of (batch, length, d_head), as in the published grid. "compiled_heads" alone has a dimension of
    one head in front of the length, which is what lets the compiler recognise attention.
    """

    def __init__(self, device: hardware.Device, parameters: dict):
        self.device = device
        self.impl = parameters["impl"]
        if self.impl not in IMPLS:
            raise ValueError(f"unknown implementation {self.impl!r}; accepted: {', '.join(IMPLS)}")
        torch.manual_seed(0)
        torch.set_float32_matmul_precision("high" if parameters["precision"] == "tf32" else "highest")
        shape = (parameters["batch"], parameters["length"], parameters["d_head"])
        if self.impl == "compiled_heads":
            shape = (shape[0], 1, *shape[1:])
        dtype = torch.bfloat16 if parameters["precision"] == "bf16" else torch.float32
        self.inputs = [torch.randn(shape, dtype=dtype, device=device.kind, requires_grad=True) for _ in range(3)]
        self.grad_out = torch.randn(shape, dtype=dtype, device=device.kind)
        self.function = self._function()

    def _function(self) -> Callable[..., Tensor]:
        if self.impl in SDPA_BACKENDS:
            return functools.partial(attention, impl=self.impl)
        if self.impl == "eager":
            return attention_reference
        benchmarking.load_compiler(self.device)
        _freeze()
        torch.compiler.config.force_disable_caches = True
        torch._dynamo.utils.counters.clear()
        return torch.compile(attention_reference, dynamic=False, fullgraph=True)

    @property
    def is_compiled(self) -> bool:
        return self.impl.startswith("compiled")

    def require_available(self) -> None:
        """Raises Skip, with PyTorch's own reason, for an SDPA backend that does not take these tensors."""
        if self.impl in SDPA_BACKENDS and (reason := unavailable_reason(self.impl, *self.inputs[:2], causal=False)):
            raise Skip(reason)

    def close(self) -> None:
        """Frees what the case holds."""
        del self.inputs, self.grad_out, self.function
        if self.is_compiled:
            torch.compiler.reset()
        empty_cache(self.device)

    def forward(self) -> Tensor:
        return self.function(*self.inputs)

    def forward_for_backward(self) -> tuple[Tensor, Tensor]:
        """Returns what `Tensor.backward` takes, after a forward pass of its own; earlier gradients are dropped."""
        for x in self.inputs:
            x.grad = None
        return self.forward(), self.grad_out

    def time_first_call(self, phase: str) -> float:
        """Returns the time (ms) of the first call of a compiled pass, which compiles it; no cache counts."""
        arguments = self.forward_for_backward() if phase == "backward" else ()
        function = torch.Tensor.backward if phase == "backward" else self.forward
        synchronize(self.device.kind)
        begin = time.perf_counter()
        function(*arguments)
        synchronize(self.device.kind)
        return 1e3 * (time.perf_counter() - begin)

    def memory(self, phase: str) -> dict[str, int]:
        """Returns the bytes of one pass, inputs included: in use before the backward pass, kept for it, at the peak.

        What is kept is counted in the autograd graph. In use is what CUDA's allocator says it has given out; on other
        devices it is counted too, and there is no peak.
        """
        for x in self.inputs:
            x.grad = None
        empty_cache(self.device)
        is_cuda = self.device.kind == "cuda"
        input_bytes = sum(x.nbytes for x in self.inputs)
        if is_cuda:
            others = torch.cuda.memory_allocated() - input_bytes
            torch.cuda.reset_peak_memory_stats()
        out = self.forward()
        synchronize(self.device.kind)
        self.nodes = node_names(out)
        metrics = {}
        if phase == "forward":
            kept = saved_tensors(out)
            counted = storage_bytes([*kept, *self.inputs, out])
            metrics["in_use_bytes"] = torch.cuda.memory_allocated() - others if is_cuda else counted
            metrics["saved_bytes"] = storage_bytes(kept)
        else:
            if is_cuda:
                torch.cuda.reset_peak_memory_stats()
            out.backward(self.grad_out)
            synchronize(self.device.kind)
        if is_cuda:
            metrics["peak_bytes"] = torch.cuda.max_memory_allocated() - others
        return {**metrics, "device_bytes": _memory_bytes(self.device)}

    def errors(self, phase: str) -> dict[str, float]:
        """Returns the relative errors of one pass against fp64, ‖x − x₆₄‖ / ‖x₆₄‖ over the batch's last sequence.

        The last one, since an offset that overflows does so at the end. Raises AssertionError for a wrong result.
        """
        exact = self.oracle  # before the pass, whose memory it may need
        out, grad_out = self.forward_for_backward()
        results = {"output": out}
        if phase == "backward":
            out.backward(grad_out)
            results = dict(zip(("dq", "dk", "dv"), (x.grad for x in self.inputs), strict=True))
        errors = {f"{name}_relative_error": _relative_error(x[-1], exact[name]) for name, x in results.items()}
        bound = LARGEST_ERROR[self.described()["precision"]]
        for name, error in errors.items():
            if not error <= bound:
                raise AssertionError(f"{self.impl}: {name} is {error:.2g}, more than {bound:g}")
        return errors

    @functools.cached_property
    def oracle(self) -> dict[str, Tensor]:
        """Output and gradients of the batch's last sequence in fp64, by the formula, some queries at a time."""
        place = "cpu" if self.device.kind == "mps" else self.device.kind  # mps has no fp64
        q, k, v, grad_out = (x.detach()[-1].to(place).double() for x in (*self.inputs, self.grad_out))
        k.requires_grad_()
        v.requires_grad_()
        num_rows = max(1, ORACLE_SCORES // k.shape[-2])
        outs, dqs = [], []
        for some_q, some_grad_out in zip(q.split(num_rows, -2), grad_out.split(num_rows, -2), strict=True):
            some_q = some_q.detach().requires_grad_()
            out = attention_reference(some_q, k, v)
            out.backward(some_grad_out)
            outs.append(out.detach())
            dqs.append(some_q.grad)
        results = {"output": torch.cat(outs, -2), "dq": torch.cat(dqs, -2), "dk": k.grad, "dv": v.grad}
        return {name: result.cpu() for name, result in results.items()}

    def described(self) -> dict:
        """Returns the case as read back from the live objects, the implementation from the graph that it left."""
        q = self.inputs[0]
        precision = {torch.bfloat16: "bf16"}.get(q.dtype) or {"highest": "fp32", "high": "tf32"}[
            torch.get_float32_matmul_precision()
        ]
        has_heads = q.dim() == 4 and q.shape[1] == 1
        is_right = any(_NODES[self.impl] in name for name in self.nodes) and has_heads == (
            self.impl == "compiled_heads"
        )
        return {
            "impl": self.impl if is_right else " and ".join(self.nodes),
            "precision": precision,
            "d_head": q.shape[-1],
            "length": q.shape[-2],
            "batch": q.shape[0],
        }

    @functools.cached_property
    def nodes(self) -> list[str]:
        """Names of the autograd nodes that the newest forward pass left, or one made for this."""
        return node_names(self.forward())

    def observed(self) -> dict:
        """Returns what else there is to know of the live objects."""
        allocator = self.device.kind == "cuda"
        return {
            "dtype": str(self.inputs[0].dtype).removeprefix("torch."),
            "shape": list(self.inputs[0].shape),
            "autograd_nodes": self.nodes,
            "memory_source": "CUDA caching allocator" if allocator else "tensors of the autograd graph",
            "oracle": "fp64, last sequence of the batch",
        }

    def num_replacements(self) -> int:
        """Returns how many times the compiler put SDPA in the place of the formula."""
        return torch._dynamo.utils.counters["inductor"]["fuse_attention"]


def _measure(call: AttentionCall, case: Case, phase: str) -> Measured:
    metrics: dict = {}
    if call.is_compiled:
        metrics["first_call_ms"] = call.time_first_call(phase)
        metrics["num_replacements"] = call.num_replacements()
    measure = functools.partial(
        time_callable,
        device_kind=call.device.kind,
        max_samples=ATTENTION_PASSES,
        target_half_width=0.0,
        time_limit_s=case.time_limit_s,
    )
    with hardware.GpuMonitor(call.device.kind) as monitor:
        if phase == "backward":
            timing = measure(torch.Tensor.backward, inputs=call.forward_for_backward)
        else:
            timing = measure(call.forward)
    return Measured(
        metrics={**timing.metrics(), **metrics, **call.memory(phase), **call.errors(phase)},
        case=call.described(),
        observed=call.observed(),
        samples={"pass_ms": list(timing.samples_ms)} if timing.n <= 20 else {},
        timer=timing.description(),
        telemetry=monitor.summary,
    )


def _relative_error(result: Tensor, exact: Tensor) -> float:
    return float((result.detach().cpu().double() - exact).norm() / exact.norm())


@functools.cache
def _freeze() -> None:
    """Takes all that lives by then out of later collections, several of which every case makes."""
    gc.collect()
    gc.freeze()


# ---- what a graph keeps --------------------------------------------------------------------------------------


def _graph(out: Tensor) -> list:
    """Returns every autograd node behind `out`."""
    nodes, pending = {}, [out.grad_fn]
    while pending:
        node = pending.pop()
        if node is not None and node not in nodes:
            nodes[node] = None
            pending += [behind for behind, _ in node.next_functions]
    return list(nodes)


def node_names(out: Tensor) -> list[str]:
    """Returns the names of the autograd nodes behind `out`, each once, in alphabetical order."""
    return sorted({node.name() for node in _graph(out)})


def saved_tensors(out: Tensor) -> list[Tensor]:
    """Returns the tensors that the graph behind `out` keeps for the backward pass, plain numbers left out.

    They are read from the nodes: hooks on saved tensors would make a compiled function compile again.
    """
    kept = []
    for node in _graph(out):
        values = [getattr(node, name) for name in dir(node) if name.startswith("_saved_")]
        values += [*(getattr(node, "saved_tensors", None) or ()), *(getattr(node, "_tensors_no_vc_check", None) or ())]
        kept += [value for value in values if isinstance(value, Tensor) and value.dim()]
    return kept


def storage_bytes(tensors: Sequence[Tensor]) -> int:
    """Returns the bytes of the distinct storages behind `tensors`; several may be views of one."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())
