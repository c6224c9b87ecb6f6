"""Notebook 05 from its records: what attention costs in time and memory as it grows, and what compiling changes.

Every function takes data frames that `Chapter.records` returns. A frame without the needed rows gives an empty table,
no figure (None) or no sentence.
"""

import math
import re
from collections.abc import Iterable, Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from labkit import accounting, published
from labkit.configs import LAUNCH_BOUND
from labkit.report import figures
from labkit.report.findings import (
    SAME,
    STABLE,
    count,
    geometric_mean,
    listing,
    number,
    percent,
    power_law_exponent,
    scientific,
    span,
    speed_word,
    times,
)
from labkit.report.tables import (
    PHASE_NAMES,
    STATISTICS,
    cell,
    in_order,
    ok_rows,
    once_per_frame,
    rows_by,
    spread,
    theirs_and_ours,
)

NAMES = {
    "eager": "eager",
    "compiled": "compiled",
    "compiled_heads": "compiled with heads",
    "sdpa_math": "SDPA math",
    "sdpa_flash": "SDPA flash",
    "sdpa_cudnn": "SDPA cuDNN",
    "sdpa_efficient": "SDPA efficient",
}
"""Implementations in the order and under the names in which this chapter shows them."""

KINDS = {
    "eager": "eager",
    "compiled": "eager",
    "compiled_heads": "eager",
    "sdpa_math": "math",
    "sdpa_flash": "fused",
    "sdpa_cudnn": "fused",
    "sdpa_efficient": "fused",
}
"""The closed form of `accounting` that each implementation's memory is held against, unless the compiler put SDPA
in the formula's place: then it is that of a fused kernel."""

PRECISIONS = ("fp32", "tf32", "bf16")
PHASES = ("forward", "backward")
ELEMENT_BYTES = {"fp32": 4, "tf32": 4, "bf16": 2}
CASE = ["impl", "precision", "d_head", "length"]

ACCOUNTED = 0.02
"""Predicted and measured bytes agree when they differ by at most 2 %."""

LAUNCH_FREE = 0.5
"""Exponents are fitted where the host needs less than half of the time: nearer to the launch, growth looks slower."""

EXPONENT_SAME = 0.1
"""Two fitted exponents within 0.1 of each other are called the same, however well they are known."""

STUDENT_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""Half width of Student's 95 % interval in standard errors for 1, 2, ... degrees of freedom; the last for more."""

ERROR_BUDGET = {"output": 2.0, "dq": 3.0, "dk": 3.0, "dv": 3.0}
"""How many times the error of eager attention in the same precision an implementation's may be."""

ROUNDING = {"fp32": 2.0**-24, "tf32": 2.0**-11, "bf16": 2.0**-9}
"""The largest relative rounding error of one operand; no budget is smaller."""

TRAFFIC_BOUND = 0.6
"""A pass that moves its score matrices at 60 % of the copy rate or more is called bound by that traffic."""


# ---- rows ----------------------------------------------------------------------------------------------------


