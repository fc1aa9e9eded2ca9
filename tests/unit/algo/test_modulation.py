import itertools
import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dynamo_megatron.algo.modulation import (
    StatRange,
    entropy_change,
    modulate,
    sequence_mean_change,
    stat_range,
)
from dynamo_megatron.algo.token_statistics import dense_token_stats

GOLDEN = json.loads((Path(__file__).parents[2] / "data" / "golden.json").read_text())
CLIP = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 10.0}
PAPER = {"alpha": 0.2, "lam_min": 0.6, "gamma": 50.0, "tau": 0.99}
BOTH = {"gradient_compensation": True, "stabilization": True}
f64 = torch.float64

# Six tokens, then a padded one that must not matter.
LOGITS = [[2, 1, 0], [5, 0, 0], [0, 0, 0], [2, 1, 0], [2, 1, 0], [1, 1, 0], [9, 0, 0]]
TARGETS = [0, 0, 1, 2, 1, 0, 1]
ADVANTAGES = [1, 1, 1, -1, -1, 1, 1]
RATIOS = [1, 1, 1, 0.9, 0.7, 1.3, 1]
MASK = [True] * 6 + [False]


def tensor(values):
    return torch.tensor(values, dtype=f64)


def seven_tokens():
    stats = dense_token_stats(tensor(LOGITS), torch.tensor(TARGETS))
    change = entropy_change(
        tensor(ADVANTAGES), tensor(RATIOS), stats.logp, stats.lam, stats.q, **CLIP
    )
    return stats, change, torch.tensor(MASK)


def test_entropy_change_matches_hand_computed_values():
    _, change, _ = seven_tokens()
    # |rho A (pi Lambda - Q)|; 0 for a uniform row and for both clipped tokens
    want = [0.14181709360981, 0.00130838683599, 0, 0.25432870597150, 0, 0]
    torch.testing.assert_close(change[:6], tensor(want), rtol=1e-11, atol=1e-15)


def test_the_range_leaves_masked_tokens_out():
    stats, change, mask = seven_tokens()
    got = stat_range(stats.entropy, change, mask)
    want = GOLDEN["mod stats"]
    assert got.entropy_min == pytest.approx(want["Hmin"], rel=1e-13)
    assert got.entropy_max == pytest.approx(want["Hmax"], rel=1e-13)
    assert got.change_max == pytest.approx(want["maxXi"], rel=1e-13)
    # The padded token would have been the smallest entropy of all.
    assert stats.entropy[6] < got.entropy_min


@pytest.mark.parametrize(
    ("key", "options"),
    [
        ("mod setting1 alpha=.2 lam=.6 gam=50 tau=.99", PAPER),
        ("mod setting2 alpha=.4 lam=.6 gam=50 tau=.9", PAPER | {"alpha": 0.4, "tau": 0.9}),
    ],
)
def test_modulation_matches_the_published_settings(key, options):
    stats, change, mask = seven_tokens()
    extremes = stat_range(stats.entropy, change, mask)
    got = modulate(tensor(ADVANTAGES), stats.entropy, change, extremes, **BOTH, **options)
    rows = GOLDEN[key]
    for name, want in [
        ("advantages", "Afinal"),
        ("compensation", "bcomp"),
        ("stabilization", "bstab"),
    ]:
        torch.testing.assert_close(
            getattr(got, name)[:6], tensor([row[want] for row in rows]), rtol=1e-12, atol=0
        )


def test_the_published_defaults_by_hand():
    # Token 1: least entropy, 1 + alpha. Token 2: most entropy, 1. Token 3: largest change,
    # .6 + .4 / (1 + e^.5) = .7510. Token 4: clipped and negative, untouched.
    stats, change, mask = seven_tokens()
    extremes = stat_range(stats.entropy, change, mask)
    got = modulate(tensor(ADVANTAGES), stats.entropy, change, extremes, **BOTH, **PAPER)
    want = [1.0522638, 1.2, 1.0, -0.7510165, -1.0, 1.015952]
    torch.testing.assert_close(got.advantages[:6], tensor(want), rtol=0, atol=1e-7)


