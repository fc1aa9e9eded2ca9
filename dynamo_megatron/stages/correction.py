"""Mismatch of trainer and sampler: the old policy of the update, and weights on its loss.

Three policies have a part in a step: the sampler's, the trainer's before the update (same weights
unless the rollouts are a step old, other kernels) and the one being trained. The clipped ratio is
between the last two, and a weight on the loss corrects the step from the first to the second
(decoupled). With ``old_logp=sampler`` (bypass) the clipped ratio spans all three, no weight is left
to apply, and ``train/approx_kl``, ``train/ratio_max`` and ``train/clip_fraction`` hold the mismatch
too. Bypass usually saves the trainer's pass over the old policy; here that pass always runs, for
modulation, gate and gap, and so modulation with ``stats=old`` is as before, at ratio 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dynamo_megatron.algo.corrections import (
    masked_weights,
    sequence_masked_weights,
    sequence_weights,
    truncated_weights,
    vetoed_tokens,
)
from dynamo_megatron.config import AlgorithmConfig, CorrectionConfig
from dynamo_megatron.stages.modulation import ModulatedBatch
from dynamo_megatron.types import OwnedStats, TokenInputs, TrainBatch, sequence_lengths

CAPPED = ("truncated", "sequence")
"""Kinds whose weights have a largest value."""


def corrected_inputs(
    batch: TrainBatch,
    old: OwnedStats,
    modulated: ModulatedBatch,
    reference_logp: Tensor | None,
    config: AlgorithmConfig,
) -> TokenInputs:
    """What the update needs for each token, with the configured old policy and correction.

    No collectives: a sequence is on one data-parallel rank, and so are all its ratios. With
    ``kind=none`` and ``old_logp=trainer`` the numbers are those of a run without any correction.

    Args:
        batch: the step's batch, for the sampler's log-probabilities.
        old: the trainer's statistics before the update.
        modulated: the batch with its final advantages.
        reference_logp: [T] of the reference policy, or None without a penalty.
        config: correction and old policy.
    """
    return TokenInputs(
        advantages=modulated.batch.advantages,
        old_logp=old.stats.logp if config.old_logp == "trainer" else batch.sampler_logp,
        reference_logp=reference_logp,
        loss_weights=loss_weights(batch, old, config.correction),
    )


def loss_weights(batch: TrainBatch, old: OwnedStats, config: CorrectionConfig) -> Tensor | None:
    """[T] float32 weights, NaN where another rank owns the token; None without a correction."""
    if config.kind == "none":
        return None
    train, sampler, offsets = old.stats.logp, batch.sampler_logp, batch.response_offsets
    owned_S = _sums(old.owned, offsets)
    assert bool(((owned_S == 0) | (owned_S == sequence_lengths(offsets))).all()), (
        "a sequence's tokens lie on several ranks: its ratio would need a reduction over them"
    )
    low, high = config.band
    match config.kind:
        case "truncated":
            weights = truncated_weights(train, sampler, cap=config.cap_or_default)
        case "masked":
            weights = masked_weights(train, sampler, low=low, high=high)
        case "sequence":
            weights = sequence_weights(train, sampler, offsets, cap=config.cap_or_default)
        case "sequence_masked":
            weights = sequence_masked_weights(
                train, sampler, offsets, low=low, high=high, mean=config.sequence_ratio
            )
    if config.veto is not None:
        vetoed = vetoed_tokens(train, sampler, offsets, threshold=config.veto)
        weights = torch.where(vetoed, 0.0, weights)
    # Statistics of other ranks' tokens are not at hand: a weight of them must not go unnoticed.
    return torch.where(old.owned, weights, torch.nan)


def correction_sums(
    weights: Tensor | None, batch: TrainBatch, counted: Tensor, config: CorrectionConfig
) -> Tensor:
    """Sums over this rank's tokens for `correction_metrics`; they add up over the ranks.

    Args:
        weights: [T] from `loss_weights`.
        batch: the step's batch.
        counted: [T] bool, owned tokens that this rank reports.
        config: of the correction.

    Returns:
        [4] float64: weights, tokens at the cap, dropped tokens, sequences without any token left.
        [0] without a correction.
    """
    if weights is None:
        return torch.zeros(0, dtype=torch.float64)
    at_cap = weights == weights.new_tensor(config.cap_or_default)
    clipped = at_cap & counted if config.kind in CAPPED else torch.zeros_like(counted)
    dropped = (weights == 0) & counted
    lengths = sequence_lengths(batch.response_offsets)
    emptied = (_sums(dropped, batch.response_offsets) == lengths) & (lengths > 0)
    columns = (weights[counted], clipped, dropped, emptied)
    return torch.stack([column.double().sum() for column in columns])


def correction_metrics(sums: Tensor, num_tokens: int) -> dict[str, float]:
    """What the correction did to a step, from `correction_sums` over all ranks.

    Args:
        sums: [4], or [0] without a correction, which has no metrics.
        num_tokens: response tokens of the step.
    """
    if sums.numel() == 0:
        return {}
    weights, clipped, dropped, emptied = sums.tolist()
    return {
        "correction/weight_mean": weights / max(num_tokens, 1),
        "correction/clipped_share": clipped / max(num_tokens, 1),
        "correction/dropped_share": dropped / max(num_tokens, 1),
        "correction/dropped_sequences": emptied,
    }


def _sums(flags: Tensor, offsets: Tensor) -> Tensor:
    """[S] int64, how many tokens of each sequence have the flag."""
    upto = torch.cat([torch.zeros(1, dtype=torch.int64), flags.long().cumsum(0)])
    return upto[offsets[1:]] - upto[offsets[:-1]]
