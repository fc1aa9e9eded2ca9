import math

import pytest
import torch

from dynamo_megatron.algo.corrections import (
    masked_weights,
    sequence_masked_weights,
    sequence_weights,
    truncated_weights,
    vetoed_tokens,
)


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
    other, offsets = train.flip(0), torch.tensor([0, 1, 2])
    for weights in (
        truncated_weights(train, other, cap=1e9),
        masked_weights(train, train),
        sequence_weights(train, other, offsets, cap=1e9),
        sequence_masked_weights(train, other, offsets, low=0.0, high=1e9, mean="product"),
    ):
        assert not weights.requires_grad and weights.isfinite().all()


# Three sequences of 2, 1 and 3 tokens.
OFFSETS = torch.tensor([0, 2, 3, 6])


def test_sequence_weights_match_hand_computed_values():
    # products: 2 * 3 = 6, capped at 4; 0.5; 2 * 0.25 * 3 = 1.5
    got = sequence_weights(*pair(2.0, 3.0, 0.5, 2.0, 0.25, 3.0), OFFSETS, cap=4.0)
    want = torch.tensor([4.0, 4.0, 0.5, 1.5, 1.5, 1.5], dtype=torch.float64)
    torch.testing.assert_close(got, want)


def test_the_geometric_mean_keeps_or_drops_and_never_weighs():
    # geometric means: sqrt(1.1 * 1.2) = 1.149; 0.5; (2 * 0.25 * 2)^(1/3) = 1
    ratios = (1.1, 1.2, 0.5, 2.0, 0.25, 2.0)
    got = sequence_masked_weights(*pair(*ratios), OFFSETS, low=0.9, high=1.14)
    assert got.tolist() == [0, 0, 0, 1, 1, 1]
    got = sequence_masked_weights(*pair(*ratios), OFFSETS, low=0.4, high=1.15)
    assert got.tolist() == [1, 1, 1, 1, 1, 1]


def test_the_product_keeps_or_drops_and_weighs():
    # products: 1.32, 0.5, 1.5
    ratios = pair(1.1, 1.2, 0.5, 2.0, 0.25, 3.0)
    got = sequence_masked_weights(*ratios, OFFSETS, low=0.6, high=1.4, mean="product")
    want = torch.tensor([1.32, 1.32, 0, 0, 0, 0], dtype=torch.float64)
    torch.testing.assert_close(got, want)


def test_one_impossible_token_vetoes_its_whole_sequence_and_no_other():
    ratios = pair(1.0, 0.9e-4, 1.1e-4, 1.0, 1.0, 0.5)
    got = vetoed_tokens(*ratios, OFFSETS, threshold=1e-4)
    assert got.tolist() == [True, True, False, False, False, False]


def test_the_log_of_a_sequences_ratio_is_bounded_by_twenty():
    train = torch.tensor([-1.0, -1.0, -30.0, -30.0])
    offsets = torch.tensor([0, 2, 4])
    got = sequence_weights(train, train.flip(0), offsets, cap=1e9)
    # sums +58 and -58
    want = torch.tensor([math.exp(20), math.exp(20), math.exp(-20), math.exp(-20)])
    torch.testing.assert_close(got, want)
    assert got.dtype == train.dtype


def test_a_sequence_without_tokens_has_no_weight_and_moves_no_other():
    train, sampler = pair(2.0, 3.0)
    offsets = torch.tensor([0, 0, 1, 1, 2, 2])
    assert sequence_weights(train, sampler, offsets, cap=9.0).tolist() == pytest.approx([2, 3])
    kept = sequence_masked_weights(train, sampler, offsets, low=0.9, high=2.5)
    assert kept.tolist() == [1, 0]
    assert sequence_weights(train[:0], sampler[:0], torch.tensor([0, 0]), cap=2.0).shape == (0,)


def test_sequences_that_agree_change_nothing():
    logp = torch.linspace(-3, 0, 6)
    assert sequence_weights(logp, logp, OFFSETS, cap=1.0).tolist() == [1] * 6
    for mean in ("geometric", "product"):
        got = sequence_masked_weights(logp, logp, OFFSETS, low=1.0, high=1.0, mean=mean)
        assert got.tolist() == [1] * 6
    assert not vetoed_tokens(logp, logp, OFFSETS, threshold=0.999).any()


@pytest.mark.parametrize("offsets", [[0, 2], [1, 6], [0, 4, 2, 6], []])
def test_offsets_that_do_not_cut_the_tokens_are_errors(offsets):
    with pytest.raises(ValueError, match="do not cut 6 tokens"):
        sequence_weights(torch.zeros(6), torch.zeros(6), torch.tensor(offsets, dtype=torch.int64))


def test_bounds_that_cannot_work_are_errors():
    logp = torch.zeros(1)
    with pytest.raises(ValueError, match="must be positive"):
        truncated_weights(logp, logp, cap=0.0)
    for low, high in [(1.1, 5.0), (0.5, 0.9), (-0.1, 2.0)]:
        with pytest.raises(ValueError, match="must contain 1"):
            masked_weights(logp, logp, low=low, high=high)
        with pytest.raises(ValueError, match="must contain 1"):
            sequence_masked_weights(logp, logp, torch.tensor([0, 1]), low=low, high=high)
    for threshold in (0.0, 1.0):
        with pytest.raises(ValueError, match="veto's threshold"):
            vetoed_tokens(logp, logp, torch.tensor([0, 1]), threshold=threshold)
