"""Captured steps as rows: what their records hold by view, class of kernels, kernel and part of attention.

Every function takes frames of notebook 02's records as `Chapter.records` returns them.
"""

import math
import re

import pandas as pd

from labkit.configs import SIZES
from labkit.report import forms, verdicts
from labkit.report.text import count, number, span
from labkit.report.tables import in_order, ok_rows, once_per_frame, select

CASE = ["size", "context", "precision", "attention"]

STEPS = ["train_step", "forward_backward"]
VIEWS = {
    "inference": (["inference"], ["inference"]),
    "forward": (STEPS, ["forward"]),
    "backward": (STEPS, ["backward"]),
    "forward_backward": (STEPS, ["forward", "backward"]),
    "train_step": (["train_step"], ["forward", "backward", "optimizer", "outside"]),
}
"""What is looked at: the phases of the records that hold it, and the phases within such a step that make it up."""

CLASSES = ("matmul", "attention", "softmax", "elementwise", "copy", "reduction", "optimizer", "normalisation",
           "communication", "other")  # fmt: skip
"""Classes of kernels, in the order in which they are shown."""

KERNEL_ROLES = {
    "adam|multi_tensor": "AdamW, many tensors a launch", "hopper_|flash|attention": "our FlashAttention",
    "nvjet|gemm|xmma|cutlass|Kernel2|::b?mm$|addmm|splitK": "matrix product",
    "log_softmax|loss|nll": "loss", "soft_?max": "softmax",
    r"float\w*_copy|_to_copy": "casts to 16 bits", "^unrolled.*direct_copy": "casts to fp32",
    "copy|clone": "copies to another layout", "masked_fill": "causal mask", "Cat|::cat|neg": "rotary positions",
    "silu": "SwiGLU", "pow|rsqrt|[mM]ean": "RMSNorm", "sum": "sums a gradient over tokens",
    "AUnary.*Mul": "scales by a constant", "[mM]ul": "rotary, RMSNorm, SwiGLU",
    "[aA]dd": "residuals, rotary, gradients", "embedding|index": "embedding",
}  # fmt: skip
"""What a kernel does in this model, by the first pattern that its short name matches."""

SHORTER_NAMES = {
    r"_kernel(_cuda|_impl)?\b(?=.*\])|_(cuda|impl)\b|(?<=^nvjet)_sm\d+|(?<=_)(tilesize|stage|warpsize)(?=\d)": "",
    r"_gemm_(\w)(\d+)\1\2_\1\2\1\2_\1\2_": r"_\1\2_",
    r"_(ffma_|hmma_|tensor\d+x\d+x\d+_)?align\w*(?=#|$)": "",
}
"""What the names of kernels of one kind share, and what to write for it."""


def whole_steps(frame: pd.DataFrame, **equal) -> pd.DataFrame:
    """Returns the measured steps with a backward pass, in order: with AdamW, or without where only that fits."""
    return in_order(ok_rows(frame, phase=STEPS, **equal), ["precision", "size", "context"])


def tables_of(frame: pd.DataFrame, which: str) -> pd.DataFrame:
    """Returns the table "kernels", "classes" or "ranges" of all records; `record` is the phase of a row's record."""
    known = [*CASE, "record", "phase", "path", "kernel_class", "short_name", "launches", "total_us"]
    parts = [pd.DataFrame(columns=known)]
    for row in ok_rows(frame).to_dict("records"):
        table = pd.DataFrame(row["observed"]["tables"][which])
        parts.append(table.assign(**{column: row[column] for column in CASE}, record=row["phase"]))
    return pd.concat(parts[1:] or parts, ignore_index=True)


