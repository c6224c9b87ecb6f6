"""Notebook 03 from its records: what low precision does to numbers, and what a step gains by it in time and memory.

Every function takes data frames that `Chapter.records` returns, those about time and memory the one that `steps` makes
of two. A frame without the needed rows gives an empty table, no figure (None) or no sentence.
"""

import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from labkit import accounting, published
from labkit.configs import LAUNCH_BOUND, MIXED_PHASES, MIXED_PRECISION, NORM_SETTINGS, PRECISIONS, SIZES
from labkit.report import figures
from labkit.report.chapter import Chapter
from labkit.report.findings import (
    SAME,
    STABLE,
    count,
    geometric_mean,
    listing,
    number,
    percent,
    power,
    scientific,
    span,
    speed_word,
    times,
)
from labkit.report.tables import PHASE_NAMES, cell, in_order, ok_rows

NAMES = {
    "fp32": "fp32",
    "tf32": "TF32",
    "bf16": "bf16 autocast",
    "bf16_here": "bf16 autocast",
    "fp16": "fp16 autocast + GradScaler",
    "fp16_unscaled": "unscaled fp16 autocast",
    "bf16_pure": "pure bf16",
}
"""Precisions in the order and under the names in which this chapter shows them."""

ANCHOR = "bf16_here"
"""bf16 autocast as timed in this notebook's own session, what fp16 and pure bf16 are compared with."""

COMPARED = ("fp16", "bf16_pure")

STEP_NAMES = NAMES | {name: f"{NAMES[name]} (01)" for name in PRECISIONS}
"""Names where times of two sessions stand side by side: those of notebook 01's say so."""

METHODS = {"sequential": "one after another", "kahan": "Kahan", "pairwise": "pairwise"}
NORMS = {"layer_norm": "LayerNorm", "rms_norm": "RMSNorm"}
DTYPE_NAMES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
SERIES_KEYS = ["method", "accumulator", "term", "cast"]

PUBLISHED_SUMS = {
    "fp32_sum_of_fp32": ("sequential", "fp32", "fp32", "none"),
    "fp16_sum_of_fp16": ("sequential", "fp16", "fp16", "none"),
    "fp32_sum_of_fp16": ("sequential", "fp32", "fp16", "implicit"),
    "fp32_sum_of_fp16_upcast": ("sequential", "fp32", "fp16", "explicit"),
}
"""Published sums by the series that they are of."""

PUBLISHED_PARTS = {"feed_forward_output": "fc1_output"}
"""Parts of the small model that a published table calls otherwise."""

MATTERS = 2.0
"""An error is called larger from twice the other on: below, two runs of rounding errors differ as much by chance."""

LOSS_SAME = 0.05
"""Final losses within 0.05 nats of each other are called the same."""

BF16_BELOW_ONE = 2.0**-8
"""Spacing of bf16's numbers just below 1; above it is twice that."""


# ---- rows ----------------------------------------------------------------------------------------------------


def _by_precision(frame: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """Yields (precision, rows) in this chapter's order."""
    for precision in NAMES:
        rows = frame[frame["precision"] == precision] if len(frame) else frame
        if len(rows):
            yield precision, rows


def _power(value: float) -> str:
    """Returns a power of two as it is said: 0.25 is "2⁻²", 8 is "8"."""
    return f"{value:g}" if value >= 1 else power(value, 2)


def _factor(value: float) -> str:
    return f"{value:.2f}×"


def _case(size: str, context: int) -> str:
    return f"{size} at {context}"


def _cases(keys: Iterable[tuple[str, int]]) -> str:
    """Returns "small at 128 and 256, medium at 128" for (size, context) pairs."""
    contexts: dict[str, list[str]] = {}
    for size, context in keys:
        contexts.setdefault(size, []).append(str(context))
    return ", ".join(f"{size} at {listing(contexts[size])}" for size in SIZES if size in contexts)


def _legend_below(figure: Figure, axes: Sequence[Axes], ncols: int = 5) -> None:
    entries = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=min(len(entries), ncols))


# ---- accumulation --------------------------------------------------------------------------------------------


def _series_name(row: dict) -> str:
    terms = "" if row["cast"] == "none" else f" with {row['term']} terms"
    cast = " (explicit cast)" if row["cast"] == "explicit" else ""
    return f"{row['accumulator']}{terms}{cast}, {METHODS[row['method']]}"


def published_sums() -> dict[tuple, list[float]]:
    """Returns the published values of each series, (method, accumulator, term, cast)."""
    table = published.load("mixed_precision").query("kind == 'accumulation'")
    sums: dict[tuple, list[float]] = {}
    for row in table.to_dict("records"):
        sums.setdefault(PUBLISHED_SUMS[row["component"]], []).append(row["reported_value"])
    return sums


