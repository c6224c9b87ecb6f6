"""Notebook 07 from frames of its records: what a collective costs, how much shows, what sharding saves, limits."""

import pandas as pd
from matplotlib.figure import Figure

from labkit import communication, published
from labkit.communication import OPERATIONS, fit_line
from labkit.report import figures, forms
from labkit.report.findings import count, gib, listing, number, percent, span
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
    "zero redundancy": "torch ZeroRedundancyOptimizer", "fsdp": "FSDP", "fsdp copy": "FSDP, copied gathers",
    "fully_shard": "torch fully_shard",
}  # fmt: skip
BUCKETED = "bucketed 100 MB"
STAGE = {"sharded optimizer": 1, "zero redundancy": 1, "fsdp": 3, "fsdp copy": 3, "fully_shard": 3}
"""ZeRO stage of each way that shards; every other holds everything."""


def called(way: str) -> str:
    return NAMES.get(way, way)


def case_name(row: dict) -> str:
    """Returns "xl-2025 in bf16, batch 4 a rank"."""
    return f"{row['size']} in {row['precision']}, batch {row['batch']} a rank"


# --- collectives ---


@once_per_frame
def measured(collectives: pd.DataFrame) -> pd.DataFrame:
    """Returns the measured rows with `operation`, `dtype` and `backend`, which records observe."""
    rows = ok_rows(collectives)
    return rows.join(pd.DataFrame(list(rows["observed"]), index=rows.index))


def shown_collectives(collectives: pd.DataFrame) -> pd.DataFrame:
    """Returns the rows of the most ranks, in the dtype that every transport has."""
    rows = measured(collectives)
    return select(rows, world_size=rows["world_size"].max(), dtype=rows["dtype"].mode()[0])


def base_transport(rows: pd.DataFrame) -> str:
    return "nccl" if "nccl" in set(rows["transport"]) else "gloo"


@once_per_frame
def fits(collectives: pd.DataFrame) -> pd.DataFrame:
    """Returns the α–β line of each operation, transport and number of ranks: latency_us, bandwidth and bus GB/s."""
    result = []
    keys = ["world_size", "transport", "operation", "dtype"]
    for key, group in measured(collectives).groupby(keys, sort=False):
        if len(group) < 2:
            continue
        line = fit_line(group["num_bytes"].tolist(), (group["median_ms"] / 1e3).tolist())
        row = dict(zip(keys, key, strict=True))
        factor = communication.bus_factor(row["operation"], row["world_size"])
        row |= {"latency_us": 1e6 * line.latency_s, "bandwidth_gbs": line.bandwidth / 1e9}
        row |= {"bus_gbs": factor * line.bandwidth / 1e9, "worst_residual": max(map(abs, line.residuals))}
        result.append(row)
    return pd.DataFrame(result)


def table_collectives(collectives: pd.DataFrame) -> pd.DataFrame:
    """Returns per operation the fitted latency and bandwidth, and bus GB/s at sizes, NCCL's beside a copy's."""
    rows = shown_collectives(collectives)
    base, lines = base_transport(rows), fits(collectives)
    sizes = sorted(rows["num_bytes"].map(lambda n: 10 ** round(len(str(int(n))) - 1)).unique())[-4:]
    result = []
    for operation in OPERATIONS:
        of = select(rows, operation=operation, transport=base)
        line = select(lines, operation=operation, transport=base, dtype=rows["dtype"].iloc[0])
        line = line[line["world_size"] == rows["world_size"].iloc[0]]
        if of.empty or line.empty:
            continue
        row = {"operation": operation.replace("_", "-"), "latency (µs)": number(line["latency_us"].iloc[0])}
        for size in sizes:
            near = of.loc[(of["num_bytes"] - size).abs().idxmin()]
            row[f"{size_name(size)} (GB/s)"] = number(near["bus_gbs"])
        copied = select(rows, operation=operation, transport="copy")
        row["copy from the peer, largest (GB/s)"] = number(copied["bus_gbs"].max()) if len(copied) else "–"
        result.append(row)
    return pd.DataFrame(result)


