"""Communication's closed forms against brute force, the issue's check values and each other."""

import math

import pytest

from labkit.communication import (
    OPERATIONS,
    STEP_TRANSFERS,
    best_bucket_bytes,
    bucket_overhead_s,
    bus_factor,
    ffn_cost,
    fit_line,
    max_data_ranks,
    max_grid_ranks,
    max_tensor_ranks,
    min_grid_tokens,
    pipeline_bubble,
    ring_seconds,
    zero_bytes,
)

W, C, B, D, F = 1.8e11, 4.6e14, 2**20, 4096, 14336


def ring_steps(operation: str, n: int) -> list[float]:
    """What one rank sends in each step of the ring algorithm, as a share of S, by walking through
    the steps.
    """
    shard = 1 / n
    if operation == "broadcast":
        return []
    sent = [shard for _ in range(n - 1)]
    return sent + sent if operation == "all_reduce" else sent


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("n", [2, 4, 8])
def test_ring_time_is_the_sum_of_its_steps(operation, n):
    steps = ring_steps(operation, n)
    assert bus_factor(operation, n) == pytest.approx(sum(steps) if steps else 1)
    expected = sum(step * 1e9 / W + 1e-5 for step in steps) if steps else 1e9 / W + (n - 1) * 1e-5
    assert ring_seconds(operation, 1e9, n, W, 1e-5) == pytest.approx(expected)
    assert ring_seconds(operation, 1e9, 1, W, 1e-5) == 0


def test_fit_recovers_a_line_and_names_the_point_off_it():
    sizes = [1e3, 1e6, 1e7, 1e8, 1e9]
    line = fit_line(sizes, [2e-5 + size / 3e11 for size in sizes])
    assert line.latency_s == pytest.approx(2e-5) and line.bandwidth == pytest.approx(3e11)
    assert max(map(abs, line.residuals)) < 1e-9
    off = [2e-5 + size / 3e11 for size in sizes]
    off[2] *= 1.5
    residuals = fit_line(sizes, off).residuals
    assert max(range(5), key=lambda i: abs(residuals[i])) == 2
    with pytest.raises(ValueError, match="1 sizes"):
        fit_line([1e3, 1e3], [1, 2])


@pytest.mark.parametrize("sharded", [False, True], ids=["data_parallel", "fully_sharded"])
def test_data_limit_is_where_the_layer_stops_hiding_its_communication(sharded):
    limit = max_data_ranks(B, W, C)
    assert limit == pytest.approx(1 + B * W / C)
    for n, hidden in ((math.floor(limit), True), (math.ceil(limit), False)):
        cost = ffn_cost(B, D, F, data=n, sharded=sharded)
        assert (cost.backward_bytes / W <= cost.backward_flops / C) is hidden
        assert not sharded or (cost.forward_bytes / W <= cost.forward_flops / C) is hidden


def test_tensor_limit_is_where_the_layer_stops_hiding_its_communication():
    forward, backward = max_tensor_ranks(F, W, C), max_tensor_ranks(F, W, C, backward=True)
    assert (forward, backward) == pytest.approx((1 + 1.5 * F * W / C, 1 + 3 * F * W / C))
    for n in range(2, 40):
        cost = ffn_cost(B, D, F, tensor=n)
        assert (cost.forward_bytes / W <= cost.forward_flops / C) is (n <= forward)
        assert (cost.backward_bytes / W <= cost.backward_flops / C) is (n <= backward)


def test_no_grid_of_as_many_ranks_sends_less_than_the_largest():
    data, tensor = max_grid_ranks(B, F, W, C, overlapped=True)
    assert data * tensor == pytest.approx((1 + B * W / C) * (1 + 1.5 * F * W / C))
    data, tensor = max_grid_ranks(B, F, W, C, overlapped=False)
    cost = ffn_cost(B, D, F, data=data, tensor=tensor, sharded=True)
    assert cost.forward_bytes / W == pytest.approx(cost.forward_flops / C)
    for factor in (0.8, 1.25):
        # Any other grid of as many ranks sends more.
        other = ffn_cost(B, D, F, data=data * factor, tensor=tensor / factor, sharded=True)
        assert other.forward_bytes > cost.forward_bytes
    large = max_grid_ranks(1e9, 10**7, W, C, overlapped=False)
    assert math.prod(large) == pytest.approx(3 / 8 * 1e9 * 1e7 * (W / C) ** 2, rel=1e-2)


