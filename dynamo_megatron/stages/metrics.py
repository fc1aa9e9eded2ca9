"""What a step reports, as plain numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from dynamo_megatron.parallel.reduce import all_reduce_max, all_reduce_sum
from dynamo_megatron.protocols import MetricValue
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
    *,
    counts_here: bool,
    group: ProcessGroup,
) -> dict[str, float]:
    """Means over the step's response tokens, wherever they are owned.

    Args:
        batch: the step's batch.
        old: statistics of the policy that sampled.
        modulated: the factors.
        counts_here: this rank reports its tokens (one rank of those that own the same ones).
        group: all ranks.

    Collectives on ``group``: one SUM of 7 and one MAX of 1 float64; every rank must call.
    """
    owned = old.owned & counts_here
    gap = (old.stats.logp - batch.sampler_logp).abs()
    columns: tuple[Tensor, ...] = (
        torch.ones_like(gap),
        old.stats.entropy,
        gap,
        modulated.compensation > COMPENSATED_ABOVE,
        modulated.stabilization < DAMPED_BELOW,
        modulated.compensation,
        modulated.stabilization,
    )
    sums = torch.stack([column[owned].double().sum() for column in columns])
    gap_max = torch.cat([gap[owned], gap.new_zeros(1)]).max().double()[None]
    total = all_reduce_sum(sums, group=group)
    means = (total / total[0].clamp(min=1.0)).tolist()
    names = (
        "entropy/old_mean",
        "rollout/logp_gap_mean",
        "modulation/compensated_share",
        "modulation/damped_share",
        "modulation/compensation_mean",
        "modulation/stabilization_mean",
    )
    metrics: dict[str, float] = dict(zip(names, means[1:], strict=True))
    metrics["rollout/logp_gap_max"] = float(all_reduce_max(gap_max, group=group))
    return metrics


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
