"""Chapter 07: its figures, and the queries that are its alone. A step is one CUDA graph where such
were recorded.
"""

import itertools

import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure

from labkit import accounting
from labkit.configs import STEP_8B_WAYS, STEP_PARTS, model_config
from labkit.report import figures
from labkit.report.frame import cell, in_order, select, size_name, usable
from labkit.report.text import gib, number, percent

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

SHARDED_BYTES = {"sharded optimizer": 8, "zero redundancy": 8, "fsdp": 16, "fully_shard": 16}
"""Of 16 bytes a parameter those that a way shards: AdamW's moments, or everything. Transports are
left out of its name.
"""

HELD = "held"
"""Stands for the mode of steps in a table that says what a rank holds."""

LANES = {"computing": "#0072b2", "communicating": "#e69f00"}


def time_or_bytes(row: dict) -> str:
    """Returns a step's time, or the GiB that its rank holds."""
    if row["compile"] == HELD:
        return cell(row, "after_step_bytes", gib)
    return cell(row)


def most_ranks(collectives: pd.DataFrame) -> pd.DataFrame:
    """Returns the all-reduces and all-gathers of the most ranks in fp32, with their `operation`."""
    rows = of_most_ranks(usable(collectives, "world_size", "phase", "transport", "bus_gbs"))
    operation = rows["phase"].astype(str).str.extract("^(all_reduce|all_gather) float32")
    return rows.assign(operation=operation).dropna(subset="operation")


def of_most_ranks(rows: pd.DataFrame) -> pd.DataFrame:
    """Returns the rows of the most ranks; steps of fewer say how they scale."""
    return rows if rows.empty else select(rows, world_size=rows["world_size"].max())


def collectives_figure(rows: pd.DataFrame) -> Figure:
    """Draws bus bandwidth over size, a colour an operation and a marker a transport; gloo where
    there is no other.
    """
    of_gpus = select(rows, transport=["nccl", "ctas_4", "copy"])
    figure, axis = figures.panel(height=2.6)
    sns.lineplot(
        rows if of_gpus.empty else of_gpus,
        x="num_bytes",
        y="bus_gbs",
        hue="operation",
        style="transport",
        markers={"nccl": "o", "gloo": "o", "ctas_4": "X", "copy": "s"},
        palette={"all_reduce": "#0072b2", "all_gather": "#e69f00"},
        dashes=False,
        ax=axis,
    )
    figures.log_scale(axis, "x")
    axis.set(xlabel="size (bytes)", ylabel="bus bandwidth (GB/s)")
    return figure


def shown(steps: pd.DataFrame) -> pd.DataFrame:
    """Returns the measured steps of one mode and batch: of CUDA graphs, without any of the first
    recorded.
    """
    rows = usable(steps, "phase", *TOGETHER)
    graphs = select(rows, compile="graph")
    rows = rows if graphs.empty else graphs
    rows = rows.merge(rows[["precision", "compile", "batch"]].head(1))
    return in_order(rows, ["phase", "size"])


def steps_figure(rows: pd.DataFrame) -> Figure:
    """Draws the step of every way, median with p20 and p80, a panel a model, no bar where one does
    not have it; the line is a rank alone.
    """
    figure, axes = figures.panels(rows.groupby("size", sort=False), height=3.0)
    for axis, (size, ways) in axes:
        ways = ways.set_index("phase").reindex(rows["phase"].unique())
        # NaN at the end would shorten an axis, and the panels share the names of the first.
        median = ways["median_ms"].fillna(0)
        ends = [median - ways["p20_ms"], ways["p80_ms"] - median]
        axis.barh(ways.index, median, xerr=ends, color="#56b4e9")
        axis.axvline(median.get("alone", 0), color="black")
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
    ways = zip(rows["phase"], rows["samples"], strict=True)
    figure, axes = figures.panels(ways, height=1.4, num_columns=1)
    for axis, (way, samples) in axes:
        for rank, (lane, colour) in itertools.product((0, 1), LANES.items()):
            name = f"rank {rank} {lane}"
            begins = pd.Series(samples[f"{name}_begin_ms"])
            ends = pd.Series(samples[f"{name}_end_ms"])
            axis.barh(name, ends - begins, left=begins, color=colour, linewidth=0)
        axis.set(title=way, xlabel="time in the profile (ms)")
        axis.sharex(figure.axes[0])
        axis.invert_yaxis()
        axis.label_outer()
    return figure


def beside_alone(steps: pd.DataFrame, also: list[str], *columns: str) -> pd.DataFrame:
    """Returns the rows that have all these columns, with the time and `also` of the ranks alone of
    their session under names that end in "_alone".
    """
    values = ["median_ms", *also]
    rows = usable(steps, *TOGETHER, *values, *columns)
    alone = select(rows, phase="alone")[[*TOGETHER, *values]]
    return rows.merge(alone, on=TOGETHER, suffixes=("", "_alone"))


