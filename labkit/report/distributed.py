"""Chapter 07: its figures, and the queries that are its alone. A step is one CUDA graph where such
were recorded.
"""

import itertools

import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure

from labkit import accounting
from labkit.configs import STEP_PARTS, model_config
from labkit.report import figures
from labkit.report.frame import cell, select, size_name, usable
from labkit.report.text import gib

TOGETHER = [
    "session",
    "size",
    "precision",
    "compile",
    "batch",
    "context",
    "world_size",
]
"""What ways have in common that were timed in turn in the same processes."""

LESS = "alone, less the AdamW of others"
"""A row that no way has: see `added`."""

SHARDED_BYTES = {
    "sharded optimizer": 8,
    "zero redundancy": 8,
    "fsdp": 16,
    "fsdp 16 blocks": 16,
    "fsdp copy": 16,
    "fully_shard": 16,
}
"""Of 16 bytes a parameter those that a way shards: AdamW's moments, or everything."""

SENT_BYTES = {"bucketed 100 MB": {"all_reduce": 4}, "fsdp": {"all_gather": 4, "reduce_scatter": 2}}
"""Bytes a parameter that a graphed bf16 step sends, by operation: weights are gathered twice."""

LINK_PHASE = "all_reduce float32 100000000"
"""Whose bus bandwidth stands for that of the links in closed forms."""


LANES = {"computing": "#0072b2", "communicating": "#e69f00"}


def time_or_bytes(row: dict) -> str:
    """Returns a step's time, of one whose blocks are compiled the GiB that its rank holds."""
    if row["compile"] == "regional":
        return cell(row, "after_step_bytes", gib)
    return cell(row)


def most_ranks(collectives: pd.DataFrame) -> pd.DataFrame:
    """Returns the all-reduces and all-gathers of the most ranks in fp32, with their `operation`."""
    rows = usable(collectives, "world_size", "phase", "transport", "bus_gbs")
    rows = rows[rows["world_size"] == rows["world_size"].max()]
    operation = rows["phase"].astype(str).str.extract("^(all_reduce|all_gather) float32")
    return rows.assign(operation=operation).dropna(subset="operation")


def of_most_ranks(steps: pd.DataFrame) -> pd.DataFrame:
    """Returns the rows of the most ranks; those of fewer are only there for `scaling`."""
    return select(steps, world_size=steps["world_size"].max()) if len(steps) else steps


def collectives_figure(rows: pd.DataFrame) -> Figure:
    """Draws bus bandwidth over size, a colour an operation and a dash a transport; gloo where there
    is no other.
    """
    of_gpus = select(rows, transport=["nccl", "ctas_4", "copy"])
    figure, (axis,) = figures.panels(1, height=2.6)
    sns.lineplot(
        rows if of_gpus.empty else of_gpus,
        x="num_bytes",
        y="bus_gbs",
        hue="operation",
        style="transport",
        markers=True,
        palette={"all_reduce": "#0072b2", "all_gather": "#e69f00"},
        ax=axis,
    )
    figures.log_scale(axis, "x")
    axis.set(xlabel="size (bytes)", ylabel="bus bandwidth (GB/s)")
    return figure


def shown(steps: pd.DataFrame) -> pd.DataFrame:
    """Returns the measured steps of one mode and batch: of CUDA graphs, without any of the first
    recorded.
    """
    rows = usable(steps, *TOGETHER)
    graphs = select(rows, compile="graph")
    rows = rows if graphs.empty else graphs
    return rows.merge(rows[["precision", "compile", "batch"]].head(1))


def steps_figure(rows: pd.DataFrame) -> Figure:
    """Draws the step of every way, median with p20 and p80, a panel a model; the line is a rank
    alone.
    """
    sizes = rows.groupby("size", sort=False)
    figure, axes = figures.panels(len(sizes), height=3.0)
    for axis, (size, ways) in zip(axes, sizes, strict=True):
        median = ways["median_ms"]
        ends = [median - ways["p20_ms"], ways["p80_ms"] - median]
        axis.barh(ways["phase"], median, xerr=ends, color="#56b4e9")
        axis.axvline(median.iloc[0], color="black")
        axis.set(title=size_name(size), xlabel="step (ms)")
        axis.invert_yaxis()
        axis.label_outer()
    return figure


