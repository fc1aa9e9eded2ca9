"""vLLM's own NCCL weight transfer: the trainer's GPU broadcasts to the GPUs of all replicas.

Written against vLLM 0.32 and exercised with stand-ins for the communicator; not yet run on GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from dynamo_megatron.rollout.vllm.transport import Bucket, Peer, Wait, free_port

BACKEND = "nccl"
NUM_BUFFERS = 2


class NcclTransport:
    """One packed broadcast a bucket, from this process's current GPU.

    Args:
        wait: collects calls.
        workers_per_replica: GPUs of a replica.
        address: this node's address, as replicas reach it.
        buffer_bytes: at least the largest bucket, so that a bucket is one broadcast.
    """

    backend = BACKEND

    def __init__(
        self, wait: Wait, *, workers_per_replica: int, address: str, buffer_bytes: int
    ) -> None:
        self._wait = wait
        self._workers = workers_per_replica
        self._address = address
        self._buffer_bytes = buffer_bytes
        self._group: Any = None
        self._lock = Lock()  # a failed replica closes from the thread that watches it

    def connect(self, replicas: Sequence[Peer]) -> None:
        """A fresh communicator of this GPU and every GPU of the replicas."""
        from vllm.distributed.weight_transfer import nccl_common

        self.close()
        world_size = 1 + self._workers * len(replicas)
        infos = [
            nccl_common.NCCLWeightTransferInitInfo(
                master_address=self._address,
                master_port=0,
                rank_offset=1 + self._workers * place,
                world_size=world_size,
                packed=True,
                packed_buffer_size_bytes=self._buffer_bytes,
                packed_num_buffers=NUM_BUFFERS,
            )
            for place in range(len(replicas))
        ]
        port = free_port(self._address)
        tickets = [
            replica.call("connect", {**nccl_common.worker_init_payload(info), "master_port": port})
            for replica, info in zip(replicas, infos, strict=True)
        ]
        self._group = nccl_common.trainer_init(
            {"master_address": self._address, "master_port": port, "world_size": world_size}
        )
        self._wait(tickets)

    def send(self, replicas: Sequence[Peer], bucket: Bucket, stored: Any) -> None:
        """Broadcast the bucket while every worker receives.

        Raises:
            RuntimeError: what a replica raised, or NCCL. The communicator is destroyed then.
        """
        from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

        group = self._group
        assert group is not None, "connect comes first"
        info = bucket.update_info()
        # vLLM packs on streams of its own, which know nothing of what still fills the tensors.
        torch.accelerator.synchronize()
        received = self._watch([replica.call("receive_bucket", info) for replica in replicas])
        try:
            packed_nccl_broadcast_producer(
                iterator=_pairs(bucket),
                group=group,
                src=0,
                post_iter_func=lambda pair: pair[1].detach().to(group.device),
                buffer_size_bytes=self._buffer_bytes,
                num_buffers=NUM_BUFFERS,
            )
        except RuntimeError:
            self.close()
            if received.done():
                received.result()  # why it broke: a replica that failed
            raise
        received.result()

    def _watch(self, tickets: Sequence[Any]) -> Future[list[Any]]:
        """Wait for the replicas beside the broadcast.

        NCCL waits for a lost peer for ever. The first replica that fails ends the communicator,
        and with it the broadcast.
        """

        def end_broadcast(received: Future[list[Any]]) -> None:
            if received.exception() is not None:
                self.close()

        with_one_thread = ThreadPoolExecutor(1, thread_name_prefix="nccl-watch")
        received = with_one_thread.submit(self._wait, tickets)
        received.add_done_callback(end_broadcast)
        with_one_thread.shutdown(wait=False)
        return received

    def close(self) -> None:
        """Destroy the communicator."""
        with self._lock:
            group, self._group = self._group, None
        if group is not None:
            group.destroy()


def _pairs(bucket: Bucket) -> Iterator[tuple[str, Tensor]]:
    yield from zip(bucket.names, bucket.tensors, strict=True)
