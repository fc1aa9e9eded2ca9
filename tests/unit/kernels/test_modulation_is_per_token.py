"""From statistics to modulated advantages and loss terms: elementwise, nothing larger than [T]."""

import torch

from dynamo_megatron.algo.modulation import entropy_change, modulate, stat_range
from dynamo_megatron.algo.policy_loss import clipped_policy_loss
from dynamo_megatron.kernels import token_stats
from tests.unit.kernels.problems import LargestTensor

CLIP = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 10.0}


def test_modulated_loss_terms_and_their_gradient_never_leave_the_token_dimension():
    tokens, columns = 50, 300
    generator = torch.Generator().manual_seed(0)
    leaf = torch.randn(tokens, columns, generator=generator).requires_grad_()
    stats = token_stats(leaf * 1, torch.arange(tokens), vocab_size=columns)
    logp = stats.logp.detach().requires_grad_()  # the border of the elementwise part
    old_logp = stats.logp.detach() + 0.1 * torch.randn(tokens, generator=generator)
    advantages = torch.randn(tokens, generator=generator)
    everywhere = torch.ones(tokens, dtype=torch.bool)
    with LargestTensor() as seen:
        ratio = (logp.detach() - old_logp).exp()
        change = entropy_change(advantages, ratio, logp.detach(), stats.lam, stats.q, **CLIP)
        modulation = modulate(
            advantages,
            stats.entropy.detach(),
            change,
            stat_range(stats.entropy, change, everywhere),
            gradient_compensation=True,
            stabilization=True,
            alpha=0.2,
            lam_min=0.6,
            gamma=50.0,
            tau=0.99,
        )
        terms = clipped_policy_loss(logp, old_logp, modulation.advantages, **CLIP)
        (grad,) = torch.autograd.grad(terms.loss_T.sum(), logp)
    assert seen.numel == tokens
    assert seen.collectives == 0
    assert grad.shape == (tokens,)
    assert not torch.equal(modulation.advantages, advantages)
