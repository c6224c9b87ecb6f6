"""Notebook 08: SigLIP 2's vision encoder on packed images, as first written, step by step faster,
beside its peers.

Sections: "ceilings", "floor" (the matrix products alone), "steps" (forward pass, both passes, and
both with AdamW, of a batch under every way to run the encoder), "profile" (their kernels),
"modules" (each part of the encoder alone), "accuracy" (a shallow encoder against fp64), "kernels"

A step is timed by replaying it from a CUDA graph, call by call, and back to back. Workload "A" is
images of one size; "B" as many patches in images of many sizes.
"""

import contextlib
import dataclasses
import functools
import importlib.util
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from labkit.configs import SIGLIP2, SIGLIP2_SIZES, Siglip2Config
from labkit.device import Device
from labkit.experiments.ceilings import CEILINGS, ceiling_cases, ceiling_rates
from labkit.experiments.contest import contest_section, draw, rate_metrics
from labkit.experiments.operations import DEFINITIONS, RowOperation, contest_case
from labkit.experiments.sections import (
    Timed,
    run_section,
    section,
    sustained_metrics,
    timed,
    timed_with_peak,
)
from labkit.experiments.sweep import Case, Measured, Skip
from labkit.kernels import KERNEL_CLASSES
from labkit.kernels.attention import load_fa3, unavailable_reason
from labkit.measure.profiling import RangeMarker, capture_with_kineto, launches
from labkit.measure.timing import time_callable
from labkit.models.siglip2 import (
    ATTENTION,
    IMPLS,
    MASK_OPTIONS,
    POSITIONS,
    Siglip2Encoder,
    add_and_norm,
)
from labkit.numerics import DTYPES, relative_error

__all__ = ["MEASUREMENT_VERSION", "cases", "ceiling_rates", "run_case"]

MEASUREMENT_VERSION = 1

STEP_PHASES = ("forward", "forward_backward", "step")  # the last with AdamW
PASSES = STEP_PHASES[:2]
MODULES = ("embeddings", "LayerNorm", "attention", "MLP", "layer")
MODULE_IMPLS = ("cu_seqlens", "fused")
"""Both from packed attention on: the original's FlexAttention is compared in whole steps."""

COMPILED = " + compile"


def cases(profile: str, device_kind: str) -> list[Case]:
    """Returns the cases of `profile`."""
    grid, is_gpu = SIGLIP2[profile], device_kind == "cuda"
    limit, dtype = grid.case_timeout_s, "bf16" if is_gpu else "fp32"
    limits = {"timeout_s": limit, "time_limit_s": grid.time_limit_s}
    same = {"size": grid.size, "workload": "A", "images": grid.images, "precision": dtype}
    result = ceiling_cases((dtype,), limit)
    for workload, ways in grid.ways.items():
        batch = same | {"workload": workload}
        result.append(Case("floor", batch, PASSES, sustained=PASSES, **limits))
        # Each in a process of its own: what is compiled for one is not there for the next, nor is
        # its memory.
        options = {"fresh_process": True, "sustained": STEP_PHASES, **limits}
        for way in ways:
            if is_gpu or COMPILED not in way:
                result.append(Case("steps", batch | {"way": way}, STEP_PHASES, **options))
    for way in ("eager", "fused"):
        result.append(Case("profile", same | {"way": way}, PASSES[1:], limit))
    module_phases = tuple(f"{impl} {which}" for which in PASSES for impl in MODULE_IMPLS)
    for precision in grid.modules if is_gpu else ("fp32",):
        for module in MODULES:
            part = same | {"precision": precision, "module": module}
            result.append(Case("modules", part, module_phases, **limits))
    for precision in grid.accuracy if is_gpu else ("fp32",):
        result.append(Case("accuracy", {"size": grid.size, "precision": precision}, IMPLS, limit))
    for operation, rows, columns in grid.kernels:
        parameters = {"operation": operation, "rows": rows, "columns": columns, "precision": dtype}
        passes = DEFINITIONS[operation].passes
        case = ("kernels", operation, parameters, grid.kernel_impls, passes)
        result.append(contest_case(*case, **limits))
    return result


# ---- batches -------------------------------------------------------------------------------------


