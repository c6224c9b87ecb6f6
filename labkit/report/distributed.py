"""Notebook 07 from frames of its records: what a collective costs, how much shows, what sharding saves, limits."""

import math
from operator import itemgetter

import pandas as pd
from matplotlib.figure import Figure

from labkit import accounting, communication, published
from labkit.communication import OPERATIONS, fit_line
from labkit.configs import model_config
from labkit.report import figures, forms, verdicts
from labkit.report.chapter import kinds_of_time
from labkit.report.text import count, gib, listing, number, percent, span, times
from labkit.report.tables import cell, ok_rows, once_per_frame, select

TRANSPORTS = {
    "nccl": "NCCL", "ctas_4": "NCCL, 4 blocks", "ctas_16": "NCCL, 16 blocks", "zero_cta": "NCCL, copy engines",
    "copy": "copy from the peer", "gloo": "gloo, CPU tensors",
}  # fmt: skip
CASE = ["size", "precision", "compile", "batch", "context", "world_size"]
DATA_PARALLEL = [
    "alone", "naive", "flat", "overlapped", "bucketed 1 MB", "bucketed 10 MB", "bucketed 100 MB", "bucketed 1000 MB",
    "bucketed copy", "ddp",
]  # fmt: skip
NAMES = {
    "alone": "alone, no communication", "bucketed copy": "bucketed 100 MB, copied", "ddp": "torch DDP",
    "zero redundancy": "torch ZeroRedundancyOptimizer", "fsdp": "FSDP", "fsdp copy": "FSDP, copied",
    "fully_shard": "torch fully_shard",
}  # fmt: skip
BUCKETED = "bucketed 100 MB"
STAGE = {"sharded optimizer": 1, "zero redundancy": 1, "fsdp": 3, "fsdp copy": 3, "fully_shard": 3}
"""ZeRO stage of each way that shards; every other holds everything."""


def mode(row: dict) -> str:
    """Returns "bf16, CUDA graph"."""
    how = {"graph": ", CUDA graph", "regional": ", blocks compiled"}
    return f"{row['precision']}{how.get(row['compile'], '')}"


def case_name(row: dict) -> str:
    """Returns "xl-2025 in bf16, CUDA graph, batch 4 a rank"."""
    return f"{row['size']} in {mode(row)}, batch {row['batch']} a rank"


# --- collectives ---


@once_per_frame
def measured(collectives: pd.DataFrame) -> pd.DataFrame:
    """Returns the measured rows with `operation`, `dtype` and `backend`, which records observe."""
    rows = ok_rows(collectives)
    return rows.join(pd.DataFrame(list(rows["observed"]), index=rows.index))


def shown_collectives(collectives: pd.DataFrame) -> pd.DataFrame:
    """Returns the rows of the most ranks, in the dtype that every transport has, timed as most are."""
    rows = measured(collectives)
    method, dtype = (rows[name].mode()[0] for name in ("timer_method", "dtype"))
    return select(rows, world_size=rows["world_size"].max(), dtype=dtype, timer_method=method)


@once_per_frame
def fits(collectives: pd.DataFrame) -> pd.DataFrame:
    """Returns the α–β line (latency_us, bandwidth and bus GB/s) of each group of times that rise with the size."""
    result = []
    keys = ["world_size", "transport", "operation", "dtype"]
    for key, group in measured(collectives).groupby(keys, sort=False):
        line = fit_line(group["num_bytes"].tolist(), (group["median_ms"] / 1e3).tolist()) if len(group) > 1 else None
        if line and line.latency_s > 0 and 0 < line.bandwidth < math.inf:
            row = dict(zip(keys, key, strict=True)) | {"latency_us": 1e6 * line.latency_s}
            row |= {"bandwidth_gbs": line.bandwidth / 1e9, "worst_residual": max(map(abs, line.residuals))}
            factor = communication.bus_factor(row["operation"], row["world_size"])
            result.append(row | {"bus_gbs": factor * row["bandwidth_gbs"]})
    return pd.DataFrame(result, columns=[*keys, "latency_us", "bandwidth_gbs", "worst_residual", "bus_gbs"])


def lines_of(shown: pd.DataFrame, collectives: pd.DataFrame) -> pd.DataFrame:
    """Returns the lines of the shown ranks and dtype, by the group's own transport."""
    world_size, dtype, transport = shown[["world_size", "dtype", "transport"]].iloc[0]
    return select(fits(collectives), world_size=world_size, dtype=dtype, transport=transport)


