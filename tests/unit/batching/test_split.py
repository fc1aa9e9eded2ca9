"""Rows, shares and mini-batches of a ragged batch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dynamo_megatron.batching.split import RowLimits, balance, plan_mini_batches, row_multiple
from dynamo_megatron.types import TrainBatch, ragged_offsets


def batch_of(lengths: list[tuple[int, int]], groups: list[int]) -> TrainBatch:
    """Sequences of (prompt, response) tokens; token values count up, so each is unique."""
    total = sum(p + r for p, r in lengths)
    num_tokens = sum(r for _, r in lengths)
    return TrainBatch(
        tokens=torch.arange(100, 100 + total),
        token_offsets=ragged_offsets([p + r for p, r in lengths]),
        prompt_lengths=torch.tensor([p for p, _ in lengths]),
        response_offsets=ragged_offsets([r for _, r in lengths]),
        group_index=torch.tensor(groups),
        sampler_logp=torch.zeros(num_tokens),
        advantages=torch.zeros(num_tokens),
    )


def plan(batch, **changes):
    values = {"num_groups": 2, "groups_per_mini_batch": 2, "data_parallel": 1}
    limits = changes.pop("limits", RowLimits(tokens=100))
    return plan_mini_batches(batch, limits=limits, **(values | changes))


def test_a_row_by_hand():
    # prompt 2, response 3 -> tokens 100..104; prompt 1, response 2 -> tokens 105..107
    batch = batch_of([(2, 3), (1, 2)], [0, 1])
    ((row,),) = plan(batch, limits=RowLimits(tokens=100, multiple=4))[0].micro_batches
    # without their last tokens, then two tokens of padding up to a multiple of 4
    assert row.input_ids.tolist() == [100, 101, 102, 103, 105, 106, 0, 0]
    assert row.position_ids.tolist() == [0, 1, 2, 3, 0, 1, 0, 1]
    assert row.cu_seqlens.tolist() == [0, 4, 6, 8]
    assert row.max_seqlen == 4
    assert row.rows.tolist() == [1, 2, 3, 4, 5]
    assert row.targets.tolist() == [102, 103, 104, 106, 107]
    assert row.token_index.tolist() == [0, 1, 2, 3, 4]


def test_every_row_predicts_the_next_token_of_its_own_sequence():
    batch = batch_of([(2, 3), (4, 1), (1, 6), (3, 3)], [0, 0, 1, 1])
    for row in plan(batch, limits=RowLimits(tokens=9))[0].micro_batches[0]:
        assert torch.equal(row.targets, row.input_ids[row.rows] + 1)


def test_mini_batches_hold_whole_groups_and_their_own_denominator():
    batch = batch_of([(2, 3), (2, 4), (1, 6), (3, 3)], [0, 0, 1, 2])
    plans = plan(batch, num_groups=3, groups_per_mini_batch=1)
    assert [p.sequences for p in plans] == [(0, 1), (2,), (3,)]
    assert [p.num_tokens for p in plans] == [7, 6, 3]
    assert [p.index for p in plans] == [0, 1, 2]


def test_a_mini_batch_without_sequences_is_left_out():
    batch = batch_of([(2, 3), (3, 3)], [0, 2])
    plans = plan(batch, num_groups=3, groups_per_mini_batch=1)
    assert [p.sequences for p in plans] == [(0,), (1,)]
    assert [p.index for p in plans] == [0, 1]


def test_an_empty_batch_has_no_plan():
    assert plan(batch_of([], [])) == ()


def test_a_sequence_longer_than_the_limit_gets_a_row_of_its_own():
    batch = batch_of([(5, 20), (2, 2), (2, 2)], [0, 0, 1])
    rows = plan(batch, limits=RowLimits(tokens=8))[0].micro_batches[0]
    assert sorted(row.input_ids.numel() for row in rows) == [6, 24]


def test_light_ranks_get_dummies_that_count_nothing():
    # rank 0 takes the long sequence in one row; rank 1 the three short ones in three rows
    batch = batch_of([(2, 30), (2, 2), (2, 2), (2, 2)], [0, 0, 1, 1])
    (mini_batch,) = plan(batch, data_parallel=2, limits=RowLimits(tokens=32, sequences=1))
    heavy, light = mini_batch.micro_batches
    assert len(heavy) == len(light) == 3
    assert [row.rows.numel() for row in heavy] == [30, 0, 0]
    assert all(row.input_ids.numel() >= 1 for row in heavy), "a dummy still runs forward"


def test_pipeline_rows_of_a_mini_batch_have_one_length():
    batch = batch_of([(2, 30), (2, 2), (2, 2), (2, 2)], [0, 0, 1, 1])
    limits = RowLimits(tokens=32, sequences=1, equal_lengths=True, multiple=8)
    (mini_batch,) = plan(batch, data_parallel=2, limits=limits)
    rows = [row for share in mini_batch.micro_batches for row in share]
    assert {row.input_ids.numel() for row in rows} == {32}


@pytest.mark.parametrize(
    ("arguments", "want"),
    [
        ({"tensor": 4, "sequence_parallel": False}, 1),
        ({"tensor": 4, "sequence_parallel": True}, 4),
        ({"tensor": 2, "sequence_parallel": True, "context": 2}, 8),
        ({"tensor": 1, "sequence_parallel": False, "context": 3}, 6),
    ],
)
def test_row_multiple(arguments, want):
    assert row_multiple(**arguments) == want


def test_balance_by_hand():
    # longest first to the lightest: 9 -> a, 7 -> b, 5 -> b(12), 4 -> a(13), 1 -> b(13)
    assert balance({0: 4, 1: 9, 2: 7, 3: 1, 4: 5}, 2) == [[0, 1], [2, 3, 4]]


sequences = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 12)), min_size=1, max_size=14)


@given(
    lengths=sequences,
    data_parallel=st.integers(1, 4),
    tokens=st.integers(1, 40),
    limit=st.none() | st.integers(1, 3),
    multiple=st.sampled_from([1, 2, 8]),
    equal=st.booleans(),
    per_mini_batch=st.integers(1, 5),
)
def test_every_response_token_is_in_exactly_one_row(
    lengths, data_parallel, tokens, limit, multiple, equal, per_mini_batch
):
    groups = [s // 3 for s in range(len(lengths))]
    batch = batch_of(lengths, groups)
    limits = RowLimits(tokens=tokens, sequences=limit, multiple=multiple, equal_lengths=equal)
    plans = plan_mini_batches(
        batch,
        num_groups=groups[-1] + 1,
        groups_per_mini_batch=per_mini_batch,
        data_parallel=data_parallel,
        limits=limits,
    )
    rows = [row for p in plans for share in p.micro_batches for row in share]
    index = torch.cat([row.token_index for row in rows])
    assert sorted(index.tolist()) == list(range(batch.num_response_tokens))
    assert sum(p.num_tokens for p in plans) == batch.num_response_tokens
    for p in plans:
        assert len({len(share) for share in p.micro_batches}) == 1
    for row in rows:
        assert row.input_ids.numel() % multiple == 0
        assert int(row.cu_seqlens[-1]) == row.input_ids.numel() == row.position_ids.numel()
        assert torch.equal(row.targets, row.input_ids[row.rows] + 1)
