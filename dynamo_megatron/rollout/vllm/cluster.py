"""Ray: a local one on the loopback, or the cluster's; replicas placed on it and called."""

from __future__ import annotations

import getpass
import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynamo_megatron.rollout.errors import RolloutError
from dynamo_megatron.rollout.vllm.connection import join_ray, start_ray
from dynamo_megatron.rollout.vllm.watch import RayWatch
from dynamo_megatron.rollout.vllm.wire import ReplicaFacts, ReplicaSettings

if TYPE_CHECKING:
    from ray import ObjectRef

logger = logging.getLogger(__name__)

CALLS_AT_ONCE = 4
"""Calls a replica may serve at the same time: an exchange never keeps a check waiting."""
WAIT_SLICE_S = 1.0
"""A wait looks so often whether Ray is still there."""


class ReplicaLostError(RuntimeError):
    """A replica's process is gone, or does not answer."""


class RayCluster:
    """A connection to Ray with room for the replicas. Close it to leave nothing behind.

    Args:
        address: of a running cluster (``auto``, or host:port); None starts a Ray on this machine
            that listens on the loopback only and ends with this process.
        num_replicas: that will be placed.
        gpus_per_replica: 0 on a CPU.
        gpu_ids: GPUs of this machine that a Ray started here may give out.
        object_store_bytes: room for weights on their way, where Ray is started here.
        timeout_s: for the placement.

    Raises:
        RolloutError: no Ray at the address, or it has no room.
    """

    def __init__(
        self,
        address: str | None,
        *,
        num_replicas: int,
        gpus_per_replica: int,
        gpu_ids: Sequence[str] = (),
        object_store_bytes: int,
        timeout_s: float,
    ) -> None:
        self._temp: str | None = None
        self._address = address
        self._gpus = gpus_per_replica
        self._closed = False
        self._watch = RayWatch() if address else RayWatch(patience=1)
        self._group: Any = None
        self._lock = threading.Lock()
        if address is None:
            self._temp = start_ray(
                num_cpus=num_replicas, gpu_ids=gpu_ids, object_store_bytes=object_store_bytes
            )
        else:
            join_ray(address)
        try:
            self._watch.start(_services())
            self._group = self._place(num_replicas, timeout_s)
        except BaseException:
            self.close()
            raise

    @property
    def is_local(self) -> bool:
        """Ray was started here."""
        return self._address is None

    def own_address(self) -> str:
        """This node's address, as the other nodes of the cluster reach it."""
        import ray

        return ray.util.get_node_ip_address()

    def require(self) -> None:
        """Pass while Ray is there and open.

        Raises:
            RolloutError: it is not.
        """
        self._watch.require()

    def replica(self, number: int, settings: ReplicaSettings) -> RayReplica:
        """Start a replica's process in its place. Its engine is not built yet."""
        self.require()
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        from dynamo_megatron.rollout.vllm.replica import Replica

        actor_class = ray.remote(Replica).options(
            num_cpus=1,
            num_gpus=self._gpus,
            max_concurrency=CALLS_AT_ONCE,
            max_restarts=0,  # a restarted replica must be given its weights first
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=number
            ),
            runtime_env={"env_vars": _replica_environment(settings, self._temp)},
        )
        return RayReplica(number, actor_class.remote(settings))

    def put(self, value: Any) -> Any:
        """Store an object; returns its reference."""
        import ray

        self.require()
        return ray.put(value)

    def wait(self, tickets: Sequence[Any], timeout_s: float | None = None) -> list[Any]:
        """The results of calls, in order.

        Raises:
            ReplicaLostError: a replica's process died, or took longer than ``timeout_s``.
            RolloutError: a call failed, with its reason; or Ray is gone.
        """
        import ray
        from ray.exceptions import GetTimeoutError, RayError

        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            self.require()
            left = WAIT_SLICE_S if deadline is None else deadline - time.monotonic()
            try:
                return ray.get(list(tickets), timeout=max(0.0, min(WAIT_SLICE_S, left)))
            except GetTimeoutError:
                if left <= WAIT_SLICE_S and deadline is not None:
                    raise ReplicaLostError(
                        f"a replica did not answer within {timeout_s:g} s."
                    ) from None
            except RayError as error:
                raise translated(error) from error

    def first_done(self, tickets: Sequence[Any], timeout_s: float) -> list[Any]:
        """Those of the calls that have ended, after the first one or ``timeout_s``."""
        import ray

        self.require()
        ready, _ = ray.wait(list(tickets), num_returns=1, timeout=timeout_s)
        if not ready:
            return []
        more, _ = ray.wait(list(tickets), num_returns=len(tickets), timeout=0)
        return more

    def stop_waiting(self) -> None:
        """Have every ``wait`` of another thread give up."""
        self._watch.close()

    def close(self) -> None:
        """End the replicas and give their place back; end Ray where it was started here."""
        import ray

        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._watch.close()
        if ray.is_initialized():
            if not self.is_local and self._group is not None:
                _remove_placement(self)
            ray.shutdown()
        if self._temp is not None:
            shutil.rmtree(self._temp, ignore_errors=True)

    def _place(self, num_replicas: int, timeout_s: float) -> Any:
        import ray

        bundle: dict[str, float] = {"CPU": 1}
        if self._gpus:
            bundle["GPU"] = self._gpus
        group = ray.util.placement_group([bundle] * num_replicas, strategy="PACK")
        if not group.wait(timeout_s):
            free = ray.available_resources()
            ray.util.remove_placement_group(group)
            raise RolloutError(
                f"Ray has no room for rollout.vllm.replicas={num_replicas} with "
                f"{', '.join(f'{n:g} {kind}' for kind, n in bundle.items())} each: within "
                f"{timeout_s:g} s it had {free.get('CPU', 0):g} CPU and {free.get('GPU', 0):g} GPU "
                "free. A replica's GPUs must be on one node. Lower rollout.vllm.replicas or "
                "rollout.vllm.tensor, or give the cluster more nodes."
            )
        return group


