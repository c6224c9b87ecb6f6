"""Notebook 08 from frames of its records: what each change to the encoder buys, its peers, its kernels, its errors."""

import itertools
import math

import pandas as pd
from matplotlib.figure import Figure

from labkit import published
from labkit.report import figures, forms, verdicts
from labkit.report.text import count, gib, listing, number, percent, scientific, span, times
from labkit.report.nsys_analysis import CLASS_COLOURS, CLASS_HATCHES
from labkit.report.tables import cell, ok_rows, once_per_frame, select

OURS, ORIGINAL, BOTH = "fused", "eager + compile", "forward_backward"
STEPS = ("eager", "cu_seqlens", "positions", "attention", "norm", OURS)
NAMES = {
    "eager": "eager", ORIGINAL: "eager, layers compiled", "cu_seqlens": "+ packed attention",
    "positions": "+ positions at once", "attention": "+ one projection for q, k, v", "norm": "+ norm with its residual",
    OURS: "fused (+ MLP)", "fused + compile": "fused, layers compiled", "fused, recomputed": "fused, MLP recomputed",
    "fused, fast math + compile": "fused, compiled, fast math",
}  # fmt: skip
"""Ways to run the encoder, in the order in which tables show them; each "+" keeps the steps before it."""

NUMBERS = ["sustained_ms", "median_ms", "half_width_fraction", "call_ms", "peak_bytes", "watts", "sm_clock_mhz",
           "padded_fraction"]  # fmt: skip


@once_per_frame
def measured(steps: pd.DataFrame) -> pd.DataFrame:
    """Returns the rows by way, with every column that is read here, NaN where no record has it.

    sustained_ms: back to back, replayed from a CUDA graph where `is_replayed`; call_ms: launched from Python.
    """
    rows = steps.reindex(columns=list(dict.fromkeys([*steps.columns, *NUMBERS])))
    rows[NUMBERS] = rows[NUMBERS].apply(pd.to_numeric)
    rows["is_replayed"] = [bool(observed.get("is_replayed")) for observed in rows["observed"]]
    order = [*NAMES, *(way for way in dict.fromkeys(rows["way"]) if way not in NAMES)]
    return rows.sort_values("way", key=lambda column: column.map(order.index), kind="stable")


def row_of(steps: pd.DataFrame, way: str, workload: str = "A", phase: str = BOTH) -> dict:
    """Returns a way's row; {"status": "–"} where there is none."""
    rows = select(measured(steps), way=way, workload=workload, phase=phase).to_dict("records")
    return rows[0] if rows else {"status": "–"}


def launched_ms(row: dict) -> str:
    """Returns a way's time launched from Python, of every session: the host's, so it scatters."""
    return span(verdicts.by_session(row, "call_ms").values(), number) if row["status"] == "ok" else row["status"]


def original(steps: pd.DataFrame, phase: str = BOTH) -> dict:
    """Returns the row of the encoder as first written: compiled, or where that was not measured as it is."""
    rows = [row_of(steps, way, phase=phase) for way in (ORIGINAL, "eager")]
    return next((row for row in rows if row.get("sustained_ms", 0) > 0), {"status": "–"})


def floor_ms(floor: pd.DataFrame) -> float:
    """Returns the sustained time (ms) of the matrix products of forward and backward alone, NaN without one."""
    rows = ok_rows(floor, workload="A", phase=BOTH)
    return rows["sustained_ms"].iloc[0] if len(rows) and "sustained_ms" in rows else math.nan


def workload_name(steps: pd.DataFrame) -> str:
    """Returns "64 images of 256 patches in bf16"."""
    for row in ok_rows(steps, workload="A").head(1).to_dict("records"):
        patches = row["observed"]["num_patches"] // row["images"]
        return f"{row['images']} images of {patches} patches in {row['precision']}"
    return "images of one size"


# --- step by step ---


