"""Notebook 05 from frames of its records: one attention call's time, memory and error, and what compiling changes."""

import itertools
import math

import pandas as pd
from matplotlib.figure import Figure

from labkit import accounting, published
from labkit.report import figures, forms, verdicts
from labkit.report.text import count, listing, number, scientific, span, times
from labkit.report.tables import PHASE_NAMES, cell, in_order, ok_rows, once_per_frame, pivot, select

NAMES = {
    "eager": "eager", "compiled": "compiled", "compiled_heads": "compiled, with heads", "sdpa_math": "SDPA math",
    "sdpa_flash": "SDPA flash", "sdpa_cudnn": "SDPA cuDNN", "sdpa_efficient": "SDPA efficient",
}  # fmt: skip

FUSED = ["sdpa_flash", "sdpa_cudnn", "sdpa_efficient"]
KINDS = dict.fromkeys(NAMES, "eager") | dict.fromkeys(FUSED, "fused") | {"sdpa_math": "math"}
"""The closed form of `accounting` that each implementation's memory is held against."""

PHASES = ("forward", "backward")
ELEMENT_BYTES = {"fp32": 4, "tf32": 4, "bf16": 2}
SERIES = ["precision", "impl", "d_head"]
CASE = [*SERIES, "length"]

COMPILED_PASSES = {"forward": 4, "backward": 7}
"""Passes over the scores that a compiled formula needs at least: its products' and one fused kernel's between them.

Forward: written by the product, read and written by the softmax, read by the product. Backward: the probabilities read
for v; their gradient written; both read and one written by the softmax's backward; one read each for q and k.
"""


def shape(row: dict) -> tuple[int, int, int, int]:
    """Returns batch, length, head dimension and bytes per element."""
    return row["batch"], row["length"], row["d_head"], ELEMENT_BYTES[row["precision"]]


def name(row: dict) -> str:
    """Returns "forward, d 64, length 4,096"."""
    return f"{PHASE_NAMES[row['phase']]}, d {row['d_head']}, length {row['length']:,}"


def mib(num_bytes: float) -> str:
    return number(num_bytes / 2**20, 4)


def ordered(calls: pd.DataFrame) -> pd.DataFrame:
    return in_order(calls, [column for column in (*CASE, "phase") if column in calls])


def shown_d_head(calls: pd.DataFrame) -> int:
    """Returns the head dimension that tables and figures show: that with most cases, of those the largest."""
    num_cases = calls[CASE].drop_duplicates()["d_head"].value_counts()
    return int(num_cases[num_cases == num_cases.max()].index.max())


def shown(calls: pd.DataFrame) -> pd.DataFrame:
    """Returns the rows that tables show: of one head dimension, at the longest length where every eager pass ran."""
    if calls.empty:
        return calls
    rows = select(calls, d_head=shown_d_head(calls))
    eager = select(rows, impl="eager")
    complete = [length for length, group in eager.groupby("length") if (group["status"] == "ok").all()]
    return ordered(select(rows, length=max(complete, default=rows["length"].min())))


@once_per_frame
def over_eager(calls: pd.DataFrame) -> pd.DataFrame:
    """Returns the ratio of eager's time to every other's of the same precision, head dimension, length and pass."""
    return forms.pairs(calls, "impl", "eager", keys=["precision", "d_head", "length", "phase"])


def table_times(calls: pd.DataFrame) -> pd.DataFrame:
    """Returns both passes of every implementation at the shown length, beside eager in the same precision."""
    rows = shown(calls[calls["impl"] != "compiled_heads"])
    ratios = over_eager(calls)[[*CASE, "phase", "ratio", "verdict"]]
    rows = rows[rows["status"] != "skipped"].merge(ratios, on=[*CASE, "phase"], how="left").fillna({"verdict": ""})
    result = []
    for (precision, impl, d_head, length), group in rows.groupby(CASE, sort=False):
        line = {"precision": precision, "implementation": NAMES[impl], "d": d_head, "length": f"{length:,}"}
        for row in group.to_dict("records"):
            line[f"{row['phase']} (ms)"] = cell(row)
            line[f"eager / it, {row['phase']}"] = f"{times(row['ratio'])} {row['verdict']}".strip()
        line["largest error"] = scientific(group.filter(like="_relative_error").stack().max())
        result.append(line)
    return pd.DataFrame(result).fillna("–")


