"""A folder that someone sends is believed only where its tables follow from its records."""

import shutil

import pytest
from chapters import labkit

from labkit.configs import FIGURES
from labkit.report import render, verify

SENT = "cpu-intel-xeon-processor"
CHAPTER = "03_mixed_precision"


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / SENT
    for part in ("records", "tables"):
        (folder / part).mkdir(parents=True)
        for path in (FIGURES / SENT / part).glob(f"{CHAPTER[:2]}_*"):
            shutil.copy(path, folder / part)
    shutil.copy(FIGURES / SENT / "environment.json", folder)
    return folder


def failures(folder):
    return {one.name: one.detail for one in verify.findings(folder) if not one.is_fine}


def test_a_committed_folder_is_fine_until_a_number_is_changed(folder):
    assert failures(folder) == {}
    table = folder / "tables" / "03_steps.csv"
    table.write_text(table.read_text().replace("nano", "micro", 1))
    assert failures(folder) == {"tables": "03_steps.csv do not follow from the records"}
    assert labkit("verify", folder).exit_code == 1


def test_records_of_nobody_knows_which_code_are_named(folder):
    path = folder / "records" / f"{CHAPTER}.jsonl"
    path.write_text(path.read_text().replace('"dirty":false', '"dirty":true'))
    assert "of changed or unknown code" in failures(folder)["commit"]


def test_a_damaged_record_is_one_line_and_ends_the_check(folder):
    path = folder / "records" / f"{CHAPTER}.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:3], lines[3][:40] + "\n", *lines[4:]]))
    (found,) = verify.findings(folder)
    assert not found.is_fine and f"{CHAPTER}.jsonl, line 4: not JSON" in found.detail


def test_a_renamed_folder_is_named_where_it_is(folder):
    other = folder.rename(folder.with_name("other"))
    assert failures(other)["tables"] == f"{other} holds records of {SENT}, not of 'other' alone"


def test_a_report_of_the_quick_profile_says_so(folder):
    done = folder / "records" / f"{CHAPTER}.done.json"
    done.write_text(done.read_text().replace('"smoke"', '"quick"'))
    report, *_ = render.rebuild(SENT, output=folder.parent)
    assert "of all chapters the quick profile is measured" in report.read_text()
