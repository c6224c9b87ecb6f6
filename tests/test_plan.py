"""What a plan says is held against what was measured."""

import json
from dataclasses import replace

import pytest

from labkit import accounting
from labkit.configs import GPU_WAYS, STEP_WAYS, RequestError, model_config
from labkit.device import datasheet
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
def gpus():
    return plan.measured_gpus()


@pytest.fixture(scope="module")
def measured(chapters):
    return plan.samples(chapters, DEVICE)


def test_predicted_memory_is_what_steps_took(chapters):
    errors = plan.memory_errors(chapters)
    eager = errors[errors["way"] == "eager"]["error"]
    assert len(eager) > 100 and -0.04 < eager.min() and eager.max() < 0.03
    assert (eager < -0.01).sum() <= 0.03 * len(eager)
    assert set(errors["way"]) == set(STEP_WAYS) and errors["error"].abs().max() < 0.04


def test_predicted_memory_of_two_gpus_is_what_steps_took(chapters):
    ways = {"alone": "ddp", "ddp": "ddp", "sharded optimizer": "zero1"}
    ways |= {"fsdp": "fsdp", "fully_shard": "fsdp"}
    rows = ok_rows(chapters["07_distributed"].records("steps"), batch=4, phase=list(ways))
    for row in rows.to_dict("records"):
        way = "eager" if row["compile"] == "none" else "compiled"
        case = row["batch"], row["context"], row["precision"], "fused", way, "none"
        gpus = (1 if row["phase"] == "alone" else 2), ways[row["phase"]]
        planned = plan.memory(Setting(model_config(row["size"]), *case, *gpus))["in all"]
        assert -0.01 < planned / row["peak_bytes"] - 1 < 0.06, row["phase"]
    assert len(rows) > 15


def test_predicted_time_is_near_steps_it_was_not_fitted_to(measured):
    for held_out in ("size", "context"):
        errors = plan.errors(measured, held_out)["error"].abs()
        assert len(errors) == len(plan.of_way(measured, "eager")) > 50
        assert errors.median() < 0.08 and errors.quantile(0.95) < 0.16
    compiled = plan.errors(measured, "size", "compiled")["error"].abs()
    assert len(compiled) == 8 and compiled.max() < 0.08
    # With one device there is nothing to fit to when it is held out.
    assert plan.errors(measured, "device").empty


def test_a_device_that_is_held_out_has_the_roofs_of_its_datasheet(gpus):
    both = plan.all_samples(gpus)
    error = plan.errors(both, "device")["error"]
    assert len(error) == sum(one.device != DEVICE for one in plan.of_way(both, "eager"))
    roofs = {one.device: one.roofs for one in both if one.device == DEVICE}
    (other,) = {one.device for one in both} - {DEVICE}
    share = roofs[DEVICE].copy / 4800e9
    assert plan._of_datasheet(datasheet(other), roofs).copy == pytest.approx(share * 3350e9)


def test_no_term_of_a_fit_speeds_a_step_up(measured):
    for way in STEP_WAYS:
        coefficients = plan.fitted(measured, way)
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


