"""Bytes between ranks, without pickle.

A payload is safetensors or JSON: reading it runs no code, and it holds the same bits on every rank.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

CHUNK_BYTES = 64 << 20
"""Largest single broadcast; bounds the copy that each end holds beside the payload."""


def group_device(group: ProcessGroup) -> torch.device:
    """Where tensors must live for a collective on ``group``: the CPU when its backend has one."""
    if "cpu:" in str(dist.get_backend_config(group)):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def broadcast_bytes(payload: bytes | None, *, src: int, group: ProcessGroup) -> bytes:
    """Give ``src``'s payload to every rank of ``group``.

    Args:
        payload: the bytes on ``src``; ignored elsewhere.
        src: global rank of the sender, as in ``torch.distributed``.
        group: a gloo or NCCL group.

    Returns:
        The payload, equal on every rank.

    Raises:
        ValueError: ``src`` had no payload (on every rank).

    Collectives on ``group``: 1 broadcast of the length, 1 for each ``CHUNK_BYTES``.
    """
    device = group_device(group)
    sending = dist.get_rank() == src
    absent = sending and payload is None
    length = torch.tensor([-1 if absent else len(payload or b"")], device=device)
    dist.broadcast(length, src=src, group=group)
    total = int(length)
    if total < 0:  # announced to all: raising on src alone would leave the others waiting
        raise ValueError(
            f"broadcast_bytes: rank {src} is the sender and has payload None. Pass its bytes there "
            "(b'' if there is nothing to say)."
        )
    received = bytearray(0 if sending else total)
    for start in range(0, total, CHUNK_BYTES):
        stop = min(start + CHUNK_BYTES, total)
        chunk = _chunk(payload, received, start, stop, device)
        dist.broadcast(chunk, src=src, group=group)
        if not sending and device.type != "cpu":
            received[start:stop] = chunk.cpu().numpy().tobytes()
    return payload if sending and payload is not None else bytes(received)


def _chunk(
    payload: bytes | None, received: bytearray, start: int, stop: int, device: torch.device
) -> Tensor:
    """The tensor to broadcast: a copy of the payload's slice, or a view of the receiving buffer.

    Always contiguous: gloo corrupts non-contiguous tensors in a broadcast without an error.
    """
    if not received:
        assert payload is not None, "the sender's payload was checked before"
        return torch.frombuffer(bytearray(payload[start:stop]), dtype=torch.uint8).to(device)
    if device.type == "cpu":
        return torch.frombuffer(received, dtype=torch.uint8, count=stop - start, offset=start)
    return torch.empty(stop - start, dtype=torch.uint8, device=device)


def gather_bytes(payload: bytes, *, group: ProcessGroup) -> list[bytes]:
    """Every rank's payload, in the group's rank order, on every rank.

    Meant for small things (digests, error texts): all are padded to the longest.

    Collectives on ``group``: 2 all-gathers.
    """
    device = group_device(group)
    world_size = dist.get_world_size(group)
    lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(world_size)]
    dist.all_gather(lengths, torch.tensor([len(payload)], device=device), group=group)
    longest = max(max(int(length) for length in lengths), 1)
    padded = torch.frombuffer(bytearray(payload.ljust(longest, b"\0")), dtype=torch.uint8)
    parts = [torch.zeros(longest, dtype=torch.uint8, device=device) for _ in range(world_size)]
    dist.all_gather(parts, padded.to(device), group=group)
    return [
        part.cpu().numpy().tobytes()[: int(length)]
        for part, length in zip(parts, lengths, strict=True)
    ]
