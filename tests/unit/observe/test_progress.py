"""Progress: a bar for a terminal, few plain lines elsewhere, silence on other ranks."""

import io
import logging

from dynamo_megatron.observe.progress import Progress

METRICS = {
    "reward/mean": 0.25,
    "reward/pass_rate": 0.5,
    "train/entropy": 1.125,
    "time/step": 3.21,
    "allocation/hist": {8: 1},
}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def lines_of(caplog, *, seconds_a_step: float, num_steps: int, enabled: bool = True, start=0):
    times = [0.0]
    with caplog.at_level(logging.INFO):
        progress = Progress(
            num_steps,
            start_step=start,
            enabled=enabled,
            stream=io.StringIO(),
            interval_s=5.0,
            clock=lambda: times[0],
        )
        for step in range(start, num_steps):
            times[0] += seconds_a_step
            progress.write(step, METRICS)
        progress.close()
    return [record.getMessage() for record in caplog.records]


def test_a_terminal_shows_a_bar_with_the_step_s_values():
    stream = Terminal()
    progress = Progress(4, stream=stream)
    for step in range(4):
        progress.write(step, METRICS)
    progress.close()
    shown = stream.getvalue()
    for words in ("4/4", "reward=0.250", "pass=50.0%", "entropy=1.125", "s/step=3.2"):
        assert words in shown


def test_a_continued_run_s_bar_starts_where_the_run_stands():
    stream = Terminal()
    progress = Progress(10, start_step=6, stream=stream)
    assert "6/10" in stream.getvalue()
    progress.write(6, METRICS)
    progress.close()
    assert "7/10" in stream.getvalue()


def test_plain_lines_come_every_few_seconds_and_at_the_end(caplog):
    lines = lines_of(caplog, seconds_a_step=2.0, num_steps=8)
    assert [line.split()[1] for line in lines] == ["1/8", "4/8", "7/8", "8/8"]
    # 4 steps took 8 seconds: 4 more take 8.
    assert lines[1] == ("step 4/8  reward 0.250  pass 50.0%  entropy 1.125  s/step 3.2  left 00:08")


def test_the_time_left_of_a_continued_run_counts_its_own_steps(caplog):
    lines = lines_of(caplog, seconds_a_step=10.0, num_steps=12, start=10)
    assert lines[0].endswith("left 00:10")


def test_other_ranks_show_nothing(caplog):
    assert lines_of(caplog, seconds_a_step=9.0, num_steps=3, enabled=False) == []
    stream = Terminal()
    progress = Progress(3, enabled=False, stream=stream)
    progress.write(0, METRICS)
    progress.close()
    assert stream.getvalue() == ""


def test_a_held_out_score_stays_until_the_next(caplog):
    with caplog.at_level(logging.INFO):
        progress = Progress(2, stream=io.StringIO(), interval_s=0.0)
        progress.write(0, {"eval/pass@1": 0.4})
        progress.write(1, {"reward/mean": 0.1})
    assert "held-out 40.0%" in caplog.records[1].getMessage()


def sampling_lines(caplog, *, seconds_a_response: float, total: int, enabled: bool = True):
    times = [100.0]
    with caplog.at_level(logging.INFO):
        progress = Progress(3, enabled=enabled, stream=io.StringIO(), clock=lambda: times[0])
        for _ in range(2):
            progress.sampling(0, total, 0)
            for done in range(1, total + 1):
                times[0] += seconds_a_response
                progress.sampling(done, total, 1000 * done)
    return [record.getMessage() for record in caplog.records]


def test_a_long_sampling_says_every_half_minute_how_far_it_is(caplog):
    # 100 responses of 0.5 s: one line after 30 s, at response 60, in each of the two samplings
    line = "sampling: 60 of 100 responses, 60,000 tokens, 2,000 tokens/s"
    assert sampling_lines(caplog, seconds_a_response=0.5, total=100) == [line, line]


def test_a_short_sampling_and_other_ranks_say_nothing(caplog):
    assert sampling_lines(caplog, seconds_a_response=0.2, total=100) == []
    assert sampling_lines(caplog, seconds_a_response=9.0, total=100, enabled=False) == []


def test_a_second_round_does_not_begin_anew(caplog):
    times = [0.0]
    with caplog.at_level(logging.INFO):
        progress = Progress(3, stream=io.StringIO(), clock=lambda: times[0])
        progress.sampling(0, 2, 0)
        times[0] = 20.0
        progress.sampling(2, 2, 10)
        progress.sampling(2, 4, 10)
        times[0] = 40.0
        progress.sampling(3, 4, 80)
    assert [r.getMessage() for r in caplog.records] == [
        "sampling: 3 of 4 responses, 80 tokens, 2 tokens/s"
    ]


def test_the_bar_shows_the_sampling_until_the_step_is_done():
    stream, times = Terminal(), [0.0]
    progress = Progress(4, stream=stream, clock=lambda: times[0])
    progress.sampling(0, 64, 0)
    times[0] = 0.6
    progress.sampling(17, 64, 900)
    progress.sampling(18, 64, 950)  # at once: not drawn
    assert "rollouts=17/64" in stream.getvalue() and "18/64" not in stream.getvalue()
    progress.sampling(64, 64, 4000)
    assert "rollouts=64/64" in stream.getvalue()
    drawn = len(stream.getvalue())
    progress.write(0, METRICS)
    progress.close()
    assert "rollouts" not in stream.getvalue()[drawn:] and "1/4" in stream.getvalue()