def added(
    rows: pd.DataFrame,
    profiles: pd.DataFrame,
    collectives: pd.DataFrame,
) -> pd.DataFrame:
    """Returns the profiled steps beside the ranks alone of their session: what is added.

    shows_fraction: of communication, beside no other kernel; contention_ms: how much longer the
    others take, with copies into buckets; rate_tflops: of forward and backward, without AdamW,
    whose kernel time is chapter 02's; least_tokens: by closed form, of a rank, from which NCCL's
    all-reduces of 100 MB hide.
    """
    rows = beside_alone(rows, ["compute_us"], "exposed_us", "communication_us")
    updates = usable(profiles, "size", "optimizer_kernel_ms").groupby("size")
    adamw = rows["size"].map(updates["optimizer_kernel_ms"].median())
    flops = [
        accounting.phase_flops(model_config(size), *shape, "forward_backward", causal=True)
        for size, *shape in rows[["size", "batch", "context"]].to_numpy()
    ]
    links = select(collectives, transport="nccl", phase="all_reduce float32 100000000")
    rows = rows.assign(
        shows_fraction=rows["exposed_us"] / rows["communication_us"],
        contention_ms=(rows["compute_us"] - rows["compute_us_alone"]) / 1e3,
        rate_tflops=flops / (rows["median_ms_alone"] - adamw) / 1e9,
        tokens=rows["batch"] * rows["context"],
    )
    others = 1 - 1 / rows["world_size"]
    least_tokens = 2e3 * others * rows["rate_tflops"] / links["bus_gbs"].max()
    return rows.assign(least_tokens=least_tokens)


def resident(steps: pd.DataFrame) -> pd.DataFrame:
    """Returns the steps that say what a rank holds: launched with compiled blocks, or else as
    graphs.
    """
    launched = select(steps, compile="regional")
    return select(steps, compile="graph") if launched.empty else launched


def held(steps: pd.DataFrame) -> pd.DataFrame:
    """Returns what a rank holds after a step, and `predicted_bytes` by closed form for the ways
    that shard.
    """
    rows = usable(steps, "phase", "observed", "world_size", "after_step_bytes")
    parameters = rows["observed"].str["num_parameters"]
    ways = rows["phase"].str.replace(" copy| 16 blocks", "", regex=True)
    saved = ways.map(SHARDED_BYTES) * (1 - 1 / rows["world_size"])
    return rows.assign(predicted_bytes=parameters * (16 - saved))


def split(steps: pd.DataFrame) -> pd.DataFrame:
    """Returns the profiled ways of any number of ranks, with what makes up their steps.

    ratio: to a rank alone of the same batch and session (weak scaling). It is 1, each of STEP_PARTS
    as a signed fraction of the step alone, and the remainder, what profiled steps differ from timed
    ones. speedup: over one GPU with the batch of all ranks together (strong scaling), where that
    was measured.
    """
    rows = beside_alone(steps, [], "observed", *(f"{part}_us" for part in STEP_PARTS))
    alone_ms = rows["median_ms_alone"]
    rows["ratio"] = rows["median_ms"] / alone_ms
    rows["remainder"] = rows["ratio"] - 1
    for part, sign in STEP_PARTS.items():
        rows[part] = sign * rows[f"{part}_us"] / 1e3 / alone_ms
        rows["remainder"] -= rows[part]
    for name in ("transport", "blocks"):
        rows[name] = rows["observed"].str.get(name)
    case = ["size", "precision", "compile", "context", "batch"]
    one_ms = select(rows, phase="alone").groupby(case)["median_ms"].median().rename("one_ms")
    batches = rows[case].assign(batch=rows["batch"] * rows["world_size"])
    rows["speedup"] = batches.join(one_ms, on=case)["one_ms"] / rows["median_ms"]
    return rows


def split_table(steps: pd.DataFrame) -> pd.DataFrame:
    """Returns `split` in percent of the step alone, one row a way."""
    rows = split(steps)
    rows["added, idle"] = rows["added"] + rows["idle"]
    rows["drift, rest"] = rows["drift"] + rows["remainder"]
    columns = ["ratio", "exposed", "contention", "added, idle", "saved", "drift, rest"]
    # Adding 0 leaves no −0.
    percents = rows.set_index("phase")[columns].mul(100).round(1) + 0.0
    return percents.rename_axis("way").reset_index()


BOARD = {
    "step (s)": ("sustained_ms", lambda ms: number(ms / 1e3)),
    "tokens/s": ("tokens_per_s", number),
    "of the roof": ("sustained_ceiling_fraction", percent),
    "peak (GiB)": ("peak_bytes", gib),
    "power (W)": ("watts", number),
    "loss, at most off by": ("loss_deviation", percent),
}
"""Columns of the step of 8.1 B: metric and form."""


def board(rows: pd.DataFrame) -> pd.DataFrame:
    """Returns all ways of the step of 8.1 B, measured or not."""
    measured = {row["phase"]: row for row in rows.to_dict("records")}
    return pd.DataFrame(
        {"way": way} | {name: cell(measured.get(way), *how) for name, how in BOARD.items()}
        for way in STEP_8B_WAYS
    )