def table_steps(steps: pd.DataFrame, floor: pd.DataFrame) -> pd.DataFrame:
    """Returns a row for each of our ways: times on images of one size and of many, peak, products' share, breaks."""
    result, seen = [], zip(steps["way"], steps["observed"], strict=True)
    breaks = {way: str(observed["breaks_of_one_graph"]) for way, observed in seen if "breaks_of_one_graph" in observed}
    for way in dict.fromkeys(select(measured(steps), workload="A")["way"]):
        forward, both = row_of(steps, way, phase="forward"), row_of(steps, way)
        bound = " †" if verdicts.launch_bound(forward, "sustained_ms") and not forward.get("is_replayed") else ""
        line = {"way": NAMES.get(way, way), "forward (ms)": cell(forward, "sustained_ms") + bound}
        line |= {"both (ms)": cell(both, "sustained_ms")}
        if "step" in set(steps["phase"]):
            line |= {"with AdamW (ms)": cell(row_of(steps, way, phase="step"), "sustained_ms")}
        line |= {"both, launched (ms)": launched_ms(both), "peak (GiB)": cell(both, "peak_bytes", gib)}
        line |= {"many sizes, both (ms)": cell(row_of(steps, way, "B"), "sustained_ms")}
        line |= {"products' share": percent(floor_ms(floor) / both.get("sustained_ms", math.nan))}
        result.append(line | ({"breaks, as one graph": breaks.get(way, "–")} if breaks else {}))
    return pd.DataFrame([row for row in result if not row["way"].startswith("transformers")])


@once_per_frame
def saved(steps: pd.DataFrame) -> pd.DataFrame:
    """Returns what each step changes against the measured one before it: forward and backward of images of one size.

    Columns way, before_ms, sustained_ms, saved_ms, saved_bytes, ratio, verdict.
    """
    rows = [row for row in (row_of(steps, way) for way in STEPS) if row.get("sustained_ms", 0) > 0]
    result = []
    for before, after in itertools.pairwise(rows):
        ratio, pair = verdicts.ratio(before, after, "sustained_ms"), (before["sustained_ms"], after["sustained_ms"])
        saved_bytes = before["peak_bytes"] - after["peak_bytes"]
        result.append((after["way"], *pair, pair[0] - pair[1], saved_bytes, ratio.mid, ratio.verdict))
    columns = ["way", "before_ms", "sustained_ms", "saved_ms", "saved_bytes", "ratio", "verdict"]
    return pd.DataFrame(result, columns=columns)


def figure_steps(steps: pd.DataFrame, floor: pd.DataFrame) -> Figure | None:
    """Forward and backward of images of one size, sustained: what each step takes off, or adds."""
    if not (measured(steps)["sustained_ms"] > 0).any():
        return None
    changes, grey = saved(steps).set_index("way"), "#b0b0b0"
    totals = {way: row_of(steps, way).get("sustained_ms", math.nan) for way in (ORIGINAL, "eager", OURS)}
    bars = [(NAMES[way], 0.0, totals[way], grey) for way in (ORIGINAL, "eager")]
    for way in STEPS[1:]:
        before, change = changes.loc[way, ["before_ms", "saved_ms"]] if way in changes.index else (math.nan, math.nan)
        bars.append((NAMES[way], before, -change, figures.SERIES[2 if change >= 0 else 3]))
    bars.append(("the fused encoder", 0.0, totals[OURS], figures.SERIES[0]))
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
    axis.set(xlabel="sustained time (ms)", ylim=(len(bars) - 0.5, -0.5))
    axis.grid(axis="y", visible=False)
    figures.finish(figure, [axis], f"Forward + backward, {workload_name(steps)}, {steps.attrs['device']}")
    return figure


def findings_steps(steps: pd.DataFrame, floor: pd.DataFrame) -> list[str]:
    """Says what all steps give together, what each one does, and what bounds the fused encoder."""
    changes, first, ours, sentences = saved(steps), original(steps), row_of(steps, OURS), []
    if "way" in first and ours["status"] == "ok":
        ratio, peaks = verdicts.ratio(first, ours, "sustained_ms"), [gib(row["peak_bytes"]) for row in (first, ours)]
        found = [f"{NAMES[first['way']]} {number(first['sustained_ms'])} ms, fused {number(ours['sustained_ms'])}"]
        found.append(f"{ratio.verdict}, {times(ratio.mid)}")
        found += [f"peak {peaks[0]} and {peaks[1]} GiB"] if "–" not in peaks else []
        sentences.append(f"Forward + backward of {workload_name(steps)}, sustained: {'; '.join(found)}.")
    if len(changes):
        parts = (
            f"{NAMES[row.way].removeprefix('+ ')} {row.verdict} ({row.saved_ms:+.2f} ms, "
            f"{row.saved_bytes / 2**20:+,.0f} MiB)"
            for row in changes.itertuples()
        )
        text = listing(parts).replace(", +nan MiB", "")  # a CPU has no peaks
        replayed = [NAMES[way].removeprefix("+ ") for way in STEPS if row_of(steps, way).get("is_replayed")][:1]
        note = "".join(f" From {way} on, steps are replayed; before, launched." for way in replayed)
        sentences.append(f"Each step against the one before, and what it saves: {text}.{note}")
    if ours["status"] == "ok":
        parts = [f"In bursts the fused encoder takes {number(ours['median_ms'])} ms"]
        power = f" at {number(ours['watts'])} W and {number(ours['sm_clock_mhz'], 4)} MHz" if ours["watts"] > 0 else ""
        parts.append(f"sustained {number(ours['sustained_ms'])}{power}")
        if floor_ms(floor) > 0:
            parts[-1] += f", of which the products alone need {percent(floor_ms(floor) / ours['sustained_ms'])}"
        if ours["is_replayed"]:
            parts.append(f"launched from Python instead of replayed {launched_ms(ours)}")
        sentences.append(f"{'; '.join(parts)}.")
    # What failed stands in the table as well, and takes no finding's place.
    return [" ".join([*sentences[:1], *forms.failures(steps)]), *sentences[1:]] if sentences else forms.failures(steps)


