"""The helper that every distributed test stands on."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankFailed, run_on_ranks


def test_ranks_share_a_group_and_return_their_values_by_rank():
    def work(offset):
        rank_T = torch.tensor([dist.get_rank() + offset])
        dist.all_reduce(rank_T)
        return dist.get_rank(), rank_T

    results = run_on_ranks(work, 2, 10)
    assert [rank for rank, _ in results] == [0, 1]
    assert all(int(total) == 21 for _, total in results)


def test_a_failing_rank_fails_the_test_with_its_traceback_and_frees_the_others():
    def work():
        if dist.get_rank() == 1:
            raise ValueError("the cause")
        dist.barrier()

    start = time.monotonic()
    with pytest.raises(RankFailed, match=r"rank 1 failed.*\n(.*\n)*ValueError: the cause"):
        run_on_ranks(work, 2)
    assert time.monotonic() - start < 20


def test_a_hanging_rank_fails_in_time_and_says_where_it_hung():
    def work():
        if dist.get_rank() == 0:
            time.sleep(60)

    with pytest.raises(RankFailed, match=r"rank 0 did not finish in 3.0 s\n(.*\n)*.*in work"):
        run_on_ranks(work, 2, timeout=3.0)


def test_a_rank_that_dies_silently_is_named():
    def work():
        if dist.get_rank() == 1:
            os._exit(7)

    with pytest.raises(RankFailed, match=r"rank 1 failed \(exit code 7\)"):
        run_on_ranks(work, 2)
