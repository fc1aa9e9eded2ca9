"""Large vocabularies and low, masked, rounded or broken logits keep the token statistics right."""

import math

import pytest
import torch

from dynamo_megatron.kernels import token_stats
from tests.unit.kernels.problems import FIELDS, IMPLEMENTATIONS


def test_sums_stay_exact_over_a_vocabulary_of_262144():
    # Megatron-LM#2206: fused cross-entropies drifted above 250k ids.
    logits = torch.randn(2, 262_144, generator=torch.Generator().manual_seed(3)) * 0.3
    got = token_stats(logits, torch.tensor([0, 262_143]), vocab_size=262_144)
    log_pi = logits.double().log_softmax(-1)
    assert (got.entropy + (log_pi.exp() * log_pi).sum(-1)).abs().max() < 2e-6
    assert (got.logp - log_pi[[0, 1], [0, 262_143]]).abs().max() < 2e-6


def test_phantom_columns_do_not_leak_when_all_logits_are_low():
    # verl#2899: columns past the vocabulary counted as logit 0, 6 nats off where logits are at -15.
    logits = torch.full((1, 300), 0.0)
    logits[:, :257] = -15.0
    got = token_stats(logits, torch.tensor([256]), vocab_size=257)
    assert float(got.logp) == pytest.approx(-math.log(257), abs=1e-6)


def test_logits_far_below_zero_keep_a_finite_log_partition():
    # verl#7439: a running maximum that starts at 0 makes exp(-150) vanish and log Z -inf.
    logits = torch.full((1, 10), -150.0)
    got = token_stats(logits, torch.tensor([3]), vocab_size=10)
    assert float(got.logp) == pytest.approx(-math.log(10), abs=1e-6)
    assert float(got.entropy) == pytest.approx(math.log(10), abs=1e-6)


def test_masked_logits_give_a_finite_entropy_and_no_gradient_there():
    # TRL#7221, SkyRL#2259: 0 * -inf is NaN.
    logits = torch.tensor([[1.0, -torch.inf, 1.0]], requires_grad=True)
    got = token_stats(logits, torch.tensor([0]), vocab_size=3)
    assert float(got.entropy.detach()) == pytest.approx(math.log(2), abs=1e-6)
    (got.entropy + got.logp).sum().backward()
    torch.testing.assert_close(logits.grad, torch.tensor([[0.5, 0.0, -0.5]]))


def test_a_masked_target_is_impossible_and_its_gradient_finite():
    logits = torch.tensor([[1.0, -torch.inf, 1.0]], requires_grad=True)
    got = token_stats(logits, torch.tensor([1]), vocab_size=3)
    assert float(got.logp.detach()) == float(got.lam) == -torch.inf
    # d log pi(1) / dz = 1{1} - pi, and the entropy of two equals is at its maximum.
    (got.logp + 3.0 * got.entropy).sum().backward()
    torch.testing.assert_close(logits.grad, torch.tensor([[-0.5, 1.0, -0.5]]))


def test_bfloat16_logits_are_not_rounded_again_by_the_temperature():
    # Dividing bfloat16 logits by 0.7 in place costs 1.7e-2 nats on average.
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(64, 500, generator=generator) * 3).bfloat16()
    targets = torch.randint(0, 500, (64,), generator=generator)
    got = token_stats(logits, targets, vocab_size=500, temperature=0.7)
    want = (logits.double() / 0.7).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    assert (got.logp - want).abs().max() < 4e-6


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_a_nan_or_infinite_logit_stays_visible_in_its_row_only(impl):
    logits = torch.zeros(3, 5)
    logits[0, 1] = torch.nan
    logits[1, 2] = torch.inf
    got = token_stats(logits, torch.tensor([0, 0, 0]), vocab_size=5, impl=impl)
    for name in FIELDS:
        assert getattr(got, name)[:2].isnan().all(), name
        assert getattr(got, name)[2].isfinite(), name


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_a_row_without_any_finite_logit_is_nan(impl):
    logits = torch.full((1, 5), -torch.inf)
    got = token_stats(logits, torch.tensor([0]), vocab_size=5, impl=impl)
    assert got.logp.isnan().all()
    assert got.entropy.isnan().all()


def test_an_ignored_row_has_no_gradient_even_where_its_logits_are_nan():
    logits = torch.full((2, 5), torch.nan)
    logits[1] = 0.0
    leaf = logits.requires_grad_()
    got = token_stats(leaf * 1, torch.tensor([-100, 2]), vocab_size=5)
    assert float(got.logp[0].detach()) == float(got.lam[0]) == 0.0
    (got.logp + got.entropy).sum().backward()
    # through leaf * 1 only the op's own gradient arrives
    torch.testing.assert_close(leaf.grad[0], torch.zeros(5))