def table_collectives(collectives: pd.DataFrame) -> pd.DataFrame:
    """Returns per operation the fitted latency and bandwidth, and bus GB/s at sizes, NCCL's beside a copy's."""
    rows = shown_collectives(collectives)
    base, lines = rows["transport"].iloc[0], lines_of(rows, collectives)
    sizes = sorted(rows["num_bytes"].map(lambda n: 10 ** round(math.log10(n))).unique())[-4:]
    result = []
    for operation in OPERATIONS:
        of = select(rows, operation=operation, transport=base)
        if of.empty:
            continue
        latency = [number(value) for value in select(lines, operation=operation)["latency_us"]]
        row = {"operation": operation.replace("_", "-"), f"latency, {kinds_of_time([of])} (µs)": (latency or ["–"])[0]}
        for size in sizes:
            near = of.loc[(of["num_bytes"] - size).abs().idxmin()]
            row[f"{size_name(size)} (GB/s)"] = number(near["bus_gbs"])
        copied = select(rows, operation=operation, transport="copy")
        row["copy from the peer, largest (GB/s)"] = number(copied["bus_gbs"].max()) if len(copied) else "–"
        result.append(row)
    return pd.DataFrame(result)


def size_name(num_bytes: float) -> str:
    """Returns "100 MB"; MB are 10⁶ bytes."""
    unit, scale = next((pair for pair in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)) if num_bytes >= pair[1]), ("B", 1))
    return f"{float(number(num_bytes / scale)):g} {unit}"


def figure_collectives(collectives: pd.DataFrame) -> Figure | None:
    """Time over size of all-reduce and all-gather by transport, with the α–β line of the group's own."""
    rows = shown_collectives(collectives)
    if rows.empty:
        return None
    base, lines = rows["transport"].iloc[0], lines_of(rows, collectives)
    figure, axes = figures.panels(2, num_columns=2, width=4.5, height=3.0)
    for axis, operation in zip(axes, ("all_reduce", "all_gather"), strict=True):
        of = select(rows, operation=operation)
        for number_, transport in enumerate(TRANSPORTS):
            if (line := select(of, transport=transport).sort_values("num_bytes")).empty:
                continue
            axis.plot(line["num_bytes"], line["median_ms"], label=TRANSPORTS[transport], marker="osD^vP"[number_],
                      color=figures.SERIES[number_], markersize=4, linewidth=1.4)  # fmt: skip
        for fit in select(lines, operation=operation).to_dict("records"):
            x = sorted(of["num_bytes"])
            y = [fit["latency_us"] / 1e3 + n / fit["bandwidth_gbs"] / 1e6 for n in x]
            axis.plot(x, y, color="black", linestyle=":", linewidth=1.2, label=f"α–β line of {TRANSPORTS[base]}")
        figures.log_scale(axis, "x")
        figures.log_time_axis(axis, f"{kinds_of_time([of])} (ms)")
        axis.set(xlabel="size (bytes)", title=operation.replace("_", "-"))
    title = f"Collectives of {rows['world_size'].iloc[0]} ranks, {rows['dtype'].iloc[0]}"
    figures.finish(figure, axes, f"{title}, {collectives.attrs['device']}", num_columns=4)
    return figure


