"""A gloo back end for vLLM's weight-transfer API, for replicas without a GPU.

The counterpart of vLLM's NCCL back end: the trainer broadcasts each bucket once, to the workers of
all replicas. Imported in the worker processes and by the trainer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

BACKEND = "dynamo_gloo"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """Where trainer and workers meet.

    Attributes:
        file: shared file, where all are on this machine (nothing listens then but gloo itself).
        host: the trainer's address, where they are not.
        port: of the store there.
        address: the address that this process's gloo listens on.
        world_size: the trainer and all workers.
        timeout_s: for all to come, and for a collective.
    """

    file: str | None
    host: str
    port: int
    address: str
    world_size: int
    timeout_s: float

    def join(self, rank: int) -> dist.ProcessGroupGloo:
        """Enter the group. Collective."""
        timeout = timedelta(seconds=self.timeout_s)
        if self.file is not None:
            store = dist.FileStore(self.file, self.world_size)
            store.set_timeout(timeout)
        else:
            store = dist.TCPStore(
                self.host,
                self.port,
                self.world_size,
                is_master=rank == 0,
                timeout=timeout,
                wait_for_workers=False,
            )
        # torch's type stubs lag behind.
        options = dist.ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
        options._timeout = timeout
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=self.address)]
        return dist.ProcessGroupGloo(store, rank, self.world_size, options)


def broadcast_flat(group: dist.ProcessGroupGloo, flat: Tensor) -> None:
    """Send (rank 0) or receive one contiguous uint8 tensor.

    gloo corrupts tensors that are not contiguous, without an error.
    """
    if not flat.is_contiguous():
        raise ValueError("gloo sends contiguous tensors only; call .contiguous() first.")
    options = dist.BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    broadcast: Any = getattr(group, "broadcast")  # noqa: B009 - not in torch's type stubs
    broadcast([flat], options).wait()


def split_flat(
    flat: Tensor, names: Sequence[str], dtypes: Sequence[torch.dtype], shapes: Sequence[Any]
) -> list[tuple[str, Tensor]]:
    """Cut a bucket's bytes into its tensors. They share the bucket's memory."""
    tensors, start = [], 0
    for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
        count = torch.Size(shape).numel() * dtype.itemsize
        tensors.append((name, flat[start : start + count].view(dtype).view(torch.Size(shape))))
        start += count
    return tensors


def register() -> None:
    """Add this back end to vLLM's registry, once a process."""
    from vllm.distributed.weight_transfer.base import (
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
    )
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND in WeightTransferEngineFactory._registry:
        return

    @dataclass
    class GlooInitInfo(WeightTransferInitInfo):
        rendezvous: dict[str, Any]
        rank_offset: int

    @dataclass
    class GlooUpdateInfo(WeightTransferUpdateInfo):
        names: list[str]
        dtype_names: list[str]
        shapes: list[list[int]]

    class GlooWeightTransferEngine(WeightTransferEngine):
        """Receives buckets by broadcast. Begin and end of an update are the worker's."""

        init_info_cls = GlooInitInfo
        update_info_cls = GlooUpdateInfo
        group: dist.ProcessGroupGloo | None = None

        def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
            rank = init_info.rank_offset + self.parallel_config.rank
            self.group = Rendezvous(**init_info.rendezvous).join(rank)

        def start_weight_update(self) -> None:
            """Done by the worker's begin of an update."""

        def finish_weight_update(self) -> None:
            """Done by the worker's end of an update."""

        def receive_weights(self, update_info: GlooUpdateInfo) -> None:
            assert self.group is not None, "init_weight_transfer_engine comes first"
            dtypes = [getattr(torch, name) for name in update_info.dtype_names]
            total = sum(
                torch.Size(shape).numel() * dtype.itemsize
                for shape, dtype in zip(update_info.shapes, dtypes, strict=True)
            )
            flat = torch.empty(total, dtype=torch.uint8)
            broadcast_flat(self.group, flat)
            load: Any = self.model.load_weights
            load(split_flat(flat, update_info.names, dtypes, update_info.shapes))

        def shutdown(self) -> None:
            self.group = None

    WeightTransferEngineFactory.register_engine(BACKEND, GlooWeightTransferEngine)
