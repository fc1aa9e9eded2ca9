"""Held-out pass@1 during a run, by sampling from the same engine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from dynamo_megatron.algo.passk import mean_pass_at_1
from dynamo_megatron.types import GroupSizes, Prompt, RolloutGroup

SAMPLING_STEP = 0
"""Enters the seeds in place of the step, so that two evaluations differ by the policy alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldoutResult:
    """pass@1 over the held-out problems with its 95 % interval.

    Attributes:
        step: steps the policy was trained.
        num_problems: problems asked.
        pass_at_1: mean over problems of the share of right samples.
        low, high: 95 % interval.
        format_rate: share of samples with an answer in the expected format.
        failures: verifications that failed; they are in no rate.
    """

    step: int
    num_problems: int
    pass_at_1: float
    low: float
    high: float
    format_rate: float
    failures: int

    def metrics(self) -> dict[str, float]:
        """Under the names of ``metrics.jsonl``."""
        return {
            "eval/pass@1": self.pass_at_1,
            "eval/pass@1_low": self.low,
            "eval/pass@1_high": self.high,
            "eval/format_rate": self.format_rate,
            "eval/num": float(self.num_problems),
            "eval/failures": float(self.failures),
        }


def equal_sizes(prompts: Sequence[Prompt], samples: int) -> GroupSizes:
    """The same number of samples for each problem."""
    return GroupSizes(
        prompt_ids=tuple(prompt.id for prompt in prompts), sizes=(samples,) * len(prompts)
    )


def heldout_result(groups: Sequence[RolloutGroup], *, step: int, threshold: float) -> HeldoutResult:
    """Summarise scored samples; problems without a verified sample are left out."""
    verdicts = [v for group in groups for v in group.verdicts]
    valid = [v for v in verdicts if v.valid]
    counts = [[v.reward >= threshold for v in group.verdicts if v.valid] for group in groups]
    counts = [passed for passed in counts if passed]
    if not counts:
        return HeldoutResult(
            step=step,
            num_problems=0,
            pass_at_1=0.0,
            low=0.0,
            high=1.0,
            format_rate=0.0,
            failures=len(verdicts),
        )
    interval = mean_pass_at_1(
        torch.tensor([sum(passed) for passed in counts]),
        torch.tensor([len(passed) for passed in counts]),
    )
    return HeldoutResult(
        step=step,
        num_problems=len(counts),
        pass_at_1=interval.mean,
        low=interval.low,
        high=interval.high,
        format_rate=sum(v.formatted for v in valid) / len(valid),
        failures=len(verdicts) - len(valid),
    )


def write_samples(path: Path, groups: Sequence[RolloutGroup]) -> None:
    """Every sample with its verdict as JSON lines, for reading."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as lines:
        for group in groups:
            for rollout, verdict in zip(group.rollouts, group.verdicts, strict=True):
                row = {
                    "id": group.prompt.id,
                    "source": group.prompt.source,
                    "problem": group.prompt.text,
                    "answer": group.prompt.answer,
                    "response": rollout.text,
                    "extracted": verdict.extracted,
                    "status": verdict.status,
                    "reward": verdict.reward,
                    "finish_reason": rollout.finish_reason,
                }
                lines.write(json.dumps(row, ensure_ascii=False) + "\n")
