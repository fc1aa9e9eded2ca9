"""Process groups: torch.distributed's, then Megatron-Core's tensor, pipeline and data groups."""

from __future__ import annotations

import datetime
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """This rank's place in the layout, and the groups that it talks to.

    Attributes:
        rank: global rank.
        world_size: number of ranks.
        device: where parameters live.
        tensor_rank, tensor_size: place in the tensor-parallel group.
        pipeline_rank, pipeline_size: stage.
        data_rank, data_size: data-parallel place.
        tensor_group: ranks that share a stage's weights.
        pipeline_group: ranks of one pipeline.
        world_group: all ranks.
    """

    rank: int
    world_size: int
    device: torch.device
    tensor_rank: int
    tensor_size: int
    pipeline_rank: int
    pipeline_size: int
    data_rank: int
    data_size: int
    tensor_group: dist.ProcessGroup
    pipeline_group: dist.ProcessGroup
    world_group: dist.ProcessGroup

    @property
    def first_stage(self) -> bool:
        """This rank embeds the tokens."""
        return self.pipeline_rank == 0

    @property
    def last_stage(self) -> bool:
        """This rank has the output layer and the loss."""
        return self.pipeline_rank == self.pipeline_size - 1


class TopologyError(ValueError):
    """A layout that the number of processes or the model does not allow."""


def check_layout(*, tensor: int, pipeline: int, world_size: int) -> None:
    """Refuse a layout that does not divide the world size.

    Raises:
        TopologyError: with what to launch instead.
    """
    model_ranks = tensor * pipeline
    if world_size % model_ranks:
        raise TopologyError(
            f"parallel.tensor={tensor} x parallel.pipeline={pipeline} needs a multiple of "
            f"{model_ranks} processes, and {world_size} were started. Launch with "
            f"torchrun --nproc-per-node={model_ranks} (or a multiple, for data parallelism), or "
            "change parallel.tensor / parallel.pipeline."
        )


def init_torch_distributed(timeout_s: float = 1800.0) -> dist.Store:
    """Join the process group: NCCL where CUDA is available, gloo elsewhere.

    Without torchrun's environment variables a group of one is made, over an unused local port.

    Returns:
        The store at which the ranks met.
    """
    # Megatron-Core overlaps tensor-parallel communication with computation only in this order.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    timeout = datetime.timedelta(seconds=timeout_s)
    if "RANK" in os.environ:
        store, rank, world_size = next(iter(dist.rendezvous("env://", timeout=timeout)))
    else:
        store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
        rank, world_size = 0, 1
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timeout,
    )
    return store


def init_topology(*, tensor: int, pipeline: int, seed: int) -> Topology:
    """Make Megatron-Core's groups and seed its random number trackers.

    Collectives: creates process groups; every rank must call it.

    Raises:
        TopologyError: the layout does not fit the world size.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    check_layout(tensor=tensor, pipeline=pipeline, world_size=dist.get_world_size())
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor, pipeline_model_parallel_size=pipeline
    )
    model_parallel_cuda_manual_seed(seed)
    cuda = torch.cuda.is_available()
    return Topology(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        device=torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu"),
        tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
        tensor_size=tensor,
        pipeline_rank=parallel_state.get_pipeline_model_parallel_rank(),
        pipeline_size=pipeline,
        data_rank=parallel_state.get_data_parallel_rank(),
        data_size=parallel_state.get_data_parallel_world_size(),
        tensor_group=_group(parallel_state.get_tensor_model_parallel_group()),
        pipeline_group=_group(parallel_state.get_pipeline_model_parallel_group()),
        world_group=_group(dist.group.WORLD),
    )


def _group(group: object) -> dist.ProcessGroup:
    assert isinstance(group, dist.ProcessGroup), "Megatron-Core made the group for this rank"
    return group
