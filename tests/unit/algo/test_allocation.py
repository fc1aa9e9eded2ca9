import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dynamo_megatron.algo.allocation import (
    check_budget,
    group_sizes,
    lower_bounds,
    uniform_sizes,
)
from dynamo_megatron.algo.history import SuccessHistory


def sizes_of(k, G, *, budget, n_low=8, n_high=24, init=4, form="linear", rule="paper"):
    return group_sizes(
        torch.tensor(k, dtype=torch.float64),
        torch.tensor(G, dtype=torch.float64),
        budget=budget,
        n_low=n_low,
        n_high=n_high,
        init=init,
        form=form,
        rule=rule,
        mastery=0.85,
        floor=0.01,
    ).tolist()


def test_a_first_epoch_is_uniform():
    assert sizes_of([0] * 4, [0] * 4, budget=64) == [16] * 4


def test_a_cold_prompt_gets_its_lower_bound_once_others_have_a_history():
    # One cold prompt at 8. The 24 left above the bounds go to P = .2667 and .2: 8 + 13.7, 8 + 10.3.
    assert sizes_of([0, 8, 4], [0, 16, 16], budget=48) == [8, 22, 18]


def test_a_prompt_is_cold_until_it_has_init_rollouts():
    # init 12: 3 rollouts leave 9 to go, 12 leave none.
    G = torch.tensor([0.0, 3.0, 8.0, 12.0, 11.5])
    assert lower_bounds(G, n_low=8, n_high=24, init=12).tolist() == [12, 9, 8, 8, 8]
    assert lower_bounds(G, n_low=4, n_high=24, init=12).tolist() == [12, 9, 4, 4, 4]
    # Cold at 11.5 of 12: weight 0, although the variance is the largest.
    assert sizes_of([4, 5.75], [16, 11.5], budget=32, init=12) == [24, 8]


def test_a_decayed_count_is_rounded_up_to_whole_missing_rollouts():
    assert lower_bounds(torch.tensor([2.5]), n_low=4, n_high=24, init=12).tolist() == [10]


def test_the_missing_rollouts_never_exceed_the_upper_bound():
    assert lower_bounds(torch.tensor([0.0]), n_low=2, n_high=6, init=12).tolist() == [6]


def test_one_rollout_is_cold_even_when_the_bounds_allow_it():
    assert sizes_of([1, 1], [1, 4], budget=6, n_low=1, n_high=5, init=1) == [1, 5]


def test_the_standard_deviation_spreads_less_than_the_variance():
    # (8,16), (2,16), (15,16) mastered, (0,16) floored.  w = .2667, .1167, .01, .01, 32 to share,
    # the first full at 24: 16 to share among .1167, .01, .01 -> 8 + 13.66 (24 at most), 1.17, 1.17.
    k, G = [8, 2, 15, 0], [16, 16, 16, 16]
    assert sizes_of(k, G, budget=64, form="linear") == [24, 22, 9, 9]
    # sqrt: .5164, .3416 share 32 with .01 + .01: first 18.8 -> full at 16; 16 left: 15.1, .44, .44
    assert sizes_of(k, G, budget=64, form="sqrt") == [24, 23, 9, 8]


def test_the_priority_follows_every_step_and_not_the_epoch():
    history = SuccessHistory().updated([("a", 4, 8), ("b", 4, 8)])
    ids = ["a", "b"]
    assert _sizes_from(history, ids) == [16, 16]
    # b is being mastered: 20 of 24.  a is as uncertain as before.
    assert _sizes_from(history.updated([("b", 16, 16)]), ids) == [19, 13]


def _sizes_from(history, ids):
    num_correct, num_rollouts = history.lookup(ids)
    return sizes_of(num_correct.tolist(), num_rollouts.tolist(), budget=32)


def test_a_restored_history_allocates_as_before():
    # Counts that are not saved make every prompt cold again after a resume.
    history = SuccessHistory().updated([("a", 4, 8), ("b", 1, 8), ("c", 8, 8)])
    restored = SuccessHistory.from_json(history.to_json())
    assert (
        _sizes_from(restored, ["a", "b", "c"][:2]) == _sizes_from(history, ["a", "b"]) != [16, 16]
    )


@given(
    st.lists(st.tuples(st.floats(0, 1), st.floats(0, 60)), min_size=1, max_size=20),
    st.sampled_from(["linear", "sqrt"]),
    st.sampled_from(["paper", "kkt"]),
    st.integers(0, 16),
)
def test_allocation_spends_the_whole_budget_for_any_history(history, form, rule, init):
    k, G = [p * g for p, g in history], [g for _, g in history]
    check_budget(len(history), 8, 24, 16, init)
    sizes = sizes_of(k, G, budget=16 * len(history), init=init, form=form, rule=rule)
    assert sum(sizes) == 16 * len(history)
    assert all(8 <= n <= 24 for n in sizes)


@given(st.lists(st.integers(0, 16), min_size=1, max_size=12, unique=True))
def test_equal_histories_get_equal_sizes_up_to_one(successes):
    k, G = successes * 2, [16] * (2 * len(successes))
    sizes = sizes_of(k, G, budget=16 * len(k))
    half = len(successes)
    assert all(abs(a - b) <= 1 for a, b in zip(sizes[:half], sizes[half:], strict=True))


def test_uniform_sizes_give_the_remainder_to_the_lowest_indices():
    assert uniform_sizes(4, 64).tolist() == [16] * 4
    assert uniform_sizes(4, 10).tolist() == [3, 3, 2, 2]
    assert uniform_sizes(3, 3).dtype == torch.int64
    for prompts, budget in [(4, 3), (0, 0)]:
        with pytest.raises(ValueError, match=f"{budget} rollouts cannot"):
            uniform_sizes(prompts, budget)


@pytest.mark.parametrize(
    ("n_low", "n_high", "n_mean", "init", "why"),
    [
        (8, 24, 7, 4, r"budget of 10 x 7 = 70 rollouts is outside \[80, 240\]"),
        (8, 24, 25, 4, r"outside \[80, 240\]"),
        (0, 24, 16, 4, "1 <= n_low"),
        (8, 24, 16, 17, "init to at most n_mean = 16"),
    ],
)
def test_bounds_whose_budget_cannot_be_spent_are_refused_at_start(n_low, n_high, n_mean, init, why):
    with pytest.raises(ValueError, match=why):
        check_budget(10, n_low, n_high, n_mean, init)


def test_the_published_bounds_are_accepted():
    check_budget(512, 8, 24, 16, 4)
    check_budget(1, 16, 16, 16, 16)
    with pytest.raises(ValueError, match="at least one prompt"):
        check_budget(0, 8, 24, 16, 4)
