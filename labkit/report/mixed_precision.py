"""Chapter 03: its figures, and the queries that are its alone."""

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from labkit.configs import NORM_SETTINGS
from labkit.report import figures
from labkit.report.frame import ok_rows, select, usable
from labkit.report.text import power

NAMES = {
    "fp32": "fp32",
    "tf32": "TF32",
    "bf16": "bf16 autocast",
    "fp16": "fp16, scaled",
    "fp16_unscaled": "fp16, unscaled",
    "bf16_pure": "pure bf16",
}
NORMS = {"layer_norm": "LayerNorm", "rms_norm": "RMSNorm"}


def sums_figure(accumulation: pd.DataFrame) -> Figure:
    """Draws the largest error so far of one hundredth added a thousand times, by format of terms
    and accumulator.
    """
    rows = ok_rows(accumulation, method="sequential")
    figure, axis = figures.panel(height=3.0)
    for row in rows.drop_duplicates(["accumulator", "term"]).to_dict("records"):
        trace = np.array(row["samples"]["running_sum"])
        terms = np.arange(1, len(trace) + 1) * row["observed"]["trace_every"]
        # The error passes through 0, which a logarithmic axis does not have: the largest so far
        # does not.
        error = np.abs(trace - terms * row["exact_sum"] / row["num_terms"])
        error = np.maximum.accumulate(np.maximum(error, 1e-8))
        look = _look(row["term"], row["accumulator"])
        label = f"{row['term']} terms in {row['accumulator']}"
        axis.plot(terms, error, label=label, markevery=0.12, **look)
    figures.log_scale(axis, "xy")
    axis.set(xlabel="terms added", ylabel="largest error so far")
    return figures.finish(figure, num_columns=3)


def _look(dtype: str, statistics: str) -> dict:
    """Returns how a line of `dtype` is drawn: its markers hollow where the sums are of another."""
    style = figures.STYLES[dtype]
    return {
        "color": style.colour,
        "marker": style.marker,
        "markersize": 5,
        "markerfacecolor": style.colour if dtype == statistics else "white",
    }


def dtypes(records: pd.DataFrame) -> pd.DataFrame:
    """Returns one row per model and part, in the order of the forward pass, with the dtype under
    fp16 and bf16.
    """
    lines = [
        {"model": record["model"], "part": part, record["autocast"]: dtype}
        for record in ok_rows(records).to_dict("records")
        for part, dtype in record["observed"]["dtypes"]
    ]
    return pd.DataFrame(lines).groupby(["model", "part"], sort=False, as_index=False).last()


def dtypes_table(records: pd.DataFrame) -> pd.DataFrame:
    """Returns the dtypes of the small model's parts under autocast."""
    rows = select(dtypes(records), model="toy").drop(columns="model").head(8)
    return rows.rename(columns={"fp16": "under fp16", "bf16": "under bf16"}).fillna("–")


def norm_costs(records: pd.DataFrame) -> pd.DataFrame:
    """Returns the measured norms with `is_sound` (finite, no overflow) and `cost`, the error over
    fp32 statistics'.
    """
    keys = ["norm", "setting", "input", "scale"]
    faults = ["overflowed_fraction", "nonfinite_fraction"]
    rows = usable(records, *keys, "statistics")
    rows = rows.reindex(columns=[*keys, "statistics", "relative_error", *faults])
    base = select(rows, statistics="fp32").set_index(keys)["relative_error"]
    rows = rows.join(base.rename("base"), on=keys)
    is_sound = (rows[faults].fillna(0) == 0).all(axis=1)
    cost = (rows["relative_error"] / rows["base"]).where(is_sound)
    return rows.assign(is_sound=is_sound, cost=cost)


def norms_figure(records: pd.DataFrame) -> Figure:
    """Draws the error over the input's scale: where digits are lost (a mean far from 0), where
    range ends (small ε).
    """
    rows = norm_costs(records)
    shown = {"layer_norm": "offset", "rms_norm": "small epsilon"}
    figure, axes = figures.panels(shown.items(), height=2.9)
    for axis, (norm, setting) in axes:
        ordered = select(rows, norm=norm, setting=setting).sort_values("scale")
        lines = ordered[ordered["statistics"] != "library"].groupby(
            ["input", "statistics"], sort=False
        )
        for (dtype, statistics), line in lines:
            look = _look(dtype, statistics)
            sound = line[line["is_sound"]]
            label = f"{dtype} input, {statistics} statistics"
            axis.plot(sound["scale"], sound["relative_error"], label=label, **look)
            broken = line[~line["is_sound"]].assign(status="oom")
            figures.mark_failures(axis, broken, "scale", colour=look["color"])
        figures.log_scale(axis, "xy")
        mean, epsilon = NORM_SETTINGS[setting]
        axis.set_title(f"{NORMS[norm]}, mean {mean:g} std, ε {power(epsilon)}")
        axis.set(xlabel="std of the input", ylabel="relative error")
        axis.margins(y=0.15)  # room for the marks of failures
    return figures.finish(figure, num_columns=2)


def overflow(records: pd.DataFrame) -> pd.DataFrame:
    """Returns one row: the largest `cost` of bf16 statistics in error, and from which `scale` on
    fp16 ones overflow in RMSNorm.
    """
    rows = norm_costs(records)
    broken = select(rows, statistics="fp16", norm="rms_norm", setting="centred", is_sound=False)
    scale = broken["scale"][broken["scale"] >= 1].min()  # at small ones ε vanishes instead
    cost = select(rows, statistics="bf16")["cost"].max()
    return pd.DataFrame([{"status": "ok", "norms": "16-bit", "cost": cost, "scale": scale}])


def training_figure(training: pd.DataFrame) -> Figure:
    """Draws the loss over the steps by precision."""
    rows = ok_rows(training)
    figure, axis = figures.panel(height=3.0)
    for precision, name in NAMES.items():
        for samples in select(rows, precision=precision)["samples"]:
            loss = pd.Series(samples["loss"], dtype=float)
            axis.plot(
                loss.index + 1,
                loss,
                label=name,
                # Lines cover one another: the markers say that they are there.
                markevery=(3 * len(axis.lines), 20),
                markersize=5,
                **figures.STYLES[precision].line,
            )
    figures.log_scale(axis, "y")
    axis.set(xlabel="step", ylabel="loss (nats)")
    return figures.finish(figure, num_columns=3)
