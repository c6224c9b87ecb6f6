"""What test_sharded_optimizer.py runs on ranks; `found` yields (name, what the test then looks
at).
"""

import copy
import pickle

import torch
import torch.distributed as dist
from torch import nn

from labkit.kernels.adamw import FusedAdamW
from labkit.parallel.sharded_optimizer import ShardedOptimizer


def found():
    yield "frozen", frozen()
    for name, cls, make, options in CASES:
        yield name, unlike(cls, make, options)
    yield "counts in its group", unlike(Warming, fp32, {"lr": 0.1})
    yield "hooks", hooks()
    yield "LBFGS", refused(ValueError, lambda: ShardedOptimizer(fp32(), torch.optim.LBFGS))
    yield (
        "set",
        refused(TypeError, lambda: ShardedOptimizer([{"params": set(fp32())}], torch.optim.SGD)),
    )
    yield "other shapes", other_shapes()
    yield "masters", masters()


def apart(tensor: torch.Tensor) -> bool:
    """Returns whether a bit of it differs between ranks."""
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, tensor.detach().clone())
    return not all(torch.equal(gathered[0], other) for other in gathered)


def refused(kind: type[Exception], call) -> str:
    try:
        call()
    except kind as error:
        return str(error)
    return ""


def parameters(dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype)) for shape in shapes]


def fp32() -> list[nn.Parameter]:
    return parameters(torch.float32, (4, 5), (5,), (3, 4), (7,))


def odd() -> list[nn.Parameter]:
    """Of several dtypes, without elements or dimensions, and not contiguous."""
    transposed = nn.Parameter(torch.arange(6.0).view(2, 3).T)
    shapes = (3, 2), (), (0, 2)
    half = (
        parameters(torch.bfloat16, *shapes)
        + parameters(torch.float16, (5,))
        + parameters(torch.float64, (4,))
    )
    return [transposed, *half, *parameters(torch.complex64, (3,))]


CASES = [
    ("AdamW", torch.optim.AdamW, fp32, {"lr": 0.1}),
    (
        "AdamW, fused, odd parameters",
        torch.optim.AdamW,
        lambda: odd()[:-1],
        {"lr": 0.1, "fused": True},
    ),
    ("Adam, odd parameters", torch.optim.Adam, odd, {"lr": torch.tensor(0.1), "amsgrad": True}),
    ("SGD", torch.optim.SGD, odd, {"lr": 0.1, "momentum": 0.9}),
    ("Adafactor", torch.optim.Adafactor, fp32, {"lr": 0.1}),
    ("ASGD", torch.optim.ASGD, fp32, {"lr": 0.1}),
    ("ours", FusedAdamW, fp32, {"lr": 0.1}),
    (
        "ours, 16 bits",
        FusedAdamW,
        lambda: parameters(torch.bfloat16, (4, 5), (5,), (3,)),
        {"lr": 0.1},
    ),
]


class Warming(torch.optim.SGD):
    """Counts its steps in its group, and takes its rate from them."""

    def step(self, closure=None):
        loss = super().step(closure)
        for group in self.param_groups:
            group["calls"] = group.get("calls", 0) + 1
            group["lr"] *= group["calls"]
        return loss


