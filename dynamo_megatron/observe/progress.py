"""Where the run stands, for whoever watches it."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TextIO

from tqdm import tqdm

if TYPE_CHECKING:
    from dynamo_megatron.protocols import MetricValue

logger = logging.getLogger(__name__)

_REFRESH_S = 0.5
"""Least time between two changes of a bar within a sampling."""

_SHOWN = (
    ("reward", "reward/mean", "{:.3f}"),
    ("pass", "reward/pass_rate", "{:.1%}"),
    ("entropy", "train/entropy", "{:.3f}"),
    ("held-out", "eval/pass@1", "{:.1%}"),
    ("s/step", "time/step", "{:.1f}"),
)


class Progress:
    """A bar on a terminal; a plain line in the log every few seconds elsewhere.

    Reward, pass rate, entropy, the latest held-out pass@1 and seconds a step stand beside it, and
    while responses are sampled how many are done: in the bar, or in a line of their own when it
    takes long. ``sampling`` may be called from another thread than the rest.
    """

    def __init__(
        self,
        num_steps: int,
        *,
        start_step: int = 0,
        enabled: bool = True,
        stream: TextIO | None = None,
        interval_s: float = 5.0,
        sampling_interval_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start at ``start_step`` of ``num_steps``.

        Args:
            num_steps: length of the whole run.
            start_step: steps done before, by the run this one continues.
            enabled: False on every rank but 0.
            stream: where the bar is drawn, stderr by default.
            interval_s: least time between two plain lines about steps.
            sampling_interval_s: the same within a sampling, and before its first one.
            clock: seconds, monotonic.
        """
        out: TextIO = stream or sys.stderr
        self._num_steps = num_steps
        self._enabled = enabled
        self._interval_s = interval_s
        self._sampling_interval_s = sampling_interval_s
        self._clock = clock
        self._started = clock()
        self._start_step = start_step
        self._last_line = float("-inf")
        self._shown: dict[str, str] = {}
        self._sampling_began = self._last_sampling = clock()
        self._lock = threading.Lock()
        self._bar = (
            tqdm(total=num_steps, initial=start_step, unit="step", file=out, dynamic_ncols=True)
            if enabled and out.isatty()
            else None
        )

    def write(self, step: int, metrics: Mapping[str, MetricValue]) -> None:
        """Show that ``step`` (from 0) is done."""
        if not self._enabled:
            return
        done = step + 1
        with self._lock:
            self._shown.pop("rollouts", None)
            for label, name, style in _SHOWN:
                value = metrics.get(name)
                if value is not None and not isinstance(value, Mapping):
                    self._shown[label] = style.format(float(value))
            if self._bar is not None:
                self._bar.set_postfix(self._shown, refresh=False)
                self._bar.update(done - self._bar.n)
            elif done >= self._num_steps or self._clock() - self._last_line >= self._interval_s:
                self._last_line = self._clock()
                logger.info("%s", self._line(done))

    def sampling(self, done: int, total: int, tokens: int) -> None:
        """Show how far a sampling is: a ``protocols.SamplingWatch``.

        Args:
            done: responses that are complete; 0 begins a sampling.
            total: responses wanted, as far as is known.
            tokens: sampled so far in complete responses.
        """
        if not self._enabled:
            return
        now = self._clock()
        with self._lock:
            if done == 0:
                self._sampling_began = self._last_sampling = now
            if self._bar is not None:
                self._shown["rollouts"] = f"{done}/{total}"
                if done == total or now - self._last_sampling >= _REFRESH_S:
                    self._last_sampling = now
                    self._bar.set_postfix(self._shown)
            elif now - self._last_sampling >= self._sampling_interval_s:
                self._last_sampling = now
                rate = tokens / (now - self._sampling_began)
                logger.info(
                    "sampling: %d of %d responses, %s tokens, %s tokens/s",
                    done,
                    total,
                    f"{tokens:,}",
                    f"{rate:,.0f}",
                )

    def close(self) -> None:
        """Leave the bar as it is and go to the next line."""
        if self._bar is not None:
            self._bar.close()

    def _line(self, done: int) -> str:
        values = "".join(f"  {label} {value}" for label, value in self._shown.items())
        here = done - self._start_step
        left = (self._clock() - self._started) / here * (self._num_steps - done) if here > 0 else 0
        return f"step {done}/{self._num_steps}{values}  left {tqdm.format_interval(left)}"
