"""Notebook 01 from frames of its records: roofs, phases of a step, warm-up, precision, compilation, utilisation."""

import math
import statistics
from operator import itemgetter

import pandas as pd
from matplotlib.figure import Figure

from labkit import accounting, published
from labkit.configs import COMPILE_MODES, LAUNCH_BOUND, PRECISIONS, SIZES, WARMUP_COUNTS, WARMUP_MEASURED_STEPS
from labkit.report import figures, forms, launches, verdicts
from labkit.report.findings import count, listing, number, percent, span, times
from labkit.report.forms import case_name, name, shown
from labkit.report.tables import PHASE_NAMES, cell, in_order, ok_rows, pivot, select, usable

CASE = ["size", "context", "precision"]
SHOWN_PHASES = ["train_step", "backward", "forward", "optimizer_step"]
TRACE = ["size", "context", "phase"]
MODES = {f"{p} {mode}".removesuffix(" none"): (p, mode) for mode in COMPILE_MODES for p in PRECISIONS}
"""Precision and compile mode by name: "bf16", "bf16 regional"."""

SYMPTOM = ("what you see", "what bounds it", "what to do", "what it gave here")
TIMER_AGREEMENT = 0.02
"""The timer's methods should agree this well on one kernel."""


def sizes_in(frame: pd.DataFrame) -> list[str]:
    """Returns the sizes in `frame`, in the order in which this project lists them."""
    return [size for size in SIZES if size in set(frame["size"])]


