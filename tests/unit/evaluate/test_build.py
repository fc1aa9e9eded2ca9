"""What --data, --engine and MODEL may name."""

import json

import pytest

from dynamo_megatron.assets import TINY_POLICY, model_folder
from dynamo_megatron.config import ArithmeticSource, FileSource, ReasoningGymSource
from dynamo_megatron.data.problems import DataError
from dynamo_megatron.evaluate.build import (
    EngineSpec,
    build_engine,
    load_evaluation_problems,
    longest_sequence,
    source_of,
)


def write(path, records):
    path.write_text("".join(json.dumps({"problem": p, "answer": a}) + "\n" for p, a in records))
    return str(path)


def load(data, **options):
    defaults = {"template": "chat", "max_prompt_tokens": 64, "instruction": "", "limit": None}
    return load_evaluation_problems(data, TINY_POLICY, **{**defaults, **options})


def test_data_is_a_file_a_folder_or_a_generator(tmp_path):
    path = write(tmp_path / "x.jsonl", [("Compute 1+1", "2")])
    assert source_of(path) == FileSource(kind="jsonl", path=path)
    arithmetic = ArithmeticSource(kind="arithmetic", num_problems=7, split="heldout")
    assert source_of("arithmetic:7") == arithmetic
    generated = ReasoningGymSource(kind="reasoning_gym", task="chain_sum", num_problems=5)
    assert source_of("reasoning_gym:chain_sum:5") == generated


@pytest.mark.parametrize(
    ("item", "words"),
    [
        ("nowhere.jsonl", "does not exist"),
        ("arithmetic", "does not exist|number of problems is missing"),
        ("arithmetic:0", "number of problems is missing"),
        ("arithmetic:many", "number of problems is missing"),
        ("reasoning_gym:chain_sum", "number of problems is missing"),
    ],
)
def test_other_data_is_refused(item, words):
    with pytest.raises(DataError, match=words):
        source_of(item)


def test_duplicates_are_counted_within_and_over_items(tmp_path):
    first = write(tmp_path / "a.jsonl", [("Compute 1+1", "2"), ("Compute 1+1", "2")])
    problems = load([first, first])
    assert [p.text for p in problems.prompts] == ["Compute 1+1"]
    assert problems.duplicates == 3


def test_a_limit_is_for_each_item_and_an_instruction_stands_under_every_problem(tmp_path):
    records = [(f"Compute {k}+1", str(k + 1)) for k in range(5)]
    data = [write(tmp_path / f"{name}.jsonl", records) for name in "ab"]
    problems = load(data, limit=2, instruction="Answer: ?")
    assert [(p.source, p.text) for p in problems.prompts] == [
        (source, f"Compute {k}+1\n\nAnswer: ?") for source in "ab" for k in range(2)
    ]


def spec_of(**changes) -> EngineSpec:
    values = {"max_tokens": 4, "max_model_len": 20, "batch_size": 2, "dtype": "float32"}
    return EngineSpec(model_dir=TINY_POLICY, **(values | changes))


def test_the_embedded_engine_is_one_copy_in_one_process():
    for split in ({"replicas": 2}, {"tensor_parallel": 2}):
        with pytest.raises(ValueError, match="it is one copy of the model in this process"):
            build_engine("hf", spec_of(**split))


def test_the_longest_sequence_is_a_prompt_with_a_whole_response(caplog):
    prompts = load(["arithmetic:30"]).prompts
    longest = max(len(prompt.token_ids) for prompt in prompts)
    assert longest_sequence(prompts, 40, TINY_POLICY) == longest + 40
    assert not caplog.records
    assert longest_sequence(prompts, 256, TINY_POLICY) == longest + 256
    assert "the model was made for 256" in caplog.text


def test_engines_and_models_that_are_not_there_are_named():
    spec = spec_of()
    with pytest.raises(ValueError, match="no engine 'vlm'; there is hf"):
        build_engine("vlm", spec)
    with pytest.raises(ValueError, match="the built-in models are builtin:tiny"):
        model_folder("builtin:large")


def test_vllm_refuses_what_is_beyond_the_models_positions_before_it_starts():
    folder = model_folder("builtin:tiny")
    spec = EngineSpec(
        model_dir=folder, max_tokens=250, max_model_len=270, batch_size=8, dtype="float32"
    )
    with pytest.raises(ValueError, match=r"made for 256; .* Lower --max-tokens to 236 or less"):
        build_engine("vllm", spec)
