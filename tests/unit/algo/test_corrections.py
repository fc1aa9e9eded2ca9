import math

import pytest
import torch

from dynamo_megatron.algo.corrections import masked_weights, mismatch_summary, truncated_weights


def pair(*ratios):
    """Log-probabilities whose pi_train / pi_sampler are the given ratios."""
    sampler = torch.full((len(ratios),), -2.0, dtype=torch.float64)
    return sampler + torch.tensor(ratios, dtype=torch.float64).log(), sampler


def test_truncated_weights_match_hand_computed_values():
    got = truncated_weights(*pair(0.5, 1.5, 4.0), cap=2.0)
    torch.testing.assert_close(got, torch.tensor([0.5, 1.5, 2.0], dtype=torch.float64))


def test_masked_weights_match_hand_computed_values():
    got = masked_weights(*pair(0.4, 1.5, 6.0), low=0.5, high=5.0)
    torch.testing.assert_close(got, torch.tensor([0.0, 1.5, 0.0], dtype=torch.float64))


def test_engines_that_agree_change_nothing():
    logp = torch.tensor([-0.5, -3.0])
    assert truncated_weights(logp, logp).tolist() == [1, 1]
    assert masked_weights(logp, logp, low=1.0, high=1.0).tolist() == [1, 1]


def test_weights_carry_no_gradient_and_stay_finite():
    train = torch.tensor([0.0, -1e5], requires_grad=True)
    for weights in (truncated_weights(train, train.flip(0), cap=1e9), masked_weights(train, train)):
        assert not weights.requires_grad and weights.isfinite().all()


def test_the_summary_matches_hand_computed_values():
    train, sampler = pair(1.0, 2.0, 0.5, 1e6)
    got = mismatch_summary(train, sampler, torch.tensor([True, True, True, False]))
    assert got.num_tokens == 3
    assert got.mean_abs_delta == pytest.approx(2 * math.log(2) / 3)
    assert got.max_abs_delta == pytest.approx(math.log(2))
    assert got.ratio_quantiles == pytest.approx((0.5, 1.0, 2.0))
    # 3.5^2 / (1 + 4 + .25) / 3
    assert got.effective_sample_size == pytest.approx(12.25 / 5.25 / 3)


def test_the_summary_of_agreeing_engines_is_perfect():
    logp = torch.linspace(-3, 0, 7)
    got = mismatch_summary(logp, logp, torch.ones(7, dtype=torch.bool))
    assert (got.mean_abs_delta, got.max_abs_delta, got.effective_sample_size) == (0, 0, 1)


def test_the_summary_of_no_tokens_is_empty():
    got = mismatch_summary(torch.zeros(2), torch.ones(2), torch.zeros(2, dtype=torch.bool))
    assert got.num_tokens == 0 and got.max_abs_delta == 0 and got.ratio_quantiles == (1, 1, 1)


def test_bounds_that_cannot_work_are_errors():
    logp = torch.zeros(1)
    with pytest.raises(ValueError, match="must be positive"):
        truncated_weights(logp, logp, cap=0.0)
    for low, high in [(1.1, 5.0), (0.5, 0.9), (-0.1, 2.0)]:
        with pytest.raises(ValueError, match="must contain 1"):
            masked_weights(logp, logp, low=low, high=high)