@pytest.mark.parametrize("tau", [0.9, 0.99])
def test_the_sigmoid_matches_hand_computed_values(tau):
    x = tensor([0, 0.5, 0.8, 0.9, 0.95, 0.99, 1.0])
    extremes = StatRange(0.0, 1.0, 1.0 - 1e-8)  # so that x is the change itself
    off = {"gradient_compensation": False, "stabilization": True}
    got = modulate(x, x, x, extremes, **off, **(PAPER | {"tau": tau})).stabilization
    rows = GOLDEN["sigmoid"]
    want = [rows[f"x={v} lam=.6 gam=50 tau={tau}"] for v in ("0", 0.5, 0.8, 0.9, 0.95, 0.99, 1.0)]
    torch.testing.assert_close(got, tensor(want), rtol=1e-12, atol=0)


@pytest.mark.parametrize("size", [5, 300])
@pytest.mark.parametrize("xi", [1.0, -0.7])
def test_a_finite_update_changes_the_entropy_as_predicted(size, xi):
    generator = torch.Generator().manual_seed(size)
    logits = torch.randn(8, size, generator=generator, dtype=f64) * 2
    targets = torch.randint(size, (8,), generator=generator)
    stats = dense_token_stats(logits, targets)
    ones = torch.ones(8, dtype=f64)
    predicted = entropy_change(xi * ones, ones, stats.logp, stats.lam, stats.q, **CLIP)
    direction = xi * (torch.nn.functional.one_hot(targets, size) - logits.softmax(dim=-1))

    def error(eta):
        moved = dense_token_stats(logits + eta * direction, targets).entropy - stats.entropy
        return ((moved / eta).abs() - predicted).abs()

    # First order: a ten times smaller step is ten times closer.
    for coarse, fine in [(1e-3, 1e-4), (1e-4, 1e-5)]:
        ratio = error(fine).sum() / error(coarse).sum()
        assert 0.08 < ratio < 0.12
    assert bool((error(1e-5) < 1e-4 * predicted.max()).all())


def test_the_expected_entropy_change_of_an_on_policy_update_is_zero():
    pi = tensor([[2.0, 1.0, 0.0]]).softmax(dim=-1)[0]
    stats = dense_token_stats(tensor([[2.0, 1.0, 0.0]] * 3), torch.arange(3))
    signed = stats.logp.exp() * stats.lam - stats.q
    assert (pi * signed).sum().abs() < 1e-15


@pytest.mark.parametrize(
    ("advantage", "ratio", "dual", "moves"),
    [
        (1, 1.28, 10.0, True),
        (1, 1.2801, 10.0, False),
        (1, 0.01, 10.0, True),
        (-1, 0.8, 10.0, True),
        (-1, 0.7999, 10.0, False),
        (-1, 10.0, 10.0, True),
        (-1, 10.01, 10.0, False),
        (-1, 10.01, None, True),
        (0, 1.0, 10.0, False),
    ],
)
def test_a_token_without_a_gradient_changes_no_entropy(advantage, ratio, dual, moves):
    got = entropy_change(
        tensor([advantage]),
        tensor([ratio]),
        tensor([-1.0]),
        tensor([0.5]),
        tensor([0.1]),
        clip_low=0.2,
        clip_high=0.28,
        dual_clip=dual,
    )
    want = abs(ratio * advantage * (math.exp(-1) * 0.5 - 0.1)) if moves else 0.0
    assert got.item() == pytest.approx(want, rel=1e-14)


def test_the_sequence_mean_stand_in_matches_the_public_code():
    stats, _, mask = seven_tokens()
    got = sequence_mean_change(
        tensor(ADVANTAGES),
        tensor(RATIOS),
        stats.logp,
        stats.lam,
        torch.zeros(7, dtype=torch.int64),
        mask,
        **CLIP,
    )
    want = GOLDEN["public-code seq-mean stand-in (all 6 valid tokens as one sequence)"]
    torch.testing.assert_close(got[:6], tensor(want["Xi"]), rtol=1e-12, atol=1e-15)
    assert got[6] == 0
    # A uniform row moves no entropy, whatever is drawn; the stand-in says otherwise.
    assert got[2] > 0.02


