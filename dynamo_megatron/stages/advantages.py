"""Group-relative advantages of ragged groups."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dynamo_megatron.algo.advantage import group_advantages, prompt_weights
from dynamo_megatron.batching.pack import kept_rollouts
from dynamo_megatron.config import AlgorithmConfig
from dynamo_megatron.types import RolloutGroup


def rollout_advantages(
    groups: Sequence[RolloutGroup], config: AlgorithmConfig
) -> tuple[Tensor, ...]:
    """One advantage per rollout, a [n_i] float32 tensor for each group.

    With ``allocation.weighting=prompt`` each is multiplied by (B / N) / n_i over the rollouts that
    train, so that every prompt weighs the same whatever its group size. That is the theorem's 1/N
    for sequence means; under the token mean used here, prompts still differ by their lengths.
    """
    sizes = [len(group.rollouts) for group in groups]
    verdicts = [verdict for group in groups for verdict in group.verdicts]
    if not verdicts:
        return tuple(torch.zeros(0) for _ in groups)
    advantages = group_advantages(
        torch.tensor([v.reward for v in verdicts], dtype=torch.float64),
        torch.arange(len(groups)).repeat_interleave(torch.tensor(sizes)),
        torch.tensor([v.valid for v in verdicts]),
        normalize=config.advantage.normalize,
        epsilon=config.advantage.epsilon,
    )
    per_group = advantages.split(sizes)
    if config.allocation.weighting == "sample":
        return per_group
    kept = kept_rollouts(groups, mask_truncated=config.advantage.mask_truncated)
    counts = torch.bincount(torch.tensor([g for g, _ in kept]), minlength=len(groups))
    weights = torch.zeros(len(groups), dtype=torch.float64)
    weights[counts > 0] = prompt_weights(counts[counts > 0])
    return tuple((a.double() * w).float() for a, w in zip(per_group, weights, strict=True))


def num_zero_groups(advantages: Sequence[Tensor]) -> int:
    """Groups that teach nothing: equal rewards, or a single verified rollout."""
    return sum(not bool(a.any()) for a in advantages)
