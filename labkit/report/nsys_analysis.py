"""Notebook 02 from its records: which kernels a step's time goes to, how far the GPU is kept busy, softmax's part.

Every function takes data frames that `Chapter.records` returns. A frame without the needed rows gives an empty table,
no figure (None) or no sentence.
"""

import re
from collections import Counter
from collections.abc import Iterable

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.textpath import TextPath

from labkit import published
from labkit.configs import SIZES
from labkit.report import figures
from labkit.report.findings import (
    count,
    listing,
    number,
    percent,
    power_law_exponent,
    span,
    times,
)
from labkit.report.tables import PHASE_NAMES, in_order, ok_rows, once_per_frame

ATTENTION_NAMES = {"eager": "eager", "auto": "FlashAttention"}
"""Implementations of attention in the order and under the names in which this chapter shows them."""

VIEWS = {
    "inference": ("inference",),
    "forward": ("forward",),
    "backward": ("backward",),
    "forward_backward": ("forward", "backward"),
    "train_step": ("forward", "backward", "optimizer", "outside"),
}
"""What is looked at, and the phases of a captured step that make it up."""

CLASS_COLOURS = dict(
    zip(
        ("matmul", "attention", "softmax", "normalisation", "elementwise", "reduction", "copy", "optimizer",
         "communication", "other"),
        (figures.SERIES[number] for number in (0, 3, 1, 8, 2, 4, 9, 5, 6, 7)),
        strict=True,
    )
)  # fmt: skip
"""One colour per class of kernels, in the order in which classes are stacked."""

CASE = ["size", "context", "precision", "attention"]

AGREEMENT = 0.05
"""Profiler and timer agree on a time when they differ by at most 5 %."""

ADDS_UP = 0.001
"""Ranges and what is outside of them add up to the captured kernel time when they differ from it by at most 0.1 %."""

IDLE = 0.1
"""A step is called launch-bound when the GPU waits for the host for at least a tenth of it."""

CHANGED = 0.02
"""A share of time that moves by at most two percentage points is called about the same."""

SOFTMAX_FLOPS = 5
"""Operations per score that are counted for softmax: compare, subtract, exponentiate, add, divide."""

SOURCES = {
    "nsys": "Nsight Systems",
    "kineto": "torch.profiler, CUDA kernels",
    "kineto cpu": "torch.profiler, CPU operators",
}
"""What captured, under the name that the report gives it."""


# ---- rows --------------------------------------------------------------------------------------------------------


def _sorted(rows: pd.DataFrame, *more: str) -> pd.DataFrame:
    """Returns the rows by size, context, precision and attention, in the order of this project."""
    ranked = rows.assign(attention_rank=rows["attention"].map(list(ATTENTION_NAMES).index))
    ordered = in_order(ranked, ["size", "context", "precision", "attention_rank", *more])
    return ordered.drop(columns="attention_rank")


@once_per_frame
def _table_rows(frame: pd.DataFrame, name: str) -> pd.DataFrame:
    """Returns one of the tables that the records hold ("kernels", "classes", "ranges"), all cases in one frame.

    `record` is the phase of the record that a row is from, since the table has phases of its own.
    """
    columns: dict[str, list] = {}
    for row in ok_rows(frame).to_dict("records"):
        table = row["observed"]["tables"][name]
        num_rows = len(next(iter(table.values()))) if table else 0
        case = {**{column: row[column] for column in CASE}, "record": row["phase"]}
        for column, values in [*table.items(), *((key, [value] * num_rows) for key, value in case.items())]:
            columns.setdefault(column, []).extend(values)
    return pd.DataFrame(columns)


