"""One call in a thread: its result, its error, and giving it up."""

import threading
import time

import pytest

from dynamo_megatron.stages.background import Background


def test_a_call_runs_beside_its_caller_and_gives_its_result():
    go, background = threading.Event(), Background()

    def work(check) -> bytes:
        assert go.wait(10.0), "the caller waits for the thread"
        check()
        return b"done"

    for _ in range(2):
        go.clear()
        background.start(work, name="work")
        go.set()
        assert background.result() == b"done"


def test_an_error_is_raised_where_the_result_is_taken_and_the_next_call_is_free_of_it():
    background = Background()
    background.start(lambda check: bytes(1 // 0), name="work")
    with pytest.raises(ZeroDivisionError):
        background.result()
    background.start(lambda check: b"again", name="work")
    assert background.result() == b"again"


def test_a_call_that_is_given_up_ends_at_its_next_check():
    background, ended = Background(), threading.Event()

    def work(check) -> bytes:
        try:
            while True:
                time.sleep(0.005)
                check()
        finally:
            ended.set()

    background.start(work, name="work")
    background.close()
    assert ended.is_set()
    background.close()
    background.start(lambda check: b"next", name="work")
    assert background.result() == b"next"


def test_a_call_that_does_not_end_is_left_behind_and_said_so(monkeypatch, caplog):
    monkeypatch.setattr("dynamo_megatron.stages.background.ABANDON_LIMIT_S", 0.05)
    background, go, late = Background(), threading.Event(), threading.Event()

    def slow(check) -> bytes:
        go.wait(20.0)
        late.set()
        return b"late"

    background.start(slow, name="the generation")
    background.close()
    assert "the generation does not end" in caplog.text
    # what it returns in the end is nobody's result
    background.start(lambda check: b"next" if go.wait(20.0) and late.wait(20.0) else b"", name="w")
    go.set()
    assert background.result() == b"next"