def _other_attention(steps: pd.DataFrame, workload: str) -> str:
    """Returns a sentence on the fused encoder with others' attention, " …", or nothing."""
    pairs = select(against(steps), phase=BOTH, workload=workload, way=[f"{OURS}, FlashAttention-{n}" for n in (2, 3)])
    parts = (
        f"{times(row.ratio)} ({row.way.removeprefix('fused, ')}, ours {row.verdict})" for row in pairs.itertuples()
    )
    return f" With others' attention in place of ours it takes {listing(parts)} the time." if len(pairs) else ""


# --- images of many sizes, and peers ---


@once_per_frame
def against(steps: pd.DataFrame) -> pd.DataFrame:
    """Returns each other way's sustained time over that of the fused encoder; above 1 ours is ahead.

    Columns workload, phase, way, ratio, low, high, verdict, launched_ratio (of call times), padded_fraction.
    """
    result = []
    for row in ok_rows(measured(steps)).to_dict("records"):
        case = {name: row[name] for name in ("way", "workload", "phase")}
        ours = row_of(steps, **case | {"way": OURS})
        if row["way"] != OURS and row["sustained_ms"] > 0 and ours.get("sustained_ms", 0) > 0:
            ratio = verdicts.ratio(row, ours, "sustained_ms")
            found = {**ratio._asdict(), "verdict": ratio.verdict, "launched_ratio": row["call_ms"] / ours["call_ms"]}
            result.append(case | found | {"padded_fraction": row["padded_fraction"]})
    columns = ["workload", "phase", "way", *verdicts.Ratio._fields, "verdict", "launched_ratio", "padded_fraction"]
    return pd.DataFrame(result, columns=columns).rename(columns={"mid": "ratio"})


def table_sizes(steps: pd.DataFrame) -> pd.DataFrame:
    """Returns forward and backward of images of one size and of many by way, and over ours."""
    pairs, result = select(against(steps), phase=BOTH), []
    ways = dict.fromkeys(measured(steps)["way"])
    for way in (way for way in ways if way == OURS or way.startswith(("eager", "transformers"))):
        line = {"way": NAMES.get(way, way)}
        for workload, title in (("A", "one size"), ("B", "many sizes")):
            row, pair = row_of(steps, way, workload), select(pairs, way=way, workload=workload)
            line |= {f"{title} (ms)": cell(row, "sustained_ms")}
            line |= {f"{title}, over ours": times(pair["ratio"].iloc[0]) if len(pair) else "–"}
        result.append(line | {"many sizes, peak (GiB)": cell(row, "peak_bytes", gib)})
    return pd.DataFrame(result)


def findings_sizes(steps: pd.DataFrame) -> list[str]:
    """Says where the fused encoder stands by workload, launched too, and what padding costs the peer that pads."""
    pairs, sentences = select(against(steps), phase=BOTH), []
    pairs = pairs[~pairs["way"].isin(STEPS[1:]) & ~pairs["way"].str.startswith(OURS)]
    for workload, title in (("A", "Images of one size"), ("B", "Images of many sizes")):
        of = select(pairs, workload=workload)
        if text := forms.summary(of, lambda row: NAMES.get(row["way"], row["way"])):
            launched = of["launched_ratio"].dropna()
            beside = f"; launched from Python, others take {span(launched)} our time" if len(launched) else ""
            text = f"the fused encoder sustained against the other ways: {text}{beside}"
            sentences.append(f"{title}, {text}.{_other_attention(steps, workload)}")
        for padded in of["padded_fraction"][of["padded_fraction"] > 0][:1]:
            sentences[-1] += f" Padding, {percent(padded)}, makes it {times(1 / (1 - padded))} the rows."
    return sentences