def findings_collectives(collectives: pd.DataFrame) -> list[str]:
    """Says what latency and bandwidth are, what fewer blocks and a copy give, and how a published table compares."""
    sentences, rows = [], shown_collectives(collectives)
    base = rows["transport"].iloc[0]
    for fit in select(lines_of(rows, collectives), operation="all_reduce").to_dict("records"):
        small = fit["latency_us"] * 1e-6 * fit["bandwidth_gbs"] * 1e9
        of = select(rows, operation="all_reduce", transport=base)
        issue_us = 1e3 * of["launch_median_ms"].median() if "launch_median_ms" in of else math.nan
        sentences.append(
            f"An all-reduce by {TRANSPORTS[base]} costs {number(fit['latency_us'])} µs and then "
            f"{number(fit['bandwidth_gbs'])} GB/s, {kinds_of_time([of])} (fit; the worst residual is "
            f"{percent(fit['worst_residual'])}): below {size_name(small)} it is mostly latency, so small gradients "
            "should travel together." + (f" The host issues one in {number(issue_us)} µs." if issue_us > 0 else "")
        )
    parts = []
    for operation in ("all_gather", "reduce_scatter"):
        of = select(rows, operation=operation)
        largest = {name: select(of, transport=name)["bus_gbs"].max() for name in ("nccl", "copy")}
        if all(value == value for value in largest.values()):
            parts.append(f"{operation.replace('_', '-')} {number(largest['copy'])} against {number(largest['nccl'])}")
    failed = select(collectives, status=["error", "timeout"])
    text = [
        f"{TRANSPORTS[t]} failed ({of['reason'].iloc[0].rpartition(') ')[2]})" for t, of in failed.groupby("transport")
    ]
    if parts:
        text.insert(0, f"Copies from the peer occupy no multiprocessor; in GB/s, {listing(parts)} by NCCL")
    sentences += [". ".join(text) + "."] if text else []
    theirs = published.load("all_reduce").query("world_size == 2 and size_mb == 1")
    gloo = select(measured(collectives), transport="gloo", operation="all_reduce", world_size=2)
    if len(gloo):
        ours = gloo.loc[(gloo["num_bytes"] - 2**20).abs().idxmin()]
        theirs, ours = number(1e3 * theirs["seconds"].iloc[0]), number(ours["median_ms"])
        sentences.append(
            f"Published for gloo on 2 CPU ranks and 1 MiB: {theirs} ms; here, for 1 MB, {ours} ms. The published table "
            "is uncertain tenfold: its times probably are those of ten calls."
        )
    return sentences


# --- steps ---


@once_per_frame
def over_alone(steps: pd.DataFrame) -> pd.DataFrame:
    """Returns each way's step beside that of the ranks alone in the same session, and where the added time goes.

    added_ms = shows_ms (communication beside no kernel) + contention_ms (the step's own kernels take longer) + rest_ms.
    """
    rows, result, key = ok_rows(steps), [], itemgetter(*CASE)
    alone = {key(row): verdicts.sessions(row) for row in select(rows, phase="alone").to_dict("records")}
    for row in rows[rows["phase"] != "alone"].to_dict("records"):
        if (base := alone.get(key(row), {}).get(row["session"])) is None:
            continue
        added = row["median_ms"] - base["median_ms"]
        shows = row.get("exposed_us", math.nan) / 1e3
        contention = (row.get("compute_us", math.nan) - base.get("compute_us", math.nan)) / 1e3
        row |= {"alone_ms": base["median_ms"], "added_ms": added, "added_fraction": added / row["median_ms"]}
        result.append(row | {"shows_ms": shows, "contention_ms": contention, "rest_ms": added - shows - contention})
    columns = [*steps.columns, "alone_ms", "added_ms", "added_fraction", "shows_ms", "contention_ms", "rest_ms"]
    return pd.DataFrame(result, columns=columns)


def shown_case(steps: pd.DataFrame, compile: str = "") -> dict:
    """Returns the case that tables show: that with most ways, of those the last; of one `compile` where it is there."""
    rows = ok_rows(steps)
    rows = select(rows, compile=compile) if compile in set(rows["compile"]) else rows
    counts = rows.groupby(CASE, sort=False).size()
    return dict(zip(CASE, counts[counts == counts.max()].index[-1], strict=True))


def _times(steps: pd.DataFrame, way: str, *cases: dict) -> dict[str, str]:
    """Returns the step of a way in each of `cases`, by the title of its column."""
    found = {f"step, {mode(case)} (ms)": select(steps, phase=way, **case).to_dict("records")[:1] for case in cases}
    return {title: cell(rows[0]) if rows else "–" for title, rows in found.items()}


def table_steps(steps: pd.DataFrame) -> pd.DataFrame:
    """Returns the data parallel ways, in a CUDA graph where there is one: what is added and where that goes."""
    case, launched = shown_case(steps, "graph"), shown_case(steps)
    pairs, result = over_alone(steps), []
    for way in DATA_PARALLEL:
        shown, parts = _times(steps, way, launched, case), select(pairs, phase=way, **case)
        line = {"way": NAMES.get(way, way), **shown}
        for name in ("added", "shows", "contention", "rest"):
            line[f"{name} (ms)"] = number(parts[f"{name}_ms"].iloc[0]) if len(parts) else "–"
        line["added / step"] = percent(parts["added_fraction"].iloc[0]) if len(parts) else "–"
        if set(shown.values()) != {"–"}:
            result.append(line)
    return pd.DataFrame(result)


