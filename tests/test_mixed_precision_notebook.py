"""Notebook 03: numbers are rounded as the formats say, a case is what its label says, the report what records say."""

import functools
import itertools
import json
import math
from dataclasses import asdict

import chapters
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from chapters import CPU, execute_smoke, finished, in_section, on_a_cpu

from labkit import hardware, notebooks
from labkit.configs import BATCH_SIZE, BENCHMARKING, FIGURES, MIXED_PHASES, REFERENCE_DEVICE
from labkit.experiments import benchmarking
from labkit.experiments import mixed_precision as experiment
from labkit.experiments.mixed_precision import cases, run_case
from labkit.experiments.recipes import PrecisionWorkload
from labkit.experiments.sweep import Case, Skip
from labkit.experiments.training import Training, successor_sequences
from labkit.experiments.workload import step_parameters
from labkit.records import RecordStore
from labkit.report import figures, findings, tables
from labkit.report import mixed_precision as report
from labkit.report.chapter import Chapter
from labkit.report.profiles import attention_times

NOTEBOOK = "03_mixed_precision"


@pytest.fixture(autouse=True)
def this_device_is_a_cpu(request, monkeypatch):
    yield from on_a_cpu(monkeypatch, is_detected="gpu" not in request.keywords)


measure = functools.partial(chapters.measure, run_case)


def of_section(section: str, profile: str = "full") -> list[Case]:
    return in_section(cases(profile, "cuda"), section)


def text(sentences) -> str:
    return "\n".join(sentences)


def test_full_times_each_step_in_the_precisions_that_notebook_01_lacks_directly_after_bf16_autocast():
    steps = of_section("steps")
    found = [(c.parameters["size"], c.parameters["context"], c.parameters["precision"]) for c in steps]
    sizes, precisions = BENCHMARKING["full"].sizes, ("bf16", "fp16", "bf16_pure")
    assert found == [(s, c, p) for s in sizes for c in (128, 512) for p in precisions]
    assert {one.phases for one in steps} == {("forward", "backward", "train_step")}
    assert not any(one.fresh_process for one in steps), "the three share a worker"


@pytest.mark.parametrize("profile", ["smoke", "full"])
def test_notebook_01_measures_the_same_steps_in_its_precisions(profile):
    """So that its records can stand in the same table: the parameters differ in the precision alone."""
    theirs = [c.parameters for c in benchmarking.cases(profile, "cuda") if c.section == "steps"]
    for one in of_section("steps", profile):
        for precision in ("fp32", "bf16"):
            assert {**one.parameters, "precision": precision} in theirs


def test_published_sums_come_out():
    """Four variants of adding 0.01 a thousand times, as public tables have them."""
    sums = {key: values for key, values in report.published_sums().items()}
    assert sorted({value for values in sums.values() for value in values}) == [9.9531, 10.0001, 10.0021]
    for one in of_section("accumulation", "smoke"):
        key = tuple(one.parameters[name] for name in report.SERIES_KEYS)
        if key in sums:
            measured = measure(one)["sum"]
            assert measured.case == one.parameters
            assert {f"{measured.metrics['final_sum']:.4f}"} == {f"{value:.4f}" for value in sums[key]}


def test_every_section_covers_what_is_asked_of_it():
    series = {tuple(c.parameters[k] for k in report.SERIES_KEYS) for c in of_section("accumulation")}
    assert series >= set(report.PUBLISHED_SUMS.values())
    assert {key[:2] for key in series} >= {(m, a) for m in ("kahan", "pairwise") for a in ("fp16", "bf16")}
    scales = sorted({c.parameters["scale"] for c in of_section("normalisation")})
    assert (scales[0], scales[-1]) == (1e-4, 1e4)
    variants = {(c.parameters["norm"], c.parameters["statistics"]) for c in of_section("normalisation")}
    assert variants == {(n, s) for n in ("layer_norm", "rms_norm") for s in ("fp16", "bf16", "fp32", "library")}
    assert {(c.parameters["model"], c.parameters["autocast"]) for c in of_section("dtypes")} == {
        (model, dtype) for model in ("toy", "small") for dtype in ("fp16", "bf16")
    }
    training = of_section("training")
    assert {c.parameters["precision"] for c in training} == {*BENCHMARKING["full"].precisions, "fp16", "fp16_unscaled",
                                                            "bf16_pure"}  # fmt: skip
    assert {c.parameters["num_steps"] for c in training} == {200}


