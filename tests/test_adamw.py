"""One kernel for AdamW of all parameters: the update of PyTorch's, masters, and a training step that autocast takes."""

import re

import pytest
import torch
import triton.language as tl
from chapters import CPU
from test_fused_kernels import not_interpreted
from test_kernel_compilation import compile_source, spilled_bytes
from triton.compiler import ASTSource

from labkit.experiments.graphed_step import ATTENTION, GraphedWorkload
from labkit.experiments.workload import step_parameters
from labkit.kernels import adamw, fused
from labkit.kernels.adamw import FusedAdamW
from labkit.measure.timing import compare

SHAPES = [(7,), (1500,), (33, 65), (1,), (2, 1024)]
# Of fp32 arithmetic in another order, on values near 0.02 that change by up to 0.05.
CLOSE = {"rtol": 1e-6, "atol": 5e-8}


def is_interpreted() -> bool:
    return fused.IS_INTERPRETED


def pairs(dtype: torch.dtype, device: str = "cpu") -> list[tuple[torch.nn.Parameter, torch.nn.Parameter]]:
    """Returns parameters of `dtype`, each beside one of the same values in fp32."""
    generator = torch.Generator().manual_seed(0)
    drawn = [(torch.randn(shape, generator=generator) * 0.02).to(dtype).to(device) for shape in SHAPES]
    return [(torch.nn.Parameter(x), torch.nn.Parameter(x.float())) for x in drawn]


def train(both, optimizers, num_steps: int = 3) -> None:
    """Steps with gradients of many sizes, the same for both parameters of a pair."""
    generator = torch.Generator().manual_seed(1)
    for step in range(num_steps):
        for p, q in both:
            grad = torch.randn(p.shape, generator=generator) * 10.0 ** (step - 2)
            p.grad = grad.to(p.device, p.dtype)
            q.grad = p.grad.float()
        for optimizer in optimizers:
            optimizer.step()


def check_it_updates_as_pytorchs(dtype: torch.dtype, device: str = "cpu") -> None:
    """Parameters in 16 bits are their masters rounded, and those train in fp32."""
    both = pairs(dtype, device)
    ours, theirs = zip(*both, strict=True)
    groups = [{"params": ours[:2], "lr": 1e-2, "weight_decay": 0.1}, {"params": ours[2:]}]
    of_theirs = [{"params": theirs[:2], "lr": 1e-2, "weight_decay": 0.1}, {"params": theirs[2:]}]
    optimizer = FusedAdamW(groups, betas=(0.8, 0.99))
    train(both, (optimizer, torch.optim.AdamW(of_theirs, betas=(0.8, 0.99))))
    for p, q in both:
        master = optimizer.state[p].get("master", p)
        torch.testing.assert_close(master, q, **CLOSE)
        if dtype == torch.float16 or not fused.IS_INTERPRETED:  # the interpreter cuts off what bf16 would round
            assert torch.equal(p, master.to(dtype))


