"""The reward pool against real verifiers that fail in every way, in real processes."""

import os
import signal
import subprocess
import sys
import time
from multiprocessing import get_context
from pathlib import Path

import pytest

from dynamo_megatron.reward.pool import INTEGER_ANSWER, RewardError, RewardPool
from dynamo_megatron.reward.worker import MAX_PRINTED, load_verifier, verify
from dynamo_megatron.types import FinishReason, Prompt, Rollout, Verdict, VerdictStatus

HERE = "tests.unit.reward.verifiers"
OK, ERROR, TIMEOUT, CRASH = (
    VerdictStatus.OK,
    VerdictStatus.ERROR,
    VerdictStatus.TIMEOUT,
    VerdictStatus.CRASH,
)


def item(response: str, answer: str = "7", problem: str = "Compute 3+4") -> tuple[Prompt, Rollout]:
    prompt = Prompt(id="p", text=problem, token_ids=(1,), answer=answer, source="test")
    rollout = Rollout(
        prompt_id="p",
        index=0,
        token_ids=(2,),
        logprobs=(-0.5,),
        finish_reason=FinishReason.STOP,
        weight_version=0,
        seed=0,
        text=response,
    )
    return prompt, rollout


def alive(pid: int) -> bool:
    """Whether a process runs: a zombie does not, its parent here may be init."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def wait_until_gone(*pids: int, limit_s: float = 3.0) -> bool:
    end = time.monotonic() + limit_s
    while any(map(alive, pids)) and time.monotonic() < end:
        time.sleep(0.01)
    return not any(map(alive, pids))


@pytest.fixture(scope="module")
def pool():
    """Two workers that do what the response says; they must survive all of this module.

    The time limit is out of reach: on a busy machine a short one would be met by healthy workers.
    """
    with RewardPool(
        f"{HERE}:behave", workers=2, timeout_s=30.0, memory_limit_bytes=1 << 28
    ) as shared:
        yield shared


def test_integer_answers_are_scored_in_order():
    items = [item(f"Answer: {k % 10}") for k in range(100)] + [item("seven"), item("Answer: 12.5")]
    with RewardPool(workers=2, timeout_s=5.0) as pool:
        pool.check([prompt for prompt, _ in items])
        verdicts = pool.score(items)
    want = [
        Verdict(reward=float(k % 10 == 7), formatted=True, extracted=str(k % 10))
        for k in range(100)
    ]
    assert verdicts == [*want, Verdict(reward=0.0), Verdict(reward=0.0)]


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("count", [0, 1, 2, 31, 200])
def test_every_item_gets_exactly_one_verdict_for_any_number_of_workers(workers, count):
    with RewardPool(f"{HERE}:length", workers=workers, timeout_s=5.0) as pool:
        verdicts = pool.score([item("x" * k) for k in range(count)])
        assert [v.reward for v in verdicts] == [float(k) for k in range(count)]
        assert [v.reward for v in pool.score([item("xx")])] == [2.0]


def test_a_verifier_that_fails_is_never_a_wrong_answer(pool):
    responses = [
        "value true",
        "value int",
        "raise boom",
        "exit 0",
        "value nan",
        "value inf",
        "value none",
        "value text",
        "value list",
        "value overflow",
        "nonsense",
    ]
    verdicts = pool.score([item(r) for r in responses])
    assert [v.status for v in verdicts] == [OK, OK] + [ERROR] * 9
    assert [v.reward for v in verdicts] == [1.0, 2.0] + [0.0] * 9
    assert [v.message.partition(":")[0] for v in verdicts[2:]] == [
        "ZeroDivisionError",
        "SystemExit",
        "ValueError",
        "ValueError",
        "TypeError",
        "TypeError",
        "TypeError",
        "OverflowError",
        "KeyError",
    ]


@pytest.mark.parametrize("hang", ["sleep 60", "hang"])
def test_a_hanging_verification_is_killed_and_charged_to_its_item_alone(hang):
    items = [item("value int") for _ in range(40)]
    items[17] = item(hang)
    with RewardPool(f"{HERE}:behave", workers=2, timeout_s=1.0) as pool:
        pool.check()
        start = time.monotonic()
        verdicts = pool.score(items)
        assert 1.0 <= time.monotonic() - start < 5.0
        assert pool.score([item("value int")])[0].reward == 2.0
    assert [i for i, v in enumerate(verdicts) if v.status is not OK] == [17]
    assert verdicts[17].status is TIMEOUT
    assert verdicts[17].reward == 0.0
    assert "within 1 s" in verdicts[17].message
    assert all(v.reward == 2.0 for i, v in enumerate(verdicts) if i != 17)


def test_the_clock_runs_for_each_item_and_not_for_the_chunk():
    # The first message holds 8 items of 0.2 s: more than the limit together.
    with RewardPool(f"{HERE}:behave", workers=1, timeout_s=1.0) as pool:
        verdicts = pool.score([item("sleep 0.2")] * 8 + [item("value int")] * 24)
        assert [v.status for v in verdicts] == [OK] * 32


@pytest.mark.parametrize(
    ("response", "message"),
    [
        ("die 3", "exited with status 3"),
        ("segfault", "was killed by SIGSEGV"),
        ("eat_memory", "ran into its memory limit"),
    ],
)
def test_a_worker_that_dies_twice_over_an_item_is_a_crash_and_is_replaced(pool, response, message):
    verdicts = pool.score([item("value int")] * 5 + [item(response)] + [item("value int")] * 5)
    assert [v.status for v in verdicts] == [OK] * 5 + [CRASH] + [OK] * 5
    assert message in verdicts[5].message
    assert "tried 2 times" in verdicts[5].message
    assert pool.score([item("value int")])[0].reward == 2.0


def test_a_worker_that_dies_once_costs_nothing(pool, tmp_path):
    verdicts = pool.score([item("value int"), item(f"die_once {tmp_path / 'mark'}")])
    assert [(v.status, v.reward) for v in verdicts] == [(OK, 2.0), (OK, 1.0)]


def test_only_dying_items_are_lost_when_many_die(pool):
    responses = ["die 1" if k % 7 == 3 else "value int" for k in range(28)]
    statuses = [v.status for v in pool.score([item(r) for r in responses])]
    assert statuses == [CRASH if k % 7 == 3 else OK for k in range(28)]


def test_workers_that_were_killed_while_idle_are_replaced_at_no_cost(pool, tmp_path):
    pool.check()
    before = pool.worker_pids
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    assert wait_until_gone(*before)
    # One death is this item's own: were it charged for an idle worker's too, it would be a CRASH.
    (verdict,) = pool.score([item(f"die_once {tmp_path / 'mark'}")])
    assert (verdict.status, verdict.reward) == (OK, 1.0)
    assert not set(before) & set(pool.worker_pids)


def test_what_a_verifier_prints_or_reads_stays_out_of_the_protocol(pool):
    verdicts = pool.score([item("print hello"), item("read_input"), item("value int")])
    assert [(v.status, v.reward) for v in verdicts] == [(OK, 1.0), (OK, 0.0), (OK, 2.0)]


def test_a_verifier_that_prints_without_end_is_heard_only_at_first(capfd):
    with RewardPool(f"{HERE}:behave", workers=1, timeout_s=30.0) as pool:
        verdicts = pool.score([item(f"print {'words ' * 100}") for _ in range(50)])
    assert [v.status for v in verdicts] == [OK] * 50
    said = capfd.readouterr().err
    assert said.count("words") == pytest.approx(MAX_PRINTED / 6, abs=5)
    assert said.count("printed more than") == 1


def test_a_child_that_a_verifier_forks_does_not_answer_for_a_later_item():
    with RewardPool(f"{HERE}:behave", workers=1, timeout_s=30.0) as pool:
        # The child returns 5.0 for the first item while the second is under way.
        assert [v.reward for v in pool.score([item("fork")])] == [5.0]
        assert [v.reward for v in pool.score([item("sleep 0.5")])] == [1.0]


def test_the_children_of_a_dead_worker_die_with_it_and_do_not_delay_the_verdict(pool, tmp_path):
    pool.check()
    start = time.monotonic()
    (verdict,) = pool.score([item(f"leave_child {tmp_path / 'pid'}")])
    assert time.monotonic() - start < 3.0
    assert verdict.status is CRASH
    assert wait_until_gone(int((tmp_path / "pid").read_text()))


def test_a_worker_imports_nothing_heavy_and_starts_quickly(pool):
    (verdict,) = pool.score([item("modules")])
    assert verdict.extracted == ""
    before = os.times()
    subprocess.run(
        [sys.executable, "-c", "import dynamo_megatron.reward.worker"], check=True, timeout=10
    )
    after = os.times()
    cost = after.children_user + after.children_system
    assert cost - before.children_user - before.children_system < 0.5


@pytest.mark.parametrize(
    "response",
    [
        "",
        "\x00a\x00",
        "\ud800",
        "\ud83d\ude00",
        "\u2028\x85",
        "\x00\x00\x00\x07[1, 2]",
        "\U0001f600",
    ],
)
def test_responses_of_any_content_arrive_unchanged(response):
    with RewardPool(f"{HERE}:echo", workers=1, timeout_s=5.0) as pool:
        (verdict,) = pool.score([item(response, answer="\x00\ud800", problem="\udfff\n")])
    want = response + "|\x00\ud800|\udfff\n"
    assert verdict == Verdict(
        reward=float(len(response)),
        formatted=True,
        extracted=",".join(f"{ord(c):x}" for c in want),
    )


def test_huge_responses_pass_in_both_small_and_large_company():
    huge = "\U0001f600" * 3_000_000  # 12 MB, above the size of a message
    with RewardPool(f"{HERE}:length", workers=2, timeout_s=10.0) as pool:
        verdicts = pool.score([item("ab"), item(huge), item(huge), item("abc")])
    assert [v.reward for v in verdicts] == [2.0, 3e6, 3e6, 3.0]


def test_five_hundred_short_verifications_cost_well_under_a_second():
    items = [item("because\n" * 200 + f"Answer: {k}") for k in range(512)]
    elapsed = []
    with RewardPool(workers=1, timeout_s=30.0) as pool:
        pool.check()
        for _ in range(3):  # the best of three: the machine may be busy
            start = time.monotonic()
            assert sum(v.reward for v in pool.score(items)) == 1.0
            elapsed.append(time.monotonic() - start)
    assert min(elapsed) < 0.9


def test_a_reference_that_is_no_integer_is_an_error_verdict_and_refused_at_start():
    with RewardPool(workers=1, timeout_s=5.0) as pool:
        assert pool.score([item("Answer: 1", answer="1/2")])[0].status is ERROR
        good, bad = item("", answer="1,234")[0], item("", answer="12.5")[0]
        pool.check([good])
        with pytest.raises(RewardError, match=r"1 of 2 reference answers.*'12\.5'"):
            pool.check([good, bad])


@pytest.mark.parametrize(
    ("verifier", "words"),
    [
        ("no_such_module:score", ["ModuleNotFoundError", "no_such_module", "sys.path"]),
        (f"{HERE}:no_such_function", ["AttributeError", "no_such_function"]),
        (f"{HERE}:NOT_A_FUNCTION", ["TypeError", "not a function"]),
        (f"{HERE}:two_arguments", ["cannot be called as f(response, answer, prompt)"]),
    ],
)
def test_a_verifier_that_cannot_be_imported_is_named_at_start(verifier, words):
    with RewardPool(verifier, workers=2, timeout_s=5.0) as pool:
        with pytest.raises(RewardError) as caught:
            pool.check()
        assert [w for w in [*words, verifier] if w not in str(caught.value)] == []
        assert pool.worker_pids == ()
        with pytest.raises(RewardError):
            pool.score([item("x")])


def test_a_module_that_dies_while_it_is_imported_is_named(tmp_path, monkeypatch):
    (tmp_path / "dying_verifier.py").write_text("import os\nos._exit(5)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with (
        RewardPool("dying_verifier:score", workers=1, timeout_s=5.0) as pool,
        pytest.raises(RewardError, match="exited with status 5"),
    ):
        pool.check()


def test_the_workers_import_what_the_trainer_could_import(tmp_path, monkeypatch):
    (tmp_path / "my_verifier.py").write_text("def score(r, a, p):\n    return r == a\n")
    monkeypatch.syspath_prepend(tmp_path)
    with RewardPool("my_verifier:score", workers=1, timeout_s=5.0) as pool:
        assert [v.reward for v in pool.score([item("7"), item("8")])] == [1.0, 0.0]


@pytest.mark.parametrize(
    "verifier", ["", "score", "mod.score", "mod:", ":score", "mod:a:b", "m-d:f"]
)
def test_a_verifier_not_written_as_module_and_function_is_refused(verifier):
    with pytest.raises(ValueError, match="module:function"):
        RewardPool(verifier, workers=1, timeout_s=1.0)


@pytest.mark.parametrize(("workers", "timeout_s"), [(0, 1.0), (1, 0.0), (1, float("nan"))])
def test_a_pool_without_workers_or_time_is_refused(workers, timeout_s):
    with pytest.raises(ValueError, match="at least one worker"):
        RewardPool(workers=workers, timeout_s=timeout_s)


def test_close_ends_the_workers_even_hanging_ones_and_may_be_repeated():
    pool = RewardPool(f"{HERE}:behave", workers=2, timeout_s=5.0)
    pool.check()
    pids = pool.worker_pids
    assert len(pids) == 2
    pool.close()
    pool.close()
    assert not any(map(alive, pids))
    with pytest.raises(RewardError, match="closed"):
        pool.score([item("value int")])


def test_an_interrupted_call_leaves_no_stale_result_behind():
    with RewardPool(f"{HERE}:behave", workers=1, timeout_s=20.0) as pool:
        pool.check()
        previous = signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(InterruptedError))
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            with pytest.raises(InterruptedError):
                pool.score([item("sleep 0.6"), item("value true")])
        finally:
            signal.signal(signal.SIGALRM, previous)
        assert [v.reward for v in pool.score([item("value int")])] == [2.0]


def _score_forever(connection) -> None:
    pool = RewardPool(f"{HERE}:behave", workers=3, timeout_s=600.0)
    pool.check()
    connection.send(pool.worker_pids)
    pool.score([item("sleep 600"), item("hang"), item("value int")])


def test_no_worker_survives_a_trainer_that_is_killed():
    context = get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    trainer = context.Process(target=_score_forever, args=(sender,))
    trainer.start()
    assert receiver.poll(10.0)
    pids = receiver.recv()
    time.sleep(0.2)  # let two of them hang
    assert all(map(alive, pids))
    trainer.kill()
    trainer.join()
    assert wait_until_gone(*pids)


def _pool_from_a_thread(connection) -> None:
    from threading import Thread

    pool = RewardPool(f"{HERE}:behave", workers=1, timeout_s=5.0)
    thread = Thread(target=pool.check)
    thread.start()
    thread.join()
    time.sleep(0.2)
    connection.send(all(map(alive, pool.worker_pids)))
    pool.close()


def test_workers_outlive_the_thread_that_first_needed_them():
    context = get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    trainer = context.Process(target=_pool_from_a_thread, args=(sender,))
    trainer.start()
    assert receiver.poll(10.0)
    assert receiver.recv() is True
    trainer.join()


def test_the_built_in_verifier_is_loaded_like_any_other():
    verifier = load_verifier(INTEGER_ANSWER)
    assert verify(verifier, "Answer: 7", "7", "") == ("ok", 1.0, True, "7", "")
