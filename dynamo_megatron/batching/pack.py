"""From scored groups to one flat, ragged training batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dynamo_megatron.types import FinishReason, RolloutGroup, TrainBatch, ragged_offsets


def kept_rollouts(groups: Sequence[RolloutGroup], *, mask_truncated: bool) -> list[tuple[int, int]]:
    """(group, k) of the rollouts that train, in prompt order.

    Left out: rollouts whose verification failed (their reward is unknown) and, on request,
    truncated ones.
    """
    return [
        (g, k)
        for g, group in enumerate(groups)
        for k, (rollout, verdict) in enumerate(zip(group.rollouts, group.verdicts, strict=True))
        if verdict.valid and not (mask_truncated and rollout.finish_reason is FinishReason.LENGTH)
    ]


def pack(
    groups: Sequence[RolloutGroup],
    advantages: Sequence[Tensor],
    *,
    mask_truncated: bool = False,
) -> TrainBatch:
    """Lay the groups' rollouts out as one batch.

    Args:
        groups: P groups of any sizes.
        advantages: for each group a [n_i] float tensor, one advantage per rollout.
        mask_truncated: leave responses that ran into the token limit out of the loss.

    Returns:
        The batch; it may hold no sequence at all.
    """
    kept = kept_rollouts(groups, mask_truncated=mask_truncated)
    tokens: list[int] = []
    prompt_lengths: list[int] = []
    response_lengths: list[int] = []
    logprobs: list[float] = []
    for g, k in kept:
        prompt, rollout = groups[g].prompt, groups[g].rollouts[k]
        tokens.extend(prompt.token_ids)
        tokens.extend(rollout.token_ids)
        logprobs.extend(rollout.logprobs)
        prompt_lengths.append(len(prompt.token_ids))
        response_lengths.append(len(rollout.token_ids))
    lengths = torch.tensor(response_lengths, dtype=torch.int64)
    per_sequence = torch.tensor([float(advantages[g][k]) for g, k in kept], dtype=torch.float32)
    return TrainBatch(
        tokens=torch.tensor(tokens, dtype=torch.int64),
        token_offsets=ragged_offsets(
            [p + r for p, r in zip(prompt_lengths, response_lengths, strict=True)]
        ),
        prompt_lengths=torch.tensor(prompt_lengths, dtype=torch.int64),
        response_offsets=ragged_offsets(response_lengths),
        group_index=torch.tensor([g for g, _ in kept], dtype=torch.int64),
        sampler_logp=torch.tensor(logprobs, dtype=torch.float32),
        advantages=per_sequence.repeat_interleave(lengths),
    )