def figure_steps(steps: pd.DataFrame) -> Figure | None:
    """One panel per model: the step of each way over that of the ranks alone, one marker per mode, the larger batch."""
    pairs = over_alone(steps)
    if pairs.empty:
        return None
    pairs = select(pairs, batch=pairs["batch"].max())
    pairs = pairs.assign(mode=[mode(row) for row in pairs.to_dict("records")])
    groups, modes = list(pairs.groupby("size", sort=False)), list(dict.fromkeys(pairs["mode"]))
    figure, axes = figures.panels(len(groups), num_columns=2, width=4.5, height=3.0)
    order = [name for name in (*DATA_PARALLEL, *STAGE) if name in set(pairs["phase"])][::-1]
    for axis, (size, of) in zip(axes, groups, strict=True):
        for name, line in of.groupby("mode", sort=False):
            position = modes.index(name)
            y = [order.index(way) for way in line["phase"]]
            look = {"color": figures.SERIES[position], "markersize": 5, "alpha": 0.8}
            axis.plot(line["median_ms"] / line["alone_ms"], y, "osD^"[position], label=name, **look)
        axis.axvline(1, color="black", linewidth=1)
        axis.set(title=f"{size}, batch {of['batch'].iloc[0]} a rank", xlabel="step / step alone (call time)")
        axis.set_yticks(range(len(order)), [NAMES.get(way, way) for way in order])
    figures.finish(figure, axes, f"What communication adds to a step, {steps.attrs['device']}")
    return figure


def figure_timeline(steps: pd.DataFrame) -> Figure | None:
    """When each rank computes and communicates in a step, one panel per way."""
    rows = select(steps, **shown_case(steps, "graph")).to_dict("records") if len(ok_rows(steps)) else []
    if not (rows := [row for row in rows if any(" computing_" in name for name in row["samples"])]):
        return None
    figure, axes = figures.panels(len(rows), num_columns=1, width=9.0, height=1.5)
    for axis, row in zip(axes, rows, strict=True):
        kinds = [("computing", figures.SERIES[0], ""), ("communicating", figures.SERIES[1], "//")]
        labels = []
        for rank in range(row["world_size"]):
            for kind, colour, hatch in kinds:
                begins, ends = (row["samples"].get(f"rank {rank} {kind}_{end}_ms", []) for end in ("begin", "end"))
                spans = [(begin, end - begin) for begin, end in zip(begins, ends, strict=True)]
                axis.broken_barh(spans, (-len(labels) - 0.4, 0.8), color=colour, hatch=hatch, label=kind, linewidth=0)
                labels.append(f"rank {rank}, {kind}")
        axis.set_yticks([-position for position in range(len(labels))], labels)
        axis.set(title=NAMES.get(row["phase"], row["phase"]), xlabel="time in the profile (ms)")
    figures.finish(figure, axes, f"Two steps of {case_name(rows[0])}, as profiled, {steps.attrs['device']}")
    return figure


def findings_steps(steps: pd.DataFrame) -> list[str]:
    """Says what communication adds by way, where that goes, and how ours stand to torch's."""
    sentences, pairs = forms.failures(steps), over_alone(steps)
    graph = select(pairs, compile="graph") if "graph" in set(pairs["compile"]) else pairs
    parts = []
    for _, of in graph.groupby(CASE, sort=False):
        ways = [f"{NAMES.get(way, way)} {percent(of[of['phase'] == way]['added_fraction'].iloc[0])}"
                for way in ("naive", "flat", BUCKETED, "bucketed copy") if way in set(of["phase"])]  # fmt: skip
        if ways:
            parts.append(f"{case_name(of.iloc[0].to_dict())}: {listing(ways)}")
    if parts:
        sentences.append(f"Share of a step that communication adds: {'; '.join(parts)}.")
    profiled = graph[graph["shows_ms"].notna()]
    if len(of := select(profiled, phase=BUCKETED)):
        row = of.iloc[-1].to_dict()
        others = select(graph, **{name: row[name] for name in CASE}).groupby("phase")["contention_ms"].max()
        flat, copied = others.get("flat", math.nan), others.get("bucketed copy", math.nan)
        copies = f", {number(flat)} of them at most for copies into buckets (as flat copies)" if flat == flat else ""
        sentences.append(
            f"Hidden is not free: of the {number(row['added_ms'])} ms that buckets of 100 MB add for {case_name(row)}, "
            f"{number(row['shows_ms'])} show. The step's own kernels take {number(row['contention_ms'])} ms longer"
            f"{copies}{f'; copied without NCCL, {number(copied)}' if copied == copied else ''}."
        )
    if text := forms.summary(select(forms.pairs(steps, "phase", "ddp", keys=CASE), phase=BUCKETED), case_name):
        sentences.append(f"Our buckets of 100 MB against torch's DDP, its step over ours, call time: {text}.")
    return sentences


