"""Broadcasts, reductions and agreement on gloo ranks."""

import pytest
import torch
import torch.distributed as dist

from dynamo_megatron.parallel import broadcast
from dynamo_megatron.parallel.broadcast import broadcast_bytes, gather_bytes
from dynamo_megatron.parallel.digest import require_agreement
from dynamo_megatron.parallel.errors import DivergenceError, PeerError
from dynamo_megatron.parallel.reduce import (
    all_reduce_max,
    all_reduce_sum,
    any_rank,
    raise_together,
)
from tests.ranks import run_on_ranks


def world():
    return dist.group.WORLD


def test_broadcast_gives_every_rank_the_senders_bytes_whatever_the_chunk(monkeypatch):
    payload = bytes(range(256)) * 5 + b"end"

    def work():
        mine = payload if dist.get_rank() == 2 else None
        whole = broadcast_bytes(mine, src=2, group=world())
        monkeypatch.setattr(broadcast, "CHUNK_BYTES", 100)  # 13 chunks, the last one partial
        in_chunks = broadcast_bytes(mine, src=2, group=world())
        empty = broadcast_bytes(b"" if dist.get_rank() == 0 else None, src=0, group=world())
        return whole == payload, in_chunks == payload, empty

    assert run_on_ranks(work, 4) == [(True, True, b"")] * 4


def test_broadcast_without_a_payload_is_refused_on_every_rank():
    def work():
        with pytest.raises(ValueError, match="rank 1 is the sender and has payload None"):
            broadcast_bytes(None, src=1, group=world())

    run_on_ranks(work, 2)


def test_gather_returns_payloads_of_any_length_by_rank():
    def work():
        return gather_bytes(b"x" * (dist.get_rank() * 3), group=world())

    assert run_on_ranks(work, 3) == [[b"", b"xxx", b"xxxxxx"]] * 3


def test_reductions_leave_their_argument_alone_and_take_any_strides():
    def work():
        rank = dist.get_rank()
        strided = (torch.arange(6.0).reshape(2, 3) + rank).t()  # not contiguous
        if rank == 1:
            strided = strided.contiguous()  # equal shapes over unlike memory
        total = all_reduce_sum(strided, group=world())
        top = all_reduce_max(strided, group=world())
        # two ranks: (v + 0) + (v + 1) and max(v, v + 1), by hand
        assert total.tolist() == [[1.0, 7.0], [3.0, 9.0], [5.0, 11.0]]
        assert top.tolist() == [[1.0, 4.0], [2.0, 5.0], [3.0, 6.0]]
        assert strided.tolist() == [
            [0.0 + rank, 3 + rank],
            [1 + rank, 4 + rank],
            [2 + rank, 5 + rank],
        ]

    run_on_ranks(work, 2)


def test_any_rank_is_the_same_answer_everywhere():
    def work():
        return any_rank(dist.get_rank() == 2, group=world()), any_rank(False, group=world())

    assert run_on_ranks(work, 4) == [(True, False)] * 4


def test_agreement_passes_equal_values():
    run_on_ranks(lambda: require_agreement({"plan": "a", "sizes": "b"}, step=3, group=world()), 2)


def test_divergence_is_raised_on_every_rank_and_names_step_value_and_ranks():
    def work():
        rank = dist.get_rank()
        values = {"plan": "other" if rank == 2 else "same", "sizes": "equal"}
        if rank == 3:
            values["extra"] = "only here"
        with pytest.raises(DivergenceError) as caught:
            require_agreement(values, step=17, group=world())
        return str(caught.value)

    messages = run_on_ranks(work, 4)
    assert len(set(messages)) == 1
    assert "step 17" in messages[0]
    assert "'plan' differs: ranks [0, 1, 3] hold" in messages[0]
    assert "ranks [2] hold" in messages[0]
    assert "'extra' differs: ranks [0, 1, 2] hold nothing" in messages[0]
    assert "sizes" not in messages[0]


def test_a_failed_phase_ends_on_every_rank_with_the_first_failing_ranks_error():
    def work():
        rank = dist.get_rank()
        raise_together(None, phase="load", group=world())  # nobody failed
        error = OSError(f"disk {rank} is full") if rank in (1, 2) else None
        with pytest.raises(OSError if error else PeerError) as caught:
            raise_together(error, phase="save", group=world())
        return type(caught.value).__name__, str(caught.value)

    results = run_on_ranks(work, 4)
    assert results[1] == ("OSError", "disk 1 is full")
    assert results[2] == ("OSError", "disk 2 is full")
    for name, text in (results[0], results[3]):
        assert name == "PeerError"
        assert "rank 1 failed in phase 'save' with OSError: disk 1 is full" in text


def test_a_subgroup_speaks_of_global_ranks():
    def work():
        group = dist.new_group([1, 3])
        rank = dist.get_rank()
        said = _use_subgroup(group, rank) if rank in (1, 3) else None
        dist.barrier()  # a rank that leaves early tears its connections from the others
        return said

    assert run_on_ranks(work, 4)[1].startswith("rank 3 failed in phase 'p' with ValueError: x")


def _use_subgroup(group, rank):
    assert broadcast_bytes(b"hi" if rank == 3 else None, src=3, group=group) == b"hi"
    with pytest.raises(ValueError if rank == 3 else PeerError) as caught:
        raise_together(ValueError("x") if rank == 3 else None, phase="p", group=group)
    return str(caught.value)
