"""Control experiment: rewards that say nothing about the responses."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from dynamo_megatron.types import Verdict


def shuffled_rewards(verdicts: Sequence[Verdict], *, seed: int, step: int) -> list[Verdict]:
    """Permute the rewards of a step among its valid verdicts.

    The distribution of rewards stays as it was, their connection to prompt and response is gone.
    A run trained on them must not improve; if it does, it learns from something else.

    Args:
        verdicts: of all rollouts of the step, over all prompts.
        seed: the run's seed.
        step: enters the permutation.

    Returns:
        As many verdicts, in order, with other rewards; failed ones are left as they are.
    """
    valid = [i for i, verdict in enumerate(verdicts) if verdict.valid]
    rewards = [verdicts[i].reward for i in valid]
    random.Random(f"reward shuffle {seed} {step}").shuffle(rewards)
    shuffled = list(verdicts)
    for i, reward in zip(valid, rewards, strict=True):
        shuffled[i] = replace(verdicts[i], reward=reward)
    return shuffled
