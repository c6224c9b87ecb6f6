"""The rules of truth: each is broken on purpose here, and what it guards says no."""

import math

import pandas as pd
import pytest

from labkit.records import Record, RecordStore
from labkit.report import facts, verdicts
from labkit.report.chapter import Chapter
from labkit.report.facts import Fact, Quantity, compare, compare_all, measured, sentence
from labkit.report.frame import DISTURBED, UNSTEADY, by_way, cell, only, size_name


def row(precision="fp32", median_ms=10.0, **values):
    return {
        "status": "ok",
        "size": "2.7b",
        "context": 512,
        "precision": precision,
        "phase": "graph_step",
        "timer_method": "window",
        "session": "a",
        "half_width_fraction": 0.0,
        "disturbed": False,
        "median_ms": median_ms,
    } | values


def frame(*rows):
    return pd.DataFrame(rows)


BASE = {"precision": "fp32"}
OTHER = {"precision": "bf16"}
TEXTS = {"ahead": "Ahead {ratio}", "level": "Level", "behind": "Behind {ratio}"}


@pytest.mark.parametrize(
    ("other_ms", "half_width", "verdict"),
    [(5.0, 0.0, "ahead"), (10.0, 0.0, "level"), (20.0, 0.0, "behind"), (9.0, 0.2, "undecided")],
)
def test_a_verdict_comes_from_the_interval(other_ms, half_width, verdict):
    rows = frame(row(half_width_fraction=half_width), row("bf16", other_ms))
    fact = compare(rows, BASE, OTHER, size="2.7b")
    assert fact.verdict == verdict
    assert fact["ratio"].value == pytest.approx(10.0 / other_ms)
    assert fact.interval.low <= 10.0 / other_ms <= fact.interval.high


def test_a_noisy_cell_cannot_carry_a_headline():
    noisy = compare(frame(row(half_width_fraction=0.4), row("bf16", 8.0)), BASE, OTHER)
    said = sentence(noisy, **TEXTS, because="of its kernels")
    assert noisy.verdict == verdicts.UNDECIDED
    assert noisy["interval"] in said and "undecided" in said
    assert "Ahead" not in said and "kernels" not in said


def test_a_reason_stands_with_the_verdict_that_it_explains_and_disappears_with_it():
    faster = compare(frame(row(), row("bf16", 5.0)), BASE, OTHER)
    assert sentence(faster, **TEXTS, because="why") == "Ahead 2.00×: why."
    for other_ms in (10.0, 20.0):
        fact = compare(frame(row(), row("bf16", other_ms)), BASE, OTHER)
        assert "why" not in sentence(fact, **TEXTS, because="why")


def test_a_verdict_without_a_text_prints_the_plain_form_with_its_interval():
    slower = compare(frame(row(), row("bf16", 20.0)), BASE, OTHER, size="2.7b")
    assert (
        sentence(slower, ahead="Ahead")
        == f"bf16 against fp32 (2.7b (3.4 B)): behind, {slower['interval']}."
    )


def test_an_undecided_comparison_takes_no_text_of_its_own():
    with pytest.raises(ValueError, match="accepted: ahead, level, behind"):
        sentence(compare(frame(row(), row("bf16")), BASE, OTHER), undecided="about the same")


def test_a_sentence_holds_at_most_three_numbers():
    fact = compare(frame(row(), row("bf16", 5.0)), BASE, OTHER)
    with pytest.raises(ValueError, match="4 numbers"):
        sentence(fact, ahead="{base} {other} {ratio} {saved}")


def test_what_was_not_measured_says_so():
    failed = row("bf16", math.nan, status="oom")
    for rows in (frame(row()), frame(row(), failed), pd.DataFrame()):
        fact = compare(rows, BASE, OTHER, size="2.7b")
        assert "not measured" in sentence(fact, **TEXTS).lower()


def test_times_of_two_kinds_are_never_divided():
    called = row("bf16", 5.0, phase="train_step")
    with pytest.raises(ValueError, match="a device and a call time"):
        facts.compare_rows(row(), called)


def test_a_case_that_names_several_rows_is_refused():
    rows = frame(row(), row(context=1024), row("bf16"))
    with pytest.raises(ValueError, match="differ in context"):
        compare(rows, BASE, OTHER)


