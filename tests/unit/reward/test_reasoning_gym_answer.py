"""reasoning-gym's tasks, generated and verified by the real package."""

import json

import pytest

pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed")

from dynamo_megatron.config import ReasoningGymSource
from dynamo_megatron.data.problems import DataError
from dynamo_megatron.data.reasoning import reasoning_problems
from dynamo_megatron.data.sources import load_problems
from dynamo_megatron.reward.reasoning_gym_answer import verify_reasoning_gym
from dynamo_megatron.reward.verification import Verification

pytestmark = pytest.mark.filterwarnings("ignore")  # of the many packages it imports


@pytest.mark.parametrize("task", ["chain_sum", "gsm_symbolic", "spell_backward", "leg_counting"])
def test_a_tasks_own_answer_has_the_full_reward_and_a_changed_one_none(task):
    (problem,) = reasoning_problems(task, 1, seed=3)
    answer = json.loads(problem.entry)["answer"]
    for phrase in ("<answer>%s</answer>", "Answer: %s", r"\boxed{%s}", "so #### x\n#### %s"):
        assert verify_reasoning_gym(phrase % answer, problem.entry, "").reward == 1.0
        assert verify_reasoning_gym(phrase % f"{answer}7", problem.entry, "").reward == 0.0


def test_an_answer_that_contains_the_right_one_is_not_paid_in_part():
    (problem,) = reasoning_problems("chain_sum", 1, seed=3)
    answer = json.loads(problem.entry)["answer"]
    response = f"<answer>perhaps {answer}, perhaps 7919</answer>"
    expected = Verification(0.0, True, f"perhaps {answer}, perhaps 7919")
    assert verify_reasoning_gym(response, problem.entry, "") == expected
    assert verify_reasoning_gym("no idea", problem.entry, "") == Verification(0.0)


def test_a_seed_gives_the_same_problems_and_another_others():
    source = ReasoningGymSource(kind="reasoning_gym", task="chain_sum", num_problems=5, seed=1)
    first, again = (load_problems([source]).problems for _ in range(2))
    assert first == again
    assert first[0].source == "chain_sum"
    other = load_problems([source.model_copy(update={"seed": 2})]).problems
    assert {p.id for p in first}.isdisjoint(p.id for p in other)


@pytest.mark.parametrize("task", ["graph_color", "composite", "no_such_task", "arc_agi"])
def test_tasks_whose_own_answer_does_not_score_are_refused(task):
    with pytest.raises(DataError, match=task):
        list(reasoning_problems(task, 2, seed=3))


def test_a_reference_that_is_no_entry_is_an_error_and_not_a_wrong_answer():
    with pytest.raises(ValueError, match="no reasoning-gym entry"):
        verify_reasoning_gym("Answer: 5", "5", "")