def timeline_figure(rows: pd.DataFrame) -> Figure | None:
    """Draws when the first two ranks compute and communicate in two profiled steps, a panel a
    way.
    """
    rows = rows[["rank 0 computing_begin_ms" in samples for samples in rows["samples"]]]
    if rows.empty:
        return None
    figure, axes = figures.panels(len(rows), height=1.4, num_columns=1)
    for axis, way, samples in zip(axes, rows["phase"], rows["samples"], strict=True):
        for rank, (lane, colour) in itertools.product((0, 1), LANES.items()):
            name = f"rank {rank} {lane}"
            begins = pd.Series(samples[f"{name}_begin_ms"])
            ends = pd.Series(samples[f"{name}_end_ms"])
            axis.barh(name, ends - begins, left=begins, color=colour, linewidth=0)
        axis.set(title=way, xlabel="time in the profile (ms)")
        axis.sharex(axes[0])
        axis.invert_yaxis()
        axis.label_outer()
    return figure


def added(
    rows: pd.DataFrame,
    profiles: pd.DataFrame,
    collectives: pd.DataFrame,
) -> pd.DataFrame:
    """Returns the profiled steps beside the ranks alone of their session: what is added, and where
    that goes.

    shows_fraction: of communication, beside no other kernel; contention_ms: how much longer the
    others take, with copies into buckets; rate_tflops: of forward and backward, without AdamW,
    whose kernel time is chapter 02's;
    least_tokens: by closed form, of a rank, from which NCCL's all-reduces of 100 MB hide. The row
    LESS is a rank alone less the AdamW that other ranks do for it.
    """
    times = ["median_ms", "compute_us"]
    rows = usable(rows, *TOGETHER, *times, "exposed_us", "communication_us")
    alone = select(rows, phase="alone")[[*TOGETHER, *times]]
    rows = rows.merge(alone, on=TOGETHER, suffixes=("", "_alone"))
    updates = usable(profiles, "size", "optimizer_kernel_ms").groupby("size")
    adamw = rows["size"].map(updates["optimizer_kernel_ms"].median())
    flops = [
        accounting.phase_flops(model_config(size), *shape, "forward_backward", causal=True)
        for size, *shape in rows[["size", "batch", "context"]].to_numpy()
    ]
    others = 1 - 1 / rows["world_size"]
    links = select(collectives, transport="nccl", phase=LINK_PHASE)
    rows = rows.assign(
        added_ms=rows["median_ms"] - rows["median_ms_alone"],
        added_fraction=1 - rows["median_ms_alone"] / rows["median_ms"],
        shows_fraction=rows["exposed_us"] / rows["communication_us"],
        contention_ms=(rows["compute_us"] - rows["compute_us_alone"]) / 1e3,
        rate_tflops=flops / (rows["median_ms_alone"] - adamw) / 1e9,
        tokens=rows["batch"] * rows["context"],
    )
    rows["least_tokens"] = 2e3 * others * rows["rate_tflops"] / links["bus_gbs"].max()
    half = select(rows, phase="alone")
    less = half["median_ms"] - others * adamw
    return pd.concat([rows, half.assign(phase=LESS, median_ms=less, sessions=None)])


def held(steps: pd.DataFrame) -> pd.DataFrame:
    """Returns what a rank holds after a step, and `predicted_bytes` by closed form for the ways
    that shard.
    """
    rows = usable(steps, "phase", "observed", "world_size", "after_step_bytes")
    parameters = rows["observed"].map(lambda seen: seen["num_parameters"])
    saved = rows["phase"].map(SHARDED_BYTES) * (1 - 1 / rows["world_size"])
    return rows.assign(predicted_bytes=parameters * (16 - saved))


