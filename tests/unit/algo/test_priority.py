import math

import pytest
import torch

from dynamo_megatron.algo.priority import bernoulli_variance, priority_weights


def real(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_variance_matches_hand_computed_values():
    # 8*8/(16*15), 1*15/240, 0, 0, 3*5/56, 1*1/2, 4*12/240, 12*4/240
    k = torch.tensor([8, 1, 0, 16, 3, 1, 4, 12])
    G = torch.tensor([16, 16, 16, 16, 8, 2, 16, 16])
    want = real(64 / 240, 0.0625, 0, 0, 15 / 56, 0.5, 0.2, 0.2)
    torch.testing.assert_close(bernoulli_variance(k, G), want, rtol=1e-15, atol=0)


def test_variance_is_unknown_not_zero_below_two_rollouts():
    variance = bernoulli_variance(real(0, 1, 0.9, 0.0), real(0, 1, 1.9, 1.5))
    assert variance.isnan().all()


def test_variance_is_unbiased():
    # E[P] over the binomial with G = 4, p = .3 is p (1 - p) = .21, exactly.
    G, p = 4, 0.3
    k = torch.arange(G + 1)
    chance = real(*(math.comb(G, i) * p**i * (1 - p) ** (G - i) for i in range(G + 1)))
    expected = (chance * bernoulli_variance(k, torch.full_like(k, G))).sum()
    assert expected.item() == pytest.approx(0.21, abs=1e-15)


def test_variance_of_a_decayed_history_keeps_the_rate_and_the_correction():
    # p = .25, G = 2.5: .25 * .75 * 2.5 / 1.5
    assert bernoulli_variance(real(0.625), real(2.5)).item() == pytest.approx(0.3125)


@pytest.mark.parametrize(("k", "G"), [(5, 4), (-1, 4), (math.nan, 4), (1, math.inf)])
def test_impossible_counts_are_an_error(k, G):
    with pytest.raises(ValueError, match="prompt 1 has"):
        bernoulli_variance(real(0, k), real(4, G))


def test_linear_weights_match_hand_computed_values():
    # A: P = .2667 + .5e-6.  B: 0 of 16, P = 0, floored.  C: 14/16 = .875 mastered.
    # D: 13/16 = .8125, P = 39/240, + .1875e-6.  E: no history.
    weights = priority_weights(real(8, 0, 14, 13, 0), real(16, 16, 16, 16, 0), form="linear")
    want = real(64 / 240 + 0.5e-6, 0.01, 0.01, 39 / 240 + 0.1875e-6, 0.0)
    torch.testing.assert_close(weights, want, rtol=1e-14, atol=0)


def test_the_square_root_is_taken_before_cut_and_floor():
    # sqrt(.0625) = .25 and sqrt(.0001) -> .01: p = 1/16; all wrong is floored; 15/16 is mastered.
    weights = priority_weights(real(1, 0, 15), real(16, 16, 16), form="sqrt")
    torch.testing.assert_close(weights, real(0.25 + 15 / 16 * 1e-6, 0.01, 0.01), rtol=1e-14, atol=0)


def test_of_two_equal_variances_the_harder_prompt_gets_more():
    easy, hard = priority_weights(real(12, 4), real(16, 16), form="linear").tolist()
    assert hard > easy and hard - easy == pytest.approx(0.5e-6, rel=1e-6)


def test_mastery_begins_exactly_at_the_threshold():
    weights = priority_weights(
        real(17, 16.9), real(20, 20), form="linear", mastery=0.85, floor=0.02
    )
    assert weights[0] == 0.02 and weights[1] > 0.1


def test_an_unknown_form_is_an_error():
    with pytest.raises(ValueError, match='"linear" and "sqrt"'):
        priority_weights(real(1), real(2), form="cubic")
