"""Notebook 08 from frames of its records: what each change to the encoder buys, its peers, its kernels, its errors."""

import itertools
import math

import pandas as pd
from matplotlib.figure import Figure

from labkit import published
from labkit.report import figures, forms, verdicts
from labkit.report.findings import count, gib, listing, number, percent, scientific, span, times
from labkit.report.nsys_analysis import CLASS_COLOURS, CLASS_HATCHES
from labkit.report.tables import cell, ok_rows, once_per_frame, select

OURS, ORIGINAL, GRAPH, BOTH = "fused", "eager + compile", "CUDA graph", "forward_backward"
STEPS = ("eager", "cu_seqlens", "positions", "attention", "norm", OURS)
NAMES = {
    "eager": "eager", ORIGINAL: "eager, layers compiled", "cu_seqlens": "+ packed attention",
    "positions": "+ positions at once", "attention": "+ one projection for q, k, v", "norm": "+ norm with its residual",
    OURS: "fused: + MLP", GRAPH: "+ CUDA graph", "fused + compile": "fused, layers compiled",
    "fused, recomputed": "fused, MLP recomputed",
}  # fmt: skip
"""Ways to run the encoder, in the order in which tables show them; each "+" keeps the steps before it."""

NUMBERS = ["sustained_ms", "called_sustained_ms", "median_ms", "half_width_fraction", "call_ms", "peak_bytes", "watts",
           "sm_clock_mhz", "padded_fraction"]  # fmt: skip


@once_per_frame
def measured(steps: pd.DataFrame) -> pd.DataFrame:
    """Returns the rows by way, with every column that is read here: NaN where no record has it.

    called_ms: launched from Python, back to back where records have that; graph_ms: a CUDA graph's replays, back to
    back, NaN where the way cannot be captured; best_ms: the second where there is one; graph_breaks.
    """
    rows = steps.reindex(columns=list(dict.fromkeys([*steps.columns, *NUMBERS])))
    rows[NUMBERS] = rows[NUMBERS].apply(pd.to_numeric)
    is_replayed = pd.Series([bool(observed.get("is_replayed")) for observed in rows["observed"]], index=rows.index)
    rows["graph_ms"] = rows["sustained_ms"].where(is_replayed)
    called = rows["called_sustained_ms"].fillna(rows["sustained_ms"].where(~is_replayed))
    rows["called_ms"] = called.fillna(rows["call_ms"])
    rows["best_ms"] = rows["graph_ms"].fillna(rows["called_ms"])
    rows["graph_breaks"] = [observed.get("graph_breaks", math.nan) for observed in rows["observed"]]
    order = [*NAMES, *(way for way in dict.fromkeys(rows["way"]) if way not in NAMES)]
    return rows.sort_values("way", key=lambda column: column.map(order.index), kind="stable")


def row_of(steps: pd.DataFrame, way: str, workload: str = "A", phase: str = BOTH) -> dict:
    """Returns a way's row; {"status": "–"} where there is none."""
    rows = select(measured(steps), way=way, workload=workload, phase=phase).to_dict("records")
    return rows[0] if rows else {"status": "–"}


def floor_ms(floor: pd.DataFrame, workload: str = "A") -> float:
    """Returns the sustained time (ms) of the matrix products of forward and backward alone, NaN without one."""
    rows = ok_rows(floor, workload=workload, phase=BOTH)
    return rows["sustained_ms"].iloc[0] if len(rows) and "sustained_ms" in rows else math.nan


def workload_name(steps: pd.DataFrame) -> str:
    """Returns "64 images of 256 patches in bf16"."""
    for row in ok_rows(steps, workload="A").head(1).to_dict("records"):
        patches = row["observed"]["num_patches"] // row["images"]
        return f"{row['images']} images of {patches} patches in {row['precision']}"
    return "images of one size"


# --- step by step ---


def table_steps(steps: pd.DataFrame, floor: pd.DataFrame) -> pd.DataFrame:
    """Returns a row for each of our ways on images of one size: times, peak, the products' share, graph breaks."""
    result = []
    for way in dict.fromkeys(select(measured(steps), workload="A")["way"]):
        forward, both = row_of(steps, way, phase="forward"), row_of(steps, way)
        shown = {"way": NAMES.get(way, way)}
        for title, value in (("called", "called_ms"), ("in a graph", "graph_ms")):
            shown |= {f"forward, {title} (ms)": cell(forward, value), f"both, {title} (ms)": cell(both, value)}
        shown |= {"peak (GiB)": cell(both, "peak_bytes", gib)}
        shown |= {"products' share": percent(floor_ms(floor) / both.get("best_ms", math.nan))}
        result.append(shown | {"graph breaks": number(both.get("graph_breaks"))})
    return pd.DataFrame([row for row in result if not row["way"].startswith("transformers")])


