"""What test_parallel.py checks on ranks, all of it in one launch: each `check_` function raises
where something is wrong.
"""

import copy
import functools
import gc
import itertools
import warnings
import weakref
from dataclasses import make_dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from labkit.accounting import OPERATIONS, bus_factor
from labkit.configs import ModelConfig
from labkit.experiments.course_adapters import all_rows, get_fsdp
from labkit.kernels.adamw import FusedAdamW
from labkit.models.transformer import Block, TransformerLM, language_model_loss
from labkit.parallel import collectives
from labkit.parallel.data_parallel import (
    BucketedDataParallel,
    FlatDataParallel,
    NaiveDataParallel,
    OverlappedDataParallel,
)
from labkit.parallel.fully_sharded import FullyShardedDataParallel
from labkit.parallel.sharded_optimizer import ShardedOptimizer

REPLICATED = {
    "naive": NaiveDataParallel,
    "flat": FlatDataParallel,
    "overlapped": OverlappedDataParallel,
    "bucketed, tiny": lambda module: BucketedDataParallel(module, 0.0005),
    "bucketed, one": lambda module: BucketedDataParallel(module, 1000),
    "sent as fp32": lambda module: BucketedDataParallel(module, 0.0005, sent_as=torch.float32),
}
WRAPPERS = REPLICATED | {"fully sharded": FullyShardedDataParallel}


def run(names: list[str]):
    """Yields each check's name once it has passed."""
    for name in names:
        with warnings.catch_warnings():
            globals()[name]()
        yield name


Output = make_dataclass("Output", ["y"])


class Boxed(nn.Linear):
    def forward(self, x):
        return Output(super().forward(x))


class Row(nn.Embedding):
    def forward(self):
        return self.weight[0]


class Net(nn.Module):
    """Odd widths, biases, a norm, a buffer, a weight with fewer rows than four ranks, layers that
    return a dataclass and a view of their weight; (4,) to (3,).
    """

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(4, 11), nn.LayerNorm(11)
        self.second, self.last = Boxed(11, 5, bias=False), nn.Linear(5, 3)
        self.register_buffer("shift", torch.randn(4))
        self.row = Row(5, 4)

    def forward(self, x):
        x = self.first(x + self.shift * self.row())
        return self.last(self.second(torch.tanh(self.norm(x))).y)


class Tied(nn.Module):
    """An embedding whose table is also its own head, a frozen bias, and a frozen matrix of its own,
    which backward reads after the layers inside.
    """

    def __init__(self):
        super().__init__()
        self.embedding, self.frozen = nn.Embedding(13, 6), nn.Parameter(torch.randn(6, 6))
        self.middle = nn.Linear(6, 6)
        self.head = self.embedding.weight
        self.frozen.requires_grad_(False)
        self.middle.bias.requires_grad_(False)

    def forward(self, x):
        x = self.embedding((x * 4).long() % 13)
        return (x + self.middle(torch.tanh(x @ self.frozen))) @ self.head.T


class Checkpointed(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, *inputs):
        return checkpoint(self.block, *inputs, use_reentrant=False)


def recomputed() -> nn.Module:
    return Checkpointed(Tied())