# --- memory ---


@once_per_frame
def memory(steps: pd.DataFrame) -> pd.DataFrame:
    """Returns the bytes that stay after a step by way, measured and predicted (`communication.zero_bytes`)."""
    rows = ok_rows(steps)
    if "after_step_bytes" not in rows:
        return pd.DataFrame()
    result = []
    for row in rows[rows["after_step_bytes"].notna()].to_dict("records"):
        stage = STAGE.get(row["phase"], 0)
        parts = communication.zero_bytes(row["observed"]["num_parameters"], row["world_size"], stage, compute_bytes=0)
        result.append({**row, "predicted_bytes": sum(parts.values()), "stage": stage})
    return pd.DataFrame(result)


def table_memory(steps: pd.DataFrame, ways: tuple[str, ...]) -> pd.DataFrame:
    """Returns for these ways what memory holds at each moment, in GiB, beside the prediction, and the step's times."""
    cases, result = (shown_case(steps), shown_case(steps, "graph")), []
    rows = select(memory(steps), **cases[0])
    moments = ("init", "before_step", "after_step", "predicted", "parameter", "gradient", "state", "peak")
    for row in (row for way in ways for row in select(rows, phase=way).to_dict("records")):
        held = {name.replace("_", " "): gib(row[f"{name}_bytes"]) for name in moments}
        result.append({"way": NAMES.get(row["phase"], row["phase"]), **held, **_times(steps, row["phase"], *cases)})
    return pd.DataFrame(result)


def findings_memory(steps: pd.DataFrame, ways: tuple[str, ...], peer: str) -> list[str]:
    """Says what the first of these ways saves and how far the prediction holds, and how all stand to other steps."""
    sentences, rows = [], memory(steps)
    ours, case = select(rows, phase=ways[0]), shown_case(steps)
    for row, whole in zip(
        *(select(rows, phase=p, **case).to_dict("records") for p in (ways[0], BUCKETED)), strict=False
    ):
        saved, predicted = (whole[name] - row[name] for name in ("after_step_bytes", "predicted_bytes"))
        off = ours["after_step_bytes"] / ours["predicted_bytes"] - 1
        sentences.append(
            f"For {case_name(row)}, {NAMES.get(ways[0], ways[0])} holds {gib(row['after_step_bytes'])} GiB after a "
            f"step, {gib(whole['after_step_bytes'])} with everything on every rank: {gib(saved)} less "
            f"({gib(predicted)} predicted). Position tables, tokens, and weights that are not sharded make it "
            f"{span(off, percent)} more than parameters, gradients and moments ({count(len(ours), 'case')})."
        )
    for rival, what in ((peer, NAMES.get(peer, peer)), ("alone", "a rank alone, which updates every parameter")):
        pairs = select(forms.pairs(steps, "phase", rival, keys=CASE), phase=list(ways))
        if text := forms.summary(pairs, lambda row: f"{NAMES.get(row['phase'], row['phase'])}, {case_name(row)}"):
            sentences.append(f"Against {what}, its step over ours, call time: {text}.")
    return sentences


def table_gathers(steps: pd.DataFrame) -> pd.DataFrame:
    """Returns per case of ours how long its gathers made the computation wait in one more step."""
    result = []
    rows = ok_rows(steps, phase=["fsdp", "fsdp copy"])
    for row in rows.sort_values([*CASE, "phase"], ascending=False, kind="stable").to_dict("records"):
        if waits := row["samples"].get("gather_wait_ms"):
            line = {"case": case_name(row), "way": NAMES.get(row["phase"], row["phase"]), "step (ms)": cell(row)}
            result.append(line | {"waits in all (ms)": number(sum(waits)), "longest (ms)": number(max(waits))})
    return pd.DataFrame(result)


# --- limits ---


