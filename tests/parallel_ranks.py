"""What test_parallel.py runs on ranks; each function yields what the test then looks at."""

import contextlib
import copy
import gc
import warnings
import weakref

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from labkit.configs import ModelConfig
from labkit.kernels import course
from labkit.models.transformer import Block, TransformerLM, language_model_loss
from labkit.parallel import collectives, fully_sharded
from labkit.parallel.data_parallel import (
    BucketedDataParallel,
    FlatDataParallel,
    NaiveDataParallel,
    OverlappedDataParallel,
)
from labkit.parallel.fully_sharded import FullyShardedDataParallel
from labkit.parallel.sharded_optimizer import ShardedOptimizer

WRAPPERS = {
    "naive": NaiveDataParallel,
    "flat": FlatDataParallel,
    "overlapped": OverlappedDataParallel,
    "bucketed, tiny": lambda module: BucketedDataParallel(module, 0.0005),
    "bucketed, one": lambda module: BucketedDataParallel(module, 1000),
    "fully sharded": FullyShardedDataParallel,
    "torch's": DistributedDataParallel,
}
STEPS, BATCH = 3, 4


def together(calls: list[tuple]):
    """Yields what each of `calls`, (function, arguments…), yields, as a list: a launch takes longer
    than they do.
    """
    for function, *arguments in calls:
        with warnings.catch_warnings():
            yield list(globals()[function](*arguments))
        torch.use_deterministic_algorithms(False)


class Perceptron(nn.Module):
    """Odd widths, biases, a norm, a buffer, and a weight with fewer elements than four ranks."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second = (
            nn.Linear(7, 11),
            nn.LayerNorm(11),
            nn.Linear(11, 3, bias=False),
        )
        self.last = nn.Linear(3, 1)
        self.register_buffer("shift", torch.randn(7))

    def forward(self, x):
        return self.last(self.second(F.relu(self.norm(self.first(x + self.shift)))))


class Tied(nn.Module):
    """An embedding that is also the head, a frozen layer in the middle, a frozen bias, a layer used
    for no input.
    """

    def __init__(self):
        super().__init__()
        self.embedding, self.frozen, self.middle = (
            nn.Embedding(13, 6),
            nn.Linear(6, 6),
            nn.Linear(6, 6),
        )
        self.head, self.unused = nn.Linear(6, 13, bias=False), nn.Linear(6, 6)
        self.head.weight = self.embedding.weight
        self.frozen.requires_grad_(False)
        self.middle.bias.requires_grad_(False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        return self.head(x + self.middle(torch.tanh(self.frozen(x))))


def batches(model: nn.Module, seed: int) -> torch.Tensor:
    """(steps, ranks, batch, …) inputs, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    lead = (STEPS, dist.get_world_size(), BATCH)
    if isinstance(model, Perceptron):
        return torch.randn(*lead, 7, generator=generator)
    return torch.randint(13, (*lead, 5), generator=generator)


