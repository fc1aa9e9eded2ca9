"""Sampler and trainer are the same policy: shown before the first update and after every sync."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed import ProcessGroup

from dynamo_megatron.batching.pack import kept_rollouts, pack
from dynamo_megatron.batching.split import RowLimits, plan_mini_batches
from dynamo_megatron.parallel.reduce import raise_together
from dynamo_megatron.protocols import PolicyActor
from dynamo_megatron.rollout.errors import RolloutError, SamplerMismatchError
from dynamo_megatron.rollout.gate import check_sampler_agreement
from dynamo_megatron.stages.sampling import RolloutTier
from dynamo_megatron.types import OwnedStats, Prompt, RolloutGroup, TrainBatch

NUM_PROBES = 2
"""Prompts of a probe. Always the same ones, so that a cache that was not reset shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """How far apart the two may be, and what is said of it.

    Attributes:
        nats: largest |sampler logp - trainer logp| of a token.
        phase: what was just done, for the message.
        mask_truncated: truncated responses are not in the batch.
    """

    nats: float
    phase: str
    mask_truncated: bool = False


def require_agreement_of_samples(
    batch: TrainBatch,
    trainer: OwnedStats,
    groups: Sequence[RolloutGroup],
    tolerance: Tolerance,
    *,
    step: int,
    group: ProcessGroup,
) -> None:
    """Compare the logprobs of the sampled tokens, each rank those that it owns. Collective.

    Raises:
        SamplerMismatchError: on a rank that found one, ``PeerError`` on the others.
    """
    kept = kept_rollouts(groups, mask_truncated=tolerance.mask_truncated)
    failure = None
    try:
        check_sampler_agreement(
            trainer.stats.logp,
            batch.sampler_logp,
            response_offsets=batch.response_offsets,
            prompt_ids=[groups[g].prompt.id for g, _ in kept],
            rollout_indices=[k for _, k in kept],
            tolerance=tolerance.nats,
            step=step,
            compared_T=trainer.owned,
        )
    except SamplerMismatchError as error:
        failure = SamplerMismatchError(f"{tolerance.phase}: {error}")
    raise_together(failure, phase=tolerance.phase, group=group)


def check_probe(
    tier: RolloutTier,
    policy: PolicyActor,
    prompts: Sequence[Prompt],
    limits: RowLimits,
    tolerance: Tolerance,
    *,
    version: int,
) -> None:
    """Every replica holds the trainer's weights: shown by a few tokens that each samples.

    Costs a short response and a forward pass over it. An engine that cannot go wrong here has no
    probe. Collective.

    Args:
        tier: whose engine was just given weights.
        policy: with the same weights.
        prompts: of the probe.
        limits: of a packed row.
        tolerance: of the comparison.
        version: of the weights.

    Raises:
        RolloutError: a replica sampled from another version.
        SamplerMismatchError: a replica's logprobs are not the trainer's.
    """
    groups = tier.probe(prompts)
    if not groups:
        return
    found = {rollout.weight_version for group in groups for rollout in group.rollouts}
    if found != {version}:
        raise RolloutError(
            f"the weights of version {version} were sent, and the engine samples from "
            f"{sorted(found)}."
        )
    batch = pack(groups, [torch.zeros(len(group.rollouts)) for group in groups])
    plan = plan_mini_batches(
        batch,
        num_groups=len(groups),
        groups_per_mini_batch=len(groups),
        data_parallel=policy.data_size,
        limits=limits,
    )
    trainer = policy.token_stats(batch, plan)
    require_agreement_of_samples(batch, trainer, groups, tolerance, step=version, group=tier.group)
