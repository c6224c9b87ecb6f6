"""Notebook 06 from its records: errors, tiles, one head over all lengths, full shapes, memory, what was tried.

"Ours" is what `impl="auto"` runs for a shape. A phase of a contest is "<implementation> <pass>". A ratio is the other's
time over ours: above 1 ours is faster. Device times, call times and single calls with a flushed cache never mix.
"""

import itertools
from importlib import resources
from operator import itemgetter

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from labkit import published
from labkit.configs import LEADERBOARD
from labkit.report import figures, forms, verdicts
from labkit.report.chapter import kinds_of_time
from labkit.report.text import count, listing, number, percent, span, times
from labkit.report.tables import PHASE_NAMES, cell, ok_rows, once_per_frame, pivot, select


class _Names(dict):
    """Names of implementations; one that only older records have is called as it is there."""

    def __missing__(self, impl: str) -> str:
        return impl


NAMES = _Names({
    "auto": "ours", "gluon": "Gluon (ours)",
    "triton": "Triton (ours)", "triton_tf32": "Triton, TF32 (ours)", "triton_ieee": "Triton, CUDA cores (ours)",
    "tiled": "tiled PyTorch (ours)", "fa3": "FlashAttention-3", "fa3_deterministic": "FlashAttention-3, deterministic",
    "sdpa_cudnn": "SDPA cuDNN", "sdpa_flash": "SDPA flash", "sdpa_efficient": "SDPA efficient",
    "flex": "FlexAttention", "compiled": "compiled", "eager": "eager",
})  # fmt: skip
"""Implementations in the order and under the names in which this chapter shows them."""

OURS = ("gluon", "triton", "triton_tf32", "triton_ieee", "tiled")
SAME_FORWARD = ("fa3_deterministic",)  # as another implementation's
REFERENCES = ("fa3", "sdpa_cudnn", "sdpa_flash", "sdpa_efficient", "eager")  # times are shown over the first measured
# Of few shapes, or in the figure: outside fp32 the CSV file alone has them.
CSV_ONLY = ("compiled", "eager")
SHAPE = ["batch", "heads", "length", "d_head", "causal"]
PRECISIONS = ("bf16", "fp32", "tf32")


