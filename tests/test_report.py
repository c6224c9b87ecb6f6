"""The report says what the records say, is short, and is the one that the committed records
give.
"""

import dataclasses
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import matplotlib
import pandas as pd
import pytest
from chapters import store_of

from labkit import notebooks
from labkit.configs import FIGURES, REFERENCE_DEVICE, REPOSITORY
from labkit.records import RecordError, RecordStore
from labkit.report import card, figures, render, tables, text
from labkit.report.chapter import Chapter
from labkit.report.facts import compare
from labkit.report.frame import select

NOTEBOOK = "01_benchmarking"
DEVICES = [path.parent.name for path in FIGURES.glob("*/report.md")]
"""What several of a device measured together belongs to its report, or has one of its own."""


@pytest.fixture
def folder(tmp_path):
    """A copy of the reference device's records of chapter 01, free to be changed; returns the
    device's folder.
    """
    target = tmp_path / REFERENCE_DEVICE
    (target / "records").mkdir(parents=True)
    for name in ("environment.json", f"records/{NOTEBOOK}.jsonl", f"records/{NOTEBOOK}.done.json"):
        shutil.copy(FIGURES / REFERENCE_DEVICE / name, target / name)
    return target


def chapter(folder, **options):
    return Chapter(NOTEBOOK, device=folder.name, output=str(folder.parent), **options)


FUSED = card.LADDER["+ our kernels"] | {"size": "2.7b", "context": 512}


def change(folder, status="ok", *, median_ms=94.0, disturbed=False):
    """Appends newer records of the ladder's fastest step, as each of its sessions would."""
    store = store_of(folder, NOTEBOOK)
    times = ("median_ms", "host_median_ms", "min_ms", "p20_ms", "p80_ms")
    for known in store.load():
        is_step = (known.section, known.phase) == ("execution", "graph_step")
        if is_step and FUSED.items() <= known.case.items():
            metrics = known.metrics | dict.fromkeys(times, median_ms) if status == "ok" else {}
            changes = {"status": status, "metrics": metrics, "telemetry": {"disturbed": disturbed}}
            store.append(dataclasses.replace(known, **changes))


def shown(folder):
    """The ladder as table, CSV, figure, fact and first page."""
    chapters = {NOTEBOOK: chapter(folder)}
    steps = chapter(folder).records("execution")
    graphs = select(steps, phase="graph_step", context=512)
    sides = card.LADDER["fp32"], card.LADDER["+ our kernels"]
    return (
        card.ladder_table(graphs).to_string(),
        tables.to_csv(steps),
        figures.svg(card.ladder(chapters)),
        compare(graphs, *sides, size="2.7b", context=512),
        card.page(chapters, {}),
    )


def test_a_changed_time_changes_table_csv_figure_fact_and_first_page(folder):
    before = shown(folder)
    change(folder, median_ms=1e6)
    after = shown(folder)
    assert all(old != new for old, new in zip(before, after, strict=True))
    assert "1,000,000" in after[0] and "1e+06" in after[1] and "1,000,000" in after[4]
    assert (before[3].verdict, after[3].verdict) == ("ahead", "behind")


def test_a_busy_machine_and_a_failure_are_said_in_the_table_and_by_the_fact(folder):
    change(folder, disturbed=True)
    table, _, _, fact, page = shown(folder)
    assert "⚠" in table and "⚠" in page and fact.marked
    change(folder, "oom")
    table, _, _, fact, _ = shown(folder)
    assert "oom" in table and fact.missing


def test_a_table_larger_than_a_page_takes_is_refused_and_is_a_csv(folder):
    steps = chapter(folder).records("steps")
    with pytest.raises(ValueError, match=r"'All' has 264 × 2 cells; accepted: 8 × 7"):
        chapter(folder).table(steps.get, ["phase", "size"], caption="All")
    chapter(folder, save_figures=True).more()
    assert len((folder / "tables" / "01_steps.csv").read_text().splitlines()) == 265


def test_records_of_another_device_are_refused(folder):
    store = store_of(folder, NOTEBOOK)
    store.append(dataclasses.replace(store.load()[0], device="abacus", phase="other"))
    other = shutil.copytree(folder, folder.parent / "sundial")
    for asked in (folder, other):
        message = f"holds records of abacus, {REFERENCE_DEVICE}, not of '{asked.name}'"
        with pytest.raises(RecordError, match=message):
            chapter(asked).records("steps")