@once_per_frame
def class_times(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns time (µs) and launches of each class of kernels: columns of CASE, view (of VIEWS), kernel_class."""
    rows = _table_rows(frame, "classes")
    if rows.empty:
        return rows
    parts = []
    for view, phases in VIEWS.items():
        is_inference = view == "inference"
        records = ["inference"] if is_inference else ["train_step"]
        if view in ("forward", "backward", "forward_backward"):
            records.append("forward_backward")
        parts.append(rows[rows["record"].isin(records) & rows["phase"].isin(phases)].assign(view=view))
    found = pd.concat(parts).groupby([*CASE, "view", "kernel_class"], as_index=False)[["total_us", "launches"]].sum()
    return found.assign(share=found["total_us"] / found.groupby([*CASE, "view"])["total_us"].transform("sum"))


@once_per_frame
def kernel_times(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns the kernels that the records keep, with view (of VIEWS) and the share of that view's kernel time."""
    rows, totals = _table_rows(frame, "kernels"), class_times(frame)
    if rows.empty:
        return rows
    view = rows["phase"].where(rows["phase"] != "step", rows["record"])
    rows = rows.assign(view=view)[view.isin(VIEWS)]
    totals = totals.groupby([*CASE, "view"], as_index=False)["total_us"].sum().rename(columns={"total_us": "view_us"})
    rows = rows.merge(totals, on=[*CASE, "view"])
    return rows.assign(
        share=rows["total_us"] / rows["view_us"], short_name=rows["short_name"].map(brief_names(rows["short_name"]))
    )


def brief_names(names: Iterable[str]) -> dict[str, str]:
    """Returns each kernel's name without what it shares with its like; as it is where two would come out alike."""
    briefs = {}
    for name in dict.fromkeys(names):
        brief = re.sub(r"_kernel\b|_(?:kernel_)?(?:cuda|impl)\b", "", name) if "[" in name else name
        brief = re.sub(r"_gemm_(\w)(\d+)\1\2_\1\2\1\2_\1\2_", r"_\1\2_", brief)  # every operand of one type
        brief = re.sub(r"^nvjet_sm\d+_", "nvjet_", brief)
        brief = re.sub(r"_(?:tilesize|stage|warpsize)(?=\d)", "_", brief)
        briefs[name] = re.sub(r"_(?:ffma_|hmma_|tensor\d+x\d+x\d+_)?align\w*$", "", brief)
    alike = Counter(briefs.values())
    return {name: brief if alike[brief] == 1 else name for name, brief in briefs.items()}


@once_per_frame
def _shares(frame: pd.DataFrame, kernel_class: str) -> pd.DataFrame:
    """Returns the share of a class in every captured view, 0 where it has none; columns of CASE, then views."""
    found = class_times(frame)
    if found.empty:
        return found
    wide = found.assign(mine=found["share"].where(found["kernel_class"] == kernel_class, 0.0))
    return wide.pivot_table(index=CASE, columns="view", values="mine", aggfunc="sum").reset_index()


def _name(row: dict | pd.Series) -> str:
    flash = "" if row["attention"] == "eager" else f" with {ATTENTION_NAMES[row['attention']]}"
    return f"{row['size']} at {row['context']} in {row['precision']}{flash}"


def _steps(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns the measured rows that hold a forward and a backward pass."""
    rows = ok_rows(frame)
    return rows[rows["phase"] != "inference"] if len(rows) else rows


def _microseconds(value: float | None) -> str:
    return number(value) if value is not None else "–"


def _points(fraction: float) -> str:
    """Returns a difference of two shares in percentage points."""
    return f"{100 * fraction:+.1f}".replace("-", "−")


# ---- what was captured -------------------------------------------------------------------------------------------


def table_captures(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns how many steps each profiler captured, and how many are missing, with the reasons."""
    if frame.empty:
        return pd.DataFrame()
    rows = []
    measured = ok_rows(frame)
    if len(measured):
        told = [(seen["profiler"], seen["profiler_version"]) for seen in measured["observed"]]
        for (source, version), found in measured.groupby(pd.MultiIndex.from_tuples(told), sort=False):
            rows.append({"captured by": f"{SOURCES[source]} {version}".strip(), "steps": len(found), "reason": ""})
    failed = frame[frame["status"] != "ok"]
    for (status, reason), found in failed.groupby(["status", "reason"], sort=False):
        rows.append({"captured by": f"none ({status})", "steps": len(found), "reason": reason[:120]})
    return pd.DataFrame(rows)


def findings_captures(frame: pd.DataFrame) -> list[str]:
    """Says what captured, whether its times add up, what marking ranges changes and what has no class."""
    measured = ok_rows(frame)
    if measured.empty:
        return []
    sources = dict.fromkeys(SOURCES[seen["profiler"]] for seen in measured["observed"])
    sentences = [f"{count(len(measured), 'step')} of a model were captured by {listing(sources)}."]
    summed = measured["capture_in_ranges_ms"] + measured["capture_outside_us"] / 1e3
    worst = (summed / measured["capture_kernel_ms"] - 1).abs().max()
    verdict = "add up to" if worst <= ADDS_UP else "do **not** add up to"
    sentences.append(
        f"Kernel time in ranges and outside of them {verdict} the captures' own total: they differ by at most "
        f"{percent(worst)}."
    )
    sentences += _unclassed(frame)
    lost = frame[frame["status"].isin(["error", "timeout"])]
    if len(lost):
        reasons = lost["reason"].value_counts()
        sentences.append(
            f"{count(len(lost), 'step')} could not be captured: "
            f"{listing(f'{text} ({n})' for text, n in reasons.items())}."
        )
    return sentences


def _unclassed(frame: pd.DataFrame) -> list[str]:
    shares = _shares(frame, "other")
    view = next((view for view in ("train_step", "forward_backward", "inference") if view in shares), None)
    if view is None:
        return []
    known = shares.dropna(subset=[view])
    worst = known.loc[known[view].idxmax()]
    text = (
        f"The classifier has no class for {span(known[view], percent)} of the kernel time of a {PHASE_NAMES[view]} "
        f"(most for {_name(worst)})"
    )
    kernels = kernel_times(frame)
    others = kernels[(kernels["kernel_class"] == "other") & (kernels["view"] == view)]
    if len(others):
        names = others.groupby("short_name")["total_us"].sum().sort_values(ascending=False).index
        text += ": " + listing((f"`{name}`" for name in names), 4)
    return [text + "."]


# ---- (a) the profiler against the timer ---------------------------------------------------------------------------


def timer_pairs(frame: pd.DataFrame, steps: pd.DataFrame) -> pd.DataFrame:
    """Returns times of the profiler beside notebook 01's of the same case.

    Args:
        frame: this notebook's records.
        steps: those of notebook 01's section "steps".

    Returns:
        Columns size, context, precision; phase ("inference", "forward" or "train_step"); timer_ms, projected_ms
        (first start to last end on the device), kernel_ms (sum), idle (fraction of projected), done_ms (host, with the
        profiler; NaN for forward, which is no step of its own), host_ms (host, without it).
    """
    timed = ok_rows(steps)
    rows = []
    for row in ok_rows(frame, attention="eager").to_dict("records"):
        views = ("inference",) if row["phase"] == "inference" else ("forward", "train_step")
        for view in views:
            prefix = "step" if view == "train_step" else view
            if view == "train_step" != row["phase"]:
                continue
            rows.append(
                {
                    **{name: row[name] for name in ("size", "context", "precision")},
                    "phase": view,
                    "projected_ms": row[f"{prefix}_projected_ms"],
                    "kernel_ms": row[f"{prefix}_kernel_ms"],
                    "idle": row[f"{prefix}_idle_fraction"],
                    "done_ms": float("nan") if view == "forward" else row["done_ms"],
                }
            )
    if not rows or timed.empty:
        return pd.DataFrame()
    host = timed["host_median_ms"] if "host_median_ms" in timed else pd.Series(index=timed.index, dtype=float)
    timed = timed[timed["compile"] == "none"].assign(
        timer_ms=timed["median_ms"], host_ms=host.fillna(timed["median_ms"])
    )
    keys = ["size", "context", "precision", "phase"]
    pairs = pd.DataFrame(rows).merge(timed[[*keys, "timer_ms", "host_ms"]], on=keys)
    return in_order(pairs, keys) if len(pairs) else pairs


def table_timer(frame: pd.DataFrame, steps: pd.DataFrame, precision: str) -> pd.DataFrame:
    """Returns a pass by the timer, by the profiler on the device, and what the profiler costs the host."""
    pairs = timer_pairs(frame, steps)
    if pairs.empty or pairs[pairs["precision"] == precision].empty:
        return pd.DataFrame()
    result = []
    for row in pairs[pairs["precision"] == precision].to_dict("records"):
        result.append(
            {
                "size": row["size"],
                "context": row["context"],
                "phase": PHASE_NAMES[row["phase"]],
                "timer (ms)": number(row["timer_ms"]),
                "projected (ms)": number(row["projected_ms"]),
                "projected / timer": times(row["projected_ms"] / row["timer_ms"]),
                "kernels (ms)": number(row["kernel_ms"]),
                "idle": percent(row["idle"]),
                "host, profiled / not": times(row["done_ms"] / row["host_ms"]),
            }
        )
    return pd.DataFrame(result)


def findings_timer(frame: pd.DataFrame, steps: pd.DataFrame) -> list[str]:
    """Says whether profiler and timer agree on a forward pass, where they do not and why, and the profiler's cost."""
    pairs = timer_pairs(frame, steps)
    if pairs.empty:
        return []
    sentences = []
    forward = pairs[pairs["phase"] == "forward"]
    if len(forward):
        off = (forward["projected_ms"] / forward["timer_ms"] - 1).abs()
        waits = forward["idle"] >= IDLE
        sentences.append(
            f"A training forward pass projected on the device agrees with notebook 01's timer within "
            f"{percent(AGREEMENT)} in {(off <= AGREEMENT).sum()} of {count(len(forward), 'case')}."
        )
        if len(busy := off[~waits]):
            sentences.append(
                f"Where the device is kept busy (idle for less than {percent(IDLE)}; {count(len(busy), 'case')}) the "
                f"two "
                f"differ by {span(busy, percent)}, most for {_case_of(forward.loc[busy.idxmax()])}."
            )
        if waits.any():
            slower = (forward["projected_ms"] / forward["timer_ms"])[waits]
            sentences.append(
                f"In the other {count(int(waits.sum()), 'case')} the host sets the pace, and the profiler's work on "
                f"the "
                f"host shows: the projected time is {span(slower)} the timer's."
            )
        for size in ("xl-2025", "2.7b"):
            mine = off[forward["size"] == size]
            if len(mine):
                sentences.append(
                    f"At {size} the difference is {span(mine, percent)} over {count(len(mine), 'case')}, "
                    f"{(mine <= AGREEMENT).sum()} of them within {percent(AGREEMENT)}."
                )
    whole = pairs.dropna(subset=["done_ms"])
    if len(whole):
        cost = whole["done_ms"] / whole["host_ms"]
        worst = whole.loc[cost.idxmax()]
        sentences.append(
            f"Under the profiler the host sees a step take {span(cost)} the time without (median "
            f"{times(cost.median())}), most for {PHASE_NAMES[worst['phase']]} of {_case_of(worst)}."
        )
    return sentences


def _case_of(row: pd.Series) -> str:
    return f"{row['size']} at {row['context']} in {row['precision']}"


# ---- (b) the kernel with most time ---------------------------------------------------------------------------------


@once_per_frame
def top_kernels(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns, of each case and view, the kernel with the most cumulative time."""
    rows = kernel_times(frame)
    if rows.empty:
        return rows
    best = rows.loc[rows.groupby([*CASE, "view"])["total_us"].idxmax()]
    ranked = best.assign(view_rank=best["view"].map(list(VIEWS).index))
    return _sorted(ranked, "view_rank").drop(columns="view_rank")


def table_top_kernels(frame: pd.DataFrame, precision: str | None = None) -> pd.DataFrame:
    """Returns the kernel with the most time in forward, backward and the whole step of every case (or one precision's).

    Inference stands in for a forward pass where no training step fits, and is left out where one does: what leads in
    the two is nearly always the same.
    """
    best = top_kernels(frame)
    if best.empty:
        return best
    has_forward = best["view"].eq("forward").groupby([best[name] for name in CASE]).transform("any")
    best = best[(best["view"] != "inference") | ~has_forward]
    if precision is None:
        return _kernel_table(best)
    return _kernel_table(best[best["precision"] == precision]).drop(columns="precision", errors="ignore")


def _kernel_table(rows: pd.DataFrame) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "size": row["size"],
            "context": row["context"],
            "precision": row["precision"],
            "attention": ATTENTION_NAMES[row["attention"]],
            "phase": PHASE_NAMES[row["view"]],
            "kernel": f"`{row['short_name']}`",
            "class": row["kernel_class"],
            "share": percent(row["share"]),
            "launches": f"{row['launches']:,}",
            "mean (µs)": _microseconds(row["mean_us"]),
            "median": _microseconds(row["median_us"]),
            "min": _microseconds(row["min_us"]),
            "max": _microseconds(row["max_us"]),
            "std": _microseconds(row["std_us"]),
        }
        for row in rows.to_dict("records")
    )


def findings_top_kernels(frame: pd.DataFrame) -> list[str]:
    """Says which kernel leads in forward, backward and the whole step, and whether it is the same one."""
    best = top_kernels(frame)
    if best.empty:
        return []
    sentences = []
    eager = best[best["attention"] == "eager"]
    for (precision, view), rows in in_order(eager, ["precision"]).groupby(["precision", "view"], sort=False):
        if view in ("inference", "forward_backward"):
            continue
        kernels, classes = rows["short_name"].value_counts(), rows["kernel_class"].value_counts()
        sentences.append(
            f"In {precision} the kernel with most time in {_article(view)} is of class {_counted(classes)}; it holds "
            f"{span(rows['share'], percent)} of the time and is most often `{kernels.index[0]}` "
            f"({kernels.iloc[0]} of {count(len(rows), 'case')})."
        )
    names = best.pivot_table(index=CASE, columns="view", values="short_name", aggfunc="first")
    for left, right in (("forward", "backward"), ("forward", "train_step"), ("backward", "train_step")):
        if left in names and right in names and len(both := names[[left, right]].dropna()):
            same = int((both[left] == both[right]).sum())
            sentences.append(
                f"It is the same kernel in {_article(left)} and {_article(right)} in {same} of "
                f"{count(len(both), 'case')}."
            )
    return sentences


def _article(view: str) -> str:
    return {"forward": "the forward pass", "backward": "the backward pass", "train_step": "the whole step"}[view]


def _counted(counts: pd.Series) -> str:
    if len(counts) == 1:
        return str(counts.index[0])
    return listing(f"{name} ({n})" for name, n in counts.items())


def shown_case(frame: pd.DataFrame) -> tuple[str, int] | None:
    """Returns size and context for the figure of top kernels: of the largest model with a whole step, in the middle."""
    rows = ok_rows(frame, attention="eager", phase="train_step")
    if rows.empty:
        return None
    size = max(rows["size"].unique(), key=list(SIZES).index)
    contexts = sorted(rows[rows["size"] == size]["context"].unique())
    return size, int(contexts[len(contexts) // 2])


def figure_top_kernels(frame: pd.DataFrame, num_kernels: int = 8) -> Figure | None:
    """One panel per precision and view: the kernels with most time in one model, coloured by class."""
    chosen = shown_case(frame)
    if chosen is None:
        return None
    rows = kernel_times(frame)
    rows = rows[(rows["size"] == chosen[0]) & (rows["context"] == chosen[1]) & (rows["attention"] == "eager")]
    views = [view for view in ("forward", "backward", "train_step") if view in set(rows["view"])]
    precisions = list(in_order(rows, ["precision"])["precision"].unique())
    figure, axes = figures.panels(len(precisions) * len(views), num_columns=len(views), width=4.6, height=2.6)
    panels = [(precision, view) for precision in precisions for view in views]
    for axis, (precision, view) in zip(axes, panels, strict=True):
        mine = rows[(rows["precision"] == precision) & (rows["view"] == view)]
        mine = mine.sort_values("total_us", ascending=False).head(num_kernels).iloc[::-1]
        labels = [name if len(name) <= 48 else f"{name[:47]}…" for name in mine["short_name"]]
        colours = [CLASS_COLOURS[name] for name in mine["kernel_class"]]
        axis.barh(range(len(mine)), 100 * mine["share"], color=colours)
        axis.set_yticks(range(len(mine)), labels, fontsize=6)
        axis.set_xlabel("share of kernel time (%)")
        axis.set_title(f"{PHASE_NAMES[view]}, {precision}")
        axis.grid(axis="y", visible=False)
    _class_legend(figure, rows["kernel_class"])
    figure.suptitle(
        f"Kernels with most time, {chosen[0]} at context {chosen[1]}, eager attention, {frame.attrs['device']}",
        fontsize=10,
    )
    return figure


def _class_legend(figure: Figure, classes: Iterable[str]) -> None:
    present = set(classes)
    handles = [Patch(color=colour, label=name) for name, colour in CLASS_COLOURS.items() if name in present]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 5))


# ---- (c) what is no matmul in forward --------------------------------------------------------------------------------


def table_not_matmul(frame: pd.DataFrame, precision: str, num_kernels: int = 3) -> pd.DataFrame:
    """Returns the kernels of the training forward pass that are no matmul and have most time, some of each case."""
    rows = kernel_times(frame)
    if rows.empty:
        return rows
    mine = (rows["view"] == "forward") & (rows["kernel_class"] != "matmul") & (rows["precision"] == precision)
    rows = rows[mine].sort_values("total_us", ascending=False, kind="stable").groupby(CASE).head(num_kernels)
    told = ["size", "context", "attention", "kernel", "class", "share", "launches", "mean (µs)"]
    return _kernel_table(_sorted(rows))[told] if len(rows) else rows


def findings_not_matmul(frame: pd.DataFrame) -> list[str]:
    """Says how much of a forward pass is no matmul, which classes make it up, and which kernels stand out."""
    found = class_times(frame)
    if found.empty:
        return []
    sentences = []
    eager = found[(found["view"] == "forward") & (found["attention"] == "eager")]
    kernels = kernel_times(frame)
    for precision, rows in in_order(eager, ["precision"]).groupby("precision", sort=False):
        others = rows[rows["kernel_class"] != "matmul"]
        sums = others.groupby(["size", "context"])["share"].sum()
        means = others.groupby("kernel_class")["share"].sum() / len(sums)
        largest = means.sort_values(ascending=False).head(3)
        parts = listing(f"{name} {percent(share)}" for name, share in largest.items())
        text = (
            f"In {precision}, kernels that are no matmul take {span(sums, percent)} of a forward pass with eager "
            f"attention; on average over {count(len(sums), 'case')} of all kernel time: {parts}"
        )
        is_mine = (kernels["view"] == "forward") & (kernels["attention"] == "eager")
        mine = kernels[is_mine & (kernels["precision"] == precision) & (kernels["kernel_class"] != "matmul")]
        if len(mine):
            best = mine.loc[mine.groupby(["size", "context"])["total_us"].idxmax()]
            name, times_first = best["short_name"].value_counts().index[0], best["short_name"].value_counts().iloc[0]
            leading = best[best["short_name"] == name]["share"]
            text += (
                f". The single kernel with most time among them is most often `{name}` ({times_first} of {len(best)} "
                f"cases, "
                f"{span(leading, percent)} of the pass)"
            )
        sentences.append(text + ".")
    return sentences


# ---- (d) the share of matmuls, launches and idle time ----------------------------------------------------------------


def table_matmul_share(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns the share of kernel time that is matmuls in each view, launches of a step and the GPU's idle time."""
    shares = _shares(frame, "matmul")
    if shares.empty:
        return shares
    steps = _steps(frame).set_index(CASE)
    result = []
    for row in _sorted(shares).to_dict("records"):
        key = tuple(row[name] for name in CASE)
        step = steps.loc[key] if key in steps.index else None
        result.append(
            {
                "size": row["size"],
                "context": row["context"],
                "precision": row["precision"],
                "attention": ATTENTION_NAMES[row["attention"]],
                **{PHASE_NAMES[view]: percent(row.get(view)) for view in VIEWS if view != "backward"},
                "launches": f"{int(step['num_launches']):,}" if step is not None else "–",
                "casts": f"{int(step['num_casts']):,}" if step is not None else "–",
                "idle": percent(step["step_idle_fraction"]) if step is not None else "–",
            }
        )
    return pd.DataFrame(result)


def findings_matmul_share(frame: pd.DataFrame) -> list[str]:
    """Says how the matmul share differs between phases and moves with size and context, and what is launch-bound."""
    shares = _shares(frame, "matmul")
    if shares.empty:
        return []
    sentences = []
    eager = shares[shares["attention"] == "eager"]
    for precision, rows in in_order(eager, ["precision"]).groupby("precision", sort=False):
        parts = [
            f"{PHASE_NAMES[view]} {span(rows[view].dropna(), percent)}"
            for view in VIEWS
            if view in rows and view != "backward" and rows[view].notna().any()
        ]
        if parts:
            sentences.append(
                f"With eager attention in {precision}, matmuls take of the kernel time: {', '.join(parts)}."
            )
        sentences += _between_views(rows, precision) + _moves(rows, precision)
    return [*sentences, *_flash_share(shares), *_idle(frame), *_casts(frame)]


def _between_views(rows: pd.DataFrame, precision: str) -> list[str]:
    """Compares inference and the whole step, case by case."""
    if "train_step" not in rows or "inference" not in rows or (both := rows.dropna(subset=["train_step"])).empty:
        return []
    change = both["train_step"] - both["inference"]
    word = (
        "lower than" if (change < -CHANGED).all() else "higher than" if (change > CHANGED).all()
        else "about the same as" if (change.abs() <= CHANGED).all() else "not always lower than"
    )  # fmt: skip
    return [
        f"In {precision} the whole step's share is {word} inference's: it differs by {span(change, _points)} "
        f"percentage points ({count(len(both), 'case')})."
    ]


def _moves(rows: pd.DataFrame, precision: str) -> list[str]:
    """Says how inference's share moves from the shortest to the longest context, and from the smallest to the largest
    model."""
    sentences = []
    for across, along, noun in (("size", "context", "context"), ("context", "size", "model")):
        changes = {}
        for key, group in in_order(rows, ["size", "context"]).groupby(across, sort=False):
            if len(group) > 1:
                changes[key] = group["inference"].iloc[-1] - group["inference"].iloc[0]
        if not changes:
            continue
        values = list(changes.values())
        word = (
            "rises" if min(values) > CHANGED else "falls" if max(values) < -CHANGED
            else "stays about the same" if max(map(abs, values)) <= CHANGED else "moves either way"
        )  # fmt: skip
        ends = in_order(rows, [along])[along]
        sentences.append(
            f"In {precision} inference's share {word} with the {noun}: from {ends.iloc[0]} to {ends.iloc[-1]} it "
            f"changes "
            f"by {span(values, _points)} percentage points, over {count(len(changes), across)}."
        )
    return sentences


def _flash_share(shares: pd.DataFrame) -> list[str]:
    flash = shares[shares["attention"] != "eager"]
    if flash.empty:
        return []
    both = flash.merge(shares[shares["attention"] == "eager"], on=CASE[:3], suffixes=("", "_eager"))
    if both.empty:
        return []
    change = both["inference"] - both["inference_eager"]
    return [
        f"With FlashAttention, whose products are inside its own kernels, the matmul share of inference changes by "
        f"{span(change, _points)} percentage points ({count(len(both), 'case')})."
    ]


def _idle(frame: pd.DataFrame) -> list[str]:
    """Says which steps are launch-bound, and how many launches a step makes."""
    steps = _steps(frame)
    if steps.empty:
        return []
    bound = _sorted(steps[steps["step_idle_fraction"] >= IDLE])
    launches = span(steps["num_launches"], lambda value: f"{int(value):,}")
    text = f"A step makes {launches} launches"
    if bound.empty:
        text += f"; the device is never idle for {percent(IDLE)} of it"
    else:
        text += (
            f"; {len(bound)} of {len(steps)} steps are launch-bound (the device is idle for at least {percent(IDLE)} "
            f"of "
            f"them, up to {percent(bound['step_idle_fraction'].max())}): "
            f"{listing(_name(row) for _, row in bound.iterrows())}"
        )
    return [text + "."]


def _casts(frame: pd.DataFrame) -> list[str]:
    """Says how many of a step's launches only change a dtype."""
    sentences = []
    rows = _steps(frame)
    for precision, group in in_order(rows, ["precision"]).groupby("precision", sort=False) if len(rows) else []:
        share = group["num_casts"] / group["num_launches"]
        if group["num_casts"].sum():
            sentences.append(
                f"In {precision}, {span(group['num_casts'], lambda value: f'{int(value):,}')} launches of a step copy "
                f"a "
                f"tensor to another dtype, {span(share, percent)} of all."
            )
    return sentences


def figure_classes(frame: pd.DataFrame, precision: str) -> Figure | None:
    """One panel per size: kernel time of a training step by class, stacked, a bar per context and attention.

    Bars are shares; above each stands the step's kernel time in ms. Where no step was captured with the optimizer,
    forward and backward stand in; where neither was, inference.
    """
    found = class_times(frame)
    if found.empty or found[found["precision"] == precision].empty:
        return None
    found = found[(found["precision"] == precision)]
    rank = {"train_step": 0, "forward_backward": 1, "inference": 2}
    found = found[found["view"].isin(rank)]
    best = found.assign(rank=found["view"].map(rank)).groupby(CASE)["rank"].transform("min")
    found = found[found["view"].map(rank) == best]
    sizes = [size for size in SIZES if size in set(found["size"])]
    figure, axes = figures.panels(len(sizes), width=3.9, height=3.0)
    for axis, size in zip(axes, sizes, strict=True):
        _stack(axis, found[found["size"] == size])
        axis.set_title(size)
    _class_legend(figure, found["kernel_class"])
    figure.suptitle(
        f"Kernel time by class, {precision}, {frame.attrs['device']} (above: ms of a step; F FlashAttention, "
        "* without optimizer, i inference)",
        fontsize=10,
    )
    return figure


def _stack(axis: Axes, rows: pd.DataFrame) -> None:
    ordered = _sorted(rows)
    bars = list(dict.fromkeys(zip(ordered["context"], ordered["attention"], strict=True)))
    labels, parts = [], []
    for position, (context, attention) in enumerate(bars):
        mine = ordered[(ordered["context"] == context) & (ordered["attention"] == attention)]
        by_class, bottom = mine.set_index("kernel_class")["share"], 0.0
        for name, colour in CLASS_COLOURS.items():
            if name in by_class:
                parts.append((position, 100 * by_class[name], bottom, colour))
                bottom += 100 * by_class[name]
        axis.text(position, 101, number(mine["total_us"].sum() / 1e3), ha="center", fontsize=5.5, rotation=45)
        mark = {"train_step": "", "forward_backward": "*", "inference": "i"}[mine["view"].iloc[0]]
        labels.append(f"{context}{mark}" + ("\nF" if attention != "eager" else ""))
    positions, shares, bottoms, colours = zip(*parts, strict=True)
    axis.bar(positions, shares, 0.85, bottom=bottoms, color=colours)
    axis.set_xticks(range(len(bars)), labels, fontsize=6)
    axis.set_ylim(0, 112)
    axis.set_xlabel("context (tokens)")
    axis.set_ylabel("share of kernel time (%)")
    axis.grid(axis="x", visible=False)


# ---- one step, launch by launch ------------------------------------------------------------------------------------


def figure_timeline(frame: pd.DataFrame, precision: str, attention: str = "eager") -> Figure | None:
    """A training step from its first launch to its last: rows of the streams, phases and blocks, then one block closer.

    The closer view is the middle block of the forward pass.
    """
    kept = [
        row
        for row in ok_rows(frame, precision=precision, attention=attention).to_dict("records")
        if "timeline" in row["observed"]["tables"]
    ]
    if not kept:
        return None
    row = kept[0]
    table = dict(row["observed"]["tables"]["timeline"])
    classes, phases = table.pop("class_names"), table.pop("phase_names")
    launches = pd.DataFrame(table).assign(
        end_us=lambda t: t["start_us"] + t["duration_us"],
        kernel_class=lambda t: [classes[n] for n in t["kernel_class"]],
        phase=lambda t: [phases[n] if n >= 0 else "outside" for n in t["phase"]],
    )
    figure, (whole, closer) = figures.panels(2, num_columns=1, width=11, height=2.6)
    _draw_launches(whole, launches)
    middle = launches[launches["phase"] == "forward"]["block"].max() // 2
    block = launches[(launches["phase"] == "forward") & (launches["block"] == middle)]
    _draw_launches(
        closer,
        launches[(launches["end_us"] >= block["start_us"].min()) & (launches["start_us"] <= block["end_us"].max())],
    )
    closer.set_xlim(block["start_us"].min() / 1e3, block["end_us"].max() / 1e3)
    whole.set_title(f"{len(launches):,} launches of a training step, with every range marked")
    closer.set_title(f"block {middle} of the forward pass")
    _class_legend(figure, launches["kernel_class"])
    figure.suptitle(
        f"{row['size']} at context {row['context']}, {precision}, {ATTENTION_NAMES[attention]} attention, "
        f"{frame.attrs['device']}",
        fontsize=10,
    )
    return figure


def _draw_launches(axis: Axes, launches: pd.DataFrame) -> None:
    """Draws streams from the top, then the phases, then the blocks; a range lasts from its first launch to its last."""
    axis.set_xlim(launches["start_us"].min() / 1e3, launches["end_us"].max() / 1e3)  # what the labels must fit in
    streams = sorted(launches["stream"].unique())
    names = [*(f"stream {stream}" if len(streams) > 1 else "kernels" for stream in streams), "phase", "block"]
    heights = {name: len(names) - 1 - position for position, name in enumerate(names)}
    for stream, name in zip(streams, names, strict=False):
        _draw_launch_row(axis, launches[launches["stream"] == stream].sort_values("start_us"), heights[name])
    for phase, rows in launches[launches["phase"] != "outside"].groupby("phase", sort=False):
        colour = figures.COLOURS["optimizer_step" if phase == "optimizer" else phase]
        _draw_range(axis, rows, heights["phase"], phase, colour)
    in_blocks = launches[launches["block"] >= 0]
    for (_, block), rows in in_blocks.groupby(["phase", "block"], sort=False):
        _draw_range(axis, rows, heights["block"], str(block), "0.75" if block % 2 else "0.6")
    axis.set_yticks(list(heights.values()), list(heights))
    axis.set_ylim(-0.6, len(names) - 0.4)
    axis.set_xlabel("time on the device (ms)")
    axis.grid(visible=False)


def _draw_launch_row(axis: Axes, rows: pd.DataFrame, height: float) -> None:
    """Draws many bars as one image: thousands of shapes would make the file unwieldy. What starts later lies on top."""
    low, high = height - 0.4, height + 0.4
    corners = [
        [(start, low), (end, low), (end, high), (start, high)]
        for start, end in rows[["start_us", "end_us"]].to_numpy() / 1e3
    ]
    colours = [CLASS_COLOURS[name] for name in rows["kernel_class"]]
    axis.add_collection(PolyCollection(corners, facecolors=colours, edgecolors="none", rasterized=True))


def _draw_range(axis: Axes, rows: pd.DataFrame, height: float, label: str, colour: str) -> None:
    """Draws a range as a bar, with its label where that fits between its ends."""
    start, end = rows["start_us"].min() / 1e3, rows["end_us"].max() / 1e3
    axis.barh(height, end - start, left=start, height=0.8, color=colour)
    low, high = axis.get_xlim()
    bar_width = (min(end, high) - max(start, low)) / (high - low) * 0.9 * 72 * axis.figure.get_figwidth()  # in points
    if TextPath((0, 0), label, size=6).get_extents().width <= bar_width:
        axis.text((start + end) / 2, height, label, ha="center", va="center", fontsize=6, clip_on=True)


# ---- (e) inside attention ------------------------------------------------------------------------------------------


@once_per_frame
def attention_times(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns times (µs) inside attention in inference, all blocks together.

    Columns of CASE; matmul_us (of the scores' and the values' product), softmax_us, other_us (mask, scaling, casts),
    core_us (all of these, or FlashAttention), block_us (with projections and rotation), forward_us (the whole pass);
    time_ratio, flop_ratio and bytes_ratio of softmax to the two products (NaN for FlashAttention).
    """
    rows = _table_rows(frame, "ranges")
    if rows.empty:
        return rows
    rows = rows[rows["record"] == "inference"]
    path = rows["path"]
    is_core = path.str.startswith("inference/block/attention/core")
    is_product = path.str.endswith(("/scores", "/value product")) & (rows["kernel_class"] == "matmul")
    is_softmax = path.str.endswith("/softmax") & (rows["kernel_class"] == "softmax")
    parts = {
        "matmul_us": is_core & is_product,
        "softmax_us": is_core & is_softmax,
        "core_us": is_core,
        "block_us": path.str.startswith("inference/block/attention"),
        "forward_us": path.str.startswith("inference"),
    }
    sums = {name: rows["total_us"].where(mask, 0.0) for name, mask in parts.items()}
    found = rows.assign(**sums).groupby(CASE, as_index=False)[list(parts)].sum()
    if found.empty:
        return found
    found["other_us"] = found["core_us"] - found["matmul_us"] - found["softmax_us"]
    is_eager = found["attention"] == "eager"
    found["time_ratio"] = (found["softmax_us"] / found["matmul_us"]).where(is_eager)
    for name, ratio in (("flop_ratio", flop_ratio), ("bytes_ratio", bytes_ratio)):
        values = [ratio(row["size"], row["context"], row["precision"]) for row in found.to_dict("records")]
        found[name] = pd.Series(values, index=found.index).where(is_eager)
    return _sorted(found)


def flop_ratio(size: str, context: int, precision: str) -> float:
    """Returns FLOPs of softmax over those of the two products: SOFTMAX_FLOPS to 4·D a score, whatever the context."""
    return SOFTMAX_FLOPS / (4 * SIZES[size].d_head)


def bytes_ratio(size: str, context: int, precision: str) -> float:
    """Returns the fewest bytes of softmax over those of the two products, per head.

    The products read q, k, v, write the output, write the scores and read the probabilities. Softmax reads its scores
    and writes its probabilities; under bf16 autocast it does so in fp32.
    """
    element, softmax_element = (4, 4) if precision == "fp32" else (2, 4)
    products = element * (4 * context * SIZES[size].d_head + 2 * context * context)
    return 2 * softmax_element * context * context / products


def table_attention(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns softmax beside the two products with the ratios of time, FLOPs and bytes, and the block around them."""
    found = attention_times(frame)
    if found.empty:
        return found
    result = []
    for row in found.to_dict("records"):
        eager = row["attention"] == "eager"
        result.append(
            {
                "size": row["size"],
                "context": row["context"],
                "precision": row["precision"],
                "attention": ATTENTION_NAMES[row["attention"]],
                "two products (µs)": number(row["matmul_us"]) if eager else "–",
                "softmax (µs)": number(row["softmax_us"]) if eager else "–",
                "mask, scaling, casts (µs)": number(row["other_us"]) if eager else "–",
                "softmax / products: time": times(row["time_ratio"]),
                "FLOPs": times(row["flop_ratio"]),
                "bytes": times(row["bytes_ratio"]),
                "core (µs)": number(row["core_us"]),
                "attention block (µs)": number(row["block_us"]),
                "block of forward": percent(row["block_us"] / row["forward_us"]),
            }
        )
    return pd.DataFrame(result)


def findings_attention(frame: pd.DataFrame) -> list[str]:
    """Says how softmax's time compares with the products', what accounts for it, and what FlashAttention changes."""
    found = attention_times(frame)
    if found.empty:
        return []
    sentences = []
    eager = found[(found["attention"] == "eager") & (found["matmul_us"] > 0)]
    for precision, rows in eager.groupby("precision", sort=False):
        more, worst = rows[rows["time_ratio"] > 1], rows.loc[rows["time_ratio"].idxmax()]
        sentences.append(
            f"In {precision}, softmax takes {span(rows['time_ratio'])} the time of the two products of attention, for "
            f"{span(rows['flop_ratio'])} their FLOPs and {span(rows['bytes_ratio'])} their bytes; it takes longer than "
            f"they do in {len(more)} of {count(len(rows), 'case')} (most for {worst['size']} at {worst['context']})."
        )
        by_flops = (rows["time_ratio"] / rows["flop_ratio"]).median()
        by_bytes = (rows["time_ratio"] / rows["bytes_ratio"]).median()
        nearer = "bytes" if max(by_bytes, 1 / by_bytes) < max(by_flops, 1 / by_flops) else "FLOPs"
        sentences.append(
            f"The time ratio in {precision} is {times(by_flops)} the ratio of FLOPs and {times(by_bytes)} that of "
            f"bytes in "
            f"the median: {nearer} are the nearer account of it."
        )
        longest = rows[rows["context"] == rows["context"].max()]
        shares = {
            part: span(longest[f"{part}_us"] / longest["core_us"], percent) for part in ("matmul", "softmax", "other")
        }
        sentences.append(
            f"At context {rows['context'].max()} in {precision}, what lies between the projections is "
            f"{shares['matmul']} "
            f"products, {shares['softmax']} softmax and {shares['other']} mask, scaling and casts; a whole attention "
            f"block "
            f"is {span(longest['block_us'] / longest['forward_us'], percent)} of inference's kernel time."
        )
    return [*sentences, *_growth(eager), *_flash(found)]


def _growth(eager: pd.DataFrame) -> list[str]:
    exponents = {}
    for _, rows in eager.groupby(["precision", "size"], sort=False):
        longer = rows[rows["context"] >= 512]
        if len(longer) >= 3:
            for part in ("softmax_us", "matmul_us"):
                exponents.setdefault(part, []).append(power_law_exponent(longer["context"], longer[part]))
    if not exponents:
        return []
    softmax, matmul = (span(exponents[part], number) for part in ("softmax_us", "matmul_us"))
    return [
        f"From context 512 on softmax's time grows as (context)^{softmax} and the two products' as "
        f"(context)^{matmul}, over "
        f"the sizes and precisions."
    ]


def _flash(found: pd.DataFrame) -> list[str]:
    flash = found[found["attention"] != "eager"]
    both = flash.merge(found[found["attention"] == "eager"], on=CASE[:3], suffixes=("", "_eager"))
    sentences = []
    for precision, rows in in_order(both, ["precision"]).groupby("precision", sort=False) if len(both) else []:
        gains = rows["core_us_eager"] / rows["core_us"]
        best = rows.loc[gains.idxmax()]
        sentences.append(
            f"FlashAttention in {precision} takes {span(1 / gains)} the kernel time of what eager attention does "
            f"between the "
            f"projections (least for {best['size']} at {best['context']}), and makes the attention block "
            f"{span(rows['block_us'] / rows['forward_us'], percent)} of inference instead of "
            f"{span(rows['block_us_eager'] / rows['forward_us_eager'], percent)}."
        )
    return sentences


def figure_softmax(frame: pd.DataFrame) -> Figure | None:
    """One panel per precision: softmax's time, bytes and FLOPs over the two products', by context, a line per size."""
    found = attention_times(frame)
    if found.empty or (eager := found[(found["attention"] == "eager") & (found["matmul_us"] > 0)]).empty:
        return None
    precisions = list(eager["precision"].unique())
    figure, axes = figures.panels(len(precisions), width=4.4, height=3.2)
    for axis, precision in zip(axes, precisions, strict=True):
        rows = eager[eager["precision"] == precision]
        for size in [size for size in SIZES if size in set(rows["size"])]:
            line, colour = rows[rows["size"] == size].sort_values("context"), figures.COLOURS[size]
            axis.plot(line["context"], line["time_ratio"], color=colour, marker="o", markersize=3, label=size)
            axis.plot(line["context"], line["bytes_ratio"], color=colour, linestyle="--", linewidth=0.8)
            axis.plot(line["context"], line["flop_ratio"], color=colour, linestyle=":", linewidth=0.8)
        axis.axhline(1, color="0.2", linewidth=0.8)
        figures.context_axis(axis, rows["context"].unique())
        figures.log_time_axis(axis, "softmax / two products")
        axis.set_title(precision)
    handles, labels = max((axis.get_legend_handles_labels() for axis in axes), key=lambda pair: len(pair[1]))
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 6))
    figure.suptitle(
        f"Softmax against the products of attention, {frame.attrs['device']} (solid: time, dashed: bytes, dotted: "
        f"FLOPs)",
        fontsize=10,
    )
    return figure


# ---- what others published -----------------------------------------------------------------------------------------

_PUBLISHED_VIEWS = {
    "inference": "inference",
    "forward": "forward",
    "training": "train_step",
    "train_step": "train_step",
}
_PUBLISHED_SIZES = {"small": "small", "medium": "medium", "large": "large", "xl": "xl-2025", "2.7b": "2.7b"}


def table_published(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns published shares of matmuls and softmax-to-product ratios beside ours of the same size and context.

    Ours are fp32 with eager attention, as theirs; a ratio to every product of the model is not comparable and left out.
    """
    shares, inside = _shares(frame, "matmul"), attention_times(frame)
    if shares.empty or inside.empty:
        return pd.DataFrame()

    def of_case(rows: pd.DataFrame, row: dict) -> pd.DataFrame:
        is_case = (rows["size"] == _PUBLISHED_SIZES[row["model"]]) & (rows["context"] == row["context_length"])
        return rows[is_case & (rows["precision"] == "fp32") & (rows["attention"] == "eager")]

    result = []
    for row in published.load("gemm_fraction").query("status == 'ok'").to_dict("records"):
        view, ours = _PUBLISHED_VIEWS[row["phase"]], of_case(shares, row)
        if len(ours) and view in ours and ours[view].notna().any():
            sign = {"greater_than": "> ", "approximately": "≈ "}.get(row["qualifier"], "")
            theirs = f"{sign}{percent(row['gemm_percent'] / 100, 3)}"
            result.append(
                _published_row(row, f"matmul share, {PHASE_NAMES[view]}", theirs, percent(ours[view].iloc[0], 3))
            )
    ratios = published.load("softmax_vs_matmul")
    for row in ratios[(ratios["status"] == "ok") & (ratios["matmul_scope"] == "attention_matmuls")].to_dict("records"):
        if len(ours := of_case(inside, row)):
            theirs = times(row["softmax_ms"] / row["matmul_ms"])
            result.append(
                _published_row(row, "softmax / products of attention", theirs, times(ours["time_ratio"].iloc[0]))
            )
    return pd.DataFrame(result)


def _published_row(row: dict, quantity: str, theirs: str, ours: str) -> dict:
    caveat = str(row["note"]).replace("_", " ").replace(";", "; ") if isinstance(row["note"], str) else ""
    return {
        "quantity": quantity,
        "GPU": row["gpu"],
        "size": _PUBLISHED_SIZES[row["model"]],
        "context": row["context_length"],
        "published": theirs,
        "ours": ours,
        "caveat": caveat,
    }


def findings_published(frame: pd.DataFrame, steps: pd.DataFrame) -> list[str]:
    """Says how a host range of a forward pass, as some reports read it, compares with a projected one here.

    A published forward time of host ranges that hardly moves with the context is launch time.
    """
    hosts = published.load("nvtx_fwd_bwd")
    pairs = timer_pairs(frame, steps)
    sentences = []
    if pairs.empty:
        return sentences
    forward = pairs[(pairs["phase"] == "forward") & (pairs["precision"] == "fp32")]
    for model, rows in hosts[hosts["status"] == "ok"].groupby("model", sort=False):
        mine = forward[(forward["size"] == _PUBLISHED_SIZES[model]) & forward["context"].isin(rows["context_length"])]
        theirs = rows[rows["context_length"].isin(mine["context"])].sort_values("context_length")
        mine = mine.sort_values("context")
        if len(mine) < 2:
            continue
        grows, ours = (column.iloc[-1] / column.iloc[0] for column in (theirs["forward_ms"], mine["projected_ms"]))
        sentences.append(
            f"From context {mine['context'].iloc[0]} to {mine['context'].iloc[-1]}, the host range of {model}'s "
            f"forward pass "
            f"that was published for the {rows['gpu'].iloc[0]} grows {times(grows)}; projected on this device, ours "
            f"grows "
            f"{times(ours)}."
        )
    return sentences