@pytest.mark.parametrize(
    ("values", "mark"), [({"disturbed": True}, DISTURBED), ({"steady": 0}, UNSTEADY)]
)
def test_a_mark_follows_its_value_wherever_it_is_printed(values, mark):
    marked = row(sustained_ms=10.0, **values)
    other = row("bf16", 5.0, sustained_ms=5.0, steady=1)
    fact = compare(frame(marked, other), BASE, OTHER, value="sustained_ms")
    assert cell(marked, "sustained_ms") == f"{mark}10.0"
    assert (
        fact.marked and str(fact["base"]).startswith(mark) and str(fact["ratio"]).startswith(mark)
    )
    assert sentence(fact, **TEXTS) == f"Ahead {mark}2.00×."
    assert sentence(measured(frame(marked), "sustained_ms"), "{value}") == f"{mark}10.0 ms."


def test_small_kernels_memory_models_and_few_cases_are_no_finding():
    fast = compare(frame(row(median_ms=0.4), row("bf16", 0.2)), BASE, OTHER)
    light = compare(
        frame(row(peak_bytes=2**20), row("bf16", peak_bytes=2**19)), BASE, OTHER, value="peak_bytes"
    )
    tiny = compare(frame(row(size="nano"), row("bf16", 5.0, size="nano")), BASE, OTHER)
    few = compare_all(frame(row(), row("bf16", 5.0)), BASE, OTHER, ["size"])
    for fact in (fast, light, tiny, few):
        assert fact.small
        assert "Too small" in sentence(fact, "{value}", **TEXTS)


def sizes(*pairs):
    names = ("small", "large", "xl-2025", "2.7b")
    rows = [row(size=size, median_ms=base) for size, (base, _) in zip(names, pairs, strict=False)]
    return frame(
        *rows,
        *(row("bf16", other, size=size) for size, (_, other) in zip(names, pairs, strict=False)),
    )


def test_a_tally_counts_its_cases_and_says_which_verdict_they_share():
    fact = compare_all(sizes((10, 8), (10, 7), (10, 6)), BASE, OTHER, ["size"])
    assert (fact.verdict, fact["total"].value, fact["range"]) == ("ahead", 3, "1.25× to 1.67×")
    mixed = compare_all(sizes((10, 8), (10, 10), (10, 20)), BASE, OTHER, ["size"])
    assert mixed.verdict == facts.MIXED
    assert sentence(mixed) == "bf16 against fp32: ahead in 1, level in 1, behind in 1 of 3 cases."


def test_a_selection_of_mixed_cases_without_its_total_is_not_printed():
    mixed = compare_all(sizes((10, 8), (10, 10), (10, 20)), BASE, OTHER, ["size"])
    assert sentence(mixed, "Faster by up to {most}").startswith("bf16 against fp32: ahead in 1")
    assert sentence(mixed, "Faster in {ahead} of {total}") == "Faster in 1 of 3."


def test_a_tally_of_a_marked_case_is_marked():
    rows = sizes((10, 8), (10, 7), (10, 6))
    assert not compare_all(rows, BASE, OTHER, ["size"]).marked
    assert compare_all(rows.assign(disturbed=True), BASE, OTHER, ["size"]).marked


def test_a_range_wider_than_twice_names_its_two_cases():
    fact = compare_all(sizes((10, 8), (10, 7), (10, 2)), BASE, OTHER, ["size"])
    assert fact["range"] == "1.25× (small) to 5.00× (xl-2025)"


def test_of_bytes_the_ratio_is_the_others_over_the_bases_and_less_is_ahead():
    rows = frame(row(peak_bytes=4 * 2**30), row("bf16", peak_bytes=2**30))
    fact = compare(rows, BASE, OTHER, value="peak_bytes")
    assert (fact.verdict, str(fact["ratio"]), str(fact["other"])) == ("ahead", "0.250×", "1.00 GiB")


def test_sessions_that_agree_decide_what_the_samples_of_one_could_not():
    def over(sessions, precision):
        times = {name: {"median_ms": ms} for name, ms in sessions.items()}
        return row(
            precision, times["c"]["median_ms"], session="c", sessions=times, half_width_fraction=0.2
        )

    base = over({"a": 104.4, "b": 103.6, "c": 104.8}, "fp32")
    other = over({"a": 100.0, "b": 100.0, "c": 100.0}, "bf16")
    fact = facts.compare_rows(base, other)
    assert (fact.verdict, fact.num_sessions) == ("ahead", 3)
    assert fact.interval.low == pytest.approx(1.036 / 1.01)
    base["sessions"]["b"] = {"median_ms": 95.0}
    assert facts.compare_rows(base, other).verdict == "undecided"


