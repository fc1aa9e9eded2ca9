import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dynamo_megatron.algo.policy_loss import clip_indicator, clipped_policy_loss, kl_penalty

CLIP = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 10.0}


def loss_at(advantage, ratio, **changes):
    """Loss, flag and gradient in logp of one token."""
    logp = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([advantage], dtype=torch.float64)
    out = clipped_policy_loss(logp, torch.zeros_like(logp), advantages, **(CLIP | changes))
    out.loss_T.sum().backward()
    return out.loss_T.item(), bool(out.clipped_T), logp.grad.item()


@pytest.mark.parametrize(
    ("advantage", "ratio", "loss", "clipped"),
    [
        (1, 1.5, -1.28, True),
        (1, 0.5, -0.5, False),
        (-1, 1.5, 1.5, False),
        (-1, 0.5, 0.8, True),
        (-1, 20.0, 10.0, True),
        (2, 1.1, -2.2, False),
        (0, 3.0, 0.0, False),
    ],
)
def test_loss_and_gradient_match_hand_computed_values(advantage, ratio, loss, clipped):
    got, flag, gradient = loss_at(advantage, ratio)
    assert got == pytest.approx(loss, abs=1e-12) and flag == clipped
    # d(-A rho)/d logp = -A rho where the clip lets it through.
    assert gradient == pytest.approx(0.0 if clipped else -advantage * ratio, abs=1e-12)


def test_the_upper_bound_is_the_one_given():
    # The public code turns a bound of .2 into .28 behind the user's back.
    assert loss_at(1, 1.25, clip_high=0.2)[0] == pytest.approx(-1.2)
    assert loss_at(1, 1.25, clip_high=0.28)[0] == pytest.approx(-1.25)


def test_without_dual_clip_a_negative_advantage_is_unbounded():
    assert loss_at(-1, 20.0, dual_clip=None) == pytest.approx((20.0, False, 20.0))


def test_a_token_exactly_on_a_bound_keeps_its_whole_gradient():
    ratios = torch.tensor([1.28, 0.8, 10.0])
    logp = torch.zeros(3, requires_grad=True)
    # Old log-probabilities at which the float ratio is the bound itself.
    bounds = torch.tensor([1 + 0.28, 1 - 0.2, 10.0])
    advantages = torch.tensor([1.0, -1.0, -1.0])
    active = clip_indicator(advantages, bounds, **CLIP)
    assert active.tolist() == [True, True, True]
    out = clipped_policy_loss(logp, -ratios.log(), advantages, **CLIP)
    out.loss_T.sum().backward()
    exact = out.ratio_T == bounds
    torch.testing.assert_close(logp.grad[exact], (-advantages * bounds)[exact])


tokens = st.tuples(st.floats(-2, 2), st.floats(-3, 3))


@given(st.lists(tokens, min_size=1, max_size=8), st.sampled_from([None, 3.0, 10.0]))
def test_loss_equals_the_textbook_max_and_min(rows, dual):
    advantages = torch.tensor([r[0] for r in rows], dtype=torch.float64)
    logp = torch.tensor([r[1] for r in rows], dtype=torch.float64)
    out = clipped_policy_loss(
        logp, torch.zeros_like(logp), advantages, clip_low=0.2, clip_high=0.28, dual_clip=dual
    )
    ratio = logp.exp()
    want = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.28))
    if dual is not None:
        want = torch.where(advantages < 0, torch.minimum(want, -advantages * dual), want)
    assert torch.equal(out.loss_T, want)


@given(st.lists(tokens, min_size=1, max_size=8))
def test_a_gradient_flows_exactly_where_the_indicator_says(rows):
    advantages = torch.tensor([r[0] for r in rows], dtype=torch.float64)
    logp = torch.tensor([r[1] for r in rows], dtype=torch.float64, requires_grad=True)
    out = clipped_policy_loss(logp, torch.zeros_like(logp), advantages, **CLIP)
    out.loss_T.sum().backward()
    active = clip_indicator(advantages, out.ratio_T, **CLIP)
    want = torch.where(active, -advantages * out.ratio_T, 0.0)
    torch.testing.assert_close(logp.grad, want)
    assert torch.equal(out.clipped_T, ~active & (advantages != 0))


def test_no_gradient_reaches_old_logprobs_or_advantages():
    logp, old, advantages = (torch.full((2,), 0.1, requires_grad=True) for _ in range(3))
    out = clipped_policy_loss(logp, old, advantages, **CLIP)
    out.loss_T.sum().backward()
    assert logp.grad is not None and old.grad is None and advantages.grad is None
    assert not out.ratio_T.requires_grad


def test_a_huge_log_ratio_stays_finite():
    logp = torch.tensor([0.0, -1e4], requires_grad=True)
    old = torch.tensor([-1e4, 0.0])
    out = clipped_policy_loss(
        logp, old, torch.tensor([-1.0, 1.0]), clip_low=0.2, clip_high=0.28, dual_clip=None
    )
    out.loss_T.sum().backward()
    assert out.ratio_T.log().tolist() == pytest.approx([20, -20])
    assert out.loss_T.isfinite().all() and logp.grad.tolist() == [0, 0]


def test_a_dual_clip_at_or_below_one_is_an_error():
    with pytest.raises(ValueError, match="dual_clip is 1"):
        loss_at(1, 1, dual_clip=1.0)


def test_misaligned_tokens_are_an_error():
    with pytest.raises(ValueError, match=r"logp_T \[3, 1\], old_logp_T \[3\]"):
        clipped_policy_loss(torch.zeros(3, 1), torch.zeros(3), torch.zeros(3), **CLIP)


@pytest.mark.parametrize(
    ("estimator", "value", "gradient"),
    [
        # log-ratio ref - logp = ln 2: k3 = 2 - 1 - ln 2, its gradient in logp is 1 - 2
        ("k1", -math.log(2), 1.0),
        ("k2", math.log(2) ** 2 / 2, -math.log(2)),
        ("k3", 1 - math.log(2), -1.0),
    ],
)
def test_kl_estimates_match_hand_computed_values(estimator, value, gradient):
    logp = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    penalty = kl_penalty(logp, torch.tensor([math.log(2) - 1.0], dtype=torch.float64), estimator)
    penalty.sum().backward()
    assert penalty.item() == pytest.approx(value) and logp.grad.item() == pytest.approx(gradient)


def test_k1_and_k3_are_unbiased():
    pi = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
    ref = torch.tensor([0.3, 0.3, 0.4], dtype=torch.float64)
    want = (pi * (pi / ref).log()).sum()
    for estimator in ("k1", "k3"):
        got = (pi * kl_penalty(pi.log(), ref.log(), estimator)).sum()
        torch.testing.assert_close(got, want)


def test_k3_of_nearly_equal_policies_keeps_its_digits():
    # x^2 / 2 for x = 1e-4 in float32; exp(x) - 1 - x would be off by everything.
    got = kl_penalty(torch.zeros(1), torch.full((1,), 1e-4), "k3")
    assert got.item() >= 0 and got.item() == pytest.approx(5e-9, rel=2e-3)


def test_an_unknown_estimator_is_an_error():
    with pytest.raises(ValueError, match='"k1", "k2" and "k3"'):
        kl_penalty(torch.zeros(1), torch.zeros(1), "k4")