def figure_times(calls: pd.DataFrame) -> Figure | None:
    """Median over length of one head dimension: forward and backward, one row of panels per dtype of the inputs."""
    rows = select(calls, d_head=shown_d_head(calls))
    if ok_rows(rows).empty:
        return None
    # A backward pass whose forward pass ran out of memory is missing for the same reason.
    rows = rows.assign(status=rows["status"].mask(rows["reason"].str.endswith("ended oom"), "oom"))
    dtypes = [dtype for dtype in (["fp32", "tf32"], ["bf16"]) if len(ok_rows(rows, precision=dtype))]
    figure, axes = figures.panels(len(PHASES) * len(dtypes), num_columns=2, width=4.5, height=3.0)
    for axis, (dtype, phase) in zip(axes, itertools.product(dtypes, PHASES), strict=True):
        of_panel = ordered(select(rows, phase=phase, precision=dtype))
        for (precision, impl), line in of_panel.groupby(["precision", "impl"], sort=False):
            end, of = (", TF32", "_tf32") if precision == "tf32" else ("", "")
            figures.line_with_band(axis, line, "length", label=NAMES[impl] + end, style=figures.STYLES[impl + of])
        figures.context_axis(axis, of_panel["length"].unique(), "length (queries = keys)")
        figures.log_time_axis(axis, "call time (ms)")
        axis.set_title(f"{PHASE_NAMES[phase]}, {dtype[0]} tensors")
    title = f"Attention, batch {rows['batch'].iloc[0]}, d {rows['d_head'].iloc[0]}, call time"
    figures.finish(figure, axes, f"{title}, {calls.attrs['device']} (× out of memory)", num_columns=4)
    return figure


def findings_times(calls: pd.DataFrame) -> list[str]:
    """Says how each of SDPA's backends stands to eager where the device is busy, and which passes wait for the host."""
    sentences, pairs, measured = [], over_eager(calls), ok_rows(calls)
    busy = pairs[~pairs["launch_bound"] & pairs["impl"].str.startswith("sdpa_")]
    for precision in ("bf16", "fp32"):
        of_precision = busy[busy["precision"] == precision].groupby("impl", sort=False)
        parts = [f"{NAMES[impl]} {forms.tally(group)}" for impl, group in of_precision]
        if parts:
            sentences.append(f"Eager's time over SDPA's in {precision}, device busy: {'; '.join(parts)}.")
    bound = measured[[verdicts.launch_bound(row) for row in measured.to_dict("records")]]
    if len(bound):
        sentences.append(
            f"{len(bound)} of {len(measured)} passes are launch-bound, up to length "
            f"{bound['length'].max():,}: their time is the host's, and no faster kernel shortens it."
        )
    return forms.failures(calls) + sentences


def predicted_times(calls: pd.DataFrame, ceilings: pd.DataFrame) -> pd.DataFrame:
    """Returns the predicted beside the measured time of both passes, by the rates of the row's own session.

    A kernel between the products takes its passes over the scores at the copy rate; a product its one pass, or its
    FLOPs at the matrix product's rate, whichever is longer. A fused kernel makes no pass. Without launch-bound rows.

    Columns: CASE, phase, passes, moved_gb, elementwise_ms, products_ms, predicted_ms, median_ms, ratio (measured over
    predicted). `ceilings` are those of every session.
    """
    rates = {}
    for row in ok_rows(ceilings).to_dict("records"):
        key = "copy" if row["kind"] == "copy" else row["precision"]
        rates[row["session"], key] = row.get("achieved_gb_per_s" if key == "copy" else "achieved_tflops")
    result = []
    for row in ordered(ok_rows(calls, impl=["eager", "compiled", *FUSED])).to_dict("records"):
        copy, product = (rates.get((row["session"], key)) for key in ("copy", row["precision"]))
        if verdicts.launch_bound(row) or not copy or not product:
            continue
        phase, (batch, length, d_head, element_bytes) = row["phase"], shape(row)
        eager_passes = accounting.attention_score_passes(phase, device_kind=calls.attrs["device_kind"])
        num_passes = {"eager": eager_passes, "compiled": COMPILED_PASSES[phase]}.get(row["impl"], 0)
        # A fused backward pass computes the scores again.
        num_products = 2 if phase == "forward" else 4 if num_passes else 5
        pass_ms = element_bytes * batch * length**2 / copy / 1e6
        product_ms = accounting.attention_call_flops("forward", batch, length, d_head, causal=False) / 2 / product / 1e9
        row["elementwise_ms"] = max(0, num_passes - num_products) * pass_ms
        row["products_ms"] = num_products * max(product_ms, pass_ms if num_passes else 0)
        row["predicted_ms"] = row["elementwise_ms"] + row["products_ms"]
        result.append(row | {"passes": num_passes, "moved_gb": num_passes * pass_ms * copy / 1e3})
    columns = ["passes", "moved_gb", "elementwise_ms", "products_ms", "predicted_ms", "median_ms"]
    rows = pd.DataFrame(result, columns=[*CASE, "phase", *columns])
    return rows.assign(ratio=rows["median_ms"] / rows["predicted_ms"])


