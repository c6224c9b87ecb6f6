"""The step of the 8.1 B model: what its blocks keep, that every way trains alike, its record."""

import pytest
import torch
from chapters import CPU

from labkit.configs import model_config
from labkit.experiments.step import Step
from labkit.experiments.step_8b import board_rank, kept, measured
from labkit.experiments.sweep import Case
from labkit.parallel.launch import launch

CASE = {"size": "nano", "context": 64, "precision": "fp32", "world_size": 2}
WAYS = ("off the shelf", "and our AdamW, in backward")


@pytest.mark.parametrize(
    ("room_gb", "num_attention", "num_products"),
    [(60, 0, 0), (70, 7, 0), (82, 33, 1), (147, 7, 27), (200, 0, 34)],
)
def test_blocks_keep_what_fits_the_last_ones_most(room_gb, num_attention, num_products):
    levels = kept(model_config("8b"), 32_768, 2, room_gb * 1e9)
    expected = ["attention"] * num_attention + ["products"] * num_products
    assert levels == ["input"] * (34 - len(expected)) + expected


def reference() -> list[float]:
    """Losses of one process that trains on the sequences of both ranks."""
    step = Step(CPU, {**CASE, "batch": 2, "attention": "sdpa"})
    step.optimizer = torch.optim.AdamW(step.model.parameters(), lr=1e-5)
    ranks = [torch.Generator().manual_seed(rank) for rank in range(2)]
    vocab_size = step.model.config.vocab_size
    draws = [torch.randint(vocab_size, (2, 1, 64), generator=rank) for rank in ranks]
    step.tokens, step.targets = torch.cat(draws, 1)
    return [step.train_step().item() for _ in range(10)]


@pytest.mark.slow
def test_every_way_trains_as_one_process_does():
    # Room for the products of one of two blocks.
    arguments = (WAYS, CASE, "aot_eager_decomp_partition", 36.8e6)
    rank = dict(launch(board_rank, 2, *arguments, device="cpu")[0])
    assert rank[WAYS[1]]["levels"] == ["attention", "products"]
    expected = pytest.approx(reference(), rel=1e-5)
    assert all(rank[way]["losses"] == expected for way in WAYS)


def test_other_losses_have_no_time():
    seen = {"losses": [9.0, 8.0], "reference": [9.0, 8.01], "samples_ms": [2.0, 4.0]}
    seen |= {"watts": None, "peak_bytes": 0, "levels": ["input"] * 2}
    case = Case("8b", CASE, WAYS, 60.0)
    result = measured(case, [seen, seen | {"samples_ms": [3.0, 3.0]}])
    assert result.samples["step_ms"] == [3.0, 4.0] and result.metrics["sustained_ms"] == 3.5
    assert result.metrics["tokens_per_s"] == pytest.approx(128 / 3.5e-3)
    with pytest.raises(ValueError, match="losses"):
        measured(case, [seen | {"losses": [9.0, 8.2]}])