# As transformers writes them: of what a plan reads, all; the parameters are those it counts.
DECODER = {"hidden_act": "silu", "num_key_value_heads": 8}
CONFIGS = {
    "llama, 1B": (
        DECODER
        | {"model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "head_dim": 64}
        | {"num_hidden_layers": 16, "num_attention_heads": 32, "vocab_size": 128256}
        | {"tie_word_embeddings": True},
        1_235_814_400,
    ),
    "llama, 8B": (
        DECODER
        | {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336}
        | {"num_hidden_layers": 32, "num_attention_heads": 32, "vocab_size": 128256}
        | {"tie_word_embeddings": False},
        8_030_261_248,
    ),
    "qwen3, 0.6B": (
        DECODER
        | {"model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "head_dim": 128}
        | {"num_hidden_layers": 28, "num_attention_heads": 16, "vocab_size": 151936}
        | {"tie_word_embeddings": True},
        596_049_920,
    ),
    "gpt2-xl": (
        {"model_type": "gpt2", "n_embd": 1600, "n_layer": 48, "n_head": 25, "n_inner": None}
        | {"vocab_size": 50257, "activation_function": "gelu_new"},
        1_557_611_200,
    ),
    "so400m, of whose parts the pooling is not counted": (
        {"model_type": "siglip_vision_model", "hidden_size": 1152, "intermediate_size": 4304}
        | {"num_hidden_layers": 27, "num_attention_heads": 16, "image_size": 384, "patch_size": 14}
        | {"hidden_act": "gelu_pytorch_tanh"},
        428_225_600 - 15_200_000,
    ),
}


def read(config, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(config if isinstance(config, str) else json.dumps(config))
    return plan.read_config(path)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_published_model_has_its_parameters_and_is_planned_for_any_gpu(name, tmp_path):
    config, parameters = CONFIGS[name]
    model = read(config, tmp_path)
    assert accounting.num_parameters(model) == pytest.approx(parameters, rel=5e-3)
    setting = Setting(model, context=1024, way="compiled")
    memory = plan.memory(setting)
    assert memory["weights"] == pytest.approx(4 * parameters, rel=5e-3)
    # The states alone are 16 bytes a parameter; all of an 8 B does not fit any of these.
    assert memory["in all"] > 16 * accounting.num_parameters(model)


def test_throughput_is_what_others_report(measured, gpus, tmp_path):
    """Llama 8 B at 8,192 with some of each block recomputed, so between all and none; tokens/s a
    GPU from torchtitan, docs/performance.md (A100s), and benchmarks/llama3_h100_202412 (H100s of
    500 W).
    """
    llama = read(CONFIGS["llama, 8B"][0], tmp_path)
    for device, batch, num_gpus, known in (
        ("NVIDIA A100-SXM4-80GB", 1, 64, 2973),
        ("H100", 2, 8, 6667),
    ):
        rates = []
        for recompute in ("1", "none"):
            case = batch, 8192, "bf16", "fused", "compiled", recompute, num_gpus, "fsdp"
            setting = Setting(llama, *case)
            coefficients = plan.fitted(measured, "compiled")
            step_ms = plan.predicted(coefficients, setting, plan.roofs_of(device, gpus))["in all"]
            rates.append(setting.tokens / step_ms * 1e3)
        assert 0.85 * rates[0] < known < 1.15 * rates[1], rates


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", "cannot be read as a config.json"),
        ("[]", "holds no object"),
        ({"model_type": "mamba", "d_inner": 3}, "'mamba' has no hidden_size or n_embd; accepted"),
        ({"hidden_size": 64, "num_local_experts": 8}, "has num_local_experts; accepted: models"),
        ({"text_config": {}, "vision_config": {}}, "holds two models; write its text_config"),
        ({"n_embd": 64, "n_head": 4, "n_layer": 2}, "has no vocab_size; accepted"),
    ],
)
def test_a_config_that_is_none_is_one_line(config, message, tmp_path):
    with pytest.raises(RequestError, match=message):
        read(config, tmp_path)


def test_a_device_has_measured_roofs_or_a_datasheet_or_is_refused(chapters, gpus):
    roofs = plan.roofs_of(DEVICE, gpus)
    assert roofs == plan.measured_roofs(chapters)
    other = plan.roofs_of("NVIDIA A100-SXM4-80GB", gpus)
    assert other.memory_bytes == 80e9 and 0.4 < other.flops["bf16"] / 312e12 < 0.9
    with pytest.raises(RequestError, match="no roofs of 'abacus'"):
        plan.roofs_of("abacus", gpus)
    assert plan.roofs_of("H100", gpus).source == "measured"
    text = "\n".join(plan.lines(replace(SMALL, num_gpus=2), other, gpus, 2.0))
    words = "fits", "Largest that fits", "Device time of a step", "held out", "not measured; NVIDIA"
    assert all(part in text for part in words), text


def test_a_plan_of_recomputation_that_does_not_exist_is_refused():
    with pytest.raises(RequestError, match="unknown plan 'sometimes'"):
        plan.memory(replace(SMALL, recompute="sometimes"))