@once_per_frame
def saved(steps: pd.DataFrame) -> pd.DataFrame:
    """Returns what each step changes against the measured one before it: forward and backward of images of one size.

    As called, and last what a CUDA graph of the whole takes off. Columns way, before_ms, after_ms, saved_ms,
    saved_bytes, ratio, verdict.
    """
    rows = {way: row for way in STEPS if (row := row_of(steps, way)).get("called_ms", 0) > 0}
    if OURS in rows and rows[OURS]["graph_ms"] > 0:
        rows[GRAPH] = {**rows[OURS], "called_ms": rows[OURS]["graph_ms"]}
    result = []
    for (_, before), (way, after) in itertools.pairwise(rows.items()):
        ratio, pair = verdicts.ratio(before, after, "called_ms"), (before["called_ms"], after["called_ms"])
        saved_bytes = before["peak_bytes"] - after["peak_bytes"]
        result.append((way, *pair, pair[0] - pair[1], saved_bytes, ratio.mid, ratio.verdict))
    columns = ["way", "before_ms", "after_ms", "saved_ms", "saved_bytes", "ratio", "verdict"]
    return pd.DataFrame(result, columns=columns)


def figure_steps(steps: pd.DataFrame, floor: pd.DataFrame) -> Figure | None:
    """Forward and backward of images of one size, back to back: what each step takes off, or adds."""
    if not (measured(steps)["called_ms"] > 0).any():
        return None
    changes, grey = saved(steps).set_index("way"), "#b0b0b0"
    bars = [(NAMES[way], 0.0, row_of(steps, way).get("called_ms", math.nan), grey) for way in (ORIGINAL, "eager")]
    for way in (*STEPS[1:], GRAPH):
        before, after = changes.loc[way, ["before_ms", "after_ms"]] if way in changes.index else (math.nan, math.nan)
        bars.append((NAMES[way], before, after - before, figures.SERIES[2 if after <= before else 3]))
    bars.append(("the fused encoder", 0.0, row_of(steps, OURS).get("best_ms", math.nan), figures.SERIES[0]))
    figure, (axis,) = figures.panels(1, width=9.0, height=3.6)
    for place, (_, left, width, colour) in enumerate(bars):
        if width == width:
            axis.barh(place, width, left=left, color=colour)
            text = number(width) if left == 0 else f"{'−' if width < 0 else '+'}{number(abs(width))}"
            axis.text(max(left, left + width), place, f" {text}", va="center", fontsize=8)
    if floor_ms(floor) > 0:
        axis.axvline(floor_ms(floor), color="black", linestyle="--", linewidth=1, label="the matrix products alone")
    labels = [text if width == width else f"{text}: not measured" for text, _, width, _ in bars]
    axis.set_yticks(range(len(bars)), labels)
    axis.set(xlabel="time, back to back (ms)", ylim=(len(bars) - 0.5, -0.5))
    axis.grid(axis="y", visible=False)
    figures.finish(figure, [axis], f"Forward + backward, {workload_name(steps)}, {steps.attrs['device']}")
    return figure


