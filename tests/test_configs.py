"""The sizes are the published ones, no name is ambiguous, and the grids ask only for what
exists.
"""

import re
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

from labkit import accounting, configs, experiments, notebooks
from labkit.configs import BENCHMARKING, PRECISIONS, SIZE_ALIASES, SIZES, model_config

# edition, d_model, d_ff, num_layers, num_heads, as printed in the two public lists
PUBLISHED_SIZES = {
    "small": ("2025 and 2026", 768, 3072, 12, 12),
    "medium": ("2025 and 2026", 1024, 4096, 24, 16),
    "large": ("2025 and 2026", 1280, 5120, 36, 20),
    "xl-2025": ("2025", 1600, 6400, 48, 25),
    "2.7b": ("2025; xl of 2026", 2560, 10240, 32, 32),
    "10b": ("2026", 4608, 12288, 50, 36),
}
SMOKE_SIZES = {"nano": (128, 512, 2, 2), "micro": (192, 768, 3, 3)}


@pytest.mark.parametrize("name", PUBLISHED_SIZES)
def test_a_published_size_has_its_edition_and_dimensions(name):
    size = SIZES[name]
    assert (
        size.edition,
        size.d_model,
        size.d_ff,
        size.num_layers,
        size.num_heads,
    ) == PUBLISHED_SIZES[name]
    assert size.vocab_size == 10_000


def test_there_are_no_sizes_beyond_the_published_and_the_smoke_ones():
    assert set(SIZES) == {*PUBLISHED_SIZES, *SMOKE_SIZES}
    for name, dimensions in SMOKE_SIZES.items():
        size = SIZES[name]
        assert (size.d_model, size.d_ff, size.num_layers, size.num_heads) == dimensions
        assert "smoke" in size.edition
    # Records tell a size by the dimensions of the live model, so no two may share them.
    assert len({(s.d_model, s.d_ff, s.num_layers, s.num_heads) for s in SIZES.values()}) == len(
        SIZES
    )


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_every_size_is_a_model_that_can_be_built_and_not_be_changed(size):
    assert SIZES[size.name] is size
    assert size.d_head * size.num_heads == size.d_model
    assert size.d_head % 2 == 0, "rotary positions pair the dimensions of a head"
    with pytest.raises(FrozenInstanceError):
        size.d_model = 1


def test_model_config_takes_names_and_aliases():
    for name, size in SIZES.items():
        assert model_config(name) is size
    assert model_config("xl-2026") is SIZES["2.7b"]
    assert model_config("2.7b-2025") is SIZES["2.7b"]
    assert model_config("10b-2026") is SIZES["10b"]
    assert not SIZE_ALIASES.keys() & SIZES.keys(), "an alias would hide a size"


def test_a_bare_xl_is_refused_with_both_names_and_their_true_sizes():
    with pytest.raises(ValueError) as caught:
        model_config("xl")
    message = str(caught.value)
    for name in ("xl-2025", "xl-2026"):
        billions = accounting.num_parameters(model_config(name)) / 1e9
        assert re.search(rf"'{name}' \({billions:.3f} B", message), message


@pytest.mark.parametrize("name", ["XL-2025", "gpt2", "", "small "])
def test_an_unknown_size_is_refused_with_every_accepted_name(name):
    with pytest.raises(ValueError) as caught:
        model_config(name)
    message = str(caught.value)
    assert repr(name) in message
    accepted = message.split("accepted: ")[1].split(", ")
    assert sorted(accepted) == sorted([*SIZES, *SIZE_ALIASES])


def test_the_profiles_are_those_of_every_notebook():
    assert configs.PROFILES == ("smoke", "full", "key")
    assert list(configs.GRIDS) == notebooks.names()
    assert all(tuple(grids) == configs.PROFILES for grids in configs.GRIDS.values())


@pytest.mark.parametrize("profile", BENCHMARKING)
def test_a_grid_names_what_exists_repeats_nothing_and_bounds_its_time(profile):
    grid = BENCHMARKING[profile]
    # Canonical names only: an alias would make one model two cases.
    assert set(grid.sizes) <= set(SIZES)
    assert set(grid.precisions) <= set(PRECISIONS)
    assert set(grid.compile_sizes) <= set(grid.sizes)
    assert set(grid.compile_precisions) <= set(grid.precisions)
    assert set(grid.whole_compile_sizes) <= set(grid.compile_sizes)
    assert set(grid.compile_contexts) <= set(grid.contexts), (
        "a compiled step needs its eager one beside it"
    )
    assert set(grid.warmup_contexts) <= set(grid.contexts)
    for names in (grid.sizes, grid.precisions, grid.compile_sizes, grid.compile_precisions):
        assert names and len(set(names)) == len(names)
    assert len(set(grid.whole_compile_sizes)) == len(grid.whole_compile_sizes)
    for contexts in (grid.contexts, grid.compile_contexts, grid.warmup_contexts):
        assert list(contexts) == sorted(set(contexts)) and contexts[0] > 0
    assert 0 < grid.time_limit_s < grid.case_timeout_s


