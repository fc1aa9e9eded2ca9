"""What the entry point adds to an error of the operating system."""

from __future__ import annotations

import errno
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest

from dynamo_megatron import train
from dynamo_megatron.config import Config
from dynamo_megatron.evaluate.heldout import HeldoutResult
from dynamo_megatron.state import LoopState


@pytest.fixture(autouse=True)
def logging_as_before():
    """The entry point sets up logging for a whole process; this one goes on."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    yield
    for handler in set(root.handlers) - set(handlers):
        root.removeHandler(handler)
        handler.close()
    root.setLevel(level)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_says_where_and_how_to_go_on(monkeypatch, tmp_path, caplog, number):
    config = tmp_path / "run.yaml"
    config.write_text(
        f"run: {{dir: {tmp_path / 'run'}, num_steps: 1}}\n"
        "model: {path: 'builtin:tiny'}\n"
        "data: {train: [{kind: arithmetic, split: train, num_problems: 8}]}\n"
    )

    def full(config, on_failure):
        raise OSError(number, "No room")

    monkeypatch.setattr(train, "run", full)
    with caplog.at_level("ERROR"):
        assert train.main(["--config", str(config)]) == train.FAILED
    assert str(tmp_path / "run") in caplog.text and "run.resume=if_present" in caplog.text


def test_another_error_of_the_system_is_left_as_it_is():
    assert train._advice(OSError(errno.EACCES, "Permission denied"), Path("run")) == ""


@pytest.mark.parametrize(
    ("step", "saved", "heldout", "measured", "done"),
    [
        (4, 4, True, True, True),
        (4, 4, False, False, True),
        (4, 4, True, False, False),
        (4, None, True, True, False),
        (3, 3, False, False, False),
    ],
)
def test_a_run_that_is_done_starts_no_rollout_tier(step, saved, heldout, measured, done):
    values = {
        "run": {"dir": "runs/x", "num_steps": 4},
        "model": {"path": "builtin:tiny"},
        "data": {"train": [{"kind": "arithmetic", "split": "train", "num_problems": 8}]},
    }
    result = HeldoutResult(
        step=step, num_problems=1, pass_at_1=1.0, low=0.0, high=1.0, format_rate=1.0, failures=0
    )
    state = LoopState(step=step, evaluations=(result,) if measured else ())
    inputs = SimpleNamespace(heldout=("a problem",) if heldout else ())
    assert train._nothing_left(Config.model_validate(values), inputs, state, saved) is done