def findings_steps(steps: pd.DataFrame, floor: pd.DataFrame) -> list[str]:
    """Says what all steps give together, what each one does, and what bounds the fused encoder."""
    sentences, changes, ours = forms.failures(steps), saved(steps), row_of(steps, OURS)
    originals = [row for row in (row_of(steps, way) for way in (ORIGINAL, "eager")) if row["status"] == "ok"]
    if originals and ours["status"] == "ok":
        first, ratio = originals[0], verdicts.ratio(originals[0], ours, "called_ms")
        graph = f", {number(ours['graph_ms'])} in a CUDA graph" if ours["graph_ms"] > 0 else ""
        sentences.append(
            f"Forward + backward of {workload_name(steps)}: {NAMES[first['way']]} {number(first['called_ms'])} ms, "
            f"fused {number(ours['called_ms'])}, both called from Python ({ratio.verdict}, {times(ratio.mid)}){graph}. "
            f"Peak {gib(first['peak_bytes'])} and {gib(ours['peak_bytes'])} GiB."
        )
    if len(changes):
        parts = [
            f"{row.way} {row.verdict} ({row.saved_ms:+.2f} ms, {row.saved_bytes / 2**20:+,.0f} MiB)"
            for row in changes.itertuples()
        ]
        sentences.append(f"Each step against the one before, and what it saves: {listing(parts)}.")
    if ours["status"] == "ok":
        parts = [f"in bursts it takes {number(ours['median_ms'])} ms, back to back {number(ours['best_ms'])}"]
        if ours["watts"] > 0:
            parts.append(f"at {number(ours['watts'])} W and {number(ours['sm_clock_mhz'], 4)} MHz")
        if floor_ms(floor) > 0:
            parts.append(f"of which the matrix products alone need {percent(floor_ms(floor) / ours['best_ms'])}")
        sentences.append(f"What bounds the fused encoder: {', '.join(parts)}.")
    return sentences


# --- images of many sizes, and peers ---


@once_per_frame
def against(steps: pd.DataFrame) -> pd.DataFrame:
    """Returns each other way's time over that of the fused encoder, both as called; above 1 ours is ahead.

    Columns workload, phase, way, ratio, low, high, verdict, padded_fraction.
    """
    result = []
    for row in ok_rows(measured(steps)).to_dict("records"):
        case = {name: row[name] for name in ("way", "workload", "phase")}
        ours = row_of(steps, **case | {"way": OURS})
        if row["way"] != OURS and row["called_ms"] > 0 and ours.get("called_ms", 0) > 0:
            ratio = verdicts.ratio(row, ours, "called_ms")
            found = {**ratio._asdict(), "verdict": ratio.verdict, "padded_fraction": row["padded_fraction"]}
            result.append(case | found)
    columns = ["workload", "phase", "way", *verdicts.Ratio._fields, "verdict", "padded_fraction"]
    return pd.DataFrame(result, columns=columns).rename(columns={"mid": "ratio"})


def table_sizes(steps: pd.DataFrame) -> pd.DataFrame:
    """Returns forward and backward of images of one size and of many by way, over ours, and what is padded."""
    pairs, result = select(against(steps), phase=BOTH), []
    for way in (way for way in dict.fromkeys(measured(steps)["way"]) if way not in STEPS[1:-1]):
        shown = {"way": NAMES.get(way, way)}
        for workload, title in (("A", "one size"), ("B", "many sizes")):
            row, pair = row_of(steps, way, workload), select(pairs, way=way, workload=workload)
            shown |= {f"{title}, called (ms)": cell(row, "called_ms")}
            shown |= {f"{title}, in a graph (ms)": cell(row, "graph_ms")}
            shown |= {f"{title}, called, over ours": times(pair["ratio"].iloc[0]) if len(pair) else "–"}
        shown |= {"many sizes, peak (GiB)": cell(row, "peak_bytes", gib)}
        padded = row.get("padded_fraction", math.nan) if way.startswith("transformers") else 0.0
        result.append(shown | {"padding of many sizes": percent(padded) if row["status"] == "ok" else "–"})
    return pd.DataFrame(result)


def findings_sizes(steps: pd.DataFrame) -> list[str]:
    """Says where the fused encoder stands by workload, and what padding costs the peer that pads."""
    pairs, sentences = select(against(steps), phase=BOTH), []
    pairs = pairs[~pairs["way"].isin(STEPS[1:])]
    for workload, title in (("A", "Images of one size"), ("B", "Images of many sizes")):
        if text := forms.summary(select(pairs, workload=workload), lambda row: NAMES.get(row["way"], row["way"])):
            sentences.append(f"{title}, the fused encoder against the other ways, all called from Python: {text}.")
    padded = pairs[pairs["way"].str.startswith("transformers") & (pairs["workload"] == "B")]
    for best in padded.sort_values("ratio").head(1).to_dict("records"):
        same = select(pairs, workload="A", way=best["way"])["ratio"]
        beside = f", {times(same.iloc[0])} where nothing is padded" if len(same) else ""
        sentences.append(
            f"Padded to the longest image, a batch of many sizes is {percent(best['padded_fraction'])} padding: "
            f"{times(1 / (1 - best['padded_fraction']))} the rows. The fastest that pads, {best['way']}, takes "
            f"{times(best['ratio'])} our time{beside}."
        )
    return sentences


