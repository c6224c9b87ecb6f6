"""Chapter 05: its figures, and the queries that are its alone."""

import pandas as pd
from matplotlib.figure import Figure

from labkit import accounting, published
from labkit.report import facts, figures, verdicts
from labkit.report.frame import by_way, in_order, ok_rows, select, usable

FUSED = ["sdpa_flash", "sdpa_cudnn", "sdpa_efficient"]
IMPLS = {
    "eager": "eager",
    "compiled": "compiled, 3-D",
    "compiled_heads": "compiled, 4-D",
    "sdpa_math": "SDPA math",
    "sdpa_flash": "SDPA flash",
    "sdpa_cudnn": "SDPA cuDNN",
    "sdpa_efficient": "SDPA efficient",
}
"""Implementations as the chapter calls them."""

CASE = ["impl", "precision", "d_head", "length", "phase"]
SHAPE = ["batch", "length", "d_head", "precision"]
LONG = {"d_head": 64, "length": 16384}
ELEMENT_BYTES = {"fp32": 4, "tf32": 4, "bf16": 2}

HOST_SHARE = 0.5
"""A pass whose kernels the host issues in a smaller share of its call does not wait for the host.
"""

COMPILED_PASSES = {"forward": 4, "backward": 7}
"""Passes over the scores that a compiled formula needs at least: its products' and one fused
kernel's between them.

Forward: written by the product, read and written by the softmax, read by the product. Backward: the
probabilities read for v; their gradient written; both read and one written by the softmax's
backward; one read each for q and k.
"""

PUBLISHED = {
    "none": ("eager", "fp32"),
    "compile": ("compiled", "fp32"),
    "compile_tf32": ("compiled", "tf32"),
}
"""Implementation and precision of each published variant."""


def timed(calls: pd.DataFrame) -> pd.DataFrame:
    """Returns the passes but those whose call time is not the device's: of less than 1 ms, or
    waiting for the host.
    """
    rows = usable(calls, "median_ms")
    waits = [verdicts.issued(row) >= HOST_SHARE for row in rows.to_dict("records")]
    is_short = rows["median_ms"] < facts.LEAST_MS
    return calls.drop(rows.index[is_short | pd.Series(waits, rows.index, bool)])


def times_table(calls: pd.DataFrame) -> pd.DataFrame:
    """Returns the time of every implementation at the long length."""
    ways = {
        "bf16 forward": {"precision": "bf16", "phase": "forward"},
        "bf16 backward": {"precision": "bf16", "phase": "backward"},
        "fp32 forward": {"precision": "fp32", "phase": "forward"},
    }
    return by_way(select(calls, **LONG), "impl", ways).replace({"impl": IMPLS})


def predicted(calls: pd.DataFrame, ceilings: pd.DataFrame) -> pd.DataFrame:
    """Returns the timed passes with the time that their passes over the scores and their products
    should take.

    A kernel between the products takes its passes at the copy rate; a product its one pass, or its
    FLOPs at the matrix product's rate, whichever is longer. A fused kernel makes no pass; its
    backward computes the scores again.

    Columns added: passes, elementwise_ms, products_ms, predicted_ms.
    """
    rows = select(timed(calls), impl=["eager", "compiled", *FUSED])
    rows = in_order(usable(rows, *CASE, "batch"), CASE)
    copy = usable(ceilings, "achieved_gb_per_s")["achieved_gb_per_s"].max()
    rates = usable(ceilings, "precision", "achieved_tflops").set_index("precision")
    rate = rows["precision"].map(rates["achieved_tflops"])
    kind = calls.attrs.get("device_kind", "cuda")
    times = []
    for row in rows.assign(rate=rate).to_dict("records"):
        phase = row["phase"]
        num_products = 2 if phase == "forward" else 4
        scores = row["batch"] * row["length"] ** 2
        pass_ms = scores * ELEMENT_BYTES[row["precision"]] / copy / 1e6
        product_ms = 2 * scores * row["d_head"] / row["rate"] / 1e9
        if row["impl"] in FUSED:
            passes = 0
            num_products += phase == "backward"
        else:
            eager = accounting.attention_score_passes(phase, device_kind=kind)
            passes = eager if row["impl"] == "eager" else COMPILED_PASSES[phase]
            product_ms = max(product_ms, pass_ms)
        elementwise = pass_ms * max(passes - num_products, 0)
        products = num_products * product_ms
        times.append((passes, elementwise, products, elementwise + products))
    columns = ["passes", "elementwise_ms", "products_ms", "predicted_ms"]
    return rows.join(pd.DataFrame(times, rows.index, columns)).dropna(subset="predicted_ms")


def passes_figure(predictions: pd.DataFrame) -> Figure | None:
    """Draws the predicted time of a bf16 pass at the long length, and as diamonds the measured."""
    rows = select(predictions, precision="bf16", **LONG).replace({"impl": IMPLS})
    rows = rows.rename(columns={"products_ms": "matmul_ms"})
    if rows.empty:
        return None
    figure = figures.class_bars(rows, "impl", "_ms", "call time (ms)", panel="phase")
    for axis in figure.axes:
        of_phase = select(rows, phase=axis.get_title())
        axis.plot(of_phase["median_ms"], of_phase["impl"], "D", color="black")
    return figure


def counted(calls: pd.DataFrame) -> pd.DataFrame:
    """Returns what each forward pass keeps for backward, `saved_bytes`, with its closed form,
    `predicted_bytes`.
    """
    rows = usable(calls, "impl", "saved_bytes", *SHAPE)
    forms = []
    for row in rows.to_dict("records"):
        kind = "math" if row["impl"] == "sdpa_math" else "eager"
        if row["impl"] in FUSED or row.get("num_replacements", 0) > 0:
            kind = "fused"
        shape = row["batch"], row["length"], row["d_head"]
        size = ELEMENT_BYTES[row["precision"]]
        forms.append(accounting.attention_saved_bytes(kind, *shape, size))
    return rows.assign(predicted_bytes=forms)


def published_times(calls: pd.DataFrame) -> pd.DataFrame:
    """Returns the published times that have a timed pass of the same formula, precision and shape
    beside them.
    """
    names = {"batch_size": "batch", "d_model": "d_head", "seq_len": "length", "pass": "phase"}
    names["ms_per_pass"] = "published_ms"
    theirs = ok_rows(published.load("attention_pytorch").rename(columns=names))
    theirs["impl"], theirs["precision"] = zip(*theirs["variant"].map(PUBLISHED), strict=True)
    keys = [*CASE, "batch"]
    # The baseline is printed in two tables of the same source.
    return facts.beside(theirs.drop_duplicates(["gpu", *keys]), timed(calls), keys)
