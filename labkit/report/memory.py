"""Notebook 04 from its records: what memory a step takes and why, what autograd keeps, what recomputing saves.

Every function takes data frames that `Chapter.records` returns. A frame without the needed rows gives an empty table,
no figure (None) or no sentence.
"""

from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from labkit import accounting, published
from labkit.configs import ModelConfig, model_config
from labkit.measure.snapshots import Allocation, History, read_history
from labkit.report import figures
from labkit.report.findings import count, listing, number, percent, scientific, span, times
from labkit.report.tables import ORDER, PHASE_NAMES, cell, in_order, ok_rows

PHASES = ("inference", "forward", "train_step")
PRECISIONS = ("fp32", "bf16")

WITHIN = 0.03
"""Predicted and measured bytes of parameters, gradients, optimizer state and peaks agree within 3 %."""

ACTIVATIONS_WITHIN = 0.1
"""Predicted and measured bytes of activations agree within 10 %."""

CATEGORIES = ("parameters", "optimizer state", "gradients", "activations", "temporary", "other")
"""What an allocation can be, from the bottom of a timeline to its top but for "other", which lies at the bottom."""

COLOURS = dict(zip(CATEGORIES, (figures.SERIES[index] for index in (0, 4, 3, 2, 1, 7)), strict=True))
SHADES = {"forward": "0.93", "backward": "0.84", "optimizer step": "0.75"}
ATTENTION_NAMES = {"eager": "eager attention", "sdpa_flash": "FlashAttention"}

PART_NAMES = {
    "rms_norm": "RMSNorm",
    "block": "block",
    "four_blocks": "four blocks",
    "four_blocks_by_pairs": "four blocks, recomputed by pairs",
}

NUM_TOP = 5
"""Operators whose share of a block's residuals is named."""

MIB = 2**20
GIB = 2**30


# ---- rows ------------------------------------------------------------------------------------------------------------


def _gib(value: float | None) -> str:
    return "–" if value is None or pd.isna(value) else number(value / GIB)


def _mib(value: float | None) -> str:
    return "–" if value is None or pd.isna(value) else f"{value / MIB:,.2f}"


def _deviation(fraction: float) -> str:
    """Returns a deviation with its sign, "exact" for none."""
    if fraction == 0:
        return "exact"
    text = percent(abs(fraction))
    return f"under {percent(1e-4)}" if abs(fraction) < 1e-4 else f"{'+' if fraction > 0 else '−'}{text}"


def _known(row: dict, device_kind: str) -> dict[str, str]:
    """Returns what the accounting asks for beside the dimensions."""
    attention = "eager" if row["attention"] == "eager" else "fused"
    return {"precision": row["precision"], "attention": attention, "device_kind": device_kind}


def _case(row: dict) -> str:
    return f"{PHASE_NAMES[row['phase']]} of {row['size']} at {row['context']:,} in {row['precision']}"


# ---- peaks -----------------------------------------------------------------------------------------------------------


