"""From merged partial statistics to what the caller wants, and to what the backward needs.

With ``mu = s1 / s0``, ``l = ln s0`` and ``d_y = (z_y - m) / tau``::

    log pi(y) = d_y - l        H = l - mu        Lambda_y = log pi(y) + H = d_y - mu
    sum pi^2  = s2 / s0^2      Q = sum pi^2 (log pi + H) = (s3 - mu s2) / s0^2

The last two use ``log pi_a + H = d_a - mu``: the logarithm of s0 cancels, so Lambda and Q stay
accurate where the distribution is a single peak and ``l`` is lost in rounding.

Gradient, with upstream g of log pi(y) and k of H::

    dL/dz_a = 1/tau [ g 1{a = y} - pi_a (g + k (d_a - mu)) ]

Source: the first-order entropy change of DynaMO, arXiv:2602.19208 (its expected term is Q), and
arXiv:2602.03392, theorem 3.3.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dynamo_megatron.kernels.shard import S0, S1, S2, S3, ZY, M, finite_max, merge_partials
from dynamo_megatron.types import TokenStats


@dataclass(frozen=True, slots=True)
class RowState:
    """What the backward needs of each token besides the logits; [T] each.

    Attributes:
        m: float32, maximum of the raw logits over the whole vocabulary, finite.
        log_s0: float32, ln sum e^((z - m) / tau).
        mu: float32, E_pi[(z - m) / tau].
    """

    m: Tensor
    log_s0: Tensor
    mu: Tensor


def finish(parts_R6T: Tensor, targets_T: Tensor, inv_T: Tensor) -> tuple[TokenStats, RowState]:
    """Statistics and backward state from the parts of the vocabulary.

    Args:
        parts_R6T: [R, 6, T] partial statistics ([R, 4, T] without Q).
        targets_T: [T] int64; where negative, ``logp`` and ``lam`` are 0.
        inv_T: [T] float64, 1 / temperature.

    Returns:
        `TokenStats` in float32 (NaN for ``sum_pi2`` and ``q`` where they were not summed) and the
        `RowState`.
    """
    merged_6T = merge_partials(parts_R6T, inv_T)
    m, s0, s1 = finite_max(merged_6T[M]), merged_6T[S0], merged_6T[S1]
    log_s0, mu = s0.log(), s1 / s0
    d_y = (merged_6T[ZY] - m) * inv_T
    if merged_6T.shape[0] == 6:
        s0_sq = s0 * s0
        sum_pi2 = merged_6T[S2] / s0_sq
        q = (merged_6T[S3] - mu * merged_6T[S2]) / s0_sq
    else:
        sum_pi2 = q = torch.full_like(m, float("nan"))
    ignored_T = targets_T < 0
    stats = TokenStats(
        logp=(d_y - log_s0).masked_fill(ignored_T, 0.0).float(),
        entropy=(log_s0 - mu).float(),
        lam=(d_y - mu).masked_fill(ignored_T, 0.0).float(),
        sum_pi2=sum_pi2.float(),
        q=q.float(),
    )
    return stats, RowState(m.float(), log_s0.float(), mu.float())