def draw_grids(workload: str, num_images: int, side: int) -> Tensor:
    """Returns heights and widths in patches (I, 2) int64.

    "A": images of side × side patches. "B": as many patches in all, an image's between 1/16 and 4
    times as many, most of them small (its logarithm is uniform) and of any shape; the last images
    fill up what is missing.

    Raises ValueError for another workload.
    """
    if workload == "A":
        return torch.full((num_images, 2), side)
    if workload != "B":
        raise ValueError(f"unknown workload {workload!r}; accepted: A, B")
    generator, left, grids = torch.Generator().manual_seed(0), num_images * side**2, []
    while left:
        size, shape = torch.rand(2, generator=generator).tolist()
        patches = min(left, side**2 * 4.0 ** (3 * size - 2))
        height = max(1, round((patches * 2.0 ** (2 * shape - 1)) ** 0.5))
        height = min(height, left)
        width = max(1, min(round(patches / height), left // height))
        grids.append((height, width))
        left -= height * width
    return torch.tensor(grids)


@dataclasses.dataclass(frozen=True)
class Batch:
    """The patches of a batch of images (M, patch_dim), the images' grids, and the gradient of the
    output (M, C).
    """

    config: Siglip2Config
    patches: Tensor
    grids: Tensor
    grad: Tensor

    @classmethod
    def of(cls, device: Device, parameters: dict) -> "Batch":
        config = SIGLIP2_SIZES[parameters["size"]]
        grids = draw_grids(parameters["workload"], parameters["images"], config.position_side)
        num_patches = int(grids.prod(1).sum())
        shapes = ((num_patches, width) for width in (config.patch_dim, config.d_model))
        patches, grad = draw(device.kind, parameters["precision"], *shapes)
        return cls(config, patches, grids, grad)

    @property
    def flops(self) -> int:
        """Of a forward pass: two for each weight of a matrix and patch, and those of attention
        within images.
        """
        c, pairs = self.config, int(self.grids.prod(1).square().sum())
        layer_terms = len(self.patches) * (4 * c.d_model + 2 * c.d_ff) + 2 * pairs
        return 2 * c.d_model * (len(self.patches) * c.patch_dim + c.num_layers * layer_terms)


# ---- ways to run it ------------------------------------------------------------------------------


def _encoder(batch: Batch, way: str) -> tuple[nn.Module, Callable]:
    """Returns an encoder in training mode, and its forward pass of the batch."""
    impl, _, change = way.removesuffix(COMPILED).partition(", ")
    recomputed = batch.config.num_layers if change == "recomputed" else 0
    factory = {"device": batch.patches.device, "dtype": batch.patches.dtype}
    if attend := _other_attention(change, batch):
        factory["attend"] = attend
    model = Siglip2Encoder(batch.config, impl, recomputed=recomputed, **factory).train()
    # What takes a packing gets it as it would from a loader of data; the others read the grids
    # themselves.
    grids = model.pack(batch.grids) if model.step >= POSITIONS else batch.grids
    if way.endswith(COMPILED):
        options = MASK_OPTIONS if impl == "eager" else {"use_fast_math": change == "fast math"}
        for layer in model.layers:
            layer.compile(fullgraph=impl != "eager", dynamic=False, options=options)
    return model, functools.partial(model, batch.patches, grids)


def graph_breaks(device: Device, precision: str, impl: str) -> int:
    """Returns where torch.compile could not keep a forward pass of a small encoder one graph."""
    batch = Batch.of(device, {"size": "tiny", "workload": "B", "images": 2, "precision": precision})
    forward = _encoder(batch, impl)[1]
    return torch._dynamo.explain(forward.func)(*forward.args).graph_break_count


def _other_attention(name: str, batch: Batch) -> Callable | None:
    """Returns what takes the place of `flash_attention_qkv`, None for another name; raises Skip if
    it cannot run.
    """
    if name == "FlashAttention-2":  # PyTorch's copy of it
        from torch.nn.attention.varlen import varlen_attn

        return lambda qkv, lengths, longest: varlen_attn(
            *qkv.unbind(1), lengths, lengths, longest, longest
        )
    if name != "FlashAttention-3":
        return None
    q = batch.patches.new_empty(1, batch.config.num_heads, 1, batch.config.d_head)
    if reason := unavailable_reason("fa3", q, q, causal=False):
        raise Skip(reason)
    function = load_fa3()

    def attend(qkv: Tensor, lengths: Tensor, longest: int) -> Tensor:
        packed = {"cu_seqlens_q": lengths, "cu_seqlens_k": lengths}
        packed |= {"max_seqlen_q": longest, "max_seqlen_k": longest}
        return function(*qkv.unbind(1), False, False, packed)

    return attend


def _transformers(batch: Batch, way: str) -> tuple[nn.Module, Callable]:
    """Returns transformers' model, of random weights, and its forward pass of the batch, padded."""
    if importlib.util.find_spec("transformers") is None:
        raise Skip("transformers is not installed")
    import transformers

    attention = way.removesuffix(COMPILED).removeprefix("transformers ")
    config = transformers.Siglip2VisionConfig(
        hidden_size=batch.config.d_model,
        intermediate_size=batch.config.d_ff,
        num_hidden_layers=batch.config.num_layers,
        num_attention_heads=batch.config.num_heads,
        patch_size=round((batch.config.patch_dim / 3) ** 0.5),
        num_patches=batch.config.position_side**2,
        attention_dropout=batch.config.dropout,
        attn_implementation=attention,
    )
    config.vision_use_head = False  # the pooling head has no counterpart in the encoder
    with batch.patches.device:  # where drawing its weights takes no seconds
        model = transformers.Siglip2VisionModel(config).to(batch.patches.dtype).train()
    sizes = batch.grids.prod(1)
    inside = (torch.arange(int(sizes.max())) < sizes[:, None]).to(batch.patches.device)
    pixels = batch.patches.new_zeros(*inside.shape, batch.config.patch_dim)
    pixels[inside] = batch.patches
    if way.endswith(COMPILED):
        for layer in next(
            module for name, module in model.named_modules() if name.endswith("encoder.layers")
        ):
            layer.compile(dynamic=False)
    inputs = {"pixel_values": pixels, "pixel_attention_mask": inside, "spatial_shapes": batch.grids}
    places = inside.flatten().nonzero().squeeze(1)
    return model, lambda: model(**inputs).last_hidden_state.flatten(0, 1)[places]


@contextlib.contextmanager
def _live_step(device: Device, case: Case) -> Iterator[tuple[Batch, dict[str, Callable]]]:
    """Gives a case's batch and a way's phases by name, functions of nothing."""
    torch.manual_seed(0)
    batch, way = Batch.of(device, case.parameters), case.parameters["way"]
    model, forward = (_transformers if way.startswith("transformers") else _encoder)(batch, way)

    def forward_backward() -> None:
        model.zero_grad()
        forward().backward(batch.grad)

    # So slow that the weights stay what they are: numbers that grow or vanish change the power that
    # products take.
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-6, fused=True, capturable=device.kind == "cuda"
    )

    def step() -> None:
        forward_backward()
        optimizer.step()

    yield batch, {"forward": forward, "forward_backward": forward_backward, "step": step}


def _run_steps(device: Device, case: Case, ceilings: dict[str, float]):
    with _live_step(device, case) as (batch, calls):
        for phase in case.phases:
            live = (device, batch, calls[phase])
            yield phase, functools.partial(_measure_step, *live, case, phase, ceilings)


def _measure_step(
    device: Device,
    batch: Batch,
    call: Callable,
    case: Case,
    phase: str,
    ceilings: dict[str, float],
) -> Measured:
    out = call()
    if phase == "forward" and (out.shape != batch.grad.shape or not out.isfinite().all()):
        shapes = f"{tuple(batch.grad.shape)}, got {tuple(out.shape)}"
        raise AssertionError(f"the output must be finite and of shape {shapes}")
    del out
    precision = case.parameters["precision"]
    way = case.parameters["way"].removesuffix(COMPILED)
    # From there on it reads nothing from the device while it runs.
    is_captured = device.kind == "cuda" and way.split(",")[0] in IMPLS[POSITIONS:]
    found, metrics = _timed(device, call, case, is_captured)
    flops = batch.flops * (1 if phase == "forward" else 3)
    metrics |= rate_metrics(device, ceilings, found.timing.median_ms, precision, flops=flops)
    ceiling = ceilings.get(f"sustained gemm {precision}")
    metrics |= sustained_metrics(device, found, call, flops=flops, ceiling=ceiling)
    num_patches, num_images = len(batch.patches), len(batch.grids)
    metrics["padded_fraction"] = 1 - num_patches / (int(batch.grids.prod(1).max()) * num_images)
    observed = {"num_images": num_images, "num_patches": num_patches, "is_replayed": is_captured}
    # In the last phase: torch then forgets what it has compiled.
    if phase == case.phases[-1] and way in IMPLS:
        observed["breaks_of_one_graph"] = graph_breaks(device, precision, way)
    return found.measured(metrics, case.parameters, observed, keep="step_ms")


def _timed(
    device: Device, call: Callable, case: Case, is_captured: bool
) -> tuple[Timed, dict[str, float]]:
    """Returns the times of a call, replayed if it is captured, and {"call_ms": …, "peak_bytes": …}
    of it launched.
    """
    limits = {"device_kind": device.kind, "num_warmup": 2, "time_limit_s": case.time_limit_s}
    found, metrics = timed_with_peak(device, time_callable, call, **limits)
    timing = found.timing
    metrics["call_ms"] = timing.metrics()["host_median_ms"] or timing.median_ms
    if is_captured:
        found = timed(device, time_callable, call, method="graph", **limits)
    return found, metrics


# ---- modules -------------------------------------------------------------------------------------


def _module(
    batch: Batch, module: str, impl: str, dtype: torch.dtype | None = None
) -> tuple[list[Tensor], Callable]:
    """Returns the leaves of a part of the encoder, its inputs and parameters, and its forward pass.

    With a dtype it does not drop out, and computes in that from the values that it has in the
    batch's.
    """
    torch.manual_seed(0)  # on the CPU: a GPU draws other numbers for a weight of another shape
    config = dataclasses.replace(batch.config, num_layers=1)
    model = Siglip2Encoder(config, impl).train(dtype is None)
    model, inputs, patches = (
        value.to(batch.grad).to(dtype=dtype)
        for value in (model, torch.randn(2, *batch.grad.shape), batch.patches)
    )
    x, residual = (value.requires_grad_() for value in inputs)
    packing, layer, norm = model.pack(batch.grids), model.layers[0], model.layers[0].layer_norm2
    seed = torch.tensor(0, device=x.device) if model.training and model.step >= ATTENTION else None
    packed = packing, seed
    embeddings = nn.ModuleList([model.patch_embedding, model.position_embedding])
    part, inputs, forward = {
        "embeddings": (embeddings, [], lambda: (model.embed(patches, batch.grids, packing),)),
        "LayerNorm": (norm, [x, residual], lambda: add_and_norm(norm, x, residual, model.step)[:2]),
        "attention": (layer.self_attn, [x], lambda: (layer.self_attn(x, None, *packed),)),
        "MLP": (layer.mlp, [x], lambda: (layer.mlp(x, None),)),
        "layer": (layer, [x, residual], lambda: layer(x, residual, *packed)),
    }[module]
    return [*inputs, *part.parameters()], forward


def _measure_module(device: Device, case: Case, phase: str) -> Measured:
    impl, which = phase.split()
    batch, module = Batch.of(device, case.parameters), case.parameters["module"]
    leaves, forward = _module(batch, module, impl)
    grads = [torch.randn_like(out) for out in forward()]

    def call() -> tuple[Tensor, ...]:
        return forward() if which == "forward" else torch.autograd.grad(forward(), leaves, grads)

    # The embeddings' first implementation reads its grids on the host.
    is_captured = device.kind == "cuda" and module != "embeddings"
    found, metrics = _timed(device, call, case, is_captured)
    if which == "forward":
        ours = _module(batch, module, impl, batch.patches.dtype)[1]()
        exact = _module(batch, module, MODULE_IMPLS[0], torch.float32)[1]()
        metrics["out_error"] = max(map(relative_error, ours, exact))
    return found.measured(metrics, case.parameters, {"is_replayed": is_captured})


# ---- floor, profile, accuracy --------------------------------------------------------------------


def _measure_floor(device: Device, case: Case, phase: str) -> Measured:
    """The products of all layers, one after another, on tensors of a step's shapes: nothing
    else.
    """
    batch = Batch.of(device, case.parameters)
    config, rows, width = batch.config, len(batch.patches), batch.config.d_model
    like = {"device": device.kind, "dtype": batch.patches.dtype}
    sets = []
    for before, after in (
        (width, 3 * width),
        (width, width),
        (width, config.d_ff),
        (config.d_ff, width),
    ):
        shapes = ((rows, before), (after, before), (rows, after))
        sets.append([torch.randn(shape, **like) for shape in shapes])

    def products() -> None:
        for _ in range(config.num_layers):
            for x, weight, grad in sets:
                F.linear(x, weight)
                if phase == "forward_backward":
                    grad @ weight
                    grad.T @ x

    found = timed(
        device,
        time_callable,
        products,
        method="graph" if device.kind == "cuda" else None,
        device_kind=device.kind,
        num_warmup=2,
        time_limit_s=case.time_limit_s,
    )
    flops = 2 * rows * config.num_layers * sum(weight.numel() for _, weight, _ in sets)
    flops *= 3 if phase == "forward_backward" else 1
    metrics = {"flops": flops, "achieved_tflops": flops / found.timing.median_ms / 1e9}
    metrics |= sustained_metrics(device, found, products, flops=flops)
    return found.measured(metrics, case.parameters)


def _measure_profile(live: tuple[Batch, dict], case: Case, phase: str) -> Measured:
    batch, calls = live
    call, marker = calls[phase], RangeMarker("kineto")
    for _ in range(2):
        call()

    def marked() -> None:
        with marker(phase):
            call()

    trace = capture_with_kineto(marked, batch.patches.device.type)
    table = launches(trace, (phase,), KERNEL_CLASSES)
    table = table[table["phase"] == phase]
    class_ms = table.groupby("kernel_class")["duration_ns"].sum() / 1e6
    metrics = {"kernels_ms": float(class_ms.sum()), "num_launches": len(table)}
    metrics |= {f"{name}_ms": float(value) for name, value in class_ms.items() if value > 0}
    return Measured(metrics, case.parameters, {"source": trace.source})


@contextlib.contextmanager
def _shallow_runs(device: Device, case: Case) -> Iterator[Callable[[str], list[dict]]]:
    """Gives what runs a shallow encoder: impl → its results, eager's, and those in fp64; each is
    the output and the gradients of the parameters by name.
    """
    config = dataclasses.replace(SIGLIP2_SIZES[case.parameters["size"]], num_layers=2)
    dtype = DTYPES[case.parameters["precision"]]
    grids = torch.tensor([[16, 16], [9, 13], [1, 1], [3, 30]]).clamp(max=config.position_side)
    torch.manual_seed(0)
    state = Siglip2Encoder(config, "eager").state_dict()
    for name, x in state.items():
        # Biases and gains that are not all 0 or 1, of values that the dtype has.
        state[name] = (x + 0.1 * torch.randn_like(x) * (x.dim() == 1)).to(dtype)
    num_patches = int(grids.prod(1).sum())
    patches = torch.randn(num_patches, config.patch_dim).to(dtype)
    grad = torch.randn(num_patches, config.d_model).to(dtype)

    def run(impl: str, dtype: torch.dtype, kind: str) -> dict[str, Tensor]:
        model = Siglip2Encoder(config, impl, device=kind, dtype=dtype).eval()
        model.load_state_dict(state)
        out = model(patches.to(kind, dtype), grids)
        out.backward(grad.to(kind, dtype))
        for parameter in model.parameters():
            parameter.data = parameter.grad
        # A state dict has the projections of q, k and v apart, whichever way they are computed.
        return {"out": out.detach(), **model.state_dict()}

    exact, eager = run("eager", torch.float64, "cpu"), run("eager", dtype, device.kind)
    yield lambda impl: [run(impl, dtype, device.kind), eager, exact]


def _measure_accuracy(run: Callable[[str], list[dict]], case: Case, impl: str) -> Measured:
    ours, eager, exact = run(impl)
    errors = {
        name: (relative_error(ours[name], exact[name]), relative_error(eager[name], exact[name]))
        for name in exact
        if not name.endswith("k_proj.bias")  # whose exact gradient is zero: softmax does not see it
    }
    out, eager_out = errors.pop("out")
    worst = max(errors, key=lambda name: errors[name][0] / errors[name][1])
    gradient, eager_gradient = errors[worst]
    rounding = torch.finfo(DTYPES[case.parameters["precision"]]).eps / 2
    if out > 2 * eager_out + rounding or gradient > 3 * eager_gradient + rounding:
        raise AssertionError(
            f"wrong: errors {out:.2g} and {gradient:.2g} ({worst}), eager's {eager_gradient:.2g}"
        )
    metrics = {"out_error": out, "eager_out_error": eager_out}
    metrics |= {"gradient_error": gradient, "eager_gradient_error": eager_gradient}
    return Measured(metrics, case.parameters, {"worst": worst})


SECTIONS = {
    **CEILINGS,
    "floor": section(_measure_floor),
    "steps": _run_steps,
    "profile": section(_measure_profile, _live_step),
    "modules": section(_measure_module),
    "accuracy": section(_measure_accuracy, _shallow_runs),
    "kernels": contest_section(RowOperation),
}

run_case = functools.partial(run_section, SECTIONS)
