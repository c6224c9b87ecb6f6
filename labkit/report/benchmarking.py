"""Notebook 01 from its records: the roofs, the phases of a step, warm-up, precision, compilation, utilisation.

Every function takes frames of records as `Chapter.records` returns them.
"""

import statistics

import pandas as pd
from matplotlib.figure import Figure

from labkit import accounting, published
from labkit.configs import COMPILE_MODES, LAUNCH_BOUND, PRECISIONS, SIZES, WARMUP_COUNTS, WARMUP_MEASURED_STEPS
from labkit.report import figures, forms, verdicts
from labkit.report.findings import count, listing, number, percent, span, times
from labkit.report.forms import case_name, name, shown
from labkit.report.tables import PHASE_NAMES, cell, in_order, ok_rows, pivot, select

CASE = ("size", "context", "precision")
TIMER_AGREEMENT = 0.02
"""The timer's methods should agree this well on one kernel."""


def table_sizes(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns the dimensions and parameters of the sizes in `frame`."""
    sizes = [SIZES[size] for size in SIZES if size in set(frame["size"])]
    return pd.DataFrame(
        {
            "size": config.name,
            "list of sizes": config.edition,
            "d_model": f"{config.d_model:,}",
            "d_ff": f"{config.d_ff:,}",
            "layers": config.num_layers,
            "heads": config.num_heads,
            "parameters": f"{accounting.num_parameters(config) / 1e6:,.1f} M",
        }
        for config in sizes
    )


def table_roofs(ceilings: pd.DataFrame, steps: pd.DataFrame) -> pd.DataFrame:
    """Returns the rates measured beside the datasheet's, and the range over the sessions that divide other rows."""
    rows = []
    for row in ceilings.to_dict("records"):
        is_copy = row["kind"] == "copy"
        rate = row.get("achieved_gb_per_s" if is_copy else "achieved_tflops")
        used = steps if is_copy else select(steps, precision=row["precision"])
        used = used[(used["phase"] == "optimizer_step") == is_copy]["ceiling"].dropna() if "ceiling" in used else used
        rows.append(
            {
                "roof": "copy, read + write (GB/s)" if is_copy else f"matrix product, {row['precision']} (TFLOP/s)",
                "measured": cell({**row, "rate": rate}, "rate"),
                "datasheet": cell(row, "datasheet"),
                "measured / datasheet": cell(row, "datasheet_fraction", percent),
                "over all sessions": span(used, number) if len(used) else "–",
            }
        )
    return pd.DataFrame(rows)


def findings_roofs(timer: pd.DataFrame, steps: pd.DataFrame) -> list[str]:
    """Says whether the timer's methods agree with an independent measurement, and what utilisation is divided by."""
    medians = ok_rows(timer).set_index("phase")["median_ms"]
    if "independent" not in medians:
        return []
    deviation = (medians / medians.pop("independent") - 1).dropna()
    worst = deviation.abs().idxmax()
    word = "agree" if abs(deviation[worst]) <= TIMER_AGREEMENT else "do not agree"
    return [
        f"The timer's methods {word} with an independent measurement of one memory-bound kernel to within "
        f"{percent(TIMER_AGREEMENT)}: the largest difference is {percent(abs(deviation[worst]))} ({worst}).",
        "Each utilisation below divides by the rate measured in its own session, not by the newest one.",
    ]


def figure_phases(steps: pd.DataFrame) -> Figure | None:
    """One panel per size: forward, backward, optimizer step and training step over the context, in bf16 and fp32."""
    rows = select(steps, precision=["fp32", "bf16"], phase=["forward", "backward", "optimizer_step", "train_step"])
    if ok_rows(rows).empty:
        return None
    sizes = [size for size in SIZES if size in set(rows["size"])]
    figure, axes = figures.panels(len(sizes))
    for axis, size in zip(axes, sizes, strict=True):
        for phase in ("train_step", "backward", "forward", "optimizer_step"):
            of_phase = select(rows, size=size, phase=phase)
            line = select(of_phase, precision="bf16" if "bf16" in set(of_phase["precision"]) else "fp32")
            figures.line_with_band(axis, line, "context", label=PHASE_NAMES[phase], style=figures.STYLES[phase])
        fp32 = select(rows, size=size, phase="train_step", precision="fp32")
        style = figures.Style("0.5", "x", "--")
        figures.line_with_band(axis, fp32, "context", label="training step, fp32", style=style)
        figures.context_axis(axis, rows["context"].unique())
        figures.log_time_axis(axis, "call time (ms)")
        axis.set_title(size)
    figures.finish(
        figure, axes, f"Phases of a step, bf16 autocast and eager, {steps.attrs['device']} (× out of memory)"
    )
    return figure


def table_phases(steps: pd.DataFrame) -> pd.DataFrame:
    """Returns the median of each phase by size, in fp32 and bf16, at the shown context."""
    rows = select(shown(steps), precision=["fp32", "bf16"])
    phases = select(rows, phase=["forward", "backward", "optimizer_step", "train_step"])
    table = pivot(phases, ["size", "precision"], "phase").rename(columns=PHASE_NAMES)
    wide = ok_rows(rows).pivot_table(index=["size", "precision"], columns="phase", values="median_ms")
    if {"backward", "forward"} <= set(wide):
        ratio = (wide["backward"] / wide["forward"]).to_dict()
        keys = zip(table["size"], table["precision"], strict=True)
        table["backward / forward"] = [times(ratio.get(key)) for key in keys]
    table.insert(1, "context", rows["context"].iloc[0])
    return table


def findings_phases(steps: pd.DataFrame) -> list[str]:
    """Says what backward costs where the device is busy, how near AdamW is to the copy rate, and what fits."""
    sentences = []
    wide = {key: group.set_index("phase") for key, group in ok_rows(steps).groupby(list(CASE))}
    for precision in ("fp32", "bf16"):
        ratios = [
            rows["median_ms"]["backward"] / rows["median_ms"]["forward"]
            for key, rows in wide.items()
            if key[2] == precision and {"forward", "backward"} <= set(rows.index)
            and not any(verdicts.launch_bound(rows.loc[phase].to_dict()) for phase in ("forward", "backward"))
        ]  # fmt: skip
        if ratios:
            sentences.append((precision, span(ratios), len(ratios)))
    if sentences:
        parts = [
            f"{ratio} the time of forward in {precision} ({count(n, 'case')})" for precision, ratio, n in sentences
        ]
        text = f"Where the device is busy, backward takes {' and '.join(parts)}; it has twice the FLOPs."
        sentences = [text]
    adamw = ok_rows(steps, phase="optimizer_step").dropna(subset=["ceiling_fraction"])
    if len(adamw):
        largest = adamw.loc[adamw["achieved_gb_per_s"].idxmax()]
        sentences.append(
            f"AdamW moves 28 bytes per parameter at up to {percent(largest['ceiling_fraction'])} of the copy rate "
            f"({largest['size']}): its time follows the parameters, not the context."
        )
    lost = forms.out_of_memory(select(steps, phase="train_step"), ["size"]).dropna(subset=["out_of_memory"])
    parts = [f"{row['size']} from {int(row['out_of_memory']):,} tokens on" for row in lost.to_dict("records")]
    if parts:
        sentences.append(f"A training step runs out of memory for {listing(parts)}; every other measured one fits.")
    return sentences + forms.failures(steps)


def warmup_statistics(warmup: pd.DataFrame) -> pd.DataFrame:
    """Returns one row per size, context, phase and warm-up count, read off the trace of a fresh process.

    Columns: size, context, phase, warmup, mean_ms, std_ms, first_ms, second_ms, steady_ms, n; mean and standard
    deviation over the ten steps after the warm-up.
    """
    rows = []
    for record in in_order(ok_rows(warmup), ["size", "context", "phase"]).to_dict("records"):
        trace = record["samples"].get("step_ms", [])
        for num_warmup in WARMUP_COUNTS:
            window = trace[num_warmup : num_warmup + WARMUP_MEASURED_STEPS]
            if len(window) > 1:
                rows.append(
                    {name: record[name] for name in ("size", "context", "phase")}
                    | {"warmup": num_warmup, "mean_ms": statistics.fmean(window), "std_ms": statistics.stdev(window)}
                    | {"first_ms": trace[0], "second_ms": trace[1], "steady_ms": statistics.median(trace[5:] or trace)}
                    | {"n": len(window)}
                )
    return pd.DataFrame(rows)


def table_warmup(warmup: pd.DataFrame) -> pd.DataFrame:
    """Returns mean ± std of ten steps after each warm-up count, forward + backward, one row per size."""
    rows = warmup_statistics(shown(select(warmup, phase="forward_backward")))
    result = []
    for size, group in rows.groupby("size", sort=False) if len(rows) else []:
        first = group.iloc[0]
        cells = dict.fromkeys((f"after {num_warmup}" for num_warmup in WARMUP_COUNTS), "–") | {
            f"after {row['warmup']}": f"{number(row['mean_ms'])} ± {number(row['std_ms'], 2)}"
            for row in group.to_dict("records")
        }
        result.append({"size": size, "context": first["context"], "first step": number(first["first_ms"]), **cells})
    return pd.DataFrame(result)


def findings_warmup(warmup: pd.DataFrame) -> list[str]:
    """Says what the first steps cost, and after how many warm-up steps the mean is the steady one."""
    rows = warmup_statistics(warmup)
    if rows.empty:
        return []
    cold = rows[rows["warmup"] == 0]
    first = cold["first_ms"] / cold["steady_ms"]
    worst = cold.loc[first.idxmax()]
    sentences = [
        f"The first step of a process takes {span(first)} the steady time (most: {PHASE_NAMES[worst['phase']]} of "
        f"{case_name(worst)}, {number(worst['first_ms'])} ms against {number(worst['steady_ms'])} ms): the library "
        "handles are made, kernels are loaded onto the device and the allocator asks the driver for memory."
    ]
    wide = rows.pivot_table(index=["size", "context", "phase"], columns="warmup", values="mean_ms")
    last = max(WARMUP_COUNTS)
    if {1, last} <= set(wide):
        off = {n: int(((wide[n] / wide[last] - 1).abs() > verdicts.LEVEL_BAND).sum()) for n in wide if n != last}
        text = listing(f"{off[n]} with {n}" for n in off)
        sentences.append(
            f"Against {last} warm-up steps the mean is off by more than {percent(verdicts.LEVEL_BAND)} in {text} "
            f"warm-up steps, of {len(wide)} traces: what one or two steps leave is autotuning and clocks that settle."
        )
    return sentences


def table_pace(steps: pd.DataFrame) -> pd.DataFrame:
    """Returns for each size and precision how much of a training step the host needs to issue it."""
    rows = ok_rows(shown(steps), phase="train_step", precision=["fp32", "bf16"])
    return pd.DataFrame(
        {
            "size": row["size"],
            "context": row["context"],
            "precision": row["precision"],
            "step (ms)": number(row["median_ms"]),
            "issued after (ms)": number(row.get("launch_median_ms")),
            "share": percent(row["launch_median_ms"] / row["host_median_ms"]) if row.get("launch_median_ms") else "–",
            "bound by": "host" if verdicts.launch_bound(row) else "device",
        }
        for row in in_order(rows, ["precision", "size"]).to_dict("records")
    )


def findings_pace(steps: pd.DataFrame) -> list[str]:
    """Says which steps are launch-bound, and that their time does not follow the context."""
    rows = ok_rows(steps, phase="train_step")
    bound = rows[[verdicts.launch_bound(row) for row in rows.to_dict("records")]]
    if bound.empty:
        return [f"None of {count(len(rows), 'training step')} is launch-bound: the device always has work waiting."]
    widest = max(bound.groupby(["size", "precision"]), key=lambda item: len(item[1]))[1].sort_values("context")
    sizes = listing(size for size in SIZES if size in set(bound["size"]))
    sentences = [
        f"{len(bound)} of {count(len(rows), 'training step')} are launch-bound: the host needs {percent(LAUNCH_BOUND)} "
        f"or more of the time to issue the kernels. They are {sizes}, up to context {bound['context'].max():,}; their "
        "times are those of this host and come out differently on another one."
    ]
    if len(widest) > 1:
        low, high = widest.iloc[0], widest.iloc[-1]
        sentences.append(
            f"{low['size']} in {low['precision']} takes {number(low['median_ms'])} ms at context {low['context']} and "
            f"{number(high['median_ms'])} ms at {high['context']}, {times(high['flops'] / low['flops'])} the FLOPs. A "
            "longer context or a larger batch is free until the device is busy."
        )
    return sentences


def modes(steps: pd.DataFrame) -> pd.DataFrame:
    """Returns training steps by `mode`: precision, and how much of the model is compiled ("bf16", "bf16 regional")."""
    rows = select(steps, phase="train_step")
    compiled = rows["compile"].where(rows["compile"] != "none", "")
    return rows.assign(mode=(rows["precision"] + " " + compiled).str.strip())


def figure_modes(steps: pd.DataFrame) -> Figure | None:
    """Training step over fp32 eager by size, one panel per compile mode, one line per precision."""
    rows = modes(shown(steps))
    ratio = forms.pairs(rows, "mode", "fp32", keys=["size"])
    if ratio.empty:
        return None
    sizes_of = {
        mode: set(ratio[ratio["mode"].isin([_mode(p, mode) for p in PRECISIONS])]["size"]) for mode in COMPILE_MODES
    }
    present = [mode for mode, measured in sizes_of.items() if len(measured) > 1] or ["none"]
    figure, axes = figures.panels(len(present), width=4.5 if len(present) < 3 else 3.0)
    sizes = [size for size in SIZES if size in set(ratio["size"])]
    for axis, mode in zip(axes, present, strict=True):
        for precision in PRECISIONS:
            line = ratio[ratio["mode"] == _mode(precision, mode)]
            at = [sizes.index(size) for size in line["size"]]
            style = figures.STYLES[precision]
            axis.plot(at, line["ratio"], color=style.colour, marker=style.marker, linestyle=style.dash, label=precision)
            for x, row in zip(at, line.to_dict("records"), strict=True):
                axis.plot([x, x], [row["low"], row["high"]], color=style.colour, linewidth=3, alpha=0.3)
        axis.axhline(1, color="0.4", linewidth=0.8)
        axis.set_xticks(range(len(sizes)), sizes, rotation=30)
        axis.set_title({"none": "eager", "regional": "blocks compiled", "whole": "whole model compiled"}[mode])
        axis.set_ylabel("fp32 eager time / time")
        axis.set_ylim(0, 1.08 * ratio["high"].max())
    context = rows["context"].iloc[0]
    figures.finish(
        figure, axes, f"Speed of a training step over fp32 eager, call time, context {context}, {steps.attrs['device']}"
    )
    return figure


def _mode(precision: str, compile_mode: str) -> str:
    return precision if compile_mode == "none" else f"{precision} {compile_mode}"


def table_modes(steps: pd.DataFrame) -> pd.DataFrame:
    """Returns the training step by size in every precision and compile mode, at the shown context."""
    table = pivot(modes(shown(steps)), ["size"], "mode")
    order = [_mode(precision, mode) for mode in COMPILE_MODES for precision in PRECISIONS]
    return table[["size", *[mode for mode in order if mode in table]]]


def findings_modes(steps: pd.DataFrame) -> list[str]:
    """Says where bf16 and compiling are ahead, apart for launch-bound and device-bound rows."""
    sentences = []
    rows = modes(steps)
    precision = forms.pairs(rows, "mode", "fp32", keys=["size", "context"])
    bf16 = precision[precision["mode"] == "bf16"]
    for bound, text in ((False, "Where the device is busy"), (True, "Where launches bind")):
        part = bf16[bf16["launch_bound"] == bound]
        if len(part):
            why = "" if not bound else "; each cast is one more launch, and faster matrix products save nothing"
            sentences.append(f"{text}, bf16 autocast is {forms.summary(part, case_name)} against fp32, call time{why}.")
    eager = forms.pairs(select(rows, precision="bf16"), "compile", "none", keys=["size", "context"])
    regional = eager[eager["compile"] == "regional"]
    first = select(steps, phase="compile", compile="regional", status="ok")["median_ms"] / 1e3
    if len(regional):
        cost = f"; the first call takes {span(first, lambda s: f'{number(s)} s')}" if len(first) else ""
        sentences.append(
            f"Compiling each block in bf16 is {forms.summary(regional, case_name)} against eager, call time: "
            f"elementwise kernels are fused and fewer are launched{cost}."
        )
    return sentences


def figure_utilisation(steps: pd.DataFrame) -> Figure | None:
    """One panel per precision: achieved TFLOP/s of a training step over context, a line per size, and the roofs."""
    rows = select(steps, phase="train_step", compile=["none", "regional"])
    if ok_rows(rows).empty:
        return None
    precisions = [precision for precision in PRECISIONS if precision in set(ok_rows(rows)["precision"])]
    figure, axes = figures.panels(len(precisions))
    for axis, precision in zip(axes, precisions, strict=True):
        measured = ok_rows(rows, precision=precision)
        for size in [size for size in SIZES if size in set(measured["size"])]:
            style = figures.STYLES[size]
            for mode, label, fill in (("none", size, style.colour), ("regional", "blocks compiled", "white")):
                line = select(measured, size=size, compile=mode).sort_values("context")
                axis.plot(line["context"], line["achieved_tflops"], c=style.colour, marker=style.marker, label=label,
                          markersize=4, linestyle="-" if mode == "none" else ":", markerfacecolor=fill)  # fmt: skip
        if len(roof := measured["ceiling"].dropna()):
            axis.axhline(roof.median(), color="0.2", linestyle="--", linewidth=1, label="measured matrix product")
        if len(known := measured.dropna(subset=["datasheet_fraction"])):
            peak = (known["achieved_tflops"] / known["datasheet_fraction"]).iloc[-1]
            axis.axhline(peak, color="0.2", linestyle=":", linewidth=1, label="datasheet")
        figures.context_axis(axis, measured["context"].unique())
        axis.set_ylim(bottom=0)
        axis.set_ylabel("model FLOP rate (TFLOP/s)")
        axis.set_title(precision)
    figures.finish(
        figure, axes, f"Model FLOP rate of a training step, call time, {steps.attrs['device']}", num_columns=5
    )
    return figure


def table_utilisation(steps: pd.DataFrame) -> pd.DataFrame:
    """Returns the best utilisation per precision and compile mode, and the convention that halves causal attention."""
    rows = ok_rows(steps, phase="train_step", compile=["none", "regional"]).dropna(subset=["ceiling_fraction"])
    result = []
    for (precision, mode), group in rows.groupby(["precision", "compile"]):
        row = group.loc[group["ceiling_fraction"].idxmax()]
        result.append(
            {
                "precision": precision,
                "compile": mode,
                "best case": case_name(row),
                "tokens/s": number(row["tokens_per_s"]),
                "TFLOP/s": number(row["achieved_tflops"]),
                "of measured roof": percent(row["ceiling_fraction"]),
                "of datasheet": percent(row["datasheet_fraction"]),
                "of measured roof, causal FLOPs": percent(row["ceiling_fraction"] * row["flops_causal"] / row["flops"]),
            }
        )
    return in_order(pd.DataFrame(result), ["precision", "compile"]) if result else pd.DataFrame()


def findings_utilisation(steps: pd.DataFrame) -> list[str]:
    """Says which step comes nearest to its roof, eager and compiled."""
    rows = ok_rows(steps, phase="train_step").dropna(subset=["ceiling_fraction"])
    parts = []
    for precision in PRECISIONS:
        of_precision = select(rows, precision=precision)
        best = {
            mode: of_precision[of_precision["compile"] == mode]["ceiling_fraction"].max()
            for mode in ("none", "regional")
            if mode in set(of_precision["compile"])
        }
        if best:
            words = [f"{percent(value)} {'eager' if mode == 'none' else 'compiled'}" for mode, value in best.items()]
            parts.append(f"{' and '.join(words)} in {precision}")
    if not parts:
        return []
    return [
        f"At best a training step reaches {listing(parts)} of the matrix product's measured rate: the faster the "
        "products, the larger the share of everything else in the step."
    ]


def published_steps(steps: pd.DataFrame) -> pd.DataFrame:
    """Returns published step times beside ours of the same size, context, batch, precision, compile mode and phase.

    Of a source's warm-up study only the rows with most warm-up steps count.
    """
    theirs = published.step_times()
    theirs = theirs[theirs["status"] == "ok"]
    keys = ["size", "context", "batch", "precision", "compile", "phase"]
    warm = theirs["warmup_steps"].fillna(99)
    theirs = theirs.assign(warm=warm).sort_values("warm").drop_duplicates(["source", "gpu", *keys], keep="last")
    theirs = theirs[theirs["context"].notna() & theirs["batch"].notna()].astype({"context": int, "batch": int})
    return in_order(forms.matched(theirs, steps, keys), ["gpu", "size", "context", "phase"])


def table_published(steps: pd.DataFrame) -> pd.DataFrame:
    """Returns published training times beside ours, spread over the GPUs."""
    rows = published_steps(steps).sort_values(["gpu", "context"], ascending=[True, False], kind="stable")
    compiled = rows["compile"].map({"none": "", "regional": ", blocks compiled", "whole": ", compiled"})
    return forms.published_table(rows.assign(compiled=compiled), lambda row: name(row) + row["compiled"])


def findings_published(steps: pd.DataFrame) -> list[str]:
    """Says what separates the published times from ours, over the training phases of one GPU."""
    rows = published_steps(steps)
    parts = [
        f"{gpu} {span(group['ratio'])} ({count(len(group), 'time')})"
        for gpu, group in rows.groupby("gpu")
        if len(group) > 2
    ]
    if not parts:
        return []
    return [
        f"Published time over ours: {listing(parts)}. The published kind of time is unknown, so these say that ours "
        "are plausible, not that one device is faster: an H100 and an H200 have the same tensor cores, and "
        "what separates them here is the host and the software."
    ]


def front(chapter) -> list[tuple[str, str]]:
    """Returns the findings of this chapter for the front page, each with the heading that it links to."""
    steps = modes(shown(chapter.records("steps", "compile")))
    largest = [size for size in SIZES if size in set(ok_rows(steps)["size"])]
    found = []
    if largest:
        row = ok_rows(steps, size=largest[-1]).set_index("mode")["median_ms"]
        if {"fp32", "bf16", "bf16 regional"} <= set(row.index):
            context = steps["context"].iloc[0]
            found.append(
                f"**A training step of {largest[-1]} at {context} tokens takes {number(row['fp32'])} ms in fp32, "
                f"{number(row['bf16'])} ms in bf16 autocast and {number(row['bf16 regional'])} ms with its blocks "
                f"compiled** (call time), {times(row['fp32'] / row['bf16 regional'])} faster in all."
            )
    sentences = [(text, "Precision and compilation") for text in found]
    pace = findings_pace(chapter.records("steps")) if len(steps) else []
    return sentences + [(f"**Small models wait for the host.** {text}", "Who sets the pace") for text in pace[:1]]


def symptoms(chapter) -> list[dict[str, str]]:
    """Returns rows for the front page's table of symptoms, with what each remedy gave here."""
    rows = modes(chapter.records("steps", "compile"))
    if ok_rows(rows).empty:
        return []
    gains = forms.pairs(select(rows, precision="bf16"), "compile", "none", keys=["size", "context"])
    precision = forms.pairs(rows, "mode", "fp32", keys=["size", "context"])
    busy = precision[(precision["mode"] == "bf16") & ~precision["launch_bound"]]
    found = []
    if len(bound := gains[gains["launch_bound"]]):
        found.append(
            {
                "what you see": "the device idles between kernels; the time does not follow the context",
                "what bounds it": "the host, which launches kernels too slowly",
                "what to do": "compile; a larger batch; a CUDA graph",
                "what it gave here": f"compiled: {span(bound['ratio'])} (call time)",
            }
        )
    if len(busy):
        found.append(
            {
                "what you see": "matrix products take most of the kernel time",
                "what bounds it": "the tensor cores, at the rate of the precision",
                "what to do": "bf16 autocast",
                "what it gave here": f"{span(busy['ratio'])} over fp32 (call time)",
            }
        )
    return found