def table_sizes(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns the dimensions and parameters of the sizes in `frame`."""
    return pd.DataFrame(
        {"size": config.name, "list of sizes": config.edition, "d_model": f"{config.d_model:,}"}
        | {"d_ff": f"{config.d_ff:,}", "layers": config.num_layers, "heads": config.num_heads}
        | {"parameters": f"{accounting.num_parameters(config) / 1e6:,.1f} M"}
        for config in map(SIZES.get, sizes_in(frame))
    )


def table_roofs(ceilings: pd.DataFrame) -> pd.DataFrame:
    """Returns the rates beside the datasheet's, and sustained, with the power."""
    rows = []
    for row in ceilings.to_dict("records"):
        if row["kind"] == "copy":
            roof, rate = "copy, read + write (GB/s)", "achieved_gb_per_s"
        else:
            roof, rate = f"matrix product, {row['precision']} (TFLOP/s)", "achieved_tflops"
        rows.append(
            {"roof": roof, "measured": cell(row, rate), "datasheet": cell(row, "datasheet")}
            | {"measured / datasheet": cell(row, "datasheet_fraction", percent)}
        )
        if "sustained_ms" in ceilings:
            reason = row.get("no_energy")
            sustained = rate.replace("achieved", "sustained")
            every = verdicts.by_session(row, sustained).values()
            rows[-1] |= {"sustained": cell(row, sustained), "all sessions": span(every, number) if every else "–"}
            rows[-1] |= {"power (W)": reason if isinstance(reason, str) else cell(row, "watts")}
            rows[-1] |= {"TFLOP/J": cell(row, "tflop_per_joule"), "SM clock (MHz)": cell(row, "sm_clock_mhz")}
    return pd.DataFrame(rows)


def findings_roofs(timer: pd.DataFrame) -> list[str]:
    """Says whether the timer's methods agree with an independent measurement."""
    medians = ok_rows(timer).set_index("phase")["median_ms"]
    methods = medians.drop("independent", errors="ignore")
    deviation = (methods / medians.get("independent", math.nan) - 1).dropna().abs()
    if deviation.empty:
        return []
    word = "agree" if deviation.max() <= TIMER_AGREEMENT else "do not agree"
    return [
        f"The timer's methods {word} with an independent measurement of one memory-bound kernel to within "
        f"{percent(TIMER_AGREEMENT)}: the largest difference is {percent(deviation.max())} ({deviation.idxmax()}).",
    ]


def figure_phases(steps: pd.DataFrame) -> Figure | None:
    """One panel per size: forward, backward, optimizer step and training step over the context, in bf16 and fp32."""
    rows = select(steps, precision=["fp32", "bf16"], phase=SHOWN_PHASES)
    if ok_rows(rows).empty:
        return None
    figure, axes = figures.panels(rows["size"].nunique())
    for axis, (size, of_size) in zip(axes, in_order(rows, ["size"]).groupby("size", sort=False), strict=True):
        for phase in SHOWN_PHASES:
            of_phase = select(of_size, phase=phase)
            line = select(of_phase, precision="bf16" if "bf16" in set(of_phase["precision"]) else "fp32")
            figures.line_with_band(axis, line, "context", label=PHASE_NAMES[phase], style=figures.STYLES[phase])
        fp32 = select(of_size, phase="train_step", precision="fp32")
        style = figures.Style("0.5", "D", "--")  # a cross is what ran out of memory
        figures.line_with_band(axis, fp32, "context", label="training step, fp32", style=style)
        figures.context_axis(axis, rows["context"].unique())
        figures.log_time_axis(axis, "call time (ms)")
        axis.set_title(size)
    title = f"Phases of a step, eager, bf16 autocast unless said, {steps.attrs['device']} (× out of memory)"
    figures.finish(figure, axes, title)
    return figure


def passes(steps: pd.DataFrame) -> pd.DataFrame:
    """Returns the time of backward over that of forward of each case; columns as of `forms.pairs`."""
    return forms.pairs(select(steps, phase=["forward", "backward"]), "phase", "backward", keys=CASE)


def table_phases(steps: pd.DataFrame) -> pd.DataFrame:
    """Returns the median of each phase by size, in fp32 and bf16, at the shown context; no ratio of what a host set."""
    rows = select(shown(steps), precision=["fp32", "bf16"], phase=SHOWN_PHASES)
    table = pivot(rows, CASE, "phase").rename(columns=PHASE_NAMES)
    if len(ratio := select(passes(rows), launch_bound=False).set_index(CASE)["ratio"].map(times)):
        cases = table[CASE].itertuples(index=False, name=None)
        table["backward / forward, device busy"] = [ratio.get(case, "–") for case in cases]
    return table.drop(columns="context")


def findings_phases(steps: pd.DataFrame) -> list[str]:
    """Says what backward costs where the device is busy, how near AdamW is to the copy rate, and what fits."""
    sentences = []
    busy = in_order(select(passes(steps), launch_bound=False, precision=["fp32", "bf16"]), ["precision"])
    parts = [
        f"{span(group['ratio'])} the time of forward in {precision} ({count(len(group), 'case')})"
        for precision, group in busy.groupby("precision", sort=False)
    ]
    if parts:
        sentences.append(f"Where the device is busy, backward takes {' and '.join(parts)}; it has twice the FLOPs.")
    adamw = ok_rows(steps, phase="optimizer_step").dropna(subset=["ceiling_fraction"])
    if len(adamw):
        largest = adamw.loc[adamw["achieved_gb_per_s"].idxmax()]
        sentences.append(
            f"AdamW moves 28 bytes per parameter at up to {percent(largest['ceiling_fraction'])} of the copy rate "
            f"({largest['size']}): its time follows the parameters, not the context."
        )
    lost = forms.out_of_memory(select(steps, phase="train_step"), ["size"]).dropna(subset=["out_of_memory"])
    if len(lost):
        parts = listing(lost["size"] + lost["out_of_memory"].map(" from {:,.0f} tokens on".format))
        sentences.append(f"A training step runs out of memory for {parts}; every other measured one fits.")
    return sentences + forms.failures(steps)


def warmup_statistics(warmup: pd.DataFrame) -> pd.DataFrame:
    """Returns per size, context, phase and warm-up count how long the next ten steps of a fresh process take."""
    rows = []
    for record in in_order(ok_rows(warmup), TRACE).to_dict("records"):
        trace = record["samples"].get("step_ms", [])
        for num_warmup in WARMUP_COUNTS:
            window = trace[num_warmup : num_warmup + WARMUP_MEASURED_STEPS]
            if len(window) > 1:
                moments = (statistics.fmean(window), statistics.stdev(window))
                steady = statistics.median(trace[5:] or trace)
                rows.append((*(record[key] for key in TRACE), num_warmup, *moments, *trace[:2], steady, len(window)))
    names = ["warmup", "mean_ms", "std_ms", "first_ms", "second_ms", "steady_ms", "n"]
    return pd.DataFrame(rows, columns=[*TRACE, *names])


def table_warmup(warmup: pd.DataFrame) -> pd.DataFrame:
    """Returns mean ± std of ten steps after each warm-up count, forward + backward, one row per size."""
    rows = warmup_statistics(shown(select(warmup, phase="forward_backward")))
    rows["first step"], rows["after"] = rows["first_ms"].map(number), "after " + rows["warmup"].astype(str)
    rows["text"] = rows["mean_ms"].map(number) + " ± " + rows["std_ms"].map(lambda std: number(std, 2))
    return pivot(rows, ["size", "context", "first step"], "after", itemgetter("text"))


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
        f"{case_name(worst)}, {number(worst['first_ms'])} ms against {number(worst['steady_ms'])} ms): library "
        "handles are made, kernels loaded and memory asked of the driver."
    ]
    wide, last = rows.pivot_table("mean_ms", TRACE, "warmup"), max(WARMUP_COUNTS)
    if {1, last} <= set(wide):
        off = wide.drop(columns=last).div(wide[last], axis=0).sub(1).abs() > verdicts.LEVEL_BAND
        text = listing(f"{num_off} after {n}" for n, num_off in off.sum().items())
        sentences.append(
            f"The mean of ten steps differs from that after {last} warm-up steps by more than "
            f"{percent(verdicts.LEVEL_BAND)} in {text}, of {count(len(wide), 'trace')}."
        )
    return sentences


