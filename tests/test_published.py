"""The published tables are complete; `step_times` relabels no time wrongly and lets no disputed one
through.
"""

import dataclasses

import pandas as pd
import pytest

from labkit import published
from labkit.configs import SIZES

NOTES = {
    "",
    "prose_value",
    "batch_implied",
    "dtype_implied",
    "difference_of_two_timings",
    "published_script_also_runs_optimizer_step",
    "warmup_study",
}


@pytest.fixture(scope="module")
def raw() -> pd.DataFrame:
    return published.load("end_to_end").fillna({"note": ""})


def test_every_undisputed_row_is_read_with_its_own_labels(raw):
    """All but two quotes, sixteen profiled rows and one negative difference."""
    disputed = (
        (raw["statistic"] != "mean")
        | raw["context_length"].isna()
        | (raw["mean_ms"] < 0)
        | raw["note"].str.contains("companion_data|profiled_under_nsys")
    )
    assert disputed.sum() == 19
    undisputed = raw[~disputed].reset_index(drop=True)
    # Another one may dispute a row.
    assert set(";".join(undisputed["note"]).split(";")) == NOTES
    ours = published.step_times()
    assert ours["published_ms"].equals(undisputed["mean_ms"].rename("published_ms"))
    for row, printed in zip(ours.to_dict("records"), undisputed.to_dict("records"), strict=True):
        size = dataclasses.asdict(SIZES[row["size"]])
        for name in ("d_model", "d_ff", "num_layers", "num_heads"):
            assert size[name] == printed[name]
        assert printed["dtype"].startswith({"bf16": "bfloat16"}.get(row["precision"], "float32"))
        # A "forward and backward" whose script also steps the optimizer is a training step.
        also_steps = "published_script_also_runs_optimizer_step" in printed["note"]
        assert row["phase"] == ("train_step" if also_steps else printed["phase"])
        assert (row["status"] == "oom") == (row["published_ms"] != row["published_ms"])
