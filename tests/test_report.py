"""The report says what the records say, is short, and is the one that the committed records
give.
"""

import dataclasses
import itertools
import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path

import conftest
import matplotlib
import numpy as np
import pandas as pd
import pytest

from labkit import notebooks
from labkit.configs import FIGURES, PHASES, REFERENCE_DEVICE, REPOSITORY, SIZES
from labkit.records import RecordError, RecordStore, folder_of, measured_devices, newest
from labkit.report import card, figures, render, tables, text
from labkit.report.chapter import Chapter
from labkit.report.facts import compare

NOTEBOOK = "01_benchmarking"
DEVICES = [device for device in measured_devices(FIGURES) if not re.match(r"\d+x-", device)]
"""What several of a device measured together belongs to its report."""


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


def change(folder, section, phase, status="ok", metrics=None, telemetry=None, **case):
    """Appends newer records like the newest matching ones, with other metrics, as a new measurement
    would.
    """
    store = RecordStore(folder / "records" / f"{NOTEBOOK}.jsonl")
    known = [
        r for r in newest(store.load()) if (r.section, r.phase, r.status) == (section, phase, "ok")
    ]
    changed = [record for record in known if case.items() <= record.case.items()]
    assert changed
    for record in changed:
        around = (
            dict.fromkeys(("min_ms", "p20_ms", "p80_ms"), metrics["median_ms"]) if metrics else {}
        )
        values = {**record.metrics, **around, **(metrics or {})} if status == "ok" else {}
        timer = record.timer if values else {}
        kept = record.telemetry if telemetry is None else telemetry
        store.append(
            dataclasses.replace(record, status=status, metrics=values, timer=timer, telemetry=kept)
        )


FUSED = {
    "size": "2.7b",
    "context": 512,
    "precision": "bf16",
    "compile": "regional",
    "attention": "auto",
}


def shown(folder):
    """The ladder as table, CSV, figure, fact and first page."""
    chapters = {NOTEBOOK: chapter(folder)}
    steps = chapter(folder).records("execution")
    graphs = steps[steps["phase"] == "graph_step"]
    fact = compare(
        graphs, card.LADDER["fp32"], card.LADDER["+ our kernels"], size="2.7b", context=512
    )
    figure = figures.svg(card.ladder(chapters))
    return (
        card.ladder_table(graphs).to_string(),
        tables.to_csv(steps),
        figure,
        fact,
        card.page(chapters, {}),
    )


def test_a_changed_time_changes_table_csv_figure_fact_and_first_page(folder):
    before = shown(folder)
    change(
        folder,
        "execution",
        "graph_step",
        metrics={"median_ms": 1e6, "host_median_ms": 1e6},
        **FUSED,
    )
    after = shown(folder)
    assert all(old != new for old, new in zip(before, after, strict=True))
    assert "1,000,000" in after[0] and "1e+06" in after[1] and "1,000,000" in after[4]
    assert (before[3].verdict, after[3].verdict) == ("ahead", "behind")


def test_a_busy_machine_is_said_in_the_table_and_by_the_fact(folder):
    change(folder, "execution", "graph_step", telemetry={"disturbed": True}, **FUSED)
    table, _, _, fact, page = shown(folder)
    assert "⚠" in table and "⚠" in page and fact.marked


def test_out_of_memory_is_a_word_in_the_table(folder):
    change(folder, "execution", "graph_step", status="oom", **FUSED)
    table, _, _, fact, _ = shown(folder)
    assert "oom" in table and fact.missing


def test_without_records_every_form_says_so(tmp_path):
    empty = Chapter(NOTEBOOK, device="abacus", output=str(tmp_path))
    frame = empty.records("steps")
    assert "not measured on abacus" in empty.table(card.ladder_table, frame, caption="Times").data
    assert "Not measured" in empty.say(compare(frame, {"a": 1}, {"a": 2}), "x").data
    assert (
        "not measured on abacus"
        in empty.figure(card.ladder_figure, frame, name="a", caption="Times").data
    )
    assert "Not measured on abacus" in empty.more().data
    assert "labkit run 01" in empty.source().data


