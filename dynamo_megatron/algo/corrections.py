"""Mismatch between the trainer's and the sampler's probabilities of the same tokens.

Both engines hold the same weights, but other kernels and precisions: tokens are sampled from a
slightly other policy than the one that is trained. The weights multiply the loss of a token and
carry no gradient. Log-probabilities are at the sampling temperature, before any top-p or top-k cut.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dynamo_megatron.algo._checks import require_equal_shapes
from dynamo_megatron.algo.policy_loss import MAX_LOG_RATIO

SUMMARY_QUANTILES = (0.01, 0.5, 0.99)


@dataclass(frozen=True, slots=True, kw_only=True)
class MismatchSummary:
    """How far trainer and sampler disagree over a set of tokens.

    Attributes:
        num_tokens: tokens in the set. All else is 0 (the ratios 1) when there are none.
        mean_abs_delta: mean |logp_train - logp_sampler|, nats.
        max_abs_delta: largest of them, nats.
        ratio_quantiles: pi_train / pi_sampler at `SUMMARY_QUANTILES`, nearest rank.
        effective_sample_size: (sum q)^2 / sum q^2 over the number of tokens, in (0, 1].
    """

    num_tokens: int
    mean_abs_delta: float
    max_abs_delta: float
    ratio_quantiles: tuple[float, ...]
    effective_sample_size: float


def truncated_weights(train_logp_T: Tensor, sampler_logp_T: Tensor, *, cap: float = 2.0) -> Tensor:
    """Truncated importance weights, min(q, cap) with q = pi_train / pi_sampler.

    Args:
        train_logp_T: [T] the trainer's log-probabilities, nats.
        sampler_logp_T: [T] the sampler's, nats.
        cap: largest weight, usually 1.5 to 5.

    Returns:
        [T], detached.

    Raises:
        ValueError: ``cap`` is not positive, or the tensors are not equally long.

    Source: TIS, Yao et al., "Your efficient RL framework secretly brings you off-policy RL
    training", 2025.
    """
    if not cap > 0:
        raise ValueError(f"the cap of the weights is {cap}: it must be positive, e.g. 2.")
    return _ratio(train_logp_T, sampler_logp_T).clamp(max=cap)


def masked_weights(
    train_logp_T: Tensor, sampler_logp_T: Tensor, *, low: float = 0.5, high: float = 5.0
) -> Tensor:
    """Importance weights q = pi_train / pi_sampler inside [low, high], and 0 outside.

    Args:
        train_logp_T: [T] the trainer's log-probabilities, nats.
        sampler_logp_T: [T] the sampler's, nats.
        low: smallest ratio that is kept.
        high: largest ratio that is kept.

    Returns:
        [T], detached. The dropped tokens stay in the loss denominator.

    Raises:
        ValueError: not 0 <= low <= 1 <= high, or the tensors are not equally long.

    Source: IcePop, Ling team, 2025 (arXiv:2510.18855).
    """
    if not 0 <= low <= 1 <= high:
        raise ValueError(
            f"the band of kept ratios is [{low}, {high}]: it must contain 1, the ratio of engines "
            "that agree. Use e.g. [0.5, 5]."
        )
    ratio_T = _ratio(train_logp_T, sampler_logp_T)
    return torch.where((ratio_T >= low) & (ratio_T <= high), ratio_T, 0.0)


def mismatch_summary(
    train_logp_T: Tensor, sampler_logp_T: Tensor, mask_T: Tensor
) -> MismatchSummary:
    """Summarise the mismatch over the tokens of ``mask_T`` (bool).

    Quantiles do not add up: to speak of a whole step, gather its tokens first.

    Raises:
        ValueError: the tensors are not equally long.
    """
    tensors = {
        "train_logp_T": train_logp_T,
        "sampler_logp_T": sampler_logp_T,
        "mask_T": mask_T,
    }
    require_equal_shapes(tensors)
    train, sampler = (
        train_logp_T.detach()[mask_T].double(),
        sampler_logp_T.detach()[mask_T].double(),
    )
    count = train.numel()
    if count == 0:
        return MismatchSummary(
            num_tokens=0,
            mean_abs_delta=0.0,
            max_abs_delta=0.0,
            ratio_quantiles=(1.0,) * len(SUMMARY_QUANTILES),
            effective_sample_size=0.0,
        )
    delta = (train - sampler).abs()
    ratio = _ratio(train, sampler).sort().values
    # torch.quantile refuses more than 2^24 elements.
    ranks = [round(q * (count - 1)) for q in SUMMARY_QUANTILES]
    return MismatchSummary(
        num_tokens=count,
        mean_abs_delta=delta.mean().item(),
        max_abs_delta=delta.max().item(),
        ratio_quantiles=tuple(ratio[rank].item() for rank in ranks),
        effective_sample_size=(ratio.sum().square() / ratio.square().sum() / count).item(),
    )


def _ratio(train_logp_T: Tensor, sampler_logp_T: Tensor) -> Tensor:
    require_equal_shapes({"train_logp_T": train_logp_T, "sampler_logp_T": sampler_logp_T})
    delta_T = train_logp_T.detach() - sampler_logp_T.detach()
    return delta_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
