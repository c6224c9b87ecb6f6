"""Notebook 04 from frames of its records: what a peak is made of, what autograd keeps, recomputing and autocast."""

import math
from collections.abc import Callable
from operator import itemgetter

import pandas as pd
from matplotlib.figure import Figure

from labkit import accounting, published
from labkit.configs import ModelConfig, model_config
from labkit.report import figures, forms, verdicts
from labkit.report.benchmarking import CASE, SYMPTOM, sizes_in
from labkit.report.chapter import Chapter
from labkit.report.text import count, gib, listing, mib, number, percent, span, times
from labkit.report.forms import case_name, shown
from labkit.report.tables import PHASE_NAMES, cell, in_order, ok_rows, once_per_frame, pivot, select

MIB, GIB = 2**20, 2**30
PHASES = ("inference", "forward", "train_step")
WITHIN = 0.03
"""Relative error up to which a predicted peak counts as met."""

PARTS = {"parameters": "parameter", "gradients": "gradient", "optimizer state": "optimizer", "activations": "made"}
"""What a step is made of, and the metric that holds it: activations of a forward pass, the rest of a training step."""

CATEGORIES = ("other", "parameters", "optimizer state", "gradients", "activations", "temporary")
COLOURS = dict(zip(CATEGORIES, ("#999999", "#0072b2", "#56b4e9", "#5d3a9b", "#009e73", "#e69f00"), strict=True))
"""What an allocation can be, from the bottom of a timeline to its top."""

ATTENTION_NAMES = {"eager": "eager attention", "sdpa_flash": "SDPA's FlashAttention"}
PRECISION_NAMES = {"fp32": "fp32", "bf16": "autocast", "bf16_pure": "pure bf16"}


def name(row: dict) -> str:
    """Returns "training step of small at 128 in bf16"."""
    return f"{PHASE_NAMES[row['phase']]} of {case_name(row)} in {row['precision']}"


def shape(row: dict) -> tuple[ModelConfig, int, int]:
    """Returns the model, or the one block, of a record, its batch and context."""
    config = model_config(row["size"]) if "size" in row else None
    config = config or ModelConfig("block", "notebook 04", row["d_model"], row["d_ff"], 1, row["num_heads"])
    return config, row["batch"], row["context"]


def predicted(form: Callable, row: dict, frame: pd.DataFrame, *arguments):
    """Returns a closed form of `accounting` for the case of a record."""
    attention = "eager" if row.get("attention", "eager") == "eager" else "fused"
    known = {"precision": row["precision"], "attention": attention, "device_kind": frame.attrs["device_kind"]}
    return form(*shape(row), *arguments, **known)


def highest(row: dict, moments: dict[str, int]) -> dict:
    """Returns a record with the `moment` that is predicted to hold most, and its `predicted_bytes`."""
    moment = max(moments, key=moments.get)
    return {"peak_bytes": math.nan, **row, "predicted_bytes": moments[moment], "moment": moment}


