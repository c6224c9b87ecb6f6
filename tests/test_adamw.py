"""One kernel for AdamW of all parameters: the update of PyTorch's, masters, and a training step
that autocast takes.
"""

import copy
import pickle
import random
from functools import partial

import pytest
import torch
from chapters import CPU

from labkit.experiments.step import Step, step_parameters
from labkit.kernels import fused
from labkit.kernels.adamw import FusedAdamW

SHAPES = [(7,), (1500,), (33, 65), (), (0, 3), (2, 1024)]
# Of fp32 arithmetic in another order, on values near 0.02 that change by up to 0.05.
CLOSE = {"rtol": 1e-6, "atol": 5e-8}


def drawn(dtype: torch.dtype) -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    return [torch.nn.Parameter((torch.randn(shape) * 0.02).to(dtype)) for shape in SHAPES]


@pytest.mark.gpu
def test_called_steps_and_replays_read_their_own_gradients():
    p, q = (torch.nn.Parameter(torch.ones(3000, device="cuda")) for _ in range(2))
    called, captured = torch.randn(2, 3000, device="cuda")
    ours, theirs = FusedAdamW([p]), torch.optim.AdamW([q])
    p.grad = called
    ours.step()
    graph = torch.cuda.CUDAGraph()
    p.grad = captured
    with torch.cuda.graph(graph):
        ours.step()
    ours.step()
    p.grad = called
    ours.step()
    graph.replay()
    ours.step()
    for q.grad in (called, captured, called, captured, called):
        theirs.step()
    torch.testing.assert_close(p, q, **CLOSE)
    assert ours.state[p]["step"] == 5


def check_random_events(dtype: torch.dtype, seed: int, device: str = "cpu") -> None:
    """Whatever happens between steps, the parameters train as PyTorch trains them in fp64, or
    where PyTorch's own function runs, bit for bit in fp32.
    """
    is_exact = dtype == torch.float32 and device == "cpu" and not fused.IS_INTERPRETED
    choose, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    ours = [torch.nn.Parameter(p.detach().to(device)) for p in drawn(dtype)]
    exact = torch.float32 if is_exact else torch.float64
    theirs = [torch.nn.Parameter(p.detach().to(exact)) for p in ours]
    # With β₂ = 0 a gradient of 0 would divide by ε alone.
    *betas, eps = choose.choice([(0.9, 0.999, 1e-8), (0.0, 0.99, 1e-8), (0.9, 0.0, 0.1)])
    options = {"lr": 0.01, "betas": tuple(betas), "eps": eps, "weight_decay": 0.1}
    optimizers = [FusedAdamW(ours[:-1], **options), torch.optim.AdamW(theirs[:-1], **options)]
    for number in range(16):
        pairs = list(zip(ours, theirs, strict=True))
        event = choose.choice(["step", "step", "weights", "pickle", "exchange", "group"])
        if event == "weights":
            p, q = choose.choice(pairs)
            # Far from all before: what rounds to the parameter as it is, the master may stay.
            loaded = 16 * number + torch.randint(1, 9, p.shape, generator=generator)
            p.data.copy_(loaded)
            q.data.copy_(loaded)
        elif event == "pickle":
            optimizers, ours, theirs = pickle.loads(pickle.dumps((optimizers, ours, theirs)))
        elif event == "exchange":
            states = [copy.deepcopy(optimizer.state_dict()) for optimizer in optimizers]
            for optimizer, state in zip(optimizers, reversed(states), strict=True):
                optimizer.load_state_dict(state)
            for p, q in pairs:
                q.data.copy_(p)  # PyTorch's has no masters
                if "master" in optimizers[0].state.get(p, {}):
                    optimizers[0].state[p]["master"].copy_(p.detach())
        elif event == "group":
            for optimizer, params in zip(optimizers, (ours, theirs), strict=True):
                first, *others = optimizer.param_groups
                if others:
                    others[0]["params"].append(first["params"].pop())
                else:
                    optimizer.add_param_group({"params": params[-1], "lr": 0.03})
        else:
            for p, q in pairs:
                grad = torch.randn(p.shape, generator=generator).to(p) * choose.choice([0, 1])
                # The last as of conj().imag, its sign kept apart.
                p.grad = choose.choice([None, grad, torch._neg_view(-grad)])
                q.grad = None if p.grad is None else p.grad.to(q)
            for optimizer in optimizers:
                optimizer.step()
    for p, q in zip(ours, theirs, strict=True):
        state, expected = optimizers[0].state[p], optimizers[1].state[q]
        master = state.get("master", p)
        # No step may have seen what was written last.
        trained = torch.where(master.to(dtype) == p, master, p).to(q.dtype)
        rtol, atol = (0, 0) if is_exact else (2e-6, 2e-7)
        torch.testing.assert_close(trained, q.detach(), rtol=rtol, atol=atol)
        assert state.get("step", 0) == expected.get("step", 0)


