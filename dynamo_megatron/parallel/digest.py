"""A check that ranks agree, which names the difference instead of hanging on it later."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

import torch.distributed as dist
from torch.distributed import ProcessGroup

from dynamo_megatron.parallel.broadcast import gather_bytes
from dynamo_megatron.parallel.errors import DivergenceError

SHOWN_DIGITS = 12


def require_agreement(values: Mapping[str, str], *, step: int, group: ProcessGroup) -> None:
    """Stop every rank when a value that must be replicated is not.

    Args:
        values: name to content, for instance the step's plan as JSON. Contents are compared by
            SHA-256; only digests travel.
        step: the training step, for the message.
        group: the ranks that must agree.

    Raises:
        DivergenceError: a value differs or is missing on some rank. Raised on all ranks, with the
            same message: the step, every value that differs, and which ranks hold what.

    Collectives on ``group``: 2 all-gathers. Every rank must call.
    """
    digests = {n: hashlib.sha256(value.encode()).hexdigest() for n, value in values.items()}
    gathered = gather_bytes(json.dumps(digests).encode(), group=group)
    ranks = dist.get_process_group_ranks(group)
    by_rank = dict(zip(ranks, (json.loads(part) for part in gathered), strict=True))
    difference = describe_difference(by_rank)
    if difference:
        raise DivergenceError(
            f"step {step}: the ranks do not agree, so their collectives would not match. "
            f"{difference}. Look for anything on that path that depends on the rank, the clock, "
            "an unseeded generator or the order of a set."
        )


def describe_difference(by_rank: Mapping[int, Mapping[str, str]]) -> str:
    """Which values differ and which ranks hold what, or "" when all agree.

    Args:
        by_rank: for each rank its digests by name.
    """
    differences = []
    for name in sorted({name for digests in by_rank.values() for name in digests}):
        holders: dict[str, list[int]] = {}
        for rank, digests in by_rank.items():
            holders.setdefault(digests.get(name, "nothing"), []).append(rank)
        if len(holders) > 1:
            said = "; ".join(
                f"ranks {ranks} hold {digest[:SHOWN_DIGITS]}" for digest, ranks in holders.items()
            )
            differences.append(f"{name!r} differs: {said}")
    return ". ".join(differences)
