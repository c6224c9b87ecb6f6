"""Notebook 08's parts of the encoder alone, as first written but for packed attention, beside the fused ones."""

from importlib import resources

import pandas as pd

from labkit.report import forms
from labkit.report.chapter import kinds_of_time
from labkit.report.text import gib, number, scientific
from labkit.report.siglip2 import BOTH, OURS
from labkit.report.tables import ok_rows, once_per_frame, select


@once_per_frame
def compared(modules: pd.DataFrame) -> pd.DataFrame:
    """Returns the pairs (see `forms.pairs`) of each part's passes, with packed attention alone and fused."""
    rows = modules.copy()
    rows[["impl", "pass"]] = [phase.split(" ") for phase in modules["phase"]]
    return forms.pairs(rows, "impl", "cu_seqlens", keys=["module", "precision", "pass"])


def table(modules: pd.DataFrame) -> pd.DataFrame:
    """Returns for each part of the encoder and dtype its times, peak of memory and error, first → fused."""
    pairs, result = compared(modules), []
    for (module, precision), group in modules.groupby(["module", "precision"], sort=False):
        line = {"part": f"{module}, {precision}"}
        for which, title in (("forward", "forward (ms)"), (BOTH, "both (ms)")):
            pair = select(pairs, module=module, precision=precision, **{"pass": which}).to_dict("records")
            line[title] = forms.arrow(pair[0]) if pair else "–"
        rows = ok_rows(group).set_index("phase")
        for title, phase, key, form in (
            ("peak (GiB)", BOTH, "peak_bytes", gib), ("error", "forward", "out_error", scientific),
        ):  # fmt: skip
            sides = rows.reindex([f"cu_seqlens {phase}", f"{OURS} {phase}"], columns=[key])[key]
            line[title] = " → ".join(sides.map(form))
        result.append(line)
    return pd.DataFrame(result)


def findings(modules: pd.DataFrame) -> list[str]:
    """Says what fusing gives for each part."""
    texts = []
    for _, rows in ok_rows(modules).groupby("timer_method"):
        if len(pairs := select(compared(rows), **{"pass": BOTH})):
            told = forms.summary(pairs, lambda row: f"{row['module']} in {row['precision']}")
            texts.append(f"{kinds_of_time([rows])}: {told}")
    sentence = f"Forward + backward of a part, fused against the same with packed attention alone, {'; '.join(texts)}."
    return ([sentence] if texts else []) + forms.failures(modules)


def table_versions() -> pd.DataFrame:
    """Returns what was tried on the encoder's products beside what is kept: see the README beside the file."""
    frame = pd.read_csv(str(resources.files("labkit") / "data" / "development" / "encoder_versions.csv"))
    return pd.DataFrame(
        {"tried": row["change"], "on": row["product"], "µs": number(row["tried_us"]), "kept": number(row["kept_us"])}
        for row in frame.to_dict("records")
    )
