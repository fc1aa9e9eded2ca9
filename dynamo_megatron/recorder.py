"""Everything a run writes for people, behind one object that is silent on ranks other than 0."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from dynamo_megatron.config import Config
from dynamo_megatron.evaluate.heldout import HeldoutResult
from dynamo_megatron.observe.generations import GenerationLog
from dynamo_megatron.observe.plots import make_plots
from dynamo_megatron.observe.progress import Progress
from dynamo_megatron.observe.sinks import JsonlSink, MultiSink
from dynamo_megatron.observe.tensorboard import TensorBoardSink
from dynamo_megatron.protocols import MetricsSink, MetricValue
from dynamo_megatron.types import RolloutGroup

logger = logging.getLogger(__name__)


class Recorder:
    """Metrics, generations, progress and plots of a run.

    Row s of the metrics holds step s and, where there was one, the evaluation of the policy that
    step s started from; the last evaluation has a row of its own.
    """

    def __init__(
        self, config: Config, *, enabled: bool, start_step: int, pending: HeldoutResult | None
    ) -> None:
        """Open the run's files.

        Args:
            config: of the run.
            enabled: False on every rank but 0: nothing is written.
            start_step: the next step; later rows of an earlier process are cut.
            pending: an evaluation of the policy at ``start_step`` that was made before.
        """
        self._enabled = enabled
        self._plots = config.observe.plots
        self._run_dir = Path(config.run.dir)
        self._next_step = start_step
        self._pending: dict[str, MetricValue] = dict(pending.metrics()) if pending else {}
        if not enabled:
            return
        sinks: list[MetricsSink] = [
            JsonlSink(self._run_dir / "metrics.jsonl", start_step=start_step)
        ]
        if config.observe.tensorboard:
            sinks.append(TensorBoardSink(self._run_dir / "tensorboard", start_step=start_step))
        self._sink = MultiSink(sinks)
        self._progress = Progress(
            config.run.num_steps, start_step=start_step, enabled=config.observe.progress
        )
        self._generations = GenerationLog(
            self._run_dir,
            per_step=config.observe.generations_per_step,
            seed=config.run.seed,
            success_threshold=config.algorithm.allocation.success_threshold,
        )

    def evaluation(self, result: HeldoutResult) -> None:
        """Keep an evaluation for the row of the step that follows it."""
        self._pending.update(result.metrics())
        if self._enabled:
            logger.info(
                "held-out pass@1 after %d steps: %.1f %% (95 %% interval %.1f to %.1f, %d problems,"
                " right format %.1f %%)",
                result.step,
                100 * result.pass_at_1,
                100 * result.low,
                100 * result.high,
                result.num_problems,
                100 * result.format_rate,
            )
            if details := result.details():
                logger.info("held-out: %s", ", ".join(details))

    def sampling(self, done: int, total: int, tokens: int) -> None:
        """Show how far a sampling is; may be called from another thread."""
        if self._enabled:
            self._progress.sampling(done, total, tokens)

    def step(
        self, step: int, metrics: Mapping[str, MetricValue], groups: Sequence[RolloutGroup]
    ) -> None:
        """Write one step."""
        row = {**metrics, **self._pending}
        self._pending = {}
        self._next_step = step + 1
        if self._enabled:
            self._sink.write(step, row)
            self._generations.write(step, groups)
            self._progress.write(step, row)

    def close(self) -> None:
        """Write what is pending, flush, and draw the plots."""
        if not self._enabled:
            return
        if self._pending:
            self._sink.write(self._next_step, self._pending)
        self._progress.close()
        self._sink.close()
        if self._plots:
            try:
                make_plots(self._run_dir)
            except (ValueError, OSError) as error:
                logger.warning("no plots: %s", error)
