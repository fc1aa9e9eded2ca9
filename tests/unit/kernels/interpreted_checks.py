"""The Triton kernels in Triton's interpreter. Run by test_own_process.py in a process of its
own, because the interpreter is chosen by TRITON_INTERPRET when the kernels are imported.

Problems stay small: the interpreter handles about a million columns a second.
"""

import os

import pytest
import torch
import torch.distributed as dist

from dynamo_megatron.kernels import token_stats, token_stats_linear, triton_kernels
from dynamo_megatron.kernels.finish import finish
from dynamo_megatron.kernels.rows import backward_rows
from dynamo_megatron.kernels.shard import VocabShard
from dynamo_megatron.kernels.triton_engine import (
    triton_finish,
    triton_gradient,
    triton_partials,
)
from tests.ranks import run_on_ranks
from tests.unit.kernels.problems import dense_stats, hostile_problem, ulp

assert os.environ.get("TRITON_INTERPRET") == "1"
FIELDS = ("logp", "entropy", "lam", "sum_pi2", "q")


@pytest.mark.parametrize("shards", [1, 2, 4])
@pytest.mark.parametrize(
    ("dtype", "block"),
    [(torch.float32, 32), (torch.float32, 4096), (torch.bfloat16, 64), (torch.float16, 64)],
)
def test_kernels_equal_dense_float64_over_any_blocks_and_shards(dtype, shards, block):
    problem = hostile_problem(ranks=shards, dtype=dtype, tokens=14, width=75)
    want, want_grad = dense_stats(problem, 0.7)
    inv = torch.full((problem.tokens,), 1 / 0.7, dtype=torch.float64)
    width = problem.logits.shape[1] // shards
    parts, logits, shard_of = [], [], []
    for index in range(shards):
        shard_of.append(VocabShard(index * width, width, problem.vocab_size, None))
        columns = slice(index * width, (index + 1) * width)
        logits.append(problem.logits[:, columns].contiguous())
        parts.append(
            triton_partials(
                logits[-1], problem.targets, inv, shard_of[-1], need_q=True, block=block, warps=4
            )
        )
    stats, state = triton_finish(torch.stack(parts), problem.targets, inv)
    for name in FIELDS:
        bound = torch.maximum(torch.tensor(4e-6), ulp(want[name]))
        assert (getattr(stats, name).double() - want[name]).abs().le(bound).all(), name
    grads = []
    for z, shard in zip(logits, shard_of, strict=True):
        triton_gradient(
            z, z, problem.targets, inv, state, shard, problem.g, problem.k, block=block, warps=4
        )
        grads.append(z)
    # One ulp, not a half: the interpreter truncates float32 to 16 bits where a GPU rounds.
    bound = 2e-6 if dtype is torch.float32 else ulp(want_grad, dtype) + 2e-6
    grad = torch.cat(grads, dim=1)
    assert (grad.double() - want_grad).abs().le(bound).all()
    assert not grad[:, problem.vocab_size :].any()
    assert not grad[problem.targets < 0].any()


def test_finish_kernel_equals_torch_finish_with_and_without_q():
    generator = torch.Generator().manual_seed(4)
    for rows in (6, 4):
        parts = torch.rand(3, rows, 131, generator=generator) + 0.5
        parts[:, 2] *= -1.0  # s1
        parts[1, 0, 5] = -torch.inf  # a shard with nothing
        parts[1, 1:, 5] = 0.0
        parts[:2, 3] = -torch.inf  # the target is the last shard's
        targets = torch.arange(131) - 1
        inv = torch.linspace(0.5, 2.0, 131, dtype=torch.float64)
        want, want_state = finish(parts, targets, inv)
        got, state = triton_finish(parts, targets, inv)
        for name in FIELDS:
            torch.testing.assert_close(
                getattr(got, name), getattr(want, name), rtol=2e-7, atol=1e-7, equal_nan=True
            )
        for name in ("m", "log_s0", "mu"):
            torch.testing.assert_close(getattr(state, name), getattr(want_state, name))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's word for inf - inf and log 0
def test_nan_and_infinite_logits_stay_visible_in_their_rows_only():
    # tl.max and tl.maximum drop NaN unless told to propagate it.
    logits = torch.zeros(4, 70)
    logits[0, 40] = torch.nan
    logits[1, 2] = torch.inf
    logits[2] = -torch.inf
    got = token_stats(logits, torch.zeros(4, dtype=torch.int64), vocab_size=70, impl="triton")
    for name in ("logp", "entropy", "q"):
        assert getattr(got, name)[:3].isnan().all(), name
        assert getattr(got, name)[3].isfinite(), name


