import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from dynamo_megatron.algo.advantage import group_advantages, loo_advantages, prompt_weights


def advantages(rewards, groups, valid=None, **options):
    valid = [True] * len(rewards) if valid is None else valid
    return group_advantages(
        torch.tensor(rewards, dtype=torch.float32),
        torch.tensor(groups, dtype=torch.int64),
        torch.tensor(valid, dtype=torch.bool),
        **options,
    )


def loo(rewards, groups, valid=None):
    valid = [True] * len(rewards) if valid is None else valid
    return loo_advantages(torch.tensor(rewards), torch.tensor(groups), torch.tensor(valid))


def assert_values(got, want):
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float32), rtol=2e-7, atol=0)


def test_one_success_of_four():
    # mean .25, sample std .5
    third = 0.499999000002
    assert_values(advantages([1, 0, 0, 0], [0] * 4), [1.499997000006, -third, -third, -third])
    assert_values(advantages([1, 0, 0, 0], [0] * 4, normalize="none"), [0.75, -0.25, -0.25, -0.25])
    assert_values(loo([1.0, 0, 0, 0], [0] * 4), [1, -1 / 3, -1 / 3, -1 / 3])


def test_groups_of_two_and_six_are_not_two_groups_of_four():
    # Equal totals: a reshape by the mean group size would mix the prompts and pass every check.
    rewards = [1, 0, 1, 1, 1, 1, 0, 0]
    ragged = advantages(rewards, [0] * 2 + [1] * 6, normalize="none")
    assert_values(ragged, [0.5, -0.5, *[1 / 3] * 4, -2 / 3, -2 / 3])
    even = advantages(rewards, [0] * 4 + [1] * 4, normalize="none")
    assert_values(even, [0.25, -0.75, 0.25, 0.25, 0.5, 0.5, -0.5, -0.5])
    # std of (1, 0) is sqrt(1/2); of (1,1,1,1,0,0) it is sqrt(4/15)
    scaled = advantages(rewards, [0] * 2 + [1] * 6, epsilon=0.0)
    up, down = (1 / 3) / math.sqrt(4 / 15), (-2 / 3) / math.sqrt(4 / 15)
    assert_values(scaled, [math.sqrt(0.5), -math.sqrt(0.5), *[up] * 4, down, down])


def test_a_group_of_one_has_no_advantage():
    # mean 0, std 1, as some trainers have it, would give a lone success advantage 1.
    for function in (advantages, loo):
        assert function([1.0, 1.0, 0.0], [7, 3, 3])[0] == 0


@given(st.floats(-1e6, 1e6), st.integers(1, 40))
@example(0.1, 3)
def test_exactly_equal_rewards_have_no_advantage(reward, count):
    # The float mean of equal rewards need not be the reward: .1 + .1 + .1 is not 3 * .1.
    rewards = torch.full((count,), reward, dtype=torch.float64)
    group, valid = torch.zeros(count, dtype=torch.int64), torch.ones(count, dtype=torch.bool)
    for got in (
        group_advantages(rewards, group, valid),
        group_advantages(rewards, group, valid, normalize="none"),
        loo_advantages(rewards, group, valid),
    ):
        assert torch.equal(got, torch.zeros(count))


def test_a_failed_verification_is_left_out_of_its_group():
    valid = [True, False, True, True]
    got = advantages([1, math.nan, 0, 0], [5] * 4, valid, normalize="none")
    assert_values(got, [2 / 3, 0, -1 / 3, -1 / 3])
    assert_values(loo([1, math.nan, 0, 0], [5] * 4, valid), [1, 0, -0.5, -0.5])
    # A number there does not matter either.
    assert torch.equal(got, advantages([1, 99, 0, 0], [5] * 4, valid, normalize="none"))


def test_a_group_left_with_one_or_no_valid_rollout_has_no_advantage():
    got = advantages(
        [1, math.nan, math.nan, 1, 0], [0, 0, 1, 2, 2], [True, False, False, True, True]
    )
    assert got[:3].tolist() == [0, 0, 0] and got[3] > 0
    assert torch.equal(advantages([math.nan], [0], [False]), torch.zeros(1))


def test_no_rollouts_have_no_advantages():
    assert advantages([], []).shape == (0,)


rollouts = st.lists(
    st.tuples(
        st.one_of(st.sampled_from([0.0, 1.0]), st.floats(-3, 3, width=32)),
        st.integers(-2, 4),
        st.booleans(),
    ),
    min_size=1,
    max_size=30,
)


@given(rollouts, st.randoms(use_true_random=False), st.sampled_from(["std", "none", "loo"]))
def test_permuting_rollouts_permutes_advantages_bit_for_bit(rows, rng, kind):
    order = list(range(len(rows)))
    rng.shuffle(order)

    def values(rows):
        columns = [list(column) for column in zip(*rows, strict=True)]
        return loo(*columns) if kind == "loo" else advantages(*columns, normalize=kind)

    assert torch.equal(values([rows[i] for i in order]), values(rows)[order])


@given(rollouts)
def test_relabelling_groups_changes_nothing(rows):
    rewards, groups, valid = (list(column) for column in zip(*rows, strict=True))
    renamed = [{g: 1000 - 3 * g for g in groups}[g] for g in groups]
    assert torch.equal(advantages(rewards, groups, valid), advantages(rewards, renamed, valid))


@given(rollouts)
def test_advantages_equal_a_loop_over_groups(rows):
    rewards, groups, valid = (list(column) for column in zip(*rows, strict=True))
    want = torch.zeros(len(rows), dtype=torch.float64)
    for group in set(groups):
        members = [i for i in range(len(rows)) if groups[i] == group and valid[i]]
        own = torch.tensor([rewards[i] for i in members], dtype=torch.float64)
        if len(members) > 1 and len(set(own.tolist())) > 1:
            want[members] = (own - own.mean()) / (own.std() + 1e-6)
    got = advantages(rewards, groups, valid).double()
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_a_reward_that_is_no_number_is_an_error_where_it_counts(reward):
    with pytest.raises(ValueError, match="rollout 1 has reward"):
        advantages([0, reward], [0, 0])


def test_misfit_arguments_are_errors():
    with pytest.raises(ValueError, match=r"rewards_R \[2\], group_index_R \[1\]"):
        advantages([0, 1], [0])
    with pytest.raises(ValueError, match="must be bool"):
        group_advantages(torch.zeros(1), torch.zeros(1, dtype=torch.int64), torch.ones(1))
    with pytest.raises(ValueError, match='"std" and "none"'):
        advantages([0, 1], [0, 0], normalize="batch")


def test_prompt_weights_give_each_prompt_the_same_total():
    sizes = torch.tensor([8, 24, 16])
    weights = prompt_weights(sizes)
    torch.testing.assert_close(weights, torch.tensor([2, 2 / 3, 1], dtype=torch.float64))
    totals = weights * sizes
    assert totals.tolist() == [16.0, 16.0, 16.0] and totals.sum() / sizes.sum() == 1
    with pytest.raises(ValueError, match="prompt 1 has 0"):
        prompt_weights(torch.tensor([3, 0]))


def test_equal_sizes_need_no_prompt_weights():
    assert torch.equal(prompt_weights(torch.full((5,), 16)), torch.ones(5, dtype=torch.float64))
