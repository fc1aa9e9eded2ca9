"""Values, gradients and refusals of the token statistics on one shard."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch.autograd import gradcheck

from dynamo_megatron.kernels import token_stats
from dynamo_megatron.kernels.rows import forward_rows
from dynamo_megatron.kernels.shard import VocabShard, merge_partials, two_calls_pay_from
from tests.unit.kernels.problems import dense_stats, hostile_problem, ulp

IMPLEMENTATIONS = ["reference", "torch"]
FIELDS = ("logp", "entropy", "lam", "sum_pi2", "q")


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


def test_inference_mode_gives_the_same_numbers():
    logits, targets = torch.randn(3, 50), torch.tensor([4, -1, 2])
    want = token_stats(logits, targets, vocab_size=50)
    with torch.inference_mode():
        got = token_stats(logits * 1, targets, vocab_size=50)
    assert torch.equal(got.logp, want.logp)


def test_sums_stay_exact_over_a_vocabulary_of_262144():
    # Megatron-LM#2206: fused cross-entropies drifted above 250k ids.
    logits = torch.randn(2, 262_144, generator=torch.Generator().manual_seed(3)) * 0.3
    got = token_stats(logits, torch.tensor([0, 262_143]), vocab_size=262_144)
    log_pi = logits.double().log_softmax(-1)
    assert (got.entropy + (log_pi.exp() * log_pi).sum(-1)).abs().max() < 2e-6
    assert (got.logp - log_pi[[0, 1], [0, 262_143]]).abs().max() < 2e-6


def test_phantom_columns_do_not_leak_when_all_logits_are_low():
    # verl#2899: columns past the vocabulary counted as logit 0, 6 nats off where logits are at -15.
    logits = torch.full((1, 300), 0.0)
    logits[:, :257] = -15.0
    got = token_stats(logits, torch.tensor([256]), vocab_size=257)
    assert float(got.logp) == pytest.approx(-math.log(257), abs=1e-6)


def test_logits_far_below_zero_keep_a_finite_log_partition():
    # verl#7439: a running maximum that starts at 0 makes exp(-150) vanish and log Z -inf.
    logits = torch.full((1, 10), -150.0)
    got = token_stats(logits, torch.tensor([3]), vocab_size=10)
    assert float(got.logp) == pytest.approx(-math.log(10), abs=1e-6)
    assert float(got.entropy) == pytest.approx(math.log(10), abs=1e-6)


def test_masked_logits_give_a_finite_entropy_and_no_gradient_there():
    # TRL#7221, SkyRL#2259: 0 * -inf is NaN.
    logits = torch.tensor([[1.0, -torch.inf, 1.0]], requires_grad=True)
    got = token_stats(logits, torch.tensor([0]), vocab_size=3)
    assert float(got.entropy.detach()) == pytest.approx(math.log(2), abs=1e-6)
    (got.entropy + got.logp).sum().backward()
    torch.testing.assert_close(logits.grad, torch.tensor([[0.5, 0.0, -0.5]]))


def test_a_masked_target_is_impossible_and_its_gradient_finite():
    logits = torch.tensor([[1.0, -torch.inf, 1.0]], requires_grad=True)
    got = token_stats(logits, torch.tensor([1]), vocab_size=3)
    assert float(got.logp.detach()) == float(got.lam) == -torch.inf
    # d log pi(1) / dz = 1{1} - pi, and the entropy of two equals is at its maximum.
    (got.logp + 3.0 * got.entropy).sum().backward()
    torch.testing.assert_close(logits.grad, torch.tensor([[-0.5, 1.0, -0.5]]))


def test_bfloat16_logits_are_not_rounded_again_by_the_temperature():
    # Dividing bfloat16 logits by 0.7 in place costs 1.7e-2 nats on average.
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(64, 500, generator=generator) * 3).bfloat16()
    targets = torch.randint(0, 500, (64,), generator=generator)
    got = token_stats(logits, targets, vocab_size=500, temperature=0.7)
    want = (logits.double() / 0.7).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    assert (got.logp - want).abs().max() < 4e-6


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_a_nan_or_infinite_logit_stays_visible_in_its_row_only(impl):
    logits = torch.zeros(3, 5)
    logits[0, 1] = torch.nan
    logits[1, 2] = torch.inf
    got = token_stats(logits, torch.tensor([0, 0, 0]), vocab_size=5, impl=impl)
    for name in FIELDS:
        assert getattr(got, name)[:2].isnan().all(), name
        assert getattr(got, name)[2].isfinite(), name


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_a_row_without_any_finite_logit_is_nan(impl):
    logits = torch.full((1, 5), -torch.inf)
    got = token_stats(logits, torch.tensor([0]), vocab_size=5, impl=impl)
    assert got.logp.isnan().all()
    assert got.entropy.isnan().all()


def test_an_ignored_row_has_no_gradient_even_where_its_logits_are_nan():
    logits = torch.full((2, 5), torch.nan)
    logits[1] = 0.0
    leaf = logits.requires_grad_()
    got = token_stats(leaf * 1, torch.tensor([-100, 2]), vocab_size=5)
    assert float(got.logp[0].detach()) == float(got.lam[0]) == 0.0
    (got.logp + got.entropy).sum().backward()
    # through leaf * 1 only the op's own gradient arrives
    torch.testing.assert_close(leaf.grad[0], torch.zeros(5))


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


def test_vocabulary_of_one_is_certain():
    got = token_stats(torch.tensor([[3.0]]), torch.tensor([0]), vocab_size=1)
    assert [float(getattr(got, n)) for n in FIELDS] == [0.0, 0.0, 0.0, 1.0, 0.0]


def test_second_backward_raises_after_the_gradient_took_the_logits_place():
    leaf = torch.randn(4, 9, requires_grad=True)
    got = token_stats(leaf * 1, torch.tensor([0, 1, 2, 3]), vocab_size=9)
    got.logp.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        got.logp.sum().backward()


def test_second_backward_works_out_of_place():
    leaf = torch.randn(4, 9, requires_grad=True)
    got = token_stats(leaf * 1, torch.tensor([0, 1, 2, 3]), vocab_size=9, inplace_backward=False)
    got.logp.sum().backward(retain_graph=True)
    once = leaf.grad.clone()
    got.logp.sum().backward()
    torch.testing.assert_close(leaf.grad, 2 * once)


def test_in_place_gradient_is_the_logits_storage_and_a_leaf_keeps_its_values():
    logits = torch.randn(4, 9)
    leaf = logits.clone().requires_grad_()
    hidden = leaf * 1
    got = token_stats(hidden, torch.tensor([0, 1, 2, 3]), vocab_size=9)
    (grad,) = torch.autograd.grad(got.logp.sum(), hidden)
    assert grad.data_ptr() == hidden.data_ptr()

    got = token_stats(leaf, torch.tensor([0, 1, 2, 3]), vocab_size=9)
    got.logp.sum().backward()
    torch.testing.assert_close(leaf.detach(), logits, rtol=0, atol=0)
    torch.testing.assert_close(leaf.grad, grad)


def test_only_logp_and_wanted_entropy_carry_a_gradient():
    leaf = torch.randn(2, 5, requires_grad=True)
    for entropy_grad in (True, False):
        got = token_stats(leaf, torch.tensor([0, 1]), vocab_size=5, entropy_grad=entropy_grad)
        assert got.logp.requires_grad
        assert got.entropy.requires_grad is entropy_grad
        assert not any(t.requires_grad for t in (got.lam, got.sum_pi2, got.q))


@pytest.mark.parametrize("entropy_grad", [True, False])
def test_no_vocabulary_sized_tensor_but_the_logits_is_saved(entropy_grad):
    # slime#1523: an unused entropy kept [T, V] tensors for the backward.
    leaf = torch.randn(6, 4096, requires_grad=True)
    logits = leaf * 1
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        token_stats(logits, torch.arange(6), vocab_size=4096, entropy_grad=entropy_grad)
    others = [t for t in saved if t.data_ptr() != logits.data_ptr()]
    assert len(others) < len(saved)
    assert sum(t.numel() for t in others) <= 8 * 6
    with torch.no_grad():
        assert token_stats(logits, torch.arange(6), vocab_size=4096).logp.grad_fn is None


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


def test_two_collectives_are_taken_only_where_they_move_so_much_less_that_they_pay():
    # call 20 us, 300 GB/s, 24 bytes: 6e6 / (24 * 7 * 0.75) = 47619 tokens at 8 ranks.
    assert two_calls_pay_from(8) == pytest.approx(47619, abs=1)
    assert two_calls_pay_from(4) == pytest.approx(166667, abs=1)
    assert two_calls_pay_from(2) == math.inf


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"targets_T": torch.tensor([0, 5])}, "target 5 at row 1 is outside the vocabulary of 5"),
        ({"targets_T": torch.tensor([0])}, "targets must be \\[2\\] int64"),
        ({"targets_T": torch.tensor([0, 1], dtype=torch.int32)}, "int64"),
        ({"temperature": 0.0}, "temperature must be positive, got 0.0"),
        ({"temperature": torch.tensor([1.0, -1.0])}, "temperature -1.0 at row 1"),
        ({"temperature": torch.ones(3)}, "temperature must be a float or \\[2\\]"),
        ({"logits_TVp": torch.zeros(8, 2).t()}, "strides \\(1, 2\\)"),
        ({"logits_TVp": torch.zeros(2, 1, 8)}, "must be a \\[T, n\\] float tensor"),
        ({"vocab_size": 9}, "cover 8 of 9 ids.*group"),
        ({"vocab_start": 8}, "leaves ids 0..7 to other ranks"),
        ({"logits_TVp": torch.zeros(2, 8, dtype=torch.float64), "impl": "torch"}, "float64"),
        ({"impl": "fast"}, "impl='fast' is not available"),
    ],
)
def test_bad_input_is_refused_with_its_values(change, message):
    arguments = {
        "logits_TVp": torch.zeros(2, 8),
        "targets_T": torch.tensor([0, 1]),
        "vocab_size": 5,
    }
    with pytest.raises(ValueError, match=message):
        token_stats(**(arguments | change))
