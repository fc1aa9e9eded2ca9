"""Sharded over the vocabulary equals dense in float64: values, gradients, collectives."""

import pytest
import torch
import torch.distributed as dist

from dynamo_megatron.kernels import token_stats
from tests.ranks import run_on_ranks
from tests.unit.kernels.problems import CollectiveCounter, dense_stats, hostile_problem, ulp

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
