"""Metrics for TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from dynamo_megatron.protocols import MetricValue


class TensorBoardSink:
    """Scalars as scalars, mappings from value to count as histograms."""

    def __init__(self, folder: str | Path, *, start_step: int = 0) -> None:
        """Open the folder for a run whose first step is ``start_step``.

        Events of an earlier run at or after that step are hidden by TensorBoard.
        """
        self._writer = SummaryWriter(log_dir=str(folder), purge_step=start_step)

    def write(self, step: int, metrics: Mapping[str, MetricValue]) -> None:
        """Record one step; it can be seen at once."""
        for name, value in metrics.items():
            if isinstance(value, Mapping):
                self._histogram(step, name, {int(key): n for key, n in value.items()})
            else:
                self._writer.add_scalar(name, float(value), step)
        self._writer.flush()

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()

    def _histogram(self, step: int, name: str, counts: Mapping[int, int]) -> None:
        values = sorted(value for value, count in counts.items() if count)
        if not values:
            return
        # One bucket for each whole number, so that TensorBoard does not smear the sizes.
        buckets = range(values[0], values[-1] + 1)
        self._writer.add_histogram_raw(
            name,
            min=values[0],
            max=values[-1],
            num=sum(counts.values()),
            sum=sum(value * count for value, count in counts.items()),
            sum_squares=sum(value**2 * count for value, count in counts.items()),
            bucket_limits=[values[0] - 0.5, *(value + 0.5 for value in buckets)],
            bucket_counts=[0, *(counts.get(value, 0) for value in buckets)],
            global_step=step,
        )
