"""Asking a run to stop, agreed on by all ranks."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType

from torch.distributed import ProcessGroup

from dynamo_megatron.parallel.reduce import any_rank


class StopRequested(Exception):
    """All ranks agreed to stop before the next update; nothing of the step was applied."""


class StopSignal:
    """Turns SIGTERM and the first Ctrl-C into a request that the loop honours at a step's end."""

    def __init__(self) -> None:
        self._requested = False
        self._notify: Callable[[], None] | None = None

    def install(self, on_signal: Callable[[], None]) -> None:
        """Take over SIGTERM and SIGINT of this process.

        Args:
            on_signal: called in the handler as well; must only set values.
        """
        self._notify = on_signal
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self._requested:
            signal.default_int_handler(number, frame)  # a second Ctrl-C means it
        self._requested = True
        if self._notify is not None:
            self._notify()

    def check(self, group: ProcessGroup) -> None:
        """Stop together.

        Collectives on ``group``: one MAX; every rank must call.

        Raises:
            StopRequested: on every rank when any of them was signalled.
        """
        if any_rank(self._requested, group=group):
            raise StopRequested
