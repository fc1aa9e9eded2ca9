"""How far trainer and sampler disagree over a step, from sums alone.

Everything but the largest gap adds up over tokens, rows and ranks, quantiles included: they are
read off a histogram of log q, q = pi_train / pi_sampler, of a fixed number of bins. So a step of
any size needs one reduction of the same few kilobytes.

Resolution: the bins are evenly spaced in log |log q| from 1e-9 to 20, mirrored for q < 1, with one
for log q = 0 exactly. A quantile is the middle of its bin, so that |log q| is off by at most 2 %
(by some 1e-9 below the smallest bin; beyond 20 it counts as 20). Where q is within 10 % of 1, that
is within 0.2 % of q.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dynamo_megatron.algo._checks import require_equal_shapes
from dynamo_megatron.algo.policy_loss import MAX_LOG_RATIO

SUMMARY_QUANTILES = (0.01, 0.5, 0.99)

SMALLEST_LOG_RATIO = 1e-9
"""Smaller |log q| but zero are in the innermost bins; float32 tells 6e-8 apart at logp -1."""
RESOLUTION = 0.02
"""Largest relative error of |log q| in a quantile."""
_LOG_WIDTH = 2 * math.log1p(RESOLUTION)
_ONE_SIDE = math.ceil(math.log(MAX_LOG_RATIO / SMALLEST_LOG_RATIO) / _LOG_WIDTH)
_PLAIN_SUMS = 4
NUM_MISMATCH_SUMS = _PLAIN_SUMS + 2 * _ONE_SIDE + 1
"""Length of what `mismatch_sums` returns: tokens, |log q|, q, q^2, then the histogram."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MismatchSummary:
    """How far trainer and sampler disagree over a set of tokens.

    Attributes:
        num_tokens: tokens in the set. All else is 0 (the ratios 1) when there are none.
        mean_abs_delta: mean |logp_train - logp_sampler|, nats.
        ratio_quantiles: pi_train / pi_sampler at `SUMMARY_QUANTILES`, nearest rank.
        effective_sample_size: (sum q)^2 / sum q^2 over the number of tokens, in (0, 1].
    """

    num_tokens: int
    mean_abs_delta: float
    ratio_quantiles: tuple[float, ...]
    effective_sample_size: float


def mismatch_sums(train_logp_T: Tensor, sampler_logp_T: Tensor) -> Tensor:
    """What `mismatch_summary` needs to know of some tokens; the sums of two sets add up.

    Args:
        train_logp_T: [T] the trainer's log-probabilities, nats.
        sampler_logp_T: [T] the sampler's, nats.

    Returns:
        [NUM_MISMATCH_SUMS] float64, detached.

    Raises:
        ValueError: the tensors are not equally long.
    """
    require_equal_shapes({"train_logp_T": train_logp_T, "sampler_logp_T": sampler_logp_T})
    delta_T = train_logp_T.detach().double() - sampler_logp_T.detach().double()
    ratio_T = delta_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    columns = (torch.ones_like(delta_T), delta_T.abs(), ratio_T, ratio_T.square())
    sums = torch.stack([column.sum() for column in columns])
    counts = torch.bincount(_bins(delta_T), minlength=2 * _ONE_SIDE + 1)
    return torch.cat([sums, counts.double()])


def mismatch_summary(sums: Tensor) -> MismatchSummary:
    """Summarise added `mismatch_sums`.

    Args:
        sums: [NUM_MISMATCH_SUMS] float64.
    """
    count, abs_delta, ratio, ratio_squared = sums[:_PLAIN_SUMS].tolist()
    if count == 0:
        return MismatchSummary(
            num_tokens=0,
            mean_abs_delta=0.0,
            ratio_quantiles=(1.0,) * len(SUMMARY_QUANTILES),
            effective_sample_size=0.0,
        )
    upto = sums[_PLAIN_SUMS:].cumsum(0)
    ranks = torch.tensor([round(q * (count - 1)) for q in SUMMARY_QUANTILES], dtype=torch.float64)
    # The bin of the token at a rank (from 0) is the first that more tokens than that lie up to.
    bins = torch.searchsorted(upto, ranks, right=True).tolist()
    return MismatchSummary(
        num_tokens=int(count),
        mean_abs_delta=abs_delta / count,
        ratio_quantiles=tuple(math.exp(_middle(place)) for place in bins),
        effective_sample_size=ratio * ratio / ratio_squared / count,
    )


def _bins(log_ratio_T: Tensor) -> Tensor:
    """[T] int64: each token's bin, ascending in log q; exact zeros are in the middle one."""
    # A ratio that is not a number has no place; beside it the mean gap is NaN and says so.
    log_ratio_T = log_ratio_T.nan_to_num(nan=MAX_LOG_RATIO)
    size_T = log_ratio_T.abs().clamp(SMALLEST_LOG_RATIO, MAX_LOG_RATIO)
    steps_T = ((size_T / SMALLEST_LOG_RATIO).log() / _LOG_WIDTH).floor().clamp(max=_ONE_SIDE - 1)
    return (_ONE_SIDE + log_ratio_T.sign() * (steps_T + 1)).long()


def _middle(place: int) -> float:
    """Log q in the (logarithmic) middle of a bin."""
    steps = place - _ONE_SIDE
    if steps == 0:
        return 0.0
    size = SMALLEST_LOG_RATIO * math.exp((abs(steps) - 0.5) * _LOG_WIDTH)
    return math.copysign(min(size, MAX_LOG_RATIO), steps)
