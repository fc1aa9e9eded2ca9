import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dynamo_megatron.algo.passk import paired_difference, pass_at_k, wilson_interval


def one(c, n, k):
    return pass_at_k(torch.tensor([c]), torch.tensor([n]), k).item()


@pytest.mark.parametrize(
    ("c", "k", "want"),
    [(1, 1, 0.03125), (1, 32, 1.0), (4, 8, 0.7045050055617352), (0, 8, 0.0), (25, 8, 1.0)],
)
def test_pass_at_k_matches_hand_computed_values(c, k, want):
    assert one(c, 32, k) == pytest.approx(want, abs=1e-15)


@pytest.mark.parametrize(("c", "n", "k"), [(2, 6, 3), (1, 5, 2), (4, 6, 3)])
def test_pass_at_k_counts_the_draws_with_a_success(c, n, k):
    draws = list(itertools.combinations([True] * c + [False] * (n - c), k))
    assert one(c, n, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_pass_at_k_is_unbiased():
    n, k, p = 10, 4, 0.3
    expected = sum(math.comb(n, c) * p**c * (1 - p) ** (n - c) * one(c, n, k) for c in range(n + 1))
    assert expected == pytest.approx(1 - (1 - p) ** k, abs=1e-12)


def test_pass_at_k_stays_exact_for_many_samples():
    # 1 - C(4095, 2048) / C(4096, 2048) = 1/2: factorials of it overflow a float.
    assert one(1, 4096, 2048) == 0.5


@pytest.mark.parametrize(("c", "n", "k"), [(1, 4, 5), (1, 4, 0), (5, 4, 1), (-1, 4, 1)])
def test_impossible_requests_are_errors(c, n, k):
    with pytest.raises(ValueError, match="samples"):
        one(c, n, k)


def test_wilson_matches_a_published_value():
    # 81 of 263: Newcombe 1998, table I, method 3: 0.2553 to 0.3662
    got = wilson_interval(81 / 263, 263)
    assert (got.low, got.high) == pytest.approx((0.2553, 0.3662), abs=5e-5)


@given(st.floats(0, 1), st.floats(1, 1e6))
def test_the_wilson_interval_holds_the_rate_and_stays_in_range(rate, trials):
    got = wilson_interval(rate, trials)
    assert 0 <= got.low <= rate <= got.high <= 1 and got.low < got.high


def test_no_trials_have_no_interval():
    with pytest.raises(ValueError, match="trials"):
        wilson_interval(0.5, 0)


def test_the_paired_difference_matches_hand_computed_values():
    # differences .5, 0, .25: mean .25, std .25, half width 1.96 * .25 / sqrt(3)
    got = paired_difference(torch.tensor([1.0, 0.5, 0.75]), torch.tensor([0.5, 0.5, 0.5]))
    assert got.mean == pytest.approx(0.25)
    assert got.high - got.mean == pytest.approx(1.959964 * 0.25 / math.sqrt(3), rel=1e-6)
    assert got.mean - got.low == pytest.approx(got.high - got.mean)


def test_pairing_ignores_the_difficulty_of_problems():
    rates = torch.tensor([0.1, 0.9, 0.5, 0.3])
    got = paired_difference(rates + 0.05, rates)
    assert got.low == pytest.approx(0.05, abs=1e-6) and got.high == pytest.approx(0.05, abs=1e-6)


def test_one_problem_has_no_difference():
    with pytest.raises(ValueError, match="at least 2"):
        paired_difference(torch.ones(1), torch.ones(1))
