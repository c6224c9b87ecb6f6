"""What launching kernels costs a training step: notebook 01's steps as they are called, and as one CUDA graph each."""

import pandas as pd

from labkit.report import forms
from labkit.report.findings import listing, number, percent, times
from labkit.report.forms import name, shown
from labkit.report.tables import cell, in_order, ok_rows, pivot, select

CASE = ["size", "context", "precision"]
WAYS = {
    "eager": ("eager", "none", "train_step"),
    "compiled": ("eager", "regional", "train_step"),
    "graph": ("eager", "none", "graph_step"),
    "compiled, graph": ("eager", "regional", "graph_step"),
    "fused, compiled": ("fused", "regional", "train_step"),
    (FASTEST := "fused, compiled, graph"): ("fused", "regional", "graph_step"),
}
"""Ways to run a training step: the model's implementation, compile mode and phase."""

LAUNCHES = "launches, of eager"
DIFFERENCES = {"loss_difference": "a loss", "update_difference": "what a few steps change in the parameters"}


def by_way(rows: pd.DataFrame) -> pd.DataFrame:
    """Returns training steps by `way`, a key of WAYS."""
    names = {key: way for way, key in WAYS.items()}
    impl = rows["impl"].fillna("eager") if "impl" in rows else "eager"
    keys = zip(rows.assign(impl=impl)["impl"], rows["compile"], rows["phase"], strict=True)
    return rows.assign(way=[names.get(key) for key in keys])


def table(rows: pd.DataFrame) -> pd.DataFrame:
    """Returns the training step of each size in bf16, called and as one graph, and what of the eager call is launches.

    That share is 1 − graph / eager.
    """
    ways = by_way(select(shown(rows), precision="bf16"))
    table = pivot(ways.dropna(subset=["way"]), ["size", "context"], "way")
    table = table.reindex(columns=["size", "context", *WAYS], fill_value="–")
    share = shares(rows).set_index(["size", "context", "precision"])["share"]
    cases = zip(table["size"], table["context"], strict=True)
    return table.assign(**{LAUNCHES: [percent(share.get((*case, "bf16"))) for case in cases]})


def shares(rows: pd.DataFrame) -> pd.DataFrame:
    """Returns pairs of the eager call and its graph; `share` is that of launches, 1 − graph / eager."""
    ways = select(by_way(rows), way=["eager", "graph"])
    return forms.pairs(ways, "way", "eager", keys=CASE).assign(share=lambda pair: 1 - 1 / pair["ratio"])


def findings(rows: pd.DataFrame) -> list[str]:
    """Says what one graph saves of an eager step, what all means together give, and that the graph trains alike."""
    graphs, sentences = shares(rows), []
    if len(graphs):
        at_512 = in_order(select(shown(graphs), precision="bf16"), ["size"])
        parts = [f"{percent(row['share'])} of {row['size']}" for row in at_512.to_dict("records")]
        sentences.append(
            f"The same kernels in one CUDA graph, launched at once, are {forms.summary(graphs, name)} against the "
            "eager call, call time" + (f": launches take {listing(parts)} in bf16 autocast." if parts else ".")
        )
    ways = by_way(rows)
    best = in_order(forms.pairs(select(ways, way=["eager", FASTEST]), "way", "eager", keys=CASE), ["size"])
    if parts := [
        f"{name(row)} {number(row['median_ms'])} ms, {times(row['ratio'])}" for row in best.to_dict("records")
    ]:
        text = f"Fused kernels, compiled blocks and one graph against the eager call, call time: {'; '.join(parts)}."
        if "sustained_ms" in ways:
            lasting = ok_rows(ways, way=FASTEST).dropna(subset=["sustained_ms"]).to_dict("records")
            texts = [f"{name(row)} {cell(row, 'sustained_ms')} ms" for row in lasting]
            text += f" Back to back (sustained time): {'; '.join(texts)}." if texts else ""
        sentences.append(text)
    if len(replayed := ok_rows(rows, phase="graph_step")):
        off = [f"{percent(replayed[name].max())} in {what}" for name, what in DIFFERENCES.items()]
        sentences.append(f"Each graph trains as its called step does: the largest difference is {listing(off)}.")
    return sentences
