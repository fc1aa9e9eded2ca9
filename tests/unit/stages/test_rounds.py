"""Rounds of sampling on rank 0: identity, counts, seeds, and rewards while responses arrive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest

from dynamo_megatron.assets import TINY_POLICY
from dynamo_megatron.reward.pool import RewardPool
from dynamo_megatron.rollout.seeds import rollout_seed
from dynamo_megatron.stages.background import Abandoned
from dynamo_megatron.stages.rounds import OneRound, Sampling, sample_rounds
from dynamo_megatron.types import GroupSizes, Prompt, RolloutGroup
from tests.fakes import Script, ScriptedEngine
from tests.problems import tiny_prompts
from tests.unit.reward.test_pool import HERE
from tests.unit.reward.test_stream import wait_for
from tests.unit.rollout.conftest import engine_of

ANSWERS = {"easy": ["7", "7", "7"], "mixed": ["7", "8", "7"], "hard": ["1", "2", "3"]}
PROMPTS = [
    Prompt(id=name, text=name, token_ids=(1, 2), answer="7", source="test") for name in ANSWERS
]
SCRIPTS = {
    name: [Script(token_ids=(5,) * (k + 1), text=f"Answer: {text}") for k, text in enumerate(texts)]
    for name, texts in ANSWERS.items()
}


@dataclass
class AgainWhereMixed:
    """The same sizes first, then more for the prompts that were sometimes solved."""

    prompts: Sequence[Prompt]
    first: tuple[int, ...]
    second: int
    rounds: int = 0
    seen: tuple[RolloutGroup, ...] = ()

    def next_sizes(self) -> GroupSizes | None:
        ids = tuple(prompt.id for prompt in self.prompts)
        self.rounds += 1
        if self.rounds == 1:
            return GroupSizes(prompt_ids=ids, sizes=self.first)
        if self.rounds == 2:
            mixed = [len({v.reward for v in group.verdicts}) > 1 for group in self.seen]
            return GroupSizes(prompt_ids=ids, sizes=tuple(self.second * m for m in mixed))
        return None

    def observe(self, groups: Sequence[RolloutGroup]) -> None:
        self.seen = tuple(groups)


@pytest.fixture(scope="module")
def reward():
    with RewardPool(workers=1, timeout_s=30.0) as pool:
        yield pool


def scripted(**options) -> ScriptedEngine:
    engine = ScriptedEngine(SCRIPTS, **options)
    engine.load_weights([], version=4)
    return engine


SAMPLING = Sampling(step=4, temperature=1.0, seed=9)


def sizes(*counts: int) -> GroupSizes:
    return GroupSizes(prompt_ids=tuple(ANSWERS), sizes=counts)


def test_one_round_gives_exactly_the_sizes_with_each_responses_own_verdict(reward):
    groups = sample_rounds(scripted(), reward, PROMPTS, OneRound(sizes(3, 2, 0)), SAMPLING)
    assert [group.prompt for group in groups] == PROMPTS
    assert [[r.text for r in group.rollouts] for group in groups] == [
        ["Answer: 7", "Answer: 7", "Answer: 7"],
        ["Answer: 7", "Answer: 8"],
        [],
    ]
    assert [[v.reward for v in group.verdicts] for group in groups] == [[1, 1, 1], [1, 0], []]


def test_a_second_round_goes_to_mixed_prompts_alone_and_goes_on_counting(reward):
    engine = scripted()
    plan = AgainWhereMixed(PROMPTS, first=(2, 2, 1), second=4)
    groups = sample_rounds(engine, reward, PROMPTS, plan, SAMPLING)
    assert engine.events[1:] == ["generate 5 rollouts at step 4", "generate 4 rollouts at step 4"]
    assert [len(group.rollouts) for group in groups] == [2, 6, 1]
    mixed = groups[1]
    assert [r.index for r in mixed.rollouts] == [0, 1, 2, 3, 4, 5]
    # the script has three answers, number k gets k modulo 3
    assert [r.text[-1] for r in mixed.rollouts] == ["7", "8", "7", "7", "8", "7"]
    assert [v.reward for v in mixed.verdicts] == [1, 0, 1, 1, 0, 1]
    assert [r.seed for r in mixed.rollouts] == [rollout_seed(9, 4, "mixed", k) for k in range(6)]
    assert len({r.seed for group in groups for r in group.rollouts}) == 9
    assert plan.seen == tuple(groups), "the plan looks at everything so far"


def test_rounds_of_the_embedded_engine_are_one_larger_round(reward):
    """What is sampled does not depend on how it is cut into rounds."""
    engine, problems = engine_of(TINY_POLICY, max_tokens=40), tiny_prompts(6)
    plan = AgainWhereMixed(problems, first=(4, 0, 4, 4, 4, 4), second=3)
    groups = sample_rounds(engine, reward, problems, plan, SAMPLING)
    counts = [len(group.rollouts) for group in groups]
    assert counts[1] == 0 and set(counts) == {0, 4, 7}, "some are mixed, some are not"
    whole = GroupSizes(prompt_ids=tuple(p.id for p in problems), sizes=tuple(counts))
    assert groups == sample_rounds(engine, reward, problems, OneRound(whole), SAMPLING)
    assert all(r.prompt_id == group.prompt.id for group in groups for r in group.rollouts)


@dataclass
class SlowEngine(ScriptedEngine):
    """Completes a response only when those before it are verified."""

    marks: tuple = ()

    def generate(self, prompts, sizes, *, on_rollout=None, **options):
        rollouts = super().generate(prompts, sizes, **options)
        for rollout, mark in zip(rollouts, self.marks, strict=True):
            on_rollout(rollout)
            assert wait_for(mark), "a verification waits for the end of the generation"
        return rollouts


def test_rewards_are_verified_while_the_engine_still_generates(tmp_path):
    marks = tuple(tmp_path / name for name in "abc")
    scripts = {"easy": [Script(token_ids=(5,), text=f"mark {mark}") for mark in marks]}
    engine = SlowEngine(scripts, version=0, marks=marks)
    plan = OneRound(GroupSizes(prompt_ids=("easy",), sizes=(3,)))
    with RewardPool(f"{HERE}:behave", workers=1, timeout_s=30.0) as pool:
        (group,) = sample_rounds(engine, pool, PROMPTS[:1], plan, SAMPLING)
    assert [verdict.reward for verdict in group.verdicts] == [1.0, 1.0, 1.0]


@dataclass
class FaultyEngine(ScriptedEngine):
    """Tells of one thing and returns another."""

    fault: str = ""

    def generate(self, prompts, sizes, *, on_rollout=None, **options):
        rollouts = super().generate(prompts, sizes, **options)
        told = list(rollouts)
        if self.fault == "silent about one":
            told.pop()
        elif self.fault == "told twice":
            told.append(told[0])
        elif self.fault == "another text":
            told[0] = replace(told[0], text="Answer: 3")
        elif self.fault == "one missing":
            rollouts.pop()
            told.pop()
        elif self.fault == "numbers from 0 again":
            told = rollouts = [replace(r, index=r.index + 1) for r in rollouts]
        elif self.fault == "a stranger":
            told[0] = replace(told[0], prompt_id="nobody")
        elif self.fault == "another prompt":
            told = rollouts = [replace(rollouts[0], prompt_id="hard"), *rollouts[1:]]
        for rollout in told:
            on_rollout(rollout)
        return rollouts


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("silent about one", "told of 3 rollouts .* returned 4"),
        ("told twice", "told of 5 rollouts .4 different"),
        ("another text", "not verified"),
        ("one missing", "returned 1 responses for prompt mixed, 2 were allocated"),
        ("numbers from 0 again", "returned 2 responses for prompt easy, 2 were allocated"),
        ("a stranger", "nobody, which is not among"),
        ("another prompt", "returned 1 responses for prompt easy, 2 were allocated"),
    ],
)
def test_an_engine_that_breaks_its_promises_is_refused(reward, fault, said):
    engine = FaultyEngine(SCRIPTS, version=0, fault=fault)
    with pytest.raises(RuntimeError, match=said):
        sample_rounds(engine, reward, PROMPTS, OneRound(sizes(2, 2, 0)), SAMPLING)


def test_a_plan_for_other_prompts_is_refused(reward):
    other = GroupSizes(prompt_ids=("easy", "hard", "mixed"), sizes=(1, 1, 1))
    with pytest.raises(RuntimeError, match="wrong prompts"):
        sample_rounds(scripted(), reward, PROMPTS, OneRound(other), SAMPLING)


def test_who_watches_is_told_of_every_rollout_over_all_rounds(reward):
    told = []
    sampling = replace(SAMPLING, watch=lambda *values: told.append(values))
    plan = AgainWhereMixed(PROMPTS, first=(1, 2, 0), second=2)
    sample_rounds(scripted(), reward, PROMPTS, plan, sampling)
    # lengths 1; 1, 2; then numbers 2 and 3 of mixed: lengths 3 and 1
    assert told == [(0, 3, 0), (1, 3, 1), (2, 3, 2), (3, 3, 4), (3, 5, 4), (4, 5, 7), (5, 5, 8)]


def test_giving_up_ends_the_generation_at_the_next_response(reward):
    calls = []

    def check() -> None:
        calls.append(None)
        if len(calls) == 3:
            raise Abandoned

    with pytest.raises(Abandoned):
        sample_rounds(
            scripted(), reward, PROMPTS, OneRound(sizes(3, 3, 3)), replace(SAMPLING, check=check)
        )
    groups = sample_rounds(scripted(), reward, PROMPTS, OneRound(sizes(1, 1, 1)), SAMPLING)
    assert [group.verdicts[0].reward for group in groups] == [1, 1, 0]