# --- profile ---


@once_per_frame
def kernels_of(profile: pd.DataFrame) -> pd.DataFrame:
    """Returns the longest kernels of each profiled way: way, kernel, launches, ms, share of all kernels' time."""
    rows = [
        {"way": row["way"], "kernel": kernel, "launches": launches, "ms": ms, "share": ms / row["kernels_ms"]}
        for row in ok_rows(profile).to_dict("records")
        for kernel, ms, launches in row["observed"].get("kernels", [])
    ]
    return pd.DataFrame(rows, columns=["way", "kernel", "launches", "ms", "share"])


def table_profile(profile: pd.DataFrame) -> pd.DataFrame:
    """Returns the longest kernels of the fused encoder's forward and backward."""
    rows = select(kernels_of(profile), way=OURS)
    shown = {"kernel": [f"`{kernel[:60]}`" for kernel in rows["kernel"]], "launches": rows["launches"].astype(str)}
    return pd.DataFrame(shown | {"ms": rows["ms"].map(number), "share": rows["share"].map(percent)})


def class_times(row: dict) -> dict[str, float]:
    """Returns the kernel time (ms) of a profiled way by class of kernels, without the classes that it has not."""
    found = {kind: row.get(f"{kind}_ms", math.nan) for kind in CLASS_COLOURS}
    return {kind: value for kind, value in found.items() if value is not None and value == value}


def figure_profile(profile: pd.DataFrame) -> Figure | None:
    """Kernel time of forward and backward by class, as first written and fused."""
    rows = ok_rows(profile).to_dict("records")
    if not rows:
        return None
    figure, (axis,) = figures.panels(1, width=9.0, height=1.2 + 0.5 * len(rows))
    for place, row in enumerate(reversed(rows)):
        left = 0.0
        for kind, value in class_times(row).items():
            look = {"color": CLASS_COLOURS[kind], "hatch": CLASS_HATCHES.get(kind, ""), "edgecolor": "white"}
            axis.barh(place, value, left=left, label=kind, linewidth=0, **look)
            left += value
    axis.set_yticks(range(len(rows)), [NAMES.get(row["way"], row["way"]) for row in reversed(rows)])
    axis.set(xlabel="kernel time (ms)")
    axis.grid(axis="y", visible=False)
    figures.finish(figure, [axis], f"Kernels of forward + backward by class, {profile.attrs['device']}", num_columns=8)
    return figure


def findings_profile(profile: pd.DataFrame) -> list[str]:
    """Says how much kernel time and how many launches go, from which classes, and what is left."""
    sentences = forms.failures(profile)
    first, last = (next(iter(ok_rows(profile, way=way).to_dict("records")), None) for way in ("eager", OURS))
    before, after = (class_times(row) if row else {} for row in (first, last))
    if first and last:
        change = {kind: before.get(kind, 0.0) - after.get(kind, 0.0) for kind in CLASS_COLOURS}
        largest = sorted(change, key=change.get, reverse=True)[:3]
        parts = (f"{kind} {number(before.get(kind, 0.0))} to {number(after.get(kind, 0.0))}" for kind in largest)
        sentences.append(
            f"Kernels take {number(first['kernels_ms'])} ms in {int(first['num_launches']):,} launches as first "
            f"written, {number(last['kernels_ms'])} in {int(last['num_launches']):,} fused; most goes from "
            f"{listing(parts)} ms."
        )
    if last:
        left = sorted(after, key=after.get, reverse=True)[:4]
        parts = (f"{kind} {percent(after[kind] / last['kernels_ms'])}" for kind in left)
        sentences.append(f"What is left of the fused encoder's kernel time: {listing(parts)}.")
    return sentences


# --- accuracy ---


def table_accuracy(accuracy: pd.DataFrame) -> pd.DataFrame:
    """Returns for each implementation its errors by precision, and these over those of eager in the same precision."""
    result = []
    for impl in [impl for impl in STEPS if impl in set(accuracy["phase"])]:
        shown = {"impl": impl}
        for precision in dict.fromkeys(accuracy["precision"]):
            row = next(iter(select(accuracy, phase=impl, precision=precision).to_dict("records")), None)
            for which, title in (("out", "output"), ("gradient", "worst gradient")):
                text = "–" if row is None else row["status"]
                if text == "ok":
                    text = f"{scientific(row[f'{which}_error'])} ({times(_over_eager(row, which))})"
                shown[f"{precision}, {title}"] = text
        result.append(shown)
    return pd.DataFrame(result)


