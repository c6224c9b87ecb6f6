"""The rules of truth: each is broken on purpose here, and what it guards says no."""

import math

import pandas as pd
import pytest
from chapters import store_of

from labkit.records import Record
from labkit.report import facts, verdicts
from labkit.report.chapter import Chapter
from labkit.report.facts import Fact, Quantity, compare, compare_all, compare_rows, measured
from labkit.report.frame import cell, only
from labkit.report.text import span

BASE = {"precision": "fp32"}
OTHER = {"precision": "bf16"}
said = facts.sentence
TEXTS = {"ahead": "Ahead {ratio}", "level": "Level", "behind": "Behind {ratio}"}


def row(precision="fp32", median_ms=10.0, **values):
    case = {"size": "2.7b", "context": 512, "precision": precision, "phase": "graph_step"}
    timer = {"timer_method": "window", "session": "a", "half_width_fraction": 0.0}
    return {"status": "ok", **case, **timer, "disturbed": False, "median_ms": median_ms} | values


def pair(base=10.0, other=5.0, **values):
    return pd.DataFrame([row(median_ms=base, **values), row("bf16", other, **values)])


@pytest.mark.parametrize(
    ("other_ms", "half_width", "verdict"),
    [(5.0, 0.0, "ahead"), (10.0, 0.0, "level"), (20.0, 0.0, "behind"), (9.0, 0.2, "undecided")],
)
def test_a_verdict_comes_from_the_interval(other_ms, half_width, verdict):
    base = row(half_width_fraction=half_width)
    other = row("bf16", other_ms)
    interval = verdicts.ratio(base, other)
    fact = compare_rows(base, other)
    assert fact.verdict == verdict and fact["ratio"].value == pytest.approx(10.0 / other_ms)
    assert interval.low < 10.0 / other_ms < interval.high
    assert fact["interval"] == span(interval.low, interval.high)


def test_a_sentence_says_no_more_than_its_fact():
    noisy = compare(pair(10.0, 8.0, half_width_fraction=0.4), BASE, OTHER)
    texts = TEXTS | {"ahead": "Ahead {ratio}: of its kernels"}
    text = said(noisy, **texts)
    assert noisy["interval"] in text and "Undecided" in text
    assert "Ahead" not in text and "kernels" not in text
    assert said(compare(pair(), BASE, OTHER), **texts) == "Ahead 2.00×: of its kernels."
    for other_ms in (10.0, 20.0):
        assert "kernels" not in said(compare(pair(10.0, other_ms), BASE, OTHER), **texts)
    slower = compare(pair(10.0, 20.0), BASE, OTHER, size="2.7b")
    plain = f"Behind ({slower['interval']}): bf16 against fp32 (2.7b (3.4 B))."
    assert said(slower, ahead="Ahead") == plain


def test_a_case_that_ran_out_of_memory_says_so():
    failed = pair(status="oom")
    assert said(compare(failed, BASE, OTHER)) == "*Not measured: fp32 (out of memory).*"


def test_a_text_has_a_verdict_and_at_most_three_numbers():
    fact = compare(pair(), BASE, OTHER)
    with pytest.raises(ValueError, match="accepted: ahead, level, behind"):
        said(fact, undecided="about the same")
    with pytest.raises(ValueError, match="4 numbers"):
        said(fact, ahead="{base} {other} {ratio} {value}")


def test_what_was_not_measured_says_so_and_silences_a_sentence_of_several():
    failed = row("bf16", math.nan, status="oom")
    for rows in ([row()], [row(), failed], []):
        fact = compare(pd.DataFrame(rows), BASE, OTHER, size="2.7b")
        assert "Not measured" in said(fact, **TEXTS)
    one = Fact("", {"value": Quantity(0.7, "%")})
    assert said(one, one, text="{0} and {1}") == "70 % and 70 %."
    assert "Not measured" in said(one, fact, text="{0} and {1}")


def test_times_of_two_kinds_and_cases_of_several_rows_are_refused():
    with pytest.raises(ValueError, match="a device and a call time"):
        compare_rows(row(), row("bf16", 5.0, phase="train_step"))
    rows = pd.concat([pair(), pd.DataFrame([row(context=1024)])])
    with pytest.raises(ValueError, match="differ in context"):
        compare(rows, BASE, OTHER)


@pytest.mark.parametrize(("values", "mark"), [({"disturbed": True}, "⚠ "), ({"steady": 0}, "~ ")])
def test_a_mark_follows_its_value_wherever_it_is_printed(values, mark):
    marked = row(sustained_ms=10.0, **values)
    rows = pd.DataFrame([marked, row("bf16", 5.0, sustained_ms=5.0, steady=1)])
    fact = compare(rows, BASE, OTHER, value="sustained_ms")
    assert cell(marked, "sustained_ms") == f"{mark}10.0"
    assert fact.marked and said(fact, **TEXTS) == f"Ahead {mark}2.00×."
    assert said(measured(rows, "sustained_ms", **BASE), text="{value}") == f"{mark}10.0 ms."


