"""What each family's config.json means, and what of it is refused."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from dynamo_megatron.hf.architecture import ArchitectureError, read_architecture
from tests.policies import LLAMA3_ROPE

COMMON = {
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 101,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
}


def write(folder, model_type, **options):
    raw = {"model_type": model_type, "rope_theta": 1e4, **COMMON, **options}
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


# Published config.json values: Qwen/Qwen2.5-Math-7B, Qwen/Qwen3-14B, meta-llama/Llama-3.2-1B,
# HuggingFaceTB/SmolLM2-135M.
PUBLISHED = {
    "qwen2": (
        {
            "architectures": ["Qwen2ForCausalLM"],
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "max_position_embeddings": 4096,
            "num_attention_heads": 28,
            "num_hidden_layers": 28,
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-06,
            "rope_theta": 10000,
            "sliding_window": 4096,
            "tie_word_embeddings": False,
            "use_sliding_window": False,
            "vocab_size": 152064,
        },
        {"head_dim": 128, "qkv_bias": True, "qk_norm": False, "tied": False, "rope_factor": None},
    ),
    "qwen3": (
        {
            "architectures": ["Qwen3ForCausalLM"],
            "attention_bias": False,
            "head_dim": 128,
            "hidden_size": 5120,
            "intermediate_size": 17408,
            "max_position_embeddings": 40960,
            "num_attention_heads": 40,
            "num_hidden_layers": 40,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-06,
            "rope_scaling": None,
            "rope_theta": 1000000,
            "tie_word_embeddings": False,
            "use_sliding_window": False,
            "vocab_size": 151936,
        },
        {"head_dim": 128, "qkv_bias": False, "qk_norm": True, "rope_theta": 1e6},
    ),
    "llama": (
        {
            "architectures": ["LlamaForCausalLM"],
            "attention_bias": False,
            "head_dim": 64,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "max_position_embeddings": 131072,
            "mlp_bias": False,
            "num_attention_heads": 32,
            "num_hidden_layers": 16,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-05,
            "rope_scaling": {
                "factor": 32.0,
                "high_freq_factor": 4.0,
                "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "llama3",
            },
            "rope_theta": 500000.0,
            "tie_word_embeddings": True,
            "vocab_size": 128256,
        },
        {"tied": True, "qkv_bias": False, "qk_norm": False, "rope_factor": 32.0},
    ),
    "llama ": (
        {
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": 576,
            "intermediate_size": 1536,
            "max_position_embeddings": 8192,
            "num_attention_heads": 9,
            "num_hidden_layers": 30,
            "num_key_value_heads": 3,
            "rms_norm_eps": 1e-05,
            "rope_interleaved": False,
            "rope_scaling": None,
            "rope_theta": 100000,
            "tie_word_embeddings": True,
            "vocab_size": 49152,
        },
        {"tied": True, "head_dim": 64, "rope_theta": 1e5, "rope_factor": None},
    ),
}


@pytest.mark.parametrize("model_type", PUBLISHED)
def test_published_configurations_are_read(model_type, tmp_path):
    raw, want = PUBLISHED[model_type]
    write(tmp_path, model_type.strip(), **raw)
    arch = read_architecture(tmp_path)
    assert {name: getattr(arch, name) for name in want} == want
    assert arch.num_layers == raw["num_hidden_layers"]
    assert arch.norm_epsilon == raw["rms_norm_eps"]


@pytest.mark.parametrize(
    ("model_type", "option", "value"),
    [
        ("qwen2", "use_sliding_window", True),
        ("qwen2", "layer_types", ["full_attention", "sliding_attention"]),
        ("qwen2", "rope_scaling", {"type": "yarn", "factor": 4.0}),
        ("qwen2", "rope_scaling", {**LLAMA3_ROPE}),
        ("qwen2", "architectures", ["Qwen2ForRewardModel"]),
        ("qwen3", "attention_bias", True),
        ("qwen3", "hidden_act", "gelu"),
        ("qwen3", "quantization_config", {"quant_method": "fp8"}),
        ("llama", "attention_bias", True),
        ("llama", "mlp_bias", True),
        ("llama", "partial_rotary_factor", 0.5),
        ("llama", "rope_parameters", {"rope_theta": 1e4, "partial_rotary_factor": 0.5}),
        ("llama", "rope_scaling", {"rope_type": "dynamic", "factor": 2.0}),
        ("llama", "rope_scaling", {**LLAMA3_ROPE, "low_freq_factor": 2.0}),
        ("llama", "rope_scaling", {**LLAMA3_ROPE, "original_max_position_embeddings": 4096}),
    ],
)
def test_what_training_would_ignore_is_refused(model_type, option, value, tmp_path):
    write(tmp_path, model_type, **{option: value})
    with pytest.raises(ArchitectureError, match=r"is not supported \(only"):
        read_architecture(tmp_path)


@pytest.mark.parametrize("model_type", ["qwen2_moe", "gemma3_text", None])
def test_other_families_are_refused_by_name(model_type, tmp_path):
    write(tmp_path, model_type)
    with pytest.raises(ArchitectureError, match="hf/families"):
        read_architecture(tmp_path)


def test_the_rotary_base_inside_rope_parameters_wins_as_in_transformers(tmp_path):
    write(tmp_path, "llama", rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    assert read_architecture(tmp_path).rope_theta == config.rope_parameters["rope_theta"] == 5e5


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_megatrons_scaled_frequencies_are_those_of_transformers(factor, tmp_path):
    rope = {**LLAMA3_ROPE, "factor": factor}
    write(tmp_path, "llama", rope_parameters=rope, head_dim=128)
    arch = read_architecture(tmp_path)
    ours = RotaryEmbedding(
        arch.head_dim,
        1.0,
        rotary_base=arch.rope_theta,
        rope_scaling=True,
        rope_scaling_factor=arch.rope_factor,
        use_cpu_initialization=True,
    )
    theirs = LlamaRotaryEmbedding(transformers.AutoConfig.from_pretrained(tmp_path))
    torch.testing.assert_close(ours.inv_freq, theirs.inv_freq, rtol=1e-6, atol=0)
    unscaled = 5e5 ** (-torch.arange(0, 128, 2) / 128)
    # the longest wave is longer than 8192 tokens, so it is stretched by the whole factor
    assert float(unscaled[-1] / ours.inv_freq[-1]) == pytest.approx(factor, rel=1e-4)