def shown_predictions(calls: pd.DataFrame, ceilings: pd.DataFrame) -> pd.DataFrame:
    """Returns the predictions for the shown head dimension and length, in fp32 and bf16."""
    at = shown(calls).iloc[0][["d_head", "length"]].to_dict()
    return select(predicted_times(calls, ceilings), precision=["fp32", "bf16"], **at)


def figure_traffic(calls: pd.DataFrame, ceilings: pd.DataFrame) -> Figure | None:
    """One panel per precision: predicted time of the passes between the products and of the products, and measured."""
    rows = shown_predictions(calls, ceilings)
    if rows.empty:
        return None
    blue, orange = figures.SERIES[:2]
    figure, axes = figures.panels(rows["precision"].nunique(), num_columns=2, width=4.5, height=3.0)
    for axis, (precision, of_precision) in zip(axes, rows.groupby("precision", sort=False), strict=True):
        bars = of_precision[::-1]
        labels = [f"{NAMES[row['impl']]}, {row['phase']}" for row in bars.to_dict("records")]
        axis.barh(labels, bars["products_ms"], color=blue, height=0.6, label="products, predicted")
        axis.barh(labels, bars["elementwise_ms"], left=bars["products_ms"], color=orange, height=0.6, hatch="//",
                  edgecolor="white", label="scaling and softmax, predicted")  # fmt: skip
        axis.plot(bars["median_ms"], labels, "D", color="black", markersize=5, label="measured")
        axis.set(xlim=(0, None), xlabel="call time (ms)", title=precision)
    title = f"One pass of attention, d {rows['d_head'].iloc[0]}, length {rows['length'].iloc[0]:,}"
    figures.finish(figure, axes, f"{title}, {calls.attrs['device']}")
    return figure


def findings_traffic(calls: pd.DataFrame, ceilings: pd.DataFrame) -> list[str]:
    """Says how far the predictions hold and what fewer passes buy."""
    sentences, gains = [], []
    length = shown(calls)["length"].iloc[0]
    rows = select(predicted_times(calls, ceilings), length=length, impl=["eager", "compiled"])
    if len(rows):
        parts = [f"{span(group['ratio'])} in {precision}" for precision, group in rows.groupby("precision")]
        worst = rows.loc[rows["ratio"].idxmax()].to_dict()
        sentences.append(
            f"At length {length:,} the measured over the predicted time of eager and compiled attention is "
            f"{listing(parts)}, the most for {NAMES[worst['impl']]} {name(worst)} in {worst['precision']}."
        )
    at = select(shown_predictions(calls, ceilings), impl=["eager", "compiled"])
    for (precision, phase), group in at.groupby(["precision", "phase"], sort=False):
        if len(group) == 2:
            speed = [times(group[column].iloc[0] / group[column].iloc[1]) for column in ("predicted_ms", "median_ms")]
            fewer = " to ".join(map("{:.0f}".format, group["passes"]))
            gains.append(f"{phase} in {precision} from {fewer}: {speed[0]} predicted, {speed[1]} measured")
    if gains:
        sentences.append(f"Compiling fuses the kernels between the products. Passes and speed: {'; '.join(gains)}.")
    return sentences


