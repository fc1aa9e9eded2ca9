"""The dispatcher keeps its promise on replicas that die, hang, lie or lag."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_megatron.rollout.errors import RequestRefusedError, RolloutError
from dynamo_megatron.rollout.vllm import dispatch
from dynamo_megatron.rollout.vllm.dispatch import Dispatcher
from dynamo_megatron.rollout.vllm.schedule import Planned, Schedule
from dynamo_megatron.rollout.vllm.wire import SampleRequest, Sampling
from tests.unit.rollout.vllm.scripted import (
    ScriptedFleet,
    answer,
    answer_last,
    answer_wrongly,
    die,
    endlessly,
    fail,
    hang,
    healthy,
    refuse,
    stand_still,
)

VERSION = 3
SAMPLING = Sampling(temperature=1.0, max_tokens=8, version=VERSION)
HANG_S = 0.05


@pytest.fixture(autouse=True)
def no_idle_waits(monkeypatch):
    monkeypatch.setattr(dispatch, "ANSWER_WITHIN_S", 0.01)


def work(count: int) -> list[Planned]:
    return [
        Planned(
            request=SampleRequest(key=f"p{k // 4}/{k % 4}", token_ids=(1, 2), seed=1000 + k),
            group=f"p{k // 4}",
            expected_tokens=8.0,
        )
        for k in range(count)
    ]


def run(fleet: ScriptedFleet, count: int, *, window: int = 100) -> list[tuple[int, str, int]]:
    """(replica, key, first token) of each response in the order of arrival."""
    found = []
    schedule = Schedule(work(count), window=window, num_replicas=len(fleet.ready))
    Dispatcher(
        fleet,
        schedule,
        SAMPLING,
        hang_timeout_s=HANG_S,
        on_sample=lambda replica, s: found.append((replica, s.key, s.token_ids[0])),
    ).run()
    assert schedule.done
    return found


def require_all(found, count: int) -> None:
    """Each request is answered once, and by the tokens of its own seed."""
    assert sorted(key for _, key, _ in found) == sorted(p.request.key for p in work(count))
    seeds = {p.request.key: p.request.seed % 97 for p in work(count)}
    assert all(seeds[key] == token for _, key, token in found)


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_each_request_is_answered_once_by_healthy_replicas(replicas):
    found = run(healthy(replicas), 23, window=4)
    require_all(found, 23)
    assert {replica for replica, _, _ in found} == set(range(replicas))


def test_a_replica_that_answers_slowly_gets_less():
    fleet = ScriptedFleet({0: [endlessly(answer(1))], 1: [()]})
    found = run(fleet, 40, window=4)
    require_all(found, 40)
    assert len(fleet.history[0].given) < len(fleet.history[1].given)


@pytest.mark.parametrize("loss", [die, fail])
def test_what_a_lost_replica_held_is_answered_elsewhere_with_the_same_seeds(loss):
    fleet = ScriptedFleet({0: [(answer(2), loss)], 1: [()]})
    found = run(fleet, 16)
    require_all(found, 16)
    assert [number for number, _ in fleet.lost] == [0]
    orphans = set(fleet.history[0].given) - {key for r, key, _ in found if r == 0}
    assert len(orphans) == 6
    assert orphans < set(fleet.history[1].given)


def test_a_replica_that_never_answers_is_lost_after_the_time_limit():
    fleet = ScriptedFleet({0: [(hang,)], 1: [()]})
    require_all(run(fleet, 8), 8)
    ((number, reason),) = fleet.lost
    assert number == 0
    assert "holds 4 requests and made no step" in reason
    assert "hang_timeout_s" in reason


def test_a_replica_that_answers_but_makes_no_step_is_lost_too():
    fleet = ScriptedFleet({0: [endlessly(stand_still)], 1: [()]})
    require_all(run(fleet, 8), 8)
    assert [number for number, _ in fleet.lost] == [0]


def test_a_replica_that_steps_without_an_answer_is_given_time():
    # One response an exchange, and one that is long in coming: steps go on.
    fleet = ScriptedFleet({0: [[answer(0)] * 5 + [answer()]]})
    require_all(run(fleet, 8), 8)
    assert fleet.lost == []


def test_the_only_replica_comes_back_and_finishes():
    fleet = ScriptedFleet({0: [(answer(3), die), (answer(1), die), ()]}, absent_for=3)
    require_all(run(fleet, 8), 8)
    assert [number for number, _ in fleet.lost] == [0, 0]
    assert len(fleet.history) == 3


def test_a_replica_that_came_back_takes_what_still_waits():
    slow = endlessly(answer(1))
    fleet = ScriptedFleet({0: [(die,), ()], 1: [slow]}, absent_for=2)
    found = run(fleet, 24, window=4)
    require_all(found, 24)
    assert len(fleet.history[-1].given) > 4


def test_without_any_replica_the_run_ends():
    fleet = ScriptedFleet({0: [(die,)], 1: [(die,)]})
    with pytest.raises(RolloutError, match="no replica is left, and none is being started again"):
        run(fleet, 8)


def test_a_request_that_kills_every_replica_ends_the_run():
    fleet = ScriptedFleet({0: [(die,)] * 9, 1: [(die,)] * 9})
    with pytest.raises(RolloutError, match="3 replicas in turn were lost"):
        run(fleet, 1)
    assert len(fleet.lost) == 3


def test_a_refused_request_ends_the_run_and_no_replica():
    fleet = ScriptedFleet({0: [(refuse,)], 1: [(refuse,)]})
    with pytest.raises(RequestRefusedError, match="does not take request p0/0"):
        run(fleet, 8)
    assert fleet.lost == []


def test_a_response_that_nobody_asked_for_ends_the_run():
    fleet = ScriptedFleet({0: [(answer_wrongly("p9/0"),)]})
    with pytest.raises(RolloutError, match=r"a response to p9/0, which it was not asked for"):
        run(fleet, 8)


def test_a_response_that_comes_twice_ends_the_run():
    fleet = ScriptedFleet({0: [(answer(1), answer_wrongly("p0/0"))]})
    with pytest.raises(RolloutError, match=r"p0/0, which it was not asked for or has answered"):
        run(fleet, 8)


def test_a_response_of_older_weights_ends_the_run():
    fleet = ScriptedFleet({0: [(answer(version=VERSION - 1),)]})
    with pytest.raises(RolloutError, match="from weights of version 2; 3 was asked for"):
        run(fleet, 8)


def test_what_a_listener_raises_comes_through():
    def refuse(replica, sample):
        raise KeyError(sample.key)

    fleet = healthy(1)
    schedule = Schedule(work(4), window=4, num_replicas=1)
    with pytest.raises(KeyError, match="p0/0"):
        Dispatcher(fleet, schedule, SAMPLING, hang_timeout_s=HANG_S, on_sample=refuse).run()


def test_a_replica_that_was_idle_is_not_lost_when_work_comes_late():
    # Replica 1 finishes at once and has nothing to do until 0 dies, longer than the time limit.
    slow = [answer(0)] * 30 + [die]
    fleet = ScriptedFleet({0: [slow], 1: [()]})
    require_all(run(fleet, 2), 2)
    assert [number for number, _ in fleet.lost] == [0]


@given(st.integers(0, 2**32 - 1).map(Random), st.integers(1, 40), st.integers(1, 9))
def test_exactly_the_requested_responses_whatever_happens(random, count, window):
    def script():
        acts = [answer(random.randint(0, 3)) for _ in range(random.randint(0, 6))]
        acts += [answer_last()] if not acts else []
        return [*acts, *([random.choice([die, fail])] if random.random() < 0.5 else [])]

    # Two losses in all, fewer than one request may see.
    fleet = ScriptedFleet({0: [script(), (), ()], 1: [script(), (), ()], 2: [()]})
    require_all(run(fleet, count, window=window), count)