class RayReplica:
    """The handle of a replica."""

    def __init__(self, number: int, actor: Any) -> None:
        self.number = number
        self.facts: ReplicaFacts | None = None
        self._actor = actor

    @property
    def host(self) -> str:
        """Address of its node."""
        assert self.facts is not None, "the replica was not started"
        return self.facts.process.host

    def call(self, method: str, *args: Any) -> ObjectRef:
        """Start a method; returns a ticket."""
        return getattr(self._actor, method).remote(*args)

    def kill(self) -> None:
        """End its process, now, even a frozen one."""
        import ray

        ray.kill(self._actor, no_restart=True)


def _services() -> dict[str, tuple[str, int]]:
    """What must be there: Ray's head, and Ray's process on this node."""
    import ray

    context = ray.get_runtime_context()
    host, port = context.gcs_address.rsplit(":", 1)
    here = next(node for node in ray.nodes() if node["NodeID"] == context.get_node_id())
    return {
        "its head service": (host, int(port)),
        "its service on this node": (here["NodeManagerAddress"], here["NodeManagerPort"]),
    }


def translated(error: Exception) -> Exception:
    """What a failed call says to people: the cause, without Ray's frame."""
    from ray.exceptions import OutOfMemoryError, RayActorError, RayTaskError

    if isinstance(error, RayTaskError):
        cause = error.cause if isinstance(error.cause, Exception) else error
        if isinstance(cause, RolloutError):
            return cause
        text = str(cause).strip()
        if isinstance(cause, MemoryError) or "allocate memory" in text or "out of memory" in text:
            return ReplicaLostError(f"it has no memory left: {text or repr(cause)}")
        return RolloutError(text if isinstance(cause, RuntimeError) else f"{cause!r}: {text}")
    if isinstance(error, RayActorError | OutOfMemoryError):
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        # Ray goes on with a list of what may kill a process.
        reason = lines[-1].split(" Some common causes")[0] if lines else repr(error)
        return ReplicaLostError(f"its process died: {reason}")
    return RolloutError(f"Ray failed: {str(error).strip()}")


def _replica_environment(settings: ReplicaSettings, ray_folder: str | None) -> dict[str, str]:
    """Read before the replica's first line runs, by OpenMP.

    vLLM leaves a file behind for each engine: with Ray's own, they go when it ends. What is
    compiled stays, for the next run.
    """
    found = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if not settings.use_gpu:
        found["OMP_NUM_THREADS"] = str(settings.threads)
    if ray_folder is not None:
        found["TMPDIR"] = ray_folder
        kept = Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}"
        found["TORCHINDUCTOR_CACHE_DIR"] = os.environ.get("TORCHINDUCTOR_CACHE_DIR", str(kept))
    return found


def _remove_placement(cluster: RayCluster) -> None:
    import ray
    from ray.exceptions import RayError

    try:
        ray.util.remove_placement_group(cluster._group)
    except RayError as error:
        logger.warning("the placement on the cluster was not given back: %s", error)
