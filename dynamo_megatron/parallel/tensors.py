"""Whole tensors moved between ranks: gathering shards, sending one rank's tensor to all."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def gather_shards(shard: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """Every rank's equally shaped shard, in rank order.

    Collectives on ``group``: one all-gather; every rank must call.
    """
    if group.size() == 1:
        return [shard]
    shards = [
        torch.empty_like(shard, memory_format=torch.contiguous_format) for _ in range(group.size())
    ]
    dist.all_gather(shards, shard.contiguous(), group=group)
    return shards


def broadcast_tensor(tensor: Tensor, *, source: int, group: dist.ProcessGroup) -> Tensor:
    """The tensor of rank ``source`` of ``group``, in place on the others.

    Args:
        tensor: what to send, or a tensor of the same shape and dtype to receive into.
        source: rank within the group.
        group: the ranks that take part.

    Collectives on ``group``: one broadcast; every rank must call.
    """
    if group.size() == 1:
        return tensor
    # gloo silently sends garbage for tensors that are not contiguous.
    tensor = tensor.contiguous()
    dist.broadcast(tensor, src=dist.get_global_rank(group, source), group=group)
    return tensor
