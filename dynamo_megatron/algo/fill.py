"""Spend an exact number of rollouts under bounds, in proportion to weights."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from dynamo_megatron.algo._checks import require_equal_shapes

FillRule = Literal["paper", "kkt"]

# Weights this far below the largest are raised to it, which keeps lower / weight finite.
_SMALLEST_RELATIVE_WEIGHT = 1e-12
# Shares are compared on this grid: float noise of 1e-12 must not decide who gets a rollout.
_SHARE_GRID = 2.0**30


def fill(weights: Tensor, lower: Tensor, *, upper: int, budget: int, rule: FillRule) -> Tensor:
    """Group sizes that spend the whole budget within the bounds. O(P log P).

    ``paper``: x_i = min(upper, lower_i + t w_i): everyone gets the lower bound, the rest is shared
    in proportion to the weights of those still below ``upper``. ``kkt``: x_i = clip(t w_i, lower_i,
    upper), the optimum of min sum_i w_i^2 / x_i under the same bounds. Either way t is such that
    sum x_i = budget; then largest-remainder rounding, ties to the lower index. Where the positive
    weights are all at ``upper`` (or there are none), the rest is spread evenly over the others.

    Args:
        weights: [P] float, finite and >= 0; only their ratios matter.
        lower: [P] int64, fewest rollouts of each prompt.
        upper: most rollouts of any prompt.
        budget: rollouts to spend.
        rule: "paper" or "kkt".

    Returns:
        [P] int64 with sum exactly ``budget``, each in [lower_i, upper]. Permuting the prompts
        permutes the result, but for prompts whose shares have equal fractional parts.

    Raises:
        ValueError: the budget is outside [sum lower, P upper], a lower bound is outside [0, upper],
            a weight is negative or not finite, or the rule is unknown.

    Source: DynaMO, arXiv:2602.19208, the allocation theorem (n_i = B sigma_i / sum sigma) under
    bounds; ``paper`` is the fill of the authors' public code.
    """
    _check_fill(weights, lower, upper, budget, rule)
    if weights.numel() == 0:
        return lower.clone()
    return _round_to_budget(_real_shares(weights, lower, upper, budget, rule), upper, budget)


def clip_budget(lower: Tensor, upper: int, budget: int) -> int:
    """Return the spendable budget nearest to ``budget``: within [sum lower, P upper]."""
    return max(int(lower.sum()), min(lower.numel() * upper, budget))


def _check_fill(weights: Tensor, lower: Tensor, upper: int, budget: int, rule: str) -> None:
    require_equal_shapes({"weights": weights, "lower": lower})
    if rule not in ("paper", "kkt"):
        raise ValueError(f'fill rule is {rule!r}; the known ones are "paper" and "kkt".')
    if lower.dtype != torch.int64:
        raise ValueError(f"lower bounds count rollouts and must be int64, got {lower.dtype}.")
    bad = ~(weights.isfinite() & (weights >= 0))
    if bool(bad.any()):
        prompt = int(bad.nonzero()[0])
        raise ValueError(
            f"weight of prompt {prompt} is {weights[prompt].item()}: a share of the budget must be "
            "finite and >= 0. Give prompts without a history the weight 0."
        )
    out_of_range = (lower < 0) | (lower > upper)
    if bool(out_of_range.any()):
        prompt = int(out_of_range.nonzero()[0])
        raise ValueError(
            f"lower bound of prompt {prompt} is {int(lower[prompt])}, outside [0, upper = {upper}]."
        )
    least, most = int(lower.sum()), lower.numel() * upper
    if not least <= budget <= most:
        raise ValueError(
            f"a budget of {budget} rollouts cannot be spent: the lower bounds of the "
            f"{lower.numel()} prompts sum to {least}, and {upper} for each is {most}. Change the "
            "bounds or the budget (clip_budget gives the nearest possible one)."
        )


def _real_shares(weights: Tensor, lower: Tensor, upper: int, budget: int, rule: str) -> Tensor:
    """Return the shares before rounding, [P] float64, permuted bitwise with the prompts."""
    weights = weights.double()
    weighted = weights > 0
    shares = lower.double()
    capacity = int(weighted.sum()) * upper
    reserved = int(lower[~weighted].sum())
    if bool(weighted.any()):
        relative = (weights[weighted] / weights.max()).clamp(min=_SMALLEST_RELATIVE_WEIGHT)
        shares[weighted] = _scale_to_budget(
            relative, shares[weighted], upper, budget - reserved, rule
        )
    if budget - reserved > capacity:
        rest = ~weighted
        ones = torch.ones(int(rest.sum()), dtype=torch.float64)
        shares[rest] = _scale_to_budget(ones, shares[rest], upper, budget - capacity, "paper")
    return shares


def _scale_to_budget(weights: Tensor, lower: Tensor, upper: int, budget: int, rule: str) -> Tensor:
    """Return clip(base + t w, lower, upper) for the t at which it sums to ``budget``."""
    # Sums below run in this order whatever order the prompts came in, so t is the same bit for bit.
    canonical = torch.argsort(lower, stable=True)
    canonical = canonical[torch.argsort(weights[canonical], stable=True)]
    w, lo = weights[canonical], lower[canonical]
    base = lo if rule == "paper" else torch.zeros_like(lo)
    starts, stops = (lo - base) / w, (upper - base) / w
    levels = torch.unique(torch.cat([starts, stops]))

    def total(level: Tensor) -> float:
        return float((base + level * w).clamp(min=lo, max=torch.full_like(lo, upper)).sum())

    # Largest breakpoint that spends no more than the budget; spending is linear from there on.
    below, above = 0, levels.numel()
    while above - below > 1:
        middle = (below + above) // 2
        below, above = (middle, above) if total(levels[middle]) <= budget else (below, middle)
    level = levels[below]
    growing = (starts <= level) & (stops > level)
    if bool(growing.any()):
        level = level + max(budget - total(level), 0.0) / w[growing].sum()

    shares = torch.empty_like(lo)
    shares[canonical] = (base + level * w).clamp(min=lo, max=torch.full_like(lo, upper))
    return shares


def _round_to_budget(shares: Tensor, upper: int, budget: int) -> Tensor:
    """Largest-remainder rounding, ties to the lower index, nobody above ``upper``."""
    shares = (shares * _SHARE_GRID).round() / _SHARE_GRID
    sizes = shares.floor().long()
    remainders = torch.where(sizes < upper, shares - sizes, -1.0)
    missing = budget - int(sizes.sum())
    # Fractional parts sum to `missing`, and each is below 1: more of them than `missing` are > 0.
    assert 0 <= missing <= int((remainders > 0).sum()), f"{missing} rollouts lost in rounding"
    sizes[remainders.argsort(descending=True, stable=True)[:missing]] += 1
    return sizes
