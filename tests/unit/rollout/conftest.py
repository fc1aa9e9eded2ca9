"""The shipped tiny policy, and a tied random model, as engines."""

import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from dynamo_megatron.assets import TINY_POLICY
from dynamo_megatron.rollout.hf_engine import HfEngine
from dynamo_megatron.types import GroupSizes, Prompt

STOP, PAD = 2, 0
TEXTS = ("Compute 3+4", "Compute 385+47-29", "Compute 12-7+88-20", "Compute 9+9+9", "Compute 64-32")


def engine_of(path: Path, **changes) -> HfEngine:
    settings = {
        "max_tokens": 24,
        "batch_size": 256,
        "stop_token_ids": (STOP,),
        "pad_token_id": PAD,
        "version": 0,
    }
    return HfEngine(path, **(settings | changes))


def sizes_of(prompts, counts) -> GroupSizes:
    return GroupSizes(prompt_ids=tuple(p.id for p in prompts), sizes=tuple(counts))


@pytest.fixture(scope="session")
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY_POLICY)


@pytest.fixture(scope="session")
def prompts(tokenizer) -> list[Prompt]:
    return [
        Prompt(
            id=f"prompt-{place}",
            text=text,
            token_ids=tuple(
                tokenizer.apply_chat_template(
                    [{"role": "user", "content": text}],
                    add_generation_prompt=True,
                    return_dict=True,
                )["input_ids"]
            ),
            answer="",
            source="test",
        )
        for place, text in enumerate(TEXTS)
    ]


@pytest.fixture(scope="session")
def model():
    """The reference: transformers' own model, with its own attention."""
    return AutoModelForCausalLM.from_pretrained(TINY_POLICY, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def engine() -> HfEngine:
    return engine_of(TINY_POLICY)


@pytest.fixture(scope="session")
def tied_path(tmp_path_factory) -> Path:
    """A random model of the tiny policy's shape whose output layer is its embedding."""
    folder = tmp_path_factory.mktemp("tied")
    config = AutoConfig.from_pretrained(TINY_POLICY, tie_word_embeddings=True)
    with torch.random.fork_rng():
        torch.manual_seed(7)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TINY_POLICY / name, folder)
    return folder