def test_calls_of_two_hosts_decide_nothing_where_the_host_sets_their_time():
    held = {"phase": "train_step", "launch_median_ms": 9.5, "host_median_ms": 10.0}
    base = row(**held)
    other = row("bf16", 6.0, session="b", **held)
    assert facts.compare_rows(base, other).verdict == "undecided"
    assert facts.compare_rows(base, other | {"session": "a"}).verdict == "ahead"


def record(session, commit, median_ms, **changes):
    case = {"size": "2.7b", "context": 512, "precision": "fp32"} | changes
    return Record(
        notebook="01_benchmarking",
        section="execution",
        case=case,
        phase="graph_step",
        device="gpu",
        measurement_version=1,
        metrics={"median_ms": median_ms},
        timer={"method": "window"},
        source={"commit": commit},
        session=session,
        recorded_at="2026-01-01T00:00:00+00:00",
    )


def test_a_session_of_another_commit_enters_no_number_range_or_count(tmp_path):
    store = RecordStore(tmp_path / "gpu" / "records" / "01_benchmarking.jsonl")
    store.path.parent.mkdir(parents=True)
    for one in (
        record("old", "1" * 40, 50.0),
        record("first", "2" * 40, 10.2),
        record("last", "2" * 40, 10.0),
    ):
        store.append(one)
    chapter = Chapter("01_benchmarking", device="gpu", output=str(tmp_path))
    shown = only(chapter.records("execution"), size="2.7b")
    assert verdicts.by_session(shown, "median_ms") == {"first": 10.2, "last": 10.0}
    assert {one.session for one in chapter.every_record()} == {"first", "last"}


def test_growth_fits_share_and_agreement():
    lengths = frame(*(row(context=n, median_ms=ms) for n, ms in ((512, 10.0), (2048, 160.0))))
    assert facts.growth(lengths, "context", "median_ms", 512, 2048)["value"].value == pytest.approx(
        2
    )
    lost = frame(row(), row(context=1024, status="oom"))
    fits = facts.fits(lost, size="2.7b")
    assert (str(fits["value"]), str(fits["lost"])) == ("512", "1,024")
    share = facts.share_of(lengths, lambda one: one["median_ms"] > 50, "slow steps")
    assert str(share) == "1 of 2" and share.small
    told = frame({"is": 100.0, "told": 102.0, "at": "x"}, {"is": 100.0, "told": 80.0, "at": "y"})
    agreement = facts.agreement(told, "is", "told", 0.03, lambda one: one["at"])
    assert (str(agreement), str(agreement["worst"]), agreement["case"]) == ("1 of 2", "-20 %", "y")


def test_published_values_are_counted_whole():
    theirs = frame(
        *({"size": "2.7b", "gpu": gpu, "published_ms": ms} for gpu, ms in (("a", 5.0), ("b", 20.0)))
    )
    fact, rows = facts.published(theirs, frame(row()), ["size"])
    assert (fact["total"].value, fact["above"].value, fact["gpus"].value) == (2, 1, 2)
    assert rows["ratio"].tolist() == [0.5, 2.0]
    assert facts.published(theirs, pd.DataFrame(), ["size"])[0].missing


def test_several_facts_make_one_sentence_and_one_missing_silences_it():
    one = Fact("", {"value": Quantity(0.7, "%")})
    assert sentence((one, one), "{0} and {1}") == "70 % and 70 %."
    assert "Not measured" in sentence(
        (one, Fact("", missing="that was not measured")), "{0} and {1}"
    )


def test_ways_make_columns_and_a_way_of_several_rows_is_refused():
    rows = frame(row(), row("bf16", 5.0), row("bf16", 6.0, size="small"))
    table = by_way(rows, "size", {"fp32": BASE, "bf16": OTHER})
    assert table.to_dict("list") == {
        "size": ["small (129 M)", "2.7b (3.4 B)"],
        "fp32": ["–", "10.0"],
        "bf16": ["6.00", "5.00"],
    }
    with pytest.raises(ValueError, match="'all' names 2 rows"):
        by_way(rows, "size", {"all": {}})


@pytest.mark.parametrize(
    ("size", "name"), [("2.7b", "2.7b (3.4 B)"), ("small", "small (129 M)"), ("other", "other")]
)
def test_a_size_is_named_with_its_parameters(size, name):
    assert size_name(size) == name