@once_per_frame
def memory(calls: pd.DataFrame) -> pd.DataFrame:
    """Returns predicted beside measured bytes of every measured forward pass, with its backward's peak.

    Columns: CASE, kind (of KINDS; "fused" where the compiler put SDPA in place), batch, saved_bytes, in_use_bytes,
    peak_<phase> (NaN where the device does not say), predicted_saved, _in_use, and for eager _forward, _backward.
    """
    rows = ordered(ok_rows(calls))
    rows["peak_bytes"] = rows.get("peak_bytes", float("nan"))
    peaks = rows.pivot(index=CASE, columns="phase", values="peak_bytes").add_prefix("peak_").reset_index()
    result = []
    for row in select(rows, phase="forward").merge(peaks, on=CASE).to_dict("records"):
        row["kind"] = "fused" if row.get("num_replacements", 0) > 0 else KINDS[row["impl"]]
        row["predicted_saved"] = accounting.attention_saved_bytes(row["kind"], *shape(row))
        row["predicted_in_use"] = accounting.attention_in_use_bytes(row["kind"], *shape(row))
        for phase in PHASES if row["impl"] == "eager" else ():
            known = {"device_kind": calls.attrs["device_kind"]}
            row[f"predicted_{phase}"] = accounting.attention_peak_bytes(phase, *shape(row), **known)
        result.append(row)
    columns = [f"peak_{phase}" for phase in PHASES] + [f"predicted_{what}" for what in ("saved", "in_use", *PHASES)]
    return pd.DataFrame(result, columns=[*CASE, "kind", "batch", "saved_bytes", "in_use_bytes", *columns])


@once_per_frame
def limits(calls: pd.DataFrame) -> pd.DataFrame:
    """Returns the first length and pass that ran out of memory, one row per series that did or should have.

    Columns: SERIES, length_oom, phase_oom; for eager length_told, phase_told, held: the first predicted to run out.
    """
    rows = ordered(calls).assign(held=0)
    for at, row in select(rows, impl="eager").iterrows():
        known = {"device_kind": calls.attrs["device_kind"]}
        rows.loc[at, "held"] = accounting.attention_reserved_bytes(row["phase"], *shape(row), **known)
    has = calls["device_bytes"].max() if "device_bytes" in calls else float("inf")
    lost, told = (part.drop_duplicates(SERIES) for part in (select(rows, status="oom"), rows[rows["held"] > has]))
    columns = [*SERIES, "length", "phase"]
    return lost[columns].merge(told[[*columns, "held"]], on=SERIES, how="outer", suffixes=("_oom", "_told"))


def table_memory(calls: pd.DataFrame) -> pd.DataFrame:
    """Returns measured bytes, their difference from the closed form and where memory ran out, at the shown length."""
    at = shown(calls).iloc[0][["d_head", "length"]].to_dict()
    rows = select(memory(calls), precision=["fp32", "bf16"], **at).merge(
        limits(calls), on=SERIES, how="left", suffixes=("", "_limit")
    )
    return pd.DataFrame(
        {"precision": row["precision"], "implementation": NAMES[row["impl"]], "length": f"{row['length']:,}"}
        | {"kept (MiB)": mib(row["saved_bytes"]), "in use (MiB)": mib(row["in_use_bytes"])}
        | {"kept − predicted (bytes)": f"{row['saved_bytes'] - row['predicted_saved']:,.0f}"}
        | {"in use − predicted (bytes)": f"{row['in_use_bytes'] - row['predicted_in_use']:,.0f}"}
        | {f"{phase} peak (MiB)": mib(row[f"peak_{phase}"]) for phase in PHASES}
        | {"out of memory at": "–" if pd.isna(row["length_oom"]) else f"{row['length_oom']:,.0f}, {row['phase_oom']}"}
        for row in rows.to_dict("records")
        if row["impl"] != "compiled_heads"  # in the table of what compiling finds
    )


