"""The arithmetic task: right answers, reproducible draws, splits that cannot meet."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_megatron.data.arithmetic import (
    ArithmeticProblem,
    arithmetic_problems,
    count_carries,
    split_of,
)


def read_aloud(problem: str) -> list[int]:
    """Return the partial sums of a problem text, read from left to right by its characters."""
    keyword, expression = problem.split(" ")
    assert keyword == "Compute"
    assert re.fullmatch(r"[1-9]\d*([+-][1-9]\d*)+", expression)
    partial_sums, sign, number = [0], 1, ""
    for character in expression + "+":
        if character.isdigit():
            number += character
            continue
        partial_sums.append(partial_sums[-1] + sign * int(number))
        sign, number = (1 if character == "+" else -1), ""
    return partial_sums[1:]


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_every_answer_is_the_value_of_its_expression(split):
    for problem in arithmetic_problems(2000, seed=3, split=split):
        assert problem.answer == str(read_aloud(problem.problem)[-1])


def test_every_partial_sum_stays_between_0_and_999():
    for problem in arithmetic_problems(2000, seed=4, split="train"):
        assert all(0 <= partial_sum <= 999 for partial_sum in read_aloud(problem.problem))


def test_problems_mix_three_and_four_terms_of_one_to_three_digits():
    problems = arithmetic_problems(500, seed=5, split="train")
    assert {problem.num_terms for problem in problems} == {3, 4}
    assert {len(str(abs(n))) for problem in problems for n in problem.operands} == {1, 2, 3}
    assert all(len(read_aloud(p.problem)) == p.num_terms for p in problems)


def test_the_draw_is_pinned_across_processes_and_versions():
    problems = arithmetic_problems(3, seed=0, split="train")
    assert [(p.problem, p.answer) for p in problems] == [
        ("Compute 530-9-48+37", "510"),
        ("Compute 441+51+82-28", "546"),
        ("Compute 6+601+47", "654"),
    ]


def test_a_longer_draw_starts_with_the_shorter_one():
    long = arithmetic_problems(200, seed=9, split="heldout")
    assert arithmetic_problems(50, seed=9, split="heldout") == long[:50]


def test_another_seed_draws_other_problems():
    texts = [{p.problem for p in arithmetic_problems(100, seed=s, split="train")} for s in (1, 2)]
    assert len(texts[0] & texts[1]) < 10


def test_problem_texts_are_unique_where_a_plain_draw_would_repeat_some():
    texts = [p.problem for p in arithmetic_problems(20_000, seed=6, split="train")]
    assert len(set(texts)) == 20_000


def test_excluded_texts_are_never_drawn():
    excluded = frozenset(p.problem for p in arithmetic_problems(300, seed=6, split="train"))
    problems = arithmetic_problems(1000, seed=6, split="train", exclude=excluded)
    assert excluded.isdisjoint(p.problem for p in problems)


@pytest.mark.parametrize("seeds", [(0, 0), (0, 1), (17, 4)])
def test_train_and_heldout_never_share_a_problem_or_its_reordering(seeds):
    train = arithmetic_problems(5000, seed=seeds[0], split="train")
    heldout = arithmetic_problems(2000, seed=seeds[1], split="heldout")
    assert {tuple(sorted(p.operands)) for p in train}.isdisjoint(
        tuple(sorted(p.operands)) for p in heldout
    )


@given(st.lists(st.integers(-999, 999), min_size=2, max_size=4), st.randoms())
def test_reordering_the_terms_keeps_the_split(operands, random):
    reordered = random.sample(operands, len(operands))
    assert split_of(tuple(reordered)) == split_of(tuple(operands))


@pytest.mark.parametrize(
    ("operands", "split"),
    [
        # First byte of `printf %s TERMS | sha256sum`, held out where it divides by 4.
        ((12, 7, -3), "train"),  # -3+7+12: 0x29 = 41
        ((4, 3), "train"),  # +3+4: 0xe5 = 229
        ((385, 47, -29), "train"),  # -29+47+385: 0xf2 = 242
        ((3, 8), "heldout"),  # +3+8: 0x44 = 68
        ((8, 3), "heldout"),
    ],
)
def test_the_split_is_the_hash_of_the_sorted_terms(operands, split):
    assert split_of(operands) == split


@pytest.mark.parametrize(
    ("total", "operand", "carries"),
    [
        (12, 34, 0),
        (17, 5, 1),
        (95, 7, 2),  # 5+7 carries, 9+1 carries
        (999, 1, 3),
        (47, -5, 0),
        (43, -5, 1),
        (100, -1, 2),  # 0-1 borrows, 0-0-1 borrows
        (405, -17, 2),  # 5-7 borrows, 0-1-1 borrows
        (50, -50, 0),
        (0, 0, 0),
    ],
)
def test_carries_and_borrows_are_counted_as_by_hand(total, operand, carries):
    assert count_carries(total, operand) == carries


def test_a_problem_counts_the_carries_of_all_its_steps():
    # 95+7 = 102 carries twice, 102-3 = 99 borrows twice, 99+10 = 109 carries once.
    problem = ArithmeticProblem(problem="Compute 95+7-3+10", answer="109", operands=(95, 7, -3, 10))
    assert problem.num_carries == 5


def test_no_problems_are_drawn_when_none_are_asked_for():
    assert arithmetic_problems(0, seed=0, split="train") == []


def test_a_negative_number_of_problems_is_refused():
    with pytest.raises(ValueError, match="num_problems is -1"):
        arithmetic_problems(-1, seed=0, split="train")


def test_an_unknown_split_is_refused():
    with pytest.raises(ValueError, match="split is 'test'"):
        arithmetic_problems(1, seed=0, split="test")


def test_an_exhausted_task_is_an_error_not_an_endless_loop():
    class Everything(frozenset):
        def __contains__(self, text):
            return True

    # With every text excluded the task has run dry.
    with pytest.raises(ValueError, match="found 0 of 1 train problems"):
        arithmetic_problems(1, seed=0, split="train", exclude=Everything())