def test_ignored_row_is_exactly_zero_even_where_its_logits_are_nan():
    leaf = torch.full((1, 9), torch.nan).requires_grad_()
    got = token_stats(leaf * 1, torch.tensor([-1]), vocab_size=9, impl="triton")
    (got.logp + got.entropy).sum().backward()
    torch.testing.assert_close(leaf.grad, torch.zeros(1, 9))


@pytest.mark.parametrize(("with_g", "with_k"), [(True, False), (False, True), (False, False)])
def test_a_missing_upstream_gradient_counts_as_zero(with_g, with_k):
    problem = hostile_problem(ranks=1, dtype=torch.float32, tokens=12, width=75)
    inv = torch.ones(12, dtype=torch.float64)
    shard = VocabShard(0, 75, problem.vocab_size, None)
    partial = triton_partials(problem.logits, problem.targets, inv, shard, need_q=False)
    _, state = finish(partial[None], problem.targets, inv)
    upstream = (problem.g if with_g else None, problem.k if with_k else None)
    got, want = torch.empty_like(problem.logits), torch.empty_like(problem.logits)
    triton_gradient(problem.logits, got, problem.targets, inv, state, shard, *upstream)
    backward_rows(problem.logits, want, problem.targets, inv, state, shard, *upstream)
    torch.testing.assert_close(got, want, rtol=0, atol=2e-6)


def test_second_backward_raises_although_the_kernel_writes_behind_autograd():
    leaf = torch.randn(2, 20, requires_grad=True)
    got = token_stats(leaf * 1, torch.tensor([0, 1]), vocab_size=20, impl="triton")
    got.logp.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        got.logp.sum().backward()


def test_rows_past_two_to_the_31_elements_are_addressed_right():
    # Row 2 starts at element 2^31. The memory is never touched but for the first columns.
    width = 2**30
    logits = torch.empty(3, width, dtype=torch.bfloat16)
    values = torch.randn(3, 50, generator=torch.Generator().manual_seed(6))
    logits[:, :50] = values
    targets = torch.tensor([1, 2, 3])
    inv = torch.ones(3, dtype=torch.float64)
    shard = VocabShard(0, width, 50, None)
    partial = triton_partials(logits, targets, inv, shard, need_q=True, block=64, warps=4)
    stats, state = triton_finish(partial[None], targets, inv)
    log_pi = values.bfloat16().double().log_softmax(-1)
    torch.testing.assert_close(
        stats.logp.double(), log_pi.gather(1, targets[:, None])[:, 0], rtol=0, atol=2e-6
    )
    grid = (3, 1)  # the first block of each row
    triton_kernels.gradient_kernel[grid](
        *(logits, logits, targets, inv, state.m, state.log_s0, state.mu, torch.ones(3), None),
        *(width, 50, 0),
        BLOCK=64,
        HAS_G=True,
        HAS_K=False,
    )
    want = torch.nn.functional.one_hot(targets, 50) - log_pi.exp()
    torch.testing.assert_close(logits[:, :50].double(), want, rtol=2**-7, atol=1e-6)


def _check_ranks():
    rank, ranks = dist.get_rank(), dist.get_world_size()
    problem = hostile_problem(ranks=ranks, dtype=torch.float32, tokens=12, width=60)
    want, want_grad = dense_stats(problem, 0.7)
    columns = slice(rank * 60, (rank + 1) * 60)
    leaf = problem.logits[:, columns].clone().requires_grad_()
    got = token_stats(
        leaf * 1,
        problem.targets,
        temperature=0.7,
        vocab_size=problem.vocab_size,
        group=dist.group.WORLD,
        impl="triton",
    )
    (got.logp * problem.g + got.entropy * problem.k).sum().backward()
    for name in FIELDS:
        bound = torch.maximum(torch.tensor(4e-6), ulp(want[name]))
        assert (getattr(got, name).double() - want[name]).abs().le(bound).all(), name
    assert (leaf.grad.double() - want_grad[:, columns]).abs().max() < 2e-6
    return torch.stack([getattr(got, name).detach() for name in FIELDS])


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_agree_bitwise_and_with_dense(ranks):
    by_rank = run_on_ranks(_check_ranks, ranks)
    for stats in by_rank[1:]:
        assert torch.equal(stats, by_rank[0])


def test_fused_head_runs_on_the_kernels():
    generator = torch.Generator().manual_seed(8)
    hidden = torch.randn(6, 8, generator=generator)
    weight = torch.randn(50, 8, generator=generator)
    targets = torch.tensor([0, 5, -1, 44, 9, 2])
    gradients = {}
    for impl in ("torch", "triton"):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        got = token_stats_linear(h, w, targets, vocab_size=45, token_chunk=4, impl=impl)
        (got.logp.sum() + 0.1 * got.entropy.sum()).backward()
        gradients[impl] = (got.q, h.grad, w.grad)
    for ours, theirs in zip(gradients["triton"], gradients["torch"], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6)
