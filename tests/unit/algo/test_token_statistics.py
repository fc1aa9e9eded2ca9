import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dynamo_megatron.algo.token_statistics import dense_token_stats

f64 = torch.float64


def test_statistics_of_the_softmax_of_2_1_0():
    logits = torch.tensor([[2.0, 1.0, 0.0]] * 3, dtype=f64)
    stats = dense_token_stats(logits, torch.tensor([0, 1, 2]))
    pi = torch.tensor([0.6652409557748218, 0.24472847105479764, 0.09003057317038046], dtype=f64)
    close = {"rtol": 1e-14, "atol": 1e-16}
    torch.testing.assert_close(stats.logp.exp(), pi, **close)
    torch.testing.assert_close(
        stats.entropy, torch.full((3,), 0.8323955818399389, dtype=f64), **close
    )
    pi_lam = torch.tensor(
        [0.28258745107944216, -0.14077035746963013, -0.14181709360981215], dtype=f64
    )
    torch.testing.assert_close(stats.logp.exp() * stats.lam, pi_lam, rtol=1e-13, atol=0)
    torch.testing.assert_close(stats.q, torch.full((3,), 0.14077035746963, dtype=f64), **close)
    torch.testing.assert_close(stats.sum_pi2, pi.square().sum().expand(3), **close)


def test_a_uniform_row_has_the_entropy_of_its_size_and_no_change():
    stats = dense_token_stats(torch.full((1, 8), 5.0), torch.tensor([3]))
    assert stats.entropy.item() == pytest.approx(math.log(8))
    assert stats.lam.item() == 0 and stats.q.item() == 0 and stats.sum_pi2.item() == 0.125


def draw(rows, columns, scale=3.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, columns, generator=generator, dtype=f64) * scale
    return logits, torch.randint(columns, (rows,), generator=generator)


def by_definition(logits, targets, temperature):
    """Sums over the vocabulary, element by element, as the definitions have them."""
    for row, target, t in zip(logits.tolist(), targets.tolist(), temperature, strict=True):
        weights = [math.exp((z - max(row)) / t) for z in row]
        pi = [w / math.fsum(weights) for w in weights]
        entropy = -math.fsum(p * math.log(p) for p in pi if p > 0)
        lam = [math.log(p) + entropy if p > 0 else 0.0 for p in pi]
        yield (
            math.log(pi[target]),
            entropy,
            lam[target],
            math.fsum(p * p for p in pi),
            math.fsum(p * p * x for p, x in zip(pi, lam, strict=True)),
        )


@pytest.mark.parametrize("temperature", [1.0, 0.7, [0.5, 1.0, 2.0, 0.7, 1.3]])
def test_statistics_equal_their_definitions(temperature):
    logits, targets = draw(5, 11)
    per_row = temperature if isinstance(temperature, list) else [temperature] * 5
    given_t = torch.tensor(temperature) if isinstance(temperature, list) else temperature
    stats = dense_token_stats(logits, targets, temperature=given_t)
    want = torch.tensor(
        list(
            by_definition(
                logits,
                targets,
                torch.tensor(per_row).tolist() if isinstance(temperature, list) else per_row,
            )
        ),
        dtype=f64,
    )
    got = torch.stack([stats.logp, stats.entropy, stats.lam, stats.sum_pi2, stats.q], dim=1)
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-13)


def test_gradients_equal_finite_differences():
    logits, targets = draw(4, 6, scale=1.0)
    targets[2] = -100

    def live(z):
        stats = dense_token_stats(z, targets, temperature=0.7)
        return stats.logp, torch.where(targets < 0, 0.0, stats.entropy)

    assert torch.autograd.gradcheck(live, logits.requires_grad_())


def test_the_entropy_gradient_is_minus_pi_lambda():
    logits, _ = draw(1, 9)
    logits.requires_grad_()
    dense_token_stats(logits, torch.tensor([0])).entropy.sum().backward()
    every = dense_token_stats(logits.detach().expand(9, 9), torch.arange(9))
    torch.testing.assert_close(logits.grad[0], -every.logp.exp() * every.lam)


def test_lam_sum_pi2_and_q_carry_no_gradient():
    logits, targets = draw(2, 4)
    stats = dense_token_stats(logits.requires_grad_(), targets)
    assert stats.logp.requires_grad and stats.entropy.requires_grad
    assert not any(t.requires_grad for t in (stats.lam, stats.sum_pi2, stats.q))