def made(kind: type[nn.Module], seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return kind()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def mean_gradient(model: nn.Module, inputs: torch.Tensor, parts: int = 1) -> None:
    """One process's gradient as the ranks' is defined: each rank's batch by itself, then their sum
    over the ranks.
    """
    totals = {p: None for p in model.parameters()}
    for batch in inputs:
        model.zero_grad()
        for part in batch.chunk(parts):
            model(part).square().mean().backward()
        for p in totals:
            if p.grad is not None:
                totals[p] = p.grad.clone() if totals[p] is None else totals[p] + p.grad
    for p, total in totals.items():
        p.grad = None if total is None else total / len(inputs)


def full_values(model):
    named = model.module.named_parameters(remove_duplicate=False)
    return {name: p.full_tensor() if hasattr(p, "full_tensor") else p for name, p in named}


def difference(model: nn.Module, expected: nn.Module) -> float:
    """Largest difference of a parameter relative to the largest value, 0.0 where every bit is the
    same.
    """
    found = full_values(model)
    wanted = dict(expected.named_parameters(remove_duplicate=False))
    assert found.keys() == wanted.keys()
    return max(
        ((found[n] - p).abs().max() / p.abs().max().clamp(min=1)).item() for n, p in wanted.items()
    )


def trained(name: str, kind: type[nn.Module], seed: int, parts: int = 1) -> tuple[float, bool]:
    """Returns the difference from one process after three steps, and whether unused parameters kept
    no gradient.
    """
    rank = dist.get_rank()
    expected, mine = made(kind, seed), made(kind, seed + rank)
    extra = dict(find_unused_parameters=kind is Tied) if name == "torch's" else {}
    model = WRAPPERS[name](mine, **extra)
    optimizers = optimizer_of(expected), optimizer_of(model)
    for inputs in batches(expected, seed):
        mean_gradient(expected, inputs, parts)
        for p in model.parameters():
            p.grad = None
        for number, part in enumerate(inputs[rank].chunk(parts)):
            last = number == parts - 1
            hold = (
                contextlib.nullcontext()
                if last or not hasattr(model, "no_sync")
                else model.no_sync()
            )
            with hold:
                model(part).square().mean().backward()
                if isinstance(model, FullyShardedDataParallel) or (last and name != "torch's"):
                    model.finish_gradient_synchronization()
        for optimizer in optimizers:
            optimizer.step()
    unused = getattr(model.module, "unused", None)
    return difference(model, expected), unused is None or all(
        p.grad is None for p in unused.parameters()
    )


def wrappers(repeats: int):
    warnings.simplefilter("error")
    torch.use_deterministic_algorithms(True)
    for kind in (Perceptron, Tied):
        for name in WRAPPERS:
            with warnings.catch_warnings():
                if name == "torch's":
                    warnings.simplefilter("ignore")
                for seed in range(repeats):
                    yield f"{name}, {kind.__name__}, {seed}", *trained(name, kind, 10 * seed)
                if name != "torch's":
                    yield f"{name}, {kind.__name__}, accumulated", *trained(name, kind, 7, parts=2)
    yield from uneven_use()


class Branches(nn.Module):
    """Rank 0 uses one branch and the others the other; no rank the third."""

    def __init__(self):
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        return self.branches[min(dist.get_rank(), 1)](x)


def uneven_use():
    for name in ("naive", "flat", "overlapped", "bucketed, tiny"):
        model = WRAPPERS[name](made(Branches, 0))
        model(torch.ones(2, 4)).sum().backward()
        model.finish_gradient_synchronization()
        grads = [branch.bias.grad for branch in model.module.branches]
        n = dist.get_world_size()
        right = grads[2] is None and torch.equal(grads[0], torch.full((4,), 2 / n))
        yield (
            f"{name}, uneven use",
            0.0 if torch.equal(grads[1], torch.full((4,), 2 * (n - 1) / n)) else 1.0,
            right,
        )


def sharded_optimizer(saved=None):
    """Yields (name, whether it is bit for bit what the unsharded optimizer gives); last what
    another world can load.
    """
    if saved:
        yield "state of another number of ranks", resharded(saved)
    rank, n = dist.get_rank(), dist.get_world_size()
    adamw, momentum = dict(lr=0.01), dict(lr=0.1, momentum=0.9)
    for cls, settings in (
        (course.AdamW, adamw),
        (torch.optim.AdamW, adamw),
        (torch.optim.SGD, momentum),
    ):
        expected, mine = made(Tied, 3), made(Tied, 3)
        late = [list(model.middle.parameters()) for model in (expected, mine)]
        # Tied parameters twice, as in a list made module by module.
        early = [[*m.embedding.parameters(), *m.unused.parameters()] for m in (expected, mine)]
        sharded = ShardedOptimizer([*early[1], *mine.head.parameters()], cls, **settings)
        optimizers = [cls(early[0], **settings), sharded]
        for optimizer, group in zip(optimizers, late, strict=True):
            optimizer.add_param_group({"params": group, "lr": 0.05})
        schedulers = [
            torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) for optimizer in optimizers
        ]

        def steps(number, optimizers=optimizers, schedulers=schedulers, models=(expected, mine)):
            for seed in range(number):
                tokens = batches(models[0], seed)[0].flatten(0, 1)
                for model, optimizer, scheduler in zip(models, optimizers, schedulers, strict=True):

                    def closure(model=model, optimizer=optimizer, tokens=tokens):
                        optimizer.zero_grad()
                        loss = model(tokens).square().mean()
                        loss.backward()
                        return loss

                    loss = optimizer.step(closure)
                    scheduler.step()
                    assert loss.item() > 0

        steps(3)
        same = all(
            torch.equal(a, b) for a, b in zip(expected.parameters(), mine.parameters(), strict=True)
        )
        yield f"{cls.__name__}, three steps", same
        held = sum(p.nbytes for p in sharded.state)
        total = sum(p.nbytes for group in sharded.param_groups for p in group["params"])
        largest = max(p.nbytes for group in sharded.param_groups for p in group["params"])
        yield f"{cls.__name__}, at most a fair share and one parameter", held <= total / n + largest
        full, wanted = sharded.state_dict(), optimizers[0].state_dict()
        same = (
            full["param_groups"] == wanted["param_groups"]
            and full["state"].keys() == wanted["state"].keys()
        )
        for number, values in wanted["state"].items():
            same &= all(
                torch.equal(torch.as_tensor(v), torch.as_tensor(full["state"][number][k]))
                for k, v in values.items()
            )
        yield f"{cls.__name__}, consolidated state", same
        again = ShardedOptimizer([{"params": early[1]}, {"params": late[1]}], cls, lr=1.0)
        again.load_state_dict(copy.deepcopy(wanted))
        optimizers[1] = again
        schedulers[1] = torch.optim.lr_scheduler.ExponentialLR(again, 0.5, last_epoch=2)
        schedulers[1].base_lrs = schedulers[0].base_lrs
        for group, other in zip(again.param_groups, optimizers[0].param_groups, strict=True):
            group["lr"] = other["lr"]
        steps(2)
        same = all(
            torch.equal(a, b) for a, b in zip(expected.parameters(), mine.parameters(), strict=True)
        )
        yield f"{cls.__name__}, two steps after loading", same
        yield (
            f"{cls.__name__}, wrong groups",
            refused(again.load_state_dict, {"param_groups": [], "state": {}}),
        )
    yield "empty", refused(lambda: ShardedOptimizer([], torch.optim.SGD, lr=0.1))
    yield "saved", (full, [p.detach().clone() for p in mine.parameters()]) if rank == 0 else None


