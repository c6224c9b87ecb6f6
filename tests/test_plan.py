"""What a plan says is held against what was measured."""

import itertools
import json
import re
from dataclasses import replace

import pytest

from labkit import accounting
from labkit.configs import STEP_WAYS, RequestError, model_config
from labkit.report import plan
from labkit.report.chapter import Chapter
from labkit.report.frame import ok_rows, select, usable
from labkit.report.plan import Setting

DEVICE = "nvidia-h200"
SMALL = Setting(model_config("small"))
LARGE = Setting(model_config("2.7b"))


@pytest.fixture(scope="module")
def chapter():
    return Chapter("01_benchmarking", device=DEVICE)


@pytest.fixture(scope="module")
def gpus():
    return plan.measured_gpus()


@pytest.fixture(scope="module")
def measured(chapter):
    return plan.samples([chapter])


def takes(setting=SMALL, **changed):
    return plan.memory(replace(setting, **changed))["in all"]


def test_predicted_memory_is_what_steps_took(chapter):
    errors = plan.memory_errors([chapter])
    assert len(errors) > 100 and set(errors["way"]) == set(STEP_WAYS)
    assert -0.01 < errors["error"].min() and errors["error"].max() < 0.03


def test_predicted_memory_of_two_gpus_is_what_steps_took(chapter):
    ways = {"alone": (1, "ddp"), "ddp": (2, "ddp"), "sharded optimizer": (2, "zero1")}
    ways |= dict.fromkeys(("fsdp", "fully_shard"), (2, "fsdp"))
    rows = ok_rows(chapter.of("07_distributed").records("steps"), batch=4, phase=list(ways))
    for row in rows.to_dict("records"):
        way = "eager" if row["compile"] == "none" else "compiled"
        case = 4, row["context"], row["precision"], "fused", way, "none", *ways[row["phase"]]
        planned = takes(Setting(model_config(row["size"]), *case))
        assert -0.01 < planned / row["peak_bytes"] - 1 < 0.06, row["phase"]
    assert len(rows) > 15


def test_tensor_parallel_ranks_share_out_matrices_and_send_sums():
    setting = replace(LARGE, num_gpus=4, gpu_way="tp")
    count = accounting.num_matmul_parameters
    assert count(LARGE.config) == 4 * count(setting.rank_config)
    # Of 32 blocks two sums a pass, of 2,048 tokens, 2,560 wide; of 2 bytes 2 · 3/4 leave a rank.
    sent = 32 * 4 * 2048 * 2560 * 3
    assert plan.communication_ms(setting) == pytest.approx(1e3 * sent / plan.LINK_BYTES_PER_S)
    with pytest.raises(RequestError, match="2 GPUs cannot share out num_heads 25"):
        takes(setting, config=model_config("xl-2025"), num_gpus=2)


def test_predicted_time_is_near_steps_it_was_not_fitted_to(measured, gpus):
    every = plan.samples(gpus.values())
    left_out = [*itertools.product(STEP_WAYS, ("size", "context")), ("eager", "device")]
    for way, held_out in left_out:
        error = plan.errors(every, held_out, way)["error"].abs()
        assert len(error) == len(select(every, way=way)) > 10
        assert error.median() < 0.05 and error.quantile(0.95) < 0.1
        assert way != "compiled" or error.max() < 0.08
    # With one device there is nothing to fit to when it is held out.
    assert plan.errors(measured, "device").empty


def test_the_largest_that_fits_fits_and_the_next_does_not():
    for name, step, limit in (("context", 64, 80e9), ("batch", 1, 80e15)):
        most = plan.largest(LARGE, limit, name, step)
        assert takes(LARGE, **{name: most}) <= limit < takes(LARGE, **{name: most + step})
    assert plan.largest(LARGE, 1e9, "batch", 1) == 0
    assert plan.cheapest_recomputation(LARGE, 80e9) == "none"
    assert plan.cheapest_recomputation(replace(LARGE, context=8192), 80e9) not in ("none", None)
    assert plan.cheapest_recomputation(LARGE, 1e9) is None
    # Neither recomputation alone nor 64 GPUs alone.
    assert "--recompute 2 --gpus 64" in plan._memory_lines(replace(LARGE, context=8192), 20e9)[-1]
    with pytest.raises(RequestError, match="unknown plan 'sometimes'"):
        takes(recompute="sometimes")


def published(kind, width, hidden, layers, heads, **others):
    """Returns a config.json as transformers writes it, of what a plan reads."""
    return {
        "model_type": kind,
        "hidden_size": width,
        "intermediate_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        **others,
    }


DECODER = {"hidden_act": "silu", "num_key_value_heads": 8}
TIED = DECODER | {"tie_word_embeddings": True}
LLAMA_8B = published(
    "llama", 4096, 14336, 32, 32, vocab_size=128256, tie_word_embeddings=False, **DECODER
)
GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_inner": None}
BTLM = {"model_type": "btlm", "n_embd": 2560, "n_layer": 32, "n_head": 32, "n_inner": 6826}
CONFIGS = [
    (published("llama", 2048, 8192, 16, 32, head_dim=64, vocab_size=128256, **TIED), 1_235_814_400),
    (BTLM | {"vocab_size": 50257, "activation_function": "swiglu"}, 2.646e9),
    (LLAMA_8B, 8_030_261_248),
    (published("qwen3", 1024, 3072, 28, 16, head_dim=128, vocab_size=151936, **TIED), 596_049_920),
    (GPT2 | {"vocab_size": 50257, "n_positions": 1024}, 124_439_808),
    (published("modernbert-decoder", 768, 1152, 22, 12, vocab_size=50368), 149.7e6),
    (published("siglip_vision_model", 1152, 4304, 27, 16, image_size=384, patch_size=14), 428.2e6),
]