def _over_eager(row: dict, which: str) -> float:
    error, of_eager = row[f"{which}_error"], row[f"eager_{which}_error"]
    return error / of_eager if of_eager else math.nan


def findings_accuracy(accuracy: pd.DataFrame) -> list[str]:
    """Says by how much the errors of our implementations differ from those of eager in the same precision."""
    sentences, rows = forms.failures(accuracy), ok_rows(accuracy)
    rows = rows[rows["phase"] != "eager"].to_dict("records")
    if rows:
        spans = [span(_over_eager(row, which) for row in rows) for which in ("out", "gradient")]
        sentences.append(
            f"Against fp64 on the CPU, errors are {spans[0]} those of eager in the same precision for the output and "
            f"{spans[1]} for the gradient that is worst, in {count(len(rows), 'case')}."
        )
    return sentences


# --- kernels ---

CONTENDERS = {
    "ours_in_place": "ours, in place",
    "eager": "eager",
    "compiled": "torch.compile, max-autotune",
    "liger": "Liger",
}
SHAPE = ["operation", "rows", "columns"]


@once_per_frame
def contests(kernels: pd.DataFrame) -> pd.DataFrame:
    """Returns the rows with `impl` and `name` ("forward", "forward_backward") taken from their phase, and `verdict`."""
    keys = ("ratio_to_ours", "ratio_to_ours_low", "ratio_to_ours_high", "ceiling_fraction", "num_bytes", "timer_method")
    rows = kernels.reindex(columns=list(dict.fromkeys([*kernels.columns, *keys, "median_ms", "ceiling", "flops"])))
    rows[["impl", "name"]] = [phase.split(" ") for phase in rows["phase"]]
    is_paired = (rows["status"] == "ok") & rows["ratio_to_ours"].notna()
    verdict = [verdicts.paired(row).verdict for row in rows[is_paired].to_dict("records")]
    rows["verdict"] = pd.Series(verdict, rows.index[is_paired], dtype=object).reindex(rows.index, fill_value="")
    return rows.assign(ratio=rows["ratio_to_ours"])


@once_per_frame
def rates(kernels: pd.DataFrame) -> pd.DataFrame:
    """Returns by shape ours' time, and what it reaches of its ceiling: backward is both passes less forward."""
    ours = ok_rows(contests(kernels), impl="ours")
    ours["work"] = ours["num_bytes"].fillna(ours["flops"])
    columns = [*SHAPE, "work", "ceiling_fraction", "median_ms"]
    both, forward = (select(ours, name=one)[columns] for one in (BOTH, "forward"))
    rows = both.merge(forward, "left", SHAPE, suffixes=("", "_forward"))
    of_ceiling = rows["ceiling_fraction"] * rows["median_ms"] / rows["work"]  # the time of a unit of work, at best
    backward_ms = rows["median_ms"] - rows["median_ms_forward"]
    return rows.assign(backward_fraction=of_ceiling * (rows["work"] - rows["work_forward"]) / backward_ms)


def table_kernels(kernels: pd.DataFrame) -> pd.DataFrame:
    """Returns for each operation and shape what ours reaches of its ceiling, and others' times over ours."""
    rows, reached, result = contests(kernels), rates(kernels).set_index(SHAPE), []
    for shape, group in rows.groupby(SHAPE, sort=False):
        ours = reached.loc[shape].to_dict() if shape in reached.index else {}
        shown = {"operation": f"{shape[0]}, {shape[1]:,} × {shape[2]:,}", "both (ms)": number(ours.get("median_ms"))}
        for title, key in (("forward", "ceiling_fraction_forward"), ("backward", "backward_fraction")):
            shown[f"{title}, of the ceiling"] = percent(ours.get(key))
        for impl, title in CONTENDERS.items():
            texts = [
                cell(row, "ratio_to_ours", times) for row in select(group, impl=impl, name=BOTH).to_dict("records")
            ]
            shown[f"{title} / ours"] = (texts or ["–"])[0].replace("skipped", "–")
        result.append(shown)
    return pd.DataFrame(result)


