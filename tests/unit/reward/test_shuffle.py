"""The control experiment keeps the rewards' distribution and nothing else."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from dynamo_megatron.reward.shuffle import shuffled_rewards
from dynamo_megatron.types import Verdict, VerdictStatus

FAILED = Verdict(reward=0.0, status=VerdictStatus.TIMEOUT, message="slow")


def verdict(reward: float | None) -> Verdict:
    if reward is None:
        return FAILED
    return Verdict(reward=reward, formatted=reward > 0, extracted=str(reward))


@given(st.lists(st.none() | st.sampled_from([0.0, 0.5, 1.0])), st.integers(0, 5))
def test_rewards_are_permuted_among_the_valid_verdicts_only(rewards, step):
    before = [verdict(r) for r in rewards]
    after = shuffled_rewards(before, seed=3, step=step)
    assert [v for v in after if not v.valid] == [FAILED] * rewards.count(None)
    assert [v.valid for v in after] == [v.valid for v in before]
    assert Counter(v.reward for v in after if v.valid) == Counter(
        v.reward for v in before if v.valid
    )
    assert [(v.formatted, v.extracted) for v in after] == [
        (v.formatted, v.extracted) for v in before
    ]


def test_the_permutation_is_a_function_of_seed_and_step():
    before = [verdict(float(k)) for k in range(100)]
    once = shuffled_rewards(before, seed=1, step=2)
    assert once == shuffled_rewards(before, seed=1, step=2)
    assert once != before
    assert once != shuffled_rewards(before, seed=1, step=3)
    assert once != shuffled_rewards(before, seed=2, step=2)


def test_the_permuted_reward_is_unrelated_to_the_response():
    # 0/1 rewards of 4000 rollouts, half right: agreement by chance is 0.5 +- 4 x 0.008.
    before = [verdict(float(k % 2)) for k in range(4000)]
    after = shuffled_rewards(before, seed=0, step=0)
    agreement = sum(a.reward == b.reward for a, b in zip(after, before, strict=True)) / 4000
    assert abs(agreement - 0.5) < 0.032
