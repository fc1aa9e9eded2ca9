"""Verification while responses arrive: the verdicts of ``score``, only earlier."""

import os
import signal
import time
from pathlib import Path

import pytest

from dynamo_megatron.reward.job import CHUNK_CHARS, CHUNK_ITEMS, Job
from dynamo_megatron.reward.pool import RewardError, RewardPool
from dynamo_megatron.reward.process import Task
from dynamo_megatron.types import Verdict, VerdictStatus
from tests.unit.reward.test_pool import HERE, item, wait_until_gone


def wait_for(path: Path, limit_s: float = 20.0) -> bool:
    end = time.monotonic() + limit_s
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.005)
    return path.exists()


@pytest.fixture(scope="module")
def pool():
    with RewardPool(f"{HERE}:behave", workers=2, timeout_s=30.0) as shared:
        yield shared


def streamed(pool: RewardPool, items, *, pause_s: float = 0.0) -> list[Verdict]:
    with pool.stream() as scoring:
        for prompt, rollout in items:
            scoring.submit(prompt, rollout)
            time.sleep(pause_s)
        return scoring.verdicts()


def test_a_response_is_verified_while_the_next_one_is_still_awaited(pool, tmp_path):
    with pool.stream() as scoring:
        for name in ("first", "second"):
            scoring.submit(*item(f"mark {tmp_path / name}"))
            assert wait_for(tmp_path / name), "nothing is verified before the last one arrives"
        scoring.submit(*item("value int"))
        assert [verdict.reward for verdict in scoring.verdicts()] == [1.0, 1.0, 2.0]


def test_a_response_wakes_the_pool_from_its_sleep(pool, tmp_path, monkeypatch):
    monkeypatch.setattr("dynamo_megatron.reward.pool._POLL_S", 60.0)
    pool.check()
    with pool.stream() as scoring:
        time.sleep(0.1)
        scoring.submit(*item(f"mark {tmp_path / 'mark'}"))
        assert wait_for(tmp_path / "mark")
        assert [verdict.reward for verdict in scoring.verdicts()] == [1.0]


@pytest.mark.parametrize("pause_s", [0.0, 0.002])
def test_the_verdicts_are_those_of_score(pool, pause_s):
    responses = ["value true", "raise boom", "value nan", "exit 0", "value int", "die 3", "nope"]
    items = [item(response) for response in responses * 3]
    want = pool.score(items)
    assert {verdict.status for verdict in want} == {
        VerdictStatus.OK,
        VerdictStatus.ERROR,
        VerdictStatus.CRASH,
    }
    assert streamed(pool, items, pause_s=pause_s) == want


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("count", [0, 1, 200])
def test_every_item_gets_exactly_one_verdict_in_the_order_of_submission(workers, count):
    with RewardPool(f"{HERE}:length", workers=workers, timeout_s=5.0) as pool:
        for _ in range(2):
            verdicts = streamed(pool, [item("x" * k) for k in range(count)])
            assert [verdict.reward for verdict in verdicts] == [float(k) for k in range(count)]


def test_a_hanging_verification_is_charged_to_its_item_alone():
    items = [item("value int") for _ in range(40)]
    items[17] = item("hang")
    with RewardPool(f"{HERE}:behave", workers=2, timeout_s=1.0) as pool:
        verdicts = streamed(pool, items)
    assert [i for i, v in enumerate(verdicts) if v.status is not VerdictStatus.OK] == [17]
    assert verdicts[17].status is VerdictStatus.TIMEOUT


def test_a_pause_between_responses_is_not_charged_to_anybody():
    with RewardPool(f"{HERE}:behave", workers=1, timeout_s=1.0) as pool:
        pool.check()
        with pool.stream() as scoring:
            scoring.submit(*item("value int"))
            time.sleep(1.3)
            scoring.submit(*item("value int"))
            time.sleep(1.3)
            assert [verdict.reward for verdict in scoring.verdicts()] == [2.0, 2.0]


def test_a_worker_that_died_between_two_responses_is_replaced_at_no_cost(pool, tmp_path):
    pool.check()
    with pool.stream() as scoring:
        scoring.submit(*item("value int"))
        pids = pool.worker_pids
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        assert wait_until_gone(*pids)
        scoring.submit(*item(f"die_once {tmp_path / 'mark'}"))
        verdicts = scoring.verdicts()
    assert [verdict.reward for verdict in verdicts] == [2.0, 1.0]


def test_workers_that_cannot_start_are_an_error_at_the_next_response_and_at_the_end():
    with RewardPool("no_such_module:score", workers=1, timeout_s=5.0) as pool:
        with pool.stream() as scoring:
            end = time.monotonic() + 20.0
            with pytest.raises(RewardError, match="no_such_module"):
                while time.monotonic() < end:
                    scoring.submit(*item("x"))
                    time.sleep(0.01)
            with pytest.raises(RewardError, match="no_such_module"):
                scoring.verdicts()
        assert pool.worker_pids == ()


def test_a_session_left_early_leaves_nothing_behind(pool):
    start = time.monotonic()
    with pytest.raises(InterruptedError), pool.stream() as scoring:
        for _ in range(5):
            scoring.submit(*item("sleep 60"))
        raise InterruptedError
    assert time.monotonic() - start < 10.0
    assert [verdict.reward for verdict in pool.score([item("value int")])] == [2.0]


def test_the_pool_is_the_sessions_alone_until_it_is_left(pool):
    with pool.stream():
        for use in (lambda: pool.score([]), pool.stream().__enter__, pool.check):
            with pytest.raises(RewardError, match="session"):
                use()
    assert pool.score([item("value int")])[0].reward == 2.0


def test_sessions_leave_no_file_open(pool):
    streamed(pool, [item("value int")])
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        streamed(pool, [item("value int")])
    assert len(os.listdir("/proc/self/fd")) == before


def task(index: int, chars: int = 1) -> Task:
    return Task(index=index, response="x" * chars, answer="", prompt="")


def test_a_worker_takes_a_share_of_what_waits_and_the_last_ones_come_singly():
    job = Job(task(k) for k in range(400))
    # a quarter of each of the two workers' shares, at most 32: 400/8 = 50, then (400-32)/8 = 46
    assert [t.index for t in job.take(2)] == list(range(32))
    assert [t.index for t in job.take(2)] == list(range(32, 64))
    sizes = []
    while job.waiting:
        sizes.append(len(job.take(2)))
    assert sum(sizes) == 400 - 64 and sizes == sorted(sizes, reverse=True) and sizes[-1] == 1
    assert CHUNK_ITEMS == 32


def test_long_tasks_go_in_short_messages_and_tasks_put_back_are_next():
    job = Job(
        [task(0, CHUNK_CHARS + 1), task(1, CHUNK_CHARS // 2), *(task(k) for k in range(2, 40))]
    )
    assert [t.index for t in job.take(1)] == [0]
    second = job.take(1)
    assert [t.index for t in second] == list(range(1, 10))
    job.put_back(second[1:])
    assert [t.index for t in job.take(1)][:3] == [2, 3, 4]