def test_a_table_larger_than_a_page_takes_is_refused(folder):
    steps = chapter(folder).records("steps")
    with pytest.raises(ValueError, match=r"'All' has 264 × 2 cells; accepted: 8 × 7"):
        chapter(folder).table(lambda frame: frame[["phase", "size"]], steps, caption="All")
    chapter(folder, save_figures=True).more()
    assert len((folder / "tables" / "01_steps.csv").read_text().splitlines()) == 265


def test_records_of_another_device_are_refused(folder):
    other = shutil.copytree(folder, folder.parent / "abacus")
    with pytest.raises(RecordError, match=f"holds records of {REFERENCE_DEVICE}, not of 'abacus'"):
        chapter(other).records("steps")
    store = RecordStore(folder / "records" / f"{NOTEBOOK}.jsonl")
    store.append(dataclasses.replace(store.load()[0], device="abacus", phase="other"))
    with pytest.raises(RecordError, match=f"holds records of abacus, {REFERENCE_DEVICE}, not of"):
        chapter(folder).records("steps")


def test_report_of_an_unknown_device_names_the_known(folder):
    with pytest.raises(ValueError, match=f"'abacus'.*measured: {REFERENCE_DEVICE}"):
        render.rebuild("abacus", output=folder.parent)


def test_unfinished_and_incomplete_runs_are_said_to_be(folder):
    done = folder / "records" / f"{NOTEBOOK}.done.json"
    done.write_text(json.dumps({**json.loads(done.read_text()), "num_missing": 7}))
    assert "7 measurements of the full profile are not recorded" in render._not_finished(
        folder, NOTEBOOK
    )
    done.unlink()
    assert "did not run to its end" in render._not_finished(folder, NOTEBOOK)


def test_a_chapter_alone_makes_a_page_that_says_what_is_missing(folder):
    (path,) = render.rebuild(REFERENCE_DEVICE, output=folder.parent)
    page = path.read_text(encoding="utf-8")
    assert page.startswith("# A transformer measured on NVIDIA H200")
    assert page.count("*Not measured; `labkit run") == len(notebooks.names()) - 1
    assert "Will it fit?" in page and "Which attention?" not in page


