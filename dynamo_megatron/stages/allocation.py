"""Sequence level: group sizes from the prompts' history, and the history after the step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dynamo_megatron.algo.allocation import check_budget, group_sizes, uniform_sizes
from dynamo_megatron.algo.history import SuccessHistory
from dynamo_megatron.config import AllocationConfig
from dynamo_megatron.types import GroupSizes, Prompt, RolloutGroup


def check_allocation(config: AllocationConfig, num_prompts: int) -> None:
    """Refuse bounds under which some step's budget could not be spent, or nothing be learned.

    Raises:
        ValueError: see ``algo.allocation.check_budget``; or every group would have one rollout.
    """
    if config.n_mean == 1:
        raise ValueError(
            "algorithm.allocation.n_mean=1: a single rollout has nothing to be compared with, its "
            "advantage is 0 and nothing is learned. Set n_mean to 2 or more."
        )
    if config.policy == "dynamo":
        check_budget(num_prompts, config.n_low, config.n_high, config.n_mean, config.init)


def allocate(
    prompts: Sequence[Prompt], history: SuccessHistory, config: AllocationConfig
) -> GroupSizes:
    """Spend ``n_mean`` rollouts a prompt over the prompts of a step.

    Source: DynaMO, arXiv:2602.19208, dynamic rollout allocation.
    """
    budget = config.n_mean * len(prompts)
    ids = tuple(prompt.id for prompt in prompts)
    if config.policy == "uniform":
        sizes = uniform_sizes(len(prompts), budget)
    else:
        num_correct, num_rollouts = history.lookup(ids)
        sizes = group_sizes(
            num_correct,
            num_rollouts,
            budget=budget,
            n_low=config.n_low,
            n_high=config.n_high,
            init=config.init,
            form=config.weight,
            rule=config.fill,
            mastery=config.mastery,
            floor=config.floor,
        )
    return GroupSizes(prompt_ids=ids, sizes=tuple(sizes.tolist()))


def num_cold(prompts: Sequence[Prompt], history: SuccessHistory, config: AllocationConfig) -> int:
    """Prompts whose variance is not known well enough to be believed."""
    _, num_rollouts = history.lookup(prompt.id for prompt in prompts)
    return int((num_rollouts < max(config.n_low, config.init, 2)).sum())


def observed(
    history: SuccessHistory, groups: Sequence[RolloutGroup], threshold: float
) -> SuccessHistory:
    """The history after a step; rollouts whose verification failed are not in it."""
    results = []
    for group in groups:
        rewards = [v.reward for v in group.verdicts if v.valid]
        results.append((group.prompt.id, sum(r >= threshold for r in rewards), len(rewards)))
    return history.updated(results)


def as_tensor(sizes: GroupSizes) -> torch.Tensor:
    """Sizes as [P] int64."""
    return torch.tensor(sizes.sizes, dtype=torch.int64)
