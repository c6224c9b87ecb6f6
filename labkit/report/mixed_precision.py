"""Chapter 03: its figures, and the queries that are its alone."""

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from labkit.configs import NORM_SETTINGS
from labkit.report import facts, figures
from labkit.report.frame import ok_rows, only, select, usable
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


def sums_figure(accumulation: pd.DataFrame) -> Figure | None:
    """Draws the largest error so far of one hundredth added a thousand times, by format of terms
    and accumulator.
    """
    rows = ok_rows(accumulation, method="sequential").drop_duplicates(["accumulator", "term"])
    if rows.empty:
        return None
    figure, (axis,) = figures.panels(1, width=6.4, height=3.0)
    for row in rows.to_dict("records"):
        style = figures.STYLES[row["term"]]
        own = row["term"] == row["accumulator"]
        trace = np.array(row["samples"]["running_sum"])
        terms = np.arange(1, len(trace) + 1) * row["observed"]["trace_every"]
        # The error passes through 0, which a logarithmic axis does not have: the largest so far
        # does not.
        error = np.abs(trace - terms * row["exact_sum"] / row["num_terms"])
        look = {"color": style.colour, "marker": style.marker, "markevery": 0.12, "markersize": 5}
        look["markerfacecolor"] = style.colour if own else "white"
        label = f"{row['term']} terms in {row['accumulator']}"
        axis.plot(terms, np.maximum.accumulate(np.maximum(error, 1e-8)), label=label, **look)
    figures.log_scale(axis, "x")
    figures.log_scale(axis, "y")
    axis.set(xlabel="terms added", ylabel="largest error so far")
    figures.finish(figure, [axis], "", num_columns=3)
    return figure


def stall(accumulation: pd.DataFrame, accumulator: str) -> facts.Fact:
    """Returns the sum at which a format's running sum stops, measured and predicted."""
    rows = usable(select(accumulation, accumulator=accumulator), "stall_measured")
    if rows.empty:
        return facts.Fact(accumulator, missing=f"the end of a {accumulator} sum")
    row = rows.iloc[0]
    numbers = {"value": f"{row['stall_measured']:g}", "predicted": f"{row['stall_predicted']:g}"}
    return facts.Fact(accumulator, numbers)


def dtypes(records: pd.DataFrame) -> pd.DataFrame:
    """Returns one row per model and part, in the order of the forward pass, with the dtype under
    fp16 and bf16.
    """
    lines: dict[tuple, dict] = {}
    for record in ok_rows(records).to_dict("records"):
        for part, dtype in record["observed"]["dtypes"]:
            line = lines.setdefault(
                (record["model"], part), {"model": record["model"], "part": part}
            )
            line[record["autocast"]] = dtype
    return pd.DataFrame(lines.values())


def dtypes_table(records: pd.DataFrame) -> pd.DataFrame:
    """Returns the dtypes of the small model's parts under autocast."""
    rows = select(dtypes(records), model="toy").drop(columns="model", errors="ignore").head(8)
    return rows.rename(columns={name: f"under {name}" for name in ("fp16", "bf16")}).fillna("–")


def norm_costs(records: pd.DataFrame) -> pd.DataFrame:
    """Returns the measured norms with `is_sound` (finite, no overflow) and `cost`, the error over
    fp32 statistics'.
    """
    keys = ["norm", "setting", "input", "scale"]
    faults = ["overflowed_fraction", "nonfinite_fraction"]
    rows = ok_rows(records)
    if rows.empty:
        return rows
    rows = rows.reindex(columns=list(dict.fromkeys([*rows, *faults])))
    is_sound = (rows[faults].fillna(0) == 0).all(axis=1)
    base = select(rows, statistics="fp32").set_index(keys)["relative_error"].rename("base")
    rows = rows.join(base, on=keys)
    return rows.assign(
        is_sound=is_sound, cost=(rows["relative_error"] / rows["base"]).where(is_sound)
    )