def size_name(num_bytes: float) -> str:
    """Returns "100 MB"; MB are 10⁶ bytes."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= 0.9 * scale:
            return f"{number(num_bytes / scale)} {unit}"
    return f"{num_bytes:.0f} B"


def figure_collectives(collectives: pd.DataFrame) -> Figure | None:
    """Time over size of all-reduce and all-gather by transport, with the α–β line of the group's own."""
    rows = shown_collectives(collectives)
    if rows.empty:
        return None
    base, lines = base_transport(rows), fits(collectives)
    figure, axes = figures.panels(2, num_columns=2, width=4.5, height=3.0)
    for axis, operation in zip(axes, ("all_reduce", "all_gather"), strict=True):
        of = select(rows, operation=operation)
        for number_, transport in enumerate(name for name in TRANSPORTS if name in set(of["transport"])):
            line = select(of, transport=transport).sort_values("num_bytes")
            axis.plot(line["num_bytes"], line["median_ms"], label=TRANSPORTS[transport], marker="osD^vP"[number_],
                      color=figures.SERIES[number_], markersize=4, linewidth=1.4)  # fmt: skip
        fit = select(lines, operation=operation, transport=base, dtype=rows["dtype"].iloc[0])
        if len(fit):
            x = sorted(of["num_bytes"])
            y = [fit["latency_us"].iloc[-1] / 1e3 + n / fit["bandwidth_gbs"].iloc[-1] / 1e6 for n in x]
            axis.plot(x, y, color="black", linestyle=":", linewidth=1.2, label=f"α–β line of {TRANSPORTS[base]}")
        figures.log_scale(axis, "x")
        figures.log_time_axis(axis, "call time (ms)")
        axis.set(xlabel="size (bytes)", title=operation.replace("_", "-"))
    title = f"Collectives of {rows['world_size'].iloc[0]} ranks, {rows['dtype'].iloc[0]}"
    figures.finish(figure, axes, f"{title}, {collectives.attrs['device']}", num_columns=4)
    return figure


def findings_collectives(collectives: pd.DataFrame) -> list[str]:
    """Says what latency and bandwidth are, what fewer blocks and a copy give, and how a published table compares."""
    sentences, rows, lines = forms.failures(collectives), shown_collectives(collectives), fits(collectives)
    base = base_transport(rows)
    line = select(lines, transport=base, operation="all_reduce", world_size=rows["world_size"].max())
    if len(line):
        fit = line.iloc[0]
        small = fit["latency_us"] * 1e-6 * fit["bandwidth_gbs"] * 1e9
        sentences.append(
            f"An all-reduce by {TRANSPORTS[base]} costs {number(fit['latency_us'])} µs and then "
            f"{number(fit['bandwidth_gbs'])} GB/s (fit; the worst residual is {percent(fit['worst_residual'])}): below "
            f"{size_name(small)} it is mostly latency, so small gradients should travel together."
        )
    parts = []
    for operation in ("all_gather", "reduce_scatter"):
        largest = {
            name: select(rows, operation=operation, transport=name)["bus_gbs"].max() for name in ("nccl", "copy")
        }
        if all(value == value for value in largest.values()):
            parts.append(f"{operation.replace('_', '-')} {number(largest['copy'])} against {number(largest['nccl'])}")
    if parts:
        sentences.append(
            f"Copies between the GPUs' memories occupy no multiprocessor. In GB/s they reach {listing(parts)} by NCCL."
        )
    theirs = published.load("all_reduce")
    gloo = select(measured(collectives), transport="gloo", operation="all_reduce", world_size=2)
    if len(gloo) and len(theirs := theirs[(theirs["world_size"] == 2) & (theirs["size_mb"] == 1)]):
        ours = gloo.loc[(gloo["num_bytes"] - 2**20).abs().idxmin()]
        seconds = theirs["seconds"].iloc[0]
        sentences.append(
            f"Published for gloo on 2 CPU ranks and 1 MiB: {number(1e3 * seconds)} ms; here, for 1 MB, "
            f"{number(ours['median_ms'])} ms. The published table is uncertain tenfold: its times probably are those "
            "of ten calls."
        )
    return sentences