# --- profile ---


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
        largest = [kind for kind in sorted(change, key=change.get, reverse=True)[:3] if change[kind] > 0]
        parts = [f"{kind} {number(before.get(kind, 0.0))} to {number(after.get(kind, 0.0))}" for kind in largest]
        gone = f"; most goes from {listing(parts)} ms" if parts else ""
        sentences.append(
            f"Kernels take {number(first['kernels_ms'])} ms in {int(first['num_launches']):,} launches as first "
            f"written, {number(last['kernels_ms'])} in {int(last['num_launches']):,} fused{gone}."
        )
    if last:
        left = sorted(after.items(), key=lambda item: -item[1])[:4]
        parts = (f"{kind} {percent(value / last['kernels_ms'])}" for kind, value in left)
        sentences.append(f"What is left of the fused encoder's kernel time: {listing(parts)}.")
    return sentences


# --- accuracy ---


def table_accuracy(accuracy: pd.DataFrame) -> pd.DataFrame:
    """Returns for each implementation its errors by precision, and these over those of eager in the same precision."""
    result = []
    for impl in [impl for impl in STEPS if impl in set(accuracy["phase"])]:
        line = {"impl": impl}
        for precision in dict.fromkeys(accuracy["precision"]):
            row = next(iter(select(accuracy, phase=impl, precision=precision).to_dict("records")), None)
            for which, title in (("out", "output"), ("gradient", "worst gradient")):
                text = "–" if row is None else row["status"]
                if text == "ok":
                    text = f"{scientific(row[f'{which}_error'])} ({times(_over_eager(row, which))})"
                line[f"{precision}, {title}"] = text
        result.append(line)
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
            f"Errors are {spans[0]} those of eager for the output and {spans[1]} for the worst gradient, in "
            f"{count(len(rows), 'case')}."
        )
    return sentences


# --- kernels ---

CONTENDERS = {"eager": "eager", "compiled": "torch.compile", "liger": "Liger", "quack": "QuACK"}
COLUMNS = {"ours_in_place": "ours, in place", **CONTENDERS}
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
    ours = ok_rows(contests(kernels), impl="ours").assign(work=lambda rows: rows["num_bytes"].fillna(rows["flops"]))
    columns = [*SHAPE, "work", "ceiling_fraction", "median_ms"]
    both, forward = (select(ours, name=one)[columns] for one in (BOTH, "forward"))
    rows = both.merge(forward, "left", SHAPE, suffixes=("", "_forward"))
    of_ceiling = rows["ceiling_fraction"] * rows["median_ms"] / rows["work"]  # the time of a unit of work, at best
    backward_ms = rows["median_ms"] - rows["median_ms_forward"]
    return rows.assign(backward_fraction=of_ceiling * (rows["work"] - rows["work_forward"]) / backward_ms)


def table_kernels(kernels: pd.DataFrame) -> pd.DataFrame:
    """Returns for each operation and shape what ours reaches of its ceiling, and others' times over ours."""
    rows, reached, result = contests(kernels), rates(kernels).set_index(SHAPE), []
    timed = set(ok_rows(rows)["impl"])
    for shape, group in rows.groupby(SHAPE, sort=False):
        ours = reached.loc[shape].to_dict() if shape in reached.index else {}
        line = {"operation": f"{shape[0]}, {shape[1]:,} × {shape[2]:,}", "both (ms)": number(ours.get("median_ms"))}
        for title, key in (("forward", "ceiling_fraction_forward"), ("backward", "backward_fraction")):
            line[f"{title}, of the ceiling"] = percent(ours.get(key))
        for impl, title in [item for item in COLUMNS.items() if item[0] in timed]:
            texts = [over_ours(row) for row in select(group, impl=impl, name=BOTH).to_dict("records")]
            line[f"{title} / ours"] = (texts or ["–"])[0].replace("skipped", "–")
        result.append(line)
    return pd.DataFrame(result)


def over_ours(row: dict) -> str:
    """Returns a contender's time over ours; where that differs by over 5 % between sessions, of all of them."""
    ratios = verdicts.by_session(row, "ratio_to_ours").values()
    return span(ratios) if ratios and max(ratios) > 1.05 * min(ratios) else cell(row, "ratio_to_ours", times)