def test_accounting_exercise_of_2025():
    parameters = 126 * 2 * 16384 * 53248
    assert parameters == pytest.approx(219.85e9, rel=1e-4)
    held = sum(zero_bytes(parameters, 1, 0, compute_bytes=0).values())
    assert held == pytest.approx(3.518e12, rel=1e-3) and math.ceil(held / 80e9) == 44
    assert 126 * (16384 + 53248) * 2 == pytest.approx(17.55e6, rel=1e-3)
    grid = dict(data=16, tensor=4, data_bandwidth=2 * W, tensor_bandwidth=W)
    tokens = min_grid_tokens(53248, C, **grid, overlapped=True, exact=False)
    without = min_grid_tokens(53248, C, **grid, overlapped=False, exact=False)
    assert (int(tokens), round(tokens / 64)) == (20444, 319)
    assert (math.ceil(without), round(without / 64)) == (25302, 395)
    # A ring leaves out the share a rank has already; the exercise does not.
    exact = min_grid_tokens(53248, C, **grid, overlapped=True)
    assert exact == pytest.approx(tokens * 15 / 16)
    slow = grid | {"tensor_bandwidth": W / 100}
    assert min_grid_tokens(53248, C, **slow, overlapped=False) == math.inf


def test_best_bucket_beats_its_neighbours():
    s, w, o = 13.6e9, 3e11, 3e-5
    best = best_bucket_bytes(s, w, o)
    assert best == pytest.approx(math.sqrt(s * w * o))
    overheads = [bucket_overhead_s(s, s / (best * factor), w, o) for factor in (0.9, 1, 1.1)]
    assert min(overheads) == overheads[1] == pytest.approx(2 * math.sqrt(s * o / w))


def test_pipeline_bubble_counts_idle_slots():
    for stages, microbatches in ((4, 8), (2, 1), (1, 3)):
        slots = stages + microbatches - 1
        assert pipeline_bubble(stages, microbatches) == pytest.approx(1 - microbatches / slots)
    assert pipeline_bubble(4, 8, interleave=2) < pipeline_bubble(4, 8)


def test_memory_by_stage_and_traffic_by_scheme():
    held = [sum(zero_bytes(1e9, 4, stage).values()) for stage in range(4)]
    assert held == [18e9, (2 + 4 + 12 / 4) * 1e9, (2 + 16 / 4) * 1e9, 18e9 / 4]
    ours = zero_bytes(1e9, 4, 1, compute_bytes=0)
    assert ours == {"master": 4e9, "gradients": 4e9, "moments": 2e9, "compute": 0}
    assert STEP_TRANSFERS["sharded_optimizer"] / STEP_TRANSFERS["zero_1"] == 1.5
    assert STEP_TRANSFERS["data_parallel"] * 8e9 * 3 / 4 / W == pytest.approx(
        ring_seconds("all_reduce", 8e9, 4, W)
    )


@pytest.mark.parametrize(
    "call",
    [lambda: bus_factor("all_ruduce", 2), lambda: zero_bytes(1e9, 2, 4)],
    ids=["operation", "stage"],
)
def test_unknown_names_are_refused_with_the_accepted_ones(call):
    with pytest.raises(ValueError, match="accepted: "):
        call()


@pytest.mark.parametrize("seconds", [(0.0, 1.0), (1.0, -1.0), (math.nan, 1.0), (1.0, math.nan)])
def test_no_line_is_fitted_to_a_time_that_is_none(seconds):
    with pytest.raises(ValueError, match="seconds; accepted: above 0"):
        fit_line((1, 2), seconds)
