"""Hugging Face in and out again: nothing is lost, and dtypes and vocabularies are as asked."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from dynamo_megatron.assets import TINY_POLICY
from dynamo_megatron.convert import conversion
from dynamo_megatron.convert.errors import ConversionError
from tests.forked import in_child
from tests.policies import FAMILIES, write_model
from tests.unit.convert.helpers import assert_same_tensors, tensors_of


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_goes_in_and_comes_out_bit_by_bit(family, dtype, tied, tmp_path):
    model_dir = write_model(tmp_path / "hf", family, tied=tied, dtype=dtype)

    def work():
        into = conversion.to_megatron(model_dir, tmp_path / "megatron")
        out = conversion.to_hf(tmp_path / "megatron", tmp_path / "out")
        return into.check, out.check

    for check in in_child(work):
        assert check.num_tensors == len(tensors_of(model_dir))
        assert check.max_logit > 1, "the probe says something"
        assert check.max_logit_difference < 2e-5
    assert_same_tensors(tmp_path / "out", model_dir)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "megatron", "out"]
    source_config = json.loads((model_dir / "config.json").read_text())
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == source_config


def test_the_result_loads_in_transformers_without_a_key_too_many_or_too_few(tiny, tmp_path):
    out = tmp_path / "out"
    in_child(lambda: conversion.to_hf(tiny, out, shard_bytes=300_000))
    model, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    want = AutoModelForCausalLM.from_pretrained(TINY_POLICY)
    prompt = torch.tensor([[1, 5, 9]])
    options = {"do_sample": False, "max_new_tokens": 8, "attention_mask": torch.ones(1, 3)}
    assert torch.equal(model.generate(prompt, **options), want.generate(prompt, **options))
    messages = [{"role": "user", "content": "12 + 30 = ?"}]
    texts = [
        AutoTokenizer.from_pretrained(folder).apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )
        for folder in (out, TINY_POLICY)
    ]
    assert texts[0] == texts[1]
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    for name, file in index["weight_map"].items():
        with safe_open(out / file, framework="pt") as stored:
            assert name in stored.keys()  # noqa: SIM118 - safe_open is no mapping


@pytest.mark.parametrize("asked", ["bfloat16", "float16"])
def test_the_dtype_is_as_asked_and_rounds_to_nearest(asked, tiny, tmp_path):
    dtype = getattr(torch, asked)
    in_child(lambda: conversion.to_hf(tiny, tmp_path / "out", dtype=dtype))
    source = tensors_of(TINY_POLICY)
    for name, tensor in tensors_of(tmp_path / "out").items():
        assert torch.equal(tensor, source[name].to(dtype))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == asked


def test_the_vocabulary_is_that_of_the_config_and_not_of_the_tokenizer(tmp_path):
    model_dir = write_model(tmp_path / "hf", "qwen3", vocab_size=330)
    shutil.copy(TINY_POLICY / "tokenizer.json", model_dir)  # 275 tokens

    def work():
        conversion.to_megatron(model_dir, tmp_path / "megatron")
        conversion.to_hf(tmp_path / "megatron", tmp_path / "out")

    in_child(work)
    assert tensors_of(tmp_path / "out")["lm_head.weight"].shape[0] == 330


def test_a_tied_model_that_stores_its_head_twice_is_taken_once(tmp_path):
    model_dir = write_model(tmp_path / "hf", "llama3", tied=True)
    tensors = tensors_of(model_dir)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, model_dir / "model.safetensors", metadata={"format": "pt"})

    def work():
        conversion.to_megatron(model_dir, tmp_path / "megatron")
        conversion.to_hf(tmp_path / "megatron", tmp_path / "out")

    in_child(work)
    assert "lm_head.weight" not in tensors_of(tmp_path / "out")
    tensors["lm_head.weight"] += 1
    save_file(tensors, model_dir / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConversionError, match="tie_word_embeddings"):
        in_child(lambda: conversion.to_megatron(model_dir, tmp_path / "again"))
