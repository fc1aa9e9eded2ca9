import itertools
import math
import random

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from dynamo_megatron.algo.fill import _real_shares, clip_budget, fill
from dynamo_megatron.algo.priority import bernoulli_variance
from tests.unit.algo.reference import exact_round, exact_shares


def weights_of(values):
    return torch.tensor(values, dtype=torch.float64)


def filled(weights, lower, upper, budget, rule):
    lower = [lower] * len(weights) if isinstance(lower, int) else lower
    sizes = fill(
        weights_of(weights),
        torch.tensor(lower, dtype=torch.int64),
        upper=upper,
        budget=budget,
        rule=rule,
    )
    assert sizes.dtype == torch.int64
    return sizes.tolist()


@pytest.mark.parametrize(
    ("weights", "lower", "upper", "budget", "paper", "kkt"),
    [
        pytest.param([0, 0.1, 0.2, 0.1], 2, 8, 16, [2, 4, 6, 4], [2, 4, 7, 3], id="A1"),
        pytest.param([0, 0.1, 0.2, 0.1], 2, 5, 16, [2, 5, 5, 4], [2, 5, 5, 4], id="A2"),
        pytest.param(
            [0.25, 0.25, 0.04, 0, 0.01], 8, 24, 80, [24, 24, 14, 8, 10], [24, 24, 16, 8, 8], id="A3"
        ),
        pytest.param([0, 0, 0], 8, 24, 48, [16, 16, 16], [16, 16, 16], id="A4"),
        pytest.param([1, 0], 8, 24, 32, [24, 8], [24, 8], id="A5"),
        pytest.param([1, 0], 8, 24, 40, [24, 16], [24, 16], id="A6"),
        pytest.param([0.3, 0.3, 0.3], 1, 9, 10, [4, 3, 3], [4, 3, 3], id="A7"),
        # Rounding once at the end. Rounding in every pass, as the public code does, gives 18, 14.
        pytest.param([0.2, 0, 0.1, 0.05], 8, 24, 64, [24, 8, 19, 13], [24, 8, 21, 11], id="A8"),
        pytest.param([0.2, 0], [8, 9], 24, 32, [23, 9], [23, 9], id="A9"),
    ],
)
def test_fill_matches_hand_computed_sizes(weights, lower, upper, budget, paper, kkt):
    assert filled(weights, lower, upper, budget, "paper") == paper
    assert filled(weights, lower, upper, budget, "kkt") == kkt


def test_a_clipped_budget_fills_everyone_to_the_brim():
    # A10
    lower = torch.tensor([2, 2])
    budget = clip_budget(lower, 4, 100)
    assert budget == 8
    for rule in ("paper", "kkt"):
        assert filled([0.1, 0.2], 2, 4, budget, rule) == [4, 4]
    assert clip_budget(lower, 4, 1) == 4 and clip_budget(lower, 4, 6) == 6


def test_fill_of_variances_and_of_their_roots():
    # A11, A12
    variance = bernoulli_variance(torch.tensor([8, 2, 15, 0]), torch.full((4,), 16))
    assert filled(variance.tolist(), 8, 24, 64, "paper") == [24, 18, 14, 8]
    assert filled(variance.tolist(), 8, 24, 64, "kkt") == [24, 21, 11, 8]
    assert filled(variance.sqrt().tolist(), 8, 24, 64, "paper") == [23, 18, 15, 8]
    assert filled(variance.sqrt().tolist(), 8, 24, 64, "kkt") == [24, 18, 14, 8]


def test_equal_shares_that_do_not_divide_go_to_the_lower_indices():
    assert filled([1.0] * 5, 1, 9, 13, "paper") == [3, 3, 3, 2, 2]
    assert filled([0.0] * 5, 1, 9, 13, "kkt") == [3, 3, 3, 2, 2]


def test_float_noise_does_not_decide_a_tie():
    # 55 to share over .44: exactly 23.5, 17, 19.5. In floats the last is 19.500000000000004.
    assert filled([0.18, 0.12, 0.14], [1, 2, 2], 24, 60, "paper") == [24, 17, 19]


@pytest.mark.parametrize("rule", ["paper", "kkt"])
def test_the_rest_is_spread_evenly_above_different_lower_bounds(rule):
    assert filled([0, 0], [2, 6], 10, 12, rule) == [4, 8]
    assert filled([0, 7, 0], [2, 0, 6], 10, 25, rule) == [6, 10, 9]
    assert filled([0, 7, 0], [2, 0, 9], 10, 23, rule) == [3, 10, 10]


@st.composite
def problems(draw, top=12):
    """Integer weights, so that two exact shares are equal or far apart."""
    upper = draw(st.integers(0, top))
    prompts = draw(
        st.lists(
            st.tuples(st.just(0) | st.integers(0, 40), st.integers(0, upper)),
            min_size=1,
            max_size=7,
        )
    )
    weights, lower = [p[0] for p in prompts], [p[1] for p in prompts]
    budget = draw(st.integers(sum(lower), upper * len(prompts)))
    return weights, lower, upper, budget, draw(st.sampled_from(["paper", "kkt"]))


