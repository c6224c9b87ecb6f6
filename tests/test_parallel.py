"""Training on two and four gloo ranks against one process, the launcher's faults, and bad input."""

import os
import re
import time

import pytest
import torch
from conftest import ALL_TESTS, more

from labkit.accounting import OPERATIONS, bus_factor
from labkit.parallel import collectives
from labkit.parallel.launch import RankError, launch

REPEATS = 5 if ALL_TESTS else 1


def on_ranks(calls: dict[str, tuple], nproc: int) -> dict[str, list[list]]:
    """Returns, by the function's name, what each rank yielded."""
    named = [(name, *arguments) for name, arguments in calls.items()]
    ranks = launch("parallel_ranks:together", nproc, named, device="cpu", timeout_s=240)
    return dict(zip(calls, zip(*ranks, strict=True), strict=True))


@pytest.fixture(scope="module")
def two():
    names = ("bad_input", "sharded_optimizer", "fully_sharded_transformer", "schedule")
    names += ("frozen_and_unfrozen", "as_fully_shard", "buffers", "unusual_modules", "misuse")
    return on_ranks({"wrappers": (REPEATS,)} | dict.fromkeys(names, ()), 2)


@pytest.fixture(scope="module")
def four(two):
    saved = two["sharded_optimizer"][0][-1][1]
    calls = {"sharded_optimizer": (saved,), "timed_collectives": ([1000, 100_003],)}
    if ALL_TESTS:
        calls |= {"wrappers": (REPEATS,), "fully_sharded_transformer": ()}
    return on_ranks(calls, 4)


@pytest.fixture
def ranks(request):
    """What two ranks yielded, or four: the parameter is the fixture's name."""
    return request.getfixturevalue(request.param)


NUM_RANKS = pytest.mark.parametrize("ranks", ["two", *more("four")], indirect=True)


@NUM_RANKS
def test_every_wrapper_trains_as_one_process(ranks):
    """One process adds up each rank's own gradient, in rank order: a batch taken at once would
    round differently.

    Two ranks' sum is the same in either order, so there every bit agrees. gloo adds four in an
    order of its own.
    """
    for results in ranks["wrappers"]:
        assert len(results) == 2 * (7 * REPEATS + 6) + 4
        for name, difference, unused_without_gradient in results:
            assert unused_without_gradient, name
            # Fully sharded, each backward pass is reduced by itself.
            exact = len(ranks["wrappers"]) == 2 and not re.match("fully sharded.*accumulated", name)
            assert difference <= (0 if exact else 1e-6), f"{name}: {difference}"


@NUM_RANKS
def test_fully_sharded_transformer_with_checkpointing_and_compiled_blocks(ranks):
    # bf16 keeps 8 bits and fp16 11; three steps move the parameters by a small part of their size.
    tolerance = {"plain, bf16": 0.02, "plain, fp16": 0.004}
    nproc = len(ranks["wrappers"])
    for results in ranks["fully_sharded_transformer"]:
        assert len(results) == (8 if nproc == 2 else 2)
        for variant, difference, right, num_layers, bytes_left in results:
            exact = nproc == 2 and variant in ("plain", "units", "checkpointed")
            # Three blocks of seven matrices, embedding and head.
            assert num_layers == (
                23 if variant.startswith(("plain", "checkpointed")) and "comp" not in variant else 5
            )
            assert difference <= (0 if exact else tolerance.get(variant, 2e-6)), (
                variant,
                difference,
            )
            assert variant not in tolerance or difference > 1e-5, f"{variant} computed in fp32"
            assert right and bytes_left == 0, variant


def test_what_is_frozen_or_unfrozen_after_wrapping_trains_as_in_one_process(two):
    for results in two["frozen_and_unfrozen"]:
        assert len(results) == 12
        for name, difference in results:
            assert difference <= 1e-6, (name, difference)


def test_clipping_scaling_groups_and_optimizers_do_what_they_do_under_fully_shard(two):
    """A factored second moment needs sums over the rows of all ranks; PyTorch 2.13 refuses them."""
    for *results, (_, difference, (norms_of_one, norms)) in two["as_fully_shard"]:
        assert [name for name, same, _ in results if not same] == []
        values = {name: value for name, _, value in results}
        assert values["scaled"] == 4 and values["grouped"] == (2, 4)
        assert difference <= 1e-6 and norms == pytest.approx(norms_of_one) and min(norms) > 0.05
    assert two["as_fully_shard"][0][-1] == two["as_fully_shard"][1][-1]


