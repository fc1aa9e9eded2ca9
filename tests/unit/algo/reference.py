"""Slow, exact re-statements in rational arithmetic that share no code with the library."""

from __future__ import annotations

import itertools
from fractions import Fraction


def exact_shares(weights, lower, upper, budget, rule):
    """Real-valued shares, by raising one common level until the budget is spent."""
    weights = [Fraction(w) for w in weights]
    shares = [Fraction(lo) for lo in lower]
    positive = [i for i, w in enumerate(weights) if w > 0]
    room = budget - sum(lower[i] for i in range(len(weights)) if weights[i] == 0)
    if positive:
        target = min(room, upper * len(positive))
        for i, share in raise_level(weights, lower, upper, target, rule, positive).items():
            shares[i] = share
    left = budget - sum(shares)
    others = [i for i in range(len(weights)) if weights[i] == 0]
    if left > 0:
        target = left + sum(lower[i] for i in others)
        ones = [Fraction(1)] * len(weights)
        for i, share in raise_level(ones, lower, upper, target, "paper", others).items():
            shares[i] = share
    return shares


def raise_level(weights, lower, upper, target, rule, members):
    def at(t):
        base = {i: lower[i] if rule == "paper" else 0 for i in members}
        return {
            i: min(Fraction(upper), max(Fraction(lower[i]), base[i] + t * weights[i]))
            for i in members
        }

    levels = {Fraction(0)}
    for i in members:
        base = lower[i] if rule == "paper" else 0
        levels |= {(lower[i] - base) / weights[i], (upper - base) / weights[i]}
    levels = sorted(levels)
    for left, right in itertools.pairwise(levels):
        spent_left, spent_right = sum(at(left).values()), sum(at(right).values())
        if spent_left <= target < spent_right:
            return at(left + (right - left) * (target - spent_left) / (spent_right - spent_left))
    return at(levels[-1])


def exact_round(shares, upper, budget):
    sizes = [int(s) for s in shares]
    order = sorted(range(len(shares)), key=lambda i: (sizes[i] - shares[i], i))
    missing = budget - sum(sizes)
    for i in [i for i in order if sizes[i] < upper][:missing]:
        sizes[i] += 1
    return sizes