# --- steps ---


@once_per_frame
def over_alone(steps: pd.DataFrame) -> pd.DataFrame:
    """Returns each way's step beside that of the ranks alone: exposed_ms by difference, and its parts where profiled.

    exposed_ms = communication that shows in the profile + contention (the same kernels run longer) + the rest.
    """
    rows = ok_rows(steps)
    alone = select(rows, phase="alone").set_index(CASE)
    result = []
    for row in rows[rows["phase"] != "alone"].to_dict("records"):
        key = tuple(row[name] for name in CASE)
        if key not in alone.index:
            continue
        base = alone.loc[key]
        row |= {"alone_ms": base["median_ms"], "exposed_ms": row["median_ms"] - base["median_ms"]}
        row["exposed_fraction"] = row["exposed_ms"] / row["median_ms"]
        row["shows_ms"] = row.get("exposed_us", float("nan")) / 1e3
        row["contention_ms"] = (row.get("compute_us", float("nan")) - base.get("compute_us", float("nan"))) / 1e3
        row["rest_ms"] = row["exposed_ms"] - row["shows_ms"] - row["contention_ms"]
        result.append(row)
    return pd.DataFrame(result)


def shown_case(steps: pd.DataFrame) -> dict:
    """Returns the case that tables show: the largest model that ran with most ways, in bf16 where it was measured."""
    counts = ok_rows(steps).groupby(CASE, sort=False).size()
    most = counts[counts == counts.max()]
    return dict(zip(CASE, most.index[-1], strict=True))


def shown(steps: pd.DataFrame) -> pd.DataFrame:
    return select(steps, **shown_case(steps))


def table_steps(steps: pd.DataFrame) -> pd.DataFrame:
    """Returns the data parallel ways of the shown case: step, what communication adds to it, and where that goes."""
    compared = over_alone(shown(steps)).set_index("phase") if len(ok_rows(shown(steps))) else pd.DataFrame()
    result = []
    for row in shown(steps).to_dict("records"):
        if row["phase"] not in DATA_PARALLEL:
            continue
        line = {"way": called(row["phase"]), "step (ms)": cell(row)}
        extra = compared.loc[row["phase"]] if row["phase"] in compared.index else {}
        line["added (ms)"] = number(extra["exposed_ms"]) if len(extra) else "–"
        line["of the step"] = percent(extra["exposed_fraction"]) if len(extra) else "–"
        line["communication (ms)"] = number(row.get("communication_us", float("nan")) / 1e3)
        for column, name in (("shows", "shows_ms"), ("contention", "contention_ms"), ("rest", "rest_ms")):
            line[f"{column} (ms)"] = number(extra[name]) if len(extra) else "–"
        result.append(line)
    order = {called(name): position for position, name in enumerate(DATA_PARALLEL)}
    return pd.DataFrame(sorted(result, key=lambda line: order[line["way"]]))


def figure_steps(steps: pd.DataFrame) -> Figure | None:
    """One panel per model and batch: the step of each way over that of the ranks alone, one marker per precision."""
    pairs = over_alone(steps)
    if pairs.empty:
        return None
    groups = list(pairs.groupby(["size", "batch"], sort=False))
    figure, axes = figures.panels(len(groups), num_columns=2, width=4.5, height=3.2)
    order = [name for name in (*DATA_PARALLEL, *STAGE) if name in set(pairs["phase"])][::-1]
    for axis, ((size, batch), of) in zip(axes, groups, strict=True):
        for precision, line in of.groupby("precision", sort=False):
            style = figures.STYLES[precision]
            y = [order.index(way) for way in line["phase"]]
            axis.plot(line["median_ms"] / line["alone_ms"], y, style.marker, color=style.colour, label=precision)
        axis.axvline(1, color="black", linewidth=1)
        axis.set(title=f"{size}, batch {batch} a rank", xlabel="step / step alone (call time)")
        axis.set_yticks(range(len(order)), [called(way) for way in order])
    figures.finish(figure, axes, f"What communication adds to a step, {steps.attrs['device']}")
    return figure


