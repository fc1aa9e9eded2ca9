"""Reductions, and agreement on what happened."""

from __future__ import annotations

import json

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from dynamo_megatron.parallel.broadcast import gather_bytes, group_device
from dynamo_megatron.parallel.errors import PeerError


def all_reduce_sum(tensor: Tensor, *, group: ProcessGroup) -> Tensor:
    """The sum over the ranks of ``group``, as a new tensor; the argument is left alone.

    Collectives on ``group``: 1 SUM of the tensor's shape.
    """
    return _all_reduced(tensor, ReduceOp.SUM, group)


def all_reduce_max(tensor: Tensor, *, group: ProcessGroup) -> Tensor:
    """The maximum over the ranks of ``group``, as a new tensor; the argument is left alone.

    Collectives on ``group``: 1 MAX of the tensor's shape.
    """
    return _all_reduced(tensor, ReduceOp.MAX, group)


def _all_reduced(tensor: Tensor, op: ReduceOp.RedOpType, group: ProcessGroup) -> Tensor:
    # A contiguous copy where the backend wants it: gloo is not to be trusted with strides.
    reduced = tensor.detach().to(group_device(group), copy=True).contiguous()
    dist.all_reduce(reduced, op=op, group=group)
    return reduced.to(tensor.device)


def any_rank(flag: bool, *, group: ProcessGroup) -> bool:
    """Whether ``flag`` is set on any rank; the same answer everywhere.

    Collectives on ``group``: 1 MAX of one integer.
    """
    return bool(all_reduce_max(torch.tensor([int(flag)]), group=group))


def raise_together(error: Exception | None, *, phase: str, group: ProcessGroup) -> None:
    """End a phase on every rank when it failed on any.

    Args:
        error: what this rank caught in the phase, or None.
        phase: what was being done, for the message.
        group: the ranks that did it.

    Raises:
        Exception: ``error`` itself, on the ranks that have one.
        PeerError: elsewhere, with the first failing rank, its exception's type and text.

    Collectives on ``group``: 1 MAX; after a failure 2 all-gathers. Every rank must call.
    """
    if not any_rank(error is not None, group=group):
        return
    said = [] if error is None else [type(error).__name__, str(error)]
    gathered = [json.loads(part) for part in gather_bytes(json.dumps(said).encode(), group=group)]
    if error is not None:
        raise error
    ranks = dist.get_process_group_ranks(group)
    rank, (error_type, text) = next((r, g) for r, g in zip(ranks, gathered, strict=True) if g)
    raise PeerError(rank, phase, error_type, text)