def test_buffers_are_rank_0s_as_in_torchs_wrapper(two):
    for *results, own in two["buffers"]:
        assert len(results) == 6 and own == ("each its own", True)
        assert [result for result in results if result[1:] != (0, 0, 0)] == []


def test_modules_that_share_or_remember_parameters_train_fully_sharded_as_in_one_process(two):
    for results in two["unusual_modules"]:
        assert len(results) == 6
        for name, difference in results:
            assert difference <= (2e-3 if "bf16" in name else 1e-6), (name, difference)


def test_misuse_of_a_wrapper_is_refused_by_name(two):
    patterns = [
        r"RuntimeError: a second backward before finish_gradient_synchronization\(\); accepted: "
        r"one",
        r"RuntimeError: after wrapping, 2.weight, 2.bias was added, replaced or moved; accepted: "
        r"before it",
        r"RuntimeError: after wrapping, 0.weight was added, replaced or moved; accepted: before it",
        r"RuntimeError: after wrapping, 0.weight, 0.bias was added, replaced or moved; accepted: "
        r"before it",
        r"TypeError: \w+Parallel cannot be copied or pickled; accepted: its module",
    ]
    sharded = [
        r"RuntimeError: MultiheadAttention computes with a parameter of "
        r"another.*units=\(MultiheadAttention,\)",
        r"RuntimeError: Readout computes with a parameter of another.*units=\(Readout,\)",
        r"RuntimeError: 0.bias has a gradient of this rank alone.*accepted: use in its module's "
        r"forward pass",
    ]
    for messages in two["misuse"]:
        assert len(messages) == len(6 * patterns + sharded)
        for (name, message), pattern in zip(messages, 6 * patterns + sharded, strict=True):
            assert re.match(pattern, message), (name, message)


def test_a_layer_is_gathered_when_the_one_but_last_before_it_is_done(two):
    forward, backward, waits = two["schedule"][0]
    # The head is gathered in forward and freed in backward.
    for events, held_before, held_after in ((forward, 0, 1), (backward, 1, 0)):
        gathered = [name for what, name in events if what == "gather"]
        assert len(gathered) > 20 and len(set(gathered)) == len(gathered)
        for i in range(2, len(gathered)):
            assert events.index(("free", gathered[i - 2])) < events.index(("gather", gathered[i]))
        held = most = held_before
        for what, _ in events:
            held += 1 if what == "gather" else -1
            most = max(most, held)
        assert most == 2 and held == held_after
    assert forward[-1][1] == "blocks.2.feed_forward.down_proj.weight" and waits


def test_sharded_optimizer_steps_as_the_unsharded_and_moves_to_other_ranks(two, four):
    assert [results[0] for results in four["sharded_optimizer"]] == [
        ("state of another number of ranks", True)
    ] * 4
    for results in (
        *two["sharded_optimizer"],
        *(results[1:] for results in four["sharded_optimizer"]),
    ):
        *results, (last, _) = results
        assert last == "saved" and len(results) == 16
        for name, result in results:
            assert (
                "accepted" in result or "empty" in result if isinstance(result, str) else result
            ), name


def test_on_a_gpu_collectives_are_timed_once_all_are_issued(monkeypatch):
    order = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            order.append("event")

        def synchronize(self):
            order.append("wait")

        def elapsed_time(self, end):
            return 10.0

    monkeypatch.setattr(collectives.dist, "barrier", lambda: order.append("barrier"))
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: order.append("spin"))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    seconds, issue_s = collectives._sample(lambda: order.append("call"), torch.device("cuda"))
    assert order == ["barrier", "spin", "call", "event", *5 * ["call"], "event", "wait"]
    assert seconds == pytest.approx(10e-3 / 5) and 0 < issue_s < 1


def test_collectives_move_the_right_elements_and_count_as_nccl_tests_does(four):
    results = four["timed_collectives"]
    assert all(result == results[0] for result in results)
    assert [r["operation"] for r in results[0][::4]] == list(OPERATIONS)
    for result in results[0]:
        assert (
            result["num_wrong"] == 0 and result["world_size"] == 4 and len(result["times_s"]) == 3
        )
        # A CPU's rank waits for what it issues.
        assert result["issue_s"] == result["seconds"] == sorted(result["times_s"])[1]
        assert result["algorithm_gbs"] == pytest.approx(
            result["num_bytes"] / result["seconds"] / 1e9
        )
        assert result["bus_gbs"] == pytest.approx(
            bus_factor(result["operation"], 4) * result["algorithm_gbs"]
        )
    # What is no whole number of elements for each rank is left off.
    assert {r["num_bytes"] for r in results[0]} == {1000, 992, 100_000}


