"""Metrics on disk: valid JSON, a step once, nothing lost in a crash."""

import json
import logging
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from dynamo_megatron.observe.sinks import JsonlSink, MultiSink, read_metrics


def strict_rows(path: Path) -> list[dict]:
    """The file's lines by a parser that refuses what is not JSON, such as NaN."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def write_steps(path: Path, steps: range, start_step: int = 0) -> None:
    sink = JsonlSink(path, start_step=start_step)
    for step in steps:
        sink.write(step, {"reward/mean": step / 10})
    sink.close()


def test_each_step_is_one_json_line_on_disk_at_once(tmp_path: Path):
    path = tmp_path / "run" / "metrics.jsonl"
    sink = JsonlSink(path)
    sink.write(0, {"reward/mean": 0.5, "allocation/hist": {8: 3, 24: 1}})
    # Not closed yet: a crash now must not lose the step.
    assert strict_rows(path) == [
        {"step": 0, "reward/mean": 0.5, "allocation/hist": {"8": 3, "24": 1}}
    ]
    sink.write(1, {"reward/mean": 0.25})
    sink.close()
    assert [row["step"] for row in strict_rows(path)] == [0, 1]


def test_non_finite_values_are_valid_json_and_come_back(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path)
    sink.write(0, {"a": math.nan, "b": math.inf, "c": -math.inf})
    sink.close()
    assert strict_rows(path) == [{"step": 0, "a": "NaN", "b": "Infinity", "c": "-Infinity"}]
    (row,) = read_metrics(path)
    assert math.isnan(row["a"])
    assert (row["b"], row["c"]) == (math.inf, -math.inf)


def test_numbers_of_numpy_and_torch_are_written_as_numbers(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path)
    sink.write(0, {"a": np.float32(0.5), "b": torch.tensor(0.25), "c": True, "d": 7, "step": 0.0})
    sink.close()
    assert path.read_text() == '{"step": 0, "a": 0.5, "b": 0.25, "c": 1, "d": 7}\n'


def test_a_resumed_run_cuts_the_steps_it_will_write_again(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    write_steps(path, range(5))
    write_steps(path, range(3, 6), start_step=3)
    assert [row["step"] for row in strict_rows(path)] == [0, 1, 2, 3, 4, 5]


def test_a_fresh_run_in_a_used_folder_starts_an_empty_file(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    write_steps(path, range(5))
    write_steps(path, range(2))
    assert [row["step"] for row in strict_rows(path)] == [0, 1]


def test_a_half_written_line_is_cut_on_resume(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    write_steps(path, range(3))
    with path.open("a") as file:
        file.write('{"step": 3, "rew')
    write_steps(path, range(3, 4), start_step=3)
    assert [row["step"] for row in strict_rows(path)] == [0, 1, 2, 3]
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_last_line_without_its_newline_is_not_run_into(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n{"step": 1}')
    write_steps(path, range(2, 3), start_step=2)
    assert [row["step"] for row in strict_rows(path)] == [0, 1, 2]


@pytest.mark.parametrize("step", [1, 0])
def test_a_step_is_refused_that_does_not_come_after_the_last(tmp_path: Path, step: int):
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.write(1, {})
    with pytest.raises(ValueError, match=f"step {step} was written after step 1"):
        sink.write(step, {})
    sink.close()


def test_reading_leaves_out_broken_lines_and_says_so(tmp_path: Path, caplog):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "a": 1}\n\nnonsense\n[1]\n{"a": 2}\n{"step": 0, "a": 3}\n')
    with caplog.at_level(logging.WARNING):
        rows = read_metrics(path)
    assert rows == [{"step": 0, "a": 3}, {"step": 1, "a": 1}]
    assert len(caplog.records) == 3


class Recorder:
    def __init__(self, calls: list, fails: bool = False) -> None:
        self.calls, self.fails = calls, fails

    def write(self, step, metrics) -> None:
        self.calls.append((step, dict(metrics)))

    def close(self) -> None:
        self.calls.append("closed")
        if self.fails:
            raise OSError("disk full")


@pytest.mark.parametrize("failing", [0, 1])
def test_a_multi_sink_writes_to_all_and_closes_all_even_when_one_fails(failing: int):
    first, second = [], []
    sink = MultiSink([Recorder(first, fails=failing == 0), Recorder(second, fails=failing == 1)])
    sink.write(3, {"a": 1.0})
    with pytest.raises(OSError, match="disk full"):
        sink.close()
    assert first == second == [(3, {"a": 1.0}), "closed"]
