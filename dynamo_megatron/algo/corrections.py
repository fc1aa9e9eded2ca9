"""Loss weights against the mismatch between the trainer's and the sampler's probabilities.

Both engines hold the same weights, but other kernels and precisions: tokens are sampled from a
slightly other policy than the one that is trained. With q = pi_train / pi_sampler of a token, a
weight multiplies the policy loss of that token and carries no gradient. A dropped token has weight
0 and stays in the loss denominator. Log-probabilities are at the sampling temperature, before any
top-p or top-k cut.

Shapes: T response tokens of S sequences; sequence s owns tokens offsets[s] to offsets[s + 1].
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from dynamo_megatron.algo._checks import require_equal_shapes
from dynamo_megatron.algo.policy_loss import MAX_LOG_RATIO
from dynamo_megatron.types import sequence_lengths


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
    _require_cap(cap)
    return _bounded_exp(_log_ratio(train_logp_T, sampler_logp_T)).clamp(max=cap)


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
    _require_band(low, high)
    ratio_T = _bounded_exp(_log_ratio(train_logp_T, sampler_logp_T))
    return torch.where((ratio_T >= low) & (ratio_T <= high), ratio_T, 0.0)


def sequence_weights(
    train_logp_T: Tensor, sampler_logp_T: Tensor, offsets: Tensor, *, cap: float = 2.0
) -> Tensor:
    """Each token's weight is that of its sequence, min(product of q, cap).

    The product is exp(clamp(sum of log q, -20, 20)) over the sequence's response tokens.

    Args:
        train_logp_T: [T] the trainer's log-probabilities, nats.
        sampler_logp_T: [T] the sampler's, nats.
        offsets: [S + 1] int64, where the sequences begin and end.
        cap: largest weight, usually 2 to 10.

    Returns:
        [T], detached; equal within a sequence.

    Raises:
        ValueError: ``cap`` is not positive, the tensors are not equally long, or ``offsets`` does
            not cut them.

    Source: sequence-level TIS, Liu, Li et al., "When speed kills stability: demystifying RL
    collapse from the training-inference mismatch", 2025.
    """
    _require_cap(cap)
    ratio_S = _bounded_exp(_sequence_log_ratio(train_logp_T, sampler_logp_T, offsets))
    return _to_tokens(ratio_S.clamp(max=cap), offsets, like=train_logp_T)


def sequence_masked_weights(
    train_logp_T: Tensor,
    sampler_logp_T: Tensor,
    offsets: Tensor,
    *,
    low: float,
    high: float,
    mean: Literal["geometric", "product"] = "geometric",
) -> Tensor:
    """Sequences whose ratio lies outside [low, high] are dropped as a whole.

    ``geometric``: the ratio is the geometric mean of q over the sequence's response tokens, which
    does not grow with its length, and the kept tokens have weight 1: as a weight the mean would be
    biased. ``product``: the ratio is the product, and it is the weight of the kept tokens.

    Args:
        train_logp_T: [T] the trainer's log-probabilities, nats.
        sampler_logp_T: [T] the sampler's, nats.
        offsets: [S + 1] int64, where the sequences begin and end.
        low: smallest ratio that is kept; for the geometric mean e.g. 0.999.
        high: largest ratio that is kept; for the geometric mean e.g. 1.002.
        mean: what the band is for.

    Returns:
        [T], detached; equal within a sequence. The dropped tokens stay in the loss denominator.

    Raises:
        ValueError: not 0 <= low <= 1 <= high, the tensors are not equally long, or ``offsets``
            does not cut them.

    Source: masked importance sampling of sequences and its geometric form, Liu, Li et al., "When
    speed kills stability", 2025.
    """
    _require_band(low, high)
    log_S = _sequence_log_ratio(train_logp_T, sampler_logp_T, offsets)
    if mean == "geometric":
        log_S = log_S / sequence_lengths(offsets).clamp(min=1)
    ratio_S = _bounded_exp(log_S)
    weight_S = torch.ones_like(ratio_S) if mean == "geometric" else ratio_S
    kept_S = (ratio_S >= low) & (ratio_S <= high)
    return _to_tokens(torch.where(kept_S, weight_S, 0.0), offsets, like=train_logp_T)


def vetoed_tokens(
    train_logp_T: Tensor, sampler_logp_T: Tensor, offsets: Tensor, *, threshold: float
) -> Tensor:
    """Tokens of the sequences in which any token has q < threshold.

    One token that the trainer holds for nearly impossible shows that the sampler went wrong there,
    and with it everything that it sampled afterwards.

    Args:
        train_logp_T: [T] the trainer's log-probabilities, nats.
        sampler_logp_T: [T] the sampler's, nats.
        offsets: [S + 1] int64, where the sequences begin and end.
        threshold: smallest ratio of a token that is tolerated, e.g. 1e-4.

    Returns:
        [T] bool; equal within a sequence.

    Raises:
        ValueError: not 0 < threshold < 1, the tensors are not equally long, or ``offsets`` does
            not cut them.

    Source: the veto of rejection sampling, Liu, Li et al., "When speed kills stability", 2025.
    """
    if not 0 < threshold < 1:
        raise ValueError(
            f"the veto's threshold is {threshold}: it bounds pi_train / pi_sampler from below, "
            "and engines that agree are at 1. Use a small positive number, e.g. 1e-4."
        )
    below_T = _log_ratio(train_logp_T, sampler_logp_T).exp() < threshold
    count_S = _sequence_sums(below_T, offsets)
    return _to_tokens(count_S > 0, offsets, like=below_T)


def _log_ratio(train_logp_T: Tensor, sampler_logp_T: Tensor) -> Tensor:
    require_equal_shapes({"train_logp_T": train_logp_T, "sampler_logp_T": sampler_logp_T})
    return train_logp_T.detach() - sampler_logp_T.detach()


def _bounded_exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _sequence_log_ratio(train_logp_T: Tensor, sampler_logp_T: Tensor, offsets: Tensor) -> Tensor:
    return _sequence_sums(_log_ratio(train_logp_T, sampler_logp_T), offsets)


def _sequence_sums(values_T: Tensor, offsets: Tensor) -> Tensor:
    """[S] float64. Sequence by sequence, so that none depends on what stands before it."""
    lengths_S = sequence_lengths(offsets)
    cuts = offsets.numel() > 0 and int(offsets[0]) == 0 and int(offsets[-1]) == len(values_T)
    if not cuts or bool((lengths_S < 0).any()):
        raise ValueError(
            f"the offsets {offsets.tolist()[:8]} do not cut {len(values_T)} tokens into sequences: "
            "they must ascend from 0 to the number of tokens. Take them from the same batch."
        )
    sequence_T = torch.arange(len(lengths_S)).repeat_interleave(lengths_S)
    sums_S = torch.zeros(len(lengths_S), dtype=torch.float64)
    return sums_S.index_add_(0, sequence_T, values_T.double())


def _to_tokens(values_S: Tensor, offsets: Tensor, *, like: Tensor) -> Tensor:
    return values_S.to(like.dtype).repeat_interleave(sequence_lengths(offsets))


def _require_cap(cap: float) -> None:
    if not cap > 0:
        raise ValueError(f"the cap of the weights is {cap}: it must be positive, e.g. 2.")


def _require_band(low: float, high: float) -> None:
    if not 0 <= low <= 1 <= high:
        raise ValueError(
            f"the band of kept ratios is [{low}, {high}]: it must contain 1, the ratio of engines "
            "that agree. Use e.g. [0.5, 5], or [0.999, 1.002] for a geometric mean."
        )