def figure_timeline(steps: pd.DataFrame) -> Figure | None:
    """When each rank computes and communicates in a step, one panel per way."""
    rows = [row for row in shown(steps).to_dict("records") if any(" computing_" in name for name in row["samples"])]
    if not rows:
        return None
    figure, axes = figures.panels(len(rows), num_columns=1, width=9.0, height=1.5)
    for axis, row in zip(axes, rows, strict=True):
        kinds = [("computing", figures.SERIES[0], ""), ("communicating", figures.SERIES[1], "//")]
        labels = []
        for rank in range(row["world_size"]):
            for kind, colour, hatch in kinds:
                begins, ends = (row["samples"].get(f"rank {rank} {kind}_{end}_ms", []) for end in ("begin", "end"))
                spans = [(begin, end - begin) for begin, end in zip(begins, ends, strict=True)]
                axis.broken_barh(spans, (-len(labels) - 0.4, 0.8), color=colour, hatch=hatch, label=kind)
                labels.append(f"rank {rank}, {kind}")
        axis.set_yticks([-position for position in range(len(labels))], labels)
        axis.set(title=called(row["phase"]), xlabel="time (ms)")
    title = f"Two steps of {case_name(rows[0])}, as profiled, {steps.attrs['device']}"
    figures.finish(figure, axes, title)
    return figure


def findings_steps(steps: pd.DataFrame) -> list[str]:
    """Says what naive and bucketed cost, how ours stand to torch's, and where the added time goes."""
    sentences, pairs = forms.failures(steps), over_alone(steps)
    parts = []
    for way in ("naive", "flat", "overlapped", BUCKETED):
        if len(of := select(pairs, phase=way)):
            parts.append(f"{way} {span(of['exposed_fraction'], percent)} ({count(len(of), 'case')})")
    if parts:
        sentences.append(f"Of a step, communication adds by way: {listing(parts)}.")
    against = forms.pairs(steps, "phase", "ddp", keys=CASE)
    if len(against := select(against, phase=BUCKETED)):
        sentences.append(f"Our buckets of 100 MB against torch's DDP, step: {forms.summary(against, case_name)}.")
    profiled = pairs[pairs["shows_ms"].notna()] if len(pairs) else pairs
    if len(of := select(profiled, phase=BUCKETED)):
        row = of.iloc[-1].to_dict()
        sentences.append(
            f"Overlapped is not free: for {case_name(row)} with buckets of 100 MB, {number(row['shows_ms'])} ms of "
            f"communication run beside no kernel, and the step's own kernels take {number(row['contention_ms'])} ms "
            "longer beside NCCL, which needs multiprocessors and memory bandwidth too."
        )
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
        row |= {"predicted_bytes": sum(parts.values()), "stage": stage}
        row["held_bytes"] = row["parameter_bytes"] + row["gradient_bytes"] + row["state_bytes"]
        result.append(row)
    return pd.DataFrame(result)


def table_memory(steps: pd.DataFrame, ways: tuple[str, ...]) -> pd.DataFrame:
    """Returns for these ways what memory holds at each moment, in GiB, beside the prediction, and the step's time."""
    rows = select(memory(steps), **shown_case(steps))
    result = []
    for way in ways:
        for row in select(rows, phase=way).to_dict("records"):
            line = {
                "way": called(way),
                "after init": gib(row["init_bytes"]),
                "before step": gib(row["before_step_bytes"]),
            }
            line |= {"after step": gib(row["after_step_bytes"]), "predicted": gib(row["predicted_bytes"])}
            line |= {"parameters": gib(row["parameter_bytes"]), "gradients": gib(row["gradient_bytes"])}
            line |= {"state": gib(row["state_bytes"]), "peak": gib(row["peak_bytes"]), "step (ms)": cell(row)}
            result.append(line)
    return pd.DataFrame(result)


