"""Laws of the token statistics, of merging parts of a row, and of the choice of collectives."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from dynamo_megatron.kernels import token_stats
from dynamo_megatron.kernels.rows import forward_rows
from dynamo_megatron.kernels.shard import VocabShard, merge_partials, two_calls_pay_from
from tests.unit.kernels.problems import FIELDS, hostile_problem


@st.composite
def _logits(draw):
    """Random scale and offset, perhaps ties, a peak, masked entries."""
    columns = draw(st.integers(1, 70))
    seed = draw(st.integers(0, 2**31))
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(3, columns, generator=generator) * draw(st.sampled_from([0.0, 0.1, 3.0, 30.0]))
    if draw(st.booleans()):
        z = z.round()
    z += draw(st.sampled_from([0.0, 30.0, -300.0, 3000.0]))
    z[0, 0] += draw(st.sampled_from([0.0, 15.0, 80.0]))
    z[1, 1:] = torch.where(
        torch.rand(columns - 1, generator=generator) < draw(st.sampled_from([0.0, 0.5, 1.0])),
        -torch.inf,
        z[1, 1:],
    )
    targets = torch.randint(0, columns, (3,), generator=generator)
    return z, targets


@settings(max_examples=60, deadline=None)
@given(_logits())
def test_laws_of_the_statistics_hold_for_any_logits(problem):
    logits, targets = problem
    columns = logits.shape[1]
    leaf = logits.clone().requires_grad_()
    got = token_stats(leaf, targets, vocab_size=columns)
    assert (got.logp <= 1e-6).all()
    assert (got.entropy >= -1e-6).all()
    assert (got.entropy <= math.log(columns) + 2e-6).all()
    assert (got.sum_pi2 <= 1 + 1e-6).all()
    assert (got.sum_pi2 >= 1 / columns - 1e-6).all()
    finite = got.logp.isfinite()
    torch.testing.assert_close(
        got.lam[finite], (got.logp + got.entropy)[finite], rtol=2e-7, atol=1e-6
    )
    (got.logp[finite].sum() + 0.3 * got.entropy.sum()).backward()
    assert leaf.grad.sum(dim=-1).abs().max() < 2e-5, "adding a constant changes nothing"
    assert not leaf.grad[logits == -torch.inf].any(), "a masked entry has no gradient"


@settings(max_examples=40, deadline=None)
@given(_logits(), st.integers(-40, 40))
def test_adding_a_constant_to_the_logits_changes_nothing(problem, shift):
    logits, targets = problem
    logits = logits.clamp(min=-1e4).round()  # so that the sum is exact
    columns = logits.shape[1]
    before = token_stats(logits, targets, vocab_size=columns)
    after = token_stats(logits + 64.0 * shift, targets, vocab_size=columns)
    for name in FIELDS:
        torch.testing.assert_close(getattr(after, name), getattr(before, name), rtol=0, atol=0)


@settings(max_examples=40, deadline=None)
@given(_logits(), st.integers(1, 69), st.integers(1, 69))
def test_merging_parts_is_associative_and_independent_of_order(problem, cut, second_cut):
    logits, targets = problem
    columns = logits.shape[1]
    first, second = sorted((min(cut, columns), min(second_cut, columns)))
    inv = torch.full((3,), 1 / 0.7, dtype=torch.float64)

    def part(start, stop):
        shard = VocabShard(start, stop - start, columns, None)
        return forward_rows(
            logits[:, start:stop].contiguous(), targets, inv, shard, need_q=True
        ).double()

    a, b, c = part(0, first), part(first, second), part(second, columns)
    flat = merge_partials(torch.stack([a, b, c]), inv)
    nested = merge_partials(torch.stack([a, merge_partials(torch.stack([b, c]), inv)]), inv)
    turned = merge_partials(torch.stack([c, a, b]), inv)
    torch.testing.assert_close(nested, flat, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(turned, flat, rtol=1e-12, atol=1e-12)


def test_a_rows_statistics_do_not_depend_on_its_neighbours():
    # verl#3487: the same tokens padded or packed otherwise got other log-probabilities.
    problem = hostile_problem(ranks=1, dtype=torch.bfloat16, width=30_000)
    settings = {"vocab_size": problem.vocab_size, "temperature": 0.7}
    together = token_stats(problem.logits, problem.targets, **settings)
    for row in range(problem.tokens):
        alone = token_stats(
            problem.logits[row : row + 1], problem.targets[row : row + 1], **settings
        )
        for name in FIELDS:
            assert torch.equal(getattr(alone, name), getattr(together, name)[row : row + 1]), name


def test_q_is_the_expectation_of_pi_lambda_that_sampling_estimates():
    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(7), dtype=torch.float64) * 2
    got = token_stats(logits.float(), torch.tensor([0]), vocab_size=40)
    log_pi = logits[0].log_softmax(-1)
    value = log_pi.exp() * (log_pi + float(got.entropy))
    draws = value[torch.multinomial(log_pi.exp(), 200_000, replacement=True)]
    assert abs(float(draws.mean() - got.q)) < 4 * float(draws.std()) / 200_000**0.5


def test_entropy_moves_by_minus_pi_lambda_minus_q_when_a_token_is_raised():
    # dH = -eta (pi_y Lambda_y - Q) + O(eta^2) for a step eta on log pi(y): DynaMO's first order.
    logits = torch.randn(1, 30, generator=torch.Generator().manual_seed(9), dtype=torch.float64) * 2
    target = torch.tensor([4])
    stats = token_stats(logits, target, vocab_size=30)
    predicted = -(stats.logp.exp() * stats.lam - stats.q)
    step = torch.nn.functional.one_hot(target, 30) - logits.softmax(-1)
    errors = []
    for eta in (1e-2, 1e-3, 1e-4):
        moved = token_stats(logits + eta * step, target, vocab_size=30).entropy - stats.entropy
        errors.append(abs(float(moved / eta / predicted) - 1))
    assert errors[2] < 1e-3
    assert errors[1] == pytest.approx(errors[0] / 10, rel=0.2)
    assert errors[2] == pytest.approx(errors[1] / 10, rel=0.2)


def test_two_collectives_are_taken_only_where_they_move_so_much_less_that_they_pay():
    # call 20 us, 300 GB/s, 24 bytes: 6e6 / (24 * 7 * 0.75) = 47619 tokens at 8 ranks.
    assert two_calls_pay_from(8) == pytest.approx(47619, abs=1)
    assert two_calls_pay_from(4) == pytest.approx(166667, abs=1)
    assert two_calls_pay_from(2) == math.inf