def test_the_full_profile_covers_every_published_size_and_precision():
    assert set(BENCHMARKING["full"].sizes) == set(PUBLISHED_SIZES)
    assert set(BENCHMARKING["full"].precisions) == set(PRECISIONS)


def test_compile_and_warmup_phases_are_phases():
    assert {*configs.COMPILE_PHASES, *configs.WARMUP_PHASES} - {"compile"} <= set(configs.PHASES)
    assert "compile" not in configs.WARMUP_PHASES and configs.WARMUP_COUNTS == (0, 1, 2, 5)


def shape_of(value):
    """Returns the types of a grid's value, those of the items of a tuple and of a table each
    once.
    """
    items = value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else ()
    return type(value), *sorted({type(item).__name__ for item in items})


@pytest.mark.parametrize("notebook", configs.GRIDS)
def test_both_profiles_have_the_same_keys_and_types(notebook):
    full, smoke = (vars(configs.GRIDS[notebook][profile]) for profile in ("full", "smoke"))
    assert list(full) == list(smoke)
    for key, value in full.items():
        assert type(smoke[key]) is type(value), key
        if value and smoke[key]:
            assert shape_of(smoke[key]) == shape_of(value), key


@pytest.mark.parametrize("notebook", configs.GRIDS)
def test_every_key_of_a_grid_is_used(notebook):
    path = Path(experiments.__file__).parent / f"{notebook.split('_', 1)[1]}.py"
    used = {*re.findall(r"\bgrid\.(\w+)", path.read_text(encoding="utf-8")), *configs.NARROWED}
    assert set(vars(configs.GRIDS[notebook]["full"])) <= used


def test_grids_cannot_be_changed_and_hold_tuples_integer_keys_and_shapes():
    grid = configs.FLASH_ATTENTION["full"]
    with pytest.raises(FrozenInstanceError):
        grid.lengths = ()
    assert grid.by_shape["compiled"][128] == (4096, 16384)
    assert configs.LEADERBOARD in grid.rivalries and grid.tiles_shape == configs.LEADERBOARD
    assert configs.MEMORY["smoke"].block == configs.BlockShape(64, 256, 4, 128, 2)
    assert configs.MIXED_PRECISION["smoke"].task.size == "nano"


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        (
            "full.sizes = []\nsmoke.size = []",
            ValueError,
            "09_x.smoke: unknown size; accepted: sizes",
        ),
        (
            "full.sizes = []",
            ValueError,
            "09_x has the tables full; required: smoke, full; accepted: key",
        ),
        (
            "full.sizes = []\nsmoke = {}\nfast = {}",
            ValueError,
            "tables full, smoke, fast; required: smoke, full",
        ),
        (
            "full.task.steps = 1\nsmoke = {}",
            TypeError,
            "Task.* unexpected keyword argument 'steps'",
        ),
    ],
)
def test_a_mistake_in_the_file_of_grids_is_named(text, error, message):
    with pytest.raises(error, match=message):
        configs.read_grids(f"[09_x]\n{text}")


def test_a_grid_is_narrowed_in_its_own_order():
    grids = configs.GRIDS["05_attention"]
    assert configs.narrowed(grids, "full", "d_heads", [128, 16]) == [16, 128]
    assert configs.narrowed(grids, "full", "d_heads") == [16, 32, 64, 128]
    assert 65536 in configs.narrowed(grids, "full", "lengths"), "the longer ones of some series too"
    assert configs.narrowed(BENCHMARKING, "full", "sizes", ["xl-2026"]) == ["2.7b"]


@pytest.mark.parametrize(
    ("profile", "sizes", "message"),
    [
        (
            "smoke",
            ["xl-2025"],
            "'xl-2025' is not in profile 'smoke'; accepted: nano, micro; set profile = \"full\"",
        ),
        ("full", ["nano"], f'accepted: {", ".join(PUBLISHED_SIZES)}; set profile = "smoke"'),
    ],
)
def test_a_size_of_the_other_profile_says_what_to_set(profile, sizes, message):
    with pytest.raises(configs.RequestError, match=re.escape(message) + "$"):
        configs.narrowed(BENCHMARKING, profile, "sizes", sizes)
    with pytest.raises(
        configs.RequestError, match=r"context 100 is not in profile .* accepted: [0-9, ]*$"
    ):
        configs.narrowed(BENCHMARKING, profile, "contexts", [100])


def test_the_profile_auto_is_left_to_the_device():
    assert [configs.chosen_profile(name, "full") for name in ("auto", "smoke", "full")] == [
        "full",
        "smoke",
        "full",
    ]
    with pytest.raises(
        configs.RequestError, match="unknown profile 'half'; accepted: auto, smoke, full, key"
    ):
        configs.chosen_profile("half", "full")
