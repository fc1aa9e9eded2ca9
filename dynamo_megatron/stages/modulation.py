"""Token level: DynaMO's factors folded into the advantages, with a declared normaliser set.

The extremes that normalise entropy and entropy change span a whole mini-batch (or step), never a
micro-batch: otherwise the same token would get another weight when only the memory budget changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from dynamo_megatron.algo.modulation import (
    StatRange,
    entropy_change,
    modulate,
    sequence_mean_change,
    stat_range,
)
from dynamo_megatron.config import ClipConfig, ModulationConfig
from dynamo_megatron.parallel.reduce import all_reduce_max
from dynamo_megatron.types import MiniBatch, OwnedStats, TokenStats, TrainBatch, sequence_lengths


@dataclass(frozen=True, slots=True, kw_only=True)
class ModulatedBatch:
    """The batch with final advantages, and what was done to them.

    Attributes:
        batch: advantages modulated where this rank owns the token and ``stats`` is ``old``.
        compensation: [T] float64 factor.
        stabilization: [T] float64 factor.
        ranges: normalisers of each mini-batch.
    """

    batch: TrainBatch
    compensation: Tensor
    stabilization: Tensor
    ranges: tuple[StatRange, ...]


def modulate_batch(
    batch: TrainBatch,
    plan: Sequence[MiniBatch],
    old: OwnedStats,
    config: ModulationConfig,
    clip: ClipConfig,
    *,
    group: ProcessGroup,
) -> ModulatedBatch:
    """Normalisers over the declared set, and with ``stats=old`` the modulated advantages.

    Only tokens that this rank owns are meaningful in the result; nobody else reads the others.

    Collectives on ``group``: one MAX of [M, 3] float64; every rank must call.
    """
    change = _old_change(batch, old, config, clip)
    ranges = _ranges(batch, plan, old, change, config, group)
    ones = torch.ones_like(batch.advantages, dtype=torch.float64)
    if config.stats == "current" or not _active(config):
        return ModulatedBatch(batch=batch, compensation=ones, stabilization=ones, ranges=ranges)
    advantages = batch.advantages.clone()
    compensation, stabilization = ones, ones.clone()
    for mini_batch, extremes in zip(plan, ranges, strict=True):
        index = (_token_mask(batch, mini_batch) & old.owned).nonzero()[:, 0]
        result = _modulate(
            batch.advantages[index], old.stats.entropy[index], change[index], extremes, config
        )
        advantages[index] = result.advantages
        compensation[index] = result.compensation
        stabilization[index] = result.stabilization
    return ModulatedBatch(
        batch=replace(batch, advantages=advantages),
        compensation=compensation,
        stabilization=stabilization,
        ranges=ranges,
    )


def current_modulation(
    ranges: Sequence[StatRange], config: ModulationConfig, clip: ClipConfig
) -> Callable[[MiniBatch], Callable[[Tensor, TokenStats, Tensor], Tensor]] | None:
    """With ``stats=current``: modulation by the training forward's statistics; else None.

    The normalisers are still those of the old policy, which are known before the first backward
    pass; compensation is clamped to its range, and the sigmoid saturates.
    """
    if config.stats != "current" or not _active(config):
        return None

    def for_mini_batch(mini_batch: MiniBatch) -> Callable[[Tensor, TokenStats, Tensor], Tensor]:
        extremes = ranges[mini_batch.index]

        def apply(advantages: Tensor, stats: TokenStats, ratio: Tensor) -> Tensor:
            change = entropy_change(
                advantages, ratio, stats.logp, stats.lam, stats.q, **_clip(clip)
            )
            return _modulate(advantages, stats.entropy, change, extremes, config).advantages

        return apply

    return for_mini_batch


def _active(config: ModulationConfig) -> bool:
    return config.gradient_compensation or config.stabilization


def _modulate(advantages, entropy, change, extremes, config: ModulationConfig):
    return modulate(
        advantages,
        entropy,
        change,
        extremes,
        gradient_compensation=config.gradient_compensation,
        stabilization=config.stabilization,
        alpha=config.alpha,
        lam_min=config.lam_min,
        gamma=config.gamma,
        tau=config.tau,
    )


def _clip(clip: ClipConfig) -> dict[str, Any]:
    return {"clip_low": clip.low, "clip_high": clip.high, "dual_clip": clip.dual}


def _old_change(
    batch: TrainBatch, old: OwnedStats, config: ModulationConfig, clip: ClipConfig
) -> Tensor:
    """|first-order entropy change| at the old policy, where the ratio is 1."""
    ratio = torch.ones_like(batch.advantages)
    stats = old.stats
    if config.change == "exact":
        return entropy_change(
            batch.advantages, ratio, stats.logp, stats.lam, stats.q, **_clip(clip)
        )
    sequence = torch.arange(batch.num_sequences).repeat_interleave(
        sequence_lengths(batch.response_offsets)
    )
    return sequence_mean_change(
        batch.advantages, ratio, stats.logp, stats.lam, sequence, old.owned, **_clip(clip)
    )


def _ranges(
    batch: TrainBatch,
    plan: Sequence[MiniBatch],
    old: OwnedStats,
    change: Tensor,
    config: ModulationConfig,
    group: ProcessGroup,
) -> tuple[StatRange, ...]:
    local = [
        stat_range(old.stats.entropy, change, _token_mask(batch, mini_batch) & old.owned)
        for mini_batch in plan
    ]
    # Maxima only, so that one collective serves all three; exact in any order of the ranks.
    table = torch.tensor(
        [(-r.entropy_min, r.entropy_max, r.change_max) for r in local], dtype=torch.float64
    ).reshape(-1, 3)
    merged = all_reduce_max(table, group=group)
    ranges = [StatRange(-low, high, change) for low, high, change in merged.tolist()]
    if config.scope == "step" and ranges:
        whole = StatRange.empty()
        for extremes in ranges:
            whole = whole.merged(extremes)
        ranges = [whole] * len(ranges)
    return tuple(ranges)


def _token_mask(batch: TrainBatch, mini_batch: MiniBatch) -> Tensor:
    member = torch.zeros(batch.num_sequences, dtype=torch.bool)
    member[list(mini_batch.sequences)] = True
    return member.repeat_interleave(sequence_lengths(batch.response_offsets))