def test_bad_input_is_refused_with_the_value_and_the_accepted_ones(two):
    patterns = [
        "bucket_size_mb is 0; accepted",
        "bucket_size_mb is -1; accepted",
        "transport is 'copy'; accepted with gloo: collective",
        "transport is 'pigeon'; accepted with gloo: collective",
        "compute_dtype is torch.int32; accepted",
        "compute_dtype is bf16; accepted",
        "ReLU has no parameters",
        "ReLU has no parameters",
        "on cpu, meta; accepted: one device",
        "^0 makes sparse gradients; accepted: sparse=False",
        "^the module makes sparse gradients; accepted: sparse=False",
        r"rank 1 has \('weight', \(2, 3\).*rank 0 has, \('weight', \(2, 2\)",
        "'all_ruduce'; accepted: all_reduce",
        "3 bytes of torch.float32; accepted: 8",
        "'carrier pigeon'; accepted here: default",
        "'ctas_4' with gloo; accepted here: default",
        r"second backward before finish_gradient_synchronization\(\)",
        r"^outlived by its module: $",
    ]
    for messages in two["bad_input"]:
        assert len(messages) == len(patterns)
        for pattern, message in zip(patterns, messages, strict=True):
            assert re.search(pattern, message), message
            assert "\n" not in message


@pytest.mark.parametrize(
    "arguments, options, message",
    [
        (("failing_rank:fault", 0), {}, "0 ranks with gloo; accepted: 1 and more"),
        (("failing_rank:fault", 2), {"device": "tpu"}, "device 'tpu'; accepted here: "),
        (("failing_rank:fault", 2), {"backend": "nccl"}, "backend 'nccl' on cpu; accepted: gloo"),
        ((lambda: None, 2), {}, "cannot start"),
    ],
    ids=["ranks", "device", "backend", "function"],
)
def test_launch_refuses_what_cannot_start(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        launch(*arguments, **{"device": "cpu"} | options)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_more_ranks_than_gpus_are_refused():
    with pytest.raises(
        ValueError, match=f"{torch.cuda.device_count() + 1} ranks with nccl; accepted: 1 to"
    ):
        launch("failing_rank:fault", torch.cuda.device_count() + 1, device="cuda")


@pytest.mark.parametrize(
    "kind, rank, said, bound_s",
    [
        ("crash", 1, "ZeroDivisionError: of rank 1", 40),
        ("killed", 1, "killed by SIGKILL", 40),
        ("hang", 0, "in all_reduce", 40),
        *more(("shape", 0, "Received data size doesn't match expected size", 40)),
    ],
)
def test_a_failing_rank_ends_the_run_with_its_error(kind, rank, said, bound_s):
    begin = time.monotonic()
    with pytest.raises(RankError) as caught:
        launch("failing_rank:fault", 2, kind, device="cpu", timeout_s=60, collective_timeout_s=4)
    assert time.monotonic() - begin < bound_s
    message = str(caught.value)
    assert (
        caught.value.rank == rank
        and f"rank {rank} of 2 failed first" in message
        and said in message
    )
    if kind == "hang":
        # Where the rank stood for which the failing one waited.
        assert re.search(r"rank 1 was at:(\n.*)*in fault", message)
    assert [len(items) for items in caught.value.finished] == [1, 1]
    assert not any(is_running(items[0]) for items in caught.value.finished)


def test_a_deadline_ends_ranks_that_never_communicate():
    with pytest.raises(RankError, match=r"(?s)exit status 1.*in fault") as caught:
        launch("failing_rank:fault", 2, "hang", device="cpu", timeout_s=6)
    assert caught.value.summary.endswith("Timeout (0:00:06)!")
    assert not any(is_running(items[0]) for items in caught.value.finished)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
@pytest.mark.parametrize(
    "kind, rank, said",
    [
        ("crash", 1, "ZeroDivisionError: of rank 1"),
        ("killed", 1, "killed by SIGKILL"),
        ("hang", 0, r"ALLREDUCE, NumelIn=4,.*timing out"),
        # A rank that needs no more elements than it has been sent goes on; the other waits for the
        # rest of its own.
        ("shape", 1, r"ALLREDUCE, NumelIn=1004,.*timing out"),
    ],
)
def test_a_rank_failing_on_a_gpu_ends_the_run_with_its_error(kind, rank, said):
    begin = time.monotonic()
    with pytest.raises(RankError) as caught:
        launch("failing_rank:fault", 2, kind, device="cuda", timeout_s=60, collective_timeout_s=6)
    assert time.monotonic() - begin < 45
    assert caught.value.rank == rank and re.search(said, caught.value.summary)
    assert not any(is_running(items[0]) for items in caught.value.finished)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
