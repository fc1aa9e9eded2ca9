"""How many rollouts each prompt of a step gets."""

from __future__ import annotations

import torch
from torch import Tensor

from dynamo_megatron.algo.fill import FillRule, clip_budget, fill
from dynamo_megatron.algo.priority import WeightForm, bernoulli_variance, priority_weights

__all__ = [
    "bernoulli_variance",
    "check_budget",
    "clip_budget",
    "fill",
    "group_sizes",
    "lower_bounds",
    "priority_weights",
    "uniform_sizes",
]


def lower_bounds(num_rollouts: Tensor, *, n_low: int, n_high: int, init: int) -> Tensor:
    """Fewest rollouts of each prompt: enough to make its history long enough to be judged.

    Args:
        num_rollouts: [P] G, verified rollouts so far.
        n_low: fewest rollouts of any prompt.
        n_high: most rollouts of any prompt.
        init: rollouts wanted before a variance is believed.

    Returns:
        [P] int64, ``n_low`` or, for a cold prompt, as many as are still missing (at most n_high).
    """
    # Decayed histories are real-valued: round up, so that the prompt really is warm afterwards.
    missing = (init - num_rollouts.double()).ceil().clamp(max=n_high)
    return missing.clamp(min=n_low).long()


def group_sizes(
    num_correct: Tensor,
    num_rollouts: Tensor,
    *,
    budget: int,
    n_low: int,
    n_high: int,
    init: int,
    form: WeightForm,
    rule: FillRule,
    mastery: float,
    floor: float,
) -> Tensor:
    """Rollouts of each prompt, by the variance of its reward so far.

    A prompt is cold while G < max(init, n_low), or G < 2: it gets its lower bound and takes no part
    in sharing the rest. When all are cold the budget is spread evenly.

    Args:
        num_correct: [P] k, successes so far.
        num_rollouts: [P] G, verified rollouts so far.
        budget: rollouts to spend in this step.
        n_low: fewest rollouts of any prompt.
        n_high: most rollouts of any prompt.
        init: rollouts wanted before a prompt's variance is believed.
        form: see `priority_weights`.
        rule: see `fill`.
        mastery: see `priority_weights`.
        floor: see `priority_weights`.

    Returns:
        [P] int64, sum exactly ``budget``, each in [n_low, n_high].

    Raises:
        ValueError: the budget cannot be spent within the bounds, or the counts cannot be.

    Source: DynaMO, arXiv:2602.19208, dynamic rollout allocation.
    """
    weights = priority_weights(num_correct, num_rollouts, form=form, mastery=mastery, floor=floor)
    warm = num_rollouts.double() >= max(init, n_low)
    lower = lower_bounds(num_rollouts, n_low=n_low, n_high=n_high, init=init)
    weights = torch.where(warm, weights, 0.0)
    return fill(weights, lower, upper=n_high, budget=budget, rule=rule)


def uniform_sizes(num_prompts: int, budget: int) -> Tensor:
    """Equal sizes, [P] int64; the remainder goes to the lowest indices.

    Raises:
        ValueError: there are no prompts, or not a rollout for each.
    """
    if num_prompts < 1 or budget < num_prompts:
        raise ValueError(
            f"{budget} rollouts cannot be spread over {num_prompts} prompts with at least one "
            "each. Draw fewer prompts or raise the budget."
        )
    share, remainder = divmod(budget, num_prompts)
    return share + (torch.arange(num_prompts) < remainder).long()


def check_budget(num_prompts: int, n_low: int, n_high: int, n_mean: int, init: int) -> None:
    """Refuse bounds under which some step's budget could not be spent. To be called at start.

    The lower bound of a cold prompt is at most min(n_high, max(init, n_low)), and the budget is
    num_prompts n_mean, so the check holds for every later history too.

    Raises:
        ValueError: not 1 <= n_low <= n_mean <= n_high, or ``init`` asks for more than the mean.
    """
    if num_prompts < 1:
        raise ValueError(f"a step needs at least one prompt, got {num_prompts}.")
    budget = num_prompts * n_mean
    if not 1 <= n_low <= n_mean <= n_high:
        raise ValueError(
            f"allocation needs 1 <= n_low <= n_mean <= n_high, got {n_low}, {n_mean}, {n_high}: a "
            f"budget of {num_prompts} x {n_mean} = {budget} rollouts is outside "
            f"[{num_prompts * n_low}, {num_prompts * n_high}] and cannot be spent. "
            "Change the bounds or the mean."
        )
    cold = min(n_high, max(init, n_low))
    if cold > n_mean:
        raise ValueError(
            f"init = {init} makes {cold} rollouts the least for a prompt without a history: a step "
            f"of {num_prompts} such prompts needs {num_prompts * cold}, but the budget is "
            f"{num_prompts} x {n_mean} = {budget}. Set init to at most n_mean = {n_mean}."
        )