def findings_pace(steps: pd.DataFrame, hosts: pd.DataFrame) -> list[str]:
    """Says which steps are launch-bound, by what hosts, and that their time does not follow the context.

    hosts: the probes of every session, see `measure.host`.
    """
    rows = ok_rows(steps, phase="train_step")
    bound = rows[[verdicts.launch_bound(row) for row in rows.to_dict("records")]]
    if bound.empty:
        none = f"None of {count(len(rows), 'training step')} is launch-bound: the device always has work waiting."
        return [none] if len(rows) else []
    took = bound.get("operator_us", pd.Series(dtype=float)).dropna()  # beside each call; else as sessions began
    took = took if len(took) else 1e3 * ok_rows(hosts, phase="operator").get("median_ms", took)
    took = f" ({span(took, number)} µs for a torch operator, where measured)" if len(took) else ""
    widest = max(bound.groupby(["size", "precision"]), key=lambda item: len(item[1]))[1].sort_values("context")
    sentences = [
        f"{len(bound)} of {count(len(rows), 'training step')} are launch-bound: the host needs {percent(LAUNCH_BOUND)} "
        f"or more of the time to issue the kernels. They are {listing(sizes_in(bound))}, up to context "
        f"{bound['context'].max():,}; their times are the host's{took}{_come_back(rows)}."
    ]
    if len(widest) > 1:
        low, high = widest.iloc[0], widest.iloc[-1]
        sentences.append(
            f"{low['size']} in {low['precision']} takes {number(low['median_ms'])} ms at context {low['context']} and "
            f"{number(high['median_ms'])} ms at {high['context']}, {times(high['flops'] / low['flops'])} the FLOPs. A "
            "longer context or a larger batch is free until the device is busy."
        )
    return sentences


def _come_back(rows: pd.DataFrame) -> str:
    """Returns how call times change between sessions, of steps launch-bound in that shown and of those in none."""
    changes, in_operators = {True: [], False: []}, []
    for row in rows.to_dict("records"):
        medians, operators = (verdicts.by_session(row, name) for name in ("median_ms", "operator_us"))
        if len(medians) > 1:
            is_bound, in_any = verdicts.launch_bound(row), any(map(verdicts.launch_bound, row["sessions"].values()))
            if is_bound or not in_any:
                changes[is_bound].append(max(medians.values()) / min(medians.values()))
            counts = [medians[session] / operators[session] for session in medians if session in operators]
            in_operators += [max(counts) / min(counts)] if is_bound and len(counts) > 1 else []
    if not all(changes.values()):
        return " and come out differently on another one"
    counted = f" ({span(in_operators)} counted in torch operators timed beside them)" if in_operators else ""
    of_bound, others = (span(changes[is_bound]) for is_bound in (True, False))
    return f": from session to session they change by {of_bound}{counted}, those that no host bound by {others}"


