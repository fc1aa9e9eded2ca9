"""Errors against float64 over a vocabulary of 152,064 ids, on 1 to 8 ranks.

The reference takes the same rounded logits, so what is measured is the op alone.
"""

import math
from functools import cache

import pytest
import torch
import torch.distributed as dist

from dynamo_megatron.kernels import token_stats
from tests.ranks import run_on_ranks
from tests.unit.kernels.problems import Problem, dense_stats, ulp

VOCAB, PADDED = 152_064, 152_576  # the second divides by 128 times 8
KINDS = (
    "normal",
    "plus 30",
    "minus 300",
    "plus 3000",
    "minus 3000",
    "peak 15",
    "peak 30",
    "peak 80",
    "uniform",
    "98 % masked",
    "two peaks",
    "zipf",
)


@cache
def _problem(dtype):
    """Two rows of each kind, target in the tail and at the peak, padding at +60; and its answer."""
    generator = torch.Generator().manual_seed(11)
    z = torch.randn(2 * len(KINDS), PADDED, generator=generator) * 2
    targets = torch.randint(0, VOCAB, (2 * len(KINDS),), generator=generator)
    for index, kind in enumerate(KINDS):
        rows = slice(2 * index, 2 * index + 2)
        peak = int(targets[2 * index])
        if kind.startswith(("plus", "minus")):
            sign, size = kind.split()
            z[rows] += float(size) if sign == "plus" else -float(size)
        elif kind.startswith("peak"):
            z[rows, peak] = float(kind.split()[1])
        elif kind == "uniform":
            z[rows] = 2.5
        elif kind == "98 % masked":
            masked = torch.rand(PADDED, generator=generator) < 0.98
            masked[targets[rows]] = False
            z[rows, masked] = -torch.inf
        elif kind == "two peaks":
            z[rows, peak] = z[rows, (peak + 77_777) % VOCAB] = 30.0
        else:
            z[rows] = -torch.arange(1, PADDED + 1).float().log() * 1.1
    z[:, VOCAB:] = 60.0
    g = torch.randn(2 * len(KINDS), generator=generator)
    k = torch.randn(2 * len(KINDS), generator=generator)
    problem = Problem(z.to(dtype), targets, VOCAB, g, k)
    return problem, *dense_stats(problem, 1.0)


def _check(dtype):
    problem, want, want_grad = _problem(dtype)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    columns = slice(rank * PADDED // ranks, (rank + 1) * PADDED // ranks)
    leaf = problem.logits[:, columns].clone().requires_grad_()
    got = token_stats(leaf * 1, problem.targets, vocab_size=VOCAB, group=dist.group.WORLD)
    (got.logp * problem.g + got.entropy * problem.k).sum().backward()

    with torch.no_grad():
        errors = _errors_in_bounds(got, want, leaf.grad, want_grad[:, columns])
        for name, error in errors.items():
            worst = int(error.argmax())
            assert error[worst] <= 1, f"{name}: {error[worst]:.2f} bounds, {KINDS[worst // 2]}"
        stats = torch.stack([got.logp, got.entropy, got.lam, got.sum_pi2, got.q])
        return stats, {name: float(error.max()) for name, error in errors.items()}


def _errors_in_bounds(got, want, grad, want_grad):
    """Each value's error by token, in units of its bound."""
    grad_bound = torch.tensor(2e-6)
    if grad.dtype is not torch.float32:
        grad_bound = ulp(want_grad, grad.dtype) + 2e-6
    return {
        "logp": (got.logp - want["logp"]).abs() / ulp(want["logp"]).clamp(min=4e-6),
        "entropy": (got.entropy - want["entropy"]).abs() / 4e-6,
        "q": (got.q - want["q"]).abs() / (2e-6 * want["q_scale"] + 1e-9),
        "sum_pi2": (got.sum_pi2 - want["sum_pi2"]).abs() / (2e-6 * want["sum_pi2"]),
        "lam": (got.lam - want["lam"]).abs() / ulp(want["lam"]).clamp(min=4e-6),
        "gradient": ((grad - want_grad).abs() / grad_bound).amax(dim=-1),
    }


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_errors_stay_within_their_bounds_and_all_ranks_agree_bitwise(ranks, dtype):
    _problem(dtype)  # once, before the fork
    by_rank = run_on_ranks(_check, ranks, dtype, timeout=120.0)
    print({name: round(max(e[name] for _, e in by_rank), 2) for name in by_rank[0][1]})
    for stats, _ in by_rank[1:]:
        assert torch.equal(stats, by_rank[0][0])


def test_the_cases_span_the_entropies_from_certainty_to_uniform():
    _, want, _ = _problem(torch.float32)
    assert want["entropy"].min() < 1e-25
    assert want["entropy"].max() == pytest.approx(math.log(VOCAB))
