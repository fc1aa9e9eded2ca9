"""Carries a schedule out on the replicas, and keeps its promise when some are lost."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from dynamo_megatron.rollout.errors import RequestRefusedError, RolloutError
from dynamo_megatron.rollout.vllm.cluster import RayReplica, ReplicaLostError
from dynamo_megatron.rollout.vllm.fleet import Fleet
from dynamo_megatron.rollout.vllm.schedule import Schedule
from dynamo_megatron.rollout.vllm.wire import Exchange, Sample, Sampling

ANSWER_WITHIN_S = 1.0
"""A replica answers at least so often; what it has completed comes at once."""


class Dispatcher:
    """Runs one schedule. Each replica has at most one call under way.

    Args:
        fleet: the replicas.
        schedule: what is to be sampled.
        sampling: how.
        hang_timeout_s: a replica that holds requests but makes no step for so long is lost.
        on_sample: told of each response and the replica that sampled it.
    """

    def __init__(
        self,
        fleet: Fleet,
        schedule: Schedule,
        sampling: Sampling,
        *,
        hang_timeout_s: float,
        on_sample: Callable[[int, Sample], None],
    ) -> None:
        self._fleet = fleet
        self._schedule = schedule
        self._sampling = sampling
        self._hang_timeout_s = hang_timeout_s
        self._on_sample = on_sample
        self._calls: dict[Any, RayReplica] = {}
        self._progress: dict[int, tuple[int, float]] = {}  # steps, and when they last grew

    def run(self) -> None:
        """Until every request is complete, exactly once."""
        while not self._schedule.done:
            self._fleet.adopt()
            if not self._fleet.ready and not self._fleet.reviving:
                raise RolloutError("no replica is left, and none is being started again.")
            self._send()
            self._receive()
            self._look_for_hung()

    def _send(self) -> None:
        busy = {replica.number for replica in self._calls.values()}
        free = {r.number: r for r in self._fleet.ready if r.number not in busy}
        dealt = self._schedule.deal(list(free), len(self._fleet.ready))
        for number, requests in dealt.items():
            if requests and not self._schedule.held(number) - len(requests):
                self._progress.pop(number, None)  # it was idle: its clock starts now
            if requests or self._schedule.held(number):
                ticket = free[number].call(
                    "exchange",
                    requests,
                    self._sampling,
                    ANSWER_WITHIN_S,
                    bool(self._schedule.waiting),
                )
                self._calls[ticket] = free[number]
                self._progress.setdefault(number, (-1, time.monotonic()))

    def _receive(self) -> None:
        if not self._calls:
            time.sleep(ANSWER_WITHIN_S / 10)  # all replicas are being started again
            return
        for ticket in self._fleet.cluster.first_done(list(self._calls), ANSWER_WITHIN_S):
            replica = self._calls.pop(ticket)
            try:
                (answer,) = self._fleet.cluster.wait([ticket])
            except RequestRefusedError:
                raise
            except (ReplicaLostError, RolloutError) as error:
                self._lose(replica, str(error))
                continue
            self._take(replica, answer)

    def _take(self, replica: RayReplica, answer: Exchange) -> None:
        steps, _ = self._progress.get(replica.number, (-1, 0.0))
        if answer.steps != steps:
            self._progress[replica.number] = answer.steps, time.monotonic()
        for sample in answer.samples:
            self._require_current(replica, sample)
            self._schedule.complete(replica.number, sample.key)
            self._on_sample(replica.number, sample)

    def _require_current(self, replica: RayReplica, sample: Sample) -> None:
        if sample.version != self._sampling.version:
            raise RolloutError(
                f"replica {replica.number} sampled {sample.key} from weights of version "
                f"{sample.version}; {self._sampling.version} was asked for."
            )

    def _look_for_hung(self) -> None:
        now = time.monotonic()
        for replica in self._fleet.ready:  # whether or not it answers calls
            held = self._schedule.held(replica.number)
            _, since = self._progress.get(replica.number, (-1, now))
            if held and now - since > self._hang_timeout_s:
                self._lose(
                    replica,
                    f"it holds {held} requests and made no step for {now - since:.0f} s "
                    "(rollout.vllm.hang_timeout_s).",
                )

    def _lose(self, replica: RayReplica, reason: str) -> None:
        self._progress.pop(replica.number, None)
        for ticket in [t for t, r in self._calls.items() if r is replica]:
            del self._calls[ticket]
        self._fleet.lose(replica, reason)
        self._schedule.give_up(replica.number, reason)
