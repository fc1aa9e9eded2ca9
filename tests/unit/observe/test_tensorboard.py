"""What TensorBoard itself reads back from a run's folder."""

import math
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dynamo_megatron.observe.tensorboard import TensorBoardSink


def read(folder: Path) -> EventAccumulator:
    events = EventAccumulator(str(folder), {"scalars": 0, "histograms": 0})
    events.Reload()
    return events


def test_scalars_and_histograms_are_read_back(tmp_path: Path):
    sink = TensorBoardSink(tmp_path)
    sink.write(0, {"reward/mean": 0.5, "allocation/hist": {8: 3, 10: 1}})
    sink.write(1, {"reward/mean": math.nan, "allocation/hist": {"24": 2}})
    # Not closed yet: a step can be seen at once.
    events = read(tmp_path)
    values = [(event.step, event.value) for event in events.Scalars("reward/mean")]
    assert values[0] == (0, 0.5)
    assert math.isnan(values[1][1])
    first, second = (event.histogram_value for event in events.Histograms("allocation/hist"))
    assert (first.min, first.max, first.num, first.sum, first.sum_squares) == (8, 10, 4, 34, 292)
    assert list(zip(first.bucket_limit, first.bucket, strict=True)) == [
        (7.5, 0),
        (8.5, 3),
        (9.5, 0),
        (10.5, 1),
    ]
    assert (second.min, second.max, second.num) == (24, 24, 2)
    sink.close()


def test_an_empty_histogram_is_left_out(tmp_path: Path):
    sink = TensorBoardSink(tmp_path)
    sink.write(0, {"allocation/hist": {8: 0}, "a": 1.0})
    sink.close()
    assert read(tmp_path).Tags()["histograms"] == []


@pytest.mark.parametrize("start_step", [0, 3])
def test_steps_written_again_after_a_resume_are_seen_once(tmp_path: Path, start_step: int):
    first = TensorBoardSink(tmp_path)
    for step in range(5):
        first.write(step, {"a": 1.0})
    first.close()
    second = TensorBoardSink(tmp_path, start_step=start_step)
    for step in range(start_step, 4):
        second.write(step, {"a": 2.0})
    second.close()
    seen = [(event.step, event.value) for event in read(tmp_path).Scalars("a")]
    kept = [(step, 1.0) for step in range(start_step)]
    assert seen == kept + [(step, 2.0) for step in range(start_step, 4)]
