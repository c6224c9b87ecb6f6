"""Notebook 08: SigLIP 2's vision encoder on packed images, as first written, step by step faster,
beside its peers.

Sections: "ceilings", "floor" (the matrix products alone), "steps" (forward pass, both passes, and
both with AdamW, of a batch under every way to run the encoder), "profile" (their kernels),
"accuracy" (a shallow encoder against fp64), "kernels" (contests of the fused kernels).

A step is timed by replaying it from a CUDA graph, call by call, and back to back. Workload "A" is
images of one size; "B" as many patches in images of many sizes.
"""

import dataclasses
import functools
import importlib.util
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from labkit.configs import GRIDS, check_known, siglip2_config
from labkit.device import Device
from labkit.experiments.contest import contest_section, draw
from labkit.experiments.operations import DEFINITIONS, add_contest, row_operation
from labkit.experiments.sections import (
    Plan,
    rate_metrics,
    run_section,
    section,
    sustained_metrics,
    timed,
    timed_with_peak,
)
from labkit.experiments.sweep import Case, Measured, Skip
from labkit.kernels import KERNEL_CLASSES
from labkit.kernels.attention import FlashAttention3Function, unavailable_reason
from labkit.measure.profiling import capture_with_kineto, launches
from labkit.measure.timing import time_callable
from labkit.models.siglip2 import EAGER, IMPLS, MASK_OPTIONS, POSITIONS, Siglip2Encoder
from labkit.numerics import relative_error, tensor_dtype

MEASUREMENT_VERSION = 1

STEP_PHASES = ("forward", "forward_backward", "step")  # the last with AdamW
PASSES = STEP_PHASES[:2]
COMPILED = " + compile"
COMPILE_OPTIONS = {"comprehensive_padding": False}
"""With padded rows, 4,304 columns in 16 bits to 4,352 say, cuBLAS adds no bias to a product: on an
H200 copying it there first took 3 ms of a forward pass of 30.
"""


