"""The tiny policy that ships, its task, and what an evaluation of it needs."""

from __future__ import annotations

import pytest

from dynamo_megatron.assets import TINY_POLICY
from dynamo_megatron.evaluate.build import (
    EngineSpec,
    build_engine,
    build_reward,
    load_evaluation_problems,
)
from dynamo_megatron.evaluate.run import Plan

SETTINGS = {"model": "tiny", "temperature": 1.0}


class CountingEngine:
    """The real engine; notes how much is asked of it and stops where it is told to."""

    def __init__(self, engine) -> None:
        self.engine = engine
        self.asked: list[int] = []
        self.stop_at: int | None = None

    def generate(self, prompts, sizes, **options):
        if len(self.asked) == self.stop_at:
            raise KeyboardInterrupt
        self.asked.append(sizes.budget)
        return self.engine.generate(prompts, sizes, **options)

    def load_weights(self, weights, *, version: int) -> None:
        self.engine.load_weights(weights, version=version)

    def close(self) -> None:
        self.engine.close()


@pytest.fixture(scope="module")
def tiny():
    spec = EngineSpec(
        model_dir=TINY_POLICY, max_tokens=40, max_model_len=104, batch_size=8, dtype="float32"
    )
    return build_engine("hf", spec)


@pytest.fixture
def engine(tiny) -> CountingEngine:
    return CountingEngine(tiny)


@pytest.fixture(scope="module")
def reward():
    with build_reward("integer_answer", workers=1, timeout_s=30) as pool:
        yield pool


@pytest.fixture(scope="module")
def prompts():
    return load_evaluation_problems(
        ["arithmetic:6"],
        TINY_POLICY,
        template="chat",
        max_prompt_tokens=64,
        instruction="",
        limit=None,
    ).prompts


@pytest.fixture
def plan(prompts) -> Plan:
    """Six problems, three samples, two problems at a time."""
    return Plan(prompts=prompts, samples=3, temperature=1.0, seed=4, batch=6)
