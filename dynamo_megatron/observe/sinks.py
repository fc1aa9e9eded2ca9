"""Metrics as JSON lines, and one sink for several."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dynamo_megatron.protocols import MetricsSink, MetricValue

METRICS_NAME = "metrics.jsonl"
"""The metrics' file in a run's folder."""

logger = logging.getLogger(__name__)

_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class JsonlSink:
    """One JSON object a line, one line a step, on disk as soon as it is written.

    A value that is not finite is written as the string "NaN", "Infinity" or "-Infinity": JSON has
    no number for it, and a null would hide which one it was.
    """

    def __init__(self, path: str | Path, *, start_step: int = 0) -> None:
        """Open the file for a run whose first step is ``start_step``.

        Lines of an earlier run at or after that step are cut, and so is a line that a crash left
        half written: each step is in the file once.
        """
        self._path = Path(path)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._last_step = start_step - 1
        if self._path.exists():
            _cut(self._path, start_step)
        self._file = self._path.open("a", encoding="utf-8")

    def write(self, step: int, metrics: Mapping[str, MetricValue]) -> None:
        """Append one step.

        Raises:
            ValueError: the step does not come after the last one.
        """
        if step <= self._last_step:
            raise ValueError(
                f"{self._path}: step {step} was written after step {self._last_step}; each step "
                "is one line and steps ascend. Collect all metrics of a step and write them once."
            )
        values = {name: json_value(value) for name, value in metrics.items() if name != "step"}
        row = {"step": step} | values
        self._file.write(json.dumps(row, allow_nan=False) + "\n")
        self._file.flush()
        self._last_step = step

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class MultiSink:
    """Hands every step to several sinks, in order."""

    def __init__(self, sinks: Sequence[MetricsSink]) -> None:
        self._sinks = tuple(sinks)

    def write(self, step: int, metrics: Mapping[str, MetricValue]) -> None:
        """Write to each sink."""
        for sink in self._sinks:
            sink.write(step, metrics)

    def close(self) -> None:
        """Close each sink, all of them even when one fails."""
        with ExitStack() as stack:
            for sink in reversed(self._sinks):
                stack.callback(sink.close)


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The steps of a metrics file, ascending, non-finite numbers restored.

    A line that is not a JSON object with a step (a crash, a full disk) is left out and logged.
    """
    rows = []
    for number, line in enumerate(_lines(Path(path)), start=1):
        row = _parse(line)
        if row is None:
            logger.warning("%s, line %d is not a step's metrics and is left out", path, number)
        else:
            rows.append({name: _from_json(value) for name, value in row.items()})
    return sorted(rows, key=lambda row: row["step"])


def json_value(value: Any) -> Any:
    """A metric's value as JSON has it; not finite becomes a string that names it."""
    if isinstance(value, Mapping):
        return {str(name): int(count) for name, count in value.items()}
    if isinstance(value, int):
        return int(value)
    number = float(value)
    if math.isnan(number):
        return "NaN"
    if math.isinf(number):
        return "Infinity" if number > 0 else "-Infinity"
    return number


def _cut(path: Path, start_step: int) -> None:
    kept, dropped = [], 0
    for line in _lines(path):
        row = _parse(line)
        if row is not None and row["step"] < start_step:
            kept.append(line)
        else:
            dropped += 1
    if dropped:
        logger.info("%s: %d lines from step %d on are cut", path, dropped, start_step)
    if dropped or not path.read_bytes().endswith(b"\n"):
        partial = path.with_name(f".{path.name}.partial")
        partial.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
        partial.replace(path)


def _lines(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8", errors="replace")
    return [line for line in text.split("\n") if line.strip()]


def _parse(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except json.JSONDecodeError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def _from_json(value: Any) -> Any:
    return _NON_FINITE.get(value, value) if isinstance(value, str) else value
