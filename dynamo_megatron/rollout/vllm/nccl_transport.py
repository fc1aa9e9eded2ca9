"""vLLM's own NCCL weight transfer: the trainer's GPU broadcasts to the GPUs of all replicas.

Written against vLLM 0.32 and exercised with stand-ins for the communicator; not yet run on GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

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
        """Broadcast the bucket while every worker receives."""
        from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

        info = bucket.update_info()
        tickets = [replica.call("receive_bucket", info) for replica in replicas]
        packed_nccl_broadcast_producer(
            iterator=_pairs(bucket),
            group=self._group,
            src=0,
            post_iter_func=lambda pair: pair[1].contiguous(),
            buffer_size_bytes=self._buffer_bytes,
            num_buffers=NUM_BUFFERS,
        )
        self._wait(tickets)

    def close(self) -> None:
        """Destroy the communicator."""
        if self._group is not None:
            self._group.destroy()
            self._group = None


def _pairs(bucket: Bucket) -> Iterator[tuple[str, Tensor]]:
    yield from zip(bucket.names, bucket.tensors, strict=True)