@once_per_frame
def classes(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns the kernel time of each case and view (of VIEWS): columns total_us, and <class>_share."""
    rows = tables_of(frame, "classes")
    parts = [
        rows[rows["record"].isin(records) & rows["phase"].isin(phases)].assign(view=view)
        for view, (records, phases) in VIEWS.items()
    ]
    wide = pd.concat(parts).pivot_table(index=[*CASE, "view"], columns="kernel_class", values="total_us", aggfunc="sum")
    total = wide.sum(axis=1)
    shares = wide.div(total, axis=0).reindex(columns=list(CLASSES)).fillna(0.0).add_suffix("_share")
    return shares.assign(total_us=total).reset_index()


@once_per_frame
def kernels(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns the kernels that the records keep, with view (of VIEWS), share of the view's kernel time, and role."""
    rows = tables_of(frame, "kernels")
    rows = rows.assign(view=rows["phase"].where(rows["phase"] != "step", rows["record"]))
    # A step's kernels without AdamW's are those of forward and backward.
    both = rows[(rows["view"] == "train_step") & (rows["kernel_class"] != "optimizer")].assign(view="forward_backward")
    totals = classes(frame)[[*CASE, "view", "total_us"]].rename(columns={"total_us": "view_us"})
    rows = pd.concat([rows, both]).merge(totals, on=[*CASE, "view"])
    roles = {short: next((text for pattern, text in KERNEL_ROLES.items() if re.search(pattern, short)), "–")
             for short in set(rows["short_name"])}  # fmt: skip
    short = pd.Series(list(roles), index=list(roles), dtype=str)
    shorter = short.replace(SHORTER_NAMES, regex=True)
    shorter = "`" + shorter.mask(shorter.duplicated(keep=False), short) + "`"  # two kernels keep two names
    kernel, role = rows["short_name"].map(shorter), rows["short_name"].map(roles)
    return rows.assign(kernel=kernel, role=role, share=rows["total_us"] / rows["view_us"])


def largest_kernels(frame: pd.DataFrame, *, others: bool = False) -> pd.DataFrame:
    """Returns the kernels with most time in each forward pass, alone and with backward; `others`: no products."""
    rows = select(kernels(frame), view=["forward", "forward_backward"]).sort_values("total_us", ascending=False)
    rows = select(rows, attention="eager")[lambda found: found["kernel_class"] != "matmul"] if others else rows
    kept = [*CASE, "view", "kernel", "kernel_class", "role", "launches", "total_us", "min_us", "max_us", "share"]
    rows = rows.groupby([*CASE, "view"]).head(10).reindex(columns=kept)
    return in_order(rows, ["precision", "size", "context", "attention", "view"])


def idle_steps(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns `whole_steps` with idle (1 − kernel time over unprofiled_ms; NaN: untimed), lengthened (by profiling)."""
    rows = whole_steps(frame)
    rows = rows.assign(unprofiled_ms=rows.get("unprofiled_ms", math.nan))
    rows["idle"] = (1 - rows["step_kernel_ms"] / rows["unprofiled_ms"]).clip(lower=0)
    return rows.assign(lengthened=rows["done_ms"] / rows["unprofiled_ms"])


def idle_in_calls(rows: pd.DataFrame, calls: pd.DataFrame) -> pd.DataFrame:
    """Returns notebook 01's training steps that were profiled too: launch_bound, idle (1 − kernel time / call)."""
    kernels = select(rows, attention="eager", phase="train_step")[["size", "context", "precision", "step_kernel_ms"]]
    both = ok_rows(calls, phase="train_step").merge(kernels, on=["size", "context", "precision"])
    bound = [verdicts.launch_bound(row) for row in both.to_dict("records")]
    return both.assign(launch_bound=bound, idle=1 - both["step_kernel_ms"] / both["median_ms"])


def top_kernels(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns, of each eager case and view, the kernel with the most time; columns as of `kernels`."""
    rows = select(kernels(frame), attention="eager")
    return in_order(rows.loc[rows.groupby([*CASE, "view"])["total_us"].idxmax()], ["precision"])


@once_per_frame
def attention_times(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns times (µs) inside attention in inference, all blocks together: columns of CASE and

    matmul_us (the scores' and the values' product), softmax_us, other_us (mask, scaling, casts), core_us (these, or
    FlashAttention), block_us (with projections and rotation), forward_us (the pass), block_share (block of pass);
    of softmax to the two products time_ratio, flop_ratio and bytes_ratio (NaN for FlashAttention).
    """
    rows = tables_of(select(frame, phase="inference"), "ranges")
    path, of_class = rows["path"].astype(str), rows["kernel_class"]
    parts = {
        "matmul_us": path.str.endswith(("/core/scores", "/core/value product")) & (of_class == "matmul"),
        "softmax_us": path.str.endswith("/core/softmax") & (of_class != "copy"),
        "core_us": path.str.startswith("inference/block/attention/core"),
        "block_us": path.str.startswith("inference/block/attention"),
        "forward_us": path.str.startswith("inference"),
    }
    sums = {part: rows["total_us"].where(mask, 0.0) for part, mask in parts.items()}
    found = rows.assign(**sums).groupby(CASE, as_index=False)[list(parts)].sum()
    found["other_us"] = found["core_us"] - found["matmul_us"] - found["softmax_us"]
    eager, keys = found["matmul_us"] > 0, list(zip(*(found[column] for column in CASE[:3]), strict=True))
    found["time_ratio"] = (found["softmax_us"] / found["matmul_us"]).where(eager)
    found["flop_ratio"] = pd.Series([flop_ratio(size) for size, *_ in keys], dtype=float).where(eager)
    found["bytes_ratio"] = pd.Series([bytes_ratio(*key) for key in keys], dtype=float).where(eager)
    found["block_share"] = found["block_us"] / found["forward_us"]
    return in_order(found, ["precision", "size", "context", "attention"])


def flop_ratio(size: str) -> float:
    """Returns FLOPs of softmax (compare, subtract, exponentiate, add, divide: 5 a score) over the products' 4·D."""
    return 5 / (4 * SIZES[size].d_head)


def bytes_ratio(size: str, context: int, precision: str) -> float:
    """Returns the fewest bytes of softmax over those of the two products, per head.

    The products move q, k, v, the output and the scores twice; softmax, in fp32, reads and writes them once.
    """
    products = (4 if precision == "fp32" else 2) * (4 * context * SIZES[size].d_head + 2 * context * context)
    return 2 * 4 * context * context / products


def flash_steps(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns steps with our FlashAttention beside eager ones by kernel time, as `forms.pairs` gives them."""
    return forms.pairs(whole_steps(frame), "attention", "eager", keys=CASE[:3], value="step_kernel_ms")


def findings_course(rows: pd.DataFrame) -> list[str]:
    """Says how far shares of the model as a course writes it (column `course`), and ours, are off published ones."""
    both = select(rows, quantity=["matmuls (%)", "softmax / products"]).dropna(subset=["course"])
    if both.empty:
        return []
    parts = [
        f"{quantity}: published {span(group['published'], number)}, with the course's code "
        f"{span(group['course'], number)}, ours {span(group['ours'], number)} ({count(len(group), 'figure')})"
        for quantity, group in both.groupby("quantity", sort=False)
    ]
    nearer = ((both["course"] - both["published"]).abs() < (both["ours"] - both["published"]).abs()).sum()
    return [f"{'; '.join(parts)}. The course's code is nearer to the published figure in {nearer} of {len(both)}."]
