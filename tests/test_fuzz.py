"""Files of records that are damaged value by value (another type, NaN, a huge number, an entry that
is missing or foreign): each is an error that names file and line, or is read to records that can be
used.
"""

import copy
import json
import random
from dataclasses import asdict

from test_records import make_record

from labkit.records import RecordError, RecordStore, newest, to_frame

HOSTILE = [None, True, -1, 0, 2**31, 2**63 - 1, -(2**63), 0.5, 1e300, "", "banana", "59", "é\n"]
ONLY_IN_PYTHON = [[], {}, 2**63, 10**400, float("nan"), -float("inf"), [[]] * 300, "\ud800"]


def damage_value(value, generator: random.Random) -> None:
    """Replaces, renames or takes out one entry somewhere in a value made of dicts and lists."""
    inner = value
    while isinstance(inner, dict | list) and inner and (inner is value or generator.random() < 0.8):
        holder = inner
        key = generator.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
        inner = holder[key]
    kind = generator.randrange(6)
    if kind == 0:
        del holder[key]
    elif kind == 1 and isinstance(holder, dict):
        holder[generator.choice(["colour", "", "é" * 300])] = holder.pop(key)
    elif kind == 2:
        holder[key] = str(inner)
    else:
        holder[key] = copy.deepcopy(generator.choice(HOSTILE + ONLY_IN_PYTHON))


def test_damaged_records(tmp_path):
    generator = random.Random(0)
    path, copied = tmp_path / "01_benchmarking.jsonl", tmp_path / "copy.jsonl"
    line = json.dumps(asdict(make_record())).encode() + b"\n"
    num_read, messages = 0, set()
    for _ in range(150):
        copied.unlink(missing_ok=True)
        value = asdict(make_record())
        damage_value(value, generator)
        path.write_bytes(line + json.dumps(value).encode() + b"\n")
        try:
            loaded = newest(RecordStore(path).load())
        except RecordError as refused:
            messages.add(str(refused))
            assert f"{path}, line " in str(refused) and len(str(refused)) < len(str(path)) + 500
            continue
        num_read += 1
        to_frame(loaded).to_markdown()
        for record in loaded:
            RecordStore(copied).append(record)
        assert not loaded or newest(RecordStore(copied).load())[-1] in loaded
    # The damage was neither harmless nor all found by the first check.
    assert num_read and len(messages) >= 15
