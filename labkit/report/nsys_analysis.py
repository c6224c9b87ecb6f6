"""Notebook 02 from its records: what a step's kernel time goes to, kernel by kernel, and how a profile is read.

Every function takes frames of records as `Chapter.records` returns them. Kernel times are device times. The host's
times are those under the profiler, except where a step is said to be without.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import pandas as pd
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from labkit import published
from labkit.configs import BATCH_SIZE, SIZES
from labkit.report import figures, forms, profiles, verdicts
from labkit.report.text import count, listing, number, percent, span, times
from labkit.report.forms import case_name, name, shown
from labkit.report.profiles import CASE, CLASSES, STEPS, attention_times, classes, tables_of, whole_steps
from labkit.report.tables import PHASE_NAMES, in_order, ok_rows, once_per_frame, select, usable

_COLOURS = "#0072b2 #8a1c20 #f0e442 #009e73 #56b4e9 #000000 #e69f00 #8c6d31 #5d3a9b #b0b0b0".split()
CLASS_COLOURS = dict(zip(CLASSES, _COLOURS, strict=True))
IDLE = 0.1  # a device is called idle from a tenth of a step on
CLASS_HATCHES = {"elementwise": "///", "copy": "...", "optimizer": "\\\\\\"}


def columns(rows: pd.DataFrame, **shown_as: tuple[str, Callable]) -> pd.DataFrame:
    """Returns size, context and precision of each row, and for each title a column's values by its form."""
    if rows.empty:
        return rows
    return rows[CASE[:3]].assign(**{title: rows[column].map(form) for title, (column, form) in shown_as.items()})


def milliseconds(value: float) -> str:
    """Returns µs as ms."""
    return number(value / 1e3)


