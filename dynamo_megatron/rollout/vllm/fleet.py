"""The replicas: started, given weights, lost and brought back."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import Any

from torch import Tensor

from dynamo_megatron.rollout.errors import RequestRefusedError, RolloutError
from dynamo_megatron.rollout.vllm.cluster import RayCluster, RayReplica, ReplicaLostError
from dynamo_megatron.rollout.vllm.processes import ProcessId
from dynamo_megatron.rollout.vllm.threads import in_daemon
from dynamo_megatron.rollout.vllm.transport import Transport, buckets
from dynamo_megatron.rollout.vllm.wire import (
    Exchange,
    ReplicaFacts,
    ReplicaSettings,
    Sample,
    SampleRequest,
    Sampling,
)

logger = logging.getLogger(__name__)

PROBE_GAP = 1e-3
"""Largest difference (nats) between two replicas' logprobs of the same tokens after a restart."""

CANCEL_TIMEOUT_S = 10.0
ALIVE_TIMEOUT_S = 2.0
"""For a call that asks nothing of the engine."""


class Fleet:
    """All replicas, of which some may be lost at a time.

    A lost replica is started again in the background, given the current weights from the object
    store and asked for its last probe once more before it samples.

    Args:
        cluster: where they run.
        settings: of each.
        num_replicas: how many.
        transport: brings weights to them.
        bucket_bytes: size of a bucket.
        start_timeout_s: for one engine to be built.
        hang_timeout_s: after which a replica that does not answer, or makes no step, is lost.
        max_restarts: of all replicas between two weight updates.
    """

    def __init__(
        self,
        cluster: RayCluster,
        settings: ReplicaSettings,
        *,
        num_replicas: int,
        transport: Transport,
        bucket_bytes: int,
        start_timeout_s: float,
        hang_timeout_s: float,
        max_restarts: int,
    ) -> None:
        self.cluster = cluster
        self._settings = settings
        self._num_replicas = num_replicas
        self._transport = transport
        self._bucket_bytes = bucket_bytes
        self._start_timeout_s = start_timeout_s
        self._hang_timeout_s = hang_timeout_s
        self._max_restarts = max_restarts
        self._restarts = 0
        self._ready: dict[int, RayReplica] = {}
        self._reviving: dict[int, Future[RayReplica]] = {}
        self._stored: list[Any] = []
        self._probed: dict[int, tuple[list[SampleRequest], Sampling, dict[str, Sample]]] = {}
        self._version: int | None = 0 if settings.load_weights else None
        self._connected: tuple[RayReplica, ...] = ()
        self._last: dict[int, ProcessId] = {}  # in each replica's place, alive or not

    @property
    def version(self) -> int | None:
        """Of the weights that every ready replica holds."""
        return self._version

    @property
    def ready(self) -> list[RayReplica]:
        """Replicas that can sample."""
        return [self._ready[number] for number in sorted(self._ready)]

    def start(self) -> None:
        """Build all engines at once."""
        replicas = [self.cluster.replica(n, self._settings) for n in range(self._num_replicas)]
        tickets = [replica.call("start") for replica in replicas]
        try:
            facts = self.cluster.wait(tickets, self._start_timeout_s)
        except (RolloutError, ReplicaLostError) as error:
            raise RolloutError(_start_advice(str(error), self._settings)) from error
        for replica, found in zip(replicas, facts, strict=True):
            self._note(replica, found)
            self._ready[replica.number] = replica
            logger.info(
                "replica %d: process %d on %s, %d parameters, room for %d tokens",
                replica.number,
                found.process.pid,
                found.process.host,
                found.parameters,
                found.kv_cache_tokens,
            )

    def update(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Bring weights into every replica; none can sample in between.

        Each bucket is also kept in the object store, from which a replica that is lost later is
        given its weights. A replica that is lost during the update is brought back at its end.

        Raises:
            RolloutError: the weights do not fit the engine.
        """
        self._version, self._stored, self._probed, self._restarts = None, [], {}, 0
        self._await_revived()
        taking_part = self.ready
        failure = self._begin(taking_part)
        for bucket in buckets(weights, self._bucket_bytes):
            self._stored.append(self.cluster.put(bucket.safetensors()))
            failure = failure or self._attempt(
                taking_part, partial(self._transport.send, taking_part, bucket, self._stored[-1])
            )
        if failure is None:
            failure = self._end(taking_part, version)
        self._version = version  # not before the end: weights that do not fit are no version
        if failure is not None:
            self._restore(taking_part, failure)
        if not self._ready and not self._reviving:
            raise RolloutError("no replica is left after the weight update.")

    def exchange_all(
        self, requests: dict[int, list[SampleRequest]], sampling: Sampling
    ) -> dict[int, dict[str, Sample]]:
        """Have each replica answer its own requests, all of them; for probes.

        A replica that is lost is brought back for it.
        """
        missing = set(requests)
        while missing:
            for replica in [r for r in self.ready if r.number in missing]:
                asked = requests[replica.number]
                try:
                    found = self._answers(replica, asked, sampling)
                except RequestRefusedError:
                    raise
                except (ReplicaLostError, RolloutError) as error:
                    self.lose(replica, f"during a probe: {error}")
                    continue
                self._probed[replica.number] = asked, sampling, found
                missing.remove(replica.number)
            self._await_revived()
        return {number: self._probed[number][2] for number in requests}

    def cancel(self) -> None:
        """Have every replica forget its requests, after a round that was given up."""
        for replica in self.ready:
            try:
                self.cluster.wait([replica.call("cancel")], CANCEL_TIMEOUT_S)
            except (ReplicaLostError, RolloutError) as error:
                logger.warning("replica %d did not forget its requests: %s", replica.number, error)

    def lose(self, replica: RayReplica, reason: str) -> None:
        """End a replica and start it again in the background.

        Raises:
            RolloutError: too many were lost since the last weight update.
        """
        self.cluster.require()
        self._ready.pop(replica.number, None)
        replica.kill()
        self._count_loss(replica.number, reason)
        self._start_again(replica.number)

    def adopt(self) -> list[RayReplica]:
        """Replicas that came back since the last call.

        Raises:
            RolloutError: one could not be brought back, or Ray is gone.
        """
        self.cluster.require()
        back = []
        for number, future in list(self._reviving.items()):
            if not future.done():
                continue
            del self._reviving[number]
            try:
                replica = future.result()
            except ReplicaLostError as error:
                self._count_loss(number, f"while it was started again: {error}")
                self._start_again(number)
                continue
            back.append(replica)
            self._ready[number] = replica
            holds = "no weights yet" if self._version is None else f"version {self._version}"
            logger.info("replica %d is back with %s", number, holds)
        return back

    @property
    def reviving(self) -> bool:
        """Some replica is being started again."""
        return bool(self._reviving)

    def close(self) -> None:
        """End all replicas."""
        self.cluster.stop_waiting()
        wait(self._reviving.values(), timeout=CANCEL_TIMEOUT_S)
        self._transport.close()
        self.cluster.close()

    def _begin(self, replicas: Sequence[RayReplica]) -> ReplicaLostError | None:
        # A group is formed with replicas that answer only: it would wait for the others.
        failure = self._attempt(replicas, partial(self._call_all, replicas, "start"))
        if failure is None and self._connected != tuple(replicas):
            failure = self._attempt(replicas, partial(self._transport.connect, replicas))
            self._connected = tuple(replicas)
        return failure or self._attempt(replicas, partial(self._call_all, replicas, "begin_update"))

    def _end(self, replicas: Sequence[RayReplica], version: int) -> ReplicaLostError | None:
        return self._attempt(replicas, partial(self._call_all, replicas, "end_update", version))

    def _call_all(self, replicas: Sequence[RayReplica], method: str, *args: Any) -> list[Any]:
        return self.cluster.wait(
            [replica.call(method, *args) for replica in replicas], self._hang_timeout_s
        )

    def _attempt(
        self, replicas: Sequence[RayReplica], part: Callable[[], object]
    ) -> ReplicaLostError | None:
        """Do a part of a weight update; returns the loss of a replica as its failure.

        Raises:
            RolloutError: it failed, and every replica is there: the weights do not fit.
        """
        try:
            part()
        except ReplicaLostError as error:
            return error
        except RolloutError as error:
            # A replica whose neighbour was lost in a broadcast complains before Ray does.
            if self._all_answer(replicas):
                raise
            return ReplicaLostError(str(error))
        except RuntimeError as error:
            return ReplicaLostError(f"the broadcast of weights broke: {error}")
        return None

    def _all_answer(self, replicas: Sequence[RayReplica]) -> bool:
        try:
            self._call_all(replicas, "start")
        except ReplicaLostError:
            return False
        return True

    def _restore(self, replicas: Sequence[RayReplica], failure: ReplicaLostError) -> None:
        """After a broken update: every replica anew, from the object store.

        Those that are there may have loaded a part. It counts as one loss.
        """
        self._connected = ()
        silent = self._silent(replicas)
        who = f"replica {', '.join(map(str, silent))} is lost" if silent else "all answer again"
        self._count_loss(None, f"a weight update broke ({who}): {failure}")
        for replica in replicas:
            self._ready.pop(replica.number, None)
            replica.kill()
            self._start_again(replica.number)
        self._await_revived()

    def _silent(self, replicas: Sequence[RayReplica]) -> list[int]:
        """Those that do not answer a call that asks nothing of the engine."""
        tickets = {replica.number: replica.call("alive") for replica in replicas}
        found = []
        for number, ticket in tickets.items():
            try:
                self.cluster.wait([ticket], ALIVE_TIMEOUT_S)
            except (ReplicaLostError, RolloutError):
                found.append(number)
        return found

    def _count_loss(self, number: int | None, reason: str) -> None:
        who = "all replicas" if number is None else f"replica {number}"
        reason = reason if reason.endswith((".", "!", "?")) else f"{reason}."
        self._restarts += 1
        if self._restarts > self._max_restarts:
            raise RolloutError(
                f"{self._restarts} replicas were lost since the last weight update, more than "
                f"rollout.vllm.max_restarts={self._max_restarts}. The last time, {who}: {reason} "
                "Look at memory (rollout.vllm.max_num_seqs, kv_cache_mib, "
                "gpu_memory_utilization) and at the node."
            )
        what = "They are" if number is None else "It is"
        logger.warning("%s: %s %s started again and given the weights.", who, reason, what)

    def _start_again(self, number: int) -> None:
        self._reviving[number] = in_daemon(partial(self._revive, number), f"restart-{number}")

    def _await_revived(self) -> None:
        while self._reviving:
            wait(self._reviving.values(), timeout=1.0)
            self.adopt()

    def _revive(self, number: int) -> RayReplica:
        """A new process in the old place, with the current weights, checked."""
        replica = self.cluster.replica(number, self._settings)
        try:
            started = replica.call("start", self._last.get(number))
            self._note(replica, *self.cluster.wait([started], self._start_timeout_s))
            if self._stored and self._version is not None:
                self._load_stored(replica, self._stored, self._version)
            if number in self._probed:
                requests, sampling, before = self._probed[number]
                _require_same(number, before, self._answers(replica, requests, sampling))
        except BaseException:
            replica.kill()
            raise
        return replica

    def _note(self, replica: RayReplica, facts: ReplicaFacts) -> None:
        replica.facts = facts
        self._last[replica.number] = facts.process

    def _load_stored(self, replica: RayReplica, stored: Sequence[Any], version: int) -> None:
        self._call_all([replica], "begin_update")
        for bucket in stored:
            self._call_all([replica], "load_bucket", bucket)
        self._call_all([replica], "end_update", version)

    def _answers(
        self, replica: RayReplica, requests: list[SampleRequest], sampling: Sampling
    ) -> dict[str, Sample]:
        found: dict[str, Sample] = {}
        new, steps, since = requests, -1, time.monotonic()
        while len(found) < len(requests):
            answer: Exchange
            (answer,) = self._call_all([replica], "exchange", new, sampling, 1.0)
            found.update({sample.key: sample for sample in answer.samples})
            new = []
            if answer.steps != steps:
                steps, since = answer.steps, time.monotonic()
            elif time.monotonic() - since > self._hang_timeout_s:
                raise ReplicaLostError(f"it made no step for {self._hang_timeout_s:g} s.")
        return found


def _require_same(number: int, before: dict[str, Sample], after: dict[str, Sample]) -> None:
    """A restarted replica must be the policy it was: same tokens, same logprobs."""
    for key, old in before.items():
        new = after[key]
        for place, (a, b) in enumerate(zip(old.token_ids, new.token_ids, strict=False)):
            gap = abs(old.logprobs[place] - new.logprobs[place])
            if a != b:
                break  # a tie: what follows is another text
            if gap > PROBE_GAP:
                raise RolloutError(
                    f"replica {number} was started again and given its weights, but token {place} "
                    f"of its probe has logprob {new.logprobs[place]:.5f} and had "
                    f"{old.logprobs[place]:.5f}: it is not the policy that it was."
                )


def _start_advice(reason: str, settings: ReplicaSettings) -> str:
    advice = ""
    if "torchvision" in reason:
        advice = (
            " The torchvision, torchaudio and torchcodec that come with vLLM's CPU build do not "
            "fit its torch: pip uninstall -y torchvision torchaudio torchcodec."
        )
    elif "KV cache" in reason or "cache blocks" in reason or "memory" in reason.lower():
        advice = (
            f" A replica must hold the keys and values of {settings.max_model_len} tokens at "
            "least: raise rollout.vllm.kv_cache_mib (or gpu_memory_utilization), or lower "
            "rollout.max_tokens or data.max_prompt_tokens."
        )
    return f"a vLLM replica could not be started: {reason}{advice}"