@once_per_frame
def results(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns the rows of a contest with their phase as two columns, impl and name, implementations in order."""
    rows = frame.assign(impl=frame["phase"].str.split(" ").str[0], name=frame["phase"].str.split(" ").str[1])
    rank = rows["impl"].map({impl: rank for rank, impl in enumerate(NAMES)})
    keys = [key for key in ("d_head", "length") if key in rows]
    return rows.assign(rank=rank).sort_values([*keys, "rank"], kind="stable").reset_index(drop=True)


@once_per_frame
def compared(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns the others' measured results, each beside ours of the same shape, precision and pass.

    Adds ours_ms, host_bound (one side is), ratio and verdict; of calls and of single calls with a flushed cache
    call_ratio, call_verdict, flush_ratio, flush_verdict: NaN and "" where not measured.
    """
    rows, case, found = ok_rows(results(frame)), itemgetter(*SHAPE, "precision", "name"), []
    ours = {case(row): row for row in select(rows, is_auto=1).to_dict("records")}
    for row in rows[~rows["impl"].isin(OURS)].to_dict("records"):
        if (mine := ours.get(case(row))) is None:
            continue
        ratio = verdicts.paired(row) if pd.notna(row.get("ratio_to_ours")) else verdicts.ratio(row, mine)
        line = {"ours_ms": mine["median_ms"], "ratio": ratio.mid, "verdict": ratio.verdict}
        for kind, column in (("call", "host_median_ms"), ("flush", "flush_median_ms")):
            both = pd.notna(row.get(column)) and pd.notna(mine.get(column))
            mid = row[column] / mine[column] if both else float("nan")
            # Not timed in turn: the noise of two sessions.
            word = verdicts.widened(mid, mid, mid, verdicts.NOISE["call", False]).verdict if both else ""
            line |= {f"{kind}_ratio": mid, f"{kind}_verdict": word}
        found.append(row | line | {"host_bound": verdicts.host_bound(row) or verdicts.host_bound(mine)})
    return pd.DataFrame(found)


def _verdict(row: dict, kind: str = "") -> str:
    return f"{row[kind + 'verdict']} {times(row[kind + 'ratio'])}" if row[f"{kind}verdict"] else "–"


def shape_name(row: dict) -> str:
    """Returns "4,32,4096,64 causal": batch, heads, length, head dimension, mask."""
    return f"{row['batch']},{row['heads']},{row['length']},{row['d_head']} {'causal' if row['causal'] else 'full'}"


def _at(row: dict) -> str:
    return f"d {row['d_head']} at {row['length']:,}"


def figure_online_softmax(algorithm: pd.DataFrame) -> Figure | None:
    """Three panels over the tiles of keys: running maximum, running denominator, distance to the final output."""
    rows = ok_rows(algorithm, phase="trace").sort_values("tile").head(1)
    figure, axes = figures.panels(3)
    labels = {"maximum": "largest score", "denominator": "Σ exp(score − maximum)", "distance": "distance / norm"}
    for (name, label), row in itertools.product(labels.items(), rows.to_dict("records")):
        axis = axes[list(labels).index(name)]
        for index, key in enumerate(key for key in sorted(row["samples"]) if key.endswith(name)):
            values, style = row["samples"][key], {"color": figures.SERIES[index], "marker": "osD^v"[index % 5]}
            axis.plot(range(1, len(values) + 1), values, markersize=3, label=key.removesuffix(f" {name}"), **style)
        title = "distance to the final output" if name == "distance" else f"running {name}"
        axis.set(xlabel=f"tiles of {row['tile']} keys seen", ylabel=label, title=title)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    figures.finish(figure, axes, f"Online softmax, fp32, {algorithm.attrs['device']}")
    return figure if len(rows) else None


def table_errors(*contests: pd.DataFrame) -> pd.DataFrame:
    """Returns by implementation and precision the worst error over what is allowed, and of how many results."""
    rows, lines = pd.concat([results(frame) for frame in contests], ignore_index=True), {}
    rows = rows[~rows["impl"].isin(SAME_FORWARD)]
    for (impl, precision), group in rows.groupby(["impl", "precision"]):
        passed, wrong = ok_rows(group), int(group["reason"].str.contains("wrong:").sum())
        if len(passed) + wrong:
            line = lines.setdefault(impl, {"implementation": NAMES[impl]})
            line[precision] = f"{number(passed['budget_fraction'].max(), 2)} of {len(passed)}" if len(passed) else "–"
            line[precision] += f", {wrong} wrong" if wrong else ""
    return pd.DataFrame([lines[impl] for impl in NAMES if impl in lines]).fillna("–")


def findings_errors(algorithm: pd.DataFrame, *contests: pd.DataFrame) -> list[str]:
    """Says how exact the algorithm is, and that everything timed was right first."""
    errors, sentences = ok_rows(algorithm, phase="errors"), []
    for row in ok_rows(algorithm, phase="trace").sort_values("tile").head(1).to_dict("records"):
        maxima = [values for key, values in row["samples"].items() if key.endswith("maximum")]
        moves = [sum(later > earlier for earlier, later in itertools.pairwise(values)) for values in maxima]
        ratio = span(errors["out_relative_error"] / errors["out_eager_relative_error"]) if len(errors) else "–"
        sentences.append(
            f"Tile by tile, the output has {ratio} the error of the untiled formula. {span(moves, str)} of "
            f"{len(maxima[0]) - 1} later tiles raise a query's maximum; only then is what it holds rescaled."
        )
    rows = pd.concat([results(frame) for frame in contests], ignore_index=True)
    for row in ok_rows(rows).nlargest(1, "budget_fraction").to_dict("records") if len(ok_rows(rows)) else []:
        case = f"{NAMES[row['impl']]}, {row['precision']}, {PHASE_NAMES[row['name']]}, {_at(row)}"
        share, passed = percent(row["budget_fraction"]), f"All {len(ok_rows(rows)):,} timed results had passed the gate"
        sentences.append(f"{passed}, at worst with {share} of the error allowed ({case}).")
    return sentences + forms.failures(rows)


def table_tiles(tiles: pd.DataFrame) -> pd.DataFrame:
    """Returns TFLOP/s of the Triton forward kernel, a row per rows of the query tile, a column per key tile."""
    corner = "query tile, key tile →"
    rows = tiles.rename(columns={"block_q": corner}).assign(key_tile=tiles["block_k"])
    marks = {1: " (shipped)"}
    return pivot(rows, [corner], "key_tile", lambda r: cell(r, "achieved_tflops") + marks.get(r.get("is_shipped"), ""))


def findings_tiles(tiles: pd.DataFrame) -> list[str]:
    """Says how much the tiles matter, and whether the shipped ones are the fastest."""
    if not (rows := sorted(ok_rows(tiles).to_dict("records"), key=itemgetter("median_ms"))):
        return forms.failures(tiles)
    names = [f"{row['block_q']} × {row['block_k']}" for row in rows]
    slowest, kind = times(rows[-1]["median_ms"] / rows[0]["median_ms"]), kinds_of_time([tiles])
    text = f"Tiles of {names[0]} are the fastest of {len(rows)}; {names[-1]} takes {slowest} their {kind}: larger "
    text += "tiles read less and compute more per byte, up to a size."
    for name, row in zip(names[1:], rows[1:], strict=True):
        if row.get("is_shipped") == 1:
            text += f" The shipped {name} is {verdicts.ratio(rows[0], row).verdict} with them."
    return [text, *forms.failures(tiles)]


def findings_weighted_sum(frame: pd.DataFrame) -> list[str]:
    """Says how the first kernel compares with the formula, eager and compiled."""
    rows, parts = results(frame), []
    for impl in ("eager", "compiled"):
        pairs = forms.pairs(select(rows, impl=[impl, "triton"]), "impl", impl, keys=["rows", "dim", "name"])
        parts += [f"{forms.tally(pairs)} against {impl}"] if len(pairs) else []
    why = "eager writes the products and reads them again; fusing avoids that"
    return [f"The weighted sum's kernel: {'; '.join(parts)}, {kinds_of_time([rows])}; {why}."] if parts else []


def _with_ours(rows: pd.DataFrame) -> pd.DataFrame:
    """Returns the rows with what `auto` runs as "auto", without our other implementations."""
    rows = rows.assign(impl=rows["impl"].mask(rows.reindex(columns=["is_auto"])["is_auto"] == 1, "auto"))
    return rows[~rows["impl"].isin(OURS)]


def figure_lengths(speed: pd.DataFrame) -> Figure | None:
    """Forward + backward by length, at two head dimensions: the timer's time over the reference's, and calls' in ms."""
    rows = ok_rows(results(speed), name="forward_backward")
    rows = _with_ours(select(rows, precision="bf16" if "bf16" in set(rows["precision"]) else "fp32"))
    dims = [d for d in (64, 128) if d in set(rows["d_head"])] or sorted(set(rows["d_head"]))[-1:]
    kinds = {"median_ms": kinds_of_time([rows]), "host_median_ms": "call time"}
    base = next((impl for impl in REFERENCES if impl in set(rows["impl"])), None)
    columns = [(column, d) for column in kinds if column in rows and base for d in dims]
    bases = {"median_ms": base, "host_median_ms": None}  # one slow call of the reference's would move all others
    shown = [(f"d {d}, {kinds[column]}", select(rows, d_head=d), column, bases[column]) for column, d in columns]
    title = f"Forward + backward of one causal head, {'/'.join(set(rows['precision']))}, {speed.attrs['device']}"
    return figures.over(shown, "length", "impl", "time", NAMES, title) if shown else None


def table_lengths(speed: pd.DataFrame) -> pd.DataFrame:
    """Returns how ours stands against each other implementation, apart where the host and where the device binds."""
    rows, lines = select(compared(speed), name="forward_backward"), []
    for precision, impl in itertools.product(PRECISIONS, NAMES):
        group = select(rows, precision=precision, impl=impl)
        if len(group) and (precision == "fp32" or impl not in CSV_ONLY):
            host, device, kind = group[group["host_bound"]], group[~group["host_bound"]], kinds_of_time([group])
            line = {"precision": precision, "against": NAMES[impl], "host-bound: call time": forms.tally(host, "call_")}
            line |= {f"host-bound: {kind}": forms.tally(host), f"device-bound: {kind}": forms.tally(device)}
            lines.append(line)
    return pd.DataFrame(lines)


def findings_lengths(speed: pd.DataFrame) -> list[str]:
    """Says where the host binds, how ours stands against the reference by kind of time, and what fp32 gains."""
    both, sentences = select(compared(speed), precision="bf16", name="forward_backward"), []
    rival = next((impl for impl in REFERENCES if len(both) and impl in set(both["impl"])), None)
    of_rival = select(both, impl=rival)
    host, device = (select(of_rival, host_bound=bound) if rival else of_rival.iloc[:0] for bound in (True, False))
    if len(host):
        sentences.append(
            f"In {len(host)} of {count(len(of_rival), 'case')}, up to length {host['length'].max():,}, issuing a call "
            f"takes longer than running it. In call time, ours against {NAMES[rival]}: {forms.tally(host, 'call_')}. A "
            "CUDA graph, or more heads per call, makes the device's time the caller's."
        )
    if rival:
        text = f"In {kinds_of_time([of_rival])} against {NAMES[rival]}: {forms.tally(device)} where the device binds"
        if verdicts.AHEAD in set(host.get("verdict", ())):
            text += f", {forms.tally(host)} where the host does: one short head has few tiles of queries, and ours "
            text += "splits its keys among programs"
        chosen = [seen.get("backward") for seen in ok_rows(results(speed), impl="gluon", name="backward")["observed"]]
        ran = f" {chosen.count('triton')} of {len(chosen)} Gluon backwards ran the Triton kernels." if chosen else ""
        sentences.append(f"{text}.{ran}")
    return sentences + findings_products(speed)


def findings_products(speed: pd.DataFrame) -> list[str]:
    """Says what several products on tensor cores gain over one of fp32 on CUDA cores, and how exact they are."""
    rows, keys = ok_rows(results(speed)), [*SHAPE, "name"]
    fp32 = select(rows, precision="fp32", impl=["triton", "triton_ieee"])
    pairs = forms.pairs(fp32, "impl", "triton_ieee", keys=keys) if len(fp32) else fp32
    if pairs.empty:
        return []
    errors = fp32.pivot_table(index=keys, columns="impl", values="relative_error").dropna()
    ratio, kind = span(errors["triton"] / errors["triton_ieee"]), kinds_of_time([fp32])
    six = fp32[[seen.get("products") == "bf16x6" for seen in fp32["observed"]]]["achieved_tflops"].max()
    sixth = select(rows, precision="bf16").get("ceiling", pd.Series(dtype=float)).median() / 6
    rate = f"; six reach {number(six)} TFLOP/s, {percent(six / sixth)} of a sixth of bf16's" if six / sixth > 0 else ""
    return [
        f"In fp32, three TF32 products or six of bf16 on tensor cores against one on CUDA cores: {forms.tally(pairs)}"
        f", {kind}, with {ratio} its error{rate}."
    ]


def figure_rivals(rivals: pd.DataFrame) -> Figure | None:
    """Two panels, forward and backward: achieved TFLOP/s of every implementation on every shape."""
    rows = ok_rows(results(rivals))
    shapes = list(dict.fromkeys(map(shape_name, rivals.to_dict("records"))))
    figure, axes = figures.panels(2, width=4.5, height=1.0 + 0.34 * len(shapes))
    for axis, name in zip(axes, ("forward", "backward"), strict=True):
        of_pass = select(rows, name=name)
        hidden = SAME_FORWARD if name == "forward" else ()
        for impl in [impl for impl in NAMES if impl in set(of_pass["impl"]) and impl not in hidden]:
            mine, style = select(of_pass, impl=impl), figures.STYLES[impl]
            heights = [shapes.index(shape_name(row)) for row in mine.to_dict("records")]
            axis.scatter(mine["achieved_tflops"], heights, color=style.colour, marker=style.marker, label=NAMES[impl],
                         s=50 if impl in OURS else 26, zorder=3)  # fmt: skip
        if len(roof := of_pass.get("ceiling", pd.Series(dtype=float)).dropna()):
            axis.axvline(roof.median(), color="0.2", linestyle="--", linewidth=1, label="measured matrix product")
        axis.set_yticks(range(len(shapes)), shapes if name == "forward" else [""] * len(shapes))
        axis.set_xlim(left=0)
        axis.set(ylim=(len(shapes) - 0.5, -0.5), xlabel="achieved rate (TFLOP/s)", title=PHASE_NAMES[name])
    title = f"Attention by batch, heads, length and d, {'/'.join(set(rows['precision']))}, {kinds_of_time([rows])}"
    figures.finish(figure, axes[::-1], f"{title}, {rivals.attrs['device']}", num_columns=4)
    return figure if len(rows) else None


def strongest(rivals: pd.DataFrame) -> tuple[str | None, pd.DataFrame]:
    """Returns the other implementation with the smallest time over ours by the median over the shapes, and its rows."""
    rows = compared(rivals)
    both = select(rows, name="forward_backward")
    rival = both.groupby("impl")["ratio"].median().idxmin() if len(both) else None
    return rival, select(rows, impl=rival)


def table_rivals(rivals: pd.DataFrame) -> pd.DataFrame:
    """Returns by shape the verdict on ours against the strongest other, with its time over ours, by pass and kind."""
    rival, rows = strongest(rivals)
    by_shape = {}
    for row in rows.to_dict("records"):
        line = by_shape.setdefault(shape_name(row), {f"against {NAMES[rival]}": shape_name(row)})
        if row["name"] == "forward_backward":
            line |= {"ours, both (ms)": number(row["ours_ms"]), "both": _verdict(row)}
            line |= {f"both, {kind}": _verdict(row, f"{kind}_") for kind in ("flush", "call")}
        else:
            line |= {row["name"]: _verdict(row)}
    return pd.DataFrame(by_shape.values()).fillna("–")


def findings_rivals(rivals: pd.DataFrame) -> list[str]:
    """Says how ours stands against the strongest, against it at equal repeatability, and against all others."""
    both, (rival, of_rival) = select(compared(rivals), name="forward_backward"), strongest(rivals)
    if rival is None:
        return []
    forward, own = (select(of_rival, name=name) for name in ("forward", "forward_backward"))
    text = f"Against {NAMES[rival]} in {kinds_of_time([both])}, forward: {forms.tally(forward)}; forward + backward: "
    text += f"{forms.tally(own)}."
    for row in own.to_dict("records"):
        if (row["verdict"], row["call_verdict"]) == (verdicts.AHEAD, verdicts.BEHIND):
            text += f" In call time {shape_name(row)} is {_verdict(row, 'call_')}: issuing ours takes longer."
    sentences = [text]
    if len(other := select(both, impl="fa3_deterministic")):
        sentences.append(
            f"Our gradients are bitwise repeatable, {NAMES['fa3']}'s only in its deterministic form; against that, "
            f"forward + backward: {forms.tally(other)}. A fixed order of sums costs time."
        )
    rest = set(both["impl"]) - {"fa3", "fa3_deterministic", rival}
    parts = [f"{NAMES[impl]} {forms.tally(select(both, impl=impl))}" for impl in NAMES if impl in rest]
    return sentences + ([f"Forward + backward against the others: {'; '.join(parts)}."] if parts else [])


def peaks(memory: pd.DataFrame, speed: pd.DataFrame) -> list[tuple[str, pd.DataFrame, str]]:
    """Returns by precision the peaks of forward + backward, ours as "auto", and the other that needs least.

    What "auto" runs at a length, `speed` says: beyond its lengths what it runs at the longest.
    """
    found = []
    for precision in PRECISIONS:
        rows = select(memory, phase="forward_backward", precision=precision)
        wanted = {"is_auto": 1, "name": "forward_backward", "precision": precision, "d_head": set(rows["d_head"])}
        runs = select(results(speed), **wanted) if len(speed) else speed
        auto = dict(zip(runs["length"], runs["impl"], strict=True)) if len(runs) else {}
        ours = rows["length"].map(auto).fillna(runs["impl"].iloc[-1]) if auto else None
        rows = _with_ours(rows.assign(is_auto=rows["impl"] == ours))
        others = ok_rows(rows)[lambda r: r["impl"] != "auto"]
        if auto and len(others):
            over = others["peak_bytes"] / others.groupby("length")["peak_bytes"].transform("min")
            found.append((precision, rows, over.groupby(others["impl"]).mean().round(2).idxmin()))
    return found


def figure_memory(memory: pd.DataFrame, speed: pd.DataFrame) -> Figure | None:
    """One panel per precision: peak memory over that of the leanest other implementation, × where it ran out."""
    shown = [(precision, rows, "peak_bytes", base) for precision, rows, base in peaks(memory, speed)]
    title = f"Peak memory, forward + backward of one head, {memory.attrs['device']} (× out of memory)"
    return figures.over(shown, "length", "impl", "peak", NAMES, title) if shown else None


def table_memory(memory: pd.DataFrame, speed: pd.DataFrame) -> pd.DataFrame:
    """Returns peaks of forward + backward in MiB by length: ours, the leanest other and eager, by precision."""
    shown = [
        select(rows, impl=["auto", base, "eager"]).assign(who=lambda r, of=precision: of + ": " + r["impl"].map(NAMES))
        for precision, rows, base in peaks(memory, speed)
    ]
    rows = pd.concat(shown) if shown else memory.iloc[:0].assign(who="")
    return pivot(rows, ["length"], "who", lambda row: cell(row, "peak_bytes", lambda size: number(size / 2**20)))


def findings_memory(memory: pd.DataFrame, speed: pd.DataFrame) -> list[str]:
    """Says where others run out of memory, how our peak grows from length to length, and where it is too large."""
    lost, growth = [], []
    for precision, rows, base in peaks(memory, speed):
        ours, lowest = (ok_rows(rows, impl=impl).set_index("length")["peak_bytes"] for impl in ("auto", base))
        for row in forms.out_of_memory(rows, ["impl"], x="length").dropna(subset=["out_of_memory"]).to_dict("records"):
            need = number(ours.get(row["out_of_memory"], float("nan")) / 2**20)
            lost.append(f"{NAMES[row['impl']]} in {precision} at {int(row['out_of_memory']):,}, ours needs {need} MiB")
        steps, over = (ours.sort_index() / ours.sort_index().shift()).dropna(), (ours / lowest).dropna()
        if len(steps) and len(over):
            exact = [verdicts.exact(ours[length], lowest[length]) for length in over.index]
            counts = listing(f"{word} at {exact.count(word)}" for word in verdicts.VERDICTS if word in exact)
            growth.append(
                f"in {precision} {span(steps)} from length to length, most to {steps.idxmax():,}; against {NAMES[base]}"
                f" {counts} of {len(exact)} lengths, at worst {times(over.max())} at {over.idxmax():,}"
            )
    sentences = [f"Out of memory: {'; '.join(lost)}. Scores grow with the square of the length."] if lost else []
    why = "Where tiles are few, their loops are split among programs, and each split keeps results of its own in fp32."
    return sentences + ([f"Our peak grows unevenly, {'; '.join(growth)}. {why}"] if growth else [])


def versions() -> pd.DataFrame:
    """Returns what was tried on the kernels, noted while they were written: see the README beside the file."""
    file = resources.files("labkit") / "data" / "development" / "flash_attention_versions.csv"
    return pd.read_csv(str(file), keep_default_na=False, na_values={"gained_percent": [""]})


def table_versions(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns the ten kept changes that gained most, with the gain in speed predicted and measured."""
    best = frame[frame["kept"] == "yes"].nlargest(8, "gained_percent").drop_duplicates(["pass", "change"])
    gains = {"predicted": "predicted_percent", "measured": "gained_percent"}
    rows = best[["pass", "change", "shape"]].rename(columns={"shape": "B,H,S,D"})
    return rows.assign(**{name: [f"{value:+.0f} %" for value in best[column]] for name, column in gains.items()})


def published_times(speed: pd.DataFrame) -> pd.DataFrame:
    """Returns published times beside ours of the same shape, precision and pass, where the device binds here.

    The published kind of time is unknown, and where the host binds, device and call time are far apart.
    """
    rows = ok_rows(results(speed)).assign(phase=lambda r: r["name"])
    rows = rows[[not verdicts.host_bound(row) for row in rows.to_dict("records")]]
    table, parts = published.load("flash_attention").rename(columns={"seq_len": "length", "d_model": "d_head"}), []
    table["precision"] = table["dtype"].map({"float32": "fp32", "bfloat16": "bf16"})
    table["caveat"] = table["precision"].map({"fp32": "TF32 allowed there", "bf16": ""})
    kernels = {"Triton": ("triton", select(rows, is_auto=1)), "compiled": ("pytorch", select(rows, impl="compiled"))}
    keys = ["length", "d_head", "precision", "phase"]
    for (kernel, (column, ours)), phase in itertools.product(kernels.items(), ("forward", "forward_backward")):
        times_there = table[f"{'fwd' if phase == 'forward' else 'e2e'}_{column}_ms"]
        theirs = table.assign(kernel=kernel, phase=phase, published_ms=times_there)
        if (kernel, phase) == ("Triton", "forward_backward"):
            theirs["caveat"] = (theirs["caveat"] + "; backward compiled there").str.strip("; ")
        parts.append(forms.matched(ok_rows(theirs)[["gpu", "kernel", *keys, "published_ms", "caveat"]], ours, keys))
    return pd.concat([part for part in parts if len(part)] or parts[:1], ignore_index=True)


def table_published(speed: pd.DataFrame) -> pd.DataFrame:
    """Returns the published cases of the widest head dimension and the longest length beside ours."""
    rows = published_times(speed)
    rows = select(rows, phase="forward_backward", d_head=rows["d_head"].max(), length=rows["length"].max())
    return forms.published_table(rows, lambda row: f"{row['kernel']}, {row['precision']}, {_at(row)}")


def findings_published(speed: pd.DataFrame, rivals: pd.DataFrame) -> list[str]:
    """Says how ours stands beside a public report's kernels and a leaderboard's entry."""
    groups = published_times(speed).groupby(["kernel", "precision"])
    parts = [f"{kernel} {precision} {span(rows['ratio'])}" for (kernel, precision), rows in groups]
    sentences = [f"Published over ours, where the device binds here: {listing(parts, 8)}."] if parts else []
    board = ok_rows(results(rivals), is_auto=1, name="forward_backward", **vars(LEADERBOARD))
    entries = published.load("attention_kernels").dropna(subset="time_ms").to_dict("records")
    for entry, row in itertools.product(entries, board.to_dict("records")):
        sentences.append(
            f"The course leaderboard's {entry['implementation']}, forward + backward: {number(entry['time_ms'])} ms on "
            f"an {entry['gpu']}, kind of time unknown; ours here {number(row['median_ms'])} ms in "
            f"{kinds_of_time([board])}, {number(row.get('host_median_ms'))} ms in call time."
        )
    return sentences


def front(chapter) -> list[tuple[str, str]]:
    """Returns the finding of this chapter for the front page, with the heading that it links to."""
    rivals = chapter.records("rivals")
    rival, rows = strongest(rivals) if len(rivals) else (None, rivals)
    for best in ok_rows(results(rivals), is_auto=1).nlargest(1, "achieved_tflops").to_dict("records") if rival else []:
        text = f"**Our attention's {best['name']} reaches {number(best['achieved_tflops'])} TFLOP/s; against "
        text += f"{NAMES[rival]}, forward + backward: {forms.tally(select(rows, name='forward_backward'))}** (its time "
        return [(f"{text}over ours, {kinds_of_time([rows])}, full shapes).", "Full shapes against the best")]
    return []