@pytest.mark.parametrize("dtype", fused.DTYPES)
def test_it_updates_as_pytorchs(dtype):
    check_it_updates_as_pytorchs(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_kernel_updates_as_pytorchs(interpreted, dtype):
    interpreted(check_it_updates_as_pytorchs, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", fused.DTYPES)
def test_it_updates_as_pytorchs_on_the_gpu(dtype):
    check_it_updates_as_pytorchs(dtype, "cuda")


@pytest.mark.gpu
def test_a_graph_keeps_the_addresses_that_it_was_captured_with():
    p = torch.nn.Parameter(torch.ones(3000, device="cuda", dtype=torch.bfloat16))
    optimizer, x = FusedAdamW([p]), torch.randn(3000, device="cuda")

    def step():
        optimizer.zero_grad()
        (p * x).sum().backward()
        optimizer.step()

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    state = {name: tensor.clone() for name, tensor in optimizer.state[p].items()}
    step()
    expected = {name: tensor.clone() for name, tensor in optimizer.state[p].items()}
    for name, tensor in optimizer.state[p].items():
        tensor.copy_(state[name])
    p.data.copy_(state["master"])
    held = [torch.zeros(3000, device="cuda") for _ in range(4)]  # what the called step's gradient was is others'
    graph.replay()
    for name, tensor in optimizer.state[p].items():
        torch.testing.assert_close(tensor, expected[name], **CLOSE)
    assert not any(x.any() for x in held)


@pytest.mark.gpu
def test_it_takes_less_time_than_pytorchs_and_the_casts_of_autocast():
    """The same update of 200 million parameters: of fp32 weights that autocast casts, and of masters beside 16 bits."""
    ours = [torch.nn.Parameter(torch.randn(2048, 4096, device="cuda", dtype=torch.bfloat16)) for _ in range(24)]
    theirs = [torch.nn.Parameter(p.detach().float()) for p in ours]
    for p in ours:
        p.grad = torch.randn_like(p)
    optimizer, pytorchs = FusedAdamW(ours), torch.optim.AdamW(theirs, fused=True, capturable=True)

    def step_and_casts():
        for p, q in zip(ours, theirs, strict=True):
            q.grad = p.grad.float()
        pytorchs.step()
        for q in theirs:
            q.to(torch.bfloat16)

    steps = {"ours": optimizer.step, "pytorch": step_and_casts}
    found = compare(steps, baseline="ours", device_kind="cuda", method="graph", num_rounds=10)
    times = {name: timing.median_ms for name, timing in found.timings.items()}
    assert found.ratio["pytorch"][1] > 1, times
    print(f"{times} ms, {found.ratio['pytorch']}")


def check_without_a_gradient_nothing_changes() -> None:
    p, q = (torch.nn.Parameter(torch.ones(5)) for _ in range(2))
    optimizer = FusedAdamW([p, q])
    p.grad = torch.ones(10)[::2]
    optimizer.step()
    assert torch.equal(q.detach(), torch.ones(5)) and not optimizer.state[q]["exp_avg"].any()
    assert (p < 1).all() and (optimizer.state[p]["exp_avg"] > 0).all()


def test_without_a_gradient_nothing_changes(interpreted):
    check_without_a_gradient_nothing_changes()
    interpreted(check_without_a_gradient_nothing_changes)


def test_a_loaded_state_trains_on_with_its_masters():
    first, second = pairs(torch.bfloat16), pairs(torch.bfloat16)
    saved, loaded = (FusedAdamW([p for p, _ in both], lr=lr) for both, lr in ((first, 1e-2), (second, 1.0)))
    train(first, [saved])
    loaded.load_state_dict(saved.state_dict())
    assert loaded.param_groups[0]["lr"] == 1e-2
    for both, optimizer in ((first, saved), (second, loaded)):
        train(both, [optimizer])
    for (p, _), (q, _) in zip(first, second, strict=True):
        assert torch.equal(p, q) and torch.equal(saved.state[p]["master"], loaded.state[q]["master"])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: torch.ones(2, dtype=torch.float64), "must be dense and of torch.float32, .*; got torch.float64"),
        (lambda: torch.ones(2, 3).T, r"got torch.float32, strides \(1, 3\)"),
    ],
)
def test_parameters_that_do_not_fit_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        FusedAdamW([torch.nn.Parameter(make())])


@pytest.mark.parametrize(
    ("options", "message"),
    [({"lr": -1.0}, "lr must be at least 0, got -1.0"), ({"betas": (0.9, 1.0)}, "betas must be between 0 and 1")],
)
def test_values_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        FusedAdamW([torch.nn.Parameter(torch.ones(2))], **options)


def test_matrices_in_16_bits_beside_masters_train_as_autocast_does():
    asked = step_parameters("nano", 16, "bf16", attention=ATTENTION["fused"], impl="fused")
    live, autocast = (GraphedWorkload(CPU, asked) for _ in range(2))
    autocast.model.float()
    autocast.model.load_state_dict(live.model.state_dict())
    autocast.optimizer = torch.optim.AdamW(autocast.model.parameters())
    autocast.tokens, autocast.targets = live.tokens, live.targets
    weight = live.model.blocks[0].attention.q_proj.weight
    assert (weight.dtype, live.model.head.weight.dtype) == (torch.bfloat16, torch.float32)
    assert live.described() == asked
    for workload in (live, autocast):
        workload.train_step()
    assert torch.equal(live.loss, autocast.loss)
    for p, q in zip(live.model.parameters(), autocast.model.parameters(), strict=True):
        torch.testing.assert_close(live.optimizer.state[p].get("master", p), q, **CLOSE)
    for workload in (live, autocast):
        workload.train_step()
    torch.testing.assert_close(live.loss, autocast.loss, rtol=1e-4, atol=0)


@not_interpreted
@pytest.mark.parametrize(("dtype", "capability"), [("bf16", 90), ("fp32", 80)])
def test_the_kernel_compiles_without_spilling(dtype, capability, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel, types = adamw.adamw_kernel, {"addresses_ptr": "*i64", "blocks_ptr": "*i32", "spans_ptr": "*i64"}
    fixed = {"DTYPE": {"bf16": tl.bfloat16, "fp32": tl.float32}[dtype], "BLOCK": adamw.BLOCK}
    fixed |= {"master_ptr": None} if dtype == "fp32" else {}
    signature = {
        name: "constexpr"
        if name in fixed
        else types.get(name, "*fp32" if name.endswith("_ptr") else "i32" if name == "num_params" else "fp32")
        for name in kernel.arg_names
    }
    _, log = compile_source(ASTSource(kernel, signature, fixed), capability, {"num_warps": 4})
    assert spilled_bytes(log) == 0