@pytest.fixture(scope="module", params=DEVICES)
def rebuilt(request, tmp_path_factory):
    """A device's report, figures and tables made anew from its records; returns the device and the
    devices' folder.
    """
    device = request.param
    target = tmp_path_factory.mktemp("figures")
    for source in {folder_of(FIGURES, device, name) for name in notebooks.names()}:
        shutil.copytree(source / "records", target / source.name / "records")
        shutil.copy(source / "environment.json", target / source.name)
    code = (
        "import resource, sys; from pathlib import Path; from labkit.report import render\n"
        "render.rebuild(sys.argv[1], output=Path(sys.argv[2]))\n"
        "used = resource.getrusage(resource.RUSAGE_SELF)\n"
        "print([name for name in ('torch', 'triton', 'papermill') if name in sys.modules])\n"
        "print(f'report of all chapters: {used.ru_utime + used.ru_stime:.1f} s of CPU time')\n"
    )
    command = [sys.executable, "-c", code, device, str(target)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    (target / "log").write_text(run.stdout)
    return device, target


def test_a_report_is_rebuilt_without_torch_and_without_a_kernel(rebuilt):
    loaded, used = (rebuilt[1] / "log").read_text().splitlines()
    print(used)
    assert loaded == "[]"


MADE = ("*.svg", "*.ipynb", "tables/*.csv", "report.md")


def made(root: Path, device: str) -> dict[str, Path]:
    folders = {root / device, *(folder_of(root, device, name) for name in notebooks.names())}
    paths = [path for folder in folders for pattern in MADE for path in folder.glob(pattern)]
    return {str(path.relative_to(root)): path for path in paths}


def test_committed_report_figures_and_tables_are_those_of_the_committed_records(rebuilt):
    """A stale sentence, figure or table is found here, and a file that nothing makes any more."""
    device, root = rebuilt
    committed = made(FIGURES, device)
    fresh = made(root, device)
    assert committed.keys() == fresh.keys()
    stale = [name for name in fresh if committed[name].read_bytes() != fresh[name].read_bytes()]
    assert not stale, (
        f"run `labkit report --device {device}` (with matplotlib {matplotlib.__version__})"
    )


def test_every_committed_file_of_figures_is_compared_with_what_is_made():
    compared = {name for device in DEVICES for name in made(FIGURES, device)}
    others = {
        str(path.relative_to(FIGURES)) for path in FIGURES.rglob("*") if path.is_file()
    } - compared
    assert {
        name
        for name in others
        if not re.search(r"/(records/|environment\.json$|report\.html$)", name)
    } == set()


@pytest.mark.parametrize(
    "name", notebooks.names()[:1] + list(conftest.more(*notebooks.names()[1:]))
)
def test_the_images_that_a_notebook_holds_are_those_of_the_committed_records(name):
    """The reference device's executed notebooks are those in notebooks/; nbval compares no
    image.
    """
    held, shown = (
        [
            output["data"]["image/png"].strip()
            for cell in notebooks.without_lessons(notebook).cells
            for output in cell.get("outputs", [])
            if "image/png" in output.get("data", {})
        ]
        for notebook in (notebooks.read(name), notebooks.show(name, {}))
    )
    assert held and held == shown, "run `labkit report --save-notebooks`"


def test_the_top_level_report_is_the_reference_devices():
    own = (FIGURES / REFERENCE_DEVICE / "report.md").read_text(encoding="utf-8")
    own = own.replace("](../../notebooks/", "](notebooks/").replace("](../", "](figures/")
    own = re.sub(r"\]\(((\d\d_|ladder|tables/)[^)]*)\)", rf"](figures/{REFERENCE_DEVICE}/\1)", own)
    assert (REPOSITORY / "report.md").read_text(encoding="utf-8") == own


@pytest.fixture(scope="module")
def report():
    return (REPOSITORY / "report.md").read_text(encoding="utf-8")


def test_links_of_the_report_lead_somewhere(report):
    anchors = [text.anchor(title) for title in re.findall(r"^#+ (.*)$", report, flags=re.MULTILINE)]
    assert len(anchors) == len(set(anchors)), (
        "a heading stands twice: its links would lead to the first"
    )
    assert set(re.findall(r"\]\(#([^)]*)\)", report)) <= set(anchors)
    for target in re.findall(r"\]\((?!#|https?:)([^)]*)\)", report):
        assert (REPOSITORY / target.split("#")[0]).exists(), target


@pytest.mark.parametrize(
    "folder", sorted(FIGURES.glob("*/records")), ids=lambda folder: folder.parent.name
)
def test_the_records_of_a_device_are_small(folder):
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 6_000_000


def sentences(markdown: str) -> list[str]:
    """The sentences of a page's prose: no heading, table, figure or link target."""
    prose = [
        line
        for line in markdown.splitlines()
        if line and not line.startswith(("#", "|", "!", "*More"))
    ]
    plain = re.sub(r"\]\([^)]*\)|[*`\[]", "", "\n".join(prose))
    return [one for one in re.split(r"(?<=[.?!:])\s+|\n", plain) if len(one.split()) > 2]


def test_the_report_is_read_in_ten_minutes(report):
    lengths = [len(one.split()) for one in sentences(report)]
    print(
        f"{len(report.encode()):,} bytes, {len(report.split()):,} words, {np.mean(lengths):.1f} a "
        f"sentence"
    )
    assert len(report.encode()) <= 45_000
    assert len(report.split()) <= 7_000
    assert np.mean(lengths) <= 20


def test_facts_are_short_and_tables_and_figures_few(report):
    _, *chapters = re.split(r"^(?=## \d\d · )", report, flags=re.MULTILINE)
    assert len(chapters) == len(notebooks.names())
    for part in chapters:
        part = part.split(f"## {card.PROVENANCE}")[0]
        assert part.count("![") <= 3, part.splitlines()[0]
        facts = re.findall(r"^- (?!\*)(.*)$", part, flags=re.MULTILINE)
        assert facts and max(len(fact.split()) for fact in facts) <= 32, part.splitlines()[0]
        groups = itertools.groupby(part.splitlines(), lambda line: line[:1] == "|")
        for rows in (list(group) for is_row, group in groups if is_row):
            assert len(rows) - 2 <= tables.MAX_ROWS
            assert rows[1].count("|") - 1 <= tables.MAX_COLUMNS


def test_report_holds_no_path_of_the_measuring_machine():
    for path in [REPOSITORY / "report.md", *FIGURES.glob("*/*.json"), *FIGURES.glob("*/records/*")]:
        if path.suffix != ".lock":
            assert not re.search(
                r"/(home|root|tmp|work|Users)/", path.read_text(encoding="utf-8")
            ), path


MARKUP = (
    "<script>alert(1)</script> <img src=x onerror=alert(1)> ![a](http://evil.example/a.png) "
    "[a](javascript:alert(1))"
    "\n\n# A heading\n\n- an item\n\n| a |\n|---|\n\n`</code><b>` a\\ $\\frac{ \x1b[31m "
    "]\\u0028http://evil.example)"
)
FORMULAS = "=cmd|'/C calc'!A0", "@SUM(1)", "+1+cmd", "-1+cmd"


def written_by(folder: Path, text: str, device: str) -> Path:
    """Writes the CPU's records of chapter 01 as of another device, with `text` wherever any is
    free; their report.
    """
    source = FIGURES / "cpu-intel-xeon-processor"
    (folder / device / "records").mkdir(parents=True)
    environment = json.loads((source / "environment.json").read_text())
    environment["device"]["name"] = environment["cpu"]["name"] = text
    (folder / device / "environment.json").write_text(json.dumps(environment))
    store = RecordStore(folder / device / "records" / f"{NOTEBOOK}.jsonl")
    hostile = {
        "software": dict.fromkeys(("torch", "triton"), text),
        "source": {"commit": text},
        "device": device,
    }
    hostile |= dict.fromkeys(("machine", "recorded_at", "session"), text)
    for record in RecordStore(source / "records" / f"{NOTEBOOK}.jsonl").load():
        failed = (
            {"status": "error", "reason": text, "metrics": {}}
            if record.section == "compile"
            else {}
        )
        case = record.case | ({"impl": text} if "impl" in record.case else {})
        store.append(dataclasses.replace(record, **hostile, **failed, case=case))
    (folder / device / "records" / f"{NOTEBOOK}.done.json").write_text(
        json.dumps({"num_missing": 3, "profile": text})
    )
    return render.rebuild(device, output=folder)[0]


@pytest.mark.parametrize("text", [MARKUP, *FORMULAS[:1], *conftest.more(*FORMULAS[1:])])
def test_text_of_records_and_environments_stays_text(tmp_path, text):
    plain, hostile = (
        written_by(tmp_path, *of_device) for of_device in (("words", "abacus"), (text, "sundial"))
    )
    said = [
        path.read_text(encoding="utf-8").replace("sundial", "abacus") for path in (plain, hostile)
    ]
    for structure in (r"^#+ .*", r"\]\([^)]*\)", r"^[|>-]", r"^\s*$"):
        first, second = (re.findall(structure, report, flags=re.MULTILINE)[1:] for report in said)
        assert first == second, "the text made a heading, link, list, table or paragraph"
    assert not re.search("<[a-z/!]", re.sub("`[^`\n]*`", "", said[1])) and said[0] != said[1]
    for path in hostile.parent.glob("tables/*.csv"):
        cells = pd.read_csv(path, dtype=str, keep_default_na=False).to_numpy().flatten().tolist()
        assert not [cell for cell in cells if re.match(r"[=@]|[+-](?![\d.])|[+-].*[a-z]", cell)], (
            path
        )
    assert not [
        path for path in plain.parent.glob("tables/*.csv") if re.search("^'|,'", path.read_text())
    ]


# Machado, Oliveira & Fernandes (2009), severity 1, applied to linear RGB.
DEFICIENCIES = {
    "protanopia": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
}


def lab(colour: str, deficiency: str) -> np.ndarray:
    """Returns a colour as seen with a deficiency, in CIE L*a*b* under D65."""
    rgb = np.array(matplotlib.colors.to_rgb(colour))
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    seen = np.clip(np.array(DEFICIENCIES[deficiency]) @ linear, 0, 1)
    to_xyz = np.array(
        [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    )
    x, y, z = np.cbrt(np.maximum(to_xyz @ seen / [0.9505, 1.0, 1.089], 1e-9))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


PRECISION_NAMES = {"fp32", "tf32", "bf16", "fp16", "fp16_unscaled", "bf16_pure"}
TOGETHER = [PRECISION_NAMES, figures.STYLES.keys() & {*PHASES}, {*SIZES}]
TOGETHER.append(figures.STYLES.keys() - set().union(*TOGETHER))
"""Names that may stand in one figure: precisions, phases, sizes, implementations."""


@pytest.mark.parametrize("deficiency", DEFICIENCIES)
@pytest.mark.parametrize(
    "names", TOGETHER, ids=["precisions", "phases", "sizes", "implementations"]
)
def test_styles_differ_for_every_eye(names, deficiency):
    for one, other in itertools.combinations(sorted(names), 2):
        a, b = figures.STYLES[one], figures.STYLES[other]
        distance = np.linalg.norm(lab(a.colour, deficiency) - lab(b.colour, deficiency))
        assert distance > 15 or (a.marker, a.dash) != (b.marker, b.dash), (
            f"{one} and {other}: {distance:.1f}"
        )


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.012345, "0.0123"),
        (1.5, "1.50"),
        (123.4, "123"),
        (12345.6, "12,346"),
        (0, "0"),
        (None, "–"),
        (math.nan, "–"),
        (-2.5, "-2.50"),
        (1e-9, "0.000000"),
    ],
)
def test_number(value, shown):
    assert text.number(value) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.00041, "4.1e-4"),
        (1.25e-12, "1.2e-12"),
        (3e10, "3.0e+10"),
        (0.0, "0.0e+0"),
        (None, "–"),
        (math.nan, "–"),
    ],
)
def test_scientific(value, shown):
    assert text.scientific(value) == shown


def test_listing_count_and_percent():
    assert text.listing("abc") == "a, b and c"
    assert text.listing("abcdefgh", limit=3) == "a, b, c and 5 more"
    assert text.count(1, "case") == "1 case" and text.count(1200, "case") == "1,200 cases"
    assert (text.percent(0.05), text.percent(0.034), text.percent(0.414)) == (
        "5 %",
        "3.4 %",
        "41 %",
    )


def test_markdown_cells_hold_neither_columns_nor_tags():
    frame = pd.DataFrame(
        {"kernel|name": ["`void f<a|b>`", "<script>"], "ms": ["1.0", "oom"], "note": ["", "a"]}
    )
    assert tables.to_markdown(frame).splitlines() == [
        "| kernel\\|name | ms | note |",
        "|---|---:|---:|",
        "| `void f<a\\|b>` | 1.0 | |",
        "| &lt;script> | oom | a |",
    ]
