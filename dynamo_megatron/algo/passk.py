"""pass@k of an evaluation, and how sure one can be of it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import Tensor

from dynamo_megatron.algo._checks import require_equal_shapes

_Z95 = NormalDist().inv_cdf(0.975)


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """An estimate with its 95 % confidence interval."""

    mean: float
    low: float
    high: float


def pass_at_k(num_correct: Tensor, num_samples: Tensor, k: int) -> Tensor:
    """Unbiased probability that at least one of k samples is right, for each problem.

    1 - C(n - c, k) / C(n, k), in exact integers. The naive 1 - (1 - c/n)^k is biased low.

    Args:
        num_correct: [P] int64 c, correct samples.
        num_samples: [P] int64 n, samples.
        k: samples one may draw, 1 <= k <= n.

    Returns:
        [P] float64.

    Raises:
        ValueError: not 0 <= c <= n, or k is outside [1, n].

    Source: Chen et al., arXiv:2107.03374, equation 1.
    """
    _check_counts(num_correct, num_samples)
    fewest = int(num_samples.min()) if num_samples.numel() else k
    if not 1 <= k <= fewest:
        raise ValueError(
            f"pass@{k} cannot be estimated from {fewest} samples of a problem: it needs "
            f"1 <= k <= n. Draw at least {k} samples, or ask for a smaller k."
        )
    rates = []
    for c, n in zip(num_correct.tolist(), num_samples.tolist(), strict=True):
        draws = math.comb(n, k)
        rates.append((draws - math.comb(n - c, k)) / draws)
    return torch.tensor(rates, dtype=torch.float64)


def wilson_interval(rate: float, trials: float) -> Interval:
    """Wilson's 95 % interval of a success rate seen in ``trials`` independent trials.

    Raises:
        ValueError: the rate is outside [0, 1] or there are no trials.
    """
    if not (0 <= rate <= 1 and trials > 0):
        raise ValueError(f"need a rate in [0, 1] and trials > 0, got {rate} and {trials}.")
    z2 = _Z95**2
    centre = (rate + z2 / (2 * trials)) / (1 + z2 / trials)
    half = _Z95 / (1 + z2 / trials) * math.sqrt(rate * (1 - rate) / trials + z2 / (4 * trials**2))
    # Rounding must not leave 0 or 1 just outside the interval that ends there.
    return Interval(
        mean=rate, low=min(rate, max(0.0, centre - half)), high=max(rate, min(1.0, centre + half))
    )


def paired_difference(rates_a: Tensor, rates_b: Tensor) -> Interval:
    """Mean of a - b over the same problems, with a normal 95 % interval.

    Pairing removes the spread of difficulty, usually the larger part of the variance.

    Args:
        rates_a: [P] success rates of the one model.
        rates_b: [P] success rates of the other, on the same problems in the same order.

    Raises:
        ValueError: fewer than two problems, or the tensors are not equally long.
    """
    require_equal_shapes({"rates_a": rates_a, "rates_b": rates_b})
    if rates_a.numel() < 2:
        raise ValueError(
            f"a difference over {rates_a.numel()} problem(s) has no interval; compare at least 2."
        )
    difference = rates_a.double() - rates_b.double()
    mean = difference.mean().item()
    half = _Z95 * (difference.std().item() / math.sqrt(difference.numel()))
    return Interval(mean=mean, low=mean - half, high=mean + half)


def _check_counts(num_correct: Tensor, num_samples: Tensor) -> None:
    require_equal_shapes({"num_correct": num_correct, "num_samples": num_samples})
    bad = (num_correct < 0) | (num_correct > num_samples)
    if bool(bad.any()):
        problem = int(bad.nonzero()[0])
        raise ValueError(
            f"problem {problem} has {num_correct[problem].item()} correct of "
            f"{num_samples[problem].item()} samples. Count both over the same samples."
        )