def peaks(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns every asked-for peak with its prediction.

    Columns: size, context, precision, phase, status, reason, peak_bytes, other_bytes (what the allocator counts beside
    tensors), device_bytes, predicted_bytes (of the tensors), moment (at which), deviation (of the peak from predicted
    and other bytes together; NaN where not measured).
    """
    if frame.empty:
        return frame
    rows = []
    for row in in_order(frame, ["size", "context", "precision", "phase"]).to_dict("records"):
        moments = accounting.peak_moments(
            model_config(row["size"]), row["batch"], row["context"], row["phase"],
            **_known(row, frame.attrs["device_kind"]),
        )  # fmt: skip
        moment = max(moments, key=moments.get)
        ok = row["status"] == "ok"
        expected = moments[moment] + (row["other_bytes"] if ok else 0)
        rows.append(
            {
                **{name: row[name] for name in ("size", "context", "precision", "phase", "status", "reason")},
                **{name: row.get(name) for name in ("peak_bytes", "other_bytes", "device_bytes")},
                "predicted_bytes": moments[moment],
                "moment": moment,
                "deviation": row["peak_bytes"] / expected - 1 if ok else float("nan"),
            }
        )
    return pd.DataFrame(rows)


def table_peaks(frame: pd.DataFrame, precision: str) -> pd.DataFrame:
    """Returns measured and predicted peaks (GiB) by size and context, and their ratio as in `peaks`."""
    rows = peaks(frame)
    rows = rows[rows["precision"] == precision] if len(rows) else rows
    result = []
    for (size, context), group in rows.groupby(["size", "context"], sort=False) if len(rows) else []:
        line = {"size": size, "context": context}
        by_phase = {row["phase"]: row for row in group.to_dict("records")}
        for phase in PHASES:
            row = by_phase.get(phase)
            line[f"{PHASE_NAMES[phase]} (GiB)"] = cell(row, "peak_bytes", _gib) if row else "–"
            line[f"{PHASE_NAMES[phase]}, predicted"] = _gib(row["predicted_bytes"]) if row else "–"
            ok = row and row["status"] == "ok"
            line[f"{PHASE_NAMES[phase]}, ratio"] = f"{1 + row['deviation']:.3f}" if ok else "–"
        result.append(line)
    return pd.DataFrame(result)


def parts(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns what a step is made of: size, context, precision, part, measured, blocks, predicted, deviation.

    Parameters, gradients and optimizer state from the training step, activations (what a forward pass with gradient
    leaves) from the forward pass. `measured` is what tensors asked the allocator for, `blocks` what it gave them.
    """
    rows = []
    for row in (
        in_order(ok_rows(frame), ["size", "context", "precision", "phase"]).to_dict("records") if len(frame) else []
    ):
        config = model_config(row["size"])
        found: dict[str, tuple[str, int]] = {}
        if row["phase"] == "train_step":
            found = {
                "parameters": ("parameter", accounting.parameter_bytes(config)),
                "gradients": ("gradient", accounting.parameter_bytes(config)),
                "optimizer state": ("optimizer", accounting.optimizer_state_bytes(config)),
            }
        elif row["phase"] == "forward":
            known = _known(row, frame.attrs["device_kind"])
            predicted = accounting.forward_made_bytes(config, row["batch"], row["context"], **known)
            found = {"activations": ("made", predicted)}
        for part, (metric, predicted) in found.items():
            measured = row.get(f"{metric}_requested_bytes", float("nan"))
            if pd.isna(measured):
                continue
            rows.append(
                {
                    **{name: row[name] for name in ("size", "context", "precision", "phase")},
                    "part": part,
                    "measured": measured,
                    "blocks": row[f"{metric}_bytes"],
                    "predicted": predicted,
                    "deviation": measured / predicted - 1,
                }
            )
    return pd.DataFrame(rows)


def table_parts(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns measured bytes (GiB) of each part by size and precision, over the contexts, with the worst deviation.

    "blocks: more by" is the most that the allocator's blocks are larger than what tensors asked for, of all parts.
    """
    rows = parts(frame)
    if rows.empty:
        return rows
    result = []
    for (size, precision), group in rows.groupby(["size", "precision"], sort=False):
        line = {"size": size, "precision": precision}
        for part in ("parameters", "gradients", "optimizer state", "activations"):
            mine = group[group["part"] == part]
            if mine.empty:
                line[f"{part} (GiB)"], line[f"{part}: off by"] = "–", "–"
            else:
                worst = mine.loc[mine["deviation"].abs().idxmax()]
                line[f"{part} (GiB)"] = span(mine["measured"], _gib)
                line[f"{part}: off by"] = _deviation(worst["deviation"])
        line["blocks: more by"] = _deviation((group["blocks"] / group["measured"]).max() - 1)
        result.append(line)
    return pd.DataFrame(result)


def table_moments(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns where in a phase the accounting puts its peak, and in how many cases."""
    rows = peaks(frame)
    if rows.empty:
        return rows
    counts = rows.groupby(["phase", "moment"]).size().reset_index(name="cases")
    result = in_order(counts, ["phase"]).to_dict("records")
    return pd.DataFrame(
        {
            "phase": PHASE_NAMES[row["phase"]],
            "moment of the peak, predicted": row["moment"],
            "cases": row["cases"],
            "at context": span(
                rows[(rows["phase"] == row["phase"]) & (rows["moment"] == row["moment"])]["context"],
                lambda value: f"{value:,}",
            ),
        }
        for row in result
    )


def figure_peaks(frame: pd.DataFrame, precision: str) -> Figure | None:
    """One panel per phase: peak over context by size, the prediction dotted, the device's memory dashed."""
    rows = peaks(frame)
    rows = rows[rows["precision"] == precision] if len(rows) else rows
    if ok_rows(rows).empty:
        return None
    figure, axes = figures.panels(len(PHASES), width=3.6, height=3.2)
    sizes = [size for size in ORDER["size"] if size in set(rows["size"])]
    for axis, phase in zip(axes, PHASES, strict=True):
        of_panel = rows[rows["phase"] == phase]
        for size in sizes:
            line = of_panel[of_panel["size"] == size].sort_values("context")
            colour = figures.COLOURS[size]
            measured = line[line["status"] == "ok"]
            axis.plot(measured["context"], measured["peak_bytes"] / GIB, color=colour, marker="o", markersize=3)
            axis.plot(line["context"], line["predicted_bytes"] / GIB, color=colour, linestyle=":", linewidth=1)
            figures.mark_failures(axis, line, "context", colour=colour)
        if of_panel["device_bytes"].notna().any():
            axis.axhline(of_panel["device_bytes"].max() / GIB, color="0.2", linestyle="--", linewidth=1)
        figures.context_axis(axis, rows["context"].unique())
        figures.log_time_axis(axis, "peak (GiB)")
        axis.set_title(PHASE_NAMES[phase])
    handles = [Line2D([], [], color=figures.COLOURS[size], marker="o", markersize=3, label=size) for size in sizes]
    handles.append(Line2D([], [], color="0.4", linestyle=":", label="predicted"))
    if rows["device_bytes"].notna().any():
        handles.append(Line2D([], [], color="0.2", linestyle="--", label="the device's memory"))
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 8))
    figure.suptitle(f"Peak memory, batch 4, {precision}, {frame.attrs['device']} (× out of memory)", fontsize=10)
    return figure


def findings_peaks(frame: pd.DataFrame) -> list[str]:
    """Says whether the accounting holds for the parts and the peaks, what did not fit, and what autocast changes."""
    return [*_parts_hold(frame), *_peaks_hold(frame), *_did_not_fit(frame), *_autocast(frame)]


def _parts_hold(frame: pd.DataFrame) -> list[str]:
    rows = parts(frame)
    sentences = []
    for part, group in rows.groupby("part", sort=False) if len(rows) else []:
        bound = ACTIVATIONS_WITHIN if part == "activations" else WITHIN
        held = int((group["deviation"].abs() <= bound).sum())
        worst = group.loc[group["deviation"].abs().idxmax()]
        text = f"**{part.capitalize()}**: the accounting is within {percent(bound)} of what tensors asked for in "
        text += f"{held} of {count(len(group), 'case')}"
        if worst["deviation"]:
            text += f"; the largest difference is {_deviation(worst['deviation'])} ({worst['size']} at "
            text += f"{worst['context']:,} in {worst['precision']})"
        sentences.append(text + ".")
    if len(rows):
        more = rows["blocks"] / rows["measured"] - 1
        worst = rows.loc[more.idxmax()]
        if more.max() > 0:
            sentences.append(
                f"The allocator's blocks are larger than what tensors asked for by up to {_deviation(more.max())} "
                f"({worst['part']} of {worst['size']} at {worst['context']:,} in {worst['precision']}); that is its "
                "own, and no part of the accounting."
            )
    return sentences


