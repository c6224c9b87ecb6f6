"""The order in which programs of Hopper's backward pass add to a tile of ∂Q, by the kernel's own
functions, run in Python.
"""

import itertools
import types
from unittest.mock import MagicMock

import pytest

from labkit.kernels.flash_attention.hopper import one_pass

GL = {"constexpr": int, "minimum": min, "maximum": max, "static_range": range}
GL["where"] = lambda condition, x, y: x if condition else y
FIELDS = ("num_queries", "num_keys", "group", "BLOCK_Q", "run", "WAVES")
WALK = ("_query_tiles", "_work_tile", "_step", "_take_work_tile", "_writer", "decode_tile")


@pytest.mark.parametrize(
    "walk",
    [
        (1000, 1000, 1, 64, 3, True),
        (1500, 700, 1, 128, 2, True),
        (400, 1500, 1, 64, 20, True),
        (900, 1300, 2, 128, 3, False),
    ],
    ids=str,
)
def test_whoever_adds_to_a_tile_awaits_one_that_was_handed_out_before(walk):
    s = MagicMock(**dict(zip(FIELDS, walk, strict=True)), CAUSAL=True, num_heads_total=4, section=3)
    s.counters_ptr = -4  # so that the semaphores are numbered from 0
    key_tiles, query_tiles = -(-s.num_keys // 128), -(-s.num_queries // s.BLOCK_Q)
    s.num_work_tiles = 4 * key_tiles
    s.dq_accum_descs = [MagicMock(block_type=MagicMock(shape=(16, 256)))] * 2
    # By the tile of keys and the step of its loop: the tile, how it is reached, and after whom.
    steps = {}
    last = {}

    def put(kind):
        return lambda _, coordinates, part: last.update(tile=coordinates[0] // 32, kind=kind)

    def publish(count, address):
        steps[address // 2, count - 1] = last["tile"], last["kind"], last.pop("awaited", None)

    def await_more_than(step, address):
        last["awaited"] = address // 2, step
        return step + 1

    gl = types.SimpleNamespace(**GL, atomic_add=lambda *_: next(taken))
    names = {**vars(one_pass), "gl": gl, "mbarrier": MagicMock(), "tma": MagicMock()}
    names |= {"_publish": publish, "_await_more_than": await_more_than}
    names |= {"async_store": put("store"), "async_add": put("add")}
    names |= {name: names[name].value for name in ("BLOCK_K", "WRITERS", "FIRST_SEMAPHORE")}
    names |= {name: types.FunctionType(names[name].fn.__code__, names) for name in WALK}
    taken = itertools.count()
    handed_out = [names["_take_work_tile"](s) for _ in range(s.num_work_tiles + 1)]
    s.work.await_number = handed_out.__getitem__
    for writer in range(2):
        names["_writer"](s, writer)
    by_tile = {}
    for (key_tile, _), (tile, kind, awaited) in steps.items():
        assert (kind == "store") == (awaited is None)
        if awaited:
            assert steps[awaited][0] == tile
            assert handed_out.index(awaited[0]) < handed_out.index(key_tile)
        by_tile.setdefault(tile, {})[key_tile] = awaited and awaited[0]
    for tile, before in by_tile.items():
        first = tile // query_tiles // s.group * key_tiles
        last_key = (tile % query_tiles + 1) * s.BLOCK_Q - 1 + s.num_keys - s.num_queries
        assert sorted(before) == [first + n for n in range(key_tiles) if n * 128 <= last_key]
        # One order: no two await the same.
        assert len(set(before.values())) == len(before)