def refused(call, *args) -> str:
    try:
        call(*args)
    except ValueError as error:
        return str(error)
    return ""


def resharded(saved):
    """Takes one step from a state that another number of ranks saved; returns whether one process
    gets the same.
    """
    state, values = saved
    models = made(Tied, 0), made(Tied, 0)
    for model in models:
        for p, value in zip(model.parameters(), values, strict=True):
            p.data.copy_(value)
    groups = [
        [
            {"params": [*m.embedding.parameters(), *m.unused.parameters()]},
            {"params": [*m.middle.parameters()]},
        ]
        for m in models
    ]
    for model, optimizer in zip(
        models,
        (torch.optim.SGD(groups[0]), ShardedOptimizer(groups[1], torch.optim.SGD)),
        strict=True,
    ):
        optimizer.load_state_dict(copy.deepcopy(state))
        model(batches(model, 1)[0].flatten(0, 1)).square().mean().backward()
        optimizer.step()
    return all(
        torch.equal(a, b) for a, b in zip(*(model.parameters() for model in models), strict=True)
    )


class Net(nn.Module):
    """Two layers, of which the first and its norm are frozen and unfrozen; (4,) to (4,)."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 4)

    def forward(self, x):
        return self.last(torch.tanh(self.norm(self.first(x))))


def rows(seed: int) -> torch.Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(seed))


def trained_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, seed: int, clip: float | None = None
):
    """Trains on this rank's rows; a model without a wrapper on those of all ranks. Returns the
    gradients' norm.
    """
    optimizer.zero_grad()
    number = dist.get_world_size()
    if isinstance(model, Net):
        sum(model(rows(number * seed + rank)).square().mean() for rank in range(number)).div(
            number
        ).backward()
    else:
        model(rows(number * seed + dist.get_rank())).square().mean().backward()
    if hasattr(model, "finish_gradient_synchronization"):
        model.finish_gradient_synchronization()
    norm = nn.utils.clip_grad_norm_(model.parameters(), clip) if clip else None
    optimizer.step()
    return norm.full_tensor().item() if hasattr(norm, "full_tensor") else norm and norm.item()


def frozen_and_unfrozen():
    """Yields (wrapper and what, difference from one process after four steps, two before and two
    after it).
    """
    for name in WRAPPERS:
        if name == "torch's":
            continue
        for unfreezes in (False, True):
            expected, mine = made(Net, 0), made(Net, 0)
            for model in (expected, mine):
                model.first.requires_grad_(not unfreezes)
                model.norm.requires_grad_(not unfreezes)
            wrapped = WRAPPERS[name](mine)
            steps = [(model, optimizer_of(model)) for model in (expected, wrapped)]
            for seed in range(4):
                if seed == 2:
                    for model in (expected, mine):
                        model.first.requires_grad_(unfreezes)
                        model.norm.requires_grad_(unfreezes)
                for model, optimizer in steps:
                    trained_step(model, optimizer, seed)
            yield f"{name}, {'unfrozen' if unfreezes else 'frozen'}", difference(wrapped, expected)


def as_fully_shard():
    """Yields (what is done, whether parameters and results are as under torch's `fully_shard`, the
    result).

    The result is an error's text where there is one. Last: the difference from one process and the
    norms of both.
    """
    from torch.distributed.fsdp import fully_shard

    def clipped(model):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        return [trained_step(model, optimizer, seed, clip=0.05) for seed in range(3)]

    def scaled(model):
        optimizer, scaler = (
            torch.optim.SGD(model.parameters(), lr=0.1),
            torch.amp.GradScaler("cpu", init_scale=8.0),
        )
        scaler.scale(model(rows(dist.get_rank())).square().mean()).backward()
        if isinstance(model, FullyShardedDataParallel):
            model.finish_gradient_synchronization()
        if dist.get_rank() == 0:
            next(p for p in model.parameters() if p.ndim > 1).grad.to_local()[0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        return scaler.get_scale()

    def grouped(model):
        matrices, vectors = (
            [p for p in model.parameters() if (p.ndim > 1) is wanted] for wanted in (True, False)
        )
        for optimizer in (torch.optim.Muon(matrices, lr=0.1), torch.optim.SGD(vectors, lr=0.1)):
            trained_step(model, optimizer, 0)
        return len(matrices), len(vectors)

    def factored(model):
        return trained_step(model, torch.optim.Adafactor(model.parameters(), lr=0.1), 0)

    for run in (clipped, scaled, grouped, factored):
        results, states = [], []
        for wrap in (FullyShardedDataParallel, fully_shard):
            model = wrap(made(Net, 0))
            try:
                results.append(run(model))
            except RuntimeError as error:
                results.append(str(error))
            state = {
                name.removeprefix("module."): x.full_tensor()
                for name, x in model.state_dict().items()
            }
            states.append(state)
        same = states[0].keys() == states[1].keys() and all(
            torch.equal(states[0][n], states[1][n]) for n in states[0]
        )
        yield run.__name__, same and results[0] == results[1], results[0]
    expected, model = made(Net, 0), FullyShardedDataParallel(made(Net, 0))
    norms = clipped(expected), clipped(model)
    yield "clipped, one process", difference(model, expected), norms


class Normalized(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 4), nn.BatchNorm1d(4))


def buffers():
    """Yields (wrapper, largest difference from torch's of buffers in three steps, of outputs and of
    buffers after).
    """
    rank = dist.get_rank()

    def mean_of(model):
        return model.module[1].running_mean

    for name, wrapper in WRAPPERS.items():
        if name == "torch's":
            continue
        mine, torchs = (wrap(made(Normalized, rank)) for wrap in (wrapper, DistributedDataParallel))
        steps = []
        for seed in range(3):
            for model in (mine, torchs):
                model(rows(2 * seed + rank)).square().mean().backward()
            mine.finish_gradient_synchronization()
            steps.append((mean_of(mine) - mean_of(torchs)).abs().max().item())
        with torch.no_grad():
            outputs = [model.eval()(rows(99)) for model in (mine, torchs)]
        after = (mean_of(mine) - mean_of(torchs)).abs().max().item()
        yield name, max(steps), (outputs[0] - outputs[1]).abs().max().item(), after
    alone = NaiveDataParallel(made(Normalized, rank), broadcast_buffers=False)
    for _ in range(2):
        alone(rows(rank))
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mean_of(alone).sum().item())
    yield "each its own", len(set(everyone)) == len(everyone)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0]


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.scale = nn.LSTM(4, 4, 2, batch_first=True), nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.lstm(x)[0] * self.scale


class Readout(nn.Module):
    """Computes with its embedding's table outside of it."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(7, 4)

    def forward(self, x):
        return x @ self.table.weight.T