def read(config, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(config if isinstance(config, str) else json.dumps(config))
    return plan.read_config(path)


@pytest.mark.parametrize("config, parameters", CONFIGS)
def test_a_published_model_has_its_parameters(config, parameters, tmp_path):
    model = read(config, tmp_path)
    assert accounting.num_parameters(model) == pytest.approx(parameters, rel=5e-3)
    assert takes(Setting(model, way="ours")) > 16 * accounting.num_parameters(model)
    assert "window of 4,096 tokens" in read(config | {"sliding_window": 4096}, tmp_path).name
    assert read(config | {"sliding_window": 4, "use_sliding_window": False}, tmp_path) == model


def test_throughput_is_what_others_report(measured, gpus, tmp_path):
    """Llama 8 B at 8,192 with some of each block recomputed, so between all and none; tokens/s a
    GPU from torchtitan, docs/performance.md (A100s), and benchmarks/llama3_h100_202412 (H100s of
    500 W).
    """
    llama = read(LLAMA_8B, tmp_path)
    fitted = plan.fitted(measured, "compiled")
    for device, watts, batch, num_gpus, known in [
        ("NVIDIA A100-SXM4-80GB", 400, 1, 64, 2973),
        ("H100", 500, 2, 8, 6667),
    ]:
        roofs = plan.roofs_of(device, gpus)
        # Power grows about with the third power of the clock.
        clock = (watts / roofs.power_limit_w) ** (1 / 3)
        roofs = roofs._replace(rates={name: clock * rate for name, rate in roofs.rates.items()})
        rates = []
        for recompute in ("1", "none"):
            case = batch, 8192, "bf16", "fused", "compiled", recompute, num_gpus, "fsdp"
            setting = Setting(llama, *case)
            step_ms = plan.predicted(fitted, setting, roofs)["in all"]
            rates.append(setting.tokens / step_ms * 1e3)
        assert 0.85 * rates[0] < known < 1.15 * rates[1], rates


@pytest.mark.parametrize(
    "config, message",
    [
        ("{", "cannot be read as a config.json"),
        ("[[1, 2]]", "cannot be read as a config.json"),
        *(
            ({"hidden_size": 64, name: 4}, f"has {name}; accepted: dense")
            for name in ("mamba_d_conv", "num_local_experts", "ffn_dim", "block_configs")
        ),
        ({"text_config": {}, "vision_config": {}}, "has no hidden_size or n_embd"),
        ({"n_embd": 64, "n_head": 4, "n_layer": 2}, "has no vocab_size; accepted"),
        ({"model_type": "llama", "hidden_size": "64"}, "'llama' has no hidden_size"),
        ({"model_type": "deberta", "hidden_size": 64}, "has no head of a causal language model"),
        ({"architectures": ["EsmForMaskedLM"], "hidden_size": 64}, "has no head of a causal"),
    ],
)
def test_a_config_that_is_none_is_one_line(config, message, tmp_path):
    with pytest.raises(RequestError, match=message):
        read(config, tmp_path)


def test_a_device_has_measured_roofs_or_a_datasheet_or_is_refused(chapter, gpus):
    roofs = plan.roofs_of(DEVICE, gpus)
    assert roofs == plan.measured_roofs(chapter)
    graphs = usable(chapter.records("execution"), "joules")
    for step in select(graphs, phase="graph_step").to_dict("records"):
        joules = roofs.drawn_w[plan._way(step)] * step["sustained_ms"] / 1e3
        assert joules == pytest.approx(step["joules"], rel=0.1)
    other = plan.roofs_of("NVIDIA A100-SXM4-80GB", gpus)
    assert 125e12 < other.rates["bf16"] < 280e12  # of 312
    # PyTorch reports of it 79.2 GiB, and of the other one, whose error correction is inline, 44.4.
    assert 84e9 < other.memory_bytes < 85e9
    assert plan.roofs_of("L40", gpus).memory_bytes < 47.6e9
    with pytest.raises(RequestError, match="no roofs of 'abacus'"):
        plan.roofs_of("abacus", gpus)
    assert plan.roofs_of("H100", gpus).source.startswith("measured on nvidia-h100")
    setting = replace(LARGE, context=16, num_gpus=8, gpu_way="fsdp")
    text = "\n".join(plan.lines(setting, other, gpus, 2.0))
    # What the step sends takes longer than its kernels.
    rate, sent_ms = re.findall(r"(\S+)(?: tokens/s a GPU at best| ms a step)", text)
    assert float(rate) == pytest.approx(64e3 / float(sent_ms), rel=0.01)
    words = "fits", "Largest that fits", "Device time of a step", "held out", "not measured; NVIDIA"
    assert all(part in text for part in words) and "400 W, which is its power limit" in text, text