@given(problems())
def test_fill_equals_rational_arithmetic(problem):
    weights, lower, upper, budget, rule = problem
    want = exact_round(exact_shares(weights, lower, upper, budget, rule), upper, budget)
    assert filled(weights, lower, upper, budget, rule) == want


@given(
    st.lists(st.floats(0, allow_infinity=False, allow_nan=False), min_size=1, max_size=12),
    st.integers(0, 2**32),
    st.sampled_from(["paper", "kkt"]),
)
def test_fill_spends_the_whole_budget_within_bounds_for_any_weights(weights, seed, rule):
    rng = random.Random(seed)
    upper = rng.randint(0, 30)
    lower = [rng.randint(0, upper) for _ in weights]
    budget = rng.randint(sum(lower), upper * len(weights))
    sizes = filled(weights, lower, upper, budget, rule)
    assert sum(sizes) == budget
    assert all(lo <= n <= upper for lo, n in zip(lower, sizes, strict=True))
    assert sizes == filled(weights, lower, upper, budget, rule)


@given(problems(), st.randoms(use_true_random=False))
def test_permuting_prompts_permutes_the_shares_bit_for_bit(problem, rng):
    weights, lower, upper, budget, rule = problem
    order = list(range(len(weights)))
    rng.shuffle(order)
    w, lo = weights_of(weights), torch.tensor(lower)
    shares = _real_shares(w / 7, lo, upper, budget, rule)
    permuted = _real_shares(w[order] / 7, lo[order], upper, budget, rule)
    assert torch.equal(permuted, shares[order])


@given(problems(), st.randoms(use_true_random=False))
def test_permuting_prompts_permutes_the_sizes_unless_remainders_tie(problem, rng):
    weights, lower, upper, budget, rule = problem
    remainders = [s % 1 for s in exact_shares(weights, lower, upper, budget, rule) if s % 1]
    assume(len(set(remainders)) == len(remainders))
    order = list(range(len(weights)))
    rng.shuffle(order)
    sizes = filled(weights, lower, upper, budget, rule)
    permuted = filled([weights[i] for i in order], [lower[i] for i in order], upper, budget, rule)
    assert permuted == [sizes[i] for i in order]


@given(problems(), st.integers(-20, 20))
def test_only_the_ratios_of_weights_matter(problem, exponent):
    weights, lower, upper, budget, rule = problem
    scaled = [w * 2.0**exponent for w in weights]
    assert filled(scaled, lower, upper, budget, rule) == filled(weights, lower, upper, budget, rule)


@given(problems())
def test_a_larger_weight_never_gets_less_under_the_same_bound(problem):
    weights, lower, upper, budget, rule = problem
    lower = [min(lower)] * len(lower)
    sizes = filled(weights, lower, upper, budget, rule)
    for i, j in itertools.combinations(range(len(weights)), 2):
        if weights[i] > weights[j]:
            assert sizes[i] >= sizes[j]


def test_no_integer_allocation_has_less_variance_than_the_kkt_shares():
    weights, lower, upper, budget = [9, 5, 2, 1], [2, 1, 1, 3], 7, 16
    shares = exact_shares(weights, lower, upper, budget, "kkt")
    optimum = sum(w * w / s for w, s in zip(weights, shares, strict=True))
    for sizes in itertools.product(*(range(lo, upper + 1) for lo in lower)):
        if sum(sizes) == budget:
            assert sum(w * w / n for w, n in zip(weights, sizes, strict=True)) >= optimum - 1e-12


def test_extreme_weight_ratios_stay_exact():
    # The first is full; the budget left goes to the others, in their own proportion.
    assert filled([1e300, 3e-5, 1e-5], 0, 8, 12, "paper")[0] == 8
    assert sum(filled([1e308, 5e-324, 0.0], 1, 9, 20, "kkt")) == 20


@pytest.mark.parametrize(("budget", "why"), [(15, "15 rollouts"), (49, "24 for each is 48")])
def test_a_budget_that_cannot_be_spent_is_an_error(budget, why):
    with pytest.raises(ValueError, match=why):
        filled([1.0, 2.0], 8, 24, budget, "paper")


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf])
def test_a_weight_that_is_no_share_is_an_error(weight):
    with pytest.raises(ValueError, match="weight of prompt 1"):
        filled([1.0, weight], 8, 24, 32, "paper")


def test_bad_bounds_types_and_rules_are_errors():
    with pytest.raises(ValueError, match="lower bound of prompt 0 is 9"):
        filled([1.0], 9, 8, 8, "paper")
    with pytest.raises(ValueError, match="int64"):
        fill(weights_of([1.0]), weights_of([1.0]), upper=2, budget=2, rule="paper")
    with pytest.raises(ValueError, match='"paper" and "kkt"'):
        filled([1.0], 1, 8, 8, "greedy")


def test_no_prompts_spend_nothing():
    assert filled([], [], 8, 0, "paper") == []


@pytest.mark.parametrize("rule", ["paper", "kkt"])
def test_a_hundred_thousand_prompts_are_allocated_exactly(rule):
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(100_000, generator=generator, dtype=torch.float64)
    weights[::7] = 0
    sizes = fill(weights, torch.full((100_000,), 8), upper=24, budget=1_600_000, rule=rule)
    assert sizes.sum() == 1_600_000 and sizes.min() >= 8 and sizes.max() <= 24
