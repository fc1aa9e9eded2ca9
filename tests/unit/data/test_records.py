"""Where a record's problem and answer may stand."""

import pytest

from dynamo_megatron.data.problems import DataError
from dynamo_megatron.data.records import Record, read_record


def read(item, problem_key=None, answer_key=None):
    return read_record(item, "x, line 1", problem_key=problem_key, answer_key=answer_key)


@pytest.mark.parametrize(
    ("item", "answer"),
    [
        ({"problem": "p", "answer": None, "solution": "2+2=4\n#### 4"}, "4"),
        ({"problem": "p", "solution": "a #### b\n####  70,000 \n"}, "70,000"),
        ({"problem": "p", "answer": "He has <<1+1=2>>2.\n#### 2"}, "2"),
        ({"problem": "p", "answer": "5", "solution": "no\n#### 4"}, "5"),
        ({"problem": "p", "reward_model": {"ground_truth": "34"}}, "34"),
        ({"problem": "p", "answer": "7", "reward_model": {"ground_truth": "34"}}, "7"),
        ({"problem": "p", "answer": "#### in the middle\nx"}, "#### in the middle\nx"),
    ],
)
def test_an_answer_is_found_where_data_sets_put_it(item, answer):
    assert read(item) == Record("p", answer)


def test_a_solution_without_a_marked_answer_is_no_answer():
    with pytest.raises(DataError, match="'answer' is null"):
        read({"problem": "p", "answer": None, "solution": "it is 4"})
    with pytest.raises(DataError, match="no 'answer'"):
        read({"problem": "p", "solution": "it is 4"})


def test_nested_keys_are_named_with_dots():
    item = {"a": {"b": {"c": "p"}}, "r.g": "1", "r": {"g": "2"}}
    assert read(item, "a.b.c", "r.g") == Record("p", "1")  # a key that is there comes first
    with pytest.raises(DataError, match=r"no 'a\.x\.c'"):
        read(item, "a.x.c", "r.g")


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([{"role": "assistant", "content": "x"}], r"roles \['assistant'\]"),
        ([{"role": "user", "content": "x"}] * 2, r"roles \['user', 'user'\]"),
        ([{"role": "user", "content": None}], "'content of prompt' is null"),
        ([], "'prompt' is a list"),
    ],
)
def test_other_conversations_than_one_question_are_refused(messages, words):
    with pytest.raises(DataError, match=words):
        read({"prompt": messages, "answer": "1"})