def findings_memory(calls: pd.DataFrame) -> list[str]:
    """Says whether the closed forms hold to the byte, how what is kept grows, and where memory runs out."""
    rows, parts, sentences = memory(calls), [], []
    for measured, predicted, text in (
        ("saved_bytes", "predicted_saved", "kept for backward"), ("in_use_bytes", "predicted_in_use", "in use"),
        *((f"peak_{phase}", f"predicted_{phase}", f"at eager's {phase} peak") for phase in PHASES),
    ):  # fmt: skip
        off = (rows[measured] - rows[predicted]).dropna()
        if (off != 0).any():
            impls = listing(NAMES[impl] for impl in rows["impl"][off.index[off != 0]].unique())
            text += f" (else by up to {off.loc[off.abs().idxmax()]:+,.0f}: {impls})"
        if len(off):
            parts.append(f"{(off == 0).sum()} of {len(off)} {text}")
    if parts:
        sentences.append(f"Measured bytes equal the closed form exactly in {'; '.join(parts)}.")
    twice = rows.merge(rows.assign(length=2 * rows["length"]), on=[*CASE, "kind"], suffixes=("", "_half"))
    factor, fused = twice["saved_bytes"] / twice["saved_bytes_half"], twice["kind"] == "fused"
    if fused.any() and not fused.all():
        sentences.append(
            f"Twice the length keeps {span(factor[~fused])} the bytes where the scores are in memory, which grow as "
            f"length², and {span(factor[fused])} in a fused kernel, which keeps one number per query instead."
        )
    parts = []
    for precision, group in limits(calls).dropna(subset=["length_oom", "held"]).groupby("precision", sort=False):
        told = (group["length_oom"] == group["length_told"]) & (group["phase_oom"] == group["phase_told"])
        place = f"{span(group['length_oom'], '{:,.0f}'.format)} in {listing(dict.fromkeys(group['phase_oom']))}"
        held, heads = span(group["held"] / 2**30, number), count(len(group), "head dimension")
        parts.append(f"{precision} at {place} ({held} GiB to hold), as predicted for {told.sum()} of {heads}")
    if parts:
        limit = number(calls["device_bytes"].max() / 2**30)
        sentences.append(f"Eager runs out of the device's {limit} GiB in {'; in '.join(parts)}.")
    return sentences


def found(calls: pd.DataFrame) -> pd.DataFrame:
    """Returns the cases where the compiler found SDPA only with a dimension of heads, whose columns end in _heads."""
    keys, values = ["precision", "d_head", "length", "phase"], ["median_ms", "in_use_bytes", "num_replacements"]
    rows = ordered(ok_rows(calls, phase="forward")).reindex(columns=["impl", *keys, *values])
    both = select(rows, impl="compiled").merge(select(rows, impl="compiled_heads"), on=keys, suffixes=("", "_heads"))
    return both[(both["num_replacements"] == 0) & (both["num_replacements_heads"] > 0)]


def found_text(row: dict) -> str:
    """Returns what finding SDPA changes: "5.54 → 1.24 ms and 4,160 → 64.50 MiB in use (bf16, forward, d 64, …)"."""
    time = f"{number(row['median_ms'])} → {number(row['median_ms_heads'])} ms"
    held = f"{mib(row['in_use_bytes'])} → {mib(row['in_use_bytes_heads'])} MiB in use"
    return f"{time} and {held} ({row['precision']}, {name(row)})"


def table_compile(calls: pd.DataFrame) -> pd.DataFrame:
    """Returns the formula eager, compiled, and compiled with a dimension of heads, where the last was measured."""
    impls, result = ["eager", "compiled", "compiled_heads"], []
    for key, group in ordered(select(calls, impl=impls)).groupby(["precision", "d_head", "length"], sort=False):
        rows = group.set_index(["phase", "impl"]).to_dict("index")
        if ("forward", "compiled_heads") not in rows:
            continue
        line = {"precision": key[0], "d": key[1], "length": f"{key[2]:,}"}
        for phase in PHASES:
            both = [cell(rows[phase, impl]) if (phase, impl) in rows else "–" for impl in impls]
            line[f"{phase} (ms): eager → compiled → with heads"] = " → ".join(both)
        sides = [rows["forward", impl] for impl in impls[1:] if ("forward", impl) in rows]
        line["SDPA found"] = " → ".join("yes" if row.get("num_replacements", 0) > 0 else "no" for row in sides)
        line["in use (MiB)"] = " → ".join(mib(row.get("in_use_bytes", math.nan)) for row in sides)
        result.append(line)
    return pd.DataFrame(result)


def findings_compile(calls: pd.DataFrame) -> list[str]:
    """Says where the compiler finds SDPA and what it gains without, each in one precision."""
    sentences = []
    heads, both = ok_rows(calls, impl="compiled_heads", phase="forward"), found(calls)
    if len(heads) and "num_replacements" in heads:
        of_precision = (heads["num_replacements"] > 0).groupby(heads["precision"])
        parts = [f"{seen.sum()} of {count(len(seen), 'case')} in {precision}" for precision, seen in of_precision]
        one = f". One compiled call without → with it: {found_text(both.iloc[-1].to_dict())}" if len(both) else ""
        text = f"With a dimension of heads, the compiler puts SDPA in the formula's place in {listing(parts)}{one}."
        sentences.append(text)
    busy = select(over_eager(calls), impl="compiled", launch_bound=False)
    gains = [f"{forms.tally(group)} in {precision}" for precision, group in busy.groupby("precision", sort=False)]
    tf32 = forms.pairs(select(calls, impl="compiled"), "precision", "fp32", keys=["d_head", "length", "phase"])
    if gains:
        text = f"Without that dimension, eager's time over compiled, device busy: {listing(gains)}."
        if len(tf32 := select(tf32, precision="tf32", launch_bound=False)):
            text += f" TF32 against fp32, both compiled: {forms.tally(tf32)}, for precision, not for compiling."
        sentences.append(text)
    return sentences


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