def norms_figure(records: pd.DataFrame) -> Figure | None:
    """Draws the error over the input's scale: where digits are lost (a mean far from 0), where
    range ends (small ε).
    """
    rows = norm_costs(records)
    if rows.empty:
        return None
    figure, axes = figures.panels(2, height=2.9)
    shown = {"layer_norm": "offset", "rms_norm": "small epsilon"}
    for axis, (norm, setting) in zip(axes, shown.items(), strict=True):
        of_panel = select(rows, norm=norm, setting=setting).sort_values("scale")
        for (dtype, statistics), line in of_panel.groupby(["input", "statistics"], sort=False):
            if statistics == "library":
                continue
            style = figures.STYLES[dtype]
            sound = line[line["is_sound"]]
            look = {"color": style.colour, "marker": style.marker, "markersize": 5}
            look["markerfacecolor"] = style.colour if dtype == statistics else "white"
            label = f"{dtype} input, {statistics} statistics"
            axis.plot(sound["scale"], sound["relative_error"], label=label, **look)
            broken = line[~line["is_sound"]].assign(status="oom")
            figures.mark_failures(axis, broken, "scale", colour=style.colour)
        figures.log_scale(axis, "x")
        figures.log_scale(axis, "y")
        mean, epsilon = NORM_SETTINGS[setting]
        axis.set_title(f"{NORMS[norm]}, mean {mean:g} std, ε {power(epsilon)}")
        axis.set(xlabel="std of the input", ylabel="relative error")
    figures.finish(figure, axes, "", num_columns=2)
    return figure


def overflow(records: pd.DataFrame) -> facts.Fact:
    """Returns the largest cost of bf16 statistics in error, and from which scale on fp16 ones
    overflow in RMSNorm.
    """
    rows = norm_costs(records)
    broken = select(rows, statistics="fp16", norm="rms_norm", setting="centred")
    broken = broken[~broken["is_sound"]] if len(broken) else broken
    narrow = select(rows, statistics="bf16")
    narrow = narrow.dropna(subset=["cost"]) if len(narrow) else narrow
    if broken.empty or narrow.empty:
        return facts.Fact("", missing="norms with 16-bit statistics")
    large = broken[broken["scale"] >= 1]  # at small ones ε vanishes instead
    worst = facts.Quantity(narrow["cost"].max(), "×")
    return facts.Fact("", {"value": worst, "scale": f"{large['scale'].min():,.0f}"})


def added_casts(operators: pd.DataFrame, phase: str) -> facts.Fact:
    """Returns by what share bf16 autocast adds operators to a pass of the smallest counted model,
    and its casts.
    """
    rows = ok_rows(operators, phase=phase)
    sizes = rows["size"].unique() if len(rows) else []
    case = {"size": sizes[0], "phase": phase} if len(sizes) else {"phase": phase}
    plain = only(operators, precision="fp32", **case)
    cast = only(operators, precision="bf16", **case)
    if plain is None or cast is None:
        return facts.Fact(phase, missing=f"the casts of {phase}")
    more = cast["num_operators"] / plain["num_operators"] - 1
    size = facts.case_name({"size": case["size"]})
    numbers = {
        "value": facts.Quantity(more, "%"),
        "casts": facts.Quantity(cast["num_casts"], "count"),
        "size": size,
    }
    return facts.Fact(size, numbers)


def training_figure(training: pd.DataFrame) -> Figure | None:
    """Draws the loss over the steps by precision."""
    rows = {row["precision"]: row for row in ok_rows(training).to_dict("records")}
    if not rows:
        return None
    figure, (axis,) = figures.panels(1, width=6.4, height=3.0)
    for precision in [name for name in NAMES if name in rows]:
        style = figures.STYLES[precision]
        loss = pd.Series(rows[precision]["samples"]["loss"], dtype=float)
        look = {"color": style.colour, "marker": style.marker, "linestyle": style.dash}
        axis.plot(loss.index + 1, loss, label=NAMES[precision], markevery=20, markersize=5, **look)
    figures.log_scale(axis, "y")
    axis.set(xlabel="step", ylabel="loss (nats)")
    figures.finish(figure, [axis], "", num_columns=3)
    return figure


def final_loss(training: pd.DataFrame, precision: str) -> facts.Fact:
    """Returns the mean loss of the last twenty steps; of a model too small for findings none is
    made of it.
    """
    row = only(training, precision=precision)
    if row is None or row.get("final_loss") is None:
        return facts.Fact(NAMES[precision], missing=f"training in {NAMES[precision]}")
    numbers = {
        "value": f"{row['final_loss']:.4f}",
        "unmoved": facts.Quantity(row["unmoved_gains"], "%"),
    }
    return facts.Fact(facts.case_name({"size": row["size"]}), numbers, small=row["num_steps"] < 100)
