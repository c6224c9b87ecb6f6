"""Notebook 01 from its records: how long the phases take, warm-up, precision, compilation, the distance to the limit.

Every function takes the data frame that `Chapter.records` returns. A frame without the needed rows gives an
empty table, no figure (None) or no sentence.
"""

import statistics

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from labkit import accounting, published
from labkit.configs import LAUNCH_BOUND, SIZES, WARMUP_COUNTS, WARMUP_MEASURED_STEPS
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
    pivot,
    rows_by,
    spread,
    theirs_and_ours,
)

AGREEMENT = 0.05
"""Two ways to measure the same thing agree when they differ by at most 5 %."""


def _wide(frame: pd.DataFrame, columns: str, value: str = "median_ms", index=("size", "context")) -> pd.DataFrame:
    """Returns the measured values with one column per value of `columns`."""
    measured = ok_rows(frame)
    return measured.pivot_table(index=list(index), columns=columns, values=value, observed=True)


def _case(size: str, context: int, precision: str | None = None) -> str:
    return f"{size} at {context}" + (f" in {precision}" if precision else "")


# ---- ceilings and the timer ----------------------------------------------------------------------------------


def table_ceilings(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns measured rates beside the datasheet's."""
    rows = []
    for row in frame.to_dict("records"):
        is_copy = row["kind"] == "copy"
        unit = "GB/s" if is_copy else "TFLOP/s"
        rate = row.get("achieved_gb_per_s" if is_copy else "achieved_tflops")
        measured = row["status"] == "ok"
        rows.append(
            {
                "ceiling": "copy (read + write)" if is_copy else f"matrix product, {row['precision']}",
                "unit": unit,
                "measured": number(rate) if measured else row["status"],
                "datasheet": number(row.get("datasheet")) if measured else "–",
                "fraction": percent(row.get("datasheet_fraction")) if measured else "–",
            }
        )
    return pd.DataFrame(rows)


def table_timer(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns the same kernel timed by every method, against the independent measurement."""
    measured = ok_rows(frame)
    if measured.empty or "independent" not in set(measured["phase"]):
        return pd.DataFrame()
    reference = measured.set_index("phase")["median_ms"]["independent"]
    return pd.DataFrame(
        {
            "method": row["phase"],
            "median (ms)": number(row["median_ms"], 4),
            "± half of interval": percent(row["half_width_fraction"]),
            "n": int(row["n"]),
            "GB/s": number(row["achieved_gb_per_s"]),
            "to independent": times(row["median_ms"] / reference),
        }
        for row in measured.to_dict("records")
    )


def findings_timer(frame: pd.DataFrame) -> list[str]:
    """Says whether the timer's methods agree with the independent measurement of the same kernel."""
    measured = ok_rows(frame)
    if measured.empty or "independent" not in set(measured["phase"]):
        return []
    medians = measured.set_index("phase")["median_ms"]
    reference = medians.pop("independent")
    worst = (medians / reference - 1).abs().idxmax()
    deviation = medians[worst] / reference - 1
    verdict = "agree" if abs(deviation) <= AGREEMENT else "do **not** agree"
    return [
        f"The timer's methods {verdict} with the independent measurement of the same kernel within "
        f"{percent(AGREEMENT)}: the largest difference is {percent(abs(deviation))} ({worst})."
    ]


# ---- phases ---------------------------------------------------------------------------------------------------


def table_phases(frame: pd.DataFrame, precision: str) -> pd.DataFrame:
    """Returns the median of every phase in ms by size and context; "~" marks an unstable one."""
    rows = frame[frame["precision"] == precision] if not frame.empty else frame
    if rows.empty:
        return pd.DataFrame()

    def text(row: pd.Series) -> str:
        unstable = row["status"] == "ok" and row["half_width_fraction"] > STABLE
        return ("~" if unstable else "") + cell(row)

    return pivot(rows, ["size", "context"], "phase", text).rename(columns=PHASE_NAMES)


def table_all_statistics(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns every statistic of every measured phase, one row per phase, size and context, precisions side by side."""
    if frame.empty:
        return frame
    keys = ["phase", "size", "context"]
    precisions = in_order(frame[["precision"]].drop_duplicates(), ["precision"])["precision"].tolist()
    lines: dict[tuple, dict[str, str]] = {}
    for row in in_order(frame, keys).to_dict("records"):
        key = (PHASE_NAMES[row["phase"]], row["size"], row["context"])
        cells = lines.setdefault(key, {})
        cells |= {f"{row['precision']}: {name}": text for name, text in spread(row).items()}
    names = [f"{precision}: {name}" for precision in precisions for name in STATISTICS]
    return pd.DataFrame(
        {**dict(zip(keys, key, strict=True)), **{name: cells.get(name, "–") for name in names}}
        for key, cells in lines.items()
    )


def figure_phases(frame: pd.DataFrame, precision: str) -> Figure | None:
    """One panel per size: median time of each phase over the context, log axes, p20–p80 band."""
    rows = frame[frame["precision"] == precision] if not frame.empty else frame
    if ok_rows(rows).empty:
        return None
    sizes = [size for size in SIZES if size in set(rows["size"])]
    figure, axes = figures.panels(len(sizes))
    for axis, size in zip(axes, sizes, strict=True):
        of_size = rows[rows["size"] == size]
        for phase in in_order(of_size.drop_duplicates("phase"), ["phase"])["phase"]:
            figures.line_with_band(
                axis,
                of_size[of_size["phase"] == phase],
                "context",
                label=PHASE_NAMES[phase],
                colour=figures.COLOURS[phase],
            )
        figures.context_axis(axis, of_size["context"].unique())
        figures.log_time_axis(axis)
        axis.set_title(size)
    handles, labels = max((axis.get_legend_handles_labels() for axis in axes), key=lambda pair: len(pair[1]))
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    figure.suptitle(
        f"Time per phase, {precision}, {frame.attrs['device']} (band: p20–p80; × out of memory)", fontsize=10
    )
    return figure


def findings_phases(frame: pd.DataFrame) -> list[str]:
    """Says what fits, what backward costs, how steady the times are, and whether the parts add up."""
    return [*_what_fits(frame), *_backward_ratio(frame), *_steadiness(frame), *_sum_of_parts(frame), *_failures(frame)]


def _what_fits(frame: pd.DataFrame) -> list[str]:
    sentences = []
    failed = frame[frame["status"] == "oom"] if not frame.empty else frame
    for size in [size for size in SIZES if not failed.empty and size in set(failed["size"])]:
        of_size = frame[frame["size"] == size]
        parts = []
        for phase in ("inference", "forward_backward", "train_step"):
            rows = of_size[of_size["phase"] == phase]
            fits = sorted(ok_rows(rows)["context"].unique())
            lost = rows[rows["status"] == "oom"]
            if lost.empty:
                parts.append(f"{PHASE_NAMES[phase]} fits at every context")
            elif not fits:
                parts.append(f"{PHASE_NAMES[phase]} fits at none")
            else:
                shortest = in_order(
                    lost.groupby("precision", as_index=False)["context"].min(), ["context", "precision"]
                )
                by_context = shortest.groupby("context")["precision"].apply(list)
                places = listing(f"context {context} in {listing(names)}" for context, names in by_context.items())
                parts.append(f"{PHASE_NAMES[phase]} first runs out of memory at {places}")
        sentences.append(f"**{size}**: {'; '.join(parts)}.")
    return sentences


def _backward_ratio(frame: pd.DataFrame) -> list[str]:
    sentences = []
    for precision in in_order(ok_rows(frame), ["precision"])["precision"].unique() if not frame.empty else []:
        wide = _wide(frame[frame["precision"] == precision], "phase")
        if not {"forward", "backward"} <= set(wide.columns):
            continue
        ratio = (wide["backward"] / wide["forward"]).dropna()
        if len(ratio):
            sentences.append(
                f"Backward takes {span(ratio)} the time of forward in {precision} "
                f"(median {times(ratio.median())}; its FLOPs are twice as many)."
            )
    return sentences


def _steadiness(frame: pd.DataFrame) -> list[str]:
    measured = ok_rows(frame)
    if measured.empty:
        return []
    unstable = measured[measured["half_width_fraction"] > STABLE]
    text = (
        f"Of {len(measured):,} medians, {percent((measured['half_width_fraction'] <= 0.005).mean(), 3)} are known to "
        f"±0.5 % and {percent(1 - len(unstable) / len(measured), 3)} to ±{percent(STABLE)} "
        f"(by an interval that holds the true median with a probability of at least {percent(_coverage(measured))})"
    )
    if len(unstable):
        worst = unstable.sort_values("half_width_fraction").iloc[-1]
        name = f"{PHASE_NAMES[worst['phase']]} of {_case(worst['size'], worst['context'], worst['precision'])}"
        text += f"; the least steady is {name} (±{percent(worst['half_width_fraction'])})"
    few = measured[measured["n"] < 10]
    sentences = [text + "."]
    if len(few):
        sentences.append(
            f"{len(few)} long phases were given fewer than ten samples (at least {int(few['n'].min())}); "
            "the table of all statistics lists their n."
        )
    return sentences


def _coverage(measured: pd.DataFrame) -> float:
    """Returns the least coverage of the rows' intervals; records of measurement version 1 do not state theirs."""
    first_version = 0.88
    if "timer_interval" not in measured:
        return first_version
    return float(measured["timer_interval"].fillna(first_version).min())


def _sum_of_parts(frame: pd.DataFrame) -> list[str]:
    """Compares forward+backward timed as one with the two timed apart; explains the disagreements by the launch."""
    if frame.empty:
        return []
    index = ("size", "context", "precision")
    wide = _wide(frame, "phase", index=index)
    if not {"forward", "backward", "forward_backward"} <= set(wide.columns):
        return []
    apart = (wide["forward"] + wide["backward"]).dropna()
    difference = (wide["forward_backward"] / apart - 1).dropna()
    if difference.empty:
        return []
    agree = difference.abs() <= AGREEMENT
    sentences = [
        f"Forward + backward timed as one agrees within {percent(AGREEMENT)} with the two timed apart in "
        f"{int(agree.sum())} of {len(agree)} cases."
    ]
    others = difference[~agree]
    if len(others):
        bound = _launch_bound(frame)
        explained = [key for key in others.index if key in bound]
        worst = others.abs().idxmax()
        text = f"The largest disagreement is {percent(others[worst])} ({_case(*worst)})"
        if explained:
            share = "every" if len(explained) == len(others) else f"{len(explained)} of {len(others)}"
            text += (
                f"; {share} disagreeing case is launch-bound: the device waits for the host, whose speed varies more, "
                "and timing the two apart adds a synchronisation across which the host cannot run ahead"
            )
        sentences.append(text + ".")
        if unexplained := [key for key in others.index if key not in bound]:
            sentences.append(f"Not explained by the launch: {listing(_case(*key) for key in unexplained)}.")
    return sentences


def _launch_bound(frame: pd.DataFrame) -> set[tuple]:
    """Returns (size, context, precision) whose forward+backward the host needs LAUNCH_BOUND of the time to issue."""
    measured = ok_rows(frame, phase="forward_backward")
    if measured.empty or "launch_median_ms" not in measured:
        return set()
    bound = measured[measured["launch_median_ms"] >= LAUNCH_BOUND * measured["host_median_ms"]]
    return set(bound[["size", "context", "precision"]].itertuples(index=False, name=None))


def _failures(frame: pd.DataFrame) -> list[str]:
    failed = frame[frame["status"].isin(["error", "timeout"])] if not frame.empty else frame
    if failed.empty:
        return []
    reasons = failed["reason"].value_counts()
    return [f"{len(failed)} measurements failed: " + listing(f"{text} ({n})" for text, n in reasons.items()) + "."]


# ---- warm-up -------------------------------------------------------------------------------------------------


def warmup_statistics(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns one row per size, context, phase and warm-up count, read off the trace of a fresh process.

    Columns: size, context, phase, status, warmup, mean_ms, std_ms, std_fraction, first_ms, second_ms, n; the
    mean and std are over the ten steps after the warm-up (fewer where the trace is shorter).
    """
    rows = []
    for record in in_order(frame, ["size", "context", "phase"]).to_dict("records") if not frame.empty else []:
        base = {name: record[name] for name in ("size", "context", "phase", "status")}
        trace = record["samples"].get("step_ms", [])
        for warmup in WARMUP_COUNTS:
            window = trace[warmup : warmup + WARMUP_MEASURED_STEPS]
            row = {**base, "warmup": warmup, "n": len(window)}
            if len(window) > 1:
                mean, std = statistics.fmean(window), statistics.stdev(window)
                row |= {"mean_ms": mean, "std_ms": std, "std_fraction": std / mean}
                row |= {"first_ms": trace[0], "second_ms": trace[1], "steady_ms": statistics.median(trace[5:] or trace)}
            rows.append(row)
    return pd.DataFrame(rows)


def table_warmup(frame: pd.DataFrame, phase: str = "forward_backward") -> pd.DataFrame:
    """Returns mean ± std (ms) for each warm-up count by size and context, with the first and second step."""
    rows = warmup_statistics(frame)
    if rows.empty:
        return rows
    rows = rows[rows["phase"] == phase]
    result = []
    for (size, context), group in rows.groupby(["size", "context"], sort=False):
        row = {"size": size, "context": context}
        first = group.iloc[0]
        measured = "mean_ms" in group and pd.notna(first["mean_ms"])
        row["first (ms)"] = number(first["first_ms"]) if measured else first["status"]
        row["second (ms)"] = number(first["second_ms"]) if measured else first["status"]
        for warmup, line in group.set_index("warmup").iterrows():
            has_mean = measured and pd.notna(line["mean_ms"])
            row[f"{warmup} warm-up"] = f"{number(line['mean_ms'])} ± {number(line['std_ms'], 2)}" if has_mean else "–"
        result.append(row)
    return pd.DataFrame(result)


def table_warmup_long(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns size × context × warm-up count with mean, std and std/mean of both phases."""
    rows = warmup_statistics(frame)
    if rows.empty:
        return rows

    def text(row: dict, column: str, form=number) -> str:
        return form(row[column]) if column in row and pd.notna(row[column]) else str(row["status"])

    result = {}
    for row in rows.to_dict("records"):
        key = {"size": row["size"], "context": row["context"], "warm-up": row["warmup"]}
        line = result.setdefault(tuple(key.values()), key)
        phase = row["phase"]
        line[f"{PHASE_NAMES[phase]}: mean (ms)"] = text(row, "mean_ms")
        line["std (ms)" if phase == "forward" else "std (ms) "] = text(row, "std_ms")
        line["std/mean" if phase == "forward" else "std/mean "] = text(row, "std_fraction", percent)
    return pd.DataFrame(result.values())


def figure_warmup(frame: pd.DataFrame, phase: str = "forward_backward") -> Figure | None:
    """One panel per size: time of every step from the first, over the steady median."""
    measured = ok_rows(frame, phase=phase)
    if measured.empty:
        return None
    sizes = [size for size in SIZES if size in set(measured["size"])]
    figure, axes = figures.panels(len(sizes))
    for axis, size in zip(axes, sizes, strict=True):
        contexts = sorted(measured[measured["size"] == size]["context"])
        for position, row in enumerate(in_order(measured[measured["size"] == size], ["context"]).to_dict("records")):
            trace = row["samples"]["step_ms"]
            steady = statistics.median(trace[5:] or trace)
            shade = figures.sns.color_palette("flare", len(contexts)).as_hex()[position]
            axis.plot(range(1, len(trace) + 1), [step / steady for step in trace], color=shade, marker="o",
                      markersize=2.5, linewidth=1, label=str(row["context"]))  # fmt: skip
        figures.log_time_axis(axis, "step time / steady median")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.set_xlabel("step (from the first of a fresh process)")
        axis.set_title(size)
        axis.legend(title="context", fontsize=7, title_fontsize=7)
    figure.suptitle(f"Warm-up trace, {PHASE_NAMES[phase]}, fp32, {frame.attrs['device']}", fontsize=10)
    return figure


def findings_warmup(frame: pd.DataFrame) -> list[str]:
    """Says what the first step costs and after how many steps the mean is the steady one."""
    rows = warmup_statistics(frame)
    if rows.empty or "mean_ms" not in rows:
        return []
    rows = rows.dropna(subset=["mean_ms"])
    sentences = []
    for phase, of_phase in rows.groupby("phase", sort=False):
        cold = of_phase[of_phase["warmup"] == 0]
        first, second = cold["first_ms"] / cold["steady_ms"], cold["second_ms"] / cold["steady_ms"]
        worst = cold.loc[first.idxmax()]
        sentences.append(
            f"The first {PHASE_NAMES[phase]} of a process takes {span(first)} a steady one "
            f"(most: {_case(worst['size'], worst['context'])}, {number(worst['first_ms'])} ms against "
            f"{number(worst['steady_ms'])} ms), the second {span(second)}."
        )
    wide = rows.pivot_table(index=["size", "context", "phase"], columns="warmup", values=["mean_ms", "std_fraction"])
    last = max(WARMUP_COUNTS)
    means, spreads = wide["mean_ms"], wide["std_fraction"]
    if last in means:
        off = {w: int(((means[w] / means[last] - 1).abs() > SAME).sum()) for w in WARMUP_COUNTS if w in means}
        text = listing(f"{off[w]} with {w}" for w in off if w != last)
        sentences.append(
            f"Against {last} warm-up steps, the mean is off by more than {percent(SAME)} in {text} "
            f"warm-up steps, of {len(means)} traces."
        )
        spread = listing(f"{percent(spreads[w].median())} with {w}" for w in spreads)
        sentences.append(f"Median std/mean: {spread} warm-up steps.")
    return sentences


# ---- precision and compilation ---------------------------------------------------------------------------------


def table_precision(frame: pd.DataFrame, phase: str = "train_step") -> pd.DataFrame:
    """Returns the phase's time in each precision and the speed-up over fp32."""
    rows = frame[frame["phase"] == phase] if not frame.empty else frame
    if rows.empty:
        return pd.DataFrame()
    table = pivot(rows, ["size", "context"], "precision", cell)
    speedups = _speedups(rows)
    for precision in [name for name in table.columns[2:] if name != "fp32"]:
        key = [(size, context) for size, context in zip(table["size"], table["context"], strict=True)]
        table[f"{precision} speed-up"] = [times(speedups.get((*case, precision))) for case in key]
    return table.rename(columns={name: f"{name} (ms)" for name in ("fp32", "tf32", "bf16")})


def _speedups(rows: pd.DataFrame) -> dict[tuple[str, int, str], float]:
    """Returns fp32's time over each other precision's, by (size, context, precision)."""
    wide = _wide(rows, "precision")
    if "fp32" not in wide:
        return {}
    ratio = wide.drop(columns="fp32").rdiv(wide["fp32"], axis=0).stack()
    return ratio.dropna().to_dict()


def table_compile(frame: pd.DataFrame, phase: str = "train_step") -> pd.DataFrame:
    """Returns eager and compiled times of a phase, speed-ups, and the time of the first, compiling call."""
    compiled = frame[frame["section"] == "compile"] if not frame.empty else frame
    if compiled.empty:
        return pd.DataFrame()
    result = []
    keys = ["size", "context", "precision"]
    rows = _by_mode(frame)
    for key in in_order(compiled, keys)[keys].drop_duplicates().itertuples(index=False, name=None):
        eager = rows.get((phase, *key, "none"))
        line = dict(zip(keys, key, strict=True)) | {"eager (ms)": cell(eager) if eager is not None else "–"}
        for mode in ("regional", "whole"):
            row = rows.get((phase, *key, mode))
            first = rows.get(("compile", *key, mode))
            line[f"{mode} (ms)"] = cell(row) if row is not None else "–"
            both = row is not None and eager is not None and row["status"] == eager["status"] == "ok"
            line[f"{mode} speed-up"] = times(eager["median_ms"] / row["median_ms"]) if both else "–"
            line[f"{mode} first call (s)"] = (
                cell(first, form=lambda value: number(value / 1000)) if first is not None else "–"
            )
        result.append(line)
    return pd.DataFrame(result)


def _by_mode(frame: pd.DataFrame) -> dict[tuple, dict]:
    """Returns the rows by (phase, size, context, precision, compile mode)."""
    return rows_by(frame, ["phase", "size", "context", "precision", "compile"])


def figure_precision_compile(frame: pd.DataFrame, phase: str = "train_step") -> Figure | None:
    """One panel per size: speed-up over eager fp32 by context, a colour per precision, a dash per compile mode."""
    rows = frame[frame["phase"] == phase] if not frame.empty else frame
    wide = _wide(rows, "precision", index=("size", "context", "compile")) if len(rows) else rows
    if wide.empty or "fp32" not in wide:
        return None
    base = wide["fp32"].xs("none", level="compile")
    sizes = [size for size in SIZES if size in base.index.get_level_values("size")]
    figure, axes = figures.panels(len(sizes))
    for axis, size in zip(axes, sizes, strict=True):
        for precision in [name for name in ("fp32", "tf32", "bf16") if name in wide]:
            for mode, style in figures.LINE_STYLES.items():
                try:
                    line = wide[precision].xs((size, mode), level=("size", "compile")).dropna()
                except KeyError:
                    continue
                speedup = (base[size] / line).dropna()
                if len(speedup) and not (precision == "fp32" and mode == "none"):
                    axis.plot(speedup.index, speedup.values, style, color=figures.COLOURS[precision], marker="o",
                              markersize=3, label=f"{precision}, {'eager' if mode == 'none' else mode}")  # fmt: skip
        axis.axhline(1, color="0.4", linewidth=1)
        figures.context_axis(axis, rows[rows["size"] == size]["context"].unique())
        axis.set_ylim(bottom=0)
        axis.set_ylabel("speed-up over eager fp32 (×)")
        axis.set_title(size)
    handles, labels = max((axis.get_legend_handles_labels() for axis in axes), key=lambda pair: len(pair[1]))
    figure.legend(handles, labels, loc="outside lower center", ncols=4)
    figure.suptitle(f"Precision × compile, {PHASE_NAMES[phase]}, {frame.attrs['device']}", fontsize=10)
    return figure


def findings_precision(frame: pd.DataFrame, phase: str = "train_step") -> list[str]:
    """Says what TF32 and bf16 gain over fp32, and where they do not."""
    rows = frame[(frame["phase"] == phase) & (frame["compile"] == "none")] if not frame.empty else frame
    speedups = _speedups(rows) if len(rows) else {}
    bound = _launch_bound(frame)
    sentences = []
    for precision in ("tf32", "bf16"):
        mine = {key[:2]: value for key, value in speedups.items() if key[2] == precision}
        if not mine:
            continue
        most, least = max(mine, key=mine.get), min(mine, key=mine.get)
        text = (
            f"A {PHASE_NAMES[phase]} in {precision} is {span(mine.values())} as fast as in fp32 "
            f"(geometric mean {times(geometric_mean(mine.values()))}; most for {_case(*most)}, "
            f"least for {_case(*least)})"
        )
        losing = [key for key, value in mine.items() if speed_word(value) != "faster"]
        if losing:
            launched = [key for key in losing if (*key, precision) in bound]
            text += f"; it is not faster for {listing(_case(*key) for key in losing)}"
            if launched:
                text += f" ({len(launched)} of {len(losing)} launch-bound: the host sets the time, not the matrix unit)"
        sentences.append(text + ".")
    return sentences


def findings_compile(frame: pd.DataFrame, phase: str = "train_step") -> list[str]:
    """Says what compiling gains in each precision, what it costs, and after how many steps it has paid."""
    compiled = ok_rows(frame, section="compile") if not frame.empty else frame
    if compiled.empty:
        return []
    sentences = []
    rows = _by_mode(frame)
    for mode in ("regional", "whole"):
        for precision in in_order(compiled, ["precision"])["precision"].unique():
            gains, pays = {}, {}
            first = ok_rows(compiled, phase="compile", compile=mode, precision=precision)
            for row in ok_rows(compiled, phase=phase, compile=mode, precision=precision).to_dict("records"):
                key = (row["size"], row["context"])
                eager = rows.get((phase, *key, precision, "none"))
                if eager is None or eager["status"] != "ok":
                    continue
                gains[key] = eager["median_ms"] / row["median_ms"]
                cost = first[(first["size"] == key[0]) & (first["context"] == key[1])]["median_ms"]
                if gains[key] > 1 + SAME and len(cost):
                    pays[key] = cost.iloc[0] / (eager["median_ms"] - row["median_ms"])
            if not gains:
                continue
            text = (
                f"{mode.capitalize()} compilation in {precision}: a {PHASE_NAMES[phase]} runs {span(gains.values())} "
                f"as fast as eager (geometric mean {times(geometric_mean(gains.values()))}, "
                f"{count(len(gains), 'case')})"
            )
            if len(first):
                text += f"; the first call takes {span(first['median_ms'] / 1000, lambda value: number(value) + ' s')}"
            if pays:
                text += f", paid back after {span(pays.values(), lambda value: number(value, 2))} steps"
            slower = [key for key, value in gains.items() if speed_word(value) == "slower"]
            if slower:
                text += f"; it is slower for {listing(_case(*key) for key in slower)}"
            sentences.append(text + ".")
    return [*sentences, *_failures(frame[frame["section"] == "compile"])]


# ---- the distance to the limit ---------------------------------------------------------------------------------


def table_utilisation(frame: pd.DataFrame, precision: str, phase: str = "train_step") -> pd.DataFrame:
    """Returns tokens per second, achieved rate and utilisation against the measured ceiling and the datasheet."""
    rows = frame[(frame["phase"] == phase) & (frame["precision"] == precision)] if not frame.empty else frame
    if rows.empty:
        return pd.DataFrame()
    result = []
    for row in in_order(rows, ["size", "context"]).to_dict("records"):
        line = {"size": row["size"], "context": row["context"]}
        ok = row["status"] == "ok"
        causal = row["flops_causal"] / row["flops"] if ok else None
        ceiling, sheet = row.get("ceiling_fraction"), row.get("datasheet_fraction")
        line["tokens/s"] = number(row["tokens_per_s"]) if ok else row["status"]
        line["TFLOP/s"] = number(row["achieved_tflops"]) if ok else "–"
        line["of measured ceiling"] = percent(ceiling) if ok else "–"
        line["of datasheet"] = percent(sheet) if ok else "–"
        line["of measured ceiling, causal FLOPs"] = percent(ceiling * causal if ok and ceiling else None)
        result.append(line)
    return pd.DataFrame(result)


def table_optimizer(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns the optimizer step against the fewest bytes it can move, one row per size (its shortest context)."""
    rows = ok_rows(frame, phase="optimizer_step", precision="fp32")
    if rows.empty:
        return pd.DataFrame()
    rows = in_order(rows, ["size", "context"]).drop_duplicates("size")
    return pd.DataFrame(
        {
            "size": row["size"],
            "parameters": f"{accounting.num_parameters(SIZES[row['size']]) / 1e6:,.1f} M",
            "step (ms)": number(row["median_ms"]),
            "GB/s": number(row["achieved_gb_per_s"]),
            "of measured copy": percent(row["ceiling_fraction"]),
            "of datasheet": percent(row["datasheet_fraction"]),
        }
        for row in rows.to_dict("records")
    )


def figure_utilisation(frame: pd.DataFrame, phase: str = "train_step") -> Figure | None:
    """One panel per precision: achieved TFLOP/s by context, a line per size, the measured and datasheet roofs."""
    measured = ok_rows(frame, phase=phase)
    if measured.empty:
        return None
    precisions = list(in_order(measured, ["precision"])["precision"].unique())
    figure, axes = figures.panels(len(precisions), height=3.2)
    for axis, precision in zip(axes, precisions, strict=True):
        rows = measured[measured["precision"] == precision]
        for size in [size for size in SIZES if size in set(rows["size"])]:
            line = rows[rows["size"] == size].sort_values("context")
            axis.plot(line["context"], line["achieved_tflops"], color=figures.COLOURS[size], marker="o", markersize=3,
                      label=size)  # fmt: skip
        ceiling = rows["ceiling"].dropna()
        if len(ceiling):
            axis.axhline(ceiling.iloc[-1], color="0.2", linestyle="--", linewidth=1, label="measured matrix product")
        known = rows.dropna(subset=["datasheet_fraction"])
        if len(known):
            peak = (known["achieved_tflops"] / known["datasheet_fraction"]).iloc[-1]
            axis.axhline(peak, color="0.2", linestyle=":", linewidth=1, label="datasheet")
        figures.context_axis(axis, rows["context"].unique())
        axis.set_ylim(bottom=0)
        axis.set_ylabel("achieved rate (TFLOP/s)")
        axis.set_title(precision)
    handles, labels = max((axis.get_legend_handles_labels() for axis in axes), key=lambda pair: len(pair[1]))
    figure.legend(handles, labels, loc="outside lower center", ncols=5)
    figure.suptitle(f"Model FLOP rate of a {PHASE_NAMES[phase]}, {frame.attrs['device']}", fontsize=10)
    return figure


def table_growth(frame: pd.DataFrame, phase: str = "train_step") -> pd.DataFrame:
    """Returns how the time grows with context: the fitted exponent and the factor from the shortest to the longest."""
    measured = ok_rows(frame, phase=phase)
    if measured.empty:
        return pd.DataFrame()
    result = []
    keys = ["size", "precision"]
    for key, group in in_order(measured, [*keys, "context"]).groupby(keys, sort=False):
        if len(group) < 3:
            continue
        first, last = group.iloc[0], group.iloc[-1]
        result.append(
            {
                **dict(zip(keys, key, strict=True)),
                "contexts": f"{first['context']}–{last['context']}",
                "exponent": number(power_law_exponent(group["context"], group["median_ms"])),
                "time grows": times(last["median_ms"] / first["median_ms"]),
                "FLOPs grow": times(last["flops"] / first["flops"]),
            }
        )
    return pd.DataFrame(result)


def findings_utilisation(frame: pd.DataFrame, phase: str = "train_step") -> list[str]:
    """Says how near to the limit the best case comes, what is launch-bound, and how time grows."""
    measured = ok_rows(frame, phase=phase)
    if measured.empty:
        return []
    sentences = []
    for precision in in_order(measured, ["precision"])["precision"].unique():
        rows = measured[measured["precision"] == precision].dropna(subset=["ceiling_fraction"])
        if rows.empty:
            continue
        best, worst = (rows.loc[rows["ceiling_fraction"].agg(end)] for end in ("idxmax", "idxmin"))
        text = (
            f"In {precision} a {PHASE_NAMES[phase]} reaches {percent(best['ceiling_fraction'])} of the measured matrix "
            f"product at best ({_case(best['size'], best['context'])}, {number(best['tokens_per_s'])} tokens/s)"
        )
        if pd.notna(best.get("datasheet_fraction")):
            text += f", {percent(best['datasheet_fraction'])} of the datasheet,"
        text += f" and {percent(worst['ceiling_fraction'])} at worst ({_case(worst['size'], worst['context'])})"
        sentences.append(text + ".")
    bound = _launch_bound(frame)
    if bound:
        names = [_case(*key) for key in in_order(pd.DataFrame(bound, columns=["size", "context", "precision"]),
                                                ["size", "context", "precision"]).itertuples(index=False)]  # fmt: skip
        sentences.append(
            f"{len(names)} of {len(ok_rows(frame, phase='forward_backward'))} forward + backward cases are "
            f"launch-bound (the host needs at least {percent(LAUNCH_BOUND)} of the time to issue the work): "
            f"{listing(names)}."
        )
    sentences += _growth(measured)
    return sentences


def _growth(measured: pd.DataFrame) -> list[str]:
    """Says how time grows with the number of parameters at fixed context, for the compute-bound longest one."""
    sentences = []
    for precision, rows in in_order(measured, ["precision"]).groupby("precision", sort=False):
        counts = rows.groupby("context")["size"].nunique()
        wide_enough = counts[counts >= 3]
        if wide_enough.empty:
            continue
        context = wide_enough[wide_enough == wide_enough.max()].index.max()
        line = rows[rows["context"] == context]
        parameters = [accounting.num_matmul_parameters(SIZES[size]) for size in line["size"]]
        exponent = power_law_exponent(parameters, line["median_ms"])
        sentences.append(
            f"At context {context} in {precision}, the time grows as (parameters)^{number(exponent)} over "
            f"{len(line)} sizes; work proportional to the parameters would give 1."
        )
    return sentences


# ---- what others published ----------------------------------------------------------------------------------


def published_matches(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns published step times with ours of the same size, context, batch, precision, compile mode and phase.

    Of a source's warm-up study only the rows with most warm-up steps count; the ratio is theirs over ours.
    """
    if ok_rows(frame).empty:
        return pd.DataFrame()
    others = published.step_times()
    others = others[others["status"] == "ok"]
    keys = ["size", "context", "batch", "precision", "compile", "phase"]
    warm = others["warmup_steps"].fillna(99).astype(int)
    others = others.assign(warm=warm).sort_values("warm").drop_duplicates(["source", "gpu", *keys], keep="last")
    ours = ok_rows(frame)[[*keys, "median_ms"]].astype({"context": "int64", "batch": "int64"})
    others = others.astype({"context": "int64", "batch": "int64"})
    matched = others.merge(ours, on=keys)
    return in_order(matched.assign(ratio=matched["published_ms"] / matched["median_ms"]), ["size", "context", "phase"])


def table_published(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns every published figure beside ours, one row per configuration: theirs → ours (their time over ours)."""
    matched = published_matches(frame)
    if matched.empty:
        return matched
    keys = {"GPU": "gpu", "size": "size", "context": "context", "precision": "precision", "compile": "compile"}
    phases = in_order(matched[["phase"]].drop_duplicates(), ["phase"])["phase"].tolist()
    lines: dict[tuple, dict[str, list[str]]] = {}
    for row in matched.sort_values("gpu", kind="stable").to_dict("records"):
        line = lines.setdefault(tuple(row[name] for name in keys.values()), {})
        line.setdefault(row["phase"], []).append(theirs_and_ours(row))
        line.setdefault("caveat", []).append(row["caveat"] or "")
    return pd.DataFrame(
        {
            **dict(zip(keys, key, strict=True)),
            **{PHASE_NAMES[phase]: ", ".join(line.get(phase, ["–"])) for phase in phases},
            "caveat": "; ".join(filter(None, dict.fromkeys(line["caveat"]))),
        }
        for key, line in lines.items()
    )


def table_published_summary(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns the ratio published / ours by GPU, phase, precision and compile mode."""
    matched = published_matches(frame)
    if matched.empty:
        return matched
    keys = ["gpu", "phase", "precision", "compile"]
    return pd.DataFrame(
        {
            "GPU": key[0],
            "phase": PHASE_NAMES[key[1]],
            "precision": key[2],
            "compile": key[3],
            "rows": len(group),
            "published / ours, geometric mean": times(geometric_mean(group["ratio"])),
            "range": span(group["ratio"]),
        }
        for key, group in matched.groupby(keys, sort=True)
    )


def findings_published(frame: pd.DataFrame) -> list[str]:
    """Says how this device compares with each published one over the configurations both have."""
    matched = published_matches(frame)
    sentences = []
    for (gpu, precision), group in matched.groupby(["gpu", "precision"]) if len(matched) else []:
        mean = geometric_mean(group["ratio"])
        word = speed_word(mean)
        device = frame.attrs["device"]
        comparison = "takes about the same time as" if word == "about the same" else f"is {word} than"
        factor = "" if word == "about the same" else f", {times(max(mean, 1 / mean))} in the geometric mean"
        against = [
            key for key, row in group.iterrows() if speed_word(row["ratio"]) == ("slower" if mean > 1 else "faster")
        ]
        common = count(len(group), "configuration")
        text = f"In {precision}, over {common} in common, this {device} {comparison} the published {gpu}{factor}"
        if against and word != "about the same":
            text += f", but not in {len(against)} of them"
        sentences.append(text + ".")
    return sentences