@pytest.mark.parametrize("dtype", fused.DTYPES)
def test_random_events_train_as_pytorchs(dtype, interpreted):
    for seed in range(6):
        check_random_events(dtype, seed)
    if dtype != torch.bfloat16:
        for seed in range(3):
            interpreted(check_random_events, dtype, seed)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", fused.DTYPES)
def test_random_events_train_on_the_gpu_as_pytorchs(dtype):
    for seed in range(12):
        check_random_events(dtype, seed, "cuda")


def trained_state(*shapes, cls=torch.optim.AdamW, dtype=torch.float32) -> dict:
    params = [torch.nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in shapes]
    optimizer = cls(params)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    return copy.deepcopy(optimizer.state_dict())


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (trained_state((5,), (1,)), r"parameter 1 is .*\[1\].*accepted: .*\[2\]"),
        (trained_state((5,), (2,), cls=FusedAdamW, dtype=torch.float16), "parameter 0 is .*master"),
        (
            trained_state((5,), (2,), cls=partial(torch.optim.AdamW, maximize=True)),
            "maximize is set",
        ),
    ],
)
def test_a_state_that_does_not_fit_is_refused_whole(state, message):
    params = [torch.nn.Parameter(torch.ones(n)) for n in (5, 2)]
    optimizer = FusedAdamW(params, lr=0.5)
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert not any(tensor.any() for p in params for tensor in optimizer.state[p].values())


def check_what_has_changed_is_refused() -> None:
    changes = (
        (lambda x: x.half(), r"become \(torch.float16.*accepted: \(torch.float32"),
        (lambda x: torch.ones(8, 4).T[:, ::2], r"become .*False\).*accepted: .*True\)"),
        (lambda x: x.T, r"become .*False\).*accepted: .*True\)"),
    )
    for change, message in changes:
        p = torch.nn.Parameter(torch.ones(4, 4))
        optimizer = FusedAdamW([{"params": [p]}, {"params": []}])
        p.grad = torch.ones(4, 4)
        optimizer.step()
        p.data = change(p.data)
        before = p.detach().clone()
        p.grad = p.grad.to(p.dtype)
        with pytest.raises(ValueError, match=message):
            optimizer.step()
        assert torch.equal(p, before) and optimizer.state[p]["step"] == 1


def test_a_state_is_fp32_whatever_the_default_dtype():
    torch.set_default_dtype(torch.float16)
    optimizer = FusedAdamW(drawn(torch.float16))
    torch.set_default_dtype(torch.float32)
    dtypes = {x.dtype for state in optimizer.state.values() for x in state.values()}
    assert dtypes == {torch.float32}


def test_what_has_changed_since_the_optimizer_was_made_is_refused(interpreted):
    check_what_has_changed_is_refused()
    interpreted(check_what_has_changed_is_refused)


def test_matrices_in_16_bits_beside_masters_train_as_autocast_does():
    asked = step_parameters("nano", 16, "bf16", attention="auto", impl="fused")
    live, autocast = (Step(CPU, asked) for _ in range(2))
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