def rates(collectives: pd.DataFrame, ceilings: pd.DataFrame) -> pd.DataFrame:
    """Returns compute and link rate of this machine, as measured, and of published hardware, with what follows.

    tokens: of a rank, above which data parallel training hides its communication, for many ranks (C/W).
    """
    rows = []
    product = ok_rows(ceilings, kind="gemm", precision="bf16")
    line = select(measured(collectives), transport="nccl", operation="all_gather") if len(product) else product
    if len(product) and len(line):
        known = {"tflops": product["achieved_tflops"].median(), "gbs": line["bus_gbs"].max()}
        rows.append({"hardware": f"{collectives.attrs['device']}, measured", "link": "NCCL all-gather", **known})
    for row in published.load("interconnects").to_dict("records"):
        known = {"link": row["link"], "tflops": row["bf16_tflops"], "gbs": row["link_gb_per_s"]}
        rows.append({"hardware": f"{row['gpu']}, datasheet", **known})
    frame = pd.DataFrame(rows)
    return frame.assign(tokens=frame["tflops"] * 1e3 / frame["gbs"])


D_FF = 10240  # of 2.7b: the feed-forward layer for which limits of tensor parallelism are stated


def table_limits(collectives: pd.DataFrame, ceilings: pd.DataFrame) -> pd.DataFrame:
    """Returns for each hardware the tokens a rank needs, and the ranks up to which tensor parallelism hides."""
    result = []
    for row in rates(collectives, ceilings).to_dict("records"):
        rank_rates = (row["gbs"] * 1e9, row["tflops"] * 1e12)
        ranks = [communication.max_tensor_ranks(D_FF, *rank_rates, backward=backward) for backward in (False, True)]
        line = {"hardware": row["hardware"], "link": row["link"], "bf16 (TFLOP/s)": number(row["tflops"], 4)}
        line |= {"one way (GB/s)": number(row["gbs"]), "tokens a rank": number(row["tokens"], 4)}
        result.append(line | {"tensor parallel ranks, forward": number(ranks[0]), "backward": number(ranks[1])})
    return pd.DataFrame(result)


def findings_limits(collectives: pd.DataFrame, ceilings: pd.DataFrame, steps: pd.DataFrame) -> list[str]:
    """Says how many tokens a rank needs here, and whether the measured steps are on the right side of that."""
    rows = rates(collectives, ceilings)
    here = rows[rows["hardware"].str.endswith("measured")]
    if here.empty:
        return []
    row, world_size = here.iloc[0], int(steps["world_size"].max())
    share, rate = (world_size - 1) / world_size, row["gbs"]
    sentences = [
        f"At {number(row['tflops'])} TFLOP/s and {number(rate)} GB/s one of {world_size} ranks needs "
        f"{number(row['tokens'] * share)} tokens a step, of many ranks {number(row['tokens'])}, for its products to "
        "last as long as gradients travel in bf16; in fp32, as the wrappers above send them, twice as many."
    ]
    pairs = select(over_alone(steps), phase=BUCKETED, size=shown_case(steps)["size"], compile=["graph", "none"])
    for each in pairs.to_dict("records"):
        shape = (each["batch"], each["context"])
        flops = accounting.phase_flops(model_config(each["size"]), *shape, "forward_backward", causal=True)
        tflops = flops / each["alone_ms"] / 1e9
        shows = f", {percent(each['shows_ms'] / each['median_ms'])} shows" if each["shows_ms"] > 0 else ""
        sentences.append(
            f"{case_name(each)} computes at {number(tflops)} TFLOP/s and needs {number(2e3 * share * tflops / rate)} "
            f"tokens; it has {math.prod(shape):,}. In buckets of 100 MB communication is "
            f"{percent(each['added_fraction'])} of the step{shows}."
        )
    return sentences


def front(chapter) -> list[tuple[str, str]]:
    """Returns the finding of this chapter for the front page, with the heading that it links to."""
    steps = chapter.records("steps")
    pairs = select(over_alone(steps), compile="graph") if not steps.empty else steps
    found = [select(pairs, phase=way).to_dict("records")[-1:] for way in ("naive", BUCKETED, "fsdp copy")]
    if not all(found):
        return []
    naive, row, copied = (rows[0] for rows in found)
    (alone,) = select(
        forms.pairs(steps, "phase", "alone", keys=CASE), **{k: copied[k] for k in [*CASE, "phase"]}
    ).to_dict("records")
    text = (
        f"**Gradients can travel while backward runs, though not for free**: for {case_name(row)}, {row['world_size']} "
        f"ranks, what a rank alone does not need is {percent(naive['added_fraction'])} of a step that sends each "
        f"gradient afterwards, and {percent(row['added_fraction'])} with overlapped buckets. Fully sharded, with bf16 "
        f"moved by copy engines, against a rank alone, which updates every parameter: {alone['verdict']} "
        f"({times(alone['ratio'])})."
    )
    return [(text, "How much of it shows")]
