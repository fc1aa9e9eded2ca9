"""Verifications that wait for a worker, and the verdicts so far."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable

from dynamo_megatron.reward.process import Task
from dynamo_megatron.types import Prompt, Rollout, Verdict

CHUNK_ITEMS, CHUNK_CHARS = 32, 1 << 22
"""Most items, and most characters (but at least one item), sent to a worker at a time."""


class Job:
    """What the pool works on. While it is open, another thread may add to it.

    Only ``add``, ``close`` and ``cancel`` may be called from another thread than the pool's.

    Args:
        tasks: known from the start; their ``index`` counts from 0.
        growing: more may come, until ``close``.
    """

    def __init__(self, tasks: Iterable[Task] = (), *, growing: bool = False) -> None:
        self.waiting = deque(tasks)
        self.verdicts: dict[int, Verdict] = {}
        self.growing = growing
        self.cancelled = False
        self._count = len(self.waiting)
        # Wakes the pool from its sleep; only a growing job has news from outside.
        self._bell = os.eventfd(0, os.EFD_NONBLOCK) if growing else None

    @property
    def bell(self) -> int | None:
        """File descriptor to wait on for additions; read it with ``hush``."""
        return self._bell

    def add(self, prompt: Prompt, rollout: Rollout) -> None:
        """Have a rollout verified."""
        # The deque's append is atomic, and the pool takes from the other end.
        self.waiting.append(
            Task(index=self._count, response=rollout.text, answer=prompt.answer, prompt=prompt.text)
        )
        self._count += 1
        self._ring()

    def close(self) -> None:
        """Nothing more will come."""
        self.growing = False
        self._ring()

    def cancel(self) -> None:
        """The verdicts are not wanted any more."""
        self.cancelled = True
        self._ring()

    def hush(self) -> None:
        """Take note of the bell."""
        if self._bell is not None:
            try:
                os.eventfd_read(self._bell)
            except BlockingIOError:
                return

    def release(self) -> None:
        """Close the bell; no other thread uses the job any more."""
        if self._bell is not None:
            os.close(self._bell)
            self._bell = None

    def take(self, num_workers: int) -> list[Task]:
        """The next tasks for one worker; few enough to share out evenly, none when none wait.

        A share of what waits now, so that messages are long (and cheap) while there is much to do
        and every worker is busy to the end.
        """
        longest = min(CHUNK_ITEMS, max(1, len(self.waiting) // (4 * num_workers)))
        chunk: list[Task] = []
        chars = 0
        while self.waiting and len(chunk) < longest:
            chars += self.waiting[0].num_chars
            if chunk and chars > CHUNK_CHARS:
                break
            chunk.append(self.waiting.popleft())
        return chunk

    def put_back(self, tasks: Iterable[Task]) -> None:
        """Tasks that a worker had and did not get to; they are next."""
        self.waiting.extendleft(reversed(list(tasks)))

    def in_order(self) -> list[Verdict]:
        """One verdict for each item, in the order of addition."""
        assert self.verdicts.keys() == set(range(self._count)), (
            "the pool stopped before every item had a verdict"
        )
        return [self.verdicts[index] for index in range(self._count)]

    def _ring(self) -> None:
        if self._bell is not None:
            os.eventfd_write(self._bell, 1)