def cases(profile: str, device_kind: str) -> list[Case]:
    """Returns the cases of `profile`."""
    grid = GRIDS["08_siglip2"][profile]
    is_gpu = device_kind == "cuda"
    dtype = "bf16" if is_gpu else "fp32"
    batch = {"size": grid.size, "workload": "A", "images": grid.images, "precision": dtype}
    plan = Plan(grid, (dtype,))
    for workload, ways in grid.ways.items():
        if not ways:
            continue
        parameters = {**batch, "workload": workload}
        plan.add("floor", parameters, *PASSES, sustained=PASSES)
        for way in ways:
            if is_gpu or COMPILED not in way:
                plan.add(
                    "steps",
                    {**parameters, "way": way},
                    *STEP_PHASES,
                    # What is compiled for one is not there for the next, nor is its memory.
                    fresh_process=True,
                    sustained=PASSES[1:],
                    compiles=not way.endswith("eager"),
                )
    for way in ("eager", "fused"):
        plan.add("profile", {**batch, "way": way}, *PASSES[1:])
    for precision in grid.accuracy if is_gpu else ("fp32",):
        plan.add("accuracy", {"size": grid.size, "precision": precision}, *IMPLS)
    for operation, rows, columns in grid.kernels:
        add_contest(
            plan,
            "kernels",
            operation,
            {"operation": operation, "rows": rows, "columns": columns, "precision": dtype},
            grid.kernel_impls,
            DEFINITIONS[operation].passes,
            # A product that torch.compile chose stays: it is chosen with the GPU to itself.
            compiles=any(DEFINITIONS[operation].elements),
        )
    return plan


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
    check_known("workload", workload, ("A", "B"))
    generator = torch.Generator().manual_seed(0)
    left = num_images * side**2
    grids = []
    while left:
        size, shape = torch.rand(2, generator=generator).tolist()
        patches = min(left, side**2 * 4.0 ** (3 * size - 2))
        height = min(left, max(1, round((patches * 2.0 ** (2 * shape - 1)) ** 0.5)))
        width = max(1, min(round(patches / height), left // height))
        grids.append((height, width))
        left -= height * width
    return torch.tensor(grids)


class Batch:
    """The patches of a batch of images (M, patch_dim), the images' grids, and the gradient of the
    output (M, C).
    """

    def __init__(self, device: Device, parameters: dict):
        self.config = siglip2_config(parameters["size"])
        side = self.config.position_side
        self.grids = draw_grids(parameters["workload"], parameters["images"], side)
        self.sizes = self.grids.prod(1)
        num_patches = int(self.sizes.sum())
        self.patches, self.grad = draw(
            device,
            parameters["precision"],
            (num_patches, self.config.patch_dim),
            (num_patches, self.config.d_model),
        )
        self.like = {"device": self.grad.device, "dtype": self.grad.dtype}

    @property
    def flops(self) -> int:
        """Of a forward pass: two for each weight of a matrix and patch, and those of attention
        within images.
        """
        c = self.config
        pairs = int(self.sizes.square().sum())
        layer_terms = len(self.patches) * (4 * c.d_model + 2 * c.d_ff) + 2 * pairs
        return 2 * c.d_model * (len(self.patches) * c.patch_dim + c.num_layers * layer_terms)


# ---- ways to run it ------------------------------------------------------------------------------


def _encoder(batch: Batch, way: str) -> tuple[nn.Module, Callable]:
    """Returns an encoder in training mode, and its forward pass of the batch."""
    impl, _, change = way.removesuffix(COMPILED).partition(", ")
    changes = {
        "": {},
        "recomputed": {"recomputed": batch.config.num_layers},
        "FlashAttention-2": {"attend": flash_attention_2},
        "FlashAttention-3": {"attend": flash_attention_3},
    }
    if way.endswith(COMPILED):
        changes["fast math"] = {}  # the compiler's
    check_known("change", change, changes)
    if change == "FlashAttention-3":
        q = batch.patches.new_empty(1, 1, 1, batch.config.d_head)
        if reason := unavailable_reason("fa3", q, q, causal=False):
            raise Skip(reason)
    model = Siglip2Encoder(batch.config, impl, **batch.like, **changes[change]).train()
    # What takes a packing gets it as it would from a loader of data; the others read the grids
    # themselves.
    grids = model.pack(batch.grids) if model.step >= POSITIONS else batch.grids
    if way.endswith(COMPILED):
        options = COMPILE_OPTIONS | {"use_fast_math": change == "fast math"}
        if impl == "eager":
            options |= MASK_OPTIONS
        for layer in model.layers:
            layer.compile(fullgraph=impl != "eager", dynamic=False, options=options)
    return model, functools.partial(model, batch.patches, grids)


def flash_attention_2(qkv: Tensor, lengths: Tensor, longest: int) -> Tensor:
    """Attention as `flash_attention_qkv`, by PyTorch's copy of FlashAttention-2."""
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn(*qkv.unbind(1), lengths, lengths, longest, longest)


def flash_attention_3(qkv: Tensor, lengths: Tensor, longest: int) -> Tensor:
    """Attention as `flash_attention_qkv`, by FlashAttention-3."""
    packed = {
        "cu_seqlens_q": lengths,
        "cu_seqlens_k": lengths,
        "max_seqlen_q": longest,
        "max_seqlen_k": longest,
    }
    return FlashAttention3Function.apply(*qkv.unbind(1), False, False, packed)


def _transformers(batch: Batch, way: str) -> tuple[nn.Module, Callable]:
    """Returns transformers' model, of random weights, and its forward pass of the batch, padded."""
    if importlib.util.find_spec("transformers") is None:
        raise Skip("transformers is not installed")
    import transformers

    config = transformers.Siglip2VisionConfig(
        hidden_size=batch.config.d_model,
        intermediate_size=batch.config.d_ff,
        num_hidden_layers=batch.config.num_layers,
        num_attention_heads=batch.config.num_heads,
        patch_size=round((batch.config.patch_dim / 3) ** 0.5),
        num_patches=batch.config.position_side**2,
        attention_dropout=batch.config.dropout,
        attn_implementation=way.removesuffix(COMPILED).removeprefix("transformers "),
    )
    config.vision_use_head = False  # the pooling head has no counterpart in the encoder
    with batch.patches.device:  # where drawing its weights takes no seconds
        model = transformers.Siglip2VisionModel(config).to(batch.patches.dtype).train()
    if way.endswith(COMPILED):
        for name, module in model.named_modules():
            if name.rpartition(".")[0].endswith("encoder.layers"):
                module.compile(dynamic=False, options=COMPILE_OPTIONS)
    pixels = pad_sequence(batch.patches.split(batch.sizes.tolist()), batch_first=True)
    inside = (torch.arange(pixels.shape[1]) < batch.sizes[:, None]).to(pixels.device)
    places = inside.flatten().nonzero().squeeze(1)
    return model, lambda: model(
        pixel_values=pixels, pixel_attention_mask=inside, spatial_shapes=batch.grids
    ).last_hidden_state.flatten(0, 1)[places]


# ---- steps and their floor -----------------------------------------------------------------------


class Work(NamedTuple):
    """What is timed of a case.

    device: that it runs on. calls: functions of nothing by phase. flops: of a forward pass.
    is_captured: a CUDA graph can hold them, which read nothing from the device. metrics: known
    before.
    """

    device: Device
    calls: dict[str, Callable]
    flops: int
    is_captured: bool = True
    metrics: Mapping[str, float] = {}


def _step(device: Device, parameters: dict) -> Work:
    """Returns the phases of a step under a way to run the encoder."""
    batch = Batch(device, parameters)
    torch.manual_seed(0)
    way = parameters["way"]
    model, forward = (_transformers if way.startswith("transformers") else _encoder)(batch, way)
    if not forward().isfinite().all():
        raise AssertionError("the output is not finite")
    # So slow that the weights stay what they are: numbers that grow or vanish change the power that
    # products take.
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-6, fused=True, capturable=batch.patches.is_cuda
    )

    def forward_backward() -> None:
        model.zero_grad()
        forward().backward(batch.grad)

    def step() -> None:
        forward_backward()
        optimizer.step()

    calls = {"forward": forward, "forward_backward": forward_backward, "step": step}
    # The steps before, and transformers, read the grids on the host.
    is_captured = getattr(model, "step", EAGER) >= POSITIONS
    num_padded = int(batch.sizes.max()) * len(batch.sizes)
    metrics = {"padded_fraction": 1 - len(batch.patches) / num_padded}
    return Work(device, calls, batch.flops, is_captured, metrics)


def _products(device: Device, parameters: dict) -> Work:
    """Returns the products of all layers, one after another, on tensors of a step's shapes: nothing
    else.
    """
    batch = Batch(device, parameters)
    config = batch.config
    rows = len(batch.patches)
    width = config.d_model
    weights = [(3 * width, width), (width, width), (config.d_ff, width), (width, config.d_ff)]
    sets = [
        [
            torch.randn(shape, **batch.like)
            for shape in ((rows, before), (after, before), (rows, after))
        ]
        for after, before in weights
    ]

    def products(phase: str) -> None:
        for _ in range(config.num_layers):
            for x, weight, grad in sets:
                F.linear(x, weight)
                if phase == "forward_backward":
                    grad @ weight
                    grad.T @ x

    calls = {phase: functools.partial(products, phase) for phase in PASSES}
    num_weights = config.num_layers * sum(after * before for after, before in weights)
    return Work(device, calls, 2 * rows * num_weights)


def _measure(work: Work, case: Case, phase: str) -> Measured:
    """Returns a call launched, replayed from a CUDA graph and run back to back."""
    device = work.device
    call = work.calls[phase]
    precision = case.parameters["precision"]
    limits = {"num_warmup": 2, "time_limit_s": case.time_limit_s}
    times, metrics = timed_with_peak(device, time_callable, call, **limits)
    if work.is_captured and device.kind == "cuda":
        times = timed(device, time_callable, call, method="graph", **limits)
    flops = work.flops * (1 if phase == "forward" else 3)
    metrics |= rate_metrics(device, case.ceilings, times.timing.median_ms, precision, flops=flops)
    if phase in case.sustained:
        metrics |= sustained_metrics(device, case.ceilings, times, call, precision, flops=flops)
    return times.measured(metrics | work.metrics, case.parameters, keep="step_ms")


def _measure_profile(work: Work, case: Case, phase: str) -> Measured:
    call = work.calls[phase]
    for _ in range(2):
        call()
    marked = torch.profiler.record_function(phase)(call)
    trace = capture_with_kineto(marked, work.device.kind)
    table = launches(trace, (phase,), KERNEL_CLASSES)
    class_ms = table.groupby("kernel_class")["duration_ns"].sum() / 1e6
    metrics = {"kernels_ms": float(class_ms.sum())}
    metrics |= {f"{name}_ms": float(value) for name, value in class_ms.items() if value > 0}
    return Measured(metrics, case.parameters, {"source": trace.source})


# ---- accuracy ------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=3)
def _results(
    size: str, precision: str, impl: str, dtype: torch.dtype, kind: str
) -> dict[str, Tensor]:
    """Returns the output ("out") of a shallow encoder and the gradients of its parameters by name,
    computed in a dtype from values that `precision` has.
    """
    config = dataclasses.replace(siglip2_config(size), num_layers=2)
    grids = torch.tensor([[16, 16], [9, 13], [1, 1], [3, 30]]).clamp(max=config.position_side)
    num_patches = int(grids.prod(1).sum())
    torch.manual_seed(0)
    state = Siglip2Encoder(config, "eager").state_dict()
    for name, x in state.items():
        # Biases and gains that are not all 0 or 1.
        state[name] = (x + 0.1 * torch.randn_like(x) * (x.dim() == 1)).to(tensor_dtype(precision))
    patches, grad = (
        torch.randn(num_patches, width).to(tensor_dtype(precision)).to(kind, dtype)
        for width in (config.patch_dim, config.d_model)
    )
    model = Siglip2Encoder(config, impl, device=kind, dtype=dtype).eval()
    model.load_state_dict(state)
    out = model(patches, grids)
    out.backward(grad)
    for parameter in model.parameters():
        parameter.data = parameter.grad
    # A state dict has the projections of q, k and v apart, whichever way they are computed.
    return {"out": out.detach(), **model.state_dict()}


def _measure_accuracy(device: Device, case: Case, impl: str) -> Measured:
    size, precision = case.parameters["size"], case.parameters["precision"]
    dtype = tensor_dtype(precision)
    exact = _results(size, precision, "eager", torch.float64, "cpu")

    def errors(impl: str) -> dict[str, float]:
        results = _results(size, precision, impl, dtype, device.kind)
        return {name: relative_error(x, exact[name]) for name, x in results.items()}

    ours = errors(impl)
    eager = errors("eager")
    # The exact gradient of k's bias is zero: softmax does not see it.
    gradients = [x for x in exact if x != "out" and not x.endswith("k_proj.bias")]
    rounding = torch.finfo(dtype).eps / 2
    for name in ("out", *gradients):
        if not ours[name] <= (2 if name == "out" else 3) * eager[name] + rounding:
            raise AssertionError(
                f"wrong: error {ours[name]:.2g} ({name}), eager's {eager[name]:.2g}"
            )
    worst = max(gradients, key=lambda name: ours[name] / eager[name])
    metrics = {
        "out_error": ours["out"],
        "eager_out_error": eager["out"],
        "gradient_error": ours[worst],
        "eager_gradient_error": eager[worst],
    }
    return Measured(metrics, case.parameters)


SECTIONS = {
    "floor": section(_measure, _products),
    "steps": section(_measure, _step),
    "profile": section(_measure_profile, _step),
    "accuracy": section(_measure_accuracy),
    "kernels": contest_section(row_operation),
}

run_case = functools.partial(run_section, SECTIONS)
