"""Generated problems as prompts of the shipped policy."""

from __future__ import annotations

from dynamo_megatron.assets import TINY_POLICY
from dynamo_megatron.config import ArithmeticSource
from dynamo_megatron.data.prompts import tokenize_prompts
from dynamo_megatron.data.sources import load_problems
from dynamo_megatron.data.tokenizer import load_tokenizer
from dynamo_megatron.types import Prompt


def tiny_prompts(count: int, *, split: str = "train", seed: int = 1) -> tuple[Prompt, ...]:
    """Arithmetic that the shipped policy sometimes solves."""
    source = ArithmeticSource(kind="arithmetic", split=split, num_problems=count, seed=seed)
    problems = load_problems([source]).problems
    tokenizer = load_tokenizer(TINY_POLICY)
    return tokenize_prompts(problems, tokenizer, template="chat", max_prompt_tokens=64).prompts