def test_small_kernels_memory_models_and_few_cases_are_no_finding():
    memory = pair().assign(peak_bytes=[2**20, 2**19])
    for fact in (
        compare(pair(0.4, 0.2), BASE, OTHER),
        compare(memory, BASE, OTHER, value="peak_bytes"),
        compare(pair(size="nano"), BASE, OTHER),
    ):
        assert "Too small" in said(fact, text="{value}", **TEXTS)
    few = compare_all(pair(), BASE, OTHER, ["size"])
    assert said(few, ahead="Ahead {range}.") == "Ahead 2.00× (2.7b)."


def tally(*other_ms):
    sizes = ("small", "large", "xl-2025")
    rows = [pair(10, ms, size=size) for size, ms in zip(sizes, other_ms, strict=True)]
    return compare_all(pd.concat(rows), BASE, OTHER, ["size"])


def test_a_tally_counts_its_cases_and_says_which_verdict_they_share():
    fact = tally(8, 7, 6)
    assert (fact.verdict, fact["total"].value, fact["range"]) == ("ahead", 3, "1.25× to 1.67×")
    assert tally(8, 7, 2)["range"] == "1.25× (small) to 5.00× (xl-2025)", "over twice: by name"
    mixed = tally(8, 10, 20)
    plain = "bf16 against fp32: ahead in 1, level in 1, behind in 1 of 3 cases."
    assert said(mixed) == plain
    assert said(mixed, text="Faster by up to {most}") == plain, "a selection without its total"
    assert said(mixed, text="Faster in {ahead} of {total}") == "Faster in 1 of 3."


def test_of_bytes_the_ratio_is_the_others_over_the_bases_and_less_is_ahead():
    rows = pair().assign(peak_bytes=[4 * 2**30, 2**30])
    fact = compare(rows, BASE, OTHER, value="peak_bytes")
    assert (fact.verdict, str(fact["ratio"]), str(fact["other"])) == ("ahead", "0.250×", "1.00 GiB")
    assert said(fact) == "Ahead (0.250×): bf16 against fp32, peak bytes."


def test_sessions_that_agree_decide_what_the_samples_of_one_could_not():
    def over(precision, *times):
        sessions = {name: {"median_ms": ms} for name, ms in zip("abc", times, strict=True)}
        values = {"session": "c", "sessions": sessions, "half_width_fraction": 0.2}
        return row(precision, times[-1], **values)

    base = over("fp32", 104.4, 103.6, 104.8)
    other = over("bf16", 100.0, 100.0, 100.0)
    assert verdicts.ratio(base, other).low == pytest.approx(1.036 / 1.01)
    assert compare_rows(base, other).verdict == "ahead"
    base["sessions"]["b"] = {"median_ms": 95.0}
    assert compare_rows(base, other).verdict == "undecided"


def test_calls_of_two_hosts_decide_nothing_where_the_host_sets_their_time():
    held = {"phase": "train_step", "launch_median_ms": 9.5, "host_median_ms": 10.0}
    base = row(sustained_ms=10.0, **held)
    other = row("bf16", 6.0, sustained_ms=6.0, session="b", **held)
    for value in ("median_ms", "sustained_ms"):
        assert compare_rows(base, other, value).verdict == "undecided"
        assert compare_rows(base, other | {"session": "a"}, value).verdict == "ahead"


def test_a_session_of_another_commit_enters_no_number_range_or_count(tmp_path):
    store = store_of(tmp_path / "gpu", "01_benchmarking")
    for session, commit, ms in (("old", "1", 50.0), ("first", "2", 10.2), ("last", "2", 10.0)):
        store.append(
            Record(
                notebook="01_benchmarking",
                section="execution",
                case={"size": "2.7b"},
                phase="graph_step",
                device="gpu",
                measurement_version=1,
                metrics={"median_ms": ms},
                source={"commit": commit},
                session=session,
            )
        )
    chapter = Chapter("01_benchmarking", device="gpu", output=str(tmp_path))
    shown = only(chapter.records("execution"), size="2.7b")
    assert verdicts.by_session(shown, "median_ms") == {"first": 10.2, "last": 10.0}
    assert {one.session for one in chapter.every_record()} == {"first", "last"}


def test_what_grows_or_spreads_and_what_cannot_be_said():
    lengths = pd.DataFrame([row(), row(context=2048, median_ms=160.0)])
    grown = facts.growth(lengths, "context", "median_ms", 512, 2048)
    assert grown["value"].value == pytest.approx(2)
    assert facts.share_of(lengths, "median_ms > 50", "slow steps").small
    errors = pd.DataFrame({"error": [-0.02], "case": ["small"]})
    assert facts.spread(errors)["most"] == "2 % in 95 % of 1 cases"
    assert facts.spread(errors[:0]).missing