def findings_memory(steps: pd.DataFrame, way: str, peer: str) -> list[str]:
    """Says what a sharding way saves, how far the prediction holds, and how it stands to torch's."""
    sentences, rows = [], memory(steps)
    ours, base = select(rows, phase=way), select(rows, phase=BUCKETED)
    for row in ours.to_dict("records")[-1:]:
        whole = base[(base[CASE] == pd.Series({name: row[name] for name in CASE})).all(axis=1)]
        if len(whole):
            whole = whole.iloc[0]
            saved, predicted = (whole[name] - row[name] for name in ("after_step_bytes", "predicted_bytes"))
            sentences.append(
                f"For {case_name(row)}, {called(way)} holds {gib(row['after_step_bytes'])} GiB after a step; with "
                f"everything on every rank it is {gib(whole['after_step_bytes'])}. That saves {gib(saved)} GiB, "
                f"{gib(predicted)} predicted."
            )
    if len(ours):
        off = ours["after_step_bytes"] / ours["predicted_bytes"] - 1
        sentences.append(
            f"What stays after a step exceeds parameters, gradients and moments by {span(off, percent)} "
            f"({count(len(ours), 'case')}): position tables, tokens, and weights that are not sharded."
        )
    for rival, what in ((peer, called(peer)), (BUCKETED, "the unsharded step")):
        pairs = select(forms.pairs(steps, "phase", rival, keys=CASE), phase=way)
        if len(pairs):
            sentences.append(f"Its step against {what}: {forms.summary(pairs, case_name)}.")
    return sentences


def table_gathers(steps: pd.DataFrame) -> pd.DataFrame:
    """Returns per case and fully sharded way the step and how long its gathers made the computation wait."""
    result = []
    for row in ok_rows(steps, phase=["fsdp", "fsdp copy", "fully_shard"]).to_dict("records"):
        waits = row["samples"].get("gather_wait_ms", [])
        line = {"case": case_name(row), "way": called(row["phase"]), "step (ms)": cell(row)}
        line["gathers"] = str(len(waits)) if waits else "–"
        line["waits in all (ms)"] = number(sum(waits)) if waits else "–"
        line["longest (ms)"] = number(max(waits)) if waits else "–"
        result.append(line)
    return pd.DataFrame(result)


# --- limits ---


@once_per_frame
def rates(collectives: pd.DataFrame, ceilings: pd.DataFrame) -> pd.DataFrame:
    """Returns compute and link rate of this machine, as measured, and of published hardware, with what follows.

    tokens: of a rank, above which data parallel training hides its communication, for many ranks (C/W).
    """
    rows = []
    product = ok_rows(ceilings, kind="gemm", precision="bf16")
    line = select(fits(collectives), transport="nccl", operation="all_gather")
    if len(product) and len(line):
        rows.append({"hardware": f"{collectives.attrs['device']}, measured", "link": "NCCL all-gather",
                     "tflops": product["achieved_tflops"].iloc[-1], "gbs": line["bus_gbs"].max()})  # fmt: skip
    sheets = published.load("interconnects")
    rows += [
        {"hardware": f"{row['gpu']}, datasheet", "link": row["link"], "tflops": row["bf16_tflops"],
         "gbs": row["link_gb_per_s"]}
        for row in sheets.to_dict("records")
    ]  # fmt: skip
    frame = pd.DataFrame(rows)
    return frame.assign(tokens=frame["tflops"] * 1e3 / frame["gbs"])


D_FF = 10240
"""Width of the feed-forward layer for which limits of tensor parallelism are stated: that of 2.7b."""