def unlike(cls, make, options) -> list[str]:
    """Returns at which events the parameters are no longer, bit for bit, those of one process, or
    differ by rank.
    """
    params, expected = make(), make()
    optimizers = [ShardedOptimizer(params[:-1], cls, **options), cls(expected[:-1], **options)]
    events = [
        "steps",
        "deepcopy",
        "steps",
        "exchange",
        "steps",
        "group",
        "steps",
        "pickle",
        "freeze",
        "steps",
        "steps",
    ]
    wrong = []
    for seed, event in enumerate(events):
        generator = torch.Generator().manual_seed(seed)
        if event == "steps":
            for number, (p, q) in enumerate(zip(params, expected, strict=True)):
                p.grad = q.grad = None
                if number % 3 != seed % 3:
                    q.grad = torch.randn(q.shape, generator=generator, dtype=q.dtype)
                    p.grad = q.grad.clone()
            for optimizer in optimizers:
                assert optimizer.step(lambda: 7) == 7
        elif event == "exchange":
            states = [copy.deepcopy(optimizer.state_dict()) for optimizer in optimizers]
            for optimizer, state in zip(optimizers, reversed(states), strict=True):
                optimizer.load_state_dict(state)
        elif event == "group":
            for optimizer, added in zip(optimizers, (params[-1], expected[-1]), strict=True):
                optimizer.add_param_group({"params": added, "lr": 0.05})
        elif event == "freeze":
            for p in (params[0], expected[0]):
                p.requires_grad_(False)
        else:
            objects = params, optimizers[0]
            params, optimizers[0] = (
                copy.deepcopy(objects)
                if event == "deepcopy"
                else pickle.loads(pickle.dumps(objects))
            )
        same = all(torch.equal(p, q) for p, q in zip(params, expected, strict=True))
        if not same or any(apart(p) for p in params):
            wrong.append(f"{seed} {event}")
    return wrong


def frozen() -> list[bool]:
    """Returns which parameters differ from one process's, or by rank, where a layer is frozen with
    its gradients.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    expected = copy.deepcopy(model)
    pairs = [
        (model, ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)),
        (expected, torch.optim.AdamW(expected.parameters(), lr=0.1)),
    ]
    for step in range(6):
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(step))
        for each, optimizer in pairs:
            each[0].requires_grad_(step not in (2, 3))
            optimizer.zero_grad(set_to_none=False)
            each(x).square().mean().backward()
            optimizer.step()
    both = zip(model.parameters(), expected.parameters(), strict=True)
    return [apart(p) or not torch.equal(p, q) for p, q in both]


def hooks() -> list:
    called, params = [], fp32()
    optimizer = ShardedOptimizer(params, torch.optim.SGD, momentum=0.9)
    optimizer.register_step_pre_hook(lambda *_: called.append("step"))
    optimizer.register_step_post_hook(lambda *_: called.append("stepped"))
    optimizer.register_state_dict_pre_hook(lambda own: called.append(type(own).__name__))
    optimizer.register_state_dict_post_hook(lambda own, state: state | {"more": 1})
    optimizer.register_load_state_dict_pre_hook(
        lambda own, state: called.append(sorted(state["state"]))
    )
    optimizer.register_load_state_dict_pre_hook(lambda own, state: state | {"state": {}})
    optimizer.register_load_state_dict_post_hook(lambda own: called.append(len(own.state)))
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    state = optimizer.state_dict()
    optimizer.load_state_dict(state)
    return [*called, state["more"]]


def other_shapes() -> list[str]:
    """The group that is refused leaves the optimizer as it was."""
    rank, (first, *others) = dist.get_rank(), fp32()
    optimizer = ShardedOptimizer([first], torch.optim.SGD)
    messages = []
    for group in (
        others[rank : rank + 1],
        others[: 1 + rank],
        [others[0].detach().to(torch.float64)],
    ):
        messages.append(
            refused(ValueError, lambda group=group: optimizer.add_param_group({"params": group}))
        )
    first.grad = torch.ones_like(first)
    optimizer.step()
    return messages


def masters() -> bool:
    """Returns whether fp32 masters of 16-bit weights pass through the full state dict unrounded."""
    params = [nn.Parameter(torch.ones(3, dtype=torch.bfloat16)) for _ in range(3)]
    optimizer = ShardedOptimizer(params, FusedAdamW, lr=1e-4)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    full = optimizer.state_dict()
    again = ShardedOptimizer(params, FusedAdamW)
    again.load_state_dict(full)
    kept = [
        torch.equal(again.state[p]["master"], optimizer.state[p]["master"]) for p in again.state
    ]
    rounded = [torch.equal(again.state[p]["master"], p.float()) for p in again.state]
    return all(kept) and not any(rounded) and len(full["state"]) == 3