def test_the_sequence_mean_stays_within_its_sequence():
    ones = torch.ones(4, dtype=f64)
    lam = tensor([1.0, 3.0, 10.0, math.nan])
    got = sequence_mean_change(
        ones, ones, 0 * ones, lam, torch.tensor([0, 0, 5, 5]), ~lam.isnan(), **CLIP
    )
    assert got.tolist() == [1.0, 1.0, 0.0, 0.0]


def random_tokens(seed, count=40, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    advantages = torch.randn(count, generator=generator)
    entropy = torch.rand(count, generator=generator) * 3
    change = torch.rand(count, generator=generator) * 0.3
    mask = torch.rand(count, generator=generator) < 0.8
    return advantages.to(dtype), entropy.to(dtype), change.to(dtype), mask


@given(st.integers(0, 500), st.lists(st.integers(0, 40), max_size=5))
def test_the_range_and_the_advantages_do_not_depend_on_how_tokens_are_split(seed, cuts):
    # Extremes of the micro-batch gave the same token another weight for another micro-batch size.
    advantages, entropy, change, mask = random_tokens(seed)
    whole = stat_range(entropy, change, mask)
    edges = [0, *sorted(cuts), 40]
    parts = [slice(a, b) for a, b in itertools.pairwise(edges)]
    merged = StatRange.empty()
    for part in reversed(parts):
        merged = merged.merged(stat_range(entropy[part], change[part], mask[part]))
    assert merged == whole
    options = BOTH | PAPER
    once = modulate(advantages, entropy, change, whole, **options).advantages
    pieces = [modulate(advantages[p], entropy[p], change[p], merged, **options) for p in parts]
    assert torch.equal(torch.cat([piece.advantages for piece in pieces]), once)


@given(st.integers(0, 500))
def test_masked_tokens_do_not_matter(seed):
    advantages, entropy, change, mask = random_tokens(seed)
    spoilt_entropy = torch.where(mask, entropy, torch.nan)
    spoilt_change = torch.where(mask, change, torch.inf)
    extremes = stat_range(entropy, change, mask)
    assert stat_range(spoilt_entropy, spoilt_change, mask) == extremes
    options = BOTH | PAPER
    want = modulate(advantages, entropy, change, extremes, **options).advantages[mask]
    got = modulate(advantages, spoilt_entropy, spoilt_change, extremes, **options).advantages[mask]
    assert torch.equal(got, want)


def test_a_padded_token_without_advantage_stays_zero_whatever_its_statistics():
    nan, zero = tensor([math.nan]), tensor([0.0])
    change = entropy_change(zero, nan, nan, nan, nan, **CLIP)
    got = modulate(zero, nan, change, StatRange(0.0, 1.0, 1.0), **BOTH, **PAPER)
    assert change.item() == 0 and got.advantages.item() == 0


@given(st.integers(0, 500))
def test_switched_off_factors_leave_advantages_bitwise_alone(seed):
    advantages, entropy, change, mask = random_tokens(seed)
    extremes = stat_range(entropy, change, mask)
    off = {"gradient_compensation": False, "stabilization": False}
    got = modulate(advantages, entropy, change, extremes, **off, **PAPER)
    assert torch.equal(got.advantages, advantages) and got.advantages.dtype == torch.float32
    assert bool((got.compensation == 1).all()) and bool((got.stabilization == 1).all())


@given(st.integers(0, 500), st.floats(0, 1), st.floats(0, 1))
def test_factors_stay_within_their_bounds_even_for_newer_statistics(seed, alpha, lam_min):
    advantages, entropy, change, _ = random_tokens(seed, dtype=f64)
    old = StatRange(entropy_min=1.0, entropy_max=1.5, change_max=0.01)
    options = {"alpha": alpha, "lam_min": lam_min, "gamma": 50.0, "tau": 0.99}
    got = modulate(advantages, entropy, change, old, **BOTH, **options)
    assert bool(((got.compensation >= 1) & (got.compensation <= 1 + alpha)).all())
    assert bool((got.compensation[advantages <= 0] == 1).all())
    assert bool(((got.stabilization >= lam_min) & (got.stabilization <= 1)).all())
    assert bool((got.advantages.sign() == advantages.sign()).all()) or lam_min == 0


@given(st.floats(0, 1))
def test_a_token_that_moves_no_entropy_is_not_damped_at_all(lam_min):
    options = PAPER | {"lam_min": lam_min}
    got = modulate(
        tensor([-1.0]), tensor([1.0]), tensor([0.0]), StatRange(0.0, 2.0, 1.0), **BOTH, **options
    )
    assert got.advantages.item() == -1


def test_nearly_equal_entropies_compensate_nothing():
    # Float error in H would otherwise become a factor of order one.
    entropy = tensor([1.0, 1.0005])
    narrow, wide = StatRange(1.0, 1.0009, 0.0), StatRange(1.0, 1.0011, 0.0)
    ones, zeros = torch.ones(2, dtype=f64), torch.zeros(2, dtype=f64)
    assert modulate(ones, entropy, zeros, narrow, **BOTH, **PAPER).advantages.tolist() == [1, 1]
    got = modulate(ones, entropy, zeros, wide, **BOTH, **PAPER).advantages
    torch.testing.assert_close(got, tensor([1.2, 1 + 0.2 * 6 / 11]), rtol=1e-4, atol=0)


def test_a_set_without_entropy_change_is_not_damped():
    # All advantages were 0 when the range was taken; a newer change must not divide by 1e-8.
    ones = torch.ones(2, dtype=f64)
    got = modulate(ones, ones, ones, StatRange(0.0, 2.0, 0.0), **BOTH, **PAPER)
    assert got.stabilization.tolist() == [1, 1]


def test_a_set_without_tokens_is_left_alone():
    nothing = torch.zeros(0)
    extremes = stat_range(nothing, nothing, nothing.bool())
    assert extremes == StatRange.empty() == StatRange.empty().merged(StatRange.empty())
    assert modulate(nothing, nothing, nothing, extremes, **BOTH, **PAPER).advantages.shape == (0,)


def test_the_empty_range_is_the_identity():
    some = StatRange(0.25, 2.0, 0.5)
    assert some.merged(StatRange.empty()) == some == StatRange.empty().merged(some)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("which", ["entropy", "change"])
def test_a_statistic_that_is_no_number_is_an_error_on_every_rank(bad, which):
    good, spoilt = tensor([1.0, 2.0]), tensor([1.0, bad])
    all_of_them = torch.tensor([True, True])
    here = stat_range(good, good, all_of_them)
    there = stat_range(
        spoilt if which == "entropy" else good, spoilt if which == "change" else good, all_of_them
    )
    for extremes in (there, here.merged(there), there.merged(here)):
        with pytest.raises(ValueError, match="NaN or infinite"):
            modulate(good, good, good, extremes, **BOTH, **PAPER)


def test_nothing_carries_a_gradient():
    logits = tensor([[2.0, 1.0, 0.0]]).requires_grad_()
    stats = dense_token_stats(logits, torch.tensor([0]))
    one = torch.ones(1, dtype=f64)
    change = entropy_change(one, stats.logp.exp(), stats.logp, stats.lam, stats.q, **CLIP)
    extremes = stat_range(stats.entropy, change, one.bool())
    got = modulate(one, stats.entropy, change, extremes, **BOTH, **PAPER)
    for value in (change, got.advantages, got.compensation, got.stabilization):
        assert not value.requires_grad


def test_tensors_that_would_broadcast_are_an_error():
    with pytest.raises(ValueError, match=r"entropy_T \[3, 1\]"):
        modulate(
            torch.zeros(3), torch.zeros(3, 1), torch.zeros(3), StatRange.empty(), **BOTH, **PAPER
        )
