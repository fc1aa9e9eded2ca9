"""The policy loss of a micro-batch with weights on its tokens, by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from dynamo_megatron.actor.forward_step import LossSettings, policy_loss_sum, training_step
from dynamo_megatron.types import MicroBatch, TokenInputs, TokenStats

LOG2 = math.log(2)
SETTINGS = LossSettings(
    clip_low=0.2, clip_high=0.28, dual_clip=None, kl_coefficient=0.5, kl_estimator="k2"
)
# Tokens 3, 0 and 2 of a batch of four are this micro-batch's; token 1 is another rank's.
INDEX = torch.tensor([3, 0, 2])
INPUTS = TokenInputs(
    advantages=torch.tensor([2.0, math.nan, -1.0, 4.0]),
    old_logp=torch.full((4,), -1.0),
    reference_logp=torch.full((4,), -1.0 - 2 * LOG2),
    loss_weights=torch.tensor([0.25, math.nan, 0.0, 1.5]),
)
# On-policy: ratio 1, policy losses -A = (-4, -2, 1); penalties (2 log 2)^2 / 2 each, times 0.5.
PENALTY = 0.5 * 2 * LOG2**2


def statistics(logp: torch.Tensor) -> TokenStats:
    other = torch.full_like(logp.detach(), 0.5)
    return TokenStats(logp=logp, entropy=other, lam=other, sum_pi2=other, q=other)


def loss_and_gradient(inputs: TokenInputs, modulate=None, settings=SETTINGS):
    logp = torch.full((3,), -1.0, requires_grad=True)
    loss, report = policy_loss_sum(statistics(logp), inputs, INDEX, settings, modulate)
    loss.backward()
    assert logp.grad is not None
    return loss.detach(), logp.grad, report


def test_weights_multiply_the_policy_loss_and_not_the_penalty():
    loss, gradient, report = loss_and_gradient(INPUTS)
    # 1.5 * -4 + 0.25 * -2 + 0 * 1, and the whole penalty of all three tokens
    assert loss == pytest.approx(-6.5 + 3 * PENALTY)
    # of the penalty: 0.5 * (logp - reference) = log 2 for every token, the dropped one too
    torch.testing.assert_close(gradient, torch.tensor([-6.0, -0.5, 0.0]) + LOG2)
    names = ("loss", "entropy", "clipped", "k3", "penalty", "tokens")
    sums = dict(zip(names, report.sums.tolist(), strict=True))
    assert sums["loss"] == pytest.approx(-6.5 + 3 * PENALTY)
    assert sums["penalty"] == pytest.approx(3 * 2 * LOG2**2)
    assert sums["tokens"] == 3


def test_weights_are_applied_after_the_modulation():
    seen = []

    def modulate(advantages, stats, ratio):
        seen.append(advantages.tolist())
        return advantages.square()

    loss, _, _ = loss_and_gradient(replace(INPUTS, reference_logp=None), modulate)
    assert seen == [[4.0, 2.0, -1.0]]
    assert loss == pytest.approx(1.5 * -16 + 0.25 * -4)


def test_the_clip_does_not_see_the_weights():
    # ratio 1.5 for A > 0 is clipped at 1.28 and has no gradient; for A < 0 it is not
    inputs = replace(
        INPUTS,
        reference_logp=None,
        old_logp=torch.full((4,), -1.0 - math.log(1.5)),
        loss_weights=torch.tensor([3.0, math.nan, 2.0, 0.5]),
    )
    loss, gradient, report = loss_and_gradient(inputs)
    assert loss == pytest.approx(0.5 * -4 * 1.28 + 3 * -2 * 1.28 + 2 * 1.5)
    torch.testing.assert_close(gradient, torch.tensor([0.0, 0.0, 3.0]))
    assert report.sums[2] == 2 and float(report.ratio_max) == pytest.approx(1.5)


def test_no_weights_and_weights_of_one_are_the_same_bits():
    g = torch.Generator().manual_seed(0)
    inputs = TokenInputs(
        advantages=torch.randn(4, generator=g),
        old_logp=-1 + 0.3 * torch.randn(4, generator=g),
        reference_logp=-1 + 0.3 * torch.randn(4, generator=g),
    )
    loss, gradient, report = loss_and_gradient(inputs)
    ones = loss_and_gradient(replace(inputs, loss_weights=torch.ones(4)))
    assert torch.equal(ones[0], loss) and torch.equal(ones[1], gradient)
    assert torch.equal(ones[2].sums, report.sums)


def test_a_dropped_token_stays_in_the_denominator():
    """The count is what every gradient is divided by."""
    row = MicroBatch(
        input_ids=torch.zeros(4, dtype=torch.int64),
        position_ids=torch.arange(4),
        cu_seqlens=torch.tensor([0, 4], dtype=torch.int32),
        max_seqlen=4,
        rows=torch.arange(3),
        targets=torch.zeros(3, dtype=torch.int64),
        token_index=INDEX,
    )

    def model(**_):
        return statistics(torch.full((3,), -1.0, requires_grad=True))

    dropped = replace(INPUTS, loss_weights=torch.zeros(4))
    step = training_step(dropped, SETTINGS, torch.device("cpu"))
    stats, loss_function = step(iter([row]), model)
    loss, count, _ = loss_function(stats)
    assert loss.item() == pytest.approx(3 * PENALTY)
    assert int(count) == 3
