"""The replicas: started, given weights, lost and brought back."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from torch import Tensor

from dynamo_megatron.rollout.errors import RolloutError
from dynamo_megatron.rollout.vllm.cluster import RayCluster, RayReplica, ReplicaLostError
from dynamo_megatron.rollout.vllm.transport import Bucket, Transport, buckets
from dynamo_megatron.rollout.vllm.wire import (
    Exchange,
    ReplicaSettings,
    Sample,
    SampleRequest,
    Sampling,
    UpdateAudit,
)

logger = logging.getLogger(__name__)

PROBE_GAP = 1e-3
"""Largest difference (nats) between two replicas' logprobs of the same tokens after a restart."""

CANCEL_TIMEOUT_S = 10.0


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
        max_restarts: int,
    ) -> None:
        self.cluster = cluster
        self._settings = settings
        self._num_replicas = num_replicas
        self._transport = transport
        self._bucket_bytes = bucket_bytes
        self._start_timeout_s = start_timeout_s
        self._max_restarts = max_restarts
        self._restarts = 0
        self._ready: dict[int, RayReplica] = {}
        self._reviving: dict[int, Future[RayReplica]] = {}
        self._stored: list[Any] = []
        self._probed: dict[int, tuple[list[SampleRequest], Sampling, dict[str, Sample]]] = {}
        self._version: int | None = 0 if settings.load_weights else None
        self._connected: tuple[RayReplica, ...] = ()
        self._workers = ThreadPoolExecutor(num_replicas, thread_name_prefix="replica-restart")

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
            replica.facts = found
            self._ready[replica.number] = replica
            logger.info(
                "replica %d: process %d on %s, %d parameters, room for %d tokens",
                replica.number,
                found.pid,
                found.host,
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
        failure: ReplicaLostError | None = None
        try:
            self._begin(taking_part)
        except ReplicaLostError as error:
            failure = error
        for bucket in buckets(weights, self._bucket_bytes):
            self._stored.append(self.cluster.put(bucket.safetensors()))
            failure = failure or self._send(taking_part, bucket)
        self._version = version
        if failure is None:
            failure = self._end(taking_part, version)
        if failure is not None:
            logger.warning("during the weight update: %s", failure)
            self._restore(taking_part)
        if not self._ready and not self._reviving:
            raise RolloutError("no replica is left after the weight update.")

    def exchange_all(
        self, requests: dict[int, list[SampleRequest]], sampling: Sampling, timeout_s: float
    ) -> dict[int, dict[str, Sample]]:
        """Have each ready replica answer its own requests, all of them; for probes."""
        found: dict[int, dict[str, Sample]] = {}
        for replica in self.ready:
            found[replica.number] = self._answers(
                replica, requests[replica.number], sampling, timeout_s
            )
            self._probed[replica.number] = (
                requests[replica.number],
                sampling,
                found[replica.number],
            )
        return found

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
        self._ready.pop(replica.number, None)
        replica.kill()
        self._restarts += 1
        if self._restarts > self._max_restarts:
            raise RolloutError(
                f"{self._restarts} replicas were lost since the last weight update, more than "
                f"rollout.vllm.max_restarts={self._max_restarts}. The last one, replica "
                f"{replica.number}: {reason} Look at memory (rollout.vllm.max_num_seqs, "
                "kv_cache_mib, gpu_memory_utilization) and at the node."
            )
        logger.warning(
            "replica %d is lost: %s It is started again, its rollouts are sampled elsewhere.",
            replica.number,
            reason,
        )
        self._reviving[replica.number] = self._workers.submit(self._revive, replica.number)

    def adopt(self) -> list[RayReplica]:
        """Replicas that came back since the last call.

        Raises:
            RolloutError: one could not be brought back.
        """
        back = []
        for number, future in list(self._reviving.items()):
            if future.done():
                del self._reviving[number]
                back.append(future.result())
                self._ready[number] = back[-1]
                logger.info("replica %d is back with version %s", number, self._version)
        return back

    @property
    def reviving(self) -> bool:
        """Some replica is being started again."""
        return bool(self._reviving)

    def close(self) -> None:
        """End all replicas."""
        self._workers.shutdown(wait=False, cancel_futures=True)
        self._transport.close()
        self.cluster.close()

    def _begin(self, replicas: Sequence[RayReplica]) -> None:
        if self._connected != tuple(replicas):
            self._transport.connect(replicas)
            self._connected = tuple(replicas)
        self.cluster.wait([replica.call("begin_update") for replica in replicas])

    def _send(self, replicas: Sequence[RayReplica], bucket: Bucket) -> ReplicaLostError | None:
        try:
            self._transport.send(replicas, bucket, self._stored[-1])
        except ReplicaLostError as error:
            return error
        except RuntimeError as error:
            if isinstance(error, RolloutError):
                raise
            return ReplicaLostError(f"the broadcast of weights broke: {error}")
        return None

    def _end(self, replicas: Sequence[RayReplica], version: int) -> ReplicaLostError | None:
        try:
            audits: list[UpdateAudit] = self.cluster.wait(
                [replica.call("end_update", version) for replica in replicas]
            )
        except ReplicaLostError as error:
            return error
        logger.debug("version %d: %s", version, audits[0] if audits else "no replica")
        return None

    def _restore(self, replicas: Sequence[RayReplica]) -> None:
        """After a broken update: every replica anew, from the object store."""
        self._connected = ()
        for replica in replicas:
            self.lose(replica, "it took part in a weight update that broke.")
        self._await_revived()

    def _await_revived(self) -> None:
        for future in list(self._reviving.values()):
            try:
                future.result()
            finally:
                self.adopt()

    def _revive(self, number: int) -> RayReplica:
        """A new process in the old place, with the current weights, checked."""
        replica = self.cluster.replica(number, self._settings)
        wait = self.cluster.wait
        (replica.facts,) = wait([replica.call("start")], self._start_timeout_s)
        if self._stored and self._version is not None:
            wait([replica.call("begin_update")])
            for stored in self._stored:
                wait([replica.call("load_bucket", stored)])
            wait([replica.call("end_update", self._version)])
        if number in self._probed:
            requests, sampling, before = self._probed[number]
            after = self._answers(replica, requests, sampling, self._start_timeout_s)
            _require_same(number, before, after)
        return replica

    def _answers(
        self,
        replica: RayReplica,
        requests: list[SampleRequest],
        sampling: Sampling,
        timeout_s: float,
    ) -> dict[str, Sample]:
        deadline, found, new = time.monotonic() + timeout_s, {}, requests
        while len(found) < len(requests):
            left = deadline - time.monotonic()
            if left <= 0:
                raise RolloutError(f"replica {replica.number} did not answer within {timeout_s} s.")
            answer: Exchange
            (answer,) = self.cluster.wait(
                [replica.call("exchange", new, sampling, min(1.0, left))], left + 1.0
            )
            found.update({sample.key: sample for sample in answer.samples})
            new = []
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