def _peaks_hold(frame: pd.DataFrame) -> list[str]:
    rows = ok_rows(peaks(frame))
    if rows.empty:
        return []
    off = rows["deviation"].abs()
    worst = rows.loc[off.idxmax()].to_dict()
    text = (
        f"**Peaks**: with what the allocator counts beside tensors ({span(rows['other_bytes'] / MIB, number)} MiB) the "
        f"prediction is within {percent(WITHIN)} in {int((off <= WITHIN).sum())} of {count(len(rows), 'case')}; the "
        f"largest difference is {_deviation(worst['deviation'])} ({_case(worst)})"
    )
    missed = rows[off > WITHIN].groupby(["phase", "precision"], sort=False).size()
    if len(missed):
        text += f". It misses for {listing(f'{PHASE_NAMES[phase]} in {p} ({n})' for (phase, p), n in missed.items())}"
    return [text + "."]


def _did_not_fit(frame: pd.DataFrame) -> list[str]:
    rows = peaks(frame)
    if rows.empty:
        return []
    sentences = []
    tried = rows[rows["status"] == "oom"]
    device_bytes = rows["device_bytes"].max()
    if len(tried) and pd.notna(device_bytes):
        told = tried[tried["predicted_bytes"] > device_bytes]
        sentences.append(
            f"{count(len(tried), 'phase')} ran out of memory: {listing(map(_case, tried.to_dict('records')))}; the "
            f"accounting alone says so for {len(told)} of them."
        )
    skipped = rows[rows["status"] == "skipped"]
    if len(skipped):
        sentences.append(
            f"{count(len(skipped), 'phase')} were not tried, predicted to need {span(skipped['predicted_bytes'], _gib)}"
            f" GiB{f' of {_gib(device_bytes)}' if pd.notna(device_bytes) else ''}."
        )
    failed = rows[rows["status"].isin(["error", "timeout"])]
    if len(failed):
        reasons = failed["reason"].value_counts()
        sentences.append(f"{len(failed)} failed: " + listing(f"{text} ({n})" for text, n in reasons.items()) + ".")
    return sentences


def _autocast(frame: pd.DataFrame) -> list[str]:
    """Compares the peaks of autocast with those of fp32, phase by phase."""
    rows = ok_rows(peaks(frame))
    sentences = []
    for phase in PHASES if len(rows) else ():
        wide = rows[rows["phase"] == phase].pivot_table(
            index=["size", "context"], columns="precision", values="peak_bytes", sort=False
        )
        if not set(PRECISIONS) <= set(wide):
            continue
        ratios = (wide["bf16"] / wide["fp32"]).dropna()
        more = ratios[ratios > 1 + WITHIN]
        text = f"bf16 autocast: the peak of {PHASE_NAMES[phase]} is {span(ratios)} that of fp32"
        text += f", higher in {len(more)} of {count(len(ratios), 'case')}"
        if len(more):
            size, context = more.idxmax()
            text += f", most for {size} at {context:,}"
        sentences.append(text + ".")
    return sentences


