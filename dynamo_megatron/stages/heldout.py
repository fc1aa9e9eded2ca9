"""Held-out evaluation with the tier that makes the rollouts, reported as by the command."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dynamo_megatron.config import Config
from dynamo_megatron.evaluate.fingerprint import verifier_fingerprint
from dynamo_megatron.evaluate.heldout import (
    SAMPLING_STEP,
    HeldoutResult,
    equal_sizes,
    heldout_result,
)
from dynamo_megatron.evaluate.report import write_report, write_summary
from dynamo_megatron.evaluate.run import SAMPLES_NAME, write_settings
from dynamo_megatron.evaluate.samples import Sample, SampleFile, samples_of
from dynamo_megatron.evaluate.summary import Summary, summarise
from dynamo_megatron.stages.sampling import RolloutTier
from dynamo_megatron.types import Prompt

FOLDER_NAME = "evaluations"
"""Of the evaluations in a run's folder; each has a folder of its own, ``step_000012``."""

logger = logging.getLogger(__name__)


class HeldoutStage:
    """Evaluates on a fixed set of problems; rank 0 leaves what ``dynamo-megatron eval`` leaves."""

    def __init__(self, prompts: Sequence[Prompt], config: Config) -> None:
        """Hold the problems.

        Args:
            prompts: the held-out problems; none switches evaluation off.
            config: of the run.
        """
        self.prompts = tuple(prompts)
        self._config = config
        self._verifier = config.reward.function or config.reward.kind
        # Now: the workers import it at the start, and the file may be edited during a run.
        self._verifier_source = verifier_fingerprint(self._verifier)

    def run(self, tier: RolloutTier, step: int) -> HeldoutResult:
        """Sample and score every problem; collective, the same result on every rank.

        Rank 0 alone summarises, so that no difference between machines enters what the ranks
        keep. The seeds hold no step: two evaluations differ by the policy alone.
        """
        groups = tier.sample(
            self.prompts,
            equal_sizes(self.prompts, self._config.evaluation.samples),
            step=SAMPLING_STEP,
            temperature=self._config.evaluation.temperature,
        )

        def work() -> bytes:
            result = self._report(samples_of(groups), step)
            return json.dumps(asdict(result)).encode()

        return HeldoutResult(**json.loads(tier.control.run_on_zero(work, "report an evaluation")))

    def _report(self, samples: Sequence[Sample], step: int) -> HeldoutResult:
        config = self._config
        threshold = config.algorithm.allocation.success_threshold
        summaries = summarise(samples, right_from=threshold, seed=config.run.seed)
        with _whole_folder(Path(config.run.dir) / FOLDER_NAME / f"step_{step:06d}") as out:
            with SampleFile(out / SAMPLES_NAME) as file:
                file.append(samples)
            settings = self._settings(step)
            write_settings(out, settings)
            title = f"{Path(config.run.dir).resolve().name}, after {step} steps"
            facts = {"step": step}
            write_summary(out, title=title, settings=settings, facts=facts, summaries=summaries)
            if config.evaluation.report:
                self._write_page(out, title, settings, summaries, samples)
        return heldout_result(summaries, step=step, samples=config.evaluation.samples)

    def _write_page(
        self,
        out: Path,
        title: str,
        settings: dict[str, Any],
        summaries: Sequence[Summary],
        samples: Sequence[Sample],
    ) -> None:
        try:
            write_report(
                out,
                title=title,
                settings=settings,
                summaries=summaries,
                samples=samples,
                right_from=self._config.algorithm.allocation.success_threshold,
                pictures=self._config.observe.plots,
            )
        except (ValueError, OSError) as error:
            # The samples and their figures are written; a picture is not worth the run.
            logger.warning("no page of this evaluation: %s", error)

    def _settings(self, step: int) -> dict[str, Any]:
        """What decided the samples, by the names that the command uses."""
        config = self._config
        return {
            "model": config.model.path,
            "weights": f"after {step} steps of {config.run.dir}",
            "temperature": config.evaluation.temperature,
            "max_tokens": config.rollout.max_tokens,
            "seed": config.run.seed,
            "template": config.data.template,
            "append": "",
            "verifier": self._verifier,
            "verifier_source": self._verifier_source,
            "right_from": config.algorithm.allocation.success_threshold,
            "engine": config.rollout.engine,
            "dtype": config.model.dtype,
            "top_p": config.rollout.top_p,  # a cut of the sampler's applies here as well
            "top_k": config.rollout.top_k,
        }


@contextmanager
def _whole_folder(folder: Path) -> Iterator[Path]:
    """A folder that appears when it is complete, in place of an earlier one of its name."""
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    yield partial
    if folder.exists():
        shutil.rmtree(folder)
    partial.rename(folder)
