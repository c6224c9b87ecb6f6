"""Notebook 03 from its records: sums, dtypes under autocast, normalisations, what a step gains, casts, training.

Every function takes frames of records as `Chapter.records` returns them; those on time and memory take `steps`.
"""

import itertools
import math

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from labkit import published
from labkit.configs import MIXED_PHASES, NORM_SETTINGS, SIZES
from labkit.report import figures, forms, verdicts
from labkit.report.chapter import Chapter
from labkit.report.text import count, listing, number, percent, power, scientific, span, times
from labkit.report.profiles import attention_times, whole_steps
from labkit.report.tables import PHASE_NAMES, cell, in_order, ok_rows, pivot, select, usable

NAMES = {
    "fp32": "fp32", "tf32": "TF32", "bf16": "bf16 autocast", "fp16": "fp16 with GradScaler",
    "fp16_unscaled": "fp16, unscaled", "bf16_pure": "pure bf16",
}  # fmt: skip
METHODS = {"sequential": "one by one", "kahan": "Kahan", "pairwise": "pairwise"}
NORMS = {"layer_norm": "LayerNorm", "rms_norm": "RMSNorm"}
SETTINGS = {key: f"mean {mean:g}{' std' if mean else ''}, ε {power(eps)}" for key, (mean, eps) in NORM_SETTINGS.items()}
FAULTS = {"overflowed": "overflow", "vanished": "squares vanish", "nonfinite": "not finite"}

FRACTION_BITS = {"fp32": 23, "fp16": 10, "bf16": 7}
"""Bits after the leading one of a format's numbers."""

SERIES_KEYS = ["method", "accumulator", "term", "cast"]
PUBLISHED_SUMS = {
    "fp32_sum_of_fp32": ("sequential", "fp32", "fp32", "none"),
    "fp16_sum_of_fp16": ("sequential", "fp16", "fp16", "none"),
    "fp32_sum_of_fp16": ("sequential", "fp32", "fp16", "implicit"),
    "fp32_sum_of_fp16_upcast": ("sequential", "fp32", "fp16", "explicit"),
}
"""Published sums by the series, in SERIES_KEYS, that they are of."""


def by_precision(frame: pd.DataFrame) -> dict[str, dict]:
    """Returns the newest measured row of each precision, in the order of NAMES, with `over_fp32` of the final loss."""
    rows = {row["precision"]: row for row in ok_rows(frame).to_dict("records")}
    base = rows.get("fp32", {}).get("final_loss") or math.nan
    rows = {name: {**row, "over_fp32": (row["final_loss"] or math.nan) / base} for name, row in rows.items()}
    return {name: rows[name] for name in NAMES if name in rows}


def published_sums() -> dict[tuple, list[float]]:
    """Returns the published values of each series, in SERIES_KEYS."""
    table = published.load("mixed_precision").query("kind == 'accumulation'")
    return table.groupby(table["component"].map(PUBLISHED_SUMS))["reported_value"].agg(list).to_dict()