class Repeated(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4)] * 3)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Encoder(nn.TransformerEncoderLayer):
    def __init__(self):
        super().__init__(4, 2, 8, dropout=0.0, batch_first=True)


def unusual_modules():
    """Yields (module, difference from one process after two steps) of FSDP."""
    x = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    cases = [(Attention, {"units": (nn.MultiheadAttention,)}), (Recurrent, {}), (Repeated, {})]
    cases += [(Readout, {"units": (Readout,)}), (Encoder, {"units": (Encoder,)})]
    cases += [(Encoder, {"units": (Encoder,), "compute_dtype": torch.bfloat16})]
    for kind, options in cases:
        expected, model = made(kind, 0), FullyShardedDataParallel(made(kind, 0), **options)
        steps = [(one, torch.optim.SGD(one.parameters(), lr=0.1)) for one in (expected, model)]
        for _ in range(2):
            for one, optimizer in steps:
                optimizer.zero_grad()
                one(x).float().square().mean().backward()
                if one is model:
                    model.finish_gradient_synchronization()
                optimizer.step()
        yield (
            f"{kind.__name__}{', bf16' * ('compute_dtype' in options)}",
            difference(model, expected),
        )


def misuse():
    """Yields (wrapper and what, the error's type and message) of what must be refused."""

    def twice(model):
        for _ in range(2):
            model(rows(0)).sum().backward()

    def extended(model):
        model.module.append(nn.Linear(4, 4))
        model(rows(0))

    def replaced(model):
        model.module[0].weight = nn.Parameter(torch.ones(4, 4))
        model(rows(0))

    def converted(model):
        model.double()
        model(rows(0).double())

    def penalised(model):
        sum(p.square().sum() for p in model.parameters()).backward()

    def linear():
        return nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    calls = [(linear, twice), (linear, extended)]
    calls += [(linear, replaced), (linear, converted), (linear, copy.deepcopy)]
    own = [(Attention, lambda model: model(rows(0)[None])), (Readout, lambda model: model(rows(0)))]
    own += [(linear, penalised)]
    for name in WRAPPERS:
        for make, call in calls + own * (name == "fully sharded"):
            if name != "torch's":
                try:
                    call(WRAPPERS[name](make()))
                    yield name, ""
                except (RuntimeError, TypeError) as error:
                    yield name, f"{type(error).__name__}: {error}"