def findings_kernels(kernels: pd.DataFrame) -> list[str]:
    """Says how near the norms come to the copy rate, and how ours stand to every other implementation."""
    sentences, rows, reached = forms.failures(kernels), contests(kernels), rates(kernels)
    parts = []
    for operation, group in reached[reached["operation"].str.endswith("norm")].groupby("operation", sort=False):
        fractions = {"forward": group["ceiling_fraction_forward"], "backward": group["backward_fraction"]}
        spans = [f"{span(x.dropna(), percent)} {key}" for key, x in fractions.items() if x.notna().any()]
        parts += [f"{operation} {listing(spans)}"] if spans else []
    if parts:
        sentences.append(f"Of the copy rate the norms reach: {'; '.join(parts)}.")
    others = select(rows[rows["verdict"] != ""], name=BOTH, impl=list(CONTENDERS)).groupby("impl", sort=False)
    if parts := [f"{CONTENDERS[impl]} {forms.tally(group)}" for impl, group in others]:
        sentences.append(f"Ours by verdict against each other implementation, forward + backward: {'; '.join(parts)}.")
    return sentences


# --- published ---

MINI_BATCHES = 16
"""The published times of 1,024 images are so many times the mean of a mini-batch of 64."""


def published_rows(steps: pd.DataFrame) -> pd.DataFrame:
    """Returns times (ms) and peak (MiB) of a mini-batch, published and here: variant, way, forward, backward, peak."""
    result = []
    for row in ok_rows(published.load("siglip2")).to_dict("records"):
        is_original, case = row["variant"] == "original", {"variant": row["variant"], "way": row["variant"]}
        there = {phase: row[f"{phase}_ms"] / MINI_BATCHES for phase in ("forward", "backward")}
        result.append({**case, "on": f"{row['gpu']}, published", **there, "peak": row["peak_mib"]})
        both = original(steps) if is_original else row_of(steps, OURS)
        way = both.get("way", ORIGINAL if is_original else OURS)
        forward = row_of(steps, way, phase="forward").get("sustained_ms", math.nan)
        here = {"forward": forward, "backward": both.get("sustained_ms", math.nan) - forward}
        here |= {"way": NAMES[way], "on": f"{steps.attrs['device']}, here"}
        result.append(case | here | {"peak": both.get("peak_bytes", math.nan) / 2**20})
    return pd.DataFrame(result)


def table_published(steps: pd.DataFrame) -> pd.DataFrame:
    """Returns forward, backward and peak as published and here, of a mini-batch and of all 1,024 images."""
    rows = published_rows(steps)
    table = rows[["way", "on"]].copy()
    for phase in ("forward", "backward"):
        table[f"{phase} (ms)"] = rows[phase].map(number)
        table[f"{phase} × {MINI_BATCHES} (ms)"] = [number(MINI_BATCHES * value, 4) for value in rows[phase]]
    return table.assign(**{"peak (MiB)": rows["peak"].map("{:,.0f}".format).replace("nan", "–")})


def findings_published(steps: pd.DataFrame) -> list[str]:
    """Says what the published change gave there, and what ours gives here."""
    gains = {}
    for is_here, rows in published_rows(steps).groupby(lambda place: place % 2):
        first, last = (select(rows, variant=variant).iloc[0] for variant in ("original", "optimized"))
        gains[is_here] = [f"{times(first[phase] / last[phase])} {phase}" for phase in ("forward", "backward")]
    if any(gain.startswith("–") for gain in gains[1]):
        return []
    there, here = (listing(gains[place]) for place in (0, 1))
    return [f"Original over optimized: published {there}; here {here}, sustained."]


def front(chapter) -> list[tuple[str, str]]:
    """Returns the finding of this chapter for the front page, with the heading that it links to."""
    steps = chapter.records("steps")
    first, last = (original(steps), row_of(steps, OURS)) if len(steps) else ({}, {})
    is_timed = first.get("sustained_ms", 0) > 0 and last.get("sustained_ms", 0) > 0
    if not is_timed or verdicts.ratio(first, last, "sustained_ms").verdict != verdicts.AHEAD:
        return []
    gain, how, launched = times(first["sustained_ms"] / last["sustained_ms"]), "", ""
    if last["is_replayed"]:
        how = ", and replaying it as one CUDA graph,"
        launched = f" (both launched from Python: {launched_ms(first)} and {launched_ms(last)} ms)"
    text = (
        f"**Fusing what stands between its matrix products{how} makes a vision encoder {gain} as fast**: forward + "
        f"backward of {workload_name(steps)}, sustained: {NAMES[first['way']]} {number(first['sustained_ms'])} ms, "
        f"fused {number(last['sustained_ms'])}{launched}, peak {gib(first['peak_bytes'])} and "
        f"{gib(last['peak_bytes'])} GiB."
    )
    return [(text, "The encoder, step by step")]