def sums(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns the series with the published sum, the exact sum of the rounded terms and the spacing at the sum."""
    rows, known = ok_rows(frame), published_sums()
    series = zip(*(rows[key] for key in SERIES_KEYS), strict=True)
    return rows.assign(
        sum=rows["final_sum"].map("{:.4f}".format),
        published=[", ".join(sorted({f"{value:.4f}" for value in known.get(one, ())})) or "–" for one in series],
        rounded_terms=rows["rounded_term"] * rows["num_terms"],
        spacing=2.0 ** (np.floor(np.log2(rows["final_sum"])) - rows["accumulator"].map(FRACTION_BITS)),
    )


def merged(table: pd.DataFrame, column: str) -> pd.DataFrame:
    """Returns the table with the rows that differ in `column` alone made one, its values joined."""
    rest = [name for name in table if name != column]
    return table.groupby(rest, sort=False)[column].agg("; ".join).reset_index()[list(table)] if len(table) else table


def table_accumulation(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns the sum of every series beside the published one, the sum of its rounded terms and the spacing there."""
    rows = sums(frame)
    table = rows.assign(
        added=rows["method"].map(METHODS),
        terms=rows["term"] + rows["cast"].map({"none": ""}).fillna(", " + rows["cast"] + " cast"),
        error=rows["error"].map("{:+.1e}".format),
    )[["added", "accumulator", "terms", "sum", "published", "error"]]
    table["rounded terms, exact sum"] = rows["rounded_terms"].map("{:.4f}".format)
    table["spacing there"] = rows["spacing"].map(scientific)
    return merged(table, "added")


def figure_accumulation(frame: pd.DataFrame) -> Figure | None:
    """Left the error of the running sum, right half of the spacing over the sum: below the term, the term is added."""
    rows = ok_rows(frame, method="sequential").drop_duplicates(["accumulator", "term"])
    figure, (errors, gaps) = figures.panels(2, width=4.5, height=2.9)
    for row in rows.to_dict("records"):
        name, trace, style = row["term"], np.array(row["samples"]["running_sum"]), figures.STYLES[row["term"]]
        own, term = name == row["accumulator"], row["exact_sum"] / row["num_terms"]
        terms = np.arange(1, len(trace) + 1) * row["observed"]["trace_every"]
        # The error passes through 0, which a logarithmic axis does not have: the largest so far does not.
        error = np.maximum.accumulate(np.maximum(np.abs(trace - terms * term), 1e-8))
        errors.plot(terms, error, color=style.colour, linestyle=style.dash if own else "-", marker=style.marker,
                    markevery=0.12, markersize=5, markerfacecolor=style.colour if own else "white", linewidth=1.3,
                    label=f"{name} terms in {row['accumulator']}")  # fmt: skip
        if own and name != "fp32":
            edges = 2.0 ** np.arange(-7, math.log2(row["stall_predicted"]) + 1)
            gaps.stairs(edges[:-1] * 2.0 ** -(FRACTION_BITS[name] + 1), edges, baseline=None, color=style.colour)
            gaps.annotate(f"{name} stops", (edges[-1], term), (0, -50), textcoords="offset points", ha="center",
                          fontsize=8, arrowprops={"arrowstyle": "->", "color": style.colour})  # fmt: skip
            gaps.axhline(term, color="0.2", linewidth=1)
    for axis, which in itertools.product((errors, gaps), "xy"):
        figures.log_scale(axis, which, 10 if axis is errors else 2)
    errors.set(xlabel="terms added", ylabel="largest error so far")
    gaps.set(xlabel="running sum", ylabel="half of the spacing")
    gaps.set_title("where it is below the term (black), the term is added")
    figures.finish(figure, [errors, gaps], f"One hundredth added one by one, {frame.attrs['device']}", num_columns=3)
    return figure if len(rows) else None


def findings_accumulation(frame: pd.DataFrame) -> list[str]:
    """Says whether the published sums come out, where a 16-bit sum stops, and what better addition reaches."""
    rows, sentences = sums(frame), []
    known, mixed = rows[rows["published"] != "–"], rows[rows["cast"] != "none"].drop_duplicates("term")
    if len(known) and len(mixed):
        right = (known["sum"] == known["published"]).sum()
        errors = listing(mixed["error"].map(scientific) + " with " + mixed["term"] + " terms")
        share = span(mixed["term_error"] / mixed["error"], percent)
        text = f"{right} of {count(len(known), 'published sum')} come out to the fourth decimal. In an fp32 accumulator"
        sentences.append(f"{text} the error is {errors}; rounding the term makes {share} of it.")
    stopped = rows[rows["stall_measured"].notna()] if "stall_measured" in rows else rows.iloc[:0]
    text = "at {stall_measured:g} in {accumulator} (term {stall_terms:,.0f}; predicted {stall_predicted:g})"
    if parts := [text.format(**row) for row in stopped.to_dict("records")]:
        why = "there the term is at most half of the spacing and is rounded away"
        sentences.append(f"Added one by one, the sum stops {listing(parts)}: {why}.")
    if len(better := rows[rows["method"] != "sequential"]):
        off = ((better["final_sum"] - better["rounded_terms"]).abs() / better["spacing"]).max()
        coarse = better.loc[better["spacing"].idxmax()]
        sentences.append(
            f"Kahan and pairwise sums end within {number(off, 2)} spacings of the exact sum of the rounded terms. The "
            f"error of {number(abs(coarse['error']))} in {coarse['accumulator']} is the grid, not accuracy: terms sum "
            f"to {coarse['rounded_terms']:.4f}, and the format has only multiples of {coarse['spacing']:g} there."
        )
    return sentences


def dtypes(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns one row per model and part, in the order of the forward pass: model, part, fp16, bf16."""
    rows: dict[tuple, dict] = {}
    for record in ok_rows(frame).to_dict("records"):
        for part, dtype in record["observed"]["dtypes"]:
            line = rows.setdefault((record["model"], part), {"model": record["model"], "part": part})
            line[record["autocast"]] = dtype
    return pd.DataFrame(rows.values())


def table_dtypes(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns the dtypes of the small model's parts under autocast, and how many published dtypes are the same."""
    theirs = published.load("mixed_precision").query("kind == 'dtype'")
    theirs = theirs.replace({"component": {"feed_forward_output": "fc1_output"}})  # as one table calls it
    result = []
    for row in select(dtypes(frame), model="toy").to_dict("records"):
        others = select(theirs, component=row["part"])
        ours = others["autocast_dtype"].map({"float16": row.get("fp16"), "bfloat16": row.get("bf16")}).dropna()
        same = (ours == others["reported_dtype"][ours.index]).sum()
        dtypes_here = (row.get(short, "–") for short in ("fp16", "bf16"))
        result.append((f"`{row['part']}`", *dtypes_here, f"{same} of {len(ours)}"))
    return pd.DataFrame(result, columns=["part", "under fp16", "under bf16", "published dtypes that agree"])


def findings_dtypes(frame: pd.DataFrame) -> list[str]:
    """Says which parts of the transformer are float32 under autocast, and what the narrow ones cost the loss."""
    rows, losses, wide = dtypes(frame), usable(frame, "loss", "loss_fp32"), {}
    parts = rows[rows["model"] != "toy"]
    names = parts["part"].str.replace("blocks.*.", "").str.replace("blocks.*_", "block_").str.removesuffix("_output")
    for short in [short for short in ("bf16", "fp16") if short in parts and (parts[short] == "float32").any()]:
        wide.setdefault(listing(("`" + names[parts[short] == "float32"] + "`").unique(), 12), []).append(short)
    off = (losses["loss"] / losses["loss_fp32"] - 1).abs().groupby(losses["autocast"]).max()
    return [
        *(f"In the transformer, {' and '.join(shorts)} autocast leaves {full} in float32. What a product gives is "
          "narrow; the sums of the residual stream stay wide." for full, shorts in wide.items()),
        *(["Relative to fp32's, the loss on the same weights and data is off by at most "
           f"{listing(f'{scientific(value)} in {short}' for short, value in off.items())}."] if len(off) else []),
    ]  # fmt: skip


def normalisation_costs(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns the measured rows with `is_sound` (finite, no overflow) and `cost`: the error over fp32 statistics'."""
    keys, faults = ["norm", "setting", "input", "scale"], [f"{fault}_fraction" for fault in FAULTS]
    rows = ok_rows(frame)
    rows = rows.reindex(columns=list(dict.fromkeys([*rows, *faults, "epsilon"]))).fillna(dict.fromkeys(faults, 0))
    rows = rows.join(select(rows, statistics="fp32").set_index(keys)["relative_error"].rename("base"), on=keys)
    is_sound = (rows["nonfinite_fraction"] == 0) & (rows["overflowed_fraction"] == 0)
    return rows.assign(is_sound=is_sound, cost=(rows["relative_error"] / rows.pop("base")).where(is_sound))


def table_normalisation(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns for 16-bit statistics where they break, over the input's scales, and the largest error elsewhere."""
    rows, result = select(normalisation_costs(frame), statistics=["fp16", "bf16"]), []
    for (statistics, norm, setting), group in rows.groupby(["statistics", "norm", "setting"], sort=False):
        broken = {text: group["scale"][group[f"{fault}_fraction"] > 0] for fault, text in FAULTS.items()}
        result.append(
            {"statistics": statistics, "normalisation": NORMS[norm], "input": SETTINGS[setting]}
            | {text: span(scales, power) if len(scales) else "–" for text, scales in broken.items()}
            | {"error elsewhere": scientific(group["relative_error"][group["is_sound"]].max())}
            | {"over fp32's": times(group["cost"].max())}
        )
    return merged(pd.DataFrame(sorted(result, key=lambda line: line["statistics"], reverse=True)), "input")


def figure_normalisation(frame: pd.DataFrame) -> Figure | None:
    """Error over the input's scale: where digits are lost (a mean far from zero) and where range ends (a small ε)."""
    rows = normalisation_costs(frame)
    rows = rows[rows["statistics"] != "library"]
    figure, axes = figures.panels(2, width=4.5, height=2.9)
    for axis, norm, setting in zip(axes, ("layer_norm", "rms_norm"), ("offset", "small epsilon"), strict=True):
        of_panel = select(rows, norm=norm, setting=setting).sort_values("scale")
        for (dtype, statistics), line in of_panel.groupby(["input", "statistics"], sort=False):
            style, own, sound = figures.STYLES[dtype], dtype == statistics, line[line["is_sound"]]
            axis.plot(sound["scale"], sound["relative_error"], color=style.colour, marker=style.marker, markersize=5,
                      markerfacecolor=style.colour if own else "white", linestyle=style.dash if own else "-",
                      linewidth=1.3, label=f"{dtype} input, {statistics} statistics")  # fmt: skip
            figures.mark_failures(axis, line[~line["is_sound"]].assign(status="oom"), "scale", colour=style.colour)
        figures.log_scale(axis, "x")
        figures.log_scale(axis, "y")
        axis.set(xlabel="standard deviation of the input", ylabel="relative error")
        axis.set_title(f"{NORMS[norm]}, {SETTINGS[setting]}")
    title = f"Error of a normalisation against fp64, {frame.attrs['device']} (× overflow or no finite result)"
    figures.finish(figure, axes, title, num_columns=3)
    return figure


def findings_normalisation(frame: pd.DataFrame) -> list[str]:
    """Says what fp16 statistics lack, and what bf16's lack."""
    rows, sentences = normalisation_costs(frame), []
    fp16, bf16, library = (select(rows, statistics=name) for name in ("fp16", "bf16", "library"))
    if len(over := fp16[fp16["overflowed_fraction"] > 0]):
        first = over.loc[over["scale"].idxmin()]
        text = f"fp16 statistics lack range: a mean square overflows from a std of {power(first['scale'])} on "
        text += f"({NORMS[first['norm']]}, {SETTINGS[first['setting']]})"
        lost = fp16[(fp16["epsilon"] == 0) & (fp16["vanished_fraction"] > 0) & (fp16["nonfinite_fraction"] > 0)]
        for epsilon in dict.fromkeys(power(NORM_SETTINGS[setting][1]) for setting in lost["setting"]):
            text += f", and ε = {epsilon} rounds to 0, so that at {power(lost['scale'].min())} results are not finite"
        sentences.append(f"{text}. The squares, their sum and ε are what leaves the range.")
    if len(known := bf16.dropna(subset=["cost"])):
        worst, own = known.loc[known["cost"].idxmax()], library["cost"].dropna()
        text = f" (PyTorch's own functions have {span(own, '{:.2f}×'.format)} that error)" if len(own) else ""
        sentences.append(
            f"bf16 statistics break in {(~bf16['is_sound']).sum()} of {count(len(bf16), 'case')}, but have up to "
            f"{times(worst['cost'])} the error of fp32 statistics on the same input ({NORMS[worst['norm']]}, "
            f"{SETTINGS[worst['setting']]}): they lack digits, so a norm's statistics belong in fp32 in bf16 too{text}."
        )
    return sentences


def steps(benchmarking: pd.DataFrame, own: pd.DataFrame) -> pd.DataFrame:
    """Returns notebook 01's eager steps and this notebook's own, told apart by `origin`, "01" or "03".

    The two were timed in other sessions, perhaps on other hosts: times are compared within one of them alone.
    """
    theirs = select(benchmarking, phase=list(MIXED_PHASES), compile="none")
    theirs = select(theirs, size=list(own["size"]), context=list(own["context"])) if len(own) else theirs
    parts = [part.assign(origin=name) for name, part in (("01", theirs), ("03", own)) if len(part)]
    both = pd.concat([part.dropna(axis=1, how="all") for part in parts], ignore_index=True) if parts else own
    both.attrs |= benchmarking.attrs
    return both


def gains(steps: pd.DataFrame, origin: str) -> pd.DataFrame:
    """Returns notebook 01's precisions against its fp32, or 03's against bf16 autocast of the same session."""
    base, keys = {"01": ("fp32", []), "03": ("bf16", ["session"])}[origin]
    return forms.pairs(select(steps, origin=origin), "precision", base, keys=["size", "context", "phase", *keys])


def case_name(row: dict) -> str:
    return f"{PHASE_NAMES[row['phase']]} of {forms.case_name(row)}"


def table_gains(steps: pd.DataFrame) -> pd.DataFrame:
    """Returns times in fp32 and bf16 autocast and peak memory, each size at its shortest and longest context."""
    ratio, result = gains(steps, "01").set_index(["precision", "size", "context", "phase"]), []
    steps = steps if "01" in set(steps["origin"]) else steps.iloc[:0]
    rows = in_order(select(steps, context=[steps["context"].min(), steps["context"].max()]), ["size", "context"])
    for (size, context), group in rows.groupby(["size", "context"], sort=False):
        cells = group.set_index(["origin", "precision", "phase"]).to_dict("index")
        line = {"size": size, "context": context}
        for phase in MIXED_PHASES:
            text = " → ".join(cell(cells.get(("01", name, phase), {"status": "–"})) for name in ("fp32", "bf16"))
            if (key := ("bf16", size, context, phase)) in ratio.index:
                text = forms.arrow(ratio.loc[key]) + (" †" if ratio["launch_bound"][key] else "")
            line[PHASE_NAMES[phase]] = text
        for key in (("01", "fp32"), ("01", "bf16"), ("03", "bf16_pure")):
            row = cells.get((*key, "train_step"), {"status": "–"})
            line[f"peak, {NAMES[key[1]]}"] = cell({**row, "gib": row.get("peak_bytes", math.nan) / 2**30}, "gib")
        result.append(line)
    return pd.DataFrame(result)


def _of_gpu(profiles: pd.DataFrame | None) -> bool:
    return profiles is not None and len(profiles) > 0 and profiles.attrs.get("device_kind") == "cuda"


def findings_gains(steps: pd.DataFrame, profiles: pd.DataFrame | None = None) -> list[str]:
    """Says what bf16 autocast gives in time, by 02's `profiles` too, what fp16 and pure bf16 give, and peaks."""
    sentences, rows, own = [], select(gains(steps, "01"), precision="bf16"), gains(steps, "03")
    if len(busy := rows[~rows["launch_bound"]]):
        text = f"Where the device is busy, bf16 autocast is {forms.summary(busy, case_name)} against fp32, call time"
        sentences.append(f"{text}: the larger the model, the more of a pass is matrix products.")
        if _of_gpu(profiles):
            kernels, keys = whole_steps(profiles, attention="eager"), ["size", "context", "phase"]
            kernels = forms.pairs(kernels, "precision", "fp32", keys=keys, value="step_kernel_ms")
            sentences[0] += f" By a step's kernels alone, whatever its host, {forms.summary(kernels, case_name)}."
    groups = own[~own["launch_bound"]].groupby("precision")
    if parts := [f"{NAMES[precision]} is {forms.summary(rows, case_name)}" for precision, rows in groups]:
        sentences.append(
            f"Against bf16 autocast of the same session, device busy, call time: {'; '.join(parts)}. Pure bf16 has few "
            "casts and moves half the bytes; the scaler reads every gradient once more. "
            f"{count(own['launch_bound'].sum(), 'launch-bound pair')} are left out."
        )
    return sentences + findings_memory(steps)


def findings_memory(steps: pd.DataFrame) -> list[str]:
    """Says what a training step takes of fp32's peak memory, in exact bytes, and what fits in pure bf16 alone."""
    rows, parts, fp32 = ok_rows(steps, phase="train_step"), [], ("01", "fp32")
    if rows.empty:
        return []
    rows = rows.dropna(subset=["peak_bytes"]) if "peak_bytes" in rows else rows.assign(peak_bytes=math.nan).iloc[:0]
    wide = rows.set_index(["size", "context", "origin", "precision"])["peak_bytes"].unstack(["origin", "precision"])
    for key in [key for key in (("01", "bf16"), ("03", "bf16_pure")) if {key, fp32} <= set(wide)]:
        both = wide[[key, fp32]].dropna()
        more = sum(verdicts.exact(*pair) == verdicts.BEHIND for pair in both.itertuples(index=False, name=None))
        how = f"(more in {more or 'none'} of {count(len(both), 'case')})"
        parts.append(f"{NAMES[key[1]]} {span(both[key] / both[fp32])} {how}")
    if not parts:
        return []
    alone = [size for size in SIZES if set(select(rows, size=size)["precision"]) == {"bf16_pure"}]
    why = "Autocast keeps parameters, gradients and AdamW's state in fp32 and adds 16-bit weights."
    why += f" {listing(alone)} trains in pure bf16 alone." if alone else ""
    return [f"Peak memory of a training step over fp32's: {listing(parts)}. {why}"]


def table_casts(operators: pd.DataFrame) -> pd.DataFrame:
    """Returns operators, casts and the bytes that these move in a step of the smallest counted model, by precision."""

    def text(row: dict) -> str:
        casts = f" ({row['num_casts']:,.0f}, {number(row['cast_bytes'] / 2**20)} MiB)" if row["num_casts"] else ""
        return f"{row['num_operators']:,.0f}{casts}"

    rows = in_order(ok_rows(operators), ["size"])
    table = pivot(rows[rows["size"] == rows["size"].iloc[0]], ["phase"], "precision", text)
    return table.replace({"phase": PHASE_NAMES}).rename(columns=NAMES)


def findings_casts(operators: pd.DataFrame, profiles: pd.DataFrame | None = None) -> list[str]:
    """Says how many operators autocast adds, how many are casts, and what it saves of attention by 02's `profiles`."""
    rows, sentences, parts = ok_rows(operators), [], []
    for phase, passes in rows.groupby("phase", sort=False):
        num = passes.pivot_table(index="size", columns="precision", values=["num_operators", "num_casts"])
        if {("num_casts", "fp32"), ("num_casts", "bf16")} <= set(num):
            added, casts = (num[name, "bf16"] - num[name, "fp32"] for name in ("num_operators", "num_casts"))
            text = f"{span(added / num['num_operators', 'fp32'], percent)} to {PHASE_NAMES[phase]}"
            parts += [f"{text} ({span(casts / added, percent)} casts)"] if (added > 0).all() else []
    if parts:
        why = "a weight is cast once a pass, an activation wherever an operator in fp32 and a product meet"
        sentences.append(f"bf16 autocast adds operators to fp32's: {listing(parts)}; {why}.")
    if _of_gpu(profiles):
        theirs = published.load("attention_scores_precision")
        theirs = theirs.pivot(index="model", columns="dtype", values="attention_scores_ms")
        ours = select(attention_times(profiles), attention="eager", context=(context := profiles["context"].min()))
        ours = ours.pivot(index="size", columns="precision", values="core_us")
        sentences.append(
            f"In fp32 eager attention between its projections takes {span(ours['fp32'] / ours['bf16'])} its time under "
            f"bf16 autocast, at {context} tokens, kernels of inference; published for an RTX 5090, context not stated, "
            f"{span(theirs['float32'] / theirs['bfloat16_autocast'])}."
        )
    return sentences


def table_training(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns the final loss, the gradients that are 0 at the first and last look, and what never moved."""
    return pd.DataFrame(
        {"precision": NAMES[precision], "final loss (nats)": number(row["final_loss"])}
        | {"over fp32's": times(row["over_fp32"])}
        | {"logits' gradients that are 0 (first → last look)": " → ".join(zero_ends(row))}
        | {"norm gains never moved": percent(row["unmoved_gains"]), "skipped steps": int(row["num_skipped_steps"])}
        | {"loss scale": f"{row['final_loss_scale']:g}"}
        for precision, row in by_precision(frame).items()
    )


def zero_ends(row: dict) -> list[str]:
    """Returns the shares of the logits' gradients that are 0 at the first and the last look."""
    return [percent(row["samples"]["zero_logit_gradients"][at], 3) for at in (0, -1)]


def figure_training(frame: pd.DataFrame) -> Figure | None:
    """Left the loss over the steps, smoothed, right the share of the logits' gradients that are 0."""
    if not (rows := by_precision(frame)):
        return None
    figure, (loss, zeros) = figures.panels(2, width=4.5, height=2.9)
    for precision, row in rows.items():
        style, samples = figures.STYLES[precision], row["samples"]
        look = {"color": style.colour, "linestyle": style.dash, "marker": style.marker, "markersize": 4}
        smooth = pd.Series(samples["loss"], dtype=float).rolling(15, center=True, min_periods=1).median()
        loss.plot(smooth.index + 1, smooth, markevery=0.15, label=NAMES[precision], **look)
        zeros.plot([step + 1 for step in samples["look_step"]], samples["zero_logit_gradients"], **look)
    figures.log_scale(loss, "y")
    loss.set(xlabel="step", ylabel="loss (nats), median of 15 steps")
    zeros.set(xlabel="step", ylabel="logits' gradients that are 0")
    zeros.yaxis.set_major_formatter(PercentFormatter(1.0))
    task = f"{row['num_steps']:.0f} steps of {row['size']}, batch {row['batch']:.0f}, context {row['context']:.0f}"
    figures.finish(figure, [loss, zeros], f"{task}, {frame.attrs['device']}", num_columns=3)
    return figure


def findings_training(frame: pd.DataFrame) -> list[str]:
    """Says how far each precision's final loss is from fp32's, what underflows in fp16 and what bf16 cannot add."""
    rows, sentences = by_precision(frame), []
    if over := {name: row["over_fp32"] for name, row in rows.items() if name != "fp32" and row["over_fp32"] > 0}:
        parts = listing(f"{NAMES[name]} {times(over[name])}" for name in sorted(over, key=over.get))
        base = number(rows["fp32"]["final_loss"])
        sentences = [f"Final loss over fp32's {base} nats: {parts}. One run each, so small differences say nothing."]
    if {"fp16", "fp16_unscaled"} <= rows.keys():
        (first, last), scaled = zero_ends(rows["fp16_unscaled"]), rows["fp16"]
        sentences.append(
            f"Unscaled, {first} of the logits' fp16 gradients are 0 at the first look and {last} at the last; with a "
            f"loss scale of {scaled['final_loss_scale']:g}, {zero_ends(scaled)[-1]} at the last, and "
            f"{scaled['num_skipped_steps']:g} steps skipped: gradients shrink with the loss, and the scale lifts them."
        )
    if (pure := rows.get("bf16_pure", {})).get("unmoved_gains", 0) > 0:
        rate, half = pure["learning_rate"], 2.0 ** -(FRACTION_BITS["bf16"] + 2)
        why = f": an update, about the learning rate of {rate:g}, is lost below half the spacing under 1, {half:.2g}"
        text = f"Pure bf16 never moved {percent(pure['unmoved_gains'])} of the norm gains"
        sentences.append(f"{text}{why if rate < half else ''}.")
    return sentences


def front(chapter: Chapter) -> list[tuple[str, str]]:
    """Returns the finding of this chapter for the front page with the heading that it links to."""
    rows = by_precision(chapter.records("training"))
    if not {"fp32", "bf16", "bf16_pure"} <= rows.keys():
        return []
    benchmarking = Chapter("01_benchmarking", device=chapter.device, output=str(chapter.folder.parent))
    memory = findings_memory(steps(benchmarking.records("steps"), chapter.records("steps")))
    pure, autocast = (times(rows[name]["over_fp32"]) for name in ("bf16_pure", "bf16"))
    moved = f"{percent(rows['bf16_pure']['unmoved_gains'])} of pure bf16's norm gains never moved: updates round away."
    claim = f"**Trained in pure bf16 the loss ends at {pure} fp32's, in bf16 autocast at {autocast}.** {moved}"
    return [(" ".join([claim, *memory]), "Training in each precision")]