def _sorted(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns the rows by precision, implementation, head dimension and length, in this chapter's order."""
    ranks = {"impl": list(NAMES), "precision": list(PRECISIONS), "phase": list(PHASES)}
    columns = [name for name in ("precision", "impl", "d_head", "length", "phase") if name in frame]
    return frame.sort_values(
        columns, key=lambda column: column.map(ranks[column.name].index) if column.name in ranks else column
    ).reset_index(drop=True)


def _series(frame: pd.DataFrame, keys: list[str]):
    """Yields (values of `keys`, rows) of measured rows in this chapter's order."""
    measured = ok_rows(frame)
    if not measured.empty:
        yield from _sorted(measured).groupby(keys, sort=False)


def _by_case(frame: pd.DataFrame, value: str = "median_ms", **equal) -> pd.Series:
    """Returns a column of the measured rows by (impl, precision, d_head, length)."""
    measured = ok_rows(frame, **equal)
    if measured.empty or value not in measured:
        return pd.Series(dtype=float)
    return measured.set_index(CASE)[value].dropna()


def _is_launch_bound(frame: pd.DataFrame, share: float = LAUNCH_BOUND) -> pd.Series:
    """Returns, per row, whether the host needs at least this share of the time to issue the work."""
    if "launch_median_ms" not in frame:
        return pd.Series(False, index=frame.index)
    return frame["launch_median_ms"] >= share * frame["host_median_ms"]


def closed_form(row: dict) -> str:
    """Returns which closed form of `accounting` holds for what ran in this row."""
    return "fused" if row.get("num_replacements", 0) > 0 else KINDS[row["impl"]]


def _case(impl: str, precision: str, d_head: int, length: int) -> str:
    return f"{NAMES[impl]} in {precision}, d {d_head}, length {length:,}"


def _lengths(values) -> str:
    return span(values, lambda value: f"{value:,}")


def _gigabytes(value: float) -> str:
    return f"{number(value / 1e9)} GB"


def _mebibytes(value: float) -> str:
    return number(value / 2**20, 4)


def _d_heads(rows: pd.DataFrame) -> str:
    return span(rows["d_head"], lambda value: f"d {value}")


def shown_d_head(frame: pd.DataFrame) -> int | None:
    """Returns the head dimension that tables and figures of one show: that with most cases, of those the largest."""
    if frame.empty:
        return None
    num_cases = frame[CASE].drop_duplicates()["d_head"].value_counts()
    return int(num_cases[num_cases == num_cases.max()].index.max())


# ---- times ---------------------------------------------------------------------------------------------------


def table_times(frame: pd.DataFrame, phase: str, d_head: int | None = None) -> pd.DataFrame:
    """Returns the median of a pass in ms: one row per head dimension (or of one) and length, a column for each rival.

    "~" marks an unstable median; "–" a case that was not run, which the findings give the reasons of.
    """
    rows = frame[frame["phase"] == phase] if not frame.empty else frame
    if rows.empty:
        return pd.DataFrame()

    def text(row: dict) -> str:
        if row["status"] == "skipped":
            return "–"
        unstable = row["status"] == "ok" and row["half_width_fraction"] > STABLE
        return ("~" if unstable else "") + cell(row)

    shown = _sorted(rows[rows["impl"] != "compiled_heads"])
    columns = {}
    for (impl, precision), group in shown.groupby(["impl", "precision"], sort=False):
        if (group["status"] != "skipped").any():
            columns[f"{NAMES[impl]}, {precision}"] = {
                (row["d_head"], row["length"]): text(row) for row in group.to_dict("records")
            }
    keys = sorted({key for column in columns.values() for key in column if d_head in (None, key[0])})
    return pd.DataFrame(
        [
            {"d": key[0], "length": key[1], **{name: column.get(key, "–") for name, column in columns.items()}}
            for key in keys
        ]
    )


def table_all_statistics(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns every statistic of every case that was tried, one row each, the two passes side by side."""
    if frame.empty:
        return frame
    lines: dict[tuple, dict[str, str]] = {}
    for row in _sorted(frame[frame["status"] != "skipped"]).to_dict("records"):
        cells = lines.setdefault((NAMES[row["impl"]], *(row[name] for name in CASE[1:])), {})
        cells |= {f"{row['phase']}: {name}": text for name, text in spread(row).items()}
    names = [f"{phase}: {name}" for phase in PHASES for name in STATISTICS]
    return pd.DataFrame(
        {
            **dict(zip(("implementation", "precision", "d", "length"), key, strict=True)),
            **{name: cells.get(name, "–") for name in names},
        }
        for key, cells in lines.items()
    )


def figure_times(frame: pd.DataFrame, precisions: tuple[str, ...]) -> Figure | None:
    """Two rows of panels, forward and backward, one per head dimension: median over length, log axes, p20–p80 band."""
    rows = frame[frame["precision"].isin(precisions) & (frame["impl"] != "compiled_heads")] if len(frame) else frame
    if ok_rows(rows).empty:
        return None
    # A backward pass whose forward pass ran out of memory is missing for the same reason.
    rows = rows.assign(status=rows["status"].mask(rows["reason"].str.endswith("ended oom"), "oom"))
    d_heads = sorted(rows["d_head"].unique())
    figure, axes = figures.panels(len(PHASES) * len(d_heads), num_columns=len(d_heads), width=3.2)
    panels = [(phase, d_head) for phase in PHASES for d_head in d_heads]
    for axis, (phase, d_head) in zip(axes, panels, strict=True):
        of_panel = rows[(rows["phase"] == phase) & (rows["d_head"] == d_head)]
        for (impl, precision), line in _sorted(of_panel).groupby(["impl", "precision"], sort=False):
            figures.line_with_band(
                axis, line, "length", label=_label(impl, precision, precisions), colour=figures.COLOURS[impl],
                linestyle="--" if precision == "tf32" else "-",
            )  # fmt: skip
        _length_axis(axis, rows["length"].unique())
        _decades(axis, f"{PHASE_NAMES[phase]} (ms)")
        axis.set_title(f"{PHASE_NAMES[phase]}, d = {d_head}")
    _legend_below(figure, axes)
    figure.suptitle(
        f"Attention, batch 8, {' and '.join(precisions)}, {frame.attrs['device']} (band: p20–p80; × out of memory)",
        fontsize=10,
    )
    return figure


def _label(impl: str, precision: str, precisions: tuple[str, ...]) -> str:
    return NAMES[impl] if len(precisions) == 1 else f"{NAMES[impl]}, {precision}"


def _length_axis(axis: Axes, lengths) -> None:
    figures.context_axis(axis, lengths)
    axis.tick_params(axis="x", labelsize=7, labelrotation=45)
    axis.set_xlabel("length (queries = keys)")


def _decades(axis: Axes, label: str) -> None:
    """Makes y a log axis over many decades, with a tick at each."""
    figures.log_time_axis(axis, label)
    axis.yaxis.set_major_locator(LogLocator(numticks=12))
    axis.minorticks_off()


def _legend_below(figure: Figure, axes: list[Axes]) -> None:
    entries = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=min(len(entries), 6))


def findings_times(frame: pd.DataFrame, ceilings: pd.DataFrame) -> list[str]:
    """Says what was launch-bound, which backend is ahead, what bounds eager, what was not run, how steady it is."""
    return [
        *_launch_bound(frame),
        *_backends(frame),
        *_traffic(frame, ceilings),
        *_steadiness(frame),
        *_not_run(frame),
    ]


def _launch_bound(frame: pd.DataFrame) -> list[str]:
    measured = ok_rows(frame)
    if measured.empty:
        return []
    bound = measured[_is_launch_bound(measured)]
    if bound.empty:
        return []
    longest = bound.loc[bound["length"].idxmax()]
    return [
        f"{len(bound)} of {len(measured)} passes are launch-bound (the host needs at least {percent(LAUNCH_BOUND)} of "
        f"the time to issue the work), at lengths up to {longest['length']:,} ({NAMES[longest['impl']]} in "
        f"{longest['precision']})."
    ]


def _backends(frame: pd.DataFrame) -> list[str]:
    """Compares each SDPA backend with eager in the same precision, at the longest length at which both ran."""
    sentences = []
    for (precision, impl), rows in _series(frame, ["precision", "impl"]):
        if not impl.startswith("sdpa_"):
            continue
        parts = []
        for phase in PHASES:
            eager = _by_case(frame, phase=phase, impl="eager", precision=precision)
            gains = {
                (length, d_head): eager["eager", precision, d_head, length] / value
                for (_, _, d_head, length), value in _by_case(rows, phase=phase).items()
                if ("eager", precision, d_head, length) in eager
            }
            if gains:
                longest = max(length for length, _ in gains)
                at_longest = {d_head: gain for (length, d_head), gain in gains.items() if length == longest}
                where = f"length {longest:,}, {span(at_longest, lambda d_head: f'd {d_head}')}"
                speed = f"{span(at_longest.values())} eager's speed"
                parts.append(f"{PHASE_NAMES[phase]} at {speed} ({_speed_words(at_longest)}; {where})")
        if parts:
            sentences.append(f"**{NAMES[impl]}** in {precision} runs {listing(parts)}.")
    return sentences


def _speed_words(gains: dict[int, float]) -> str:
    """Returns one word for the speed-ups of all head dimensions, or each word with its head dimensions."""
    by_word: dict[str, list[int]] = {}
    for d_head, gain in sorted(gains.items()):
        by_word.setdefault(speed_word(gain), []).append(d_head)
    if len(by_word) == 1:
        return next(iter(by_word))
    return ", ".join(f"{word} for {listing(f'd {d_head}' for d_head in found)}" for word, found in by_word.items())


def _traffic(frame: pd.DataFrame, ceilings: pd.DataFrame) -> list[str]:
    """Divides the bytes of the score matrices that eager attention moves by its time and by the copy rate."""
    copies = ok_rows(ceilings, kind="copy")
    eager = ok_rows(frame, impl="eager")
    if copies.empty or eager.empty:
        return []
    copy_rate = copies["achieved_gb_per_s"].iloc[-1]
    sentences = []
    for (precision, phase), rows in _series(eager, ["precision", "phase"]):
        passes = accounting.attention_score_passes(phase, device_kind=frame.attrs["device_kind"])
        length = rows["length"].max()
        rates = {}
        for row in rows[rows["length"] == length].to_dict("records"):
            scores = ELEMENT_BYTES[precision] * row["batch"] * length * length
            rates[row["d_head"]] = passes * scores / (row["median_ms"] * 1e-3) / 1e9 / copy_rate
        bound = [d_head for d_head, fraction in rates.items() if fraction >= TRAFFIC_BOUND]
        text = (
            f"Eager {PHASE_NAMES[phase]} in {precision} reads or writes all its scores {passes} times, which at "
            f"length {length:,} makes {span(rates.values(), percent)} of the measured copy rate"
        )
        if bound:
            d_heads = listing(f"d {d_head}" for d_head in sorted(bound))
            text += f"; from {percent(TRAFFIC_BOUND)} on it is called bound by that traffic: {d_heads}"
        sentences.append(text + ".")
    return sentences


def _steadiness(frame: pd.DataFrame) -> list[str]:
    measured = ok_rows(frame)
    if measured.empty:
        return []
    steady = (measured["half_width_fraction"] <= STABLE).mean()
    full = measured[measured["timer_stop_reason"] == "sample limit"]
    fewer = measured[measured["timer_stop_reason"] != "sample limit"]
    text = f"Of {len(measured):,} medians {percent(steady, 3)} are known to ±{percent(STABLE)}"
    if len(full):
        text += f"; {len(full):,} are of {_lengths(full['n'].astype(int))} passes"
    if len(fewer):
        text += f"; {len(fewer):,} are of fewer, at least {int(fewer['n'].min())}, because the time limit came first"
    return [text + "."]


def _not_run(frame: pd.DataFrame) -> list[str]:
    if frame.empty:
        return []
    sentences = []
    skipped = frame[(frame["status"] == "skipped") & ~frame["reason"].str.startswith("not run:")]
    for (impl, precision, reason), rows in skipped.groupby(["impl", "precision", "reason"], sort=False):
        cases = count(len(rows[CASE].drop_duplicates()), "case")
        sentences.append(f"{NAMES[impl]} in {precision} was not run in {cases}: {reason.rstrip('.')}.")
    failed = frame[frame["status"].isin(["error", "timeout"])]
    if len(failed):
        reasons = failed["reason"].value_counts()
        sentences.append(
            f"{len(failed)} measurements failed: " + listing(f"{text} ({n})" for text, n in reasons.items()) + "."
        )
    return sentences


# ---- growth --------------------------------------------------------------------------------------------------


@once_per_frame
def growth(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns fitted exponents: time of either pass and memory before backward, each as (length)^exponent.

    One row per precision, implementation and head dimension with at least three lengths at which the host needs less
    than LAUNCH_FREE of either pass. Columns: precision, impl, d_head, lengths (those of the fit), forward, backward,
    memory (NaN where it was measured at fewer than three of them).
    """
    rows = []
    for (precision, impl, d_head), group in _series(frame, ["precision", "impl", "d_head"]):
        held_up = set(group[_is_launch_bound(group, LAUNCH_FREE)]["length"])
        lengths = [length for length in group["length"].unique() if length not in held_up]
        if len(lengths) >= 3:
            row = {"precision": precision, "impl": impl, "d_head": d_head, "lengths": lengths}
            rows.append(row | _exponents(group, lengths))
    return pd.DataFrame(rows)


def _exponents(series: pd.DataFrame, lengths: list[int]) -> dict[str, float]:
    """Returns the exponents of one series over these lengths; NaN where fewer than three of them were measured."""
    exponents = {}
    sources = {"forward": ("forward", "median_ms"), "backward": ("backward", "median_ms"),
               "memory": ("forward", "in_use_bytes")}  # fmt: skip
    for name, (phase, value) in sources.items():
        line = [
            (length, y)
            for of, length, y in zip(series["phase"], series["length"], series[value], strict=True)
            if of == phase and length in lengths and not math.isnan(y)
        ]
        exponents[name] = power_law_exponent(*zip(*line, strict=True)) if len(line) >= 3 else float("nan")
    return exponents


def table_growth(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns the fitted exponents."""
    fits = growth(frame)
    if fits.empty:
        return fits
    return pd.DataFrame(
        {
            "implementation": NAMES[row["impl"]],
            "precision": row["precision"],
            "d": row["d_head"],
            "lengths": _lengths(row["lengths"]),
            "forward: time ∝ length^": _exponent(row["forward"]),
            "backward: time ∝ length^": _exponent(row["backward"]),
            "in use before backward ∝ length^": _exponent(row["memory"]),
        }
        for row in fits.to_dict("records")
    )


def _exponent(value: float) -> str:
    return "–" if pd.isna(value) else f"{value:.2f}"


def findings_growth(frame: pd.DataFrame) -> list[str]:
    """Says with which power of the length time and memory grow."""
    fits = growth(frame)
    sentences = []
    for (precision, impl), rows in fits.groupby(["precision", "impl"], sort=False) if len(fits) else []:
        parts = [
            f"{name} as length^{span(rows[column].dropna(), _exponent)}"
            for column, name in (
                ("forward", "forward time grows"), ("backward", "backward time"), ("memory", "memory before backward"),
            )
            if rows[column].notna().any()
        ]  # fmt: skip
        where = f"lengths {_lengths(rows['lengths'].explode())}, {_d_heads(rows)}"
        sentences.append(f"**{NAMES[impl]}** in {precision}: {', '.join(parts)} ({where}).")
    return sentences


# ---- memory --------------------------------------------------------------------------------------------------


@once_per_frame
def memory(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns predicted beside measured bytes of every measured forward pass, with its backward's peak.

    Columns: those of CASE, batch, saved_bytes, in_use_bytes, peak_forward, peak_backward (NaN where the device does
    not say), and predicted_ of each; the peaks are predicted for eager attention only.
    """
    forward = ok_rows(frame, phase="forward")
    if forward.empty:
        return forward
    backward = _by_case(frame, "peak_bytes", phase="backward")
    rows = []
    for row in _sorted(forward).to_dict("records"):
        shape = (row["batch"], row["length"], row["d_head"], ELEMENT_BYTES[row["precision"]])
        kind = closed_form(row)
        peaks = dict.fromkeys(PHASES)
        if row["impl"] == "eager":
            device_kind = frame.attrs["device_kind"]
            peaks = {phase: accounting.attention_peak_bytes(phase, *shape, device_kind=device_kind) for phase in PHASES}
        rows.append(
            {
                **{name: row[name] for name in [*CASE, "batch", "saved_bytes", "in_use_bytes"]},
                "peak_forward": row.get("peak_bytes"),
                "peak_backward": backward.get(tuple(row[name] for name in CASE)),
                "predicted_saved": accounting.attention_saved_bytes(kind, *shape),
                "predicted_in_use": accounting.attention_in_use_bytes(kind, *shape),
                "predicted_forward": peaks["forward"],
                "predicted_backward": peaks["backward"],
            }
        )
    numeric = [name for name in rows[0] if name not in ("impl", "precision")]
    return pd.DataFrame(rows).astype({name: "float64" for name in numeric if name not in ("d_head", "length", "batch")})


_PREDICTED = {
    "saved_bytes": "predicted_saved",
    "in_use_bytes": "predicted_in_use",
    "peak_forward": "predicted_forward",
    "peak_backward": "predicted_backward",
}


def table_memory(frame: pd.DataFrame, d_head: int | None = None, *, without: int | None = None) -> pd.DataFrame:
    """Returns predicted and measured bytes (MiB) by implementation and length, of one head dimension or of all.

    Args:
        without: head dimension to leave out, where another table shows it.
    """
    rows = memory(frame)
    if rows.empty:
        return rows

    def pair(row: dict, measured: str) -> str:
        predicted, value = row[_PREDICTED[measured]], row[measured]
        if pd.isna(value):
            return "–"
        if pd.isna(predicted):
            return _mebibytes(value)
        return f"{_mebibytes(value)} ({_difference(value, predicted)})"

    return pd.DataFrame(
        {
            "implementation": NAMES[row["impl"]],
            "precision": row["precision"],
            "d": row["d_head"],
            "length": row["length"],
            "kept for backward": pair(row, "saved_bytes"),
            "in use before backward": pair(row, "in_use_bytes"),
            "in use, predicted": _mebibytes(row["predicted_in_use"]),
            "forward peak": pair(row, "peak_forward"),
            "backward peak": pair(row, "peak_backward"),
        }
        for row in rows.to_dict("records")
        if d_head in (None, row["d_head"]) and row["d_head"] != without
    )


def _difference(measured: float, predicted: float) -> str:
    """Returns the deviation from a prediction with its sign; "exact" where there is none."""
    if measured == predicted:
        return "exact"
    fraction = measured / predicted - 1
    return f"{'+' if fraction > 0 else '−'}{percent(abs(fraction))}"


_LIMIT_COLUMNS = (
    "longest", "peak_bytes", "num_matrices", "oom_length", "oom_phase", "asked_bytes", "given_bytes", "cached_bytes",
    "predicted_length", "predicted_phase",
)  # fmt: skip

_OUT_OF_MEMORY = re.compile(
    r"Tried to allocate (\S+ \w+)\..* memory (\S+ \w+) is allocated by PyTorch, and (\S+ \w+) is reserved by PyTorch",
    re.DOTALL,
)
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def _at_out_of_memory(reason: str) -> dict[str, float]:
    """Returns what PyTorch's message says: the bytes asked for, those given out and those in cached blocks."""
    found = _OUT_OF_MEMORY.search(reason)
    if found is None:
        return {}
    sizes = [float(size) * _UNITS[unit] for size, unit in (group.split() for group in found.groups())]
    return dict(zip(("asked_bytes", "given_bytes", "cached_bytes"), sizes, strict=True))


@once_per_frame
def limits(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns where each implementation runs out of memory, one row for each series that went on to the longest length.

    Columns: precision, impl, kind (the closed form), d_head, device_bytes; longest (the longest length whose backward
    ran), its peak_bytes, num_matrices (that peak in score matrices of the input's dtype); oom_length and oom_phase (the
    first out-of-memory), asked_bytes, given_bytes and cached_bytes (what was asked for, given out and cached then);
    predicted_length and predicted_phase (eager: the first length and pass asked for that makes the allocator hold more
    than the device's memory). NaN or None where there is no such thing.
    """
    measured = ok_rows(frame)
    if measured.empty or "device_bytes" not in frame:
        return pd.DataFrame()
    device_bytes = measured["device_bytes"].max()
    longest = frame.groupby("precision")["length"].max()
    rows = []
    for (precision, impl, d_head), group in _sorted(frame).groupby(["precision", "impl", "d_head"], sort=False):
        if ok_rows(group).empty or group["length"].max() < longest[precision]:
            continue
        kind = closed_form(ok_rows(group).iloc[-1].to_dict())
        row = {"precision": precision, "impl": impl, "kind": kind, "d_head": d_head, "device_bytes": device_bytes}
        row |= dict.fromkeys(_LIMIT_COLUMNS, float("nan"))
        if len(complete := ok_rows(group, phase="backward")):
            last = complete.iloc[-1]
            matrix = ELEMENT_BYTES[precision] * last["batch"] * last["length"] ** 2
            row |= {"longest": last["length"], "peak_bytes": last.get("peak_bytes", float("nan"))}
            row["num_matrices"] = row["peak_bytes"] / matrix
        if len(lost := group[group["status"] == "oom"]):
            first = lost.iloc[0]
            row |= {"oom_length": first["length"], "oom_phase": first["phase"], **_at_out_of_memory(first["reason"])}
        if impl == "eager":
            row |= _predicted_limit(group, device_bytes, frame.attrs["device_kind"])
        rows.append(row)
    return pd.DataFrame(rows)


def _predicted_limit(group: pd.DataFrame, device_bytes: float, device_kind: str) -> dict:
    for row in group.drop_duplicates("length").to_dict("records"):
        shape = (row["batch"], row["length"], row["d_head"], ELEMENT_BYTES[row["precision"]])
        for phase in PHASES:
            if accounting.attention_reserved_bytes(phase, *shape, device_kind=device_kind) > device_bytes:
                return {"predicted_length": row["length"], "predicted_phase": phase}
    return {}


def table_limits(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns the peak of the longest complete backward, and where memory ran out, predicted and measured."""
    rows = limits(frame)
    if rows.empty:
        return rows

    def place(row: dict, name: str) -> str:
        length = row[f"{name}_length"]
        return f"{int(length):,}, {PHASE_NAMES[row[f'{name}_phase']]}" if pd.notna(length) else "–"

    return pd.DataFrame(
        {
            "implementation": NAMES[row["impl"]],
            "precision": row["precision"],
            "d": row["d_head"],
            "longest complete": f"{int(row['longest']):,}" if pd.notna(row["longest"]) else "–",
            "its peak (MiB)": _mebibytes(row["peak_bytes"]) if pd.notna(row["peak_bytes"]) else "–",
            "in score matrices": "–" if row["kind"] == "fused" else number(row["num_matrices"]),
            "first out of memory": place(row, "oom"),
            "predicted": place(row, "predicted") if row["impl"] == "eager" else "–",
        }
        for row in rows.to_dict("records")
    )


def figure_memory(frame: pd.DataFrame) -> Figure | None:
    """One panel per precision: bytes in use before backward over length, the prediction and the device's memory."""
    d_head = shown_d_head(frame)
    rows = memory(frame)
    if rows.empty:
        return None
    rows = rows[(rows["d_head"] == d_head) & (rows["impl"] != "compiled_heads")]
    precisions = [precision for precision in PRECISIONS if precision in set(rows["precision"])]
    figure, axes = figures.panels(len(precisions), width=3.8, height=3.4)
    for axis, precision in zip(axes, precisions, strict=True):
        of_panel = rows[rows["precision"] == precision]
        asked = frame[(frame["precision"] == precision) & (frame["d_head"] == d_head) & (frame["phase"] == "forward")]
        lines = list(of_panel.groupby("impl", sort=False))
        for position, (impl, line) in enumerate(lines):
            colour = figures.COLOURS[impl]
            # Several hold the same bytes: what is drawn below is wider, so that it shows beside what covers it.
            covered_by = len(lines) - 1 - position
            axis.plot(line["length"], line["in_use_bytes"] / 2**30, color=colour, marker="o",
                      markersize=3 + covered_by, linewidth=1.5 + 1.2 * covered_by, label=NAMES[impl])  # fmt: skip
            axis.plot(line["length"], line["predicted_in_use"] / 2**30, color="0.1", linestyle=":", linewidth=1,
                      zorder=3)  # fmt: skip
            figures.mark_failures(axis, asked[asked["impl"] == impl], "length", colour=colour)
        limit = ok_rows(frame)["device_bytes"].max() / 2**30
        axis.axhline(limit, color="0.2", linestyle="--", linewidth=1, label="the device's memory")
        _length_axis(axis, asked["length"].unique())
        _decades(axis, "in use before backward (GiB)")
        axis.set_title(precision)
    _legend_below(figure, axes)
    figure.suptitle(
        f"Attention memory, batch 8, d = {d_head}, {frame.attrs['device']} (dotted: predicted; × out of memory)",
        fontsize=10,
    )
    return figure


def findings_memory(frame: pd.DataFrame) -> list[str]:
    """Says whether the accounting holds, and whether memory runs out where it says."""
    return [*_accounting_holds(frame), *_saved_growth(frame), *_memory_ends(frame)]


def _accounting_holds(frame: pd.DataFrame) -> list[str]:
    rows = memory(frame)
    if rows.empty:
        return []
    sentences = []
    for measured, name in (
        ("saved_bytes", "kept for the backward pass"),
        ("in_use_bytes", "in use before the backward pass"),
        ("peak_forward", "at the peak of the forward pass"),
        ("peak_backward", "at the peak of the backward pass"),
    ):
        known = rows.dropna(subset=[measured, _PREDICTED[measured]])
        if known.empty:
            continue
        off = (known[measured] / known[_PREDICTED[measured]] - 1).abs()
        exact = int((off == 0).sum())
        text = f"Bytes {name}: the accounting is within {percent(ACCOUNTED)} in {int((off <= ACCOUNTED).sum())} of "
        text += (
            f"{count(len(known), 'case')} of {listing((NAMES[impl] for impl in known['impl'].unique()), len(NAMES))}"
        )
        text += f", exact in {exact}" if exact else ""
        if off.max() > 0:
            worst = known.loc[off.idxmax()]
            deviation = _difference(worst[measured], worst[_PREDICTED[measured]])
            text += f"; the largest difference is {deviation} ({_case(*(worst[column] for column in CASE))})"
        missed = known[off > ACCOUNTED]
        if len(missed):
            by_impl = missed.groupby(["impl", "precision"], sort=False).size()
            text += f". It misses for {listing(f'{NAMES[i]} in {p} ({n})' for (i, p), n in by_impl.items())}"
        sentences.append(text + ".")
    return sentences


def _saved_growth(frame: pd.DataFrame) -> list[str]:
    """Says what each doubling of the length does to what is kept, at the longest pair of lengths."""
    rows = memory(frame)
    sentences = []
    for precision, of_precision in rows.groupby("precision", sort=False) if len(rows) else []:
        factors = {}
        for impl, line in of_precision.groupby("impl", sort=False):
            wide = line.pivot_table(index="d_head", columns="length", values="saved_bytes")
            last = wide.columns.max()
            if last / 2 in wide:
                factors[impl] = ((wide[last] / wide[last / 2]).dropna(), last)
        parts = [
            f"{NAMES[impl]} {span(factor)} (to {int(last):,})"
            for impl, (factor, last) in factors.items()
            if len(factor)
        ]
        if parts:
            sentences.append(
                f"Twice the length multiplies what is kept for backward in {precision}: {'; '.join(parts)}."
            )
    return sentences


def _memory_ends(frame: pd.DataFrame) -> list[str]:
    rows = limits(frame)
    sentences = []
    for (precision, impl), group in rows.groupby(["precision", "impl"], sort=False) if len(rows) else []:
        lost = group.dropna(subset=["oom_length"])
        matrices = group["num_matrices"].dropna()
        if lost.empty:
            if set(group["kind"]) == {"fused"}:
                longest = group.loc[group["longest"].idxmax()] if group["longest"].notna().any() else None
                if longest is not None and pd.notna(longest["peak_bytes"]):
                    sentences.append(
                        f"**{NAMES[impl]}** in {precision} did not run out of memory: at length "
                        f"{int(longest['longest']):,} (d {longest['d_head']}) its peak is "
                        f"{_gigabytes(longest['peak_bytes'])} of {_gigabytes(longest['device_bytes'])}."
                    )
            continue
        places = lost.groupby(["oom_length", "oom_phase"])["d_head"].apply(list)
        text = f"**{NAMES[impl]}** in {precision} first runs out of memory at " + listing(
            f"length {int(length):,} in the {PHASE_NAMES[phase]} pass (d {', '.join(map(str, d_heads))})"
            for (length, phase), d_heads in places.items()
        )
        if len(matrices):
            text += f"; at its longest complete length the peak was {span(matrices, number)} score matrices"
        if impl == "eager":
            as_told = (group["predicted_length"] == group["oom_length"]) & (
                group["predicted_phase"] == group["oom_phase"]
            )
            told = int(as_told[group["oom_length"].notna()].sum())
            text += f". The accounting names that length and pass in {told} of {count(len(lost), 'head dimension')}"
        sentences.append(text + "." + _fragmentation(lost))
    return sentences


def _fragmentation(lost: pd.DataFrame) -> str:
    """Returns a sentence where what was asked for would have fitted beside what was given out, "" elsewhere."""
    needed = lost["given_bytes"] + lost["asked_bytes"]
    split = lost[(needed <= lost["device_bytes"]) & (needed + lost["cached_bytes"] > lost["device_bytes"])]
    if split.empty:
        return ""
    asked, given, cached = (span(split[name], _gigabytes) for name in ("asked_bytes", "given_bytes", "cached_bytes"))
    return (
        f" The request that failed asked for {asked} with {given} given out, which the device has room for; another "
        f"{cached} were held in cached blocks that could not be used for it."
    )


# ---- compiling ------------------------------------------------------------------------------------------------


def table_compile(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns eager and compiled times, their ratio and the first, compiling calls, by precision, d and length."""
    rows = frame[frame["impl"] == "compiled"] if not frame.empty else frame
    if ok_rows(rows).empty:
        return pd.DataFrame()
    first = {phase: _by_case(rows, "first_call_ms", phase=phase) for phase in PHASES}
    calls = _calls(frame)
    result = []
    for key, _ in _sorted(rows).groupby(CASE, sort=False):
        _, precision, d_head, length = key
        line = {"precision": precision, "d": d_head, "length": length}
        for phase in PHASES:
            eager = calls.get((phase, "eager", _eager_precision(precision), d_head, length))
            mine = calls.get((phase, *key))
            both = eager is not None and mine is not None and eager["status"] == mine["status"] == "ok"
            line[f"{phase}: eager (ms)"] = _time(eager)
            line[f"{phase}: compiled (ms)"] = _time(mine)
            line[f"{phase}: speed-up"] = times(eager["median_ms"] / mine["median_ms"]) if both else "–"
        seconds = [first[phase].get(key) for phase in PHASES]
        line["first calls (s)"] = number(sum(seconds) / 1000) if all(pd.notna(s) for s in seconds) else "–"
        result.append(line)
    return _precision_order(pd.DataFrame(result))


def _precision_order(table: pd.DataFrame) -> pd.DataFrame:
    return table.sort_values("precision", key=lambda column: column.map(PRECISIONS.index), kind="stable")


def _calls(frame: pd.DataFrame) -> dict[tuple, dict]:
    """Returns the rows by (phase, impl, precision, d_head, length)."""
    return rows_by(frame, ["phase", *CASE])


def _time(row: dict | None) -> str:
    return "–" if row is None or row["status"] == "skipped" else cell(row)


def table_heads(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns the formula compiled without and with a dimension of heads, and what the compiler made of it."""
    rows = ok_rows(frame, impl="compiled_heads", phase="forward")
    calls = _calls(frame)
    result = []
    for row in _sorted(rows).to_dict("records") if len(rows) else []:
        for impl in ("eager", "compiled", "compiled_heads"):
            key = (impl, row["precision"], row["d_head"], row["length"])
            forward, backward = (calls.get((phase, *key)) for phase in PHASES)
            if forward is None or forward["status"] != "ok":
                continue
            replaced = forward.get("num_replacements")
            result.append(
                {
                    "precision": row["precision"],
                    "d": row["d_head"],
                    "length": row["length"],
                    "implementation": NAMES[impl],
                    "replaced by SDPA": "–" if pd.isna(replaced) else ("yes" if replaced else "no"),
                    "forward (ms)": _time(forward),
                    "backward (ms)": _time(backward),
                    "in use before backward (MiB)": _mebibytes(forward["in_use_bytes"]),
                }
            )
    return pd.DataFrame(result)


def findings_compile(frame: pd.DataFrame) -> list[str]:
    """Says what compiling gains and costs, whether it changes the powers of the length, and when it does."""
    return [*_compile_gains(frame), *_compile_powers(frame), *_compile_heads(frame)]


def _compile_gains(frame: pd.DataFrame) -> list[str]:
    sentences = []
    for (precision,), rows in _series(ok_rows(frame, impl="compiled"), ["precision"]):
        base = _eager_precision(precision)
        mine, eager = (
            of[~_is_launch_bound(of)].pivot_table(index=["d_head", "length"], columns="phase", values="median_ms")
            for of in (rows, ok_rows(frame, impl="eager", precision=base))
        )
        ratio = (eager / mine).dropna(how="all")
        parts = [
            f"{PHASE_NAMES[phase]} {span(ratio[phase].dropna())} (geometric mean "
            f"{times(geometric_mean(ratio[phase].dropna()))}, {_how_many_gain(ratio[phase].dropna())})"
            for phase in PHASES
            if phase in ratio and ratio[phase].notna().any()
        ]
        if not parts:
            continue
        against = "" if base == precision else f" against eager {base}"
        text = f"Compiled in {precision}, eager's time over its own{against}: {', '.join(parts)}"
        first = rows.groupby(["d_head", "length"])["first_call_ms"].sum()
        text += f"; the first calls take {span(first / 1000, lambda value: number(value, 2) + ' s')}"
        sums = pd.DataFrame(
            {"first": first, "eager": eager.sum(axis=1, skipna=False), "mine": mine.sum(axis=1, skipna=False)}
        )
        sums = sums[sums["eager"] / sums["mine"] > 1 + SAME]
        pays = sums["first"] / (sums["eager"] - sums["mine"])
        if len(pays):
            text += (
                f", paid back after {span(pays, lambda value: number(value, 2))} passes forward and back where it gains"
            )
        sentences.append(text + " (launch-bound passes left out).")
    return sentences


def _how_many_gain(gains: Sequence[float]) -> str:
    words = [speed_word(gain) for gain in gains]
    text = f"faster in {words.count('faster')} of {count(len(words), 'case')}"
    return text + (f", slower in {words.count('slower')}" if "slower" in words else "")


def _compile_powers(frame: pd.DataFrame) -> list[str]:
    """Compares the exponents of compiled and eager attention over the lengths at which both were fitted."""
    sentences = []
    fits = growth(frame)
    in_use = _by_case(frame, "in_use_bytes", phase="forward")
    sources = {
        "forward time": _by_case(frame, phase="forward"),
        "backward time": _by_case(frame, phase="backward"),
        "memory before backward": in_use,
    }
    for precision, rows in fits[fits["impl"] == "compiled"].groupby("precision", sort=False) if len(fits) else []:
        base = _eager_precision(precision)
        others = fits[(fits["impl"] == "eager") & (fits["precision"] == base)].set_index("d_head")["lengths"]
        common = {
            d_head: [length for length in lengths if length in others[d_head]]
            for d_head, lengths in zip(rows["d_head"], rows["lengths"], strict=True)
            if d_head in others
        }
        changes = {}
        for name, values in sources.items():
            lines = [
                {
                    length: values["compiled", precision, d_head, length] / values["eager", base, d_head, length]
                    for length in lengths
                    if {("compiled", precision, d_head, length), ("eager", base, d_head, length)} <= set(values.index)
                }
                for d_head, lengths in common.items()
            ]
            if (change := _exponent_change(lines)) is not None:
                changes[name] = change
        if not changes:
            continue
        changed = [name for name, (change, known_to) in changes.items() if abs(change) > max(EXPONENT_SAME, known_to)]
        text = f"Compiling in {precision} " + (
            f"changes the power of the length in {listing(changed)}"
            if changed
            else "shows no change in the powers of the length"
        )
        text += " (exponent less eager's: " + ", ".join(
            f"{name} {_signed(change)} ± {known_to:.2f}" for name, (change, known_to) in changes.items()
        )
        text += f"; called a change beyond {EXPONENT_SAME:g} and beyond the 95 % interval)"
        ratios = [
            value / in_use["eager", base, d_head, length]
            for (impl, of, d_head, length), value in in_use.items()
            if (impl, of) == ("compiled", precision) and ("eager", base, d_head, length) in in_use
        ]
        if ratios:
            text += f"; it has {span(ratios)} eager's bytes in use before backward"
        sentences.append(text + ".")
    return sentences


def _exponent_change(lines: Iterable[dict[int, float]]) -> tuple[float, float] | None:
    """Returns the power of the length with which ratios change, one power for all lines, and its 95 % interval's half.

    Args:
        lines: ratio by length, one line for each head dimension; each has a factor of its own.

    Returns None where the points are too few to tell the interval.
    """
    x, y, num_lines = [], [], 0
    for line in lines:
        if len(line) >= 2:
            for values, points in ((x, line.keys()), (y, line.values())):
                logs = [math.log(value) for value in points]
                values += [value - sum(logs) / len(logs) for value in logs]
            num_lines += 1
    num_degrees = len(x) - num_lines - 1
    if num_degrees < 1:
        return None
    sum_of_squares = sum(a * a for a in x)
    slope = sum(a * b for a, b in zip(x, y, strict=True)) / sum_of_squares
    residual = sum((b - slope * a) ** 2 for a, b in zip(x, y, strict=True)) / num_degrees
    student = STUDENT_95[min(num_degrees, len(STUDENT_95)) - 1]
    return slope, student * math.sqrt(residual / sum_of_squares)


def _signed(value: float) -> str:
    text = f"{value:+.2f}".replace("-", "−")
    return "0.00" if text[1:] == "0.00" else text


def _eager_precision(precision: str) -> str:
    """Returns the precision of the eager attention that stands beside a compiled one: there is none in tf32."""
    return "fp32" if precision == "tf32" else precision


def _compile_heads(frame: pd.DataFrame) -> list[str]:
    sentences = []
    calls = _calls(frame)
    for (precision,), rows in _series(ok_rows(frame, impl="compiled_heads", phase="forward"), ["precision"]):
        replaced = rows[rows["num_replacements"] > 0]
        last = rows.iloc[-1]
        plain = calls.get(("forward", "compiled", precision, last["d_head"], last["length"]))
        text = f"With a dimension of heads in front, the compiler replaces the formula by SDPA in {len(replaced)} of "
        text += f"{count(len(rows), 'case')} in {precision}"
        if plain is not None and plain["status"] == "ok":
            without = {
                (True, True): "it does so too", (True, False): "it does not",
                (False, True): "it does", (False, False): "it does not either",
            }[len(replaced) > 0, plain.get("num_replacements", 0) > 0]  # fmt: skip
            text += (
                f"; without it, {without}. At length {last['length']:,} (d {last['d_head']}) "
                f"{_mebibytes(last['in_use_bytes'])} MiB are in use before backward with it, "
                f"{_mebibytes(plain['in_use_bytes'])} MiB without"
            )
        sentences.append(text + ".")
    return sentences


# ---- numerics --------------------------------------------------------------------------------------------------


@once_per_frame
def errors(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns every relative error against fp64 with eager's of the same precision, d and length.

    Columns: those of CASE, quantity ("output", "dq", "dk", "dv"), error, eager_error (NaN where eager did not run;
    for tf32, which eager is not run in, the rounding of its operands), allowed.
    """
    rows = []
    for quantity in ERROR_BUDGET:
        measured = _by_case(frame, f"{quantity}_relative_error")
        for (impl, precision, d_head, length), error in measured.items():
            eager = measured.get(("eager", precision, d_head, length), float("nan"))
            rows.append(
                {
                    "impl": impl,
                    "precision": precision,
                    "d_head": d_head,
                    "length": length,
                    "quantity": quantity,
                    "error": error,
                    "eager_error": eager,
                    "allowed": ERROR_BUDGET[quantity] * max(eager, ROUNDING[precision])
                    if pd.notna(eager)
                    else float("nan"),
                }
            )
    return _sorted(pd.DataFrame(rows)) if rows else pd.DataFrame()


def table_errors(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns the largest relative error of each implementation over all cases, and its ratio to eager's."""
    rows = errors(frame)
    if rows.empty:
        return rows
    result = []
    for (precision, impl), group in rows.groupby(["precision", "impl"], sort=False):
        line = {"implementation": NAMES[impl], "precision": precision, "cases": len(group[CASE].drop_duplicates())}
        for quantity, of_quantity in group.groupby("quantity", sort=False):
            line[quantity] = scientific(of_quantity["error"].max())
        ratio = (group["error"] / group["eager_error"]).dropna()
        line["largest, over eager's"] = times(ratio.max()) if len(ratio) else "–"
        result.append(line)
    return pd.DataFrame(result)


def findings_errors(frame: pd.DataFrame) -> list[str]:
    """Says whether every implementation stays within its error budget."""
    rows = errors(frame)
    if rows.empty:
        return []
    known = rows.dropna(subset=["allowed"])
    known = known[known["impl"] != "eager"]
    sentences = []
    if len(known):
        over = known[known["error"] > known["allowed"]]
        budget = f"{ERROR_BUDGET['output']:g}× eager's error for outputs and {ERROR_BUDGET['dq']:g}× for gradients"
        if over.empty:
            sentences.append(
                f"All {len(known):,} errors that have eager's of the same precision beside them stay within {budget}."
            )
        else:
            worst = over.loc[(over["error"] / over["allowed"]).idxmax()]
            sentences.append(
                f"{len(over)} of {len(known):,} errors exceed {budget}; the worst is {worst['quantity']} of "
                f"{_case(*(worst[column] for column in CASE))}: {scientific(worst['error'])}, "
                f"allowed {scientific(worst['allowed'])}."
            )
    alone = rows[rows["allowed"].isna()]
    if len(alone):
        worst = alone.loc[alone["error"].idxmax()]
        sentences.append(
            f"{count(len(alone), 'error')} have none of eager beside them (it ran out of memory or has no such "
            f"precision); the largest is {scientific(worst['error'])} ({worst['quantity']} of "
            f"{_case(*(worst[column] for column in CASE))})."
        )
    return sentences


# ---- the whole transformer --------------------------------------------------------------------------------------

_MODEL_PHASES = ("forward", "backward", "forward_backward", "train_step")


def table_transformer(models: pd.DataFrame, backward: pd.DataFrame, precision: str) -> pd.DataFrame:
    """Returns eager → compiled times (ms) of the model's phases by size and context, blocks compiled one by one.

    Args:
        models: sections "steps" and "compile" of notebook 01.
        backward: section "transformer" of this notebook, the compiled backward pass timed alone.
    """
    pairs = transformer_pairs(models, backward)
    pairs = pairs[pairs["precision"] == precision] if len(pairs) else pairs
    result = []
    for (size, context), group in pairs.groupby(["size", "context"], sort=False) if len(pairs) else []:
        by_phase = group.set_index("phase")
        line = {"size": size, "context": context}
        for phase in _MODEL_PHASES:
            if phase in by_phase.index:
                row = by_phase.loc[phase]
                line[PHASE_NAMES[phase]] = (
                    f"{number(row['eager_ms'])} → {number(row['compiled_ms'])} ({times(row['speedup'])})"
                )
            else:
                line[PHASE_NAMES[phase]] = "–"
        step = ok_rows(models, section="steps", phase="optimizer_step", size=size, context=context, precision=precision)
        line["optimizer step, not compiled"] = number(step["median_ms"].iloc[-1]) if len(step) else "–"
        result.append(line)
    return pd.DataFrame(result)


def transformer_pairs(models: pd.DataFrame, backward: pd.DataFrame) -> pd.DataFrame:
    """Returns eager_ms, compiled_ms and speedup by size, context, precision and phase, where both were measured."""
    keys = ["size", "context", "precision", "phase"]
    if ok_rows(models).empty:
        return pd.DataFrame()
    eager = ok_rows(models, section="steps")[[*keys, "median_ms"]].rename(columns={"median_ms": "eager_ms"})
    compiled = [ok_rows(models, section="compile", compile="regional")]
    if not ok_rows(backward).empty:
        compiled.append(ok_rows(backward, compile="regional"))
    compiled = pd.concat(compiled)
    if compiled.empty or eager.empty:
        return pd.DataFrame()
    compiled = compiled[compiled["phase"] != "compile"]
    compiled = compiled[[*keys, "median_ms"]].rename(columns={"median_ms": "compiled_ms"})
    merged = eager.merge(compiled, on=keys)
    return in_order(merged.assign(speedup=merged["eager_ms"] / merged["compiled_ms"]), keys)


def findings_transformer(models: pd.DataFrame, backward: pd.DataFrame) -> list[str]:
    """Says what compiling gains for each phase of the whole model, and for which cases it does not."""
    pairs = transformer_pairs(models, backward)
    sentences = []
    for (precision, phase), rows in pairs.groupby(["precision", "phase"], sort=False) if len(pairs) else []:
        text = (
            f"A compiled {PHASE_NAMES[phase]} in {precision} runs {span(rows['speedup'])} as fast as eager "
            f"(geometric mean {times(geometric_mean(rows['speedup']))}, {count(len(rows), 'case')})"
        )
        losing = rows[rows["speedup"].map(speed_word) == "slower"]
        if len(losing):
            text += "; it is slower for " + listing(
                f"{row['size']} at context {row['context']}" for row in losing.to_dict("records")
            )
        sentences.append(text + ".")
    return sentences


# ---- what others published -------------------------------------------------------------------------------------

_PUBLISHED_VARIANTS = {"none": ("eager", "fp32"), "compile": ("compiled", "fp32"), "compile_tf32": ("compiled", "tf32")}


def published_matches(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns published times with ours of the same implementation, precision, d, length, batch and pass."""
    if ok_rows(frame).empty:
        return pd.DataFrame()
    others = published.load("attention_pytorch")
    others = others[others["status"] == "ok"]
    # The baseline is printed in two tables of the same source.
    others = others.drop_duplicates(["source", "gpu", "variant", "batch_size", "d_model", "seq_len", "pass"])
    others = others.rename(
        columns={
            "batch_size": "batch",
            "d_model": "d_head",
            "seq_len": "length",
            "pass": "phase",
            "ms_per_pass": "published_ms",
        }
    )
    others["impl"], others["precision"] = zip(*others["variant"].map(_PUBLISHED_VARIANTS), strict=True)
    keys = [*CASE, "batch", "phase"]
    columns = [*keys, "median_ms", *(["in_use_bytes"] if "in_use_bytes" in frame else [])]
    matched = others.merge(ok_rows(frame)[columns], on=keys)
    return _sorted(matched.assign(ratio=matched["published_ms"] / matched["median_ms"]))


def table_published(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns every published figure beside ours, one row per case: theirs → ours (their time over ours)."""
    matched = published_matches(frame)
    if matched.empty:
        return matched
    lines: dict[tuple, dict[str, str]] = {}
    for row in matched.to_dict("records"):
        line = lines.setdefault((row["gpu"], NAMES[row["impl"]], *(row[name] for name in CASE[1:])), {})
        line[row["phase"]] = theirs_and_ours(row)
        if pd.notna(row["memory_mib"]):
            line["memory"] = f"{number(row['memory_mib'], 4)} → {_mebibytes(row['in_use_bytes'])}"
    return pd.DataFrame(
        {
            **dict(zip(("GPU", "implementation", "precision", "d", "length"), key, strict=True)),
            **{f"{PHASE_NAMES[phase]} (ms)": line.get(phase, "–") for phase in PHASES},
            "memory (MiB)": line.get("memory", "–"),
        }
        for key, line in lines.items()
    )


def table_published_summary(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns the ratio published / ours by GPU, implementation, precision and pass."""
    matched = published_matches(frame)
    if matched.empty:
        return matched
    return pd.DataFrame(
        {
            "GPU": gpu,
            "implementation": NAMES[impl],
            "precision": precision,
            "phase": PHASE_NAMES[phase],
            "rows": len(group),
            "published / ours, geometric mean": times(geometric_mean(group["ratio"])),
            "range": span(group["ratio"]),
        }
        for (gpu, impl, precision, phase), group in matched.groupby(["gpu", "impl", "precision", "phase"], sort=False)
    )


def findings_published(frame: pd.DataFrame) -> list[str]:
    """Says how this device compares with the published one, and what each holds per score before the backward pass."""
    matched = published_matches(frame)
    if matched.empty:
        return []
    sentences = []
    device = frame.attrs["device"]
    for (gpu, impl, precision), group in matched.groupby(["gpu", "impl", "precision"], sort=False):
        mean = geometric_mean(group["ratio"])
        word = speed_word(mean)
        comparison = "takes about the same time as" if word == "about the same" else f"is {word} than"
        factor = "" if word == "about the same" else f", {times(max(mean, 1 / mean))} in the geometric mean"
        sentences.append(
            f"{NAMES[impl].capitalize()} attention in {precision}: over {count(len(group), 'timing')} in common, this "
            f"{device} {comparison} the published {gpu}{factor} ({span(group['ratio'])})."
        )
    return [*sentences, *_bytes_per_score(matched)]


def _bytes_per_score(matched: pd.DataFrame) -> list[str]:
    """Compares the growth of memory per score between the two longest lengths, where a constant offset drops out."""
    rows = matched.dropna(subset=["memory_mib"]) if "in_use_bytes" in matched else matched.iloc[:0]
    slopes = []
    for _, line in rows.groupby(["gpu", "d_head"]):
        if len(line) < 2:
            continue
        (_, low), (_, high) = line.sort_values("length").iloc[-2:].iterrows()
        num_scores = high["batch"] * (high["length"] ** 2 - low["length"] ** 2)
        slopes.append(
            (
                (high["memory_mib"] - low["memory_mib"]) * 2**20 / num_scores,
                (high["in_use_bytes"] - low["in_use_bytes"]) / num_scores,
            )
        )
    if not slopes:
        return []
    theirs, ours = zip(*slopes, strict=True)
    ratio = geometric_mean(theirs) / geometric_mean(ours)
    verdict = {"faster": "more", "slower": "less", "about the same": "as much"}[speed_word(ratio)]
    return [
        f"Between its two longest lengths the memory of the published eager attention grows by {span(theirs, number)} "
        f"bytes per score, ours by {span(ours, number)}: theirs keeps {verdict} per score."
    ]
