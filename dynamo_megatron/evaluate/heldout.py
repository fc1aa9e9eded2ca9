"""Held-out pass@1 during a run, by sampling from the same engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from dynamo_megatron.algo.passk import mean_pass_at_1
from dynamo_megatron.evaluate.samples import samples_of
from dynamo_megatron.evaluate.summary import tallies
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
    """Summarise scored samples; problems without a verified sample are left out.

    The interval is Wilson's, which needs no resampling: every rank computes it at every evaluation.
    """
    samples = samples_of(groups)
    counted = tallies(samples, right_from=threshold)
    verified = [tally for tally in counted if tally.valid]
    failures = sum(tally.failed for tally in counted)
    if not verified:
        return HeldoutResult(
            step=step,
            num_problems=0,
            pass_at_1=0.0,
            low=0.0,
            high=1.0,
            format_rate=0.0,
            failures=failures,
        )
    interval = mean_pass_at_1(
        torch.tensor([tally.right for tally in verified]),
        torch.tensor([tally.valid for tally in verified]),
    )
    formatted = sum(s.formatted for s in samples if s.outcome(threshold) != "error")
    return HeldoutResult(
        step=step,
        num_problems=len(verified),
        pass_at_1=interval.mean,
        low=interval.low,
        high=interval.high,
        format_rate=formatted / sum(tally.valid for tally in verified),
        failures=failures,
    )


def write_samples(path: Path, groups: Sequence[RolloutGroup]) -> None:
    """Every sample with its verdict as JSON lines, like those of ``dynamo-megatron eval``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as lines:
        lines.writelines(sample.line() for sample in samples_of(groups))
