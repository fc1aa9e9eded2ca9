"""Held-out results during a run: the figures of ``dynamo-megatron eval`` under metric names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dynamo_megatron.algo.passk import Interval
from dynamo_megatron.evaluate.summary import ALL, Summary
from dynamo_megatron.types import GroupSizes, Prompt

SAMPLING_STEP = 0
"""Enters the seeds in place of the step, so that two evaluations differ by the policy alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldoutResult:
    """What an evaluation found: numbers and text only, so that JSON returns it exactly.

    Attributes:
        step: steps the policy was trained.
        num_problems: problems with a verified sample.
        pass_at_1: mean over problems of the share of right samples.
        low, high: 95 % interval.
        format_rate: share of samples with an answer in the expected format.
        failures: verifications that failed; they are in no rate.
        figures: the other figures, by metric name without ``eval/``.
    """

    step: int
    num_problems: int
    pass_at_1: float
    low: float
    high: float
    format_rate: float
    failures: int
    figures: Mapping[str, float] = field(default_factory=dict)

    def details(self) -> list[str]:
        """pass@k, majority vote and, of several sources, each one's pass@1, in words."""
        rates = {name.removesuffix("_low") for name in self.figures if name.endswith("_low")}
        sources = [name for name in self.figures if name in rates and "/" in name]
        shown = [name for name in self.figures if name in rates and "/" not in name]
        if len(sources) > 1:
            shown += sources
        return [
            f"{name.removesuffix('/pass@1')} {100 * self.figures[name]:.1f} % "
            f"({100 * self.figures[f'{name}_low']:.1f} to {100 * self.figures[f'{name}_high']:.1f})"
            for name in shown
        ]

    def metrics(self) -> dict[str, float]:
        """Under the names of ``metrics.jsonl``."""
        return {
            "eval/pass@1": self.pass_at_1,
            "eval/pass@1_low": self.low,
            "eval/pass@1_high": self.high,
            "eval/format_rate": self.format_rate,
            "eval/num": float(self.num_problems),
            "eval/failures": float(self.failures),
            **{f"eval/{name}": value for name, value in self.figures.items()},
        }


def equal_sizes(prompts: Sequence[Prompt], samples: int) -> GroupSizes:
    """The same number of samples for each problem."""
    return GroupSizes(
        prompt_ids=tuple(prompt.id for prompt in prompts), sizes=(samples,) * len(prompts)
    )


def heldout_result(summaries: Sequence[Summary], *, step: int, samples: int) -> HeldoutResult:
    """The result that ``summarise`` gives of the policy after ``step`` steps.

    Where no sample was verified, pass@1 is 0 with the interval [0, 1], and there is no pass@k.

    Args:
        summaries: by source; the last is over all of them.
        step: steps the policy was trained.
        samples: of each problem; the k of the majority vote.
    """
    total = summaries[-1]
    first = total.pass_at_1 or Interval(mean=0.0, low=0.0, high=1.0)
    figures = {"length_mean": total.mean_tokens, "truncated_rate": total.truncation_rate}
    for k, interval in total.pass_at_k.items():
        figures |= _named(f"pass@{k}", interval)
    # The vote of one sample is that sample.
    if samples > 1:
        figures |= _named(f"maj@{samples}", total.maj_at_k)
    for summary in summaries:
        if summary.source != ALL:
            figures |= _named(f"{summary.source}/pass@1", summary.pass_at_1)
    return HeldoutResult(
        step=step,
        num_problems=total.num_problems,
        pass_at_1=first.mean,
        low=first.low,
        high=first.high,
        format_rate=total.format_rate,
        # Of the rows by source: the last leaves out problems that several sources have.
        failures=sum(summary.errors for summary in summaries[:-1] or summaries),
        figures=figures,
    )


def _named(name: str, interval: Interval | None) -> dict[str, float]:
    if interval is None:
        return {}
    return {name: interval.mean, f"{name}_low": interval.low, f"{name}_high": interval.high}