def made(kind, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return kind()


def rows(seed: int) -> torch.Tensor:
    torch.manual_seed(seed)
    return torch.randn(6, 4)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    # foreach as on a GPU.
    return torch.optim.SGD(model.parameters(), 0.1, 0.9, weight_decay=0.01, foreach=True)


def squares(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def alone_step(model: nn.Module, optimizer, seed: int, parts: int = 1, loss=squares) -> None:
    """One process's step with the gradient that ranks have by definition: each rank's rows by
    themselves, then the mean.
    """
    number = dist.get_world_size()
    model.zero_grad()
    for rank in range(number):
        for part in rows(number * seed + rank).chunk(parts):
            loss(model, part).backward()
    for p in model.parameters():
        if p.grad is not None:
            p.grad /= number
    optimizer.step()


def rank_step(model: nn.Module, optimizer, seed: int, parts: int = 1, loss=squares) -> None:
    """A wrapper's step on this rank's rows."""
    optimizer.zero_grad()
    for part in rows(dist.get_world_size() * seed + dist.get_rank()).chunk(parts):
        loss(model, part).backward()
        model.finish_gradient_synchronization()
    loss(model, part)  # whose weights the next forward pass must not find
    optimizer.step()


def full(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else all_rows(x)


def assert_same(model: nn.Module, expected: nn.Module, bound: float, what) -> None:
    """Asserts that no parameter of a wrapper differs by more than `bound` of the largest value; 0:
    bit for bit.
    """
    models = model.module, expected
    mine, wanted = (one.named_parameters(remove_duplicate=False) for one in models)
    for (name, value), (_, p) in zip(mine, wanted, strict=True):
        # Fused optimizers read both in one order.
        assert value.grad is None or value.grad.stride() == value.stride()
        assert (full(value) - p).abs().max() <= bound * p.abs().max(), (what, name)


def check_every_wrapper_trains_as_one_process():
    """Two ranks' sum is the same in either order, so there every bit agrees, unless several
    backward passes are reduced each by itself. gloo adds more ranks in an order of its own.
    """
    warnings.simplefilter("error")
    torch.use_deterministic_algorithms(True)
    wrappers = WRAPPERS | {"the course's": get_fsdp}
    for kind, name, parts in itertools.product((Net, Tied, recomputed), wrappers, (1, 2)):
        expected, mine = made(kind), made(kind, dist.get_rank())
        for p in mine.parameters():
            p.data = p.data.t().contiguous().t()  # by columns
        _, model = OverlappedDataParallel(mine), wrappers[name](mine)
        optimizers = momentum(expected), momentum(model)
        for seed in range(3):
            alone_step(expected, optimizers[0], seed, parts)
            rank_step(model, optimizers[1], seed, parts)
        exact = dist.get_world_size() == 2 and parts == 1
        assert_same(model, expected, 0 if exact else 2e-6, (kind, name, parts))
    torch.use_deterministic_algorithms(False)
    assert get_fsdp(nn.LayerNorm(4), torch.half)(rows(0)).dtype == torch.float


class Readout(nn.Module):
    """Computes with its embedding's table outside of it."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(7, 4)

    def forward(self, x):
        return x @ self.table.weight.T


def twice(model):
    for _ in range(2):
        model(rows(0)).sum().backward()


def frozen(model):
    model.module[0].weight.requires_grad_(False)
    model(rows(0))


def replaced(model):
    model.module[0].weight = nn.Parameter(torch.ones(4, 4))
    model(rows(0))


def written(model, write):
    out, p = model(rows(0)), next(model.parameters())
    p.grad = torch.ones_like(p)
    write(p)
    out.sum().backward()


def check_misuse_of_a_wrapper_is_refused_by_name():
    def linear():
        return nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh())

    for wrapper, (misuse, kind, message) in itertools.product(
        WRAPPERS.values(),
        (
            (twice, RuntimeError, r"^a second backward before finish_.*; accepted: one"),
            (replaced, RuntimeError, "wrapping, 0.weight was added, replaced, moved"),
            (frozen, RuntimeError, "wrapping, 0.weight was .*frozen or unfrozen; accepted"),
            (copy.deepcopy, TypeError, r"Parallel cannot be copied or pickled; accepted: its"),
        ),
    ):
        with pytest.raises(kind, match=message):
            misuse(wrapper(linear()))
        model = wrapper(nn.Sequential(linear(), linear()))
        model.module[0](rows(0)).sum().backward()
        with pytest.raises(RuntimeError, match=r"has no gradient on this rank; accepted: all used"):
            model.finish_gradient_synchronization()
        model(rows(0)).sum().backward()
        model.finish_gradient_synchronization()
    sharded = FullyShardedDataParallel
    with pytest.raises(RuntimeError) as caught:
        sharded(Readout())(rows(0))
    assert "units=(the class" in caught.value.__notes__[0]
    sharded(Readout(), units=(Readout,))(rows(0).requires_grad_()).sum().backward()
    for write in (nn.init.zeros_, lambda p: torch.optim.AdamW([p], fused=True).step()):
        with pytest.raises(RuntimeError, match="parameters written after forward; accepted"):
            written(sharded(linear()), write)
    with pytest.raises(RuntimeError, match=r"0.weight has a gradient of this rank alone.*accepted"):
        next(sharded(linear()).parameters()).sum().backward()


def check_bad_input_is_refused_with_the_value_and_the_accepted_ones():
    linear, rank = nn.Linear(2, 2), dist.get_rank()
    mirrored = nn.Sequential(linear, nn.Linear(2, 2))
    mirrored[1].weight = nn.Parameter(linear.weight.T)
    sparse = nn.Sequential(nn.EmbeddingBag(8, 4, sparse=True))
    first, *others = parameters(torch.float32)
    optimizer = ShardedOptimizer([first], torch.optim.SGD)
    group = {"params": others[rank : rank + 1]}
    saved_groups = optimizer.state_dict()["param_groups"]
    surplus = {"state": {0: {"momentum_buffer": first}}, "param_groups": 2 * saved_groups}
    for call, message in (
        (lambda: BucketedDataParallel(linear, 0), "bucket_size_mb is 0; accepted"),
        (lambda: BucketedDataParallel(linear, 1, "copy"), "'copy'; accepted with gloo: coll"),
        (
            lambda: BucketedDataParallel(linear, 1, "copy", sent_as=torch.bfloat16),
            "transport 'copy' with sent_as; accepted: 'collective'",
        ),
        (lambda: FlatDataParallel(sparse), "^0 makes sparse gradients; accepted: sparse=False"),
        (lambda: FlatDataParallel(FlatDataParallel(linear)), "is a wrapper; accepted: its module"),
        (lambda: FlatDataParallel(mirrored), "1.weight has the memory of 0.weight; accepted: one"),
        (lambda: FlatDataParallel(nn.BatchNorm1d(2)), "rank's batches alone; accepted: SyncB"),
        (lambda: FlatDataParallel(nn.InstanceNorm1d(2, track_running_stats=True)), "alone"),
        (
            lambda: OverlappedDataParallel(nn.Linear(2 + rank, 2)),
            r"rank 1 has \('weight', \(2, 3\).*rank 0 has, \('weight', \(2, 2\)",
        ),
        (
            lambda: optimizer.add_param_group(group),
            r"rank 1 has a parameter of \(3, 4\), .*rank 0 has, a parameter of \(5,\), ",
        ),
        (lambda: optimizer.load_state_dict(surplus), r"of \[1, 1\] parameters; accepted: of \[1\]"),
        (
            lambda: ShardedOptimizer(FullyShardedDataParallel(linear).parameters(), FusedAdamW),
            "sharded already; accepted: torch's optimizers",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    # A group and a state that are refused leave the optimizer as it was.
    assert not optimizer.state
    first.grad = torch.ones_like(first)
    optimizer.step()


def check_no_wrapper_outlives_its_last_use():
    for wrapper in (OverlappedDataParallel, FullyShardedDataParallel):
        module = nn.Linear(4, 4)
        wrapped = wrapper(module)
        wrapped(rows(0)).sum().backward()
        wrapped.finish_gradient_synchronization()
        parameter = weakref.ref(next(wrapped.parameters()))
        del wrapped
        gc.collect()
        if wrapper is OverlappedDataParallel:
            twice(module)  # with the hooks at work, the second would be refused
        del module
        gc.collect()
        assert parameter() is None, wrapper


# ---- a fully sharded transformer -----------------------------------------------------------------

TOY = ModelConfig("toy", 16, 24, 3, 2, vocab_size=17)


def transformer(variant: str = "plain") -> TransformerLM:
    model = TransformerLM(TOY, max_context=8)
    model.head.weight = model.embedding.weight
    for i, block in enumerate(model.blocks):
        if variant == "compiled":
            block.compile(backend="aot_eager")
        if variant == "checkpointed":
            model.blocks[i] = Checkpointed(block)
    return model


def lm_loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    tokens = (x * 4).long() % TOY.vocab_size
    return language_model_loss(model(tokens).float(), tokens)


def check_a_fully_sharded_transformer_trains_as_in_one_process():
    number = dist.get_world_size()
    for variant in ("plain", "units", "checkpointed", "bf16", "compiled"):
        expected = made(transformer)
        units = (Block,) if variant == "units" else ()
        dtype = torch.bfloat16 if variant == "bf16" else None
        mine = made(functools.partial(transformer, variant), dist.get_rank())
        model = FullyShardedDataParallel(mine, dtype, units=units)
        optimizers = [torch.optim.SGD(one.parameters(), lr=0.5) for one in (expected, model)]
        for seed in range(3):
            alone_step(expected, optimizers[0], seed, loss=lm_loss)
            rank_step(model, optimizers[1], seed, loss=lm_loss)
            with torch.no_grad():
                lm_loss(model, rows(seed))
        for p in model.parameters():
            assert p.grad.shape == p.shape and p.grad.dtype == p.dtype == torch.float32
        most = sum(p.numel() for p in expected.parameters()) / number + 200
        num_held = sum(p.to_local().numel() for p in model.parameters())
        assert num_held < most, "shards are no shards"
        exact = number == 2 and variant in ("plain", "units", "checkpointed")
        # bf16 keeps 8 bits; three steps move the parameters by a small part of their size.
        bound = 0 if exact else 0.02 if dtype else 2e-6
        assert_same(model, expected, bound, variant)
        if dtype:
            with pytest.raises(AssertionError):  # computed in fp32
                assert_same(model, expected, 1e-5, variant)


# ---- collectives ---------------------------------------------------------------------------------


def check_collectives_move_the_right_elements_and_count_as_nccl_tests_does():
    number = dist.get_world_size()
    for operation, dtype in itertools.product(OPERATIONS, (torch.float32, torch.bfloat16)):
        result = collectives.time_collective(operation, 100_003, dtype)
        # What is no whole number of elements for each rank is left off.
        assert result["num_bytes"] == 100_003 // (number * dtype.itemsize) * number * dtype.itemsize
        assert result["num_wrong"] == 0 and result["world_size"] == number, result
        # A CPU's rank waits for what it issues.
        assert result["issue_s"] == result["seconds"] and len(result["times_s"]) == 20
        rate = result["num_bytes"] / result["seconds"] / 1e9
        assert result["bus_gbs"] == pytest.approx(rate * bus_factor(operation, number))
        collectives.check_ranks_agree([result])


def check_an_average_sent_in_16_bits_is_rounded_twice_whatever_the_number_of_ranks():
    number = dist.get_world_size()
    torch.manual_seed(0)
    values = torch.randn(number, 1001)
    average = values[dist.get_rank()].clone()
    # The shares of the ranks cut through a tensor.
    tensors = average[:600].view(20, 30), average[600:]
    collectives.average_in(torch.bfloat16, tensors)
    collectives.check_ranks_agree([average.tolist()])
    error = (average - values.mean(0)).abs() / values.abs().amax(0)
    assert 0 < error.max() <= 2**-7


# ---- the sharded optimizer -----------------------------------------------------------------------


def parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    torch.manual_seed(0)
    shapes = (4, 5), (5,), (3, 4), (7,)
    return [nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in shapes]


EVENTS = "steps steps exchange steps group steps freeze steps steps".split()


def check_the_sharded_optimizer_steps_as_the_unsharded_bit_for_bit():
    """Through whatever happens between steps; the last parameter comes in a group of its own."""
    for kind, dtype, options in (
        (torch.optim.AdamW, torch.float32, {"fused": True}),
        (torch.optim.SGD, torch.float32, {"momentum": 0.9}),
        (FusedAdamW, torch.bfloat16, {}),
    ):
        params, expected = parameters(dtype), parameters(dtype)
        if dist.get_rank():  # by columns
            params[0].data = expected[0].data.T.contiguous().T
        # Twice, as tied parameters are in a list made module by module.
        sharded = ShardedOptimizer([*params[:-1], params[0]], kind, lr=0.1, **options)
        unsharded = kind(expected[:-1], lr=0.1, **options)
        for seed, event in enumerate(EVENTS):
            torch.manual_seed(seed)
            if event == "steps":
                for number, pair in enumerate(zip(params, expected, strict=True)):
                    gradient = torch.randn(pair[0].shape, dtype=dtype)
                    for p in pair:
                        p.grad = gradient.clone() if number % 3 != seed % 3 else None
                assert sharded.step(lambda: 7) == unsharded.step(lambda: 7) == 7
            elif event == "exchange":
                state = copy.deepcopy(sharded.state_dict())
                sharded.load_state_dict(copy.deepcopy(unsharded.state_dict()))
                unsharded.load_state_dict(state)
            for optimizer, listed in ((sharded, params), (unsharded, expected)):
                if event == "group":
                    optimizer.add_param_group({"params": listed[-1], "lr": 0.05})
                elif event == "freeze":  # with gradients in the steps that follow
                    listed[0].requires_grad_(False)
            same = [torch.equal(p, q) for p, q in zip(params, expected, strict=True)]
            assert all(same), (kind, dtype, seed, event, same)
        sizes = [p.nbytes for p in params]
        most = sum(sizes) / dist.get_world_size() + max(sizes)
        assert sum(p.nbytes for p in sharded.state) <= most, "more than its share"
