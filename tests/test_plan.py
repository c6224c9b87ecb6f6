"""What a plan says is held against what was measured."""

import json
from dataclasses import replace

import pytest

from labkit.configs import GPU_WAYS, STEP_WAYS, RequestError, model_config
from labkit.report import plan
from labkit.report.chapter import chapters_of
from labkit.report.frame import ok_rows
from labkit.report.plan import Setting

DEVICE = "nvidia-h200"
SMALL = Setting(model_config("small"))


@pytest.fixture(scope="module")
def chapters():
    return chapters_of(DEVICE)


@pytest.fixture(scope="module")
def measured(chapters):
    return plan.samples(chapters, DEVICE)


def test_predicted_memory_is_what_steps_took(chapters):
    sections = {"01_benchmarking": ["steps", "execution"], "04_memory": ["peaks", "checkpointing"]}
    errors = []
    for name, names in sections.items():
        rows = ok_rows(chapters[name].records(*names), phase="train_step")
        for row in rows.to_dict("records"):
            is_stock = row.get("compile") in (None, "none") and row["attention"] != "auto"
            if is_stock and row["precision"] in ("fp32", "tf32", "bf16"):
                attention = "eager" if row["attention"] == "eager" else "fused"
                plan_text = row["plan"] if isinstance(row.get("plan"), str) else "none"
                case = row["batch"], row["context"], row["precision"], attention
                setting = Setting(model_config(row["size"]), *case, recompute=plan_text)
                errors.append(plan.memory(setting)["in all"] / row["peak_bytes"] - 1)
    errors.sort()
    assert len(errors) > 100 and -0.04 < errors[0] and errors[-1] < 0.03
    assert sum(error < -0.01 for error in errors) <= 0.03 * len(errors)


def test_predicted_time_is_near_steps_it_was_not_fitted_to(measured):
    eager = plan.of_way(measured, "eager")
    for held_out in ("size", "context"):
        errors = plan.errors(eager, held_out)["error"].abs()
        assert len(errors) == len(eager) > 50
        assert errors.median() < 0.08 and errors.quantile(0.95) < 0.16
    # With one device there is nothing to fit to when it is held out.
    assert plan.errors(eager, "device").empty


def test_no_term_of_a_fit_speeds_a_step_up(measured):
    for way in STEP_WAYS:
        coefficients = plan.fitted(plan.of_way(measured, way))
        assert min(coefficients.values()) == 0 < max(coefficients.values())


def test_more_takes_more_memory_and_sharing_out_takes_less():
    takes = plan.memory(SMALL)["in all"]
    for more in ({"context": 1024}, {"batch": 8}, {"attention": "eager"}, {"precision": "fp32"}):
        assert plan.memory(replace(SMALL, **more))["in all"] > 0.9 * takes, more
    large = Setting(model_config("2.7b"), num_gpus=4)
    ways = [plan.memory(replace(large, gpu_way=way))["in all"] for way in GPU_WAYS]
    assert ways == sorted(ways, reverse=True) and ways[2] < 0.6 * ways[0]
    assert plan.memory(replace(large, recompute="1"))["in all"] < ways[0]


def test_the_largest_that_fits_fits_and_the_next_does_not():
    limit = 80e9
    large = Setting(model_config("2.7b"))
    for name, step in (("context", 64), ("batch", 1)):
        most = plan.largest(large, limit, name, step)
        assert plan.memory(replace(large, **{name: most}))["in all"] <= limit
        assert plan.memory(replace(large, **{name: most + step}))["in all"] > limit
    assert plan.largest(large, 1e9, "batch", 1) == 0
    assert plan.cheapest_recomputation(large, limit) == "none"
    assert plan.cheapest_recomputation(replace(large, context=8192), limit) not in ("none", None)
    assert plan.cheapest_recomputation(large, 1e9) is None


GPT2_XL = {
    "model_type": "gpt2",
    "n_embd": 1600,
    "n_layer": 48,
    "n_head": 25,
    "n_inner": None,
    "vocab_size": 50257,
    "activation_function": "gelu_new",
}
LLAMA = {
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "hidden_act": "silu",
    "vocab_size": 128256,
}
SO400M = {
    "model_type": "siglip",
    "vision_config": {
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "hidden_act": "gelu_pytorch_tanh",
    },
}


@pytest.mark.parametrize(
    ("config", "block_parameters"),
    [
        (GPT2_XL, 4 * 1600**2 + 2 * 1600 * 6400),
        (LLAMA, 2 * 2048 * 64 * (32 + 8) + 3 * 2048 * 8192),
        (SO400M, 4 * 1152**2 + 2 * 1152 * 4304),
    ],
)
def test_a_config_of_transformers_becomes_a_model_of_as_many_parameters(
    config, block_parameters, tmp_path
):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    model = plan.read_config(path)
    ours = 4 * model.d_model**2 + 3 * model.d_model * model.d_ff
    assert ours == pytest.approx(block_parameters, rel=1e-3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read as a config.json"),
        (
            '{"model_type": "mamba", "d_inner": 3}',
            "architecture 'mamba' has no hidden_size or n_embd",
        ),
    ],
)
def test_a_config_that_is_none_is_one_line(text, message, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(RequestError, match=message):
        plan.read_config(path)


def test_a_device_has_measured_roofs_or_a_datasheet_or_is_refused(chapters, measured):
    roofs = plan.roofs_of(DEVICE)
    assert roofs == plan.measured_roofs(chapters)
    other = plan.roofs_of("NVIDIA A100-SXM4-80GB")
    assert other.memory_bytes == 80e9 and 0.4 < other.flops["bf16"] / 312e12 < 0.9
    with pytest.raises(RequestError, match="no roofs of 'abacus'"):
        plan.roofs_of("abacus")
    text = "\n".join(plan.lines(replace(SMALL, num_gpus=2), other, measured, price=2.0))
    for words in ("fits", "Largest that fits", "Device time of a step", "held out", "a million"):
        assert words in text


def test_a_plan_of_recomputation_that_does_not_exist_is_refused():
    with pytest.raises(RequestError, match="unknown plan 'sometimes'"):
        plan.memory(replace(SMALL, recompute="sometimes"))
