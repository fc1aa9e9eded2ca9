"""Sharded over the vocabulary equals dense in float64: values, gradients, collectives."""

import pytest
import torch
import torch.distributed as dist

from dynamo_megatron.kernels import shard, token_stats
from tests.ranks import run_on_ranks
from tests.unit.kernels.problems import (
    CollectiveCounter,
    Problem,
    dense_stats,
    hostile_problem,
    ulp,
)

FIELDS = ("logp", "entropy", "lam", "sum_pi2", "q")


def _check_sharded_equals_dense(dtype, per_token_temperature):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    problem = hostile_problem(ranks=ranks, dtype=dtype)
    temperature = torch.linspace(0.5, 2.0, problem.tokens) if per_token_temperature else 0.7
    want, want_grad = dense_stats(problem, temperature)

    width = problem.logits.shape[1] // ranks
    columns = slice(rank * width, (rank + 1) * width)
    leaf = problem.logits[:, columns].clone().requires_grad_()
    with CollectiveCounter() as forward:
        got = token_stats(
            leaf * 1,
            problem.targets,
            temperature=temperature,
            vocab_size=problem.vocab_size,
            group=dist.group.WORLD,
        )
    with CollectiveCounter() as backward:
        (got.logp * problem.g + got.entropy * problem.k).sum().backward()
    assert forward.calls == (["_allgather_base_"] if ranks > 1 else [])
    assert forward.bytes_sent == (24 * problem.tokens if ranks > 1 else 0)
    assert backward.calls == []

    assert (
        (got.logp.double() - want["logp"])
        .abs()
        .le(torch.maximum(torch.tensor(4e-6), ulp(want["logp"])))
        .all()
    )
    for name in ("entropy", "lam", "sum_pi2", "q"):
        assert (getattr(got, name).double() - want[name]).abs().max() < 4e-6, name
    grad_bound = 2e-6 if dtype is torch.float32 else ulp(want_grad[:, columns], dtype) + 2e-6
    assert (leaf.grad.double() - want_grad[:, columns]).abs().le(grad_bound).all()
    assert not leaf.grad[problem.targets < 0].any()
    padding = torch.arange(columns.start, columns.stop) >= problem.vocab_size
    assert not leaf.grad[:, padding].any()
    return torch.stack([getattr(got, name).detach() for name in FIELDS])


@pytest.mark.parametrize("per_token_temperature", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_sharded_stats_and_gradients_equal_dense_float64(ranks, dtype, per_token_temperature):
    by_rank = run_on_ranks(_check_sharded_equals_dense, ranks, dtype, per_token_temperature)
    for stats in by_rank[1:]:
        assert torch.equal(stats, by_rank[0])


def _check_two_calls(monkeypatch):
    monkeypatch.setattr(shard, "CALL_SECONDS", 0.0)  # every token count is above the break-even
    rank, ranks = dist.get_rank(), dist.get_world_size()
    problem = hostile_problem(ranks=ranks, dtype=torch.float32)
    want, want_grad = dense_stats(problem, 0.7)
    width = problem.logits.shape[1] // ranks
    columns = slice(rank * width, (rank + 1) * width)
    leaf = problem.logits[:, columns].clone().requires_grad_()
    with CollectiveCounter() as counter:
        got = token_stats(
            leaf * 1,
            problem.targets,
            temperature=0.7,
            vocab_size=problem.vocab_size,
            group=dist.group.WORLD,
        )
    assert counter.calls == ["allreduce_", "allreduce_"]
    assert counter.bytes_sent == 24 * problem.tokens
    (got.logp * problem.g + got.entropy * problem.k).sum().backward()
    assert counter.calls == ["allreduce_", "allreduce_"]
    for name in FIELDS:
        bound = torch.maximum(torch.tensor(4e-6), 2 * ulp(want[name]))
        assert (getattr(got, name).double() - want[name]).abs().le(bound).all(), name
    assert (leaf.grad.double() - want_grad[:, columns]).abs().max() < 2e-6
    return torch.stack([getattr(got, name).detach() for name in FIELDS])


def test_above_the_break_even_a_maximum_and_a_sum_give_the_same_statistics(monkeypatch):
    by_rank = run_on_ranks(_check_two_calls, 4, monkeypatch)
    for stats in by_rank[1:]:
        assert torch.equal(stats, by_rank[0])


def _check_nothing_but_padding():
    rank, ranks = dist.get_rank(), dist.get_world_size()
    width, vocab_size = 10, 15  # ranks 2 and 3 hold no id at all
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(3, ranks * width, generator=generator)
    logits[:, vocab_size:] = 60.0
    targets, ones = torch.tensor([0, 9, 14]), torch.ones(3)
    want, want_grad = dense_stats(Problem(logits, targets, vocab_size, ones, ones), 1.0)
    columns = slice(rank * width, (rank + 1) * width)
    leaf = logits[:, columns].clone().requires_grad_()
    got = token_stats(leaf * 1, targets, vocab_size=vocab_size, group=dist.group.WORLD)
    (got.logp + got.entropy).sum().backward()
    torch.testing.assert_close(got.q.double(), want["q"], rtol=0, atol=1e-6)
    torch.testing.assert_close(leaf.grad.double(), want_grad[:, columns], rtol=0, atol=1e-6)


def test_a_rank_that_holds_only_padding_takes_part():
    run_on_ranks(_check_nothing_but_padding, 4)


def _check_empty():
    width = 8
    leaf = torch.zeros(0, width, requires_grad=True)
    with CollectiveCounter() as counter:
        got = token_stats(
            leaf * 1,
            torch.zeros(0, dtype=torch.int64),
            vocab_size=width * dist.get_world_size(),
            group=dist.group.WORLD,
        )
    (got.logp.sum() + got.entropy.sum()).backward()
    assert counter.calls == ["_allgather_base_"]
    assert leaf.grad.shape == (0, width)


def test_an_empty_micro_batch_joins_the_collective_and_has_a_gradient():
    run_on_ranks(_check_empty, 2)
