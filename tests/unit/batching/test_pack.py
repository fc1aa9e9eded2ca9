"""Scored groups laid out as one batch."""

from __future__ import annotations

import torch

from dynamo_megatron.batching.pack import kept_rollouts, pack
from dynamo_megatron.types import (
    FinishReason,
    Prompt,
    Rollout,
    RolloutGroup,
    Verdict,
    VerdictStatus,
)


def group(name: str, prompt: list[int], answers: list[list[int]], **changes) -> RolloutGroup:
    statuses = changes.get("statuses", [VerdictStatus.OK] * len(answers))
    reasons = changes.get("reasons", [FinishReason.STOP] * len(answers))
    rollouts = tuple(
        Rollout(
            prompt_id=name,
            index=k,
            token_ids=tuple(ids),
            logprobs=tuple(-float(i) for i in ids),
            finish_reason=reason,
            weight_version=0,
            seed=k,
            text="",
        )
        for k, (ids, reason) in enumerate(zip(answers, reasons, strict=True))
    )
    return RolloutGroup(
        prompt=Prompt(id=name, text="", token_ids=tuple(prompt), answer="", source="s"),
        rollouts=rollouts,
        verdicts=tuple(Verdict(reward=1.0, status=status) for status in statuses),
    )


def test_ragged_groups_by_hand():
    groups = [group("a", [1, 2], [[3], [4, 5]]), group("b", [6], [[7, 8, 9]])]
    batch = pack(groups, (torch.tensor([0.5, -0.5]), torch.tensor([2.0])))
    assert batch.tokens.tolist() == [1, 2, 3, 1, 2, 4, 5, 6, 7, 8, 9]
    assert batch.token_offsets.tolist() == [0, 3, 7, 11]
    assert batch.prompt_lengths.tolist() == [2, 2, 1]
    assert batch.response_offsets.tolist() == [0, 1, 3, 6]
    assert batch.group_index.tolist() == [0, 0, 1]
    assert batch.sampler_logp.tolist() == [-3.0, -4.0, -5.0, -7.0, -8.0, -9.0]
    assert batch.advantages.tolist() == [0.5, -0.5, -0.5, 2.0, 2.0, 2.0]
    assert (batch.num_sequences, batch.num_response_tokens) == (3, 6)


def test_failed_verifications_do_not_train():
    statuses = [VerdictStatus.TIMEOUT, VerdictStatus.OK]
    groups = [group("a", [1], [[2, 3], [4]], statuses=statuses)]
    batch = pack(groups, (torch.tensor([0.0, 1.0]),))
    assert batch.tokens.tolist() == [1, 4]
    assert batch.advantages.tolist() == [1.0]


def test_truncated_responses_train_unless_masked():
    groups = [group("a", [1], [[2], [4]], reasons=[FinishReason.LENGTH, FinishReason.STOP])]
    assert kept_rollouts(groups, mask_truncated=False) == [(0, 0), (0, 1)]
    assert kept_rollouts(groups, mask_truncated=True) == [(0, 1)]


def test_nothing_left_is_an_empty_batch():
    groups = [group("a", [1], [[2]], statuses=[VerdictStatus.CRASH])]
    batch = pack(groups, (torch.tensor([0.0]),))
    assert (batch.num_sequences, batch.num_response_tokens) == (0, 0)
