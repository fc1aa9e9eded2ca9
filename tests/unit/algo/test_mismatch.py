import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dynamo_megatron.algo.mismatch import (
    NUM_MISMATCH_SUMS,
    RESOLUTION,
    SUMMARY_QUANTILES,
    mismatch_summary,
    mismatch_sums,
)


def pair(*ratios):
    """Log-probabilities whose pi_train / pi_sampler are the given ratios."""
    sampler = torch.full((len(ratios),), -2.0, dtype=torch.float64)
    return sampler + torch.tensor(ratios, dtype=torch.float64).log(), sampler


def test_the_summary_matches_hand_computed_values():
    got = mismatch_summary(mismatch_sums(*pair(1.0, 2.0, 0.5)))
    assert got.num_tokens == 3
    assert got.mean_abs_delta == pytest.approx(2 * math.log(2) / 3)
    # the middle of a bin is at most 2 % of log 2 away
    assert got.ratio_quantiles == pytest.approx((0.5, 1.0, 2.0), rel=0.014)
    assert got.ratio_quantiles[1] == 1.0
    # 3.5^2 / (1 + 4 + .25) / 3
    assert got.effective_sample_size == pytest.approx(12.25 / 5.25 / 3)


def test_the_summary_of_agreeing_engines_is_perfect():
    logp = torch.linspace(-3, 0, 7)
    got = mismatch_summary(mismatch_sums(logp, logp))
    assert (got.mean_abs_delta, got.effective_sample_size) == (0, 1)
    assert got.ratio_quantiles == (1, 1, 1)


def test_the_summary_of_no_tokens_is_empty():
    got = mismatch_summary(mismatch_sums(torch.zeros(0), torch.zeros(0)))
    assert got.num_tokens == 0 and got.mean_abs_delta == 0 and got.ratio_quantiles == (1, 1, 1)


def exact_quantiles(log_ratio):
    ordered = sorted(log_ratio)
    return [ordered[round(q * (len(ordered) - 1))] for q in SUMMARY_QUANTILES]


def assert_close_to_exact(log_ratio):
    train = torch.tensor(log_ratio, dtype=torch.float64)
    got = mismatch_summary(mismatch_sums(train, torch.zeros_like(train))).ratio_quantiles
    for ratio, exact in zip(got, exact_quantiles(log_ratio), strict=True):
        exact = max(-20.0, min(20.0, exact))
        assert abs(math.log(ratio) - exact) <= RESOLUTION * abs(exact) + 1.1e-9


@given(st.lists(st.floats(-30, 30), min_size=1, max_size=300))
def test_quantiles_are_within_two_percent_of_the_exact_ones(log_ratio):
    assert_close_to_exact(log_ratio)


@pytest.mark.parametrize("scale", [1e-7, 1e-3, 0.1, 3.0])
def test_quantiles_of_many_tokens_are_within_two_percent(scale):
    g = torch.Generator().manual_seed(0)
    assert_close_to_exact((scale * torch.randn(20_000, generator=g, dtype=torch.double)).tolist())


def test_a_quantile_below_one_is_told_from_one_above_and_from_one_exactly():
    tiny = 1e-8
    for exact in (-tiny, 0.0, tiny):
        train = torch.tensor([exact] * 5, dtype=torch.float64)
        ratio = mismatch_summary(mismatch_sums(train, torch.zeros_like(train))).ratio_quantiles[1]
        assert (ratio > 1) == (exact > 0) and (ratio < 1) == (exact < 0)


def test_the_sums_of_two_sets_add_up_to_those_of_both():
    g = torch.Generator().manual_seed(1)
    # dyadic numbers, so that no sum rounds
    train = torch.randint(-64, 64, (999,), generator=g) / 32
    sampler = train - torch.randint(-8, 9, (999,), generator=g) / 64
    whole = mismatch_sums(train, sampler)
    parts = [mismatch_sums(train[s], sampler[s]) for s in (slice(0, 10), slice(10, None))]
    assert whole.shape == (NUM_MISMATCH_SUMS,)
    assert torch.equal((parts[0] + parts[1])[[0, 1]], whole[[0, 1]])
    assert torch.equal((parts[0] + parts[1])[4:], whole[4:])
    torch.testing.assert_close(parts[0] + parts[1], whole)


def test_ratios_that_are_not_finite_are_seen():
    train = torch.tensor([-1.0, -1.0, math.nan])
    sampler = torch.tensor([-1.0, -math.inf, -1.0])
    infinite = mismatch_summary(mismatch_sums(train[:2], sampler[:2]))
    assert infinite.mean_abs_delta == math.inf
    assert infinite.ratio_quantiles[2] == pytest.approx(math.exp(20), rel=0.5)
    assert math.isnan(mismatch_summary(mismatch_sums(train, sampler)).mean_abs_delta)