def table_accumulation(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns the final sum of every series beside the published ones, its error, and the term's share of it."""
    known = published_sums()
    return pd.DataFrame(
        {
            "added": METHODS[row["method"]],
            "accumulator": row["accumulator"],
            "terms": row["term"],
            "cast": "–" if row["cast"] == "none" else row["cast"],
            "sum": f"{row['final_sum']:.4f}",
            "published": ", ".join(
                sorted({f"{value:.4f}" for value in known.get(tuple(row[k] for k in SERIES_KEYS), [])})
            )
            or "–",
            "error": f"{row['error']:+.2e}",
            "of it by rounding the term": f"{row['term_error']:+.2e}",
        }
        for row in ok_rows(frame).to_dict("records")
    )


def _stalling(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns the series that are added one after another in 16 bits."""
    rows = ok_rows(frame, method="sequential")
    return rows[rows["accumulator"].isin(["fp16", "bf16"])] if len(rows) else rows


def binades(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns one row per 16-bit series and binade: what rounding makes of the term there, predicted and measured.

    The sums in a binade are multiples of its spacing, so that the exact sum is rounded by as much as the term would be.
    """
    rows = []
    for row in _stalling(frame).to_dict("records"):
        samples = row["samples"]
        for start, gap, additions, step in zip(
            samples["binade_start"], samples["binade_spacing"], samples["binade_additions"],
            samples["binade_mean_step"], strict=True,
        ):  # fmt: skip
            rows.append(
                {
                    "accumulator": row["accumulator"],
                    "start": start,
                    "spacing": gap,
                    "term": row["rounded_term"],
                    "predicted_step": round(row["rounded_term"] / gap) * gap,
                    "mean_step": step,
                    "additions": additions,
                }
            )
    return pd.DataFrame(rows)


def table_binades(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns how 0.01 is rounded in every binade that a 16-bit sum passes through."""
    return pd.DataFrame(
        {
            "accumulator": row["accumulator"],
            "sums from": _power(row["start"]),
            "to below": _power(2 * row["start"]),
            "spacing": number(row["spacing"], 4),
            "term / spacing": number(row["term"] / row["spacing"]),
            "added, predicted": number(row["predicted_step"], 4),
            "added, mean of the measured": number(row["mean_step"], 4),
            "additions": f"{int(row['additions']):,}",
        }
        for row in binades(frame).to_dict("records")
    )


def figure_accumulation(frame: pd.DataFrame) -> Figure | None:
    """Left the error of the running sum over the number of terms, right the spacing of 16-bit numbers over the sum."""
    measured = ok_rows(frame)
    if measured.empty:
        return None
    figure, axes = figures.panels(2, num_columns=2, width=5.2, height=3.4)
    colours = {"fp32": figures.COLOURS["fp32"], "fp16": figures.COLOURS["fp16"], "bf16": figures.COLOURS["bf16"]}
    styles = {"sequential": "-", "kahan": ":", "pairwise": "--"}
    for row in measured.to_dict("records"):
        sums = np.array(row["samples"]["running_sum"])
        terms = np.arange(1, len(sums) + 1) * row["observed"]["trace_every"]
        errors = np.abs(sums - terms * row["exact_sum"] / row["num_terms"])
        colour = colours[row["accumulator"] if row["cast"] == "none" else row["term"]]
        width = 1.2 if row["cast"] == "none" else 0.6
        # An error of zero has no place on a log axis: the line is interrupted there.
        axes[0].plot(terms, np.where(errors > 0, errors, np.nan), styles[row["method"]], color=colour, linewidth=width,
                     label=_series_name(row))  # fmt: skip
    figures.log_scale(axes[0], "x")
    figures.log_scale(axes[0], "y")
    axes[0].set_xlabel("terms added")
    axes[0].set_ylabel("|running sum − exact|")
    axes[0].set_title("error of the running sum")
    for row in _stalling(frame).to_dict("records"):
        samples = row["samples"]
        ends = [*samples["binade_start"], 2 * samples["binade_start"][-1]]
        half = [gap / 2 for gap in samples["binade_spacing"]]
        axes[1].stairs(half, ends, baseline=None, color=colours[row["accumulator"]], label=None)
        axes[1].axvline(row["stall_predicted"], color=colours[row["accumulator"]], linestyle=":", linewidth=1)
    axes[1].axhline(measured["exact_sum"].iloc[0] / measured["num_terms"].iloc[0], color="0.2", linewidth=1)
    figures.log_scale(axes[1], "x", base=2)
    figures.log_scale(axes[1], "y", base=2)
    axes[1].set_xlabel("running sum")
    axes[1].set_ylabel("half of the spacing")
    axes[1].set_title("where half the spacing reaches the term (line), nothing is added")
    _legend_below(figure, axes[:1], ncols=3)
    figure.suptitle(f"Adding one term many times, {frame.attrs['device']}", fontsize=10)
    return figure


def findings_accumulation(frame: pd.DataFrame) -> list[str]:
    """Says whether the published sums come out, why a 16-bit sum stalls, and what better addition changes."""
    measured = ok_rows(frame)
    if measured.empty:
        return []
    return [*_published_sums(measured), *_stalls(frame), *_term_errors(measured), *_better_addition(measured)]


def _published_sums(measured: pd.DataFrame) -> list[str]:
    known = published_sums()
    ours = {tuple(row[key] for key in SERIES_KEYS): row["final_sum"] for row in measured.to_dict("records")}
    compared = {key: ours[key] for key in known if key in ours}
    wrong = [key for key, value in compared.items() if any(f"{value:.4f}" != f"{v:.4f}" for v in known[key])]
    if not compared:
        return []
    values = listing(f"{value:.4f}" for value in compared.values())
    if not wrong:
        return [f"The {count(len(compared), 'sum')} that others published come out to the fourth decimal: {values}."]
    texts = (
        f"{compared[key]:.4f} where {listing(sorted({f'{v:.4f}' for v in known[key]}))} was published" for key in wrong
    )
    return [f"{len(wrong)} of {count(len(compared), 'published sum')} do **not** come out: {listing(texts)}."]


def _stalls(frame: pd.DataFrame) -> list[str]:
    sentences = []
    steps = binades(frame)
    for row in _stalling(frame).to_dict("records"):
        of_series = steps[steps["accumulator"] == row["accumulator"]]
        last = of_series.iloc[-1]
        text = (
            f"Sums in {row['accumulator']} from {_power(last['start'])} on are {number(last['spacing'], 4)} apart, so "
            f"{number(last['term'], 4)} is added there as {number(last['mean_step'], 4)}"
        )
        off = of_series[(of_series["mean_step"] - of_series["predicted_step"]).abs() > 0.01 * of_series["term"]]
        if off.empty:
            text += "; in every binade the step is the term rounded to the spacing"
        else:
            at = listing(f"[{_power(s)}, {_power(2 * s)})" for s in off["start"])
            text += f"; the mean step is not the term rounded to the spacing in {at}, where sums tie or enter a binade"
        text += f". At {row['stall_predicted']:g} the term is at most half of the spacing, and rounding must drop it"
        if pd.notna(row.get("stall_measured")):
            word = "as it does" if row["stall_measured"] == row["stall_predicted"] else "but"
            text += (
                f", {word}: the sum stays at {row['stall_measured']:g} from the {int(row['stall_terms']):,}th term on"
            )
        sentences.append(text + ".")
    return sentences


def _term_errors(measured: pd.DataFrame) -> list[str]:
    mixed = measured[(measured["cast"] != "none")]
    sentences = []
    for term, rows in mixed.groupby("term", sort=False):
        alike = rows["final_sum"].nunique() == 1
        row = rows.iloc[0]
        share = row["term_error"] / row["error"] if row["error"] else math.nan
        text = (
            f"With an fp32 accumulator and {term} terms the error is {number(row['error'])}, of which "
            f"{percent(share)} is that of writing {number(row['exact_sum'] / row['num_terms'])} in {term}"
        )
        if len(rows) > 1:
            text += "; an implicit and an explicit cast give " + ("the same sum" if alike else "different sums")
        sentences.append(text + ".")
    return sentences


def _better_addition(measured: pd.DataFrame) -> list[str]:
    sentences = []
    for accumulator, rows in measured[measured["cast"] == "none"].groupby("accumulator", sort=False):
        errors = rows.set_index("method")["error"].abs()
        if "sequential" not in errors or len(errors) < 2:
            continue
        others = errors.drop("sequential")
        parts = (f"{METHODS[method]} {number(error)}" for method, error in others.items())
        sentences.append(
            f"In {accumulator} the error of adding one after another is {number(errors['sequential'])}; of "
            f"{listing(parts)} (rounding of the term included)."
        )
    return sentences


# ---- dtypes under autocast -----------------------------------------------------------------------------------


def dtypes(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns one row per model and component, in the order of the forward pass: model, component, fp16, bf16."""
    rows: dict[tuple, dict] = {}
    for record in ok_rows(frame).to_dict("records"):
        for component, dtype in record["observed"]["dtypes"]:
            key = (record["model"], component)
            rows.setdefault(key, {"model": record["model"], "component": component})[record["autocast"]] = dtype
    return pd.DataFrame(rows.values())


def published_dtypes() -> pd.DataFrame:
    """Returns the published dtypes of the small model: source, component (as named here), autocast, dtype."""
    table = published.load("mixed_precision").query("kind == 'dtype'")
    autocast = {name: short for short, name in DTYPE_NAMES.items()}
    return pd.DataFrame(
        {
            "source": table["source"],
            "component": table["component"].map(lambda name: PUBLISHED_PARTS.get(name, name)),
            "autocast": table["autocast_dtype"].map(autocast),
            "dtype": table["reported_dtype"],
        }
    )


def table_dtypes(frame: pd.DataFrame, *, of_toy: bool) -> pd.DataFrame:
    """Returns the dtypes of the small model's components with the published ones, or of the transformer's."""
    rows = dtypes(frame)
    if rows.empty:
        return rows
    rows = rows[(rows["model"] == "toy") == of_toy]
    others = published_dtypes()
    result = []
    for row in rows.to_dict("records"):
        line = {"component": f"`{row['component']}`"}
        for short in ("fp16", "bf16"):
            line[f"under {short}"] = row.get(short, "–")
            if of_toy:
                match = others[(others["component"] == row["component"]) & (others["autocast"] == short)]
                counts = match["dtype"].value_counts().sort_index()
                line[f"published, {short}"] = ", ".join(f"{dtype} ({n})" for dtype, n in counts.items()) or "–"
        result.append(line)
    return pd.DataFrame(result)


def findings_dtypes(frame: pd.DataFrame) -> list[str]:
    """Says what stays in fp32 under autocast, and where a published table says otherwise."""
    rows = dtypes(frame)
    if rows.empty:
        return []
    sentences = []
    for model, parts in rows.groupby("model", sort=False):
        for short in [name for name in ("fp16", "bf16") if name in parts]:
            groups = {dtype: list(group["component"]) for dtype, group in parts.groupby(short, sort=False)}
            full = groups.pop("float32", [])
            texts = [f"{listing(map(_code, full), limit=12)} are float32"] if full else []
            texts += [f"{listing(map(_code, names), limit=12)} {dtype}" for dtype, names in groups.items()]
            name = "small model" if model == "toy" else f"{model} transformer"
            sentences.append(f"The {name} under {short} autocast: {'; '.join(texts)}.")
    return [*sentences, *_disagreements(rows)]


def _code(name: str) -> str:
    return f"`{name}`"


def _disagreements(rows: pd.DataFrame) -> list[str]:
    toy = rows[rows["model"] == "toy"].set_index("component")
    others = published_dtypes()
    compared, wrong = 0, []
    for other in others.to_dict("records"):
        if other["component"] not in toy.index or other["autocast"] not in toy:
            continue
        ours = toy.loc[other["component"], other["autocast"]]
        compared += 1
        if ours != other["dtype"]:
            wrong.append((other["component"], other["autocast"], other["dtype"], ours))
    if not compared:
        return []
    text = f"Of {count(compared, 'published dtype')} {compared - len(wrong)} are what runs here"
    if wrong:
        parts = (
            f"`{component}` under {short}, {theirs} in {count(wrong.count((component, short, theirs, ours)), 'table')} "
            f"and {ours} here"
            for component, short, theirs, ours in dict.fromkeys(wrong)
        )
        text += f"; others differ: {listing(parts)}"
    return [text + "."]


# ---- normalisation -------------------------------------------------------------------------------------------

NORM_KEYS = ["norm", "setting", "input", "statistics"]
_VARIANT_COLOURS = {
    ("fp32", "fp32"): ("fp32", "-"),
    ("fp16", "fp16"): ("fp16", "-"),
    ("fp16", "fp32"): ("fp16", "--"),
    ("fp16", "library"): ("fp16", ":"),
    ("bf16", "bf16"): ("bf16", "-"),
    ("bf16", "fp32"): ("bf16", "--"),
    ("bf16", "library"): ("bf16", ":"),
}


def _variant(dtype: str, statistics: str) -> str:
    return f"{dtype}, PyTorch's own" if statistics == "library" else f"{dtype}, statistics {statistics}"


def _setting(name: str) -> str:
    offset, epsilon = NORM_SETTINGS[name]
    mean = f"mean {offset:g} std" if offset else "mean 0"
    return f"{mean}, ε {power(epsilon)}"


def _breaks(rows: pd.DataFrame, column: str) -> list[float]:
    """Returns the scales at which any row of the input has this fault."""
    if column not in rows:
        return []
    return sorted(rows[rows[column] > 0]["scale"])


def _sound(rows: pd.DataFrame) -> pd.DataFrame:
    """Returns the measured rows in which no statistic overflowed and every result is finite."""
    overflowed = rows["overflowed_fraction"].fillna(0) if "overflowed_fraction" in rows else 0
    return rows[(rows["nonfinite_fraction"] == 0) & (overflowed == 0)]


def _groups(frame: pd.DataFrame, keys: list[str] = NORM_KEYS) -> Iterator[tuple[tuple, pd.DataFrame]]:
    measured = ok_rows(frame)
    if len(measured):
        yield from measured.groupby(keys, sort=False)


def table_normalisation(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns, over the scales: where statistics overflow or vanish, where results are not finite, the worst error."""
    result = []
    for (norm, setting, dtype, statistics), rows in _groups(frame):
        sound = _sound(rows)
        factor = (sound["relative_error"] / sound["rounding_error"]).max()
        result.append(
            {
                "normalisation": NORMS[norm],
                "input": _setting(setting),
                "variant": _variant(dtype, statistics),
                "overflow": _scales(_breaks(rows, "overflowed_fraction")),
                "squares vanish": _scales(_breaks(rows, "vanished_fraction")),
                "not finite": _scales(_breaks(rows, "nonfinite_fraction")),
                "largest error": scientific(sound["relative_error"].max()),
                "of one rounding": times(factor),
            }
        )
    return pd.DataFrame(result)


def _scales(scales: Sequence[float]) -> str:
    return "–" if not scales else span(scales, power)


def table_normalisation_scales(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns the relative error at every scale; words where there is no sound result."""
    if frame.empty:
        return frame

    def text(row: dict) -> str:
        if row["status"] != "ok":
            return row["status"]
        if row["nonfinite_fraction"] > 0:
            return "not finite"
        if row.get("overflowed_fraction", 0) > 0:
            return "overflow"
        return scientific(row["relative_error"])

    scales = sorted(frame["scale"].unique())
    lines: dict[tuple, dict] = {}
    for row in frame.to_dict("records"):
        lines.setdefault(tuple(row[key] for key in NORM_KEYS), {})[row["scale"]] = text(row)
    return pd.DataFrame(
        {
            "normalisation": NORMS[norm],
            "input": _setting(setting),
            "variant": _variant(dtype, statistics),
            **{power(scale): cells.get(scale, "–") for scale in scales},
        }
        for (norm, setting, dtype, statistics), cells in lines.items()
    )


def figure_normalisation(frame: pd.DataFrame) -> Figure | None:
    """One row of panels per normalisation, one column per kind of input: error over the input's scale."""
    measured = ok_rows(frame)
    if measured.empty:
        return None
    panels = [(norm, setting) for norm in NORMS for setting in NORM_SETTINGS]
    figure, axes = figures.panels(len(panels), num_columns=len(NORM_SETTINGS), width=3.6)
    for axis, (norm, setting) in zip(axes, panels, strict=True):
        of_panel = measured[(measured["norm"] == norm) & (measured["setting"] == setting)]
        for (dtype, statistics), rows in of_panel.groupby(["input", "statistics"], sort=False):
            name, style = _VARIANT_COLOURS[dtype, statistics]
            colour = figures.COLOURS[name]
            sound = _sound(rows).sort_values("scale")
            axis.plot(sound["scale"], sound["relative_error"], style, color=colour, marker="o", markersize=2.5,
                      linewidth=1.1, label=_variant(dtype, statistics))  # fmt: skip
            broken = rows[~rows.index.isin(sound.index)]
            axis.scatter(broken["scale"], [0.97] * len(broken), transform=axis.get_xaxis_transform(), marker="x",
                         color=colour, s=22, clip_on=False)  # fmt: skip
        figures.log_scale(axis, "x")
        figures.log_scale(axis, "y")
        axis.set_xlabel("standard deviation of the input")
        axis.set_ylabel("relative error")
        axis.set_title(f"{NORMS[norm]}, {_setting(setting)}")
    _legend_below(figure, axes, ncols=4)
    figure.suptitle(
        f"Error of a normalisation against fp64, {frame.attrs['device']} (× overflow or no finite result)", fontsize=10
    )
    return figure


def findings_normalisation(frame: pd.DataFrame) -> list[str]:
    """Says where the statistics overflow, where ε vanishes, how many digits are lost, and what bf16 lacks."""
    return [*_overflow(frame), *_vanishing_epsilon(frame), *_digits(frame), *_bf16(frame), *_library(frame)]


def _overflow(frame: pd.DataFrame) -> list[str]:
    sentences = []
    for dtype in ("fp16", "bf16", "fp32"):
        parts, num_groups = [], 0
        for (norm, setting, _, statistics), rows in _groups(frame):
            if statistics != dtype:
                continue
            num_groups += 1
            if scales := _breaks(rows, "overflowed_fraction"):
                parts.append((min(scales), f"{NORMS[norm]} with {_setting(setting)} from {power(min(scales))} on"))
        if parts:
            texts = listing(dict.fromkeys(text for _, text in sorted(parts)))
            sentences.append(f"The mean square overflows in {dtype} at standard deviations: {texts}.")
        elif num_groups:
            scales = sorted(ok_rows(frame)["scale"].unique())
            sentences.append(f"The mean square overflows in {dtype} at no scale ({span(scales, power)}).")
    return sentences


def _vanishing_epsilon(frame: pd.DataFrame) -> list[str]:
    measured = ok_rows(frame)
    if measured.empty or "epsilon" not in measured:
        return []
    sentences = []
    gone = measured[measured["epsilon"] == 0]
    for (statistics, setting), rows in gone.groupby(["statistics", "setting"], sort=False):
        text = f"ε = {power(NORM_SETTINGS[setting][1])} is 0 in {statistics}"
        vanishing = rows[rows["vanished_fraction"] > 0]
        if broken := _breaks(vanishing, "nonfinite_fraction"):
            text += f": where the squares vanish too, the result is not finite (standard deviation {_scales(broken)})"
        else:
            text += ", which no result here is lost by"
        sentences.append(text + ".")
    kept = sorted(set(measured["statistics"]) - set(gone["statistics"]) - {"library"})
    if kept and len(gone):
        sentences.append(f"In {listing(kept)} every ε here is kept.")
    return sentences


def _cost(frame: pd.DataFrame, dtype: str) -> dict[tuple[str, str], float]:
    """Returns by (norm, setting) the largest factor that 16-bit statistics put on the error of fp32 statistics."""
    measured = ok_rows(frame)
    if measured.empty:
        return {}
    sound = _sound(measured)
    keys = ["norm", "setting", "scale"]
    low = sound[(sound["input"] == dtype) & (sound["statistics"] == dtype)].set_index(keys)["relative_error"]
    high = sound[(sound["input"] == dtype) & (sound["statistics"] == "fp32")].set_index(keys)["relative_error"]
    factors = (low / high).dropna()
    return factors.groupby(level=["norm", "setting"], sort=False).max().to_dict()


def _digits(frame: pd.DataFrame) -> list[str]:
    sentences = []
    for dtype in ("fp16", "bf16"):
        factors = _cost(frame, dtype)
        if factors:
            parts = (
                f"{times(factor)} for {NORMS[norm]} with {_setting(setting)}"
                for (norm, setting), factor in sorted(factors.items(), key=lambda item: -item[1])
            )
            sentences.append(
                f"Where nothing overflows, statistics in {dtype} have at most so many times the error of fp32 "
                f"statistics on the same {dtype} input: {listing(parts)}."
            )
    return sentences


def _bf16(frame: pd.DataFrame) -> list[str]:
    """Says whether bf16's trouble with statistics is range or digits."""
    rows = ok_rows(frame, input="bf16", statistics="bf16")
    factors = _cost(frame, "bf16")
    if rows.empty or not factors:
        return []
    range_lost = bool(_breaks(rows, "overflowed_fraction") or _breaks(rows, "nonfinite_fraction"))
    costly = [key for key, factor in factors.items() if factor >= MATTERS]
    worst = max(factors, key=factors.get)
    start = "For bf16 range is a matter too" if range_lost else "For bf16 range is no matter: nothing overflows"
    if costly:
        names = listing(f"{NORMS[norm]} with {_setting(setting)}" for norm, setting in costly)
        text = (
            f"{start}; digits are, where the error is at least {times(MATTERS)} that of fp32 statistics ({names}), so "
            f"its statistics still belong in fp32"
        )
    else:
        text = (
            f"{start}; nor are digits by this measure: the error is below {times(MATTERS)} that of fp32 statistics "
            "everywhere"
        )
    return [f"{text} (most: {times(factors[worst])}, {NORMS[worst[0]]} with {_setting(worst[1])})."]


def _library(frame: pd.DataFrame) -> list[str]:
    measured = ok_rows(frame)
    if measured.empty:
        return []
    keys = ["norm", "setting", "input", "scale"]
    library = measured[measured["statistics"] == "library"].set_index(keys)
    own = measured[measured["statistics"] == "fp32"].set_index(keys)["relative_error"]
    both = library.assign(own=own).dropna(subset=["own", "relative_error"])
    if both.empty:
        return []
    ratio = both["relative_error"] / both["own"]
    word = "is that" if ratio.max() < MATTERS else "is **not** that"
    broken = int((library["nonfinite_fraction"] > 0).sum())
    return [
        f"The error of PyTorch's own functions on 16-bit input {word} of fp32 statistics: {span(ratio, _factor)} over "
        f"{count(len(both), 'case')}, with {count(broken, 'case')} whose results are not finite."
    ]


# ---- a matmul's epilogue --------------------------------------------------------------------------------------

GELU_NAMES = {"erf": "exact", "tanh": "tanh form"}
EPILOGUE_NAMES = {"rounded": "rounded between", "carried": "carried in fp32", "library": "PyTorch's fused call"}
EPILOGUE_KEYS = ["dtype", "gelu", "depth"]


def epilogues(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns one row per dtype, form of GELU and depth, with the relative error of each epilogue as a column."""
    measured = ok_rows(frame)
    if measured.empty:
        return measured
    wide = measured.pivot_table(index=EPILOGUE_KEYS, columns="epilogue", values="relative_error", sort=False)
    return wide.reindex(columns=list(EPILOGUE_NAMES)).reset_index()


def table_epilogue(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns the relative error against fp32 of each epilogue, and what the rounding between costs."""
    return pd.DataFrame(
        {
            "dtype": row["dtype"],
            "GELU": GELU_NAMES[row["gelu"]],
            "terms of a sum": row["depth"],
            **{name: scientific(row[epilogue]) for epilogue, name in EPILOGUE_NAMES.items()},
            "rounded / carried": times(row["rounded"] / row["carried"]),
        }
        for row in epilogues(frame).to_dict("records")
    )


def figure_epilogue(frame: pd.DataFrame) -> Figure | None:
    """One panel per dtype: the relative error of each epilogue by pre-activation, the longest sums, exact GELU."""
    measured = ok_rows(frame)
    if measured.empty:
        return None
    longest = measured[measured["depth"] == measured["depth"].max()]
    names = list(dict.fromkeys(longest["dtype"]))
    figure, axes = figures.panels(len(names), num_columns=2, width=4.6, height=3.2)
    styles = {"rounded": ("-", 3), "carried": ("--", 0), "library": (":", 1)}
    for axis, name in zip(axes, names, strict=True):
        for row in longest[longest["dtype"] == name].to_dict("records"):
            if row["gelu"] == "tanh" and row["epilogue"] != "library":
                continue
            samples, (style, colour) = row["samples"], styles[row["epilogue"]]
            edges = [*samples["bin_low"], samples["bin_high"][-1]]
            label = EPILOGUE_NAMES[row["epilogue"]] + (" (tanh form)" if row["gelu"] == "tanh" else "")
            axis.stairs(samples["bin_error"], edges, baseline=None, color=figures.SERIES[colour], linestyle=style,
                        label=label)  # fmt: skip
        figures.log_scale(axis, "y")
        axis.set_xlabel("pre-activation")
        axis.set_ylabel("relative error")
        axis.set_title(f"{name}, sums of {longest['depth'].iloc[0]:,} terms")
    _legend_below(figure, axes)
    figure.suptitle(f"GELU(x·wᵀ) against fp32, {frame.attrs['device']}", fontsize=10)
    return figure


def findings_epilogue(frame: pd.DataFrame) -> list[str]:
    """Says what a rounding between product and activation costs, where, and which of the two PyTorch's call is like."""
    rows = epilogues(frame)
    if rows.empty:
        return []
    sentences = []
    for dtype, of_dtype in rows.groupby("dtype", sort=False):
        ratio = (of_dtype["rounded"] / of_dtype["carried"]).dropna()
        if len(ratio):
            text = f"Rounding to {dtype} between product and GELU makes the error {span(ratio)} that of the carried sum"
            sentences.append(text + _worst_bin(frame, dtype, "rounded", "erf") + ".")
        sentences += _fused(frame, dtype, of_dtype[of_dtype["gelu"] == "tanh"].dropna())
    reference = ok_rows(frame)["fp32_error"].max()
    sentences.append(f"The fp32 result that all are held against is itself within {scientific(reference)} of fp64.")
    return sentences


def _worst_bin(frame: pd.DataFrame, dtype: str, epilogue: str, gelu: str) -> str:
    """Returns a clause with the pre-activations at which an epilogue multiplies the carried sum's error most."""
    factors: dict[tuple, float] = {}
    for _, rows in ok_rows(frame, dtype=dtype, gelu=gelu).groupby("depth"):
        by_name = {row["epilogue"]: row["samples"] for row in rows.to_dict("records")}
        if not {epilogue, "carried"} <= by_name.keys():
            continue
        ours, theirs = by_name[epilogue], by_name["carried"]
        for low, high, error, base in zip(
            ours["bin_low"], ours["bin_high"], ours["bin_error"], theirs["bin_error"], strict=True
        ):
            if base > 0:
                factors[low, high] = max(error / base, factors.get((low, high), 0))
    if not factors:
        return ""
    low, high = max(factors, key=factors.get)
    return f"; by pre-activation it is most in [{low:g}, {high:g}), {times(factors[low, high])}"


def _fused(frame: pd.DataFrame, dtype: str, rows: pd.DataFrame) -> list[str]:
    """Says whether the error of PyTorch's fused call is nearer to the carried or to the rounded sum's."""
    if rows.empty:
        return []
    own, other = rows["library"] / rows["carried"], rows["rounded"] / rows["carried"]
    is_carried = [value < math.sqrt(limit) for value, limit in zip(own, other, strict=True)]
    text = f"`torch._addmm_activation` in {dtype} has {span(own)} the carried sum's error, "
    if all(is_carried):
        text += "nearer to that than to the rounded one's: the sum is carried through"
    elif not any(is_carried):
        text += "nearer to the rounded one's: nothing is gained over two calls"
    else:
        depths = listing(f"{depth:,}" for depth in rows[is_carried]["depth"])
        text += f"nearer to that than to the rounded one's with sums of {depths} terms only"
    return [text + _worst_bin(frame, dtype, "library", "tanh") + "."]


# ---- speed and memory of a step ----------------------------------------------------------------------------------


def own_steps(chapter: Chapter) -> pd.DataFrame:
    """Returns the section "steps" of this notebook, each row with the session that it was measured in."""
    frame = chapter.records("steps")
    if len(frame):
        frame["session"] = [record.session for record in chapter.all_records() if record.section == "steps"]
    return frame


def steps(benchmarking: pd.DataFrame, own: pd.DataFrame) -> pd.DataFrame:
    """Returns one row per step: notebook 01's in its precisions, this notebook's in its own, bf16 autocast as ANCHOR.

    Args:
        benchmarking: the section "steps" of notebook 01; own: that of this notebook, as `own_steps` gives it.
    """
    parts = []
    if len(benchmarking):
        contexts = {context for grid in MIXED_PRECISION.values() for context in grid.contexts}
        sizes = {size for grid in MIXED_PRECISION.values() for size in grid.sizes}
        theirs = benchmarking[(benchmarking["compile"] == "none") & benchmarking["phase"].isin(MIXED_PHASES)]
        parts.append(theirs[theirs["context"].isin(contexts) & theirs["size"].isin(sizes)])
    if len(own):
        parts.append(own.assign(precision=own["precision"].replace("bf16", ANCHOR)))
    both = pd.concat([part.dropna(axis=1, how="all") for part in parts], ignore_index=True) if parts else own
    both.attrs |= own.attrs
    return both


def _rows(frame: pd.DataFrame, phase: str) -> pd.DataFrame:
    return frame[frame["phase"] == phase] if len(frame) else frame


def _wide(frame: pd.DataFrame, phase: str, text) -> pd.DataFrame:
    """Returns a table with one row per size and context and one column per precision, in this chapter's order."""
    rows = _rows(frame, phase)
    if rows.empty:
        return pd.DataFrame()
    cells: dict[tuple, dict] = {}
    for row in in_order(rows, ["size", "context"]).to_dict("records"):
        cells.setdefault((row["size"], row["context"]), {})[row["precision"]] = text(row)
    columns = [precision for precision, _ in _by_precision(rows)]
    return pd.DataFrame(
        {
            "size": size,
            "context": context,
            **{STEP_NAMES[precision]: line.get(precision, "–") for precision in columns},
        }
        for (size, context), line in cells.items()
    )


def is_launch_bound(frame: pd.DataFrame) -> pd.Series:
    """Returns by row whether the host set the pace: it needed LAUNCH_BOUND of the time to issue the work.

    A training step counts if its forward or backward pass did, timed alone: the optimizer's part gives the device
    something to do in any step, so that the host's share of the whole is less.

    Args:
        frame: the steps, with every phase.
    """
    if not {"launch_median_ms", "host_median_ms"} <= set(frame):
        return pd.Series(False, index=frame.index)
    bound = frame["launch_median_ms"] >= LAUNCH_BOUND * frame["host_median_ms"]
    cases = pd.Series(list(zip(frame["size"], frame["context"], frame["precision"], strict=True)), index=frame.index)
    in_part = cases.isin(set(cases[bound & frame["phase"].isin(["forward", "backward"])]))
    return bound | (in_part & (frame["phase"] == "train_step") & (frame["status"] == "ok"))


def table_times(frame: pd.DataFrame, phase: str) -> pd.DataFrame:
    """Returns the median of a phase in ms by size, context and precision; "~": unstable, "†": launch-bound."""

    def text(row: dict) -> str:
        unstable = row["status"] == "ok" and row["half_width_fraction"] > STABLE
        return ("~" if unstable else "") + cell(row) + (" †" if row["is_launch_bound"] else "")

    return _wide(frame.assign(is_launch_bound=is_launch_bound(frame)), phase, text)


def _without_anchor(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns the rows with one of bf16 autocast for each case: memory is the allocator's and needs no anchor."""
    return frame[frame["precision"] != ANCHOR] if len(frame) else frame


def table_memory(frame: pd.DataFrame, phase: str) -> pd.DataFrame:
    """Returns the peak of allocated memory in GiB by size, context and precision."""
    frame = _without_anchor(frame)
    if ok_rows(frame).empty or "peak_bytes" not in frame or frame["peak_bytes"].isna().all():
        return pd.DataFrame()
    return _wide(frame, phase, lambda row: cell(row, "peak_bytes", lambda value: number(value / 2**30)))


def ratios(frame: pd.DataFrame, phase: str, value: str = "median_ms") -> pd.DataFrame:
    """Returns fp32's value over each other precision's: one row per (size, context, precision)."""
    measured = ok_rows(_rows(frame, phase))
    if measured.empty or value not in measured:
        return pd.DataFrame(columns=["size", "context", "precision", "ratio"])
    base = measured[measured["precision"] == "fp32"][["size", "context", value]]
    others = measured[measured["precision"] != "fp32"]
    both = others.merge(base, on=["size", "context"], suffixes=("", "_fp32"))
    both["ratio"] = both[f"{value}_fp32"] / both[value]
    return both.dropna(subset=["ratio"])


def same_session(frame: pd.DataFrame, phase: str) -> pd.DataFrame:
    """Returns fp16 and pure bf16 beside the bf16 autocast of their own session: one row per size, context, precision.

    Columns: size, context, precision; ratio: bf16 autocast's time over its own; word: what the ratio is called, "about
    the same" also where the two medians' intervals are wider than the difference; is_launch_bound: either of the two.
    """
    columns = ["size", "context", "precision", "ratio", "word", "is_launch_bound"]
    measured = ok_rows(_rows(frame.assign(is_launch_bound=is_launch_bound(frame)), phase))
    if measured.empty or "session" not in measured:
        return pd.DataFrame(columns=columns)
    keys, values = ["size", "context", "session"], ["median_ms", "half_width_fraction", "is_launch_bound"]
    anchor = measured.loc[measured["precision"] == ANCHOR, [*keys, *values]]
    both = measured[measured["precision"].isin(COMPARED)].merge(anchor, on=keys, suffixes=("", "_anchor"))
    both["ratio"] = both["median_ms_anchor"] / both["median_ms"]
    width = both["half_width_fraction"] + both["half_width_fraction_anchor"]
    both["word"] = both["ratio"].map(speed_word).where((both["ratio"] - 1).abs() > width, "about the same")
    both["is_launch_bound"] |= both["is_launch_bound_anchor"]
    return both[columns]


def speedups(frame: pd.DataFrame, phase: str) -> pd.DataFrame:
    """Returns how many times fp32's speed each precision runs at: one row per size, context and precision.

    Those of notebook 01 are held against its fp32. The others have no fp32 of their session: theirs is the product of
    fp32 over bf16 autocast in notebook 01 and of bf16 autocast over their own time, both in this notebook's session.
    """
    columns = ["size", "context", "precision", "ratio"]
    direct = ratios(frame, phase)[columns]
    direct = direct[direct["precision"].isin(PRECISIONS)]
    autocast = direct.loc[direct["precision"] == "bf16", ["size", "context", "ratio"]]
    product = same_session(frame, phase).merge(autocast, on=["size", "context"], suffixes=("", "_autocast"))
    product["ratio"] *= product["ratio_autocast"]
    return pd.concat([part for part in (direct, product[columns]) if len(part)] or [direct], ignore_index=True)


def table_speedups(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns by precision and phase the geometric mean and range of its speed over fp32's."""
    result = []
    for phase in MIXED_PHASES:
        for precision, rows in _by_precision(speedups(frame, phase)):
            result.append(
                {
                    "precision": NAMES[precision],
                    "phase": PHASE_NAMES[phase],
                    "cases": len(rows),
                    "speed over fp32's, geometric mean": times(geometric_mean(rows["ratio"])),
                    "range": span(rows["ratio"]),
                    "not faster in": int((rows["ratio"].map(speed_word) != "faster").sum()),
                    "from": "by bf16 autocast" if precision in COMPARED else "notebook 01",
                }
            )
    return pd.DataFrame(result)


def table_against_autocast(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns by precision and phase its speed over that of bf16 autocast in the same session, and how often which."""
    result = []
    for phase in MIXED_PHASES:
        for precision, rows in _by_precision(same_session(frame, phase)):
            for is_bound, of_kind in rows.groupby(rows["is_launch_bound"].astype(bool)):
                result.append(
                    {
                        "precision": NAMES[precision],
                        "phase": PHASE_NAMES[phase],
                        "launch-bound": "yes" if is_bound else "no",
                        "cases": len(of_kind),
                        "speed over bf16 autocast's, geometric mean": times(geometric_mean(of_kind["ratio"])),
                        "range": span(of_kind["ratio"]),
                        **{
                            word: int((of_kind["word"] == word).sum())
                            for word in ("faster", "about the same", "slower")
                        },
                    }
                )
    return pd.DataFrame(result)


def figure_speed(frame: pd.DataFrame, phase: str = "train_step") -> Figure | None:
    """One panel per size: median time over the context, a line per precision, log axes, p20–p80 band.

    Dashed lines are of this notebook's session, solid ones of notebook 01's; hollow points are launch-bound.
    """
    rows = _rows(frame.assign(is_launch_bound=is_launch_bound(frame)), phase)
    if ok_rows(rows).empty:
        return None
    sizes = [size for size in SIZES if size in set(ok_rows(rows)["size"])]
    figure, axes = figures.panels(len(sizes))
    for axis, size in zip(axes, sizes, strict=True):
        of_size = rows[rows["size"] == size]
        for precision, line in _by_precision(of_size):
            colour = figures.COLOURS["bf16" if precision == ANCHOR else precision]
            style = "-" if precision in PRECISIONS else "--"
            figures.line_with_band(axis, line, "context", label=STEP_NAMES[precision], colour=colour, linestyle=style)
            bound = ok_rows(line, is_launch_bound=True)
            if len(bound):
                axis.scatter(
                    bound["context"], bound["median_ms"], s=10, facecolors="white", edgecolors=colour, zorder=4
                )
        figures.context_axis(axis, of_size["context"].unique())
        figures.log_time_axis(axis)
        axis.set_title(size)
    _legend_below(figure, axes)
    figure.suptitle(
        f"{PHASE_NAMES[phase].capitalize()} by precision, {frame.attrs['device']}\n"
        "(solid: notebook 01's session; dashed: this notebook's; band: p20–p80; hollow: launch-bound; × out of memory)",
        fontsize=10,
    )
    return figure


def figure_memory(frame: pd.DataFrame, phase: str = "train_step") -> Figure | None:
    """One panel per size: peak memory over the context, a line per precision."""
    rows = _rows(_without_anchor(frame), phase)
    measured = ok_rows(rows)
    if measured.empty or "peak_bytes" not in measured or measured["peak_bytes"].isna().all():
        return None
    sizes = [size for size in SIZES if size in set(measured["size"])]
    figure, axes = figures.panels(len(sizes))
    for axis, size in zip(axes, sizes, strict=True):
        of_size = rows[rows["size"] == size]
        for precision, line in _by_precision(of_size):
            known = ok_rows(line).sort_values("context")
            colour = figures.COLOURS[precision]
            axis.plot(known["context"], known["peak_bytes"] / 2**30, color=colour, marker="o", markersize=3,
                      label=NAMES[precision])  # fmt: skip
            figures.mark_failures(axis, line, "context", colour=colour)
        figures.context_axis(axis, of_size["context"].unique())
        axis.set_ylim(bottom=0)
        axis.set_ylabel("peak memory (GiB)")
        axis.set_title(size)
    _legend_below(figure, axes)
    figure.suptitle(f"Peak memory of a {PHASE_NAMES[phase]}, {frame.attrs['device']} (× out of memory)", fontsize=10)
    return figure


def findings_speed(frame: pd.DataFrame) -> list[str]:
    """Says how far the two sessions are apart, how fast each precision is beside fp32 and beside bf16 autocast."""
    sentences = []
    for phase in MIXED_PHASES:
        parts: dict[bool, list[str]] = {False: [], True: []}
        for precision, rows in _by_precision(speedups(frame, phase)):
            most = rows.loc[rows["ratio"].idxmax()]
            parts[precision in COMPARED].append(
                f"{NAMES[precision]} {span(rows['ratio'])} (geometric mean {times(geometric_mean(rows['ratio']))}, "
                f"most for {_case(most['size'], most['context'])})"
            )
        texts = [listing(parts[False])] if parts[False] else []
        texts += [f"by way of bf16 autocast {listing(parts[True])}"] if parts[True] else []
        if texts:
            sentences.append(f"A {PHASE_NAMES[phase]} runs at so many times fp32's speed: {'; '.join(texts)}.")
    return [
        *_sessions(frame),
        *sentences,
        *_against_autocast(frame),
        *_not_compared(frame),
        *_skipped_steps(frame),
        *_not_run(frame),
    ]


def _sessions(frame: pd.DataFrame) -> list[str]:
    """Sets bf16 autocast as timed here beside notebook 01's times of the same cases."""
    measured = ok_rows(frame.assign(is_launch_bound=is_launch_bound(frame)))
    if measured.empty:
        return []
    columns = ["size", "context", "phase", "median_ms", "is_launch_bound"]
    here, there = (measured.loc[measured["precision"] == name, columns] for name in (ANCHOR, "bf16"))
    both = here.merge(there, on=columns[:3], suffixes=("", "_01"))
    if both.empty:
        return []
    ratio, bound = both["median_ms"] / both["median_ms_01"], both["is_launch_bound"] | both["is_launch_bound_01"]
    parts = []
    for values, kind in ((ratio[~bound], "not launch-bound"), (ratio[bound], "launch-bound in either")):
        if len(values):
            text = f"{times(values.median())} as long in the median of {count(len(values), 'phase')} {kind}"
            parts.append(f"{text} ({span(values)})" if len(values) > 1 else text)
    return [f"bf16 autocast was timed in notebook 01 and again here, where it takes {', and '.join(parts)}."]


def _against_autocast(frame: pd.DataFrame) -> list[str]:
    """Compares fp16 and pure bf16 with bf16 autocast of the same session, training steps of the same case."""
    pairs = same_session(frame, "train_step")
    sentences = []
    for precision, rows in _by_precision(pairs):
        bound = rows["is_launch_bound"].astype(bool)
        free, held = rows[~bound]["ratio"], rows[bound]["ratio"]
        parts = []
        if len(free):
            words = rows[~bound]["word"].value_counts()
            cases = listing(f"{word} in {n}" for word, n in words.items())
            parts.append(
                f"{cases} of {count(len(free), 'case')} in which neither is launch-bound ({span(free)} the speed)"
            )
        if len(held):
            parts.append(
                f"at {span(held)} the speed in {count(len(held), 'launch-bound case')}, where the host sets the pace"
            )
        sentences.append(
            f"Against bf16 autocast of the same session a training step in {NAMES[precision]} is {'; '.join(parts)}."
        )
    return sentences


def _not_compared(frame: pd.DataFrame) -> list[str]:
    """Names the precisions whose session has no bf16 autocast of the same case, so that they are not compared."""
    rows = _rows(frame, "train_step")
    if ok_rows(rows).empty or "session" not in rows:
        return []
    keys = ["size", "context", "session"]
    anchored = set(rows.loc[rows["precision"] == ANCHOR, keys].itertuples(index=False, name=None))
    sentences = []
    for precision in COMPARED:
        own = list(ok_rows(rows, precision=precision)[keys].itertuples(index=False, name=None))
        if lacking := [key for key in own if key not in anchored]:
            sentences.append(
                f"{NAMES[precision]} is **not** compared with any other precision in {len(lacking)} of "
                f"{count(len(own), 'case')}: in its session bf16 autocast was not timed."
            )
    return sentences


def _skipped_steps(frame: pd.DataFrame) -> list[str]:
    rows = ok_rows(_rows(frame, "train_step"))
    rows = rows[rows["precision"] == "fp16"] if len(rows) else rows
    if rows.empty or "num_skipped_steps" not in rows:
        return []
    skipping = rows[rows["num_skipped_steps"] > 0]
    if skipping.empty:
        return [
            f"No timed fp16 step was left out for an overflow: the loss scale ({span(rows['loss_scale'], _power)}) had "
            "settled before."
        ]
    names = _cases(skipping[["size", "context"]].itertuples(index=False, name=None))
    return [f"In {names} fp16 steps overflowed while they were timed, and left out the optimizer's part."]


def _not_run(frame: pd.DataFrame) -> list[str]:
    if frame.empty:
        return []
    sentences = []
    skipped = frame[frame["status"] == "skipped"]
    for (precision, reason), rows in skipped.groupby(["precision", "reason"], sort=False):
        cases = count(len(rows.drop_duplicates(["size", "context"])), "case")
        sentences.append(f"{STEP_NAMES[precision]} was not run in {cases}: {reason.rstrip('.')}.")
    failed = frame[frame["status"].isin(["error", "timeout"])]
    if len(failed):
        reasons = failed["reason"].value_counts()
        sentences.append(
            f"{len(failed)} measurements failed: " + listing(f"{text} ({n})" for text, n in reasons.items()) + "."
        )
    return sentences


def findings_memory(frame: pd.DataFrame) -> list[str]:
    """Says by precision what it takes of fp32's memory, and what fits in one precision only."""
    anchors, sentences = _anchor_memory(frame), []
    frame = _without_anchor(frame)
    for phase in ("forward", "train_step"):
        parts = []
        for precision, rows in _by_precision(ratios(frame, phase, "peak_bytes")):
            shares = 1 / rows["ratio"]
            more = rows[shares > 1 + SAME]
            text = f"{NAMES[precision]} {span(shares, percent)}"
            if len(more):
                text += f" (more than fp32 in {len(more)} of {count(len(rows), 'case')})"
            parts.append(text)
        if parts:
            sentences.append(f"Peak memory of a {PHASE_NAMES[phase]}, of fp32's: {listing(parts)}.")
    return [*sentences, *_weight_copies(frame), *_only_fit(frame), *anchors]


def _anchor_memory(frame: pd.DataFrame) -> list[str]:
    """Says whether bf16 autocast takes the same memory here as in notebook 01: only one of the two is shown."""
    measured = ok_rows(frame)
    if measured.empty or "peak_bytes" not in measured:
        return []
    columns = ["size", "context", "phase", "peak_bytes"]
    here, there = (measured.loc[measured["precision"] == name, columns] for name in (ANCHOR, "bf16"))
    both = here.merge(there, on=columns[:3], suffixes=("", "_01")).dropna()
    if both.empty:
        return []
    ratio = both["peak_bytes"] / both["peak_bytes_01"]
    text = f"bf16 autocast's peak here is {span(ratio, _factor)} notebook 01's over {count(len(both), 'phase')}"
    differing = int(((ratio - 1).abs() > SAME).sum())
    return [text + (f"; they differ by more than {percent(SAME)} in {differing}." if differing else ".")]


def _weight_copies(frame: pd.DataFrame) -> list[str]:
    """Sets what a forward pass takes more under bf16 autocast beside the copies of the weights that it keeps."""
    pairs = ratios(frame, "forward", "peak_bytes")
    pairs = pairs[(pairs["precision"] == "bf16") & (1 / pairs["ratio"] > 1 + SAME)]
    if pairs.empty:
        return []
    copies = pairs["size"].map(lambda size: 2 * accounting.num_matmul_parameters(SIZES[size]))
    shares = (pairs["peak_bytes"] - pairs["peak_bytes_fp32"]) / copies
    text = (
        "Autocast keeps a copy of every weight of a matrix product until the forward pass ends, two bytes a parameter. "
        f"Where the forward pass takes more than fp32's in bf16, it is {span(shares, percent)} of these copies"
    )
    if shares.max() < 1:
        text += ": the rest is made up for by activations that are half as wide"
    return [text + "."]


def _only_fit(frame: pd.DataFrame) -> list[str]:
    rows = _rows(frame, "train_step")
    if rows.empty:
        return []
    sentences = []
    by_fitting: dict[tuple, list[tuple]] = {}
    for (size, context), group in in_order(rows, ["size", "context"]).groupby(["size", "context"], sort=False):
        fits = tuple(precision for precision in NAMES if precision in set(ok_rows(group)["precision"]))
        lost = group[group["status"] == "oom"]
        if len(lost):
            by_fitting.setdefault(fits, []).append((size, context))
    for fits, cases in by_fitting.items():
        names = f"in {listing(NAMES[precision] for precision in fits)} only" if fits else "in none of these precisions"
        sentences.append(f"A training step of {_cases(cases)} fits {names}.")
    return sentences


# ---- where autocast loses ------------------------------------------------------------------------------------------


def _host_share(row: dict) -> float | None:
    """Returns the share of a phase's time that the host needs to issue it."""
    launch, host = row.get("launch_median_ms"), row.get("host_median_ms")
    return launch / host if launch is not None and host and pd.notna(launch) else None


def losses(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns the cases in which bf16 autocast is not faster than fp32: one row per size, context and phase.

    Columns: size, context, phase, fp32_ms, bf16_ms, ratio, and the host's share of either time (NaN if not known).
    """
    found = []
    for phase in MIXED_PHASES:
        pairs = ratios(frame, phase)
        pairs = pairs[(pairs["precision"] == "bf16") & (pairs["ratio"].map(speed_word) != "faster")]
        base = ok_rows(_rows(frame, phase))
        for row in in_order(pairs, ["size", "context"]).to_dict("records"):
            mine = base[(base["size"] == row["size"]) & (base["context"] == row["context"])]
            fp32 = mine[mine["precision"] == "fp32"].iloc[0].to_dict()
            found.append(
                {
                    "size": row["size"],
                    "context": row["context"],
                    "phase": phase,
                    "fp32_ms": fp32["median_ms"],
                    "bf16_ms": row["median_ms"],
                    "ratio": row["ratio"],
                    "fp32_host": _host_share(fp32),
                    "bf16_host": _host_share(row),
                }
            )
    return pd.DataFrame(found)


def table_losses(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns the cases in which bf16 autocast does not gain over fp32, with the host's share of the time."""
    return pd.DataFrame(
        {
            "size": row["size"],
            "context": row["context"],
            "phase": PHASE_NAMES[row["phase"]],
            "fp32 (ms)": number(row["fp32_ms"]),
            "bf16 autocast (ms)": number(row["bf16_ms"]),
            "fp32 / bf16": times(row["ratio"]),
            "host's share, fp32": percent(row["fp32_host"]),
            "host's share, bf16": percent(row["bf16_host"]),
        }
        for row in losses(frame).to_dict("records")
    )


def table_operators(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns the operators of each pass by precision, and the casts among them."""
    measured = ok_rows(frame)
    if measured.empty:
        return pd.DataFrame()
    result = []
    phases = list(dict.fromkeys(measured["phase"]))
    for size in [size for size in SIZES if size in set(measured["size"])]:
        for phase in phases:
            rows = measured[(measured["size"] == size) & (measured["phase"] == phase)]
            line: dict = {"size": size, "phase": PHASE_NAMES[phase]}
            for precision, row in _by_precision(rows):
                one = row.iloc[0]
                casts = int(one["num_casts"])
                line[NAMES[precision]] = f"{int(one['num_operators']):,}" + (f" ({casts:,} casts)" if casts else "")
                if precision == "bf16":
                    line["bytes cast, bf16 autocast (MiB)"] = number(one["cast_bytes"] / 2**20)
            result.append(line)
    return pd.DataFrame(result).fillna("–")


def launches(kernels: pd.DataFrame) -> pd.DataFrame:
    """Returns what notebook 02 captured of each training step's phases: kernels launched, copies among them.

    Columns: size, context, precision, phase, launches, copies, copies_us. A cast is a copy to another dtype, and so is
    in the class of the copies.

    Args:
        kernels: the section "profiles" of notebook 02.
    """
    rows = []
    for record in ok_rows(kernels, attention="eager", compile="none").to_dict("records"):
        classes = record["observed"].get("tables", {}).get("classes")
        if record["phase"] == "inference" or not classes:
            continue
        table = pd.DataFrame(classes)
        # What no phase's range holds is of the step, but of none of its phases.
        for phase, of_phase in table[table["phase"] != "outside"].groupby("phase", sort=False):
            copies = of_phase[of_phase["kernel_class"] == "copy"]
            rows.append(
                {
                    **{name: record[name] for name in ("size", "context", "precision")},
                    "phase": "optimizer_step" if phase == "optimizer" else phase,
                    "launches": int(of_phase["launches"].sum()),
                    "copies": int(copies["launches"].sum()),
                    "copies_us": float(copies["total_us"].sum()),
                }
            )
    return pd.DataFrame(rows)


def launch_pairs(kernels: pd.DataFrame) -> pd.DataFrame:
    """Returns the launches of fp32 and of bf16 autocast side by side: one row per size, context and phase."""
    rows = launches(kernels)
    if rows.empty:
        return rows
    keys = ["size", "context", "phase"]
    fp32, bf16 = (rows[rows["precision"] == name].drop(columns="precision") for name in ("fp32", "bf16"))
    return in_order(fp32.merge(bf16, on=keys, suffixes=("_fp32", "_bf16")), ["size", "context", "phase"])


def table_launches(kernels: pd.DataFrame) -> pd.DataFrame:
    """Returns kernels and copies that a training step's phases launch, in fp32 and under bf16 autocast."""
    return pd.DataFrame(
        {
            "size": row["size"],
            "context": row["context"],
            "phase": PHASE_NAMES[row["phase"]],
            "kernels, fp32": f"{row['launches_fp32']:,}",
            "kernels, bf16": f"{row['launches_bf16']:,}",
            "copies, fp32": f"{row['copies_fp32']:,}",
            "copies, bf16": f"{row['copies_bf16']:,}",
            "copies' time, fp32 (ms)": number(row["copies_us_fp32"] / 1e3),
            "copies' time, bf16 (ms)": number(row["copies_us_bf16"] / 1e3),
        }
        for row in launch_pairs(kernels).to_dict("records")
    )


def findings_losses(frame: pd.DataFrame, operators: pd.DataFrame, kernels: pd.DataFrame) -> list[str]:
    """Says where bf16 autocast does not gain, whether the host is why, and what autocast gives it to do."""
    found = losses(frame)
    compared = sum(int((ratios(frame, phase)["precision"] == "bf16").sum()) for phase in MIXED_PHASES)
    sentences = []
    if compared and found.empty:
        sentences.append(f"bf16 autocast is faster than fp32 in all {compared} cases.")
    for phase, rows in found.groupby("phase", sort=False) if len(found) else []:
        slower = rows[rows["ratio"].map(speed_word) == "slower"]
        names = _cases(rows[["size", "context"]].itertuples(index=False, name=None))
        text = f"bf16 autocast does not make a {PHASE_NAMES[phase]} faster than fp32 for {names}"
        if len(slower):
            text += f" (slower in {len(slower)} of {count(len(rows), 'case')}, down to {times(rows['ratio'].min())})"
        bound = rows[rows["bf16_host"] >= LAUNCH_BOUND]
        if len(bound):
            text += (
                f"; {len(bound)} of {len(rows)} are launch-bound under autocast (the host needs at least "
                f"{percent(LAUNCH_BOUND)} of the time to issue the work), where each operator costs and a faster "
                "product gains nothing"
            )
        sentences.append(text + ".")
    return [*sentences, *_added_operators(operators), *_added_launches(found, kernels)]


def _added_launches(found: pd.DataFrame, kernels: pd.DataFrame) -> list[str]:
    """Says what notebook 02's captures of the cases without a gain hold: launches that autocast adds, and copies."""
    pairs = launch_pairs(kernels)
    if pairs.empty or found.empty:
        return []
    lost = set(found[["size", "context", "phase"]].itertuples(index=False, name=None))
    step = (
        pairs.groupby(["size", "context"], sort=False).sum(numeric_only=True).reset_index().assign(phase="train_step")
    )
    both = pd.concat([pairs, step], ignore_index=True)
    mine = both[[key in lost for key in both[["size", "context", "phase"]].itertuples(index=False, name=None)]]
    if mine.empty:
        return []
    more = mine["launches_bf16"] / mine["launches_fp32"] - 1
    added = mine["launches_bf16"] - mine["launches_fp32"]
    copies = mine["copies_bf16"] - mine["copies_fp32"]
    text = (
        f"In notebook 02's captures of {len(mine)} of these cases autocast launches {span(more, percent)} more kernels "
        f"than fp32"
    )
    if (added > 0).all() and (copies <= added).all():
        text += f", and of those added {span(copies / added, percent)} are copies, which is how a cast is done"
    elif (added > 0).all():
        text += f"; the copies alone, which is how a cast is done, are {span(copies / added)} as many more"
        text += ", for other kernels become fewer"
    return [text + "."]


def _added_operators(frame: pd.DataFrame) -> list[str]:
    measured = ok_rows(frame)
    if measured.empty:
        return []
    sentences = []
    for phase, rows in measured.groupby("phase", sort=False):
        wide = rows.pivot_table(index="size", columns="precision", values="num_operators")
        casts = rows.pivot_table(index="size", columns="precision", values="num_casts")
        if "fp32" not in wide:
            continue
        parts = []
        for precision in [name for name in NAMES if name in wide and name != "fp32"]:
            added = (wide[precision] - wide["fp32"]).dropna()
            share = added / wide["fp32"]
            if len(added) and (added != 0).any():
                by_casts = ((casts[precision] - casts["fp32"]) / added).dropna()
                text = f"{NAMES[precision]} adds {span(share.dropna(), percent)}"
                if (by_casts > 0).any():
                    text += f", of which casts are {span(by_casts, percent)}"
                parts.append(text)
        if parts:
            sizes = listing(size for size in SIZES if size in wide.index)
            sentences.append(f"To the operators of fp32's {PHASE_NAMES[phase]} ({sizes}) {'; '.join(parts)}.")
    return sentences


# ---- training --------------------------------------------------------------------------------------------------


def table_training(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns losses, left-out steps, gradients that are zero and parameters that never moved, by precision."""
    result = []
    for precision, rows in _by_precision(frame):
        row = rows.iloc[-1].to_dict()
        ok = row["status"] == "ok"
        line = {"precision": NAMES[precision]}
        line["final loss (nats)"] = number(row["final_loss"]) if ok else row["status"]
        for column, name in (
            ("zero_weight_gradients", "weight gradients that are 0"),
            ("zero_logit_gradients", "logit gradients that are 0"),
            ("unmoved_weights", "weights never moved"),
            ("unmoved_gains", "norm gains never moved"),
        ):
            line[name] = percent(row[column]) if ok else "–"
        line["steps left out"] = int(row["num_skipped_steps"]) if ok else "–"
        line["loss scale"] = _power(row["final_loss_scale"]) if ok else "–"
        result.append(line)
    return pd.DataFrame(result)


def figure_training(frame: pd.DataFrame) -> Figure | None:
    """Left the loss over the steps, right the share of gradients of the logits that are zero."""
    measured = ok_rows(frame)
    if measured.empty:
        return None
    figure, axes = figures.panels(3, num_columns=3, width=3.9, height=3.2)
    for precision, rows in _by_precision(measured):
        samples = rows.iloc[-1]["samples"]
        line = {"color": figures.COLOURS[precision], "label": NAMES[precision], "linewidth": 1.2}
        if precision in ("tf32", "fp16"):
            line["linestyle"] = "--"
        loss = [math.nan if value is None else value for value in samples["loss"]]
        axes[0].plot(range(1, len(loss) + 1), loss, **line)
        looked = [step + 1 for step in samples["look_step"]]
        axes[1].plot(looked, samples["zero_logit_gradients"], marker="o", markersize=2.5, **line)
        axes[2].plot(looked, samples["zero_weight_gradients"], marker="o", markersize=2.5, **line)
    axes[0].set_ylabel("loss (nats)")
    axes[0].set_title("training loss")
    for axis, name in ((axes[1], "logits"), (axes[2], "weights")):
        axis.yaxis.set_major_formatter(PercentFormatter(1.0))
        axis.set_ylabel("elements that are zero")
        axis.set_title(f"underflow, gradients of the {name}")
    for axis in axes:
        axis.set_xlabel("step")
    _legend_below(figure, axes, ncols=3)
    row = measured.iloc[-1]
    figure.suptitle(
        f"{row['num_steps']} steps of {row['size']}, batch {row['batch']}, context {row['context']}, "
        f"{frame.attrs['device']}",
        fontsize=10,
    )
    return figure


def findings_training(frame: pd.DataFrame) -> list[str]:
    """Says which precisions train like fp32, what underflows, and what a bf16 parameter is too coarse for."""
    measured = ok_rows(frame)
    if measured.empty:
        return []
    by_name = {precision: rows.iloc[-1].to_dict() for precision, rows in _by_precision(measured)}
    return [*_final_losses(by_name), *_underflow(by_name), *_unmoved(by_name), *_training_not_run(frame)]


def _final_losses(by_name: dict[str, dict]) -> list[str]:
    if "fp32" not in by_name or len(by_name) < 2 or pd.isna(by_name["fp32"]["final_loss"]):
        return []
    base = by_name["fp32"]
    target = base["final_loss"]
    groups: dict[str, list[str]] = {}
    for precision, row in by_name.items():
        if precision == "fp32":
            continue
        final = row["final_loss"]
        if final is None or pd.isna(final):
            groups.setdefault("at no number", []).append(NAMES[precision])
            continue
        near = abs(final - target) <= LOSS_SAME
        word = f"within {LOSS_SAME:g} of that" if near else "above it" if final > target else "below it"
        groups.setdefault(word, []).append(f"{NAMES[precision]} ({number(final)})")
    texts = "; ".join(f"{word} end {listing(names)}" for word, names in groups.items())
    return [
        f"In {base['num_steps']:,} steps fp32 comes from a loss of {number(base['first_loss'])} to {number(target)} "
        f"nats; {texts}."
    ]


def _underflow(by_name: dict[str, dict]) -> list[str]:
    sentences = []
    if "fp32" in by_name:
        base = by_name["fp32"]
        sentences.append(
            f"Of fp32's gradients, {percent(base['vanishing_logit_gradients'])} of the logits' and "
            f"{percent(base['vanishing_weight_gradients'])} of the weights' are too small for fp16 to tell from zero "
            f"({percent(base['subnormal_weight_gradients'])} of the weights' are below its smallest normal number)."
        )
    zeros = {
        name: row
        for name, row in by_name.items()
        if row["zero_logit_gradients"] > 0 or row["zero_weight_gradients"] > 0
    }
    if zeros:
        parts = (
            f"{NAMES[name]} {percent(row['zero_logit_gradients'])} of the logits' and "
            f"{percent(row['zero_weight_gradients'])} of the weights'"
            for name, row in zeros.items()
        )
        sentences.append(f"Gradients that are exactly zero: {'; '.join(parts)}.")
    if {"fp16", "fp16_unscaled"} <= by_name.keys():
        scaled, plain = by_name["fp16"], by_name["fp16_unscaled"]
        before, after = plain["zero_logit_gradients"], scaled["zero_logit_gradients"]
        text = (
            f"A loss scale, which ended at {_power(scaled['final_loss_scale'])} after leaving out "
            f"{count(int(scaled['num_skipped_steps']), 'step')}, "
        )
        if before > MATTERS * after:
            text += f"takes fp16's zeros among the logits' gradients from {percent(before)} to {percent(after)}"
        else:
            text += f"changes little here: {percent(before)} of the logits' gradients are zero without it, "
            text += f"{percent(after)} with it"
        sentences.append(text + ".")
    return sentences


def _unmoved(by_name: dict[str, dict]) -> list[str]:
    stuck = {name: row for name, row in by_name.items() if max(row["unmoved_gains"], row["unmoved_weights"]) >= 0.01}
    if not stuck:
        return []
    parts = (
        f"{NAMES[name]}, {percent(row['unmoved_gains'])} of the norm gains and {percent(row['unmoved_weights'])} of "
        "the weights"
        for name, row in stuck.items()
    )
    others = [NAMES[name] for name in by_name if name not in stuck]
    text = f"Parameters that are still the number that they began as: {'; '.join(parts)}"
    if others:
        text += f" (less than {percent(0.01)} in {listing(others)})"
    rate = stuck.get("bf16_pure", {}).get("learning_rate", math.inf)
    if rate < BF16_BELOW_ONE / 2:
        text += (
            f". Just below 1, where the gains begin, bf16's numbers are {number(BF16_BELOW_ONE)} apart, and an update "
            f"of about the learning rate ({rate:g}) is less than half of that"
        )
    return [text + "."]


def _training_not_run(frame: pd.DataFrame) -> list[str]:
    others = frame[frame["status"] != "ok"]
    return [
        f"{NAMES[row['precision']]} has no result ({row['status']}): {row['reason'].rstrip('.')}."
        for row in others.to_dict("records")
    ]