TOY = ModelConfig("toy", "tests", 16, 24, 3, 2, vocab_size=17)


class Checkpointed(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x, rotary):
        return checkpoint(self.block, x, rotary, use_reentrant=False)


def transformer(seed: int, variant: str = "plain", wrap: bool = False, compute_dtype=None):
    torch.manual_seed(seed)
    model = TransformerLM(TOY, max_context=8)
    for i, block in enumerate(model.blocks):
        if "compiled" in variant:
            block = torch.compile(block, backend="aot_eager")
        if "in place" in variant:
            block.compile(backend="aot_eager")
        model.blocks[i] = Checkpointed(block) if "checkpointed" in variant else block
    units = (Block,) if "units" in variant else ()
    return FullyShardedDataParallel(model, compute_dtype, units=units) if wrap else model


def lm_loss(model, tokens):
    return language_model_loss(model(tokens).float(), tokens)


def fully_sharded_transformer():
    """Yields (variant, difference from one process, whether shards and gradients are right, bytes
    left gathered).
    """
    rank, n = dist.get_rank(), dist.get_world_size()
    variants = {"plain": None, "units": None}
    if n == 2:
        variants |= {
            "checkpointed": None,
            "plain, bf16": torch.bfloat16,
            "plain, fp16": torch.float16,
        }
        variants |= {"compiled": None, "in place": None, "checkpointed compiled": None}
    for variant, dtype in variants.items():
        # The compiler warns of its own doings.
        warnings.simplefilter("ignore" if "compiled" in variant or "place" in variant else "error")
        expected, model = transformer(0), transformer(rank, variant, wrap=True, compute_dtype=dtype)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (expected, model)]
        for step in range(STEPS):
            torch.manual_seed(step)
            tokens = torch.randint(17, (n, 2, 8))
            total = {p: 0 for p in expected.parameters()}
            for batch in tokens:
                expected.zero_grad()
                lm_loss(expected, batch).backward()
                total = {p: grad + p.grad for p, grad in total.items()}
            for p, grad in total.items():
                p.grad = grad / n
            optimizers[1].zero_grad()
            lm_loss(model, tokens[rank]).backward()
            model.finish_gradient_synchronization()
            with torch.no_grad():
                model(tokens[rank])
            for optimizer in optimizers:
                optimizer.step()
        right = all(
            p.grad.shape == p.shape and p.grad.dtype == p.dtype == torch.float32
            for p in model.parameters()
        )
        whole = sum(p.numel() for p in expected.parameters())
        right &= sum(p.to_local().numel() for p in model.parameters()) < whole / n + 200
        found = {
            name.replace("_orig_mod.", "").replace("block.", ""): p
            for name, p in full_values(model).items()
        }
        wanted = dict(expected.named_parameters())
        assert found.keys() == wanted.keys()
        worst = max(
            ((found[name] - p).abs().max() / p.abs().max()).item() for name, p in wanted.items()
        )
        layers = len({weight.layer for weight in model._weights})
        yield (
            variant,
            worst,
            right,
            layers,
            sum(w.flat.untyped_storage().nbytes() for w in model._weights),
        )


