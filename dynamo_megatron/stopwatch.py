"""Wall-clock time of the parts of a step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Stopwatch:
    """Collects seconds by name; made anew for each step."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Add the duration of the block to ``name``."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - begin

    def metrics(self) -> dict[str, float]:
        """``time/<name>`` for each part, and ``time/step`` since the start."""
        parts = {f"time/{name}": seconds for name, seconds in self._seconds.items()}
        return {**parts, "time/step": time.perf_counter() - self._start}