def published_peaks(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns published peaks with ours of the same dimensions, context, batch, precision and phase."""
    rows = ok_rows(peaks(frame))
    if rows.empty:
        return rows
    others = published.load("memory_peaks")
    precision = {"float32": "fp32", "bfloat16_autocast": "bf16"}
    others = others.assign(
        size=others["model"].map({"xl": "xl-2025"}),
        precision=others["dtype"].map(precision),
        context=others["context_length"],
    ).drop(columns="status")
    return others.merge(rows, on=["size", "context", "precision", "phase"])


def table_published(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns every published peak beside ours."""
    matched = published_peaks(frame)
    if matched.empty:
        return matched
    return pd.DataFrame(
        {
            "GPU": row["gpu"],
            "size": row["size"],
            "context": row["context"],
            "precision": row["precision"],
            "phase": PHASE_NAMES[row["phase"]],
            "published (GiB)": f"{'about ' if row['approximate'] in (True, 'true') else ''}{number(row['peak_gib'])}",
            "ours (GiB)": _gib(row["peak_bytes"]),
            "published / ours": times(row["peak_gib"] * GIB / row["peak_bytes"]),
            "note": str(row["note"]).replace("_", " ") if pd.notna(row["note"]) else "",
        }
        for row in matched.to_dict("records")
    )


# ---- the timeline ----------------------------------------------------------------------------------------------------


def table_timelines(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns what is in use at each recorded phase's peak by category (GiB), and three accounts of that peak."""
    rows = []
    for row in _timelines(frame):
        line = {
            "size": row["size"],
            "context": row["context"],
            "precision": row["precision"],
            "recorded": PHASE_NAMES[row["phase"]],
            "allocations": f"{int(row['num_allocations']):,}",
            "peak (GiB)": _gib(row["peak_bytes"]),
            "in": row["observed"]["peak_phase"],
        }
        for name in CATEGORIES:
            line[name] = _gib(_at_peak(row, name)) if _at_peak(row, name) else "–"
        line["peak, bytes"] = f"{int(row['peak_bytes']):,}"
        line["the allocator's own"] = f"{int(row['reported_peak_bytes']):,}"
        line["without recording"] = f"{int(row['plain_peak_bytes']):,}"
        rows.append(line)
    return pd.DataFrame(rows)


def _timelines(frame: pd.DataFrame) -> list[dict]:
    measured = ok_rows(frame)
    if measured.empty:
        return []
    return in_order(measured, ["size", "context", "precision", "phase"]).to_dict("records")


def _at_peak(row: dict, category: str) -> float:
    value = row.get(f"{category.replace(' ', '_')}_at_peak_bytes")
    return 0 if value is None or pd.isna(value) else value


def figure_timelines(frame: pd.DataFrame, precision: str) -> Figure | None:
    """One panel per recorded phase: memory in use over allocations and frees, stacked by category, phases shaded."""
    rows = [row for row in _timelines(frame) if row["precision"] == precision]
    if not rows:
        return None
    figure, axes = figures.panels(len(rows), num_columns=2, width=5.4, height=3.4)
    for axis, row in zip(axes, rows, strict=True):
        _draw_timeline(axis, row)
    present = [name for name in CATEGORIES if any(_has(row, name) for row in rows)]
    handles = [Line2D([], [], color=COLOURS[name], linewidth=6, label=name) for name in present]
    handles.append(Line2D([], [], color="0.1", linestyle=":", label="peak"))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    figure.suptitle(
        f"Memory in use, {rows[0]['size']}, context {rows[0]['context']:,}, batch {rows[0]['batch']}, {precision}, "
        f"{frame.attrs['device']}",
        fontsize=10,
    )
    return figure


def _has(row: dict, category: str) -> bool:
    return f"{category}_mib" in row["samples"]


def _draw_timeline(axis: Axes, row: dict) -> None:
    samples, num_events = row["samples"], int(row["num_events"])
    names = [name for name in ("other", *CATEGORIES[:-1]) if _has(row, name)]
    stacks = [[value * MIB / GIB for value in samples[f"{name}_mib"]] for name in names]
    axis.stackplot(samples["event"], stacks, colors=[COLOURS[name] for name in names], linewidth=0, zorder=2)
    for name, begin, end in row["observed"]["phases"]:
        axis.axvspan(begin, end, color=SHADES.get(name, "0.9"), zorder=1, linewidth=0)
        is_narrow = end - begin < 0.15 * num_events
        axis.annotate(
            name,
            (end if is_narrow else (begin + end) / 2, 0.98),
            xycoords=("data", "axes fraction"),
            ha="right" if is_narrow else "center",
            va="top",
            fontsize=7,
        )
    axis.axhline(row["peak_bytes"] / GIB, color="0.1", linestyle=":", linewidth=1, zorder=3)
    axis.set_xlim(0, num_events)
    axis.set_ylim(0, 1.12 * row["peak_bytes"] / GIB)
    axis.set_xlabel("allocations and frees")
    axis.set_ylabel("in use (GiB)")
    axis.set_title(PHASE_NAMES[row["phase"]])
    axis.grid(False)


def table_largest(frame: pd.DataFrame, precision: str, phase: str) -> pd.DataFrame:
    """Returns the largest allocations of a recorded phase, like ones together: size, owner, phase, how many."""
    rows = [row for row in _timelines(frame) if row["precision"] == precision and row["phase"] == phase]
    if not rows:
        return pd.DataFrame()
    return pd.DataFrame(
        {
            "MiB": _mib(group["num_bytes"]),
            "times": group["count"],
            "at the peak": group["count_at_peak"],
            "phase": group["phase"],
            "category": group["category"],
            "operator": _code(group["operator"]),
            "module": _code(group["module"]),
            "frame": group["frame"] or "–",
            "code": _code(group["code"]),
        }
        for group in rows[-1]["observed"]["largest"]
    )


def _code(text: str) -> str:
    return f"`{text[:90]}`" if text else "–"


def findings_timelines(frame: pd.DataFrame) -> list[str]:
    """Says whether the timeline's peak is the allocator's, where and of what it is, and which allocation is largest."""
    sentences = []
    rows = _timelines(frame)
    if not rows:
        return []
    exact = [row for row in rows if row["peak_bytes"] == row["reported_peak_bytes"]]
    text = (
        f"The timeline's peak equals the allocator's own to the byte in {len(exact)} of {count(len(rows), 'recording')}"
    )
    for row in rows:
        if row not in exact:
            text += f"; {_recording(row)} is off by {int(row['peak_bytes'] - row['reported_peak_bytes']):,} bytes"
    changed = [row for row in rows if row["plain_peak_bytes"] != row["reported_peak_bytes"]]
    text += ". Recording itself changed the peak in " + (
        listing(
            f"{_recording(row)} (by {int(row['reported_peak_bytes'] - row['plain_peak_bytes']):,} bytes)"
            for row in changed
        )
        if changed
        else "none"
    )
    sentences.append(text + ".")
    for row in rows:
        shares = {name: _at_peak(row, name) / row["peak_bytes"] for name in CATEGORIES}
        named = sorted((name for name in shares if shares[name] >= 0.01), key=shares.get, reverse=True)
        owner = row["observed"].get("peak_owner") or {}
        text = f"**{_recording(row)[0].upper()}{_recording(row)[1:]}** peaks at {_gib(row['peak_bytes'])} GiB in the "
        text += f"{row['observed']['peak_phase']} phase: {listing(f'{name} {percent(shares[name])}' for name in named)}"
        if owner.get("operator"):
            text += f". It is reached in `{owner['operator']}`"
            text += f" of `{owner['module']}`" if owner.get("module") else ""
            text += f" ({owner['frame']})" if owner.get("frame") else ""
        largest = row["observed"]["largest"][0]
        text += (
            f". The largest single allocation is {_mib(largest['num_bytes'])} MiB, `{largest['operator']}` in the "
            f"{largest['phase']} phase ({largest['frame'] or 'frame unknown'}), made {count(largest['count'], 'time')}"
        )
        sentences.append(text + ".")
    return sentences


def _recording(row: dict) -> str:
    return f"{PHASE_NAMES[row['phase']]} of {row['size']} at {row['context']:,} in {row['precision']}"


# ---- one block -------------------------------------------------------------------------------------------------------


def blocks(frame: pd.DataFrame) -> list[dict]:
    """Returns the measured parts, in order, each with what others printed of the same one (`published_mib`)."""
    measured = ok_rows(frame)
    if measured.empty:
        return []
    others = published.load("saved_for_backward")
    rows = []
    for row in measured.to_dict("records"):
        same = others
        for ours, theirs in (
            ("part", "part"), ("code", "code"), ("d_model", "d_model"), ("d_ff", "d_ff"), ("num_heads", "num_heads"),
            ("context", "context_length"), ("batch", "batch_size"),
        ):  # fmt: skip
            same = same[same[theirs] == row[ours]]
        rows.append({**row, "published_mib": same["saved_mib"].iloc[0] if len(same) else None})
    return sorted(rows, key=lambda row: (list(PART_NAMES).index(row["part"]), row["code"] != "eager"))


def predicted_saved(row: dict, device_kind: str) -> int | None:
    """Returns what the accounting says a part keeps, None for what is compiled, which it does not know."""
    config = ModelConfig("block", "notebook 04", row["d_model"], row["d_ff"], 1, row["num_heads"])
    if row["part"].endswith("by_pairs"):
        return 2 * accounting.residual_stream_bytes(config, row["batch"], row["context"])
    if row["code"] == "eager" and row["part"] == "block":
        known = {"precision": row["precision"], "attention": "eager", "device_kind": device_kind}
        return accounting.block_activation_bytes(config, row["batch"], row["context"], **known)
    return None


def table_blocks(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns residuals and bytes kept by each part, predicted, measured and published (MiB)."""
    return pd.DataFrame(
        {
            "part": PART_NAMES[row["part"]],
            "code": row["code"],
            "residuals": int(row["num_residuals"]),
            "kept anyway": int(row["num_resident_residuals"]),
            "distinct": int(row["num_distinct"]),
            "kept (MiB)": _mib(row["saved_bytes"]),
            "predicted": _mib(predicted_saved(row, frame.attrs["device_kind"])),
            "by the allocator": _mib(row["made_bytes"]),
            "published": "–" if row["published_mib"] is None else f"{row['published_mib']:,.2f}",
            "gradients (MiB)": _mib(row["gradient_bytes"]),
            "compiled − eager": scientific(row.get("relative_difference")),
        }
        for row in blocks(frame)
    )


def _group_name(group: dict) -> str:
    if not group["operator"]:
        return f"compiled: {group['shape']} {group['dtype']}"
    return f"{group['operator']} ({group['module']})" if group["module"] else group["operator"]


def residual_groups(row: dict) -> list[tuple[str, int, int, int]]:
    """Returns (operator and module, residuals, distinct ones, bytes) of a part, most bytes first."""
    groups: dict[str, list[int]] = {}
    for group in row["observed"]["residuals"]:
        entry = groups.setdefault(_group_name(group), [0, 0, 0])
        entry[0] += group["count"]
        entry[1] += group["num_distinct"]
        entry[2] += group["saved_bytes"]
    return sorted(((name, *entry) for name, entry in groups.items()), key=lambda item: (-item[3], item[0]))


def table_residuals(frame: pd.DataFrame, part: str, code: str) -> pd.DataFrame:
    """Returns what each operator of a part keeps: residuals, distinct ones, bytes (MiB) and share."""
    for row in blocks(frame):
        if (row["part"], row["code"]) == (part, code):
            groups = residual_groups(row)
            total = sum(num_bytes for *_, num_bytes in groups) or 1
            return pd.DataFrame(
                {
                    "operator": name,
                    "residuals": num_residuals,
                    "distinct": num_distinct,
                    "kept (MiB)": _mib(num_bytes),
                    "share": percent(num_bytes / total),
                }
                for name, num_residuals, num_distinct, num_bytes in groups
            )
    return pd.DataFrame()


def findings_blocks(frame: pd.DataFrame) -> list[str]:
    """Says what keeps most, what compiling drops, whether blocks add up, and what they have of gradients."""
    rows = {(row["part"], row["code"]): row for row in blocks(frame)}
    sentences = []
    if eager := rows.get(("block", "eager")):
        groups = residual_groups(eager)
        total = sum(num_bytes for *_, num_bytes in groups)
        top = groups[:NUM_TOP]
        parts_text = listing((f"{name} {percent(num_bytes / total)}" for name, _, _, num_bytes in top), NUM_TOP)
        sentences.append(
            f"The {NUM_TOP} operators that keep most in an eager block have "
            f"{percent(sum(item[3] for item in top) / total)} of its {_mib(total)} MiB: {parts_text}."
        )
        predicted = predicted_saved(eager, frame.attrs["device_kind"])
        deviation = _deviation(eager["saved_bytes"] / predicted - 1)
        sentences.append(
            f"The accounting predicts {_mib(predicted)} MiB for the eager block: {deviation}. The hooks see "
            f"{int(eager['num_residuals'])} residuals, {int(eager['num_distinct'])} distinct tensors."
        )
    sentences += _compiling_drops(rows)
    sentences += _blocks_add_up(rows)
    if row := rows.get(("block", "eager")) or rows.get(("block", "compiled")):
        config = ModelConfig("block", "notebook 04", row["d_model"], row["d_ff"], 1, row["num_heads"])
        gradients = accounting.block_gradient_bytes(config)
        stream = accounting.residual_stream_bytes(config, row["batch"], row["context"])
        sentences.append(
            f"A block's backward pass makes {_mib(row['gradient_bytes'])} MiB of parameter gradients (predicted "
            f"{_mib(gradients)}: {_deviation(row['gradient_bytes'] / gradients - 1)}). The residual stream is "
            f"{_mib(row['stream_bytes'])} MiB (by formula {_mib(stream)}: "
            f"{_deviation(row['stream_bytes'] / stream - 1)}); a block keeps "
            f"{times(row['saved_bytes'] / stream)} as much."
        )
    return sentences


def _compiling_drops(rows: dict) -> list[str]:
    sentences = []
    for part in ("rms_norm", "block"):
        eager, compiled = rows.get((part, "eager")), rows.get((part, "compiled"))
        if not (eager and compiled):
            continue
        ratio = compiled["saved_bytes"] / eager["saved_bytes"]
        word = "less" if ratio < 1 - WITHIN else "more" if ratio > 1 + WITHIN else "about as much"
        text = (
            f"**{PART_NAMES[part][0].upper()}{PART_NAMES[part][1:]}**: eager keeps {int(eager['num_residuals'])} "
            f"residuals ({_mib(eager['saved_bytes'])} MiB beside what is there anyway), compiled "
            f"{int(compiled['num_residuals'])} ({_mib(compiled['saved_bytes'])} MiB): {word}, {times(ratio)}"
        )
        if compiled["observed"].get("compiler") not in (None, "inductor"):
            text += f" (compiler: {compiled['observed']['compiler']})"
        if compiled["observed"].get("num_replacements"):
            text += (
                f"; the compiler put SDPA in the formula's place {int(compiled['observed']['num_replacements'])} times"
            )
        sentences.append(text + ".")
    return sentences


def _blocks_add_up(rows: dict) -> list[str]:
    one, four = rows.get(("block", "compiled")), rows.get(("four_blocks", "compiled"))
    pairs = rows.get(("four_blocks_by_pairs", "compiled"))
    sentences = []
    if one and four:
        ratio = four["saved_bytes"] / one["saved_bytes"]
        text = f"Four compiled blocks keep {_mib(four['saved_bytes'])} MiB, {times(ratio)} what one keeps"
        if pairs:
            ratio = pairs["saved_bytes"] / four["saved_bytes"]
            text += (
                f"; recomputed by pairs, {_mib(pairs['saved_bytes'])} MiB ({percent(ratio)}): the inputs of the pairs"
            )
        sentences.append(text + ".")
    printed = [row for row in (one, four, pairs) if row and row["published_mib"] is not None]
    if printed:
        sentences.append(
            "Beside what others printed for these dimensions: "
            + listing(
                f"{PART_NAMES[row['part']]} {row['published_mib']:,.2f} MiB, "
                f"ours {times(row['saved_bytes'] / MIB / row['published_mib'])}"
                for row in printed
            )
            + ". Their block need not be ours line by line."
        )
    return sentences


# ---- recomputing -----------------------------------------------------------------------------------------------------


def checkpointing(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns every plan with its prediction.

    Columns: context, precision, attention, plan, level (0 none, 1, 2 nested), status, median_ms, peak_bytes,
    predicted_bytes, moment, deviation, forwards_per_block, slowdown (over the plan without recomputation; NaN without).
    """
    if frame.empty:
        return frame
    rows = []
    for row in frame.to_dict("records"):
        config = model_config(row["size"])
        plan = accounting.checkpoint_plan(row["plan"], config.num_layers)
        known = _known(row, frame.attrs["device_kind"])
        moments = accounting.checkpoint_moments(config, row["batch"], row["context"], plan, **known)
        moment = max(moments, key=moments.get)
        ok = row["status"] == "ok"
        names = ("size", "batch", "context", "precision", "attention", "plan", "status", "reason")
        rows.append(
            {
                **{name: row[name] for name in names},
                **{name: row.get(name) if ok else float("nan") for name in
                   ("median_ms", "peak_bytes", "forwards_per_block", "resident_bytes", "device_bytes")},
                "level": len(plan),
                "predicted_bytes": moments[moment],
                "moment": moment,
                "deviation": row["peak_bytes"] / (moments[moment] + row["other_bytes"]) - 1 if ok else float("nan"),
            }
        )  # fmt: skip
    result = pd.DataFrame(rows)
    plain = result[result["plan"] == "none"].set_index(["context", "attention"])["median_ms"]
    keys = list(zip(result["context"], result["attention"], strict=True))
    return result.assign(
        slowdown=[row / plain.get(key, float("nan")) for key, row in zip(keys, result["median_ms"], strict=True)]
    )


def table_checkpointing(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns peak and step time of every plan, with the predicted peak."""
    rows = checkpointing(frame)
    return pd.DataFrame(
        {
            "attention": ATTENTION_NAMES.get(row["attention"], row["attention"]),
            "context": row["context"],
            "recomputed every": _plan_name(row["plan"]),
            "peak (GiB)": cell(row, "peak_bytes", _gib),
            "predicted (GiB)": _gib(row["predicted_bytes"]),
            "ratio": "–" if pd.isna(row["deviation"]) else f"{1 + row['deviation']:.3f}",
            "step (ms)": cell(row),
            "over none": times(row["slowdown"]),
            "forwards per block": "–" if pd.isna(row["forwards_per_block"]) else f"{row['forwards_per_block']:.2f}",
            "peak predicted in": row["moment"],
        }
        for row in rows.to_dict("records")
    )


def _plan_name(plan: str) -> str:
    """Returns "4 blocks", "8 blocks, then 2", "1 block" or "none"."""
    first, *rest = plan.split("/")
    return "none" if plan == "none" else ", then ".join([count(int(first), "block"), *rest])


def frontier(rows: pd.DataFrame) -> pd.DataFrame:
    """Returns the plans for which no other is both faster and smaller, smallest first."""
    kept, fastest = [], float("inf")
    for row in rows[rows["status"] == "ok"].sort_values(["peak_bytes", "median_ms"]).to_dict("records"):
        if row["median_ms"] < fastest:
            kept.append(row)
            fastest = row["median_ms"]
    return pd.DataFrame(kept)


def figure_checkpointing(frame: pd.DataFrame) -> Figure | None:
    """Left: peak by k, predicted dotted. Right: step time against peak, the frontier joined."""
    rows = checkpointing(frame)
    if ok_rows(rows).empty:
        return None
    figure, (left, right) = figures.panels(2, num_columns=2, width=5.0, height=3.6)
    series = list(rows.groupby(["attention", "context"], sort=False))
    for (attention, context), group in series:
        colour = figures.COLOURS[attention]
        label = f"{ATTENTION_NAMES.get(attention, attention)}, context {context:,}"
        single = group[group["level"] == 1].assign(k=lambda part: part["plan"].astype(int)).sort_values("k")
        measured = single[single["status"] == "ok"]
        left.plot(measured["k"], measured["peak_bytes"] / GIB, color=colour, marker="o", markersize=3, label=label)
        left.plot(single["k"], single["predicted_bytes"] / GIB, color=colour, linestyle=":", linewidth=1)
        figures.mark_failures(left, single, "k", colour=colour)
        ok = group[group["status"] == "ok"]
        right.scatter(ok["peak_bytes"] / GIB, ok["median_ms"], color=colour, s=18, zorder=3)
        best = frontier(group)
        if len(best):
            right.plot(best["peak_bytes"] / GIB, best["median_ms"], color=colour, linewidth=1, label=label)
        for row in ok.to_dict("records"):
            right.annotate(
                row["plan"], (row["peak_bytes"] / GIB, row["median_ms"]), xytext=(3, 3), textcoords="offset points",
                fontsize=6,
            )  # fmt: skip
    ks = sorted({int(plan) for plan in rows[rows["level"] == 1]["plan"]})
    figures.context_axis(left, ks)
    left.set_xlabel("k, blocks recomputed together")
    left.set_ylabel("peak (GiB)")
    left.set_title("peak by k (dotted: predicted)")
    right.set_xlabel("peak (GiB)")
    right.set_ylabel("training step (ms)")
    right.set_title("time against memory (line: nothing else is better in both)")
    for axis in (left, right):
        axis.legend(loc="best")
    first = rows.iloc[0]
    figure.suptitle(
        f"Recomputing blocks, {first['size']}, batch {first['batch']}, {first['precision']}, {frame.attrs['device']} "
        "(× out of memory)",
        fontsize=10,
    )
    return figure


def findings_checkpointing(frame: pd.DataFrame) -> list[str]:
    """Says what recomputing saves and costs, which k is best against the prediction, and what nesting adds."""
    rows = checkpointing(frame)
    sentences = []
    for (attention, context), group in rows.groupby(["attention", "context"], sort=False) if len(rows) else []:
        measured = group[group["status"] == "ok"]
        if measured.empty:
            continue
        title = ATTENTION_NAMES.get(attention, attention)
        name = f"**{title[0].upper()}{title[1:]}** at {context:,}"
        sentences += _saves_and_costs(name, group)
        sentences += _best_interval(name, group, frame.attrs["device_kind"])
        best = frontier(measured)
        sentences.append(
            f"{name}: nothing is better in both time and memory than "
            + listing(
                (
                    f"{_plan_name(row['plan'])} ({_gib(row['peak_bytes'])} GiB, {number(row['median_ms'])} ms)"
                    for row in best.to_dict("records")
                ),
                8,
            )
            + "."
        )
    known = rows[rows["status"] == "ok"] if len(rows) else rows
    if len(known):
        off = known["deviation"].abs()
        worst = known.loc[off.idxmax()]
        sentences.append(
            f"The predicted peak is within {percent(WITHIN)} in {int((off <= WITHIN).sum())} of "
            f"{count(len(known), 'plan')}; the largest difference is {_deviation(worst['deviation'])} "
            f"({ATTENTION_NAMES.get(worst['attention'], worst['attention'])}, {_plan_name(worst['plan'])})."
        )
    return sentences


def _saves_and_costs(name: str, group: pd.DataFrame) -> list[str]:
    plain = group[group["plan"] == "none"]
    lowest = group.loc[group["peak_bytes"].idxmin()]
    smallest = f"recomputed every {_plan_name(lowest['plan'])}, {_gib(lowest['peak_bytes'])} GiB"
    if plain.empty:
        return []
    plain = plain.iloc[0]
    if plain["status"] != "ok":
        return [
            f"{name}: without recomputation the step ends {plain['status']} (predicted "
            f"{_gib(plain['predicted_bytes'])} GiB); the smallest peak is that of {smallest}, at "
            f"{number(lowest['median_ms'])} ms a step."
        ]
    return [
        f"{name}: the step takes {_gib(plain['peak_bytes'])} GiB without recomputation and at least "
        f"{_gib(lowest['peak_bytes'])} GiB with it (every {_plan_name(lowest['plan'])}), "
        f"{times(lowest['peak_bytes'] / plain['peak_bytes'])} as much, for {times(lowest['slowdown'])} the time."
    ]


def _best_interval(name: str, group: pd.DataFrame, device_kind: str) -> list[str]:
    single = group[(group["level"] == 1) & (group["status"] == "ok")]
    if single.empty:
        return []
    row = single.iloc[0].to_dict()
    config, known = model_config(row["size"]), _known(row, device_kind)
    shape = (config, row["batch"], row["context"])
    lowest = single["peak_bytes"].min()
    best = sorted(int(plan) for plan in single[single["peak_bytes"] == lowest]["plan"])
    predicted = accounting.best_checkpoint_interval(*shape, **known)
    balanced = accounting.balanced_checkpoint_interval(*shape, **known)
    kept = accounting.block_activation_bytes(*shape, **known) / accounting.residual_stream_bytes(*shape[:1], *shape[1:])
    verdict = "as predicted" if predicted in best else f"predicted was k = {predicted}"
    text = (
        f"{name}: of single levels k = {listing(map(str, best))} peaks lowest, {verdict}. A block keeps "
        f"{times(kept)} what its input takes, which moves the balance of inputs kept and block recomputed from √N = "
        f"{config.num_layers**0.5:.1f} to k = {balanced:.1f}"
    )
    nested = group[(group["level"] > 1) & (group["status"] == "ok")]
    if len(nested):
        smallest = nested.loc[nested["peak_bytes"].idxmin()]
        ratio = smallest["peak_bytes"] / lowest
        word = "lower than" if ratio < 1 - WITHIN else "higher than" if ratio > 1 + WITHIN else "about that of"
        text += f". Nested, the lowest peak ({_plan_name(smallest['plan'])}) is {word} the best single level"
        text += f" ({times(ratio)})"
    return [text + "."]


# ---- snapshots -------------------------------------------------------------------------------------------------------


def table_files(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns what became of each file that was given as a snapshot."""
    return pd.DataFrame(
        {
            "file": row["file"],
            "loaded": "yes" if row["accepted"] else "refused",
            "ran anything": "yes" if row["executed"] else "no",
            "peak in it (bytes)": f"{int(row['peak_bytes']):,}" if pd.notna(row.get("peak_bytes")) else "–",
            "message": row["observed"].get("message") or "–",
        }
        for row in (ok_rows(frame).to_dict("records") if len(frame) else [])
    )


def findings_files(frame: pd.DataFrame) -> list[str]:
    """Says whether the genuine snapshot was read and all others refused, and whether anything ran."""
    measured = ok_rows(frame)
    if measured.empty:
        return []
    genuine, others = measured[measured["file"] == "genuine"], measured[measured["file"] != "genuine"]
    sentences = []
    if len(others):
        refused = others[others["accepted"] == 0]
        ran = int(others["executed"].sum())
        sentences.append(
            f"{len(refused)} of {count(len(others), 'file')} that are no genuine snapshot were refused; code of "
            f"{ran if ran else 'none'} of them ran."
        )
    if len(genuine):
        row = genuine.iloc[-1]
        if row["accepted"]:
            same = row["peak_bytes"] == row["expected_peak_bytes"]
            sentences.append(
                f"The genuine snapshot was read, and its peak is {'' if same else '**not** '}the "
                f"{int(row['expected_peak_bytes']):,} bytes that its tensors had."
            )
        else:
            sentences.append(f"The genuine snapshot was **refused**: {row['observed'].get('message')}.")
    return sentences


def open_snapshot(path: str) -> History | None:
    """Returns the history in a snapshot file, None for no path; raises SnapshotError as `read_history` does."""
    return read_history(Path(path)) if path else None


def _snapshot_groups(history: History, limit: int) -> list[tuple[str, list[Allocation]]]:
    """Returns allocations by the line that made them, those with most bytes at the peak first."""
    groups: dict[str, list[Allocation]] = {}
    for allocation in history.allocations:
        groups.setdefault(allocation.frame or ("before" if allocation.begin < 0 else "no Python frame"), []).append(
            allocation
        )

    def bytes_at_peak(name: str) -> int:
        return sum(a.num_bytes for a in groups[name] if a.is_alive(history.peak_position))

    return [(name, groups[name]) for name in sorted(groups, key=lambda name: (-bytes_at_peak(name), name))[:limit]]


def figure_snapshot(history: History | None) -> Figure | None:
    """Memory in use over the events of a snapshot, stacked by the lines that made most of the peak."""
    if history is None or not history.allocations:
        return None
    names = [name for name, _ in _snapshot_groups(history, 7)]
    frames = {True: "before", False: "no Python frame"}
    kept, series = history.series(
        lambda a: name if (name := a.frame or frames[a.begin < 0]) in names else "others", 600
    )
    figure, (axis,) = figures.panels(1, width=8.0, height=3.6)
    order = [name for name in (*names, "others") if name in series]
    axis.stackplot(
        kept, [[value / MIB for value in series[name]] for name in order], labels=order, linewidth=0,
        colors=figures.SERIES[: len(order)],
    )  # fmt: skip
    axis.axhline(history.peak_bytes / MIB, color="0.1", linestyle=":", linewidth=1)
    axis.set_xlabel("allocations and frees")
    axis.set_ylabel("in use (MiB)")
    axis.set_title("Snapshot: memory in use by the line that allocated it")
    figure.legend(loc="outside lower center", ncols=2)
    return figure


def table_snapshot(history: History | None) -> pd.DataFrame:
    """Returns the lines that made most of a snapshot's peak: bytes at the peak, allocations, the largest one (MiB)."""
    if history is None:
        return pd.DataFrame()
    rows = []
    for name, members in _snapshot_groups(history, 15):
        at_peak = [a.num_bytes for a in members if a.is_alive(history.peak_position)]
        rows.append(
            {
                "frame": name,
                "at the peak (MiB)": _mib(sum(at_peak)),
                "allocations": f"{len(members):,}",
                "largest (MiB)": _mib(max(a.num_bytes for a in members)),
            }
        )
    return pd.DataFrame(rows)
