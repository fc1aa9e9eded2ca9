"""Per-token policy losses. Their mean over the mini-batch's tokens is taken by the caller."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dynamo_megatron.algo._checks import require_equal_shapes

# exp(20) is 5e8: a ratio beyond it carries no information, and infinity would poison the mean.
MAX_LOG_RATIO = 20.0


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """What the clipped loss says of each token.

    Attributes:
        loss_T: [T] to be minimised; differentiable in the log-probabilities.
        ratio_T: [T] pi / pi_old, detached.
        clipped_T: [T] bool, tokens whose gradient the clip removed.
    """

    loss_T: Tensor
    ratio_T: Tensor
    clipped_T: Tensor


def clip_indicator(
    advantages: Tensor,
    ratio: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> Tensor:
    """Tokens that the clipped loss gives a gradient, I_clip.

    A > 0 and ratio <= 1 + clip_high, or A < 0 and 1 - clip_low <= ratio <= dual_clip. A = 0 has
    none.

    Args:
        advantages: [T] advantages.
        ratio: [T] pi / pi_old.
        clip_low: epsilon_low.
        clip_high: epsilon_high.
        dual_clip: bound of the ratio for negative advantages, or None for no bound.

    Returns:
        [T] bool.

    Source: DynaMO, arXiv:2602.19208, I_clip; the dual clip is arXiv:1912.09729.
    """
    pushed_up = (advantages > 0) & (ratio <= 1 + clip_high)
    pushed_down = (advantages < 0) & (ratio >= 1 - clip_low)
    if dual_clip is not None:
        pushed_down = pushed_down & (ratio <= dual_clip)
    return pushed_up | pushed_down


def clipped_policy_loss(
    logp_T: Tensor,
    old_logp_T: Tensor,
    advantages_T: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> PolicyLoss:
    """Clipped surrogate loss of each token.

    max(-A rho, -A clip(rho, 1 - clip_low, 1 + clip_high)), for A < 0 at most -A dual_clip, with
    rho = exp(clamp(logp - old_logp, -20, 20)).

    Args:
        logp_T: [T] log-probability under the policy being trained, with a graph.
        old_logp_T: [T] the same under the policy at the start of the step; no gradient flows.
        advantages_T: [T] advantages; no gradient flows.
        clip_low: epsilon_low in [0, 1).
        clip_high: epsilon_high >= 0, used as it is given.
        dual_clip: c > 1, or None for none.

    Returns:
        Per-token loss, ratio and clip flag.

    Raises:
        ValueError: ``dual_clip`` <= 1, or the tensors are not equally long.

    Source: PPO, arXiv:1707.06347, equation 7; asymmetric bounds DAPO, arXiv:2503.14476; dual clip
    arXiv:1912.09729, equation 5.
    """
    require_equal_shapes({"logp_T": logp_T, "old_logp_T": old_logp_T, "advantages_T": advantages_T})
    if dual_clip is not None and dual_clip <= 1:
        raise ValueError(
            f"dual_clip is {dual_clip}, but it bounds a ratio that starts at 1: at or below 1 no "
            "negative advantage would ever have a gradient. Use e.g. 10, or None for no bound."
        )
    advantages_T = advantages_T.detach()
    ratio_T = (logp_T - old_logp_T.detach()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    # The textbook's max and min, told apart by the sign of A. Unlike them, a clamp passes the whole
    # gradient at a ratio exactly on its bound, as clip_indicator says.
    bounded_T = torch.where(
        advantages_T > 0,
        ratio_T.clamp(max=1 + clip_high),
        ratio_T.clamp(min=1 - clip_low, max=dual_clip),
    )
    active_T = clip_indicator(
        advantages_T,
        ratio_T.detach(),
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
    )
    return PolicyLoss(
        loss_T=-advantages_T * bounded_T,
        ratio_T=ratio_T.detach(),
        clipped_T=(advantages_T != 0) & ~active_T,
    )


def kl_penalty(logp_T: Tensor, ref_logp_T: Tensor, estimator: Literal["k1", "k2", "k3"]) -> Tensor:
    """Per-token estimate of KL(pi || pi_ref) from tokens sampled from pi, nats.

    k1 = logp - ref (unbiased; as a loss its expected gradient is zero), k2 = (logp - ref)^2 / 2,
    k3 = exp(ref - logp) - 1 - (ref - logp) (unbiased, never negative). The log-ratio is clamped to
    [-20, 20].

    Args:
        logp_T: [T] with a graph.
        ref_logp_T: [T] under the reference policy; no gradient flows.
        estimator: "k1", "k2" or "k3".

    Returns:
        [T] nats, differentiable in ``logp_T``.

    Raises:
        ValueError: unknown estimator, or the tensors are not equally long.

    Source: Schulman, "Approximating KL divergence", 2020, http://joschu.net/blog/kl-approx.html.
    """
    require_equal_shapes({"logp_T": logp_T, "ref_logp_T": ref_logp_T})
    delta_T = (ref_logp_T.detach() - logp_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    match estimator:
        case "k1":
            return -delta_T
        case "k2":
            return delta_T.square() / 2
        case "k3":
            # expm1, because exp(x) - 1 loses every digit where the policies agree.
            return delta_T.expm1() - delta_T
    raise ValueError(f'KL estimator is {estimator!r}; the known ones are "k1", "k2" and "k3".')
