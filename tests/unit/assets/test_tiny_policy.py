"""The shipped policy: loads everywhere, shards, round-trips, and is worth training."""

import json
import logging

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from dynamo_megatron.assets import TINY_POLICY
from dynamo_megatron.data.arithmetic import arithmetic_problems

ALL_DECIMALS = set("0123456789")


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY_POLICY)


@pytest.fixture(scope="module")
def policy():
    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(TINY_POLICY).eval()


@pytest.fixture(scope="module")
def config():
    return json.loads((TINY_POLICY / "config.json").read_text())


def chat_inputs(tokenizer, texts):
    return tokenizer.apply_chat_template(
        [[{"role": "user", "content": text}] for text in texts],
        add_generation_prompt=True,
        padding=True,
        return_tensors="pt",
        return_dict=True,
    )


def answered(text):
    """Return the digits after ``Answer: `` on the last line, or None."""
    lines = text.split("\n")
    if not lines[-1].startswith("Answer: "):
        return None
    digits = lines[-1][len("Answer: ") :]
    return digits if digits and set(digits) <= ALL_DECIMALS else None


def test_model_and_tokenizer_load_without_a_warning():
    records = []
    handler = logging.Handler(level=logging.WARNING)
    handler.emit = records.append
    library = logging.getLogger("transformers")
    library.addHandler(handler)
    try:
        AutoTokenizer.from_pretrained(TINY_POLICY)
        AutoModelForCausalLM.from_pretrained(TINY_POLICY)
    finally:
        library.removeHandler(handler)
    assert [record.getMessage() for record in records] == []


def test_the_folder_is_under_4_megabytes_and_holds_no_pickle():
    files = [path for path in TINY_POLICY.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 4_000_000
    assert {path.suffix for path in files} == {".json", ".jinja", ".safetensors"}


def test_every_weight_is_a_finite_float32():
    weights = load_file(TINY_POLICY / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    assert all(bool(tensor.isfinite().all()) for tensor in weights.values())


def test_heads_groups_and_widths_divide_by_four_and_layers_by_two(config):
    assert config["num_attention_heads"] % 4 == 0
    assert config["num_key_value_heads"] == 4
    assert config["num_key_value_heads"] < config["num_attention_heads"]
    assert config["intermediate_size"] % 4 == 0
    assert config["hidden_size"] % 4 == 0
    assert config["num_hidden_layers"] % 2 == 0


def test_the_vocabulary_divides_by_no_tensor_parallel_size(config, tokenizer, policy):
    assert config["vocab_size"] == len(tokenizer)
    assert config["vocab_size"] % 2 == 1
    assert policy.get_output_embeddings().weight.shape[0] == len(tokenizer)


def test_the_head_size_is_not_hidden_over_heads_and_the_embeddings_are_untied(config, policy):
    assert config["head_dim"] != config["hidden_size"] // config["num_attention_heads"]
    assert config["tie_word_embeddings"] is False
    assert not torch.equal(
        policy.get_input_embeddings().weight, policy.get_output_embeddings().weight
    )


def test_tokenizer_model_and_generation_agree_on_the_stop_token(config, tokenizer):
    generation = GenerationConfig.from_pretrained(TINY_POLICY)
    assert generation.eos_token_id == config["eos_token_id"] == tokenizer.eos_token_id == 2
    assert generation.pad_token_id == config["pad_token_id"] == tokenizer.pad_token_id == 0
    assert config["bos_token_id"] == tokenizer.bos_token_id == 1


@given(text=st.text())
def test_any_text_comes_back_from_the_tokenizer(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    "text", ["", " ", "  Answer: 7 ", "a\n\n\tb ", "né 日本 \U0001f600", "x ,y .z n't", "\x00\x7f"]
)
def test_awkward_texts_come_back_from_the_tokenizer(text, tokenizer):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_chat_is_encoded_as_written_by_hand(tokenizer):
    chat = [
        {"role": "user", "content": "Compute 3+4"},
        {"role": "assistant", "content": "3+4=7\nAnswer: 7"},
    ]
    text = tokenizer.apply_chat_template(chat, tokenize=False)
    assert text == "<|bos|><|user|>Compute 3+4<|assistant|>3+4=7\nAnswer: 7<|eos|>"
    prompt = tokenizer.apply_chat_template(chat[:1], tokenize=False, add_generation_prompt=True)
    assert prompt == "<|bos|><|user|>Compute 3+4<|assistant|>"
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode(prompt, add_special_tokens=False)) == [
        *("<|bos|>", "<|user|>", "Compute\u0120", "3", "+", "4", "<|assistant|>")
    ]


def test_prompt_tokens_are_a_prefix_of_the_whole_chat(tokenizer):
    chat = [
        {"role": "user", "content": "Compute 385+47-29"},
        {"role": "assistant", "content": "385+47=432\n432-29=403\nAnswer: 403"},
    ]
    whole = tokenizer.apply_chat_template(chat, return_dict=True)["input_ids"]
    prompt = tokenizer.apply_chat_template(chat[:1], add_generation_prompt=True, return_dict=True)
    assert whole[: len(prompt["input_ids"])] == prompt["input_ids"]


def test_an_unknown_role_is_refused_by_name(tokenizer):
    with pytest.raises(Exception, match="got system"):
        tokenizer.apply_chat_template([{"role": "system", "content": "x"}], tokenize=False)


def test_left_padding_does_not_change_the_logits_it_generates_from(tokenizer, policy):
    texts = ["Compute 7+2+1", "Compute 385+47-29+166", "Compute 90-35+4"]
    inputs = chat_inputs(tokenizer, texts)
    assert inputs["input_ids"][0, 0] == tokenizer.pad_token_id
    batch = policy.generate(
        **inputs,
        do_sample=False,
        max_new_tokens=20,
        output_logits=True,
        return_dict_in_generate=True,
    )
    logits_BTV = torch.stack(batch.logits, dim=1)
    for row in range(len(texts)):
        # The same tokens, alone and without padding, in one forward pass without a cache.
        num_padding = int((inputs["attention_mask"][row] == 0).sum())
        alone = policy(input_ids=batch.sequences[row : row + 1, num_padding:]).logits[0]
        want_TV = alone[inputs["input_ids"].shape[1] - num_padding - 1 : -1]
        torch.testing.assert_close(logits_BTV[row], want_TV, rtol=1e-4, atol=1e-4)


def test_the_policy_answers_in_format_and_is_right_in_20_to_60_percent(tokenizer, policy):
    problems = arithmetic_problems(96, seed=2, split="heldout")
    inputs = chat_inputs(tokenizer, [problem.problem for problem in problems])
    torch.manual_seed(0)
    sequences = policy.generate(
        **inputs, do_sample=True, temperature=1.0, num_return_sequences=4, max_new_tokens=48
    )
    responses = sequences[:, inputs["input_ids"].shape[1] :]
    texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
    stopped = (responses == tokenizer.eos_token_id).any(dim=1).tolist()
    answers = [answered(text) if stop else None for text, stop in zip(texts, stopped, strict=True)]
    right = sum(answers[i] == problems[i // 4].answer for i in range(len(answers)))
    assert len(answers) == 384
    assert 0.2 < right / len(answers) < 0.6
    assert sum(answer is not None for answer in answers) / len(answers) >= 0.95
