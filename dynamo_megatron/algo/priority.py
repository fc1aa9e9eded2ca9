"""How much a prompt deserves rollouts: the variance of its reward, from its history."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from dynamo_megatron.algo._checks import require_equal_shapes

WeightForm = Literal["linear", "sqrt"]

# Small enough to order equal variances only: the smallest step of P at G = 1000 is about 1e-6.
_TIE_BREAK = 1e-6


def bernoulli_variance(num_correct: Tensor, num_rollouts: Tensor) -> Tensor:
    """Unbiased variance of a prompt's 0/1 reward, the allocator's priority.

    P = k (G - k) / (G (G - 1)). For the real-valued counts of a decayed history this is
    p (1 - p) G / (G - 1) with p = k / G, the same expression.

    Args:
        num_correct: [P] k, successes so far.
        num_rollouts: [P] G, verified rollouts so far.

    Returns:
        [P] float64 in [0, 0.5]; 0 where every rollout agreed, NaN where G < 2.

    Raises:
        ValueError: a prompt has not 0 <= k <= G.

    Source: DynaMO, arXiv:2602.19208, the unbiased estimator of P_i.
    """
    require_equal_shapes({"num_correct": num_correct, "num_rollouts": num_rollouts})
    k, G = num_correct.double(), num_rollouts.double()
    bad = ~((k >= 0) & (k <= G) & G.isfinite())
    if bool(bad.any()):
        prompt = int(bad.nonzero()[0])
        raise ValueError(
            f"prompt {prompt} has {k[prompt].item():g} correct of {G[prompt].item():g} rollouts. "
            "The history was updated twice for one step, or belongs to another dataset; restart "
            "from a clean history."
        )
    variance = k * (G - k) / (G * (G - 1))
    # "Unknown" must not look like "no variance".
    return torch.where(G >= 2, variance, torch.nan)


def priority_weights(
    num_correct: Tensor,
    num_rollouts: Tensor,
    *,
    form: WeightForm,
    mastery: float = 0.85,
    floor: float = 0.01,
) -> Tensor:
    """Share of the free budget that each prompt asks for.

    In this order: the variance P; its square root where ``form`` says so; among equals the harder
    prompt a little more (at most 1e-6); a prompt solved at a rate of ``mastery`` or more gets
    ``floor``; nobody with a history gets less than ``floor``.

    Args:
        num_correct: [P] successes so far.
        num_rollouts: [P] verified rollouts so far.
        form: "linear" is P, as in the paper's equation and code. "sqrt" is the standard deviation,
            as the variance-minimising theorem asks (n_i proportional to sigma_i).
        mastery: success rate from which a prompt counts as learned.
        floor: smallest weight of a prompt with a history.

    Returns:
        [P] float64; 0 where G < 2, because nothing is known: the lower bound alone serves these.

    Raises:
        ValueError: unknown ``form``, or counts that cannot be.

    Source: DynaMO, arXiv:2602.19208, rollout allocation; mastery cut, floor and tie-break from the
    authors' public code.
    """
    if form not in ("linear", "sqrt"):
        raise ValueError(f'weight form is {form!r}; the known ones are "linear" and "sqrt".')
    variance = bernoulli_variance(num_correct, num_rollouts)
    known = variance.isfinite()
    accuracy = num_correct.double() / num_rollouts.double()
    spread = variance.sqrt() if form == "sqrt" else variance
    weights = (spread + (1 - accuracy) * _TIE_BREAK).clamp(min=floor)
    weights = torch.where(accuracy >= mastery, floor, weights)
    return torch.where(known, weights, 0.0)
