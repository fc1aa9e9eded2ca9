"""The order of prompts: every prompt once an epoch, distinct within a step, exact resume."""

import hashlib
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_megatron.data.problems import DataError
from dynamo_megatron.data.shuffle import ShuffledPrompts, order_after
from dynamo_megatron.types import DataCursor, Prompt


def prompts(count: int) -> list[Prompt]:
    return [
        Prompt(id=f"id{k}", text=f"t{k}", token_ids=(k,), answer="1", source="s")
        for k in range(count)
    ]


def draw(source, count, steps, cursor=None) -> tuple[list[list[str]], DataCursor]:
    drawn, cursor = [], cursor or DataCursor()
    for _ in range(steps):
        step, cursor = source.take(count, cursor)
        drawn.append([prompt.id for prompt in step])
    return drawn, cursor


sizes = st.integers(1, 12).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n)))


@given(sizes, st.integers(0, 3))
def test_every_prompt_is_drawn_once_an_epoch_and_a_step_holds_none_twice(size, seed):
    n, count = size
    steps, cursor = draw(ShuffledPrompts(prompts(n), seed=seed), count, 6 * n)
    for step in steps:
        assert len(set(step)) == len(step) == count
    stream = [prompt_id for step in steps for prompt_id in step]
    assert len(stream) == 6 * n * count
    everything = {f"id{k}" for k in range(n)}
    for epoch in range(6 * count):
        assert set(stream[epoch * n : (epoch + 1) * n]) == everything
    assert cursor == DataCursor(epoch=6 * count, position=0)


@given(sizes, st.integers(0, 30), st.integers(0, 3))
def test_a_run_resumed_from_its_cursor_draws_what_it_would_have_drawn(size, steps, seed):
    n, count = size
    uninterrupted, _ = draw(ShuffledPrompts(prompts(n), seed=seed), count, steps + 7)
    before, cursor = draw(ShuffledPrompts(prompts(n), seed=seed), count, steps)
    # Another process, which knows the cursor alone.
    after, _ = draw(ShuffledPrompts(prompts(n), seed=seed), count, 7, cursor)
    assert before + after == uninterrupted


@given(st.integers(2, 12), st.data())
def test_a_step_holds_no_prompt_twice_even_when_its_size_changes(n, data):
    source, cursor = ShuffledPrompts(prompts(n), seed=0), DataCursor()
    for count in data.draw(st.lists(st.integers(1, n), min_size=1, max_size=20)):
        step, cursor = source.take(count, cursor)
        assert len({prompt.id for prompt in step}) == count


def test_asking_for_earlier_steps_again_gives_the_same():
    source = ShuffledPrompts(prompts(7), seed=0)
    first, _ = draw(source, 3, 20)
    assert draw(source, 3, 20)[0] == first


def test_an_epoch_that_ends_within_a_step_defers_what_the_step_holds():
    # The step holds c and d. Of the next shuffle it takes the first two others; c comes after.
    assert order_after(["c", "d"], ["c", "a", "d", "b", "e"], 2) == ["a", "b", "c", "d", "e"]
    assert order_after(["c"], ["a", "b", "c"], 2) == ["a", "b", "c"]


@pytest.mark.parametrize("count", [10, 40])
def test_each_epoch_has_an_order_of_its_own(count):
    steps, _ = draw(ShuffledPrompts(prompts(40), seed=0), count, 3 * 40 // count)
    stream = [prompt_id for step in steps for prompt_id in step]
    epochs = [stream[k * 40 : (k + 1) * 40] for k in range(3)]
    assert all(one != other for one, other in pairwise([*epochs, epochs[0]]))
    other_seed, _ = draw(ShuffledPrompts(prompts(40), seed=1), count, 1)
    assert other_seed[0] != steps[0]


def test_every_place_is_equally_likely():
    # 600 shuffles of 6: each prompt comes first 100 +- 4 x 9.1 times.
    firsts = [draw(ShuffledPrompts(prompts(6), seed=s), 1, 1)[0][0][0] for s in range(600)]
    assert all(abs(firsts.count(f"id{k}") - 100) < 37 for k in range(6))


def test_the_order_does_not_depend_on_the_order_of_the_data():
    forward, backward = prompts(20), prompts(20)[::-1]
    one, other = ShuffledPrompts(forward, seed=3), ShuffledPrompts(backward, seed=3)
    assert draw(one, 6, 10) == draw(other, 6, 10)
    assert one.digest() == other.digest()


def test_the_order_is_pinned():
    # A change of the rule would silently reorder the data of every run that is resumed.
    def shuffle(epoch):
        return sorted(
            (f"id{k}" for k in range(5)),
            key=lambda i: hashlib.sha256(f"prompt order 0 {epoch} {i}".encode()).digest(),
        )

    assert shuffle(0) == ["id3", "id4", "id2", "id1", "id0"]
    assert shuffle(1) == ["id1", "id0", "id3", "id2", "id4"]
    # The third step ends the first epoch with id0, so id0 waits until after that step.
    assert draw(ShuffledPrompts(prompts(5), seed=0), 2, 5)[0] == [
        ["id3", "id4"],
        ["id2", "id1"],
        ["id0", "id1"],
        ["id0", "id3"],
        ["id2", "id4"],
    ]


def test_the_digest_tells_other_data():
    digests = {ShuffledPrompts(prompts(n), seed=0).digest() for n in (1, 2, 3)}
    assert len(digests) == 3


def test_prompts_come_back_whole():
    source = ShuffledPrompts(prompts(3), seed=0)
    taken, _ = source.take(3, DataCursor())
    assert sorted(taken, key=lambda p: p.id) == prompts(3)
    assert len(source) == 3


@pytest.mark.parametrize("count", [0, -1, 4])
def test_a_step_that_cannot_be_filled_is_refused(count):
    with pytest.raises(DataError, match=rf"cannot draw {count} different prompts from 3"):
        ShuffledPrompts(prompts(3), seed=0).take(count, DataCursor())


@pytest.mark.parametrize("cursor", [DataCursor(position=3), DataCursor(epoch=-1)])
def test_a_cursor_of_other_data_is_refused(cursor):
    with pytest.raises(DataError, match="outside the data of 3 prompts"):
        ShuffledPrompts(prompts(3), seed=0).take(1, cursor)


@pytest.mark.parametrize("data", [[], [*prompts(2), prompts(1)[0]]])
def test_no_prompt_or_one_twice_is_refused(data):
    with pytest.raises(DataError, match="cannot be shuffled"):
        ShuffledPrompts(data, seed=0)