def findings_kernels(kernels: pd.DataFrame) -> list[str]:
    """Says how near the norms come to the copy rate, and how ours stand to every other implementation."""
    sentences, rows, reached = forms.failures(kernels), contests(kernels), rates(kernels)
    parts = []
    for operation, group in reached[reached["operation"].str.endswith("norm")].groupby("operation", sort=False):
        fractions = {"forward": group["ceiling_fraction_forward"], "backward": group["backward_fraction"]}
        spans = [f"{span(x.dropna(), percent)} {key}" for key, x in fractions.items() if x.notna().any()]
        parts += [f"{operation} {listing(spans)}"] if spans else []
    if parts:
        sentences.append(f"Of the copy rate, the norms with their residual reach: {'; '.join(parts)}.")
    others = select(rows, name=BOTH, impl=["eager", "compiled", "liger"])
    parts = [
        f"{CONTENDERS[impl]} {forms.tally(group)}"
        for impl, group in others[others["verdict"] != ""].groupby("impl", sort=False)
    ]
    if parts:
        sentences.append(f"Ours by verdict against each other implementation, forward + backward: {'; '.join(parts)}.")
    return sentences


# --- published ---

COUNTERPART = {"original": ORIGINAL, "optimized": OURS}
MINI_BATCHES = 16
"""The published times of 1,024 images are so many times the mean of a mini-batch of 64."""


def published_rows(steps: pd.DataFrame) -> pd.DataFrame:
    """Returns times (ms) and peak (MiB) of a mini-batch, published and here: variant, way, forward, backward, peak."""
    result = []
    for row in ok_rows(published.load("siglip2")).to_dict("records"):
        way = COUNTERPART[row["variant"]]
        forward, both = (row_of(steps, way, phase=phase).get("best_ms", math.nan) for phase in ("forward", BOTH))
        there = {phase: row[f"{phase}_ms"] / MINI_BATCHES for phase in ("forward", "backward")}
        peak = row_of(steps, way).get("peak_bytes", math.nan) / 2**20
        case = {"variant": row["variant"], "way": row["variant"]}
        result.append({**case, "on": f"{row['gpu']}, published", **there, "peak": row["peak_mib"]})
        here = {"way": NAMES[way], "on": f"{steps.attrs['device']}, here", "forward": forward}
        result.append({**case, **here, "backward": both - forward, "peak": peak})
    return pd.DataFrame(result)


def table_published(steps: pd.DataFrame) -> pd.DataFrame:
    """Returns forward, backward and peak as published and here, of a mini-batch and of all 1,024 images."""
    rows = published_rows(steps)
    shown = rows[["way", "on"]].copy()
    for phase in ("forward", "backward"):
        shown[f"{phase} (ms)"] = rows[phase].map(number)
        shown[f"{phase} × {MINI_BATCHES} (ms)"] = [number(MINI_BATCHES * value, 4) for value in rows[phase]]
    return shown.assign(**{"peak (MiB)": rows["peak"].map("{:,.0f}".format).replace("nan", "–")})


def findings_published(steps: pd.DataFrame) -> list[str]:
    """Says what the published change gave there, and what ours gives here."""
    gains = {}
    for is_here, rows in published_rows(steps).groupby(lambda number_: number_ % 2):
        first, last = (select(rows, variant=variant).iloc[0] for variant in COUNTERPART)
        gains[is_here] = [first[phase] / last[phase] for phase in ("forward", "backward")]
    if not all(gain > 0 for gain in gains[1]):
        return []
    there, here = (f"{times(gains[place][0])} forward and {times(gains[place][1])} backward" for place in (0, 1))
    return [f"Original over optimized: published {there}, in an unknown kind of time; here {here}, back to back."]


def front(chapter) -> list[tuple[str, str]]:
    """Returns the finding of this chapter for the front page, with the heading that it links to."""
    steps = chapter.records("steps")
    first, last = (row_of(steps, way) if len(steps) else {} for way in (ORIGINAL, OURS))
    if not (first.get("best_ms", 0) > 0 and last.get("best_ms", 0) > 0):
        return []
    text = (
        f"**Fusing what stands between matrix products makes a vision encoder "
        f"{times(first['best_ms'] / last['best_ms'])} as fast as its compiled original**: forward + backward of "
        f"{workload_name(steps)}, {number(first['best_ms'])} ms called from Python, {number(last['best_ms'])} fused in "
        f"a CUDA graph ({number(last['called_ms'])} called), peak {gib(first['peak_bytes'])} and "
        f"{gib(last['peak_bytes'])} GiB."
    )
    return [(text, "Step by step")]
