"""What a step reports, as plain numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from dynamo_megatron.algo.mismatch import SUMMARY_QUANTILES, mismatch_summary, mismatch_sums
from dynamo_megatron.config import CorrectionConfig
from dynamo_megatron.parallel.reduce import all_reduce_max, all_reduce_sum
from dynamo_megatron.protocols import MetricValue
from dynamo_megatron.stages.correction import correction_metrics, correction_sums
from dynamo_megatron.stages.modulation import ModulatedBatch
from dynamo_megatron.types import (
    Counters,
    FinishReason,
    GroupSizes,
    OwnedStats,
    RolloutGroup,
    TrainBatch,
    UpdateStats,
)

DAMPED_BELOW = 0.99
"""A token counts as damped when its stabilisation factor is under this."""
COMPENSATED_ABOVE = 1.01
"""A token counts as compensated when its compensation factor is over this."""


def rollout_metrics(
    groups: Sequence[RolloutGroup], sizes: GroupSizes, *, threshold: float
) -> dict[str, MetricValue]:
    """Rewards, lengths and group sizes of a step, over all and per source.

    ``reward/*`` are means over verified rollouts; failures are counted apart.
    """
    pairs = [
        (group.prompt.source, rollout, verdict)
        for group in groups
        for rollout, verdict in zip(group.rollouts, group.verdicts, strict=True)
    ]
    valid = [(source, verdict) for source, _, verdict in pairs if verdict.valid]
    lengths = [len(rollout.token_ids) for _, rollout, _ in pairs]
    counts = Counter(sizes.sizes)
    metrics: dict[str, MetricValue] = {
        "rollout/num": len(pairs),
        "rollout/tokens": sum(lengths),
        "rollout/length_mean": _mean(lengths),
        "rollout/truncated": count_truncated(groups),
        "reward/failures": len(pairs) - len(valid),
        "reward/mean": _mean([v.reward for _, v in valid]),
        "reward/pass_rate": _mean([v.reward >= threshold for _, v in valid]),
        "reward/format_rate": _mean([v.formatted for _, v in valid]),
        "allocation/size_min": min(sizes.sizes),
        "allocation/size_max": max(sizes.sizes),
        "allocation/size_mean": _mean(sizes.sizes),
        "allocation/nonuniform": float(max(sizes.sizes) > min(sizes.sizes)),
        "allocation/hist": {str(size): counts[size] for size in sorted(counts)},
    }
    for source in sorted({source for source, _ in valid}):
        metrics[f"reward/{source}/mean"] = _mean([v.reward for s, v in valid if s == source])
    return metrics


def count_truncated(groups: Sequence[RolloutGroup]) -> int:
    """Responses that ran into the token limit."""
    return sum(r.finish_reason is FinishReason.LENGTH for group in groups for r in group.rollouts)


def token_metrics(
    batch: TrainBatch,
    old: OwnedStats,
    modulated: ModulatedBatch,
    weights: Tensor | None,
    correction: CorrectionConfig,
    *,
    counts_here: bool,
    group: ProcessGroup,
) -> dict[str, float]:
    """Means and quantiles over the step's response tokens, wherever they are owned.

    ``rollout/ratio_*`` are quantiles of the trainer's probability over the sampler's, from a
    histogram: see ``algo.mismatch`` for its resolution.

    Args:
        batch: the step's batch.
        old: the trainer's statistics before the update.
        modulated: the factors.
        weights: [T] loss weights against the mismatch, or None without a correction.
        correction: what made them.
        counts_here: this rank reports its tokens (one rank of those that own the same ones).
        group: all ranks.

    Collectives on ``group``: one SUM of 1208 (1212 with a correction) and one MAX of 1
    float64, whatever the number of tokens; every rank must call.
    """
    owned = old.owned & counts_here
    train_logp, sampler_logp = old.stats.logp[owned], batch.sampler_logp[owned]
    columns = {
        "entropy/old_mean": old.stats.entropy,
        "modulation/compensated_share": modulated.compensation > COMPENSATED_ABOVE,
        "modulation/damped_share": modulated.stabilization < DAMPED_BELOW,
        "modulation/compensation_mean": modulated.compensation,
        "modulation/stabilization_mean": modulated.stabilization,
    }
    parts = [
        torch.stack([column[owned].double().sum() for column in columns.values()]),
        mismatch_sums(train_logp, sampler_logp),
        correction_sums(weights, batch, owned, correction),
    ]
    gap_max = torch.cat([(train_logp - sampler_logp).abs(), train_logp.new_zeros(1)]).max()
    total = all_reduce_sum(torch.cat(parts), group=group)
    means, mismatch, corrected = total.split([part.numel() for part in parts])
    summary = mismatch_summary(mismatch)
    means = (means / max(summary.num_tokens, 1)).tolist()
    metrics: dict[str, float] = dict(zip(columns, means, strict=True))
    metrics["rollout/logp_gap_mean"] = summary.mean_abs_delta
    metrics["rollout/logp_gap_max"] = float(all_reduce_max(gap_max.double()[None], group=group))
    for quantile, ratio in zip(SUMMARY_QUANTILES, summary.ratio_quantiles, strict=True):
        metrics[f"rollout/ratio_q{round(100 * quantile):02d}"] = ratio
    metrics["rollout/effective_sample_size"] = summary.effective_sample_size
    return metrics | correction_metrics(corrected, summary.num_tokens)


def update_metrics(updates: Sequence[UpdateStats]) -> dict[str, float]:
    """Means over the step's optimizer steps, weighted by tokens where they are token means."""
    if not updates:
        return {"train/skipped": 0.0}
    tokens = [u.num_tokens for u in updates]
    metrics = {
        f"train/{name}": _weighted([getattr(u, name) for u in updates], tokens)
        for name in ("loss", "entropy", "clip_fraction", "approx_kl", "reference_kl")
    }
    metrics["train/ratio_max"] = max(u.ratio_max for u in updates)
    metrics["train/grad_norm"] = _mean([u.grad_norm for u in updates])
    metrics["train/lr"] = updates[-1].learning_rate
    metrics["train/skipped"] = float(sum(u.skipped for u in updates))
    return metrics


def step_counters(groups: Sequence[RolloutGroup], updates: Sequence[UpdateStats]) -> Counters:
    """What this step left out or lost."""
    return Counters(
        truncated=count_truncated(groups),
        verifier_failures=sum(not v.valid for group in groups for v in group.verdicts),
        skipped_updates=sum(u.skipped for u in updates),
        skipped_steps=int(not updates),
    )


def _mean(values: Sequence[float]) -> float:
    return float(sum(values)) / len(values) if values else 0.0


def _weighted(values: Sequence[float], weights: Sequence[int]) -> float:
    total = sum(v * w for v, w in zip(values, weights, strict=True))
    return total / max(sum(weights), 1)
