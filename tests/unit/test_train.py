"""What the entry point adds to an error of the operating system."""

from __future__ import annotations

import errno
import logging
from pathlib import Path

import pytest

from dynamo_megatron import train


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