def schedule():
    """Yields, for forward and for backward of a second iteration, when layers' gathers began and
    layers ended.
    """
    events = []
    model = transformer(0, wrap=True)
    layer, weight = fully_sharded._Layer, fully_sharded._Weight
    start, free = layer.start_gather, weight.free

    def started(self):
        events.extend(("gather", weight.name) for weight in self.weights if not weight.is_gathered)
        start(self)

    def freed(self):
        events.extend([("free", self.name)] if self.is_gathered else [])
        free(self)

    layer.start_gather, weight.free = started, freed
    model.waits = []
    for _ in range(2):
        events.clear()
        loss = lm_loss(model, torch.zeros(2, 8, dtype=torch.long))
        forward = list(events)
        events.clear()
        loss.backward()
        model.finish_gradient_synchronization()
    yield forward
    yield list(events)
    yield [name for name, begin, end in model.waits if end >= begin]


def bad_input():
    """Yields the message of each error that must be one."""
    linear = nn.Linear(2, 2)
    yield refused(lambda: BucketedDataParallel(linear, 0))
    yield refused(lambda: BucketedDataParallel(linear, -1))
    yield refused(lambda: BucketedDataParallel(linear, 1, transport="copy"))
    yield refused(lambda: FullyShardedDataParallel(linear, transport="pigeon"))
    yield refused(lambda: FullyShardedDataParallel(linear, torch.int32))
    yield refused(lambda: FullyShardedDataParallel(linear, "bf16"))
    yield refused(lambda: NaiveDataParallel(nn.ReLU()))
    yield refused(lambda: FullyShardedDataParallel(nn.ReLU()))
    yield refused(lambda: FlatDataParallel(nn.Sequential(linear, nn.Linear(2, 2, device="meta"))))
    yield refused(lambda: FlatDataParallel(nn.Sequential(nn.EmbeddingBag(8, 4, sparse=True))))
    yield refused(lambda: FullyShardedDataParallel(nn.Embedding(8, 4, sparse=True)))
    yield refused(lambda: OverlappedDataParallel(nn.Linear(2 + dist.get_rank(), 2)))
    yield refused(lambda: collectives.time_collective("all_ruduce", 1000))
    yield refused(lambda: collectives.time_collective("all_reduce", 3))
    yield refused(
        lambda: collectives.time_collective("all_reduce", 1000, transport="carrier pigeon")
    )
    yield refused(lambda: collectives.time_collective("all_reduce", 1000, transport="ctas_4"))
    model = OverlappedDataParallel(linear)
    model(torch.ones(1, 2)).sum().backward()
    try:
        model(torch.ones(1, 2)).sum().backward()
    except RuntimeError as error:
        yield str(error)
    yield f"outlived by its module: {', '.join(outlived())}"


def timed_collectives(sizes: list[int]):
    for operation in collectives.OPERATIONS:
        for num_bytes in sizes:
            for dtype in (torch.float32, torch.bfloat16):
                yield collectives.time_collective(operation, num_bytes, dtype)


def outlived() -> list[str]:
    """Returns the wrappers that keep a parameter alive, or whose hooks act on a backward pass after
    them.
    """
    failed = []
    for wrapper in (NaiveDataParallel, OverlappedDataParallel, FullyShardedDataParallel):
        module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        wrapped = wrapper(module)
        wrapped(torch.ones(1, 4)).sum().backward()
        wrapped.finish_gradient_synchronization()
        parameter = weakref.ref(next(wrapped.parameters()))
        if wrapper is OverlappedDataParallel:
            del wrapped
            gc.collect()
            for _ in range(2):  # with the hooks at work, the second would be refused
                module(torch.ones(1, 4)).sum().backward()
            wrapped = None
        del wrapped, module
        gc.collect()
        failed += [wrapper.__name__] if parameter() is not None else []
    return failed
