"""A config.json with a wrong type or sign is refused by its key, not by a traceback."""

from __future__ import annotations

import pytest

from dynamo_megatron.hf.architecture import ArchitectureError, read_architecture
from tests.policies import LLAMA3_ROPE
from tests.unit.hf.test_families import write

COUNTS = [
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
]


def refused(folder, match):
    with pytest.raises(ArchitectureError, match=match):
        read_architecture(folder)


@pytest.mark.parametrize("value", ["3", 2.0, True, 0, -4, [2], {}], ids=repr)
@pytest.mark.parametrize("key", COUNTS)
def test_a_count_is_a_whole_number_above_zero(key, value, tmp_path):
    write(tmp_path, "llama", **{key: value})
    refused(tmp_path, rf"config\.json: {key}=.* is not a whole number above 0")


@pytest.mark.parametrize("value", ["1e4", True, 0, -1, None, [1.0], float("nan"), float("inf")])
@pytest.mark.parametrize("key", ["rope_theta", "rms_norm_eps", "rope_parameters", "factor"])
def test_a_number_is_finite_and_above_zero(key, value, tmp_path):
    options = {key: value}
    if key == "rope_parameters":
        options, key = {key: {"rope_theta": value}}, "rope_theta"
    elif key == "factor":
        options = {"rope_scaling": {**LLAMA3_ROPE, "factor": value}}
    write(tmp_path, "llama", **options)
    refused(tmp_path, rf"config\.json: {key}=.* is not a finite number above 0")


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        ("tie_word_embeddings", "false", "true or false"),
        ("tie_word_embeddings", 1, "true or false"),
        ("rope_scaling", "llama3", "an object"),
        ("rope_parameters", [1], "an object"),
        ("architectures", "LlamaForCausalLM", "a list of strings"),
        ("architectures", [3], "a list of strings"),
        ("layer_types", "full_attention", "a list of strings"),
    ],
)
def test_other_fields_have_the_type_that_is_read(key, value, wanted, tmp_path):
    write(tmp_path, "llama", **{key: value})
    refused(tmp_path, rf"config\.json: {key}=.* is not {wanted}")


@pytest.mark.parametrize("model_type", [["llama"], {"a": 1}, 3, None])
def test_a_family_that_is_no_string_is_refused(model_type, tmp_path):
    write(tmp_path, model_type)
    refused(tmp_path, "supported are qwen2, qwen3, llama")


@pytest.mark.parametrize(
    "options", [{"num_key_value_heads": 3}, {"head_dim": 7}, {"hidden_size": 4}], ids=repr
)
def test_heads_that_cannot_be_laid_out_are_refused(options, tmp_path):
    write(tmp_path, "llama", **options)
    refused(tmp_path, "must be a multiple of them, and the width even")


def test_weights_under_another_name_are_refused(tmp_path):
    # transformers would load that file instead of model.safetensors.
    write(tmp_path, "llama", transformers_weights="other.safetensors")
    refused(tmp_path, "transformers_weights='other.safetensors' is not supported")


@pytest.mark.parametrize("content", [b"{", b"\xff", b"[" * 100_000])
def test_what_is_not_json_is_refused(content, tmp_path):
    (tmp_path / "config.json").write_bytes(content)
    refused(tmp_path, r"config\.json is not JSON")


def test_optional_fields_may_be_null(tmp_path):
    nulls = ["num_key_value_heads", "head_dim", "rope_scaling", "architectures", "layer_types"]
    write(tmp_path, "llama", **dict.fromkeys(nulls))
    arch = read_architecture(tmp_path)
    assert (arch.num_kv_heads, arch.head_dim, arch.rope_factor) == (8, 8, None)