def beside(steps: pd.DataFrame, *columns: str) -> pd.DataFrame:
    """Returns the ways with a value in `columns`, `alone_ms` of their session, and the ratio."""
    rows = usable(steps, *TOGETHER, "median_ms", *columns)
    alone = select(rows, phase="alone")[[*TOGETHER, "median_ms"]]
    rows = rows[rows["phase"] != "alone"]
    rows = rows.merge(alone.rename(columns={"median_ms": "alone_ms"}), on=TOGETHER)
    return rows.assign(ratio=rows["median_ms"] / rows["alone_ms"])


def split(steps: pd.DataFrame) -> pd.DataFrame:
    """Returns the profiled ways with each of STEP_PARTS as a signed fraction of the step alone.

    ratio = 1 + parts + remainder; the remainder is what profiled steps differ from timed ones.
    """
    rows = beside(steps, "observed", *(f"{part}_us" for part in STEP_PARTS))
    for part, sign in STEP_PARTS.items():
        rows[part] = sign * rows[f"{part}_us"] / 1e3 / rows["alone_ms"]
    carriers = [next(iter(seen["transport"]), {}) for seen in rows["observed"]]
    for name in ("name", "blocks"):
        rows[f"transport_{name}"] = [carrier.get(name) for carrier in carriers]
    return rows.assign(remainder=rows["ratio"] - 1 - rows[list(STEP_PARTS)].sum(axis=1))


def split_table(steps: pd.DataFrame) -> pd.DataFrame:
    """Returns `split` in percent of the step alone, one row a way."""
    rows = split(steps)
    rest = rows["drift"] + rows["remainder"]
    columns = {
        "step": rows["ratio"],
        "exposed": rows["exposed"],
        "contention": rows["contention"],
        "added, idle": rows["added"] + rows["idle"],
        "AdamW saved": rows["saved"],
        "drift, rest": rest,
    }
    return pd.DataFrame({"way": rows["phase"], **{k: 100 * v for k, v in columns.items()}}).round(1)


def scaling(steps: pd.DataFrame, collectives: pd.DataFrame) -> pd.DataFrame:
    """Returns graphed steps by number of ranks, and what closed forms say.

    ratio: to a rank alone with the same batch (weak scaling). speedup: of one GPU with the batch of
    all ranks together (strong), where that was measured. predicted_ratio: with communication at the
    links' bandwidth that hides in two thirds of the step, its backward pass, or in all of it where
    weights are gathered.
    """
    rows = beside(select(steps, compile="graph", phase=["alone", *SENT_BYTES]))
    links = select(collectives, transport="nccl", phase=LINK_PHASE)
    bandwidths = links.groupby("world_size")["bus_gbs"].max() if len(links) else {}
    rows["predicted_ratio"] = [
        _predicted_ratio(row, bandwidths.get(row.world_size)) for row in rows.itertuples()
    ]
    one = select(usable(steps, *TOGETHER, "median_ms"), compile="graph", phase="alone")
    case = ["size", "precision", "context", "batch"]
    one = one.groupby(case, as_index=False)["median_ms"].median()
    whole = rows.assign(batch=rows["batch"] * rows["world_size"])[case]
    one_ms = whole.merge(one, on=case, how="left")["median_ms"]
    return rows.assign(speedup=one_ms / rows["median_ms"])


def _predicted_ratio(row, bandwidth: float | None) -> float | None:
    if bandwidth is None:
        return None
    parameters = accounting.num_parameters(model_config(row.size))
    seconds = sum(
        accounting.ring_seconds(operation, each * parameters, row.world_size, 1e9 * bandwidth)
        for operation, each in SENT_BYTES[row.phase].items()
    )
    hidden = 1 if row.phase == "fsdp" else 2 / 3
    return 1 + max(0, 1e3 * seconds / row.alone_ms - hidden)
