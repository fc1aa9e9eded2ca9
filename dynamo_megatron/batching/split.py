"""A batch cut into mini-batches, data-parallel shares and packed rows.

A pure function of replicated data: every rank computes the whole plan and finds its own part in
it, so the ranks agree on the number of forward passes without asking each other.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dynamo_megatron.types import MicroBatch, MiniBatch, TrainBatch, sequence_lengths


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLimits:
    """What a packed row may hold.

    Attributes:
        tokens: longest row; a longer sequence gets a row of its own.
        sequences: at most so many sequences in a row; None for any number.
        multiple: rows are padded to a multiple of this (see ``row_multiple``).
        equal_lengths: all rows of a mini-batch are padded to the longest, which pipeline stages
            need to exchange activations of one known shape.
    """

    tokens: int
    sequences: int | None = None
    multiple: int = 1
    equal_lengths: bool = False


def row_multiple(*, tensor: int, sequence_parallel: bool, context: int = 1) -> int:
    """The one owner of the padding multiple of rows.

    Sequence parallelism cuts a row over the tensor ranks, context parallelism into 2 chunks a rank.
    """
    return (tensor if sequence_parallel else 1) * (2 * context if context > 1 else 1)


def plan_mini_batches(
    batch: TrainBatch,
    *,
    num_groups: int,
    groups_per_mini_batch: int,
    data_parallel: int,
    limits: RowLimits,
) -> tuple[MiniBatch, ...]:
    """Cut a step into optimizer steps and packed rows.

    Args:
        batch: the step's sequences.
        num_groups: P, prompts of the step.
        groups_per_mini_batch: consecutive prompts an optimizer step sees; groups are never cut.
        data_parallel: number of data-parallel ranks.
        limits: of a row.

    Returns:
        The mini-batches that hold at least one sequence, in order.
    """
    plans = []
    group_of = batch.group_index.tolist()
    for first in range(0, num_groups, groups_per_mini_batch):
        members = range(first, first + groups_per_mini_batch)
        sequences = tuple(s for s, g in enumerate(group_of) if g in members)
        if sequences:
            plans.append(_mini_batch(batch, len(plans), sequences, data_parallel, limits))
    return tuple(plans)


def _mini_batch(
    batch: TrainBatch,
    index: int,
    sequences: tuple[int, ...],
    data_parallel: int,
    limits: RowLimits,
) -> MiniBatch:
    lengths = sequence_lengths(batch.token_offsets)
    # Nothing is predicted from a sequence's last token, so it is not fed.
    cost = {s: int(lengths[s]) - 1 for s in sequences}
    rows = [_fill_rows(share, cost, limits) for share in balance(cost, data_parallel)]
    count = max(len(share) for share in rows)
    longest = 0
    if limits.equal_lengths:
        longest = max(sum(cost[s] for s in row) for share in rows for row in share)
    micro_batches = tuple(
        tuple(
            _row(batch, share[i] if i < len(share) else (), limits.multiple, longest)
            for i in range(count)
        )
        for share in rows
    )
    responses = sequence_lengths(batch.response_offsets)
    return MiniBatch(
        index=index,
        sequences=sequences,
        micro_batches=micro_batches,
        num_tokens=int(responses[list(sequences)].sum()),
    )


def balance(cost: dict[int, int], parts: int) -> list[list[int]]:
    """Spread items over ``parts`` with nearly equal total cost: longest first, to the lightest.

    Ties go to the lower index, so that every rank finds the same answer. Each part is ascending.
    """
    shares: list[list[int]] = [[] for _ in range(parts)]
    heap = [(0, part) for part in range(parts)]
    for item in sorted(cost, key=lambda s: (-cost[s], s)):
        load, part = heapq.heappop(heap)
        shares[part].append(item)
        heapq.heappush(heap, (load + cost[item], part))
    return [sorted(share) for share in shares]


def _fill_rows(
    share: Sequence[int], cost: dict[int, int], limits: RowLimits
) -> list[tuple[int, ...]]:
    """First-fit-decreasing packing of one rank's sequences into rows."""
    rows: list[list[int]] = []
    loads: list[int] = []
    for s in sorted(share, key=lambda s: (-cost[s], s)):
        for i, load in enumerate(loads):
            full = limits.sequences is not None and len(rows[i]) >= limits.sequences
            if not full and load + cost[s] <= limits.tokens:
                rows[i].append(s)
                loads[i] += cost[s]
                break
        else:
            rows.append([s])
            loads.append(cost[s])
    return [tuple(sorted(row)) for row in rows]


def _row(batch: TrainBatch, sequences: Sequence[int], multiple: int, longest: int) -> MicroBatch:
    ids, positions, rows, targets, token_index = [], [], [], [], []
    starts = [0]
    for s in sequences:
        begin, end = int(batch.token_offsets[s]), int(batch.token_offsets[s + 1])
        prompt, first = int(batch.prompt_lengths[s]), int(batch.response_offsets[s])
        count = end - begin - prompt
        ids.append(batch.tokens[begin : end - 1])
        positions.append(torch.arange(end - 1 - begin))
        # Position prompt-1 predicts the first response token.
        rows.append(starts[-1] + prompt - 1 + torch.arange(count))
        targets.append(batch.tokens[begin + prompt : end])
        token_index.append(first + torch.arange(count))
        starts.append(starts[-1] + end - 1 - begin)
    padded = max(-(-max(starts[-1], longest, 1) // multiple) * multiple, multiple)
    if padding := padded - starts[-1]:
        ids.append(torch.zeros(padding, dtype=torch.int64))
        positions.append(torch.arange(padding))
        starts.append(padded)
    empty = [torch.zeros(0, dtype=torch.int64)]
    return MicroBatch(
        input_ids=torch.cat(ids),
        position_ids=torch.cat(positions),
        cu_seqlens=torch.tensor(starts, dtype=torch.int32),
        max_seqlen=max(b - a for a, b in itertools.pairwise(starts)),
        rows=torch.cat(rows or empty),
        targets=torch.cat(targets or empty),
        token_index=torch.cat(token_index or empty),
    )