def test_the_steps_are_narrowed():
    steps = in_section(cases("full", "cuda", sizes=["xl-2026"], contexts=[512]), "steps")
    assert [(one.parameters["size"], one.parameters["context"]) for one in steps] == [("2.7b", 512)] * 3


def step(precision: str, context: int = 8, batch: int = 1) -> dict:
    return {**step_parameters("nano", context, precision), "batch": batch}


def test_a_step_in_pure_bf16_is_one():
    one = Case("steps", step("bf16_pure"), MIXED_PHASES, 60.0, 0.001)
    measured = measure(one)
    assert list(measured) == list(MIXED_PHASES)
    for phase in measured.values():
        assert phase.case == one.parameters
        assert phase.observed["parameter_dtype"] == "bfloat16"
        assert phase.metrics["median_ms"] > 0 and phase.metrics["n"] >= 3
    assert measured["forward"].metrics["loss"] == pytest.approx(math.log(10_000), rel=0.05)
    assert measured["train_step"].metrics["num_skipped_steps"] == 0


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "fp16_unscaled", "bf16_pure"])
def test_a_precision_is_read_back_from_what_runs(precision):
    workload = PrecisionWorkload(CPU, step(precision))
    assert workload.described() == step(precision)
    workload.model.to(torch.float64)
    assert workload.described() != step(precision)
    if precision == "fp16":
        workload = PrecisionWorkload(CPU, step(precision))
        workload.scaler = torch.amp.GradScaler("cpu", enabled=False)
        assert workload.described()["precision"] == "fp16_unscaled"


def test_fp16_is_not_timed_where_it_is_emulated_nor_tf32_trained_where_there_is_none():
    with pytest.raises(Skip, match="a processor: PyTorch emulates float16"):
        measure(Case("steps", step("fp16"), MIXED_PHASES, 60.0, 0.001))
    with pytest.raises(Skip, match="a processor has no TF32"):
        measure(next(one for one in of_section("training", "smoke") if one.parameters["precision"] == "tf32"))


def test_the_loss_scale_is_halved_until_the_gradients_are_finite():
    workload = PrecisionWorkload(CPU, step("fp16", context=4))
    workload.forward_backward()
    workload.scaler.update(2.0**20)
    workload.forward_backward()
    assert not all(parameter.grad.isfinite().all() for parameter in workload.model.parameters())
    workload.settle()
    assert workload.scaler.get_scale() < 2.0**20
    assert all(parameter.grad.isfinite().all() for parameter in workload.model.parameters())


def test_a_wrong_loss_or_gradient_gives_no_time():
    workload = PrecisionWorkload(CPU, step("bf16_pure"))
    assert workload.check_loss() > 0
    with torch.no_grad():
        workload.model.head.weight.mul_(100)
    with pytest.raises(AssertionError, match=r"the loss is .* in bf16_pure, 9\.2\d+ was expected"):
        workload.check_loss()
    with torch.no_grad():
        workload.model.head.weight.fill_(math.nan)
    with pytest.raises(AssertionError, match="gradients are not finite in bf16_pure at a loss scale of 1"):
        workload.settle()
    with pytest.raises(AssertionError, match="the loss is nan"):
        workload.check_loss()


