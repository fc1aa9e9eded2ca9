"""Drawing tokens from logits."""

import math

import numpy as np
import pytest
import torch

from dynamo_megatron.rollout.sampling import greedy_tokens, sample_tokens, uniforms_for


def test_a_token_is_the_first_whose_cumulative_probability_exceeds_the_number():
    # probabilities 1/8, 3/8, 1/2 -> boundaries 0.125, 0.5, 1
    logits = torch.tensor([[0.125, 0.375, 0.5]]).log()
    numbers = [0.0, 0.1249, 0.126, 0.4999, 0.5001, 1.0 - 2.0**-53]
    drawn = [
        int(sample_tokens(logits, torch.tensor([u], dtype=torch.float64), 1.0)[0]) for u in numbers
    ]
    assert drawn == [0, 0, 1, 1, 2, 2]


def test_the_logprob_is_that_of_the_tempered_policy():
    # logits (0, ln 4) at T = 2: weights 1 and 2, so probabilities 1/3 and 2/3
    logits = torch.tensor([[0.0, math.log(4.0)]])
    token, logp = sample_tokens(logits, torch.tensor([0.9], dtype=torch.float64), 2.0)
    assert int(token) == 1
    assert float(logp) == pytest.approx(math.log(2 / 3), abs=1e-6)


def test_tokens_of_probability_zero_are_never_drawn():
    logits = torch.tensor([[-math.inf, 0.0, -math.inf, 0.0, -math.inf]]).expand(4, 5)
    numbers = torch.tensor([0.0, 0.5, 1.0 - 2.0**-53, 1.0 - 2.0**-53], dtype=torch.float64)
    numbers[1] = torch.nextafter(numbers[1], torch.tensor(0.0, dtype=torch.float64))
    tokens, logp = sample_tokens(logits, numbers, 1.0)
    assert tokens.tolist() == [1, 1, 3, 3]
    assert logp.isfinite().all()


def test_logits_that_are_not_a_number_do_not_pass_as_samples():
    _, logp = sample_tokens(torch.full((1, 4), math.nan), torch.tensor([0.5]).double(), 1.0)
    assert not logp.isfinite().any()


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.6])
def test_frequencies_follow_the_tempered_softmax(temperature):
    logits_V = torch.tensor([0.3, -1.0, 1.2, 0.0, -2.5, 0.9])
    weights = [math.exp(z / temperature) for z in logits_V.tolist()]
    expected = np.array(weights) / sum(weights)
    count = 20_000
    uniforms = uniforms_for(range(count), 1)[:, 0]  # one seed each, as rollouts have
    tokens, _ = sample_tokens(logits_V.expand(count, 6), uniforms, temperature)
    observed = np.bincount(tokens.numpy(), minlength=6)
    chi2 = float(((observed - count * expected) ** 2 / (count * expected)).sum())
    assert chi2 < 20.5  # 5 degrees of freedom: 99.9 %


def test_uniforms_depend_on_their_own_seed_and_begin_alike_whatever_the_count():
    many = uniforms_for([5, 6, 7], 10)
    assert torch.equal(uniforms_for([6], 4)[0], many[1, :4])
    assert len(set(many.flatten().tolist())) == 30
    assert many.dtype == torch.float64 and float(many.min()) >= 0 and float(many.max()) < 1


def test_greedy_takes_the_most_likely_token():
    token, logp = greedy_tokens(torch.tensor([[0.0, math.log(3.0)], [1.0, 1.0 - 1e-3]]))
    assert token.tolist() == [1, 0]
    assert float(logp[0]) == pytest.approx(math.log(3 / 4), abs=1e-6)
