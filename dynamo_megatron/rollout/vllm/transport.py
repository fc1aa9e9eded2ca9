"""Weights from the trainer to the replicas, in buckets.

All transports share one life cycle: ``begin_update`` on every replica, one call a bucket, then
``end_update``, which counts. They differ in how a bucket's bytes travel. One call a tensor took
minutes elsewhere (open-instruct#1535).
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from safetensors.torch import save
from torch import Tensor

from dynamo_megatron.rollout.vllm.gloo_backend import BACKEND, Rendezvous, broadcast_flat
from dynamo_megatron.rollout.vllm.own_folder import WEIGHTS, make_folder
from dynamo_megatron.rollout.vllm.threads import in_daemon

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Bucket:
    """Some tensors of one dtype, under Hugging Face names."""

    names: tuple[str, ...]
    tensors: tuple[Tensor, ...]

    @property
    def num_bytes(self) -> int:
        """Payload."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)

    def update_info(self) -> dict[str, Any]:
        """What vLLM's weight-transfer API is told about it."""
        return {
            "names": list(self.names),
            "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in self.tensors],
            "shapes": [list(tensor.shape) for tensor in self.tensors],
        }

    def flat(self) -> Tensor:
        """[num_bytes] uint8 on the CPU, contiguous."""
        parts = [t.detach().cpu().contiguous().view(-1).view(torch.uint8) for t in self.tensors]
        return torch.cat(parts)

    def safetensors(self) -> bytes:
        """The same as a safetensors file."""
        return save(
            {
                name: tensor.detach().cpu().contiguous()
                for name, tensor in zip(self.names, self.tensors, strict=True)
            }
        )


def buckets(weights: Iterable[tuple[str, Tensor]], limit_bytes: int) -> Iterator[Bucket]:
    """Cut a stream of tensors into buckets of at most ``limit_bytes``.

    A tensor larger than the limit gets a bucket of its own. A bucket holds one dtype, so that its
    tensors can be views of one block of bytes. It holds a name once: a tensor that
    comes twice is for the engine to find, and would be lost in a safetensors file.
    """
    names: list[str] = []
    tensors: list[Tensor] = []
    held = 0
    for name, tensor in weights:
        size = tensor.numel() * tensor.element_size()
        full = held + size > limit_bytes
        if tensors and (full or tensor.dtype != tensors[0].dtype or name in names):
            yield Bucket(tuple(names), tuple(tensors))
            names, tensors, held = [], [], 0
        names.append(name)
        tensors.append(tensor)
        held += size
    if tensors:
        yield Bucket(tuple(names), tuple(tensors))


class Peer(Protocol):
    """A replica, as transports see it. Calls return at once; ``wait`` collects them."""

    @property
    def host(self) -> str:
        """Address of its node."""
        ...

    def call(self, method: str, *args: Any) -> Any:
        """Start a method of the replica; returns a ticket."""
        ...


class Wait(Protocol):
    """Waits for tickets; raises what a call raised."""

    def __call__(self, tickets: Sequence[Any]) -> list[Any]:
        """Results in order."""
        ...


class Transport(Protocol):
    """How a bucket's bytes reach the replicas."""

    def connect(self, replicas: Sequence[Peer]) -> None:
        """Form the group with these replicas; called again when they change."""
        ...

    def send(self, replicas: Sequence[Peer], bucket: Bucket, stored: Any) -> None:
        """Bring one bucket into all of them.

        Args:
            replicas: those of the last ``connect``, between begin and end of an update.
            bucket: the tensors.
            stored: the same as safetensors bytes in the object store (a reference).
        """
        ...

    def close(self) -> None:
        """Leave the group."""
        ...


class ObjectStoreTransport:
    """Safetensors bytes through Ray's object store: any layout of nodes, no group to form."""

    def __init__(self, wait: Wait) -> None:
        self._wait = wait

    def connect(self, replicas: Sequence[Peer]) -> None:
        """Nothing: Ray reaches them."""

    def send(self, replicas: Sequence[Peer], bucket: Bucket, stored: Any) -> None:
        """Each replica reads the same object."""
        self._wait([replica.call("load_bucket", stored) for replica in replicas])

    def close(self) -> None:
        """Nothing is held."""


class GlooTransport:
    """vLLM's weight-transfer API over gloo: one broadcast a bucket.

    Args:
        wait: collects calls.
        workers_per_replica: processes of a replica that receive.
        address: this node's address, as replicas reach it; the loopback where all are here.
        timeout_s: for the group to form, and for a bucket.
    """

    backend = BACKEND

    def __init__(
        self,
        wait: Wait,
        *,
        workers_per_replica: int,
        address: str = LOOPBACK,
        timeout_s: float = 120.0,
    ) -> None:
        self._wait = wait
        self._workers = workers_per_replica
        self._address = address
        self._timeout_s = timeout_s
        self._group: dist.ProcessGroupGloo | None = None
        self._folder: str | None = None

    def connect(self, replicas: Sequence[Peer]) -> None:
        """A fresh group of this process and every worker of the replicas."""
        self.close()
        local = self._address == LOOPBACK
        if local:
            self._folder = make_folder(WEIGHTS)
        meeting = {
            "file": os.path.join(self._folder, "store") if self._folder else None,
            "host": self._address,
            "port": 0 if local else free_port(self._address),
            "world_size": 1 + self._workers * len(replicas),
            "timeout_s": self._timeout_s,
        }
        tickets = [
            replica.call(
                "connect",
                {
                    "rendezvous": {**meeting, "address": LOOPBACK if local else replica.host},
                    "rank_offset": 1 + self._workers * place,
                },
            )
            for place, replica in enumerate(replicas)
        ]
        # Beside the wait: a replica that is lost meanwhile is known at once, the meeting itself
        # only gives up after its time limit.
        meet = Rendezvous(**meeting, address=self._address).join
        joined = in_daemon(partial(meet, 0), "weights-meeting")
        try:
            self._wait(tickets)
        except Exception:
            if joined.done():
                joined.result()  # why they waited in vain, if it was this end
            raise
        self._group = joined.result(self._timeout_s)

    def send(self, replicas: Sequence[Peer], bucket: Bucket, stored: Any) -> None:
        """Broadcast the bucket while every worker receives."""
        assert self._group is not None, "connect comes first"
        info = bucket.update_info()
        tickets = [replica.call("receive_bucket", info) for replica in replicas]
        broadcast_flat(self._group, bucket.flat())
        self._wait(tickets)

    def close(self) -> None:
        """Leave the group and remove its meeting file."""
        self._group = None
        if self._folder is not None:
            shutil.rmtree(Path(self._folder), ignore_errors=True)
            self._folder = None


def free_port(address: str) -> int:
    """A TCP port that nobody listens on at ``address`` now."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        return probe.getsockname()[1]
