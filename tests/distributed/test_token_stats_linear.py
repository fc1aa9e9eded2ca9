"""The fused LM head equals the head in float64 followed by the dense statistics."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from dynamo_megatron.kernels import token_stats, token_stats_linear
from tests.ranks import run_on_ranks
from tests.unit.kernels.problems import CollectiveCounter, Problem, dense_stats

D, WIDTH, ROWS = 16, 60, 32


def _problem(ranks):
    """Hidden rows, a padded weight and the dense problem of the rows that count."""
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(ROWS, D, generator=generator)
    weight = torch.randn(ranks * WIDTH, D, generator=generator)
    rows = torch.randperm(ROWS, generator=generator)[:21].sort().values
    vocab_size = ranks * WIDTH - 7
    targets = torch.randint(0, vocab_size, (rows.numel(),), generator=generator)
    targets[3] = -1
    g = torch.randn(rows.numel(), generator=generator)
    k = torch.randn(rows.numel(), generator=generator)
    logits = hidden[rows].double() @ weight.double().t()
    return hidden, weight, rows, Problem(logits, targets, vocab_size, g, k)


def _check_linear(sequence_parallel, with_main_grad):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    hidden, weight, rows, dense = _problem(ranks)
    want, grad_logits = dense_stats(dense, 0.8)
    grad_hidden = torch.zeros(ROWS, D, dtype=torch.float64)
    grad_hidden[rows] = grad_logits @ weight.double()
    grad_weight = grad_logits.t() @ hidden[rows].double()

    mine = slice(rank * WIDTH, (rank + 1) * WIDTH)
    part = slice(rank * ROWS // ranks, (rank + 1) * ROWS // ranks)
    given = (hidden[part] if sequence_parallel else hidden).clone().requires_grad_()
    shard = weight[mine].clone().requires_grad_()
    if with_main_grad:
        shard.main_grad = torch.ones(WIDTH, D)  # what earlier micro-batches left there
    with CollectiveCounter() as forward:
        got = token_stats_linear(
            given,
            shard,
            dense.targets,
            temperature=0.8,
            vocab_size=dense.vocab_size,
            group=dist.group.WORLD,
            rows_T=rows,
            sequence_parallel=sequence_parallel,
            token_chunk=8,
        )
    with CollectiveCounter() as backward:
        (got.logp * dense.g + got.entropy * dense.k).sum().backward()

    for name in ("logp", "entropy", "lam", "sum_pi2", "q"):
        torch.testing.assert_close(
            getattr(got, name).double(), want[name], rtol=0, atol=1e-5, msg=name
        )
    wanted = grad_hidden[part] if sequence_parallel else grad_hidden
    torch.testing.assert_close(given.grad.double(), wanted, rtol=0, atol=1e-5)
    sums = shard.main_grad - 1.0 if with_main_grad else shard.grad
    torch.testing.assert_close(sums.double(), grad_weight[mine], rtol=0, atol=1e-5)
    assert not with_main_grad or not shard.grad.any()
    if ranks > 1:
        gather = ["_allgather_base_"]
        assert forward.calls == (gather * 2 if sequence_parallel else gather)
        assert backward.calls == (
            [*gather, "_reduce_scatter_base_"] if sequence_parallel else ["allreduce_"]
        )


@pytest.mark.parametrize("with_main_grad", [False, True])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_fused_head_equals_dense_head_in_values_gradients_and_collectives(
    ranks, sequence_parallel, with_main_grad
):
    run_on_ranks(_check_linear, ranks, sequence_parallel, with_main_grad)


def _check_equal_to_logits_variant(dtype):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    hidden, weight, _, dense = _problem(ranks)
    dense = replace(dense, targets=torch.arange(ROWS) % dense.vocab_size)
    mine = weight[rank * WIDTH : (rank + 1) * WIDTH].to(dtype).requires_grad_()
    settings = {
        "temperature": torch.linspace(0.5, 1.5, ROWS),
        "vocab_size": dense.vocab_size,
        "group": dist.group.WORLD,
    }
    hidden = hidden.to(dtype)
    fused = token_stats_linear(hidden, mine, dense.targets, token_chunk=5, **settings)
    plain = token_stats(hidden @ mine.t(), dense.targets, **settings)
    for name in ("logp", "entropy", "lam", "sum_pi2", "q"):
        torch.testing.assert_close(getattr(fused, name), getattr(plain, name), rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_head_equals_the_head_followed_by_token_stats(dtype):
    run_on_ranks(_check_equal_to_logits_variant, 2, dtype)
