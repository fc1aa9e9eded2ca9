"""Which replica samples what, and when. Pure bookkeeping: no Ray, no clock.

A shared queue feeds all replicas. Each holds at most a window of requests, so that what waits,
waits where any replica can take it; the longest expected responses go first, so that no long one
starts when the others are done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from dynamo_megatron.rollout.errors import RolloutError
from dynamo_megatron.rollout.vllm.wire import SampleRequest

CHUNK = 8
"""Most rollouts of one prompt that are given out together: a replica reads the prompt once."""
CHUNKS_PER_REPLICA = 4
"""With few rollouts the chunks are smaller, so that every replica gets about so many."""
MAX_ATTEMPTS = 3
"""Replicas that may be lost over one request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A request with what it is expected to cost.

    Attributes:
        request: what is sent.
        group: the prompt, whose rollouts should stay together.
        expected_tokens: length of the response, as far as known.
    """

    request: SampleRequest
    group: str
    expected_tokens: float


class Schedule:
    """The requests of one round: waiting, given out, or complete.

    Args:
        planned: all requests, in any order; keys differ.
        window: requests a replica may hold.
        num_replicas: that share the work at the start.
    """

    def __init__(self, planned: Sequence[Planned], *, window: int, num_replicas: int) -> None:
        self._waiting = deque(sorted(planned, key=lambda p: -p.expected_tokens))
        self._held: dict[int, dict[str, Planned]] = {}
        self._attempts: dict[str, int] = {}
        self._window = window
        self._chunk = max(1, min(CHUNK, len(planned) // max(1, num_replicas * CHUNKS_PER_REPLICA)))
        self.num_done = 0
        self.num_total = len(planned)

    @property
    def done(self) -> bool:
        """Every request is complete."""
        return self.num_done == self.num_total

    @property
    def waiting(self) -> int:
        """Requests that no replica holds."""
        return len(self._waiting)

    def held(self, replica: int) -> int:
        """Requests that a replica holds."""
        return len(self._held.get(replica, ()))

    def deal(self, free: Sequence[int], num_replicas: int) -> dict[int, list[SampleRequest]]:
        """Give waiting requests to the replicas that can take some now.

        Args:
            free: replicas that can be sent requests now.
            num_replicas: all that work, ``free`` or not: no one takes more than its share.

        Returns:
            For each free replica its new requests, maybe none.
        """
        dealt: dict[int, list[SampleRequest]] = {replica: [] for replica in free}
        share = -(-(self.num_total - self.num_done) // max(1, num_replicas))
        limit = min(self._window, share)
        loads = {replica: self._load(replica) for replica in free}
        while self._waiting:
            open_to_more = [replica for replica in free if self.held(replica) < limit]
            if not open_to_more:
                break
            replica = min(open_to_more, key=loads.__getitem__)
            for planned in self._next_chunk(min(self._chunk, limit - self.held(replica))):
                self._held.setdefault(replica, {})[planned.request.key] = planned
                dealt[replica].append(planned.request)
                loads[replica] += planned.expected_tokens
        return dealt

    def complete(self, replica: int, key: str) -> None:
        """A response came.

        Raises:
            RolloutError: the replica was not asked for it, or it came twice.
        """
        if self._held.get(replica, {}).pop(key, None) is None:
            raise RolloutError(
                f"replica {replica} returned a response to {key}, which it was not asked for or "
                "has answered already: the step's groups would not be what was allocated."
            )
        self.num_done += 1

    def give_up(self, replica: int, reason: str) -> int:
        """A replica is lost: what it held goes to the front of the queue.

        Returns:
            The number of requests to be re-issued.

        Raises:
            RolloutError: one of them has been on too many lost replicas.
        """
        orphans = list(self._held.pop(replica, {}).values())
        for planned in orphans:
            key = planned.request.key
            self._attempts[key] = self._attempts.get(key, 0) + 1
            if self._attempts[key] >= MAX_ATTEMPTS:
                raise RolloutError(
                    f"{self._attempts[key]} replicas in turn were lost while they held rollout "
                    f"{key}; the last one: {reason} The request itself may be the cause (its "
                    f"prompt has {len(planned.request.token_ids)} tokens): give replicas more "
                    "memory, or lower rollout.vllm.max_num_seqs."
                )
        self._waiting.extendleft(reversed(orphans))
        return len(orphans)

    def _load(self, replica: int) -> float:
        return sum(p.expected_tokens for p in self._held.get(replica, {}).values())

    def _next_chunk(self, limit: int) -> list[Planned]:
        """The first waiting requests of one prompt."""
        chunk = [self._waiting.popleft()]
        while len(chunk) < limit and self._waiting and self._waiting[0].group == chunk[0].group:
            chunk.append(self._waiting.popleft())
        return chunk


class LengthHistory:
    """Mean response length of each prompt, for the order of dispatch only.

    Not part of a run's state: it changes when a response is sampled, never what.
    """

    def __init__(self) -> None:
        self._sums: dict[str, tuple[int, int]] = {}

    def expected(self, prompt_id: str, limit: int) -> float:
        """Mean length so far; the limit for a prompt that was never sampled."""
        total, count = self._sums.get(prompt_id, (0, 0))
        return total / count if count else float(limit)

    def observe(self, lengths: Iterable[tuple[str, int]]) -> None:
        """Add responses: prompt id and number of tokens."""
        for prompt_id, rows in groupby(sorted(lengths), key=lambda row: row[0]):
            total, count = self._sums.get(prompt_id, (0, 0))
            found = [length for _, length in rows]
            self._sums[prompt_id] = total + sum(found), count + len(found)
