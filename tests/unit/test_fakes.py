"""The scripted engine keeps the promises that loop tests rely on."""

import pytest
import torch

from dynamo_megatron.protocols import RolloutEngine
from dynamo_megatron.rollout.errors import RolloutError
from dynamo_megatron.types import GroupSizes, Prompt
from tests.fakes import Script, ScriptedEngine

PROMPTS = [
    Prompt(id=name, text=name, token_ids=(1, 2), answer="7", source="test") for name in ("a", "b")
]
SCRIPTS = {
    "a": [Script(token_ids=(5, 2), text="7"), Script(token_ids=(6, 6, 2), text="8")],
    "b": [Script(token_ids=(9,), text="?", logprob=-0.5)],
}


def test_responses_follow_the_script_and_events_their_order():
    engine: RolloutEngine = ScriptedEngine(SCRIPTS)
    engine.load_weights(iter([("w", torch.ones(1))]), version=3)
    sizes = GroupSizes(prompt_ids=("a", "b"), sizes=(3, 1))
    rollouts = engine.generate(PROMPTS, sizes, step=3, temperature=1.0, seed=0)
    engine.close()
    assert [(r.prompt_id, r.index, r.text) for r in rollouts] == [
        ("a", 0, "7"),
        ("a", 1, "8"),
        ("a", 2, "7"),
        ("b", 0, "?"),
    ]
    assert {r.weight_version for r in rollouts} == {3}
    assert rollouts[3].logprobs == (-0.5,)
    assert engine.events == [
        "load 1 weights of version 3",
        "generate 4 rollouts at step 3",
        "close engine",
    ]


def test_it_refuses_what_the_real_engine_refuses():
    engine = ScriptedEngine(SCRIPTS, fail_at_step=1)
    sizes = GroupSizes(prompt_ids=("a", "b"), sizes=(1, 1))
    with pytest.raises(RolloutError, match="before load_weights"):
        engine.generate(PROMPTS, sizes, step=0, temperature=1.0, seed=0)
    engine.load_weights([], version=0)
    with pytest.raises(RolloutError, match="different orders"):
        engine.generate(PROMPTS[::-1], sizes, step=0, temperature=1.0, seed=0)
    with pytest.raises(RolloutError, match="scripted failure at step 1"):
        engine.generate(PROMPTS, sizes, step=1, temperature=1.0, seed=0)