def test_forbidden_entries_have_no_probability_and_no_gradient():
    logits, _ = draw(2, 5)
    logits[:, 1] = -torch.inf
    logits[1, 2:] = -torch.inf  # one entry left
    targets = torch.tensor([3, 0])
    logits.requires_grad_()
    stats = dense_token_stats(logits, targets)
    (stats.logp.sum() + stats.entropy.sum()).backward()
    kept = dense_token_stats(logits.detach()[:1, [0, 2, 3, 4]], torch.tensor([2]))
    for name in ("logp", "entropy", "lam", "sum_pi2", "q"):
        torch.testing.assert_close(getattr(stats, name)[:1], getattr(kept, name))
    assert stats.entropy[1] == 0 and stats.q[1] == 0 and stats.sum_pi2[1] == 1
    assert logits.grad.isfinite().all()
    assert logits.grad[:, 1].tolist() == [0, 0] and logits.grad[1, 2:].tolist() == [0, 0, 0]


def test_an_ignored_row_is_zero_and_gives_no_gradient():
    logits, _ = draw(3, 4)
    logits.requires_grad_()
    stats = dense_token_stats(logits, torch.tensor([1, -100, -1]))
    assert stats.logp[1:].tolist() == [0, 0] and stats.lam[1:].tolist() == [0, 0]
    (stats.logp.sum() + stats.entropy.sum()).backward()
    assert torch.equal(logits.grad[1:], torch.zeros(2, 4, dtype=f64))
    assert logits.grad[0].abs().sum() > 0


@given(st.integers(0, 1000), st.floats(-1e4, 1e4), st.floats(0.1, 20))
def test_adding_a_number_to_all_logits_changes_nothing(seed, offset, scale):
    logits, targets = draw(3, 7, scale=scale, seed=seed)
    plain, moved = dense_token_stats(logits, targets), dense_token_stats(logits + offset, targets)
    for name in ("logp", "entropy", "lam", "sum_pi2", "q"):
        torch.testing.assert_close(getattr(moved, name), getattr(plain, name), rtol=1e-7, atol=1e-9)


@given(st.integers(0, 1000), st.floats(0.01, 50))
def test_statistics_stay_within_their_bounds(seed, scale):
    logits, targets = draw(4, 9, scale=scale, seed=seed)
    stats = dense_token_stats(logits.float(), targets)
    assert stats.logp.dtype == torch.float32
    assert bool((stats.logp <= 1e-6).all())
    assert bool(((stats.entropy > -1e-6) & (stats.entropy < math.log(9) + 1e-5)).all())
    assert bool(((stats.sum_pi2 > 1 / 9 - 1e-6) & (stats.sum_pi2 < 1 + 1e-6)).all())


def test_float32_logits_far_from_zero_keep_their_digits():
    logits, targets = draw(4, 50)
    logits = (logits.float() - 400).double()  # representable in float32
    exact = dense_token_stats(logits, targets, temperature=0.7)
    single = dense_token_stats(logits.float(), targets, temperature=0.7)
    for name in ("logp", "entropy", "lam", "sum_pi2", "q"):
        torch.testing.assert_close(
            getattr(single, name).double(), getattr(exact, name), rtol=1e-6, atol=3e-6
        )


def test_half_precision_logits_are_raised_before_anything_is_computed():
    logits, targets = draw(3, 16)
    low = logits.bfloat16()
    got = dense_token_stats(low, targets, temperature=0.7)
    want = dense_token_stats(low.float(), targets, temperature=0.7)
    assert got.entropy.dtype == torch.float32
    assert torch.equal(got.entropy, want.entropy) and torch.equal(got.q, want.q)


def test_no_rows_give_no_statistics():
    stats = dense_token_stats(torch.zeros(0, 5), torch.zeros(0, dtype=torch.int64))
    assert stats.logp.shape == (0,)


@pytest.mark.parametrize(
    ("targets", "temperature", "why"),
    [
        ([0, 5], 1.0, "target 5 is outside the vocabulary of 5"),
        ([0, 1, 2], 1.0, r"targets \[T\]"),
        ([0, 1], 0.0, "must be positive"),
        ([0, 1], torch.tensor([1.0, -1.0]), "must be positive"),
        ([0, 1], torch.tensor([1.0]), "one per row"),
    ],
)
def test_misfit_arguments_are_errors(targets, temperature, why):
    with pytest.raises(ValueError, match=why):
        dense_token_stats(torch.zeros(2, 5), torch.tensor(targets), temperature=temperature)