def table_limits(collectives: pd.DataFrame, ceilings: pd.DataFrame) -> pd.DataFrame:
    """Returns for each hardware the tokens a rank needs, and the ranks up to which tensor parallelism hides."""
    result = []
    for row in rates(collectives, ceilings).to_dict("records"):
        flops, bandwidth = row["tflops"] * 1e12, row["gbs"] * 1e9
        forward, backward = (
            communication.max_tensor_ranks(D_FF, bandwidth, flops, backward=backward) for backward in (False, True)
        )
        result.append({"hardware": row["hardware"], "link": row["link"], "bf16 (TFLOP/s)": number(row["tflops"], 4),
                       "one way (GB/s)": number(row["gbs"]), "tokens a rank": number(row["tokens"], 4),
                       "tensor parallel ranks, forward": number(forward), "backward": number(backward)})  # fmt: skip
    return pd.DataFrame(result)


def figure_limits(collectives: pd.DataFrame, ceilings: pd.DataFrame) -> Figure | None:
    """The tokens that each rank needs to hide data parallel communication, over the number of ranks."""
    rows = rates(collectives, ceilings)
    figure, (axis,) = figures.panels(1, width=8.0, height=3.4)
    ranks = [2**power for power in range(1, 11)]
    for number_, row in enumerate(rows.to_dict("records")):
        tokens = [row["tokens"] * (n - 1) / n for n in ranks]
        axis.plot(ranks, tokens, marker="osD^vP"[number_], color=figures.SERIES[number_], label=row["hardware"])
    figures.context_axis(axis, ranks, "ranks")
    figures.log_time_axis(axis, "tokens of a rank and step")
    figures.finish(figure, [axis], "Fewest tokens at which data parallel communication hides", num_columns=3)
    return figure


def findings_limits(collectives: pd.DataFrame, ceilings: pd.DataFrame, steps: pd.DataFrame) -> list[str]:
    """Says how many tokens a rank needs here, and whether the measured steps are on the right side of that."""
    rows = rates(collectives, ceilings)
    here = rows[rows["hardware"].str.endswith("measured")]
    if here.empty:
        return []
    row, world_size = here.iloc[0], int(steps["world_size"].max())
    needed = row["tokens"] * (world_size - 1) / world_size
    sentences = [
        f"At {number(row['tflops'])} TFLOP/s and {number(row['gbs'])} GB/s a rank needs {number(needed)} tokens in a "
        f"step on {world_size} ranks, {number(row['tokens'])} on many, for its products to take as long as gradients "
        "in bf16 do to travel; gradients in fp32, which the wrappers above send, need twice as many."
    ]
    pairs = select(over_alone(steps), phase=BUCKETED, precision="bf16")
    parts = [
        f"{case_name(each)} ({each['batch'] * each['context']:,} tokens) {percent(each['exposed_fraction'])}"
        for each in pairs.to_dict("records")
    ]
    if parts:
        sentences.append(f"What buckets of 100 MB, in fp32, added to the measured steps: {listing(parts)}.")
    return sentences


def front(chapter) -> list[tuple[str, str]]:
    """Returns the finding of this chapter for the front page, with the heading that it links to."""
    steps = chapter.records("steps")
    pairs = over_alone(steps) if not steps.empty else steps
    both = [select(pairs, phase=way) for way in ("naive", BUCKETED)] if not pairs.empty else []
    if not both or any(rows.empty for rows in both) or chapter.device_kind != "cuda":
        return []
    naive, bucketed = (rows.iloc[-1].to_dict() for rows in both)
    return [
        (
            f"**Gradients can travel while backward runs**: for {case_name(bucketed)}, {bucketed['world_size']} ranks, "
            f"communication adds {percent(bucketed['exposed_fraction'])} to a step in buckets, "
            f"{percent(naive['exposed_fraction'])} when each gradient is sent afterwards, call time.",
            "How much of it shows",
        )
    ]
