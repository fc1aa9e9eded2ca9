"""A fleet without processes: replicas that answer by a script, behind the real interface."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dynamo_megatron.rollout.errors import RequestRefusedError, RolloutError
from dynamo_megatron.rollout.vllm.cluster import ReplicaLostError
from dynamo_megatron.rollout.vllm.wire import Exchange, Sample, SampleRequest, Sampling
from dynamo_megatron.types import FinishReason

Act = Callable[["ScriptedReplica", Sampling], Exchange | Exception | None]
"""What a replica does in one exchange: an answer, a failure, or nothing ever (None)."""


def sample_of(request: SampleRequest, version: int, *, logprob: float = -0.5) -> Sample:
    """Two tokens that tell which request they answer: its seed, then the stop token."""
    return Sample(
        key=request.key,
        token_ids=(request.seed % 97, 2),
        logprobs=(logprob, logprob),
        finish_reason=FinishReason.STOP,
        version=version,
        started_s=1.0,
        finished_s=2.0,
    )


def answer(count: int | None = None, *, version: int | None = None, logprob: float = -0.5) -> Act:
    """Complete the first ``count`` requests it holds (all without a count)."""

    def act(replica: ScriptedReplica, sampling: Sampling) -> Exchange:
        replica.steps += 1
        done = [replica.held.popleft() for _ in list(replica.held)[:count]]
        of = sampling.version if version is None else version
        return replica.exchange_of([sample_of(r, of, logprob=logprob) for r in done])

    return act


def answer_last() -> Act:
    """Complete the request that it was given last."""

    def act(replica: ScriptedReplica, sampling: Sampling) -> Exchange:
        replica.steps += 1
        return replica.exchange_of([sample_of(replica.held.pop(), sampling.version)])

    return act


def answer_wrongly(key: str) -> Act:
    """Answer a request that it does not hold."""
    request = SampleRequest(key=key, token_ids=(1,), seed=0)
    return lambda replica, sampling: replica.exchange_of([sample_of(request, sampling.version)])


def stand_still(replica: ScriptedReplica, sampling: Sampling) -> Exchange:
    """Answer, but make no step."""
    return replica.exchange_of([])


def hang(replica: ScriptedReplica, sampling: Sampling) -> None:
    """Never answer."""


def die(replica: ScriptedReplica, sampling: Sampling) -> Exception:
    """The process ends."""
    return ReplicaLostError("its process died: killed by signal 9.")


def fail(replica: ScriptedReplica, sampling: Sampling) -> Exception:
    """The engine raises."""
    return RolloutError("the engine failed: ValueError('broken')")


def refuse(replica: ScriptedReplica, sampling: Sampling) -> Exception:
    """The engine does not take a request."""
    return RequestRefusedError("vLLM does not take request p0/0 with 2 prompt tokens: too long")


class ScriptedReplica:
    """Follows its script exchange by exchange, then answers everything it is asked."""

    def __init__(self, number: int, script: Iterable[Act] = ()) -> None:
        self.number = number
        self.script = iter(script)
        self.held: deque[SampleRequest] = deque()
        self.given: list[str] = []
        self.steps = 0
        self.killed = False
        self.under_way = 0

    def exchange_of(self, samples: Sequence[Sample]) -> Exchange:
        return Exchange(samples=tuple(samples), unfinished=len(self.held), steps=self.steps)

    def call(self, method: str, requests: Sequence[SampleRequest], sampling: Sampling, *rest):
        assert method == "exchange"
        assert not self.killed, f"replica {self.number} is called after its end"
        assert not self.under_way, f"replica {self.number} has a call under way"
        self.under_way = 1
        self.held.extend(requests)
        self.given += [request.key for request in requests]
        return Ticket(self, next(self.script, answer())(self, sampling))


@dataclass(eq=False)
class Ticket:
    replica: ScriptedReplica
    result: Any


class ScriptedCluster:
    """Answers arrive one at a time, the oldest call first."""

    def first_done(self, tickets: Sequence[Ticket], timeout_s: float) -> list[Ticket]:
        return [ticket for ticket in tickets if ticket.result is not None][:1]

    def wait(self, tickets: Sequence[Ticket], timeout_s: float | None = None) -> list[Any]:
        for ticket in tickets:
            ticket.replica.under_way = 0
            if isinstance(ticket.result, Exception):
                raise ticket.result
        return [ticket.result for ticket in tickets]


@dataclass
class ScriptedFleet:
    """Replicas by number; each lost one is replaced by the next script of its number.

    Attributes:
        scripts: for each number those of the replica and of its successors; when they are used up
            the number is not brought back.
        absent_for: calls of ``adopt`` until a replica that was lost is back.
        lost: number and reason of each loss.
        cancelled: how often what was left was given up.
    """

    scripts: dict[int, Sequence[Sequence[Act]]]
    absent_for: int = 1
    version: int | None = 3
    lost: list[tuple[int, str]] = field(default_factory=list)
    cancelled: int = 0

    def __post_init__(self) -> None:
        self.cluster = ScriptedCluster()
        self._left = {number: deque(scripts) for number, scripts in self.scripts.items()}
        self._coming: dict[int, int] = {}
        self.history: list[ScriptedReplica] = []
        self._ready: dict[int, ScriptedReplica] = {}
        for number in self._left:
            self._start(number)

    @property
    def ready(self) -> list[ScriptedReplica]:
        return [self._ready[number] for number in sorted(self._ready)]

    @property
    def reviving(self) -> bool:
        return bool(self._coming)

    def adopt(self) -> None:
        for number in list(self._coming):
            self._coming[number] -= 1
            if self._coming[number] <= 0:
                del self._coming[number]
                self._start(number)

    def lose(self, replica: ScriptedReplica, reason: str) -> None:
        assert self._ready.pop(replica.number) is replica
        replica.killed = True
        self.lost.append((replica.number, reason))
        if self._left[replica.number]:
            self._coming[replica.number] = self.absent_for

    def cancel(self) -> None:
        self.cancelled += 1

    def _start(self, number: int) -> None:
        replica = ScriptedReplica(number, self._left[number].popleft())
        self._ready[number] = replica
        self.history.append(replica)


def healthy(num_replicas: int) -> ScriptedFleet:
    """Replicas that answer everything at once."""
    return ScriptedFleet({number: [()] for number in range(num_replicas)})


def endlessly(act: Act) -> Iterable[Act]:
    """A script without an end."""
    return itertools.repeat(act)