def test_a_chapter_alone_makes_a_page_that_says_what_is_missing(folder, monkeypatch):
    done = folder / "records" / f"{NOTEBOOK}.done.json"
    done.write_text(json.dumps({"profile": "quick", "num_missing": 7}))
    (path,) = render.rebuild(REFERENCE_DEVICE, output=folder.parent)
    page = path.read_text(encoding="utf-8")
    assert page.startswith("# A transformer measured on NVIDIA H200")
    assert page.count("*Not measured; `labkit run") == len(notebooks.names()) - 1
    assert "Will it fit?" in page and "Which attention?" not in page
    assert "not recorded: 7 of chapter 01.**" in page
    assert "findings of this chapter lack measurements" in page and "*Not measured:" not in page
    with pytest.raises(ValueError, match=f"'abacus'.*measured: {REFERENCE_DEVICE}"):
        render.rebuild("abacus", output=folder.parent)
    done.write_text('{"num_missing": ""}')
    monkeypatch.setattr(notebooks, "show", None)  # nothing is executed before it is refused
    with pytest.raises(RecordError, match="num_missing is ''; accepted: int"):
        render.rebuild(REFERENCE_DEVICE, output=folder.parent)


def test_where_several_gpus_alone_are_measured_the_report_makes_its_folder(tmp_path):
    several = f"2x-{REFERENCE_DEVICE}"
    shutil.copytree(FIGURES / several, tmp_path / several)
    (page,) = render.rebuild(REFERENCE_DEVICE, output=tmp_path)
    assert page == tmp_path / REFERENCE_DEVICE / "report.md"
    # What runs on one GPU is measured there, and is not missing here.
    together = FIGURES / f"4x-{REFERENCE_DEVICE}" / "report.md"
    assert "`labkit run 0" not in together.read_text(encoding="utf-8")


def made(root: Path) -> dict[str, bytes]:
    """Returns what the devices' records became, by path."""
    patterns = ("*/*.svg", "*/*.ipynb", "*/tables/*.csv", "*/report.md")
    paths = [path for pattern in patterns for path in root.glob(pattern)]
    return {str(path.relative_to(root)): path.read_bytes() for path in paths}