def modes(steps: pd.DataFrame) -> pd.DataFrame:
    """Returns training steps by `mode`, a key of MODES."""
    rows = select(steps, phase="train_step")
    if "precision" not in rows:
        return rows
    return rows.assign(mode=(rows["precision"] + " " + rows["compile"]).str.removesuffix(" none"))


def table_modes(steps: pd.DataFrame) -> pd.DataFrame:
    """Returns the training step by size in every precision and compile mode but "whole", at the shown context."""
    table = pivot(modes(shown(steps)), ["size"], "mode")
    return table.reindex(columns=["size", *[mode for mode in MODES if mode in table and "whole" not in mode]])


def gains(steps: pd.DataFrame, executions: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Returns what a training step gains from bf16, both sides eager, and from compiling blocks, both in bf16.

    As `forms.pairs` does. Compiling is compared by `executions`, which time both sides in one session.
    """
    eager = select(steps, phase="train_step", compile="none", precision=["fp32", "bf16"])
    rows, keys = select(executions, precision="bf16", phase="train_step"), ["size", "context"]
    rows = select(launches.by_way(rows), way=["eager", "compiled"]) if len(rows) else rows
    return forms.pairs(eager, "precision", "fp32", keys=keys), forms.pairs(rows, "way", "eager", keys=keys)


def findings_modes(steps: pd.DataFrame, executions: pd.DataFrame) -> list[str]:
    """Says where bf16 and compiling are ahead, apart for launch-bound and device-bound rows."""
    over_fp32, over_eager = gains(steps, executions)
    why = "; each cast is one more launch, and faster matrix products save nothing"
    sentences = [
        f"{where}, bf16 autocast is {forms.summary(part, case_name)} against fp32, call time{why if bound else ''}."
        for bound, where in ((False, "Where the device is busy"), (True, "Where launches bind"))
        if len(part := select(over_fp32, launch_bound=bound))
    ]
    if len(over_eager):
        first = ok_rows(steps, phase="compile", compile="regional", precision="bf16")["median_ms"] / 1e3
        cost = f"; the first call takes {span(first, lambda s: f'{number(s)} s')}" if len(first) else ""
        sentences.append(
            f"Compiling each block in bf16 is {forms.summary(over_eager, case_name)} against eager, call time: "
            f"elementwise kernels are fused and fewer are launched{cost}."
        )
    return sentences


def figure_utilisation(steps: pd.DataFrame, executions: pd.DataFrame) -> Figure | None:
    """A panel per precision with several contexts: achieved TFLOP/s over context, a line per size, and the roofs.

    Hollow marks are compiled blocks, stars `executions` by fused kernels, compiled, in one CUDA graph.
    """
    rows = ok_rows(steps, phase="train_step", compile=["none", "regional"])
    if rows.empty:
        return None
    num_contexts = rows.groupby("precision")["context"].transform("nunique")
    rows = rows[(num_contexts > 1) | (num_contexts.max() == 1)]
    fastest = ok_rows(by_way(steps, executions), way=launches.FASTEST)
    figure, axes = figures.panels(rows["precision"].nunique(), height=3.2)
    by_precision = in_order(rows, ["precision"]).groupby("precision", sort=False)
    for axis, (precision, measured) in zip(axes, by_precision, strict=True):
        for size in sizes_in(measured):
            style = figures.STYLES[size]
            for mode, label, fill in (("none", size, style.colour), ("regional", "blocks compiled", "white")):
                line = select(measured, size=size, compile=mode).sort_values("context")
                axis.plot(line["context"], line["achieved_tflops"], c=style.colour, marker=style.marker, label=label,
                          markersize=4, linestyle="-" if mode == "none" else ":", markerfacecolor=fill)  # fmt: skip
            stars = select(fastest, size=size, precision=precision)
            axis.plot(stars["context"], stars["achieved_tflops"], "*", c=style.colour, label="fused, compiled, graph")
        if len(roof := measured["ceiling"].dropna()):
            axis.axhline(roof.median(), color="0.2", linestyle="--", linewidth=1, label="measured matrix product")
        if len(known := measured.dropna(subset=["datasheet_fraction"])):
            peak = (known["achieved_tflops"] / known["datasheet_fraction"]).iloc[-1]
            axis.axhline(peak, color="0.2", linestyle=":", linewidth=1, label="datasheet")
        figures.context_axis(axis, measured["context"].unique())
        axis.set(ylim=(0, None), ylabel="model FLOP rate (TFLOP/s)", title=precision)
    title = f"Model FLOP rate of a training step, call time, {steps.attrs['device']}"
    figures.finish(figure, axes, title, num_columns=5)
    return figure


def by_way(steps: pd.DataFrame, executions: pd.DataFrame) -> pd.DataFrame:
    """Returns the training steps of both sections by `way`, a key of `launches.WAYS`."""
    return launches.by_way(pd.concat([steps, executions], ignore_index=True)).dropna(subset=["way"])


def table_sustained(steps: pd.DataFrame, executions: pd.DataFrame) -> pd.DataFrame:
    """Returns the steps that were run back to back: times, rates, shares of their session's roofs, power and energy."""
    rows = in_order(usable(by_way(steps, executions), "sustained_ms"), ["precision"])
    return pd.DataFrame(
        {"step": name(row), "way": row["way"], "sustained (ms)": cell(row, "sustained_ms")}
        | {"TFLOP/s": cell(row, "sustained_tflops")}
        | {"of sustained roof": percent(row["sustained_ceiling_fraction"])}
        | {"call, of burst roof": percent(row["ceiling_fraction"])}
        | {"power (W)": cell(row, "watts"), "J": cell(row, "joules"), "TFLOP/J": cell(row, "tflop_per_joule")}
        | {"SM clock (MHz)": cell(row, "sm_clock_mhz")}
        for row in rows.to_dict("records")
    )


def findings_utilisation(steps: pd.DataFrame, executions: pd.DataFrame) -> list[str]:
    """Says which step comes nearest to its roof in each precision, also with attention halved for the causal mask."""
    ways = usable(select(by_way(steps, executions), precision=list(PRECISIONS)), "ceiling_fraction")
    best = ways.loc[ways.groupby("precision")["ceiling_fraction"].idxmax()]
    rows = in_order(best, ["precision"]).to_dict("records")
    if not rows:
        return []
    parts = [f"{percent(row['ceiling_fraction'])} ({name(row)}, {row['way']})" for row in rows]
    causal = [percent(row["ceiling_fraction"] * row["flops_causal"] / row["flops"]) for row in rows]
    return [
        f"At best a step reaches {listing(parts)} of its session's burst roof, call time; with attention halved for "
        f"the causal mask {listing(causal)}."
    ]


def published_steps(steps: pd.DataFrame, course: pd.DataFrame | None = None) -> pd.DataFrame:
    """Returns published step times beside ours of the same size, context, batch, precision, compile mode and phase.

    In place of ours stand those of `course`, the model as a course writes it, where there are any.
    """
    theirs = published.step_times().query("status == 'ok'").dropna(subset=["context", "batch"])
    keys = ["size", "context", "batch", "precision", "compile", "phase"]
    theirs = theirs.assign(warm=theirs["warmup_steps"].fillna(99)).astype({"context": int, "batch": int})
    # Of a source's warm-up study the rows with most warm-up steps count.
    theirs = theirs.sort_values("warm").drop_duplicates(["source", "gpu", *keys], keep="last")
    both = forms.beside_course(forms.matched(theirs, steps, keys), course, keys)
    return in_order(both, ["gpu", "size", "context", "phase"])


def comparable(steps: pd.DataFrame, course: pd.DataFrame | None = None) -> pd.DataFrame:
    """Returns the published steps that a device of this kind is shown beside: a GPU beside data-centre GPUs."""
    rows = published_steps(steps, course)
    is_near = rows["gpu"].astype(str).str.contains("A100|H100")
    return rows[is_near] if steps.attrs.get("device_kind") == "cuda" else rows


def table_published(steps: pd.DataFrame, course: pd.DataFrame | None = None) -> pd.DataFrame:
    """Returns published training times beside ours, spread over the GPUs."""
    rows = comparable(steps, course).sort_values(["gpu", "context"], ascending=[True, False], kind="stable")
    compiled = rows["compile"].map({"none": "", "whole": ", compiled"})
    return forms.published_table(rows.assign(compiled=compiled), lambda row: name(row) + row["compiled"], max_rows=8)


def findings_published(steps: pd.DataFrame, course: pd.DataFrame | None = None) -> list[str]:
    """Says what separates published times from ours, over the phases of one GPU, and what the code explains."""
    by_gpu = comparable(steps).groupby("gpu")["ratio"]
    parts = [f"{gpu} {span(ratio)} ({count(len(ratio), 'published time')})" for gpu, ratio in by_gpu if len(ratio) > 2]
    if not parts:
        return []
    return [
        f"Published time over ours: {listing(parts)}. The published kind of time is unknown, so these say that ours "
        "are plausible, not that one device is faster: an H100 and an H200 have the same tensor cores.",
        *forms.explained(comparable(steps, course), forms.MODEL_CODE),
    ]


def front(chapter) -> list[tuple[str, str]]:
    """Returns the findings of this chapter for the front page, each with the heading that it links to."""
    steps, hosts, found = chapter.records("steps"), chapter.records("host", every_session=True), []
    both = gains(shown(steps), shown(chapter.records("execution")))
    ahead = [select(pairs, verdict=verdicts.AHEAD).set_index("size") for pairs in both]
    for size in [size for size in SIZES if all(size in rows.index for rows in ahead)][-1:]:
        bf16, blocks = (rows.loc[size].to_dict() for rows in ahead)
        text = (
            f"**bf16 autocast makes a training step of {size} at {bf16['context']} tokens {times(bf16['ratio'])} as "
            f"fast as fp32, compiled blocks {times(blocks['ratio'])} as fast again** (call time: "
            f"{number(bf16['base_median_ms'])} → {number(bf16['median_ms'])} and {number(blocks['base_median_ms'])} → "
            f"{number(blocks['median_ms'])} ms; each pair is of one session)."
        )
        found.append((text, "Precision and compilation"))
    pace = [text for text in findings_pace(steps, hosts)[:1] if not text.startswith("None")]
    return found + [(f"**Small models wait for the host.** {text}", "Who sets the pace") for text in pace]


def symptoms(chapter) -> list[dict[str, str]]:
    """Returns rows for the front page's table of symptoms, with what each remedy gave here."""
    rows, found = chapter.records("execution"), []
    over_fp32, over_eager = gains(chapter.records("steps"), rows)
    if len(bound := select(over_eager, launch_bound=True, verdict=verdicts.AHEAD)):
        symptom = "the device idles between kernels; the time does not follow the context"
        cause, remedy = "the host, which launches kernels too slowly", "compile; a larger batch; a CUDA graph"
        graphs = select(launches.shares(rows), launch_bound=True, verdict=verdicts.AHEAD)
        by_graph = f", {span(graphs['ratio'])} in one CUDA graph" if len(graphs) else ""
        found.append((symptom, cause, remedy, f"{span(bound['ratio'])} compiled{by_graph} over eager (call time)"))
    if len(busy := select(over_fp32, launch_bound=False, verdict=verdicts.AHEAD)):
        symptom, cause = "matrix products take most of the kernel time", "the tensor cores, at the precision's rate"
        found.append((symptom, cause, "bf16 autocast", f"{span(busy['ratio'])} over fp32 (call time)"))
    return [dict(zip(SYMPTOM, texts, strict=True)) for texts in found]
