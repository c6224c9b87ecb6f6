"""The sizes are the published ones, no name is ambiguous, and the grids ask only for what
exists.
"""

import dataclasses
import re

import pytest

from labkit import accounting, configs, notebooks
from labkit.configs import SIZES, RequestError, model_config

# d_model, d_ff, num_layers, num_heads: two small ones, and as printed in the two public lists. No
# two may be alike: records tell a size by the dimensions of the live model.
DIMENSIONS = {
    "nano": (128, 512, 2, 2),
    "micro": (192, 768, 3, 3),
    "small": (768, 3072, 12, 12),
    "medium": (1024, 4096, 24, 16),
    "large": (1280, 5120, 36, 20),
    "xl-2025": (1600, 6400, 48, 25),
    "2.7b": (2560, 10240, 32, 32),
    "8b": (4096, 11008, 34, 32),
    "10b": (4608, 12288, 50, 36),
}


def test_the_sizes_are_the_published_ones_and_two_small_ones():
    dimensions = {name: dataclasses.astuple(size)[1:5] for name, size in SIZES.items()}
    assert dimensions == DIMENSIONS
    for size in SIZES.values():
        assert size.d_head * size.num_heads == size.d_model and size.vocab_size in (10_000, 151_936)
        assert size.d_head % 2 == 0, "rotary positions pair the dimensions of a head"


def test_a_bare_xl_is_refused_with_both_names_and_their_true_sizes():
    with pytest.raises(RequestError) as caught:
        model_config("xl")
    for name in ("xl-2025", "xl-2026"):
        billions = accounting.num_parameters(model_config(name)) / 1e9
        assert re.search(rf"'{name}' \({billions:.3f} B", str(caught.value))


def test_a_key_that_the_full_grid_lacks_is_named():
    with pytest.raises(TypeError, match=r"09_x.* unexpected .* argument 'size'"):
        configs.read_grids("[09_x]\nfull.sizes = []\nsmoke.size = []")


def test_a_grid_is_narrowed_in_its_own_order():
    asked = {"d_heads": [128, 16], "lengths": 65536}
    assert notebooks.narrowing("05_attention", "full", asked) == {
        "d_heads": [16, 128],
        "lengths": [65536],  # of some series only
    }
    of_a_rivalry = {"d_heads": [72]}
    assert notebooks.narrowing("06_flash_attention", "full", of_a_rivalry) == of_a_rivalry


def test_the_profile_auto_is_left_to_the_device():
    assert configs.chosen_profile("auto", "full") == "full"
    with pytest.raises(RequestError, match="'half'; accepted: auto, smoke, full, key"):
        configs.chosen_profile("half", "full")