@once_per_frame
def peaks(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns the peaks in order, with `predicted_bytes` of the tensors and the `moment` at which they are reached."""
    rows = in_order(frame, [*CASE, "phase"]).to_dict("records")
    return pd.DataFrame(highest(row, predicted(accounting.peak_moments, row, frame, row["phase"])) for row in rows)


def parts(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns size, context, precision, part, and the bytes its tensors asked for, `measured` and `predicted`."""
    rows = []
    for row in ok_rows(peaks(frame)).to_dict("records"):
        config = model_config(row["size"])
        weights, moments = accounting.parameter_bytes(config), accounting.optimizer_state_bytes(config)
        forms_of_parts = (weights, weights, moments, predicted(accounting.forward_made_bytes, row, frame))
        for (part, metric), num_bytes in zip(PARTS.items(), forms_of_parts, strict=True):
            rows.append((*(row[key] for key in CASE), part, row.get(f"{metric}_requested_bytes"), num_bytes))
    return pd.DataFrame(rows, columns=[*CASE, "part", "measured", "predicted"]).dropna()


def table_peaks(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns by size and precision, at the shown context, the parts of a step, its peak and the prediction."""
    measured = parts(frame).set_index([*CASE, "part"])["measured"].to_dict()
    return pd.DataFrame(
        {key: row[key] for key in CASE}
        | {part: gib(measured.get((*(row[key] for key in CASE), part))) for part in PARTS}
        | {"peak": cell(row, "peak_bytes", gib), "predicted": gib(row["predicted_bytes"])}
        | {"predicted / peak": percent(row["predicted_bytes"] / row["peak_bytes"], 3)}
        | {"moment of the peak, predicted": row["moment"].replace(": ", ", ")}
        for row in select(shown(peaks(frame)), phase="train_step").to_dict("records")
    )


def figure_peaks(frame: pd.DataFrame) -> Figure | None:
    """One panel per phase: the predicted peak over the context as lines, the measured ones as markers, by size."""
    rows = peaks(frame)
    if ok_rows(rows).empty:
        return None
    figure, axes = figures.panels(len(PHASES), height=3.6)
    for axis, phase in zip(axes, PHASES, strict=True):
        for size in sizes_in(rows):
            style = figures.STYLES[size]
            for precision, dash, fill in (("fp32", "-", style.colour), ("bf16", ":", "white")):
                line = select(rows, size=size, phase=phase, precision=precision).sort_values("context")
                look = {"color": style.colour, "markerfacecolor": fill, "markersize": 4}
                axis.plot(line["context"], line["predicted_bytes"] / GIB, linestyle=dash, linewidth=1, **look)
                axis.plot(line["context"], line["peak_bytes"] / GIB, linestyle="", marker=style.marker, **look)
                figures.mark_failures(axis, line, "context", colour=style.colour)
            axis.plot([], [], color=style.colour, marker=style.marker, markersize=4, label=size)
        for label, dash, fill in (("fp32 (line: predicted)", "-", "0.4"), ("bf16 autocast", ":", "white")):
            axis.plot([], [], color="0.4", marker="o", linestyle=dash, markerfacecolor=fill, markersize=4, label=label)
        if "device_bytes" in rows:
            memory = rows["device_bytes"].max() / GIB
            axis.axhline(memory, color="0.2", linestyle="--", linewidth=1, label="the device's memory")
        figures.context_axis(axis, rows["context"].unique())
        figures.log_time_axis(axis, "peak memory (GiB)")
        axis.set_title(PHASE_NAMES[phase])
    title = f"Peak memory, eager, batch {rows['batch'].iloc[0]}, {frame.attrs['device']} (× out of memory)"
    figures.finish(figure, axes, title, num_columns=5)
    return figure


def findings_peaks(frame: pd.DataFrame) -> list[str]:
    """Says how well the parts and the peaks are predicted, and what does not fit."""
    rows, made, sentences = peaks(frame), parts(frame), []
    if len(made):
        off = made["measured"] / made["predicted"] - 1
        worst = made.loc[off.abs().idxmax()]
        sentences.append(
            f"Closed forms give {(off == 0).sum()} of {len(made)} parts to the byte; the largest miss is "
            f"{percent(off.abs().max())} ({worst['part']} of {case_name(worst)} in {worst['precision']}). AdamW in "
            "fp32 holds 16 bytes per parameter: weight 4, moments 8, and the gradient's 4 once backward has made it."
        )
    if len(ok := ok_rows(rows)):
        good = ((ok["predicted_bytes"] + ok["other_bytes"]) / ok["peak_bytes"] - 1).abs() <= WITHIN
        text = f"{forms.agreement(ok, 'peak_bytes', 'predicted_bytes', WITHIN, name)}."
        if ok["other_bytes"].any():
            text += f" Beside tensors the allocator counts {span(ok['other_bytes'], mib)} MiB (library workspaces, "
            text += f"rounded sizes), much of a small model's peak; with them added, {good.sum()} are."
        sentences.append(text)
    steps, tried = select(rows, phase="train_step"), select(rows, status="oom")
    if len(lost := select(steps, status=["oom", "skipped"])):
        fits = ok_rows(steps).groupby("size")["context"].max().map("up to {:,}".format)
        limits = listing(f"of {size} {fits.get(size, 'at none')}" for size in lost["size"].unique())
        known = (tried["predicted_bytes"] > rows["device_bytes"].max()).sum() if "device_bytes" in rows else 0
        sentences.append(
            f"Longest contexts tried here at which a training step fits: {limits}. "
            f"{count(len(tried), 'phase')} ran out of memory, {known} as predicted; "
            f"{len(select(rows, status='skipped'))} more were predicted to and not tried."
        )
    return sentences + forms.failures(frame)


def recordings(frame: pd.DataFrame) -> list[dict]:
    """Returns the recorded phases in order, with the bytes of each category at the peak."""
    rows = in_order(ok_rows(frame), ["precision", *CASE[:2], "phase"]) if len(frame) else frame
    held = [f"{category.replace(' ', '_')}_at_peak_bytes" for category in CATEGORIES]
    return rows.assign(**rows.reindex(columns=held).fillna(0)).to_dict("records")


def figure_timeline(frame: pd.DataFrame) -> Figure | None:
    """One panel per recorded phase, of bf16 where recorded: memory in use over allocations and frees, by category."""
    rows = recordings(frame)
    rows = [row for row in rows if row["precision"] == "bf16"] or rows
    if not rows:
        return None
    figure, axes = figures.panels(len(rows), num_columns=2, width=4.5, height=3.2)
    for axis, row in zip(axes, rows, strict=True):
        samples, peak = row["samples"], row["peak_bytes"] / GIB
        layers = {c: [v * MIB / GIB for v in samples[f"{c}_mib"]] for c in CATEGORIES if f"{c}_mib" in samples}
        figures.stack(axis, samples["event"], layers, COLOURS)
        for phase, begin, _ in row["observed"]["phases"]:
            side = "right" if begin > 0.8 * row["num_events"] else "left"  # where there is room
            axis.axvline(begin, color="0.3", linewidth=0.8, linestyle=":")
            axis.text(begin, 1.05 * peak, f" {phase} ", fontsize=7.5, ha=side)
        axis.set(xlim=(0, row["num_events"]), ylim=(0, 1.14 * peak), title=name(row))
        axis.set(xlabel="allocations and frees (number)", ylabel="in use (GiB)")
        axis.grid(False)
    figures.finish(figure, axes, f"Memory in use, eager, batch {rows[0]['batch']}, {frame.attrs['device']}")
    return figure


def findings_timelines(frame: pd.DataFrame) -> list[str]:
    """Says where a step peaks and what autocast's weight cache adds, and names the largest allocation."""
    rows, sentences = recordings(shown(frame)), []
    for row in [row for row in rows if row["phase"] == "train_step"][:1]:
        shares = {c: row[f"{c.replace(' ', '_')}_at_peak_bytes"] / row["peak_bytes"] for c in CATEGORIES}
        made_of = [f"{percent(shares[c])} {c}" for c in sorted(shares, key=shares.get, reverse=True) if shares[c]]
        phase = row["observed"]["peak_phase"]
        early = phase == "backward" and shares["activations"] > shares["gradients"]
        why = "; most activations are still kept, few gradients made" if early else ""
        sentences.append(f"The {name(row)} peaks at {gib(row['peak_bytes'])} GiB, in {phase}: {listing(made_of)}{why}.")
    inference = {row["precision"]: row for row in rows if row["phase"] == "inference"}
    if {"fp32", "bf16"} <= set(inference):
        fp32, bf16 = (gib(inference[precision]["temporary_at_peak_bytes"]) for precision in ("fp32", "bf16"))
        copies = 2 * accounting.num_matmul_parameters(model_config(inference["bf16"]["size"]))
        sentences.append(
            f"At its peak inference holds {fp32} GiB of temporaries in fp32, {bf16} under autocast. The orange ramp "
            "is autocast's weight cache: a bf16 copy of each matrix used so far, kept until the autocast context is "
            f"left ({gib(copies)} GiB for all)."
        )
    for row in list(inference.values())[-1:]:
        group, (config, batch, context) = row["observed"]["largest"][0], shape(row)
        is_scores = group["num_bytes"] == 4 * batch * config.num_heads * context**2
        what = "one fp32 matrix of attention scores, 4·B·H·T² bytes" if is_scores else group["code"]
        exact = sum(row["peak_bytes"] == row["reported_peak_bytes"] for row in rows)
        sentences.append(
            f"The largest allocation of inference is {mib(group['num_bytes'])} MiB, `{group['operator']}` in "
            f"`{group['frame']}`: {what}. The peak is the allocator's own to the byte in {exact} of {len(rows)} "
            "recordings."
        )
    return sentences


def largest(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns the largest allocations of every recording, like ones together: bytes, how many, owner, line."""
    groups = [(row, group) for row in recordings(frame) for group in row["observed"]["largest"]]
    return pd.DataFrame({"recorded": name(row), **group} for row, group in groups)


def residuals(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns what each operator of a part keeps, of compiled code what each shape does, most bytes first."""
    rows = [(row, group) for row in ok_rows(frame).to_dict("records") for group in row["observed"]["residuals"]]
    kept = pd.DataFrame(
        {**group, "part": row["part"], "code": row["code"], "operator": group["operator"] or group["shape"]}
        for row, group in rows
    )
    if kept.empty:
        return kept
    sums = {"residuals": ("count", "sum"), "distinct": ("num_distinct", "sum"), "saved_bytes": ("saved_bytes", "sum")}
    kept = kept.groupby(["part", "code", "operator", "module"], sort=False).agg(**sums).reset_index()
    return kept.sort_values("saved_bytes", ascending=False, kind="stable")


def table_residuals(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns what each operator of an eager block keeps, and its share."""
    rows = select(residuals(frame), part="block", code="eager")
    kept = rows.get("saved_bytes", pd.Series(dtype=float))
    rows = rows.assign(**{"kept (MiB)": kept.map(mib), "share": (kept / kept.sum()).map(percent)})
    return rows.drop(columns=["saved_bytes", "part", "code"], errors="ignore")


def findings_blocks(frame: pd.DataFrame) -> list[str]:
    """Says which operators keep most, what compiling drops, and how large the residual stream is beside a block."""
    rows = {(row["part"], row["code"]): row for row in ok_rows(frame).to_dict("records")}
    sentences = []
    if eager := rows.get(("block", "eager")):
        saved, heads, context = eager["saved_bytes"], eager["num_heads"], eager["context"]
        top = select(residuals(frame), part="block", code="eager")["saved_bytes"].head(5).sum() / saved
        other = {**eager, "num_heads": 2 * heads}
        by_heads = [predicted(accounting.block_activation_bytes, row, frame) for row in (eager, other)]
        quarter = accounting.residual_stream_bytes(*shape({**eager, "context": context // 4}))
        sentences += [
            f"Five operators keep {percent(top)} of the block's {mib(saved)} MiB; the closed form gives "
            f"{mib(by_heads[0])}, for {2 * heads} heads {mib(by_heads[1])}: each head has scores of its own.",
            f"The residual stream, 4·B·T·d_model bytes, is {mib(quarter)} MiB at {context // 4} tokens and "
            f"{mib(eager['stream_bytes'])} MiB at {context:,}; there the block keeps "
            f"{times(saved / eager['stream_bytes'])} as much. Gradients take {mib(eager['gradient_bytes'])} MiB.",
        ]
    changes = [
        f"{part.replace('_', ' ')} from {int(one['num_residuals'])} residuals, {mib(one['saved_bytes'])} MiB, to "
        f"{int(other['num_residuals'])}, {mib(other['saved_bytes'])} MiB"
        for part in ("rms_norm", "block")
        if (one := rows.get((part, "eager"))) and (other := rows.get((part, "compiled")))
    ]
    if changes:
        theirs = published.load("saved_for_backward").drop(columns="status")
        theirs = theirs.rename(columns={"context_length": "context", "batch_size": "batch"})
        both = theirs.merge(ok_rows(frame), on=["part", "code", "d_model", "d_ff", "num_heads", "context", "batch"])
        printed = [f"{part.replace('_', ' ')} {theirs:,.2f}, here {mib(ours)}" for part, theirs, ours in
                   zip(both["part"], both["saved_mib"], both["saved_bytes"], strict=True)]  # fmt: skip
        text = f"Compiling takes {listing(changes)}: what is cheap is computed again rather than kept."
        sentences.append(text + (f" Published for compiled code (MiB): {'; '.join(printed)}." if printed else ""))
    return sentences


@once_per_frame
def checkpointing(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns every plan with `level` (0 none, 1, 2 nested), `predicted_bytes`, `moment` and `slowdown` over none."""
    keys = ["context", "attention", "plan"]
    slower = forms.pairs(frame, "plan", "none", keys=keys[:2]).set_index(keys)["ratio"].to_dict()
    rows = []
    for row in frame.to_dict("records"):
        plan = accounting.checkpoint_plan(row["plan"], model_config(row["size"]).num_layers)
        row = highest({"median_ms": math.nan, **row}, predicted(accounting.checkpoint_moments, row, frame, plan))
        ratio = slower.get(tuple(row[key] for key in keys), math.nan)
        rows.append(row | {"level": len(plan), "slowdown": 1 / ratio})
    return in_order(pd.DataFrame(rows), ["level", "attention"])


def table_checkpointing(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns peak and step time of every plan, one row each, by implementation of attention."""
    lines: dict[tuple, dict] = {}
    for row in checkpointing(frame).to_dict("records"):
        start = {key: row[key] for key in CASE} | {"k, blocks recomputed together": row["plan"]}
        line = lines.setdefault(tuple(start.values()), start)
        who = ATTENTION_NAMES.get(row["attention"], row["attention"])
        line[f"{who}: peak (predicted), GiB"] = f"{cell(row, 'peak_bytes', gib)} ({gib(row['predicted_bytes'])})"
        line[f"{who}: step (ms)"] = cell(row)
    return pd.DataFrame(lines.values()).fillna("–")


def figure_checkpointing(frame: pd.DataFrame) -> Figure | None:
    """Left: peak by k, predicted and measured. Right: step time against peak."""
    rows = checkpointing(frame)
    if ok_rows(rows).empty:
        return None
    figure, (left, right) = figures.panels(2, num_columns=2, width=4.5, height=3.2)
    single = select(rows, level=1).assign(k=lambda part: part["plan"].astype(int)).sort_values("k")
    for attention, group in rows.groupby("attention", sort=False):
        style, line = figures.STYLES[attention], select(single, attention=attention)
        points = {"color": style.colour, "marker": style.marker, "linestyle": ""}
        left.plot(line["k"], line["predicted_bytes"] / GIB, color=style.colour, linestyle=style.dash, linewidth=1)
        left.plot(line["k"], line["peak_bytes"] / GIB, **points)
        figures.mark_failures(left, line, "k", colour=style.colour)
        points["label"] = ATTENTION_NAMES.get(attention, attention)
        right.plot(group["peak_bytes"] / GIB, group["median_ms"], **points)
        for row in ok_rows(group, plan=["none", "1", "4", "16", "32", "6/1", "16/8/4/2/1"]).to_dict("records"):
            at = (row["peak_bytes"] / GIB, row["median_ms"])
            right.annotate(row["plan"], at, xytext=(5, 4), textcoords="offset points", fontsize=7.5)
    figures.context_axis(left, sorted(set(single["k"])) or [1], "k, blocks recomputed together")
    left.set(ylabel="peak (GiB)", title="peak by k (line: predicted)")
    right.set(xlabel="peak (GiB)", ylabel="training step, call time (ms)", title="time against memory, by plan")
    right.margins(0.12)
    title = f"Recomputed blocks, {name(rows.iloc[0])}, {frame.attrs['device']} (× out of memory)"
    figures.finish(figure, [left, right], title)
    return figure


def findings_checkpointing(frame: pd.DataFrame) -> list[str]:
    """Says what recomputing saves and costs, which interval is best and why, and what nesting adds."""
    rows, sentences, deeper = checkpointing(frame), [], []
    for attention, group in rows.groupby("attention", sort=False):
        single, who = ok_rows(group, level=1), ATTENTION_NAMES.get(attention, attention)
        for plain in select(group, plan="none").to_dict("records") if len(single) else []:
            row = single.loc[single["peak_bytes"].idxmin()].to_dict()
            config, stream = shape(row)[0], accounting.residual_stream_bytes(*shape(row))
            layers, kept = config.num_layers, predicted(accounting.block_activation_bytes, row, frame) / stream
            without = f"{plain['status']}, {gib(plain['predicted_bytes'])} GiB predicted"
            if plain["status"] == "ok":
                time = f"{number(plain['median_ms'])} ms, so {times(row['slowdown'])} the time"
                without = f"{gib(plain['peak_bytes'])} GiB and {time}"
            sentences.append(
                f"With {who} ({case_name(row)}, {row['precision']}) the peak is lowest at k = {row['plan']}: "
                f"{gib(row['peak_bytes'])} GiB and {number(row['median_ms'])} ms a step, call time (without "
                f"recomputing {without}). A block keeps {times(kept)} its input, so N/k inputs and k blocks are least "
                f"at k = √(N/{number(kept)}) = {number((layers / kept) ** 0.5)} rather than √N = {number(layers**0.5)}."
            )
            for nested in ok_rows(group[group["level"] > 1]).to_dict("records"):
                more = nested["peak_bytes"] - row["peak_bytes"]
                word = f"{mib(abs(more))} MiB {'above' if more > 0 else 'below'} it" if more else "as high"
                deeper.append(f"{word} with {who} ({nested['plan']})")
            grows = accounting.block_gradient_bytes(config) > stream
    if deeper:
        text = f"Against the lowest peak of a single level, nested recomputing peaks {listing(deeper)}."
        if grows and not any(" below it" in part for part in deeper):
            text += " A block's gradients are larger than its input, so the peak lies at the end of backward, where "
            text += "the inputs are gone: keeping fewer of them cannot lower it."
        sentences.append(text)
    return sentences


def table_autocast(frame: pd.DataFrame, *, pure: pd.DataFrame) -> pd.DataFrame:
    """Returns the peaks (GiB) of the largest size with a measured training step; `pure` are the steps of chapter 03."""
    trained = ok_rows(frame, phase="train_step")
    rows = pd.concat([frame, select(pure, precision="bf16_pure", phase="train_step")])
    rows = select(rows, size=sizes_in(trained if len(trained) else frame)[-1])
    cases = rows["phase"].map(PHASE_NAMES) + ", " + rows["precision"].map(PRECISION_NAMES)
    return pivot(rows.assign(case=cases), ["size", "context"], "case", lambda row: cell(row, "peak_bytes", gib))


def findings_autocast(frame: pd.DataFrame, *, pure: pd.DataFrame) -> list[str]:
    """Says in which phases autocast peaks higher than fp32, and what pure bf16 saves of a training step."""
    sentences, both = [], forms.exact_pairs(frame, "precision", "fp32", keys=["size", "context", "phase"])
    counts = [
        f"{PHASE_NAMES[phase]} in {sum(group['verdict'] == verdicts.BEHIND)} of {len(group)} ({span(group['ratio'])})"
        for phase, group in both.groupby("phase", sort=False)
    ]
    if counts:
        sentences.append(
            f"Autocast peaks higher than fp32 for {listing(counts)}. The fp32 weights stay, and a bf16 copy of each "
            "matrix is added; activations shrink, but on a GPU the probabilities are kept in fp32 and in bf16."
        )
    autocast = select(frame, phase="train_step", precision="bf16")
    steps = pd.concat([autocast, select(pure, precision="bf16_pure", phase="train_step")])
    if len(both := forms.exact_pairs(steps, "precision", "bf16", keys=["size", "context"]).dropna(subset="ratio")):
        alone = sorted(set(ok_rows(steps)["size"]) - set(ok_rows(frame, phase="train_step")["size"]))
        text = f"Pure bf16 takes {span(both['ratio'])} the peak of autocast's training step in "
        text += f"{count(len(both), 'case')}: weights, gradients and moments are half the size."
        sentences.append(text + (f" {listing(alone)} trains neither in fp32 nor under autocast." if alone else ""))
    return sentences


def published_peaks(frame: pd.DataFrame, course: pd.DataFrame | None = None) -> pd.DataFrame:
    """Returns published peaks with ours of the same size, context, precision and phase; `ratio` is theirs over ours.

    In place of ours stand those of `course`, the model as a course writes it, where there are any.
    """
    theirs = published.load("memory_peaks").drop(columns="status").rename(columns={"context_length": "context"})
    theirs["precision"] = theirs["dtype"].map({"float32": "fp32", "bfloat16_autocast": "bf16"})
    theirs["size"] = theirs["model"].map({"xl": "xl-2025"})
    theirs["caveat"] = theirs["note"].fillna("").str.replace("_", " ")
    theirs.loc[theirs["approximate"].astype(str).str.lower() == "true", "caveat"] = "printed as about"
    both = theirs.rename(columns={"peak_gib": "published_gib"}).merge(ok_rows(peaks(frame)), on=[*CASE, "phase"])
    both = both.assign(ratio=both["published_gib"] * GIB / both["peak_bytes"])
    both = forms.beside_course(both, course, [*CASE, "phase"], "peak_bytes")
    return both.assign(here_gib=both["peak_bytes"] / GIB)


def table_published(frame: pd.DataFrame, course: pd.DataFrame | None = None) -> pd.DataFrame:
    """Returns the published peaks beside ours."""
    rows = published_peaks(frame, course)
    rows["case"] = rows["size"] + " at " + rows["context"].astype(str) + " in " + rows["precision"]
    return forms.published_table(rows, itemgetter("case"), name="gib", value="here_gib")


def findings_published(frame: pd.DataFrame, course: pd.DataFrame | None = None) -> list[str]:
    """Says how the published peaks compare, apart from those whose note says that they are of another case."""
    ratios = published_peaks(frame).query("note.isna()")["ratio"]
    if ratios.empty:
        return []
    text = "A peak does not depend on the GPU's speed: the model's code differs, and how often it keeps the scores."
    told = forms.explained(published_peaks(frame, course).query("note.isna()"), forms.MODEL_CODE)
    return [f"{len(ratios)} published peaks without a note are {span(ratios)} ours. {text}", *told]


def front(chapter: Chapter) -> list[tuple[str, str]]:
    """Returns the findings of this chapter for the front page, each with the heading that it links to."""
    frame, plans = chapter.records("peaks"), chapter.records("checkpointing")
    pure = Chapter("03_mixed_precision", device=chapter.device, output=str(chapter.folder.parent)).records("steps")
    every = [text for text in findings_checkpointing(plans) if "at k = 1:" in text] if len(ok_rows(plans)) else []
    found = [(f"**Recompute every block, not every √N.** {text}", "Recomputing instead of keeping") for text in every]
    told = " ".join(findings_autocast(frame, pure=pure)) if len(ok_rows(frame)) else ""
    return found[-1:] + ([(f"**{told.replace('. ', '.** ', 1)}", "Autocast and pure bf16")] if told else [])


def symptoms(chapter: Chapter) -> list[dict[str, str]]:
    """Returns the row for the front page's table of symptoms on running out of memory."""
    rows = select(chapter.records("checkpointing"), plan=["none", "1"]).to_dict("records")
    gave = {(row["attention"], row["plan"]): cell(row, "peak_bytes", gib) for row in rows}
    wanted = [("eager", "none"), ("sdpa_flash", "none"), ("sdpa_flash", "1")]
    if not {*wanted} <= gave.keys() or not any(row["status"] == "ok" for row in rows):
        return []
    gains = f"{' → '.join(gave[key] for key in wanted)} GiB (peak of {name(rows[0])})"
    bound, remedy = "the scores, then what blocks keep", "SDPA's FlashAttention, then recompute every block"
    return [dict(zip(SYMPTOM, ("out of memory at long context", bound, remedy, gains), strict=True))]