def table_passes(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns an inference pass (ms) as the host's range, the host's clock, the projection and the kernels give it."""
    passes = usable(select(frame, phase="inference", attention="eager"), "inference_projected_ms")
    rows = in_order(shown(passes), ["precision", "size"])
    return columns(rows, launches=("num_launches", "{:,.0f}".format), **{
        "host range": ("issued_ms", number), "host clock": ("done_ms", number),
        "projection": ("inference_projected_ms", number), "kernels": ("inference_kernel_ms", number)})  # fmt: skip


def findings_passes(frame: pd.DataFrame) -> list[str]:
    """Says how a range on the host, the host's clock and the kernels differ, and what marking ranges changes."""
    sentences, rows = forms.failures(frame), ok_rows(frame, attention="eager")
    if len(passes := select(rows, phase="inference")):
        early, off = (passes[time] / passes["inference_projected_ms"] for time in ("issued_ms", "done_ms"))
        sentences.append(
            f"A range on the host ends when its kernels are issued: for {name(passes.loc[early.idxmin()])} after "
            f"{percent(early.min())} of the projected time. The host's clock around the same pass, with a "
            f"synchronisation, differs from the projection by {percent((off - 1).abs().max())} at most "
            f"({count(len(passes), 'case')})."
        )
    if len(rows):
        marked = rows["done_with_ranges_ms"] / rows["done_ms"]
        sums = [tables_of(rows, which).groupby([*CASE, "record"])["total_us"].sum() for which in ("ranges", "classes")]
        alike = (sums[0] / sums[1] - 1).abs().max() <= verdicts.LEVEL_BAND < marked.max() - 1
        sentences.append(
            f"Marking every block and part makes a step last up to {times(marked.max())} as long on the host's clock "
            f"({name(rows.loc[marked.idxmax()])}); its kernels take {span(sums[0] / sums[1])} their time without"
            f"{': trust the kernel times of a profile, not its gaps' if alike else ''}."
        )
    return sentences


def table_classes(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns each class's share (%) of kernel time in inference → in a whole step, by size and precision."""
    steps = whole_steps(shown(select(frame, attention="eager"))).rename(columns={"phase": "view"})[[*CASE, "view"]]
    inference = select(classes(frame), view="inference").drop(columns="view")
    rows = steps.merge(classes(frame), on=[*CASE, "view"]).merge(inference, "left", CASE, suffixes=("", "_before"))
    named = ("matmul", "elementwise", "copy", "softmax", "reduction")
    rest = 1 - sum(rows[f"{c}_share"] for c in (*named, "optimizer"))
    shares = rows.assign(rest_share=rest, optimizer_share=rows["optimizer_share"].replace(0, math.nan))
    text = (100 * shares.filter(like="_share")).map("{:.1f}".format).astype(str).replace("nan", "–")
    told = {c: text[f"{c}_share_before"] + " → " + text[f"{c}_share"] for c in named}
    told |= {"AdamW": text["optimizer_share"]} | ({"rest": text["rest_share"]} if rest.max() >= 0.001 else {})
    return columns(rows, **{"step (ms)": ("total_us", milliseconds)}).assign(**told)


def findings_classes(frame: pd.DataFrame) -> list[str]:
    """Says what share matmuls have by precision, how it moves from inference to a whole step, and what casts add."""
    sentences, rows = [], in_order(select(classes(frame), attention="eager"), ["precision"])
    steps, inference = (select(rows, view=view).set_index(CASE) for view in ("train_step", "inference"))
    if len(steps):
        shares = dict(iter(steps["matmul_share"].groupby("precision", sort=False)))
        parts = [f"{span(share, percent)} in {key} ({count(len(share), 'case')})" for key, share in shares.items()]
        text = f"Of a training step's kernel time matrix products take {listing(parts)}."
        if {"fp32", "bf16"} <= set(shares) and shares["bf16"].max() < shares["fp32"].min():
            text += " bf16 shortens the products most; masks and softmax stay in fp32 and move as many bytes."
        sentences.append(text)
    if len(moves := 100 * (steps["matmul_share"] - inference["matmul_share"]).dropna()):
        by_precision = moves.groupby("precision", sort=False)
        parts = [f"{span(move, '{:+.1f}'.format)} points in {key}" for key, move in by_precision]
        sentences.append(
            f"From inference to the training step the products' share moves by {listing(parts)}: backward has twice "
            "the products and about twice the rest, and AdamW, fused over many tensors, takes "
            f"{span(steps['optimizer_share'], percent)}, most where tokens are few."
        )
    if len(casts := whole_steps(frame).query("num_casts > 0 and precision != 'fp32'")):
        shares = (casts["num_casts"] / casts["num_launches"]).groupby(casts["precision"], sort=False)
        sentences.append(
            f"Of a step's launches {listing(f'{span(share, percent)} in {key}' for key, share in shares)} only "
            "change a dtype: autocast keeps parameters in fp32 and casts them at each use."
        )
    return sentences


def figure_classes(frame: pd.DataFrame) -> Figure | None:
    """One panel per size (three at most): kernel time per 1,000 tokens by class; a bar per context, eager and flash."""
    precision = "bf16" if "bf16" in set(ok_rows(frame)["precision"]) else "fp32"
    steps = whole_steps(frame, precision=precision)
    if steps.empty:
        return None
    sizes = (steps[steps["phase"] == steps["phase"].max()])["size"].unique()  # "train_step" where there is one
    sizes = list(dict.fromkeys([sizes[0], sizes[len(sizes) // 2], sizes[-1]]))
    asked = select(frame, phase=STEPS, precision=precision)[[*CASE, "phase"]].rename(columns={"phase": "view"})
    rows = asked.merge(classes(frame), "left", [*CASE, "view"])
    rows = rows.sort_values(["context", "attention"], ascending=[True, False])
    present = [c for c in CLASSES if rows[f"{c}_share"].max() > 0.001]
    figure, axes = figures.panels(len(sizes), height=3.0)
    for axis, size in zip(axes, sizes, strict=True):
        bars = select(rows, size=size)
        bottom = pd.Series(0.0, index=bars.index)
        for kernel_class in present:
            height = bars[f"{kernel_class}_share"] * bars["total_us"] / BATCH_SIZE / bars["context"]  # µs a token
            look = {"color": CLASS_COLOURS[kernel_class], "hatch": CLASS_HATCHES.get(kernel_class, "")}
            axis.bar(range(len(bars)), height, 0.85, bottom, edgecolor="white", linewidth=0, **look)
            bottom += height
        for place in [place for place, time in enumerate(bars["total_us"]) if time != time]:
            axis.text(place, 0, "×", ha="center", va="bottom")
        labels = bars["context"].astype(str) + bars["attention"].map({"eager": ""}).fillna(" F")
        axis.set_xticks(range(len(bars)), labels, fontsize=7, rotation=90)
        axis.set(xlabel="context (tokens)", ylabel="ms per 1,000 tokens", title=size)
        axis.grid(axis="x", visible=False)
    _class_legend(figure, present, CLASS_HATCHES)
    title = f"Kernel time of a step by class, {precision}, device time, {frame.attrs['device']}"
    figure.suptitle(f"{title} (F: our FlashAttention, ×: not captured)", fontsize=10)
    return figure


def _class_legend(figure: Figure, present: Sequence[str], hatches: Mapping[str, str]) -> None:
    looks = {c: {"fc": CLASS_COLOURS[c], "hatch": hatches.get(c, "")} for c in CLASS_COLOURS if c in present}
    handles = [Patch(label=c, ec="white", lw=0, **look) for c, look in looks.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 8))


def shown_case(frame: pd.DataFrame) -> dict:
    """Returns the eager case that stands for the others: with AdamW, in bf16, of the largest size, where captured."""
    rows = in_order(shown(whole_steps(select(frame, attention="eager"))), ["phase", "precision", "size"])
    return rows.iloc[-1][CASE].to_dict() if len(rows) else {}


def table_kernels(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns the kernels with most time in forward and backward together, and the same ones in forward alone."""
    rows = select(profiles.kernels(frame), **(case := shown_case(frame))).drop_duplicates(["view", "short_name"])
    both = select(rows, view="forward_backward").sort_values("total_us", ascending=False).head(10)
    forward = select(rows, view="forward").set_index("short_name").reindex(both["short_name"])
    table = both[["kernel", "role"]].set_axis([f"kernel of {name(case)}" if case else "kernel", "what it does"], axis=1)
    for title, of_view in (("forward", forward), ("both", both)):
        table[f"{title} (ms)"] = of_view["total_us"].map(milliseconds).tolist()
        table[f"launches, {title}"] = of_view["launches"].map("{:,.0f}".format).replace("nan", "–").tolist()
        table[f"share, {title}"] = of_view["share"].map(percent).tolist()
    return table


def findings_kernels(frame: pd.DataFrame) -> list[str]:
    """Says which kernel leads the forward pass, and whether it leads with backward too."""
    best, case, sentences = profiles.top_kernels(frame), shown_case(frame), []
    leads = [
        f"{row['kernel']} in {row['precision']} ({row['launches']:,} launches, {percent(row['share'])} of the pass)"
        for row in select(best, view="forward").to_dict("records")
        if (row["size"], row["context"]) == (case["size"], case["context"])
    ]
    both = best.set_index([*CASE, "view"])["kernel"].unstack("view").reindex(columns=["forward", "forward_backward"])
    if leads and len(both := both.dropna()):
        sentences.append(
            f"Most forward time of {case_name(case)} goes to {listing(leads)}. With backward included the same "
            f"one leads in {(both['forward'] == both['forward_backward']).sum()} of {count(len(both), 'case')}: the "
            "gradients' products have transposed operands, which other kernels serve, and more casts and copies add up."
        )
    return sentences


def table_idle(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns a step's kernels beside the step without a profiler, the device's idle share, and the profiler's cost."""
    rows = in_order(shown(profiles.idle_steps(select(frame, attention="eager"))), ["precision", "size"])
    rows["size"] += rows["phase"].map({"train_step": ""}).fillna(" (no AdamW)")
    rows["idle"] = [
        percent(idle) if idle == idle else f"≤ {percent(most)}"
        for idle, most in zip(rows["idle"], rows["step_idle_fraction"], strict=True)
    ]
    return columns(rows, launches=("num_launches", "{:,.0f}".format), **{
        "kernels (ms)": ("step_kernel_ms", number), "without profiler (ms)": ("unprofiled_ms", number),
        "idle without": ("idle", str), "under profiler (ms)": ("done_ms", number),
        "lengthened": ("lengthened", times)})  # fmt: skip


def _idle_in_calls(rows: pd.DataFrame, calls: pd.DataFrame | None) -> str:
    """Returns a sentence, " …", or nothing where calls of one kind are missing."""
    if calls is None or calls.empty or (calls := profiles.idle_in_calls(rows, calls))["launch_bound"].nunique() < 2:
        return ""
    most = calls.loc[calls["idle"].mask(calls["launch_bound"]).idxmax()]
    notes = {True: "", False: f"; most: {name(most)}, issued after {percent(verdicts.issued(most))}"}
    others, bound = (f"{span(x, percent)} ({len(x)}{notes[kind]})" for kind, x in calls.groupby("launch_bound")["idle"])
    return f" By these kernel times 01's launch-bound calls idle {bound}, its others {others}."


def findings_idle(frame: pd.DataFrame, calls: pd.DataFrame | None = None) -> list[str]:
    """Says in how many steps the device waits, in 01's `calls` too, how long the profiler makes them, what was left."""
    sentences, rows = [], profiles.idle_steps(frame)
    if len(rows):
        idle = rows[rows["idle"] >= IDLE]
        text = f"Without a profiler {len(idle)} of {len(rows)} steps leave the device idle {percent(IDLE)} or more"
        if len(idle):
            us = span(1e3 * idle["step_kernel_ms"] / idle["num_launches"], number)
            text += f": their kernels end before the host launches the next (mean kernel {us} µs)"
        sentences.append(f"{text}.{_idle_in_calls(rows, calls)}")
        if len(longer := rows.dropna(subset=["lengthened"])):
            most, shorter = longer.loc[longer["lengthened"].idxmax()], (longer["lengthened"] < 1).sum()
            sentences.append(
                f"The profiler makes a step {span(longer['lengthened'])} as long (most: {name(most)}, "
                f"{number(most['unprofiled_ms'])} → {number(most['done_ms'])} ms; {count(len(longer), 'step')}"
                f"{f', {shorter} of them shorter: hosts scatter' if shorter else ''})."
            )
    if len(skipped := in_order(select(frame, status="skipped"), ["size"])):
        sentences.append(
            f"{count(len(skipped), 'step')} of {(frame['phase'] != 'inference').sum()} "
            f"({listing(dict.fromkeys(skipped['size']))}) were not tried: by closed form they do not fit."
        )
    return sentences


def figure_timeline(frame: pd.DataFrame) -> Figure | None:
    """A training step from its first launch to its last, kernels above phases and blocks, then one block closer."""
    rows = ok_rows(frame, attention="eager").to_dict("records")
    kept = [row for row in rows if "timeline" in row["observed"]["tables"]]
    if not kept:
        return None
    row = min(kept, key=lambda row: row["precision"] != "bf16")
    table = dict(row["observed"]["tables"]["timeline"])
    names, phases = table.pop("class_names"), [*table.pop("phase_names"), "outside"]
    told = pd.DataFrame(table).assign(end_us=lambda t: t["start_us"] + t["duration_us"])
    told["phase"] = [phases[n] for n in told["phase"]]
    forward = select(told, phase="forward")
    block = select(forward, block=forward["block"].max() // 2)
    corners = [[(a, 1.6), (b, 1.6), (b, 2.4), (a, 2.4)] for a, b in told[["start_us", "end_us"]].to_numpy() / 1e3]
    colours = [CLASS_COLOURS[names[n]] for n in told["kernel_class"]]
    ranges = [(1, phase, rows) for phase, rows in told.groupby("phase", sort=False) if phase != "outside"]
    ranges += [(0, n, rows) for (_, n), rows in told[told["block"] >= 0].groupby(["phase", "block"], sort=False)]
    figure, axes = figures.panels(2, num_columns=1, width=9, height=1.6)
    cost = [number(row[time]) for time in ("done_with_ranges_ms", "done_ms", "step_kernel_ms")]
    titles = ("{} ms with every range marked, {} ms with phases alone, both profiled; {} ms of kernels".format(*cost),
              f"block {block['block'].iloc[0]} of the forward pass")  # fmt: skip
    for axis, window, title in zip(axes, (told, block), titles, strict=True):
        low, high = window["start_us"].min() / 1e3, window["end_us"].max() / 1e3
        axis.add_collection(PolyCollection(corners, facecolors=colours, edgecolors="none", rasterized=True))
        for place, (height, text, rows) in enumerate(ranges):
            start, end = max(rows["start_us"].min() / 1e3, low), min(rows["end_us"].max() / 1e3, high)
            axis.barh(height, max(end - start, 0), left=start, height=0.8, color=("0.85", "0.65")[place % 2])
            if (end - start) / (high - low) > 0.012 * len(str(text)):  # wide enough for its label
                axis.text((start + end) / 2, height, text, ha="center", va="center", fontsize=7)
        axis.set(xlim=(low, high), ylim=(-0.5, 2.5), xlabel="time on the device, profiled (ms)", title=title)
        axis.set_yticks([2, 1, 0], ["kernels", "phase", "block"])
        axis.grid(visible=False)
    _class_legend(figure, [names[n] for n in set(told["kernel_class"])], {})
    figure.suptitle(f"{name(row)}, eager attention, {frame.attrs['device']}", fontsize=10)
    return figure


def table_attention(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns softmax beside the two products: time, FLOPs, bytes; attention's share of inference; FlashAttention."""
    found = shown(attention_times(frame))
    flash = select(found, attention="auto")[[*CASE[:3], "core_us"]].rename(columns={"core_us": "flash_us"})
    rows = select(found, attention="eager").merge(flash, "left", CASE[:3])
    return columns(rows, **{
        "products": ("matmul_us", milliseconds), "softmax": ("softmax_us", milliseconds),
        "mask, scale, casts": ("other_us", milliseconds), "softmax / products: time": ("time_ratio", times),
        "FLOPs": ("flop_ratio", times), "bytes": ("bytes_ratio", times),
        "our FlashAttention": ("flash_us", milliseconds), "all / pass": ("block_share", percent)})  # fmt: skip


def findings_attention(frame: pd.DataFrame) -> list[str]:
    """Says how softmax compares with the products, what attention's core is made of, what FlashAttention changes."""
    eager = attention_times(frame).dropna(subset=["time_ratio"])
    sentences, gains = [], []
    if parts := [
        f"{span(rows['time_ratio'])} their time and {span(rows['bytes_ratio'])} their bytes in {precision}"
        for precision, rows in eager.groupby("precision", sort=False)
    ]:
        by_bytes, by_flops = ((eager["time_ratio"] / eager[of]).apply(math.log) for of in ("bytes_ratio", "flop_ratio"))
        is_near = by_bytes.abs().median() < by_flops.abs().median()
        cause = "It does few operations a byte: memory, not arithmetic, sets its time. " if is_near else ""
        sentences = [
            f"Against attention's two products softmax has {span(eager['flop_ratio'])} their FLOPs, {listing(parts)}. "
            f"{cause}Here it is one kernel; the course's softmax of several operators moves the scores several times.",
            f"Between the projections, at context {eager['context'].max():,}, {core_shares(eager)} of the kernel time.",
        ]
    for precision, rows in profiles.flash_steps(frame).groupby("precision", sort=False):
        flash = whole_steps(frame, attention="auto", precision=precision)
        runs = listing(sorted({seen["attention_runs"] for seen in flash["observed"]}))
        gains.append(f"in {precision} ({runs}) {forms.summary(rows, case_name)}")
    if gains:
        sentences.append(
            f"By a step's kernel time, our FlashAttention is {'; '.join(gains)} against eager attention. It saves the "
            "scores' bytes and pays with products recomputed in backward."
        )
    return sentences


def core_shares(eager: pd.DataFrame) -> str:
    """Returns what attention is made of between its projections at the longest context: "in bf16 products take …"."""
    longest = eager[eager["context"] == eager["context"].max()]
    parts = {"products take": "matmul_us", "softmax": "softmax_us", "mask, scaling and casts": "other_us"}
    return "; ".join(
        f"in {precision} "
        + listing(f"{part} {span(rows[time] / rows['core_us'], percent)}" for part, time in parts.items())
        for precision, rows in longest.groupby("precision", sort=False)
    )


def figure_softmax(frame: pd.DataFrame) -> Figure | None:
    """Softmax over the two products by context, a panel per precision: time, bytes and FLOPs, of one size."""
    eager = attention_times(frame).dropna(subset=["time_ratio"])
    if eager.empty:
        return None
    lengths = eager.groupby("size")["context"].nunique()
    size = [size for size in SIZES if lengths.get(size) == lengths.max()][-1]
    ratios = {"time_ratio": "time", "bytes_ratio": "bytes", "flop_ratio": "FLOPs"}
    rows = select(eager, size=size).rename(columns=ratios).assign(status="ok")
    rows = rows.melt(["precision", "context", "status"], list(ratios.values()), "ratio")
    rows.attrs = frame.attrs
    what = {"panel": "precision", "line": "ratio", "x": "context", "y": "value", "label": "softmax / two products"}
    return figures.curves(rows, **what, title=f"Softmax over attention's two products, {size}, inference, device time")


_PUBLISHED = {"xl": "xl-2025", "training": "train_step", "inference_forward": "inference",
              "training_forward": "forward", "training_backward": "backward"}  # fmt: skip
"""Sizes and phases of the published tables, as this project calls them."""


@once_per_frame
def published_profiles(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns published figures beside ours of the same size, context and view, in fp32 with eager attention.

    Columns quantity (with its unit), gpu, size, context, view, published, ours, note. Ours of a kernel is the one with
    most time here, whatever its name; ours of a forward pass is kernel time, theirs is not.
    """
    shares, softmax = published.load("gemm_fraction"), published.load("softmax_vs_matmul")
    softmax = softmax.query("matmul_scope == 'attention_matmuls'")
    shares["note"] = shares["qualifier"].replace({"equal": ""}) + ";" + shares["note"]
    ranked, passes = published.load("kernels_nsys"), published.load("nsys_forward")
    top, result = profiles.top_kernels(frame), []
    for quantity, theirs, value, ours, column in (
        ("matmuls (%)", shares, shares["gemm_percent"],
         classes(frame).assign(percent=lambda t: 100 * t["matmul_share"]), "percent"),
        ("softmax / products", softmax.assign(phase="inference"), softmax["softmax_ms"] / softmax["matmul_ms"],
         attention_times(frame).assign(view="inference"), "time_ratio"),
        ("forward (ms)", passes.assign(phase="forward"), passes["nsys_ms"],
         whole_steps(frame).assign(view="forward"), "forward_kernel_ms"),
        ("first kernel (%)", ranked.query("rank == 1 and ranking == 'all'"), ranked["time_percent"],
         top.assign(percent=lambda t: 100 * t["share"]), "percent"),
    ):  # fmt: skip
        theirs = theirs.assign(published=value, context=theirs["context_length"], quantity=quantity)
        theirs = theirs.assign(size=theirs["model"].replace(_PUBLISHED), view=theirs["phase"].replace(_PUBLISHED))
        ours = select(ours, precision="fp32", attention="eager").rename(columns={column: "ours"})
        keys = ["size", "context", "view"]
        joined = theirs.merge(ours.reindex(columns=[*keys, "ours"]), on=keys)
        result.append(joined[["quantity", "gpu", *keys, "published", "ours", "note"]])
    return pd.concat(result, ignore_index=True).dropna(subset=["published", "ours"])


def with_course(frame: pd.DataFrame, course: pd.DataFrame | None) -> pd.DataFrame:
    """Returns published figures with the column `course`, the same of the model as a course writes it; NaN for none."""
    rows = published_profiles(frame)
    if course is None or ok_rows(course).empty:
        return rows.assign(course=math.nan)
    theirs = published_profiles(course.replace({"attention": "course"}, "eager")).rename(columns={"ours": "course"})
    return rows.merge(theirs.drop(columns="note"), "left", [*rows.columns.drop(["ours", "note"])])


def table_published(frame: pd.DataFrame, course: pd.DataFrame | None = None) -> pd.DataFrame:
    """Returns published figures beside ours, the rows spread over the quantities and GPUs; the CSV file has all."""
    rows = with_course(frame, course).sort_values("course", key=pd.isna, kind="stable")
    rank = rows.groupby(["quantity", "gpu", "view"], sort=False).cumcount()
    rows = rows.loc[sorted(rank.sort_values(kind="stable").index[:6])]
    caveat = rows["note"].fillna("–").str.strip(";").replace({"_": " ", ";": "; "}, regex=True)
    told = {"quantity": rows["quantity"], "of": rows["view"].map(PHASE_NAMES), "published on": rows["gpu"]}
    told |= {"case": [case_name(row) for row in rows.to_dict("records")], "published": rows["published"].map(number)}
    told |= {"here": rows["ours"].map(number)}
    told |= {"here, the course's code": rows["course"].map(number)} if rows["course"].notna().any() else {}
    return pd.DataFrame(told | {"caveat": caveat})


def findings_published(frame: pd.DataFrame, course: pd.DataFrame | None = None) -> list[str]:
    """Says how a published host range grows, and what `course` explains."""
    sentences = []
    hosts = published.load("nvtx_fwd_bwd").query("model == 'small'").rename(columns={"context_length": "context"})
    mine = whole_steps(frame, size="small", precision="fp32", attention="eager")
    both = hosts.merge(mine.reindex(columns=["context", "forward_kernel_ms"]), on="context").sort_values("context")
    if len(both) > 1:
        first, last = both.iloc[0], both.iloc[-1]
        sentences.append(
            f"From context {first['context']} to {last['context']:,} a host range published as the forward pass of "
            f"small ({last['gpu']}) grows {times(last['forward_ms'] / first['forward_ms'])}, our kernel time "
            f"{times(last['forward_kernel_ms'] / first['forward_kernel_ms'])}: the range measures launches."
        )
    return sentences + profiles.findings_course(with_course(frame, course))


def front(chapter) -> list[tuple[str, str]]:
    """Returns the findings of this chapter for the front page, each with the heading that it links to."""
    frame = chapter.records("profiles")
    bf16, found = {"precision": "bf16", "attention": "eager"}, []
    if ok_rows(frame).empty:
        return []
    steps, eager = select(classes(frame), view="train_step", **bf16), select(attention_times(frame), **bf16)
    if len(steps) and steps["matmul_share"].max() < 0.5:
        text = f"**In bf16 most of a step's kernel time is not matrix products.** {findings_classes(frame)[0]}"
        found.append((text, "Where a step's kernel time goes"))
    gains = select(profiles.flash_steps(frame), precision="bf16")
    if len(gains) and len(eager) and (eager["matmul_us"] / eager["core_us"]).max() < 0.5:
        text = (
            f"**Eager attention moves scores rather than multiplying:** at context {eager['context'].max():,}, "
            f"{core_shares(eager)} of its kernel time. Against it our FlashAttention is "
            f"{forms.summary(gains, case_name)} by the kernel time of a whole bf16 step."
        )
        found.append((text, "Inside attention"))
    return found


def symptoms(chapter) -> list[dict[str, str]]:
    """Returns a row for the front page's table of symptoms, with what the remedy gave here."""
    gains = profiles.flash_steps(frame) if len(frame := chapter.records("profiles")) else pd.DataFrame()
    gains = select(gains, precision="bf16", verdict=verdicts.AHEAD)
    if gains.empty:
        return []
    told = {"what you see": "masks, casts and softmax take most of attention's time", "what to do": "FlashAttention"}
    told["what it gave here"] = f"{span(gains['ratio'])} over eager in bf16 (device time of a step)"
    return [told | {"what bounds it": "memory: every score is written and read several times"}]
