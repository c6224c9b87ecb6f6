"""Notebook 05's calls with a causal mask beside the same ones without."""

import pandas as pd

from labkit.report import forms
from labkit.report.attention import CASE, FUSED, NAMES
from labkit.report.tables import PHASE_NAMES, pivot


def masking(calls: pd.DataFrame, masked: pd.DataFrame) -> pd.DataFrame:
    """Returns the ratio of each pass's time without a mask to that with a causal one, as `forms.pairs` does."""
    rows = pd.concat([calls.assign(mask="none"), masked.assign(mask="causal")])
    return forms.pairs(rows, "mask", "none", keys=[*CASE, "phase"])


def table_mask(calls: pd.DataFrame, masked: pd.DataFrame) -> pd.DataFrame:
    """Returns the time without → with a causal mask (ratio) of every implementation."""
    rows = masking(calls, masked).assign(phase=lambda frame: frame["phase"].map(PHASE_NAMES) + " (ms): none → causal")
    return pivot(rows.replace({"impl": NAMES}), CASE, "phase", forms.arrow).rename(columns={"d_head": "d"})


def findings_mask(calls: pd.DataFrame, masked: pd.DataFrame) -> list[str]:
    """Says what a causal mask changes for fused kernels, and for the formula, which computes the hidden scores too."""
    rows = masking(calls, masked)
    what = ("the formula, which computes every score", "fused kernels, which leave tiles out")
    parts = [f"{what[fused]}, {forms.tally(group)}" for fused, group in rows.groupby(rows["impl"].isin(FUSED))]
    return [f"Time without a mask over that with a causal one: {'; '.join(parts)}."] if parts else []