def test_hooks_read_the_dtypes_of_the_live_modules():
    (one,) = [c for c in of_section("dtypes", "smoke") if c.parameters == {"model": "toy", "autocast": "bf16"}]
    measured = measure(one)["read"]
    assert measured.case == one.parameters
    dtypes = dict(measured.observed["dtypes"])
    assert next(iter(dtypes)) == "parameters" and list(dtypes)[-3:] == ["logits", "loss", "gradients"]
    assert dtypes["parameters"] == dtypes["gradients"] == dtypes["loss"] == "float32"
    assert dtypes["fc1_output"] == dtypes["relu_output"] == dtypes["logits"] == "bfloat16"


def test_modules_of_one_name_that_differ_are_shown_to():
    blocks = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2).double())

    def forward():
        logits = blocks[1](blocks[0](torch.ones(1, 2)).double())
        return logits.sum(), logits

    dtypes, loss = experiment.read_dtypes(blocks, forward)
    assert dtypes["*_output"] == "float32 and float64" == dtypes["parameters"]
    assert loss == float(forward()[0].detach()) and not any(module._forward_hooks for module in blocks.modules())


def test_operators_are_counted_below_autocast_and_views_are_not():
    x = torch.randn(4, 4)
    with experiment.OperatorCounter() as counter:
        x.t().view(4, 4)
        x[1:].unsqueeze(0)
        (x + 1).to(torch.bfloat16)
    assert (counter.num_operators, counter.num_casts, counter.cast_bytes) == (2, 1, 64 + 32)
    with experiment.OperatorCounter() as counter:
        x.clone()
        x.to(torch.float32)
        torch.empty(4, 4).copy_(x)
    assert counter.num_casts == 0
    weight = torch.nn.Parameter(x)
    with experiment.OperatorCounter() as counter, torch.autocast("cpu", torch.bfloat16):
        F.linear(F.linear(x, weight), weight)
    assert counter.num_casts == 2, "the input's and, once, the weight's"


def test_autocast_casts_every_weight_once_and_fp32_none():
    counts = {p: experiment.count_operators(PrecisionWorkload(CPU, step(p, context=4))) for p in ("fp32", "bf16")}
    assert all(counter.num_casts == 0 for counter in counts["fp32"].values())
    num_matrices = 2 * 7 + 1
    assert counts["bf16"]["forward"].num_casts > num_matrices
    assert counts["bf16"]["backward"].num_casts > num_matrices, "the gradients come back to fp32"
    added = counts["bf16"]["forward"].num_operators - counts["fp32"]["forward"].num_operators
    assert added == counts["bf16"]["forward"].num_casts


def test_the_task_is_a_permutation_and_the_same_every_time():
    data = successor_sequences(16, 3, 4, 10)
    assert data.shape == (3, 4, 11)
    successors: dict[int, set] = {}
    for sequence in data.flatten(0, 1).tolist():
        for token, following in itertools.pairwise(sequence):
            successors.setdefault(token, set()).add(following)
    assert all(len(found) == 1 for found in successors.values())
    assert torch.equal(data, successor_sequences(16, 3, 4, 10))


