"""Held-out evaluation with the tier that makes the rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dynamo_megatron.config import EvaluationConfig
from dynamo_megatron.evaluate.heldout import (
    SAMPLING_STEP,
    HeldoutResult,
    equal_sizes,
    heldout_result,
    write_samples,
)
from dynamo_megatron.stages.sampling import RolloutTier
from dynamo_megatron.types import Prompt


class HeldoutStage:
    """Evaluates on a fixed set of problems; samples are kept on rank 0."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        config: EvaluationConfig,
        *,
        threshold: float,
        samples_dir: Path | None,
    ) -> None:
        """Hold the problems.

        Args:
            prompts: the held-out problems; none switches evaluation off.
            config: samples and temperature.
            threshold: reward from which a sample is right.
            samples_dir: where rank 0 writes the samples; None elsewhere.
        """
        self.prompts = tuple(prompts)
        self._config = config
        self._threshold = threshold
        self._samples_dir = samples_dir

    def run(self, tier: RolloutTier, step: int) -> HeldoutResult:
        """Sample and score every problem; collective, the same result on every rank."""
        groups = tier.sample(
            self.prompts,
            equal_sizes(self.prompts, self._config.samples),
            step=SAMPLING_STEP,
            temperature=self._config.temperature,
        )
        if self._samples_dir is not None:
            write_samples(self._samples_dir / f"step_{step:06d}.jsonl", groups)
        return heldout_result(groups, step=step, threshold=self._threshold)
