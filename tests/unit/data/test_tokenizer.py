"""The tokenizer is read from disk alone; stop tokens are the model's own."""

import json

import pytest

from dynamo_megatron.data.problems import DataError
from dynamo_megatron.data.tokenizer import load_tokenizer, pad_token_id, stop_token_ids

from .conftest import make_tokenizer


def test_a_tokenizer_is_loaded_from_a_model_folder(model_dir):
    assert load_tokenizer(model_dir)("Compute 1 + 2")["input_ids"] == [4, 5, 7, 6]
    assert load_tokenizer(str(model_dir)).eos_token_id == 1


def test_a_name_that_is_no_folder_is_refused_and_not_looked_up(tmp_path):
    with pytest.raises(DataError, match="the model folder gpt2 does not exist"):
        load_tokenizer("gpt2")


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen2", "vocab_size": 8}')
    with pytest.raises(DataError, match=r"has no tokenizer: none of tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_a_tokenizer_that_knows_more_tokens_than_the_model_is_refused(model_dir):
    largest = max(load_tokenizer(model_dir).get_vocab().values())
    config = model_dir / "config.json"
    values = json.loads(config.read_text()) if config.exists() else {}
    config.write_text(json.dumps(values | {"vocab_size": largest + 1}))
    load_tokenizer(model_dir)
    config.write_text(json.dumps(values | {"vocab_size": largest}))
    with pytest.raises(DataError, match=rf"ids up to {largest} \(.*\), .* has {largest} rows"):
        load_tokenizer(model_dir)


def test_a_tokenizer_with_code_of_its_own_is_refused_and_not_run(model_dir):
    mark = model_dir / "executed"
    (model_dir / "own.py").write_text(f"open({str(mark)!r}, 'w').close()\nclass T: ...\n")
    config = json.loads((model_dir / "tokenizer_config.json").read_text())
    config["auto_map"] = {"AutoTokenizer": ["own.T", "own.T"]}
    config["tokenizer_class"] = "T"
    (model_dir / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(DataError, match="no tokenizer can be read"):
        load_tokenizer(model_dir)
    assert not mark.exists()


@pytest.mark.parametrize(
    ("generation", "model", "stop"),
    [
        ({"eos_token_id": 5}, {"eos_token_id": 6}, (5,)),
        ({"eos_token_id": [5, 3]}, {"eos_token_id": 6}, (5, 3)),
        ({"eos_token_id": [3, 5, 3]}, {}, (3, 5)),
        ({"eos_token_id": 0}, {}, (0,)),
        ({"eos_token_id": None}, {"eos_token_id": 6}, (6,)),
        ({"eos_token_id": []}, {"eos_token_id": [6, 7]}, (6, 7)),
        ({}, {}, (1,)),
        (None, {"eos_token_id": 6}, (6,)),
        (None, None, (1,)),
    ],
)
def test_stop_tokens_come_from_the_first_place_that_names_any(model_dir, generation, model, stop):
    for name, content in (("generation_config.json", generation), ("config.json", model)):
        (model_dir / name).unlink(missing_ok=True)
        if content is not None:
            (model_dir / name).write_text(json.dumps(content))
    assert stop_token_ids(load_tokenizer(model_dir), model_dir) == stop


def test_a_model_without_a_stop_token_is_refused(model_dir):
    tokenizer = make_tokenizer(chat=False)
    tokenizer.eos_token = None
    with pytest.raises(DataError, match="every response would run to the token limit"):
        stop_token_ids(tokenizer, model_dir)


@pytest.mark.parametrize("value", ["</s>", -1, [1, None], True, 1.0, {"a": 1}])
def test_a_stop_token_that_is_no_id_is_refused(model_dir, value):
    (model_dir / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(DataError, match=r"eos_token_id in generation_config\.json"):
        stop_token_ids(load_tokenizer(model_dir), model_dir)


@pytest.mark.parametrize(("content", "words"), [("{", "is not JSON"), ("[]", "a JSON object")])
def test_a_broken_configuration_is_named(model_dir, content, words):
    (model_dir / "generation_config.json").write_text(content)
    with pytest.raises(DataError, match=words):
        stop_token_ids(load_tokenizer(model_dir), model_dir)


def test_padding_is_the_tokenizers_own_or_the_first_stop_token():
    tokenizer = make_tokenizer(chat=False)
    assert pad_token_id(tokenizer, (5, 3)) == 5
    tokenizer.pad_token = "<s>"
    assert pad_token_id(tokenizer, (5, 3)) == 0