def test_a_run_counts_zeros_and_what_did_not_move():
    (one,) = [c for c in of_section("training", "smoke") if c.parameters["precision"] == "bf16_pure"]
    training = Training(CPU, {**one.parameters, "num_steps": 4, "learning_rate": 1e-12})
    measured = training.run()
    assert measured.case == {**one.parameters, "num_steps": 4, "learning_rate": 1e-12}
    # No step reaches half of the spacing of any bf16 number that is not tiny, and all gains are 1.
    assert measured.metrics["unmoved_gains"] == 1
    assert len(measured.samples["loss"]) == 4 == len(measured.samples["look_step"])
    gradient = torch.tensor([0.0, 2.0**-26, 2.0**-25, 2.0**-15, 1.0], dtype=torch.bfloat16)
    for parameter in training.matrices(list(training.model.parameters())):
        parameter.grad = gradient.repeat(parameter.numel() // 5 + 1)[: parameter.numel()].view_as(parameter)
    look = training.look(gradient)
    assert look["zero_logit_gradients"] == 0.2 and look["zero_weight_gradients"] == pytest.approx(0.2, abs=1e-3)


@functools.cache
def committed(notebook: str) -> tuple[str, ...]:
    """Returns the reference device's records, one line of JSON each."""
    records = RecordStore(FIGURES / REFERENCE_DEVICE / "records" / f"{notebook}.jsonl").load()
    return tuple(json.dumps(asdict(record)) for record in records)


@pytest.fixture
def frame(tmp_path):
    """Returns a function that gives a section of the committed records, some of them changed.

    `match`: case, phase and session of those that change; other arguments: their new metrics; `samples`, `session`,
    `status`, `observed`: the record's own.
    """

    def make(section: str, match=None, notebook=NOTEBOOK, **changes):
        lines, num_changed = [], 0
        for line in committed(notebook):
            record = json.loads(line)
            if match is not None and record["section"] == section:
                if match.items() <= {**record["case"], "phase": record["phase"]}.items():
                    num_changed += 1
                    own = {name: changes[name] for name in changes.keys() & record.keys()}
                    metrics = {name: value for name, value in changes.items() if name not in own}
                    record |= own
                    is_ok = record["status"] == "ok"
                    record["metrics"] = {**record["metrics"], **metrics} if is_ok else {}
            lines.append(json.dumps(record))
        assert match is None or num_changed
        path = tmp_path / REFERENCE_DEVICE / "records" / f"{notebook}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(lines) + "\n")
        return Chapter(notebook, device=REFERENCE_DEVICE, output=str(tmp_path)).records(section)

    return make


def test_a_sum_in_another_place_changes_the_table_and_the_findings(frame):
    before = report.findings_accumulation(frame("accumulation"))
    assert "4 of 4 published sums" in before[0] and "at 4 in bf16 (term 350; predicted 4)" in before[1]
    one = {"accumulator": "fp16", "method": "sequential"}
    changed = frame("accumulation", one, final_sum=9.9541, stall_measured=16.0)
    after = report.findings_accumulation(changed)
    assert "3 of 4 published sums" in after[0] and "at 16 in fp16" in after[1] and "predicted 32" in after[1]
    assert "9.9541" in set(report.table_accumulation(changed)["sum"])


def test_a_compensated_sum_without_error_is_called_the_grid(frame):
    """The terms in bf16 sum to 10.0098, of which the format has no number: an error of 0 is no accuracy."""
    assert (
        "terms sum to 10.0098, and the format has only multiples of 0.0625"
        in report.findings_accumulation(frame("accumulation"))[2]
    )
    off = frame("accumulation", {"method": "kahan", "accumulator": "bf16"}, final_sum=10.0625, error=0.0625)
    assert "within 0.84 spacings" in report.findings_accumulation(off)[2]


def test_a_published_dtype_that_differs_is_counted(frame):
    table = report.table_dtypes(frame("dtypes")).set_index("part")["published dtypes that agree"]
    assert table["`loss`"] == "2 of 3" and table["`gradients`"] == "3 of 3"
    narrow = frame("dtypes", {"model": "toy", "autocast": "bf16"}, observed={"dtypes": [["loss", "bfloat16"]]})
    assert report.table_dtypes(narrow).set_index("part").loc["`loss`", "published dtypes that agree"] == "1 of 3"
    wide = frame("dtypes", {"model": "small", "autocast": "fp16"}, observed={"dtypes": [["logits", "float32"]]})
    first, second, _ = report.findings_dtypes(wide)
    assert "bf16 autocast leaves" in first and "fp16 autocast leaves `logits` in float32." in second


def num_marks(figure) -> int:
    return sum(len(marks.get_offsets()) for axis in figure.axes for marks in axis.collections)


def test_statistics_that_break_are_counted_and_marked(frame):
    whole = frame("normalisation")
    fp16, bf16 = report.findings_normalisation(whole)
    assert "ε = 10⁻⁸ rounds to 0" in fp16 and "break in 0 of 54 cases" in bf16
    one = {"input": "bf16", "statistics": "bf16", "scale": 1.0, "norm": "layer_norm", "setting": "offset"}
    broken = frame("normalisation", one, overflowed_fraction=0.5)
    assert "break in 1 of 54 cases" in report.findings_normalisation(broken)[1]
    assert num_marks(report.figure_normalisation(broken)) == num_marks(report.figure_normalisation(whole)) + 1
    sound = {"overflowed_fraction": 0.0, "nonfinite_fraction": 0.0}
    kept = frame("normalisation", {"statistics": "fp16"}, **sound)
    assert "lack range" not in text(report.findings_normalisation(kept))


def steps_of(frame, **own):
    return report.steps(frame("steps", notebook="01_benchmarking"), frame("steps", **own))


def test_a_ratio_within_the_noise_is_not_ahead(frame):
    steps = steps_of(frame).drop(columns="sessions")
    case = (steps["size"] == "2.7b") & (steps["context"] == 512) & (steps["phase"] == "forward")
    fp32, bf16 = (case & (steps["origin"] == "01") & (steps["precision"] == name) for name in ("fp32", "bf16"))
    steps.loc[fp32, "median_ms"] = 1.01 * steps.loc[bf16, "median_ms"].item()
    pairs = report.gains(steps, "01")
    (verdict,) = pairs[(pairs["precision"] == "bf16") & ((pairs["ratio"] - 1.01).abs() < 1e-9)]["verdict"]
    assert verdict in ("level", "undecided")


def test_gains_are_told_by_the_kernels_alone_too(frame):
    case = {"status": "ok", "size": "small", "context": 512, "phase": "train_step", "attention": "eager"}
    case |= {"timer_method": "nsys", "session": "a"}
    profiles = pd.DataFrame([case | {"precision": p, "step_kernel_ms": ms} for p, ms in (("fp32", 6.0), ("bf16", 2.0))])
    profiles.attrs["device_kind"] = "cuda"
    said = report.findings_gains(steps_of(frame), profiles=profiles)
    assert "By a step's kernels alone, whatever its host, ahead (3.00×, training step of small at 512)." in said[0]
    assert report.findings_gains(steps_of(frame), profiles=profiles.iloc[:0])[1:] == said[1:]


def test_times_of_two_sessions_are_never_compared(frame):
    """Chapter 01's host was 1.6 times as fast: a ratio across the two would be the hosts'."""
    assert set(report.gains(steps_of(frame), "03")["precision"]) == {"fp16", "bf16_pure"}
    moved = steps_of(frame, match={"precision": "bf16"}, session="another")
    assert report.gains(moved, "03").empty
    assert "same session" not in text(report.findings_gains(moved))
    slower = steps_of(frame)
    slower.loc[slower["origin"] == "03", ["median_ms", "host_median_ms", "launch_median_ms"]] *= 1.6
    assert report.findings_gains(slower) == report.findings_gains(steps_of(frame))


def test_one_byte_more_is_more(frame):
    """Bytes are exact: no tolerance makes fewer cases of these."""
    assert "bf16 autocast 0.961× to 1.04× (more in 6 of 10 cases)" in report.findings_memory(steps_of(frame))[0]
    steps = steps_of(frame)
    is_step = (steps["phase"] == "train_step") & (steps["status"] == "ok") & (steps["origin"] == "01")
    fp32, bf16 = (is_step & (steps["precision"] == name) for name in ("fp32", "bf16"))
    for more, expected in ((1, "(more in 10 of 10 cases)"), (0, "(more in none of 10 cases)")):
        steps.loc[bf16, "peak_bytes"] = steps.loc[fp32, "peak_bytes"].to_numpy() + more
        assert f"bf16 autocast 1.00× {expected}" in report.findings_memory(steps)[0].replace("1.000×", "1.00×")
    fits = frame("steps", {"size": "10b", "precision": "fp16", "phase": "train_step"}, status="ok", peak_bytes=2.0**36)
    assert "alone" not in report.findings_memory(report.steps(frame("steps", notebook="01_benchmarking"), fits))[0]


def test_the_table_of_gains_holds_times_ratios_and_what_ran_out_of_memory(frame):
    steps = steps_of(frame).assign(sessions=None)
    forward = (steps["size"] == "small") & (steps["context"] == 128) & (steps["phase"] == "forward")
    for precision, ms in (("fp32", 8.0), ("bf16", 10.0)):
        rows = forward & (steps["origin"] == "01") & (steps["precision"] == precision)
        steps.loc[rows, ["median_ms", "host_median_ms", "launch_median_ms"]] = ms
    table = report.table_gains(steps).set_index(["size", "context"])
    assert len(table) == 12 and table.loc[("10b", 128), "training step"] == "oom → oom"
    assert table.loc[("small", 128), "forward"] == "8.00 → 10.0 (0.800×) †"
    assert report.table_gains(report.steps(frame("steps").iloc[:0], frame("steps"))).empty


def test_casts_follow_the_counts(frame):
    match = {"size": "small", "precision": "bf16", "phase": "forward"}
    counted = frame("operators", match, num_operators=586 * 2, num_casts=293)
    assert report.table_casts(counted).set_index("phase").loc["forward", "bf16 autocast"] == "1,172 (293, 969 MiB)"
    assert "37 % to 100 % to forward (50 % to 100 % casts)" in report.findings_casts(counted)[0]


def test_what_autocast_saves_of_attention_stands_beside_what_was_published(frame):
    profiles = Chapter("02_nsys_analysis", device="nvidia-h200").records("profiles")
    _, said = report.findings_casts(frame("operators"), profiles=profiles)
    scores = attention_times(profiles[profiles["context"] == 128]).query("attention == 'eager'")
    wide = scores.pivot(index="size", columns="precision", values="core_us")
    assert f"takes {findings.span(wide['fp32'] / wide['bf16'])} its time under bf16 autocast, at 128 tokens" in said
    assert said.endswith("context not stated, 1.26× to 3.36×.")
    profiles.attrs["device_kind"] = "cpu"
    assert len(report.findings_casts(frame("operators"), profiles=profiles)) == 1


def test_training_is_judged_by_the_ratio_of_losses_and_by_the_last_look(frame):
    """Within 0.05 nats of fp32's loss of 0.0025 ends whatever trains at all, and a mean over ten looks hides 99.9 %."""
    losses, underflow, gains = report.findings_training(frame("training"))
    assert "fp16, unscaled 1.52× and pure bf16 2.90×" in losses and "within" not in losses
    assert "3.23 % of the logits' fp16 gradients" in underflow and "99.9 % at the last" in underflow
    assert "100 % of the norm gains" in gains
    assert len(tables.unfolded(frame("training"), ["precision"], ["look_step", "zero_logit_gradients"])) == 6 * 10
    pure = {"precision": "bf16_pure"}
    good = text(report.findings_training(frame("training", pure, final_loss=0.0025, unmoved_gains=0.0)))
    assert "2.90×" not in good and "norm gains" not in good
    lost = frame("training", pure, final_loss=None)
    assert "pure bf16" not in report.findings_training(lost)[0]
    assert report.table_training(lost).set_index("precision").loc["pure bf16", "over fp32's"] == "–"
    assert "fp32's" not in text(report.findings_training(frame("training", {"precision": "fp32"}, status="error")))


def test_the_front_page_follows_the_records(frame, tmp_path):
    frame("steps", notebook="01_benchmarking")
    for changes, expected in (({}, "2.90×"), ({"match": {"precision": "bf16_pure"}, "final_loss": 0.004}, "1.59×")):
        frame("training", **changes)
        ((claim, heading),) = report.front(Chapter(NOTEBOOK, device=REFERENCE_DEVICE, output=str(tmp_path)))
        assert f"ends at {expected} fp32's" in claim and "more in 6 of 10 cases" in claim
        assert f"## {heading}" in [cell.source.split("\n")[0] for cell in notebooks.read(NOTEBOOK).cells]


def test_figures_are_the_same_bytes_twice_and_take_a_point_of_this_machine(frame):
    for make, section in ((report.figure_accumulation, "accumulation"), (report.figure_training, "training")):
        assert figures.svg(make(frame(section))) == figures.svg(make(frame(section)))
    drawn = report.figure_normalisation(frame("normalisation"))
    figures.mark_here(drawn, pd.DataFrame({"x": [1.0], "y": [0.01]}))
    assert "this machine" in [text.get_text() for text in drawn.axes[0].texts]


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """The smoke profile executed here, without a GPU; returns the device's folder and what the notebook showed."""
    folder, executed = execute_smoke(NOTEBOOK, tmp_path_factory.mktemp("figures"))
    outputs = [output for cell in executed.cells for output in cell.get("outputs", [])]
    return folder, "\n".join(output.get("data", {}).get("text/markdown", "") for output in outputs)


@pytest.mark.slow
def test_smoke_measures_every_case_and_draws_its_figures(measured):
    folder, shown = measured
    records = finished(NOTEBOOK, folder)
    assert not [one for one in records if one.status in ("error", "timeout", "oom")]
    skipped = [(one.section, one.case) for one in records if one.status == "skipped"]
    found = {(section, case.get("precision", case.get("input"))) for section, case in skipped}
    assert found == {("steps", "fp16"), ("training", "tf32"), ("normalisation", "fp16")}
    names = ("accumulation", "normalisation", "training")
    assert {path.name for path in folder.glob("*.svg")} == {f"03_{name}.svg" for name in names}
    assert "4 of 4 published sums come out" in shown and "| `loss` | float32 | float32 | 2 of 3 |" in shown
    assert "Error" not in shown


@pytest.mark.slow
def test_smoke_finds_what_the_formats_imply(measured):
    folder, _ = measured
    chapter = Chapter(NOTEBOOK, device=folder.name, output=str(folder.parent))
    sums = chapter.records("accumulation").dropna(subset=["stall_measured"])
    assert len(sums) == 2 and (sums["stall_measured"] == sums["stall_predicted"]).all()
    assert "break in 0 of 18 cases" in report.findings_normalisation(chapter.records("normalisation"))[1]
    training = chapter.records("training")
    ended = training[training["status"] == "ok"]
    assert len(ended) == 5 and all(row["loss"][-1] < row["loss"][0] + 1 for row in ended["samples"])


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.mark.gpu
@needs_cuda
def test_on_cuda_sums_and_dtypes_are_the_published_ones():
    for one in of_section("accumulation", "smoke"):
        metrics = measure(one)["sum"].metrics
        for value in report.published_sums().get(tuple(one.parameters[k] for k in report.SERIES_KEYS), []):
            assert f"{metrics['final_sum']:.4f}" == f"{value:.4f}"
    for one in of_section("dtypes", "smoke"):
        dtypes = dict(measure(one)["read"].observed["dtypes"])
        assert dtypes["loss"] == dtypes["gradients"] == "float32"
        assert dtypes.get("layer_norm_output", "float32") == "float32"


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("precision", ["bf16", "fp16", "bf16_pure"])
def test_on_cuda_a_step_is_timed_and_its_memory_counted(precision):
    measured = measure(Case("steps", step(precision, context=32, batch=4), MIXED_PHASES, 60.0, 0.05))
    for phase in measured.values():
        assert phase.case["precision"] == precision
        assert phase.metrics["median_ms"] > 0 and phase.metrics["peak_bytes"] > 0
    assert measured["train_step"].metrics["num_skipped_steps"] == 0


@pytest.mark.gpu
@needs_cuda
def test_on_cuda_casts_of_the_backward_pass_are_counted_too():
    workload = PrecisionWorkload(hardware.detect(), step("bf16", batch=BATCH_SIZE))
    counts = experiment.count_operators(workload)
    assert counts["backward"].num_operators > counts["forward"].num_operators
    assert counts["backward"].num_casts > 2 * 7 + 1
