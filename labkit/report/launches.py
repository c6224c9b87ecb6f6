"""What launching kernels costs a training step: notebook 01's steps as they are called, and as one CUDA graph each."""

from collections import Counter

import pandas as pd

from labkit.report import forms, verdicts
from labkit.report.text import listing, number, percent, scientific, span
from labkit.report.forms import case_name, name, shown
from labkit.report.tables import ok_rows, pivot, select, usable

CASE = ["size", "context", "precision"]
WAYS = {
    "eager": ("eager", "none", "train_step"),
    "compiled": ("eager", "regional", "train_step"),
    "graph": ("eager", "none", "graph_step"),
    "compiled, graph": ("eager", "regional", "graph_step"),
    (FASTEST := "fused, compiled, graph"): ("fused", "regional", "graph_step"),
}
"""Ways to run a training step: the model's implementation, compile mode and phase."""

ISSUED, LAUNCHES = "eager, issued after", "launches, of eager"
DIFFERENCES = {"loss_difference": "the loss", "update_difference": "the change of the parameters over a few steps"}


def by_way(rows: pd.DataFrame) -> pd.DataFrame:
    """Returns training steps by `way`, a key of WAYS."""
    names = {key: way for way, key in WAYS.items()}
    impl = rows["impl"].fillna("eager") if "impl" in rows else "eager"
    keys = zip(rows.assign(impl=impl)["impl"], rows["compile"], rows["phase"], strict=True)
    return rows.assign(way=[names.get(key) for key in keys])


def _shown_ways(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns the ways in bf16 at the shown context, a size's all of the session that measured most of them."""
    ways = by_way(select(shown(frame), precision="bf16")).dropna(subset=["way"])
    rows = ways.to_dict("records")
    votes = Counter((row["size"], session) for row in rows for session in verdicts.sessions(row))
    best = dict(sorted(votes, key=lambda vote: (votes[vote], vote[1])))
    for row in rows:
        if metrics := verdicts.sessions(row).get(session := best[row["size"]]):
            row |= metrics | {"session": session, "sessions": {session: metrics}}
    return pd.DataFrame(rows, columns=ways.columns)


def table(rows: pd.DataFrame) -> pd.DataFrame:
    """Returns the training step of each size in bf16 at the shown context, called and as one graph.

    Also after which share of the eager call it is issued, and what of the call is launches: 1 − graph / eager.
    """
    ways = _shown_ways(rows)
    table = pivot(ways, ["size"], "way").reindex(columns=["size", *WAYS], fill_value="–")
    eager = ok_rows(ways, way="eager").reindex(columns=["size", "launch_median_ms", "host_median_ms"])
    issued = (eager["launch_median_ms"] / eager["host_median_ms"]).set_axis(eager["size"])
    launched = shares(ways).set_index("size")["share"]
    for title, share in ((ISSUED, issued), (LAUNCHES, launched)):
        table[title] = [percent(share.get(size)) for size in table["size"]]
    return table


def shares(rows: pd.DataFrame) -> pd.DataFrame:
    """Returns pairs of the eager call and its graph; `share` is that of launches, 1 − graph / eager."""
    ways = select(by_way(rows), way=["eager", "graph"])
    return forms.pairs(ways, "way", "eager", keys=CASE).assign(share=lambda pair: 1 - 1 / pair["ratio"])


def findings(rows: pd.DataFrame) -> list[str]:
    """Says what one graph saves of an eager step, what all means together give, and that the graph trains alike."""
    graphs, sentences = shares(rows), []
    if len(graphs):
        part = shares(_shown_ways(rows))
        gain = forms.summary(graphs, name)
        sentences.append(f"The same kernels in one CUDA graph are {gain} against the eager call, call time.")
        if len(part):
            sentences[0] += f" In bf16 at {part['context'].iloc[0]} launches take {span(part['share'], percent)}."
    ways = by_way(rows)
    best = forms.pairs(select(ways, way=["eager", FASTEST]), "way", "eager", keys=CASE)
    if len(best):
        gain = forms.summary(best, case_name)
        sentences.append(f"Fused kernels, compiled blocks and one graph are {gain} against the same call.")
        lasting = usable(select(ways, way=FASTEST), "sustained_ms").to_dict("records")
        every = ((case_name(row), span(verdicts.by_session(row, "sustained_ms").values(), number)) for row in lasting)
        if parts := [f"{case} {times} ms" for case, times in every]:
            sentences[-1] += f" Back to back: {listing(parts)} (sustained time, every session)."
    if len(replayed := ok_rows(rows, phase="graph_step")):
        largest = {what: replayed[name].max() for name, what in DIFFERENCES.items()}
        off = [f"{f'at most {scientific(value)}' if value else 'none'} in {what}" for what, value in largest.items()]
        sentences.append(f"A graph trains as its called step does; relative differences: {listing(off)}.")
    return sentences
