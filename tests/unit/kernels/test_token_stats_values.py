"""The token statistics of one shard equal hand-computed and dense values."""

import math

import pytest
import torch
from torch.autograd import gradcheck

from dynamo_megatron.kernels import token_stats
from tests.unit.kernels.problems import FIELDS, IMPLEMENTATIONS, dense_stats, hostile_problem, ulp


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_statistics_equal_hand_computed_values(impl):
    # softmax([2, 1, 0]) = [.6652409558, .2447284711, .0900305732]; uniform over 4: H = ln 4, Q = 0.
    # Two tokens at 1/2: H = ln 2, Lambda = 0, Q = 0.
    inf = float("inf")
    logits = torch.tensor(
        [[2.0, 1, 0, -inf], [2.0, 1, 0, -inf], [7.0, 7, 7, 7], [3.0, -inf, 3, -inf]]
    )
    got = token_stats(logits, torch.tensor([0, 2, 3, 2]), vocab_size=4, impl=impl)
    want = {
        "logp": [-0.4076059644, -2.4076059644, -math.log(4), -math.log(2)],
        "entropy": [0.8323955818, 0.8323955818, math.log(4), math.log(2)],
        "lam": [0.4247896174, -1.5752103826, 0.0, 0.0],
        "sum_pi2": [0.5105431583, 0.5105431583, 0.25, 0.5],
        "q": [0.1407703575, 0.1407703575, 0.0, 0.0],
    }
    for name, values in want.items():
        torch.testing.assert_close(
            getattr(got, name), torch.tensor(values), rtol=0, atol=3e-7, msg=name
        )


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_temperature_divides_the_logits_of_every_statistic(impl):
    # [2, 1, 0] at temperature 2 is softmax([1, .5, 0]): Z = 5.3670031, mu = .6603192 below the max.
    z = torch.tensor([1.0, 0.5, 0.0], dtype=torch.float64)
    pi = z.exp() / z.exp().sum()
    entropy = -(pi * pi.log()).sum()
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    for temperature in (2.0, torch.tensor([2.0])):
        got = token_stats(
            logits, torch.tensor([1]), vocab_size=3, temperature=temperature, impl=impl
        )
        assert float(got.logp) == pytest.approx(float(pi[1].log()), abs=2e-7)
        assert float(got.entropy) == pytest.approx(float(entropy), abs=2e-7)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hostile_logits_equal_dense_float64(impl, dtype):
    problem = hostile_problem(ranks=1, dtype=dtype, width=700)
    want, want_grad = dense_stats(problem, 0.7)
    leaf = problem.logits.clone().requires_grad_()
    got = token_stats(
        leaf * 1, problem.targets, temperature=0.7, vocab_size=problem.vocab_size, impl=impl
    )
    (got.logp * problem.g + got.entropy * problem.k).sum().backward()
    for name in FIELDS:
        bound = torch.maximum(torch.tensor(4e-6), 2 * ulp(want[name]))
        # The reference is plain float32: it scales before it subtracts, 400 / 0.7 costs 6e-5.
        bound = bound if impl == "torch" else bound + 5e-4
        assert (getattr(got, name).double() - want[name]).abs().le(bound).all(), name
    bound = 2e-6 if dtype is torch.float32 else ulp(want_grad, dtype) + 2e-6
    bound = bound if impl == "torch" else bound + 5e-4
    assert (leaf.grad.double() - want_grad).abs().le(bound).all()
    assert not leaf.grad[:, problem.vocab_size :].any(), "padding has no gradient"
    assert not leaf.grad[problem.targets < 0].any(), "an ignored row has no gradient"


def test_reference_equals_the_definition_in_float64_and_passes_gradcheck():
    problem = hostile_problem(ranks=1, dtype=torch.float64, tokens=12, width=60)
    temperature = torch.linspace(0.5, 2.0, 12)
    want, _ = dense_stats(problem, temperature)
    got = token_stats(
        problem.logits, problem.targets, temperature=temperature, vocab_size=problem.vocab_size
    )
    for name in FIELDS:
        torch.testing.assert_close(getattr(got, name), want[name], rtol=1e-9, atol=1e-9)

    logits = torch.randn(3, 7, dtype=torch.float64, requires_grad=True)

    def differentiable(z):
        stats = token_stats(z, torch.tensor([0, 4, -1]), vocab_size=6, temperature=0.7)
        return stats.logp, stats.entropy[:2]  # the ignored row's entropy is a constant

    assert gradcheck(differentiable, logits)


def test_inference_mode_gives_the_same_numbers():
    logits, targets = torch.randn(3, 50), torch.tensor([4, -1, 2])
    want = token_stats(logits, targets, vocab_size=50)
    with torch.inference_mode():
        got = token_stats(logits * 1, targets, vocab_size=50)
    assert torch.equal(got.logp, want.logp)


def test_vocabulary_of_one_is_certain():
    got = token_stats(torch.tensor([[3.0]]), torch.tensor([0]), vocab_size=1)
    assert [float(getattr(got, n)) for n in FIELDS] == [0.0, 0.0, 0.0, 1.0, 0.0]


def test_without_q_the_other_statistics_are_unchanged_and_q_is_nan():
    logits = torch.randn(3, 50)
    targets = torch.tensor([4, -1, 2])
    full = token_stats(logits, targets, vocab_size=50)
    got = token_stats(logits, targets, vocab_size=50, need_q=False)
    for name in ("logp", "entropy", "lam"):
        torch.testing.assert_close(getattr(got, name), getattr(full, name), rtol=0, atol=0)
    assert got.q.isnan().all()
    assert got.sum_pi2.isnan().all()


def test_no_tokens_give_empty_statistics_and_an_empty_gradient():
    leaf = torch.zeros(0, 5, requires_grad=True)
    got = token_stats(leaf * 1, torch.zeros(0, dtype=torch.int64), vocab_size=5)
    assert got.q.shape == (0,)
    got.logp.sum().backward()
    assert leaf.grad.shape == (0, 5)