def model_pairs(models: pd.DataFrame, backward: pd.DataFrame) -> pd.DataFrame:
    """Returns the model's eager over its compiled times in one precision; `models` are notebook 01's steps."""
    rows = select(pd.concat([models, backward]), phase=["forward", "backward", "train_step"])
    return forms.pairs(rows, "compile", "none", keys=["precision", "size", "context", "phase"])


def table_transformer(models: pd.DataFrame, backward: pd.DataFrame) -> pd.DataFrame:
    """Returns eager → compiled blocks (ratio) by size in fp32 and bf16, at the shown context."""
    rows = select(model_pairs(models, backward), compile="regional", precision=["fp32", "bf16"])
    rows = forms.shown(rows).assign(phase=lambda frame: frame["phase"].map(PHASE_NAMES))
    return pivot(rows, ["precision", "size", "context"], "phase", forms.arrow)


def published_calls(calls: pd.DataFrame, course: pd.DataFrame | None = None) -> pd.DataFrame:
    """Returns published times beside ours of the same implementation, precision, shape and pass.

    In place of eager attention stands `course`, the formula as a course writes it, where that was measured.
    """
    names = {"batch_size": "batch", "d_model": "d_head", "seq_len": "length", "pass": "phase"}
    theirs = published.load("attention_pytorch").rename(columns=names | {"ms_per_pass": "published_ms"})
    variants = {"none": ("eager", "fp32"), "compile": ("compiled", "fp32"), "compile_tf32": ("compiled", "tf32")}
    theirs["impl"], theirs["precision"] = zip(*theirs["variant"].map(variants), strict=True)
    # The baseline is printed in two tables of the same source.
    theirs = theirs[theirs["status"] == "ok"].drop_duplicates(["gpu", *CASE, "batch", "phase"])
    keys = [*CASE, "batch", "phase"]
    both = forms.matched(theirs.assign(caveat="mask unknown"), calls, keys)
    eager = course.assign(impl="eager") if course is not None else None
    return ordered(forms.beside_course(both, eager, keys))


def table_published(calls: pd.DataFrame, course: pd.DataFrame | None = None) -> pd.DataFrame:
    """Returns published times beside ours of the shown head dimension, at the longest length in common."""
    rows = published_calls(calls, course)
    rows = select(rows, d_head=shown_d_head(calls), length=rows["length"].max())
    return forms.published_table(
        rows, lambda row: f"{NAMES[row['impl']]}, {row['precision']}, d {row['d_head']}, length {row['length']:,}"
    )


def findings_published(calls: pd.DataFrame, course: pd.DataFrame | None = None) -> list[str]:
    """Says how far the published times are from ours, at the longest length in common and over all."""
    if (rows := published_calls(calls)).empty:
        return []
    long = rows[rows["length"] == rows["length"].max()]
    parts = [f"{NAMES[i]} in {p} {span(group['ratio'])}" for (i, p), group in long.groupby(["impl", "precision"])]
    return [
        f"Published time over ours at length {long['length'].iloc[0]:,}: {listing(parts)}; over all lengths "
        f"{span(rows['ratio'])}. Their kind of time is unknown.",
        *forms.explained(published_calls(calls, course), "the softmax"),
    ]


def front(chapter) -> list[tuple[str, str]]:
    """Returns the finding of this chapter for the front page, with the heading that it links to."""
    calls = chapter.records("attention")
    if calls.empty or (both := found(calls)).empty:
        return []
    text = "**Given a dimension of heads, torch.compile finds SDPA by itself**: the compiled formula without → with it "
    text += f"{found_text(both.iloc[-1].to_dict())}, call time. Without it, it still writes its scores."
    return [(text, "What compiling finds")]
