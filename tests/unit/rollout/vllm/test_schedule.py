"""Who samples what: laws of the schedule under any order of completions and losses."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_megatron.rollout.errors import RolloutError
from dynamo_megatron.rollout.vllm.schedule import (
    CHUNK,
    MAX_ATTEMPTS,
    LengthHistory,
    Planned,
    Schedule,
)
from dynamo_megatron.rollout.vllm.wire import SampleRequest

SEEDS = st.integers(0, 2**32 - 1)


def planned(group: str, k: int, expected: float) -> Planned:
    request = SampleRequest(key=f"{group}/{k}", token_ids=(1, 2, 3), seed=k)
    return Planned(request=request, group=group, expected_tokens=expected)


def groups(*shapes: tuple[str, int, float]) -> list[Planned]:
    """For each (name, size, expected tokens) its rollouts."""
    return [planned(name, k, expected) for name, size, expected in shapes for k in range(size)]


def keys(dealt) -> dict[int, list[str]]:
    return {replica: [request.key for request in requests] for replica, requests in dealt.items()}


@st.composite
def workloads(draw):
    sizes = draw(st.lists(st.integers(1, 13), min_size=1, max_size=8))
    expected = [draw(st.sampled_from([1.0, 5.0, 5.0, 40.0])) for _ in sizes]
    shapes = [(f"p{i}", n, e) for i, (n, e) in enumerate(zip(sizes, expected, strict=True))]
    return groups(*shapes), draw(st.integers(1, 9)), draw(st.integers(1, 4))


def test_two_replicas_get_the_longest_in_whole_chunks_by_load():
    # 16 rollouts over 2 replicas: chunks of 16 // (2 * 4) = 2, each to the less loaded replica.
    work = groups(("short", 8, 1.0), ("long", 4, 10.0), ("middle", 4, 5.0))
    schedule = Schedule(work, window=100, num_replicas=2)
    assert keys(schedule.deal([0, 1], 2)) == {
        # loads, step by step: 20|0, 20|20, 30|20, 30|30, then 2 tokens a chunk, the first on a tie
        0: ["long/0", "long/1", "middle/0", "middle/1", "short/0", "short/1", "short/4", "short/5"],
        1: ["long/2", "long/3", "middle/2", "middle/3", "short/2", "short/3", "short/6", "short/7"],
    }
    assert schedule.waiting == 0


def test_what_is_beyond_the_window_waits_for_whoever_is_free_first():
    schedule = Schedule(groups(("a", 6, 5.0)), window=2, num_replicas=2)
    assert keys(schedule.deal([0, 1], 2)) == {0: ["a/0", "a/2"], 1: ["a/1", "a/3"]}
    assert schedule.waiting == 2
    schedule.complete(1, "a/3")
    schedule.complete(1, "a/1")
    assert keys(schedule.deal([0, 1], 2)) == {0: [], 1: ["a/4", "a/5"]}
    assert (schedule.held(0), schedule.held(1), schedule.waiting) == (2, 2, 0)


def test_no_replica_takes_more_than_its_share_though_others_are_busy():
    # 8 rollouts, 2 replicas, but only one can be sent to now: half stays for the other.
    schedule = Schedule(groups(("a", 8, 5.0)), window=100, num_replicas=2)
    assert keys(schedule.deal([0], 2)) == {0: ["a/0", "a/1", "a/2", "a/3"]}
    assert keys(schedule.deal([1], 2)) == {1: ["a/4", "a/5", "a/6", "a/7"]}


def test_many_rollouts_of_a_prompt_go_out_in_chunks_of_eight():
    schedule = Schedule(groups(("a", 64, 2.0), ("b", 64, 1.0)), window=12, num_replicas=2)
    dealt = keys(schedule.deal([0, 1], 2))
    assert CHUNK == 8
    # first a chunk of 8 each, then what is left of the window
    assert dealt[0] == [f"a/{k}" for k in (*range(0, 8), *range(16, 20))]
    assert dealt[1] == [f"a/{k}" for k in (*range(8, 16), *range(20, 24))]


def test_a_chunk_ends_where_the_prompt_does():
    schedule = Schedule(groups(("a", 3, 2.0), ("b", 61, 1.0)), window=100, num_replicas=2)
    dealt = keys(schedule.deal([0, 1], 2))
    assert dealt[0][:3] == ["a/0", "a/1", "a/2"]
    assert dealt[1][:8] == [f"b/{k}" for k in range(8)]


def test_what_a_lost_replica_held_goes_out_first_and_in_its_order():
    schedule = Schedule(groups(("long", 2, 9.0), ("short", 4, 1.0)), window=2, num_replicas=2)
    assert keys(schedule.deal([0, 1], 2)) == {0: ["long/0", "short/0"], 1: ["long/1", "short/1"]}
    schedule.complete(0, "short/0")
    assert schedule.give_up(1, "killed") == 2
    assert schedule.waiting == 4
    assert keys(schedule.deal([0], 1)) == {0: ["long/1"]}
    schedule.complete(0, "long/0")
    schedule.complete(0, "long/1")
    assert keys(schedule.deal([0], 1)) == {0: ["short/1", "short/2"]}


def test_a_lost_replica_that_held_nothing_costs_nothing():
    schedule = Schedule(groups(("a", 1, 1.0)), window=1, num_replicas=2)
    assert schedule.give_up(1, "killed") == 0
    assert keys(schedule.deal([0], 1)) == {0: ["a/0"]}


def test_a_request_that_every_replica_dies_of_ends_the_run():
    schedule = Schedule(groups(("a", 1, 1.0)), window=1, num_replicas=1)
    for _ in range(MAX_ATTEMPTS - 1):
        schedule.deal([0], 1)
        schedule.give_up(0, "out of memory.")
    schedule.deal([0], 1)
    with pytest.raises(RolloutError, match=r"3 replicas in turn.*a/0.*out of memory.*3 tokens"):
        schedule.give_up(0, "out of memory.")


@pytest.mark.parametrize(("replica", "key"), [(1, "a/0"), (0, "a/9"), (0, "a/1"), (7, "a/0")])
def test_a_response_nobody_asked_this_replica_for_is_an_error(replica, key):
    schedule = Schedule(groups(("a", 2, 1.0)), window=1, num_replicas=2)
    schedule.deal([0, 1], 2)  # a/0 to replica 0, a/1 to replica 1
    with pytest.raises(RolloutError, match=f"replica {replica} returned a response to {key}"):
        schedule.complete(replica, key)


def test_a_response_that_comes_twice_is_an_error():
    schedule = Schedule(groups(("a", 2, 1.0)), window=2, num_replicas=1)
    schedule.deal([0], 1)
    schedule.complete(0, "a/0")
    with pytest.raises(RolloutError, match="answered already"):
        schedule.complete(0, "a/0")


def test_nothing_to_sample_is_done_at_once():
    schedule = Schedule([], window=4, num_replicas=2)
    assert schedule.done
    assert schedule.deal([0, 1], 2) == {0: [], 1: []}


@given(workloads(), SEEDS.map(Random))
def test_every_request_completes_once_whatever_completes_and_is_lost(workload, random):
    work, window, num_replicas = workload
    schedule = Schedule(work, window=window, num_replicas=num_replicas)
    held: dict[int, list[str]] = {n: [] for n in range(num_replicas)}
    attempts = dict.fromkeys((p.request.key for p in work), 0)
    completed: list[str] = []
    while not schedule.done:
        free = [n for n in held if random.random() < 0.7] or list(held)
        remaining = len(work) - len(completed)
        for replica, requests in schedule.deal(free, num_replicas).items():
            held[replica] += [request.key for request in requests]
        assert sum(map(len, held.values())) + schedule.waiting == remaining
        assert all(len(mine) == schedule.held(n) <= window for n, mine in held.items())
        share = -(-remaining // num_replicas)
        if schedule.waiting:
            assert all(len(held[n]) >= min(window, share) for n in free)
        replica = random.choice(list(held))
        if random.random() < 0.2 and all(attempts[k] + 1 < MAX_ATTEMPTS for k in held[replica]):
            for key in held[replica]:
                attempts[key] += 1
            assert schedule.give_up(replica, "killed") == len(held[replica])
            held[replica] = []
            continue
        random.shuffle(held[replica])
        for _ in range(random.randint(0, len(held[replica]))):
            completed.append(held[replica].pop())
            schedule.complete(replica, completed[-1])
    assert sorted(completed) == sorted(p.request.key for p in work)


@given(workloads(), SEEDS.map(Random))
def test_nothing_longer_waits_while_something_shorter_is_given_out(workload, random):
    work, window, num_replicas = workload
    expected = {p.request.key: p.expected_tokens for p in work}
    schedule = Schedule(work, window=window, num_replicas=num_replicas)
    waiting = set(expected)
    while not schedule.done:
        given_out = [
            r.key for rs in schedule.deal(range(num_replicas), num_replicas).values() for r in rs
        ]
        waiting -= set(given_out)
        longest_left = max((expected[key] for key in waiting), default=0.0)
        assert all(expected[key] >= longest_left for key in given_out)
        replica = random.choice([n for n in range(num_replicas) if schedule.held(n)])
        schedule.complete(replica, random.choice(list(schedule._held[replica])))


@given(st.integers(1, 40), st.integers(1, 4))
def test_with_room_for_all_the_replicas_get_shares_that_differ_by_a_chunk_at_most(size, replicas):
    schedule = Schedule(groups(("a", size, 1.0)), window=1000, num_replicas=replicas)
    shares = [len(requests) for requests in schedule.deal(range(replicas), replicas).values()]
    assert sum(shares) == size
    assert max(shares) <= -(-size // replicas)


def test_expected_length_is_the_mean_so_far_and_the_limit_before():
    lengths = LengthHistory()
    assert lengths.expected("a", 64) == 64.0
    lengths.observe([("a", 10), ("b", 1), ("a", 20)])
    lengths.observe([("a", 60)])
    assert lengths.expected("a", 64) == 30.0  # (10 + 20 + 60) / 3
    assert lengths.expected("b", 64) == 1.0
    assert lengths.expected("c", 64) == 64.0
