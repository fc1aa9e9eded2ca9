"""The token-level half of DynaMO: factors on the advantages from entropy and its change.

Everything here is detached and per token; only `StatRange` spans tokens, and it is built from
minima and maxima alone, so that it is the same number however the tokens are split.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dynamo_megatron.algo._checks import require_equal_shapes
from dynamo_megatron.algo.policy_loss import clip_indicator

__all__ = [
    "MIN_ENTROPY_RANGE",
    "Modulation",
    "StatRange",
    "clip_indicator",
    "entropy_change",
    "modulate",
    "sequence_mean_change",
    "stat_range",
]

MIN_ENTROPY_RANGE = 1e-3
"""Nats. In a narrower set, float error in H would become a factor of order one."""

_MAX_SIGMOID_ARGUMENT = 80.0
_EPSILON = 1e-8


@dataclass(frozen=True, slots=True)
class StatRange:
    """Extremes of the statistics over a declared set of tokens, e.g. one mini-batch.

    Attributes:
        entropy_min: smallest entropy, nats; +inf over no tokens.
        entropy_max: largest entropy, nats; -inf over no tokens.
        change_max: largest |first-order entropy change| per unit step; 0 over no tokens.

    A set with a NaN or infinite statistic has the range (-inf, +inf, +inf). It stays so under
    `merged`, so that one rank's NaN is an error on all ranks, and `modulate` refuses it.
    """

    entropy_min: float
    entropy_max: float
    change_max: float

    @classmethod
    def empty(cls) -> StatRange:
        """Return the range over no tokens, the identity of `merged`."""
        return cls(entropy_min=math.inf, entropy_max=-math.inf, change_max=0.0)

    def merged(self, other: StatRange) -> StatRange:
        """Return the range over both sets; exactly associative and commutative."""
        return StatRange(
            entropy_min=min(self.entropy_min, other.entropy_min),
            entropy_max=max(self.entropy_max, other.entropy_max),
            change_max=max(self.change_max, other.change_max),
        )


@dataclass(frozen=True, slots=True)
class Modulation:
    """Modulated advantages and the two factors in them.

    Attributes:
        advantages: [T] A * compensation * stabilization, in the dtype of A.
        compensation: [T] float64 in [1, 1 + alpha]; 1 where switched off.
        stabilization: [T] float64 in [lam_min, 1]; 1 where switched off.
    """

    advantages: Tensor
    compensation: Tensor
    stabilization: Tensor


def entropy_change(
    advantages_T: Tensor,
    ratio_T: Tensor,
    logp_T: Tensor,
    lam_T: Tensor,
    q_T: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> Tensor:
    """Size of the entropy change that a token's update causes, to first order and exact in it.

    An ascent step eta on xi log pi(y), xi = I_clip rho A, moves the logits by eta xi (e_y - pi) and
    the entropy by -eta xi (pi_y Lambda_y - Q), with Lambda_a = log pi_a + H and
    Q = sum_a pi_a^2 Lambda_a. This is its absolute value for eta = 1.

    Args:
        advantages_T: [T] A.
        ratio_T: [T] rho = pi / pi_old.
        logp_T: [T] log pi(y), nats.
        lam_T: [T] Lambda_y.
        q_T: [T] Q, over the whole vocabulary.
        clip_low: as in the loss.
        clip_high: as in the loss.
        dual_clip: as in the loss.

    Returns:
        [T] >= 0, detached; exactly 0 where the clip removes the gradient or A = 0.

    Source: DynaMO, arXiv:2602.19208, the first-order entropy change; arXiv:2602.03392, theorem 3.3.
    """
    tensors = {
        "advantages_T": advantages_T,
        "ratio_T": ratio_T,
        "logp_T": logp_T,
        "lam_T": lam_T,
        "q_T": q_T,
    }
    require_equal_shapes(tensors)
    return _change(
        advantages_T,
        ratio_T,
        logp_T.exp() * lam_T - q_T,
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
    )


def sequence_mean_change(
    advantages_T: Tensor,
    ratio_T: Tensor,
    logp_T: Tensor,
    lam_T: Tensor,
    sequence_T: Tensor,
    mask_T: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> Tensor:
    """Stand-in of the public DynaMO code for `entropy_change`, to reproduce its runs only.

    Q, an expectation over the vocabulary, is replaced by the mean of pi_y Lambda_y over the
    sequence's sampled tokens. That is another statistic: it puts an entropy change on every token
    the policy is sure of, where there is none.

    Args:
        advantages_T: [T] A.
        ratio_T: [T] rho.
        logp_T: [T] log pi(y), nats.
        lam_T: [T] Lambda_y.
        sequence_T: [T] int64 >= 0, the sequence of each token; sequences must be whole.
        mask_T: [T] bool, tokens that count in the mean.
        clip_low: as in the loss.
        clip_high: as in the loss.
        dual_clip: as in the loss.

    Returns:
        [T] >= 0, detached; 0 where masked.
    """
    tensors = {
        "advantages_T": advantages_T,
        "ratio_T": ratio_T,
        "logp_T": logp_T,
        "lam_T": lam_T,
        "sequence_T": sequence_T,
        "mask_T": mask_T,
    }
    require_equal_shapes(tensors)
    value_T = torch.where(mask_T, logp_T.detach().exp() * lam_T.detach(), 0.0).double()
    total_S = torch.bincount(sequence_T, weights=value_T)
    count_S = torch.bincount(sequence_T, weights=mask_T.double())
    mean_T = (total_S / count_S.clamp(min=1))[sequence_T]
    change_T = _change(
        advantages_T,
        ratio_T,
        (value_T - mean_T).to(logp_T.dtype),
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
    )
    return torch.where(mask_T, change_T, 0.0)


def stat_range(entropy_T: Tensor, change_T: Tensor, mask_T: Tensor) -> StatRange:
    """Range of the statistics over the tokens of ``mask_T`` (bool); the others do not matter.

    Returns:
        The range, or the all-infinite one when a counted statistic is NaN or infinite.
    """
    require_equal_shapes({"entropy_T": entropy_T, "change_T": change_T, "mask_T": mask_T})
    entropy, change = entropy_T.detach()[mask_T], change_T.detach()[mask_T]
    if entropy.numel() == 0:
        return StatRange.empty()
    if not bool(entropy.isfinite().all() & change.isfinite().all()):
        return StatRange(entropy_min=-math.inf, entropy_max=math.inf, change_max=math.inf)
    return StatRange(
        entropy_min=entropy.min().item(),
        entropy_max=entropy.max().item(),
        change_max=change.max().item(),
    )


def modulate(
    advantages_T: Tensor,
    entropy_T: Tensor,
    change_T: Tensor,
    stat_range: StatRange,
    *,
    gradient_compensation: bool,
    stabilization: bool,
    alpha: float,
    lam_min: float,
    gamma: float,
    tau: float,
) -> Modulation:
    """Fold the two factors of DynaMO into the advantages.

    compensation = 1 + alpha (Hmax - H) / (Hmax - Hmin + 1e-8) where A > 0, else 1: confident
    tokens, whose gradient softmax makes small, are raised. stabilization = lam_min + (1 - lam_min)
    / (1 + exp(gamma (x - tau))), x = change / (max change + 1e-8): tokens that move the entropy
    most are damped. The fraction is held to [0, 1] because the statistics may be newer than their
    range. Where the range of H is under `MIN_ENTROPY_RANGE` the fraction is 0; where no token moves
    the entropy x is 0.

    Args:
        advantages_T: [T] A.
        entropy_T: [T] H, nats.
        change_T: [T] from `entropy_change`.
        stat_range: over the declared set that these tokens belong to.
        gradient_compensation: switch of the first factor.
        stabilization: switch of the second factor.
        alpha: largest relative rise.
        lam_min: smallest second factor, in [0, 1].
        gamma: steepness.
        tau: the x at which half of the damping is reached.

    Returns:
        Detached. With both switches off the advantages are bitwise those given.

    Raises:
        ValueError: the range is that of NaN or infinite statistics, or the shapes differ.

    Source: DynaMO, arXiv:2602.19208, gradient compensation and update-magnitude stabilisation.
    """
    tensors = {"advantages_T": advantages_T, "entropy_T": entropy_T, "change_T": change_T}
    require_equal_shapes(tensors)
    advantages_T = advantages_T.detach()
    ones_T = torch.ones_like(advantages_T, dtype=torch.float64)
    compensation_T, stabilization_T = ones_T, ones_T
    if (gradient_compensation or stabilization) and stat_range.change_max == math.inf:
        raise ValueError(
            "the token statistics contain NaN or infinite values, on this rank or another: the "
            "logits of the policy are not finite. Look at the last updates' grad_norm, lower the "
            "learning rate, or resume from an older checkpoint."
        )
    if gradient_compensation:
        fraction_T = _confidence(entropy_T.detach().double(), stat_range)
        compensation_T = torch.where(advantages_T > 0, 1 + alpha * fraction_T, ones_T)
    if stabilization:
        x_T = _relative_change(change_T.detach().double(), stat_range)
        argument_T = (gamma * (x_T - tau)).clamp(-_MAX_SIGMOID_ARGUMENT, _MAX_SIGMOID_ARGUMENT)
        stabilization_T = lam_min + (1 - lam_min) / (1 + argument_T.exp())
    modulated_T = (advantages_T.double() * compensation_T * stabilization_T).to(advantages_T.dtype)
    return Modulation(modulated_T, compensation_T, stabilization_T)


def _change(
    advantages_T: Tensor,
    ratio_T: Tensor,
    direction_T: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> Tensor:
    advantages_T, ratio_T = advantages_T.detach(), ratio_T.detach()
    active_T = clip_indicator(
        advantages_T, ratio_T, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip
    )
    # where, not a product: a padded position may hold anything, and 0 * NaN is NaN.
    return torch.where(active_T, (ratio_T * advantages_T * direction_T.detach()).abs(), 0.0)


def _confidence(entropy_T: Tensor, extremes: StatRange) -> Tensor:
    width = extremes.entropy_max - extremes.entropy_min
    if width < MIN_ENTROPY_RANGE:
        return torch.zeros_like(entropy_T)
    return ((extremes.entropy_max - entropy_T) / (width + _EPSILON)).clamp(0, 1)


def _relative_change(change_T: Tensor, extremes: StatRange) -> Tensor:
    if extremes.change_max == 0:
        return torch.zeros_like(change_T)
    return change_T / (extremes.change_max + _EPSILON)