def test_committed_reports_figures_and_tables_are_those_of_the_committed_records(tmp_path):
    """A stale sentence, figure or table is found here, and a file that nothing makes any more. The
    process that makes them anew may not import torch.
    """
    # Of all devices: a report sets the others beside its own.
    for source in {folder.parent for folder in FIGURES.glob("*/records")}:
        shutil.copytree(source / "records", tmp_path / source.name / "records")
        shutil.copy(source / "environment.json", tmp_path / source.name)
    code = (
        "import gc, sys; gc.disable(); from pathlib import Path; from labkit.report import render\n"
        "sys.modules |= dict.fromkeys(('torch', 'triton', 'papermill'))\n"
        "for device in sys.argv[2:]: render.rebuild(device, output=Path(sys.argv[1]))\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path), *DEVICES]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    committed, fresh = made(FIGURES), made(tmp_path)
    assert committed.keys() == fresh.keys()
    stale = [name for name in fresh if committed[name] != fresh[name]]
    assert not stale, f"run `labkit report` (with matplotlib {matplotlib.__version__})"


def test_a_cpu_is_one_without_its_environment_too(tmp_path):
    kinds = [chapter(tmp_path / device).device_kind for device in ("cpu-abacus", "gpu")]
    assert kinds == ["cpu", "cuda"]


REPORT = (REPOSITORY / "report.md").read_text(encoding="utf-8")


def test_the_top_level_report_is_the_reference_devices():
    own = (FIGURES / REFERENCE_DEVICE / "report.md").read_text(encoding="utf-8")
    own = own.replace("](../../notebooks/", "](notebooks/").replace("](../", "](figures/")
    own = re.sub(r"\]\(((\d\d_|ladder|tables/)[^)]*)\)", rf"](figures/{REFERENCE_DEVICE}/\1)", own)
    assert own == REPORT


def test_links_of_the_report_lead_somewhere():
    anchors = [text.anchor(title) for title in re.findall(r"^#+ (.*)$", REPORT, flags=re.MULTILINE)]
    assert len(anchors) == len(set(anchors)), (
        "a heading stands twice: its links would lead to the first"
    )
    assert set(re.findall(r"\]\(#([^)]*)\)", REPORT)) <= set(anchors)
    for target in re.findall(r"\]\((?!#|https?:)([^)]*)\)", REPORT):
        assert (REPOSITORY / target.split("#")[0]).exists(), target


def test_the_report_is_short():
    assert len(REPORT.encode()) <= 45_000 and len(REPORT.split()) <= 7_000
    _, *chapters = re.split(r"^(?=## \d\d · )", REPORT, flags=re.MULTILINE)
    assert len(chapters) == len(notebooks.names())
    for part in chapters:
        part = part.split(f"## {card.PROVENANCE}")[0]
        facts = re.findall(r"^- (?!\*)(.*)$", part, flags=re.MULTILINE)
        assert facts and max(len(fact.split()) for fact in facts) <= 32, part.splitlines()[0]
        assert part.count("![") <= 3, part.splitlines()[0]


def test_report_holds_no_path_of_the_measuring_machine():
    for path in [
        REPOSITORY / "report.md",
        *FIGURES.glob("*/*.json"),
        *FIGURES.glob("*/records/*n*"),
    ]:
        assert not re.search(r"/(home|root|tmp|work|Users)/", path.read_text(encoding="utf-8")), (
            path
        )


HOSTILE = (
    "=cmd|'/C calc'!A0 <script>alert(1)</script> <img src=x onerror=alert(1)> "
    "![a](http://evil.example/a.png) [a](javascript:alert(1))\n\n# A heading\n\n- an item\n\n"
    "| a |\n|---|\n\n`</code><b>` a\\ $\\frac{ \x1b[31m ]\\u0028http://evil.example)"
)


def written_by(folder: Path, text: str, device: str) -> Path:
    """Writes the CPU's records of chapter 01 as of another device, with `text` wherever any is
    free; their report.
    """
    source = FIGURES / "cpu-intel-xeon-processor"
    store = store_of(folder / device, NOTEBOOK)
    environment = json.loads((source / "environment.json").read_text())
    environment["device"]["name"] = environment["cpu"]["name"] = text
    (folder / device / "environment.json").write_text(json.dumps(environment))
    free = dict.fromkeys(("machine", "recorded_at", "session"), text)
    free |= {"software": {"torch": text, "triton": text}, "source": {"commit": text}}
    for record in RecordStore(source / "records" / f"{NOTEBOOK}.jsonl").load():
        failed = record.section == "compile"
        status = {"status": "error", "reason": text, "metrics": {}} if failed else {}
        case = record.case | ({"impl": text} if "impl" in record.case else {})
        store.append(dataclasses.replace(record, **free, **status, device=device, case=case))
    done = {"num_missing": 3, "profile": text}
    (folder / device / "records" / f"{NOTEBOOK}.done.json").write_text(json.dumps(done))
    return render.rebuild(device, output=folder)[0]


def test_text_of_records_and_environments_stays_text(tmp_path):
    # Apart, or the second would compare itself with the first.
    plain = written_by(tmp_path / "plain", "words", "abacus").read_text(encoding="utf-8")
    path = written_by(tmp_path / "hostile", HOSTILE, "sundial")
    hostile = path.read_text(encoding="utf-8").replace("sundial", "abacus")
    for structure in (r"^#+ .*", r"\]\([^)]*\)", r"^[|>-]", r"^\s*$"):
        first, second = (
            re.findall(structure, page, flags=re.MULTILINE)[1:] for page in (plain, hostile)
        )
        assert first == second, "the text made a heading, link, list, table or paragraph"
    assert not re.search("<[a-z/!]", re.sub("`[^`\n]*`", "", hostile)) and hostile != plain
    for table in path.parent.glob("tables/*.csv"):
        cells = pd.read_csv(table, dtype=str, keep_default_na=False).to_numpy().flatten().tolist()
        assert not [cell for cell in cells if re.match(r"[=@]|[+-](?![\d.])|[+-].*[a-z]", cell)]
