import json
import math
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dynamo_megatron.algo.history import SuccessHistory

RESULTS = [("a", 3, 8), ("b", 0, 16), ("c", 5, 5)]

counts = st.dictionaries(
    st.text(max_size=4),
    st.tuples(st.floats(0, 1), st.floats(0, 1e6)).map(lambda x: (x[0] * x[1], x[1])),
    max_size=6,
)


def test_an_unseen_prompt_has_no_rollouts():
    num_correct, num_rollouts = SuccessHistory().lookup(["x", "y"])
    assert num_correct.tolist() == [0, 0] and num_rollouts.tolist() == [0, 0]
    assert num_correct.dtype == num_rollouts.dtype == torch.float64


def test_lookup_of_no_prompts_is_empty():
    assert [t.shape for t in SuccessHistory().lookup([])] == [(0,), (0,)]


def test_counts_add_up_over_steps_in_the_order_of_the_ids_asked_for():
    history = SuccessHistory().updated(RESULTS).updated([("b", 4, 8)])
    num_correct, num_rollouts = history.lookup(["c", "b", "a", "b"])
    assert num_correct.tolist() == [5, 4, 3, 4]
    assert num_rollouts.tolist() == [5, 24, 8, 24]


def test_an_update_leaves_the_old_history_as_it_was():
    old = SuccessHistory().updated(RESULTS)
    before = old.digest()
    old.updated([("a", 1, 1)])
    assert old.digest() == before and old.counts["a"] == (3.0, 8.0)
    with pytest.raises(TypeError):
        old.counts["a"] = (9.0, 9.0)


def test_a_history_does_not_see_later_changes_of_the_mapping_it_was_built_from():
    source = {"a": (1.0, 2.0)}
    history = SuccessHistory(source)
    source["a"] = (2.0, 2.0)
    assert history.counts["a"] == (1.0, 2.0)


@given(st.permutations(RESULTS))
def test_successes_are_credited_by_prompt_id_whatever_the_order_of_results(shuffled):
    # Credit by position went wrong when the batch was balanced before the counts were taken.
    history = SuccessHistory().updated(shuffled)
    assert history == SuccessHistory().updated(RESULTS)
    assert history.digest() == SuccessHistory().updated(RESULTS).digest()


def test_a_prompt_twice_in_one_step_is_an_error():
    with pytest.raises(ValueError, match=r"prompt a comes twice"):
        SuccessHistory().updated([("a", 1, 2), ("b", 1, 2), ("a", 1, 2)])


@pytest.mark.parametrize("entry", [("a", 3, 2), ("a", -1, 2), ("a", 1, 0)])
def test_impossible_results_are_an_error(entry):
    with pytest.raises(ValueError, match="prompt a reports"):
        SuccessHistory().updated([entry])


def test_a_prompt_without_a_verified_rollout_is_left_as_it_was():
    history = SuccessHistory().updated(RESULTS)
    assert history.updated([("a", 0, 0), ("new", 0, 0)]) == history


@pytest.mark.parametrize("pair", [(2.0, 1.0), (-1.0, 1.0), (math.nan, 1.0), (1.0, math.inf)])
def test_impossible_counts_are_an_error(pair):
    with pytest.raises(ValueError, match="no sampling can give"):
        SuccessHistory({"a": pair})


def test_a_row_number_is_not_a_prompt_id():
    # Row numbers of two files collide and share their counts.
    with pytest.raises(ValueError, match="row number"):
        SuccessHistory({0: (1.0, 2.0)})


def test_decay_halves_the_evidence_and_keeps_the_rate():
    history = SuccessHistory().updated(RESULTS).decayed(0.5)
    assert history.counts == {"a": (1.5, 4.0), "b": (0.0, 8.0), "c": (2.5, 2.5)}


def test_decay_of_one_changes_nothing():
    history = SuccessHistory({"a": (0.1, 0.3)})
    assert history.decayed(1.0) == history


@pytest.mark.parametrize("rho", [0.0, -0.1, 1.1, math.nan])
def test_decay_outside_its_range_is_an_error(rho):
    with pytest.raises(ValueError, match=r"\(0, 1\]"):
        SuccessHistory().decayed(rho)


@given(counts, st.floats(0.01, 1))
def test_a_decayed_history_is_a_history(table, rho):
    SuccessHistory(table).decayed(rho).updated([("z", 1, 3)])


@given(counts)
def test_json_gives_back_the_very_same_numbers(table):
    history = SuccessHistory(table)
    read = SuccessHistory.from_json(json.loads(json.dumps(history.to_json())))
    assert read == history and read.digest() == history.digest()


@pytest.mark.parametrize("pair", [[1], [1, 2, 3], ["1", 2], [None, 2], [True, 2]])
def test_damaged_json_is_an_error(pair):
    with pytest.raises(ValueError, match="prompt a"):
        SuccessHistory.from_json({"a": pair})


def test_a_history_can_be_sent_to_another_process():
    history = SuccessHistory().updated(RESULTS)
    assert pickle.loads(pickle.dumps(history)) == history


def test_the_digest_tells_histories_apart():
    base = SuccessHistory({"a": (1.0, 2.0), "b": (3.0, 4.0)})
    swapped = SuccessHistory({"a": (3.0, 4.0), "b": (1.0, 2.0)})
    nudged = SuccessHistory({"a": (math.nextafter(1.0, 2), 2.0), "b": (3.0, 4.0)})
    reordered = SuccessHistory({"b": (3.0, 4.0), "a": (1.0, 2.0)})
    assert len({base.digest(), swapped.digest(), nudged.digest()}) == 3
    assert reordered.digest() == base.digest() and len(base.digest()) == 64
